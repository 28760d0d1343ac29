//! The tools of one sandbox: the workbench inside, and git for patches.
//!
//! What comes back is the word of whatever runs in there. It is passed on to the agent, which
//! is who could have changed it, and believed in nothing.

use std::time::Duration;

use mcp::agents::parameters::{Bash, Edit, Glob, Grep, Ls, Read, Write};
use mcp::agents::workshop::{
    Content, Cut, Edited, Found, Listed, Matches, Ran, WorkshopError, Written,
};
use policy::id::SandboxId;
use sandbox::contract::{ExecutionResult, SandboxBackend, SandboxCommand, SandboxError};
use sandbox::namespace::Namespace;
use workbench::client::{WorkbenchClient, WorkbenchClientError};
use workbench::request::{
    BashRequest, EditRequest, FindRequest, GrepRequest, LsRequest, ReadFileRequest, ReadResult,
    WriteRequest,
};
use workbench::truncation::Truncation;

use super::remote_container::Elsewhere;

/// How long a patch may take.
const PATCHING: Duration = Duration::from_secs(60);

const APPLY: &[&str] = &[
    "git",
    "apply",
    "--whitespace=nowarn",
    "--numstat",
    "-z",
    "--apply",
];

/// Counts of lines that a model wrote are often wrong and say nothing new. Not at first: a file
/// that follows without a line of git's own would be counted in.
const RECOUNT: &str = "--recount";

/// How the workbench begins to say that what was asked for cannot be or is not there.
const ABOUT_THE_REQUEST: &[&str] = &[
    "Missing or invalid ",
    "Invalid ",
    "No such file or directory: ",
    "Path is a directory: ",
    "Path is not a directory: ",
    "Not a regular file: ",
    "Offset ",
];

/// The tools of one sandbox.
pub struct Tools {
    place: Place,
    client: WorkbenchClient,
}

/// Where git is run.
#[derive(Clone)]
enum Place {
    Inside(Namespace, SandboxId),
    Elsewhere(Elsewhere),
}

impl Tools {
    pub fn new(backend: Namespace, at: SandboxId) -> Result<Self, WorkshopError> {
        let client = control::workbench::client(&backend, &at).map_err(told)?;
        let place = Place::Inside(backend, at);
        Ok(Self { place, client })
    }

    /// The tools of a connect-only container.
    pub fn elsewhere(container: Elsewhere) -> anyhow::Result<Self> {
        let client = container.client()?;
        let place = Place::Elsewhere(container);
        Ok(Self { place, client })
    }

    pub async fn read(&self, asked: &Read) -> Result<Content, WorkshopError> {
        let request = ReadFileRequest {
            path: asked.path.clone(),
            offset: asked.offset,
            limit: asked.limit,
        };
        let read = self.client.read_file(&request).await.map_err(told)?;
        Ok(match read {
            ReadResult::Text {
                content,
                total_lines,
                has_more,
                truncation,
            } => Content::Text {
                content,
                total_lines,
                has_more,
                cut: truncation.map(cut),
            },
            ReadResult::Image { data, mime_type } => Content::Image { data, mime_type },
        })
    }

    pub async fn write(&self, asked: &Write) -> Result<Written, WorkshopError> {
        let request = WriteRequest {
            path: asked.path.clone(),
            content: asked.content.clone(),
        };
        let written = self.client.write(&request).await.map_err(told)?;
        Ok(Written {
            path: written.path,
            bytes: written.bytes,
        })
    }

    pub async fn edit(&self, asked: &Edit) -> Result<Edited, WorkshopError> {
        let request = EditRequest {
            path: asked.path.clone(),
            old_text: asked.old_text.clone(),
            new_text: asked.new_text.clone(),
        };
        let edited = self.client.edit(&request).await.map_err(told)?;
        Ok(Edited {
            path: edited.path,
            diff: edited.diff,
        })
    }

    pub async fn bash(&self, asked: &Bash) -> Result<Ran, WorkshopError> {
        let request = BashRequest {
            command: asked.command.clone(),
            timeout_seconds: asked.timeout_seconds,
        };
        let ran = self.client.run(&request).await.map_err(told)?;
        Ok(Ran {
            output: ran.output,
            stdout: ran.stdout,
            stderr: ran.stderr,
            exit_code: ran.exit_code,
            timed_out: ran.timed_out,
            cut: ran.truncation.map(cut),
        })
    }

    pub async fn ls(&self, asked: &Ls) -> Result<Listed, WorkshopError> {
        let request = LsRequest {
            path: asked.path.clone(),
            limit: asked.limit,
        };
        let listed = self.client.ls(&request).await.map_err(told)?;
        Ok(Listed {
            output: listed.output,
            cut: listed.truncation.map(cut),
        })
    }

    pub async fn glob(&self, asked: &Glob) -> Result<Found, WorkshopError> {
        let request = FindRequest {
            pattern: asked.pattern.clone(),
            path: asked.path.clone(),
            limit: asked.limit,
        };
        let found = self.client.find(&request).await.map_err(told)?;
        Ok(Found {
            files: found.files,
            truncated: found.truncated,
        })
    }

    pub async fn grep(&self, asked: &Grep) -> Result<Matches, WorkshopError> {
        let request = GrepRequest {
            pattern: asked.pattern.clone(),
            path: asked.path.clone(),
            glob: asked.glob.clone(),
            ignore_case: asked.ignore_case,
            literal: asked.literal,
            context: asked.context,
            limit: asked.limit,
        };
        let found = self.client.grep(&request).await.map_err(told)?;
        Ok(Matches {
            content: found.content,
            truncated: found.details.is_some(),
        })
    }

    /// Applies a patch with the git inside; the files it changed.
    pub async fn patch(&self, patch: &str) -> Result<Vec<String>, WorkshopError> {
        let mut stdin = patch.as_bytes().to_vec();
        if !stdin.ends_with(b"\n") {
            stdin.push(b'\n');
        }
        let done = self.apply(stdin.clone(), None).await?;
        if done.exit_code == 0 {
            return Ok(files(&done.stdout));
        }
        let again = self.apply(stdin, Some(RECOUNT)).await?;
        if again.exit_code == 0 {
            return Ok(files(&again.stdout));
        }
        let why = String::from_utf8_lossy(&done.stderr);
        Err(WorkshopError::Refused(format!(
            "The patch was not applied.\n{}",
            why.trim()
        )))
    }

    async fn apply(
        &self,
        stdin: Vec<u8>,
        more: Option<&str>,
    ) -> Result<ExecutionResult, WorkshopError> {
        let command = SandboxCommand {
            stdin,
            timeout: Some(PATCHING),
            ..SandboxCommand::new(APPLY.iter().copied().chain(more))
        };
        let place = self.place.clone();
        let done = tokio::task::spawn_blocking(move || match place {
            Place::Inside(backend, at) => Ok(backend.exec(&at, &command)?),
            Place::Elsewhere(container) => {
                container.with(|backend, id| Ok(backend.exec(id, &command)?))
            }
        });
        let broken = |why: String| WorkshopError::Failed(why);
        let done = done.await.map_err(|error| broken(error.to_string()))?;
        done.map_err(|error| match error.downcast_ref::<SandboxError>() {
            Some(SandboxError::Start { .. }) => {
                broken(format!("{error}; a patch needs git inside"))
            }
            _ => broken(error.to_string()),
        })
    }
}

/// The paths of git's list: added, removed, path, NUL.
fn files(listed: &[u8]) -> Vec<String> {
    let path = |entry: &[u8]| {
        let path = entry.splitn(3, |byte| *byte == b'\t').nth(2)?;
        Some(String::from_utf8_lossy(path).into_owned())
    };
    listed.split(|byte| *byte == 0).filter_map(path).collect()
}

fn cut(truncation: Truncation) -> Cut {
    Cut {
        total_lines: truncation.total_lines,
        total_bytes: truncation.total_bytes,
        output_lines: truncation.output_lines,
        output_bytes: truncation.output_bytes,
    }
}

fn told(error: WorkbenchClientError) -> WorkshopError {
    match error {
        WorkbenchClientError::Refused(why) => {
            if ABOUT_THE_REQUEST.iter().any(|words| why.starts_with(words)) {
                WorkshopError::Invalid(why)
            } else {
                WorkshopError::Refused(why)
            }
        }
        // A sandbox that stands still, or was stopped.
        WorkbenchClientError::Closed { reason, .. } => WorkshopError::Refused(reason),
        error @ (WorkbenchClientError::TimedOut(_)
        | WorkbenchClientError::Inaccessible { .. }
        | WorkbenchClientError::Unauthorized(_)
        | WorkbenchClientError::NoToken
        | WorkbenchClientError::InvalidAddress(_)
        | WorkbenchClientError::ConnectionLost { .. }
        | WorkbenchClientError::InvalidResponse { .. }) => WorkshopError::Failed(error.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use workbench::error::ToolError;

    use super::*;

    #[test]
    fn a_path_that_is_not_there_is_another_failure_than_a_text_that_is_not() {
        let path = || "a".to_owned();
        let what = "pattern";
        let why = path();
        for (error, is_invalid) in [
            (ToolError::Field("path"), true),
            (ToolError::Outside, true),
            (ToolError::Absent(path()), true),
            (ToolError::IsDirectory(path()), true),
            (ToolError::NotADirectory(path()), true),
            (ToolError::NotAFile(path()), true),
            (ToolError::Offset, true),
            (ToolError::Pattern { what, why }, true),
            (ToolError::NoMatch(path()), false),
            (ToolError::NoChange(path()), false),
            (ToolError::Changed(path()), false),
            (ToolError::Busy(path()), false),
        ] {
            let told = told(WorkbenchClientError::Refused(error.to_string()));
            let found = matches!(told, WorkshopError::Invalid(_));
            assert_eq!(found, is_invalid, "{error}");
        }
    }

    #[test]
    fn the_files_of_a_patch_are_read_as_git_lists_them() {
        let listed = b"1\t0\ta b.txt\0-\t-\tlogo.png\0\x30\t2\twith\ttab\0";
        assert_eq!(files(listed), ["a b.txt", "logo.png", "with\ttab"]);
        assert!(files(b"").is_empty());
    }
}
