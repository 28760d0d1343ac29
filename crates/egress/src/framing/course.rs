//! Where in the stream of messages we are. No I/O: bytes in, how many of them are good out.

use policy::override_header;

use super::Limits;
use super::fault::FaultKind;
use super::head::{Body, Head, Lines, field, within};

/// The longest trailers. hyper itself takes 16 KiB.
const LONGEST_TRAILERS: usize = 8 * 1024;

/// The digits of a chunk's size: nobody sends 2^60 bytes at once.
const SIZE_DIGITS: u8 = 15;

/// Fields that decide where a message ends, where it goes, who sent it or how it is read.
/// They come in the head or not at all.
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

/// The same, by how they begin.
const NOT_BEGINNING: [&[u8]; 6] = [
    b"proxy-",
    b"sec-",
    b"x-api-key",
    b"x-container-",
    b"x-forwarded-",
    b"x-palisade-",
];

/// The course of one connection: message after message.
#[derive(Debug)]
pub(super) struct Course {
    limits: Limits,
    place: Place,
    /// The number of the message that we are in.
    ordinal: u64,
    /// What comes after this message may not be HTTP.
    switches: bool,
}

#[derive(Debug)]
enum Place {
    Head(Head),
    Fixed(u64),
    Chunks(Chunk),
    Trailers {
        lines: Lines,
        fields: usize,
    },
    /// After a message that may switch protocols. Nobody knows yet what the next byte is.
    Fork,
}

/// Where in a chunk.
#[derive(Clone, Copy, Debug)]
enum Chunk {
    Size { digits: u8, size: u64 },
    SizeEnd { size: u64 },
    Data { left: u64 },
    DataEnd,
    DataFeed,
}

const FIRST_CHUNK: Chunk = Chunk::Size { digits: 0, size: 0 };

impl Course {
    pub(super) fn new(limits: Limits) -> Self {
        Self {
            limits,
            place: Place::Head(Head::default()),
            ordinal: 0,
            switches: false,
        }
    }

    /// Follows `bytes`, which begin where the last call's good bytes ended. How many are good,
    /// and what is wrong after them. The rest belongs to a head or to trailers that are not
    /// whole yet, or lies behind a fork: it is to be given again, with more after it.
    pub(super) fn follow(&mut self, bytes: &[u8]) -> (usize, Result<(), FaultKind>) {
        let mut good = 0;
        loop {
            let rest = bytes.get(good..).unwrap_or_default();
            if rest.is_empty() {
                return (good, Ok(()));
            }
            match self.step(rest) {
                Ok(Some(length)) => good += length,
                Ok(None) => return (good, Ok(())),
                Err(fault) => return (good, Err(fault)),
            }
        }
    }

    pub(super) fn limits(&self) -> &Limits {
        &self.limits
    }

    /// The message that we are in.
    pub(super) fn ordinal(&self) -> u64 {
        self.ordinal
    }

    /// The message whose answer decides how it goes on.
    pub(super) fn switching(&self) -> Option<u64> {
        self.switches.then_some(self.ordinal)
    }

    pub(super) fn is_in_head(&self) -> bool {
        matches!(self.place, Place::Head(_))
    }

    pub(super) fn is_at_fork(&self) -> bool {
        matches!(self.place, Place::Fork)
    }

    /// Leaves the fork: what follows is the next message.
    pub(super) fn resume(&mut self) {
        if self.is_at_fork() {
            self.switches = false;
            self.end_message();
        }
    }

    /// How many bytes of `rest`, which is not empty, are good; `None` where it needs more.
    fn step(&mut self, rest: &[u8]) -> Result<Option<usize>, FaultKind> {
        match &mut self.place {
            Place::Head(head) => {
                let Some(length) = head.scan(rest, &self.limits)? else {
                    return Ok(None);
                };
                let (body, switches) = head.close()?;
                self.switches = switches;
                match body {
                    Body::Empty => self.end_message(),
                    Body::Fixed(length) => self.place = Place::Fixed(length),
                    Body::Chunked => self.place = Place::Chunks(FIRST_CHUNK),
                }
                Ok(Some(length))
            }
            Place::Fixed(left) => {
                let taken = take(left, rest);
                if *left == 0 {
                    self.end_message();
                }
                Ok(Some(taken))
            }
            Place::Chunks(Chunk::Data { left }) => {
                let taken = take(left, rest);
                if *left == 0 {
                    self.place = Place::Chunks(Chunk::DataEnd);
                }
                Ok(Some(taken))
            }
            Place::Chunks(chunk) => {
                let [byte, ..] = *rest else {
                    return Ok(None);
                };
                match chunk.next(byte)? {
                    Some(next) => *chunk = next,
                    None => {
                        self.place = Place::Trailers {
                            lines: Lines::default(),
                            fields: 0,
                        }
                    }
                }
                Ok(Some(1))
            }
            Place::Trailers { lines, fields } => {
                let (rest, full) = within(rest, LONGEST_TRAILERS);
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
                    let (name, _) = field(line)?;
                    if belongs_in_head(name) {
                        return Err(FaultKind::Trailer);
                    }
                }
                if full {
                    Err(FaultKind::TrailersTooLong)
                } else {
                    Ok(None)
                }
            }
            Place::Fork => Ok(None),
        }
    }

    fn end_message(&mut self) {
        if self.switches {
            self.place = Place::Fork;
        } else {
            self.ordinal += 1;
            self.place = Place::Head(Head::default());
        }
    }
}

impl Chunk {
    /// What follows this byte, which is none of a chunk's data; `None` after the last chunk.
    fn next(self, byte: u8) -> Result<Option<Self>, FaultKind> {
        match (self, byte) {
            (Self::Size { digits, size }, _) if byte.is_ascii_hexdigit() => {
                if digits == SIZE_DIGITS {
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

/// Takes from `left` what there is of it in `rest`.
fn take(left: &mut u64, rest: &[u8]) -> usize {
    let taken = usize::try_from(*left).map_or(rest.len(), |left| left.min(rest.len()));
    // No platform of ours has a usize above a u64.
    *left -= u64::try_from(taken).unwrap_or(*left);
    taken
}

fn belongs_in_head(name: &[u8]) -> bool {
    let begins = |prefix: &&[u8]| {
        name.get(..prefix.len())
            .is_some_and(|start| start.eq_ignore_ascii_case(prefix))
    };
    NOT_BEGINNING.iter().any(begins)
        || NOT_IN_TRAILERS
            .iter()
            .any(|other| name.eq_ignore_ascii_case(other))
        || override_header::find(name).is_some()
}
