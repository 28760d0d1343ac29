//! Connections without a request: idle connections of a client's pool have no audit record, and
//! failed connections have a record with the host name and the reason.

use std::io::Write;
use std::net::TcpStream;
use std::time::Duration;

use serde_json::Value;
use testkit::http;
use testkit::inside::{self, NetNamespace};
use testkit::origin::{OriginReply, OriginServer};
use testkit::wait;

use crate::traffic_fixture::{Agent, Rules, TrafficFixture, may_enter};

/// Time in which the gate must close a connection.
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
    check(&api, &agent, &agent.namespace());
}

/// Opens a tunnel through the proxy.
fn tunnel(namespace: &NetNamespace, to: &str) -> TcpStream {
    let mut stream = namespace.port(8080);
    write!(stream, "CONNECT {to} HTTP/1.1\r\nHost: {to}\r\n\r\n").unwrap();
    assert_eq!(http::read_head(&mut stream).unwrap().status, 200);
    stream
}

/// Audit records of requests and connections.
fn records(fixture: &TrafficFixture) -> Vec<Value> {
    let mut records = fixture.records();
    records.retain(|record| record["kind"] == "http");
    records
}

#[test]
fn idle_client_connections_leave_no_record() {
    with_agent(|_, agent, namespace| {
        for protocol in ["http/1.1", "h2"] {
            for client_closes in [true, false] {
                for proxied in [true, false] {
                    let stream = if proxied {
                        tunnel(namespace, "api.example:443")
                    } else {
                        namespace.port(443)
                    };
                    let mut tls = inside::tls(stream, Some("api.example"), &[protocol]);
                    inside::certificate(&mut tls).unwrap();
                    if client_closes {
                        tls.conn.send_close_notify();
                        tls.flush().unwrap();
                    } else {
                        assert!(
                            inside::closes_within(&mut tls, CLOSE_TIMEOUT),
                            "the connection stays open"
                        );
                    }
                }
            }
        }
        // Once the record of a later request exists, earlier records would exist too.
        assert_eq!(agent.curl("https://api.example/fence").status, 200);
        let all = wait::until("the record of a request", || {
            let all = records(agent.fixture);
            all.iter()
                .any(|record| record["path"] == "/fence")
                .then_some(all)
        });
        assert_eq!(all.len(), 1, "{all:?}");
    });
}

/// Waits for the record of a refusal with this reason and host.
fn wait_for_refusal(agent: &Agent<'_>, reason: &str, host: &str) {
    let record = wait_for_record(agent, reason, |record| record["host"] == host);
    assert_eq!(record["verdict"], "deny", "{record}");
}

/// Waits for a record with this reason.
fn wait_for_record(agent: &Agent<'_>, reason: &str, matches: impl Fn(&Value) -> bool) -> Value {
    let find = || {
        let mut all = records(agent.fixture).into_iter();
        all.find(|record| record["reason"] == reason && matches(record))
    };
    wait::until_or(find, || format!("{reason} in {:?}", records(agent.fixture)))
}

/// Waits for a record of a client that disconnected before any decision.
fn wait_for_client_left(agent: &Agent<'_>, host: &str) {
    let record = wait_for_record(agent, "client_left", |record| record["host"] == host);
    assert_eq!(record["verdict"], Value::Null, "{record}");
}

#[test]
fn missing_tls_hello_is_recorded_with_its_host() {
    with_agent(|api, agent, namespace| {
        let mut silent = tunnel(namespace, "silent.example:443");
        let mut half = tunnel(namespace, "half.example:443");
        half.write_all(&[0x16, 3, 1, 2, 0, 1, 0]).unwrap();
        let mut direct = namespace.port(443);
        for stream in [&mut silent, &mut half, &mut direct] {
            assert!(inside::closes_within(stream, CLOSE_TIMEOUT));
        }
        drop(tunnel(namespace, "left.example:443"));
        wait_for_refusal(agent, "client_timeout", "silent.example");
        wait_for_refusal(agent, "client_timeout", "half.example");
        wait_for_refusal(agent, "client_timeout", "192.0.2.1");
        wait_for_client_left(agent, "left.example");
        assert_eq!(api.connections(), 0);
    });
}

#[test]
fn failed_handshake_is_recorded_with_its_reason() {
    with_agent(|api, agent, namespace| {
        // The client trusts only the root certificate of another authority.
        agent.stdout_of(&format!(
            "cat >~/other.pem <<'EOF'\n{}EOF\n",
            agent.fixture.ca.pem()
        ));
        let output =
            agent.bash("curl -sS --capath /nowhere --cacert ~/other.pem https://api.example/");
        assert_eq!(
            output.status.code(),
            Some(60),
            "curl does not trust the certificate"
        );
        wait_for_refusal(agent, "tls_distrusted", "api.example");
        let proxy = "-x http://192.0.0.1:8080";
        agent.bash(&format!(
            "curl -sS {proxy} --capath /nowhere --cacert ~/other.pem https://tunnel.example/"
        ));
        wait_for_refusal(agent, "tls_distrusted", "tunnel.example");
        // Neither TLS nor text, and an invalid TLS hello.
        for (bytes, reason, name) in [
            (&[0x80, 0x2e, 1, 0][..], "not_tls", "ssl2.example"),
            (&[0x16, 3, 1, 0, 1, 2], "tls_client", "strange.example"),
        ] {
            let mut stream = tunnel(namespace, &format!("{name}:443"));
            stream.write_all(bytes).unwrap();
            assert!(inside::closes_within(&mut stream, CLOSE_TIMEOUT));
            wait_for_refusal(agent, reason, name);
        }
        // A client that disconnects in the middle.
        let mut stream = tunnel(namespace, "middle.example:443");
        let mut tls = inside::tls(&mut stream, Some("middle.example"), &[]);
        tls.conn.write_tls(&mut tls.sock).unwrap();
        drop(stream);
        wait_for_client_left(agent, "middle.example");
        assert_eq!(api.connections(), 0);
    });
}

// Issue 14, number 12.
#[test]
fn raw_tcp_on_a_captured_port_is_recorded() {
    with_agent(|api, agent, namespace| {
        // Neither TLS nor HTTP, and no line end: no byte is ever invalid.
        let greeting = b"SSH-2.0-OpenSSH_9.9";
        let mut streams: Vec<TcpStream> = [80, 443, 8080]
            .into_iter()
            .map(|port| namespace.port(port))
            .collect();
        streams.push(tunnel(namespace, "shell.example:443"));
        for stream in &mut streams {
            stream.write_all(greeting).unwrap();
        }
        for stream in &mut streams {
            assert!(inside::closes_within(stream, CLOSE_TIMEOUT));
        }
        for port in [80, 443, 8080] {
            let matches = |record: &Value| record["host"] == "192.0.2.1" && record["port"] == port;
            let found = wait_for_record(agent, "client_timeout", matches);
            assert_eq!(found["verdict"], "deny", "{found}");
        }
        wait_for_refusal(agent, "client_timeout", "shell.example");
        // The same bytes inside TLS, after ALPN chose HTTP/2.
        let mut tls = inside::tls(namespace.port(443), Some("api.example"), &["h2"]);
        tls.write_all(greeting).unwrap();
        assert!(inside::closes_within(&mut tls, CLOSE_TIMEOUT));
        wait_for_refusal(agent, "framing", "api.example");
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
        let found = wait_for_record(&agent, "port_denied", |record| record["port"] == port);
        assert_eq!(found["host"], host, "{found}");
        assert_eq!(found["verdict"], "deny", "{found}");
        assert_eq!(found["rule"], "egress.transparent_ports", "{found}");
        assert_eq!(found["sandbox"], agent.id.as_str(), "{found}");
    }
    // A connection to a port with a listener has only the record of its request.
    agent
        .curl("http://evil.example/")
        .refused(403, "host_denied");
    wait_for_record(&agent, "host_denied", |record| {
        record["host"] == "evil.example"
    });
    let mut all = records(&fixture).into_iter();
    assert!(!all.any(|record| record["reason"] == "port_denied" && record["port"] == 80));
}
