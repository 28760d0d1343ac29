//! Tools in a remote container (`sandbox.remote`) that Palisade did not start.

use std::path::Path;
use std::process::{Child, Stdio};

use serde_json::{Value, json};
use testkit::wait;

use crate::agent_fixture::{AgentFixture, Server};

/// A workbench that the gate did not start. Dropping it ends the process.
struct Container(Child);

impl Container {
    fn start(fixture: &AgentFixture) -> Self {
        Self::start_with(fixture, std::env::var_os("PATH").unwrap().as_ref())
    }

    /// A workbench with these programs on its PATH.
    fn start_with(fixture: &AgentFixture, path: &Path) -> Self {
        let at = |name: &str| {
            fixture
                .gate_dir
                .path()
                .join(name)
                .to_str()
                .unwrap()
                .to_owned()
        };
        let (socket, root) = (at("workbench.sock"), at("root"));
        std::fs::create_dir(&root).unwrap();
        fixture.gate_dir.write_config(&format!(
            "version: \"1.0\"\nsandbox:\n  backend: remote\n  remote:\n    socket_path: {socket}\n"
        ));
        let arguments = [
            "workbench",
            "--socket-path",
            &socket,
            "--workspace-root",
            &root,
        ];
        let mut command = fixture.gate_dir.palisade(&arguments);
        let child = command.env("PATH", path).stdout(Stdio::null()).spawn();
        let child = child.unwrap();
        wait::until("the socket of the workbench", || {
            Path::new(&socket).exists().then_some(())
        });
        Self(child)
    }
}

impl Drop for Container {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn call(server: &mut Server, tool: &str, mut arguments: Value) -> Value {
    arguments["sandbox"] = json!("remote");
    server.call(tool, &arguments);
    server.answer()
}

#[test]
fn tools_work_in_a_remote_container_but_lifecycle_is_refused() {
    let fixture = AgentFixture::new();
    let _container = Container::start(&fixture);
    let mut server = fixture.serve();
    let mut data = |tool: &str, arguments: Value| {
        let answer = call(&mut server, tool, arguments);
        assert_eq!(answer["result"]["isError"], false, "{tool}: {answer}");
        answer["result"]["structuredContent"].clone()
    };
    let written = data("write", json!({ "path": "a.txt", "content": "one\n" }));
    assert_eq!(written["bytes"], 4);
    assert_eq!(written.get("commit"), None);
    let patch = "--- a/a.txt\n+++ b/a.txt\n@@ -1 +1,2 @@\n one\n+two\n";
    assert_eq!(
        data("patch", json!({ "patch": patch }))["files"],
        json!(["a.txt"])
    );
    let ran = data("bash", json!({ "command": "cat a.txt" }));
    assert_eq!(ran["output"], "one\ntwo\n");
    data("upload", json!({ "source": "src", "to": "in" }));
    assert_eq!(
        data("glob", json!({ "pattern": "in/**" }))["files"],
        json!(["in/src/lib.rs"])
    );
    data("download", json!({ "source": "a.txt", "to": "out" }));
    assert_eq!(fixture.repo.read("out/a.txt"), "one\ntwo\n");

    for (tool, arguments) in [
        ("sandbox-pause", json!({})),
        ("sandbox-resume", json!({})),
        ("sandbox-delete", json!({})),
        ("diff", json!({})),
    ] {
        let answer = call(&mut server, tool, arguments).to_string();
        assert!(answer.contains("managed elsewhere"), "{tool}: {answer}");
    }
    server.call("sandbox-list", &json!({}));
    let listed = server.answer()["result"]["structuredContent"]["sandboxes"].clone();
    assert_eq!(listed[0]["name"], "remote");
    assert_eq!(listed[0]["status"], "active");

    let records = fixture.ok(&["audit", "list", "--json", "--sandbox", "remote"]);
    let records: Vec<Value> = serde_json::from_str(&records).unwrap();
    let mut purposes: Vec<&str> = records
        .iter()
        .inspect(|record| assert_eq!(record["event"], "sandbox_entered"))
        .map(|record| record["method"].as_str().unwrap())
        .collect();
    purposes.sort_unstable();
    // write, patch, bash and glob; upload and download.
    let expected = ["download", "exec", "exec", "exec", "exec", "upload"];
    assert_eq!(purposes, expected);
}

#[test]
fn patch_without_git_in_the_container_reports_the_cause() {
    let fixture = AgentFixture::new();
    let programs = fixture.gate_dir.path().join("programs");
    std::fs::create_dir(&programs).unwrap();
    for name in ["sh", "base64", "cat", "mkdir", "rm", "tar", "env"] {
        std::os::unix::fs::symlink("/bin/busybox", programs.join(name)).unwrap();
    }
    let _container = Container::start_with(&fixture, &programs);
    let mut server = fixture.serve();
    let write = json!({ "path": "a.txt", "content": "one\n" });
    let written = call(&mut server, "write", write);
    assert_eq!(written["result"]["isError"], false, "{written}");
    let patch = "--- a/a.txt\n+++ b/a.txt\n@@ -1 +1,2 @@\n one\n+two\n";
    let answer = call(&mut server, "patch", json!({ "patch": patch })).to_string();
    assert!(answer.contains("'git' could not be run"), "{answer}");
    assert!(
        answer.contains("a patch needs git in the sandbox"),
        "{answer}"
    );
    let read = call(&mut server, "read", json!({ "path": "a.txt" }));
    let text = &read["result"]["structuredContent"]["content"];
    assert_eq!(text, "one\n", "{read}");
    let left = call(&mut server, "ls", json!({}));
    assert_eq!(
        left["result"]["structuredContent"]["output"], "a.txt",
        "{left}"
    );
}
