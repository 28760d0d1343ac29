//! `palisade bridge run`, also under the name `polis-bridge`.

use std::fs::File;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::{Value, json};
use testkit::inside::{self, NetNamespace};
use testkit::leftovers::start_time;
use testkit::{output, wait};

use crate::bridge::{Bridge, initialize, messages, request};
use crate::polis_config::exchange;

const PALISADE: &str = env!("CARGO_BIN_EXE_palisade");

/// A bridge without a gate. Dropping it kills the process.
struct Standalone {
    child: Child,
    log: PathBuf,
}

impl Standalone {
    /// Starts the bridge with its log in a file, and waits until it listens.
    fn start(bridge: &Bridge, mut command: Command) -> Self {
        let log = bridge.path("bridge.log");
        command.stderr(File::create(&log).unwrap());
        let child = command.stdin(Stdio::null()).spawn().unwrap();
        let mut started = Self { child, log };
        wait::until("the bridge to listen", || {
            if let Some(status) = started.child.try_wait().unwrap() {
                panic!("the bridge ended ({status}): {}", started.stderr());
            }
            started
                .stderr()
                .contains("bridge listening on")
                .then_some(())
        });
        started
    }

    fn stderr(&self) -> String {
        std::fs::read_to_string(&self.log).unwrap()
    }

    fn end(&mut self, signal: Signal) -> Option<i32> {
        let pid = Pid::from_raw(self.child.id().cast_signed());
        kill(pid, signal).unwrap();
        let ended = || self.child.try_wait().unwrap();
        wait::until("the bridge to end", ended).code()
    }
}

impl Drop for Standalone {
    fn drop(&mut self) {
        // `kill` and `wait` fail if the process has already exited.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A program with an empty environment, whose home is the gate directory.
fn program(bridge: &Bridge, path: impl AsRef<Path>) -> Command {
    let mut command = Command::new(path.as_ref());
    command
        .env_clear()
        .env("PATH", std::env::var_os("PATH").unwrap())
        .env("HOME", bridge.gate_dir.path());
    command
}

/// `palisade bridge run` at the reserved port.
fn bridge_run(bridge: &Bridge) -> Command {
    let mut command = program(bridge, PALISADE);
    let port = bridge.address.port().to_string();
    command.args(["bridge", "run", "-p", &port]);
    command
}

fn fixture() -> String {
    testkit::mcp::fixture().to_str().unwrap().to_owned()
}

#[test]
fn seed_000_bridge_run_serves_a_command_without_configuration() {
    let bridge = Bridge::new();
    let mut command = bridge_run(&bridge);
    let fixture = testkit::mcp::fixture();
    command
        .env("FIXTURE_DIR", fixture.parent().unwrap())
        .env("DESCRIPTION", "Returns its environment.")
        .args([
            "--",
            "$FIXTURE_DIR/mcp-fixture",
            "--describe",
            "${DESCRIPTION}",
        ]);
    let running = Standalone::start(&bridge, command);

    // A single tool needs no name.
    let answer = bridge.request("POST", "/mcp", &[], &initialize());
    assert_eq!(answer.status, 200, "{}", answer.text());
    let session = bridge.session("bridge");
    let listed = session.post(&request(2, "tools/list", &json!({})));
    let listed = messages(&listed)[0]["result"]["tools"].clone();
    let echo = listed.as_array().unwrap().iter();
    let echo: Vec<&Value> = echo.filter(|tool| tool["name"] == "echo_raw").collect();
    assert_eq!(echo[0]["description"], "Returns its environment.");
    // The server inherits the environment of the command.
    let env = session.text("env", &json!({"name": "DESCRIPTION"}));
    assert!(env.contains("Returns its environment."), "{env}");
    let mut events = bridge.send("GET", "/sse", &[], "");
    assert_eq!(testkit::http::read_head(&mut events).unwrap().status, 200);
    let first = testkit::http::read_chunk(&mut events).unwrap().unwrap();
    assert!(first.starts_with(b"event: endpoint"), "{first:?}");
    let health = bridge.request("GET", "/health", &[], "");
    assert_eq!(health.status, 200, "{}", health.text());
    wait::until("the decision in the log", || {
        let log = running.stderr();
        (log.contains("tool call decided") && log.contains("name=\"env\"")).then_some(())
    });
    // No file was created in the operator's home.
    let entries = std::fs::read_dir(bridge.gate_dir.path()).unwrap();
    let names = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let mut names: Vec<String> = names.collect();
    names.sort();
    assert_eq!(names, ["bridge.log", "palisade.yaml"]);
}

#[test]
fn seed_000_bridge_run_ends_with_every_process_it_started() {
    let bridge = Bridge::new();
    for (signal, code) in [
        (Signal::SIGINT, Some(0)),
        (Signal::SIGTERM, Some(0)),
        (Signal::SIGKILL, None),
    ] {
        let mut command = bridge_run(&bridge);
        command.args(["--", &fixture(), "--stubborn"]);
        let mut running = Standalone::start(&bridge, command);
        let session = bridge.session("bridge");
        let file = bridge.path("grandchild");
        session.text("spawn_grandchild", &json!({"file": file}));
        let grandchild = wait::until("the grandchild", || std::fs::read_to_string(&file).ok());
        std::fs::remove_file(&file).unwrap();
        let grandchild = grandchild.trim().parse().unwrap();
        let started = start_time(grandchild).unwrap();
        assert_eq!(bridge.servers().len(), 1);

        assert_eq!(running.end(signal), code, "{signal}: {}", running.stderr());
        wait::until("no process to be left", || {
            let all_ended = bridge.servers().is_empty() && start_time(grandchild) != Some(started);
            all_ended.then_some(())
        });
    }
}

#[test]
fn seed_000_polis_bridge_symlink_serves_port_8090() {
    if !testkit::require_root("making a network namespace") {
        return;
    }
    let bridge = Bridge::new();
    let link = bridge.path("polis-bridge");
    std::os::unix::fs::symlink(PALISADE, &link).unwrap();
    let mut command = program(&bridge, &link);
    command.args(["--", &fixture()]);
    // Port 8090 of this machine may be taken.
    let running = Standalone::start(&bridge, inside::in_new_namespace(&command));
    let log = running.stderr();
    let address = "bridge listening on http://127.0.0.1:8090/mcp";
    assert!(log.contains(address), "{log}");
    let network = NetNamespace::of_process(running.child.id());
    let answer = exchange(&network, "POST", "/mcp", &initialize());
    assert_eq!(answer.status, 200, "{}", answer.text());
    assert_eq!(exchange(&network, "GET", "/health", "").status, 200);

    let help = program(&bridge, &link).arg("--help").output().unwrap();
    let help = output::stdout(&help);
    assert!(
        help.contains("Usage: polis-bridge [OPTIONS] <COMMAND>..."),
        "{help}"
    );
    for option in [
        "-p, --port",
        "-c <FILE>",
        "--config <FILE>",
        "-l, --log-level",
    ] {
        assert!(help.contains(option), "{option}: {help}");
    }
}

#[test]
fn seed_000_bridge_run_reads_policies_from_its_file() {
    let bridge = Bridge::new();
    let bundle = bridge.path("bundle");
    std::fs::create_dir(&bundle).unwrap();
    let policy = "package mcp.authz\n\ndefault decision := {\"action\": \"allow\"}\n\n\
                  decision := {\"action\": \"block\", \"reason\": \"No.\"} if input.name == \"who\"\n";
    std::fs::write(bundle.join("policy.rego"), policy).unwrap();
    let file = bridge.path("polis.yaml");
    let text = format!(
        "version: \"1.0\"\n\
         server: {{auth_token: \"${{BRIDGE_TOKEN}}\"}}\n\
         policies: {{bundles: [{{id: guard, path: {bundle:?}, entrypoint: mcp/authz}}]}}\n\
         tools: [{{name: other, command: [\"false\"]}}]\n"
    );
    std::fs::write(&file, text).unwrap();
    let mut command = bridge_run(&bridge);
    command
        .env("BRIDGE_TOKEN", "of-the-operator")
        .env("INHERITED", "yes");
    command
        .arg("-c")
        .arg(&file)
        .args(["-l", "warn", "--", &fixture()]);
    let mut running = Standalone::start(&bridge, command);

    let bearer = ("Authorization", "Bearer of-the-operator");
    let post = |path: &str, headers: &[(&str, &str)], body: &str| {
        let headers: Vec<_> = headers.iter().copied().chain([bearer]).collect();
        bridge.request("POST", path, &headers, body)
    };
    assert_eq!(
        bridge.request("POST", "/mcp", &[], &initialize()).status,
        401
    );
    assert_eq!(post("/mcp/other", &[], &initialize()).status, 404);
    let opened = post("/mcp", &[], &initialize());
    let session = opened.header("mcp-session-id").unwrap();
    let headers = [("Mcp-Session-Id", session)];
    let call = |name: &str, arguments: Value| {
        let params = json!({"name": name, "arguments": arguments});
        let answer = post("/mcp", &headers, &request(1, "tools/call", &params));
        let all = messages(&answer);
        let found = all.into_iter().find(|one| one["id"] == 1);
        found.unwrap_or_else(|| panic!("{}", answer.text()))["result"].clone()
    };
    assert_eq!(call("who", json!({}))["isError"], true);
    let env = call("env", json!({})).to_string();
    assert!(env.contains("INHERITED"), "{env}");
    assert!(!env.contains("of-the-operator"), "{env}");
    // Decisions are logged at level info, and the option sets the level.
    assert_eq!(running.end(Signal::SIGTERM), Some(0));
    let log = running.stderr();
    assert!(!log.contains("tool call decided"), "{log}");
}

#[test]
fn seed_000_bridge_run_refuses_invalid_arguments() {
    let bridge = Bridge::new();
    let run = |options: &[&str], arguments: &[&str]| -> Output {
        let mut command = bridge_run(&bridge);
        let command = command.args(options).arg("--").args(arguments);
        command.output().unwrap()
    };
    let fixture = fixture();
    for (options, arguments, code, message) in [
        (
            &[][..],
            &["$NOT_SET_HERE/server"][..],
            2,
            "NOT_SET_HERE is not set",
        ),
        (
            &[],
            &["no-such-server"],
            3,
            "command not found: 'no-such-server'",
        ),
        (&[], &["./no-such-server"], 3, "command not found"),
        (&[], &[], 2, "<COMMAND>"),
        (
            &["-c", "/nonexistent.yaml"],
            &[fixture.as_str()],
            2,
            "/nonexistent.yaml",
        ),
        (
            &["-l", "loud"],
            &[fixture.as_str()],
            2,
            "error, warn, info, debug, trace",
        ),
    ] {
        let output = run(options, arguments);
        let stderr = output::stderr(&output);
        assert_eq!(output.status.code(), Some(code), "{arguments:?}: {stderr}");
        assert!(stderr.contains(message), "{arguments:?}: {stderr}");
    }
    let _taken = TcpListener::bind(bridge.address).unwrap();
    let output = run(&[], &[&fixture]);
    let stderr = output::stderr(&output);
    assert_eq!(output.status.code(), Some(1), "{stderr}");
    assert!(stderr.contains(&bridge.address.to_string()), "{stderr}");
    assert!(stderr.contains("choose another port with -p"), "{stderr}");
}
