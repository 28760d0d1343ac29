//! `palisade policy …`: checks and tests policy bundles before they are in force.
//!
//! Only `try` contacts the gate; the other commands read a bundle as the gate would.

mod case;

use std::path::PathBuf;
use std::time::Duration;

use anyhow::Result;
use clap::{Args, Subcommand};
use config::Settings;
use config::bundle::{self, BundleContents, BundleReadError};
use policy::rego::trial::{self, RuleValue, TestOutcome};
use policy::rego::{Budget, Bundle, BundleError};
use serde_json::{Value, json};

use self::case::PolicyCase;
use crate::cli::{Global, why};
use crate::exit::{CliError, CliExit};
use crate::gate::read_environment_variable;
use crate::output;

/// Timeout of one test, or of one rule to explain.
const EVALUATION_TIMEOUT: Duration = Duration::from_secs(10);

#[derive(Debug, Subcommand)]
pub enum PolicyCommand {
    /// Decide about a request without sending it
    #[command(after_help = "\
Examples:
  palisade policy try https://api.github.com/user
  palisade policy try --method POST --sandbox fix-login https://api.example.com/v1/items
Exits 0 when the request would be allowed, 7 when it would be refused.")]
    Try(why::TryArgs),
    /// Compile bundles as the gate does, and report errors with file and line
    #[command(after_help = "\
Examples:
  palisade policy check                       every bundle of palisade.yaml
  palisade policy check policies/mcp-authz    a directory, or an OPA bundle (.tar.gz)
A bundle that compiles here is accepted by the gate. Functions whose result does not depend
on the input alone (http.send, time.now_ns, rand.intn …) are refused. Exits 2 on an error.")]
    Check(PolicyCheckArgs),
    /// Run the test_* rules of a bundle
    #[command(after_help = "\
Examples:
  palisade policy test policies/mcp-authz
  palisade policy test policies/mcp-authz --run delete
A test is a rule whose name begins with test_, by convention in a file whose name ends in _test.rego:
  package mcp.authz_test
  import data.mcp.authz
  test_reading_passes if authz.allow with input as {\"name\": \"read\"}
A test passes when the rule is true. The bundle is compiled first, as the gate does. Exits 1
when a test fails, 2 when the bundle is invalid.")]
    Test(TestArgs),
    /// Evaluate a bundle for an input
    #[command(after_help = "\
Examples:
  palisade policy eval --bundle guard --input call.json
  echo '{\"name\": \"delete_file\"}' | palisade policy eval policies/mcp-authz --input -
The decision is printed as JSON: decision (allow, block, ask, redact, undefined, failed), reason,
rule, and for redact the redacted params or result. An input has the fields that
docs/policies.md lists for its kind. Exits 0 for allow and redact, 7 otherwise.")]
    Eval(CaseArgs),
    /// Explain a bundle's decision: the value of each rule, and fields that the input lacks
    #[command(after_help = "\
Example:
  palisade policy explain policies/mcp-authz --input call.json
Prints the decision, then the value of every rule for this input (or undefined), then the fields
that the policy reads and the input does not have.")]
    Explain(CaseArgs),
}

#[derive(Debug, Args)]
pub struct PolicyCheckArgs {
    /// A bundle [default: every bundle of palisade.yaml]
    pub path: Option<PathBuf>,
    /// Rule or package to evaluate, such as mcp/authz [default: every package with a decision]
    #[arg(long, requires = "path", value_name = "PATH")]
    pub entrypoint: Option<String>,
}

#[derive(Debug, Args)]
pub struct TestArgs {
    /// The bundle
    pub path: PathBuf,
    /// Only tests whose names contain this text
    #[arg(long, value_name = "TEXT", default_value = "")]
    pub run: String,
}

#[derive(Debug, Args)]
pub struct CaseArgs {
    /// A bundle: a directory or an OPA bundle
    #[arg(required_unless_present = "bundle")]
    pub path: Option<PathBuf>,
    /// A bundle of palisade.yaml, by its id
    #[arg(long, value_name = "ID", conflicts_with = "path")]
    pub bundle: Option<String>,
    /// Rule or package to evaluate, such as mcp/authz [default: the only package with a decision]
    #[arg(long, value_name = "PATH")]
    pub entrypoint: Option<String>,
    /// The input as JSON; - for stdin
    #[arg(long, short, value_name = "FILE")]
    pub input: PathBuf,
}

/// Runs `palisade policy …`.
pub fn run(command: PolicyCommand, global: &Global) -> Result<CliExit> {
    match command {
        PolicyCommand::Try(args) => why::try_request(&args, global),
        PolicyCommand::Check(args) => check(&args, global),
        PolicyCommand::Test(args) => test(&args, global),
        PolicyCommand::Eval(args) => eval(&args, global),
        PolicyCommand::Explain(args) => explain(&args, global),
    }
}

fn settings(global: &Global) -> Result<Settings> {
    let paths = global.paths()?;
    config::load(paths.config.current(), &read_environment_variable)
        .map_err(|problems| CliError::new(CliExit::Usage, problems.to_string()).into())
}

/// The error for a bundle that cannot be read.
fn bundle_error(problem: BundleReadError) -> CliError {
    match problem {
        BundleReadError::Missing { path, .. } => {
            let message = format!("{} does not exist", path.display());
            CliError::new(CliExit::NotFound, message)
        }
        BundleReadError::Unreadable { path, detail, .. } => {
            let message = format!("{} cannot be used: {detail}", path.display());
            CliError::new(CliExit::Usage, message)
        }
        BundleReadError::Invalid { error, .. } => CliError::new(CliExit::Usage, error.to_string()),
    }
}

/// The id of a bundle that has none: its file name.
fn name_of(path: &std::path::Path) -> String {
    let name = path.file_name().unwrap_or(path.as_os_str());
    name.to_string_lossy().into_owned()
}

/// Compiles every entry point of a bundle.
fn compile_all(id: &str, contents: &BundleContents) -> Result<Vec<Bundle>, BundleError> {
    let entrypoints = trial::entrypoints(&contents.modules)?;
    if entrypoints.is_empty() {
        let message = "no package has a rule called decision, action or allow".to_owned();
        return Err(BundleError::Policy {
            place: None,
            what: message,
        });
    }
    entrypoints
        .iter()
        .map(|entrypoint| Bundle::compile(id, entrypoint, &contents.modules, &contents.data))
        .collect()
}

fn check(args: &PolicyCheckArgs, global: &Global) -> Result<CliExit> {
    // The name of each bundle, with its entry points or its error.
    let mut checked: Vec<(String, Result<Vec<String>, String>)> = Vec::new();
    let rules = |bundles: Vec<Bundle>| {
        bundles
            .iter()
            .map(|bundle| bundle.rule().to_owned())
            .collect()
    };
    match &args.path {
        Some(path) => {
            let id = name_of(path);
            let compiled = match bundle::open(&id, path) {
                Ok(contents) => match &args.entrypoint {
                    Some(entrypoint) => {
                        Bundle::compile(&id, entrypoint, &contents.modules, &contents.data)
                            .map(|bundle| vec![bundle])
                    }
                    None => compile_all(&id, &contents),
                }
                .map_err(|error| error.to_string()),
                Err(problem) => return Err(bundle_error(problem).into()),
            };
            checked.push((path.display().to_string(), compiled.map(rules)));
        }
        None => {
            for named in &settings(global)?.policies.bundles {
                let read = bundle::read(named).map(|bundle| rules(vec![bundle]));
                let read = read.map_err(|problem| bundle_error(problem).message);
                checked.push((named.id.clone(), read));
            }
        }
    }
    let all_ok = checked.iter().all(|(_, result)| result.is_ok());
    if global.json {
        let bundles: Vec<Value> = checked
            .iter()
            .map(|(name, result)| match result {
                Ok(rules) => json!({"bundle": name, "ok": true, "rules": rules}),
                Err(problem) => json!({"bundle": name, "ok": false, "problem": problem}),
            })
            .collect();
        output::print_json(&json!({"ok": all_ok, "bundles": bundles}))?;
    } else {
        if checked.is_empty() {
            output::print_message(
                "no policy bundles in palisade.yaml; add one, or name a directory",
            );
        }
        for (name, result) in &checked {
            let name = output::safe(name);
            match result {
                Ok(rules) => output::print_line(&format!("{name}: ok, {}", rules.join(", ")))?,
                Err(problem) => {
                    output::print_message(&format!("{name}: {}", output::safe(problem)));
                }
            }
        }
    }
    Ok(if all_ok { CliExit::Ok } else { CliExit::Usage })
}

fn test(args: &TestArgs, global: &Global) -> Result<CliExit> {
    let id = name_of(&args.path);
    let contents = bundle::open(&id, &args.path).map_err(bundle_error)?;
    compile_all(&id, &contents).map_err(compile_error)?;
    let mut modules = contents.modules;
    modules.extend(contents.tests);
    let mut tested =
        trial::run_tests(&modules, &contents.data, EVALUATION_TIMEOUT).map_err(compile_error)?;
    tested.retain(|test| test.rule.contains(&args.run));
    let failed = tested
        .iter()
        .filter(|test| test.outcome != TestOutcome::Passed)
        .count();
    if global.json {
        let tests: Vec<Value> = tested
            .iter()
            .map(|test| {
                let (outcome, error) = match &test.outcome {
                    TestOutcome::Passed => ("pass", None),
                    TestOutcome::Failed => ("fail", None),
                    TestOutcome::Error(error) => ("error", Some(error)),
                };
                json!({
                    "rule": test.rule, "place": test.place, "outcome": outcome,
                    "error": error, "prints": test.prints,
                })
            })
            .collect();
        let passed = tested.len() - failed;
        output::print_json(&json!({"passed": passed, "failed": failed, "tests": tests}))?;
    } else {
        for test in &tested {
            let rule = test.rule.strip_prefix("data.").unwrap_or(&test.rule);
            let line = match &test.outcome {
                TestOutcome::Passed => format!("pass   {rule}"),
                TestOutcome::Failed => format!("FAIL   {rule}  {}", test.place),
                TestOutcome::Error(error) => format!("ERROR  {rule}  {}: {error}", test.place),
            };
            output::print_line(&output::safe(&line))?;
            if test.outcome != TestOutcome::Passed {
                for print in &test.prints {
                    output::print_line(&format!("         {}", output::safe(print)))?;
                }
            }
        }
        output::print_message(&format!("{} tests, {failed} failed", tested.len()));
    }
    if tested.is_empty() {
        let message = "no matching test; a test is a rule whose name begins with test_";
        return Err(CliError::new(CliExit::NotFound, message).into());
    }
    Ok(if failed == 0 {
        CliExit::Ok
    } else {
        CliExit::Failed
    })
}

fn compile_error(error: BundleError) -> CliError {
    CliError::new(CliExit::Usage, error.to_string())
}

fn eval(args: &CaseArgs, global: &Global) -> Result<CliExit> {
    let case = PolicyCase::read(args, global)?;
    let decided = case.decide();
    output::print_json(&decided.shown)?;
    Ok(decided.exit)
}

fn explain(args: &CaseArgs, global: &Global) -> Result<CliExit> {
    let case = PolicyCase::read(args, global)?;
    let decided = case.decide();
    let contents = &case.contents;
    let rules = trial::explain(
        &contents.modules,
        &contents.data,
        &case.input,
        EVALUATION_TIMEOUT,
    );
    let rules = rules.map_err(compile_error)?;
    let missing = trial::missing_input(&contents.modules, &case.input);
    if global.json {
        let rules: Vec<Value> = rules
            .iter()
            .map(|rule| {
                let (key, value) = match &rule.value {
                    RuleValue::Value(value) => ("value", value.clone()),
                    RuleValue::Undefined => ("undefined", Value::Null),
                    RuleValue::Error(error) => ("error", json!(error)),
                };
                json!({"rule": rule.rule, "places": rule.places, key: value})
            })
            .collect();
        let mut shown = decided.shown;
        shown.insert("rules".to_owned(), json!(rules));
        shown.insert("missing".to_owned(), json!(missing));
        output::print_json(&shown)?;
        return Ok(decided.exit);
    }
    let mut lines = vec![format!("{}: {}", case.bundle.rule(), decided.word)];
    for (key, label) in [
        ("reason", "reason"),
        ("rule", "rule"),
        ("problem", "problem"),
    ] {
        if let Some(text) = decided.shown.get(key).and_then(Value::as_str) {
            lines.push(format!("  {label:<9} {text}"));
        }
    }
    lines.push("rules:".to_owned());
    for rule in &rules {
        let what = match &rule.value {
            RuleValue::Value(value) => shorten(&value.to_string()),
            RuleValue::Undefined => "undefined".to_owned(),
            RuleValue::Error(error) => format!("failed: {error}"),
        };
        lines.push(format!("  {} = {what}", rule.rule));
        lines.push(format!("      {}", rule.places.join(", ")));
    }
    if !missing.is_empty() {
        lines.push("not in this input:".to_owned());
        lines.extend(missing.iter().map(|path| format!("  {path}")));
    }
    for line in lines {
        output::print_line(&output::safe(&line))?;
    }
    Ok(decided.exit)
}

/// Truncates a value to two lines.
fn shorten(text: &str) -> String {
    match text.char_indices().nth(160) {
        Some((end, _)) => format!("{}…", text.get(..end).unwrap_or_default()),
        None => text.to_owned(),
    }
}

/// The time budget of a decision; longer than the gate's, since an operator waits for it.
fn budget() -> Budget {
    Budget::with_time_limit(EVALUATION_TIMEOUT)
}
