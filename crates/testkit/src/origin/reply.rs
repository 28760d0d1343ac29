//! Replies of the origin server.

use bytes::Bytes;
use http::{HeaderMap, HeaderName, HeaderValue, StatusCode};
use tokio::sync::watch;

/// A latch that opens once and releases all waiting tasks.
#[derive(Clone, Debug)]
pub struct Latch(watch::Sender<bool>);

impl Default for Latch {
    fn default() -> Self {
        Self(watch::Sender::new(false))
    }
}

impl Latch {
    /// A closed latch.
    pub fn new() -> Self {
        Self::default()
    }

    /// Opens the latch for all present and future waiters.
    pub fn open(&self) {
        self.0.send_replace(true);
    }

    /// Whether the latch is open.
    pub fn is_open(&self) -> bool {
        *self.0.borrow()
    }

    /// The number of waiting tasks.
    pub fn waiting(&self) -> usize {
        self.0.receiver_count()
    }

    /// Waits until the latch is open.
    pub async fn wait(&self) {
        let mut seen = self.0.subscribe();
        // The sender is `self`, so waiting cannot fail before the latch opens.
        let _open = seen.wait_for(|open| *open).await;
    }
}

/// A response, and how the server sends it.
#[derive(Clone, Debug, Default)]
pub struct OriginReply {
    pub(super) status: StatusCode,
    pub(super) headers: HeaderMap,
    pub(super) body: Bytes,
    /// Total length; `body` is repeated up to it.
    pub(super) length: Option<u64>,
    pub(super) trailers: Option<HeaderMap>,
    pub(super) ending: Ending,
    /// The response waits for this latch.
    pub(super) hold_response: Option<Latch>,
    /// The end of the body waits for this latch.
    pub(super) hold_body_end: Option<Latch>,
}

/// How a response ends.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Ending {
    /// The response is complete.
    #[default]
    Whole,
    /// The connection breaks after the body.
    Cut,
    /// The connection closes instead of a response.
    HangUp,
    /// 101, then every byte is echoed.
    Echo,
}

#[expect(clippy::expect_used, reason = "the headers of tests are valid")]
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
    #[expect(clippy::expect_used, reason = "the statuses of tests are valid")]
    pub fn status(status: u16) -> Self {
        Self {
            status: StatusCode::from_u16(status).expect("a status"),
            ..Self::default()
        }
    }

    /// 200 and `length` bytes, streamed.
    pub fn large(length: u64) -> Self {
        Self {
            body: Bytes::from_static(&[b'x'; 64 * 1024]),
            length: Some(length),
            ..Self::default()
        }
    }

    /// Closes the connection instead of a response.
    pub fn hang_up() -> Self {
        Self {
            ending: Ending::HangUp,
            ..Self::default()
        }
    }

    /// 101 with an upgrade to `protocol`, then every byte is echoed.
    pub fn echo(protocol: &str) -> Self {
        Self {
            status: StatusCode::SWITCHING_PROTOCOLS,
            ending: Ending::Echo,
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

    /// Closes the connection after the response, with `Connection: close`.
    #[must_use]
    pub fn closing(self) -> Self {
        self.header("connection", "close")
    }

    /// Sends the response when the latch opens.
    #[must_use]
    pub fn held_until(mut self, latch: &Latch) -> Self {
        self.hold_response = Some(latch.clone());
        self
    }

    /// Sends head and body, and ends the body when the latch opens.
    #[must_use]
    pub fn body_held_until(mut self, latch: &Latch) -> Self {
        self.hold_body_end = Some(latch.clone());
        self
    }

    /// Breaks the connection after the body, before its end.
    #[must_use]
    pub fn abort_body(mut self) -> Self {
        self.ending = Ending::Cut;
        self
    }

    /// Whether the body must be streamed.
    pub(super) fn streams(&self) -> bool {
        self.length.is_some()
            || self.trailers.is_some()
            || self.hold_body_end.is_some()
            || self.ending == Ending::Cut
    }
}
