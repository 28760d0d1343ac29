//! A snapshot by way of the worker's process.

use std::ffi::OsString;
use std::io::Write;
use std::os::fd::OwnedFd;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::process::{Command, Stdio};

use sandbox::git::error::GitError;
use sandbox::git::snapshot::Bounds;
use sandbox::worker::{SnapshotOrder, SnapshotReport, Worker, WorkerLimits};

use crate::repo::{Place, Repo, git, listing};

pub(crate) fn worker() -> Worker {
    Worker::new(
        PathBuf::from(env!("CARGO_BIN_EXE_sandbox-worker")),
        Vec::<OsString>::new(),
    )
}

pub(crate) fn order(repo: &Repo, place: &Place) -> SnapshotOrder {
    let manifest = repo
        .temp
        .path()
        .join(format!("manifest-{}", place.slug.as_str()));
    if !manifest.exists() {
        place.manifest.save(&manifest).unwrap();
    }
    SnapshotOrder {
        repository: repo.dir.clone(),
        slug: place.slug.clone(),
        workspace: place.dir.clone(),
        manifest,
        message: "bash: make".to_owned(),
        bounds: Bounds::default(),
    }
}

pub(crate) fn snapshot(repo: &Repo, place: &Place, bundle: Option<OwnedFd>) -> SnapshotReport {
    worker().snapshot(&order(repo, place), bundle).unwrap()
}

/// What `git bundle create -` writes in the workspace, as a pipe.
pub(crate) fn bundle(place: &Place, what: &[&str]) -> OwnedFd {
    let mut git = Command::new("git")
        .args(["bundle", "create", "-q", "-"])
        .args(what)
        .current_dir(&place.dir)
        .env("HOME", "/nonexistent")
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let pipe = OwnedFd::from(git.stdout.take().unwrap());
    std::thread::spawn(move || git.wait());
    pipe
}

/// A pipe that holds these bytes and ends.
fn pipe(bytes: &[u8]) -> OwnedFd {
    let (from, mut to) = std::io::pipe().unwrap();
    to.write_all(bytes).unwrap();
    from.into()
}

fn leftovers(repo: &Repo) -> Vec<String> {
    let objects = std::fs::read_dir(repo.dir.join(".git/objects")).unwrap();
    objects
        .map(|entry| entry.unwrap().file_name().to_string_lossy().into_owned())
        .filter(|name| name.starts_with("tmp_"))
        .collect()
}

#[test]
fn files_are_committed_and_the_manifest_is_replaced() {
    let repo = Repo::with_files();
    let place = repo.sandbox("fix");
    place.write("src/main.rs", "fn main() { work() }\n");
    place.write("new", "x");
    let made = mkfifo(&place.dir.join("pipe"));
    assert!(made);
    let first = snapshot(&repo, &place, None);
    assert!(first.moved && first.read >= 2 && first.commits == 0);
    assert_eq!(first.tip, repo.rev("palisade/fix").to_string());
    assert_eq!(first.import_error, None);
    assert_eq!(first.left_out, 1);
    assert_eq!(first.skipped[0].path, "pipe");
    assert_eq!(first.skipped[0].why, "a named pipe");
    assert!(listing(&repo.dir, "palisade/fix").contains(" new\n"));
    let again = snapshot(&repo, &place, None);
    assert!(!again.moved);
    assert_eq!(again.tip, first.tip);
    assert_eq!(leftovers(&repo), [""; 0]);
    git(&repo.dir, &["fsck", "--strict", "--full"]);
}

fn mkfifo(path: &std::path::Path) -> bool {
    Command::new("mkfifo").arg(path).status().unwrap().success()
}

#[test]
fn the_agents_commits_come_in_and_the_files_follow_them() {
    let repo = Repo::with_files();
    let place = repo.sandbox("fix");
    let base = repo.rev("HEAD").to_string();
    for number in 0..3 {
        place.write("work", &format!("{number}\n"));
        git(&place.dir, &["add", "-A"]);
        git(&place.dir, &["commit", "-q", "-m", "agent"]);
    }
    place.write("loose", "x");
    let report = snapshot(
        &repo,
        &place,
        Some(bundle(&place, &["HEAD", &format!("^{base}")])),
    );
    assert_eq!((report.commits, report.import_error.as_deref()), (3, None));
    let log = git(&repo.dir, &["log", "--format=%s", "palisade/fix"]);
    assert_eq!(log, "bash: make\nagent\nagent\nagent\nsecond\nfirst");
    // Nothing new: git writes no bundle at all.
    let head = git(&place.dir, &["rev-parse", "HEAD"]);
    let none = bundle(&place, &["HEAD", &format!("^{head}")]);
    let report = snapshot(&repo, &place, Some(none));
    assert_eq!((report.commits, report.import_error), (0, None));
    assert!(!report.moved);
    git(&repo.dir, &["fsck", "--strict", "--full"]);
}

#[test]
fn a_bundle_that_is_refused_does_not_stop_the_files() {
    let repo = Repo::with_files();
    for (name, bytes) in [
        ("rubbish", b"# v2 git bundle\nrubbish\n\n".as_slice()),
        ("short", b"PA"),
        ("pack", b"PACK\x00\x00\x00\x02\xff\xff\xff\xff"),
    ] {
        let place = repo.sandbox(name);
        place.write("new", "x");
        let report = snapshot(&repo, &place, Some(pipe(bytes)));
        assert!(report.moved, "{name}");
        let error = report.import_error.unwrap();
        assert!(error.contains("refused"), "{name}: {error}");
        assert_eq!(leftovers(&repo), [""; 0]);
    }
}

#[test]
fn a_bundle_that_never_comes_is_given_up_and_the_files_come_home() {
    let repo = Repo::with_files();
    let place = repo.sandbox("fix");
    place.write("new", "x");
    let (from, _held_open) = std::io::pipe().unwrap();
    let limits = WorkerLimits {
        bundle_seconds: 1,
        ..WorkerLimits::default()
    };
    let report = worker()
        .with_limits(limits)
        .snapshot(&order(&repo, &place), Some(from.into()))
        .unwrap();
    assert!(report.moved);
    assert!(report.import_error.unwrap().contains("too long"));
}

#[test]
fn a_refusal_keeps_its_sentence() {
    let repo = Repo::with_files();
    let place = repo.sandbox("fix");
    place.write("sub/.GIT/config", "x");
    let before = repo.rev("palisade/fix");
    let error = worker().snapshot(&order(&repo, &place), None).unwrap_err();
    assert!(matches!(error, GitError::Refused(_)), "{error:?}");
    assert!(error.to_string().contains("sub/.GIT"), "{error}");
    assert_eq!(repo.rev("palisade/fix"), before);
    assert_eq!(leftovers(&repo), [""; 0]);
}

/// Fails as a worker that is killed does: no answer, and its work left on probation.
#[test]
fn a_worker_over_its_limits_is_a_clear_error_and_the_next_one_cleans_up() {
    let repo = Repo::with_files();
    let place = repo.sandbox("fix");
    let before = repo.rev("palisade/fix");
    for number in 0..40 {
        place.write(&format!("large/{number}"), &"x".repeat(4 << 20));
    }
    let limits = WorkerLimits {
        processor: 1,
        ..WorkerLimits::default()
    };
    // Many random bytes take long to compress.
    let mut seed = 1_u64;
    for number in 0..24 {
        let bytes: Vec<u8> = std::iter::repeat_with(|| {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (seed >> 33).to_le_bytes()[0]
        })
        .take(4 << 20)
        .collect();
        std::fs::write(place.dir.join(format!("large/random-{number}")), bytes).unwrap();
    }
    let error = worker()
        .with_limits(limits)
        .snapshot(&order(&repo, &place), None)
        .unwrap_err();
    assert!(error.to_string().contains("processor time"), "{error}");
    assert_eq!(repo.rev("palisade/fix"), before);
    assert_eq!(leftovers(&repo).len(), 1);
    std::fs::remove_dir_all(place.dir.join("large")).unwrap();
    place.write("small", "x");
    assert!(snapshot(&repo, &place, None).moved);
    assert_eq!(leftovers(&repo), [""; 0]);
    git(&repo.dir, &["fsck", "--strict", "--full"]);
}

#[test]
fn a_worker_without_memory_or_time_is_a_clear_error() {
    let repo = Repo::with_files();
    let place = repo.sandbox("fix");
    let before = repo.rev("palisade/fix");
    place.write("large", &"x".repeat(48 << 20));
    let small = WorkerLimits {
        memory: 40 << 20,
        ..WorkerLimits::default()
    };
    let error = worker()
        .with_limits(small)
        .snapshot(&order(&repo, &place), None)
        .unwrap_err();
    assert!(error.to_string().contains("memory"), "{error}");
    let (from, _held_open) = std::io::pipe().unwrap();
    let hasty = WorkerLimits {
        seconds: 1,
        ..WorkerLimits::default()
    };
    let error = worker()
        .with_limits(hasty)
        .snapshot(&order(&repo, &place), Some(from.into()))
        .unwrap_err();
    assert!(error.to_string().contains("longer than 1 s"), "{error}");
    assert_eq!(repo.rev("palisade/fix"), before);
}

#[test]
fn a_program_that_is_no_worker_is_a_clear_error() {
    let repo = Repo::with_files();
    let place = repo.sandbox("fix");
    for (program, said) in [
        ("/bin/false", "ended without"),
        ("/nonexistent", "not started"),
    ] {
        let worker = Worker::new(PathBuf::from(program), Vec::new());
        let error = worker.snapshot(&order(&repo, &place), None).unwrap_err();
        assert!(error.to_string().contains(said), "{error}");
    }
}

#[test]
fn a_manifest_that_is_gone_or_damaged_costs_time_and_nothing_else() {
    let repo = Repo::with_files();
    repo.write("target/tracked", "1");
    git(&repo.dir, &["add", "-f", "target/tracked"]);
    repo.commit("tracked although ignored");
    let place = repo.sandbox("fix");
    let order = order(&repo, &place);
    std::fs::remove_file(&order.manifest).unwrap();
    let report = worker().snapshot(&order, None).unwrap();
    assert!(!report.moved && report.read > 4, "{report:?}");
    std::fs::write(&order.manifest, "rubbish").unwrap();
    place.write("new", "x");
    let report = worker().snapshot(&order, None).unwrap();
    assert!(report.moved);
    assert!(listing(&repo.dir, "palisade/fix").contains(" target/tracked\n"));
}

#[test]
fn the_worker_knows_the_operators_identity() {
    let repo = Repo::with_files();
    git(&repo.dir, &["config", "user.name", "The Operator"]);
    git(&repo.dir, &["config", "user.email", "o@example.com"]);
    let place = repo.sandbox("fix");
    place.write("closed", "x");
    let closed = std::fs::Permissions::from_mode(0o600);
    std::fs::set_permissions(place.dir.join("closed"), closed).unwrap();
    snapshot(&repo, &place, None);
    let author = git(&repo.dir, &["log", "-1", "--format=%an", "palisade/fix"]);
    assert_eq!(author, "The Operator");
}

#[test]
fn a_branch_that_is_locked_by_a_crash_says_which_file_to_remove() {
    let repo = Repo::with_files();
    let place = repo.sandbox("fix");
    place.write("new", "x");
    let lock = repo.dir.join(".git/refs/heads/palisade/fix.lock");
    std::fs::write(&lock, "").unwrap();
    let mut order = order(&repo, &place);
    order.message = "long ".repeat(100_000);
    let error = worker().snapshot(&order, None).unwrap_err();
    assert!(error.to_string().contains("palisade/fix.lock"), "{error}");
    std::fs::remove_file(lock).unwrap();
    assert!(worker().snapshot(&order, None).unwrap().moved);
}

/// The words for what is in a workspace's repository only.
fn strays(repo: &Repo, place: &Place) -> Vec<String> {
    snapshot(repo, place, None).strays
}

#[test]
fn what_only_the_agents_repository_holds_is_named() {
    let repo = Repo::with_files();
    let place = repo.sandbox("fix");
    let inside = |args: &[&str]| git(&place.dir, args);
    assert_eq!(strays(&repo, &place), [""; 0], "fresh");
    let short = |name: &str| inside(&["rev-parse", "--short=12", name]);
    // A branch beside ours, loose and packed.
    inside(&["checkout", "-q", "-b", "side"]);
    place.write("side", "x");
    inside(&["add", "-A"]);
    inside(&["commit", "-q", "-m", "side"]);
    inside(&["checkout", "-q", "palisade/fix"]);
    let side = format!("branch side at {}", short("side"));
    assert_eq!(strays(&repo, &place), [side.as_str()]);
    inside(&["pack-refs", "--all"]);
    assert_eq!(strays(&repo, &place), [side.as_str()]);
    // Two stashes, of which the older is in a log only.
    for text in ["one", "two"] {
        place.write("README.md", text);
        inside(&["stash", "-q"]);
    }
    let older = format!("a stash at {}", short("stash@{1}"));
    let newer = format!("a stash at {}", short("stash@{0}"));
    assert_eq!(strays(&repo, &place), [side, newer, older]);
    inside(&["stash", "clear"]);
    inside(&["branch", "-q", "-D", "side"]);
    assert_eq!(strays(&repo, &place), [""; 0]);
    // A commit on our own branch that nobody fetched, as of a sandbox that stands still.
    inside(&["commit", "-q", "--allow-empty", "-m", "own"]);
    let own = format!("branch palisade/fix at {}", short("HEAD"));
    assert_eq!(strays(&repo, &place), [own]);
    let base = repo.rev("HEAD");
    let fetched = bundle(&place, &["HEAD", &format!("^{base}")]);
    let report = snapshot(&repo, &place, Some(fetched));
    assert_eq!((report.commits, report.strays.len()), (1, 0));
    // A detached HEAD, a tag object, a worktree, and what was merely fetched.
    inside(&["checkout", "-q", "--detach"]);
    inside(&["commit", "-q", "--allow-empty", "-m", "detached"]);
    inside(&["update-ref", "refs/remotes/origin/main", "HEAD"]);
    let head = format!("HEAD at {}", short("HEAD"));
    assert_eq!(strays(&repo, &place), [head]);
    inside(&["tag", "-a", "-m", "words", "v1"]);
    inside(&["checkout", "-q", "palisade/fix"]);
    let tag = format!("tag v1 at {}", short("v1"));
    assert_eq!(strays(&repo, &place), [tag]);
    inside(&["tag", "-d", "v1"]);
    let aside = repo.temp.path().join("aside");
    inside(&["worktree", "add", "-q", "--detach", aside.to_str().unwrap()]);
    assert_eq!(strays(&repo, &place), [""; 0]);
    git(&aside, &["commit", "-q", "--allow-empty", "-m", "aside"]);
    let found = strays(&repo, &place);
    assert!(
        found[0].starts_with("the HEAD of worktree aside at "),
        "{found:?}"
    );
}

#[test]
fn a_repository_that_cannot_be_read_counts_as_work() {
    let repo = Repo::with_files();
    type Make = fn(&std::path::Path);
    let cases: [(&str, &str, Make); 5] = [
        ("a-link", "is no directory", |git| {
            std::fs::rename(git, git.with_extension("away")).unwrap();
            std::os::unix::fs::symlink("/nonexistent", git).unwrap();
        }),
        ("a-fifo", "is no file", |git| {
            std::fs::remove_file(git.join("HEAD")).unwrap();
            assert!(mkfifo(&git.join("HEAD")));
        }),
        ("large", "too large", |git| {
            std::fs::write(git.join("packed-refs"), vec![b'#'; 5 << 20]).unwrap();
        }),
        ("rubbish", "cannot be read", |git| {
            std::fs::write(git.join("refs/heads/x\x1b[2J"), "no id").unwrap();
        }),
        ("other", "reftable", |git| {
            std::fs::create_dir(git.join("reftable")).unwrap();
        }),
    ];
    for (name, why, make) in cases {
        let place = repo.sandbox(name);
        make(&place.dir.join(".git"));
        let found = strays(&repo, &place);
        assert_eq!(found.len(), 1, "{name}: {found:?}");
        assert!(found[0].contains(why), "{name}: {found:?}");
        assert!(!found[0].contains('\x1b'), "{name}: {found:?}");
    }
    // Without a repository there is nothing to lose.
    let place = repo.sandbox("none");
    std::fs::remove_dir_all(place.dir.join(".git")).unwrap();
    assert_eq!(strays(&repo, &place), [""; 0]);
}
