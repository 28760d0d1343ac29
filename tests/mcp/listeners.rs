//! Changes of listener addresses and tokens while the gate runs.
//!
//! Issue 14, number 1.

use std::fmt::Write as _;
use std::io::{Read, Write as _};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};

use serde_json::{Value, json};
use testkit::gate::{GateDir, GateProcess};
use testkit::http::{self, HttpResponse};
use testkit::output;
use testkit::port::Port;

use crate::bridge::{self, connect, initialize as initialize_request, messages, request};

const PALISADE: &str = env!("CARGO_BIN_EXE_palisade");
const TOKEN: &str = "a-token-of-the-operator";
const OTHER_TOKEN: &str = "another-token-of-the-operator";

/// A gate directory with `mcp-fixture` as `fixture`.
struct Fixture {
    gate_dir: GateDir,
}

impl Fixture {
    fn new() -> Self {
        Self {
            gate_dir: GateDir::new(PALISADE),
        }
    }

    /// Writes the configuration: the `server` section and the names of the tools.
    fn write(&self, server: &str, tools: &[&str]) {
        let program = testkit::mcp::fixture();
        let mut text = format!("version: \"1.0\"\nserver: {{{server}}}\ntools:\n");
        for name in tools {
            writeln!(text, "  - {{name: {name}, command: [{program:?}]}}").unwrap();
        }
        self.gate_dir.write_config(&text);
    }

    fn start(&self, server: &str) -> GateProcess<'_> {
        self.write(server, &["fixture"]);
        self.gate_dir.start()
    }

    fn reload(&self, server: &str) {
        self.write(server, &["fixture"]);
        let output = self.gate_dir.run(&["config", "reload"]);
        assert!(output.status.success(), "{}", output::stderr(&output));
    }
}

fn single_port(address: SocketAddr, token: Option<&str>) -> String {
    let token = token.map_or(String::new(), |token| format!(", auth_token: {token}"));
    format!("single_port: \"{address}\"{token}")
}

/// The wildcard address with this port.
fn wildcard(port: &Port) -> SocketAddr {
    (Ipv4Addr::UNSPECIFIED, port.address().port()).into()
}

/// Posts on a persistent connection.
fn post(mut stream: &TcpStream, path: &str, headers: &[(&str, &str)], body: &str) {
    let mut head = format!(
        "POST {path} HTTP/1.1\r\nContent-Type: application/json\r\n\
         Accept: application/json, text/event-stream\r\nContent-Length: {}\r\n",
        body.len()
    );
    for (name, value) in headers {
        write!(head, "{name}: {value}\r\n").unwrap();
    }
    // A closed connection is detected by reading.
    let _ = stream.write_all(format!("{head}\r\n{body}").as_bytes());
}

/// Opens a session at an address, with this Host and this token.
fn initialize(address: SocketAddr, host: &str, token: Option<&str>) -> HttpResponse {
    let bearer = token.map(|token| format!("Bearer {token}"));
    let mut headers = vec![("Host", host)];
    headers.extend(bearer.as_deref().map(|bearer| ("Authorization", bearer)));
    bridge::exchange(
        address,
        "POST",
        "/mcp/fixture",
        &headers,
        &initialize_request(),
    )
}

fn is_closed(address: SocketAddr) -> bool {
    TcpStream::connect(address).is_err()
}

/// Asserts that the gate answers no further request on the connection.
fn assert_ended(mut stream: TcpStream) {
    post(
        &stream,
        "/mcp/fixture",
        &[("Host", "localhost")],
        &initialize_request(),
    );
    let mut rest = Vec::new();
    // The connection ends or is reset.
    let _ = stream.read_to_end(&mut rest);
    assert_eq!(String::from_utf8_lossy(&rest), "");
}

fn listeners(gate: &GateProcess<'_>) -> (Value, Value) {
    let health = gate.get("/internal/health").json();
    let address = |name: &str| health["listeners"][name].clone();
    (address("interceptor"), address("mcp"))
}

fn both_at(address: SocketAddr) -> (Value, Value) {
    (json!(address.to_string()), json!(address.to_string()))
}

#[test]
fn reload_closes_the_old_listener_and_opens_the_new_one() {
    let (old, new) = (Port::take(), Port::take());
    let fixture = Fixture::new();
    let gate = fixture.start(&single_port(wildcard(&old), Some(TOKEN)));
    assert_eq!(listeners(&gate), both_at(wildcard(&old)));
    let answer = initialize(old.address(), "localhost", None);
    assert_eq!(answer.status, 401, "{}", answer.text());
    // DNS rebinding: the web page has no token and is refused.
    let answer = initialize(old.address(), "rebound.example", None);
    assert_eq!(answer.status, 401, "{}", answer.text());
    let answer = initialize(old.address(), "gate.example", Some(TOKEN));
    assert_eq!(answer.status, 200, "{}", answer.text());
    let used = connect(old.address());
    let bearer = format!("Bearer {TOKEN}");
    let headers = [("Host", "localhost"), ("Authorization", bearer.as_str())];
    post(&used, "/mcp/fixture", &headers, &initialize_request());
    assert_eq!(http::read_response(&used).unwrap().status, 200);
    let idle = connect(old.address());

    fixture.reload(&single_port(new.address(), None));
    assert!(is_closed(old.address()), "the old port is still open");
    assert_ended(used);
    assert_ended(idle);
    let answer = initialize(new.address(), "localhost", None);
    assert_eq!(answer.status, 200, "{}", answer.text());
    for token in [None, Some(TOKEN)] {
        let answer = initialize(new.address(), "rebound.example", token);
        assert_eq!(answer.status, 403, "{}", answer.text());
    }
    assert_eq!(listeners(&gate), both_at(new.address()));
    let shown = output::stdout(&fixture.gate_dir.run(&["gate", "status"]));
    assert!(
        shown.contains(&format!("mcp: {}", new.address())),
        "{shown}"
    );
    assert!(!shown.contains(&wildcard(&old).to_string()), "{shown}");
    let log = gate.stderr();
    assert!(!log.contains("next start"), "{log}");
    assert!(log.contains("mcp listener closed"), "{log}");
}

#[test]
fn removed_listener_is_closed_on_reload() {
    let port = Port::take();
    let fixture = Fixture::new();
    let gate = fixture.start(&single_port(port.address(), None));
    fixture.gate_dir.write_config("version: \"1.0\"\n");
    let output = fixture.gate_dir.run(&["config", "reload"]);
    assert!(output.status.success(), "{}", output::stderr(&output));
    assert!(is_closed(port.address()));
    assert_eq!(listeners(&gate), (Value::Null, Value::Null));
    let health = gate.get("/internal/health").json();
    assert_eq!(health["checks"].get("mcp_listening"), None, "{health}");
}

#[test]
fn listener_moves_between_wildcard_and_loopback_on_one_port() {
    let port = Port::take();
    let other_address = SocketAddr::from(([127, 0, 0, 2], port.address().port()));
    let fixture = Fixture::new();
    let gate = fixture.start(&single_port(wildcard(&port), Some(TOKEN)));
    for _ in 0..2 {
        assert_eq!(
            initialize(other_address, "localhost", Some(TOKEN)).status,
            200
        );
        assert_eq!(initialize(other_address, "localhost", None).status, 401);

        fixture.reload(&single_port(port.address(), None));
        assert_eq!(listeners(&gate), both_at(port.address()));
        assert!(is_closed(other_address));
        assert_eq!(initialize(port.address(), "localhost", None).status, 200);
        let answer = initialize(port.address(), "rebound.example", None);
        assert_eq!(answer.status, 403, "{}", answer.text());

        fixture.reload(&single_port(wildcard(&port), Some(TOKEN)));
        assert_eq!(listeners(&gate), both_at(wildcard(&port)));
        assert_eq!(initialize(port.address(), "localhost", None).status, 401);
    }
    // The gate's sockets overlapped briefly; another process still cannot bind the port.
    assert!(TcpListener::bind(port.address()).is_err());
}

#[test]
fn changed_token_ends_connections_with_the_old_token() {
    let port = Port::take();
    let fixture = Fixture::new();
    let _gate = fixture.start(&single_port(port.address(), Some(TOKEN)));
    let bearer = format!("Bearer {TOKEN}");
    let answer = initialize(port.address(), "localhost", Some(TOKEN));
    let session = answer.header("mcp-session-id").unwrap().to_owned();
    let headers = [
        ("Host", "localhost"),
        ("Authorization", bearer.as_str()),
        ("Mcp-Session-Id", session.as_str()),
        ("MCP-Protocol-Version", "2025-11-25"),
    ];
    let (busy, idle) = (connect(port.address()), connect(port.address()));
    post(&idle, "/mcp/fixture", &headers[..2], &initialize_request());
    assert_eq!(http::read_response(&idle).unwrap().status, 200);
    let call = json!({"name": "sleep", "arguments": {"ms": 2000}});
    let body = request(1, "tools/call", &call);
    post(&busy, "/mcp/fixture", &headers, &body);
    // A stream starts before its response exists.
    let mut answer = http::read_head(&busy).unwrap();
    assert_eq!(answer.status, 200);

    fixture.reload(&single_port(port.address(), Some(OTHER_TOKEN)));
    for (token, status) in [(Some(OTHER_TOKEN), 200), (Some(TOKEN), 401), (None, 401)] {
        let answer = initialize(port.address(), "localhost", token);
        assert_eq!(answer.status, status, "{token:?}: {}", answer.text());
    }
    assert_ended(idle);
    // A started response is finished, and no later request is answered.
    while let Some(chunk) = http::read_chunk(&busy).unwrap() {
        answer.body.extend(chunk);
    }
    assert_eq!(http::read_line(&busy).unwrap(), "");
    let received = messages(&answer);
    let slept = received.iter().find(|message| message["id"] == 1);
    assert!(
        slept.is_some_and(|slept| slept["result"].is_object()),
        "{received:?}"
    );
    assert_ended(busy);

    fixture.reload(&single_port(port.address(), None));
    assert_eq!(initialize(port.address(), "localhost", None).status, 200);
}

#[test]
fn reload_with_address_in_use_changes_nothing() {
    let (old, new) = (Port::take(), Port::take());
    let blocker = TcpListener::bind(new.address()).unwrap();
    let fixture = Fixture::new();
    let gate = fixture.start(&single_port(wildcard(&old), Some(TOKEN)));
    fixture.write(&single_port(new.address(), None), &["fixture", "added"]);
    let output = fixture.gate_dir.run(&["config", "reload"]);
    let stderr = output::stderr(&output);
    assert_eq!(output.status.code(), Some(2), "{stderr}");
    assert!(stderr.contains(&new.address().to_string()), "{stderr}");
    assert_eq!(listeners(&gate), both_at(wildcard(&old)));
    assert_eq!(initialize(old.address(), "localhost", None).status, 401);
    let answer = initialize(old.address(), "localhost", Some(TOKEN));
    assert_eq!(answer.status, 200, "{}", answer.text());
    let shown = gate.get("/v1/config").text();
    assert!(!shown.contains("added"), "{shown}");
    drop(blocker);
    let output = fixture.gate_dir.run(&["config", "reload"]);
    assert!(output.status.success(), "{}", output::stderr(&output));
    assert!(is_closed(old.address()));
    assert_eq!(listeners(&gate), both_at(new.address()));
}

#[test]
fn address_in_use_at_start_degrades_health_until_reload() {
    let port = Port::take();
    let blocker = TcpListener::bind(port.address()).unwrap();
    let fixture = Fixture::new();
    let gate = fixture.start(&single_port(port.address(), None));
    assert_eq!(listeners(&gate), (Value::Null, Value::Null));
    let health = || gate.get("/internal/health").json();
    assert_eq!(health()["checks"]["mcp_listening"], false);
    // Unrelated settings can still change.
    fixture.reload(&format!(
        "{}, enforce_agent_id: true",
        single_port(port.address(), None)
    ));
    assert_eq!(health()["checks"]["mcp_listening"], false);
    drop(blocker);
    fixture.reload(&single_port(port.address(), None));
    assert_eq!(health()["checks"]["mcp_listening"], true);
    assert_eq!(listeners(&gate), both_at(port.address()));
    assert_eq!(initialize(port.address(), "localhost", None).status, 200);
}
