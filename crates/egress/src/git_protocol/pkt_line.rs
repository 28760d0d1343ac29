//! Reads and writes pkt-lines, git's framing of protocol messages.

use gix_packetline::PacketLineRef;
use gix_packetline::decode::{self, Stream};

/// Maximum number of data bytes in a pkt-line (gitprotocol-common: 65520 bytes with the length).
pub const MAX_DATA: usize = 65_516;

/// One pkt-line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PktLine<'a> {
    /// Text or bytes, never empty.
    Data(&'a [u8]),
    /// The flush packet, `0000`.
    Flush,
    /// The delimiter `0001` or the response end `0002`, which only protocol version 2 has.
    Other,
}

/// The bytes are no pkt-line.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a pkt-line has an invalid length")]
pub struct PktLineError;

/// Parses the first pkt-line of `bytes`. Returns the line and the number of bytes it takes, or none
/// if it is incomplete.
pub fn first(bytes: &[u8]) -> Result<Option<(PktLine<'_>, usize)>, PktLineError> {
    match decode::streaming(bytes).map_err(|_| PktLineError)? {
        Stream::Incomplete { .. } => Ok(None),
        Stream::Complete {
            line,
            bytes_consumed,
        } => {
            let line = match line {
                PacketLineRef::Data(data) => PktLine::Data(data),
                PacketLineRef::Flush => PktLine::Flush,
                PacketLineRef::Delimiter | PacketLineRef::ResponseEnd => PktLine::Other,
            };
            Ok(Some((line, bytes_consumed)))
        }
    }
}

/// Writes `data` as one pkt-line. Data beyond [`MAX_DATA`] is cut off.
pub fn write(out: &mut Vec<u8>, data: &[u8]) {
    let data = data.get(..MAX_DATA).unwrap_or(data);
    out.extend_from_slice(format!("{:04x}", data.len() + 4).as_bytes());
    out.extend_from_slice(data);
}

/// Writes a flush packet.
pub fn flush(out: &mut Vec<u8>) {
    out.extend_from_slice(b"0000");
}

/// Removes one newline at the end of `line`.
pub fn chomp(line: &[u8]) -> &[u8] {
    line.strip_suffix(b"\n").unwrap_or(line)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn incomplete_line_is_not_returned() {
        let mut bytes = Vec::new();
        write(&mut bytes, b"abc\n");
        flush(&mut bytes);
        for end in 0..8 {
            assert_eq!(first(&bytes[..end]), Ok(None));
        }
        assert_eq!(first(&bytes), Ok(Some((PktLine::Data(b"abc\n"), 8))));
        assert_eq!(first(&bytes[8..]), Ok(Some((PktLine::Flush, 4))));
        assert_eq!(first(b"0001"), Ok(Some((PktLine::Other, 4))));
        for bad in [&b"0003"[..], b"0004", b"zzzz", b"fff1", b"+00a"] {
            assert_eq!(first(bad), Err(PktLineError));
        }
    }

    #[test]
    fn written_line_is_limited_to_the_maximum() {
        let mut bytes = Vec::new();
        write(&mut bytes, &[b'x'; 70_000]);
        assert_eq!(bytes.len(), MAX_DATA + 4);
        assert!(matches!(
            first(&bytes),
            Ok(Some((PktLine::Data(_), 65_520)))
        ));
    }
}
