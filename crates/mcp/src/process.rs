//! One running stdio server: lines in, lines out, and whose answer is whose.
//!
//! ```text
//!   callers ── send ──▶ writer ──▶ stdin │ server │ stdout ──▶ reader ─┬─ answers ──▶ the call
//!                                        │        │ stderr ──▶ the log └─ the rest ──▶ Home
//! ```
//!
//! It ends when it is told to, when its output ends, or by itself; whatever the reason,
//! every open call hears of it at once.

use std::collections::HashMap;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use config::section::tools::RuntimeKind;
use tokio::io::{AsyncBufRead, AsyncBufReadExt, AsyncRead, AsyncWrite, AsyncWriteExt, BufReader};
use tokio::sync::{mpsc, oneshot, watch};
use tokio_util::sync::CancellationToken;

use crate::launch::{Exit, Launched, Life};
use crate::metrics::Metrics;
use crate::rpc::{self, Kind, LONGEST, Message};

/// Lines that wait for a server to read them.
const MOST_WAITING: usize = 64;

/// How long what a program said last may take after its end: something it left behind may
/// hold its output open.
const LAST_WORDS: Duration = Duration::from_millis(200);

/// How long a server that is ended may take to read what was sent before.
const FAREWELL: Duration = Duration::from_millis(100);

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
    input: mpsc::Sender<Vec<u8>>,
    calls: Mutex<Calls>,
    stop: CancellationToken,
    over: watch::Receiver<Option<Gone>>,
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
    /// Takes over what was launched. What the server says by itself goes to `home`.
    pub fn keep(
        launched: Launched,
        label: Label,
        home: Arc<dyn Home>,
        metrics: Metrics,
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
        metrics.process_running(&label.tool, label.runtime, 1);
        let writing = CancellationToken::new();
        tokio::spawn(write(input, waiting, writing.clone()));
        tokio::spawn(log_talk(errors, label.tool.clone()));
        let reading = tokio::spawn(read(output, Arc::clone(&process), home, metrics.clone()));
        let kept = Arc::clone(&process);
        tokio::spawn(async move {
            let stop = kept.stop.clone();
            let code = live(life, reading, stop, writing).await;
            kept.finish();
            metrics.process_running(&label.tool, label.runtime, -1);
            tracing::debug!(tool = %label.tool, ?code, "a tool's process ended");
            tell.send_replace(Some(Gone { code }));
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

    /// Sends a message.
    pub async fn send(&self, text: &str) -> Result<(), Gone> {
        if self.input.send(rpc::line(text)).await.is_err() {
            return Err(self.ended().await);
        }
        Ok(())
    }

    /// Sends a message that is nothing to anybody once the server is gone.
    pub async fn offer(&self, text: &str) {
        if let Err(gone) = self.send(text).await {
            tracing::debug!(tool = %self.label.tool, %gone, "a message was not sent");
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

/// Sees a program to its end.
async fn live(
    mut life: Box<dyn Life>,
    mut reading: tokio::task::JoinHandle<()>,
    stop: CancellationToken,
    writing: CancellationToken,
) -> Exit {
    tokio::select! {
        code = life.ended() => {
            // Its last words may still be in the pipe.
            if tokio::time::timeout(LAST_WORDS, &mut reading).await.is_err() {
                reading.abort();
            }
            writing.cancel();
            return code;
        }
        _ = &mut reading => {}
        () = stop.cancelled() => {}
    }
    writing.cancel();
    stop.cancel();
    let code = life.end().await;
    reading.abort();
    code
}

async fn write(
    mut input: Pin<Box<dyn AsyncWrite + Send>>,
    mut waiting: mpsc::Receiver<Vec<u8>>,
    stop: CancellationToken,
) {
    let work = async {
        loop {
            let line = tokio::select! {
                biased;
                line = waiting.recv() => line,
                () = stop.cancelled() => None,
            };
            let Some(line) = line else { return };
            let written = async {
                input.write_all(&line).await?;
                input.flush().await
            };
            if let Err(error) = written.await {
                tracing::debug!(%error, "a tool does not read any more");
                return;
            }
        }
    };
    // What was sent before the end may be why it ends, as a cancellation is.
    let farewell = async {
        stop.cancelled().await;
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
            Ok(Some(Line::Whole(line))) => line,
            Ok(Some(Line::TooLong)) => {
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
            Line::Whole(line) => {
                let line = String::from_utf8_lossy(&line);
                let line = line.trim_end().replace(char::is_control, " ");
                tracing::info!(tool = %tool, line, "a tool says");
            }
            Line::TooLong => tracing::info!(tool = %tool, "a tool says something long"),
        }
    }
}

enum Line {
    Whole(Vec<u8>),
    /// It was, and is gone.
    TooLong,
}

/// The next line, without its end. A last line without an end counts.
async fn next_line(
    from: &mut (impl AsyncBufRead + Unpin),
    longest: usize,
) -> std::io::Result<Option<Line>> {
    let mut line = Vec::new();
    let mut too_long = false;
    loop {
        let piece = from.fill_buf().await?;
        if piece.is_empty() {
            return Ok(match (too_long, line.is_empty()) {
                (true, _) => Some(Line::TooLong),
                (false, true) => None,
                (false, false) => Some(Line::Whole(line)),
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
                Line::TooLong
            } else {
                Line::Whole(line)
            }));
        }
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::AsyncReadExt;
    use tokio::time::Instant;

    use super::*;

    fn said(lines: &[&str]) -> mpsc::Receiver<Vec<u8>> {
        let (sender, waiting) = mpsc::channel(MOST_WAITING);
        for line in lines {
            sender.try_send(rpc::line(line)).unwrap();
        }
        // Never closed: that is not what ends the writer here.
        std::mem::forget(sender);
        waiting
    }

    #[tokio::test]
    async fn what_was_sent_before_the_end_is_written() {
        for _ in 0..50 {
            let (input, mut server) = tokio::io::duplex(1024);
            let stop = CancellationToken::new();
            stop.cancel();
            write(Box::pin(input), said(&["a", "b"]), stop).await;
            let mut heard = String::new();
            server.read_to_string(&mut heard).await.unwrap();
            assert_eq!(heard, "a\nb\n");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_server_that_does_not_read_is_not_waited_for() {
        let (input, _server) = tokio::io::duplex(1);
        let stop = CancellationToken::new();
        stop.cancel();
        let begun = Instant::now();
        write(Box::pin(input), said(&["more than fits"]), stop).await;
        assert_eq!(begun.elapsed(), FAREWELL);
    }
}
