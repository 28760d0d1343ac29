//! A workspace that wants to run something on the host, or read from it.

use std::os::unix::fs::PermissionsExt;

use sandbox::git::merge::Manner;
use sandbox::git::snapshot::Bounds;

use crate::repo::{Repo, git};

/// Fills a workspace with every door that git has for running a program.
fn booby_trap(dir: &std::path::Path, canary: &std::path::Path) {
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
fn nothing_that_a_workspace_configures_runs() {
    let repo = Repo::with_files();
    let mut place = repo.sandbox("fix");
    let canary = repo.temp.path().join("canary");
    booby_trap(&place.dir, &canary);
    place.write("src/main.rs", "changed\n");
    place.snapshot("work");
    place.home.diff(&place.slug, usize::MAX).unwrap();
    place.home.log(&place.slug, 10).unwrap();
    place.home.apply(&place.slug).unwrap();
    // Without the attributes, or git itself would rewrite the files by them.
    std::fs::remove_file(repo.dir.join(".gitattributes")).unwrap();
    git(&repo.dir, &["reset", "-q", "--hard"]);
    git(&repo.dir, &["clean", "-qfdx"]);
    place.home.merge(&place.slug, Manner::Merge, None).unwrap();
    assert!(!canary.exists());
    assert_eq!(
        std::fs::read(repo.dir.join("src/main.rs")).unwrap(),
        b"changed\n"
    );
}

#[test]
fn nothing_that_the_operators_own_repository_configures_runs_either() {
    let repo = Repo::with_files();
    let canary = repo.temp.path().join("canary");
    let mut place = repo.sandbox("fix");
    place.write("src/main.rs", "changed\n");
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
    place.write(".gitattributes", "* filter=evil\n");
    place.snapshot("work");
    place.home.diff(&place.slug, usize::MAX).unwrap();
    place.home.merge(&place.slug, Manner::Auto, None).unwrap();
    assert!(!canary.exists());
}

#[test]
fn a_link_to_the_host_is_text_wherever_it_stands() {
    let repo = Repo::with_files();
    let secret = repo.temp.path().join("secret");
    std::fs::create_dir(&secret).unwrap();
    std::fs::write(secret.join("key"), "TOP SECRET").unwrap();
    std::fs::write(secret.join(".gitignore"), "*\n").unwrap();
    let mut place = repo.sandbox("fix");
    // A file, a tracked directory and an ignore file become links.
    let swap = |path: &str, to: &std::path::Path| {
        let path = place.dir.join(path);
        let _ = std::fs::remove_file(&path);
        let _ = std::fs::remove_dir_all(&path);
        std::os::unix::fs::symlink(to, path).unwrap();
    };
    swap("README.md", &secret.join("key"));
    swap("src", &secret);
    swap(".gitignore", &secret.join(".gitignore"));
    swap("fresh", std::path::Path::new("/proc/self/root"));
    place.snapshot("links");
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
fn a_dot_git_that_is_a_link_or_a_file_does_not_matter() {
    let repo = Repo::with_files();
    let mut place = repo.sandbox("fix");
    std::fs::remove_dir_all(place.dir.join(".git")).unwrap();
    std::os::unix::fs::symlink(repo.dir.join(".git"), place.dir.join(".git")).unwrap();
    place.write("new", "x");
    assert!(place.snapshot("work").moved);
    std::fs::remove_file(place.dir.join(".git")).unwrap();
    place.write(
        ".git",
        &format!("gitdir: {}\n", repo.dir.join(".git").display()),
    );
    place.write("new", "y");
    assert!(place.snapshot("work").moved);
    assert_eq!(git(&repo.dir, &["show", "palisade/fix:new"]), "y");
}

#[test]
fn merging_never_writes_through_a_link_in_the_operators_worktree() {
    let repo = Repo::with_files();
    let mut place = repo.sandbox("fix");
    place.write("out/file", "agent's");
    place.snapshot("work");
    let outside = repo.temp.path().join("outside");
    std::fs::create_dir(&outside).unwrap();
    std::os::unix::fs::symlink(&outside, repo.dir.join("out")).unwrap();
    let error = place
        .home
        .merge(&place.slug, Manner::Auto, None)
        .unwrap_err();
    assert!(error.to_string().contains("out/file"), "{error}");
    assert!(!outside.join("file").exists());
}

#[test]
fn a_hostile_message_is_one_that_cannot_forge() {
    let repo = Repo::with_files();
    let mut place = repo.sandbox("fix");
    place.write("new", "x");
    let message = "bash: \u{1b}[2J\0\r evil".repeat(1000);
    place
        .try_snapshot(&message, &Bounds::default(), None)
        .unwrap();
    let log = place.home.log(&place.slug, 1).unwrap();
    assert!(!log[0].subject.contains('\u{1b}'), "{log:?}");
}

/// A directory of so many files that listing it is the attack. `PALISADE_ENTRIES=1000000`
/// makes it a million under the bounds that a gate uses; the tests take fewer.
#[test]
fn a_directory_of_very_many_names_is_refused_in_bounded_time() {
    let asked = std::env::var("PALISADE_ENTRIES").ok();
    let entries: u64 = asked.map_or(50_000, |entries| entries.parse().unwrap());
    let repo = Repo::with_files();
    let mut place = repo.sandbox("fix");
    let before = repo.rev("palisade/fix");
    // In memory, where there is any: the files are the test's own effort.
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
        // Every other name holds a newline, and none is in order.
        let name = format!(
            "{}{}{number}",
            number % 97,
            ["-", "\n"][usize::from(number % 2 == 0)]
        );
        std::fs::File::create(workspace.join("many").join(name)).unwrap();
    }
    place.dir = workspace;
    let mut order = crate::worker::order(&repo, &place);
    order.bounds.entries = order.bounds.entries.min(entries / 2);
    let start = std::time::Instant::now();
    let error = crate::worker::worker().snapshot(&order, None).unwrap_err();
    let took = start.elapsed();
    let said = error.to_string();
    assert!(
        said.contains("the number of files is over its bound"),
        "{said}"
    );
    assert!(!said.contains('\n'), "{said}");
    println!("{entries} entries refused in {took:?}");
    assert!(took.as_secs() < 30, "{took:?}");
    assert_eq!(repo.rev("palisade/fix"), before);
    // Under the bound all of it is taken, and nothing twice.
    if entries <= 50_000 {
        order.bounds.entries = entries * 2;
        let report = crate::worker::worker().snapshot(&order, None).unwrap();
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
fn names_with_newlines_come_home_and_a_refusal_is_one_line() {
    let repo = Repo::with_files();
    let place = repo.sandbox("fix");
    place.write("new\nline/a\n100644 1 1 1 1 1 1 x", "x");
    let first = crate::worker::snapshot(&repo, &place, None);
    assert!(first.moved);
    let again = crate::worker::snapshot(&repo, &place, None);
    assert!(!again.moved);
    place.write("evil\n\x1b[2J/.GIT/config", "x");
    let order = crate::worker::order(&repo, &place);
    let error = crate::worker::worker().snapshot(&order, None).unwrap_err();
    let said = error.to_string();
    assert!(said.contains("evil\\n\\033[2J/.GIT"), "{said}");
    assert!(!said.contains(['\n', '\x1b']), "{said}");
}
