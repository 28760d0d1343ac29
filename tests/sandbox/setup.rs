//! The set-up command of a new sandbox: its three sources, and the clean-up after a
//! failed set-up.

use serde_json::json;
use testkit::output;

use crate::sandbox_fixture::{SandboxFixture, describe};

for_every_operator!(
    seed_004_setup_command_runs_once_in_the_filled_workspace,
    seed_004_failed_setup_command_leaves_no_sandbox,
    seed_004_setup_command_that_times_out_leaves_no_sandbox,
);

/// Writes to both outputs, commits in the workspace, and fails.
const FAILING: &str = "echo first; echo broken >&2; git commit -q --allow-empty -m x; exit 1";

/// Writes an operator's configuration with these keys of `sandbox`.
fn configure(fixture: &SandboxFixture, keys: &str) {
    let text = format!("version: \"1.0\"\nsandbox:\n{keys}");
    fixture.gate_dir.write_config(&text);
}

/// Asserts that no sandbox, branch or registration exists, and that the name is free.
fn assert_undone(fixture: &SandboxFixture) {
    assert_eq!(fixture.json(&["list"]), json!([]));
    assert_eq!(fixture.json(&["registry", "list"]), json!([]));
    assert_eq!(fixture.repo.sandbox_branches(), [""; 0]);
}

fn seed_004_setup_command_runs_once_in_the_filled_workspace(fixture: &SandboxFixture) {
    let line = "cat README.md >> ~/seen; pwd >> ~/seen";
    configure(fixture, &format!("  setup_command: \"{line}\"\n"));
    fixture.create("line");
    fixture.ok(&["pause", "line"]);
    fixture.ok(&["resume", "line"]);
    assert_eq!(fixture.stdout_of("line", "cat ~/seen"), "hello\n/workspace");
    // A list is a program and its arguments, and is not passed to a shell.
    configure(fixture, "  setup_command: [touch, \"$HOME\", a b]\n");
    fixture.ok(&["gate", "restart"]);
    fixture.create("list");
    assert_eq!(
        fixture.stdout_of("list", "ls -d '$HOME' 'a b'"),
        "$HOME\na b"
    );
    // The option replaces the configured command.
    fixture.ok(&["create", "--setup-command", "echo own > ~/own", "own"]);
    assert_eq!(
        fixture.stdout_of("own", "ls -d '$HOME' || cat ~/own"),
        "own"
    );
    let complaint = fixture.fails(
        4,
        &[
            "run",
            "--name",
            "own",
            "--setup-command",
            "true",
            "--",
            "true",
        ],
    );
    assert!(complaint.contains("--setup-command"), "{complaint}");
}

fn seed_004_failed_setup_command_leaves_no_sandbox(fixture: &SandboxFixture) {
    let refused = |source: &str, args: &[&str]| {
        let complaint = fixture.fails(1, args);
        let expected = format!(
            "{} failed: {source}: the set-up command exited with code 1; its last output:\n  \
             first\n  broken\nNothing of the sandbox is left.\n",
            args[0]
        );
        assert!(complaint.contains(&expected), "{complaint}");
        assert_undone(fixture);
    };
    let option = ["create", "--setup-command", FAILING, "fix"];
    refused("--setup-command", &option);
    configure(fixture, &format!("  setup_command: \"{FAILING}\"\n"));
    fixture.ok(&["config", "reload"]);
    refused("sandbox.setup_command", &["create", "fix"]);
    let run = ["run", "--name", "fix", "--", "echo", "it ran"];
    refused("sandbox.setup_command", &run);
    configure(
        fixture,
        &format!("  setup_command: [bash, -c, \"{FAILING}\"]\n"),
    );
    fixture.ok(&["config", "reload"]);
    refused("sandbox.setup_command", &["create", "fix"]);
    // The command of a trusted file replaces the operator's.
    configure(fixture, "  setup_command: \"true\"\n");
    fixture.ok(&["config", "reload"]);
    let file = format!("setup_command: \"{FAILING}\"\n");
    fixture.repo.write(".palisade.yaml", file);
    fixture.ok(&["trust", "--yes"]);
    refused("setup_command of .palisade.yaml", &["create", "fix"]);
    // The name is free.
    let create = ["create", "--setup-command", "true", "fix"];
    assert_eq!(fixture.ok(&create), "Created fix on branch palisade/fix\n");
    fixture.ok(&["delete", "fix"]);
    fixture.assert_nothing_left();
}

fn seed_004_setup_command_that_times_out_leaves_no_sandbox(fixture: &SandboxFixture) {
    let reported = |seconds: u32| {
        configure(
            fixture,
            &format!("  setup_command: \"echo begun; sleep 4000\"\n  setup_timeout: {seconds}s\n"),
        );
        fixture.ok(&["gate", "restart"]);
        let output = fixture.run(&["create", "fix"]);
        assert_eq!(output.status.code(), Some(124), "{}", describe(&output));
        let complaint = output::stderr(&output);
        let cause = format!("was killed: it did not end within {seconds}s");
        for part in [
            "create failed: sandbox.setup_command: the set-up command",
            &cause,
            "\nNothing of the sandbox is left.\nsandbox.setup_timeout sets the time",
        ] {
            assert!(complaint.contains(part), "{complaint}");
        }
        assert_undone(fixture);
        complaint.contains("its last output:\n  begun\n")
    };
    // On a busy machine a shell may need more than a second for its first line.
    let limits = [1, 10, 60];
    assert!(
        limits.into_iter().any(reported),
        "the line was not reported"
    );
    fixture.assert_nothing_left();
}
