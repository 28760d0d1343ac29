//! A push on its way into its spool: decoded, counted and read as it comes.

use std::io::{self, Write};

use flate2::write::GzDecoder;

use super::pack_end::{BadPack, PackEnd};
use super::push::{Head, Malformed, Parsed, Parser};
use crate::spool::{NoRoom, Spool};

/// How a body is coded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Coding {
    /// Not at all.
    Plain,
    /// RFC 1952.
    Gzip,
    /// Not at all, and nobody says where it ends: the pack itself has to.
    Endless,
}

/// Why no more is taken in.
#[derive(Debug, thiserror::Error)]
pub enum Stop {
    /// More than a push may have.
    #[error("the push is larger than {limit} bytes")]
    TooLarge {
        /// The limit.
        limit: u64,
    },
    /// It cannot be read.
    #[error(transparent)]
    Malformed(#[from] Malformed),
    /// The end of its pack cannot be found.
    #[error("the pack cannot be read: {0}")]
    Pack(#[from] BadPack),
    /// It is no gzip, or more than one.
    #[error("the push is not compressed as it says")]
    Coding,
    /// Too much is waiting already.
    #[error(transparent)]
    NoRoom(#[from] NoRoom),
    /// The spool failed.
    #[error("the push cannot be kept: {0}")]
    Spool(io::Error),
}

/// Takes a push in. What counts is what comes out of the coding.
#[derive(Debug)]
pub struct Intake {
    way: Way,
}

#[derive(Debug)]
enum Way {
    Plain(Sink),
    Gzip(GzDecoder<Sink>),
}

/// Where decoded bytes go.
#[derive(Debug)]
struct Sink {
    parser: Parser,
    spool: Spool,
    limit: u64,
    /// Looks for the end of the pack, where nobody else says it.
    end: End,
}

/// How it is known that a push is all there.
#[derive(Debug)]
enum End {
    /// Whoever brings it says so.
    Told,
    /// Its pack is read; none before it begins.
    Sought(Option<Box<PackEnd>>),
}

/// A push that is all there.
#[derive(Debug)]
pub struct Taken {
    /// What it is.
    pub parsed: Parsed,
    /// All of its bytes.
    pub spool: Spool,
}

impl Intake {
    /// Takes at most `limit` bytes.
    pub fn new(spool: Spool, coding: Coding, limit: u64) -> Self {
        let sink = Sink {
            parser: Parser::default(),
            spool,
            limit,
            end: match coding {
                Coding::Plain | Coding::Gzip => End::Told,
                Coding::Endless => End::Sought(None),
            },
        };
        let way = match coding {
            Coding::Plain | Coding::Endless => Way::Plain(sink),
            Coding::Gzip => Way::Gzip(GzDecoder::new(sink)),
        };
        Self { way }
    }

    /// Takes the next bytes. Blocks.
    pub fn take(&mut self, bytes: &[u8]) -> Result<(), Stop> {
        match &mut self.way {
            Way::Plain(sink) => sink.write_all(bytes),
            // It stops where the first member ends: what follows cannot be written.
            Way::Gzip(decoder) => decoder.write_all(bytes),
        }
        .map_err(stop)
    }

    /// What came before the pack, as soon as it was read.
    pub fn head(&self) -> Option<&Head> {
        self.sink().parser.head()
    }

    /// Whether it says itself that nothing follows.
    pub fn is_complete(&self) -> bool {
        self.sink().is_complete()
    }

    /// Passes over the next bytes of a push that is not kept any more, to find its end. Says
    /// whether there is more to come.
    pub fn pass_over(&mut self, bytes: &[u8]) -> bool {
        match &mut self.way {
            Way::Plain(sink) => match &mut sink.end {
                End::Told => true,
                End::Sought(Some(pack)) => pack.feed(bytes).is_ok() && !pack.is_done(),
                End::Sought(None) => false,
            },
            Way::Gzip(_) => true,
        }
    }

    /// How many decoded bytes there were so far.
    pub fn taken(&self) -> u64 {
        self.sink().spool.len()
    }

    /// The end was reached. Blocks.
    pub fn finish(self) -> Result<Taken, (Option<Head>, Stop)> {
        let sink = match self.way {
            Way::Plain(sink) => sink,
            Way::Gzip(mut decoder) => {
                if let Err(error) = decoder.try_finish() {
                    return Err((decoder.get_ref().parser.head().cloned(), stop(error)));
                }
                decoder.finish().map_err(|error| (None, stop(error)))?
            }
        };
        let is_cut = matches!(sink.end, End::Sought(_)) && !sink.is_complete();
        let Sink { parser, spool, .. } = sink;
        let head = parser.head().cloned();
        if is_cut {
            return Err((head, Malformed::Cut.into()));
        }
        match parser.finish(spool.len()) {
            Ok(parsed) => Ok(Taken { parsed, spool }),
            Err(error) => Err((head, error.into())),
        }
    }

    fn sink(&self) -> &Sink {
        match &self.way {
            Way::Plain(sink) => sink,
            Way::Gzip(decoder) => decoder.get_ref(),
        }
    }
}

/// What a writer can say is an error of I/O, whatever it means.
fn stop(error: io::Error) -> Stop {
    match error.downcast::<Stop>() {
        Ok(stop) => stop,
        Err(error) => match error.kind() {
            io::ErrorKind::InvalidInput
            | io::ErrorKind::InvalidData
            | io::ErrorKind::UnexpectedEof
            | io::ErrorKind::WriteZero => Stop::Coding,
            _ => Stop::Spool(error),
        },
    }
}

impl Sink {
    fn is_complete(&self) -> bool {
        match &self.end {
            End::Told => false,
            End::Sought(Some(pack)) => pack.is_done(),
            End::Sought(None) => self.parser.is_complete(),
        }
    }

    /// Reads what of `bytes` belongs to the pack. They are not in the spool yet.
    fn seek_end(&mut self, bytes: &[u8]) -> Result<(), Stop> {
        let (End::Sought(end), Some((at, format))) = (&mut self.end, self.parser.pack()) else {
            return Ok(());
        };
        let before = usize::try_from(at.saturating_sub(self.spool.len())).unwrap_or(usize::MAX);
        let pack = end.get_or_insert_with(|| Box::new(PackEnd::new(format)));
        Ok(pack.feed(bytes.get(before..).unwrap_or_default())?)
    }
}

impl Write for Sink {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let refused = |stop: Stop| io::Error::other(stop);
        let parsed = self.parser.feed(bytes);
        parsed.map_err(|error| refused(error.into()))?;
        // Also of what is too large, the end is looked for.
        self.seek_end(bytes).map_err(refused)?;
        let more = u64::try_from(bytes.len()).unwrap_or(u64::MAX);
        if self.spool.len().saturating_add(more) > self.limit {
            return Err(refused(Stop::TooLarge { limit: self.limit }));
        }
        self.spool.append(bytes).map_err(|error| {
            refused(match error.downcast::<NoRoom>() {
                Ok(full) => full.into(),
                Err(error) => Stop::Spool(error),
            })
        })?;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use aws_lc_rs::digest::{SHA1_FOR_LEGACY_USE_ONLY, digest};
    use flate2::Compression;
    use flate2::write::GzEncoder;

    use super::super::line;
    use super::*;
    use crate::spool::{SpoolQuota, Spools};

    fn body(pack: usize) -> Vec<u8> {
        let (zero, new) = ("0".repeat(40), "1".repeat(40));
        let mut bytes = Vec::new();
        let command = format!("{zero} {new} refs/heads/a\0report-status side-band-64k");
        line::write(&mut bytes, command.as_bytes());
        line::flush(&mut bytes);
        bytes.extend_from_slice(b"PACK\0\0\0\x02");
        bytes.extend(std::iter::repeat_n(0, pack));
        bytes
    }

    /// A pack without objects.
    fn sealed_pack() -> Vec<u8> {
        let head = b"PACK\0\0\0\x02\0\0\0\0";
        let sum = digest(&SHA1_FOR_LEGACY_USE_ONLY, head);
        [head, sum.as_ref()].concat()
    }

    fn gzip(bytes: &[u8]) -> Vec<u8> {
        let mut encoder = GzEncoder::new(Vec::new(), Compression::fast());
        encoder.write_all(bytes).unwrap();
        encoder.finish().unwrap()
    }

    fn intake(coding: Coding, limit: u64) -> (tempfile::TempDir, Intake) {
        let dir = tempfile::tempdir().unwrap();
        let spool = Spools::new(dir.path()).open(&SpoolQuota::of_one()).unwrap();
        (dir, Intake::new(spool, coding, limit))
    }

    fn take(coding: Coding, bytes: &[u8], limit: u64, piece: usize) -> Result<Taken, Stop> {
        let (_dir, mut intake) = intake(coding, limit);
        for piece in bytes.chunks(piece) {
            intake.take(piece)?;
        }
        intake.finish().map_err(|(_, stop)| stop)
    }

    #[test]
    fn plain_or_compressed_the_same_is_taken_in() {
        let plain = body(5_000);
        for (coding, bytes) in [(Coding::Plain, plain.clone()), (Coding::Gzip, gzip(&plain))] {
            for piece in [1, 13, 100_000] {
                let taken = take(coding, &bytes, 1 << 20, piece).unwrap();
                assert_eq!(taken.spool.len(), plain.len() as u64);
                assert!(matches!(taken.parsed, Parsed::Push(_)));
            }
        }
    }

    #[test]
    fn the_limit_is_exact_and_counts_what_comes_out() {
        let plain = body(5_000);
        let length = plain.len() as u64;
        for (coding, bytes) in [(Coding::Plain, plain.clone()), (Coding::Gzip, gzip(&plain))] {
            assert!(take(coding, &bytes, length, 100).is_ok());
            let stopped = take(coding, &bytes, length - 1, 100);
            assert!(matches!(stopped, Err(Stop::TooLarge { .. })), "{stopped:?}");
        }
    }

    #[test]
    fn without_an_end_of_its_own_a_push_ends_with_its_pack() {
        let empty = sealed_pack();
        let whole = [body(0).get(..body(0).len() - 8).unwrap(), &empty].concat();
        for piece in [1, 13, 100_000] {
            let (_dir, mut intake) = intake(Coding::Endless, 1 << 20);
            for piece in whole.chunks(piece) {
                assert!(!intake.is_complete());
                intake.take(piece).unwrap();
            }
            assert!(intake.is_complete());
            let taken = intake.finish().unwrap();
            assert_eq!(taken.spool.len(), whole.len() as u64);
        }
        let more = [whole.as_slice(), b"0000"].concat();
        let stopped = take(Coding::Endless, &more, 1 << 20, 1 << 20);
        assert!(matches!(stopped, Err(Stop::Pack(BadPack::Trailing))));
        let cut = &whole[..whole.len() - 1];
        let stopped = take(Coding::Endless, cut, 1 << 20, 50);
        assert!(matches!(stopped, Err(Stop::Malformed(Malformed::Cut))));
    }

    #[test]
    fn without_a_pack_a_push_ends_with_its_commands() {
        let (zero, old) = ("0".repeat(40), "1".repeat(40));
        let mut deletion = Vec::new();
        let command = format!("{old} {zero} refs/heads/a\0report-status");
        line::write(&mut deletion, command.as_bytes());
        line::flush(&mut deletion);
        for (bytes, is_probe) in [(deletion, false), (b"0000".to_vec(), true)] {
            let (_dir, mut intake) = intake(Coding::Endless, 1 << 20);
            intake.take(&bytes).unwrap();
            assert!(intake.is_complete());
            let taken = intake.finish().unwrap();
            assert_eq!(matches!(taken.parsed, Parsed::Probe), is_probe);
        }
    }

    #[test]
    fn the_end_is_found_also_of_what_is_too_large() {
        let whole = [body(0).get(..body(0).len() - 8).unwrap(), &sealed_pack()].concat();
        let (_dir, mut intake) = intake(Coding::Endless, whole.len() as u64 - 5);
        let (most, last) = whole.split_at(whole.len() - 8);
        intake.take(most).unwrap();
        let (first, last) = last.split_at(4);
        let stopped = intake.take(first);
        assert!(matches!(stopped, Err(Stop::TooLarge { .. })), "{stopped:?}");
        assert!(!intake.pass_over(last), "that was the end");
        assert!(intake.is_complete());
    }

    #[test]
    fn a_bomb_stops_at_the_limit_with_what_was_read() {
        let bomb = gzip(&body(64 << 20));
        let (_dir, mut intake) = intake(Coding::Gzip, 1 << 20);
        let stopped = intake.take(&bomb);
        assert!(matches!(stopped, Err(Stop::TooLarge { .. })), "{stopped:?}");
        assert!(intake.taken() <= 1 << 20);
        assert_eq!(intake.head().unwrap().updates.len(), 1);
    }

    #[test]
    fn what_is_no_gzip_or_more_than_one_is_refused() {
        let whole = gzip(&body(100));
        let cut = &whole[..whole.len() - 3];
        let twice = [whole.as_slice(), &whole].concat();
        let trailing = [whole.as_slice(), b"x"].concat();
        for bad in [cut, &twice, &trailing, &body(100), b"\x1f\x8b", b""] {
            for piece in [7, 100_000] {
                let stopped = take(Coding::Gzip, bad, 1 << 20, piece);
                assert!(
                    matches!(stopped, Err(Stop::Coding | Stop::Malformed(_))),
                    "{stopped:?}"
                );
            }
        }
    }
}
