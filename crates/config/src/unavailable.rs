//! Keys of features that this version does not have. They are in the schema, so that they are
//! checked and documented; setting one is an error, because nothing would enforce it.
//!
//! This is the only list of them: the change that adds a feature removes its keys here.

use serde_json::Value;

use crate::problem::Problem;
use crate::tree::{dotted, join, segments};

/// A key, and the accepted values, which do not need the feature.
#[derive(Debug)]
pub(crate) struct Unavailable {
    /// The key; `[]` matches every item of a list or mapping.
    key: &'static str,
    /// Values, `[]` for an empty list, `{}` for an empty mapping.
    accepted: &'static [&'static str],
}

const fn unavailable(key: &'static str, accepted: &'static [&'static str]) -> Unavailable {
    Unavailable { key, accepted }
}

/// In palisade.yaml.
pub(crate) const PALISADE: &[Unavailable] = &[
    // Approval by the operator.
    unavailable("egress.unknown", &["deny"]),
    unavailable("git.scan", &["deny", "note", "off"]),
    unavailable("approvals.mode", &["unattended"]),
    unavailable("approvals.hold", &[]),
    unavailable("approvals.webhook", &[]),
    // The scanner of requests and responses.
    unavailable("egress.domains[].scan", &["off"]),
    unavailable("scan.outbound", &["off"]),
    unavailable("scan.injection", &["off"]),
    unavailable("scan.rules", &["[]"]),
    unavailable("scan.budget.bytes", &[]),
    unavailable("scan.budget.depth", &[]),
    // Credentials that the gate adds.
    unavailable("credentials.github_app", &[]),
    unavailable("credentials.oauth", &["{}"]),
    // Docker.
    unavailable("sandbox.backend", &["namespace", "remote"]),
    unavailable("sandbox.image", &[]),
];

/// In allowlist.yaml.
pub(crate) const ALLOWLIST: &[Unavailable] = &[unavailable("domains[].scan", &["off"])];

/// In grants.yaml.
pub(crate) const GRANTS: &[Unavailable] = &[
    unavailable("domains[].scan", &["off"]),
    unavailable("sandboxes[].domains[].scan", &["off"]),
];

/// In a repository's .palisade.yaml. Its `image` is not an error, because the operator, who would
/// have to remove it, did not write it. `run` and `create` report it.
pub(crate) const REPOSITORY: &[Unavailable] = &[unavailable("egress.domains[].scan", &["off"])];

impl Unavailable {
    /// The sentence that is added to the description of the key.
    pub(crate) fn note(&self) -> String {
        match self.accepted {
            [] => "Not available in this version: setting it is an error.".to_owned(),
            accepted => format!(
                "In this version only {} is accepted: nothing would enforce anything else.",
                join_words(accepted, "`")
            ),
        }
    }

    /// The pointers in `schema` to the schemas of this key.
    pub(crate) fn properties(&self, schema: &Value) -> Vec<String> {
        let mut found = Vec::new();
        find_properties(schema, "", &parts(self.key), &mut found);
        found
    }

    fn accepts(&self, value: &Value) -> bool {
        let text = match value {
            Value::Null => return true,
            Value::String(text) => text.as_str(),
            Value::Array(items) if items.is_empty() => "[]",
            Value::Object(object) if object.is_empty() => "{}",
            _ => return false,
        };
        self.accepted.contains(&text)
    }
}

/// Reports every key of `table` that a file sets to a value that is not accepted. `value` is the
/// part of the file that the schema accepted; the rest has been reported. `problem` creates a
/// problem for a pointer into `value`.
pub(crate) fn check(
    table: &[Unavailable],
    value: &Value,
    problem: impl Fn(&str, String) -> Problem,
) -> Vec<Problem> {
    let mut problems = Vec::new();
    for entry in table {
        let mut pointers = Vec::new();
        find_values(value, "", &parts(entry.key), &mut pointers);
        for (pointer, value) in pointers {
            if entry.accepts(value) {
                continue;
            }
            let message = format!(
                "{} is not available in this version: nothing would enforce it",
                dotted(&pointer)
            );
            let hint = match entry.accepted {
                [] => "remove it".to_owned(),
                accepted => format!("remove it, or set it to {}", join_words(accepted, "")),
            };
            problems.push(problem(&pointer, message).with_hint(hint));
        }
    }
    problems
}

/// Whether a value of `config show` belongs to a feature that this version does not have: a default
/// that nothing enforces must not be shown as if it had an effect.
pub(crate) fn is_unavailable(pointer: &str, value: &Value) -> bool {
    PALISADE.iter().any(|entry| {
        let parts = parts(entry.key);
        let mut segments = segments(pointer);
        let is_below = parts.iter().all(|part| match segments.next() {
            Some(segment) => *part == "[]" || *part == segment,
            None => false,
        });
        is_below && !entry.accepts(value)
    })
}

/// `a.b[].c` as a, b, [], c.
fn parts(key: &'static str) -> Vec<&'static str> {
    let names = key.split('.');
    names
        .flat_map(|name| match name.strip_suffix("[]") {
            Some(name) => vec![name, "[]"],
            None => vec![name],
        })
        .collect()
}

fn find_values<'v>(
    value: &'v Value,
    pointer: &str,
    parts: &[&str],
    found: &mut Vec<(String, &'v Value)>,
) {
    match (parts, value) {
        ([], value) => found.push((pointer.to_owned(), value)),
        (["[]", rest @ ..], Value::Array(items)) => {
            for (index, item) in items.iter().enumerate() {
                find_values(item, &join(pointer, &index.to_string()), rest, found);
            }
        }
        (["[]", rest @ ..], Value::Object(object)) => {
            for (name, value) in object {
                find_values(value, &join(pointer, name), rest, found);
            }
        }
        ([name, rest @ ..], Value::Object(object)) => {
            if let Some(value) = object.get(*name) {
                find_values(value, &join(pointer, name), rest, found);
            }
        }
        _ => {}
    }
}

fn find_properties(schema: &Value, at: &str, parts: &[&str], found: &mut Vec<String>) {
    let Some(node) = schema.pointer(at) else {
        return;
    };
    if let Some(target) = node.get("$ref").and_then(Value::as_str) {
        find_properties(schema, target.trim_start_matches('#'), parts, found);
    }
    let branches = node.get("anyOf").and_then(Value::as_array);
    for index in 0..branches.map_or(0, Vec::len) {
        find_properties(schema, &format!("{at}/anyOf/{index}"), parts, found);
    }
    match parts {
        ["[]", rest @ ..] => {
            find_properties(schema, &format!("{at}/items"), rest, found);
            find_properties(schema, &format!("{at}/additionalProperties"), rest, found);
        }
        [name, rest @ ..] => {
            let property = format!("{at}/properties/{name}");
            if schema.pointer(&property).is_none() {
                return;
            }
            match rest {
                [] => found.push(property),
                rest => find_properties(schema, &property, rest, found),
            }
        }
        [] => {}
    }
}

/// `a, b or c`.
fn join_words(list: &[&str], quote: &str) -> String {
    let quoted: Vec<String> = list
        .iter()
        .map(|word| format!("{quote}{word}{quote}"))
        .collect();
    match quoted.as_slice() {
        [front @ .., last] if !front.is_empty() => format!("{} or {last}", front.join(", ")),
        other => other.concat(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Env, Sources, TEMPLATE};

    /// For each key of the table a file with `@` on its third line, a value that is refused there,
    /// and values that are accepted.
    const FILES: &[(&str, &str, &str, &[&str])] = &[
        ("egress.unknown", "egress:\n  unknown: @", "ask", &["deny"]),
        (
            "git.scan",
            "git:\n  scan: @",
            "ask",
            &["deny", "note", "off"],
        ),
        (
            "approvals.mode",
            "approvals:\n  mode: @",
            "interactive",
            &["unattended"],
        ),
        ("approvals.hold", "approvals:\n  hold: @", "60s", &[]),
        (
            "approvals.webhook",
            "approvals:\n  webhook: @",
            "https://h.example/x",
            &["null"],
        ),
        (
            "egress.domains[0].scan",
            "egress:\n  domains: [{host: a.example, scan: @}]",
            "redact",
            &["off"],
        ),
        ("scan.outbound", "scan:\n  outbound: @", "deny", &["off"]),
        ("scan.injection", "scan:\n  injection: @", "note", &["off"]),
        ("scan.rules", "scan:\n  rules: @", "[mine.toml]", &["[]"]),
        (
            "scan.budget.bytes",
            "scan:\n  budget: {bytes: @}",
            "64MiB",
            &[],
        ),
        ("scan.budget.depth", "scan:\n  budget: {depth: @}", "4", &[]),
        (
            "credentials.github_app",
            "credentials:\n  github_app: @",
            "{app_id: 1, installation_id: 2, key: 'env:K'}",
            &["null"],
        ),
        (
            "credentials.oauth",
            "credentials:\n  oauth: @",
            "{codex: {file: auth.json}}",
            &["{}", "{codex: null}"],
        ),
        (
            "sandbox.backend",
            "sandbox:\n  backend: @",
            "docker",
            &["namespace"],
        ),
        (
            "sandbox.image",
            "sandbox:\n  image: @",
            "tools.example/agent:1",
            &[],
        ),
    ];

    fn load(text: &str) -> Result<crate::Settings, crate::Problems> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("palisade.yaml");
        std::fs::write(&path, text).unwrap();
        let env: Env<'_> = &|_| None;
        Sources::read(Some(&path), env)?.settings(env)
    }

    // Issue 14, number 7.
    #[test]
    fn unavailable_keys_are_errors_that_name_key_and_line() {
        assert_eq!(FILES.len(), PALISADE.len(), "a key without a file");
        for (entry, (key, file, refused, accepted)) in PALISADE.iter().zip(FILES) {
            assert_eq!(entry.key.replace("[]", "[0]"), *key);
            let with = |value: &str| load(&format!("version: 1\n{}\n", file.replace('@', value)));
            let problems = with(refused).unwrap_err();
            let messages: Vec<_> = problems.iter().map(|p| (p.line, p.to_string())).collect();
            let [(3, message)] = messages.as_slice() else {
                panic!("{key}: {messages:?}");
            };
            let expected = format!(
                "{key} is not available in this version: nothing would enforce it; remove it"
            );
            assert!(message.contains(&expected), "{message}");
            for value in *accepted {
                with(value).unwrap();
            }
        }
    }

    #[test]
    fn a_file_without_unavailable_keys_loads() {
        let settings = load(TEMPLATE).unwrap();
        let shown = settings.show();
        // Values that nothing enforces are not shown, because they have no effect.
        let is_shown = |pointer: &str| shown.iter().any(|value| value.pointer.starts_with(pointer));
        assert!(!is_shown("/scan/outbound") && !is_shown("/approvals/hold"));
        assert!(is_shown("/git/scan") && is_shown("/sandbox/backend"));
    }

    #[test]
    fn every_unavailable_key_is_documented() {
        let page = crate::reference_markdown();
        for entry in PALISADE {
            let row = page
                .lines()
                .find(|line| line.starts_with(&format!("| `{}` |", entry.key)));
            let note = entry.note();
            assert!(row.is_some_and(|row| row.contains(&note)), "{}", entry.key);
        }
    }
}
