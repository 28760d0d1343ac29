//! Adds the capability `no-thin` to upstream's receive-pack ref advertisement.
//!
//! A thin pack omits objects that upstream already has. The pack reader does not have these
//! objects, so the gate makes clients send complete packs.

use super::pkt_line::{self, PktLine};

/// Content type of a receive-pack advertisement.
pub const CONTENT_TYPE: &str = "application/x-git-receive-pack-advertisement";

/// Maximum number of lines up to the first ref: service, flush, version, ref.
const MAX_LINES: usize = 4;

/// Adds the capability to a stream of advertisement bytes.
#[derive(Debug, Default)]
pub struct AdvertisementRewriter {
    pending: Vec<u8>,
    lines: usize,
    done: bool,
}

impl AdvertisementRewriter {
    /// Takes the next bytes. Returns the bytes that may be forwarded.
    pub fn feed(&mut self, bytes: &[u8]) -> Vec<u8> {
        self.pending.extend_from_slice(bytes);
        let mut out = Vec::with_capacity(self.pending.len() + 8);
        while !self.done {
            let (length, rewritten) = match pkt_line::first(&self.pending) {
                Ok(None) => return out,
                Ok(Some((PktLine::Data(data), length))) => (length, with_no_thin(data)),
                Ok(Some((PktLine::Flush, length))) => (length, None),
                Ok(Some((PktLine::Other, _))) | Err(_) => {
                    self.done = true;
                    break;
                }
            };
            let taken: Vec<u8> = self.pending.drain(..length).collect();
            self.lines += 1;
            self.done = rewritten.is_some() || self.lines >= MAX_LINES;
            match rewritten {
                Some(data) => pkt_line::write(&mut out, &data),
                None => out.extend(taken),
            }
        }
        out.append(&mut self.pending);
        out
    }

    /// Returns the remaining bytes at the end of the stream.
    pub fn finish(&mut self) -> Vec<u8> {
        self.done = true;
        std::mem::take(&mut self.pending)
    }
}

/// The line of the first ref with `no-thin`; none if the line has no capabilities.
fn with_no_thin(data: &[u8]) -> Option<Vec<u8>> {
    let at = data.iter().position(|byte| *byte == 0)?;
    let text = pkt_line::chomp(data);
    let capabilities = text.get(at + 1..)?;
    let mut words = capabilities.split(|byte| *byte == b' ');
    let is_present = words.any(|word| word == b"no-thin");
    let addition: &[u8] = if is_present { b"" } else { b" no-thin" };
    let end = data.get(text.len()..)?;
    let whole = [text, addition, end].concat();
    Some(if whole.len() > pkt_line::MAX_DATA {
        data.to_vec()
    } else {
        whole
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn advertisement(lines: &[&str]) -> Vec<u8> {
        let mut bytes = Vec::new();
        pkt_line::write(&mut bytes, b"# service=git-receive-pack\n");
        pkt_line::flush(&mut bytes);
        for text in lines {
            pkt_line::write(&mut bytes, text.as_bytes());
        }
        pkt_line::flush(&mut bytes);
        bytes
    }

    fn rewrite(bytes: &[u8], piece: usize) -> Vec<u8> {
        let mut rewriter = AdvertisementRewriter::default();
        let mut out = Vec::new();
        for piece in bytes.chunks(piece) {
            out.extend(rewriter.feed(piece));
        }
        out.extend(rewriter.finish());
        out
    }

    #[test]
    fn no_thin_is_added_to_the_first_ref_only() {
        let caps = |more| format!("11 refs/heads/main\0report-status ofs-delta{more}\n");
        for version in [&[][..], &["version 1\n"]] {
            let lines = |first: &str| {
                let all = [version, &[first, "22 refs/heads/two\n"]].concat();
                advertisement(&all)
            };
            let before = lines(&caps(""));
            assert_eq!(rewrite(&before, 4096), lines(&caps(" no-thin")));
            let has = lines(&caps(" no-thin"));
            assert_eq!(rewrite(&has, 4096), has);
        }
        let none = advertisement(&["00 capabilities^{}\0delete-refs"]);
        let gained = advertisement(&["00 capabilities^{}\0delete-refs no-thin"]);
        assert_eq!(rewrite(&none, 4096), gained);
    }

    #[test]
    fn bytes_that_are_no_advertisement_pass_unchanged() {
        for bytes in [
            &b"<html>"[..],
            b"",
            b"00",
            b"0001",
            b"0000000000000000000000",
        ] {
            assert_eq!(rewrite(bytes, 3), bytes);
        }
        let long = format!(
            "11 refs/heads/main\0{}",
            "x".repeat(pkt_line::MAX_DATA - 19)
        );
        let full = advertisement(&[&long]);
        assert_eq!(rewrite(&full, 4096), full);
    }

    proptest! {
        #[test]
        fn result_does_not_depend_on_chunk_boundaries(
            bytes in prop_oneof![
                Just(advertisement(&["11 refs/heads/main\0a b\n", "22 refs/heads/two\n"])),
                proptest::collection::vec(any::<u8>(), 0..80),
            ],
            piece in 1..40usize,
        ) {
            prop_assert_eq!(rewrite(&bytes, piece), rewrite(&bytes, 4096));
        }
    }
}
