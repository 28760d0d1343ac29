//! The coding tools inside a sandbox, called from outside.

use serde_json::{Value, json};
use testkit::{output, wait};

use crate::sandbox_fixture::{SandboxFixture, describe};

for_every_operator!(
    every_tool_runs_as_the_agent,
    tools_cannot_leave_the_workspace,
    timed_out_command_is_killed_and_background_processes_stay,
    killed_workbench_is_restarted,
    tools_of_a_paused_sandbox_are_refused,
);

for_subid_user!(every_tool_runs_as_the_agent);

fn tool(fixture: &SandboxFixture, tool: &str, request: &Value) -> Value {
    let printed = fixture.ok(&["tool", "fix", tool, &request.to_string()]);
    serde_json::from_str(&printed).unwrap()
}

fn bash(fixture: &SandboxFixture, command: &str) -> String {
    let request = json!({ "command": command }).to_string();
    fixture.ok(&["tool", "fix", "bash", &request])
}

fn every_tool_runs_as_the_agent(fixture: &SandboxFixture) {
    fixture.create("fix");
    let written = tool(
        fixture,
        "write",
        &json!({ "path": "new/a.txt", "content": "one\ntwo\n" }),
    );
    assert_eq!(written["path"], "new/a.txt");
    assert_eq!(
        fixture.stdout_of("fix", "cat new/a.txt; stat -c %U new/a.txt; id -un"),
        {
            let name = fixture.stdout_of("fix", "id -un");
            format!("one\ntwo\n{name}\n{name}")
        }
    );
    let edit = json!({ "path": "new/a.txt", "oldText": "two", "newText": "2" });
    assert_eq!(tool(fixture, "edit", &edit)["diff"], " 1 one\n-2 two\n+2 2");
    let read = tool(
        fixture,
        "read",
        &json!({ "path": "/workspace/new/a.txt", "offset": 2 }),
    );
    assert_eq!(read["content"], "2\n");
    assert_eq!(
        tool(fixture, "ls", &json!({ "path": "new" }))["output"],
        "a.txt"
    );
    let found = tool(fixture, "find", &json!({ "pattern": "new/*" }));
    assert_eq!(found["files"], json!(["new/a.txt"]));
    let found = tool(
        fixture,
        "grep",
        &json!({ "pattern": "^one$", "path": "new" }),
    );
    assert_eq!(found["content"], "a.txt:1: one");
    // The tools have the same user, network, limits and filters as any command.
    let same = "id; pwd; cat /proc/self/status | grep -E '^(Cap|Seccomp:|NoNewPrivs)'";
    assert_eq!(
        bash(fixture, same).trim_end(),
        fixture.stdout_of("fix", same)
    );
    let failing = json!({ "command": "echo out; echo err >&2; exit 7" }).to_string();
    let output = fixture.run(&["tool", "fix", "bash", &failing]);
    assert_eq!(output.status.code(), Some(7), "{}", describe(&output));
    assert_eq!(output::stdout(&output), "out\n");
    assert!(output::stderr(&output).contains("err\n"));
    let complaint = fixture.fails(1, &["tool", "fix", "read", "{\"path\":\"none\"}"]);
    assert!(
        complaint.contains("No such file or directory: none"),
        "{complaint}"
    );
    fixture.ok(&["delete", "-f", "fix"]);
    fixture.assert_nothing_left();
}

fn tools_cannot_leave_the_workspace(fixture: &SandboxFixture) {
    fixture.create("fix");
    let outside = "Invalid path: access outside workspace is not allowed";
    fixture.stdout_of(
        "fix",
        "ln -s /etc etc; ln -s /proc/1/root root; ln -s .. up; ln -s /proc/self/root self; \
         mkfifo pipe",
    );
    for path in [
        "../etc/passwd",
        "etc/passwd",
        "root/etc/passwd",
        "up/etc/passwd",
        "self/etc/passwd",
    ] {
        for (tool, request) in [
            ("read", json!({ "path": path })),
            ("write", json!({ "path": path, "content": "x" })),
            (
                "edit",
                json!({ "path": path, "oldText": "root", "newText": "x" }),
            ),
            ("ls", json!({ "path": path })),
            ("grep", json!({ "path": path, "pattern": "root" })),
        ] {
            let complaint = fixture.fails(1, &["tool", "fix", tool, &request.to_string()]);
            assert!(complaint.contains(outside), "{tool} {path}: {complaint}");
        }
    }
    let complaint = fixture.fails(1, &["tool", "fix", "read", "{\"path\":\"pipe\"}"]);
    assert!(
        complaint.contains("Not a regular file: pipe"),
        "{complaint}"
    );
    fixture.ok(&["delete", "-f", "fix"]);
    fixture.assert_nothing_left();
}

fn timed_out_command_is_killed_and_background_processes_stay(fixture: &SandboxFixture) {
    fixture.create("fix");
    let stubborn = "trap '' TERM; setsid sleep 4001 & (setsid sleep 4002 &); sleep 4003; true";
    let request = json!({ "command": stubborn, "timeoutSeconds": 1 }).to_string();
    fixture.fails(124, &["tool", "fix", "bash", &request]);
    assert_eq!(
        fixture.stdout_of("fix", "pgrep -fx 'sleep 400[123]' || echo none"),
        "none"
    );
    bash(fixture, "sleep 4004 >/dev/null 2>&1 &");
    wait::until("the sleeper", || {
        fixture
            .bash("fix", "pgrep -fx 'sleep 4004'")
            .status
            .success()
            .then_some(())
    });
    fixture.ok(&["delete", "-f", "fix"]);
    fixture.assert_nothing_left();
}

fn killed_workbench_is_restarted(fixture: &SandboxFixture) {
    fixture.create("fix");
    // The workbench is the parent of a command's process guard. Lists of processes in the sandbox
    // do not show it.
    let served = || {
        bash(fixture, "cut -d' ' -f4 /proc/$PPID/stat")
            .trim_end()
            .to_owned()
    };
    let first = served();
    assert_eq!(served(), first, "one for all calls");
    fixture.stdout_of("fix", &format!("kill -9 {first}"));
    let second = served();
    assert_ne!(second, first);
    // The workbench outlives the gate, as the sandbox does.
    fixture.ok(&["gate", "restart"]);
    assert_eq!(served(), second);
    fixture.ok(&["delete", "-f", "fix"]);
    fixture.assert_nothing_left();
}

fn tools_of_a_paused_sandbox_are_refused(fixture: &SandboxFixture) {
    fixture.create("fix");
    assert_eq!(bash(fixture, "echo on"), "on\n");
    fixture.ok(&["pause", "fix"]);
    let output = fixture.run(&["tool", "fix", "ls"]);
    assert!(!output.status.success());
    assert!(
        output::stderr(&output).contains("paused"),
        "{}",
        describe(&output)
    );
    fixture.ok(&["resume", "fix"]);
    assert_eq!(bash(fixture, "echo on"), "on\n");
    fixture.ok(&["delete", "-f", "fix"]);
    fixture.assert_nothing_left();
}
