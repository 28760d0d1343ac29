//! A push on its way into its spool: decoded, counted and read as it comes.

use std::io::{self, Write};

use flate2::write::GzDecoder;

use super::push::{Head, Malformed, Parsed, Parser};
use super::spool::{NoRoom, Spool};

/// How a body is coded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Coding {
    /// Not at all.
    Plain,
    /// RFC 1952.
    Gzip,
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
        };
        let way = match coding {
            Coding::Plain => Way::Plain(sink),
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
        let Sink { parser, spool, .. } = sink;
        let head = parser.head().cloned();
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

impl Write for Sink {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let refused = |stop: Stop| io::Error::other(stop);
        let more = u64::try_from(bytes.len()).unwrap_or(u64::MAX);
        if self.spool.len().saturating_add(more) > self.limit {
            return Err(refused(Stop::TooLarge { limit: self.limit }));
        }
        let parsed = self.parser.feed(bytes);
        parsed.map_err(|error| refused(error.into()))?;
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
    use flate2::Compression;
    use flate2::write::GzEncoder;

    use super::super::line;
    use super::super::spool::{Spools, Tank};
    use super::*;

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

    fn gzip(bytes: &[u8]) -> Vec<u8> {
        let mut encoder = GzEncoder::new(Vec::new(), Compression::fast());
        encoder.write_all(bytes).unwrap();
        encoder.finish().unwrap()
    }

    fn intake(coding: Coding, limit: u64) -> (tempfile::TempDir, Intake) {
        let dir = tempfile::tempdir().unwrap();
        let spool = Spools::new(dir.path()).open(&Tank::of_one()).unwrap();
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
