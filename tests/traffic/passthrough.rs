//! TLS passthrough: the client has a TLS session with the host itself, and the audit record has
//! `unread: true`.

use std::collections::HashSet;
use std::io::Write;

use testkit::origin::{OriginReply, OriginServer};
use testkit::resolver::Resolver;
use testkit::wait;

use crate::traffic_fixture::{Agent, Rules, TrafficFixture, describe};

/// Runs `check` with two passthrough hosts: pinned.example is allowed, closed.example is not.
fn with_agent(check: impl FnOnce(&Rules, &OriginServer, &Agent<'_>)) {
    let fixture = TrafficFixture::new();
    let names = ["pinned.example", "closed.example"];
    let pinned = fixture.https(&names, |_| OriginReply::text("pinned"));
    let rules = Rules::new()
        .at("pinned.example", pinned.address())
        .at("closed.example", pinned.address())
        .egress("passthrough: [pinned.example, closed.example]");
    fixture.write(&rules.clone().allow("pinned.example"));
    let agent = fixture.create("fix");
    agent.stdout_of(&format!(
        "cat >~/theirs.pem <<'EOF'\n{}EOF\n",
        fixture.ca.pem()
    ));
    check(&rules, &pinned, &agent);
}

/// Trusts only the host's own root.
const TRUST_HOST_ROOT: &str = "--cacert ~/theirs.pem";

#[test]
fn client_that_pins_a_certificate_sees_the_hosts_certificate() {
    with_agent(|_, pinned, agent| {
        for proxy_option in ["", "-x http://192.0.0.1:8080"] {
            let got = agent.curl(&format!(
                "{proxy_option} {TRUST_HOST_ROOT} https://pinned.example/secret/path"
            ));
            assert_eq!(got.body, "pinned", "{proxy_option}");
        }
        assert_eq!(pinned.requests().len(), 2);
        let find_records = || {
            let records = agent.fixture.records();
            let records = records.into_iter();
            let found: Vec<_> = records
                .filter(|record| record["host"] == "pinned.example")
                .collect();
            (found.len() == 2).then_some(found)
        };
        for record in wait::until("a record of each connection", find_records) {
            assert_eq!(record["unread"], true, "{record}");
            assert_eq!(record["verdict"], "allow", "{record}");
            assert!(!record.to_string().contains("secret/path"), "{record}");
        }
    });
}

#[test]
fn passthrough_host_must_also_be_allowed() {
    with_agent(|_, pinned, agent| {
        for proxy_option in ["", "-x http://192.0.0.1:8080"] {
            let output = agent.bash(&format!(
                "curl -sS {proxy_option} {TRUST_HOST_ROOT} https://closed.example/"
            ));
            assert!(!output.status.success(), "{}", describe(&output));
        }
        assert_eq!(pinned.connections(), 0);
        let denied = || {
            let records = agent.fixture.records();
            let mut records = records.iter();
            records
                .any(|record| {
                    record["host"] == "closed.example" && record["reason"] == "host_denied"
                })
                .then_some(())
        };
        wait::until("a record of the refusal", denied);
    });
}

#[test]
fn hello_that_differs_from_its_tunnel_is_not_forwarded() {
    if !crate::traffic_fixture::may_enter() {
        return;
    }
    with_agent(|_, pinned, agent| {
        let mut stream = agent.namespace().port(8080);
        stream
            .write_all(b"CONNECT evil.example:443 HTTP/1.1\r\nHost: evil.example:443\r\n\r\n")
            .unwrap();
        assert_eq!(testkit::http::read_head(&mut stream).unwrap().status, 200);
        let tls = testkit::inside::tls(stream, Some("pinned.example"), &["http/1.1"]);
        let answer = crate::traffic_fixture::exchange(
            tls,
            crate::traffic_fixture::get("pinned.example", "/"),
        );
        crate::traffic_fixture::refusal(&answer, 421, "name_mismatch");
        assert_eq!(pinned.connections(), 0);
    });
}

/// A ClientHello (RFC 8446, 4.1.2) for this name, with these additional extensions.
fn hello(name: &str, more: &[(u16, &[u8])]) -> Vec<u8> {
    let with_length = |bytes: &[u8]| {
        let length = u16::try_from(bytes.len()).unwrap().to_be_bytes();
        [&length[..], bytes].concat()
    };
    let name = with_length(&[&[0][..], &with_length(name.as_bytes())].concat());
    let mut list = Vec::new();
    for (kind, data) in [(0, &name[..])].iter().chain(more) {
        list.extend(kind.to_be_bytes());
        list.extend(with_length(data));
    }
    // Version, random, no session, one cipher suite, no compression.
    let mut body = vec![3, 3];
    body.extend([7; 32]);
    body.extend([0, 0, 2, 0x13, 1, 1, 0]);
    body.extend(with_length(&list));
    let length = u32::try_from(body.len()).unwrap().to_be_bytes();
    let message = [&[1][..], &length[1..], &body].concat();
    [&[0x16, 3, 1][..], &with_length(&message)].concat()
}

/// An encrypted ClientHello: outer, one suite, a key and a payload (RFC 9849, 5).
const ENCRYPTED: (u16, &[u8]) = (0xfe0d, &[0, 0, 1, 0, 1, 1, 0, 2, 9, 9, 0, 4, 1, 2, 3, 4]);

#[test]
fn encrypted_client_hello_is_not_forwarded() {
    if !crate::traffic_fixture::may_enter() {
        return;
    }
    with_agent(|_, pinned, agent| {
        let mut stream = agent.namespace().port(443);
        stream
            .write_all(&hello("pinned.example", &[ENCRYPTED]))
            .unwrap();
        assert!(testkit::inside::closes_within(&mut stream, wait::LIMIT));
        assert_eq!(pinned.connections(), 0);
        let refused = || {
            let records = agent.fixture.records();
            let mut records = records.into_iter();
            records.find(|record| record["host"] == "pinned.example" && record["verdict"] == "deny")
        };
        let record = wait::until("a record of the refusal", refused);
        assert_eq!(record["reason"], "name_mismatch", "{record}");
        // The same hello without the extension reaches the host.
        let mut stream = agent.namespace().port(443);
        stream.write_all(&hello("pinned.example", &[])).unwrap();
        assert!(testkit::inside::closes_within(&mut stream, wait::LIMIT));
        assert_eq!(pinned.connections(), 1);
    });
}

#[test]
fn passthrough_connection_ends_when_its_rule_is_revoked() {
    if !crate::traffic_fixture::may_enter() {
        return;
    }
    with_agent(|rules, pinned, agent| {
        let stream = agent.namespace().port(443);
        let mut tls = testkit::inside::tls(stream, Some("pinned.example"), &["http/1.1"]);
        let hello = crate::traffic_fixture::get("pinned.example", "/");
        assert_eq!(
            crate::traffic_fixture::exchange(&mut tls, &hello).text(),
            "pinned"
        );
        agent.fixture.reload(rules);
        assert!(testkit::inside::closes_within(&mut tls, wait::LIMIT));
        assert_eq!(pinned.requests().len(), 1);
    });
}

// Issue 14, number 2.
#[test]
fn passthrough_names_below_a_wildcard_count_against_the_label_budget() {
    if !crate::traffic_fixture::may_enter() {
        return;
    }
    let resolver = Resolver::start();
    let fixture = TrafficFixture::new();
    let rules = Rules::new()
        .allow("\"*.wild.example\"")
        .egress("passthrough: [\"*.wild.example\"]")
        .egress(&format!("dns: {{upstreams: [\"{}\"]}}", resolver.address()))
        .policy("rate_limits: {enabled: false}\n");
    fixture.write(&rules);
    let agent = fixture.create("fix");
    let namespace = agent.namespace();
    // Half of the connections are direct, half go through the proxy; all count against one budget.
    for n in 0..300 {
        let name = format!("n{n}.wild.example");
        let mut stream = if n % 2 == 0 {
            namespace.port(443)
        } else {
            let mut stream = namespace.port(8080);
            write!(
                stream,
                "CONNECT {name}:443 HTTP/1.1\r\nHost: {name}:443\r\n\r\n"
            )
            .unwrap();
            assert_eq!(testkit::http::read_head(&mut stream).unwrap().status, 200);
            stream
        };
        stream.write_all(&hello(&name, &[])).unwrap();
        assert!(testkit::inside::closes_within(&mut stream, wait::LIMIT));
    }
    let dns_queries: HashSet<String> = resolver
        .queries()
        .into_iter()
        .map(|query| query.name)
        .collect();
    assert_eq!(dns_queries.len(), 256, "names that reached the resolver");
    let refused = || {
        let records = fixture.records().into_iter();
        let refused: Vec<_> = records
            .filter(|record| record["rule"] == "dns:labels" && record["verdict"] == "deny")
            .collect();
        (refused.len() == 44).then_some(refused)
    };
    for record in wait::until("a record of each refusal", refused) {
        assert_eq!(record["reason"], "rate_limited", "{record}");
        assert_eq!(record["unread"], true, "{record}");
    }
}
