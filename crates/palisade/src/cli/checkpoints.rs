//! `palisade checkpoint|restore|fork`.

use anyhow::Result;
use clap::Args;
use sandbox::worker::SnapshotReport;
use serde_json::{Value, json};

use crate::cli::sandbox_lookup;
use crate::cli::sandboxes::{below, in_words};
use crate::cli::{Global, confirm, summary};
use crate::exit::Exit;
use crate::output;

#[derive(Debug, Args)]
pub struct CheckpointArgs {
    /// Sandbox name
    pub name: String,
    /// What to call it; without one, the checkpoints there are are listed
    pub label: Option<String>,
}

#[derive(Debug, Args)]
pub struct RestoreArgs {
    /// Sandbox name
    pub name: String,
    /// The checkpoint's label
    pub label: String,
    /// Do not ask for confirmation
    #[arg(long, short)]
    pub yes: bool,
    /// Give up the files there are now, without taking a snapshot first
    #[arg(long)]
    pub no_snapshot: bool,
}

#[derive(Debug, Args)]
pub struct ForkArgs {
    /// The sandbox to start from
    pub name: String,
    /// What to call the new one
    pub new: String,
}

pub fn checkpoint(args: &CheckpointArgs, global: &Global) -> Result<Exit> {
    in_words("checkpoint", global, async |gate| {
        let place = sandbox_lookup::find(gate, &args.name).await?;
        let route = below(&place, "checkpoints");
        let Some(label) = &args.label else {
            let all = gate.get(&route).await?;
            let told = list(&all);
            return Ok((all, told));
        };
        let waiting = output::Spinner::start("keeping the files");
        let made = gate.post(&route, &json!({ "label": label })).await;
        waiting.end();
        let made = made?;
        Ok((made, format!("Checkpoint {label} of {}", place.name)))
    })
}

fn list(all: &Value) -> String {
    let rows: Vec<Vec<String>> = all
        .as_array()
        .into_iter()
        .flatten()
        .map(|one| {
            let label = one.get("label").and_then(Value::as_str).unwrap_or_default();
            let made = one.get("created").and_then(Value::as_i64);
            let made = made.and_then(|at| jiff::Timestamp::from_millisecond(at).ok());
            let made = made.map(|at| at.to_string());
            vec![label.to_owned(), made.unwrap_or_default()]
        })
        .collect();
    if rows.is_empty() {
        return "no checkpoints; make one: palisade checkpoint NAME LABEL".to_owned();
    }
    output::table(&["LABEL", "MADE"], &rows)
}

pub fn restore(args: &RestoreArgs, global: &Global) -> Result<Exit> {
    in_words("restore", global, async |gate| {
        let place = sandbox_lookup::find(gate, &args.name).await?;
        let first = match &place.branch_name {
            Some(branch) if !args.no_snapshot => format!(" A snapshot of them goes to {branch}."),
            _ => String::new(),
        };
        confirm(
            &format!(
                "This ends everything that runs in {} and puts the files of '{}' in the place \
                 of its own.{first}",
                place.name, args.label
            ),
            args.yes,
        )?;
        let waiting = output::Spinner::start("putting the files back");
        let body = json!({ "label": args.label, "no_snapshot": args.no_snapshot });
        let done = gate.post(&below(&place, "restore"), &body).await;
        waiting.end();
        let done = done?;
        let mut told = format!("Restored {} to {}", place.name, args.label);
        let report = done.get("snapshot").filter(|report| !report.is_null());
        if let (Some(report), Some(branch)) = (report, &place.branch_name) {
            let report: SnapshotReport = serde_json::from_value(report.clone())?;
            for line in summary::left_behind(&report) {
                output::say(&format!("palisade: {line}"));
            }
            let tip = report.tip.get(..12).unwrap_or(&report.tip);
            told.push_str(&format!("; the files before it are on {branch} at {tip}"));
        }
        Ok((done, told))
    })
}

pub fn fork(args: &ForkArgs, global: &Global) -> Result<Exit> {
    in_words("fork", global, async |gate| {
        let place = sandbox_lookup::find(gate, &args.name).await?;
        let waiting = output::Spinner::start("copying the sandbox");
        let body = json!({ "name": args.new });
        let made = gate.post(&below(&place, "fork"), &body).await;
        waiting.end();
        let made = made?;
        let name = made.get("name").and_then(Value::as_str);
        let line = format!("Forked {} as {}", place.name, name.unwrap_or(&args.new));
        Ok((made, line))
    })
}
