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
