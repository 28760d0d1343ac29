//! How fast one sandbox may send, and which hosts it leaves alone for a while.
//!
//! Only hosts that some rule names have a bucket and a breaker of their own, and of those
//! only so many; everything else shares one. So a million invented names take no memory,
//! and are slowed down together.

use std::collections::HashMap;
use std::num::{NonZeroU32, NonZeroU64};
use std::sync::{Mutex, MutexGuard, PoisonError};

use config::Settings;
use policy::breaker::{Breaker, Open, Outcome, State, Ticket};
use policy::bucket::{Pass, Rate, TokenBucket, Wait};
use policy::clock::Tick;
use policy::host::Host;

use crate::request::is_internal;

/// Hosts with a bucket and a breaker of their own.
const MOST_HOSTS: usize = 1024;

/// All requests of a sandbox together: 20 000 a second, and twice that at once.
const TOTAL: Rate = Rate::every(
    NonZeroU64::new(50_000).unwrap(),
    NonZeroU32::new(40_000).unwrap(),
);

/// The buckets and breakers of one sandbox.
#[derive(Debug, Default)]
pub struct Upstreams(Mutex<Table>);

#[derive(Debug, Default)]
struct Table {
    total: TokenBucket,
    /// Of hosts that no rule names, and of those that found no place.
    others: Entry,
    /// Of the gate's own name, so that what an agent sends to unknown hosts does not keep it
    /// from its tools and mirrors.
    internal: Entry,
    hosts: HashMap<Host, Entry, foldhash::fast::RandomState>,
    numbers: u64,
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

/// One host's state, for the gauges.
#[derive(Clone, Debug, PartialEq)]
pub struct Reading {
    /// The host.
    pub host: Host,
    /// Tokens in its bucket.
    pub tokens: u32,
    /// Its breaker.
    pub state: State,
}

impl Upstreams {
    /// Takes a token for a request to `host`. Where limits are off, only the total counts.
    pub fn take(
        &self,
        settings: &Settings,
        host: &Host,
        now: Tick,
    ) -> Result<Pass, (Wait, &'static str)> {
        let mut table = self.table();
        let pass = table
            .total
            .take(&TOTAL, now)
            .map_err(|wait| (wait, "rate_limits:total"))?;
        match settings.rate_for(host) {
            Some(rate) => table
                .entry(settings, host, now)
                .bucket
                .take(&rate, now)
                .map_err(|wait| (wait, "rate_limits")),
            None => Ok(pass),
        }
    }

    /// Asks the breaker of `host`.
    pub fn admit(&self, settings: &Settings, host: &Host, now: Tick) -> Result<Ticket, Open> {
        let config = settings.breaker_for(host);
        self.table()
            .entry(settings, host, now)
            .breaker
            .admit(&config, now)
    }

    /// Gives a ticket back. True where this opened the breaker.
    pub fn settle(
        &self,
        settings: &Settings,
        host: &Host,
        ticket: Ticket,
        outcome: Outcome,
        now: Tick,
    ) -> bool {
        let config = settings.breaker_for(host);
        let mut table = self.table();
        let entry = table.entry(settings, host, now);
        let before = entry.breaker.state();
        entry.breaker.settle(&config, ticket, outcome, now);
        before != State::Open && entry.breaker.state() == State::Open
    }

    /// The state of every host that has one.
    pub fn readings(&self, settings: &Settings, now: Tick) -> Vec<Reading> {
        let table = self.table();
        let read = |(host, entry): (&Host, &Entry)| Reading {
            host: host.clone(),
            tokens: settings
                .rate_for(host)
                .map_or(u32::MAX, |rate| entry.bucket.tokens(&rate, now)),
            state: entry.breaker.state_at(&settings.breaker_for(host), now),
        };
        table.hosts.iter().map(read).collect()
    }

    fn table(&self) -> MutexGuard<'_, Table> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Table {
    fn entry(&mut self, settings: &Settings, host: &Host, now: Tick) -> &mut Entry {
        let known = self.hosts.contains_key(host);
        if !known {
            if is_internal(host) {
                return &mut self.internal;
            }
            if settings.allowlist().lookup(host).is_none() {
                return &mut self.others;
            }
            if self.hosts.len() >= MOST_HOSTS {
                self.forget_idle(settings, now);
            }
            if self.hosts.len() >= MOST_HOSTS {
                return &mut self.others;
            }
            self.numbers += 1;
        }
        let number = self.numbers;
        self.hosts.entry(host.clone()).or_insert_with(|| Entry {
            bucket: TokenBucket::new(),
            breaker: Breaker::new(number),
        })
    }

    /// Forgets what a new entry would be the same as.
    fn forget_idle(&mut self, settings: &Settings, now: Tick) {
        self.hosts.retain(|host, entry| {
            let full = settings
                .rate_for(host)
                .is_none_or(|rate| entry.bucket.is_full(&rate, now));
            !(full && entry.breaker.is_idle())
        });
    }
}
