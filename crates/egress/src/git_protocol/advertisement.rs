//! What upstream tells a client that wants to push, with one word more: `no-thin`.
//!
//! A thin pack leaves out objects that upstream has. Whoever reads it has to have them, too,
//! and the gate has not: so it asks for packs that hold all they speak of.

use super::line::{self, Line};

/// What upstream calls it.
pub const CONTENT_TYPE: &str = "application/x-git-receive-pack-advertisement";

/// How many lines may come before the first ref: the service, a flush, a version.
const MOST_LINES: usize = 4;

/// Adds the word as the bytes pass.
#[derive(Debug, Default)]
pub struct Rewriter {
    pending: Vec<u8>,
    lines: usize,
    done: bool,
}

impl Rewriter {
    /// Takes the next bytes, and gives what may be passed on.
    pub fn feed(&mut self, bytes: &[u8]) -> Vec<u8> {
        self.pending.extend_from_slice(bytes);
        let mut out = Vec::with_capacity(self.pending.len() + 8);
        while !self.done {
            let (length, rewritten) = match line::first(&self.pending) {
                Ok(None) => return out,
                Ok(Some((Line::Data(data), length))) => (length, with_word(data)),
                Ok(Some((Line::Flush, length))) => (length, None),
                Ok(Some((Line::Other, _))) | Err(_) => {
                    self.done = true;
                    break;
                }
            };
            let taken: Vec<u8> = self.pending.drain(..length).collect();
            self.lines += 1;
            self.done = rewritten.is_some() || self.lines >= MOST_LINES;
            match rewritten {
                Some(data) => line::write(&mut out, &data),
                None => out.extend(taken),
            }
        }
        out.append(&mut self.pending);
        out
    }

    /// What is left at the end.
    pub fn finish(&mut self) -> Vec<u8> {
        self.done = true;
        std::mem::take(&mut self.pending)
    }
}

/// The line of the first ref with the word; none where the line has no capabilities.
fn with_word(data: &[u8]) -> Option<Vec<u8>> {
    let at = data.iter().position(|byte| *byte == 0)?;
    let text = line::chomp(data);
    let capabilities = text.get(at + 1..)?;
    let mut words = capabilities.split(|byte| *byte == b' ');
    let known = words.any(|word| word == b"no-thin");
    let word: &[u8] = if known { b"" } else { b" no-thin" };
    let end = data.get(text.len()..)?;
    let whole = [text, word, end].concat();
    Some(if whole.len() > line::MOST_DATA {
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
        line::write(&mut bytes, b"# service=git-receive-pack\n");
        line::flush(&mut bytes);
        for text in lines {
            line::write(&mut bytes, text.as_bytes());
        }
        line::flush(&mut bytes);
        bytes
    }

    fn rewrite(bytes: &[u8], piece: usize) -> Vec<u8> {
        let mut rewriter = Rewriter::default();
        let mut out = Vec::new();
        for piece in bytes.chunks(piece) {
            out.extend(rewriter.feed(piece));
        }
        out.extend(rewriter.finish());
        out
    }

    #[test]
    fn the_first_ref_gains_a_word_and_the_rest_stays() {
        let caps = |word| format!("11 refs/heads/main\0report-status ofs-delta{word}\n");
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
    fn what_is_no_advertisement_passes_as_it_is() {
        for bytes in [
            &b"<html>"[..],
            b"",
            b"00",
            b"0001",
            b"0000000000000000000000",
        ] {
            assert_eq!(rewrite(bytes, 3), bytes);
        }
        let long = format!("11 refs/heads/main\0{}", "x".repeat(line::MOST_DATA - 19));
        let full = advertisement(&[&long]);
        assert_eq!(rewrite(&full, 4096), full);
    }

    proptest! {
        #[test]
        fn any_split_gives_the_same(
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
