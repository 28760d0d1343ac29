//! Whether a policy is plain: written in the part of Rego that machine and interpreter read
//! alike, as long as nothing goes wrong.
//!
//! This is a list of what is known to be the same, found by reading both; whatever is not on
//! it is not plain, and every yes of such a policy is put to the interpreter. Left out on
//! purpose, because the machine answers otherwise there:
//!
//! - `else`: dropped behind a loop;
//! - comprehensions and `every` in a loop: a condition that fails in them ends a round of the
//!   loop around them; `input` that is first read in one is not there behind it;
//! - several values of one rule, from a loop or from several definitions: the last or none
//!   counts, where the interpreter fails (so only one and the same constant is plain, but for
//!   the definitions of the rule that decides, which says nothing then, and that is no);
//! - the same key twice in an object or a comprehension: the last one counts;
//! - patterns in parameters, `:=` and `some`, and parameters called `_`: what is undefined
//!   goes through;
//! - packages as values (`data.lists`), which the interpreter evaluates whole.

use std::collections::{BTreeMap, BTreeSet};

use regorus::rvm::Instruction;
use regorus::rvm::instructions::LoopMode;
use regorus::rvm::program::{Program, RuleInfo, RuleType};
use regorus::unstable::{
    AssignOp, BUILTINS, Expr, Literal, LiteralStmt, Module, Ref, Rule, RuleBody, RuleHead,
};
use regorus::{CompiledPolicy, Value};

use super::{calls, watch};

/// Whether the rules of `policy` that `deciding`, rules of `program`, need are all plain. The
/// first of them is the one that decides.
pub(super) fn is_plain(policy: &CompiledPolicy, program: &Program, deciding: &[&str]) -> bool {
    let reached = calls::reach(program, deciding);
    let mut needed = calls::instructions(program)
        .filter(|(rule, _)| rule.is_none_or(|rule| reached.contains(&rule)));
    needed.all(|(_, instruction)| is_known(program, *instruction))
        && Names::read(policy, program, &reached, deciding).is_some_and(|names| {
            let modules = policy.get_modules().iter();
            modules.zip(&names.packages).all(|(module, package)| {
                let rules = module.policy.iter();
                rules
                    .map(|rule| names.is_plain_rule(package, rule))
                    .all(|plain| plain == Some(true))
            })
        })
}

/// Whether it is one of the instructions whose ways to go wrong are watched.
fn is_known(program: &Program, instruction: Instruction) -> bool {
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

/// What the names in a policy mean.
struct Names<'a> {
    /// The package of each module, as a path.
    packages: Vec<String>,
    /// Every rule by its path. Of a function, with how many parameters it takes.
    rules: BTreeMap<String, Option<usize>>,
    /// The rules that are needed.
    used: BTreeMap<&'a str, &'a RuleInfo>,
    /// The rule that decides.
    entry: &'a str,
    /// The first words of built-in functions' names, which nothing else may be called.
    taken: BTreeSet<&'static str>,
}

/// One body of a rule, with what it declares.
struct Body<'a> {
    names: &'a Names<'a>,
    package: &'a str,
    locals: BTreeSet<&'a str>,
    has_loop: bool,
}

impl<'a> Names<'a> {
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
            taken: words.chain(["data", "input", "print", "walk"]).collect(),
        };
        for module in policy.get_modules() {
            let package = format!("data.{}", path(&module.package.refr)?);
            names.declare(&package, module)?;
            names.packages.push(package);
        }
        let used = reached.iter();
        let used = used.filter_map(|rule| program.get_rule_info(*rule));
        names.used = used.map(|rule| (rule.name.as_str(), rule)).collect();
        // A rule with another, or a package, below it is a document of several parts.
        let is_document = names.rules.keys().any(|rule| {
            let mut paths = names.rules.keys().chain(&names.packages);
            let below = format!("{rule}.");
            names.packages.contains(rule) || paths.any(|path| path.starts_with(&below))
        });
        (!is_document).then_some(names)
    }

    fn declare(&mut self, package: &str, module: &Module) -> Option<()> {
        // A package without rules is an empty object to the one and nothing to the other.
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
            let name = variable(refr).filter(|name| !self.taken.contains(name))?;
            let path = format!("{package}.{name}");
            if *self.rules.entry(path).or_insert(parameters) != parameters {
                return None;
            }
        }
        Some(())
    }

    /// Whether a rule is plain, or not needed. None where it cannot be told.
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
            [] => body.parameters(head),
            [
                RuleBody {
                    assign: None,
                    is_else: false,
                    query,
                    ..
                },
            ] => {
                body.parameters(head)
                    && body.declare_all(&query.stmts)
                    && query.stmts.iter().all(|one| body.is_plain_statement(one))
            }
            _ => false,
        };
        if !has_plain_body {
            return Some(false);
        }
        // Whatever has several definitions has one value, which the compiler found out. The
        // rule that decides may have more: nothing reads it, and without a value it refuses.
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
            // A member that is undefined empties the set of the interpreter.
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
    /// Takes a name for what the body binds. Not one that means something else already.
    fn declare(&mut self, expr: &'a Ref<Expr>) -> bool {
        let Some(name) = variable(expr) else {
            return false;
        };
        let rule = format!("{}.{name}", self.package);
        let is_free = !self.names.taken.contains(name) && !self.names.rules.contains_key(&rule);
        is_free && name != "_" && self.locals.insert(name)
    }

    fn parameters(&mut self, head: &'a RuleHead) -> bool {
        match head {
            RuleHead::Func { args, .. } => {
                (1..=8).contains(&args.len()) && args.iter().all(|arg| self.declare(arg))
            }
            RuleHead::Compr { .. } | RuleHead::Set { .. } => true,
        }
    }

    /// Statements are not evaluated in the order in which they are written, so all names
    /// come first.
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
                has_texts_for_keys(fields)
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
                let takes = path(fcn).and_then(|name| self.parameters_of(&name));
                takes == Some(params.len()) && params.iter().all(|param| self.is_plain(param))
            }
            _ => false,
        }
    }

    /// How many parameters a function has.
    fn parameters_of(&self, name: &str) -> Option<usize> {
        let rules = &self.names.rules;
        if name.starts_with("data.") {
            return rules.get(name).copied().flatten();
        }
        // Nothing else is called like a built-in, so this order is nobody's.
        let own = rules.get(&format!("{}.{name}", self.package));
        own.copied().flatten().or_else(|| watch::arity(name))
    }

    /// A name, with fields and places behind it that are written out.
    fn is_plain_reference(&self, expr: &Ref<Expr>) -> bool {
        let (mut root, mut has_place) = (expr, false);
        loop {
            match root.as_ref() {
                Expr::RefDot { refr, .. } => root = refr,
                Expr::RefBrack { refr, index, .. } => {
                    match index.as_ref() {
                        Expr::String { .. } => {}
                        Expr::Number { .. } => has_place = true,
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
            // A number may stand for a text there, but only to the interpreter.
            "data" => !has_place && !std::ptr::eq(root, expr),
            _ => self.locals.contains(name) || self.names.rules.get(&rule) == Some(&None),
        }
    }
}

/// A value that is written out.
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
            has_texts_for_keys(fields) && fields.iter().all(|(_, _, value)| is_constant(value))
        }
        _ => false,
    }
}

/// Whether the keys of an object are written out, each once.
fn has_texts_for_keys<T>(fields: &[(T, Ref<Expr>, Ref<Expr>)]) -> bool {
    let keys = fields.iter().map(|(_, key, _)| text(key));
    let keys: Option<BTreeSet<&str>> = keys.collect();
    keys.is_some_and(|keys| keys.len() == fields.len())
}

/// The text of a key.
fn text(expr: &Ref<Expr>) -> Option<&str> {
    match expr.as_ref() {
        Expr::String {
            value: Value::String(text),
            ..
        } => Some(text),
        _ => None,
    }
}

/// The name, where there is nothing else.
fn variable(expr: &Ref<Expr>) -> Option<&str> {
    match expr.as_ref() {
        Expr::Var { span, .. } => Some(span.text()),
        _ => None,
    }
}

/// Names with dots between them.
fn path(expr: &Ref<Expr>) -> Option<String> {
    match expr.as_ref() {
        Expr::Var { span, .. } => Some(span.text().to_owned()),
        Expr::RefDot { refr, field, .. } => Some(format!("{}.{}", path(refr)?, field.0.text())),
        _ => None,
    }
}

#[cfg(test)]
mod tests;
