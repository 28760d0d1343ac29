//! What the gate itself asks of upstream about a repository, in the second version of git's
//! protocol: where refs are, and the trees of some commits without their files.
//!
//! No I/O: requests are bytes that come out, answers are bytes that go in.

use std::collections::BTreeMap;

use policy::push::ObjectFormat;
use policy::refs::ObjectId;

use super::line::{self, Line};

/// What a question calls itself.
pub const REQUEST_TYPE: &str = "application/x-git-upload-pack-request";

/// What its answer calls itself.
pub const RESULT_TYPE: &str = "application/x-git-upload-pack-result";

/// An answer that is none.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BadAnswer {
    /// No pkt-line where one is due.
    #[error(transparent)]
    Line(#[from] line::BadLine),
    /// Upstream says why not.
    #[error("upstream refuses")]
    Refused,
    /// Something else than was asked for.
    #[error("upstream answers something else")]
    Unasked,
    /// The end came too early.
    #[error("the answer ends in the middle")]
    Cut,
}

fn command(name: &str, format: ObjectFormat) -> Vec<u8> {
    let mut out = Vec::new();
    line::write(&mut out, format!("command={name}\n").as_bytes());
    line::write(&mut out, b"agent=palisade\n");
    // A server that knows of one format only does not take the word.
    if format == ObjectFormat::Sha256 {
        line::write(&mut out, b"object-format=sha256\n");
    }
    out.extend_from_slice(b"0001");
    out
}

/// Asks where `HEAD` and these refs are.
pub fn refs<'a>(format: ObjectFormat, names: impl Iterator<Item = &'a [u8]>) -> Vec<u8> {
    let mut out = command("ls-refs", format);
    line::write(&mut out, b"ref-prefix HEAD\n");
    for name in names {
        line::write(&mut out, &[b"ref-prefix ", name, b"\n"].concat());
    }
    line::flush(&mut out);
    out
}

/// Where refs are, by name. Names that were not asked for may be among them: what is asked
/// for is how a name begins.
pub fn read_refs(answer: &[u8]) -> Result<BTreeMap<Vec<u8>, ObjectId>, BadAnswer> {
    let mut refs = BTreeMap::new();
    let mut rest = answer;
    loop {
        let (line, length) = line::first(rest)?.ok_or(BadAnswer::Cut)?;
        let data = match line {
            Line::Flush => return Ok(refs),
            Line::Other => return Err(BadAnswer::Unasked),
            Line::Data(data) => line::chomp(data),
        };
        if data.starts_with(b"ERR ") {
            return Err(BadAnswer::Refused);
        }
        let mut words = data.split(|byte| *byte == b' ');
        let (Some(id), Some(name)) = (words.next(), words.next()) else {
            return Err(BadAnswer::Unasked);
        };
        // A branch without a commit has no id: `unborn`.
        if let Ok(id) = ObjectId::parse(id) {
            refs.insert(name.to_vec(), id);
        }
        rest = rest.get(length..).unwrap_or_default();
    }
}

/// Asks for these commits and all their trees, without history and without files.
pub fn trees(format: ObjectFormat, wants: &[ObjectId]) -> Vec<u8> {
    let mut out = command("fetch", format);
    for word in ["no-progress", "ofs-delta", "filter blob:none", "deepen 1"] {
        line::write(&mut out, format!("{word}\n").as_bytes());
    }
    for want in wants {
        line::write(&mut out, format!("want {want}\n").as_bytes());
    }
    line::write(&mut out, b"done\n");
    line::flush(&mut out);
    out
}

/// Takes the pack out of the answer to [`trees`].
#[derive(Debug, Default)]
pub struct Unpacker {
    pending: Vec<u8>,
    state: State,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum State {
    #[default]
    Sections,
    Pack,
    Ended,
}

impl Unpacker {
    /// Takes the next bytes, and gives what is of the pack.
    pub fn feed(&mut self, bytes: &[u8]) -> Result<Vec<u8>, BadAnswer> {
        self.pending.extend_from_slice(bytes);
        let (mut at, mut pack) = (0, Vec::new());
        while let Some((line, length)) = line::first(self.pending.get(at..).unwrap_or_default())? {
            self.state = take(self.state, line, &mut pack)?;
            at += length;
        }
        self.pending.drain(..at);
        Ok(pack)
    }

    /// The end was reached.
    pub fn finish(&self) -> Result<(), BadAnswer> {
        if self.state == State::Ended {
            Ok(())
        } else {
            Err(BadAnswer::Cut)
        }
    }
}

fn take(state: State, line: Line<'_>, pack: &mut Vec<u8>) -> Result<State, BadAnswer> {
    match (state, line) {
        (State::Sections, Line::Data(data)) => match line::chomp(data) {
            b"packfile" => Ok(State::Pack),
            text if text.starts_with(b"ERR ") => Err(BadAnswer::Refused),
            // What is shallow now, which was asked for.
            _ => Ok(State::Sections),
        },
        (State::Sections, Line::Other) => Ok(State::Sections),
        (State::Sections, Line::Flush) => Err(BadAnswer::Unasked),
        (State::Pack, Line::Data([1, data @ ..])) => {
            pack.extend_from_slice(data);
            Ok(State::Pack)
        }
        (State::Pack, Line::Data([2, ..])) => Ok(State::Pack),
        (State::Pack, Line::Data([3, ..])) => Err(BadAnswer::Refused),
        (State::Pack, Line::Flush) => Ok(State::Ended),
        (State::Pack, Line::Data(_) | Line::Other) | (State::Ended, _) => Err(BadAnswer::Unasked),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const A: &str = "1111111111111111111111111111111111111111";
    const B: &str = "2222222222222222222222222222222222222222";

    fn lines(all: &[&[u8]]) -> Vec<u8> {
        let mut out = Vec::new();
        for data in all {
            match *data {
                b"" => line::flush(&mut out),
                b"0001" => out.extend_from_slice(b"0001"),
                data => line::write(&mut out, data),
            }
        }
        out
    }

    #[test]
    fn refs_are_asked_for_and_read() {
        let names: [&[u8]; 1] = [b"refs/heads/a"];
        let asked = refs(ObjectFormat::Sha256, names.into_iter());
        let text = String::from_utf8_lossy(&asked);
        assert!(text.starts_with("0014command=ls-refs\n"), "{text}");
        assert!(text.contains("object-format=sha256\n0001") && text.ends_with("a\n0000"));
        let short = refs(ObjectFormat::Sha1, std::iter::empty());
        assert!(!String::from_utf8_lossy(&short).contains("object-format"));

        let head = format!("{A} HEAD symref-target:refs/heads/main\n");
        let branch = format!("{B} refs/heads/a\n");
        let answer = lines(&[
            head.as_bytes(),
            branch.as_bytes(),
            b"unborn refs/heads/b\n",
            b"",
        ]);
        let read = read_refs(&answer).unwrap();
        assert_eq!(read.len(), 2);
        assert_eq!(read[&b"HEAD"[..]].to_string(), A);
        assert_eq!(read[&b"refs/heads/a"[..]].to_string(), B);
        for (answer, expected) in [
            (&answer[..20], BadAnswer::Cut),
            (b"", BadAnswer::Cut),
            (b"0001", BadAnswer::Unasked),
            (b"<html>", BadAnswer::Line(line::BadLine)),
            (&lines(&[b"ERR no\n"]), BadAnswer::Refused),
            (&lines(&[b"x\n"]), BadAnswer::Unasked),
        ] {
            assert_eq!(read_refs(answer), Err(expected));
        }
    }

    fn unpack(answer: &[u8], piece: usize) -> Result<Vec<u8>, BadAnswer> {
        let mut unpacker = Unpacker::default();
        let mut pack = Vec::new();
        for piece in answer.chunks(piece) {
            pack.extend(unpacker.feed(piece)?);
        }
        unpacker.finish()?;
        Ok(pack)
    }

    #[test]
    fn the_pack_is_taken_out_of_its_answer() {
        let want = ObjectId::parse(A.as_bytes()).unwrap();
        let asked = trees(ObjectFormat::Sha1, &[want]);
        let text = String::from_utf8_lossy(&asked);
        for part in [
            "filter blob:none\n",
            "deepen 1\n",
            &format!("want {A}\n"),
            "done\n0000",
        ] {
            assert!(text.contains(part), "{part} in {text}");
        }
        let shallow = format!("shallow {A}\n");
        let answer = lines(&[
            b"shallow-info\n",
            shallow.as_bytes(),
            b"0001",
            b"packfile\n",
            b"\x01PA",
            b"\x02working\n",
            b"\x01CK",
            b"",
        ]);
        assert_eq!(unpack(&answer, 5), Ok(b"PACK".to_vec()));
        assert_eq!(unpack(&answer[..answer.len() - 4], 5), Err(BadAnswer::Cut));
        assert_eq!(unpack(&lines(&[b"ERR no\n"]), 5), Err(BadAnswer::Refused));
        let failed = lines(&[b"packfile\n", b"\x03no\n", b""]);
        assert_eq!(unpack(&failed, 5), Err(BadAnswer::Refused));
        assert_eq!(unpack(&lines(&[b""]), 5), Err(BadAnswer::Unasked));
        let more = [answer.as_slice(), b"0000"].concat();
        assert_eq!(unpack(&more, 5), Err(BadAnswer::Unasked));
    }

    proptest! {
        #[test]
        fn any_answer_is_read_or_refused(
            bytes in proptest::collection::vec(any::<u8>(), 0..100), piece in 1..20usize,
        ) {
            let _refs = read_refs(&bytes);
            prop_assert_eq!(unpack(&bytes, piece), unpack(&bytes, 200));
        }
    }
}
