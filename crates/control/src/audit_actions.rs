//! Audit actions: query one page, export all records, follow new records, verify the chains.

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
use crate::reply::{ControlError, ControlReply};

/// Records in one page if the query sets no limit.
const DEFAULT_RECORDS: u32 = 100;

/// Maximum number of records in one page; export has no such limit.
const MAX_RECORDS: u32 = 10_000;

/// Records read at a time for a tail.
const TAIL_PAGE: usize = 256;

/// Maximum number of chunks that are buffered for a client that reads slowly.
const CHUNKS_AHEAD: usize = 16;

/// The size of one chunk of an export.
const CHUNK_SIZE: usize = 32 * 1024;

type ChunkSender = mpsc::Sender<Result<Bytes, io::Error>>;

/// One page of records.
pub(crate) async fn query(store: &Store, wanted: AuditQuery) -> Result<ControlReply, ControlError> {
    let mut filter = filter(wanted);
    let limit = filter
        .limit
        .unwrap_or(DEFAULT_RECORDS as usize)
        .min(MAX_RECORDS as usize);
    filter.limit = Some(limit);
    flush(store).await;
    let records = store.audit().query(filter).await?;
    let records: Vec<Value> = records.iter().map(as_json).collect();
    Ok(ControlReply::ok(json!({ "records": records })))
}

/// Waits until pending records are written, so that a query finds the record of a request that
/// was already answered. If the flush fails, the query shows the records written so far.
async fn flush(store: &Store) {
    if let Err(error) = store.audit().flush().await {
        tracing::debug!(%error, "audit flush failed before a query");
    }
}

/// Every matching record as JSON lines, in constant memory.
pub(crate) async fn export(
    store: &Store,
    wanted: AuditQuery,
    permit: OwnedSemaphorePermit,
) -> ControlReply {
    flush(store).await;
    let (chunks, lines) = mpsc::channel(CHUNKS_AHEAD);
    let (audit, filter) = (store.audit(), filter(wanted));
    tokio::task::spawn_blocking(move || {
        let mut out = io::BufWriter::with_capacity(CHUNK_SIZE, ChunkWriter(chunks.clone()));
        let done = audit.export_blocking(&filter, &mut out).and_then(|_| {
            out.flush().map_err(|e| StoreError::Export {
                reason: e.to_string(),
            })
        });
        if let Err(error) = done {
            // The client sees a broken stream rather than one that seems complete.
            let _ = chunks.blocking_send(Err(io::Error::other(error)));
        }
        drop(permit);
    });
    ControlReply::Lines(lines)
}

/// A writer that sends what is written as chunks to a client.
struct ChunkWriter(ChunkSender);

impl Write for ChunkWriter {
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

/// New records (or those after a given one), until the client disconnects.
pub(crate) fn tail(
    store: &Store,
    wanted: AuditQuery,
    stop: &CancellationToken,
    permit: OwnedSemaphorePermit,
) -> ControlReply {
    let (chunks, lines) = mpsc::channel(CHUNKS_AHEAD);
    let (audit, stop) = (store.audit(), stop.clone());
    let mut newest = audit.follow();
    let mut filter = AuditFilter {
        limit: Some(TAIL_PAGE),
        newest_first: false,
        ..filter(wanted)
    };
    filter.after_seq.get_or_insert(*newest.borrow_and_update());
    tokio::spawn(async move {
        let _permit = permit;
        loop {
            let page = match audit.query(filter.clone()).await {
                Ok(page) => page,
                Err(error) => {
                    let _ = chunks.send(Err(io::Error::other(error))).await;
                    return;
                }
            };
            let is_full_page = page.len() == TAIL_PAGE;
            for record in page {
                filter.after_seq = Some(record.seq);
                let line = format!("{}\n", record.line());
                // A client that does not read must not delay the shutdown.
                tokio::select! {
                    sent = chunks.send(Ok(Bytes::from(line))) => if sent.is_err() { return },
                    () = stop.cancelled() => return,
                }
            }
            if is_full_page {
                continue;
            }
            tokio::select! {
                changed = newest.changed() => if changed.is_err() { return },
                () = chunks.closed() => return,
                () = stop.cancelled() => return,
            }
        }
    });
    ControlReply::Lines(lines)
}

/// Verifies every chain.
pub(crate) async fn verify(store: &Store) -> Result<ControlReply, ControlError> {
    let audit = store.audit();
    let report = tokio::task::spawn_blocking(move || audit.verify_blocking())
        .await
        .map_err(|error| ControlError::Unavailable(error.to_string()))??;
    Ok(ControlReply::ok(json!({
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
