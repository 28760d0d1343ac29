//! Bounded hostile load: the gate's memory stays limited, and other sandboxes are served.

use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream, UdpSocket};
use std::time::{Duration, Instant};

use nix::sys::resource::{Resource, getrlimit, setrlimit};
use testkit::inside;
use testkit::origin::OriginReply;
use testkit::wait;

use crate::traffic_fixture::{Agent, Rules, TrafficFixture, exchange, get, may_enter};

const API: &str = "https://api.example/";

/// Runs `check` with a hostile sandbox and a normal sandbox.
fn with_two(
    rules: impl FnOnce(Rules) -> Rules,
    check: impl FnOnce(&TrafficFixture, &Agent<'_>, &Agent<'_>),
) {
    if !may_enter() {
        return;
    }
    let fixture = TrafficFixture::new();
    let api = fixture.https(&["api.example", "fails.example"], |_| {
        OriginReply::text("hello")
    });
    let base_rules = Rules::new()
        .allow("api.example")
        .at("api.example", api.address());
    fixture.write(&rules(base_rules));
    let (evil, good) = (fixture.create("evil"), fixture.create("good"));
    assert_eq!(good.curl(API).status, 200);
    check(&fixture, &evil, &good);
}

/// Sends the rest one byte at a time until the peer closes. Returns the elapsed time, or `None` if
/// the peer does not close.
fn send_slowly(mut stream: impl Read + Write, rest: &[u8]) -> Option<Duration> {
    let start = Instant::now();
    for byte in rest {
        if stream
            .write_all(&[*byte])
            .and_then(|()| stream.flush())
            .is_err()
        {
            return Some(start.elapsed());
        }
        match stream.read(&mut [0; 4096]) {
            Ok(0) => return Some(start.elapsed()),
            Ok(_) => {}
            Err(error) if error.kind() == ErrorKind::WouldBlock => {}
            Err(_) => return Some(start.elapsed()),
        }
    }
    None
}

#[test]
fn slowly_sent_heads_time_out() {
    with_two(
        |rules| rules.egress("timeouts: {header: 3s}"),
        |_, evil, _| {
            let namespace = evil.namespace();
            // Long enough for two minutes at this pace.
            let rest = vec![b'a'; 1200];
            let connect_with_short_reads = |port: u16| {
                let stream = namespace.port(port);
                stream
                    .set_read_timeout(Some(Duration::from_millis(100)))
                    .unwrap();
                stream
            };
            std::thread::scope(|scope| {
                for port in [80, 8080] {
                    let (rest, connect_with_short_reads) = (&rest, &connect_with_short_reads);
                    scope.spawn(move || {
                        let mut stream = connect_with_short_reads(port);
                        stream
                            .write_all(b"GET / HTTP/1.1\r\nHost: api.example\r\nX-A: ")
                            .unwrap();
                        let ended =
                            send_slowly(&stream, rest).expect("the gate must close the connection");
                        assert!(ended < Duration::from_secs(20), "{ended:?} on {port}");
                    });
                }
                let (rest, connect_with_short_reads, namespace) =
                    (&rest, &connect_with_short_reads, &namespace);
                scope.spawn(move || {
                    // A slow head inside TLS, after a normal handshake.
                    let stream = namespace.port(443);
                    let mut tls = inside::tls(stream, Some("api.example"), &["http/1.1"]);
                    tls.write_all(b"GET / HTTP/1.1\r\nHost: api.example\r\nX-A: ")
                        .unwrap();
                    tls.sock
                        .set_read_timeout(Some(Duration::from_millis(100)))
                        .unwrap();
                    let ended =
                        send_slowly(&mut tls, rest).expect("the gate must close the connection");
                    assert!(ended < Duration::from_secs(20), "{ended:?} in TLS");
                });
                scope.spawn(move || {
                    // A TLS hello whose bytes arrive slowly.
                    let mut stream = connect_with_short_reads(443);
                    stream
                        .write_all(&[0x16, 3, 1, 4, 0, 1, 0, 3, 0xfc, 3, 3])
                        .unwrap();
                    let ended =
                        send_slowly(&stream, rest).expect("the gate must close the connection");
                    assert!(ended < Duration::from_secs(20), "{ended:?} of a hello");
                });
            });
        },
    );
}

/// Number of series without histogram buckets.
fn series(fixture: &TrafficFixture) -> usize {
    let metrics = fixture.metrics();
    metrics
        .lines()
        .filter(|line| !line.starts_with('#'))
        .count()
}

#[test]
fn ten_thousand_unlisted_names_grow_neither_metrics_nor_memory() {
    with_two(
        |rules| {
            rules
                .allow("\"*.wild.example\"")
                .policy("rate_limits: {enabled: false}\n")
        },
        |fixture, evil, good| {
            let namespace = evil.namespace();
            let send_denied = |from: usize, to: usize| {
                let mut plain = namespace.port(80);
                for n in (from..to).step_by(50) {
                    let requested = (n..n + 50).map(|n| get(&format!("h{n}.evil.example"), "/"));
                    plain
                        .write_all(requested.collect::<String>().as_bytes())
                        .unwrap();
                    for _ in 0..50 {
                        let answer = testkit::http::read_response(&mut plain).unwrap();
                        assert_eq!(answer.status, 403, "{answer:?}");
                    }
                }
            };
            // Certificates are issued for names and addresses, too.
            let handshake = |from: u32, to: u32| {
                for n in from..to {
                    let name = format!("h{n}.evil.example");
                    let mut tls = inside::tls(namespace.port(443), Some(&name), &["http/1.1"]);
                    assert_eq!(exchange(&mut tls, get(&name, "/")).status, 403);
                }
            };
            let look_up = |from: u32, to: u32| {
                let socket = namespace.within(|| UdpSocket::bind("0.0.0.0:0")).unwrap();
                socket
                    .connect(SocketAddr::from(([192, 0, 0, 1], 53)))
                    .unwrap();
                for n in from..to {
                    let label = format!("h{n}");
                    let mut query = b"\x12\x34\x01\x00\0\x01\0\0\0\0\0\0".to_vec();
                    for label in [label.as_str(), "evil", "example"] {
                        query.push(u8::try_from(label.len()).unwrap());
                        query.extend(label.as_bytes());
                    }
                    query.extend([0, 0, 1, 0, 1]);
                    // Most queries are dropped, because only a limited number is answered at a
                    // time.
                    socket.send(&query).unwrap();
                }
            };
            send_denied(0, 300);
            handshake(0, 50);
            look_up(0, 300);
            wait::until("the metrics to stop changing", || {
                (series(fixture) == series(fixture)).then_some(())
            });
            let (before, memory) = (series(fixture), fixture.peak_memory());
            send_denied(300, 10_300);
            handshake(50, 350);
            look_up(300, 10_300);
            let after = series(fixture);
            assert!(after <= before + 2, "{before} series became {after}");
            let grown = fixture.peak_memory() - memory;
            println!("{grown} KiB, {before} series before and {after} after");
            assert!(grown < 48 * 1024, "{grown} KiB");
            assert_eq!(good.curl(API).status, 200);
        },
    );
}

/// A frame of HTTP/2.
fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let length = u32::try_from(payload.len()).unwrap().to_be_bytes();
    let mut frame = length[1..].to_vec();
    frame.extend([kind, flags]);
    frame.extend(stream.to_be_bytes());
    frame.extend(payload);
    frame
}

/// The HTTP/2 connection preface (RFC 9113, 3.4).
const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
// Frame types (RFC 9113, 6).
const HEADERS: u8 = 1;
const RESET: u8 = 3;
const SETTINGS: u8 = 4;
const PING: u8 = 6;
const CONTINUATION: u8 = 9;

/// The header block of GET https://api.example/ in HPACK, without the dynamic table.
fn request() -> Vec<u8> {
    let mut block = vec![0x82, 0x87, 0x84, 0x01, 11];
    block.extend(b"api.example");
    block
}

/// Sends frames until the last one or until the peer closes. Returns their number.
fn flood(agent: &Agent<'_>, frames: impl Iterator<Item = Vec<u8>>) -> usize {
    let mut tls = inside::tls(agent.namespace().port(443), Some("api.example"), &["h2"]);
    tls.sock
        .set_write_timeout(Some(Duration::from_secs(5)))
        .unwrap();
    let mut sent = 0;
    let mut bytes = [PREFACE, &frame(SETTINGS, 0, 0, &[])].concat();
    for next in frames {
        bytes.extend(next);
        if bytes.len() > 16 * 1024 {
            if tls.write_all(&bytes).is_err() {
                break;
            }
            bytes.clear();
        }
        sent += 1;
    }
    let _closed = tls.write_all(&bytes);
    sent
}

/// Runs a flood four times, while another sandbox must be served and the gate's memory stay
/// bounded.
fn assert_flood_is_survived(flood_once: impl Fn(&Agent<'_>) -> usize + Sync) {
    let no_limits = "rate_limits: {enabled: false}\n";
    with_two(
        |rules| rules.policy(no_limits),
        |fixture, evil, good| {
            let memory = fixture.peak_memory();
            std::thread::scope(|scope| {
                let flooding = scope.spawn(|| (0..4).map(|_| flood_once(evil)).sum::<usize>());
                for _ in 0..5 {
                    assert_eq!(good.curl(API).status, 200);
                }
                assert!(flooding.join().unwrap() > 100);
            });
            assert_eq!(good.curl(API).status, 200);
            assert_eq!(evil.curl(API).status, 200);
            let grown = fixture.peak_memory() - memory;
            println!("{grown} KiB");
            assert!(grown < 64 * 1024, "{grown} KiB");
        },
    );
}

#[test]
fn http2_rapid_reset_flood_is_survived() {
    assert_flood_is_survived(|evil| {
        let streams = (0..20_000_u32).map(|n| n * 2 + 1);
        let pairs = streams.map(|id| {
            [
                frame(HEADERS, 5, id, &request()),
                frame(RESET, 0, id, &[0, 0, 0, 8]),
            ]
            .concat()
        });
        flood(evil, pairs)
    });
}

#[test]
fn http2_settings_and_ping_flood_is_survived() {
    assert_flood_is_survived(|evil| {
        let settings = (0..50_000).map(|n| match n % 2 {
            0 => frame(SETTINGS, 0, 0, &[0, 4, 0, 0, 255, 255]),
            _ => frame(PING, 0, 0, &[7; 8]),
        });
        flood(evil, settings)
    });
}

#[test]
fn http2_continuation_flood_is_survived() {
    assert_flood_is_survived(|evil| {
        let first = std::iter::once(frame(HEADERS, 1, 1, &request()));
        let mut more = vec![0x00, 3];
        more.extend(b"x-a");
        more.extend([0x7f, 0x80 | 1, 7]);
        more.extend([b'a'; 1024]);
        let more = (0..20_000).map(move |_| frame(CONTINUATION, 0, 1, &more));
        flood(evil, first.chain(more))
    });
}

/// Raises the limit of open files.
fn raise_file_limit() {
    let (_, most) = getrlimit(Resource::RLIMIT_NOFILE).unwrap();
    setrlimit(Resource::RLIMIT_NOFILE, most, most).unwrap();
}

#[test]
fn connections_of_one_sandbox_do_not_exhaust_those_of_another() {
    with_two(
        |rules| rules,
        |fixture, evil, good| {
            raise_file_limit();
            let before = fixture.peak_memory();
            let open = |count: usize, then: fn(&mut TcpStream)| -> Vec<TcpStream> {
                let to = SocketAddr::from(([192, 0, 2, 1], 8080));
                evil.namespace().within(move || {
                    let opened = (0..count).map(|_| {
                        let mut stream = TcpStream::connect(to).unwrap();
                        stream.set_read_timeout(Some(wait::LIMIT)).unwrap();
                        then(&mut stream);
                        stream
                    });
                    opened.collect()
                })
            };
            let silent = open(1000, |_| {});
            let tunnels = open(1000, |stream| {
                stream
                    .write_all(b"CONNECT api.example:443 HTTP/1.1\r\nHost: api.example:443\r\n\r\n")
                    .unwrap();
                let head = testkit::http::read_head(stream).unwrap();
                assert_eq!(head.status, 200);
            });
            assert_eq!(good.curl(API).status, 200);
            assert_eq!(fixture.control("GET", "/v1/health").status, 200);
            let grown = fixture.peak_memory() - before;
            println!(
                "{} KiB for each of {}",
                grown / 2000,
                silent.len() + tunnels.len()
            );
            assert!(grown < 2000 * 40, "{grown} KiB");
            drop((silent, tunnels));
            assert_eq!(evil.curl(API).status, 200);
        },
    );
}

#[test]
fn tunnels_count_towards_the_connection_limit() {
    with_two(
        |rules| rules.egress("timeouts: {header: 600s}"),
        |_, evil, good| {
            raise_file_limit();
            let to = SocketAddr::from(([192, 0, 2, 1], 8080));
            // More connections than a sandbox may have at a time: the last connection waits.
            let (opened, waiting) = evil.namespace().within(move || {
                let mut streams = Vec::new();
                for _ in 0..4300 {
                    let mut stream = TcpStream::connect(to).unwrap();
                    stream
                        .write_all(
                            b"CONNECT api.example:443 HTTP/1.1\r\nHost: api.example:443\r\n\r\n",
                        )
                        .unwrap();
                    stream
                        .set_read_timeout(Some(Duration::from_secs(10)))
                        .unwrap();
                    match testkit::http::read_head(&mut stream) {
                        Ok(head) => assert_eq!(head.status, 200),
                        Err(error) => {
                            assert_eq!(error.kind(), ErrorKind::WouldBlock, "{error}");
                            return (streams, Some(stream));
                        }
                    }
                    streams.push(stream);
                }
                (streams, None)
            });
            let mut waiting = waiting.expect("a connection above the limit must wait");
            assert!(opened.len() > 1000, "{}", opened.len());
            assert_eq!(good.curl(API).status, 200);
            // The next connection gets a slot that becomes free.
            drop(opened);
            waiting.set_read_timeout(Some(wait::LIMIT)).unwrap();
            assert_eq!(testkit::http::read_head(&mut waiting).unwrap().status, 200);
        },
    );
}
