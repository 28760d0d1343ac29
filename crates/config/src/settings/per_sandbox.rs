//! What of the settings is decided when a sandbox is made.

use std::collections::BTreeSet;

use super::Settings;
use crate::section::egress::DomainRule;

/// The most ports that a sandbox captures beside the gate's own three. It hands its listeners
/// over in one message of 64 descriptors, and each port has two, for IPv4 and IPv6.
pub const MOST_CAPTURED: usize = 28;

/// The gate's own ports in every sandbox: the proxy, git and DNS.
pub const GATE_PORTS: [u16; 3] = [8080, 9418, 53];

pub(crate) fn captured_ports<'a>(
    transparent: &[u16],
    rules: impl Iterator<Item = &'a DomainRule>,
) -> BTreeSet<u16> {
    let named = rules.flat_map(|rule| &rule.ports).chain(transparent);
    let named = named.copied();
    named.filter(|port| !GATE_PORTS.contains(port)).collect()
}

impl Settings {
    /// The ports that a new sandbox captures beside the gate's own: `egress.transparent_ports`,
    /// and those that the operator's rules and `more` name, so that programs that know of no
    /// proxy reach them.
    pub fn captured_ports(&self, more: &[DomainRule]) -> BTreeSet<u16> {
        let rules = self.domains.iter().map(|domain| &domain.rule).chain(more);
        captured_ports(&self.egress.transparent_ports, rules)
    }
}
