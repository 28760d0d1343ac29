//! One bundle and one input.

use std::io::Read;

use anyhow::{Context, Result};
use config::bundle::{self, BundleContents};
use policy::redaction::{Pattern, Redaction};
use policy::rego::trial;
use policy::rego::{Bundle, Decision, Said};
use serde_json::{Map, Value, json};

use super::{CaseArgs, bad, budget, name_of, settings, wrong};
use crate::cli::Global;
use crate::exit::{Exit, Failure};

/// The most bytes of an input.
const MOST_INPUT: u64 = 64 * 1024 * 1024;

pub(super) struct Case {
    pub(super) contents: BundleContents,
    pub(super) bundle: Bundle,
    pub(super) input: Value,
}

/// A decision, for people and programs.
pub(super) struct Decided {
    pub(super) shown: Map<String, Value>,
    pub(super) word: &'static str,
    pub(super) exit: Exit,
}

impl Case {
    pub(super) fn read(args: &CaseArgs, global: &Global) -> Result<Self> {
        let (id, path, own) = match (&args.path, &args.bundle) {
            (Some(path), _) => (name_of(path), path.clone(), None),
            (None, Some(id)) => {
                let settings = settings(global)?;
                let mut bundles = settings.policies.bundles.iter();
                let Some(named) = bundles.find(|bundle| bundle.id == *id) else {
                    let message = format!("palisade.yaml has no policy bundle called {id}");
                    return Err(Failure::new(Exit::NotFound, message).into());
                };
                let own = Some(named.entrypoint.clone());
                (named.id.clone(), named.path.clone(), own)
            }
            (None, None) => {
                let message = "say which bundle: a directory, or --bundle ID";
                return Err(Failure::new(Exit::Usage, message).into());
            }
        };
        let contents = bundle::open(&id, &path).map_err(bad)?;
        let entrypoint = match args.entrypoint.clone().or(own) {
            Some(entrypoint) => entrypoint,
            None => only_entrypoint(&contents)?,
        };
        let bundle = Bundle::compile(&id, &entrypoint, &contents.modules, &contents.data);
        Ok(Self {
            bundle: bundle.map_err(wrong)?,
            input: read_input(args)?,
            contents,
        })
    }

    pub(super) fn decide(&self) -> Decided {
        let mut shown = Map::new();
        let mut show = |key: &str, value: Value| {
            shown.insert(key.to_owned(), value);
        };
        // Known last, and read first.
        show("decision", Value::Null);
        show("bundle", json!(self.bundle.id()));
        show("entrypoint", json!(self.bundle.rule()));
        let mut hear = |said: Said| {
            show("reason", json!(said.message));
            show("rule", json!(said.rule));
        };
        let (word, exit) = match self.bundle.decide(&self.input, budget()) {
            Decision::Allow(said) => {
                hear(said);
                ("allow", Exit::Ok)
            }
            Decision::Deny(said) => {
                hear(said);
                ("block", Exit::Denied)
            }
            Decision::Ask(said) => {
                hear(said);
                ("ask", Exit::Denied)
            }
            Decision::Undefined => ("undefined", Exit::Denied),
            Decision::Failed(failure) => {
                show("problem", json!(failure.to_string()));
                ("failed", Exit::Denied)
            }
            Decision::Modify { outputs, said } => {
                hear(said);
                let exit = match self.redact(&outputs) {
                    Ok(redacted) => {
                        show("redacted", redacted);
                        Exit::Ok
                    }
                    Err(problem) => {
                        show("problem", json!(problem));
                        Exit::Denied
                    }
                };
                show("outputs", outputs);
                ("redact", exit)
            }
        };
        show("decision", json!(word));
        Decided { shown, word, exit }
    }

    /// What becomes of params, or of the result after a call.
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
    let mut found = trial::entrypoints(&contents.modules).map_err(wrong)?;
    match (found.pop(), found.is_empty()) {
        (Some(only), true) => Ok(only),
        (None, _) => {
            let message = "no package has a rule called decision, action or allow";
            Err(Failure::new(Exit::Usage, message).into())
        }
        (Some(last), false) => {
            let message = format!(
                "there is more than one package that decides; say --entrypoint {}, or {last}",
                found.join(", ")
            );
            Err(Failure::new(Exit::Usage, message).into())
        }
    }
}

fn read_input(args: &CaseArgs) -> Result<Value> {
    let shown = args.input.display();
    let mut text = Vec::new();
    if args.input.as_os_str() == "-" {
        let stdin = std::io::stdin().lock();
        stdin.take(MOST_INPUT).read_to_end(&mut text)?;
    } else {
        let file = std::fs::File::open(&args.input);
        let file = file.with_context(|| format!("cannot open {shown}"))?;
        file.take(MOST_INPUT).read_to_end(&mut text)?;
    }
    serde_json::from_slice(&text).map_err(|error| {
        let message = format!("{shown} is no JSON: {error}");
        Failure::new(Exit::Usage, message).into()
    })
}
