//! `palisade checkout`: the operator's worktree goes to the sandbox's branch.

use std::os::unix::fs::PermissionsExt;

use sandbox::git::error::GitError;
use sandbox::git::home::Home;

use crate::repo::{Place, Repo, fingerprint, git, listing};

fn worked(repo: &Repo) -> Place {
    let mut place = repo.sandbox("fix");
    place.write("src/main.rs", "fn main() { agent() }\n");
    place.write(".envrc", "echo hello\n");
    std::fs::remove_file(place.dir.join("README.md")).unwrap();
    place.snapshot("work");
    place
}

#[test]
fn files_index_and_head_go_together_and_back_again() {
    let repo = Repo::with_files();
    let place = worked(&repo);
    let hooks = repo.dir.join(".git/hooks");
    std::fs::create_dir_all(&hooks).unwrap();
    let canary = repo.temp.path().join("canary");
    for hook in ["post-checkout", "reference-transaction"] {
        let path = hooks.join(hook);
        std::fs::write(&path, format!("#!/bin/sh\ntouch {}\n", canary.display())).unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
    }
    let asked = place.home.checkout_steering(&place.slug).unwrap();
    let asked: Vec<_> = asked.iter().map(ToString::to_string).collect();
    assert_eq!(asked, [".envrc (runs when a shell enters the directory)"]);
    let switched = place.home.checkout(&place.slug).unwrap();
    assert_eq!(switched.branch, "palisade/fix");
    assert_eq!(switched.commit, repo.rev("palisade/fix"));
    let paths: Vec<_> = switched
        .paths
        .iter()
        .map(|p| String::from_utf8_lossy(p))
        .collect();
    assert_eq!(paths, [".envrc", "README.md", "src/main.rs"]);
    assert!(!canary.exists());
    std::fs::remove_dir_all(hooks).unwrap();
    assert_eq!(
        git(&repo.dir, &["branch", "--show-current"]),
        "palisade/fix"
    );
    assert_eq!(git(&repo.dir, &["status", "--porcelain"]), "");
    assert!(!repo.dir.join("README.md").exists());
    let again = place.home.checkout(&place.slug).unwrap();
    assert_eq!(again.paths, Vec::<Vec<u8>>::new());
    git(&repo.dir, &["switch", "-q", "main"]);
    assert_eq!(git(&repo.dir, &["status", "--porcelain"]), "");
}

#[test]
fn the_operators_changes_stop_it_where_they_would_be_lost_and_else_stay() {
    let repo = Repo::with_files();
    let place = worked(&repo);
    repo.write("src/lib.rs", "mine\n");
    repo.write("notes", "mine\n");
    repo.write("src/main.rs", "mine\n");
    repo.write(".envrc", "mine\n");
    let before = fingerprint(&repo.dir);
    let error = place.home.checkout(&place.slug).unwrap_err();
    assert!(matches!(error, GitError::Dirty(_)), "{error}");
    let said = error.to_string();
    assert!(
        said.contains("src/main.rs") && said.contains(".envrc"),
        "{said}"
    );
    assert!(!said.contains("src/lib.rs"), "{said}");
    assert_eq!(fingerprint(&repo.dir), before);
    git(&repo.dir, &["checkout", "-q", "src/main.rs"]);
    std::fs::remove_file(repo.dir.join(".envrc")).unwrap();
    place.home.checkout(&place.slug).unwrap();
    assert_eq!(
        git(&repo.dir, &["status", "--porcelain"]),
        " M src/lib.rs\n?? notes"
    );
}

#[test]
fn a_snapshot_waits_until_the_operator_has_left_the_branch() {
    let repo = Repo::with_files();
    let mut place = worked(&repo);
    place.home.checkout(&place.slug).unwrap();
    place.write("more", "x");
    let bounds = sandbox::git::snapshot::Bounds::default();
    let refused = place.try_snapshot("work", &bounds, None);
    assert!(matches!(refused, Err(GitError::BranchInUse(_))));
    assert_eq!(git(&repo.dir, &["status", "--porcelain"]), "");
    git(&repo.dir, &["switch", "-q", "main"]);
    assert!(place.snapshot("work").moved);
    assert!(listing(&repo.dir, "palisade/fix").contains(" more\n"));
}

#[test]
fn a_detached_head_and_a_linked_worktree_switch_and_others_are_told_why_not() {
    let repo = Repo::with_files();
    let place = worked(&repo);
    let main = fingerprint(&repo.dir);
    let linked = repo.temp.path().join("linked");
    let path = linked.to_str().unwrap();
    git(&repo.dir, &["worktree", "add", "-q", "--detach", path]);
    let there = Home::discover(&linked).unwrap();
    there.checkout(&place.slug).unwrap();
    assert_eq!(git(&linked, &["branch", "--show-current"]), "palisade/fix");
    assert_eq!(git(&linked, &["status", "--porcelain"]), "");
    for path in ["README.md", ".git/HEAD", ".git/index"] {
        let path = std::path::Path::new(path);
        assert_eq!(fingerprint(&repo.dir).get(path), main.get(path));
    }
    let taken = place.home.checkout(&place.slug).unwrap_err();
    assert!(matches!(taken, GitError::BranchInUse(_)), "{taken}");
    git(&repo.dir, &["worktree", "remove", "--force", path]);
    std::fs::write(
        repo.dir.join(".git/MERGE_HEAD"),
        repo.rev("HEAD").to_string(),
    )
    .unwrap();
    let busy = place.home.checkout(&place.slug).unwrap_err();
    assert!(matches!(busy, GitError::Busy { .. }), "{busy}");
}
