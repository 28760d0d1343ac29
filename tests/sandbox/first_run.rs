//! The README's first command: `run` on a clone, with an empty home and no configuration.

use std::path::Path;
use std::process::Command;

use testkit::operator::Operator;
use testkit::said;

use crate::bench::{Bench, told};

for_every_operator!(the_first_command_needs_no_preparation);

/// `palisade` with an empty home directory and nothing else in the environment.
fn in_empty_home(bench: &Bench, home: &Path, args: &[&str]) -> Command {
    let program = bench.palisade(&[]).get_program().to_owned();
    let mut command = bench.place.operator().command(program);
    command
        .env_clear()
        .env("PATH", std::env::var_os("PATH").unwrap_or_default())
        .env("HOME", home)
        .current_dir(bench.repo.dir())
        .args(args);
    command
}

// Issue 14, number 19.
fn the_first_command_needs_no_preparation(bench: &Bench) {
    let home = bench.place.path().join("empty-home");
    std::fs::create_dir(&home).unwrap();
    bench.place.operator().own(&home);
    let run = |args: &[&str]| in_empty_home(bench, &home, args).output().unwrap();
    let line = "git rev-parse --abbrev-ref HEAD && echo done > first.txt";
    let output = run(&["run", "--name", "try", "--", "bash", "-c", line]);
    let diff = run(&["diff", "try"]);
    let deleted = run(&["delete", "-f", "try"]);
    let stopped = run(&["gate", "stop"]);
    assert!(output.status.success(), "{}", told(&output));
    assert_eq!(
        said::out(&output).trim(),
        "palisade/try",
        "{}",
        told(&output)
    );
    assert!(said::out(&diff).contains("+done"), "{}", told(&diff));
    // Cargo's own program is on no PATH, and the next command has to be typed somehow.
    let program = in_empty_home(bench, &home, &[]).get_program().to_owned();
    let next = format!("next: {} diff try", program.display());
    assert!(said::err(&output).contains(&next), "{}", told(&output));
    assert!(deleted.status.success(), "{}", told(&deleted));
    assert!(stopped.status.success(), "{}", told(&stopped));
}

// Issue 14, number 19: the limit is the namespace's own, so the machine is not changed.
#[test]
fn a_machine_without_user_namespaces_is_told_the_fix() {
    if !testkit::require_root("making a user namespace in which none can be made") {
        return;
    }
    let bench = Bench::new(Operator::Oneself);
    let palisade = bench.palisade(&["run", "--name", "try", "--", "true"]);
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
    command.env_clear().current_dir(bench.repo.dir());
    for (name, value) in palisade.get_envs() {
        command.env(name, value.unwrap_or_default());
    }
    let output = command.output().unwrap();
    assert_eq!(output.status.code(), Some(6), "{}", told(&output));
    let error = said::err(&output);
    assert!(
        error.contains("this machine cannot run sandboxes"),
        "{error}"
    );
    assert!(error.contains("sysctl user.max_user_namespaces"), "{error}");
    // Nothing was started for a run that cannot work.
    assert!(!bench.place.state().join("palisade.db").exists());
}
