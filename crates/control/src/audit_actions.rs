//! Reads the audit log for a client: a page, all of it, or as it is written.

use std::io::{self, Write};

use bytes::Bytes;
use policy::clock::UnixMillis;
use serde_json::{Value, json};
use store::Store;
use store::audit::query::{AuditFilter, AuditRecord};
use store::error::StoreError;
use tokio::sync::{OwnedSemaphorePermit, mpsc};
use tokio_util::sync::CancellationToken;

use crate::action::AuditQuery;
use crate::reply::{ControlError, Reply};

/// Records in one answer when the asker does not say.
const DEFAULT_RECORDS: u32 = 100;

/// Records in one answer at the most; more is what export is for.
const MAX_RECORDS: u32 = 10_000;

/// Records read at a time for a follower.
const TAIL_PAGE: usize = 256;

/// Chunks in flight to a client that reads slowly.
const PIECES_AHEAD: usize = 16;

/// The size of a piece of an export.
const PIECE: usize = 32 * 1024;

type Pieces = mpsc::Sender<Result<Bytes, io::Error>>;

/// One page of records.
pub(crate) async fn query(store: &Store, wanted: AuditQuery) -> Result<Reply, ControlError> {
    let mut filter = filter(wanted);
    let limit = filter
        .limit
        .unwrap_or(DEFAULT_RECORDS as usize)
        .min(MAX_RECORDS as usize);
    filter.limit = Some(limit);
    flush(store).await;
    let records = store.audit().query(filter).await?;
    let records: Vec<Value> = records.iter().map(as_json).collect();
    Ok(Reply::ok(json!({ "records": records })))
}

/// Whoever saw an answer finds its record; where it cannot be written, what was is shown.
async fn flush(store: &Store) {
    if let Err(error) = store.audit().flush().await {
        tracing::debug!(%error, "records are still on their way");
    }
}

/// Every record that is wanted, as lines, in constant memory.
pub(crate) async fn export(
    store: &Store,
    wanted: AuditQuery,
    place: OwnedSemaphorePermit,
) -> Reply {
    flush(store).await;
    let (pieces, lines) = mpsc::channel(PIECES_AHEAD);
    let (audit, filter) = (store.audit(), filter(wanted));
    tokio::task::spawn_blocking(move || {
        let mut out = io::BufWriter::with_capacity(PIECE, Outgoing(pieces.clone()));
        let done = audit.export_blocking(&filter, &mut out).and_then(|_| {
            out.flush().map_err(|e| StoreError::Export {
                reason: e.to_string(),
            })
        });
        if let Err(error) = done {
            // The client sees a broken stream rather than one that seems complete.
            let _ = pieces.blocking_send(Err(io::Error::other(error)));
        }
        drop(place);
    });
    Reply::Lines(lines)
}

struct Outgoing(Pieces);

impl Write for Outgoing {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0
            .blocking_send(Ok(Bytes::copy_from_slice(bytes)))
            .map_err(|_| io::Error::from(io::ErrorKind::BrokenPipe))?;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Records from now on (or after a given one), until the client hangs up.
pub(crate) fn tail(
    store: &Store,
    wanted: AuditQuery,
    stop: &CancellationToken,
    place: OwnedSemaphorePermit,
) -> Reply {
    let (pieces, lines) = mpsc::channel(PIECES_AHEAD);
    let (audit, stop) = (store.audit(), stop.clone());
    let mut newest = audit.follow();
    let mut filter = AuditFilter {
        limit: Some(TAIL_PAGE),
        newest_first: false,
        ..filter(wanted)
    };
    filter.after_seq.get_or_insert(*newest.borrow_and_update());
    tokio::spawn(async move {
        let _place = place;
        loop {
            let page = match audit.query(filter.clone()).await {
                Ok(page) => page,
                Err(error) => {
                    let _ = pieces.send(Err(io::Error::other(error))).await;
                    return;
                }
            };
            let full = page.len() == TAIL_PAGE;
            for record in page {
                filter.after_seq = Some(record.seq);
                let line = format!("{}\n", record.line());
                // A client that does not read must not hold up the stop.
                tokio::select! {
                    sent = pieces.send(Ok(Bytes::from(line))) => if sent.is_err() { return },
                    () = stop.cancelled() => return,
                }
            }
            if full {
                continue;
            }
            tokio::select! {
                changed = newest.changed() => if changed.is_err() { return },
                () = pieces.closed() => return,
                () = stop.cancelled() => return,
            }
        }
    });
    Reply::Lines(lines)
}

/// Checks every chain.
pub(crate) async fn verify(store: &Store) -> Result<Reply, ControlError> {
    let audit = store.audit();
    let report = tokio::task::spawn_blocking(move || audit.verify_blocking())
        .await
        .map_err(|error| ControlError::Unavailable(error.to_string()))??;
    Ok(Reply::ok(json!({
        "intact": report.is_intact(),
        "records": report.records,
        "chains": report.chains,
        "checkpoints": report.checkpoints,
        "broken": report.first_broken.map(|broken| json!({
            "seq": broken.seq,
            "sandbox": broken.chain,
            "what": broken.to_string(),
        })),
    })))
}

fn as_json(record: &AuditRecord) -> Value {
    serde_json::from_str(&record.line()).unwrap_or_else(|_| Value::String(record.line()))
}

fn filter(wanted: AuditQuery) -> AuditFilter {
    AuditFilter {
        sandbox: wanted.sandbox,
        kind: wanted.kind,
        verdict: wanted.verdict,
        reason: wanted.reason,
        request_id: wanted.request_id,
        since: wanted.since.map(UnixMillis::new),
        until: wanted.until.map(UnixMillis::new),
        after_seq: wanted.after,
        limit: wanted.limit.map(|limit| limit as usize),
        newest_first: wanted.newest_first,
        ..AuditFilter::default()
    }
}
