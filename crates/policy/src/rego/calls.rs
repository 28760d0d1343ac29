//! The call graph of rules, and its depth limit.
//!
//! Machine and interpreter evaluate calls recursively without a limit, so a recursive rule would
//! overflow the thread's stack and end the process. Rego forbids recursion, but the library does
//! not detect all of it.

use std::collections::{BTreeMap, BTreeSet};

use regorus::Value;
use regorus::rvm::Instruction;
use regorus::rvm::instructions::LiteralOrRegister;
use regorus::rvm::program::Program;

use super::BundleError;

/// Maximum depth of calls between rules. One call takes about 30 KB of the stack in the
/// interpreter, without optimisation.
const MAX_DEPTH: usize = 16;

/// Rejects a program that could overflow the stack.
pub(super) fn check_depth(program: &Program) -> Result<(), BundleError> {
    let calls = read_calls(program);
    let mut depths = vec![Depth::Unknown; program.rule_infos.len()];
    for rule in 0..depths.len() {
        measure(rule, &calls, &mut depths, 0).map_err(|fault| {
            let name = program.rule_infos.get(fault.rule).map(|info| &info.name);
            let name = name.map_or("a rule", String::as_str);
            let what = if fault.is_cycle {
                format!("{name} calls itself, directly or through others (recursion)")
            } else {
                format!("{name} is called through more than {MAX_DEPTH} others")
            };
            BundleError::Policy { place: None, what }
        })?;
    }
    Ok(())
}

/// The rules that an evaluation of `roots` may call.
pub(super) fn find_reachable_rules(program: &Program, roots: &[&str]) -> BTreeSet<usize> {
    let calls = read_calls(program);
    let rules = program.rule_infos.iter().enumerate();
    let mut found: BTreeSet<usize> = rules
        .filter(|(_, info)| roots.contains(&info.name.as_str()))
        .map(|(rule, _)| rule)
        .collect();
    let mut open: Vec<usize> = found.iter().copied().collect();
    while let Some(rule) = open.pop() {
        let called = calls.get(&rule).into_iter().flatten();
        open.extend(called.filter(|called| found.insert(**called)));
    }
    found
}

/// Each instruction, with the rule it belongs to.
pub(super) fn instructions(
    program: &Program,
) -> impl Iterator<Item = (Option<usize>, &Instruction)> {
    let rule_starts = rule_starts(program);
    let instructions = program.instructions.iter().enumerate();
    instructions.map(move |(index, instruction)| {
        let rule = rule_starts
            .range(..=index)
            .next_back()
            .map(|(_, rule)| *rule);
        // Instructions before the first rule are the entry points.
        (rule, instruction)
    })
}

/// The depth of the calls of one rule.
#[derive(Clone, Copy)]
enum Depth {
    Unknown,
    BeingMeasured,
    Known(usize),
}

/// A rule whose calls are nested too deeply or form a cycle.
struct CallFault {
    rule: usize,
    is_cycle: bool,
}

/// The depth of calls of `rule`. The recursion of this function is limited to the maximum depth.
fn measure(
    rule: usize,
    calls: &BTreeMap<usize, Vec<usize>>,
    depths: &mut [Depth],
    depth_above: usize,
) -> Result<usize, CallFault> {
    let deep = CallFault {
        rule,
        is_cycle: false,
    };
    match depths.get(rule) {
        Some(Depth::Known(depth)) if depth_above + depth <= MAX_DEPTH => return Ok(*depth),
        Some(Depth::Known(_)) => return Err(deep),
        Some(Depth::BeingMeasured) => {
            return Err(CallFault {
                is_cycle: true,
                ..deep
            });
        }
        Some(Depth::Unknown) | None => {}
    }
    if depth_above >= MAX_DEPTH {
        return Err(deep);
    }
    let set = |depths: &mut [Depth], depth| {
        if let Some(slot) = depths.get_mut(rule) {
            *slot = depth;
        }
    };
    set(depths, Depth::BeingMeasured);
    let mut depth = 1;
    for called in calls.get(&rule).into_iter().flatten() {
        depth = depth.max(1 + measure(*called, calls, depths, depth_above + 1)?);
    }
    set(depths, Depth::Known(depth));
    Ok(depth)
}

/// The calls of each rule.
fn read_calls(program: &Program) -> BTreeMap<usize, Vec<usize>> {
    let mut calls: BTreeMap<usize, Vec<usize>> = BTreeMap::new();
    for (rule, instruction) in instructions(program) {
        if let Some(rule) = rule {
            calls
                .entry(rule)
                .or_default()
                .extend(called_rules(program, instruction));
        }
    }
    calls
}

/// The start of each part of a rule, with the index of its rule.
fn rule_starts(program: &Program) -> BTreeMap<usize, usize> {
    let mut rule_starts = BTreeMap::new();
    for (rule, info) in program.rule_infos.iter().enumerate() {
        let bodies = info.definitions.iter().flatten();
        let starts = bodies.chain(info.destructuring_blocks.iter().flatten());
        rule_starts.extend(starts.map(|start| (*start as usize, rule)));
    }
    rule_starts
}

fn called_rules(program: &Program, instruction: &Instruction) -> Vec<usize> {
    let data = &program.instruction_data;
    match instruction {
        Instruction::CallRule { rule_index, .. } => vec![usize::from(*rule_index)],
        Instruction::FunctionCall { params_index } => data
            .get_function_call_params(*params_index)
            .map(|params| usize::from(params.func_rule_index))
            .into_iter()
            .collect(),
        Instruction::VirtualDataDocumentLookup { params_index } => {
            let params = data.get_virtual_data_document_lookup_params(*params_index);
            let path = params.map_or(&[][..], |params| &params.path_components);
            let rules = program.rule_infos.iter().enumerate();
            rules
                .filter(|(_, info)| may_match(program, path, &info.name))
                .map(|(rule, _)| rule)
                .collect()
        }
        _ => Vec::new(),
    }
}

/// Whether a path with parts that are known only at run time can match the rule `name`, or a path
/// above or below it.
fn may_match(program: &Program, path: &[LiteralOrRegister], name: &str) -> bool {
    // Names with brackets are not split.
    let parts = name.split('.').skip(1);
    name.contains('[')
        || path.iter().zip(parts).all(|(looked_up, part)| {
            let LiteralOrRegister::Literal(index) = looked_up else {
                return true;
            };
            match program.literals.get(usize::from(*index)) {
                Some(Value::String(text)) => &**text == part,
                _ => true,
            }
        })
}
