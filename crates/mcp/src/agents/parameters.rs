//! What tools are told. A field that is not here is refused, not ignored: an agent that asks
//! for more than there is should hear so.

use schemars::JsonSchema;
use serde::Deserialize;

/// For `sandbox-create`.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Create {
    /// What to call it: letters, digits and dashes. Its branch is palisade/NAME.
    pub name: String,
    /// Also bring the uncommitted changes of the operator's worktree.
    #[serde(default)]
    pub dirty: bool,
}

/// For `sandbox-list`.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Nothing {}

/// For tools that are about one sandbox and nothing else.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Which {
    /// The sandbox's name; may be left out when exactly one was made in this session.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(with = "String")]
    pub sandbox: Option<String>,
}

/// For `sandbox-delete`.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Delete {
    /// The sandbox's name; may be left out when exactly one was made in this session.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(with = "String")]
    pub sandbox: Option<String>,
    /// Also when work would be lost that is on no other branch. Only for sandboxes that were
    /// made in this session.
    #[serde(default)]
    pub force: bool,
}

/// For `read`.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Read {
    /// The sandbox's name; may be left out when exactly one was made in this session.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(with = "String")]
    pub sandbox: Option<String>,
    /// The file, from the workspace.
    pub path: String,
    /// The first line, from 1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(with = "i64", range(min = 1))]
    pub offset: Option<i64>,
    /// The most lines.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(with = "u64", range(min = 1))]
    pub limit: Option<u64>,
}

/// For `write`.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Write {
    /// The sandbox's name; may be left out when exactly one was made in this session.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(with = "String")]
    pub sandbox: Option<String>,
    /// The file, from the workspace. Directories on the way are made.
    pub path: String,
    /// Its whole new content.
    pub content: String,
}

/// For `edit`.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
pub struct Edit {
    /// The sandbox's name; may be left out when exactly one was made in this session.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(with = "String")]
    pub sandbox: Option<String>,
    /// The file, from the workspace.
    pub path: String,
    /// What is there, exactly, with all whitespace; it must be there once.
    pub old_text: String,
    /// What is to be there instead.
    pub new_text: String,
}

/// For `patch`.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Patch {
    /// The sandbox's name; may be left out when exactly one was made in this session.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(with = "String")]
    pub sandbox: Option<String>,
    /// A unified diff as git writes it, with paths a/… and b/… from the workspace.
    pub patch: String,
}

/// For `bash`.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
pub struct Bash {
    /// The sandbox's name; may be left out when exactly one was made in this session.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(with = "String")]
    pub sandbox: Option<String>,
    /// For a shell, in the workspace.
    pub command: String,
    /// After how many seconds it is killed, with everything it started; 300 if not said.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(with = "f64")]
    pub timeout_seconds: Option<f64>,
}

/// For `ls`.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Ls {
    /// The sandbox's name; may be left out when exactly one was made in this session.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(with = "String")]
    pub sandbox: Option<String>,
    /// The directory, from the workspace; the workspace itself if not said.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(with = "String")]
    pub path: Option<String>,
    /// The most names; 500 if not said.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(with = "u64", range(min = 1))]
    pub limit: Option<u64>,
}

/// For `glob`.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Glob {
    /// The sandbox's name; may be left out when exactly one was made in this session.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(with = "String")]
    pub sandbox: Option<String>,
    /// Such as *.rs or src/**/*.ts.
    pub pattern: String,
    /// Below which directory; the workspace if not said.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(with = "String")]
    pub path: Option<String>,
    /// The most files; 1000 if not said.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(with = "u64", range(min = 1))]
    pub limit: Option<u64>,
}

/// For `grep`.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
pub struct Grep {
    /// The sandbox's name; may be left out when exactly one was made in this session.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(with = "String")]
    pub sandbox: Option<String>,
    /// A regular expression.
    pub pattern: String,
    /// A file, or the directory to look below; the workspace if not said.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(with = "String")]
    pub path: Option<String>,
    /// Only in files that match this glob.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(with = "String")]
    pub glob: Option<String>,
    /// Upper case is lower case.
    #[serde(default)]
    pub ignore_case: bool,
    /// The pattern is a plain text.
    #[serde(default)]
    pub literal: bool,
    /// Lines before and after a match.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(with = "u64")]
    pub context: Option<u64>,
    /// The most matches; 100 if not said.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(with = "u64", range(min = 1))]
    pub limit: Option<u64>,
}

/// For `upload` and `download`.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Transfer {
    /// The sandbox's name; may be left out when exactly one was made in this session.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(with = "String")]
    pub sandbox: Option<String>,
    /// The file or directory to copy, from where it is now: the operator's repository for
    /// upload, the workspace for download.
    pub source: String,
    /// The directory to put it in, at the other end; the top if not said.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(with = "String")]
    pub to: Option<String>,
}

/// For `diff`.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Diff {
    /// The sandbox's name; may be left out when exactly one was made in this session.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(with = "String")]
    pub sandbox: Option<String>,
    /// Only which files, and how many lines.
    #[serde(default)]
    pub stat: bool,
}
