//! Whole sessions of an agent, and their effects on the operator's repository.

use serde_json::json;
use testkit::wait;

use crate::agent_fixture::AgentFixture;

const SESSION_CHECKS: [&str; 9] = [
    "create", "write", "bash", "read", "grep", "edit", "patch", "diff", "states",
];

#[test]
fn agent_session_does_not_change_the_operators_worktree() {
    for mode in ["auto", "legacy"] {
        let fixture = AgentFixture::new();
        let before = fixture.repo.fingerprint();
        let head = fixture.repo.git(&["rev-parse", "HEAD"]);
        fixture.run_client("full_session", mode, &SESSION_CHECKS);
        let changed = before.differences(&fixture.repo.fingerprint());
        assert!(changed.is_empty(), "{changed:?}");
        assert_eq!(fixture.repo.git(&["status", "--porcelain"]), "");
        assert_eq!(fixture.repo.git(&["rev-parse", "HEAD"]), head);
        assert_eq!(
            fixture.commit_messages("palisade/fix-it"),
            [
                "write: src/new/main.py",
                "bash: python3 src/new/main.py > out.txt; cat out.txt; pwd",
                "edit: src/new/main.py",
                "patch: README.md, docs/new.md",
                "patch: docs/new.md",
            ]
        );
        fixture.run_client("sandbox_of_another_session", mode, &["kept"]);
        fixture.ok(&["delete", "--force", "fix-it"]);
        fixture.assert_nothing_left();
    }
}

#[test]
fn sandbox_with_commits_is_deleted_only_by_force() {
    let fixture = AgentFixture::new();
    fixture.run_client("delete_sandboxes", "auto", &["delete"]);
    fixture.assert_nothing_left();
}

#[test]
fn invalid_calls_return_readable_errors() {
    let fixture = AgentFixture::new();
    fixture.run_client("errors", "auto", &["names", "paths", "tools", "which"]);
    assert_eq!(
        fixture.commit_messages("palisade/one"),
        Vec::<String>::new()
    );
}

#[test]
fn cancelled_call_ends_its_command() {
    let fixture = AgentFixture::new();
    fixture.run_client("cancel", "auto", &["cancel"]);
    let commit_messages = fixture.commit_messages("palisade/patient");
    assert_eq!(
        commit_messages,
        ["bash: echo begun > begun.txt; sleep 4321"]
    );
}

#[test]
fn seed_004_bash_returns_stdout_and_stderr_separately() {
    let fixture = AgentFixture::new();
    let mut server = fixture.serve();
    server.call("sandbox-create", &json!({ "name": "fix" }));
    server.answer();
    let line = "echo out; echo err >&2; exit 3";
    server.call("bash", &json!({ "command": line }));
    let answer = server.answer();
    let ran = &answer["result"]["structuredContent"];
    assert_eq!(
        (&ran["exit_code"], &ran["stdout"], &ran["stderr"]),
        (&json!(3), &json!("out\n"), &json!("err\n")),
        "{answer}"
    );
    let output = ran["output"].as_str().unwrap();
    assert!(["out\nerr\n", "err\nout\n"].contains(&output), "{answer}");
    assert_eq!(answer["result"]["isError"], true, "{answer}");
}

#[test]
fn seed_004_sandbox_delete_is_refused_while_a_command_runs() {
    let fixture = AgentFixture::new();
    let mut server = fixture.serve();
    server.call("sandbox-create", &json!({ "name": "fix" }));
    server.answer();
    let line = "sleep 4323 >/dev/null 2>&1 & until pgrep -fx 'sleep 432[3]' >/dev/null; do :; done";
    server.call("bash", &json!({ "command": line }));
    server.answer();
    server.call("sandbox-delete", &json!({}));
    let answer = server.answer();
    let text = answer["result"]["content"][0]["text"].to_string();
    assert!(text.contains("sleep is running"), "{answer}");
    let end = "pkill -KILL -fx 'sleep 432[3]'; while pgrep -fx 'sleep 432[3]'; do :; done";
    server.call("bash", &json!({ "command": end }));
    server.answer();
    server.call("sandbox-delete", &json!({}));
    let answer = server.answer();
    assert_eq!(
        answer["result"]["structuredContent"]["name"], "fix",
        "{answer}"
    );
    drop(server);
    fixture.assert_nothing_left();
}

#[test]
fn concurrent_writes_are_all_committed() {
    let fixture = AgentFixture::new();
    fixture.run_client("concurrent_writes", "auto", &["concurrent writes"]);
}

#[test]
fn every_tool_has_description_and_schemas() {
    let fixture = AgentFixture::new();
    for mode in ["auto", "legacy"] {
        fixture.run_client("describe_tools", mode, &["descriptions"]);
    }
}

#[test]
fn server_ends_when_its_client_closes_the_input() {
    let fixture = AgentFixture::new();
    let output = fixture.run(&["mcp"]);
    assert!(output.status.success());
    assert!(
        output.stdout.is_empty(),
        "stdout is reserved for the protocol"
    );
}

#[test]
fn running_command_ends_with_the_client_and_is_committed() {
    let fixture = AgentFixture::new();
    let mut server = fixture.serve();
    server.call("sandbox-create", &json!({ "name": "disconnected" }));
    server.answer();
    let line = "echo begun > begun.txt; sleep 4322";
    server.call("bash", &json!({ "command": line }));
    wait::until("the command to start", || {
        let found = fixture.run(&["exec", "disconnected", "--", "test", "-e", "begun.txt"]);
        found.status.success().then_some(())
    });
    let status = server.close_input();
    assert!(status.success(), "{status}");
    let check = "pgrep -fx 'sleep 432[2]' || echo none";
    wait::until("the command to end", || {
        let found = fixture.ok(&["exec", "disconnected", "--", "sh", "-c", check]);
        (found == "none\n").then_some(())
    });
    assert_eq!(
        fixture.commit_messages("palisade/disconnected"),
        [format!("bash: {line}")]
    );
}

#[test]
fn stopped_gate_is_started_again() {
    let fixture = AgentFixture::new();
    let mut server = fixture.serve();
    server.call("sandbox-create", &json!({ "name": "one" }));
    server.answer();
    fixture.ok(&["gate", "stop"]);
    // Shortly after the gate's end a call may report that the gate is not running.
    wait::until("a gate", || {
        server.call("read", &json!({ "path": "README.md" }));
        let answer = server.answer();
        (answer["result"]["structuredContent"]["content"] == "hello\n").then_some(())
    });
}

#[test]
fn sandboxes_of_other_repositories_are_not_found() {
    let fixture = AgentFixture::new();
    fixture.ok(&["create", "--no-repo", "other"]);
    let mut server = fixture.serve();
    for (tool, arguments) in [
        ("bash", json!({ "sandbox": "other", "command": "true" })),
        (
            "sandbox-delete",
            json!({ "sandbox": "other", "force": true }),
        ),
        ("sandbox-pause", json!({ "sandbox": "other" })),
    ] {
        server.call(tool, &arguments);
        let error = server.answer()["error"].clone();
        assert_eq!(error["message"], "Sandbox 'other' not found.", "{tool}");
    }
    server.call("sandbox-list", &json!({}));
    let listed = server.answer();
    assert_eq!(
        listed["result"]["structuredContent"]["sandboxes"],
        json!([])
    );
}
