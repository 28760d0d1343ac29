//! TLS that is passed on unread, to a host whose clients take no certificate but its own.
//!
//! The rules see the name, the port and the program, and that is all, and so do the
//! operator's policies; no credential is added, and the record says `unread`.

use std::sync::Arc;

use policy::audit::Kind;
use policy::breaker::Outcome;
use policy::host::Host;
use policy::proof::Identified;
use policy::reason::Reason;
use policy::verdict::Denial;
use tokio::io::{AsyncRead, AsyncWrite};

use crate::connection::Visit;
use crate::forward;
use crate::guest::Guest;
use crate::hello::{Hello, Replay};
use crate::live::Asked;
use crate::pipeline::{self, settle};
use crate::refusal::Refusal;
use crate::rego;
use crate::request::Destination;
use crate::splice;
use crate::trail::{Stage, Trail};

/// Passes a connection on that began with `hello`.
pub async fn pass<IO>(
    visit: &Visit,
    guest: &Arc<Guest>,
    destination: Destination,
    hello: &Hello,
    io: Replay<IO>,
) where
    IO: AsyncRead + AsyncWrite + Send + Unpin + 'static,
{
    // The semaphore is never closed.
    let place = Arc::clone(&guest.requests).acquire_owned().await.ok();
    let mut trail = Trail::begin(&visit.traffic, Some(guest), Kind::Http, place);
    trail.event.host = Some(destination.host.to_string());
    trail.event.port = Some(destination.port);
    trail.event.method = Some("CONNECT".to_owned());
    trail.event.unread = true;
    if let Err(refusal) = join(visit, guest, destination, hello, io, &mut trail).await {
        // The client cannot be told: the stream is not ours to speak on.
        trail.refused(refusal.stage, &refusal.denial);
    }
}

async fn join<IO>(
    visit: &Visit,
    guest: &Arc<Guest>,
    destination: Destination,
    hello: &Hello,
    io: Replay<IO>,
    trail: &mut Trail,
) -> Result<(), Refusal>
where
    IO: AsyncRead + AsyncWrite + Send + Unpin + 'static,
{
    let traffic = &visit.traffic;
    let rules = traffic.rules_for(Some(guest));
    let identity = pipeline::identify_source(traffic, &visit.source, None)?;
    trail.passed(Stage::Identity);
    if hello.has_ech {
        let denial = Denial::new(Reason::NameMismatch, "passthrough")
            .because("the hello hides its real name (ECH)");
        return Err(Refusal::new(Stage::Request, denial));
    }
    let (host, port): (Host, u16) = (destination.host.clone(), destination.port);
    let request = Identified::new(destination, identity);
    let request = pipeline::admit(traffic, guest, &rules, &host, request, trail)?;
    let program = visit.opening.program(traffic, guest, &rules).await;
    let registration = Arc::clone(request.identity().registration());
    let allowed = rules
        .judge_tunnel(&host, port, program.as_deref())
        .and_then(|rule| {
            pipeline::within_labels(traffic, &rules, guest.id(), &host, port)?;
            Ok(rule)
        });
    let judged = match allowed {
        Ok(rule) => {
            trail.allowed(&rule);
            let asked = rego::Asked {
                sandbox: guest.id(),
                host: &host,
                port,
                tls: true,
                program: program.as_deref(),
                request: None,
                registration: Some(&registration),
                rule: &rule,
            };
            rego::check_unread(traffic, &rules, &asked, trail).await
        }
        Err(denial) => Err(denial),
    };
    let (destination, guard) = request.refuse();
    let learn = |outcome| settle(traffic, guest, &rules, &destination, guard, outcome);
    let told = match judged {
        Ok(told) => told,
        Err(denial) => {
            learn(Outcome::Abandoned);
            return Err(Refusal::new(Stage::Policy, denial));
        }
    };
    trail.passed(Stage::Policy);
    let upstream = match traffic.dialer().connect(guest.id(), &host, port).await {
        Ok((upstream, _)) => {
            learn(Outcome::Success);
            upstream
        }
        Err(error) => {
            learn(if error.counts_as_failure() {
                Outcome::Failure
            } else {
                Outcome::Abandoned
            });
            return Err(forward::refusal(&error));
        }
    };
    trail.passed(Stage::Forward);
    let live = traffic
        .enter(guest, &rules, Asked::Tunnel(host, port, program, told))
        .map_err(|denial| Refusal::new(Stage::Policy, denial))?;
    let patience = rules.settings.egress.timeouts.idle;
    if let Err(error) = splice::join(io, upstream, &trail.tally, &live, patience).await {
        tracing::debug!(%error, "a connection that was passed on ended");
    }
    Ok(())
}
