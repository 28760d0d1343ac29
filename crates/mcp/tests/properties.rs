//! Numbered correctness properties of the original specification that concern the bridge. Those
//! that need a whole gate (9, 10, and 6 in sandboxes) are in tests/mcp/properties.rs.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use config::section::tools::{BridgedServer, RuntimeKind};
use config::{Settings, Sources};
use decide::hold::Questions;
use decide::snapshot::{CurrentPolicy, PolicySnapshot};
use http::{Request, StatusCode};
use http_body_util::{BodyExt, Full};
use mcp::bridge::Bridge;
use mcp::call_headers::CallHeaders;
use mcp::caller::McpCaller;
use mcp::context::{CORRELATION_KEY, Contexts};
use mcp::event_buffer::ReadOutcome;
use mcp::fingerprint::Fingerprints;
use mcp::governance::Governance;
use mcp::hold_terms::HoldTerms;
use mcp::interceptor::Interceptor;
use mcp::launch::{LaunchError, LaunchedProgram, Launcher, LocalLauncher};
use mcp::metrics::Metrics;
use mcp::process::{MessageHandler, Process, ProcessEnded, ProcessLabel};
use mcp::relay::{GatewayHookProbe, Relay};
use mcp::request_body::LargeBodyLimit;
use mcp::rpc::RpcMessage;
use mcp::server::{
    self, AuthConfig, Endpoints, ListenerRules, McpServer, MetricsPath, RequestSource,
};
use mcp::session::SessionTransport;
use mcp::tools::{Launchers, StdioServer};
use opentelemetry::trace::TracerProvider as _;
use policy::audit::AuditEvent;
use policy::ports::AuditSink;
use policy::verdict::VerdictKind;
use proptest::prelude::*;
use serde_json::{Value, json};
use tokio::sync::mpsc;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tracing_subscriber::layer::SubscriberExt as _;

/// The number of generated cases of each property.
const CASES: u32 = 100;

/// Timeout of every wait in these tests.
const TEST_TIMEOUT: Duration = Duration::from_secs(20);

struct NullAuditSink;

#[async_trait]
impl AuditSink for NullAuditSink {
    fn try_record(&self, _: Box<AuditEvent>) -> Result<(), Box<AuditEvent>> {
        Ok(())
    }

    async fn record_durably(&self, _: Box<AuditEvent>) {}

    async fn record(&self, _: Box<AuditEvent>) {}
}

/// Launcher that fails with its own name.
struct NamedLauncher(&'static str);

#[async_trait]
impl Launcher for NamedLauncher {
    async fn launch(
        &self,
        _: &BridgedServer,
        _: &McpCaller,
    ) -> Result<LaunchedProgram, LaunchError> {
        Err(LaunchError::Failed(self.0.to_owned()))
    }
}

fn named_launchers() -> Launchers {
    Launchers {
        local: Arc::new(NamedLauncher("local")),
        sandbox: Arc::new(NamedLauncher("sandbox")),
    }
}

/// Starts programs without the process guard, which is tested with the built binary.
fn local() -> LocalLauncher {
    LocalLauncher {
        guard_command: vec!["/usr/bin/env".into()],
        exit_timeout: TEST_TIMEOUT,
    }
}

fn caller() -> McpCaller {
    McpCaller {
        agent: "a".to_owned(),
        session: String::new(),
        sandbox: None,
    }
}

fn tool(name: &str, command: &[&str]) -> BridgedServer {
    serde_json::from_value(json!({"name": name, "command": command})).unwrap()
}

fn runtime() -> tokio::runtime::Runtime {
    let mut builder = tokio::runtime::Builder::new_current_thread();
    builder.enable_all().build().unwrap()
}

fn fingerprints(dir: &tempfile::TempDir) -> Arc<Fingerprints> {
    Arc::new(Fingerprints::open(&dir.path().join("tools.json")).unwrap())
}

fn settings(text: &str) -> Settings {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("palisade.yaml");
    std::fs::write(&path, text).unwrap();
    let none = |_: &str| None;
    let sources = Sources::read(Some(&path), &none).unwrap();
    sources.settings(&none).unwrap()
}

fn mcp_server(
    settings: &Settings,
    launchers: Launchers,
    dir: &tempfile::TempDir,
) -> Arc<McpServer> {
    let metrics = Metrics::default();
    let contexts = Contexts::new(&metrics);
    let snapshot = PolicySnapshot::load(Arc::new(settings.clone())).unwrap();
    let policy = Arc::new(CurrentPolicy::new(snapshot));
    let questions = Questions::default();
    let governance = Governance::new(
        policy,
        Arc::new(NullAuditSink),
        metrics,
        contexts,
        questions,
    );
    let relay = Relay {
        governance: governance.clone(),
        gateway_hooks: GatewayHookProbe(Arc::new(|| false)),
    };
    let bridge = Bridge::new(
        launchers,
        fingerprints(dir),
        relay,
        CancellationToken::new(),
    );
    bridge.apply(settings);
    Arc::new(McpServer {
        bridge,
        hooks: Arc::new(Interceptor::new(governance, CancellationToken::new())),
        large_bodies: LargeBodyLimit::default(),
        render_metrics: Arc::new(String::new),
        metrics_path: MetricsPath::default(),
        health: Arc::new(|| (true, json!({}))),
    })
}

/// Forwards the messages of a process to a channel.
struct ChannelHandler(mpsc::UnboundedSender<RpcMessage>);

#[async_trait]
impl MessageHandler for ChannelHandler {
    async fn handle(&self, message: RpcMessage) {
        drop(self.0.send(message));
    }
}

/// A running `command`, and a channel with its messages.
async fn start_process(command: &[&str]) -> (Arc<Process>, mpsc::UnboundedReceiver<RpcMessage>) {
    let launched = local()
        .launch(&tool("t", command), &caller())
        .await
        .unwrap();
    let (sender, messages) = mpsc::unbounded_channel();
    let label = ProcessLabel {
        tool: "t".into(),
        runtime: RuntimeKind::Local,
    };
    let (handler, metrics) = (Arc::new(ChannelHandler(sender)), Metrics::default());
    let process = Process::attach(launched, label, handler, metrics, &Arc::default());
    (process, messages)
}

/// Waits for `work`, at most [`TEST_TIMEOUT`].
async fn within_timeout<T>(work: impl Future<Output = T>) -> T {
    tokio::time::timeout(TEST_TIMEOUT, work).await.unwrap()
}

/// How a call to the fixture server ends.
#[derive(Clone, Copy, Debug)]
enum CallEnd {
    Result,
    Error,
    /// The server process ends with this code.
    Exit(i32),
}

fn call_end() -> impl Strategy<Value = CallEnd> {
    prop_oneof![
        Just(CallEnd::Result),
        Just(CallEnd::Error),
        (1..=120).prop_map(CallEnd::Exit),
    ]
}

/// A policy whose decision is `params.decide` of the message.
const ECHO_POLICY: &str = "package mcp.authz\n\
    decision := object.get(input.params, \"decide\", {\"action\": \"allow\"})";

/// Settings with the fixture server as `t`, governed by [`ECHO_POLICY`].
fn settings_with_policy(dir: &tempfile::TempDir) -> Settings {
    let bundle = dir.path().join("bundle");
    std::fs::create_dir(&bundle).unwrap();
    std::fs::write(bundle.join("policy.rego"), ECHO_POLICY).unwrap();
    let bundles = json!([{"id": "b", "path": bundle, "entrypoint": "mcp/authz"}]);
    let tools = json!([{"name": "t", "command": [testkit::mcp::fixture()]}]);
    let policies = json!({"timeout": "20s", "bundles": bundles});
    let all = json!({"version": "1.0", "policies": policies, "tools": tools});
    settings(&all.to_string())
}

/// Sends an envelope to a hook, and returns the action of its answer.
async fn hook(mcp_server: &Arc<McpServer>, settings: &Settings, envelope: &Value) -> String {
    let source = RequestSource::Network(ListenerRules {
        address: "127.0.0.1:8090".parse().unwrap(),
        endpoints: Endpoints {
            hooks: true,
            tools: true,
        },
        auth: AuthConfig::from_settings(settings),
    });
    let path = format!("/intercept/{}", envelope["type"].as_str().unwrap());
    let request = Request::post(path).header("host", "127.0.0.1:8090");
    let body = Full::new(Bytes::from(envelope.to_string()));
    let response = server::answer(mcp_server, &source, request.body(body).unwrap()).await;
    assert_eq!(response.status(), StatusCode::OK);
    let body = response.into_body().collect().await.unwrap().to_bytes();
    let answer: Value = serde_json::from_slice(&body).unwrap();
    let action = answer.get("action").and_then(Value::as_str);
    action.unwrap().to_owned()
}

fn envelope(kind: &str, id: &str, agent: &str, session: &str, more: &Value) -> Value {
    let mut envelope = json!({
        "version": "1.0", "type": kind, "request_id": id, "timestamp": "2026-01-01T00:00:00Z",
        "tool_id": "t", "agent_id": agent, "session_id": session,
    });
    let (all, more) = (envelope.as_object_mut().unwrap(), more.as_object().unwrap());
    all.extend(more.clone());
    envelope
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(CASES))]

    // **Feature: unified-sidecar, Property 2: Context Sharing Lifecycle**
    #[test]
    fn property_02_context_sharing_lifecycle(
        id in "[a-zA-Z0-9._/-]{1,24}",
        agent in "[a-zA-Z0-9._/-]{1,24}",
        blocks in any::<bool>(),
        end in call_end(),
        other_ids in prop::collection::hash_set("[a-zA-Z0-9._/-]{1,24}", 0..6),
    ) {
        let dir = tempfile::tempdir().unwrap();
        let settings = settings_with_policy(&dir);
        let launchers = Launchers {
            local: Arc::new(local()),
            sandbox: Arc::new(NamedLauncher("sandbox")),
        };
        let mcp_server = mcp_server(&settings, launchers, &dir);
        let contexts = mcp_server.bridge.relay().governance.contexts().clone();
        runtime().block_on(async {
            let caller = McpCaller { agent: agent.clone(), ..caller() };
            let server = mcp_server.bridge.tool(Some("t"), &caller).unwrap();
            let opened = mcp_server.bridge.open(&server, &caller, SessionTransport::Streamable).await;
            let session = opened.unwrap();
            let hook_envelope = |kind, id: &str, more: Value| envelope(kind, id, &agent, session.id(), &more);
            let params = |decide: Value| {
                json!({"method": "tools/call", "params": {"name": "x", "decide": decide}})
            };
            // The interceptor stores its decision.
            let action = if blocks { "block" } else { "allow" };
            let before = hook_envelope("before", &id, params(json!({"action": action})));
            let answered = hook(&mcp_server, &settings, &before).await;
            prop_assert_eq!(answered, if blocks { "block" } else { "pass" });
            let known = contexts.find(&id).unwrap();
            prop_assert_eq!((&*known.agent, &*known.session), (&*agent, session.id()));
            let verdict = if blocks { VerdictKind::Deny } else { VerdictKind::Allow };
            prop_assert_eq!(known.decision.as_ref().unwrap().verdict, verdict);
            prop_assert!(known.execution.is_none());
            // The bridge finds the context: it refuses the call, or stores the execution.
            let (name, arguments) = match end {
                CallEnd::Result => ("test_simple_text", json!({})),
                CallEnd::Error => ("no-such-tool", json!({})),
                CallEnd::Exit(code) => ("crash", json!({"before": true, "code": code})),
            };
            let meta = json!({ CORRELATION_KEY: id });
            let call = json!({"name": name, "arguments": arguments, "_meta": meta});
            let text = RpcMessage::request("1", "tools/call", &call.to_string());
            let pending = session.send_request(RpcMessage::read(text).unwrap(), CallHeaders::default()).await;
            let outcome = pending.unwrap().event_buffer.open_reader(0).next(TEST_TIMEOUT).await;
            let ReadOutcome::Message(message) = outcome else {
                return Err(TestCaseError::fail(format!("{outcome:?}")));
            };
            prop_assert_eq!(message.text.contains("Blocked by policy"), blocks);
            let known = contexts.find(&id).unwrap();
            prop_assert_eq!(known.decision.as_ref().unwrap().verdict, verdict);
            let execution = known.execution.map(|found| (found.failed, found.exit_code));
            let expected = match end {
                _ if blocks => None,
                CallEnd::Result => Some((false, 0)),
                CallEnd::Error => Some((true, 0)),
                CallEnd::Exit(code) => Some((true, code)),
            };
            prop_assert_eq!(execution, expected);
            // The after hook removes the context.
            let after = hook_envelope("after", &id, json!({"result": {"content": []}}));
            prop_assert_eq!(hook(&mcp_server, &settings, &after).await, "pass");
            prop_assert!(contexts.find(&id).is_none());
            // The end of the session removes contexts without an after hook.
            for other in &other_ids {
                let before = hook_envelope("before", other, params(json!({"action": "allow"})));
                prop_assert_eq!(hook(&mcp_server, &settings, &before).await, "pass");
            }
            prop_assert_eq!(contexts.len(), other_ids.len());
            mcp_server.bridge.close(session.id());
            prop_assert!(contexts.is_empty());
            within_timeout(session.process().wait_for_end()).await;
            Ok(())
        })?;
    }

    // **Feature: unified-sidecar, Property 5: Bridge Router Runtime Resolution**
    #[test]
    fn property_05_bridge_router_runtime_resolution(
        name in "[a-z][a-z0-9-]{0,20}",
        kind in prop::option::of(prop::sample::select(vec!["local", "sandbox", "e2b"])),
        template in "[a-z]{1,8}",
    ) {
        let dir = tempfile::tempdir().unwrap();
        let mut written = json!({"name": name, "command": ["x"]});
        if let Some(kind) = kind {
            written["runtime"] = json!({"type": kind, "template": template});
        }
        let tool: BridgedServer = serde_json::from_value(written).unwrap();
        let stop = CancellationToken::new();
        let server = StdioServer::new(tool, named_launchers(), fingerprints(&dir), stop, Arc::default());
        let error = runtime().block_on(server.launch(&caller())).unwrap_err();
        match kind {
            None | Some("local") => prop_assert_eq!(error, LaunchError::Failed("local".into())),
            Some("sandbox") => prop_assert_eq!(error, LaunchError::Failed("sandbox".into())),
            Some(_) => {
                prop_assert_eq!(error.status(), StatusCode::NOT_IMPLEMENTED);
                prop_assert_eq!(error, LaunchError::NotImplemented("e2b"));
            }
        }
    }

    // **Feature: unified-sidecar, Property 6: ProcessManager Interface Consistency**
    #[test]
    fn property_06_process_manager_interface_consistency(
        texts in prop::collection::vec(any::<String>(), 1..5),
    ) {
        runtime().block_on(async {
            let (process, mut messages) = start_process(&["cat"]).await;
            prop_assert!(process.is_alive());
            for value in &texts {
                let text = RpcMessage::notification("n", &json!({ "value": value }).to_string());
                process.send(&text).await.unwrap();
                let back = within_timeout(messages.recv()).await.unwrap();
                prop_assert_eq!(back.text(), text.as_str());
            }
            process.stop();
            let ended = within_timeout(process.wait_for_end()).await;
            prop_assert_eq!(ended, ProcessEnded { code: Some(0) });
            prop_assert!(!process.is_alive());
            let late = process.send(&RpcMessage::notification("n", "{}")).await;
            prop_assert_eq!(late, Err(ended.into()));
            Ok(())
        })?;
    }

    // **Feature: unified-sidecar, Property 7: Process Exit Event Handling**
    #[test]
    fn property_07_process_exit_event_handling(
        code in 0_i32..=120,
        by_signal in any::<bool>(),
        calls in 0_usize..4,
    ) {
        runtime().block_on(async {
            let line = match by_signal {
                true => "read line; kill -9 $$".to_owned(),
                false => format!("read line; exit {code}"),
            };
            let (healthy, mut messages) = start_process(&["cat"]).await;
            let (crashing, _) = start_process(&["sh", "-c", &line]).await;
            let mut open: Vec<_> = (0..calls).map(|_| crashing.reserve()).collect();
            crashing.send("{}").await.unwrap();
            let expected = ProcessEnded { code: Some(if by_signal { 137 } else { code }) };
            for call in &mut open {
                prop_assert_eq!(within_timeout(call.answer()).await.unwrap_err(), expected);
            }
            prop_assert_eq!(within_timeout(crashing.wait_for_end()).await, expected);
            // The other process is not affected.
            let text = RpcMessage::notification("n", "{}");
            healthy.send(&text).await.unwrap();
            let back = within_timeout(messages.recv()).await.unwrap();
            prop_assert_eq!(back.text(), text.as_str());
            healthy.stop();
            within_timeout(healthy.wait_for_end()).await;
            Ok(())
        })?;
    }

    // **Feature: unified-sidecar, Property 11: Trace Context Propagation**
    #[test]
    fn property_11_trace_context_propagation(
        trace in "[0-9a-f]{31}[1-9a-f]",
        span in "[0-9a-f]{15}[1-9a-f]",
        id in "[a-z0-9]{1,20}",
        arguments in prop::collection::btree_map("[a-z]{1,5}", any::<i64>(), 0..4),
        has_parent in any::<bool>(),
    ) {
        let provider = opentelemetry_sdk::trace::SdkTracerProvider::builder().build();
        let layer = tracing_opentelemetry::layer().with_tracer(provider.tracer("test"));
        let _guard = tracing::subscriber::set_default(tracing_subscriber::registry().with(layer));
        let tools = json!([{"name": "t", "command": ["x"]}]);
        let settings = settings(&json!({"version": "1.0", "tools": tools}).to_string());
        let dir = tempfile::tempdir().unwrap();
        let mcp_server = mcp_server(&settings, named_launchers(), &dir);
        let server = mcp_server.bridge.tool(Some("t"), &caller()).unwrap();
        let parent = format!("00-{trace}-{span}-01");
        let parent = has_parent.then_some(parent.as_str());
        runtime().block_on(async {
            let params = json!({
                "name": "x", "arguments": arguments, "_meta": {CORRELATION_KEY: id},
            });
            let hook = json!({
                "version": "1.0", "type": "before", "request_id": id,
                "timestamp": "2026-01-01T00:00:00Z", "method": "tools/call",
                "params": params, "tool_id": "t", "agent_id": "a", "session_id": "s",
            });
            let passed = mcp_server.hooks.answer_before(hook.to_string().into(), parent).await;
            prop_assert_eq!(passed.status(), StatusCode::OK);
            let relay = mcp_server.bridge.relay();
            let known = relay.governance.contexts().find(&id).unwrap();
            let begun = known.trace.unwrap();
            let text = RpcMessage::request("1", "tools/call", &params.to_string());
            let message = RpcMessage::read(text).unwrap();
            let (caller, headers, terms) = (caller(), CallHeaders::default(), HoldTerms::default());
            let permitted = relay.permit(&server, &caller, message, &headers, &terms).await.unwrap();
            let traceparent = permitted.message.param_text(&["_meta", "traceparent"]).unwrap();
            let trace_of = |name: &str| name.split('-').nth(1).map(str::to_owned);
            prop_assert_eq!(trace_of(&traceparent), trace_of(&begun));
            prop_assert_ne!(traceparent.as_str(), &*begun, "each has a span of its own");
            if has_parent {
                prop_assert_eq!(trace_of(&traceparent), Some(trace.clone()));
            }
            // The arguments are unchanged.
            let relayed = permitted.message.param(&["arguments"]).unwrap();
            let relayed: Value = serde_json::from_str(relayed).unwrap();
            prop_assert_eq!(relayed, json!(arguments));
            Ok(())
        })?;
    }

    // **Feature: unified-sidecar, Property 15: Graceful Shutdown**
    #[test]
    fn property_15_graceful_shutdown(count in 0_usize..6, busy in any::<bool>()) {
        let tools = json!([{"name": "t", "command": ["cat"]}]);
        let settings = settings(&json!({"version": "1.0", "tools": tools}).to_string());
        let dir = tempfile::tempdir().unwrap();
        let launchers = Launchers {
            local: Arc::new(local()),
            sandbox: Arc::new(NamedLauncher("sandbox")),
        };
        let mcp_server = mcp_server(&settings, launchers, &dir);
        runtime().block_on(async {
            let server = mcp_server.bridge.tool(None, &caller()).unwrap();
            let mut sessions = Vec::new();
            for _ in 0..count {
                let opened = mcp_server.bridge.open(&server, &caller(), SessionTransport::Streamable).await;
                let session = opened.unwrap();
                if busy {
                    let text = RpcMessage::request("1", "tools/call", r#"{"name":"never"}"#);
                    session.send_request(RpcMessage::read(text).unwrap(), CallHeaders::default()).await.unwrap();
                }
                sessions.push(session);
            }
            within_timeout(mcp_server.bridge.end(Instant::now() + TEST_TIMEOUT)).await;
            for session in &sessions {
                prop_assert!(session.has_ended());
                // `end` has waited for the process.
                let ended = session.process().wait_for_end();
                prop_assert!(tokio::time::timeout(Duration::ZERO, ended).await.is_ok());
            }
            let reopened = mcp_server.bridge.open(&server, &caller(), SessionTransport::Streamable).await;
            prop_assert!(reopened.is_err(), "a stopped bridge starts no server");
            Ok(())
        })?;
    }
}
