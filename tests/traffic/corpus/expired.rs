//! Requests and DNS queries of a shared network's container whose registration has expired.

use std::net::TcpStream;
use std::process::Command;

use serde_json::json;
use testkit::http::{self, HttpResponse};
use testkit::inside;
use testkit::port::Port;
use testkit::wait;

use super::{Net, QUERIES, SHARED, name_outcome};
use crate::traffic_fixture::{exchange, get};

/// The container whose registration expires.
const ID: &str = "short";
/// The address of that container.
const IP: &str = "127.0.0.5";

/// The source address of a connection that the test opens itself.
const OWN_IP: &str = "127.0.0.1";

/// Lifetime of a registration, in seconds: enough for a request on a new connection.
const SECONDS_TO_CONNECT: u64 = 8;

impl Net {
    fn register_for(&self, ip: &str, seconds: u64) {
        let body = json!({
            "container_id": ID, "ip_address": ip, "ttl_seconds": seconds,
            "metadata": {"repo": "acme/app"},
        });
        let control = self.fixture.gate_dir.control();
        let path = "/internal/containers";
        let answer = http::send(&control, "POST", path, body.to_string().as_bytes()).unwrap();
        assert!(matches!(answer.status, 200 | 201), "{}", answer.text());
    }

    /// Waits until the registration has expired. The row is still there.
    fn await_expiry(&self) {
        wait::until("the registration to expire", || {
            let path = format!("/internal/containers/{ID}");
            (self.fixture.control("GET", &path).status == 404).then_some(())
        });
    }

    /// Number of count_removals of an expired registration.
    fn count_removals(&self) -> usize {
        let path = format!("/v1/audit?sandbox={ID}&limit=1000");
        let answer = self.fixture.control("GET", &path).json();
        let records = answer["records"].as_array().unwrap();
        records
            .iter()
            .filter(|record| record["event"] == "expired")
            .count()
    }

    /// Sends a request of a container whose registration has expired. The refusal removes the
    /// row, so each request has a registration of its own.
    fn send_expired(&self, send: impl FnOnce() -> String) -> String {
        self.register_for(IP, 1);
        self.await_expiry();
        self.send_and_await_removal(send)
    }

    fn send_and_await_removal(&self, send: impl FnOnce() -> String) -> String {
        let before = self.count_removals();
        let result = send();
        wait::until("the row to be removed", || {
            (self.count_removals() > before).then_some(())
        });
        result
    }

    /// The result of dig for the container at `ip`.
    fn dig(&self, ip: &str, at: &Port, arguments: &str) -> String {
        let at = at.address();
        let line = format!(
            "dig -b {ip} @{} -p {} +tries=1 +time=30 {arguments}",
            at.ip(),
            at.port()
        );
        name_outcome(&Command::new("bash").args(["-c", &line]).output().unwrap())
    }
}

/// The result of a request of the test itself: the status, and the reason of a refusal.
fn outcome(answer: &HttpResponse) -> String {
    let refusal = answer.json();
    let reason = refusal["reason"].as_str().unwrap_or("-");
    format!("{} {reason}", answer.status)
}

#[test]
fn corpus_of_expired_registrations() {
    const REQUESTS: [(&str, &str); 6] = [
        ("allowed", "open.example/"),
        ("unlisted host", "closed.example/"),
        ("denied host", "gone.example/"),
        ("internal root", "palisade.internal/"),
        ("internal tool", "palisade.internal/mcp/nothing"),
        (
            "git",
            "forge.example/acme/app/info/refs?service=git-upload-pack",
        ),
    ];
    let net = Net::start("");
    let mut corpus = net.corpus("expired");
    // A tunnel is refused before the protocol inside it is known.
    let entries = &SHARED[..2];
    for entry in entries {
        for (name, url) in REQUESTS {
            corpus.case(&format!("{}: {name}", entry.name), || {
                let arguments = format!("{} '{}://{url}'", entry.arguments, entry.scheme);
                net.send_expired(|| net.curl(IP, &arguments))
            });
        }
    }
    corpus.case("proxy, connect, unread", || {
        net.send_expired(|| net.curl(IP, "https://pinned.example/"))
    });
    corpus.case("proxy, absolute form: after the removal of the row", || {
        net.curl(IP, "http://open.example/")
    });
    for (name, claim) in [("own", ID), ("another", "another")] {
        for entry in entries {
            let url = format!("{}://open.example/", entry.scheme);
            let header = match entry.scheme {
                "http" => "-H",
                _ => "--proxy-header",
            };
            let arguments = format!("{header} 'X-Container-Id: {claim}' {url}");
            corpus.case(&format!("{}: {name} container id", entry.name), || {
                let send = || net.curl(IP, &arguments);
                if claim == ID {
                    return net.send_expired(send);
                }
                // Another id is refused before the expiry is checked, so the registration stays.
                net.register_for(IP, 1);
                net.await_expiry();
                send()
            });
        }
    }
    replay_kept_connections(&net, &mut corpus);
    corpus.finish();
}

/// Replays connections that were opened before the expiry, with a request before the expiry and
/// another request after it.
fn replay_kept_connections(net: &Net, corpus: &mut testkit::corpus::Corpus) {
    let connect = || {
        net.register_for(OWN_IP, SECONDS_TO_CONNECT);
        TcpStream::connect(net.proxy.address()).unwrap()
    };
    let absolute = "GET http://open.example/ HTTP/1.1\r\nHost: open.example\r\n\r\n";
    let stream = connect();
    corpus.case("kept connection, absolute form: before", || {
        outcome(&exchange(&stream, absolute))
    });
    net.await_expiry();
    corpus.case("kept connection, absolute form: after", || {
        net.send_and_await_removal(|| outcome(&exchange(&stream, absolute)))
    });

    let stream = connect();
    let tunnel = "CONNECT open.example:443 HTTP/1.1\r\nHost: open.example:443\r\n\r\n";
    corpus.case("kept connection, tunnel: opened", || {
        let mut stream = &stream;
        std::io::Write::write_all(&mut stream, tunnel.as_bytes()).unwrap();
        outcome(&http::read_head(stream).unwrap())
    });
    let mut tls = inside::tls(stream, Some("open.example"), &["http/1.1"]);
    corpus.case("kept connection, tunnel: before", || {
        outcome(&exchange(&mut tls, get("open.example", "/")))
    });
    net.await_expiry();
    corpus.case("kept connection, tunnel: after", || {
        net.send_and_await_removal(|| outcome(&exchange(&mut tls, get("open.example", "/"))))
    });
}

#[test]
fn corpus_of_names_on_a_shared_network() {
    let net = Net::start("");
    let port = Port::take();
    net.set_dns(&format!("listen: [\"{}\"]", port.address()));
    net.register_containers();
    let mut corpus = net.corpus("names-shared");
    // A query removes no row, so one registration serves all queries.
    net.register_for(IP, 1);
    net.await_expiry();
    for transport in ["+notcp", "+tcp"] {
        for (sender, ip, queries) in [
            ("registered", "127.0.0.2", &QUERIES[..]),
            ("expired", IP, &QUERIES[..5]),
            ("unknown address", "127.0.0.9", &QUERIES[..5]),
        ] {
            for query in queries {
                corpus.case(&format!("{sender}: {transport} {query}"), || {
                    net.dig(ip, &port, &format!("{transport} {query}"))
                });
            }
        }
    }
    corpus.finish();
}
