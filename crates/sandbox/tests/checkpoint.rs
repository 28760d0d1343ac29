//! Saving, restoring and forking a sandbox's files.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::indexing_slicing,
    unsafe_code,
    reason = "a test that fails may panic; attributes have no safe call"
)]

use std::collections::BTreeMap;
use std::ffi::{CString, OsStr};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Mutex;

use sandbox::checkpoint::{
    CheckpointBounds, CheckpointError, CopyProgress, CopySummary, clear_unfinished, fork, remove,
    restore, save,
};
use sandbox::namespace::removal::remove_tree;
use tempfile::TempDir;

fn no_progress(_: CopyProgress) {}

struct CheckpointFixture {
    temp: TempDir,
    fs: PathBuf,
}

impl CheckpointFixture {
    /// The layout of a sandbox's `fs` directory on the host.
    fn new() -> Self {
        let temp = tempfile::tempdir().unwrap();
        let fs = temp.path().join("fs");
        for dir in [
            "root/workspace/src",
            "root/home/agent",
            "root/tmp",
            "root/var/lib",
            "root/run",
            "root/etc",
            "root/usr",
            "upper/usr/share",
            "upper/etc-ssl",
            "work/usr/work",
        ] {
            std::fs::create_dir_all(fs.join(dir)).unwrap();
        }
        Self { temp, fs }
    }

    fn write(&self, path: &str, text: &str) -> PathBuf {
        let path = self.fs.join(path);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(&path, text).unwrap();
        path
    }

    fn at(&self, name: &str) -> PathBuf {
        self.temp.path().join(name)
    }

    fn save(&self, name: &str) -> CopySummary {
        let bounds = CheckpointBounds::default();
        save(&self.fs, &self.at(name), None, bounds, &no_progress).unwrap()
    }

    fn restore(&self, name: &str, to: &str) -> PathBuf {
        let bounds = CheckpointBounds::default();
        restore(&self.at(name), &self.at(to), None, bounds, &no_progress).unwrap();
        self.at(to)
    }

    fn leftovers(&self) -> usize {
        let entries = std::fs::read_dir(self.temp.path()).unwrap();
        entries
            .filter(|entry| {
                let name = entry.as_ref().unwrap().file_name();
                name.to_string_lossy().starts_with(".unfinished")
            })
            .count()
    }
}

/// Every path with all metadata that a program can see.
fn tree_metadata(root: &Path) -> BTreeMap<PathBuf, String> {
    let mut all = BTreeMap::new();
    collect_metadata(root, root, &mut all);
    all
}

fn collect_metadata(root: &Path, at: &Path, all: &mut BTreeMap<PathBuf, String>) {
    let metadata = std::fs::symlink_metadata(at).unwrap();
    let kind = metadata.file_type();
    let mut text = format!(
        "{:o} {}.{} ",
        metadata.mode(),
        metadata.mtime(),
        metadata.mtime_nsec()
    );
    if kind.is_symlink() {
        text.push_str(&std::fs::read_link(at).unwrap().to_string_lossy());
    } else if kind.is_file() {
        text.push_str(&format!("{} {} ", metadata.nlink(), metadata.len()));
        text.push_str(&String::from_utf8_lossy(&std::fs::read(at).unwrap()));
    } else if kind.is_char_device() {
        text.push_str(&format!("device {}", metadata.rdev()));
    }
    if !kind.is_symlink() {
        text.push_str(&format!(" {:?}", attribute(at, "user.overlay.opaque")));
    }
    all.insert(at.strip_prefix(root).unwrap().to_owned(), text);
    if kind.is_dir() {
        for entry in std::fs::read_dir(at).unwrap() {
            collect_metadata(root, &entry.unwrap().path(), all);
        }
    }
}

fn c_path(path: &Path) -> CString {
    CString::new(path.as_os_str().as_bytes()).unwrap()
}

fn attribute(path: &Path, name: &str) -> Option<Vec<u8>> {
    let (path, name) = (c_path(path), CString::new(name).unwrap());
    let mut value = vec![0_u8; 256];
    // SAFETY: both names end in NUL; the kernel writes at most the buffer's length.
    let length = unsafe {
        libc::lgetxattr(
            path.as_ptr(),
            name.as_ptr(),
            value.as_mut_ptr().cast(),
            value.len(),
        )
    };
    value.truncate(usize::try_from(length).ok()?);
    Some(value)
}

fn set_attribute(path: &Path, name: &str, value: &[u8]) {
    let (path, name) = (c_path(path), CString::new(name).unwrap());
    // SAFETY: both names end in NUL; the length is that of the value.
    let done = unsafe {
        libc::lsetxattr(
            path.as_ptr(),
            name.as_ptr(),
            value.as_ptr().cast(),
            value.len(),
            0,
        )
    };
    assert_eq!(done, 0);
}

fn whiteout(path: &Path) {
    let path = c_path(path);
    // SAFETY: the path ends in NUL. The 0:0 device needs no privilege.
    assert_eq!(unsafe { libc::mknod(path.as_ptr(), libc::S_IFCHR, 0) }, 0);
}

fn set_mode(path: &Path, mode: u32) {
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
}

#[test]
fn save_and_restore_keep_content_and_metadata() {
    let fixture = CheckpointFixture::new();
    let file = fixture.write("root/workspace/src/main.rs", "fn main() {}\n");
    set_mode(&file, 0o755);
    std::fs::hard_link(&file, fixture.fs.join("root/home/agent/same")).unwrap();
    fixture.write("root/workspace/with\nnewline", "x");
    let non_utf8 = fixture
        .fs
        .join("root/tmp")
        .join(OsStr::from_bytes(b"\xff\xfe"));
    std::fs::write(non_utf8, "not text").unwrap();
    symlink("../somewhere", fixture.fs.join("root/workspace/link")).unwrap();
    set_mode(&fixture.fs.join("root/tmp"), 0o1777);
    whiteout(&fixture.fs.join("upper/usr/share/gone"));
    set_attribute(
        &fixture.fs.join("upper/usr/share"),
        "user.overlay.opaque",
        b"y",
    );
    let old = fixture.write("upper/usr/bin/tool", "tool");
    set_attribute(&old, "user.overlay.opaque", b"x");
    set_mode(&old, 0o444);
    let time = std::time::UNIX_EPOCH + std::time::Duration::new(1_000_000_000, 42);
    let opened = std::fs::File::open(&old).unwrap();
    opened.set_modified(time).unwrap();
    let inside = std::fs::File::open(fixture.fs.join("upper/usr/bin")).unwrap();
    inside.set_modified(time).unwrap();

    let copied = fixture.save("one");
    assert_eq!(copied.skipped, 0);
    let restored = fixture.restore("one", "back");
    for part in [
        "root/workspace",
        "root/home",
        "root/tmp",
        "root/var",
        "upper",
    ] {
        assert_eq!(
            tree_metadata(&fixture.fs.join(part)),
            tree_metadata(&restored.join(part)),
            "{part}"
        );
    }
    let inode = |path: &str| std::fs::metadata(restored.join(path)).unwrap().ino();
    assert_eq!(
        inode("root/workspace/src/main.rs"),
        inode("root/home/agent/same")
    );
    assert_ne!(
        inode("root/home/agent/same"),
        std::fs::metadata(&file).unwrap().ino()
    );
    assert_eq!(std::fs::metadata(&restored).unwrap().mode() & 0o777, 0o700);
    assert_eq!(fixture.leftovers(), 0);
}

#[test]
fn directories_created_by_every_start_are_not_saved() {
    let fixture = CheckpointFixture::new();
    fixture.write("root/etc/passwd", "agent");
    fixture.write("root/run/program.pid", "7");
    fixture.write("work/usr/work/#1", "x");
    fixture.write("elsewhere", "x");
    fixture.save("one");
    let kept = fixture.at("one/fs");
    let names = |path: &Path| {
        let mut names: Vec<_> = std::fs::read_dir(path)
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        names
    };
    assert_eq!(names(&kept), ["root", "upper"]);
    assert_eq!(
        names(&kept.join("root")),
        ["home", "tmp", "var", "workspace"]
    );
}

#[test]
fn pipes_and_sockets_are_skipped_and_links_not_followed() {
    let fixture = CheckpointFixture::new();
    let secret = fixture.at("secret");
    std::fs::create_dir(&secret).unwrap();
    std::fs::write(secret.join("key"), "secret").unwrap();
    symlink(&secret, fixture.fs.join("root/workspace/out")).unwrap();
    symlink(secret.join("key"), fixture.fs.join("root/tmp/key")).unwrap();
    let pipe = fixture.fs.join("root/tmp/pipe");
    assert!(
        Command::new("mkfifo")
            .arg(&pipe)
            .status()
            .unwrap()
            .success()
    );
    let _socket = std::os::unix::net::UnixListener::bind(fixture.fs.join("root/tmp/s")).unwrap();
    let set = fixture.write("root/workspace/set", "x");
    set_mode(&set, 0o6755);
    let copied = fixture.save("one");
    assert_eq!(copied.skipped, 2);
    let restored = fixture.restore("one", "back");
    assert!(restored.join("root/workspace/out").is_symlink());
    assert!(restored.join("root/tmp/key").is_symlink());
    assert!(!restored.join("root/tmp/pipe").exists() && !restored.join("root/tmp/s").exists());
    let mode = std::fs::metadata(restored.join("root/workspace/set"))
        .unwrap()
        .mode();
    assert_eq!(mode & 0o7777, 0o755);
}

#[test]
fn holes_stay_holes() {
    use std::os::unix::fs::FileExt;
    let fixture = CheckpointFixture::new();
    let path = fixture.fs.join("root/workspace/sparse");
    let sparse = std::fs::File::create(&path).unwrap();
    sparse.set_len(1 << 40).unwrap();
    sparse.write_all_at(b"in the middle", 1 << 39).unwrap();
    drop(sparse);
    let copied = fixture.save("one");
    assert!(copied.bytes < 1 << 20);
    let restored = fixture.restore("one", "back").join("root/workspace/sparse");
    let metadata = std::fs::metadata(&restored).unwrap();
    assert_eq!(metadata.len(), 1 << 40);
    assert!(metadata.blocks() < 100);
    let mut text = [0; 13];
    let file = std::fs::File::open(&restored).unwrap();
    file.read_exact_at(&mut text, 1 << 39).unwrap();
    assert_eq!(&text, b"in the middle");
}

#[test]
fn files_without_owner_permissions_are_saved() {
    let fixture = CheckpointFixture::new();
    let file = fixture.write("root/workspace/closed/inner/file", "x");
    set_mode(&file, 0);
    let (inner, closed) = (
        file.parent().unwrap(),
        fixture.fs.join("root/workspace/closed"),
    );
    set_mode(inner, 0);
    set_mode(&closed, 0o300);
    fixture.save("one");
    let mode = |path: &Path| std::fs::metadata(path).unwrap().mode() & 0o7777;
    assert_eq!(mode(&closed), 0o300);
    let restored = fixture.restore("one", "back").join("root/workspace/closed");
    assert_eq!(mode(&restored), 0o300);
    for dir in [&closed, &restored] {
        set_mode(dir, 0o700);
        assert_eq!(mode(&dir.join("inner")), 0);
        set_mode(&dir.join("inner"), 0o700);
        assert_eq!(mode(&dir.join("inner/file")), 0);
    }
    remove(&fixture.at("one"), &remove_tree).unwrap();
    assert!(!fixture.at("one").exists());
    remove(&fixture.at("one"), &remove_tree).unwrap();
}

#[test]
fn exceeded_bounds_are_reported_and_leave_nothing() {
    let fixture = CheckpointFixture::new();
    for number in 0..50 {
        fixture.write(&format!("root/workspace/{number}"), &"x".repeat(10_000));
    }
    for (entries, bytes, printed) in [(20, u64::MAX, "number"), (u64::MAX, 100_000, "size")] {
        let bounds = CheckpointBounds { entries, bytes };
        let error = save(&fixture.fs, &fixture.at("one"), None, bounds, &no_progress).unwrap_err();
        assert!(matches!(error, CheckpointError::TooMuch { .. }));
        assert!(error.to_string().contains(printed), "{error}");
        assert!(!fixture.at("one").exists());
        assert_eq!(fixture.leftovers(), 0);
    }
    let mut deep = fixture.fs.join("root/workspace");
    for _ in 0..20 {
        deep.push("d".repeat(200));
        std::fs::create_dir(&deep).unwrap();
        if deep.as_os_str().len() > 3900 {
            break;
        }
    }
    let bounds = CheckpointBounds::default();
    let error = save(&fixture.fs, &fixture.at("one"), None, bounds, &no_progress).unwrap_err();
    assert!(error.to_string().contains("length of a path"), "{error}");
}

#[test]
fn existing_label_and_malformed_checkpoint_are_refused() {
    let fixture = CheckpointFixture::new();
    fixture.save("one");
    let bounds = CheckpointBounds::default();
    let again = save(&fixture.fs, &fixture.at("one"), None, bounds, &no_progress);
    assert!(matches!(again, Err(CheckpointError::Exists(_))));
    fixture.write("mine", "x");
    let over = restore(&fixture.at("one"), &fixture.fs, None, bounds, &no_progress);
    assert!(matches!(over, Err(CheckpointError::Exists(_))), "{over:?}");
    assert!(fixture.fs.join("mine").exists());
    let none = restore(
        &fixture.at("two"),
        &fixture.at("back"),
        None,
        bounds,
        &no_progress,
    );
    assert!(matches!(none, Err(CheckpointError::Unreadable { .. })));
    std::fs::write(fixture.at("one/checkpoint.json"), "{\"version\":9}").unwrap();
    let malformed = restore(
        &fixture.at("one"),
        &fixture.at("back"),
        None,
        bounds,
        &no_progress,
    );
    assert!(matches!(malformed, Err(CheckpointError::Unreadable { .. })));
    std::fs::create_dir(fixture.at(".unfinished-checkpoint-1-1")).unwrap();
    clear_unfinished(fixture.temp.path(), &remove_tree);
    assert_eq!(fixture.leftovers(), 0);
}

#[test]
fn progress_is_reported_to_the_end() {
    let fixture = CheckpointFixture::new();
    for number in 0..100 {
        fixture.write(&format!("root/workspace/{number}"), "text");
    }
    let last = Mutex::new(CopyProgress::default());
    let bounds = CheckpointBounds::default();
    let report = |progress: CopyProgress| {
        let mut last = last.lock().unwrap();
        last.files = last.files.max(progress.files);
        last.bytes = last.bytes.max(progress.bytes);
        last.total = progress.total;
    };
    save(&fixture.fs, &fixture.at("one"), None, bounds, &report).unwrap();
    let last = *last.lock().unwrap();
    assert_eq!((last.files, last.total), (100, 100));
}

mod needs_root {
    use super::*;

    fn is_root(fixture: &CheckpointFixture) -> bool {
        std::fs::metadata(&fixture.fs).unwrap().uid() == 0
    }

    #[test]
    fn owners_map_to_the_range_of_the_new_sandbox() {
        let fixture = CheckpointFixture::new();
        if !is_root(&fixture) {
            // A single id has no range.
            return;
        }
        let (old, new) = (1_073_741_824, 1_073_807_360);
        let file = fixture.write("root/workspace/file", "x");
        std::os::unix::fs::chown(&file, Some(old + 1000), Some(old + 5)).unwrap();
        let link = fixture.fs.join("root/workspace/link");
        symlink("x", &link).unwrap();
        std::os::unix::fs::lchown(&link, Some(old), Some(old)).unwrap();
        let foreign = fixture.write("root/workspace/foreign", "x");
        whiteout(&fixture.fs.join("upper/usr/gone"));
        std::os::unix::fs::lchown(fixture.fs.join("upper/usr/gone"), Some(old), Some(old)).unwrap();
        assert_eq!(std::fs::metadata(foreign).unwrap().uid(), 0);
        let bounds = CheckpointBounds::default();
        save(
            &fixture.fs,
            &fixture.at("one"),
            Some(old),
            bounds,
            &no_progress,
        )
        .unwrap();
        restore(
            &fixture.at("one"),
            &fixture.at("back"),
            Some(new),
            bounds,
            &no_progress,
        )
        .unwrap();
        let to = fixture.at("forked");
        fork(&fixture.fs, Some(old), &to, Some(new), bounds, &no_progress).unwrap();
        for restored in ["back", "forked"] {
            let owner = |path: &str| {
                let metadata = std::fs::symlink_metadata(fixture.at(restored).join(path)).unwrap();
                (metadata.uid() - new, metadata.gid() - new)
            };
            assert_eq!(owner("root/workspace/file"), (1000, 5));
            assert_eq!(owner("root/workspace/link"), (0, 0));
            assert_eq!(owner("root/workspace/foreign"), (1000, 1000));
            assert_eq!(owner("upper/usr/gone"), (0, 0));
            assert_eq!(owner(""), (0, 0));
        }
    }

    /// Mounts an overlay in a new mount namespace.
    #[test]
    fn overlay_over_a_restored_layer_shows_the_same_files() {
        let fixture = CheckpointFixture::new();
        if !is_root(&fixture) {
            return;
        }
        let script = r#"
            set -e
            cd "$1"
            mkdir -p lower/dir lower/other fs/upper/usr fs/work/usr mnt
            rmdir fs/upper/usr/share fs/work/usr/work
            echo a > lower/a; echo b > lower/b; echo x > lower/dir/x; echo o > lower/other/o
            mount -t overlay overlay -o \
                lowerdir=lower,upperdir=fs/upper/usr,workdir=fs/work/usr,userxattr mnt
            rm mnt/a
            echo changed > mnt/b
            rm -r mnt/dir
            mkdir mnt/dir
            echo y > mnt/dir/y
            chmod 700 mnt/other
            cp -a mnt seen
            umount mnt
        "#;
        let run = |script: &str| {
            let done = Command::new("unshare")
                .args(["--mount", "sh", "-c", script, "sh"])
                .arg(fixture.temp.path())
                .output()
                .unwrap();
            let printed = String::from_utf8_lossy(&done.stderr).into_owned();
            assert!(done.status.success(), "{printed}");
        };
        run(script);
        fixture.save("one");
        fixture.restore("one", "back");
        run(r#"
            set -e
            cd "$1"
            mkdir -p again/work
            mount -t overlay overlay -o \
                lowerdir=lower,upperdir=back/upper/usr,workdir=again/work,userxattr mnt
            cp -a mnt seen-again
            umount mnt
        "#);
        let (seen, again) = (fixture.at("seen"), fixture.at("seen-again"));
        assert_eq!(tree_metadata(&seen), tree_metadata(&again));
        assert!(!again.join("a").exists() && !again.join("dir/x").exists());
        assert_eq!(std::fs::read(again.join("dir/y")).unwrap(), b"y\n");
    }
}
