//! Tests for problems that comparable programs had.

use std::net::Ipv4Addr;

use testkit::origin::{OriginReply, OriginServer};
use testkit::resolver::{self, RecordData, Resolver, record};
use testkit::wait;

use crate::traffic_fixture::{Rules, TrafficFixture};

#[test]
fn unlisted_name_reaches_no_resolver() {
    let upstream = Resolver::start();
    for name in ["api.example", "secret.evil.example"] {
        let address = record(name, RecordData::A(Ipv4Addr::LOCALHOST));
        upstream.set_reply(name, 1, resolver::DnsReply::Records(vec![address]));
    }
    let fixture = TrafficFixture::new();
    let web = OriginServer::http(|_| OriginReply::text("hello"));
    let (at, port) = (upstream.address(), web.address().port());
    let rules = Rules::new()
        .allow(&format!(
            "{{host: api.example, ports: [80, {port}], paths: [/open]}}"
        ))
        .egress("allow_private: [{host: api.example, cidr: 127.0.0.1/32}]")
        .egress(&format!("dns: {{upstreams: [\"{at}\"]}}"));
    fixture.write(&rules);
    let agent = fixture.create("fix");
    let proxy = "-x http://192.0.0.1:8080";
    for url in [
        "http://secret.evil.example/",
        "https://secret.evil.example/",
        &format!("{proxy} http://secret.evil.example/"),
        &format!("{proxy} https://secret.evil.example/"),
        "http://api.example/closed",
        &format!("{proxy} http://api.example:8081/open"),
    ] {
        assert_eq!(agent.curl(url).status, 403, "{url}");
    }
    // The refused name reaches no resolver.
    agent.stdout_of("dig +short secret.evil.example");
    assert_eq!(upstream.queries(), []);
    // An allowed name is resolved.
    let got = agent.curl(&format!("{proxy} http://api.example:{port}/open"));
    assert_eq!(got.body, "hello", "{got:?}");
    let dns_queries = upstream.queries();
    assert!(!dns_queries.is_empty());
    assert!(
        dns_queries.iter().all(|query| query.name == "api.example"),
        "{dns_queries:?}"
    );
}

#[test]
fn name_that_resolves_to_a_private_address_is_refused() {
    let upstream = Resolver::start();
    let fixture = TrafficFixture::new();
    let web = OriginServer::http(|_| OriginReply::text("internal"));
    let private_addresses = [
        Ipv4Addr::new(127, 0, 0, 1),
        Ipv4Addr::new(10, 0, 0, 1),
        Ipv4Addr::new(169, 254, 169, 254),
        Ipv4Addr::new(100, 64, 0, 1),
        Ipv4Addr::UNSPECIFIED,
    ];
    let mut rules = Rules::new();
    let at = upstream.address();
    let port = web.address().port();
    for (n, ip) in private_addresses.iter().enumerate() {
        let name = format!("n{n}.example");
        upstream.set_reply(
            &name,
            1,
            resolver::DnsReply::Records(vec![record(&name, RecordData::A(*ip))]),
        );
        rules = rules.allow(&format!("{{host: {name}, ports: [{port}]}}"));
    }
    fixture.write(&rules.egress(&format!("dns: {{upstreams: [\"{at}\"]}}")));
    let agent = fixture.create("fix");
    for (n, ip) in private_addresses.iter().enumerate() {
        let got = agent.curl(&format!(
            "-x http://192.0.0.1:8080 http://n{n}.example:{port}/"
        ));
        got.refused(403, "address_class");
        // The address is shown only to the operator.
        assert!(!got.body.contains(&ip.to_string()), "{got:?}");
    }
    assert_eq!(web.connections(), 0);
}

#[test]
fn path_wildcards_match_one_segment_or_any_number() {
    let fixture = TrafficFixture::new();
    let web = OriginServer::http(|_| OriginReply::text("hello"));
    let rules = Rules::new()
        .allow("{host: one.example, paths: [/a/*]}")
        .allow("{host: many.example, paths: [/a/**]}")
        .at("one.example", web.address())
        .at("many.example", web.address());
    fixture.write(&rules);
    let agent = fixture.create("fix");
    for (host, path, status) in [
        ("one", "/a/b", 200),
        ("one", "/a/b/c", 403),
        ("one", "/a/b%2fc", 403),
        ("one", "/a", 403),
        ("one", "/ab", 403),
        ("many", "/a/b", 200),
        ("many", "/a/b/c", 200),
        ("many", "/ab", 403),
        ("many", "/b/a/c", 403),
    ] {
        let got = agent.curl(&format!("--path-as-is http://{host}.example{path}"));
        let is_expected = got.status == status || (status == 403 && got.status == 400);
        assert!(is_expected, "{host}{path}: {got:?}");
    }
}

#[test]
fn requests_in_tunnels_are_recorded_with_their_sandbox() {
    let fixture = TrafficFixture::new();
    let api = fixture.https(&["api.example"], |_| OriginReply::text("hello"));
    fixture.write(
        &Rules::new()
            .allow("api.example")
            .at("api.example", api.address()),
    );
    let agent = fixture.create("fix");
    let proxy = "-x http://192.0.0.1:8080";
    assert_eq!(
        agent
            .curl(&format!("{proxy} https://api.example/inside"))
            .status,
        200
    );
    let id = agent
        .curl(&format!("{proxy} https://evil.example/inside"))
        .refused(403, "host_denied");
    assert_eq!(fixture.record(&id)["sandbox"], agent.id.as_str());
    let recorded = || {
        let records = fixture.records();
        let mut matching = records.iter().filter(|record| record["path"] == "/inside");
        matching
            .all(|record| record["sandbox"] == agent.id.as_str())
            .then_some(())
    };
    wait::until("every record to name the sandbox", recorded);
}

#[test]
fn stopping_gate_records_requests_in_flight() {
    if !crate::traffic_fixture::may_enter() {
        return;
    }
    use std::io::{Read, Write};
    let fixture = TrafficFixture::new();
    let web = OriginServer::http(|_| OriginReply::echo("websocket"));
    fixture.write(
        &Rules::new()
            .allow("web.example")
            .at("web.example", web.address()),
    );
    let agent = fixture.create("fix");
    let mut stream = agent.namespace().port(80);
    stream
        .write_all(
            b"GET /socket HTTP/1.1\r\nHost: web.example\r\nConnection: upgrade\r\nUpgrade: websocket\r\n\r\nping",
        )
        .unwrap();
    assert_eq!(testkit::http::read_head(&mut stream).unwrap().status, 101);
    stream.read_exact(&mut [0; 4]).unwrap();
    fixture.ok(&["gate", "restart"]);
    let records = fixture.records();
    let found = records.iter().find(|record| record["path"] == "/socket");
    assert_eq!(
        found.map(|record| &record["status"]),
        Some(&101.into()),
        "{records:?}"
    );
}
