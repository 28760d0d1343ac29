//! Coming home.

use std::os::unix::fs::PermissionsExt;

use sandbox::git::diff::ChangeKind;
use sandbox::git::error::GitError;
use sandbox::git::home::Home;
use sandbox::git::merge::Manner;

use crate::repo::{Repo, fingerprint, git, write};

fn clean(repo: &Repo) {
    assert_eq!(git(&repo.dir, &["status", "--porcelain"]), "");
    git(&repo.dir, &["fsck", "--strict", "--full"]);
}

/// A sandbox with one snapshot of every kind of change.
fn worked(repo: &Repo) -> crate::repo::Place {
    let mut place = repo.sandbox("fix");
    place.write("src/main.rs", "fn main() { agent() }\n");
    place.write("new/file", "n\n");
    let executable = std::fs::Permissions::from_mode(0o755);
    std::fs::set_permissions(place.dir.join("new/file"), executable).unwrap();
    std::fs::remove_file(place.dir.join("README.md")).unwrap();
    std::fs::rename(place.dir.join("src/lib.rs"), place.dir.join("lib.rs")).unwrap();
    std::os::unix::fs::symlink("new/file", place.dir.join("to")).unwrap();
    place.snapshot("edit: everything");
    place
}

#[test]
fn a_fast_forward_moves_branch_index_and_files_together() {
    let repo = Repo::with_files();
    let place = worked(&repo);
    let merged = place.home.merge(&place.slug, Manner::Auto, None).unwrap();
    assert!(merged.moved);
    assert_eq!(repo.rev("HEAD"), repo.rev("palisade/fix"));
    assert_eq!(git(&repo.dir, &["branch", "--show-current"]), "main");
    clean(&repo);
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
    let again = place.home.merge(&place.slug, Manner::Auto, None).unwrap();
    assert!(!again.moved);
}

#[test]
fn both_sides_are_merged_and_squashed() {
    for manner in [Manner::Merge, Manner::Squash, Manner::Auto] {
        let repo = Repo::with_files();
        let place = worked(&repo);
        repo.write("mine", "m\n");
        let head = repo.commit("mine");
        let error = place
            .home
            .merge(&place.slug, Manner::FastForward, None)
            .unwrap_err();
        assert!(matches!(error, GitError::NotFastForward(_)), "{error}");
        let merged = place.home.merge(&place.slug, manner, None).unwrap();
        assert_eq!(repo.rev("HEAD"), merged.commit);
        let parents = git(&repo.dir, &["log", "-1", "--format=%P"]);
        let tip = repo.rev("palisade/fix");
        let wanted = match manner {
            Manner::Squash => head.to_string(),
            _ => format!("{head} {tip}"),
        };
        assert_eq!(parents, wanted);
        assert!(repo.dir.join("mine").exists() && repo.dir.join("new/file").exists());
        clean(&repo);
    }
}

#[test]
fn a_conflict_is_reported_and_nothing_is_touched() {
    let repo = Repo::with_files();
    let place = worked(&repo);
    repo.write("src/main.rs", "fn main() { operator() }\n");
    repo.commit("mine");
    let before = fingerprint(&repo.dir);
    for manner in [Manner::Auto, Manner::Merge, Manner::Squash] {
        let error = place.home.merge(&place.slug, manner, None).unwrap_err();
        let GitError::Conflicts(paths) = error else {
            panic!("{error}")
        };
        assert_eq!(paths, [b"src/main.rs".to_vec()]);
    }
    assert!(matches!(
        place.home.apply(&place.slug),
        Err(GitError::Conflicts(_))
    ));
    assert_eq!(fingerprint(&repo.dir), before);
}

#[test]
fn the_operators_own_changes_are_never_lost() {
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
        let place = worked(&repo);
        change(&repo);
        let before = fingerprint(&repo.dir);
        let error = place
            .home
            .merge(&place.slug, Manner::Auto, None)
            .unwrap_err();
        assert!(matches!(error, GitError::Dirty(_)), "{name}: {error}");
        let error = place.home.apply(&place.slug).unwrap_err();
        assert!(matches!(error, GitError::Dirty(_)), "{name}: {error}");
        assert_eq!(fingerprint(&repo.dir), before, "{name}");
    }
}

#[test]
fn changes_elsewhere_in_the_worktree_stay() {
    let repo = Repo::with_files();
    let place = worked(&repo);
    repo.write("run.sh", "mine\n");
    repo.write("untracked", "mine\n");
    place.home.merge(&place.slug, Manner::Auto, None).unwrap();
    assert_eq!(
        git(&repo.dir, &["status", "--porcelain"]),
        " M run.sh\n?? untracked"
    );
}

#[test]
fn apply_changes_files_and_nothing_else() {
    let repo = Repo::with_files();
    let place = worked(&repo);
    let index = std::fs::read(repo.dir.join(".git/index")).unwrap();
    let head = repo.rev("HEAD");
    let applied = place.home.apply(&place.slug).unwrap();
    assert_eq!(applied.paths.len(), 6);
    assert_eq!(std::fs::read(repo.dir.join(".git/index")).unwrap(), index);
    assert_eq!(repo.rev("HEAD"), head);
    git(&repo.dir, &["add", "-A"]);
    let tree = git(&repo.dir, &["write-tree"]);
    assert_eq!(tree, git(&repo.dir, &["rev-parse", "palisade/fix^{tree}"]));
}

#[test]
fn a_file_becomes_a_directory_and_back() {
    let repo = Repo::with_files();
    let mut place = repo.sandbox("fix");
    std::fs::remove_file(place.dir.join("README.md")).unwrap();
    place.write("README.md/inside", "x");
    std::fs::remove_dir_all(place.dir.join("src")).unwrap();
    place.write("src", "a file now");
    place.snapshot("swap");
    place.home.merge(&place.slug, Manner::Auto, None).unwrap();
    clean(&repo);
    assert!(repo.dir.join("README.md/inside").is_file() && repo.dir.join("src").is_file());
}

#[test]
fn a_landing_that_fails_halfway_takes_everything_back() {
    let repo = Repo::with_files();
    let mut place = repo.sandbox("fix");
    std::fs::remove_dir_all(place.dir.join("src")).unwrap();
    place.write("src", "a file now");
    place.write("README.md", "changed");
    place.snapshot("swap");
    // Ignored, so git does not see it; but the directory cannot go.
    repo.write("src/build.log", "mine");
    let before = fingerprint(&repo.dir);
    place
        .home
        .merge(&place.slug, Manner::Auto, None)
        .unwrap_err();
    assert_eq!(fingerprint(&repo.dir), before);
}

#[test]
fn a_busy_repository_is_left_alone() {
    let repo = Repo::with_files();
    let place = worked(&repo);
    std::fs::write(repo.dir.join(".git/index.lock"), "").unwrap();
    let before = fingerprint(&repo.dir);
    let error = place
        .home
        .merge(&place.slug, Manner::Auto, None)
        .unwrap_err();
    assert!(matches!(error, GitError::Busy { .. }), "{error}");
    assert_eq!(fingerprint(&repo.dir), before);
    std::fs::remove_file(repo.dir.join(".git/index.lock")).unwrap();
    std::fs::write(
        repo.dir.join(".git/MERGE_HEAD"),
        format!("{}\n", repo.rev("HEAD")),
    )
    .unwrap();
    let error = place
        .home
        .merge(&place.slug, Manner::Auto, None)
        .unwrap_err();
    assert!(matches!(error, GitError::Busy { .. }), "{error}");
}

#[test]
fn a_detached_head_a_linked_worktree_and_a_bare_repository_merge() {
    let repo = Repo::with_files();
    let place = worked(&repo);
    git(&repo.dir, &["switch", "-q", "--detach"]);
    let main = repo.rev("main");
    place.home.merge(&place.slug, Manner::Auto, None).unwrap();
    assert_eq!(
        (repo.rev("HEAD"), repo.rev("main")),
        (repo.rev("palisade/fix"), main)
    );
    clean(&repo);

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
    let home = Home::discover(&linked).unwrap();
    home.merge(&place.slug, Manner::Merge, None).unwrap();
    assert_eq!(git(&linked, &["status", "--porcelain"]), "");
    assert_eq!(fingerprint(&repo.dir.join("src")), before);

    let bare = repo.temp.path().join("bare.git");
    git(
        &repo.dir,
        &["clone", "-q", "--mirror", ".", bare.to_str().unwrap()],
    );
    git(&bare, &["symbolic-ref", "HEAD", "refs/heads/main"]);
    let home = Home::discover(&bare).unwrap();
    assert!(matches!(home.apply(&place.slug), Err(GitError::Bare(_))));
    let merged = home.merge(&place.slug, Manner::Auto, None).unwrap();
    assert_eq!(
        git(&bare, &["rev-parse", "main"]),
        merged.commit.to_string()
    );
}

#[test]
fn a_diff_counts_quotes_and_applies() {
    let repo = Repo::with_files();
    let mut place = worked(&repo);
    std::fs::write(place.dir.join("binary"), [0, 1, 2, 255]).unwrap();
    place.write(".vscode/tasks.json", "{}\n");
    place.snapshot("more");
    let changes = place.home.diff(&place.slug, usize::MAX).unwrap();
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
    let steering: Vec<_> = changes.steering().into_iter().map(|s| s.path).collect();
    assert_eq!(steering, [b".vscode/tasks.json".to_vec()]);
    let cut = place.home.diff(&place.slug, 100).unwrap();
    assert!(cut.cut && cut.patch.len() <= 100 && cut.files.len() == changes.files.len());

    let patch = repo.temp.path().join("patch");
    std::fs::write(&patch, &changes.patch).unwrap();
    git(&repo.dir, &["apply", "--index", patch.to_str().unwrap()]);
    let tree = git(&repo.dir, &["write-tree"]);
    assert_eq!(tree, git(&repo.dir, &["rev-parse", "palisade/fix^{tree}"]));

    let log = place.home.log(&place.slug, 10).unwrap();
    let subjects: Vec<_> = log.iter().map(|entry| entry.subject.as_str()).collect();
    assert_eq!(subjects, ["more", "edit: everything"]);
}

#[test]
fn an_unrelated_history_and_a_new_submodule_are_refused() {
    let repo = Repo::with_files();
    let place = worked(&repo);
    git(&repo.dir, &["switch", "-q", "--orphan", "other"]);
    write(&repo.dir, "x", "x");
    repo.commit("orphan");
    let error = place
        .home
        .merge(&place.slug, Manner::Auto, None)
        .unwrap_err();
    assert!(matches!(error, GitError::Unrelated(_)), "{error}");

    // As if somebody had put it on the branch by other means.
    git(&repo.dir, &["switch", "-q", "palisade/fix"]);
    let id = "1".repeat(40);
    let entry = format!("160000,{id},sub");
    git(&repo.dir, &["update-index", "--add", "--cacheinfo", &entry]);
    git(&repo.dir, &["commit", "-q", "-m", "link"]);
    git(&repo.dir, &["switch", "-q", "main"]);
    let before = fingerprint(&repo.dir);
    let error = place
        .home
        .merge(&place.slug, Manner::Auto, None)
        .unwrap_err();
    assert!(matches!(error, GitError::Forbidden { .. }), "{error}");
    assert_eq!(fingerprint(&repo.dir), before);
}

#[test]
fn files_with_other_line_endings_on_disk_count_as_clean() {
    let repo = Repo::with_files();
    repo.write(".gitattributes", "*.txt text eol=crlf\n");
    repo.write("a.txt", "one\n");
    repo.commit("text");
    std::fs::remove_file(repo.dir.join("a.txt")).unwrap();
    git(&repo.dir, &["checkout", "-q", "a.txt"]);
    assert_eq!(std::fs::read(repo.dir.join("a.txt")).unwrap(), b"one\r\n");
    // An index younger than its files, as a minute later.
    let index = std::fs::File::options()
        .write(true)
        .open(repo.dir.join(".git/index"))
        .unwrap();
    let later = std::time::SystemTime::now() + std::time::Duration::from_secs(60);
    index.set_modified(later).unwrap();
    let mut place = repo.sandbox("fix");
    place.write("a.txt", "two\n");
    place.snapshot("edit");
    place.home.merge(&place.slug, Manner::Auto, None).unwrap();
    assert_eq!(git(&repo.dir, &["status", "--porcelain"]), "");
    assert_eq!(std::fs::read(repo.dir.join("a.txt")).unwrap(), b"two\n");
}

#[test]
fn what_a_sparse_checkout_keeps_off_the_disk_stays_off_it() {
    let repo = Repo::with_files();
    repo.write("far/a.txt", "a\n");
    repo.write("far/b.txt", "b\n");
    repo.commit("far");
    let mut place = repo.sandbox("fix");
    place.write("far/a.txt", "agent\n");
    std::fs::remove_file(place.dir.join("far/b.txt")).unwrap();
    place.write("README.md", "agent\n");
    place.snapshot("work");
    git(
        &repo.dir,
        &["sparse-checkout", "set", "--no-cone", "/*", "!/far/"],
    );
    assert!(!repo.dir.join("far").exists());
    // Applied, there is only the disk to put it on.
    repo.home().apply(&place.slug).unwrap();
    let text = std::fs::read_to_string(repo.dir.join("far/a.txt")).unwrap();
    assert_eq!(text, "agent\n");
    std::fs::remove_dir_all(repo.dir.join("far")).unwrap();
    git(&repo.dir, &["checkout", "-q", "README.md"]);
    git(&repo.dir, &["sparse-checkout", "reapply"]);
    repo.home().merge(&place.slug, Manner::Auto, None).unwrap();
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
fn line_endings_of_the_operators_are_no_change_of_their_own() {
    let repo = Repo::empty();
    git(&repo.dir, &["config", "core.autocrlf", "true"]);
    repo.write("a.txt", "one\r\ntwo\r\n");
    repo.write("b.txt", "one\r\ntwo\r\n");
    repo.commit("lines");
    let mut place = repo.sandbox("fix");
    place.write("a.txt", "one\nagent\n");
    place.snapshot("work");
    // As young as the index, and by the second only: nobody can tell by the time.
    let young = std::fs::FileTimes::new()
        .set_modified(std::time::UNIX_EPOCH + std::time::Duration::from_secs(4_000_000_000));
    let set = |path: &str| {
        let file = std::fs::File::options()
            .write(true)
            .open(repo.dir.join(path))
            .unwrap();
        file.set_times(young).unwrap();
    };
    set("a.txt");
    git(&repo.dir, &["update-index", "--really-refresh"]);
    repo.home().merge(&place.slug, Manner::Auto, None).unwrap();
    let text = std::fs::read_to_string(repo.dir.join("a.txt")).unwrap();
    assert_eq!(text, "one\nagent\n");
    // A change of theirs still is one, also where git was told not to look.
    for hidden in [false, true] {
        let mut place = repo.sandbox(if hidden { "hidden" } else { "seen" });
        place.write("b.txt", "one\nagent\n");
        place.snapshot("work");
        repo.write("b.txt", "one\r\nmine\r\n");
        set("b.txt");
        let how = if hidden {
            "--assume-unchanged"
        } else {
            "--no-assume-unchanged"
        };
        git(&repo.dir, &["update-index", how, "b.txt"]);
        let error = repo
            .home()
            .merge(&place.slug, Manner::Auto, None)
            .unwrap_err();
        assert!(matches!(error, GitError::Dirty(_)), "{error}");
        let text = std::fs::read_to_string(repo.dir.join("b.txt")).unwrap();
        assert_eq!(text, "one\r\nmine\r\n");
    }
}
