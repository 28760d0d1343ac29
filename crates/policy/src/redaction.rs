//! Redaction: applies the changes that a policy with the action `redact` requires.
//!
//! The policy's `outputs` have one or both of these fields, applied in this order:
//!
//! - `modified_data`: the new data. The text is changed only where it differs.
//! - `redaction_rules: {fields, replacements}`: `fields` are paths whose values become
//!   `"[redacted]"`; `replacements` map regular expressions to the text that replaces their
//!   matches in every string value (not in keys).
//!
//! A path consists of names, numbers and stars, such as `arguments.password`, `content[*].text`,
//! `content[0]`, `**.token`, `headers["x.y"]`. It is relative to `params` or `result`.

mod merge;

use std::sync::Arc;

use serde_json::Value;

use crate::splice::{self, InvalidJson, Node, NodeContent, TextEdits, quote};

/// The text that replaces a redacted value.
pub const REDACTED: &str = "[redacted]";

/// Maximum number of paths, and of regular expressions.
const MAX_RULES: usize = 256;

/// Maximum length of a path, regular expression or replacement.
const MAX_LEN: usize = 1024;

/// Maximum number of steps of a path.
const MAX_STEPS: usize = 32;

/// Maximum size of a compiled regular expression, in bytes.
const MAX_PATTERN_SIZE: usize = 1 << 20;

/// Maximum number of bytes that a redaction may add.
const MAX_ADDED: usize = 1 << 20;

/// Why a redaction failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BadRedaction {
    /// The outputs contain no changes.
    #[error("the policy's action is redact, but its outputs name no changes")]
    Nothing,
    /// The outputs are malformed.
    #[error("the policy's outputs are invalid: {0}")]
    Shape(String),
    /// An invalid or too large regular expression.
    #[error("the policy's regular expression number {number} is invalid: {what}")]
    Pattern {
        /// The number of the expression in alphabetical order, starting at one.
        number: usize,
        /// The reason.
        what: &'static str,
    },
    /// The text becomes too large.
    #[error("the policy's replacements are too large")]
    TooLarge,
    /// The text is not JSON.
    #[error(transparent)]
    NoJson(#[from] InvalidJson),
}

/// A compiled regular expression. Cloning is cheap.
#[derive(Clone, Debug)]
pub struct Pattern(regex::Regex);

impl Pattern {
    /// Compiles `text`. None if it is invalid or too large.
    pub fn compile(text: &str) -> Option<Self> {
        if text.len() > MAX_LEN {
            return None;
        }
        let built = regex::RegexBuilder::new(text)
            .size_limit(MAX_PATTERN_SIZE)
            .dfa_size_limit(MAX_PATTERN_SIZE)
            .build();
        built.ok().map(Self)
    }
}

/// The parsed outputs of a policy.
#[derive(Clone, Debug)]
pub struct Redaction {
    data: Option<Value>,
    fields: Vec<Path>,
    replacements: Vec<(Pattern, Arc<str>)>,
}

impl Redaction {
    /// Parses a policy's outputs. `compile` returns a compiled regular expression, possibly from a
    /// cache.
    pub fn read(
        outputs: &Value,
        mut compile: impl FnMut(&str) -> Option<Pattern>,
    ) -> Result<Self, BadRedaction> {
        let outputs = match outputs {
            Value::Null => return Err(BadRedaction::Nothing),
            Value::Object(outputs) => outputs,
            _ => return malformed("they are not an object"),
        };
        let mut redaction = Self {
            data: None,
            fields: Vec::new(),
            replacements: Vec::new(),
        };
        for (key, value) in outputs {
            match (key.as_str(), value) {
                (_, Value::Null) => {}
                ("modified_data", data) => redaction.data = Some(data.clone()),
                ("redaction_rules", Value::Object(rules)) => {
                    for (key, value) in rules {
                        redaction.add_rule(key, value, &mut compile)?;
                    }
                }
                ("redaction_rules", _) => return malformed("redaction_rules is not an object"),
                _ => return malformed("only modified_data and redaction_rules are known"),
            }
        }
        let empty = redaction.fields.is_empty() && redaction.replacements.is_empty();
        if redaction.data.is_none() && empty {
            return Err(BadRedaction::Nothing);
        }
        Ok(redaction)
    }

    fn add_rule(
        &mut self,
        key: &str,
        value: &Value,
        compile: &mut impl FnMut(&str) -> Option<Pattern>,
    ) -> Result<(), BadRedaction> {
        match (key, value) {
            (_, Value::Null) => {}
            ("fields", Value::Array(fields)) => {
                if fields.len() > MAX_RULES {
                    return malformed("there are too many fields");
                }
                for field in fields {
                    let path = field.as_str().and_then(Path::parse);
                    let Some(path) = path else {
                        return malformed(
                            "a field is not a path such as arguments.password or content[*].text",
                        );
                    };
                    self.fields.push(path);
                }
            }
            ("replacements", Value::Object(replacements)) => {
                if replacements.len() > MAX_RULES {
                    return malformed("there are too many replacements");
                }
                for (number, (pattern, text)) in (1..).zip(replacements) {
                    let Some(text) = text.as_str().filter(|text| text.len() <= MAX_LEN) else {
                        return malformed("a replacement is not a string, or too long");
                    };
                    let pattern = compile(pattern).ok_or(BadRedaction::Pattern {
                        number,
                        what: "it is not a regular expression, or too large",
                    })?;
                    self.replacements.push((pattern, text.into()));
                }
            }
            ("fields", _) => return malformed("fields is not a list"),
            ("replacements", _) => return malformed("replacements is not an object"),
            _ => return malformed("redaction_rules may only contain fields and replacements"),
        }
        Ok(())
    }

    /// Redacts `text`, which is JSON. None if nothing changes.
    pub fn apply(&self, text: &str) -> Result<Option<String>, BadRedaction> {
        let merged = match &self.data {
            Some(data) => merge::merge(text, data)?,
            None => None,
        };
        let redacted = self.apply_rules(merged.as_deref().unwrap_or(text))?;
        Ok(redacted.or(merged))
    }

    /// Applies only `redaction_rules`, to text that was not part of the policy's input.
    pub fn apply_rules(&self, text: &str) -> Result<Option<String>, BadRedaction> {
        if self.fields.is_empty() && self.replacements.is_empty() {
            return Ok(None);
        }
        let root = Node::read(text)?;
        let mut redactor = JsonRedactor {
            redaction: self,
            text,
            edits: TextEdits::default(),
            remaining_bytes: MAX_ADDED,
        };
        let paths = self.fields.iter().map(|path| path.steps.as_slice());
        redactor.redact_node(&root, paths.collect())?;
        if redactor.edits.is_empty() {
            return Ok(None);
        }
        Ok(Some(redactor.edits.apply(text)?))
    }
}

/// The redaction of one JSON text in progress.
struct JsonRedactor<'a> {
    redaction: &'a Redaction,
    text: &'a str,
    edits: TextEdits,
    /// Remaining number of bytes that may be added.
    remaining_bytes: usize,
}

impl<'a> JsonRedactor<'a> {
    /// Redacts a value. `steps` are the remaining steps of each path that matches so far.
    fn redact_node(&mut self, node: &Node, mut steps: Vec<&'a [Step]>) -> Result<(), BadRedaction> {
        // `**` also matches no step at all.
        let mut index = 0;
        while let Some(path) = steps.get(index) {
            if let [Step::DoubleStar, rest @ ..] = path {
                steps.push(rest);
            }
            index += 1;
        }
        // Duplicates are removed, because their number would grow with every level.
        steps.sort_unstable_by_key(|rest| (rest.as_ptr(), rest.len()));
        steps.dedup_by_key(|rest| (rest.as_ptr(), rest.len()));
        if steps.iter().any(|rest| rest.is_empty()) {
            let new = quote(REDACTED);
            let is_redacted = self.text.get(node.span.clone()) == Some(&new);
            if !is_redacted {
                self.replace(node, new)?;
            }
            return Ok(());
        }
        match &node.content {
            NodeContent::Plain => Ok(()),
            NodeContent::Text => self.redact_string(node),
            NodeContent::List(items) => items.iter().enumerate().try_for_each(|(index, item)| {
                let steps = advance_paths(&steps, |step| match step {
                    Step::Index(wanted) => *wanted == index,
                    Step::Star => true,
                    Step::Name(_) | Step::DoubleStar => false,
                });
                self.redact_node(item, steps)
            }),
            NodeContent::Map(entries) => entries.iter().try_for_each(|entry| {
                let steps = advance_paths(&steps, |step| match step {
                    Step::Name(name) => **name == *entry.key,
                    Step::Star => true,
                    Step::Index(_) | Step::DoubleStar => false,
                });
                self.redact_node(&entry.value, steps)
            }),
        }
    }

    fn redact_string(&mut self, node: &Node) -> Result<(), BadRedaction> {
        if self.redaction.replacements.is_empty() {
            return Ok(());
        }
        let raw = self.text.get(node.span.clone()).ok_or(InvalidJson)?;
        let original: String = serde_json::from_str(raw).map_err(|_| InvalidJson)?;
        let mut changed: Option<String> = None;
        for (Pattern(pattern), replacement) in &self.redaction.replacements {
            let text = changed.as_deref().unwrap_or(&original);
            let mut found = pattern.captures_iter(text).peekable();
            if found.peek().is_none() {
                continue;
            }
            let (mut out, mut at) = (String::new(), 0);
            for captures in found {
                let whole = captures.get_match();
                out.push_str(text.get(at..whole.start()).unwrap_or_default());
                captures.expand(replacement, &mut out);
                at = whole.end();
                if out.len() > original.len() + self.remaining_bytes {
                    return Err(BadRedaction::TooLarge);
                }
            }
            out.push_str(text.get(at..).unwrap_or_default());
            changed = Some(out);
        }
        match changed {
            Some(changed) if changed != original => self.replace(node, quote(&changed)),
            _ => Ok(()),
        }
    }

    fn replace(&mut self, node: &Node, new: String) -> Result<(), BadRedaction> {
        let added = new.len().saturating_sub(node.span.len());
        self.remaining_bytes = self
            .remaining_bytes
            .checked_sub(added)
            .ok_or(BadRedaction::TooLarge)?;
        self.edits.replace(node.span.clone(), new);
        Ok(())
    }
}

/// The remaining steps of each path after a first step that `matches`; `**` is kept.
fn advance_paths<'a>(steps: &[&'a [Step]], matches: impl Fn(&Step) -> bool) -> Vec<&'a [Step]> {
    let remaining = steps.iter().filter_map(|path| match path {
        [Step::DoubleStar, ..] => Some(*path),
        [step, rest @ ..] if matches(step) => Some(rest),
        _ => None,
    });
    remaining.collect()
}

/// A path to values.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Path {
    steps: Vec<Step>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Step {
    Name(Box<str>),
    Index(usize),
    /// `*`: any one step.
    Star,
    /// `**`: any number of steps.
    DoubleStar,
}

impl Path {
    fn parse(text: &str) -> Option<Self> {
        let mut steps = Vec::new();
        let mut rest = text.strip_prefix("$.").unwrap_or(text);
        if rest.is_empty() || text.len() > MAX_LEN {
            return None;
        }
        while !rest.is_empty() {
            let step;
            (step, rest) = match rest.strip_prefix('[') {
                Some(inner) => Step::bracketed(inner)?,
                None => {
                    let end = rest.find(['.', '[']).unwrap_or(rest.len());
                    let (name, after) = rest.split_at_checked(end)?;
                    (Step::named(name)?, after)
                }
            };
            steps.push(step);
            if let Some(after) = rest.strip_prefix('.') {
                // A dot must be followed by a name.
                if after.is_empty() || after.starts_with(['[', '.']) {
                    return None;
                }
                rest = after;
            } else if !rest.is_empty() && !rest.starts_with('[') {
                return None;
            }
        }
        // A path relative to the whole message would match nothing, and nothing would be redacted.
        if let Some(Step::Name(first)) = steps.first()
            && matches!(&**first, "input" | "params" | "result")
        {
            return None;
        }
        (steps.len() <= MAX_STEPS).then_some(Self { steps })
    }
}

impl Step {
    fn named(name: &str) -> Option<Self> {
        match name {
            "" => None,
            "*" => Some(Step::Star),
            "**" => Some(Step::DoubleStar),
            name if name.contains(['*', ']', '"']) => None,
            name => Some(Step::Name(name.into())),
        }
    }

    /// Parses a step after its opening bracket, and returns it with the rest.
    fn bracketed(inner: &str) -> Option<(Self, &str)> {
        if inner.starts_with('"') {
            let mut ends = inner.match_indices("\"]").map(|(index, _)| index + 1);
            return ends.find_map(|end| {
                let (name, after) = inner.split_at_checked(end)?;
                let name: String = serde_json::from_str(name).ok()?;
                Some((Step::Name(name.into()), after.strip_prefix(']')?))
            });
        }
        let (inner, after) = inner.split_once(']')?;
        match inner {
            "*" => Some((Step::Star, after)),
            digits if digits.bytes().all(|b| b.is_ascii_digit()) => {
                Some((Step::Index(digits.parse().ok()?), after))
            }
            _ => None,
        }
    }
}

/// Fuzzing entry point: applies every kind of change to `bytes`, and returns whether JSON input
/// results in JSON.
pub fn fuzz_check(bytes: &[u8]) -> bool {
    let Ok(text) = std::str::from_utf8(bytes) else {
        return true;
    };
    let is_json = |text: &str| serde_json::from_str::<Value>(text).is_ok();
    let path = ["a", "b"];
    let set = splice::set(text, &path, "\"\"");
    let removed = splice::remove(text, &path);
    let outputs = serde_json::json!({
        "redaction_rules": {"fields": ["a[*]", "**.b"], "replacements": {"[a-z]": "\"$0\\"}},
    });
    let redacted =
        Redaction::read(&outputs, Pattern::compile).and_then(|redaction| redaction.apply(text));
    let Ok(value) = serde_json::from_str::<Value>(text) else {
        return true;
    };
    // JSON that serde_json accepts is accepted here.
    match (set, removed, redacted, merge::merge(text, &value)) {
        (Ok(set), Ok(removed), Ok(redacted), Ok(merged)) => {
            let mut changed = [Some(set), removed, redacted, merged].into_iter().flatten();
            changed.all(|text| is_json(&text))
        }
        (_, _, Err(BadRedaction::TooLarge), _) => true,
        _ => false,
    }
}

fn malformed<T>(what: &str) -> Result<T, BadRedaction> {
    Err(BadRedaction::Shape(what.to_owned()))
}

#[cfg(test)]
mod tests;
