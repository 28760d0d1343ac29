//! Stat data and blobs of a workspace's files at the last snapshot, so that the next one reads only
//! changed files.

use std::collections::BTreeMap;
use std::io::Write;
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

use git2::Oid;

use super::error::{GitError, io};

/// Seconds and nanoseconds since the epoch, in the file system's clock.
pub type FileTime = (i64, i64);

/// A file that changed less than this before the manifest was taken is read again, because it may
/// change again within the same tick of the kernel's clock (at most 10 ms).
const CLOCK_TICK_NANOS: i64 = 20_000_000;

/// The stat data and the blob of one file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FileStamp {
    /// The mode in git's form: `100644`, `100755`, `120000` or `160000` in octal.
    pub mode: u32,
    /// The size in bytes.
    pub size: u64,
    /// Last change of the content.
    pub mtime: FileTime,
    /// Last change of the inode, which an agent cannot set.
    pub ctime: FileTime,
    /// The inode.
    pub ino: u64,
    /// The blob.
    pub id: Oid,
}

/// Every tracked file of a workspace, by its path.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Manifest {
    /// When the stat data was taken.
    pub taken: FileTime,
    /// The stamps, by path from the workspace's root.
    pub entries: BTreeMap<Vec<u8>, FileStamp>,
}

/// Returns the current time.
pub(super) fn now() -> FileTime {
    let since = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default();
    (
        i64::try_from(since.as_secs()).unwrap_or(i64::MAX),
        i64::from(since.subsec_nanos()),
    )
}

impl FileStamp {
    /// Whether a file with the stat data `seen` is unchanged since this stamp.
    pub(super) fn matches(&self, seen: &FileStamp, taken: FileTime) -> bool {
        let settled = nanos(self.ctime) + i128::from(CLOCK_TICK_NANOS) < nanos(taken);
        settled
            && self.mode == seen.mode
            && self.size == seen.size
            && self.mtime == seen.mtime
            && self.ctime == seen.ctime
            && self.ino == seen.ino
    }
}

fn nanos((seconds, nanos): FileTime) -> i128 {
    i128::from(seconds) * 1_000_000_000 + i128::from(nanos)
}

impl Manifest {
    /// Whether any tracked path lies below this directory.
    pub(super) fn has_below(&self, directory: &[u8]) -> bool {
        self.below(directory).next().is_some()
    }

    /// The tracked paths below this directory.
    pub(super) fn below(&self, directory: &[u8]) -> impl Iterator<Item = (&Vec<u8>, &FileStamp)> {
        let mut prefix = directory.to_vec();
        prefix.push(b'/');
        let from = self.entries.range(prefix.clone()..);
        from.take_while(move |(path, _)| path.starts_with(&prefix))
    }

    /// Every path with its mode.
    pub(super) fn modes(&self) -> impl Iterator<Item = (&[u8], u32)> {
        let entries = self.entries.iter();
        entries.map(|(path, stamp)| (path.as_slice(), stamp.mode))
    }

    /// The sum of the files' sizes.
    pub fn bytes(&self) -> u64 {
        self.entries.values().map(|stamp| stamp.size).sum()
    }

    /// Writes the manifest to a temporary file and renames it.
    pub fn save(&self, path: &Path) -> Result<(), GitError> {
        let mut text = Vec::with_capacity(self.entries.len() * 160);
        let (seconds, nanos) = self.taken;
        let head = format!(
            "palisade manifest 1 {seconds} {nanos} {}\n",
            self.entries.len()
        );
        text.extend_from_slice(head.as_bytes());
        for (path, s) in &self.entries {
            // Writing to memory does not fail.
            let _ = write!(
                text,
                "{:o} {} {} {} {} {} {} ",
                s.mode, s.size, s.mtime.0, s.mtime.1, s.ctime.0, s.ctime.1, s.ino,
            );
            for byte in s.id.as_bytes() {
                text.extend([byte >> 4, byte & 15].map(hex));
            }
            let _ = writeln!(text, " {}", path.len());
            text.extend_from_slice(path);
            text.push(b'\n');
        }
        let mut fresh = path.as_os_str().to_owned();
        fresh.push(".fresh");
        std::fs::write(&fresh, text).map_err(io("write", path))?;
        std::fs::rename(&fresh, path).map_err(io("replace", path))
    }

    /// Reads what [`Manifest::save`] wrote.
    pub fn load(path: &Path) -> Result<Self, GitError> {
        let text = std::fs::read(path).map_err(io("open", path))?;
        parse(&text).ok_or_else(|| GitError::BadManifest(path.to_owned()))
    }
}

fn parse(text: &[u8]) -> Option<Manifest> {
    let (head, mut rest) = split_line(text)?;
    let head = head.strip_prefix("palisade manifest 1 ")?;
    let mut head = head.split(' ');
    let taken = (head.next()?.parse().ok()?, head.next()?.parse().ok()?);
    let count: usize = head.next()?.parse().ok()?;
    // Every entry takes more than 64 bytes, so a wrong count cannot reserve more memory than the
    // file needs.
    let mut entries = Vec::with_capacity(count.min(rest.len() / 64));
    for _ in 0..count {
        let (words, after) = split_line(rest)?;
        let mut words = words.split(' ');
        let mode = u32::from_str_radix(words.next()?, 8).ok()?;
        let size = words.next()?.parse().ok()?;
        let mtime = (words.next()?.parse().ok()?, words.next()?.parse().ok()?);
        let ctime = (words.next()?.parse().ok()?, words.next()?.parse().ok()?);
        let ino = words.next()?.parse().ok()?;
        let id = Oid::from_str(words.next()?).ok()?;
        let length: usize = words.next()?.parse().ok()?;
        let (path, after) = after.split_at_checked(length)?;
        rest = after.strip_prefix(b"\n")?;
        let stamp = FileStamp {
            mode,
            size,
            mtime,
            ctime,
            ino,
            id,
        };
        entries.push((path.to_vec(), stamp));
    }
    // The entries are sorted, and building the map at once is much cheaper.
    let entries = entries.into_iter().collect();
    Some(Manifest { taken, entries })
}

fn hex(digit: u8) -> u8 {
    match digit {
        0..=9 => b'0' + digit,
        _ => b'a' - 10 + digit,
    }
}

/// Splits off the first line.
fn split_line(text: &[u8]) -> Option<(&str, &[u8])> {
    let end = text.iter().position(|b| *b == b'\n')?;
    let (line, rest) = text.split_at_checked(end)?;
    Some((std::str::from_utf8(line).ok()?, rest.get(1..)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stamp(ctime: FileTime) -> FileStamp {
        FileStamp {
            mode: 0o100_644,
            size: 5,
            mtime: (1, 2),
            ctime,
            ino: 7,
            id: Oid::ZERO_SHA1,
        }
    }

    #[test]
    fn manifest_saved_and_loaded_is_equal() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("manifest");
        let mut manifest = Manifest {
            taken: (9, 1),
            ..Manifest::default()
        };
        manifest
            .entries
            .insert(b"a\nb/\xff".to_vec(), stamp((3, 4)));
        manifest.entries.insert(b"plain".to_vec(), stamp((-3, 4)));
        manifest.save(&path).unwrap();
        assert_eq!(Manifest::load(&path).unwrap(), manifest);
        let text = std::fs::read(&path).unwrap();
        std::fs::write(&path, &text[..text.len() - 3]).unwrap();
        assert!(matches!(
            Manifest::load(&path),
            Err(GitError::BadManifest(_))
        ));
    }

    #[test]
    fn file_changed_in_the_last_tick_is_read_again() {
        let old = stamp((100, 0));
        assert!(old.matches(&old, (100, 30_000_000)));
        assert!(!old.matches(&old, (100, 10_000_000)));
        assert!(!old.matches(&stamp((100, 1)), (200, 0)));
    }
}
