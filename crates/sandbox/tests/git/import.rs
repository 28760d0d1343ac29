//! The agent's own commits.

use std::io::Write;
use std::process::{Command, Stdio};

use git2::Oid;
use sandbox::git::error::GitError;
use sandbox::git::snapshot::Bounds;

use crate::repo::{Place, Repo, git};

fn bundle(place: &Place, name: &str, what: &[&str]) -> Vec<u8> {
    let path = place.dir.parent().unwrap().join(name);
    let mut args = vec!["bundle", "create", "-q", path.to_str().unwrap()];
    args.extend(what);
    git(&place.dir, &args);
    std::fs::read(path).unwrap()
}

fn rev(place: &Place, name: &str) -> Oid {
    Oid::from_str(&git(&place.dir, &["rev-parse", name])).unwrap()
}

fn commit(place: &Place, path: &str, text: &str) -> Oid {
    place.write(path, text);
    git(&place.dir, &["add", "-A"]);
    git(
        &place.dir,
        &["commit", "-q", "-m", &format!("agent: {path}")],
    );
    rev(place, "HEAD")
}

#[test]
fn commits_come_over_by_bundle_and_a_snapshot_follows_them() {
    let repo = Repo::with_files();
    let mut place = repo.sandbox("fix");
    let tip = place.home.tip(&place.slug).unwrap();
    commit(&place, "one", "1");
    let head = commit(&place, "two", "2");
    let bytes = bundle(&place, "b", &[&format!("{tip}..HEAD")]);
    let imported = place
        .home
        .import(&place.slug, &mut bytes.as_slice(), None, &Bounds::default())
        .unwrap();
    assert_eq!((imported.head, imported.commits), (head, 2));
    assert_eq!(
        place.home.tip(&place.slug).unwrap(),
        tip,
        "an import moves nothing"
    );

    // Nothing beyond the agent's commits: the branch moves to them, without one of ours.
    let snapshot = place
        .try_snapshot("end", &Bounds::default(), Some(head))
        .unwrap();
    assert_eq!(snapshot.tip, head);

    // More in the worktree: ours follows the agent's.
    let head = commit(&place, "three", "3");
    place.write("four", "4");
    let bytes = bundle(&place, "b2", &["HEAD"]);
    place
        .home
        .import(
            &place.slug,
            &mut bytes.as_slice(),
            Some(head),
            &Bounds::default(),
        )
        .unwrap();
    let snapshot = place
        .try_snapshot("more", &Bounds::default(), Some(head))
        .unwrap();
    assert_eq!(
        git(&repo.dir, &["rev-parse", &format!("{}^", snapshot.tip)]),
        head.to_string()
    );
    git(&repo.dir, &["fsck", "--strict", "--full"]);
}

#[test]
fn a_rewritten_history_is_merged_with_ours() {
    let repo = Repo::with_files();
    let mut place = repo.sandbox("fix");
    place.write("ours", "1");
    let ours = place.snapshot("ours").tip;
    git(&place.dir, &["add", "-A"]);
    git(&place.dir, &["commit", "-q", "--amend", "-m", "rewritten"]);
    let head = rev(&place, "HEAD");
    let bytes = bundle(&place, "b", &["HEAD"]);
    place
        .home
        .import(
            &place.slug,
            &mut bytes.as_slice(),
            Some(head),
            &Bounds::default(),
        )
        .unwrap();
    let tip = place
        .try_snapshot("end", &Bounds::default(), Some(head))
        .unwrap()
        .tip;
    let parents = git(&repo.dir, &["log", "-1", "--format=%P", &tip.to_string()]);
    assert_eq!(parents, format!("{ours} {head}"));
    // An agent that stays behind changes nothing any more.
    assert!(
        !place
            .try_snapshot("again", &Bounds::default(), Some(head))
            .unwrap()
            .moved
    );
}

/// A pack of these objects.
fn pack(place: &Place, ids: &[String]) -> Vec<u8> {
    let mut child = Command::new("git")
        .args(["pack-objects", "--stdout", "-q"])
        .current_dir(&place.dir)
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

/// A raw object in the workspace, as an agent can write any.
fn object(place: &Place, kind: &str, bytes: &[u8]) -> String {
    let mut child = Command::new("git")
        .args(["hash-object", "-w", "--literally", "--stdin", "-t", kind])
        .current_dir(&place.dir)
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

fn raw_commit(place: &Place, tree: &str) -> String {
    let parent = rev(place, "HEAD");
    let text = format!(
        "tree {tree}\nparent {parent}\nauthor A <a> 1 +0000\ncommitter A <a> 1 +0000\n\nx\n"
    );
    object(place, "commit", text.as_bytes())
}

#[test]
fn bad_trees_are_refused_and_nothing_of_them_stays() {
    let repo = Repo::with_files();
    let place = repo.sandbox("fix");
    let blob = object(&place, "blob", b"x");
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
        ("another kind", raw_tree(&[("40000", b"a", &blob)])),
        ("cut short", b"100644 a\0short".to_vec()),
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
        let tree = object(&place, "tree", &bytes);
        let head = raw_commit(&place, &tree);
        let bytes = pack(&place, &[head.clone(), tree, blob.clone()]);
        let head = Oid::from_str(&head).unwrap();
        let error = place
            .home
            .import(
                &place.slug,
                &mut bytes.as_slice(),
                Some(head),
                &Bounds::default(),
            )
            .unwrap_err();
        assert!(matches!(error, GitError::BadObject { .. }), "{error}");
        assert!(error.to_string().contains(why), "{why}: {error}");
        assert_eq!(objects(), before, "{why}");
    }
}

#[test]
fn a_tree_bomb_is_counted_and_not_unfolded() {
    let repo = Repo::with_files();
    let place = repo.sandbox("fix");
    let blob = object(&place, "blob", b"x");
    let names: Vec<String> = (0..10).map(|n| n.to_string()).collect();
    let mut ids = vec![blob.clone()];
    let mut below = ("100644", blob);
    for _ in 0..10 {
        let entries: Vec<_> = names
            .iter()
            .map(|name| (below.0, name.as_bytes(), below.1.as_str()))
            .collect();
        let tree = object(&place, "tree", &raw_tree(&entries));
        ids.push(tree.clone());
        below = ("40000", tree);
    }
    let head = raw_commit(&place, &below.1);
    ids.push(head.clone());
    let bytes = pack(&place, &ids);
    let head = Oid::from_str(&head).unwrap();
    let error = place
        .home
        .import(
            &place.slug,
            &mut bytes.as_slice(),
            Some(head),
            &Bounds::default(),
        )
        .unwrap_err();
    assert!(error.to_string().contains("too many paths"), "{error}");
}

#[test]
fn broken_and_oversized_streams_are_refused() {
    let repo = Repo::with_files();
    let place = repo.sandbox("fix");
    let head = commit(&place, "big", &"line\n".repeat(10_000));
    let whole = bundle(&place, "b", &["HEAD"]);
    let import = |bytes: &[u8], head, bounds: &Bounds| {
        place
            .home
            .import(&place.slug, &mut &bytes[..], head, bounds)
            .map(|_| ())
    };
    let bounds = Bounds::default();
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
    let small = Bounds {
        total: 500,
        ..Bounds::default()
    };
    assert!(import(&whole, None, &small).is_err());
    let small = Bounds {
        file: 5_000,
        ..Bounds::default()
    };
    let error = import(&whole, None, &small).unwrap_err();
    assert!(error.to_string().contains("bound"), "{error}");
    import(&whole, None, &bounds).unwrap();
}
