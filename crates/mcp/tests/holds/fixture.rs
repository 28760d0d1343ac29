//! Fixture: a bridge and hooks in front of the fake tool server, with policies that ask the
//! operator.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use config::Settings;
use decide::hold::Questions;
use decide::snapshot::{CurrentPolicy, PolicySnapshot};
use http::{Request, Response, StatusCode};
use http_body_util::{BodyExt, Full};
use mcp::answer::McpBody;
use mcp::bridge::Bridge;
use mcp::context::Contexts;
use mcp::fingerprint::Fingerprints;
use mcp::governance::Governance;
use mcp::interceptor::Interceptor;
use mcp::metrics::Metrics;
use mcp::relay::{GatewayHookProbe, Relay};
use mcp::request_body::LargeBodyLimit;
use mcp::server::{
    self, AuthConfig, Endpoints, ListenerRules, McpServer, MetricsPath, RequestSource,
};
use mcp::tools::Launchers;
use policy::audit::AuditEvent;
use policy::ports::AuditSink;
use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;

use crate::operator::Operator;
use crate::tool::{FakeLauncher, FakeTool};

/// Timeout of every wait in these tests.
const TEST_TIMEOUT: Duration = Duration::from_secs(30);

/// Waits for `work`, at most [`TEST_TIMEOUT`].
pub(crate) async fn within_timeout<T>(work: impl Future<Output = T>) -> T {
    tokio::time::timeout(TEST_TIMEOUT, work).await.unwrap()
}

/// Policy that asks the operator about calls with `arguments.ask`, about the resource `ask:me` and
/// about results of calls with `arguments.result`. It refuses messages that contain `refuse`, also
/// answers of the client.
pub(crate) const ASKING_POLICY: &str = r#"
package mcp.authz

default decision := {"action": "allow"}

decision := {"action": "block", "reason": "Never."} if {
	contains(json.marshal(input.params), "refuse")
} else := {"action": "ask", "reason": "Shall it be called?"} if {
	input.moment == "before"
	input.params.arguments.ask == true
} else := {"action": "ask", "reason": "Shall it be subscribed to?"} if {
	input.moment == "before"
	input.params.uri == "ask:me"
} else := {"action": "ask", "reason": "Shall it be shown?"} if {
	input.moment == "after"
	input.result.ask == true
}"#;

/// Policy that asks the operator about the server's questions of calls with `arguments.question`.
pub(crate) const QUESTION_POLICY: &str = r#"
package mcp.elicitation

default decision := {"action": "allow"}

decision := {"action": "ask", "reason": "Shall it be asked?"} if input.params.ask == true
"#;

/// Audit sink that keeps all events in memory.
#[derive(Debug, Default)]
pub(crate) struct Records(Mutex<Vec<AuditEvent>>);

impl Records {
    /// The events of a stage.
    pub(crate) fn of_stage(&self, stage: &str) -> Vec<AuditEvent> {
        let all = self.0.lock().unwrap();
        let found = all
            .iter()
            .filter(|event| event.stage.as_deref() == Some(stage));
        found.cloned().collect()
    }
}

#[async_trait]
impl AuditSink for Records {
    fn try_record(&self, event: Box<AuditEvent>) -> Result<(), Box<AuditEvent>> {
        self.0.lock().unwrap().push(*event);
        Ok(())
    }

    async fn record_durably(&self, event: Box<AuditEvent>) {
        self.record(event).await;
    }

    async fn record(&self, event: Box<AuditEvent>) {
        self.0.lock().unwrap().push(*event);
    }
}

/// Settings with the fake tool server as `t` and these policies, and their snapshot.
fn load(calls: &str, more: &Value) -> (Settings, PolicySnapshot) {
    let dir = tempfile::tempdir().unwrap();
    let bundle = |name: &str, text: &str, entrypoint: &str| {
        let path = dir.path().join(name);
        std::fs::create_dir(&path).unwrap();
        std::fs::write(path.join("policy.rego"), text).unwrap();
        json!({"id": name, "path": path, "entrypoint": entrypoint})
    };
    let bundles = json!([
        bundle("calls", calls, "mcp/authz"),
        bundle("questions", QUESTION_POLICY, "mcp/elicitation"),
    ]);
    let mut tool = json!({"name": "t", "command": ["x"]});
    let fields = tool.as_object_mut().unwrap();
    fields.extend(more.as_object().unwrap().clone());
    let all = json!({
        "version": "1.0",
        "tools": [tool],
        "policies": {"timeout": "20s", "bundles": bundles},
    });
    let path = dir.path().join("palisade.yaml");
    std::fs::write(&path, all.to_string()).unwrap();
    let settings = config::load(Some(&path), &|_| None).unwrap();
    let snapshot = PolicySnapshot::load(Arc::new(settings.clone())).unwrap();
    (settings, snapshot)
}

pub(crate) struct Fixture {
    pub(crate) mcp_server: Arc<McpServer>,
    pub(crate) policy: Arc<CurrentPolicy>,
    pub(crate) operator: Arc<Operator>,
    pub(crate) tool: Arc<FakeTool>,
    pub(crate) records: Arc<Records>,
    pub(crate) stop: CancellationToken,
}

impl Fixture {
    pub(crate) fn new() -> Self {
        Self::with_tool_settings(&json!({}))
    }

    /// A fixture whose tool has these further settings.
    pub(crate) fn with_tool_settings(more: &Value) -> Self {
        let operator = Operator::new();
        let questions = Questions::attended(Arc::clone(&operator) as _);
        Self::open(more, operator, questions)
    }

    /// A fixture without an operator.
    pub(crate) fn unattended() -> Self {
        Self::open(&json!({}), Operator::new(), Questions::default())
    }

    fn open(more: &Value, operator: Arc<Operator>, questions: Questions) -> Self {
        let (settings, snapshot) = load(ASKING_POLICY, more);
        let (tool, records) = (FakeTool::new(), Arc::new(Records::default()));
        let metrics = Metrics::default();
        let contexts = Contexts::new(&metrics);
        let policy = Arc::new(CurrentPolicy::new(snapshot));
        let audit = Arc::clone(&records) as Arc<dyn AuditSink>;
        let governance = Governance::new(Arc::clone(&policy), audit, metrics, contexts, questions);
        let relay = Relay {
            governance: governance.clone(),
            gateway_hooks: GatewayHookProbe(Arc::new(|| false)),
        };
        let launcher = Arc::new(FakeLauncher(Arc::clone(&tool)));
        let launchers = Launchers {
            local: Arc::clone(&launcher) as _,
            sandbox: launcher,
        };
        let fingerprints = Arc::new(Fingerprints::in_memory());
        let stop = CancellationToken::new();
        let bridge = Bridge::new(launchers, fingerprints, relay, CancellationToken::new());
        bridge.apply(&settings);
        let mcp_server = Arc::new(McpServer {
            bridge,
            hooks: Arc::new(Interceptor::new(governance, stop.clone())),
            large_bodies: LargeBodyLimit::default(),
            render_metrics: Arc::new(String::new),
            metrics_path: MetricsPath::default(),
            health: Arc::new(|| (true, json!({}))),
        });
        Self {
            mcp_server,
            policy,
            operator,
            tool,
            records,
            stop,
        }
    }

    /// Replaces the policy for calls, as a reload does.
    pub(crate) fn reload(&self, calls: &str) {
        let (_, snapshot) = load(calls, &json!({}));
        self.policy.replace(Arc::new(snapshot));
    }

    /// Sends a request; returns when the response head has arrived.
    pub(crate) async fn send(&self, request: Request<Full<Bytes>>) -> Response<McpBody> {
        let source = RequestSource::Network(ListenerRules {
            address: "127.0.0.1:8090".parse().unwrap(),
            endpoints: Endpoints {
                hooks: true,
                tools: true,
            },
            auth: AuthConfig::from_settings(&Settings::default()),
        });
        server::answer(&self.mcp_server, &source, request).await
    }

    /// Posts `body` to `path`.
    pub(crate) async fn post(
        &self,
        path: &str,
        headers: &[(&str, &str)],
        body: &Value,
    ) -> Response<McpBody> {
        let mut request = Request::post(path).header("host", "127.0.0.1:8090");
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        let body = Full::new(Bytes::from(body.to_string()));
        within_timeout(self.send(request.body(body).unwrap())).await
    }
}

/// A whole response: its status, and its JSON message or the messages of all events.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) status: StatusCode,
    pub(crate) messages: Vec<Value>,
}

impl Answer {
    /// The last message.
    #[track_caller]
    pub(crate) fn last(&self) -> &Value {
        self.messages.last().unwrap()
    }

    /// The reason code of a refused call.
    #[track_caller]
    pub(crate) fn reason(&self) -> &str {
        let about = &self.last()["result"]["_meta"]["palisade/refusal"]["reason"];
        about.as_str().unwrap()
    }
}

/// Reads a response to its end.
pub(crate) async fn read(response: Response<McpBody>) -> Answer {
    let (head, body) = response.into_parts();
    let body = within_timeout(body.collect()).await.unwrap().to_bytes();
    let text = String::from_utf8(body.to_vec()).unwrap();
    let kind = head.headers.get("content-type");
    let messages = match kind.map(|kind| kind.to_str().unwrap()) {
        Some("text/event-stream") => text
            .lines()
            .filter_map(|line| line.strip_prefix("data:"))
            .map(str::trim)
            .filter(|data| !data.is_empty())
            .map(|data| serde_json::from_str(data).unwrap())
            .collect(),
        _ if text.is_empty() => vec![],
        _ => vec![serde_json::from_str(&text).unwrap()],
    };
    Answer {
        status: head.status,
        messages,
    }
}

/// Whether a response is an event stream.
pub(crate) fn is_stream(response: &Response<McpBody>) -> bool {
    let kind = response.headers().get("content-type");
    kind.is_some_and(|kind| kind == "text/event-stream")
}

/// Reads a stream until an event contains `wanted`, and returns the message of that event.
pub(crate) async fn read_until(response: &mut Response<McpBody>, wanted: &str) -> Value {
    // Bounded, because an idle stream sends keepalive comments without end.
    for _ in 0..100 {
        let frame = within_timeout(response.body_mut().frame())
            .await
            .unwrap()
            .unwrap();
        let text = String::from_utf8(frame.into_data().unwrap().to_vec()).unwrap();
        let mut data = text.lines().filter_map(|line| line.strip_prefix("data:"));
        if let Some(data) = data.find(|data| data.contains(wanted)) {
            return serde_json::from_str(data).unwrap();
        }
    }
    panic!("the stream has no event with {wanted}");
}
