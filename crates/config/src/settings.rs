//! The snapshot of a validated configuration.

mod combination;
mod per_sandbox;

use std::collections::{BTreeMap, BTreeSet};

use policy::allowlist::Allowlist;
use policy::breaker::BreakerConfig;
use policy::bucket::Rate;
use policy::host::Host;
use policy::push::{PushRules, SecretAction};
use policy::refs::RefRules;
use policy::registration::AuthMode;
use serde::Serialize;
use serde_json::Value;

use crate::compilation::{Compiled, compile_policy};
use crate::origin::ValueOrigin;
use crate::palisade_file::File;
use crate::policy_file::PolicyFile;
use crate::problem::Problem;
use crate::secret::Secret;
use crate::section::approvals::ApprovalsSection;
use crate::section::audit::AuditSection;
use crate::section::credentials::CredentialsSection;
use crate::section::egress::{DomainRule, EgressSection};
use crate::section::git::GitSection;
use crate::section::logging::LoggingSection;
use crate::section::metrics::MetricsSection;
use crate::section::policies::PoliciesSection;
use crate::section::sandbox::SandboxSection;
use crate::section::scan::{GitAction, ScanSection};
use crate::section::server::ServerSection;
use crate::section::tools::BridgedServer;
use crate::tree::join;
use crate::unavailable::is_unavailable;

pub(crate) use combination::operator_rules;
pub(crate) use per_sandbox::captured_ports;
pub use per_sandbox::{GATE_PORTS, MAX_CAPTURED_PORTS};

/// A validated configuration, complete and immutable. A request uses the same settings from
/// start to end.
#[derive(Clone)]
pub struct Settings {
    /// The interceptor API and the MCP server.
    pub server: ServerSection,
    /// Policy bundles.
    pub policies: PoliciesSection,
    /// MCP servers behind the bridge.
    pub tools: Vec<BridgedServer>,
    /// Metrics and traces.
    pub metrics: MetricsSection,
    /// The gate's log.
    pub logging: LoggingSection,
    /// Secrets by name.
    pub secrets: BTreeMap<String, Secret>,
    /// Which hosts sandboxes may reach, and how.
    pub egress: EgressSection,
    /// Credentials.
    pub credentials: CredentialsSection,
    /// Git hosts, protected branches and mirrors.
    pub git: GitSection,
    /// The scanner.
    pub scan: ScanSection,
    /// Approval of requests by the operator.
    pub approvals: ApprovalsSection,
    /// Backend, environment and limits of sandboxes.
    pub sandbox: SandboxSection,
    /// The audit log.
    pub audit: AuditSection,
    /// Every domain rule: inline, then allowlist.yaml's, then grants.yaml's.
    pub domains: Vec<LoadedDomainRule>,
    /// Rules of grants.yaml for single sandboxes, by sandbox id.
    pub sandbox_domains: BTreeMap<String, Vec<DomainRule>>,
    /// The content of policy.yaml.
    pub policy: PolicyFile,
    /// Warnings about accepted values.
    pub warnings: Vec<Problem>,
    compiled: Compiled,
    origins: BTreeMap<String, ValueOrigin>,
}

/// Shows what [`crate::show`] returns, so that secrets stay hidden.
impl std::fmt::Debug for Settings {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let shown = self.show().into_iter();
        let shown = shown.map(|shown| (shown.pointer, shown.value));
        f.debug_map().entries(shown).finish()
    }
}

/// A domain rule and its origin.
#[derive(Clone, Debug, PartialEq)]
pub struct LoadedDomainRule {
    /// The rule.
    pub rule: DomainRule,
    /// The origin of the rule.
    pub origin: ValueOrigin,
}

/// One line of `palisade config show`.
#[derive(Clone, Debug, PartialEq)]
pub struct ShownValue {
    /// JSON pointer to the value.
    pub pointer: String,
    /// The value; for a secret only whether it is set, and for the value of an environment variable
    /// `${NAME}`.
    pub value: Value,
    /// The origin of the value.
    pub origin: ValueOrigin,
}

/// The settings without any file: rate limits and circuit breakers are on.
impl Default for Settings {
    fn default() -> Self {
        let policy = PolicyFile::default();
        let mut compiled = Compiled::default();
        compile_policy(&policy, None, &mut compiled, &mut Vec::new());
        Self::new(
            File::default(),
            policy,
            Vec::new(),
            compiled,
            BTreeMap::new(),
            Vec::new(),
        )
    }
}

impl Settings {
    pub(crate) fn new(
        file: File,
        policy: PolicyFile,
        domains: Vec<LoadedDomainRule>,
        compiled: Compiled,
        origins: BTreeMap<String, ValueOrigin>,
        warnings: Vec<Problem>,
    ) -> Self {
        Self {
            server: file.server,
            policies: file.policies,
            tools: file.tools,
            metrics: file.metrics,
            logging: file.logging,
            secrets: file.secrets,
            egress: file.egress,
            credentials: file.credentials,
            git: file.git,
            scan: file.scan,
            approvals: file.approvals,
            sandbox: file.sandbox,
            audit: file.audit,
            domains,
            sandbox_domains: BTreeMap::new(),
            policy,
            warnings,
            compiled,
            origins,
        }
    }

    /// The allowlist for HTTP, CONNECT and DNS.
    pub fn allowlist(&self) -> &Allowlist {
        &self.compiled.allowlist
    }

    /// The rate limit of one sandbox's requests to `host`; None if limits are off.
    pub fn rate_for(&self, host: &Host) -> Option<Rate> {
        let default = self.compiled.rate?;
        Some(self.compiled.rates.get(host).copied().unwrap_or(default))
    }

    /// Whether `rate_limits.per_upstream` or `circuit_breakers.upstreams` has an entry for `host`.
    pub fn has_upstream_entry(&self, host: &Host) -> bool {
        self.compiled.rates.contains_key(host) || self.compiled.breakers.contains_key(host)
    }

    /// The circuit breaker settings of `host`.
    pub fn breaker_for(&self, host: &Host) -> BreakerConfig {
        let own = self.compiled.breakers.get(host);
        own.copied().unwrap_or(self.compiled.breaker)
    }

    /// The rules for pushes in the given mode.
    pub fn push_rules(&self, auth_mode: AuthMode) -> PushRules {
        PushRules {
            refs: RefRules {
                allow_deletion: self.policy.policy.allow_branch_deletion,
                auth_mode,
                protected: self.git.protected.clone(),
                pushable: self.git.pushable.clone(),
                deny_force_push: self.git.deny_force_push,
            },
            secrets: match self.git.scan {
                GitAction::Deny => SecretAction::Deny,
                GitAction::Ask => SecretAction::Ask,
                GitAction::Note => SecretAction::Note,
                GitAction::Off => SecretAction::Off,
            },
        }
    }

    /// Whether the interceptor and the MCP server are needed: tools, bundles or a listen address
    /// are configured. Otherwise their port stays closed, so that two gates do not conflict.
    pub fn serves_mcp(&self) -> bool {
        let addresses = ["interceptor_addr", "mcp_server_addr", "single_port"];
        let written = |key: &&str| self.origin(&join("/server", key)) != ValueOrigin::Default;
        !self.tools.is_empty() || !self.policies.bundles.is_empty() || addresses.iter().any(written)
    }

    /// The origin of the value at `pointer`. Values of policy.yaml are under `/policy`, merged
    /// domain rules under `/domains`.
    pub fn origin(&self, pointer: &str) -> ValueOrigin {
        let domain = pointer.strip_prefix("/domains/").and_then(|rest| {
            let index = rest.split('/').next()?;
            self.domains.get(index.parse::<usize>().ok()?)
        });
        match domain {
            Some(domain) => domain.origin.clone(),
            None => self
                .origins
                .get(pointer)
                .cloned()
                .unwrap_or(ValueOrigin::Default),
        }
    }

    /// Every secret with its name, for the log redactor. Empty secrets are omitted, because the
    /// empty string occurs everywhere.
    pub fn secret_values(&self) -> Vec<(String, &Secret)> {
        self.secret_fields()
            .into_iter()
            .filter(|(pointer, secret)| !pointer.starts_with("/tools/") && !secret.is_empty())
            .map(|(pointer, secret)| (crate::tree::dotted(&pointer), secret))
            .collect()
    }

    /// The pointers of the values that differ, for the log message of a reload. Never a value.
    pub fn diff(&self, other: &Settings) -> Vec<String> {
        let (ours, theirs) = (self.flat_values(), other.flat_values());
        let (our_secrets, their_secrets): (BTreeMap<_, _>, BTreeMap<_, _>) = (
            self.secret_fields().into_iter().collect(),
            other.secret_fields().into_iter().collect(),
        );
        let mut changed: Vec<String> = differing_keys(&ours, &theirs)
            .chain(differing_keys(&our_secrets, &their_secrets))
            .cloned()
            .collect();
        changed.sort();
        changed.dedup();
        changed
    }

    pub(crate) fn show(&self) -> Vec<ShownValue> {
        let secrets: BTreeSet<String> = self
            .secret_fields()
            .into_iter()
            .map(|(pointer, _)| pointer)
            .collect();
        let shown = |(pointer, mut value): (String, Value)| {
            if !secrets.contains(&pointer) {
                self.hide_variable_values(&pointer, &mut value);
            }
            ShownValue {
                origin: self.origin(&pointer),
                pointer,
                value,
            }
        };
        let leaves = self.leaves().into_iter();
        leaves
            .filter(|(pointer, value)| !is_unavailable(pointer, value))
            .map(shown)
            .collect()
    }

    /// Replaces every value below `pointer` that came from an environment variable by `${NAME}`. A
    /// value may be shown in another form than the file has: a domain as text although the file has a
    /// mapping with a single key, or the reverse.
    fn hide_variable_values(&self, pointer: &str, value: &mut Value) {
        let variable = |origin: &ValueOrigin| match origin {
            ValueOrigin::Env { name, .. } => Some(Value::String(format!("${{{name}}}"))),
            ValueOrigin::File { .. } | ValueOrigin::Default => None,
        };
        let mut enclosing = Some(pointer);
        while let Some(outer) = enclosing {
            if let Some(name) = self.origins.get(outer).and_then(variable) {
                *value = name;
                return;
            }
            enclosing = outer.rsplit_once('/').map(|(outer, _)| outer);
        }
        match value {
            Value::Object(object) => {
                for (key, value) in object {
                    self.hide_variable_values(&join(pointer, key), value);
                }
            }
            Value::Array(items) => {
                for (index, item) in items.iter_mut().enumerate() {
                    self.hide_variable_values(&join(pointer, &index.to_string()), item);
                }
            }
            leaf => {
                let below = format!("{pointer}/");
                let mut below = self
                    .origins
                    .range(below.clone()..)
                    .take_while(|(inner, _)| inner.starts_with(&below));
                if let Some(name) = below.find_map(|(_, origin)| variable(origin)) {
                    *leaf = name;
                }
            }
        }
    }

    fn flat_values(&self) -> BTreeMap<String, Value> {
        self.leaves().into_iter().collect()
    }

    fn secret_fields(&self) -> Vec<(String, &Secret)> {
        let mut fields = Vec::new();
        if let Some(token) = &self.server.auth_token {
            fields.push(("/server/auth_token".to_owned(), token));
        }
        for (name, secret) in &self.secrets {
            fields.push((join("/secrets", name), secret));
        }
        if let Some(webhook) = &self.approvals.webhook {
            fields.push(("/approvals/webhook".to_owned(), webhook));
        }
        for (pointer, container) in self.sandbox.remote.with_pointers() {
            if let Some(token) = &container.auth.token {
                fields.push((format!("{pointer}/auth/token"), token));
            }
        }
        for (index, row) in self.credentials.rows.iter().enumerate() {
            for (name, value) in &row.extra_headers {
                let headers = format!("/credentials/rows/{index}/extra_headers");
                fields.push((join(&headers, name), value));
            }
        }
        for (index, tool) in self.tools.iter().enumerate() {
            for (position, entry) in tool.env.iter().enumerate() {
                fields.push((format!("/tools/{index}/env/{position}"), &entry.value));
            }
        }
        fields
    }

    /// Every scalar value, in the order of the file.
    fn leaves(&self) -> Vec<(String, Value)> {
        fn value<T: Serialize>(section: &T) -> Value {
            serde_json::to_value(section).unwrap_or(Value::Null)
        }
        let mut egress = value(&self.egress);
        // Domain rules are listed with their origin from the merged list.
        if let Value::Object(egress) = &mut egress {
            egress.shift_remove("domains");
        }
        let sections = [
            ("server", value(&self.server)),
            ("policies", value(&self.policies)),
            ("tools", value(&self.tools)),
            ("metrics", value(&self.metrics)),
            ("logging", value(&self.logging)),
            ("secrets", value(&self.secrets)),
            ("egress", egress),
            ("credentials", value(&self.credentials)),
            ("git", value(&self.git)),
            ("scan", value(&self.scan)),
            ("approvals", value(&self.approvals)),
            ("sandbox", value(&self.sandbox)),
            ("audit", value(&self.audit)),
            ("policy", value(&self.policy)),
        ];
        let mut leaves = Vec::new();
        for (name, section) in sections {
            flatten(&join("", name), section, &mut leaves);
        }
        for (index, domain) in self.domains.iter().enumerate() {
            leaves.push((format!("/domains/{index}"), shown_rule(&domain.rule)));
        }
        for (id, rules) in &self.sandbox_domains {
            for (index, rule) in rules.iter().enumerate() {
                let pointer = join("/sandbox_domains", id);
                leaves.push((format!("{pointer}/domains/{index}"), shown_rule(rule)));
            }
        }
        leaves
    }
}

/// A domain rule as `config show` prints it: with the name of its preset.
fn shown_rule(rule: &DomainRule) -> Value {
    let shown = serde_json::to_value(rule).unwrap_or(Value::Null);
    let Some(name) = &rule.rule_name else {
        return shown;
    };
    let mut fields = match shown {
        Value::Object(fields) => fields,
        host => serde_json::Map::from_iter([("host".to_owned(), host)]),
    };
    fields.insert("rule".to_owned(), Value::from(name.as_str()));
    Value::Object(fields)
}

fn flatten(pointer: &str, value: Value, leaves: &mut Vec<(String, Value)>) {
    match value {
        Value::Object(object) if !object.is_empty() => {
            for (key, value) in object {
                flatten(&join(pointer, &key), value, leaves);
            }
        }
        Value::Array(items) if !items.is_empty() => {
            for (index, item) in items.into_iter().enumerate() {
                flatten(&join(pointer, &index.to_string()), item, leaves);
            }
        }
        leaf => leaves.push((pointer.to_owned(), leaf)),
    }
}

fn differing_keys<'a, T: PartialEq>(
    ours: &'a BTreeMap<String, T>,
    theirs: &'a BTreeMap<String, T>,
) -> impl Iterator<Item = &'a String> {
    let changed = ours
        .iter()
        .filter(|(key, value)| theirs.get(*key) != Some(value));
    let added = theirs.keys().filter(|key| !ours.contains_key(*key));
    changed.map(|(key, _)| key).chain(added)
}
