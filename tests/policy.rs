//! `palisade policy …` on bundles, as a policy author uses it.

#![allow(
    clippy::expect_used,
    clippy::indexing_slicing,
    clippy::panic,
    clippy::unwrap_used,
    reason = "a test that cannot continue has failed"
)]

use std::path::{Path, PathBuf};

use serde_json::{Value, json};
use testkit::gate::GateDir;
use testkit::output::{stderr, stdout};

const PALISADE: &str = env!("CARGO_BIN_EXE_palisade");

const POLICY: &str = "package mcp.authz

default decision := {\"action\": \"block\", \"reason\": \"only reading\"}

decision := {\"action\": \"allow\"} if startswith(input.name, \"read\")

decision := {\"action\": \"redact\", \"outputs\": {\"redaction_rules\": {\"fields\": [\"key\"]}}} if input.name == \"log\"

trusted if input.agent_id in data.trusted
";

/// A bundle with these files.
fn bundle(gate_dir: &Path, files: &[(&str, &str)]) -> String {
    let dir = gate_dir.join("bundle");
    std::fs::create_dir_all(&dir).unwrap();
    for (name, text) in files {
        std::fs::write(dir.join(name), text).unwrap();
    }
    dir.display().to_string()
}

fn input(gate_dir: &Path, value: &Value) -> String {
    let path = gate_dir.join("input.json");
    std::fs::write(&path, value.to_string()).unwrap();
    path.display().to_string()
}

#[test]
fn every_shipped_bundle_passes_its_tests() {
    let gate_dir = GateDir::new(PALISADE);
    let policies = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../policies");
    let mut count = 0;
    for entry in std::fs::read_dir(policies).unwrap() {
        let path = entry.unwrap().path();
        let path = path.to_str().unwrap();
        let checked = gate_dir.run(&["policy", "check", path]);
        assert_eq!(checked.status.code(), Some(0), "{}", stderr(&checked));
        let tested = gate_dir.run(&["policy", "test", path]);
        let printed = stdout(&tested);
        assert_eq!(
            tested.status.code(),
            Some(0),
            "{printed}{}",
            stderr(&tested)
        );
        assert!(printed.lines().count() >= 4, "{printed}");
        assert!(
            printed.lines().all(|line| line.starts_with("pass ")),
            "{printed}"
        );
        count += 1;
    }
    assert!(count >= 5);
}

#[test]
fn failing_test_is_reported_with_location_and_output() {
    let gate_dir = GateDir::new(PALISADE);
    let tests = "package mcp.authz_test

import data.mcp.authz

test_reading if authz.decision.action == \"allow\" with input as {\"name\": \"read\"}

test_wrong if {
	print(\"the name is\", \"write\")
	authz.decision.action == \"allow\" with input as {\"name\": \"write\"}
}
";
    let home = tempfile::tempdir().unwrap();
    let files = [("policy.rego", POLICY), ("policy_test.rego", tests)];
    let dir = bundle(home.path(), &files);
    let tested = gate_dir.run(&["policy", "test", &dir]);
    assert_eq!(tested.status.code(), Some(1));
    let printed = stdout(&tested);
    assert!(
        printed.contains("pass   mcp.authz_test.test_reading\n"),
        "{printed}"
    );
    assert!(
        printed.contains("FAIL   mcp.authz_test.test_wrong  policy_test.rego:7\n"),
        "{printed}"
    );
    assert!(printed.contains("the name is write"), "{printed}");
    assert!(stderr(&tested).contains("2 tests, 1 failed"));
    let json: Value =
        serde_json::from_str(&stdout(&gate_dir.run(&["policy", "test", &dir, "--json"]))).unwrap();
    assert_eq!((&json["passed"], &json["failed"]), (&json!(1), &json!(1)));
    assert_eq!(json["tests"][1]["outcome"], "fail");
    let some = gate_dir.run(&["policy", "test", &dir, "--run", "reading"]);
    assert_eq!(some.status.code(), Some(0));
    let none = gate_dir.run(&["policy", "test", &dir, "--run", "nothing"]);
    assert_eq!(none.status.code(), Some(3));
}

#[test]
fn bundle_errors_are_reported_with_file_and_line() {
    let gate_dir = GateDir::new(PALISADE);
    for (text, printed) in [
        ("package mcp.authz\n\nallow := ", "policy.rego:3"),
        ("package mcp.authz\nallow if http.send({}).x", "http.send"),
        (
            "package mcp.authz\nallow if no.such.function(1)",
            "policy.rego:2",
        ),
        ("package mcp.authz\nx := 1", "decision, action or allow"),
    ] {
        let home = tempfile::tempdir().unwrap();
        let dir = bundle(home.path(), &[("policy.rego", text)]);
        for command in ["check", "test"] {
            let output = gate_dir.run(&["policy", command, &dir]);
            assert_eq!(output.status.code(), Some(2), "{text}");
            assert!(
                stderr(&output).contains(printed),
                "{text}: {}",
                stderr(&output)
            );
        }
    }
    let missing = gate_dir.run(&["policy", "check", "/nowhere"]);
    assert_eq!(missing.status.code(), Some(3));
}

#[test]
fn policy_check_reads_the_configured_bundles() {
    let gate_dir = GateDir::new(PALISADE);
    let home = tempfile::tempdir().unwrap();
    let dir = bundle(home.path(), &[("policy.rego", POLICY)]);
    gate_dir.write_config(&format!(
        "version: '1.0'\npolicies:\n  bundles:\n  - {{id: good, path: '{dir}', entrypoint: mcp/authz}}\n  - {{id: lost, path: '{dir}', entrypoint: git/push}}\n"
    ));
    let output = gate_dir.run(&["policy", "check"]);
    assert_eq!(output.status.code(), Some(2));
    assert!(stdout(&output).contains("good: ok, data.mcp.authz.decision"));
    assert!(stderr(&output).contains("lost: entrypoint git/push not found"));
    let input = input(home.path(), &json!({"name": "read"}));
    let output = gate_dir.run(&["policy", "eval", "--bundle", "good", "--input", &input]);
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    let output = gate_dir.run(&["policy", "eval", "--bundle", "other", "--input", &input]);
    assert_eq!(output.status.code(), Some(3));
}

#[test]
fn policy_eval_prints_and_explains_a_decision() {
    let gate_dir = GateDir::new(PALISADE);
    let home = tempfile::tempdir().unwrap();
    let dir = bundle(
        home.path(),
        &[("policy.rego", POLICY), ("data.json", r#"{"trusted": []}"#)],
    );
    for (name, decision, code) in [
        ("read", "allow", 0),
        ("write", "block", 7),
        ("log", "redact", 0),
    ] {
        let input = input(
            home.path(),
            &json!({"name": name, "params": {"key": "k", "x": 1}}),
        );
        let output = gate_dir.run(&["policy", "eval", &dir, "--input", &input]);
        assert_eq!(output.status.code(), Some(code), "{name}");
        let report: Value = serde_json::from_str(&stdout(&output)).unwrap();
        assert_eq!(report["decision"], decision);
        assert!(stdout(&output).starts_with("{\n  \"decision\""));
        assert_eq!(report["entrypoint"], "data.mcp.authz.decision");
        if decision == "redact" {
            assert_eq!(report["redacted"], json!({"key": "[redacted]", "x": 1}));
        }
    }
    let input = input(home.path(), &json!({"name": "write"}));
    let output = gate_dir.run(&["policy", "explain", &dir, "--input", &input]);
    assert_eq!(output.status.code(), Some(7));
    let report = stdout(&output);
    for line in [
        "data.mcp.authz.decision: block",
        "  reason    only reading",
        "  data.mcp.authz.trusted = undefined",
        "      policy.rego:3, policy.rego:5, policy.rego:7",
        "not in this input:",
        "  input.agent_id",
    ] {
        assert!(report.contains(line), "{line} is not in:\n{report}");
    }
}

// Issue 18, part 5.
#[test]
fn presets_are_listed_and_shown_without_a_gate() {
    let gate_dir = GateDir::new(PALISADE);
    let listed = gate_dir.run(&["preset", "list"]);
    assert!(listed.status.success(), "{}", stderr(&listed));
    let printed = stdout(&listed);
    assert_eq!(printed.lines().count(), 25, "{printed}");
    assert!(printed.contains("huggingface-read  registry"), "{printed}");
    let listed: Value =
        serde_json::from_str(&stdout(&gate_dir.run(&["preset", "list", "--json"]))).unwrap();
    assert_eq!(listed[0]["name"], "claude");
    let shown = stdout(&gate_dir.run(&["preset", "show", "pypi"]));
    assert!(
        shown.contains("pypi (registry, version 1): PyPI"),
        "{shown}"
    );
    assert!(
        shown.contains("files.pythonhosted.org  GET HEAD"),
        "{shown}"
    );
    let shown: Value = serde_json::from_str(&stdout(
        &gate_dir.run(&["preset", "show", "pypi", "--json"]),
    ))
    .unwrap();
    assert_eq!(shown["domains"][0]["methods"], json!(["GET", "HEAD"]));
    let unknown = gate_dir.run(&["preset", "show", "pip"]);
    assert_eq!(unknown.status.code(), Some(3));
    assert!(
        stderr(&unknown).contains("no preset is called 'pip'"),
        "{}",
        stderr(&unknown)
    );
    assert!(!gate_dir.state().join("lock").exists());
}

#[test]
fn presets_of_the_configuration_are_checked_and_shown_with_their_line() {
    let gate_dir = GateDir::new(PALISADE);
    gate_dir.write_config("version: \"1.0\"\negress:\n  presets:\n    - npm\n    - pipy\n");
    let checked = gate_dir.run(&["config", "check"]);
    assert_eq!(checked.status.code(), Some(2));
    let expected = "palisade.yaml:5:7: no preset is called 'pipy'; did you mean 'pypi'?";
    assert!(stderr(&checked).contains(expected), "{}", stderr(&checked));

    gate_dir.write_config("version: \"1.0\"\negress:\n  presets:\n    - npm\n    - pypi\n");
    let shown = stdout(&gate_dir.run(&["config", "show", "domains", "--json"]));
    assert!(shown.contains("preset:pypi"), "{shown}");
    let shown = stdout(&gate_dir.run(&["config", "show", "domains"]));
    let line = shown
        .lines()
        .find(|line| line.contains("preset:pypi"))
        .unwrap_or_default();
    assert!(line.contains("palisade.yaml:5"), "{shown}");
    let tried = gate_dir.run(&["policy", "try", "https://pypi.org/simple/requests/"]);
    assert!(
        stdout(&tried).contains("rule      preset:pypi"),
        "{}",
        stdout(&tried)
    );
    let upload = [
        "policy",
        "try",
        "--method",
        "POST",
        "https://pypi.org/simple/requests/",
    ];
    assert_eq!(gate_dir.run(&upload).status.code(), Some(7));
}
