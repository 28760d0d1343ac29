//! Queue of log lines, which a separate thread redacts, escapes and writes.
//!
//! A terminal or pipe that is not read must not block the gate, so other threads only queue an
//! event. The queue is bounded; when it is full, events are dropped and the next line reports
//! their number.

use std::io::{self, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{self, SyncSender, TrySendError};
use std::time::Duration;

use tracing_subscriber::fmt::MakeWriter;

use crate::output;
use crate::telemetry::redact::Redactor;

/// Maximum number of queued events.
const MAX_QUEUED: usize = 4096;

/// Writes escaped lines.
pub type LineWriter = Box<dyn FnMut(&[u8]) -> io::Result<()> + Send>;

/// The sending end of the queue. Cloning shares the queue.
#[derive(Clone, Debug)]
pub struct LogQueue {
    queue: SyncSender<Message>,
    dropped: Arc<AtomicU64>,
}

enum Message {
    Event(Vec<u8>),
    Flush(SyncSender<()>),
}

impl LogQueue {
    /// Starts the thread that writes to `sink`. `ansi` keeps the colours of the formatter.
    pub fn start(sink: LineWriter, redactor: Redactor, ansi: bool) -> io::Result<Self> {
        Self::start_bounded(sink, redactor, ansi, MAX_QUEUED)
    }

    fn start_bounded(
        mut sink: LineWriter,
        redactor: Redactor,
        ansi: bool,
        bound: usize,
    ) -> io::Result<Self> {
        let (queue, events) = mpsc::sync_channel(bound);
        let dropped = Arc::new(AtomicU64::new(0));
        let missed = Arc::clone(&dropped);
        std::thread::Builder::new()
            .name("log-writer".to_owned())
            .spawn(move || {
                // A write error of the log cannot be logged.
                for message in events {
                    match message {
                        Message::Event(event) => {
                            let _ = sink(&escape(&redactor.redact(&event), ansi));
                        }
                        Message::Flush(done) => drop(done),
                    }
                    let missed = missed.swap(0, Ordering::Relaxed);
                    if missed > 0 {
                        let _ = sink(format!("{missed} log lines were dropped\n").as_bytes());
                    }
                }
            })?;
        Ok(Self { queue, dropped })
    }

    /// Waits until all queued events are written, at most for `limit`.
    pub fn flush(&self, limit: Duration) {
        let (done, flushed) = mpsc::sync_channel(0);
        if self.queue.send(Message::Flush(done)).is_ok() {
            // Ends when the writing thread drops the channel.
            let _ = flushed.recv_timeout(limit);
        }
    }
}

impl<'a> MakeWriter<'a> for LogQueue {
    type Writer = &'a LogQueue;

    fn make_writer(&'a self) -> Self::Writer {
        self
    }
}

impl Write for &LogQueue {
    /// `tracing_subscriber` writes one whole event at a time.
    fn write(&mut self, event: &[u8]) -> io::Result<usize> {
        match self.queue.try_send(Message::Event(event.to_vec())) {
            Ok(()) | Err(TrySendError::Disconnected(_)) => {}
            Err(TrySendError::Full(_)) => {
                self.dropped.fetch_add(1, Ordering::Relaxed);
            }
        }
        Ok(event.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// `event` as one line without control characters: text from a sandbox must not move the cursor
/// or forge a second line. Only the formatter's colours stay, and only on a terminal:
/// `tracing_subscriber` escapes those in values itself. The escapes are valid in JSON strings,
/// too.
fn escape(event: &[u8], ansi: bool) -> Vec<u8> {
    let body = event.strip_suffix(b"\n").unwrap_or(event);
    let mut line = String::with_capacity(body.len() + 1);
    for c in String::from_utf8_lossy(body).chars() {
        match c {
            '\t' => line.push(c),
            '\u{1b}' if ansi => line.push(c),
            _ if output::is_unsafe(c) => output::push_escaped(&mut line, c),
            _ => line.push(c),
        }
    }
    line.push('\n');
    line.into_bytes()
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::*;

    #[test]
    fn event_is_one_line_whatever_its_values_contain() {
        assert_eq!(
            escape(b"a\nb\r\x1b[31mc\0\n", false),
            b"a\\u000ab\\u000d\\u001b[31mc\\u0000\n"
        );
        let hostile = escape("\u{9b}31m\u{202e}\u{7f}\u{e0041}\n".as_bytes(), true);
        assert_eq!(hostile, b"\\u009b31m\\u202e\\u007f\\udb40\\udc41\n");
        let json = format!("\"{}\"", String::from_utf8(hostile).unwrap().trim_end());
        assert!(serde_json::from_str::<String>(&json).is_ok(), "{json}");
        assert_eq!(
            escape(b"\x1b[32mINFO\x1b[0m hi\n", true),
            b"\x1b[32mINFO\x1b[0m hi\n"
        );
        assert_eq!(escape("größe\n".as_bytes(), false), "größe\n".as_bytes());
    }

    #[test]
    fn full_queue_drops_events_and_reports_their_number() {
        let (open, gate) = mpsc::channel::<()>();
        let written = Arc::new(Mutex::new(String::new()));
        let seen = Arc::clone(&written);
        let sink = Box::new(move |line: &[u8]| {
            // Blocks until `open` is dropped, then never again.
            let _ = gate.recv();
            seen.lock().unwrap().push_str(str::from_utf8(line).unwrap());
            Ok(())
        });
        let lines = LogQueue::start_bounded(sink, Redactor::default(), false, 4).unwrap();
        for n in 0..100 {
            (&lines)
                .write_all(format!("line {n}\n").as_bytes())
                .unwrap();
        }
        drop(open);
        lines.flush(Duration::from_secs(30));
        let written = written.lock().unwrap().clone();
        assert!(written.starts_with("line 0\n"), "{written}");
        let kept = written.matches("line ").count();
        assert!((4..=6).contains(&kept), "{written}");
        assert!(
            written.contains(&format!("{} log lines were dropped\n", 100 - kept)),
            "{written}"
        );
    }
}
