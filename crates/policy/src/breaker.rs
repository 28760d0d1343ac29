//! Circuit breaker: stops requests to an upstream that keeps failing.
//!
//! ```text
//!                failure_threshold failures in a row
//!        ┌──────────┐ ─────────────────────────────────▶ ┌──────────┐
//!   ───▶ │  closed  │                                    │   open   │ refuses all
//!        └──────────┘                                    └──────────┘
//!             ▲                                            │      ▲
//!             │ success_threshold        recovery has passed,     │ one failure
//!             │ successes                  next request    │      │
//!             │                                            ▼      │
//!             │                                      ┌─────────────┐
//!             └───────────────────────────────────── │  half-open  │ admits `probes`
//!                                                    └─────────────┘ at a time
//! ```
//!
//! Every transition starts a new generation. A ticket contains the generation in which it was
//! issued, and outcomes of earlier generations are ignored: the failure of a slow request of an
//! earlier generation does not describe the upstream's present state.
//!
//! Only **consecutive** failures count. A breaker that counts all failures (as the seed does)
//! eventually opens for any host with one error in a thousand.
//!
//! Only the upstream's responses count. A request that the gate refused or the client cancelled is
//! [`UpstreamOutcome::Abandoned`]; a breaker that counts its own refusals would never close again.

use std::time::Duration;

use crate::clock::{Tick, round_up_to_seconds};

/// Thresholds of a breaker. A value of zero counts as one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BreakerConfig {
    /// Consecutive failures that open the breaker.
    pub failure_threshold: u32,
    /// How long the breaker stays open. Also the lease time of a probe, at least one second, after
    /// which another probe is admitted.
    pub recovery: Duration,
    /// Successes that close the breaker again.
    pub success_threshold: u32,
    /// Requests that may be in flight while the breaker is half-open.
    pub probes: u32,
}

impl Default for BreakerConfig {
    fn default() -> Self {
        Self {
            failure_threshold: 5,
            recovery: Duration::from_secs(30),
            success_threshold: 2,
            probes: 1,
        }
    }
}

impl BreakerConfig {
    /// How long a probe may be in flight before another probe is admitted.
    fn lease(&self) -> Duration {
        self.recovery.max(Duration::from_secs(1))
    }

    fn max_probes(&self) -> usize {
        usize::try_from(self.probes).unwrap_or(usize::MAX).max(1)
    }
}

/// Permission to send a request, to be returned with the [`UpstreamOutcome`]. Only [`Breaker::admit`]
/// creates one. The lease of a lost ticket ends by itself, and a ticket that is returned to
/// another breaker is ignored.
///
/// ```compile_fail,E0451
/// let ticket = policy::breaker::Ticket { breaker: 0, generation: 0, probe: None };
/// ```
#[must_use = "settle the ticket with the outcome of the request"]
#[derive(Debug, PartialEq, Eq)]
pub struct Ticket {
    breaker: u64,
    generation: u64,
    probe: Option<u64>,
}

/// The outcome of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum UpstreamOutcome {
    /// The upstream responded with a status below 500.
    Success,
    /// The upstream could not be reached, was too slow, or responded with 500 or above.
    Failure,
    /// Not counted, because the upstream did not cause the outcome: the client disconnected, or the
    /// gate refused the request after its admission.
    Abandoned,
}

/// The breaker is open.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BreakerOpen {
    /// Time until the next attempt may be admitted.
    pub remaining: Duration,
}

impl BreakerOpen {
    /// The remaining time in whole seconds, for `Retry-After`.
    pub const fn seconds(self) -> u64 {
        round_up_to_seconds(self.remaining)
    }
}

/// The state of a breaker, for metrics.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum BreakerState {
    /// Requests pass.
    Closed,
    /// Requests are refused.
    Open,
    /// A few requests pass as probes.
    HalfOpen,
}

impl BreakerState {
    /// The name of the state.
    pub const fn as_str(self) -> &'static str {
        match self {
            BreakerState::Closed => "closed",
            BreakerState::Open => "open",
            BreakerState::HalfOpen => "half-open",
        }
    }
}

/// A breaker for one sandbox and one upstream. It starts closed.
///
/// The configuration is passed to each call, so that a reload takes effect for every breaker at
/// once. A clone accepts the tickets of the original.
#[derive(Clone, Debug)]
pub struct Breaker {
    /// Distinguishes this breaker's tickets from those of other breakers.
    id: u64,
    generation: u64,
    phase: Phase,
}

#[derive(Clone, Debug)]
enum Phase {
    Closed {
        failures: u32,
    },
    Open {
        since: Tick,
    },
    HalfOpen {
        successes: u32,
        leases: Vec<Lease>,
        next_probe: u64,
    },
}

impl Default for Phase {
    fn default() -> Self {
        Phase::Closed { failures: 0 }
    }
}

/// A probe in flight.
#[derive(Clone, Copy, Debug)]
struct Lease {
    probe: u64,
    since: Tick,
}

impl Breaker {
    /// A closed breaker. Each breaker must have a different `id`.
    pub fn new(id: u64) -> Self {
        Self {
            id,
            generation: 0,
            phase: Phase::default(),
        }
    }

    /// The phase as of the last call of [`Breaker::admit`] or [`Breaker::settle`]. Reports
    /// use [`Breaker::state_at`], because time passes without either.
    pub fn state(&self) -> BreakerState {
        match self.phase {
            Phase::Closed { .. } => BreakerState::Closed,
            Phase::Open { .. } => BreakerState::Open,
            Phase::HalfOpen { .. } => BreakerState::HalfOpen,
        }
    }

    /// The state that a request meets at `now`: an open breaker whose recovery time has
    /// passed admits a probe, so the breaker is half-open.
    pub fn state_at(&self, config: &BreakerConfig, now: Tick) -> BreakerState {
        match self.phase {
            Phase::Open { since } if remaining(since, config, now).is_zero() => {
                BreakerState::HalfOpen
            }
            _ => self.state(),
        }
    }

    /// Whether the breaker is in its initial state, so that it can be dropped.
    pub fn is_idle(&self) -> bool {
        matches!(self.phase, Phase::Closed { failures: 0 })
    }

    /// Admits a request to the upstream, or refuses it.
    #[inline]
    pub fn admit(&mut self, config: &BreakerConfig, now: Tick) -> Result<Ticket, BreakerOpen> {
        if let Phase::Open { since } = &mut self.phase {
            // A clock that went back must not keep the breaker open longer than `recovery`.
            *since = (*since).min(now);
            let remaining = remaining(*since, config, now);
            if !remaining.is_zero() {
                return Err(BreakerOpen { remaining });
            }
            self.enter(Phase::HalfOpen {
                successes: 0,
                leases: Vec::new(),
                next_probe: 0,
            });
        }
        let probe = match &mut self.phase {
            Phase::HalfOpen {
                leases, next_probe, ..
            } => Some(lease_probe(leases, next_probe, config, now)?),
            Phase::Closed { .. } | Phase::Open { .. } => None,
        };
        Ok(Ticket {
            breaker: self.id,
            generation: self.generation,
            probe,
        })
    }

    /// Takes a ticket back and counts the outcome of its request.
    #[inline]
    pub fn settle(
        &mut self,
        config: &BreakerConfig,
        ticket: Ticket,
        outcome: UpstreamOutcome,
        now: Tick,
    ) {
        if (ticket.breaker, ticket.generation) != (self.id, self.generation) {
            return;
        }
        match &mut self.phase {
            Phase::Closed { failures } => match outcome {
                UpstreamOutcome::Success => *failures = 0,
                UpstreamOutcome::Failure => {
                    *failures = failures.saturating_add(1);
                    if *failures >= config.failure_threshold.max(1) {
                        self.enter(Phase::Open { since: now });
                    }
                }
                UpstreamOutcome::Abandoned => {}
            },
            Phase::Open { .. } => {}
            Phase::HalfOpen {
                successes, leases, ..
            } => {
                // The outcome counts even if the lease has ended: otherwise the breaker would never
                // close for an upstream that takes longer than a lease.
                leases.retain(|lease| Some(lease.probe) != ticket.probe);
                match outcome {
                    UpstreamOutcome::Success => {
                        *successes = successes.saturating_add(1);
                        if *successes >= config.success_threshold.max(1) {
                            self.enter(Phase::Closed { failures: 0 });
                        }
                    }
                    UpstreamOutcome::Failure => self.enter(Phase::Open { since: now }),
                    UpstreamOutcome::Abandoned => {}
                }
            }
        }
    }

    fn enter(&mut self, phase: Phase) {
        self.generation = self.generation.wrapping_add(1);
        self.phase = phase;
    }
}

/// The remaining time of a breaker that opened at `since`.
fn remaining(since: Tick, config: &BreakerConfig, now: Tick) -> Duration {
    config.recovery.saturating_sub(now.since(since))
}

/// Leases a probe, if fewer than the maximum are in flight.
fn lease_probe(
    leases: &mut Vec<Lease>,
    next_probe: &mut u64,
    config: &BreakerConfig,
    now: Tick,
) -> Result<u64, BreakerOpen> {
    let length = config.lease();
    leases.retain_mut(|lease| {
        lease.since = lease.since.min(now);
        now.since(lease.since) < length
    });
    if leases.len() >= config.max_probes() {
        let oldest = leases.iter().map(|lease| now.since(lease.since)).max();
        return Err(BreakerOpen {
            remaining: length.saturating_sub(oldest.unwrap_or_default()),
        });
    }
    let probe = *next_probe;
    *next_probe = next_probe.wrapping_add(1);
    leases.push(Lease { probe, since: now });
    Ok(probe)
}

#[cfg(test)]
mod tests;
