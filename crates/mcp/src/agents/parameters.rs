//! Parameters of the tools. Unknown fields are rejected, so that an agent receives an error for a
//! parameter that does not exist. The comments of the fields become the descriptions in the JSON
//! schemas.

use schemars::JsonSchema;
use serde::Deserialize;

/// Parameters of `sandbox-create`.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Create {
    /// The sandbox's name: letters, digits and dashes. Its branch is palisade/NAME.
    pub name: String,
    /// Also copy the uncommitted changes of the operator's worktree.
    #[serde(default)]
    pub dirty: bool,
}

/// Parameters of `sandbox-list`.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct NoParameters {}

/// For tools whose only parameter is the sandbox.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct SandboxOnly {
    /// The sandbox's name; optional if exactly one was created in this session.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(with = "String")]
    pub sandbox: Option<String>,
}

/// Parameters of `sandbox-delete`.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Delete {
    /// The sandbox's name; optional if exactly one was created in this session.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(with = "String")]
    pub sandbox: Option<String>,
    /// Delete even if work would be lost that is on no other branch. Only for sandboxes that were
    /// created in this session.
    #[serde(default)]
    pub force: bool,
}

/// Parameters of `read`.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Read {
    /// The sandbox's name; optional if exactly one was created in this session.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(with = "String")]
    pub sandbox: Option<String>,
    /// The file's path, relative to the workspace.
    pub path: String,
    /// The first line to read, counted from 1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(with = "i64", range(min = 1))]
    pub offset: Option<i64>,
    /// The maximum number of lines.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(with = "u64", range(min = 1))]
    pub limit: Option<u64>,
}

/// Parameters of `write`.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Write {
    /// The sandbox's name; optional if exactly one was created in this session.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(with = "String")]
    pub sandbox: Option<String>,
    /// The file's path, relative to the workspace. Missing directories are created.
    pub path: String,
    /// The file's whole new content.
    pub content: String,
}

/// Parameters of `edit`.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
pub struct Edit {
    /// The sandbox's name; optional if exactly one was created in this session.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(with = "String")]
    pub sandbox: Option<String>,
    /// The file's path, relative to the workspace.
    pub path: String,
    /// The exact text to replace, with all whitespace; it must occur once in the file.
    pub old_text: String,
    /// The text to put in its place.
    pub new_text: String,
}

/// Parameters of `patch`.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Patch {
    /// The sandbox's name; optional if exactly one was created in this session.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(with = "String")]
    pub sandbox: Option<String>,
    /// A unified diff as git writes it, with paths a/… and b/… relative to the workspace.
    pub patch: String,
}

/// Parameters of `bash`.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
pub struct Bash {
    /// The sandbox's name; optional if exactly one was created in this session.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(with = "String")]
    pub sandbox: Option<String>,
    /// The shell command; it runs in the workspace.
    pub command: String,
    /// Timeout in seconds, after which the command and its child processes are killed; default
    /// 300.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(with = "f64")]
    pub timeout_seconds: Option<f64>,
}

/// Parameters of `ls`.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Ls {
    /// The sandbox's name; optional if exactly one was created in this session.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(with = "String")]
    pub sandbox: Option<String>,
    /// The directory, relative to the workspace; default: the workspace.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(with = "String")]
    pub path: Option<String>,
    /// The maximum number of entries; default 500.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(with = "u64", range(min = 1))]
    pub limit: Option<u64>,
}

/// Parameters of `glob`.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Glob {
    /// The sandbox's name; optional if exactly one was created in this session.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(with = "String")]
    pub sandbox: Option<String>,
    /// The glob, such as *.rs or src/**/*.ts.
    pub pattern: String,
    /// The directory to search; default: the workspace.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(with = "String")]
    pub path: Option<String>,
    /// The maximum number of files; default 1000.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(with = "u64", range(min = 1))]
    pub limit: Option<u64>,
}

/// Parameters of `grep`.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
pub struct Grep {
    /// The sandbox's name; optional if exactly one was created in this session.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(with = "String")]
    pub sandbox: Option<String>,
    /// A regular expression.
    pub pattern: String,
    /// The file or directory to search; default: the workspace.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(with = "String")]
    pub path: Option<String>,
    /// Search only files that match this glob.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(with = "String")]
    pub glob: Option<String>,
    /// Ignore upper and lower case.
    #[serde(default)]
    pub ignore_case: bool,
    /// Treat the pattern as plain text.
    #[serde(default)]
    pub literal: bool,
    /// The number of lines to show before and after each match.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(with = "u64")]
    pub context: Option<u64>,
    /// The maximum number of matches; default 100.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(with = "u64", range(min = 1))]
    pub limit: Option<u64>,
}

/// Parameters of `upload` and `download`.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Transfer {
    /// The sandbox's name; optional if exactly one was created in this session.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(with = "String")]
    pub sandbox: Option<String>,
    /// The file or directory to copy: relative to the operator's repository for upload, to the
    /// workspace for download.
    pub source: String,
    /// The target directory: relative to the workspace for upload, to the operator's repository
    /// for download; default: its top directory.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(with = "String")]
    pub to: Option<String>,
}

/// Parameters of `diff`.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Diff {
    /// The sandbox's name; optional if exactly one was created in this session.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(with = "String")]
    pub sandbox: Option<String>,
    /// Show only the changed files and their line counts.
    #[serde(default)]
    pub stat: bool,
}
