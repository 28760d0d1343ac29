//! Requests that are under way, and how they end when the rules change under them.
//!
//! A download or a WebSocket can outlive the rule that allowed it. Each holds a [`Live`],
//! and a reload judges all of them again.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};

use atomic_waker::AtomicWaker;
use policy::allowlist::Target;
use policy::verdict::RuleName;
use serde_json::Value;

/// All requests of one sandbox that are under way.
#[derive(Debug, Default)]
pub struct Underway {
    next: AtomicU64,
    requests: Mutex<HashMap<u64, Arc<Call>, foldhash::fast::RandomState>>,
}

/// One of them.
#[derive(Debug)]
struct Call {
    /// What was allowed; none for a tunnel that is passed on unread.
    asked: Asked,
    revoked: AtomicBool,
    /// Who hears of it: the answer, and the upload.
    wakers: [AtomicWaker; 2],
    /// How many of them there are.
    holds: AtomicUsize,
}

/// What a request was allowed to do.
#[derive(Clone, Debug)]
pub enum Asked {
    /// A request, and who allowed it beyond the allowlist.
    Request(Box<Target>, Judged),
    /// A whole connection to a host and port, unread, of a program if that is known, and
    /// what the operator's policies were told of it.
    Tunnel(policy::host::Host, u16, Option<String>, Arc<Value>),
    /// Something of a mirror, as the operator configured it then.
    Mirror(Box<config::section::git::Mirror>),
}

/// Who judged a request beyond the allowlist, so that they can be asked again.
#[derive(Clone, Debug, Default)]
pub struct Judged {
    /// What the operator's policies were told.
    pub policies: Option<Arc<Value>>,
    /// The rule for GitHub's API that allowed it.
    pub github: Option<RuleName>,
}

/// The one who holds it is under way. Dropped at the end.
#[derive(Debug)]
pub struct Live {
    call: Arc<Call>,
    number: u64,
    among: Arc<Underway>,
    way: Way,
}

/// Which half of a request holds it.
#[derive(Clone, Copy, Debug)]
enum Way {
    Answer,
    Upload,
}

impl Underway {
    /// Notes that a request is under way. Whoever judged it looks at registry and rules once
    /// more afterwards: see [`crate::traffic::Traffic::enter`].
    pub(crate) fn enter(self: &Arc<Self>, asked: Asked) -> Live {
        let call = Arc::new(Call {
            asked,
            revoked: AtomicBool::new(false),
            wakers: [AtomicWaker::new(), AtomicWaker::new()],
            holds: AtomicUsize::new(1),
        });
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        self.table().insert(number, Arc::clone(&call));
        Live {
            call,
            number,
            among: Arc::clone(self),
            way: Way::Answer,
        }
    }

    /// Ends every request that `still` does not allow any more, and says how many.
    pub fn judge_again(&self, still: impl Fn(&Asked) -> bool) -> usize {
        // A judgement can take a moment, and requests come and go meanwhile.
        let calls: Vec<Arc<Call>> = self.table().values().cloned().collect();
        let gone = calls.iter().filter(|call| !still(&call.asked));
        gone.map(|call| call.revoke()).count()
    }

    /// Ends every request.
    pub fn end(&self) {
        self.judge_again(|_| false);
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.table().len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    fn table(&self) -> MutexGuard<'_, HashMap<u64, Arc<Call>, foldhash::fast::RandomState>> {
        self.requests.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Call {
    fn revoke(&self) {
        self.revoked.store(true, Ordering::Release);
        self.wakers.iter().for_each(AtomicWaker::wake);
    }
}

impl Live {
    /// What was allowed.
    pub fn asked(&self) -> &Asked {
        &self.call.asked
    }

    /// A hold for what is sent, which may take longer than the answer: it is under way until
    /// both have ended.
    pub fn for_upload(&self) -> Self {
        self.call.holds.fetch_add(1, Ordering::Relaxed);
        Self {
            call: Arc::clone(&self.call),
            number: self.number,
            among: Arc::clone(&self.among),
            way: Way::Upload,
        }
    }

    /// Whether it must end.
    pub fn is_revoked(&self) -> bool {
        self.call.revoked.load(Ordering::Acquire)
    }

    /// Whether it must end. If not yet, the task is woken when it must.
    pub fn poll_revoked(&self, cx: &Context<'_>) -> Poll<()> {
        if self.is_revoked() {
            return Poll::Ready(());
        }
        let [answer, upload] = &self.call.wakers;
        let waker = match self.way {
            Way::Answer => answer,
            Way::Upload => upload,
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

impl Drop for Live {
    fn drop(&mut self) {
        if self.call.holds.fetch_sub(1, Ordering::AcqRel) == 1 {
            self.among.table().remove(&self.number);
        }
    }
}

#[cfg(test)]
mod tests {
    use policy::host::Host;

    use super::*;

    #[tokio::test]
    async fn what_is_not_allowed_any_more_hears_of_it_and_the_rest_goes_on() {
        let underway = Arc::new(Underway::default());
        let tunnel = |name: &str| {
            let host = Host::parse(name).unwrap();
            Asked::Tunnel(host, 443, None, Arc::default())
        };
        let gone = underway.enter(tunnel("gone.example"));
        let stays = underway.enter(tunnel("stays.example"));
        let waiting = tokio::spawn(async move { gone.revoked().await });
        tokio::task::yield_now().await;
        let keep = |asked: &Asked| match asked {
            Asked::Tunnel(host, ..) => host.to_string().starts_with("stays"),
            Asked::Request(..) | Asked::Mirror(_) => false,
        };
        assert_eq!(underway.judge_again(keep), 1);
        waiting.await.unwrap();
        assert_eq!(underway.len(), 1);
        drop(stays);
        assert!(underway.is_empty());
        let last = underway.enter(tunnel("last.example"));
        assert!(!last.is_revoked());
        underway.end();
        assert!(last.is_revoked());
    }
}
