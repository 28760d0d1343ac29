//! A request in the pipeline, and the state of its body.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use bytes::{Bytes, BytesMut};
use decide::subject::RecheckData;
use http::HeaderMap;
use http::request::Parts;
use http_body_util::BodyExt;
use hyper::body::{Body, Frame, SizeHint};
use hyper::upgrade::OnUpgrade;
use policy::reason::Reason;
use policy::verdict::Denial;
use tokio::task::spawn_blocking;

use crate::body::{self, BodyError, MessageBody};
use crate::framing::GuardHandle;
use crate::git_protocol::push_spooler::SpooledPush;
use crate::outgoing::Credentials;
use crate::request::Destination;
use crate::sandbox_state::SandboxState;
use crate::services::Services;
use crate::spool::{Spool, SpoolFull};

/// Body size up to which a waiting request is kept in memory; larger bodies go to disk.
const MAX_IN_MEMORY: usize = 64 * 1024;

/// A request in the pipeline.
pub struct PipelineRequest {
    /// The request head. Boxed, because the message is moved often.
    pub head: Box<Parts>,
    /// The body.
    pub body: BodyState,
    /// The destination.
    pub destination: Destination,
    /// The client connection, if it may upgrade, and the framing guard to notify.
    pub upgrade: Option<(OnUpgrade, Option<Handover>)>,
    /// The parts of the decision that a recheck needs.
    pub recorded: RecheckData,
    /// Whether a credential may be added.
    pub credentials: Credentials,
}

/// How a request body is read, chosen from its head.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BodyPlan {
    /// The body is forwarded as it arrives.
    Stream,
    /// The body is read into memory, up to this many bytes.
    Buffer(usize),
    /// The body is a push, which is stored on disk until it is decided.
    Spool,
}

/// State of a request body.
pub enum BodyState {
    /// Not read yet.
    Stream(MessageBody),
    /// In memory.
    Buffered(Bytes, Option<HeaderMap>),
    /// On disk.
    Spooled(Spool, Option<HeaderMap>),
    /// On disk, and parsed as a push.
    Pushed(Box<SpooledPush>),
}

impl BodyState {
    /// An empty body.
    pub fn empty() -> Self {
        Self::Buffered(Bytes::new(), None)
    }

    /// Whether the body is empty.
    pub fn is_empty(&self) -> bool {
        match self {
            BodyState::Stream(content) => content.is_end_stream(),
            BodyState::Buffered(bytes, trailers) => bytes.is_empty() && trailers.is_none(),
            BodyState::Spooled(spool, _) => spool.is_empty(),
            BodyState::Pushed(taken) => taken.spool.is_empty(),
        }
    }

    /// Converts the state into a body to send.
    pub fn into_content(self) -> MessageBody {
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

    /// Reads the whole body from the client, into memory or onto disk, so that the request can
    /// wait without stalling the connection it came on.
    pub async fn store(
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
            let frame = frame.map_err(|error| {
                Denial::new(Reason::Framing, "body").with_evidence(error.to_string())
            })?;
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

/// Appends to a spool, which is created if there is none.
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
    written.map_err(|error| match error.downcast::<SpoolFull>() {
        Ok(_) => Denial::new(Reason::TooLarge, "spool")
            .with_message("Too much request data is waiting for approvals. Try again later."),
        Err(error) => Denial::new(Reason::Internal, "spool").with_evidence(error.to_string()),
    })
}

/// A body followed by trailers.
struct BodyWithTrailers {
    content: MessageBody,
    trailers: Option<HeaderMap>,
}

fn with_trailers(content: MessageBody, trailers: Option<HeaderMap>) -> MessageBody {
    BodyWithTrailers { content, trailers }.boxed_unsync()
}

impl Body for BodyWithTrailers {
    type Data = Bytes;
    type Error = BodyError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BodyError>>> {
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
        // An exact size would be sent as Content-Length, which excludes trailers in HTTP/1.
        let mut hint = SizeHint::new();
        hint.set_lower(content.lower());
        hint
    }
}

/// Notifies the framing guard of an HTTP/1 connection that the connection was upgraded.
#[derive(Clone, Debug)]
pub struct Handover {
    faults: GuardHandle,
    ordinal: u64,
}

impl Handover {
    /// Creates the notification for the request with this ordinal.
    pub fn new(faults: &GuardHandle, ordinal: u64) -> Self {
        Self {
            faults: faults.clone(),
            ordinal,
        }
    }

    /// Notifies the framing guard: no HTTP message follows on the connection.
    pub fn notify_upgraded(&self) {
        self.faults.upgrade(self.ordinal);
    }
}
