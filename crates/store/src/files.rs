//! Files on disk: derived names, private permissions, and flushing to the disk.

use std::fs::{self, File, OpenOptions};
use std::io::ErrorKind;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use crate::error::StoreError;

/// `path` with `end` appended to its last component.
pub(crate) fn with_suffix(path: &Path, end: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(end);
    name.into()
}

/// `path`, or the first of `path.1`, `path.2`, … that does not exist yet.
pub(crate) fn free_name(path: &Path) -> PathBuf {
    let is_free = |p: &Path| {
        ["", "-wal", "-shm"]
            .iter()
            .all(|end| fs::symlink_metadata(with_suffix(p, end)).is_err())
    };
    std::iter::once(path.to_owned())
        .chain((1u32..).map(|n| with_suffix(path, &format!(".{n}"))))
        .find(|p| is_free(p))
        .unwrap_or_else(|| path.to_owned())
}

/// Creates an empty file that only its owner may read; fails if it exists.
pub(crate) fn create_private(path: &Path) -> Result<(), StoreError> {
    OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(path)
        .map(drop)
        .map_err(|e| match e.kind() {
            ErrorKind::AlreadyExists => StoreError::Exists {
                path: path.to_owned(),
            },
            _ => StoreError::file(path, e),
        })
}

/// Creates the state directory if it does not exist.
pub(crate) fn make_dir(dir: &Path) -> Result<(), StoreError> {
    fs::DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(dir)
        .map_err(|e| StoreError::file(dir, e))
}

/// Restricts the permissions of `path` to its owner.
pub(crate) fn make_private(path: &Path) -> Result<(), StoreError> {
    fs::set_permissions(path, fs::Permissions::from_mode(0o600))
        .map_err(|e| StoreError::file(path, e))
}

/// Flushes a file's content to the disk.
pub(crate) fn sync_file(path: &Path) -> Result<(), StoreError> {
    File::open(path)
        .and_then(|file| file.sync_all())
        .map_err(|e| StoreError::file(path, e))
}

/// Flushes the directory entry of `path` to the disk.
pub(crate) fn sync_parent(path: &Path) -> Result<(), StoreError> {
    match path.parent() {
        Some(dir) if !dir.as_os_str().is_empty() => sync_file(dir),
        _ => sync_file(Path::new(".")),
    }
}
