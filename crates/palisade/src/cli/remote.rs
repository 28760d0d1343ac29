//! Commands and shells in the containers of `sandbox.remote`.

use std::io::{BufRead, IsTerminal, Write};
use std::ops::ControlFlow;

use anyhow::Result;
use config::section::sandbox::RemoteContainer;
use control::remote::{self, BlockingWorkbenchClient};
use policy::id::SandboxId;
use sandbox::contract::SandboxCommand;
use sandbox::remote::{CommandEnd, OutputStream, RemoteBackend};

use crate::cli::Global;
use crate::exit::{CliError, CliExit};
use crate::gate;
use crate::output;

/// Error of commands that need a branch.
pub const NO_BRANCH: &str = "the container is managed elsewhere and has no branch; use git in the \
                             container to see its changes";

/// The settings of a container that the gate has found. The gate does not hand out the
/// container's token, so the command line reads the operator's configuration as well.
pub fn settings(id: &SandboxId, global: &Global) -> Result<RemoteContainer> {
    let paths = global.paths()?;
    let settings = config::load(paths.config.current(), &gate::read_environment_variable);
    let settings = settings.map_err(|problems| CliError::invalid_config(&problems))?;
    let found = settings.sandbox.remote.find(id.as_str()).cloned();
    Ok(found.ok_or_else(|| {
        let message = format!(
            "container '{id}' is in the gate's configuration, but not in this one; name the \
             gate's file with --config"
        );
        CliError::new(CliExit::Usage, message)
    })?)
}

/// The backend of a container.
pub fn open(id: &SandboxId, global: &Global) -> Result<RemoteBackend<BlockingWorkbenchClient>> {
    Ok(remote::open(&settings(id, global)?)?)
}

/// Runs a command in a container; prints its output and returns its exit code.
pub fn exec(
    remote: &RemoteBackend<BlockingWorkbenchClient>,
    command: &SandboxCommand,
) -> Result<CliExit> {
    let ended = remote.run(command, &mut |stream, bytes| write_output(stream, bytes))?;
    Ok(match ended {
        CommandEnd::Code(code) => CliExit::Command(u8::try_from(code).unwrap_or(1)),
        CommandEnd::TimedOut => CliExit::TimedOut,
        CommandEnd::Stopped => CliExit::Failed,
    })
}

/// A shell that runs one line at a time: the workbench protocol has no stdin and no terminal.
/// The working directory persists between lines; variables do not.
pub fn shell(
    remote: &RemoteBackend<BlockingWorkbenchClient>,
    command: &SandboxCommand,
) -> Result<CliExit> {
    let interactive = std::io::stdin().is_terminal();
    if interactive {
        output::print_message(
            "palisade: each line runs by itself; cd persists, variables do not; end with Ctrl-D",
        );
    }
    let mut command = command.clone();
    let mut exit = CliExit::Ok;
    let mut lines = std::io::stdin().lock().lines();
    loop {
        if interactive {
            let _ = write!(std::io::stderr(), "{}$ ", remote.id());
        }
        let Some(line) = lines.next().transpose()? else {
            return Ok(exit);
        };
        // The working directory follows a NUL byte, which text output does not contain.
        let script = format!("{line}\ncode=$?; printf '\\000%s' \"$PWD\"; exit $code");
        command.argv = ["/bin/sh", "-c", &script].map(Into::into).into();
        let mut directory = None;
        let ended = remote.run(&command, &mut |stream, bytes| {
            if stream == OutputStream::Stderr {
                return write_output(stream, bytes);
            }
            if let Some(directory) = &mut directory {
                append_path(directory, bytes);
                return ControlFlow::Continue(());
            }
            match bytes.iter().position(|byte| *byte == 0) {
                None => write_output(stream, bytes),
                Some(at) => {
                    let (output, rest) = bytes.split_at(at);
                    let mut path = Vec::new();
                    append_path(&mut path, rest.get(1..).unwrap_or_default());
                    directory = Some(path);
                    write_output(stream, output)
                }
            }
        })?;
        if let Some(path) = directory.and_then(|path| String::from_utf8(path).ok()) {
            command.directory = Some(path.into());
        }
        exit = match ended {
            CommandEnd::Code(code) => CliExit::Command(u8::try_from(code).unwrap_or(1)),
            CommandEnd::TimedOut => CliExit::TimedOut,
            CommandEnd::Stopped => CliExit::Failed,
        };
    }
}

/// Appends to a path, up to the maximum length of a path.
fn append_path(path: &mut Vec<u8>, bytes: &[u8]) {
    let room = 4096_usize.saturating_sub(path.len()).min(bytes.len());
    path.extend_from_slice(bytes.get(..room).unwrap_or_default());
}

fn write_output(stream: OutputStream, bytes: &[u8]) -> ControlFlow<()> {
    let written = match stream {
        OutputStream::Stdout => output::write_out(bytes).is_ok(),
        OutputStream::Stderr => std::io::stderr().lock().write_all(bytes).is_ok(),
    };
    if written {
        ControlFlow::Continue(())
    } else {
        ControlFlow::Break(())
    }
}

#[cfg(test)]
mod tests {
    use sandbox::name::Slug;

    /// The config crate cannot use the sandbox crate's name check, and must accept the same
    /// names.
    #[test]
    fn container_names_are_valid_sandbox_names() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("palisade.yaml");
        for name in [
            "remote",
            "a",
            "7",
            "a-b-2",
            &"x".repeat(63),
            &"x".repeat(64),
            "",
            "A",
            "a_b",
            "a.b",
            "a--b",
            "-a",
            "a-",
            "a b",
            "é",
        ] {
            let list = serde_json::json!([{"name": name, "socket_path": "/s"}]);
            let text = format!("version: 1\nsandbox: {{remote: {list}}}\n");
            std::fs::write(&file, text).unwrap();
            let is_accepted = config::load(Some(&file), &|_| None).is_ok();
            assert_eq!(
                is_accepted,
                Slug::try_from(name.to_owned()).is_ok(),
                "{name}"
            );
        }
    }
}
