//! Upstreams that respond before the end of a request, and upstreams with long response heads.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::Duration;

use testkit::http;
use testkit::inside;
use testkit::origin::{Latch, OriginServer};
use testkit::wait;

use crate::traffic_fixture::{Agent, Rules, TrafficFixture, may_enter};

/// Time in which the gate must close a connection.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(20);

fn with_agent(
    serve: impl Fn(TcpStream, usize) + Send + Sync + 'static,
    check: impl FnOnce(&Rules, &OriginServer, &Agent<'_>),
) {
    let fixture = TrafficFixture::new();
    let web = OriginServer::raw(serve);
    let without = Rules::new().at("web.example", web.address());
    fixture.write(&without.clone().allow("web.example"));
    let agent = fixture.create("fix");
    check(&without, &web, &agent);
}

/// Reads a request head. Returns false if the connection ends before the head is complete.
fn read_request_head(stream: &mut TcpStream) -> bool {
    loop {
        match http::read_line(&mut *stream) {
            Ok(line) if line.is_empty() => return true,
            Ok(_) => {}
            Err(_) => return false,
        }
    }
}

#[test]
fn early_response_of_a_closing_upstream_is_forwarded() {
    let serve = |mut stream: TcpStream, _| {
        if read_request_head(&mut stream) {
            let written = stream.write_all(
                b"HTTP/1.1 413 Too Large\r\nContent-Length: 3\r\nConnection: close\r\n\r\nno\n",
            );
            // Closed with unread bytes, so that the gate receives a reset.
            drop(written);
        }
    };
    with_agent(serve, |_, web, agent| {
        let rounds = 10;
        for round in 0..rounds {
            let got = agent.curl(
                "-H Expect: -X POST -T <(head -c 20000000 /dev/zero) http://web.example/upload",
            );
            assert_eq!((got.status, got.body.trim()), (413, "no"), "{round}");
        }
        assert_eq!(web.connections(), rounds);
    });
}

#[test]
fn upload_after_its_response_ends_when_its_rule_is_revoked() {
    if !may_enter() {
        return;
    }
    let (received, closed) = (Latch::new(), Latch::new());
    let latches = (received.clone(), closed.clone());
    let serve = move |mut stream: TcpStream, _| {
        if !read_request_head(&mut stream) {
            return;
        }
        stream
            .write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nearly")
            .unwrap();
        let mut bytes = [0; 4096];
        while let Ok(length) = stream.read(&mut bytes) {
            if length == 0 {
                break;
            }
            if bytes[..length].windows(4).any(|four| four == b"late") {
                latches.0.open();
            }
        }
        latches.1.open();
    };
    with_agent(serve, |without, _, agent| {
        let mut stream = agent.namespace().port(80);
        stream
            .write_all(
                b"POST / HTTP/1.1\r\nHost: web.example\r\nTransfer-Encoding: chunked\r\n\r\n",
            )
            .unwrap();
        let answer = http::read_response(&mut stream).unwrap();
        assert_eq!(answer.text(), "early");
        stream.write_all(b"4\r\nlate\r\n").unwrap();
        wait::until("the upstream to receive the chunk", || {
            received.is_open().then_some(())
        });
        assert!(
            !closed.is_open(),
            "the upload continues while it is allowed"
        );
        agent.fixture.reload(without);
        wait::until("the upload to be closed", || closed.is_open().then_some(()));
        assert!(inside::closes_within(&mut stream, CLOSE_TIMEOUT));
    });
}

#[test]
fn response_head_over_64_kib_is_refused_with_reason() {
    let serve = |mut stream: TcpStream, number: usize| {
        while read_request_head(&mut stream) {
            let long = "a".repeat(if number == 0 { 60_000 } else { 90_000 });
            let head =
                format!("HTTP/1.1 200 OK\r\nX-Long: {long}\r\nConnection: close\r\n\r\nhello");
            if stream.write_all(head.as_bytes()).is_err() {
                return;
            }
            let _closed = stream.shutdown(std::net::Shutdown::Write);
        }
    };
    with_agent(serve, |_, _, agent| {
        let got = agent.curl("-D ~/head http://web.example/");
        assert_eq!((got.status, got.body.as_str()), (200, "hello"));
        let length = agent.stdout_of("grep -i '^x-long' ~/head | tr -d '\\r\\n' | wc -c");
        assert_eq!(length, "60008");
        let got = agent.curl("http://web.example/");
        got.refused(502, "connect_failed");
        assert!(got.body.contains("longer than 64 KiB"), "{got:?}");
    });
}
