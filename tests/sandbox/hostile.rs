//! A workspace that attacks the programs that read it.

use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use testkit::output;

use crate::sandbox_fixture::{SandboxFixture, describe};

for_every_operator!(
    hostile_repository_runs_no_program_on_the_host,
    links_to_host_paths_are_not_followed,
    symlink_that_replaces_the_workspace_is_not_followed,
    sandbox_with_inaccessible_directories_starts_again,
    file_names_with_escapes_are_escaped_on_a_terminal,
    dot_git_in_any_spelling_is_never_imported,
    special_files_and_many_files_are_imported_in_time,
    commit_messages_with_escapes_are_escaped_on_a_terminal,
);

for_subid_user!(
    hostile_repository_runs_no_program_on_the_host,
    links_to_host_paths_are_not_followed,
    symlink_that_replaces_the_workspace_is_not_followed,
    sandbox_with_inaccessible_directories_starts_again,
    file_names_with_escapes_are_escaped_on_a_terminal,
    dot_git_in_any_spelling_is_never_imported,
    special_files_and_many_files_are_imported_in_time,
    commit_messages_with_escapes_are_escaped_on_a_terminal,
);

/// Creates a directory on the host in which hostile commands create a file if they run there. Every
/// process of the operator can write to the directory.
fn canary(fixture: &SandboxFixture) -> PathBuf {
    let outside = fixture.gate_dir.path().join("ran-outside");
    std::fs::create_dir(&outside).unwrap();
    fixture.gate_dir.operator().chown(&outside);
    outside
}

fn hostile_repository_runs_no_program_on_the_host(fixture: &SandboxFixture) {
    let canary = canary(fixture);
    fixture.create("fix");
    // The directory does not exist in the sandbox, so the commands have an effect only on the host.
    let evil = format!("touch {}/$$", canary.display());
    let script = format!(
        r#"
        set -e
        printf '#!/bin/sh\n{evil}\ncat\n' > /workspace/evil.sh; chmod 755 evil.sh
        git config core.fsmonitor "{evil}; false"
        git config core.sshCommand "{evil}"
        git config core.pager "{evil}"
        git config core.editor "{evil}"
        git config core.hooksPath /workspace/hooks
        git config diff.external "{evil}"
        git config gpg.program "/workspace/evil.sh"
        git config commit.gpgSign true
        git config credential.helper "!{evil}"
        git config alias.status "!{evil}"
        git config alias.log "!{evil}"
        git config filter.evil.clean "{evil}; cat"
        git config filter.evil.smudge "{evil}; cat"
        git config filter.evil.process "{evil}"
        git config filter.evil.required true
        git config diff.evil.textconv "{evil}; cat"
        git config diff.evil.command "{evil}"
        git config merge.evil.driver "{evil}"
        git config uploadpack.packObjectsHook "{evil}"
        git config remote.origin.url "ext::sh -c '{evil}'"
        git config protocol.ext.allow always
        printf '[core]\n\tfsmonitor = "{evil}"\n[diff]\n\texternal = "{evil}"\n' > .evilconfig
        git config include.path ../.evilconfig
        printf '* filter=evil diff=evil merge=evil\n' > .git/info/attributes
        printf '* filter=evil diff=evil merge=evil\n' > .gitattributes
        mkdir -p hooks .git/hooks
        for hook in pre-commit post-commit post-checkout post-merge reference-transaction \
                    fsmonitor-watchman pre-auto-gc post-index-change; do
            printf '#!/bin/sh\n{evil}\n' > .git/hooks/$hook; chmod 755 .git/hooks/$hook
            cp .git/hooks/$hook hooks/$hook
        done
        echo changed >> README.md
        echo hi > new.txt
        "#
    );
    fixture.stdout_of("fix", &script);
    fixture.ok(&["snapshot", "fix"]);
    let stat = fixture.ok(&["diff", "--stat", "fix"]);
    assert!(stat.contains("A new.txt"), "{stat}");
    fixture.ok(&["diff", "fix"]);
    fixture.ok(&["log", "fix"]);
    let before = fixture.repo.fingerprint();
    let complaint = fixture.fails(2, &["merge", "fix"]);
    assert!(complaint.contains(".gitattributes"), "{complaint}");
    assert!(fixture.repo.fingerprint().differences(&before).is_empty());
    fixture.ok(&["merge", "--yes", "fix"]);
    assert_eq!(fixture.repo.read("new.txt"), "hi\n");
    let config = fixture.repo.git(&["config", "--local", "--list"]);
    assert!(
        !config.contains("evil") && !config.contains("ran-outside"),
        "{config}"
    );
    fixture.ok(&["pause", "fix"]);
    fixture.ok(&["delete", "fix"]);
    let ran: Vec<_> = std::fs::read_dir(&canary).unwrap().flatten().collect();
    assert!(ran.is_empty(), "{ran:?}");
    fixture.assert_nothing_left();
}

fn links_to_host_paths_are_not_followed(fixture: &SandboxFixture) {
    let secret = fixture.gate_dir.path().join("secret");
    std::fs::write(&secret, "the operator's secret").unwrap();
    fixture.gate_dir.operator().chown(&secret);
    let outside = fixture.gate_dir.path().join("outside");
    std::fs::create_dir(&outside).unwrap();
    fixture.gate_dir.operator().chown(&outside);
    std::fs::write(outside.join("inner"), "the operator's secret").unwrap();
    fixture.create("fix");
    let script = format!(
        "ln -s {0} to-file; ln -s {1} to-directory; rm -r src; ln -s {1} src; \
         ln -s / root; ln -s ../../../../../../../../etc up; ln -s {0} .gitignore-link; \
         rm .gitignore; ln -s {0} .gitignore",
        secret.display(),
        outside.display()
    );
    fixture.stdout_of("fix", &script);
    let diff = fixture.run(&["diff", "fix"]);
    assert!(diff.status.success(), "{}", describe(&diff));
    assert!(
        !describe(&diff).contains("the operator's secret"),
        "{}",
        describe(&diff)
    );
    let objects = fixture.repo.git(&["rev-list", "--objects", "palisade/fix"]);
    for id in objects.lines().filter_map(|line| line.split(' ').next()) {
        let held = fixture.repo.try_git(&["cat-file", "-p", id]);
        assert!(
            !output::stdout(&held).contains("the operator's secret"),
            "{id}"
        );
    }
    fixture.ok(&["merge", "--yes", "fix"]);
    assert_eq!(
        std::fs::read_link(fixture.repo.path("to-file")).unwrap(),
        secret
    );
    assert_eq!(
        std::fs::read_link(fixture.repo.path("src")).unwrap(),
        outside
    );
    // The next work has a file below a path that is now a link in the operator's tree. The merge
    // does not follow this link.
    fixture.stdout_of(
        "fix",
        "rm src; mkdir src; echo written > src/inner; echo new > src/new",
    );
    let landed = fixture.run(&["merge", "--yes", "fix"]);
    assert_eq!(
        std::fs::read_to_string(outside.join("inner")).unwrap(),
        "the operator's secret",
        "{}",
        describe(&landed)
    );
    assert!(!outside.join("new").exists(), "{}", describe(&landed));
}

/// An agent that owns `/` in the sandbox can replace its workspace with a link.
fn symlink_that_replaces_the_workspace_is_not_followed(fixture: &SandboxFixture) {
    let outside = fixture.gate_dir.path().join("outside");
    std::fs::create_dir(&outside).unwrap();
    std::fs::write(outside.join("keys"), "the operator's secret").unwrap();
    fixture.gate_dir.operator().chown(&outside);
    fixture.create("fix");
    let script = format!(
        "cd /; mv workspace w2 && ln -s {} workspace; test -L workspace && echo linked",
        outside.display()
    );
    let linked = output::stdout(&fixture.bash("fix", &script)).contains("linked");
    let snapshot = fixture.run(&["snapshot", "fix"]);
    assert_eq!(
        snapshot.status.success(),
        !linked,
        "{}",
        describe(&snapshot)
    );
    let objects = fixture.repo.git(&["rev-list", "--objects", "palisade/fix"]);
    assert!(!objects.contains("keys"), "{objects}");
}

fn sandbox_with_inaccessible_directories_starts_again(fixture: &SandboxFixture) {
    let id = fixture.create("fix");
    fixture.stdout_of("fix", "echo work > w; chmod 0555 /workspace; chmod 0 ~");
    let init = fixture.init(&id);
    let killed = std::process::Command::new("kill")
        .args(["-9", &init.to_string()])
        .status();
    assert!(killed.unwrap().success());
    testkit::wait::until("the end of its processes", || {
        output::stdout(&fixture.run(&["list"]))
            .contains("processes are gone")
            .then_some(())
    });
    fixture.ok(&["resume", "fix"]);
    assert_eq!(fixture.stdout_of("fix", "cat w"), "work");
}

/// A name and text that clear a screen, set a title, and hide what follows.
const ESCAPES: &str = "$'\\e[2J\\e]0;owned\\a\\e[8mhidden\\r\\n\\x9b31m'";

fn assert_harmless(what: &str, output: &str) {
    let raw = output.chars().find(|c| {
        // The terminal itself writes \r\n, and palisade writes colours.
        c.is_control() && !matches!(c, '\n' | '\r' | '\t' | '\u{1b}')
    });
    assert_eq!(raw, None, "{what}: {output:?}");
    let mut rest = output;
    while let Some((_, after)) = rest.split_once('\u{1b}') {
        let colour = after
            .strip_prefix('[')
            .and_then(|code| code.split_once('m'));
        let harmless = colour.is_some_and(|(code, _)| ["0", "1", "31", "32", "36"].contains(&code));
        assert!(harmless, "{what}: {output:?}");
        rest = after;
    }
}

fn file_names_with_escapes_are_escaped_on_a_terminal(fixture: &SandboxFixture) {
    fixture.create("fix");
    let script = format!(
        "name={ESCAPES}; echo \"$name\" > \"$name\"; mkdir \"d$name\"; echo x > \"d$name/.envrc\""
    );
    fixture.stdout_of("fix", &script);
    for command in [
        &["run", "--name", "fix", "--", "true"][..],
        &["snapshot", "fix"][..],
        &["diff", "--stat", "fix"][..],
        &["diff", "fix"][..],
        &["log", "fix"][..],
        &["list"][..],
    ] {
        let mut terminal = fixture.on_terminal(command);
        let status = terminal.wait();
        assert!(status.success(), "{command:?}: {:?}", terminal.shown());
        assert_harmless(&command.join(" "), &terminal.shown());
    }
    let mut terminal = fixture.on_terminal(&["merge", "fix"]);
    terminal.expect("[y/N]");
    terminal.send("y\r");
    assert!(terminal.wait().success(), "{:?}", terminal.shown());
    assert_harmless("merge", &terminal.shown());
    // Without a terminal, all output except the patch is escaped as well.
    let output = fixture.run(&["diff", "--stat", "fix"]);
    assert_harmless("stat", &describe(&output));
}

fn commit_messages_with_escapes_are_escaped_on_a_terminal(fixture: &SandboxFixture) {
    fixture.create("fix");
    let script = format!(
        "words={ESCAPES}; git -c user.name=\"$words\" -c user.email=\"$words\" \
         commit -q --allow-empty -m \"$words\"; echo x > x; git add x; \
         git -c user.name=\"A$words\" commit -q -m \"x$words\""
    );
    fixture.stdout_of("fix", &script);
    for command in [
        &["run", "--name", "fix", "--", "true"][..],
        &["log", "fix"][..],
        &["merge", "fix"][..],
    ] {
        let mut terminal = fixture.on_terminal(command);
        let status = terminal.wait();
        assert!(status.success(), "{command:?}: {:?}", terminal.shown());
        assert_harmless(&command.join(" "), &terminal.shown());
    }
}

fn dot_git_in_any_spelling_is_never_imported(fixture: &SandboxFixture) {
    for (name, spelling) in [
        ("upper", ".GIT"),
        ("short", "git~1"),
        ("dots", "sub/.git. "),
    ] {
        fixture.create(name);
        let script = format!(
            "mkdir -p '{spelling}/hooks'; printf '#!/bin/sh\\n' > '{spelling}/hooks/pre-commit'; \
             echo hi > new.txt; git add -f . 2>/dev/null; git commit -q -m evil; true"
        );
        fixture.stdout_of(name, &script);
        let snapshot = fixture.run(&["snapshot", name]);
        let merged = fixture.run(&["merge", "--yes", name]);
        let tree = fixture
            .repo
            .git(&["ls-tree", "-r", "--name-only", &format!("palisade/{name}")]);
        assert!(
            !tree.to_ascii_lowercase().contains("hooks/pre-commit"),
            "{tree}\n{}\n{}",
            describe(&snapshot),
            describe(&merged)
        );
        assert!(!fixture.repo.path(spelling).exists(), "{spelling}");
        // The output names the skipped files.
        let printed = format!("{}{}", describe(&snapshot), describe(&merged));
        assert!(
            printed.contains(".git") || printed.contains(spelling),
            "{printed}"
        );
    }
}

fn special_files_and_many_files_are_imported_in_time(fixture: &SandboxFixture) {
    fixture.create("fix");
    let script = "mkfifo pipe; mkdir many; cd many; seq -f 'entry-%g' 20000 | xargs touch; \
                  perl -MIO::Socket::UNIX -e 'IO::Socket::UNIX->new(Local => \"../door\", Listen => 1)'; \
                  mkdir -p ../deep; cd ../deep; for n in $(seq 100); do mkdir d; cd d; done; touch bottom; \
                  touch \"$(printf 'x%.0s' $(seq 255))\"; touch $'\\xff\\xfe'";
    fixture.stdout_of("fix", script);
    let started = Instant::now();
    let snapshot = fixture.run(&["snapshot", "fix"]);
    assert!(snapshot.status.success(), "{}", describe(&snapshot));
    assert!(
        output::stderr(&snapshot).contains("pipe"),
        "{}",
        describe(&snapshot)
    );
    let stat = fixture.ok(&["diff", "--stat", "fix"]);
    assert!(
        stat.contains("20003 files changed"),
        "{}",
        stat.lines().last().unwrap_or_default()
    );
    fixture.ok(&["merge", "fix"]);
    assert!(
        started.elapsed() < Duration::from_secs(240),
        "{:?}",
        started.elapsed()
    );
    assert!(fixture.repo.path("many/entry-20000").exists());
    let odd = std::ffi::OsStr::from_bytes(b"\xff\xfe");
    let bottom = fixture.repo.path("deep").join("d/".repeat(100));
    assert!(bottom.join(odd).exists());
    // Files that git cannot store are skipped.
    assert!(fixture.repo.path("pipe").symlink_metadata().is_err());
    assert!(fixture.repo.path("door").symlink_metadata().is_err());
    // The sandbox has a FIFO at the path of a file of the operator.
    fixture.stdout_of("fix", "rm README.md; mkfifo README.md");
    fixture.ok(&["snapshot", "fix"]);
    fixture.ok(&["delete", "--force", "fix"]);
    fixture.assert_nothing_left();
}
