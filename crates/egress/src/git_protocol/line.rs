//! pkt-lines, one at a time, out of bytes that come in any pieces.

use gix_packetline::PacketLineRef;
use gix_packetline::decode::{self, Stream};

/// The longest data of one line (gitprotocol-common: 65520 bytes with its length).
pub const MOST_DATA: usize = 65_516;

/// One line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Line<'a> {
    /// Text or bytes, never empty.
    Data(&'a [u8]),
    /// `0000`.
    Flush,
    /// `0001` or `0002`, which only the second version of the protocol knows.
    Other,
}

/// Bytes that are no pkt-line.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a line has no proper length")]
pub struct BadLine;

/// The first line of `bytes` and how long it is with its length; none where more bytes are
/// needed.
pub fn first(bytes: &[u8]) -> Result<Option<(Line<'_>, usize)>, BadLine> {
    match decode::streaming(bytes).map_err(|_| BadLine)? {
        Stream::Incomplete { .. } => Ok(None),
        Stream::Complete {
            line,
            bytes_consumed,
        } => {
            let line = match line {
                PacketLineRef::Data(data) => Line::Data(data),
                PacketLineRef::Flush => Line::Flush,
                PacketLineRef::Delimiter | PacketLineRef::ResponseEnd => Line::Other,
            };
            Ok(Some((line, bytes_consumed)))
        }
    }
}

/// Writes `data` as one line. What does not fit into one is cut.
pub fn write(out: &mut Vec<u8>, data: &[u8]) {
    let data = data.get(..MOST_DATA).unwrap_or(data);
    out.extend_from_slice(format!("{:04x}", data.len() + 4).as_bytes());
    out.extend_from_slice(data);
}

/// Writes `0000`.
pub fn flush(out: &mut Vec<u8>) {
    out.extend_from_slice(b"0000");
}

/// `line` without one newline at its end.
pub fn chomp(line: &[u8]) -> &[u8] {
    line.strip_suffix(b"\n").unwrap_or(line)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_comes_out_whole_or_not_yet() {
        let mut bytes = Vec::new();
        write(&mut bytes, b"abc\n");
        flush(&mut bytes);
        for end in 0..8 {
            assert_eq!(first(&bytes[..end]), Ok(None));
        }
        assert_eq!(first(&bytes), Ok(Some((Line::Data(b"abc\n"), 8))));
        assert_eq!(first(&bytes[8..]), Ok(Some((Line::Flush, 4))));
        assert_eq!(first(b"0001"), Ok(Some((Line::Other, 4))));
        for bad in [&b"0003"[..], b"0004", b"zzzz", b"fff1", b"+00a"] {
            assert_eq!(first(bad), Err(BadLine));
        }
    }

    #[test]
    fn a_line_is_never_longer_than_git_takes() {
        let mut bytes = Vec::new();
        write(&mut bytes, &[b'x'; 70_000]);
        assert_eq!(bytes.len(), MOST_DATA + 4);
        assert!(matches!(first(&bytes), Ok(Some((Line::Data(_), 65_520)))));
    }
}
