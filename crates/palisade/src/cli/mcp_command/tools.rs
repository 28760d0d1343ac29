//! The tools of one sandbox: its workbench, and git for patches.
//!
//! Results come from processes in the sandbox and are untrusted. They are only passed on to the
//! agent.

use std::time::Duration;

use mcp::agents::parameters::{Bash, Edit, Glob, Grep, Ls, Read, Write};
use mcp::agents::sandbox_service::{
    CommandRun, DirectoryListing, EditedFile, FileContent, FoundFiles, GrepMatches,
    SandboxServiceError, TruncationInfo, WrittenFile,
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

use super::remote_container::RemoteSandbox;

/// Timeout of `git apply`.
const PATCH_TIMEOUT: Duration = Duration::from_secs(60);

/// The command that applies a patch and prints the changed files.
const APPLY: &[&str] = &[
    "git",
    "apply",
    "--whitespace=nowarn",
    "--numstat",
    "-z",
    "--apply",
];

/// Makes `git apply` ignore the line counts in the patch, which a model often writes wrongly. Used
/// only after a first attempt failed: if the next file in the patch has no `diff --git` line, its
/// lines would count as lines of the file before.
const RECOUNT: &str = "--recount";

/// Beginnings of workbench errors that mean invalid arguments or a missing path.
const INVALID_REQUEST_PREFIXES: &[&str] = &[
    "Missing or invalid ",
    "Invalid ",
    "No such file or directory: ",
    "Path is a directory: ",
    "Path is not a directory: ",
    "Not a regular file: ",
    "Offset ",
];

/// The tools of one sandbox.
pub struct SandboxTools {
    patch_target: PatchTarget,
    client: WorkbenchClient,
}

/// Where `git apply` runs.
#[derive(Clone)]
enum PatchTarget {
    Namespace(Namespace, SandboxId),
    Remote(RemoteSandbox),
}

impl SandboxTools {
    pub fn new(backend: Namespace, id: SandboxId) -> Result<Self, SandboxServiceError> {
        let client = control::workbench::client(&backend, &id).map_err(service_error)?;
        let patch_target = PatchTarget::Namespace(backend, id);
        Ok(Self {
            patch_target,
            client,
        })
    }

    /// The tools of a remote container.
    pub fn remote(container: RemoteSandbox) -> anyhow::Result<Self> {
        let client = container.client()?;
        let patch_target = PatchTarget::Remote(container);
        Ok(Self {
            patch_target,
            client,
        })
    }

    pub async fn read(&self, arguments: &Read) -> Result<FileContent, SandboxServiceError> {
        let request = ReadFileRequest {
            path: arguments.path.clone(),
            offset: arguments.offset,
            limit: arguments.limit,
        };
        let read = self
            .client
            .read_file(&request)
            .await
            .map_err(service_error)?;
        Ok(match read {
            ReadResult::Text {
                content,
                total_lines,
                has_more,
                truncation,
            } => FileContent::Text {
                content,
                total_lines,
                has_more,
                cut: truncation.map(truncation_info),
            },
            ReadResult::Image { data, mime_type } => FileContent::Image { data, mime_type },
        })
    }

    pub async fn write(&self, arguments: &Write) -> Result<WrittenFile, SandboxServiceError> {
        let request = WriteRequest {
            path: arguments.path.clone(),
            content: arguments.content.clone(),
        };
        let written = self.client.write(&request).await.map_err(service_error)?;
        Ok(WrittenFile {
            path: written.path,
            bytes: written.bytes,
        })
    }

    pub async fn edit(&self, arguments: &Edit) -> Result<EditedFile, SandboxServiceError> {
        let request = EditRequest {
            path: arguments.path.clone(),
            old_text: arguments.old_text.clone(),
            new_text: arguments.new_text.clone(),
        };
        let edited = self.client.edit(&request).await.map_err(service_error)?;
        Ok(EditedFile {
            path: edited.path,
            diff: edited.diff,
        })
    }

    pub async fn bash(&self, arguments: &Bash) -> Result<CommandRun, SandboxServiceError> {
        let request = BashRequest {
            command: arguments.command.clone(),
            timeout_seconds: arguments.timeout_seconds,
        };
        let ran = self.client.run(&request).await.map_err(service_error)?;
        Ok(CommandRun {
            output: ran.output,
            stdout: ran.stdout,
            stderr: ran.stderr,
            exit_code: ran.exit_code,
            timed_out: ran.timed_out,
            cut: ran.truncation.map(truncation_info),
        })
    }

    pub async fn ls(&self, arguments: &Ls) -> Result<DirectoryListing, SandboxServiceError> {
        let request = LsRequest {
            path: arguments.path.clone(),
            limit: arguments.limit,
        };
        let listed = self.client.ls(&request).await.map_err(service_error)?;
        Ok(DirectoryListing {
            output: listed.output,
            cut: listed.truncation.map(truncation_info),
        })
    }

    pub async fn glob(&self, arguments: &Glob) -> Result<FoundFiles, SandboxServiceError> {
        let request = FindRequest {
            pattern: arguments.pattern.clone(),
            path: arguments.path.clone(),
            limit: arguments.limit,
        };
        let found = self.client.find(&request).await.map_err(service_error)?;
        Ok(FoundFiles {
            files: found.files,
            truncated: found.truncated,
        })
    }

    pub async fn grep(&self, arguments: &Grep) -> Result<GrepMatches, SandboxServiceError> {
        let request = GrepRequest {
            pattern: arguments.pattern.clone(),
            path: arguments.path.clone(),
            glob: arguments.glob.clone(),
            ignore_case: arguments.ignore_case,
            literal: arguments.literal,
            context: arguments.context,
            limit: arguments.limit,
        };
        let found = self.client.grep(&request).await.map_err(service_error)?;
        Ok(GrepMatches {
            content: found.content,
            truncated: found.details.is_some(),
        })
    }

    /// Applies a patch with git in the sandbox; returns the changed files.
    pub async fn patch(&self, patch: &str) -> Result<Vec<String>, SandboxServiceError> {
        let mut stdin = patch.as_bytes().to_vec();
        if !stdin.ends_with(b"\n") {
            stdin.push(b'\n');
        }
        let done = self.apply(stdin.clone(), None).await?;
        if done.exit_code == 0 {
            return Ok(parse_numstat(&done.stdout));
        }
        let again = self.apply(stdin, Some(RECOUNT)).await?;
        if again.exit_code == 0 {
            return Ok(parse_numstat(&again.stdout));
        }
        let why = String::from_utf8_lossy(&done.stderr);
        Err(SandboxServiceError::Refused(format!(
            "The patch was not applied.\n{}",
            why.trim()
        )))
    }

    async fn apply(
        &self,
        stdin: Vec<u8>,
        extra_argument: Option<&str>,
    ) -> Result<ExecutionResult, SandboxServiceError> {
        let command = SandboxCommand {
            stdin,
            timeout: Some(PATCH_TIMEOUT),
            ..SandboxCommand::new(APPLY.iter().copied().chain(extra_argument))
        };
        let target = self.patch_target.clone();
        let done = tokio::task::spawn_blocking(move || match target {
            PatchTarget::Namespace(backend, id) => Ok(backend.exec(&id, &command)?),
            PatchTarget::Remote(container) => {
                container.run_with_backend(|backend, id| Ok(backend.exec(id, &command)?))
            }
        });
        let failed = |why: String| SandboxServiceError::Failed(why);
        let done = done.await.map_err(|error| failed(error.to_string()))?;
        done.map_err(|error| match error.downcast_ref::<SandboxError>() {
            Some(SandboxError::Start { .. }) => {
                failed(format!("{error}; a patch needs git in the sandbox"))
            }
            _ => failed(error.to_string()),
        })
    }
}

/// The paths in the output of `git apply --numstat -z`: added, removed, path, NUL.
fn parse_numstat(listed: &[u8]) -> Vec<String> {
    let path = |entry: &[u8]| {
        let path = entry.splitn(3, |byte| *byte == b'\t').nth(2)?;
        Some(String::from_utf8_lossy(path).into_owned())
    };
    listed.split(|byte| *byte == 0).filter_map(path).collect()
}

fn truncation_info(truncation: Truncation) -> TruncationInfo {
    TruncationInfo {
        total_lines: truncation.total_lines,
        total_bytes: truncation.total_bytes,
        output_lines: truncation.output_lines,
        output_bytes: truncation.output_bytes,
    }
}

fn service_error(error: WorkbenchClientError) -> SandboxServiceError {
    match error {
        WorkbenchClientError::Refused(why) => {
            if INVALID_REQUEST_PREFIXES
                .iter()
                .any(|words| why.starts_with(words))
            {
                SandboxServiceError::Invalid(why)
            } else {
                SandboxServiceError::Refused(why)
            }
        }
        // The sandbox is paused or stopped.
        WorkbenchClientError::DialFailed { reason, .. } => SandboxServiceError::Refused(reason),
        error @ (WorkbenchClientError::TimedOut(_)
        | WorkbenchClientError::Inaccessible { .. }
        | WorkbenchClientError::Unauthorized(_)
        | WorkbenchClientError::NoToken
        | WorkbenchClientError::InvalidAddress(_)
        | WorkbenchClientError::ConnectionLost { .. }
        | WorkbenchClientError::InvalidResponse { .. }) => {
            SandboxServiceError::Failed(error.to_string())
        }
    }
}

#[cfg(test)]
mod tests {
    use workbench::error::ToolError;

    use super::*;

    #[test]
    fn missing_path_is_invalid_and_missing_text_is_refused() {
        let path = || "a".to_owned();
        let what = "pattern";
        let why = path();
        for (error, is_invalid) in [
            (ToolError::InvalidField("path"), true),
            (ToolError::OutsideWorkspace, true),
            (ToolError::NotFound(path()), true),
            (ToolError::IsDirectory(path()), true),
            (ToolError::NotADirectory(path()), true),
            (ToolError::NotAFile(path()), true),
            (ToolError::InvalidOffset, true),
            (ToolError::InvalidPattern { what, why }, true),
            (ToolError::NoMatch(path()), false),
            (ToolError::NoChange(path()), false),
            (ToolError::Changed(path()), false),
            (ToolError::Busy(path()), false),
        ] {
            let mapped = service_error(WorkbenchClientError::Refused(error.to_string()));
            let found = matches!(mapped, SandboxServiceError::Invalid(_));
            assert_eq!(found, is_invalid, "{error}");
        }
    }

    #[test]
    fn patched_files_are_parsed_from_numstat_output() {
        let listed = b"1\t0\ta b.txt\0-\t-\tlogo.png\0\x30\t2\twith\ttab\0";
        assert_eq!(parse_numstat(listed), ["a b.txt", "logo.png", "with\ttab"]);
        assert!(parse_numstat(b"").is_empty());
    }
}
