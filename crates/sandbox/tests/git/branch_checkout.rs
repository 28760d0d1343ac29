//! `palisade checkout`: switching the operator's worktree to the sandbox's branch.

use std::os::unix::fs::PermissionsExt;

use sandbox::git::error::GitError;
use sandbox::git::host_repository::HostRepository;

use crate::repo::{Repo, SandboxFixture, fingerprint, git, listing};

fn with_work(repo: &Repo) -> SandboxFixture {
    let mut fixture = repo.sandbox("fix");
    fixture.write("src/main.rs", "fn main() { agent() }\n");
    fixture.write(".envrc", "echo hello\n");
    std::fs::remove_file(fixture.dir.join("README.md")).unwrap();
    fixture.snapshot("work");
    fixture
}

#[test]
fn checkout_switches_files_index_and_head_and_back() {
    let repo = Repo::with_files();
    let fixture = with_work(&repo);
    let hooks = repo.dir.join(".git/hooks");
    std::fs::create_dir_all(&hooks).unwrap();
    let canary = repo.temp.path().join("canary");
    for hook in ["post-checkout", "reference-transaction"] {
        let path = hooks.join(hook);
        std::fs::write(&path, format!("#!/bin/sh\ntouch {}\n", canary.display())).unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
    }
    let requested = fixture
        .host_repository
        .checkout_sensitive_paths(&fixture.slug)
        .unwrap();
    let requested: Vec<_> = requested.iter().map(ToString::to_string).collect();
    assert_eq!(
        requested,
        [".envrc (runs when a shell enters the directory)"]
    );
    let outcome = fixture.host_repository.checkout(&fixture.slug).unwrap();
    assert_eq!(outcome.branch, "palisade/fix");
    assert_eq!(outcome.commit, repo.rev("palisade/fix"));
    let paths: Vec<_> = outcome
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
    let again = fixture.host_repository.checkout(&fixture.slug).unwrap();
    assert_eq!(again.paths, Vec::<Vec<u8>>::new());
    git(&repo.dir, &["switch", "-q", "main"]);
    assert_eq!(git(&repo.dir, &["status", "--porcelain"]), "");
}

#[test]
fn checkout_refuses_to_overwrite_changes_and_keeps_others() {
    let repo = Repo::with_files();
    let fixture = with_work(&repo);
    repo.write("src/lib.rs", "mine\n");
    repo.write("notes", "mine\n");
    repo.write("src/main.rs", "mine\n");
    repo.write(".envrc", "mine\n");
    let before = fingerprint(&repo.dir);
    let error = fixture.host_repository.checkout(&fixture.slug).unwrap_err();
    assert!(matches!(error, GitError::Dirty(_)), "{error}");
    let printed = error.to_string();
    assert!(
        printed.contains("src/main.rs") && printed.contains(".envrc"),
        "{printed}"
    );
    assert!(!printed.contains("src/lib.rs"), "{printed}");
    assert_eq!(fingerprint(&repo.dir), before);
    git(&repo.dir, &["checkout", "-q", "src/main.rs"]);
    std::fs::remove_file(repo.dir.join(".envrc")).unwrap();
    fixture.host_repository.checkout(&fixture.slug).unwrap();
    assert_eq!(
        git(&repo.dir, &["status", "--porcelain"]),
        " M src/lib.rs\n?? notes"
    );
}

#[test]
fn snapshot_is_refused_while_branch_is_checked_out() {
    let repo = Repo::with_files();
    let mut fixture = with_work(&repo);
    fixture.host_repository.checkout(&fixture.slug).unwrap();
    fixture.write("more", "x");
    let bounds = sandbox::git::snapshot::SnapshotBounds::default();
    let refused = fixture.try_snapshot("work", &bounds, None);
    assert!(matches!(refused, Err(GitError::BranchInUse(_))));
    assert_eq!(git(&repo.dir, &["status", "--porcelain"]), "");
    git(&repo.dir, &["switch", "-q", "main"]);
    assert!(fixture.snapshot("work").moved);
    assert!(listing(&repo.dir, "palisade/fix").contains(" more\n"));
}

#[test]
fn checkout_works_from_detached_head_and_linked_worktree() {
    let repo = Repo::with_files();
    let fixture = with_work(&repo);
    let main = fingerprint(&repo.dir);
    let linked = repo.temp.path().join("linked");
    let path = linked.to_str().unwrap();
    git(&repo.dir, &["worktree", "add", "-q", "--detach", path]);
    let there = HostRepository::discover(&linked).unwrap();
    there.checkout(&fixture.slug).unwrap();
    assert_eq!(git(&linked, &["branch", "--show-current"]), "palisade/fix");
    assert_eq!(git(&linked, &["status", "--porcelain"]), "");
    for path in ["README.md", ".git/HEAD", ".git/index"] {
        let path = std::path::Path::new(path);
        assert_eq!(fingerprint(&repo.dir).get(path), main.get(path));
    }
    let taken = fixture.host_repository.checkout(&fixture.slug).unwrap_err();
    assert!(matches!(taken, GitError::BranchInUse(_)), "{taken}");
    git(&repo.dir, &["worktree", "remove", "--force", path]);
    std::fs::write(
        repo.dir.join(".git/MERGE_HEAD"),
        repo.rev("HEAD").to_string(),
    )
    .unwrap();
    let busy = fixture.host_repository.checkout(&fixture.slug).unwrap_err();
    assert!(matches!(busy, GitError::Busy { .. }), "{busy}");
}
