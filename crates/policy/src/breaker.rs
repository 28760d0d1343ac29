//! A circuit breaker: leaves an upstream alone that keeps failing.
//!
//! ```text
//!                failure_threshold failures in a row
//!        ┌──────────┐ ─────────────────────────────────▶ ┌──────────┐
//!   ───▶ │  closed  │                                    │   open   │ refuses all
//!        └──────────┘                                    └──────────┘
//!             ▲                                            │      ▲
//!             │ success_threshold        recovery has passed,     │ one failure
//!             │ successes                  somebody asks   │      │
//!             │                                            ▼      │
//!             │                                      ┌─────────────┐
//!             └───────────────────────────────────── │  half-open  │ admits `probes`
//!                                                    └─────────────┘ at a time
//! ```
//!
//! Every arrow starts a new generation. A ticket carries the generation it was drawn in,
//! and an outcome from an earlier one changes nothing: a request that was slow to fail
//! says nothing about the upstream of now.
//!
//! Only failures **in a row** count. A breaker that never forgets (as in the seed) opens in
//! the end on any host with one error in a thousand.
//!
//! Only the upstream's own answers count. What we refused, or the client left, is
//! [`Outcome::Abandoned`]; a breaker that counts its own refusals never closes again.

use std::time::Duration;

use crate::clock::{Tick, round_up_to_seconds};

/// When a breaker opens and closes. A number of zero counts as one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BreakerConfig {
    /// Failures in a row that open it.
    pub failure_threshold: u32,
    /// How long it stays open, and how long a probe may take before its place is given to
    /// another (then at least a second).
    pub recovery: Duration,
    /// Successes that close it again.
    pub success_threshold: u32,
    /// Requests that may be under way while it is half-open.
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
    fn lease(&self) -> Duration {
        self.recovery.max(Duration::from_secs(1))
    }

    fn max_probes(&self) -> usize {
        usize::try_from(self.probes).unwrap_or(usize::MAX).max(1)
    }
}

/// Permission to try, to be given back with the [`Outcome`]. Only [`Breaker::admit`] makes
/// one. One that gets lost frees its place when its lease ends, and one that is given to
/// another breaker changes nothing there.
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

/// How a request ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The upstream answered, with a status below 500.
    Success,
    /// The upstream could not be reached, was too slow, or answered 500 or above.
    Failure,
    /// Nothing was learnt about the upstream: the client went away, or we refused later.
    Abandoned,
}

/// The breaker is open.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Open {
    /// Time until it is worth asking again.
    pub remaining: Duration,
}

impl Open {
    /// The same in whole seconds, for `Retry-After`.
    pub const fn seconds(self) -> u64 {
        round_up_to_seconds(self.remaining)
    }
}

/// A state without its circumstances, for the gauge.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum State {
    /// Requests pass.
    Closed,
    /// Requests are refused.
    Open,
    /// A few requests pass, to see.
    HalfOpen,
}

impl State {
    /// The state in a word.
    pub const fn as_str(self) -> &'static str {
        match self {
            State::Closed => "closed",
            State::Open => "open",
            State::HalfOpen => "half-open",
        }
    }
}

/// One breaker, for one sandbox and one upstream. It starts closed.
///
/// The configuration is passed in, so that a reload reaches every breaker at once. A clone
/// is the same breaker, and takes the same tickets.
#[derive(Clone, Debug)]
pub struct Breaker {
    /// Tells its tickets from those of others.
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

/// A probe that is under way.
#[derive(Clone, Copy, Debug)]
struct Lease {
    probe: u64,
    since: Tick,
}

impl Breaker {
    /// A closed breaker. Whoever keeps several gives each a number of its own.
    pub fn new(id: u64) -> Self {
        Self {
            id,
            generation: 0,
            phase: Phase::default(),
        }
    }

    /// The phase as of the last call of [`Breaker::admit`] or [`Breaker::settle`]. Reports
    /// use [`Breaker::state_at`], because time passes without either.
    pub fn state(&self) -> State {
        match self.phase {
            Phase::Closed { .. } => State::Closed,
            Phase::Open { .. } => State::Open,
            Phase::HalfOpen { .. } => State::HalfOpen,
        }
    }

    /// The state that a request meets at `now`: an open breaker whose recovery time has
    /// passed admits a probe, so the breaker is half-open.
    pub fn state_at(&self, config: &BreakerConfig, now: Tick) -> State {
        match self.phase {
            Phase::Open { since } if remaining(since, config, now).is_zero() => State::HalfOpen,
            _ => self.state(),
        }
    }

    /// Whether it is as good as new, so that it can be forgotten.
    pub fn is_idle(&self) -> bool {
        matches!(self.phase, Phase::Closed { failures: 0 })
    }

    /// Asks to try the upstream.
    #[inline]
    pub fn admit(&mut self, config: &BreakerConfig, now: Tick) -> Result<Ticket, Open> {
        if let Phase::Open { since } = &mut self.phase {
            // A clock that went back must not keep it open for longer than `recovery`.
            *since = (*since).min(now);
            let remaining = remaining(*since, config, now);
            if !remaining.is_zero() {
                return Err(Open { remaining });
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
            } => Some(grant(leases, next_probe, config, now)?),
            Phase::Closed { .. } | Phase::Open { .. } => None,
        };
        Ok(Ticket {
            breaker: self.id,
            generation: self.generation,
            probe,
        })
    }

    /// Takes a ticket back and learns from how the request ended.
    #[inline]
    pub fn settle(&mut self, config: &BreakerConfig, ticket: Ticket, outcome: Outcome, now: Tick) {
        if (ticket.breaker, ticket.generation) != (self.id, self.generation) {
            return;
        }
        match &mut self.phase {
            Phase::Closed { failures } => match outcome {
                Outcome::Success => *failures = 0,
                Outcome::Failure => {
                    *failures = failures.saturating_add(1);
                    if *failures >= config.failure_threshold.max(1) {
                        self.enter(Phase::Open { since: now });
                    }
                }
                Outcome::Abandoned => {}
            },
            Phase::Open { .. } => {}
            Phase::HalfOpen {
                successes, leases, ..
            } => {
                // The lease may have ended, and its place be another's. The answer counts
                // all the same: an upstream that takes longer than a lease would otherwise
                // never be believed.
                leases.retain(|lease| Some(lease.probe) != ticket.probe);
                match outcome {
                    Outcome::Success => {
                        *successes = successes.saturating_add(1);
                        if *successes >= config.success_threshold.max(1) {
                            self.enter(Phase::Closed { failures: 0 });
                        }
                    }
                    Outcome::Failure => self.enter(Phase::Open { since: now }),
                    Outcome::Abandoned => {}
                }
            }
        }
    }

    fn enter(&mut self, phase: Phase) {
        self.generation = self.generation.wrapping_add(1);
        self.phase = phase;
    }
}

/// How long a breaker that opened at `since` stays open.
fn remaining(since: Tick, config: &BreakerConfig, now: Tick) -> Duration {
    config.recovery.saturating_sub(now.since(since))
}

/// Gives out a place for a probe, if one is free.
fn grant(
    leases: &mut Vec<Lease>,
    next_probe: &mut u64,
    config: &BreakerConfig,
    now: Tick,
) -> Result<u64, Open> {
    let length = config.lease();
    leases.retain_mut(|lease| {
        lease.since = lease.since.min(now);
        now.since(lease.since) < length
    });
    if leases.len() >= config.max_probes() {
        let oldest = leases.iter().map(|lease| now.since(lease.since)).max();
        return Err(Open {
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
