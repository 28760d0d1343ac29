//! Reads members, and refuses whatever it does not know.

use std::io::{ErrorKind, Read};

use super::header::{BLOCK, Header};
use super::path::LONGEST;
use super::{Refusal, TransferError};

/// The longest extension header (POSIX pax): other programs put attributes there.
const LONGEST_EXTENSION: u64 = 1 << 20;

/// The most headers that speak for the whole archive.
const MOST_GLOBAL: u32 = 16;

/// A member, before its content.
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
    /// Of the present member: content not yet read, and the rest of its last block.
    left: u64,
    padding: u64,
    globals: u32,
}

/// What headers before a member say of it.
#[derive(Default)]
struct Before {
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

    /// The next member, or `None` at the end mark. The content of the one before has been
    /// read.
    pub(super) fn next_member(&mut self) -> Result<Option<Member>, TransferError> {
        self.skip_padding()?;
        let mut before = Before::default();
        loop {
            let header = self.block()?;
            if header.is_empty() {
                return match before.is_nothing() && self.ends()? {
                    true => Ok(None),
                    false => Err(TransferError::malformed("it ends in the middle")),
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
                    let records = self.extension(size, LONGEST_EXTENSION)?;
                    before.pax = true;
                    before.learn(&records)?;
                }
                b'g' => {
                    self.globals += 1;
                    let records = self.extension(size, LONGEST_EXTENSION)?;
                    let mut said = Before::default();
                    said.learn(&records)?;
                    if self.globals > MOST_GLOBAL || !said.is_nothing() {
                        return Err(TransferError::malformed("a global header names members"));
                    }
                }
                _ => return self.member(&header, size, before).map(Some),
            }
        }
    }

    /// Some of the present member's content; nothing at its end.
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
                Ok(0) => return Err(TransferError::malformed("it ends in the middle")),
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
        before: Before,
    ) -> Result<Member, TransferError> {
        let path = before.path.unwrap_or_else(|| header.path());
        let link = before.link.unwrap_or_else(|| header.link());
        let size = before.size.unwrap_or(size);
        let refused = |reason| Err(TransferError::refused(&path, reason));
        if before.sparse {
            return refused(Refusal::Sparse);
        }
        let kind = match header.kind() {
            // A file of very old archives that ends so is a directory.
            b'0' | 0 if path.ends_with(b"/") => return refused(Refusal::NoPath),
            b'0' | 0 => Kind::File { size },
            b'1' => Kind::HardLink { to: link },
            b'2' => Kind::Symlink { text: link },
            b'3' | b'4' => return refused(Refusal::Device),
            b'5' => Kind::Directory,
            b'6' => return refused(Refusal::Fifo),
            b'S' => return refused(Refusal::Sparse),
            _ => return refused(Refusal::Unknown),
        };
        if size > 0 && !matches!(kind, Kind::File { .. }) {
            return Err(TransferError::malformed("what is no file has a content"));
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
        // With its NUL.
        let mut name = self.extension(size, LONGEST as u64 + 1)?;
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
                ErrorKind::UnexpectedEof => TransferError::malformed("it ends in the middle"),
                _ => unreadable(&error),
            })
    }

    /// After one block of zeros: whether another follows.
    fn ends(&mut self) -> Result<bool, TransferError> {
        Ok(self.block()?.is_empty())
    }
}

impl Before {
    fn is_nothing(&self) -> bool {
        self.path.is_none() && self.link.is_none() && self.size.is_none() && !self.sparse
    }

    /// Takes in `LENGTH KEY=VALUE\n` records. What says nothing about where and what a member
    /// is (owners, times, attributes) is not looked at.
    fn learn(&mut self, mut records: &[u8]) -> Result<(), TransferError> {
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
