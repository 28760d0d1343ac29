//! The machine, watched: its program changed so that nothing goes wrong in it unseen.
//!
//! The machine takes a rule in which something went wrong for one that does not apply. Here
//! whatever can go wrong leaves a note, so that a run without one is known to be sound:
//!
//! - built-ins, arithmetic and comparisons are called through functions that note an error;
//! - before a loop stands a look at what it goes through: the interpreter fails at what is no
//!   collection, the machine goes past it;
//! - behind `x := …` stands the check that there is something, which the machine leaves out;
//! - every definition of a rule is evaluated, as the interpreter does it, not only those up to
//!   the first that holds: one of the others may fail.
//!
//! Instructions are put in between, so whatever names a place in the program is moved along.

use std::cell::Cell;
use std::mem::discriminant;
use std::sync::{Arc, LazyLock};

use regorus::Value;
use regorus::rvm::Instruction;
use regorus::rvm::instructions::{BuiltinCallParams, GuardMode};
use regorus::rvm::program::{BuiltinInfo, Program};
use regorus::unstable::{ArithOp, BUILTINS, BoolOp, BuiltinFcn, comparison, numbers, sets};

thread_local! {
    /// Whether something went wrong in the run under way on this thread.
    static FAULT: Cell<bool> = const { Cell::new(false) };
}

/// Runs, and says whether nothing was noted meanwhile.
pub(super) fn run<T>(run: impl FnOnce() -> T) -> (T, bool) {
    FAULT.set(false);
    let answer = run();
    (answer, !FAULT.get())
}

/// Notes an error on its way through.
fn note<T, E>(answer: Result<T, E>) -> Result<T, E> {
    if answer.is_err() {
        FAULT.set(true);
    }
    answer
}

/// Why an operation is refused here and not by the library.
#[derive(Debug, thiserror::Error)]
enum Unfit {
    #[error("values of different types have no order")]
    Types,
    #[error("it takes other arguments")]
    Arguments,
}

/// One function for each built-in, since a function of the library's type knows nothing but
/// its arguments.
macro_rules! watched {
    ($($name:literal)*) => {
        fn watched(name: &str) -> Option<BuiltinFcn> {
            match name {
                $($name => {
                    static OWN: LazyLock<Option<BuiltinFcn>> =
                        LazyLock::new(|| BUILTINS.get($name).copied());
                    let (_, arity) = (*OWN)?;
                    let watched: BuiltinFcn = (
                        |span, params, args, strict| match *OWN {
                            Some((own, _)) => note(own(span, params, args, strict)),
                            None => Ok(note(Err(Unfit::Arguments))?),
                        },
                        arity,
                    );
                    Some(watched)
                })*
                _ => None,
            }
        }
    };
}

// Those that are decided by their arguments and that machine and interpreter call alike.
watched! {
    "abs" "array.concat" "array.reverse" "array.slice" "base64.decode" "base64.encode"
    "base64.is_valid" "base64url.decode" "base64url.encode" "base64url.encode_no_pad" "bits.and"
    "bits.lsh" "bits.negate" "bits.or" "bits.rsh" "bits.xor" "ceil" "concat" "contains" "count"
    "endswith" "floor" "format_int" "glob.match" "glob.quote_meta" "hex.decode" "hex.encode"
    "indexof" "indexof_n" "intersection" "is_array" "is_boolean" "is_null" "is_number"
    "is_object" "is_set" "is_string" "json.filter" "json.is_valid" "json.marshal" "json.remove"
    "json.unmarshal" "lower" "max" "min" "object.filter" "object.get" "object.keys"
    "object.remove" "object.subset" "object.union" "object.union_n" "product" "regex.find_n"
    "regex.is_valid" "regex.match" "regex.replace" "regex.split" "regex.template_match"
    "replace" "round" "semver.compare" "semver.is_valid" "sort" "split" "sprintf" "startswith"
    "strings.any_prefix_match" "strings.any_suffix_match" "strings.count" "strings.replace_n"
    "strings.reverse" "substring" "sum" "to_number" "trim" "trim_left" "trim_prefix"
    "trim_right" "trim_space" "trim_suffix" "type_name" "union" "upper"
}

/// How many arguments the built-in `name` takes, where it can be watched.
pub(super) fn arity(name: &str) -> Option<usize> {
    watched(name).map(|(_, arity)| usize::from(arity))
}

/// What the machine does itself and cannot be trusted to say when it fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Operation {
    Add,
    Sub,
    Mul,
    Div,
    Mod,
    Lt,
    Le,
    Gt,
    Ge,
    /// Looks whether a loop has something to go through.
    Collection,
}

impl Operation {
    /// The operation of an instruction, with its registers: where to, and of what.
    fn of(instruction: Instruction) -> Option<(Self, u8, [u8; 2])> {
        Some(match instruction {
            Instruction::Add { dest, left, right } => (Self::Add, dest, [left, right]),
            Instruction::Sub { dest, left, right } => (Self::Sub, dest, [left, right]),
            Instruction::Mul { dest, left, right } => (Self::Mul, dest, [left, right]),
            Instruction::Div { dest, left, right } => (Self::Div, dest, [left, right]),
            Instruction::Mod { dest, left, right } => (Self::Mod, dest, [left, right]),
            Instruction::Lt { dest, left, right } => (Self::Lt, dest, [left, right]),
            Instruction::Le { dest, left, right } => (Self::Le, dest, [left, right]),
            Instruction::Gt { dest, left, right } => (Self::Gt, dest, [left, right]),
            Instruction::Ge { dest, left, right } => (Self::Ge, dest, [left, right]),
            _ => return None,
        })
    }

    fn function(self) -> BuiltinFcn {
        // The interpreter's own arithmetic, to the letter.
        macro_rules! arithmetic {
            ($operation:expr) => {
                |span, params, args, _| match (params, args) {
                    ([left, right], [one, other]) => {
                        let (one, other) = (one.clone(), other.clone());
                        let is_set =
                            matches!((&one, &other), (Value::Set(_), _) | (_, Value::Set(_)));
                        note(if is_set && $operation == ArithOp::Sub {
                            sets::difference(left, right, one, other)
                        } else {
                            let operation = $operation;
                            numbers::arithmetic_operation(
                                span, &operation, left, right, one, other, true,
                            )
                        })
                    }
                    _ => Ok(note(Err(Unfit::Arguments))?),
                }
            };
        }
        // The machine refuses to order what has different types, the interpreter does not:
        // the stricter of the two counts, as it does without a watch.
        macro_rules! order {
            ($operation:expr) => {
                |_, _, args, _| match args {
                    [one, other] if discriminant(one) == discriminant(other) => {
                        note(comparison::compare(&$operation, one, other))
                    }
                    [_, _] => Ok(note(Err(Unfit::Types))?),
                    _ => Ok(note(Err(Unfit::Arguments))?),
                }
            };
        }
        match self {
            Self::Add => (arithmetic!(ArithOp::Add), 2),
            Self::Sub => (arithmetic!(ArithOp::Sub), 2),
            Self::Mul => (arithmetic!(ArithOp::Mul), 2),
            Self::Div => (arithmetic!(ArithOp::Div), 2),
            Self::Mod => (arithmetic!(ArithOp::Mod), 2),
            Self::Lt => (order!(BoolOp::Lt), 2),
            Self::Le => (order!(BoolOp::Le), 2),
            Self::Gt => (order!(BoolOp::Gt), 2),
            Self::Ge => (order!(BoolOp::Ge), 2),
            Self::Collection => (
                |_, _, args, _| {
                    if !matches!(args, [Value::Array(_) | Value::Object(_) | Value::Set(_)]) {
                        FAULT.set(true);
                    }
                    Ok(Value::Bool(true))
                },
                1,
            ),
        }
    }
}

/// The program with a watch on it. None where it cannot be written.
pub(super) fn program(plain: &Program) -> Option<Program> {
    let mut program = plain.clone();
    let own = program.builtin_info_table.iter();
    // Whatever cannot be watched is only used for words about the decision.
    for (built_in, function) in own.zip(&mut program.resolved_builtins) {
        *function = watched(&built_in.name).unwrap_or(*function);
    }

    let mut writer = Writer {
        known: Vec::new(),
        program: &mut program,
        written: Vec::with_capacity(plain.instructions.len() * 2),
        spans: Vec::with_capacity(plain.instructions.len() * 2),
    };
    // Where each instruction, with what is put before it, begins in the new program.
    let mut places = Vec::with_capacity(plain.instructions.len() + 1);
    let mut rest = plain.instructions.iter().copied().enumerate().peekable();
    while let Some((place, instruction)) = rest.next() {
        places.push(u32::try_from(writer.written.len()).ok()?);
        let span = plain.instruction_spans.get(place).cloned().flatten();
        let next = rest.peek().map(|(_, next)| *next);
        for instruction in writer.rewrite(instruction, next)? {
            writer.written.push(instruction);
            writer.spans.push(span.clone());
        }
    }
    places.push(u32::try_from(writer.written.len()).ok()?);
    let (written, spans) = (writer.written, writer.spans);
    program.instructions = written;
    program.instruction_spans = spans;
    relocate(&mut program, &places)?;
    for rule in &mut program.rule_infos {
        rule.early_exit_on_first_success = false;
        // Each call of a rule copies these, most often for nothing.
        if !rule.else_bodies.iter().flatten().any(|is_else| *is_else) {
            rule.else_bodies.clear();
        }
        if rule.destructuring_blocks.iter().all(Option::is_none) {
            rule.destructuring_blocks.clear();
        }
    }
    program.validate_limits().ok()?;
    Some(program)
}

struct Writer<'a> {
    program: &'a mut Program,
    written: Vec<Instruction>,
    spans: Vec<Option<regorus::rvm::program::SpanInfo>>,
    known: Vec<(Operation, u16)>,
}

impl Writer<'_> {
    fn rewrite(
        &mut self,
        instruction: Instruction,
        next: Option<Instruction>,
    ) -> Option<Vec<Instruction>> {
        if let Some((operation, dest, of)) = Operation::of(instruction) {
            return Some(vec![self.call(operation, dest, &of)?]);
        }
        Some(match instruction {
            Instruction::LoopStart { params_index } => {
                let data = &self.program.instruction_data;
                let params = data.get_loop_params(params_index)?.clone();
                // The loop writes its result there before anything reads it.
                let look = self.call(
                    Operation::Collection,
                    params.result_reg,
                    &[params.collection],
                )?;
                vec![look, instruction]
            }
            // Register 0 has the rule's result, which may be nothing.
            Instruction::Move { dest, .. } if dest != 0 => {
                let is_checked = matches!(
                    next,
                    Some(Instruction::Guard { register, mode: GuardMode::NotUndefined })
                        if register == dest
                );
                let check = Instruction::Guard {
                    register: dest,
                    mode: GuardMode::NotUndefined,
                };
                if is_checked {
                    vec![instruction]
                } else {
                    vec![instruction, check]
                }
            }
            other => vec![other],
        })
    }

    fn call(&mut self, operation: Operation, dest: u8, of: &[u8]) -> Option<Instruction> {
        let builtin_index = self.index(operation)?;
        let mut args = [0; 8];
        args.iter_mut()
            .zip(of)
            .for_each(|(slot, register)| *slot = *register);
        let calls = &self.program.instruction_data.builtin_call_params;
        if calls.len() >= usize::from(u16::MAX) {
            return None;
        }
        let params_index = self.program.add_builtin_call_params(BuiltinCallParams {
            dest,
            builtin_index,
            num_args: u8::try_from(of.len()).ok()?,
            args,
        });
        Some(Instruction::BuiltinCall { params_index })
    }

    /// Where the operation stands among the program's built-ins.
    fn index(&mut self, operation: Operation) -> Option<u16> {
        if let Some((_, index)) = self.known.iter().find(|(known, _)| *known == operation) {
            return Some(*index);
        }
        let function = operation.function();
        let index = u16::try_from(self.program.resolved_builtins.len()).ok()?;
        self.program.resolved_builtins.push(function);
        let listed = self.program.add_builtin_info(BuiltinInfo {
            name: format!("watched.{operation:?}"),
            num_args: u16::from(function.1),
        });
        self.known.push((operation, index));
        (listed == index).then_some(index)
    }
}

/// Moves along whatever names a place.
fn relocate(program: &mut Program, places: &[u32]) -> Option<()> {
    let long = |place: u32| places.get(usize::try_from(place).ok()?).copied();
    let short = |place: u16| u16::try_from(long(u32::from(place))?).ok();
    for instruction in &mut program.instructions {
        if let Instruction::LoopNext {
            body_start,
            loop_end,
        } = instruction
        {
            *body_start = short(*body_start)?;
            *loop_end = short(*loop_end)?;
        }
    }
    for params in &mut program.instruction_data.loop_params {
        params.body_start = short(params.body_start)?;
        params.loop_end = short(params.loop_end)?;
    }
    for params in &mut program.instruction_data.comprehension_begin_params {
        params.body_start = short(params.body_start)?;
        params.comprehension_end = short(params.comprehension_end)?;
    }
    for rule in &mut program.rule_infos {
        let mut definitions = (*rule.definitions).clone();
        for body in definitions.iter_mut().flatten() {
            *body = long(*body)?;
        }
        rule.definitions = Arc::new(definitions);
        for block in rule.destructuring_blocks.iter_mut().flatten() {
            *block = long(*block)?;
        }
    }
    for place in program.entry_points.values_mut() {
        *place = usize::try_from(long(u32::try_from(*place).ok()?)?).ok()?;
    }
    program.main_entry_point = long(program.main_entry_point)?;
    Some(())
}
