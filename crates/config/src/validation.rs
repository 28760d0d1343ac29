//! Validation of a tree against its schema, with a message for every mistake.

mod sentence;

use std::collections::{BTreeSet, HashMap};

use jsonschema::error::{TypeKind, ValidationErrorKind};
use jsonschema::{JsonType, ValidationError};
use serde_json::{Map, Number, Value};

use crate::problem::{MAX_PROBLEMS, Problem};
use crate::schema::{FileSchema, SchemaNode};
use crate::tree::{self, Content, Node, Tree, join, segments};

/// The valid part of a file: every faulty value is removed, and the rest matches the schema.
pub(crate) struct ValidatedValue {
    pub(crate) value: Value,
    kept: KeptItems,
}

impl ValidatedValue {
    /// The pointer in the file for a pointer into the value: the indices of list items change when
    /// earlier items are removed.
    pub(crate) fn original(&self, pointer: &str) -> String {
        self.kept.original(pointer)
    }
}

/// Checks `tree` against `schema`. Every mistake is added to `problems`; the rest can be
/// deserialised, with defaults instead of the faulty values, so that later checks can report their
/// mistakes in the same run.
pub(crate) fn validate(
    shape: &FileSchema,
    tree: &mut Tree,
    problems: &mut Vec<Problem>,
) -> ValidatedValue {
    drop_nulls(&mut tree.root, &shape.at(""));
    if matches!(tree.root.content, Content::Null) {
        tree.root.content = Content::Map(Vec::new());
    }
    let faults = loop {
        let (value, kept) = to_value(tree, &BTreeSet::new());
        let faults = find(shape, &value, &kept);
        if !coerce(tree, &faults) {
            break faults;
        }
    };
    report(shape, tree, &faults, problems);
    prune(shape, tree, faults)
}

/// Turns faults into problems. Each message needs a search through the tree, so only the first
/// faults get one; the others become placeholders, which [`Problems`](crate::Problems) only counts.
fn report(shape: &FileSchema, tree: &Tree, faults: &[Fault], problems: &mut Vec<Problem>) {
    if faults.len() <= MAX_PROBLEMS {
        problems.extend(
            faults
                .iter()
                .filter_map(|fault| fault.describe(shape, tree)),
        );
        return;
    }
    let mut places = HashMap::new();
    find_positions(&tree.root, "", tree.root.place, &mut places);
    let place = |fault: &Fault| {
        let key = fault.key().and_then(|key| places.get(&key));
        match key {
            Some(seen) => seen.key,
            None => places
                .get(&fault.pointer)
                .map_or(tree.root.place, |seen| seen.value),
        }
    };
    // A value that could not be expanded has already been reported.
    let is_reported = |fault: &Fault| match &fault.kind {
        Kind::Missing(key) => places
            .get(&join(&fault.pointer, key))
            .is_some_and(|seen| seen.is_faulty),
        _ => false,
    };
    let mut placed: Vec<(tree::Position, &Fault)> = faults
        .iter()
        .filter(|fault| !is_reported(fault))
        .map(|fault| (place(fault), fault))
        .collect();
    placed.sort_by_key(|(place, _)| (place.line, place.column));
    for (index, (place, fault)) in placed.into_iter().enumerate() {
        if index < MAX_PROBLEMS {
            problems.extend(fault.describe(shape, tree));
        } else {
            let pointer = fault.key().unwrap_or_else(|| fault.pointer.clone());
            problems.push(tree.problem_at(place, &pointer, "one more mistake"));
        }
    }
}

/// The positions of a value and its key.
struct Positions {
    key: tree::Position,
    value: tree::Position,
    is_faulty: bool,
}

fn find_positions(
    node: &Node,
    pointer: &str,
    key: tree::Position,
    places: &mut HashMap<String, Positions>,
) {
    let seen = Positions {
        key,
        value: node.place,
        is_faulty: matches!(node.content, Content::Faulty),
    };
    places.insert(pointer.to_owned(), seen);
    match &node.content {
        Content::List(items) => {
            for (index, item) in items.iter().enumerate() {
                let pointer = join(pointer, &index.to_string());
                find_positions(item, &pointer, item.place, places);
            }
        }
        Content::Map(entries) => {
            for entry in entries {
                let pointer = join(pointer, &entry.key);
                find_positions(&entry.value, &pointer, entry.place, places);
            }
        }
        _ => {}
    }
}

/// Removes faulty values until the rest is valid. A value whose required part is removed is removed
/// as well.
fn prune(shape: &FileSchema, tree: &Tree, mut faults: Vec<Fault>) -> ValidatedValue {
    let mut removed = BTreeSet::new();
    loop {
        let before = removed.len();
        for fault in &faults {
            removed.insert(fault.key().unwrap_or_else(|| fault.pointer.clone()));
        }
        // The root itself stays: every missing key has a default.
        removed.remove("");
        let (value, kept) = to_value(tree, &removed);
        if removed.len() == before {
            let value = if value.is_object() {
                value
            } else {
                Value::Object(Map::new())
            };
            return ValidatedValue { value, kept };
        }
        faults = find(shape, &value, &kept);
    }
}

/// A known key without a value takes its default.
fn drop_nulls(node: &mut Node, place: &SchemaNode<'_>) {
    match &mut node.content {
        Content::Map(entries) => {
            let known: BTreeSet<&str> = place.keys().collect();
            for entry in entries {
                if known.contains(entry.key.as_str())
                    && matches!(entry.value.content, Content::Null)
                {
                    entry.value.content = Content::Absent;
                } else {
                    drop_nulls(&mut entry.value, &place.enter(&entry.key));
                }
            }
        }
        Content::List(items) => {
            let place = place.enter("0");
            for item in items {
                drop_nulls(item, &place);
            }
        }
        _ => {}
    }
}

/// Which items of each shortened list are left.
#[derive(Debug, Default)]
struct KeptItems(HashMap<String, Vec<usize>>);

impl KeptItems {
    fn original(&self, pointer: &str) -> String {
        let (mut pruned, mut original) = (String::new(), String::new());
        for segment in segments(pointer) {
            let index = self.0.get(&pruned).and_then(|indices| {
                let place: usize = segment.parse().ok()?;
                indices.get(place)
            });
            original = match index {
                Some(index) => join(&original, &index.to_string()),
                None => join(&original, &segment),
            };
            pruned = join(&pruned, &segment);
        }
        original
    }
}

/// The tree as JSON, without faulty values and without the pointers in `removed`.
fn to_value(tree: &Tree, removed: &BTreeSet<String>) -> (Value, KeptItems) {
    let mut kept = KeptItems::default();
    let value = convert(&tree.root, "", "", removed, &mut kept).unwrap_or(Value::Null);
    (value, kept)
}

fn convert(
    node: &Node,
    original: &str,
    pruned: &str,
    removed: &BTreeSet<String>,
    kept: &mut KeptItems,
) -> Option<Value> {
    if removed.contains(original) {
        return None;
    }
    Some(match &node.content {
        Content::Faulty | Content::Absent => return None,
        Content::Null => Value::Null,
        Content::Bool(value) => Value::Bool(*value),
        Content::Number(number) => Value::Number(number.clone()),
        Content::Text(text) => Value::String(text.clone()),
        Content::List(items) => {
            let mut values = Vec::with_capacity(items.len());
            let mut indices = Vec::with_capacity(items.len());
            for (index, item) in items.iter().enumerate() {
                let inner = join(original, &index.to_string());
                let shifted = join(pruned, &values.len().to_string());
                if let Some(value) = convert(item, &inner, &shifted, removed, kept) {
                    values.push(value);
                    indices.push(index);
                }
            }
            if values.len() < items.len() {
                kept.0.insert(pruned.to_owned(), indices);
            }
            Value::Array(values)
        }
        Content::Map(entries) => {
            let mut object = Map::new();
            for entry in entries {
                let (inner, same) = (join(original, &entry.key), join(pruned, &entry.key));
                if let Some(value) = convert(&entry.value, &inner, &same, removed, kept) {
                    object.insert(entry.key.clone(), value);
                }
            }
            Value::Object(object)
        }
    })
}

/// One violation of the schema, without a message.
struct Fault {
    /// The pointer in the file.
    pointer: String,
    /// The value at the pointer.
    found: Value,
    kind: Kind,
}

impl Fault {
    /// The pointer to the faulty key, if the fault is a key.
    fn key(&self) -> Option<String> {
        match &self.kind {
            Kind::UnknownKey(key) | Kind::BadKey { key, .. } => Some(join(&self.pointer, key)),
            _ => None,
        }
    }
}

enum Kind {
    UnknownKey(String),
    BadKey { key: String, format: Option<String> },
    Missing(String),
    Type(Vec<JsonType>),
    Word(Vec<Value>),
    Format(String),
    Least(Value),
    Above(Value),
    Most(Value),
    Below(Value),
    TooFew(u64),
    TooMany(u64),
    Repeats,
    Other,
}

fn find(shape: &FileSchema, value: &Value, kept: &KeptItems) -> Vec<Fault> {
    let mut faults = Vec::new();
    for error in shape.validator.iter_errors(value) {
        collect(&error, kept, &mut faults);
    }
    faults
}

fn collect(error: &ValidationError<'_>, kept: &KeptItems, faults: &mut Vec<Fault>) {
    let kind =
        match error.kind() {
            ValidationErrorKind::AnyOf { context }
            | ValidationErrorKind::OneOfNotValid { context } => match choose(error, context) {
                Ok(branch) => {
                    for error in branch {
                        collect(error, kept, faults);
                    }
                    return;
                }
                Err(types) => Kind::Type(types),
            },
            ValidationErrorKind::AdditionalProperties { unexpected }
            | ValidationErrorKind::UnevaluatedProperties { unexpected } => {
                for key in unexpected {
                    faults.push(Fault {
                        pointer: kept.original(error.instance_path().as_str()),
                        found: Value::Null,
                        kind: Kind::UnknownKey(key.clone()),
                    });
                }
                return;
            }
            ValidationErrorKind::PropertyNames { error } => Kind::BadKey {
                key: error.instance().as_str().unwrap_or_default().to_owned(),
                format: match error.kind() {
                    ValidationErrorKind::Format { format } => Some(format.clone()),
                    _ => None,
                },
            },
            ValidationErrorKind::Required { property } => {
                Kind::Missing(property.as_str().unwrap_or_default().to_owned())
            }
            ValidationErrorKind::Type { kind } => Kind::Type(types(kind)),
            ValidationErrorKind::Enum { options } => {
                Kind::Word(options.as_array().cloned().unwrap_or_default())
            }
            ValidationErrorKind::Constant { expected_value } => {
                Kind::Word(vec![expected_value.as_ref().clone()])
            }
            ValidationErrorKind::Format { format } => Kind::Format(format.clone()),
            ValidationErrorKind::Minimum { limit } => Kind::Least(limit.clone()),
            ValidationErrorKind::ExclusiveMinimum { limit } => Kind::Above(limit.clone()),
            ValidationErrorKind::Maximum { limit } => Kind::Most(limit.clone()),
            ValidationErrorKind::ExclusiveMaximum { limit } => Kind::Below(limit.clone()),
            ValidationErrorKind::MinItems { limit } => Kind::TooFew(*limit),
            ValidationErrorKind::MaxItems { limit }
            | ValidationErrorKind::MaxProperties { limit } => Kind::TooMany(*limit),
            ValidationErrorKind::UniqueItems => Kind::Repeats,
            _ => Kind::Other,
        };
    faults.push(Fault {
        pointer: kept.original(error.instance_path().as_str()),
        found: error.instance().as_ref().clone(),
        kind,
    });
}

/// The alternative that was probably meant: the one whose type matches, and of several the one with
/// the fewest errors. If none matches, the types that would.
fn choose<'e>(
    error: &ValidationError<'_>,
    branches: &'e [Vec<ValidationError<'static>>],
) -> Result<&'e [ValidationError<'static>], Vec<JsonType>> {
    let here = error.instance_path();
    let mut wanted = Vec::new();
    let mut best: Option<&[ValidationError<'static>]> = None;
    for branch in branches {
        let mismatch = branch.iter().find_map(|error| match error.kind() {
            ValidationErrorKind::Type { kind } if error.instance_path() == here => Some(kind),
            _ => None,
        });
        match mismatch {
            Some(kind) => wanted.extend(types(kind)),
            None if best.is_none_or(|best| branch.len() < best.len()) => best = Some(branch),
            None => {}
        }
    }
    best.ok_or(wanted)
}

fn types(kind: &TypeKind) -> Vec<JsonType> {
    match kind {
        TypeKind::Single(kind) => vec![*kind],
        TypeKind::Multiple(kinds) => kinds.iter().collect(),
    }
}

/// The value of an environment variable is text. If a number or a boolean is expected and the text
/// is one, the value is converted; it can never become a list or a mapping. Returns whether
/// anything changed.
fn coerce(tree: &mut Tree, faults: &[Fault]) -> bool {
    let mut wanted: HashMap<&str, &[JsonType]> = HashMap::new();
    for fault in faults {
        if let Kind::Type(types) = &fault.kind {
            wanted.insert(&fault.pointer, types);
        }
    }
    let mut changed = false;
    each_expanded(&mut tree.root, "", &mut |pointer, node| {
        let Some(types) = wanted.get(pointer) else {
            return;
        };
        let content = node.text().and_then(|text| {
            types.iter().find_map(|wanted| match wanted {
                JsonType::Boolean => text.parse().ok().map(Content::Bool),
                JsonType::Integer => integer(text).map(Content::Number),
                JsonType::Number => {
                    let float = || Number::from_f64(text.parse().ok()?);
                    integer(text).or_else(float).map(Content::Number)
                }
                _ => None,
            })
        });
        if let Some(content) = content {
            node.content = content;
            changed = true;
        }
    });
    changed
}

/// Calls `visit` for every value that contains a variable's value. One walk, because a search per
/// fault would be slow in a file with very many.
fn each_expanded(node: &mut Node, pointer: &str, visit: &mut dyn FnMut(&str, &mut Node)) {
    if node.variable.is_some() {
        visit(pointer, node);
    }
    match &mut node.content {
        Content::List(items) => {
            for (index, item) in items.iter_mut().enumerate() {
                each_expanded(item, &join(pointer, &index.to_string()), visit);
            }
        }
        Content::Map(entries) => {
            for entry in entries {
                each_expanded(&mut entry.value, &join(pointer, &entry.key), visit);
            }
        }
        _ => {}
    }
}

fn integer(text: &str) -> Option<Number> {
    let signed = text.parse::<i64>().ok().map(Number::from);
    signed.or_else(|| text.parse::<u64>().ok().map(Number::from))
}
