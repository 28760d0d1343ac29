//! Workspaces that try to run programs on the host, or to read its files.

use std::os::unix::fs::PermissionsExt;

use sandbox::git::merge::MergeMode;
use sandbox::git::snapshot::SnapshotBounds;

use crate::repo::{Repo, git};

/// Fills a workspace with every configuration by which git runs a program.
fn add_malicious_configuration(dir: &std::path::Path, canary: &std::path::Path) {
    let command = format!("touch {}", canary.display());
    for (key, value) in [
        ("core.fsmonitor", command.as_str()),
        ("core.sshCommand", &command),
        ("core.pager", &command),
        ("core.editor", &command),
        ("core.hooksPath", "evil-hooks"),
        ("core.worktree", "/"),
        ("core.attributesFile", "/etc/passwd"),
        ("diff.evil.textconv", &command),
        ("diff.external", &command),
        ("merge.evil.driver", &command),
        ("filter.evil.clean", &command),
        ("filter.evil.smudge", &command),
        ("filter.evil.process", &command),
        ("filter.evil.required", "true"),
        ("gpg.program", &command),
        ("commit.gpgSign", "true"),
        ("uploadpack.packObjectsHook", &command),
        ("credential.helper", &command),
        ("include.path", "/etc/passwd"),
    ] {
        git(dir, &["config", "--file", ".git/config", key, value]);
    }
    for hooks in [".git/hooks", "evil-hooks"] {
        std::fs::create_dir_all(dir.join(hooks)).unwrap();
        for hook in [
            "pre-commit",
            "post-commit",
            "reference-transaction",
            "post-merge",
            "post-checkout",
        ] {
            let path = dir.join(hooks).join(hook);
            std::fs::write(&path, format!("#!/bin/sh\n{command}\n")).unwrap();
            std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
        }
    }
    std::fs::write(
        dir.join(".gitattributes"),
        "* filter=evil diff=evil merge=evil text eol=crlf ident working-tree-encoding=UTF-16\n",
    )
    .unwrap();
}

#[test]
fn workspace_configuration_runs_no_program() {
    let repo = Repo::with_files();
    let mut fixture = repo.sandbox("fix");
    let canary = repo.temp.path().join("canary");
    add_malicious_configuration(&fixture.dir, &canary);
    fixture.write("src/main.rs", "changed\n");
    fixture.snapshot("work");
    fixture
        .host_repository
        .diff(&fixture.slug, usize::MAX)
        .unwrap();
    fixture.host_repository.log(&fixture.slug, 10).unwrap();
    fixture.host_repository.apply(&fixture.slug).unwrap();
    // Without the attributes, because git itself would rewrite the files with them.
    std::fs::remove_file(repo.dir.join(".gitattributes")).unwrap();
    git(&repo.dir, &["reset", "-q", "--hard"]);
    git(&repo.dir, &["clean", "-qfdx"]);
    fixture
        .host_repository
        .merge(&fixture.slug, MergeMode::Merge, None)
        .unwrap();
    assert!(!canary.exists());
    assert_eq!(
        std::fs::read(repo.dir.join("src/main.rs")).unwrap(),
        b"changed\n"
    );
}

#[test]
fn operators_repository_configuration_runs_no_program() {
    let repo = Repo::with_files();
    let canary = repo.temp.path().join("canary");
    let mut fixture = repo.sandbox("fix");
    fixture.write("src/main.rs", "changed\n");
    let command = format!("touch {}", canary.display());
    for key in [
        "core.fsmonitor",
        "diff.external",
        "filter.evil.clean",
        "filter.evil.smudge",
    ] {
        git(&repo.dir, &["config", key, &command]);
    }
    for hook in ["post-merge", "reference-transaction", "post-index-change"] {
        let path = repo.dir.join(".git/hooks").join(hook);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(&path, format!("#!/bin/sh\n{command}\n")).unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
    }
    fixture.write(".gitattributes", "* filter=evil\n");
    fixture.snapshot("work");
    fixture
        .host_repository
        .diff(&fixture.slug, usize::MAX)
        .unwrap();
    fixture
        .host_repository
        .merge(&fixture.slug, MergeMode::Auto, None)
        .unwrap();
    assert!(!canary.exists());
}

#[test]
fn symbolic_links_are_stored_as_text() {
    let repo = Repo::with_files();
    let secret = repo.temp.path().join("secret");
    std::fs::create_dir(&secret).unwrap();
    std::fs::write(secret.join("key"), "TOP SECRET").unwrap();
    std::fs::write(secret.join(".gitignore"), "*\n").unwrap();
    let mut fixture = repo.sandbox("fix");
    // A file, a tracked directory and an ignore file become links.
    let replace_by_link = |path: &str, to: &std::path::Path| {
        let path = fixture.dir.join(path);
        let _ = std::fs::remove_file(&path);
        let _ = std::fs::remove_dir_all(&path);
        std::os::unix::fs::symlink(to, path).unwrap();
    };
    replace_by_link("README.md", &secret.join("key"));
    replace_by_link("src", &secret);
    replace_by_link(".gitignore", &secret.join(".gitignore"));
    replace_by_link("fresh", std::path::Path::new("/proc/self/root"));
    fixture.snapshot("links");
    let tree = git(&repo.dir, &["ls-tree", "-r", "palisade/fix"]);
    assert!(!tree.contains("src/"), "{tree}");
    assert!(
        tree.lines()
            .filter(|line| line.starts_with("120000"))
            .count()
            >= 5,
        "{tree}"
    );
    for path in ["README.md", "src", ".gitignore"] {
        let text = git(&repo.dir, &["show", &format!("palisade/fix:{path}")]);
        assert!(text.starts_with(secret.to_str().unwrap()), "{text}");
    }
    let objects = git(
        &repo.dir,
        &["cat-file", "--batch-check", "--batch-all-objects"],
    );
    for line in objects.lines().filter(|line| line.contains("blob")) {
        let id = line.split(' ').next().unwrap();
        assert_ne!(git(&repo.dir, &["cat-file", "blob", id]), "TOP SECRET");
    }
}

#[test]
fn dot_git_link_or_file_is_ignored() {
    let repo = Repo::with_files();
    let mut fixture = repo.sandbox("fix");
    std::fs::remove_dir_all(fixture.dir.join(".git")).unwrap();
    std::os::unix::fs::symlink(repo.dir.join(".git"), fixture.dir.join(".git")).unwrap();
    fixture.write("new", "x");
    assert!(fixture.snapshot("work").moved);
    std::fs::remove_file(fixture.dir.join(".git")).unwrap();
    fixture.write(
        ".git",
        &format!("gitdir: {}\n", repo.dir.join(".git").display()),
    );
    fixture.write("new", "y");
    assert!(fixture.snapshot("work").moved);
    assert_eq!(git(&repo.dir, &["show", "palisade/fix:new"]), "y");
}

#[test]
fn merge_never_writes_through_links_in_the_worktree() {
    let repo = Repo::with_files();
    let mut fixture = repo.sandbox("fix");
    fixture.write("out/file", "agent's");
    fixture.snapshot("work");
    let outside = repo.temp.path().join("outside");
    std::fs::create_dir(&outside).unwrap();
    std::os::unix::fs::symlink(&outside, repo.dir.join("out")).unwrap();
    let error = fixture
        .host_repository
        .merge(&fixture.slug, MergeMode::Auto, None)
        .unwrap_err();
    assert!(error.to_string().contains("out/file"), "{error}");
    assert!(!outside.join("file").exists());
}

#[test]
fn commit_message_is_stripped_of_control_characters() {
    let repo = Repo::with_files();
    let mut fixture = repo.sandbox("fix");
    fixture.write("new", "x");
    let message = "bash: \u{1b}[2J\0\r evil".repeat(1000);
    fixture
        .try_snapshot(&message, &SnapshotBounds::default(), None)
        .unwrap();
    let log = fixture.host_repository.log(&fixture.slug, 1).unwrap();
    assert!(!log[0].subject.contains('\u{1b}'), "{log:?}");
}

/// A directory with very many files, to exhaust the listing. `PALISADE_ENTRIES=1000000` makes a
/// million under the gate's default bounds; the tests use fewer.
#[test]
fn directory_with_too_many_names_is_refused_in_time() {
    let setting = std::env::var("PALISADE_ENTRIES").ok();
    let entries: u64 = setting.map_or(50_000, |entries| entries.parse().unwrap());
    let repo = Repo::with_files();
    let mut fixture = repo.sandbox("fix");
    let before = repo.rev("palisade/fix");
    // In memory if possible, because creating the files is the test's own cost.
    let memory = std::path::Path::new("/dev/shm");
    let kept = if memory.is_dir() {
        tempfile::tempdir_in(memory)
    } else {
        tempfile::tempdir()
    };
    let kept = kept.unwrap();
    let workspace = kept.path().join("workspace");
    std::fs::create_dir_all(workspace.join("many")).unwrap();
    for number in 0..entries {
        // Every other name has a newline, and the names are unsorted.
        let name = format!(
            "{}{}{number}",
            number % 97,
            ["-", "\n"][usize::from(number % 2 == 0)]
        );
        std::fs::File::create(workspace.join("many").join(name)).unwrap();
    }
    fixture.dir = workspace;
    let mut request = crate::worker::snapshot_request(&repo, &fixture);
    request.bounds.entries = request.bounds.entries.min(entries / 2);
    let start = std::time::Instant::now();
    let error = crate::worker::worker()
        .snapshot(&request, None)
        .unwrap_err();
    let took = start.elapsed();
    let printed = error.to_string();
    assert!(
        printed.contains("the number of files exceeds the limit"),
        "{printed}"
    );
    assert!(!printed.contains('\n'), "{printed}");
    println!("{entries} entries refused in {took:?}");
    assert!(took.as_secs() < 30, "{took:?}");
    assert_eq!(repo.rev("palisade/fix"), before);
    // Below the limit all files are committed, once each.
    if entries <= 50_000 {
        request.bounds.entries = entries * 2;
        let report = crate::worker::worker().snapshot(&request, None).unwrap();
        assert!(report.moved);
        let taken = git(
            &repo.dir,
            &["ls-tree", "-rz", "--name-only", "palisade/fix"],
        );
        let taken = taken.split('\0').filter(|name| !name.is_empty()).count();
        assert_eq!(taken as u64, entries);
    }
}

#[test]
fn names_with_newlines_are_committed_and_quoted_in_errors() {
    let repo = Repo::with_files();
    let fixture = repo.sandbox("fix");
    fixture.write("new\nline/a\n100644 1 1 1 1 1 1 x", "x");
    let first = crate::worker::snapshot(&repo, &fixture, None);
    assert!(first.moved);
    let again = crate::worker::snapshot(&repo, &fixture, None);
    assert!(!again.moved);
    fixture.write("evil\n\x1b[2J/.GIT/config", "x");
    let request = crate::worker::snapshot_request(&repo, &fixture);
    let error = crate::worker::worker()
        .snapshot(&request, None)
        .unwrap_err();
    let printed = error.to_string();
    assert!(printed.contains("evil\\n\\033[2J/.GIT"), "{printed}");
    assert!(!printed.contains(['\n', '\x1b']), "{printed}");
}
