//! Writes members in the GNU format, which every tar reads and whose long names are bytes.

use std::io::{Result, Write};

use super::header::{BLOCK, Header, MAX_SHORT_NAME_BYTES};

/// The type of a member.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Entry<'a> {
    File { size: u64, modified: u64 },
    Directory,
    Symlink(&'a [u8]),
}

pub(super) struct Writer<'a> {
    into: &'a mut dyn Write,
}

impl<'a> Writer<'a> {
    pub(super) fn new(into: &'a mut dyn Write) -> Self {
        Self { into }
    }

    /// Begins a member. A file's content follows, then [`Writer::pad`].
    pub(super) fn begin(&mut self, path: &[u8], mode: u32, entry: Entry<'_>) -> Result<()> {
        let (kind, link, size, modified) = match entry {
            Entry::File { size, modified } => (b'0', &b""[..], size, modified),
            Entry::Directory => (b'5', &b""[..], 0, 0),
            Entry::Symlink(text) => (b'2', text, 0, 0),
        };
        for (long, what) in [(link, b'K'), (path, b'L')] {
            if long.len() > MAX_SHORT_NAME_BYTES {
                let length = long.len() as u64 + 1;
                let before = Header::new(what, b"././@LongLink", b"").complete(0o644, length, 0);
                self.into.write_all(&before.0)?;
                self.into.write_all(long)?;
                self.into.write_all(&[0])?;
                self.pad(length)?;
            }
        }
        let header = Header::new(kind, path, link).complete(mode, size, modified);
        self.into.write_all(&header.0)
    }

    /// Writes content of a file.
    pub(super) fn content(&mut self, bytes: &[u8]) -> Result<()> {
        self.into.write_all(bytes)
    }

    /// Pads the last block of content of this size.
    pub(super) fn pad(&mut self, size: u64) -> Result<()> {
        let over = usize::try_from(size % BLOCK as u64).unwrap_or_default();
        let zeros = [0; BLOCK];
        self.into
            .write_all(zeros.get(..(BLOCK - over) % BLOCK).unwrap_or_default())
    }

    /// Writes the end mark.
    pub(super) fn finish(self) -> Result<()> {
        self.into.write_all(&[0; 2 * BLOCK])?;
        self.into.flush()
    }
}
