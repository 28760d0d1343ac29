//! Tracks the position in a stream of HTTP/1 messages and checks their framing. No I/O.

use policy::override_header;

use super::HeadLimits;
use super::fault::FaultKind;
use super::head::{Body, Head, Lines, split_field, truncate};

/// Longest trailers. hyper itself accepts 16 KiB.
const MAX_TRAILERS: usize = 8 * 1024;

/// Most hexadecimal digits of a chunk size: 2^60 bytes.
const MAX_SIZE_DIGITS: u8 = 15;

/// Fields that are refused in trailers: they determine the end, destination, sender or
/// interpretation of a message.
const NOT_IN_TRAILERS: [&[u8]; 32] = [
    b"age",
    b"authorization",
    b"cache-control",
    b"connection",
    b"content-encoding",
    b"content-length",
    b"content-range",
    b"content-type",
    b"cookie",
    b"cookie2",
    b"expect",
    b"forwarded",
    b"host",
    b"http2-settings",
    b"if-match",
    b"if-modified-since",
    b"if-none-match",
    b"if-range",
    b"if-unmodified-since",
    b"keep-alive",
    b"max-forwards",
    b"origin",
    b"pragma",
    b"range",
    b"referer",
    b"set-cookie",
    b"te",
    b"trailer",
    b"transfer-encoding",
    b"upgrade",
    b"via",
    b"www-authenticate",
];

/// Prefixes of further fields that are refused in trailers.
const NOT_IN_TRAILERS_PREFIXES: [&[u8]; 6] = [
    b"proxy-",
    b"sec-",
    b"x-api-key",
    b"x-container-",
    b"x-forwarded-",
    b"x-palisade-",
];

/// The position in the messages of one connection.
#[derive(Debug)]
pub(super) struct MessageTracker {
    limits: HeadLimits,
    position: Position,
    /// The number of the current message.
    ordinal: u64,
    /// Whether the connection may switch protocols after this message.
    switches: bool,
}

#[derive(Debug)]
enum Position {
    Head(Head),
    /// In a body with a Content-Length, of which this many bytes are left.
    Fixed(u64),
    Chunks(Chunk),
    Trailers {
        lines: Lines,
        fields: usize,
    },
    /// An upgrade or CONNECT request was read, and its response is not known yet.
    UpgradePending,
}

/// The position in a chunk.
#[derive(Clone, Copy, Debug)]
enum Chunk {
    /// In the size, of which `digits` digits were read.
    Size { digits: u8, size: u64 },
    /// Between the CR and the LF after the size.
    SizeEnd { size: u64 },
    /// In the data, of which `left` bytes are to come.
    Data { left: u64 },
    /// Before the CR after the data.
    DataEnd,
    /// Between the CR and the LF after the data.
    DataFeed,
}

/// The position before the first chunk.
const FIRST_CHUNK: Chunk = Chunk::Size { digits: 0, size: 0 };

impl MessageTracker {
    pub(super) fn new(limits: HeadLimits) -> Self {
        Self {
            limits,
            position: Position::Head(Head::default()),
            ordinal: 0,
            switches: false,
        }
    }

    /// Checks `bytes`, which start after the last call's valid bytes. Returns how many of them
    /// are valid, and the fault after them. The rest belongs to an incomplete head or trailers, or
    /// follows a request whose upgrade is pending: the caller passes it again, with more bytes
    /// after it.
    pub(super) fn check_bytes(&mut self, bytes: &[u8]) -> (usize, Result<(), FaultKind>) {
        let mut valid = 0;
        loop {
            let rest = bytes.get(valid..).unwrap_or_default();
            if rest.is_empty() {
                return (valid, Ok(()));
            }
            match self.step(rest) {
                Ok(Some(length)) => valid += length,
                Ok(None) => return (valid, Ok(())),
                Err(fault) => return (valid, Err(fault)),
            }
        }
    }

    pub(super) fn limits(&self) -> &HeadLimits {
        &self.limits
    }

    /// The number of the current message.
    pub(super) fn ordinal(&self) -> u64 {
        self.ordinal
    }

    /// The number of the current message, if its response decides whether the connection switches
    /// protocols.
    pub(super) fn switching_ordinal(&self) -> Option<u64> {
        self.switches.then_some(self.ordinal)
    }

    pub(super) fn is_in_head(&self) -> bool {
        matches!(self.position, Position::Head(_))
    }

    pub(super) fn is_upgrade_pending(&self) -> bool {
        matches!(self.position, Position::UpgradePending)
    }

    /// Continues after a request that did not switch protocols: the next message follows.
    pub(super) fn resume(&mut self) {
        if self.is_upgrade_pending() {
            self.switches = false;
            self.end_message();
        }
    }

    /// Checks the start of `rest`, which is not empty. Returns the number of valid bytes, or `None`
    /// if more bytes are needed.
    fn step(&mut self, rest: &[u8]) -> Result<Option<usize>, FaultKind> {
        match &mut self.position {
            Position::Head(head) => {
                let Some(length) = head.scan(rest, &self.limits)? else {
                    return Ok(None);
                };
                let (body, switches) = head.finish()?;
                self.switches = switches;
                match body {
                    Body::Empty => self.end_message(),
                    Body::Fixed(length) => self.position = Position::Fixed(length),
                    Body::Chunked => self.position = Position::Chunks(FIRST_CHUNK),
                }
                Ok(Some(length))
            }
            Position::Fixed(left) => {
                let taken = take(left, rest);
                if *left == 0 {
                    self.end_message();
                }
                Ok(Some(taken))
            }
            Position::Chunks(Chunk::Data { left }) => {
                let taken = take(left, rest);
                if *left == 0 {
                    self.position = Position::Chunks(Chunk::DataEnd);
                }
                Ok(Some(taken))
            }
            Position::Chunks(chunk) => {
                let [byte, ..] = *rest else {
                    return Ok(None);
                };
                match chunk.next(byte)? {
                    Some(next) => *chunk = next,
                    None => {
                        self.position = Position::Trailers {
                            lines: Lines::default(),
                            fields: 0,
                        }
                    }
                }
                Ok(Some(1))
            }
            Position::Trailers { lines, fields } => {
                let (rest, is_full) = truncate(rest, MAX_TRAILERS);
                while let Some(line) = lines.next(rest)? {
                    if line.is_empty() {
                        let length = lines.start;
                        self.end_message();
                        return Ok(Some(length));
                    }
                    *fields += 1;
                    if *fields > self.limits.headers {
                        return Err(FaultKind::TooManyHeaders);
                    }
                    let (name, _) = split_field(line)?;
                    if belongs_in_head(name) {
                        return Err(FaultKind::Trailer);
                    }
                }
                if is_full {
                    Err(FaultKind::TrailersTooLong)
                } else {
                    Ok(None)
                }
            }
            Position::UpgradePending => Ok(None),
        }
    }

    fn end_message(&mut self) {
        if self.switches {
            self.position = Position::UpgradePending;
        } else {
            self.ordinal += 1;
            self.position = Position::Head(Head::default());
        }
    }
}

impl Chunk {
    /// The position after this byte, which is not chunk data; `None` after the last chunk.
    fn next(self, byte: u8) -> Result<Option<Self>, FaultKind> {
        match (self, byte) {
            (Self::Size { digits, size }, _) if byte.is_ascii_hexdigit() => {
                if digits == MAX_SIZE_DIGITS {
                    return Err(FaultKind::ChunkTooLong);
                }
                let digit = match byte {
                    b'0'..=b'9' => byte - b'0',
                    _ => (byte | 0x20) - b'a' + 10,
                };
                Ok(Some(Self::Size {
                    digits: digits + 1,
                    size: (size << 4) | u64::from(digit),
                }))
            }
            (Self::Size { digits: 0, .. }, _) => Err(FaultKind::ChunkSize),
            (Self::Size { size, .. }, b'\r') => Ok(Some(Self::SizeEnd { size })),
            (Self::Size { .. }, b'\n') => Err(FaultKind::BareLineFeed),
            (Self::Size { .. }, b';' | b' ' | b'\t') => Err(FaultKind::ChunkExtension),
            (Self::Size { .. }, _) => Err(FaultKind::ChunkSize),
            (Self::SizeEnd { size: 0 }, b'\n') => Ok(None),
            (Self::SizeEnd { size }, b'\n') => Ok(Some(Self::Data { left: size })),
            (Self::SizeEnd { .. }, _) => Err(FaultKind::BareCarriageReturn),
            (Self::DataEnd, b'\r') => Ok(Some(Self::DataFeed)),
            (Self::DataFeed, b'\n') => Ok(Some(FIRST_CHUNK)),
            (Self::Data { .. } | Self::DataEnd | Self::DataFeed, _) => Err(FaultKind::ChunkEnd),
        }
    }
}

/// Subtracts from `left` the bytes that are present in `rest`, and returns their number.
fn take(left: &mut u64, rest: &[u8]) -> usize {
    let taken = usize::try_from(*left).map_or(rest.len(), |left| left.min(rest.len()));
    // On all supported platforms a usize fits into a u64.
    *left -= u64::try_from(taken).unwrap_or(*left);
    taken
}

fn belongs_in_head(name: &[u8]) -> bool {
    let has_prefix = |prefix: &&[u8]| {
        name.get(..prefix.len())
            .is_some_and(|start| start.eq_ignore_ascii_case(prefix))
    };
    NOT_IN_TRAILERS_PREFIXES.iter().any(has_prefix)
        || NOT_IN_TRAILERS
            .iter()
            .any(|other| name.eq_ignore_ascii_case(other))
        || override_header::find(name).is_some()
}
