//! A bundle that is a directory.

use std::path::{Path, PathBuf};

use super::{BundleFile, BundleFileError, Count, MAX_DEPTH, file_kind};
use crate::file::{self, Links};

pub(super) fn read(root: &Path) -> Result<Vec<BundleFile>, BundleFileError> {
    let bundle_error = |error: std::io::Error| (PathBuf::new(), error.to_string());
    let mut walk = Walk {
        root: std::fs::canonicalize(root).map_err(bundle_error)?,
        count: Count::default(),
        seen: 0,
        files: Vec::new(),
    };
    walk.enter(Path::new(""), 0)?;
    Ok(walk.files)
}

/// Maximum number of entries that are read, of any kind.
const MAX_ENTRIES: usize = 100_000;

struct Walk {
    root: PathBuf,
    count: Count,
    seen: usize,
    files: Vec<BundleFile>,
}

impl Walk {
    fn enter(&mut self, path: &Path, depth: usize) -> Result<(), BundleFileError> {
        let error_at = |detail: String| (path.to_owned(), detail);
        if depth > MAX_DEPTH {
            return Err(error_at(format!(
                "directories nest more than {MAX_DEPTH} deep"
            )));
        }
        let entries =
            std::fs::read_dir(self.root.join(path)).map_err(|error| error_at(error.to_string()))?;
        for entry in entries {
            let entry = entry.map_err(|error| error_at(error.to_string()))?;
            self.seen += 1;
            if self.seen > MAX_ENTRIES {
                return Err(error_at(format!(
                    "there are more than {MAX_ENTRIES} entries"
                )));
            }
            let name = entry.file_name();
            if name.as_encoded_bytes().starts_with(b".") {
                continue;
            }
            let inner = path.join(&name);
            let kind = entry.file_type();
            let kind = kind.map_err(|error| (inner.clone(), error.to_string()))?;
            if kind.is_dir() {
                self.enter(&inner, depth + 1)?;
            } else if kind.is_symlink() {
                self.follow(inner)?;
            } else {
                self.add_file(inner, Links::Refuse)?;
            }
        }
        Ok(())
    }

    /// Reads the target of a symbolic link. Kubernetes mounts files as links to other files in the
    /// same directory. A link to a file outside of the bundle is refused: error messages could
    /// contain parts of any file that the operator can read.
    fn follow(&mut self, path: PathBuf) -> Result<(), BundleFileError> {
        let target = std::fs::canonicalize(self.root.join(&path));
        let target = match target {
            Ok(target) => target,
            Err(error) => return Err((path, error.to_string())),
        };
        if !target.starts_with(&self.root) {
            return Err((
                path,
                "it is a link to a file outside of the bundle".to_owned(),
            ));
        }
        if target.is_dir() {
            let detail = "it is a link to a directory, which is not followed";
            return Err((path, detail.to_owned()));
        }
        self.add_file(path, Links::Follow)
    }

    fn add_file(&mut self, path: PathBuf, links: Links) -> Result<(), BundleFileError> {
        if file_kind(&path).is_none() {
            return Ok(());
        }
        let read = file::read(&self.root.join(&path), self.count.left(), links);
        let content = read.map_err(|error| error.to_string()).and_then(|bytes| {
            self.count.add(bytes.len())?;
            Ok(bytes)
        });
        match content {
            Ok(bytes) => {
                self.files.push(BundleFile { path, bytes });
                Ok(())
            }
            Err(detail) => Err((path, detail)),
        }
    }
}
