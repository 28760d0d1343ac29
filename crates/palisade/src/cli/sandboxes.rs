//! `palisade create|list|pause|resume|delete|snapshot`.

use std::time::Duration;

use anyhow::{Context, Result};
use clap::Args;
use config::section::sandbox::SetupCommand;
use control::body::{CreateBody, PortBody};
use control::client::Client;
use policy::registration::Repo;
use sandbox::create_progress::{CreateStep, ProgressReport};
use sandbox::git::error::GitError;
use sandbox::git::host_repository::HostRepository;
use sandbox::manager::row::PublishedPort;
use sandbox::worker::SnapshotReport;
use serde_json::{Value, json};

use crate::cli::sandbox_lookup::{self, Here, Place};
use crate::cli::{Global, block_on, doctor, ports, repo_limit, summary};
use crate::exit::{Exit, Failure};
use crate::gate::background;
use crate::output::{self, Spinner};

const NOT_HERE: &str =
    "list failed: you do not stand in a git repository; go to one, or leave --here out";

/// What a new sandbox is to be.
#[derive(Clone, Debug, Args)]
pub struct Making {
    /// Repository it may use, with an optional push limit such as owner/name:500MiB (repeatable)
    /// [default: the repository of `origin`, if it is on a git host]
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
    /// Run as root in the sandbox (to install packages: a gate that runs as root, or ids in
    /// /etc/subuid)
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
}

impl Making {
    /// The request for a sandbox of that name.
    fn body(&self, name: String) -> Result<CreateBody> {
        let repository = if self.no_repo {
            None
        } else {
            let here = std::env::current_dir().context("there is no current directory")?;
            if let Err(error @ GitError::NotARepository(_)) = HostRepository::discover(&here) {
                let message = format!("{error}; --no-repo starts with an empty workspace");
                return Err(Failure::new(Exit::Usage, message).into());
            }
            Some(here)
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
        })
    }
}

#[derive(Debug, Args)]
pub struct CreateArgs {
    /// Name of the sandbox; its branch is palisade/NAME
    pub name: String,
    #[command(flatten)]
    pub making: Making,
}

#[derive(Debug, Args)]
pub struct ListArgs {
    /// Only sandboxes of the current repository
    #[arg(long)]
    pub here: bool,
}

/// A command about one sandbox.
#[derive(Debug, Args)]
pub struct NameArgs {
    /// Sandbox name or id
    pub name: String,
}

#[derive(Debug, Args)]
pub struct DeleteArgs {
    /// Sandbox name or id
    pub name: String,
    /// Even if running or unmerged; unmerged work is lost
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

pub fn create(args: &CreateArgs, global: &Global) -> Result<Exit> {
    doctor::require_namespaces(global, args.making.backend.as_deref()).context("create failed")?;
    in_words("create", global, async |gate| {
        let place = make(gate, &args.making, args.name.clone(), global.json).await?;
        let branch = place
            .branch_name
            .as_ref()
            .map(|branch| format!(" on branch {branch}"));
        let line = format!("Created {}{}", place.name, branch.unwrap_or_default());
        Ok((gate.get(&route(&place)).await?, line))
    })
}

/// Requests a sandbox from the gate and waits for it. Shows the progress on a
/// terminal, but for scripts.
pub async fn make(gate: &Client, making: &Making, name: String, for_script: bool) -> Result<Place> {
    let body = json!(making.body(name)?);
    let made = if for_script || !Spinner::is_seen() {
        gate.post("/v1/sandboxes", &body).await
    } else {
        let waiting = Spinner::start("preparing the sandbox");
        let made = gate
            .post_watched("/v1/sandboxes", &body, |progress| {
                if let Ok(reached) = serde_json::from_value(progress.clone()) {
                    waiting.say(words(reached));
                }
            })
            .await;
        waiting.end();
        made
    };
    let place: Place = serde_json::from_value(made?)?;
    for line in place.warnings.iter().chain(&place.notes) {
        output::say(&format!("palisade: {}", output::safe(line)));
    }
    for PublishedPort { host, port } in &place.published {
        output::say(&format!("palisade: {host} leads to port {port} inside"));
    }
    Ok(place)
}

/// How far the making of a sandbox is.
fn words(reached: ProgressReport) -> String {
    let what = match reached.step {
        CreateStep::Checkout => "checking files out",
        CreateStep::History => "packing the history",
        CreateStep::Copy => "copying files",
        CreateStep::Setup => "running the set-up command",
    };
    match reached.total {
        Some(total) => format!("preparing the sandbox: {what}, {} of {total}", reached.done),
        None => format!("preparing the sandbox: {what}"),
    }
}

pub fn list(args: &ListArgs, global: &Global) -> Result<Exit> {
    let paths = global.paths()?;
    block_on(async {
        let gate = background::client(&paths, global.verbose).await?;
        let here = if args.here {
            Some(Here::find().ok_or_else(|| Failure::new(Exit::Usage, NOT_HERE))?)
        } else {
            None
        };
        let Value::Array(mut rows) = gate.get("/v1/sandboxes").await? else {
            anyhow::bail!("the gate's answer is no list");
        };
        if let Some(here) = here {
            rows.retain(|row| {
                let place = serde_json::from_value::<Place>(row.clone());
                place.is_ok_and(|place| place.is_of(&here))
            });
        }
        if global.json {
            output::print_json(&rows)?;
            return Ok(Exit::Ok);
        }
        let places: Vec<Place> = serde_json::from_value(Value::Array(rows))?;
        output::print_line(&table(&places))?;
        Ok(Exit::Ok)
    })
}

fn table(places: &[Place]) -> String {
    if places.is_empty() {
        return "no sandboxes; make one: palisade run -- <agent>".to_owned();
    }
    let row = |place: &Place| {
        let status = match (&place.reason, place.is_elsewhere()) {
            (None, false) => place.status.clone(),
            (Some(reason), false) => format!("{}: {reason}", place.status),
            (None, true) => "managed elsewhere, reachable".to_owned(),
            (Some(reason), true) => format!("managed elsewhere, not reachable: {reason}"),
        };
        let repository = place
            .repository
            .as_ref()
            .map(|path| path.display().to_string());
        vec![
            place.name.to_string(),
            status,
            place.branch_name.clone().unwrap_or_default(),
            repository.unwrap_or_default(),
            age(place.created_at.as_deref()),
            place.id.to_string(),
        ]
    };
    let rows: Vec<Vec<String>> = places.iter().map(row).collect();
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
    rough(past)
}

fn rough(past: Duration) -> String {
    let seconds = past.as_secs();
    match seconds {
        0..60 => format!("{seconds}s"),
        60..3600 => format!("{}m", seconds / 60),
        3600..86_400 => format!("{}h", seconds / 3600),
        _ => format!("{}d", seconds / 86_400),
    }
}

pub fn pause(args: &NameArgs, global: &Global) -> Result<Exit> {
    in_words("pause", global, async |gate| {
        let place = sandbox_lookup::find(gate, &args.name).await?;
        let answer = gate.post(&below(&place, "pause"), &json!({})).await?;
        Ok((answer, format!("Paused {}", place.name)))
    })
}

pub fn resume(args: &NameArgs, global: &Global) -> Result<Exit> {
    in_words("resume", global, async |gate| {
        let place = sandbox_lookup::find(gate, &args.name).await?;
        let answer = gate.post(&below(&place, "resume"), &json!({})).await?;
        Ok((answer, format!("Resumed {}", place.name)))
    })
}

pub fn delete(args: &DeleteArgs, global: &Global) -> Result<Exit> {
    in_words("delete", global, async |gate| {
        let place = sandbox_lookup::find(gate, &args.name).await?;
        let force = if args.force { "?force=true" } else { "" };
        let answer = gate.delete(&format!("{}{force}", route(&place))).await?;
        let tip = answer.get("tip").and_then(Value::as_str);
        if let (Some(branch), Some(tip)) = (&place.branch_name, tip)
            && args.force
            && place.base.as_deref() != Some(tip)
        {
            output::say(&format!(
                "the branch {branch} was at {tip}; to have it again: git branch {branch} {tip}"
            ));
        }
        let kept = answer.get("branch_kept").and_then(Value::as_str);
        if let (Some(branch), Some(why)) = (&place.branch_name, kept) {
            let why = output::safe(why);
            output::say(&format!(
                "palisade: the branch {branch} was not deleted: {why}"
            ));
        }
        Ok((answer, format!("Deleted {}", place.name)))
    })
}

pub fn snapshot(args: &SnapshotArgs, global: &Global) -> Result<Exit> {
    in_words("snapshot", global, async |gate| {
        let place = sandbox_lookup::find(gate, &args.name).await?;
        let report = take_snapshot(gate, &place, &args.message).await?;
        let line = if report.moved {
            let tip = &report.tip;
            format!(
                "Snapshot {} of {}",
                tip.get(..12).unwrap_or(tip),
                place.name
            )
        } else {
            format!("Nothing new in {}", place.name)
        };
        Ok((json!(report), line))
    })
}

/// Commits the workspace, and says on stderr what could not be taken along.
pub async fn take_snapshot(gate: &Client, place: &Place, message: &str) -> Result<SnapshotReport> {
    let waiting = Spinner::start("taking a snapshot");
    let body = json!({ "message": message });
    let report = gate.post(&below(place, "snapshot"), &body).await;
    waiting.end();
    let report: SnapshotReport = serde_json::from_value(report?)?;
    for line in summary::left_behind(&report) {
        output::say(&format!("palisade: {line}"));
    }
    Ok(report)
}

/// The route of a sandbox.
pub fn route(place: &Place) -> String {
    format!("/v1/sandboxes/{}", place.id)
}

/// A route below that of a sandbox.
pub fn below(place: &Place, what: &str) -> String {
    format!("/v1/sandboxes/{}/{what}", place.id)
}

/// Does one thing, and says it in words on stdout, or as JSON.
pub fn in_words(
    action: &str,
    global: &Global,
    work: impl AsyncFnOnce(&Client) -> Result<(Value, String)>,
) -> Result<Exit> {
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
    Ok(Exit::Ok)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn how_far_it_is_is_told_in_numbers() {
        let told = |step, done, total| words(ProgressReport { step, done, total });
        assert_eq!(
            told(CreateStep::Copy, 1200, Some(10_000)),
            "preparing the sandbox: copying files, 1200 of 10000"
        );
        assert_eq!(
            told(CreateStep::Setup, 0, None),
            "preparing the sandbox: running the set-up command"
        );
    }

    #[test]
    fn an_age_is_told_in_its_largest_unit() {
        for (seconds, told) in [
            (0, "0s"),
            (59, "59s"),
            (60, "1m"),
            (7199, "1h"),
            (90_000, "1d"),
        ] {
            assert_eq!(rough(Duration::from_secs(seconds)), told);
        }
    }
}
