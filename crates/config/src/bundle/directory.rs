//! A bundle that is a directory.

use std::path::{Path, PathBuf};

use super::{At, Count, DEEPEST, Piece, use_of};
use crate::file::{self, Links};

pub(super) fn read(root: &Path) -> Result<Vec<Piece>, At> {
    let whole = |error: std::io::Error| (PathBuf::new(), error.to_string());
    let mut walk = Walk {
        root: std::fs::canonicalize(root).map_err(whole)?,
        count: Count::default(),
        seen: 0,
        pieces: Vec::new(),
    };
    walk.enter(Path::new(""), 0)?;
    Ok(walk.pieces)
}

/// The most entries that are looked at, of whatever kind.
const MOST_ENTRIES: usize = 100_000;

struct Walk {
    root: PathBuf,
    count: Count,
    seen: usize,
    pieces: Vec<Piece>,
}

impl Walk {
    fn enter(&mut self, path: &Path, depth: usize) -> Result<(), At> {
        let at = |detail: String| (path.to_owned(), detail);
        if depth > DEEPEST {
            return Err(at(format!("directories nest more than {DEEPEST} deep")));
        }
        let entries =
            std::fs::read_dir(self.root.join(path)).map_err(|error| at(error.to_string()))?;
        for entry in entries {
            let entry = entry.map_err(|error| at(error.to_string()))?;
            self.seen += 1;
            if self.seen > MOST_ENTRIES {
                return Err(at(format!("there are more than {MOST_ENTRIES} entries")));
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
                self.take(inner, Links::Refuse)?;
            }
        }
        Ok(())
    }

    /// Kubernetes mounts files as links to others below the same directory. A link that
    /// leads out of it could make anything the operator can read part of a message.
    fn follow(&mut self, path: PathBuf) -> Result<(), At> {
        let target = std::fs::canonicalize(self.root.join(&path));
        let target = match target {
            Ok(target) => target,
            Err(error) => return Err((path, error.to_string())),
        };
        if !target.starts_with(&self.root) {
            return Err((path, "it is a link out of the bundle".to_owned()));
        }
        if target.is_dir() {
            let detail = "it is a link to a directory, which is not followed";
            return Err((path, detail.to_owned()));
        }
        self.take(path, Links::Follow)
    }

    fn take(&mut self, path: PathBuf, links: Links) -> Result<(), At> {
        if use_of(&path).is_none() {
            return Ok(());
        }
        let read = file::read(&self.root.join(&path), self.count.left(), links);
        let taken = read.map_err(|error| error.to_string()).and_then(|bytes| {
            self.count.add(bytes.len())?;
            Ok(bytes)
        });
        match taken {
            Ok(bytes) => {
                self.pieces.push(Piece { path, bytes });
                Ok(())
            }
            Err(detail) => Err((path, detail)),
        }
    }
}
