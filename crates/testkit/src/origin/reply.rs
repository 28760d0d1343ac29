//! What an origin answers.

use bytes::Bytes;
use http::{HeaderMap, HeaderName, HeaderValue, StatusCode};
use tokio::sync::watch;

/// A door that opens once: what waits behind it goes on.
#[derive(Clone, Debug)]
pub struct Latch(watch::Sender<bool>);

impl Default for Latch {
    fn default() -> Self {
        Self(watch::Sender::new(false))
    }
}

impl Latch {
    /// A closed one.
    pub fn new() -> Self {
        Self::default()
    }

    /// Lets everyone through, now and later.
    pub fn open(&self) {
        self.0.send_replace(true);
    }

    /// Whether it is open.
    pub fn is_open(&self) -> bool {
        *self.0.borrow()
    }

    /// How many wait.
    pub fn waiting(&self) -> usize {
        self.0.receiver_count()
    }

    /// Waits until it is open.
    pub async fn passed(&self) {
        let mut seen = self.0.subscribe();
        // The sender is `self`, so this cannot fail before it opens.
        let _open = seen.wait_for(|open| *open).await;
    }
}

/// An answer, and how it is given.
#[derive(Clone, Debug, Default)]
pub struct OriginReply {
    pub(super) status: StatusCode,
    pub(super) headers: HeaderMap,
    pub(super) body: Bytes,
    /// The body again and again, until there is so much of it.
    pub(super) length: Option<u64>,
    pub(super) trailers: Option<HeaderMap>,
    pub(super) manner: Manner,
    pub(super) held: Option<Latch>,
    pub(super) paused: Option<Latch>,
}

/// How an answer ends.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Manner {
    #[default]
    Whole,
    /// The connection breaks after the body.
    Cut,
    /// The connection closes instead of the answer.
    HangUp,
    /// 101, and every byte comes back.
    Echo,
}

#[expect(clippy::expect_used, reason = "a test writes headers that are headers")]
fn header(name: &str, value: &str) -> (HeaderName, HeaderValue) {
    let name = HeaderName::try_from(name).expect("a header's name");
    (
        name,
        HeaderValue::from_str(value).expect("a header's value"),
    )
}

impl OriginReply {
    /// 200 and a text, with its length.
    pub fn text(body: impl Into<Bytes>) -> Self {
        Self {
            body: body.into(),
            ..Self::default()
        }
    }

    /// A status and nothing else.
    #[expect(clippy::expect_used, reason = "a test knows its statuses")]
    pub fn status(status: u16) -> Self {
        Self {
            status: StatusCode::from_u16(status).expect("a status"),
            ..Self::default()
        }
    }

    /// 200 and so many bytes, streamed.
    pub fn large(length: u64) -> Self {
        Self {
            body: Bytes::from_static(&[b'x'; 64 * 1024]),
            length: Some(length),
            ..Self::default()
        }
    }

    /// The connection closes where an answer was due.
    pub fn hang_up() -> Self {
        Self {
            manner: Manner::HangUp,
            ..Self::default()
        }
    }

    /// 101 to `protocol`, after which every byte comes back.
    pub fn echo(protocol: &str) -> Self {
        Self {
            status: StatusCode::SWITCHING_PROTOCOLS,
            manner: Manner::Echo,
            ..Self::default()
        }
        .header("upgrade", protocol)
        .header("connection", "upgrade")
    }

    /// Adds a header.
    #[must_use]
    pub fn header(mut self, name: &str, value: &str) -> Self {
        let (name, value) = header(name, value);
        self.headers.append(name, value);
        self
    }

    /// Adds a trailer; the body is then streamed.
    #[must_use]
    pub fn trailer(mut self, name: &str, value: &str) -> Self {
        let (name, value) = header(name, value);
        self.headers
            .append("trailer", HeaderValue::from_name(name.clone()));
        let trailers = self.trailers.get_or_insert_default();
        trailers.append(name, value);
        self
    }

    /// Closes the connection when the answer is complete, and says so.
    #[must_use]
    pub fn closing(self) -> Self {
        self.header("connection", "close")
    }

    /// Answers when the latch opens, and nothing before.
    #[must_use]
    pub fn held(mut self, latch: &Latch) -> Self {
        self.held = Some(latch.clone());
        self
    }

    /// Sends head and body, and ends when the latch opens.
    #[must_use]
    pub fn paused(mut self, latch: &Latch) -> Self {
        self.paused = Some(latch.clone());
        self
    }

    /// Breaks the connection after the body, before its end.
    #[must_use]
    pub fn cut(mut self) -> Self {
        self.manner = Manner::Cut;
        self
    }

    /// Whether it must be sent piece by piece.
    pub(super) fn streams(&self) -> bool {
        self.length.is_some()
            || self.trailers.is_some()
            || self.paused.is_some()
            || self.manner == Manner::Cut
    }
}
