//! Reloads while requests are in flight: allowed requests continue, revoked requests end.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use testkit::http;
use testkit::inside;
use testkit::origin::{Latch, OriginReply, OriginServer};
use testkit::port::Port;
use testkit::wait;

use crate::traffic_fixture::{Rules, TrafficFixture, exchange, get, may_enter, refusal};

/// Time in which the gate must close a connection.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(20);

/// Number of reloads in a test; `PALISADE_RELOADS` sets it.
fn reloads() -> usize {
    std::env::var("PALISADE_RELOADS").map_or(20, |text| text.parse().expect("a number"))
}

#[test]
fn allowed_requests_succeed_and_denied_ones_fail_during_reloads() {
    if !may_enter() {
        return;
    }
    let fixture = TrafficFixture::new();
    let api = fixture.https(&["stays.example", "goes.example"], |_| {
        OriginReply::text("hello")
    });
    let stays = Rules::new()
        .allow("stays.example")
        .at("stays.example", api.address())
        .at("goes.example", api.address())
        .policy("rate_limits: {enabled: false}\n");
    let stays_and_goes = stays.clone().allow("goes.example");
    fixture.write(&stays_and_goes);
    let agent = fixture.create("fix");
    let (stop, done) = (
        Arc::new(AtomicBool::new(false)),
        Arc::new(AtomicUsize::new(0)),
    );
    let clients: Vec<_> = (0..4)
        .map(|number| {
            let (namespace, stop, done) = (agent.namespace(), Arc::clone(&stop), Arc::clone(&done));
            std::thread::spawn(move || {
                while !stop.load(Ordering::SeqCst) {
                    let mut tls =
                        inside::tls(namespace.port(443), Some("stays.example"), &["http/1.1"]);
                    for _ in 0..10 {
                        let answer = exchange(&mut tls, get("stays.example", "/"));
                        assert_eq!(answer.text(), "hello", "client {number}: {answer:?}");
                        done.fetch_add(1, Ordering::SeqCst);
                    }
                }
            })
        })
        .collect();
    let try_other = || {
        let tls = inside::tls(
            agent.namespace().port(443),
            Some("goes.example"),
            &["http/1.1"],
        );
        exchange(tls, get("goes.example", "/"))
    };
    for _ in 0..reloads() {
        assert_eq!(try_other().text(), "hello");
        fixture.reload(&stays);
        refusal(&try_other(), 403, "host_denied");
        fixture.reload(&stays_and_goes);
    }
    stop.store(true, Ordering::SeqCst);
    for client in clients {
        client.join().expect("an allowed request failed");
    }
    assert!(
        done.load(Ordering::SeqCst) > reloads(),
        "requests must succeed during the reloads"
    );
}

/// Rules that allow only `path`, in the allowlist and again in a policy bundle. The allowlist of
/// one version with the bundle of the other version would cause a refusal by the bundle, which
/// neither version alone causes.
fn rules_allowing_only(
    fixture: &TrafficFixture,
    path: &str,
    web: &OriginServer,
    listen: &Port,
    tools: &Port,
) -> Rules {
    let name = path.trim_start_matches('/');
    let dir = fixture.gate_dir.path().join(name);
    std::fs::create_dir(&dir).unwrap();
    let policy = format!("package http.authz\n\nallow if input.path == \"{path}\"\n");
    std::fs::write(dir.join("policy.rego"), policy).unwrap();
    Rules::new()
        .allow(&format!("{{host: web.example, paths: [{path}]}}"))
        .at("web.example", web.address())
        .policy("rate_limits: {enabled: false}\n")
        .egress(&format!("listen: [\"{}\"]", listen.address()))
        .section(&format!(
            "server: {{single_port: \"{}\"}}",
            tools.address()
        ))
        .section(&format!(
            "policies: {{timeout: 5s, bundles: [{{id: {name}, path: {name}, entrypoint: http/authz}}]}}"
        ))
}

#[test]
fn reloads_under_load_decide_by_one_snapshot_and_close_listeners() {
    if !may_enter() {
        return;
    }
    let fixture = TrafficFixture::new();
    let web = OriginServer::http(|_| OriginReply::text("hello"));
    let ports: [Port; 4] = std::array::from_fn(|_| Port::take());
    let rules = [
        rules_allowing_only(&fixture, "/even", &web, &ports[0], &ports[1]),
        rules_allowing_only(&fixture, "/odd", &web, &ports[2], &ports[3]),
    ];
    fixture.write(&rules[0]);
    let agent = fixture.create("fix");
    let stop = Arc::new(AtomicBool::new(false));
    let clients: Vec<_> = ["/even", "/odd", "/even", "/odd"]
        .into_iter()
        .map(|path| {
            let (namespace, stop) = (agent.namespace(), Arc::clone(&stop));
            std::thread::spawn(move || {
                let mut decided = [0_usize; 2];
                let mut stream = namespace.port(80);
                while !stop.load(Ordering::SeqCst) {
                    stream
                        .write_all(get("web.example", path).as_bytes())
                        .unwrap_or_default();
                    // A reload may end an answer in flight, and with it the connection.
                    let Ok(answer) = http::read_response(&mut stream) else {
                        stream = namespace.port(80);
                        continue;
                    };
                    if answer.text() == "hello" {
                        decided[0] += 1;
                    } else {
                        refusal(&answer, 403, "path_denied");
                        decided[1] += 1;
                    }
                }
                decided
            })
        })
        .collect();
    for turn in 1..=reloads() {
        let (new, old) = (turn % 2, (turn + 1) % 2);
        fixture.reload(&rules[new]);
        for port in &ports[new * 2..new * 2 + 2] {
            assert!(TcpStream::connect(port.address()).is_ok(), "turn {turn}");
        }
        for port in &ports[old * 2..old * 2 + 2] {
            let connected = TcpStream::connect(port.address());
            assert!(connected.is_err(), "turn {turn}: {:?}", port.address());
        }
    }
    stop.store(true, Ordering::SeqCst);
    for client in clients {
        let decided = client
            .join()
            .expect("every request is decided by one snapshot");
        assert!(decided.iter().all(|count| *count > 0), "{decided:?}");
    }
}

#[test]
fn refused_configuration_keeps_the_current_rules() {
    let fixture = TrafficFixture::new();
    let web = OriginServer::http(|_| OriginReply::text("hello"));
    let rules = Rules::new()
        .allow("web.example")
        .at("web.example", web.address());
    fixture.write(&rules);
    let agent = fixture.create("fix");
    fixture.write(&rules.clone().egress("nonsense: true"));
    assert!(!fixture.run(&["config", "reload"]).status.success());
    assert_eq!(agent.curl("http://web.example/").body, "hello");
    agent
        .curl("http://evil.example/")
        .refused(403, "host_denied");
}

#[test]
fn downloads_and_websockets_end_when_their_rule_is_revoked() {
    if !may_enter() {
        return;
    }
    let fixture = TrafficFixture::new();
    let latch = Latch::new();
    let held = latch.clone();
    let answer = move |request: &testkit::origin::OriginRequest| match request.path() {
        "/ws" => OriginReply::echo("websocket"),
        "/slow" => OriginReply::text("begun").body_held_until(&held),
        "/late" => OriginReply::text("late").held_until(&held),
        "/large" => OriginReply::large(1 << 40),
        _ => OriginReply::text("hello"),
    };
    let web = OriginServer::http(answer);
    let stays = Rules::new()
        .allow("stays.example")
        .at("stays.example", web.address())
        .at("goes.example", web.address());
    fixture.write(&stays.clone().allow("goes.example"));
    let agent = fixture.create("fix");
    let open = |host: &str, path: &str| {
        let mut stream = agent.namespace().port(80);
        let upgrade = "Connection: upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n";
        let more = if path == "/ws" { upgrade } else { "" };
        write!(stream, "GET {path} HTTP/1.1\r\nHost: {host}\r\n{more}\r\n").unwrap();
        let head = http::read_head(&mut stream).unwrap();
        assert!(matches!(head.status, 101 | 200), "{head:?}");
        if path == "/ws" {
            stream.write_all(b"ping").unwrap();
            stream.read_exact(&mut [0; 4]).unwrap();
        } else if path == "/large" {
            stream.read_exact(&mut [0; 4096]).unwrap();
        } else {
            assert_eq!(http::read_chunk(&mut stream).unwrap().unwrap(), b"begun");
        }
        stream
    };
    // A request with an endless response body, and a request without a response yet.
    let mut fast = open("goes.example", "/large");
    let mut waiting = agent.namespace().port(80);
    waiting
        .write_all(get("goes.example", "/late").as_bytes())
        .unwrap();
    wait::until("the upstream to receive the request", || {
        web.requests()
            .iter()
            .any(|request| request.path() == "/late")
            .then_some(())
    });
    let mut revoked = [open("goes.example", "/ws"), open("goes.example", "/slow")];
    let mut socket = open("stays.example", "/ws");
    let mut download = open("stays.example", "/slow");
    fixture.reload(&stays);
    for stream in &mut revoked {
        assert!(inside::closes_within(stream, CLOSE_TIMEOUT));
    }
    assert!(
        inside::closes_within(&mut fast, CLOSE_TIMEOUT),
        "the endless response must end"
    );
    refusal(
        &http::read_response(&mut waiting).unwrap(),
        403,
        "host_denied",
    );
    socket.write_all(b"ping").unwrap();
    socket.read_exact(&mut [0; 4]).unwrap();
    latch.open();
    assert_eq!(http::read_chunk(&mut download).unwrap(), None);
}

#[test]
fn request_buffered_over_a_revoking_reload_is_not_forwarded() {
    if !may_enter() {
        return;
    }
    let fixture = TrafficFixture::new();
    let api = fixture.https(&["api.github.com"], |_| OriginReply::text("{}"));
    let without = Rules::new().at("api.github.com", api.address());
    fixture.write(&without.clone().allow("api.github.com"));
    let sandbox = fixture.json(&["create", "fix", "--no-repo", "--repo", "acme/app"]);
    let id = sandbox["id"].as_str().unwrap();
    let namespace = inside::NetNamespace::of_sandbox(&fixture.gate_dir, id);
    // The rules for GitHub read this body before the request is forwarded.
    let (first, second) = ("{\"title\": \"a\", ", "\"body\": \"b\"}");
    let post = || {
        let mut tls = inside::tls(namespace.port(443), Some("api.github.com"), &["http/1.1"]);
        let length = first.len() + second.len();
        write!(
            tls,
            "POST /repos/acme/app/issues HTTP/1.1\r\nHost: api.github.com\r\n\
             Content-Type: application/json\r\nContent-Length: {length}\r\n\r\n{first}"
        )
        .unwrap();
        tls.flush().unwrap();
        tls
    };
    let mut passes = post();
    assert_eq!(
        exchange(&mut passes, second).status,
        200,
        "the rules allow the request"
    );
    let mut held = post();
    // After the response to another request, the gate has also checked the head of the held
    // request.
    let mut other = inside::tls(namespace.port(443), Some("evil.example"), &["http/1.1"]);
    refusal(
        &exchange(&mut other, get("evil.example", "/")),
        403,
        "host_denied",
    );
    fixture.reload(&without);
    let _written = held
        .write_all(second.as_bytes())
        .and_then(|()| held.flush());
    if let Ok(answer) = http::read_response(&mut held) {
        assert_eq!(answer.status, 403, "{answer:?} {}", answer.text());
    }
    assert_eq!(api.requests().len(), 1, "{:?}", api.requests());
    wait::until("the record of the refusal", || {
        let records = fixture.records();
        let mut records = records.iter();
        records
            .any(|record| record["host"] == "api.github.com" && record["verdict"] == "deny")
            .then_some(())
    });
}

#[test]
fn requests_in_flight_end_when_their_sandbox_is_deleted() {
    if !may_enter() {
        return;
    }
    let fixture = TrafficFixture::new();
    let latch = Latch::new();
    let held = latch.clone();
    let web = OriginServer::http(move |_| OriginReply::text("begun").body_held_until(&held));
    fixture.write(
        &Rules::new()
            .allow("web.example")
            .at("web.example", web.address()),
    );
    let agent = fixture.create("fix");
    let namespace = agent.namespace();
    let mut direct = namespace.port(80);
    direct
        .write_all(get("web.example", "/").as_bytes())
        .unwrap();
    let mut tunnel = namespace.port(8080);
    tunnel
        .write_all(b"CONNECT web.example:80 HTTP/1.1\r\nHost: web.example:80\r\n\r\n")
        .unwrap();
    assert_eq!(http::read_head(&mut tunnel).unwrap().status, 200);
    tunnel
        .write_all(get("web.example", "/").as_bytes())
        .unwrap();
    let mut idle = namespace.port(8080);
    idle.write_all(b"CONNECT web.example:80 HTTP/1.1\r\nHost: web.example:80\r\n\r\n")
        .unwrap();
    assert_eq!(http::read_head(&mut idle).unwrap().status, 200);
    for stream in [&mut direct, &mut tunnel] {
        assert_eq!(http::read_head(&mut *stream).unwrap().status, 200);
    }
    fixture.ok(&["delete", "fix", "--force"]);
    for stream in [&mut direct, &mut tunnel, &mut idle] {
        stream
            .set_read_timeout(Some(Duration::from_secs(10)))
            .unwrap();
        assert!(inside::closes_within(&mut *stream, CLOSE_TIMEOUT));
    }
    wait::until("the connections to the upstream to close", || {
        (web.open() == 0).then_some(())
    });
}
