//! Finds the end of a pack by parsing it.
//!
//! ```text
//!   PACK version count ──▶ (entry header ──▶ [base] ──▶ zlib stream)* ──▶ hash of the pack
//! ```
//! Over `git://` a pushing client keeps its sending side open while it waits for the response, so
//! only the pack itself shows where it ends (gitformat-pack). No I/O, and constant memory:
//! unpacked bytes are counted and discarded.

use aws_lc_rs::digest::{self, SHA1_FOR_LEGACY_USE_ONLY, SHA256};
use flate2::{Decompress, FlushDecompress, Status};
use policy::push::ObjectFormat;

/// Limits of one pack, the same as the pack reader's.
const MAX_OBJECTS: u32 = 2_000_000;
const MAX_OBJECT_BYTES: u64 = 1 << 30;
const MAX_UNPACKED_BYTES: u64 = 16 << 30;

/// Size of the buffer for unpacked bytes.
const BUFFER_BYTES: usize = 32 * 1024;

/// Size of the pack header: signature, version and object count.
const HEADER_BYTES: usize = 12;

/// Size of a SHA-256 object id.
const SHA256_BYTES: usize = 32;

/// Why the end of a pack cannot be found.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PackEndError {
    /// Wrong signature or unsupported version.
    #[error("its header is invalid")]
    Header,
    /// An invalid object type, or an overlong size or offset.
    #[error("an object cannot be read")]
    Entry,
    /// An invalid zlib stream, or one that does not have the declared size.
    #[error("an object cannot be unpacked")]
    Stream,
    /// The pack exceeds a limit.
    #[error("it has too many or too large objects")]
    TooLarge,
    /// The hash does not match the bytes before it.
    #[error("its checksum is wrong")]
    Hash,
    /// Bytes after the end of the pack.
    #[error("there are bytes after its end")]
    Trailing,
}

/// Parses a pack up to its end.
pub struct PackEndFinder {
    state: State,
    format: ObjectFormat,
    hasher: digest::Context,
    inflater: Decompress,
    /// Number of objects that are still to come.
    objects_left: u32,
    /// Total declared size of the objects so far.
    unpacked: u64,
    /// Receives unpacked bytes.
    buffer: Box<[u8]>,
}

enum State {
    /// In the header, of which this many bytes were read.
    Header([u8; HEADER_BYTES], usize),
    /// Before an object.
    Entry,
    /// In the size of an object.
    Size { kind: u8, size: u64, shift: u32 },
    /// In the offset of the delta base, of which `length` bytes were read.
    Offset { size: u64, length: u32 },
    /// In the object id of the delta base, of which `missing` bytes are to come.
    BaseId { size: u64, missing: usize },
    /// In the zlib stream of an object of this size.
    Stream { size: u64 },
    /// In the hash, of which `seen` bytes were read and which must be `sum`.
    Hash { sum: digest::Digest, seen: usize },
    /// After the end of the pack.
    Done,
}

impl PackEndFinder {
    /// A finder at the beginning of a pack.
    pub fn new(format: ObjectFormat) -> Self {
        let algorithm = match format {
            ObjectFormat::Sha1 => &SHA1_FOR_LEGACY_USE_ONLY,
            ObjectFormat::Sha256 => &SHA256,
        };
        Self {
            state: State::Header([0; HEADER_BYTES], 0),
            format,
            hasher: digest::Context::new(algorithm),
            inflater: Decompress::new(true),
            objects_left: 0,
            unpacked: 0,
            buffer: vec![0; BUFFER_BYTES].into(),
        }
    }

    /// Takes the next bytes. The cost depends on the unpacked size, so do not call this on an
    /// async thread.
    pub fn feed(&mut self, bytes: &[u8]) -> Result<(), PackEndError> {
        let mut rest = bytes;
        while !rest.is_empty() {
            // The hash covers everything before it.
            let is_hashed = !matches!(self.state, State::Hash { .. } | State::Done);
            let taken = self.step(rest)?;
            let (seen, after) = rest.split_at_checked(taken).ok_or(PackEndError::Stream)?;
            if is_hashed {
                self.hasher.update(seen);
            }
            if matches!(self.state, State::Entry) && self.objects_left == 0 {
                let sum = self.hasher.clone().finish();
                self.state = State::Hash { sum, seen: 0 };
            }
            rest = after;
        }
        Ok(())
    }

    /// Whether the last byte of the pack was read.
    pub fn is_done(&self) -> bool {
        matches!(self.state, State::Done)
    }

    /// Reads some of `bytes`, which is not empty. Returns the number of bytes read.
    fn step(&mut self, bytes: &[u8]) -> Result<usize, PackEndError> {
        let byte = bytes.first().copied().unwrap_or_default();
        match &mut self.state {
            State::Header(header, seen) => {
                *header.get_mut(*seen).ok_or(PackEndError::Header)? = byte;
                *seen += 1;
                if *seen == HEADER_BYTES {
                    let [b'P', b'A', b'C', b'K', 0, 0, 0, 2 | 3, count @ ..] = *header else {
                        return Err(PackEndError::Header);
                    };
                    self.objects_left = u32::from_be_bytes(count);
                    if self.objects_left > MAX_OBJECTS {
                        return Err(PackEndError::TooLarge);
                    }
                    self.state = State::Entry;
                }
                Ok(1)
            }
            State::Entry => {
                self.objects_left = self
                    .objects_left
                    .checked_sub(1)
                    .ok_or(PackEndError::Entry)?;
                let (kind, size) = ((byte >> 4) & 7, u64::from(byte & 15));
                self.read_size(kind, size, 4, byte)
            }
            State::Size { kind, size, shift } => {
                let (kind, shift) = (*kind, *shift);
                if shift > 56 {
                    return Err(PackEndError::Entry);
                }
                let size = *size | (u64::from(byte & 0x7f) << shift);
                self.read_size(kind, size, shift + 7, byte)
            }
            State::Offset { size, length } => {
                let (size, length) = (*size, *length + 1);
                self.state = if byte & 0x80 == 0 {
                    self.begin_stream(size)
                } else if length < 10 {
                    State::Offset { size, length }
                } else {
                    return Err(PackEndError::Entry);
                };
                Ok(1)
            }
            State::BaseId { size, missing } => {
                let (size, taken) = (*size, bytes.len().min(*missing));
                *missing -= taken;
                if *missing == 0 {
                    self.state = self.begin_stream(size);
                }
                Ok(taken)
            }
            State::Stream { size } => {
                let size = *size;
                self.inflate(bytes, size)
            }
            State::Hash { sum, seen } => {
                if sum.as_ref().get(*seen) != Some(&byte) {
                    return Err(PackEndError::Hash);
                }
                *seen += 1;
                if *seen == sum.as_ref().len() {
                    self.state = State::Done;
                }
                Ok(1)
            }
            State::Done => Err(PackEndError::Trailing),
        }
    }

    /// Sets the next state after a byte of an object's header.
    fn read_size(
        &mut self,
        kind: u8,
        size: u64,
        shift: u32,
        byte: u8,
    ) -> Result<usize, PackEndError> {
        if byte & 0x80 != 0 {
            self.state = State::Size { kind, size, shift };
            return Ok(1);
        }
        self.unpacked = self.unpacked.saturating_add(size);
        if size > MAX_OBJECT_BYTES || self.unpacked > MAX_UNPACKED_BYTES {
            return Err(PackEndError::TooLarge);
        }
        self.state = match kind {
            1..=4 => self.begin_stream(size),
            6 => State::Offset { size, length: 0 },
            7 => State::BaseId {
                size,
                missing: match self.format {
                    ObjectFormat::Sha1 => 20,
                    ObjectFormat::Sha256 => SHA256_BYTES,
                },
            },
            _ => return Err(PackEndError::Entry),
        };
        Ok(1)
    }

    fn begin_stream(&mut self, size: u64) -> State {
        self.inflater.reset(true);
        State::Stream { size }
    }

    /// Unpacks the available bytes of an object.
    fn inflate(&mut self, bytes: &[u8], size: u64) -> Result<usize, PackEndError> {
        let mut taken = 0;
        loop {
            let rest = bytes.get(taken..).unwrap_or_default();
            let (total_in, total_out) = (self.inflater.total_in(), self.inflater.total_out());
            let status = self
                .inflater
                .decompress(rest, &mut self.buffer, FlushDecompress::None)
                .map_err(|_| PackEndError::Stream)?;
            let consumed = self.inflater.total_in() - total_in;
            taken += usize::try_from(consumed).map_err(|_| PackEndError::Stream)?;
            let total = self.inflater.total_out();
            match status {
                _ if total > size => return Err(PackEndError::Stream),
                Status::StreamEnd if total == size => {
                    self.state = State::Entry;
                    return Ok(taken);
                }
                Status::StreamEnd => return Err(PackEndError::Stream),
                Status::Ok | Status::BufError if consumed == 0 && total == total_out => {
                    // The inflater may only stall for lack of input.
                    return if rest.is_empty() {
                        Ok(taken)
                    } else {
                        Err(PackEndError::Stream)
                    };
                }
                Status::Ok | Status::BufError => {}
            }
        }
    }
}

impl std::fmt::Debug for PackEndFinder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PackEndFinder")
            .field("objects_left", &self.objects_left)
            .field("done", &self.is_done())
            .finish_non_exhaustive()
    }
}

/// Parses `bytes` as a pack, in chunks of at most `piece` bytes. Returns whether the pack is
/// complete. Fuzz entry point: the result must not depend on the chunk size.
pub fn fuzz_check(format: ObjectFormat, bytes: &[u8], piece: usize) -> Result<bool, PackEndError> {
    let mut end = PackEndFinder::new(format);
    for piece in bytes.chunks(piece.max(1)) {
        end.feed(piece)?;
    }
    Ok(end.is_done())
}

#[cfg(test)]
mod tests;
