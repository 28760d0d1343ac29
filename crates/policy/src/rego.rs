//! Rego bundles: a policy written by the operator, asked for a decision.
//!
//! A bundle is compiled once, to a program for regorus's machine, and decides any number of
//! times. What cannot work is refused when it is compiled, with its file and line: a
//! mistake, an entrypoint that is not there, a built-in function that does not exist or
//! whose answer depends on more than its arguments.
//!
//! **Only a yes that two of them say counts.** The machine decides. It takes a rule in which
//! something went wrong (a built-in that cannot read what it is given, a sum of a number and
//! a text) for one that does not apply, and a policy that allows by default would then fail
//! open. So whatever it does not refuse is put to the library's interpreter, which ends at
//! the first such error. The interpreter alone would not do: it answers 'undefined' to a
//! function it does not know, which the machine's compiler refuses, and counts no steps.
//! Only where it is certain to say the same is it not asked: the policy is plain, and
//! nothing went wrong in the machine, which is watched for that.
//!
//! Every evaluation ends: after so many steps, which is the same everywhere, or after so
//! much time, which is the one place in this crate where a clock is read (the library
//! reads it).

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
pub use self::decision::{Decision, Failure, Said};
use self::entry::Entry;
use crate::verdict::RuleName;

/// Steps between two looks at the clock. A step takes some 50 ns.
const LOOK_EVERY: NonZeroU32 = NonZeroU32::new(128).expect("it is not zero");

/// The same for the interpreter, whose steps are larger.
const LOOK_SELDOM: NonZeroU32 = NonZeroU32::new(32).expect("it is not zero");

/// Built-in functions whose answer is not decided by their arguments.
const IMPURE: [&str; 6] = [
    "http.send",
    "net.lookup_ip_addr",
    "opa.runtime",
    "rand.intn",
    "time.now_ns",
    "uuid.rfc4122",
];

/// Brackets that may be open at a time.
const MOST_BRACKETS: usize = 32;

/// How much one evaluation may take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Budget {
    /// Time.
    pub time: Duration,
    /// Steps of the machine.
    pub steps: usize,
}

impl Budget {
    /// The most steps of one evaluation: more than fit into any sensible time.
    pub const MOST_STEPS: usize = 2_000_000;

    /// As many steps as fit into `time`.
    pub const fn of(time: Duration) -> Self {
        Self {
            time,
            steps: Self::MOST_STEPS,
        }
    }

    /// A part of it, for what only embellishes a decision.
    fn share(self) -> Self {
        Self {
            time: self.time / 4,
            steps: self.steps / 4,
        }
    }
}

/// One file of Rego.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Module {
    /// What it is called in messages: its path in the bundle.
    pub name: String,
    /// Its text.
    pub text: String,
}

/// A policy, ready to decide.
#[derive(Clone)]
pub struct Bundle {
    id: Arc<str>,
    entry: Entry,
    program: Arc<Program>,
    data: regorus::Value,
    /// Whether the machine alone can be trusted with a run in which it noted no fault.
    is_plain: bool,
    /// The interpreter with policy and data; each evaluation has a copy, which shares both.
    strict: Engine,
}

impl std::fmt::Debug for Bundle {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mut said = f.debug_struct("Bundle");
        said.field("id", &self.id).field("rule", &self.rule());
        said.finish_non_exhaustive()
    }
}

/// Why a bundle cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BundleError {
    /// The policy is wrong.
    #[error("{}{what}", place.as_ref().map(|place| format!("{place}: ")).unwrap_or_default())]
    Policy {
        /// File, line and column, where they are known.
        place: Option<String>,
        /// What is wrong there.
        what: String,
    },
    /// There is nothing in it.
    #[error("there is no .rego file in it")]
    Empty,
    /// The entrypoint is no path.
    #[error("'{0}' is no entrypoint: write a path into data such as http/authz")]
    BadEntrypoint(String),
    /// The entrypoint is not there.
    #[error(
        "there is nothing at its entrypoint {0}: it names a rule, or a package with a rule called decision, action or allow"
    )]
    NoEntrypoint(String),
    /// A decision would not be decided by its input.
    #[error("it uses the built-in function {0}, whose answer does not depend on the input alone")]
    Impure(String),
    /// Data that cannot be used.
    #[error("its data cannot be used: {0}")]
    Data(String),
}

impl Bundle {
    /// Compiles `modules` over `data`, to decide by what stands at `entrypoint`.
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
                .map_err(|error| wrong(&error.to_string()))?;
            packages.push((module.name.as_str(), package));
        }
        let entry = Entry::find(&engine, entrypoint, &packages)?;
        let data = value::read(data)
            .filter(|data| matches!(data, regorus::Value::Object(_)))
            .ok_or_else(|| BundleError::Data("it is no object, or nested too deep".to_owned()))?;
        let compiled = engine
            .compile_with_entrypoint(&entry.rule().into())
            .map_err(|error| wrong(&error.to_string()))?;
        let program = Compiler::compile_from_policy(&compiled, &entry.rules())
            .map_err(|error| wrong(&error.to_string()))?;
        let mut used = program.builtin_info_table.iter();
        if let Some(impure) = used.find(|built_in| IMPURE.contains(&built_in.name.as_str())) {
            return Err(BundleError::Impure(impure.name.clone()));
        }
        if program.has_host_await {
            return Err(BundleError::Impure("__builtin_host_await".to_owned()));
        }
        calls::check(&program)?;
        let watched = plain::is_plain(&compiled, &program, &entry.deciding())
            .then(|| watch::program(&program))
            .flatten();
        let is_plain = watched.is_some();
        let program = watched.map_or(program, Arc::new);
        let strict = strict(engine, &entry, data.clone())?;
        let bundle = Self {
            id: id.into(),
            entry,
            program,
            data,
            is_plain,
            strict,
        };
        // What data and rules both define shows only here.
        bundle
            .machine()
            .map_err(|error| BundleError::Data(decision::clean(&error.to_string())))?;
        Ok(bundle)
    }

    /// Its name.
    pub fn id(&self) -> &str {
        &self.id
    }

    /// Its name among rules: `rego:<id>`.
    pub fn rule_name(&self) -> RuleName {
        format!("rego:{}", self.id).into()
    }

    /// The rule that decides, as a path: `data.http.authz.allow`.
    pub fn rule(&self) -> &str {
        self.entry.rule()
    }

    /// Decides about `input`.
    pub fn decide(&self, input: &serde_json::Value, budget: Budget) -> Decision {
        let Some(input) = value::read(input) else {
            return Decision::Failed(Failure::Error("the input is nested too deep".to_owned()));
        };
        // The library means not to panic, and its built-ins are many.
        catch_unwind(AssertUnwindSafe(|| self.run(input, budget)))
            .unwrap_or_else(|_| Decision::Failed(Failure::Error("the evaluation panicked".into())))
    }

    fn run(&self, input: regorus::Value, budget: Budget) -> Decision {
        let mut machine = match self.machine() {
            Ok(machine) => machine,
            Err(error) => return Decision::Failed(failure(&error)),
        };
        machine.set_input(input.clone());
        let mut ask = |index: usize, budget: Budget| {
            machine.set_max_instructions(budget.steps);
            machine.set_execution_timer_config(Some(ExecutionTimerConfig {
                limit: budget.time,
                check_interval: LOOK_EVERY,
            }));
            machine.execute_entry_point_by_index(index)
        };
        let (answer, mut is_sound) = watch::run(|| ask(0, budget));
        let answer = match answer {
            Ok(answer) => answer,
            Err(error) => return Decision::Failed(failure(&error)),
        };
        // A reason that cannot be had does not change the decision.
        let beside = self.entry.beside().iter().zip(1..);
        let beside: Vec<_> = beside
            .map(|((part, _), index)| {
                let (answer, part_is_sound) = watch::run(|| ask(index, budget.share()));
                is_sound &= part_is_sound || *part != Part::Outputs;
                (*part, answer.unwrap_or(regorus::Value::Undefined))
            })
            .collect();
        let mut all = beside.iter().map(|(_, answer)| answer);
        if !value::is_shallow(&answer) || !all.all(value::is_shallow) {
            let deep = "it is nested too deep".to_owned();
            return Decision::Failed(Failure::Shape(deep));
        }
        let decision = Decision::read(&answer);
        if decision.is_refusal() || (self.is_plain && is_sound) {
            return decision.hear(beside.into_iter());
        }
        // What is to be changed is a part of the decision, where a reason is not.
        let mut outputs = self.entry.beside().iter().zip(&beside);
        let outputs = outputs.find(|((part, _), _)| *part == Part::Outputs);
        let outputs = outputs.filter(|_| matches!(decision, Decision::Modify { .. }));
        let confirmed = self
            .confirm(self.entry.rule(), input.clone(), &answer, budget.time)
            .and_then(|()| match outputs {
                Some(((_, rule), (_, answer))) => self.confirm(rule, input, answer, budget.time),
                None => Ok(()),
            });
        match confirmed {
            Ok(()) => decision.hear(beside.into_iter()),
            Err(failure) => Decision::Failed(failure),
        }
    }

    /// Asks the interpreter, too: it has to come to the same answer without an error.
    fn confirm(
        &self,
        rule: &str,
        input: regorus::Value,
        answer: &regorus::Value,
        limit: Duration,
    ) -> Result<(), Failure> {
        let mut engine = self.strict.clone();
        engine.set_input(input);
        engine.set_execution_timer_config(ExecutionTimerConfig {
            limit,
            check_interval: LOOK_SELDOM,
        });
        match engine.eval_rule(rule.to_owned()) {
            Ok(again) if again == *answer => Ok(()),
            Ok(_) => Err(Failure::Error(
                "the policy can be read in two ways".to_owned(),
            )),
            // The error of a function comes as text, and this one is tried again elsewhere.
            Err(error)
                if matches!(
                    error.downcast_ref(),
                    Some(LimitError::TimeLimitExceeded { .. })
                ) || error.to_string().contains("exceeded time limit") =>
            {
                Err(Failure::OutOfTime)
            }
            Err(error) => Err(Failure::Error(said(&error.to_string()))),
        }
    }

    fn machine(&self) -> Result<RegoVM, VmError> {
        let mut machine = RegoVM::new();
        machine.load_program(Arc::clone(&self.program));
        machine.set_strict_builtin_errors(true);
        machine.set_data(self.data.clone())?;
        Ok(machine)
    }
}

/// The interpreter, ready to be copied: what can be worked out once is.
fn strict(mut engine: Engine, entry: &Entry, data: regorus::Value) -> Result<Engine, BundleError> {
    engine
        .add_data(data)
        .map_err(|error| BundleError::Data(decision::clean(&error.to_string())))?;
    engine.set_strict_builtin_errors(true);
    engine
        .compile_with_entrypoint(&entry.rule().into())
        .map_err(|error| wrong(&error.to_string()))?;
    Ok(engine)
}

/// The library reads nested expressions on the thread's own stack, however deep they are.
fn check_nesting(module: &Module) -> Result<(), BundleError> {
    let mut depth = 0_usize;
    for (number, line) in module.text.lines().enumerate() {
        for byte in line.bytes() {
            // Brackets in texts and comments count, too: nobody writes so many.
            match byte {
                b'(' | b'[' | b'{' => depth += 1,
                b')' | b']' | b'}' => depth = depth.saturating_sub(1),
                _ => {}
            }
            if depth > MOST_BRACKETS {
                return Err(BundleError::Policy {
                    place: Some(format!("{}:{}", module.name, number + 1)),
                    what: format!("more than {MOST_BRACKETS} brackets are open"),
                });
            }
        }
    }
    Ok(())
}

fn failure(error: &VmError) -> Failure {
    match error {
        VmError::TimeLimitExceeded { .. } => Failure::OutOfTime,
        VmError::InstructionLimitExceeded { .. } => Failure::OutOfSteps,
        other => Failure::Error(decision::clean(&other.to_string())),
    }
}

/// The library draws its errors over several lines; we say place and fault in one.
fn wrong(drawn: &str) -> BundleError {
    let (place, what) = read_drawing(drawn);
    BundleError::Policy { place, what }
}

fn said(drawn: &str) -> String {
    match read_drawing(drawn) {
        (Some(place), what) => format!("{place}: {what}"),
        (None, what) => what,
    }
}

/// Where, and what.
fn read_drawing(drawn: &str) -> (Option<String>, String) {
    let mut lines = drawn.lines().map(str::trim);
    let place = lines.clone().find_map(|line| line.strip_prefix("--> "));
    let what = lines.find_map(|line| line.strip_prefix("error: "));
    (
        place.map(decision::clean),
        decision::clean(what.unwrap_or(drawn).trim()),
    )
}

#[cfg(test)]
mod tests;
