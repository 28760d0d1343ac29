//! The seed's correctness properties that concern the bridge, under their numbers.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on should stop")]

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use config::section::tools::{RuntimeKind, Tool};
use config::{Settings, Sources};
use http::{Request, StatusCode};
use http_body_util::{BodyExt, Full};
use mcp::bridge::Bridge;
use mcp::call_headers::CallHeaders;
use mcp::context::Contexts;
use mcp::fingerprint::Fingerprints;
use mcp::governance::{Caller, Governance, Rules};
use mcp::interceptor::{CORRELATION, Interceptor};
use mcp::launch::{LaunchError, Launched, Launcher, Local};
use mcp::metrics::Metrics;
use mcp::ports::Ledger;
use mcp::process::{Gone, Home, Label, Process};
use mcp::relay::{Relay, Stamps};
use mcp::room::Room;
use mcp::rpc::Message;
use mcp::server::{self, Demands, Door, House, ListenerRules, Offers};
use mcp::session::Way;
use mcp::tools::{Launchers, Served};
use opentelemetry::trace::TracerProvider as _;
use policy::audit::AuditEvent;
use proptest::prelude::*;
use serde_json::{Value, json};
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;
use tracing_subscriber::layer::SubscriberExt as _;

const CASES: u32 = 100;

/// Nothing in here waits that long unless something is wrong.
const LONG: Duration = Duration::from_secs(20);

struct NoBook;

#[async_trait]
impl Ledger for NoBook {
    async fn record(&self, _: Box<AuditEvent>) {}
}

/// Says who was asked to start something.
struct Marker(&'static str);

#[async_trait]
impl Launcher for Marker {
    async fn launch(&self, _: &Tool, _: &Caller) -> Result<Launched, LaunchError> {
        Err(LaunchError::Failed(self.0.to_owned()))
    }
}

fn marked() -> Launchers {
    Launchers {
        local: Arc::new(Marker("local")),
        sandbox: Arc::new(Marker("sandbox")),
    }
}

/// Programs start as they are: what a leash is for is shown with the built binary.
fn local() -> Local {
    Local {
        leash: vec!["/usr/bin/env".into()],
        patience: LONG,
    }
}

fn caller() -> Caller {
    Caller {
        agent: "a".to_owned(),
        session: String::new(),
        sandbox: None,
    }
}

fn tool(name: &str, command: &[&str]) -> Tool {
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

fn house(settings: &Settings, launchers: Launchers, dir: &tempfile::TempDir) -> Arc<House> {
    let metrics = Metrics::default();
    let contexts = Contexts::new(&metrics);
    let rules = Rules::load(settings).unwrap();
    let governance = Governance::new(rules, Arc::new(NoBook), metrics, contexts);
    let relay = Relay {
        governance: governance.clone(),
        stamps: Stamps(Arc::new(|| false)),
    };
    let bridge = Bridge::new(
        launchers,
        fingerprints(dir),
        relay,
        CancellationToken::new(),
    );
    bridge.apply(settings);
    Arc::new(House {
        bridge,
        hooks: Arc::new(Interceptor::new(governance)),
        room: Room::default(),
        numbers: Arc::new(String::new),
        health: Arc::new(|| {
            let parts = json!({"interceptor": "ok", "bridge": "ok", "policy": "ok"});
            (true, json!({"status": "healthy", "components": parts}))
        }),
    })
}

/// Hands on what it hears.
struct Ear(mpsc::UnboundedSender<Message>);

#[async_trait]
impl Home for Ear {
    async fn hear(&self, message: Message) {
        drop(self.0.send(message));
    }
}

/// A running `command`, and what it says.
async fn keep(command: &[&str]) -> (Arc<Process>, mpsc::UnboundedReceiver<Message>) {
    let launched = local()
        .launch(&tool("t", command), &caller())
        .await
        .unwrap();
    let (said, heard) = mpsc::unbounded_channel();
    let label = Label {
        tool: "t".into(),
        runtime: RuntimeKind::Local,
    };
    let process = Process::keep(launched, label, Arc::new(Ear(said)), Metrics::default());
    (process, heard)
}

/// What comes within a reasonable time.
async fn soon<T>(work: impl Future<Output = T>) -> T {
    tokio::time::timeout(LONG, work).await.unwrap()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(CASES))]

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
        let tool: Tool = serde_json::from_value(written).unwrap();
        let stop = CancellationToken::new();
        let served = Served::new(tool, marked(), fingerprints(&dir), stop);
        let error = runtime().block_on(served.launch(&caller())).unwrap_err();
        match kind {
            None | Some("local") => prop_assert_eq!(error, LaunchError::Failed("local".into())),
            Some("sandbox") => prop_assert_eq!(error, LaunchError::Failed("sandbox".into())),
            Some(_) => {
                prop_assert_eq!(error.status(), StatusCode::NOT_IMPLEMENTED);
                prop_assert_eq!(error, LaunchError::NotBuilt("e2b"));
            }
        }
    }

    // **Feature: unified-sidecar, Property 6: ProcessManager Interface Consistency**
    #[test]
    fn property_06_process_manager_interface_consistency(
        words in prop::collection::vec(any::<String>(), 1..5),
    ) {
        runtime().block_on(async {
            let (process, mut heard) = keep(&["cat"]).await;
            prop_assert!(process.is_alive());
            for word in &words {
                let text = Message::notification("n", &json!({ "word": word }).to_string());
                process.send(&text).await.unwrap();
                let back = soon(heard.recv()).await.unwrap();
                prop_assert_eq!(back.text(), text.as_str());
            }
            process.stop();
            let gone = soon(process.ended()).await;
            prop_assert_eq!(gone, Gone { code: Some(0) });
            prop_assert!(!process.is_alive());
            let late = process.send(&Message::notification("n", "{}")).await;
            prop_assert_eq!(late, Err(gone));
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
            let (well, mut heard) = keep(&["cat"]).await;
            let (sick, _) = keep(&["sh", "-c", &line]).await;
            let mut open: Vec<_> = (0..calls).map(|_| sick.reserve()).collect();
            sick.send("{}").await.unwrap();
            let expected = Gone { code: Some(if by_signal { 137 } else { code }) };
            for call in &mut open {
                prop_assert_eq!(soon(call.answer()).await.unwrap_err(), expected);
            }
            prop_assert_eq!(soon(sick.ended()).await, expected);
            // The other one has noticed nothing.
            let text = Message::notification("n", "{}");
            well.send(&text).await.unwrap();
            let back = soon(heard.recv()).await.unwrap();
            prop_assert_eq!(back.text(), text.as_str());
            well.stop();
            soon(well.ended()).await;
            Ok(())
        })?;
    }

    // **Feature: unified-sidecar, Property 9: Health Status Aggregation**
    #[test]
    fn property_09_health_status_aggregation(
        names in prop::collection::btree_set("[a-z][a-z0-9]{0,10}", 0..6),
        failing in prop::collection::vec(any::<bool>(), 6),
        hooks in any::<bool>(),
    ) {
        let list: Vec<_> = names
            .iter()
            .map(|name| json!({"name": name, "command": ["x"]}))
            .collect();
        let settings = settings(&json!({"version": "1.0", "tools": list}).to_string());
        let dir = tempfile::tempdir().unwrap();
        let house = house(&settings, marked(), &dir);
        runtime().block_on(async {
            let mut failed = std::collections::BTreeSet::new();
            for (name, fails) in names.iter().zip(&failing) {
                if *fails {
                    let served = house.bridge.tool(Some(name), &caller()).unwrap();
                    served.launch(&caller()).await.unwrap_err();
                    failed.insert(name);
                }
            }
            // Whichever port is asked.
            let offers = Offers { hooks, tools: !hooks };
            let door = Door::Network(ListenerRules {
                at: "127.0.0.1:8090".parse().unwrap(),
                offers,
                demands: Demands::of(&settings),
            });
            let request = Request::get("/health").header("host", "127.0.0.1:8090");
            let request = request.body(Full::new(Bytes::new())).unwrap();
            let response = server::answer(&house, &door, request).await;
            prop_assert_eq!(response.status(), StatusCode::OK);
            let body = response.into_body().collect().await.unwrap().to_bytes();
            let said: Value = serde_json::from_slice(&body).unwrap();
            for part in ["interceptor", "bridge", "policy"] {
                prop_assert_eq!(&said["components"][part], "ok");
            }
            let tools = said["tools"].as_object().unwrap();
            prop_assert_eq!(tools.len(), names.len());
            for name in &names {
                let expected = if failed.contains(name) { "failing" } else { "ok" };
                prop_assert_eq!(&tools[name]["status"], expected);
                prop_assert_eq!(&tools[name]["runtime"], "local");
            }
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
        let house = house(&settings, marked(), &dir);
        let served = house.bridge.tool(Some("t"), &caller()).unwrap();
        let parent = format!("00-{trace}-{span}-01");
        let parent = has_parent.then_some(parent.as_str());
        runtime().block_on(async {
            let params = json!({
                "name": "x", "arguments": arguments, "_meta": {CORRELATION: id},
            });
            let hook = json!({
                "version": "1.0", "type": "before", "request_id": id,
                "timestamp": "2026-01-01T00:00:00Z", "method": "tools/call",
                "params": params, "tool_id": "t", "agent_id": "a", "session_id": "s",
            });
            let passed = house.hooks.before(hook.to_string().into(), parent).await;
            prop_assert_eq!(passed.status(), StatusCode::OK);
            let relay = house.bridge.relay();
            let known = relay.governance.contexts().find(&id).unwrap();
            let begun = known.trace.unwrap();
            let text = Message::request("1", "tools/call", &params.to_string());
            let message = Message::read(text).unwrap();
            let permitted = relay.permit(&served, &caller(), message, CallHeaders::default()).await.unwrap();
            let told = permitted.message.param_text(&["_meta", "traceparent"]).unwrap();
            let trace_of = |name: &str| name.split('-').nth(1).map(str::to_owned);
            prop_assert_eq!(trace_of(&told), trace_of(&begun));
            prop_assert_ne!(told.as_str(), &*begun, "each has a span of its own");
            if has_parent {
                prop_assert_eq!(trace_of(&told), Some(trace.clone()));
            }
            // What the tool is told beside that is what the client said.
            let again = permitted.message.param(&["arguments"]).unwrap();
            let again: Value = serde_json::from_str(again).unwrap();
            prop_assert_eq!(again, json!(arguments));
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
            sandbox: Arc::new(Marker("sandbox")),
        };
        let house = house(&settings, launchers, &dir);
        runtime().block_on(async {
            let served = house.bridge.tool(None, &caller()).unwrap();
            let mut sessions = Vec::new();
            for _ in 0..count {
                let opened = house.bridge.open(&served, &caller(), Way::Streamable).await;
                let session = opened.unwrap();
                if busy {
                    let text = Message::request("1", "tools/call", r#"{"name":"never"}"#);
                    session.ask(Message::read(text).unwrap(), CallHeaders::default()).await.unwrap();
                }
                sessions.push(session);
            }
            soon(house.bridge.end()).await;
            for session in &sessions {
                prop_assert!(session.is_over());
                // Its end was waited for: nobody is left behind.
                let ended = session.process().ended();
                prop_assert!(tokio::time::timeout(Duration::ZERO, ended).await.is_ok());
            }
            let again = house.bridge.open(&served, &caller(), Way::Streamable).await;
            prop_assert!(again.is_err(), "nothing is started any more");
            Ok(())
        })?;
    }
}
