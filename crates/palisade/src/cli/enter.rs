//! `palisade run|exec|shell`: commands inside.

use std::ffi::OsString;
use std::io::Read;
use std::path::PathBuf;

use anyhow::{Context, Result};
use clap::Args;
use control::client::Client;
use control::sandboxes::body::Purpose;
use sandbox::contract::Command;
use sandbox::name::Slug;
use sandbox::namespace::Namespace;
use serde_json::{Value, json};

use crate::cli::place::{self, Place};
use crate::cli::sandboxes::{Making, below, make, take_snapshot};
use crate::cli::{Global, block_on, summary};
use crate::exit::{Exit, Failure};
use crate::gate::background;
use crate::paths::Paths;
use crate::{output, relay};

/// Variables of the operator's that a command inside may know, beside `LC_*` and what
/// `sandbox.env` names.
const PASSED_ON: &[&str] = &["COLORTERM", "LANG", "TERM", "TZ"];

/// The longest message that is made of a command.
const LONGEST_MESSAGE: usize = 200;

#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  palisade run -- claude                          an agent, in a sandbox of its own
  palisade run --name fix -- bash                 a shell; the next run of that name goes on
  palisade run --dirty -- make test               with your uncommitted changes")]
pub struct RunArgs {
    /// Use the sandbox of that name, or make it [default: made from the command]
    #[arg(long, short)]
    pub name: Option<String>,
    /// Delete the sandbox afterwards, unless it has something to bring home
    #[arg(long)]
    pub rm: bool,
    #[command(flatten)]
    pub making: Making,
    #[command(flatten)]
    pub running: Running,
    /// The command and its arguments
    #[arg(required = true, trailing_var_arg = true, value_name = "COMMAND")]
    pub command: Vec<OsString>,
}

#[derive(Debug, Args)]
pub struct ExecArgs {
    /// Its name, or its id
    pub name: String,
    #[command(flatten)]
    pub running: Running,
    /// The command and its arguments
    #[arg(required = true, trailing_var_arg = true, value_name = "COMMAND")]
    pub command: Vec<OsString>,
}

#[derive(Debug, Args)]
pub struct ShellArgs {
    /// Its name, or its id
    pub name: String,
    #[command(flatten)]
    pub running: Running,
    /// A line for the shell; without one it talks to you
    #[arg(short = 'c', value_name = "LINE")]
    pub line: Option<OsString>,
}

/// How a command runs.
#[derive(Clone, Debug, Args)]
pub struct Running {
    /// Where it starts [default: /workspace]
    #[arg(long, short = 'w', value_name = "DIR")]
    pub workdir: Option<PathBuf>,
    /// A variable for it, NAME=VALUE or NAME to pass yours on; repeat for more
    #[arg(long, short, value_name = "NAME[=VALUE]")]
    pub env: Vec<String>,
    /// Pipes instead of a terminal, also when you are on one
    #[arg(long, short = 'T')]
    pub no_tty: bool,
}

pub fn run(args: &RunArgs, global: &Global) -> Result<Exit> {
    let paths = global.paths()?;
    let (gate, place, made) = block_on(async {
        let gate = background::client(&paths, global.verbose).await?;
        let (place, made) = make_or_reuse(&gate, args).await?;
        Ok((gate, place, made))
    })
    .context("run failed")?;
    let started = jiff::Timestamp::now();
    let code = inside(
        &paths,
        &gate,
        &place,
        &args.command,
        &args.running,
        Purpose::Exec,
    );
    // Whatever became of the command, its work is looked at. The gate may have gone meanwhile.
    let told = block_on(async {
        let gate = background::client(&paths, global.verbose).await?;
        let report = match place.repository {
            Some(_) => Some(take_snapshot(&gate, &place, &message("run", &args.command)).await?),
            None => None,
        };
        summary::tell(&gate, &place, report.as_ref(), started).await
    });
    let kept = match &told {
        Ok(brought) => !args.rm || *brought,
        Err(_) => true,
    };
    if !kept && made {
        let force = format!("{}?force=true", crate::cli::sandboxes::route(&place));
        let removed = block_on(async {
            let gate = background::client(&paths, global.verbose).await?;
            Ok(gate.delete(&force).await?)
        });
        removed.context("delete failed")?;
    }
    if let Err(error) = told {
        output::say(&format!(
            "palisade: snapshot failed: {}",
            output::safe(&format!("{error:#}"))
        ));
        // A command that went well and whose work is not safe did not go well.
        return match code {
            Ok(Exit::Command(0)) => Ok(Exit::Failed),
            other => other,
        };
    }
    code
}

/// The sandbox to run in, and whether it is new.
async fn make_or_reuse(gate: &Client, args: &RunArgs) -> Result<(Place, bool)> {
    if let Some(name) = &args.name {
        let slug =
            Slug::from_name(name).map_err(|error| Failure::new(Exit::Usage, error.to_string()))?;
        let root = place::here().map(|home| home.root().to_owned());
        let wanted = if args.making.no_repo { None } else { root };
        let known = place::all(gate).await?.into_iter();
        let mut known = known.filter(|place| (&place.name, &place.repository) == (&slug, &wanted));
        if let Some(place) = known.next() {
            if place.status == "paused" {
                gate.post(&below(&place, "resume"), &json!({})).await?;
            }
            return Ok((place, false));
        }
    }
    let name = match &args.name {
        Some(name) => name.clone(),
        None => name_after(&args.command)?,
    };
    let place = make(gate, &args.making, name).await?;
    let branch = place.branch_name.as_ref();
    output::say(&format!(
        "palisade: sandbox {}{}",
        place.name,
        branch.map_or_else(String::new, |branch| format!(", branch {branch}"))
    ));
    Ok((place, true))
}

/// A name from the command and a short random tail.
fn name_after(command: &[OsString]) -> Result<String> {
    let mut tail = [0; 2];
    std::fs::File::open("/dev/urandom")?.read_exact(&mut tail)?;
    let program = command.first().map(PathBuf::from).unwrap_or_default();
    let program = program.file_name().unwrap_or_default().to_string_lossy();
    let stem: String = program.chars().take(40).collect();
    let stem = Slug::from_name(&stem).map_or_else(|_| "run".to_owned(), String::from);
    Ok(format!("{stem}-{:02x}{:02x}", tail[0], tail[1]))
}

/// What a command's snapshot is called.
fn message(word: &str, command: &[OsString]) -> String {
    let line: Vec<String> = command
        .iter()
        .map(|word| word.to_string_lossy().into_owned())
        .collect();
    let line = line.join(" ");
    let short: String = line.chars().take(LONGEST_MESSAGE).collect();
    format!("{word}: {short}")
}

pub fn exec(args: &ExecArgs, global: &Global) -> Result<Exit> {
    enter(
        &args.name,
        &args.command,
        &args.running,
        Purpose::Exec,
        global,
    )
    .context("exec failed")
}

pub fn shell(args: &ShellArgs, global: &Global) -> Result<Exit> {
    let mut command = vec![OsString::from("/bin/sh"), "-c".into()];
    match &args.line {
        Some(line) => command.push(line.clone()),
        // The best there is, as a login shell would be.
        None => command.push("exec $(command -v bash || command -v sh)".into()),
    }
    enter(&args.name, &command, &args.running, Purpose::Shell, global).context("shell failed")
}

fn enter(
    name: &str,
    command: &[OsString],
    running: &Running,
    purpose: Purpose,
    global: &Global,
) -> Result<Exit> {
    let paths = global.paths()?;
    let (gate, place) = block_on(async {
        let gate = background::client(&paths, global.verbose).await?;
        let place = place::find(&gate, name).await?;
        Ok((gate, place))
    })?;
    inside(&paths, &gate, &place, command, running, purpose)
}

/// Runs a command to its end, and passes its own code on.
fn inside(
    paths: &Paths,
    gate: &Client,
    place: &Place,
    command: &[OsString],
    running: &Running,
    purpose: Purpose,
) -> Result<Exit> {
    let session = block_on(async {
        let body = json!({ "purpose": purpose });
        Ok(gate.post(&below(place, "session"), &body).await?)
    })?;
    let named = session.get("environment").and_then(Value::as_array);
    let named: Vec<&str> = named
        .into_iter()
        .flatten()
        .filter_map(Value::as_str)
        .collect();
    let command = Command {
        environment: environment(&named, &running.env)?,
        directory: running.workdir.clone(),
        ..Command::new(command.to_vec())
    };
    let terminal = relay::own_terminal().filter(|_| !running.no_tty);
    let started = backend(paths).start(&place.id, &command, terminal)?;
    let code = relay::accompany(started, terminal.is_some())?;
    Ok(Exit::Command(u8::try_from(code).unwrap_or(1)))
}

/// The backend, to enter with. Making and removing are the gate's.
pub fn backend(paths: &Paths) -> Namespace {
    Namespace::new(
        paths.state_dir.join("sandboxes"),
        PathBuf::new(),
        Vec::new(),
    )
}

fn environment(named: &[&str], asked: &[String]) -> Result<Vec<(OsString, OsString)>> {
    let is_passed_on =
        |name: &str| PASSED_ON.contains(&name) || name.starts_with("LC_") || named.contains(&name);
    let mut variables: Vec<(OsString, OsString)> = std::env::vars_os()
        .filter(|(name, _)| name.to_str().is_some_and(is_passed_on))
        .collect();
    for one in asked {
        let (name, value) = match one.split_once('=') {
            Some((name, value)) => (name, Some(OsString::from(value))),
            None => (one.as_str(), std::env::var_os(one)),
        };
        if name.is_empty() {
            let message = format!("--env wants NAME=VALUE, not '{}'", output::safe(one));
            return Err(Failure::new(Exit::Usage, message).into());
        }
        if let Some(value) = value {
            variables.push((name.into(), value));
        }
    }
    Ok(variables)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sandbox_is_named_after_its_command() {
        for (command, stem) in [
            ("/usr/bin/claude", "claude-"),
            ("./a b.sh", "a-b-sh-"),
            ("…", "run-"),
        ] {
            let name = name_after(&[command.into()]).unwrap();
            assert!(name.starts_with(stem), "{name}");
            assert_eq!(name.len(), stem.len() + 4);
        }
    }

    #[test]
    fn a_message_says_what_was_run_and_is_bounded() {
        let command: Vec<OsString> = ["cargo", "test"].map(Into::into).into();
        assert_eq!(message("run", &command), "run: cargo test");
        assert_eq!(message("run", &["x".repeat(5000).into()]).len(), 205);
    }
}
