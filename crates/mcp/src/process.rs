//! One running stdio server: lines in, lines out, and whose answer is whose.
//!
//! ```text
//!   callers ── send ──▶ writer ──▶ stdin │ server │ stdout ──▶ reader ─┬─ answers ──▶ the call
//!                                        │        │ stderr ──▶ the log └─ the rest ──▶ Home
//! ```
//!
//! It ends when it is stopped, when its output ends, when its input cannot be written any more,
//! with the gate ([`crate::shutdown`]), or by itself; whatever the reason, every open call
//! receives an error at once.

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

use crate::launch::{Exit, Launched, Life};
use crate::metrics::Metrics;
use crate::rpc::{self, Kind, LONGEST, Message};
use crate::shutdown::Shutdown;

/// Lines that wait for a server to read them.
const MOST_WAITING: usize = 64;

/// How long what a program said last may take after its end: something it left behind may
/// hold its output open.
const LAST_WORDS: Duration = Duration::from_millis(200);

/// How long a server that is ended may take to read what was sent before.
const FAREWELL: Duration = Duration::from_millis(100);

/// How long a sender waits to learn whether its line could be written. The line of a server that
/// reads later than that stays in the queue.
const WRITE_WAIT: Duration = Duration::from_secs(2);

/// The longest line of a server's talk that is logged.
const LONGEST_TALK: usize = 2048;

/// Who hears what a server says by itself.
#[async_trait]
pub trait Home: Send + Sync + 'static {
    /// A request or notification of the server. While this waits, the server's output does.
    async fn hear(&self, message: Message);
}

/// The server is not there any more.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the server ended{}", code.map(|code| format!(" with code {code}")).unwrap_or_default())]
pub struct Gone {
    /// Its exit code, where there is one.
    pub code: Exit,
}

/// Why a message was not sent.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SendError {
    /// The server ended before it was written.
    #[error(transparent)]
    Gone(#[from] Gone),
    /// The server does not read its input any more. Its process is being ended.
    #[error("writing to the server failed: {0}")]
    Write(String),
}

/// What a process is called in logs and metrics.
#[derive(Clone, Debug)]
pub struct Label {
    /// The tool.
    pub tool: Arc<str>,
    /// Where it runs.
    pub runtime: RuntimeKind,
}

/// A running server.
#[derive(Debug)]
pub struct Process {
    label: Label,
    input: mpsc::Sender<Line>,
    calls: Mutex<Calls>,
    stop: CancellationToken,
    over: watch::Receiver<Option<Gone>>,
}

/// A line for a server's input.
#[derive(Debug)]
struct Line {
    bytes: Vec<u8>,
    /// Receives the outcome of the write.
    written: oneshot::Sender<io::Result<()>>,
}

#[derive(Debug, Default)]
struct Calls {
    last: u64,
    open: HashMap<u64, oneshot::Sender<Message>>,
    /// Nobody will answer any more.
    over: bool,
}

/// A call that is made. Dropping it forgets the answer.
#[derive(Debug)]
pub struct Call {
    process: Arc<Process>,
    id: u64,
    answer: oneshot::Receiver<Message>,
}

impl Call {
    /// The id that the server knows it by.
    pub fn id(&self) -> u64 {
        self.id
    }

    /// The server's answer.
    pub async fn answer(&mut self) -> Result<Message, Gone> {
        match (&mut self.answer).await {
            Ok(message) => Ok(message),
            Err(_) => Err(self.process.ended().await),
        }
    }
}

impl Drop for Call {
    fn drop(&mut self) {
        self.process.calls().open.remove(&self.id);
    }
}

impl Process {
    /// Takes over what was launched, until it ends or `shutdown` ends it. What the server says
    /// by itself goes to `home`.
    pub fn keep(
        launched: Launched,
        label: Label,
        home: Arc<dyn Home>,
        metrics: Metrics,
        shutdown: &Arc<Shutdown>,
    ) -> Arc<Self> {
        let Launched {
            input,
            output,
            errors,
            life,
        } = launched;
        let (lines, waiting) = mpsc::channel(MOST_WAITING);
        let (tell, over) = watch::channel(None);
        let process = Arc::new(Self {
            label: label.clone(),
            input: lines,
            calls: Mutex::default(),
            stop: CancellationToken::new(),
            over,
        });
        let counted = metrics.count_process(&label.tool, label.runtime);
        let signals = InputSignals::default();
        tokio::spawn(write(input, waiting, label.tool.clone(), signals.clone()));
        tokio::spawn(log_talk(errors, label.tool.clone()));
        let reading = tokio::spawn(read(output, Arc::clone(&process), home, metrics));
        let kept = Arc::clone(&process);
        let (shutdown, held) = (Arc::clone(shutdown), shutdown.hold());
        tokio::spawn(async move {
            let code = live(life, reading, &kept, &signals, &shutdown).await;
            kept.finish();
            counted.exited(code);
            tracing::debug!(tool = %label.tool, ?code, "a tool's process ended");
            tell.send_replace(Some(Gone { code }));
            drop(held);
        });
        process
    }

    /// What it is called.
    pub fn label(&self) -> &Label {
        &self.label
    }

    /// A place for an answer, under an id of its own, before anything is sent.
    pub fn reserve(self: &Arc<Self>) -> Call {
        let (sender, answer) = oneshot::channel();
        let mut calls = self.calls();
        calls.last += 1;
        let id = calls.last;
        if !calls.over {
            calls.open.insert(id, sender);
        }
        drop(calls);
        Call {
            process: Arc::clone(self),
            id,
            answer,
        }
    }

    /// Sends a message. Returns when it was written; for a server that is busy it stays queued,
    /// and is written later.
    pub async fn send(&self, text: &str) -> Result<(), SendError> {
        let (written, outcome) = oneshot::channel();
        let line = Line {
            bytes: rpc::line(text),
            written,
        };
        if self.input.send(line).await.is_err() {
            return Err(self.ended().await.into());
        }
        match tokio::time::timeout(WRITE_WAIT, outcome).await {
            Ok(Ok(Ok(()))) => Ok(()),
            Ok(Ok(Err(error))) => Err(SendError::Write(error.to_string())),
            Ok(Err(_)) => Err(self.ended().await.into()),
            // If it is never written, the process ends, and every open call with it.
            Err(_) => Ok(()),
        }
    }

    /// Sends a message that is nothing to anybody once the server is gone.
    pub async fn offer(&self, text: &str) {
        if let Err(error) = self.send(text).await {
            tracing::debug!(tool = %self.label.tool, %error, "a message was not sent");
        }
    }

    /// Begins to end it.
    pub fn stop(&self) {
        self.stop.cancel();
    }

    /// Whether it can still be asked.
    pub fn is_alive(&self) -> bool {
        !self.stop.is_cancelled() && !self.calls().over && self.over.borrow().is_none()
    }

    /// Waits for its end.
    pub async fn ended(&self) -> Gone {
        let mut over = self.over.clone();
        let found = over.wait_for(Option::is_some).await;
        found.map_or(Gone { code: None }, |gone| {
            gone.unwrap_or(Gone { code: None })
        })
    }

    fn calls(&self) -> MutexGuard<'_, Calls> {
        self.calls.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Nobody answers any more: those who wait hear it by their channel's end.
    fn finish(&self) {
        let mut calls = self.calls();
        calls.over = true;
        calls.open.clear();
    }

    /// Hands an answer to who waits for it. `false` when nobody does.
    fn settle(&self, message: Message) -> bool {
        let id = message.id().and_then(|id| id.parse::<u64>().ok());
        let waiting = id.and_then(|id| self.calls().open.remove(&id));
        waiting.is_some_and(|waiting| waiting.send(message).is_ok())
    }
}

/// Signals between the writer of a server's input and the task that sees the server to its end.
#[derive(Clone, Debug, Default)]
struct InputSignals {
    /// Nothing more is written: the input is closed.
    close: CancellationToken,
    /// A write failed.
    broken: CancellationToken,
}

/// Sees a program to its end.
async fn live(
    mut life: Box<dyn Life>,
    mut reading: tokio::task::JoinHandle<()>,
    process: &Process,
    signals: &InputSignals,
    shutdown: &Shutdown,
) -> Exit {
    tokio::select! {
        code = life.ended() => {
            // Its last words may still be in the pipe.
            if tokio::time::timeout(LAST_WORDS, &mut reading).await.is_err() {
                reading.abort();
            }
            signals.close.cancel();
            return code;
        }
        _ = &mut reading => {}
        () = process.stop.cancelled() => {}
        () = signals.broken.cancelled() => {}
        _ = shutdown.begun() => {}
    }
    signals.close.cancel();
    process.stop.cancel();
    let code = tokio::select! {
        biased;
        kill_at = shutdown.begun() => terminate(life.as_mut(), &process.label, kill_at).await,
        code = life.end() => code,
    };
    reading.abort();
    code
}

/// Ends a program at the gate's stop: SIGTERM at once, SIGKILL at `kill_at`.
async fn terminate(life: &mut dyn Life, label: &Label, kill_at: Instant) -> Exit {
    life.terminate();
    if let Ok(code) = tokio::time::timeout_at(kill_at, life.ended()).await {
        return code;
    }
    tracing::warn!(tool = %label.tool, "mcp tool did not end on SIGTERM and is killed");
    life.kill().await
}

async fn write(
    mut input: Pin<Box<dyn AsyncWrite + Send>>,
    mut waiting: mpsc::Receiver<Line>,
    tool: Arc<str>,
    signals: InputSignals,
) {
    let work = async {
        loop {
            let line = tokio::select! {
                biased;
                line = waiting.recv() => line,
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
            // The sender may have given up waiting.
            drop(written.send(outcome));
            if failed {
                signals.broken.cancel();
                return;
            }
        }
    };
    // What was sent before the end may be why it ends, as a cancellation is.
    let farewell = async {
        signals.close.cancelled().await;
        tokio::time::sleep(FAREWELL).await;
    };
    tokio::select! {
        () = farewell => {}
        () = work => {}
    }
    // Dropping the input closes it, which is how a server learns that it is over.
}

async fn read(
    output: Pin<Box<dyn AsyncRead + Send>>,
    process: Arc<Process>,
    home: Arc<dyn Home>,
    metrics: Metrics,
) {
    let mut output = BufReader::with_capacity(64 * 1024, output);
    let junk = |why: &dyn std::fmt::Display| {
        if metrics.junk(&process.label.tool).is_power_of_two() {
            tracing::warn!(tool = %process.label.tool, %why, "a tool said something that is no message");
        }
    };
    loop {
        let line = match next_line(&mut output, LONGEST).await {
            Ok(Some(ReadLine::Whole(line))) => line,
            Ok(Some(ReadLine::TooLong)) => {
                junk(&"a line is too long");
                continue;
            }
            Ok(None) => return,
            Err(error) => {
                tracing::debug!(%error, "a tool's output broke");
                return;
            }
        };
        if line.iter().all(u8::is_ascii_whitespace) {
            continue;
        }
        match Message::read_bytes(line) {
            Ok(message) if message.kind() == Kind::Response => {
                if !process.settle(message) {
                    tracing::debug!(tool = %process.label.tool, "nobody waits for an answer");
                }
            }
            Ok(message) => home.hear(message).await,
            Err(bad) => junk(&bad),
        }
    }
}

/// Writes a server's talk into the log: bounded in length, on one line each. How many there may
/// be is the log's own limit, for each tool.
async fn log_talk(errors: Pin<Box<dyn AsyncRead + Send>>, tool: Arc<str>) {
    let mut errors = BufReader::new(errors);
    while let Ok(Some(line)) = next_line(&mut errors, LONGEST_TALK).await {
        match line {
            ReadLine::Whole(line) => {
                let line = String::from_utf8_lossy(&line);
                let line = line.trim_end().replace(char::is_control, " ");
                tracing::info!(tool = %tool, line, "a tool says");
            }
            ReadLine::TooLong => tracing::info!(tool = %tool, "a tool says something long"),
        }
    }
}

enum ReadLine {
    Whole(Vec<u8>),
    /// It was, and is gone.
    TooLong,
}

/// The next line, without its end. A last line without an end counts.
async fn next_line(
    from: &mut (impl AsyncBufRead + Unpin),
    longest: usize,
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
        if line.len() + taken > longest {
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

    fn said(lines: &[&str]) -> mpsc::Receiver<Line> {
        let (sender, waiting) = mpsc::channel(MOST_WAITING);
        for line in lines {
            let (written, _) = oneshot::channel();
            let bytes = rpc::line(line);
            sender.try_send(Line { bytes, written }).unwrap();
        }
        // Never closed: that is not what ends the writer here.
        std::mem::forget(sender);
        waiting
    }

    #[tokio::test]
    async fn what_was_sent_before_the_end_is_written() {
        for _ in 0..50 {
            let (input, mut server) = tokio::io::duplex(1024);
            let signals = InputSignals::default();
            signals.close.cancel();
            write(Box::pin(input), said(&["a", "b"]), "t".into(), signals).await;
            let mut heard = String::new();
            server.read_to_string(&mut heard).await.unwrap();
            assert_eq!(heard, "a\nb\n");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_server_that_does_not_read_is_not_waited_for() {
        let (input, _server) = tokio::io::duplex(1);
        let signals = InputSignals::default();
        signals.close.cancel();
        let begun = Instant::now();
        let lines = said(&["more than fits"]);
        write(Box::pin(input), lines, "t".into(), signals).await;
        assert_eq!(begun.elapsed(), FAREWELL);
    }
}
