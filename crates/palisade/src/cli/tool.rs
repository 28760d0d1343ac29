//! `palisade tool`: calls a coding tool in a sandbox.

use std::io::{Read, Write};

use anyhow::{Context, Result};
use clap::Args;
use control::body::Purpose;
use serde_json::Value;
use workbench::client::{WorkbenchClient, WorkbenchClientError};
use workbench::request::BashRequest;
use workbench::tools::bash::{CommandEvent, CommandStream, OutputChunk};

use crate::cli::{Global, block_on, enter, remote, sandbox_lookup};
use crate::exit::{CliError, CliExit};
use crate::gate::background;
use crate::output;

#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  palisade tool fix read '{\"path\":\"README.md\",\"limit\":20}'
  palisade tool fix grep '{\"pattern\":\"TODO\",\"glob\":\"*.rs\"}'
  palisade tool fix edit '{\"path\":\"a.txt\",\"oldText\":\"one\",\"newText\":\"two\"}'
  palisade tool fix write - < request.json
  palisade tool fix bash '{\"command\":\"make test\",\"timeoutSeconds\":60}'

The tool runs in the sandbox, as the agent. Its result is JSON; bash prints the command's output
and exits with its exit code (124 after a timeout). docs/workbench.md has every field.")]
pub struct ToolArgs {
    /// Sandbox name or id
    pub name: String,
    /// The tool
    #[arg(value_parser = ["bash", "read", "write", "edit", "ls", "find", "grep"])]
    pub tool: String,
    /// Arguments of the tool as JSON; '-' reads them from stdin
    #[arg(default_value = "{}")]
    pub request: String,
}

pub fn run(args: &ToolArgs, global: &Global) -> Result<CliExit> {
    call(args, global).context("tool failed")
}

fn call(args: &ToolArgs, global: &Global) -> Result<CliExit> {
    let mut text = args.request.clone();
    if text == "-" {
        text.clear();
        std::io::stdin().read_to_string(&mut text)?;
    }
    let request: Value = serde_json::from_str(&text).map_err(|error| {
        CliError::new(
            CliExit::Usage,
            format!("the request is not valid JSON: {error}"),
        )
    })?;
    let paths = global.paths()?;
    block_on(async {
        let gate = background::client(&paths, global.verbose).await?;
        let sandbox = sandbox_lookup::find(&gate, &args.name).await?;
        // The gate records the session, as for every command in a sandbox.
        enter::begin_session(&gate, &sandbox, Purpose::Exec).await?;
        let client = if sandbox.is_remote() {
            WorkbenchClient::for_container(&remote::settings(&sandbox.id, global)?)?
        } else {
            control::workbench::client(&enter::backend(&paths), &sandbox.id)?
        };
        call_tool(&client, &args.tool, &request).await
    })
    .map_err(escape_error)
}

/// Escapes the error message of a tool, which comes from the sandbox.
fn escape_error(error: anyhow::Error) -> anyhow::Error {
    match error.downcast::<WorkbenchClientError>() {
        Ok(WorkbenchClientError::Refused(message)) => {
            CliError::new(CliExit::Failed, output::safe(&message)).into()
        }
        Ok(other) => other.into(),
        Err(other) => other,
    }
}

async fn call_tool(client: &WorkbenchClient, tool: &str, request: &Value) -> Result<CliExit> {
    if tool != "bash" {
        output::print_json(&client.call_tool(tool, request).await?)?;
        return Ok(CliExit::Ok);
    }
    let request: BashRequest = serde_json::from_value(request.clone())
        .map_err(|error| CliError::new(CliExit::Usage, error.to_string()))?;
    let mut events = client.bash(&request).await?;
    loop {
        match events.next().await? {
            CommandEvent::Output(stream, chunk) => {
                let bytes = match chunk {
                    OutputChunk::Text(text) => text.into_bytes(),
                    OutputChunk::Bytes(bytes) => bytes,
                };
                match stream {
                    CommandStream::Stdout => output::write_out(&bytes)?,
                    CommandStream::Stderr => std::io::stderr().lock().write_all(&bytes)?,
                }
            }
            CommandEvent::Done {
                timed_out: true, ..
            } => return Ok(CliExit::TimedOut),
            CommandEvent::Done { exit_code, .. } => {
                return Ok(CliExit::Command(u8::try_from(exit_code).unwrap_or(1)));
            }
            CommandEvent::Failed(why) => return Err(WorkbenchClientError::Refused(why).into()),
        }
    }
}
