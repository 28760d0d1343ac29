//! Manual pages, and the reference in docs/cli.md: both are generated from the clap
//! definitions.

use std::path::Path;

use anyhow::{Context, Result};

use serde_json::json;

use crate::cli::{Global, groups};
use crate::exit::CliExit;
use crate::output;

/// Writes `palisade.1` and a page for each subcommand.
pub fn write_man(dir: &Path, global: &Global) -> Result<CliExit> {
    std::fs::create_dir_all(dir).with_context(|| format!("cannot create {}", dir.display()))?;
    clap_mangen::generate_to(groups::command(), dir)
        .with_context(|| format!("cannot write into {}", dir.display()))?;
    if global.json {
        output::print_json(&json!({ "status": "written", "path": dir }))?;
    } else {
        output::print_line(&format!("manual pages written to {}", dir.display()))?;
    }
    Ok(CliExit::Ok)
}

#[cfg(test)]
mod tests {
    use std::fmt::Write;

    use clap::CommandFactory;

    use super::*;
    use crate::cli::Cli;

    /// docs/cli.md, from the definitions.
    fn reference() -> String {
        let mut text = String::from(
            "# The command line\n\nGenerated from the definitions by a test; \
             `just docs` writes it anew.\n",
        );
        let root = groups::command().term_width(92);
        describe(&root, "palisade", &mut text);
        text
    }

    fn describe(command: &clap::Command, name: &str, text: &mut String) {
        // Defaults of hidden environment values would differ from machine to machine.
        let help = command
            .clone()
            .mut_args(|arg| arg.hide_env_values(true))
            .render_long_help()
            .to_string();
        let help: Vec<&str> = help.lines().map(str::trim_end).collect();
        write!(
            text,
            "\n## {name}\n\n```text\n{}\n```\n",
            help.join("\n").trim_end()
        )
        .unwrap();
        for sub in command.get_subcommands().filter(|sub| !sub.is_hide_set()) {
            if sub.get_name() != "help" {
                describe(sub, &format!("{name} {}", sub.get_name()), text);
            }
        }
    }

    #[test]
    fn command_definitions_are_consistent() {
        Cli::command().debug_assert();
        let names: Vec<_> = Cli::command()
            .get_subcommands()
            .map(|c| c.get_name().to_owned())
            .collect();
        assert!(names.contains(&"gate".to_owned()));
    }

    #[test]
    fn docs_cli_md_is_up_to_date() {
        let path =
            Path::new(&std::env::var_os("CARGO_MANIFEST_DIR").unwrap()).join("../../docs/cli.md");
        if std::env::var_os("UPDATE_DOCS").is_some() {
            std::fs::write(&path, reference()).unwrap();
        }
        let written = std::fs::read_to_string(&path).unwrap_or_default();
        assert!(
            written == reference(),
            "docs/cli.md is out of date; run: just docs"
        );
    }

    #[test]
    fn every_command_and_flag_has_help() {
        fn walk(command: &clap::Command, undocumented: &mut Vec<String>) {
            for sub in command.get_subcommands().filter(|sub| !sub.is_hide_set()) {
                if sub.get_about().is_none() {
                    undocumented.push(sub.get_name().to_owned());
                }
                undocumented.extend(
                    sub.get_arguments()
                        .filter(|arg| !arg.is_hide_set() && arg.get_help().is_none())
                        .map(|arg| format!("{} {}", sub.get_name(), arg.get_id())),
                );
                walk(sub, undocumented);
            }
        }
        let mut undocumented = Vec::new();
        walk(&Cli::command(), &mut undocumented);
        assert_eq!(undocumented, Vec::<String>::new());
    }
}
