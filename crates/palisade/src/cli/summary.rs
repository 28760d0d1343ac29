//! The summary of `run`: result, hosts reached, requests refused.

use anyhow::Result;
use control::client::ControlClient;
use sandbox::git::diff::{BranchDiff, ChangeKind};
use sandbox::git::host_repository::HostRepository;
use sandbox::worker::SnapshotReport;

use crate::cli::outcome::{Connections, HostCount};
use crate::cli::sandbox_lookup::SandboxInfo;
use crate::output;

/// Maximum number of files and hosts that are listed; the others are counted.
const MAX_SHOWN: usize = 10;

/// Maximum number of skipped paths that are listed.
const MAX_SKIPPED_SHOWN: usize = 5;

/// Prints the summary on stderr, and returns whether the branch has commits to merge.
pub async fn print_summary(
    gate: &ControlClient,
    sandbox: &SandboxInfo,
    report: Option<&SnapshotReport>,
    since: jiff::Timestamp,
) -> Result<bool> {
    let mut lines = Vec::new();
    let mut has_commits = false;
    if let (Some(repository), Some(_)) = (sandbox.host_repository()?, report) {
        let (changes, has_changes) = changes(&repository, sandbox)?;
        lines.extend(changes);
        has_commits = has_changes;
    }
    lines.extend(traffic(gate, sandbox, since).await?);
    let name = &sandbox.name;
    if has_commits {
        let program = output::program_name();
        lines.push(format!(
            "next: {program} diff {name} · {program} merge {name} · {program} delete {name}"
        ));
    }
    for line in lines {
        output::print_message(&format!("palisade: {line}"));
    }
    Ok(has_commits)
}

/// Lines about paths that a snapshot skipped: the first few, and the number of others.
pub fn skipped_lines(report: &SnapshotReport) -> Vec<String> {
    let mut lines: Vec<String> = report
        .skipped
        .iter()
        .take(MAX_SKIPPED_SHOWN)
        .map(|skipped| {
            let (path, why) = (output::safe(&skipped.path), output::safe(&skipped.why));
            format!("left out {path}: {why}")
        })
        .collect();
    let more = report.left_out.saturating_sub(lines.len() as u64);
    if more > 0 {
        lines.push(format!("and {more} more left out"));
    }
    if let Some(error) = &report.import_error {
        lines.push(output::safe(error));
    }
    if report.stray_count > 0 {
        let named = report.strays.iter().take(MAX_SKIPPED_SHOWN);
        let named: Vec<String> = named.map(|stray| output::safe(stray)).collect();
        let more = report.stray_count.saturating_sub(named.len() as u64);
        let more = match more {
            0 => String::new(),
            more => format!(" and {more} more"),
        };
        lines.push(format!(
            "commits only in the workspace's repository: {}{more}; to include these commits, merge them \
             in the workspace",
            named.join(", ")
        ));
    }
    lines
}

fn changes(repository: &HostRepository, sandbox: &SandboxInfo) -> Result<(Vec<String>, bool)> {
    let changes = repository.diff(&sandbox.name, 0)?;
    let commits = repository.log(&sandbox.name, usize::MAX)?.len();
    if commits == 0 {
        return Ok((vec!["nothing was changed".to_owned()], false));
    }
    let (added, removed) = count_lines(&changes);
    let branch = sandbox.branch_name.clone().unwrap_or_default();
    let mut lines = vec![format!(
        "{} on {branch}: {} changed, +{added} -{removed}",
        count(commits, "commit"),
        count(changes.files.len(), "file"),
    )];
    lines.extend(changes.files.iter().take(MAX_SHOWN).map(|file| {
        let path = String::from_utf8_lossy(&file.path);
        format!("  {} {}", letter(file.kind), output::safe(&path))
    }));
    if changes.files.len() > MAX_SHOWN {
        lines.push(format!("  and {} more", changes.files.len() - MAX_SHOWN));
    }
    Ok((lines, true))
}

/// Number of added and removed lines.
pub fn count_lines(changes: &BranchDiff) -> (usize, usize) {
    changes.files.iter().fold((0, 0), |(added, removed), file| {
        (added + file.added, removed + file.removed)
    })
}

/// The letter of a change in git's short status.
pub fn letter(kind: ChangeKind) -> char {
    match kind {
        ChangeKind::Added => 'A',
        ChangeKind::Deleted => 'D',
        ChangeKind::Modified => 'M',
        ChangeKind::Renamed => 'R',
    }
}

/// A number with its noun.
pub fn count(number: usize, noun: &str) -> String {
    if number == 1 {
        format!("1 {noun}")
    } else {
        format!("{number} {noun}s")
    }
}

/// Lines about hosts that were reached, refused or failed.
async fn traffic(
    gate: &ControlClient,
    sandbox: &SandboxInfo,
    since: jiff::Timestamp,
) -> Result<Vec<String>> {
    let Connections {
        reached,
        refused,
        failed,
    } = Connections::read(gate, sandbox, since).await?;
    let mut lines = Vec::new();
    for (word, hosts) in [
        ("reached", reached),
        ("refused", refused),
        ("failed", failed),
    ] {
        if hosts.is_empty() {
            continue;
        }
        let named = hosts.iter().take(MAX_SHOWN).map(
            |HostCount {
                 host, port, count, ..
             }| {
                let port = port.map_or_else(String::new, |port| format!(":{port}"));
                format!("{}{port} ({count}×)", output::safe(host))
            },
        );
        let named: Vec<String> = named.collect();
        let more = hosts.len().saturating_sub(MAX_SHOWN);
        let more = if more > 0 {
            format!(" and {more} more")
        } else {
            String::new()
        };
        lines.push(format!("{word}: {}{more}", named.join(", ")));
        let allow = hosts
            .iter()
            .take(MAX_SHOWN)
            .filter_map(|host| host.allow.as_ref());
        lines.extend(allow.map(|command| format!("  to allow: {command}")));
    }
    Ok(lines)
}
