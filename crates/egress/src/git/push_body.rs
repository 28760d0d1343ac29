//! Reads the body of a push into a spool.

use std::sync::Arc;

use bytes::BytesMut;
use http_body_util::BodyExt;
use policy::reason::Reason;
use policy::registration::MAX_RECEIVE_PACK_BYTES;
use policy::verdict::{Denial, Detail};
use tokio::task::spawn_blocking;

use super::receive::push_refusal;
use crate::body::MessageBody;
use crate::git_protocol::push::PushHead;
use crate::git_protocol::push_spooler::{PushEncoding, PushSpoolError, PushSpooler, SpooledPush};
use crate::git_protocol::size;
use crate::refusal::RequestRefusal;
use crate::request_cx::RequestCx;
use crate::stage::Stage;

/// Number of body bytes that are collected before they are written to the spool.
const BATCH_BYTES: usize = 256 * 1024;

/// Reads the whole body into a spool. After an error the rest of the body is read and discarded,
/// because git reads the response only after it has sent everything.
pub(super) async fn spool(
    cx: &RequestCx,
    mut body: MessageBody,
    encoding: PushEncoding,
    limit: u64,
) -> Result<SpooledPush, RequestRefusal> {
    let (services, quota) = (Arc::clone(&cx.services), Arc::clone(&cx.sandbox.spooled));
    let opened = run_blocking(move || services.spools().open(&quota)).await?;
    let mut spooler = opened
        .map(|spool| PushSpooler::new(spool, encoding, limit))
        .map_err(|error| refuse(PushSpoolError::Spool(error), encoding, None, 0))?;
    let min_batch = match encoding {
        PushEncoding::Plain | PushEncoding::Gzip => BATCH_BYTES,
        // Every byte may be the last one of the push, so bytes are not held back.
        PushEncoding::UntilPackEnd => 1,
    };
    let mut pending = BytesMut::with_capacity(BATCH_BYTES);
    let mut received = 0_u64;
    while let Some(frame) = body.frame().await {
        let frame = frame.map_err(|error| {
            let denial = Denial::new(Reason::Framing, "git:form").with_evidence(error.to_string());
            RequestRefusal::new(Stage::Git, denial)
        })?;
        let Some(data) = frame.data_ref() else {
            continue;
        };
        received += u64::try_from(data.len()).unwrap_or(u64::MAX);
        pending.extend_from_slice(data);
        if pending.len() < min_batch {
            continue;
        }
        let batch = pending.split();
        let (returned, result) = run_blocking(move || {
            let result = spooler.write(&batch);
            (spooler, result)
        })
        .await?;
        spooler = returned;
        if let Err(error) = result {
            let head = spooler.head().cloned();
            let size = received.max(spooler.decoded_bytes());
            let size = match (&error, encoding) {
                // The end of such a push cannot be found, so its rest is not read.
                (
                    PushSpoolError::Malformed(_) | PushSpoolError::Pack(_),
                    PushEncoding::UntilPackEnd,
                ) => size,
                _ => size.max(received.saturating_add(drain(body, spooler, encoding).await)),
            };
            return Err(refuse(error, encoding, head, size));
        }
        if spooler.is_complete() {
            break;
        }
    }
    let finished = run_blocking(move || {
        if let Err(error) = spooler.write(&pending) {
            return Err((spooler.head().cloned(), error));
        }
        spooler.finish()
    });
    finished
        .await?
        .map_err(|(head, error)| refuse(error, encoding, head, received))
}

/// Reads and discards the rest of a body, up to a limit. Returns the number of bytes read.
async fn drain(mut body: MessageBody, mut spooler: PushSpooler, encoding: PushEncoding) -> u64 {
    let mut drained = 0_u64;
    let mut has_more = !spooler.is_complete();
    while has_more
        && drained < MAX_RECEIVE_PACK_BYTES
        && let Some(Ok(frame)) = body.frame().await
    {
        let data = frame.into_data().unwrap_or_default();
        drained += u64::try_from(data.len()).unwrap_or(u64::MAX);
        if encoding != PushEncoding::UntilPackEnd {
            continue;
        }
        let skipped = run_blocking(move || {
            let has_more = spooler.skip(&data);
            (spooler, has_more)
        });
        let Ok(skipped) = skipped.await else { break };
        (spooler, has_more) = skipped;
    }
    drained
}

async fn run_blocking<T: Send + 'static>(
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, RequestRefusal> {
    spawn_blocking(work).await.map_err(|error| {
        let denial = Denial::new(Reason::Internal, "git:spool").with_evidence(error.to_string());
        RequestRefusal::new(Stage::Git, denial)
    })
}

/// The refusal of a push that could not be spooled. `size` is the number of bytes that the push
/// is known to have.
fn refuse(
    error: PushSpoolError,
    encoding: PushEncoding,
    head: Option<PushHead>,
    size: u64,
) -> RequestRefusal {
    let evidence = error.to_string();
    let denial = match error {
        // Over the git protocol there is no HTTP status, so the refusal is a push report.
        PushSpoolError::TooLarge { limit } if encoding == PushEncoding::UntilPackEnd => {
            size::denial(size, limit)
        }
        PushSpoolError::TooLarge { limit } => {
            let denial = size::denial(size, limit).with_detail(Detail::Size { bytes: size, limit });
            return RequestRefusal::new(Stage::Git, denial);
        }
        PushSpoolError::Pack(error) => Denial::new(Reason::GitMalformed, "git:form")
            .with_message(format!("The pack could not be read: {error}.")),
        PushSpoolError::Malformed(error) => Denial::new(Reason::GitMalformed, "git:form")
            .with_message(format!("The push could not be read: {error}.")),
        PushSpoolError::Encoding => Denial::new(Reason::GitMalformed, "git:form")
            .with_message("The push could not be read: its body is not valid gzip."),
        PushSpoolError::QuotaExceeded(_) => Denial::new(Reason::GitRate, "git:spool").with_message(
            "Too many large pushes are in progress. Try again when they have finished.",
        ),
        PushSpoolError::Spool(_) => {
            Denial::new(Reason::Internal, "git:spool").with_evidence(evidence)
        }
    };
    match head {
        Some(head) => push_refusal(denial, head.capabilities, &head.updates),
        None => RequestRefusal::new(Stage::Git, denial),
    }
}
