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
    /// The number of bytes of the current member's content that are not read yet.
    unread: u64,
    /// The length of the padding after that content.
    padding: u64,
    global_headers: u32,
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
            unread: 0,
            padding: 0,
            global_headers: 0,
        }
    }

    /// Returns the next member; `None` at the end mark. The content of the previous member must
    /// have been read.
    pub(super) fn next_member(&mut self) -> Result<Option<Member>, TransferError> {
        self.skip_padding()?;
        let mut extensions = MemberExtensions::default();
        loop {
            let header = self.read_header()?;
            if header.is_empty() {
                return match extensions.is_empty() && self.is_end_mark()? {
                    true => Ok(None),
                    false => Err(TransferError::malformed("the archive is truncated")),
                };
            }
            header.check()?;
            let size = header
                .size()
                .ok_or_else(|| TransferError::malformed("a size is no number"))?;
            let two_names = || TransferError::malformed("a member has two names");
            match header.kind() {
                b'L' if extensions.path.is_some() => return Err(two_names()),
                b'K' if extensions.link.is_some() => return Err(two_names()),
                b'x' if extensions.pax => return Err(two_names()),
                b'L' => extensions.path = Some(self.read_long_name(size)?),
                b'K' => extensions.link = Some(self.read_long_name(size)?),
                b'x' => {
                    let records = self.read_extension(size, MAX_EXTENSION_BYTES)?;
                    extensions.pax = true;
                    extensions.parse(&records)?;
                }
                b'g' => {
                    self.global_headers += 1;
                    let records = self.read_extension(size, MAX_EXTENSION_BYTES)?;
                    let mut extension = MemberExtensions::default();
                    extension.parse(&records)?;
                    if self.global_headers > MAX_GLOBAL_HEADERS || !extension.is_empty() {
                        return Err(TransferError::malformed("a global header names members"));
                    }
                }
                _ => return self.parse_member(&header, size, extensions).map(Some),
            }
        }
    }

    /// Reads content of the current member; 0 at its end.
    pub(super) fn content(&mut self, buffer: &mut [u8]) -> Result<usize, TransferError> {
        let max_bytes = usize::try_from(self.unread).unwrap_or(usize::MAX);
        let max_bytes = max_bytes.min(buffer.len());
        let buffer = buffer.get_mut(..max_bytes).unwrap_or_default();
        if buffer.is_empty() {
            return Ok(0);
        }
        let length = loop {
            match self.archive.read(buffer) {
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(unreadable(&error)),
                Ok(0) => return Err(TransferError::malformed("the archive is truncated")),
                Ok(length) => break length,
            }
        };
        self.unread -= length as u64;
        Ok(length)
    }

    fn parse_member(
        &mut self,
        header: &Header,
        size: u64,
        extensions: MemberExtensions,
    ) -> Result<Member, TransferError> {
        let path = extensions.path.unwrap_or_else(|| header.path());
        let link = extensions.link.unwrap_or_else(|| header.link());
        let size = extensions.size.unwrap_or(size);
        let refused = |reason| Err(TransferError::refused(&path, reason));
        if extensions.sparse {
            return refused(MemberRefusal::Sparse);
        }
        let kind = match header.kind() {
            // In very old archives a file with a trailing slash is a directory.
            b'0' | 0 if path.ends_with(b"/") => return refused(MemberRefusal::InvalidPath),
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
        self.begin_content(size);
        Ok(Member {
            path,
            mode,
            modified: header.modified(),
            kind,
        })
    }

    fn begin_content(&mut self, size: u64) {
        self.unread = size;
        self.padding = (BLOCK as u64 - size % BLOCK as u64) % BLOCK as u64;
    }

    fn skip_padding(&mut self) -> Result<(), TransferError> {
        if self.unread > 0 {
            return Err(TransferError::malformed(
                "the content of a member was not read",
            ));
        }
        let mut rest = [0; BLOCK];
        let length = usize::try_from(self.padding).unwrap_or_default();
        self.padding = 0;
        self.read_exact(rest.get_mut(..length).unwrap_or_default())
    }

    fn read_long_name(&mut self, size: u64) -> Result<Vec<u8>, TransferError> {
        // The size includes the NUL.
        let mut name = self.read_extension(size, MAX_PATH_BYTES as u64 + 1)?;
        if name.last() == Some(&0) {
            name.pop();
        }
        Ok(name)
    }

    fn read_extension(&mut self, size: u64, max_bytes: u64) -> Result<Vec<u8>, TransferError> {
        if size > max_bytes {
            return Err(TransferError::malformed("an extension header is too long"));
        }
        let mut bytes = vec![0; usize::try_from(size).unwrap_or_default()];
        self.read_exact(&mut bytes)?;
        self.begin_content(size);
        self.unread = 0;
        self.skip_padding()?;
        Ok(bytes)
    }

    fn read_header(&mut self) -> Result<Header, TransferError> {
        let mut block = [0; BLOCK];
        self.read_exact(&mut block)?;
        Ok(Header(block))
    }

    fn read_exact(&mut self, buffer: &mut [u8]) -> Result<(), TransferError> {
        self.archive
            .read_exact(buffer)
            .map_err(|error| match error.kind() {
                ErrorKind::UnexpectedEof => TransferError::malformed("the archive is truncated"),
                _ => unreadable(&error),
            })
    }

    /// Whether a second block of zeros follows the first.
    fn is_end_mark(&mut self) -> Result<bool, TransferError> {
        Ok(self.read_header()?.is_empty())
    }
}

impl MemberExtensions {
    fn is_empty(&self) -> bool {
        self.path.is_none() && self.link.is_none() && self.size.is_none() && !self.sparse
    }

    /// Parses `LENGTH KEY=VALUE\n` records. Owners, times and attributes are ignored, because they
    /// do not affect the path or type of a member.
    fn parse(&mut self, mut records: &[u8]) -> Result<(), TransferError> {
        let malformed = || TransferError::malformed("an extension header is broken");
        while !records.is_empty() {
            let space = records.iter().position(|&byte| byte == b' ');
            let length = space
                .and_then(|space| str::from_utf8(records.get(..space)?).ok()?.parse().ok())
                .filter(|&length: &usize| length <= records.len())
                .ok_or_else(malformed)?;
            let (record, rest) = records.split_at(length);
            let record = record
                .get(space.unwrap_or_default() + 1..)
                .and_then(|record| record.strip_suffix(b"\n"))
                .ok_or_else(malformed)?;
            let equal = record.iter().position(|&byte| byte == b'=');
            let (key, value) = record.split_at(equal.ok_or_else(malformed)?);
            let value = value.get(1..).unwrap_or_default();
            match key {
                b"path" => self.path = Some(value.to_vec()),
                b"linkpath" => self.link = Some(value.to_vec()),
                b"size" => {
                    let size = str::from_utf8(value).ok().and_then(|v| v.parse().ok());
                    self.size = Some(size.ok_or_else(malformed)?);
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
