//! Every kind of repository an operator may have: from create to merge and nothing else moves.

use std::path::{Path, PathBuf};

use sandbox::git::error::GitError;
use sandbox::git::home::Home;
use sandbox::git::merge::Manner;
use sandbox::git::workspace::Plan;
use sandbox::name::Slug;
use sandbox::worker::SnapshotReport;

use crate::repo::{Place, Repo, fingerprint, git, listing, write};
use crate::worker::{bundle, worker};

/// A sandbox of the repository that `dir` is in.
fn create(repo: &Repo, dir: &Path, name: &str, depth: Option<u32>) -> Place {
    let home = Home::discover(dir).unwrap();
    let slug = Slug::from_name(name).unwrap();
    let plan = Plan {
        commit: home.head().unwrap().commit,
        depth,
        dirty: false,
    };
    home.create_branch(&slug, plan.commit, "made").unwrap();
    let dir: PathBuf = repo.temp.path().join(format!("workspace-{name}"));
    let manifest = repo
        .checkouts()
        .create_workspace(&home, &plan, &slug, &dir, None)
        .unwrap();
    Place {
        home,
        slug,
        dir,
        manifest,
    }
}

/// The agent commits something, leaves something uncommitted, and all of it comes home.
fn work(repo: &Repo, home: &Path, place: &Place) -> SnapshotReport {
    let base = git(&place.dir, &["rev-parse", "HEAD"]);
    write(&place.dir, "committed", place.slug.as_str());
    git(&place.dir, &["add", "-A"]);
    git(&place.dir, &["commit", "-q", "-m", "agent's own"]);
    write(&place.dir, "loose", "x\n");
    let mut order = crate::worker::order(repo, place);
    order.repository = home.to_owned();
    let pack = bundle(place, &["HEAD", &format!("^{base}")]);
    let report = worker().snapshot(&order, Some(pack)).unwrap();
    assert_eq!((report.commits, report.import_error.as_deref()), (1, None));
    assert!(report.moved);
    let changes = place.home.diff(&place.slug, usize::MAX).unwrap();
    let paths: Vec<_> = changes.files.iter().map(|file| file.path.clone()).collect();
    assert_eq!(paths, [b"committed".to_vec(), b"loose".to_vec()]);
    report
}

#[test]
fn a_shallow_workspace_has_as_many_commits_as_asked_and_its_own_come_home() {
    let repo = Repo::with_files();
    for number in 0..4 {
        repo.write("count", &number.to_string());
        repo.commit("more");
    }
    let place = create(&repo, &repo.dir, "fix", Some(2));
    assert_eq!(git(&place.dir, &["log", "--format=%s"]), "more\nmore");
    assert_eq!(
        git(&place.dir, &["rev-parse", "--is-shallow-repository"]),
        "true"
    );
    git(&place.dir, &["fsck", "--strict", "--full"]);
    work(&repo, &repo.dir, &place);
    let log = git(&repo.dir, &["log", "--format=%s", "-3", "palisade/fix"]);
    assert_eq!(log, "bash: make\nagent's own\nmore");
    assert_eq!(
        git(&repo.dir, &["rev-list", "--count", "palisade/fix"]),
        "8"
    );
    // A bundle of everything the shallow repository has comes in as well.
    git(&place.dir, &["add", "-A"]);
    git(&place.dir, &["commit", "-q", "-m", "and more"]);
    let report = crate::worker::snapshot(&repo, &place, Some(bundle(&place, &["HEAD"])));
    assert_eq!((report.commits, report.import_error.as_deref()), (1, None));
    assert!(
        place
            .home
            .merge(&place.slug, Manner::Auto, None)
            .unwrap()
            .moved
    );
    assert_eq!(git(&repo.dir, &["status", "--porcelain"]), "");
    git(&repo.dir, &["fsck", "--strict", "--full"]);
}

#[test]
fn a_shallow_clone_of_the_operators_works() {
    let repo = Repo::with_files();
    repo.write("third", "x");
    repo.commit("third");
    let clone = repo.temp.path().join("clone");
    let url = format!("file://{}", repo.dir.display());
    let path = clone.to_str().unwrap();
    git(&repo.dir, &["clone", "-q", "--depth", "1", &url, path]);
    for (name, depth) in [("all", None), ("one", Some(1)), ("many", Some(9))] {
        let place = create(&repo, &clone, name, depth);
        assert_eq!(git(&place.dir, &["log", "--format=%s"]), "third", "{name}");
        assert_eq!(git(&place.dir, &["status", "--porcelain"]), "");
        git(&place.dir, &["fsck", "--strict", "--full"]);
        work(&repo, &clone, &place);
    }
    let slug = Slug::from_name("one").unwrap();
    let home = Home::discover(&clone).unwrap();
    assert!(home.merge(&slug, Manner::Auto, None).unwrap().moved);
    git(&clone, &["fsck", "--strict", "--full"]);
}

#[test]
fn a_submodule_is_an_empty_directory_inside_and_survives() {
    let library = Repo::with_files();
    let repo = Repo::with_files();
    let url = library.dir.to_str().unwrap();
    let allow = "protocol.file.allow=always";
    git(
        &repo.dir,
        &["-c", allow, "submodule", "add", "-q", url, "lib"],
    );
    repo.commit("with a submodule");
    let before = git(&repo.dir, &["ls-tree", "HEAD", "lib"]);
    let place = create(&repo, &repo.dir, "fix", None);
    assert_eq!(std::fs::read_dir(place.dir.join("lib")).unwrap().count(), 0);
    assert_eq!(git(&place.dir, &["status", "--porcelain"]), "");
    // What an agent puts there is not the operator's submodule's business.
    write(&place.dir, "lib/planted", "x");
    work(&repo, &repo.dir, &place);
    assert_eq!(git(&repo.dir, &["ls-tree", "palisade/fix", "lib"]), before);
    assert!(!listing(&repo.dir, "palisade/fix").contains("planted"));
    place.home.merge(&place.slug, Manner::Auto, None).unwrap();
    assert_eq!(git(&repo.dir, &["status", "--porcelain"]), "");
    assert!(repo.dir.join("lib/README.md").exists());
    // A whole submodule as the operator's repository.
    let place = create(&repo, &repo.dir.join("lib"), "inner", None);
    work(&repo, &repo.dir.join("lib"), &place);
    place.home.merge(&place.slug, Manner::Auto, None).unwrap();
    assert_eq!(git(&repo.dir.join("lib"), &["status", "--porcelain"]), "");
    assert_eq!(git(&repo.dir, &["ls-tree", "HEAD", "lib"]), before);
}

#[test]
fn a_linked_worktree_works_and_the_main_one_does_not_notice() {
    let repo = Repo::with_files();
    let linked = repo.temp.path().join("linked");
    let path = linked.to_str().unwrap();
    git(&repo.dir, &["worktree", "add", "-q", "-b", "side", path]);
    let before = fingerprint(&repo.dir);
    let place = create(&repo, &linked, "fix", None);
    work(&repo, &linked, &place);
    // The branch is in the common repository.
    assert_eq!(
        git(&repo.dir, &["rev-parse", "palisade/fix"]),
        git(&linked, &["rev-parse", "palisade/fix"])
    );
    place.home.merge(&place.slug, Manner::Auto, None).unwrap();
    assert_eq!(git(&linked, &["status", "--porcelain"]), "");
    assert_eq!(
        git(&linked, &["log", "-1", "--format=%s", "side"]),
        "bash: make"
    );
    let after = fingerprint(&repo.dir);
    for path in [
        ".git/HEAD",
        ".git/index",
        ".git/config",
        ".git/refs/heads/main",
    ] {
        let path = Path::new(path);
        assert_eq!(before.get(path), after.get(path), "{path:?}");
    }
    assert_eq!(git(&repo.dir, &["status", "--porcelain"]), "");
    git(&repo.dir, &["fsck", "--strict", "--full"]);
}

#[test]
fn a_bare_repository_does_what_needs_no_worktree() {
    let repo = Repo::with_files();
    let bare = repo.temp.path().join("bare.git");
    let path = bare.to_str().unwrap();
    git(&repo.dir, &["clone", "-q", "--bare", ".", path]);
    let place = create(&repo, &bare, "fix", None);
    work(&repo, &bare, &place);
    for refused in [
        place.home.apply(&place.slug).map(|_| ()),
        place.home.checkout(&place.slug).map(|_| ()),
    ] {
        assert!(matches!(refused, Err(GitError::Bare(_))), "{refused:?}");
    }
    assert!(
        place
            .home
            .merge(&place.slug, Manner::Auto, None)
            .unwrap()
            .moved
    );
    assert_eq!(git(&bare, &["log", "-1", "--format=%s"]), "bash: make");
    git(&bare, &["fsck", "--strict", "--full"]);
}

#[test]
fn a_repository_without_a_commit_and_one_of_sha256_say_so_to_the_worker_too() {
    let empty = Repo::empty();
    let error = empty.home().head().unwrap_err();
    assert!(error.to_string().contains("no commit yet"), "{error}");
    let full = Repo::with_files();
    let place = full.sandbox("fix");
    let mut order = crate::worker::order(&full, &place);
    order.repository = empty.dir.clone();
    let error = worker().snapshot(&order, None).unwrap_err();
    assert!(error.to_string().contains("does not exist"), "{error}");
    let other = full.temp.path().join("sha256");
    std::fs::create_dir(&other).unwrap();
    git(&other, &["init", "-q", "--object-format=sha256"]);
    order.repository = other;
    let error = worker().snapshot(&order, None).unwrap_err();
    assert!(error.to_string().contains("SHA-1"), "{error}");
}
