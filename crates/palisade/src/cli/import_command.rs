//! `palisade import`: turns another tool's network policy into palisade.yaml.

use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use clap::{Args, ValueEnum};
use config::import::{self, ImportFormat};
use serde_json::json;

use crate::cli::Global;
use crate::exit::{CliError, CliExit};
use crate::output;

#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  palisade import srt ~/.srt-settings.json
  palisade import claude-settings ~/.claude/settings.json --output palisade.yaml
  palisade import openshell policy.yaml
  palisade import docker-kit spec.yaml
Prints the text of a palisade.yaml with the hosts of the file. What cannot be carried over, or
is wider here, is named on stderr. Nothing is changed; --output does not replace a file.")]
pub struct ImportArgs {
    /// The tool that the file is for
    pub format: FormatName,
    /// The file
    pub file: PathBuf,
    /// Write to this new file instead of stdout
    #[arg(long, short, value_name = "FILE")]
    pub output: Option<PathBuf>,
}

/// The format of the file.
#[derive(Clone, Copy, Debug, ValueEnum)]
pub enum FormatName {
    /// Settings of Anthropic's sandbox runtime (.srt-settings.json)
    Srt,
    /// settings.json of Claude Code
    ClaudeSettings,
    /// A policy of NVIDIA OpenShell
    #[value(name = "openshell")]
    OpenShell,
    /// spec.yaml of a Docker sandbox kit
    DockerKit,
}

impl From<FormatName> for ImportFormat {
    fn from(name: FormatName) -> Self {
        match name {
            FormatName::Srt => ImportFormat::Srt,
            FormatName::ClaudeSettings => ImportFormat::ClaudeSettings,
            FormatName::OpenShell => ImportFormat::OpenShell,
            FormatName::DockerKit => ImportFormat::DockerKit,
        }
    }
}

/// Runs `palisade import`.
pub fn run(args: &ImportArgs, global: &Global) -> Result<CliExit> {
    let policy = import::import_file(args.format.into(), &args.file).map_err(|error| {
        let file = output::safe(&args.file.display().to_string());
        CliError::new(
            CliExit::Usage,
            format!(
                "import failed: {file}: {}",
                output::safe(&error.to_string())
            ),
        )
    })?;
    for note in &policy.notes {
        output::print_message(&format!("palisade: {}", output::safe(note)));
    }
    if let Some(path) = &args.output {
        write(path, &policy.text)?;
    }
    if global.json {
        output::print_json(&json!({
            "rules": policy.rules, "notes": policy.notes, "text": policy.text,
            "file": args.output,
        }))?;
    } else if let Some(path) = &args.output {
        output::print_line(&format!(
            "written: {}",
            output::safe(&path.display().to_string())
        ))?;
    } else {
        output::write_out(policy.text.as_bytes())?;
    }
    Ok(CliExit::Ok)
}

/// Writes a new file, which only its owner may read.
fn write(path: &Path, text: &str) -> Result<()> {
    let file = std::fs::File::options()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(path);
    let failed = || format!("cannot write {}", path.display());
    match file {
        Ok(mut file) => file.write_all(text.as_bytes()).with_context(failed),
        Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => {
            let message = format!(
                "import failed: {} already exists; name another file",
                path.display()
            );
            Err(CliError::new(CliExit::Exists, message).into())
        }
        Err(error) => Err(error).with_context(failed),
    }
}
