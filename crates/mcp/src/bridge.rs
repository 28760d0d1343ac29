//! Bridge: the configured stdio servers (tools), and the sessions of HTTP clients with them.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use arc_swap::ArcSwap;
use config::Settings;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::caller::{McpCaller, is_same_caller};
use crate::fingerprint::Fingerprints;
use crate::relay::{self, Relay};
use crate::session::{Session, SessionError, SessionTransport};
use crate::sessionless::SessionlessService;
use crate::shared::SharedProcess;
use crate::shutdown::Shutdown;
use crate::tools::{Launchers, StdioServer, ToolUnavailable};

/// The most sessions.
const MAX_SESSIONS: usize = 1024;

/// The most sessions of one caller.
const MAX_SESSIONS_PER_CALLER: usize = 64;

/// How often ended and idle sessions are removed.
const SWEEP_INTERVAL: Duration = Duration::from_secs(1);

/// A configured server, and the process that its sessions share.
#[derive(Clone, Debug)]
struct Tool {
    server: Arc<StdioServer>,
    shared_process: Option<Arc<SharedProcess>>,
}

/// The configured stdio servers and their sessions.
#[derive(Debug)]
pub struct Bridge {
    tools: ArcSwap<BTreeMap<String, Tool>>,
    launchers: Launchers,
    fingerprints: Arc<Fingerprints>,
    relay: Relay,
    sessions: Mutex<HashMap<String, Arc<Session>>>,
    sessionless: Arc<SessionlessService>,
    max_idle: Mutex<Duration>,
    stop: CancellationToken,
    shutdown: Arc<Shutdown>,
}

impl Bridge {
    /// A bridge without tools, until [`Bridge::apply`].
    pub fn new(
        launchers: Launchers,
        fingerprints: Arc<Fingerprints>,
        relay: Relay,
        stop: CancellationToken,
    ) -> Arc<Self> {
        Arc::new(Self {
            tools: ArcSwap::default(),
            launchers,
            fingerprints,
            sessionless: Arc::new(SessionlessService::new(relay.clone())),
            relay,
            sessions: Mutex::default(),
            max_idle: Mutex::new(Duration::from_secs(300)),
            stop,
            shutdown: Arc::default(),
        })
    }

    /// Serves the tools of `settings` from now on. Tools whose configuration is unchanged keep
    /// their sessions; the sessions of the others end.
    pub fn apply(&self, settings: &Settings) {
        *self.max_idle.lock().unwrap_or_else(PoisonError::into_inner) =
            settings.server.session_idle;
        let before = self.tools.load();
        let mut tools = BTreeMap::new();
        for config in &settings.tools {
            let known = before.get(&config.name);
            let tool = known.filter(|tool| tool.server.config() == config);
            let tool = tool.cloned().unwrap_or_else(|| Tool {
                server: Arc::new(StdioServer::new(
                    config.clone(),
                    self.launchers.clone(),
                    Arc::clone(&self.fingerprints),
                    self.stop.child_token(),
                    Arc::clone(&self.shutdown),
                )),
                shared_process: config.shared.then(Arc::default),
            });
            tools.insert(config.name.clone(), tool);
        }
        for (name, tool) in before.iter() {
            let kept = tools.get(name);
            if kept.is_none_or(|kept| !Arc::ptr_eq(&kept.server, &tool.server)) {
                tool.server.stop().cancel();
            }
        }
        self.tools.store(Arc::new(tools));
        let tools = settings.tools.iter();
        let tools = tools.map(|tool| (tool.name.as_str(), tool.runtime.kind));
        self.relay.governance.metrics().report_tools(tools);
    }

    /// The tool called `name`, if `caller` may see it. Without a name, the only visible one.
    pub fn tool(&self, name: Option<&str>, caller: &McpCaller) -> Result<Arc<StdioServer>, String> {
        let tools = self.tools.load();
        let visible = |tool: &&Tool| tool.server.is_visible_to(caller);
        match name {
            Some(name) => {
                let tool = tools.get(name).filter(visible);
                tool.map(|tool| Arc::clone(&tool.server))
                    .ok_or_else(|| "Tool not found".to_owned())
            }
            None => {
                let mut all = tools.values().filter(visible);
                match (all.next(), all.next()) {
                    (Some(only), None) => Ok(Arc::clone(&only.server)),
                    (None, _) => Err("No tool is configured".to_owned()),
                    (Some(_), Some(_)) => Err(
                        "Several tools are configured: name one in the path, as in /mcp/<tool>"
                            .to_owned(),
                    ),
                }
            }
        }
    }

    /// Every tool that `caller` may see.
    pub fn visible_tools(&self, caller: &McpCaller) -> Vec<Arc<StdioServer>> {
        let tools = self.tools.load();
        let visible = tools
            .values()
            .filter(|tool| tool.server.is_visible_to(caller));
        visible.map(|tool| Arc::clone(&tool.server)).collect()
    }

    /// The state of each tool, for health.
    pub fn report(&self) -> Vec<ToolReport> {
        let mut running: HashMap<String, usize> = HashMap::new();
        for session in self.sessions().values().filter(|one| !one.has_ended()) {
            *running
                .entry(session.server().name().to_string())
                .or_default() += 1;
        }
        let tools = self.tools.load();
        tools
            .values()
            .map(|tool| {
                let name = tool.server.name().to_string();
                ToolReport {
                    sessions: running.get(&name).copied().unwrap_or_default(),
                    runtime: tool.server.runtime(),
                    unavailable: tool.server.unavailable(),
                    description: tool.server.config().description.clone(),
                    name,
                }
            })
            .collect()
    }

    /// The fingerprints of tool definitions.
    pub fn fingerprints(&self) -> &Arc<Fingerprints> {
        &self.fingerprints
    }

    /// The relay of calls.
    pub fn relay(&self) -> &Relay {
        &self.relay
    }

    /// The service for clients without sessions.
    pub fn sessionless(&self) -> &Arc<SessionlessService> {
        &self.sessionless
    }

    /// Opens a session with `served`.
    pub async fn open(
        self: &Arc<Self>,
        server: &Arc<StdioServer>,
        caller: &McpCaller,
        transport: SessionTransport,
    ) -> Result<Arc<Session>, SessionError> {
        self.evict_idle_session(caller)?;
        let shared_process = self
            .tools
            .load()
            .get(server.name().as_ref())
            .and_then(|tool| {
                Arc::ptr_eq(&tool.server, server).then(|| tool.shared_process.clone())?
            });
        let id = relay::to_hex(relay::random_bytes::<16>());
        let caller = McpCaller {
            session: id.clone(),
            ..caller.clone()
        };
        let relay = self.relay.clone();
        let session = Session::open(
            id.clone(),
            Arc::clone(server),
            caller,
            transport,
            relay,
            shared_process,
        )
        .await?;
        self.sessions().insert(id.clone(), Arc::clone(&session));
        // `Bridge::end` may have run during the await; the session was not in the map yet.
        if self.stop.is_cancelled() {
            self.close(&id);
            session.process().wait_for_end().await;
            return Err(SessionError::TooManySessions);
        }
        Ok(session)
    }

    /// At the limit of sessions, ends the session of `caller` that is idle for longest. Fails if no
    /// session of `caller` is idle.
    fn evict_idle_session(&self, caller: &McpCaller) -> Result<(), SessionError> {
        let sessions = self.sessions();
        let caller_sessions = || {
            sessions
                .values()
                .filter(|one| is_same_caller(one.caller(), caller))
        };
        let too_many =
            sessions.len() >= MAX_SESSIONS || caller_sessions().count() >= MAX_SESSIONS_PER_CALLER;
        if !too_many {
            return Ok(());
        }
        let idle = caller_sessions().filter_map(|one| Some((one.idle_for()?, one.id().to_owned())));
        let longest = idle.max().map(|(_, id)| id);
        drop(sessions);
        let longest = longest.ok_or(SessionError::TooManySessions)?;
        self.close(&longest);
        Ok(())
    }

    /// The session with that id, also after its server has ended.
    pub fn find_session(&self, id: &str) -> Option<Arc<Session>> {
        self.sessions().get(id).cloned()
    }

    /// The session with that id, while it is open.
    pub fn find_open_session(&self, id: &str) -> Option<Arc<Session>> {
        let session = self.find_session(id)?;
        (!session.has_ended()).then_some(session)
    }

    /// Ends a session.
    pub fn close(&self, id: &str) {
        let session = self.sessions().remove(id);
        if let Some(session) = session {
            session.end();
            self.relay.governance.contexts().delete_session(id);
        }
    }

    /// Removes ended and idle sessions and expired contexts, until the bridge stops.
    pub async fn sweep(&self) {
        loop {
            tokio::select! {
                () = self.stop.cancelled() => return,
                () = tokio::time::sleep(SWEEP_INTERVAL) => {}
            }
            let max_idle = *self.max_idle.lock().unwrap_or_else(PoisonError::into_inner);
            self.sessionless.sweep(max_idle);
            self.relay.governance.contexts().cleanup();
            let all: Vec<_> = self.sessions().values().cloned().collect();
            for session in all {
                session.remove_expired_buffers();
                // A client of HTTP with SSE reconnects within a minute or not at all.
                let max_idle = match session.transport() {
                    SessionTransport::Streamable => max_idle,
                    SessionTransport::HttpSse => max_idle.min(crate::event_buffer::RETENTION),
                };
                let unused = session.idle_for().is_some_and(|idle| idle > max_idle);
                let over = session.has_ended();
                if over && !unused && session.transport() == SessionTransport::HttpSse {
                    // An SSE stream has no HTTP status for this: the client receives a status for
                    // its next POST.
                    self.relay
                        .governance
                        .contexts()
                        .delete_session(session.id());
                    continue;
                }
                if over || unused {
                    tracing::debug!(tool = %session.server().name(), unused, "mcp session ended");
                    self.close(session.id());
                }
            }
        }
    }

    /// Ends every server process, and returns when all have ended: they receive SIGTERM at once,
    /// and SIGKILL at `kill_at`.
    pub async fn end(&self, kill_at: Instant) {
        self.stop.cancel();
        self.shutdown.begin(kill_at);
        let sessions: Vec<_> = self
            .sessions()
            .drain()
            .map(|(_, session)| session)
            .collect();
        for session in &sessions {
            session.end();
        }
        self.sessionless.end();
        self.shutdown.wait_for_end().await;
    }

    fn sessions(&self) -> MutexGuard<'_, HashMap<String, Arc<Session>>> {
        self.sessions.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The state of a tool, for health.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ToolReport {
    /// The tool's name.
    pub name: String,
    /// The description in the configuration.
    pub description: Option<String>,
    /// The runtime: local or sandbox.
    pub runtime: &'static str,
    /// The number of open sessions.
    pub sessions: usize,
    /// Why the tool cannot be used; none if it can.
    pub unavailable: Option<ToolUnavailable>,
}

impl ToolReport {
    /// How often in a row starting the server has failed.
    pub fn failures(&self) -> u32 {
        self.unavailable.as_ref().map_or(0, |why| why.failures)
    }
}
