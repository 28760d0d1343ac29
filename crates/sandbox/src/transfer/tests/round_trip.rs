//! Round trips through an archive.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::path::Path;

use proptest::prelude::{ProptestConfig, Strategy, any, prop_assert_eq, prop_oneof, proptest};
use proptest::test_runner::TestCaseError;

use super::LARGE_BOUNDS;
use crate::transfer::{UnpackRules, pack, unpack};

/// A tree: for each path its mode and content.
type Tree = BTreeMap<Vec<u8>, (u32, Node)>;

#[derive(Clone, Debug, PartialEq, Eq)]
enum Node {
    File(Vec<u8>),
    Directory,
    Link(Vec<u8>),
}

fn write_tree(root: &Path, tree: &Tree) {
    for (path, (mode, node)) in tree {
        let path = root.join(OsStr::from_bytes(path));
        match node {
            Node::File(bytes) => std::fs::write(&path, bytes).unwrap(),
            Node::Directory => std::fs::create_dir(&path).unwrap(),
            Node::Link(text) => {
                symlink(OsStr::from_bytes(text), &path).unwrap();
                continue;
            }
        }
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(*mode)).unwrap();
    }
}

fn read_tree(root: &Path, below: &Path, tree: &mut Tree) {
    for entry in std::fs::read_dir(root.join(below)).unwrap() {
        let path = below.join(entry.unwrap().file_name());
        let full = root.join(&path);
        let data = full.symlink_metadata().unwrap();
        let node = if data.is_dir() {
            read_tree(root, &path, tree);
            Node::Directory
        } else if data.is_symlink() {
            Node::Link(
                std::fs::read_link(&full)
                    .unwrap()
                    .as_os_str()
                    .as_bytes()
                    .to_vec(),
            )
        } else {
            Node::File(std::fs::read(&full).unwrap())
        };
        let mode = if data.is_symlink() {
            0
        } else {
            data.mode() & 0o777
        };
        tree.insert(path.as_os_str().as_bytes().to_vec(), (mode, node));
    }
}

fn name() -> impl Strategy<Value = Vec<u8>> {
    let byte = any::<u8>().prop_filter("no separator", |byte| !matches!(byte, 0 | b'/'));
    proptest::collection::vec(byte, 1..140)
        .prop_filter("a name", |name| !matches!(name.as_slice(), b"." | b".."))
}

/// Up to three levels; directories come before their entries.
fn tree() -> impl Strategy<Value = Tree> {
    let content = proptest::collection::vec(any::<u8>(), 0..2000);
    let leaf = prop_oneof![
        (
            proptest::sample::select(vec![0o644, 0o755, 0o600, 0o400]),
            content
        )
            .prop_map(|(mode, bytes)| (mode, Node::File(bytes))),
        name().prop_map(|text| (0, Node::Link(text))),
    ];
    let places = proptest::collection::vec((name(), 0..3_usize), 0..6);
    let leaves = proptest::collection::vec((name(), any::<proptest::sample::Index>(), leaf), 0..12);
    (places, leaves).prop_map(|(places, leaves)| {
        let mut tree = Tree::new();
        let mut directories = vec![Vec::new()];
        for (name, above) in places {
            let above = directories.get(above).cloned().unwrap_or_default();
            let path = [above, name].join(&b'/');
            let path = path.strip_prefix(b"/").unwrap_or(&path).to_vec();
            if tree
                .insert(path.clone(), (0o755, Node::Directory))
                .is_none()
            {
                directories.push(path);
            }
        }
        for (name, above, leaf) in leaves {
            let path = [above.get(&directories).clone(), name].join(&b'/');
            let path = path.strip_prefix(b"/").unwrap_or(&path).to_vec();
            tree.entry(path).or_insert(leaf);
        }
        tree
    })
}

#[test]
fn archives_are_interchangeable_with_gnu_tar() {
    let place = tempfile::tempdir().unwrap();
    let source = place.path().join("source");
    let long = "deep/".repeat(40);
    std::fs::create_dir_all(source.join(&long)).unwrap();
    std::fs::write(source.join(&long).join("x".repeat(200)), "long").unwrap();
    std::fs::write(source.join("tool"), "short").unwrap();
    std::fs::set_permissions(source.join("tool"), PermissionsExt::from_mode(0o755)).unwrap();
    std::fs::hard_link(source.join("tool"), source.join("twin")).unwrap();
    symlink(format!("{long}{}", "x".repeat(200)), source.join("link")).unwrap();
    let mut expected = Tree::new();
    read_tree(&source, Path::new(""), &mut expected);
    let compare = |root: &Path, what: &str| {
        let mut arrived = Tree::new();
        read_tree(root, Path::new(""), &mut arrived);
        assert_eq!(arrived, expected, "{what}");
    };
    let tar = |words: &[&str]| {
        let mut tar = std::process::Command::new("tar");
        let done = tar.current_dir(place.path()).args(words).status().unwrap();
        assert!(done.success(), "{words:?}");
    };
    let mut ours = std::fs::File::create(place.path().join("ours.tar")).unwrap();
    pack(&source, &mut ours, &mut |_| {}).unwrap();
    std::fs::create_dir(place.path().join("by-tar")).unwrap();
    tar(&["-x", "-C", "by-tar", "-f", "ours.tar"]);
    compare(&place.path().join("by-tar/source"), "ours");
    for format in ["gnu", "pax"] {
        let name = format!("{format}.tar");
        tar(&["-c", "--format", format, "-f", &name, "source"]);
        let mut theirs = std::fs::File::open(place.path().join(&name)).unwrap();
        let target = place.path().join(format);
        unpack(&mut theirs, &target, &LARGE_BOUNDS, &UnpackRules::FOR_HOST).unwrap();
        compare(&target.join("source"), format);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn tree_round_trip_is_lossless(tree in tree()) {
        let place = tempfile::tempdir().unwrap();
        let source = place.path().join("source");
        std::fs::create_dir(&source).unwrap();
        write_tree(&source, &tree);
        let mut archive = Vec::new();
        let packed = pack(&source, &mut archive, &mut |_| {})
            .map_err(|error| TestCaseError::fail(error.to_string()))?;
        let target = place.path().join("target");
        let unpacked = unpack(&mut archive.as_slice(), &target, &LARGE_BOUNDS, &UnpackRules::FOR_HOST)
            .map_err(|error| TestCaseError::fail(error.to_string()))?;
        prop_assert_eq!(packed, unpacked);
        let mut arrived = Tree::new();
        read_tree(&target.join("source"), Path::new(""), &mut arrived);
        prop_assert_eq!(arrived, tree);
    }
}
