//! Agents that have a sandbox of their own: the arguments and variables with which `run` turns that
//! sandbox off.
//!
//! User namespaces are not allowed in a sandbox, so that every command of such an agent would
//! fail. Each agent is configured on its command line or in its environment; a setting of the
//! operator is never changed.
//!
//! - codex runs each command in bubblewrap. `-c sandbox_mode=…` applies to every subcommand;
//!   `--sandbox` before a subcommand is ignored (openai/codex issue 18113).
//! - claude runs each command in bubblewrap if a settings file, for example the repository's, sets
//!   `sandbox.enabled`; `--settings` overrides these files (code.claude.com, settings).
//! - gemini starts a container; `GEMINI_SANDBOX` overrides its flag and its settings
//!   (google-gemini/gemini-cli, sandboxConfig.ts).

use std::ffi::{OsStr, OsString};
use std::path::Path;

/// An agent, and how its own sandbox is turned off.
struct Agent {
    /// Name of its program.
    program: &'static str,
    /// Arguments to insert first.
    arguments: &'static [&'static str],
    /// Environment variable to set.
    variable: Option<(&'static str, &'static str)>,
    /// Arguments with which the operator configures the agent's sandbox. An argument matches
    /// alone or followed by `=VALUE`; an argument that ends in `=` or is a one-letter option
    /// matches as a prefix.
    configured_by: &'static [&'static str],
}

const AGENTS: &[Agent] = &[
    Agent {
        program: "codex",
        arguments: &["-c", "sandbox_mode=danger-full-access"],
        variable: None,
        configured_by: &[
            "-s",
            "--sandbox",
            "--full-auto",
            "--yolo",
            "--dangerously-bypass-approvals-and-sandbox",
            "sandbox_mode=",
            "--config=sandbox_mode=",
            "-csandbox_mode=",
            "sandbox",
        ],
    },
    Agent {
        program: "claude",
        arguments: &["--settings", r#"{"sandbox":{"enabled":false}}"#],
        variable: None,
        configured_by: &["--settings"],
    },
    Agent {
        program: "gemini",
        arguments: &[],
        variable: Some(("GEMINI_SANDBOX", "false")),
        configured_by: &["-s", "--sandbox", "--no-sandbox"],
    },
];

/// A command with the additions that turn off the agent's own sandbox.
#[derive(Debug, PartialEq, Eq)]
pub struct AgentCommand {
    /// The program and its arguments.
    pub command: Vec<OsString>,
    /// An additional environment variable.
    pub variable: Option<(&'static str, &'static str)>,
    /// The additions as text; none if the command is unchanged.
    pub added: Option<String>,
}

/// Adds the arguments or the variable that turn off an agent's own sandbox. `environment` are
/// the variables that the command already has.
pub fn disable_own_sandbox(
    command: &[OsString],
    environment: &[(OsString, OsString)],
) -> AgentCommand {
    let unchanged = AgentCommand {
        command: command.to_vec(),
        variable: None,
        added: None,
    };
    let Some((program, arguments)) = command.split_first() else {
        return unchanged;
    };
    let name = Path::new(program).file_name().unwrap_or_default();
    let Some(agent) = AGENTS.iter().find(|agent| name == agent.program) else {
        return unchanged;
    };
    let is_set = |(name, _): &(OsString, OsString)| {
        let variable = agent.variable.map(|(variable, _)| OsStr::new(variable));
        Some(name.as_os_str()) == variable
    };
    if agent.is_configured(arguments) || environment.iter().any(is_set) {
        return unchanged;
    }
    let mut extended = vec![program.clone()];
    extended.extend(agent.arguments.iter().map(OsString::from));
    extended.extend_from_slice(arguments);
    let added = match agent.variable {
        Some((variable, value)) => format!("{variable}={value}"),
        None => agent.arguments.join(" "),
    };
    AgentCommand {
        command: extended,
        variable: agent.variable,
        added: Some(added),
    }
}

impl Agent {
    fn is_configured(&self, arguments: &[OsString]) -> bool {
        // Arguments after `--` are not options.
        let options = arguments.iter().take_while(|word| *word != "--");
        options.filter_map(|word| word.to_str()).any(|word| {
            self.configured_by.iter().any(|prefix| {
                let rest = word.strip_prefix(prefix);
                rest.is_some_and(|rest| {
                    let matches_prefix = prefix.ends_with('=') || prefix.len() == 2;
                    rest.is_empty() || matches_prefix || rest.starts_with('=')
                })
            })
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn extended(line: &str) -> String {
        let command: Vec<OsString> = line.split(' ').map(OsString::from).collect();
        let AgentCommand {
            command, variable, ..
        } = disable_own_sandbox(&command, &[]);
        let mut words: Vec<String> = variable
            .map(|(name, value)| format!("{name}={value}"))
            .into_iter()
            .collect();
        words.extend(
            command
                .iter()
                .map(|word| word.to_string_lossy().into_owned()),
        );
        words.join(" ")
    }

    #[test]
    fn agent_sandbox_is_turned_off_unless_configured_by_the_operator() {
        for (line, expected) in [
            ("codex", "codex -c sandbox_mode=danger-full-access"),
            (
                "/usr/bin/codex exec fix",
                "/usr/bin/codex -c sandbox_mode=danger-full-access exec fix",
            ),
            (
                "codex exec -- --sandbox",
                "codex -c sandbox_mode=danger-full-access exec -- --sandbox",
            ),
            (
                "claude -p hi",
                r#"claude --settings {"sandbox":{"enabled":false}} -p hi"#,
            ),
            ("gemini -p hi", "GEMINI_SANDBOX=false gemini -p hi"),
        ] {
            assert_eq!(extended(line), expected);
        }
        for line in [
            "codex --sandbox read-only",
            "codex --sandbox=read-only",
            "codex exec -s workspace-write fix",
            "codex -sread-only",
            "codex -c sandbox_mode=read-only",
            "codex --config=sandbox_mode=read-only",
            "codex --yolo",
            "codex sandbox linux true",
            "claude --settings mine.json",
            "claude --settings={} -p hi",
            "gemini -s",
            "gemini --sandbox=docker",
            "codexx",
            "claude-code",
            "aider",
            "bash -c codex",
        ] {
            assert_eq!(extended(line), line);
        }
    }

    #[test]
    fn variable_that_is_set_stays_unchanged() {
        let set = [("GEMINI_SANDBOX".into(), "docker".into())];
        let gemini = disable_own_sandbox(&["gemini".into()], &set);
        assert_eq!((gemini.variable, gemini.added), (None, None));
    }
}
