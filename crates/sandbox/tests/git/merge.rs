//! Merging, squashing and applying a sandbox's branch.

use std::os::unix::fs::PermissionsExt;

use sandbox::git::diff::ChangeKind;
use sandbox::git::error::GitError;
use sandbox::git::host_repository::HostRepository;
use sandbox::git::merge::MergeMode;

use crate::repo::{Repo, fingerprint, git, write};

fn assert_clean(repo: &Repo) {
    assert_eq!(git(&repo.dir, &["status", "--porcelain"]), "");
    git(&repo.dir, &["fsck", "--strict", "--full"]);
}

/// A sandbox with a snapshot that has every kind of change.
fn with_work(repo: &Repo) -> crate::repo::SandboxFixture {
    let mut fixture = repo.sandbox("fix");
    fixture.write("src/main.rs", "fn main() { agent() }\n");
    fixture.write("new/file", "n\n");
    let executable = std::fs::Permissions::from_mode(0o755);
    std::fs::set_permissions(fixture.dir.join("new/file"), executable).unwrap();
    std::fs::remove_file(fixture.dir.join("README.md")).unwrap();
    std::fs::rename(fixture.dir.join("src/lib.rs"), fixture.dir.join("lib.rs")).unwrap();
    std::os::unix::fs::symlink("new/file", fixture.dir.join("to")).unwrap();
    fixture.snapshot("edit: everything");
    fixture
}

#[test]
fn a_fast_forward_moves_branch_index_and_files_together() {
    let repo = Repo::with_files();
    let fixture = with_work(&repo);
    let merged = fixture
        .host_repository
        .merge(&fixture.slug, MergeMode::Auto, None)
        .unwrap();
    assert!(merged.moved);
    assert_eq!(repo.rev("HEAD"), repo.rev("palisade/fix"));
    assert_eq!(git(&repo.dir, &["branch", "--show-current"]), "main");
    assert_clean(&repo);
    let mode = std::fs::metadata(repo.dir.join("new/file"))
        .unwrap()
        .permissions()
        .mode();
    assert_eq!(mode & 0o111, 0o111);
    assert!(!repo.dir.join("README.md").exists());
    assert_eq!(
        std::fs::read_link(repo.dir.join("to")).unwrap().to_str(),
        Some("new/file")
    );
    let again = fixture
        .host_repository
        .merge(&fixture.slug, MergeMode::Auto, None)
        .unwrap();
    assert!(!again.moved);
}

#[test]
fn both_sides_are_merged_and_squashed() {
    for mode in [MergeMode::Merge, MergeMode::Squash, MergeMode::Auto] {
        let repo = Repo::with_files();
        let fixture = with_work(&repo);
        repo.write("mine", "m\n");
        let head = repo.commit("mine");
        let error = fixture
            .host_repository
            .merge(&fixture.slug, MergeMode::FastForward, None)
            .unwrap_err();
        assert!(matches!(error, GitError::NotFastForward(_)), "{error}");
        let merged = fixture
            .host_repository
            .merge(&fixture.slug, mode, None)
            .unwrap();
        assert_eq!(repo.rev("HEAD"), merged.commit);
        let parents = git(&repo.dir, &["log", "-1", "--format=%P"]);
        let tip = repo.rev("palisade/fix");
        let wanted = match mode {
            MergeMode::Squash => head.to_string(),
            _ => format!("{head} {tip}"),
        };
        assert_eq!(parents, wanted);
        assert!(repo.dir.join("mine").exists() && repo.dir.join("new/file").exists());
        assert_clean(&repo);
    }
}

#[test]
fn a_conflict_is_reported_and_nothing_is_touched() {
    let repo = Repo::with_files();
    let fixture = with_work(&repo);
    repo.write("src/main.rs", "fn main() { operator() }\n");
    repo.commit("mine");
    let before = fingerprint(&repo.dir);
    for mode in [MergeMode::Auto, MergeMode::Merge, MergeMode::Squash] {
        let error = fixture
            .host_repository
            .merge(&fixture.slug, mode, None)
            .unwrap_err();
        let GitError::Conflicts(paths) = error else {
            panic!("{error}")
        };
        assert_eq!(paths, [b"src/main.rs".to_vec()]);
    }
    assert!(matches!(
        fixture.host_repository.apply(&fixture.slug),
        Err(GitError::Conflicts(_))
    ));
    assert_eq!(fingerprint(&repo.dir), before);
}

#[test]
fn merge_never_loses_the_operators_changes() {
    type Change = fn(&Repo);
    let cases: [(&str, Change); 6] = [
        ("edited", |repo| repo.write("src/main.rs", "mine\n")),
        ("deleted", |repo| {
            std::fs::remove_file(repo.dir.join("src/main.rs")).unwrap();
        }),
        ("staged", |repo| {
            repo.write("src/main.rs", "mine\n");
            git(&repo.dir, &["add", "-A"]);
            repo.write("src/main.rs", "fn main() {}\n");
        }),
        ("untracked", |repo| repo.write("new/file", "mine\n")),
        ("in the way", |repo| repo.write("new", "mine\n")),
        ("mode", |repo| {
            let mode = std::fs::Permissions::from_mode(0o755);
            std::fs::set_permissions(repo.dir.join("src/main.rs"), mode).unwrap();
        }),
    ];
    for (name, change) in cases {
        let repo = Repo::with_files();
        let fixture = with_work(&repo);
        change(&repo);
        let before = fingerprint(&repo.dir);
        let error = fixture
            .host_repository
            .merge(&fixture.slug, MergeMode::Auto, None)
            .unwrap_err();
        assert!(matches!(error, GitError::Dirty(_)), "{name}: {error}");
        let error = fixture.host_repository.apply(&fixture.slug).unwrap_err();
        assert!(matches!(error, GitError::Dirty(_)), "{name}: {error}");
        assert_eq!(fingerprint(&repo.dir), before, "{name}");
    }
}

#[test]
fn changes_elsewhere_in_the_worktree_stay() {
    let repo = Repo::with_files();
    let fixture = with_work(&repo);
    repo.write("run.sh", "mine\n");
    repo.write("untracked", "mine\n");
    fixture
        .host_repository
        .merge(&fixture.slug, MergeMode::Auto, None)
        .unwrap();
    assert_eq!(
        git(&repo.dir, &["status", "--porcelain"]),
        " M run.sh\n?? untracked"
    );
}

#[test]
fn apply_changes_files_and_nothing_else() {
    let repo = Repo::with_files();
    let fixture = with_work(&repo);
    let index = std::fs::read(repo.dir.join(".git/index")).unwrap();
    let head = repo.rev("HEAD");
    let applied = fixture.host_repository.apply(&fixture.slug).unwrap();
    assert_eq!(applied.paths.len(), 6);
    assert_eq!(std::fs::read(repo.dir.join(".git/index")).unwrap(), index);
    assert_eq!(repo.rev("HEAD"), head);
    git(&repo.dir, &["add", "-A"]);
    let tree = git(&repo.dir, &["write-tree"]);
    assert_eq!(tree, git(&repo.dir, &["rev-parse", "palisade/fix^{tree}"]));
}

#[test]
fn file_is_replaced_by_directory_and_back() {
    let repo = Repo::with_files();
    let mut fixture = repo.sandbox("fix");
    std::fs::remove_file(fixture.dir.join("README.md")).unwrap();
    fixture.write("README.md/inside", "x");
    std::fs::remove_dir_all(fixture.dir.join("src")).unwrap();
    fixture.write("src", "a file now");
    fixture.snapshot("swap");
    fixture
        .host_repository
        .merge(&fixture.slug, MergeMode::Auto, None)
        .unwrap();
    assert_clean(&repo);
    assert!(repo.dir.join("README.md/inside").is_file() && repo.dir.join("src").is_file());
}

#[test]
fn failed_merge_rolls_everything_back() {
    let repo = Repo::with_files();
    let mut fixture = repo.sandbox("fix");
    std::fs::remove_dir_all(fixture.dir.join("src")).unwrap();
    fixture.write("src", "a file now");
    fixture.write("README.md", "changed");
    fixture.snapshot("swap");
    // The file is ignored by git, but its directory cannot be removed.
    repo.write("src/build.log", "mine");
    let before = fingerprint(&repo.dir);
    fixture
        .host_repository
        .merge(&fixture.slug, MergeMode::Auto, None)
        .unwrap_err();
    assert_eq!(fingerprint(&repo.dir), before);
}

#[test]
fn repository_with_operation_in_progress_is_refused() {
    let repo = Repo::with_files();
    let fixture = with_work(&repo);
    std::fs::write(repo.dir.join(".git/index.lock"), "").unwrap();
    let before = fingerprint(&repo.dir);
    let error = fixture
        .host_repository
        .merge(&fixture.slug, MergeMode::Auto, None)
        .unwrap_err();
    assert!(matches!(error, GitError::Busy { .. }), "{error}");
    assert_eq!(fingerprint(&repo.dir), before);
    std::fs::remove_file(repo.dir.join(".git/index.lock")).unwrap();
    std::fs::write(
        repo.dir.join(".git/MERGE_HEAD"),
        format!("{}\n", repo.rev("HEAD")),
    )
    .unwrap();
    let error = fixture
        .host_repository
        .merge(&fixture.slug, MergeMode::Auto, None)
        .unwrap_err();
    assert!(matches!(error, GitError::Busy { .. }), "{error}");
}

#[test]
fn a_detached_head_a_linked_worktree_and_a_bare_repository_merge() {
    let repo = Repo::with_files();
    let fixture = with_work(&repo);
    git(&repo.dir, &["switch", "-q", "--detach"]);
    let main = repo.rev("main");
    fixture
        .host_repository
        .merge(&fixture.slug, MergeMode::Auto, None)
        .unwrap();
    assert_eq!(
        (repo.rev("HEAD"), repo.rev("main")),
        (repo.rev("palisade/fix"), main)
    );
    assert_clean(&repo);

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
            "main",
        ],
    );
    let before = fingerprint(&repo.dir.join("src"));
    let host_repository = HostRepository::discover(&linked).unwrap();
    host_repository
        .merge(&fixture.slug, MergeMode::Merge, None)
        .unwrap();
    assert_eq!(git(&linked, &["status", "--porcelain"]), "");
    assert_eq!(fingerprint(&repo.dir.join("src")), before);

    let bare = repo.temp.path().join("bare.git");
    git(
        &repo.dir,
        &["clone", "-q", "--mirror", ".", bare.to_str().unwrap()],
    );
    git(&bare, &["symbolic-ref", "HEAD", "refs/heads/main"]);
    let host_repository = HostRepository::discover(&bare).unwrap();
    assert!(matches!(
        host_repository.apply(&fixture.slug),
        Err(GitError::Bare(_))
    ));
    let merged = host_repository
        .merge(&fixture.slug, MergeMode::Auto, None)
        .unwrap();
    assert_eq!(
        git(&bare, &["rev-parse", "main"]),
        merged.commit.to_string()
    );
}

#[test]
fn diff_counts_changes_quotes_paths_and_applies() {
    let repo = Repo::with_files();
    let mut fixture = with_work(&repo);
    std::fs::write(fixture.dir.join("binary"), [0, 1, 2, 255]).unwrap();
    fixture.write(".vscode/tasks.json", "{}\n");
    fixture.snapshot("more");
    let changes = fixture
        .host_repository
        .diff(&fixture.slug, usize::MAX)
        .unwrap();
    let find = |path: &str| {
        changes
            .files
            .iter()
            .find(|file| file.path == path.as_bytes())
            .unwrap()
    };
    assert_eq!(
        find("lib.rs").renamed_from.as_deref(),
        Some(b"src/lib.rs".as_slice())
    );
    assert_eq!(find("README.md").kind, ChangeKind::Deleted);
    assert_eq!(
        (find("src/main.rs").added, find("src/main.rs").removed),
        (1, 1)
    );
    assert!(find("binary").binary);
    let sensitive_paths: Vec<_> = changes
        .sensitive_paths()
        .into_iter()
        .map(|s| s.path)
        .collect();
    assert_eq!(sensitive_paths, [b".vscode/tasks.json".to_vec()]);
    let cut = fixture.host_repository.diff(&fixture.slug, 100).unwrap();
    assert!(cut.truncated && cut.patch.len() <= 100 && cut.files.len() == changes.files.len());

    let patch = repo.temp.path().join("patch");
    std::fs::write(&patch, &changes.patch).unwrap();
    git(&repo.dir, &["apply", "--index", patch.to_str().unwrap()]);
    let tree = git(&repo.dir, &["write-tree"]);
    assert_eq!(tree, git(&repo.dir, &["rev-parse", "palisade/fix^{tree}"]));

    let log = fixture.host_repository.log(&fixture.slug, 10).unwrap();
    let subjects: Vec<_> = log.iter().map(|entry| entry.subject.as_str()).collect();
    assert_eq!(subjects, ["more", "edit: everything"]);
}

#[test]
fn an_unrelated_history_and_a_new_submodule_are_refused() {
    let repo = Repo::with_files();
    let fixture = with_work(&repo);
    git(&repo.dir, &["switch", "-q", "--orphan", "other"]);
    write(&repo.dir, "x", "x");
    repo.commit("orphan");
    let error = fixture
        .host_repository
        .merge(&fixture.slug, MergeMode::Auto, None)
        .unwrap_err();
    assert!(matches!(error, GitError::Unrelated(_)), "{error}");

    // The branch gets a commit that did not pass the checks of an import.
    git(&repo.dir, &["switch", "-q", "palisade/fix"]);
    let id = "1".repeat(40);
    let entry = format!("160000,{id},sub");
    git(&repo.dir, &["update-index", "--add", "--cacheinfo", &entry]);
    git(&repo.dir, &["commit", "-q", "-m", "link"]);
    git(&repo.dir, &["switch", "-q", "main"]);
    let before = fingerprint(&repo.dir);
    let error = fixture
        .host_repository
        .merge(&fixture.slug, MergeMode::Auto, None)
        .unwrap_err();
    assert!(matches!(error, GitError::Forbidden { .. }), "{error}");
    assert_eq!(fingerprint(&repo.dir), before);
}

#[test]
fn crlf_files_on_disk_count_as_clean() {
    let repo = Repo::with_files();
    repo.write(".gitattributes", "*.txt text eol=crlf\n");
    repo.write("a.txt", "one\n");
    repo.commit("text");
    std::fs::remove_file(repo.dir.join("a.txt")).unwrap();
    git(&repo.dir, &["checkout", "-q", "a.txt"]);
    assert_eq!(std::fs::read(repo.dir.join("a.txt")).unwrap(), b"one\r\n");
    // Make the index newer than its files.
    let index = std::fs::File::options()
        .write(true)
        .open(repo.dir.join(".git/index"))
        .unwrap();
    let later = std::time::SystemTime::now() + std::time::Duration::from_secs(60);
    index.set_modified(later).unwrap();
    let mut fixture = repo.sandbox("fix");
    fixture.write("a.txt", "two\n");
    fixture.snapshot("edit");
    fixture
        .host_repository
        .merge(&fixture.slug, MergeMode::Auto, None)
        .unwrap();
    assert_eq!(git(&repo.dir, &["status", "--porcelain"]), "");
    assert_eq!(std::fs::read(repo.dir.join("a.txt")).unwrap(), b"two\n");
}

#[test]
fn paths_outside_sparse_checkout_are_not_written() {
    let repo = Repo::with_files();
    repo.write("far/a.txt", "a\n");
    repo.write("far/b.txt", "b\n");
    repo.commit("far");
    let mut fixture = repo.sandbox("fix");
    fixture.write("far/a.txt", "agent\n");
    std::fs::remove_file(fixture.dir.join("far/b.txt")).unwrap();
    fixture.write("README.md", "agent\n");
    fixture.snapshot("work");
    git(
        &repo.dir,
        &["sparse-checkout", "set", "--no-cone", "/*", "!/far/"],
    );
    assert!(!repo.dir.join("far").exists());
    // `apply` does not change the index, so the file is written to disk.
    repo.host_repository().apply(&fixture.slug).unwrap();
    let text = std::fs::read_to_string(repo.dir.join("far/a.txt")).unwrap();
    assert_eq!(text, "agent\n");
    std::fs::remove_dir_all(repo.dir.join("far")).unwrap();
    git(&repo.dir, &["checkout", "-q", "README.md"]);
    git(&repo.dir, &["sparse-checkout", "reapply"]);
    repo.host_repository()
        .merge(&fixture.slug, MergeMode::Auto, None)
        .unwrap();
    assert!(!repo.dir.join("far").exists());
    let text = std::fs::read_to_string(repo.dir.join("README.md")).unwrap();
    assert_eq!(text, "agent\n");
    assert_eq!(git(&repo.dir, &["status", "--porcelain"]), "");
    assert_eq!(git(&repo.dir, &["ls-files", "-t", "far"]), "S far/a.txt");
    let staged = git(&repo.dir, &["rev-parse", ":far/a.txt"]);
    assert_eq!(
        staged,
        git(&repo.dir, &["rev-parse", "palisade/fix:far/a.txt"])
    );
    git(&repo.dir, &["sparse-checkout", "disable"]);
    let text = std::fs::read_to_string(repo.dir.join("far/a.txt")).unwrap();
    assert_eq!(text, "agent\n");
}

#[test]
fn line_ending_differences_count_as_clean() {
    let repo = Repo::empty();
    git(&repo.dir, &["config", "core.autocrlf", "true"]);
    repo.write("a.txt", "one\r\ntwo\r\n");
    repo.write("b.txt", "one\r\ntwo\r\n");
    repo.commit("lines");
    let mut fixture = repo.sandbox("fix");
    fixture.write("a.txt", "one\nagent\n");
    fixture.snapshot("work");
    // The file's time equals the index's within a second, so its stat data is not trusted.
    let far_future = std::fs::FileTimes::new()
        .set_modified(std::time::UNIX_EPOCH + std::time::Duration::from_secs(4_000_000_000));
    let set_time = |path: &str| {
        let file = std::fs::File::options()
            .write(true)
            .open(repo.dir.join(path))
            .unwrap();
        file.set_times(far_future).unwrap();
    };
    set_time("a.txt");
    git(&repo.dir, &["update-index", "--really-refresh"]);
    repo.host_repository()
        .merge(&fixture.slug, MergeMode::Auto, None)
        .unwrap();
    let text = std::fs::read_to_string(repo.dir.join("a.txt")).unwrap();
    assert_eq!(text, "one\nagent\n");
    // The operator's change still counts, even for a path marked assume-unchanged.
    for hidden in [false, true] {
        let mut fixture = repo.sandbox(if hidden { "hidden" } else { "seen" });
        fixture.write("b.txt", "one\nagent\n");
        fixture.snapshot("work");
        repo.write("b.txt", "one\r\nmine\r\n");
        set_time("b.txt");
        let how = if hidden {
            "--assume-unchanged"
        } else {
            "--no-assume-unchanged"
        };
        git(&repo.dir, &["update-index", how, "b.txt"]);
        let error = repo
            .host_repository()
            .merge(&fixture.slug, MergeMode::Auto, None)
            .unwrap_err();
        assert!(matches!(error, GitError::Dirty(_)), "{error}");
        let text = std::fs::read_to_string(repo.dir.join("b.txt")).unwrap();
        assert_eq!(text, "one\r\nmine\r\n");
    }
}
