//! Snapshot and merge with every kind of operator's repository.

use std::path::{Path, PathBuf};

use sandbox::git::error::GitError;
use sandbox::git::host_repository::HostRepository;
use sandbox::git::merge::MergeMode;
use sandbox::git::workspace::WorkspacePlan;
use sandbox::name::Slug;
use sandbox::worker::SnapshotReport;

use crate::repo::{Repo, SandboxFixture, fingerprint, git, listing, write};
use crate::worker::{bundle, worker};

/// Creates a sandbox of the repository at `dir`.
fn create(repo: &Repo, dir: &Path, name: &str, depth: Option<u32>) -> SandboxFixture {
    let host_repository = HostRepository::discover(dir).unwrap();
    let slug = Slug::from_name(name).unwrap();
    let plan = WorkspacePlan {
        commit: host_repository.head().unwrap().commit,
        depth,
        dirty: false,
    };
    host_repository
        .create_branch(&slug, plan.commit, "made")
        .unwrap();
    let dir: PathBuf = repo.temp.path().join(format!("workspace-{name}"));
    let manifest = repo
        .checkouts()
        .create_workspace(&host_repository, &plan, &slug, &dir, None)
        .unwrap();
    SandboxFixture {
        host_repository,
        slug,
        dir,
        manifest,
    }
}

/// The agent commits one file and leaves another uncommitted; both are merged.
fn work(repo: &Repo, host_repository: &Path, fixture: &SandboxFixture) -> SnapshotReport {
    let base = git(&fixture.dir, &["rev-parse", "HEAD"]);
    write(&fixture.dir, "committed", fixture.slug.as_str());
    git(&fixture.dir, &["add", "-A"]);
    git(&fixture.dir, &["commit", "-q", "-m", "agent's own"]);
    write(&fixture.dir, "loose", "x\n");
    let mut request = crate::worker::snapshot_request(repo, fixture);
    request.repository = host_repository.to_owned();
    let pack = bundle(fixture, &["HEAD", &format!("^{base}")]);
    let report = worker().snapshot(&request, Some(pack)).unwrap();
    assert_eq!((report.commits, report.import_error.as_deref()), (1, None));
    assert!(report.moved);
    let changes = fixture
        .host_repository
        .diff(&fixture.slug, usize::MAX)
        .unwrap();
    let paths: Vec<_> = changes.files.iter().map(|file| file.path.clone()).collect();
    assert_eq!(paths, [b"committed".to_vec(), b"loose".to_vec()]);
    report
}

#[test]
fn shallow_workspace_has_requested_depth_and_is_merged() {
    let repo = Repo::with_files();
    for number in 0..4 {
        repo.write("count", &number.to_string());
        repo.commit("more");
    }
    let fixture = create(&repo, &repo.dir, "fix", Some(2));
    assert_eq!(git(&fixture.dir, &["log", "--format=%s"]), "more\nmore");
    assert_eq!(
        git(&fixture.dir, &["rev-parse", "--is-shallow-repository"]),
        "true"
    );
    git(&fixture.dir, &["fsck", "--strict", "--full"]);
    work(&repo, &repo.dir, &fixture);
    let log = git(&repo.dir, &["log", "--format=%s", "-3", "palisade/fix"]);
    assert_eq!(log, "bash: make\nagent's own\nmore");
    assert_eq!(
        git(&repo.dir, &["rev-list", "--count", "palisade/fix"]),
        "8"
    );
    // A bundle of the whole shallow repository is imported as well.
    git(&fixture.dir, &["add", "-A"]);
    git(&fixture.dir, &["commit", "-q", "-m", "and more"]);
    let report = crate::worker::snapshot(&repo, &fixture, Some(bundle(&fixture, &["HEAD"])));
    assert_eq!((report.commits, report.import_error.as_deref()), (1, None));
    assert!(
        fixture
            .host_repository
            .merge(&fixture.slug, MergeMode::Auto, None)
            .unwrap()
            .moved
    );
    assert_eq!(git(&repo.dir, &["status", "--porcelain"]), "");
    git(&repo.dir, &["fsck", "--strict", "--full"]);
}

#[test]
fn shallow_clone_of_the_operator_is_merged() {
    let repo = Repo::with_files();
    repo.write("third", "x");
    repo.commit("third");
    let clone = repo.temp.path().join("clone");
    let url = format!("file://{}", repo.dir.display());
    let path = clone.to_str().unwrap();
    git(&repo.dir, &["clone", "-q", "--depth", "1", &url, path]);
    for (name, depth) in [("all", None), ("one", Some(1)), ("many", Some(9))] {
        let fixture = create(&repo, &clone, name, depth);
        assert_eq!(
            git(&fixture.dir, &["log", "--format=%s"]),
            "third",
            "{name}"
        );
        assert_eq!(git(&fixture.dir, &["status", "--porcelain"]), "");
        git(&fixture.dir, &["fsck", "--strict", "--full"]);
        work(&repo, &clone, &fixture);
    }
    let slug = Slug::from_name("one").unwrap();
    let host_repository = HostRepository::discover(&clone).unwrap();
    assert!(
        host_repository
            .merge(&slug, MergeMode::Auto, None)
            .unwrap()
            .moved
    );
    git(&clone, &["fsck", "--strict", "--full"]);
}

#[test]
fn submodule_is_an_empty_directory_and_is_kept() {
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
    let fixture = create(&repo, &repo.dir, "fix", None);
    assert_eq!(
        std::fs::read_dir(fixture.dir.join("lib")).unwrap().count(),
        0
    );
    assert_eq!(git(&fixture.dir, &["status", "--porcelain"]), "");
    // Files of an agent in the submodule's directory do not change the submodule.
    write(&fixture.dir, "lib/planted", "x");
    work(&repo, &repo.dir, &fixture);
    assert_eq!(git(&repo.dir, &["ls-tree", "palisade/fix", "lib"]), before);
    assert!(!listing(&repo.dir, "palisade/fix").contains("planted"));
    fixture
        .host_repository
        .merge(&fixture.slug, MergeMode::Auto, None)
        .unwrap();
    assert_eq!(git(&repo.dir, &["status", "--porcelain"]), "");
    assert!(repo.dir.join("lib/README.md").exists());
    // A submodule as the operator's repository.
    let fixture = create(&repo, &repo.dir.join("lib"), "inner", None);
    work(&repo, &repo.dir.join("lib"), &fixture);
    fixture
        .host_repository
        .merge(&fixture.slug, MergeMode::Auto, None)
        .unwrap();
    assert_eq!(git(&repo.dir.join("lib"), &["status", "--porcelain"]), "");
    assert_eq!(git(&repo.dir, &["ls-tree", "HEAD", "lib"]), before);
}

#[test]
fn linked_worktree_is_merged_and_main_worktree_unchanged() {
    let repo = Repo::with_files();
    let linked = repo.temp.path().join("linked");
    let path = linked.to_str().unwrap();
    git(&repo.dir, &["worktree", "add", "-q", "-b", "side", path]);
    let before = fingerprint(&repo.dir);
    let fixture = create(&repo, &linked, "fix", None);
    work(&repo, &linked, &fixture);
    // The branch is in the common repository.
    assert_eq!(
        git(&repo.dir, &["rev-parse", "palisade/fix"]),
        git(&linked, &["rev-parse", "palisade/fix"])
    );
    fixture
        .host_repository
        .merge(&fixture.slug, MergeMode::Auto, None)
        .unwrap();
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
fn bare_repository_supports_operations_without_worktree() {
    let repo = Repo::with_files();
    let bare = repo.temp.path().join("bare.git");
    let path = bare.to_str().unwrap();
    git(&repo.dir, &["clone", "-q", "--bare", ".", path]);
    let fixture = create(&repo, &bare, "fix", None);
    work(&repo, &bare, &fixture);
    for refused in [
        fixture.host_repository.apply(&fixture.slug).map(|_| ()),
        fixture.host_repository.checkout(&fixture.slug).map(|_| ()),
    ] {
        assert!(matches!(refused, Err(GitError::Bare(_))), "{refused:?}");
    }
    assert!(
        fixture
            .host_repository
            .merge(&fixture.slug, MergeMode::Auto, None)
            .unwrap()
            .moved
    );
    assert_eq!(git(&bare, &["log", "-1", "--format=%s"]), "bash: make");
    git(&bare, &["fsck", "--strict", "--full"]);
}

#[test]
fn worker_reports_unsupported_repositories() {
    let empty = Repo::empty();
    let error = empty.host_repository().head().unwrap_err();
    assert!(error.to_string().contains("no commit yet"), "{error}");
    let full = Repo::with_files();
    let fixture = full.sandbox("fix");
    let mut request = crate::worker::snapshot_request(&full, &fixture);
    request.repository = empty.dir.clone();
    let error = worker().snapshot(&request, None).unwrap_err();
    assert!(error.to_string().contains("does not exist"), "{error}");
    let other = full.temp.path().join("sha256");
    std::fs::create_dir(&other).unwrap();
    git(&other, &["init", "-q", "--object-format=sha256"]);
    request.repository = other;
    let error = worker().snapshot(&request, None).unwrap_err();
    assert!(error.to_string().contains("SHA-1"), "{error}");
}
