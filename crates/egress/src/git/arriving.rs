//! A push that arrives, from its first byte to its last or to where it is stopped.

use std::sync::Arc;

use bytes::BytesMut;
use http_body_util::BodyExt;
use policy::reason::Reason;
use policy::registration::MAX_RECEIVE_PACK_BYTES;
use policy::verdict::{Denial, Detail};
use tokio::task::spawn_blocking;

use super::receive::refused;
use crate::body::Content;
use crate::git_protocol::intake::{Coding, Intake, Stop, Taken};
use crate::git_protocol::push::Head;
use crate::git_protocol::size;
use crate::refusal::Refusal;
use crate::request_cx::RequestCx;
use crate::stage::Stage;

/// How much is taken in at a time.
const PIECE: usize = 256 * 1024;

/// Takes all of it into a spool. Where that cannot be done, what is still to come is heard
/// out: a client that is not done speaking does not listen.
pub(super) async fn take_in(
    cx: &RequestCx,
    mut body: Content,
    coding: Coding,
    limit: u64,
) -> Result<Taken, Refusal> {
    let (services, quota) = (Arc::clone(&cx.services), Arc::clone(&cx.sandbox.spooled));
    let opened = off_thread(move || services.spools().open(&quota)).await?;
    let mut intake = opened
        .map(|spool| Intake::new(spool, coding, limit))
        .map_err(|error| stopped(Stop::Spool(error), coding, None, 0))?;
    let least = match coding {
        Coding::Plain | Coding::Gzip => PIECE,
        // Whatever there is may be the end, and then nothing follows.
        Coding::Endless => 1,
    };
    let mut pending = BytesMut::with_capacity(PIECE);
    let mut taken = 0_u64;
    while let Some(frame) = body.frame().await {
        let frame = frame.map_err(|error| {
            let denial = Denial::new(Reason::Framing, "git:form").because(error.to_string());
            Refusal::new(Stage::Git, denial)
        })?;
        let Some(data) = frame.data_ref() else {
            continue;
        };
        taken += u64::try_from(data.len()).unwrap_or(u64::MAX);
        pending.extend_from_slice(data);
        if pending.len() < least {
            continue;
        }
        let piece = pending.split();
        let (back, result) = off_thread(move || {
            let result = intake.take(&piece);
            (intake, result)
        })
        .await?;
        intake = back;
        if let Err(stop) = result {
            let head = intake.head().cloned();
            let heard = taken.max(intake.taken());
            let heard = match (&stop, coding) {
                // Nobody knows where it ends.
                (Stop::Malformed(_) | Stop::Pack(_), Coding::Endless) => heard,
                _ => heard.max(taken.saturating_add(drain(body, intake, coding).await)),
            };
            return Err(stopped(stop, coding, head, heard));
        }
        if intake.is_complete() {
            break;
        }
    }
    let finished = off_thread(move || {
        if let Err(stop) = intake.take(&pending) {
            return Err((intake.head().cloned(), stop));
        }
        intake.finish()
    });
    finished
        .await?
        .map_err(|(head, stop)| stopped(stop, coding, head, taken))
}

/// Hears the rest out, within bounds, and says how much it was.
async fn drain(mut body: Content, mut intake: Intake, coding: Coding) -> u64 {
    let mut heard = 0_u64;
    let mut goes_on = !intake.is_complete();
    while goes_on
        && heard < MAX_RECEIVE_PACK_BYTES
        && let Some(Ok(frame)) = body.frame().await
    {
        let data = frame.into_data().unwrap_or_default();
        heard += u64::try_from(data.len()).unwrap_or(u64::MAX);
        if coding != Coding::Endless {
            continue;
        }
        let passed = off_thread(move || {
            let goes_on = intake.pass_over(&data);
            (intake, goes_on)
        });
        let Ok(passed) = passed.await else { break };
        (intake, goes_on) = passed;
    }
    heard
}

async fn off_thread<T: Send + 'static>(
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, Refusal> {
    spawn_blocking(work).await.map_err(|error| {
        let denial = Denial::new(Reason::Internal, "git:spool").because(error.to_string());
        Refusal::new(Stage::Git, denial)
    })
}

/// The answer to a push that was not taken in. `heard` is how long it was, as far as is
/// known.
fn stopped(stop: Stop, coding: Coding, head: Option<Head>, heard: u64) -> Refusal {
    let evidence = stop.to_string();
    let denial = match stop {
        // Without HTTP there is no status to look for.
        Stop::TooLarge { limit } if coding == Coding::Endless => size::denial(heard, limit),
        Stop::TooLarge { limit } => {
            let denial = size::denial(heard, limit).with(Detail::Size {
                bytes: heard,
                limit,
            });
            return Refusal::new(Stage::Git, denial);
        }
        Stop::Pack(error) => Denial::new(Reason::GitMalformed, "git:form")
            .saying(format!("The pack could not be read: {error}.")),
        Stop::Malformed(error) => Denial::new(Reason::GitMalformed, "git:form")
            .saying(format!("The push could not be read: {error}.")),
        Stop::Coding => Denial::new(Reason::GitMalformed, "git:form")
            .saying("The push could not be read: it is not compressed as it says."),
        Stop::NoRoom(_) => Denial::new(Reason::GitRate, "git:spool")
            .saying("Too many large pushes are under way. Try again when they are through."),
        Stop::Spool(_) => Denial::new(Reason::Internal, "git:spool").because(evidence),
    };
    match head {
        Some(head) => refused(denial, head.capabilities, &head.updates),
        None => Refusal::new(Stage::Git, denial),
    }
}
