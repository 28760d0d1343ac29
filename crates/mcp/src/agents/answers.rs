//! Answers of the tools: a text for the model, and the same content as structured data.

use std::fmt::Write as _;

use rmcp::model::{CallToolResult, ContentBlock, ErrorData};
use schemars::JsonSchema;
use serde::Serialize;

use super::sandbox_service::{
    AgentSandbox, Changes, CommandRun, CopiedFiles, DeletedSandbox, DirectoryListing, EditedFile,
    FileContent, FoundFiles, GrepMatches, Ports, SandboxServiceError, Snapshot, TruncationInfo,
    WrittenFile,
};

/// The answer of a tool.
pub trait ToolAnswer: Serialize + JsonSchema + 'static {
    /// The text for the model.
    fn text(&self) -> String;

    /// Whether the result is marked as an error, as that of a command with a non-zero exit code.
    fn is_failure(&self) -> bool {
        false
    }
}

/// The result of a tool call, or a JSON-RPC error.
pub fn tool_result<A: ToolAnswer>(
    done: Result<A, SandboxServiceError>,
) -> Result<CallToolResult, ErrorData> {
    match done {
        Ok(answer) => success(vec![ContentBlock::text(answer.text())], &answer),
        Err(error) => failure(error),
    }
}

/// The result of `read`: text, or an image block.
pub fn read_result(
    done: Result<(String, FileContent), SandboxServiceError>,
) -> Result<CallToolResult, ErrorData> {
    match done {
        Ok((path, FileContent::Image { data, mime_type })) => {
            let block = ContentBlock::image(data, mime_type.clone());
            success(vec![block], &ReadAnswer::image(path, mime_type))
        }
        Ok((
            path,
            FileContent::Text {
                content,
                total_lines,
                has_more,
                cut,
            },
        )) => {
            let answer = ReadAnswer {
                path,
                content: Some(content),
                total_lines: Some(total_lines),
                has_more,
                mime_type: None,
                cut,
            };
            success(vec![ContentBlock::text(answer.text())], &answer)
        }
        Err(error) => failure(error),
    }
}

fn success<A: ToolAnswer>(
    content: Vec<ContentBlock>,
    answer: &A,
) -> Result<CallToolResult, ErrorData> {
    let data = serde_json::to_value(answer)
        .map_err(|error| ErrorData::internal_error(error.to_string(), None))?;
    let mut result = CallToolResult::success(content);
    result.structured_content = Some(data);
    result.is_error = Some(answer.is_failure());
    Ok(result)
}

/// Maps an error to a JSON-RPC error or to a result that is marked as an error.
fn failure(error: SandboxServiceError) -> Result<CallToolResult, ErrorData> {
    match error {
        SandboxServiceError::Invalid(why) => Err(ErrorData::invalid_params(why, None)),
        SandboxServiceError::Refused(why) => {
            Ok(CallToolResult::error(vec![ContentBlock::text(why)]))
        }
        SandboxServiceError::Failed(why) => Err(ErrorData::internal_error(why, None)),
    }
}

/// Answer of `sandbox-create`, `sandbox-pause` and `sandbox-resume`.
#[derive(Debug, Serialize, JsonSchema)]
pub struct SandboxAnswer {
    /// The sandbox's current state.
    pub sandbox: AgentSandbox,
}

impl ToolAnswer for SandboxAnswer {
    fn text(&self) -> String {
        describe(&self.sandbox)
    }
}

/// Answer of `sandbox-list`.
#[derive(Debug, Serialize, JsonSchema)]
pub struct ListAnswer {
    /// The sandboxes of this repository.
    pub sandboxes: Vec<AgentSandbox>,
}

impl ToolAnswer for ListAnswer {
    fn text(&self) -> String {
        if self.sandboxes.is_empty() {
            return "This repository has no sandbox. Create one with sandbox-create.".to_owned();
        }
        let lines: Vec<String> = self.sandboxes.iter().map(describe).collect();
        lines.join("\n")
    }
}

fn describe(sandbox: &AgentSandbox) -> String {
    let mut text = format!("{}: {}", sandbox.name, sandbox.status);
    if let Some(reason) = &sandbox.reason {
        let _ = write!(text, " ({reason})");
    }
    if let Some(branch) = &sandbox.branch {
        let _ = write!(text, ", on branch {branch}");
    }
    for warning in &sandbox.warnings {
        let _ = write!(text, "\nNote: {warning}");
    }
    text
}

impl ToolAnswer for Ports {
    fn text(&self) -> String {
        let mut lines = Vec::new();
        match (&self.open, &self.reason) {
            (Some(open), _) if open.is_empty() => {
                lines.push("No program listens on a port in the sandbox.".to_owned());
            }
            (Some(open), _) => {
                let open: Vec<String> = open.iter().map(u16::to_string).collect();
                lines.push(format!("Open in the sandbox: {}", open.join(", ")));
            }
            (None, reason) => {
                let why = reason.as_deref().unwrap_or("no reason given");
                lines.push(format!("The open ports in the sandbox are unknown: {why}"));
            }
        }
        for published in &self.published {
            lines.push(format!(
                "{} on the host forwards to port {} in the sandbox",
                published.host, published.port
            ));
        }
        lines.join("\n")
    }
}

/// Answer of `sandbox-delete`.
#[derive(Debug, Serialize, JsonSchema)]
pub struct DeleteAnswer {
    /// The deleted sandbox's name.
    pub name: String,
    /// The deleted branch's last commit, or why the branch was not deleted.
    #[serde(flatten)]
    pub deleted: DeletedSandbox,
}

impl ToolAnswer for DeleteAnswer {
    fn text(&self) -> String {
        let mut text = format!("Deleted {}.", self.name);
        if let Some(why) = &self.deleted.branch_kept {
            let _ = write!(text, " Its branch was not deleted: {why}");
        }
        text
    }
}

/// Answer of `read`.
#[derive(Debug, Serialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ReadAnswer {
    /// The file's path.
    pub path: String,
    /// The requested lines, or as many as fit. Absent for an image.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(with = "String")]
    pub content: Option<String>,
    /// The number of lines in the file.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(with = "u64")]
    pub total_lines: Option<u64>,
    /// Whether the file has more lines after these.
    pub has_more: bool,
    /// The image's media type.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(with = "String")]
    pub mime_type: Option<String>,
    /// The size before and after truncation; absent if nothing was truncated.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(with = "TruncationInfo")]
    pub cut: Option<TruncationInfo>,
}

impl ReadAnswer {
    fn image(path: String, mime_type: String) -> Self {
        Self {
            path,
            content: None,
            total_lines: None,
            has_more: false,
            mime_type: Some(mime_type),
            cut: None,
        }
    }
}

impl ToolAnswer for ReadAnswer {
    fn text(&self) -> String {
        let mut text = self.content.clone().unwrap_or_default();
        if self.has_more {
            let total = self.total_lines.unwrap_or_default();
            let _ = write!(
                text,
                "\n[Truncated: the file has {total} lines. Continue with offset.]"
            );
        }
        text
    }
}

/// The commit of a tool's changes.
#[derive(Debug, Default, Serialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct CommitNote {
    /// The commit on the sandbox's branch; absent if nothing changed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(with = "String")]
    pub commit: Option<String>,
    /// The files that the commit does not contain and why, or why there is no commit.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub notes: Vec<String>,
}

impl CommitNote {
    /// Describes a snapshot. A failed snapshot becomes a note: the tool itself has succeeded.
    pub fn from_snapshot(snapshot: Result<Snapshot, SandboxServiceError>) -> Self {
        match snapshot {
            Ok(Snapshot { commit, left_out }) => Self {
                commit,
                notes: left_out,
            },
            Err(error) => Self {
                commit: None,
                notes: vec![format!("the snapshot failed: {error}")],
            },
        }
    }

    fn append_to(&self, mut text: String) -> String {
        for note in &self.notes {
            let _ = write!(text, "\nNote: {note}");
        }
        text
    }
}

/// The answer of a tool that changes files, with the commit of its changes.
#[derive(Debug, Serialize, JsonSchema)]
pub struct WithCommit<T> {
    /// The tool's own answer.
    #[serde(flatten)]
    pub answer: T,
    /// The commit.
    #[serde(flatten)]
    pub commit: CommitNote,
}

impl<T: ToolAnswer> ToolAnswer for WithCommit<T> {
    fn text(&self) -> String {
        self.commit.append_to(self.answer.text())
    }

    fn is_failure(&self) -> bool {
        self.answer.is_failure()
    }
}

/// Answer of `write`.
#[derive(Debug, Serialize, JsonSchema)]
pub struct WriteAnswer {
    /// The file's path.
    pub path: String,
    /// The file's size in bytes.
    pub bytes: u64,
}

impl From<WrittenFile> for WriteAnswer {
    fn from(WrittenFile { path, bytes }: WrittenFile) -> Self {
        Self { path, bytes }
    }
}

impl ToolAnswer for WriteAnswer {
    fn text(&self) -> String {
        format!("Wrote {} bytes to {}", self.bytes, self.path)
    }
}

/// Answer of `edit`.
#[derive(Debug, Serialize, JsonSchema)]
pub struct EditAnswer {
    /// The file's path.
    pub path: String,
    /// The removed and the added lines.
    pub diff: String,
}

impl From<EditedFile> for EditAnswer {
    fn from(EditedFile { path, diff }: EditedFile) -> Self {
        Self { path, diff }
    }
}

impl ToolAnswer for EditAnswer {
    fn text(&self) -> String {
        format!("Changed {}\n{}", self.path, self.diff)
    }
}

/// Answer of `patch`.
#[derive(Debug, Serialize, JsonSchema)]
pub struct PatchAnswer {
    /// The files that the patch changed.
    pub files: Vec<String>,
}

impl ToolAnswer for PatchAnswer {
    fn text(&self) -> String {
        format!("Patched {}", self.files.join(", "))
    }
}

/// Answer of `bash`.
#[derive(Debug, Serialize, JsonSchema)]
pub struct BashAnswer {
    /// The end of stdout and stderr, in the order in which they were written.
    pub output: String,
    /// The end of stdout alone.
    pub stdout: String,
    /// The end of stderr alone.
    pub stderr: String,
    /// The exit code; -1 if the command was killed.
    pub exit_code: i32,
    /// Whether the command was killed because of the timeout.
    pub timed_out: bool,
    /// The size of `output` before and after truncation at its beginning; absent if it is
    /// complete.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(with = "TruncationInfo")]
    pub cut: Option<TruncationInfo>,
}

impl From<CommandRun> for BashAnswer {
    fn from(run: CommandRun) -> Self {
        Self {
            output: run.output,
            stdout: run.stdout,
            stderr: run.stderr,
            exit_code: run.exit_code,
            timed_out: run.timed_out,
            cut: run.cut,
        }
    }
}

impl ToolAnswer for BashAnswer {
    fn text(&self) -> String {
        let mut text = String::new();
        if let Some(cut) = &self.cut {
            let (shown, total) = (cut.output_lines, cut.total_lines);
            let _ = writeln!(text, "[The last {shown} of {total} lines]");
        }
        text.push_str(&self.output);
        if !self.output.is_empty() && !self.output.ends_with('\n') {
            text.push('\n');
        }
        if self.timed_out {
            text.push_str("[Timed out: the command and its child processes were killed]");
        } else {
            let _ = write!(text, "[Exit code {}]", self.exit_code);
        }
        text
    }

    fn is_failure(&self) -> bool {
        self.exit_code != 0
    }
}

/// Answer of `ls`.
#[derive(Debug, Serialize, JsonSchema)]
pub struct LsAnswer {
    /// One entry per line; directories end with a slash.
    pub output: String,
    /// The size before and after truncation; absent if nothing was truncated.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(with = "TruncationInfo")]
    pub cut: Option<TruncationInfo>,
}

impl From<DirectoryListing> for LsAnswer {
    fn from(DirectoryListing { output, cut }: DirectoryListing) -> Self {
        Self { output, cut }
    }
}

impl ToolAnswer for LsAnswer {
    fn text(&self) -> String {
        self.output.clone()
    }
}

/// Answer of `glob`.
#[derive(Debug, Serialize, JsonSchema)]
pub struct GlobAnswer {
    /// The paths of the files.
    pub files: Vec<String>,
    /// Whether more files match.
    pub truncated: bool,
}

impl From<FoundFiles> for GlobAnswer {
    fn from(FoundFiles { files, truncated }: FoundFiles) -> Self {
        Self { files, truncated }
    }
}

impl ToolAnswer for GlobAnswer {
    fn text(&self) -> String {
        if self.files.is_empty() {
            return "No files found".to_owned();
        }
        let mut text = self.files.join("\n");
        if self.truncated {
            text.push_str("\n[Truncated: more files match]");
        }
        text
    }
}

/// Answer of `grep`.
#[derive(Debug, Serialize, JsonSchema)]
pub struct GrepAnswer {
    /// The lines with file and line number, or a text that no line matches.
    pub content: String,
    /// Whether more lines may match, or lines were truncated.
    pub truncated: bool,
}

impl From<GrepMatches> for GrepAnswer {
    fn from(GrepMatches { content, truncated }: GrepMatches) -> Self {
        Self { content, truncated }
    }
}

impl ToolAnswer for GrepAnswer {
    fn text(&self) -> String {
        self.content.clone()
    }
}

impl ToolAnswer for CopiedFiles {
    fn text(&self) -> String {
        let mut text = format!("Copied {} files, {} bytes", self.files, self.bytes);
        for note in &self.left_out {
            let _ = write!(text, "\nNote: {note}");
        }
        text
    }
}

impl ToolAnswer for Changes {
    fn text(&self) -> String {
        if self.files.is_empty() {
            return "Nothing has changed.".to_owned();
        }
        let mut text = String::new();
        for file in &self.files {
            let size = if file.binary {
                "binary".to_owned()
            } else {
                format!("+{} -{}", file.added, file.removed)
            };
            let _ = writeln!(text, "{} {}  {size}", file.kind, file.path);
        }
        if !self.patch.is_empty() {
            let _ = write!(text, "\n{}", self.patch);
        }
        if self.cut {
            text.push_str("\n[The diff is truncated]");
        }
        text
    }
}
