//! A gate with fake origins and a fake DNS resolver, and a client on a shared network or in a
//! sandbox.

use std::net::Ipv4Addr;

use serde_json::{Value, json};
use testkit::http::{self, HttpResponse};
use testkit::inside::NetNamespace;
use testkit::origin::{OriginReply, OriginRequest, OriginServer};
use testkit::port::Port;
use testkit::resolver::{self, RecordData, Resolver, record};

use crate::audit::Audit;
use crate::client::{Client, DnsClient};
use crate::traffic_fixture::{TrafficFixture, may_enter, text};

/// Configuration of the gate, with a host for each check. [`Network::with_dns_settings`] fills in
/// the `{…}`.
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
  dns: {mode: forward, listen: ["{dns_address}"], upstreams: ["{resolver}"]{dns}}
git:
  hosts: [forge.example]
"#;

/// Limits whose result does not depend on the duration of a test.
const POLICY: &str = "rate_limits:
  per_upstream:
    limited.example: {requests_per_second: 0.0001, burst_size: 1}
    limited-pinned.example: {requests_per_second: 0.0001, burst_size: 1}
circuit_breakers:
  upstreams:
    broken.example: {failure_threshold: 2, recovery_timeout: 86400, success_threshold: 1}
    broken-pinned.example: {failure_threshold: 2, recovery_timeout: 86400, success_threshold: 1}
";

/// Text of the policy bundle.
const BUNDLE: &str = r#"package http.authz

default decision := {"action": "allow"}

decision := {"action": "block", "reason": "Not this path."} if input.path == "/blocked"

decision := {"action": "block", "reason": "Not this host."} if {
	input.unread
	input.host == "blocked-pinned.example"
}
"#;

/// Number of names that look like data that a sandbox may resolve below one domain.
pub(crate) const MAX_DATA_LIKE_NAMES: usize = 16;

/// The IP address of the container.
const CONTAINER_IP: Ipv4Addr = Ipv4Addr::new(127, 0, 0, 2);

/// Kind of the client in a fixture.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ClientKind {
    /// A container on a shared network that sends requests to the proxy, without TLS.
    Proxy,
    /// A container on a shared network that opens tunnels.
    Tunnel,
    /// A container on a shared network that opens tunnels and does not trust the gate's
    /// certificates.
    Untrusting,
    /// A sandbox, whose connections go to the transparent listeners.
    Sandbox,
}

/// A gate with a client, fake origins and a fake DNS resolver.
pub(crate) struct Network {
    pub(crate) traffic_fixture: TrafficFixture,
    pub(crate) audit: Audit,
    pub(crate) proxy: Port,
    dns_port: Port,
    http_origin: OriginServer,
    https_origin: OriginServer,
    client: ClientKind,
    /// The network namespace of the sandbox, if the client is a sandbox.
    namespace: Option<NetNamespace>,
    /// The id of the sandbox or the container.
    id: String,
    _resolver: Resolver,
    /// A port without a listener.
    _closed: Port,
}

impl Network {
    /// Starts a gate. Returns `None` if the test may not enter a sandbox.
    pub(crate) fn start(client: ClientKind) -> Option<Self> {
        Self::with_dns_settings(client, "")
    }

    /// Starts a gate with additional settings of the section `dns`. Returns `None` if the test may
    /// not enter a sandbox.
    pub(crate) fn with_dns_settings(client: ClientKind, dns: &str) -> Option<Self> {
        if client == ClientKind::Sandbox && !may_enter() {
            return None;
        }
        let traffic_fixture = TrafficFixture::new();
        let answer = |request: &OriginRequest| match request.path() {
            "/fail" => OriginReply::status(502),
            _ => OriginReply::text("{}"),
        };
        let https_origin = traffic_fixture.https_http1(
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
        let http_origin = OriginServer::http(answer);
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
        let (proxy, dns_port, closed) = (Port::take(), Port::take(), Port::take());
        let root = traffic_fixture.gate_dir.path();
        std::fs::create_dir(root.join("authz")).unwrap();
        std::fs::write(root.join("authz/policy.rego"), BUNDLE).unwrap();
        std::fs::write(root.join("policy.yaml"), POLICY).unwrap();
        let ports = format!(
            "{}, {}",
            http_origin.address().port(),
            https_origin.address().port()
        );
        let config = CONFIG
            .replace("{ports}", &ports)
            .replace("{proxy}", &proxy.address().to_string())
            .replace("{dns_address}", &dns_port.address().to_string())
            .replace("{plain}", &http_origin.address().to_string())
            .replace("{tls}", &https_origin.address().to_string())
            .replace("{closed}", &closed.address().to_string())
            .replace("{resolver}", &resolver.address().to_string())
            .replace("{dns}", dns);
        traffic_fixture.gate_dir.write_config(&config);
        traffic_fixture.ok(&["gate", "start"]);
        let mut network = Self {
            audit: Audit::new(traffic_fixture.gate_dir.control()),
            traffic_fixture,
            proxy,
            dns_port,
            http_origin,
            https_origin,
            client,
            namespace: None,
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
        self.namespace = Some(NetNamespace::of_sandbox(
            &self.traffic_fixture.gate_dir,
            &self.id,
        ));
    }

    fn register(&self) {
        // For a container that trusts its certificates, the gate sends refusals inside the tunnel.
        let trusts_ca = self.client != ClientKind::Untrusting;
        let body = json!({
            "container_id": self.id, "container_ip": CONTAINER_IP,
            "repos": [{"name": "acme/app"}], "metadata": {"trusts_ca": trusts_ca},
        });
        self.send_to_control("POST", "/internal/containers", &body);
    }

    /// The client of the fixture.
    pub(crate) fn client(&self) -> Client {
        let proxy = self.proxy.address();
        match (&self.namespace, self.client) {
            (Some(namespace), _) => Client::Sandbox(namespace.clone()),
            (None, ClientKind::Proxy) => Client::Proxy(CONTAINER_IP, proxy),
            (None, _) => Client::Tunnel(CONTAINER_IP, proxy),
        }
    }

    /// The client of the fixture, for DNS queries.
    pub(crate) fn dns_client(&self) -> DnsClient {
        match &self.namespace {
            Some(namespace) => DnsClient::in_sandbox(namespace),
            None => DnsClient::in_container(CONTAINER_IP, self.dns_port.address()),
        }
    }

    /// Ends the registration of the client. Its connections stay open.
    pub(crate) fn unregister(&self) {
        let path = format!("/internal/containers/{}", self.id);
        self.send_to_control("DELETE", &path, &Value::Null);
    }

    fn send_to_control(&self, method: &str, path: &str, body: &Value) {
        let body = match body {
            Value::Null => String::new(),
            body => body.to_string(),
        };
        let control = self.traffic_fixture.gate_dir.control();
        let answer = http::send(&control, method, path, body.as_bytes()).unwrap();
        assert!(matches!(answer.status, 200 | 201), "{}", answer.text());
    }

    /// `host` with the port of its origin, for a host that the gate resolves by DNS.
    pub(crate) fn with_origin_port(&self, host: &str) -> String {
        let origin = match self.client {
            ClientKind::Proxy => &self.http_origin,
            ClientKind::Tunnel | ClientKind::Untrusting | ClientKind::Sandbox => &self.https_origin,
        };
        format!("{host}:{}", origin.address().port())
    }

    /// Sends a request that must reach the host. Returns the audit record.
    #[track_caller]
    pub(crate) fn assert_allowed(&self, host: &str, send: impl FnOnce() -> HttpResponse) -> Value {
        self.audit.mark();
        let before = self.count_requests();
        let answer = send();
        assert_eq!(answer.status, 200, "{answer:?} {}", answer.text());
        assert_eq!(self.count_requests(), before + 1, "requests at the origin");
        self.audit.wait_for_allowed(&[("host", host)])
    }

    /// Sends a request that the gate must refuse and not forward.
    #[track_caller]
    pub(crate) fn assert_denied(
        &self,
        host: &str,
        (status, reason, rule): (u16, &str, &str),
        send: impl FnOnce() -> HttpResponse,
    ) {
        self.audit.mark();
        let before = self.count_requests();
        let answer = send();
        assert_eq!(answer.status, status, "{answer:?} {}", answer.text());
        assert_eq!(self.count_requests(), before, "requests at the origin");
        let record = self.audit.wait_for_denied(reason, rule, &[("host", host)]);
        assert_has_request_id(&answer, &record);
    }

    /// Opens a TLS connection that the gate must forward without decryption.
    #[track_caller]
    pub(crate) fn assert_allowed_unread(
        &self,
        host: &str,
        send: impl FnOnce() -> Option<HttpResponse>,
    ) {
        let record = self.assert_allowed(host, || send().expect("a response of the host"));
        assert_eq!(record["unread"], true, "{record}");
    }

    /// Opens a TLS connection that the gate must close without a connection to the host.
    #[track_caller]
    pub(crate) fn assert_denied_unread(
        &self,
        host: &str,
        (reason, rule): (&str, &str),
        send: impl FnOnce() -> Option<HttpResponse>,
    ) {
        self.audit.mark();
        let before = self.https_origin.connections();
        let answer = send();
        assert!(answer.is_none(), "{answer:?}");
        assert_eq!(
            self.https_origin.connections(),
            before,
            "connections to the origin"
        );
        let record = self.audit.wait_for_denied(reason, rule, &[("host", host)]);
        assert_eq!(record["unread"], true, "{record}");
    }

    fn count_requests(&self) -> usize {
        self.http_origin.requests().len() + self.https_origin.requests().len()
    }
}

/// Requires that the refusal has the request id of the audit record.
#[track_caller]
pub(crate) fn assert_has_request_id(answer: &HttpResponse, record: &Value) {
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
