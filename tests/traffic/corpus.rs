//! The recorded decisions of the traffic plane: one table of requests, sent through every entry
//! point, with the results for client and audit log (`tests/corpus/`).

mod expired;
mod requests;

use std::process::{Command, Output};

use serde_json::Value;
use testkit::corpus::Corpus;
use testkit::origin::{OriginReply, OriginServer};
use testkit::output;
use testkit::port::Port;
use testkit::resolver::{self, RecordData, Resolver, record};

use self::requests::REQUESTS;
use crate::traffic_fixture::{Agent, TrafficFixture};

/// Configuration of the gate. [`Net::start`] fills in the `{…}`.
const CONFIG: &str = r#"version: "1.0"
{policies}
egress:
  extra_roots: [root.pem]
  policy: policy.yaml
  listen: ["{proxy}"]
  passthrough: [pinned.example, closed-pinned.example]
  transparent_ports: [80, 443, 8443]
  domains:
    - open.example
    - "*.wild.example"
    - {host: rest.example, methods: [GET, HEAD], paths: ["/v1/**", "/one/*"]}
    - {host: mixed.example, deny: [{methods: [DELETE], paths: ["/**"]}]}
    - {host: gone.example, deny: [{}]}
    - {host: ports.example, ports: [443, 8443]}
    - {host: curl.example, programs: [/usr/bin/curl]}
    - {host: wget.example, programs: [/usr/bin/wget]}
    - api.github.com
    - limited.example
    - broken.example
    - dead.example
    - untrusted.example
    - pinned.example
    - unresolved.example
    - forge.example
  resolve:
    "open.example:80": "{plain}"
    "open.example:443": "{tls}"
    "a.wild.example:80": "{plain}"
    "a.wild.example:443": "{tls}"
    "rest.example:80": "{plain}"
    "rest.example:443": "{tls}"
    "mixed.example:80": "{plain}"
    "mixed.example:443": "{tls}"
    "gone.example:80": "{plain}"
    "gone.example:443": "{tls}"
    "ports.example:443": "{tls}"
    "ports.example:8443": "{tls}"
    "curl.example:80": "{plain}"
    "curl.example:443": "{tls}"
    "wget.example:80": "{plain}"
    "wget.example:443": "{tls}"
    "api.github.com:80": "{plain}"
    "api.github.com:443": "{tls}"
    "limited.example:80": "{plain}"
    "limited.example:443": "{tls}"
    "broken.example:80": "{plain}"
    "broken.example:443": "{tls}"
    "dead.example:80": "{dead}"
    "dead.example:443": "{dead}"
    "untrusted.example:443": "{untrusted}"
    "untrusted.example:80": "{plain}"
    "pinned.example:443": "{tls}"
    "pinned.example:80": "{plain}"
    "closed-pinned.example:443": "{tls}"
    "closed.example:80": "{plain}"
    "closed.example:443": "{tls}"
    "forge.example:80": "{plain}"
    "forge.example:443": "{tls}"
  dns: {upstreams: ["{resolver}"]}
git:
  hosts: [forge.example]
"#;

/// Limits whose result does not depend on the duration of a test.
const POLICY: &str = "rate_limits:
  per_upstream:
    limited.example: {requests_per_second: 0.0001, burst_size: 2}
circuit_breakers:
  upstreams:
    broken.example: {failure_threshold: 2, recovery_timeout: 86400, success_threshold: 1}
";

/// Two bundles: one that decides, one that only records.
const BUNDLES: &str = "policies:
  bundles:
    - {id: authz, path: ./authz, entrypoint: http/authz}
    - {id: watch, path: ./watch, entrypoint: http/authz, mode: log}
";

/// The policy of the bundle that decides.
const AUTHZ: &str = r#"package http.authz

default decision := {"action": "allow"}

decision := {"action": "block", "reason": "No secrets."} if contains(input.path, "secret")

decision := {"action": "ask", "reason": "A person decides."} if contains(input.path, "ask")

decision := {"action": "block", "reason": "Nothing is deleted."} if input.method == "DELETE"

decision := {"action": "block", "reason": "Not unread."} if {
	input.unread
	input.host == "pinned.example"
}
"#;

/// The policy of the bundle that only records.
const WATCH: &str = r#"package http.authz

default decision := {"action": "allow"}

decision := {"action": "block", "reason": "Would be refused."} if contains(input.path, "watched")
"#;

/// The containers of the shared network, with their addresses.
const CONTAINERS: [(&str, &str); 3] = [
    ("one", "127.0.0.2"),
    ("two", "127.0.0.3"),
    ("three", "127.0.0.4"),
];

/// A gate with fake origins and a shared network.
struct Net {
    fixture: TrafficFixture,
    proxy: Port,
    _origins: [OriginServer; 4],
}

impl Net {
    fn start(policies: &str) -> Self {
        let fixture = TrafficFixture::new();
        let answer = |request: &testkit::origin::OriginRequest| match request.path() {
            // The origin switches protocols and closes the connection.
            "/ws" => OriginReply::status(101)
                .header("upgrade", "websocket")
                .header("connection", "upgrade"),
            _ if request
                .header("host")
                .is_some_and(|host| host.starts_with("broken"))
                || request.uri.host() == Some("broken.example") =>
            {
                OriginReply::status(502)
            }
            _ => OriginReply::text("{}"),
        };
        let names = [
            "open.example",
            "a.wild.example",
            "rest.example",
            "mixed.example",
            "gone.example",
            "ports.example",
            "curl.example",
            "wget.example",
            "api.github.com",
            "limited.example",
            "broken.example",
            "pinned.example",
            "closed-pinned.example",
            "closed.example",
            "forge.example",
        ];
        let tls = fixture.https(&names, answer);
        let plain = OriginServer::http(answer);
        let untrusted = fixture.https(&["another.example"], answer);
        // A listener that closes what it accepts.
        let dead = OriginServer::raw(|stream, _| drop(stream));
        let resolver = Resolver::start();
        resolver.set_reply("open.example", 1, address_reply("open.example"));
        let proxy = Port::take();
        let root = fixture.gate_dir.path();
        for (name, text) in [("authz", AUTHZ), ("watch", WATCH)] {
            std::fs::create_dir_all(root.join(name)).unwrap();
            std::fs::write(root.join(name).join("policy.rego"), text).unwrap();
        }
        std::fs::write(root.join("policy.yaml"), POLICY).unwrap();
        let config = CONFIG
            .replace("{policies}", policies)
            .replace("{proxy}", &proxy.address().to_string())
            .replace("{plain}", &plain.address().to_string())
            .replace("{tls}", &tls.address().to_string())
            .replace("{dead}", &dead.address().to_string())
            .replace("{untrusted}", &untrusted.address().to_string())
            .replace("{resolver}", &resolver.address().to_string());
        fixture.gate_dir.write_config(&config);
        fixture.ok(&["gate", "start"]);
        fixture.ok(&["ca", "export", "--out", "gate.pem"]);
        Self {
            fixture,
            proxy,
            _origins: [tls, plain, untrusted, dead],
        }
    }

    /// Registers the containers of the shared network, which have loopback addresses.
    fn register_containers(&self) {
        for (id, ip) in CONTAINERS {
            let args = ["registry", "add", id, "--ip", ip, "--repo", "acme/app"];
            self.fixture.ok(&args);
        }
    }

    /// curl as the container at `ip` runs it.
    fn curl(&self, ip: &str, arguments: &str) -> String {
        let line = format!(
            "{CURL} --interface {ip} --cacert {}/gate.pem -x http://{} {arguments}",
            self.fixture.gate_dir.path().display(),
            self.proxy.address()
        );
        let output = Command::new("bash")
            .env_clear()
            .env("PATH", std::env::var_os("PATH").unwrap())
            .args(["-c", &line])
            .output()
            .unwrap();
        outcome(&output)
    }

    /// Adds a setting to the section `dns` and restarts the gate.
    fn set_dns(&self, line: &str) {
        let config = std::fs::read_to_string(self.fixture.gate_dir.config()).unwrap();
        let config = config.replace("dns: {", &format!("dns: {{{line}, "));
        self.fixture.gate_dir.write_config(&config);
        self.fixture.ok(&["gate", "restart"]);
    }

    fn corpus(&self, name: &str) -> Corpus {
        Corpus::open(name, &self.fixture.gate_dir.control())
    }
}

fn address_reply(name: &str) -> resolver::DnsReply {
    let address = std::net::Ipv4Addr::new(203, 0, 113, 7);
    resolver::DnsReply::Records(vec![record(name, RecordData::A(address))])
}

/// Command line of curl, which prints the body and two statuses.
const CURL: &str = "curl -sS --max-time 60 -w '\\n%{http_connect} %{http_code}'";

/// The result of curl: whether it succeeded, the status of CONNECT and of the response, and the
/// reason that a refusal names.
fn outcome(output: &Output) -> String {
    let printed = output::stdout(output);
    let (body, status) = printed
        .trim_end()
        .rsplit_once('\n')
        .unwrap_or(("", &printed));
    let refusal: Option<Value> = serde_json::from_str(body).ok();
    let reason = refusal.as_ref().and_then(|body| body["reason"].as_str());
    let result = if output.status.success() {
        "ok"
    } else {
        "failed"
    };
    format!("{result} {} {}", status.trim(), reason.unwrap_or("-"))
}

/// An entry point: its name, and curl's arguments for it.
struct Entry {
    name: &'static str,
    scheme: &'static str,
    arguments: &'static str,
}

fn replay(corpus: &mut Corpus, entry: &Entry, curl: impl Fn(&str) -> String) {
    for (name, host, path, more) in REQUESTS {
        // Plain HTTP has no 8443 here, and curl opens WebSockets in HTTP/1.1 only.
        if entry.scheme == "http" && host.ends_with(":8443")
            || entry.arguments.contains("--http2") && name.starts_with("websocket")
        {
            continue;
        }
        let Entry {
            name: entry_name,
            scheme,
            arguments,
        } = entry;
        corpus.case(&format!("{entry_name}: {name}"), || {
            curl(&format!("{arguments} {more} '{scheme}://{host}{path}'"))
        });
    }
}

/// The entry points of a container on a shared network: every client uses the proxy.
const SHARED: [Entry; 3] = [
    Entry {
        name: "proxy, absolute form",
        scheme: "http",
        arguments: "--http1.1",
    },
    Entry {
        name: "proxy, connect, http/1.1",
        scheme: "https",
        arguments: "--http1.1",
    },
    Entry {
        name: "proxy, connect, http/2",
        scheme: "https",
        arguments: "--http2",
    },
];

/// Replays the requests through every entry point of a shared network. Buckets and breakers
/// belong to a container, so each entry point has a container of its own.
fn replay_shared(net: &Net, corpus: &mut Corpus) {
    for (entry, (_, ip)) in SHARED.iter().zip(CONTAINERS) {
        replay(corpus, entry, |arguments| net.curl(ip, arguments));
    }
}

#[test]
fn corpus_of_a_shared_network() {
    let net = Net::start("");
    net.register_containers();
    let mut corpus = net.corpus("shared");
    replay_shared(&net, &mut corpus);
    for url in [
        "http://open.example/",
        "https://open.example/",
        "http://palisade.internal/",
    ] {
        corpus.case(&format!("unknown address: {url}"), || {
            net.curl("127.0.0.9", url)
        });
    }
    corpus.finish();
}

#[test]
fn corpus_of_a_shared_network_with_bundles() {
    let net = Net::start(BUNDLES);
    net.register_containers();
    let mut corpus = net.corpus("shared-bundles");
    replay_shared(&net, &mut corpus);
    corpus.finish();
}

/// The entry points of a sandbox beside its proxy, for programs without a proxy.
const TRANSPARENT: [Entry; 3] = [
    Entry {
        name: "transparent, http",
        scheme: "http",
        arguments: "--noproxy '*' --http1.1",
    },
    Entry {
        name: "transparent, https, http/1.1",
        scheme: "https",
        arguments: "--noproxy '*' --http1.1",
    },
    Entry {
        name: "transparent, https, http/2",
        scheme: "https",
        arguments: "--noproxy '*' --http2",
    },
];

#[test]
fn corpus_of_a_sandbox() {
    let net = Net::start("");
    let names = ["one", "two", "three"];
    let agents: Vec<Agent<'_>> = names
        .iter()
        .map(|name| net.fixture.create_with(name, &["--repo", "acme/app"]))
        .collect();
    let mut corpus = net.corpus("sandbox");
    for (entry, agent) in TRANSPARENT.iter().zip(&agents) {
        replay(&mut corpus, entry, |arguments| {
            outcome(&agent.bash(&format!("{CURL} {arguments}")))
        });
    }
    corpus.finish();
}

/// Names that are looked up, with more of dig's arguments.
const QUERIES: [&str; 14] = [
    "open.example",
    "open.example AAAA",
    "OPEN.example.",
    "closed.example",
    "deep.closed.example",
    "a.wild.example",
    "wild.example",
    "gone.example",
    "unresolved.example",
    "open.example TXT",
    "open.example MX",
    "open.example ANY",
    "-x 203.0.113.7",
    "a_b.open.example",
];

/// The result of dig: the status, and the extended error.
fn name_outcome(output: &Output) -> String {
    let printed = output::stdout(output);
    let status = printed.lines().find_map(|line| line.split_once("status: "));
    let status = status.map_or("-", |(_, rest)| rest.split(',').next().unwrap_or("-"));
    let error = printed.lines().find(|line| line.contains("EDE:"));
    let error = error.unwrap_or("-").trim_start_matches("; ");
    format!("{status} {error}")
}

#[test]
fn corpus_of_names() {
    for mode in ["synthetic", "forward"] {
        let net = Net::start("");
        net.set_dns(&format!("mode: {mode}"));
        let agent = net.fixture.create("one");
        let mut corpus = net.corpus(&format!("names-{mode}"));
        for transport in ["+notcp", "+tcp"] {
            for query in QUERIES {
                corpus.case(&format!("{transport} {query}"), || {
                    name_outcome(&agent.bash(&format!(
                        "dig {transport} +tries=1 +time=30 @192.0.0.1 {query}"
                    )))
                });
            }
        }
        corpus.finish();
    }
}

#[test]
fn corpus_of_policy_try() {
    let net = Net::start(BUNDLES);
    let agent = net.fixture.create_with("one", &["--repo", "acme/app"]);
    let mut corpus = net.corpus("policy-try");
    for scheme in ["http", "https"] {
        for (name, host, path, more) in REQUESTS {
            if scheme == "http" && host.ends_with(":8443") {
                continue;
            }
            let method = match more.split_once("-X ") {
                Some((_, rest)) => rest.split(' ').next().unwrap_or("GET"),
                None if more.starts_with("--head") => "HEAD",
                None if more.contains("-d ") => "POST",
                None => "GET",
            };
            let url = format!("{scheme}://{host}{path}");
            corpus.case(&format!("{scheme}: {name}"), || {
                let output = net.fixture.run(&[
                    "policy",
                    "try",
                    &url,
                    "--method",
                    method,
                    "--sandbox",
                    &agent.name,
                    "--json",
                ]);
                let answer: Value =
                    serde_json::from_str(&output::stdout(&output)).unwrap_or_default();
                let field = |name: &str| answer[name].as_str().unwrap_or("-").to_owned();
                let code = output.status.code().unwrap_or(-1);
                format!(
                    "{code} {} {} {}",
                    field("verdict"),
                    field("reason"),
                    field("rule")
                )
            });
        }
    }
    corpus.finish();
}
