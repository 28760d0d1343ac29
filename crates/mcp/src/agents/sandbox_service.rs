//! Port of the MCP server for agents: sandboxes, the tools in them, and the branch that holds
//! their changes.

use async_trait::async_trait;
use policy::id::SandboxId;
use schemars::JsonSchema;
use serde::Serialize;

use super::parameters::{Bash, Edit, Glob, Grep, Ls, Read, Write};

/// Why an operation failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SandboxServiceError {
    /// The parameters are invalid, or name something that does not exist.
    #[error("{0}")]
    Invalid(String),
    /// The parameters are valid; a tool, or the sandbox's state, does not allow the operation.
    #[error("{0}")]
    Refused(String),
    /// An internal failure.
    #[error("{0}")]
    Failed(String),
}

/// The sandboxes of one repository and the operations on them.
#[async_trait]
pub trait SandboxService: Send + Sync + 'static {
    /// Creates a sandbox. The agent cannot choose its network rules or its credentials.
    async fn create(&self, name: &str, dirty: bool) -> Result<AgentSandbox, SandboxServiceError>;

    /// Lists every sandbox of the repository.
    async fn list(&self) -> Result<Vec<AgentSandbox>, SandboxServiceError>;

    /// Finds a sandbox of the repository by its name or id.
    async fn find(&self, name: &str) -> Result<AgentSandbox, SandboxServiceError>;

    /// Lists the ports of a sandbox.
    async fn ports(&self, sandbox: &SandboxId) -> Result<Ports, SandboxServiceError>;

    /// Freezes the processes of a sandbox.
    async fn pause(&self, sandbox: &SandboxId) -> Result<(), SandboxServiceError>;

    /// Resumes the processes of a paused sandbox.
    async fn resume(&self, sandbox: &SandboxId) -> Result<(), SandboxServiceError>;

    /// Deletes a sandbox with its branch; where work would be lost, only with `force`.
    async fn delete(
        &self,
        sandbox: &SandboxId,
        force: bool,
    ) -> Result<DeletedSandbox, SandboxServiceError>;

    /// Reads a file in the sandbox.
    async fn read(
        &self,
        sandbox: &SandboxId,
        parameters: &Read,
    ) -> Result<FileContent, SandboxServiceError>;

    /// Writes a file in the sandbox.
    async fn write(
        &self,
        sandbox: &SandboxId,
        parameters: &Write,
    ) -> Result<WrittenFile, SandboxServiceError>;

    /// Replaces a text in a file of the sandbox.
    async fn edit(
        &self,
        sandbox: &SandboxId,
        parameters: &Edit,
    ) -> Result<EditedFile, SandboxServiceError>;

    /// Applies a unified diff in the sandbox, completely or not at all. Returns the changed
    /// files.
    async fn patch(
        &self,
        sandbox: &SandboxId,
        patch: &str,
    ) -> Result<Vec<String>, SandboxServiceError>;

    /// Runs a command in the sandbox. Dropping the future kills the command and its child
    /// processes.
    async fn bash(
        &self,
        sandbox: &SandboxId,
        parameters: &Bash,
    ) -> Result<CommandRun, SandboxServiceError>;

    /// Lists a directory in the sandbox.
    async fn ls(
        &self,
        sandbox: &SandboxId,
        parameters: &Ls,
    ) -> Result<DirectoryListing, SandboxServiceError>;

    /// Finds files in the sandbox by a glob.
    async fn glob(
        &self,
        sandbox: &SandboxId,
        parameters: &Glob,
    ) -> Result<FoundFiles, SandboxServiceError>;

    /// Finds lines in the files of the sandbox.
    async fn grep(
        &self,
        sandbox: &SandboxId,
        parameters: &Grep,
    ) -> Result<GrepMatches, SandboxServiceError>;

    /// Copies a file or directory of the repository's worktree into the sandbox.
    async fn upload(
        &self,
        sandbox: &SandboxId,
        from: &str,
        to: &str,
    ) -> Result<CopiedFiles, SandboxServiceError>;

    /// Copies a file or directory of the sandbox into the repository's worktree.
    async fn download(
        &self,
        sandbox: &SandboxId,
        from: &str,
        to: &str,
    ) -> Result<CopiedFiles, SandboxServiceError>;

    /// Commits the workspace to the sandbox's branch, if it changed.
    async fn snapshot(
        &self,
        sandbox: &SandboxId,
        message: &str,
    ) -> Result<Snapshot, SandboxServiceError>;

    /// The changes of the branch since it was created; of the patch at most `max_bytes`.
    async fn diff(
        &self,
        sandbox: &SandboxId,
        max_bytes: usize,
    ) -> Result<Changes, SandboxServiceError>;
}

/// A sandbox and its state.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct AgentSandbox {
    /// The sandbox's id.
    #[schemars(with = "String")]
    pub id: SandboxId,
    /// The sandbox's name.
    pub name: String,
    /// The branch of its commits in the operator's repository.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(with = "String")]
    pub branch: Option<String>,
    /// The status: active, paused, error, missing or unknown.
    pub status: String,
    /// The reason of a status other than active or paused.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(with = "String")]
    pub reason: Option<String>,
    /// The time of creation.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(with = "String")]
    pub created_at: Option<String>,
    /// Protections that are missing or weaker than usual.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub warnings: Vec<String>,
}

/// The ports of a sandbox.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, JsonSchema)]
pub struct Ports {
    /// The ports on which a program in the sandbox listens; absent if they are unknown.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(with = "Vec<u16>")]
    pub open: Option<Vec<u16>>,
    /// Why the open ports are unknown.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(with = "String")]
    pub reason: Option<String>,
    /// The ports that the operator has published on the host.
    pub published: Vec<HostPort>,
}

/// A port of the host that is forwarded into the sandbox.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, JsonSchema)]
pub struct HostPort {
    /// The host's address and port.
    pub host: String,
    /// The port in the sandbox.
    pub port: u16,
}

/// The outcome of deleting a sandbox.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct DeletedSandbox {
    /// The last commit of the deleted branch, from which the operator can restore it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(with = "String")]
    pub tip: Option<String>,
    /// Why the branch was not deleted; absent if it was.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(with = "String")]
    pub branch_kept: Option<String>,
}

/// The content of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FileContent {
    /// Text.
    Text {
        /// The requested lines, or as many as fit.
        content: String,
        /// The number of lines in the file.
        total_lines: u64,
        /// Whether the file has more lines after these.
        has_more: bool,
        /// The size before and after truncation; none if nothing was truncated.
        cut: Option<TruncationInfo>,
    },
    /// An image.
    Image {
        /// The bytes in base64.
        data: String,
        /// The media type.
        mime_type: String,
    },
}

/// The size of a text before and after truncation.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct TruncationInfo {
    /// Lines before truncation.
    pub total_lines: u64,
    /// Bytes before truncation.
    pub total_bytes: u64,
    /// Lines after truncation.
    pub output_lines: u64,
    /// Bytes after truncation.
    pub output_bytes: u64,
}

/// A file that was written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WrittenFile {
    /// The path, relative to the workspace.
    pub path: String,
    /// The size in bytes.
    pub bytes: u64,
}

/// A file in which a text was replaced.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EditedFile {
    /// The path.
    pub path: String,
    /// The removed and the added lines.
    pub diff: String,
}

/// The outcome of a command.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CommandRun {
    /// The end of stdout and stderr, in the order in which they were written.
    pub output: String,
    /// The end of stdout.
    pub stdout: String,
    /// The end of stderr.
    pub stderr: String,
    /// The exit code; -1 if the command was killed.
    pub exit_code: i32,
    /// Whether the command was killed because of the timeout.
    pub timed_out: bool,
    /// The size before and after truncation; none if nothing was truncated.
    pub cut: Option<TruncationInfo>,
}

/// The entries of a directory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DirectoryListing {
    /// One entry per line.
    pub output: String,
    /// The size before and after truncation; none if nothing was truncated.
    pub cut: Option<TruncationInfo>,
}

/// Files that match a glob.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FoundFiles {
    /// The paths of the files.
    pub files: Vec<String>,
    /// Whether more files match.
    pub truncated: bool,
}

/// Lines that match a regular expression.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GrepMatches {
    /// The lines with file and line number.
    pub content: String,
    /// Whether more lines may match, or lines were truncated.
    pub truncated: bool,
}

/// The outcome of copying files into or out of a sandbox.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct CopiedFiles {
    /// The number of copied files and links.
    pub files: u64,
    /// The bytes of their content.
    pub bytes: u64,
    /// The files that were not copied, and why.
    pub left_out: Vec<String>,
}

/// The outcome of a snapshot.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Snapshot {
    /// The branch's new commit; none if nothing changed.
    pub commit: Option<String>,
    /// The files that the commit does not contain, and why.
    pub left_out: Vec<String>,
}

/// The changes of a branch.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, JsonSchema)]
pub struct Changes {
    /// The commit at which the branch began.
    pub base: String,
    /// The branch's last commit.
    pub tip: String,
    /// The changed files.
    pub files: Vec<FileChange>,
    /// The changes as a unified diff.
    pub patch: String,
    /// Whether the diff is truncated.
    pub cut: bool,
}

/// The change of one file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct FileChange {
    /// The path.
    pub path: String,
    /// The path before, if the file was renamed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(with = "String")]
    pub renamed_from: Option<String>,
    /// The kind of change as git writes it: A, D, M or R.
    pub kind: String,
    /// The number of added lines.
    pub added: u64,
    /// The number of removed lines.
    pub removed: u64,
    /// Whether the file is binary.
    pub binary: bool,
}
