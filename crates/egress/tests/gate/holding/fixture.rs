//! A gate between a client and an origin on loopback. The test answers the gate's questions.

use std::path::Path;
use std::sync::Arc;

use config::Settings;
use config::section::egress::UnknownHostAction;
use egress::sandbox_state::SandboxState;
use egress::services::{ServiceDependencies, Services};
use policy::audit::AuditEvent;
use policy::id::SandboxId;
use policy::reason::Reason;
use policy::verdict::VerdictKind;
use serde_json::Value;
use testkit::origin::{OriginReply, OriginRequest, OriginServer};
use testkit::wait::eventually;
use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream};
use tokio::task::JoinHandle;

use super::operator::TestOperator;
use crate::fakes::{MemoryAuditLog, connect, fake_dependencies, reload, sandbox_id};

/// Host names that resolve to the origin.
const NAMES: [&str; 5] = [
    "api.github.com",
    "known.example",
    "asked.example",
    "other.example",
    "pinned.example",
];

/// Settings of a gate.
#[derive(Clone, Debug)]
pub(super) struct Rules {
    /// The items of `egress.domains`.
    pub(super) domains: String,
    /// What happens to every other host.
    pub(super) unknown: UnknownHostAction,
    /// The id and the text of a policy bundle about requests.
    pub(super) bundle: Option<(&'static str, &'static str)>,
    /// Whether that bundle decides: `enforce` or `log`.
    pub(super) bundle_mode: &'static str,
    /// Other lines below `egress`.
    pub(super) egress: String,
    /// Text of policy.yaml.
    pub(super) limits: &'static str,
}

impl Default for Rules {
    fn default() -> Self {
        Self {
            domains: "known.example".to_owned(),
            unknown: UnknownHostAction::Ask,
            bundle: None,
            bundle_mode: "enforce",
            egress: String::new(),
            limits: "",
        }
    }
}

impl Rules {
    /// The default rules with a policy bundle.
    pub(super) fn with_bundle(id: &'static str, text: &'static str) -> Self {
        Self {
            bundle: Some((id, text)),
            ..Self::default()
        }
    }

    /// The default rules with a policy bundle that requires approval for every request.
    pub(super) fn with_asking_bundle(id: &'static str) -> Self {
        let ask = "package http.authz\n\n\
                   decision := {\"action\": \"ask\", \"reason\": \"Shall it?\"}\n";
        Self::with_bundle(id, ask)
    }

    /// Writes the rules to configuration files and loads them. The action for unknown hosts is set
    /// afterwards, because configuration files do not support it yet.
    fn settings(&self, directory: &Path, origin: &OriginServer) -> Settings {
        let address = origin.address();
        let resolve: Vec<String> = NAMES
            .iter()
            .map(|name| format!("{name}: '{address}'"))
            .collect();
        let mut text = format!(
            "version: \"1.0\"\negress:\n  domains: [{}]\n  passthrough: [pinned.example]\n  \
             resolve: {{{}}}\n  policy: policy.yaml\n{}",
            self.domains,
            resolve.join(", "),
            self.egress,
        );
        if let Some((id, policy)) = self.bundle {
            std::fs::create_dir_all(directory.join(id)).unwrap();
            std::fs::write(directory.join(id).join("policy.rego"), policy).unwrap();
            let mode = self.bundle_mode;
            text.push_str(&format!(
                "policies:\n  timeout: 5s\n  \
                 bundles: [{{id: {id}, path: {id}, entrypoint: http/authz, mode: {mode}}}]\n"
            ));
        }
        let limits = match self.limits {
            "" => "rate_limits: {enabled: true}\n",
            limits => limits,
        };
        std::fs::write(directory.join("policy.yaml"), limits).unwrap();
        let path = directory.join("palisade.yaml");
        std::fs::write(&path, text).unwrap();
        let settings = config::load(Some(&path), &|_| None);
        let mut settings = settings.unwrap_or_else(|bad| panic!("{bad:?}"));
        settings.egress.unknown = self.unknown;
        settings
    }
}

/// The response that a client received.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ClientResponse {
    pub(super) status: u16,
    pub(super) body: String,
}

impl ClientResponse {
    /// The reason code of a refusal.
    pub(super) fn reason(&self) -> String {
        let refusal: Value = serde_json::from_str(&self.body).unwrap();
        refusal["reason"].as_str().unwrap().to_owned()
    }
}

/// A gate with its origin, operator and audit log.
pub(super) struct Gate {
    directory: tempfile::TempDir,
    pub(super) origin: OriginServer,
    pub(super) services: Arc<Services>,
    pub(super) operator: Arc<TestOperator>,
    /// The state of the sandbox.
    pub(super) sandbox: Arc<SandboxState>,
    records: Arc<MemoryAuditLog>,
}

impl Gate {
    /// A gate under `rules`, whose origin answers everything with `hello`.
    pub(super) fn new(rules: &Rules) -> Self {
        Self::with_replies(rules, |_| OriginReply::text("hello"))
    }

    /// A gate under `rules` with an origin that responds with `answer`.
    pub(super) fn with_replies(
        rules: &Rules,
        answer: impl Fn(&OriginRequest) -> OriginReply + Send + Sync + 'static,
    ) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let origin = OriginServer::http(answer);
        Self::with_origin(directory, rules, origin)
    }

    /// A gate under `rules` with this origin; the gate's files are in `directory`.
    pub(super) fn with_origin(
        directory: tempfile::TempDir,
        rules: &Rules,
        origin: OriginServer,
    ) -> Self {
        Self::start(directory, rules, origin, |dependencies| dependencies)
    }

    /// A gate under `rules` with dependencies changed by `change`.
    pub(super) fn with_dependencies(
        rules: &Rules,
        origin: OriginServer,
        change: impl FnOnce(ServiceDependencies) -> ServiceDependencies,
    ) -> Self {
        Self::start(tempfile::tempdir().unwrap(), rules, origin, change)
    }

    fn start(
        directory: tempfile::TempDir,
        rules: &Rules,
        origin: OriginServer,
        change: impl FnOnce(ServiceDependencies) -> ServiceDependencies,
    ) -> Self {
        let records = Arc::<MemoryAuditLog>::default();
        let operator = TestOperator::new();
        let settings = rules.settings(directory.path(), &origin);
        let services = Services::new(change(ServiceDependencies {
            questions: operator.questions(),
            ..fake_dependencies(directory.path(), settings, &records)
        }));
        Self {
            directory,
            origin,
            operator,
            sandbox: services.sandbox(&sandbox_id()).unwrap(),
            services,
            records,
        }
    }

    /// Applies other rules, as a reload does. Returns the number of requests in flight that ended.
    pub(super) fn reload(&self, rules: &Rules) -> usize {
        let settings = rules.settings(self.directory.path(), &self.origin);
        reload(&self.services, Arc::new(settings)).unwrap()
    }

    /// Opens a connection and sends `request`.
    pub(super) async fn connect_and_send(&self, request: &[u8]) -> DuplexStream {
        let mut client = connect(&self.services, None);
        client.write_all(request).await.unwrap();
        client
    }

    /// Sends a request and reads its response in a task.
    pub(super) async fn spawn_request(&self, request: Vec<u8>) -> JoinHandle<ClientResponse> {
        let mut client = connect(&self.services, None);
        tokio::spawn(async move {
            client.write_all(&request).await.unwrap();
            let mut text = String::new();
            client.read_to_string(&mut text).await.unwrap();
            let (head, body) = text.split_once("\r\n\r\n").unwrap();
            ClientResponse {
                status: head[9..12].parse().unwrap(),
                body: body.to_owned(),
            }
        })
    }

    /// Sends a GET and reads its response in a task.
    pub(super) async fn spawn_get(&self, host: &str, path: &str) -> JoinHandle<ClientResponse> {
        self.spawn_request(get_request(host, path)).await
    }

    /// Sends a GET and returns the response.
    pub(super) async fn get(&self, host: &str, path: &str) -> ClientResponse {
        self.spawn_get(host, path).await.await.unwrap()
    }

    /// The audit records so far.
    pub(super) fn records(&self) -> Vec<AuditEvent> {
        self.records.0.lock().unwrap().clone()
    }

    /// The verdict, reason and rule of the only audit record.
    pub(super) async fn only_record(
        &self,
    ) -> (Option<VerdictKind>, Option<Reason>, Option<String>) {
        let record = eventually("a record", || self.records().pop()).await;
        assert_eq!(self.records().len(), 1, "{:?}", self.records());
        let rule = record.rule.map(|rule| rule.to_string());
        (record.verdict, record.reason, rule)
    }

    /// Waits until one request is held and at least `bytes` bytes are reserved on disk.
    pub(super) async fn wait_for_held(&self, bytes: u64) {
        eventually("a held request", || {
            let spooled = self.sandbox.spooled.used_bytes();
            (self.sandbox.in_flight.held() == 1 && spooled >= bytes).then_some(())
        })
        .await;
    }

    /// Waits until the sandbox has no held request and its resources are free.
    pub(super) async fn assert_nothing_held(&self) {
        let unused = SandboxId::parse("unused").unwrap();
        let unused = self.services.sandbox(&unused).unwrap();
        assert_nothing_held(&self.sandbox, &unused, &self.operator).await;
    }
}

/// Waits until `state` has no request in flight, no byte on disk and as many free permits as the
/// state of an `unused` sandbox, and no future of the operator is alive.
pub(super) async fn assert_nothing_held(
    state: &SandboxState,
    unused: &SandboxState,
    operator: &TestOperator,
) {
    let permits = |state: &SandboxState| {
        let (requests, pushes) = (&state.requests, &state.pushes);
        (requests.available_permits(), pushes.available_permits())
    };
    eventually("all resources to be released", || {
        let held = state.in_flight.len() + operator.waiting();
        let is_free = permits(state) == permits(unused);
        (held == 0 && is_free && state.spooled.used_bytes() == 0).then_some(())
    })
    .await;
}

/// An origin that answers everything with `hello`.
pub(super) fn hello_origin() -> OriginServer {
    OriginServer::http(|_| OriginReply::text("hello"))
}

/// The bytes of a GET request.
pub(super) fn get_request(host: &str, path: &str) -> Vec<u8> {
    format!("GET http://{host}{path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n")
        .into_bytes()
}

/// The request head of an upload of `length` bytes.
pub(super) fn upload_head(host: &str, length: usize) -> Vec<u8> {
    format!(
        "POST http://{host}/upload HTTP/1.1\r\nHost: {host}\r\nContent-Length: {length}\r\n\
         Connection: close\r\n\r\n"
    )
    .into_bytes()
}
