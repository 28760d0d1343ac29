//! Requests that the tool listeners refuse, and the messages of the refusals.

use std::io::{BufReader, Write};

use serde_json::json;
use testkit::http::{self, HttpResponse};
use testkit::wait;

use crate::bridge::{Bridge, initialize, request};
use crate::relay::events;

const TOKEN: &str = "a-token-of-the-operator";

/// The error message of a refusal.
fn error_message(answer: &HttpResponse) -> String {
    let error = &answer.json()["error"];
    error.as_str().unwrap_or_default().to_owned()
}

#[test]
fn seed_000_configured_token_is_required() {
    let bridge = Bridge::with_fixture().server(&format!("auth_token: {TOKEN}"));
    let _gate = bridge.start();
    let right = format!("Bearer {TOKEN}");
    let refused = [
        None,
        Some("Bearer another-token"),
        Some("Bearer "),
        Some("Bearer"),
        Some(TOKEN),
    ];
    let requests = [
        ("POST", "/mcp/fixture", initialize()),
        ("GET", "/health", String::new()),
        ("GET", "/metrics", String::new()),
        ("POST", "/message", String::new()),
    ];
    for (method, path, body) in &requests {
        for token in refused {
            let header = token.map(|token| ("Authorization", token));
            let headers: Vec<_> = header.into_iter().collect();
            let answer = bridge.request(method, path, &headers, body);
            assert_eq!(answer.status, 401, "{path} {token:?}: {}", answer.text());
            assert_eq!(
                error_message(&answer),
                "Unauthorized: the token of server.auth_token is missing or wrong"
            );
            let scheme = answer.header("www-authenticate").unwrap_or_default();
            assert!(scheme.contains("Bearer"), "{answer:?}");
        }
        let headers = [("Authorization", right.as_str())];
        let answer = bridge.request(method, path, &headers, body);
        let expected = if *path == "/message" { 404 } else { 200 };
        assert_eq!(answer.status, expected, "{path}: {}", answer.text());
    }
    // The refusal of a hook depends on its format; all formats block the call.
    let call = json!({
        "version": "1.0", "type": "before", "request_id": "r", "method": "tools/call",
        "timestamp": "2026-01-01T00:00:00Z", "params": {"name": "x"}, "tool_id": "fixture",
        "agent_id": "a", "session_id": "s",
    });
    let hook = |token: Option<&str>| {
        let header = token.map(|token| ("Authorization", token));
        let headers: Vec<_> = header.into_iter().collect();
        let answer = bridge.request("POST", "/intercept/before", &headers, &call.to_string());
        answer.text()
    };
    for token in refused {
        let text = hook(token);
        assert!(
            !text.is_empty() && !text.contains("pass"),
            "{token:?}: {text}"
        );
    }
    let text = hook(Some(&right));
    assert!(text.contains(r#""action":"pass""#), "{text}");
}

#[test]
fn seed_000_missing_agent_id_is_refused_if_enforced() {
    let bridge = Bridge::with_fixture().server("enforce_agent_id: true");
    let _gate = bridge.start();
    for headers in [&[][..], &[("X-Agent-ID", "")]] {
        for (method, path) in [
            ("POST", "/mcp/fixture"),
            ("GET", "/sse"),
            ("POST", "/message"),
        ] {
            let answer = bridge.request(method, path, headers, &initialize());
            assert_eq!(answer.status, 401, "{path}: {}", answer.text());
            assert_eq!(error_message(&answer), "The X-Agent-ID header is missing");
        }
    }
    let headers = [("X-Agent-ID", "review")];
    let answer = bridge.request("POST", "/mcp/fixture", &headers, &initialize());
    assert_eq!(answer.status, 200, "{}", answer.text());
    let path = "/mcp/fixture?agent_id=review";
    let answer = bridge.request("POST", path, &[], &initialize());
    assert_eq!(answer.status, 200, "{}", answer.text());
    // Health and metrics need no agent name.
    assert_eq!(bridge.request("GET", "/health", &[], "").status, 200);
}

#[test]
fn seed_000_sse_messages_return_the_documented_statuses() {
    let bridge = Bridge::with_fixture();
    let _gate = bridge.start();
    let headers = [("X-Agent-ID", "one")];
    let mut stream = BufReader::new(bridge.send("GET", "/sse", &headers, ""));
    let head = http::read_head(&mut stream).unwrap();
    let session = head.header("x-session-id").unwrap().to_owned();
    let (_, endpoint) = events(&mut stream, "endpoint").remove(0);
    let post = |agent: &str, path: &str, body: &str| {
        bridge.request("POST", path, &[("X-Agent-ID", agent)], body)
    };
    let message = r#"{"jsonrpc":"2.0","method":"notifications/initialized"}"#;
    assert_eq!(post("one", &endpoint, message).status, 202);

    for body in ["{", "[]", "null", r#"{"id":1,"method":"ping"}"#, ""] {
        let answer = post("one", &endpoint, body);
        assert_eq!(answer.status, 400, "{body}: {}", answer.text());
        assert_eq!(error_message(&answer), "Invalid JSON-RPC format");
    }
    let answer = post("two", &endpoint, message);
    assert_eq!(answer.status, 403, "{}", answer.text());
    assert_eq!(
        error_message(&answer),
        "The session belongs to another agent"
    );
    for path in ["/message", "/message?session_id=unknown", "/mcp/message"] {
        let answer = post("one", path, message);
        assert_eq!(answer.status, 404, "{path}: {}", answer.text());
        assert_eq!(error_message(&answer), "Session not found");
    }
    // The session may also be named by the header, at both paths.
    let named = [("X-Agent-ID", "one"), ("X-Session-ID", session.as_str())];
    for path in ["/message", "/mcp/message"] {
        assert_eq!(
            bridge.request("POST", path, &named, message).status,
            202,
            "{path}"
        );
    }

    let crash = json!({"name": "crash", "arguments": {"before": true}});
    let answer = post("one", &endpoint, &request(2, "tools/call", &crash));
    assert_eq!(answer.status, 202, "{}", answer.text());
    let answer = wait::until("the child to end", || {
        let answer = post("one", &endpoint, message);
        // A write to a child that is just ending fails.
        (!matches!(answer.status, 202 | 500)).then_some(answer)
    });
    assert_eq!(answer.status, 503, "{}", answer.text());
    assert_eq!(error_message(&answer), "Child process not running");
}

#[test]
fn seed_000_other_hosts_and_web_pages_are_refused() {
    let bridge = Bridge::with_fixture();
    let _gate = bridge.start();
    let own = bridge.address.to_string();
    let own_origin = format!("http://{own}");
    let from_page = "The request comes from a web page";
    let other_host = "The Host header names another host";
    let refused = [
        (&[("Host", "rebound.example")][..], other_host),
        (&[("Host", "192.0.2.1:8090")], other_host),
        (
            &[
                ("Host", "rebound.example"),
                ("Origin", "http://rebound.example"),
            ],
            other_host,
        ),
        (&[("Origin", "https://page.example")], from_page),
        (&[("Origin", "null")], from_page),
        (&[("Origin", "http://localhost.page.example")], from_page),
        (&[("Sec-Fetch-Site", "cross-site")], from_page),
        (&[("Sec-Fetch-Site", "same-site")], from_page),
    ];
    let requests = [
        ("POST", "/mcp/fixture", initialize()),
        ("GET", "/sse", String::new()),
        ("GET", "/health", String::new()),
        ("GET", "/metrics", String::new()),
    ];
    for (headers, why) in refused {
        for (method, path, body) in &requests {
            let answer = bridge.request(method, path, headers, body);
            assert_eq!(answer.status, 403, "{path} {headers:?}: {}", answer.text());
            assert_eq!(error_message(&answer), why, "{path} {headers:?}");
        }
    }
    for headers in [
        &[("Host", own.as_str())][..],
        &[("Host", "localhost")],
        &[("Host", "[::1]:8090")],
        &[("Origin", own_origin.as_str())],
        &[("Origin", "http://localhost:3000")],
        &[("Sec-Fetch-Site", "same-origin")],
        &[("Sec-Fetch-Site", "none")],
    ] {
        let answer = bridge.request("POST", "/mcp/fixture", headers, &initialize());
        assert_eq!(answer.status, 200, "{headers:?}: {}", answer.text());
    }
    let mut stream = bridge.connect();
    let head = "GET /health HTTP/1.1\r\nConnection: close\r\n\r\n";
    stream.write_all(head.as_bytes()).unwrap();
    let answer = http::read_response(BufReader::new(stream)).unwrap();
    assert_eq!(answer.status, 403, "{}", answer.text());
    assert_eq!(error_message(&answer), "The Host header is missing");
}
