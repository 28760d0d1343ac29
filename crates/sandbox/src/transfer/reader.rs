//! Parses the members of an archive, and refuses unknown ones.

use std::io::{ErrorKind, Read};

use super::header::{BLOCK, Header};
use super::path::MAX_PATH_BYTES;
use super::{MemberRefusal, TransferError};

/// Maximum size of an extension header (POSIX pax), in which other programs store attributes.
const MAX_EXTENSION_BYTES: u64 = 1 << 20;

/// Maximum number of global headers.
const MAX_GLOBAL_HEADERS: u32 = 16;

/// The header of a member.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Member {
    pub(super) path: Vec<u8>,
    pub(super) mode: u32,
    pub(super) modified: u64,
    pub(super) kind: Kind,
}

#[derive(Debug, PartialEq, Eq)]
pub(super) enum Kind {
    File { size: u64 },
    Directory,
    Symlink { text: Vec<u8> },
    HardLink { to: Vec<u8> },
}

pub(super) struct Reader<'a> {
    archive: &'a mut dyn Read,
    /// Bytes of the current member's content that are not read, and its padding.
    left: u64,
    padding: u64,
    globals: u32,
}

/// The fields of extension headers before a member.
#[derive(Default)]
struct MemberExtensions {
    path: Option<Vec<u8>>,
    link: Option<Vec<u8>>,
    size: Option<u64>,
    sparse: bool,
    pax: bool,
}

impl<'a> Reader<'a> {
    pub(super) fn new(archive: &'a mut dyn Read) -> Self {
        Self {
            archive,
            left: 0,
            padding: 0,
            globals: 0,
        }
    }

    /// Returns the next member; `None` at the end mark. The content of the previous member must
    /// have been read.
    pub(super) fn next_member(&mut self) -> Result<Option<Member>, TransferError> {
        self.skip_padding()?;
        let mut before = MemberExtensions::default();
        loop {
            let header = self.block()?;
            if header.is_empty() {
                return match before.is_empty() && self.ends()? {
                    true => Ok(None),
                    false => Err(TransferError::malformed("it is truncated")),
                };
            }
            header.check()?;
            let size = header
                .size()
                .ok_or_else(|| TransferError::malformed("a size is no number"))?;
            let twice = || TransferError::malformed("a member has two names");
            match header.kind() {
                b'L' if before.path.is_some() => return Err(twice()),
                b'K' if before.link.is_some() => return Err(twice()),
                b'x' if before.pax => return Err(twice()),
                b'L' => before.path = Some(self.long_name(size)?),
                b'K' => before.link = Some(self.long_name(size)?),
                b'x' => {
                    let records = self.extension(size, MAX_EXTENSION_BYTES)?;
                    before.pax = true;
                    before.parse(&records)?;
                }
                b'g' => {
                    self.globals += 1;
                    let records = self.extension(size, MAX_EXTENSION_BYTES)?;
                    let mut extension = MemberExtensions::default();
                    extension.parse(&records)?;
                    if self.globals > MAX_GLOBAL_HEADERS || !extension.is_empty() {
                        return Err(TransferError::malformed("a global header names members"));
                    }
                }
                _ => return self.member(&header, size, before).map(Some),
            }
        }
    }

    /// Reads content of the current member; 0 at its end.
    pub(super) fn content(&mut self, buffer: &mut [u8]) -> Result<usize, TransferError> {
        let most = usize::try_from(self.left).unwrap_or(usize::MAX);
        let most = most.min(buffer.len());
        let buffer = buffer.get_mut(..most).unwrap_or_default();
        if buffer.is_empty() {
            return Ok(0);
        }
        let length = loop {
            match self.archive.read(buffer) {
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(unreadable(&error)),
                Ok(0) => return Err(TransferError::malformed("it is truncated")),
                Ok(length) => break length,
            }
        };
        self.left -= length as u64;
        Ok(length)
    }

    fn member(
        &mut self,
        header: &Header,
        size: u64,
        before: MemberExtensions,
    ) -> Result<Member, TransferError> {
        let path = before.path.unwrap_or_else(|| header.path());
        let link = before.link.unwrap_or_else(|| header.link());
        let size = before.size.unwrap_or(size);
        let refused = |reason| Err(TransferError::refused(&path, reason));
        if before.sparse {
            return refused(MemberRefusal::Sparse);
        }
        let kind = match header.kind() {
            // In very old archives a file with a trailing slash is a directory.
            b'0' | 0 if path.ends_with(b"/") => return refused(MemberRefusal::NoPath),
            b'0' | 0 => Kind::File { size },
            b'1' => Kind::HardLink { to: link },
            b'2' => Kind::Symlink { text: link },
            b'3' | b'4' => return refused(MemberRefusal::Device),
            b'5' => Kind::Directory,
            b'6' => return refused(MemberRefusal::Fifo),
            b'S' => return refused(MemberRefusal::Sparse),
            _ => return refused(MemberRefusal::Unknown),
        };
        if size > 0 && !matches!(kind, Kind::File { .. }) {
            return Err(TransferError::malformed(
                "a member that is no file has content",
            ));
        }
        let mode = header
            .mode()
            .ok_or_else(|| TransferError::malformed("a mode is no number"))?;
        self.expect(size);
        Ok(Member {
            path,
            mode,
            modified: header.modified(),
            kind,
        })
    }

    fn expect(&mut self, size: u64) {
        self.left = size;
        self.padding = (BLOCK as u64 - size % BLOCK as u64) % BLOCK as u64;
    }

    fn skip_padding(&mut self) -> Result<(), TransferError> {
        if self.left > 0 {
            return Err(TransferError::malformed("a content was not read"));
        }
        let mut rest = [0; BLOCK];
        let length = usize::try_from(self.padding).unwrap_or_default();
        self.padding = 0;
        self.fill(rest.get_mut(..length).unwrap_or_default())
    }

    fn long_name(&mut self, size: u64) -> Result<Vec<u8>, TransferError> {
        // The size includes the NUL.
        let mut name = self.extension(size, MAX_PATH_BYTES as u64 + 1)?;
        if name.last() == Some(&0) {
            name.pop();
        }
        Ok(name)
    }

    fn extension(&mut self, size: u64, most: u64) -> Result<Vec<u8>, TransferError> {
        if size > most {
            return Err(TransferError::malformed("an extension header is too long"));
        }
        let mut bytes = vec![0; usize::try_from(size).unwrap_or_default()];
        self.fill(&mut bytes)?;
        self.expect(size);
        self.left = 0;
        self.skip_padding()?;
        Ok(bytes)
    }

    fn block(&mut self) -> Result<Header, TransferError> {
        let mut block = [0; BLOCK];
        self.fill(&mut block)?;
        Ok(Header(block))
    }

    fn fill(&mut self, buffer: &mut [u8]) -> Result<(), TransferError> {
        self.archive
            .read_exact(buffer)
            .map_err(|error| match error.kind() {
                ErrorKind::UnexpectedEof => TransferError::malformed("it is truncated"),
                _ => unreadable(&error),
            })
    }

    /// Whether a second block of zeros follows the first.
    fn ends(&mut self) -> Result<bool, TransferError> {
        Ok(self.block()?.is_empty())
    }
}

impl MemberExtensions {
    fn is_empty(&self) -> bool {
        self.path.is_none() && self.link.is_none() && self.size.is_none() && !self.sparse
    }

    /// Parses `LENGTH KEY=VALUE\n` records. Owners, times and attributes are ignored, because they
    /// do not affect the path or type of a member.
    fn parse(&mut self, mut records: &[u8]) -> Result<(), TransferError> {
        let broken = || TransferError::malformed("an extension header is broken");
        while !records.is_empty() {
            let blank = records.iter().position(|&byte| byte == b' ');
            let length = blank
                .and_then(|blank| str::from_utf8(records.get(..blank)?).ok()?.parse().ok())
                .filter(|&length: &usize| length <= records.len())
                .ok_or_else(broken)?;
            let (record, rest) = records.split_at(length);
            let record = record
                .get(blank.unwrap_or_default() + 1..)
                .and_then(|record| record.strip_suffix(b"\n"))
                .ok_or_else(broken)?;
            let equal = record.iter().position(|&byte| byte == b'=');
            let (key, value) = record.split_at(equal.ok_or_else(broken)?);
            let value = value.get(1..).unwrap_or_default();
            match key {
                b"path" => self.path = Some(value.to_vec()),
                b"linkpath" => self.link = Some(value.to_vec()),
                b"size" => {
                    let size = str::from_utf8(value).ok().and_then(|v| v.parse().ok());
                    self.size = Some(size.ok_or_else(broken)?);
                }
                key if key.starts_with(b"GNU.sparse.") => self.sparse = true,
                _ => {}
            }
            records = rest;
        }
        Ok(())
    }
}

fn unreadable(error: &std::io::Error) -> TransferError {
    TransferError::System {
        step: "reading".to_owned(),
        path: "archive".to_owned(),
        errno: error.raw_os_error().unwrap_or(libc::EIO),
    }
}
