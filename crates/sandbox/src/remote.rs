//! The remote backend: one container that somebody else runs, reached by the workbench inside.
//!
//! There is exactly one sandbox, under the name it was given. Commands, uploads and downloads
//! work; what makes, stops and removes a container is said to be managed elsewhere. Files go in
//! and out as archives through the shell inside, which needs `base64` and `tar`; whatever comes
//! out is judged here, in a directory aside, before anybody sees it.

mod script;

use std::io::{Read, Seek, Write};
use std::path::Path;
use std::time::Duration;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use policy::id::SandboxId;

use crate::contract::{
    Command, ExecutionResult, Force, Listener, Moved, Sandbox, SandboxConfig, SandboxError,
    SandboxMetadata, SandboxStatus, Transfer,
};
use crate::transfer::{self, Rules, TransferError};
use script::{Refused, Script};

/// The most a command may say before it is killed.
const MOST_OUTPUT: usize = 64 << 20;

/// How long a command may run when nobody says.
const LONGEST: Duration = Duration::from_secs(7 * 24 * 60 * 60);

/// How long files may take.
const TRANSFER: Duration = Duration::from_secs(60 * 60);

/// Bytes of an archive that go in at once; a third more as text.
const PIECE: usize = 6 << 20;

/// What is kept of what a script of ours complains of.
const LONGEST_REFUSAL: usize = 4096;

/// What an archive takes beside its content, for every entry.
const PER_ENTRY: u64 = 4096;

/// Which way a command's words came out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// Output.
    Stdout,
    /// Error output.
    Stderr,
}

/// How a command ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ended {
    /// By itself, with this code.
    Code(i32),
    /// Its time was over.
    TimedOut,
    /// Whoever listened had heard enough.
    Stopped,
}

/// Whether whoever listens wants to hear more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Hearing {
    /// Go on.
    More,
    /// End the command.
    Enough,
}

/// The tools of the container, as far as a backend needs them. Calls block.
pub trait Tools: Send + Sync + std::fmt::Debug {
    /// Whether they are there now.
    fn health(&self) -> Result<(), String>;

    /// Runs a line of shell in the workspace, and shows what it says. The line is short: the
    /// kernel takes 128 KiB in one word.
    fn run(
        &self,
        line: &str,
        timeout: Duration,
        hear: &mut dyn FnMut(Way, &[u8]) -> Hearing,
    ) -> Result<Ended, String>;

    /// Writes a text file in the workspace.
    fn write(&self, path: &str, content: &str) -> Result<(), String>;
}

/// A container that somebody else runs.
#[derive(Debug)]
pub struct Remote<T> {
    id: SandboxId,
    tools: T,
}

impl<T: Tools> Remote<T> {
    /// The container behind `tools`, under this name.
    pub fn new(id: SandboxId, tools: T) -> Self {
        Self { id, tools }
    }

    /// Its name.
    pub fn id(&self) -> &SandboxId {
        &self.id
    }

    fn check(&self, id: &SandboxId) -> Result<(), SandboxError> {
        if *id == self.id {
            Ok(())
        } else {
            Err(SandboxError::NotFound(id.to_string()))
        }
    }

    fn elsewhere(&self, id: &SandboxId, what: &'static str) -> SandboxError {
        match self.check(id) {
            Ok(()) => SandboxError::Elsewhere(what),
            Err(error) => error,
        }
    }

    /// Runs a command, and shows what it says as it says it.
    pub fn run(
        &self,
        command: &Command,
        hear: &mut dyn FnMut(Way, &[u8]) -> Hearing,
    ) -> Result<Ended, SandboxError> {
        let name = script::fresh_name()?;
        let input = (!command.stdin.is_empty()).then_some(name.as_str());
        let script = Script::of(command, input, &name)?;
        if let Some(name) = input {
            self.bring(name, &mut command.stdin.as_slice())?;
        }
        let timeout = command.timeout.unwrap_or(LONGEST);
        // The first words of its error output, while they may be ours.
        let mut held = Some(Vec::new());
        let ended = self
            .tools
            .run(&script.line, timeout, &mut |way, bytes| {
                if way == Way::Stderr
                    && let Some(first) = &mut held
                {
                    first.extend_from_slice(bytes);
                    if script.may_be_refusal(first) && first.len() < LONGEST_REFUSAL {
                        return Hearing::More;
                    }
                    let first = held.take().unwrap_or_default();
                    return hear(way, &first);
                }
                hear(way, bytes)
            })
            .map_err(SandboxError::Silent)?;
        let held = held.unwrap_or_default();
        if let Ended::Code(code) = ended
            && let Some(Refused { step, reason }) = script.refused(code, &held)
        {
            return Err(SandboxError::Start {
                program: script.program,
                step,
                reason,
            });
        }
        if !held.is_empty() {
            hear(Way::Stderr, &held);
        }
        Ok(ended)
    }

    /// Runs a script of ours that must go well.
    fn must(&self, script: &Script, doing: &str) -> Result<(), SandboxError> {
        let mut said = Vec::new();
        let ended = self
            .tools
            .run(&script.line, TRANSFER, &mut |_, bytes| {
                let room = LONGEST_REFUSAL.saturating_sub(said.len()).min(bytes.len());
                said.extend_from_slice(bytes.get(..room).unwrap_or_default());
                Hearing::More
            })
            .map_err(SandboxError::Silent)?;
        if ended == Ended::Code(0) {
            return Ok(());
        }
        let said = String::from_utf8_lossy(&said);
        Err(SandboxError::Silent(format!("{doing}: {}", said.trim())))
    }

    /// Brings bytes into a file of the workspace, a piece at a time.
    fn bring(&self, name: &str, bytes: &mut dyn Read) -> Result<(), SandboxError> {
        let part = format!("{name}.part");
        let mut piece = Vec::new();
        loop {
            piece.clear();
            let length = bytes
                .take(PIECE as u64)
                .read_to_end(&mut piece)
                .map_err(SandboxError::system("reading the archive"))?;
            if length == 0 {
                return Ok(());
            }
            self.tools
                .write(&part, &STANDARD.encode(&piece))
                .map_err(SandboxError::Silent)?;
            self.must(&script::append(&part, name), "bringing files in")?;
        }
    }
}

impl<T: Tools> Sandbox for Remote<T> {
    fn create(&self, _: &SandboxConfig) -> Result<SandboxMetadata, SandboxError> {
        Err(SandboxError::Elsewhere("made"))
    }

    fn pause(&self, id: &SandboxId) -> Result<(), SandboxError> {
        Err(self.elsewhere(id, "paused"))
    }

    fn resume(&self, id: &SandboxId) -> Result<(), SandboxError> {
        Err(self.elsewhere(id, "resumed"))
    }

    fn delete(&self, id: &SandboxId, _: Force) -> Result<(), SandboxError> {
        Err(self.elsewhere(id, "deleted"))
    }

    fn exec(&self, id: &SandboxId, command: &Command) -> Result<ExecutionResult, SandboxError> {
        self.check(id)?;
        let (mut stdout, mut stderr) = (Vec::new(), Vec::new());
        let ended = self.run(command, &mut |way, bytes| {
            let said: &mut Vec<u8> = match way {
                Way::Stdout => &mut stdout,
                Way::Stderr => &mut stderr,
            };
            said.extend_from_slice(bytes);
            if said.len() > MOST_OUTPUT {
                Hearing::Enough
            } else {
                Hearing::More
            }
        })?;
        match ended {
            Ended::TimedOut => Err(SandboxError::TimedOut {
                after: command.timeout.unwrap_or(LONGEST),
                output: [stdout, stderr].concat(),
            }),
            Ended::Stopped => Err(SandboxError::TooMuchOutput(MOST_OUTPUT)),
            Ended::Code(exit_code) => Ok(ExecutionResult {
                exit_code,
                stdout,
                stderr,
            }),
        }
    }

    fn upload(
        &self,
        id: &SandboxId,
        to: &Path,
        archive: &mut dyn Read,
        bounds: &Transfer,
    ) -> Result<Moved, SandboxError> {
        self.check(id)?;
        // Read whole before anything is sent: half an archive changes nothing.
        let (stage, moved) = judge(archive, bounds)?;
        let mut packed = tempfile::tempfile().map_err(SandboxError::system("packing"))?;
        transfer::pack_members(stage.path(), &mut packed)?;
        packed
            .rewind()
            .map_err(SandboxError::system("reading the archive"))?;
        let name = script::fresh_name()?;
        let brought = self
            .bring(&name, &mut packed)
            .and_then(|()| self.must(&script::unpack(&name, to)?, "unpacking"));
        if brought.is_err() {
            let _ = self.must(&script::remove(&name), "clearing up");
        }
        brought.map(|()| moved)
    }

    fn download(
        &self,
        id: &SandboxId,
        from: &Path,
        archive: &mut dyn Write,
        bounds: &Transfer,
    ) -> Result<Moved, SandboxError> {
        self.check(id)?;
        let system = SandboxError::system("keeping what comes");
        let mut kept = tempfile::tempfile().map_err(system)?;
        let most = bounds
            .bytes
            .saturating_add(bounds.entries.saturating_mul(PER_ENTRY));
        let script = script::pack(from)?;
        let mut decoder = Decoder::default();
        let (mut stderr, mut trouble, mut total) = (Vec::new(), None, 0_u64);
        let ended = self
            .tools
            .run(&script.line, TRANSFER, &mut |way, bytes| {
                if way == Way::Stderr {
                    let room = LONGEST_REFUSAL
                        .saturating_sub(stderr.len())
                        .min(bytes.len());
                    stderr.extend_from_slice(bytes.get(..room).unwrap_or_default());
                    return Hearing::More;
                }
                let written = decoder.take(bytes).and_then(|bytes| {
                    total = total.saturating_add(bytes.len() as u64);
                    kept.write_all(&bytes)
                        .map_err(SandboxError::system("keeping what comes"))
                });
                if total > most && trouble.is_none() {
                    trouble = Some(TransferError::TooLarge(bounds.bytes).into());
                }
                if let Err(error) = written {
                    trouble = Some(error);
                }
                if trouble.is_some() {
                    Hearing::Enough
                } else {
                    Hearing::More
                }
            })
            .map_err(SandboxError::Silent)?;
        if let Some(trouble) = trouble {
            return Err(trouble);
        }
        if let Ended::Code(code) = ended
            && script.refused(code, &stderr).is_some()
        {
            let path = from.to_string_lossy().into_owned();
            return Err(TransferError::Missing(path).into());
        }
        if ended != Ended::Code(0) {
            let said = String::from_utf8_lossy(&stderr);
            return Err(SandboxError::Silent(format!("packing: {}", said.trim())));
        }
        kept.rewind()
            .map_err(SandboxError::system("reading the archive"))?;
        let (stage, _) = judge(&mut kept, bounds)?;
        Ok(transfer::pack_members(stage.path(), archive)?)
    }

    fn listeners(&self, id: &SandboxId) -> Result<Vec<Listener>, SandboxError> {
        Err(self.elsewhere(id, "given a network"))
    }

    fn status(&self, id: &SandboxId) -> SandboxStatus {
        if self.check(id).is_err() {
            return SandboxStatus::Missing;
        }
        match self.tools.health() {
            Ok(()) => SandboxStatus::Active,
            Err(reason) => SandboxStatus::Error(reason),
        }
    }
}

/// Unpacks an archive aside: what is not refused there is whole and within its bounds.
fn judge(
    archive: &mut dyn Read,
    bounds: &Transfer,
) -> Result<(tempfile::TempDir, Moved), SandboxError> {
    let stage = tempfile::tempdir().map_err(SandboxError::system("making a directory"))?;
    let moved = transfer::unpack(archive, stage.path(), bounds, &Rules::FOR_SANDBOX)?;
    Ok((stage, moved))
}

/// Base64 with line ends, as it comes.
#[derive(Default)]
struct Decoder {
    rest: Vec<u8>,
}

impl Decoder {
    fn take(&mut self, bytes: &[u8]) -> Result<Vec<u8>, SandboxError> {
        let text = bytes.iter().filter(|byte| !byte.is_ascii_whitespace());
        self.rest.extend(text);
        let whole = self.rest.len() - self.rest.len() % 4;
        let rest = self.rest.split_off(whole);
        let text = std::mem::replace(&mut self.rest, rest);
        STANDARD
            .decode(text)
            .map_err(|error| TransferError::Malformed(error.to_string()).into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn base64_comes_in_any_pieces() {
        let all: Vec<u8> = (0..=255).collect();
        let text = STANDARD.encode(&all);
        for size in 1..9 {
            let mut decoder = Decoder::default();
            let mut out = Vec::new();
            for piece in text.as_bytes().chunks(size) {
                out.extend(decoder.take(piece).unwrap());
                out.extend(decoder.take(b"\n").unwrap());
            }
            assert_eq!(out, all);
        }
        assert!(Decoder::default().take(b"????").is_err());
    }
}
