//! `palisade run|exec|shell`: commands inside.

use std::ffi::OsString;
use std::io::Read;
use std::path::PathBuf;
use std::sync::Arc;

use anyhow::{Context, Result};
use clap::Args;
use control::body::Purpose;
use control::client::{Client, ClientError};
use sandbox::contract::{SandboxCommand, SandboxError};
use sandbox::name::Slug;
use sandbox::namespace::Namespace;
use serde_json::{Value, json};

use crate::cli::outcome::Outcome;
use crate::cli::sandbox_lookup::{self, Place};
use crate::cli::sandboxes::{Making, below, route, take_snapshot};
use crate::cli::{Global, agents, block_on, doctor, remote, reuse, summary};
use crate::exit::{Exit, Failure, exit_of};
use crate::gate::background;
use crate::output;
use crate::paths::Paths;
use crate::relay::{self, End, RelayOptions, Sink};

/// Variables of the operator's that a command inside may know, beside `LC_*` and what
/// `sandbox.env` names.
const PASSED_ON: &[&str] = &["COLORTERM", "LANG", "TERM", "TZ"];

/// Said when we leave a command behind.
const SILENT: &str = "the sandbox does not answer; the command ends when the sandbox resumes; see how \
                      it is with palisade list, and resume or delete it";

/// The longest message that is made of a command.
const LONGEST_MESSAGE: usize = 200;

#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  palisade run -- claude                          an agent in its own sandbox
  palisade run --name fix -- bash                 a shell; run again to continue
  palisade run --dirty -- make test               with your uncommitted changes
  palisade run --json --rm -- make | jq .exit_code

With --name, an existing sandbox is used as it is, and resumed if necessary. --publish and
--rm apply to it; any other option that does not match it is refused.

Programs in the sandbox trust the gate's certificate and use its proxy: the system's bundle
contains it, and HTTPS_PROXY, SSL_CERT_FILE, NODE_EXTRA_CA_CERTS and
similar variables are set (JAVA_TOOL_OPTIONS if Java is installed). --env NAME=VALUE
overrides one, --env NAME= empties it.

With --json, stdout has one JSON object at the end: exit_code, commits, files, added,
removed, reached, refused, kept and the sandbox's name. The command's output goes to stderr,
without a TTY. The exit code is the command's.")]
pub struct RunArgs {
    /// Sandbox name; created if it does not exist [default: derived from the command]
    #[arg(long, short)]
    pub name: Option<String>,
    /// Delete the sandbox afterwards, unless it has unmerged work
    #[arg(long)]
    pub rm: bool,
    /// Leave the agent's own sandbox on
    #[arg(long)]
    pub as_is: bool,
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
    /// Sandbox name or id
    pub name: String,
    #[command(flatten)]
    pub running: Running,
    /// The command and its arguments
    #[arg(required = true, trailing_var_arg = true, value_name = "COMMAND")]
    pub command: Vec<OsString>,
}

#[derive(Debug, Args)]
pub struct ShellArgs {
    /// Sandbox name or id
    pub name: String,
    #[command(flatten)]
    pub running: Running,
    /// Run this shell command; omit for an interactive shell
    #[arg(short = 'c', value_name = "LINE")]
    pub line: Option<OsString>,
}

/// How a command runs.
#[derive(Clone, Debug, Args)]
pub struct Running {
    /// Working directory [default: /workspace]
    #[arg(long, short = 'w', value_name = "DIR")]
    pub workdir: Option<PathBuf>,
    /// Environment variable: NAME=VALUE, or NAME to pass yours on (repeatable)
    #[arg(long, short, value_name = "NAME[=VALUE]")]
    pub env: Vec<String>,
    /// Do not allocate a TTY
    #[arg(long, short = 'T')]
    pub no_tty: bool,
}

pub fn run(args: &RunArgs, global: &Global) -> Result<Exit> {
    let paths = global.paths()?;
    doctor::require_namespaces(global, args.making.backend.as_deref()).context("run failed")?;
    let (gate, place, made) = block_on(async {
        let gate = background::client(&paths, global.verbose).await?;
        let (place, made) = reuse::make_or_reuse(&gate, args, global.json).await?;
        Ok((gate, place, made))
    })
    .context("run failed")?;
    let started = jiff::Timestamp::now();
    let asked = Asked {
        command: &args.command,
        running: &args.running,
        purpose: Purpose::Exec,
        talks: false,
        // With user namespaces an agent's own layer works.
        as_is: args.as_is || place.nested,
        stdout: if global.json {
            Sink::Stderr
        } else {
            Sink::Stdout
        },
    };
    let ended = inside(&paths, &gate, &place, &asked).context("run failed");
    let mut outcome = Outcome::new(&place, made);
    if let Ok(End::Left(code)) = ended {
        // Of a sandbox that does not answer there is nothing to tell.
        outcome.error = Some(SILENT.to_owned());
        return finish(outcome, Ok(exit_with(code)), global);
    }
    let code = ended.map(|end| exit_with(end.code()));
    // Whatever became of the command, its work is looked at. The gate may have gone meanwhile.
    let told = block_on(async {
        let gate = background::client(&paths, global.verbose).await?;
        let report = match place.repository {
            Some(_) => Some(take_snapshot(&gate, &place, &message("run", &args.command)).await?),
            None => None,
        };
        if global.json {
            outcome
                .gather(&gate, &place, report.as_ref(), started)
                .await?;
            return Ok(outcome.commits > 0);
        }
        summary::tell(&gate, &place, report.as_ref(), started).await
    });
    if args.rm && matches!(told, Ok(false)) {
        let removed = block_on(async {
            let gate = background::client(&paths, global.verbose).await?;
            remove_unless_needed(&gate, &place).await
        });
        match removed {
            Ok(gone) => outcome.kept = !gone,
            Err(error) => outcome.error = Some(format!("delete failed: {error:#}")),
        }
    }
    if let Err(error) = told {
        outcome.error = Some(format!("snapshot failed: {error:#}"));
    }
    finish(outcome, code, global)
}

/// The last words of a run, for a person or for a script, and its exit code.
fn finish(mut outcome: Outcome, code: Result<Exit>, global: &Global) -> Result<Exit> {
    if let Some(error) = &outcome.error {
        output::say(&format!("palisade: {}", output::safe(error)));
    }
    // A command that went well and whose work is not safe did not go well.
    let code = match code {
        Ok(Exit::Command(0)) if outcome.error.is_some() => Ok(Exit::Failed),
        other => other,
    };
    if global.json {
        match &code {
            Ok(exit) => outcome.exit_code = Some(exit.code()),
            Err(error) => outcome.error = Some(format!("{error:#}")),
        }
        output::print_json(&outcome)?;
    }
    code
}

/// Deletes a sandbox that has nothing to bring home, and says whether it is gone. It stands
/// still while that is found out, so that nothing can be added; one that does hold something
/// stays, and says what.
async fn remove_unless_needed(gate: &Client, place: &Place) -> Result<bool> {
    let paused = gate.post(&below(place, "pause"), &json!({})).await;
    let Err(error) = gate.delete(&route(place)).await else {
        return Ok(true);
    };
    if paused.is_ok() {
        gate.post(&below(place, "resume"), &json!({})).await?;
    }
    if !matches!(&error, ClientError::Refused { status, .. } if status.as_u16() == 409) {
        return Err(error.into());
    }
    let why = output::safe(&error.to_string());
    output::say(&format!("palisade: {} stays: {why}", place.name));
    Ok(false)
}

/// A name from the command and a short random tail.
pub fn name_after(command: &[OsString]) -> Result<String> {
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
    let asked = Asked {
        command: &args.command,
        running: &args.running,
        purpose: Purpose::Exec,
        talks: false,
        as_is: true,
        stdout: Sink::Stdout,
    };
    enter(&args.name, &asked, global).context("exec failed")
}

pub fn shell(args: &ShellArgs, global: &Global) -> Result<Exit> {
    let mut command = vec![OsString::from("/bin/sh"), "-c".into()];
    match &args.line {
        Some(line) => command.push(line.clone()),
        // The best there is, as a login shell would be.
        None => command.push("exec $(command -v bash || command -v sh)".into()),
    }
    let asked = Asked {
        command: &command,
        running: &args.running,
        purpose: Purpose::Shell,
        talks: args.line.is_none(),
        as_is: true,
        stdout: Sink::Stdout,
    };
    enter(&args.name, &asked, global).context("shell failed")
}

fn enter(name: &str, asked: &Asked<'_>, global: &Global) -> Result<Exit> {
    let paths = global.paths()?;
    let (gate, place) = block_on(async {
        let gate = background::client(&paths, global.verbose).await?;
        let place = sandbox_lookup::find(&gate, name).await?;
        Ok((gate, place))
    })?;
    if place.is_elsewhere() {
        let remote = remote::open(&place.id, global)?;
        block_on(begin_session(&gate, &place, asked.purpose))?;
        let command = SandboxCommand {
            environment: environment_said(&asked.running.env)?,
            directory: asked.running.workdir.clone(),
            ..SandboxCommand::new(asked.command.to_vec())
        };
        return match asked.purpose {
            Purpose::Shell if asked.talks => remote::shell(&remote, &command),
            _ => remote::exec(&remote, &command).map_err(with_advice),
        };
    }
    let end = inside(&paths, &gate, &place, asked)?;
    if let End::Left(_) = end {
        output::say(&format!("palisade: {SILENT}"));
    }
    Ok(exit_with(end.code()))
}

/// Enters a sandbox on record; the gate answers what a command in it may know.
pub async fn begin_session(gate: &Client, place: &Place, purpose: Purpose) -> Result<Value> {
    let body = json!({ "purpose": purpose });
    Ok(gate.post(&below(place, "session"), &body).await?)
}

/// A command that is to run.
struct Asked<'a> {
    command: &'a [OsString],
    running: &'a Running,
    purpose: Purpose,
    /// Whether it is an interactive shell.
    talks: bool,
    /// The agent's command line is not extended.
    as_is: bool,
    /// Where its output goes. What it says on its error output goes to ours.
    stdout: Sink,
}

/// Runs a command to its end.
fn inside(paths: &Paths, gate: &Client, place: &Place, asked: &Asked<'_>) -> Result<End> {
    let session = block_on(begin_session(gate, place, asked.purpose))?;
    let named = session.get("environment").and_then(Value::as_array);
    let named: Vec<&str> = named
        .into_iter()
        .flatten()
        .filter_map(Value::as_str)
        .collect();
    let mut environment = environment(&named, &asked.running.env)?;
    let mut words = asked.command.to_vec();
    if !asked.as_is {
        let fitted = agents::fit(&words, &environment);
        if let Some(added) = fitted.added {
            output::say(&format!(
                "palisade: started with {added}: it is in a sandbox already (--as-is to leave \
                 that out)"
            ));
        }
        let variable = fitted.variable;
        environment.extend(variable.map(|(name, value)| (name.into(), value.into())));
        words = fitted.command;
    }
    let command = SandboxCommand {
        environment,
        directory: asked.running.workdir.clone(),
        ..SandboxCommand::new(words)
    };
    let terminal = match asked.stdout {
        Sink::Stdout => relay::own_terminal().filter(|_| !asked.running.no_tty),
        // A terminal has one output only.
        Sink::Stderr => None,
    };
    let backend = backend(paths);
    let started = backend.start(&place.id, &command, terminal)?;
    let id = place.id.clone();
    let options = RelayOptions {
        on_terminal: terminal.is_some(),
        stdout: asked.stdout,
        answers: Arc::new(move || backend.is_responding(&id)),
    };
    let end = relay::relay_session(started, options).map_err(with_advice)?;
    if let End::Stopped(_, why) = &end {
        output::say(&format!("palisade: the sandbox was stopped: {why}"));
    }
    Ok(end)
}

/// Says where a program or a directory must be, since that is not where the operator looks.
fn with_advice(error: anyhow::Error) -> anyhow::Error {
    let advice = match error.downcast_ref::<SandboxError>() {
        Some(SandboxError::Start { step, .. }) if step == "running it" => {
            "a program must be in the workspace, in the sandbox's PATH or below a directory that \
             sandbox.host_paths names"
        }
        Some(SandboxError::Start { step, .. }) if step == "entering the directory" => {
            "--workdir must be a directory inside the sandbox"
        }
        _ => return error,
    };
    Failure::new(exit_of(&error), format!("{error:#}; {advice}")).into()
}

/// The command's own code.
fn exit_with(code: i32) -> Exit {
    Exit::Command(u8::try_from(code).unwrap_or(1))
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
    variables.extend(environment_said(asked)?);
    Ok(variables)
}

/// The variables that were asked for one by one.
fn environment_said(asked: &[String]) -> Result<Vec<(OsString, OsString)>> {
    let mut variables = Vec::new();
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
