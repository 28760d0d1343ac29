//! The writer thread, the only one that writes to the database.
//!
//! It takes commands in batches, one transaction each. A batch with a waiting caller is committed
//! at once; a batch of traffic events alone waits up to 20 ms for more, because a commit costs a
//! disk flush whether it has one record or a thousand.

use std::collections::VecDeque;
use std::path::PathBuf;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::mpsc::{self, RecvTimeoutError, TryRecvError};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{JoinHandle, Thread};
use std::time::{Duration, Instant};

use policy::audit::AuditEvent;
use policy::clock::UnixMillis;
use rusqlite::Connection;
use tokio::sync::oneshot;

use crate::audit::AuditOptions;
use crate::audit::merge::merge_floods;
use crate::audit::queue::{Entry, QUEUE_CAPACITY};
use crate::connection;
use crate::database::{Database, Totals};
use crate::error::{StoreError, is_corruption};
use crate::files;
use crate::health::State;
use crate::jsonl::{Follower, Message};
use crate::recovery::StagedDatabase;
use crate::registry::RegistrySnapshot;
use crate::{DATABASE, StoreOptions};

pub(crate) use self::durable::{CommitCallback, Durable, LiveHolder, ReplySender};

mod durable;
mod lifecycle;
#[cfg(test)]
mod tests;

/// How long traffic events wait for further events. A crash can lose the events of this time and of
/// one commit.
const LINGER: Duration = Duration::from_millis(20);

/// Size from which a batch does not wait for further events: half of the queue of one sandbox, so
/// that the other half can be filled while the batch is written.
const FULL_BATCH: usize = QUEUE_CAPACITY / 2;

/// Maximum number of commands in a batch, so that a commit is short and a crash loses little.
const MAX_BATCH: usize = 1024;

/// Maximum number of records that a batch rotates out (rounded up to a segment), in addition to two
/// for each record that it writes: enough to keep up with any flood, without a long stall.
const ROTATE_STEP: u64 = 512;

/// Maximum time between two records of the chain heads.
const MAX_HEADS_AGE: Duration = Duration::from_secs(60);

/// Pause before the first retry; each further pause is twice as long.
const FIRST_RETRY_PAUSE: Duration = Duration::from_millis(100);

/// Maximum pause between retries.
const MAX_RETRY_PAUSE: Duration = Duration::from_secs(5);

/// A command to the writer.
pub(crate) enum Command {
    /// Write a traffic event with the next batch.
    Traffic(Entry),
    /// Execute a durable command, and reply when its result is on disk.
    Durable(Durable),
    /// Reply when all earlier commands are on disk.
    Flush(ReplySender<()>),
    /// Change the options of the audit log.
    Options(AuditOptions),
    /// Put another database in place.
    Swap {
        staged: StagedDatabase,
        event: Box<AuditEvent>,
        now: UnixMillis,
        reply: ReplySender<()>,
    },
    /// A reader found corruption.
    CorruptionFound(String),
    /// Flush everything and end the thread.
    Close(ReplySender<()>),
    /// Run a test's closure on this thread.
    #[cfg(test)]
    Test(Box<dyn FnOnce(&mut Writer) + Send>),
}

/// Shared by all handles: the channel to the writer.
#[derive(Debug)]
pub(crate) struct Link {
    pub(crate) state: Arc<State>,
    pub(crate) dir: PathBuf,
    commands: mpsc::Sender<Command>,
    /// The writer thread, to wake it while it waits for more events.
    writer: Thread,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl Link {
    pub(crate) fn database_path(&self) -> PathBuf {
        self.dir.join(DATABASE)
    }

    pub(crate) fn send(&self, command: Command) -> Result<(), StoreError> {
        let is_traffic = matches!(command, Command::Traffic(_));
        let mut completes_batch = false;
        if is_traffic {
            let before = self.state.counters.queued.fetch_add(1, Relaxed);
            completes_batch = (before + 1).is_multiple_of(FULL_BATCH);
        }
        let sent = self.commands.send(command).map_err(|_| {
            if is_traffic {
                self.state.counters.queued.fetch_sub(1, Relaxed);
                self.state.counters.lost.fetch_add(1, Relaxed);
            }
            StoreError::Closed
        });
        if !is_traffic || completes_batch {
            self.writer.unpark();
        }
        sent
    }

    pub(crate) async fn request<T>(
        &self,
        command: impl FnOnce(ReplySender<T>) -> Command,
    ) -> Result<T, StoreError> {
        let (reply, response) = oneshot::channel();
        self.send(command(reply))?;
        response.await.unwrap_or(Err(StoreError::Closed))
    }

    /// Runs `read` on a read-only connection, and reports corruption to the writer. Blocks.
    pub(crate) fn read<T>(
        &self,
        read: impl FnOnce(&Connection) -> Result<T, rusqlite::Error>,
    ) -> Result<T, StoreError> {
        self.state.check_available()?;
        connection::connect_read_only(&self.database_path())
            .and_then(|conn| read(&conn))
            .map_err(|error| {
                if is_corruption(&error) {
                    // Sending fails if the writer has ended, which does not change the result.
                    let _ = self.send(Command::CorruptionFound(error.to_string()));
                }
                StoreError::read(&error)
            })
    }

    /// Whether the writer accepts commands.
    pub(crate) fn is_running(&self) -> bool {
        let thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner);
        thread.as_ref().is_some_and(|thread| !thread.is_finished())
    }

    /// Waits until the writer has ended.
    pub(crate) fn join_blocking(&self) {
        let thread = self
            .thread
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take();
        if let Some(thread) = thread
            && thread.join().is_err()
        {
            tracing::error!("the database writer thread panicked");
        }
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        // Waits for the flush: the next process that opens the file must not race with a late
        // write.
        let (reply, _) = oneshot::channel();
        let _ = self.commands.send(Command::Close(reply));
        self.writer.unpark();
        self.join_blocking();
    }
}

/// Runs blocking work on a thread of the blocking pool.
pub(crate) async fn run_blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, StoreError> + Send + 'static,
) -> Result<T, StoreError> {
    tokio::task::spawn_blocking(work)
        .await
        .unwrap_or(Err(StoreError::Closed))
}

/// Opens the database and starts the threads.
pub(crate) fn start(options: StoreOptions) -> Result<Link, StoreError> {
    let StoreOptions { dir, audit, now } = options;
    files::make_dir(&dir)?;
    let state = Arc::new(State::new(audit));
    let (db, known_seq) = lifecycle::open(&dir, &state, now)?;
    let failed = |e: std::io::Error| StoreError::file(&dir, e);
    let jsonl = Follower::start(dir.join(DATABASE), Arc::clone(&state)).map_err(failed)?;
    let (commands, inbox) = mpsc::channel();
    let writer = Writer {
        dir: dir.clone(),
        state: Arc::clone(&state),
        inbox,
        db,
        jsonl,
        pending: VecDeque::new(),
        linger: LINGER,
        retry: None,
        rotation_failed: false,
        heads_due: Instant::now() + MAX_HEADS_AGE,
        last_ts: now,
        known_seq,
    };
    let thread = std::thread::Builder::new()
        .name("store-writer".to_owned())
        .spawn(move || writer.run())
        .map_err(failed)?;
    Ok(Link {
        state,
        dir,
        commands,
        writer: thread.thread().clone(),
        thread: Mutex::new(Some(thread)),
    })
}

/// The state of the writer thread.
pub(crate) struct Writer {
    dir: PathBuf,
    state: Arc<State>,
    inbox: mpsc::Receiver<Command>,
    /// None while the registry is unavailable.
    db: Option<Database>,
    jsonl: Follower,
    /// Traffic events that are not on disk yet.
    pending: VecDeque<Entry>,
    /// How long traffic events wait for further events.
    linger: Duration,
    /// When to retry after a failed transaction, and how long the pause was.
    retry: Option<(Instant, Duration)>,
    rotation_failed: bool,
    /// When heads are due to be recorded, if anything was written.
    heads_due: Instant,
    /// The latest time of any command, for records that the writer creates itself.
    last_ts: UnixMillis,
    /// The last record number that is known to be in use, while there is no database.
    known_seq: u64,
}

/// The commands of one round.
#[derive(Default)]
struct Batch {
    durable: Vec<Durable>,
    /// A command that runs after the commit, and ends the batch.
    control: Option<Command>,
    /// Whether every handle was dropped.
    handles_dropped: bool,
}

impl Writer {
    fn run(mut self) {
        loop {
            let batch = self.gather();
            self.commit(batch.durable, false);
            match batch.control {
                Some(Command::Close(reply)) => {
                    let outcome = self.shut_down();
                    // A dropped handle does not wait for the result.
                    let _ = reply.send(outcome);
                    return;
                }
                Some(command) => self.control(command),
                None if batch.handles_dropped => {
                    let _ = self.shut_down();
                    return;
                }
                None => {}
            }
        }
    }

    /// Waits for a command and collects a batch from the queue.
    fn gather(&mut self) -> Batch {
        let mut batch = Batch::default();
        let first = match self.wait_timeout() {
            None => self.inbox.recv().map_err(RecvTimeoutError::from),
            Some(wait) => self.inbox.recv_timeout(wait),
        };
        match first {
            Ok(command) => self.add_to_batch(command, &mut batch),
            Err(RecvTimeoutError::Timeout) => return batch,
            Err(RecvTimeoutError::Disconnected) => batch.handles_dropped = true,
        }
        let until = Instant::now() + self.linger;
        let mut count = 1;
        while count < MAX_BATCH && batch.control.is_none() && !batch.handles_dropped {
            match self.inbox.try_recv() {
                Ok(command) => self.add_to_batch(command, &mut batch),
                Err(TryRecvError::Disconnected) => batch.handles_dropped = true,
                Err(TryRecvError::Empty) => {
                    let is_urgent = !batch.durable.is_empty()
                        || self.pending.is_empty()
                        || self.pending.len() >= FULL_BATCH;
                    let left = until.saturating_duration_since(Instant::now());
                    if is_urgent || left.is_zero() {
                        break;
                    }
                    // Records do not wake this thread through the channel, because that costs the
                    // sender more than the record. A waiting caller wakes it, and so does the event
                    // that completes a batch.
                    std::thread::park_timeout(left);
                    continue;
                }
            }
            count += 1;
        }
        batch
    }

    /// How long to wait for the first command before other work is due; None waits without a
    /// timeout.
    fn wait_timeout(&self) -> Option<Duration> {
        let db = self.db.as_ref()?;
        let now = Instant::now();
        if let Some((at, _)) = self.retry {
            return Some(at.saturating_duration_since(now));
        }
        if !self.pending.is_empty() {
            return Some(Duration::ZERO);
        }
        if !self.rotation_failed && db.ledger.is_over(self.state.options.load().max_bytes) {
            return Some(Duration::ZERO);
        }
        db.ledger
            .has_unrecorded_heads()
            .then(|| self.heads_due.saturating_duration_since(now))
    }

    fn add_to_batch(&mut self, command: Command, batch: &mut Batch) {
        match command {
            Command::Traffic(entry) => self.enqueue(entry),
            Command::Durable(durable) => {
                self.last_ts = self.last_ts.max(durable.now());
                batch.durable.push(durable);
            }
            other => batch.control = Some(other),
        }
    }

    fn enqueue(&mut self, entry: Entry) {
        self.last_ts = self.last_ts.max(entry.ts);
        let dropped = entry.slot.as_ref().map_or(0, |p| p.take_dropped());
        if dropped > 0 {
            let mut event = AuditEvent::lifecycle("audit_dropped", entry.event.sandbox.clone());
            event.count = dropped;
            self.state.counters.queued.fetch_add(1, Relaxed);
            self.pending.push_back(Entry {
                event: Box::new(event),
                ts: entry.ts,
                slot: None,
            });
        }
        self.pending.push_back(entry);
    }

    /// Writes the pending events and the durable commands in one transaction, and then answers the
    /// callers. Readers see no part of the batch before the commit.
    fn commit(&mut self, durable: Vec<Durable>, closing: bool) {
        let Some(db) = &mut self.db else {
            return self.refuse(durable);
        };
        let now = Instant::now();
        let is_due = closing || self.retry.is_none_or(|(at, _)| at <= now);
        let has_unrecorded_heads =
            db.ledger.has_unrecorded_heads() && (closing || self.heads_due <= now);
        let max_bytes = self.state.options.load().max_bytes;
        let is_over = !self.rotation_failed && db.ledger.is_over(max_bytes);
        let is_probe = is_due && self.retry.is_some();
        // After a failed write, a durable command is tried without the pending events, which wait
        // for their retry.
        let mut entries: Vec<Entry> = match is_due {
            true => self.pending.drain(..).collect(),
            false => Vec::new(),
        };
        let idle = entries.is_empty() && durable.is_empty();
        if idle && !is_probe && (!is_due || !(has_unrecorded_heads || is_over)) {
            return;
        }
        let merged = merge_floods(&mut entries);
        let counters = &self.state.counters;
        counters.merged.fetch_add(merged, Relaxed);
        counters
            .queued
            .fetch_sub(usize::try_from(merged).unwrap_or_default(), Relaxed);

        let before = self.state.snapshot.load_full();
        let mut changed: Option<RegistrySnapshot> = None;
        let mut callbacks: Vec<CommitCallback> = Vec::with_capacity(durable.len());
        let mut durable = durable.into_iter();
        let mut rotation: Result<(), rusqlite::Error> = Ok(());
        let (last_ts, may_rotate) = (self.last_ts, !self.rotation_failed);
        let outcome = db.transact(max_bytes, |ledger_tx| {
            for entry in &entries {
                ledger_tx.append(&entry.event, entry.ts)?;
            }
            for command in durable.by_ref() {
                command.apply(ledger_tx, &before, &mut changed, &mut callbacks)?;
            }
            if has_unrecorded_heads || ledger_tx.should_record_heads() {
                let rows = changed.as_ref().unwrap_or(&before);
                ledger_tx.retire(last_ts, |id| rows.contains(id))?;
                ledger_tx.record_heads(last_ts)?;
            }
            let budget = ROTATE_STEP + 2 * ledger_tx.written();
            while may_rotate
                && rotation.is_ok()
                && ledger_tx.is_over()
                && ledger_tx.rotated() < budget
            {
                rotation = lifecycle::rotate(ledger_tx)?;
            }
            Ok(())
        });
        // Commands after a failed one were not started; they fail as well.
        callbacks.extend(durable.map(Durable::fail_unreached));

        match outcome {
            Ok(((), totals)) => {
                self.on_committed(now, &totals, changed, rotation);
                for callback in callbacks {
                    callback(Ok(()));
                }
                self.release(entries);
            }
            Err(error) => {
                let error = self.on_failed(&error, entries);
                for callback in callbacks {
                    callback(Err(error.clone()));
                }
            }
        }
    }

    fn on_committed(
        &mut self,
        began: Instant,
        totals: &Totals,
        changed: Option<RegistrySnapshot>,
        rotation: Result<(), rusqlite::Error>,
    ) {
        let counters = &self.state.counters;
        for (kind, count) in &totals.written {
            counters.records(*kind).fetch_add(*count, Relaxed);
        }
        counters.rotated.fetch_add(totals.rotated, Relaxed);
        counters.batches.fetch_add(1, Relaxed);
        let took = u64::try_from(began.elapsed().as_nanos()).unwrap_or(u64::MAX);
        counters.commit_nanos.fetch_add(took, Relaxed);
        if let Some(snapshot) = changed {
            self.state.publish(snapshot);
        }
        if self.retry.take().is_some() {
            tracing::info!("writing to the database works again");
        }
        self.state.update_failures(|t| t.audit = None);
        if let Err(error) = rotation {
            tracing::error!(%error, "rotating the audit log failed; run `palisade audit verify`");
            self.rotation_failed = true;
            self.state
                .update_failures(|t| t.rotation = Some(error.to_string()));
        }
        if let Some(db) = &self.db {
            if !db.ledger.has_unrecorded_heads() {
                self.heads_due = Instant::now() + MAX_HEADS_AGE;
            }
            self.state.committed.send_replace(db.ledger.last_seq);
        }
        self.jsonl.send(Message::Committed);
    }

    /// Releases the queue slots of written or lost entries.
    fn release(&self, entries: Vec<Entry>) {
        self.state.counters.queued.fetch_sub(entries.len(), Relaxed);
        let mut names: Vec<_> = entries.into_iter().map(|e| e.event.sandbox).collect();
        names.sort();
        names.dedup();
        self.state.queues.remove_idle(names.iter());
    }

    /// Keeps the entries for a retry, or moves a corrupt file aside.
    fn on_failed(&mut self, error: &rusqlite::Error, entries: Vec<Entry>) -> StoreError {
        self.state.counters.failed_batches.fetch_add(1, Relaxed);
        for entry in entries.into_iter().rev() {
            self.pending.push_front(entry);
        }
        if is_corruption(error) {
            return self.abandon_database(&error.to_string());
        }
        let now = Instant::now();
        match self.retry {
            // Only a durable command was tried; the retry time of the pending events does not
            // change.
            Some((at, _)) if at > now => {}
            Some((_, pause)) => {
                let pause = MAX_RETRY_PAUSE.min(pause * 2);
                self.retry = Some((now + pause, pause));
            }
            None => {
                tracing::error!(%error, "writing to the database failed; retrying");
                self.retry = Some((now + FIRST_RETRY_PAUSE, FIRST_RETRY_PAUSE));
            }
        }
        self.state
            .update_failures(|t| t.audit = Some(error.to_string()));
        StoreError::write(error)
    }

    /// Answers all commands while there is no database.
    fn refuse(&mut self, durable: Vec<Durable>) {
        let reason = self
            .state
            .check_available()
            .err()
            .unwrap_or(StoreError::Closed);
        for command in durable {
            command.fail_unreached()(Err(reason.clone()));
        }
        self.lose_pending();
    }

    fn lose_pending(&mut self) {
        let entries: Vec<Entry> = self.pending.drain(..).collect();
        let count = u64::try_from(entries.len()).unwrap_or_default();
        self.state.counters.lost.fetch_add(count, Relaxed);
        self.release(entries);
    }
}
