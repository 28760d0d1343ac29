//! Import of the agent's commits.

use std::io::Write;
use std::process::{Command, Stdio};

use git2::Oid;
use sandbox::git::error::GitError;
use sandbox::git::snapshot::SnapshotBounds;

use crate::repo::{Repo, SandboxFixture, git};

fn bundle(fixture: &SandboxFixture, name: &str, what: &[&str]) -> Vec<u8> {
    let path = fixture.dir.parent().unwrap().join(name);
    let mut args = vec!["bundle", "create", "-q", path.to_str().unwrap()];
    args.extend(what);
    git(&fixture.dir, &args);
    std::fs::read(path).unwrap()
}

fn rev(fixture: &SandboxFixture, name: &str) -> Oid {
    Oid::from_str(&git(&fixture.dir, &["rev-parse", name])).unwrap()
}

fn commit(fixture: &SandboxFixture, path: &str, text: &str) -> Oid {
    fixture.write(path, text);
    git(&fixture.dir, &["add", "-A"]);
    git(
        &fixture.dir,
        &["commit", "-q", "-m", &format!("agent: {path}")],
    );
    rev(fixture, "HEAD")
}

#[test]
fn bundle_is_imported_and_snapshot_follows_it() {
    let repo = Repo::with_files();
    let mut fixture = repo.sandbox("fix");
    let tip = fixture.host_repository.tip(&fixture.slug).unwrap();
    commit(&fixture, "one", "1");
    let head = commit(&fixture, "two", "2");
    let bytes = bundle(&fixture, "b", &[&format!("{tip}..HEAD")]);
    let imported = fixture
        .host_repository
        .import(
            &fixture.slug,
            &mut bytes.as_slice(),
            None,
            &SnapshotBounds::default(),
        )
        .unwrap();
    assert_eq!((imported.head, imported.commits), (head, 2));
    assert_eq!(
        fixture.host_repository.tip(&fixture.slug).unwrap(),
        tip,
        "an import moves nothing"
    );

    // The worktree equals the agent's commit: the branch moves to it without a snapshot commit.
    let snapshot = fixture
        .try_snapshot("end", &SnapshotBounds::default(), Some(head))
        .unwrap();
    assert_eq!(snapshot.tip, head);

    // The worktree has more changes: a snapshot commit follows the agent's.
    let head = commit(&fixture, "three", "3");
    fixture.write("four", "4");
    let bytes = bundle(&fixture, "b2", &["HEAD"]);
    fixture
        .host_repository
        .import(
            &fixture.slug,
            &mut bytes.as_slice(),
            Some(head),
            &SnapshotBounds::default(),
        )
        .unwrap();
    let snapshot = fixture
        .try_snapshot("more", &SnapshotBounds::default(), Some(head))
        .unwrap();
    assert_eq!(
        git(&repo.dir, &["rev-parse", &format!("{}^", snapshot.tip)]),
        head.to_string()
    );
    git(&repo.dir, &["fsck", "--strict", "--full"]);
}

#[test]
fn rewritten_history_is_merged_with_the_branch() {
    let repo = Repo::with_files();
    let mut fixture = repo.sandbox("fix");
    fixture.write("ours", "1");
    let ours = fixture.snapshot("ours").tip;
    git(&fixture.dir, &["add", "-A"]);
    git(
        &fixture.dir,
        &["commit", "-q", "--amend", "-m", "rewritten"],
    );
    let head = rev(&fixture, "HEAD");
    let bytes = bundle(&fixture, "b", &["HEAD"]);
    fixture
        .host_repository
        .import(
            &fixture.slug,
            &mut bytes.as_slice(),
            Some(head),
            &SnapshotBounds::default(),
        )
        .unwrap();
    let tip = fixture
        .try_snapshot("end", &SnapshotBounds::default(), Some(head))
        .unwrap()
        .tip;
    let parents = git(&repo.dir, &["log", "-1", "--format=%P", &tip.to_string()]);
    assert_eq!(parents, format!("{ours} {head}"));
    // An agent's head that is behind the branch changes nothing.
    assert!(
        !fixture
            .try_snapshot("again", &SnapshotBounds::default(), Some(head))
            .unwrap()
            .moved
    );
}

/// Builds a pack of these objects.
fn pack(fixture: &SandboxFixture, ids: &[String]) -> Vec<u8> {
    let mut child = Command::new("git")
        .args(["pack-objects", "--stdout", "-q"])
        .current_dir(&fixture.dir)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    child
        .stdin
        .take()
        .unwrap()
        .write_all(ids.join("\n").as_bytes())
        .unwrap();
    child.wait_with_output().unwrap().stdout
}

/// Writes a raw object to the workspace's repository, as an agent can.
fn object(fixture: &SandboxFixture, kind: &str, bytes: &[u8]) -> String {
    let mut child = Command::new("git")
        .args(["hash-object", "-w", "--literally", "--stdin", "-t", kind])
        .current_dir(&fixture.dir)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    child.stdin.take().unwrap().write_all(bytes).unwrap();
    let out = child.wait_with_output().unwrap();
    String::from_utf8(out.stdout).unwrap().trim().to_owned()
}

fn raw_tree(entries: &[(&str, &[u8], &str)]) -> Vec<u8> {
    let mut bytes = Vec::new();
    for (mode, name, id) in entries {
        bytes.extend_from_slice(format!("{mode} ").as_bytes());
        bytes.extend_from_slice(name);
        bytes.push(0);
        bytes.extend_from_slice(Oid::from_str(id).unwrap().as_bytes());
    }
    bytes
}

fn raw_commit(fixture: &SandboxFixture, tree: &str) -> String {
    let parent = rev(fixture, "HEAD");
    let text = format!(
        "tree {tree}\nparent {parent}\nauthor A <a> 1 +0000\ncommitter A <a> 1 +0000\n\nx\n"
    );
    object(fixture, "commit", text.as_bytes())
}

#[test]
fn malformed_trees_are_refused_and_not_kept() {
    let repo = Repo::with_files();
    let fixture = repo.sandbox("fix");
    let blob = object(&fixture, "blob", b"x");
    let gone = "1".repeat(40);
    let cases: Vec<(&str, Vec<u8>)> = vec![
        (
            "spelling of '.git'",
            raw_tree(&[("100644", b".git", &blob)]),
        ),
        (
            "spelling of '.git'",
            raw_tree(&[("100644", b".GiT", &blob)]),
        ),
        (
            "spelling of '.git'",
            raw_tree(&[("100644", b"git~1", &blob)]),
        ),
        ("leaves the tree", raw_tree(&[("100644", b"..", &blob)])),
        ("slash", raw_tree(&[("100644", b"a/b", &blob)])),
        ("empty component", raw_tree(&[("100644", b"", &blob)])),
        ("unknown mode", raw_tree(&[("100777", b"a", &blob)])),
        ("unknown mode", raw_tree(&[("040000", b"a", &blob)])),
        (
            "not sorted",
            raw_tree(&[("100644", b"b", &blob), ("100644", b"a", &blob)]),
        ),
        (
            "not sorted",
            raw_tree(&[("100644", b"a", &blob), ("100644", b"a", &blob)]),
        ),
        (
            "'.gitmodules' is a link",
            raw_tree(&[("120000", b".gitmodules", &blob)]),
        ),
        ("another repository", raw_tree(&[("160000", b"sub", &gone)])),
        ("missing", raw_tree(&[("100644", b"a", &gone)])),
        ("another type", raw_tree(&[("40000", b"a", &blob)])),
        ("truncated", b"100644 a\0short".to_vec()),
    ];
    let objects = || {
        let all = git(
            &repo.dir,
            &["cat-file", "--batch-check", "--batch-all-objects"],
        );
        all.lines().count()
    };
    let before = objects();
    for (why, bytes) in cases {
        let tree = object(&fixture, "tree", &bytes);
        let head = raw_commit(&fixture, &tree);
        let bytes = pack(&fixture, &[head.clone(), tree, blob.clone()]);
        let head = Oid::from_str(&head).unwrap();
        let error = fixture
            .host_repository
            .import(
                &fixture.slug,
                &mut bytes.as_slice(),
                Some(head),
                &SnapshotBounds::default(),
            )
            .unwrap_err();
        assert!(matches!(error, GitError::BadObject { .. }), "{error}");
        assert!(error.to_string().contains(why), "{why}: {error}");
        assert_eq!(objects(), before, "{why}");
    }
}

#[test]
fn tree_bomb_is_refused_without_expansion() {
    let repo = Repo::with_files();
    let fixture = repo.sandbox("fix");
    let blob = object(&fixture, "blob", b"x");
    let names: Vec<String> = (0..10).map(|n| n.to_string()).collect();
    let mut ids = vec![blob.clone()];
    let mut below = ("100644", blob);
    for _ in 0..10 {
        let entries: Vec<_> = names
            .iter()
            .map(|name| (below.0, name.as_bytes(), below.1.as_str()))
            .collect();
        let tree = object(&fixture, "tree", &raw_tree(&entries));
        ids.push(tree.clone());
        below = ("40000", tree);
    }
    let head = raw_commit(&fixture, &below.1);
    ids.push(head.clone());
    let bytes = pack(&fixture, &ids);
    let head = Oid::from_str(&head).unwrap();
    let error = fixture
        .host_repository
        .import(
            &fixture.slug,
            &mut bytes.as_slice(),
            Some(head),
            &SnapshotBounds::default(),
        )
        .unwrap_err();
    assert!(error.to_string().contains("too many paths"), "{error}");
}

#[test]
fn broken_and_oversized_streams_are_refused() {
    let repo = Repo::with_files();
    let fixture = repo.sandbox("fix");
    let head = commit(&fixture, "big", &"line\n".repeat(10_000));
    let whole = bundle(&fixture, "b", &["HEAD"]);
    let import = |bytes: &[u8], head, bounds: &SnapshotBounds| {
        fixture
            .host_repository
            .import(&fixture.slug, &mut &bytes[..], head, bounds)
            .map(|_| ())
    };
    let bounds = SnapshotBounds::default();
    assert!(import(b"", None, &bounds).is_err());
    assert!(import(b"PACK", Some(head), &bounds).is_err());
    assert!(import(b"# v2 git bundle\n", None, &bounds).is_err());
    assert!(import(b"# v3 git bundle\n@object-format=sha1\n\n", None, &bounds).is_err());
    assert!(import(&whole[..whole.len() / 2], None, &bounds).is_err());
    let mut flipped = whole.clone();
    let middle = whole.len() - 100;
    flipped[middle] ^= 0xff;
    assert!(import(&flipped, None, &bounds).is_err());
    let missing = Oid::from_str(&"2".repeat(40)).unwrap();
    assert!(import(&whole, Some(missing), &bounds).is_err());
    let small = SnapshotBounds {
        total: 500,
        ..SnapshotBounds::default()
    };
    assert!(import(&whole, None, &small).is_err());
    let small = SnapshotBounds {
        file: 5_000,
        ..SnapshotBounds::default()
    };
    let error = import(&whole, None, &small).unwrap_err();
    assert!(error.to_string().contains("limit"), "{error}");
    import(&whole, None, &bounds).unwrap();
}
