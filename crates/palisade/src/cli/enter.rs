//! `palisade run|exec|shell`: runs commands in a sandbox.

use std::ffi::OsString;
use std::io::Read;
use std::path::PathBuf;
use std::sync::Arc;

use anyhow::{Context, Result};
use clap::Args;
use control::body::Purpose;
use control::client::{ControlClient, ControlClientError};
use sandbox::contract::{SandboxCommand, SandboxError};
use sandbox::name::Slug;
use sandbox::namespace::Namespace;
use serde_json::{Value, json};

use crate::cli::outcome::RunOutcome;
use crate::cli::sandbox_lookup::{self, SandboxInfo};
use crate::cli::sandboxes::{CreateOptions, route, subroute, take_snapshot};
use crate::cli::{Global, agents, block_on, doctor, remote, reuse, summary};
use crate::exit::{CliError, CliExit, exit_of};
use crate::gate::background;
use crate::output;
use crate::paths::Paths;
use crate::relay::{self, OutputTarget, RelayOptions, SessionEnd};

/// The operator's variables that a command in a sandbox receives, beside `LC_*` and those of
/// `sandbox.env`.
const PASSED_VARIABLES: &[&str] = &["COLORTERM", "LANG", "TERM", "TZ"];

/// Message if the sandbox does not respond and this process therefore ends before the command.
const NOT_RESPONDING: &str = "the sandbox does not respond; the command ends when the sandbox \
                              resumes; check it with palisade list, then resume or delete it";

/// Maximum length of a commit message that contains a command, in characters.
const MAX_MESSAGE: usize = 200;

#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  palisade run -- claude                          an agent in its own sandbox
  palisade run --name fix -- bash                 a shell; run again to continue
  palisade run --dirty -- make test               with your uncommitted changes
  palisade run --tier open --preset npm -- codex  reads everywhere, and the npm registry
  palisade run --json --rm -- make | jq .exit_code

With --name, an existing sandbox is used as it is, and resumed if necessary. --publish,
--credential and --rm apply to it; any other option that does not match it is refused.

Programs in the sandbox trust the gate's certificate and use its proxy: the system's bundle
contains it, and HTTPS_PROXY, SSL_CERT_FILE, NODE_EXTRA_CA_CERTS and
similar variables are set (JAVA_TOOL_OPTIONS if Java is installed). --env NAME=VALUE
overrides one, --env NAME= empties it.

With --json, stdout has one JSON object at the end: exit_code, commits, files, added,
removed, reached, refused, kept, tier, presets and the sandbox's name. The command's
output goes to stderr, without a TTY. The exit code is the command's.")]
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
    pub create: CreateOptions,
    #[command(flatten)]
    pub command_options: CommandOptions,
    /// The command and its arguments
    #[arg(required = true, trailing_var_arg = true, value_name = "COMMAND")]
    pub command: Vec<OsString>,
}

#[derive(Debug, Args)]
pub struct ExecArgs {
    /// Sandbox name or id
    pub name: String,
    #[command(flatten)]
    pub command_options: CommandOptions,
    /// The command and its arguments
    #[arg(required = true, trailing_var_arg = true, value_name = "COMMAND")]
    pub command: Vec<OsString>,
}

#[derive(Debug, Args)]
pub struct ShellArgs {
    /// Sandbox name or id
    pub name: String,
    #[command(flatten)]
    pub command_options: CommandOptions,
    /// Run this shell command; omit for an interactive shell
    #[arg(short = 'c', value_name = "LINE")]
    pub line: Option<OsString>,
}

/// Options of a command.
#[derive(Clone, Debug, Args)]
pub struct CommandOptions {
    /// Working directory [default: /workspace]
    #[arg(long, short = 'w', value_name = "DIR")]
    pub workdir: Option<PathBuf>,
    /// Environment variable: NAME=VALUE, or NAME to pass on its current value (repeatable)
    #[arg(long, short, value_name = "NAME[=VALUE]")]
    pub env: Vec<String>,
    /// Do not allocate a TTY
    #[arg(long, short = 'T')]
    pub no_tty: bool,
}

pub fn run(args: &RunArgs, global: &Global) -> Result<CliExit> {
    let paths = global.paths()?;
    doctor::require_namespaces(global, args.create.backend.as_deref()).context("run failed")?;
    let (gate, sandbox, created) = block_on(async {
        let gate = background::client(&paths, global.verbose).await?;
        let (sandbox, created) = reuse::make_or_reuse(&gate, args, global.json).await?;
        Ok((gate, sandbox, created))
    })
    .context("run failed")?;
    let started = jiff::Timestamp::now();
    let session_command = SessionCommand {
        command: &args.command,
        options: &args.command_options,
        purpose: Purpose::Exec,
        interactive: false,
        // An agent's own sandbox works if user namespaces are allowed.
        as_is: args.as_is || sandbox.nested,
        stdout: if global.json {
            OutputTarget::Stderr
        } else {
            OutputTarget::Stdout
        },
    };
    let ended = run_in_sandbox(&paths, &gate, &sandbox, &session_command).context("run failed");
    let mut outcome = RunOutcome::new(&sandbox, created);
    if let Ok(SessionEnd::Abandoned(code)) = ended {
        // A sandbox that does not respond has no summary.
        outcome.error = Some(NOT_RESPONDING.to_owned());
        return finish(outcome, Ok(exit_with(code)), global);
    }
    let code = ended.map(|end| exit_with(end.code()));
    // The work is committed however the command ended. The gate may have been stopped
    // meanwhile.
    let has_commits = block_on(async {
        let gate = background::client(&paths, global.verbose).await?;
        let report = match sandbox.repository {
            Some(_) => Some(take_snapshot(&gate, &sandbox, &message("run", &args.command)).await?),
            None => None,
        };
        if global.json {
            outcome
                .gather(&gate, &sandbox, report.as_ref(), started)
                .await?;
            return Ok(outcome.commits > 0);
        }
        summary::print_summary(&gate, &sandbox, report.as_ref(), started).await
    });
    if args.rm && matches!(has_commits, Ok(false)) {
        let removed = block_on(async {
            let gate = background::client(&paths, global.verbose).await?;
            remove_unless_needed(&gate, &sandbox).await
        });
        match removed {
            Ok(deleted) => outcome.kept = !deleted,
            Err(error) => outcome.error = Some(format!("delete failed: {error:#}")),
        }
    }
    if let Err(error) = has_commits {
        outcome.error = Some(format!("snapshot failed: {error:#}"));
    }
    finish(outcome, code, global)
}

/// Prints the errors and, with --json, the result of a run; returns its exit code.
fn finish(mut outcome: RunOutcome, code: Result<CliExit>, global: &Global) -> Result<CliExit> {
    if let Some(error) = &outcome.error {
        output::print_message(&format!("palisade: {}", output::safe(error)));
    }
    // A successful command whose work could not be saved is a failed run.
    let code = match code {
        Ok(CliExit::Command(0)) if outcome.error.is_some() => Ok(CliExit::Failed),
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

/// Deletes a sandbox without unmerged work, and returns whether it was deleted. The sandbox is
/// paused during the check, so that no work can be added. A sandbox with unmerged work is kept,
/// and the reason is printed.
async fn remove_unless_needed(gate: &ControlClient, sandbox: &SandboxInfo) -> Result<bool> {
    let paused = gate.post(&subroute(sandbox, "pause"), &json!({})).await;
    let Err(error) = gate.delete(&route(sandbox)).await else {
        return Ok(true);
    };
    if paused.is_ok() {
        gate.post(&subroute(sandbox, "resume"), &json!({})).await?;
    }
    if !matches!(&error, ControlClientError::Refused { status, .. } if status.as_u16() == 409) {
        return Err(error.into());
    }
    let why = output::safe(&error.to_string());
    output::print_message(&format!("palisade: {} was kept: {why}", sandbox.name));
    Ok(false)
}

/// A sandbox name: the name of the command's program and a short random suffix.
pub fn name_from_command(command: &[OsString]) -> Result<String> {
    let mut suffix = [0; 2];
    std::fs::File::open("/dev/urandom")?.read_exact(&mut suffix)?;
    let program = command.first().map(PathBuf::from).unwrap_or_default();
    let program = program.file_name().unwrap_or_default().to_string_lossy();
    let stem: String = program.chars().take(40).collect();
    let stem = Slug::from_name(&stem).map_or_else(|_| "run".to_owned(), String::from);
    Ok(format!("{stem}-{:02x}{:02x}", suffix[0], suffix[1]))
}

/// The commit message of a command's snapshot.
fn message(word: &str, command: &[OsString]) -> String {
    let line: Vec<String> = command
        .iter()
        .map(|word| word.to_string_lossy().into_owned())
        .collect();
    let line = line.join(" ");
    let short: String = line.chars().take(MAX_MESSAGE).collect();
    format!("{word}: {short}")
}

pub fn exec(args: &ExecArgs, global: &Global) -> Result<CliExit> {
    let session_command = SessionCommand {
        command: &args.command,
        options: &args.command_options,
        purpose: Purpose::Exec,
        interactive: false,
        as_is: true,
        stdout: OutputTarget::Stdout,
    };
    enter(&args.name, &session_command, global).context("exec failed")
}

pub fn shell(args: &ShellArgs, global: &Global) -> Result<CliExit> {
    let mut command = vec![OsString::from("/bin/sh"), "-c".into()];
    match &args.line {
        Some(line) => command.push(line.clone()),
        // Bash if it is installed, otherwise sh.
        None => command.push("exec $(command -v bash || command -v sh)".into()),
    }
    let session_command = SessionCommand {
        command: &command,
        options: &args.command_options,
        purpose: Purpose::Shell,
        interactive: args.line.is_none(),
        as_is: true,
        stdout: OutputTarget::Stdout,
    };
    enter(&args.name, &session_command, global).context("shell failed")
}

fn enter(name: &str, session_command: &SessionCommand<'_>, global: &Global) -> Result<CliExit> {
    let paths = global.paths()?;
    let (gate, sandbox) = block_on(async {
        let gate = background::client(&paths, global.verbose).await?;
        let sandbox = sandbox_lookup::find(&gate, name).await?;
        Ok((gate, sandbox))
    })?;
    if sandbox.is_remote() {
        let remote = remote::open(&sandbox.id, global)?;
        block_on(begin_session(&gate, &sandbox, session_command.purpose))?;
        let command = SandboxCommand {
            environment: option_variables(&session_command.options.env)?,
            directory: session_command.options.workdir.clone(),
            ..SandboxCommand::new(session_command.command.to_vec())
        };
        return match session_command.purpose {
            Purpose::Shell if session_command.interactive => remote::shell(&remote, &command),
            _ => remote::exec(&remote, &command).map_err(with_advice),
        };
    }
    let end = run_in_sandbox(&paths, &gate, &sandbox, session_command)?;
    if let SessionEnd::Abandoned(_) = end {
        output::print_message(&format!("palisade: {NOT_RESPONDING}"));
    }
    Ok(exit_with(end.code()))
}

/// Opens a session, which the gate records; its response names the variables to pass on.
pub async fn begin_session(
    gate: &ControlClient,
    sandbox: &SandboxInfo,
    purpose: Purpose,
) -> Result<Value> {
    let body = json!({ "purpose": purpose });
    Ok(gate.post(&subroute(sandbox, "session"), &body).await?)
}

/// A command to run in a sandbox.
struct SessionCommand<'a> {
    command: &'a [OsString],
    options: &'a CommandOptions,
    purpose: Purpose,
    /// Whether the command is an interactive shell.
    interactive: bool,
    /// Whether to leave the agent's own sandbox on.
    as_is: bool,
    /// Where the command's stdout goes. Its stderr goes to stderr.
    stdout: OutputTarget,
}

/// Runs a command in a sandbox until it ends.
fn run_in_sandbox(
    paths: &Paths,
    gate: &ControlClient,
    sandbox: &SandboxInfo,
    session_command: &SessionCommand<'_>,
) -> Result<SessionEnd> {
    let session = block_on(begin_session(gate, sandbox, session_command.purpose))?;
    let named = session.get("environment").and_then(Value::as_array);
    let named: Vec<&str> = named
        .into_iter()
        .flatten()
        .filter_map(Value::as_str)
        .collect();
    let placeholders = session.get("placeholders").and_then(Value::as_object);
    let placeholders = placeholders.into_iter().flatten();
    let mut environment: Vec<(OsString, OsString)> = placeholders
        .filter_map(|(name, value)| Some((name.into(), value.as_str()?.into())))
        .collect();
    // The operator's variables come last: --env replaces a placeholder.
    environment.extend(operator_environment(&named, &session_command.options.env)?);
    let mut words = session_command.command.to_vec();
    if !session_command.as_is {
        let command = agents::disable_own_sandbox(&words, &environment);
        if let Some(added) = command.added {
            output::print_message(&format!(
                "palisade: started with {added}: turns off the agent's own sandbox (--as-is leaves \
                 it on)"
            ));
        }
        let variable = command.variable;
        environment.extend(variable.map(|(name, value)| (name.into(), value.into())));
        words = command.command;
    }
    let command = SandboxCommand {
        environment,
        directory: session_command.options.workdir.clone(),
        ..SandboxCommand::new(words)
    };
    let terminal = match session_command.stdout {
        OutputTarget::Stdout => relay::terminal_size().filter(|_| !session_command.options.no_tty),
        // A terminal has only one output stream.
        OutputTarget::Stderr => None,
    };
    let backend = backend(paths);
    let started = backend.start(&sandbox.id, &command, terminal)?;
    let id = sandbox.id.clone();
    let options = RelayOptions {
        on_terminal: terminal.is_some(),
        stdout: session_command.stdout,
        is_responding: Arc::new(move || backend.is_responding(&id)),
    };
    let end = relay::relay_session(started, options).map_err(with_advice)?;
    if let SessionEnd::Stopped(_, why) = &end {
        output::print_message(&format!("palisade: the sandbox was stopped: {why}"));
    }
    Ok(end)
}

/// Adds to an error where a program or directory must be in the sandbox: other paths than on the
/// host.
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
    CliError::new(exit_of(&error), format!("{error:#}; {advice}")).into()
}

/// The exit code of the command.
fn exit_with(code: i32) -> CliExit {
    CliExit::Command(u8::try_from(code).unwrap_or(1))
}

/// The backend, for sessions only. The gate creates and removes sandboxes.
pub fn backend(paths: &Paths) -> Namespace {
    Namespace::new(
        paths.state_dir.join("sandboxes"),
        PathBuf::new(),
        Vec::new(),
    )
}

/// The variables of the operator that a command receives: the variables that are always passed on, those in `named`, and
/// those of `--env`.
fn operator_environment(
    named: &[&str],
    env_options: &[String],
) -> Result<Vec<(OsString, OsString)>> {
    let is_passed_on = |name: &str| {
        PASSED_VARIABLES.contains(&name) || name.starts_with("LC_") || named.contains(&name)
    };
    let mut variables: Vec<(OsString, OsString)> = std::env::vars_os()
        .filter(|(name, _)| name.to_str().is_some_and(is_passed_on))
        .collect();
    variables.extend(option_variables(env_options)?);
    Ok(variables)
}

/// The variables of `--env`.
fn option_variables(env_options: &[String]) -> Result<Vec<(OsString, OsString)>> {
    let mut variables = Vec::new();
    for option in env_options {
        let (name, value) = match option.split_once('=') {
            Some((name, value)) => (name, Some(OsString::from(value))),
            None => (option.as_str(), std::env::var_os(option)),
        };
        if name.is_empty() {
            let message = format!(
                "invalid --env '{}': expected NAME=VALUE or NAME",
                output::safe(option)
            );
            return Err(CliError::new(CliExit::Usage, message).into());
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
    fn sandbox_is_named_after_its_command() {
        for (command, stem) in [
            ("/usr/bin/claude", "claude-"),
            ("./a b.sh", "a-b-sh-"),
            ("…", "run-"),
        ] {
            let name = name_from_command(&[command.into()]).unwrap();
            assert!(name.starts_with(stem), "{name}");
            assert_eq!(name.len(), stem.len() + 4);
        }
    }

    #[test]
    fn commit_message_names_the_command_and_is_bounded() {
        let command: Vec<OsString> = ["cargo", "test"].map(Into::into).into();
        assert_eq!(message("run", &command), "run: cargo test");
        assert_eq!(message("run", &["x".repeat(5000).into()]).len(), 205);
    }
}
