//! The answer of upstream to a push: which refs it took is remembered and recorded.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use http_body_util::BodyExt;
use hyper::body::{Body, Frame};
use policy::audit::AuditEvent;
use policy::refs::RefUpdate;

use crate::body::{Broken, Content};
use crate::branches::{self, Deed, Place};
use crate::git_protocol::push::Capabilities;
use crate::git_protocol::report::Reader;
use crate::request_log::Tally;
use crate::sandbox_state::SandboxState;
use crate::services::Services;

/// A push that is on its way.
pub struct Sent {
    pub(crate) capabilities: Capabilities,
    pub(crate) services: Arc<Services>,
    pub(crate) sandbox: Arc<SandboxState>,
    pub(crate) place: Place,
    pub(crate) updates: Vec<RefUpdate>,
    pub(crate) reader: Reader,
    /// What the client is told beside upstream's answer, as bytes of it.
    pub(crate) talk: Vec<u8>,
    /// The request's own, where a rejection is noted.
    pub(crate) tally: Arc<Tally>,
}

/// The answer to a push on its way. What upstream took is remembered as it is read, and on
/// record when the answer ends, wherever that is.
struct Watched {
    inner: Content,
    sent: Sent,
    noted: usize,
}

impl Watched {
    /// Notes what is newly known. Before the client hears of it: its next push may follow
    /// at once.
    fn note(&mut self, data: &[u8]) {
        self.sent.reader.feed(data);
        if self.sent.reader.is_rejected() {
            self.sent.tally.refs_rejected.store(true, Ordering::Relaxed);
        }
        let known = self.sent.reader.accepted().len();
        if known > self.noted {
            self.noted = known;
            for deed in [Deed::Made, Deed::Gone] {
                for name in self.sent.done(deed) {
                    self.sent
                        .sandbox
                        .branches
                        .note(&self.sent.place, &name, deed);
                }
            }
        }
    }
}

impl Sent {
    /// Upstream's answer, looked at as it passes.
    pub(crate) fn watch(self, inner: Content) -> Content {
        Watched {
            inner,
            sent: self,
            noted: 0,
        }
        .boxed_unsync()
    }

    /// The branches to which upstream did that.
    fn done(&self, deed: Deed) -> Vec<String> {
        let accepted = self.reader.accepted();
        let matches = |update: &&RefUpdate| {
            let name = update.name.as_bytes();
            let did = match deed {
                Deed::Made => update.old.is_zero() && !update.is_deletion(),
                Deed::Gone => update.is_deletion(),
            };
            did && name.starts_with(b"refs/heads/") && accepted.contains(name)
        };
        let done = self.updates.iter().filter(matches);
        done.map(|update| update.name.to_string()).collect()
    }

    fn records(&self) -> Vec<AuditEvent> {
        let of = |deed| {
            let names = self.done(deed);
            branches::records(self.sandbox.id(), &self.place, &names, deed)
        };
        [of(Deed::Made), of(Deed::Gone)].concat()
    }
}

impl Drop for Watched {
    fn drop(&mut self) {
        let records = self.sent.records();
        if records.is_empty() {
            return;
        }
        let services = Arc::clone(&self.sent.services);
        self.sent.services.spawn(async move {
            for record in records {
                services.audit().keep(Box::new(record)).await;
            }
        });
    }
}

impl Body for Watched {
    type Data = Bytes;
    type Error = Broken;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Broken>>> {
        if !self.sent.talk.is_empty() {
            let talk = std::mem::take(&mut self.sent.talk);
            return Poll::Ready(Some(Ok(Frame::data(talk.into()))));
        }
        let frame = ready!(Pin::new(&mut self.inner).poll_frame(cx));
        if let Some(Ok(frame)) = &frame
            && let Some(data) = frame.data_ref()
        {
            self.note(data);
        }
        Poll::Ready(frame)
    }
}
