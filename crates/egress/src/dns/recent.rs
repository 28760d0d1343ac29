//! A map that holds so much and no more: what was not used for longest makes room.

use std::borrow::Borrow;
use std::collections::{BTreeMap, HashMap};
use std::hash::Hash;

/// A bounded map. The hash has a secret: its keys come from agents.
#[derive(Debug)]
pub(super) struct Recent<K, V> {
    most: usize,
    /// Counts uses; each entry remembers its last.
    uses: u64,
    entries: HashMap<K, (u64, V)>,
    order: BTreeMap<u64, K>,
}

impl<K: Clone + Eq + Hash, V> Recent<K, V> {
    /// A map of at most `most` entries; at least one.
    pub(super) fn new(most: usize) -> Self {
        Self {
            most: most.max(1),
            uses: 0,
            entries: HashMap::new(),
            order: BTreeMap::new(),
        }
    }

    /// The value, which counts as a use.
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

    /// Puts a value in, and returns the entry that made room for it.
    pub(super) fn insert(&mut self, key: K, value: V) -> Option<(K, V)> {
        self.remove(&key);
        let oldest = (self.entries.len() >= self.most)
            .then(|| self.order.first_key_value())
            .flatten()
            .map(|(_, oldest)| oldest.clone());
        let made_room = oldest.and_then(|oldest| Some((oldest.clone(), self.remove(&oldest)?)));
        self.uses += 1;
        self.order.insert(self.uses, key.clone());
        self.entries.insert(key, (self.uses, value));
        made_room
    }

    /// Takes an entry out.
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
    fn what_was_not_used_for_longest_makes_room() {
        let mut recent = Recent::new(2);
        assert_eq!(recent.insert("a", 1), None);
        assert_eq!(recent.insert("b", 2), None);
        assert_eq!(recent.get("a"), Some(&1));
        assert_eq!(recent.insert("c", 3), Some(("b", 2)));
        assert_eq!(recent.insert("a", 4), None, "it replaces itself");
        assert_eq!(recent.insert("d", 5), Some(("c", 3)));
        assert_eq!(recent.get("b"), None);
        assert_eq!(recent.len(), 2);
        assert_eq!(recent.remove("a"), Some(4));
        assert_eq!(recent.len(), 1);
    }
}
