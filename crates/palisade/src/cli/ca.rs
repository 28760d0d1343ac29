//! `palisade ca …`.

use std::path::PathBuf;

use anyhow::{Context, Result};
use clap::Subcommand;
use serde_json::{Value, json};

use crate::cli::{Global, block_on, confirm};
use crate::exit::CliExit;
use crate::gate::background;
use crate::output;

#[derive(Debug, Subcommand)]
pub enum CaCommand {
    /// Show the root that sandboxes trust
    Show,
    /// Replace the root; running sandboxes receive the new root, too
    Rotate {
        /// Do not ask for confirmation
        #[arg(long, short)]
        yes: bool,
    },
    /// Print the root as PEM, for programs outside a sandbox
    #[command(after_help = "\
Example:
  palisade ca export --out palisade-ca.pem
  curl --cacert palisade-ca.pem -x http://127.0.0.1:8080 https://example.com")]
    Export {
        /// Write the root to a new file instead of standard output
        #[arg(long, value_name = "FILE")]
        out: Option<PathBuf>,
    },
}

pub fn run(command: CaCommand, global: &Global) -> Result<CliExit> {
    if let CaCommand::Rotate { yes } = command {
        confirm(
            "Replace the root certificate? The new root signs from now on.",
            yes,
        )?;
    }
    let paths = global.paths()?;
    block_on(async {
        let gate = background::client(&paths, global.verbose).await?;
        let answer = match command {
            CaCommand::Rotate { .. } => gate.post("/v1/ca/rotate", &json!({})).await?,
            CaCommand::Show | CaCommand::Export { .. } => gate.get("/v1/ca").await?,
        };
        match command {
            CaCommand::Export { out } => export(&answer, out)?,
            CaCommand::Show | CaCommand::Rotate { .. } if global.json => {
                output::print_json(&answer)?;
            }
            CaCommand::Show | CaCommand::Rotate { .. } => output::print_line(&describe(&answer))?,
        }
        Ok(CliExit::Ok)
    })
}

fn export(answer: &Value, out: Option<PathBuf>) -> Result<()> {
    let pem = text(answer, "certificate");
    match out {
        None => output::write_out(pem.as_bytes()),
        Some(path) => {
            use std::io::Write;
            let shown = path.display().to_string();
            let mut file =
                std::fs::File::create_new(path).with_context(|| format!("cannot write {shown}"))?;
            file.write_all(pem.as_bytes())
                .with_context(|| format!("cannot write {shown}"))
        }
    }
}

fn describe(answer: &Value) -> String {
    let older = answer
        .get("older_roots_that_lead_here")
        .and_then(Value::as_u64)
        .unwrap_or_default();
    format!(
        "{}\nexpires      {}\nolder roots  {older} still valid",
        text(answer, "name"),
        text(answer, "expires_at"),
    )
}

fn text<'a>(answer: &'a Value, key: &str) -> &'a str {
    answer.get(key).and_then(Value::as_str).unwrap_or_default()
}
