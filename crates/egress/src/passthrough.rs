//! TLS passthrough: relays TLS without decryption, for hosts whose clients pin the certificate.
//!
//! Rules and policy bundles decide by the name, the port and the program only. No credential is
//! added, and the audit record has `unread: true`.

use std::sync::Arc;
use std::time::Duration;

use decide::checks::Check;
use decide::hold::{self, Attempt, HeldSubject, Holding};
use decide::subject::{PassthroughFacts, Subject};
use policy::answer::{ApprovalAnswer, ApprovalAnswers};
use policy::audit::Kind;
use policy::breaker::UpstreamOutcome;
use policy::bucket::RateLimitPass;
use policy::proof::Identified;
use policy::reason::Reason;
use policy::verdict::{Denial, Digest, Verdict};
use tokio::io::{AsyncRead, AsyncWrite};

use crate::admission::{self, Admission, admit};
use crate::client_connection::ClientConnection;
use crate::forward;
use crate::hello::{Hello, ReplayStream};
use crate::in_flight::{Authorized, AuthorizedConnection, InFlight};
use crate::refusal::RequestRefusal;
use crate::request::Destination;
use crate::request_cx::{self, RequestCx};
use crate::request_log::RequestLog;
use crate::sandbox_state::SandboxState;
use crate::source::reserve_record;
use crate::splice;
use crate::stage::Stage;

/// How long a connection waits for an approval: its client waits in the handshake.
const MAX_HOLD: Duration = Duration::from_secs(10);

/// Relays a connection that began with `hello`.
pub async fn serve<IO>(
    connection: &ClientConnection,
    sandbox: &Arc<SandboxState>,
    destination: Destination,
    hello: &Hello,
    io: ReplayStream<IO>,
) where
    IO: AsyncRead + AsyncWrite + Send + Unpin + 'static,
{
    let slot = reserve_record(Some(sandbox)).await;
    let mut log = RequestLog::begin(&connection.services, Some(sandbox), Kind::Http, slot);
    log.event.host = Some(destination.host.to_string());
    log.event.port = Some(destination.port);
    log.event.method = Some("CONNECT".to_owned());
    log.event.unread = true;
    if let Err(refusal) = relay(connection, sandbox, destination, hello, io, &mut log).await {
        // No error response: the client expects TLS from the upstream.
        log.record_refusal(refusal.stage, &refusal.denial);
    }
}

async fn relay<IO>(
    connection: &ClientConnection,
    sandbox: &Arc<SandboxState>,
    destination: Destination,
    hello: &Hello,
    mut io: ReplayStream<IO>,
    log: &mut RequestLog,
) -> Result<(), RequestRefusal>
where
    IO: AsyncRead + AsyncWrite + Send + Unpin + 'static,
{
    let services = &connection.services;
    let mut held = HeldConnection {
        connection,
        sandbox,
        destination: &destination,
        has_ech: hello.has_ech,
        client: &mut io,
        earlier_pass: None,
        label_taken: false,
        asking_check: Check::Allowlist,
        waiting: None,
        log,
    };
    let holding = Holding {
        questions: services.questions(),
        policy: services.policy(),
        limit: Some(MAX_HOLD),
    };
    let (cx, admission, in_flight) = hold::settle(&mut held, holding).await?;
    log.end_stage(Stage::Policy);
    let (host, port) = (&destination.host, destination.port);
    let connecting = services.dialer().connect(sandbox.id(), host, port);
    let connected = tokio::select! {
        connected = connecting => connected,
        () = in_flight.revoked() => {
            let denial = services.revocation_reason(sandbox, in_flight).await;
            return Err(RequestRefusal::new(Stage::Policy, denial));
        }
    };
    let upstream = match connected {
        Ok((upstream, _)) => {
            admission.settle(UpstreamOutcome::Success);
            upstream
        }
        Err(error) => {
            admission.settle(if error.counts_as_failure() {
                UpstreamOutcome::Failure
            } else {
                UpstreamOutcome::Abandoned
            });
            return Err(forward::refusal(&error));
        }
    };
    log.end_stage(Stage::Forward);
    let idle = cx.snapshot.settings.egress.timeouts.idle;
    if let Err(error) = splice::join(io, upstream, &log.tally, &in_flight, idle).await {
        tracing::debug!(%error, "passthrough connection failed");
    }
    Ok(())
}

/// A connection while it is decided, which may include waiting for an approval.
struct HeldConnection<'a, IO> {
    connection: &'a ClientConnection,
    sandbox: &'a Arc<SandboxState>,
    destination: &'a Destination,
    has_ech: bool,
    /// The client's stream, watched for a disconnect while the connection waits.
    client: &'a mut ReplayStream<IO>,
    /// The rate limit token that the connection has taken.
    earlier_pass: Option<RateLimitPass>,
    /// Whether the connection has taken its token of the label budget.
    label_taken: bool,
    /// The check that asked for an approval.
    asking_check: Check,
    /// The entry in the in-flight set while the connection waits.
    waiting: Option<InFlight>,
    log: &'a mut RequestLog,
}

impl<IO> HeldSubject for HeldConnection<'_, IO>
where
    IO: AsyncRead + Send + Unpin,
{
    type Allowed = (RequestCx, Admission, InFlight);
    type Refused = RequestRefusal;

    async fn attempt(
        &mut self,
        answers: &ApprovalAnswers,
    ) -> Result<Attempt<Self::Allowed>, RequestRefusal> {
        if self.waiting.take().is_some() {
            self.log.restart_stage_timer();
        }
        let services = &self.connection.services;
        let cx = RequestCx::new(services, self.sandbox);
        let identity = self.connection.source.identify(services, None)?;
        self.log.end_stage(Stage::Identity);
        if self.has_ech {
            let denial = Denial::new(Reason::NameMismatch, "passthrough")
                .with_evidence("the TLS hello encrypts its real name (ECH)");
            return Err(RequestRefusal::new(Stage::Request, denial));
        }
        let (host, port) = (&self.destination.host, self.destination.port);
        let (pass, admission) = admit(&cx, host, self.earlier_pass.take(), self.log)?;
        let request = Identified::new((), identity).admit(pass, admission);
        let program = self.connection.connection_info.program(&cx).await;
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
            self.log.record_allow(rule);
        }
        cx.record_bundles(&decided, self.log).await;
        let stage = Stage::of(decided.check);
        match decided.verdict {
            Verdict::Allow { .. } | Verdict::Modify(_) => {}
            Verdict::Deny(denial) => return Err(RequestRefusal::new(stage, *denial)),
            Verdict::Ask(question) => {
                self.asking_check = decided.check;
                self.log.record_question(&question);
                let ((), pass) = request.release();
                self.earlier_pass = Some(pass);
                return Ok(Attempt::Ask(question));
            }
        }
        if !self.label_taken {
            admission::take_label(&cx, host, port)?;
            self.label_taken = true;
        }
        let authorized = Authorized::Passthrough(Box::new(AuthorizedConnection {
            host: host.clone(),
            port,
            program,
            recorded: decided.recorded,
            answers: answers.clone(),
        }));
        let entered = cx.enter(authorized).wait().await;
        let in_flight = entered.map_err(|denial| RequestRefusal::new(Stage::Policy, denial))?;
        Ok(Attempt::Done((cx, request.into_admission(), in_flight)))
    }

    fn refuse(&self, denial: Denial) -> RequestRefusal {
        RequestRefusal::new(Stage::of(self.asking_check), denial)
    }

    fn snapshot(&self) -> u64 {
        let services = &self.connection.services;
        services.snapshot_for(Some(self.sandbox)).number
    }

    async fn secure(&mut self) -> Result<(), RequestRefusal> {
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
            () = revoked => request_cx::ended_denial(self.sandbox),
            // Nothing else reads from the client meanwhile.
            () = self.client.client_closed() => Denial::new(Reason::ClientLeft, "tls")
                .with_evidence("the client disconnected while waiting for an approval"),
        }
    }

    fn grant(&mut self, digest: Digest, answer: &ApprovalAnswer) {
        RequestCx::new(&self.connection.services, self.sandbox).grant(digest, answer);
    }
}
