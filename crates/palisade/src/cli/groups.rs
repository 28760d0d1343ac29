//! The top-level help: commands in groups with an example each, and global options in one
//! place.

use std::fmt::Write;

use clap::{Command, CommandFactory};

use crate::cli::Cli;

/// A group of commands, with an example.
struct Group {
    title: &'static str,
    commands: &'static [&'static str],
    example: &'static str,
}

/// Every command, in the order in which the help lists it.
const GROUPS: [Group; 6] = [
    Group {
        title: "Work",
        commands: &["run", "shell", "exec", "upload", "download", "ports"],
        example: "palisade run -- claude",
    },
    Group {
        title: "Review and merge",
        commands: &["diff", "log", "merge", "apply", "checkout", "snapshot"],
        example: "palisade merge fix",
    },
    Group {
        title: "Sandboxes",
        commands: &[
            "create",
            "list",
            "pause",
            "resume",
            "delete",
            "checkpoint",
            "restore",
            "fork",
        ],
        example: "palisade create fix --dirty",
    },
    Group {
        title: "Policy and audit",
        commands: &[
            "why",
            "allow",
            "deny",
            "audit",
            "policy",
            "preset",
            "credentials",
            "git",
            "config",
            "import",
            "trust",
        ],
        example: "palisade audit tail",
    },
    Group {
        title: "Gate",
        commands: &["gate", "health", "doctor", "ca", "registry"],
        example: "palisade doctor",
    },
    Group {
        title: "Integrations",
        commands: &["mcp", "bridge", "tool", "workbench", "completions", "man"],
        example: "palisade mcp install claude",
    },
];

/// The line about global options below the help of each subcommand.
const GLOBAL_OPTIONS: &str = "Global options: --config, --state-dir, --control, --json, --verbose \
                              (see palisade --help)";

/// The command-line definition, with the grouped help.
pub fn command() -> Command {
    let mut root = Cli::command();
    // Propagates global arguments to the subcommands.
    root.build();
    let global: Vec<String> = root
        .get_arguments()
        .filter(|argument| argument.is_global_set())
        .map(|argument| argument.get_id().to_string())
        .collect();
    let template = format!(
        "{{about-with-newline}}\n{{usage-heading}} {{usage}}\n\n{}\nOptions:\n{{options}}{{after-help}}",
        groups(&root)
    );
    root.help_template(template)
        .mut_subcommands(|sub| hide_global(sub, &global))
}

fn hide_global(command: Command, global: &[String]) -> Command {
    let command = command
        .mut_args(|argument| {
            let is_global = global.iter().any(|id| argument.get_id() == id.as_str());
            match is_global {
                true => argument.hide(true),
                false => argument,
            }
        })
        .mut_subcommands(|sub| hide_global(sub, global));
    let help = match command.get_after_help() {
        Some(help) => format!("{help}\n\n{GLOBAL_OPTIONS}"),
        None => GLOBAL_OPTIONS.to_owned(),
    };
    command.after_help(help)
}

/// The help text of all groups: each command with its description.
fn groups(root: &Command) -> String {
    let about = |name: &str| {
        let command = root.find_subcommand(name);
        command
            .and_then(Command::get_about)
            .map(ToString::to_string)
    };
    let mut text = String::new();
    for group in GROUPS {
        // Writing to a string cannot fail.
        let _ = writeln!(text, "{} (e.g. {})", group.title, group.example);
        for name in group.commands {
            let about = about(name).unwrap_or_default();
            let _ = writeln!(text, "  {name:12} {about}");
        }
        text.push('\n');
    }
    text.trim_end().to_owned() + "\n"
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_command_is_in_one_group() {
        let root = Cli::command();
        let mut known: Vec<&str> = root
            .get_subcommands()
            .filter(|command| !command.is_hide_set())
            .map(Command::get_name)
            .collect();
        let mut grouped: Vec<&str> = GROUPS
            .iter()
            .flat_map(|group| group.commands)
            .copied()
            .collect();
        known.sort_unstable();
        grouped.sort_unstable();
        assert_eq!(grouped, known);
    }

    #[test]
    fn global_options_are_only_in_the_top_level_help() {
        let mut root = command();
        let top = root.render_long_help().to_string();
        assert!(
            top.contains("--state-dir <DIR>") && top.contains("Review and merge"),
            "{top}"
        );
        let run = root.find_subcommand_mut("run").unwrap();
        let run = run.render_long_help().to_string();
        assert!(!run.contains("--state-dir <DIR>"), "{run}");
        assert!(run.contains("Global options"), "{run}");
    }
}
