//! The container of `sandbox.remote`, which commands know as `remote`.

use std::io::{BufRead, IsTerminal, Write};

use anyhow::Result;
use config::Sources;
use config::section::sandbox::Remote as Settings;
use control::remote::{self, Blocking, NAME};
use control::sandboxes::body::Purpose;
use sandbox::contract::Command;
use sandbox::remote::{Ended, Hearing, Remote, Way};
use serde_json::json;

use crate::cli::{Global, block_on};
use crate::exit::{Exit, Failure};
use crate::gate::{self, background};
use crate::output;

/// Said to who wants to see or bring home what was done in it.
pub const NO_BRANCH: &str =
    "the container is managed elsewhere and has no branch; see its changes with git inside";

/// The container, entered on record as any sandbox is, if that is what this name means: one is
/// configured, and it is its name.
pub fn enter(name: &str, purpose: Purpose, global: &Global) -> Result<Option<Settings>> {
    let Some(settings) = settings(name, global)? else {
        return Ok(None);
    };
    let paths = global.paths()?;
    block_on(async {
        let gate = background::client(&paths, global.verbose).await?;
        let route = format!("/v1/sandboxes/{NAME}/session");
        gate.post(&route, &json!({ "purpose": purpose })).await?;
        Ok(Some(settings))
    })
}

/// The same, as a sandbox.
pub fn open(name: &str, purpose: Purpose, global: &Global) -> Result<Option<Remote<Blocking>>> {
    let settings = enter(name, purpose, global)?;
    Ok(settings.as_ref().map(remote::open).transpose()?)
}

/// What is configured of it, if that is what this name means.
pub fn settings(name: &str, global: &Global) -> Result<Option<Settings>> {
    if name != NAME {
        return Ok(None);
    }
    let paths = global.paths()?;
    let refused = |problems: config::Problems| {
        Failure::new(
            Exit::Usage,
            format!("the configuration was refused\n{problems}"),
        )
    };
    let sources = Sources::read(paths.config.current(), &gate::environment).map_err(refused)?;
    let settings = sources.settings(&gate::environment).map_err(refused)?;
    Ok(settings.sandbox.remote)
}

/// Runs a command in it; its output and its code are ours.
pub fn exec(remote: &Remote<Blocking>, command: &Command) -> Result<Exit> {
    let ended = remote.run(command, &mut |way, bytes| show(way, bytes))?;
    Ok(match ended {
        Ended::Code(code) => Exit::Command(u8::try_from(code).unwrap_or(1)),
        Ended::TimedOut => Exit::TimedOut,
        Ended::Stopped => Exit::Failed,
    })
}

/// A shell of one line at a time: what is on the wire has no input and no terminal. Where it
/// stands is remembered; variables are not.
pub fn shell(remote: &Remote<Blocking>, command: &Command) -> Result<Exit> {
    let talks = std::io::stdin().is_terminal();
    if talks {
        output::say("palisade: a line at a time; 'cd' lasts, variables do not; end with Ctrl-D");
    }
    let mut command = command.clone();
    let mut exit = Exit::Ok;
    let mut lines = std::io::stdin().lock().lines();
    loop {
        if talks {
            let _ = write!(std::io::stderr(), "{NAME}$ ");
        }
        let Some(line) = lines.next().transpose()? else {
            return Ok(exit);
        };
        // Where it ends up is told after a byte that no text has.
        let script = format!("{line}\ncode=$?; printf '\\000%s' \"$PWD\"; exit $code");
        command.argv = ["/bin/sh", "-c", &script].map(Into::into).into();
        let mut place = None;
        let ended = remote.run(&command, &mut |way, bytes| {
            if way == Way::Stderr {
                return show(way, bytes);
            }
            if let Some(place) = &mut place {
                extend(place, bytes);
                return Hearing::More;
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
            Ended::Code(code) => Exit::Command(u8::try_from(code).unwrap_or(1)),
            Ended::TimedOut => Exit::TimedOut,
            Ended::Stopped => Exit::Failed,
        };
    }
}

/// No path is longer.
fn extend(place: &mut Vec<u8>, bytes: &[u8]) {
    let room = 4096_usize.saturating_sub(place.len()).min(bytes.len());
    place.extend_from_slice(bytes.get(..room).unwrap_or_default());
}

fn show(way: Way, bytes: &[u8]) -> Hearing {
    let written = match way {
        Way::Stdout => output::write_out(bytes).is_ok(),
        Way::Stderr => std::io::stderr().lock().write_all(bytes).is_ok(),
    };
    if written {
        Hearing::More
    } else {
        Hearing::Enough
    }
}
