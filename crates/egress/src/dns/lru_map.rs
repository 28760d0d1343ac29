//! A bounded map that evicts the least recently used entry.

use std::borrow::Borrow;
use std::collections::{BTreeMap, HashMap};
use std::hash::Hash;

/// A map with least-recently-used eviction. The hash is keyed, because agents choose the keys.
#[derive(Debug)]
pub(super) struct LruMap<K, V> {
    capacity: usize,
    /// Counts uses; each entry stores the number of its last use.
    uses: u64,
    entries: HashMap<K, (u64, V)>,
    order: BTreeMap<u64, K>,
}

impl<K: Clone + Eq + Hash, V> LruMap<K, V> {
    /// Creates a map of at most `capacity` entries, and at least one.
    pub(super) fn new(capacity: usize) -> Self {
        Self {
            capacity: capacity.max(1),
            uses: 0,
            entries: HashMap::new(),
            order: BTreeMap::new(),
        }
    }

    /// Returns the value and marks the entry as used.
    pub(super) fn get<Q: Eq + Hash + ?Sized>(&mut self, key: &Q) -> Option<&V>
    where
        K: Borrow<Q>,
    {
        let (used, value) = self.entries.get_mut(key)?;
        if let Some(key) = self.order.remove(used) {
            self.uses += 1;
            *used = self.uses;
            self.order.insert(self.uses, key);
        }
        Some(value)
    }

    /// Inserts a value, and returns the entry that was evicted for it.
    pub(super) fn insert(&mut self, key: K, value: V) -> Option<(K, V)> {
        self.remove(&key);
        let oldest = (self.entries.len() >= self.capacity)
            .then(|| self.order.first_key_value())
            .flatten()
            .map(|(_, oldest)| oldest.clone());
        let evicted = oldest.and_then(|oldest| Some((oldest.clone(), self.remove(&oldest)?)));
        self.uses += 1;
        self.order.insert(self.uses, key.clone());
        self.entries.insert(key, (self.uses, value));
        evicted
    }

    /// Removes an entry.
    pub(super) fn remove<Q: Eq + Hash + ?Sized>(&mut self, key: &Q) -> Option<V>
    where
        K: Borrow<Q>,
    {
        let (used, value) = self.entries.remove(key)?;
        self.order.remove(&used);
        Some(value)
    }

    #[cfg(test)]
    fn len(&self) -> usize {
        assert_eq!(self.entries.len(), self.order.len());
        self.entries.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn full_map_evicts_least_recently_used_entry() {
        let mut map = LruMap::new(2);
        assert_eq!(map.insert("a", 1), None);
        assert_eq!(map.insert("b", 2), None);
        assert_eq!(map.get("a"), Some(&1));
        assert_eq!(map.insert("c", 3), Some(("b", 2)));
        assert_eq!(map.insert("a", 4), None, "the same key is replaced");
        assert_eq!(map.insert("d", 5), Some(("c", 3)));
        assert_eq!(map.get("b"), None);
        assert_eq!(map.len(), 2);
        assert_eq!(map.remove("a"), Some(4));
        assert_eq!(map.len(), 1);
    }
}
