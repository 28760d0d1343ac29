//! Import of an agent's work into the operator's repository.

use testkit::repo::TestRepo;
use testkit::{output, wait};

use crate::deletion::refusal;
use crate::sandbox_fixture::{SandboxFixture, describe};

const WORK: &str = "echo hi > new.txt; git add -A; git commit -q -m x";

for_every_operator!(
    work_in_a_repository_is_merged,
    work_in_a_linked_worktree_is_merged,
    work_in_a_repository_with_submodule_is_merged,
    uncommitted_work_of_the_agent_is_merged,
    repository_without_commits_is_refused_and_nothing_is_created,
    create_outside_a_repository_names_init_and_no_repo,
    exit_code_of_the_command_is_returned,
    closed_output_pipe_ends_the_run,
    uncommitted_changes_are_copied_only_with_dirty,
    workspace_has_the_file_modes_of_a_clone,
    sensitive_files_are_merged_only_with_yes,
    sensitive_files_are_confirmed_on_a_terminal,
    merge_conflict_is_reported_and_nothing_is_changed,
    apply_leaves_changes_uncommitted,
    squash_merge_creates_one_commit,
    snapshot_keeps_modes_and_links,
    rm_keeps_only_sandboxes_with_unmerged_work,
    rm_keeps_sandboxes_with_work_outside_their_branch,
    oversized_file_is_skipped_and_named,
    delete_is_refused_while_the_agent_has_unimported_commits,
);

for_subid_user!(
    work_in_a_repository_is_merged,
    uncommitted_work_of_the_agent_is_merged,
    uncommitted_changes_are_copied_only_with_dirty,
    snapshot_keeps_modes_and_links,
    sensitive_files_are_confirmed_on_a_terminal,
);

/// Runs the commands from `run` to `merge` in a repository, and asserts that the operator's files
/// are unchanged before the merge.
fn assert_run_and_merge(fixture: &SandboxFixture, repo: &TestRepo) {
    let ok = |args: &[&str]| {
        let output = fixture.palisade_in(repo.dir(), args).output().unwrap();
        assert!(output.status.success(), "{args:?}: {}", describe(&output));
        output
    };
    let before = repo.fingerprint();
    let head = repo.git(&["rev-parse", "HEAD"]);
    let untouched = |when: &str| {
        let changed = repo.fingerprint().differences(&before);
        assert!(changed.is_empty(), "after {when}: {changed:?}");
    };
    let ran = ok(&["run", "--name", "fix", "--", "bash", "-c", WORK]);
    untouched("run");
    let summary = output::stderr(&ran);
    assert!(summary.contains("1 commit on palisade/fix"), "{summary}");
    assert!(summary.contains("A new.txt"), "{summary}");
    let diff = output::stdout(&ok(&["diff", "fix"]));
    assert!(
        diff.contains("new.txt") && diff.contains("\n+hi\n"),
        "{diff}"
    );
    untouched("diff");
    let log = output::stdout(&ok(&["log", "fix"]));
    assert_eq!(log.lines().count(), 1, "{log}");
    assert!(log.trim_end().ends_with("  x"), "{log}");
    untouched("log");
    ok(&["merge", "fix"]);
    assert_eq!(repo.read("new.txt"), "hi\n");
    assert_eq!(repo.git(&["log", "-1", "--format=%s"]), "x");
    assert_eq!(repo.git(&["rev-parse", "HEAD~1"]), head);
    assert_eq!(repo.git(&["status", "--porcelain"]), "");
    // After the merge no work would be lost, so a paused sandbox can be deleted.
    ok(&["pause", "fix"]);
    ok(&["delete", "fix"]);
    assert_eq!(repo.sandbox_branches(), [""; 0]);
}

fn work_in_a_repository_is_merged(fixture: &SandboxFixture) {
    assert_run_and_merge(fixture, &fixture.repo);
    fixture.assert_nothing_left();
}

fn work_in_a_linked_worktree_is_merged(fixture: &SandboxFixture) {
    let linked = fixture
        .repo
        .linked(&fixture.gate_dir.path().join("linked"), "side");
    assert_run_and_merge(fixture, &linked);
    assert_eq!(linked.git(&["branch", "--show-current"]), "side");
    assert!(!fixture.repo.path("new.txt").exists(), "the other worktree");
    fixture.assert_nothing_left();
}

fn work_in_a_repository_with_submodule_is_merged(fixture: &SandboxFixture) {
    let other = TestRepo::new(
        &fixture.gate_dir.path().join("other"),
        fixture.gate_dir.operator(),
    );
    let from = other.dir().to_string_lossy().into_owned();
    fixture.repo.git(&[
        "-c",
        "protocol.file.allow=always",
        "submodule",
        "--quiet",
        "add",
        &from,
        "library",
    ]);
    fixture.repo.commit("a submodule");
    let link = fixture.repo.git(&["rev-parse", "HEAD:library"]);
    assert_run_and_merge(fixture, &fixture.repo);
    assert_eq!(fixture.repo.git(&["rev-parse", "HEAD:library"]), link);
    assert_eq!(fixture.repo.read("library/README.md"), "hello\n");
    fixture.assert_nothing_left();
}

fn uncommitted_work_of_the_agent_is_merged(fixture: &SandboxFixture) {
    let before = fixture.repo.fingerprint();
    let line = "echo new > new.txt; echo more >> README.md; rm src/lib.rs; echo noise > a.log";
    fixture.ok(&["run", "--name", "fix", "--", "bash", "-c", line]);
    let changed = fixture.repo.fingerprint().differences(&before);
    assert!(changed.is_empty(), "{changed:?}");
    let stat = fixture.ok(&["diff", "--stat", "fix"]);
    for expected in [
        "A new.txt",
        "M README.md",
        "D src/lib.rs",
        "3 files changed",
    ] {
        assert!(stat.contains(expected), "{stat}");
    }
    let log = fixture.ok(&["log", "fix"]);
    assert!(log.contains(&format!("run: bash -c {line}")), "{log}");
    fixture.ok(&["merge", "fix"]);
    assert_eq!(fixture.repo.read("README.md"), "hello\nmore\n");
    assert!(!fixture.repo.path("src/lib.rs").exists());
    assert!(!fixture.repo.path("a.log").exists(), "it was ignored");
}

fn repository_without_commits_is_refused_and_nothing_is_created(fixture: &SandboxFixture) {
    let bare = TestRepo::empty(
        &fixture.gate_dir.path().join("bare"),
        fixture.gate_dir.operator(),
    );
    for command in [
        &["run", "--name", "fix", "--", "true"][..],
        &["create", "fix"][..],
    ] {
        let output = fixture.palisade_in(bare.dir(), command).output().unwrap();
        assert_eq!(output.status.code(), Some(2), "{}", describe(&output));
        let complaint = output::stderr(&output);
        assert!(complaint.contains("has no commit yet"), "{complaint}");
        assert!(complaint.contains("git commit"), "{complaint}");
    }
    assert_eq!(bare.sandbox_branches(), [""; 0]);
    assert_eq!(fixture.json(&["list"]), serde_json::json!([]));
    fixture.assert_nothing_left();
}

fn create_outside_a_repository_names_init_and_no_repo(fixture: &SandboxFixture) {
    let outside = fixture.gate_dir.path();
    let run = |args: &[&str]| fixture.palisade_in(outside, args).output().unwrap();
    let refused = run(&["run", "--", "true"]);
    assert_eq!(refused.status.code(), Some(2), "{}", describe(&refused));
    let complaint = output::stderr(&refused);
    for remedy in ["git init", "--no-repo"] {
        assert!(
            complaint.contains(remedy),
            "{remedy} is not named: {complaint}"
        );
    }
    let inside = run(&[
        "run",
        "--no-repo",
        "--name",
        "empty",
        "--",
        "bash",
        "-c",
        "pwd; ls -A",
    ]);
    assert!(inside.status.success(), "{}", describe(&inside));
    assert_eq!(output::stdout(&inside), "/workspace\n");
    // Commands that need a branch report that there is none.
    let snapshot = run(&["snapshot", "empty"]);
    assert_eq!(snapshot.status.code(), Some(2), "{}", describe(&snapshot));
    assert!(output::stderr(&snapshot).contains("has no repository"));
    let deleted = run(&["delete", "--force", "empty"]);
    assert!(deleted.status.success(), "{}", describe(&deleted));
    fixture.assert_nothing_left();
}

fn exit_code_of_the_command_is_returned(fixture: &SandboxFixture) {
    fixture.create("fix");
    for (line, code) in [
        ("exit 0", 0),
        ("exit 7", 7),
        ("exit 255", 255),
        ("kill -TERM $$", 128 + 15),
        ("kill -KILL $$", 128 + 9),
    ] {
        for how in [&["run", "--name", "fix"][..], &["exec", "fix"][..]] {
            let output = fixture.run(&[how, &["--", "bash", "-c", line]].concat());
            assert_eq!(
                output.status.code(),
                Some(code),
                "{line}: {}",
                describe(&output)
            );
        }
        let output = fixture.run(&["shell", "fix", "-c", line]);
        assert_eq!(
            output.status.code(),
            Some(code),
            "{line}: {}",
            describe(&output)
        );
    }
    let output = fixture.run(&["run", "--name", "fix", "--", "no-such-command"]);
    assert!(!output.status.success());
    assert!(
        output::stderr(&output).contains("no-such-command"),
        "{}",
        describe(&output)
    );
}

fn closed_output_pipe_ends_the_run(fixture: &SandboxFixture) {
    let palisade = fixture.palisade(&["run", "--name", "fix", "--", "bash", "-c", "touch it; yes"]);
    let mut piped = fixture.gate_dir.operator().command("timeout");
    piped.args([
        "60",
        "bash",
        "-c",
        "\"$@\" | head -1; exit ${PIPESTATUS[0]}",
        "_",
    ]);
    piped.arg(palisade.get_program()).args(palisade.get_args());
    piped.env_clear().current_dir(fixture.repo.dir());
    for (name, value) in palisade.get_envs() {
        piped.env(name, value.unwrap());
    }
    let output = piped.output().unwrap();
    assert_eq!(output::stdout(&output), "y\n", "{}", describe(&output));
    assert_ne!(
        output.status.code(),
        Some(124),
        "it hung: {}",
        describe(&output)
    );
    // The work until then is on the branch, and `yes` has ended.
    assert!(fixture.ok(&["diff", "--stat", "fix"]).contains("A it"));
    wait::until("the end of yes", || {
        let names = fixture.stdout_of("fix", "cat /proc/[0-9]*/comm 2>/dev/null; true");
        (!names.lines().any(|name| name == "yes")).then_some(())
    });
}

fn uncommitted_changes_are_copied_only_with_dirty(fixture: &SandboxFixture) {
    let repo = &fixture.repo;
    let outside = fixture.gate_dir.path().join("outside");
    std::fs::create_dir(&outside).unwrap();
    fixture.gate_dir.operator().chown(&outside);
    std::os::unix::fs::symlink(&outside, repo.path("turned")).unwrap();
    repo.write("gone/away.txt", "away\n");
    repo.commit("third");
    // The repository gets a changed, a staged, a new and an ignored file, a link, a deleted file
    // with its directory, and a directory at a path where the commit has a link out of the tree.
    repo.write("README.md", "mine, and not committed\n");
    repo.write("staged.txt", "staged\n");
    repo.git(&["add", "staged.txt"]);
    repo.write("below/untracked.txt", "new\n");
    repo.write("ignored.log", "noise\n");
    std::os::unix::fs::symlink("README.md", repo.path("link")).unwrap();
    std::fs::remove_dir_all(repo.path("gone")).unwrap();
    std::fs::remove_file(repo.path("turned")).unwrap();
    repo.write("turned/inner.txt", "inner\n");
    let before = repo.fingerprint();
    fixture.create("clean");
    assert_eq!(
        fixture.stdout_of("clean", "cat README.md; ls; git status --porcelain"),
        "hello\nREADME.md\ngone\nsrc\nturned"
    );
    fixture.ok(&["create", "--dirty", "dirty"]);
    assert_eq!(
        fixture.stdout_of(
            "dirty",
            "cat README.md below/untracked.txt turned/inner.txt; readlink link"
        ),
        "mine, and not committed\nnew\ninner\nREADME.md"
    );
    assert_eq!(
        fixture.stdout_of(
            "dirty",
            "git status --porcelain -uall; ls -d gone ignored.log 2>/dev/null; true"
        ),
        " M README.md\n D gone/away.txt\n D turned\n?? below/untracked.txt\n?? link\n\
         ?? staged.txt\n?? turned/inner.txt"
    );
    fixture.stdout_of(
        "dirty",
        "echo more >> README.md; echo x >> below/untracked.txt; touch below/own",
    );
    assert_eq!(
        std::fs::read_dir(&outside).unwrap().count(),
        0,
        "through the link"
    );
    let changed = repo.fingerprint().differences(&before);
    assert!(changed.is_empty(), "{changed:?}");
    // The uncommitted changes are part of the import.
    let stat = fixture.ok(&["diff", "--stat", "dirty"]);
    for expected in [
        "M README.md",
        "A staged.txt",
        "D gone/away.txt",
        "A turned/inner.txt",
    ] {
        assert!(stat.contains(expected), "{stat}");
    }
}

fn workspace_has_the_file_modes_of_a_clone(fixture: &SandboxFixture) {
    fixture.repo.write("run.sh", "#!/bin/sh\n");
    fixture.repo.git(&["add", "run.sh"]);
    fixture.repo.git(&["update-index", "--chmod=+x", "run.sh"]);
    fixture.repo.git(&["commit", "-q", "-m", "a program"]);
    fixture.repo.git(&["reset", "-q", "--hard"]);
    fixture.repo.write("below/new.txt", "uncommitted\n");
    // The workspace is created from a checkout, from a spare workspace, and with uncommitted
    // changes.
    for (name, dirty) in [("one", &[][..]), ("two", &[]), ("three", &["--dirty"])] {
        fixture.ok(&[&["create", name], dirty].concat());
        let modes = fixture.stdout_of(
            name,
            "git clone -q . /tmp/clone; mkdir -p below /tmp/clone/below; \
             look='stat -c \"%a %n\" . .git .git/HEAD .git/config .git/refs/heads below *'; \
             eval $look; echo; cd /tmp/clone; eval $look",
        );
        let (own, clone) = modes.split_once("\n\n").unwrap();
        assert_eq!(own, clone, "{name}");
        assert!(
            own.contains("755 run.sh") && own.contains("644 README.md"),
            "{own}"
        );
    }
}

fn sensitive_files_are_merged_only_with_yes(fixture: &SandboxFixture) {
    let line = "echo 'touch /tmp/ran' > .envrc; mkdir -p .github/workflows; \
                echo on: push > .github/workflows/ci.yml; echo hi > new.txt";
    fixture.ok(&["run", "--name", "fix", "--", "bash", "-c", line]);
    let before = fixture.repo.fingerprint();
    for how in ["merge", "apply"] {
        let complaint = fixture.fails(2, &[how, "fix"]);
        for named in [".envrc", ".github/workflows/ci.yml", "--yes"] {
            assert!(complaint.contains(named), "{complaint}");
        }
        assert!(!complaint.contains("new.txt"), "{complaint}");
        let changed = fixture.repo.fingerprint().differences(&before);
        assert!(changed.is_empty(), "after {how}: {changed:?}");
    }
    fixture.ok(&["merge", "--yes", "fix"]);
    assert_eq!(fixture.repo.read(".github/workflows/ci.yml"), "on: push\n");
    assert_eq!(fixture.repo.read("new.txt"), "hi\n");
}

fn sensitive_files_are_confirmed_on_a_terminal(fixture: &SandboxFixture) {
    fixture.ok(&[
        "run",
        "--name",
        "fix",
        "--",
        "bash",
        "-c",
        "echo x > .envrc",
    ]);
    for (answer, lands) in [("n\r", false), ("y\r", true)] {
        let mut terminal = fixture.on_terminal(&["merge", "fix"]);
        terminal.expect(".envrc");
        terminal.expect("[y/N]");
        terminal.send(answer);
        assert_eq!(terminal.wait().success(), lands, "{}", terminal.shown());
        assert_eq!(fixture.repo.path(".envrc").exists(), lands);
    }
}

fn merge_conflict_is_reported_and_nothing_is_changed(fixture: &SandboxFixture) {
    let line = "sed -i s/four/agent/ src/lib.rs; echo hi > new.txt";
    fixture.ok(&["run", "--name", "fix", "--", "bash", "-c", line]);
    fixture.repo.write(
        "src/lib.rs",
        "one\ntwo\nthree\noperator\nfive\nsix\nseven\n",
    );
    fixture.repo.commit("another four");
    let before = fixture.repo.fingerprint();
    for how in ["merge", "apply"] {
        let complaint = fixture.fails(1, &[how, "fix"]);
        assert!(complaint.contains("src/lib.rs"), "{complaint}");
        assert!(complaint.contains("nothing was changed"), "{complaint}");
        let changed = fixture.repo.fingerprint().differences(&before);
        assert!(changed.is_empty(), "after {how}: {changed:?}");
    }
    assert_eq!(fixture.repo.git(&["status", "--porcelain"]), "");
}

fn apply_leaves_changes_uncommitted(fixture: &SandboxFixture) {
    let line = "echo hi > new.txt; echo more >> README.md; git add -A; git commit -q -m x";
    fixture.ok(&["run", "--name", "fix", "--", "bash", "-c", line]);
    let head = fixture.repo.git(&["rev-parse", "HEAD"]);
    // The operator's own change to another file stays.
    fixture.repo.write("src/lib.rs", "mine\n");
    fixture.ok(&["apply", "fix"]);
    assert_eq!(fixture.repo.git(&["rev-parse", "HEAD"]), head);
    assert_eq!(fixture.repo.read("new.txt"), "hi\n");
    assert_eq!(fixture.repo.read("README.md"), "hello\nmore\n");
    assert_eq!(fixture.repo.read("src/lib.rs"), "mine\n");
    assert_eq!(
        fixture.repo.git(&["status", "--porcelain"]),
        " M README.md\n M src/lib.rs\n?? new.txt"
    );
}

fn squash_merge_creates_one_commit(fixture: &SandboxFixture) {
    let line = "for n in 1 2 3; do echo $n > $n.txt; git add -A; git commit -q -m $n; done";
    fixture.ok(&["run", "--name", "fix", "--", "bash", "-c", line]);
    assert_eq!(fixture.ok(&["log", "fix"]).lines().count(), 3);
    let head = fixture.repo.git(&["rev-parse", "HEAD"]);
    fixture.ok(&["merge", "--squash", "-m", "all of it", "fix"]);
    assert_eq!(
        fixture.repo.git(&["log", "--format=%s %P", "-1"]),
        format!("all of it {head}")
    );
    assert_eq!(fixture.repo.read("3.txt"), "3\n");
}

fn snapshot_keeps_modes_and_links(fixture: &SandboxFixture) {
    fixture.create("fix");
    fixture.stdout_of(
        "fix",
        "echo '#!/bin/sh' > run.sh; chmod 755 run.sh; ln -s README.md link; \
         ln -s /etc/shadow away; printf 'a\\0b' > bytes; chmod 600 README.md",
    );
    fixture.ok(&["snapshot", "fix", "-m", "by hand"]);
    assert_eq!(
        fixture.ok(&["snapshot", "fix"]).trim(),
        "Nothing new in fix"
    );
    let tree = fixture.repo.git(&["ls-tree", "palisade/fix"]);
    for (mode, name) in [
        ("100755", "run.sh"),
        ("120000", "link"),
        ("120000", "away"),
        ("100644", "bytes"),
        ("100644", "README.md"),
    ] {
        let line = tree
            .lines()
            .find(|line| line.ends_with(&format!("\t{name}")));
        assert!(
            line.is_some_and(|line| line.starts_with(mode)),
            "{name}: {tree}"
        );
    }
    assert_eq!(
        fixture.repo.git(&["cat-file", "-p", "palisade/fix:away"]),
        "/etc/shadow"
    );
    assert_eq!(
        fixture
            .repo
            .git(&["log", "-1", "--format=%s", "palisade/fix"]),
        "by hand"
    );
}

fn rm_keeps_only_sandboxes_with_unmerged_work(fixture: &SandboxFixture) {
    fixture.ok(&["run", "--rm", "--name", "idle", "--", "true"]);
    assert_eq!(fixture.json(&["list"]), serde_json::json!([]));
    fixture.ok(&["run", "--rm", "--name", "busy", "--", "touch", "new.txt"]);
    let list = fixture.json(&["list"]);
    assert_eq!(list[0]["name"], "busy", "{list}");
}

fn rm_keeps_sandboxes_with_work_outside_their_branch(fixture: &SandboxFixture) {
    fixture
        .gate_dir
        .write_config("version: \"1.0\"\nsandbox: { snapshot: { file: 1KiB } }\n");
    for (name, line, named) in [
        ("large", "head -c 2000 /dev/zero > big", "'big'"),
        (
            "branch",
            "git checkout -q -b side; git commit -q --allow-empty -m x; git checkout -q -",
            "branch side at",
        ),
        ("stash", "echo x >> README.md; git stash -q", "a stash at"),
    ] {
        let output = fixture.run(&["run", "--rm", "--name", name, "--", "bash", "-c", line]);
        assert!(output.status.success(), "{}", describe(&output));
        let printed = output::stderr(&output);
        assert!(printed.contains(&format!("{name} was kept")), "{printed}");
        assert!(printed.contains(named), "{printed}");
        let list = fixture.json(&["list"]);
        let row = list
            .as_array()
            .unwrap()
            .iter()
            .find(|row| row["name"] == name);
        assert_eq!(row.unwrap()["status"], "active", "{list}");
        fixture.ok(&["delete", "-f", name]);
    }
    fixture.assert_nothing_left();
}

fn oversized_file_is_skipped_and_named(fixture: &SandboxFixture) {
    fixture.create("fix");
    fixture.stdout_of("fix", "truncate -s 65M big; echo hi > new.txt");
    let output = fixture.run(&["diff", "--stat", "fix"]);
    assert!(output.status.success(), "{}", describe(&output));
    assert!(
        output::stdout(&output).contains("A new.txt"),
        "{}",
        describe(&output)
    );
    let printed = output::stderr(&output);
    assert!(
        printed.contains("left out big") && printed.contains("sandbox.snapshot.file"),
        "{printed}"
    );
    fixture.ok(&["merge", "fix"]);
    assert_eq!(fixture.repo.read("new.txt"), "hi\n");
    let complaint = refusal(fixture, "fix");
    assert!(
        complaint.contains("'big'") && complaint.contains("palisade download fix"),
        "{complaint}"
    );
    // Without the large file no work would be lost.
    fixture.stdout_of("fix", "rm big");
    fixture.ok(&["delete", "fix"]);
    fixture.assert_nothing_left();
}

fn delete_is_refused_while_the_agent_has_unimported_commits(fixture: &SandboxFixture) {
    fixture.create("fix");
    let refused = |named: &str| {
        fixture.ok(&["pause", "fix"]);
        let complaint = refusal(fixture, "fix");
        assert!(complaint.contains(named), "{complaint}");
        assert!(complaint.contains("palisade resume fix"), "{complaint}");
        fixture.ok(&["resume", "fix"]);
    };
    fixture.stdout_of("fix", "git commit -q --allow-empty -m own");
    refused("branch palisade/fix at");
    fixture.ok(&["snapshot", "fix"]);
    fixture.stdout_of(
        "fix",
        "git checkout -q --detach; git commit -q --allow-empty -m detached",
    );
    refused("HEAD at");
    fixture.stdout_of("fix", "git branch -q side; git checkout -q palisade/fix");
    refused("branch side at");
    // Commits that are merged in the sandbox are imported.
    fixture.stdout_of(
        "fix",
        "git merge -q side; echo x >> README.md; git stash -q",
    );
    refused("a stash at");
    fixture.stdout_of("fix", "git stash pop -q; git commit -q -a -m more");
    fixture.ok(&["merge", "fix"]);
    fixture.ok(&["pause", "fix"]);
    fixture.ok(&["delete", "fix"]);
    assert_eq!(
        fixture.repo.git(&["log", "--format=%s", "-3"]),
        "more\ndetached\nown"
    );
    fixture.assert_nothing_left();
}
