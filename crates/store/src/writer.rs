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
use crate::audit::queue::{Entry, QUEUE};
use crate::connection;
use crate::database::{Database, Totals};
use crate::error::{StoreError, is_corruption};
use crate::files;
use crate::health::State;
use crate::jsonl::{Follower, Message};
use crate::recovery::Staged;
use crate::registry::RegistrySnapshot;
use crate::{DATABASE, StoreOptions};

pub(crate) use self::durable::{CommitCallback, Durable, LiveHolder, ReplySender};

mod durable;
mod lifecycle;
#[cfg(test)]
mod tests;

/// How long traffic events wait for more. A crash can lose the events of this time and of one
/// commit.
const LINGER: Duration = Duration::from_millis(20);

/// A batch of this size does not wait for more: half of what one sandbox may have in flight, so
/// that the other half can be queued while this one is written.
const COMPANY: usize = QUEUE / 2;

/// Maximum size of a batch, so that no caller waits long for one and a crash loses little.
const MAX_BATCH: usize = 1024;

/// Maximum number of records that a batch rotates out (rounded up to a segment), in addition to two
/// for each one it writes: enough to keep up with any flood, without a long stall.
const ROTATE_STEP: u64 = 512;

/// How long heads may go unrecorded.
const STATE_AFTER: Duration = Duration::from_secs(60);

const FIRST_RETRY: Duration = Duration::from_millis(100);
const LAST_RETRY: Duration = Duration::from_secs(5);

/// A command to the writer.
pub(crate) enum Command {
    /// Write this soon.
    Traffic(Entry),
    /// Do this, and answer when it is on disk.
    Durable(Durable),
    /// Answer when everything before this is on disk.
    Flush(ReplySender<()>),
    /// Change the options of the audit log.
    Options(AuditOptions),
    /// Put another database in place.
    Swap {
        staged: Staged,
        event: Box<AuditEvent>,
        now: UnixMillis,
        reply: ReplySender<()>,
    },
    /// A reader found corruption.
    Broken(String),
    /// Flush and end.
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
        let mut is_company = false;
        if is_traffic {
            let before = self.state.counters.queued.fetch_add(1, Relaxed);
            is_company = (before + 1).is_multiple_of(COMPANY);
        }
        let sent = self.commands.send(command).map_err(|_| {
            if is_traffic {
                self.state.counters.queued.fetch_sub(1, Relaxed);
                self.state.counters.lost.fetch_add(1, Relaxed);
            }
            StoreError::Closed
        });
        if !is_traffic || is_company {
            self.writer.unpark();
        }
        sent
    }

    pub(crate) async fn ask<T>(
        &self,
        command: impl FnOnce(ReplySender<T>) -> Command,
    ) -> Result<T, StoreError> {
        let (reply, answer) = oneshot::channel();
        self.send(command(reply))?;
        answer.await.unwrap_or(Err(StoreError::Closed))
    }

    /// Runs `read` on a read-only connection. Reports corruption that it finds to the writer.
    /// Blocks.
    pub(crate) fn read<T>(
        &self,
        read: impl FnOnce(&Connection) -> Result<T, rusqlite::Error>,
    ) -> Result<T, StoreError> {
        self.state.check_available()?;
        connection::connect_read_only(&self.database_path())
            .and_then(|conn| read(&conn))
            .map_err(|error| {
                if is_corruption(&error) {
                    // The result is the same if the writer has ended already.
                    let _ = self.send(Command::Broken(error.to_string()));
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

/// Runs blocking work on a thread that may block.
pub(crate) async fn off_thread<T: Send + 'static>(
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
        state_at: Instant::now() + STATE_AFTER,
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
    /// How long traffic events wait for more.
    linger: Duration,
    /// When to retry after a failed transaction, and how long the pause was.
    retry: Option<(Instant, Duration)>,
    rotation_failed: bool,
    /// When heads are due to be recorded, if anything was written.
    state_at: Instant,
    /// The latest time of any command, for records that the writer creates itself.
    last_ts: UnixMillis,
    /// The last number that is known to be in use, while there is no database.
    known_seq: u64,
}

/// The commands of one round.
#[derive(Default)]
struct Batch {
    durable: Vec<Durable>,
    /// A command that runs after the commit, and ends the batch.
    then: Option<Command>,
    /// Whether every handle was dropped.
    gone: bool,
}

impl Writer {
    fn run(mut self) {
        loop {
            let batch = self.gather();
            self.commit(batch.durable, false);
            match batch.then {
                Some(Command::Close(reply)) => {
                    let outcome = self.end();
                    // A dropped handle does not wait for the result.
                    let _ = reply.send(outcome);
                    return;
                }
                Some(command) => self.control(command),
                None if batch.gone => {
                    let _ = self.end();
                    return;
                }
                None => {}
            }
        }
    }

    /// Waits for commands and takes those that are queued.
    fn gather(&mut self) -> Batch {
        let mut batch = Batch::default();
        let first = match self.wait_timeout() {
            None => self.inbox.recv().map_err(RecvTimeoutError::from),
            Some(wait) => self.inbox.recv_timeout(wait),
        };
        match first {
            Ok(command) => self.sort(command, &mut batch),
            Err(RecvTimeoutError::Timeout) => return batch,
            Err(RecvTimeoutError::Disconnected) => batch.gone = true,
        }
        let until = Instant::now() + self.linger;
        let mut taken = 1;
        while taken < MAX_BATCH && batch.then.is_none() && !batch.gone {
            match self.inbox.try_recv() {
                Ok(command) => self.sort(command, &mut batch),
                Err(TryRecvError::Disconnected) => batch.gone = true,
                Err(TryRecvError::Empty) => {
                    let is_urgent = !batch.durable.is_empty()
                        || self.pending.is_empty()
                        || self.pending.len() >= COMPANY;
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
            taken += 1;
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
            .is_unstated()
            .then(|| self.state_at.saturating_duration_since(now))
    }

    fn sort(&mut self, command: Command, batch: &mut Batch) {
        match command {
            Command::Traffic(entry) => self.enqueue(entry),
            Command::Durable(durable) => {
                self.last_ts = self.last_ts.max(durable.now());
                batch.durable.push(durable);
            }
            other => batch.then = Some(other),
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
    /// callers. Nothing is visible anywhere before the commit.
    fn commit(&mut self, durable: Vec<Durable>, closing: bool) {
        let Some(db) = &mut self.db else {
            return self.refuse(durable);
        };
        let now = Instant::now();
        let is_due = closing || self.retry.is_none_or(|(at, _)| at <= now);
        let is_unstated = db.ledger.is_unstated() && (closing || self.state_at <= now);
        let max_bytes = self.state.options.load().max_bytes;
        let is_over = !self.rotation_failed && db.ledger.is_over(max_bytes);
        let is_probe = is_due && self.retry.is_some();
        // While the disk refuses writes, a waiting caller's command is tried alone; the backlog
        // waits for its retry.
        let mut entries: Vec<Entry> = match is_due {
            true => self.pending.drain(..).collect(),
            false => Vec::new(),
        };
        let idle = entries.is_empty() && durable.is_empty();
        if idle && !is_probe && (!is_due || !(is_unstated || is_over)) {
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
        let mut answers: Vec<CommitCallback> = Vec::with_capacity(durable.len());
        let mut durable = durable.into_iter();
        let mut rotation: Result<(), rusqlite::Error> = Ok(());
        let (last_ts, may_rotate) = (self.last_ts, !self.rotation_failed);
        let outcome = db.transact(max_bytes, |turn| {
            for entry in &entries {
                turn.append(&entry.event, entry.ts)?;
            }
            for one in durable.by_ref() {
                one.apply(turn, &before, &mut changed, &mut answers)?;
            }
            if is_unstated || turn.should_state_heads() {
                let rows = changed.as_ref().unwrap_or(&before);
                turn.retire(last_ts, |id| rows.contains(id))?;
                turn.state_heads(last_ts)?;
            }
            let budget = ROTATE_STEP + 2 * turn.written();
            while may_rotate && rotation.is_ok() && turn.is_over() && turn.rotated() < budget {
                rotation = lifecycle::rotate(turn)?;
            }
            Ok(())
        });
        // Commands that were not reached fail with the rest.
        answers.extend(durable.map(Durable::unreached));

        match outcome {
            Ok(((), totals)) => {
                self.succeeded(now, &totals, changed, rotation);
                for answer in answers {
                    answer(Ok(()));
                }
                self.release(entries);
            }
            Err(error) => {
                let error = self.failed(&error, entries);
                for answer in answers {
                    answer(Err(error.clone()));
                }
            }
        }
    }

    fn succeeded(
        &mut self,
        began: Instant,
        totals: &Totals,
        changed: Option<RegistrySnapshot>,
        rotation: Result<(), rusqlite::Error>,
    ) {
        let counters = &self.state.counters;
        for (kind, count) in &totals.written {
            counters.of(*kind).fetch_add(*count, Relaxed);
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
        self.state.trouble(|t| t.audit = None);
        if let Err(error) = rotation {
            tracing::error!(%error, "rotating the audit log failed; run `palisade audit verify`");
            self.rotation_failed = true;
            self.state.trouble(|t| t.rotation = Some(error.to_string()));
        }
        if let Some(db) = &self.db {
            if !db.ledger.is_unstated() {
                self.state_at = Instant::now() + STATE_AFTER;
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
        self.state.queues.forget_idle(names.iter());
    }

    /// Keeps the entries for a retry, or moves a corrupt file aside.
    fn failed(&mut self, error: &rusqlite::Error, entries: Vec<Entry>) -> StoreError {
        self.state.counters.failed_batches.fetch_add(1, Relaxed);
        for entry in entries.into_iter().rev() {
            self.pending.push_front(entry);
        }
        if is_corruption(error) {
            return self.give_up(&error.to_string());
        }
        let now = Instant::now();
        match self.retry {
            // A waiting caller's command was tried in between; the retry time of the backlog does
            // not change.
            Some((at, _)) if at > now => {}
            Some((_, pause)) => {
                let pause = LAST_RETRY.min(pause * 2);
                self.retry = Some((now + pause, pause));
            }
            None => {
                tracing::error!(%error, "writing to the database failed; retrying");
                self.retry = Some((now + FIRST_RETRY, FIRST_RETRY));
            }
        }
        self.state.trouble(|t| t.audit = Some(error.to_string()));
        StoreError::write(error)
    }

    /// Answers all commands while there is no database.
    fn refuse(&mut self, durable: Vec<Durable>) {
        let reason = self
            .state
            .check_available()
            .err()
            .unwrap_or(StoreError::Closed);
        for one in durable {
            one.unreached()(Err(reason.clone()));
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
