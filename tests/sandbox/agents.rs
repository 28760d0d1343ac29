//! Agents that have their own sandbox are started with an option that turns that sandbox off.

use std::os::unix::fs::PermissionsExt;

use testkit::output;

use crate::sandbox_fixture::{SandboxFixture, describe};

for_every_operator!(agent_gets_the_sandbox_option_exactly_once);

fn agent_gets_the_sandbox_option_exactly_once(fixture: &SandboxFixture) {
    let script = "#!/bin/sh\necho \"$0\" \"$@\"; echo \"gemini=$GEMINI_SANDBOX\"\n";
    for agent in ["codex", "claude", "gemini", "other"] {
        fixture.repo.write(agent, script);
        let executable = std::fs::Permissions::from_mode(0o755);
        std::fs::set_permissions(fixture.repo.path(agent), executable).unwrap();
    }
    fixture.repo.commit("agents");
    let run = |before: &[&str], command: &[&str]| {
        let args = [&["run", "--name", "fix"], before, &["--"], command].concat();
        let output = fixture.run(&args);
        assert!(output.status.success(), "{}", describe(&output));
        let notes = output::stderr(&output)
            .matches("turns off the agent's own sandbox")
            .count();
        (output::stdout(&output), notes)
    };
    for (command, expected) in [
        (
            &["./codex", "exec", "do it"][..],
            "./codex -c sandbox_mode=danger-full-access exec do it\ngemini=\n",
        ),
        (
            &["./claude", "-p", "hi"],
            "./claude --settings {\"sandbox\":{\"enabled\":false}} -p hi\ngemini=\n",
        ),
        (&["./gemini"], "./gemini\ngemini=false\n"),
    ] {
        assert_eq!(run(&[], command), (expected.to_owned(), 1));
        let plain = format!("{}\ngemini=\n", command.join(" "));
        assert_eq!(run(&["--as-is"], command), (plain, 0));
    }
    for command in [
        &["./codex", "--sandbox", "read-only"][..],
        &["./claude", "--settings", "mine.json"],
        &["./gemini", "-s"],
        &["./other"],
    ] {
        let plain = format!("{}\ngemini=\n", command.join(" "));
        assert_eq!(run(&[], command), (plain, 0));
    }
    let own = run(&["--env", "GEMINI_SANDBOX=docker"], &["./gemini"]);
    assert_eq!(own, ("./gemini\ngemini=docker\n".to_owned(), 0));
    // `exec` passes its command unchanged.
    assert_eq!(
        fixture.ok(&["exec", "fix", "--", "./gemini"]),
        "./gemini\ngemini=\n"
    );
}
