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
    /// Converts a JSON pointer into the value to the JSON pointer of the same value in the file: the
    /// indices of list items change when earlier items are removed.
    pub(crate) fn original_pointer(&self, pointer: &str) -> String {
        self.kept.original_pointer(pointer)
    }
}

/// Checks `tree` against `file_schema`. Every mistake is added to `problems`; the rest can be
/// deserialised, with defaults instead of the faulty values, so that later checks can report their
/// mistakes in the same run.
pub(crate) fn validate(
    file_schema: &FileSchema,
    tree: &mut Tree,
    problems: &mut Vec<Problem>,
) -> ValidatedValue {
    mark_absent(&mut tree.root, &file_schema.node_at(""));
    if matches!(tree.root.content, Content::Null) {
        tree.root.content = Content::Map(Vec::new());
    }
    let faults = loop {
        let (value, kept) = to_value(tree, &BTreeSet::new());
        let faults = find_faults(file_schema, &value, &kept);
        if !coerce(tree, &faults) {
            break faults;
        }
    };
    report(file_schema, tree, &faults, problems);
    prune(file_schema, tree, faults)
}

/// Turns faults into problems. Each message needs a search through the tree, so only the first
/// faults get one; the others become placeholders, which [`Problems`](crate::Problems) only counts.
fn report(file_schema: &FileSchema, tree: &Tree, faults: &[Fault], problems: &mut Vec<Problem>) {
    if faults.len() <= MAX_PROBLEMS {
        problems.extend(
            faults
                .iter()
                .filter_map(|fault| fault.describe(file_schema, tree)),
        );
        return;
    }
    let mut positions = HashMap::new();
    find_positions(&tree.root, "", tree.root.position, &mut positions);
    let position = |fault: &Fault| {
        let key = fault.key().and_then(|key| positions.get(&key));
        match key {
            Some(seen) => seen.key,
            None => positions
                .get(&fault.pointer)
                .map_or(tree.root.position, |seen| seen.value),
        }
    };
    // A value that could not be expanded has already been reported.
    let is_reported = |fault: &Fault| match &fault.kind {
        FaultKind::Missing(key) => positions
            .get(&join(&fault.pointer, key))
            .is_some_and(|seen| seen.is_faulty),
        _ => false,
    };
    let mut sorted: Vec<(tree::Position, &Fault)> = faults
        .iter()
        .filter(|fault| !is_reported(fault))
        .map(|fault| (position(fault), fault))
        .collect();
    sorted.sort_by_key(|(position, _)| (position.line, position.column));
    for (index, (position, fault)) in sorted.into_iter().enumerate() {
        if index < MAX_PROBLEMS {
            problems.extend(fault.describe(file_schema, tree));
        } else {
            let pointer = fault.key().unwrap_or_else(|| fault.pointer.clone());
            problems.push(tree.problem_at(position, &pointer, "one more mistake"));
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
    positions: &mut HashMap<String, Positions>,
) {
    let seen = Positions {
        key,
        value: node.position,
        is_faulty: matches!(node.content, Content::Faulty),
    };
    positions.insert(pointer.to_owned(), seen);
    match &node.content {
        Content::List(items) => {
            for (index, item) in items.iter().enumerate() {
                let pointer = join(pointer, &index.to_string());
                find_positions(item, &pointer, item.position, positions);
            }
        }
        Content::Map(entries) => {
            for entry in entries {
                let pointer = join(pointer, &entry.key);
                find_positions(&entry.value, &pointer, entry.position, positions);
            }
        }
        _ => {}
    }
}

/// Removes faulty values until the rest is valid. A value whose required part is removed is removed
/// as well.
fn prune(file_schema: &FileSchema, tree: &Tree, mut faults: Vec<Fault>) -> ValidatedValue {
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
        faults = find_faults(file_schema, &value, &kept);
    }
}

/// Marks known keys without a value as absent, so that they take their default.
fn mark_absent(node: &mut Node, schema: &SchemaNode<'_>) {
    match &mut node.content {
        Content::Map(entries) => {
            let known: BTreeSet<&str> = schema.keys().collect();
            for entry in entries {
                if known.contains(entry.key.as_str())
                    && matches!(entry.value.content, Content::Null)
                {
                    entry.value.content = Content::Absent;
                } else {
                    mark_absent(&mut entry.value, &schema.child(&entry.key));
                }
            }
        }
        Content::List(items) => {
            let schema = schema.child("0");
            for item in items {
                mark_absent(item, &schema);
            }
        }
        _ => {}
    }
}

/// Which items of each shortened list are left.
#[derive(Debug, Default)]
struct KeptItems(HashMap<String, Vec<usize>>);

impl KeptItems {
    fn original_pointer(&self, pointer: &str) -> String {
        let (mut pruned, mut original) = (String::new(), String::new());
        for segment in segments(pointer) {
            let index = self.0.get(&pruned).and_then(|indices| {
                let position: usize = segment.parse().ok()?;
                indices.get(position)
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
    kind: FaultKind,
}

impl Fault {
    /// The pointer to the faulty key, if the fault is a key.
    fn key(&self) -> Option<String> {
        match &self.kind {
            FaultKind::UnknownKey(key) | FaultKind::BadKey { key, .. } => {
                Some(join(&self.pointer, key))
            }
            _ => None,
        }
    }
}

/// The kinds of violations, with the limit or the expected values.
enum FaultKind {
    UnknownKey(String),
    BadKey { key: String, format: Option<String> },
    Missing(String),
    Type(Vec<JsonType>),
    NotInEnum(Vec<Value>),
    Format(String),
    BelowMinimum(Value),
    NotAboveMinimum(Value),
    AboveMaximum(Value),
    NotBelowMaximum(Value),
    TooFew(u64),
    TooMany(u64),
    DuplicateItems,
    Other,
}

fn find_faults(file_schema: &FileSchema, value: &Value, kept: &KeptItems) -> Vec<Fault> {
    let mut faults = Vec::new();
    for error in file_schema.validator.iter_errors(value) {
        add_fault(&error, kept, &mut faults);
    }
    faults
}

fn add_fault(error: &ValidationError<'_>, kept: &KeptItems, faults: &mut Vec<Fault>) {
    let kind =
        match error.kind() {
            ValidationErrorKind::AnyOf { context }
            | ValidationErrorKind::OneOfNotValid { context } => match choose(error, context) {
                Ok(branch) => {
                    for error in branch {
                        add_fault(error, kept, faults);
                    }
                    return;
                }
                Err(types) => FaultKind::Type(types),
            },
            ValidationErrorKind::AdditionalProperties { unexpected }
            | ValidationErrorKind::UnevaluatedProperties { unexpected } => {
                for key in unexpected {
                    faults.push(Fault {
                        pointer: kept.original_pointer(error.instance_path().as_str()),
                        found: Value::Null,
                        kind: FaultKind::UnknownKey(key.clone()),
                    });
                }
                return;
            }
            ValidationErrorKind::PropertyNames { error } => FaultKind::BadKey {
                key: error.instance().as_str().unwrap_or_default().to_owned(),
                format: match error.kind() {
                    ValidationErrorKind::Format { format } => Some(format.clone()),
                    _ => None,
                },
            },
            ValidationErrorKind::Required { property } => {
                FaultKind::Missing(property.as_str().unwrap_or_default().to_owned())
            }
            ValidationErrorKind::Type { kind } => FaultKind::Type(types(kind)),
            ValidationErrorKind::Enum { options } => {
                FaultKind::NotInEnum(options.as_array().cloned().unwrap_or_default())
            }
            ValidationErrorKind::Constant { expected_value } => {
                FaultKind::NotInEnum(vec![expected_value.as_ref().clone()])
            }
            ValidationErrorKind::Format { format } => FaultKind::Format(format.clone()),
            ValidationErrorKind::Minimum { limit } => FaultKind::BelowMinimum(limit.clone()),
            ValidationErrorKind::ExclusiveMinimum { limit } => {
                FaultKind::NotAboveMinimum(limit.clone())
            }
            ValidationErrorKind::Maximum { limit } => FaultKind::AboveMaximum(limit.clone()),
            ValidationErrorKind::ExclusiveMaximum { limit } => {
                FaultKind::NotBelowMaximum(limit.clone())
            }
            ValidationErrorKind::MinItems { limit } => FaultKind::TooFew(*limit),
            ValidationErrorKind::MaxItems { limit }
            | ValidationErrorKind::MaxProperties { limit } => FaultKind::TooMany(*limit),
            ValidationErrorKind::UniqueItems => FaultKind::DuplicateItems,
            _ => FaultKind::Other,
        };
    faults.push(Fault {
        pointer: kept.original_pointer(error.instance_path().as_str()),
        found: error.instance().as_ref().clone(),
        kind,
    });
}

/// The alternative that was probably meant: of the alternatives whose type matches, the alternative
/// with the fewest errors. If no type matches, an error with the types that would match.
fn choose<'e>(
    error: &ValidationError<'_>,
    branches: &'e [Vec<ValidationError<'static>>],
) -> Result<&'e [ValidationError<'static>], Vec<JsonType>> {
    let path = error.instance_path();
    let mut wanted = Vec::new();
    let mut best: Option<&[ValidationError<'static>]> = None;
    for branch in branches {
        let mismatch = branch.iter().find_map(|error| match error.kind() {
            ValidationErrorKind::Type { kind } if error.instance_path() == path => Some(kind),
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
        if let FaultKind::Type(types) = &fault.kind {
            wanted.insert(&fault.pointer, types);
        }
    }
    let mut changed = false;
    visit_expanded(&mut tree.root, "", &mut |pointer, node| {
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

/// Calls `visit` for every value that contains a variable's value. A single walk, because a search
/// for each fault would be slow in a file with very many faults.
fn visit_expanded(node: &mut Node, pointer: &str, visit: &mut dyn FnMut(&str, &mut Node)) {
    if node.variable.is_some() {
        visit(pointer, node);
    }
    match &mut node.content {
        Content::List(items) => {
            for (index, item) in items.iter_mut().enumerate() {
                visit_expanded(item, &join(pointer, &index.to_string()), visit);
            }
        }
        Content::Map(entries) => {
            for entry in entries {
                visit_expanded(&mut entry.value, &join(pointer, &entry.key), visit);
            }
        }
        _ => {}
    }
}

fn integer(text: &str) -> Option<Number> {
    let signed = text.parse::<i64>().ok().map(Number::from);
    signed.or_else(|| text.parse::<u64>().ok().map(Number::from))
}
