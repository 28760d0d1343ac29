//! The origin of a configuration value: file, environment variable or default.

use std::collections::BTreeMap;
use std::fmt;
use std::path::Path;
use std::sync::Arc;

use crate::tree::{Content, Node, Tree, join};

/// Where a value came from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ValueOrigin {
    /// A file contains the value.
    File {
        /// The file.
        file: Arc<Path>,
        /// The line, from 1.
        line: usize,
        /// The column, from 1.
        column: usize,
    },
    /// The built-in default.
    Default,
    /// A file names an environment variable, which contains the value.
    Env {
        /// The variable.
        name: String,
        /// The file that names the variable.
        file: Arc<Path>,
        /// The line, from 1.
        line: usize,
    },
}

impl ValueOrigin {
    pub(crate) fn of_node(tree: &Tree, node: &Node) -> Self {
        match &node.variable {
            Some(name) => ValueOrigin::Env {
                name: name.clone(),
                file: Arc::clone(&tree.file),
                line: node.position.line,
            },
            None => ValueOrigin::File {
                file: Arc::clone(&tree.file),
                line: node.position.line,
                column: node.position.column,
            },
        }
    }
}

/// `palisade.yaml:3:5`, `default`, `$NAME (palisade.yaml:3)`.
impl fmt::Display for ValueOrigin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ValueOrigin::File { file, line, column } => {
                write!(f, "{}:{line}:{column}", file.display())
            }
            ValueOrigin::Default => f.write_str("default"),
            ValueOrigin::Env { name, file, line } => {
                write!(f, "${name} ({}:{line})", file.display())
            }
        }
    }
}

/// Which origins [`record`] stores.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum OriginScope {
    /// The origins of all values.
    All,
    /// Only the origins of values from environment variables. Domain rules store their own origin,
    /// and there may be ten thousand of them.
    Variables,
}

/// Records the origins of `node` and of every value in it, as if `node` were at `pointer`.
pub(crate) fn record(
    tree: &Tree,
    node: &Node,
    pointer: &str,
    scope: OriginScope,
    origins: &mut BTreeMap<String, ValueOrigin>,
) {
    if matches!(node.content, Content::Absent | Content::Faulty) {
        return;
    }
    if scope == OriginScope::All || node.variable.is_some() {
        origins.insert(pointer.to_owned(), ValueOrigin::of_node(tree, node));
    }
    match &node.content {
        Content::List(items) => {
            for (index, item) in items.iter().enumerate() {
                let inner = join(pointer, &index.to_string());
                record(tree, item, &inner, scope, origins);
            }
        }
        Content::Map(entries) => {
            for entry in entries {
                let inner = join(pointer, &entry.key);
                record(tree, &entry.value, &inner, scope, origins);
            }
        }
        _ => {}
    }
}
