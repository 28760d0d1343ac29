//! Rego bundles: evaluation of the operator's own policies.
//!
//! A bundle is compiled once, to a program for the virtual machine of regorus, and evaluated any
//! number of times. Errors are reported at compile time, with file and line: a syntax error, a
//! missing entrypoint, a built-in function that does not exist or whose result depends on more
//! than its arguments.
//!
//! **Two evaluators must agree before something is allowed.** The machine evaluates first. It
//! treats a rule in which an error occurred (a built-in with an argument of the wrong type, the
//! sum of a number and a string) as one that does not apply, and a policy that allows by default
//! would then fail open. So every decision that is not a refusal is repeated by the library's
//! interpreter, which stops at the first such error. The interpreter alone is not enough: a call
//! of an unknown function is undefined there, where the machine's compiler reports an error, and
//! it does not count steps. The interpreter is skipped only if it is certain to agree: the policy
//! is plain (`plain.rs`), and no error occurred in the machine (`watch.rs`).
//!
//! Every evaluation has a step limit, which is deterministic, and a time limit, which is the only
//! place in this crate where a clock is read (by the library).

mod calls;
mod decision;
mod entry;
mod heads;
mod plain;
pub mod policy_bundle;
pub mod trial;
mod value;
mod watch;

use std::num::NonZeroU32;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Duration;

use regorus::languages::rego::compiler::Compiler;
use regorus::rvm::program::Program;
use regorus::rvm::vm::{RegoVM, VmError};
use regorus::utils::limits::ExecutionTimerConfig;
use regorus::{Engine, LimitError};

use self::decision::Part;
pub use self::decision::{Decision, DecisionDetails, EvaluationError};
use self::entry::Entry;
use crate::verdict::RuleName;

/// Steps of the machine between two reads of the clock. A step takes about 50 ns.
const MACHINE_CLOCK_INTERVAL: NonZeroU32 = NonZeroU32::new(128).expect("it is not zero");

/// Steps of the interpreter between two reads of the clock; its steps are larger.
const INTERPRETER_CLOCK_INTERVAL: NonZeroU32 = NonZeroU32::new(32).expect("it is not zero");

/// Built-in functions whose result depends on more than their arguments.
const IMPURE_FUNCTIONS: [&str; 6] = [
    "http.send",
    "net.lookup_ip_addr",
    "opa.runtime",
    "rand.intn",
    "time.now_ns",
    "uuid.rfc4122",
];

/// Maximum number of open brackets.
const MAX_BRACKETS: usize = 32;

/// The limits of one evaluation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Budget {
    /// Maximum time.
    pub time: Duration,
    /// Maximum number of steps of the machine.
    pub steps: usize,
}

impl Budget {
    /// Maximum number of steps of one evaluation: more than any reasonable time limit allows.
    pub const MAX_STEPS: usize = 2_000_000;

    /// A limit by time, with the maximum number of steps.
    pub const fn with_time_limit(time: Duration) -> Self {
        Self {
            time,
            steps: Self::MAX_STEPS,
        }
    }

    /// A smaller budget, for rules that only add details to a decision.
    fn detail_budget(self) -> Self {
        Self {
            time: self.time / 4,
            steps: self.steps / 4,
        }
    }
}

/// One file of Rego.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Module {
    /// The path in the bundle, for messages.
    pub name: String,
    /// The source text.
    pub text: String,
}

/// A compiled policy.
#[derive(Clone)]
pub struct Bundle {
    id: Arc<str>,
    entry: Entry,
    program: Arc<Program>,
    data: regorus::Value,
    /// Whether a run of the machine without errors needs no confirmation by the interpreter.
    is_plain: bool,
    /// The interpreter with policy and data; each evaluation clones it, which shares both.
    interpreter: Engine,
}

impl std::fmt::Debug for Bundle {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mut fields = f.debug_struct("Bundle");
        fields.field("id", &self.id).field("rule", &self.rule());
        fields.finish_non_exhaustive()
    }
}

/// Why a bundle cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BundleError {
    /// The policy has an error.
    #[error("{}{what}", place.as_ref().map(|place| format!("{place}: ")).unwrap_or_default())]
    Policy {
        /// File, line and column, if they are known.
        place: Option<String>,
        /// The error.
        what: String,
    },
    /// The bundle has no modules.
    #[error("the bundle contains no .rego file")]
    Empty,
    /// The entrypoint is not a path.
    #[error("'{0}' is not an entrypoint: use a path such as http/authz")]
    BadEntrypoint(String),
    /// The entrypoint does not exist.
    #[error(
        "entrypoint {0} not found: it must be a rule, or a package with a rule named decision, action or allow"
    )]
    NoEntrypoint(String),
    /// A decision would depend on more than its input.
    #[error("the built-in function {0} is not allowed: its result depends on more than the input")]
    Impure(String),
    /// The data is invalid.
    #[error("the bundle's data cannot be used: {0}")]
    Data(String),
}

impl Bundle {
    /// Compiles `modules` with `data`; the rule at `entrypoint` decides.
    pub fn compile(
        id: &str,
        entrypoint: &str,
        modules: &[Module],
        data: &serde_json::Value,
    ) -> Result<Self, BundleError> {
        if modules.is_empty() {
            return Err(BundleError::Empty);
        }
        let mut engine = Engine::new();
        let mut packages = Vec::with_capacity(modules.len());
        for module in modules {
            check_nesting(module)?;
            let package = engine
                .add_policy(module.name.clone(), module.text.clone())
                .map_err(|error| policy_error(&error.to_string()))?;
            packages.push((module.name.as_str(), package));
        }
        let entry = Entry::find(&engine, entrypoint, &packages)?;
        let data = value::from_json(data)
            .filter(|data| matches!(data, regorus::Value::Object(_)))
            .ok_or_else(|| {
                BundleError::Data("it is not an object, or nested too deeply".to_owned())
            })?;
        let compiled = engine
            .compile_with_entrypoint(&entry.rule().into())
            .map_err(|error| policy_error(&error.to_string()))?;
        let program = Compiler::compile_from_policy(&compiled, &entry.rules())
            .map_err(|error| policy_error(&error.to_string()))?;
        let mut used = program.builtin_info_table.iter();
        if let Some(impure) =
            used.find(|built_in| IMPURE_FUNCTIONS.contains(&built_in.name.as_str()))
        {
            return Err(BundleError::Impure(impure.name.clone()));
        }
        if program.has_host_await {
            return Err(BundleError::Impure("__builtin_host_await".to_owned()));
        }
        calls::check_depth(&program)?;
        let watched = plain::is_plain(&compiled, &program, &entry.deciding_rules())
            .then(|| watch::instrument(&program))
            .flatten();
        let is_plain = watched.is_some();
        let program = watched.map_or(program, Arc::new);
        let interpreter = prepare_interpreter(engine, &entry, data.clone())?;
        let bundle = Self {
            id: id.into(),
            entry,
            program,
            data,
            is_plain,
            interpreter,
        };
        // A path that both data and rules define is detected only here.
        bundle
            .new_machine()
            .map_err(|error| BundleError::Data(decision::sanitise(&error.to_string())))?;
        Ok(bundle)
    }

    /// The id of the bundle.
    pub fn id(&self) -> &str {
        &self.id
    }

    /// The rule name in refusals and records: `rego:<id>`.
    pub fn rule_name(&self) -> RuleName {
        format!("rego:{}", self.id).into()
    }

    /// The rule that decides, as a path: `data.http.authz.allow`.
    pub fn rule(&self) -> &str {
        self.entry.rule()
    }

    /// Decides about `input`.
    pub fn decide(&self, input: &serde_json::Value, budget: Budget) -> Decision {
        let Some(input) = value::from_json(input) else {
            return Decision::Failed(EvaluationError::Error(
                "the input is nested too deeply".to_owned(),
            ));
        };
        // The library should not panic, but it has many built-ins.
        catch_unwind(AssertUnwindSafe(|| self.run(input, budget))).unwrap_or_else(|_| {
            Decision::Failed(EvaluationError::Error("the evaluation panicked".into()))
        })
    }

    fn run(&self, input: regorus::Value, budget: Budget) -> Decision {
        let mut machine = match self.new_machine() {
            Ok(machine) => machine,
            Err(error) => return Decision::Failed(failure(&error)),
        };
        machine.set_input(input.clone());
        let mut evaluate = |index: usize, budget: Budget| {
            machine.set_max_instructions(budget.steps);
            machine.set_execution_timer_config(Some(ExecutionTimerConfig {
                limit: budget.time,
                check_interval: MACHINE_CLOCK_INTERVAL,
            }));
            machine.execute_entry_point_by_index(index)
        };
        let (answer, mut is_sound) = watch::run(|| evaluate(0, budget));
        let answer = match answer {
            Ok(answer) => answer,
            Err(error) => return Decision::Failed(failure(&error)),
        };
        // A reason that cannot be evaluated does not change the decision.
        let details = self.entry.details().iter().zip(1..);
        let details: Vec<_> = details
            .map(|((part, _), index)| {
                let (answer, part_is_sound) =
                    watch::run(|| evaluate(index, budget.detail_budget()));
                is_sound &= part_is_sound || *part != Part::Outputs;
                (*part, answer.unwrap_or(regorus::Value::Undefined))
            })
            .collect();
        let mut all = details.iter().map(|(_, answer)| answer);
        if !value::is_shallow(&answer) || !all.all(value::is_shallow) {
            let deep = "it is nested too deeply".to_owned();
            return Decision::Failed(EvaluationError::Shape(deep));
        }
        let decision = Decision::read(&answer);
        if decision.is_refusal() || (self.is_plain && is_sound) {
            return decision.with_parts(details.into_iter());
        }
        // The outputs are part of the decision and need confirmation too; a reason does not.
        let mut outputs = self.entry.details().iter().zip(&details);
        let outputs = outputs.find(|((part, _), _)| *part == Part::Outputs);
        let outputs = outputs.filter(|_| matches!(decision, Decision::Modify { .. }));
        let confirmed = self
            .confirm(self.entry.rule(), input.clone(), &answer, budget.time)
            .and_then(|()| match outputs {
                Some(((_, rule), (_, answer))) => self.confirm(rule, input, answer, budget.time),
                None => Ok(()),
            });
        match confirmed {
            Ok(()) => decision.with_parts(details.into_iter()),
            Err(failure) => Decision::Failed(failure),
        }
    }

    /// Confirms `answer` with the interpreter, which must return the same without an error.
    fn confirm(
        &self,
        rule: &str,
        input: regorus::Value,
        answer: &regorus::Value,
        limit: Duration,
    ) -> Result<(), EvaluationError> {
        let mut engine = self.interpreter.clone();
        engine.set_input(input);
        engine.set_execution_timer_config(ExecutionTimerConfig {
            limit,
            check_interval: INTERPRETER_CLOCK_INTERVAL,
        });
        match engine.eval_rule(rule.to_owned()) {
            Ok(again) if again == *answer => Ok(()),
            Ok(_) => Err(EvaluationError::Error(
                "the two evaluators of Rego disagree about the policy".to_owned(),
            )),
            // A timeout inside a function is only recognisable by its text. The caller retries
            // with a larger budget.
            Err(error)
                if matches!(
                    error.downcast_ref(),
                    Some(LimitError::TimeLimitExceeded { .. })
                ) || error.to_string().contains("exceeded time limit") =>
            {
                Err(EvaluationError::OutOfTime)
            }
            Err(error) => Err(EvaluationError::Error(one_line(&error.to_string()))),
        }
    }

    fn new_machine(&self) -> Result<RegoVM, VmError> {
        let mut machine = RegoVM::new();
        machine.load_program(Arc::clone(&self.program));
        machine.set_strict_builtin_errors(true);
        machine.set_data(self.data.clone())?;
        Ok(machine)
    }
}

/// Prepares the interpreter for cloning, with everything that can be computed once.
fn prepare_interpreter(
    mut engine: Engine,
    entry: &Entry,
    data: regorus::Value,
) -> Result<Engine, BundleError> {
    engine
        .add_data(data)
        .map_err(|error| BundleError::Data(decision::sanitise(&error.to_string())))?;
    engine.set_strict_builtin_errors(true);
    engine
        .compile_with_entrypoint(&entry.rule().into())
        .map_err(|error| policy_error(&error.to_string()))?;
    Ok(engine)
}

/// Limits nesting, because the library parses nested expressions recursively without a limit.
fn check_nesting(module: &Module) -> Result<(), BundleError> {
    let mut depth = 0_usize;
    for (number, line) in module.text.lines().enumerate() {
        for byte in line.bytes() {
            // Brackets in strings and comments count, too; real policies have fewer.
            match byte {
                b'(' | b'[' | b'{' => depth += 1,
                b')' | b']' | b'}' => depth = depth.saturating_sub(1),
                _ => {}
            }
            if depth > MAX_BRACKETS {
                return Err(BundleError::Policy {
                    place: Some(format!("{}:{}", module.name, number + 1)),
                    what: format!("more than {MAX_BRACKETS} brackets are open"),
                });
            }
        }
    }
    Ok(())
}

fn failure(error: &VmError) -> EvaluationError {
    match error {
        VmError::TimeLimitExceeded { .. } => EvaluationError::OutOfTime,
        VmError::InstructionLimitExceeded { .. } => EvaluationError::OutOfSteps,
        other => EvaluationError::Error(decision::sanitise(&other.to_string())),
    }
}

/// Converts an error of the library, which has several lines with a drawing of the source.
fn policy_error(drawn: &str) -> BundleError {
    let (place, what) = parse_error_text(drawn);
    BundleError::Policy { place, what }
}

/// An error of the library as one line: location and error.
fn one_line(drawn: &str) -> String {
    match parse_error_text(drawn) {
        (Some(place), what) => format!("{place}: {what}"),
        (None, what) => what,
    }
}

/// The location and the error in an error text of the library.
fn parse_error_text(drawn: &str) -> (Option<String>, String) {
    let mut lines = drawn.lines().map(str::trim);
    let place = lines.clone().find_map(|line| line.strip_prefix("--> "));
    let what = lines.find_map(|line| line.strip_prefix("error: "));
    (
        place.map(decision::sanitise),
        decision::sanitise(what.unwrap_or(drawn).trim()),
    )
}

#[cfg(test)]
mod tests;
