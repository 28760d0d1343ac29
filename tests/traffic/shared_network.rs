//! Containers on a shared network: a container is identified by its registered address.
//!
//! The test uses loopback as the shared network: every address of 127.0.0.0/8 may be a container.

use std::net::{Ipv4Addr, SocketAddr};
use std::process::Command;

use serde_json::Value;
use testkit::origin::{OriginReply, OriginServer};
use testkit::output;
use testkit::port::Port;
use testkit::resolver::{self, RecordData, Resolver, record};
use testkit::wait;

use crate::traffic_fixture::{CurlResponse, Rules, TrafficFixture, describe};

/// A gate with a listener on a shared network, and its origins.
pub(crate) struct Net {
    pub(crate) fixture: TrafficFixture,
    api: OriginServer,
    web: OriginServer,
    rules: Rules,
    proxy: SocketAddr,
    _port: Port,
}

/// A gate that listens on a shared network, without registrations.
fn create_net() -> Net {
    create_net_with(TrafficFixture::new(), |rules| rules)
}

/// A gate on a shared network, with more rules.
pub(crate) fn create_net_with(fixture: TrafficFixture, more: impl FnOnce(Rules) -> Rules) -> Net {
    create_net_started_by(fixture, more, |fixture| {
        drop(fixture.ok(&["gate", "start"]));
    })
}

/// A gate on a shared network that `start` starts.
pub(crate) fn create_net_started_by(
    fixture: TrafficFixture,
    more: impl FnOnce(Rules) -> Rules,
    start: impl FnOnce(&TrafficFixture),
) -> Net {
    let api = fixture.https(&["api.example"], |_| OriginReply::text("hello"));
    let web = OriginServer::http(|_| OriginReply::text("hello"));
    let port = Port::take();
    let proxy = port.address();
    let rules = Rules::new()
        .allow("api.example")
        .at("api.example:443", api.address())
        .at("api.example:80", web.address())
        .egress(&format!("listen: [\"{proxy}\"]"));
    let rules = more(rules);
    fixture.write(&rules);
    start(&fixture);
    fixture.ok(&["ca", "export", "--out", "gate.pem"]);
    Net {
        fixture,
        api,
        web,
        rules,
        proxy,
        _port: port,
    }
}

impl Net {
    pub(crate) fn register(&self, id: &str, ip: &str, more: &[&str]) {
        self.fixture
            .ok(&[&["registry", "add", id, "--ip", ip], more].concat());
    }

    /// curl as a container at `ip` runs it; it may fail.
    fn run(&self, ip: &str, args: &str) -> std::process::Output {
        let pem = self.fixture.gate_dir.path().join("gate.pem");
        let line = format!(
            "curl -sS --max-time 25 --interface {ip} --cacert {} -x http://{} \
             -w '\\n%{{http_code}}' {args}",
            pem.display(),
            self.proxy
        );
        Command::new("bash")
            .env_clear()
            .env("PATH", std::env::var_os("PATH").unwrap())
            .args(["-c", &line])
            .output()
            .unwrap()
    }

    pub(crate) fn curl(&self, ip: &str, args: &str) -> CurlResponse {
        let output = self.run(ip, args);
        assert!(output.status.success(), "{args}: {}", describe(&output));
        let printed = output::stdout(&output);
        let (body, status) = printed.trim_end().rsplit_once('\n').unwrap();
        CurlResponse {
            status: status.parse().unwrap(),
            body: body.trim_end().to_owned(),
        }
    }
}

const API: &str = "https://api.example/v1";

#[test]
fn seed_003_line_06_unknown_source_address_is_refused() {
    let net = create_net();
    net.register("one", "127.0.0.2", &[]);
    let got = net.curl("127.0.0.3", "http://api.example/");
    got.refused(403, "identity_unknown");
    assert_eq!(got.json()["error"], "Unknown source IP");
    // A tunnel is refused at CONNECT: an unknown container does not trust the gate's certificates.
    let output = net.run("127.0.0.3", API);
    let output_text = describe(&output);
    assert!(
        !output.status.success() && output_text.contains("403"),
        "{output_text}"
    );
    assert!(net.api.requests().is_empty() && net.web.requests().is_empty());
    let denied = || {
        let records = net.fixture.records();
        let mut records = records.iter();
        records
            .any(|record| {
                record["reason"] == "identity_unknown"
                    && record.get("sandbox").is_none_or(Value::is_null)
            })
            .then_some(())
    };
    wait::until("a record of the refusal", denied);
    assert_eq!(net.curl("127.0.0.2", API).body, "hello");
}

#[test]
fn seed_003_line_07_registrations_by_address_outlive_the_gate() {
    let net = create_net();
    net.register("one", "127.0.0.2", &[]);
    assert_eq!(net.curl("127.0.0.2", API).status, 200);
    net.fixture.ok(&["gate", "restart"]);
    assert_eq!(net.curl("127.0.0.2", API).status, 200);
    net.curl("127.0.0.3", "http://api.example/")
        .refused(403, "identity_unknown");
}

#[test]
fn seed_003_lines_15_16_container_id_is_optional_but_checked() {
    let net = create_net();
    net.register("one", "127.0.0.2", &[]);
    net.register("two", "127.0.0.3", &[]);
    for (ip, id, status) in [
        ("127.0.0.2", None, 200),
        ("127.0.0.2", Some("one"), 200),
        ("127.0.0.2", Some("two"), 403),
        ("127.0.0.2", Some("wrong-id"), 403),
        ("127.0.0.3", Some("two"), 200),
    ] {
        let claim = id.map_or(String::new(), |id| format!("-H 'X-Container-Id: {id}'"));
        let got = net.curl(ip, &format!("{claim} {API}"));
        assert_eq!(got.status, status, "{ip} {id:?}: {got:?}");
        if status == 403 {
            assert_eq!(got.json()["error"], "Container ID mismatch");
        }
    }
    assert!(
        net.api
            .requests()
            .iter()
            .all(|request| request.header("x-container-id").is_none())
    );
}

#[test]
fn ended_registration_ends_traffic_on_open_connections() {
    let net = create_net();
    net.register("one", "127.0.0.2", &[]);
    // Two requests on one connection, with the end of the registration between them.
    let body = net.fixture.gate_dir.path().join("fifo");
    let status = Command::new("mkfifo").arg(&body).status().unwrap();
    assert!(status.success());
    let line = format!(
        "curl -sS --max-time 25 --interface 127.0.0.2 -x http://{} -w '%{{http_code}} %{{num_connects}} ' \
         -o /dev/null http://api.example/a --next -sS --max-time 25 --interface 127.0.0.2 -x http://{} \
         -w '%{{http_code}} %{{num_connects}}' -o /dev/null -T {} http://api.example/b",
        net.proxy,
        net.proxy,
        body.display()
    );
    let child = Command::new("bash")
        .args(["-c", &line])
        .stdout(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    // The upload waits for its body: curl opens the file only now.
    let upload = std::fs::OpenOptions::new().write(true).open(&body).unwrap();
    net.fixture.ok(&["registry", "remove", "one"]);
    drop(upload);
    let printed = output::stdout(&child.wait_with_output().unwrap());
    assert!(printed.starts_with("200 1 "), "{printed}");
    assert!(
        printed.ends_with("403 0") || printed.ends_with("403 1"),
        "{printed}"
    );
    assert_eq!(
        net.web.requests().len(),
        1,
        "the second request must not reach the origin"
    );
    net.curl("127.0.0.2", "http://api.example/")
        .refused(403, "identity_unknown");
}

#[test]
fn denied_tunnel_is_refused_at_connect_without_trust() {
    let net = create_net();
    net.register("plain", "127.0.0.2", &[]);
    net.register("trusting", "127.0.0.3", &["--trusts-ca"]);
    let output = net.run("127.0.0.2", "https://evil.example/");
    let output_text = describe(&output);
    assert!(
        !output.status.success() && output_text.contains("403"),
        "{output_text}"
    );
    let got = net.curl("127.0.0.3", "https://evil.example/");
    got.refused(403, "host_denied");
}

#[test]
fn gates_own_addresses_are_refused_through_the_proxy() {
    let net = create_net();
    net.register("one", "127.0.0.2", &[]);
    let at = net.proxy;
    // The addresses are refused even if `egress.resolve` contains them.
    let rules = net
        .rules
        .clone()
        .allow("loop.example")
        .at("loop.example", at);
    net.fixture.reload(&rules);
    let got = net.curl("127.0.0.2", "http://loop.example/");
    assert!(got.status == 403 || got.status == 502, "{got:?}");
    // The operator's API is not reachable on this port.
    for path in [
        "/internal/metrics",
        "/internal/health",
        "/v1/health",
        "/internal/containers",
    ] {
        let line = format!(
            "curl -sS --interface 127.0.0.2 -o /dev/null -w '%{{http_code}}' http://{at}{path}"
        );
        let output = Command::new("bash").args(["-c", &line]).output().unwrap();
        let printed = output::stdout(&output);
        assert!(printed.starts_with('4'), "{path}: {printed}");
    }
}

/// The output of dig, run as a container at `ip`.
fn dig(ip: &str, at: SocketAddr, args: &str) -> String {
    let line = format!(
        "dig -b {ip} @{} -p {} +tries=1 +time=10 {args}",
        at.ip(),
        at.port()
    );
    let output = Command::new("bash").args(["-c", &line]).output().unwrap();
    assert!(output.status.success(), "{line}: {}", describe(&output));
    output::stdout(&output)
}

#[test]
fn dns_answers_registered_containers_only() {
    let upstream = Resolver::start();
    for name in ["api.example", "evil.example"] {
        let address = record(name, RecordData::A(Ipv4Addr::new(203, 0, 113, 7)));
        upstream.set_reply(name, 1, resolver::DnsReply::Records(vec![address]));
    }
    let net = create_net();
    let port = Port::take();
    let at = port.address();
    let rules = net.rules.clone().egress(&format!(
        "dns: {{listen: [\"{at}\"], upstreams: [\"{}\"]}}",
        upstream.address()
    ));
    net.fixture.write(&rules);
    net.fixture.ok(&["gate", "restart"]);
    net.register("one", "127.0.0.2", &[]);
    for flags in ["+notcp", "+tcp"] {
        let printed = dig("127.0.0.2", at, &format!("{flags} api.example"));
        assert!(printed.contains("203.0.113.7"), "{flags}: {printed}");
        let printed = dig("127.0.0.2", at, &format!("{flags} evil.example"));
        assert!(printed.contains("status: NXDOMAIN"), "{flags}: {printed}");
        for name in ["api.example", "evil.example"] {
            let printed = dig("127.0.0.3", at, &format!("{flags} {name}"));
            assert!(printed.contains("status: REFUSED"), "{flags}: {printed}");
            assert!(!printed.contains("203.0.113.7"), "{flags}: {printed}");
        }
    }
    let dns_queries = upstream.queries();
    assert!(
        dns_queries.iter().all(|query| query.name == "api.example"),
        "{dns_queries:?}"
    );
    // Each record has the container's name.
    let wait_for_record = |host: &str, reason: &str| {
        wait::until_or(
            || {
                let records = net.fixture.records();
                let mut records = records.into_iter();
                records.find(|record| {
                    record["kind"] == "dns" && record["host"] == host && record["reason"] == reason
                })
            },
            || format!("{reason} of {host}"),
        )
    };
    assert_eq!(
        wait_for_record("evil.example", "host_denied")["sandbox"],
        "one"
    );
    let unknown = wait_for_record("evil.example", "identity_unknown");
    assert!(unknown.get("sandbox").is_none_or(Value::is_null));
    // After its registration ends, the container is unknown.
    net.fixture.ok(&["registry", "remove", "one"]);
    for flags in ["+notcp", "+tcp"] {
        let printed = dig("127.0.0.2", at, &format!("{flags} api.example"));
        assert!(printed.contains("status: REFUSED"), "{flags}: {printed}");
    }
}

#[test]
fn expired_registration_is_refused_and_removed() {
    let net = create_net();
    let soon = Command::new("date")
        .args(["-u", "-d", "+8 seconds", "+%Y-%m-%dT%H:%M:%SZ"])
        .output()
        .unwrap();
    net.register(
        "one",
        "127.0.0.2",
        &["--expires-at", output::stdout(&soon).trim()],
    );
    let expired = || {
        let got = net.curl("127.0.0.2", "http://api.example/");
        (got.status == 403).then_some(got)
    };
    let got = wait::until("the registration to end", expired);
    // The first refusal removes the row; later requests come from an unknown container.
    got.refused(403, "identity_expired");
    assert_eq!(got.json()["error"], "Container registration expired");
    let removed = || {
        let rows = net.fixture.control("GET", "/internal/containers").text();
        (!rows.contains("127.0.0.2")).then_some(())
    };
    wait::until("the row to be removed", removed);
}

// Issue 15, number 16.
#[test]
fn seed_003_unavailable_registry_answers_503_through_the_proxy() {
    let net = create_net();
    net.register("one", "127.0.0.2", &[]);
    assert_eq!(net.curl("127.0.0.2", "http://api.example/").status, 200);
    // A clean stop checkpoints the write-ahead log into the database file.
    net.fixture.ok(&["gate", "restart"]);
    assert_eq!(net.curl("127.0.0.2", "http://api.example/").status, 200);
    net.fixture.gate_dir.damage_database();
    let health = net.fixture.control("GET", "/internal/health");
    assert_eq!(health.status, 503, "{}", health.text());

    let unavailable = || {
        let got = net.curl("127.0.0.2", "http://api.example/");
        (got.status == 503).then_some(got)
    };
    // The writer confirms the damage first, and requests pass until then.
    let got = wait::until("the registry to become unavailable", unavailable);
    got.refused(503, "registry_unavailable");
    assert_eq!(got.json()["error"], "Registry unavailable");
    let passed = net.web.requests().len();
    // Every address is refused now, whether it was registered or not.
    for ip in ["127.0.0.2", "127.0.0.3"] {
        let got = net.curl(ip, "http://api.example/");
        got.refused(503, "registry_unavailable");
    }
    assert_eq!(net.web.requests().len(), passed);
}

// Issue 15, number 16.
#[test]
fn seed_003_unregistered_container_leaves_no_rate_limit_series() {
    let net = create_net();
    net.register("one", "127.0.0.2", &[]);
    net.register("two", "127.0.0.3", &[]);
    for ip in ["127.0.0.2", "127.0.0.3"] {
        assert_eq!(net.curl(ip, "http://api.example/").status, 200);
    }
    let has_series = |id: &str| {
        let series = format!("proxy_rate_limit_bucket_tokens{{container_id=\"{id}\"");
        net.fixture.metrics().contains(&series)
    };
    assert!(has_series("one") && has_series("two"));
    net.fixture.ok(&["registry", "remove", "one"]);
    assert!(
        !has_series("one") && has_series("two"),
        "{}",
        net.fixture.metrics()
    );
}

// Issue 15, number 17.
#[test]
fn seed_003_replaced_registration_loses_the_address_at_once() {
    let net = create_net();
    net.register("crashed", "127.0.0.2", &[]);
    assert_eq!(net.curl("127.0.0.2", API).status, 200);
    let add = ["registry", "add", "next", "--ip", "127.0.0.2"];
    let taken = net.fixture.run(&add);
    assert_eq!(taken.status.code(), Some(4), "{}", describe(&taken));
    assert!(
        output::stderr(&taken).contains("--replace"),
        "{}",
        describe(&taken)
    );
    let replaced = net.fixture.ok(&[&add[..], &["--replace"]].concat());
    assert_eq!(replaced, "registered next, replacing crashed\n");

    let claim = |id: &str| {
        let claim = format!("-H 'X-Container-Id: {id}' {API}");
        net.curl("127.0.0.2", &claim).status
    };
    assert_eq!((claim("next"), claim("crashed")), (200, 403));
    let events = net
        .fixture
        .control("GET", "/v1/audit?sandbox=crashed&kind=lifecycle");
    let events = events.json();
    let events = events["records"].as_array().unwrap().iter();
    let events: Vec<&str> = events
        .filter_map(|record| record["event"].as_str())
        .collect();
    assert_eq!(events, ["registered", "replaced"]);
    assert!(!net.fixture.metrics().contains("container_id=\"crashed\""));
}
