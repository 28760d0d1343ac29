//! Finds files of a layer that others may not read, and hides them.
//!
//! With a single id the operator's files are the agent's own, and root in the sandbox may read
//! everything that is mapped: in both cases the kernel would not protect files without permission
//! for others. The launcher therefore searches for them by mode, and init puts a whiteout over each
//! before the overlay is mounted. Files that the operator closes or adds while the sandbox runs are
//! not hidden.

use std::ffi::CString;
use std::io::{Error, ErrorKind, Result};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, chown};
use std::path::{Path, PathBuf};

use nix::sys::stat::{Mode, SFlag, mknod};

use super::layer::id_inside;
use super::protocol::Identity;

/// Maximum number of entries of a scanned layer.
const MAX_ENTRIES: usize = 4_000_000;

/// A path to hide.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct HiddenPath {
    /// The parent directories, from the top: name, mode and owner.
    parents: Vec<(PathBuf, u32, u32, u32)>,
    path: PathBuf,
}

/// The part of a layer that is searched.
#[derive(Clone, Copy)]
pub(crate) enum SearchScope {
    /// The whole layer.
    Everywhere,
    /// The upper directories, and deeper ones that belong to this user. In a system directory, the
    /// other files without permission for others belong to other users.
    OwnedBy(u32),
}

/// Directories up to this depth are searched, whatever their owner.
const MAX_FOREIGN_DEPTH: usize = 2;

/// Searches a part of a host directory. Follows no link and reads no file.
pub(crate) fn find(top: &Path, part: &Path, scope: SearchScope) -> Result<Vec<HiddenPath>> {
    let mut hidden = Vec::new();
    let mut seen = 0;
    let mut parents = Vec::new();
    let data = match top.join(part).symlink_metadata() {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(hidden),
        other => other?,
    };
    if !data.is_dir() {
        return Ok(hidden);
    }
    if part != Path::new("") {
        let mode = data.mode() & 0o777;
        parents.push((part.to_owned(), mode, data.uid(), data.gid()));
    }
    let max_depth = parents.len() + MAX_FOREIGN_DEPTH;
    let device = data.dev();
    let mut pending = vec![(part.to_owned(), parents)];
    while let Some((directory, parents)) = pending.pop() {
        let entries = match std::fs::read_dir(top.join(&directory)) {
            // The directory was removed, or the launcher has no permission.
            Err(error)
                if matches!(
                    error.kind(),
                    ErrorKind::NotFound | ErrorKind::PermissionDenied
                ) =>
            {
                continue;
            }
            other => other?,
        };
        for entry in entries {
            let entry = entry?;
            seen += 1;
            if seen > MAX_ENTRIES {
                return Err(Error::other(format!("more than {MAX_ENTRIES} entries")));
            }
            let Ok(data) = entry.metadata() else {
                continue;
            };
            let kind = data.file_type();
            let path = directory.join(entry.file_name());
            let is_public = if kind.is_dir() {
                data.mode() & 0o005 == 0o005
            } else {
                kind.is_symlink() || (kind.is_file() && data.mode() & 0o004 != 0)
            };
            if !is_public {
                let parents = parents.clone();
                hidden.push(HiddenPath { parents, path });
            } else if kind.is_dir() && data.dev() == device {
                match scope {
                    SearchScope::OwnedBy(uid)
                        if uid != data.uid() && parents.len() + 1 >= max_depth =>
                    {
                        continue;
                    }
                    SearchScope::OwnedBy(_) | SearchScope::Everywhere => {}
                }
                let mut parents = parents.clone();
                let mode = data.mode() & 0o777;
                parents.push((path.clone(), mode, data.uid(), data.gid()));
                pending.push((path, parents));
            }
        }
    }
    Ok(hidden)
}

/// Creates the whiteouts in a layer's upper directory. In a reused directory the agent may have
/// created an entry at the path. Such an entry hides the path as well, and nothing is written
/// through it.
pub(crate) fn hide_paths(hidden: &[HiddenPath], upper: &Path, identity: Identity) -> Result<()> {
    'hidden: for entry in hidden {
        for (path, mode, uid, gid) in &entry.parents {
            let path = upper.join(path);
            match path.symlink_metadata() {
                Ok(found) if found.is_dir() => continue,
                Ok(_) => continue 'hidden,
                Err(error) if error.kind() != ErrorKind::NotFound => return Err(error),
                Err(_) => std::fs::DirBuilder::new().mode(*mode).create(&path)?,
            }
            if let Identity::Range { .. } = identity {
                chown(&path, id_inside(*uid), id_inside(*gid))?;
            }
        }
        match upper.join(&entry.path).symlink_metadata() {
            Ok(found) if found.is_dir() => {
                return Err(Error::other(format!(
                    "{} was changed in the sandbox and is no longer readable by others on the host",
                    entry.path.display()
                )));
            }
            Ok(_) => continue,
            Err(error) if error.kind() != ErrorKind::NotFound => return Err(error),
            Err(_) => {}
        }
        let path = CString::new(upper.join(&entry.path).as_os_str().as_bytes())?;
        // A character device 0:0 is an overlay's whiteout and needs no privilege.
        mknod(path.as_c_str(), SFlag::S_IFCHR, Mode::empty(), 0)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{PermissionsExt, symlink};

    use super::*;

    #[test]
    fn find_returns_only_paths_closed_to_others() {
        let place = tempfile::tempdir().unwrap();
        let at = |name: &str| place.path().join(name);
        for (name, mode) in [("bin", 0o755), ("bin/deep", 0o755), ("private", 0o700)] {
            std::fs::create_dir(at(name)).unwrap();
            std::fs::set_permissions(at(name), std::fs::Permissions::from_mode(mode)).unwrap();
        }
        for (name, mode) in [
            ("bin/tool", 0o755),
            ("bin/deep/token", 0o600),
            ("group", 0o640),
            ("private/inner", 0o644),
        ] {
            std::fs::write(at(name), "").unwrap();
            std::fs::set_permissions(at(name), std::fs::Permissions::from_mode(mode)).unwrap();
        }
        symlink("/etc/shadow", at("link")).unwrap();
        let found = |part: &str, scope| {
            let mut found: Vec<_> = find(place.path(), Path::new(part), scope)
                .unwrap()
                .into_iter()
                .map(|entry| entry.path.to_str().unwrap().to_owned())
                .collect();
            found.sort();
            found
        };
        let all = ["bin/deep/token", "group", "private"];
        assert_eq!(found("", SearchScope::Everywhere), all);
        assert_eq!(found("bin", SearchScope::Everywhere), all[..1]);
        assert_eq!(found("missing", SearchScope::Everywhere), [""; 0]);
        let own = nix::unistd::Uid::effective().as_raw();
        assert_eq!(found("", SearchScope::OwnedBy(own)), all);
        assert_eq!(found("", SearchScope::OwnedBy(own + 1)), all[1..]);
    }
}
