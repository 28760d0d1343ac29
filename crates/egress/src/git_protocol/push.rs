//! Incremental parser of a git push (the body of a receive-pack request).
//!
//! ```text
//!   shallow* ──▶ command+ ────────────────────────────▶ flush ──▶ [option* flush] ──▶ [pack]
//!         └────▶ push-cert, its lines, push-cert-end ──▶ ┘
//!   flush alone: a probe, by which git checks authentication before a large push
//! ```
//! No I/O: the caller feeds bytes in chunks of any size. Input that a server might interpret
//! differently is an error: capabilities on any but the first command, pkt-lines of protocol
//! version 2, bytes after a push that only deletes.

mod certificate;

use policy::push::ObjectFormat;
use policy::refs::{ObjectId, RefName, RefUpdate};

use super::pkt_line::{self, PktLine};
use certificate::Certificate;

/// Maximum number of bytes before the pack.
const MAX_HEAD_BYTES: usize = 4 << 20;

/// Maximum number of ref updates in a push.
const MAX_COMMANDS: usize = 10_000;

/// Maximum number of push options.
const MAX_OPTIONS: usize = 256;

/// Why a push cannot be parsed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PushParseError {
    /// Bytes that are no pkt-line.
    #[error(transparent)]
    PktLine(#[from] pkt_line::PktLineError),
    /// The part before the pack exceeds a limit.
    #[error("the part before the pack is too large")]
    HeadTooLarge,
    /// A delimiter `0001` or response end `0002`.
    #[error("a pkt-line belongs to another version of the protocol")]
    Version,
    /// A command that is not `old new ref`.
    #[error("a command is not 'old new ref'")]
    Command,
    /// A command with an invalid ref name.
    #[error("a command has an invalid ref name")]
    Ref,
    /// Two object formats in one push, or an unknown one.
    #[error("object ids are of different lengths")]
    Format,
    /// Capabilities with control characters or a second NUL, or not on the first command.
    #[error("the capabilities are malformed or ambiguous")]
    Capabilities,
    /// A `shallow` line without an object id, or after a command.
    #[error("a 'shallow' line is malformed or comes after a command")]
    Shallow,
    /// A malformed or ambiguous push certificate.
    #[error("the push certificate is malformed or ambiguous")]
    Certificate,
    /// Too many push options.
    #[error("there are too many push options")]
    TooManyOptions,
    /// A push without a command that is no probe either.
    #[error("the push has no command")]
    NoCommand,
    /// The bytes after the commands are no pack.
    #[error("the bytes after the commands are not a pack")]
    NotAPack,
    /// The push ended early.
    #[error("the push is incomplete")]
    Incomplete,
}

/// Capabilities that the client selected for a push.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PushCapabilities {
    /// `report-status`: the client expects a report about each ref.
    pub report: bool,
    /// `side-band-64k`: the client reads messages beside the report.
    pub side_band: bool,
    /// `atomic`: update all refs or none.
    pub atomic: bool,
    /// `push-options`: the client sends push options.
    pub options: bool,
}

/// The part of a push before the pack.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PushHead {
    /// Object format.
    pub format: ObjectFormat,
    /// Ref updates in the order of the commands.
    pub updates: Vec<RefUpdate>,
    /// Capabilities that the client selected.
    pub capabilities: PushCapabilities,
    /// Push options, including those of a push certificate.
    pub options: Vec<Vec<u8>>,
}

/// A parsed push with at least one command.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Push {
    /// The part before the pack.
    pub head: PushHead,
    /// Offset of the pack; none if the push only deletes.
    pub pack: Option<u64>,
}

/// A parsed receive-pack request body.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ParsedPush {
    /// A flush alone, by which git checks authentication before a large push.
    Probe,
    /// A push.
    Push(Push),
}

/// Parses a push.
#[derive(Debug, Default)]
pub struct PushParser {
    state: State,
    /// Unparsed bytes, or the first bytes of the pack.
    pending: Vec<u8>,
    /// Number of parsed bytes before `pending`.
    parsed: u64,
    builder: PushHeadBuilder,
    head: Option<PushHead>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum State {
    #[default]
    Commands,
    Certificate,
    /// After the push certificate.
    Certified,
    Options,
    Probe,
    Pack,
}

#[derive(Debug, Default)]
struct PushHeadBuilder {
    format: Option<ObjectFormat>,
    shallow: bool,
    updates: Vec<RefUpdate>,
    capabilities: PushCapabilities,
    options: Vec<Vec<u8>>,
    certificate: Option<Vec<u8>>,
}

/// Length of the pack signature: `PACK` and the version.
const PACK_SIGNATURE_BYTES: usize = 8;

/// Minimum size of a pack: header and hash without objects.
const MIN_PACK_BYTES: u64 = 32;

impl PushParser {
    /// Takes the next bytes.
    pub fn feed(&mut self, bytes: &[u8]) -> Result<(), PushParseError> {
        if self.state == State::Pack {
            return self.feed_pack(bytes);
        }
        self.pending.extend_from_slice(bytes);
        let mut at = 0;
        while self.state != State::Pack {
            let rest = self.pending.get(at..).unwrap_or_default();
            if self.state == State::Probe && !rest.is_empty() {
                return Err(PushParseError::NoCommand);
            }
            let Some((line, length)) = pkt_line::first(rest)? else {
                break;
            };
            let next = self.builder.read_line(self.state, line)?;
            at += length;
            self.state = next;
        }
        self.parsed += u64::try_from(at).unwrap_or(u64::MAX);
        if self.state == State::Pack {
            let rest = self.pending.split_off(at);
            self.pending.clear();
            self.head = Some(std::mem::take(&mut self.builder).finish()?);
            return self.feed_pack(&rest);
        }
        self.pending.drain(..at);
        let head = self.parsed + u64::try_from(self.pending.len()).unwrap_or(u64::MAX);
        if head > u64::try_from(MAX_HEAD_BYTES).unwrap_or(u64::MAX) {
            return Err(PushParseError::HeadTooLarge);
        }
        Ok(())
    }

    /// The part before the pack, once it is complete.
    pub fn head(&self) -> Option<&PushHead> {
        self.head.as_ref()
    }

    /// Offset and object format of the pack, once the commands show that a pack follows.
    pub fn pack(&self) -> Option<(u64, ObjectFormat)> {
        let head = self.head.as_ref().filter(|head| head.wants_pack())?;
        Some((self.parsed, head.format))
    }

    /// Whether the push is complete without a pack.
    pub fn is_complete(&self) -> bool {
        self.state == State::Probe || self.head.as_ref().is_some_and(|head| !head.wants_pack())
    }

    /// Ends the input. `total` is the number of bytes of the push.
    pub fn finish(self, total: u64) -> Result<ParsedPush, PushParseError> {
        match (self.state, self.head) {
            (State::Probe, _) => Ok(ParsedPush::Probe),
            (State::Pack, Some(head)) => {
                let length = total.saturating_sub(self.parsed);
                let has_pack = head.wants_pack();
                if has_pack
                    && (length < MIN_PACK_BYTES || self.pending.len() < PACK_SIGNATURE_BYTES)
                {
                    return Err(PushParseError::Incomplete);
                }
                let pack = has_pack.then_some(self.parsed);
                Ok(ParsedPush::Push(Push { head, pack }))
            }
            _ => Err(PushParseError::Incomplete),
        }
    }

    /// Checks the signature of the pack and ignores its other bytes.
    fn feed_pack(&mut self, bytes: &[u8]) -> Result<(), PushParseError> {
        if bytes.is_empty() {
            return Ok(());
        }
        if !self.head.as_ref().is_some_and(PushHead::wants_pack) {
            return Err(PushParseError::NotAPack);
        }
        let missing = PACK_SIGNATURE_BYTES - self.pending.len();
        let taken = bytes.get(..missing).unwrap_or(bytes);
        self.pending.extend_from_slice(taken);
        let matches = |signature: &[u8; PACK_SIGNATURE_BYTES]| signature.starts_with(&self.pending);
        if matches(b"PACK\0\0\0\x02") || matches(b"PACK\0\0\0\x03") {
            Ok(())
        } else {
            Err(PushParseError::NotAPack)
        }
    }
}

impl PushHead {
    /// Whether a pack follows: git sends one unless every command is a deletion.
    fn wants_pack(&self) -> bool {
        !self.updates.iter().all(RefUpdate::is_deletion)
    }
}

impl PushHeadBuilder {
    fn read_line(&mut self, state: State, line: PktLine<'_>) -> Result<State, PushParseError> {
        match (state, line) {
            (_, PktLine::Other) => Err(PushParseError::Version),
            (State::Commands, PktLine::Data(data)) => self.read_command(data),
            (State::Commands, PktLine::Flush) if self.updates.is_empty() => {
                if self.shallow {
                    Err(PushParseError::NoCommand)
                } else {
                    Ok(State::Probe)
                }
            }
            (State::Commands | State::Certified, PktLine::Flush) => {
                if self.capabilities.options {
                    Ok(State::Options)
                } else {
                    Ok(State::Pack)
                }
            }
            (State::Certificate, PktLine::Data(data)) => self.read_certificate_line(data),
            (State::Certificate, PktLine::Flush) | (State::Certified, PktLine::Data(_)) => {
                Err(PushParseError::Certificate)
            }
            (State::Options, PktLine::Data(data)) => {
                self.options.push(pkt_line::chomp(data).to_vec());
                if self.options.len() > MAX_OPTIONS {
                    return Err(PushParseError::TooManyOptions);
                }
                Ok(State::Options)
            }
            (State::Options, PktLine::Flush) => Ok(State::Pack),
            (State::Probe | State::Pack, _) => Err(PushParseError::NoCommand),
        }
    }

    fn read_command(&mut self, data: &[u8]) -> Result<State, PushParseError> {
        let line = pkt_line::chomp(data);
        if let Some(id) = line.strip_prefix(b"shallow ") {
            if !self.updates.is_empty() {
                return Err(PushParseError::Shallow);
            }
            let id = ObjectId::parse(id).map_err(|_| PushParseError::Shallow)?;
            self.shallow = true;
            self.check_format(&id)?;
            return Ok(State::Commands);
        }
        let (command, capabilities) = match line.iter().position(|byte| *byte == 0) {
            Some(at) => {
                let (command, rest) = line.split_at(at);
                (command, rest.get(1..))
            }
            None => (line, None),
        };
        if let Some(capabilities) = capabilities {
            if !self.updates.is_empty() {
                return Err(PushParseError::Capabilities);
            }
            self.read_capabilities(capabilities)?;
        }
        if command == b"push-cert" {
            if !self.updates.is_empty() {
                return Err(PushParseError::Certificate);
            }
            self.certificate = Some(Vec::new());
            return Ok(State::Certificate);
        }
        self.read_update(command)?;
        Ok(State::Commands)
    }

    fn read_update(&mut self, command: &[u8]) -> Result<(), PushParseError> {
        let mut words = command.splitn(3, |byte| *byte == b' ');
        let (Some(old), Some(new), Some(name)) = (words.next(), words.next(), words.next()) else {
            return Err(PushParseError::Command);
        };
        let id = |hex| ObjectId::parse(hex).map_err(|_| PushParseError::Command);
        let (old, new) = (id(old)?, id(new)?);
        self.check_format(&old)?;
        self.check_format(&new)?;
        let name = RefName::parse(name).map_err(|_| PushParseError::Ref)?;
        self.updates.push(RefUpdate { name, old, new });
        if self.updates.len() > MAX_COMMANDS {
            return Err(PushParseError::HeadTooLarge);
        }
        Ok(())
    }

    fn check_format(&mut self, id: &ObjectId) -> Result<(), PushParseError> {
        let format = match id {
            ObjectId::Sha1(_) => ObjectFormat::Sha1,
            ObjectId::Sha256(_) => ObjectFormat::Sha256,
        };
        if *self.format.get_or_insert(format) == format {
            Ok(())
        } else {
            Err(PushParseError::Format)
        }
    }

    /// Reads space-separated capabilities with an optional `=value`, as git parses them.
    fn read_capabilities(&mut self, text: &[u8]) -> Result<(), PushParseError> {
        if !text.iter().all(|b| b.is_ascii_graphic() || *b == b' ') {
            return Err(PushParseError::Capabilities);
        }
        let mut named_format = None;
        for capability in text.split(|byte| *byte == b' ') {
            let mut parts = capability.splitn(2, |byte| *byte == b'=');
            let (name, value) = (parts.next().unwrap_or_default(), parts.next());
            match name {
                b"report-status" | b"report-status-v2" => self.capabilities.report = true,
                b"side-band-64k" => self.capabilities.side_band = true,
                b"atomic" => self.capabilities.atomic = true,
                b"push-options" => self.capabilities.options = true,
                b"object-format" => {
                    let format = match value {
                        Some(b"sha1") => ObjectFormat::Sha1,
                        Some(b"sha256") => ObjectFormat::Sha256,
                        _ => return Err(PushParseError::Format),
                    };
                    if named_format.replace(format).is_some() {
                        return Err(PushParseError::Capabilities);
                    }
                }
                _ => {}
            }
        }
        match named_format {
            Some(format) if *self.format.get_or_insert(format) != format => {
                Err(PushParseError::Format)
            }
            _ => Ok(()),
        }
    }

    fn read_certificate_line(&mut self, data: &[u8]) -> Result<State, PushParseError> {
        if data == b"push-cert-end\n" {
            let text = self.certificate.take().unwrap_or_default();
            let Certificate { commands, options } = certificate::parse(&text)?;
            for command in commands {
                self.read_update(command)?;
            }
            self.options.extend(options.into_iter().map(<[u8]>::to_vec));
            return Ok(State::Certified);
        }
        // Servers end a string at a NUL, and join a pkt-line without a newline with the next one.
        if data.contains(&0) || pkt_line::chomp(data) == b"push-cert-end" {
            return Err(PushParseError::Certificate);
        }
        self.certificate
            .get_or_insert_default()
            .extend_from_slice(data);
        Ok(State::Certificate)
    }

    fn finish(self) -> Result<PushHead, PushParseError> {
        Ok(PushHead {
            format: self.format.ok_or(PushParseError::NoCommand)?,
            updates: self.updates,
            capabilities: self.capabilities,
            options: self.options,
        })
    }
}

/// Parses `bytes` as a push, in chunks of at most `piece` bytes. Fuzz entry point: the result must
/// not depend on the chunk size.
pub fn fuzz_check(bytes: &[u8], piece: usize) -> Result<ParsedPush, PushParseError> {
    let mut parser = PushParser::default();
    for piece in bytes.chunks(piece.max(1)) {
        parser.feed(piece)?;
    }
    parser.finish(u64::try_from(bytes.len()).unwrap_or(u64::MAX))
}

#[cfg(test)]
mod tests;
