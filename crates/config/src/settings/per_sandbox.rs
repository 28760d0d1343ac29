//! Settings that differ per sandbox, or are fixed when a sandbox is created.

use std::collections::BTreeSet;

use policy::allowlist::Allowlist;
use policy::id::SandboxId;

use super::Settings;
use super::combination::{combine, operator_rules};
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
        let rules = combine(operator_rules(&self.domains), added.iter().map(host_rule));
        let mut settings = self.clone();
        settings.compiled.allowlist = Allowlist::new(rules);
        settings
    }

    /// The rules of grants.yaml for one sandbox.
    pub fn granted(&self, sandbox: &SandboxId) -> &[DomainRule] {
        self.sandbox_domains
            .get(sandbox.as_str())
            .map_or(&[], Vec::as_slice)
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

    fn rule_of(settings: &Settings, method: &str, host: &str) -> Option<String> {
        let target = Target {
            sandbox: SandboxId::parse("one").unwrap(),
            method: Method::parse(method).unwrap(),
            host: Host::parse(host).unwrap(),
            port: 443,
            path: CleanPath::parse("/simple/x").unwrap(),
            program: None,
        };
        let permit = settings.allowlist().judge(target).ok()?;
        Some(permit.rule().as_str().to_owned())
    }

    // Issue 18, part 5.
    #[test]
    fn presets_of_the_file_name_their_rules_and_yield_to_deny() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("palisade.yaml");
        let text = "version: 1\negress:\n  presets: [npm, pypi, npm]\n  domains: [{host: \
                    registry.npmjs.org, deny: [{}]}, '*.pythonhosted.org']\n";
        std::fs::write(&path, text).unwrap();
        let settings = Sources::read(Some(&path), &|_| None)
            .unwrap()
            .settings(&|_| None)
            .unwrap();
        for (method, host, rule) in [
            ("GET", "pypi.org", Some("preset:pypi")),
            ("POST", "pypi.org", None),
            ("GET", "registry.npmjs.org", None),
            ("GET", "registry.yarnpkg.com", Some("preset:npm")),
            // The preset removes nothing from a wider rule.
            (
                "POST",
                "files.pythonhosted.org",
                Some("allowlist:*.pythonhosted.org"),
            ),
            ("GET", "example.com", None),
        ] {
            assert_eq!(
                rule_of(&settings, method, host).as_deref(),
                rule,
                "{method} {host}"
            );
        }
        // Each rule has the position of its preset in the file, and is listed once.
        let shown = settings.show();
        let npm: Vec<_> = shown
            .iter()
            .filter(|one| {
                one.value
                    .get("rule")
                    .is_some_and(|rule| rule == "preset:npm")
            })
            .collect();
        assert_eq!(npm.len(), 3);
        assert!(
            npm[0].origin.to_string().contains("palisade.yaml:3"),
            "{}",
            npm[0].origin
        );
    }

    #[test]
    fn reads_of_every_host_leave_listed_hosts_as_they_are() {
        let operator =
            settings("[{host: api.example, methods: [POST]}, {host: no.example, deny: [{}]}]");
        let npm = crate::presets::Preset::find("npm").unwrap();
        let open = DomainRule {
            methods: vec!["GET".to_owned()],
            rule_name: Some("tier:open".to_owned()),
            ..DomainRule::allow_all(policy::host::HostPattern::Any)
        };
        let own = operator.with_added_rules(&[npm.domains, vec![open]].concat());
        for (method, host, rule) in [
            ("GET", "other.example", Some("tier:open")),
            ("POST", "other.example", None),
            ("GET", "api.example", None),
            ("POST", "api.example", Some("allowlist:api.example")),
            ("GET", "no.example", None),
            ("GET", "registry.npmjs.org", Some("preset:npm")),
            // The path is not in the preset.
            ("GET", "nodejs.org", Some("tier:open")),
        ] {
            assert_eq!(
                rule_of(&own, method, host).as_deref(),
                rule,
                "{method} {host}"
            );
        }
    }
}
