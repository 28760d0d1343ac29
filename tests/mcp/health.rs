//! `/health` of the tool listeners, which measures every component for each request.

use std::net::{SocketAddr, TcpListener};

use serde_json::Value;
use testkit::gate::GateDir;
use testkit::http::{self, HttpResponse};
use testkit::port::Port;
use testkit::{output, wait};

use crate::bridge::{self, Bridge};

const PALISADE: &str = env!("CARGO_BIN_EXE_palisade");

fn health(address: SocketAddr) -> HttpResponse {
    bridge::exchange(address, "GET", "/health", &[], "")
}

fn component<'a>(health: &'a Value, name: &str) -> &'a str {
    health["components"][name].as_str().unwrap_or_default()
}

#[test]
fn seed_000_health_measures_interceptor_and_bridge() {
    for (blocked_part, other_part) in [("interceptor", "bridge"), ("bridge", "interceptor")] {
        let gate_dir = GateDir::new(PALISADE);
        let (hooks, tools) = (Port::take(), Port::take());
        let config = format!(
            "version: \"1.0\"\nserver: {{interceptor_addr: \"{}\", mcp_server_addr: \"{}\"}}\n",
            hooks.address(),
            tools.address()
        );
        gate_dir.write_config(&config);
        let (taken, open) = match blocked_part {
            "interceptor" => (hooks.address(), tools.address()),
            _ => (tools.address(), hooks.address()),
        };
        let holder = TcpListener::bind(taken).unwrap();
        let _gate = gate_dir.start();
        let answer = health(open);
        let state = answer.json();
        assert_eq!(answer.status, 503, "{state}");
        assert_eq!(state["status"], "degraded");
        let fault = component(&state, blocked_part);
        let names_address =
            fault.starts_with("unavailable: ") && fault.contains(&taken.to_string());
        assert!(names_address, "{state}");
        assert_eq!(component(&state, other_part), "ok", "{state}");

        drop(holder);
        let output = gate_dir.run(&["config", "reload"]);
        assert!(output.status.success(), "{}", output::stderr(&output));
        for address in [open, taken] {
            let answer = health(address);
            let state = answer.json();
            assert_eq!(answer.status, 200, "{state}");
            for part in ["interceptor", "bridge"] {
                assert_eq!(component(&state, part), "ok", "{state}");
            }
        }
    }
}

#[test]
fn seed_000_failed_tool_stays_unavailable_until_it_starts() {
    let bridge = Bridge::new();
    let allowed = bridge.path("start-allowed");
    let allowed = allowed.to_str().unwrap().to_owned();
    let bridge = bridge
        .fixture("fixture", &["--die-unless", &allowed])
        .fixture("good", &[]);
    let _gate = bridge.start();
    let tool = |name: &str| {
        let answer = health(bridge.address);
        // A failing server affects no other component.
        assert_eq!(answer.status, 200, "{}", answer.text());
        answer.json()["tools"][name].clone()
    };
    assert_eq!(tool("fixture")["status"], "ok");
    assert_eq!(bridge.try_session("fixture").err().unwrap().status, 503);
    // The tool stays unavailable after its backoff, until a start succeeds.
    for attempt in 2..=3_u64 {
        wait::until("another attempt", || {
            let state = tool("fixture");
            assert_eq!(state["status"], "unavailable", "{state}");
            let error = state["error"].as_str().unwrap_or_default();
            assert!(error.contains("the server ended"), "{state}");
            drop(bridge.try_session("fixture"));
            let failures = tool("fixture")["failures"].as_u64();
            (failures >= Some(attempt)).then_some(())
        });
    }
    bridge.session("good");
    assert_eq!(tool("good")["status"], "ok");
    std::fs::write(&allowed, "").unwrap();
    let _session = wait::until("the tool to start", || bridge.try_session("fixture").ok());
    let state = tool("fixture");
    assert_eq!(
        (&state["status"], &state["failures"]),
        (&"ok".into(), &0.into())
    );
    assert_eq!(state.get("error"), None, "{state}");
    assert_eq!(state["sessions"], 1, "{state}");
}

#[test]
fn seed_000_tool_that_ends_over_sse_becomes_unavailable() {
    let bridge = Bridge::new().fixture("fixture", &["--die"]);
    let gate = bridge.start();
    let mut stream = bridge.send("GET", "/sse", &[], "");
    assert_eq!(http::read_head(&mut stream).unwrap().status, 200);
    wait::until("the tool to be unavailable", || {
        let state = health(bridge.address).json()["tools"]["fixture"].clone();
        (state["status"] == "unavailable").then_some(())
    });
    let listed = gate.get("/v1/tools").text();
    assert!(listed.contains("the server ended with code 3"), "{listed}");
}

#[test]
fn seed_000_policy_loaded_follows_reloads() {
    let bridge = Bridge::with_fixture().section(
        "policies: {bundles: [{id: guard, path: guard, entrypoint: mcp/authz, required: true}]}",
    );
    let policy = bridge.path("guard/policy.rego");
    std::fs::create_dir(policy.parent().unwrap()).unwrap();
    let write = |rule: &str| {
        std::fs::write(&policy, format!("package mcp.authz\n{rule}\n")).unwrap();
    };
    let reload = || bridge.gate_dir.run(&["config", "reload"]).status.code();
    write("allow := true");
    let gate = bridge.start();
    let checks = || {
        let shown = [gate.get("/internal/health"), health(bridge.address)];
        let [one, other] = shown.map(|answer| {
            let checks = answer.json()["checks"].clone();
            let check = |name: &str| checks[name].as_bool().unwrap();
            (check("policy_loaded"), check("config_current"))
        });
        assert_eq!(one, other);
        one
    };
    assert_eq!(checks(), (true, true));

    write("allow := http.send({})");
    assert_eq!(reload(), Some(2));
    assert_eq!(checks(), (false, false));
    let state = gate.get("/internal/health").json();
    let error = state["errors"]["policy_loaded"].as_str().unwrap();
    assert!(error.contains("guard"), "{error}");
    // The previous bundle still decides calls.
    bridge
        .session("fixture")
        .text("test_simple_text", &serde_json::json!({}));

    write("allow := true");
    assert_eq!(reload(), Some(0));
    assert_eq!(checks(), (true, true));

    // Errors in other sections do not affect policies.
    bridge
        .gate_dir
        .write_config("version: \"1.0\"\nnonsense: 1\n");
    assert_eq!(reload(), Some(2));
    assert_eq!(checks(), (true, false));

    bridge.write();
    std::fs::remove_dir_all(policy.parent().unwrap()).unwrap();
    assert_eq!(reload(), Some(2));
    assert_eq!(checks(), (false, false));
}
