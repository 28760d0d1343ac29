//! Tools that test what a bridge must relay unchanged and what it must survive.

use std::collections::BTreeMap;
use std::io::Write;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::atomic::Ordering;
use std::time::Duration;

use serde::Deserialize;
use serde_json::value::RawValue;
use serde_json::{Value, json};

use crate::conformance;
use crate::server::{Call, Cancelled};
use crate::wire::Outcome;

/// Whether the tool needs a thread: it takes time, or sends a request to the client.
pub(crate) fn needs_thread(name: &str) -> bool {
    match name {
        "echo_raw" | "who" | "env" | "big" | "stderr_lines" | "list_changed" | "log" => false,
        _ => conformance::needs_thread(name),
    }
}

/// Calls a tool.
pub(crate) fn call(call: &Call) -> Result<Outcome, Cancelled> {
    let name = call
        .params
        .get("name")
        .and_then(Value::as_str)
        .unwrap_or("");
    Ok(match name {
        "echo_raw" => echo(&call.raw),
        "sleep" => {
            call.pause(Duration::from_millis(call.number("ms", 100)))?;
            Outcome::text("Slept.")
        }
        "crash" => crash(call),
        "hang" => loop {
            std::thread::park();
        },
        "flood" => flood(call),
        "spawn_grandchild" => grandchild(call.text("file")),
        "env" => environment(call.text("name")),
        "progress" => progress(call)?,
        "cancellable" => cancellable(call)?,
        "stderr_lines" => stderr(call),
        "big" => big(call.number("bytes", 1 << 20)),
        "list_changed" => list_changed(call),
        "log" => log(call),
        "who" => who(call),
        "ask" => ask(call)?,
        _ => match conformance::call(name, call)? {
            Some(outcome) => outcome,
            None => Outcome::invalid(format!("Unknown tool: {name}")),
        },
    })
}

#[derive(Deserialize)]
struct Raw<'a> {
    #[serde(borrow, default)]
    arguments: Option<&'a RawValue>,
}

/// The raw params as a text, and the raw arguments as a value.
fn echo(raw: &str) -> Outcome {
    let arguments = serde_json::from_str::<Raw<'_>>(raw).ok();
    let arguments = arguments.and_then(|raw| raw.arguments);
    let arguments = arguments.map_or("{}", RawValue::get);
    let text = Value::from(raw);
    Outcome::Result(format!(
        r#"{{"content":[{{"type":"text","text":{text}}}],"structuredContent":{arguments}}}"#
    ))
}

fn crash(call: &Call) -> Outcome {
    if call.argument("before") != true {
        call.server
            .write_bytes(br#"{"jsonrpc":"2.0","id":1,"result":{"content":[{"type":"te"#);
    }
    let code = i32::try_from(call.number("code", 7)).unwrap_or(7);
    std::process::exit(code);
}

fn flood(call: &Call) -> Outcome {
    let lines = call.number("lines", 1000);
    for number in 0..lines {
        call.server
            .write_lines(&format!("junk {number}: this is no JSON-RPC"));
    }
    let bytes = usize::try_from(call.number("bytes", 0)).unwrap_or(0);
    if bytes > 0 {
        call.server.write_lines(&"x".repeat(bytes));
    }
    Outcome::text("Flooded.")
}

/// Starts a process in a session of its own, which a kill of the process group does not reach.
fn grandchild(file: &str) -> Outcome {
    let started = Command::new("setsid")
        .args([
            "sh",
            "-c",
            "echo $$ >\"$0.new\" && mv \"$0.new\" \"$0\" && exec sleep 3600",
        ])
        .arg(file)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn();
    match started {
        Ok(_) => Outcome::text("Started."),
        Err(error) => Outcome::failed(&error.to_string()),
    }
}

fn environment(name: &str) -> Outcome {
    if name.is_empty() {
        let all: BTreeMap<String, String> = std::env::vars().collect();
        return Outcome::text(json!(all).to_string());
    }
    Outcome::text(std::env::var(name).unwrap_or_default())
}

fn progress(call: &Call) -> Result<Outcome, Cancelled> {
    let steps = call.number("steps", 3);
    for step in 1..=steps {
        call.pause(Duration::from_millis(call.number("ms", 10)))?;
        call.progress(step, steps);
    }
    // Some clients ignore progress that arrives with the result.
    let file = call.text("until");
    while !file.is_empty() && !Path::new(file).exists() {
        call.pause(Duration::from_millis(5))?;
    }
    Ok(Outcome::text("Done."))
}

/// Writes 'started', and later the raw params of `notifications/cancelled`.
fn cancellable(call: &Call) -> Result<Outcome, Cancelled> {
    let file = call.text("file").to_owned();
    let note = |line: &str| {
        let mut options = std::fs::OpenOptions::new();
        let file = options.create(true).append(true).open(&file);
        file.and_then(|mut file| writeln!(file, "{line}"))
    };
    if let Err(error) = note("started") {
        return Ok(Outcome::failed(&error.to_string()));
    }
    call.progress(1, 2);
    let cancelled = call.cancelled();
    let _ = note(&cancelled.0);
    Err(cancelled)
}

fn stderr(call: &Call) -> Outcome {
    let text = match call.text("text") {
        "" => "a line on stderr",
        text => text,
    };
    for number in 0..call.number("count", 3) {
        eprintln!("{text} {number}");
    }
    Outcome::text("Written.")
}

fn big(bytes: u64) -> Outcome {
    match usize::try_from(bytes) {
        Ok(bytes) if bytes <= 1 << 30 => Outcome::text("x".repeat(bytes)),
        _ => Outcome::failed("too much"),
    }
}

/// Notifies about a change of the list that the argument `what` names (tools, prompts, resources),
/// or of the resource with that URI.
fn list_changed(call: &Call) -> Outcome {
    match call.text("what") {
        what @ ("tools" | "prompts" | "resources") => {
            let method = format!("notifications/{what}/list_changed");
            call.server.notify(&method, &Value::Null);
        }
        "" => call
            .server
            .notify("notifications/tools/list_changed", &Value::Null),
        uri if call.server.is_subscribed(uri) => {
            call.server
                .notify("notifications/resources/updated", &json!({"uri": uri}));
        }
        _ => return Outcome::text("No such list."),
    }
    Outcome::text("Changed.")
}

fn log(call: &Call) -> Outcome {
    let level = match call.text("level") {
        "" => "info",
        level => level,
    };
    for _ in 0..call.number("count", 1) {
        call.server.log(level, &json!(call.text("text")));
    }
    Outcome::text("Logged.")
}

fn who(call: &Call) -> Outcome {
    let sessions = call.server.sessions.load(Ordering::Relaxed);
    let directory = std::env::current_dir().unwrap_or_default();
    Outcome::text(
        json!({
            "pid": std::process::id(),
            "sessions": sessions,
            "directory": directory,
            "client": call.server.client_capabilities(),
        })
        .to_string(),
    )
}

fn ask(call: &Call) -> Result<Outcome, Cancelled> {
    let params = match call.argument("params") {
        Value::Object(params) => Value::Object(params.clone()),
        _ => json!({}),
    };
    let question = (call.text("method"), params, call.text("key"));
    Ok(match call.send_request(question)? {
        Ok(answer) => Outcome::text(json!({"result": answer}).to_string()),
        Err(error) => Outcome::text(json!({"error": error}).to_string()),
    })
}
