//! Where a pack ends, found by reading it.
//!
//! ```text
//!   PACK version count ──▶ (entry head ──▶ [base] ──▶ zlib stream)* ──▶ hash of all of it
//! ```
//! Over `git://` a client that pushes waits for the answer with its side open: nothing but the
//! pack itself says that it is complete (gitformat-pack). No I/O, and no more memory for a
//! large pack than for a small one: what is unpacked is counted and thrown away.

use aws_lc_rs::digest::{self, SHA1_FOR_LEGACY_USE_ONLY, SHA256};
use flate2::{Decompress, FlushDecompress, Status};
use policy::push::ObjectFormat;

/// What one pack may cost to read: what the reader of objects takes at most, too.
const MOST_OBJECTS: u32 = 2_000_000;
const MOST_OBJECT: u64 = 1 << 30;
const MOST_UNPACKED: u64 = 16 << 30;

/// How much is unpacked at a time.
const PIECE: usize = 32 * 1024;

/// The head of a pack: its name, its version, how many objects it has.
const HEAD: usize = 12;

/// The longest hash.
const MOST_HASH: usize = 32;

/// Why a pack has no end that could be found.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BadPack {
    /// Another beginning.
    #[error("it does not begin as one")]
    Head,
    /// A type that is none, or a number without end.
    #[error("an object cannot be read")]
    Entry,
    /// No zlib stream, or not of the size that was said.
    #[error("an object cannot be unpacked")]
    Stream,
    /// More than one push may have.
    #[error("there is too much in it")]
    TooMuch,
    /// Another hash than that of the bytes before it.
    #[error("its checksum is wrong")]
    Hash,
    /// Bytes after its end.
    #[error("something follows it")]
    Trailing,
}

/// Reads a pack to its end.
pub struct PackEnd {
    state: State,
    format: ObjectFormat,
    hasher: digest::Context,
    inflater: Decompress,
    /// Objects that are still to come.
    left: u32,
    /// Bytes unpacked so far.
    unpacked: u64,
    /// Where they go.
    piece: Box<[u8]>,
}

enum State {
    /// So many bytes of the head.
    Head([u8; HEAD], usize),
    /// Between two objects.
    Entry,
    /// Within the number that says how long an object is.
    Size { kind: u8, size: u64, shift: u32 },
    /// Within the number that says where the base is, so many bytes of it.
    Offset { size: u64, length: u32 },
    /// Within the base's name, of which so many bytes are missing.
    Name { size: u64, missing: usize },
    /// Within the stream of an object of that size.
    Stream { size: u64 },
    /// So many bytes of the hash, and what it has to be.
    Hash { sum: digest::Digest, seen: usize },
    /// Behind it.
    Done,
}

impl PackEnd {
    /// Nothing of a pack was read yet.
    pub fn new(format: ObjectFormat) -> Self {
        let algorithm = match format {
            ObjectFormat::Sha1 => &SHA1_FOR_LEGACY_USE_ONLY,
            ObjectFormat::Sha256 => &SHA256,
        };
        Self {
            state: State::Head([0; HEAD], 0),
            format,
            hasher: digest::Context::new(algorithm),
            inflater: Decompress::new(true),
            left: 0,
            unpacked: 0,
            piece: vec![0; PIECE].into(),
        }
    }

    /// Takes the next bytes. What it costs to read them depends on what they unpack to, so
    /// this is no work for an async thread.
    pub fn feed(&mut self, bytes: &[u8]) -> Result<(), BadPack> {
        let mut rest = bytes;
        while !rest.is_empty() {
            // The hash is of everything before it.
            let counts = !matches!(self.state, State::Hash { .. } | State::Done);
            let taken = self.step(rest)?;
            let (seen, after) = rest.split_at_checked(taken).ok_or(BadPack::Stream)?;
            if counts {
                self.hasher.update(seen);
            }
            if matches!(self.state, State::Entry) && self.left == 0 {
                let sum = self.hasher.clone().finish();
                self.state = State::Hash { sum, seen: 0 };
            }
            rest = after;
        }
        Ok(())
    }

    /// Whether the last byte was its last.
    pub fn is_done(&self) -> bool {
        matches!(self.state, State::Done)
    }

    /// Takes some of `bytes`, which has at least one, and says how many.
    fn step(&mut self, bytes: &[u8]) -> Result<usize, BadPack> {
        let byte = bytes.first().copied().unwrap_or_default();
        match &mut self.state {
            State::Head(head, seen) => {
                *head.get_mut(*seen).ok_or(BadPack::Head)? = byte;
                *seen += 1;
                if *seen == HEAD {
                    let [b'P', b'A', b'C', b'K', 0, 0, 0, 2 | 3, count @ ..] = *head else {
                        return Err(BadPack::Head);
                    };
                    self.left = u32::from_be_bytes(count);
                    if self.left > MOST_OBJECTS {
                        return Err(BadPack::TooMuch);
                    }
                    self.state = State::Entry;
                }
                Ok(1)
            }
            State::Entry => {
                self.left = self.left.checked_sub(1).ok_or(BadPack::Entry)?;
                let (kind, size) = ((byte >> 4) & 7, u64::from(byte & 15));
                self.size(kind, size, 4, byte)
            }
            State::Size { kind, size, shift } => {
                let (kind, shift) = (*kind, *shift);
                if shift > 56 {
                    return Err(BadPack::Entry);
                }
                let size = *size | (u64::from(byte & 0x7f) << shift);
                self.size(kind, size, shift + 7, byte)
            }
            State::Offset { size, length } => {
                let (size, length) = (*size, *length + 1);
                self.state = if byte & 0x80 == 0 {
                    self.stream(size)
                } else if length < 10 {
                    State::Offset { size, length }
                } else {
                    return Err(BadPack::Entry);
                };
                Ok(1)
            }
            State::Name { size, missing } => {
                let (size, taken) = (*size, bytes.len().min(*missing));
                *missing -= taken;
                if *missing == 0 {
                    self.state = self.stream(size);
                }
                Ok(taken)
            }
            State::Stream { size } => {
                let size = *size;
                self.inflate(bytes, size)
            }
            State::Hash { sum, seen } => {
                if sum.as_ref().get(*seen) != Some(&byte) {
                    return Err(BadPack::Hash);
                }
                *seen += 1;
                if *seen == sum.as_ref().len() {
                    self.state = State::Done;
                }
                Ok(1)
            }
            State::Done => Err(BadPack::Trailing),
        }
    }

    /// The next state after a byte of an object's head.
    fn size(&mut self, kind: u8, size: u64, shift: u32, byte: u8) -> Result<usize, BadPack> {
        if byte & 0x80 != 0 {
            self.state = State::Size { kind, size, shift };
            return Ok(1);
        }
        self.unpacked = self.unpacked.saturating_add(size);
        if size > MOST_OBJECT || self.unpacked > MOST_UNPACKED {
            return Err(BadPack::TooMuch);
        }
        self.state = match kind {
            1..=4 => self.stream(size),
            6 => State::Offset { size, length: 0 },
            7 => State::Name {
                size,
                missing: match self.format {
                    ObjectFormat::Sha1 => 20,
                    ObjectFormat::Sha256 => MOST_HASH,
                },
            },
            _ => return Err(BadPack::Entry),
        };
        Ok(1)
    }

    fn stream(&mut self, size: u64) -> State {
        self.inflater.reset(true);
        State::Stream { size }
    }

    /// Unpacks as much as there is of an object.
    fn inflate(&mut self, bytes: &[u8], size: u64) -> Result<usize, BadPack> {
        let mut taken = 0;
        loop {
            let rest = bytes.get(taken..).unwrap_or_default();
            let (read, made) = (self.inflater.total_in(), self.inflater.total_out());
            let status = self
                .inflater
                .decompress(rest, &mut self.piece, FlushDecompress::None)
                .map_err(|_| BadPack::Stream)?;
            let moved = self.inflater.total_in() - read;
            taken += usize::try_from(moved).map_err(|_| BadPack::Stream)?;
            let total = self.inflater.total_out();
            match status {
                _ if total > size => return Err(BadPack::Stream),
                Status::StreamEnd if total == size => {
                    self.state = State::Entry;
                    return Ok(taken);
                }
                Status::StreamEnd => return Err(BadPack::Stream),
                Status::Ok | Status::BufError if moved == 0 && total == made => {
                    // Only the lack of more bytes is a reason to stand still.
                    return if rest.is_empty() {
                        Ok(taken)
                    } else {
                        Err(BadPack::Stream)
                    };
                }
                Status::Ok | Status::BufError => {}
            }
        }
    }
}

impl std::fmt::Debug for PackEnd {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PackEnd")
            .field("left", &self.left)
            .field("done", &self.is_done())
            .finish_non_exhaustive()
    }
}

/// Reads `bytes` as a pack, in pieces of at most `piece` bytes, and says whether that was all of
/// it. What a fuzzer calls: however a pack is split, the same comes out.
pub fn exercise(format: ObjectFormat, bytes: &[u8], piece: usize) -> Result<bool, BadPack> {
    let mut end = PackEnd::new(format);
    for piece in bytes.chunks(piece.max(1)) {
        end.feed(piece)?;
    }
    Ok(end.is_done())
}

#[cfg(test)]
mod tests;
