//! `palisade config …`.

use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::PathBuf;

use anyhow::{Context, Result};
use clap::Subcommand;
use control::client::ControlClient;
use serde_json::{Value, json};

use crate::cli::{Global, block_on};
use crate::exit::{CliError, CliExit};
use crate::gate::{background, read_environment_variable};
use crate::output;

#[derive(Debug, Subcommand)]
pub enum ConfigCommand {
    /// Read the files as the gate would and report every mistake at once
    Check {
        /// The file [default: the file that the gate uses]
        file: Option<PathBuf>,
    },
    /// Show every setting with its value and origin; a secret is shown by its name
    Show {
        /// Only keys that contain this text
        filter: Option<String>,
        /// Omit settings at their default
        #[arg(long)]
        set: bool,
        /// Show the running gate's settings instead of those in the files
        #[arg(long)]
        running: bool,
    },
    /// Print the JSON Schema of palisade.yaml, for editors
    Schema,
    /// Write a starter palisade.yaml that explains every key
    Init {
        /// Print the file instead of writing it
        #[arg(long)]
        stdout: bool,
    },
    /// Reload the running gate's configuration
    Reload,
}

pub fn run(command: ConfigCommand, global: &Global) -> Result<CliExit> {
    match command {
        ConfigCommand::Check { file } => check(file, global),
        ConfigCommand::Show {
            filter,
            set,
            running,
        } => show(filter.as_deref().unwrap_or_default(), set, running, global),
        ConfigCommand::Schema => {
            output::print_json(&config::schema())?;
            Ok(CliExit::Ok)
        }
        ConfigCommand::Init { stdout } => init(stdout, global),
        ConfigCommand::Reload => reload(global),
    }
}

fn check(file: Option<PathBuf>, global: &Global) -> Result<CliExit> {
    let file = match file {
        Some(file) => Some(std::path::absolute(file)?),
        None => global.paths()?.config.current().map(PathBuf::from),
    };
    let shown = file
        .as_ref()
        .map_or("no file, all defaults".into(), |file| {
            file.display().to_string()
        });
    match config::load(file.as_deref(), &read_environment_variable) {
        Ok(settings) => {
            for warning in &settings.warnings {
                output::print_message(&format!("warning: {}", output::safe(&warning.to_string())));
            }
            if global.json {
                let warnings: Vec<String> =
                    settings.warnings.iter().map(ToString::to_string).collect();
                output::print_json(&json!({ "ok": true, "problems": [], "warnings": warnings }))?;
            } else {
                output::print_line(&format!("{shown}: ok"))?;
            }
            Ok(CliExit::Ok)
        }
        Err(problems) => {
            if global.json {
                let shown: Vec<Value> = problems.iter().map(describe).collect();
                output::print_json(&json!({ "ok": false, "problems": shown }))?;
            } else {
                for problem in &problems {
                    output::print_message(&output::safe(&problem.to_string()));
                }
                let count = problems.len();
                let ending = if count == 1 { "" } else { "s" };
                output::print_message(&format!(
                    "{count} problem{ending} in {}",
                    output::safe(&shown)
                ));
            }
            Ok(CliExit::Usage)
        }
    }
}

fn describe(problem: &config::Problem) -> Value {
    json!({
        "file": problem.file,
        "line": problem.line,
        "column": problem.column,
        "pointer": problem.pointer,
        "message": problem.message,
        "hint": problem.hint,
    })
}

fn show(filter: &str, set_only: bool, running: bool, global: &Global) -> Result<CliExit> {
    let paths = global.paths()?;
    let values = if running {
        let answer =
            block_on(async { Ok(ControlClient::new(&paths.control).get("/v1/config").await?) })?;
        answer.get("values").cloned().unwrap_or_default()
    } else {
        let settings = config::load(paths.config.current(), &read_environment_variable)
            .map_err(|problems| CliError::new(CliExit::Usage, problems.to_string()))?;
        control::dispatch::describe_settings(&settings)
    };
    let Value::Array(values) = values else {
        return Ok(CliExit::Ok);
    };
    let text = |value: &Value, name: &str| {
        value
            .get(name)
            .and_then(Value::as_str)
            .unwrap_or_default()
            .to_owned()
    };
    let wanted: Vec<Value> = values
        .into_iter()
        .filter(|value| text(value, "pointer").contains(filter))
        .filter(|value| !set_only || text(value, "origin") != "default")
        .collect();
    if global.json {
        output::print_json(&wanted)?;
        return Ok(CliExit::Ok);
    }
    let rows: Vec<Vec<String>> = wanted
        .iter()
        .map(|value| {
            let shown = value
                .get("value")
                .map(ToString::to_string)
                .unwrap_or_default();
            vec![text(value, "pointer"), shown, text(value, "origin")]
        })
        .collect();
    output::print_line(&output::table(&["KEY", "VALUE", "FROM"], &rows))?;
    Ok(CliExit::Ok)
}

fn init(stdout: bool, global: &Global) -> Result<CliExit> {
    if stdout {
        output::write_out(config::TEMPLATE.as_bytes())?;
        return Ok(CliExit::Ok);
    }
    let paths = global.paths()?;
    let path = paths
        .config
        .path()
        .context("HOME is not set; set it, or name a file with --config")?;
    if let Some(parent) = path.parent() {
        std::fs::create_dir_all(parent)
            .with_context(|| format!("cannot create {}", parent.display()))?;
    }
    let file = std::fs::File::options()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(path);
    match file {
        Ok(mut file) => file.write_all(config::TEMPLATE.as_bytes())?,
        Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => {
            let message = format!(
                "{} already exists; edit it, or print the template: palisade config init --stdout",
                path.display()
            );
            return Err(CliError::new(CliExit::Exists, message).into());
        }
        Err(error) => {
            return Err(error).with_context(|| format!("cannot write {}", path.display()));
        }
    }
    if global.json {
        output::print_json(&json!({ "status": "written", "path": path }))?;
    } else {
        output::print_line(&format!(
            "written: {}",
            output::safe(&path.display().to_string())
        ))?;
    }
    Ok(CliExit::Ok)
}

fn reload(global: &Global) -> Result<CliExit> {
    let paths = global.paths()?;
    let answer = block_on(async {
        let gate = background::client(&paths, global.verbose).await?;
        Ok(gate.post("/v1/config/reload", &json!({})).await?)
    })?;
    if global.json {
        output::print_json(&answer)?;
        return Ok(CliExit::Ok);
    }
    let changed = answer
        .get("changed")
        .and_then(Value::as_array)
        .cloned()
        .unwrap_or_default();
    let names: Vec<&str> = changed.iter().filter_map(Value::as_str).collect();
    if names.is_empty() {
        output::print_line("reloaded; nothing changed")?;
    } else {
        output::print_line(&format!(
            "reloaded; changed: {}",
            output::safe(&names.join(", "))
        ))?;
    }
    Ok(CliExit::Ok)
}
