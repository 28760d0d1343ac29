//! The list of tools: what a client shows and a model reads.

use std::sync::Arc;

use rmcp::handler::server::common::{schema_for_input, schema_for_output};
use rmcp::model::{JsonObject, Tool, ToolAnnotations};
use schemars::JsonSchema;
use serde_json::Value;

use super::answers::{
    Answer, BashAnswer, Changed, DeleteAnswer, EditAnswer, GlobAnswer, GrepAnswer, ListAnswer,
    LsAnswer, PatchAnswer, ReadAnswer, SandboxAnswer, WriteAnswer,
};
use super::parameters::{
    Bash, Create, Delete, Diff, Edit, Glob, Grep, Ls, Nothing, Patch, Read, Transfer, Which, Write,
};
use super::workshop::{Changes, Moved, Ports};

/// What a tool does to the world.
#[derive(Clone, Copy)]
enum Effect {
    /// It only looks.
    Reads,
    /// It adds, and takes nothing away.
    Adds,
    /// It can be done again without doing more.
    Sets,
    /// It can take away.
    Changes,
    /// It can take away, and reach out.
    Acts,
}

/// Every tool, in the order in which an agent meets them.
pub fn all() -> Vec<Tool> {
    [
        tool::<Create, SandboxAnswer>(
            "sandbox-create",
            "Create a sandbox",
            "Makes a sandbox: an isolated copy of this repository at HEAD, on its own branch \
             palisade/NAME. Everything else works inside one. The operator's own files and \
             branches are never touched; what you do is committed to the sandbox's branch, \
             which they can review and merge.",
            Effect::Adds,
        ),
        tool::<Nothing, ListAnswer>(
            "sandbox-list",
            "List sandboxes",
            "Lists the sandboxes of this repository, and how each is.",
            Effect::Reads,
        ),
        tool::<Which, Ports>(
            "sandbox-ports",
            "Show a sandbox's ports",
            "Shows on which ports programs listen inside a sandbox, and which of them the \
             operator has published on the host.",
            Effect::Reads,
        ),
        tool::<Which, SandboxAnswer>(
            "sandbox-pause",
            "Pause a sandbox",
            "Stops every process of a sandbox where it is. Nothing is lost.",
            Effect::Sets,
        ),
        tool::<Which, SandboxAnswer>(
            "sandbox-resume",
            "Resume a sandbox",
            "Lets every process of a sandbox go on.",
            Effect::Sets,
        ),
        tool::<Delete, DeleteAnswer>(
            "sandbox-delete",
            "Delete a sandbox",
            "Removes a sandbox with its branch and everything in it. Refused while a command \
             runs in it or it holds work that is on no other branch, unless force is true.",
            Effect::Changes,
        ),
        tool::<Read, ReadAnswer>(
            "read",
            "Read a file",
            "Reads a file of the workspace: text by lines, or a picture. At most 2000 lines or \
             50 KB at a time; go on with offset.",
            Effect::Reads,
        ),
        tool::<Write, Changed<WriteAnswer>>(
            "write",
            "Write a file",
            "Writes a file of the workspace whole, and commits it to the sandbox's branch.",
            Effect::Changes,
        ),
        tool::<Edit, Changed<EditAnswer>>(
            "edit",
            "Edit a file",
            "Replaces a text that is in a file exactly once, and commits the change.",
            Effect::Changes,
        ),
        tool::<Patch, Changed<PatchAnswer>>(
            "patch",
            "Apply a patch",
            "Applies a unified diff to the workspace, all of it or nothing, and commits it.",
            Effect::Changes,
        ),
        tool::<Bash, Changed<BashAnswer>>(
            "bash",
            "Run a command",
            "Runs a shell command in the workspace and gives the last of its output. What it \
             changed is committed. Its network leads to a gate that decides what it may reach; \
             a refusal says why.",
            Effect::Acts,
        ),
        tool::<Ls, LsAnswer>(
            "ls",
            "List a directory",
            "Lists a directory of the workspace; directories end with a slash.",
            Effect::Reads,
        ),
        tool::<Glob, GlobAnswer>(
            "glob",
            "Find files",
            "Finds files of the workspace by a glob. What .gitignore names is left out.",
            Effect::Reads,
        ),
        tool::<Grep, GrepAnswer>(
            "grep",
            "Search in files",
            "Finds lines in the workspace's files by a regular expression.",
            Effect::Reads,
        ),
        tool::<Transfer, Changed<Moved>>(
            "upload",
            "Copy into a sandbox",
            "Copies a file or directory of the operator's repository into the workspace, such \
             as one that git does not track. Never a .git.",
            Effect::Changes,
        ),
        tool::<Transfer, Moved>(
            "download",
            "Copy out of a sandbox",
            "Copies a file or directory of the workspace into the operator's repository, such \
             as a build's result. Never over a file that is there, never a .git, and no file \
             that runs or steers tools; for code, the operator merges the branch instead.",
            Effect::Adds,
        ),
        tool::<Diff, Changes>(
            "diff",
            "Show what changed",
            "Shows everything that the sandbox changed since it was made.",
            Effect::Reads,
        ),
    ]
    .into()
}

fn tool<I: JsonSchema + 'static, O: Answer>(
    name: &'static str,
    title: &'static str,
    description: &'static str,
    effect: Effect,
) -> Tool {
    // A test shows that each is an object, which is all that can be wrong.
    let input = plain(schema_for_input::<I>().unwrap_or_default());
    let hints = ToolAnnotations::with_title(title);
    let hints = match effect {
        Effect::Reads => hints.read_only(true).open_world(false),
        Effect::Adds => hints.read_only(false).destructive(false).open_world(false),
        Effect::Sets => hints
            .read_only(false)
            .destructive(false)
            .idempotent(true)
            .open_world(false),
        Effect::Changes => hints.read_only(false).destructive(true).open_world(false),
        Effect::Acts => hints.read_only(false).destructive(true).open_world(true),
    };
    Tool::new(name, description, input)
        .with_title(title)
        .with_raw_output_schema(plain(schema_for_output::<O>()))
        .with_annotations(hints)
}

/// The schema without formats that only Rust knows: Claude Code complains of each of them, and
/// `minimum` says the same.
fn plain(schema: Arc<JsonObject>) -> Arc<JsonObject> {
    let mut schema = Arc::unwrap_or_clone(schema);
    schema.values_mut().for_each(strip);
    Arc::new(schema)
}

fn strip(value: &mut Value) {
    match value {
        Value::Object(fields) => {
            let is_ours = |format: &Value| {
                format
                    .as_str()
                    .is_some_and(|format| format.starts_with("uint"))
            };
            if fields.get("format").is_some_and(is_ours) {
                fields.shift_remove("format");
            }
            fields.values_mut().for_each(strip);
        }
        Value::Array(items) => items.iter_mut().for_each(strip),
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => {}
    }
}
