//! The JSONL file: derived from the database by a thread of its own.
//!
//! The thread reads what was committed and appends it, so a slow or broken file holds up
//! nobody, and catching up after a start, an error or a new path is the same code as
//! every other day. Nothing is remembered but what the file's last line says.

use std::fs::{self, File, OpenOptions};
use std::io::{Read, Seek, SeekFrom, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rusqlite::{Connection, OptionalExtension};

use super::JsonlOptions;
use super::chain::{Digest256, Outline, split_line};
use super::ledger::{digest, signed};
use super::query::{Filter, Line, select_lines};
use crate::health::State;
use crate::recovery::with_suffix;
use crate::schema;

/// Records read at a time.
const PAGE: usize = 512;

/// How much of the end of a file is searched for its last record. The longest line is
/// far shorter.
const WINDOW: u64 = 1024 * 1024;

const FIRST_RETRY: Duration = Duration::from_secs(1);
const LAST_RETRY: Duration = Duration::from_secs(30);

/// What the thread is told.
#[derive(Debug)]
pub(crate) enum Message {
    /// There is more to write.
    Committed,
    /// The file is another one now, or none.
    Options(Option<JsonlOptions>),
    /// The database is another one now.
    Replaced,
    /// Write what there is, once, and end.
    Close,
}

/// The running thread.
#[derive(Debug)]
pub(crate) struct Follower {
    messages: mpsc::Sender<Message>,
    thread: Option<JoinHandle<()>>,
}

impl Follower {
    /// Starts following the database at `database`.
    pub(crate) fn start(database: PathBuf, state: Arc<State>) -> std::io::Result<Self> {
        let (messages, inbox) = mpsc::channel();
        let options = state.options.load().jsonl.clone();
        let thread = std::thread::Builder::new()
            .name("store-jsonl".to_owned())
            .spawn(move || {
                Worker {
                    database,
                    state,
                    options,
                    sink: None,
                    retry: None,
                }
                .run(&inbox);
            })?;
        Ok(Self {
            messages,
            thread: Some(thread),
        })
    }

    /// Tells the thread something.
    pub(crate) fn tell(&self, message: Message) {
        // Only fails when the thread has ended; the database goes on without it.
        let _ = self.messages.send(message);
    }

    /// Lets the thread catch up one last time and waits for its end.
    pub(crate) fn close(&mut self) {
        self.tell(Message::Close);
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("the JSONL thread panicked");
        }
    }
}

struct Worker {
    database: PathBuf,
    state: Arc<State>,
    options: Option<JsonlOptions>,
    sink: Option<Sink>,
    /// When to try again, and how long the pause was, after an error.
    retry: Option<(Instant, Duration)>,
}

impl Worker {
    fn run(mut self, inbox: &mpsc::Receiver<Message>) {
        loop {
            self.catch_up();
            let first = match self.retry {
                None => inbox.recv().map_err(RecvTimeoutError::from),
                Some((at, _)) => inbox.recv_timeout(at.saturating_duration_since(Instant::now())),
            };
            let mut closing = false;
            match first {
                Ok(message) => {
                    for message in std::iter::once(message).chain(inbox.try_iter()) {
                        closing |= self.take(message);
                    }
                }
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => closing = true,
            }
            if closing {
                self.retry = None;
                self.catch_up();
                return;
            }
        }
    }

    /// Gives whether it was the last message.
    fn take(&mut self, message: Message) -> bool {
        match message {
            Message::Committed => {}
            Message::Options(options) => {
                if options != self.options {
                    self.options = options;
                    self.sink = None;
                    self.retry = None;
                    self.state.trouble(|t| t.jsonl = None);
                }
            }
            Message::Replaced => self.sink = None,
            Message::Close => return true,
        }
        false
    }

    fn catch_up(&mut self) {
        let Some(options) = self.options.clone() else {
            return;
        };
        if self.state.check_available().is_err() {
            // There is nothing to read until another database is put in place.
            self.retry = None;
            return;
        }
        // New records do not make a refusing file any better before its time.
        if self.retry.is_some_and(|(at, _)| at > Instant::now()) {
            return;
        }
        match self.append_all(&options) {
            Ok(()) => {
                self.retry = None;
                self.state.trouble(|t| t.jsonl = None);
            }
            Err(error) => {
                let path = options.path.display();
                if self.retry.is_none() {
                    tracing::warn!(%path, %error, "the JSONL file cannot be written");
                }
                // Opening it again cuts off whatever was written in part.
                self.sink = None;
                let pause = match self.retry {
                    None => FIRST_RETRY,
                    Some((_, pause)) => LAST_RETRY.min(pause * 2),
                };
                self.retry = Some((Instant::now() + pause, pause));
                self.state.counters.jsonl_errors.fetch_add(1, Relaxed);
                self.state
                    .trouble(|t| t.jsonl = Some(format!("{path} cannot be written: {error}")));
            }
        }
    }

    fn append_all(&mut self, options: &JsonlOptions) -> Result<(), Problem> {
        let conn = schema::connect_read_only(&self.database)?;
        if self.sink.is_none() {
            self.sink = Some(Sink::open(options, &conn)?);
        }
        let Some(sink) = &mut self.sink else {
            return Ok(());
        };
        loop {
            let page = Filter {
                after_seq: Some(sink.seq),
                limit: Some(PAGE),
                ..Filter::default()
            };
            let lines = select_lines(&conn, &page)?;
            sink.append(&lines, options)?;
            self.state.exported.send_replace(sink.seq);
            if lines.len() < PAGE {
                return Ok(());
            }
        }
    }
}

#[derive(Debug, thiserror::Error)]
enum Problem {
    #[error(transparent)]
    File(#[from] std::io::Error),
    #[error("the database could not be read: {0}")]
    Database(#[from] rusqlite::Error),
}

/// The open file, and how far it goes.
struct Sink {
    file: File,
    size: u64,
    seq: u64,
}

impl Sink {
    /// Opens the file and finds its last record. A torn line at its end is cut off. A file
    /// that ends in anything else than a record of this database is not ours to append
    /// to: it is rotated away and a new one begins.
    fn open(options: &JsonlOptions, conn: &Connection) -> Result<Self, Problem> {
        let mut file = open_file(&options.path)?;
        let size = file.metadata()?.len();
        match find_end(&mut file, size)? {
            End::Empty => Ok(Self {
                file,
                size: 0,
                seq: 0,
            }),
            End::Record { seq, hash, end } if belongs(conn, seq, hash)? => {
                file.set_len(end)?;
                let size = end;
                Ok(Self { file, size, seq })
            }
            End::Record { .. } | End::Foreign => {
                drop(file);
                rotate(options)?;
                Ok(Self {
                    file: open_file(&options.path)?,
                    size: 0,
                    seq: 0,
                })
            }
        }
    }

    fn append(&mut self, lines: &[Line], options: &JsonlOptions) -> std::io::Result<()> {
        let mut buffer = Vec::new();
        for line in lines {
            let length = u64::try_from(line.bytes.len()).unwrap_or(u64::MAX);
            if self.size > 0 && self.size.saturating_add(length) > options.max_bytes {
                self.file.write_all(&buffer)?;
                buffer.clear();
                rotate(options)?;
                self.file = open_file(&options.path)?;
                self.size = 0;
            }
            buffer.extend_from_slice(&line.bytes);
            self.size += length;
        }
        self.file.write_all(&buffer)?;
        if let Some(last) = lines.last() {
            self.seq = last.seq;
        }
        Ok(())
    }
}

fn open_file(path: &Path) -> std::io::Result<File> {
    // Opening a pipe would wait for somebody to read it.
    if fs::metadata(path).is_ok_and(|m| !m.is_file()) {
        return Err(std::io::Error::other("it is not a regular file"));
    }
    OpenOptions::new()
        .read(true)
        .append(true)
        .create(true)
        .mode(0o600)
        .open(path)
}

/// How a file ends.
#[derive(Debug, PartialEq, Eq)]
enum End {
    /// With nothing, or with nothing but the beginning of a record.
    Empty,
    /// With this record, up to and including the newline at `end`.
    Record { seq: u64, hash: Digest256, end: u64 },
    /// With something that is no record.
    Foreign,
}

fn find_end(file: &mut File, size: u64) -> std::io::Result<End> {
    let start = size.saturating_sub(WINDOW);
    file.seek(SeekFrom::Start(start))?;
    let mut tail = Vec::new();
    file.take(WINDOW).read_to_end(&mut tail)?;
    let Some(newline) = tail.iter().rposition(|b| *b == b'\n') else {
        let is_torn = start == 0 && (tail.is_empty() || tail.starts_with(b"{"));
        if is_torn {
            file.set_len(0)?;
        }
        return Ok(if is_torn { End::Empty } else { End::Foreign });
    };
    let before = tail.get(..newline).unwrap_or_default();
    let line = before.rsplit(|b| *b == b'\n').next().unwrap_or_default();
    let record = split_line(line)
        .filter(|(body, prev, hash)| Digest256::of(prev, body) == *hash)
        .and_then(|(body, _, hash)| Some((Outline::parse(&body)?.seq, hash)));
    Ok(match record {
        Some((seq, hash)) => End::Record {
            seq,
            hash,
            end: start + u64::try_from(newline + 1).unwrap_or_default(),
        },
        None => End::Foreign,
    })
}

/// Whether a record may be of this database: it is there as it is, or its number was
/// given out and it has been rotated out since.
fn belongs(conn: &Connection, seq: u64, hash: Digest256) -> Result<bool, rusqlite::Error> {
    let stored = conn
        .query_row(
            "SELECT hash FROM audit WHERE seq = ?1",
            [signed(seq)],
            |row| digest(row, 0),
        )
        .optional()?;
    match stored {
        Some(stored) => Ok(stored == hash),
        None => conn.query_row("SELECT ?1 <= last_seq FROM ledger", [signed(seq)], |row| {
            row.get(0)
        }),
    }
}

/// Makes the file `.1`, that one `.2`, and so on; the oldest goes.
fn rotate(options: &JsonlOptions) -> std::io::Result<()> {
    let numbered = |n: u32| with_suffix(&options.path, &format!(".{n}"));
    if options.keep == 0 {
        return fs::remove_file(&options.path);
    }
    for n in (1..options.keep).rev() {
        match fs::rename(numbered(n), numbered(n + 1)) {
            Err(e) if e.kind() != std::io::ErrorKind::NotFound => return Err(e),
            _ => {}
        }
    }
    fs::rename(&options.path, numbered(1))
}

#[cfg(test)]
mod tests {
    use super::super::chain::write_line;
    use super::*;

    fn end_of(content: &[u8]) -> (End, Vec<u8>) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("x");
        fs::write(&path, content).unwrap();
        let mut file = open_file(&path).unwrap();
        let end = find_end(&mut file, content.len() as u64).unwrap();
        (end, fs::read(&path).unwrap())
    }

    #[test]
    fn the_end_of_a_file_is_its_last_whole_record() {
        let body = br#"{"kind":"dns","seq":7,"ts":2,"v":1}"#;
        let hash = Digest256::of(&Digest256::ZERO, body);
        let mut line = Vec::new();
        write_line(&mut line, body, &Digest256::ZERO, &hash);
        line.push(b'\n');
        let end = line.len() as u64;
        let record = End::Record { seq: 7, hash, end };

        assert_eq!(end_of(b""), (End::Empty, vec![]));
        assert_eq!(end_of(&line).0, record);
        assert_eq!(end_of(&[&line[..], b"{\"kind\":\"d"].concat()).0, record);
        assert_eq!(end_of(&[&line[..], &[0; 100]].concat()).0, record);
        // A torn first line is ours to cut; anything else is somebody's file.
        assert_eq!(end_of(&line[..20]), (End::Empty, vec![]));
        for foreign in [&b"notes"[..], b"notes\n", b"notes\nmore", b"{\"a\":1}\n"] {
            assert_eq!(end_of(foreign), (End::Foreign, foreign.to_vec()));
        }
    }

    #[test]
    fn old_files_are_numbered_and_the_oldest_goes() {
        let dir = tempfile::tempdir().unwrap();
        let options = JsonlOptions {
            path: dir.path().join("x"),
            max_bytes: 1,
            keep: 2,
        };
        for content in ["a", "b", "c"] {
            fs::write(&options.path, content).unwrap();
            rotate(&options).unwrap();
        }
        let read = |name: &str| fs::read_to_string(dir.path().join(name)).ok();
        assert_eq!(read("x"), None);
        assert_eq!(read("x.1").as_deref(), Some("c"));
        assert_eq!(read("x.2").as_deref(), Some("b"));
        assert_eq!(read("x.3"), None);
    }
}
