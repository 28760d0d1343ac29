//! `palisade diff|log|merge|apply|checkout`: reviews and merges the branch of a sandbox.
//!
//! These commands read the operator's repository in this process, which holds no keys.

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

use crate::cli::sandbox_lookup::{self, CurrentRepository, SandboxInfo};
use crate::cli::sandboxes::take_snapshot;
use crate::cli::summary::{count, count_lines, letter};
use crate::cli::{Global, block_on, confirm, remote};
use crate::exit::{CliError, CliExit};
use crate::gate::background;
use crate::output;

/// Maximum size of a patch that is shown.
const MAX_PATCH: usize = 64 << 20;

#[derive(Debug, Args)]
pub struct DiffArgs {
    /// Sandbox name
    pub name: String,
    /// List changed files with line counts
    #[arg(long)]
    pub stat: bool,
    #[command(flatten)]
    pub snapshot: SnapshotOption,
}

#[derive(Debug, Args)]
pub struct LogArgs {
    /// Sandbox name
    pub name: String,
    /// Maximum number of commits
    #[arg(long, short = 'n', default_value_t = 100)]
    pub lines: usize,
    #[command(flatten)]
    pub snapshot: SnapshotOption,
}

#[derive(Debug, Args)]
pub struct MergeArgs {
    /// Sandbox name
    pub name: String,
    /// Refuse unless the merge is a fast-forward
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
    pub options: MergeOptions,
}

#[derive(Debug, Args)]
pub struct ApplyArgs {
    /// Sandbox name
    pub name: String,
    #[command(flatten)]
    pub options: MergeOptions,
}

/// Options of commands that write to the operator's worktree.
#[derive(Debug, Args)]
pub struct MergeOptions {
    /// Accept files that execute or configure tools on this machine without asking
    #[arg(long, short)]
    pub yes: bool,
    #[command(flatten)]
    pub snapshot: SnapshotOption,
}

/// Whether to commit the workspace first.
#[derive(Debug, Args)]
pub struct SnapshotOption {
    /// Use the last snapshot instead of taking one now
    #[arg(long)]
    pub no_snapshot: bool,
}

/// The branch of a sandbox, and its repository.
struct SandboxBranch {
    repository: HostRepository,
    slug: Slug,
}

impl SandboxBranch {
    /// Finds the branch and commits the workspace to it first. The branch of a deleted sandbox
    /// is found, too.
    fn find(name: &str, snapshot: &SnapshotOption, global: &Global) -> Result<Self> {
        let paths = global.paths()?;
        let found: Result<Option<SandboxInfo>> = block_on(async {
            let gate = background::client(&paths, global.verbose).await?;
            let sandbox = match sandbox_lookup::find(&gate, name).await {
                Err(error) if crate::exit::exit_of(&error) == CliExit::NotFound => return Ok(None),
                other => other?,
            };
            if sandbox.repository.is_some() && !snapshot.no_snapshot {
                take_snapshot(&gate, &sandbox, "snapshot").await?;
            }
            Ok(Some(sandbox))
        });
        let sandbox = found?;
        if sandbox.as_ref().is_some_and(SandboxInfo::is_remote) {
            return Err(CliError::new(CliExit::Exists, remote::NO_BRANCH).into());
        }
        let slug = match &sandbox {
            Some(sandbox) => sandbox.name.clone(),
            None => Slug::from_name(name)
                .map_err(|error| CliError::new(CliExit::Usage, error.to_string()))?,
        };
        // The current worktree is used if it belongs to the sandbox's repository. Otherwise another
        // repository's branch of the same name could be used.
        let is_other_repository = |sandbox: &SandboxInfo| {
            CurrentRepository::find().is_none_or(|current| !sandbox.belongs_to(&current))
        };
        let repository = match &sandbox {
            Some(sandbox) if is_other_repository(sandbox) => sandbox.host_repository()?,
            Some(_) => sandbox_lookup::current_repository(),
            None => sandbox_lookup::current_repository()
                .filter(|repository| repository.tip(&slug).is_ok()),
        };
        let repository = match repository {
            Some(repository) => repository,
            None => {
                let message = sandbox::contract::SandboxError::NotFound(name.to_owned());
                return Err(CliError::new(CliExit::NotFound, message.to_string()).into());
            }
        };
        repository.tip(&slug)?;
        Ok(Self { repository, slug })
    }
}

pub fn diff(args: &DiffArgs, global: &Global) -> Result<CliExit> {
    let branch = SandboxBranch::find(&args.name, &args.snapshot, global).context("diff failed")?;
    let max_patch = if args.stat { 0 } else { MAX_PATCH };
    let changes = branch
        .repository
        .diff(&branch.slug, max_patch)
        .context("diff failed")?;
    if global.json {
        output::print_json(&diff_json(&changes))?;
    } else if args.stat {
        output::print_line(&stat(&changes))?;
    } else {
        print_patch(&changes.patch)?;
        if changes.truncated {
            output::print_message(
                "palisade: the patch is truncated; for the whole patch: git diff",
            );
        }
    }
    Ok(CliExit::Ok)
}

fn diff_json(changes: &BranchDiff) -> Value {
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
        .map(|path| json!({ "path": String::from_utf8_lossy(&path.path), "why": path.why }))
        .collect();
    json!({
        "base": changes.base.to_string(),
        "tip": changes.tip.to_string(),
        "files": changes.files.iter().map(file).collect::<Vec<_>>(),
        "steering": steering,
        "patch": String::from_utf8_lossy(&changes.patch),
        "cut": changes.truncated,
    })
}

fn stat(changes: &BranchDiff) -> String {
    let (added, removed) = count_lines(changes);
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

/// Prints a patch: coloured and escaped on a terminal, unchanged otherwise.
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
        // Tabs are harmless and kept for indentation.
        let line: Vec<String> = line.split('\t').map(output::safe).collect();
        output::print_line(&format!("{colour}{}\x1b[0m", line.join("\t")))?;
    }
    Ok(())
}

pub fn log(args: &LogArgs, global: &Global) -> Result<CliExit> {
    let branch = SandboxBranch::find(&args.name, &args.snapshot, global).context("log failed")?;
    let entries = branch
        .repository
        .log(&branch.slug, args.lines)
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
        return Ok(CliExit::Ok);
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
    Ok(CliExit::Ok)
}

pub fn merge(args: &MergeArgs, global: &Global) -> Result<CliExit> {
    let strategy = match (args.ff_only, args.no_ff, args.squash) {
        (true, _, _) => MergeMode::FastForward,
        (_, true, _) => MergeMode::Merge,
        (_, _, true) => MergeMode::Squash,
        _ => MergeMode::Auto,
    };
    let done = confirm_and_merge(&args.name, &args.options, global, |branch| {
        Ok(branch
            .repository
            .merge(&branch.slug, strategy, args.message.as_deref())?)
    });
    let (branch, merged) = done.context("merge failed")?;
    let line = if merged.moved {
        let id = merged.commit.to_string();
        format!(
            "Merged {}: {} changed, now at {}",
            branch.slug,
            count(merged.paths.len(), "file"),
            id.get(..12).unwrap_or(&id)
        )
    } else {
        format!("Nothing to merge from {}", branch.slug)
    };
    report(&merged, &line, global)
}

pub fn apply(args: &ApplyArgs, global: &Global) -> Result<CliExit> {
    let done = confirm_and_merge(&args.name, &args.options, global, |branch| {
        Ok(branch.repository.apply(&branch.slug)?)
    });
    let (branch, merged) = done.context("apply failed")?;
    let line = format!(
        "Applied {} to your worktree: {} changed",
        branch.slug,
        count(merged.paths.len(), "file")
    );
    report(&merged, &line, global)
}

pub fn checkout(args: &ApplyArgs, global: &Global) -> Result<CliExit> {
    let switch = || -> Result<CheckoutOutcome> {
        let branch = SandboxBranch::find(&args.name, &args.options.snapshot, global)?;
        confirm_sensitive_paths(
            &branch.repository.checkout_sensitive_paths(&branch.slug)?,
            args.options.yes,
        )?;
        Ok(branch.repository.checkout(&branch.slug)?)
    };
    let switched = switch().context("checkout failed")?;
    let commit = switched.commit.to_string();
    if global.json {
        output::print_json(&json!({ "branch": switched.branch, "commit": commit }))?;
    } else {
        let files = count(switched.paths.len(), "file");
        output::print_line(&format!("On {}: {files} changed", switched.branch))?;
    }
    Ok(CliExit::Ok)
}

fn report(merged: &MergeOutcome, line: &str, global: &Global) -> Result<CliExit> {
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
    Ok(CliExit::Ok)
}

/// Merges a branch, after confirmation of files that execute or configure tools on this
/// machine.
fn confirm_and_merge(
    name: &str,
    options: &MergeOptions,
    global: &Global,
    merge: impl FnOnce(&SandboxBranch) -> Result<MergeOutcome>,
) -> Result<(SandboxBranch, MergeOutcome)> {
    let branch = SandboxBranch::find(name, &options.snapshot, global)?;
    confirm_sensitive_paths(
        &branch.repository.diff(&branch.slug, 0)?.sensitive_paths(),
        options.yes,
    )?;
    let merged = merge(&branch)?;
    Ok((branch, merged))
}

fn confirm_sensitive_paths(paths: &[SensitivePath], yes: bool) -> Result<()> {
    if paths.is_empty() {
        return Ok(());
    }
    output::print_message("These files execute or configure tools on your machine:");
    for sensitive in paths {
        let path = String::from_utf8_lossy(&sensitive.path);
        output::print_message(&format!("  {}  {}", output::safe(&path), sensitive.why));
    }
    confirm("Accept these files?", yes)
}
