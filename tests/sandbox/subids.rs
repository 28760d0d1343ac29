//! `--root` for an operator who is not root: ids of `/etc/subuid`, and files with these ids that
//! the operator can neither read nor remove.

use std::path::Path;

use serde_json::Value;
use testkit::leftovers;

use crate::sandbox_fixture::SandboxFixture;

for_subid_user!(
    agent_is_root_inside_and_unprivileged_outside,
    files_of_other_ids_are_merged_and_copied,
    two_sandboxes_share_no_id,
    two_gates_of_one_user_share_no_id,
    checkpoints_and_forks_keep_file_owners,
    deleted_sandbox_leaves_no_files,
    sandbox_without_processes_starts_again,
    process_limit_applies_to_all_users_of_a_sandbox,
    missing_subid_line_error_names_the_fix,
    doctor_reports_how_many_sandboxes_the_subids_allow,
);

/// The recorded ids of a sandbox: users and groups.
fn ids(fixture: &SandboxFixture, id: &str) -> (u64, u64) {
    let path = fixture.gate_dir.state().join("sandboxes").join(id);
    let record = std::fs::read(path.join("record.json")).unwrap();
    let record: Value = serde_json::from_slice(&record).unwrap();
    let subids = &record["identity"]["Range"]["lent"];
    let number = |name: &str| subids[name].as_u64().unwrap();
    (number("first"), number("groups"))
}

fn status_line(pid: i32, name: &str) -> Vec<String> {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix(name));
    let fields = line.unwrap().trim_start_matches(':').split_whitespace();
    fields.map(ToOwned::to_owned).collect()
}

fn agent_is_root_inside_and_unprivileged_outside(fixture: &SandboxFixture) {
    let id = fixture.create("fix");
    assert_eq!(fixture.stdout_of("fix", "id -u; id -g; id -G"), "0\n0\n0");
    // As package installation does, the agent creates files and processes of other users.
    let line = "touch one && chown 33:34 one && stat -c %u:%g one && \
                setpriv --reuid 1234 --regid 1234 --clear-groups id -u && \
                setpriv --reuid 65534 --regid 65534 --clear-groups touch /tmp/by-65534 && \
                stat -c %u:%g /tmp/by-65534 && \
                install -o 4094 -g 4094 -m 0600 /dev/null two && stat -c %u:%g two";
    assert_eq!(
        fixture.stdout_of("fix", line),
        "33:34\n1234\n65534:65534\n4094:4094"
    );
    // Ids outside the sandbox's range cannot be used.
    assert!(!fixture.bash("fix", "chown 5000 one").status.success());
    assert!(
        !fixture
            .bash("fix", "setpriv --reuid 5000 true")
            .status
            .success()
    );
    // On the host, init and the agent have none of the operator's ids.
    let (users, groups) = ids(fixture, &id);
    let init = fixture.init(&id);
    assert_eq!(status_line(init, "Uid"), vec![users.to_string(); 4]);
    assert_eq!(status_line(init, "Gid"), vec![groups.to_string(); 4]);
    assert_eq!(status_line(init, "Groups"), [""; 0]);
    assert_eq!(status_line(init, "NoNewPrivs"), ["1"]);
    // The capabilities are chown, dac_override, fowner, fsetid, setgid and setuid. None allows
    // mounting or tracing.
    let capabilities = fixture.stdout_of("fix", "grep -E '^Cap(Eff|Bnd)' /proc/self/status");
    for line in capabilities.lines() {
        assert!(line.ends_with("00000000000000db"), "{line}");
    }
    // Files of the host have the overflow id, and private ones stay private.
    assert!(!fixture.bash("fix", "chown 0 /usr/bin/env").status.success());
    assert!(
        !fixture
            .bash("fix", "mount -t tmpfs x /mnt")
            .status
            .success()
    );
    assert!(
        !fixture
            .bash("fix", "kill -9 1; cat /proc/1/environ")
            .status
            .success()
    );
    assert_eq!(fixture.init(&id), init);
    // The agent sees its whole id map: the operator is not in it.
    let map = fixture.stdout_of("fix", "cat /proc/self/uid_map");
    let outside: Vec<u64> = map
        .split_whitespace()
        .filter_map(|word| word.parse().ok())
        .collect();
    assert_eq!(outside.len(), 6, "{map}");
}

fn files_of_other_ids_are_merged_and_copied(fixture: &SandboxFixture) {
    fixture.create("fix");
    let line = "mkdir -m 0700 closed && echo secret > closed/file && echo mine > mine && \
                echo more >> README.md; \
                chmod 0600 mine closed/file && chown -R 1234:1234 mine closed";
    fixture.stdout_of("fix", line);
    fixture.ok(&["snapshot", "fix"]);
    let diff = fixture.ok(&["diff", "fix"]);
    assert!(diff.contains("+mine") && diff.contains("+secret"), "{diff}");
    // Imported files belong to the operator.
    fixture.ok(&["merge", "fix", "--yes"]);
    let landed = fixture.repo.dir().join("closed/file");
    assert_eq!(std::fs::read_to_string(landed).unwrap(), "secret\n");
    let to = fixture.gate_dir.path().join("out");
    std::fs::create_dir(&to).unwrap();
    fixture.gate_dir.operator().chown(&to);
    let to = to.to_string_lossy().into_owned();
    fixture.ok(&["download", "fix", "/workspace/closed", &to]);
    let brought = std::fs::read_to_string(Path::new(&to).join("closed/file")).unwrap();
    assert_eq!(brought, "secret\n");
    // Uploaded files belong to the agent.
    fixture.ok(&["upload", "fix", &format!("{to}/closed"), "/workspace/again"]);
    let owner = fixture.stdout_of("fix", "find again -printf '%U:%G\\n' | sort -u");
    assert_eq!(owner, "0:0");
}

fn two_sandboxes_share_no_id(fixture: &SandboxFixture) {
    let (one, two) = (fixture.create("one"), fixture.create("two"));
    let ((users, groups), (other_users, other_groups)) = (ids(fixture, &one), ids(fixture, &two));
    assert!(users.abs_diff(other_users) >= 4096);
    assert!(groups.abs_diff(other_groups) >= 4096);
    assert_ne!(users, groups, "the test lends groups from another place");
    fixture.stdout_of("one", "echo of one > kept; chown 7 kept");
    assert_eq!(
        fixture.stdout_of("two", "ls /workspace/kept 2>&1 | wc -l"),
        "1"
    );
}

fn two_gates_of_one_user_share_no_id(fixture: &SandboxFixture) {
    let other = SandboxFixture::new(fixture.gate_dir.operator());
    // Enough ids for two sandboxes.
    for name in ["subuid", "subgid"] {
        let lines =
            std::fs::read_to_string(fixture.gate_dir.path().join("etc").join(name)).unwrap();
        let lines = lines.replace(":65536", ":8192");
        for gate_dir in [&fixture.gate_dir, &other.gate_dir] {
            std::fs::write(gate_dir.path().join("etc").join(name), &lines).unwrap();
        }
    }
    let (here, there) = (fixture.create("fix"), other.create("fix"));
    assert_ne!(ids(fixture, &here).0, ids(&other, &there).0);
    for gate in [fixture, &other] {
        let printed = gate.fails(1, &["create", "more"]);
        assert!(printed.contains("all 2 slices"), "{printed}");
    }
    other.ok(&["delete", "--force", "fix"]);
    fixture.create("more");
    other.assert_nothing_left();
}

fn checkpoints_and_forks_keep_file_owners(fixture: &SandboxFixture) {
    let one = fixture.create("one");
    let whose = "stat -c %u:%g:%a kept /home/agent/kept";
    fixture.stdout_of(
        "one",
        "for at in . /home/agent; do echo x > $at/kept; chown 1234:99 $at/kept; \
         chmod 0600 $at/kept; done",
    );
    let before = fixture.stdout_of("one", whose);
    assert!(before.starts_with("1234:99:600"), "{before}");
    fixture.ok(&["checkpoint", "one", "early"]);
    fixture.stdout_of("one", "rm kept; chown 5 /home/agent/kept");
    fixture.ok(&["restore", "--yes", "one", "early"]);
    assert_eq!(fixture.stdout_of("one", whose), before);
    fixture.ok(&["fork", "one", "two"]);
    assert_eq!(fixture.stdout_of("two", whose), before);
    let two = fixture.json(&["list"]);
    let two = two.as_array().unwrap().iter();
    let two = two.map(|row| row["id"].as_str().unwrap());
    let two = two.into_iter().find(|id| *id != one).unwrap();
    assert_ne!(ids(fixture, &one), ids(fixture, two));
    for name in ["one", "two"] {
        fixture.ok(&["delete", "--force", name]);
    }
    let kept = fixture.gate_dir.state().join("checkpoints");
    assert_eq!(std::fs::read_dir(kept).unwrap().count(), 0);
    fixture.assert_nothing_left();
}

fn deleted_sandbox_leaves_no_files(fixture: &SandboxFixture) {
    let id = fixture.create("fix");
    fixture.stdout_of(
        "fix",
        "mkdir -p a/b/c /tmp/d; touch a/b/c/file; chown -R 1234 a; chmod -R 0 a; chmod 0 /tmp/d; \
         ln -s /etc/passwd link; mkdir /opt/new || true",
    );
    fixture.ok(&["delete", "--force", "fix"]);
    assert!(
        !fixture
            .gate_dir
            .state()
            .join("sandboxes")
            .join(&id)
            .exists()
    );
    // The deletion also works after the record with the ids is lost.
    let id = fixture.create("fix");
    fixture.stdout_of("fix", "mkdir -m 0 x; chown 1234 x");
    let gate_dir = fixture.gate_dir.state().join("sandboxes").join(id);
    std::fs::write(gate_dir.join("record.json"), "{").unwrap();
    fixture.ok(&["delete", "--force", "fix"]);
    fixture.assert_nothing_left();
}

fn sandbox_without_processes_starts_again(fixture: &SandboxFixture) {
    let id = fixture.create("fix");
    fixture.stdout_of("fix", "echo x > kept; chown 1234 kept; chmod 0600 kept");
    let init = fixture.init(&id);
    nix::sys::signal::kill(
        nix::unistd::Pid::from_raw(init),
        nix::sys::signal::Signal::SIGKILL,
    )
    .unwrap();
    testkit::wait::until("init's end", || {
        let stat = std::fs::read_to_string(format!("/proc/{init}/stat")).unwrap_or_default();
        stat.rsplit_once(") ")
            .is_none_or(|(_, rest)| rest.starts_with('Z'))
            .then_some(())
    });
    fixture.ok(&["resume", "fix"]);
    assert_eq!(
        fixture.stdout_of("fix", "stat -c %u kept; cat kept"),
        "1234\nx"
    );
    fixture.ok(&["delete", "--force", "fix"]);
    fixture.assert_nothing_left();
}

fn process_limit_applies_to_all_users_of_a_sandbox(fixture: &SandboxFixture) {
    let limit = 100;
    fixture.gate_dir.write_config(&format!(
        "version: \"1.0\"\nsandbox:\n  limits:\n    pids: {limit}\n"
    ));
    fixture.create("fix");
    // Six users, each below the limit on its own. Each reports its count, and all run until the
    // last user has reported.
    let forks = "my $n = 0; for (1..40) { my $p = fork; last unless defined $p; \
                 if (!$p) { sleep 10000; exit } $n++ } print \"$n\\n\";";
    let line = format!(
        "for user in 1 2 3 4 5 6; do setpriv --reuid $user --regid $user --clear-groups \
         perl -e '{forks}' </dev/null || echo 0; done"
    );
    let printed = fixture.stdout_of("fix", &line);
    let counts: Vec<u32> = printed.lines().map(|line| line.parse().unwrap()).collect();
    let all: u32 = counts.iter().sum();
    assert!((50..limit).contains(&all), "{counts:?}");
}

fn missing_subid_line_error_names_the_fix(fixture: &SandboxFixture) {
    let etc = fixture.gate_dir.path().join("etc");
    std::fs::write(etc.join("subgid"), "another:100000:65536\n").unwrap();
    std::fs::write(etc.join("subuid"), "").unwrap();
    let printed = fixture.fails(1, &["create", "fix"]);
    for named in [
        "/etc/subuid and /etc/subgid",
        "usermod --add-subuids 165536-231071 --add-subgids 165536-231071 borrower",
    ] {
        assert!(printed.contains(named), "{printed}");
    }
    let doctor = fixture.run(&["doctor"]);
    let doctor = testkit::output::stdout(&doctor);
    assert!(doctor.contains("usermod --add-subuids"), "{doctor}");
    fixture.ok(&["gate", "stop"]);
    assert_eq!(
        leftovers::find(&fixture.gate_dir, &[&fixture.repo]),
        [""; 0]
    );
}

fn doctor_reports_how_many_sandboxes_the_subids_allow(fixture: &SandboxFixture) {
    let doctor = testkit::output::stdout(&fixture.run(&["doctor"]));
    let line = "subordinate ids: sufficient for 16 sandboxes";
    assert!(doctor.contains(line), "{doctor}");
}
