//! The README's first command: `run` on a clone, with an empty home and no configuration.

use std::path::Path;
use std::process::Command;

use testkit::operator::Operator;
use testkit::output;

use crate::sandbox_fixture::{SandboxFixture, describe};

for_every_operator!(first_run_works_with_empty_home_and_no_configuration);

/// `palisade` with an empty home directory and nothing else in the environment.
fn in_empty_home(fixture: &SandboxFixture, home: &Path, args: &[&str]) -> Command {
    let program = fixture.palisade(&[]).get_program().to_owned();
    let mut command = fixture.gate_dir.operator().command(program);
    command
        .env_clear()
        .env("PATH", std::env::var_os("PATH").unwrap_or_default())
        .env("HOME", home)
        .current_dir(fixture.repo.dir())
        .args(args);
    command
}

// Regression test for issue 14, item 19.
fn first_run_works_with_empty_home_and_no_configuration(fixture: &SandboxFixture) {
    let home = fixture.gate_dir.path().join("empty-home");
    std::fs::create_dir(&home).unwrap();
    fixture.gate_dir.operator().chown(&home);
    let run = |args: &[&str]| in_empty_home(fixture, &home, args).output().unwrap();
    let line = "git rev-parse --abbrev-ref HEAD && echo done > first.txt";
    let output = run(&["run", "--name", "try", "--", "bash", "-c", line]);
    let diff = run(&["diff", "try"]);
    let deleted = run(&["delete", "-f", "try"]);
    let stopped = run(&["gate", "stop"]);
    assert!(output.status.success(), "{}", describe(&output));
    assert_eq!(
        output::stdout(&output).trim(),
        "palisade/try",
        "{}",
        describe(&output)
    );
    assert!(
        output::stdout(&diff).contains("+done"),
        "{}",
        describe(&diff)
    );
    // Cargo's binary is not on PATH, and the hint must name a command that works.
    let program = in_empty_home(fixture, &home, &[]).get_program().to_owned();
    let next = format!("next: {} diff try", program.display());
    assert!(
        output::stderr(&output).contains(&next),
        "{}",
        describe(&output)
    );
    assert!(deleted.status.success(), "{}", describe(&deleted));
    assert!(stopped.status.success(), "{}", describe(&stopped));
}

// Regression test for issue 14, item 19. The limit is set in a new namespace, so that the machine
// is not changed.
#[test]
fn missing_user_namespaces_error_names_the_fix() {
    if !testkit::require_root("making a user namespace in which none can be made") {
        return;
    }
    let fixture = SandboxFixture::new(Operator::CurrentUser);
    let palisade = fixture.palisade(&["run", "--name", "try", "--", "true"]);
    let mut command = Command::new("unshare");
    command.args(["-U", "--map-user=1000", "--map-group=1000", "--keep-caps"]);
    command.args(["sh", "-c"]).arg(
        "echo 0 >/proc/sys/user/max_user_namespaces && \
         exec setpriv --ambient-caps=-all --inh-caps=-all \"$@\"",
    );
    command
        .arg("sh")
        .arg(palisade.get_program())
        .args(palisade.get_args());
    command.env_clear().current_dir(fixture.repo.dir());
    for (name, value) in palisade.get_envs() {
        command.env(name, value.unwrap_or_default());
    }
    let output = command.output().unwrap();
    assert_eq!(output.status.code(), Some(6), "{}", describe(&output));
    let error = output::stderr(&output);
    assert!(
        error.contains("this machine cannot run sandboxes"),
        "{error}"
    );
    assert!(error.contains("sysctl user.max_user_namespaces"), "{error}");
    // No gate was started for a run that cannot work.
    assert!(!fixture.gate_dir.state().join("palisade.db").exists());
}
