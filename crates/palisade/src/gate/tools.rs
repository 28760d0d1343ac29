//! Tool service of the gate: the MCP bridge, the hooks for gateways, and their listeners.

mod listeners;
mod sandboxed;

use std::ffi::OsString;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Result;
use config::Settings;
use control::health::{HealthRegistry, HealthStatus, TaskState};
use decide::hold::Questions;
use decide::snapshot::CurrentPolicy;
use http::{Request, Response};
use mcp::bridge::Bridge;
use mcp::context::Contexts;
use mcp::fingerprint::Fingerprints;
use mcp::governance::Governance;
use mcp::interceptor::Interceptor;
use mcp::launch::LocalLauncher;
use mcp::metrics::Metrics;
use mcp::relay::{GatewayHookProbe, Relay};
use mcp::request_body::LargeBodyLimit;
use mcp::server::{self, Endpoints, McpServer, MetricsPath, RequestSource};
use mcp::tools::Launchers;
use policy::id::SandboxId;
use policy::ports::{AuditSink, MessageBody, ToolServer};
use prometheus_client::encoding::text::encode;
use prometheus_client::registry::Registry;
use serde_json::json;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

pub use self::listeners::PreparedListeners;
use self::listeners::{ListenerTable, McpListeners};
pub use self::sandboxed::SandboxLauncher;
use crate::process_guard::GUARD_ARGUMENT;

/// Name of the supervised task that ends unused sessions and writes fingerprints.
pub const TASK: &str = "tools";

/// How long sending the last responses may take after every tool process has ended.
const LAST_RESPONSES_TIMEOUT: Duration = Duration::from_secs(1);

#[async_trait::async_trait]
impl ToolServer for ToolService {
    async fn answer(
        &self,
        sandbox: &SandboxId,
        request: Request<MessageBody>,
    ) -> Response<MessageBody> {
        server::answer(
            &self.mcp_server,
            &RequestSource::Sandbox(sandbox.clone()),
            request,
        )
        .await
    }
}

/// The parts of the gate that the tool service uses.
pub struct McpDependencies {
    /// The policy in force.
    pub policy: Arc<CurrentPolicy>,
    /// Approval questions to the operator.
    pub questions: Questions,
    /// The audit log.
    pub audit: Arc<dyn AuditSink>,
    /// Fingerprints of tool definitions.
    pub fingerprints: Fingerprints,
    /// The health registry.
    pub health_registry: Arc<HealthRegistry>,
    /// All metrics of the gate.
    pub registry: Arc<Registry>,
    /// Metrics of tool calls, already registered.
    pub metrics: Metrics,
    /// Starts MCP servers in sandboxes.
    pub sandbox_launcher: Arc<dyn mcp::launch::Launcher>,
}

/// The bridge, the hooks and their listeners.
#[derive(Debug)]
pub struct ToolService {
    mcp_server: Arc<McpServer>,
    governance: Governance,
    health_registry: Arc<HealthRegistry>,
    stop: CancellationToken,
    listeners: McpListeners,
}

impl ToolService {
    /// Creates the service without listeners. Blocks, because it reads files.
    pub fn open(
        settings: &Settings,
        dependencies: McpDependencies,
        stop: &CancellationToken,
    ) -> Result<Self> {
        let contexts = Contexts::new(&dependencies.metrics);
        let governance = Governance::new(
            dependencies.policy,
            dependencies.audit,
            dependencies.metrics,
            contexts,
            dependencies.questions,
        );
        let stop = stop.child_token();
        let interceptor = Arc::new(Interceptor::new(governance.clone(), stop.clone()));
        let hooks = Arc::clone(&interceptor);
        let relay = Relay {
            governance: governance.clone(),
            gateway_hooks: GatewayHookProbe(Arc::new(move || hooks.has_recent_docker_hook())),
        };
        let launchers = Launchers {
            local: Arc::new(LocalLauncher {
                guard_command: guard_command(),
                exit_timeout: mcp::launch::DEFAULT_EXIT_TIMEOUT,
            }),
            sandbox: dependencies.sandbox_launcher,
        };
        let fingerprints = Arc::new(dependencies.fingerprints);
        // The bridge's token is not a child of the gate's stop token: ending tool processes has its
        // own deadline.
        let bridge = Bridge::new(launchers, fingerprints, relay, CancellationToken::new());
        bridge.apply(settings);
        let table = ListenerTable::default();
        let health = {
            let (health_registry, governance) = (
                Arc::clone(&dependencies.health_registry),
                governance.clone(),
            );
            let table = table.clone();
            Arc::new(move || health(&health_registry, &governance, &table))
        };
        let mcp_server = Arc::new(McpServer {
            bridge,
            hooks: interceptor,
            large_bodies: LargeBodyLimit::default(),
            render_metrics: Arc::new(move || metrics_text(&dependencies.registry)),
            metrics_path: MetricsPath::from_settings(settings),
            health,
        });
        let health_registry = dependencies.health_registry;
        let listeners = {
            let (mcp_server, health_registry) =
                (Arc::clone(&mcp_server), Arc::clone(&health_registry));
            McpListeners::new(mcp_server, health_registry, table, stop.clone())
        };
        let tools = Self {
            mcp_server,
            governance,
            health_registry,
            stop,
            listeners,
        };
        tools.report_policy_gap();
        Ok(tools)
    }

    /// The bridge.
    pub fn bridge(&self) -> &Arc<Bridge> {
        &self.mcp_server.bridge
    }

    /// Ends unused sessions and writes fingerprints, until the shutdown.
    pub async fn maintain(&self) {
        let bridge = &self.mcp_server.bridge;
        tokio::select! {
            () = bridge.sweep() => {}
            () = bridge.fingerprints().write_on_change() => {}
            () = self.stop.cancelled() => {}
        }
    }

    /// Binds the addresses that a reload to `settings` needs, or returns why it cannot. Changes
    /// nothing yet.
    pub fn prepare(&self, settings: &Settings) -> Result<PreparedListeners, String> {
        let prepared = self.listeners.prepare(settings);
        self.listeners.check(&prepared)?;
        Ok(prepared)
    }

    /// Applies new settings, whose policy is already in force. `listeners` was prepared for
    /// them; `governed` is whether a policy bundle decided about tool calls before.
    pub async fn apply(&self, settings: &Settings, listeners: PreparedListeners, governed: bool) {
        self.governance.apply_reload(governed);
        self.mcp_server.bridge.apply(settings);
        self.mcp_server.metrics_path.replace(settings);
        self.report_policy_gap();
        self.listeners.apply(listeners).await;
    }

    /// Listens on the addresses of `settings`, if there is something to serve. At the start, an
    /// address that cannot be bound degrades only this part.
    pub async fn listen(&self, settings: &Settings) {
        let prepared = self.listeners.prepare(settings);
        self.listeners.apply(prepared).await;
    }

    /// Listens on the addresses of `settings`, or returns why it cannot: for the standalone
    /// bridge, which has no other listeners.
    pub async fn require_listeners(&self, settings: &Settings) -> Result<(), String> {
        let prepared = self.listeners.prepare(settings);
        if let Some(why) = prepared.failure() {
            return Err(why.to_owned());
        }
        self.listeners.apply(prepared).await;
        Ok(())
    }

    /// Reports in a health note which policies for tool calls are not in force.
    fn report_policy_gap(&self) {
        self.health_registry
            .set_note("mcp_policy", policy_gap(&self.governance));
    }

    /// Ends every tool process, with SIGTERM at once and SIGKILL at `kill_at`, and then every
    /// client connection.
    pub async fn drain(&self, kill_at: Instant) {
        self.stop.cancel();
        self.mcp_server.bridge.end(kill_at).await;
        self.mcp_server.bridge.fingerprints().write().await;
        self.listeners.drain(LAST_RESPONSES_TIMEOUT).await;
    }
}

/// The arguments of the process guard, before a tool's command.
fn guard_command() -> Vec<OsString> {
    vec![
        "/proc/self/exe".into(),
        GUARD_ARGUMENT.into(),
        "--parent".into(),
        std::process::id().to_string().into(),
        "--".into(),
    ]
}

/// Metrics as Prometheus text.
fn metrics_text(registry: &Registry) -> String {
    let mut text = String::new();
    match encode(&mut text, registry) {
        Ok(()) => text,
        Err(error) => format!("# {error}\n"),
    }
}

/// The policies for tool calls that are not in force, if any.
fn policy_gap(governance: &Governance) -> Option<String> {
    let mut gaps = governance.missing_bundles();
    if governance.has_no_policy() {
        gaps.insert(
            0,
            "no policy bundle decides about tool calls: all calls pass".to_owned(),
        );
    }
    (!gaps.is_empty()).then(|| gaps.join("; "))
}

/// The health report of the MCP port.
fn health(
    health_registry: &HealthRegistry,
    governance: &Governance,
    listeners: &ListenerTable,
) -> (bool, serde_json::Value) {
    let report = health_registry.report([]);
    let interceptor = listeners.check(|endpoints: &Endpoints| endpoints.hooks);
    let task = report.tasks.get(TASK);
    let waiting = task.filter(|task| task.state == TaskState::Waiting);
    let bridge = listeners
        .check(|endpoints: &Endpoints| endpoints.tools)
        .and_then(|()| match waiting {
            Some(_) => Err("the task that ends unused sessions waits for its restart".to_owned()),
            None => Ok(()),
        });
    let is_healthy =
        report.status == HealthStatus::Healthy && interceptor.is_ok() && bridge.is_ok();
    let text = |outcome: Result<(), String>| match outcome {
        Ok(()) => "ok".to_owned(),
        Err(fault) => format!("unavailable: {fault}"),
    };
    let policy = match policy_gap(governance) {
        None => "ok".to_owned(),
        Some(gap) if governance.has_no_policy() => format!("pass-through: {gap}"),
        Some(gap) => format!("incomplete: {gap}"),
    };
    let state = json!({
        "status": if is_healthy { "healthy" } else { "degraded" },
        "version": report.version,
        "components": {"interceptor": text(interceptor), "bridge": text(bridge), "policy": policy},
        "checks": report.checks,
        "errors": report.errors,
        "notes": report.notes,
    });
    (is_healthy, state)
}
