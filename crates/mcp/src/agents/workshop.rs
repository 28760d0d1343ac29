//! What the server for agents needs of others: sandboxes, their tools, and the branch that
//! keeps what was done.

use async_trait::async_trait;
use policy::id::SandboxId;
use schemars::JsonSchema;
use serde::Serialize;

use super::parameters::{Bash, Edit, Glob, Grep, Ls, Read, Write};

/// Why something was not done.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum WorkshopError {
    /// The call names what cannot be or is not there.
    #[error("{0}")]
    Invalid(String),
    /// It was asked for rightly, and a tool or a sandbox's state says no.
    #[error("{0}")]
    Refused(String),
    /// Something broke.
    #[error("{0}")]
    Failed(String),
}

/// Sandboxes of one repository, and what can be done with them.
#[async_trait]
pub trait Workshop: Send + Sync + 'static {
    /// Makes a sandbox. What it may reach and as whom is not the agent's to say.
    async fn create(&self, name: &str, dirty: bool) -> Result<Sandbox, WorkshopError>;

    /// Every sandbox of the repository.
    async fn list(&self) -> Result<Vec<Sandbox>, WorkshopError>;

    /// The sandbox of that name or id, if it is one of the repository's.
    async fn find(&self, name: &str) -> Result<Sandbox, WorkshopError>;

    /// Its ports.
    async fn ports(&self, at: &SandboxId) -> Result<Ports, WorkshopError>;

    /// Stops its processes where they are.
    async fn pause(&self, at: &SandboxId) -> Result<(), WorkshopError>;

    /// Lets its processes go on.
    async fn resume(&self, at: &SandboxId) -> Result<(), WorkshopError>;

    /// Removes it with its branch; where work would be lost only with `force`.
    async fn delete(&self, at: &SandboxId, force: bool) -> Result<Deleted, WorkshopError>;

    /// Reads a file inside.
    async fn read(&self, at: &SandboxId, asked: &Read) -> Result<Content, WorkshopError>;

    /// Writes a file inside.
    async fn write(&self, at: &SandboxId, asked: &Write) -> Result<Written, WorkshopError>;

    /// Changes a file inside, and says how.
    async fn edit(&self, at: &SandboxId, asked: &Edit) -> Result<Edited, WorkshopError>;

    /// Applies a unified diff inside, all of it or nothing.
    async fn patch(&self, at: &SandboxId, patch: &str) -> Result<Vec<String>, WorkshopError>;

    /// Runs a command inside. When the call is dropped, it ends with everything it started.
    async fn bash(&self, at: &SandboxId, asked: &Bash) -> Result<Ran, WorkshopError>;

    /// Lists a directory inside.
    async fn ls(&self, at: &SandboxId, asked: &Ls) -> Result<Listed, WorkshopError>;

    /// Finds files inside.
    async fn glob(&self, at: &SandboxId, asked: &Glob) -> Result<Found, WorkshopError>;

    /// Finds lines inside.
    async fn grep(&self, at: &SandboxId, asked: &Grep) -> Result<Matches, WorkshopError>;

    /// Copies something of the repository's worktree in.
    async fn upload(&self, at: &SandboxId, from: &str, to: &str) -> Result<Moved, WorkshopError>;

    /// Copies something out, into the repository's worktree.
    async fn download(&self, at: &SandboxId, from: &str, to: &str) -> Result<Moved, WorkshopError>;

    /// Commits the workspace to the sandbox's branch, if it changed.
    async fn snapshot(&self, at: &SandboxId, message: &str) -> Result<Snapshot, WorkshopError>;

    /// What the branch changed since it began.
    async fn diff(&self, at: &SandboxId, most: usize) -> Result<Changes, WorkshopError>;
}

/// A sandbox as it is shown.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Sandbox {
    /// Its id.
    #[schemars(with = "String")]
    pub id: SandboxId,
    /// Its name.
    pub name: String,
    /// The branch its work is kept on, in the operator's repository.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(with = "String")]
    pub branch: Option<String>,
    /// How it is, in a word: active, paused, error, missing or unknown.
    pub status: String,
    /// Why it is so, where that is not well.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(with = "String")]
    pub reason: Option<String>,
    /// When it was made.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(with = "String")]
    pub created_at: Option<String>,
    /// What is weaker in it than it could be.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub warnings: Vec<String>,
}

/// The ports of a sandbox.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, JsonSchema)]
pub struct Ports {
    /// Those on which somebody listens inside; absent where that is not known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(with = "Vec<u16>")]
    pub open: Option<Vec<u16>>,
    /// Why it is not known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(with = "String")]
    pub reason: Option<String>,
    /// Those that the operator has published on the host.
    pub published: Vec<Published>,
}

/// A port of the host that leads inside.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, JsonSchema)]
pub struct Published {
    /// The host's address and port.
    pub host: String,
    /// The port inside.
    pub port: u16,
}

/// A sandbox is gone.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Deleted {
    /// The last commit of its branch, by which the operator can have it back.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(with = "String")]
    pub tip: Option<String>,
    /// Why the branch is still there, where it is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(with = "String")]
    pub branch_kept: Option<String>,
}

/// What is in a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Content {
    /// Text.
    Text {
        /// The lines asked for, or as many as fit.
        content: String,
        /// The lines of the file.
        total_lines: u64,
        /// Whether there are more after these.
        has_more: bool,
        /// What was cut.
        cut: Option<Cut>,
    },
    /// A picture.
    Image {
        /// Its bytes in base64.
        data: String,
        /// What it is.
        mime_type: String,
    },
}

/// How much of a text is given.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Cut {
    /// Lines before.
    pub total_lines: u64,
    /// Bytes before.
    pub total_bytes: u64,
    /// Lines left.
    pub output_lines: u64,
    /// Bytes left.
    pub output_bytes: u64,
}

/// A file was written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Written {
    /// From the workspace.
    pub path: String,
    /// Its size.
    pub bytes: u64,
}

/// A file was changed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Edited {
    /// Which.
    pub path: String,
    /// The lines that went and came.
    pub diff: String,
}

/// What came of a command.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ran {
    /// The last of what it wrote, in the order in which it came.
    pub output: String,
    /// The last of its output.
    pub stdout: String,
    /// The last of its error output.
    pub stderr: String,
    /// Its code; -1 when it was killed.
    pub exit_code: i32,
    /// Whether its time was over.
    pub timed_out: bool,
    /// What was cut.
    pub cut: Option<Cut>,
}

/// A directory's names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Listed {
    /// A line each.
    pub output: String,
    /// What was cut.
    pub cut: Option<Cut>,
}

/// Files that were found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Found {
    /// Their paths.
    pub files: Vec<String>,
    /// Whether there are more.
    pub truncated: bool,
}

/// Lines that were found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Matches {
    /// With file and number.
    pub content: String,
    /// Whether there may be more matches, or lines were cut.
    pub truncated: bool,
}

/// Files that were moved in or out.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Moved {
    /// Files and links.
    pub files: u64,
    /// Bytes of content.
    pub bytes: u64,
    /// What stayed behind and why.
    pub left_out: Vec<String>,
}

/// What a snapshot did.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Snapshot {
    /// The branch's new commit, if there is one.
    pub commit: Option<String>,
    /// What could not be taken along, in words.
    pub left_out: Vec<String>,
}

/// What a branch changed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, JsonSchema)]
pub struct Changes {
    /// The commit it began at.
    pub base: String,
    /// Its last commit.
    pub tip: String,
    /// The files.
    pub files: Vec<FileChange>,
    /// As a unified diff.
    pub patch: String,
    /// Whether the diff is longer than what is given.
    pub cut: bool,
}

/// What happened to a file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct FileChange {
    /// Its path.
    pub path: String,
    /// Its path before, if that was another.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(with = "String")]
    pub renamed_from: Option<String>,
    /// A, D, M or R, as git has them.
    pub kind: String,
    /// Lines that came.
    pub added: u64,
    /// Lines that went.
    pub removed: u64,
    /// Whether it is no text.
    pub binary: bool,
}
