//! Requests in flight, and how they end when the rules change under them.
//!
//! A download or a WebSocket can outlive the rule that allowed it. Each holds an [`InFlight`],
//! and a reload decides about all of them again.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};

use atomic_waker::AtomicWaker;
use config::section::git::MirrorSettings;
use decide::subject::Recorded;
use policy::allowlist::Target;
use policy::answer::Answers;
use policy::host::Host;

/// All requests of one sandbox that are in flight.
#[derive(Debug, Default)]
pub struct InFlightSet {
    next: AtomicU64,
    closed: AtomicBool,
    requests: Mutex<HashMap<u64, Arc<Entry>, foldhash::fast::RandomState>>,
}

/// One of them.
#[derive(Debug)]
struct Entry {
    authorized: Authorized,
    revoked: AtomicBool,
    /// The answer, and the upload.
    wakers: [AtomicWaker; 2],
    /// How many of them hold it.
    holders: AtomicUsize,
}

/// What was allowed, with what a recheck needs.
#[derive(Clone, Debug)]
pub enum Authorized {
    /// A request.
    Request(Box<AuthorizedRequest>),
    /// A connection that passes unread.
    Passthrough(Box<AuthorizedConnection>),
    /// Something of a mirror, as the operator configured it then.
    Mirror(Box<MirrorSettings>),
    /// Something that waits for the operator's answer. The task that waits decides it anew.
    Held,
}

/// A request that was allowed.
#[derive(Clone, Debug)]
pub struct AuthorizedRequest {
    /// What it wants.
    pub target: Target,
    /// Whether over TLS.
    pub tls: bool,
    /// What a recheck needs.
    pub recorded: Recorded,
    /// The answers it was given.
    pub answers: Answers,
}

/// A connection that was allowed to pass unread.
#[derive(Clone, Debug)]
pub struct AuthorizedConnection {
    /// The host.
    pub host: Host,
    /// The port.
    pub port: u16,
    /// The program, where it is known.
    pub program: Option<String>,
    /// What a recheck needs.
    pub recorded: Recorded,
    /// The answers it was given.
    pub answers: Answers,
}

/// Whoever holds it is in flight. Dropped at the end.
#[derive(Debug)]
pub struct InFlight {
    entry: Arc<Entry>,
    number: u64,
    among: Arc<InFlightSet>,
    half: Half,
}

/// Which half of a request holds it.
#[derive(Clone, Copy, Debug)]
enum Half {
    Answer,
    Upload,
}

impl InFlightSet {
    /// Notes that a request is in flight. What decided it looks at registry and rules once more
    /// afterwards: see [`RequestCx::enter`](crate::request_cx::RequestCx::enter).
    pub(crate) fn enter(self: &Arc<Self>, authorized: Authorized) -> InFlight {
        let entry = Arc::new(Entry {
            authorized,
            revoked: AtomicBool::new(false),
            wakers: [AtomicWaker::new(), AtomicWaker::new()],
            holders: AtomicUsize::new(1),
        });
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        self.table().insert(number, Arc::clone(&entry));
        if self.closed.load(Ordering::Acquire) {
            entry.revoke();
        }
        InFlight {
            entry,
            number,
            among: Arc::clone(self),
            half: Half::Answer,
        }
    }

    /// Ends every request that `still` does not allow any more, and returns how many.
    pub fn recheck(&self, still: impl Fn(&Authorized) -> bool) -> usize {
        // A decision can take a moment, and requests come and go meanwhile.
        let entries: Vec<Arc<Entry>> = self.table().values().cloned().collect();
        let gone = entries.iter().filter(|entry| !still(&entry.authorized));
        gone.map(|entry| entry.revoke()).count()
    }

    /// Ends every request that is in flight now.
    pub fn end(&self) {
        self.recheck(|_| false);
    }

    /// Ends every request, and each that comes from now on.
    pub fn close(&self) {
        self.closed.store(true, Ordering::Release);
        self.end();
    }

    /// Whether every request ends.
    pub fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Acquire)
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.table().len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// How many wait for an answer.
    pub fn held(&self) -> usize {
        let table = self.table();
        let held = |entry: &&Arc<Entry>| matches!(entry.authorized, Authorized::Held);
        table.values().filter(held).count()
    }

    fn table(&self) -> MutexGuard<'_, HashMap<u64, Arc<Entry>, foldhash::fast::RandomState>> {
        self.requests.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Entry {
    fn revoke(&self) {
        self.revoked.store(true, Ordering::Release);
        self.wakers.iter().for_each(AtomicWaker::wake);
    }
}

impl InFlight {
    /// What was allowed.
    pub fn authorized(&self) -> &Authorized {
        &self.entry.authorized
    }

    /// A second holder for what is sent, which may take longer than the answer: the request is
    /// in flight until both have ended.
    pub fn for_upload(&self) -> Self {
        self.entry.holders.fetch_add(1, Ordering::Relaxed);
        Self {
            entry: Arc::clone(&self.entry),
            number: self.number,
            among: Arc::clone(&self.among),
            half: Half::Upload,
        }
    }

    /// Whether it must end.
    pub fn is_revoked(&self) -> bool {
        self.entry.revoked.load(Ordering::Acquire)
    }

    /// Whether it must end. If not yet, the task is woken when it must.
    pub fn poll_revoked(&self, cx: &Context<'_>) -> Poll<()> {
        if self.is_revoked() {
            return Poll::Ready(());
        }
        let [answer, upload] = &self.entry.wakers;
        let waker = match self.half {
            Half::Answer => answer,
            Half::Upload => upload,
        };
        waker.register(cx.waker());
        if self.is_revoked() {
            Poll::Ready(())
        } else {
            Poll::Pending
        }
    }

    /// Waits until it must end.
    pub async fn revoked(&self) {
        std::future::poll_fn(|cx| self.poll_revoked(cx)).await;
    }
}

impl Drop for InFlight {
    fn drop(&mut self) {
        if self.entry.holders.fetch_sub(1, Ordering::AcqRel) == 1 {
            self.among.table().remove(&self.number);
        }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// A connection to `host` that passes unread.
    pub(crate) fn connection(host: &str) -> Authorized {
        Authorized::Passthrough(Box::new(AuthorizedConnection {
            host: Host::parse(host).unwrap(),
            port: 443,
            program: None,
            recorded: Recorded::default(),
            answers: Answers::default(),
        }))
    }

    #[tokio::test]
    async fn what_is_not_allowed_any_more_is_revoked_and_the_rest_is_not() {
        let set = Arc::new(InFlightSet::default());
        let gone = set.enter(connection("gone.example"));
        let stays = set.enter(connection("stays.example"));
        let waiting = tokio::spawn(async move { gone.revoked().await });
        tokio::task::yield_now().await;
        let keep = |authorized: &Authorized| match authorized {
            Authorized::Passthrough(one) => one.host.to_string().starts_with("stays"),
            Authorized::Request(_) | Authorized::Mirror(_) | Authorized::Held => false,
        };
        assert_eq!(set.recheck(keep), 1);
        waiting.await.unwrap();
        assert_eq!(set.len(), 1);
        drop(stays);
        assert!(set.is_empty());
    }

    #[test]
    fn a_closed_set_revokes_what_comes_later_too() {
        let set = Arc::new(InFlightSet::default());
        let before = set.enter(connection("x.example"));
        assert!(!before.is_revoked());
        set.close();
        assert!(before.is_revoked());
        let after = set.enter(Authorized::Held);
        assert_eq!(set.held(), 1);
        assert!(after.is_revoked());
    }
}
