//! `palisade credentials …`: names, states and grants of credentials, never values.

use std::collections::BTreeMap;

use anyhow::Result;
use clap::{Args, Subcommand};
use control::client::ControlClient;
use serde_json::{Value, json};

use crate::cli::{Global, block_on, sandbox_lookup};
use crate::exit::{CliError, CliExit};
use crate::gate::background;
use crate::output;

#[derive(Debug, Subcommand)]
pub enum CredentialsCommand {
    /// List credentials: whether they have a value, their hosts, and who may use them
    #[command(after_help = "Example:\n  palisade credentials list   values are never shown")]
    List,
    /// Read a credential's value and report whether that works
    #[command(
        after_help = "Example:\n  palisade credentials test github   also runs its command, if it has one"
    )]
    Test {
        /// Name of the credential
        name: String,
    },
    /// Let a sandbox or container use credentials
    #[command(after_help = "Example:\n  palisade credentials grant fix npm github")]
    Grant(CredentialGrantArgs),
    /// Stop a sandbox or container from using credentials
    #[command(after_help = "Example:\n  palisade credentials revoke fix npm")]
    Revoke(CredentialGrantArgs),
}

#[derive(Debug, Args)]
pub struct CredentialGrantArgs {
    /// Sandbox name or id, or the id of a registered container
    pub sandbox: String,
    /// Names of credentials
    #[arg(required = true)]
    pub credentials: Vec<String>,
}

pub fn run(command: CredentialsCommand, global: &Global) -> Result<CliExit> {
    let paths = global.paths()?;
    block_on(async {
        let gate = background::client(&paths, global.verbose).await?;
        offer_variables(&gate).await?;
        match command {
            CredentialsCommand::List => list(&gate, global).await,
            CredentialsCommand::Test { name } => test(&gate, &name, global).await,
            CredentialsCommand::Grant(args) => {
                let body = json!({ "grant": args.credentials });
                change(&gate, &args.sandbox, &body, global).await
            }
            CredentialsCommand::Revoke(args) => {
                let body = json!({ "revoke": args.credentials });
                change(&gate, &args.sandbox, &body, global).await
            }
        }
    })
}

/// Passes on the variables of this process that credentials read: the gate may have been started
/// in another environment.
pub async fn offer_variables(gate: &ControlClient) -> Result<()> {
    let rows = gate.get("/v1/credentials").await?;
    let sources = rows.as_array().into_iter().flatten();
    let sources = sources
        .filter_map(|row| row.get("sources")?.as_array())
        .flatten();
    let names = sources.filter_map(|source| source.get("variable")?.as_str());
    let set = names.filter_map(|name| {
        let value = std::env::var(name).ok()?;
        (!value.is_empty()).then(|| (name.to_owned(), value))
    });
    let variables: BTreeMap<String, String> = set.collect();
    if !variables.is_empty() {
        gate.post("/v1/credentials/variables", &json!(variables))
            .await?;
    }
    Ok(())
}

async fn list(gate: &ControlClient, global: &Global) -> Result<CliExit> {
    let rows = gate.get("/v1/credentials").await?;
    if global.json {
        output::print_json(&rows)?;
        return Ok(CliExit::Ok);
    }
    let mut lines = Vec::new();
    for row in rows.as_array().into_iter().flatten() {
        let texts = |key: &str| {
            let items = row.get(key).and_then(Value::as_array).into_iter().flatten();
            items
                .filter_map(Value::as_str)
                .collect::<Vec<_>>()
                .join(", ")
        };
        let flag = |key: &str| row.get(key).and_then(Value::as_bool).unwrap_or_default();
        let state = match (flag("configured"), flag("default")) {
            (true, true) => "ready, default",
            (true, false) => "ready",
            (false, _) => "not set",
        };
        let sources = row
            .get("sources")
            .and_then(Value::as_array)
            .into_iter()
            .flatten();
        let sources = sources.filter_map(|one| {
            one.get("variable")?
                .as_str()
                .or(one.get("source")?.as_str())
        });
        let name = row.get("name").and_then(Value::as_str).unwrap_or_default();
        let cells = [
            name.to_owned(),
            state.to_owned(),
            texts("hosts"),
            sources.collect::<Vec<_>>().join(", "),
            texts("granted_to"),
        ];
        lines.push(cells.to_vec());
    }
    let heading = ["NAME", "STATE", "HOSTS", "SOURCE", "GRANTED TO"];
    output::print_line(&output::table(&heading, &lines))?;
    Ok(CliExit::Ok)
}

async fn test(gate: &ControlClient, name: &str, global: &Global) -> Result<CliExit> {
    let name = name.to_owned();
    if name.is_empty() || name.contains(['/', '?', '#', '%']) {
        let message = format!("'{}' is not the name of a credential", output::safe(&name));
        return Err(CliError::new(CliExit::Usage, message).into());
    }
    let route = format!("/v1/credentials/{name}/test");
    let answer = gate.post(&route, &json!({})).await?;
    if global.json {
        output::print_json(&answer)?;
    } else {
        let text = |key: &str| answer.get(key).and_then(Value::as_str).unwrap_or_default();
        let line = format!("{name}: {} ({})", text("status"), text("detail"));
        output::print_line(&output::safe(&line))?;
    }
    match answer.get("status").and_then(Value::as_str) {
        Some("ok") => Ok(CliExit::Ok),
        _ => Ok(CliExit::Failed),
    }
}

async fn change(
    gate: &ControlClient,
    sandbox: &str,
    body: &Value,
    global: &Global,
) -> Result<CliExit> {
    let id = match sandbox_lookup::find(gate, sandbox).await {
        Ok(found) => found.id,
        // A container that was registered by its address.
        Err(error) => policy::id::SandboxId::parse(sandbox).map_err(|_| error)?,
    };
    let answer = gate
        .post(&format!("/v1/registrations/{id}/credentials"), body)
        .await?;
    if global.json {
        output::print_json(&answer)?;
        return Ok(CliExit::Ok);
    }
    let granted = answer
        .get("credentials")
        .and_then(Value::as_array)
        .into_iter()
        .flatten();
    let granted: Vec<&str> = granted.filter_map(Value::as_str).collect();
    let granted = match granted.is_empty() {
        true => "none".to_owned(),
        false => granted.join(", "),
    };
    output::print_line(&format!(
        "credentials of {}: {granted}",
        output::safe(sandbox)
    ))?;
    Ok(CliExit::Ok)
}
