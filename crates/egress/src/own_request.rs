//! Requests that the gate itself sends for a push, to read the upstream's refs and objects. They
//! pass the same checks as a client's request and have their own audit records.

use decide::subject::{HeadFacts, RequestFacts, Subject};
use http::Response;
use policy::allowlist::Target;
use policy::answer::ApprovalAnswers;
use policy::audit::Kind;
use policy::proof::{Clearance, Identified};
use policy::reason::Reason;
use policy::verdict::{Denial, Verdict};

use crate::admission::{self, admit};
use crate::dialer::UpstreamBody;
use crate::forward::{self, ClientResponse, Preparation};
use crate::headers;
use crate::in_flight::InFlight;
use crate::message::PipelineRequest;
use crate::refusal::RequestRefusal;
use crate::request_cx::RequestCx;
use crate::request_log::RequestLog;
use crate::source::ConnectionSource;
use crate::stage::Stage;

/// Sends a request of the gate itself to `target`. The operator's approval of the push also
/// counts for this request, where it raises the same question.
pub async fn send(
    cx: &RequestCx,
    target: Target,
    message: PipelineRequest,
    answers: &ApprovalAnswers,
) -> Result<(Response<UpstreamBody>, InFlight), RequestRefusal> {
    let mut log = RequestLog::begin(&cx.services, Some(&cx.sandbox), Kind::Git, None);
    log.event.event = Some("asked_for_push".to_owned());
    log.event.method = Some(target.method.as_str().to_owned());
    log.event.host = Some(target.host.to_string());
    log.event.port = Some(target.port);
    log.event.path = Some(target.path.wire().to_owned());
    match Box::pin(send_checked(cx, target, message, answers, &mut log)).await {
        Ok((response, in_flight)) => {
            log.record_status(response.status());
            Ok((response, in_flight))
        }
        Err(refusal) => {
            log.record_refusal(refusal.stage, &refusal.denial);
            Err(refusal)
        }
    }
}

async fn send_checked(
    cx: &RequestCx,
    target: Target,
    message: PipelineRequest,
    answers: &ApprovalAnswers,
    log: &mut RequestLog,
) -> Result<(Response<UpstreamBody>, InFlight), RequestRefusal> {
    let source = ConnectionSource::Listener(std::sync::Arc::clone(&cx.sandbox));
    let identity = source.identify(&cx.services, None)?;
    let (pass, admission) = admit(cx, &target.host, None, log)?;
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
    cx.record_bundles(&decided, log).await;
    let stage = Stage::of(decided.check);
    let (permit, recorded) = (decided.permit.take(), std::mem::take(&mut decided.recorded));
    let permit = match (decided.verdict, permit) {
        (Verdict::Allow { .. } | Verdict::Modify(_), Some(permit)) => permit,
        (Verdict::Deny(denial), _) => return Err(RequestRefusal::new(stage, *denial)),
        // The push already waits for the operator.
        (Verdict::Ask(question), _) => {
            return Err(RequestRefusal::new(stage, question.unattended_denial()));
        }
        (_, None) => {
            return Err(RequestRefusal::new(
                stage,
                Denial::new(Reason::Internal, "decide"),
            ));
        }
    };
    admission::take_label(cx, &host, port)?;
    let permitted = request.permit(permit);
    let mut request =
        permitted.map_err(|misused| RequestRefusal::new(Stage::Policy, misused.denial))?;
    request.request_mut().recorded = recorded;
    log.record_allow(request.permit().rule());
    log.end_stage(Stage::Policy);
    // The gate wrote the request, so its content needs no inspection.
    let request = request.clear(Clearance::nothing_configured());
    let prepared = match forward::prepare(cx.clone(), request, answers)? {
        Preparation::Now(prepared) => prepared,
        Preparation::Later(preparing) => preparing.await?,
    };
    // Nothing of this response reaches the sandbox, so that no echo has to be removed.
    let (reply, _) = prepared.send(log).await?;
    log.end_stage(Stage::Forward);
    match reply {
        ClientResponse::Upstream(response, in_flight) => Ok((response, in_flight)),
        ClientResponse::Gate(_) | ClientResponse::Changed(..) | ClientResponse::Upgraded(_) => {
            let denial = Denial::new(Reason::Internal, "pipeline");
            Err(RequestRefusal::new(Stage::Forward, denial))
        }
    }
}
