//! What the gate itself asks of an upstream, on behalf of a request that is on its way there:
//! along the same way, by the same rules, and with a record of its own.

use std::sync::Arc;

use http::Response;
use policy::allowlist::Target;
use policy::audit::Kind;
use policy::identity::identify;
use policy::proof::{Clearance, Identified};
use policy::reason::Reason;
use policy::verdict::Denial;

use crate::dialer::Arriving;
use crate::forward::{self, Reply};
use crate::guest::Guest;
use crate::live::Live;
use crate::pipeline::{Message, admit, permit_target};
use crate::refusal::Refusal;
use crate::traffic::{Rules, Traffic};
use crate::trail::{Stage, Trail};

/// Sends a message of the gate's own to `target`, and gives what comes back.
pub async fn ask(
    traffic: &Arc<Traffic>,
    guest: &Arc<Guest>,
    rules: &Rules,
    target: Target,
    message: Message,
) -> Result<(Response<Arriving>, Live), Refusal> {
    let mut trail = Trail::begin(traffic, Some(guest), Kind::Git, None);
    trail.event.event = Some("asked_for_push".to_owned());
    trail.event.method = Some(target.method.as_str().to_owned());
    trail.event.host = Some(target.host.to_string());
    trail.event.port = Some(target.port);
    trail.event.path = Some(target.path.wire().to_owned());
    let sent = Box::pin(send_own(traffic, guest, rules, target, message, &mut trail)).await;
    match sent {
        Ok((response, live)) => {
            trail.answered(response.status());
            Ok((response, live))
        }
        Err(refusal) => {
            trail.refused(refusal.stage, &refusal.denial);
            Err(refusal)
        }
    }
}

async fn send_own(
    traffic: &Traffic,
    guest: &Guest,
    rules: &Rules,
    target: Target,
    message: Message,
    trail: &mut Trail,
) -> Result<(Response<Arriving>, Live), Refusal> {
    let row = traffic.registry().by_id(guest.id());
    let identity = identify(row, None, traffic.clock().wall())
        .map_err(|denial| Refusal::new(Stage::Identity, denial))?;
    let request = Identified::new(message, identity);
    let request = admit(traffic, guest, rules, &target.host, request, trail)?;
    let request = permit_target(traffic, guest, rules, request, target, trail).await?;
    trail.allowed(request.permit().rule());
    trail.passed(Stage::Policy);
    // The words are the gate's own.
    let request = request.clear(Clearance::nothing_configured());
    let reply = forward::prepare(traffic, guest, rules, request)?
        .send()
        .await?;
    trail.passed(Stage::Forward);
    match reply {
        Reply::Theirs(response, live) => Ok((response, live)),
        Reply::Ours(_) | Reply::Changed(..) | Reply::Upgraded(_) => {
            let denial = Denial::new(Reason::Internal, "pipeline");
            Err(Refusal::new(Stage::Forward, denial))
        }
    }
}
