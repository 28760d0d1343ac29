//! A gate in front of a small internet, with a client on a shared network or in a sandbox.

use std::net::Ipv4Addr;

use serde_json::{Value, json};
use testkit::http::{self, HttpResponse};
use testkit::inside::NetNamespace;
use testkit::origin::{OriginReply, OriginRequest, OriginServer};
use testkit::port::Port;
use testkit::resolver::{self, RecordData, Resolver, record};

use crate::audit::Audit;
use crate::client::{Client, NameClient};
use crate::traffic_fixture::{TrafficFixture, may_enter, text};

/// The rules, with a host for each check. `{…}` are filled in by [`Network::start`].
const CONFIG: &str = r#"version: "1.0"
policies:
  bundles:
    - {id: authz, path: ./authz, entrypoint: http/authz}
egress:
  extra_roots: [root.pem]
  policy: policy.yaml
  listen: ["{proxy}"]
  passthrough:
    - pinned.example
    - limited-pinned.example
    - broken-pinned.example
    - blocked-pinned.example
    - unlisted-pinned.example
    - "*.unread.example"
    - public-pinned.example
    - private-pinned.example
  domains:
    - open.example
    - limited.example
    - broken.example
    - {host: paths.example, paths: [/open]}
    - api.github.com
    - forge.example
    - {host: "*.wild.example", ports: [{ports}]}
    - {host: public.example, ports: [{ports}]}
    - {host: private.example, ports: [{ports}]}
    - pinned.example
    - limited-pinned.example
    - {host: broken-pinned.example, ports: [443, 8443]}
    - blocked-pinned.example
    - {host: "*.unread.example", ports: [{ports}]}
    - {host: public-pinned.example, ports: [{ports}]}
    - {host: private-pinned.example, ports: [{ports}]}
  allow_private:
    - {host: "*.wild.example", cidr: 127.0.0.1/32}
    - {host: public.example, cidr: 127.0.0.1/32}
    - {host: "*.unread.example", cidr: 127.0.0.1/32}
    - {host: public-pinned.example, cidr: 127.0.0.1/32}
  resolve:
    "open.example:80": "{plain}"
    "open.example:443": "{tls}"
    "limited.example:80": "{plain}"
    "limited.example:443": "{tls}"
    "broken.example:80": "{plain}"
    "broken.example:443": "{tls}"
    "paths.example:80": "{plain}"
    "paths.example:443": "{tls}"
    "api.github.com:80": "{plain}"
    "api.github.com:443": "{tls}"
    "forge.example:80": "{plain}"
    "forge.example:443": "{tls}"
    "pinned.example:443": "{tls}"
    "limited-pinned.example:443": "{tls}"
    "broken-pinned.example:443": "{tls}"
    "broken-pinned.example:8443": "{closed}"
    "blocked-pinned.example:443": "{tls}"
    "unlisted-pinned.example:443": "{tls}"
  dns: {mode: forward, listen: ["{names}"], upstreams: ["{resolver}"]{dns}}
git:
  hosts: [forge.example]
"#;

/// Limits that decide the same however long a test takes.
const POLICY: &str = "rate_limits:
  per_upstream:
    limited.example: {requests_per_second: 0.0001, burst_size: 1}
    limited-pinned.example: {requests_per_second: 0.0001, burst_size: 1}
circuit_breakers:
  upstreams:
    broken.example: {failure_threshold: 2, recovery_timeout: 86400, success_threshold: 1}
    broken-pinned.example: {failure_threshold: 2, recovery_timeout: 86400, success_threshold: 1}
";

const BUNDLE: &str = r#"package http.authz

default decision := {"action": "allow"}

decision := {"action": "block", "reason": "Not this path."} if input.path == "/blocked"

decision := {"action": "block", "reason": "Not this host."} if {
	input.unread
	input.host == "blocked-pinned.example"
}
"#;

/// How many names that look like data a sandbox may resolve below one domain.
pub(crate) const MAX_DATA_LIKE_NAMES: usize = 16;

/// The address of the container.
const CONTAINER: Ipv4Addr = Ipv4Addr::new(127, 0, 0, 2);

/// What the client of a fixture is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ClientKind {
    /// A container on a shared network that sends requests to the proxy, without TLS.
    Proxy,
    /// A container on a shared network that opens tunnels.
    Tunnel,
    /// The same, which does not trust the gate's certificates.
    Untrusting,
    /// A sandbox that knows of no proxy.
    Sandbox,
}

/// See the module.
pub(crate) struct Network {
    pub(crate) traffic_fixture: TrafficFixture,
    pub(crate) audit: Audit,
    pub(crate) proxy: Port,
    names: Port,
    plain: OriginServer,
    tls: OriginServer,
    client: ClientKind,
    /// The network of the sandbox.
    inside: Option<NetNamespace>,
    /// The id of the sandbox or the container.
    id: String,
    _resolver: Resolver,
    /// A port at which nothing listens.
    _closed: Port,
}

impl Network {
    /// Starts a gate; none where the test may not enter a sandbox.
    pub(crate) fn start(client: ClientKind) -> Option<Self> {
        Self::with(client, "")
    }

    /// The same with more of the section `dns`.
    pub(crate) fn with(client: ClientKind, dns: &str) -> Option<Self> {
        if client == ClientKind::Sandbox && !may_enter() {
            return None;
        }
        let traffic_fixture = TrafficFixture::new();
        let answer = |request: &OriginRequest| match request.path() {
            "/fail" => OriginReply::status(502),
            _ => OriginReply::text("{}"),
        };
        let tls = traffic_fixture.https_one(
            &[
                "open.example",
                "limited.example",
                "broken.example",
                "paths.example",
                "api.github.com",
                "forge.example",
                "*.wild.example",
                "public.example",
            ],
            answer,
        );
        let plain = OriginServer::http(answer);
        let resolver = Resolver::start();
        for name in ["private.example", "public.example"] {
            set_address(&resolver, name, Ipv4Addr::LOCALHOST);
        }
        for name in ["private-pinned.example", "public-pinned.example"] {
            set_address(&resolver, name, Ipv4Addr::LOCALHOST);
        }
        for base in ["wild.example", "unread.example"] {
            let names = data_like_names(base);
            names.for_each(|name| set_address(&resolver, &name, Ipv4Addr::LOCALHOST));
        }
        for name in ["open.example", "unlisted.example"] {
            set_address(&resolver, name, Ipv4Addr::new(203, 0, 113, 7));
        }
        let (proxy, names, closed) = (Port::take(), Port::take(), Port::take());
        let root = traffic_fixture.gate_dir.path();
        std::fs::create_dir(root.join("authz")).unwrap();
        std::fs::write(root.join("authz/policy.rego"), BUNDLE).unwrap();
        std::fs::write(root.join("policy.yaml"), POLICY).unwrap();
        let ports = format!("{}, {}", plain.address().port(), tls.address().port());
        let config = CONFIG
            .replace("{ports}", &ports)
            .replace("{proxy}", &proxy.address().to_string())
            .replace("{names}", &names.address().to_string())
            .replace("{plain}", &plain.address().to_string())
            .replace("{tls}", &tls.address().to_string())
            .replace("{closed}", &closed.address().to_string())
            .replace("{resolver}", &resolver.address().to_string())
            .replace("{dns}", dns);
        traffic_fixture.gate_dir.write_config(&config);
        traffic_fixture.ok(&["gate", "start"]);
        let mut network = Self {
            audit: Audit::new(traffic_fixture.gate_dir.control()),
            traffic_fixture,
            proxy,
            names,
            plain,
            tls,
            client,
            inside: None,
            id: "container".to_owned(),
            _resolver: resolver,
            _closed: closed,
        };
        if client == ClientKind::Sandbox {
            network.create_sandbox();
        } else {
            network.register();
        }
        Some(network)
    }

    fn create_sandbox(&mut self) {
        let args = ["create", "box", "--no-repo", "--repo", "acme/app"];
        self.id = text(&self.traffic_fixture.json(&args)["id"]);
        self.inside = Some(NetNamespace::of(&self.traffic_fixture.gate_dir, &self.id));
    }

    fn register(&self) {
        // A container that trusts the gate's certificates reads refusals inside its tunnels.
        let trusts_ca = self.client != ClientKind::Untrusting;
        let body = json!({
            "container_id": self.id, "container_ip": CONTAINER,
            "repos": [{"name": "acme/app"}], "metadata": {"trusts_ca": trusts_ca},
        });
        self.control("POST", "/internal/containers", &body);
    }

    /// The client whose requests this fixture is about.
    pub(crate) fn client(&self) -> Client {
        let proxy = self.proxy.address();
        match (&self.inside, self.client) {
            (Some(inside), _) => Client::Sandbox(inside.clone()),
            (None, ClientKind::Proxy) => Client::Proxy(CONTAINER, proxy),
            (None, _) => Client::Tunnel(CONTAINER, proxy),
        }
    }

    /// The same, for DNS queries.
    pub(crate) fn name_client(&self) -> NameClient {
        match &self.inside {
            Some(inside) => NameClient::inside(inside),
            None => NameClient::from(CONTAINER, self.names.address()),
        }
    }

    /// Ends the registration of the client. Its connections stay open.
    pub(crate) fn unregister(&self) {
        let path = format!("/internal/containers/{}", self.id);
        self.control("DELETE", &path, &Value::Null);
    }

    fn control(&self, method: &str, path: &str, body: &Value) {
        let body = match body {
            Value::Null => String::new(),
            body => body.to_string(),
        };
        let control = self.traffic_fixture.gate_dir.control();
        let answer = http::send(&control, method, path, body.as_bytes()).unwrap();
        assert!(matches!(answer.status, 200 | 201), "{}", answer.text());
    }

    /// `host` with the port of the origin, for a host that is resolved by DNS.
    pub(crate) fn direct(&self, host: &str) -> String {
        let origin = match self.client {
            ClientKind::Proxy => &self.plain,
            ClientKind::Tunnel | ClientKind::Untrusting | ClientKind::Sandbox => &self.tls,
        };
        format!("{host}:{}", origin.address().port())
    }

    /// A request that must reach the host and be answered by it.
    #[track_caller]
    pub(crate) fn allows(&self, host: &str, send: impl FnOnce() -> HttpResponse) -> Value {
        self.audit.mark();
        let before = self.requests();
        let answer = send();
        assert_eq!(answer.status, 200, "{answer:?} {}", answer.text());
        assert_eq!(self.requests(), before + 1, "requests at the origin");
        self.audit.allowed(&[("host", host)])
    }

    /// A request that must be refused before anything reaches the host.
    #[track_caller]
    pub(crate) fn denies(
        &self,
        host: &str,
        (status, reason, rule): (u16, &str, &str),
        send: impl FnOnce() -> HttpResponse,
    ) {
        self.audit.mark();
        let before = self.requests();
        let answer = send();
        assert_eq!(answer.status, status, "{answer:?} {}", answer.text());
        assert_eq!(self.requests(), before, "requests at the origin");
        let record = self.audit.denied(reason, rule, &[("host", host)]);
        names_record(&answer, &record);
    }

    /// A TLS connection that must reach the host unread.
    #[track_caller]
    pub(crate) fn allows_unread(&self, host: &str, send: impl FnOnce() -> Option<HttpResponse>) {
        let record = self.allows(host, || send().expect("an answer of the host"));
        assert_eq!(record["unread"], true, "{record}");
    }

    /// A TLS connection that must be closed before the host sees it.
    #[track_caller]
    pub(crate) fn denies_unread(
        &self,
        host: &str,
        (reason, rule): (&str, &str),
        send: impl FnOnce() -> Option<HttpResponse>,
    ) {
        self.audit.mark();
        let before = self.tls.connections();
        let answer = send();
        assert!(answer.is_none(), "{answer:?}");
        assert_eq!(self.tls.connections(), before, "connections to the origin");
        let record = self.audit.denied(reason, rule, &[("host", host)]);
        assert_eq!(record["unread"], true, "{record}");
    }

    fn requests(&self) -> usize {
        self.plain.requests().len() + self.tls.requests().len()
    }
}

/// The refusal that the client reads must name the request of the record.
#[track_caller]
pub(crate) fn names_record(answer: &HttpResponse, record: &Value) {
    let (refusal, id) = (answer.text(), text(&record["request_id"]));
    assert!(refusal.contains(&id), "no '{id}' in: {refusal}");
}

fn set_address(resolver: &Resolver, name: &str, address: Ipv4Addr) {
    let records = vec![record(name, RecordData::A(address))];
    resolver.set_reply(name, 1, resolver::DnsReply::Records(records));
}

/// Names below `base` that look like data, one more than a sandbox may resolve.
pub(crate) fn data_like_names(base: &str) -> impl Iterator<Item = String> {
    let label = "x".repeat(41);
    (0..=MAX_DATA_LIKE_NAMES).map(move |number| format!("n{number}-{label}.{base}"))
}
