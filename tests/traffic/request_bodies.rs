//! Bodies of requests whose methods usually have no body.

use testkit::http;
use testkit::origin::OriginReply;

use crate::traffic_fixture::{Rules, TrafficFixture, exchange, may_enter, refusal};

/// Methods whose requests rarely have a body (RFC 9110, 9.3), and a method that RFC 9110 does not
/// define.
const METHODS: [&str; 5] = ["GET", "HEAD", "DELETE", "OPTIONS", "REPORT"];

// Issue 14, number 11.
#[test]
fn body_of_unknown_length_arrives_with_every_method() {
    let fixture = TrafficFixture::new();
    let http1_origin = fixture.https_http1(&["one.example"], |_| OriginReply::status(204));
    let http2_origin = fixture.https(&["two.example"], |_| OriginReply::status(204));
    let rules = Rules::new()
        .allow("one.example")
        .at("one.example", http1_origin.address())
        .allow("two.example")
        .at("two.example", http2_origin.address());
    fixture.write(&rules);
    let agent = fixture.create("fix");
    for (origin, host) in [
        (&http1_origin, "one.example"),
        (&http2_origin, "two.example"),
    ] {
        for version in ["--http1.1", "--http2"] {
            for method in METHODS {
                // curl does not know the length of standard input: it sends chunks in HTTP/1,
                // frames in HTTP/2.
                let what = format!("{method} {version} {host}");
                let got = agent.curl(&format!(
                    "{version} -X {method} -T - https://{host}/ <<<'{what}'"
                ));
                assert_eq!(got.status, 204, "{what}: {got:?}");
                let request = origin.requests().pop().unwrap();
                assert_eq!(request.method, method);
                assert_eq!(request.header("content-length"), None, "{what}");
                assert_eq!(request.body, format!("{what}\n"), "{what}");
            }
        }
        let http2 = origin
            .requests()
            .iter()
            .all(|request| request.version == ::http::Version::HTTP_2);
        assert_eq!(http2, host == "two.example");
    }
}

// Issue 14, number 11.
#[test]
fn websocket_request_with_a_body_is_refused_with_reason() {
    if !may_enter() {
        return;
    }
    let fixture = TrafficFixture::new();
    let web = testkit::origin::OriginServer::http(|_| OriginReply::text("hello"));
    let rules = Rules::new()
        .allow("web.example")
        .at("web.example", web.address());
    fixture.write(&rules);
    let agent = fixture.create("fix");
    let head = "GET / HTTP/1.1\r\nHost: web.example\r\nConnection: upgrade\r\nUpgrade: websocket\r\n\
                Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n";
    for body in [
        "Content-Length: 5\r\n\r\nhello",
        "Transfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
    ] {
        let answer = exchange(agent.namespace().port(80), format!("{head}{body}"));
        refusal(&answer, 400, "framing");
    }
    assert!(web.requests().is_empty());
    let mut stream = agent.namespace().port(80);
    std::io::Write::write_all(&mut stream, format!("{head}\r\n").as_bytes()).unwrap();
    assert_eq!(http::read_head(&mut stream).unwrap().status, 200);
    assert_eq!(web.requests().len(), 1);
}
