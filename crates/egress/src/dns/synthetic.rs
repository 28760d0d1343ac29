//! Addresses that mean a name, and lead nowhere but to the gate.
//!
//! 198.18.0.0/15 and 2001:2::/48 are set aside for benchmarks (RFC 2544, RFC 5180): no host
//! on the internet has one, and the dialer refuses them.

use std::collections::HashMap;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use policy::host::HostName;

use super::recent::Recent;

const FIRST_V4: u32 = Ipv4Addr::new(198, 18, 0, 0).to_bits();
const FIRST_V6: u128 = Ipv6Addr::new(0x2001, 2, 0, 0, 0, 0, 0, 0).to_bits();

/// The gate itself.
const GATE: u32 = 1;

/// Places that are given to names: all but the first (a network), the gate's, and the last
/// (which looks like a broadcast).
const FIRST: u32 = 2;
const LAST: u32 = (1 << 17) - 2;

/// A place in both ranges: one name has the same place in each.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Place(u32);

impl Place {
    /// Where the gate itself is.
    pub(super) const GATE: Place = Place(GATE);

    /// Its IPv4 address.
    pub(super) fn v4(self) -> Ipv4Addr {
        Ipv4Addr::from_bits(FIRST_V4 + self.0)
    }

    /// Its IPv6 address.
    pub(super) fn v6(self) -> Ipv6Addr {
        Ipv6Addr::from_bits(FIRST_V6 + u128::from(self.0))
    }

    /// The place of an address; none where it is not one of ours.
    pub(super) fn of(ip: IpAddr) -> Option<Self> {
        let at = match ip.to_canonical() {
            IpAddr::V4(ip) => ip.to_bits().checked_sub(FIRST_V4)?,
            IpAddr::V6(ip) => u32::try_from(ip.to_bits().checked_sub(FIRST_V6)?).ok()?,
        };
        (at <= LAST).then_some(Self(at))
    }
}

/// The names of one sandbox and their places.
///
/// A name keeps its place while it is in use. When there are too many names the one that
/// was not used for longest goes; its place is given away only after all others, so that a
/// program that still holds the address does not meet a stranger there.
#[derive(Debug)]
pub(super) struct Addresses {
    places: Recent<HostName, Place>,
    names: HashMap<Place, HostName>,
    next: u32,
}

impl Addresses {
    /// Room for `most` names.
    pub(super) fn new(most: usize) -> Self {
        // Half the range, so that a free place is always near.
        let most = most.min(usize::try_from((LAST - FIRST) / 2).unwrap_or(usize::MAX));
        Self {
            places: Recent::new(most),
            names: HashMap::new(),
            next: FIRST,
        }
    }

    /// The place of `name`, which may be a new one.
    pub(super) fn place(&mut self, name: &HostName) -> Place {
        if let Some(place) = self.places.get(name) {
            return *place;
        }
        while self.names.contains_key(&Place(self.next)) {
            self.advance();
        }
        let place = Place(self.next);
        self.advance();
        if let Some((_, gone)) = self.places.insert(name.clone(), place) {
            self.names.remove(&gone);
        }
        self.names.insert(place, name.clone());
        place
    }

    /// The name that a place was given to. Asking counts as using it.
    pub(super) fn name(&mut self, place: Place) -> Option<HostName> {
        let name = self.names.get(&place)?;
        self.places.get(name);
        Some(name.clone())
    }

    fn advance(&mut self) {
        self.next = if self.next >= LAST {
            FIRST
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
    fn a_name_keeps_its_address_and_an_address_tells_its_name() {
        let mut addresses = Addresses::new(100);
        let a = addresses.place(&name("a.test"));
        let b = addresses.place(&name("b.test"));
        assert_ne!(a, b);
        assert_eq!(addresses.place(&name("a.test")), a);
        for ip in [IpAddr::from(b.v4()), b.v6().into()] {
            assert_eq!(Place::of(ip), Some(b));
            assert_eq!(classify(ip), AddressClass::Benchmark);
        }
        assert_eq!(addresses.name(b), Some(name("b.test")));
        assert_eq!(addresses.name(Place::GATE), None);
    }

    #[test]
    fn names_without_end_take_bounded_room_and_old_addresses_rest() {
        let mut addresses = Addresses::new(3);
        let first = addresses.place(&name("first.test"));
        let mut last = first;
        for n in 0..50_000 {
            last = addresses.place(&name(&format!("n{n}.test")));
            assert_ne!(last, first, "after {n} names");
            assert!(addresses.names.len() <= 3);
        }
        assert_eq!(addresses.name(first), None);
        assert_eq!(addresses.name(last), Some(name("n49999.test")));
    }

    #[test]
    fn places_go_round_and_stay_in_their_range() {
        let mut addresses = Addresses::new(2);
        addresses.next = LAST;
        let last = addresses.place(&name("a.test"));
        assert_eq!(last.v4(), Ipv4Addr::new(198, 19, 255, 254));
        assert_eq!(addresses.place(&name("b.test")), Place(FIRST));
        for foreign in ["198.17.255.255", "198.20.0.0", "2001:2:1::", "2001:3::1"] {
            assert_eq!(Place::of(foreign.parse().unwrap()), None, "{foreign}");
        }
    }

    #[test]
    fn a_name_in_use_stays_when_others_come() {
        let mut addresses = Addresses::new(2);
        let kept = addresses.place(&name("kept.test"));
        for n in 0..100 {
            addresses.place(&name(&format!("n{n}.test")));
            assert_eq!(addresses.name(kept), Some(name("kept.test")));
        }
    }
}
