//! Tool calls in the gate: the bridge, the hooks of a gateway, and where both listen.

mod sandboxed;

use std::collections::HashMap;
use std::ffi::OsString;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

use anyhow::Result;
use arc_swap::ArcSwap;
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
use mcp::server::{self, Demands, Door, House, Offers};
use mcp::tools::Launchers;
use policy::audit::AuditEvent;
use policy::id::SandboxId;
use prometheus_client::encoding::text::encode;
use prometheus_client::registry::Registry;
use serde_json::json;
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

pub use self::sandboxed::Sandboxed;
use crate::gate::ports::Book;
use crate::leash::LEASH;

/// The check that says whether the parts listen.
const LISTENING: &str = "mcp_listening";

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
    pub book: Book,
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
    tasks: TaskTracker,
    open: Mutex<HashMap<SocketAddr, CancellationToken>>,
}

impl Tools {
    /// Opens the parts; nothing listens yet. Reads files: it blocks.
    pub fn open(
        state_dir: &Path,
        settings: &Settings,
        given: Given,
        stop: &CancellationToken,
    ) -> Result<Self> {
        let contexts = Contexts::new(&given.metrics);
        let rules = Rules::load(settings)?;
        let governance = Governance::new(rules, Arc::new(given.book), given.metrics, contexts);
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
        let fingerprints = Arc::new(Fingerprints::open(&state_dir.join("tools.json"))?);
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
            demands: ArcSwap::from_pointee(Demands::of(settings)),
            numbers: Arc::new(move || text_of(&given.numbers)),
            health,
        });
        let tools = Self {
            house,
            governance,
            board: given.board,
            stop: stop.child_token(),
            tasks: TaskTracker::new(),
            open: Mutex::default(),
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

    /// Puts new settings in force. `rules` were built from them.
    pub async fn follow(&self, settings: &Settings, rules: Rules) {
        self.governance.replace(rules);
        self.house.bridge.apply(settings);
        self.house.demands.store(Arc::new(Demands::of(settings)));
        self.note();
        self.listen(settings).await;
    }

    /// Listens where `settings` say, if there is something to serve. An address that is not
    /// to be had is a fault of this part alone.
    pub async fn listen(&self, settings: &Settings) {
        let mut wanted: HashMap<SocketAddr, Offers> = HashMap::new();
        if settings.serves_mcp() {
            let none = Offers {
                hooks: false,
                tools: false,
            };
            let (hooks, tools) = (settings.server.interceptor(), settings.server.mcp());
            wanted.entry(hooks).or_insert(none).hooks = true;
            wanted.entry(tools).or_insert(none).tools = true;
        }
        let mut fault = None;
        for (at, offers) in wanted {
            if self.is_open(at) {
                continue;
            }
            match TcpListener::bind(at).await {
                Ok(listener) => self.serve(at, listener, offers),
                Err(error) => {
                    let why = format!(
                        "tools cannot be served at {at} ({error}); change server.interceptor_addr and server.mcp_server_addr, or end what is there"
                    );
                    tracing::error!(%why, "a part of the gate is not there");
                    fault = Some(why);
                }
            }
        }
        if fault.is_some() || self.is_any_open() {
            self.board.check(LISTENING, fault.map_or(Ok(()), Err));
        }
    }

    fn serve(&self, at: SocketAddr, listener: TcpListener, offers: Offers) {
        let stop = self.stop.child_token();
        let shown = listener.local_addr().map_or(at, |real| real).to_string();
        for (name, offered) in [("interceptor", offers.hooks), ("mcp", offers.tools)] {
            if offered {
                self.board.listening(name, [&shown]);
            }
        }
        let mut open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        open.insert(at, stop.clone());
        let house = Arc::clone(&self.house);
        self.tasks.spawn(async move {
            if let Err(error) = server::serve(house, listener, offers, stop).await {
                tracing::error!(%at, %error, "tools are not served any more");
            }
        });
    }

    fn is_open(&self, at: SocketAddr) -> bool {
        let open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        open.contains_key(&at)
    }

    fn is_any_open(&self) -> bool {
        let open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        !open.is_empty()
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
        self.tasks.close();
        self.house.bridge.end().await;
        self.house.bridge.fingerprints().write().await;
        self.tasks.wait().await;
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
