//! A push as it comes in, read line by line.
//!
//! ```text
//!   shallow* ──▶ command+ ────────────────────────────▶ flush ──▶ [option* flush] ──▶ [pack]
//!         └────▶ push-cert, its lines, push-cert-end ──▶ ┘
//!   flush, and nothing else: a probe, by which git finds out whether it may send more
//! ```
//! No I/O: bytes go in, in any pieces, and what was understood comes out. Whatever a server
//! might understand differently is malformed: capabilities on any but the first command,
//! lines that only the second version of the protocol knows, bytes after the last deletion.

mod certificate;

use policy::push::ObjectFormat;
use policy::refs::{ObjectId, RefName, RefUpdate};

use super::line::{self, Line};
use certificate::Certificate;

/// How much may come before the pack.
const MOST_HEAD: usize = 4 << 20;

/// How many refs one push may touch.
const MOST_COMMANDS: usize = 10_000;

/// How many options one push may have.
const MOST_OPTIONS: usize = 256;

/// What makes a push unreadable.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Malformed {
    /// No pkt-line where one is due.
    #[error(transparent)]
    Line(#[from] line::BadLine),
    /// More before the pack than anybody needs.
    #[error("there is too much before the pack")]
    Head,
    /// `0001` or `0002`.
    #[error("a line belongs to another version of the protocol")]
    Version,
    /// No `old new ref`.
    #[error("a command is not 'old new ref'")]
    Command,
    /// No ref could be called that.
    #[error("a command names no proper ref")]
    Ref,
    /// Two formats in one push.
    #[error("object ids are of different lengths")]
    Format,
    /// Control characters, a second NUL, or not where they belong.
    #[error("the capabilities cannot be read in one way")]
    Capabilities,
    /// A `shallow` without its id, or out of its place.
    #[error("a 'shallow' line is not in its place")]
    Shallow,
    /// A certificate that cannot be read in one way.
    #[error("the push certificate cannot be read in one way")]
    Certificate,
    /// Too many options.
    #[error("there are too many push options")]
    Options,
    /// No commands, and yet more than a probe.
    #[error("there is no command")]
    Empty,
    /// Bytes where a pack should begin.
    #[error("what follows the commands is no pack")]
    Pack,
    /// The end came too early.
    #[error("the push ends in the middle")]
    Cut,
}

/// What the client can be told, and how.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Capabilities {
    /// It wants to hear what became of each ref.
    pub report: bool,
    /// It reads messages beside the report.
    pub side_band: bool,
    /// All refs or none.
    pub atomic: bool,
    /// It sends options.
    pub options: bool,
}

/// What comes before the pack.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Head {
    /// How its objects are named.
    pub format: ObjectFormat,
    /// The commands, in their order.
    pub updates: Vec<RefUpdate>,
    /// What the client can be told.
    pub capabilities: Capabilities,
    /// The push options, also those a certificate names.
    pub options: Vec<Vec<u8>>,
}

/// A push, understood.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Push {
    /// What comes before the pack.
    pub head: Head,
    /// Where the pack begins; none where everything is a deletion.
    pub pack: Option<u64>,
}

/// What a body turned out to be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Parsed {
    /// Git finds out whether it may send more.
    Probe,
    /// A push.
    Push(Push),
}

/// Reads a push.
#[derive(Debug, Default)]
pub struct Parser {
    state: State,
    /// What is not read yet; of a pack, its first bytes.
    pending: Vec<u8>,
    /// Bytes before `pending`.
    read: u64,
    draft: Draft,
    head: Option<Head>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum State {
    #[default]
    Commands,
    Certificate,
    Certified,
    Options,
    Probe,
    Pack,
}

#[derive(Debug, Default)]
struct Draft {
    format: Option<ObjectFormat>,
    shallow: bool,
    updates: Vec<RefUpdate>,
    capabilities: Capabilities,
    options: Vec<Vec<u8>>,
    certificate: Option<Vec<u8>>,
}

/// `PACK` and a version of the pack's form.
const PACK_BEGINS: usize = 8;

/// The head and the hash of a pack without objects.
const SMALLEST_PACK: u64 = 32;

impl Parser {
    /// Takes the next bytes.
    pub fn feed(&mut self, bytes: &[u8]) -> Result<(), Malformed> {
        if self.state == State::Pack {
            return self.feed_pack(bytes);
        }
        self.pending.extend_from_slice(bytes);
        let mut at = 0;
        while self.state != State::Pack {
            let rest = self.pending.get(at..).unwrap_or_default();
            if self.state == State::Probe && !rest.is_empty() {
                return Err(Malformed::Empty);
            }
            let Some((line, length)) = line::first(rest)? else {
                break;
            };
            let next = self.draft.take(self.state, line)?;
            at += length;
            self.state = next;
        }
        self.read += u64::try_from(at).unwrap_or(u64::MAX);
        if self.state == State::Pack {
            let rest = self.pending.split_off(at);
            self.pending.clear();
            self.head = Some(std::mem::take(&mut self.draft).finish()?);
            return self.feed_pack(&rest);
        }
        self.pending.drain(..at);
        let head = self.read + u64::try_from(self.pending.len()).unwrap_or(u64::MAX);
        if head > u64::try_from(MOST_HEAD).unwrap_or(u64::MAX) {
            return Err(Malformed::Head);
        }
        Ok(())
    }

    /// All that comes before the pack, as soon as it was read.
    pub fn head(&self) -> Option<&Head> {
        self.head.as_ref()
    }

    /// Where the pack begins and how its objects are named, as soon as it is known that there is
    /// one.
    pub fn pack(&self) -> Option<(u64, ObjectFormat)> {
        let head = self.head.as_ref().filter(|head| head.wants_pack())?;
        Some((self.read, head.format))
    }

    /// Whether everything is there, as far as that can be seen before the pack.
    pub fn is_complete(&self) -> bool {
        self.state == State::Probe || self.head.as_ref().is_some_and(|head| !head.wants_pack())
    }

    /// What it was. `total` is how many bytes there were.
    pub fn finish(self, total: u64) -> Result<Parsed, Malformed> {
        match (self.state, self.head) {
            (State::Probe, _) => Ok(Parsed::Probe),
            (State::Pack, Some(head)) => {
                let length = total.saturating_sub(self.read);
                let wanted = head.wants_pack();
                if wanted && (length < SMALLEST_PACK || self.pending.len() < PACK_BEGINS) {
                    return Err(Malformed::Cut);
                }
                let pack = wanted.then_some(self.read);
                Ok(Parsed::Push(Push { head, pack }))
            }
            _ => Err(Malformed::Cut),
        }
    }

    /// Looks at the first bytes of a pack, and at no other.
    fn feed_pack(&mut self, bytes: &[u8]) -> Result<(), Malformed> {
        if bytes.is_empty() {
            return Ok(());
        }
        if !self.head.as_ref().is_some_and(Head::wants_pack) {
            return Err(Malformed::Pack);
        }
        let missing = PACK_BEGINS - self.pending.len();
        let taken = bytes.get(..missing).unwrap_or(bytes);
        self.pending.extend_from_slice(taken);
        let begins = |whole: &[u8; PACK_BEGINS]| whole.starts_with(&self.pending);
        if begins(b"PACK\0\0\0\x02") || begins(b"PACK\0\0\0\x03") {
            Ok(())
        } else {
            Err(Malformed::Pack)
        }
    }
}

impl Head {
    /// Git sends a pack unless everything is a deletion.
    fn wants_pack(&self) -> bool {
        !self.updates.iter().all(RefUpdate::is_deletion)
    }
}

impl Draft {
    fn take(&mut self, state: State, line: Line<'_>) -> Result<State, Malformed> {
        match (state, line) {
            (_, Line::Other) => Err(Malformed::Version),
            (State::Commands, Line::Data(data)) => self.take_command(data),
            (State::Commands, Line::Flush) if self.updates.is_empty() => {
                if self.shallow {
                    Err(Malformed::Empty)
                } else {
                    Ok(State::Probe)
                }
            }
            (State::Commands | State::Certified, Line::Flush) => {
                if self.capabilities.options {
                    Ok(State::Options)
                } else {
                    Ok(State::Pack)
                }
            }
            (State::Certificate, Line::Data(data)) => self.take_certificate(data),
            (State::Certificate, Line::Flush) | (State::Certified, Line::Data(_)) => {
                Err(Malformed::Certificate)
            }
            (State::Options, Line::Data(data)) => {
                self.options.push(line::chomp(data).to_vec());
                if self.options.len() > MOST_OPTIONS {
                    return Err(Malformed::Options);
                }
                Ok(State::Options)
            }
            (State::Options, Line::Flush) => Ok(State::Pack),
            (State::Probe | State::Pack, _) => Err(Malformed::Empty),
        }
    }

    fn take_command(&mut self, data: &[u8]) -> Result<State, Malformed> {
        let line = line::chomp(data);
        if let Some(id) = line.strip_prefix(b"shallow ") {
            if !self.updates.is_empty() {
                return Err(Malformed::Shallow);
            }
            let id = ObjectId::parse(id).map_err(|_| Malformed::Shallow)?;
            self.shallow = true;
            self.take_format(&id)?;
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
                return Err(Malformed::Capabilities);
            }
            self.take_capabilities(capabilities)?;
        }
        if command == b"push-cert" {
            if !self.updates.is_empty() {
                return Err(Malformed::Certificate);
            }
            self.certificate = Some(Vec::new());
            return Ok(State::Certificate);
        }
        self.take_update(command)?;
        Ok(State::Commands)
    }

    fn take_update(&mut self, command: &[u8]) -> Result<(), Malformed> {
        let mut words = command.splitn(3, |byte| *byte == b' ');
        let (Some(old), Some(new), Some(name)) = (words.next(), words.next(), words.next()) else {
            return Err(Malformed::Command);
        };
        let id = |hex| ObjectId::parse(hex).map_err(|_| Malformed::Command);
        let (old, new) = (id(old)?, id(new)?);
        self.take_format(&old)?;
        self.take_format(&new)?;
        let name = RefName::parse(name).map_err(|_| Malformed::Ref)?;
        self.updates.push(RefUpdate { name, old, new });
        if self.updates.len() > MOST_COMMANDS {
            return Err(Malformed::Head);
        }
        Ok(())
    }

    fn take_format(&mut self, id: &ObjectId) -> Result<(), Malformed> {
        let format = match id {
            ObjectId::Sha1(_) => ObjectFormat::Sha1,
            ObjectId::Sha256(_) => ObjectFormat::Sha256,
        };
        if *self.format.get_or_insert(format) == format {
            Ok(())
        } else {
            Err(Malformed::Format)
        }
    }

    /// Git looks for a word with a space or nothing before it, and a space, `=` or nothing
    /// after it.
    fn take_capabilities(&mut self, text: &[u8]) -> Result<(), Malformed> {
        if !text.iter().all(|b| b.is_ascii_graphic() || *b == b' ') {
            return Err(Malformed::Capabilities);
        }
        let mut named = None;
        for word in text.split(|byte| *byte == b' ') {
            let mut halves = word.splitn(2, |byte| *byte == b'=');
            let (name, value) = (halves.next().unwrap_or_default(), halves.next());
            match name {
                b"report-status" | b"report-status-v2" => self.capabilities.report = true,
                b"side-band-64k" => self.capabilities.side_band = true,
                b"atomic" => self.capabilities.atomic = true,
                b"push-options" => self.capabilities.options = true,
                b"object-format" => {
                    let format = match value {
                        Some(b"sha1") => ObjectFormat::Sha1,
                        Some(b"sha256") => ObjectFormat::Sha256,
                        _ => return Err(Malformed::Format),
                    };
                    if named.replace(format).is_some() {
                        return Err(Malformed::Capabilities);
                    }
                }
                _ => {}
            }
        }
        match named {
            Some(format) if *self.format.get_or_insert(format) != format => Err(Malformed::Format),
            _ => Ok(()),
        }
    }

    fn take_certificate(&mut self, data: &[u8]) -> Result<State, Malformed> {
        if data == b"push-cert-end\n" {
            let text = self.certificate.take().unwrap_or_default();
            let Certificate { commands, options } = certificate::read(&text)?;
            for command in commands {
                self.take_update(command)?;
            }
            self.options.extend(options.into_iter().map(<[u8]>::to_vec));
            return Ok(State::Certified);
        }
        // Servers end a string at a NUL, and take what has no newline for a part of a line.
        if data.contains(&0) || line::chomp(data) == b"push-cert-end" {
            return Err(Malformed::Certificate);
        }
        self.certificate
            .get_or_insert_default()
            .extend_from_slice(data);
        Ok(State::Certificate)
    }

    fn finish(self) -> Result<Head, Malformed> {
        Ok(Head {
            format: self.format.ok_or(Malformed::Empty)?,
            updates: self.updates,
            capabilities: self.capabilities,
            options: self.options,
        })
    }
}

/// Reads `bytes` as a push, in pieces of at most `piece` bytes. What a fuzzer calls: however
/// a body is split, the same comes out.
pub fn exercise(bytes: &[u8], piece: usize) -> Result<Parsed, Malformed> {
    let mut parser = Parser::default();
    for piece in bytes.chunks(piece.max(1)) {
        parser.feed(piece)?;
    }
    parser.finish(u64::try_from(bytes.len()).unwrap_or(u64::MAX))
}

#[cfg(test)]
mod tests;
