//! Combines rules of several sources: an added rule never takes away what another one allows, and
//! never allows what another one denies.

use policy::allowlist::HostRule;
use policy::host::HostPattern;

use super::LoadedDomainRule;
use crate::compilation::host_rule;

/// The rules of `own` and `added`. Each added rule is combined with the rules of `own` that applied
/// to its hosts so far, so that what they allow stays allowed. A `deny` of `own` applies to every
/// host it names, and nothing is added below a name that `own` denies completely.
pub(crate) fn combine(own: Vec<HostRule>, added: impl Iterator<Item = HostRule>) -> Vec<HostRule> {
    let (everywhere, added): (Vec<_>, Vec<_>) =
        added.partition(|rule| rule.pattern == HostPattern::Any);
    let mut own = own;
    own.extend(everywhere);
    let mut rules = own.clone();
    for wish in added {
        let covering = || {
            let covers = |rule: &&HostRule| rule.pattern.covers(&wish.pattern);
            own.iter().filter(covers)
        };
        if covering().any(HostRule::denies_everything) {
            continue;
        }
        let nearest = covering().map(|rule| &rule.pattern);
        let nearest = nearest.max_by_key(|pattern| match pattern {
            HostPattern::Any => 0,
            HostPattern::Wildcard(suffix) => suffix.as_str().len(),
            HostPattern::Exact(_) | HostPattern::Ip(_) => usize::MAX,
        });
        let same = covering().filter(|rule| Some(&rule.pattern) == nearest);
        let moved = same.filter(|rule| rule.pattern != wish.pattern);
        // Records name the rule that is for the host rather than the rule for every host.
        let (after, before): (Vec<_>, Vec<_>) = moved
            .map(|rule| HostRule {
                pattern: wish.pattern.clone(),
                ..rule.clone()
            })
            .partition(|rule| rule.reads_only);
        rules.extend(before);
        rules.push(wish);
        rules.extend(after);
    }
    rules
}

/// The operator's rules: those of files, and those of `egress.presets` beside them.
pub(crate) fn operator_rules(domains: &[LoadedDomainRule]) -> Vec<HostRule> {
    let of_preset = |domain: &&LoadedDomainRule| domain.rule.rule_name.is_some();
    let rule = |domain: &LoadedDomainRule| host_rule(&domain.rule);
    let own = domains.iter().filter(|domain| !of_preset(domain));
    combine(
        own.map(rule).collect(),
        domains.iter().filter(of_preset).map(rule),
    )
}
