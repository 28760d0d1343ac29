//! Discovery of the operator's repository, and its branches.

use sandbox::git::error::GitError;
use sandbox::git::host_repository::HostRepository;
use sandbox::name::Slug;

use crate::repo::{Repo, fingerprint, git, try_git};

#[test]
fn directory_without_repository_is_a_clear_error() {
    let temp = tempfile::tempdir().unwrap();
    let error = HostRepository::discover(temp.path()).err().unwrap();
    assert!(matches!(error, GitError::NotARepository(_)), "{error}");
    assert!(error.to_string().contains("git init"));
}

#[test]
fn repository_without_commits_error_names_the_remedy() {
    let repo = Repo::empty();
    let error = repo.host_repository().head().unwrap_err();
    assert!(matches!(error, GitError::NoCommits(_)), "{error}");
    assert!(error.to_string().contains("git commit"), "{error}");
}

#[test]
fn a_sha256_repository_is_a_clear_error() {
    let temp = tempfile::tempdir().unwrap();
    git(temp.path(), &["init", "-q", "--object-format=sha256"]);
    let error = HostRepository::discover(temp.path()).err().unwrap();
    assert!(matches!(error, GitError::Unsupported { .. }), "{error}");
    assert!(error.to_string().contains("SHA-1"), "{error}");
}

#[test]
fn branch_created_and_deleted_leaves_no_trace() {
    let repo = Repo::with_files();
    let host_repository = repo.host_repository();
    let slug = Slug::from_name("fix").unwrap();
    let head = host_repository.head().unwrap();
    assert_eq!(head.branch.as_deref(), Some("refs/heads/main"));
    assert_eq!(host_repository.name(), "project");
    let before = fingerprint(&repo.dir);

    host_repository
        .create_branch(&slug, head.commit, "made")
        .unwrap();
    assert_eq!(host_repository.tip(&slug).unwrap(), head.commit);
    assert_eq!(
        git(&repo.dir, &["rev-parse", "palisade/fix"]),
        head.commit.to_string()
    );
    let again = host_repository
        .create_branch(&slug, head.commit, "made")
        .unwrap_err();
    assert!(matches!(again, GitError::BranchExists(_)), "{again}");
    let kept: Vec<_> = fingerprint(&repo.dir)
        .into_iter()
        .filter(|(path, _)| before.contains_key(path))
        .collect();
    assert_eq!(kept, before.into_iter().collect::<Vec<_>>());

    host_repository
        .delete_branch(&slug, Some(head.commit))
        .unwrap();
    let gone = host_repository.delete_branch(&slug, None).unwrap_err();
    assert!(matches!(gone, GitError::NoBranch(_)), "{gone}");
}

#[test]
fn delete_branch_keeps_later_commits() {
    let repo = Repo::with_files();
    let mut fixture = repo.sandbox("fix");
    let start = fixture.host_repository.tip(&fixture.slug).unwrap();
    fixture.write("new", "x");
    fixture.snapshot("work");
    let error = fixture
        .host_repository
        .delete_branch(&fixture.slug, Some(start))
        .unwrap_err();
    assert!(matches!(error, GitError::Moved(_)), "{error}");
    git(&repo.dir, &["switch", "-q", "palisade/fix"]);
    let error = fixture
        .host_repository
        .delete_branch(&fixture.slug, None)
        .unwrap_err();
    assert!(matches!(error, GitError::BranchInUse(_)), "{error}");
    let error = fixture.try_snapshot("more", &Default::default(), None);
    assert!(error.is_ok(), "an unchanged branch can be deleted");
    fixture.write("new", "y");
    let error = fixture
        .try_snapshot("more", &Default::default(), None)
        .unwrap_err();
    assert!(matches!(error, GitError::BranchInUse(_)), "{error}");
}

#[test]
fn branch_named_palisade_blocks_creation() {
    let repo = Repo::with_files();
    git(&repo.dir, &["branch", "palisade"]);
    let host_repository = repo.host_repository();
    let slug = Slug::from_name("fix").unwrap();
    let error = host_repository
        .create_branch(&slug, host_repository.head().unwrap().commit, "made")
        .unwrap_err();
    assert!(matches!(error, GitError::BranchBlocked(_)), "{error}");
}

#[test]
fn a_linked_worktree_a_submodule_and_a_bare_repository_work() {
    let repo = Repo::with_files();
    let slug = Slug::from_name("fix").unwrap();

    let linked = repo.temp.path().join("linked");
    git(
        &repo.dir,
        &[
            "worktree",
            "add",
            "-q",
            "-b",
            "other",
            linked.to_str().unwrap(),
        ],
    );
    let host_repository = HostRepository::discover(&linked.join("src")).unwrap();
    let head = host_repository.head().unwrap();
    assert_eq!(head.branch.as_deref(), Some("refs/heads/other"));
    host_repository
        .create_branch(&slug, head.commit, "made")
        .unwrap();
    assert_eq!(repo.rev("palisade/fix"), head.commit);

    let outer = Repo::with_files();
    let url = repo.dir.to_str().unwrap();
    let add = [
        "-c",
        "protocol.file.allow=always",
        "submodule",
        "--quiet",
        "add",
        url,
        "sub",
    ];
    git(&outer.dir, &add);
    outer.commit("with a submodule");
    let inner = HostRepository::discover(&outer.dir.join("sub")).unwrap();
    inner
        .create_branch(&slug, inner.head().unwrap().commit, "made")
        .unwrap();
    assert!(try_git(&outer.dir.join("sub"), &["rev-parse", "palisade/fix"]).0);
    assert!(!try_git(&outer.dir, &["rev-parse", "palisade/fix"]).0);

    let bare = repo.temp.path().join("bare.git");
    git(
        &repo.dir,
        &["clone", "-q", "--bare", ".", bare.to_str().unwrap()],
    );
    let host_repository = HostRepository::discover(&bare).unwrap();
    assert_eq!(host_repository.name(), "bare");
    host_repository
        .create_branch(
            &Slug::from_name("two").unwrap(),
            host_repository.head().unwrap().commit,
            "made",
        )
        .unwrap();
}

#[test]
fn repository_of_another_user_is_refused_with_remedy() {
    if !nix::unistd::geteuid().is_root() {
        return; // Only root can give a repository away.
    }
    let repo = Repo::with_files();
    let other = nix::unistd::Uid::from_raw(12345);
    for path in [repo.dir.clone(), repo.dir.join(".git")] {
        nix::unistd::chown(&path, Some(other), None).unwrap();
    }
    let error = HostRepository::discover(&repo.dir).err().unwrap();
    assert!(matches!(error, GitError::OtherOwner(_)), "{error}");
    assert!(error.to_string().contains("safe.directory"), "{error}");
}
