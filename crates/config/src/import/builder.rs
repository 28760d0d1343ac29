//! Collects the rules and notes of an import.

use std::collections::BTreeSet;

use policy::allowlist::DEFAULT_PORTS;
use policy::endpoint::PathPattern;
use policy::host::{Authority, Host, HostPattern};

use super::ImportError;
use super::document::{Item, shown};
use crate::section::egress::{DenyRule, DomainRule};

/// Maximum number of entries of a file.
const MAX_ENTRIES: usize = 10_000;

/// Maximum number of notes; the rest is counted.
const MAX_NOTES: usize = 100;

/// The rules and notes of an import.
#[derive(Default)]
pub(super) struct PolicyBuilder {
    rules: Vec<DomainRule>,
    denied: Vec<(HostPattern, Option<u16>)>,
    notes: Vec<String>,
    omitted_notes: usize,
    entries: usize,
    denies_all: bool,
}

/// A host of another tool's policy.
pub(super) struct HostEntry {
    pub(super) pattern: HostPattern,
    pub(super) port: Option<u16>,
}

impl PolicyBuilder {
    /// Adds a note for the operator.
    pub(super) fn note(&mut self, note: String) {
        if self.notes.contains(&note) {
            return;
        }
        if self.notes.len() < MAX_NOTES {
            self.notes.push(note);
        } else {
            self.omitted_notes += 1;
        }
    }

    /// Adds one note for keys that have no counterpart.
    pub(super) fn not_carried_over(&mut self, keys: &[String], why: &str) {
        if !keys.is_empty() {
            self.note(format!("not carried over: {}: {why}", keys.join(", ")));
        }
    }

    /// Counts an entry, so that the work is bounded.
    pub(super) fn count(&mut self) -> Result<(), ImportError> {
        self.entries += 1;
        if self.entries > MAX_ENTRIES {
            return Err(ImportError::TooMany(MAX_ENTRIES));
        }
        Ok(())
    }

    /// Parses a host, HOST:PORT, `*.HOST` or `**.HOST`. None, with a note, for anything that rules
    /// cannot express.
    pub(super) fn host(&mut self, text: &str, key: &str) -> Option<HostEntry> {
        let mut refuse = |why: &str| {
            self.note(format!(
                "not carried over: {} {}: {why}",
                shown(key),
                shown(text)
            ));
            None
        };
        let bare = text.split(':').next().unwrap_or_default();
        if matches!(bare, "*" | "**") {
            return refuse("every host; sandbox.tier: open allows reads of every host");
        }
        if bare == "localhost" {
            return refuse("a sandbox has a localhost of its own");
        }
        if text.contains('/') {
            return refuse("a path or a range of addresses; write the names of its hosts");
        }
        let (prefix, rest) = match text.strip_prefix("**.").or_else(|| text.strip_prefix("*.")) {
            Some(rest) => ("*.", rest),
            None => ("", text),
        };
        let authority = match Authority::parse(rest) {
            Ok(authority) => authority,
            // An IPv6 address without brackets.
            Err(error) => match Host::parse(rest) {
                Ok(host) => Authority { host, port: None },
                Err(_) => return refuse(&error.to_string()),
            },
        };
        match HostPattern::parse(&format!("{prefix}{}", authority.host)) {
            Ok(pattern) => Some(HostEntry {
                pattern,
                port: authority.port,
            }),
            Err(error) => refuse(&error.to_string()),
        }
    }

    /// Adds a rule that allows everything on a host.
    pub(super) fn allow(&mut self, item: &Item<'_>) -> Result<(), ImportError> {
        self.allow_methods(item.text()?, &item.key, &[])
    }

    /// Adds a rule that allows some methods on a host; all if there are none.
    pub(super) fn allow_methods(
        &mut self,
        host: &str,
        key: &str,
        methods: &[&str],
    ) -> Result<(), ImportError> {
        self.count()?;
        if let Some(entry) = self.host(host, key) {
            self.push(DomainRule {
                ports: entry.port.into_iter().collect(),
                methods: methods.iter().map(|name| (*name).to_owned()).collect(),
                ..DomainRule::allow_all(entry.pattern)
            });
        }
        Ok(())
    }

    /// Adds a rule, once.
    pub(super) fn push(&mut self, rule: DomainRule) {
        if !self.rules.contains(&rule) {
            self.rules.push(rule);
        }
    }

    /// Denies a host.
    pub(super) fn deny(&mut self, text: &str, key: &str) -> Result<(), ImportError> {
        self.count()?;
        if matches!(text, "*" | "**") {
            self.denies_all = true;
            self.note(format!(
                "{} denies every host: no host is allowed",
                shown(key)
            ));
        } else if let Some(entry) = self.host(text, key) {
            self.denied.push((entry.pattern, entry.port));
        } else {
            // The entry restricted the allowed hosts.
            self.note(format!(
                "check the allowed hosts: {} {} is not denied here",
                shown(key),
                shown(text)
            ));
        }
        Ok(())
    }

    /// The rules and the notes.
    pub(super) fn finish(mut self) -> (Vec<DomainRule>, Vec<String>) {
        if self.denies_all {
            self.rules.clear();
        }
        // A deny rule applies to its ports only, so it names every port that some rule allows.
        let named = self
            .rules
            .iter()
            .flat_map(|rule| rule.ports.iter().copied());
        let mut ports: BTreeSet<u16> = named.collect();
        ports.extend(DEFAULT_PORTS);
        let is_default = ports.len() == DEFAULT_PORTS.len();
        for (host, port) in std::mem::take(&mut self.denied) {
            let ports = match port {
                Some(port) => vec![port],
                None if is_default => Vec::new(),
                None => ports.iter().copied().collect(),
            };
            self.push(DomainRule {
                ports,
                deny: vec![DenyRule::default()],
                ..DomainRule::allow_all(host)
            });
        }
        if self.omitted_notes > 0 {
            self.notes.push(format!("and {} more", self.omitted_notes));
        }
        (self.rules, self.notes)
    }
}

/// A path pattern; none if rules cannot express it. `${` would be a variable in palisade.yaml.
pub(super) fn path(text: &str) -> Option<PathPattern> {
    let pattern = PathPattern::parse(text).ok()?;
    (!text.contains('$')).then_some(pattern)
}
