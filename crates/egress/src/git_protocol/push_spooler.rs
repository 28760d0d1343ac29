//! Writes a push to a spool while it is received: decodes it, enforces the size limit and parses
//! the part before the pack.

use std::io::{self, Write};

use flate2::write::GzDecoder;

use super::pack_end::{PackEndError, PackEndFinder};
use super::push::{ParsedPush, PushHead, PushParseError, PushParser};
use crate::spool::{Spool, SpoolFull};

/// Encoding of a push body.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PushEncoding {
    /// No compression.
    Plain,
    /// Gzip (RFC 1952).
    Gzip,
    /// No compression and no end of body, as over `git://`: the pack shows where the push ends.
    UntilPackEnd,
}

/// Why a push could not be spooled.
#[derive(Debug, thiserror::Error)]
pub enum PushSpoolError {
    /// The push exceeds the size limit.
    #[error("the push is larger than {limit} bytes")]
    TooLarge {
        /// Limit in bytes.
        limit: u64,
    },
    /// The part before the pack cannot be parsed.
    #[error(transparent)]
    Malformed(#[from] PushParseError),
    /// The end of the pack cannot be found.
    #[error("the pack cannot be read: {0}")]
    Pack(#[from] PackEndError),
    /// The body is no gzip stream, or more than one.
    #[error("the push is not valid gzip")]
    Encoding,
    /// The spool quota is used up.
    #[error(transparent)]
    QuotaExceeded(#[from] SpoolFull),
    /// Writing to the spool failed.
    #[error("writing the push to the spool failed: {0}")]
    Spool(io::Error),
}

/// Writes a push to a spool. The size limit applies to decoded bytes.
#[derive(Debug)]
pub struct PushSpooler {
    decoder: Decoder,
}

#[derive(Debug)]
enum Decoder {
    Plain(Sink),
    Gzip(GzDecoder<Sink>),
}

/// Receives the decoded bytes.
#[derive(Debug)]
struct Sink {
    parser: PushParser,
    spool: Spool,
    limit: u64,
    /// How the end of the push is detected.
    end: EndDetection,
}

/// How the end of a push is detected.
#[derive(Debug)]
enum EndDetection {
    /// The push ends with the request body.
    EndOfBody,
    /// The push ends with the pack; none before the pack begins.
    EndOfPack(Option<Box<PackEndFinder>>),
}

/// A completely spooled push.
#[derive(Debug)]
pub struct SpooledPush {
    /// The parsed push.
    pub parsed: ParsedPush,
    /// All bytes of the push.
    pub spool: Spool,
}

impl PushSpooler {
    /// Accepts at most `limit` decoded bytes.
    pub fn new(spool: Spool, encoding: PushEncoding, limit: u64) -> Self {
        let sink = Sink {
            parser: PushParser::default(),
            spool,
            limit,
            end: match encoding {
                PushEncoding::Plain | PushEncoding::Gzip => EndDetection::EndOfBody,
                PushEncoding::UntilPackEnd => EndDetection::EndOfPack(None),
            },
        };
        let decoder = match encoding {
            PushEncoding::Plain | PushEncoding::UntilPackEnd => Decoder::Plain(sink),
            PushEncoding::Gzip => Decoder::Gzip(GzDecoder::new(sink)),
        };
        Self { decoder }
    }

    /// Writes the next bytes of the body. Blocks.
    pub fn write(&mut self, bytes: &[u8]) -> Result<(), PushSpoolError> {
        match &mut self.decoder {
            Decoder::Plain(sink) => sink.write_all(bytes),
            // The decoder ends with the first gzip member and rejects bytes after it.
            Decoder::Gzip(decoder) => decoder.write_all(bytes),
        }
        .map_err(spool_error)
    }

    /// The part before the pack, once it is complete.
    pub fn head(&self) -> Option<&PushHead> {
        self.sink().parser.head()
    }

    /// Whether the push itself shows that it is complete.
    pub fn is_complete(&self) -> bool {
        self.sink().is_complete()
    }

    /// Reads the next bytes of a refused push without storing them, to find its end. Returns
    /// whether more bytes are to come.
    pub fn skip(&mut self, bytes: &[u8]) -> bool {
        match &mut self.decoder {
            Decoder::Plain(sink) => match &mut sink.end {
                EndDetection::EndOfBody => true,
                EndDetection::EndOfPack(Some(pack)) => pack.feed(bytes).is_ok() && !pack.is_done(),
                EndDetection::EndOfPack(None) => false,
            },
            Decoder::Gzip(_) => true,
        }
    }

    /// Number of decoded bytes so far.
    pub fn decoded_bytes(&self) -> u64 {
        self.sink().spool.len()
    }

    /// Ends the body. Blocks.
    pub fn finish(self) -> Result<SpooledPush, (Option<PushHead>, PushSpoolError)> {
        let sink = match self.decoder {
            Decoder::Plain(sink) => sink,
            Decoder::Gzip(mut decoder) => {
                if let Err(error) = decoder.try_finish() {
                    return Err((decoder.get_ref().parser.head().cloned(), spool_error(error)));
                }
                decoder
                    .finish()
                    .map_err(|error| (None, spool_error(error)))?
            }
        };
        let is_incomplete = matches!(sink.end, EndDetection::EndOfPack(_)) && !sink.is_complete();
        let Sink { parser, spool, .. } = sink;
        let head = parser.head().cloned();
        if is_incomplete {
            return Err((head, PushParseError::Incomplete.into()));
        }
        match parser.finish(spool.len()) {
            Ok(parsed) => Ok(SpooledPush { parsed, spool }),
            Err(error) => Err((head, error.into())),
        }
    }

    fn sink(&self) -> &Sink {
        match &self.decoder {
            Decoder::Plain(sink) => sink,
            Decoder::Gzip(decoder) => decoder.get_ref(),
        }
    }
}

/// Recovers the error that [`Sink`] wrapped into an I/O error.
fn spool_error(error: io::Error) -> PushSpoolError {
    match error.downcast::<PushSpoolError>() {
        Ok(error) => error,
        Err(error) => match error.kind() {
            io::ErrorKind::InvalidInput
            | io::ErrorKind::InvalidData
            | io::ErrorKind::UnexpectedEof
            | io::ErrorKind::WriteZero => PushSpoolError::Encoding,
            _ => PushSpoolError::Spool(error),
        },
    }
}

impl Sink {
    fn is_complete(&self) -> bool {
        match &self.end {
            EndDetection::EndOfBody => false,
            EndDetection::EndOfPack(Some(pack)) => pack.is_done(),
            EndDetection::EndOfPack(None) => self.parser.is_complete(),
        }
    }

    /// Passes the pack bytes of `bytes`, which are not in the spool yet, to the end finder.
    fn feed_end_finder(&mut self, bytes: &[u8]) -> Result<(), PushSpoolError> {
        let (EndDetection::EndOfPack(end), Some((at, format))) =
            (&mut self.end, self.parser.pack())
        else {
            return Ok(());
        };
        let before_pack =
            usize::try_from(at.saturating_sub(self.spool.len())).unwrap_or(usize::MAX);
        let pack = end.get_or_insert_with(|| Box::new(PackEndFinder::new(format)));
        Ok(pack.feed(bytes.get(before_pack..).unwrap_or_default())?)
    }
}

impl Write for Sink {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let wrap = |error: PushSpoolError| io::Error::other(error);
        let parsed = self.parser.feed(bytes);
        parsed.map_err(|error| wrap(error.into()))?;
        // The end is also detected in a push that is too large.
        self.feed_end_finder(bytes).map_err(wrap)?;
        let more = u64::try_from(bytes.len()).unwrap_or(u64::MAX);
        if self.spool.len().saturating_add(more) > self.limit {
            return Err(wrap(PushSpoolError::TooLarge { limit: self.limit }));
        }
        self.spool.append(bytes).map_err(|error| {
            wrap(match error.downcast::<SpoolFull>() {
                Ok(full) => full.into(),
                Err(error) => PushSpoolError::Spool(error),
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

    use super::super::pkt_line;
    use super::*;
    use crate::spool::{SpoolQuota, Spools};

    fn body(pack: usize) -> Vec<u8> {
        let (zero, new) = ("0".repeat(40), "1".repeat(40));
        let mut bytes = Vec::new();
        let command = format!("{zero} {new} refs/heads/a\0report-status side-band-64k");
        pkt_line::write(&mut bytes, command.as_bytes());
        pkt_line::flush(&mut bytes);
        bytes.extend_from_slice(b"PACK\0\0\0\x02");
        bytes.extend(std::iter::repeat_n(0, pack));
        bytes
    }

    /// A complete pack without objects.
    fn empty_pack() -> Vec<u8> {
        let head = b"PACK\0\0\0\x02\0\0\0\0";
        let sum = digest(&SHA1_FOR_LEGACY_USE_ONLY, head);
        [head, sum.as_ref()].concat()
    }

    fn gzip(bytes: &[u8]) -> Vec<u8> {
        let mut encoder = GzEncoder::new(Vec::new(), Compression::fast());
        encoder.write_all(bytes).unwrap();
        encoder.finish().unwrap()
    }

    fn spooler(encoding: PushEncoding, limit: u64) -> (tempfile::TempDir, PushSpooler) {
        let dir = tempfile::tempdir().unwrap();
        let spool = Spools::new(dir.path())
            .open(&SpoolQuota::for_sandbox())
            .unwrap();
        (dir, PushSpooler::new(spool, encoding, limit))
    }

    fn spool(
        encoding: PushEncoding,
        bytes: &[u8],
        limit: u64,
        piece: usize,
    ) -> Result<SpooledPush, PushSpoolError> {
        let (_dir, mut spooler) = spooler(encoding, limit);
        for piece in bytes.chunks(piece) {
            spooler.write(piece)?;
        }
        spooler.finish().map_err(|(_, error)| error)
    }

    #[test]
    fn plain_and_compressed_push_are_spooled_alike() {
        let plain = body(5_000);
        for (encoding, bytes) in [
            (PushEncoding::Plain, plain.clone()),
            (PushEncoding::Gzip, gzip(&plain)),
        ] {
            for piece in [1, 13, 100_000] {
                let spooled = spool(encoding, &bytes, 1 << 20, piece).unwrap();
                assert_eq!(spooled.spool.len(), plain.len() as u64);
                assert!(matches!(spooled.parsed, ParsedPush::Push(_)));
            }
        }
    }

    #[test]
    fn size_limit_counts_decoded_bytes_exactly() {
        let plain = body(5_000);
        let length = plain.len() as u64;
        for (encoding, bytes) in [
            (PushEncoding::Plain, plain.clone()),
            (PushEncoding::Gzip, gzip(&plain)),
        ] {
            assert!(spool(encoding, &bytes, length, 100).is_ok());
            let result = spool(encoding, &bytes, length - 1, 100);
            assert!(
                matches!(result, Err(PushSpoolError::TooLarge { .. })),
                "{result:?}"
            );
        }
    }

    #[test]
    fn push_without_body_end_ends_with_its_pack() {
        let empty = empty_pack();
        let whole = [body(0).get(..body(0).len() - 8).unwrap(), &empty].concat();
        for piece in [1, 13, 100_000] {
            let (_dir, mut spooler) = spooler(PushEncoding::UntilPackEnd, 1 << 20);
            for piece in whole.chunks(piece) {
                assert!(!spooler.is_complete());
                spooler.write(piece).unwrap();
            }
            assert!(spooler.is_complete());
            let spooled = spooler.finish().unwrap();
            assert_eq!(spooled.spool.len(), whole.len() as u64);
        }
        let more = [whole.as_slice(), b"0000"].concat();
        let result = spool(PushEncoding::UntilPackEnd, &more, 1 << 20, 1 << 20);
        assert!(matches!(
            result,
            Err(PushSpoolError::Pack(PackEndError::Trailing))
        ));
        let cut = &whole[..whole.len() - 1];
        let result = spool(PushEncoding::UntilPackEnd, cut, 1 << 20, 50);
        assert!(matches!(
            result,
            Err(PushSpoolError::Malformed(PushParseError::Incomplete))
        ));
    }

    #[test]
    fn push_without_pack_ends_with_its_commands() {
        let (zero, old) = ("0".repeat(40), "1".repeat(40));
        let mut deletion = Vec::new();
        let command = format!("{old} {zero} refs/heads/a\0report-status");
        pkt_line::write(&mut deletion, command.as_bytes());
        pkt_line::flush(&mut deletion);
        for (bytes, is_probe) in [(deletion, false), (b"0000".to_vec(), true)] {
            let (_dir, mut spooler) = spooler(PushEncoding::UntilPackEnd, 1 << 20);
            spooler.write(&bytes).unwrap();
            assert!(spooler.is_complete());
            let spooled = spooler.finish().unwrap();
            assert_eq!(matches!(spooled.parsed, ParsedPush::Probe), is_probe);
        }
    }

    #[test]
    fn end_of_a_too_large_push_is_found() {
        let whole = [body(0).get(..body(0).len() - 8).unwrap(), &empty_pack()].concat();
        let (_dir, mut spooler) = spooler(PushEncoding::UntilPackEnd, whole.len() as u64 - 5);
        let (most, last) = whole.split_at(whole.len() - 8);
        spooler.write(most).unwrap();
        let (first, last) = last.split_at(4);
        let result = spooler.write(first);
        assert!(
            matches!(result, Err(PushSpoolError::TooLarge { .. })),
            "{result:?}"
        );
        assert!(!spooler.skip(last), "the push has ended");
        assert!(spooler.is_complete());
    }

    #[test]
    fn gzip_bomb_stops_at_the_size_limit() {
        let bomb = gzip(&body(64 << 20));
        let (_dir, mut spooler) = spooler(PushEncoding::Gzip, 1 << 20);
        let result = spooler.write(&bomb);
        assert!(
            matches!(result, Err(PushSpoolError::TooLarge { .. })),
            "{result:?}"
        );
        assert!(spooler.decoded_bytes() <= 1 << 20);
        assert_eq!(spooler.head().unwrap().updates.len(), 1);
    }

    #[test]
    fn body_that_is_not_one_gzip_member_is_refused() {
        let whole = gzip(&body(100));
        let cut = &whole[..whole.len() - 3];
        let twice = [whole.as_slice(), &whole].concat();
        let trailing = [whole.as_slice(), b"x"].concat();
        for bad in [cut, &twice, &trailing, &body(100), b"\x1f\x8b", b""] {
            for piece in [7, 100_000] {
                let result = spool(PushEncoding::Gzip, bad, 1 << 20, piece);
                assert!(
                    matches!(
                        result,
                        Err(PushSpoolError::Encoding | PushSpoolError::Malformed(_))
                    ),
                    "{result:?}"
                );
            }
        }
    }
}
