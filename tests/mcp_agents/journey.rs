//! An agent's whole session, and the results for its operator.

use serde_json::json;
use testkit::wait;

use crate::agent_fixture::AgentFixture;

const JOURNEY: [&str; 9] = [
    "create", "write", "bash", "read", "grep", "edit", "patch", "diff", "states",
];

#[test]
fn a_client_works_in_a_sandbox_and_the_operators_files_stay_as_they_are() {
    for mode in ["auto", "legacy"] {
        let fixture = AgentFixture::new();
        let before = fixture.repo.fingerprint();
        let head = fixture.repo.git(&["rev-parse", "HEAD"]);
        fixture.drive("journey", mode, &JOURNEY);
        let changed = before.differences(&fixture.repo.fingerprint());
        assert!(changed.is_empty(), "{changed:?}");
        assert_eq!(fixture.repo.git(&["status", "--porcelain"]), "");
        assert_eq!(fixture.repo.git(&["rev-parse", "HEAD"]), head);
        assert_eq!(
            fixture.diary("palisade/fix-it"),
            [
                "write: src/new/main.py",
                "bash: python3 src/new/main.py > out.txt; cat out.txt; pwd",
                "edit: src/new/main.py",
                "patch: README.md, docs/new.md",
                "patch: docs/new.md",
            ]
        );
        fixture.drive("leave", mode, &["kept"]);
        fixture.ok(&["delete", "--force", "fix-it"]);
        fixture.assert_nothing_left();
    }
}

#[test]
fn a_sandbox_is_deleted_when_nothing_is_lost_or_by_force() {
    let fixture = AgentFixture::new();
    fixture.drive("whole", "auto", &["delete"]);
    fixture.assert_nothing_left();
}

#[test]
fn what_is_asked_for_wrongly_is_said_in_a_sentence() {
    let fixture = AgentFixture::new();
    fixture.drive("errors", "auto", &["names", "paths", "tools", "which"]);
    assert_eq!(fixture.diary("palisade/one"), Vec::<String>::new());
}

#[test]
fn a_call_that_is_given_up_ends_its_command() {
    let fixture = AgentFixture::new();
    fixture.drive("cancel", "auto", &["cancel"]);
    let diary = fixture.diary("palisade/patient");
    assert_eq!(diary, ["bash: echo begun > begun.txt; sleep 4321"]);
}

#[test]
fn seed_004_bash_returns_stdout_and_stderr_apart() {
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
fn calls_at_the_same_time_lose_nothing() {
    let fixture = AgentFixture::new();
    fixture.drive("crowd", "auto", &["crowd"]);
}

#[test]
fn every_tool_is_described() {
    let fixture = AgentFixture::new();
    for mode in ["auto", "legacy"] {
        fixture.drive("describes", mode, &["describes"]);
    }
}

#[test]
fn it_ends_when_its_client_hangs_up() {
    let fixture = AgentFixture::new();
    let output = fixture.run(&["mcp"]);
    assert!(output.status.success());
    assert!(output.stdout.is_empty(), "stdout is the protocol's");
}

#[test]
fn what_was_under_way_ends_with_the_client_and_is_kept() {
    let fixture = AgentFixture::new();
    let mut server = fixture.serve();
    server.call("sandbox-create", &json!({ "name": "left" }));
    server.answer();
    let line = "echo begun > begun.txt; sleep 4322";
    server.call("bash", &json!({ "command": line }));
    wait::until("its beginning", || {
        let there = fixture.run(&["exec", "left", "--", "test", "-e", "begun.txt"]);
        there.status.success().then_some(())
    });
    let status = server.hang_up();
    assert!(status.success(), "{status}");
    let look = "pgrep -fx 'sleep 432[2]' || echo none";
    wait::until("the command's end", || {
        let found = fixture.ok(&["exec", "left", "--", "sh", "-c", look]);
        (found == "none\n").then_some(())
    });
    assert_eq!(fixture.diary("palisade/left"), [format!("bash: {line}")]);
}

#[test]
fn a_gate_that_died_is_started_again() {
    let fixture = AgentFixture::new();
    let mut server = fixture.serve();
    server.call("sandbox-create", &json!({ "name": "one" }));
    server.answer();
    fixture.ok(&["gate", "stop"]);
    // Shortly after the gate's death a call may report that no gate answers.
    wait::until("a gate", || {
        server.call("read", &json!({ "path": "README.md" }));
        let answer = server.answer();
        (answer["result"]["structuredContent"]["content"] == "hello\n").then_some(())
    });
}

#[test]
fn another_repositorys_sandboxes_are_not_there() {
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
