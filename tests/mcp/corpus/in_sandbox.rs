//! Recorded decisions about tool calls from a sandbox, at `http://palisade.internal/mcp/TOOL`.

use serde_json::{Value, json};
use testkit::corpus::Corpus;
use testkit::http::{self, HttpResponse};
use testkit::output;

use super::{calls, outcome, with_bundles};
use crate::bridge::{Bridge, initialize, request, stateless_request};

const TOOLS_URL: &str = "http://palisade.internal/mcp";

/// The sandbox `box` of the bridge's gate.
struct Sandbox<'a>(&'a Bridge);

impl<'a> Sandbox<'a> {
    fn create(bridge: &'a Bridge) -> Self {
        let output = bridge.gate_dir.run(&["create", "box", "--no-repo"]);
        assert!(output.status.success(), "{}", output::stderr(&output));
        Self(bridge)
    }

    /// Runs curl in the sandbox. The client accepts no stream: whether the bridge starts one
    /// depends on timing, and with it the order of the records.
    fn curl(&self, url: &str, headers: &[(&str, &str)], more: &[&str]) -> HttpResponse {
        let mut args = vec!["exec", "box", "--", "curl", "-sS", "-k", "--raw", "-i"];
        args.push("--suppress-connect-headers");
        let media_types = [
            ("Content-Type", "application/json"),
            ("Accept", "application/json"),
        ];
        let headers = media_types.iter().chain(headers);
        let headers = headers.map(|(name, value)| format!("{name}: {value}"));
        let headers: Vec<String> = headers.collect();
        args.extend(headers.iter().flat_map(|header| ["-H", header]));
        args.extend(more);
        args.push(url);
        let output = self.0.gate_dir.run(&args);
        assert!(
            output.status.success(),
            "{args:?}: {}",
            output::stderr(&output)
        );
        http::read_response(output.stdout.as_slice()).unwrap()
    }

    fn post(&self, path: &str, headers: &[(&str, &str)], body: &str) -> HttpResponse {
        self.curl(&format!("{TOOLS_URL}{path}"), headers, &["-d", body])
    }
}

#[test]
fn corpus_of_tools_in_a_sandbox() {
    let entry = "expose: true\ndeny: [crash]\naccess:\n  - {sandboxes: [\"box-*\"], deny: [who]}";
    let program = testkit::mcp::fixture();
    let command = [program.to_str().unwrap()];
    let bridge = with_bundles(entry).tool("hidden", &command, "");
    let _gate = bridge.start();
    let sandbox = Sandbox::create(&bridge);
    let mut corpus = Corpus::open("tools-in-a-sandbox", &bridge.gate_dir.control());

    sessions(&sandbox, &mut corpus);
    for (name, tool, arguments) in sandbox_calls() {
        corpus.case(&format!("stateless: {name}"), || {
            let params = json!({"name": tool, "arguments": arguments});
            let (headers, body) = stateless_request("tools/call", Some(tool), &params);
            outcome(&sandbox.post("/fixture", &headers, &body))
        });
    }
    for method in ["tools/list", "server/discover", "no/such"] {
        corpus.case(&format!("stateless: {method}"), || {
            let (headers, body) = stateless_request(method, None, &json!({}));
            outcome(&sandbox.post("/fixture", &headers, &body))
        });
    }
    entry_points(&sandbox, &mut corpus);
    paths_and_senders(&sandbox, &mut corpus);
    corpus.finish();
}

/// The calls, and one that is denied only in sandboxes.
fn sandbox_calls() -> Vec<(&'static str, &'static str, Value)> {
    let mut calls = calls();
    calls.push(("unlisted for the sandbox", "who", json!({})));
    calls
}

/// Uses one session, because each of its requests is recorded.
fn sessions(sandbox: &Sandbox<'_>, corpus: &mut Corpus) {
    let mut session = String::new();
    corpus.case("session: initialize", || {
        let answer = sandbox.post("/fixture", &[], &initialize());
        session = answer
            .header("mcp-session-id")
            .expect("a session id")
            .to_owned();
        outcome(&answer)
    });
    let headers = [
        ("Mcp-Session-Id", session.as_str()),
        ("MCP-Protocol-Version", "2025-11-25"),
    ];
    let initialized = r#"{"jsonrpc":"2.0","method":"notifications/initialized"}"#;
    corpus.case("session: initialized", || {
        outcome(&sandbox.post("/fixture", &headers, initialized))
    });
    let mut id = 0;
    let mut next = || {
        id += 1;
        id
    };
    for (name, tool, arguments) in sandbox_calls() {
        corpus.case(&format!("session: {name}"), || {
            let params = json!({"name": tool, "arguments": arguments});
            outcome(&sandbox.post(
                "/fixture",
                &headers,
                &request(next(), "tools/call", &params),
            ))
        });
    }
    for method in ["tools/list", "prompts/list", "ping", "no/such"] {
        corpus.case(&format!("session: {method}"), || {
            outcome(&sandbox.post("/fixture", &headers, &request(next(), method, &json!({}))))
        });
    }
    for (name, body) in [
        ("no json", "{"),
        ("null", "null"),
        ("batch", "[]"),
        (
            "call without an id",
            r#"{"jsonrpc":"2.0","method":"tools/call","params":{"name":"crash"}}"#,
        ),
    ] {
        corpus.case(&format!("session: {name}"), || {
            outcome(&sandbox.post("/fixture", &headers, body))
        });
    }
    let url = format!("{TOOLS_URL}/fixture");
    for name in ["deleted", "deleted again"] {
        corpus.case(&format!("session: {name}"), || {
            outcome(&sandbox.curl(&url, &headers, &["-X", "DELETE"]))
        });
    }
    corpus.case("session: ping after its end", || {
        outcome(&sandbox.post("/fixture", &headers, &request(next(), "ping", &json!({}))))
    });
    corpus.case("session: ping without a session", || {
        outcome(&sandbox.post("/fixture", &headers[1..], &request(1, "ping", &json!({}))))
    });
}

/// An allowed and a denied call through every entry point of the gate.
fn entry_points(sandbox: &Sandbox<'_>, corpus: &mut Corpus) {
    for (entry, scheme, more) in [
        ("tunnel, http", "http", &["--proxytunnel"][..]),
        ("tunnel, https", "https", &["--http1.1"]),
        ("transparent, http", "http", &["--noproxy", "*"]),
        (
            "transparent, https, http/1.1",
            "https",
            &["--noproxy", "*", "--http1.1"],
        ),
        (
            "transparent, https, http/2",
            "https",
            &["--noproxy", "*", "--http2"],
        ),
    ] {
        for tool in ["echo_raw", "crash"] {
            corpus.case(&format!("{entry}: {tool}"), || {
                let params = json!({"name": tool, "arguments": {}});
                let (headers, body) = stateless_request("tools/call", Some(tool), &params);
                let url = format!("{scheme}://palisade.internal/mcp/fixture");
                let more = [more, &["-d", &body]].concat();
                outcome(&sandbox.curl(&url, &headers, &more))
            });
        }
    }
}

/// Paths below `/mcp` and other paths, and headers that name another sender.
fn paths_and_senders(sandbox: &Sandbox<'_>, corpus: &mut Corpus) {
    let (base, body) = stateless_request("tools/list", None, &json!({}));
    for path in [
        "",
        "/",
        "/nothing",
        "/hidden",
        "/FIXTURE",
        "/fixture/more",
        "/message",
        "/sse",
        "/nothing/sse",
        "/hidden/sse",
    ] {
        corpus.case(&format!("path: POST /mcp{path}"), || {
            outcome(&sandbox.post(path, &base, &body))
        });
    }
    for (method, url) in [
        ("GET", "http://palisade.internal/mcp/fixture"),
        ("PUT", "http://palisade.internal/mcp/fixture"),
        ("GET", "http://palisade.internal/mcp/nothing/sse"),
        ("GET", "http://palisade.internal/mcp/message"),
        ("GET", "http://palisade.internal/sse"),
        ("POST", "http://palisade.internal/message"),
        ("POST", "http://palisade.internal/intercept/before"),
        ("POST", "http://palisade.internal:8090/mcp/fixture"),
    ] {
        corpus.case(&format!("path: {method} {url}"), || {
            outcome(&sandbox.curl(url, &[], &["-X", method]))
        });
    }
    for (name, header) in [
        ("own origin", ("Origin", "http://palisade.internal")),
        ("foreign origin", ("Origin", "https://page.example")),
        ("origin null", ("Origin", "null")),
        ("foreign page", ("Sec-Fetch-Site", "cross-site")),
        ("another agent", ("X-Agent-ID", "review-7")),
        ("another container", ("X-Container-Id", "another")),
        ("another host", ("Host", "open.example")),
    ] {
        corpus.case(&format!("sender: {name}"), || {
            let params = json!({"name": "echo_raw", "arguments": {}});
            let (mut headers, body) = stateless_request("tools/call", Some("echo_raw"), &params);
            headers.push(header);
            outcome(&sandbox.post("/fixture", &headers, &body))
        });
    }
}
