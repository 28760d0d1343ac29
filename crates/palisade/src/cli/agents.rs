//! Agents that shut themselves in: what `run` tells each, so that it leaves that to us.
//!
//! Inside a sandbox user namespaces are refused, so an inner layer made of them only makes
//! every command of the agent fail. Each is configured in its own way, on its command line or
//! in its environment; what the operator says about it themselves is never changed.
//!
//! - codex wraps each command in bubblewrap. `-c sandbox_mode=…` holds for every subcommand;
//!   `--sandbox` before one is ignored (openai/codex issue 18113).
//! - claude does so where settings say `sandbox.enabled`, which a repository's own may;
//!   `--settings` comes before those (code.claude.com, settings).
//! - gemini starts a container; `GEMINI_SANDBOX` comes before its flag and its settings
//!   (google-gemini/gemini-cli, sandboxConfig.ts).

use std::ffi::{OsStr, OsString};
use std::path::Path;

/// How an agent's own sandbox is turned off.
struct Agent {
    /// Its program.
    program: &'static str,
    /// Arguments that come first.
    arguments: &'static [&'static str],
    /// A variable.
    variable: Option<(&'static str, &'static str)>,
    /// Words by which the operator has decided already: alone or with `=` and a value; where
    /// they end in `=` or are a letter's, with anything behind them.
    decided_by: &'static [&'static str],
}

const AGENTS: &[Agent] = &[
    Agent {
        program: "codex",
        arguments: &["-c", "sandbox_mode=danger-full-access"],
        variable: None,
        decided_by: &[
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
        decided_by: &["--settings"],
    },
    Agent {
        program: "gemini",
        arguments: &[],
        variable: Some(("GEMINI_SANDBOX", "false")),
        decided_by: &["-s", "--sandbox", "--no-sandbox"],
    },
];

/// A command as it is run, and what was added to it.
#[derive(Debug, PartialEq, Eq)]
pub struct Fitted {
    /// The program and its arguments.
    pub command: Vec<OsString>,
    /// A variable for it.
    pub variable: Option<(&'static str, &'static str)>,
    /// What was added, in words; none where nothing was.
    pub added: Option<String>,
}

/// Tells an agent that it is shut in already. `environment` is what the command gets anyway.
pub fn fit(command: &[OsString], environment: &[(OsString, OsString)]) -> Fitted {
    let as_it_is = Fitted {
        command: command.to_vec(),
        variable: None,
        added: None,
    };
    let Some((program, arguments)) = command.split_first() else {
        return as_it_is;
    };
    let name = Path::new(program).file_name().unwrap_or_default();
    let Some(agent) = AGENTS.iter().find(|agent| name == agent.program) else {
        return as_it_is;
    };
    let is_set = |(name, _): &(OsString, OsString)| {
        let variable = agent.variable.map(|(variable, _)| OsStr::new(variable));
        Some(name.as_os_str()) == variable
    };
    if agent.is_decided(arguments) || environment.iter().any(is_set) {
        return as_it_is;
    }
    let mut fitted = vec![program.clone()];
    fitted.extend(agent.arguments.iter().map(OsString::from));
    fitted.extend_from_slice(arguments);
    let added = match agent.variable {
        Some((variable, value)) => format!("{variable}={value}"),
        None => agent.arguments.join(" "),
    };
    Fitted {
        command: fitted,
        variable: agent.variable,
        added: Some(added),
    }
}

impl Agent {
    fn is_decided(&self, arguments: &[OsString]) -> bool {
        // What comes after is no option.
        let options = arguments.iter().take_while(|word| *word != "--");
        options.filter_map(|word| word.to_str()).any(|word| {
            self.decided_by.iter().any(|decided| {
                let rest = word.strip_prefix(decided);
                rest.is_some_and(|rest| {
                    let open = decided.ends_with('=') || decided.len() == 2;
                    rest.is_empty() || open || rest.starts_with('=')
                })
            })
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fitted(line: &str) -> String {
        let command: Vec<OsString> = line.split(' ').map(OsString::from).collect();
        let Fitted {
            command, variable, ..
        } = fit(&command, &[]);
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
    fn an_agent_is_told_unless_the_operator_has_said_so_themselves() {
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
            assert_eq!(fitted(line), expected);
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
            assert_eq!(fitted(line), line);
        }
    }

    #[test]
    fn a_variable_that_is_set_stays_as_it_is() {
        let set = [("GEMINI_SANDBOX".into(), "docker".into())];
        let gemini = fit(&["gemini".into()], &set);
        assert_eq!((gemini.variable, gemini.added), (None, None));
    }
}
