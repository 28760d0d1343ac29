//! `palisade create|list|pause|resume|delete|snapshot`.

use std::time::Duration;

use anyhow::{Context, Result};
use clap::Args;
use config::section::sandbox::{SetupCommand, Tier};
use control::body::{CreateBody, PortBody};
use control::client::ControlClient;
use policy::registration::Repo;
use sandbox::create_progress::{CreateStep, ProgressReport};
use sandbox::git::error::GitError;
use sandbox::git::host_repository::HostRepository;
use sandbox::manager::row::PublishedPort;
use sandbox::worker::SnapshotReport;
use serde_json::{Value, json};

use crate::cli::sandbox_lookup::{self, CurrentRepository, SandboxInfo};
use crate::cli::{
    Global, block_on, credentials, doctor, ports, preset_command, repo_limit, summary,
};
use crate::exit::{CliError, CliExit};
use crate::gate::background;
use crate::output::{self, Spinner};

const NOT_IN_REPOSITORY: &str =
    "list failed: the current directory is not in a git repository; change to one, or omit --here";

/// Options of a new sandbox.
#[derive(Clone, Debug, Args)]
pub struct CreateOptions {
    /// Repository that the sandbox may use, with an optional push limit such as
    /// owner/name:500MiB (repeatable) [default: the repository of `origin`, if it is on a git host]
    #[arg(long = "repo", value_name = "OWNER/NAME[:SIZE]", value_parser = repo_limit::read)]
    pub repos: Vec<Repo>,
    /// Identity for git push [default: user]
    #[arg(long, value_name = "MODE", value_parser = ["user", "bot"])]
    pub auth_mode: Option<String>,
    /// Isolation backend [default: sandbox.backend of the configuration]
    #[arg(long, value_parser = ["namespace", "docker", "remote"])]
    pub backend: Option<String>,
    /// Clone depth; full history if omitted
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub depth: Option<u32>,
    /// Include uncommitted changes
    #[arg(long)]
    pub dirty: bool,
    /// Start with an empty workspace instead of the current repository
    #[arg(long, conflicts_with_all = ["depth", "dirty"])]
    pub no_repo: bool,
    /// Run as root in the sandbox. Installing packages also needs a gate that runs as root, or ids
    /// in /etc/subuid
    #[arg(long)]
    pub root: bool,
    /// Allow user namespaces in the sandbox, which Chromium's own sandbox needs
    #[arg(long)]
    pub nested: bool,
    /// Run this shell command once in the new sandbox; if it fails, the sandbox is removed
    /// [default: sandbox.setup_command of the configuration]
    #[arg(long, value_name = "COMMAND")]
    pub setup_command: Option<String>,
    /// Forward 127.0.0.1:HOST to PORT in the sandbox (repeatable)
    #[arg(long, value_name = "HOST:PORT", value_parser = ports::read)]
    pub publish: Vec<PublishedPort>,
    /// Credential that the gate adds to the sandbox's requests (repeatable) [default: those of
    /// credentials.default that have a value]
    #[arg(long = "credential", value_name = "NAME")]
    pub credentials: Vec<String>,
    /// Which hosts it may reach in addition to the configuration: locked (the agent's provider),
    /// balanced (also package registries of the repository's languages, and reads of its git
    /// repository) or open (also reads of every host) [default: sandbox.tier of the configuration]
    #[arg(long, value_parser = Tier::NAMES)]
    pub tier: Option<String>,
    /// Preset whose hosts it may reach, as `palisade preset list` shows (repeatable)
    #[arg(long = "preset", value_name = "NAME", value_parser = preset_command::read)]
    pub presets: Vec<String>,
}

impl CreateOptions {
    /// The request body for a sandbox of that name.
    fn body(&self, name: String) -> Result<CreateBody> {
        let repository = if self.no_repo {
            None
        } else {
            let directory = std::env::current_dir().context("cannot read the current directory")?;
            if let Err(error @ GitError::NotARepository(_)) = HostRepository::discover(&directory) {
                let message = format!(
                    "{error}; change to a repository, or use --no-repo for an empty workspace"
                );
                return Err(CliError::new(CliExit::Usage, message).into());
            }
            Some(directory)
        };
        Ok(CreateBody {
            name,
            repository,
            depth: self.depth,
            dirty: self.dirty,
            repos: (!self.repos.is_empty()).then(|| self.repos.iter().map(|r| json!(r)).collect()),
            auth_mode: self.auth_mode.clone(),
            backend: self.backend.clone(),
            root: self.root,
            nested: self.nested,
            setup_command: self
                .setup_command
                .as_ref()
                .map(|line| SetupCommand::Shell(line.clone()).argv()),
            publish: self
                .publish
                .iter()
                .map(|PublishedPort { host, port }| PortBody {
                    host: *host,
                    port: *port,
                })
                .collect(),
            credentials: (!self.credentials.is_empty()).then(|| self.credentials.clone()),
            tier: self.tier.as_deref().and_then(Tier::parse),
            presets: self.presets.clone(),
        })
    }
}

#[derive(Debug, Args)]
pub struct CreateArgs {
    /// Name of the sandbox; its branch is palisade/NAME
    pub name: String,
    #[command(flatten)]
    pub options: CreateOptions,
}

#[derive(Debug, Args)]
pub struct ListArgs {
    /// Only sandboxes of the current repository
    #[arg(long)]
    pub here: bool,
}

/// Arguments of a command on one sandbox.
#[derive(Debug, Args)]
pub struct NameArgs {
    /// Sandbox name or id
    pub name: String,
}

#[derive(Debug, Args)]
pub struct DeleteArgs {
    /// Sandbox name or id
    pub name: String,
    /// Delete the sandbox even if it is running or has unmerged work, which is then lost
    #[arg(long, short)]
    pub force: bool,
}

#[derive(Debug, Args)]
pub struct SnapshotArgs {
    /// Sandbox name or id
    pub name: String,
    /// Commit message
    #[arg(long, short, default_value = "snapshot")]
    pub message: String,
}

pub fn create(args: &CreateArgs, global: &Global) -> Result<CliExit> {
    doctor::require_namespaces(global, args.options.backend.as_deref()).context("create failed")?;
    run_and_print("create", global, async |gate| {
        let sandbox = create_sandbox(gate, &args.options, args.name.clone(), global.json).await?;
        let branch = sandbox
            .branch_name
            .as_ref()
            .map(|branch| format!(" on branch {branch}"));
        let line = format!("Created {}{}", sandbox.name, branch.unwrap_or_default());
        Ok((gate.get(&route(&sandbox)).await?, line))
    })
}

/// Creates a sandbox through the gate. Shows its progress on a terminal, except for scripts.
pub async fn create_sandbox(
    gate: &ControlClient,
    options: &CreateOptions,
    name: String,
    for_script: bool,
) -> Result<SandboxInfo> {
    let body = json!(options.body(name)?);
    credentials::offer_variables(gate).await?;
    let made = if for_script || !Spinner::is_visible() {
        gate.post("/v1/sandboxes", &body).await
    } else {
        let waiting = Spinner::start("preparing the sandbox");
        let made = gate
            .post_watched("/v1/sandboxes", &body, |progress| {
                if let Ok(report) = serde_json::from_value(progress.clone()) {
                    waiting.set_message(progress_text(report));
                }
            })
            .await;
        waiting.end();
        made
    };
    let sandbox: SandboxInfo = serde_json::from_value(made?)?;
    for line in sandbox.warnings.iter().chain(&sandbox.notes) {
        output::print_message(&format!("palisade: {}", output::safe(line)));
    }
    if let Some(line) = &sandbox.egress {
        output::print_message(&format!("palisade: {}", output::safe(line)));
    }
    for PublishedPort { host, port } in &sandbox.published {
        output::print_message(&format!("palisade: port {port} is published on {host}"));
    }
    Ok(sandbox)
}

/// The progress of a creation as text.
fn progress_text(report: ProgressReport) -> String {
    let step = match report.step {
        CreateStep::Checkout => "checking files out",
        CreateStep::History => "packing the history",
        CreateStep::Copy => "copying files",
        CreateStep::Setup => "running the set-up command",
    };
    match report.total {
        Some(total) => format!("preparing the sandbox: {step}, {} of {total}", report.done),
        None => format!("preparing the sandbox: {step}"),
    }
}

pub fn list(args: &ListArgs, global: &Global) -> Result<CliExit> {
    let paths = global.paths()?;
    block_on(async {
        let gate = background::client(&paths, global.verbose).await?;
        let current = if args.here {
            Some(
                CurrentRepository::find()
                    .ok_or_else(|| CliError::new(CliExit::Usage, NOT_IN_REPOSITORY))?,
            )
        } else {
            None
        };
        let Value::Array(mut rows) = gate.get("/v1/sandboxes").await? else {
            anyhow::bail!("unexpected response of the gate: not a list");
        };
        if let Some(current) = current {
            rows.retain(|row| {
                let sandbox = serde_json::from_value::<SandboxInfo>(row.clone());
                sandbox.is_ok_and(|sandbox| sandbox.belongs_to(&current))
            });
        }
        if global.json {
            output::print_json(&rows)?;
            return Ok(CliExit::Ok);
        }
        let sandboxes: Vec<SandboxInfo> = serde_json::from_value(Value::Array(rows))?;
        output::print_line(&table(&sandboxes))?;
        Ok(CliExit::Ok)
    })
}

fn table(sandboxes: &[SandboxInfo]) -> String {
    if sandboxes.is_empty() {
        return "no sandboxes; create one: palisade run -- <agent>".to_owned();
    }
    let row = |sandbox: &SandboxInfo| {
        let status = match (&sandbox.reason, sandbox.is_remote()) {
            (None, false) => sandbox.status.clone(),
            (Some(reason), false) => format!("{}: {reason}", sandbox.status),
            (None, true) => "managed elsewhere, reachable".to_owned(),
            (Some(reason), true) => format!("managed elsewhere, not reachable: {reason}"),
        };
        let repository = sandbox
            .repository
            .as_ref()
            .map(|path| path.display().to_string());
        vec![
            sandbox.name.to_string(),
            status,
            sandbox.branch_name.clone().unwrap_or_default(),
            repository.unwrap_or_default(),
            age(sandbox.created_at.as_deref()),
            sandbox.id.to_string(),
        ]
    };
    let rows: Vec<Vec<String>> = sandboxes.iter().map(row).collect();
    output::table(
        &["NAME", "STATUS", "BRANCH", "REPOSITORY", "AGE", "ID"],
        &rows,
    )
}

fn age(created: Option<&str>) -> String {
    let Some(created) = created.and_then(|text| text.parse::<jiff::Timestamp>().ok()) else {
        return String::new();
    };
    let past = jiff::Timestamp::now()
        .duration_since(created)
        .unsigned_abs();
    age_text(past)
}

fn age_text(past: Duration) -> String {
    let seconds = past.as_secs();
    match seconds {
        0..60 => format!("{seconds}s"),
        60..3600 => format!("{}m", seconds / 60),
        3600..86_400 => format!("{}h", seconds / 3600),
        _ => format!("{}d", seconds / 86_400),
    }
}

pub fn pause(args: &NameArgs, global: &Global) -> Result<CliExit> {
    run_and_print("pause", global, async |gate| {
        let sandbox = sandbox_lookup::find(gate, &args.name).await?;
        let answer = gate.post(&subroute(&sandbox, "pause"), &json!({})).await?;
        Ok((answer, format!("Paused {}", sandbox.name)))
    })
}

pub fn resume(args: &NameArgs, global: &Global) -> Result<CliExit> {
    run_and_print("resume", global, async |gate| {
        let sandbox = sandbox_lookup::find(gate, &args.name).await?;
        let answer = gate.post(&subroute(&sandbox, "resume"), &json!({})).await?;
        Ok((answer, format!("Resumed {}", sandbox.name)))
    })
}

pub fn delete(args: &DeleteArgs, global: &Global) -> Result<CliExit> {
    run_and_print("delete", global, async |gate| {
        let sandbox = sandbox_lookup::find(gate, &args.name).await?;
        let force = if args.force { "?force=true" } else { "" };
        let answer = gate.delete(&format!("{}{force}", route(&sandbox))).await?;
        let tip = answer.get("tip").and_then(Value::as_str);
        if let (Some(branch), Some(tip)) = (&sandbox.branch_name, tip)
            && args.force
            && sandbox.base.as_deref() != Some(tip)
        {
            output::print_message(&format!(
                "deleted branch {branch}; undo: git branch {branch} {tip}"
            ));
        }
        let kept = answer.get("branch_kept").and_then(Value::as_str);
        if let (Some(branch), Some(why)) = (&sandbox.branch_name, kept) {
            let why = output::safe(why);
            output::print_message(&format!(
                "palisade: the branch {branch} was not deleted: {why}"
            ));
        }
        Ok((answer, format!("Deleted {}", sandbox.name)))
    })
}

pub fn snapshot(args: &SnapshotArgs, global: &Global) -> Result<CliExit> {
    run_and_print("snapshot", global, async |gate| {
        let sandbox = sandbox_lookup::find(gate, &args.name).await?;
        let report = take_snapshot(gate, &sandbox, &args.message).await?;
        let line = if report.moved {
            let tip = &report.tip;
            format!(
                "Snapshot {} of {}",
                tip.get(..12).unwrap_or(tip),
                sandbox.name
            )
        } else {
            format!("Nothing new in {}", sandbox.name)
        };
        Ok((json!(report), line))
    })
}

/// Commits the workspace, and prints the skipped paths on stderr.
pub async fn take_snapshot(
    gate: &ControlClient,
    sandbox: &SandboxInfo,
    message: &str,
) -> Result<SnapshotReport> {
    let waiting = Spinner::start("taking a snapshot");
    let body = json!({ "message": message });
    let report = gate.post(&subroute(sandbox, "snapshot"), &body).await;
    waiting.end();
    let report: SnapshotReport = serde_json::from_value(report?)?;
    for line in summary::skipped_lines(&report) {
        output::print_message(&format!("palisade: {line}"));
    }
    Ok(report)
}

/// The route of a sandbox.
pub fn route(sandbox: &SandboxInfo) -> String {
    format!("/v1/sandboxes/{}", sandbox.id)
}

/// A route below the route of a sandbox.
pub fn subroute(sandbox: &SandboxInfo, what: &str) -> String {
    format!("/v1/sandboxes/{}/{what}", sandbox.id)
}

/// Runs an action with the gate, and prints its result on stdout as text or as JSON.
pub fn run_and_print(
    action: &str,
    global: &Global,
    work: impl AsyncFnOnce(&ControlClient) -> Result<(Value, String)>,
) -> Result<CliExit> {
    let paths = global.paths()?;
    let done = block_on(async {
        let gate = background::client(&paths, global.verbose).await?;
        work(&gate).await
    });
    let (value, lines) = done.with_context(|| format!("{action} failed"))?;
    if global.json {
        output::print_json(&value)?;
    } else {
        for line in lines.lines() {
            output::print_line(&output::safe(line))?;
        }
    }
    Ok(CliExit::Ok)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn progress_is_shown_with_counts() {
        let text = |step, done, total| progress_text(ProgressReport { step, done, total });
        assert_eq!(
            text(CreateStep::Copy, 1200, Some(10_000)),
            "preparing the sandbox: copying files, 1200 of 10000"
        );
        assert_eq!(
            text(CreateStep::Setup, 0, None),
            "preparing the sandbox: running the set-up command"
        );
    }

    #[test]
    fn age_is_shown_in_its_largest_unit() {
        for (seconds, text) in [
            (0, "0s"),
            (59, "59s"),
            (60, "1m"),
            (7199, "1h"),
            (90_000, "1d"),
        ] {
            assert_eq!(age_text(Duration::from_secs(seconds)), text);
        }
    }
}
