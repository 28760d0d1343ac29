//! Buffered reader of a pack file, with zlib inflation.

use std::fs::File;
use std::os::unix::fs::FileExt;

use flate2::{Decompress, FlushDecompress, Status};
use policy::push::ObjectFormat;
use policy::refs::ObjectId;

use crate::pack_reader::error::PackError;
use crate::pack_reader::object_hash::Hasher;

/// Bytes read and inflated at a time.
pub(super) const CHUNK: usize = 64 << 10;

/// Inflates one entry, which must have exactly `size` bytes.
pub(super) fn inflate(
    input: &mut Input<'_>,
    inflater: &mut Decompress,
    piece: &mut [u8],
    size: u64,
    mut take: impl FnMut(&[u8]),
) -> Result<(), PackError> {
    const WRONG: PackError = PackError::Malformed("an object cannot be unpacked");
    inflater.reset(true);
    loop {
        let (read_before, made_before) = (inflater.total_in(), inflater.total_out());
        let packed = input.fill()?;
        let status = inflater
            .decompress(packed, piece, FlushDecompress::None)
            .map_err(|_| WRONG)?;
        let read = usize::try_from(inflater.total_in() - read_before).map_err(|_| WRONG)?;
        let made = usize::try_from(inflater.total_out() - made_before).map_err(|_| WRONG)?;
        if inflater.total_out() > size {
            return Err(PackError::Malformed(
                "an object is larger than its header says",
            ));
        }
        take(piece.get(..made).unwrap_or_default());
        input.consume(read);
        match status {
            Status::StreamEnd if inflater.total_out() == size => return Ok(()),
            Status::StreamEnd => {
                return Err(PackError::Malformed(
                    "an object is smaller than its header says",
                ));
            }
            Status::Ok | Status::BufError if read == 0 && made == 0 => return Err(WRONG),
            Status::Ok | Status::BufError => {}
        }
    }
}

/// Reads a file from an offset through its own buffer. It does not use the file's position, which
/// is shared with the gate.
pub(super) struct Input<'a> {
    file: &'a File,
    /// The file offset of the buffer's end.
    at: u64,
    buffer: Box<[u8]>,
    start: usize,
    end: usize,
    /// Hashes the consumed bytes.
    pub(super) hasher: Option<Hasher>,
}

impl<'a> Input<'a> {
    pub(super) fn new(file: &'a File, at: u64, hasher: Option<Hasher>) -> Self {
        // Entries that are loaded again are mostly small.
        let size = if hasher.is_some() { CHUNK } else { 4 << 10 };
        Self {
            file,
            at,
            buffer: vec![0; size].into(),
            start: 0,
            end: 0,
            hasher,
        }
    }

    pub(super) fn offset(&self) -> u64 {
        self.at - (self.end - self.start) as u64
    }

    /// Returns the buffered bytes, at least one.
    fn fill(&mut self) -> Result<&[u8], PackError> {
        if self.is_at_end()? {
            return Err(PackError::Short);
        }
        Ok(self.buffer.get(self.start..self.end).unwrap_or_default())
    }

    pub(super) fn is_at_end(&mut self) -> Result<bool, PackError> {
        while self.start == self.end {
            match self.file.read_at(&mut self.buffer, self.at) {
                Ok(0) => return Ok(true),
                Ok(read) => {
                    (self.start, self.end) = (0, read);
                    self.at += read as u64;
                }
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(false)
    }

    fn consume(&mut self, count: usize) {
        let end = self.start.saturating_add(count).min(self.end);
        if let Some(hasher) = &mut self.hasher {
            hasher.update(self.buffer.get(self.start..end).unwrap_or_default());
        }
        self.start = end;
    }

    pub(super) fn byte(&mut self) -> Result<u8, PackError> {
        let first = self.fill()?.first().copied().ok_or(PackError::Short)?;
        self.consume(1);
        Ok(first)
    }

    pub(super) fn array<const N: usize>(&mut self) -> Result<[u8; N], PackError> {
        let mut bytes = [0; N];
        for byte in &mut bytes {
            *byte = self.byte()?;
        }
        Ok(bytes)
    }

    pub(super) fn id(&mut self, format: ObjectFormat) -> Result<ObjectId, PackError> {
        Ok(match format {
            ObjectFormat::Sha1 => ObjectId::Sha1(self.array()?),
            ObjectFormat::Sha256 => ObjectId::Sha256(self.array()?),
        })
    }
}
