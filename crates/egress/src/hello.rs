//! TLS ClientHello parser: detects TLS at the start of a connection, and replays every byte.
//!
//! A parser that stopped at the first segment or the first record would let a client choose which
//! bytes the policy checks. So this parser joins records and fragments, refuses every ambiguous
//! hello, and replays every byte to the next reader.
//!
//! **Never here:** a handshake. The TLS server reads the same bytes again.

#[cfg(test)]
mod tests;

use std::future::Future;
use std::io;
use std::pin::{Pin, pin};
use std::task::{Context, Poll, Waker};

use bytes::{Buf, Bytes, BytesMut};
use thiserror::Error;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, ReadBuf};

use crate::chunked_reader::ChunkedReader;

/// Longest ClientHello that is read. With post-quantum keys it has about 2 KiB.
const MAX_HELLO: usize = 64 * 1024;

/// Buffer size of the first read: most hellos fit.
const FIRST_READ: usize = 2 * 1024;

/// Maximum number of extensions of a hello. Browsers send about twenty.
const MAX_EXTENSIONS: usize = 128;

/// Maximum number of ALPN protocols of a hello.
const MAX_PROTOCOLS: usize = 32;

/// Longest server name (RFC 1035, section 2.3.4).
const MAX_SERVER_NAME: usize = 255;

/// The record type of a handshake (RFC 8446, section 5.1). No HTTP/1 message starts with it.
const HANDSHAKE: u8 = 0x16;

/// The handshake type of a ClientHello (RFC 8446, section 4).
const CLIENT_HELLO: u8 = 1;

/// Longest payload of a record (RFC 8446, section 5.1).
const MAX_RECORD: usize = 1 << 14;

/// Extension type of the server name (RFC 6066).
const SERVER_NAME: u16 = 0;
/// Extension type of the ALPN protocols (RFC 7301).
const PROTOCOLS: u16 = 16;
/// Extension type of the encrypted ClientHello (RFC 9849).
const ENCRYPTED_HELLO: u16 = 0xfe0d;

/// The protocol that a connection starts with.
#[derive(Debug)]
pub enum ConnectionStart<IO> {
    /// TLS.
    Tls {
        /// The ClientHello.
        hello: Hello,
        /// The connection, from its first byte.
        io: ReplayStream<IO>,
    },
    /// Another protocol, which may be HTTP/1.
    Plain {
        /// The connection, from its first byte.
        io: ReplayStream<IO>,
    },
}

/// The fields of a ClientHello, not normalised.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Hello {
    /// The server name: visible ASCII, at most 255 bytes.
    pub server_name: Option<String>,
    /// The ALPN protocols in the client's order. None of them is empty.
    pub alpn: Vec<Vec<u8>>,
    /// Whether the hello has an encrypted ClientHello (ECH) or a GREASE one.
    pub has_ech: bool,
}

/// Why the start of a connection was refused.
#[derive(Debug, Error)]
pub enum BadHello {
    /// The connection failed.
    #[error("the connection failed before its TLS hello was complete: {0}")]
    Io(#[from] io::Error),
    /// The client closed the connection.
    #[error("the connection ended before its TLS hello was complete")]
    Cut,
    /// The hello exceeds the gate's limit.
    #[error("the TLS hello is longer than {MAX_HELLO} bytes")]
    TooLong,
    /// The first byte is neither TLS nor ASCII.
    #[error("the connection starts with SSL 2 or an unknown protocol; use TLS")]
    NotTls,
    /// RFC 8446, section 5.1.
    #[error("a record of the TLS hello is not a handshake record of a valid length")]
    Record,
    /// RFC 8446, section 4.1.2.
    #[error("the TLS handshake does not start with a ClientHello")]
    NotHello,
    /// RFC 8446, section 5.1: no data may follow before the server's answer.
    #[error("the TLS hello is followed by other data in the same record")]
    Trailing,
    /// RFC 8446, section 4.1.2.
    #[error("the TLS hello is malformed")]
    Malformed,
    /// RFC 8446, section 4.2.
    #[error("the TLS hello has a duplicate extension, or more than {MAX_EXTENSIONS} extensions")]
    Extensions,
    /// RFC 6066, section 3.
    #[error("the server name in the TLS hello is not exactly one host name")]
    ServerName,
    /// RFC 7301, section 3.1.
    #[error(
        "the ALPN list in the TLS hello is malformed or has more than {MAX_PROTOCOLS} protocols"
    )]
    Protocols,
}

/// Reads the start of `io`, after the bytes in `already_read`. The caller sets a timeout.
pub async fn read_start<IO: AsyncRead + Unpin>(
    mut io: IO,
    already_read: Bytes,
) -> Result<ConnectionStart<IO>, BadHello> {
    let mut bytes = BytesMut::from(already_read);
    let mut message = HandshakeMessage::default();
    loop {
        match bytes.first() {
            Some(&HANDSHAKE) => {
                let readable = bytes.get(..MAX_HELLO).unwrap_or(&bytes);
                if let Some(hello) = message.advance(readable)? {
                    let io = ReplayStream::new(io, bytes.freeze());
                    return Ok(ConnectionStart::Tls { hello, io });
                }
            }
            Some(first) if first.is_ascii() => {
                let io = ReplayStream::new(io, bytes.freeze());
                return Ok(ConnectionStart::Plain { io });
            }
            Some(_) => return Err(BadHello::NotTls),
            None => bytes.reserve(FIRST_READ),
        }
        let left = MAX_HELLO.saturating_sub(bytes.len());
        if left == 0 {
            return Err(BadHello::TooLong);
        }
        // `take` limits the recorded bytes.
        let left = u64::try_from(left).unwrap_or_default();
        if (&mut io).take(left).read_buf(&mut bytes).await? == 0 {
            return Err(BadHello::Cut);
        }
    }
}

/// A connection that first replays the bytes that were read from it.
#[derive(Debug)]
pub struct ReplayStream<IO> {
    io: IO,
    recorded: Bytes,
}

impl<IO> ReplayStream<IO> {
    /// Replays `recorded` before the rest of `io`.
    pub fn new(io: IO, recorded: Bytes) -> Self {
        Self { io, recorded }
    }

    /// The connection, and the recorded bytes that were not read again.
    pub fn into_inner(self) -> (IO, Bytes) {
        (self.io, self.recorded)
    }
}

impl<IO: AsyncRead + Unpin> ReplayStream<IO> {
    /// Resolves when the client has closed the connection. Bytes that arrive meanwhile are
    /// recorded, up to a limit; after the limit the future never resolves.
    pub async fn client_closed(&mut self) {
        let mut piece = BytesMut::new();
        while self.recorded.len() < MAX_HELLO {
            piece.reserve(FIRST_READ);
            match self.io.read_buf(&mut piece).await {
                Ok(0) | Err(_) => return,
                // Stored before the next await, at which this future may be dropped.
                Ok(_) => {
                    let mut recorded = BytesMut::from(std::mem::take(&mut self.recorded));
                    recorded.extend_from_slice(&piece.split());
                    self.recorded = recorded.freeze();
                }
            }
        }
        std::future::pending::<()>().await;
    }
}

impl<IO: AsyncRead + Unpin> AsyncRead for ReplayStream<IO> {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        if this.recorded.is_empty() {
            return Pin::new(&mut this.io).poll_read(cx, buf);
        }
        let length = this.recorded.len().min(buf.remaining());
        buf.put_slice(this.recorded.get(..length).unwrap_or_default());
        this.recorded.advance(length);
        if this.recorded.is_empty() {
            // An empty slice would keep the whole buffer allocated.
            this.recorded = Bytes::new();
        }
        Poll::Ready(Ok(()))
    }
}

impl<IO: AsyncWrite + Unpin> AsyncWrite for ReplayStream<IO> {
    fn poll_write(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.get_mut().io).poll_write(cx, bytes)
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.get_mut().io).poll_write_vectored(cx, slices)
    }

    fn is_write_vectored(&self) -> bool {
        self.io.is_write_vectored()
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().io).poll_flush(cx)
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().io).poll_shutdown(cx)
    }
}

/// The first handshake message, joined from its records.
#[derive(Debug, Default)]
struct HandshakeMessage {
    /// The payload of the complete records.
    bytes: Vec<u8>,
    /// The offset of the next record.
    at: usize,
}

impl HandshakeMessage {
    /// Parses the records that have become complete. `bytes` are all bytes of the connection so
    /// far. Returns the hello once it is complete.
    fn advance(&mut self, bytes: &[u8]) -> Result<Option<Hello>, BadHello> {
        loop {
            let mut rest = Cursor(bytes.get(self.at..).unwrap_or_default());
            let Some(length) = rest.record()? else {
                return Ok(None);
            };
            let Some(payload) = rest.take(length) else {
                return Ok(None);
            };
            self.bytes.extend_from_slice(payload);
            self.at += RECORD_HEADER + length;
            let mut message = Cursor(&self.bytes);
            match message.number(1) {
                Some(kind) if kind == usize::from(CLIENT_HELLO) => {}
                Some(_) | None => return Err(BadHello::NotHello),
            }
            let Some(length) = message.number(3) else {
                continue;
            };
            if length > MAX_HELLO {
                return Err(BadHello::TooLong);
            }
            match message.0.len() {
                have if have < length => {}
                have if have == length => return Hello::read(message).map(Some),
                _ => return Err(BadHello::Trailing),
            }
        }
    }
}

/// Length of a record header.
const RECORD_HEADER: usize = 5;

impl Hello {
    /// Parses a ClientHello (RFC 8446, section 4.1.2).
    fn read(mut message: Cursor<'_>) -> Result<Self, BadHello> {
        let mut head = || {
            let version = message.number(2)?;
            let _random = message.take(32)?;
            let session = message.vector(1)?;
            let suites = message.vector(2)?;
            let compression = message.vector(1)?;
            let valid = version >> 8 == 3
                && session.0.len() <= 32
                && suites.0.len() >= 2
                && suites.0.len().is_multiple_of(2)
                && !compression.0.is_empty();
            // Up to TLS 1.2 a hello may end here.
            let extensions = match message.0.is_empty() {
                true => Cursor(&[]),
                false => message.vector(2)?,
            };
            (valid && message.0.is_empty()).then_some(extensions)
        };
        let mut extensions = head().ok_or(BadHello::Malformed)?;
        let mut hello = Self::default();
        let mut seen = Vec::new();
        while !extensions.0.is_empty() {
            let kind = extensions.number(2).ok_or(BadHello::Malformed)?;
            let data = extensions.vector(2).ok_or(BadHello::Malformed)?;
            if seen.contains(&kind) || seen.len() == MAX_EXTENSIONS {
                return Err(BadHello::Extensions);
            }
            seen.push(kind);
            match u16::try_from(kind) {
                Ok(SERVER_NAME) => hello.server_name = Some(server_name(data)?),
                Ok(PROTOCOLS) => hello.alpn = protocols(data)?,
                Ok(ENCRYPTED_HELLO) => hello.has_ech = true,
                Ok(_) | Err(_) => {}
            }
        }
        Ok(hello)
    }
}

fn server_name(mut data: Cursor<'_>) -> Result<String, BadHello> {
    let mut name = || {
        let mut names = data.vector(2)?;
        let kind = names.number(1)?;
        let name = names.vector(2)?;
        let is_single = kind == 0 && names.0.is_empty() && data.0.is_empty();
        let is_valid = (1..=MAX_SERVER_NAME).contains(&name.0.len())
            && name.0.iter().all(u8::is_ascii_graphic);
        (is_single && is_valid).then_some(name.0)
    };
    let name = name().ok_or(BadHello::ServerName)?;
    String::from_utf8(name.to_vec()).map_err(|_| BadHello::ServerName)
}

fn protocols(mut data: Cursor<'_>) -> Result<Vec<Vec<u8>>, BadHello> {
    let mut list = data.vector(2).ok_or(BadHello::Protocols)?;
    let mut protocols = Vec::new();
    while !list.0.is_empty() {
        let protocol = list.vector(1).ok_or(BadHello::Protocols)?;
        if protocol.0.is_empty() || protocols.len() == MAX_PROTOCOLS {
            return Err(BadHello::Protocols);
        }
        protocols.push(protocol.0.to_vec());
    }
    if protocols.is_empty() || !data.0.is_empty() {
        return Err(BadHello::Protocols);
    }
    Ok(protocols)
}

/// A cursor over integers and length-prefixed vectors.
#[derive(Debug)]
struct Cursor<'a>(&'a [u8]);

impl<'a> Cursor<'a> {
    /// The length of a handshake record, once its header is complete. An error in an incomplete
    /// header is reported at once.
    fn record(&mut self) -> Result<Option<usize>, BadHello> {
        // The version is frozen and ignored, but its first byte is always 3.
        match self.0 {
            [] | [HANDSHAKE] | [HANDSHAKE, 3, ..] => {}
            _ => return Err(BadHello::Record),
        }
        if self.take(3).is_none() {
            return Ok(None);
        }
        match self.number(2) {
            Some(length) if !(1..=MAX_RECORD).contains(&length) => Err(BadHello::Record),
            length => Ok(length),
        }
    }

    fn take(&mut self, length: usize) -> Option<&'a [u8]> {
        let (taken, rest) = self.0.split_at_checked(length)?;
        self.0 = rest;
        Some(taken)
    }

    /// A big-endian integer of at most three bytes.
    fn number(&mut self, bytes: usize) -> Option<usize> {
        let number = |sum, byte: &u8| (sum << 8) | usize::from(*byte);
        Some(self.take(bytes)?.iter().fold(0, number))
    }

    /// A vector whose length prefix has this many bytes.
    fn vector(&mut self, bytes: usize) -> Option<Self> {
        let length = self.number(bytes)?;
        self.take(length).map(Self)
    }
}

/// Fuzz target: the result does not depend on how the bytes are split, and every byte is
/// replayed.
pub fn fuzz_check(bytes: &[u8]) {
    let whole = parse_in_steps(bytes, usize::MAX, 0);
    for (step, already_read) in [(1, 0), (3, 0), (7, bytes.len() / 2), (1, bytes.len())] {
        let split = parse_in_steps(bytes, step, already_read);
        assert_eq!(whole, split, "in pieces of {step}, after {already_read}");
    }
}

/// The result for these bytes, if `already_read` of them were read before and the others arrive in
/// pieces of `step` bytes.
fn parse_in_steps(bytes: &[u8], step: usize, already_read: usize) -> Result<Option<Hello>, String> {
    let (first, rest) = bytes.split_at(already_read);
    let pieces = ChunkedReader { rest, step };
    let mut cx = Context::from_waker(Waker::noop());
    let start = pin!(read_start(pieces, Bytes::copy_from_slice(first)));
    let (hello, mut io) = match start.poll(&mut cx) {
        Poll::Ready(Ok(ConnectionStart::Tls { hello, io })) => (Some(hello), io),
        Poll::Ready(Ok(ConnectionStart::Plain { io })) => (None, io),
        Poll::Ready(Err(error)) => return Err(error.to_string()),
        Poll::Pending => return Err("a read is pending although bytes are available".into()),
    };
    let mut replayed = Vec::new();
    match pin!(io.read_to_end(&mut replayed)).poll(&mut cx) {
        Poll::Ready(Ok(_)) => assert!(replayed == bytes, "the replayed bytes differ"),
        Poll::Ready(Err(error)) => return Err(error.to_string()),
        Poll::Pending => return Err("a read is pending although bytes are available".into()),
    }
    Ok(hello)
}
