//! Connections without a request: idle ones of a client's pool have no record,
//! and failed ones have one with the name and the reason.

use std::io::Write;
use std::net::TcpStream;
use std::time::Duration;

use serde_json::Value;
use testkit::http;
use testkit::inside::{self, NetNamespace};
use testkit::origin::{OriginReply, OriginServer};
use testkit::wait;

use crate::traffic_fixture::{Agent, Rules, TrafficFixture, may_enter};

const CLOSE_TIMEOUT: Duration = Duration::from_secs(20);

fn with_agent(check: impl FnOnce(&OriginServer, &Agent<'_>, &NetNamespace)) {
    if !may_enter() {
        return;
    }
    let fixture = TrafficFixture::new();
    let api = fixture.https(&["api.example"], |_| OriginReply::text("hello"));
    let rules = Rules::new()
        .allow("api.example")
        .at("api.example", api.address())
        .egress("timeouts: {header: 3s}");
    fixture.write(&rules);
    let agent = fixture.create("fix");
    check(&api, &agent, &agent.inside());
}

/// A tunnel through the proxy.
fn tunnel(inside: &NetNamespace, to: &str) -> TcpStream {
    let mut stream = inside.port(8080);
    write!(stream, "CONNECT {to} HTTP/1.1\r\nHost: {to}\r\n\r\n").unwrap();
    assert_eq!(http::read_head(&mut stream).unwrap().status, 200);
    stream
}

/// Audit records of requests and connections.
fn records(fixture: &TrafficFixture) -> Vec<Value> {
    let mut records = fixture.records();
    records.retain(|one| one["kind"] == "http");
    records
}

#[test]
fn idle_client_connections_leave_no_record() {
    with_agent(|_, agent, inside| {
        for protocol in ["http/1.1", "h2"] {
            for left in [true, false] {
                for proxied in [true, false] {
                    let stream = if proxied {
                        tunnel(inside, "api.example:443")
                    } else {
                        inside.port(443)
                    };
                    let mut tls = inside::tls(stream, Some("api.example"), &[protocol]);
                    inside::certificate(&mut tls).unwrap();
                    if left {
                        tls.conn.send_close_notify();
                        tls.flush().unwrap();
                    } else {
                        assert!(
                            inside::ends(&mut tls, CLOSE_TIMEOUT),
                            "the connection stays open"
                        );
                    }
                }
            }
        }
        // Later requests are on record, so earlier records would be, too.
        assert_eq!(agent.curl("https://api.example/fence").status, 200);
        let all = wait::until("the record of a request", || {
            let all = records(agent.fixture);
            all.iter().any(|one| one["path"] == "/fence").then_some(all)
        });
        assert_eq!(all.len(), 1, "{all:?}");
    });
}

/// Waits for a record of a refusal for that reason that names that host.
fn recorded(agent: &Agent<'_>, reason: &str, host: &str) {
    let record = record(agent, reason, |one| one["host"] == host);
    assert_eq!(record["verdict"], "deny", "{record}");
}

/// Waits for a record of that reason.
fn record(agent: &Agent<'_>, reason: &str, is_meant: impl Fn(&Value) -> bool) -> Value {
    let find = || {
        let mut all = records(agent.fixture).into_iter();
        all.find(|one| one["reason"] == reason && is_meant(one))
    };
    wait::until_or(find, || format!("{reason} in {:?}", records(agent.fixture)))
}

/// Waits for a record of a client that disconnected before any decision.
fn left(agent: &Agent<'_>, host: &str) {
    let record = record(agent, "client_left", |one| one["host"] == host);
    assert_eq!(record["verdict"], Value::Null, "{record}");
}

#[test]
fn missing_tls_hello_is_recorded_with_its_host() {
    with_agent(|api, agent, inside| {
        let mut silent = tunnel(inside, "silent.example:443");
        let mut half = tunnel(inside, "half.example:443");
        half.write_all(&[0x16, 3, 1, 2, 0, 1, 0]).unwrap();
        let mut direct = inside.port(443);
        for stream in [&mut silent, &mut half, &mut direct] {
            assert!(inside::ends(stream, CLOSE_TIMEOUT));
        }
        drop(tunnel(inside, "left.example:443"));
        recorded(agent, "client_timeout", "silent.example");
        recorded(agent, "client_timeout", "half.example");
        recorded(agent, "client_timeout", "192.0.2.1");
        left(agent, "left.example");
        assert_eq!(api.connections(), 0);
    });
}

#[test]
fn failed_handshake_is_recorded_with_its_reason() {
    with_agent(|api, agent, inside| {
        // A root of another authority.
        agent.stdout_of(&format!(
            "cat >~/other.pem <<'EOF'\n{}EOF\n",
            agent.fixture.ca.pem()
        ));
        let output =
            agent.bash("curl -sS --capath /nowhere --cacert ~/other.pem https://api.example/");
        assert_eq!(output.status.code(), Some(60), "curl does not trust it");
        recorded(agent, "tls_distrusted", "api.example");
        let proxy = "-x http://192.0.0.1:8080";
        agent.bash(&format!(
            "curl -sS {proxy} --capath /nowhere --cacert ~/other.pem https://tunnel.example/"
        ));
        recorded(agent, "tls_distrusted", "tunnel.example");
        // Neither TLS nor text, and an invalid TLS hello.
        for (bytes, reason, name) in [
            (&[0x80, 0x2e, 1, 0][..], "not_tls", "ssl2.example"),
            (&[0x16, 3, 1, 0, 1, 2], "tls_client", "strange.example"),
        ] {
            let mut stream = tunnel(inside, &format!("{name}:443"));
            stream.write_all(bytes).unwrap();
            assert!(inside::ends(&mut stream, CLOSE_TIMEOUT));
            recorded(agent, reason, name);
        }
        // A client that disconnects in the middle.
        let mut stream = tunnel(inside, "middle.example:443");
        let mut tls = inside::tls(&mut stream, Some("middle.example"), &[]);
        tls.conn.write_tls(&mut tls.sock).unwrap();
        drop(stream);
        left(agent, "middle.example");
        assert_eq!(api.connections(), 0);
    });
}

// Issue 14, number 12.
#[test]
fn raw_tcp_on_a_captured_port_is_recorded() {
    with_agent(|api, agent, inside| {
        // Neither TLS nor HTTP, and no line end: no byte is ever invalid.
        let greeting = b"SSH-2.0-OpenSSH_9.9";
        let mut streams: Vec<TcpStream> = [80, 443, 8080]
            .into_iter()
            .map(|port| inside.port(port))
            .collect();
        streams.push(tunnel(inside, "shell.example:443"));
        for stream in &mut streams {
            stream.write_all(greeting).unwrap();
        }
        for stream in &mut streams {
            assert!(inside::ends(stream, CLOSE_TIMEOUT));
        }
        for port in [80, 443, 8080] {
            let is_meant = |one: &Value| one["host"] == "192.0.2.1" && one["port"] == port;
            let found = record(agent, "client_timeout", is_meant);
            assert_eq!(found["verdict"], "deny", "{found}");
        }
        recorded(agent, "client_timeout", "shell.example");
        // The same inside TLS, after ALPN chose HTTP/2.
        let mut tls = inside::tls(inside.port(443), Some("api.example"), &["h2"]);
        tls.write_all(greeting).unwrap();
        assert!(inside::ends(&mut tls, CLOSE_TIMEOUT));
        recorded(agent, "framing", "api.example");
        assert_eq!(api.connections(), 0);
    });
}

// Issue 14, number 12.
#[test]
fn connection_to_a_port_without_listener_is_recorded() {
    let fixture = TrafficFixture::new();
    fixture.write(&Rules::new().allow("api.example"));
    let agent = fixture.create("fix");
    for (host, port) in [
        ("203.0.113.7", 22),
        ("2001:db8::7", 25),
        ("shell.example", 2222),
    ] {
        let output = agent.bash(&format!("exec 3<>/dev/tcp/{host}/{port}"));
        let printed = testkit::output::stderr(&output);
        assert!(printed.contains("Connection refused"), "{host}: {printed}");
        let found = record(&agent, "port_denied", |one| one["port"] == port);
        assert_eq!(found["host"], host, "{found}");
        assert_eq!(found["verdict"], "deny", "{found}");
        assert_eq!(found["rule"], "egress.transparent_ports", "{found}");
        assert_eq!(found["sandbox"], agent.id.as_str(), "{found}");
    }
    // A connection to a port with a listener has only the record of its request.
    agent
        .curl("http://evil.example/")
        .refused(403, "host_denied");
    record(&agent, "host_denied", |one| one["host"] == "evil.example");
    let mut all = records(&fixture).into_iter();
    assert!(!all.any(|one| one["reason"] == "port_denied" && one["port"] == 80));
}
