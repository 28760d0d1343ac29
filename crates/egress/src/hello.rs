//! The first words of a connection: a TLS ClientHello, read whole however it is split, and
//! left in place for who comes after.
//!
//! A reader that stopped at the first segment, or at the first record, would let a client
//! choose what the policy sees. So this one puts records and fragments together, takes
//! nothing that can be read in two ways, and gives back every byte.
//!
//! **Never here:** a handshake. What terminates TLS reads the same bytes again.

#[cfg(test)]
mod tests;

use std::future::Future;
use std::io;
use std::pin::{Pin, pin};
use std::task::{Context, Poll, Waker};

use bytes::{Buf, Bytes, BytesMut};
use thiserror::Error;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, ReadBuf};

use crate::pieces::Pieces;

/// The most that is read for a ClientHello. With post-quantum keys it has about 2 KiB.
const LONGEST: usize = 64 * 1024;

/// Bytes for the first read: most hellos fit.
const FIRST_READ: usize = 2 * 1024;

/// The most extensions of a hello. Browsers send about twenty.
const MOST_EXTENSIONS: usize = 128;

/// The most protocols of a hello.
const MOST_PROTOCOLS: usize = 32;

/// The longest name of a server (RFC 1035, section 2.3.4).
const LONGEST_NAME: usize = 255;

/// The record type of a handshake (RFC 8446, section 5.1). No HTTP/1 message begins so.
const HANDSHAKE: u8 = 0x16;

/// The handshake type (RFC 8446, section 4).
const CLIENT_HELLO: u8 = 1;

/// The most that a record carries (RFC 8446, section 5.1).
const LONGEST_RECORD: usize = 1 << 14;

/// Extensions: RFC 6066, RFC 7301 and RFC 9849.
const SERVER_NAME: u16 = 0;
const PROTOCOLS: u16 = 16;
const ENCRYPTED_HELLO: u16 = 0xfe0d;

/// How a connection begins.
#[derive(Debug)]
pub enum ConnectionInfo<IO> {
    /// With TLS.
    Tls {
        /// What the client asks for.
        hello: Hello,
        /// The connection, from its first byte.
        io: Replay<IO>,
    },
    /// With something else. It may be HTTP/1.
    Plain {
        /// The connection, from its first byte.
        io: Replay<IO>,
    },
}

/// What a ClientHello says, as it says it: nothing is normalised.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Hello {
    /// The name that the client wants to talk to: visible ASCII, at most 255 bytes.
    pub server_name: Option<String>,
    /// The protocols that the client offers, in its order. None of them is empty.
    pub alpn: Vec<Vec<u8>>,
    /// Whether there is an encrypted hello inside, or a decoy of one.
    pub has_ech: bool,
}

/// Why a connection that begins like TLS is not taken for it.
#[derive(Debug, Error)]
pub enum BadHello {
    /// The connection failed.
    #[error("the connection failed before its TLS hello was whole: {0}")]
    Io(#[from] io::Error),
    /// The client closed.
    #[error("the connection ended before its TLS hello was whole")]
    Cut,
    /// A limit of ours.
    #[error("the TLS hello is longer than {LONGEST} bytes")]
    TooLong,
    /// A first byte that neither TLS nor text begins with.
    #[error("the connection begins with SSL 2 or a protocol that the gate does not know; use TLS")]
    NotTls,
    /// RFC 8446, section 5.1.
    #[error("a record of the TLS hello is not a handshake record of a valid length")]
    Record,
    /// RFC 8446, section 4.1.2.
    #[error("the TLS handshake does not begin with a ClientHello")]
    NotHello,
    /// RFC 8446, section 5.1: nothing can follow before the server answered.
    #[error("the TLS hello is followed by more in the same record")]
    Trailing,
    /// RFC 8446, section 4.1.2.
    #[error("the TLS hello is malformed")]
    Malformed,
    /// RFC 8446, section 4.2.
    #[error("the TLS hello has an extension twice, or more extensions than the gate reads")]
    Extensions,
    /// RFC 6066, section 3.
    #[error("the server name in the TLS hello is not exactly one host name")]
    ServerName,
    /// RFC 7301, section 3.1.
    #[error("the list of protocols in the TLS hello is malformed or longer than the gate reads")]
    Protocols,
}

/// Reads how `io` begins, after the bytes that were read from it `already`. It waits as long
/// as the client does: the caller sets a time-out.
pub async fn open<IO: AsyncRead + Unpin>(
    mut io: IO,
    already: Bytes,
) -> Result<ConnectionInfo<IO>, BadHello> {
    let mut bytes = BytesMut::from(already);
    let mut message = Message::default();
    loop {
        match bytes.first() {
            Some(&HANDSHAKE) => {
                let readable = bytes.get(..LONGEST).unwrap_or(&bytes);
                if let Some(hello) = message.read_on(readable)? {
                    let io = Replay::new(io, bytes.freeze());
                    return Ok(ConnectionInfo::Tls { hello, io });
                }
            }
            Some(first) if first.is_ascii() => {
                let io = Replay::new(io, bytes.freeze());
                return Ok(ConnectionInfo::Plain { io });
            }
            Some(_) => return Err(BadHello::NotTls),
            None => bytes.reserve(FIRST_READ),
        }
        let left = LONGEST.saturating_sub(bytes.len());
        if left == 0 {
            return Err(BadHello::TooLong);
        }
        // `take` keeps what is recorded within its bound.
        let left = u64::try_from(left).unwrap_or_default();
        if (&mut io).take(left).read_buf(&mut bytes).await? == 0 {
            return Err(BadHello::Cut);
        }
    }
}

/// A connection that first gives back what was read from it.
#[derive(Debug)]
pub struct Replay<IO> {
    io: IO,
    recorded: Bytes,
}

impl<IO> Replay<IO> {
    /// `io`, with `recorded` before the rest of it.
    pub fn new(io: IO, recorded: Bytes) -> Self {
        Self { io, recorded }
    }

    /// The connection, and what of the recorded bytes was not read again.
    pub fn into_inner(self) -> (IO, Bytes) {
        (self.io, self.recorded)
    }
}

impl<IO: AsyncRead + Unpin> Replay<IO> {
    /// Resolves when the client has left. What it sends meanwhile is recorded, up to a bound; a
    /// client that sends more is not watched any further.
    pub async fn left(&mut self) {
        let mut piece = BytesMut::new();
        while self.recorded.len() < LONGEST {
            piece.reserve(FIRST_READ);
            match self.io.read_buf(&mut piece).await {
                Ok(0) | Err(_) => return,
                // Before the next wait, in which this future may be dropped.
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

impl<IO: AsyncRead + Unpin> AsyncRead for Replay<IO> {
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
            // An empty rest would keep the memory of the whole.
            this.recorded = Bytes::new();
        }
        Poll::Ready(Ok(()))
    }
}

impl<IO: AsyncWrite + Unpin> AsyncWrite for Replay<IO> {
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

/// The first handshake message, put together from its records.
#[derive(Debug, Default)]
struct Message {
    /// What the whole records carry.
    bytes: Vec<u8>,
    /// Where the next record begins.
    at: usize,
}

impl Message {
    /// Reads on in the connection's first bytes. What the message says, once it is whole.
    fn read_on(&mut self, bytes: &[u8]) -> Result<Option<Hello>, BadHello> {
        loop {
            let mut rest = Fields(bytes.get(self.at..).unwrap_or_default());
            let Some(length) = rest.record()? else {
                return Ok(None);
            };
            let Some(payload) = rest.take(length) else {
                return Ok(None);
            };
            self.bytes.extend_from_slice(payload);
            self.at += RECORD_HEADER + length;
            let mut message = Fields(&self.bytes);
            match message.number(1) {
                Some(kind) if kind == usize::from(CLIENT_HELLO) => {}
                Some(_) | None => return Err(BadHello::NotHello),
            }
            let Some(length) = message.number(3) else {
                continue;
            };
            if length > LONGEST {
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

const RECORD_HEADER: usize = 5;

impl Hello {
    /// RFC 8446, section 4.1.2.
    fn read(mut message: Fields<'_>) -> Result<Self, BadHello> {
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
            // TLS 1.2 and before: a hello may end here.
            let extensions = match message.0.is_empty() {
                true => Fields(&[]),
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
            if seen.contains(&kind) || seen.len() == MOST_EXTENSIONS {
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

fn server_name(mut data: Fields<'_>) -> Result<String, BadHello> {
    let mut name = || {
        let mut names = data.vector(2)?;
        let kind = names.number(1)?;
        let name = names.vector(2)?;
        let alone = kind == 0 && names.0.is_empty() && data.0.is_empty();
        let sane =
            (1..=LONGEST_NAME).contains(&name.0.len()) && name.0.iter().all(u8::is_ascii_graphic);
        (alone && sane).then_some(name.0)
    };
    let name = name().ok_or(BadHello::ServerName)?;
    String::from_utf8(name.to_vec()).map_err(|_| BadHello::ServerName)
}

fn protocols(mut data: Fields<'_>) -> Result<Vec<Vec<u8>>, BadHello> {
    let mut list = data.vector(2).ok_or(BadHello::Protocols)?;
    let mut protocols = Vec::new();
    while !list.0.is_empty() {
        let protocol = list.vector(1).ok_or(BadHello::Protocols)?;
        if protocol.0.is_empty() || protocols.len() == MOST_PROTOCOLS {
            return Err(BadHello::Protocols);
        }
        protocols.push(protocol.0.to_vec());
    }
    if protocols.is_empty() || !data.0.is_empty() {
        return Err(BadHello::Protocols);
    }
    Ok(protocols)
}

/// Bytes that are read from the front: numbers, and what numbers announce.
#[derive(Debug)]
struct Fields<'a>(&'a [u8]);

impl<'a> Fields<'a> {
    /// The length of a handshake record, once its header is whole. What is wrong with the
    /// part of the header that is there is said at once.
    fn record(&mut self) -> Result<Option<usize>, BadHello> {
        // The version is frozen and to be ignored, but every one begins with 3.
        match self.0 {
            [] | [HANDSHAKE] | [HANDSHAKE, 3, ..] => {}
            _ => return Err(BadHello::Record),
        }
        if self.take(3).is_none() {
            return Ok(None);
        }
        match self.number(2) {
            Some(length) if !(1..=LONGEST_RECORD).contains(&length) => Err(BadHello::Record),
            length => Ok(length),
        }
    }

    fn take(&mut self, length: usize) -> Option<&'a [u8]> {
        let (taken, rest) = self.0.split_at_checked(length)?;
        self.0 = rest;
        Some(taken)
    }

    /// A number of so many bytes, at most three.
    fn number(&mut self, bytes: usize) -> Option<usize> {
        let number = |sum, byte: &u8| (sum << 8) | usize::from(*byte);
        Some(self.take(bytes)?.iter().fold(0, number))
    }

    /// What follows a length of so many bytes.
    fn vector(&mut self, bytes: usize) -> Option<Self> {
        let length = self.number(bytes)?;
        self.take(length).map(Self)
    }
}

/// For a fuzzer: whatever comes, however it is split, the same is read, and every byte is
/// given back.
pub fn exercise(bytes: &[u8]) {
    let whole = outcome(bytes, usize::MAX, 0);
    for (step, already) in [(1, 0), (3, 0), (7, bytes.len() / 2), (1, bytes.len())] {
        let split = outcome(bytes, step, already);
        assert_eq!(whole, split, "in steps of {step}, after {already}");
    }
}

/// What these bytes are taken for, when so many were read already and the others come in
/// steps.
fn outcome(bytes: &[u8], step: usize, already: usize) -> Result<Option<Hello>, String> {
    let (first, rest) = bytes.split_at(already);
    let pieces = Pieces { rest, step };
    let mut cx = Context::from_waker(Waker::noop());
    let connection_info = pin!(open(pieces, Bytes::copy_from_slice(first)));
    let (hello, mut io) = match connection_info.poll(&mut cx) {
        Poll::Ready(Ok(ConnectionInfo::Tls { hello, io })) => (Some(hello), io),
        Poll::Ready(Ok(ConnectionInfo::Plain { io })) => (None, io),
        Poll::Ready(Err(error)) => return Err(error.to_string()),
        Poll::Pending => return Err("it waits for what is there".into()),
    };
    let mut replayed = Vec::new();
    match pin!(io.read_to_end(&mut replayed)).poll(&mut cx) {
        Poll::Ready(Ok(_)) => assert!(replayed == bytes, "not the same bytes"),
        Poll::Ready(Err(error)) => return Err(error.to_string()),
        Poll::Pending => return Err("it waits for what is there".into()),
    }
    Ok(hello)
}
