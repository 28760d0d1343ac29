//! Import of other tools' network policies: the text of a palisade.yaml, and notes about what it
//! does not contain.
//!
//! The files are not trusted. What is not understood is left out and named, so that a policy never
//! becomes wider by being imported without a note.

mod builder;
mod claude_settings;
mod docker_kit;
mod document;
mod openshell;
mod srt;

use std::path::Path;

use crate::file::{self, Links};
use crate::layer::Layer;
use crate::palisade_file::{File, PALISADE};
use crate::section::egress::DomainRule;

use self::builder::PolicyBuilder;
use self::document::Document;

/// Maximum size of an imported file: 1 MiB.
const MAX_BYTES: u64 = 1024 * 1024;

/// The format of another tool's policy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ImportFormat {
    /// Settings of Anthropic's sandbox runtime, such as `~/.srt-settings.json`.
    Srt,
    /// `settings.json` of Claude Code.
    ClaudeSettings,
    /// A policy of NVIDIA OpenShell.
    OpenShell,
    /// `spec.yaml` of a Docker sandbox kit.
    DockerKit,
}

/// The result of an import.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ImportedPolicy {
    /// The text of palisade.yaml.
    pub text: String,
    /// What was not carried over, or differs here.
    pub notes: Vec<String>,
    /// The number of domain rules.
    pub rules: usize,
}

/// Why a file cannot be imported.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum ImportError {
    /// The file cannot be read.
    #[error("cannot be read: {0}")]
    Unreadable(String),
    /// The file is not in this format.
    #[error("{0}")]
    Invalid(String),
    /// The file has too many rules.
    #[error("more than {0} hosts; split the file")]
    TooMany(usize),
}

impl ImportFormat {
    /// The name of the format on the command line.
    pub const fn as_str(self) -> &'static str {
        match self {
            ImportFormat::Srt => "srt",
            ImportFormat::ClaudeSettings => "claude-settings",
            ImportFormat::OpenShell => "openshell",
            ImportFormat::DockerKit => "docker-kit",
        }
    }
}

/// Reads the file at `path` and converts it.
pub fn import_file(format: ImportFormat, path: &Path) -> Result<ImportedPolicy, ImportError> {
    let bytes = file::read(path, MAX_BYTES, Links::Follow)
        .map_err(|why| ImportError::Unreadable(why.to_string()))?;
    import(format, &bytes)
}

/// Converts the content of a file.
pub fn import(format: ImportFormat, bytes: &[u8]) -> Result<ImportedPolicy, ImportError> {
    let mut builder = PolicyBuilder::default();
    match format {
        ImportFormat::Srt => srt::read(&Document::json(bytes)?, &mut builder)?,
        ImportFormat::ClaudeSettings => {
            claude_settings::read(&Document::json(bytes)?, &mut builder)?;
        }
        ImportFormat::OpenShell => openshell::read(&Document::yaml(bytes)?, &mut builder)?,
        ImportFormat::DockerKit => docker_kit::read(&Document::yaml(bytes)?, &mut builder)?,
    }
    let (rules, notes) = builder.finish();
    let text = write(format, &rules);
    if parse(&text).as_ref() != Some(&rules) {
        let message = "the rules cannot be written as palisade.yaml".to_owned();
        return Err(ImportError::Invalid(message));
    }
    Ok(ImportedPolicy {
        text,
        notes,
        rules: rules.len(),
    })
}

/// The text of palisade.yaml with these rules.
fn write(format: ImportFormat, rules: &[DomainRule]) -> String {
    let name = format.as_str();
    let mut text = format!("# Written by palisade import {name}.\nversion: \"1.0\"\negress:\n");
    if rules.is_empty() {
        return text + "  domains: []\n";
    }
    text.push_str("  domains:\n");
    for rule in rules {
        // JSON is YAML.
        let rule = serde_json::to_string(rule).unwrap_or_default();
        text.push_str(&format!("    - {rule}\n"));
    }
    text
}

/// The rules in the text; none if it has problems.
fn parse(text: &str) -> Option<Vec<DomainRule>> {
    let (mut problems, path) = (Vec::new(), Path::new("palisade.yaml"));
    let none = |_: &str| None;
    let layer = Layer::<File>::read(&PALISADE, path, text.as_bytes(), Some(&none), &mut problems)?;
    problems.is_empty().then_some(layer.value.egress.domains)
}

/// Imports `bytes` in each format and discards the result: for fuzzing.
pub fn fuzz_check(bytes: &[u8]) {
    for format in [
        ImportFormat::Srt,
        ImportFormat::ClaudeSettings,
        ImportFormat::OpenShell,
        ImportFormat::DockerKit,
    ] {
        let _ = import(format, bytes);
    }
}

#[cfg(test)]
mod tests;
