//! Requests in flight, which a reload checks again and may revoke.
//!
//! A download or a WebSocket can outlive the rule that allowed it. Each holds an [`InFlight`], and
//! a reload decides about each of them again.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};

use atomic_waker::AtomicWaker;
use config::section::git::MirrorSettings;
use decide::subject::RecheckData;
use policy::allowlist::Target;
use policy::answer::ApprovalAnswers;
use policy::host::Host;

/// All requests of one sandbox that are in flight.
#[derive(Debug, Default)]
pub struct InFlightSet {
    next: AtomicU64,
    closed: AtomicBool,
    requests: Mutex<HashMap<u64, Arc<Entry>, foldhash::fast::RandomState>>,
}

/// A request in flight.
#[derive(Debug)]
struct Entry {
    authorized: Authorized,
    revoked: AtomicBool,
    /// Wake the tasks of the response and of the request body when the request is revoked.
    wakers: [AtomicWaker; 2],
    /// Number of references to the entry: one each for the request body and the response.
    holders: AtomicUsize,
}

/// An allowed request or connection, with the data that a recheck needs.
#[derive(Clone, Debug)]
pub enum Authorized {
    /// A request.
    Request(Box<AuthorizedRequest>),
    /// A TLS passthrough connection.
    Passthrough(Box<AuthorizedConnection>),
    /// A request to a mirror, with the mirror's settings at that time.
    Mirror(Box<MirrorSettings>),
    /// A request that waits for an approval; its own task decides about it again.
    Held,
}

/// A request that was allowed.
#[derive(Clone, Debug)]
pub struct AuthorizedRequest {
    /// The target.
    pub target: Target,
    /// Whether TLS is used.
    pub tls: bool,
    /// The parts of the decision that a recheck needs.
    pub recorded: RecheckData,
    /// The operator's answers.
    pub answers: ApprovalAnswers,
}

/// A TLS passthrough connection that was allowed.
#[derive(Clone, Debug)]
pub struct AuthorizedConnection {
    /// The host.
    pub host: Host,
    /// The port.
    pub port: u16,
    /// The program, if known.
    pub program: Option<String>,
    /// The parts of the decision that a recheck needs.
    pub recorded: RecheckData,
    /// The operator's answers.
    pub answers: ApprovalAnswers,
}

/// Handle of a request in flight. Dropping the last handle ends the entry.
#[derive(Debug)]
pub struct InFlight {
    entry: Arc<Entry>,
    number: u64,
    set: Arc<InFlightSet>,
    holder: Holder,
}

/// The task that holds a handle: the one that sends the response, or the upload.
#[derive(Clone, Copy, Debug)]
enum Holder {
    Response,
    Upload,
}

impl InFlightSet {
    /// Adds a request in flight. The caller checks registry and rules once more afterwards: see
    /// [`RequestCx::enter`](crate::request_cx::RequestCx::enter).
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
            set: Arc::clone(self),
            holder: Holder::Response,
        }
    }

    /// Revokes every request that `is_allowed` rejects, and returns how many.
    pub fn recheck(&self, is_allowed: impl Fn(&Authorized) -> bool) -> usize {
        // Copied, so that the lock is not held during the decisions.
        let entries: Vec<Arc<Entry>> = self.table().values().cloned().collect();
        let revoked = entries
            .iter()
            .filter(|entry| !is_allowed(&entry.authorized));
        revoked.map(|entry| entry.revoke()).count()
    }

    /// Revokes every request that is in flight now.
    pub fn end(&self) {
        self.recheck(|_| false);
    }

    /// Revokes every request, including later ones.
    pub fn close(&self) {
        self.closed.store(true, Ordering::Release);
        self.end();
    }

    /// Whether the set was closed.
    pub fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Acquire)
    }

    /// Number of requests in flight.
    pub fn len(&self) -> usize {
        self.table().len()
    }

    /// Whether no request is in flight.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Number of requests that wait for an approval.
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
    /// The request or connection that was allowed.
    pub fn authorized(&self) -> &Authorized {
        &self.entry.authorized
    }

    /// A second handle for the upload, which may outlast the response. The request is in flight
    /// until both are dropped.
    pub fn for_upload(&self) -> Self {
        self.entry.holders.fetch_add(1, Ordering::Relaxed);
        Self {
            entry: Arc::clone(&self.entry),
            number: self.number,
            set: Arc::clone(&self.set),
            holder: Holder::Upload,
        }
    }

    /// Whether the request was revoked.
    pub fn is_revoked(&self) -> bool {
        self.entry.revoked.load(Ordering::Acquire)
    }

    /// Ready when the request is revoked; otherwise registers the task to be woken.
    pub fn poll_revoked(&self, cx: &Context<'_>) -> Poll<()> {
        if self.is_revoked() {
            return Poll::Ready(());
        }
        let [response, upload] = &self.entry.wakers;
        let waker = match self.holder {
            Holder::Response => response,
            Holder::Upload => upload,
        };
        waker.register(cx.waker());
        if self.is_revoked() {
            Poll::Ready(())
        } else {
            Poll::Pending
        }
    }

    /// Waits until the request is revoked.
    pub async fn revoked(&self) {
        std::future::poll_fn(|cx| self.poll_revoked(cx)).await;
    }
}

impl Drop for InFlight {
    fn drop(&mut self) {
        if self.entry.holders.fetch_sub(1, Ordering::AcqRel) == 1 {
            self.set.table().remove(&self.number);
        }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// A TLS passthrough connection to `host`.
    pub(crate) fn connection(host: &str) -> Authorized {
        Authorized::Passthrough(Box::new(AuthorizedConnection {
            host: Host::parse(host).unwrap(),
            port: 443,
            program: None,
            recorded: RecheckData::default(),
            answers: ApprovalAnswers::default(),
        }))
    }

    #[tokio::test]
    async fn recheck_revokes_only_requests_that_are_no_longer_allowed() {
        let set = Arc::new(InFlightSet::default());
        let revoked = set.enter(connection("revoked.example"));
        let stays = set.enter(connection("stays.example"));
        let waiting = tokio::spawn(async move { revoked.revoked().await });
        tokio::task::yield_now().await;
        let keep = |authorized: &Authorized| match authorized {
            Authorized::Passthrough(connection) => connection.host.to_string().starts_with("stays"),
            Authorized::Request(_) | Authorized::Mirror(_) | Authorized::Held => false,
        };
        assert_eq!(set.recheck(keep), 1);
        waiting.await.unwrap();
        assert_eq!(set.len(), 1);
        drop(stays);
        assert!(set.is_empty());
    }

    #[test]
    fn closed_set_also_revokes_later_requests() {
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
