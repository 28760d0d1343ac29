//! The operator's own policies between a client and an origin on loopback.

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

use crate::fakes::{FakeRegistry, MemoryAuditLog, connect, parts, reload, sandbox};

/// Allows what is below `/ok`, has a rule of its own for `/why`, and says nothing of the rest.
/// `/slower` is out of time long before it is out of steps.
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

struct Place {
    directory: tempfile::TempDir,
    origin: OriginServer,
    traffic: Arc<Services>,
    records: Arc<MemoryAuditLog>,
}

impl Place {
    /// A gate with the policy above; `policies` stands below `policies:` in its settings.
    fn new(policies: &str, answer: impl Fn() -> OriginReply + Send + Sync + 'static) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let origin = OriginServer::http(move |_| answer());
        std::fs::create_dir(directory.path().join("mine")).unwrap();
        std::fs::write(directory.path().join("mine/policy.rego"), POLICY).unwrap();
        let many: Vec<u32> = (0..200).collect();
        let data = json!({ "many": many }).to_string();
        std::fs::write(directory.path().join("mine/data.json"), data).unwrap();
        let settings = settings(directory.path(), &origin, policies);
        let records = Arc::<MemoryAuditLog>::default();
        let traffic = Services::new(parts(directory.path(), settings, &records));
        Self {
            directory,
            origin,
            traffic,
            records,
        }
    }

    fn settings(&self, policies: &str) -> Arc<Settings> {
        Arc::new(settings(self.directory.path(), &self.origin, policies))
    }

    /// A connection of the sandbox.
    fn connect(&self) -> DuplexStream {
        self.connect_in(None)
    }

    /// The same in a tunnel to a host and port.
    fn connect_in(&self, tunnel: Option<(Host, u16)>) -> DuplexStream {
        connect(&self.traffic, tunnel)
    }

    /// Asks for a path, and says the status and body of the answer.
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

    /// Asks, and reads a refusal.
    async fn refused(&self, path: &str) -> Value {
        let (status, body) = self.get(path).await;
        assert_eq!(status, 403, "{body}");
        serde_json::from_str(&body).unwrap()
    }

    fn records(&self) -> Vec<AuditEvent> {
        std::mem::take(&mut *self.records.0.lock().unwrap())
    }
}

fn settings(directory: &std::path::Path, origin: &OriginServer, policies: &str) -> Settings {
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

const ENFORCED: &str = "  bundles: [{id: mine, path: mine, entrypoint: http/authz}]\n";

#[tokio::test]
async fn policy_decides_after_the_allowlist_and_is_recorded() {
    let place = Place::new(ENFORCED, || OriginReply::text("hello"));
    assert_eq!(place.get("/ok").await, (200, "hello".to_owned()));
    assert_eq!(place.get("/metadata").await.0, 200);
    let allowed = place.records();
    assert!(allowed.iter().all(|record| {
        record.bundle.as_deref() == Some("mine") && record.verdict == Some(VerdictKind::Allow)
    }));
    assert_eq!(allowed.len(), 2);

    let said = place.refused("/why").await;
    assert_eq!(said["reason"], "rego_denied");
    assert_eq!(said["rule"], "rego:mine");
    assert_eq!(said["error"], "Not by  my policy.");
    let records = place.records();
    let [record] = records.as_slice() else {
        panic!("{records:?}");
    };
    assert_eq!(record.bundle.as_deref(), Some("mine"));
    assert_eq!(record.reason, Some(Reason::RegoDenied));
    assert_eq!(record.rule.as_ref().unwrap().as_str(), "rego:mine");
    let id: RequestId = record.request_id.unwrap();
    let (_, explained) = place.traffic.explain(id).unwrap();
    assert_eq!(explained.evidence.unwrap(), "the policy calls it why");

    for (path, reason) in [
        ("/undefined", "rego_denied"),
        ("/ask", "ask_unattended"),
        ("/redact", "rego_denied"),
        ("/shape", "rego_error"),
    ] {
        assert_eq!(place.refused(path).await["reason"], reason, "{path}");
    }
    assert_eq!(place.origin.requests().len(), 2);
}

#[tokio::test]
async fn policy_that_exceeds_its_timeout_refuses() {
    let place = Place::new(ENFORCED, || OriginReply::text("hello"));
    assert_eq!(place.get("/slow").await.0, 200);
    let text = std::fs::read_to_string(place.directory.path().join("palisade.yaml")).unwrap();
    let text = text.replace("timeout: 5s", "timeout: 200ms");
    let path = place.directory.path().join("hurried.yaml");
    std::fs::write(&path, text).unwrap();
    let settings = config::load(Some(&path), &|_| None).unwrap();
    reload(&place.traffic, Arc::new(settings)).unwrap();
    assert_eq!(place.refused("/slower").await["reason"], "rego_error");
    assert_eq!(place.get("/ok").await.0, 200);
}

#[tokio::test]
async fn fail_open_allows_requests_on_policy_errors_only() {
    let place = Place::new(&format!("  fail_open: true\n{ENFORCED}"), || {
        OriginReply::text("hello")
    });
    assert_eq!(place.get("/shape").await.0, 200);
    // The record says that no bundle decided.
    let records = place.records();
    let [logged, request] = records.as_slice() else {
        panic!("{records:?}");
    };
    assert_eq!(logged.reason, Some(Reason::RegoError));
    assert_eq!(logged.request_id, request.request_id);
    assert_eq!(request.verdict, Some(VerdictKind::Allow));
    for path in ["/why", "/undefined", "/redact", "/ask"] {
        assert_eq!(place.get(path).await.0, 403, "{path}");
    }
}

#[tokio::test]
async fn log_only_bundle_is_recorded_and_decides_nothing() {
    let logged = "  bundles: [{id: mine, path: mine, entrypoint: http/authz, mode: log}]\n";
    let place = Place::new(logged, || OriginReply::text("hello"));
    assert_eq!(place.get("/why").await.0, 200);
    let records = place.records();
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
    assert_eq!(place.get("/ok").await.0, 200);
    assert_eq!(place.records().len(), 1);
}

#[tokio::test]
async fn reload_with_a_broken_policy_keeps_the_old_one() {
    let place = Place::new(ENFORCED, || OriginReply::text("hello"));
    let file = place.directory.path().join("mine/policy.rego");
    std::fs::write(&file, "package http.authz\n\nallow if {\n").unwrap();
    let error = reload(&place.traffic, place.settings(ENFORCED)).unwrap_err();
    let error = error.to_string();
    assert!(
        error.starts_with("policies.bundles: mine: policy.rego:4:"),
        "{error}"
    );
    assert_eq!(place.get("/ok").await.0, 200);
    assert_eq!(place.get("/other").await.0, 403);

    std::fs::write(
        &file,
        "package http.authz\n\nallow if input.path == \"/other\"\n",
    )
    .unwrap();
    reload(&place.traffic, place.settings(ENFORCED)).unwrap();
    assert_eq!(place.get("/ok").await.0, 403);
    assert_eq!(place.get("/other").await.0, 200);

    std::fs::rename(
        place.directory.path().join("mine"),
        place.directory.path().join("gone"),
    )
    .unwrap();
    let required = ENFORCED.replace("http/authz}", "http/authz, required: true}");
    let error = reload(&place.traffic, place.settings(&required)).unwrap_err();
    assert!(error.to_string().contains("does not exist"), "{error}");
    assert_eq!(place.get("/ok").await.0, 403);
    // An optional bundle that does not exist is left out.
    reload(&place.traffic, place.settings(ENFORCED)).unwrap();
    assert_eq!(place.get("/ok").await.0, 200);
}

#[tokio::test]
async fn reload_ends_requests_that_the_new_policy_denies() {
    let latch = Latch::new();
    let held = latch.clone();
    let place = Place::new(ENFORCED, move || OriginReply::text("hello").paused(&held));
    let mut client = place.connect();
    let request = "GET http://api.example/ok HTTP/1.1\r\nHost: api.example\r\n\r\n";
    client.write_all(request.as_bytes()).await.unwrap();
    let mut first = [0; 12];
    client.read_exact(&mut first).await.unwrap();
    assert_eq!(&first, b"HTTP/1.1 200");

    let policy = |path: &str| format!("package http.authz\n\nallow if input.path == \"{path}\"\n");
    let file = place.directory.path().join("mine/policy.rego");
    std::fs::write(&file, policy("/ok")).unwrap();
    assert_eq!(reload(&place.traffic, place.settings(ENFORCED)).unwrap(), 0);
    std::fs::write(&file, policy("/other")).unwrap();
    assert_eq!(reload(&place.traffic, place.settings(ENFORCED)).unwrap(), 1);
    // The origin still holds its answer back: only the gate can have ended it.
    let mut rest = Vec::new();
    let ended = tokio::time::timeout(Duration::from_secs(20), client.read_to_end(&mut rest));
    drop(ended.await.unwrap());
    latch.open();
}

#[tokio::test]
async fn trial_evaluates_the_policy() {
    let place = Place::new(ENFORCED, || OriginReply::text("hello"));
    let rules = place.traffic.policy().load();
    let row = Arc::new(FakeRegistry::registration(&sandbox()));
    let ask = async |path: &str, registration: Option<Arc<Registration>>| {
        let question = TrialRequest {
            sandbox: sandbox(),
            method: "GET".to_owned(),
            url: format!("https://api.example{path}"),
            program: None,
            registration,
        };
        trial::decide_trial(&rules, &question).await.verdict
    };
    assert!(ask("/ok", None).await.is_ok());
    assert!(ask("/metadata", Some(row)).await.is_ok());
    for (path, reason) in [
        ("/metadata", Reason::RegoDenied),
        ("/why", Reason::RegoDenied),
        ("/shape", Reason::RegoError),
    ] {
        let denial = ask(path, None).await.unwrap_err();
        assert_eq!(denial.reason, reason, "{path}");
        assert_eq!(denial.rule.as_str(), "rego:mine");
    }
    assert_eq!(place.origin.requests().len(), 0);
}

/// Allows unread connections of the sandbox to one host.
const UNREAD: &str = r#"package http.authz

allow if {
	input.unread
	input.method == "CONNECT"
	input.host == "pinned.example"
	input.port == 443
	input.registration.metadata.team == "red"
}
"#;

/// The first words of a client that wants to speak TLS with `name`.
pub(crate) fn hello(name: &str) -> Vec<u8> {
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
async fn unread_connection_is_decided_by_the_policy() {
    let place = Place::new(ENFORCED, || OriginReply::text("hello"));
    let pinned = || Some((Host::parse("pinned.example").unwrap(), 443));
    let said = |records: &[AuditEvent]| {
        let one = records.first()?;
        assert!(one.unread);
        Some((one.reason?, one.rule.as_ref()?.to_string()))
    };
    // The policy knows of paths alone, fails, or means another port: none of it allows.
    let file = place.directory.path().join("mine/policy.rego");
    let fails = "package http.authz\n\ndefault allow := true\n\n\
                 allow := false if startswith(input.port, \"/\")\n";
    for (policy, reason) in [
        (POLICY, Reason::RegoDenied),
        (fails, Reason::RegoError),
        (&UNREAD.replace("== 443", "== 444"), Reason::RegoDenied),
    ] {
        std::fs::write(&file, policy).unwrap();
        reload(&place.traffic, place.settings(ENFORCED)).unwrap();
        let mut client = place.connect_in(pinned());
        client.write_all(&hello("pinned.example")).await.unwrap();
        let mut answer = Vec::new();
        drop(client.read_to_end(&mut answer).await);
        assert_eq!(answer, b"", "the stream is not ours to speak on");
        let refused = Some((reason, "rego:mine".to_owned()));
        assert_eq!(said(&place.records()), refused);
    }
    assert_eq!(place.origin.connections(), 0);

    std::fs::write(&file, UNREAD).unwrap();
    reload(&place.traffic, place.settings(ENFORCED)).unwrap();
    let mut client = place.connect_in(pinned());
    client.write_all(&hello("pinned.example")).await.unwrap();
    testkit::wait::eventually("the origin to be reached", || {
        (place.origin.connections() == 1).then_some(())
    })
    .await;

    std::fs::write(&file, POLICY).unwrap();
    reload(&place.traffic, place.settings(ENFORCED)).unwrap();
    let question = TrialRequest {
        sandbox: sandbox(),
        method: "GET".to_owned(),
        url: "https://pinned.example/ok".to_owned(),
        program: None,
        registration: None,
    };
    let trial = trial::decide_trial(&place.traffic.policy().load(), &question).await;
    assert!(trial.unread);
    assert_eq!(trial.verdict.unwrap_err().reason, Reason::RegoDenied);
}
