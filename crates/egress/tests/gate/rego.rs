//! The operator's own Rego policies decide requests of a client to an origin on loopback.

use std::sync::Arc;
use std::time::Duration;

use config::Settings;
use egress::services::Services;
use egress::trial::{self, TrialRequest};
use policy::audit::AuditEvent;
use policy::host::Host;
use policy::id::RequestId;
use policy::reason::Reason;
use policy::registration::Registration;
use policy::verdict::VerdictKind;
use serde_json::{Value, json};
use testkit::origin::{Latch, OriginReply, OriginServer};
use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream};

use crate::fakes::{FakeRegistry, MemoryAuditLog, connect, fake_dependencies, reload, sandbox_id};

/// A policy that allows paths below `/ok`, has a named rule for `/why`, and leaves other paths
/// undefined. The evaluation of `/slower` reaches its timeout long before its step limit.
const POLICY: &str = r#"package http.authz

decision := {"allow": true} if startswith(input.path, "/ok")

decision := {"allow": false, "reason": "Not by\n my policy.", "rule": "why"} if {
	startswith(input.path, "/why")
}

decision := {"action": "ask", "reason": "Shall it?"} if startswith(input.path, "/ask")

decision := {"action": "redact", "outputs": {}} if startswith(input.path, "/redact")

decision := {"allow": true} if {
	input.path == "/metadata"
	input.registration.metadata.team == "red"
}

decision := "perhaps" if input.path == "/shape"

decision := {"allow": true} if {
	input.path == "/slow"
	count([1 | some a in data.many; some b in data.many; a + b == 1]) == 2
}

decision := {"allow": true} if {
	input.path == "/slower"
	count([1 |
		some a in data.many
		some b in data.many
		some c in data.many
		json.unmarshal(json.marshal([a, b, c, data.many])) == a
	]) == 0
}
"#;

/// A gate with one Rego bundle, and the origin behind the gate.
struct PolicyFixture {
    directory: tempfile::TempDir,
    origin: OriginServer,
    services: Arc<Services>,
    records: Arc<MemoryAuditLog>,
}

impl PolicyFixture {
    /// A gate with the bundle [`POLICY`]; `policies` has the lines below `policies:` in its
    /// settings. The origin replies with `answer`.
    fn new(policies: &str, answer: impl Fn() -> OriginReply + Send + Sync + 'static) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let origin = OriginServer::http(move |_| answer());
        std::fs::create_dir(directory.path().join("mine")).unwrap();
        std::fs::write(directory.path().join("mine/policy.rego"), POLICY).unwrap();
        let many: Vec<u32> = (0..200).collect();
        let data = json!({ "many": many }).to_string();
        std::fs::write(directory.path().join("mine/data.json"), data).unwrap();
        let settings = load_settings(directory.path(), &origin, policies);
        let records = Arc::<MemoryAuditLog>::default();
        let services = Services::new(fake_dependencies(directory.path(), settings, &records));
        Self {
            directory,
            origin,
            services,
            records,
        }
    }

    fn settings(&self, policies: &str) -> Arc<Settings> {
        Arc::new(load_settings(self.directory.path(), &self.origin, policies))
    }

    /// Opens a connection of the sandbox to the proxy.
    fn connect(&self) -> DuplexStream {
        self.connect_in(None)
    }

    /// Opens a connection of the sandbox, inside a tunnel to a host and port if one is given.
    fn connect_in(&self, tunnel: Option<(Host, u16)>) -> DuplexStream {
        connect(&self.services, tunnel)
    }

    /// Sends a GET for `path`. Returns the status and body of the response.
    async fn get(&self, path: &str) -> (u16, String) {
        let mut client = self.connect();
        let request = format!(
            "GET http://api.example{path} HTTP/1.1\r\nHost: api.example\r\nConnection: close\r\n\r\n"
        );
        client.write_all(request.as_bytes()).await.unwrap();
        let mut text = String::new();
        client.read_to_string(&mut text).await.unwrap();
        let status = text.get(9..12).unwrap().parse().unwrap();
        let body = text.split("\r\n\r\n").nth(1).unwrap_or_default();
        (status, body.to_owned())
    }

    /// Sends a GET that must be refused. Returns the JSON of the refusal.
    async fn get_refused(&self, path: &str) -> Value {
        let (status, body) = self.get(path).await;
        assert_eq!(status, 403, "{body}");
        serde_json::from_str(&body).unwrap()
    }

    /// Removes and returns the audit records so far.
    fn take_records(&self) -> Vec<AuditEvent> {
        std::mem::take(&mut *self.records.0.lock().unwrap())
    }
}

/// Settings with `policies` as lines of the section `policies`.
fn load_settings(directory: &std::path::Path, origin: &OriginServer, policies: &str) -> Settings {
    let path = directory.join("palisade.yaml");
    let text = format!(
        "version: \"1.0\"\negress:\n  domains: [{{host: api.example, ports: [80, 443]}}, pinned.example]\n  \
         passthrough: [pinned.example]\n  \
         resolve: {{api.example: '{0}', pinned.example: '{0}'}}\npolicies:\n  timeout: 5s\n{policies}",
        origin.address()
    );
    std::fs::write(&path, text).unwrap();
    config::load(Some(&path), &|_| None).unwrap_or_else(|bad| panic!("{bad:?}"))
}

const ENFORCED_BUNDLE: &str = "  bundles: [{id: mine, path: mine, entrypoint: http/authz}]\n";

#[tokio::test]
async fn policy_decides_after_the_allowlist_and_is_recorded() {
    let fixture = PolicyFixture::new(ENFORCED_BUNDLE, || OriginReply::text("hello"));
    assert_eq!(fixture.get("/ok").await, (200, "hello".to_owned()));
    assert_eq!(fixture.get("/metadata").await.0, 200);
    let allowed = fixture.take_records();
    assert!(allowed.iter().all(|record| {
        record.bundle.as_deref() == Some("mine") && record.verdict == Some(VerdictKind::Allow)
    }));
    assert_eq!(allowed.len(), 2);

    let refusal = fixture.get_refused("/why").await;
    assert_eq!(refusal["reason"], "rego_denied");
    assert_eq!(refusal["rule"], "rego:mine");
    assert_eq!(refusal["error"], "Not by  my policy.");
    let records = fixture.take_records();
    let [record] = records.as_slice() else {
        panic!("{records:?}");
    };
    assert_eq!(record.bundle.as_deref(), Some("mine"));
    assert_eq!(record.reason, Some(Reason::RegoDenied));
    assert_eq!(record.rule.as_ref().unwrap().as_str(), "rego:mine");
    let id: RequestId = record.request_id.unwrap();
    let (_, explained) = fixture.services.explain(id).unwrap();
    assert_eq!(explained.evidence.unwrap(), "the policy's rule name is why");

    for (path, reason) in [
        ("/undefined", "rego_denied"),
        ("/ask", "ask_unattended"),
        ("/redact", "rego_denied"),
        ("/shape", "rego_error"),
    ] {
        assert_eq!(fixture.get_refused(path).await["reason"], reason, "{path}");
    }
    assert_eq!(fixture.origin.requests().len(), 2);
}

#[tokio::test]
async fn policy_that_exceeds_its_timeout_refuses() {
    let fixture = PolicyFixture::new(ENFORCED_BUNDLE, || OriginReply::text("hello"));
    assert_eq!(fixture.get("/slow").await.0, 200);
    let text = std::fs::read_to_string(fixture.directory.path().join("palisade.yaml")).unwrap();
    let text = text.replace("timeout: 5s", "timeout: 200ms");
    let path = fixture.directory.path().join("hurried.yaml");
    std::fs::write(&path, text).unwrap();
    let settings = config::load(Some(&path), &|_| None).unwrap();
    reload(&fixture.services, Arc::new(settings)).unwrap();
    assert_eq!(fixture.get_refused("/slower").await["reason"], "rego_error");
    assert_eq!(fixture.get("/ok").await.0, 200);
}

#[tokio::test]
async fn fail_open_allows_requests_on_policy_errors_only() {
    let fixture = PolicyFixture::new(&format!("  fail_open: true\n{ENFORCED_BUNDLE}"), || {
        OriginReply::text("hello")
    });
    assert_eq!(fixture.get("/shape").await.0, 200);
    // The record of the request has no deciding bundle.
    let records = fixture.take_records();
    let [logged, request] = records.as_slice() else {
        panic!("{records:?}");
    };
    assert_eq!(logged.reason, Some(Reason::RegoError));
    assert_eq!(logged.request_id, request.request_id);
    assert_eq!(request.verdict, Some(VerdictKind::Allow));
    for path in ["/why", "/undefined", "/redact", "/ask"] {
        assert_eq!(fixture.get(path).await.0, 403, "{path}");
    }
}

#[tokio::test]
async fn log_only_bundle_is_recorded_and_decides_nothing() {
    let logged = "  bundles: [{id: mine, path: mine, entrypoint: http/authz, mode: log}]\n";
    let fixture = PolicyFixture::new(logged, || OriginReply::text("hello"));
    assert_eq!(fixture.get("/why").await.0, 200);
    let records = fixture.take_records();
    let [logged, request] = records.as_slice() else {
        panic!("{records:?}");
    };
    assert_eq!(logged.event.as_deref(), Some("policy_logged"));
    assert_eq!(logged.bundle.as_deref(), Some("mine"));
    assert_eq!(logged.verdict, Some(VerdictKind::Deny));
    assert_eq!(logged.request_id, request.request_id);
    assert_eq!(request.verdict, Some(VerdictKind::Allow));
    assert_eq!(
        (request.bundle.as_ref(), request.event.as_ref()),
        (None, None)
    );
    assert_eq!(fixture.get("/ok").await.0, 200);
    assert_eq!(fixture.take_records().len(), 1);
}

#[tokio::test]
async fn reload_with_a_broken_policy_keeps_the_old_one() {
    let fixture = PolicyFixture::new(ENFORCED_BUNDLE, || OriginReply::text("hello"));
    let file = fixture.directory.path().join("mine/policy.rego");
    std::fs::write(&file, "package http.authz\n\nallow if {\n").unwrap();
    let error = reload(&fixture.services, fixture.settings(ENFORCED_BUNDLE)).unwrap_err();
    let error = error.to_string();
    assert!(
        error.starts_with("policies.bundles: mine: policy.rego:4:"),
        "{error}"
    );
    assert_eq!(fixture.get("/ok").await.0, 200);
    assert_eq!(fixture.get("/other").await.0, 403);

    std::fs::write(
        &file,
        "package http.authz\n\nallow if input.path == \"/other\"\n",
    )
    .unwrap();
    reload(&fixture.services, fixture.settings(ENFORCED_BUNDLE)).unwrap();
    assert_eq!(fixture.get("/ok").await.0, 403);
    assert_eq!(fixture.get("/other").await.0, 200);

    std::fs::rename(
        fixture.directory.path().join("mine"),
        fixture.directory.path().join("gone"),
    )
    .unwrap();
    let required = ENFORCED_BUNDLE.replace("http/authz}", "http/authz, required: true}");
    let error = reload(&fixture.services, fixture.settings(&required)).unwrap_err();
    assert!(error.to_string().contains("does not exist"), "{error}");
    assert_eq!(fixture.get("/ok").await.0, 403);
    // An optional bundle that does not exist is left out.
    reload(&fixture.services, fixture.settings(ENFORCED_BUNDLE)).unwrap();
    assert_eq!(fixture.get("/ok").await.0, 200);
}

#[tokio::test]
async fn reload_ends_requests_that_the_new_policy_denies() {
    let latch = Latch::new();
    let held = latch.clone();
    let fixture = PolicyFixture::new(ENFORCED_BUNDLE, move || {
        OriginReply::text("hello").body_held_until(&held)
    });
    let mut client = fixture.connect();
    let request = "GET http://api.example/ok HTTP/1.1\r\nHost: api.example\r\n\r\n";
    client.write_all(request.as_bytes()).await.unwrap();
    let mut first = [0; 12];
    client.read_exact(&mut first).await.unwrap();
    assert_eq!(&first, b"HTTP/1.1 200");

    let policy = |path: &str| format!("package http.authz\n\nallow if input.path == \"{path}\"\n");
    let file = fixture.directory.path().join("mine/policy.rego");
    std::fs::write(&file, policy("/ok")).unwrap();
    assert_eq!(
        reload(&fixture.services, fixture.settings(ENFORCED_BUNDLE)).unwrap(),
        0
    );
    std::fs::write(&file, policy("/other")).unwrap();
    assert_eq!(
        reload(&fixture.services, fixture.settings(ENFORCED_BUNDLE)).unwrap(),
        1
    );
    // The origin still holds its response back, so only the gate can have ended the request.
    let mut rest = Vec::new();
    let ended = tokio::time::timeout(Duration::from_secs(20), client.read_to_end(&mut rest));
    drop(ended.await.unwrap());
    latch.open();
}

#[tokio::test]
async fn trial_evaluates_the_policy() {
    let fixture = PolicyFixture::new(ENFORCED_BUNDLE, || OriginReply::text("hello"));
    let rules = fixture.services.policy().load();
    let registration = Arc::new(FakeRegistry::registration(&sandbox_id()));
    let decide = async |path: &str, registration: Option<Arc<Registration>>| {
        let trial_request = TrialRequest {
            sandbox: sandbox_id(),
            method: "GET".to_owned(),
            url: format!("https://api.example{path}"),
            program: None,
            registration,
        };
        trial::decide_trial(&rules, &trial_request).await.verdict
    };
    assert!(decide("/ok", None).await.is_ok());
    assert!(decide("/metadata", Some(registration)).await.is_ok());
    for (path, reason) in [
        ("/metadata", Reason::RegoDenied),
        ("/why", Reason::RegoDenied),
        ("/shape", Reason::RegoError),
    ] {
        let denial = decide(path, None).await.unwrap_err();
        assert_eq!(denial.reason, reason, "{path}");
        assert_eq!(denial.rule.as_str(), "rego:mine");
    }
    assert_eq!(fixture.origin.requests().len(), 0);
}

/// A policy that allows TLS passthrough connections of the sandbox to one host.
const PASSTHROUGH_POLICY: &str = r#"package http.authz

allow if {
	input.unread
	input.method == "CONNECT"
	input.host == "pinned.example"
	input.port == 443
	input.registration.metadata.team == "red"
}
"#;

/// The TLS ClientHello of a client of the server `name`.
pub(crate) fn client_hello(name: &str) -> Vec<u8> {
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let client = rustls::ClientConfig::builder_with_provider(provider);
    let client = client.with_safe_default_protocol_versions().unwrap();
    let client = client
        .with_root_certificates(rustls::RootCertStore::empty())
        .with_no_client_auth();
    let name = name.to_owned().try_into().unwrap();
    let mut client = rustls::ClientConnection::new(Arc::new(client), name).unwrap();
    let mut bytes = Vec::new();
    client.write_tls(&mut bytes).unwrap();
    bytes
}

#[tokio::test]
async fn passthrough_connection_is_decided_by_the_policy() {
    let fixture = PolicyFixture::new(ENFORCED_BUNDLE, || OriginReply::text("hello"));
    let pinned = || Some((Host::parse("pinned.example").unwrap(), 443));
    let reason_and_rule = |records: &[AuditEvent]| {
        let record = records.first()?;
        assert!(record.unread);
        Some((record.reason?, record.rule.as_ref()?.to_string()))
    };
    // A policy that only has rules for paths, one that fails, and one for another port: each of
    // them refuses the connection.
    let file = fixture.directory.path().join("mine/policy.rego");
    let fails = "package http.authz\n\ndefault allow := true\n\n\
                 allow := false if startswith(input.port, \"/\")\n";
    for (policy, reason) in [
        (POLICY, Reason::RegoDenied),
        (fails, Reason::RegoError),
        (
            &PASSTHROUGH_POLICY.replace("== 443", "== 444"),
            Reason::RegoDenied,
        ),
    ] {
        std::fs::write(&file, policy).unwrap();
        reload(&fixture.services, fixture.settings(ENFORCED_BUNDLE)).unwrap();
        let mut client = fixture.connect_in(pinned());
        client
            .write_all(&client_hello("pinned.example"))
            .await
            .unwrap();
        let mut received = Vec::new();
        drop(client.read_to_end(&mut received).await);
        assert_eq!(
            received, b"",
            "the gate must not write to a passthrough connection"
        );
        let refused = Some((reason, "rego:mine".to_owned()));
        assert_eq!(reason_and_rule(&fixture.take_records()), refused);
    }
    assert_eq!(fixture.origin.connections(), 0);

    std::fs::write(&file, PASSTHROUGH_POLICY).unwrap();
    reload(&fixture.services, fixture.settings(ENFORCED_BUNDLE)).unwrap();
    let mut client = fixture.connect_in(pinned());
    client
        .write_all(&client_hello("pinned.example"))
        .await
        .unwrap();
    testkit::wait::eventually("the origin to be reached", || {
        (fixture.origin.connections() == 1).then_some(())
    })
    .await;

    std::fs::write(&file, POLICY).unwrap();
    reload(&fixture.services, fixture.settings(ENFORCED_BUNDLE)).unwrap();
    let trial_request = TrialRequest {
        sandbox: sandbox_id(),
        method: "GET".to_owned(),
        url: "https://pinned.example/ok".to_owned(),
        program: None,
        registration: None,
    };
    let trial = trial::decide_trial(&fixture.services.policy().load(), &trial_request).await;
    assert!(trial.unread);
    assert_eq!(trial.verdict.unwrap_err().reason, Reason::RegoDenied);
}
