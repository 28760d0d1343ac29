//! Evaluates one bundle for one input.

use std::io::Read;

use anyhow::{Context, Result};
use config::bundle::{self, BundleContents};
use policy::redaction::{Pattern, Redaction};
use policy::rego::trial;
use policy::rego::{Bundle, Decision, DecisionDetails};
use serde_json::{Map, Value, json};

use super::{CaseArgs, budget, bundle_error, compile_error, name_of, settings};
use crate::cli::Global;
use crate::exit::{CliError, CliExit};

/// Maximum size of an input, in bytes.
const MAX_INPUT: u64 = 64 * 1024 * 1024;

/// A compiled bundle, and the input to evaluate it for.
pub(super) struct PolicyCase {
    pub(super) contents: BundleContents,
    pub(super) bundle: Bundle,
    pub(super) input: Value,
}

/// A decision: as JSON, as a word and as an exit code.
pub(super) struct CaseDecision {
    pub(super) shown: Map<String, Value>,
    pub(super) word: &'static str,
    pub(super) exit: CliExit,
}

impl PolicyCase {
    pub(super) fn read(args: &CaseArgs, global: &Global) -> Result<Self> {
        let (id, path, configured) = match (&args.path, &args.bundle) {
            (Some(path), _) => (name_of(path), path.clone(), None),
            (None, Some(id)) => {
                let settings = settings(global)?;
                let mut bundles = settings.policies.bundles.iter();
                let Some(named) = bundles.find(|bundle| bundle.id == *id) else {
                    let message =
                        format!("no policy bundle '{id}' in palisade.yaml; see policies.bundles");
                    return Err(CliError::new(CliExit::NotFound, message).into());
                };
                let configured = Some(named.entrypoint.clone());
                (named.id.clone(), named.path.clone(), configured)
            }
            (None, None) => {
                let message = "missing bundle: name a directory, or use --bundle ID";
                return Err(CliError::new(CliExit::Usage, message).into());
            }
        };
        let contents = bundle::open(&id, &path).map_err(bundle_error)?;
        let entrypoint = match args.entrypoint.clone().or(configured) {
            Some(entrypoint) => entrypoint,
            None => only_entrypoint(&contents)?,
        };
        let bundle = Bundle::compile(&id, &entrypoint, &contents.modules, &contents.data);
        Ok(Self {
            bundle: bundle.map_err(compile_error)?,
            input: read_input(args)?,
            contents,
        })
    }

    pub(super) fn decide(&self) -> CaseDecision {
        let mut shown = Map::new();
        let mut show = |key: &str, value: Value| {
            shown.insert(key.to_owned(), value);
        };
        // Set at the end; inserted here to be the first key.
        show("decision", Value::Null);
        show("bundle", json!(self.bundle.id()));
        show("entrypoint", json!(self.bundle.rule()));
        let mut show_reason = |details: DecisionDetails| {
            show("reason", json!(details.message));
            show("rule", json!(details.rule));
        };
        let (word, exit) = match self.bundle.decide(&self.input, budget()) {
            Decision::Allow(details) => {
                show_reason(details);
                ("allow", CliExit::Ok)
            }
            Decision::Deny(details) => {
                show_reason(details);
                ("block", CliExit::Denied)
            }
            Decision::Ask(details) => {
                show_reason(details);
                ("ask", CliExit::Denied)
            }
            Decision::Undefined => ("undefined", CliExit::Denied),
            Decision::Failed(failure) => {
                show("problem", json!(failure.to_string()));
                ("failed", CliExit::Denied)
            }
            Decision::Modify { outputs, details } => {
                show_reason(details);
                let exit = match self.redact(&outputs) {
                    Ok(redacted) => {
                        show("redacted", redacted);
                        CliExit::Ok
                    }
                    Err(problem) => {
                        show("problem", json!(problem));
                        CliExit::Denied
                    }
                };
                show("outputs", outputs);
                ("redact", exit)
            }
        };
        show("decision", json!(word));
        CaseDecision { shown, word, exit }
    }

    /// The redacted params, or the redacted result after a call.
    fn redact(&self, outputs: &Value) -> Result<Value, String> {
        let redaction = Redaction::read(outputs, Pattern::compile);
        let redaction = redaction.map_err(|error| error.to_string())?;
        let target = match self.input.get("moment").and_then(Value::as_str) {
            Some("after") => "result",
            _ => "params",
        };
        let text = self.input.get(target).unwrap_or(&Value::Null).to_string();
        let redacted = redaction.apply(&text).map_err(|error| error.to_string())?;
        serde_json::from_str(redacted.as_deref().unwrap_or(&text))
            .map_err(|error| error.to_string())
    }
}

fn only_entrypoint(contents: &BundleContents) -> Result<String> {
    let mut found = trial::entrypoints(&contents.modules).map_err(compile_error)?;
    match (found.pop(), found.is_empty()) {
        (Some(only), true) => Ok(only),
        (None, _) => {
            let message = "no package has a rule called decision, action or allow";
            Err(CliError::new(CliExit::Usage, message).into())
        }
        (Some(last), false) => {
            let message = format!(
                "several packages have a decision; choose one with --entrypoint: {}, {last}",
                found.join(", ")
            );
            Err(CliError::new(CliExit::Usage, message).into())
        }
    }
}

fn read_input(args: &CaseArgs) -> Result<Value> {
    let shown = args.input.display();
    let mut text = Vec::new();
    if args.input.as_os_str() == "-" {
        let stdin = std::io::stdin().lock();
        stdin.take(MAX_INPUT).read_to_end(&mut text)?;
    } else {
        let file = std::fs::File::open(&args.input);
        let file = file.with_context(|| format!("cannot open {shown}"))?;
        file.take(MAX_INPUT).read_to_end(&mut text)?;
    }
    serde_json::from_slice(&text).map_err(|error| {
        let message = format!("{shown} is not valid JSON: {error}");
        CliError::new(CliExit::Usage, message).into()
    })
}
