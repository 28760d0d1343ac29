//! The remote backend: one container that is managed elsewhere, reached through the workbench
//! inside it.
//!
//! There is exactly one sandbox, with a fixed name. Commands, uploads and downloads work; creating,
//! pausing and deleting return [`SandboxError::ManagedExternally`]. Files are transferred as
//! archives through the container's shell, which needs `base64` and `tar`; a downloaded archive is
//! unpacked and checked in a temporary directory first.

mod script;

use std::io::{Read, Seek, Write};
use std::ops::ControlFlow;
use std::path::Path;
use std::time::Duration;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use policy::id::SandboxId;

use crate::contract::{
    ExecutionResult, Force, SandboxBackend, SandboxCommand, SandboxConfig, SandboxError,
    SandboxListener, SandboxMetadata, SandboxStatus, TransferBounds, TransferSummary,
};
use crate::transfer::{self, TransferError, UnpackRules};
use script::{Script, StartRefusal};

/// Maximum output of a command before it is killed.
const MAX_OUTPUT_BYTES: usize = 64 << 20;

/// Timeout of a command without a timeout of its own.
const DEFAULT_TIMEOUT: Duration = Duration::from_secs(7 * 24 * 60 * 60);

/// Timeout of a script that transfers files.
const TRANSFER_TIMEOUT: Duration = Duration::from_secs(60 * 60);

/// Bytes of an archive in one request; base64 adds a third.
const CHUNK_BYTES: usize = 6 << 20;

/// Maximum bytes kept of a script's error output.
const MAX_REFUSAL_BYTES: usize = 4096;

/// Maximum overhead of an archive for each entry.
const MAX_ENTRY_OVERHEAD_BYTES: u64 = 4096;

/// The stream that a command wrote to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OutputStream {
    /// Standard output.
    Stdout,
    /// Standard error.
    Stderr,
}

/// How a remote command ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CommandEnd {
    /// The command exited with this code.
    Code(i32),
    /// The command timed out.
    TimedOut,
    /// The caller stopped the command.
    Stopped,
}

/// The container's tools that the backend uses. Calls block.
pub trait RemoteTools: Send + Sync + std::fmt::Debug {
    /// Checks that the container responds.
    fn health(&self) -> Result<(), String>;

    /// Runs a shell command in the workspace and passes its output to `on_output`, which may stop
    /// it. The command must be short: the kernel limits one argument to 128 KiB.
    fn run(
        &self,
        line: &str,
        timeout: Duration,
        on_output: &mut dyn FnMut(OutputStream, &[u8]) -> ControlFlow<()>,
    ) -> Result<CommandEnd, String>;

    /// Writes a text file in the workspace.
    fn write(&self, path: &str, content: &str) -> Result<(), String>;
}

/// A container that is managed elsewhere.
#[derive(Debug)]
pub struct RemoteBackend<T> {
    id: SandboxId,
    tools: T,
}

impl<T: RemoteTools> RemoteBackend<T> {
    /// A backend for the container behind `tools`, with this name.
    pub fn new(id: SandboxId, tools: T) -> Self {
        Self { id, tools }
    }

    /// The sandbox's id.
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

    fn managed_externally_error(&self, id: &SandboxId, what: &'static str) -> SandboxError {
        match self.check(id) {
            Ok(()) => SandboxError::ManagedExternally(what),
            Err(error) => error,
        }
    }

    /// Runs a command and passes its output to `on_output` as it arrives.
    pub fn run(
        &self,
        command: &SandboxCommand,
        on_output: &mut dyn FnMut(OutputStream, &[u8]) -> ControlFlow<()>,
    ) -> Result<CommandEnd, SandboxError> {
        let name = script::random_name()?;
        let input = (!command.stdin.is_empty()).then_some(name.as_str());
        let script = Script::for_command(command, input, &name)?;
        if let Some(name) = input {
            self.upload_bytes(name, &mut command.stdin.as_slice())?;
        }
        let timeout = command.timeout.unwrap_or(DEFAULT_TIMEOUT);
        // The start of the error output is buffered while it may be a refusal of the script.
        let mut buffered_stderr = Some(Vec::new());
        let end = self
            .tools
            .run(&script.line, timeout, &mut |stream, bytes| {
                if stream == OutputStream::Stderr
                    && let Some(first) = &mut buffered_stderr
                {
                    first.extend_from_slice(bytes);
                    if script.may_be_refusal_prefix(first) && first.len() < MAX_REFUSAL_BYTES {
                        return ControlFlow::Continue(());
                    }
                    let first = buffered_stderr.take().unwrap_or_default();
                    return on_output(stream, &first);
                }
                on_output(stream, bytes)
            })
            .map_err(SandboxError::NotResponding)?;
        let buffered_stderr = buffered_stderr.unwrap_or_default();
        if let CommandEnd::Code(code) = end
            && let Some(StartRefusal { step, reason }) =
                script.start_refusal(code, &buffered_stderr)
        {
            return Err(SandboxError::Start {
                program: script.program,
                step,
                reason,
            });
        }
        if !buffered_stderr.is_empty() {
            let _ = on_output(OutputStream::Stderr, &buffered_stderr);
        }
        Ok(end)
    }

    /// Runs an internal script; fails unless it exits with 0.
    fn run_checked(&self, script: &Script, doing: &str) -> Result<(), SandboxError> {
        let mut output = Vec::new();
        let end = self
            .tools
            .run(&script.line, TRANSFER_TIMEOUT, &mut |_, bytes| {
                let length = MAX_REFUSAL_BYTES
                    .saturating_sub(output.len())
                    .min(bytes.len());
                output.extend_from_slice(bytes.get(..length).unwrap_or_default());
                ControlFlow::Continue(())
            })
            .map_err(SandboxError::NotResponding)?;
        if end == CommandEnd::Code(0) {
            return Ok(());
        }
        let output = String::from_utf8_lossy(&output);
        Err(SandboxError::NotResponding(format!(
            "{doing} failed: {}",
            output.trim()
        )))
    }

    /// Writes bytes to a file of the workspace, one chunk at a time.
    fn upload_bytes(&self, name: &str, bytes: &mut dyn Read) -> Result<(), SandboxError> {
        let part = format!("{name}.part");
        let mut piece = Vec::new();
        loop {
            piece.clear();
            let length = bytes
                .take(CHUNK_BYTES as u64)
                .read_to_end(&mut piece)
                .map_err(SandboxError::system("reading the archive"))?;
            if length == 0 {
                return Ok(());
            }
            self.tools
                .write(&part, &STANDARD.encode(&piece))
                .map_err(SandboxError::NotResponding)?;
            self.run_checked(&script::append(&part, name), "uploading files")?;
        }
    }
}

impl<T: RemoteTools> SandboxBackend for RemoteBackend<T> {
    fn create(&self, _: &SandboxConfig) -> Result<SandboxMetadata, SandboxError> {
        Err(SandboxError::ManagedExternally("created"))
    }

    fn pause(&self, id: &SandboxId) -> Result<(), SandboxError> {
        Err(self.managed_externally_error(id, "paused"))
    }

    fn resume(&self, id: &SandboxId) -> Result<(), SandboxError> {
        Err(self.managed_externally_error(id, "resumed"))
    }

    fn delete(&self, id: &SandboxId, _: Force) -> Result<(), SandboxError> {
        Err(self.managed_externally_error(id, "deleted"))
    }

    fn exec(
        &self,
        id: &SandboxId,
        command: &SandboxCommand,
    ) -> Result<ExecutionResult, SandboxError> {
        self.check(id)?;
        let (mut stdout, mut stderr) = (Vec::new(), Vec::new());
        let end = self.run(command, &mut |stream, bytes| {
            let output: &mut Vec<u8> = match stream {
                OutputStream::Stdout => &mut stdout,
                OutputStream::Stderr => &mut stderr,
            };
            output.extend_from_slice(bytes);
            if output.len() > MAX_OUTPUT_BYTES {
                ControlFlow::Break(())
            } else {
                ControlFlow::Continue(())
            }
        })?;
        match end {
            CommandEnd::TimedOut => Err(SandboxError::TimedOut {
                after: command.timeout.unwrap_or(DEFAULT_TIMEOUT),
                output: [stdout, stderr].concat(),
            }),
            CommandEnd::Stopped => Err(SandboxError::TooMuchOutput(MAX_OUTPUT_BYTES)),
            CommandEnd::Code(exit_code) => Ok(ExecutionResult {
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
        bounds: &TransferBounds,
    ) -> Result<TransferSummary, SandboxError> {
        self.check(id)?;
        // The whole archive is read before anything is sent, so that a truncated archive changes
        // nothing.
        let (stage, summary) = unpack_to_stage(archive, bounds)?;
        let mut packed =
            tempfile::tempfile().map_err(SandboxError::system("creating the archive"))?;
        transfer::pack_members(stage.path(), &mut packed)?;
        packed
            .rewind()
            .map_err(SandboxError::system("reading the archive"))?;
        let name = script::random_name()?;
        let result = self
            .upload_bytes(&name, &mut packed)
            .and_then(|()| self.run_checked(&script::unpack(&name, to)?, "unpacking the archive"));
        if result.is_err() {
            let _ = self.run_checked(&script::remove(&name), "removing the uploaded archive");
        }
        result.map(|()| summary)
    }

    fn download(
        &self,
        id: &SandboxId,
        from: &Path,
        archive: &mut dyn Write,
        bounds: &TransferBounds,
    ) -> Result<TransferSummary, SandboxError> {
        self.check(id)?;
        let system = SandboxError::system("storing the archive");
        let mut stored = tempfile::tempfile().map_err(system)?;
        let max_bytes = bounds
            .bytes
            .saturating_add(bounds.entries.saturating_mul(MAX_ENTRY_OVERHEAD_BYTES));
        let script = script::pack(from)?;
        let mut decoder = Decoder::default();
        let (mut stderr, mut failure, mut total) = (Vec::new(), None, 0_u64);
        let end = self
            .tools
            .run(&script.line, TRANSFER_TIMEOUT, &mut |stream, bytes| {
                if stream == OutputStream::Stderr {
                    let length = MAX_REFUSAL_BYTES
                        .saturating_sub(stderr.len())
                        .min(bytes.len());
                    stderr.extend_from_slice(bytes.get(..length).unwrap_or_default());
                    return ControlFlow::Continue(());
                }
                let written = decoder.decode(bytes).and_then(|bytes| {
                    total = total.saturating_add(bytes.len() as u64);
                    stored
                        .write_all(&bytes)
                        .map_err(SandboxError::system("storing the archive"))
                });
                if total > max_bytes && failure.is_none() {
                    failure = Some(TransferError::TooLarge(bounds.bytes).into());
                }
                if let Err(error) = written {
                    failure = Some(error);
                }
                if failure.is_some() {
                    ControlFlow::Break(())
                } else {
                    ControlFlow::Continue(())
                }
            })
            .map_err(SandboxError::NotResponding)?;
        if let Some(failure) = failure {
            return Err(failure);
        }
        if let CommandEnd::Code(code) = end
            && script.start_refusal(code, &stderr).is_some()
        {
            let path = from.to_string_lossy().into_owned();
            return Err(TransferError::Missing(path).into());
        }
        if end != CommandEnd::Code(0) {
            let output = String::from_utf8_lossy(&stderr);
            return Err(SandboxError::NotResponding(format!(
                "packing '{}' failed: {}",
                from.display(),
                output.trim()
            )));
        }
        stored
            .rewind()
            .map_err(SandboxError::system("reading the archive"))?;
        let (stage, _) = unpack_to_stage(&mut stored, bounds)?;
        Ok(transfer::pack_members(stage.path(), archive)?)
    }

    fn listeners(&self, id: &SandboxId) -> Result<Vec<SandboxListener>, SandboxError> {
        Err(self.managed_externally_error(id, "given a network"))
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

/// Unpacks an archive to a temporary directory, which checks its members and bounds.
fn unpack_to_stage(
    archive: &mut dyn Read,
    bounds: &TransferBounds,
) -> Result<(tempfile::TempDir, TransferSummary), SandboxError> {
    let stage = tempfile::tempdir().map_err(SandboxError::system("making a directory"))?;
    let summary = transfer::unpack(archive, stage.path(), bounds, &UnpackRules::FOR_SANDBOX)?;
    Ok((stage, summary))
}

/// Incremental base64 decoder that ignores line ends.
#[derive(Default)]
struct Decoder {
    rest: Vec<u8>,
}

impl Decoder {
    fn decode(&mut self, bytes: &[u8]) -> Result<Vec<u8>, SandboxError> {
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
    fn base64_decodes_in_any_chunks() {
        let all: Vec<u8> = (0..=255).collect();
        let text = STANDARD.encode(&all);
        for size in 1..9 {
            let mut decoder = Decoder::default();
            let mut out = Vec::new();
            for piece in text.as_bytes().chunks(size) {
                out.extend(decoder.decode(piece).unwrap());
                out.extend(decoder.decode(b"\n").unwrap());
            }
            assert_eq!(out, all);
        }
        assert!(Decoder::default().decode(b"????").is_err());
    }
}
