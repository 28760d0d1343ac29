//! Synthetic addresses: each stands for a name, and connections to it end at the gate.
//!
//! 198.18.0.0/15 and 2001:2::/48 are reserved for benchmarks (RFC 2544, RFC 5180): no host on the
//! internet uses them, and the dialer refuses them.

use std::collections::HashMap;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use policy::host::HostName;

use super::lru_map::LruMap;

/// The first address of each synthetic range, as a number.
const FIRST_V4: u32 = Ipv4Addr::new(198, 18, 0, 0).to_bits();
const FIRST_V6: u128 = Ipv6Addr::new(0x2001, 2, 0, 0, 0, 0, 0, 0).to_bits();

/// The index of the gate's own addresses.
const GATE_INDEX: u32 = 1;

/// Indexes that are assigned to names: all but the first (a network address), the gate's, and the
/// last (which looks like a broadcast address).
const FIRST_INDEX: u32 = 2;
const LAST_INDEX: u32 = (1 << 17) - 2;

/// An index into both address ranges: a name has the same index in each.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct AddressIndex(u32);

impl AddressIndex {
    /// The index of the gate itself.
    pub(super) const GATE: AddressIndex = AddressIndex(GATE_INDEX);

    /// The IPv4 address with this index.
    pub(super) fn v4(self) -> Ipv4Addr {
        Ipv4Addr::from_bits(FIRST_V4 + self.0)
    }

    /// The IPv6 address with this index.
    pub(super) fn v6(self) -> Ipv6Addr {
        Ipv6Addr::from_bits(FIRST_V6 + u128::from(self.0))
    }

    /// The index of an address; `None` outside of the synthetic ranges.
    pub(super) fn from_ip(ip: IpAddr) -> Option<Self> {
        let offset = match ip.to_canonical() {
            IpAddr::V4(ip) => ip.to_bits().checked_sub(FIRST_V4)?,
            IpAddr::V6(ip) => u32::try_from(ip.to_bits().checked_sub(FIRST_V6)?).ok()?,
        };
        (offset <= LAST_INDEX).then_some(Self(offset))
    }
}

/// The synthetic addresses of one sandbox.
///
/// A name keeps its index while it is in use. When there are too many names, the least recently
/// used one is evicted. Its index is reused only after all others, so that a program that still
/// holds the address does not reach another name.
#[derive(Debug)]
pub(super) struct SyntheticAddresses {
    indexes: LruMap<HostName, AddressIndex>,
    names: HashMap<AddressIndex, HostName>,
    next: u32,
}

impl SyntheticAddresses {
    /// Creates a table of at most `max_names` names.
    pub(super) fn new(max_names: usize) -> Self {
        // At most half of the indexes are in use, so that the search for a free index is short.
        let max_names =
            max_names.min(usize::try_from((LAST_INDEX - FIRST_INDEX) / 2).unwrap_or(usize::MAX));
        Self {
            indexes: LruMap::new(max_names),
            names: HashMap::new(),
            next: FIRST_INDEX,
        }
    }

    /// Returns the index of `name`, and assigns one if the name is new.
    pub(super) fn assign(&mut self, name: &HostName) -> AddressIndex {
        if let Some(index) = self.indexes.get(name) {
            return *index;
        }
        while self.names.contains_key(&AddressIndex(self.next)) {
            self.advance();
        }
        let index = AddressIndex(self.next);
        self.advance();
        if let Some((_, evicted)) = self.indexes.insert(name.clone(), index) {
            self.names.remove(&evicted);
        }
        self.names.insert(index, name.clone());
        index
    }

    /// Returns the name of an index, and marks the name as used.
    pub(super) fn name(&mut self, index: AddressIndex) -> Option<HostName> {
        let name = self.names.get(&index)?;
        self.indexes.get(name);
        Some(name.clone())
    }

    fn advance(&mut self) {
        self.next = if self.next >= LAST_INDEX {
            FIRST_INDEX
        } else {
            self.next + 1
        };
    }
}

#[cfg(test)]
mod tests {
    use policy::host::{AddressClass, Host, classify};

    use super::*;

    fn name(text: &str) -> HostName {
        Host::parse(text).unwrap().as_name().unwrap().clone()
    }

    #[test]
    fn name_and_address_map_to_each_other() {
        let mut addresses = SyntheticAddresses::new(100);
        let a = addresses.assign(&name("a.test"));
        let b = addresses.assign(&name("b.test"));
        assert_ne!(a, b);
        assert_eq!(addresses.assign(&name("a.test")), a);
        for ip in [IpAddr::from(b.v4()), b.v6().into()] {
            assert_eq!(AddressIndex::from_ip(ip), Some(b));
            assert_eq!(classify(ip), AddressClass::Benchmark);
        }
        assert_eq!(addresses.name(b), Some(name("b.test")));
        assert_eq!(addresses.name(AddressIndex::GATE), None);
    }

    #[test]
    fn many_names_stay_bounded_and_old_indexes_are_reused_last() {
        let mut addresses = SyntheticAddresses::new(3);
        let first = addresses.assign(&name("first.test"));
        let mut last = first;
        for n in 0..50_000 {
            last = addresses.assign(&name(&format!("n{n}.test")));
            assert_ne!(last, first, "after {n} names");
            assert!(addresses.names.len() <= 3);
        }
        assert_eq!(addresses.name(first), None);
        assert_eq!(addresses.name(last), Some(name("n49999.test")));
    }

    #[test]
    fn indexes_wrap_around_within_their_range() {
        let mut addresses = SyntheticAddresses::new(2);
        addresses.next = LAST_INDEX;
        let last = addresses.assign(&name("a.test"));
        assert_eq!(last.v4(), Ipv4Addr::new(198, 19, 255, 254));
        assert_eq!(addresses.assign(&name("b.test")), AddressIndex(FIRST_INDEX));
        for foreign in ["198.17.255.255", "198.20.0.0", "2001:2:1::", "2001:3::1"] {
            assert_eq!(
                AddressIndex::from_ip(foreign.parse().unwrap()),
                None,
                "{foreign}"
            );
        }
    }

    #[test]
    fn name_in_use_is_not_evicted() {
        let mut addresses = SyntheticAddresses::new(2);
        let kept = addresses.assign(&name("kept.test"));
        for n in 0..100 {
            addresses.assign(&name(&format!("n{n}.test")));
            assert_eq!(addresses.name(kept), Some(name("kept.test")));
        }
    }
}
