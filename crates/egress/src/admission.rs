//! Admission: tokens of rate limits, and a ticket of the host's circuit breaker.
//!
//! Only what happens takes them; to decide spends nothing. A token is taken once for a request,
//! a ticket anew for each attempt at it.

use decide::checks::Check;
use policy::breaker::{Outcome, Ticket};
use policy::bucket::Pass;
use policy::host::{Host, HostPattern};
use policy::reason::Reason;
use policy::verdict::{Denial, Detail};

use crate::rate_limits;
use crate::refusal::Refusal;
use crate::request_cx::RequestCx;
use crate::request_log::RequestLog;
use crate::stage::Stage;

/// The breaker's part in one attempt at a request. Dropped without an outcome, it counts as
/// abandoned: no half-open breaker waits for it.
#[must_use = "settle it with the outcome of the request"]
#[derive(Debug)]
pub struct Admission {
    cx: RequestCx,
    host: Host,
    ticket: Option<Ticket>,
}

impl Admission {
    /// Gives the ticket back with the outcome of the request.
    pub fn settle(mut self, outcome: Outcome) {
        self.give_back(outcome);
    }

    fn give_back(&mut self, outcome: Outcome) {
        let Some(ticket) = self.ticket.take() else {
            return;
        };
        let RequestCx {
            services,
            sandbox,
            snapshot,
        } = &self.cx;
        let (settings, host) = (&snapshot.settings, &self.host);
        if outcome == Outcome::Failure {
            services
                .metrics()
                .failed(rate_limits::label(settings, host));
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
        self.give_back(Outcome::Abandoned);
    }
}

/// Takes a token from the bucket of `host`, or refuses with the time until the next one.
pub fn take_token(cx: &RequestCx, host: &Host, trail: &mut RequestLog) -> Result<Pass, Refusal> {
    let now = cx.services.clock().tick();
    let taken = cx.sandbox.upstreams.take(&cx.snapshot.settings, host, now);
    let pass = taken.map_err(|(wait, rule)| {
        let denial = Denial::new(Reason::RateLimited, rule);
        refuse(Check::Rate, denial.with(retry(host, wait.seconds())))
    })?;
    trail.passed(Stage::Rate);
    Ok(pass)
}

/// Lets one attempt at a request in. A request that has paid its token keeps it.
pub fn admit(
    cx: &RequestCx,
    host: &Host,
    paid: Option<Pass>,
    trail: &mut RequestLog,
) -> Result<(Pass, Admission), Refusal> {
    let pass = match paid {
        Some(pass) => pass,
        None => take_token(cx, host, trail)?,
    };
    let now = cx.services.clock().tick();
    let admitted = cx.sandbox.upstreams.admit(&cx.snapshot.settings, host, now);
    let ticket = admitted.map_err(|open| {
        let denial = Denial::new(Reason::CircuitOpen, "circuit_breakers");
        refuse(Check::Breaker, denial.with(retry(host, open.seconds())))
    })?;
    trail.passed(Stage::Breaker);
    let admission = Admission {
        cx: cx.clone(),
        host: host.clone(),
        ticket: Some(ticket),
    };
    Ok((pass, admission))
}

/// Takes from the budget of names below a wildcard, for a host that the rules allow. The agent
/// chooses those names, and to resolve one sends it to the domain's name servers, so a sandbox
/// has only so many of them. Every way to the dialer takes from it.
pub fn take_label(cx: &RequestCx, host: &Host, port: u16) -> Result<(), Refusal> {
    let Some(name) = host.as_name() else {
        return Ok(());
    };
    let settings = &cx.snapshot.settings;
    let matched = settings.allowlist().lookup(host);
    let matched = matched.and_then(|rules| rules.first());
    let chosen = matched.is_some_and(|rule| matches!(rule.pattern, HostPattern::Below(_)));
    let fixed = settings.egress.resolve.get(host, port);
    if chosen && fixed.is_none() {
        let labels = cx.services.names().labels();
        labels
            .admit(cx.sandbox.id(), name)
            .map_err(|denial| refuse(Check::Labels, denial))?;
    }
    Ok(())
}

/// Takes a token for a push.
pub fn take_push(cx: &RequestCx) -> Result<(), Denial> {
    let taken = cx.sandbox.take_push(cx.services.clock().tick());
    taken.map(drop).map_err(|wait| {
        let seconds = wait.seconds();
        Denial::new(Reason::GitRate, "git:rate").saying(format!(
            "Too many pushes in too short a time: wait {seconds} s."
        ))
    })
}

fn refuse(check: Check, denial: Denial) -> Refusal {
    Refusal::new(Stage::of(check), denial)
}

fn retry(host: &Host, after: u64) -> Detail {
    let upstream = host.to_string();
    Detail::Retry { upstream, after }
}
