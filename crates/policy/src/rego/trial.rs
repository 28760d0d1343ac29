//! Tools for policy authors: run the tests of a bundle, and explain its decisions.
//!
//! Only the interpreter is used here. The machine does not support `with`, which tests need, and
//! does not expose the values of other rules; that both agree is checked for every real decision.

use std::collections::BTreeMap;
use std::num::NonZeroU32;
use std::time::Duration;

use regorus::utils::limits::ExecutionTimerConfig;
use regorus::{Engine, Value};

use super::heads::{self, Head};
use super::{BundleError, Module, one_line, value};

/// Steps of the interpreter between two reads of the clock.
const CLOCK_INTERVAL: NonZeroU32 = NonZeroU32::new(32).expect("it is not zero");

/// The prefix of a test's name.
const TEST_PREFIX: &str = "test_";

/// The result of a test.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PolicyTestResult {
    /// The rule, as a path: `data.mcp.authz_test.test_reads_pass`.
    pub rule: String,
    /// File and line.
    pub place: String,
    /// The outcome.
    pub outcome: TestOutcome,
    /// The output of `print`.
    pub prints: Vec<String>,
}

/// The outcome of a test.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TestOutcome {
    /// The test rule is true.
    Passed,
    /// The test rule is false, or undefined.
    Failed,
    /// The test could not be evaluated, for this reason.
    Error(String),
}

/// Runs every rule whose name starts with `test_`, in the order of the files.
pub fn run_tests(
    modules: &[Module],
    data: &serde_json::Value,
    limit: Duration,
) -> Result<Vec<PolicyTestResult>, BundleError> {
    let (engine, heads) = heads::read(modules, data)?;
    let mut tested: Vec<PolicyTestResult> = Vec::new();
    for head in heads
        .iter()
        .filter(|head| head.name.starts_with(TEST_PREFIX))
    {
        let rule = head.path();
        if tested.iter().any(|earlier| earlier.rule == rule) {
            continue;
        }
        let mut engine = engine.clone();
        engine.set_gather_prints(true);
        let outcome = match evaluate(&mut engine, &rule, limit) {
            Ok(Value::Undefined | Value::Bool(false)) => TestOutcome::Failed,
            Ok(_) => TestOutcome::Passed,
            Err(error) => TestOutcome::Error(error),
        };
        tested.push(PolicyTestResult {
            rule,
            place: head.location(),
            outcome,
            prints: engine.take_prints().unwrap_or_default(),
        });
    }
    Ok(tested)
}

/// A rule with its value for one input.
#[derive(Clone, Debug, PartialEq)]
pub struct RuleExplanation {
    /// The rule, as a path.
    pub rule: String,
    /// The file and line of each of its declarations.
    pub places: Vec<String>,
    /// The value of the rule.
    pub value: RuleValue,
}

/// The value of a rule for one input.
#[derive(Clone, Debug, PartialEq)]
pub enum RuleValue {
    /// The rule has this value.
    Value(serde_json::Value),
    /// The rule is undefined.
    Undefined,
    /// The rule could not be evaluated, for this reason.
    Error(String),
}

/// The values of all rules except tests for `input`, by package.
pub fn explain(
    modules: &[Module],
    data: &serde_json::Value,
    input: &serde_json::Value,
    limit: Duration,
) -> Result<Vec<RuleExplanation>, BundleError> {
    let (mut engine, heads) = heads::read(modules, data)?;
    let input = value::from_json(input)
        .ok_or_else(|| BundleError::Data("the input is nested too deeply".to_owned()))?;
    engine.set_input(input);
    let mut places: BTreeMap<String, Vec<&Head>> = BTreeMap::new();
    for head in heads
        .iter()
        .filter(|head| !head.name.starts_with(TEST_PREFIX))
    {
        places.entry(head.path()).or_default().push(head);
    }
    let explained = places.into_iter().map(|(rule, heads)| {
        let value = match evaluate(&mut engine.clone(), &rule, limit) {
            Ok(Value::Undefined) => RuleValue::Undefined,
            Ok(value) => RuleValue::Value(value::to_json(&value)),
            Err(error) => RuleValue::Error(error),
        };
        RuleExplanation {
            rule,
            places: heads.iter().map(|head| head.location()).collect(),
            value,
        }
    });
    Ok(explained.collect())
}

/// The packages that can be entrypoints, such as `mcp/authz`: those with a rule named `decision`,
/// `action` or `allow`.
pub fn entrypoints(modules: &[Module]) -> Result<Vec<String>, BundleError> {
    let (_, heads) = heads::read(modules, &serde_json::json!({}))?;
    let mut found: Vec<String> = heads
        .iter()
        .filter(|head| matches!(head.name.as_str(), "decision" | "action" | "allow"))
        .filter_map(|head| head.package.strip_prefix("data."))
        .map(|package| package.replace('.', "/"))
        .collect();
    found.sort_unstable();
    found.dedup();
    Ok(found)
}

/// The paths below `input` that the policy refers to and `input` does not have. They are found by
/// a text search, so only literal paths are reported.
pub fn missing_input(modules: &[Module], input: &serde_json::Value) -> Vec<String> {
    let mut missing: Vec<String> = Vec::new();
    let lines = modules.iter().flat_map(|module| module.text.lines());
    for line in lines {
        let line = line.split('#').next().unwrap_or_default();
        for (at, _) in line.match_indices("input.") {
            let before = line.get(..at).and_then(|text| text.chars().next_back());
            if before.is_some_and(|c| c.is_alphanumeric() || matches!(c, '_' | '.')) {
                continue;
            }
            let rest = line.get(at..).unwrap_or_default();
            let path = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '.');
            let end = rest.find(|c| !path(c)).unwrap_or(rest.len());
            let path = rest.get(..end).unwrap_or_default().trim_end_matches('.');
            let mut found = Some(input);
            for part in path.split('.').skip(1) {
                found = found.and_then(|value| value.get(part));
            }
            if found.is_none() && !missing.iter().any(|known| known == path) {
                missing.push(path.to_owned());
            }
        }
    }
    missing
}

fn evaluate(engine: &mut Engine, rule: &str, limit: Duration) -> Result<Value, String> {
    engine.set_execution_timer_config(ExecutionTimerConfig {
        limit,
        check_interval: CLOCK_INTERVAL,
    });
    let value = engine.eval_rule(rule.to_owned());
    let value = value.map_err(|error| one_line(&error.to_string()))?;
    if value::is_shallow(&value) {
        Ok(value)
    } else {
        Err("it is nested too deeply".to_owned())
    }
}

#[cfg(test)]
mod tests;
