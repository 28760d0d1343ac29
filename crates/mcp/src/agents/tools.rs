//! Definitions of the tools: name, description, schemas and annotations.

use std::sync::Arc;

use rmcp::handler::server::common::{schema_for_input, schema_for_output};
use rmcp::model::{JsonObject, Tool, ToolAnnotations};
use schemars::JsonSchema;
use serde_json::Value;

use super::answers::{
    BashAnswer, DeleteAnswer, EditAnswer, GlobAnswer, GrepAnswer, ListAnswer, LsAnswer,
    PatchAnswer, ReadAnswer, SandboxAnswer, ToolAnswer, WithCommit, WriteAnswer,
};
use super::parameters::{
    Bash, Create, Delete, Diff, Edit, Glob, Grep, Ls, NoParameters, Patch, Read, SandboxOnly,
    Transfer, Write,
};
use super::sandbox_service::{Changes, CopiedFiles, Ports};

/// The side effects of a tool, for its MCP annotations.
#[derive(Clone, Copy)]
enum Effect {
    /// Changes nothing.
    ReadOnly,
    /// Adds data; nothing is overwritten or deleted.
    Additive,
    /// Sets a state: idempotent, and nothing is lost.
    Idempotent,
    /// May overwrite or delete.
    Destructive,
    /// May overwrite or delete, and may use the network.
    OpenWorld,
}

/// Every tool, in the order in which clients list them.
pub fn all_tools() -> Vec<Tool> {
    [
        tool::<Create, SandboxAnswer>(
            "sandbox-create",
            "Create a sandbox",
            "Creates a sandbox: an isolated copy of this repository at HEAD, on its own branch \
             palisade/NAME. All other tools work inside a sandbox. The operator's own files and \
             branches are never changed; your changes are committed to the sandbox's branch, \
             which the operator can review and merge.",
            Effect::Additive,
        ),
        tool::<NoParameters, ListAnswer>(
            "sandbox-list",
            "List sandboxes",
            "Lists the sandboxes of this repository with their status.",
            Effect::ReadOnly,
        ),
        tool::<SandboxOnly, Ports>(
            "sandbox-ports",
            "Show a sandbox's ports",
            "Shows the ports on which programs listen inside a sandbox, and those that the \
             operator has published on the host.",
            Effect::ReadOnly,
        ),
        tool::<SandboxOnly, SandboxAnswer>(
            "sandbox-pause",
            "Pause a sandbox",
            "Freezes every process of a sandbox. No data is lost.",
            Effect::Idempotent,
        ),
        tool::<SandboxOnly, SandboxAnswer>(
            "sandbox-resume",
            "Resume a sandbox",
            "Resumes every process of a paused sandbox.",
            Effect::Idempotent,
        ),
        tool::<Delete, DeleteAnswer>(
            "sandbox-delete",
            "Delete a sandbox",
            "Deletes a sandbox with its branch and everything in it. Refused while a command \
             runs in it or it has work that is on no other branch, unless force is true.",
            Effect::Destructive,
        ),
        tool::<Read, ReadAnswer>(
            "read",
            "Read a file",
            "Reads a file of the workspace: text by lines, or an image. At most 2000 lines or \
             50 KB at a time; continue with offset.",
            Effect::ReadOnly,
        ),
        tool::<Write, WithCommit<WriteAnswer>>(
            "write",
            "Write a file",
            "Writes a whole file of the workspace, and commits it to the sandbox's branch.",
            Effect::Destructive,
        ),
        tool::<Edit, WithCommit<EditAnswer>>(
            "edit",
            "Edit a file",
            "Replaces a text that occurs exactly once in a file, and commits the change.",
            Effect::Destructive,
        ),
        tool::<Patch, WithCommit<PatchAnswer>>(
            "patch",
            "Apply a patch",
            "Applies a unified diff to the workspace, completely or not at all, and commits it.",
            Effect::Destructive,
        ),
        tool::<Bash, WithCommit<BashAnswer>>(
            "bash",
            "Run a command",
            "Runs a shell command in the workspace and returns the end of its output. Its \
             changes are committed. Its network requests pass through a gate that decides which \
             are allowed; a refusal contains the reason.",
            Effect::OpenWorld,
        ),
        tool::<Ls, LsAnswer>(
            "ls",
            "List a directory",
            "Lists a directory of the workspace; directories end with a slash.",
            Effect::ReadOnly,
        ),
        tool::<Glob, GlobAnswer>(
            "glob",
            "Find files",
            "Finds files of the workspace by a glob. Files that .gitignore names are left out.",
            Effect::ReadOnly,
        ),
        tool::<Grep, GrepAnswer>(
            "grep",
            "Search in files",
            "Finds lines in the workspace's files by a regular expression.",
            Effect::ReadOnly,
        ),
        tool::<Transfer, WithCommit<CopiedFiles>>(
            "upload",
            "Copy into a sandbox",
            "Copies a file or directory of the operator's repository into the workspace, such \
             as one that git does not track. A .git is never copied.",
            Effect::Destructive,
        ),
        tool::<Transfer, CopiedFiles>(
            "download",
            "Copy out of a sandbox",
            "Copies a file or directory of the workspace into the operator's repository, such \
             as a build's result. Existing files are not overwritten; a .git, and files that run \
             or configure tools, are not copied. For code, the operator merges the branch \
             instead.",
            Effect::Additive,
        ),
        tool::<Diff, Changes>(
            "diff",
            "Show what changed",
            "Shows all changes of the sandbox since it was created.",
            Effect::ReadOnly,
        ),
    ]
    .into()
}

fn tool<I: JsonSchema + 'static, O: ToolAnswer>(
    name: &'static str,
    title: &'static str,
    description: &'static str,
    effect: Effect,
) -> Tool {
    // Fails only for a type that is not an object; a test checks that every type is an object.
    let input = without_rust_formats(schema_for_input::<I>().unwrap_or_default());
    let hints = ToolAnnotations::with_title(title);
    let hints = match effect {
        Effect::ReadOnly => hints.read_only(true).open_world(false),
        Effect::Additive => hints.read_only(false).destructive(false).open_world(false),
        Effect::Idempotent => hints
            .read_only(false)
            .destructive(false)
            .idempotent(true)
            .open_world(false),
        Effect::Destructive => hints.read_only(false).destructive(true).open_world(false),
        Effect::OpenWorld => hints.read_only(false).destructive(true).open_world(true),
    };
    Tool::new(name, description, input)
        .with_title(title)
        .with_raw_output_schema(without_rust_formats(schema_for_output::<O>()))
        .with_annotations(hints)
}

/// The schema without the formats that only Rust uses (`uint64` …): Claude Code warns about each
/// of them, and `minimum` has the same meaning.
fn without_rust_formats(schema: Arc<JsonObject>) -> Arc<JsonObject> {
    let mut schema = Arc::unwrap_or_clone(schema);
    schema.values_mut().for_each(remove_rust_formats);
    Arc::new(schema)
}

fn remove_rust_formats(value: &mut Value) {
    match value {
        Value::Object(fields) => {
            let is_rust_format = |format: &Value| {
                format
                    .as_str()
                    .is_some_and(|format| format.starts_with("uint"))
            };
            if fields.get("format").is_some_and(is_rust_format) {
                fields.shift_remove("format");
            }
            fields.values_mut().for_each(remove_rust_formats);
        }
        Value::Array(items) => items.iter_mut().for_each(remove_rust_formats),
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => {}
    }
}
