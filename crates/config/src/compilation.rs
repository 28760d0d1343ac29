//! Compilation of the operator's rules into the types of the policy crate: hosts, rates and
//! circuit breakers.

use std::collections::HashMap;

use policy::allowlist::{Allowlist, HostRule};
use policy::breaker::BreakerConfig;
use policy::bucket::Rate;
use policy::endpoint::{EndpointRule, EndpointRules, MethodSet};
use policy::host::{Host, HostPattern};
use policy::registration::MAX_RECEIVE_PACK_BYTES;

use crate::layer::Layer;
use crate::leaf::Leaf;
use crate::policy_file::{PolicyFile, RateRow};
use crate::problem::Problem;
use crate::section::egress::DomainRule;
use crate::tree::{dotted, join};

/// Values that are computed once, at load.
#[derive(Clone, Debug, Default)]
pub(crate) struct Compiled {
    pub(crate) allowlist: Allowlist,
    pub(crate) rate: Option<Rate>,
    pub(crate) rates: HashMap<Host, Rate>,
    pub(crate) breaker: BreakerConfig,
    pub(crate) breakers: HashMap<Host, BreakerConfig>,
}

/// The policy crate's rule for one domain.
pub(crate) fn host_rule(rule: &DomainRule) -> HostRule {
    let endpoint = |methods: &[String], paths: &[_]| EndpointRule {
        // Each name has passed the schema's check, which uses the same parser.
        methods: MethodSet::parse(methods.iter().map(String::as_str)).unwrap_or_default(),
        paths: paths.to_vec(),
    };
    let plain = HostRule::new(rule.host.clone());
    let allows_all = rule.methods.is_empty() && rule.paths.is_empty();
    HostRule {
        ports: rule.ports.clone(),
        endpoints: EndpointRules {
            allow: (!allows_all)
                .then(|| endpoint(&rule.methods, &rule.paths))
                .into_iter()
                .collect(),
            deny: rule
                .deny
                .iter()
                .map(|deny| endpoint(&deny.methods, &deny.paths))
                .collect(),
        },
        programs: rule.programs.clone(),
        scan: rule.scan.map(|action| action.as_str().to_owned()),
        reads_only: rule.host == HostPattern::Any || is_read_rule(rule),
        name: match &rule.rule_name {
            Some(name) => name.as_str().into(),
            None => plain.name,
        },
        pattern: plain.pattern,
    }
}

/// Whether a rule of a preset or a tier is for reads: a request that it allows must not send data.
/// A rule of the operator means what it says, and nothing more.
fn is_read_rule(rule: &DomainRule) -> bool {
    let reads = |method: &String| matches!(method.as_str(), "GET" | "HEAD");
    rule.rule_name.is_some() && !rule.methods.is_empty() && rule.methods.iter().all(reads)
}

/// Message about a host that occurs twice in a table.
const LISTED_TWICE: &str = "this host is listed twice, in two spellings";

/// Checks policy.yaml, and computes its rates and breakers. `layer` is None if there is no file;
/// then the values are the defaults and nothing is checked.
pub(crate) fn compile_policy(
    policy: &PolicyFile,
    layer: Option<&Layer<PolicyFile>>,
    compiled: &mut Compiled,
    problems: &mut Vec<Problem>,
) {
    let mut report = |pointer: &str, message: String| {
        problems.extend(layer.map(|layer| layer.problem(pointer, message)));
    };
    let limits = &policy.git.push_limits;
    if limits.hard_limit_bytes > MAX_RECEIVE_PACK_BYTES {
        let most = MAX_RECEIVE_PACK_BYTES.write();
        let message = format!("git.push_limits.hard_limit_bytes must be at most {most}");
        report("/git/push_limits/hard_limit_bytes", message);
    }
    if limits.warning_bytes > limits.hard_limit_bytes {
        let hard = limits.hard_limit_bytes.write();
        let hard = match layer {
            Some(layer) => layer.display_value("/git/push_limits/hard_limit_bytes", hard),
            None => hard,
        };
        let message = format!(
            "git.push_limits.warning_bytes must be at most hard_limit_bytes, which is {hard}"
        );
        report("/git/push_limits/warning_bytes", message);
    }

    let breakers = &policy.circuit_breakers;
    let defaults = &breakers.defaults;
    if defaults.recovery_timeout.is_zero() {
        let message = "circuit_breakers.defaults.recovery_timeout must be more than 0".to_owned();
        report("/circuit_breakers/defaults/recovery_timeout", message);
    }
    compiled.breaker = BreakerConfig {
        failure_threshold: defaults.failure_threshold,
        recovery: defaults.recovery_timeout,
        success_threshold: defaults.success_threshold,
        ..BreakerConfig::default()
    };
    for (host, row) in &breakers.upstreams {
        let pointer = join("/circuit_breakers/upstreams", host);
        let row = row.clone().unwrap_or_default();
        if row
            .recovery_timeout
            .is_some_and(|timeout| timeout.is_zero())
        {
            let pointer = join(&pointer, "recovery_timeout");
            report(
                &pointer,
                format!("{} must be more than 0", dotted(&pointer)),
            );
        }
        let config = BreakerConfig {
            failure_threshold: row.failure_threshold.unwrap_or(defaults.failure_threshold),
            recovery: row.recovery_timeout.unwrap_or(defaults.recovery_timeout),
            success_threshold: row.success_threshold.unwrap_or(defaults.success_threshold),
            ..compiled.breaker
        };
        if let Ok(host) = Host::parse(host)
            && compiled.breakers.insert(host, config).is_some()
        {
            report(&pointer, LISTED_TWICE.to_owned());
        }
    }

    let rates = &policy.rate_limits;
    let mut rate =
        |pointer: &str, row: &RateRow| match Rate::new(row.requests_per_second, row.burst()) {
            Ok(rate) => Some(rate),
            Err(error) => {
                report(pointer, format!("{}: {error}", dotted(pointer)));
                None
            }
        };
    let default = rate("/rate_limits/defaults", &rates.defaults);
    let mut repeated = Vec::new();
    let mut rate_of_host = HashMap::new();
    for (host, row) in &rates.per_upstream {
        let pointer = join("/rate_limits/per_upstream", host);
        let row = row.as_ref().unwrap_or(&rates.defaults);
        let (Ok(host), Some(rate)) = (Host::parse(host), rate(&pointer, row)) else {
            continue;
        };
        if rate_of_host.insert(host, rate).is_some() {
            repeated.push(pointer);
        }
    }
    for pointer in repeated {
        report(&pointer, LISTED_TWICE.to_owned());
    }
    if rates.enabled {
        compiled.rate = default;
        compiled.rates = rate_of_host;
    }
}
