//! Snapshots by the worker process.

use std::ffi::OsString;
use std::io::Write;
use std::os::fd::OwnedFd;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::process::{Command, Stdio};

use sandbox::git::error::GitError;
use sandbox::git::snapshot::SnapshotBounds;
use sandbox::worker::{SnapshotReport, SnapshotRequest, SnapshotWorker, WorkerLimits};

use crate::repo::{Repo, SandboxFixture, git, listing};

pub(crate) fn worker() -> SnapshotWorker {
    SnapshotWorker::new(
        PathBuf::from(env!("CARGO_BIN_EXE_sandbox-worker")),
        Vec::<OsString>::new(),
    )
}

pub(crate) fn snapshot_request(repo: &Repo, fixture: &SandboxFixture) -> SnapshotRequest {
    let manifest = repo
        .temp
        .path()
        .join(format!("manifest-{}", fixture.slug.as_str()));
    if !manifest.exists() {
        fixture.manifest.save(&manifest).unwrap();
    }
    SnapshotRequest {
        repository: repo.dir.clone(),
        slug: fixture.slug.clone(),
        workspace: fixture.dir.clone(),
        manifest,
        message: "bash: make".to_owned(),
        bounds: SnapshotBounds::default(),
    }
}

pub(crate) fn snapshot(
    repo: &Repo,
    fixture: &SandboxFixture,
    bundle: Option<OwnedFd>,
) -> SnapshotReport {
    worker()
        .snapshot(&snapshot_request(repo, fixture), bundle)
        .unwrap()
}

/// The output of `git bundle create -` in the workspace, as a pipe.
pub(crate) fn bundle(fixture: &SandboxFixture, what: &[&str]) -> OwnedFd {
    let mut git = Command::new("git")
        .args(["bundle", "create", "-q", "-"])
        .args(what)
        .current_dir(&fixture.dir)
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
    let fixture = repo.sandbox("fix");
    fixture.write("src/main.rs", "fn main() { work() }\n");
    fixture.write("new", "x");
    let made = mkfifo(&fixture.dir.join("pipe"));
    assert!(made);
    let first = snapshot(&repo, &fixture, None);
    assert!(first.moved && first.read >= 2 && first.commits == 0);
    assert_eq!(first.tip, repo.rev("palisade/fix").to_string());
    assert_eq!(first.import_error, None);
    assert_eq!(first.left_out, 1);
    assert_eq!(first.skipped[0].path, "pipe");
    assert_eq!(first.skipped[0].why, "a named pipe");
    assert!(listing(&repo.dir, "palisade/fix").contains(" new\n"));
    let again = snapshot(&repo, &fixture, None);
    assert!(!again.moved);
    assert_eq!(again.tip, first.tip);
    assert_eq!(leftovers(&repo), [""; 0]);
    git(&repo.dir, &["fsck", "--strict", "--full"]);
}

fn mkfifo(path: &std::path::Path) -> bool {
    Command::new("mkfifo").arg(path).status().unwrap().success()
}

#[test]
fn agents_commits_are_imported_before_the_snapshot() {
    let repo = Repo::with_files();
    let fixture = repo.sandbox("fix");
    let base = repo.rev("HEAD").to_string();
    for number in 0..3 {
        fixture.write("work", &format!("{number}\n"));
        git(&fixture.dir, &["add", "-A"]);
        git(&fixture.dir, &["commit", "-q", "-m", "agent"]);
    }
    fixture.write("loose", "x");
    let report = snapshot(
        &repo,
        &fixture,
        Some(bundle(&fixture, &["HEAD", &format!("^{base}")])),
    );
    assert_eq!((report.commits, report.import_error.as_deref()), (3, None));
    let log = git(&repo.dir, &["log", "--format=%s", "palisade/fix"]);
    assert_eq!(log, "bash: make\nagent\nagent\nagent\nsecond\nfirst");
    // Without new commits git writes no bundle at all.
    let head = git(&fixture.dir, &["rev-parse", "HEAD"]);
    let none = bundle(&fixture, &["HEAD", &format!("^{head}")]);
    let report = snapshot(&repo, &fixture, Some(none));
    assert_eq!((report.commits, report.import_error), (0, None));
    assert!(!report.moved);
    git(&repo.dir, &["fsck", "--strict", "--full"]);
}

#[test]
fn refused_bundle_does_not_prevent_the_snapshot() {
    let repo = Repo::with_files();
    for (name, bytes) in [
        ("rubbish", b"# v2 git bundle\nrubbish\n\n".as_slice()),
        ("short", b"PA"),
        ("pack", b"PACK\x00\x00\x00\x02\xff\xff\xff\xff"),
    ] {
        let fixture = repo.sandbox(name);
        fixture.write("new", "x");
        let report = snapshot(&repo, &fixture, Some(pipe(bytes)));
        assert!(report.moved, "{name}");
        let error = report.import_error.unwrap();
        assert!(error.contains("refused"), "{name}: {error}");
        assert_eq!(leftovers(&repo), [""; 0]);
    }
}

#[test]
fn missing_bundle_times_out_and_files_are_committed() {
    let repo = Repo::with_files();
    let fixture = repo.sandbox("fix");
    fixture.write("new", "x");
    let (from, _held_open) = std::io::pipe().unwrap();
    let limits = WorkerLimits {
        bundle_seconds: 1,
        ..WorkerLimits::default()
    };
    let report = worker()
        .with_limits(limits)
        .snapshot(&snapshot_request(&repo, &fixture), Some(from.into()))
        .unwrap();
    assert!(report.moved);
    assert!(report.import_error.unwrap().contains("too long"));
}

#[test]
fn worker_reports_the_reason_of_a_refusal() {
    let repo = Repo::with_files();
    let fixture = repo.sandbox("fix");
    fixture.write("sub/.GIT/config", "x");
    let before = repo.rev("palisade/fix");
    let error = worker()
        .snapshot(&snapshot_request(&repo, &fixture), None)
        .unwrap_err();
    assert!(matches!(error, GitError::Refused(_)), "{error:?}");
    assert!(error.to_string().contains("sub/.GIT"), "{error}");
    assert_eq!(repo.rev("palisade/fix"), before);
    assert_eq!(leftovers(&repo), [""; 0]);
}

/// Fails like a killed worker: no answer, and a quarantine left.
#[test]
fn worker_over_its_limits_fails_and_is_cleaned_up() {
    let repo = Repo::with_files();
    let fixture = repo.sandbox("fix");
    let before = repo.rev("palisade/fix");
    for number in 0..40 {
        fixture.write(&format!("large/{number}"), &"x".repeat(4 << 20));
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
        std::fs::write(fixture.dir.join(format!("large/random-{number}")), bytes).unwrap();
    }
    let error = worker()
        .with_limits(limits)
        .snapshot(&snapshot_request(&repo, &fixture), None)
        .unwrap_err();
    assert!(error.to_string().contains("processor time"), "{error}");
    assert_eq!(repo.rev("palisade/fix"), before);
    assert_eq!(leftovers(&repo).len(), 1);
    std::fs::remove_dir_all(fixture.dir.join("large")).unwrap();
    fixture.write("small", "x");
    assert!(snapshot(&repo, &fixture, None).moved);
    assert_eq!(leftovers(&repo), [""; 0]);
    git(&repo.dir, &["fsck", "--strict", "--full"]);
}

#[test]
fn a_worker_without_memory_or_time_is_a_clear_error() {
    let repo = Repo::with_files();
    let fixture = repo.sandbox("fix");
    let before = repo.rev("palisade/fix");
    fixture.write("large", &"x".repeat(48 << 20));
    let small = WorkerLimits {
        memory: 40 << 20,
        ..WorkerLimits::default()
    };
    let error = worker()
        .with_limits(small)
        .snapshot(&snapshot_request(&repo, &fixture), None)
        .unwrap_err();
    assert!(error.to_string().contains("memory"), "{error}");
    let (from, _held_open) = std::io::pipe().unwrap();
    let short = WorkerLimits {
        seconds: 1,
        ..WorkerLimits::default()
    };
    let error = worker()
        .with_limits(short)
        .snapshot(&snapshot_request(&repo, &fixture), Some(from.into()))
        .unwrap_err();
    assert!(error.to_string().contains("timed out after 1 s"), "{error}");
    assert_eq!(repo.rev("palisade/fix"), before);
}

#[test]
fn program_that_is_no_worker_is_an_error() {
    let repo = Repo::with_files();
    let fixture = repo.sandbox("fix");
    for (program, printed) in [
        ("/bin/false", "exited without"),
        ("/nonexistent", "could not be started"),
    ] {
        let worker = SnapshotWorker::new(PathBuf::from(program), Vec::new());
        let error = worker
            .snapshot(&snapshot_request(&repo, &fixture), None)
            .unwrap_err();
        assert!(error.to_string().contains(printed), "{error}");
    }
}

#[test]
fn missing_or_damaged_manifest_only_costs_time() {
    let repo = Repo::with_files();
    repo.write("target/tracked", "1");
    git(&repo.dir, &["add", "-f", "target/tracked"]);
    repo.commit("tracked although ignored");
    let fixture = repo.sandbox("fix");
    let request = snapshot_request(&repo, &fixture);
    std::fs::remove_file(&request.manifest).unwrap();
    let report = worker().snapshot(&request, None).unwrap();
    assert!(!report.moved && report.read > 4, "{report:?}");
    std::fs::write(&request.manifest, "rubbish").unwrap();
    fixture.write("new", "x");
    let report = worker().snapshot(&request, None).unwrap();
    assert!(report.moved);
    assert!(listing(&repo.dir, "palisade/fix").contains(" target/tracked\n"));
}

#[test]
fn worker_commits_with_the_operators_identity() {
    let repo = Repo::with_files();
    git(&repo.dir, &["config", "user.name", "The Operator"]);
    git(&repo.dir, &["config", "user.email", "o@example.com"]);
    let fixture = repo.sandbox("fix");
    fixture.write("closed", "x");
    let closed = std::fs::Permissions::from_mode(0o600);
    std::fs::set_permissions(fixture.dir.join("closed"), closed).unwrap();
    snapshot(&repo, &fixture, None);
    let author = git(&repo.dir, &["log", "-1", "--format=%an", "palisade/fix"]);
    assert_eq!(author, "The Operator");
}

#[test]
fn stale_branch_lock_error_names_the_file() {
    let repo = Repo::with_files();
    let fixture = repo.sandbox("fix");
    fixture.write("new", "x");
    let lock = repo.dir.join(".git/refs/heads/palisade/fix.lock");
    std::fs::write(&lock, "").unwrap();
    let mut request = snapshot_request(&repo, &fixture);
    request.message = "long ".repeat(100_000);
    let error = worker().snapshot(&request, None).unwrap_err();
    assert!(error.to_string().contains("palisade/fix.lock"), "{error}");
    std::fs::remove_file(lock).unwrap();
    assert!(worker().snapshot(&request, None).unwrap().moved);
}

/// The descriptions of commits that only the workspace's repository has.
fn unimported(repo: &Repo, fixture: &SandboxFixture) -> Vec<String> {
    snapshot(repo, fixture, None).strays
}

#[test]
fn unimported_commits_are_described() {
    let repo = Repo::with_files();
    let fixture = repo.sandbox("fix");
    let git_in_workspace = |args: &[&str]| git(&fixture.dir, args);
    assert_eq!(unimported(&repo, &fixture), [""; 0], "fresh");
    let short = |name: &str| git_in_workspace(&["rev-parse", "--short=12", name]);
    // Another branch, loose and packed.
    git_in_workspace(&["checkout", "-q", "-b", "side"]);
    fixture.write("side", "x");
    git_in_workspace(&["add", "-A"]);
    git_in_workspace(&["commit", "-q", "-m", "side"]);
    git_in_workspace(&["checkout", "-q", "palisade/fix"]);
    let side = format!("branch side at {}", short("side"));
    assert_eq!(unimported(&repo, &fixture), [side.as_str()]);
    git_in_workspace(&["pack-refs", "--all"]);
    assert_eq!(unimported(&repo, &fixture), [side.as_str()]);
    // Two stashes; the older one is in the reflog only.
    for text in ["one", "two"] {
        fixture.write("README.md", text);
        git_in_workspace(&["stash", "-q"]);
    }
    let older = format!("a stash at {}", short("stash@{1}"));
    let newer = format!("a stash at {}", short("stash@{0}"));
    assert_eq!(unimported(&repo, &fixture), [side, newer, older]);
    git_in_workspace(&["stash", "clear"]);
    git_in_workspace(&["branch", "-q", "-D", "side"]);
    assert_eq!(unimported(&repo, &fixture), [""; 0]);
    // A commit on the sandbox's branch that was not imported, as of a paused sandbox.
    git_in_workspace(&["commit", "-q", "--allow-empty", "-m", "own"]);
    let own = format!("branch palisade/fix at {}", short("HEAD"));
    assert_eq!(unimported(&repo, &fixture), [own]);
    let base = repo.rev("HEAD");
    let fetched = bundle(&fixture, &["HEAD", &format!("^{base}")]);
    let report = snapshot(&repo, &fixture, Some(fetched));
    assert_eq!((report.commits, report.strays.len()), (1, 0));
    // A detached HEAD, a tag object, a worktree, and a fetched ref.
    git_in_workspace(&["checkout", "-q", "--detach"]);
    git_in_workspace(&["commit", "-q", "--allow-empty", "-m", "detached"]);
    git_in_workspace(&["update-ref", "refs/remotes/origin/main", "HEAD"]);
    let head = format!("HEAD at {}", short("HEAD"));
    assert_eq!(unimported(&repo, &fixture), [head]);
    git_in_workspace(&["tag", "-a", "-m", "words", "v1"]);
    git_in_workspace(&["checkout", "-q", "palisade/fix"]);
    let tag = format!("tag v1 at {}", short("v1"));
    assert_eq!(unimported(&repo, &fixture), [tag]);
    git_in_workspace(&["tag", "-d", "v1"]);
    let aside = repo.temp.path().join("aside");
    git_in_workspace(&["worktree", "add", "-q", "--detach", aside.to_str().unwrap()]);
    assert_eq!(unimported(&repo, &fixture), [""; 0]);
    git(&aside, &["commit", "-q", "--allow-empty", "-m", "aside"]);
    let found = unimported(&repo, &fixture);
    assert!(
        found[0].starts_with("the HEAD of worktree aside at "),
        "{found:?}"
    );
}

#[test]
fn unreadable_repository_counts_as_unsaved_work() {
    let repo = Repo::with_files();
    type Make = fn(&std::path::Path);
    let cases: [(&str, &str, Make); 5] = [
        ("a-link", "is no directory", |git| {
            std::fs::rename(git, git.with_extension("away")).unwrap();
            std::os::unix::fs::symlink("/nonexistent", git).unwrap();
        }),
        ("a-fifo", "is no regular file", |git| {
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
        let fixture = repo.sandbox(name);
        make(&fixture.dir.join(".git"));
        let found = unimported(&repo, &fixture);
        assert_eq!(found.len(), 1, "{name}: {found:?}");
        assert!(found[0].contains(why), "{name}: {found:?}");
        assert!(!found[0].contains('\x1b'), "{name}: {found:?}");
    }
    // Without a repository there are no commits to lose.
    let fixture = repo.sandbox("none");
    std::fs::remove_dir_all(fixture.dir.join(".git")).unwrap();
    assert_eq!(unimported(&repo, &fixture), [""; 0]);
}
