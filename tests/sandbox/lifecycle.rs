//! Create, pause, resume and delete, and their failures.

use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::json;
use testkit::repo::TestRepo;
use testkit::{output, wait};

use crate::sandbox_fixture::{SandboxFixture, describe};

for_every_operator!(
    pause_and_resume_are_idempotent,
    paused_sandbox_makes_no_progress,
    duplicate_sandbox_name_is_refused_and_leaves_nothing,
    existing_branch_is_refused_and_left_unchanged,
    invalid_sandbox_name_is_refused_before_anything_is_created,
    same_name_in_two_repositories_is_two_sandboxes,
    unavailable_backend_is_refused_and_leaves_nothing,
    run_reuses_the_sandbox_of_that_name,
    concurrent_creates_of_one_name_make_one_sandbox,
    depth_option_limits_the_cloned_history,
    create_in_a_subdirectory_uses_its_repository,
    existing_branch_is_refused_from_a_linked_worktree,
    disconnected_client_does_not_stop_its_create,
    unresponsive_sandboxes_do_not_delay_list_or_others,
    sandbox_over_its_disk_limit_is_stopped_with_reason,
    work_of_a_sandbox_over_its_disk_limit_is_merged,
);

fn pause_and_resume_are_idempotent(fixture: &SandboxFixture) {
    fixture.create("fix");
    for (command, word, status) in [
        ("pause", "Paused", "paused"),
        ("resume", "Resumed", "active"),
    ] {
        for _ in 0..2 {
            assert_eq!(fixture.ok(&[command, "fix"]), format!("{word} fix\n"));
            assert_eq!(fixture.json(&["list"])[0]["status"], status);
        }
    }
    assert_eq!(fixture.stdout_of("fix", "echo well"), "well");
    for command in ["pause", "resume"] {
        let complaint = fixture.fails(3, &[command, "nothing"]);
        assert!(
            complaint.contains("Sandbox 'nothing' not found."),
            "{complaint}"
        );
    }
}

fn paused_sandbox_makes_no_progress(fixture: &SandboxFixture) {
    let id = fixture.create("fix");
    let mut counting = fixture
        .palisade(&[
            "exec",
            "fix",
            "--",
            "bash",
            "-c",
            "while :; do echo >> /workspace/ticks; done",
        ])
        .spawn()
        .unwrap();
    let ticks = fixture
        .gate_dir
        .state()
        .join("sandboxes")
        .join(id)
        .join("fs/root/workspace/ticks");
    let size = || std::fs::metadata(&ticks).map_or(0, |found| found.len());
    wait::until("the first ticks", || (size() > 0).then_some(()));
    fixture.ok(&["pause", "fix"]);
    let then = size();
    // While another command runs, the paused sandbox writes nothing.
    let complaint = output::stderr(&fixture.run(&["exec", "fix", "--", "true"]));
    assert!(
        complaint.contains("is paused; resume it first"),
        "{complaint}"
    );
    assert_eq!(size(), then);
    fixture.ok(&["resume", "fix"]);
    wait::until("more ticks", || (size() > then).then_some(()));
    fixture.ok(&["delete", "--force", "fix"]);
    assert!(!counting.wait().unwrap().success());
    fixture.assert_nothing_left();
}

fn duplicate_sandbox_name_is_refused_and_leaves_nothing(fixture: &SandboxFixture) {
    let id = fixture.create("fix");
    for name in ["fix", "Fix!"] {
        let complaint = fixture.fails(4, &["create", name]);
        assert_eq!(
            complaint.trim(),
            "palisade: create failed: Sandbox 'fix' already exists."
        );
    }
    let list = fixture.json(&["list"]);
    assert_eq!(list.as_array().unwrap().len(), 1, "{list}");
    assert_eq!(list[0]["id"], id.as_str());
    assert_eq!(fixture.stdout_of("fix", "cat README.md"), "hello");
    fixture.ok(&["delete", "-f", "fix"]);
    fixture.assert_nothing_left();
}

fn existing_branch_is_refused_and_left_unchanged(fixture: &SandboxFixture) {
    fixture.repo.git(&["branch", "palisade/fix", "HEAD~1"]);
    let tip = fixture.repo.git(&["rev-parse", "palisade/fix"]);
    let complaint = fixture.fails(4, &["create", "fix"]);
    assert!(
        complaint.contains("the branch 'palisade/fix' already exists"),
        "{complaint}"
    );
    assert_eq!(fixture.repo.git(&["rev-parse", "palisade/fix"]), tip);
    fixture.repo.git(&["branch", "-D", "palisade/fix"]);
    fixture.assert_nothing_left();
}

fn invalid_sandbox_name_is_refused_before_anything_is_created(fixture: &SandboxFixture) {
    let long = "x".repeat(64);
    for name in ["", "///", "…", long.as_str()] {
        for command in [
            &["create", name][..],
            &["run", "--name", name, "--", "true"][..],
        ] {
            let complaint = fixture.fails(2, command);
            let expected = format!("Invalid sandbox name: '{name}'");
            assert!(complaint.contains(&expected), "{complaint}");
        }
    }
    assert_eq!(fixture.json(&["list"]), json!([]));
    fixture.assert_nothing_left();
}

fn same_name_in_two_repositories_is_two_sandboxes(fixture: &SandboxFixture) {
    let other = TestRepo::new(
        &fixture.gate_dir.path().join("other"),
        fixture.gate_dir.operator(),
    );
    other.write("only-here.txt", "other\n");
    other.commit("third");
    let id = fixture.create("fix");
    let made = fixture
        .palisade_in(other.dir(), &["create", "fix"])
        .output()
        .unwrap();
    assert!(made.status.success(), "{}", describe(&made));
    assert_eq!(fixture.stdout_of("fix", "ls"), "README.md\nsrc");
    let there = fixture
        .palisade_in(other.dir(), &["exec", "fix", "--", "cat", "only-here.txt"])
        .output()
        .unwrap();
    assert_eq!(output::stdout(&there), "other\n", "{}", describe(&there));
    // In another directory the name does not identify the sandbox, but the id does.
    let elsewhere = |args: &[&str]| {
        fixture
            .palisade_in(fixture.gate_dir.path(), args)
            .output()
            .unwrap()
    };
    let unclear = elsewhere(&["exec", "fix", "--", "true"]);
    assert_eq!(unclear.status.code(), Some(2), "{}", describe(&unclear));
    assert!(
        output::stderr(&unclear).contains(&id),
        "{}",
        describe(&unclear)
    );
    assert!(elsewhere(&["exec", &id, "--", "true"]).status.success());
    assert_eq!(
        fixture.json(&["list", "--here"]).as_array().unwrap().len(),
        1
    );
    assert_eq!(fixture.json(&["list"]).as_array().unwrap().len(), 2);
}

fn unavailable_backend_is_refused_and_leaves_nothing(fixture: &SandboxFixture) {
    let complaint = fixture.fails(6, &["create", "--backend", "docker", "fix"]);
    assert!(
        complaint.contains("the docker backend is not available")
            && complaint.contains("has 'namespace' only"),
        "{complaint}"
    );
    fixture.assert_nothing_left();
}

fn run_reuses_the_sandbox_of_that_name(fixture: &SandboxFixture) {
    fixture.ok(&[
        "run",
        "--name",
        "fix",
        "--",
        "bash",
        "-c",
        "echo 1 > one; echo kept > /tmp/kept",
    ]);
    fixture.ok(&["pause", "fix"]);
    let again = fixture.ok(&["run", "--name", "fix", "--", "cat", "one", "/tmp/kept"]);
    assert_eq!(again, "1\nkept\n");
    assert_eq!(fixture.json(&["list"]).as_array().unwrap().len(), 1);
}

fn concurrent_creates_of_one_name_make_one_sandbox(fixture: &SandboxFixture) {
    let outputs: Vec<_> = std::thread::scope(|scope| {
        let all: Vec<_> = (0..6)
            .map(|_| scope.spawn(|| fixture.run(&["create", "fix"])))
            .collect();
        all.into_iter().map(|one| one.join().unwrap()).collect()
    });
    let made = outputs.iter().filter(|one| one.status.success()).count();
    let all: Vec<String> = outputs.iter().map(describe).collect();
    assert_eq!(made, 1, "{all:#?}");
    let refused = outputs
        .iter()
        .filter(|one| one.status.code() == Some(4))
        .filter(|one| output::stderr(one).contains("Sandbox 'fix' already exists."));
    assert_eq!(refused.count(), 5, "{all:#?}");
    assert_eq!(fixture.stdout_of("fix", "cat README.md"), "hello");
    fixture.ok(&["delete", "--force", "fix"]);
    fixture.assert_nothing_left();
}

fn depth_option_limits_the_cloned_history(fixture: &SandboxFixture) {
    fixture.create("deep");
    assert_eq!(
        fixture.stdout_of("deep", "git log --format=%s"),
        "second\nfirst"
    );
    fixture.ok(&["create", "--depth", "1", "shallow"]);
    assert_eq!(
        fixture.stdout_of("shallow", "git log --format=%s"),
        "second"
    );
    fixture.stdout_of(
        "shallow",
        "echo hi > new.txt; git add -A; git commit -q -m third",
    );
    fixture.ok(&["merge", "shallow"]);
    assert_eq!(
        fixture.repo.git(&["log", "--format=%s"]),
        "third\nsecond\nfirst"
    );
}

fn create_in_a_subdirectory_uses_its_repository(fixture: &SandboxFixture) {
    let below = fixture.repo.path("src");
    let run = |args: &[&str]| {
        let output = fixture.palisade_in(&below, args).output().unwrap();
        assert!(output.status.success(), "{args:?}: {}", describe(&output));
        output::stdout(&output)
    };
    let inside = run(&[
        "run",
        "--name",
        "fix",
        "--",
        "bash",
        "-c",
        "echo hi > new.txt; cat README.md",
    ]);
    assert_eq!(inside, "hello\n");
    assert!(run(&["diff", "--stat", "fix"]).contains("A new.txt"));
    run(&["merge", "fix"]);
    assert_eq!(fixture.repo.read("new.txt"), "hi\n");
}

fn existing_branch_is_refused_from_a_linked_worktree(fixture: &SandboxFixture) {
    fixture.repo.git(&["branch", "palisade/keep"]);
    let before = fixture.repo.git(&["rev-parse", "palisade/keep"]);
    let linked = fixture.gate_dir.path().join("linked");
    fixture.repo.linked(&linked, "beside");
    let output = fixture
        .palisade_in(&linked, &["create", "keep"])
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(4), "{}", describe(&output));
    assert_eq!(fixture.repo.git(&["rev-parse", "palisade/keep"]), before);
    assert_eq!(fixture.json(&["list"]), serde_json::json!([]));
}

fn disconnected_client_does_not_stop_its_create(fixture: &SandboxFixture) {
    fixture
        .gate_dir
        .write_config("version: \"1.0\"\nsandbox: { setup_command: \"sleep 2\" }\n");
    fixture.ok(&["gate", "start"]);
    let mut client = fixture.palisade(&["create", "slow"]).spawn().unwrap();
    wait::until("the sandbox's row", || {
        let rows = std::fs::read_dir(fixture.gate_dir.state().join("rows"));
        rows.ok()?.flatten().next()
    });
    client.kill().unwrap();
    client.wait().unwrap();
    wait::until("the sandbox", || {
        output::stdout(&fixture.run(&["list"]))
            .contains("slow")
            .then_some(())
    });
    fixture.ok(&["delete", "-f", "slow"]);
}

fn unresponsive_sandboxes_do_not_delay_list_or_others(fixture: &SandboxFixture) {
    fixture.create("well");
    let silent = ["one", "two", "three", "four"].map(|name| {
        let init = Pid::from_raw(fixture.init(&fixture.create(name)));
        kill(init, Signal::SIGSTOP).unwrap();
        init
    });
    // A sandbox that does not respond is given up after five seconds. A command that waits for it
    // is always slow; on a busy machine a command is slow only sometimes.
    wait::until("a command that was not delayed", || {
        let started = Instant::now();
        assert_eq!(fixture.stdout_of("well", "echo well"), "well");
        (started.elapsed() < Duration::from_secs(5)).then_some(())
    });
    // One after the other, the four sandboxes would take twenty seconds.
    let started = Instant::now();
    let list = fixture.json(&["list"]);
    assert!(started.elapsed() < Duration::from_secs(20), "{started:?}");
    let of = |status: &str| {
        let rows = list.as_array().unwrap().iter();
        rows.filter(|row| row["status"] == status).count()
    };
    assert_eq!((of("active"), of("error")), (1, 4), "{list}");
    for init in silent {
        kill(init, Signal::SIGCONT).unwrap();
    }
}

fn sandbox_over_its_disk_limit_is_stopped_with_reason(fixture: &SandboxFixture) {
    fixture
        .gate_dir
        .write_config("version: \"1.0\"\nsandbox: { limits: { disk: 32MiB } }\n");
    // The file is unlinked, so its space is freed when the process is killed, and the sandbox may
    // run again.
    let fill_deleted_file =
        "exec 9> /tmp/x; rm /tmp/x; while head -c 1M /dev/zero >&9; do :; done; sleep 100";
    let output = fixture.run(&[
        "run",
        "--name",
        "fix",
        "--",
        "bash",
        "-c",
        fill_deleted_file,
    ]);
    assert_eq!(output.status.code(), Some(137), "{}", describe(&output));
    let why = "the sandbox was stopped: disk limit: the sandbox holds";
    assert!(
        output::stderr(&output).contains(why),
        "{}",
        describe(&output)
    );
    wait::until("room", || {
        fixture
            .bash("fix", "echo well")
            .status
            .success()
            .then_some(())
    });
    let output = fixture.bash("fix", fill_deleted_file);
    assert_eq!(output.status.code(), Some(137), "{}", describe(&output));
    assert!(
        output::stderr(&output).contains(why),
        "{}",
        describe(&output)
    );
}

// Regression test for issue 14, item 13.
fn work_of_a_sandbox_over_its_disk_limit_is_merged(fixture: &SandboxFixture) {
    fixture
        .gate_dir
        .write_config("version: \"1.0\"\nsandbox: { limits: { disk: 32MiB } }\n");
    let line = "echo done > work.txt; head -c 64M /dev/urandom > /tmp/big; sleep 1000";
    let output = fixture.run(&["run", "--name", "fix", "--", "bash", "-c", line]);
    assert_eq!(output.status.code(), Some(137), "{}", describe(&output));
    let summary = output::stderr(&output);
    assert!(!summary.contains("snapshot failed"), "{summary}");
    let at = |name: &str| fixture.gate_dir.path().join(name);
    let text = |name: &str| at(name).to_str().unwrap().to_owned();
    // Commands and writes inside are refused, with the reason.
    for args in [
        &["exec", "fix", "--", "true"][..],
        &["upload", "fix", "a.txt", "."],
    ] {
        std::fs::write(fixture.repo.dir().join("a.txt"), "more").unwrap();
        let output = fixture.run(args);
        assert!(!output.status.success(), "{args:?}: {}", describe(&output));
        let why = "sandbox 'fix' was stopped: disk limit: the sandbox holds";
        assert!(
            output::stderr(&output).contains(why),
            "{args:?}: {}",
            describe(&output)
        );
    }
    // The snapshot at the end of `run` has the work, and another one finds no change.
    assert!(fixture.ok(&["log", "fix"]).contains("run: bash"));
    assert!(fixture.ok(&["diff", "fix"]).contains("work.txt"));
    fixture.ok(&["snapshot", "fix"]);
    for (from, to) in [("work.txt", "home"), ("/tmp/big", "large")] {
        fixture.ok(&["download", "fix", from, &text(to)]);
    }
    assert_eq!(
        std::fs::read_to_string(at("home/work.txt")).unwrap(),
        "done\n"
    );
    // The download takes longer than the interval between two measurements, and measurements must
    // not interrupt it.
    assert!(std::fs::metadata(at("large/big")).unwrap().len() > 30 << 20);
    // A new gate finds the sandbox's listeners, and deletes the sandbox when its work is merged.
    fixture.ok(&["gate", "stop"]);
    let complaint = output::stderr(&fixture.run(&["delete", "fix"]));
    assert!(complaint.contains("unmerged"), "{complaint}");
    fixture.ok(&["merge", "fix"]);
    fixture.ok(&["delete", "fix"]);
    assert_eq!(fixture.json(&["list"]), json!([]));
}
