//! The gate process: takes the lock, opens its parts and serves until it is stopped.

pub mod background;
pub mod lock;
mod mirrors;
mod network_listeners;
mod ports;
mod reload;
mod root_renewal;
mod sandbox_listeners;
pub mod shutdown;
mod supervisor;
pub mod tools;
pub mod watchdog;

use std::mem::ManuallyDrop;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result};
use arc_swap::ArcSwap;
use config::{Secret, Settings, Sources};
use control::gate::{Gate, Streams};
use control::health::HealthRegistry;
use control::metrics::ControlMetrics;
use control::sandboxes::Sandboxes;
use control::wall_now;
use credentials::service::CredentialService;
use decide::hold::Questions;
use decide::snapshot::{CurrentPolicy, PolicySnapshot};
use egress::authority::CertificateAuthority;
use egress::dialer::Dialer;
use egress::mirror::Mirrors;
use egress::services::{ServiceDependencies, Services};
use listen::PrivateSocket;
use mcp::fingerprint::Fingerprints;
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use policy::audit::AuditEvent;
use sandbox::manager::{HelperProgram, Manager};
use sandbox::pack_reader::PackReaderPool;
use store::audit::{AuditOptions, FullQueuePolicy, JsonlOptions};
use store::{Store, StoreOptions};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::{Mutex, Notify, mpsc};
use tokio::time::timeout_at;
use tokio_util::sync::CancellationToken;

use crate::exit::{CliError, CliExit};
use crate::paths::Paths;
use crate::telemetry::log_file::LogFile;
use crate::telemetry::process_metrics::ProcessMetrics;
use crate::telemetry::redact::Redactor;
use crate::telemetry::{LogSink, Telemetry};
use lock::StateLock;
use network_listeners::NetworkListeners;
use ports::{PackReaderPort, SocketOwnerLookup, StoreAuditSink, StoreRegistry};
use reload::Reloader;
use sandbox_listeners::SandboxListeners;
use shutdown::Deadline;
use supervisor::Supervisor;
use tools::ToolService;
use watchdog::WatchdogPipe;

/// How often expired registrations are removed. Expiry itself is checked on each use.
const PRUNE_INTERVAL: Duration = Duration::from_secs(60 * 60);

/// Name of the health check that the configured policies are in force.
const POLICY_LOADED: &str = "policy_loaded";

/// The argument that makes this program a sandbox's init.
pub const INIT_ARGUMENT: &str = "__init";

/// The argument that makes this program a git worker.
pub const WORKER_ARGUMENT: &str = "__worker";

/// The argument that makes this program the pack reader of one push.
pub const PACK_READER_ARGUMENT: &str = "__judge-push";

/// Maximum number of pushes that are read concurrently. Each uses one CPU.
const MAX_PACK_READERS: usize = 2;

/// Time after which the gate has finished the work of its start: the first check of the
/// configuration files and the first removal of expired entries.
const STARTUP_WORK_DURATION: Duration = Duration::from_secs(3);

/// Reads an environment variable, for `${NAME}` in the configuration.
pub fn read_environment_variable(name: &str) -> Option<String> {
    std::env::var(name).ok()
}

/// How a gate was started.
#[derive(Debug)]
pub enum Start {
    /// Started by an operator or a service manager, which handles restarts.
    Foreground,
    /// Started by a watchdog.
    Detached {
        /// How the previous gate died, if it did.
        after_death: Option<String>,
    },
}

/// Runs a gate until it is stopped.
pub fn run(paths: &Paths, verbose: u8, start: Start) -> Result<CliExit> {
    let (mut watchdog, after_death) = match start {
        Start::Foreground => (None, None),
        Start::Detached { after_death } => (Some(WatchdogPipe::take_stdout()?), after_death),
    };
    let detached = watchdog.is_some();
    harden(detached)?;
    paths.prepare()?;
    // The kernel releases the lock when the process ends, so that a process that waits for the
    // lock finds no leftovers of this gate.
    let _lock = ManuallyDrop::new(StateLock::take(&paths.lock())?);
    watchdog::clear_failure(&paths.state_dir);
    let sources = Sources::read(paths.config.current(), &read_environment_variable);
    let sources = sources.map_err(|problems| CliError::invalid_config(&problems))?;
    let settings = sources.settings(&read_environment_variable);
    let settings = settings.map_err(|problems| CliError::invalid_config(&problems))?;
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .thread_name("palisade")
        .build()
        .context("cannot start the runtime")?;
    let telemetry = {
        // The trace exporter sends from this runtime.
        let _runtime_guard = runtime.enter();
        let sink = if detached {
            LogSink::File(LogFile::open(&paths.log())?)
        } else {
            LogSink::Stderr
        };
        Arc::new(Telemetry::start(&settings, verbose, sink)?)
    };
    let served = runtime.block_on(serve(
        paths,
        &sources,
        settings,
        Arc::clone(&telemetry),
        &mut watchdog,
        after_death,
    ));
    if let Err(error) = &served {
        // In the background, the log is the only place where the error is visible.
        tracing::error!(error = format!("{error:#}"), "gate failed");
    }
    let for_traces = match &served {
        Ok((_, deadline)) => deadline.for_traces(),
        Err(_) => Deadline::MAX_TRACES,
    };
    runtime.block_on(async {
        let last = tokio::task::spawn_blocking(move || telemetry.finish());
        if tokio::time::timeout(for_traces, last).await.is_err() {
            tracing::warn!("exporting the last traces timed out");
        }
    });
    runtime.shutdown_timeout(Duration::from_secs(1));
    served.map(|(exit, _)| exit)
}

/// Forbids core dumps, debuggers and files for other users, because the gate holds keys. Raises
/// the limit of descriptors to its maximum, because the gate holds a dozen sockets per sandbox.
fn harden(detached: bool) -> Result<()> {
    let (_, max) = getrlimit(Resource::RLIMIT_NOFILE).context("cannot read the file limit")?;
    setrlimit(Resource::RLIMIT_NOFILE, max, max).context("cannot raise the file limit")?;
    nix::sys::prctl::set_dumpable(false).context("cannot forbid core dumps")?;
    nix::sys::stat::umask(nix::sys::stat::Mode::from_bits_truncate(0o077));
    if detached {
        nix::unistd::setsid().context("cannot detach from the terminal")?;
    }
    Ok(())
}

async fn serve(
    paths: &Paths,
    sources: &Sources,
    settings: Settings,
    telemetry: Arc<Telemetry>,
    watchdog: &mut Option<WatchdogPipe>,
    after_death: Option<String>,
) -> Result<(CliExit, Deadline)> {
    let stop = CancellationToken::new();
    listen_for_signals(stop.clone())?;
    // From now on SIGHUP requests a reload; its default would end the process.
    let hangup = signal(SignalKind::hangup()).context("cannot listen for SIGHUP")?;
    // The socket is bound first: nothing is written while another gate may be listening on it.
    let socket = PrivateSocket::bind(&paths.control, 0o600).await;
    let socket = Arc::new(socket.context("cannot bind the control socket (see --control)")?);
    let store = open_store(paths, &settings).await?;
    let health_registry = Arc::new(HealthRegistry::default());
    health_registry.set_check("config_current", Ok(()));
    health_registry.set_listeners("control", [paths.control.display()]);
    health_registry.set_config(paths.config.current());
    if let Some(cause) = after_death {
        tracing::warn!(cause, "gate restarted after it died");
        health_registry.set_note("restarted", Some(format!("after the gate died: {cause}")));
    }
    let process_metrics = ProcessMetrics::default();
    let counters = ControlMetrics::default();
    let manager = open_manager(paths).await?;
    let socket_owners = SocketOwnerLookup(manager.backend().clone());
    let settings = Arc::new(settings);
    let policy = load_policy(Arc::clone(&settings)).await?;
    let traffic = open_traffic(
        paths,
        &store,
        socket_owners,
        &policy,
        telemetry.redactor.clone(),
    )
    .await?;
    let network_listeners = NetworkListeners::new(
        Arc::clone(&traffic),
        Arc::clone(&health_registry),
        stop.clone(),
    );
    let network_listeners = Arc::new(network_listeners);
    let mcp_metrics = mcp::metrics::Metrics::default();
    let metrics = process_metrics.registry(store.clone(), &counters, &traffic, &mcp_metrics);
    let metrics = Arc::new(metrics);
    let sandbox_launcher = Arc::new(tools::SandboxLauncher::default());
    let dependencies = tools::McpDependencies {
        policy: Arc::clone(&policy),
        questions: traffic.questions().clone(),
        audit: Arc::new(StoreAuditSink(store.clone())),
        fingerprints: open_fingerprints(paths).await?,
        health_registry: Arc::clone(&health_registry),
        registry: Arc::clone(&metrics),
        metrics: mcp_metrics,
        sandbox_launcher: Arc::clone(&sandbox_launcher) as _,
    };
    let tools = open_tools(Arc::clone(&settings), dependencies, &stop).await?;
    // Every bundle was read: the start fails above if one is invalid.
    health_registry.set_check(POLICY_LOADED, Ok(()));
    traffic.serve_tools(Arc::clone(&tools) as _);
    let (reload, requests) = mpsc::channel(8);
    let changed = Arc::new(Notify::new());
    let reloader = Arc::new(Reloader {
        config: paths.config.clone(),
        health_registry: Arc::clone(&health_registry),
        process_metrics: process_metrics.clone(),
        telemetry,
        store: store.clone(),
        policy: Arc::clone(&policy),
        traffic: Arc::clone(&traffic),
        network_listeners: Arc::clone(&network_listeners),
        tools: Arc::clone(&tools),
        requests: Mutex::new(requests),
        hangup: Mutex::new(hangup),
        last_fingerprint: Mutex::new(sources.fingerprint()),
        changed: Arc::clone(&changed),
    });
    reloader.announce(&settings);
    let sandbox_listeners = Arc::new(SandboxListeners::new(Arc::clone(&traffic), stop.clone()));
    let sandboxes = Sandboxes::new(
        manager,
        Arc::clone(&sandbox_listeners) as _,
        paths.trust(),
        Arc::clone(traffic.credentials()),
    );
    sandboxes.recover_after_restart(&store).await?;
    network_listeners.listen(&settings).await;
    let gate = Arc::new(Gate {
        store: store.clone(),
        sandboxes,
        traffic: Arc::clone(&traffic),
        state_dir: paths.state_dir.clone(),
        policy: Arc::clone(&policy),
        health_registry: Arc::clone(&health_registry),
        metrics,
        bridge: Arc::clone(tools.bridge()),
        counters,
        reload,
        stop: stop.clone(),
        streams: Streams::default(),
    });
    sandbox_launcher.set_gate(&gate);

    let supervisor = Supervisor::new(Arc::clone(&health_registry), process_metrics, stop.clone());
    supervisor.start("control", {
        let (socket, gate) = (Arc::clone(&socket), Arc::clone(&gate));
        move |stop| {
            let (socket, gate) = (Arc::clone(&socket), Arc::clone(&gate));
            async move {
                control::serve::serve(&socket, gate, stop).await;
                Ok(())
            }
        }
    });
    supervisor.start("reload", move |stop| Arc::clone(&reloader).run(stop));
    supervisor.start("prune", {
        let traffic = Arc::clone(&traffic);
        move |stop| prune_traffic(Arc::clone(&traffic), stop)
    });
    supervisor.start("mirrors", {
        let traffic = Arc::clone(&traffic);
        move |stop| {
            let (health_registry, changed) = (Arc::clone(&health_registry), Arc::clone(&changed));
            mirrors::maintain(Arc::clone(&traffic), health_registry, changed, stop)
        }
    });
    supervisor.start("repack", {
        let traffic = Arc::clone(&traffic);
        move |stop| mirrors::repack(Arc::clone(&traffic), stop)
    });
    supervisor.start("expiry", {
        let store = store.clone();
        move |stop| prune_hourly(store.clone(), stop)
    });
    supervisor.start("root certificate", {
        let gate = Arc::clone(&gate);
        move |stop| root_renewal::maintain(Arc::clone(&gate), stop)
    });
    supervisor.start(tools::TASK, {
        let tools = Arc::clone(&tools);
        move |_| {
            let tools = Arc::clone(&tools);
            async move {
                tools.maintain().await;
                Ok(())
            }
        }
    });
    tools.listen(&settings).await;
    announce_ready(paths, watchdog.as_mut())?;
    tokio::spawn(release_startup_memory());

    stop.cancelled().await;
    let limit = policy.settings().server.shutdown_timeout;
    let deadline = Deadline::starting_now(limit);
    if let Some(watchdog) = watchdog {
        watchdog.report_stopping();
    }
    tracing::info!("gate stopping");
    // Sandboxes keep running; their connections end here, and the next gate serves them again.
    let draining = async {
        tokio::join!(
            supervisor.drain(),
            sandbox_listeners.drain(),
            network_listeners.drain()
        );
    };
    let (drained, ended) = tokio::join!(
        timeout_at(deadline.cut_off(), draining),
        // Tools end concurrently with the drain, because a tool may need time.
        timeout_at(deadline.end(), tools.drain(deadline.cut_off())),
    );
    if drained.is_err() {
        tracing::warn!(
            ?limit,
            "requests in flight were cut off at the shutdown limit"
        );
    }
    if ended.is_err() {
        tracing::error!(?limit, "tool processes did not end in time");
    }
    drop(socket);
    if timeout_at(deadline.end(), traffic.finish()).await.is_err() {
        tracing::error!("writing the last audit records of the traffic timed out");
    }
    let exit = match timeout_at(deadline.end(), close(&store)).await {
        Ok(Ok(())) => {
            tracing::info!("gate stopped");
            CliExit::Ok
        }
        Ok(Err(error)) => {
            tracing::error!(%error, "closing the audit log failed");
            CliExit::Failed
        }
        Err(_) => {
            tracing::error!("closing the audit log timed out");
            CliExit::Failed
        }
    };
    Ok((exit, deadline))
}

/// The first SIGTERM or SIGINT starts a graceful shutdown, the second ends the process at once.
/// The watchdog's signal does not count: a service manager signals gate and watchdog together.
pub fn listen_for_signals(stop: CancellationToken) -> Result<()> {
    let mut terminate = signal(SignalKind::terminate()).context("cannot listen for SIGTERM")?;
    let mut interrupt = signal(SignalKind::interrupt()).context("cannot listen for SIGINT")?;
    let mut watchdog = signal(watchdog::STOP).context("cannot listen for SIGUSR1")?;
    tokio::spawn(async move {
        let mut is_stopping = false;
        loop {
            let number = tokio::select! {
                _ = terminate.recv() => 15,
                _ = interrupt.recv() => 2,
                _ = watchdog.recv() => {
                    stop.cancel();
                    continue;
                }
            };
            if is_stopping {
                tracing::warn!("second signal received; exiting at once");
                std::process::exit(128 + number);
            }
            is_stopping = true;
            stop.cancel();
        }
    });
    Ok(())
}

async fn open_store(paths: &Paths, settings: &Settings) -> Result<Store> {
    let options = StoreOptions {
        dir: paths.state_dir.clone(),
        audit: audit_options(settings),
        now: wall_now(),
    };
    let store = tokio::task::spawn_blocking(|| Store::open(options)).await??;
    let health = store.health();
    if !health.registry_accessible {
        let reason = health.error.unwrap_or_default();
        tracing::error!(reason, "registry unavailable; all traffic is refused");
        return Ok(store);
    }
    let pruned = store.prune_expired(wall_now()).await?;
    let registered = store.registry().len();
    tracing::info!(registered, pruned = pruned.len(), "registry opened");
    store
        .audit()
        .record_durable(AuditEvent::lifecycle("gate_started", None), wall_now())
        .await?;
    Ok(store)
}

/// Opens the certificate authority, the dialer and the mirrors on a blocking thread: they read
/// files.
async fn open_traffic(
    paths: &Paths,
    store: &Store,
    socket_owners: SocketOwnerLookup,
    policy: &Arc<CurrentPolicy>,
    redactor: Redactor,
) -> Result<Arc<Services>> {
    let observer = move |name: &str, value: &Secret| {
        redactor.add_secrets([(name, value.expose())]);
    };
    let (dir, settings) = (paths.state_dir.clone(), Arc::clone(&policy.load().settings));
    let opened = tokio::task::spawn_blocking(move || {
        let authority = CertificateAuthority::open(&dir, wall_now())?;
        let dialer = Dialer::new(&settings)?;
        let credentials = CredentialService::open(&dir, Box::new(observer))
            .context("cannot open the placeholders of credentials")?;
        let mirrors = Mirrors::open(&dir.join("mirrors"))?;
        anyhow::Ok((authority, dialer, credentials, mirrors))
    });
    let (authority, dialer, credentials, mirrors) = opened.await??;
    Ok(Services::new(ServiceDependencies {
        policy: Arc::clone(policy),
        questions: Questions::default(),
        registry: Arc::new(StoreRegistry::new(store.clone())),
        audit: Arc::new(StoreAuditSink(store.clone())),
        socket_owners: Arc::new(socket_owners),
        authority: Arc::new(ArcSwap::from_pointee(authority)),
        dialer,
        credentials: Arc::new(credentials),
        pack_reader: Some(Arc::new(PackReaderPort(pack_readers()))),
        spool: paths.state_dir.join("spool"),
        mirrors,
    }))
}

/// Loads the policy of `settings` on a blocking thread: policy bundles are files.
pub async fn load_policy(settings: Arc<Settings>) -> Result<Arc<CurrentPolicy>> {
    let loading = tokio::task::spawn_blocking(move || PolicySnapshot::load(settings));
    Ok(Arc::new(CurrentPolicy::new(loading.await??)))
}

/// Opens the fingerprints of tool definitions.
async fn open_fingerprints(paths: &Paths) -> Result<Fingerprints> {
    let path = paths.state_dir.join("tools.json");
    let opening = move || Fingerprints::open(&path);
    Ok(tokio::task::spawn_blocking(opening).await??)
}

/// Opens the tool service on a blocking thread: policy bundles are files.
pub async fn open_tools(
    settings: Arc<Settings>,
    dependencies: tools::McpDependencies,
    stop: &CancellationToken,
) -> Result<Arc<ToolService>> {
    let stop = stop.clone();
    let opening = move || ToolService::open(&settings, dependencies, &stop);
    Ok(Arc::new(tokio::task::spawn_blocking(opening).await??))
}

/// The pool of pack readers, which are child processes of this program.
fn pack_readers() -> PackReaderPool {
    PackReaderPool::new(
        own_program().path,
        vec![PACK_READER_ARGUMENT.into()],
        MAX_PACK_READERS,
    )
}

async fn open_manager(paths: &Paths) -> Result<Manager> {
    let state = paths.state_dir.clone();
    let manager = tokio::task::spawn_blocking(move || Manager::open(&state, own_program()));
    Ok(manager.await??)
}

/// The path of this program, which stays valid when an update replaces the file, and the arguments
/// that `main` handles.
pub fn own_program() -> HelperProgram {
    HelperProgram {
        path: PathBuf::from("/proc/self/exe"),
        init: vec![INIT_ARGUMENT.into()],
        worker: vec![WORKER_ARGUMENT.into()],
    }
}

async fn close(store: &Store) -> Result<()> {
    if store.health().registry_accessible {
        let event = AuditEvent::lifecycle("gate_stopped", None);
        if let Err(error) = store.audit().record_durable(event, wall_now()).await {
            tracing::error!(%error, "recording the stop in the audit log failed");
        }
    }
    Ok(store.close().await?)
}

async fn prune_hourly(store: Store, stop: CancellationToken) -> Result<()> {
    let mut hour = tokio::time::interval(PRUNE_INTERVAL);
    hour.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    hour.tick().await; // The first tick is immediate, and `open_store` has just pruned.
    loop {
        tokio::select! {
            () = stop.cancelled() => return Ok(()),
            _ = hour.tick() => {}
        }
        match store.prune_expired(wall_now()).await {
            Ok(pruned) => tracing::debug!(pruned = pruned.len(), "expired registrations removed"),
            Err(error) => tracing::warn!(%error, "removing expired registrations failed"),
        }
    }
}

async fn prune_traffic(traffic: Arc<Services>, stop: CancellationToken) -> Result<()> {
    stop.run_until_cancelled(traffic.prune_regularly()).await;
    Ok(())
}

/// The store's options from the audit section.
pub fn audit_options(settings: &Settings) -> AuditOptions {
    let audit = &settings.audit;
    AuditOptions {
        jsonl: audit.jsonl.clone().map(JsonlOptions::at),
        on_full: match audit.on_full {
            config::section::audit::OnFullSetting::Block => FullQueuePolicy::Block,
            config::section::audit::OnFullSetting::Drop => FullQueuePolicy::Drop,
        },
        max_bytes: audit.max_bytes,
    }
}

/// Releases memory that only the start needed: most of an idle gate's memory is pages of its
/// executable.
async fn release_startup_memory() {
    tokio::time::sleep(STARTUP_WORK_DURATION).await;
    let released =
        tokio::task::spawn_blocking(sandbox::startup_memory::release_startup_memory).await;
    if let Ok(Err(error)) = released {
        tracing::debug!(%error, "releasing startup memory failed");
    }
}

/// Reports that all listeners are open: to the watchdog, or on stderr.
fn announce_ready(paths: &Paths, watchdog: Option<&mut WatchdogPipe>) -> Result<()> {
    let control = paths.control.display().to_string();
    tracing::info!(control, pid = std::process::id(), "gate is up");
    match watchdog {
        Some(watchdog) => watchdog.report_ready()?,
        None => crate::output::print_message("ready"),
    }
    Ok(())
}
