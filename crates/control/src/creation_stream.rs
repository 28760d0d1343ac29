//! The creation of a sandbox with its progress as a stream: lines of JSON, the last of which is
//! the answer.
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
use crate::reply::{ControlError, Reply};

/// Between two looks at how far it is.
const STEP: Duration = Duration::from_millis(100);

/// Lines that wait for a client. More than that it need not know.
const AHEAD: usize = 8;

/// Makes a sandbox and tells how far it is. Goes on without a client.
pub(crate) fn create(gate: Arc<Gate>, body: CreateBody, place: OwnedSemaphorePermit) -> Reply {
    let (lines, told) = mpsc::channel(AHEAD);
    tokio::spawn(async move {
        let _place = place;
        let progress = Arc::new(CreateProgress::default());
        let settings = gate.policy.settings();
        let made = gate
            .sandboxes
            .create(&gate.store, &settings, body, Arc::clone(&progress));
        tokio::pin!(made);
        let mut ticks = interval(STEP);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Skip);
        let mut last = None;
        let made = loop {
            tokio::select! {
                made = &mut made => break made,
                _ = ticks.tick() => {}
            }
            let now = progress.now();
            if now != last {
                // A client that does not read misses some.
                let told = lines.try_send(line(&json!({ "progress": now })));
                if told.is_ok() {
                    last = now;
                }
            }
        };
        if progress.now() != last {
            let now = progress.now();
            let _ = lines.send(line(&json!({ "progress": now }))).await;
        }
        let _ = lines.send(line(&answer(made))).await;
    });
    Reply::Lines(told)
}

fn answer(made: Result<Reply, ControlError>) -> Value {
    let failed = |error: &ControlError| {
        let (status, mut body) = error.respond();
        if status.is_server_error() {
            tracing::warn!(%error, "a control request failed");
        }
        if let Value::Object(fields) = &mut body {
            fields.insert("status".to_owned(), status.as_u16().into());
        }
        json!({ "failed": body })
    };
    match made {
        Ok(Reply::Json(_, sandbox)) => json!({ "done": sandbox }),
        Ok(Reply::Text(..) | Reply::Lines(_)) => {
            failed(&ControlError::Failed("no sandbox was told of".to_owned()))
        }
        Err(error) => failed(&error),
    }
}

fn line(value: &Value) -> Result<Bytes, std::io::Error> {
    Ok(Bytes::from(format!("{value}\n")))
}
