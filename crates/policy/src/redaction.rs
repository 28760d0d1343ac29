//! What a policy that answers `redact` wants changed, and the change itself.
//!
//! The policy's `outputs` have one of two shapes, or both, applied in this order:
//!
//! - `modified_data`: the data as it should be. Only where it differs from what is there is
//!   the text changed.
//! - `redaction_rules: {fields, replacements}`: `fields` are paths whose values become
//!   `"[redacted]"`; `replacements` are regular expressions, each with the text that takes
//!   the place of what it matches in every string value (not in keys).
//!
//! A path has names, numbers and stars, such as `arguments.password`, `content[*].text`,
//! `content[0]`, `**.token`, `headers["x.y"]`. It begins inside `params` or `result`.

mod merge;

use std::sync::Arc;

use serde_json::Value;

use crate::splice::{self, Edits, Inside, NoJson, Node, quote};

/// What stands where a value was.
pub const REDACTED: &str = "[redacted]";

/// The most paths, and the most expressions.
const MOST_RULES: usize = 256;

/// The longest path, expression or replacement.
const LONGEST: usize = 1024;

/// The most steps of a path.
const MOST_STEPS: usize = 32;

/// The most bytes a compiled expression takes.
const LARGEST_PATTERN: usize = 1 << 20;

/// How many bytes a change may add.
const MOST_ADDED: usize = 1 << 20;

/// Why nothing can be redacted.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BadRedaction {
    /// There is nothing in the outputs.
    #[error("the policy says redact, and not what")]
    Nothing,
    /// The outputs cannot be understood.
    #[error("the policy's outputs cannot be used: {0}")]
    Shape(String),
    /// An expression that is none, or too large.
    #[error("the policy's expression number {number} cannot be used: {what}")]
    Pattern {
        /// Which of them, in alphabetical order, from one.
        number: usize,
        /// What is wrong with it.
        what: &'static str,
    },
    /// The text grows too much.
    #[error("what the policy puts in is too large")]
    TooLarge,
    /// The text cannot be read.
    #[error(transparent)]
    NoJson(#[from] NoJson),
}

/// A compiled expression. Cloning is cheap.
#[derive(Clone, Debug)]
pub struct Pattern(regex::Regex);

impl Pattern {
    /// Compiles `text`. Nothing for what is no expression, or too large.
    pub fn compile(text: &str) -> Option<Self> {
        if text.len() > LONGEST {
            return None;
        }
        let built = regex::RegexBuilder::new(text)
            .size_limit(LARGEST_PATTERN)
            .dfa_size_limit(LARGEST_PATTERN)
            .build();
        built.ok().map(Self)
    }
}

/// A change, understood.
#[derive(Clone, Debug)]
pub struct Redaction {
    data: Option<Value>,
    fields: Vec<Path>,
    replacements: Vec<(Pattern, Arc<str>)>,
}

impl Redaction {
    /// Understands a policy's outputs. `compile` gives an expression, perhaps one that was
    /// compiled before.
    pub fn read(
        outputs: &Value,
        mut compile: impl FnMut(&str) -> Option<Pattern>,
    ) -> Result<Self, BadRedaction> {
        let outputs = match outputs {
            Value::Null => return Err(BadRedaction::Nothing),
            Value::Object(outputs) => outputs,
            _ => return shape("they are no object"),
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
                        redaction.rule(key, value, &mut compile)?;
                    }
                }
                ("redaction_rules", _) => return shape("redaction_rules is no object"),
                _ => return shape("they hold more than modified_data and redaction_rules"),
            }
        }
        let empty = redaction.fields.is_empty() && redaction.replacements.is_empty();
        if redaction.data.is_none() && empty {
            return Err(BadRedaction::Nothing);
        }
        Ok(redaction)
    }

    fn rule(
        &mut self,
        key: &str,
        value: &Value,
        compile: &mut impl FnMut(&str) -> Option<Pattern>,
    ) -> Result<(), BadRedaction> {
        match (key, value) {
            (_, Value::Null) => {}
            ("fields", Value::Array(fields)) => {
                if fields.len() > MOST_RULES {
                    return shape("there are too many fields");
                }
                for field in fields {
                    let path = field.as_str().and_then(Path::parse);
                    let Some(path) = path else {
                        return shape(
                            "a field is no path such as arguments.password or content[*].text",
                        );
                    };
                    self.fields.push(path);
                }
            }
            ("replacements", Value::Object(replacements)) => {
                if replacements.len() > MOST_RULES {
                    return shape("there are too many replacements");
                }
                for (number, (pattern, text)) in (1..).zip(replacements) {
                    let Some(text) = text.as_str().filter(|text| text.len() <= LONGEST) else {
                        return shape("a replacement is no text, or too long");
                    };
                    let pattern = compile(pattern).ok_or(BadRedaction::Pattern {
                        number,
                        what: "it is no regular expression, or too large",
                    })?;
                    self.replacements.push((pattern, text.into()));
                }
            }
            ("fields", _) => return shape("fields is no list"),
            ("replacements", _) => return shape("replacements is no object"),
            _ => return shape("redaction_rules holds more than fields and replacements"),
        }
        Ok(())
    }

    /// `text`, which is JSON, as it should be. Nothing where that is how it is.
    pub fn apply(&self, text: &str) -> Result<Option<String>, BadRedaction> {
        let merged = match &self.data {
            Some(data) => merge::merge(text, data)?,
            None => None,
        };
        let redacted = self.search(merged.as_deref().unwrap_or(text))?;
        Ok(redacted.or(merged))
    }

    /// The same without `modified_data`, for text that the policy was not shown.
    pub fn search(&self, text: &str) -> Result<Option<String>, BadRedaction> {
        if self.fields.is_empty() && self.replacements.is_empty() {
            return Ok(None);
        }
        let root = Node::read(text)?;
        let mut search = Search {
            redaction: self,
            text,
            edits: Edits::default(),
            left: MOST_ADDED,
        };
        let begins = self.fields.iter().map(|path| path.steps.as_slice());
        search.node(&root, begins.collect())?;
        if search.edits.is_empty() {
            return Ok(None);
        }
        Ok(Some(search.edits.apply(text)?))
    }
}

struct Search<'a> {
    redaction: &'a Redaction,
    text: &'a str,
    edits: Edits,
    /// How many bytes may still be added.
    left: usize,
}

impl<'a> Search<'a> {
    /// Goes through a value. `steps` is what is left of every path that leads here.
    fn node(&mut self, node: &Node, mut steps: Vec<&'a [Step]>) -> Result<(), BadRedaction> {
        // `**` also stands for no step at all.
        let mut place = 0;
        while let Some(path) = steps.get(place) {
            if let [Step::Many, rest @ ..] = path {
                steps.push(rest);
            }
            place += 1;
        }
        // Several ways lead to the same rest of a path, and with every level there are more.
        steps.sort_unstable_by_key(|rest| (rest.as_ptr(), rest.len()));
        steps.dedup_by_key(|rest| (rest.as_ptr(), rest.len()));
        if steps.iter().any(|rest| rest.is_empty()) {
            let new = quote(REDACTED);
            let is_so = self.text.get(node.span.clone()) == Some(&new);
            if !is_so {
                self.put(node, new)?;
            }
            return Ok(());
        }
        match &node.inside {
            Inside::Plain => Ok(()),
            Inside::Text => self.string(node),
            Inside::List(items) => items.iter().enumerate().try_for_each(|(index, item)| {
                let steps = follow(&steps, |step| match step {
                    Step::Index(wanted) => *wanted == index,
                    Step::Any => true,
                    Step::Name(_) | Step::Many => false,
                });
                self.node(item, steps)
            }),
            Inside::Map(entries) => entries.iter().try_for_each(|entry| {
                let steps = follow(&steps, |step| match step {
                    Step::Name(name) => **name == *entry.key,
                    Step::Any => true,
                    Step::Index(_) | Step::Many => false,
                });
                self.node(&entry.value, steps)
            }),
        }
    }

    fn string(&mut self, node: &Node) -> Result<(), BadRedaction> {
        if self.redaction.replacements.is_empty() {
            return Ok(());
        }
        let raw = self.text.get(node.span.clone()).ok_or(NoJson)?;
        let before: String = serde_json::from_str(raw).map_err(|_| NoJson)?;
        let mut now: Option<String> = None;
        for (Pattern(pattern), with) in &self.redaction.replacements {
            let text = now.as_deref().unwrap_or(&before);
            let mut found = pattern.captures_iter(text).peekable();
            if found.peek().is_none() {
                continue;
            }
            let (mut out, mut at) = (String::new(), 0);
            for captures in found {
                let whole = captures.get_match();
                out.push_str(text.get(at..whole.start()).unwrap_or_default());
                captures.expand(with, &mut out);
                at = whole.end();
                if out.len() > before.len() + self.left {
                    return Err(BadRedaction::TooLarge);
                }
            }
            out.push_str(text.get(at..).unwrap_or_default());
            now = Some(out);
        }
        match now {
            Some(now) if now != before => self.put(node, quote(&now)),
            _ => Ok(()),
        }
    }

    fn put(&mut self, node: &Node, new: String) -> Result<(), BadRedaction> {
        let added = new.len().saturating_sub(node.span.len());
        self.left = self.left.checked_sub(added).ok_or(BadRedaction::TooLarge)?;
        self.edits.put(node.span.clone(), new);
        Ok(())
    }
}

/// What is left of each path behind a step that is `taken`; `**` may be taken again.
fn follow<'a>(steps: &[&'a [Step]], taken: impl Fn(&Step) -> bool) -> Vec<&'a [Step]> {
    let left = steps.iter().filter_map(|path| match path {
        [Step::Many, ..] => Some(*path),
        [step, rest @ ..] if taken(step) => Some(rest),
        _ => None,
    });
    left.collect()
}

/// Where a value stands.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Path {
    steps: Vec<Step>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Step {
    Name(Box<str>),
    Index(usize),
    /// `*`: one step.
    Any,
    /// `**`: any number of steps.
    Many,
}

impl Path {
    fn parse(text: &str) -> Option<Self> {
        let mut steps = Vec::new();
        let mut rest = text.strip_prefix("$.").unwrap_or(text);
        if rest.is_empty() || text.len() > LONGEST {
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
                // A dot is followed by a name.
                if after.is_empty() || after.starts_with(['[', '.']) {
                    return None;
                }
                rest = after;
            } else if !rest.is_empty() && !rest.starts_with('[') {
                return None;
            }
        }
        // A path from the outside would match nothing, and nothing would be redacted.
        if let Some(Step::Name(first)) = steps.first()
            && matches!(&**first, "input" | "params" | "result")
        {
            return None;
        }
        (steps.len() <= MOST_STEPS).then_some(Self { steps })
    }
}

impl Step {
    fn named(name: &str) -> Option<Self> {
        match name {
            "" => None,
            "*" => Some(Step::Any),
            "**" => Some(Step::Many),
            name if name.contains(['*', ']', '"']) => None,
            name => Some(Step::Name(name.into())),
        }
    }

    /// What begins behind a bracket, and what comes after it.
    fn bracketed(inner: &str) -> Option<(Self, &str)> {
        if inner.starts_with('"') {
            let mut ends = inner.match_indices("\"]").map(|(place, _)| place + 1);
            return ends.find_map(|end| {
                let (name, after) = inner.split_at_checked(end)?;
                let name: String = serde_json::from_str(name).ok()?;
                Some((Step::Name(name.into()), after.strip_prefix(']')?))
            });
        }
        let (inner, after) = inner.split_once(']')?;
        match inner {
            "*" => Some((Step::Any, after)),
            digits if digits.bytes().all(|b| b.is_ascii_digit()) => {
                Some((Step::Index(digits.parse().ok()?), after))
            }
            _ => None,
        }
    }
}

/// Changes `bytes` in every way there is, and says whether what was JSON is JSON after it: for
/// fuzzing.
pub fn exercise(bytes: &[u8]) -> bool {
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
    // What is JSON to others is JSON here, and a value that changes nothing changes nothing.
    match (set, removed, redacted, merge::merge(text, &value)) {
        (Ok(set), Ok(removed), Ok(redacted), Ok(merged)) => {
            let mut changed = [Some(set), removed, redacted, merged].into_iter().flatten();
            changed.all(|text| is_json(&text))
        }
        (_, _, Err(BadRedaction::TooLarge), _) => true,
        _ => false,
    }
}

fn shape<T>(what: &str) -> Result<T, BadRedaction> {
    Err(BadRedaction::Shape(what.to_owned()))
}

#[cfg(test)]
mod tests;
