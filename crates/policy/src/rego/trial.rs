//! Bundles at the workbench: their own tests, and why they decide as they do.
//!
//! The interpreter does this alone. The machine knows no `with`, which tests are made of, and
//! says nothing of rules on the way; that it agrees is checked with every real decision.

use std::collections::BTreeMap;
use std::num::NonZeroU32;
use std::time::Duration;

use regorus::utils::limits::ExecutionTimerConfig;
use regorus::{Engine, Value};

use super::heads::{self, Head};
use super::{BundleError, Module, said, value};

/// Steps of the interpreter between two looks at the clock.
const LOOK_EVERY: NonZeroU32 = NonZeroU32::new(32).expect("it is not zero");

/// What a test's name begins with.
const TEST: &str = "test_";

/// A test that was run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tested {
    /// The rule, as a path: `data.mcp.authz_test.test_reads_pass`.
    pub rule: String,
    /// File and line.
    pub place: String,
    /// What came of it.
    pub outcome: Outcome,
    /// What it printed.
    pub prints: Vec<String>,
}

/// What came of a test.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// It is true.
    Passed,
    /// It is false, or undefined.
    Failed,
    /// It could not be evaluated, and why.
    Error(String),
}

/// Runs every rule whose name begins with `test_`, in the order of the files.
pub fn run_tests(
    modules: &[Module],
    data: &serde_json::Value,
    limit: Duration,
) -> Result<Vec<Tested>, BundleError> {
    let (engine, heads) = heads::read(modules, data)?;
    let mut tested: Vec<Tested> = Vec::new();
    for head in heads.iter().filter(|head| head.name.starts_with(TEST)) {
        let rule = head.path();
        if tested.iter().any(|earlier| earlier.rule == rule) {
            continue;
        }
        let mut engine = engine.clone();
        engine.set_gather_prints(true);
        let outcome = match evaluate(&mut engine, &rule, limit) {
            Ok(Value::Undefined | Value::Bool(false)) => Outcome::Failed,
            Ok(_) => Outcome::Passed,
            Err(error) => Outcome::Error(error),
        };
        tested.push(Tested {
            rule,
            place: head.place(),
            outcome,
            prints: engine.take_prints().unwrap_or_default(),
        });
    }
    Ok(tested)
}

/// A rule, and what it is for one input.
#[derive(Clone, Debug, PartialEq)]
pub struct Explained {
    /// The rule, as a path.
    pub rule: String,
    /// Where it is declared: file and line, each of them.
    pub places: Vec<String>,
    /// What it is.
    pub value: Held,
}

/// What a rule is for one input.
#[derive(Clone, Debug, PartialEq)]
pub enum Held {
    /// This.
    Value(serde_json::Value),
    /// Nothing.
    Undefined,
    /// It could not be evaluated, and why.
    Error(String),
}

/// What every rule but the tests is for `input`, by package.
pub fn explain(
    modules: &[Module],
    data: &serde_json::Value,
    input: &serde_json::Value,
    limit: Duration,
) -> Result<Vec<Explained>, BundleError> {
    let (mut engine, heads) = heads::read(modules, data)?;
    let input = value::read(input)
        .ok_or_else(|| BundleError::Data("the input is nested too deep".to_owned()))?;
    engine.set_input(input);
    let mut places: BTreeMap<String, Vec<&Head>> = BTreeMap::new();
    for head in heads.iter().filter(|head| !head.name.starts_with(TEST)) {
        places.entry(head.path()).or_default().push(head);
    }
    let explained = places.into_iter().map(|(rule, heads)| {
        let value = match evaluate(&mut engine.clone(), &rule, limit) {
            Ok(Value::Undefined) => Held::Undefined,
            Ok(value) => Held::Value(value::write(&value)),
            Err(error) => Held::Error(error),
        };
        Explained {
            rule,
            places: heads.iter().map(|head| head.place()).collect(),
            value,
        }
    });
    Ok(explained.collect())
}

/// The packages that could be entrypoints, `mcp/authz`: those with a rule called decision,
/// action or allow.
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

/// The paths below `input` that the policy asks for and `input` does not have. Found by
/// reading the text, so that only those written out are.
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
        check_interval: LOOK_EVERY,
    });
    let value = engine.eval_rule(rule.to_owned());
    let value = value.map_err(|error| said(&error.to_string()))?;
    if value::is_shallow(&value) {
        Ok(value)
    } else {
        Err("it is nested too deep".to_owned())
    }
}

#[cfg(test)]
mod tests;
