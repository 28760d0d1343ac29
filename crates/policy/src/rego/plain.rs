//! Detects plain policies: those in the subset of Rego that machine and interpreter evaluate alike
//! as long as no error occurs.
//!
//! The subset is a list of constructs for which a review of the code of both has shown the same
//! results. All others are not plain, and every decision of such a policy that is not a refusal is
//! confirmed by the interpreter. These are excluded because the machine evaluates them differently:
//!
//! - `else`: ignored after a loop;
//! - comprehensions and `every` in a loop: a condition that fails inside them ends an iteration of
//!   the outer loop; `input` that is first read inside one is not available after it;
//! - several values of one rule, from a loop or from several definitions: the machine uses the last
//!   value or none, where the interpreter fails (so only equal constants are plain, except in the
//!   definitions of the rule that decides, which is then undefined, and that denies);
//! - duplicate keys in an object or a comprehension: the last one counts;
//! - patterns in parameters, `:=` and `some`, and parameters named `_`: undefined values match;
//! - packages as values (`data.lists`), which the interpreter evaluates completely.

use std::collections::{BTreeMap, BTreeSet};

use regorus::rvm::Instruction;
use regorus::rvm::instructions::LoopMode;
use regorus::rvm::program::{Program, RuleInfo, RuleType};
use regorus::unstable::{
    AssignOp, BUILTINS, Expr, Literal, LiteralStmt, Module, Ref, Rule, RuleBody, RuleHead,
};
use regorus::{CompiledPolicy, Value};

use super::{calls, watch};

/// Whether all rules of `policy` that the rules `deciding` of `program` call are plain. The first
/// of `deciding` is the rule that decides.
pub(super) fn is_plain(policy: &CompiledPolicy, program: &Program, deciding: &[&str]) -> bool {
    let reached = calls::find_reachable_rules(program, deciding);
    let mut needed = calls::instructions(program)
        .filter(|(rule, _)| rule.is_none_or(|rule| reached.contains(&rule)));
    needed.all(|(_, instruction)| is_watched(program, *instruction))
        && PolicyNames::read(policy, program, &reached, deciding).is_some_and(|names| {
            let modules = policy.get_modules().iter();
            modules.zip(&names.packages).all(|(module, package)| {
                let rules = module.policy.iter();
                rules
                    .map(|rule| names.is_plain_rule(package, rule))
                    .all(|plain| plain == Some(true))
            })
        })
}

/// Whether all errors of the instruction are recorded by [`watch`].
fn is_watched(program: &Program, instruction: Instruction) -> bool {
    let data = &program.instruction_data;
    match instruction {
        Instruction::Load { .. }
        | Instruction::LoadTrue { .. }
        | Instruction::LoadFalse { .. }
        | Instruction::LoadNull { .. }
        | Instruction::LoadBool { .. }
        | Instruction::LoadData { .. }
        | Instruction::LoadInput { .. }
        | Instruction::Move { .. }
        | Instruction::Add { .. }
        | Instruction::Sub { .. }
        | Instruction::Mul { .. }
        | Instruction::Div { .. }
        | Instruction::Mod { .. }
        | Instruction::Eq { .. }
        | Instruction::Ne { .. }
        | Instruction::Lt { .. }
        | Instruction::Le { .. }
        | Instruction::Gt { .. }
        | Instruction::Ge { .. }
        | Instruction::Not { .. }
        | Instruction::Guard { .. }
        | Instruction::BuiltinCall { .. }
        | Instruction::Return { .. }
        | Instruction::RuleInit { .. }
        | Instruction::RuleReturn {}
        | Instruction::DestructuringSuccess {}
        | Instruction::ObjectCreate { .. }
        | Instruction::ArrayCreate { .. }
        | Instruction::SetCreate { .. }
        | Instruction::SetAdd { .. }
        | Instruction::Index { .. }
        | Instruction::IndexLiteral { .. }
        | Instruction::ChainedIndex { .. }
        | Instruction::Contains { .. }
        | Instruction::LoopNext { .. }
        | Instruction::Halt {} => true,
        Instruction::LoopStart { params_index } => data
            .get_loop_params(params_index)
            .is_some_and(|params| params.mode == LoopMode::ForEach),
        Instruction::CallRule { rule_index, .. } => program
            .get_rule_info(usize::from(rule_index))
            .is_some_and(|rule| rule.function_info.is_none()),
        Instruction::FunctionCall { params_index } => data
            .get_function_call_params(params_index)
            .and_then(|call| program.get_rule_info(usize::from(call.func_rule_index)))
            .is_some_and(|rule| rule.function_info.is_some()),
        _ => false,
    }
}

/// The names that a policy declares.
struct PolicyNames<'a> {
    /// The package of each module, as a path.
    packages: Vec<String>,
    /// Every rule by its path; for a function, with its number of parameters.
    rules: BTreeMap<String, Option<usize>>,
    /// The rules that the evaluation may call.
    used: BTreeMap<&'a str, &'a RuleInfo>,
    /// The rule that decides.
    entry: &'a str,
    /// Reserved names: the first components of built-in functions' names.
    reserved: BTreeSet<&'static str>,
}

/// One body of a rule, with its local variables.
struct Body<'a> {
    names: &'a PolicyNames<'a>,
    package: &'a str,
    locals: BTreeSet<&'a str>,
    has_loop: bool,
}

impl<'a> PolicyNames<'a> {
    fn read(
        policy: &CompiledPolicy,
        program: &'a Program,
        reached: &BTreeSet<usize>,
        deciding: &[&'a str],
    ) -> Option<Self> {
        let words = BUILTINS.keys().filter_map(|name| name.split('.').next());
        let mut names = Self {
            packages: Vec::new(),
            rules: BTreeMap::new(),
            used: BTreeMap::new(),
            entry: deciding.first()?,
            reserved: words.chain(["data", "input", "print", "walk"]).collect(),
        };
        for module in policy.get_modules() {
            let package = format!("data.{}", path(&module.package.refr)?);
            names.declare(&package, module)?;
            names.packages.push(package);
        }
        let used = reached.iter();
        let used = used.filter_map(|rule| program.get_rule_info(*rule));
        names.used = used.map(|rule| (rule.name.as_str(), rule)).collect();
        // A rule whose path is the prefix of another rule or package is a composite document.
        let is_document = names.rules.keys().any(|rule| {
            let mut paths = names.rules.keys().chain(&names.packages);
            let below = format!("{rule}.");
            names.packages.contains(rule) || paths.any(|path| path.starts_with(&below))
        });
        (!is_document).then_some(names)
    }

    fn declare(&mut self, package: &str, module: &Module) -> Option<()> {
        // A package without rules is an empty object in one evaluator and undefined in the other.
        if module.policy.is_empty() || module.target.is_some() {
            return None;
        }
        for import in &module.imports {
            let path = path(&import.refr)?;
            let is_language = matches!(path.split('.').next(), Some("rego" | "future"));
            if !is_language || import.r#as.is_some() {
                return None;
            }
        }
        for rule in &module.policy {
            let (refr, parameters) = match rule.as_ref() {
                Rule::Spec { head, .. } => match head {
                    RuleHead::Compr { refr, .. } | RuleHead::Set { refr, .. } => (refr, None),
                    RuleHead::Func { refr, args, .. } => (refr, Some(args.len())),
                },
                Rule::Default { refr, args, .. } if args.is_empty() => (refr, None),
                Rule::Default { .. } => return None,
            };
            let name = variable(refr).filter(|name| !self.reserved.contains(name))?;
            let path = format!("{package}.{name}");
            if *self.rules.entry(path).or_insert(parameters) != parameters {
                return None;
            }
        }
        Some(())
    }

    /// Whether a rule is plain, or not used. None if that cannot be determined.
    fn is_plain_rule(&self, package: &str, rule: &Ref<Rule>) -> Option<bool> {
        let (head, bodies) = match rule.as_ref() {
            Rule::Spec { head, bodies, .. } => (head, bodies),
            Rule::Default { value, .. } => return Some(is_constant(value)),
        };
        let (RuleHead::Compr { refr, .. }
        | RuleHead::Set { refr, .. }
        | RuleHead::Func { refr, .. }) = head;
        let Some(info) = self
            .used
            .get(format!("{package}.{}", variable(refr)?).as_str())
        else {
            return Some(true);
        };
        let mut body = Body {
            names: self,
            package,
            locals: BTreeSet::new(),
            has_loop: false,
        };
        let has_plain_body = match bodies.as_slice() {
            [] => body.declare_parameters(head),
            [
                RuleBody {
                    assign: None,
                    is_else: false,
                    query,
                    ..
                },
            ] => {
                body.declare_parameters(head)
                    && body.declare_all(&query.stmts)
                    && query.stmts.iter().all(|one| body.is_plain_statement(one))
            }
            _ => false,
        };
        if !has_plain_body {
            return Some(false);
        }
        // Several definitions must have the same value, which the compiler detects. The rule that
        // decides may have several values: no rule reads it, and if undefined it denies.
        let is_single = info.definitions.len() == 1
            || info.early_exit_on_first_success
            || info.name == self.entry;
        Some(match head {
            RuleHead::Compr { assign, .. } | RuleHead::Func { assign, .. } => {
                let value = assign.as_ref().map(|assign| &assign.value);
                let is_function = matches!(head, RuleHead::Func { .. });
                info.rule_type == RuleType::Complete
                    && info.function_info.is_some() == is_function
                    && is_single
                    && value.map_or(!bodies.is_empty(), |value| {
                        is_constant(value) || (!body.has_loop && body.is_plain(value))
                    })
            }
            // An undefined member makes the interpreter's set empty.
            RuleHead::Set { key: Some(key), .. } => {
                info.rule_type == RuleType::PartialSet
                    && (is_constant(key)
                        || variable(key).is_some_and(|name| body.locals.contains(name)))
            }
            RuleHead::Set { key: None, .. } => false,
        })
    }
}

impl<'a> Body<'a> {
    /// Declares a local variable. False if its name is reserved or declared already.
    fn declare(&mut self, expr: &'a Ref<Expr>) -> bool {
        let Some(name) = variable(expr) else {
            return false;
        };
        let rule = format!("{}.{name}", self.package);
        let is_free = !self.names.reserved.contains(name) && !self.names.rules.contains_key(&rule);
        is_free && name != "_" && self.locals.insert(name)
    }

    fn declare_parameters(&mut self, head: &'a RuleHead) -> bool {
        match head {
            RuleHead::Func { args, .. } => {
                (1..=8).contains(&args.len()) && args.iter().all(|arg| self.declare(arg))
            }
            RuleHead::Compr { .. } | RuleHead::Set { .. } => true,
        }
    }

    /// Declares all local variables. Statements are not evaluated in source order, so this comes
    /// first.
    fn declare_all(&mut self, statements: &'a [LiteralStmt]) -> bool {
        statements.iter().all(|statement| match &statement.literal {
            Literal::SomeIn { key, value, .. } => {
                self.has_loop = true;
                let mut bound = key.iter().chain([value]);
                bound.all(|name| variable(name) == Some("_") || self.declare(name))
            }
            Literal::Expr { expr, .. } => match expr.as_ref() {
                Expr::AssignExpr { lhs, .. } => self.declare(lhs),
                _ => true,
            },
            _ => true,
        })
    }

    fn is_plain_statement(&self, statement: &LiteralStmt) -> bool {
        statement.with_mods.is_empty()
            && match &statement.literal {
                Literal::Expr { expr, .. } => match expr.as_ref() {
                    Expr::AssignExpr {
                        op: AssignOp::ColEq,
                        rhs,
                        ..
                    } => self.is_plain(rhs),
                    _ => self.is_plain(expr),
                },
                Literal::NotExpr { expr, .. } => self.is_plain(expr),
                Literal::SomeIn { collection, .. } => self.is_plain(collection),
                Literal::SomeVars { .. } | Literal::Every { .. } => false,
            }
    }

    fn is_plain(&self, expr: &Ref<Expr>) -> bool {
        match expr.as_ref() {
            _ if is_constant(expr) => true,
            Expr::Var { .. } | Expr::RefDot { .. } | Expr::RefBrack { .. } => {
                self.is_plain_reference(expr)
            }
            Expr::Array { items, .. } | Expr::Set { items, .. } => {
                items.iter().all(|item| self.is_plain(item))
            }
            Expr::Object { fields, .. } => {
                has_distinct_string_keys(fields)
                    && fields.iter().all(|(_, _, value)| self.is_plain(value))
            }
            Expr::BoolExpr { lhs, rhs, .. } | Expr::ArithExpr { lhs, rhs, .. } => {
                self.is_plain(lhs) && self.is_plain(rhs)
            }
            Expr::Membership {
                key: None,
                value,
                collection,
                ..
            } => self.is_plain(value) && self.is_plain(collection),
            Expr::Call { fcn, params, .. } => {
                let parameter_count = path(fcn).and_then(|name| self.parameters_of(&name));
                parameter_count == Some(params.len())
                    && params.iter().all(|param| self.is_plain(param))
            }
            _ => false,
        }
    }

    /// The number of parameters of a function.
    fn parameters_of(&self, name: &str) -> Option<usize> {
        let rules = &self.names.rules;
        if name.starts_with("data.") {
            return rules.get(name).copied().flatten();
        }
        // The names of built-ins are reserved, so the order of the lookups does not matter.
        let own = rules.get(&format!("{}.{name}", self.package));
        own.copied().flatten().or_else(|| watch::arity(name))
    }

    /// Whether a reference is plain: a name with literal fields and indices.
    fn is_plain_reference(&self, expr: &Ref<Expr>) -> bool {
        let (mut root, mut has_index) = (expr, false);
        loop {
            match root.as_ref() {
                Expr::RefDot { refr, .. } => root = refr,
                Expr::RefBrack { refr, index, .. } => {
                    match index.as_ref() {
                        Expr::String { .. } => {}
                        Expr::Number { .. } => has_index = true,
                        _ => return false,
                    }
                    root = refr;
                }
                Expr::Var { .. } => break,
                _ => return false,
            }
        }
        let Some(name) = variable(root) else {
            return false;
        };
        let rule = format!("{}.{name}", self.package);
        match name {
            "input" => true,
            // The interpreter, but not the machine, accepts a number for a string key there.
            "data" => !has_index && !std::ptr::eq(root, expr),
            _ => self.locals.contains(name) || self.names.rules.get(&rule) == Some(&None),
        }
    }
}

/// Whether the expression is a constant.
fn is_constant(expr: &Ref<Expr>) -> bool {
    match expr.as_ref() {
        Expr::String { .. }
        | Expr::RawString { .. }
        | Expr::Number { .. }
        | Expr::Bool { .. }
        | Expr::Null { .. } => true,
        Expr::UnaryExpr { expr, .. } => {
            matches!(expr.as_ref(), Expr::Number { span, .. } if !span.text().starts_with('-'))
        }
        Expr::Array { items, .. } | Expr::Set { items, .. } => items.iter().all(is_constant),
        Expr::Object { fields, .. } => {
            has_distinct_string_keys(fields)
                && fields.iter().all(|(_, _, value)| is_constant(value))
        }
        _ => false,
    }
}

/// Whether the keys of an object are string constants without duplicates.
fn has_distinct_string_keys<T>(fields: &[(T, Ref<Expr>, Ref<Expr>)]) -> bool {
    let keys = fields.iter().map(|(_, key, _)| string_constant(key));
    let keys: Option<BTreeSet<&str>> = keys.collect();
    keys.is_some_and(|keys| keys.len() == fields.len())
}

/// The text of a string constant.
fn string_constant(expr: &Ref<Expr>) -> Option<&str> {
    match expr.as_ref() {
        Expr::String {
            value: Value::String(text),
            ..
        } => Some(text),
        _ => None,
    }
}

/// The name, if the expression is only a variable.
fn variable(expr: &Ref<Expr>) -> Option<&str> {
    match expr.as_ref() {
        Expr::Var { span, .. } => Some(span.text()),
        _ => None,
    }
}

/// The path, if the expression is names with dots between them.
fn path(expr: &Ref<Expr>) -> Option<String> {
    match expr.as_ref() {
        Expr::Var { span, .. } => Some(span.text().to_owned()),
        Expr::RefDot { refr, field, .. } => Some(format!("{}.{}", path(refr)?, field.0.text())),
        _ => None,
    }
}

#[cfg(test)]
mod tests;
