//! A request that the gate itself sends for a push, to learn what upstream has: it passes the
//! same checks, and has a record of its own.

use decide::subject::{HeadFacts, RequestFacts, Subject};
use http::Response;
use policy::allowlist::Target;
use policy::answer::Answers;
use policy::audit::Kind;
use policy::proof::{Clearance, Identified};
use policy::reason::Reason;
use policy::verdict::{Denial, Verdict};

use crate::admission::{self, admit};
use crate::dialer::Arriving;
use crate::forward::{self, Preparing, Reply};
use crate::headers;
use crate::in_flight::InFlight;
use crate::message::Message;
use crate::refusal::Refusal;
use crate::request_cx::RequestCx;
use crate::request_log::RequestLog;
use crate::source::Source;
use crate::stage::Stage;

/// Sends a request of the gate's own to `target`, and returns the answer. What the operator
/// answered about the push holds for it as well, where it raises the same question.
pub async fn send(
    cx: &RequestCx,
    target: Target,
    message: Message,
    answers: &Answers,
) -> Result<(Response<Arriving>, InFlight), Refusal> {
    let mut trail = RequestLog::begin(&cx.services, Some(&cx.sandbox), Kind::Git, None);
    trail.event.event = Some("asked_for_push".to_owned());
    trail.event.method = Some(target.method.as_str().to_owned());
    trail.event.host = Some(target.host.to_string());
    trail.event.port = Some(target.port);
    trail.event.path = Some(target.path.wire().to_owned());
    match Box::pin(send_checked(cx, target, message, answers, &mut trail)).await {
        Ok((response, in_flight)) => {
            trail.answered(response.status());
            Ok((response, in_flight))
        }
        Err(refusal) => {
            trail.refused(refusal.stage, &refusal.denial);
            Err(refusal)
        }
    }
}

async fn send_checked(
    cx: &RequestCx,
    target: Target,
    message: Message,
    answers: &Answers,
    trail: &mut RequestLog,
) -> Result<(Response<Arriving>, InFlight), Refusal> {
    let source = Source::Listener(std::sync::Arc::clone(&cx.sandbox));
    let identity = source.identify(&cx.services, None)?;
    let (pass, admission) = admit(cx, &target.host, None, trail)?;
    let (host, port) = (target.host.clone(), target.port);
    let request = Identified::new(message, identity).admit(pass, admission);
    let (message, identity) = (request.request(), request.identity());
    let received = &message.head.headers;
    let sent = (!cx.snapshot.requests.is_empty()).then(|| headers::as_sent(received));
    let facts = RequestFacts {
        target,
        tls: message.destination.tls,
        head: HeadFacts::Headers { received, sent },
        registration: Some(identity.registration()),
    };
    let mut decided = cx.decide(Subject::Request(facts), answers).wait().await;
    cx.record_bundles(&decided, trail).await;
    let stage = Stage::of(decided.check);
    let (permit, recorded) = (decided.permit.take(), std::mem::take(&mut decided.recorded));
    let permit = match (decided.verdict, permit) {
        (Verdict::Allow { .. } | Verdict::Modify(_), Some(permit)) => permit,
        (Verdict::Deny(denial), _) => return Err(Refusal::new(stage, *denial)),
        // The push waits for it already.
        (Verdict::Ask(question), _) => return Err(Refusal::new(stage, question.unattended())),
        (_, None) => return Err(Refusal::new(stage, Denial::new(Reason::Internal, "decide"))),
    };
    admission::take_label(cx, &host, port)?;
    let permitted = request.permit(permit);
    let mut request = permitted.map_err(|misused| Refusal::new(Stage::Policy, misused.denial))?;
    request.request_mut().recorded = recorded;
    trail.allowed(request.permit().rule());
    trail.passed(Stage::Policy);
    // The gate wrote it.
    let request = request.clear(Clearance::nothing_configured());
    let leaving = match forward::prepare(cx.clone(), request, answers)? {
        Preparing::Now(leaving) => leaving,
        Preparing::Later(preparing) => preparing.await?,
    };
    let reply = leaving.send().await?;
    trail.passed(Stage::Forward);
    match reply {
        Reply::Theirs(response, in_flight) => Ok((response, in_flight)),
        Reply::Ours(_) | Reply::Changed(..) | Reply::Upgraded(_) => {
            let denial = Denial::new(Reason::Internal, "pipeline");
            Err(Refusal::new(Stage::Forward, denial))
        }
    }
}
