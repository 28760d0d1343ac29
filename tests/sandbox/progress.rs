//! How far the making of a sandbox is.

use serde_json::{Value, json};
use testkit::said;

use crate::bench::{Bench, told};

for_every_operator!(
    a_client_that_asks_hears_how_many_files_are_copied,
    somebody_on_a_terminal_sees_what_is_waited_for,
);

/// Asks for a sandbox in lines, as a script would, and returns them.
fn lines_of(bench: &Bench, name: &str) -> Vec<Value> {
    let body = json!({ "name": name, "repository": bench.repo.dir() }).to_string();
    let output = bench
        .place
        .operator()
        .command("curl")
        .args(["-sS", "-H", "Accept: application/x-ndjson", "-d", &body])
        .arg("--unix-socket")
        .arg(bench.place.control())
        .arg("http://localhost/v1/sandboxes")
        .output()
        .unwrap();
    let answer = told(&output);
    let read = |line: &str| serde_json::from_str(line).unwrap_or_else(|_| panic!("{answer}"));
    said::out(&output).lines().map(read).collect()
}

fn a_client_that_asks_hears_how_many_files_are_copied(bench: &Bench) {
    for number in 0..300 {
        bench.repo.write(&format!("many/{number}.txt"), "x\n");
    }
    bench.repo.commit("many");
    bench.ok(&["gate", "start"]);
    let lines = lines_of(bench, "fix");
    let (last, before) = lines.split_last().unwrap();
    assert_eq!(last["done"]["name"], "fix", "{lines:#?}");
    let end = before.last().unwrap();
    // Every file, in the step that comes last.
    let files = bench.repo.git(&["ls-files"]).lines().count();
    assert!(files > 300);
    let all = json!({ "progress": { "step": "copy", "done": files, "total": files } });
    assert_eq!(*end, all, "{lines:#?}");
    // A refusal is a last line, too.
    let refused = lines_of(bench, "fix");
    let failed = &refused.last().unwrap()["failed"];
    assert_eq!(
        (&failed["status"], &failed["code"]),
        (&409.into(), &"exists".into())
    );
}

fn somebody_on_a_terminal_sees_what_is_waited_for(bench: &Bench) {
    bench
        .place
        .write_config("version: \"1.0\"\nsandbox: { setup_command: \"sleep 2\" }\n");
    bench.ok(&["gate", "start"]);
    let mut terminal = bench.on_terminal(&["create", "fix"]);
    terminal.expect("running the set-up command");
    terminal.expect("Created fix");
    assert!(terminal.wait().success(), "{}", terminal.shown());
    // A script hears nothing of it, nor does whoever reads a file.
    let mut terminal = bench.on_terminal(&["create", "quiet", "--json"]);
    assert!(terminal.wait().success(), "{}", terminal.shown());
    assert!(
        !terminal.shown().contains("preparing"),
        "{}",
        terminal.shown()
    );
    let output = bench.run(&["create", "other"]);
    assert!(output.status.success(), "{}", told(&output));
    assert!(
        !said::err(&output).contains("preparing"),
        "{}",
        told(&output)
    );
}
