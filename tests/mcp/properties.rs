//! Numbered correctness properties of the original specification that need a whole gate.

use std::cell::Cell;
use std::fmt::Write as _;
use std::io::BufReader;

use proptest::prelude::*;
use serde_json::{Value, json};
use testkit::gate::GateDir;
use testkit::port::Port;
use testkit::{http, wait};

use crate::bridge::{self, Bridge, initialize, request, value_of};
use crate::relay::events;

const PALISADE: &str = env!("CARGO_BIN_EXE_palisade");
/// The number of generated cases of each property.
const CASES: u32 = 100;

/// A policy whose decision is `params.decide` of the message.
const ECHO_POLICY: &str =
    "decision := object.get(input.params, \"decide\", {\"action\": \"allow\"})\n";

/// A server that answers `initialize` and echoes all other lines. After `notifications/close` it
/// closes its input and keeps running.
const ECHO_SERVER: &str = r#"while IFS= read -r line; do
  case $line in
    *'"initialize"'*) echo '{"jsonrpc":"2.0","id":1,"result":{"protocolVersion":"2025-11-25","capabilities":{},"serverInfo":{"name":"x","version":"1"}}}';;
    *notifications/initialized*) ;;
    *notifications/close*) exec 0<&-; echo '{"jsonrpc":"2.0","method":"notifications/closed"}'; exec sleep 1000;;
    *) printf '%s\n' "$line";;
  esac
done"#;

fn notification(method: &str, params: &Value) -> String {
    json!({"jsonrpc": "2.0", "method": method, "params": params}).to_string()
}

// **Feature: unified-sidecar, Property 6: ProcessManager Interface Consistency**
#[test]
fn property_06_process_manager_interface_consistency_in_sandboxes() {
    let command = ["sh", "-c", ECHO_SERVER];
    let bridge = Bridge::new().tool("local", &command, "").tool(
        "sandbox",
        &command,
        "runtime: {type: sandbox}",
    );
    let gate = bridge.start();
    let strategy = (
        prop::sample::select(vec!["local", "sandbox"]),
        prop::collection::vec(any::<String>(), 1..5),
        prop::bool::weighted(0.1),
    );
    proptest!(ProptestConfig::with_cases(CASES), |((tool, texts, closes) in strategy)| {
        let labels = format!(r#"{{tool_id="{tool}",runtime_type="{tool}"}}"#);
        let running = format!("polis_sidecar_processes{labels}");
        let ended = format!(
            r#"polis_sidecar_tool_exits_total{{tool_id="{tool}",runtime_type="{tool}",exit_code="0"}}"#
        );
        let earlier = bridge.metric(&ended).unwrap_or(0);
        // Start.
        let session = bridge.session(tool);
        prop_assert_eq!(bridge.metric(&running), Some(1));
        let stream = bridge.send("GET", &session.path, &session.headers(), "");
        let mut stream = BufReader::new(stream);
        prop_assert_eq!(http::read_head(&mut stream).unwrap().status, 200);
        // Write, and read the response.
        for (number, text) in texts.iter().enumerate() {
            let mark = format!("\"number\":{number}");
            let params = json!({"text": text, "number": number});
            let sent = notification("notifications/text", &params);
            prop_assert_eq!(session.post(&sent).status, 202);
            let back = events(&mut stream, &mark);
            let back = back.iter().find(|(_, data)| data.contains(&mark));
            prop_assert_eq!(back.map(|(_, data)| data.as_str()), Some(sent.as_str()));
        }
        let ping = request(9, "ping", &json!({}));
        if closes {
            // A failed write is an error only for its caller.
            let text = notification("notifications/close", &json!({}));
            prop_assert_eq!(session.post(&text).status, 202);
            events(&mut stream, "notifications/closed");
            prop_assert_eq!(session.post(&ping).status, 500);
        } else {
            // Stop: the input ends, and the process exits by itself.
            prop_assert_eq!(session.delete(), 204);
            bridge.wait_for_metric(&ended, earlier + 1);
        }
        bridge.wait_for_metric(&running, 0);
        prop_assert_eq!(session.post(&ping).status, 404);
        prop_assert_eq!(gate.get("/internal/health").status, 200);
    });
}

/// A tool in one of the states of a health check.
#[derive(Clone, Copy, Debug)]
enum ToolState {
    Works,
    CannotStart,
    NotImplemented,
    /// Not started yet.
    Unused,
}

impl ToolState {
    fn entry(self, name: &str) -> String {
        let program = testkit::mcp::fixture();
        match self {
            ToolState::Works => format!("  - {{name: {name}, command: [{program:?}]}}\n"),
            ToolState::CannotStart | ToolState::Unused => {
                format!("  - {{name: {name}, command: [/nonexistent/program]}}\n")
            }
            ToolState::NotImplemented => {
                format!("  - {{name: {name}, command: [x], runtime: {{type: e2b, template: t}}}}\n")
            }
        }
    }

    /// The HTTP status of a new session; none if no session is opened.
    fn answer(self) -> Option<u16> {
        match self {
            ToolState::Works => Some(200),
            ToolState::CannotStart => Some(503),
            ToolState::NotImplemented => Some(501),
            ToolState::Unused => None,
        }
    }

    fn status(self) -> &'static str {
        match self {
            ToolState::Works | ToolState::Unused => "ok",
            ToolState::CannotStart | ToolState::NotImplemented => "unavailable",
        }
    }
}

// **Feature: unified-sidecar, Property 9: Health Status Aggregation**
#[test]
fn property_09_health_status_aggregation() {
    let gate_dir = GateDir::new(PALISADE);
    let (hooks, tools) = (Port::take(), Port::take());
    let bundle = gate_dir.path().join("bundle");
    std::fs::create_dir(&bundle).unwrap();
    let policy = format!("package mcp.authz\n{ECHO_POLICY}");
    std::fs::write(bundle.join("policy.rego"), policy).unwrap();
    let gate = gate_dir.start();
    let states = prop::sample::select(vec![
        ToolState::Works,
        ToolState::CannotStart,
        ToolState::NotImplemented,
        ToolState::Unused,
    ]);
    let strategy = (
        prop::collection::vec(states, 0..4),
        any::<bool>(),
        // The configured bundles, and their state in `/health`.
        prop::sample::select(vec![
            (&[][..], "pass-through: "),
            (&["bundle"], "ok"),
            (&["nowhere"], "pass-through: "),
            (&["bundle", "nowhere"], "incomplete: "),
        ]),
    );
    let case = Cell::new(0);
    proptest!(ProptestConfig::with_cases(CASES), |((states, two_addresses, (bundles, policy)) in strategy)| {
        // New tools for every case, because unchanged ones keep their state.
        case.set(case.get() + 1);
        let named: Vec<_> = states
            .iter()
            .enumerate()
            .map(|(index, state)| (format!("t{}-{index}", case.get()), *state))
            .collect();
        let (at, addresses) = if two_addresses {
            let (one, other) = (hooks.address(), tools.address());
            let at = format!("interceptor_addr: \"{one}\", mcp_server_addr: \"{other}\"");
            (at, vec![one, other])
        } else {
            let at = tools.address();
            (format!("single_port: \"{at}\""), vec![at])
        };
        let mut text = format!("version: \"1.0\"\nserver: {{{at}}}\npolicies:\n  bundles:\n");
        for path in bundles {
            writeln!(text, "    - {{id: {path}, path: {path}, entrypoint: mcp/authz}}").unwrap();
        }
        text.push_str("tools:\n");
        for (name, state) in &named {
            text.push_str(&state.entry(name));
        }
        gate_dir.write_config(&text);
        let reloaded = gate.request("POST", "/v1/config/reload", &Value::Null);
        prop_assert_eq!(reloaded.status, 200, "{}", reloaded.text());
        for (name, state) in &named {
            if let Some(expected) = state.answer() {
                let path = format!("/mcp/{name}");
                let answer = bridge::exchange(tools.address(), "POST", &path, &[], &initialize());
                prop_assert_eq!(answer.status, expected, "{}", answer.text());
            }
        }
        for address in addresses {
            let answer = bridge::exchange(address, "GET", "/health", &[], "");
            let health = answer.json();
            prop_assert_eq!(answer.status, 200, "{}", health);
            prop_assert_eq!(&health["status"], "healthy");
            let part = |name: &str| health["components"][name].as_str().unwrap_or_default();
            prop_assert_eq!((part("interceptor"), part("bridge")), ("ok", "ok"));
            prop_assert!(part("policy").starts_with(policy), "{}", health);
            let listed = health["tools"].as_object().unwrap();
            prop_assert_eq!(listed.len(), named.len());
            for (name, state) in &named {
                let tool = &listed[name];
                prop_assert_eq!(&tool["status"], state.status(), "{}", tool);
                let works = matches!(state, ToolState::Works);
                prop_assert_eq!(&tool["sessions"], &json!(u8::from(works)), "{}", tool);
                let runtime = match state {
                    ToolState::NotImplemented => "e2b",
                    _ => "local",
                };
                prop_assert_eq!(&tool["runtime"], runtime);
            }
        }
    });
}

/// How a call ends.
#[derive(Clone, Copy, Debug)]
enum CallEnd {
    Success,
    Error,
    Timeout,
    Cancelled,
    /// The process of the tool ends with this code.
    Exit(u8),
}

impl CallEnd {
    fn status(self) -> &'static str {
        match self {
            CallEnd::Success => "success",
            CallEnd::Error | CallEnd::Exit(_) => "error",
            CallEnd::Timeout => "timeout",
            CallEnd::Cancelled => "cancelled",
        }
    }
}

// **Feature: unified-sidecar, Property 10: Metrics Emission Consistency**
#[test]
fn property_10_metrics_emission_consistency() {
    let program = testkit::mcp::fixture();
    let command = [program.to_str().unwrap()];
    let bridge = Bridge::with_fixture()
        .tool("short", &command, "runtime: {timeout: 300ms}")
        .policy(ECHO_POLICY);
    let _gate = bridge.start();
    let session = bridge.session("fixture");
    // On a busy machine the initialization may take longer than the limit of its calls.
    let short = wait::until("a session", || bridge.try_session("short").ok());
    let ends = prop_oneof![
        3 => Just(CallEnd::Success),
        3 => Just(CallEnd::Error),
        1 => Just(CallEnd::Timeout),
        3 => Just(CallEnd::Cancelled),
        3 => any::<u8>().prop_map(CallEnd::Exit),
    ];
    let actions = prop::sample::select(vec![
        ("allow", "pass"),
        ("block", "block"),
        ("redact", "modify"),
    ]);
    let strategy = (actions, any::<bool>(), any::<bool>(), ends);
    let case = Cell::new(0);
    proptest!(ProptestConfig::with_cases(CASES), |(((action, answered), is_known, is_after, end) in strategy)| {
        case.set(case.get() + 1);
        // A hook is counted by moment, action and tool, and its decision by bundle.
        let tool = if is_known { "fixture" } else { "gateway-tool" };
        let moment = if is_after { "after" } else { "before" };
        let (counted, decided) = if is_after { ("pass", "allow") } else { (answered, action) };
        let mut envelope = json!({
            "version": "1.0", "type": moment, "request_id": "r",
            "timestamp": "2026-01-01T00:00:00Z", "tool_id": tool, "agent_id": "a",
            "session_id": "s",
        });
        if is_after {
            envelope["result"] = json!({"content": []});
        } else {
            let decide = json!({"action": action, "outputs": {"modified_data": {"x": 1}}});
            envelope["method"] = json!("tools/call");
            envelope["params"] = json!({"name": "x", "decide": decide});
        }
        let series = [
            format!(r#"polis_sidecar_intercept_total{{type="{moment}",action="{counted}",tool_id="{tool}"}}"#),
            format!(r#"polis_sidecar_intercept_duration_seconds_count{{type="{moment}",tool_id="{tool}"}}"#),
            format!(r#"polis_sidecar_policy_decisions_total{{action="{decided}",bundle_id="guard"}}"#),
            r#"polis_sidecar_policy_decision_duration_seconds_count{bundle_id="guard"}"#.to_owned(),
        ];
        let read = |series: &[String]| -> Vec<u64> {
            let text = bridge.request("GET", "/metrics", &[], "").text();
            series.iter().map(|one| value_of(&text, one).unwrap_or(0)).collect()
        };
        let one_more = |earlier: &[u64]| -> Vec<u64> { earlier.iter().map(|count| count + 1).collect() };
        let earlier = read(&series);
        let path = format!("/intercept/{moment}");
        let answer = bridge.request("POST", &path, &[], &envelope.to_string());
        prop_assert_eq!(answer.status, 200, "{}", answer.text());
        prop_assert_eq!(&answer.json()["action"], counted);
        prop_assert_eq!(read(&series), one_more(&earlier), "{:?}", series);

        // A call is counted by tool, runtime and outcome, and an exit of its process by code.
        let tool = if matches!(end, CallEnd::Timeout) { "short" } else { "fixture" };
        let labels = format!(r#"tool_id="{tool}",runtime_type="local""#);
        let mut series = vec![
            format!(r#"polis_sidecar_tool_executions_total{{{labels},status="{}"}}"#, end.status()),
            format!("polis_sidecar_tool_execution_duration_seconds_count{{{labels}}}"),
        ];
        if let CallEnd::Exit(code) = end {
            series.push(format!(r#"polis_sidecar_tool_exits_total{{{labels},exit_code="{code}"}}"#));
        }
        let earlier = read(&series);
        match end {
            CallEnd::Success => {
                session.text("test_simple_text", &json!({}));
            }
            CallEnd::Error => {
                session.call("no-such-tool", &json!({}));
            }
            CallEnd::Timeout => {
                short.call("hang", &json!({}));
            }
            CallEnd::Exit(code) => {
                let session = bridge.session("fixture");
                session.call("crash", &json!({"before": true, "code": code}));
            }
            CallEnd::Cancelled => {
                let file = bridge.path(&format!("started-{}", case.get()));
                let params = json!({"name": "cancellable", "arguments": {"file": file}});
                let _open = session.send(&request(7, "tools/call", &params));
                wait::until("the call to be in flight", || file.exists().then_some(()));
                let cancel = notification("notifications/cancelled", &json!({"requestId": 7}));
                prop_assert_eq!(session.post(&cancel).status, 202);
            }
        }
        let expected = one_more(&earlier);
        wait::until_or(
            || (read(&series) == expected).then_some(()),
            || format!("{series:?} to be {expected:?}, and not {:?}", read(&series)),
        );
    });
}
