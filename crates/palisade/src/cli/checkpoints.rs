//! `palisade checkpoint|restore|fork`.

use anyhow::Result;
use clap::Args;
use sandbox::worker::SnapshotReport;
use serde_json::{Value, json};

use crate::cli::sandbox_lookup;
use crate::cli::sandboxes::{run_and_print, subroute};
use crate::cli::{Global, confirm, summary};
use crate::exit::CliExit;
use crate::output;

#[derive(Debug, Args)]
pub struct CheckpointArgs {
    /// Sandbox name
    pub name: String,
    /// Label of the checkpoint; omit to list checkpoints
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
    /// Discard the current files instead of committing a snapshot first
    #[arg(long)]
    pub no_snapshot: bool,
}

#[derive(Debug, Args)]
pub struct ForkArgs {
    /// The sandbox to start from
    pub name: String,
    /// Name of the new sandbox
    pub new: String,
}

pub fn checkpoint(args: &CheckpointArgs, global: &Global) -> Result<CliExit> {
    run_and_print("checkpoint", global, async |gate| {
        let sandbox = sandbox_lookup::find(gate, &args.name).await?;
        let route = subroute(&sandbox, "checkpoints");
        let Some(label) = &args.label else {
            let all = gate.get(&route).await?;
            let text = list(&all);
            return Ok((all, text));
        };
        let waiting = output::Spinner::start("saving the files");
        let response = gate.post(&route, &json!({ "label": label })).await;
        waiting.end();
        let response = response?;
        Ok((response, format!("Checkpoint {label} of {}", sandbox.name)))
    })
}

fn list(all: &Value) -> String {
    let rows: Vec<Vec<String>> = all
        .as_array()
        .into_iter()
        .flatten()
        .map(|checkpoint| {
            let label = checkpoint
                .get("label")
                .and_then(Value::as_str)
                .unwrap_or_default();
            let created = checkpoint.get("created").and_then(Value::as_i64);
            let created = created.and_then(|at| jiff::Timestamp::from_millisecond(at).ok());
            let created = created.map(|at| at.to_string());
            vec![label.to_owned(), created.unwrap_or_default()]
        })
        .collect();
    if rows.is_empty() {
        return "no checkpoints; create one: palisade checkpoint NAME LABEL".to_owned();
    }
    output::table(&["LABEL", "CREATED"], &rows)
}

pub fn restore(args: &RestoreArgs, global: &Global) -> Result<CliExit> {
    run_and_print("restore", global, async |gate| {
        let sandbox = sandbox_lookup::find(gate, &args.name).await?;
        let first = match &sandbox.branch_name {
            Some(branch) if !args.no_snapshot => {
                format!(" A snapshot of the current files is committed to {branch} first.")
            }
            _ => String::new(),
        };
        confirm(
            &format!(
                "This ends all processes in {} and replaces its files by those of checkpoint \
                 '{}'.{first}",
                sandbox.name, args.label
            ),
            args.yes,
        )?;
        let waiting = output::Spinner::start("restoring the files");
        let body = json!({ "label": args.label, "no_snapshot": args.no_snapshot });
        let done = gate.post(&subroute(&sandbox, "restore"), &body).await;
        waiting.end();
        let done = done?;
        let mut text = format!("Restored {} to {}", sandbox.name, args.label);
        let report = done.get("snapshot").filter(|report| !report.is_null());
        if let (Some(report), Some(branch)) = (report, &sandbox.branch_name) {
            let report: SnapshotReport = serde_json::from_value(report.clone())?;
            for line in summary::skipped_lines(&report) {
                output::print_message(&format!("palisade: {line}"));
            }
            let tip = report.tip.get(..12).unwrap_or(&report.tip);
            text.push_str(&format!("; the previous files are on {branch} at {tip}"));
        }
        Ok((done, text))
    })
}

pub fn fork(args: &ForkArgs, global: &Global) -> Result<CliExit> {
    run_and_print("fork", global, async |gate| {
        let sandbox = sandbox_lookup::find(gate, &args.name).await?;
        let waiting = output::Spinner::start("copying the sandbox");
        let body = json!({ "name": args.new });
        let response = gate.post(&subroute(&sandbox, "fork"), &body).await;
        waiting.end();
        let response = response?;
        let name = response.get("name").and_then(Value::as_str);
        let line = format!("Forked {} as {}", sandbox.name, name.unwrap_or(&args.new));
        Ok((response, line))
    })
}
