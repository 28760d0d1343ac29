//! One configuration file, from bytes to a typed value.

use std::path::Path;

use serde::de::DeserializeOwned;

use crate::expansion::{Env, expand};
use crate::leaf::RegexPattern;
use crate::problem::{Problem, quote};
use crate::schema::FileSchema;
use crate::tree::{Content, Tree};
use crate::unavailable;
use crate::validation::{ValidatedValue, validate};

/// A file that was read: its value, and the tree with the position of each part.
pub(crate) struct Layer<T> {
    pub(crate) value: T,
    pub(crate) tree: Tree,
    /// Warnings about accepted values.
    pub(crate) warnings: Vec<Problem>,
    valid: ValidatedValue,
}

/// Shows the file's name only: its values may be secrets.
impl<T> std::fmt::Debug for Layer<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mut parts = f.debug_struct("Layer");
        parts.field("file", &self.tree.file).finish_non_exhaustive()
    }
}

impl<T: DeserializeOwned> Layer<T> {
    /// Parses, expands (if there is an environment), validates and deserialises. Keys of features
    /// that this version does not have are errors. All mistakes are added to `problems`; if there
    /// is a value nevertheless, later checks can use it. None if the file is not YAML.
    pub(crate) fn read(
        file_schema: &FileSchema,
        file: &Path,
        bytes: &[u8],
        env: Option<Env<'_>>,
        problems: &mut Vec<Problem>,
    ) -> Option<Self> {
        let _patterns = RegexPattern::start_cache();
        let mut tree = Tree::parse(file, bytes, problems)?;
        let mut warnings = Vec::new();
        if let Some(env) = env {
            expand(&mut tree, env, problems, &mut warnings);
        }
        let valid = validate(file_schema, &mut tree, problems);
        let at = |pointer: &str, message| tree.problem(&valid.original_pointer(pointer), message);
        problems.extend(unavailable::check(
            file_schema.unavailable,
            &valid.value,
            at,
        ));
        match T::deserialize(&valid.value) {
            Ok(value) => Some(Self {
                value,
                tree,
                warnings,
                valid,
            }),
            Err(error) => {
                // serde's error may quote a value, so the message omits it.
                debug_assert!(false, "the schema accepted what the types refuse: {error}");
                problems.push(tree.problem("", "cannot be read, although its schema accepts it"));
                None
            }
        }
    }
}

impl<T> Layer<T> {
    /// A problem with the value at `pointer`, which is a pointer into `value`.
    pub(crate) fn problem(&self, pointer: &str, message: impl Into<String>) -> Problem {
        self.tree
            .problem(&self.valid.original_pointer(pointer), message)
    }

    /// Whether the file has a value at `pointer`, valid or not.
    pub(crate) fn is_written(&self, pointer: &str) -> bool {
        self.tree
            .get(&self.valid.original_pointer(pointer))
            .is_some_and(|node| !matches!(node.content, Content::Absent | Content::Null))
    }

    /// The text at `pointer`, as in the file after expansion.
    pub(crate) fn text(&self, pointer: &str) -> Option<&str> {
        self.tree.get(&self.valid.original_pointer(pointer))?.text()
    }

    /// The variable whose value is at `pointer`.
    pub(crate) fn variable(&self, pointer: &str) -> Option<&str> {
        let node = self.tree.get(&self.valid.original_pointer(pointer))?;
        node.variable.as_deref()
    }

    /// `text`, the value at `pointer`, as a message may repeat it: in quotes, or as the name of its
    /// variable.
    pub(crate) fn quote_value(&self, pointer: &str, text: &str) -> String {
        match self.variable(pointer) {
            Some(name) => format!("${{{name}}}"),
            None => quote(text),
        }
    }

    /// As [`Layer::quote_value`] without quotes, for a parsed value.
    pub(crate) fn display_value(&self, pointer: &str, value: impl ToString) -> String {
        match self.variable(pointer) {
            Some(name) => format!("${{{name}}}"),
            None => value.to_string(),
        }
    }

    /// Converts a JSON pointer into `value` to the JSON pointer of the same value in the file. The two
    /// differ after an invalid list item, because such items are removed from `value`.
    pub(crate) fn original_pointer(&self, pointer: &str) -> String {
        self.valid.original_pointer(pointer)
    }
}
