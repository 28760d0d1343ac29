//! `palisade bridge …`.

pub mod standalone;

use anyhow::{Context, Result};
use clap::Subcommand;
use control::client::{ControlClient, ControlClientError};
use serde_json::{Value, json};

use crate::cli::{Global, block_on, confirm};
use crate::exit::CliExit;
use crate::gate::background;
use crate::output;

#[derive(Debug, Subcommand)]
pub enum BridgeCommand {
    /// List the servers behind the bridge, with the tools that each has listed
    #[command(
        after_help = "A tool is 'changed' when its definition differs from the one that was \
first seen. A changed tool is disabled until you accept it: agents read descriptions, and a changed \
description may try to steer them."
    )]
    List,
    /// Accept the changed tool definitions of a server
    #[command(after_help = "Example:\n  palisade bridge accept github create_issue")]
    Accept {
        /// The server, by its name in the configuration
        server: String,
        /// A tool of the server [default: every changed tool]
        tool: Option<String>,
        /// Do not ask for confirmation
        #[arg(long, short)]
        yes: bool,
    },
    /// Serve one stdio MCP server over HTTP and SSE, without a gate
    #[command(after_help = standalone::EXAMPLES)]
    Run(standalone::BridgeRunArgs),
}

pub fn run(command: BridgeCommand, global: &Global) -> Result<CliExit> {
    match command {
        BridgeCommand::List => {
            let list = request(global, async |gate| gate.get("/v1/tools").await)?;
            report(&list, global)
        }
        BridgeCommand::Accept { server, tool, yes } => {
            confirm(
                "Agents will read the new definition and may follow it. Accept it?",
                yes,
            )?;
            let body = json!({"server": server, "tool": tool});
            let accepted = request(global, async |gate| {
                gate.post("/v1/tools/accept", &body).await
            })?;
            report(&accepted, global)
        }
        BridgeCommand::Run(args) => standalone::run(&args, global).context("bridge run failed"),
    }
}

/// Sends one request to the gate.
fn request(
    global: &Global,
    send: impl AsyncFnOnce(ControlClient) -> Result<Value, ControlClientError>,
) -> Result<Value> {
    let paths = global.paths()?;
    block_on(async {
        let gate = background::client(&paths, global.verbose).await?;
        Ok(send(gate).await?)
    })
}

fn report(answer: &Value, global: &Global) -> Result<CliExit> {
    if global.json {
        output::print_json(answer)?;
    } else {
        output::print_line(&describe(answer))?;
    }
    Ok(CliExit::Ok)
}

fn text(value: &Value, name: &str) -> String {
    let found = value.get(name).and_then(Value::as_str);
    found.unwrap_or_default().to_owned()
}

fn describe(answer: &Value) -> String {
    let Value::Array(servers) = answer else {
        let tools = answer.get("tools").and_then(Value::as_array);
        let tools = tools.into_iter().flatten().filter_map(Value::as_str);
        let tools: Vec<&str> = tools.collect();
        return output::safe(&format!("accepted {}", tools.join(", ")));
    };
    if servers.is_empty() {
        return "no tools are configured".to_owned();
    }
    let mut rows = Vec::new();
    for server in servers {
        let number = |name: &str| server.get(name).and_then(Value::as_u64).unwrap_or_default();
        let mut first = vec![
            text(server, "name"),
            text(server, "runtime"),
            number("sessions").to_string(),
        ];
        let mut description = text(server, "description");
        let tools = server.get("tools").and_then(Value::as_array);
        let mut has_tools = false;
        for tool in tools.into_iter().flatten() {
            let changed = tool.get("changed").and_then(Value::as_bool) == Some(true);
            let state = if changed { "changed" } else { "as first seen" };
            let mut row = std::mem::replace(&mut first, vec![String::new(); 3]);
            let described = std::mem::take(&mut description);
            row.extend([text(tool, "name"), state.to_owned(), described]);
            rows.push(row);
            has_tools = true;
        }
        if !has_tools {
            first.extend(["(none listed yet)".to_owned(), String::new(), description]);
            rows.push(first);
        }
    }
    let heading = [
        "SERVER",
        "RUNTIME",
        "SESSIONS",
        "TOOL",
        "DEFINITION",
        "DESCRIPTION",
    ];
    output::table(&heading, &rows)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn table_names_each_server_once_and_marks_changes() {
        let answer = json!([
            {"name": "calc", "runtime": "local", "sessions": 2, "tools": [
                {"name": "add", "changed": false}, {"name": "sub", "changed": true},
            ]},
            {"name": "web", "runtime": "sandbox", "sessions": 0, "tools": [],
             "description": "Pages"},
        ]);
        let shown = describe(&answer);
        let lines: Vec<&str> = shown.lines().collect();
        assert_eq!(lines.len(), 4, "{shown}");
        assert!(lines[1].starts_with("calc") && lines[1].ends_with("as first seen"));
        assert!(lines[2].starts_with(' ') && lines[2].ends_with("changed"));
        assert!(lines[3].contains("(none listed yet)") && lines[3].ends_with("Pages"));
    }
}
