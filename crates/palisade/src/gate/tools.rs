//! Tool calls in the gate: the bridge, the hooks of a gateway, and where both listen.

use std::collections::HashMap;
use std::ffi::OsString;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

use anyhow::Result;
use arc_swap::ArcSwap;
use config::Settings;
use control::health::{Board, Status};
use mcp::bridge::Bridge;
use mcp::context::Contexts;
use mcp::fingerprint::Fingerprints;
use mcp::governance::{Governance, Rules};
use mcp::launch::Local;
use mcp::metrics::Metrics;
use mcp::ports::Ledger;
use mcp::relay::{Relay, Stamps};
use mcp::server::{self, Demands, House, Offers};
use mcp::tools::Launchers;
use policy::audit::AuditEvent;
use serde_json::json;
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

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

/// What the rest of the gate gives.
pub struct Given {
    /// Where decisions are written.
    pub book: Book,
    /// Where health shows it.
    pub board: Arc<Board>,
    /// The text of `/metrics`.
    pub numbers: Arc<dyn Fn() -> String + Send + Sync>,
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
            local: Arc::new(Local { leash: leash() }),
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
            demands: ArcSwap::from_pointee(Demands::of(settings)),
            numbers: given.numbers,
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

    /// The parts, for those who come by another door.
    pub fn house(&self) -> &Arc<House> {
        &self.house
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
                self.board.listening(name, &shown);
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
        self.tasks.wait().await;
    }
}

/// Stands in until the hooks are merged.
struct Interceptor;

impl Interceptor {
    fn new(_: Governance) -> Self {
        Self
    }

    fn heard_docker_lately(&self) -> bool {
        false
    }
}

#[async_trait::async_trait]
impl server::Hooks for Interceptor {
    async fn before(&self, _: bytes::Bytes) -> http::Response<mcp::answer::Content> {
        mcp::answer::bare(http::StatusCode::NOT_IMPLEMENTED)
    }

    async fn after(&self, _: bytes::Bytes) -> http::Response<mcp::answer::Content> {
        mcp::answer::bare(http::StatusCode::NOT_IMPLEMENTED)
    }
}

/// Stands in until servers run in sandboxes.
#[derive(Debug)]
pub struct Sandboxed;

#[async_trait::async_trait]
impl mcp::launch::Launcher for Sandboxed {
    async fn launch(
        &self,
        _: &config::section::tools::Tool,
        _: &mcp::governance::Caller,
    ) -> Result<mcp::launch::Launched, mcp::launch::LaunchError> {
        Err(mcp::launch::LaunchError::NotBuilt("sandbox"))
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
