//! `palisade registry …`.

use std::path::PathBuf;

use anyhow::Result;
use clap::Subcommand;
use control::client::ControlClient;
use policy::registration::Repo;
use serde_json::{Value, json};

use crate::cli::{Global, block_on, confirm, credentials, repo_limit};
use crate::exit::{CliError, CliExit};
use crate::gate::background;
use crate::output;

#[derive(Debug, Subcommand)]
pub enum RegistryCommand {
    /// List registrations
    List,
    /// Register a container by its address
    Add {
        /// The container's id
        id: String,
        /// The container's address on the shared network
        #[arg(long)]
        ip: std::net::IpAddr,
        /// Repository that the container may use, with an optional push limit such as
        /// owner/name:500MiB (repeatable)
        #[arg(long = "repo", value_name = "OWNER/NAME[:SIZE]", value_parser = repo_limit::read)]
        repos: Vec<Repo>,
        /// Identity for git push: user or bot
        #[arg(long, default_value = "user", value_parser = ["user", "bot"])]
        auth_mode: String,
        /// The container trusts the gate's root certificate, so that refusals can be sent over
        /// TLS
        #[arg(long)]
        trusts_ca: bool,
        /// End of the registration, such as 2026-12-31T00:00:00Z [default: in 24 hours]
        #[arg(long, value_name = "TIME")]
        expires_at: Option<String>,
        /// Credential that the gate adds to the container's requests (repeatable) [default: those
        /// of credentials.default that have a value]
        #[arg(long = "credential", value_name = "NAME")]
        credentials: Vec<String>,
        /// If another container is registered with this address, replace its registration
        #[arg(long)]
        replace: bool,
    },
    /// End a registration
    Remove {
        /// The container's id
        id: String,
    },
    /// Copy the database to a new file while the gate runs
    Backup {
        /// The file; must not exist
        file: PathBuf,
    },
    /// Replace the database with a backup; the current database is kept beside it
    Restore {
        /// A file that `registry backup` wrote
        file: PathBuf,
        /// Do not ask for confirmation
        #[arg(long, short)]
        yes: bool,
    },
    /// Start with an empty database; the current database is kept beside it
    Reset {
        /// Do not ask for confirmation
        #[arg(long, short)]
        yes: bool,
    },
}

pub fn run(command: RegistryCommand, global: &Global) -> Result<CliExit> {
    let paths = global.paths()?;
    block_on(async {
        let gate = background::client(&paths, global.verbose).await?;
        let answer = request(&gate, command).await?;
        if global.json {
            output::print_json(&answer)?;
        } else {
            output::print_line(&describe(&answer))?;
        }
        Ok(CliExit::Ok)
    })
}

async fn request(gate: &ControlClient, command: RegistryCommand) -> Result<Value> {
    let file =
        |path: PathBuf| -> Result<Value> { Ok(json!({ "path": std::path::absolute(path)? })) };
    Ok(match command {
        RegistryCommand::List => gate.get("/v1/registrations").await?,
        RegistryCommand::Add {
            id,
            ip,
            repos,
            auth_mode,
            trusts_ca,
            expires_at,
            credentials,
            replace,
        } => {
            let metadata = if trusts_ca {
                json!({ "trusts_ca": true })
            } else {
                json!({})
            };
            let body = json!({
                "container_id": id, "container_ip": ip, "repos": repos,
                "auth_mode": auth_mode, "expires_at": expires_at, "metadata": metadata,
                "replace": replace,
                "credentials": (!credentials.is_empty()).then_some(credentials),
            });
            credentials::offer_variables(gate).await?;
            gate.post("/v1/registrations", &body).await?
        }
        RegistryCommand::Remove { id } => {
            policy::id::SandboxId::parse(&id)
                .map_err(|error| CliError::new(CliExit::Usage, error.to_string()))?;
            gate.delete(&format!("/v1/registrations/{id}")).await?
        }
        RegistryCommand::Backup { file: path } => {
            gate.post("/v1/registry/backup", &file(path)?).await?
        }
        RegistryCommand::Restore { file: path, yes } => {
            if !path.exists() {
                let message = format!("{} does not exist", path.display());
                return Err(CliError::new(CliExit::NotFound, message).into());
            }
            confirm(
                "This replaces every registration and the audit log by those of the backup.",
                yes,
            )?;
            gate.post("/v1/registry/restore", &file(path)?).await?
        }
        RegistryCommand::Reset { yes } => {
            confirm(
                "This removes every registration and starts an empty audit log.",
                yes,
            )?;
            gate.post("/v1/registry/reset", &json!({})).await?
        }
    })
}

fn describe(answer: &Value) -> String {
    let text = |value: &Value, name: &str| {
        value
            .get(name)
            .and_then(Value::as_str)
            .unwrap_or_default()
            .to_owned()
    };
    let Value::Array(rows) = answer else {
        let id = text(answer, "container_id");
        let path = text(answer, "path");
        let subject = if id.is_empty() { path } else { id };
        let mut line = format!("{} {subject}", text(answer, "status"));
        let replaced = text(answer, "replaced");
        if !replaced.is_empty() {
            line.push_str(&format!(", replacing {replaced}"));
        }
        return output::safe(line.trim_end());
    };
    if rows.is_empty() {
        return "no registrations".to_owned();
    }
    let cells = |row: &Value| {
        let repos = row
            .get("repos")
            .and_then(Value::as_array)
            .map(Vec::as_slice)
            .unwrap_or_default();
        let repos = repos.iter().filter_map(|repo| {
            let repo: Repo = serde_json::from_value(repo.clone()).ok()?;
            Some(repo_limit::show(&repo))
        });
        let repos: Vec<String> = repos.collect();
        vec![
            text(row, "container_id"),
            text(row, "container_ip"),
            text(row, "auth_mode"),
            repos.join(","),
            text(row, "expires_at"),
        ]
    };
    let rows: Vec<Vec<String>> = rows.iter().map(cells).collect();
    output::table(&["ID", "ADDRESS", "MODE", "REPOSITORIES", "EXPIRES"], &rows)
}
