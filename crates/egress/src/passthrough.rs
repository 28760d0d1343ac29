//! TLS that is passed on unread, to a host whose clients take no certificate but its own.
//!
//! The rules see the name, the port and the program, and so do the operator's policies; no
//! credential is added, and the record says `unread`.

use std::sync::Arc;
use std::time::Duration;

use decide::checks::Check;
use decide::hold::{self, Attempt, Held, Holding};
use decide::subject::{PassthroughFacts, Subject};
use policy::answer::{Answer, Answers};
use policy::audit::Kind;
use policy::breaker::Outcome;
use policy::bucket::Pass;
use policy::proof::Identified;
use policy::reason::Reason;
use policy::verdict::{Denial, Digest, Verdict};
use tokio::io::{AsyncRead, AsyncWrite};

use crate::admission::{self, Admission, admit};
use crate::client_connection::ClientConnection;
use crate::forward;
use crate::hello::{Hello, Replay};
use crate::in_flight::{Authorized, AuthorizedConnection, InFlight};
use crate::refusal::Refusal;
use crate::request::Destination;
use crate::request_cx::{self, RequestCx};
use crate::request_log::RequestLog;
use crate::sandbox_state::SandboxState;
use crate::source::reserve_record;
use crate::splice;
use crate::stage::Stage;

/// How long a connection waits for the operator's answer: its client waits in a handshake.
const MAX_HOLD: Duration = Duration::from_secs(10);

/// Passes a connection on that began with `hello`.
pub async fn pass<IO>(
    visit: &ClientConnection,
    sandbox: &Arc<SandboxState>,
    destination: Destination,
    hello: &Hello,
    io: Replay<IO>,
) where
    IO: AsyncRead + AsyncWrite + Send + Unpin + 'static,
{
    let slot = reserve_record(Some(sandbox)).await;
    let mut trail = RequestLog::begin(&visit.services, Some(sandbox), Kind::Http, slot);
    trail.event.host = Some(destination.host.to_string());
    trail.event.port = Some(destination.port);
    trail.event.method = Some("CONNECT".to_owned());
    trail.event.unread = true;
    if let Err(refusal) = join(visit, sandbox, destination, hello, io, &mut trail).await {
        // The client cannot be told: the stream is not ours to speak on.
        trail.refused(refusal.stage, &refusal.denial);
    }
}

async fn join<IO>(
    visit: &ClientConnection,
    sandbox: &Arc<SandboxState>,
    destination: Destination,
    hello: &Hello,
    mut io: Replay<IO>,
    trail: &mut RequestLog,
) -> Result<(), Refusal>
where
    IO: AsyncRead + AsyncWrite + Send + Unpin + 'static,
{
    let services = &visit.services;
    let mut held = HeldConnection {
        visit,
        sandbox,
        destination: &destination,
        has_ech: hello.has_ech,
        client: &mut io,
        paid: None,
        label_paid: false,
        asked_by: Check::Allowlist,
        waiting: None,
        trail,
    };
    let holding = Holding {
        questions: services.questions(),
        policy: services.policy(),
        limit: Some(MAX_HOLD),
    };
    let (cx, admission, in_flight) = hold::settle(&mut held, holding).await?;
    trail.passed(Stage::Policy);
    let (host, port) = (&destination.host, destination.port);
    let connecting = services.dialer().connect(sandbox.id(), host, port);
    let connected = tokio::select! {
        connected = connecting => connected,
        () = in_flight.revoked() => {
            let denial = services.why_revoked(sandbox, in_flight).await;
            return Err(Refusal::new(Stage::Policy, denial));
        }
    };
    let upstream = match connected {
        Ok((upstream, _)) => {
            admission.settle(Outcome::Success);
            upstream
        }
        Err(error) => {
            admission.settle(if error.counts_as_failure() {
                Outcome::Failure
            } else {
                Outcome::Abandoned
            });
            return Err(forward::refusal(&error));
        }
    };
    trail.passed(Stage::Forward);
    let idle = cx.snapshot.settings.egress.timeouts.idle;
    if let Err(error) = splice::join(io, upstream, &trail.tally, &in_flight, idle).await {
        tracing::debug!(%error, "a connection that was passed on ended");
    }
    Ok(())
}

/// A connection that is decided, and may have to wait in between.
struct HeldConnection<'a, IO> {
    visit: &'a ClientConnection,
    sandbox: &'a Arc<SandboxState>,
    destination: &'a Destination,
    has_ech: bool,
    /// The client's end, which is watched while it waits.
    client: &'a mut Replay<IO>,
    /// The token it has paid.
    paid: Option<Pass>,
    label_paid: bool,
    asked_by: Check,
    /// Its entry in the in-flight set while it waits.
    waiting: Option<InFlight>,
    trail: &'a mut RequestLog,
}

impl<IO> Held for HeldConnection<'_, IO>
where
    IO: AsyncRead + Send + Unpin,
{
    type Allowed = (RequestCx, Admission, InFlight);
    type Refused = Refusal;

    async fn attempt(&mut self, answers: &Answers) -> Result<Attempt<Self::Allowed>, Refusal> {
        if self.waiting.take().is_some() {
            self.trail.resumed();
        }
        let services = &self.visit.services;
        let cx = RequestCx::new(services, self.sandbox);
        let identity = self.visit.source.identify(services, None)?;
        self.trail.passed(Stage::Identity);
        if self.has_ech {
            let denial = Denial::new(Reason::NameMismatch, "passthrough")
                .because("the hello hides its real name (ECH)");
            return Err(Refusal::new(Stage::Request, denial));
        }
        let (host, port) = (&self.destination.host, self.destination.port);
        let (pass, admission) = admit(&cx, host, self.paid.take(), self.trail)?;
        let request = Identified::new((), identity).admit(pass, admission);
        let program = self.visit.connection_info.program(&cx).await;
        let facts = PassthroughFacts {
            sandbox: self.sandbox.id(),
            host,
            port,
            program: program.as_deref(),
            registration: Some(request.identity().registration()),
            recorded: None,
        };
        let decided = cx.decide(Subject::Passthrough(facts), answers).wait().await;
        if let Verdict::Allow { rule } = &decided.verdict {
            self.trail.allowed(rule);
        }
        cx.record_bundles(&decided, self.trail).await;
        let stage = Stage::of(decided.check);
        match decided.verdict {
            Verdict::Allow { .. } | Verdict::Modify(_) => {}
            Verdict::Deny(denial) => return Err(Refusal::new(stage, *denial)),
            Verdict::Ask(question) => {
                self.asked_by = decided.check;
                self.trail.asked(&question);
                let ((), pass) = request.release();
                self.paid = Some(pass);
                return Ok(Attempt::Ask(question));
            }
        }
        if !self.label_paid {
            admission::take_label(&cx, host, port)?;
            self.label_paid = true;
        }
        let authorized = Authorized::Passthrough(Box::new(AuthorizedConnection {
            host: host.clone(),
            port,
            program,
            recorded: decided.recorded,
            answers: answers.clone(),
        }));
        let entered = cx.enter(authorized).wait().await;
        let in_flight = entered.map_err(|denial| Refusal::new(Stage::Policy, denial))?;
        Ok(Attempt::Done((cx, request.into_admission(), in_flight)))
    }

    fn refuse(&self, denial: Denial) -> Refusal {
        Refusal::new(Stage::of(self.asked_by), denial)
    }

    fn snapshot(&self) -> u64 {
        let services = &self.visit.services;
        services.snapshot_for(Some(self.sandbox)).number
    }

    async fn secure(&mut self) -> Result<(), Refusal> {
        self.waiting = Some(self.sandbox.in_flight.enter(Authorized::Held));
        Ok(())
    }

    async fn ended(&mut self) -> Denial {
        let revoked = async {
            match &self.waiting {
                Some(waiting) => waiting.revoked().await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            () = revoked => request_cx::ended(self.sandbox),
            // Nothing else reads from it while it waits.
            () = self.client.left() => Denial::new(Reason::ClientLeft, "tls")
                .because("it left while the operator was asked"),
        }
    }

    fn grant(&mut self, digest: Digest, answer: &Answer) {
        RequestCx::new(&self.visit.services, self.sandbox).grant(digest, answer);
    }
}
