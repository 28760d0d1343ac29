//! Adds a new root certificate of the gate to a running sandbox.
//!
//! The files are lower layers of mounted overlays. The kernel caches their inodes, so a renamed
//! file would never be seen: the bundle and the root file grow in place. An older root stays until
//! the sandbox restarts; it expires by itself.
//!
//! The kernel also caches failed lookups. The gate must therefore add a root before it signs with
//! it; otherwise a failed lookup of `HASH.0` by OpenSSL would be cached.

use std::ffi::CString;
use std::fs::File;
use std::io::{Error, ErrorKind, Read, Result, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use nix::errno::Errno;
use nix::fcntl::{OFlag, open, openat, renameat};
use nix::sys::stat::Mode;
use nix::unistd::{UnlinkatFlags, symlinkat, unlinkat};

use super::{ROOT_PATH, STAGED_BUNDLE, STAGED_JAVA_STORE, STAGED_ROOT, java};
use crate::contract::Trust;

/// A write within an aligned block of this size is atomic for readers.
const ATOMIC_WRITE_BYTES: u64 = 4096;

/// Maximum size of a root.
const MAX_ROOT_BYTES: usize = 4096;

/// Maximum size of all roots together; a root has some 700 bytes.
const MAX_ALL_ROOTS_BYTES: usize = 128 << 10;

/// The certificate files, through a directory that has no path in the sandbox.
pub(crate) struct TrustFiles {
    directory: OwnedFd,
    /// Directories with a link to the root certificate.
    link_directories: Vec<PathBuf>,
}

impl TrustFiles {
    pub(super) fn open(directory: &Path, link_directories: Vec<PathBuf>) -> Result<Self> {
        let flags = OFlag::O_RDONLY | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC;
        Ok(Self {
            directory: open(directory, flags, Mode::empty())?,
            link_directories,
        })
    }

    /// The directory, for the Landlock rules.
    pub(crate) fn directory(&self) -> BorrowedFd<'_> {
        self.directory.as_fd()
    }

    /// Adds a root, unless it exists. A partial failure is completed by the next call.
    pub(crate) fn add(&self, trust: &Trust) -> Result<()> {
        let root = trust.root.as_bytes();
        let roots = self.read(STAGED_ROOT)?;
        if contains(&roots, root) {
            return Ok(());
        }
        let is_root =
            root.starts_with(b"-----BEGIN CERTIFICATE-----") && root.len() <= MAX_ROOT_BYTES;
        if !is_root || roots.len() + root.len() > MAX_ALL_ROOTS_BYTES {
            return Err(Error::from(ErrorKind::InvalidInput));
        }
        for directory in &self.link_directories {
            let link = directory.join(format!("{:08x}.0", trust.hash));
            match symlinkat(ROOT_PATH, &self.directory, &link) {
                Ok(()) | Err(Errno::EEXIST) => {}
                Err(errno) => return Err(errno.into()),
            }
        }
        let mut all = self.read(STAGED_BUNDLE)?;
        if !contains(&all, root) {
            self.append(STAGED_BUNDLE, &all, root)?;
            all = self.read(STAGED_BUNDLE)?;
        }
        self.rewrite_java_store(&all)?;
        // The root file is written last: a root in this file is complete in all other files.
        self.append(STAGED_ROOT, &roots, root)
    }

    /// Appends to a file that is read concurrently.
    fn append(&self, name: &str, before: &[u8], text: &[u8]) -> Result<()> {
        let mut file = self.open_file(name, OFlag::O_WRONLY | OFlag::O_APPEND)?;
        let length = before.len() as u64;
        let mut padding = u64::from(!before.ends_with(b"\n"));
        let start_in_block = (length + padding) % ATOMIC_WRITE_BYTES;
        if start_in_block + text.len() as u64 > ATOMIC_WRITE_BYTES {
            padding += ATOMIC_WRITE_BYTES - start_in_block;
        }
        // Empty lines between certificates are ignored.
        let padding = usize::try_from(padding).map_err(Error::other)?;
        file.write_all(&vec![b'\n'; padding])?;
        // A partial certificate would make the whole file invalid.
        file.write_all(text).or_else(|error| {
            file.set_len(length)?;
            Err(error)
        })
    }

    /// Rewrites Java's trust store, if it exists. The trust store is in no overlay, so a rename can
    /// replace it.
    fn rewrite_java_store(&self, all: &[u8]) -> Result<()> {
        match self.open_file(STAGED_JAVA_STORE, OFlag::O_RDONLY) {
            Ok(_) => {}
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
            Err(error) => return Err(error),
        }
        let temporary = c"own/.truststore.new";
        match unlinkat(&self.directory, temporary, UnlinkatFlags::NoRemoveDir) {
            Ok(()) | Err(Errno::ENOENT) => {}
            Err(errno) => return Err(errno.into()),
        }
        let flags = OFlag::O_WRONLY | OFlag::O_CREAT | OFlag::O_EXCL | OFlag::O_CLOEXEC;
        let mode = Mode::from_bits_truncate(0o644);
        let mut file = File::from(openat(&self.directory, temporary, flags, mode)?);
        file.write_all(&java::store(all))?;
        drop(file);
        let store = CString::new(Path::new(STAGED_JAVA_STORE).as_os_str().as_bytes())?;
        renameat(
            &self.directory,
            temporary,
            &self.directory,
            store.as_c_str(),
        )?;
        Ok(())
    }

    fn read(&self, name: &str) -> Result<Vec<u8>> {
        let mut bytes = Vec::new();
        self.open_file(name, OFlag::O_RDONLY)?
            .read_to_end(&mut bytes)?;
        Ok(bytes)
    }

    fn open_file(&self, name: &str, how: OFlag) -> Result<File> {
        let flags = how | OFlag::O_CLOEXEC | OFlag::O_NOFOLLOW;
        Ok(File::from(openat(
            &self.directory,
            name,
            flags,
            Mode::empty(),
        )?))
    }
}

fn contains(text: &[u8], part: &[u8]) -> bool {
    text.windows(part.len().max(1)).any(|found| found == part)
}

#[cfg(test)]
mod tests {
    use std::fs::{create_dir_all, read, read_link, read_to_string, write};

    use super::*;

    fn trust(name: &str, hash: u32) -> Trust {
        let root = format!("-----BEGIN CERTIFICATE-----\n{name}\n-----END CERTIFICATE-----\n");
        Trust { root, hash }
    }

    /// A staging directory in its initial state.
    fn staging(java: bool) -> (tempfile::TempDir, TrustFiles) {
        let place = tempfile::tempdir().unwrap();
        let at = |name: &str| place.path().join(name);
        create_dir_all(at("own")).unwrap();
        create_dir_all(at("over-ssl/certs")).unwrap();
        let first = trust("first", 1);
        write(at(STAGED_ROOT), &first.root).unwrap();
        write(at(STAGED_BUNDLE), format!("the system's\n{}", first.root)).unwrap();
        if java {
            write(at(STAGED_JAVA_STORE), "old").unwrap();
        }
        let files = TrustFiles::open(place.path(), vec!["over-ssl/certs".into()]).unwrap();
        (place, files)
    }

    #[test]
    fn new_root_is_added_once_to_existing_files() {
        let (place, files) = staging(true);
        let inodes = || {
            use std::os::unix::fs::MetadataExt;
            [STAGED_BUNDLE, STAGED_ROOT]
                .map(|name| place.path().join(name).metadata().unwrap().ino())
        };
        let before = inodes();
        for _ in 0..2 {
            files.add(&trust("second", 0x2a)).unwrap();
        }
        assert_eq!(inodes(), before, "an overlay caches inodes");
        let text = |name: &str| read_to_string(place.path().join(name)).unwrap();
        for name in [STAGED_BUNDLE, STAGED_ROOT] {
            assert_eq!(text(name).matches("second").count(), 1, "{name}");
            assert_eq!(text(name).matches("first").count(), 1, "{name}");
        }
        let link = place.path().join("over-ssl/certs/0000002a.0");
        assert_eq!(read_link(link).unwrap(), Path::new(ROOT_PATH));
        assert_ne!(read(place.path().join(STAGED_JAVA_STORE)).unwrap(), b"old");
    }

    #[test]
    fn partial_renewal_is_completed() {
        let (place, files) = staging(false);
        let second = trust("second", 2);
        let all = read(place.path().join(STAGED_BUNDLE)).unwrap();
        files
            .append(STAGED_BUNDLE, &all, second.root.as_bytes())
            .unwrap();
        files.add(&second).unwrap();
        for name in [STAGED_BUNDLE, STAGED_ROOT] {
            let text = read_to_string(place.path().join(name)).unwrap();
            assert_eq!(text.matches("second").count(), 1, "{name}");
        }
        assert!(!place.path().join(STAGED_JAVA_STORE).exists());
    }

    #[test]
    fn root_never_crosses_a_write_unit() {
        let (place, files) = staging(false);
        for number in 0..40 {
            let name = format!("{number}{}", "x".repeat(700));
            files.add(&trust(&name, number)).unwrap();
        }
        let text = read_to_string(place.path().join(STAGED_BUNDLE)).unwrap();
        let ends = text.match_indices("-----END CERTIFICATE-----");
        let start_in_block = text.match_indices("-----BEGIN CERTIFICATE-----");
        let both: Vec<_> = start_in_block.zip(ends).collect();
        assert_eq!(both.len(), 41);
        for ((begin, _), (end, _)) in both {
            let unit = usize::try_from(ATOMIC_WRITE_BYTES).unwrap();
            assert_eq!(begin / unit, (end + 25) / unit, "{begin}");
        }
    }

    #[test]
    fn malformed_and_too_many_roots_are_refused() {
        let (_place, files) = staging(false);
        let malformed = Trust {
            root: "x".to_owned(),
            hash: 1,
        };
        assert!(files.add(&malformed).is_err());
        assert!(files.add(&trust(&"x".repeat(MAX_ROOT_BYTES), 1)).is_err());
        let long = "x".repeat(3000);
        let most = (0..100).take_while(|n| files.add(&trust(&format!("{n}{long}"), *n)).is_ok());
        assert!((30..50).contains(&most.count()));
    }
}
