//! The 512-byte header of each member (POSIX ustar and GNU).

use super::TransferError;

/// The size of a header and of the blocks of content.
pub(super) const BLOCK: usize = 512;

/// A header in its archive format.
pub(super) struct Header(pub(super) [u8; BLOCK]);

// The byte ranges of the fields.
const NAME: (usize, usize) = (0, 100);
const MODE: (usize, usize) = (100, 108);
const UID: (usize, usize) = (108, 116);
const GID: (usize, usize) = (116, 124);
const SIZE: (usize, usize) = (124, 136);
const MODIFIED: (usize, usize) = (136, 148);
const SUM: (usize, usize) = (148, 156);
const KIND_OFFSET: usize = 156;
const LINK: (usize, usize) = (157, 257);
const MAGIC: (usize, usize) = (257, 265);
const PREFIX: (usize, usize) = (345, 500);

const GNU_MAGIC: &[u8] = b"ustar  \0";
const POSIX_MAGIC: &[u8] = b"ustar\x0000";

/// Maximum length of a name or link without a header of its own.
pub(super) const MAX_SHORT_NAME_BYTES: usize = 100;

impl Header {
    /// Creates a header. Long names are truncated; the writer writes an extension header with the
    /// whole name first.
    pub(super) fn new(kind: u8, name: &[u8], link: &[u8]) -> Self {
        let mut header = Self([0; BLOCK]);
        header.put(NAME, name);
        header.put(LINK, link);
        header.put(MAGIC, GNU_MAGIC);
        header.put_number(UID, 0);
        header.put_number(GID, 0);
        if let Some(place) = header.0.get_mut(KIND_OFFSET) {
            *place = kind;
        }
        header
    }

    /// Sets mode, size and time, and the checksum.
    pub(super) fn complete(mut self, mode: u32, size: u64, modified: u64) -> Self {
        self.put_number(MODE, u64::from(mode));
        self.put_number(SIZE, size);
        self.put_number(MODIFIED, modified);
        let checksum = format!("{:06o}\0 ", self.checksum());
        self.put(SUM, checksum.as_bytes());
        self
    }

    pub(super) fn is_empty(&self) -> bool {
        self.0.iter().all(|&byte| byte == 0)
    }

    /// Checks the checksum and the format.
    pub(super) fn check(&self) -> Result<(), TransferError> {
        if parse_number(self.field(SUM)) != Some(self.checksum()) {
            return Err(TransferError::malformed("a checksum is wrong"));
        }
        if self.field(MAGIC) != GNU_MAGIC && self.field(MAGIC) != POSIX_MAGIC {
            return Err(TransferError::malformed("the data is no ustar archive"));
        }
        Ok(())
    }

    pub(super) fn kind(&self) -> u8 {
        self.0.get(KIND_OFFSET).copied().unwrap_or_default()
    }

    pub(super) fn path(&self) -> Vec<u8> {
        let name = until_nul(self.field(NAME));
        match until_nul(self.field(PREFIX)) {
            // GNU stores times in this field.
            prefix if self.field(MAGIC) == POSIX_MAGIC && !prefix.is_empty() => {
                [prefix, b"/", name].concat()
            }
            _ => name.to_vec(),
        }
    }

    pub(super) fn link(&self) -> Vec<u8> {
        until_nul(self.field(LINK)).to_vec()
    }

    pub(super) fn mode(&self) -> Option<u32> {
        parse_number(self.field(MODE)).and_then(|mode| u32::try_from(mode).ok())
    }

    pub(super) fn size(&self) -> Option<u64> {
        parse_number(self.field(SIZE))
    }

    /// Seconds since 1970; 0 if the field cannot be parsed.
    pub(super) fn modified(&self) -> u64 {
        parse_number(self.field(MODIFIED)).unwrap_or_default()
    }

    fn field(&self, (from, to): (usize, usize)) -> &[u8] {
        self.0.get(from..to).unwrap_or_default()
    }

    fn put(&mut self, (from, to): (usize, usize), bytes: &[u8]) {
        for (place, byte) in self.0.iter_mut().take(to).skip(from).zip(bytes) {
            *place = *byte;
        }
    }

    fn put_number(&mut self, (from, to): (usize, usize), value: u64) {
        let digits = to - from - 1;
        let octal = format!("{value:0digits$o}");
        if octal.len() <= digits {
            self.put((from, to), octal.as_bytes());
        } else {
            // Base 256, as GNU tar and its successors write it.
            let mut bytes = vec![0; to - from - 8];
            bytes.extend(value.to_be_bytes());
            if let Some(first) = bytes.first_mut() {
                *first = 0x80;
            }
            self.put((from, to), &bytes);
        }
    }

    /// The sum of all bytes, with the checksum field counted as spaces.
    fn checksum(&self) -> u64 {
        let all: u64 = self.0.iter().map(|&byte| u64::from(byte)).sum();
        let own: u64 = self.field(SUM).iter().map(|&byte| u64::from(byte)).sum();
        all - own + 8 * u64::from(b' ')
    }
}

/// Returns the bytes up to the first NUL.
fn until_nul(field: &[u8]) -> &[u8] {
    field.split(|&byte| byte == 0).next().unwrap_or_default()
}

/// Parses octal digits, or base 256 after a high bit.
fn parse_number(field: &[u8]) -> Option<u64> {
    if let Some((0x80, bytes)) = field.split_first() {
        return bytes.iter().try_fold(0_u64, |value, &byte| {
            Some(value.checked_mul(256)? + u64::from(byte))
        });
    }
    let text = str::from_utf8(field).ok()?;
    let digits = text.trim_end_matches(['\0', ' ']).trim_start_matches(' ');
    if digits.is_empty() {
        return Some(0);
    }
    digits.bytes().try_fold(0_u64, |value, byte| match byte {
        b'0'..=b'7' => value.checked_mul(8)?.checked_add(u64::from(byte - b'0')),
        _ => None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_parse_as_octal_or_base_256_only() {
        for (field, wanted) in [
            (&b"0000644\0"[..], Some(0o644)),
            (b"   644 \0", Some(0o644)),
            (b"\0\0\0\0\0\0\0\0", Some(0)),
            (b"\x80\0\0\0\0\0\x01\0", Some(256)),
            (b"\x81\0\0\0\0\0\0\0\0\0\0\0", None),
            (b"\xff\xff\xff\xff\xff\xff\xff\xff", None),
            (b"-1\0\0\0\0\0\0", None),
            (b"12 34\0\0\0", None),
            (b"0x1\0\0\0\0\0", None),
        ] {
            assert_eq!(parse_number(field), wanted, "{field:?}");
        }
    }

    #[test]
    fn size_beyond_octal_is_written_in_base_256() {
        for size in [0, 1, (8 << 30) - 1, 8 << 30, u64::MAX] {
            let header = Header::new(b'0', b"x", b"").complete(0o644, size, 7);
            header.check().unwrap();
            assert_eq!((header.size(), header.modified()), (Some(size), 7));
        }
    }
}
