//! Progress of a sandbox's creation.

use serde_json::{Value, json};
use testkit::output;

use crate::sandbox_fixture::{SandboxFixture, describe};

for_every_operator!(
    create_progress_reports_the_number_of_copied_files,
    create_shows_progress_only_on_a_terminal,
);

/// Requests a sandbox with progress lines, as a script would.
fn lines_of(fixture: &SandboxFixture, name: &str) -> Vec<Value> {
    let body = json!({ "name": name, "repository": fixture.repo.dir() }).to_string();
    let output = fixture
        .gate_dir
        .operator()
        .command("curl")
        .args(["-sS", "-H", "Accept: application/x-ndjson", "-d", &body])
        .arg("--unix-socket")
        .arg(fixture.gate_dir.control())
        .arg("http://localhost/v1/sandboxes")
        .output()
        .unwrap();
    let answer = describe(&output);
    let read = |line: &str| serde_json::from_str(line).unwrap_or_else(|_| panic!("{answer}"));
    output::stdout(&output).lines().map(read).collect()
}

fn create_progress_reports_the_number_of_copied_files(fixture: &SandboxFixture) {
    for number in 0..300 {
        fixture.repo.write(&format!("many/{number}.txt"), "x\n");
    }
    fixture.repo.commit("many");
    fixture.ok(&["gate", "start"]);
    let lines = lines_of(fixture, "fix");
    let (last, before) = lines.split_last().unwrap();
    assert_eq!(last["done"]["name"], "fix", "{lines:#?}");
    let end = before.last().unwrap();
    // The last step reports every file.
    let files = fixture.repo.git(&["ls-files"]).lines().count();
    assert!(files > 300);
    let all = json!({ "progress": { "step": "copy", "done": files, "total": files } });
    assert_eq!(*end, all, "{lines:#?}");
    // A refusal is reported in the last line, too.
    let refused = lines_of(fixture, "fix");
    let failed = &refused.last().unwrap()["failed"];
    assert_eq!(
        (&failed["status"], &failed["code"]),
        (&409.into(), &"exists".into())
    );
}

fn create_shows_progress_only_on_a_terminal(fixture: &SandboxFixture) {
    fixture
        .gate_dir
        .write_config("version: \"1.0\"\nsandbox: { setup_command: \"sleep 2\" }\n");
    fixture.ok(&["gate", "start"]);
    let mut terminal = fixture.on_terminal(&["create", "fix"]);
    terminal.expect("running the set-up command");
    terminal.expect("Created fix");
    assert!(terminal.wait().success(), "{}", terminal.shown());
    // Scripts and redirected output receive no progress.
    let mut terminal = fixture.on_terminal(&["create", "quiet", "--json"]);
    assert!(terminal.wait().success(), "{}", terminal.shown());
    assert!(
        !terminal.shown().contains("preparing"),
        "{}",
        terminal.shown()
    );
    let output = fixture.run(&["create", "other"]);
    assert!(output.status.success(), "{}", describe(&output));
    assert!(
        !output::stderr(&output).contains("preparing"),
        "{}",
        describe(&output)
    );
}
