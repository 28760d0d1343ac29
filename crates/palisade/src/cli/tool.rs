//! `palisade tool`: one call of a coding tool inside a sandbox.

use std::io::{Read, Write};

use anyhow::{Context, Result};
use clap::Args;
use control::body::Purpose;
use serde_json::Value;
use workbench::client::{WorkbenchClient, WorkbenchClientError};
use workbench::request::BashRequest;
use workbench::tools::bash::{CommandEvent, CommandStream, OutputChunk};

use crate::cli::{Global, block_on, enter, remote, sandbox_lookup};
use crate::exit::{Exit, Failure};
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

The tool runs inside, as the agent. Its result is JSON; bash's output is the command's own, and
so is the exit code (124 after its time-out). docs/workbench.md has every field.")]
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

pub fn run(args: &ToolArgs, global: &Global) -> Result<Exit> {
    call(args, global).context("tool failed")
}

fn call(args: &ToolArgs, global: &Global) -> Result<Exit> {
    let mut text = args.request.clone();
    if text == "-" {
        text.clear();
        std::io::stdin().read_to_string(&mut text)?;
    }
    let request: Value = serde_json::from_str(&text)
        .map_err(|error| Failure::new(Exit::Usage, format!("the request is no JSON: {error}")))?;
    let paths = global.paths()?;
    block_on(async {
        let gate = background::client(&paths, global.verbose).await?;
        let place = sandbox_lookup::find(&gate, &args.name).await?;
        // On record, as every command inside.
        enter::begin_session(&gate, &place, Purpose::Exec).await?;
        let client = if place.is_elsewhere() {
            WorkbenchClient::of(&remote::settings(&place.id, global)?)?
        } else {
            control::workbench::client(&enter::backend(&paths), &place.id)?
        };
        ask(&client, &args.tool, &request).await
    })
    .map_err(in_safe_words)
}

/// What a tool says comes from inside.
fn in_safe_words(error: anyhow::Error) -> anyhow::Error {
    match error.downcast::<WorkbenchClientError>() {
        Ok(WorkbenchClientError::Refused(sentence)) => {
            Failure::new(Exit::Failed, output::safe(&sentence)).into()
        }
        Ok(other) => other.into(),
        Err(other) => other,
    }
}

async fn ask(client: &WorkbenchClient, tool: &str, request: &Value) -> Result<Exit> {
    if tool != "bash" {
        output::print_json(&client.call_tool(tool, request).await?)?;
        return Ok(Exit::Ok);
    }
    let request: BashRequest = serde_json::from_value(request.clone())
        .map_err(|error| Failure::new(Exit::Usage, error.to_string()))?;
    let mut said = client.bash(&request).await?;
    loop {
        match said.next().await? {
            CommandEvent::Output(stream, said) => {
                let bytes = match said {
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
            } => return Ok(Exit::TimedOut),
            CommandEvent::Done { exit_code, .. } => {
                return Ok(Exit::Command(u8::try_from(exit_code).unwrap_or(1)));
            }
            CommandEvent::Failed(why) => return Err(WorkbenchClientError::Refused(why).into()),
        }
    }
}
