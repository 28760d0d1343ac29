//! bash: a command on a leash, and what it says as it says it.

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

/// What is read from a command at once.
const READ_SIZE: usize = 32 * 1024;

/// Chunks that wait for a slow client, per command. When they are full the command waits.
const MAX_QUEUED_CHUNKS: usize = 4;

/// What is still read when a command has ended but something it left behind goes on talking.
const MAX_AFTER_EXIT: usize = 1 << 20;

/// The longest time-out.
const MAX_TIMEOUT: Duration = Duration::from_secs(7 * 24 * 60 * 60);

/// The variable with the server's secret, which no command gets to see.
pub const TOKEN_VARIABLE: &str = "SIDECAR_AUTH_TOKEN";

/// The program that holds commands, with the arguments that make it do so; see
/// `palisade __leash`.
#[derive(Clone, Debug)]
pub struct GuardProgram {
    /// The program and its first arguments.
    pub argv: Vec<OsString>,
    /// When everything it holds is to end.
    pub stop: CancellationToken,
}

/// Which way it came out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum CommandStream {
    /// Output.
    Stdout,
    /// Error output.
    Stderr,
}

/// What a command said.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum OutputChunk {
    /// Text; a character is never parted.
    Text(String),
    /// What is no text.
    Bytes(Vec<u8>),
}

/// What happens to a command.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CommandEvent {
    /// It said something.
    Output(CommandStream, OutputChunk),
    /// It has ended.
    Done {
        /// With this code; -1 when it was killed.
        exit_code: i32,
        /// Because its time was over.
        timed_out: bool,
    },
    /// It could not go on, for this reason.
    Failed(String),
}

/// A command that runs. Dropping this ends it, with everything it started.
#[derive(Debug)]
pub struct RunningCommand {
    events: mpsc::Receiver<CommandEvent>,
}

/// What came of a command: the end of what it said.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct BashResult {
    /// Whether its code was 0.
    pub ok: bool,
    /// The last of its output and error output, as they came.
    pub output: String,
    /// The last of its output.
    pub stdout: String,
    /// The last of its error output.
    pub stderr: String,
    /// Its code; -1 when it was killed.
    pub exit_code: i32,
    /// Whether its time was over.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub timed_out: bool,
    /// What was cut from `output`; the streams by themselves have the same limits.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub truncation: Option<Truncation>,
}

impl RunningCommand {
    /// What happens next; nothing after it has ended.
    pub async fn next(&mut self) -> Option<CommandEvent> {
        self.events.recv().await
    }

    /// The same for who polls.
    pub fn poll_next(
        &mut self,
        context: &mut std::task::Context<'_>,
    ) -> std::task::Poll<Option<CommandEvent>> {
        self.events.poll_recv(context)
    }

    /// Waits for the end, and keeps the last of what was said.
    pub async fn finish(mut self) -> Result<BashResult, ToolError> {
        let mut collected = OutputTail::default();
        while let Some(event) = self.next().await {
            match event {
                CommandEvent::Output(stream, chunk) => collected.push(stream, &chunk),
                CommandEvent::Done {
                    exit_code,
                    timed_out,
                } => return Ok(collected.result(exit_code, timed_out)),
                CommandEvent::Failed(why) => return Err(ToolError::Start(why)),
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
) -> Result<RunningCommand, ToolError> {
    let seconds = request.timeout_seconds.unwrap_or(DEFAULT_TIMEOUT);
    let timeout = Duration::try_from_secs_f64(seconds)
        .unwrap_or(MAX_TIMEOUT)
        .min(MAX_TIMEOUT);
    let failed = |error: io::Error| ToolError::Start(error.to_string());
    let mut args = guard.argv.iter();
    let program = args
        .next()
        .ok_or_else(|| ToolError::Start("there is no leash".to_owned()))?;
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
    let ends = child.stdout.take().zip(child.stderr.take());
    let (output, stderr) = ends.ok_or_else(|| ToolError::Start("it has no output".to_owned()))?;
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
    Ok(RunningCommand { events })
}

/// The shell people expect, where there is one.
fn shell() -> &'static str {
    let bash = ["/bin/bash", "/usr/bin/bash"];
    bash.into_iter()
        .find(|shell| Path::new(shell).exists())
        .unwrap_or("/bin/sh")
}

/// A command and what is known about its end.
struct CommandTask {
    child: Child,
    output: pipe::Receiver,
    stderr: pipe::Receiver,
    timeout: Duration,
    stop: CancellationToken,
}

/// Why it ended.
enum EndReason {
    Exited(io::Result<ExitStatus>),
    TimedOut,
    ClientGone,
    Stopped,
}

impl CommandTask {
    /// From the start to the end; nothing it started is left when this is over, unless it
    /// ended by itself.
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
            end(&mut self.child).await;
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

/// Tells the leash to end everything, and waits until it has.
async fn end(child: &mut Child) {
    if let Some(pid) = child.id().and_then(|id| i32::try_from(id).ok()) {
        let _ = kill(Pid::from_raw(pid), Signal::SIGTERM);
    }
    if let Err(error) = child.wait().await {
        tracing::warn!(%error, "a command's end was not seen");
    }
}

/// Passes on what comes out until it closes, or until the command has ended and nothing more
/// is there.
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
        let chunk = text.take(buffer.get(..length).unwrap_or_default());
        if let Some(chunk) = chunk
            && to.send(CommandEvent::Output(stream, chunk)).await.is_err()
        {
            return;
        }
    }
    if let Some(chunk) = text.rest() {
        let _ = to.send(CommandEvent::Output(stream, chunk)).await;
    }
}

/// Bytes that become text where they are text.
#[derive(Debug, Default)]
struct Utf8Splitter {
    /// The beginning of a character whose end has not come.
    begun: Vec<u8>,
}

impl Utf8Splitter {
    fn take(&mut self, bytes: &[u8]) -> Option<OutputChunk> {
        let mut all = std::mem::take(&mut self.begun);
        all.extend_from_slice(bytes);
        match String::from_utf8(all) {
            Ok(text) => (!text.is_empty()).then_some(OutputChunk::Text(text)),
            Err(error) => {
                let (valid, is_begun) = {
                    let error = error.utf8_error();
                    (error.valid_up_to(), error.error_len().is_none())
                };
                let mut all = error.into_bytes();
                if !is_begun {
                    return Some(OutputChunk::Bytes(all));
                }
                self.begun = all.split_off(valid);
                match String::from_utf8(all) {
                    Ok(text) => (!text.is_empty()).then_some(OutputChunk::Text(text)),
                    Err(error) => Some(OutputChunk::Bytes(error.into_bytes())),
                }
            }
        }
    }

    fn rest(self) -> Option<OutputChunk> {
        (!self.begun.is_empty()).then_some(OutputChunk::Bytes(self.begun))
    }
}

/// The last of what a command wrote: all of it in its order, and each stream by itself.
#[derive(Debug, Default)]
pub(crate) struct OutputTail {
    output: Tail,
    stdout: Tail,
    stderr: Tail,
}

impl OutputTail {
    /// Adds to it.
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

    /// The whole, when the command has ended.
    pub(crate) fn result(self, exit_code: i32, timed_out: bool) -> BashResult {
        let (output, truncation) = self.output.cut();
        let ((stdout, _), (stderr, _)) = (self.stdout.cut(), self.stderr.cut());
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

    fn pass(chunks: &[Vec<u8>]) -> Vec<OutputChunk> {
        let mut text = Utf8Splitter::default();
        let mut chunk: Vec<OutputChunk> =
            chunks.iter().filter_map(|chunk| text.take(chunk)).collect();
        chunk.extend(text.rest());
        chunk
    }

    #[test]
    fn a_character_is_never_parted() {
        let chunks: Vec<Vec<u8>> = "aä€😀".bytes().map(|byte| vec![byte]).collect();
        let texts = ["a", "ä", "€", "😀"].map(|text| OutputChunk::Text(text.to_owned()));
        assert_eq!(pass(&chunks), texts);
    }

    #[test]
    fn what_is_no_text_is_bytes() {
        assert_eq!(
            pass(&[b"a".to_vec(), b"b\xffc".to_vec(), b"\xe2\x82".to_vec()]),
            [
                OutputChunk::Text("a".to_owned()),
                OutputChunk::Bytes(b"b\xffc".to_vec()),
                OutputChunk::Bytes(b"\xe2\x82".to_vec())
            ]
        );
    }

    proptest! {
        #[test]
        fn every_byte_comes_out_as_it_went_in(
            chunks in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..9), 0..9)
        ) {
            let out: Vec<u8> = pass(&chunks)
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
