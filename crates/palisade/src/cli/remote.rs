//! Containers of `sandbox.remote`: commands and shells in them.

use std::io::{BufRead, IsTerminal, Write};
use std::ops::ControlFlow;

use anyhow::Result;
use config::section::sandbox::RemoteContainer;
use control::remote::{self, BlockingWorkbenchClient};
use policy::id::SandboxId;
use sandbox::contract::SandboxCommand;
use sandbox::remote::{CommandEnd, OutputStream, RemoteBackend};

use crate::cli::Global;
use crate::exit::{Exit, Failure};
use crate::gate;
use crate::output;

/// Said to who wants to see or bring home what was done in it.
pub const NO_BRANCH: &str =
    "the container is managed elsewhere and has no branch; see its changes with git inside";

/// What is configured of the container of that name, which the gate has found. Its token is
/// not for the gate to hand out, so the operator's file is read here as well.
pub fn settings(id: &SandboxId, global: &Global) -> Result<RemoteContainer> {
    let paths = global.paths()?;
    let settings = config::load(paths.config.current(), &gate::environment);
    let settings = settings.map_err(|problems| Failure::refused(&problems))?;
    let found = settings.sandbox.remote.named(id.as_str()).cloned();
    Ok(found.ok_or_else(|| {
        let message = format!(
            "the gate has a container '{id}' and this configuration has none; name the gate's \
             file with --config"
        );
        Failure::new(Exit::Usage, message)
    })?)
}

/// The container of that name, as a sandbox.
pub fn open(id: &SandboxId, global: &Global) -> Result<RemoteBackend<BlockingWorkbenchClient>> {
    Ok(remote::open(&settings(id, global)?)?)
}

/// Runs a command in it; its output and its code are ours.
pub fn exec(
    remote: &RemoteBackend<BlockingWorkbenchClient>,
    command: &SandboxCommand,
) -> Result<Exit> {
    let ended = remote.run(command, &mut |way, bytes| show(way, bytes))?;
    Ok(match ended {
        CommandEnd::Code(code) => Exit::Command(u8::try_from(code).unwrap_or(1)),
        CommandEnd::TimedOut => Exit::TimedOut,
        CommandEnd::Stopped => Exit::Failed,
    })
}

/// A shell of one line at a time: what is on the wire has no input and no terminal. Where it
/// stands is remembered; variables are not.
pub fn shell(
    remote: &RemoteBackend<BlockingWorkbenchClient>,
    command: &SandboxCommand,
) -> Result<Exit> {
    let talks = std::io::stdin().is_terminal();
    if talks {
        output::say("palisade: a line at a time; 'cd' lasts, variables do not; end with Ctrl-D");
    }
    let mut command = command.clone();
    let mut exit = Exit::Ok;
    let mut lines = std::io::stdin().lock().lines();
    loop {
        if talks {
            let _ = write!(std::io::stderr(), "{}$ ", remote.id());
        }
        let Some(line) = lines.next().transpose()? else {
            return Ok(exit);
        };
        // The path of the result follows a byte that no text contains.
        let script = format!("{line}\ncode=$?; printf '\\000%s' \"$PWD\"; exit $code");
        command.argv = ["/bin/sh", "-c", &script].map(Into::into).into();
        let mut place = None;
        let ended = remote.run(&command, &mut |way, bytes| {
            if way == OutputStream::Stderr {
                return show(way, bytes);
            }
            if let Some(place) = &mut place {
                extend(place, bytes);
                return ControlFlow::Continue(());
            }
            match bytes.iter().position(|byte| *byte == 0) {
                None => show(way, bytes),
                Some(at) => {
                    let (said, rest) = bytes.split_at(at);
                    let mut told = Vec::new();
                    extend(&mut told, rest.get(1..).unwrap_or_default());
                    place = Some(told);
                    show(way, said)
                }
            }
        })?;
        if let Some(place) = place.and_then(|place| String::from_utf8(place).ok()) {
            command.directory = Some(place.into());
        }
        exit = match ended {
            CommandEnd::Code(code) => Exit::Command(u8::try_from(code).unwrap_or(1)),
            CommandEnd::TimedOut => Exit::TimedOut,
            CommandEnd::Stopped => Exit::Failed,
        };
    }
}

/// No path is longer.
fn extend(place: &mut Vec<u8>, bytes: &[u8]) {
    let room = 4096_usize.saturating_sub(place.len()).min(bytes.len());
    place.extend_from_slice(bytes.get(..room).unwrap_or_default());
}

fn show(way: OutputStream, bytes: &[u8]) -> ControlFlow<()> {
    let written = match way {
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

    /// The configuration cannot see how sandboxes are named, and must not accept another name.
    #[test]
    fn names_of_containers_are_names_of_sandboxes() {
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
