//! Creates a sandbox and streams its progress as JSON lines; the last line is the result.
//!
//! ```text
//!   {"progress": {"step": "copy", "done": 1200, "total": 10000}}     now and then
//!   {"done": {…}}   or   {"failed": {"status": 409, "error": …, "code": …}}
//! ```

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use sandbox::create_progress::CreateProgress;
use serde_json::{Value, json};
use tokio::sync::{OwnedSemaphorePermit, mpsc};
use tokio::time::{MissedTickBehavior, interval};

use crate::body::CreateBody;
use crate::gate::Gate;
use crate::reply::{ControlError, ControlReply};

/// Interval of progress lines.
const PROGRESS_INTERVAL: Duration = Duration::from_millis(100);

/// Lines buffered for a client that reads slowly; further progress lines are dropped.
const LINES_AHEAD: usize = 8;

/// Creates a sandbox and streams its progress. A client that disconnects does not stop the
/// creation.
pub(crate) fn create(
    gate: Arc<Gate>,
    body: CreateBody,
    permit: OwnedSemaphorePermit,
) -> ControlReply {
    let (lines, stream) = mpsc::channel(LINES_AHEAD);
    tokio::spawn(async move {
        let _permit = permit;
        let progress = Arc::new(CreateProgress::default());
        let settings = gate.policy.settings();
        let creation = gate
            .sandboxes
            .create(&gate.store, &settings, body, Arc::clone(&progress));
        tokio::pin!(creation);
        let mut ticks = interval(PROGRESS_INTERVAL);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Skip);
        let mut last = None;
        let creation = loop {
            tokio::select! {
                creation = &mut creation => break creation,
                _ = ticks.tick() => {}
            }
            let now = progress.current();
            if now != last {
                // A client that does not read misses some lines.
                let sent = lines.try_send(line(&json!({ "progress": now })));
                if sent.is_ok() {
                    last = now;
                }
            }
        };
        if progress.current() != last {
            let now = progress.current();
            let _ = lines.send(line(&json!({ "progress": now }))).await;
        }
        let _ = lines.send(line(&result_line(creation))).await;
    });
    ControlReply::Lines(stream)
}

fn result_line(creation: Result<ControlReply, ControlError>) -> Value {
    let failed = |error: &ControlError| {
        let (status, mut body) = error.respond();
        if status.is_server_error() {
            tracing::warn!(%error, "control request failed");
        }
        if let Value::Object(fields) = &mut body {
            fields.insert("status".to_owned(), status.as_u16().into());
        }
        json!({ "failed": body })
    };
    match creation {
        Ok(ControlReply::Json(_, sandbox)) => json!({ "done": sandbox }),
        Ok(ControlReply::Text(..) | ControlReply::Lines(_)) => failed(&ControlError::Failed(
            "the creation returned no sandbox".to_owned(),
        )),
        Err(error) => failed(&error),
    }
}

fn line(value: &Value) -> Result<Bytes, std::io::Error> {
    Ok(Bytes::from(format!("{value}\n")))
}
