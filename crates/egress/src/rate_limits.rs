//! Rate limits and circuit breakers of one sandbox.
//!
//! Only hosts that are in a rule have their own bucket and breaker, up to a limit. All other hosts
//! share a bucket and a breaker, so that a million invented names take no memory and share one
//! rate.

use std::collections::{BTreeMap, HashMap};
use std::num::{NonZeroU32, NonZeroU64};
use std::sync::{Mutex, MutexGuard, PoisonError};

use config::Settings;
use policy::breaker::{Breaker, BreakerOpen, BreakerState, Ticket, UpstreamOutcome};
use policy::bucket::{Rate, RateLimitPass, RateLimitWait, TokenBucket};
use policy::clock::Tick;
use policy::host::{GATE_HOST, Host, HostPattern};

/// The label of hosts that are in no rule.
pub const OTHER: &str = "other";

/// Maximum number of hosts with their own bucket and breaker.
const MAX_HOSTS: usize = 1024;

/// Rate of all requests of a sandbox together: 20 000 per second, with a burst of 40 000.
const TOTAL_RATE: Rate = Rate::every(
    NonZeroU64::new(50_000).unwrap(),
    NonZeroU32::new(40_000).unwrap(),
);

/// The buckets and breakers of one sandbox.
#[derive(Debug, Default)]
pub struct UpstreamLimits(Mutex<Table>);

#[derive(Debug, Default)]
struct Table {
    total: TokenBucket,
    /// For hosts that are in no rule, and hosts beyond [`MAX_HOSTS`].
    unnamed_hosts: Entry,
    /// For the gate's own name, so that requests to unknown hosts do not use up the rate of tools
    /// and mirrors.
    internal: Entry,
    hosts: HashMap<Host, Entry, foldhash::fast::RandomState>,
    last_breaker_number: u64,
    /// Refused requests by label. They outlive the buckets: a counter never decreases.
    rejected: BTreeMap<String, u64>,
}

#[derive(Debug)]
struct Entry {
    bucket: TokenBucket,
    breaker: Breaker,
}

impl Default for Entry {
    fn default() -> Self {
        Self {
            bucket: TokenBucket::new(),
            breaker: Breaker::new(0),
        }
    }
}

/// Metric values of one label.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Reading {
    /// The hosts with a bucket and a breaker of their own; `None` if there are none.
    pub hosts: Option<HostReading>,
    /// Requests that were refused for their rate.
    pub rejected: u64,
}

/// The state of the hosts that share a label.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HostReading {
    /// The fewest tokens in a bucket.
    pub tokens: u32,
    /// The worst state of a breaker.
    pub state: BreakerState,
}

impl HostReading {
    /// The worse value of each field.
    fn worst(self, other: Self) -> Self {
        let severity = |state: BreakerState| match state {
            BreakerState::Closed => 0,
            BreakerState::HalfOpen => 1,
            BreakerState::Open => 2,
        };
        let state = if severity(other.state) > severity(self.state) {
            other.state
        } else {
            self.state
        };
        Self {
            tokens: self.tokens.min(other.tokens),
            state,
        }
    }
}

/// The value of the metric label `upstream` for `host`. Agents choose hosts, so every value
/// comes from the configuration: a host that a rule, a rate limit or a circuit breaker names is
/// itself, any other host below a wildcard is the wildcard, and the rest is [`OTHER`].
pub fn label(settings: &Settings, host: &Host) -> String {
    if host.is_gate() {
        return GATE_HOST.to_owned();
    }
    let rules = settings.allowlist().lookup(host);
    match rules.and_then(|rules| rules.first()) {
        None => OTHER.to_owned(),
        Some(rule) => match &rule.pattern {
            HostPattern::Wildcard(_) | HostPattern::Any if !settings.has_upstream_entry(host) => {
                rule.pattern.to_string()
            }
            HostPattern::Wildcard(_)
            | HostPattern::Any
            | HostPattern::Exact(_)
            | HostPattern::Ip(_) => host.to_string(),
        },
    }
}

impl UpstreamLimits {
    /// Takes a token for a request to `host`. Without a limit for the host, only the total rate
    /// applies.
    pub fn take(
        &self,
        settings: &Settings,
        host: &Host,
        now: Tick,
    ) -> Result<RateLimitPass, (RateLimitWait, &'static str)> {
        let mut table = self.table();
        let taken = table.take(settings, host, now);
        if taken.is_err() {
            table.count_rejection(label(settings, host));
        }
        taken
    }

    /// Takes a ticket of the circuit breaker of `host`.
    pub fn admit(
        &self,
        settings: &Settings,
        host: &Host,
        now: Tick,
    ) -> Result<Ticket, BreakerOpen> {
        let config = settings.breaker_for(host);
        self.table()
            .entry(settings, host, now)
            .breaker
            .admit(&config, now)
    }

    /// Settles a ticket. Returns whether this opened the breaker.
    pub fn settle(
        &self,
        settings: &Settings,
        host: &Host,
        ticket: Ticket,
        outcome: UpstreamOutcome,
        now: Tick,
    ) -> bool {
        let config = settings.breaker_for(host);
        let mut table = self.table();
        let entry = table.entry(settings, host, now);
        let before = entry.breaker.state();
        entry.breaker.settle(&config, ticket, outcome, now);
        before != BreakerState::Open && entry.breaker.state() == BreakerState::Open
    }

    /// Metric values by label, always including [`OTHER`]: monitoring misses the first increase of
    /// a counter that was not exported before.
    pub fn readings(&self, settings: &Settings, now: Tick) -> BTreeMap<String, Reading> {
        let table = self.table();
        let mut readings = BTreeMap::from([(OTHER.to_owned(), Reading::default())]);
        for (host, entry) in &table.hosts {
            let read = HostReading {
                tokens: settings
                    .rate_for(host)
                    .map_or(u32::MAX, |rate| entry.bucket.tokens(&rate, now)),
                state: entry.breaker.state_at(&settings.breaker_for(host), now),
            };
            let reading = readings.entry(label(settings, host)).or_default();
            reading.hosts = Some(reading.hosts.map_or(read, |known| known.worst(read)));
        }
        for (label, rejected) in &table.rejected {
            readings.entry(label.clone()).or_default().rejected = *rejected;
        }
        readings
    }

    fn table(&self) -> MutexGuard<'_, Table> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Table {
    fn take(
        &mut self,
        settings: &Settings,
        host: &Host,
        now: Tick,
    ) -> Result<RateLimitPass, (RateLimitWait, &'static str)> {
        let total = self.total.take(&TOTAL_RATE, now);
        let pass = total.map_err(|wait| (wait, "rate_limits:total"))?;
        let Some(rate) = settings.rate_for(host) else {
            return Ok(pass);
        };
        let taken = self.entry(settings, host, now).bucket.take(&rate, now);
        taken.map_err(|wait| (wait, "rate_limits"))
    }

    fn count_rejection(&mut self, label: String) {
        let has_room = self.rejected.len() < MAX_HOSTS || self.rejected.contains_key(&label);
        let label = if has_room { label } else { OTHER.to_owned() };
        *self.rejected.entry(label).or_default() += 1;
    }

    fn entry(&mut self, settings: &Settings, host: &Host, now: Tick) -> &mut Entry {
        let known = self.hosts.contains_key(host);
        if !known {
            if host.is_gate() {
                return &mut self.internal;
            }
            if settings.allowlist().lookup(host).is_none() {
                return &mut self.unnamed_hosts;
            }
            if self.hosts.len() >= MAX_HOSTS {
                self.forget_idle(settings, now);
            }
            if self.hosts.len() >= MAX_HOSTS {
                return &mut self.unnamed_hosts;
            }
            self.last_breaker_number += 1;
        }
        let number = self.last_breaker_number;
        self.hosts.entry(host.clone()).or_insert_with(|| Entry {
            bucket: TokenBucket::new(),
            breaker: Breaker::new(number),
        })
    }

    /// Removes idle entries, which equal new ones.
    fn forget_idle(&mut self, settings: &Settings, now: Tick) {
        self.hosts.retain(|host, entry| {
            let full = settings
                .rate_for(host)
                .is_none_or(|rate| entry.bucket.is_full(&rate, now));
            !(full && entry.breaker.is_idle())
        });
    }
}

#[cfg(test)]
mod tests;
