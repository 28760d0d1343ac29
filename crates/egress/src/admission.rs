//! Admission: takes rate limit tokens and a ticket of the host's circuit breaker.
//!
//! Only real requests take them; a trial decision does not. A token is taken once per request, a
//! ticket for each attempt.

use decide::checks::Check;
use policy::breaker::{Ticket, UpstreamOutcome};
use policy::bucket::RateLimitPass;
use policy::host::{Host, HostPattern};
use policy::reason::Reason;
use policy::verdict::{Denial, Detail};

use crate::rate_limits;
use crate::refusal::RequestRefusal;
use crate::request_cx::RequestCx;
use crate::request_log::RequestLog;
use crate::stage::Stage;

/// Circuit breaker ticket of one attempt. Dropped without an outcome, it counts as abandoned, so
/// that no half-open breaker waits for it.
#[must_use = "settle the admission with the outcome of the request"]
#[derive(Debug)]
pub struct Admission {
    cx: RequestCx,
    host: Host,
    ticket: Option<Ticket>,
}

impl Admission {
    /// Settles the ticket with the outcome of the request.
    pub fn settle(mut self, outcome: UpstreamOutcome) {
        self.settle_ticket(outcome);
    }

    fn settle_ticket(&mut self, outcome: UpstreamOutcome) {
        let Some(ticket) = self.ticket.take() else {
            return;
        };
        let RequestCx {
            services,
            sandbox,
            snapshot,
        } = &self.cx;
        let (settings, host) = (&snapshot.settings, &self.host);
        if outcome == UpstreamOutcome::Failure {
            services
                .metrics()
                .count_failure(rate_limits::label(settings, host));
        }
        let now = services.clock().tick();
        let limits = &sandbox.upstreams;
        if limits.settle(settings, host, ticket, outcome, now) {
            tracing::warn!(sandbox = %sandbox.id(), %host, "circuit breaker opened");
        }
    }
}

impl Drop for Admission {
    fn drop(&mut self) {
        self.settle_ticket(UpstreamOutcome::Abandoned);
    }
}

/// Takes a rate limit token of `host`, or refuses with the time until the next token.
pub fn take_token(
    cx: &RequestCx,
    host: &Host,
    log: &mut RequestLog,
) -> Result<RateLimitPass, RequestRefusal> {
    let now = cx.services.clock().tick();
    let taken = cx.sandbox.upstreams.take(&cx.snapshot.settings, host, now);
    let pass = taken.map_err(|(wait, rule)| {
        let denial = Denial::new(Reason::RateLimited, rule);
        check_refusal(
            Check::Rate,
            denial.with_detail(retry_detail(host, wait.seconds())),
        )
    })?;
    log.end_stage(Stage::Rate);
    Ok(pass)
}

/// Admits one attempt at a request. `earlier_pass` is the token that an earlier attempt
/// has taken.
pub fn admit(
    cx: &RequestCx,
    host: &Host,
    earlier_pass: Option<RateLimitPass>,
    log: &mut RequestLog,
) -> Result<(RateLimitPass, Admission), RequestRefusal> {
    let pass = match earlier_pass {
        Some(pass) => pass,
        None => take_token(cx, host, log)?,
    };
    let admission = take_ticket(cx, host)?;
    log.end_stage(Stage::Breaker);
    Ok((pass, admission))
}

/// Takes a ticket of the host's circuit breaker, for one attempt at a request.
pub fn take_ticket(cx: &RequestCx, host: &Host) -> Result<Admission, RequestRefusal> {
    let now = cx.services.clock().tick();
    let admitted = cx.sandbox.upstreams.admit(&cx.snapshot.settings, host, now);
    let ticket = admitted.map_err(|open| {
        let denial = Denial::new(Reason::CircuitOpen, "circuit_breakers");
        check_refusal(
            Check::Breaker,
            denial.with_detail(retry_detail(host, open.seconds())),
        )
    })?;
    Ok(Admission {
        cx: cx.clone(),
        host: host.clone(),
        ticket: Some(ticket),
    })
}

/// Takes a token of the sandbox's budget of names below a wildcard, if `host` is such a name. The
/// agent chooses those names, and resolving one sends it to the domain's name servers, so their
/// number is limited. Every caller of the dialer takes from this budget.
pub fn take_label(cx: &RequestCx, host: &Host, port: u16) -> Result<(), RequestRefusal> {
    let Some(name) = host.as_name() else {
        return Ok(());
    };
    let settings = &cx.snapshot.settings;
    let matched = settings.allowlist().lookup(host);
    let matched = matched.and_then(|rules| rules.first());
    let is_agent_chosen = matched
        .is_some_and(|rule| matches!(rule.pattern, HostPattern::Wildcard(_) | HostPattern::Any));
    let fixed = settings.egress.resolve.get(host, port);
    if is_agent_chosen && fixed.is_none() {
        let labels = cx.services.name_server().label_budget();
        labels
            .admit(cx.sandbox.id(), name)
            .map_err(|denial| check_refusal(Check::Labels, denial))?;
    }
    Ok(())
}

/// Takes a rate limit token for a push.
pub fn take_push(cx: &RequestCx) -> Result<(), Denial> {
    let taken = cx.sandbox.take_push(cx.services.clock().tick());
    taken.map(drop).map_err(|wait| {
        let seconds = wait.seconds();
        Denial::new(Reason::GitRate, "git:rate").with_message(format!(
            "Too many pushes in too short a time: wait {seconds} s."
        ))
    })
}

/// The refusal of a request by `check`.
fn check_refusal(check: Check, denial: Denial) -> RequestRefusal {
    RequestRefusal::new(Stage::of(check), denial)
}

fn retry_detail(host: &Host, after: u64) -> Detail {
    let upstream = host.to_string();
    Detail::Retry { upstream, after }
}
