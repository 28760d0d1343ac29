//! `palisade why` and `palisade policy try`: explain a past decision, and try a request.

use anyhow::Result;
use clap::Args;
use policy::id::RequestId;
use serde_json::{Map, Value, json};

use crate::cli::{Global, block_on, sandbox_lookup};
use crate::exit::{CliError, CliExit};
use crate::gate::background;
use crate::output;

#[derive(Debug, Args)]
#[command(after_help = "\
The id is in the refusal's JSON, in its header x-palisade-request-id, and in the audit log:
  palisade audit list --verdict deny")]
pub struct WhyArgs {
    /// The request's id: 26 letters and digits
    pub request_id: String,
}

#[derive(Debug, Args)]
pub struct TryArgs {
    /// The URL
    pub url: String,
    /// The method
    #[arg(long, short = 'X', default_value = "GET")]
    pub method: String,
    /// Sandbox that sends the request
    #[arg(long, value_name = "NAME")]
    pub sandbox: Option<String>,
    /// Program in the sandbox that sends the request
    #[arg(long, value_name = "PATH")]
    pub program: Option<String>,
}

/// Runs `palisade why`.
pub fn why(args: &WhyArgs, global: &Global) -> Result<CliExit> {
    let id = RequestId::parse(&args.request_id).map_err(|_| {
        let message = format!(
            "'{}' is not a request id (26 letters and digits); to list ids: palisade audit list",
            output::safe(&args.request_id)
        );
        CliError::new(CliExit::Usage, message)
    })?;
    let paths = global.paths()?;
    block_on(async {
        let gate = background::client(&paths, global.verbose).await?;
        let answer = gate.get(&format!("/v1/requests/{id}")).await?;
        if global.json {
            output::print_json(&answer)?;
        } else {
            output::print_line(&explain(&answer))?;
        }
        Ok(CliExit::Ok)
    })
}

/// Runs `palisade policy try`.
pub fn try_request(args: &TryArgs, global: &Global) -> Result<CliExit> {
    let paths = global.paths()?;
    block_on(async {
        let gate = background::client(&paths, global.verbose).await?;
        let mut body = Map::new();
        body.insert("url".to_owned(), json!(args.url));
        body.insert("method".to_owned(), json!(args.method));
        if let Some(name) = &args.sandbox {
            let sandbox = sandbox_lookup::find(&gate, name).await?;
            body.insert("sandbox".to_owned(), json!(sandbox.id));
        }
        if let Some(program) = &args.program {
            body.insert("program".to_owned(), json!(program));
        }
        let answer = gate.post("/v1/policy/try", &body.into()).await?;
        if global.json {
            output::print_json(&answer)?;
        } else {
            output::print_line(&explain(&answer))?;
        }
        let allowed = answer.get("verdict").and_then(Value::as_str) == Some("allow");
        Ok(if allowed {
            CliExit::Ok
        } else {
            CliExit::Denied
        })
    })
}

/// A decision as text: one line with the verdict, then one line for each detail.
fn explain(answer: &Value) -> String {
    let text = |key: &str| -> Option<String> {
        match answer.get(key)? {
            Value::Null => None,
            Value::String(text) => Some(output::safe(text)),
            other => Some(other.to_string()),
        }
    };
    let verdict = match text("verdict").as_deref() {
        Some("allow") if text("reason").is_some() => "allowed, but failed",
        Some("allow") => "allowed",
        Some("deny") => "refused",
        _ => "not decided",
    };
    let mut request = String::new();
    if let Some(method) = text("method") {
        request = format!(": {method} {}", text("host").unwrap_or_default());
        if let Some(port) = text("port") {
            request = format!("{request}:{port}");
        }
        request += &text("path").unwrap_or_default();
    }
    let mut lines = vec![format!("{verdict}{request}")];
    for (key, label) in [
        ("reason", "reason"),
        ("says", "meaning"),
        ("rule", "rule"),
        ("error", "message"),
        ("told", "message"),
        ("evidence", "evidence"),
        ("stage", "stage"),
        ("status", "status"),
        ("sandbox", "sandbox"),
        ("at", "at"),
        ("alike", "count"),
    ] {
        let is_single = key == "alike" && text(key).as_deref() == Some("1");
        if let Some(value) = text(key).filter(|_| !is_single) {
            lines.push(format!("  {label:<9} {value}"));
        }
    }
    if answer.get("unread").and_then(Value::as_bool) == Some(true) {
        lines.push("  unread    tunnel: only host and port are checked".to_owned());
    }
    lines.join("\n")
}
