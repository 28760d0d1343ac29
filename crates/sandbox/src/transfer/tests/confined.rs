//! Host paths that an agent chooses.

use std::os::unix::fs::symlink;
use std::path::Path;

use super::super::confined::ConfinedDirectory;
use super::*;

/// A worktree with a repository, links out of it, and files outside.
fn worktree() -> tempfile::TempDir {
    let place = tempfile::tempdir().unwrap();
    let tree = place.path().join("tree");
    for directory in ["tree/.git", "tree/sub/.git", "tree/state", "outside"] {
        std::fs::create_dir_all(place.path().join(directory)).unwrap();
    }
    for (file, text) in [
        ("tree/a", "a"),
        ("tree/.git/config", "secret"),
        ("tree/sub/b", "b"),
        ("tree/sub/.git/config", "secret"),
        ("tree/state/key", "secret"),
        ("outside/c", "secret"),
    ] {
        std::fs::write(place.path().join(file), text).unwrap();
    }
    symlink("../outside", tree.join("out")).unwrap();
    symlink("a", tree.join("link")).unwrap();
    place
}

fn packed(place: &Path, source: &str) -> Result<(TransferSummary, String), TransferError> {
    let tree = place.join("tree");
    let mut archive = Vec::new();
    let within = ConfinedDirectory::open(&tree).unwrap();
    let summary = within.pack(source, &tree.join("state"), &mut archive, &LARGE_BOUNDS)?;
    Ok((summary, String::from_utf8_lossy(&archive).into_owned()))
}

#[test]
fn pack_is_confined_and_skips_repositories() {
    let place = worktree();
    for (source, reason) in [
        ("../outside/c", MemberRefusal::DotDot),
        ("sub/../../outside/c", MemberRefusal::DotDot),
        ("/etc/passwd", MemberRefusal::Absolute),
        ("", MemberRefusal::InvalidPath),
        (".git", MemberRefusal::Repository),
        (".GIT/config", MemberRefusal::Repository),
        ("sub/.git/config", MemberRefusal::Repository),
        ("git~1/config", MemberRefusal::Repository),
        ("out", MemberRefusal::Link),
        ("out/c", MemberRefusal::Link),
        ("link", MemberRefusal::Link),
        ("a/b", MemberRefusal::Link),
    ] {
        let path = source.to_owned();
        let expected = TransferError::Refused { path, reason };
        assert_eq!(packed(place.path(), source).unwrap_err(), expected);
    }
    let missing = packed(place.path(), "none/at/all").unwrap_err();
    assert_eq!(missing, TransferError::Missing("none/at/all".to_owned()));
    for source in [".", "sub", "./sub/"] {
        let (summary, archive) = packed(place.path(), source).unwrap();
        assert!(!archive.contains("secret"), "{source}");
        assert!(archive.contains("b"), "{source}");
        assert!(summary.left_out.iter().any(|note| note.contains(".git")));
    }
}

#[test]
fn unpack_is_confined_and_refuses_sensitive_paths() {
    let place = worktree();
    let tree = place.path().join("tree");
    let unpacked = |archive: Vec<u8>, to: &str| {
        let within = ConfinedDirectory::open(&tree).unwrap();
        within.unpack(&mut archive.as_slice(), to, &LARGE_BOUNDS)
    };
    let archive = || ArchiveBuilder::default().file("new", "new").end();
    for (to, reason) in [
        ("..", MemberRefusal::DotDot),
        ("/tmp", MemberRefusal::Absolute),
        (".git/hooks", MemberRefusal::Repository),
        ("out", MemberRefusal::Link),
        ("out/deeper", MemberRefusal::Link),
        ("a", MemberRefusal::Link),
    ] {
        let path = to.to_owned();
        let expected = TransferError::Refused { path, reason };
        assert_eq!(unpacked(archive(), to).unwrap_err(), expected);
    }
    assert!(!place.path().join("outside/new").exists());
    let over = ArchiveBuilder::default()
        .file("a", "other")
        .file("new", "new")
        .end();
    let exists = TransferError::Exists("a".to_owned());
    assert_eq!(unpacked(over, ".").unwrap_err(), exists);
    for (to, path) in [
        (".", ".envrc"),
        (".vscode", "tasks.json"),
        ("x", ".github/a.yml"),
    ] {
        let steering = ArchiveBuilder::default().file(path, "x").end();
        let error = unpacked(steering, to).unwrap_err();
        assert!(error.to_string().contains("configures tools"), "{error}");
    }
    assert!(
        !tree.join(".vscode").exists(),
        "the created directory was removed"
    );
    assert!(!tree.join("new").exists());
    let summary = unpacked(archive(), "deep/down").unwrap();
    assert_eq!(summary.files, 1);
    let text = std::fs::read_to_string(tree.join("deep/down/new")).unwrap();
    assert_eq!(text, "new");
    let left: Vec<_> = std::fs::read_dir(tree.join("deep/down")).unwrap().collect();
    assert_eq!(left.len(), 1, "{left:?}");
}
