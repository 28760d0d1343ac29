//! Snapshots of a workspace.

use std::ffi::OsStr;
use std::io::Read;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::PermissionsExt;

use sandbox::git::error::GitError;
use sandbox::git::manifest::{FileTime, Manifest};
use sandbox::git::snapshot::{
    CommitRequest, EntryContent, SkipReason, SnapshotBounds, SnapshotEntry, SnapshotSource,
};

use crate::repo::{Repo, fingerprint, git, listing};

#[test]
fn changes_of_every_kind_are_committed_without_touching_the_worktree() {
    let repo = Repo::with_files();
    let mut fixture = repo.sandbox("fix");
    let before = fingerprint(&repo.dir);
    fixture.write("src/main.rs", "fn main() { todo() }\n");
    fixture.write("deep/er/new.txt", "new\n");
    fixture.write("run2.sh", "#!/bin/sh\n");
    let executable = std::fs::Permissions::from_mode(0o755);
    std::fs::set_permissions(fixture.dir.join("run2.sh"), executable).unwrap();
    let plain = std::fs::Permissions::from_mode(0o644);
    std::fs::set_permissions(fixture.dir.join("run.sh"), plain).unwrap();
    std::fs::remove_file(fixture.dir.join("README.md")).unwrap();
    std::fs::rename(fixture.dir.join("src/lib.rs"), fixture.dir.join("moved.rs")).unwrap();
    std::os::unix::fs::symlink("/etc/passwd", fixture.dir.join("outside")).unwrap();

    let snapshot = fixture.snapshot("bash: cargo test");
    assert!(snapshot.moved);
    assert_eq!(
        listing(&repo.dir, "palisade/fix"),
        "100644 .gitignore\n100644 deep/er/new.txt\n120000 link\n100644 moved.rs\n\
         120000 outside\n100644 run.sh\n100755 run2.sh\n100644 src/main.rs\n"
    );
    assert_eq!(
        git(&repo.dir, &["show", "palisade/fix:outside"]),
        "/etc/passwd"
    );
    assert_eq!(
        git(&repo.dir, &["log", "-1", "--format=%s", "palisade/fix"]),
        "bash: cargo test"
    );
    git(&repo.dir, &["fsck", "--strict", "--full"]);
    assert_eq!(fingerprint(&repo.dir), before);
}

#[test]
fn an_unchanged_workspace_makes_no_commit_and_reads_nothing() {
    let repo = Repo::with_files();
    let mut fixture = repo.sandbox("fix");
    let first = fixture.snapshot("nothing");
    assert!(!first.moved);
    fixture.write("new", "x");
    assert!(fixture.snapshot("something").moved);
    wait_for_clock_tick(&fixture.manifest);
    let third = fixture.snapshot("nothing again");
    assert!(!third.moved);
    let last = fixture.snapshot("and again");
    assert_eq!((last.moved, last.read), (false, 0));
    assert_eq!(
        git(&repo.dir, &["rev-list", "--count", "palisade/fix"]),
        "3"
    );
}

/// Waits until the clock is past every file's last change.
pub(crate) fn wait_for_clock_tick(manifest: &Manifest) {
    let newest = manifest
        .entries
        .values()
        .map(|stamp| stamp.ctime)
        .max()
        .unwrap();
    loop {
        let now = std::time::UNIX_EPOCH.elapsed().unwrap();
        let newest = i128::from(newest.0) * 1_000_000_000 + i128::from(newest.1);
        if now.as_nanos().cast_signed() > newest + 50_000_000 {
            return;
        }
        std::thread::yield_now();
    }
}

#[test]
fn change_with_restored_mtime_is_detected() {
    let repo = Repo::with_files();
    let mut fixture = repo.sandbox("fix");
    wait_for_clock_tick(&fixture.manifest);
    let path = fixture.dir.join("README.md");
    let modified = std::fs::metadata(&path).unwrap().modified().unwrap();
    std::fs::write(&path, "jello\n").unwrap();
    let file = std::fs::File::options().write(true).open(&path).unwrap();
    file.set_modified(modified).unwrap();
    assert!(fixture.snapshot("restored mtime").moved);
    assert_eq!(git(&repo.dir, &["show", "palisade/fix:README.md"]), "jello");
}

#[test]
fn ignore_files_are_respected_but_tracked_files_stay_tracked() {
    let repo = Repo::with_files();
    repo.write("target/tracked", "1");
    git(&repo.dir, &["add", "-f", "target/tracked"]);
    repo.commit("tracked although ignored");
    let mut fixture = repo.sandbox("fix");
    fixture.write("a.log", "no");
    fixture.write("keep.log", "yes");
    fixture.write("target/tracked", "2");
    fixture.write("target/other", "no");
    fixture.write("sub/.gitignore", "/local\n!deep.log\n");
    fixture.write("sub/local", "no");
    fixture.write("sub/deep.log", "yes");
    fixture.write("sub/x/local", "yes");
    let snapshot = fixture.snapshot("work");
    assert!(snapshot.moved);
    let listing = listing(&repo.dir, "palisade/fix");
    let has = |path: &str| listing.contains(&format!(" {path}\n"));
    for path in [
        "keep.log",
        "target/tracked",
        "sub/deep.log",
        "sub/x/local",
        "sub/.gitignore",
    ] {
        assert!(has(path), "{path} in {listing}");
    }
    for path in ["a.log", "target/other", "sub/local"] {
        assert!(!has(path), "{path} in {listing}");
    }
    assert_eq!(
        git(&repo.dir, &["show", "palisade/fix:target/tracked"]),
        "2"
    );
    // `git status` agrees on the remaining changes in the workspace.
    git(&fixture.dir, &["add", "-A"]);
    let agent_tree = git(&fixture.dir, &["write-tree"]);
    assert_eq!(
        git(&repo.dir, &["rev-parse", "palisade/fix^{tree}"]),
        agent_tree
    );
}

#[test]
fn unusual_names_are_kept_byte_for_byte() {
    let repo = Repo::with_files();
    let mut fixture = repo.sandbox("fix");
    for name in [
        b"new\nline".as_slice(),
        b"not \xff utf8",
        b"quote\"",
        b"-dash",
        b"\x1b[2J",
    ] {
        std::fs::write(fixture.dir.join(OsStr::from_bytes(name)), "x").unwrap();
    }
    fixture.snapshot("names");
    git(&fixture.dir, &["add", "-A"]);
    let agent_tree = git(&fixture.dir, &["write-tree"]);
    assert_eq!(
        git(&repo.dir, &["rev-parse", "palisade/fix^{tree}"]),
        agent_tree
    );
    let changes = fixture
        .host_repository
        .diff(&fixture.slug, usize::MAX)
        .unwrap();
    assert_eq!(changes.files.len(), 5);
    assert!(
        !changes.patch.contains(&0x1b),
        "a patch has no escape sequences"
    );
}

#[test]
fn every_spelling_of_dot_git_is_refused() {
    for name in [".GIT", "git~1", ".g\u{200c}it", ".git ", "sub/.Git/config"] {
        let repo = Repo::with_files();
        let mut fixture = repo.sandbox("fix");
        let tip = fixture.host_repository.tip(&fixture.slug).unwrap();
        fixture.write(name, "x");
        let error = fixture
            .try_snapshot("bad", &SnapshotBounds::default(), None)
            .unwrap_err();
        assert!(
            matches!(error, GitError::Forbidden { .. }),
            "{name}: {error}"
        );
        assert_eq!(fixture.host_repository.tip(&fixture.slug).unwrap(), tip);
        assert_no_leftovers(&repo);
    }
}

fn assert_no_leftovers(repo: &Repo) {
    let objects = std::fs::read_dir(repo.dir.join(".git/objects")).unwrap();
    let names: Vec<_> = objects
        .map(|entry| entry.unwrap().file_name().to_string_lossy().into_owned())
        .filter(|name| name.starts_with("tmp"))
        .collect();
    assert_eq!(names, Vec::<String>::new());
    assert_eq!(git(&repo.dir, &["fsck", "--dangling", "--no-progress"]), "");
}

#[test]
fn nested_repository_is_committed_without_dot_git() {
    let repo = Repo::with_files();
    let mut fixture = repo.sandbox("fix");
    let inner = fixture.dir.join("vendor");
    std::fs::create_dir(&inner).unwrap();
    git(&inner, &["init", "-q"]);
    fixture.write("vendor/code", "x");
    let snapshot = fixture.snapshot("vendored");
    assert_eq!(
        snapshot.skipped,
        [(b"vendor/.git".to_vec(), SkipReason::Repository)]
    );
    assert!(listing(&repo.dir, "palisade/fix").contains("100644 vendor/code\n"));
}

#[test]
fn pipes_sockets_and_unreadable_files_are_skipped_and_reported() {
    let repo = Repo::with_files();
    let mut fixture = repo.sandbox("fix");
    let mode = nix::sys::stat::Mode::from_bits_truncate(0o600);
    nix::unistd::mkfifo(&fixture.dir.join("pipe"), mode).unwrap();
    let _socket = std::os::unix::net::UnixListener::bind(fixture.dir.join("socket")).unwrap();
    fixture.write("file", "x");
    let snapshot = fixture.snapshot("odd");
    assert_eq!(
        snapshot.skipped,
        [
            (b"pipe".to_vec(), SkipReason::Fifo),
            (b"socket".to_vec(), SkipReason::Socket)
        ]
    );
    assert!(listing(&repo.dir, "palisade/fix").contains("100644 file\n"));
}

#[test]
fn submodule_is_kept_and_not_read() {
    let other = Repo::with_files();
    let repo = Repo::with_files();
    let url = other.dir.to_str().unwrap();
    let add = [
        "-c",
        "protocol.file.allow=always",
        "submodule",
        "--quiet",
        "add",
        url,
        "sub",
    ];
    git(&repo.dir, &add);
    repo.commit("submodule");
    let mut fixture = repo.sandbox("fix");
    fixture.write("sub/inside", "x");
    fixture.write("outside", "x");
    fixture.snapshot("work");
    let listing = listing(&repo.dir, "palisade/fix");
    assert!(listing.contains("160000 sub\n"), "{listing}");
    assert!(!listing.contains("sub/inside"), "{listing}");
}

#[test]
fn exceeded_bounds_are_reported_and_change_nothing() {
    let small = SnapshotBounds {
        file: 1000,
        total: 5000,
        entries: 50,
        depth: 8,
    };
    type Make = fn(&crate::repo::SandboxFixture);
    let cases: [(&str, Make); 2] = [
        ("the number of files", |fixture| {
            (0..2000).for_each(|n| fixture.write(&format!("many/{n}"), ""));
        }),
        ("the depth of directories", |fixture| {
            fixture.write("a/b/c/d/e/f/g/h/i/j", "");
        }),
    ];
    for (what, make) in cases {
        let repo = Repo::with_files();
        let mut fixture = repo.sandbox("fix");
        make(&fixture);
        let error = fixture.try_snapshot("too much", &small, None).unwrap_err();
        assert!(error.to_string().starts_with(what), "{error}");
        assert_no_leftovers(&repo);
    }
}

#[test]
fn file_over_its_bound_is_skipped_and_others_committed() {
    let repo = Repo::with_files();
    let mut fixture = repo.sandbox("fix");
    let small = SnapshotBounds {
        file: 1000,
        ..SnapshotBounds::default()
    };
    fixture.write("big", &"x".repeat(1001));
    fixture.write("README.md", &"y".repeat(1001));
    fixture.write("new", "x");
    let made = fixture.try_snapshot("work", &small, None).unwrap();
    let skipped: Vec<_> = made
        .skipped
        .iter()
        .map(|(path, _)| path.as_slice())
        .collect();
    assert_eq!(skipped, [b"README.md".as_slice(), b"big"]);
    assert!(
        made.skipped
            .iter()
            .all(|(_, reason)| *reason == SkipReason::TooLarge)
    );
    assert_eq!((made.left_out, made.unsaved), (2, 2));
    let tree = listing(&repo.dir, "palisade/fix");
    assert!(
        tree.contains(" new\n") && !tree.contains(" big\n"),
        "{tree}"
    );
    // The branch's version is kept: the file was not deleted.
    let before = git(&repo.dir, &["rev-parse", "HEAD:README.md"]);
    let after = git(&repo.dir, &["rev-parse", "palisade/fix:README.md"]);
    assert_eq!(before, after);
    // Once the file is small again, it is committed.
    fixture.write("README.md", "small\n");
    let made = fixture.try_snapshot("work", &small, None).unwrap();
    assert_eq!((made.left_out, made.unsaved), (1, 1));
    let text = git(&repo.dir, &["cat-file", "-p", "palisade/fix:README.md"]);
    assert_eq!(text, "small");
    assert_no_leftovers(&repo);
}

#[test]
fn next_snapshot_continues_after_the_total_bound() {
    let repo = Repo::with_files();
    let mut fixture = repo.sandbox("fix");
    let small = SnapshotBounds {
        total: 5000,
        ..SnapshotBounds::default()
    };
    (0..8).for_each(|n| fixture.write(&format!("f{n}"), &format!("{n}").repeat(900)));
    let first = fixture.try_snapshot("work", &small, None).unwrap();
    assert_eq!((first.left_out, first.unsaved), (3, 3));
    assert!(
        first
            .skipped
            .iter()
            .all(|(_, reason)| *reason == SkipReason::NoRoom)
    );
    let second = fixture.try_snapshot("work", &small, None).unwrap();
    assert_eq!(second.left_out, 0, "{:?}", second.skipped);
    let tree = listing(&repo.dir, "palisade/fix");
    (0..8).for_each(|n| assert!(tree.contains(&format!(" f{n}\n")), "{tree}"));
}

/// A source controlled by the agent.
struct Stream<F: FnMut(u64) -> Option<(Vec<u8>, Vec<u8>)>> {
    make: F,
    count: u64,
    path: Vec<u8>,
    body: std::io::Cursor<Vec<u8>>,
}

impl<F: FnMut(u64) -> Option<(Vec<u8>, Vec<u8>)>> SnapshotSource for Stream<F> {
    fn start_time(&self) -> FileTime {
        (0, 0)
    }

    fn next(&mut self) -> Result<Option<SnapshotEntry<'_>>, GitError> {
        let Some((path, body)) = (self.make)(self.count) else {
            return Ok(None);
        };
        self.count += 1;
        self.path = path;
        let size = body.len() as u64;
        self.body = std::io::Cursor::new(body);
        let body: &mut dyn Read = &mut self.body;
        let content = EntryContent::File {
            executable: false,
            size,
            body,
        };
        Ok(Some(SnapshotEntry {
            path: &self.path,
            content,
            stamp: None,
        }))
    }
}

fn stream(
    repo: &Repo,
    make: impl FnMut(u64) -> Option<(Vec<u8>, Vec<u8>)>,
) -> Result<(), GitError> {
    let fixture = repo.sandbox("fix");
    let bounds = SnapshotBounds {
        entries: 100_000,
        ..SnapshotBounds::default()
    };
    let request = CommitRequest {
        slug: &fixture.slug,
        message: "stream",
        agent_head: None,
        bounds: &bounds,
    };
    let mut source = Stream {
        make,
        count: 0,
        path: Vec::new(),
        body: Default::default(),
    };
    fixture
        .host_repository
        .snapshot(&request, &fixture.manifest, &mut source)
        .map(|_| ())
}

#[test]
fn endless_stream_is_refused_at_its_bound() {
    let repo = Repo::with_files();
    let error = stream(&repo, |n| Some((format!("f{n}").into_bytes(), Vec::new()))).unwrap_err();
    assert!(
        error.to_string().starts_with("the number of files"),
        "{error}"
    );
}

#[test]
fn inconsistent_stream_is_refused() {
    for paths in [
        vec!["a", "a"],
        vec!["a", "a/b"],
        vec!["a", "a.b", "a/b"],
        vec!["../a"],
        vec!["/etc/x"],
        vec!["a//b"],
        vec!["a/.git/config"],
        vec![""],
    ] {
        let repo = Repo::with_files();
        let mut names = paths.iter();
        let result = stream(&repo, |_| {
            names.next().map(|name| (name.as_bytes().to_vec(), vec![]))
        });
        assert!(result.is_err(), "{paths:?}");
        assert_no_leftovers(&repo);
    }
}

#[test]
fn linked_worktree_takes_snapshots() {
    let repo = Repo::with_files();
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
    let repo = Repo {
        dir: linked,
        ..repo
    };
    let mut fixture = repo.sandbox("fix");
    let before = fingerprint(&repo.dir);
    fixture.write("new", "x");
    assert!(fixture.snapshot("work").moved);
    assert_eq!(git(&repo.dir, &["show", "palisade/fix:new"]), "x");
    assert_eq!(fingerprint(&repo.dir), before);
}
