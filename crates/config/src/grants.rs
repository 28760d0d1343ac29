//! grants.yaml: the hosts that the operator allowed or denied by a command, for all sandboxes or
//! for one. Reads the file, and edits its text without touching anything else in it.
//!
//! An edit changes single lines. The result is parsed again: it must contain exactly the rules that
//! the edit is for, or nothing is written.

mod lines;

use std::collections::BTreeMap;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::LazyLock;

use policy::host::HostPattern;
use schemars::JsonSchema;
use serde::Deserialize;

use crate::file::{self, FileReadError, Links, OPERATOR_LIMIT};
use crate::layer::Layer;
use crate::leaf::{KeyedMap, Slug};
use crate::problem::{Problem, Problems};
use crate::schema::FileSchema;
use crate::section::egress::{DenyRule, DomainRule};
use crate::unavailable;
use crate::version::Version;

/// The file beside palisade.yaml that receives grants and 'allow always' answers.
pub const FILE_NAME: &str = "grants.yaml";

/// The text of a new file.
const NEW_FILE: &str = "# Written by palisade allow and palisade deny. You may edit it.\n\
                        version: \"1.0\"\n";

/// The schema of the file.
pub(crate) static GRANTS: LazyLock<FileSchema> =
    LazyLock::new(|| FileSchema::for_type::<GrantsFile>(unavailable::GRANTS, &[]));

/// grants.yaml.
#[derive(Clone, Debug, Default, PartialEq, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub(crate) struct GrantsFile {
    /// Version of the file format.
    pub(crate) version: Version,
    /// Hosts that may be reached: a name, or a rule.
    pub(crate) domains: Vec<DomainRule>,
    /// Hosts that single sandboxes may reach, by sandbox id. Entries of deleted sandboxes have no
    /// effect.
    #[schemars(with = "KeyedMap<Slug, SandboxGrants>")]
    pub(crate) sandboxes: BTreeMap<String, SandboxGrants>,
}

/// Hosts that one sandbox may reach.
#[derive(Clone, Debug, Default, PartialEq, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub(crate) struct SandboxGrants {
    /// Hosts that the sandbox may reach in addition to those of all sandboxes, as in
    /// `egress.domains`; a `deny` applies to this sandbox only.
    pub(crate) domains: Vec<DomainRule>,
}

/// A change of the file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GrantChange {
    /// Whether the hosts may be reached.
    pub action: GrantAction,
    /// The hosts.
    pub host: HostPattern,
    /// The ports; empty for 80 and 443.
    pub ports: Vec<u16>,
    /// The id of the only sandbox to which the change applies; none for all sandboxes.
    pub sandbox: Option<String>,
}

/// Whether hosts may be reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GrantAction {
    /// They may be reached.
    Allow,
    /// They may not be reached.
    Deny,
}

/// A file with a change, not written yet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EditedGrants {
    path: PathBuf,
    before: Option<Vec<u8>>,
    text: String,
}

/// Why the file cannot be changed.
#[derive(Debug, thiserror::Error)]
pub enum GrantsError {
    /// The file is invalid.
    #[error("{0}\ncorrect the file, then try again")]
    Invalid(Problems),
    /// The file cannot be read.
    #[error("{} cannot be read: {reason}", path.display())]
    FileReadError {
        /// The file.
        path: PathBuf,
        /// The reason.
        reason: String,
    },
    /// The file is written in a form that cannot be edited line by line.
    #[error(
        "{} cannot be edited automatically; add this below {below}: {entry}",
        path.display()
    )]
    NotEditable {
        /// The file.
        path: PathBuf,
        /// The key to which the entry belongs.
        below: String,
        /// The entry.
        entry: String,
    },
    /// The file was changed meanwhile.
    #[error("{} was changed meanwhile; try again", path.display())]
    Changed {
        /// The file.
        path: PathBuf,
    },
    /// The file cannot be written.
    #[error("{} cannot be written: {source}", path.display())]
    Unwritable {
        /// The file.
        path: PathBuf,
        /// The error.
        source: std::io::Error,
    },
}

impl GrantChange {
    /// The rule of the change.
    fn rule(&self) -> DomainRule {
        DomainRule {
            ports: self.ports.clone(),
            deny: match self.action {
                GrantAction::Allow => Vec::new(),
                GrantAction::Deny => vec![DenyRule::default()],
            },
            ..DomainRule::allow_all(self.host.clone())
        }
    }

    /// Whether the change replaces this rule: a grant of the same host in the other direction.
    fn replaces(&self, rule: &DomainRule) -> bool {
        let other = DomainRule {
            ports: rule.ports.clone(),
            deny: match self.action {
                GrantAction::Allow => vec![DenyRule::default()],
                GrantAction::Deny => Vec::new(),
            },
            ..DomainRule::allow_all(self.host.clone())
        };
        *rule == other
    }

    /// The rule as one line of YAML.
    fn entry(&self) -> String {
        let host = self.host.to_string();
        let is_plain = host.starts_with(|c: char| c.is_ascii_lowercase())
            && host
                .bytes()
                .all(|b| b.is_ascii_alphanumeric() || b"-.".contains(&b));
        let host = if is_plain {
            host
        } else {
            format!("\"{host}\"")
        };
        let mut keys = Vec::new();
        if !self.ports.is_empty() {
            let ports: Vec<String> = self.ports.iter().map(u16::to_string).collect();
            keys.push(format!("ports: [{}]", ports.join(", ")));
        }
        if self.action == GrantAction::Deny {
            keys.push("deny: [{}]".to_owned());
        }
        match keys.as_slice() {
            // `true` and `null` would not be text.
            [] if host.contains(['.', '"']) => host,
            [] => format!("\"{host}\""),
            keys => format!("{{host: {host}, {}}}", keys.join(", ")),
        }
    }
}

impl GrantsFile {
    fn rules(&self, sandbox: Option<&String>) -> &[DomainRule] {
        match sandbox {
            None => &self.domains,
            Some(id) => self.sandboxes.get(id).map_or(&[], |own| &own.domains),
        }
    }

    /// The content after a change; none if the change is in the file already.
    fn after(&self, change: &GrantChange) -> Option<Self> {
        let rule = change.rule();
        let mut rules = self.rules(change.sandbox.as_ref()).to_vec();
        let before = rules.len();
        rules.retain(|known| !change.replaces(known));
        if rules.contains(&rule) && rules.len() == before {
            return None;
        }
        if !rules.contains(&rule) {
            rules.push(rule);
        }
        let mut after = self.clone();
        match &change.sandbox {
            None => after.domains = rules,
            Some(id) => after.sandboxes.entry(id.clone()).or_default().domains = rules,
        }
        Some(after)
    }
}

/// Reads the file at `path` and applies a change to its text. None if the file has the change
/// already.
pub fn edit(path: &Path, change: &GrantChange) -> Result<Option<EditedGrants>, GrantsError> {
    let before = read(path)?;
    let text = match &before {
        Some(bytes) => String::from_utf8_lossy(bytes).into_owned(),
        None => NEW_FILE.to_owned(),
    };
    let layer = parse(path, text.as_bytes()).map_err(GrantsError::Invalid)?;
    let Some(wanted) = layer.value.after(change) else {
        return Ok(None);
    };
    let not_editable = || GrantsError::NotEditable {
        path: path.to_owned(),
        below: match &change.sandbox {
            None => "domains".to_owned(),
            Some(id) => format!("sandboxes.{id}.domains"),
        },
        entry: change.entry(),
    };
    let rules = layer.value.rules(change.sandbox.as_ref());
    let removed: Vec<usize> = (0..rules.len())
        .filter(|index| rules.get(*index).is_some_and(|rule| change.replaces(rule)))
        .collect();
    let rule = change.rule();
    let entry = (!rules.contains(&rule)).then(|| change.entry());
    let edited = lines::edit(
        &layer.tree,
        &text,
        change.sandbox.as_deref(),
        &removed,
        entry.as_deref(),
    )
    .ok_or_else(not_editable)?;
    match parse(path, edited.as_bytes()) {
        Ok(after) if after.value == wanted => Ok(Some(EditedGrants {
            path: path.to_owned(),
            before,
            text: edited,
        })),
        _ => Err(not_editable()),
    }
}

fn parse(path: &Path, bytes: &[u8]) -> Result<Layer<GrantsFile>, Problems> {
    let mut problems: Vec<Problem> = Vec::new();
    let layer = Layer::<GrantsFile>::read(&GRANTS, path, bytes, None, &mut problems);
    match layer {
        Some(layer) if problems.is_empty() => Ok(layer),
        _ => Err(problems.into()),
    }
}

fn read(path: &Path) -> Result<Option<Vec<u8>>, GrantsError> {
    match file::read(path, OPERATOR_LIMIT, Links::Follow) {
        Ok(bytes) => Ok(Some(bytes)),
        Err(FileReadError::Missing) => Ok(None),
        Err(why) => Err(GrantsError::FileReadError {
            path: path.to_owned(),
            reason: why.to_string(),
        }),
    }
}

impl EditedGrants {
    /// The changed lines, each after `-` or `+`.
    pub fn changed_lines(&self) -> Vec<String> {
        let before = self.before.as_deref().unwrap_or_default();
        let before = String::from_utf8_lossy(before);
        lines::difference(&before, &self.text)
    }

    /// The file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Replaces the file, which keeps its mode; a new file is only for its owner. A reader sees the
    /// old file or the new one.
    pub fn write(&self) -> Result<(), GrantsError> {
        if read(&self.path)? != self.before {
            return Err(GrantsError::Changed {
                path: self.path.clone(),
            });
        }
        self.replace().map_err(|source| GrantsError::Unwritable {
            path: self.path.clone(),
            source,
        })
    }

    fn replace(&self) -> std::io::Result<()> {
        // The file may be a link, which stays.
        let target = std::fs::canonicalize(&self.path).unwrap_or_else(|_| self.path.clone());
        let mode =
            std::fs::metadata(&target).map_or(0o600, |data| data.permissions().mode() & 0o777);
        file::write_atomically(&target, self.text.as_bytes(), mode)
    }
}

#[cfg(test)]
mod tests;
