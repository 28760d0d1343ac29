//! The gate process: takes its place, opens its parts, serves until told to stop.

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
use config::{Settings, Sources};
use control::gate::{Gate, Streams};
use control::health::HealthRegistry;
use control::metrics::ControlMetrics;
use control::sandboxes::Sandboxes;
use control::wall_now;
use decide::hold::Questions;
use decide::snapshot::{CurrentPolicy, PolicySnapshot};
use egress::authority::Authority;
use egress::dialer::Dialer;
use egress::mirror::Mirrors;
use egress::services::{Parts, Services};
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

use crate::exit::{Exit, Failure};
use crate::paths::Paths;
use crate::telemetry::log_file::LogFile;
use crate::telemetry::process_metrics::ProcessMetrics;
use crate::telemetry::{Sink, Telemetry};
use lock::StateLock;
use network_listeners::NetworkListeners;
use ports::{PackReaderPort, SocketOwnerLookup, StoreAuditSink, StoreRegistry};
use reload::Reloader;
use sandbox_listeners::SandboxListeners;
use shutdown::Deadline;
use supervisor::Supervisor;
use tools::Tools;
use watchdog::WatchdogPipe;

/// How often rows that have expired are removed. Expiry itself is checked on each use.
const PRUNE_EVERY: Duration = Duration::from_secs(60 * 60);

/// The check that the policies which were configured last are in force.
const POLICY_LOADED: &str = "policy_loaded";

/// The word that makes this program a sandbox's init.
pub const INIT: &str = "__init";

/// The word that makes it a worker.
pub const WORKER: &str = "__worker";

/// The word that makes it the reader of one push.
pub const JUDGE: &str = "__judge-push";

/// Pushes that are read at once; others wait. Each takes a processor.
const MOST_READERS: usize = 2;

/// What is begun when the gate is up is over by then: the first look at the settings' files,
/// the first sweep.
const SETTLED: Duration = Duration::from_secs(3);

/// The variables that `${NAME}` in the configuration may name: this process's own.
pub fn environment(name: &str) -> Option<String> {
    std::env::var(name).ok()
}

/// How a gate was started.
#[derive(Debug)]
pub enum Start {
    /// By a person or a service manager, who see to its restarts.
    Foreground,
    /// By a watchdog.
    Detached {
        /// How the gate before this one died, if it did.
        after_death: Option<String>,
    },
}

/// Runs a gate until it is stopped.
pub fn run(paths: &Paths, verbose: u8, start: Start) -> Result<Exit> {
    let (mut watchdog, after_death) = match start {
        Start::Foreground => (None, None),
        Start::Detached { after_death } => (Some(WatchdogPipe::take_stdout()?), after_death),
    };
    let detached = watchdog.is_some();
    harden(detached)?;
    paths.prepare()?;
    // Free when the process is gone, not a moment before: who waits for it finds nothing left.
    let _lock = ManuallyDrop::new(StateLock::take(&paths.lock())?);
    watchdog::clear_failure(&paths.state_dir);
    let sources = Sources::read(paths.config.current(), &environment);
    let sources = sources.map_err(|problems| Failure::refused(&problems))?;
    let settings = sources.settings(&environment);
    let settings = settings.map_err(|problems| Failure::refused(&problems))?;
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .thread_name("palisade")
        .build()
        .context("cannot start the runtime")?;
    let telemetry = {
        // The trace exporter wants to know the runtime it may send from.
        let _inside = runtime.enter();
        let sink = if detached {
            Sink::File(LogFile::open(&paths.log())?)
        } else {
            Sink::Stderr
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
        // In the background this is the only place where it is read.
        tracing::error!(error = format!("{error:#}"), "the gate ends");
    }
    let for_traces = match &served {
        Ok((_, deadline)) => deadline.for_traces(),
        Err(_) => Deadline::MAX_TRACES,
    };
    runtime.block_on(async {
        let last = tokio::task::spawn_blocking(move || telemetry.finish());
        if tokio::time::timeout(for_traces, last).await.is_err() {
            tracing::warn!("the last traces were not taken in time");
        }
    });
    runtime.shutdown_timeout(Duration::from_secs(1));
    served.map(|(exit, _)| exit)
}

/// The gate holds keys: no core dumps, no debugger, no files for others. It holds a dozen
/// sockets of every sandbox, too: as many descriptors as it may have.
fn harden(detached: bool) -> Result<()> {
    let (_, most) = getrlimit(Resource::RLIMIT_NOFILE).context("cannot read the file limit")?;
    setrlimit(Resource::RLIMIT_NOFILE, most, most).context("cannot raise the file limit")?;
    nix::sys::prctl::set_dumpable(false).context("cannot forbid core dumps")?;
    nix::sys::stat::umask(nix::sys::stat::Mode::from_bits_truncate(0o077));
    if detached {
        nix::unistd::setsid().context("cannot leave the terminal")?;
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
) -> Result<(Exit, Deadline)> {
    let stop = CancellationToken::new();
    listen_for_signals(stop.clone())?;
    // From here on a hangup is a request and no longer the end, which is its default.
    let hangup = signal(SignalKind::hangup()).context("cannot listen for SIGHUP")?;
    // The socket first: nothing is written while another gate may be listening there.
    let socket = PrivateSocket::bind(&paths.control, 0o600).await;
    let socket = Arc::new(socket.context("the control socket cannot be used (see --control)")?);
    let store = open_store(paths, &settings).await?;
    let health_registry = Arc::new(HealthRegistry::default());
    health_registry.check("config_current", Ok(()));
    health_registry.listening("control", [paths.control.display()]);
    health_registry.config(paths.config.current());
    if let Some(cause) = after_death {
        tracing::warn!(cause, "gate restarted after it died");
        health_registry.note("restarted", Some(format!("after the gate died: {cause}")));
    }
    let numbers = ProcessMetrics::default();
    let counters = ControlMetrics::default();
    let manager = open_manager(paths).await?;
    let socket_owners = SocketOwnerLookup(manager.backend().clone());
    let settings = Arc::new(settings);
    let policy = load_policy(Arc::clone(&settings)).await?;
    let traffic = open_traffic(paths, &store, socket_owners, &policy).await?;
    let shared = NetworkListeners::new(
        Arc::clone(&traffic),
        Arc::clone(&health_registry),
        stop.clone(),
    );
    let shared = Arc::new(shared);
    let mcp_metrics = mcp::metrics::Metrics::default();
    let metrics = numbers.registry(store.clone(), &counters, &traffic, &mcp_metrics);
    let metrics = Arc::new(metrics);
    let sandboxed = Arc::new(tools::Sandboxed::default());
    let given = tools::McpDependencies {
        policy: Arc::clone(&policy),
        questions: traffic.questions().clone(),
        audit: Arc::new(StoreAuditSink(store.clone())),
        fingerprints: open_fingerprints(paths).await?,
        health_registry: Arc::clone(&health_registry),
        numbers: Arc::clone(&metrics),
        metrics: mcp_metrics,
        sandboxed: Arc::clone(&sandboxed) as _,
    };
    let tools = open_tools(Arc::clone(&settings), given, &stop).await?;
    // Every bundle was read: a start with one that cannot be used has failed above.
    health_registry.check(POLICY_LOADED, Ok(()));
    traffic.serve_tools(Arc::clone(&tools) as _);
    let (reload, requests) = mpsc::channel(8);
    let changed = Arc::new(Notify::new());
    let reloader = Arc::new(Reloader {
        config: paths.config.clone(),
        health_registry: Arc::clone(&health_registry),
        numbers: numbers.clone(),
        telemetry,
        store: store.clone(),
        policy: Arc::clone(&policy),
        traffic: Arc::clone(&traffic),
        shared: Arc::clone(&shared),
        tools: Arc::clone(&tools),
        requests: Mutex::new(requests),
        hangup: Mutex::new(hangup),
        seen: Mutex::new(sources.fingerprint()),
        changed: Arc::clone(&changed),
    });
    reloader.announce(&settings);
    let served = Arc::new(SandboxListeners::new(Arc::clone(&traffic), stop.clone()));
    let sandboxes = Sandboxes::new(manager, Arc::clone(&served) as _, paths.trust());
    sandboxes.recover_after_restart(&store).await?;
    shared.listen(&settings).await;
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
    sandboxed.open(&gate);

    let supervisor = Supervisor::new(Arc::clone(&health_registry), numbers, stop.clone());
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
            mirrors::look_after(Arc::clone(&traffic), health_registry, changed, stop)
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
        move |stop| root_renewal::look_after(Arc::clone(&gate), stop)
    });
    supervisor.start(tools::TASK, {
        let tools = Arc::clone(&tools);
        move |_| {
            let tools = Arc::clone(&tools);
            async move {
                tools.look_after().await;
                Ok(())
            }
        }
    });
    tools.listen(&settings).await;
    announce_ready(paths, watchdog.as_mut())?;
    tokio::spawn(release_startup_memory());

    stop.cancelled().await;
    let limit = policy.settings().server.shutdown_timeout;
    let deadline = Deadline::after(limit);
    if let Some(watchdog) = watchdog {
        watchdog.report_stopping();
    }
    tracing::info!("stopping");
    // Sandboxes live on; their connections end here, and the next gate serves them again.
    let draining = async {
        tokio::join!(supervisor.drain(), served.drain(), shared.drain());
    };
    let (drained, ended) = tokio::join!(
        timeout_at(deadline.cut_off(), draining),
        // At once, and not after the drain: a tool may need its time to end.
        timeout_at(deadline.end(), tools.drain(deadline.cut_off())),
    );
    if drained.is_err() {
        tracing::warn!(
            ?limit,
            "requests in flight were cut off at the shutdown limit"
        );
    }
    if ended.is_err() {
        tracing::error!(?limit, "some tool processes did not end in time");
    }
    drop(socket);
    if timeout_at(deadline.end(), traffic.finish()).await.is_err() {
        tracing::error!("the last records of the traffic were not taken in time");
    }
    let exit = match timeout_at(deadline.end(), close(&store)).await {
        Ok(Ok(())) => {
            tracing::info!("stopped");
            Exit::Ok
        }
        Ok(Err(error)) => {
            tracing::error!(%error, "the audit log could not be closed cleanly");
            Exit::Failed
        }
        Err(_) => {
            tracing::error!("the audit log could not be closed in time");
            Exit::Failed
        }
    };
    Ok((exit, deadline))
}

/// The first SIGTERM or SIGINT stops the process in order, the second ends it at once. A watchdog's
/// signal is never the second one: a service manager signals gate and watchdog together.
pub fn listen_for_signals(stop: CancellationToken) -> Result<()> {
    let mut terminate = signal(SignalKind::terminate()).context("cannot listen for SIGTERM")?;
    let mut interrupt = signal(SignalKind::interrupt()).context("cannot listen for SIGINT")?;
    let mut watchdog = signal(watchdog::STOP).context("cannot listen for SIGUSR1")?;
    tokio::spawn(async move {
        let mut told = false;
        loop {
            let number = tokio::select! {
                _ = terminate.recv() => 15,
                _ = interrupt.recv() => 2,
                _ = watchdog.recv() => {
                    stop.cancel();
                    continue;
                }
            };
            if told {
                tracing::warn!("a second signal: ending at once");
                std::process::exit(128 + number);
            }
            told = true;
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
        tracing::error!(
            reason,
            "the registry is unavailable; all traffic is refused"
        );
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

/// Opens the authority, the way out and the rules: all of them read files.
async fn open_traffic(
    paths: &Paths,
    store: &Store,
    socket_owners: SocketOwnerLookup,
    policy: &Arc<CurrentPolicy>,
) -> Result<Arc<Services>> {
    let (dir, settings) = (paths.state_dir.clone(), Arc::clone(&policy.load().settings));
    let opened = tokio::task::spawn_blocking(move || {
        let authority = Authority::open(&dir, wall_now())?;
        let dialer = Dialer::new(&settings)?;
        anyhow::Ok((authority, dialer, Mirrors::open(&dir.join("mirrors"))?))
    });
    let (authority, dialer, mirrors) = opened.await??;
    Ok(Services::new(Parts {
        policy: Arc::clone(policy),
        questions: Questions::default(),
        registry: Arc::new(StoreRegistry::new(store.clone())),
        audit: Arc::new(StoreAuditSink(store.clone())),
        programs: Arc::new(socket_owners),
        authority: Arc::new(ArcSwap::from_pointee(authority)),
        dialer,
        pack_reader: Some(Arc::new(PackReaderPort(pack_readers()))),
        spool: paths.state_dir.join("spool"),
        mirrors,
    }))
}

/// Loads the rules of `settings` on a thread that may block: policy bundles are files.
pub async fn load_policy(settings: Arc<Settings>) -> Result<Arc<CurrentPolicy>> {
    let loading = tokio::task::spawn_blocking(move || PolicySnapshot::load(settings));
    Ok(Arc::new(CurrentPolicy::new(loading.await??)))
}

/// What tools looked like when they were first seen.
async fn open_fingerprints(paths: &Paths) -> Result<Fingerprints> {
    let path = paths.state_dir.join("tools.json");
    let opening = move || Fingerprints::open(&path);
    Ok(tokio::task::spawn_blocking(opening).await??)
}

/// Opens the tools on a thread that may block: their policy bundles are files.
pub async fn open_tools(
    settings: Arc<Settings>,
    given: tools::McpDependencies,
    stop: &CancellationToken,
) -> Result<Arc<Tools>> {
    let stop = stop.clone();
    let opening = move || Tools::open(&settings, given, &stop);
    Ok(Arc::new(tokio::task::spawn_blocking(opening).await??))
}

/// Who reads pushes: this program, again.
fn pack_readers() -> PackReaderPool {
    PackReaderPool::new(own_program().path, vec![JUDGE.into()], MOST_READERS)
}

async fn open_manager(paths: &Paths) -> Result<Manager> {
    let state = paths.state_dir.clone();
    let manager = tokio::task::spawn_blocking(move || Manager::open(&state, own_program()));
    Ok(manager.await??)
}

/// This very program, also after an update has put another one in its place, and the words
/// that `main` looks for.
pub fn own_program() -> HelperProgram {
    HelperProgram {
        path: PathBuf::from("/proc/self/exe"),
        init: vec![INIT.into()],
        worker: vec![WORKER.into()],
    }
}

async fn close(store: &Store) -> Result<()> {
    if store.health().registry_accessible {
        let event = AuditEvent::lifecycle("gate_stopped", None);
        if let Err(error) = store.audit().record_durable(event, wall_now()).await {
            tracing::error!(%error, "the stop was not recorded");
        }
    }
    Ok(store.close().await?)
}

async fn prune_hourly(store: Store, stop: CancellationToken) -> Result<()> {
    let mut hour = tokio::time::interval(PRUNE_EVERY);
    hour.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    hour.tick().await; // The first one is now, and the start has just pruned.
    loop {
        tokio::select! {
            () = stop.cancelled() => return Ok(()),
            _ = hour.tick() => {}
        }
        match store.prune_expired(wall_now()).await {
            Ok(pruned) => tracing::debug!(pruned = pruned.len(), "expired registrations removed"),
            Err(error) => tracing::warn!(%error, "expired registrations were not removed"),
        }
    }
}

async fn prune_traffic(traffic: Arc<Services>, stop: CancellationToken) -> Result<()> {
    stop.run_until_cancelled(traffic.prune_regularly()).await;
    Ok(())
}

/// The audit section as the store wants it.
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

/// Most of an idle gate is pages of its file, and many of them only its start has needed.
async fn release_startup_memory() {
    tokio::time::sleep(SETTLED).await;
    let given = tokio::task::spawn_blocking(sandbox::startup_memory::release_startup_memory).await;
    if let Ok(Err(error)) = given {
        tracing::debug!(%error, "what only the start has needed stays in memory");
    }
}

/// One line, when everything listens: to the watchdog, or on stderr.
fn announce_ready(paths: &Paths, watchdog: Option<&mut WatchdogPipe>) -> Result<()> {
    let control = paths.control.display().to_string();
    tracing::info!(control, pid = std::process::id(), "the gate is up");
    match watchdog {
        Some(watchdog) => watchdog.report_ready()?,
        None => crate::output::say("ready"),
    }
    Ok(())
}
