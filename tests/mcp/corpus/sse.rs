//! Recorded decisions about tool calls over HTTP with SSE of revision 2024-11-05.

use std::io::BufReader;
use std::net::TcpStream;

use serde_json::json;
use testkit::corpus::Corpus;
use testkit::http;

use super::{calls, outcome, outcome_of_message, with_bundles};
use crate::bridge::{Bridge, initialize, request};
use crate::relay::events;

const TOKEN: &str = "a-token-of-the-operator";

const INITIALIZED: &str = r#"{"jsonrpc":"2.0","method":"notifications/initialized"}"#;

type Headers<'a> = &'a [(&'a str, &'a str)];

/// A session: its event stream, and the path for its messages.
struct SseSession<'a> {
    bridge: &'a Bridge,
    headers: Headers<'a>,
    stream: BufReader<TcpStream>,
    id: String,
    endpoint: String,
}

impl<'a> SseSession<'a> {
    /// Opens and initializes a session.
    fn open(bridge: &'a Bridge, headers: Headers<'a>) -> Self {
        let mut stream = BufReader::new(bridge.send("GET", "/sse/fixture", headers, ""));
        let head = http::read_head(&mut stream).unwrap();
        let id = head.header("x-session-id").expect("a session").to_owned();
        let (_, endpoint) = events(&mut stream, "endpoint").remove(0);
        let mut session = Self {
            bridge,
            headers,
            stream,
            id,
            endpoint,
        };
        assert_eq!(session.post(&initialize()), "status 202");
        events(&mut session.stream, r#""id":0"#);
        assert_eq!(session.post(INITIALIZED), "status 202");
        session
    }

    /// Posts a message.
    fn post(&self, body: &str) -> String {
        self.post_to(&self.endpoint, self.headers, body)
    }

    /// Posts a message to another path, with these headers.
    fn post_to(&self, path: &str, headers: Headers<'_>, body: &str) -> String {
        outcome(&self.bridge.request("POST", path, headers, body))
    }

    /// Posts a request with the id 1. If it is accepted, reads the stream up to the answer.
    fn request(&mut self, body: &str) -> String {
        let mut outcomes = vec![self.post(body)];
        if outcomes == ["status 202"] {
            let messages = events(&mut self.stream, r#""id":1"#);
            let messages = messages.iter().map(|(_, data)| serde_json::from_str(data));
            outcomes.extend(messages.filter_map(|message| outcome_of_message(&message.unwrap())));
        }
        outcomes.join("\n")
    }
}

/// Opens a stream. Returns the status, and the path for its messages without the session id.
fn open(bridge: &Bridge, method: &str, path: &str, headers: Headers<'_>) -> String {
    let mut stream = BufReader::new(bridge.send(method, path, headers, ""));
    let head = http::read_head(&mut stream).unwrap();
    if head.status != 200 {
        return format!("status {}", head.status);
    }
    let (_, endpoint) = events(&mut stream, "endpoint").remove(0);
    let path = endpoint.split('?').next().unwrap_or_default();
    format!("status 200\nendpoint {path}")
}

/// Messages that are not valid requests.
const MALFORMED: [(&str, &str); 10] = [
    ("no json", "{"),
    ("empty body", ""),
    ("null", "null"),
    ("empty batch", "[]"),
    (
        "batch",
        r#"[{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"crash"}}]"#,
    ),
    ("no version of json-rpc", r#"{"id":1,"method":"ping"}"#),
    (
        "call without an id",
        r#"{"jsonrpc":"2.0","method":"tools/call","params":{"name":"crash"}}"#,
    ),
    (
        "call with two names",
        r#"{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"who","name":"crash"}}"#,
    ),
    (
        "call with two methods",
        r#"{"jsonrpc":"2.0","id":1,"method":"ping","method":"tools/call","params":{"name":"crash"}}"#,
    ),
    (
        "call with a list as name",
        r#"{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":["crash"]}}"#,
    ),
];

/// Headers that decide whether a request is admitted.
const SENDERS: [(&str, (&str, &str)); 8] = [
    ("host localhost", ("Host", "localhost")),
    ("foreign host", ("Host", "rebound.example")),
    ("foreign address as host", ("Host", "192.0.2.1:8090")),
    ("loopback origin", ("Origin", "http://localhost:3000")),
    ("foreign origin", ("Origin", "https://page.example")),
    ("origin null", ("Origin", "null")),
    ("own page", ("Sec-Fetch-Site", "same-origin")),
    ("foreign page", ("Sec-Fetch-Site", "cross-site")),
];

#[test]
fn corpus_of_sse_sessions() {
    let access = "deny: [crash]\naccess:\n  - {agents: [\"review-*\"], allow: [\"test_simple*\"]}";
    let bridge = with_bundles(access);
    let _gate = bridge.start();
    let mut corpus = Corpus::open("sse", &bridge.gate_dir.control());

    for (method, path) in [
        ("GET", "/sse"),
        ("GET", "/sse?tool=fixture"),
        ("GET", "/sse/fixture"),
        ("GET", "/mcp/fixture/sse"),
        ("GET", "/mcp/sse"),
        ("GET", "/sse/nothing"),
        ("GET", "/sse?tool=nothing"),
        ("GET", "/sse/fixture/more"),
        ("POST", "/sse"),
        ("DELETE", "/sse/fixture"),
    ] {
        corpus.case(&format!("stream: {method} {path}"), || {
            open(&bridge, method, path, &[])
        });
    }
    let no_name = [("X-Agent-ID", "a b")];
    for (name, header) in [SENDERS.as_slice(), &[("agent with a space", no_name[0])]].concat() {
        corpus.case(&format!("stream: {name}"), || {
            open(&bridge, "GET", "/sse", &[header])
        });
    }

    for (name, tool, arguments) in calls() {
        let mut session = SseSession::open(&bridge, &[]);
        corpus.case(&format!("call: {name}"), || {
            let params = json!({"name": tool, "arguments": arguments});
            session.request(&request(1, "tools/call", &params))
        });
    }
    for (name, tool) in [
        ("allowed for the agent", "test_simple_text"),
        ("not allowed for the agent", "echo_raw"),
        ("denied for all agents", "crash"),
    ] {
        let mut session = SseSession::open(&bridge, &[("X-Agent-ID", "review-7")]);
        corpus.case(&format!("call: {name}"), || {
            let params = json!({"name": tool, "arguments": {}});
            session.request(&request(1, "tools/call", &params))
        });
    }
    for method in [
        "tools/list",
        "prompts/list",
        "resources/list",
        "ping",
        "no/such",
    ] {
        let mut session = SseSession::open(&bridge, &[]);
        corpus.case(&format!("method: {method}"), || {
            session.request(&request(1, method, &json!({})))
        });
    }
    for (name, body) in MALFORMED {
        let mut session = SseSession::open(&bridge, &[]);
        corpus.case(&format!("malformed: {name}"), || session.request(body));
    }

    let one = [("X-Agent-ID", "one")];
    let session = SseSession::open(&bridge, &one);
    let other = bridge.session_of("fixture", Some("one")).ok().unwrap();
    let by_header = [("X-Agent-ID", "one"), ("X-Session-ID", &session.id)];
    let streamable = format!("/message?session_id={}", other.id);
    let camel_case = session.endpoint.replace("session_id", "sessionId");
    for (name, path, headers) in [
        ("own session", session.endpoint.as_str(), &one[..]),
        ("session by sessionId", &camel_case, &one),
        ("session by header", "/message", &by_header),
        (
            "session by header, /mcp/message",
            "/mcp/message",
            &by_header,
        ),
        ("no session", "/message", &one),
        ("unknown session", "/message?session_id=unknown", &one),
        ("session of streamable http", &streamable, &one),
        (
            "another agent's session",
            &session.endpoint,
            &[("X-Agent-ID", "two")],
        ),
        ("unnamed agent", &session.endpoint, &[]),
        ("agent with a space", &session.endpoint, &no_name),
    ] {
        corpus.case(&format!("message: {name}"), || {
            session.post_to(path, headers, INITIALIZED)
        });
    }
    for method in ["GET", "DELETE"] {
        corpus.case(&format!("message: {method}"), || {
            outcome(&bridge.request(method, &session.endpoint, &one, ""))
        });
    }
    for (name, header) in SENDERS {
        corpus.case(&format!("message: {name}"), || {
            session.post_to(&session.endpoint, &[one[0], header], INITIALIZED)
        });
    }
    corpus.finish();
}

#[test]
fn corpus_of_sse_sessions_with_a_token() {
    let bridge = with_bundles("deny: [crash]")
        .server(&format!("auth_token: {TOKEN}"))
        .server("enforce_agent_id: true");
    let _gate = bridge.start();
    let mut corpus = Corpus::open("sse-token", &bridge.gate_dir.control());
    let bearer = format!("Bearer {TOKEN}");
    let agent = ("X-Agent-ID", "one");
    let admitted = [agent, ("Authorization", bearer.as_str())];
    let session = SseSession::open(&bridge, &admitted);
    for (name, headers) in [
        ("token and agent", &admitted[..]),
        // x:a-token-of-the-operator
        (
            "token as password",
            &[
                agent,
                (
                    "Authorization",
                    "Basic eDphLXRva2VuLW9mLXRoZS1vcGVyYXRvcg==",
                ),
            ],
        ),
        ("no agent", &admitted[1..]),
        ("empty agent", &[("X-Agent-ID", ""), admitted[1]]),
        ("no token", &[agent]),
        ("wrong token", &[agent, ("Authorization", "Bearer another")]),
        ("empty token", &[agent, ("Authorization", "Bearer ")]),
        ("token without a scheme", &[agent, ("Authorization", TOKEN)]),
        ("nothing", &[]),
    ] {
        corpus.case(&format!("stream: {name}"), || {
            open(&bridge, "GET", "/sse", headers)
        });
        corpus.case(&format!("message: {name}"), || {
            session.post_to(&session.endpoint, headers, INITIALIZED)
        });
    }
    corpus.finish();
}
