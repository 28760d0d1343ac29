//! Expansion of `${VAR}` in values.
//!
//! Only the text of a scalar changes, after the file has been parsed, and the result is never
//! parsed again. A variable therefore cannot add a key, a line or a list, whatever its value is.

use crate::problem::{Problem, quote};
use crate::tree::{Content, Node, Position, Tree, dotted, join};

/// Looks up an environment variable. The loader never reads the process environment by itself.
pub type Env<'a> = &'a (dyn Fn(&str) -> Option<String> + Sync);

/// Maximum length of an expanded value: 1 MiB.
const MAX_EXPANDED: usize = 1024 * 1024;

/// Values below this pointer may name a variable that is not set: a file lists the secrets of every
/// tool, and a tool that is never called needs none.
const SECRETS: &str = "/secrets/";

/// Expands every value of `tree`. A value that cannot be expanded is reported and becomes faulty. A
/// secret whose variable is not set becomes empty, with a warning.
pub(crate) fn expand(
    tree: &mut Tree,
    env: Env<'_>,
    problems: &mut Vec<Problem>,
    warnings: &mut Vec<Problem>,
) {
    let mut faults = Vec::new();
    walk(&mut tree.root, "", env, &mut faults);
    for (pointer, position, fault) in faults {
        let (message, hint) = fault.message_and_hint();
        if pointer.starts_with(SECRETS)
            && let Fault::Unset(_) = fault
        {
            let message = format!("{message}: {} is empty", dotted(&pointer));
            let hint = "set the variable before a tool needs this secret";
            warnings.push(tree.problem_at(position, &pointer, message).with_hint(hint));
        } else {
            problems.push(tree.problem_at(position, &pointer, message).with_hint(hint));
        }
    }
}

fn walk(node: &mut Node, pointer: &str, env: Env<'_>, faults: &mut Vec<(String, Position, Fault)>) {
    match &mut node.content {
        Content::Text(text) if text.contains("${") => match expand_text(text, env) {
            Ok(expanded) => {
                node.variable = expanded.variable;
                node.content = Content::Text(expanded.text);
            }
            Err(Fault::Unset(name)) if pointer.starts_with(SECRETS) => {
                node.variable = Some(name.clone());
                node.content = Content::Text(String::new());
                faults.push((pointer.to_owned(), node.position, Fault::Unset(name)));
            }
            Err(fault) => {
                node.content = Content::Faulty;
                faults.push((pointer.to_owned(), node.position, fault));
            }
        },
        Content::List(items) => {
            for (index, item) in items.iter_mut().enumerate() {
                walk(item, &join(pointer, &index.to_string()), env, faults);
            }
        }
        Content::Map(entries) => {
            for entry in entries {
                walk(&mut entry.value, &join(pointer, &entry.key), env, faults);
            }
        }
        _ => {}
    }
}

/// Text after expansion.
#[derive(PartialEq, Eq)]
pub(crate) struct Expanded {
    pub(crate) text: String,
    /// The first variable whose value is part of the text.
    pub(crate) variable: Option<String>,
}

/// Omits the text, which contains values of variables.
impl std::fmt::Debug for Expanded {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mut parts = f.debug_struct("Expanded");
        parts.field("variable", &self.variable);
        parts.finish_non_exhaustive()
    }
}

/// Why a text cannot be expanded.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Fault {
    Unset(String),
    Malformed,
    TooLong,
}

impl Fault {
    fn message_and_hint(&self) -> (String, String) {
        match self {
            Fault::Unset(name) => (
                format!("the environment variable {name} is not set"),
                format!("set it, or write ${{{name}:-default}}"),
            ),
            Fault::Malformed => (
                "this ${…} does not name a variable".to_owned(),
                "write ${NAME} or ${NAME:-default}, and $${ for a plain ${".to_owned(),
            ),
            Fault::TooLong => (
                format!(
                    "the value is longer than {MAX_EXPANDED} bytes after its variables are expanded"
                ),
                "use a shorter value".to_owned(),
            ),
        }
    }
}

/// Expands the variables of one text. As in a shell, the default after `:-` also replaces an empty
/// value.
pub(crate) fn expand_text(text: &str, env: Env<'_>) -> Result<Expanded, Fault> {
    let mut expanded = Expanded {
        text: String::with_capacity(text.len()),
        variable: None,
    };
    let mut rest = text;
    while let Some((before, after)) = rest.split_once("${") {
        if let Some(before) = before.strip_suffix('$') {
            expanded.text.push_str(before);
            expanded.text.push_str("${");
            rest = after;
            continue;
        }
        expanded.text.push_str(before);
        let (expression, after) = after.split_once('}').ok_or(Fault::Malformed)?;
        rest = after;
        expanded.append_value(expression, env)?;
    }
    expanded.text.push_str(rest);
    Ok(expanded)
}

/// Expands the variables of one word of a command, as a shell does: `$NAME`, `${NAME}` and
/// `${NAME:-default}`; `$$` is a literal `$`. A `$` before anything else is literal.
pub fn expand_word(word: &str, env: Env<'_>) -> Result<String, ExpandError> {
    let read = || {
        let mut expanded = Expanded {
            text: String::with_capacity(word.len()),
            variable: None,
        };
        let mut rest = word;
        while let Some((before, after)) = rest.split_once('$') {
            expanded.text.push_str(before);
            rest = after;
            if let Some(after) = after.strip_prefix('$') {
                expanded.text.push('$');
                rest = after;
            } else if let Some(expression) = after.strip_prefix('{') {
                let (expression, after) = expression.split_once('}').ok_or(Fault::Malformed)?;
                expanded.append_value(expression, env)?;
                rest = after;
            } else {
                let is_part = |c: char| c.is_ascii_alphanumeric() || c == '_';
                let end = after.find(|c| !is_part(c)).unwrap_or(after.len());
                let (name, after) = after.split_at(end);
                if is_variable(name) {
                    expanded.append_value(name, env)?;
                    rest = after;
                } else {
                    expanded.text.push('$');
                }
            }
        }
        expanded.text.push_str(rest);
        Ok(expanded.text)
    };
    read().map_err(|fault: Fault| ExpandError {
        word: quote(word),
        detail: match fault {
            Fault::Unset(name) => format!(
                "the environment variable {name} is not set; set it, or write $${name} for a \
                 plain ${name}"
            ),
            Fault::Malformed => {
                "a ${…} does not name a variable; write ${NAME}, or $$ for a plain $".to_owned()
            }
            Fault::TooLong => format!(
                "the word is longer than {MAX_EXPANDED} bytes after its variables are expanded"
            ),
        },
    })
}

/// A word of a command that cannot be expanded.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{word}: {detail}")]
pub struct ExpandError {
    word: String,
    detail: String,
}

impl Expanded {
    /// Appends the value of the expression in `${…}`: a name, and perhaps a default.
    fn append_value(&mut self, expression: &str, env: Env<'_>) -> Result<(), Fault> {
        let (name, default) = match expression.split_once(":-") {
            Some((name, default)) => (name, Some(default)),
            None => (expression, None),
        };
        if !is_variable(name) || default.is_some_and(|default| default.contains("${")) {
            return Err(Fault::Malformed);
        }
        let value = env(name).filter(|value| !(value.is_empty() && default.is_some()));
        match (value, default) {
            (Some(value), _) => {
                self.text.push_str(&value);
                self.variable.get_or_insert_with(|| name.to_owned());
            }
            (None, Some(default)) => self.text.push_str(default),
            (None, None) => return Err(Fault::Unset(name.to_owned())),
        }
        if self.text.len() > MAX_EXPANDED {
            return Err(Fault::TooLong);
        }
        Ok(())
    }
}

/// Whether `name` is a valid variable name: a letter or `_`, then letters, digits and `_`.
pub(crate) fn is_variable(name: &str) -> bool {
    let mut bytes = name.bytes();
    bytes
        .next()
        .is_some_and(|b| b.is_ascii_alphabetic() || b == b'_')
        && bytes.all(|b| b.is_ascii_alphanumeric() || b == b'_')
        && name.len() <= 256
}

#[cfg(test)]
mod tests {
    use super::*;

    fn env(name: &str) -> Option<String> {
        match name {
            "A" => Some("alpha".into()),
            "EMPTY" => Some(String::new()),
            "NESTED" => Some("${A}".into()),
            _ => None,
        }
    }

    #[test]
    fn variables_defaults_and_escapes_expand() {
        for (input, expected) in [
            ("${A}", "alpha"),
            ("x${A}y${A}z", "xalphayalphaz"),
            ("${NOPE:-d}", "d"),
            ("${NOPE:-}", ""),
            ("${EMPTY}", ""),
            ("${EMPTY:-d}", "d"),
            ("${A:-d}", "alpha"),
            ("${NOPE:-a:-b c}", "a:-b c"),
            ("$${A}", "${A}"),
            ("$$${A}", "$${A}"),
            ("$A $ $$ {A}", "$A $ $$ {A}"),
            ("${NESTED}", "${A}"),
        ] {
            assert_eq!(expand_text(input, &env).unwrap().text, expected, "{input}");
        }
    }

    #[test]
    fn invalid_variables_are_refused_without_their_values() {
        assert_eq!(
            expand_text("${NOPE}", &env),
            Err(Fault::Unset("NOPE".into()))
        );
        for bad in [
            "${",
            "${}",
            "${1A}",
            "${A",
            "${a-b}",
            "${ A}",
            "${X:-${A}}",
            "${:-d}",
        ] {
            assert_eq!(expand_text(bad, &env), Err(Fault::Malformed), "{bad}");
        }
        let long = |_: &str| Some("x".repeat(MAX_EXPANDED));
        assert_eq!(expand_text("${A}${A}", &long), Err(Fault::TooLong));
    }

    #[test]
    fn words_of_a_command_expand_as_in_a_shell() {
        for (input, expected) in [
            ("$A", "alpha"),
            ("${A}", "alpha"),
            ("/home/$A/data", "/home/alpha/data"),
            ("$A$A.${A}b", "alphaalpha.alphab"),
            ("${NOPE:-d}", "d"),
            ("$EMPTY", ""),
            ("$$A $${A} $$$A", "$A ${A} $alpha"),
            ("5$ $1 $(date) $", "5$ $1 $(date) $"),
            ("$NESTED", "${A}"),
        ] {
            assert_eq!(expand_word(input, &env).as_deref(), Ok(expected), "{input}");
        }
        for (bad, message) in [
            (
                "x$NOPE",
                "'x$NOPE': the environment variable NOPE is not set",
            ),
            (
                "$A_",
                "A_ is not set; set it, or write $$A_ for a plain $A_",
            ),
            ("${A", "does not name a variable"),
            ("${a-b}", "does not name a variable"),
        ] {
            let error = expand_word(bad, &env).unwrap_err().to_string();
            assert!(error.contains(message), "{error}");
        }
    }

    #[test]
    fn variable_name_is_kept_only_if_its_value_is_used() {
        assert_eq!(
            expand_text("${A}", &env).unwrap().variable.as_deref(),
            Some("A")
        );
        assert_eq!(expand_text("${NOPE:-d}", &env).unwrap().variable, None);
    }
}
