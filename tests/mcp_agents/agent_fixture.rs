//! Fixture: an operator's repository, and an MCP client that works on it.

use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, ExitStatus, Output, Stdio};

use serde_json::{Value, json};
use testkit::gate::GateDir;
use testkit::operator::Operator;
use testkit::repo::TestRepo;
use testkit::{leftovers, output};

const PALISADE: &str = env!("CARGO_BIN_EXE_palisade");

/// A gate directory with a repository. Dropping it ends its sandboxes.
pub(crate) struct AgentFixture {
    pub(crate) gate_dir: GateDir,
    pub(crate) repo: TestRepo,
}

impl AgentFixture {
    pub(crate) fn new() -> Self {
        let gate_dir = GateDir::new(PALISADE);
        let repo = TestRepo::new(&gate_dir.path().join("project"), Operator::CurrentUser);
        Self { gate_dir, repo }
    }

    /// Runs `palisade` in the repository.
    pub(crate) fn run(&self, args: &[&str]) -> Output {
        let mut command = self.gate_dir.palisade(args);
        command.current_dir(self.repo.dir()).output().unwrap()
    }

    /// Runs `palisade`, which must succeed, and returns its output.
    pub(crate) fn ok(&self, args: &[&str]) -> String {
        let output = self.run(args);
        assert!(
            output.status.success(),
            "{args:?}: {}",
            output::stderr(&output)
        );
        output::stdout(&output)
    }

    /// Runs the function `function` of client.py, which must report exactly `checks`.
    pub(crate) fn run_client(&self, function: &str, mode: &str, checks: &[&str]) {
        let text = |path: PathBuf| path.to_str().unwrap().to_owned();
        let server = [
            PALISADE.to_owned(),
            "--state-dir".to_owned(),
            text(self.gate_dir.state()),
            "--config".to_owned(),
            text(self.gate_dir.config()),
            "mcp".to_owned(),
        ];
        self.run_client_with(function, mode, &server, checks);
    }

    /// Runs the function `function` of client.py with the server command `server`.
    pub(crate) fn run_client_with(
        &self,
        function: &str,
        mode: &str,
        server: &[String],
        checks: &[&str],
    ) {
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/mcp_agents/client.py");
        let mut command = Command::new(testkit::mcp::peers().join("venv/bin/python"));
        command
            .arg(source)
            .args([function, mode])
            .args(server)
            .current_dir(self.repo.dir())
            .env_clear()
            .env("PATH", std::env::var_os("PATH").unwrap_or_default())
            .env("HOME", self.gate_dir.path());
        let output = command.output().unwrap();
        let stdout = output::stdout(&output);
        let reported: Vec<&str> = stdout
            .lines()
            .filter_map(|line| line.strip_prefix("ok "))
            .collect();
        assert!(
            output.status.success() && reported == checks,
            "{function}, {mode}: {reported:?}\n{}",
            output::stderr(&output)
        );
    }

    /// Starts a server for line-by-line use.
    pub(crate) fn serve(&self) -> Server {
        let mut command = self.gate_dir.palisade(&["mcp"]);
        command.current_dir(self.repo.dir());
        let mut process = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut server = Server {
            input: process.stdin.take(),
            output: BufReader::new(process.stdout.take().unwrap()),
            process,
            calls: 0,
        };
        let hello = json!({
            "protocolVersion": "2025-11-25",
            "capabilities": {},
            "clientInfo": { "name": "test", "version": "1" },
        });
        server.send(&json!({ "id": 0, "method": "initialize", "params": hello }));
        assert!(server.answer()["result"]["instructions"].is_string());
        server.send(&json!({ "method": "notifications/initialized" }));
        server
    }

    /// The commit messages of a branch, oldest first.
    pub(crate) fn commit_messages(&self, branch: &str) -> Vec<String> {
        let range = format!("main..{branch}");
        let log = self.repo.git(&["log", "--reverse", "--format=%s", &range]);
        log.lines().map(str::to_owned).collect()
    }

    /// Stops the gate and asserts that no resource of a sandbox is left.
    pub(crate) fn assert_nothing_left(&self) {
        self.ok(&["gate", "stop"]);
        let left = leftovers::find(&self.gate_dir, &[&self.repo]);
        assert!(left.is_empty(), "{left:#?}");
    }
}

/// `palisade mcp`, line by line. Dropping it ends the process.
pub(crate) struct Server {
    process: Child,
    input: Option<ChildStdin>,
    output: BufReader<ChildStdout>,
    calls: u64,
}

impl Server {
    fn send(&mut self, message: &Value) {
        let mut message = message.clone();
        message["jsonrpc"] = json!("2.0");
        writeln!(self.input.as_mut().unwrap(), "{message}").unwrap();
    }

    /// Calls a tool, and does not wait.
    pub(crate) fn call(&mut self, tool: &str, arguments: &Value) {
        self.calls += 1;
        let params = json!({ "name": tool, "arguments": arguments });
        self.send(&json!({ "id": self.calls, "method": "tools/call", "params": params }));
    }

    /// The next message.
    pub(crate) fn answer(&mut self) -> Value {
        let mut line = String::new();
        self.output.read_line(&mut line).unwrap();
        serde_json::from_str(&line).unwrap_or_else(|error| panic!("{error}: {line}"))
    }

    /// Closes the input, and waits for the exit.
    pub(crate) fn close_input(&mut self) -> ExitStatus {
        self.input = None;
        self.process.wait().unwrap()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.input = None;
        let _ = self.process.wait();
    }
}
