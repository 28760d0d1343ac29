//! `palisade preset …`: the presets that are part of this program. Needs no gate.

use anyhow::Result;
use clap::Subcommand;
use config::presets::{Preset, UnknownPreset};
use config::section::egress::DomainRule;

use crate::cli::Global;
use crate::exit::{CliError, CliExit};
use crate::output;

#[derive(Debug, Subcommand)]
pub enum PresetCommand {
    /// List the presets for egress.presets and --preset
    #[command(after_help = "\
Example:
  palisade preset list   agents, package registries and tools, each with its version")]
    List,
    /// Show the hosts, methods and paths of a preset
    #[command(after_help = "\
Example:
  palisade preset show npm   what a sandbox with this preset may reach")]
    Show {
        /// Name of the preset
        name: String,
    },
}

/// Runs `palisade preset …`.
pub fn run(command: &PresetCommand, global: &Global) -> Result<CliExit> {
    match command {
        PresetCommand::List => list(global),
        PresetCommand::Show { name } => show(name, global),
    }
}

/// Parses the value of `--preset`.
pub fn read(name: &str) -> Result<String, UnknownPreset> {
    Preset::check_name(name).map(|()| name.to_owned())
}

fn list(global: &Global) -> Result<CliExit> {
    let presets = Preset::all();
    if global.json {
        output::print_json(&presets)?;
        return Ok(CliExit::Ok);
    }
    let row = |preset: &Preset| {
        vec![
            preset.name.clone(),
            preset.kind.as_str().to_owned(),
            preset.version.to_string(),
            preset.description.clone(),
        ]
    };
    let rows: Vec<Vec<String>> = presets.iter().map(row).collect();
    output::print_line(&output::table(
        &["NAME", "KIND", "VERSION", "DESCRIPTION"],
        &rows,
    ))?;
    Ok(CliExit::Ok)
}

fn show(name: &str, global: &Global) -> Result<CliExit> {
    let preset =
        Preset::find(name).map_err(|error| CliError::new(CliExit::NotFound, error.to_string()))?;
    if global.json {
        output::print_json(&preset)?;
        return Ok(CliExit::Ok);
    }
    output::print_line(&format!(
        "{} ({}, version {}): {}",
        preset.name,
        preset.kind.as_str(),
        preset.version,
        preset.description
    ))?;
    let all = |list: Vec<String>| match list.as_slice() {
        [] => "all".to_owned(),
        list => list.join(" "),
    };
    let row = |rule: &DomainRule| {
        let paths = rule.paths.iter().map(|path| path.as_str().to_owned());
        vec![
            rule.host.to_string(),
            all(rule.methods.clone()),
            all(paths.collect()),
        ]
    };
    let rows: Vec<Vec<String>> = preset.domains.iter().map(row).collect();
    output::print_line(&output::table(&["HOST", "METHODS", "PATHS"], &rows))?;
    Ok(CliExit::Ok)
}
