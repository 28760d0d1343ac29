//! The summary of `run`: result, hosts reached, requests refused.

use anyhow::Result;
use control::client::Client;
use sandbox::git::diff::{BranchDiff, ChangeKind};
use sandbox::git::host_repository::HostRepository;
use sandbox::worker::SnapshotReport;

use crate::cli::outcome::{Connections, Reached};
use crate::cli::sandbox_lookup::Place;
use crate::output;

/// Files and hosts that are named; the rest is counted.
const SHOWN: usize = 10;

/// The same of what a snapshot left behind.
const LEFT_SHOWN: usize = 5;

/// Says it on stderr. Whether the branch has something to bring home.
pub async fn tell(
    gate: &Client,
    place: &Place,
    report: Option<&SnapshotReport>,
    since: jiff::Timestamp,
) -> Result<bool> {
    let mut lines = Vec::new();
    let mut brought = false;
    if let (Some(home), Some(_)) = (place.home()?, report) {
        let (work, any) = work(&home, place)?;
        lines.extend(work);
        brought = any;
    }
    lines.extend(traffic(gate, place, since).await?);
    let name = &place.name;
    if brought {
        let program = output::program_name();
        lines.push(format!(
            "next: {program} diff {name} · {program} merge {name} · {program} delete {name}"
        ));
    }
    for line in lines {
        output::say(&format!("palisade: {line}"));
    }
    Ok(brought)
}

/// What a snapshot could not take along: the first few names, and how many more.
pub fn left_behind(report: &SnapshotReport) -> Vec<String> {
    let mut lines: Vec<String> = report
        .skipped
        .iter()
        .take(LEFT_SHOWN)
        .map(|one| {
            let (path, why) = (output::safe(&one.path), output::safe(&one.why));
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
        let named = report.strays.iter().take(LEFT_SHOWN);
        let named: Vec<String> = named.map(|stray| output::safe(stray)).collect();
        let more = report.stray_count.saturating_sub(named.len() as u64);
        let more = match more {
            0 => String::new(),
            more => format!(" and {more} more"),
        };
        lines.push(format!(
            "only in the workspace's own repository: {}{more}; merge it there to bring it along",
            named.join(", ")
        ));
    }
    lines
}

fn work(home: &HostRepository, place: &Place) -> Result<(Vec<String>, bool)> {
    let changes = home.diff(&place.name, 0)?;
    let commits = home.log(&place.name, usize::MAX)?.len();
    if commits == 0 {
        return Ok((vec!["nothing was changed".to_owned()], false));
    }
    let (added, removed) = lines_of(&changes);
    let branch = place.branch_name.clone().unwrap_or_default();
    let mut lines = vec![format!(
        "{} on {branch}: {} changed, +{added} -{removed}",
        count(commits, "commit"),
        count(changes.files.len(), "file"),
    )];
    lines.extend(changes.files.iter().take(SHOWN).map(|file| {
        let path = String::from_utf8_lossy(&file.path);
        format!("  {} {}", letter(file.kind), output::safe(&path))
    }));
    if changes.files.len() > SHOWN {
        lines.push(format!("  and {} more", changes.files.len() - SHOWN));
    }
    Ok((lines, true))
}

/// How many lines came and went.
pub fn lines_of(changes: &BranchDiff) -> (usize, usize) {
    changes.files.iter().fold((0, 0), |(added, removed), file| {
        (added + file.added, removed + file.removed)
    })
}

/// A change as git's short status has it.
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

/// The hosts that were reached, those that were refused and those that failed.
async fn traffic(gate: &Client, place: &Place, since: jiff::Timestamp) -> Result<Vec<String>> {
    let Connections {
        reached,
        refused,
        failed,
    } = Connections::read(gate, place, since).await?;
    let mut lines = Vec::new();
    for (word, hosts) in [
        ("reached", reached),
        ("refused", refused),
        ("failed", failed),
    ] {
        if hosts.is_empty() {
            continue;
        }
        let named = hosts
            .iter()
            .take(SHOWN)
            .map(|Reached { host, port, count }| {
                let port = port.map_or_else(String::new, |port| format!(":{port}"));
                format!("{}{port} ({count}×)", output::safe(host))
            });
        let named: Vec<String> = named.collect();
        let more = hosts.len().saturating_sub(SHOWN);
        let more = if more > 0 {
            format!(" and {more} more")
        } else {
            String::new()
        };
        lines.push(format!("{word}: {}{more}", named.join(", ")));
    }
    Ok(lines)
}
