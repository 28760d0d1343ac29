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
    mut on_data: impl FnMut(&[u8]),
) -> Result<(), PackError> {
    const WRONG: PackError = PackError::Malformed("an object cannot be unpacked");
    inflater.reset(true);
    loop {
        let (read_before, inflated_before) = (inflater.total_in(), inflater.total_out());
        let packed = input.fill()?;
        let status = inflater
            .decompress(packed, piece, FlushDecompress::None)
            .map_err(|_| WRONG)?;
        let read = usize::try_from(inflater.total_in() - read_before).map_err(|_| WRONG)?;
        let inflated =
            usize::try_from(inflater.total_out() - inflated_before).map_err(|_| WRONG)?;
        if inflater.total_out() > size {
            return Err(PackError::Malformed(
                "an object is larger than the size in its header",
            ));
        }
        on_data(piece.get(..inflated).unwrap_or_default());
        input.consume(read);
        match status {
            Status::StreamEnd if inflater.total_out() == size => return Ok(()),
            Status::StreamEnd => {
                return Err(PackError::Malformed(
                    "an object is smaller than the size in its header",
                ));
            }
            Status::Ok | Status::BufError if read == 0 && inflated == 0 => return Err(WRONG),
            Status::Ok | Status::BufError => {}
        }
    }
}

/// Reads a file from an offset through its own buffer. The file's position is not used, because the
/// gate shares it.
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
        // Without a hasher the input reads single entries again, most of which are small.
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
            return Err(PackError::Truncated);
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
        let first = self.fill()?.first().copied().ok_or(PackError::Truncated)?;
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
