//! A bundle that is a `.tar.gz`.

use std::collections::BTreeSet;
use std::io::Read;
use std::path::{Component, Path, PathBuf};

use flate2::read::MultiGzDecoder;
use tar::{Archive, EntryType};

use super::{At, Count, DEEPEST, MOST_BYTES, MOST_FILES, Piece, use_of};
use crate::file::{self, Links};

/// The most entries that are looked at, of whatever kind.
const MOST_ENTRIES: usize = 2 * MOST_FILES;

/// What unpacks may be larger than what counts: heads, padding, files that are none of ours.
const MOST_UNPACKED: u64 = 2 * MOST_BYTES;

pub(super) fn read(path: &Path) -> Result<Vec<Piece>, At> {
    let whole = |detail: String| (PathBuf::new(), detail);
    let packed =
        file::read(path, MOST_BYTES, Links::Follow).map_err(|error| whole(error.to_string()))?;
    unpack(&packed)
}

pub(super) fn unpack(packed: &[u8]) -> Result<Vec<Piece>, At> {
    let whole = |detail: String| (PathBuf::new(), detail);
    if !packed.starts_with(&[0x1f, 0x8b]) {
        let detail = "it is neither a directory nor a .tar.gz";
        return Err(whole(detail.to_owned()));
    }
    let mut archive = Archive::new(MultiGzDecoder::new(packed).take(MOST_UNPACKED));
    let broken = |error: std::io::Error| whole(format!("the archive is broken: {error}"));
    let mut count = Count::default();
    let mut names = BTreeSet::new();
    let mut pieces = Vec::new();
    for (number, entry) in archive.entries().map_err(broken)?.enumerate() {
        let entry = entry.map_err(broken)?;
        if number >= MOST_ENTRIES {
            return Err(whole(format!("there are more than {MOST_ENTRIES} entries")));
        }
        let kind = entry.header().entry_type();
        if kind == EntryType::Directory || kind == EntryType::XGlobalHeader {
            continue;
        }
        let said = entry.path().map_err(broken)?.into_owned();
        let path = inside(&said)?;
        if is_hidden(&path) || use_of(&path).is_none() {
            continue;
        }
        let at = |detail: &str| (path.clone(), detail.to_owned());
        if kind != EntryType::Regular {
            return Err(at("it is no regular file"));
        }
        if !names.insert(path.clone()) {
            return Err(at("it is twice in the archive"));
        }
        let mut bytes = Vec::new();
        entry
            .take(count.left() + 1)
            .read_to_end(&mut bytes)
            .map_err(broken)?;
        count.add(bytes.len()).map_err(|detail| at(&detail))?;
        pieces.push(Piece { path, bytes });
    }
    Ok(pieces)
}

/// OPA writes names with a slash in front.
fn inside(said: &Path) -> Result<PathBuf, At> {
    let mut path = PathBuf::new();
    for part in said.components() {
        match part {
            Component::Normal(name) => path.push(name),
            Component::RootDir | Component::CurDir => {}
            Component::ParentDir | Component::Prefix(_) => {
                return Err((
                    said.to_owned(),
                    "its name leads out of the bundle".to_owned(),
                ));
            }
        }
    }
    if path.components().count() > DEEPEST {
        return Err((path, format!("directories nest more than {DEEPEST} deep")));
    }
    Ok(path)
}

fn is_hidden(path: &Path) -> bool {
    path.iter()
        .any(|name| name.as_encoded_bytes().starts_with(b"."))
}
