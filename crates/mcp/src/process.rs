//! One running stdio server process: writes its input, reads its output, and matches responses to
//! calls.
//!
//! ```text
//!   callers ── send ──▶ writer ──▶ stdin │ server │ stdout ──▶ reader ─┬─ answers ──▶ the call
//!                                        │        │ stderr ──▶ the log └─ the rest ──▶ handler
//! ```
//!
//! The process ends when it is stopped, when its output ends, when its input can no longer be
//! written, when the gate stops ([`crate::shutdown`]), or by itself. In every case all open calls
//! receive an error at once.

use std::collections::HashMap;
use std::io;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use config::section::tools::RuntimeKind;
use tokio::io::{AsyncBufRead, AsyncBufReadExt, AsyncRead, AsyncWrite, AsyncWriteExt, BufReader};
use tokio::sync::{mpsc, oneshot, watch};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::launch::{LaunchedProgram, ProgramExit, ProgramHandle};
use crate::metrics::Metrics;
use crate::rpc::{self, MAX_MESSAGE_BYTES, RpcKind, RpcMessage};
use crate::shutdown::Shutdown;

/// Maximum number of lines queued for a server's input.
const MAX_QUEUED_LINES: usize = 64;

/// How long the output is still read after the program has ended. Without this limit a child
/// process that holds the output open would delay the end.
const OUTPUT_DRAIN_TIMEOUT: Duration = Duration::from_millis(200);

/// How long queued lines are still written after [`InputSignals::close`].
const INPUT_DRAIN_TIMEOUT: Duration = Duration::from_millis(100);

/// How long a sender waits for the outcome of its write. After that the line stays in the queue.
const WRITE_TIMEOUT: Duration = Duration::from_secs(2);

/// Maximum length of a logged stderr line, in bytes.
const MAX_LOG_LINE_BYTES: usize = 2048;

/// Receives the requests and notifications of a server.
#[async_trait]
pub trait MessageHandler: Send + Sync + 'static {
    /// Handles a request or notification of the server. The server's output is not read until this
    /// returns.
    async fn handle(&self, message: RpcMessage);
}

/// The server process has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the server ended{}", code.map(|code| format!(" with code {code}")).unwrap_or_default())]
pub struct ProcessEnded {
    /// The exit code, if it is known.
    pub code: ProgramExit,
}

/// Why a message was not sent.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SendError {
    /// The server ended before the message was written.
    #[error(transparent)]
    ProcessEnded(#[from] ProcessEnded),
    /// The server's input cannot be written. Its process is being stopped.
    #[error("writing to the server failed: {0}")]
    Write(String),
}

/// Names a process in logs and metrics.
#[derive(Clone, Debug)]
pub struct ProcessLabel {
    /// Name of the tool.
    pub tool: Arc<str>,
    /// Runtime of the process.
    pub runtime: RuntimeKind,
}

/// A running server process.
#[derive(Debug)]
pub struct Process {
    label: ProcessLabel,
    input: mpsc::Sender<Line>,
    calls: Mutex<Calls>,
    stop: CancellationToken,
    end_receiver: watch::Receiver<Option<ProcessEnded>>,
}

/// A line for a server's input.
#[derive(Debug)]
struct Line {
    bytes: Vec<u8>,
    /// Receives the outcome of the write.
    written: oneshot::Sender<io::Result<()>>,
}

/// The calls that wait for an answer, by the id that the server receives.
#[derive(Debug, Default)]
struct Calls {
    last_id: u64,
    pending: HashMap<u64, oneshot::Sender<RpcMessage>>,
    /// The process has ended; new calls receive no answer.
    ended: bool,
}

/// A call whose answer is awaited. Dropping it discards the answer.
#[derive(Debug)]
pub struct PendingCall {
    process: Arc<Process>,
    id: u64,
    answer: oneshot::Receiver<RpcMessage>,
}

impl PendingCall {
    /// The id of the request that the server receives.
    pub fn id(&self) -> u64 {
        self.id
    }

    /// Waits for the server's answer.
    pub async fn answer(&mut self) -> Result<RpcMessage, ProcessEnded> {
        match (&mut self.answer).await {
            Ok(message) => Ok(message),
            Err(_) => Err(self.process.wait_for_end().await),
        }
    }
}

impl Drop for PendingCall {
    fn drop(&mut self) {
        self.process.calls().pending.remove(&self.id);
    }
}

impl Process {
    /// Attaches to a launched program until the program ends or `shutdown` ends it. Requests and
    /// notifications of the server go to `handler`.
    pub fn attach(
        launched: LaunchedProgram,
        label: ProcessLabel,
        handler: Arc<dyn MessageHandler>,
        metrics: Metrics,
        shutdown: &Arc<Shutdown>,
    ) -> Arc<Self> {
        let LaunchedProgram {
            input,
            output,
            errors,
            handle: program,
        } = launched;
        let (lines, queued) = mpsc::channel(MAX_QUEUED_LINES);
        let (end_sender, end_receiver) = watch::channel(None);
        let process = Arc::new(Self {
            label: label.clone(),
            input: lines,
            calls: Mutex::default(),
            stop: CancellationToken::new(),
            end_receiver,
        });
        let counted = metrics.count_process(&label.tool, label.runtime);
        let signals = InputSignals::default();
        tokio::spawn(write_lines(
            input,
            queued,
            label.tool.clone(),
            signals.clone(),
        ));
        tokio::spawn(log_stderr(errors, label.tool.clone()));
        let reading = tokio::spawn(read_messages(
            output,
            Arc::clone(&process),
            handler,
            metrics,
        ));
        let supervised = Arc::clone(&process);
        let (shutdown, shutdown_token) = (Arc::clone(shutdown), shutdown.register_process());
        tokio::spawn(async move {
            let code = supervise(program, reading, &supervised, &signals, &shutdown).await;
            supervised.finish();
            counted.exited(code);
            tracing::debug!(tool = %label.tool, ?code, "mcp tool process ended");
            end_sender.send_replace(Some(ProcessEnded { code }));
            drop(shutdown_token);
        });
        process
    }

    /// Tool name and runtime.
    pub fn label(&self) -> &ProcessLabel {
        &self.label
    }

    /// Registers a new call under a unique id, before its request is sent.
    pub fn reserve(self: &Arc<Self>) -> PendingCall {
        let (sender, answer) = oneshot::channel();
        let mut calls = self.calls();
        calls.last_id += 1;
        let id = calls.last_id;
        if !calls.ended {
            calls.pending.insert(id, sender);
        }
        drop(calls);
        PendingCall {
            process: Arc::clone(self),
            id,
            answer,
        }
    }

    /// Sends a message. Returns when the message was written, or after two seconds while it is
    /// still queued.
    pub async fn send(&self, text: &str) -> Result<(), SendError> {
        let (written, outcome) = oneshot::channel();
        let line = Line {
            bytes: rpc::to_line(text),
            written,
        };
        if self.input.send(line).await.is_err() {
            return Err(self.wait_for_end().await.into());
        }
        match tokio::time::timeout(WRITE_TIMEOUT, outcome).await {
            Ok(Ok(Ok(()))) => Ok(()),
            Ok(Ok(Err(error))) => Err(SendError::Write(error.to_string())),
            Ok(Err(_)) => Err(self.wait_for_end().await.into()),
            // If the write fails later, the process ends, and every open call with it.
            Err(_) => Ok(()),
        }
    }

    /// Sends a message and ignores a failure, for messages that are useless once the server ended.
    pub async fn send_best_effort(&self, text: &str) {
        if let Err(error) = self.send(text).await {
            tracing::debug!(tool = %self.label.tool, %error, "mcp message to tool not sent");
        }
    }

    /// Starts to end the process; does not wait.
    pub fn stop(&self) {
        self.stop.cancel();
    }

    /// Whether the process still accepts calls.
    pub fn is_alive(&self) -> bool {
        !self.stop.is_cancelled() && !self.calls().ended && self.end_receiver.borrow().is_none()
    }

    /// Waits for the end of the process.
    pub async fn wait_for_end(&self) -> ProcessEnded {
        let mut end = self.end_receiver.clone();
        let found = end.wait_for(Option::is_some).await;
        found.map_or(ProcessEnded { code: None }, |ended| {
            ended.unwrap_or(ProcessEnded { code: None })
        })
    }

    fn calls(&self) -> MutexGuard<'_, Calls> {
        self.calls.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Ends every open call by closing its channel.
    fn finish(&self) {
        let mut calls = self.calls();
        calls.ended = true;
        calls.pending.clear();
    }

    /// Passes an answer to its pending call. `false` if no call is pending under its id.
    fn complete_call(&self, message: RpcMessage) -> bool {
        let id = message.id().and_then(|id| id.parse::<u64>().ok());
        let pending = id.and_then(|id| self.calls().pending.remove(&id));
        pending.is_some_and(|pending| pending.send(message).is_ok())
    }
}

/// Signals between the writer of a server's input and the task that supervises the process.
#[derive(Clone, Debug, Default)]
struct InputSignals {
    /// The input is to be closed after the queued lines.
    close: CancellationToken,
    /// A write failed.
    broken: CancellationToken,
}

/// Waits for the end of a program, or ends it.
async fn supervise(
    mut program: Box<dyn ProgramHandle>,
    mut reading: tokio::task::JoinHandle<()>,
    process: &Process,
    signals: &InputSignals,
    shutdown: &Shutdown,
) -> ProgramExit {
    tokio::select! {
        code = program.wait() => {
            // The program's last output may still be in the pipe.
            if tokio::time::timeout(OUTPUT_DRAIN_TIMEOUT, &mut reading).await.is_err() {
                reading.abort();
            }
            signals.close.cancel();
            return code;
        }
        _ = &mut reading => {}
        () = process.stop.cancelled() => {}
        () = signals.broken.cancelled() => {}
        _ = shutdown.wait_for_begin() => {}
    }
    signals.close.cancel();
    process.stop.cancel();
    let code = tokio::select! {
        biased;
        kill_at = shutdown.wait_for_begin() => terminate(program.as_mut(), &process.label, kill_at).await,
        code = program.end() => code,
    };
    reading.abort();
    code
}

/// Ends a program when the gate stops: SIGTERM at once, SIGKILL at `kill_at`.
async fn terminate(
    program: &mut dyn ProgramHandle,
    label: &ProcessLabel,
    kill_at: Instant,
) -> ProgramExit {
    program.terminate();
    if let Ok(code) = tokio::time::timeout_at(kill_at, program.wait()).await {
        return code;
    }
    tracing::warn!(tool = %label.tool, "mcp tool did not end on SIGTERM and is killed");
    program.kill().await
}

async fn write_lines(
    mut input: Pin<Box<dyn AsyncWrite + Send>>,
    mut queued: mpsc::Receiver<Line>,
    tool: Arc<str>,
    signals: InputSignals,
) {
    let work = async {
        loop {
            let line = tokio::select! {
                biased;
                line = queued.recv() => line,
                () = signals.close.cancelled() => None,
            };
            let Some(Line { bytes, written }) = line else {
                return;
            };
            let writing = async {
                input.write_all(&bytes).await?;
                input.flush().await
            };
            let outcome = writing.await;
            if let Err(error) = &outcome {
                if signals.close.is_cancelled() {
                    tracing::debug!(%tool, %error, "mcp tool ended before it read its input");
                } else {
                    tracing::error!(%tool, %error, "mcp tool write failed");
                }
            }
            let failed = outcome.is_err();
            // The sender may have stopped waiting.
            drop(written.send(outcome));
            if failed {
                signals.broken.cancel();
                return;
            }
        }
    };
    // Lines that were queued before the end are still written: one of them may be a cancellation.
    let drain_timeout = async {
        signals.close.cancelled().await;
        tokio::time::sleep(INPUT_DRAIN_TIMEOUT).await;
    };
    tokio::select! {
        () = drain_timeout => {}
        () = work => {}
    }
    // Dropping the input closes the pipe, which signals the end to the server.
}

async fn read_messages(
    output: Pin<Box<dyn AsyncRead + Send>>,
    process: Arc<Process>,
    handler: Arc<dyn MessageHandler>,
    metrics: Metrics,
) {
    let mut output = BufReader::with_capacity(64 * 1024, output);
    let record_junk = |why: &dyn std::fmt::Display| {
        if metrics
            .record_junk_line(&process.label.tool)
            .is_power_of_two()
        {
            tracing::warn!(tool = %process.label.tool, %why, "mcp tool wrote a line that is not a message");
        }
    };
    loop {
        let line = match next_line(&mut output, MAX_MESSAGE_BYTES).await {
            Ok(Some(ReadLine::Whole(line))) => line,
            Ok(Some(ReadLine::TooLong)) => {
                record_junk(&"the line is too long");
                continue;
            }
            Ok(None) => return,
            Err(error) => {
                tracing::debug!(%error, "reading mcp tool output failed");
                return;
            }
        };
        if line.iter().all(u8::is_ascii_whitespace) {
            continue;
        }
        match RpcMessage::read_bytes(line) {
            Ok(message) if message.kind() == RpcKind::Response => {
                if !process.complete_call(message) {
                    tracing::debug!(tool = %process.label.tool, "mcp tool answered a call that is not pending");
                }
            }
            Ok(message) => handler.handle(message).await,
            Err(bad) => record_junk(&bad),
        }
    }
}

/// Logs a server's stderr, one event for each line, with bounded length. The log itself limits the
/// number of lines for each tool.
async fn log_stderr(errors: Pin<Box<dyn AsyncRead + Send>>, tool: Arc<str>) {
    let mut errors = BufReader::new(errors);
    while let Ok(Some(line)) = next_line(&mut errors, MAX_LOG_LINE_BYTES).await {
        match line {
            ReadLine::Whole(line) => {
                let line = String::from_utf8_lossy(&line);
                let line = line.trim_end().replace(char::is_control, " ");
                tracing::info!(tool = %tool, line, "mcp tool stderr");
            }
            ReadLine::TooLong => tracing::info!(tool = %tool, "mcp tool stderr line too long"),
        }
    }
}

enum ReadLine {
    Whole(Vec<u8>),
    /// The line exceeded the limit and was discarded.
    TooLong,
}

/// The next line without its line end. The last line may lack a line end.
async fn next_line(
    from: &mut (impl AsyncBufRead + Unpin),
    max_bytes: usize,
) -> io::Result<Option<ReadLine>> {
    let mut line = Vec::new();
    let mut too_long = false;
    loop {
        let piece = from.fill_buf().await?;
        if piece.is_empty() {
            return Ok(match (too_long, line.is_empty()) {
                (true, _) => Some(ReadLine::TooLong),
                (false, true) => None,
                (false, false) => Some(ReadLine::Whole(line)),
            });
        }
        let end = memchr::memchr(b'\n', piece);
        let taken = end.unwrap_or(piece.len());
        if line.len() + taken > max_bytes {
            too_long = true;
            line = Vec::new();
        }
        if !too_long && let Some(part) = piece.get(..taken) {
            line.extend_from_slice(part);
        }
        from.consume(taken + usize::from(end.is_some()));
        if end.is_some() {
            return Ok(Some(if too_long {
                ReadLine::TooLong
            } else {
                ReadLine::Whole(line)
            }));
        }
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::AsyncReadExt;

    use super::*;

    fn queue(lines: &[&str]) -> mpsc::Receiver<Line> {
        let (sender, queued) = mpsc::channel(MAX_QUEUED_LINES);
        for line in lines {
            let (written, _) = oneshot::channel();
            let bytes = rpc::to_line(line);
            sender.try_send(Line { bytes, written }).unwrap();
        }
        // The queue stays open: closing it would end the writer.
        std::mem::forget(sender);
        queued
    }

    #[tokio::test]
    async fn writer_writes_queued_lines_before_closing_the_input() {
        for _ in 0..50 {
            let (input, mut server) = tokio::io::duplex(1024);
            let signals = InputSignals::default();
            signals.close.cancel();
            write_lines(Box::pin(input), queue(&["a", "b"]), "t".into(), signals).await;
            let mut received = String::new();
            server.read_to_string(&mut received).await.unwrap();
            assert_eq!(received, "a\nb\n");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn writer_stops_at_the_timeout_if_the_server_does_not_read() {
        let (input, _server) = tokio::io::duplex(1);
        let signals = InputSignals::default();
        signals.close.cancel();
        let begun = Instant::now();
        let lines = queue(&["more than fits"]);
        write_lines(Box::pin(input), lines, "t".into(), signals).await;
        assert_eq!(begun.elapsed(), INPUT_DRAIN_TIMEOUT);
    }
}
