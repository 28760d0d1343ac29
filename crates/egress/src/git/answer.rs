//! What is done with upstream's answer before the client reads it.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use http::header::{CONTENT_ENCODING, CONTENT_LENGTH, CONTENT_TYPE, HeaderMap};
use http::{Response, StatusCode};
use http_body_util::BodyExt;
use hyper::body::{Body, Frame};
use policy::audit::AuditEvent;
use policy::refs::RefUpdate;
use policy::verdict::Denial;

use super::advertisement::{self, Rewriter};
use super::branches::{self, Deed, Place};
use super::push::Capabilities;
use super::receive;
use super::report::{self, Reader};
use crate::body::{Broken, Content};
use crate::dialer::Arriving;
use crate::forward::Reply;
use crate::guest::Guest;
use crate::refusal::Refusal;
use crate::traffic::Traffic;
use crate::trail::Tally;

/// What is still to do when upstream answers.
pub enum Aftermath {
    /// Nothing.
    None,
    /// An advertisement for a push gains a word.
    Advertisement,
    /// A push: upstream says what became of it.
    Push(Box<Sent>),
}

/// A push that is on its way.
pub struct Sent {
    pub(super) capabilities: Capabilities,
    pub(super) traffic: Arc<Traffic>,
    pub(super) guest: Arc<Guest>,
    pub(super) place: Place,
    pub(super) updates: Vec<RefUpdate>,
    pub(super) reader: Reader,
    /// What the client is told beside upstream's answer, as bytes of it.
    pub(super) talk: Vec<u8>,
    /// The request's own, where a rejection is noted.
    pub(super) tally: Arc<Tally>,
}

impl Aftermath {
    /// Looks at the answer, and changes it where there is something to change.
    pub fn apply(self, reply: Reply) -> Reply {
        let Reply::Theirs(mut response, live) = reply else {
            return reply;
        };
        let ours = match &self {
            Aftermath::None => false,
            Aftermath::Advertisement => is_plain(&response, advertisement::CONTENT_TYPE),
            Aftermath::Push(_) => is_plain(&response, report::CONTENT_TYPE),
        };
        if !ours {
            return Reply::Theirs(response, live);
        }
        response.headers_mut().remove(CONTENT_LENGTH);
        let response = response.map(|inner| match self {
            Aftermath::Advertisement => Rewritten {
                inner,
                rewriter: Some(Rewriter::default()),
            }
            .boxed_unsync(),
            Aftermath::Push(sent) => sent.watch(inner.map_err(Into::into).boxed_unsync()),
            Aftermath::None => inner.map_err(Into::into).boxed_unsync(),
        });
        Reply::Changed(response, live)
    }
}

/// Whether an answer is what it should be, and readable.
fn is_plain(response: &Response<Arriving>, kind: &str) -> bool {
    let headers: &HeaderMap = response.headers();
    let said = headers.get(CONTENT_TYPE);
    response.status() == StatusCode::OK
        && said.is_some_and(|said| said.as_bytes().eq_ignore_ascii_case(kind.as_bytes()))
        && !headers.contains_key(CONTENT_ENCODING)
}

/// An advertisement on its way.
struct Rewritten {
    inner: Arriving,
    /// None once everything was given.
    rewriter: Option<Rewriter>,
}

impl Body for Rewritten {
    type Data = Bytes;
    type Error = Broken;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Broken>>> {
        loop {
            let frame = ready!(Pin::new(&mut self.inner).poll_frame(cx));
            let Some(rewriter) = &mut self.rewriter else {
                return Poll::Ready(frame.map(|frame| frame.map_err(Into::into)));
            };
            let out = match frame {
                Some(Ok(frame)) => match frame.into_data() {
                    Ok(data) => rewriter.feed(&data),
                    Err(trailers) => return Poll::Ready(Some(Ok(trailers))),
                },
                Some(Err(error)) => return Poll::Ready(Some(Err(error.into()))),
                None => {
                    let rest = rewriter.finish();
                    self.rewriter = None;
                    if rest.is_empty() {
                        return Poll::Ready(None);
                    }
                    rest
                }
            };
            if !out.is_empty() {
                return Poll::Ready(Some(Ok(Frame::data(out.into()))));
            }
        }
    }
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
                    self.sent.guest.branches.note(&self.sent.place, &name, deed);
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

    /// The refusal of a push that did not get to upstream after all.
    pub(crate) fn refuse(&self, denial: Denial) -> Refusal {
        receive::refused(denial, self.capabilities, &self.updates)
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
            branches::records(self.guest.id(), &self.place, &names, deed)
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
        let traffic = Arc::clone(&self.sent.traffic);
        self.sent.traffic.spawn(async move {
            for record in records {
                traffic.ledger().keep(Box::new(record)).await;
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
