//! The container of `sandbox.remote`, which somebody else runs.

use std::process::{Child, Stdio};

use serde_json::{Value, json};
use testkit::wait;

use crate::bench::{Bench, Server};

/// A workbench that is not ours. Dropping it ends it.
struct Container(Child);

impl Container {
    fn start(bench: &Bench) -> Self {
        let at = |name: &str| bench.place.path().join(name).to_str().unwrap().to_owned();
        let (socket, root) = (at("bench.sock"), at("root"));
        std::fs::create_dir(&root).unwrap();
        bench.place.write_config(&format!(
            "version: \"1.0\"\nsandbox:\n  backend: remote\n  remote:\n    socket_path: {socket}\n"
        ));
        let words = [
            "workbench",
            "--socket-path",
            &socket,
            "--workspace-root",
            &root,
        ];
        let mut command = bench.place.palisade(&words);
        let child = command.stdout(Stdio::null()).spawn().unwrap();
        wait::until("its socket", || {
            std::path::Path::new(&socket).exists().then_some(())
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
fn the_tools_of_a_container_work_and_the_rest_is_whoever_runs_its() {
    let bench = Bench::new();
    let _container = Container::start(&bench);
    let mut server = bench.serve();
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
    assert_eq!(bench.repo.read("out/a.txt"), "one\ntwo\n");

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
}
