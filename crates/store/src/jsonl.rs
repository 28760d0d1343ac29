//! The JSONL file: written from the database by a thread of its own.
//!
//! The thread reads committed records and appends them, so a slow or failing file delays no other
//! part, and catching up after a start, an error or a new path is the same code as normal
//! operation. The last line of the file determines the next record.
//!
//! A file is only truncated, renamed or appended to if its content was written here. Any other file
//! at that path is left unchanged, and health reports it.

use std::ffi::{OsStr, OsString};
use std::fs::{self, File, OpenOptions};
use std::io::{Read, Seek, SeekFrom, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rusqlite::{Connection, OptionalExtension};

use crate::DATABASE;
use crate::audit::JsonlOptions;
use crate::audit::chain::{ChainName, Digest256, RecordHeader, chain_text, split_line};
use crate::audit::ledger::{MAX_SEQ, digest, to_i64, to_u64};
use crate::audit::query::{AuditFilter, Line, select_lines};
use crate::connection;
use crate::files::with_suffix;
use crate::health::State;
use crate::recovery::{CREATED_MARKER, UNAVAILABLE_MARKER};

/// Records read at a time.
const PAGE: usize = 512;

/// How many bytes at the end of a file are searched for its last record. The longest line is far
/// shorter.
const TAIL_WINDOW: u64 = 1024 * 1024;

/// The gate's lock file in the state directory. It is empty, like a new file.
const LOCK: &str = "lock";

/// Pause before the first retry; each further pause is twice as long.
const FIRST_RETRY_PAUSE: Duration = Duration::from_secs(1);

/// Maximum pause between retries.
const MAX_RETRY_PAUSE: Duration = Duration::from_secs(30);

/// A message to the thread.
#[derive(Debug)]
pub(crate) enum Message {
    /// New records were committed.
    Committed,
    /// The configured file has changed.
    Options(Option<JsonlOptions>),
    /// The database was replaced.
    Replaced,
    /// Write the remaining records once, and end.
    Close,
}

/// A handle to the running JSONL thread.
#[derive(Debug)]
pub(crate) struct Follower {
    messages: mpsc::Sender<Message>,
    thread: Option<JoinHandle<()>>,
}

impl Follower {
    /// Starts the thread that follows the database at `database`.
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
                    written: None,
                    retry: None,
                }
                .run(&inbox);
            })?;
        Ok(Self {
            messages,
            thread: Some(thread),
        })
    }

    /// Sends a message to the thread.
    pub(crate) fn send(&self, message: Message) {
        // Fails only if the thread has ended; the database works without it.
        let _ = self.messages.send(message);
    }

    /// Lets the thread catch up one last time and waits until it has ended.
    pub(crate) fn close(&mut self) {
        self.send(Message::Close);
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
    sink: Option<JsonlFile>,
    /// The number of the last record that was written, in case the file is removed meanwhile.
    written: Option<u64>,
    /// When to retry after an error, and how long the pause was.
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
                        closing |= self.handle(message);
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

    /// Handles a message. Returns whether it was the last message.
    fn handle(&mut self, message: Message) -> bool {
        match message {
            Message::Committed => {}
            Message::Options(options) => {
                if options != self.options {
                    self.options = options;
                    self.reset();
                    self.retry = None;
                    self.state.update_failures(|t| t.jsonl = None);
                }
            }
            Message::Replaced => self.reset(),
            Message::Close => return true,
        }
        false
    }

    /// Closes the file, so that it is opened again.
    fn reset(&mut self) {
        self.sink = None;
        self.written = None;
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
        // New records do not shorten the pause after an error.
        if self.retry.is_some_and(|(at, _)| at > Instant::now()) {
            return;
        }
        match self.append_all(&options) {
            Ok(()) => {
                self.retry = None;
                self.state.update_failures(|t| t.jsonl = None);
            }
            Err(error) => {
                let path = options.path.display();
                if self.retry.is_none() {
                    tracing::warn!(%path, %error, "writing the JSONL file failed");
                }
                // Opening the file again truncates a partly written line.
                self.sink = None;
                let pause = match self.retry {
                    None => FIRST_RETRY_PAUSE,
                    Some((_, pause)) => MAX_RETRY_PAUSE.min(pause * 2),
                };
                self.retry = Some((Instant::now() + pause, pause));
                self.state.counters.jsonl_errors.fetch_add(1, Relaxed);
                self.state.update_failures(|t| {
                    t.jsonl = Some(format!("{path} cannot be written: {error}"));
                });
            }
        }
    }

    fn append_all(&mut self, options: &JsonlOptions) -> Result<(), JsonlError> {
        let conn = connection::connect_read_only(&self.database)?;
        // The database may just have been replaced, before this thread received the message.
        if let Some(last) = self.sink.as_ref().and_then(|sink| sink.last.as_ref())
            && relation(&conn, last)? == Relation::Unrelated
        {
            self.reset();
        }
        loop {
            let sink = match self.sink.take() {
                Some(sink) => sink,
                None => JsonlFile::open(options, &conn, &self.database, self.written)?,
            };
            let sink = self.sink.insert(sink);
            let lines = select_lines(&conn, &page(sink.seq, PAGE))?;
            if !lines.is_empty() && !sink.is_in_place(&options.path)? {
                tracing::info!(path = %options.path.display(), "the JSONL file was replaced by another program");
                self.sink = None;
                continue;
            }
            sink.append(&lines, options)?;
            self.written = Some(sink.seq);
            self.state.exported.send_replace(sink.seq);
            if lines.len() < PAGE {
                return Ok(());
            }
        }
    }
}

/// The next `limit` records after `seq`.
fn page(seq: u64, limit: usize) -> AuditFilter {
    AuditFilter {
        after_seq: Some(seq),
        limit: Some(limit),
        ..AuditFilter::default()
    }
}

#[derive(Debug, thiserror::Error)]
enum JsonlError {
    #[error(transparent)]
    File(#[from] std::io::Error),
    #[error("the database could not be read: {0}")]
    Database(#[from] rusqlite::Error),
    #[error(
        "it is not an audit log of palisade and was not changed; move it away or set \
         `audit.jsonl` to another path"
    )]
    NotAuditLog,
    #[error("it is a file of the store itself; set `audit.jsonl` to another path")]
    StoreFile,
}

/// The open file, and its last record.
struct JsonlFile {
    file: File,
    size: u64,
    /// The next line is the first record after this number.
    seq: u64,
    /// The last line, if there is one.
    last: Option<LastRecord>,
}

impl JsonlFile {
    /// Opens the file and finds the record to continue with. An incomplete line at its end is
    /// truncated. A file that cannot be continued without a gap, because it ends with a record of
    /// another database or the next record was rotated out, is rotated and a new one is started.
    fn open(
        options: &JsonlOptions,
        conn: &Connection,
        database: &Path,
        written: Option<u64>,
    ) -> Result<Self, JsonlError> {
        let path = &options.path;
        if is_store_path(path, database) {
            return Err(JsonlError::StoreFile);
        }
        let mut file = open_file(path)?;
        if is_store_file(&file, database)? {
            return Err(JsonlError::StoreFile);
        }
        let end = find_end(&mut file)?;
        match end {
            FileEnd::Empty => Ok(Self::empty(file, last_seq_before(options, conn, written)?)),
            FileEnd::Incomplete(text) => {
                let seq = last_seq_before(options, conn, written)?;
                let next = select_lines(conn, &page(seq, 1))?;
                if !next.iter().any(|line| line.bytes.starts_with(&text)) {
                    return Err(JsonlError::NotAuditLog);
                }
                file.set_len(0)?;
                Ok(Self::empty(file, seq))
            }
            FileEnd::Record(last) => {
                let seq = match relation(conn, &last)? {
                    Relation::Unrelated => 0,
                    _ if is_rotated_past(conn, last.seq)? => last.seq,
                    Relation::RotatedOut => last.seq,
                    Relation::Continues => {
                        file.set_len(last.end)?;
                        return Ok(Self {
                            file,
                            size: last.end,
                            seq: last.seq,
                            last: Some(last),
                        });
                    }
                };
                drop(file);
                rotate(options)?;
                Ok(Self::empty(open_file(path)?, seq))
            }
            FileEnd::Foreign => Err(JsonlError::NotAuditLog),
        }
    }

    /// The state of an empty file.
    fn empty(file: File, seq: u64) -> Self {
        Self {
            file,
            size: 0,
            seq,
            last: None,
        }
    }

    /// Whether the path still names the open file, with the same length. Programs that rotate logs
    /// move it away, truncate it, or replace it.
    fn is_in_place(&self, path: &Path) -> std::io::Result<bool> {
        match fs::metadata(path) {
            Ok(there) => {
                let open = self.file.metadata()?;
                let is_same = (there.dev(), there.ino()) == (open.dev(), open.ino());
                Ok(is_same && open.len() == self.size)
            }
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(false),
            Err(e) => Err(e),
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
            let text = last.bytes.strip_suffix(b"\n").unwrap_or(&last.bytes);
            self.last = LastRecord::parse_line(text, self.size);
        }
        Ok(())
    }
}

/// The number of the last record before an empty file: the last record that was written, or the
/// last record of `.1` if that file belongs to this log. A crash between renaming the file and
/// writing its first line must not export every record again.
fn last_seq_before(
    options: &JsonlOptions,
    conn: &Connection,
    written: Option<u64>,
) -> Result<u64, rusqlite::Error> {
    let older = match last_record(&with_suffix(&options.path, ".1")) {
        Some(last) if relation(conn, &last)? != Relation::Unrelated => last.seq,
        _ => 0,
    };
    Ok(written.unwrap_or_default().max(older))
}

/// Whether `path` is, or would be, one of the store's own files in the state directory.
fn is_store_path(path: &Path, database: &Path) -> bool {
    let real = |path: &Path| match path.parent() {
        Some(dir) if !dir.as_os_str().is_empty() => fs::canonicalize(dir).ok(),
        _ => fs::canonicalize(".").ok(),
    };
    let is_there = real(path).is_some_and(|dir| Some(dir) == real(database));
    is_there && path.file_name().is_some_and(is_store_file_name)
}

fn is_store_file_name(name: &OsStr) -> bool {
    let name = name.as_encoded_bytes();
    name.starts_with(DATABASE.as_bytes())
        || [UNAVAILABLE_MARKER, CREATED_MARKER, LOCK]
            .map(str::as_bytes)
            .contains(&name)
}

/// Whether `file` is one of the store's own files under another name.
fn is_store_file(file: &File, database: &Path) -> std::io::Result<bool> {
    let Some(dir) = database.parent() else {
        return Ok(false);
    };
    let found = file.metadata()?;
    for entry in fs::read_dir(dir)? {
        let entry = entry?;
        if is_store_file_name(&entry.file_name())
            && let Ok(own) = fs::metadata(entry.path())
            && (own.dev(), own.ino()) == (found.dev(), found.ino())
        {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Whether [`open_file`] would succeed. Leaves no new file behind.
pub(crate) fn check_path(path: &Path) -> std::io::Result<()> {
    if path.exists() {
        return open_file(path).map(drop);
    }
    // Creates and removes a file of another name: permissions alone do not show that a file system
    // is read-only.
    let name = path.file_name().unwrap_or_default();
    let mut probe = OsString::from(".");
    probe.push(name);
    probe.push(format!(".{}", std::process::id()));
    let probe = path.with_file_name(probe);
    let created = OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(&probe);
    created.and_then(|_| fs::remove_file(&probe))
}

fn open_file(path: &Path) -> std::io::Result<File> {
    // Opening a pipe would block until it has a reader.
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
enum FileEnd {
    /// The file is empty.
    Empty,
    /// The file has no complete line, only these bytes.
    Incomplete(Vec<u8>),
    /// The last complete line is this record; an incomplete line may follow.
    Record(LastRecord),
    /// The last complete line is not a record.
    Foreign,
}

/// The last complete record of a file.
#[derive(Debug, PartialEq, Eq)]
struct LastRecord {
    chain: ChainName,
    seq: u64,
    hash: Digest256,
    /// The offset after the record's newline.
    end: u64,
}

impl LastRecord {
    /// Parses a line without its newline; `end` is the offset after the newline.
    fn parse_line(line: &[u8], end: u64) -> Option<Self> {
        let (body, prev, hash) = split_line(line)?;
        let header = RecordHeader::parse(&body)?;
        let is_record = Digest256::of_record(&prev, &body) == hash && header.seq <= MAX_SEQ;
        is_record.then_some(Self {
            chain: header.sandbox,
            seq: header.seq,
            hash,
            end,
        })
    }
}

/// Reads the end of a file and changes nothing.
fn find_end(file: &mut File) -> std::io::Result<FileEnd> {
    let start = file.metadata()?.len().saturating_sub(TAIL_WINDOW);
    file.seek(SeekFrom::Start(start))?;
    let mut tail = Vec::new();
    file.take(TAIL_WINDOW).read_to_end(&mut tail)?;
    let Some(newline) = tail.iter().rposition(|b| *b == b'\n') else {
        return Ok(match (start, tail.is_empty()) {
            (_, true) => FileEnd::Empty,
            (0, false) => FileEnd::Incomplete(tail),
            _ => FileEnd::Foreign,
        });
    };
    let before = tail.get(..newline).unwrap_or_default();
    let line = before.rsplit(|b| *b == b'\n').next().unwrap_or_default();
    let end = start + u64::try_from(newline + 1).unwrap_or_default();
    Ok(LastRecord::parse_line(line, end).map_or(FileEnd::Foreign, FileEnd::Record))
}

/// The last record of the file at `path`; None if that is not a regular file or ends otherwise.
fn last_record(path: &Path) -> Option<LastRecord> {
    let mut file = fs::metadata(path)
        .is_ok_and(|m| m.is_file())
        .then(|| File::open(path).ok())??;
    match find_end(&mut file).ok()? {
        FileEnd::Record(last) => Some(last),
        FileEnd::Empty | FileEnd::Incomplete(_) | FileEnd::Foreign => None,
    }
}

/// The number of the last record that was exported to `path`, or to the file that was rotated
/// before it.
pub(crate) fn last_seq(path: &Path) -> Option<u64> {
    let (newest, older) = (last_record(path), last_record(&with_suffix(path, ".1")));
    newest.or(older).map(|last| last.seq)
}

/// How the last record of a file relates to this database.
#[derive(Debug, PartialEq, Eq)]
enum Relation {
    /// The record is in the database, or is the last of its chain that was rotated out.
    Continues,
    /// The record was rotated out, and so were later records of its chain.
    RotatedOut,
    /// The record does not seem to belong to a chain of this database.
    Unrelated,
}

fn relation(conn: &Connection, last: &LastRecord) -> Result<Relation, rusqlite::Error> {
    let stored = conn
        .query_row(
            "SELECT hash FROM audit WHERE seq = ?1",
            [to_i64(last.seq)],
            |row| digest(row, 0),
        )
        .optional()?;
    if let Some(stored) = stored {
        return Ok(match stored == last.hash {
            true => Relation::Continues,
            false => Relation::Unrelated,
        });
    }
    let base = conn
        .query_row(
            "SELECT base_seq, base_hash FROM chains WHERE name = ?1",
            [chain_text(&last.chain)],
            |row| Ok((to_u64(row.get(0)?), digest(row, 1)?)),
        )
        .optional()?;
    Ok(match base {
        Some(base) if base == (last.seq, last.hash) => Relation::Continues,
        Some((seq, _)) if seq > last.seq => Relation::RotatedOut,
        _ => Relation::Unrelated,
    })
}

/// Whether records after `seq` were already rotated out.
fn is_rotated_past(conn: &Connection, seq: u64) -> Result<bool, rusqlite::Error> {
    conn.query_row(
        "SELECT coalesce(max(base_seq), 0) > ?1 FROM chains",
        [to_i64(seq)],
        |row| row.get(0),
    )
}

/// Renames the file to `.1`, the previous `.1` to `.2`, and so on; the oldest file is removed.
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
    use super::*;
    use crate::audit::chain::write_line;

    fn end_of(content: &[u8]) -> FileEnd {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("x");
        fs::write(&path, content).unwrap();
        let mut file = open_file(&path).unwrap();
        let end = find_end(&mut file).unwrap();
        assert_eq!(
            fs::read(&path).unwrap(),
            content,
            "reading the end changes nothing"
        );
        end
    }

    #[test]
    fn end_of_file_is_its_last_complete_record() {
        let body = br#"{"kind":"dns","seq":7,"ts":2,"v":1}"#;
        let hash = Digest256::of_record(&Digest256::ZERO, body);
        let mut line = Vec::new();
        write_line(&mut line, body, &Digest256::ZERO, &hash);
        line.push(b'\n');
        let record = || {
            FileEnd::Record(LastRecord {
                chain: None,
                seq: 7,
                hash,
                end: line.len() as u64,
            })
        };
        assert_eq!(end_of(b""), FileEnd::Empty);
        assert_eq!(end_of(&line), record());
        assert_eq!(end_of(&[&line[..], b"{\"kind\":\"d"].concat()), record());
        assert_eq!(end_of(&[&line[..], &[0; 100]].concat()), record());
        assert_eq!(
            end_of(&line[..20]),
            FileEnd::Incomplete(line[..20].to_vec())
        );
        for foreign in [&b"notes\n"[..], b"notes\nmore", b"{\"a\":1}\n"] {
            assert_eq!(end_of(foreign), FileEnd::Foreign);
        }
        let long = vec![b'x'; usize::try_from(TAIL_WINDOW).unwrap() + 1];
        assert_eq!(end_of(&long), FileEnd::Foreign);
    }

    #[test]
    fn rotation_numbers_old_files_and_removes_the_oldest() {
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
