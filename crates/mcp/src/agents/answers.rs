//! What tools answer: a text for the model, and the same as data for programs.

use std::fmt::Write as _;

use rmcp::model::{CallToolResult, ContentBlock, ErrorData};
use schemars::JsonSchema;
use serde::Serialize;

use super::workshop::{
    Changes, Content, Cut, Deleted, Edited, Found, Listed, Matches, Moved, Ports, Ran, Sandbox,
    Snapshot, WorkshopError, Written,
};

/// An answer that a tool can give.
pub trait Answer: Serialize + JsonSchema + 'static {
    /// What a model reads.
    fn text(&self) -> String;

    /// Whether it tells of a failure all the same.
    fn is_failure(&self) -> bool {
        false
    }
}

/// The result of a call, or the protocol's error.
pub fn result<A: Answer>(done: Result<A, WorkshopError>) -> Result<CallToolResult, ErrorData> {
    match done {
        Ok(answer) => with(vec![ContentBlock::text(answer.text())], &answer),
        Err(error) => refusal(error),
    }
}

/// The result of reading: a picture is shown as one.
pub fn read_result(
    done: Result<(String, Content), WorkshopError>,
) -> Result<CallToolResult, ErrorData> {
    match done {
        Ok((path, Content::Image { data, mime_type })) => {
            let block = ContentBlock::image(data, mime_type.clone());
            with(vec![block], &ReadAnswer::image(path, mime_type))
        }
        Ok((
            path,
            Content::Text {
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
            with(vec![ContentBlock::text(answer.text())], &answer)
        }
        Err(error) => refusal(error),
    }
}

fn with<A: Answer>(content: Vec<ContentBlock>, answer: &A) -> Result<CallToolResult, ErrorData> {
    let data = serde_json::to_value(answer)
        .map_err(|error| ErrorData::internal_error(error.to_string(), None))?;
    let mut result = CallToolResult::success(content);
    result.structured_content = Some(data);
    result.is_error = Some(answer.is_failure());
    Ok(result)
}

/// The one place that knows which failure is told how.
fn refusal(error: WorkshopError) -> Result<CallToolResult, ErrorData> {
    match error {
        WorkshopError::Invalid(why) => Err(ErrorData::invalid_params(why, None)),
        WorkshopError::Refused(why) => Ok(CallToolResult::error(vec![ContentBlock::text(why)])),
        WorkshopError::Failed(why) => Err(ErrorData::internal_error(why, None)),
    }
}

/// A sandbox.
#[derive(Debug, Serialize, JsonSchema)]
pub struct SandboxAnswer {
    /// As it is now.
    pub sandbox: Sandbox,
}

impl Answer for SandboxAnswer {
    fn text(&self) -> String {
        describe(&self.sandbox)
    }
}

/// Sandboxes.
#[derive(Debug, Serialize, JsonSchema)]
pub struct ListAnswer {
    /// Those of this repository.
    pub sandboxes: Vec<Sandbox>,
}

impl Answer for ListAnswer {
    fn text(&self) -> String {
        if self.sandboxes.is_empty() {
            return "There is no sandbox for this repository. Make one with sandbox-create."
                .to_owned();
        }
        let lines: Vec<String> = self.sandboxes.iter().map(describe).collect();
        lines.join("\n")
    }
}

fn describe(sandbox: &Sandbox) -> String {
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

impl Answer for Ports {
    fn text(&self) -> String {
        let mut lines = Vec::new();
        match (&self.open, &self.reason) {
            (Some(open), _) if open.is_empty() => {
                lines.push("Nobody listens on a port inside.".to_owned());
            }
            (Some(open), _) => {
                let open: Vec<String> = open.iter().map(u16::to_string).collect();
                lines.push(format!("Open inside: {}", open.join(", ")));
            }
            (None, reason) => {
                let why = reason.as_deref().unwrap_or("nobody says why");
                lines.push(format!("Which ports are open inside is not known: {why}"));
            }
        }
        for published in &self.published {
            lines.push(format!(
                "{} on the host leads to port {} inside",
                published.host, published.port
            ));
        }
        lines.join("\n")
    }
}

/// A sandbox is gone.
#[derive(Debug, Serialize, JsonSchema)]
pub struct DeleteAnswer {
    /// Its name.
    pub name: String,
    /// What is left of it.
    #[serde(flatten)]
    pub deleted: Deleted,
}

impl Answer for DeleteAnswer {
    fn text(&self) -> String {
        let mut text = format!("Deleted {}.", self.name);
        if let Some(why) = &self.deleted.branch_kept {
            let _ = write!(text, " Its branch was not deleted: {why}");
        }
        text
    }
}

/// What is in a file.
#[derive(Debug, Serialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ReadAnswer {
    /// Which.
    pub path: String,
    /// The lines asked for, or as many as fit. Absent for a picture.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(with = "String")]
    pub content: Option<String>,
    /// The lines of the file.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(with = "u64")]
    pub total_lines: Option<u64>,
    /// Whether there are more after these.
    pub has_more: bool,
    /// What kind of picture it is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(with = "String")]
    pub mime_type: Option<String>,
    /// What was cut.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(with = "Cut")]
    pub cut: Option<Cut>,
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

impl Answer for ReadAnswer {
    fn text(&self) -> String {
        let mut text = self.content.clone().unwrap_or_default();
        if self.has_more {
            let total = self.total_lines.unwrap_or_default();
            let _ = write!(
                text,
                "\n[There is more: the file has {total} lines. Go on with offset.]"
            );
        }
        text
    }
}

/// What a changing tool left on the branch.
#[derive(Debug, Default, Serialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Kept {
    /// The commit on the sandbox's branch; absent when nothing changed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(with = "String")]
    pub commit: Option<String>,
    /// What the commit lacks and why, or why there is none.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub notes: Vec<String>,
}

impl Kept {
    /// What became of a snapshot. The work itself is done, whatever became of this.
    pub fn of(taken: Result<Snapshot, WorkshopError>) -> Self {
        match taken {
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

    fn add_to(&self, mut text: String) -> String {
        for note in &self.notes {
            let _ = write!(text, "\nNote: {note}");
        }
        text
    }
}

/// What a changing tool did, and what was kept of it.
#[derive(Debug, Serialize, JsonSchema)]
pub struct Changed<T> {
    /// What it did.
    #[serde(flatten)]
    pub done: T,
    /// What was kept.
    #[serde(flatten)]
    pub kept: Kept,
}

impl<T: Answer> Answer for Changed<T> {
    fn text(&self) -> String {
        self.kept.add_to(self.done.text())
    }

    fn is_failure(&self) -> bool {
        self.done.is_failure()
    }
}

/// A file was written.
#[derive(Debug, Serialize, JsonSchema)]
pub struct WriteAnswer {
    /// Which.
    pub path: String,
    /// Its size.
    pub bytes: u64,
}

impl From<Written> for WriteAnswer {
    fn from(Written { path, bytes }: Written) -> Self {
        Self { path, bytes }
    }
}

impl Answer for WriteAnswer {
    fn text(&self) -> String {
        format!("Wrote {} bytes to {}", self.bytes, self.path)
    }
}

/// A file was changed.
#[derive(Debug, Serialize, JsonSchema)]
pub struct EditAnswer {
    /// Which.
    pub path: String,
    /// The lines that went and came.
    pub diff: String,
}

impl From<Edited> for EditAnswer {
    fn from(Edited { path, diff }: Edited) -> Self {
        Self { path, diff }
    }
}

impl Answer for EditAnswer {
    fn text(&self) -> String {
        format!("Changed {}\n{}", self.path, self.diff)
    }
}

/// A patch was applied.
#[derive(Debug, Serialize, JsonSchema)]
pub struct PatchAnswer {
    /// The files it changed.
    pub files: Vec<String>,
}

impl Answer for PatchAnswer {
    fn text(&self) -> String {
        format!("Patched {}", self.files.join(", "))
    }
}

/// How a command ended, and what it wrote.
#[derive(Debug, Serialize, JsonSchema)]
pub struct BashAnswer {
    /// The last of what it wrote, output and error output in the order in which they came.
    pub output: String,
    /// The last of its output alone.
    pub stdout: String,
    /// The last of its error output alone.
    pub stderr: String,
    /// Its code; -1 when it was killed.
    pub exit_code: i32,
    /// Whether it was killed because its time was over.
    pub timed_out: bool,
    /// What was cut from the beginning of `output`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(with = "Cut")]
    pub cut: Option<Cut>,
}

impl From<Ran> for BashAnswer {
    fn from(ran: Ran) -> Self {
        Self {
            output: ran.output,
            stdout: ran.stdout,
            stderr: ran.stderr,
            exit_code: ran.exit_code,
            timed_out: ran.timed_out,
            cut: ran.cut,
        }
    }
}

impl Answer for BashAnswer {
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
            text.push_str("[Its time was over, and it was killed with everything it started]");
        } else {
            let _ = write!(text, "[Exit code {}]", self.exit_code);
        }
        text
    }

    fn is_failure(&self) -> bool {
        self.exit_code != 0
    }
}

/// A directory's names.
#[derive(Debug, Serialize, JsonSchema)]
pub struct LsAnswer {
    /// A line each, directories with a slash.
    pub output: String,
    /// What was cut.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(with = "Cut")]
    pub cut: Option<Cut>,
}

impl From<Listed> for LsAnswer {
    fn from(Listed { output, cut }: Listed) -> Self {
        Self { output, cut }
    }
}

impl Answer for LsAnswer {
    fn text(&self) -> String {
        self.output.clone()
    }
}

/// Files that were found.
#[derive(Debug, Serialize, JsonSchema)]
pub struct GlobAnswer {
    /// Their paths.
    pub files: Vec<String>,
    /// Whether there are more.
    pub truncated: bool,
}

impl From<Found> for GlobAnswer {
    fn from(Found { files, truncated }: Found) -> Self {
        Self { files, truncated }
    }
}

impl Answer for GlobAnswer {
    fn text(&self) -> String {
        if self.files.is_empty() {
            return "No files found".to_owned();
        }
        let mut text = self.files.join("\n");
        if self.truncated {
            text.push_str("\n[There are more]");
        }
        text
    }
}

/// Lines that were found.
#[derive(Debug, Serialize, JsonSchema)]
pub struct GrepAnswer {
    /// With file and number, or that there are none.
    pub content: String,
    /// Whether there may be more matches, or lines were cut.
    pub truncated: bool,
}

impl From<Matches> for GrepAnswer {
    fn from(Matches { content, truncated }: Matches) -> Self {
        Self { content, truncated }
    }
}

impl Answer for GrepAnswer {
    fn text(&self) -> String {
        self.content.clone()
    }
}

impl Answer for Moved {
    fn text(&self) -> String {
        let mut text = format!("Copied {} files, {} bytes", self.files, self.bytes);
        for note in &self.left_out {
            let _ = write!(text, "\nNote: {note}");
        }
        text
    }
}

impl Answer for Changes {
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
            text.push_str("\n[The diff is longer than what is given]");
        }
        text
    }
}
