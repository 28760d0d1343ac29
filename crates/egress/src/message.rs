//! A request as it moves from stage to stage, and where its body is meanwhile.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use bytes::{Bytes, BytesMut};
use decide::subject::Recorded;
use http::HeaderMap;
use http::request::Parts;
use http_body_util::BodyExt;
use hyper::body::{Body, Frame, SizeHint};
use hyper::upgrade::OnUpgrade;
use policy::reason::Reason;
use policy::verdict::Denial;
use tokio::task::spawn_blocking;

use crate::body::{self, Broken, Content};
use crate::framing::Faults;
use crate::git_protocol::intake::Taken;
use crate::outgoing::Credentials;
use crate::request::Destination;
use crate::sandbox_state::SandboxState;
use crate::services::Services;
use crate::spool::{NoRoom, Spool};

/// A body that waits for an answer is kept in memory up to this size, and on disk beyond it.
const MAX_IN_MEMORY: usize = 64 * 1024;

/// A request as it moves from stage to stage.
pub struct Message {
    /// Everything but the body. In a box, because it moves often.
    pub head: Box<Parts>,
    /// The body.
    pub body: BodyState,
    /// Where it goes.
    pub destination: Destination,
    /// The connection, if the protocol may change, and who has to know.
    pub upgrade: Option<(OnUpgrade, Option<Handover>)>,
    /// What a recheck needs of the decision.
    pub recorded: Recorded,
    /// Whether a credential may be added.
    pub credentials: Credentials,
}

/// How the body of a request is taken, chosen from its head.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BodyPlan {
    /// It passes as it comes.
    Stream,
    /// It is read into memory, up to so many bytes.
    Buffer(usize),
    /// It is a push, and waits on disk until all of it was judged.
    Spool,
}

/// Where a body is.
pub enum BodyState {
    /// With the client.
    Stream(Content),
    /// In memory.
    Buffered(Bytes, Option<HeaderMap>),
    /// On disk.
    Spooled(Spool, Option<HeaderMap>),
    /// On disk, and read as a push.
    Pushed(Box<Taken>),
}

impl BodyState {
    /// A body without a byte.
    pub fn empty() -> Self {
        Self::Buffered(Bytes::new(), None)
    }

    /// Whether there is nothing to send.
    pub fn is_empty(&self) -> bool {
        match self {
            BodyState::Stream(content) => content.is_end_stream(),
            BodyState::Buffered(bytes, trailers) => bytes.is_empty() && trailers.is_none(),
            BodyState::Spooled(spool, _) => spool.is_empty(),
            BodyState::Pushed(taken) => taken.spool.is_empty(),
        }
    }

    /// The body, to be sent.
    pub fn into_content(self) -> Content {
        match self {
            BodyState::Stream(content) => content,
            BodyState::Buffered(bytes, None) => body::full(bytes),
            BodyState::Buffered(bytes, trailers) => with_trailers(body::full(bytes), trailers),
            BodyState::Spooled(spool, trailers) => {
                with_trailers(spool.into_body().boxed_unsync(), trailers)
            }
            BodyState::Pushed(taken) => taken.spool.into_body().boxed_unsync(),
        }
    }

    /// Takes the whole body from the client, into memory or onto disk, so that the request can
    /// wait without stalling the connection it came on.
    pub async fn secure(
        &mut self,
        services: &Arc<Services>,
        sandbox: &SandboxState,
    ) -> Result<(), Denial> {
        if !matches!(self, BodyState::Stream(_)) {
            return Ok(());
        }
        let BodyState::Stream(mut content) = std::mem::replace(self, Self::empty()) else {
            return Ok(());
        };
        let mut pending = BytesMut::new();
        let mut spool: Option<Spool> = None;
        let mut trailers = None;
        while let Some(frame) = content.frame().await {
            let frame = frame
                .map_err(|error| Denial::new(Reason::Framing, "body").because(error.to_string()))?;
            match frame.into_data() {
                Ok(data) => pending.extend_from_slice(&data),
                Err(frame) => trailers = frame.into_trailers().ok(),
            }
            if pending.len() >= MAX_IN_MEMORY {
                let to = spool.take();
                spool = Some(append(services, sandbox, to, pending.split().freeze()).await?);
            }
        }
        *self = match spool {
            None => BodyState::Buffered(pending.freeze(), trailers),
            Some(spool) => {
                let spool = append(services, sandbox, Some(spool), pending.freeze()).await?;
                BodyState::Spooled(spool, trailers)
            }
        };
        Ok(())
    }
}

/// Appends to a spool, which is opened where there is none yet.
async fn append(
    services: &Arc<Services>,
    sandbox: &SandboxState,
    spool: Option<Spool>,
    data: Bytes,
) -> Result<Spool, Denial> {
    let (services, quota) = (Arc::clone(services), Arc::clone(&sandbox.spooled));
    let written = spawn_blocking(move || {
        let mut spool = match spool {
            Some(spool) => spool,
            None => services.spools().open(&quota)?,
        };
        spool.append(&data)?;
        Ok::<_, std::io::Error>(spool)
    });
    let written = written.await.map_err(std::io::Error::other).flatten();
    written.map_err(|error| match error.downcast::<NoRoom>() {
        Ok(_) => Denial::new(Reason::TooLarge, "spool")
            .saying("Too much is waiting for the operator's answers already. Try again later."),
        Err(error) => Denial::new(Reason::Internal, "spool").because(error.to_string()),
    })
}

/// A body with trailers after it.
struct Trailed {
    content: Content,
    trailers: Option<HeaderMap>,
}

fn with_trailers(content: Content, trailers: Option<HeaderMap>) -> Content {
    Trailed { content, trailers }.boxed_unsync()
}

impl Body for Trailed {
    type Data = Bytes;
    type Error = Broken;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Broken>>> {
        match Pin::new(&mut self.content).poll_frame(cx) {
            Poll::Ready(None) => {
                Poll::Ready(self.trailers.take().map(|all| Ok(Frame::trailers(all))))
            }
            other => other,
        }
    }

    fn is_end_stream(&self) -> bool {
        self.content.is_end_stream() && self.trailers.is_none()
    }

    fn size_hint(&self) -> SizeHint {
        let content = self.content.size_hint();
        if self.trailers.is_none() {
            return content;
        }
        // An exact size would be sent as Content-Length, after which HTTP/1 has no trailers.
        let mut hint = SizeHint::new();
        hint.set_lower(content.lower());
        hint
    }
}

/// Lets the guard of an HTTP/1 connection know that what follows is no message.
#[derive(Clone, Debug)]
pub struct Handover {
    faults: Faults,
    ordinal: u64,
}

impl Handover {
    /// For the request of that number.
    pub fn new(faults: &Faults, ordinal: u64) -> Self {
        Self {
            faults: faults.clone(),
            ordinal,
        }
    }

    /// The connection was handed over.
    pub fn done(&self) {
        self.faults.upgrade(self.ordinal);
    }
}
