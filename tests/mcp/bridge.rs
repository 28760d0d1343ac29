//! Fixture: a gate with a stdio server behind the bridge, and an HTTP client.

use std::fmt::Write as _;
use std::io::{BufReader, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use serde_json::{Value, json};
use testkit::gate::{GateDir, GateProcess};
use testkit::http::{self, HttpResponse};
use testkit::port::Port;
use testkit::wait;

const PALISADE: &str = env!("CARGO_BIN_EXE_palisade");

/// Fixture: a gate directory whose gate serves tools.
pub(crate) struct Bridge {
    pub(crate) gate_dir: GateDir,
    pub(crate) address: SocketAddr,
    /// Reserved while the gate's address is on the machine's loopback.
    port: Option<Arc<Port>>,
    tools: String,
    server: String,
    sections: String,
}

impl Bridge {
    /// A fixture without tools, at a reserved port of the loopback address.
    pub(crate) fn new() -> Self {
        let port = Arc::new(Port::take());
        Self {
            port: Some(Arc::clone(&port)),
            ..Self::at_address(port.address())
        }
    }

    /// A fixture at an address that no other program uses.
    pub(crate) fn at_address(address: SocketAddr) -> Self {
        // Benchmarks set another build.
        let binary = std::env::var("PALISADE_BINARY");
        let gate_dir = GateDir::new(binary.as_deref().unwrap_or(PALISADE));
        Self {
            gate_dir,
            address,
            port: None,
            tools: String::new(),
            server: String::new(),
            sections: String::new(),
        }
    }

    /// Adds `mcp-fixture` as the tool `fixture`.
    pub(crate) fn with_fixture() -> Self {
        Self::new().fixture("fixture", &[])
    }

    /// Adds `mcp-fixture` under a name, with options.
    pub(crate) fn fixture(self, name: &str, switches: &[&str]) -> Self {
        let program = testkit::mcp::fixture();
        let mut command = vec![program.to_str().unwrap()];
        command.extend(switches);
        self.tool(name, &command, "")
    }

    /// Adds a tool with this command, and more lines of its entry.
    pub(crate) fn tool(mut self, name: &str, command: &[&str], more: &str) -> Self {
        let command = json!(command);
        writeln!(self.tools, "  - name: {name}\n    command: {command}").unwrap();
        for line in more.lines() {
            writeln!(self.tools, "    {line}").unwrap();
        }
        self
    }

    /// Adds a line to the section `server`.
    pub(crate) fn server(mut self, line: &str) -> Self {
        writeln!(self.server, "  {line}").unwrap();
        self
    }

    /// Adds a policy bundle `guard` for tool calls, with these rules.
    pub(crate) fn policy(self, rules: &str) -> Self {
        let dir = self.path("guard");
        std::fs::create_dir_all(&dir).unwrap();
        std::fs::write(
            dir.join("policy.rego"),
            format!("package mcp.authz\n\n{rules}"),
        )
        .unwrap();
        self.section(&format!(
            "policies:\n  timeout: 5s\n  bundles:\n  - {{id: guard, path: {dir:?}, entrypoint: mcp/authz}}"
        ))
    }

    /// Adds another section of the file.
    pub(crate) fn section(mut self, section: &str) -> Self {
        writeln!(self.sections, "{section}").unwrap();
        self
    }

    /// Writes palisade.yaml and starts the gate.
    pub(crate) fn start(&self) -> GateProcess<'_> {
        self.write();
        self.gate_dir.start()
    }

    /// Writes palisade.yaml.
    pub(crate) fn write(&self) {
        self.gate_dir.write_config(&self.text(&self.sections));
    }

    fn text(&self, sections: &str) -> String {
        let Self {
            address,
            tools,
            server,
            ..
        } = self;
        format!(
            "version: \"1.0\"\nserver:\n  single_port: \"{address}\"\n{server}{sections}\ntools:\n{tools}"
        )
    }

    /// Writes the file with these sections instead of its own, and reloads it.
    pub(crate) fn reload_with(&self, sections: &str) {
        self.gate_dir.write_config(&self.text(sections));
        let output = self.gate_dir.run(&["config", "reload"]);
        assert!(
            output.status.success(),
            "{}",
            testkit::output::stderr(&output)
        );
    }

    /// Writes palisade.yaml again, with `mcp-fixture` under these names and options.
    pub(crate) fn rewrite(&self, fixtures: &[(&str, &[&str])]) {
        let mut changed = Self {
            gate_dir: GateDir::new(PALISADE),
            address: self.address,
            port: self.port.clone(),
            tools: String::new(),
            server: self.server.clone(),
            sections: self.sections.clone(),
        };
        for (name, switches) in fixtures {
            changed = changed.fixture(name, switches);
        }
        self.gate_dir.write_config(&changed.text(&changed.sections));
    }

    /// The path of a tool.
    pub(crate) fn url(&self, tool: &str) -> String {
        format!("http://{}/mcp/{tool}", self.address)
    }

    /// A file in the gate directory.
    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.gate_dir.path().join(name)
    }

    /// A connection to the gate.
    pub(crate) fn connect(&self) -> TcpStream {
        connect(self.address)
    }

    /// Sends a request on a new connection, and does not wait.
    pub(crate) fn send(
        &self,
        method: &str,
        path: &str,
        headers: &[(&str, &str)],
        body: &str,
    ) -> TcpStream {
        send(self.address, method, path, headers, body)
    }

    /// Sends a request and reads the whole response.
    pub(crate) fn request(
        &self,
        method: &str,
        path: &str,
        headers: &[(&str, &str)],
        body: &str,
    ) -> HttpResponse {
        exchange(self.address, method, path, headers, body)
    }

    /// The value of a series in the gate's metrics, if it exists.
    pub(crate) fn metric(&self, series: &str) -> Option<u64> {
        let text = self.request("GET", "/metrics", &[], "").text();
        value_of(&text, series)
    }

    /// Waits until a series has this value.
    pub(crate) fn wait_for_metric(&self, series: &str, value: u64) {
        wait::until_or(
            || (self.metric(series) == Some(value)).then_some(()),
            || format!("{series} to be {value}, and not {:?}", self.metric(series)),
        );
    }

    /// Sends raw request bytes, and reads the whole response.
    pub(crate) fn raw(&self, request: &str) -> HttpResponse {
        let mut stream = self.connect();
        stream.write_all(request.as_bytes()).unwrap();
        http::read_response(BufReader::new(stream)).unwrap()
    }

    /// Calls the hook `before` or `after`.
    pub(crate) fn hook(&self, moment: &str, body: &Value) -> HttpResponse {
        let path = format!("/intercept/{moment}");
        self.request("POST", &path, &[], &body.to_string())
    }

    /// Opens a session with a tool, as of revisions up to 2025-11-25.
    pub(crate) fn session(&self, tool: &str) -> Session<'_> {
        self.try_session(tool)
            .unwrap_or_else(|answer| panic!("no session: {answer:?}"))
    }

    /// Opens a session, or returns the refusal.
    pub(crate) fn try_session(&self, tool: &str) -> Result<Session<'_>, HttpResponse> {
        self.session_of(tool, None)
    }

    /// Opens a session for an agent of that name.
    pub(crate) fn session_of(
        &self,
        tool: &str,
        agent: Option<&str>,
    ) -> Result<Session<'_>, HttpResponse> {
        let path = format!("/mcp/{tool}");
        let body = initialize();
        let named = agent.map(|agent| ("X-Agent-ID", agent));
        let headers: Vec<_> = named.into_iter().collect();
        let answer = self.request("POST", &path, &headers, &body);
        let id = answer.header("mcp-session-id").map(str::to_owned);
        let Some(id) = id.filter(|_| answer.status == 200) else {
            return Err(answer);
        };
        let session = Session {
            bridge: self,
            path,
            id,
            agent: agent.map(str::to_owned),
        };
        let body = r#"{"jsonrpc":"2.0","method":"notifications/initialized"}"#;
        assert_eq!(session.post(body).status, 202);
        Ok(session)
    }

    /// Sends a request of revision 2026-07-28 to `fixture`.
    pub(crate) fn stateless(
        &self,
        method: &str,
        name: Option<&str>,
        params: &Value,
    ) -> HttpResponse {
        let (headers, body) = stateless_request(method, name, params);
        self.request("POST", "/mcp/fixture", &headers, &body)
    }

    /// Processes of the server behind the bridge.
    pub(crate) fn servers(&self) -> Vec<i32> {
        let program = testkit::mcp::fixture();
        let program = program.canonicalize().unwrap();
        testkit::leftovers::processes(&self.gate_dir)
            .filter(|pid| {
                let link = std::fs::read_link(format!("/proc/{pid}/exe"));
                link.is_ok_and(|exe| exe == program)
            })
            .collect()
    }
}

/// A connection to an address.
pub(crate) fn connect(address: SocketAddr) -> TcpStream {
    let stream = TcpStream::connect(address).unwrap();
    stream
        .set_read_timeout(Some(Duration::from_secs(30)))
        .unwrap();
    stream
}

/// Sends a request to an address on a new connection, and does not wait.
pub(crate) fn send(
    address: SocketAddr,
    method: &str,
    path: &str,
    headers: &[(&str, &str)],
    body: &str,
) -> TcpStream {
    let mut stream = connect(address);
    let mut head = format!(
        "{method} {path} HTTP/1.1\r\nContent-Type: application/json\r\n\
         Accept: application/json, text/event-stream\r\nContent-Length: {}\r\n",
        body.len()
    );
    if !headers.iter().any(|(name, _)| *name == "Host") {
        write!(head, "Host: {address}\r\n").unwrap();
    }
    for (name, value) in headers {
        write!(head, "{name}: {value}\r\n").unwrap();
    }
    stream
        .write_all(format!("{head}\r\n{body}").as_bytes())
        .unwrap();
    stream
}

/// Sends a request to an address and reads the whole response.
pub(crate) fn exchange(
    address: SocketAddr,
    method: &str,
    path: &str,
    headers: &[(&str, &str)],
    body: &str,
) -> HttpResponse {
    let mut headers = headers.to_vec();
    headers.push(("Connection", "close"));
    let stream = send(address, method, path, &headers, body);
    http::read_response(BufReader::new(stream)).unwrap()
}

/// The value of a series in Prometheus text.
pub(crate) fn value_of(text: &str, series: &str) -> Option<u64> {
    let mut lines = text.lines();
    lines.find_map(|line| line.strip_prefix(series)?.trim().parse().ok())
}

/// A JSON-RPC request.
pub(crate) fn request(id: u64, method: &str, params: &Value) -> String {
    json!({"jsonrpc": "2.0", "id": id, "method": method, "params": params}).to_string()
}

/// The headers and the body of a request of revision 2026-07-28.
pub(crate) fn stateless_request<'a>(
    method: &'a str,
    name: Option<&'a str>,
    params: &Value,
) -> (Vec<(&'a str, &'a str)>, String) {
    let mut params = params.clone();
    params["_meta"] = json!({
        "io.modelcontextprotocol/protocolVersion": "2026-07-28",
        "io.modelcontextprotocol/clientInfo": {"name": "test", "version": "1"},
        "io.modelcontextprotocol/clientCapabilities": {"elicitation": {}},
    });
    let mut headers = vec![
        ("MCP-Protocol-Version", "2026-07-28"),
        ("Mcp-Method", method),
    ];
    headers.extend(name.map(|name| ("Mcp-Name", name)));
    (headers, request(1, method, &params))
}

/// The first message of a session.
pub(crate) fn initialize() -> String {
    let params = json!({
        "protocolVersion": "2025-11-25",
        "capabilities": {},
        "clientInfo": {"name": "test", "version": "1"},
    });
    request(0, "initialize", &params)
}

/// A session of Streamable HTTP.
pub(crate) struct Session<'a> {
    bridge: &'a Bridge,
    pub(crate) path: String,
    pub(crate) id: String,
    agent: Option<String>,
}

impl Session<'_> {
    /// The headers of the session.
    pub(crate) fn headers(&self) -> Vec<(&str, &str)> {
        let agent = self.agent.as_deref();
        let agent = agent.map(|agent| ("X-Agent-ID", agent));
        [
            ("Mcp-Session-Id", self.id.as_str()),
            ("MCP-Protocol-Version", "2025-11-25"),
        ]
        .into_iter()
        .chain(agent)
        .collect()
    }

    /// Posts a message and reads the whole response.
    pub(crate) fn post(&self, body: &str) -> HttpResponse {
        self.bridge
            .request("POST", &self.path, &self.headers(), body)
    }

    /// Posts a message and does not wait.
    pub(crate) fn send(&self, body: &str) -> TcpStream {
        self.bridge.send("POST", &self.path, &self.headers(), body)
    }

    /// Calls a tool and returns the whole response.
    pub(crate) fn call(&self, name: &str, arguments: &Value) -> Value {
        let params = json!({"name": name, "arguments": arguments});
        let answer = self.post(&request(1, "tools/call", &params));
        let messages = messages(&answer);
        messages
            .into_iter()
            .find(|message| message.get("id") == Some(&json!(1)))
            .unwrap_or_else(|| panic!("no answer to {name}: {answer:?} {}", answer.text()))
    }

    /// The text that a tool returns.
    pub(crate) fn text(&self, name: &str, arguments: &Value) -> String {
        let answer = self.call(name, arguments);
        let text = answer.pointer("/result/content/0/text");
        text.and_then(Value::as_str)
            .unwrap_or_else(|| panic!("{name}: {answer}"))
            .to_owned()
    }

    /// Ends the session.
    pub(crate) fn delete(&self) -> u16 {
        let answer = self
            .bridge
            .request("DELETE", &self.path, &self.headers(), "");
        answer.status
    }
}

/// The JSON-RPC messages of a response, as JSON or events.
pub(crate) fn messages(answer: &HttpResponse) -> Vec<Value> {
    let text = answer.text();
    let events = answer
        .header("content-type")
        .is_some_and(|kind| kind.starts_with("text/event-stream"));
    if !events {
        return vec![serde_json::from_str(&text).unwrap_or(Value::Null)];
    }
    let data = text.lines().filter_map(|line| line.strip_prefix("data:"));
    data.filter_map(|data| serde_json::from_str(data.trim()).ok())
        .collect()
}

/// The Node.js that was installed with the clients.
pub(crate) fn node() -> Command {
    Command::new(testkit::mcp::peers().join("node_modules/.bin/node"))
}

/// A file of tests/mcp.
pub(crate) fn test_file(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../../tests/mcp")
        .join(name)
}
