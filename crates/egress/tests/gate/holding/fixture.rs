//! A gate between a client and an origin on loopback, whose questions a test answers.

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

/// Names that lead to the origin.
const NAMES: [&str; 5] = [
    "api.github.com",
    "known.example",
    "asked.example",
    "other.example",
    "pinned.example",
];

/// What the settings of a gate say.
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
    /// What policy.yaml says.
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
    /// The same with a policy bundle.
    pub(super) fn with_bundle(id: &'static str, text: &'static str) -> Self {
        Self {
            bundle: Some((id, text)),
            ..Self::default()
        }
    }

    /// The same with a policy bundle that asks about every request.
    pub(super) fn with_asking_bundle(id: &'static str) -> Self {
        let ask = "package http.authz\n\n\
                   decision := {\"action\": \"ask\", \"reason\": \"Shall it?\"}\n";
        Self::with_bundle(id, ask)
    }

    /// Reads them as an operator wrote them, and asks about unknown hosts where they say so:
    /// production settings cannot say that yet.
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

/// What a client was answered.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ClientResponse {
    pub(super) status: u16,
    pub(super) body: String,
}

impl ClientResponse {
    /// The reason code of a refusal.
    pub(super) fn reason(&self) -> String {
        let said: Value = serde_json::from_str(&self.body).unwrap();
        said["reason"].as_str().unwrap().to_owned()
    }
}

/// The gate.
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

    /// The same with an origin whose responses the test chooses.
    pub(super) fn with_replies(
        rules: &Rules,
        answer: impl Fn(&OriginRequest) -> OriginReply + Send + Sync + 'static,
    ) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let origin = OriginServer::http(answer);
        Self::with_origin(directory, rules, origin)
    }

    /// The same before `origin`, with its files in `directory`.
    pub(super) fn with_origin(
        directory: tempfile::TempDir,
        rules: &Rules,
        origin: OriginServer,
    ) -> Self {
        Self::start(directory, rules, origin, |dependencies| dependencies)
    }

    /// The same with other parts.
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

    /// Puts other rules in force. Returns how many requests in flight ended.
    pub(super) fn reload(&self, rules: &Rules) -> usize {
        let settings = rules.settings(self.directory.path(), &self.origin);
        reload(&self.services, Arc::new(settings)).unwrap()
    }

    /// A connection that `request` was written to.
    pub(super) async fn connect_and_send(&self, request: &[u8]) -> DuplexStream {
        let mut client = connect(&self.services, None);
        client.write_all(request).await.unwrap();
        client
    }

    /// Sends a request, and reads its answer in a task.
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

    /// Asks for a path of a host, in a task.
    pub(super) async fn spawn_get(&self, host: &str, path: &str) -> JoinHandle<ClientResponse> {
        self.spawn_request(get_request(host, path)).await
    }

    /// Asks for a path of a host, and waits for the answer.
    pub(super) async fn get(&self, host: &str, path: &str) -> ClientResponse {
        self.spawn_get(host, path).await.await.unwrap()
    }

    /// Everything that was recorded so far.
    pub(super) fn records(&self) -> Vec<AuditEvent> {
        self.records.0.lock().unwrap().clone()
    }

    /// The only record there is: its verdict, its reason and its rule.
    pub(super) async fn only_record(
        &self,
    ) -> (Option<VerdictKind>, Option<Reason>, Option<String>) {
        let record = eventually("a record", || self.records().pop()).await;
        assert_eq!(self.records().len(), 1, "{:?}", self.records());
        let rule = record.rule.map(|rule| rule.to_string());
        (record.verdict, record.reason, rule)
    }

    /// Waits until one request is held, which has secured so many bytes on disk.
    pub(super) async fn wait_for_held(&self, bytes: u64) {
        eventually("a held request", || {
            let spooled = self.sandbox.spooled.used_bytes();
            (self.sandbox.in_flight.held() == 1 && spooled >= bytes).then_some(())
        })
        .await;
    }

    /// Waits until nothing of the sandbox is held any more.
    pub(super) async fn assert_nothing_held(&self) {
        let unused = SandboxId::parse("unused").unwrap();
        let unused = self.services.sandbox(&unused).unwrap();
        assert_nothing_held(&self.sandbox, &unused, &self.operator).await;
    }
}

/// Waits until `state` has no request in flight, no byte on disk and as many places free as the
/// state of an `unused` sandbox, and no future of the operator is alive.
pub(super) async fn assert_nothing_held(
    state: &SandboxState,
    unused: &SandboxState,
    operator: &TestOperator,
) {
    let places = |state: &SandboxState| {
        let (requests, pushes) = (&state.requests, &state.pushes);
        (requests.available_permits(), pushes.available_permits())
    };
    eventually("everything that was held to be given back", || {
        let held = state.in_flight.len() + operator.waiting();
        let is_free = places(state) == places(unused);
        (held == 0 && is_free && state.spooled.used_bytes() == 0).then_some(())
    })
    .await;
}

/// An origin that answers everything with `hello`.
pub(super) fn hello_origin() -> OriginServer {
    OriginServer::http(|_| OriginReply::text("hello"))
}

/// A request for a path of a host.
pub(super) fn get_request(host: &str, path: &str) -> Vec<u8> {
    format!("GET http://{host}{path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n")
        .into_bytes()
}

/// The head of an upload of so many bytes to a host.
pub(super) fn upload_head(host: &str, length: usize) -> Vec<u8> {
    format!(
        "POST http://{host}/upload HTTP/1.1\r\nHost: {host}\r\nContent-Length: {length}\r\n\
         Connection: close\r\n\r\n"
    )
    .into_bytes()
}
