//! Stdio servers, served over HTTP: which there are, who talks to them, and for how long.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use arc_swap::ArcSwap;
use config::Settings;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::caller::{Caller, same};
use crate::fingerprint::Fingerprints;
use crate::modern::SessionlessService;
use crate::relay::{self, Relay};
use crate::session::{Session, SessionError, Way};
use crate::shared::SharedProcess;
use crate::shutdown::Shutdown;
use crate::tools::{Launchers, Served, Unavailable};

/// The most sessions.
const MOST_SESSIONS: usize = 1024;

/// The most sessions of one caller.
const MOST_OF_ONE: usize = 64;

/// How often sessions are looked after.
const SWEEP_EVERY: Duration = Duration::from_secs(1);

/// One server with what its sessions share.
#[derive(Clone, Debug)]
struct Tool {
    served: Arc<Served>,
    shared_process: Option<Arc<SharedProcess>>,
}

/// See the module.
#[derive(Debug)]
pub struct Bridge {
    tools: ArcSwap<BTreeMap<String, Tool>>,
    launchers: Launchers,
    fingerprints: Arc<Fingerprints>,
    relay: Relay,
    sessions: Mutex<HashMap<String, Arc<Session>>>,
    sessionless: Arc<SessionlessService>,
    idle: Mutex<Duration>,
    stop: CancellationToken,
    shutdown: Arc<Shutdown>,
}

impl Bridge {
    /// A bridge that serves nothing yet.
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
            idle: Mutex::new(Duration::from_secs(300)),
            stop,
            shutdown: Arc::default(),
        })
    }

    /// Serves what `settings` say from now on. Tools that are as they were keep their
    /// sessions; those of others end.
    pub fn apply(&self, settings: &Settings) {
        *self.idle.lock().unwrap_or_else(PoisonError::into_inner) = settings.server.session_idle;
        let before = self.tools.load();
        let mut tools = BTreeMap::new();
        for config in &settings.tools {
            let known = before.get(&config.name);
            let tool = known.filter(|tool| tool.served.config() == config);
            let tool = tool.cloned().unwrap_or_else(|| Tool {
                served: Arc::new(Served::new(
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
            if kept.is_none_or(|kept| !Arc::ptr_eq(&kept.served, &tool.served)) {
                tool.served.stop().cancel();
            }
        }
        self.tools.store(Arc::new(tools));
        let tools = settings.tools.iter();
        let tools = tools.map(|tool| (tool.name.as_str(), tool.runtime.kind));
        self.relay.governance.metrics().report_tools(tools);
    }

    /// The server called `name`, if `caller` may know of it. Without a name: the only one.
    pub fn tool(&self, name: Option<&str>, caller: &Caller) -> Result<Arc<Served>, String> {
        let tools = self.tools.load();
        let visible = |tool: &&Tool| tool.served.is_visible_to(caller);
        match name {
            Some(name) => {
                let tool = tools.get(name).filter(visible);
                tool.map(|tool| Arc::clone(&tool.served))
                    .ok_or_else(|| "Tool not found".to_owned())
            }
            None => {
                let mut all = tools.values().filter(visible);
                match (all.next(), all.next()) {
                    (Some(only), None) => Ok(Arc::clone(&only.served)),
                    (None, _) => Err("No tool is configured".to_owned()),
                    (Some(_), Some(_)) => {
                        Err("There are several tools: name one, as in /mcp/<tool>".to_owned())
                    }
                }
            }
        }
    }

    /// Every server that `caller` may know of.
    pub fn visible(&self, caller: &Caller) -> Vec<Arc<Served>> {
        let tools = self.tools.load();
        let visible = tools
            .values()
            .filter(|tool| tool.served.is_visible_to(caller));
        visible.map(|tool| Arc::clone(&tool.served)).collect()
    }

    /// The state of each server for health.
    pub fn report(&self) -> Vec<Report> {
        let mut running: HashMap<String, usize> = HashMap::new();
        for session in self.sessions().values().filter(|one| !one.is_over()) {
            *running
                .entry(session.served().name().to_string())
                .or_default() += 1;
        }
        let tools = self.tools.load();
        tools
            .values()
            .map(|tool| {
                let name = tool.served.name().to_string();
                Report {
                    sessions: running.get(&name).copied().unwrap_or_default(),
                    runtime: tool.served.runtime(),
                    unavailable: tool.served.unavailable(),
                    description: tool.served.config().description.clone(),
                    name,
                }
            })
            .collect()
    }

    /// What tools looked like.
    pub fn fingerprints(&self) -> &Arc<Fingerprints> {
        &self.fingerprints
    }

    /// Sees calls through.
    pub fn relay(&self) -> &Relay {
        &self.relay
    }

    /// Serves requests without sessions.
    pub fn sessionless(&self) -> &Arc<SessionlessService> {
        &self.sessionless
    }

    /// Opens a session with `served`.
    pub async fn open(
        self: &Arc<Self>,
        served: &Arc<Served>,
        caller: &Caller,
        way: Way,
    ) -> Result<Arc<Session>, SessionError> {
        self.make_room(caller)?;
        let shared_process = self
            .tools
            .load()
            .get(served.name().as_ref())
            .and_then(|tool| {
                Arc::ptr_eq(&tool.served, served).then(|| tool.shared_process.clone())?
            });
        let id = relay::hex(relay::random::<16>());
        let caller = Caller {
            session: id.clone(),
            ..caller.clone()
        };
        let relay = self.relay.clone();
        let session = Session::open(
            id.clone(),
            Arc::clone(served),
            caller,
            way,
            relay,
            shared_process,
        )
        .await?;
        self.sessions().insert(id.clone(), Arc::clone(&session));
        // Whoever ended everything meanwhile has not seen it.
        if self.stop.is_cancelled() {
            self.close(&id);
            session.process().ended().await;
            return Err(SessionError::Full);
        }
        Ok(session)
    }

    /// A caller has so many sessions and no more. One that nobody uses goes for a new one.
    fn make_room(&self, caller: &Caller) -> Result<(), SessionError> {
        let sessions = self.sessions();
        let of_one = || sessions.values().filter(|one| same(one.caller(), caller));
        let too_many = sessions.len() >= MOST_SESSIONS || of_one().count() >= MOST_OF_ONE;
        if !too_many {
            return Ok(());
        }
        let idle = of_one().filter_map(|one| Some((one.idle_for()?, one.id().to_owned())));
        let longest = idle.max().map(|(_, id)| id);
        drop(sessions);
        let longest = longest.ok_or(SessionError::Full)?;
        self.close(&longest);
        Ok(())
    }

    /// The session of that name, also one whose server has just ended.
    pub fn known(&self, id: &str) -> Option<Arc<Session>> {
        self.sessions().get(id).cloned()
    }

    /// The session of that name, while it lasts.
    pub fn session(&self, id: &str) -> Option<Arc<Session>> {
        let session = self.known(id)?;
        (!session.is_over()).then_some(session)
    }

    /// Ends a session.
    pub fn close(&self, id: &str) {
        let session = self.sessions().remove(id);
        if let Some(session) = session {
            session.end();
            self.relay.governance.contexts().delete_session(id);
        }
    }

    /// Looks after sessions until the stop: those that are over or unused for too long go.
    pub async fn sweep(&self) {
        loop {
            tokio::select! {
                () = self.stop.cancelled() => return,
                () = tokio::time::sleep(SWEEP_EVERY) => {}
            }
            let most = *self.idle.lock().unwrap_or_else(PoisonError::into_inner);
            self.sessionless.sweep(most);
            self.relay.governance.contexts().cleanup();
            let all: Vec<_> = self.sessions().values().cloned().collect();
            for session in all {
                session.tidy();
                // An old client comes back within a minute or not at all.
                let most = match session.way() {
                    Way::Streamable => most,
                    Way::OneStream => most.min(crate::event_buffer::KEPT),
                };
                let unused = session.idle_for().is_some_and(|idle| idle > most);
                let over = session.is_over();
                if over && !unused && session.way() == Way::OneStream {
                    // The stream carries no status: the client receives it with its next POST.
                    self.relay
                        .governance
                        .contexts()
                        .delete_session(session.id());
                    continue;
                }
                if over || unused {
                    tracing::debug!(tool = %session.served().name(), unused, "a session is over");
                    self.close(session.id());
                }
            }
        }
    }

    /// Ends every server, and returns when all have ended: they receive SIGTERM at once, and
    /// SIGKILL at `kill_at`.
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
        self.shutdown.ended().await;
    }

    fn sessions(&self) -> MutexGuard<'_, HashMap<String, Arc<Session>>> {
        self.sessions.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What health says of a server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Report {
    /// Its name.
    pub name: String,
    /// What the operator wrote about it.
    pub description: Option<String>,
    /// Where it runs.
    pub runtime: &'static str,
    /// Sessions that are open.
    pub sessions: usize,
    /// Why it cannot be used, if it cannot.
    pub unavailable: Option<Unavailable>,
}

impl Report {
    /// How often it was not started in a row.
    pub fn failures(&self) -> u32 {
        self.unavailable.as_ref().map_or(0, |why| why.failures)
    }
}
