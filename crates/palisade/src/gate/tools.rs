//! Tool calls in the gate: the bridge, the hooks of a gateway, and where both listen.

mod listeners;
mod sandboxed;

use std::ffi::OsString;
use std::sync::Arc;

use anyhow::Result;
use config::Settings;
use control::health::{Board, Status};
use egress::ports::ToolServer;
use http::{Request, Response};
use mcp::bridge::Bridge;
use mcp::context::Contexts;
use mcp::fingerprint::Fingerprints;
use mcp::governance::{Governance, Rules};
use mcp::interceptor::Interceptor;
use mcp::launch::Local;
use mcp::metrics::Metrics;
use mcp::ports::Ledger;
use mcp::relay::{Relay, Stamps};
use mcp::room::Room;
use mcp::server::{self, Door, House};
use mcp::tools::Launchers;
use policy::audit::AuditEvent;
use policy::id::SandboxId;
use prometheus_client::encoding::text::encode;
use prometheus_client::registry::Registry;
use serde_json::json;
use tokio_util::sync::CancellationToken;

use self::listeners::Listeners;
pub use self::listeners::PreparedListeners;
pub use self::sandboxed::Sandboxed;
use crate::gate::ports::Book;
use crate::leash::LEASH;

#[async_trait::async_trait]
impl Ledger for Book {
    async fn record(&self, event: Box<AuditEvent>) {
        egress::ports::Ledger::record(self, event).await;
    }
}

#[async_trait::async_trait]
impl ToolServer for Tools {
    async fn answer(
        &self,
        sandbox: &SandboxId,
        request: Request<egress::body::Content>,
    ) -> Response<egress::body::Content> {
        server::answer(&self.house, &Door::Sandbox(sandbox.clone()), request).await
    }
}

/// What the rest of the gate gives.
pub struct Given {
    /// Where decisions are written.
    pub ledger: Arc<dyn Ledger>,
    /// What tools looked like.
    pub fingerprints: Fingerprints,
    /// Where health shows it.
    pub board: Arc<Board>,
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
    house: Arc<House>,
    governance: Governance,
    board: Arc<Board>,
    stop: CancellationToken,
    listeners: Listeners,
}

impl Tools {
    /// Opens the parts; nothing listens yet. Reads files: it blocks.
    pub fn open(settings: &Settings, given: Given, stop: &CancellationToken) -> Result<Self> {
        let contexts = Contexts::new(&given.metrics);
        let rules = Rules::load(settings)?;
        let governance = Governance::new(rules, given.ledger, given.metrics, contexts);
        let interceptor = Arc::new(Interceptor::new(governance.clone()));
        let heard = Arc::clone(&interceptor);
        let relay = Relay {
            governance: governance.clone(),
            stamps: Stamps(Arc::new(move || heard.heard_docker_lately())),
        };
        let launchers = Launchers {
            local: Arc::new(Local {
                leash: leash(),
                patience: mcp::launch::PATIENCE,
            }),
            sandbox: given.sandboxed,
        };
        let fingerprints = Arc::new(given.fingerprints);
        // The servers end after those who speak to them have been told.
        let bridge = Bridge::new(launchers, fingerprints, relay, CancellationToken::new());
        bridge.apply(settings);
        let health = {
            let (board, governance) = (Arc::clone(&given.board), governance.clone());
            Arc::new(move || health(&board, &governance))
        };
        let house = Arc::new(House {
            bridge,
            hooks: interceptor,
            room: Room::default(),
            numbers: Arc::new(move || text_of(&given.numbers)),
            health,
        });
        let (board, stop) = (given.board, stop.child_token());
        let listeners = Listeners::new(Arc::clone(&house), Arc::clone(&board), stop.clone());
        let tools = Self {
            house,
            governance,
            board,
            stop,
            listeners,
        };
        tools.note();
        Ok(tools)
    }

    /// The servers.
    pub fn bridge(&self) -> &Arc<Bridge> {
        &self.house.bridge
    }

    /// Looks after sessions and what is remembered, until the stop.
    pub async fn look_after(&self) {
        let bridge = &self.house.bridge;
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

    /// Puts new settings in force. `rules` and `listeners` were made from them.
    pub async fn apply(&self, settings: &Settings, rules: Rules, listeners: PreparedListeners) {
        self.governance.replace(rules);
        self.house.bridge.apply(settings);
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

    /// Says on the board that nobody judges calls, where that is so.
    fn note(&self) {
        let idle = self.governance.is_idle();
        let says = idle.then(|| "no policy bundle judges tool calls: they all pass".to_owned());
        self.board.note("mcp_policy", says);
    }

    /// Waits until every client was let go and every server has ended, which the stop makes
    /// them do.
    pub async fn drain(&self) {
        self.stop.cancel();
        self.house.bridge.end().await;
        self.house.bridge.fingerprints().write().await;
        self.listeners.drain().await;
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

/// Numbers as Prometheus reads them.
fn text_of(numbers: &Registry) -> String {
    let mut text = String::new();
    match encode(&mut text, numbers) {
        Ok(()) => text,
        Err(error) => format!("# {error}\n"),
    }
}

/// Every part in one answer.
fn health(board: &Board, governance: &Governance) -> (bool, serde_json::Value) {
    let report = board.report([]);
    let well = report.status == Status::Healthy;
    let policy = if governance.is_idle() {
        "pass-through: no policy bundle judges tool calls"
    } else {
        "ok"
    };
    let said = json!({
        "status": if well { "healthy" } else { "degraded" },
        "version": report.version,
        "components": {"interceptor": "ok", "bridge": "ok", "policy": policy},
        "checks": report.checks,
        "errors": report.errors,
        "notes": report.notes,
    });
    (well, said)
}
