//! Tool calls in the gate: the bridge, the hooks of a gateway, and where both listen.

mod listeners;
mod sandboxed;

use std::ffi::OsString;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Result;
use config::Settings;
use control::health::{HealthRegistry, Status, TaskState};
use decide::hold::Questions;
use decide::snapshot::CurrentPolicy;
use http::{Request, Response};
use mcp::bridge::Bridge;
use mcp::context::Contexts;
use mcp::fingerprint::Fingerprints;
use mcp::governance::Governance;
use mcp::interceptor::Interceptor;
use mcp::launch::Local;
use mcp::metrics::Metrics;
use mcp::relay::{GatewayHookProbe, Relay};
use mcp::room::Room;
use mcp::server::{self, Endpoints, McpServer, MetricsPath, RequestSource};
use mcp::tools::Launchers;
use policy::id::SandboxId;
use policy::ports::{AuditSink, Content, ToolServer};
use prometheus_client::encoding::text::encode;
use prometheus_client::registry::Registry;
use serde_json::json;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

pub use self::listeners::PreparedListeners;
use self::listeners::{ListenerTable, Listeners};
pub use self::sandboxed::Sandboxed;
use crate::process_guard::LEASH;

/// The supervised task that ends unused sessions and keeps definitions.
pub const TASK: &str = "tools";

/// How long answers may take to be sent once every tool process has ended.
const LAST_ANSWERS: Duration = Duration::from_secs(1);

#[async_trait::async_trait]
impl ToolServer for Tools {
    async fn answer(&self, sandbox: &SandboxId, request: Request<Content>) -> Response<Content> {
        server::answer(
            &self.mcp_server,
            &RequestSource::Sandbox(sandbox.clone()),
            request,
        )
        .await
    }
}

/// What the rest of the gate gives.
pub struct McpDependencies {
    /// The rules in force.
    pub policy: Arc<CurrentPolicy>,
    /// Who answers what policies leave to the operator.
    pub questions: Questions,
    /// Where decisions are recorded.
    pub audit: Arc<dyn AuditSink>,
    /// What tools looked like.
    pub fingerprints: Fingerprints,
    /// Where health shows it.
    pub health_registry: Arc<HealthRegistry>,
    /// Every number of the gate.
    pub numbers: Arc<Registry>,
    /// The numbers of tool calls, registered before.
    pub metrics: Metrics,
    /// Starts servers in sandboxes.
    pub sandboxed: Arc<dyn mcp::launch::Launcher>,
}

/// See the module.
#[derive(Debug)]
pub struct Tools {
    mcp_server: Arc<McpServer>,
    governance: Governance,
    health_registry: Arc<HealthRegistry>,
    stop: CancellationToken,
    listeners: Listeners,
}

impl Tools {
    /// Opens the parts; nothing listens yet. Reads files: it blocks.
    pub fn open(
        settings: &Settings,
        given: McpDependencies,
        stop: &CancellationToken,
    ) -> Result<Self> {
        let contexts = Contexts::new(&given.metrics);
        let governance = Governance::new(
            given.policy,
            given.audit,
            given.metrics,
            contexts,
            given.questions,
        );
        let stop = stop.child_token();
        let interceptor = Arc::new(Interceptor::new(governance.clone(), stop.clone()));
        let heard = Arc::clone(&interceptor);
        let relay = Relay {
            governance: governance.clone(),
            stamps: GatewayHookProbe(Arc::new(move || heard.heard_docker_lately())),
        };
        let launchers = Launchers {
            local: Arc::new(Local {
                leash: leash(),
                patience: mcp::launch::PATIENCE,
            }),
            sandbox: given.sandboxed,
        };
        let fingerprints = Arc::new(given.fingerprints);
        // Not the gate's own stop: the end of tool processes has a deadline.
        let bridge = Bridge::new(launchers, fingerprints, relay, CancellationToken::new());
        bridge.apply(settings);
        let table = ListenerTable::default();
        let health = {
            let (health_registry, governance) =
                (Arc::clone(&given.health_registry), governance.clone());
            let table = table.clone();
            Arc::new(move || health(&health_registry, &governance, &table))
        };
        let mcp_server = Arc::new(McpServer {
            bridge,
            hooks: interceptor,
            room: Room::default(),
            numbers: Arc::new(move || text_of(&given.numbers)),
            metrics_path: MetricsPath::of(settings),
            health,
        });
        let health_registry = given.health_registry;
        let listeners = {
            let (mcp_server, health_registry) =
                (Arc::clone(&mcp_server), Arc::clone(&health_registry));
            Listeners::new(mcp_server, health_registry, table, stop.clone())
        };
        let tools = Self {
            mcp_server,
            governance,
            health_registry,
            stop,
            listeners,
        };
        tools.note();
        Ok(tools)
    }

    /// The servers.
    pub fn bridge(&self) -> &Arc<Bridge> {
        &self.mcp_server.bridge
    }

    /// Looks after sessions and what is remembered, until the stop.
    pub async fn look_after(&self) {
        let bridge = &self.mcp_server.bridge;
        tokio::select! {
            () = bridge.sweep() => {}
            () = bridge.fingerprints().keep() => {}
            () = self.stop.cancelled() => {}
        }
    }

    /// Opens what a reload to `settings` needs, or says why it cannot be had. Nothing changes
    /// yet.
    pub fn prepare(&self, settings: &Settings) -> Result<PreparedListeners, String> {
        let prepared = self.listeners.prepare(settings);
        self.listeners.check(&prepared)?;
        Ok(prepared)
    }

    /// Applies new settings, whose rules are in force. `listeners` was made from them; `governed`
    /// is whether a policy bundle decided about tool calls before.
    pub async fn apply(&self, settings: &Settings, listeners: PreparedListeners, governed: bool) {
        self.governance.follow(governed);
        self.mcp_server.bridge.apply(settings);
        self.mcp_server.metrics_path.replace(settings);
        self.note();
        self.listeners.apply(listeners).await;
    }

    /// Listens where `settings` say, if there is something to serve. At the start, an address
    /// that cannot be bound is a fault of this part alone.
    pub async fn listen(&self, settings: &Settings) {
        let prepared = self.listeners.prepare(settings);
        self.listeners.apply(prepared).await;
    }

    /// Listens where `settings` say, or returns why it cannot: for a process whose only purpose
    /// are these listeners.
    pub async fn require_listeners(&self, settings: &Settings) -> Result<(), String> {
        let prepared = self.listeners.prepare(settings);
        if let Some(why) = prepared.failure() {
            return Err(why.to_owned());
        }
        self.listeners.apply(prepared).await;
        Ok(())
    }

    /// Notes in the health registry what of the policies for tool calls is not in force.
    fn note(&self) {
        self.health_registry
            .note("mcp_policy", policy_gap(&self.governance));
    }

    /// Ends every tool process, and then every connection of a client: SIGTERM at once, SIGKILL
    /// at `kill_at`.
    pub async fn drain(&self, kill_at: Instant) {
        self.stop.cancel();
        self.mcp_server.bridge.end(kill_at).await;
        self.mcp_server.bridge.fingerprints().write().await;
        self.listeners.drain(LAST_ANSWERS).await;
    }
}

/// The words before a tool's command.
fn leash() -> Vec<OsString> {
    vec![
        "/proc/self/exe".into(),
        LEASH.into(),
        "--parent".into(),
        std::process::id().to_string().into(),
        "--".into(),
    ]
}

/// ProcessMetrics as Prometheus reads them.
fn text_of(numbers: &Registry) -> String {
    let mut text = String::new();
    match encode(&mut text, numbers) {
        Ok(()) => text,
        Err(error) => format!("# {error}\n"),
    }
}

/// What of the policies for tool calls is not in force, if anything.
fn policy_gap(governance: &Governance) -> Option<String> {
    let mut gaps = governance.missing_bundles();
    if governance.is_idle() {
        gaps.insert(
            0,
            "no policy bundle judges tool calls: they all pass".to_owned(),
        );
    }
    (!gaps.is_empty()).then(|| gaps.join("; "))
}

/// The state of every part, measured when it is queried.
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
            Some(_) => Err("the task that ends unused sessions is being restarted".to_owned()),
            None => Ok(()),
        });
    let well = report.status == Status::Healthy && interceptor.is_ok() && bridge.is_ok();
    let word = |outcome: Result<(), String>| match outcome {
        Ok(()) => "ok".to_owned(),
        Err(fault) => format!("unavailable: {fault}"),
    };
    let policy = match policy_gap(governance) {
        None => "ok".to_owned(),
        Some(gap) if governance.is_idle() => format!("pass-through: {gap}"),
        Some(gap) => format!("incomplete: {gap}"),
    };
    let state = json!({
        "status": if well { "healthy" } else { "degraded" },
        "version": report.version,
        "components": {"interceptor": word(interceptor), "bridge": word(bridge), "policy": policy},
        "checks": report.checks,
        "errors": report.errors,
        "notes": report.notes,
    });
    (well, state)
}
