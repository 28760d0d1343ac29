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

/// Sends the result of a command to its caller after the transaction was committed or failed.
pub(crate) type CommitCallback = Box<dyn FnOnce(Result<(), StoreError>)>;

/// How a live registration that holds the address of a new one is handled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LiveHolder {
    /// The holder stays, and the new registration is refused.
    Keep,
    /// The holder is removed.
    Remove,
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
        ledger_tx: &mut LedgerTransaction<'_>,
        before: &RegistrySnapshot,
        changed: &mut Option<RegistrySnapshot>,
        callbacks: &mut Vec<CommitCallback>,
    ) -> Result<(), rusqlite::Error> {
        let mut rows = Rows { before, changed };
        match self {
            Self::Record { event, now, reply } => {
                defer_reply(reply, ledger_tx.append(&event, now).map(Ok), callbacks)
            }
            Self::Register {
                row,
                live_holder,
                event,
                now,
                reply,
            } => {
                let outcome = register(ledger_tx, &mut rows, *row, live_holder, &event, now);
                defer_reply(reply, outcome, callbacks)
            }
            Self::Unregister {
                id,
                event,
                now,
                reply,
            } => defer_reply(
                reply,
                unregister(ledger_tx, &mut rows, id, &event, now),
                callbacks,
            ),
            Self::Prune { now, reply } => {
                defer_reply(reply, prune(ledger_tx, &mut rows, now), callbacks)
            }
        }
    }

    /// The callback of a command that was not started.
    pub(crate) fn fail_unreached(self) -> CommitCallback {
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
    fn current(&self) -> &RegistrySnapshot {
        self.changed.as_ref().unwrap_or(self.before)
    }

    fn modify(&mut self) -> &mut RegistrySnapshot {
        self.changed.get_or_insert_with(|| self.before.clone())
    }
}

fn register(
    ledger_tx: &mut LedgerTransaction<'_>,
    rows: &mut Rows<'_>,
    mut row: Registration,
    live_holder: LiveHolder,
    event: &AuditEvent,
    now: UnixMillis,
) -> Outcome<RegistrationOutcome> {
    row.ip = row.ip.map(canonical_ip);
    let mut removed_holder = None;
    if let Some(ip) = row.ip
        && let Some(holder) = rows.current().other_holder(ip, &row.id)
    {
        let (id, is_live) = (holder.id.clone(), holder.is_live(now));
        let event = match (is_live, live_holder) {
            (true, LiveHolder::Keep) => {
                return Ok(Err(StoreError::IpTaken { ip, holder: id }));
            }
            (true, LiveHolder::Remove) => "replaced",
            (false, _) => "expired",
        };
        remove_row(ledger_tx, rows, &id, event, now)?;
        removed_holder = Some(id);
    }
    put_registration(ledger_tx.conn(), &row)?;
    let seq = ledger_tx.append(event, now)?;
    let replaced = rows.modify().insert(Arc::new(row));
    Ok(Ok(RegistrationOutcome {
        seq,
        replaced,
        removed_holder,
    }))
}

fn unregister(
    ledger_tx: &mut LedgerTransaction<'_>,
    rows: &mut Rows<'_>,
    id: SandboxId,
    event: &AuditEvent,
    now: UnixMillis,
) -> Outcome<Arc<Registration>> {
    if !rows.current().contains(&id) {
        return Ok(Err(StoreError::NotFound { id }));
    }
    delete_registration(ledger_tx.conn(), &id)?;
    ledger_tx.append(event, now)?;
    Ok(rows.modify().remove(&id).ok_or(StoreError::NotFound { id }))
}

fn prune(
    ledger_tx: &mut LedgerTransaction<'_>,
    rows: &mut Rows<'_>,
    now: UnixMillis,
) -> Outcome<Vec<SandboxId>> {
    let ids = rows.current().expired(now);
    for id in &ids {
        remove_row(ledger_tx, rows, id, "expired", now)?;
    }
    Ok(Ok(ids))
}

/// Removes a row, with a record of the reason in the chain of its sandbox.
fn remove_row(
    ledger_tx: &mut LedgerTransaction<'_>,
    rows: &mut Rows<'_>,
    id: &SandboxId,
    event: &str,
    now: UnixMillis,
) -> Result<(), rusqlite::Error> {
    delete_registration(ledger_tx.conn(), id)?;
    ledger_tx.append(&AuditEvent::lifecycle(event, Some(id.clone())), now)?;
    rows.modify().remove(id);
    Ok(())
}

/// Defers the reply until after the commit, and returns the error of a failed statement.
fn defer_reply<T: 'static>(
    reply: ReplySender<T>,
    outcome: Outcome<T>,
    callbacks: &mut Vec<CommitCallback>,
) -> Result<(), rusqlite::Error> {
    match outcome {
        Ok(outcome) => {
            callbacks.push(Box::new(move |committed| {
                // A caller that has gone away needs no result.
                let _ = reply.send(committed.and(outcome));
            }));
            Ok(())
        }
        Err(error) => {
            callbacks.push(fail(reply));
            Err(error)
        }
    }
}

fn fail<T: 'static>(reply: ReplySender<T>) -> CommitCallback {
    Box::new(move |committed| {
        let _ = reply.send(Err(committed.err().unwrap_or(StoreError::Closed)));
    })
}
