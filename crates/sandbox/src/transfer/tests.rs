//! Hostile archives, and targets that must stay unchanged.

mod confined;
mod repositories;
mod round_trip;

use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};

use proptest::prelude::{ProptestConfig, any, prop_assert_eq, proptest};

use super::header::{BLOCK, Header};
use super::*;

const LARGE_BOUNDS: TransferBounds = TransferBounds {
    bytes: 1 << 20,
    entries: 1000,
};

/// Builds an archive byte by byte.
#[derive(Default)]
struct ArchiveBuilder(Vec<u8>);

impl ArchiveBuilder {
    fn raw(mut self, kind: u8, path: &[u8], link: &[u8], mode: u32, content: &[u8]) -> Self {
        let header = Header::new(kind, path, link).complete(mode, content.len() as u64, 0);
        self.0.extend(header.0);
        self.0.extend(content);
        self.0.resize(self.0.len().next_multiple_of(BLOCK), 0);
        self
    }

    fn file(self, path: &str, content: &str) -> Self {
        self.raw(b'0', path.as_bytes(), b"", 0o644, content.as_bytes())
    }

    fn directory(self, path: &str) -> Self {
        self.raw(b'5', path.as_bytes(), b"", 0o755, b"")
    }

    fn link(self, path: &str, text: &str) -> Self {
        self.raw(b'2', path.as_bytes(), text.as_bytes(), 0o777, b"")
    }

    fn hard_link(self, path: &str, to: &str) -> Self {
        self.raw(b'1', path.as_bytes(), to.as_bytes(), 0o644, b"")
    }

    fn extension(self, records: &[(&str, &str)]) -> Self {
        let mut content = Vec::new();
        for (key, value) in records {
            let rest = format!(" {key}={value}\n");
            let length = (1..)
                .find(|length: &usize| length.to_string().len() + rest.len() == *length)
                .unwrap();
            content.extend(format!("{length}{rest}").bytes());
        }
        self.raw(b'x', b"pax", b"", 0o644, &content)
    }

    fn end(mut self) -> Vec<u8> {
        self.0.extend([0; 2 * BLOCK]);
        self.0
    }

    fn unpack(self, target: &Path) -> Result<TransferSummary, TransferError> {
        unpack(
            &mut self.end().as_slice(),
            target,
            &LARGE_BOUNDS,
            &UnpackRules::FOR_HOST,
        )
    }
}

/// A directory with a file that must stay unchanged, and a target beside it.
fn target_fixture() -> (tempfile::TempDir, PathBuf) {
    let place = tempfile::tempdir().unwrap();
    std::fs::write(place.path().join("outside"), "mine").unwrap();
    let target = place.path().join("target");
    std::fs::create_dir(&target).unwrap();
    std::fs::write(target.join("there"), "mine").unwrap();
    (place, target)
}

fn reason(error: TransferError) -> MemberRefusal {
    match error {
        TransferError::Refused { reason, .. } => reason,
        other => panic!("{other}"),
    }
}

fn list(directory: &Path) -> Vec<String> {
    let mut names: Vec<_> = std::fs::read_dir(directory)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().to_string_lossy().into_owned())
        .collect();
    names.sort();
    names
}

#[test]
fn hostile_member_is_refused_and_nothing_is_unpacked() {
    let before = || ArchiveBuilder::default().file("good", "x").directory("d");
    let device = |kind| before().raw(kind, b"dev", b"", 0o666, b"");
    for (what, archive, wanted) in [
        (
            "'..' at the start",
            before().file("../outside", "x"),
            MemberRefusal::DotDot,
        ),
        (
            "'..' within the path",
            before().file("d/../../outside", "x"),
            MemberRefusal::DotDot,
        ),
        (
            "absolute",
            before().file("/outside", "x"),
            MemberRefusal::Absolute,
        ),
        (
            "an empty path",
            before().file("", "x"),
            MemberRefusal::InvalidPath,
        ),
        (
            "a file as the target",
            before().file("./", "x"),
            MemberRefusal::InvalidPath,
        ),
        (
            "a link, then a child",
            before().link("l", "d").file("l/x", "x"),
            MemberRefusal::ThroughLink,
        ),
        (
            "a link to outside, then a child",
            before().link("l", "..").file("l/outside", "x"),
            MemberRefusal::ThroughLink,
        ),
        (
            "a link, then a directory of that name",
            before().link("l", "..").directory("l"),
            MemberRefusal::ThroughLink,
        ),
        (
            "a file, then a child",
            before().file("good/x", "x"),
            MemberRefusal::ThroughLink,
        ),
        (
            "a link, then a file of that name",
            before().link("l", "../outside").file("l", "x"),
            MemberRefusal::Duplicate,
        ),
        (
            "a file twice",
            before().file("good", "y"),
            MemberRefusal::Duplicate,
        ),
        (
            "a hard link to a path outside",
            before().hard_link("h", "../outside"),
            MemberRefusal::HardLinkOut,
        ),
        (
            "a hard link to the root",
            before().hard_link("h", "/etc/passwd"),
            MemberRefusal::HardLinkOut,
        ),
        (
            "a hard link to an existing file",
            before().hard_link("h", "there"),
            MemberRefusal::HardLinkOut,
        ),
        (
            "a hard link to a link",
            before().link("l", "../outside").hard_link("h", "l"),
            MemberRefusal::HardLinkOut,
        ),
        (
            "a hard link through a link",
            before().link("l", "..").hard_link("h", "l/outside"),
            MemberRefusal::HardLinkOut,
        ),
        (
            "a hard link to a directory",
            before().hard_link("h", "d"),
            MemberRefusal::HardLinkOut,
        ),
        ("a character device", device(b'3'), MemberRefusal::Device),
        ("a block device", device(b'4'), MemberRefusal::Device),
        ("a FIFO", device(b'6'), MemberRefusal::Fifo),
        ("a sparse file", device(b'S'), MemberRefusal::Sparse),
        ("part of a file", device(b'M'), MemberRefusal::Unknown),
        ("a listing", device(b'D'), MemberRefusal::Unknown),
        (
            "a sparse file of the new kind",
            before()
                .extension(&[("GNU.sparse.major", "1")])
                .file("s", "x"),
            MemberRefusal::Sparse,
        ),
        (
            "a path with '..' in an extension",
            before()
                .extension(&[("path", "../outside")])
                .file("fine", "x"),
            MemberRefusal::DotDot,
        ),
        (
            "a path with '..' in a long name",
            before()
                .raw(b'L', b"././@LongLink", b"", 0o644, b"../outside\0")
                .file("fine", "x"),
            MemberRefusal::DotDot,
        ),
        (
            "a NUL in an extension",
            before().extension(&[("path", "a\0b")]).file("fine", "x"),
            MemberRefusal::InvalidPath,
        ),
    ] {
        let (place, target) = target_fixture();
        assert_eq!(
            reason(archive.unpack(&target).unwrap_err()),
            wanted,
            "{what}"
        );
        assert_eq!(list(&target), ["there"], "{what}");
        assert_eq!(list(place.path()), ["outside", "target"], "{what}");
        for kept in [place.path().join("outside"), target.join("there")] {
            assert_eq!(std::fs::read_to_string(kept).unwrap(), "mine", "{what}");
        }
    }
}

#[test]
fn malformed_or_truncated_archive_is_refused() {
    let whole = ArchiveBuilder::default()
        .file("a", "content")
        .file("b", "x")
        .end();
    let (_place, target) = target_fixture();
    let mut wrong_sum = whole.clone();
    wrong_sum[0] ^= 1;
    let mut long = ArchiveBuilder::default()
        .raw(b'L', b"l", b"", 0, &[b'x'; 5000])
        .0;
    long.extend(&whole);
    let mut broken: Vec<(&str, Vec<u8>)> = vec![
        ("nothing", Vec::new()),
        ("text", b"hello".repeat(1000)),
        ("a wrong sum", wrong_sum),
        ("a name without an end", long),
        (
            "a name without a member",
            ArchiveBuilder::default()
                .raw(b'L', b"l", b"", 0, b"x\0")
                .end(),
        ),
        (
            "a global path",
            ArchiveBuilder::default()
                .raw(b'g', b"g", b"", 0, b"10 path=x\n")
                .file("a", "x")
                .end(),
        ),
        (
            "a directory with a content",
            ArchiveBuilder::default()
                .raw(b'5', b"d", b"", 0o755, b"x")
                .end(),
        ),
        (
            "records that are none",
            ArchiveBuilder::default()
                .raw(b'x', b"x", b"", 0, b"99999 path=x\n")
                .file("a", "x")
                .end(),
        ),
    ];
    // Truncated anywhere before the end mark.
    for length in (0..whole.len()).step_by(256) {
        broken.push(("half", whole[..length].to_vec()));
    }
    for (what, bytes) in broken {
        let error = unpack(
            &mut bytes.as_slice(),
            &target,
            &LARGE_BOUNDS,
            &UnpackRules::FOR_HOST,
        )
        .unwrap_err();
        assert!(
            matches!(error, TransferError::Malformed(_)),
            "{what}: {error}"
        );
        assert_eq!(list(&target), ["there"], "{what}");
    }
}

#[test]
fn bounds_are_checked_before_anything_is_written() {
    let (_place, target) = target_fixture();
    let archive = ArchiveBuilder::default()
        .file("a", "1234")
        .file("b", "5678")
        .end();
    let tight = |bytes, entries| {
        let bounds = TransferBounds { bytes, entries };
        unpack(
            &mut archive.as_slice(),
            &target,
            &bounds,
            &UnpackRules::FOR_HOST,
        )
    };
    assert_eq!(tight(7, 2), Err(TransferError::TooLarge(7)));
    assert_eq!(tight(8, 1), Err(TransferError::TooMany(1)));
    assert_eq!(list(&target), ["there"]);
    // A claimed size allocates nothing.
    let mut bomb = Header::new(b'0', b"bomb", b"")
        .complete(0o644, u64::MAX, 0)
        .0
        .to_vec();
    bomb.extend([0; BLOCK]);
    let error = unpack(
        &mut bomb.as_slice(),
        &target,
        &LARGE_BOUNDS,
        &UnpackRules::FOR_HOST,
    )
    .unwrap_err();
    assert_eq!(error, TransferError::TooLarge(LARGE_BOUNDS.bytes));
    assert_eq!(tight(8, 2).unwrap().files, 2);

    let source = target.join("tree");
    std::fs::create_dir(&source).unwrap();
    std::fs::write(source.join("a"), "1234").unwrap();
    std::fs::write(source.join("b"), "5678").unwrap();
    for (bytes, entries, wanted) in [
        (7, 9, Err(TransferError::TooLarge(7))),
        (8, 2, Err(TransferError::TooMany(2))),
        (8, 3, Ok(2)),
    ] {
        let bounds = TransferBounds { bytes, entries };
        let packed = pack_within(&source, &mut Vec::new(), &bounds, &mut |_| {});
        assert_eq!(packed.map(|summary| summary.files), wanted);
    }
}

#[test]
fn setuid_and_setgid_bits_are_stripped() {
    let (_place, target) = target_fixture();
    ArchiveBuilder::default()
        .raw(b'0', b"tool", b"", 0o7755, b"x")
        .raw(b'5', b"shared", b"", 0o7755, b"")
        .unpack(&target)
        .unwrap();
    for name in ["tool", "shared"] {
        let mode = std::fs::metadata(target.join(name)).unwrap().mode();
        assert_eq!(mode & 0o7777, 0o755, "{name}");
    }
}

#[test]
fn existing_files_stay_without_overwrite_and_directories_always() {
    let (_place, target) = target_fixture();
    std::fs::create_dir_all(target.join("d/e")).unwrap();
    std::fs::write(target.join("d/kept"), "mine").unwrap();
    let archive = ArchiveBuilder::default()
        .directory("d")
        .file("d/new", "theirs")
        .file("there", "theirs")
        .end();
    let with = |archive: &[u8], overwrite| {
        let rules = UnpackRules {
            overwrite,
            ..UnpackRules::FOR_HOST
        };
        unpack(&mut &archive[..], &target, &LARGE_BOUNDS, &rules)
    };
    assert_eq!(
        with(&archive, Overwrite::No),
        Err(TransferError::Exists("there".to_owned()))
    );
    // Members without a conflict are not unpacked either.
    assert_eq!(list(&target.join("d")), ["e", "kept"]);
    with(&archive, Overwrite::Yes).unwrap();
    let read = |path: &str| std::fs::read_to_string(target.join(path)).unwrap();
    assert_eq!(
        (read("there"), read("d/kept"), read("d/new")),
        ("theirs".into(), "mine".into(), "theirs".into())
    );
    for (archive, what) in [
        (
            ArchiveBuilder::default().file("d/e", "x").end(),
            "a file for a directory",
        ),
        (
            ArchiveBuilder::default().directory("there").end(),
            "a directory for a file",
        ),
    ] {
        let error = with(&archive, Overwrite::Yes).unwrap_err();
        assert_eq!(reason(error), MemberRefusal::OtherKind, "{what}");
    }
    // A link of the operator's is replaced, not written through.
    symlink("there", target.join("alias")).unwrap();
    with(
        &ArchiveBuilder::default().file("alias", "new").end(),
        Overwrite::Yes,
    )
    .unwrap();
    assert_eq!(
        (read("there"), read("alias")),
        ("theirs".into(), "new".into())
    );
    // A directory behind a link is not entered.
    symlink("d", target.join("way")).unwrap();
    let error = with(
        &ArchiveBuilder::default().file("way/x", "x").end(),
        Overwrite::Yes,
    )
    .unwrap_err();
    assert_eq!(reason(error), MemberRefusal::OtherKind);
}

#[test]
fn link_that_points_outside_is_skipped_with_note() {
    let (_place, target) = target_fixture();
    let summary = ArchiveBuilder::default()
        .directory("a")
        .link("a/in", "../there")
        .link("a/out", "../../outside")
        .link("etc", "/etc")
        .link("twisted", "a/../../outside")
        .unpack(&target)
        .unwrap();
    assert_eq!(list(&target), ["a", "there"]);
    assert_eq!(list(&target.join("a")), ["in"]);
    assert_eq!(
        summary.left_out,
        ["a/out", "etc", "twisted"].map(|name| format!("{name}: a link that points outside"))
    );
    assert_eq!(summary.files, 1);
}

#[test]
fn archives_of_other_programs_are_read() {
    let (_place, target) = target_fixture();
    let long = "x/".repeat(60) + "file";
    let summary = ArchiveBuilder::default()
        .raw(b'g', b"pax_global_header", b"", 0, b"18 comment=abcdef\n")
        .raw(b'5', b"./", b"", 0o755, b"")
        .extension(&[("path", &long), ("mtime", "1.5"), ("uid", "0")])
        .file("short", "x")
        .file("one", "1")
        .hard_link("two", "one")
        .unpack(&target)
        .unwrap();
    assert_eq!((summary.files, summary.bytes), (3, 2));
    assert!(target.join(long).exists());
    let inode = |name| std::fs::metadata(target.join(name)).unwrap().ino();
    assert_eq!(inode("one"), inode("two"));
}

#[test]
fn special_files_are_skipped_with_note() {
    let (_place, target) = target_fixture();
    let source = target.join("s");
    std::fs::create_dir(&source).unwrap();
    let _socket = std::os::unix::net::UnixListener::bind(source.join("socket")).unwrap();
    nix::unistd::mkfifo(&source.join("fifo\n"), nix::sys::stat::Mode::S_IRWXU).unwrap();
    std::fs::write(source.join("file"), "12345").unwrap();
    let mut progress = Vec::new();
    let mut archive = Vec::new();
    let summary = pack(&source, &mut archive, &mut |bytes| progress.push(bytes)).unwrap();
    assert_eq!(
        summary,
        TransferSummary {
            files: 1,
            bytes: 5,
            left_out: vec![
                "s/fifo\\n: a socket, FIFO or device".to_owned(),
                "s/socket: a socket, FIFO or device".to_owned()
            ],
            sensitive: Vec::new(),
        }
    );
    assert_eq!(progress, [5]);
    let missing = pack(&target.join("no"), &mut Vec::new(), &mut |_| {}).unwrap_err();
    assert!(matches!(missing, TransferError::Missing(_)), "{missing}");
    let fifo = pack(&source.join("fifo\n"), &mut Vec::new(), &mut |_| {}).unwrap_err();
    assert_eq!(reason(fifo), MemberRefusal::Unknown);
}

#[test]
fn missing_target_is_created_and_removed_on_refusal() {
    let (place, target) = target_fixture();
    let deep = target.join("new/deep");
    ArchiveBuilder::default()
        .file("../x", "x")
        .unpack(&deep)
        .unwrap_err();
    assert_eq!(list(&target), ["there"]);
    ArchiveBuilder::default()
        .file("x", "x")
        .unpack(&deep)
        .unwrap();
    assert_eq!(list(&deep), ["x"]);
    let error = ArchiveBuilder::default()
        .file("x", "x")
        .unpack(&place.path().join("outside"))
        .unwrap_err();
    assert!(matches!(error, TransferError::System { .. }), "{error}");
}

#[test]
fn directory_without_permissions_is_unpacked_with_content() {
    let (_place, target) = target_fixture();
    ArchiveBuilder::default()
        .raw(b'5', b"closed", b"", 0o500, b"")
        .file("closed/file", "x")
        .file("late/er/file", "x")
        .raw(b'5', b"late", b"", 0o500, b"")
        .raw(b'5', b"late/er", b"", 0o700, b"")
        .unpack(&target)
        .unwrap();
    for (place, wanted) in [("late", 0o500), ("late/er", 0o700)] {
        let data = std::fs::metadata(target.join(place)).unwrap();
        assert_eq!(data.mode() & 0o777, wanted, "{place}");
    }
    std::fs::set_permissions(target.join("late"), PermissionsExt::from_mode(0o700)).unwrap();
    let closed = target.join("closed");
    assert_eq!(list(&closed), ["file"]);
    assert_eq!(std::fs::metadata(&closed).unwrap().mode() & 0o777, 0o500);
    std::fs::set_permissions(&closed, std::fs::Permissions::from_mode(0o700)).unwrap();
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn arbitrary_bytes_never_panic(bytes in proptest::collection::vec(any::<u8>(), 0..3000), at in 0..512_usize) {
        let mut archive = ArchiveBuilder::default().file("a", "content").link("l", "a").end();
        for (place, byte) in archive.iter_mut().skip(at).zip(&bytes) {
            *place = *byte;
        }
        let place = tempfile::tempdir().unwrap();
        let target = place.path().join("target");
        let _ = unpack(&mut archive.as_slice(), &target, &LARGE_BOUNDS, &UnpackRules::FOR_HOST);
        prop_assert_eq!(std::fs::read_dir(place.path()).unwrap().count() <= 1, true);
    }
}
