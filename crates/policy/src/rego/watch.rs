//! Instruments the machine's program so that every error in it is recorded.
//!
//! The machine treats a rule in which an error occurred as one that does not apply. The
//! instrumented program records errors, so that a run without a record is known to be free of them:
//!
//! - built-ins, arithmetic and comparisons are called through functions that record errors;
//! - before a loop, its collection is checked: the interpreter fails if it is not a collection,
//!   the machine skips the loop;
//! - after `x := …`, a check that the value is defined is added, which the machine omits;
//! - every definition of a rule is evaluated, as in the interpreter, not only those up to the first
//!   that succeeds, because one of the others may fail.
//!
//! Instructions are inserted, so all addresses in the program are adjusted.

use std::cell::Cell;
use std::mem::discriminant;
use std::sync::{Arc, LazyLock};

use regorus::Value;
use regorus::rvm::Instruction;
use regorus::rvm::instructions::{BuiltinCallParams, GuardMode};
use regorus::rvm::program::{BuiltinInfo, Program};
use regorus::unstable::{ArithOp, BUILTINS, BoolOp, BuiltinFcn, comparison, numbers, sets};

thread_local! {
    /// Whether an error occurred in the current run on this thread.
    static ERROR_OCCURRED: Cell<bool> = const { Cell::new(false) };
}

/// Calls `run`, and returns its result and whether no error was recorded.
pub(super) fn run<T>(run: impl FnOnce() -> T) -> (T, bool) {
    ERROR_OCCURRED.set(false);
    let answer = run();
    (answer, !ERROR_OCCURRED.get())
}

/// Records the error of `answer`, if it is one, and returns it.
fn record<T, E>(answer: Result<T, E>) -> Result<T, E> {
    if answer.is_err() {
        ERROR_OCCURRED.set(true);
    }
    answer
}

/// Errors of operations that are implemented here and not in the library.
#[derive(Debug, thiserror::Error)]
enum OperationError {
    #[error("values of different types have no order")]
    Types,
    #[error("the arguments are invalid")]
    Arguments,
}

/// Defines one wrapper function for each built-in: the library's function type has no state, so
/// one wrapper could not know which built-in to call.
macro_rules! watched {
    ($($name:literal)*) => {
        fn wrapper(name: &str) -> Option<BuiltinFcn> {
            match name {
                $($name => {
                    static OWN: LazyLock<Option<BuiltinFcn>> =
                        LazyLock::new(|| BUILTINS.get($name).copied());
                    let (_, arity) = (*OWN)?;
                    let watched: BuiltinFcn = (
                        |span, params, args, strict| match *OWN {
                            Some((own, _)) => record(own(span, params, args, strict)),
                            None => Ok(record(Err(OperationError::Arguments))?),
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

// Built-ins that depend on their arguments alone and that machine and interpreter call alike.
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

/// The number of arguments of the built-in `name`, if it has a wrapper.
pub(super) fn arity(name: &str) -> Option<usize> {
    wrapper(name).map(|(_, arity)| usize::from(arity))
}

/// Operations of the machine whose errors it does not report.
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
    /// Checks that the operand of a loop is a collection.
    Collection,
}

impl Operation {
    /// The operation of an instruction, with its destination and operand registers.
    fn from_instruction(instruction: Instruction) -> Option<(Self, u8, [u8; 2])> {
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
        // The same arithmetic as in the interpreter.
        macro_rules! arithmetic {
            ($operation:expr) => {
                |span, params, args, _| match (params, args) {
                    ([left, right], [one, other]) => {
                        let (one, other) = (one.clone(), other.clone());
                        let is_set =
                            matches!((&one, &other), (Value::Set(_), _) | (_, Value::Set(_)));
                        record(if is_set && $operation == ArithOp::Sub {
                            sets::difference(left, right, one, other)
                        } else {
                            let operation = $operation;
                            numbers::arithmetic_operation(
                                span, &operation, left, right, one, other, true,
                            )
                        })
                    }
                    _ => Ok(record(Err(OperationError::Arguments))?),
                }
            };
        }
        // The machine does not order values of different types, the interpreter does. The
        // instrumented program fails, as the stricter of the two does.
        macro_rules! order {
            ($operation:expr) => {
                |_, _, args, _| match args {
                    [one, other] if discriminant(one) == discriminant(other) => {
                        record(comparison::compare(&$operation, one, other))
                    }
                    [_, _] => Ok(record(Err(OperationError::Types))?),
                    _ => Ok(record(Err(OperationError::Arguments))?),
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
                        ERROR_OCCURRED.set(true);
                    }
                    Ok(Value::Bool(true))
                },
                1,
            ),
        }
    }
}

/// The instrumented program. None if it would exceed a limit of the machine.
pub(super) fn instrument(plain: &Program) -> Option<Program> {
    let mut program = plain.clone();
    let own = program.builtin_info_table.iter();
    // Built-ins without a wrapper are only used for details of the decision.
    for (built_in, function) in own.zip(&mut program.resolved_builtins) {
        *function = wrapper(&built_in.name).unwrap_or(*function);
    }

    let mut writer = Writer {
        known: Vec::new(),
        program: &mut program,
        written: Vec::with_capacity(plain.instructions.len() * 2),
        spans: Vec::with_capacity(plain.instructions.len() * 2),
    };
    // The new address of each instruction, including the instructions inserted before it.
    let mut addresses = Vec::with_capacity(plain.instructions.len() + 1);
    let mut rest = plain.instructions.iter().copied().enumerate().peekable();
    while let Some((address, instruction)) = rest.next() {
        addresses.push(u32::try_from(writer.written.len()).ok()?);
        let span = plain.instruction_spans.get(address).cloned().flatten();
        let next = rest.peek().map(|(_, next)| *next);
        for instruction in writer.rewrite(instruction, next)? {
            writer.written.push(instruction);
            writer.spans.push(span.clone());
        }
    }
    addresses.push(u32::try_from(writer.written.len()).ok()?);
    let (written, spans) = (writer.written, writer.spans);
    program.instructions = written;
    program.instruction_spans = spans;
    relocate(&mut program, &addresses)?;
    for rule in &mut program.rule_infos {
        rule.early_exit_on_first_success = false;
        // Each call of a rule copies these lists, which are mostly without content.
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

/// The instrumented program under construction.
struct Writer<'a> {
    program: &'a mut Program,
    written: Vec<Instruction>,
    spans: Vec<Option<regorus::rvm::program::SpanInfo>>,
    /// The index of each operation that was added to the built-ins.
    known: Vec<(Operation, u16)>,
}

impl Writer<'_> {
    fn rewrite(
        &mut self,
        instruction: Instruction,
        next: Option<Instruction>,
    ) -> Option<Vec<Instruction>> {
        if let Some((operation, dest, operands)) = Operation::from_instruction(instruction) {
            return Some(vec![self.call(operation, dest, &operands)?]);
        }
        Some(match instruction {
            Instruction::LoopStart { params_index } => {
                let data = &self.program.instruction_data;
                let params = data.get_loop_params(params_index)?.clone();
                // The loop overwrites its result register before it is read.
                let check = self.call(
                    Operation::Collection,
                    params.result_reg,
                    &[params.collection],
                )?;
                vec![check, instruction]
            }
            // Register 0 is the rule's result, which may be undefined.
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

    fn call(&mut self, operation: Operation, dest: u8, operands: &[u8]) -> Option<Instruction> {
        let builtin_index = self.operation_index(operation)?;
        let mut args = [0; 8];
        args.iter_mut()
            .zip(operands)
            .for_each(|(slot, register)| *slot = *register);
        let calls = &self.program.instruction_data.builtin_call_params;
        if calls.len() >= usize::from(u16::MAX) {
            return None;
        }
        let params_index = self.program.add_builtin_call_params(BuiltinCallParams {
            dest,
            builtin_index,
            num_args: u8::try_from(operands.len()).ok()?,
            args,
        });
        Some(Instruction::BuiltinCall { params_index })
    }

    /// The index of the operation among the program's built-ins.
    fn operation_index(&mut self, operation: Operation) -> Option<u16> {
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

/// Adjusts all addresses in the program.
fn relocate(program: &mut Program, addresses: &[u32]) -> Option<()> {
    let long = |address: u32| addresses.get(usize::try_from(address).ok()?).copied();
    let short = |address: u16| u16::try_from(long(u32::from(address))?).ok();
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
    for address in program.entry_points.values_mut() {
        *address = usize::try_from(long(u32::try_from(*address).ok()?)?).ok()?;
    }
    program.main_entry_point = long(program.main_entry_point)?;
    Some(())
}
