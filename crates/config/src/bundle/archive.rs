//! A bundle that is a `.tar.gz`.

use std::collections::BTreeSet;
use std::io::Read;
use std::path::{Component, Path, PathBuf};

use flate2::read::MultiGzDecoder;
use tar::{Archive, EntryType};

use super::{BundleFile, BundleFileError, Count, MAX_BYTES, MAX_DEPTH, MAX_FILES, file_kind};
use crate::file::{self, Links};

/// Maximum number of entries that are read, of any kind.
const MAX_ENTRIES: usize = 2 * MAX_FILES;

/// Maximum size of the unpacked archive: the files of the bundle, headers, padding and ignored
/// files.
const MAX_UNPACKED: u64 = 2 * MAX_BYTES;

pub(super) fn read(path: &Path) -> Result<Vec<BundleFile>, BundleFileError> {
    let bundle_error = |detail: String| (PathBuf::new(), detail);
    let packed = file::read(path, MAX_BYTES, Links::Follow)
        .map_err(|error| bundle_error(error.to_string()))?;
    unpack(&packed)
}

pub(super) fn unpack(packed: &[u8]) -> Result<Vec<BundleFile>, BundleFileError> {
    let bundle_error = |detail: String| (PathBuf::new(), detail);
    if !packed.starts_with(&[0x1f, 0x8b]) {
        let detail = "it is neither a directory nor a .tar.gz";
        return Err(bundle_error(detail.to_owned()));
    }
    let mut archive = Archive::new(MultiGzDecoder::new(packed).take(MAX_UNPACKED));
    let broken = |error: std::io::Error| bundle_error(format!("the archive is broken: {error}"));
    let mut count = Count::default();
    let mut names = BTreeSet::new();
    let mut files = Vec::new();
    for (number, entry) in archive.entries().map_err(broken)?.enumerate() {
        let entry = entry.map_err(broken)?;
        if number >= MAX_ENTRIES {
            return Err(bundle_error(format!(
                "there are more than {MAX_ENTRIES} entries"
            )));
        }
        let kind = entry.header().entry_type();
        if kind == EntryType::Directory || kind == EntryType::XGlobalHeader {
            continue;
        }
        let name = entry.path().map_err(broken)?.into_owned();
        let path = path_in_bundle(&name)?;
        if is_hidden(&path) || file_kind(&path).is_none() {
            continue;
        }
        let error_at = |detail: &str| (path.clone(), detail.to_owned());
        if kind != EntryType::Regular {
            return Err(error_at("it is not a regular file"));
        }
        if !names.insert(path.clone()) {
            return Err(error_at("the archive contains it twice"));
        }
        let mut bytes = Vec::new();
        entry
            .take(count.left() + 1)
            .read_to_end(&mut bytes)
            .map_err(broken)?;
        count.add(bytes.len()).map_err(|detail| error_at(&detail))?;
        files.push(BundleFile { path, bytes });
    }
    Ok(files)
}

/// The path of an entry in the bundle. OPA writes names with a leading slash.
fn path_in_bundle(name: &Path) -> Result<PathBuf, BundleFileError> {
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
