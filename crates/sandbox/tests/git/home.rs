//! Finding the operator's repository and making branches in it.

use sandbox::git::error::GitError;
use sandbox::git::home::Home;
use sandbox::name::Slug;

use crate::repo::{Repo, fingerprint, git, try_git};

#[test]
fn a_directory_without_a_repository_says_so() {
    let temp = tempfile::tempdir().unwrap();
    let error = Home::discover(temp.path()).err().unwrap();
    assert!(matches!(error, GitError::NotARepository(_)), "{error}");
    assert!(error.to_string().contains("git init"));
}

#[test]
fn a_repository_without_commits_says_what_to_do() {
    let repo = Repo::empty();
    let error = repo.home().head().unwrap_err();
    assert!(matches!(error, GitError::NoCommits(_)), "{error}");
    assert!(error.to_string().contains("git commit"), "{error}");
}

#[test]
fn a_sha256_repository_is_a_clear_error() {
    let temp = tempfile::tempdir().unwrap();
    git(temp.path(), &["init", "-q", "--object-format=sha256"]);
    let error = Home::discover(temp.path()).err().unwrap();
    assert!(matches!(error, GitError::Unsupported { .. }), "{error}");
    assert!(error.to_string().contains("SHA-1"), "{error}");
}

#[test]
fn a_branch_is_made_and_unmade_without_a_trace() {
    let repo = Repo::with_files();
    let home = repo.home();
    let slug = Slug::from_name("fix").unwrap();
    let head = home.head().unwrap();
    assert_eq!(head.branch.as_deref(), Some("refs/heads/main"));
    assert_eq!(home.name(), "project");
    let before = fingerprint(&repo.dir);

    home.create_branch(&slug, head.commit, "made").unwrap();
    assert_eq!(home.tip(&slug).unwrap(), head.commit);
    assert_eq!(
        git(&repo.dir, &["rev-parse", "palisade/fix"]),
        head.commit.to_string()
    );
    let again = home.create_branch(&slug, head.commit, "made").unwrap_err();
    assert!(matches!(again, GitError::BranchExists(_)), "{again}");
    let kept: Vec<_> = fingerprint(&repo.dir)
        .into_iter()
        .filter(|(path, _)| before.contains_key(path))
        .collect();
    assert_eq!(kept, before.into_iter().collect::<Vec<_>>());

    home.delete_branch(&slug, Some(head.commit)).unwrap();
    let gone = home.delete_branch(&slug, None).unwrap_err();
    assert!(matches!(gone, GitError::NoBranch(_)), "{gone}");
}

#[test]
fn undoing_a_branch_never_loses_a_commit_made_since() {
    let repo = Repo::with_files();
    let mut place = repo.sandbox("fix");
    let start = place.home.tip(&place.slug).unwrap();
    place.write("new", "x");
    place.snapshot("work");
    let error = place
        .home
        .delete_branch(&place.slug, Some(start))
        .unwrap_err();
    assert!(matches!(error, GitError::Moved(_)), "{error}");
    git(&repo.dir, &["switch", "-q", "palisade/fix"]);
    let error = place.home.delete_branch(&place.slug, None).unwrap_err();
    assert!(matches!(error, GitError::BranchInUse(_)), "{error}");
    let error = place.try_snapshot("more", &Default::default(), None);
    assert!(error.is_ok(), "nothing changed, nothing moves");
    place.write("new", "y");
    let error = place
        .try_snapshot("more", &Default::default(), None)
        .unwrap_err();
    assert!(matches!(error, GitError::BranchInUse(_)), "{error}");
}

#[test]
fn a_branch_named_palisade_stands_in_the_way() {
    let repo = Repo::with_files();
    git(&repo.dir, &["branch", "palisade"]);
    let home = repo.home();
    let slug = Slug::from_name("fix").unwrap();
    let error = home
        .create_branch(&slug, home.head().unwrap().commit, "made")
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
    let home = Home::discover(&linked.join("src")).unwrap();
    let head = home.head().unwrap();
    assert_eq!(head.branch.as_deref(), Some("refs/heads/other"));
    home.create_branch(&slug, head.commit, "made").unwrap();
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
    let inner = Home::discover(&outer.dir.join("sub")).unwrap();
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
    let home = Home::discover(&bare).unwrap();
    assert_eq!(home.name(), "bare");
    home.create_branch(
        &Slug::from_name("two").unwrap(),
        home.head().unwrap().commit,
        "made",
    )
    .unwrap();
}

#[test]
fn a_repository_of_another_user_is_refused_and_the_way_out_is_named() {
    if !nix::unistd::geteuid().is_root() {
        return; // Only root can give a repository away.
    }
    let repo = Repo::with_files();
    let other = nix::unistd::Uid::from_raw(12345);
    for path in [repo.dir.clone(), repo.dir.join(".git")] {
        nix::unistd::chown(&path, Some(other), None).unwrap();
    }
    let error = Home::discover(&repo.dir).err().unwrap();
    assert!(matches!(error, GitError::NotYours(_)), "{error}");
    assert!(error.to_string().contains("safe.directory"), "{error}");
}
