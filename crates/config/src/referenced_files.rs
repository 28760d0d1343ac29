//! Files that the settings refer to: policy bundles and the system's resolv.conf. They are read
//! when settings are applied; this module only detects that they changed.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};

use crate::file::{self, Links};

/// Maximum number of bundle entries that are checked every second. A change of further entries
/// is found by an explicit reload only.
const MAX_ENTRIES: usize = 10_000;

/// Maximum nesting depth, as when a bundle is read.
const MAX_DEPTH: usize = 16;

/// Maximum number of bytes of a resolver file that are compared.
const MAX_BYTES: u64 = 64 * 1024;

/// The state of a bundle or file at one moment.
#[derive(Clone)]
pub(crate) struct ReferencedFiles {
    hash: [u8; 32],
    /// The files.
    pub(crate) files: Vec<PathBuf>,
    /// The directories in which a file could appear.
    pub(crate) directories: Vec<PathBuf>,
}

/// Shows no path: a path may contain the value of a variable.
impl std::fmt::Debug for ReferencedFiles {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mut parts = f.debug_struct("ReferencedFiles");
        parts
            .field("files", &self.files.len())
            .finish_non_exhaustive()
    }
}

impl ReferencedFiles {
    /// A short file, whose content is compared.
    pub(crate) fn file(path: PathBuf) -> Self {
        let mut hash = Sha256::new();
        match file::read(&path, MAX_BYTES, Links::Follow) {
            Ok(bytes) => hash.update(bytes),
            Err(why) => hash.update(format!("\0{why}")),
        }
        Self {
            hash: hash.finalize().into(),
            directories: path.parent().map(PathBuf::from).into_iter().collect(),
            files: vec![path],
        }
    }

    /// A bundle, which may be large: size, times and path of each file are compared.
    pub(crate) fn bundle(path: &Path) -> Self {
        let mut walk = TreeWalk {
            hash: Sha256::new(),
            left: MAX_ENTRIES,
            files: Vec::new(),
            directories: path.parent().map(PathBuf::from).into_iter().collect(),
        };
        walk.visit(path, 0);
        Self {
            hash: walk.hash.finalize().into(),
            files: walk.files,
            directories: walk.directories,
        }
    }

    /// A hash that differs after a change.
    pub(crate) fn fingerprint(&self) -> &[u8; 32] {
        &self.hash
    }
}

struct TreeWalk {
    hash: Sha256,
    left: usize,
    files: Vec<PathBuf>,
    directories: Vec<PathBuf>,
}

impl TreeWalk {
    fn visit(&mut self, path: &Path, depth: usize) {
        let Some(left) = self.left.checked_sub(1) else {
            return;
        };
        self.left = left;
        let name = path.as_os_str().as_encoded_bytes();
        self.hash.update((name.len() as u64).to_be_bytes());
        self.hash.update(name);
        // Links are followed: Kubernetes changes their targets.
        let metadata = match std::fs::metadata(path) {
            Ok(metadata) => metadata,
            Err(error) => {
                self.hash.update(error.kind().to_string());
                return;
            }
        };
        for number in [
            metadata.dev(),
            metadata.ino(),
            metadata.size(),
            metadata.mtime().cast_unsigned(),
            metadata.mtime_nsec().cast_unsigned(),
            metadata.ctime().cast_unsigned(),
            metadata.ctime_nsec().cast_unsigned(),
        ] {
            self.hash.update(number.to_be_bytes());
        }
        if !metadata.is_dir() {
            self.files.push(path.to_owned());
            return;
        }
        let is_link = depth > 0 && path.is_symlink();
        if is_link || depth > MAX_DEPTH {
            return;
        }
        self.directories.push(path.to_owned());
        let entries = std::fs::read_dir(path).into_iter().flatten().flatten();
        let mut inner: Vec<PathBuf> = entries
            .take(self.left)
            .filter(|entry| !entry.file_name().as_encoded_bytes().starts_with(b"."))
            .map(|entry| entry.path())
            .collect();
        inner.sort();
        for path in inner {
            self.visit(&path, depth + 1);
        }
    }
}
