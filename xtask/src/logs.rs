//! The table of log messages in docs/observability.md, generated from the sources.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::Path;

use anyhow::{Context, Result};

use crate::source_text::{LogCall, log_calls, without_tests};

/// The document that holds the table.
pub const FILE: &str = "docs/observability.md";

/// The line before the table.
const BEGIN: &str = "<!-- log messages: written by `cargo xtask logs` -->\n";
/// The line after the table.
const END: &str = "<!-- end of the log messages -->\n";

/// `document` with the table replaced by the log calls in the sources.
pub fn render(root: &Path, files: &[String], document: &str) -> Result<String> {
    let (before, rest) = document
        .split_once(BEGIN)
        .context("the marker at the start of the table is missing")?;
    let (_, after) = rest
        .split_once(END)
        .context("the marker at the end of the table is missing")?;
    let mut calls: BTreeMap<(String, LogCall), ()> = BTreeMap::new();
    for file in files.iter().filter(|file| is_source(file)) {
        let name = file.split('/').nth(1).unwrap_or_default();
        let text = std::fs::read_to_string(root.join(file)).unwrap_or_default();
        for call in log_calls(without_tests(&text)) {
            calls.insert((name.to_owned(), call), ());
        }
    }
    let mut table =
        String::from("| component | level | message | fields |\n| --- | --- | --- | --- |\n");
    for (component, call) in calls.keys() {
        let fields: Vec<String> = call.fields.iter().map(|name| format!("`{name}`")).collect();
        writeln!(
            table,
            "| {component} | {} | {} | {} |",
            call.level,
            call.message.replace('|', "\\|"),
            fields.join(", ")
        )?;
    }
    Ok(format!("{before}{BEGIN}{table}{END}{after}"))
}

fn is_source(file: &str) -> bool {
    let is_test = file
        .split('/')
        .any(|part| matches!(part, "tests" | "tests.rs"));
    let is_source = file.starts_with("crates/") && file.contains("/src/") && file.ends_with(".rs");
    is_source && !is_test && !file.starts_with("crates/testkit/")
}

/// The violations: the table differs from the sources, or a log call has no constant message.
pub fn check(root: &Path, files: &[String]) -> Result<Vec<String>> {
    let document = std::fs::read_to_string(root.join(FILE))?;
    let current = render(root, files, &document)? == document;
    let mut violations = Vec::new();
    if !current {
        violations.push(format!(
            "{FILE}: the log messages changed: run 'cargo xtask logs'"
        ));
    }
    for file in files.iter().filter(|file| is_source(file)) {
        let text = std::fs::read_to_string(root.join(file)).unwrap_or_default();
        let calls = log_calls(without_tests(&text));
        if calls.iter().any(|call| call.message.is_empty()) {
            violations.push(format!("{file}: a log call without a constant message"));
        }
    }
    Ok(violations)
}

/// Writes the table.
pub fn write(root: &Path, files: &[String]) -> Result<()> {
    let path = root.join(FILE);
    let document = std::fs::read_to_string(&path)?;
    std::fs::write(path, render(root, files, &document)?)?;
    Ok(())
}
