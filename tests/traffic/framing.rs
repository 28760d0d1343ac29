//! Ambiguous messages are refused with a reason, and recorded.

use std::io::Write;
use std::time::Duration;

use testkit::inside::{self, NetNamespace};
use testkit::origin::{OriginReply, OriginServer};

use crate::traffic_fixture::{Agent, Rules, TrafficFixture, exchange, get, may_enter, refusal};

/// Time in which the gate must close a connection.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(20);

fn with_agent(check: impl FnOnce(&OriginServer, &Agent<'_>, &NetNamespace)) {
    if !may_enter() {
        return;
    }
    let fixture = TrafficFixture::new();
    let web = OriginServer::http(|request| {
        OriginReply::text(format!("{} {}", request.path(), request.length))
    });
    let rules = Rules::new()
        .allow("web.example")
        .at("web.example", web.address());
    fixture.write(&rules);
    let agent = fixture.create("fix");
    check(&web, &agent, &agent.namespace());
}

/// A request head with these lines after the Host header.
fn head(lines: &[&str]) -> String {
    let lines = lines.join("\r\n");
    format!("POST /x HTTP/1.1\r\nHost: web.example\r\n{lines}\r\n\r\n")
}

#[test]
fn ambiguous_heads_are_refused_with_400_and_audited() {
    with_agent(|web, agent, namespace| {
        let chunks = "0\r\n\r\n";
        let cases = [
            (
                "both lengths",
                head(&["Content-Length: 5", "Transfer-Encoding: chunked"]) + chunks,
            ),
            (
                "both, the other way round",
                head(&["Transfer-Encoding: chunked", "Content-Length: 5"]) + chunks,
            ),
            (
                "two lengths",
                head(&["Content-Length: 5", "Content-Length: 6"]) + "hello",
            ),
            (
                "twice the same length",
                head(&["Content-Length: 5", "Content-Length: 5"]) + "hello",
            ),
            (
                "a list of lengths",
                head(&["Content-Length: 5, 5"]) + "hello",
            ),
            (
                "a length with a sign",
                head(&["Content-Length: +5"]) + "hello",
            ),
            ("a length in hex", head(&["Content-Length: 0x5"]) + "hello"),
            ("a negative length", head(&["Content-Length: -5"]) + "hello"),
            ("no number at all", head(&["Content-Length: "]) + "hello"),
            (
                "a length too large",
                head(&["Content-Length: 99999999999999999999"]) + "hello",
            ),
            (
                "gzip, chunked",
                head(&["Transfer-Encoding: gzip, chunked"]) + chunks,
            ),
            (
                "chunked, identity",
                head(&["Transfer-Encoding: chunked, identity"]) + chunks,
            ),
            (
                "chunked twice",
                head(&["Transfer-Encoding: chunked", "Transfer-Encoding: chunked"]) + chunks,
            ),
            (
                "a word like chunked",
                head(&["Transfer-Encoding: xchunked"]) + chunks,
            ),
            (
                "a quoted chunked",
                head(&["Transfer-Encoding: \"chunked\""]) + chunks,
            ),
            (
                "a tab before chunked",
                head(&["Transfer-Encoding:\x0bchunked"]) + chunks,
            ),
            (
                "a space before the colon",
                head(&["Transfer-Encoding : chunked"]) + chunks,
            ),
            ("a space in a name", head(&["Content Length: 5"]) + "hello"),
            ("an empty name", head(&[": x"])),
            ("no colon", head(&["Broken"])),
            ("a folded line", head(&["X-A: 1", " continued"])),
            (
                "a folded length",
                head(&["Content-Length:", " 5"]) + "hello",
            ),
            ("a bare CR", head(&["X-A: 1\rX-B: 2"])),
            ("a NUL", head(&["X-A: 1\0"])),
            (
                "a bare LF",
                "GET /x HTTP/1.1\nHost: web.example\n\n".to_owned(),
            ),
            (
                "a bare LF in the middle",
                "GET /x HTTP/1.1\r\nHost: web.example\nX-A: 1\r\n\r\n".to_owned(),
            ),
            ("no host", "GET /x HTTP/1.1\r\nX-A: 1\r\n\r\n".to_owned()),
            ("two hosts", head(&["Host: web.example"])),
            ("two different hosts", head(&["Host: evil.example"])),
            (
                "a space in the target",
                "GET /x y HTTP/1.1\r\nHost: web.example\r\n\r\n".to_owned(),
            ),
            (
                "two spaces",
                "GET  /x HTTP/1.1\r\nHost: web.example\r\n\r\n".to_owned(),
            ),
            (
                "a tab for a space",
                "GET\t/x HTTP/1.1\r\nHost: web.example\r\n\r\n".to_owned(),
            ),
            (
                "another version",
                "GET /x HTTP/3.7\r\nHost: web.example\r\n\r\n".to_owned(),
            ),
            ("no version", "GET /x\r\n\r\n".to_owned()),
            (
                "a space before the first header",
                "GET /x HTTP/1.1\r\n Host: web.example\r\n\r\n".to_owned(),
            ),
        ];
        for (what, bytes) in &cases {
            let mut stream = namespace.port(80);
            let answer = exchange(&mut stream, bytes);
            assert_eq!(answer.status, 400, "{what}: {answer:?} {}", answer.text());
            let id = refusal(&answer, 400, "framing");
            assert!(
                inside::closes_within(&mut stream, CLOSE_TIMEOUT),
                "{what}: still open"
            );
            let record = agent.fixture.record(&id);
            assert_eq!(
                (&record["verdict"], &record["reason"], &record["sandbox"]),
                (&"deny".into(), &"framing".into(), &agent.id.as_str().into()),
                "{what}"
            );
        }
        assert!(web.requests().is_empty(), "{:?}", web.requests());
    });
}

#[test]
fn malformed_chunk_aborts_the_request_and_closes_the_connection() {
    with_agent(|web, agent, namespace| {
        let smuggled = get("web.example", "/smuggled");
        for body in [
            "5\r\nhelloX\r\n0\r\n\r\n",
            "5\nhello\r\n0\r\n\r\n",
            "5\r\nhello\n0\r\n\r\n",
            "+5\r\nhello\r\n0\r\n\r\n",
            "0x5\r\nhello\r\n0\r\n\r\n",
            " 5\r\nhello\r\n0\r\n\r\n",
            "\r\nhello\r\n0\r\n\r\n",
            "-1\r\nhello\r\n0\r\n\r\n",
            "ffffffffffffffff1\r\nhello\r\n0\r\n\r\n",
            "5;extension=1\r\nhello\r\n0\r\n\r\n",
            "5;a\nb\r\nhello\r\n0\r\n\r\n",
        ] {
            let mut stream = namespace.port(80);
            let bytes = head(&["Transfer-Encoding: chunked"]) + body + &smuggled;
            stream.write_all(bytes.as_bytes()).unwrap();
            let answer = testkit::http::read_response(&mut stream);
            if let Ok(answer) = answer {
                assert!(
                    answer.status >= 400,
                    "{body:?}: {answer:?} {}",
                    answer.text()
                );
            }
            assert!(
                inside::closes_within(&mut stream, CLOSE_TIMEOUT),
                "{body:?}: still open"
            );
        }
        let requests = web.requests();
        assert!(requests.is_empty(), "{requests:?}");
        let count = || {
            let records = agent.fixture.records().into_iter();
            let faults = records.filter(|record| record["reason"] == "framing");
            (faults.count() >= 11).then_some(())
        };
        testkit::wait::until("eleven records of broken framing", count);
    });
}

#[test]
fn pipelined_requests_are_each_answered() {
    with_agent(|web, _, namespace| {
        let mut stream = namespace.port(80);
        let two_requests = head(&["Content-Length: 5"]) + "hello" + &get("web.example", "/second");
        assert_eq!(exchange(&mut stream, two_requests).text(), "/x 5");
        let second = testkit::http::read_response(&mut stream).unwrap();
        assert_eq!(second.text(), "/second 0");
        let chunked = head(&["Transfer-Encoding: chunked"]) + "5\r\nhello\r\n0\r\n\r\n";
        assert_eq!(
            exchange(&mut stream, chunked + &get("web.example", "/last")).text(),
            "/x 5"
        );
        assert_eq!(
            testkit::http::read_response(&mut stream).unwrap().text(),
            "/last 0"
        );
        assert_eq!(web.requests().len(), 4);
    });
}

#[test]
fn hop_by_hop_headers_are_removed_and_protect_other_headers() {
    with_agent(|web, _, namespace| {
        let lines = [
            "Connection: x-mine, authorization, host, content-length, content-type, cookie",
            "Keep-Alive: timeout=5",
            "Proxy-Connection: keep-alive",
            "Proxy-Authorization: Basic c2VjcmV0",
            "TE: gzip",
            "Upgrade: h2c",
            "HTTP2-Settings: AAMAAABkAAQAAP__",
            "X-Mine: 1",
            "X-Kept: 1",
            "Authorization: stub",
            "Cookie: a=1",
            "Content-Type: text/plain",
            "Content-Length: 5",
        ];
        assert_eq!(
            exchange(namespace.port(80), head(&lines) + "hello").status,
            200
        );
        let request = &web.requests()[0];
        for removed in [
            "x-mine",
            "keep-alive",
            "proxy-connection",
            "proxy-authorization",
            "te",
            "upgrade",
            "http2-settings",
            "transfer-encoding",
        ] {
            assert_eq!(request.header(removed), None, "{request:?}");
        }
        for (kept, value) in [
            ("x-kept", "1"),
            ("authorization", "stub"),
            ("cookie", "a=1"),
            ("content-type", "text/plain"),
            ("content-length", "5"),
            ("host", "web.example"),
        ] {
            assert_eq!(request.header(kept), Some(value), "{request:?}");
        }
    });
}

#[test]
fn endless_request_head_is_refused() {
    with_agent(|web, _, namespace| {
        let long = format!("X-Long: {}", "a".repeat(200 * 1024));
        let answer = exchange(namespace.port(80), head(&[&long]));
        assert!(matches!(answer.status, 400 | 431), "{answer:?}");
        let many: String = (0..20_000).map(|n| format!("X-{n}: 1\r\n")).collect();
        let answer = exchange(namespace.port(80), head(&[many.trim_end()]));
        assert!(matches!(answer.status, 400 | 431), "{answer:?}");
        let target = format!(
            "GET /{} HTTP/1.1\r\nHost: web.example\r\n\r\n",
            "a".repeat(200 * 1024)
        );
        let answer = exchange(namespace.port(80), target);
        assert!(matches!(answer.status, 400 | 414 | 431), "{answer:?}");
        assert!(web.requests().is_empty());
    });
}
