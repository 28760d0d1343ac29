//! The official clients, and the reference servers behind the bridge.

use std::process::{Command, Output};

use testkit::mcp::peers;
use testkit::output;

use crate::bridge::{Bridge, node, source};

/// The client under test.
#[derive(Clone, Copy, Debug)]
enum Client {
    Python,
    TypeScript,
}

impl Client {
    /// The transports of the client, with the path of each.
    fn ways(self) -> &'static [(&'static str, &'static str)] {
        match self {
            Client::Python => &[("http", "/mcp/"), ("handshake", "/mcp/"), ("sse", "/sse")],
            Client::TypeScript => &[("http", "/mcp/"), ("sse", "/sse")],
        }
    }

    fn run(self, bridge: &Bridge, way: &str, path: &str, server: &str) -> Output {
        let (mut command, program) = match self {
            Client::Python => (Command::new(peers().join("venv/bin/python")), "drive.py"),
            Client::TypeScript => (node(), "drive.mjs"),
        };
        let path = match path {
            "/mcp/" => format!("/mcp/{server}"),
            path => path.to_owned(),
        };
        command
            .arg(source("clients").join(program))
            .arg(format!("http://{}{path}", bridge.address))
            .args([way, server])
            .arg(bridge.path("work"))
            .env("PALISADE_MCP", peers());
        command.output().unwrap()
    }
}

/// Every transport of a client to a server behind the bridge shows the expected results.
fn drive(
    client: Client,
    server: &str,
    bridge: &Bridge,
    checks: impl Fn(&str) -> Vec<&'static str>,
) {
    let _gate = bridge.start();
    for (way, path) in client.ways() {
        let output = client.run(bridge, way, path, server);
        let said = output::stdout(&output);
        let held: Vec<&str> = said
            .lines()
            .filter_map(|line| line.strip_prefix("ok "))
            .collect();
        assert!(
            output.status.success() && held == checks(way),
            "{client:?} over {way}: {held:?}\n{}",
            output::stderr(&output)
        );
    }
}

fn work(bridge: Bridge) -> Bridge {
    std::fs::create_dir(bridge.path("work")).unwrap();
    bridge
}

const EVERYTHING: [&str; 7] = [
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
    let bridge = work(Bridge::new().tool("everything", &command, ""));
    drive(client, "everything", &bridge, |_| EVERYTHING.to_vec());
}

fn filesystem(client: Client) {
    let program =
        peers().join("node_modules/@modelcontextprotocol/server-filesystem/dist/index.js");
    let node = peers().join("node_modules/.bin/node");
    let bridge = work(Bridge::new());
    let allowed = bridge.path("work");
    let command = [&node, &program, &allowed].map(|path| path.to_str().unwrap().to_owned());
    let command = command.each_ref().map(String::as_str);
    let bridge = bridge.tool("filesystem", &command, "");
    drive(client, "filesystem", &bridge, |_| {
        vec!["tools", "files", "refusal"]
    });
}

fn git(client: Client) {
    let program = peers().join("venv/bin/mcp-server-git");
    let bridge = work(Bridge::new());
    let run = |words: &[&str]| {
        let mut command = Command::new("git");
        command.arg("-C").arg(bridge.path("work")).args(words);
        let output = command.output().unwrap();
        assert!(output.status.success(), "{}", output::stderr(&output));
    };
    run(&["init", "-q"]);
    let who = ["-c", "user.name=Test", "-c", "user.email=test@example.com"];
    run(&[
        &who[..],
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
    drive(client, "git", &bridge, |_| vec!["tools", "repository"]);
}

fn time(client: Client) {
    let program = peers().join("venv/bin/mcp-server-time");
    let command = [program.to_str().unwrap(), "--local-timezone", "UTC"];
    let bridge = work(Bridge::new().tool("time", &command, ""));
    drive(client, "time", &bridge, |_| vec!["tools", "conversion"]);
}

#[test]
fn the_python_client_gets_everything_from_our_server() {
    let bridge = work(Bridge::with_fixture());
    drive(Client::Python, "fixture", &bridge, |way| {
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
        checks.extend((way == "handshake").then_some("resume"));
        checks
    });
}

#[test]
fn the_typescript_client_gets_everything_from_our_server() {
    let bridge = work(Bridge::with_fixture());
    drive(Client::TypeScript, "fixture", &bridge, |way| {
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
        checks.extend((way == "http").then_some("resume"));
        checks
    });
}

#[test]
fn the_python_client_uses_server_everything() {
    everything(Client::Python);
}

#[test]
fn the_typescript_client_uses_server_everything() {
    everything(Client::TypeScript);
}

#[test]
fn the_python_client_uses_server_filesystem() {
    filesystem(Client::Python);
}

#[test]
fn the_typescript_client_uses_server_filesystem() {
    filesystem(Client::TypeScript);
}

#[test]
fn the_python_client_uses_server_git() {
    git(Client::Python);
}

#[test]
fn the_typescript_client_uses_server_git() {
    git(Client::TypeScript);
}

#[test]
fn the_python_client_uses_server_time() {
    time(Client::Python);
}

#[test]
fn the_typescript_client_uses_server_time() {
    time(Client::TypeScript);
}
