//! Bodies stream in both directions, in every form of HTTP.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use testkit::http;
use testkit::inside::{self, NetNamespace};
use testkit::origin::{OriginReply, OriginRequest, OriginServer};
use testkit::wait;

use crate::traffic_fixture::{Agent, Rules, TrafficFixture, exchange, get, may_enter, refusal};

/// Memory growth limit of the gate while it streams any amount of data.
const MAX_GROWTH_KIB: u64 = 64 * 1024;

/// Number of bytes to transfer: `PALISADE_BIG` sets it, in MiB.
fn transfer_size() -> u64 {
    let setting = std::env::var("PALISADE_BIG");
    let mib = setting.map_or(256, |text| text.parse().expect("PALISADE_BIG in MiB"));
    mib * 1024 * 1024
}

fn reply_to(request: &OriginRequest) -> OriginReply {
    match request.path() {
        "/large" => OriginReply::large(transfer_size()),
        "/length" => OriginReply::text(request.length.to_string()),
        "/trailers" => OriginReply::text("body").trailer("x-checksum", "42"),
        "/nothing" => OriginReply::status(204),
        "/same" => OriginReply::status(304).header("etag", "\"1\""),
        "/zstd" => OriginReply::text(&b"\x28\xb5\x2f\xfd\x24\x05\x29\x00\x00hello\x42"[..])
            .header("content-encoding", "zstd"),
        "/ws" => OriginReply::echo("websocket")
            .header("sec-websocket-accept", "s3pPLMBiTxaQ9kYGzzhZRbK+xOo="),
        "/cut" => OriginReply::text("half").abort_body(),
        "/events" => OriginReply::text("data: one\n\n").header("content-type", "text/event-stream"),
        _ => OriginReply::text("hello"),
    }
}

struct StreamingOrigins {
    api: OriginServer,
    web: OriginServer,
}

fn with_agent(check: impl FnOnce(&StreamingOrigins, &Agent<'_>)) {
    let fixture = TrafficFixture::new();
    let net = StreamingOrigins {
        api: fixture.https(&["api.example"], reply_to),
        web: OriginServer::http(reply_to),
    };
    let rules = Rules::new()
        .allow("api.example")
        .allow("web.example")
        .at("api.example", net.api.address())
        .at("web.example", net.web.address());
    fixture.write(&rules);
    let agent = fixture.create("fix");
    check(&net, &agent);
}

#[test]
fn large_download_uses_bounded_memory() {
    with_agent(|_, agent| {
        assert_eq!(agent.curl("https://api.example/").status, 200);
        let before = agent.fixture.peak_memory();
        let url = "https://api.example/large";
        let size = agent.stdout_of(&format!(
            "curl -sS --http2 -o /dev/null -w '%{{size_download}}' {url}"
        ));
        assert_eq!(size, transfer_size().to_string());
        let grown = agent.fixture.peak_memory() - before;
        println!("{grown} KiB");
        assert!(grown < MAX_GROWTH_KIB, "{grown} KiB");
    });
}

#[test]
fn large_upload_uses_bounded_memory() {
    with_agent(|_, agent| {
        assert_eq!(agent.curl("https://api.example/").status, 200);
        let before = agent.fixture.peak_memory();
        let (amount, url) = (transfer_size(), "https://api.example/length");
        let got = agent.stdout_of(&format!(
            "head -c {amount} /dev/zero | curl -sS --http1.1 -T - {url}"
        ));
        assert_eq!(got, amount.to_string());
        let grown = agent.fixture.peak_memory() - before;
        println!("{grown} KiB");
        assert!(grown < MAX_GROWTH_KIB, "{grown} KiB");
    });
}

#[test]
fn slow_reading_client_stops_reads_from_the_upstream() {
    if !may_enter() {
        return;
    }
    with_agent(|net, agent| {
        assert_eq!(agent.curl("https://api.example/").status, 200);
        let before = agent.fixture.peak_memory();
        let namespace = agent.namespace();
        // Many at once, and no client reads its response.
        let mut held: Vec<TcpStream> = (0..40).map(|_| namespace.port(80)).collect();
        for stream in &mut held {
            stream
                .write_all(get("web.example", "/large").as_bytes())
                .unwrap();
            stream.read_exact(&mut [0; 1024]).unwrap();
        }
        wait::until("the upstream to receive all of them", || {
            (net.web.requests().len() >= 40).then_some(())
        });
        assert_eq!(agent.curl("https://api.example/").status, 200);
        let grown = agent.fixture.peak_memory() - before;
        assert!(grown < MAX_GROWTH_KIB, "{grown} KiB");
    });
}

/// A WebSocket handshake (RFC 6455).
const OPENING: &str = "GET /ws HTTP/1.1\r\nHost: HOST\r\nUpgrade: websocket\r\n\
    Connection: keep-alive, Upgrade\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\
    Sec-WebSocket-Version: 13\r\nSec-WebSocket-Extensions: permessage-deflate\r\n\r\n";
/// A masked WebSocket frame with "Hello", from RFC 6455.
const HELLO: [u8; 11] = [
    0x81, 0x85, 0x37, 0xfa, 0x21, 0x3d, 0x7f, 0x9f, 0x4d, 0x51, 0x58,
];

fn exchange_websocket_frames(mut stream: impl Read + Write, host: &str) {
    stream
        .write_all(OPENING.replace("HOST", host).as_bytes())
        .unwrap();
    let opened = http::read_head(&mut stream).unwrap();
    assert_eq!(opened.status, 101, "{opened:?}");
    assert_eq!(
        opened.header("sec-websocket-accept"),
        Some("s3pPLMBiTxaQ9kYGzzhZRbK+xOo=")
    );
    for _ in 0..3 {
        stream.write_all(&HELLO).unwrap();
        stream.flush().unwrap();
        let mut back = [0; HELLO.len()];
        stream.read_exact(&mut back).unwrap();
        assert_eq!(back, HELLO);
    }
    let large = vec![7; 200 * 1024];
    stream.write_all(&large[..100 * 1024]).unwrap();
    let mut back = vec![0; 100 * 1024];
    stream.read_exact(&mut back).unwrap();
    assert_eq!(back, large[..100 * 1024]);
}

#[test]
fn websockets_work_on_80_443_and_through_the_proxy() {
    if !may_enter() {
        return;
    }
    with_agent(|net, agent| {
        let namespace = agent.namespace();
        exchange_websocket_frames(namespace.port(80), "web.example");
        let tls = |stream| inside::tls(stream, Some("api.example"), &["http/1.1"]);
        exchange_websocket_frames(tls(namespace.port(443)), "api.example");
        let mut tunnel = namespace.port(8080);
        tunnel
            .write_all(b"CONNECT api.example:443 HTTP/1.1\r\nHost: api.example:443\r\n\r\n")
            .unwrap();
        assert_eq!(http::read_head(&mut tunnel).unwrap().status, 200);
        exchange_websocket_frames(tls(tunnel), "api.example");
        for request in [net.api.requests(), net.web.requests()].concat() {
            assert_eq!(request.header("upgrade"), Some("websocket"), "{request:?}");
            assert_eq!(
                request.header("sec-websocket-key"),
                Some("dGhlIHNhbXBsZSBub25jZQ==")
            );
            assert_eq!(
                request.header("sec-websocket-extensions"),
                None,
                "the gate could not read compressed frames"
            );
        }
        let find_records = || {
            let records = agent.fixture.records();
            let records = records
                .iter()
                .filter(|record| record["path"] == "/ws" && record["status"] == 101);
            (records.count() == 3).then_some(())
        };
        wait::until("a record of each WebSocket", find_records);
    });
}

#[test]
fn websockets_work_over_http2() {
    with_agent(|net, agent| {
        // RFC 8441: an extended CONNECT, once the gate has announced the setting.
        let program = r#"
            const [host, path] = process.argv.slice(2);
            const session = require('http2').connect(`https://${host}`);
            const hello = Buffer.from('818537fa213d7f9f4d5158', 'hex');
            session.on('remoteSettings', (settings) => {
                if (!settings.enableConnectProtocol) { console.log('not offered'); session.destroy(); return; }
                const request = session.request({
                    ':method': 'CONNECT', ':protocol': 'websocket', ':path': path,
                    'sec-websocket-version': '13', 'sec-websocket-extensions': 'permessage-deflate',
                });
                let back = Buffer.alloc(0);
                request.on('response', (head) => {
                    console.log(head[':status']);
                    if (head[':status'] === 200) request.write(hello);
                });
                request.on('data', (data) => {
                    back = Buffer.concat([back, data]);
                    if (back.equals(hello)) { console.log('back'); request.end(); }
                });
                request.on('end', () => {
                    if (!back.equals(hello)) console.log(back.toString());
                    session.close();
                });
            });
        "#;
        agent.stdout_of(&format!("cat >~/ws.js <<'EOF'\n{program}\nEOF\n"));
        assert_eq!(agent.stdout_of("node ~/ws.js api.example /ws"), "200\nback");
        let requests = net.api.requests();
        assert_eq!(requests.len(), 1, "{requests:?}");
        assert_eq!(
            requests[0].version,
            ::http::Version::HTTP_11,
            "{requests:?}"
        );
        assert_eq!(
            requests[0].header("upgrade"),
            Some("websocket"),
            "{requests:?}"
        );
        assert_eq!(requests[0].header("sec-websocket-extensions"), None);
        wait::until("a record of the WebSocket", || {
            let records = agent.fixture.records();
            let mut records = records.iter();
            records
                .any(|record| {
                    record["path"] == "/ws" && record["method"] == "GET" && record["status"] == 101
                })
                .then_some(())
        });
        // The request is decided like any other, and the client can read a refusal.
        let printed = agent.stdout_of("node ~/ws.js evil.example /ws");
        assert!(
            printed.starts_with("403\n") && printed.contains("\"host_denied\""),
            "{printed}"
        );
        // A server that does not switch protocols has not accepted the WebSocket, whatever the
        // status.
        assert_eq!(agent.stdout_of("node ~/ws.js api.example /"), "502\nhello");
    });
}

#[test]
fn websocket_to_a_denied_host_is_refused() {
    if !may_enter() {
        return;
    }
    with_agent(|_, agent| {
        let answer = exchange(
            agent.namespace().port(80),
            OPENING.replace("HOST", "evil.example"),
        );
        refusal(&answer, 403, "host_denied");
    });
}

/// An origin that sends each event of the returned sender, and ends when the sender is dropped.
fn event_origin() -> (OriginServer, mpsc::Sender<&'static str>) {
    let (event_sender, commands) = mpsc::channel::<&'static str>();
    let commands = std::sync::Mutex::new(commands);
    let origin = OriginServer::raw(move |mut stream, _| {
        let mut head = Vec::new();
        while !head.ends_with(b"\r\n\r\n") {
            let mut byte = [0];
            if stream.read(&mut byte).unwrap_or(0) == 0 {
                return;
            }
            head.push(byte[0]);
        }
        let answer = "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n";
        stream.write_all(answer.as_bytes()).unwrap();
        for event in commands.lock().unwrap().iter() {
            let text = format!("data: {event}\n\n");
            if write!(stream, "{:x}\r\n{text}\r\n", text.len()).is_err() {
                return;
            }
        }
        let _gone = stream.write_all(b"0\r\n\r\n");
    });
    (origin, event_sender)
}

#[test]
fn server_sent_events_are_forwarded_immediately() {
    if !may_enter() {
        return;
    }
    let fixture = TrafficFixture::new();
    let (origin, event_sender) = event_origin();
    fixture.write(
        &Rules::new()
            .allow("web.example")
            .at("web.example", origin.address()),
    );
    let agent = fixture.create("fix");
    let mut stream = agent.namespace().port(80);
    stream
        .write_all(get("web.example", "/events").as_bytes())
        .unwrap();
    let head = http::read_head(&mut stream).unwrap();
    assert_eq!(head.header("content-type"), Some("text/event-stream"));
    // Each event is read before the next is sent: a proxy that buffers would wait indefinitely.
    for event in ["one", "two", "three"] {
        event_sender.send(event).unwrap();
        let chunk = http::read_chunk(&mut stream).unwrap().unwrap();
        assert_eq!(
            String::from_utf8(chunk).unwrap(),
            format!("data: {event}\n\n")
        );
    }
    drop(event_sender);
    assert_eq!(http::read_chunk(&mut stream).unwrap(), None);
}

/// Lifetime of the streams: seconds, or the value of `just traffic-long`.
fn stream_lifetime() -> Duration {
    let seconds = std::env::var("PALISADE_QUIET").map_or(5, |text| text.parse().unwrap());
    Duration::from_secs(seconds)
}

/// The longest silence: less than the idle timeout, by default five minutes.
const SILENCE: Duration = Duration::from_secs(4 * 60);

/// Splits a duration into pauses of at most [`SILENCE`].
fn pauses(total: Duration) -> Vec<Duration> {
    let mut left = total;
    let mut pauses = Vec::new();
    while !left.is_zero() {
        let pause = left.min(SILENCE);
        pauses.push(pause);
        left -= pause;
    }
    pauses
}

/// Waits without traffic.
fn stay_silent(pause: Duration) {
    let (_never, wait) = mpsc::channel::<()>();
    assert!(wait.recv_timeout(pause).is_err());
}

#[test]
fn mostly_silent_stream_stays_open() {
    if !may_enter() {
        return;
    }
    let fixture = TrafficFixture::new();
    let (origin, event_sender) = event_origin();
    // Every other timeout is shorter than the silence.
    let rules = Rules::new()
        .allow("web.example")
        .at("web.example", origin.address())
        .egress("timeouts: {connect: 2s, header: 2s, response: 2s}");
    fixture.write(&rules);
    let agent = fixture.create("fix");
    let pauses = pauses(stream_lifetime());
    let expected = vec!["data: one"; pauses.len()].join("\n\n") + "\n\ndata: last";
    let start = Instant::now();
    let sender = thread::spawn(move || {
        for pause in pauses {
            event_sender.send("one").unwrap();
            stay_silent(pause);
        }
        event_sender.send("last").unwrap();
    });
    let got = agent.stdout_of("curl -sSN --max-time 3600 http://web.example/events");
    assert_eq!(got, expected);
    assert!(start.elapsed() >= stream_lifetime());
    sender.join().unwrap();
}

#[test]
fn mostly_silent_websocket_stays_open() {
    if !may_enter() {
        return;
    }
    with_agent(|_, agent| {
        let mut stream = agent.namespace().port(80);
        stream.set_read_timeout(None).unwrap();
        let opening = OPENING.replace("HOST", "web.example");
        stream.write_all(opening.as_bytes()).unwrap();
        assert_eq!(http::read_head(&mut stream).unwrap().status, 101);
        for pause in pauses(stream_lifetime()) {
            stay_silent(pause);
            stream.write_all(&HELLO).unwrap();
            let mut back = [0; HELLO.len()];
            stream.read_exact(&mut back).unwrap();
            assert_eq!(back, HELLO);
        }
    });
}

#[test]
fn trailers_pass_in_both_directions() {
    if !may_enter() {
        return;
    }
    with_agent(|net, agent| {
        let mut stream = agent.namespace().port(80);
        let request = "POST /trailers HTTP/1.1\r\nHost: web.example\r\nTE: trailers\r\n\
            Connection: TE\r\nTrailer: X-Sum\r\nTransfer-Encoding: chunked\r\n\r\n\
            5\r\nhello\r\n0\r\nX-Sum: 7\r\n\r\n";
        stream.write_all(request.as_bytes()).unwrap();
        let head = http::read_head(&mut stream).unwrap();
        assert_eq!(head.status, 200);
        assert_eq!(http::read_chunk(&mut stream).unwrap().unwrap(), b"body");
        assert_eq!(http::read_chunk(&mut stream).unwrap(), None);
        assert_eq!(
            http::read_line(&mut stream).unwrap().to_ascii_lowercase(),
            "x-checksum: 42"
        );
        let request = &net.web.requests()[0];
        assert_eq!(request.trailers.get("x-sum").unwrap(), "7", "{request:?}");
    });
}

#[test]
fn responses_without_a_body_keep_the_connection_usable() {
    if !may_enter() {
        return;
    }
    with_agent(|_, agent| {
        let mut stream = agent.namespace().port(80);
        for (path, status) in [
            ("/nothing", 204),
            ("/same", 304),
            ("/hello", 200),
            ("/nothing", 204),
        ] {
            let answer = exchange(&mut stream, get("web.example", path));
            assert_eq!(answer.status, status, "{path}: {answer:?}");
        }
        stream
            .write_all(b"HEAD /hello HTTP/1.1\r\nHost: web.example\r\n\r\n")
            .unwrap();
        let head = http::read_head(&mut stream).unwrap();
        assert_eq!(
            (head.status, head.header("content-length")),
            (200, Some("5"))
        );
        assert_eq!(
            exchange(&mut stream, get("web.example", "/hello")).text(),
            "hello"
        );
        // A refusal of a HEAD has no body either.
        stream
            .write_all(b"HEAD / HTTP/1.1\r\nHost: evil.example\r\n\r\n")
            .unwrap();
        assert_eq!(http::read_head(&mut stream).unwrap().status, 403);
        assert_eq!(
            exchange(&mut stream, get("web.example", "/hello")).text(),
            "hello"
        );
    });
}

#[test]
fn client_that_waits_for_100_continue_receives_it() {
    with_agent(|net, agent| {
        let start = Instant::now();
        let got = agent.curl(
            "--http1.1 -H 'Expect: 100-continue' --expect100-timeout 20 -d hello https://api.example/length",
        );
        assert_eq!(got.body, "5");
        assert!(
            start.elapsed() < Duration::from_secs(15),
            "no 100 Continue arrived"
        );
        assert_eq!(net.api.requests().len(), 1);
        // Over HTTP/2 the library has no interim responses, and a client continues by itself (RFC
        // 9110, 10.1.1).
        let got = agent.curl(
            "--http2 -H 'Expect: 100-continue' --expect100-timeout 0.1 -d hello https://api.example/length",
        );
        assert_eq!(got.body, "5");
        for request in net.api.requests() {
            assert_eq!(request.header("expect"), None, "{request:?}");
        }
    });
}

#[test]
fn refused_request_gets_no_100_continue() {
    if !may_enter() {
        return;
    }
    with_agent(|net, agent| {
        // The response is the refusal, without a 100 before it, although no body was sent.
        let head = "POST / HTTP/1.1\r\nHost: evil.example\r\nExpect: 100-continue\r\n\
            Content-Length: 1000\r\n\r\n";
        let namespace = agent.namespace();
        refusal(&exchange(namespace.port(80), head), 403, "host_denied");
        let tls = inside::tls(namespace.port(443), Some("evil.example"), &["http/1.1"]);
        refusal(&exchange(tls, head), 403, "host_denied");
        // The same over HTTP/2, with a client that waits without a timeout.
        let program = r#"
            const session = require('http2').connect('https://evil.example');
            const request = session.request(
                {':method': 'POST', ':path': '/', 'expect': '100-continue'}, {endStream: false});
            request.on('continue', () => console.log('continue'));
            request.on('response', (head) => console.log(head[':status']));
            request.on('data', (data) => console.log(JSON.parse(data).reason));
            request.on('end', () => session.destroy());
        "#;
        agent.stdout_of(&format!("cat >~/expect.js <<'EOF'\n{program}\nEOF\n"));
        assert_eq!(agent.stdout_of("node ~/expect.js"), "403\nhost_denied");
        let requests = [net.api.requests(), net.web.requests()].concat();
        assert!(requests.is_empty(), "{requests:?}");
    });
}

#[test]
fn http_1_0_client_is_answered_and_disconnected() {
    if !may_enter() {
        return;
    }
    with_agent(|_, agent| {
        let namespace = agent.namespace();
        let answer = exchange(
            namespace.port(80),
            "GET /hello HTTP/1.0\r\nHost: web.example\r\n\r\n",
        );
        assert_eq!((answer.status, answer.text().as_str()), (200, "hello"));
        // A body of unknown length ends with the connection: HTTP/1.0 has no chunks.
        let answer = exchange(
            namespace.port(80),
            "GET /trailers HTTP/1.0\r\nHost: web.example\r\n\r\n",
        );
        assert_eq!(answer.header("transfer-encoding"), None, "{answer:?}");
        assert_eq!(answer.text(), "body");
        assert_eq!(
            agent.curl("--http1.0 https://api.example/hello").body,
            "hello"
        );
    });
}

#[test]
fn compressed_bodies_pass_unchanged() {
    with_agent(|net, agent| {
        let got = agent.stdout_of("curl -sS https://api.example/zstd | od -An -tx1 | tr -d ' \\n'");
        assert_eq!(got, "28b52ffd240529000068656c6c6f42");
        let line = "printf '\\x28\\xb5\\x2f\\xfd\\x24\\x05\\x29\\x00\\x00hello\\x42' | \
             curl -sS -H 'Content-Encoding: zstd' --data-binary @- https://api.example/length";
        assert_eq!(agent.stdout_of(line), "15");
        let requests = net.api.requests();
        let request = requests.last().unwrap();
        assert_eq!(request.header("content-encoding"), Some("zstd"));
        assert_eq!(&request.body[..4], b"\x28\xb5\x2f\xfd");
    });
}

#[test]
fn truncated_upstream_response_is_an_error_for_the_client() {
    with_agent(|_, agent| {
        for flags in ["--http1.1", "--http2"] {
            let output = agent.bash(&format!("curl -sS {flags} https://api.example/cut"));
            // curl's codes for a partial file, an empty reply, a receive failure and a stream
            // reset.
            let code = output.status.code();
            assert!(
                matches!(code, Some(18 | 52 | 56 | 92)),
                "{}",
                crate::traffic_fixture::describe(&output)
            );
        }
    });
}

#[test]
fn small_requests_on_a_reused_connection_are_not_delayed() {
    if !may_enter() {
        return;
    }
    with_agent(|_, agent| {
        let namespace: NetNamespace = agent.namespace();
        let mut plain = namespace.port(80);
        let mut tls = inside::tls(namespace.port(443), Some("api.example"), &["http/1.1"]);
        exchange(&mut plain, get("web.example", "/hello"));
        exchange(&mut tls, get("api.example", "/hello"));
        let (mut in_plain, mut in_tls) = (Vec::new(), Vec::new());
        for _ in 0..50 {
            let start = Instant::now();
            assert_eq!(
                exchange(&mut plain, get("web.example", "/hello")).text(),
                "hello"
            );
            in_plain.push(start.elapsed());
            let start = Instant::now();
            assert_eq!(
                exchange(&mut tls, get("api.example", "/hello")).text(),
                "hello"
            );
            in_tls.push(start.elapsed());
        }
        // Nagle's algorithm with delayed acknowledgements would cost 40 ms for each of the hundred
        // requests; a busy machine delays only a few.
        for (protocol, mut durations) in [("plain", in_plain), ("TLS", in_tls)] {
            durations.sort_unstable();
            let median = durations[durations.len() / 2];
            println!("{protocol}: {median:?} each");
            assert!(
                median < Duration::from_millis(30),
                "{protocol}: {median:?} each"
            );
        }
    });
}

#[test]
fn upload_is_streamed_to_the_upstream() {
    if !may_enter() {
        return;
    }
    let fixture = TrafficFixture::new();
    let (sender, receiver) = mpsc::channel();
    let sender = std::sync::Mutex::new(sender);
    let origin = OriginServer::raw(move |mut stream, _| {
        let mut received = Vec::new();
        let mut buffer = [0; 4096];
        while !received.ends_with(b"0\r\n\r\n") {
            let Ok(n) = stream.read(&mut buffer) else {
                return;
            };
            if n == 0 {
                return;
            }
            received.extend_from_slice(&buffer[..n]);
            sender.lock().unwrap().send(received.clone()).unwrap();
        }
        stream
            .write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
            .unwrap();
    });
    fixture.write(
        &Rules::new()
            .allow("web.example")
            .at("web.example", origin.address()),
    );
    let agent = fixture.create("fix");
    let mut stream = agent.namespace().port(80);
    stream.write_all(b"POST / HTTP/1.1\r\nHost: web.example\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nfirst\r\n").unwrap();
    let limit = wait::LIMIT;
    while !String::from_utf8_lossy(&receiver.recv_timeout(limit).unwrap()).contains("first") {}
    assert_eq!(exchange(&mut stream, "0\r\n\r\n").text(), "ok");
}
