//! Read path of the registry: an in-memory snapshot of the registrations.
//!
//! Every request needs a lookup first, so a lookup takes no lock and no SQL: readers load an
//! immutable snapshot and the writer replaces it as a whole, after its commit. A reader therefore
//! only sees rows that are on disk.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::Arc;

use arc_swap::ArcSwap;
use policy::clock::UnixMillis;
use policy::id::SandboxId;
use policy::registration::{Registration, canonical_ip};

use crate::error::StoreError;

type Map<K> = HashMap<K, Arc<Registration>, foldhash::fast::RandomState>;

/// The result of a lookup.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RegistryLookup {
    /// The registry cannot be read, so every request is refused.
    Unavailable,
    /// No sandbox is registered under the key.
    Unknown,
    /// The row, which may have expired: the caller has the clock and checks (`identity_expired` is
    /// a different refusal from `identity_unknown`).
    Found(Arc<Registration>),
}

/// The result of a registration.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RegistrationOutcome {
    /// The number of the audit record of the registration.
    pub seq: u64,
    /// The previous row of the same id.
    pub replaced: Option<Arc<Registration>>,
    /// The previous holder of the address, which was removed: it had expired, or was replaced.
    pub removed_holder: Option<SandboxId>,
}

/// Read access to the registry. Cloning is cheap.
#[derive(Clone, Debug)]
pub struct RegistryReader {
    snapshot: Arc<ArcSwap<RegistrySnapshot>>,
}

impl RegistryReader {
    pub(crate) fn new(snapshot: Arc<ArcSwap<RegistrySnapshot>>) -> Self {
        Self { snapshot }
    }

    /// The registration with this source address, in either form of an IPv4 address.
    #[inline]
    pub fn by_ip(&self, ip: IpAddr) -> RegistryLookup {
        let snapshot = self.snapshot.load();
        snapshot.lookup(snapshot.by_ip.get(&canonical_ip(ip)))
    }

    /// The registration with this id.
    #[inline]
    pub fn by_id(&self, id: &SandboxId) -> RegistryLookup {
        let snapshot = self.snapshot.load();
        snapshot.lookup(snapshot.by_id.get(id))
    }

    /// Every row, sorted by id.
    pub fn list(&self) -> Result<Vec<Arc<Registration>>, StoreError> {
        let snapshot = self.snapshot.load();
        snapshot.check_available()?;
        let mut rows: Vec<_> = snapshot.by_id.values().cloned().collect();
        rows.sort_by(|a, b| a.id.cmp(&b.id));
        Ok(rows)
    }

    /// The number of rows; 0 if the registry is unavailable.
    pub fn len(&self) -> usize {
        self.snapshot.load().by_id.len()
    }

    /// Whether there are no rows.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// The data for lookups, immutable once published.
#[derive(Clone, Debug, Default)]
pub(crate) struct RegistrySnapshot {
    /// Why no sandbox can be looked up, if the registry is unavailable.
    pub(crate) unavailable: Option<Arc<str>>,
    by_ip: Map<IpAddr>,
    by_id: Map<SandboxId>,
}

impl RegistrySnapshot {
    /// A registry that refuses every lookup.
    pub(crate) fn unavailable(reason: &str) -> Self {
        Self {
            unavailable: Some(reason.into()),
            ..Self::default()
        }
    }

    /// Returns the reason as an error if the registry is unavailable.
    pub(crate) fn check_available(&self) -> Result<(), StoreError> {
        match &self.unavailable {
            None => Ok(()),
            Some(reason) => Err(StoreError::Unavailable {
                reason: reason.to_string(),
            }),
        }
    }

    #[inline]
    fn lookup(&self, row: Option<&Arc<Registration>>) -> RegistryLookup {
        match row {
            Some(row) => RegistryLookup::Found(Arc::clone(row)),
            None if self.unavailable.is_some() => RegistryLookup::Unavailable,
            None => RegistryLookup::Unknown,
        }
    }

    /// Inserts a row whose address is already canonical, and replaces the row of the same id.
    pub(crate) fn insert(&mut self, row: Arc<Registration>) -> Option<Arc<Registration>> {
        let old = self.remove(&row.id);
        if let Some(ip) = row.ip {
            self.by_ip.insert(ip, Arc::clone(&row));
        }
        self.by_id.insert(row.id.clone(), row);
        old
    }

    /// Removes a row and its address.
    pub(crate) fn remove(&mut self, id: &SandboxId) -> Option<Arc<Registration>> {
        let old = self.by_id.remove(id)?;
        if let Some(ip) = old.ip {
            self.by_ip.remove(&ip);
        }
        Some(old)
    }

    /// The registration that holds `ip` under another id than `id`.
    pub(crate) fn other_holder(&self, ip: IpAddr, id: &SandboxId) -> Option<&Arc<Registration>> {
        self.by_ip.get(&ip).filter(|row| row.id != *id)
    }

    /// The ids that have expired at `now`, sorted so that their records are too.
    pub(crate) fn expired(&self, now: UnixMillis) -> Vec<SandboxId> {
        let mut ids: Vec<_> = self
            .by_id
            .values()
            .filter(|row| !row.is_live(now))
            .map(|row| row.id.clone())
            .collect();
        ids.sort();
        ids
    }

    pub(crate) fn contains(&self, id: &SandboxId) -> bool {
        self.by_id.contains_key(id)
    }

    pub(crate) fn len(&self) -> usize {
        self.by_id.len()
    }
}
