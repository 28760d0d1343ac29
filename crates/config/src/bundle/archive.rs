//! A bundle that is a `.tar.gz`.

use std::collections::BTreeSet;
use std::io::Read;
use std::path::{Component, Path, PathBuf};

use flate2::read::MultiGzDecoder;
use tar::{Archive, EntryType};

use super::{At, BundleFile, Count, MAX_BYTES, MAX_DEPTH, MAX_FILES, use_of};
use crate::file::{self, Links};

/// Maximum number of entries that are read, of any kind.
const MAX_ENTRIES: usize = 2 * MAX_FILES;

/// The unpacked archive may be larger than the files that count: headers, padding, files of other
/// kinds.
const MAX_UNPACKED: u64 = 2 * MAX_BYTES;

pub(super) fn read(path: &Path) -> Result<Vec<BundleFile>, At> {
    let whole = |detail: String| (PathBuf::new(), detail);
    let packed =
        file::read(path, MAX_BYTES, Links::Follow).map_err(|error| whole(error.to_string()))?;
    unpack(&packed)
}

pub(super) fn unpack(packed: &[u8]) -> Result<Vec<BundleFile>, At> {
    let whole = |detail: String| (PathBuf::new(), detail);
    if !packed.starts_with(&[0x1f, 0x8b]) {
        let detail = "it is neither a directory nor a .tar.gz";
        return Err(whole(detail.to_owned()));
    }
    let mut archive = Archive::new(MultiGzDecoder::new(packed).take(MAX_UNPACKED));
    let broken = |error: std::io::Error| whole(format!("the archive is broken: {error}"));
    let mut count = Count::default();
    let mut names = BTreeSet::new();
    let mut files = Vec::new();
    for (number, entry) in archive.entries().map_err(broken)?.enumerate() {
        let entry = entry.map_err(broken)?;
        if number >= MAX_ENTRIES {
            return Err(whole(format!("there are more than {MAX_ENTRIES} entries")));
        }
        let kind = entry.header().entry_type();
        if kind == EntryType::Directory || kind == EntryType::XGlobalHeader {
            continue;
        }
        let name = entry.path().map_err(broken)?.into_owned();
        let path = path_in_bundle(&name)?;
        if is_hidden(&path) || use_of(&path).is_none() {
            continue;
        }
        let at = |detail: &str| (path.clone(), detail.to_owned());
        if kind != EntryType::Regular {
            return Err(at("it is not a regular file"));
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
        files.push(BundleFile { path, bytes });
    }
    Ok(files)
}

/// The path of an entry in the bundle. OPA writes names with a leading slash.
fn path_in_bundle(name: &Path) -> Result<PathBuf, At> {
    let mut path = PathBuf::new();
    for part in name.components() {
        match part {
            Component::Normal(part) => path.push(part),
            Component::RootDir | Component::CurDir => {}
            Component::ParentDir | Component::Prefix(_) => {
                return Err((
                    name.to_owned(),
                    "its path is outside of the bundle".to_owned(),
                ));
            }
        }
    }
    if path.components().count() > MAX_DEPTH {
        return Err((path, format!("directories nest more than {MAX_DEPTH} deep")));
    }
    Ok(path)
}

fn is_hidden(path: &Path) -> bool {
    path.iter()
        .any(|name| name.as_encoded_bytes().starts_with(b"."))
}
