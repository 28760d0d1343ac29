//! The allowlist: rules for hosts, ports, methods, paths and programs.
//!
//! HTTP, CONNECT and DNS use the same table, so that they decide alike. The lookup time of a host
//! does not depend on the number of rules: exact names are in one hash table, suffixes of
//! wildcards in another, which is probed only at label boundaries where some rule has its suffix.
//!
//! **Precedence.** Allow rules are those of the most specific pattern: an exact name takes
//! precedence over a wildcard, and a longer wildcard over a shorter one. All rules with the most
//! specific pattern are tried in the order of the file. Deny rules are those of every pattern that
//! matches the host: a rule for `a.x.com` must not lift what the operator denied on `*.x.com`. A
//! rule that denies everything denies the name: DNS does not resolve it, also not as an alias.

use std::collections::HashMap;
use std::net::IpAddr;

use foldhash::fast::FixedState;

use crate::answer::Approval;
use crate::endpoint::{EndpointRefusal, EndpointRule, EndpointRules, Method};
use crate::host::{Host, HostName, HostPattern};
use crate::id::SandboxId;
use crate::path::CleanPath;
use crate::reason::Reason;
use crate::verdict::{Denial, RuleName};

/// The ports of a rule without ports.
pub const DEFAULT_PORTS: [u16; 2] = [80, 443];

/// The rule name in refusals that no single rule decided.
const ALLOWLIST_RULE: &str = "allowlist";

/// One entry of the allowlist.
#[derive(Clone, Debug, PartialEq)]
pub struct HostRule {
    /// The hosts.
    pub pattern: HostPattern,
    /// The ports; [`DEFAULT_PORTS`] if empty.
    pub ports: Vec<u16>,
    /// The methods and paths.
    pub endpoints: EndpointRules,
    /// The programs; all if empty. A name is compared with the executable's file name, an absolute
    /// path with the whole path. This is not a security boundary: an agent can rename programs.
    pub programs: Vec<String>,
    /// The name of the rule in refusals and records.
    pub name: RuleName,
    /// A scan profile that replaces the default one. Not interpreted here.
    pub scan: Option<String>,
    /// Whether the rule allows only requests without a body that do not switch to another protocol.
    pub reads_only: bool,
}

impl HostRule {
    /// A rule that allows everything on the default ports of `pattern`.
    pub fn new(pattern: HostPattern) -> Self {
        Self {
            name: format!("{ALLOWLIST_RULE}:{pattern}").into(),
            pattern,
            ports: Vec::new(),
            endpoints: EndpointRules::default(),
            programs: Vec::new(),
            scan: None,
            reads_only: false,
        }
    }

    /// The ports of the rule.
    pub fn ports(&self) -> &[u16] {
        if self.ports.is_empty() {
            &DEFAULT_PORTS
        } else {
            &self.ports
        }
    }

    /// Whether the rule denies every request of every program.
    pub fn denies_everything(&self) -> bool {
        self.programs.is_empty() && self.endpoints.deny.iter().any(EndpointRule::is_everything)
    }

    /// Whether the rule applies to `program`. To an unknown program only rules without programs
    /// apply.
    fn applies_to_program(&self, program: Option<&str>) -> bool {
        self.programs.is_empty()
            || program
                .is_some_and(|program| self.programs.iter().any(|named| is_program(program, named)))
    }
}

/// Whether `named` in a rule matches the executable `program`: by its path, by its file name, or as
/// `git` for git's own helpers such as `/usr/lib/git-core/git-remote-http`, which connects to
/// servers.
fn is_program(program: &str, named: &str) -> bool {
    let (directory, file) = program.rsplit_once('/').unwrap_or(("", program));
    let part_of_git = || file.starts_with("git-") && directory.ends_with("/git-core");
    named == program || named == file || (named == "git" && part_of_git())
}

/// The normalised target of a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Target {
    /// The sandbox that sends the request. A permit is valid for this sandbox only.
    pub sandbox: SandboxId,
    /// The method.
    pub method: Method,
    /// The host.
    pub host: Host,
    /// The port.
    pub port: u16,
    /// The path and query.
    pub path: CleanPath,
    /// The executable that opened the connection, if it is known for certain.
    pub program: Option<String>,
}

/// Proof that a target is allowed. A permit owns the target, so that the checked target is the one
/// that the request is sent to. Created by [`Allowlist::judge`] or by an operator's approval.
///
/// ```compile_fail,E0451
/// fn forge(target: policy::allowlist::Target) -> policy::allowlist::Permit {
///     policy::allowlist::Permit { target, rule: "mine".into(), scan: None }
/// }
/// ```
#[must_use = "a permit is required by the next stage"]
#[derive(Debug, PartialEq, Eq)]
pub struct Permit {
    target: Target,
    rule: RuleName,
    scan: Option<String>,
    reads_only: bool,
}

impl Permit {
    /// The permit for a target that no rule matches and the operator approved.
    pub fn approved(target: Target, approval: Approval) -> Self {
        Self {
            target,
            rule: approval.into_rule(),
            scan: None,
            reads_only: false,
        }
    }

    /// The allowed target.
    pub fn target(&self) -> &Target {
        &self.target
    }

    /// The rule that allowed the target.
    pub fn rule(&self) -> &RuleName {
        &self.rule
    }

    /// The rule's scan profile, if it has one.
    pub fn scan(&self) -> Option<&str> {
        self.scan.as_deref()
    }

    /// The refusal of a request that sends data, if the permit is for reads only. `sends_data` is
    /// whether the request has a body or asks for another protocol.
    pub fn check_read(&self, sends_data: bool) -> Result<(), Denial> {
        if !self.reads_only || !sends_data {
            return Ok(());
        }
        let host = &self.target.host;
        Err(
            Denial::new(Reason::MethodDenied, self.rule.clone()).with_message(format!(
                "Only reads of {host} are allowed: a request must have no body and must not ask \
                 for WebSocket. Ask the operator to add {host} to egress.domains."
            )),
        )
    }

    /// Drops the proof and returns the target.
    pub fn into_target(self) -> Target {
        self.target
    }
}

/// The table of all host rules.
///
/// The hash is not keyed: only the operator inserts names, and a lookup cannot cause collisions.
#[derive(Clone, Debug, Default)]
pub struct Allowlist {
    /// Groups of rules with the same pattern, in file order.
    groups: Vec<Vec<HostRule>>,
    /// The group of each exact name.
    exact: HashMap<HostName, usize, FixedState>,
    /// The group of each wildcard, by its suffix.
    wildcards: HashMap<HostName, usize, FixedState>,
    /// The group of each address.
    ips: HashMap<IpAddr, usize, FixedState>,
    /// The group of [`HostPattern::Any`].
    any: Option<usize>,
    /// Bit `n` is set if some wildcard has a suffix of `n` labels (at most 127), so that a hostile
    /// name with many labels does not cost 126 probes.
    depths: u128,
    /// Whether some rule denies everything; otherwise the search for such a rule is skipped.
    denies_names: bool,
}

impl Allowlist {
    /// Builds the table from the rules of a file, in their order.
    pub fn new(rules: Vec<HostRule>) -> Self {
        let mut list = Self::default();
        for rule in rules {
            list.denies_names |= rule.denies_everything();
            let next = list.groups.len();
            let group = match &rule.pattern {
                HostPattern::Exact(name) => *list.exact.entry(name.clone()).or_insert(next),
                HostPattern::Wildcard(suffix) => {
                    list.depths |= 1_u128 << (count_labels(suffix.as_str()) & 127);
                    *list.wildcards.entry(suffix.clone()).or_insert(next)
                }
                HostPattern::Ip(ip) => *list.ips.entry(*ip).or_insert(next),
                HostPattern::Any => *list.any.get_or_insert(next),
            };
            match list.groups.get_mut(group) {
                Some(rules) => rules.push(rule),
                None => list.groups.push(vec![rule]),
            }
        }
        list
    }

    /// All rules, grouped by pattern.
    pub fn rules(&self) -> impl Iterator<Item = &HostRule> {
        self.groups.iter().flatten()
    }

    /// The rules of the most specific pattern that matches `host`, in file order.
    pub fn lookup(&self, host: &Host) -> Option<&[HostRule]> {
        let group = match host {
            Host::Name(name) => match self.exact.get(name) {
                Some(group) => *group,
                None => self.lookup_wildcard(name.as_str()).or(self.any)?,
            },
            Host::Ip(ip) => *self.ips.get(ip)?,
        };
        self.groups.get(group).map(Vec::as_slice)
    }

    fn lookup_wildcard(&self, name: &str) -> Option<usize> {
        let mut longest = None;
        self.visit_wildcards(name, |group| longest = Some(group));
        longest
    }

    /// Visits the groups of all wildcards that match `name`, the longest suffix last. The search
    /// starts at the end of the name and stops at the longest suffix of any rule.
    fn visit_wildcards(&self, name: &str, mut visit: impl FnMut(usize)) {
        let mut labels = 0_u32;
        for (at, byte) in name.bytes().enumerate().rev() {
            if byte != b'.' {
                continue;
            }
            labels += 1;
            let deeper = self.depths.checked_shr(labels).unwrap_or(0);
            if deeper & 1 == 1
                && let Some(suffix) = name.get(at + 1..)
                && let Some(group) = self.wildcards.get(suffix)
            {
                visit(*group);
            }
            if deeper <= 1 {
                break;
            }
        }
    }

    /// The first matching deny rule, of any pattern that matches the host.
    fn find_deny<'a>(
        &'a self,
        target: &Target,
        specific: &'a [HostRule],
    ) -> Option<(&'a EndpointRule, &'a HostRule)> {
        let program = target.program.as_deref();
        let deny_of = |rules: &'a [HostRule]| {
            let on_port = |rule: &&HostRule| rule.ports().contains(&target.port);
            rules.iter().filter(on_port).find_map(|rule| {
                // A deny rule for certain programs also applies to an unknown program: hiding the
                // socket's owner must not lift it.
                let applies = program.is_none() || rule.applies_to_program(program);
                let endpoints = applies.then_some(&rule.endpoints)?;
                Some((endpoints.find_deny(&target.method, &target.path)?, rule))
            })
        };
        let mut found = deny_of(specific);
        if let Host::Name(name) = &target.host {
            self.visit_wildcards(name.as_str(), |group| {
                let rules = self.groups.get(group).map(Vec::as_slice);
                found = found.or_else(|| deny_of(rules.unwrap_or_default()));
            });
        }
        found
    }

    /// Whether some rule for `host` restricts methods or paths on `port`: a rule of the most
    /// specific pattern, or a deny rule of a wider one.
    pub fn restricts_endpoints(&self, host: &Host, port: u16) -> bool {
        let on_port = |rule: &&HostRule| rule.ports().contains(&port);
        let specific = self.lookup(host).unwrap_or_default();
        let mut restricts = specific
            .iter()
            .filter(on_port)
            .any(|rule| rule.endpoints.restricts());
        if let Host::Name(name) = host {
            self.visit_wildcards(name.as_str(), |group| {
                let mut rules = self.groups.get(group).into_iter().flatten().filter(on_port);
                restricts |= rules.any(|rule| !rule.endpoints.deny.is_empty());
            });
        }
        restricts
    }

    /// Whether some rule denies a name, that is, denies everything.
    pub fn denies_names(&self) -> bool {
        self.denies_names
    }

    /// The rule that denies `host` by name: every port of the host's rules has a rule that denies
    /// everything. None for a host without rules.
    pub fn denied_name(&self, host: &Host) -> Option<&HostRule> {
        if !self.denies_names {
            return None;
        }
        let ports = self.lookup(host)?.iter().flat_map(HostRule::ports);
        let mut denying = ports.map(|port| self.denied_port(host, *port));
        let first = denying.next()??;
        denying.all(|found| found.is_some()).then_some(first)
    }

    /// The rule that denies everything on a port, of any pattern that matches the host.
    fn denied_port(&self, host: &Host, port: u16) -> Option<&HostRule> {
        if !self.denies_names {
            return None;
        }
        let denies = |rule: &&HostRule| rule.ports().contains(&port) && rule.denies_everything();
        let mut found = self.lookup(host)?.iter().find(denies);
        if let Host::Name(name) = host {
            self.visit_wildcards(name.as_str(), |group| {
                let rules = self.groups.get(group).into_iter().flatten();
                found = found.or_else(|| rules.into_iter().find(denies));
            });
        }
        found
    }

    /// Decides about the host alone, for DNS queries.
    pub fn judge_host(&self, host: &Host) -> Result<&[HostRule], Denial> {
        match self.denied_name(host) {
            Some(rule) => Err(refuse_name(host, rule)),
            None => self.lookup(host).ok_or_else(|| self.refuse_host(host)),
        }
    }

    /// Decides about the target of a DNS alias (CNAME) of an allowed host. The host's owner chooses
    /// the alias, so the alias need not be on the list; but a name that the operator denied is
    /// refused.
    pub fn judge_alias(&self, alias: &Host) -> Result<(), Denial> {
        self.denied_name(alias)
            .map_or(Ok(()), |rule| Err(refuse_name(alias, rule)))
    }

    /// Whether every rule for a port of `host` is for reads only, so that connections that cannot be
    /// inspected must not pass.
    pub fn allows_only_reads(&self, host: &Host, port: u16) -> bool {
        let rules = self.lookup(host).unwrap_or_default().iter();
        let mut on_port = rules.filter(|rule| rule.ports().contains(&port)).peekable();
        on_port.peek().is_some() && on_port.all(|rule| rule.reads_only)
    }

    /// Decides about a connection whose content the gate does not read: by host, port and program
    /// alone.
    pub fn judge_unread(
        &self,
        host: &Host,
        port: u16,
        program: Option<&str>,
    ) -> Result<&HostRule, Denial> {
        let rules = self.judge_port(host, port)?;
        if let Some(rule) = self.denied_port(host, port) {
            return Err(refuse_name(host, rule));
        }
        let mut on_port = rules.iter().filter(|rule| rule.ports().contains(&port));
        on_port
            .find(|rule| rule.applies_to_program(program))
            .ok_or_else(|| refuse_program(rules, host, program))
    }

    /// Decides about host and port alone.
    pub fn judge_port(&self, host: &Host, port: u16) -> Result<&[HostRule], Denial> {
        let rules = self.judge_host(host)?;
        if rules.iter().any(|rule| rule.ports().contains(&port)) {
            Ok(rules)
        } else {
            Err(refuse_port(host, port, rules))
        }
    }

    /// Decides about a request.
    ///
    /// Rules for other ports and programs are ignored. Then the first matching deny rule wins,
    /// including those of wider patterns, and after that the first rule of the most specific
    /// pattern that allows the request.
    pub fn judge(&self, target: Target) -> Result<Permit, Denial> {
        let rules = self.judge_port(&target.host, target.port)?;
        let program = target.program.as_deref();
        if let Some((deny, rule)) = self.find_deny(&target, rules) {
            let refusal = EndpointRefusal::Denied(deny);
            return Err(refuse_endpoint(refusal, rule, &target));
        }

        let on_port = rules
            .iter()
            .filter(|rule| rule.ports().contains(&target.port));
        let mut nearest: Option<(EndpointRefusal<'_>, &HostRule)> = None;
        for rule in on_port.filter(|rule| rule.applies_to_program(program)) {
            match rule.endpoints.check_allow(&target.method, &target.path) {
                Ok(()) => {
                    return Ok(Permit {
                        rule: rule.name.clone(),
                        scan: rule.scan.clone(),
                        reads_only: rule.reads_only,
                        target,
                    });
                }
                // A refused method is a more helpful reason than a refused path.
                Err(refusal) => {
                    if nearest.is_none_or(|(other, _)| other == EndpointRefusal::Path) {
                        nearest = Some((refusal, rule));
                    }
                }
            }
        }
        Err(match nearest {
            Some((refusal, rule)) => refuse_endpoint(refusal, rule, &target),
            None => refuse_program(rules, &target.host, target.program.as_deref()),
        })
    }

    fn refuse_host(&self, host: &Host) -> Denial {
        match host {
            Host::Ip(ip) => Denial::new(Reason::IpLiteral, ALLOWLIST_RULE).with_message(format!(
                "The address {ip} is not on the allowlist. Use the host's name, or ask the \
                 operator to add the address to egress.domains."
            )),
            Host::Name(name) if self.wildcards.contains_key(name) => Denial::new(
                Reason::HostDenied,
                format!("{ALLOWLIST_RULE}:*.{name}"),
            )
            .with_message(format!(
                "The rule '*.{name}' matches names below {name} but not {name} itself. Ask the \
                     operator to add {name} to egress.domains."
            )),
            Host::Name(name) => {
                Denial::new(Reason::HostDenied, ALLOWLIST_RULE).with_message(format!(
                    "The host {name} is not on the allowlist. Ask the operator to add it to \
                 egress.domains."
                ))
            }
        }
    }
}

fn count_labels(name: &str) -> usize {
    1 + name.bytes().filter(|b| *b == b'.').count()
}

fn first_rule_name(rules: &[HostRule]) -> RuleName {
    rules
        .first()
        .map_or_else(|| ALLOWLIST_RULE.into(), |rule| rule.name.clone())
}

fn refuse_name(host: &Host, rule: &HostRule) -> Denial {
    Denial::new(Reason::HostDenied, rule.name.clone()).with_message(format!(
        "The host {host} is denied by a rule. Do not retry."
    ))
}

fn refuse_port(host: &Host, port: u16, rules: &[HostRule]) -> Denial {
    let mut ports: Vec<u16> = rules.iter().flat_map(HostRule::ports).copied().collect();
    ports.sort_unstable();
    ports.dedup();
    let ports: Vec<String> = ports.iter().map(u16::to_string).collect();
    Denial::new(Reason::PortDenied, first_rule_name(rules)).with_message(format!(
        "Port {port} of {host} is not allowed, only {}. Ask the operator to add the port to the \
         host's rule.",
        ports.join(", ")
    ))
}

fn refuse_program(rules: &[HostRule], host: &Host, program: Option<&str>) -> Denial {
    let denial = |sentence| {
        Denial::new(Reason::ProgramDenied, first_rule_name(rules)).with_message(sentence)
    };
    match program {
        Some(program) => denial(format!(
            "This program may not connect to {host}. Use a program that the rule allows."
        ))
        .with_evidence(format!("the program is {program}")),
        None => denial(format!(
            "Only certain programs may connect to {host}, and the program of this connection \
             could not be determined."
        )),
    }
}

fn refuse_endpoint(refusal: EndpointRefusal<'_>, rule: &HostRule, target: &Target) -> Denial {
    let Target {
        method, host, path, ..
    } = target;
    let sentence = match refusal {
        EndpointRefusal::Denied(_) => {
            format!("{method} {path} on {host} is denied by a rule. Do not retry.")
        }
        EndpointRefusal::Method => {
            format!("{method} is not allowed on {path} of {host}; other methods are.")
        }
        EndpointRefusal::Path => format!(
            "{method} {path} is not among the endpoints allowed on {host}. Ask the operator to \
             add it to the host's rule."
        ),
    };
    let denial = Denial::new(refusal.reason(), rule.name.clone()).with_message(sentence);
    match refusal {
        EndpointRefusal::Denied(deny) => denial.with_evidence(format!("deny {deny}")),
        EndpointRefusal::Method | EndpointRefusal::Path => denial,
    }
}

#[cfg(test)]
mod tests;
