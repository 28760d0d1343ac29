//! bash: runs a command under the process guard and streams its output.

use std::borrow::Cow;
use std::ffi::OsString;
use std::io;
use std::path::Path;
use std::process::{ExitStatus, Stdio};
use std::time::Duration;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde::{Deserialize, Serialize};
use tokio::net::unix::pipe;
use tokio::process::{Child, Command};
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

use crate::error::ToolError;
use crate::request::{BashRequest, DEFAULT_TIMEOUT};
use crate::root::WorkspaceRoot;
use crate::truncation::{Tail, Truncation};

/// Buffer size for reading the output of a command.
const READ_SIZE: usize = 32 * 1024;

/// Maximum number of queued output chunks per command. A full queue blocks the command until the
/// client reads.
const MAX_QUEUED_CHUNKS: usize = 4;

/// Maximum number of bytes that are read after the command has exited, if a background process
/// keeps writing.
const MAX_AFTER_EXIT: usize = 1 << 20;

/// Maximum timeout of a command.
const MAX_TIMEOUT: Duration = Duration::from_secs(7 * 24 * 60 * 60);

/// The variable with the server's token, which commands do not inherit.
pub const TOKEN_VARIABLE: &str = "SIDECAR_AUTH_TOKEN";

/// The process guard that every command runs under; see `palisade __leash`. The guard ends the
/// command and its child processes.
#[derive(Clone, Debug)]
pub struct GuardProgram {
    /// The program and its first arguments.
    pub argv: Vec<OsString>,
    /// Ends all commands when it is cancelled.
    pub stop: CancellationToken,
}

/// The output stream of a command.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum CommandStream {
    /// Standard output.
    Stdout,
    /// Standard error.
    Stderr,
}

/// A piece of output.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum OutputChunk {
    /// UTF-8 text; characters are never split.
    Text(String),
    /// Bytes that are not UTF-8.
    Bytes(Vec<u8>),
}

/// An event of a running command.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CommandEvent {
    /// The command wrote output.
    Output(CommandStream, OutputChunk),
    /// The command has exited.
    Done {
        /// The exit code; -1 if the command was killed.
        exit_code: i32,
        /// Whether the command was killed by its timeout.
        timed_out: bool,
    },
    /// The command failed for this reason.
    Failed(String),
}

/// A running command. Dropping it ends the command and its child processes.
#[derive(Debug)]
pub struct RunningShell {
    events: mpsc::Receiver<CommandEvent>,
}

/// The result of a command with the tail of its output.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct BashResult {
    /// Whether the exit code is 0.
    pub ok: bool,
    /// The tail of standard output and standard error in their order.
    pub output: String,
    /// The tail of standard output.
    pub stdout: String,
    /// The tail of standard error.
    pub stderr: String,
    /// The exit code; -1 if the command was killed.
    pub exit_code: i32,
    /// Whether the command was killed by its timeout.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub timed_out: bool,
    /// How `output` was truncated; `stdout` and `stderr` have the same limits.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub truncation: Option<Truncation>,
}

impl RunningShell {
    /// The next event; `None` after the last one.
    pub async fn next(&mut self) -> Option<CommandEvent> {
        self.events.recv().await
    }

    /// Polls for the next event.
    pub fn poll_next(
        &mut self,
        context: &mut std::task::Context<'_>,
    ) -> std::task::Poll<Option<CommandEvent>> {
        self.events.poll_recv(context)
    }

    /// Waits for the end of the command and returns the tail of its output.
    pub async fn finish(mut self) -> Result<BashResult, ToolError> {
        let mut collected = OutputTail::default();
        while let Some(event) = self.next().await {
            match event {
                CommandEvent::Output(stream, chunk) => collected.push(stream, &chunk),
                CommandEvent::Done {
                    exit_code,
                    timed_out,
                } => return Ok(collected.result(exit_code, timed_out)),
                CommandEvent::Failed(why) => return Err(ToolError::StartFailed(why)),
            }
        }
        Err(ToolError::Internal)
    }
}

/// Starts the command of a request.
pub(super) fn start(
    root: &WorkspaceRoot,
    guard: &GuardProgram,
    request: &BashRequest,
) -> Result<RunningShell, ToolError> {
    let seconds = request.timeout_seconds.unwrap_or(DEFAULT_TIMEOUT);
    let timeout = Duration::try_from_secs_f64(seconds)
        .unwrap_or(MAX_TIMEOUT)
        .min(MAX_TIMEOUT);
    let failed = |error: io::Error| ToolError::StartFailed(error.to_string());
    let mut args = guard.argv.iter();
    let program = args
        .next()
        .ok_or_else(|| ToolError::StartFailed("no process guard is configured".to_owned()))?;
    let mut child = Command::new(program)
        .args(args)
        .args(["--parent", &std::process::id().to_string()])
        .args(["--leave-rest", "--", shell(), "-c"])
        .arg(&request.command)
        .current_dir(root.path())
        .env_remove(TOKEN_VARIABLE)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .map_err(failed)?;
    let pipes = child.stdout.take().zip(child.stderr.take());
    let (output, stderr) = pipes.ok_or_else(|| {
        ToolError::StartFailed("the output pipes of the command are missing".to_owned())
    })?;
    let output = output
        .into_owned_fd()
        .and_then(pipe::Receiver::from_owned_fd);
    let stderr = stderr
        .into_owned_fd()
        .and_then(pipe::Receiver::from_owned_fd);
    let (output, stderr) = (output.map_err(failed)?, stderr.map_err(failed)?);
    let (sender, events) = mpsc::channel(MAX_QUEUED_CHUNKS);
    let task = CommandTask {
        child,
        output,
        stderr,
        timeout,
        stop: guard.stop.clone(),
    };
    tokio::spawn(task.supervise(sender));
    Ok(RunningShell { events })
}

/// The path of bash if it is installed, else of sh.
fn shell() -> &'static str {
    let bash = ["/bin/bash", "/usr/bin/bash"];
    bash.into_iter()
        .find(|shell| Path::new(shell).exists())
        .unwrap_or("/bin/sh")
}

/// The task that supervises one command.
struct CommandTask {
    child: Child,
    output: pipe::Receiver,
    stderr: pipe::Receiver,
    timeout: Duration,
    stop: CancellationToken,
}

/// Why a command ended.
enum EndReason {
    Exited(io::Result<ExitStatus>),
    TimedOut,
    ClientGone,
    Stopped,
}

impl CommandTask {
    /// Relays output until the command ends. Child processes are ended with the command, unless it
    /// exited by itself.
    async fn supervise(mut self, to: mpsc::Sender<CommandEvent>) {
        let ended = CancellationToken::new();
        let relays = [
            tokio::spawn(relay(
                self.output,
                CommandStream::Stdout,
                to.clone(),
                ended.clone(),
            )),
            tokio::spawn(relay(
                self.stderr,
                CommandStream::Stderr,
                to.clone(),
                ended.clone(),
            )),
        ];
        let reason = tokio::select! {
            status = self.child.wait() => EndReason::Exited(status),
            () = tokio::time::sleep(self.timeout) => EndReason::TimedOut,
            () = to.closed() => EndReason::ClientGone,
            () = self.stop.cancelled() => EndReason::Stopped,
        };
        if !matches!(reason, EndReason::Exited(_)) {
            end_command(&mut self.child).await;
        }
        ended.cancel();
        for relay in relays {
            let _ = relay.await;
        }
        let last = match reason {
            EndReason::Exited(Ok(status)) => CommandEvent::Done {
                exit_code: status.code().unwrap_or(-1),
                timed_out: false,
            },
            EndReason::Exited(Err(error)) => CommandEvent::Failed(error.to_string()),
            EndReason::TimedOut => CommandEvent::Done {
                exit_code: -1,
                timed_out: true,
            },
            EndReason::ClientGone => return,
            EndReason::Stopped => CommandEvent::Failed("the workbench was stopped".to_owned()),
        };
        let _ = to.send(last).await;
    }
}

/// Ends the command by a signal to its process guard, and waits for the guard.
async fn end_command(child: &mut Child) {
    if let Some(pid) = child.id().and_then(|id| i32::try_from(id).ok()) {
        let _ = kill(Pid::from_raw(pid), Signal::SIGTERM);
    }
    if let Err(error) = child.wait().await {
        tracing::warn!(%error, "waiting for the command's process guard failed");
    }
}

/// Relays output until the pipe closes, or until the command has exited and the pipe is empty.
async fn relay(
    from: pipe::Receiver,
    stream: CommandStream,
    to: mpsc::Sender<CommandEvent>,
    ended: CancellationToken,
) {
    let mut buffer = vec![0; READ_SIZE];
    let mut text = Utf8Splitter::default();
    let mut left = MAX_AFTER_EXIT;
    while left > 0 {
        let exited = ended.is_cancelled();
        if !exited {
            tokio::select! {
                ready = from.readable() => if ready.is_err() { break },
                () = ended.cancelled() => continue,
            }
        }
        let length = match from.try_read(&mut buffer) {
            Ok(0) => break,
            Ok(length) => length,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock && !exited => continue,
            Err(_) => break,
        };
        if exited {
            left = left.saturating_sub(length);
        }
        let chunk = text.push(buffer.get(..length).unwrap_or_default());
        if let Some(chunk) = chunk
            && to.send(CommandEvent::Output(stream, chunk)).await.is_err()
        {
            return;
        }
    }
    if let Some(chunk) = text.finish() {
        let _ = to.send(CommandEvent::Output(stream, chunk)).await;
    }
}

/// Splits a byte stream into text chunks at character boundaries.
#[derive(Debug, Default)]
struct Utf8Splitter {
    /// The first bytes of an incomplete character.
    incomplete: Vec<u8>,
}

impl Utf8Splitter {
    /// Appends bytes and returns the next chunk, if there is a complete character.
    fn push(&mut self, bytes: &[u8]) -> Option<OutputChunk> {
        let mut all = std::mem::take(&mut self.incomplete);
        all.extend_from_slice(bytes);
        match String::from_utf8(all) {
            Ok(text) => (!text.is_empty()).then_some(OutputChunk::Text(text)),
            Err(error) => {
                let (valid, is_incomplete) = {
                    let error = error.utf8_error();
                    (error.valid_up_to(), error.error_len().is_none())
                };
                let mut all = error.into_bytes();
                if !is_incomplete {
                    return Some(OutputChunk::Bytes(all));
                }
                self.incomplete = all.split_off(valid);
                match String::from_utf8(all) {
                    Ok(text) => (!text.is_empty()).then_some(OutputChunk::Text(text)),
                    Err(error) => Some(OutputChunk::Bytes(error.into_bytes())),
                }
            }
        }
    }

    /// The bytes of an incomplete character at the end.
    fn finish(self) -> Option<OutputChunk> {
        (!self.incomplete.is_empty()).then_some(OutputChunk::Bytes(self.incomplete))
    }
}

/// The tail of the output: both streams in their order, and each stream separately.
#[derive(Debug, Default)]
pub(crate) struct OutputTail {
    output: Tail,
    stdout: Tail,
    stderr: Tail,
}

impl OutputTail {
    /// Appends a chunk.
    pub(crate) fn push(&mut self, stream: CommandStream, chunk: &OutputChunk) {
        let text = match chunk {
            OutputChunk::Text(text) => Cow::Borrowed(text.as_str()),
            OutputChunk::Bytes(bytes) => String::from_utf8_lossy(bytes),
        };
        self.output.push(&text);
        match stream {
            CommandStream::Stdout => self.stdout.push(&text),
            CommandStream::Stderr => self.stderr.push(&text),
        }
    }

    /// The result of the ended command.
    pub(crate) fn result(self, exit_code: i32, timed_out: bool) -> BashResult {
        let (output, truncation) = self.output.truncate();
        let ((stdout, _), (stderr, _)) = (self.stdout.truncate(), self.stderr.truncate());
        BashResult {
            ok: exit_code == 0,
            output,
            stdout,
            stderr,
            exit_code,
            timed_out,
            truncation,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn split(chunks: &[Vec<u8>]) -> Vec<OutputChunk> {
        let mut text = Utf8Splitter::default();
        let mut chunk: Vec<OutputChunk> =
            chunks.iter().filter_map(|chunk| text.push(chunk)).collect();
        chunk.extend(text.finish());
        chunk
    }

    #[test]
    fn characters_are_never_split() {
        let chunks: Vec<Vec<u8>> = "aä€😀".bytes().map(|byte| vec![byte]).collect();
        let texts = ["a", "ä", "€", "😀"].map(|text| OutputChunk::Text(text.to_owned()));
        assert_eq!(split(&chunks), texts);
    }

    #[test]
    fn invalid_utf8_is_returned_as_bytes() {
        assert_eq!(
            split(&[b"a".to_vec(), b"b\xffc".to_vec(), b"\xe2\x82".to_vec()]),
            [
                OutputChunk::Text("a".to_owned()),
                OutputChunk::Bytes(b"b\xffc".to_vec()),
                OutputChunk::Bytes(b"\xe2\x82".to_vec())
            ]
        );
    }

    proptest! {
        #[test]
        fn chunks_concatenate_to_the_input(
            chunks in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..9), 0..9)
        ) {
            let out: Vec<u8> = split(&chunks)
                .into_iter()
                .flat_map(|chunk| match chunk {
                    OutputChunk::Text(text) => text.into_bytes(),
                    OutputChunk::Bytes(bytes) => bytes,
                })
                .collect();
            prop_assert_eq!(out, chunks.concat());
        }
    }
}
