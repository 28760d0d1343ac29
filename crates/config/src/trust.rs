//! The list of trusted repository files: a content digest for each directory.

use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Component, Path, PathBuf};

use nix::libc::{O_CLOEXEC, O_NOFOLLOW, O_NONBLOCK};
use serde::{Deserialize, Serialize};

use crate::file::{self, FileReadError, Links, OPERATOR_LIMIT};

/// Digests of trusted contents, by directory. Stored in a JSON file that only the operator can read
/// or write.
#[derive(Debug)]
pub struct TrustStore {
    path: PathBuf,
    entries: BTreeMap<PathBuf, String>,
}

/// One trusted file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TrustEntry {
    /// The repository's directory, canonical.
    pub directory: PathBuf,
    /// SHA-256 of the content, in hexadecimal.
    pub sha256: String,
}

/// Why the list of trusted files cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum TrustError {
    /// The list cannot be read.
    #[error("the list of trusted repositories {path} cannot be read: {why}")]
    Unreadable {
        /// The list.
        path: PathBuf,
        /// The system's error.
        why: String,
    },
    /// The list does not have the format that this program writes. Continuing with an empty list
    /// would lose revocations and trust alike, so the operator decides.
    #[error("the list of trusted repositories {path} is damaged; move it away to start a new one")]
    Damaged {
        /// The list.
        path: PathBuf,
    },
    /// The repository's path cannot be stored.
    #[error("the path of the repository {path} is not UTF-8 text")]
    NotText {
        /// The repository.
        path: PathBuf,
    },
    /// The list cannot be written.
    #[error("the list of trusted repositories {path} cannot be written: {source}")]
    Unwritable {
        /// The list.
        path: PathBuf,
        /// The system's error.
        source: std::io::Error,
    },
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct TrustFile {
    version: u32,
    trusted: BTreeMap<PathBuf, String>,
}

impl TrustStore {
    /// Reads the list at `path`; a list that does not exist is empty.
    pub fn load(path: &Path) -> Result<Self, TrustError> {
        let entries = match file::read(path, OPERATOR_LIMIT, Links::Refuse) {
            Err(FileReadError::Missing) => BTreeMap::new(),
            Err(why) => {
                return Err(TrustError::Unreadable {
                    path: path.to_owned(),
                    why: why.to_string(),
                });
            }
            Ok(bytes) => match serde_json::from_slice::<TrustFile>(&bytes) {
                Ok(stored)
                    if stored.version == 1
                        && stored.trusted.values().all(|digest| is_digest(digest)) =>
                {
                    stored.trusted
                }
                _ => {
                    return Err(TrustError::Damaged {
                        path: path.to_owned(),
                    });
                }
            },
        };
        Ok(Self {
            path: path.to_owned(),
            entries,
        })
    }

    /// Whether the list has exactly this digest for `directory`.
    pub(crate) fn has(&self, directory: &Path, digest: [u8; 32]) -> bool {
        self.entries.get(directory) == Some(&hex(digest))
    }

    /// Whether the list has another digest for `directory`.
    pub(crate) fn has_other(&self, directory: &Path, digest: [u8; 32]) -> bool {
        self.entries.contains_key(directory) && !self.has(directory, digest)
    }

    /// Replaces the digest of `directory` by this one, and writes the list.
    pub(crate) fn add(&mut self, directory: &Path, digest: [u8; 32]) -> Result<(), TrustError> {
        if directory.to_str().is_none() {
            return Err(TrustError::NotText {
                path: directory.to_owned(),
            });
        }
        let _lock = self.lock()?;
        // Another process may have changed the list since it was read: while the operator reads the
        // question, another repository may be revoked.
        let mut entries = Self::load(&self.path)?.entries;
        entries.insert(directory.to_owned(), hex(digest));
        self.replace(entries)
    }

    /// Removes every trusted digest of `directory`, and writes the list. Returns whether anything
    /// was trusted there.
    pub fn revoke(&mut self, directory: &Path) -> Result<bool, TrustError> {
        let _lock = match self.lock() {
            Err(TrustError::Unwritable { source, .. })
                if source.kind() == std::io::ErrorKind::NotFound =>
            {
                // The directory of the list does not exist either.
                self.entries.clear();
                return Ok(false);
            }
            lock => lock?,
        };
        let mut entries = Self::load(&self.path)?.entries;
        let before = entries.len();
        for path in equivalent_paths(directory) {
            entries.remove(&path);
        }
        if entries.len() == before {
            self.entries = entries;
            return Ok(false);
        }
        self.replace(entries).map(|()| true)
    }

    /// Everything that is trusted, by directory.
    pub fn list(&self) -> Vec<TrustEntry> {
        let entry = |(directory, sha256): (&PathBuf, &String)| TrustEntry {
            directory: directory.clone(),
            sha256: sha256.clone(),
        };
        self.entries.iter().map(entry).collect()
    }

    /// Prevents other processes from writing until it is dropped. The lock is a separate file,
    /// because the list is replaced whenever it is written.
    fn lock(&self) -> Result<File, TrustError> {
        let mut name = self.path.file_name().unwrap_or_default().to_owned();
        name.push(".lock");
        let lock = OpenOptions::new()
            .write(true)
            .create(true)
            .truncate(false)
            .mode(0o600)
            .custom_flags(O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC)
            .open(self.path.with_file_name(name));
        lock.and_then(|lock| lock.lock().map(|()| lock))
            .map_err(|source| TrustError::Unwritable {
                path: self.path.clone(),
                source,
            })
    }

    /// Writes the list, and updates the entries in memory only if that succeeded.
    fn replace(&mut self, entries: BTreeMap<PathBuf, String>) -> Result<(), TrustError> {
        let unwritable = |source: std::io::Error| TrustError::Unwritable {
            path: self.path.clone(),
            source,
        };
        let stored = TrustFile {
            version: 1,
            trusted: entries,
        };
        let text = serde_json::to_vec_pretty(&stored).map_err(|error| unwritable(error.into()))?;
        file::write_atomically(&self.path, &text, 0o600).map_err(unwritable)?;
        self.entries = stored.trusted;
        Ok(())
    }
}

/// The paths under which a directory may be in the list: resolved, as written, and, if the
/// directory no longer exists, resolved as far as its parents exist. A revocation removes all of
/// them.
fn equivalent_paths(directory: &Path) -> Vec<PathBuf> {
    let mut paths = vec![directory.to_owned()];
    let written = std::path::absolute(directory).unwrap_or_else(|_| directory.to_owned());
    // `..` after a part that no longer exists can only be resolved as text.
    let mut normalized = PathBuf::new();
    for part in written.components() {
        match part {
            Component::ParentDir => {
                normalized.pop();
            }
            part => normalized.push(part),
        }
    }
    for path in [written, normalized] {
        for outer in path.ancestors() {
            if let (Ok(resolved), Ok(rest)) =
                (std::fs::canonicalize(outer), path.strip_prefix(outer))
            {
                paths.push(resolved.join(rest));
                break;
            }
        }
        paths.push(path);
    }
    paths
}

fn hex(digest: [u8; 32]) -> String {
    digest.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn is_digest(text: &str) -> bool {
    text.len() == 64 && text.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'))
}
