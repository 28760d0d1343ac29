//! One process for all sessions of a server (`shared: true`).
//!
//! The bridge introduces itself to the server once and tells every client what it heard.
//! What the server says by itself goes to the session it belongs to; what belongs to nobody
//! in particular goes to nobody, except news that are everybody's (`…/list_changed`), which
//! each session hears once.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use async_trait::async_trait;
use serde_json::json;

use crate::caller::Caller;
use crate::handshake::{Ending, introduce};
use crate::launch::LaunchError;
use crate::metrics::Metrics;
use crate::process::{Home, Process};
use crate::rpc::{Kind, Message, code};
use crate::session_state::SessionState;
use crate::tools::Served;

/// See the module.
#[derive(Debug, Default)]
pub struct SharedProcess {
    inner: Mutex<Inner>,
    /// One start at a time.
    starting: tokio::sync::Mutex<()>,
}

#[derive(Debug, Default)]
struct Inner {
    process: Option<Arc<Process>>,
    /// What the server said of itself.
    introduction: String,
    sessions: HashMap<String, Member>,
}

/// A session that uses the process.
#[derive(Clone)]
struct Member {
    state: Weak<Mutex<SessionState>>,
    home: Arc<dyn Home>,
}

impl std::fmt::Debug for Member {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Member").finish_non_exhaustive()
    }
}

impl Member {
    /// Whether `test` holds for the session; never once the session is gone.
    fn is(&self, test: impl FnOnce(&SessionState) -> bool) -> bool {
        let state = self.state.upgrade();
        state.is_some_and(|state| test(&state.lock().unwrap_or_else(PoisonError::into_inner)))
    }

    async fn hear(&self, message: Message) {
        self.home.hear(message).await;
    }
}

impl SharedProcess {
    /// The process; started where there is none.
    pub async fn process(
        self: &Arc<Self>,
        served: &Served,
        caller: &Caller,
        metrics: &Metrics,
    ) -> Result<Arc<Process>, LaunchError> {
        let _one = self.starting.lock().await;
        let running = self.inner().process.clone();
        if let Some(process) = running.filter(|process| process.is_alive()) {
            return Ok(process);
        }
        let launched = served.launch(caller).await?;
        let home = Arc::new(Everybody(Arc::downgrade(self)));
        let process = served.keep(launched, home, metrics);
        let capabilities = json!({"sampling": {}, "elicitation": {}, "roots": {}});
        let ending = Ending::of(&process);
        let introduction = introduce(&process, served, &capabilities.to_string()).await?;
        ending.keep();
        let mut inner = self.inner();
        inner.introduction = introduction;
        inner.process = Some(Arc::clone(&process));
        Ok(process)
    }

    /// The answer to a client's `initialize`.
    pub fn introduce(&self, id: &str) -> String {
        Message::answer(id, &self.inner().introduction)
    }

    /// Another session, which hears at `home`.
    pub(crate) fn join(
        &self,
        session: &str,
        state: &Arc<Mutex<SessionState>>,
        home: Arc<dyn Home>,
    ) {
        let state = Arc::downgrade(state);
        let member = Member { state, home };
        self.inner().sessions.insert(session.to_owned(), member);
    }

    /// One less. With the last the process goes.
    pub fn leave(&self, session: &str) {
        let mut inner = self.inner();
        inner.sessions.remove(session);
        if inner.sessions.is_empty()
            && let Some(process) = inner.process.take()
        {
            process.stop();
        }
    }

    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn sessions(&self) -> Vec<Member> {
        self.inner().sessions.values().cloned().collect()
    }

    async fn hear(&self, message: Message) {
        let sessions = self.sessions();
        let waiting: Vec<_> = sessions
            .iter()
            .filter(|one| one.is(SessionState::is_waiting))
            .collect();
        let only = match waiting.as_slice() {
            [only] => Some(*only),
            _ => None,
        };
        match (message.kind(), message.method().unwrap_or_default()) {
            (Kind::Request, _) => match only {
                Some(only) => only.hear(message).await,
                None => {
                    // Two clients wait, and it does not say whom it means.
                    let text = "the server is shared, and the question names no client";
                    let id = message.id().unwrap_or("null");
                    let refused = Message::failure(id, code::INTERNAL, text, None);
                    let process = self.inner().process.clone();
                    if let Some(process) = process {
                        // Not here: the server may not read before it has been read.
                        tokio::spawn(async move { process.offer(&refused).await });
                    }
                }
            },
            (_, "notifications/progress") => {
                let token = message.param(&["progressToken"]);
                let call = token.and_then(|token| token.parse().ok());
                let whose = |session: &&Member| {
                    call.is_some_and(|call| session.is(|state| state.has_open(call)))
                };
                if let Some(session) = sessions.iter().find(whose) {
                    session.hear(message).await;
                }
            }
            (_, "notifications/resources/updated") => {
                let uri = message.param_text(&["uri"]).unwrap_or_default();
                for session in sessions
                    .iter()
                    .filter(|one| one.is(|state| state.has_subscribed(&uri)))
                {
                    session.hear(message.clone()).await;
                }
            }
            (_, method)
                if method == "notifications/cancelled" || method.ends_with("/list_changed") =>
            {
                for session in &sessions {
                    session.hear(message.clone()).await;
                }
            }
            _ => match only {
                Some(only) => only.hear(message).await,
                None => tracing::debug!("what a shared server says belongs to nobody"),
            },
        }
    }
}

/// The home of a process that is everybody's.
struct Everybody(Weak<SharedProcess>);

#[async_trait]
impl Home for Everybody {
    async fn hear(&self, message: Message) {
        if let Some(shared_process) = self.0.upgrade() {
            shared_process.hear(message).await;
        }
    }
}
