//! The official clients, and the reference servers behind the bridge.

use std::process::{Command, Output};

use testkit::mcp::peers;
use testkit::output;

use crate::bridge::{Bridge, node, test_file};

/// The client under test.
#[derive(Clone, Copy, Debug)]
enum Client {
    Python,
    TypeScript,
}

impl Client {
    /// The transports of the client, with the path of each.
    fn transports(self) -> &'static [(&'static str, &'static str)] {
        match self {
            Client::Python => &[("http", "/mcp/"), ("handshake", "/mcp/"), ("sse", "/sse")],
            Client::TypeScript => &[("http", "/mcp/"), ("sse", "/sse")],
        }
    }

    fn run(self, bridge: &Bridge, transport: &str, path: &str, server: &str) -> Output {
        let (mut command, program) = match self {
            Client::Python => (Command::new(peers().join("venv/bin/python")), "client.py"),
            Client::TypeScript => (node(), "client.mjs"),
        };
        let path = match path {
            "/mcp/" => format!("/mcp/{server}"),
            path => path.to_owned(),
        };
        command
            .arg(test_file("clients").join(program))
            .arg(format!("http://{}{path}", bridge.address))
            .args([transport, server])
            .arg(bridge.path("work"))
            .env("PALISADE_MCP", peers());
        command.output().unwrap()
    }
}

/// Runs a client over all its transports against a server behind the bridge, and asserts that it
/// reports `checks`.
fn run_client(
    client: Client,
    server: &str,
    bridge: &Bridge,
    checks: impl Fn(&str) -> Vec<&'static str>,
) {
    let _gate = bridge.start();
    for (transport, path) in client.transports() {
        let output = client.run(bridge, transport, path, server);
        let stdout = output::stdout(&output);
        let passed: Vec<&str> = stdout
            .lines()
            .filter_map(|line| line.strip_prefix("ok "))
            .collect();
        assert!(
            output.status.success() && passed == checks(transport),
            "{client:?} over {transport}: {passed:?}\n{}",
            output::stderr(&output)
        );
    }
}

fn with_work_dir(bridge: Bridge) -> Bridge {
    std::fs::create_dir(bridge.path("work")).unwrap();
    bridge
}

/// The checks of the clients against `server-everything`.
const EVERYTHING_CHECKS: [&str; 7] = [
    "tools",
    "image",
    "resources",
    "prompts",
    "sampling",
    "elicitation",
    "progress",
];

fn everything(client: Client) {
    let program =
        peers().join("node_modules/@modelcontextprotocol/server-everything/dist/index.js");
    let node = peers().join("node_modules/.bin/node");
    let command = [node.to_str().unwrap(), program.to_str().unwrap()];
    let bridge = with_work_dir(Bridge::new().tool("everything", &command, ""));
    run_client(client, "everything", &bridge, |_| {
        EVERYTHING_CHECKS.to_vec()
    });
}

fn filesystem(client: Client) {
    let program =
        peers().join("node_modules/@modelcontextprotocol/server-filesystem/dist/index.js");
    let node = peers().join("node_modules/.bin/node");
    let bridge = with_work_dir(Bridge::new());
    let allowed = bridge.path("work");
    let command = [&node, &program, &allowed].map(|path| path.to_str().unwrap().to_owned());
    let command = command.each_ref().map(String::as_str);
    let bridge = bridge.tool("filesystem", &command, "");
    run_client(client, "filesystem", &bridge, |_| {
        vec!["tools", "files", "refusal"]
    });
}

fn git(client: Client) {
    let program = peers().join("venv/bin/mcp-server-git");
    let bridge = with_work_dir(Bridge::new());
    let run = |args: &[&str]| {
        let mut command = Command::new("git");
        command.arg("-C").arg(bridge.path("work")).args(args);
        let output = command.output().unwrap();
        assert!(output.status.success(), "{}", output::stderr(&output));
    };
    run(&["init", "-q"]);
    let identity = ["-c", "user.name=Test", "-c", "user.email=test@example.com"];
    run(&[
        &identity[..],
        &["commit", "-q", "--allow-empty", "-m", "A first commit"],
    ]
    .concat());
    let work = bridge.path("work");
    let command = [
        program.to_str().unwrap(),
        "--repository",
        work.to_str().unwrap(),
    ];
    let bridge = bridge.tool("git", &command, "");
    run_client(client, "git", &bridge, |_| vec!["tools", "repository"]);
}

fn time(client: Client) {
    let program = peers().join("venv/bin/mcp-server-time");
    let command = [program.to_str().unwrap(), "--local-timezone", "UTC"];
    let bridge = with_work_dir(Bridge::new().tool("time", &command, ""));
    run_client(client, "time", &bridge, |_| vec!["tools", "conversion"]);
}

#[test]
fn python_client_uses_all_features_of_the_fixture_server() {
    let bridge = with_work_dir(Bridge::with_fixture());
    run_client(Client::Python, "fixture", &bridge, |transport| {
        let mut checks = vec![
            "version",
            "tools",
            "resources",
            "prompts",
            "sampling",
            "elicitation",
            "roots",
            "progress",
            "logging",
            "cancel",
            "error",
        ];
        // This client does not reconnect over the older transport, and the newest revision has
        // no stream to resume.
        checks.extend((transport == "handshake").then_some("resume"));
        checks
    });
}

#[test]
fn typescript_client_uses_all_features_of_the_fixture_server() {
    let bridge = with_work_dir(Bridge::with_fixture());
    run_client(Client::TypeScript, "fixture", &bridge, |transport| {
        let mut checks = vec![
            "tools",
            "resources",
            "prompts",
            "sampling",
            "elicitation",
            "roots",
            "progress",
            "logging",
            "list changed",
            "subscription",
            "cancel",
            "error",
            "concurrency",
        ];
        checks.extend((transport == "http").then_some("resume"));
        checks
    });
}

#[test]
fn python_client_uses_server_everything() {
    everything(Client::Python);
}

#[test]
fn typescript_client_uses_server_everything() {
    everything(Client::TypeScript);
}

#[test]
fn python_client_uses_server_filesystem() {
    filesystem(Client::Python);
}

#[test]
fn typescript_client_uses_server_filesystem() {
    filesystem(Client::TypeScript);
}

#[test]
fn python_client_uses_server_git() {
    git(Client::Python);
}

#[test]
fn typescript_client_uses_server_git() {
    git(Client::TypeScript);
}

#[test]
fn python_client_uses_server_time() {
    time(Client::Python);
}

#[test]
fn typescript_client_uses_server_time() {
    time(Client::TypeScript);
}
