//! `palisade bridge run`: serves one stdio MCP server over HTTP, without a gate.
//!
//! The command uses the gate's bridge, with the same sessions, policies and listeners, but has no
//! database, no control socket and no sandboxes. Decisions are written to the log.

use std::ffi::OsStr;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result};
use clap::{Args, Parser};
use config::leaf::EnvEntry;
use config::section::logging::LogLevel;
use config::section::tools::{BridgedServer, ToolRuntime};
use config::{Secret, Settings, ValueOrigin};
use control::health::HealthRegistry;
use decide::hold::Questions;
use mcp::fingerprint::Fingerprints;
use mcp::metrics::Metrics;
use policy::audit::AuditEvent;
use policy::ports::AuditSink;
use policy::reason::Reason;
use policy::verdict::{RuleName, VerdictKind};
use prometheus_client::registry::Registry;
use serde_json::json;
use tokio::time::timeout_at;
use tokio_util::sync::CancellationToken;

use crate::cli::Global;
use crate::exit::{CliError, CliExit};
use crate::gate::shutdown::Deadline;
use crate::gate::tools::{McpDependencies, SandboxLauncher};
use crate::gate::{self, read_environment_variable};
use crate::paths::find_program;
use crate::telemetry::{LogSink, Telemetry};
use crate::{child_reaper, output};

/// The program name under which palisade runs this command.
pub const POLIS_BRIDGE: &str = "polis-bridge";

/// The server's name in policies, metrics and logs.
const NAME: &str = "bridge";

/// How long blocking threads may take at shutdown.
const THREADS_TIMEOUT: Duration = Duration::from_secs(1);

const LEVELS: [LogLevel; 5] = [
    LogLevel::Error,
    LogLevel::Warn,
    LogLevel::Info,
    LogLevel::Debug,
    LogLevel::Trace,
];

/// Text below the help.
pub const EXAMPLES: &str = "\
Clients connect to http://127.0.0.1:8090/mcp (Streamable HTTP) or
http://127.0.0.1:8090/sse (HTTP with SSE); /health and /metrics are served as well. Each
session has a process of its own, which ends with the session. Ctrl-C ends all of them.

$NAME, ${NAME} and ${NAME:-default} in COMMAND are expanded from the environment even
without a shell; $$ is a plain $. The server gets the environment and the working directory
of this command.

With -c FILE, its sections server, policies, metrics and logging apply. Its tools are not
served: palisade gate run --config FILE does that. Decisions are written to the log only;
an audit log needs a gate.

Called as polis-bridge, this program takes these options directly:
  ln -s \"$(command -v palisade)\" polis-bridge

Examples:
  palisade bridge run -- npx -y @modelcontextprotocol/server-filesystem /srv/notes
  palisade bridge run -p 9000 -l debug -- uvx mcp-server-git --repository '$HOME/project'
  palisade bridge run -c policies.yaml -- uvx mcp-server-time";

#[derive(Debug, Args)]
pub struct BridgeRunArgs {
    /// Port to listen on; 0 for a free port [default: 8090 on the loopback, or server.* of FILE]
    #[arg(long, short, value_name = "PORT")]
    port: Option<u16>,
    /// Configuration file, like --config; the default file is not read
    #[arg(short = 'c', value_name = "FILE")]
    file: Option<PathBuf>,
    /// Log level: error, warn, info, debug or trace [default: info, or logging.level of FILE]
    #[arg(long, short, value_name = "LEVEL", value_parser = parse_level)]
    log_level: Option<LogLevel>,
    /// The command of the stdio server, and its arguments
    #[arg(required = true, trailing_var_arg = true, value_name = "COMMAND")]
    command: Vec<String>,
}

/// Serve a stdio MCP server over HTTP and SSE.
#[derive(Debug, Parser)]
#[command(
    name = POLIS_BRIDGE,
    version,
    arg_required_else_help = true,
    after_help = EXAMPLES,
    mut_arg("state_dir", |arg| arg.hide(true)),
    mut_arg("control", |arg| arg.hide(true)),
)]
pub struct PolisBridge {
    #[command(flatten)]
    pub global: Global,
    #[command(flatten)]
    pub args: BridgeRunArgs,
}

fn parse_level(text: &str) -> Result<LogLevel, String> {
    let found = LEVELS.into_iter().find(|level| level.as_str() == text);
    found.ok_or_else(|| {
        let known = LEVELS.map(LogLevel::as_str).join(", ");
        format!("valid levels: {known}")
    })
}

/// Serves until SIGTERM or SIGINT.
pub fn run(args: &BridgeRunArgs, global: &Global) -> Result<CliExit> {
    let settings = Arc::new(settings(args, global)?);
    // The MCP server has the same uid and must not read the auth token from this process's
    // memory.
    nix::sys::prctl::set_dumpable(false).context("cannot forbid core dumps")?;
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .thread_name("bridge")
        .build()
        .context("cannot start the runtime")?;
    let telemetry = {
        // The trace exporter sends from the runtime.
        let _runtime_guard = runtime.enter();
        Telemetry::start(&settings, global.verbose, LogSink::Stderr)?
    };
    let served = runtime.block_on(serve(settings, global));
    telemetry.finish();
    runtime.shutdown_timeout(THREADS_TIMEOUT);
    served
}

async fn serve(settings: Arc<Settings>, global: &Global) -> Result<CliExit> {
    let stop = CancellationToken::new();
    gate::listen_for_signals(stop.clone())?;
    for warning in &settings.warnings {
        tracing::warn!(%warning, "configuration accepted with a warning");
    }
    let (health_registry, metrics) = (Arc::new(HealthRegistry::default()), Metrics::default());
    let mut registry = Registry::default();
    metrics.register(&mut registry);
    let dependencies = McpDependencies {
        policy: gate::load_policy(Arc::clone(&settings)).await?,
        questions: Questions::default(),
        audit: Arc::new(LogAuditSink),
        fingerprints: Fingerprints::in_memory(),
        health_registry: Arc::clone(&health_registry),
        registry: Arc::new(registry),
        metrics,
        // The only tool runs on the host.
        sandbox_launcher: Arc::new(SandboxLauncher::default()),
    };
    let tools = gate::open_tools(Arc::clone(&settings), dependencies, &stop).await?;
    let listening = tools.require_listeners(&settings).await;
    listening.map_err(|why| {
        let message =
            format!("{why}; choose another port with -p, or stop the program that uses this one");
        CliError::new(CliExit::Failed, message)
    })?;
    announce(&health_registry, global)?;
    let sweeper = tokio::spawn({
        let tools = Arc::clone(&tools);
        async move { tools.maintain().await }
    });
    tokio::select! {
        () = stop.cancelled() => {}
        () = child_reaper::reap_orphans() => {}
    }
    tracing::info!("bridge stopping");
    let deadline = Deadline::starting_now(settings.server.shutdown_timeout);
    if timeout_at(deadline.end(), tools.drain(deadline.cut_off()))
        .await
        .is_err()
    {
        tracing::error!("mcp server did not end in time");
    }
    sweeper.abort();
    Ok(CliExit::Ok)
}

/// Prints the URL of the server: on stderr, or as JSON on stdout.
fn announce(health_registry: &HealthRegistry, global: &Global) -> Result<()> {
    let listeners = health_registry.report([]).listeners;
    let address = listeners.get("mcp").cloned().unwrap_or_default();
    let url = format!("http://{address}/mcp");
    if global.json {
        output::print_json(&json!({ "status": "listening", "url": url }))?;
    } else {
        output::print_message(&format!("bridge listening on {url}"));
    }
    Ok(())
}

/// The settings of FILE or the defaults, with one tool: the command.
fn settings(args: &BridgeRunArgs, global: &Global) -> Result<Settings> {
    let file = args.file.as_deref().or(global.config.as_deref());
    let mut settings = match file {
        Some(file) => config::load(Some(file), &read_environment_variable)
            .map_err(|problems| CliError::invalid_config(&problems))?,
        None => Settings::default(),
    };
    if let Some(level) = args.log_level {
        settings.logging.level = level;
    }
    if let Some(port) = args.port {
        let address = SocketAddr::new(settings.server.mcp().ip(), port);
        settings.server.single_port = Some(address);
    }
    settings.tools = vec![BridgedServer {
        name: NAME.to_owned(),
        command: command(&args.command)?,
        work_dir: None,
        env: server_environment(&settings),
        runtime: ToolRuntime::default(),
        expose: false,
        shared: false,
        allow: vec!["*".to_owned()],
        deny: Vec::new(),
        access: Vec::new(),
        description: None,
    }];
    Ok(settings)
}

/// The command with its variables expanded; fails if its program does not exist.
fn command(words: &[String]) -> Result<Vec<String>> {
    let expanded = words
        .iter()
        .map(|word| config::expand_word(word, &read_environment_variable))
        .collect::<Result<Vec<String>, _>>()
        .map_err(|error| CliError::new(CliExit::Usage, error.to_string()))?;
    let program = expanded.first().map_or("", String::as_str);
    let exists = if program.contains('/') {
        Path::new(program).is_file()
    } else {
        find_program(OsStr::new(program)).is_some()
    };
    if !exists {
        let shown = output::safe(program);
        let message = format!("command not found: '{shown}'; install it, or give its full path");
        return Err(CliError::new(CliExit::NotFound, message).into());
    }
    Ok(expanded)
}

/// The environment of the server: this process's environment without the variables that contain
/// a secret of the settings.
fn server_environment(settings: &Settings) -> Vec<EnvEntry> {
    let secrets = settings.secrets.keys();
    let secrets = secrets.map(|name| format!("/secrets/{name}"));
    let secret_variables: Vec<String> = secrets
        .chain(["/server/auth_token".to_owned()])
        .filter_map(|pointer| match settings.origin(&pointer) {
            ValueOrigin::Env { name, .. } => Some(name),
            ValueOrigin::File { .. } | ValueOrigin::Default => None,
        })
        .collect();
    let entry = |(name, value): (String, String)| EnvEntry {
        name,
        value: Secret::new(value),
    };
    std::env::vars_os()
        .filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?)))
        .filter(|(name, _)| !secret_variables.contains(name))
        .map(entry)
        .collect()
}

/// Writes decisions to the log.
#[derive(Debug)]
struct LogAuditSink;

#[async_trait::async_trait]
impl AuditSink for LogAuditSink {
    fn try_record(&self, event: Box<AuditEvent>) -> Result<(), Box<AuditEvent>> {
        Err(event)
    }

    async fn record_durably(&self, event: Box<AuditEvent>) {
        self.record(event).await;
    }

    async fn record(&self, event: Box<AuditEvent>) {
        tracing::info!(
            tool = event.host,
            agent = event.agent,
            method = event.method,
            name = event.operation,
            stage = event.stage,
            verdict = event.verdict.map(VerdictKind::as_str),
            reason = event.reason.map(Reason::code),
            rule = event.rule.as_ref().map(RuleName::as_str),
            request = event.request_id.map(|id| id.to_string()),
            "tool call decided"
        );
    }
}
