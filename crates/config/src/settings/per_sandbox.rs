//! Settings that differ per sandbox, or are fixed when a sandbox is created.

use std::collections::BTreeSet;

use policy::allowlist::{Allowlist, HostRule};
use policy::host::HostPattern;

use super::Settings;
use crate::compilation::host_rule;
use crate::section::egress::DomainRule;

/// Maximum number of ports that a sandbox intercepts in addition to the gate's own three. The
/// sandbox passes its listeners in one message of 64 descriptors, and each port has two, for IPv4
/// and IPv6.
pub const MAX_CAPTURED_PORTS: usize = 28;

/// The gate's own ports in every sandbox: the proxy, git and DNS.
pub const GATE_PORTS: [u16; 3] = [8080, 9418, 53];

/// The ports that a sandbox intercepts, without the gate's own ports.
pub(crate) fn captured_ports<'a>(
    transparent: &[u16],
    rules: impl Iterator<Item = &'a DomainRule>,
) -> BTreeSet<u16> {
    let ports = rules.flat_map(|rule| &rule.ports).chain(transparent);
    let ports = ports.copied();
    ports.filter(|port| !GATE_PORTS.contains(port)).collect()
}

impl Settings {
    /// The settings for one sandbox that may also reach `added`. Each added rule is combined with
    /// the operator's rules that applied to its hosts so far, so that what they allow stays
    /// allowed. An operator's `deny` applies to every host it names, as it does for grants, and
    /// nothing is added below a name that the operator denies completely.
    #[must_use]
    pub fn with_added_rules(&self, added: &[DomainRule]) -> Self {
        let own: Vec<HostRule> = self.domains.iter().map(|d| host_rule(&d.rule)).collect();
        let mut rules = own.clone();
        for added_rule in added.iter().map(host_rule) {
            let covering = || {
                let covers = |rule: &&HostRule| rule.pattern.covers(&added_rule.pattern);
                own.iter().filter(covers)
            };
            if covering().any(HostRule::denies_everything) {
                continue;
            }
            let nearest = covering().map(|rule| &rule.pattern);
            let nearest = nearest.max_by_key(|pattern| match pattern {
                HostPattern::Wildcard(suffix) => suffix.as_str().len(),
                HostPattern::Exact(_) | HostPattern::Ip(_) => usize::MAX,
            });
            let same = covering().filter(|rule| Some(&rule.pattern) == nearest);
            let moved = same.filter(|rule| rule.pattern != added_rule.pattern);
            rules.extend(moved.map(|rule| HostRule {
                pattern: added_rule.pattern.clone(),
                ..rule.clone()
            }));
            rules.push(added_rule);
        }
        let mut settings = self.clone();
        settings.compiled.allowlist = Allowlist::new(rules);
        settings
    }

    /// The ports that a new sandbox intercepts in addition to the gate's own:
    /// `egress.transparent_ports`, and the ports of the operator's rules and of `more`, so that
    /// programs without proxy support reach them.
    pub fn captured_ports(&self, more: &[DomainRule]) -> BTreeSet<u16> {
        let rules = self.domains.iter().map(|domain| &domain.rule).chain(more);
        captured_ports(&self.egress.transparent_ports, rules)
    }
}

#[cfg(test)]
mod tests {
    use policy::allowlist::Target;
    use policy::endpoint::Method;
    use policy::host::Host;
    use policy::id::SandboxId;
    use policy::path::CleanPath;

    use super::*;
    use crate::Sources;

    fn settings(domains: &str) -> Settings {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("palisade.yaml");
        let text = format!("version: 1\negress:\n  domains: {domains}\n");
        std::fs::write(&path, text).unwrap();
        let sources = Sources::read(Some(&path), &|_| None).unwrap();
        sources.settings(&|_| None).unwrap()
    }

    fn allows(settings: &Settings, method: &str, host: &str, port: u16) -> bool {
        let target = Target {
            sandbox: SandboxId::parse("one").unwrap(),
            method: Method::parse(method).unwrap(),
            host: Host::parse(host).unwrap(),
            port,
            path: CleanPath::parse("/").unwrap(),
            program: None,
        };
        settings.allowlist().judge(target).is_ok()
    }

    // Issue 14, number 14.
    #[test]
    fn added_rules_allow_more_and_never_override_a_deny() {
        let operator = settings(
            "[a.example, '*.wide.example', {host: '*.get.example', methods: [GET]}, \
             {host: '*.no.example', deny: [{}]}, \
             {host: some.example, deny: [{methods: [DELETE]}]}]",
        );
        let added = settings(
            "[b.example, {host: x.wide.example, methods: [GET]}, x.get.example, \
             {host: x.no.example, ports: [8443]}, some.example]",
        );
        let added: Vec<DomainRule> = added.domains.into_iter().map(|d| d.rule).collect();
        let own = operator.with_added_rules(&added);
        for (method, host, port, before, after) in [
            ("GET", "a.example", 443, true, true),
            ("GET", "b.example", 443, false, true),
            ("GET", "c.example", 443, false, false),
            // An added rule that allows less removes nothing.
            ("POST", "x.wide.example", 443, true, true),
            ("POST", "x.get.example", 443, false, true),
            ("POST", "y.get.example", 443, false, false),
            // What the operator denies stays denied, on every port of a name that is denied
            // completely.
            ("GET", "x.no.example", 8443, false, false),
            ("DELETE", "some.example", 443, false, false),
            ("GET", "some.example", 443, true, true),
        ] {
            let found = (
                allows(&operator, method, host, port),
                allows(&own, method, host, port),
            );
            assert_eq!(found, (before, after), "{method} {host}:{port}");
        }
        let name = Host::parse("x.no.example").unwrap();
        assert!(own.allowlist().judge_host(&name).is_err());
    }
}
