//! Commands whose callers wait until the result is on disk.

use std::sync::Arc;

use policy::audit::AuditEvent;
use policy::clock::UnixMillis;
use policy::id::SandboxId;
use policy::registration::{Registration, canonical_ip};
use tokio::sync::oneshot;

use crate::audit::ledger::LedgerTransaction;
use crate::database::{delete_registration, put_registration};
use crate::error::StoreError;
use crate::registry::{RegistrationOutcome, RegistrySnapshot};

/// The channel for a command's result.
pub(crate) type ReplySender<T> = oneshot::Sender<Result<T, StoreError>>;

/// Sends the result to the caller, once the outcome of the transaction is known.
pub(crate) type CommitCallback = Box<dyn FnOnce(Result<(), StoreError>)>;

/// How a live registration that holds the address of a new one is handled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LiveHolder {
    /// It stays, and the new one is refused.
    Keep,
    /// It is removed.
    End,
}

/// A command whose caller waits for the commit.
pub(crate) enum Durable {
    /// Write a record.
    Record {
        event: Box<AuditEvent>,
        now: UnixMillis,
        reply: ReplySender<u64>,
    },
    /// Add or replace a row.
    Register {
        row: Box<Registration>,
        live_holder: LiveHolder,
        event: Box<AuditEvent>,
        now: UnixMillis,
        reply: ReplySender<RegistrationOutcome>,
    },
    /// Remove a row.
    Unregister {
        id: SandboxId,
        event: Box<AuditEvent>,
        now: UnixMillis,
        reply: ReplySender<Arc<Registration>>,
    },
    /// Remove expired rows.
    Prune {
        now: UnixMillis,
        reply: ReplySender<Vec<SandboxId>>,
    },
}

/// The result of a command: an inner error concerns only its caller and does not fail the
/// transaction.
type Outcome<T> = Result<Result<T, StoreError>, rusqlite::Error>;

impl Durable {
    /// The caller's time.
    pub(crate) fn now(&self) -> UnixMillis {
        match self {
            Self::Record { now, .. }
            | Self::Register { now, .. }
            | Self::Unregister { now, .. }
            | Self::Prune { now, .. } => *now,
        }
    }

    /// Applies the command inside the transaction. `changed` is the registry as this transaction
    /// changes it; `before` is the registry before.
    pub(crate) fn apply(
        self,
        turn: &mut LedgerTransaction<'_>,
        before: &RegistrySnapshot,
        changed: &mut Option<RegistrySnapshot>,
        answers: &mut Vec<CommitCallback>,
    ) -> Result<(), rusqlite::Error> {
        let mut rows = Rows { before, changed };
        match self {
            Self::Record { event, now, reply } => {
                settle(reply, turn.append(&event, now).map(Ok), answers)
            }
            Self::Register {
                row,
                live_holder,
                event,
                now,
                reply,
            } => {
                let outcome = register(turn, &mut rows, *row, live_holder, &event, now);
                settle(reply, outcome, answers)
            }
            Self::Unregister {
                id,
                event,
                now,
                reply,
            } => settle(reply, unregister(turn, &mut rows, id, &event, now), answers),
            Self::Prune { now, reply } => settle(reply, prune(turn, &mut rows, now), answers),
        }
    }

    /// The result of a command that was not started.
    pub(crate) fn unreached(self) -> CommitCallback {
        match self {
            Self::Record { reply, .. } => fail(reply),
            Self::Register { reply, .. } => fail(reply),
            Self::Unregister { reply, .. } => fail(reply),
            Self::Prune { reply, .. } => fail(reply),
        }
    }
}

/// The registry within a transaction: copied at the first change.
struct Rows<'a> {
    before: &'a RegistrySnapshot,
    changed: &'a mut Option<RegistrySnapshot>,
}

impl Rows<'_> {
    fn now(&self) -> &RegistrySnapshot {
        self.changed.as_ref().unwrap_or(self.before)
    }

    fn change(&mut self) -> &mut RegistrySnapshot {
        self.changed.get_or_insert_with(|| self.before.clone())
    }
}

fn register(
    turn: &mut LedgerTransaction<'_>,
    rows: &mut Rows<'_>,
    mut row: Registration,
    live_holder: LiveHolder,
    event: &AuditEvent,
    now: UnixMillis,
) -> Outcome<RegistrationOutcome> {
    row.ip = row.ip.map(canonical_ip);
    let mut expelled = None;
    if let Some(ip) = row.ip
        && let Some(holder) = rows.now().other_holder(ip, &row.id)
    {
        let (id, is_live) = (holder.id.clone(), holder.is_live(now));
        let event = match (is_live, live_holder) {
            (true, LiveHolder::Keep) => {
                return Ok(Err(StoreError::IpTaken { ip, holder: id }));
            }
            (true, LiveHolder::End) => "replaced",
            (false, _) => "expired",
        };
        end(turn, rows, &id, event, now)?;
        expelled = Some(id);
    }
    put_registration(turn.conn(), &row)?;
    let seq = turn.append(event, now)?;
    let replaced = rows.change().insert(Arc::new(row));
    Ok(Ok(RegistrationOutcome {
        seq,
        replaced,
        expelled,
    }))
}

fn unregister(
    turn: &mut LedgerTransaction<'_>,
    rows: &mut Rows<'_>,
    id: SandboxId,
    event: &AuditEvent,
    now: UnixMillis,
) -> Outcome<Arc<Registration>> {
    if !rows.now().contains(&id) {
        return Ok(Err(StoreError::NotFound { id }));
    }
    delete_registration(turn.conn(), &id)?;
    turn.append(event, now)?;
    Ok(rows.change().remove(&id).ok_or(StoreError::NotFound { id }))
}

fn prune(
    turn: &mut LedgerTransaction<'_>,
    rows: &mut Rows<'_>,
    now: UnixMillis,
) -> Outcome<Vec<SandboxId>> {
    let ids = rows.now().expired(now);
    for id in &ids {
        end(turn, rows, id, "expired", now)?;
    }
    Ok(Ok(ids))
}

/// Removes a row, with a record of the reason in its own chain.
fn end(
    turn: &mut LedgerTransaction<'_>,
    rows: &mut Rows<'_>,
    id: &SandboxId,
    event: &str,
    now: UnixMillis,
) -> Result<(), rusqlite::Error> {
    delete_registration(turn.conn(), id)?;
    turn.append(&AuditEvent::lifecycle(event, Some(id.clone())), now)?;
    rows.change().remove(id);
    Ok(())
}

/// Keeps the result until after the commit, and passes on a failed statement.
fn settle<T: 'static>(
    reply: ReplySender<T>,
    outcome: Outcome<T>,
    answers: &mut Vec<CommitCallback>,
) -> Result<(), rusqlite::Error> {
    match outcome {
        Ok(outcome) => {
            answers.push(Box::new(move |committed| {
                // A caller that has gone away needs no result.
                let _ = reply.send(committed.and(outcome));
            }));
            Ok(())
        }
        Err(error) => {
            answers.push(fail(reply));
            Err(error)
        }
    }
}

fn fail<T: 'static>(reply: ReplySender<T>) -> CommitCallback {
    Box::new(move |committed| {
        let _ = reply.send(Err(committed.err().unwrap_or(StoreError::Closed)));
    })
}
