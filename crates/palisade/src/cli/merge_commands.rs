//! `palisade diff|log|merge|apply|checkout`: an agent's work on its way home.
//!
//! Everything here reads the operator's repository from this process, which holds no key.

use std::io::IsTerminal;

use anyhow::{Context, Result};
use clap::Args;
use sandbox::git::branch_checkout::CheckoutOutcome;
use sandbox::git::diff::{BranchDiff, FileDiff};
use sandbox::git::host_repository::HostRepository;
use sandbox::git::merge::{MergeMode, MergeOutcome};
use sandbox::git::sensitive_paths::SensitivePath;
use sandbox::name::Slug;
use serde_json::{Value, json};

use crate::cli::sandbox_lookup::{self, Here, Place};
use crate::cli::sandboxes::take_snapshot;
use crate::cli::summary::{count, letter, lines_of};
use crate::cli::{Global, block_on, confirm, remote};
use crate::exit::{Exit, Failure};
use crate::gate::background;
use crate::output;

/// The most of a patch that is shown.
const LONGEST_PATCH: usize = 64 << 20;

#[derive(Debug, Args)]
pub struct DiffArgs {
    /// Sandbox name
    pub name: String,
    /// List changed files with line counts
    #[arg(long)]
    pub stat: bool,
    #[command(flatten)]
    pub fresh: Fresh,
}

#[derive(Debug, Args)]
pub struct LogArgs {
    /// Sandbox name
    pub name: String,
    /// Maximum number of commits
    #[arg(long, short = 'n', default_value_t = 100)]
    pub lines: usize,
    #[command(flatten)]
    pub fresh: Fresh,
}

#[derive(Debug, Args)]
pub struct MergeArgs {
    /// Sandbox name
    pub name: String,
    /// Refuse unless it is a fast-forward
    #[arg(long, group = "strategy")]
    pub ff_only: bool,
    /// Always create a merge commit
    #[arg(long, group = "strategy")]
    pub no_ff: bool,
    /// Squash everything into one commit
    #[arg(long, group = "strategy")]
    pub squash: bool,
    /// Commit message
    #[arg(long, short)]
    pub message: Option<String>,
    #[command(flatten)]
    pub landing: Landing,
}

#[derive(Debug, Args)]
pub struct ApplyArgs {
    /// Sandbox name
    pub name: String,
    #[command(flatten)]
    pub landing: Landing,
}

/// What lands on the operator's machine.
#[derive(Debug, Args)]
pub struct Landing {
    /// Accept files that execute or configure tools on this machine without asking
    #[arg(long, short)]
    pub yes: bool,
    #[command(flatten)]
    pub fresh: Fresh,
}

/// Which state of the workspace.
#[derive(Debug, Args)]
pub struct Fresh {
    /// Use the last snapshot instead of taking one now
    #[arg(long)]
    pub no_snapshot: bool,
}

/// A branch of a sandbox, and the repository it is in.
struct Work {
    home: HostRepository,
    slug: Slug,
}

impl Work {
    /// Finds the branch, and has the workspace's present state committed to it first. A
    /// branch whose sandbox is gone is still there to be brought home.
    fn find(name: &str, fresh: &Fresh, global: &Global) -> Result<Self> {
        let paths = global.paths()?;
        let found: Result<Option<Place>> = block_on(async {
            let gate = background::client(&paths, global.verbose).await?;
            let place = match sandbox_lookup::find(&gate, name).await {
                Err(error) if crate::exit::exit_of(&error) == Exit::NotFound => return Ok(None),
                other => other?,
            };
            if place.repository.is_some() && !fresh.no_snapshot {
                take_snapshot(&gate, &place, "snapshot").await?;
            }
            Ok(Some(place))
        });
        let place = found?;
        if place.as_ref().is_some_and(Place::is_elsewhere) {
            return Err(Failure::new(Exit::Exists, remote::NO_BRANCH).into());
        }
        let slug = match &place {
            Some(place) => place.name.clone(),
            None => Slug::from_name(name)
                .map_err(|error| Failure::new(Exit::Usage, error.to_string()))?,
        };
        // In the worktree we stand in, if it is one of the repository's. Another one may have
        // a branch of that name as well.
        let elsewhere = |place: &Place| Here::find().is_none_or(|here| !place.is_of(&here));
        let home = match &place {
            Some(place) if elsewhere(place) => place.home()?,
            Some(_) => sandbox_lookup::here(),
            None => sandbox_lookup::here().filter(|home| home.tip(&slug).is_ok()),
        };
        let home = match home {
            Some(home) => home,
            None => {
                let message = sandbox::contract::SandboxError::NotFound(name.to_owned());
                return Err(Failure::new(Exit::NotFound, message.to_string()).into());
            }
        };
        home.tip(&slug)?;
        Ok(Self { home, slug })
    }
}

pub fn diff(args: &DiffArgs, global: &Global) -> Result<Exit> {
    let work = Work::find(&args.name, &args.fresh, global).context("diff failed")?;
    let most = if args.stat { 0 } else { LONGEST_PATCH };
    let changes = work.home.diff(&work.slug, most).context("diff failed")?;
    if global.json {
        output::print_json(&shown(&changes))?;
    } else if args.stat {
        output::print_line(&stat(&changes))?;
    } else {
        print_patch(&changes.patch)?;
        if changes.cut {
            output::say("palisade: the patch is longer than what is shown; see it with git diff");
        }
    }
    Ok(Exit::Ok)
}

fn shown(changes: &BranchDiff) -> Value {
    let file = |file: &FileDiff| {
        json!({
            "path": String::from_utf8_lossy(&file.path),
            "renamed_from": file.renamed_from.as_deref().map(String::from_utf8_lossy),
            "kind": letter(file.kind).to_string(),
            "mode_changed": file.mode_changed,
            "added": file.added,
            "removed": file.removed,
            "binary": file.binary,
        })
    };
    let steering: Vec<Value> = changes
        .sensitive_paths()
        .iter()
        .map(|one| json!({ "path": String::from_utf8_lossy(&one.path), "why": one.why }))
        .collect();
    json!({
        "base": changes.base.to_string(),
        "tip": changes.tip.to_string(),
        "files": changes.files.iter().map(file).collect::<Vec<_>>(),
        "steering": steering,
        "patch": String::from_utf8_lossy(&changes.patch),
        "cut": changes.cut,
    })
}

fn stat(changes: &BranchDiff) -> String {
    let (added, removed) = lines_of(changes);
    let mut lines: Vec<String> = changes
        .files
        .iter()
        .map(|file| {
            let path = output::safe(&String::from_utf8_lossy(&file.path));
            let size = if file.binary {
                "binary".to_owned()
            } else {
                format!("+{} -{}", file.added, file.removed)
            };
            format!("{} {path}  {size}", letter(file.kind))
        })
        .collect();
    let files = count(changes.files.len(), "file");
    lines.push(format!("{files} changed, +{added} -{removed}"));
    lines.join("\n")
}

/// For a terminal in colour and harmless, for a pipe byte for byte.
fn print_patch(patch: &[u8]) -> Result<()> {
    if !std::io::stdout().is_terminal() {
        return output::write_out(patch);
    }
    for line in String::from_utf8_lossy(patch).lines() {
        let colour = match line.as_bytes() {
            [b'+', ..] => "\x1b[32m",
            [b'-', ..] => "\x1b[31m",
            [b'@', ..] => "\x1b[36m",
            [b'd', b'i', b'f', b'f', ..] => "\x1b[1m",
            _ => "",
        };
        // Tabs are no danger and hold code together.
        let line: Vec<String> = line.split('\t').map(output::safe).collect();
        output::print_line(&format!("{colour}{}\x1b[0m", line.join("\t")))?;
    }
    Ok(())
}

pub fn log(args: &LogArgs, global: &Global) -> Result<Exit> {
    let work = Work::find(&args.name, &args.fresh, global).context("log failed")?;
    let entries = work
        .home
        .log(&work.slug, args.lines)
        .context("log failed")?;
    if global.json {
        let rows: Vec<Value> = entries
            .iter()
            .map(|entry| {
                json!({
                    "commit": entry.id.to_string(),
                    "parents": entry.parents.iter().map(ToString::to_string).collect::<Vec<_>>(),
                    "author": entry.author,
                    "time": entry.time,
                    "subject": entry.subject,
                })
            })
            .collect();
        output::print_json(&rows)?;
        return Ok(Exit::Ok);
    }
    for entry in entries {
        let time = jiff::Timestamp::from_second(entry.time)
            .map_or_else(|_| entry.time.to_string(), |time| time.to_string());
        let id = entry.id.to_string();
        output::print_line(&output::safe(&format!(
            "{}  {time}  {}  {}",
            id.get(..12).unwrap_or(&id),
            entry.author,
            entry.subject
        )))?;
    }
    Ok(Exit::Ok)
}

pub fn merge(args: &MergeArgs, global: &Global) -> Result<Exit> {
    let strategy = match (args.ff_only, args.no_ff, args.squash) {
        (true, _, _) => MergeMode::FastForward,
        (_, true, _) => MergeMode::Merge,
        (_, _, true) => MergeMode::Squash,
        _ => MergeMode::Auto,
    };
    let done = land(&args.name, &args.landing, global, |work| {
        Ok(work
            .home
            .merge(&work.slug, strategy, args.message.as_deref())?)
    });
    let (work, merged) = done.context("merge failed")?;
    let line = if merged.moved {
        let id = merged.commit.to_string();
        format!(
            "Merged {}: {} changed, now at {}",
            work.slug,
            count(merged.paths.len(), "file"),
            id.get(..12).unwrap_or(&id)
        )
    } else {
        format!("Nothing to merge from {}", work.slug)
    };
    tell(&merged, &line, global)
}

pub fn apply(args: &ApplyArgs, global: &Global) -> Result<Exit> {
    let done = land(&args.name, &args.landing, global, |work| {
        Ok(work.home.apply(&work.slug)?)
    });
    let (work, merged) = done.context("apply failed")?;
    let line = format!(
        "Applied {} to your worktree: {} changed",
        work.slug,
        count(merged.paths.len(), "file")
    );
    tell(&merged, &line, global)
}

pub fn checkout(args: &ApplyArgs, global: &Global) -> Result<Exit> {
    let switch = || -> Result<CheckoutOutcome> {
        let work = Work::find(&args.name, &args.landing.fresh, global)?;
        agree_to(
            &work.home.checkout_sensitive_paths(&work.slug)?,
            args.landing.yes,
        )?;
        Ok(work.home.checkout(&work.slug)?)
    };
    let switched = switch().context("checkout failed")?;
    let commit = switched.commit.to_string();
    if global.json {
        output::print_json(&json!({ "branch": switched.branch, "commit": commit }))?;
    } else {
        let files = count(switched.paths.len(), "file");
        output::print_line(&format!("On {}: {files} changed", switched.branch))?;
    }
    Ok(Exit::Ok)
}

fn tell(merged: &MergeOutcome, line: &str, global: &Global) -> Result<Exit> {
    if global.json {
        let paths: Vec<_> = merged
            .paths
            .iter()
            .map(|path| String::from_utf8_lossy(path))
            .collect();
        output::print_json(&json!({
            "commit": merged.commit.to_string(), "moved": merged.moved, "paths": paths,
        }))?;
    } else {
        output::print_line(line)?;
    }
    Ok(Exit::Ok)
}

/// Brings work home, after a yes for what would run or steer something here.
fn land(
    name: &str,
    landing: &Landing,
    global: &Global,
    bring: impl FnOnce(&Work) -> Result<MergeOutcome>,
) -> Result<(Work, MergeOutcome)> {
    let work = Work::find(name, &landing.fresh, global)?;
    agree_to(
        &work.home.diff(&work.slug, 0)?.sensitive_paths(),
        landing.yes,
    )?;
    let merged = bring(&work)?;
    Ok((work, merged))
}

fn agree_to(steering: &[SensitivePath], yes: bool) -> Result<()> {
    if steering.is_empty() {
        return Ok(());
    }
    output::say("These files run or steer tools on your machine:");
    for one in steering {
        let path = String::from_utf8_lossy(&one.path);
        output::say(&format!("  {}  {}", output::safe(&path), one.why));
    }
    confirm("Take them, too?", yes)
}
