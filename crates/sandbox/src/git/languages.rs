//! Package registries that a repository needs, found by the names of files in its worktree.
//!
//! Only names and types are read: no file is opened, no link is followed, and the work is bounded,
//! because a clone's content is not trusted.

use std::collections::BTreeSet;
use std::ffi::CStr;
use std::os::fd::OwnedFd;
use std::path::Path;

use crate::beneath::{FileKind, file_kind, list_names, open_directory, open_root, stat};

/// Maximum number of names in a directory; a larger one is skipped.
const MAX_NAMES: u64 = 4096;

/// Maximum number of directories below the root that are searched.
const MAX_DIRECTORIES: usize = 128;

/// Directories with other people's packages.
const SKIPPED: [&[u8]; 4] = [b"node_modules", b"target", b"vendor", b"venv"];

/// The registry of the language to which a file name belongs.
fn registry_of(name: &[u8]) -> Option<&'static str> {
    match name {
        b"package.json" => Some("npm"),
        b"requirements.txt" | b"pyproject.toml" | b"setup.py" => Some("pypi"),
        b"Cargo.toml" => Some("crates"),
        b"go.mod" => Some("go"),
        b"pom.xml" | b"build.gradle" | b"build.gradle.kts" => Some("maven"),
        b"Gemfile" => Some("rubygems"),
        b"composer.json" => Some("packagist"),
        name if name.ends_with(b".csproj") || name.ends_with(b".sln") => Some("nuget"),
        _ => None,
    }
}

/// The names of the registries of the languages in the worktree at `root` and in the directories
/// directly below it, sorted. Empty if the worktree cannot be read.
pub fn registries(root: &Path) -> Vec<&'static str> {
    let mut found = BTreeSet::new();
    // A worktree may be reached through a link.
    let root = std::fs::canonicalize(root).unwrap_or_else(|_| root.to_owned());
    if let Ok(root) = open_root(&root) {
        let below = search(&root, &mut found);
        for name in below.iter().take(MAX_DIRECTORIES) {
            if let Ok(directory) = open_directory(&root, name) {
                search(&directory, &mut found);
            }
        }
    }
    found.into_iter().collect()
}

/// Adds the registries of the files in a directory, and returns the directories in it.
fn search(directory: &OwnedFd, found: &mut BTreeSet<&'static str>) -> Vec<std::ffi::CString> {
    let mut below = Vec::new();
    let Ok(Some(names)) = list_names(directory, MAX_NAMES) else {
        return below;
    };
    for name in names {
        let registry = registry_of(name.to_bytes());
        match kind(directory, &name) {
            Some(FileKind::File) => found.extend(registry),
            Some(FileKind::Directory) if is_searched(name.to_bytes()) => below.push(name),
            _ => {}
        }
    }
    below
}

fn kind(directory: &OwnedFd, name: &CStr) -> Option<FileKind> {
    stat(directory, name)
        .ok()
        .flatten()
        .map(|data| file_kind(&data))
}

fn is_searched(name: &[u8]) -> bool {
    !name.starts_with(b".") && !SKIPPED.contains(&name)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn file_names_select_the_registries_of_their_languages() {
        for (file, expected) in [
            ("package.json", "npm"),
            ("requirements.txt", "pypi"),
            ("pyproject.toml", "pypi"),
            ("setup.py", "pypi"),
            ("Cargo.toml", "crates"),
            ("go.mod", "go"),
            ("pom.xml", "maven"),
            ("build.gradle", "maven"),
            ("Gemfile", "rubygems"),
            ("app.csproj", "nuget"),
            ("all.sln", "nuget"),
            ("composer.json", "packagist"),
            ("README.md", ""),
            ("package.json.bak", ""),
        ] {
            let dir = tempfile::tempdir().unwrap();
            fs::write(dir.path().join(file), "").unwrap();
            let expected: Vec<&str> = Some(expected)
                .filter(|name| !name.is_empty())
                .into_iter()
                .collect();
            assert_eq!(registries(dir.path()), expected, "{file}");
        }
    }

    #[test]
    fn directories_one_level_below_are_searched_and_deeper_ones_are_not() {
        let dir = tempfile::tempdir().unwrap();
        for (path, file) in [
            ("web", "package.json"),
            ("server", "Cargo.toml"),
            ("a/b", "go.mod"),
            (".hidden", "Gemfile"),
            ("node_modules", "composer.json"),
        ] {
            fs::create_dir_all(dir.path().join(path)).unwrap();
            fs::write(dir.path().join(path).join(file), "").unwrap();
        }
        assert_eq!(registries(dir.path()), ["crates", "npm"]);
    }

    #[test]
    fn links_and_directories_with_such_names_are_ignored() {
        let dir = tempfile::tempdir().unwrap();
        let outside = tempfile::tempdir().unwrap();
        fs::write(outside.path().join("Cargo.toml"), "").unwrap();
        let link = |from: &str, to: &str| {
            let from = outside.path().join(from);
            std::os::unix::fs::symlink(from, dir.path().join(to)).unwrap();
        };
        link("Cargo.toml", "Cargo.toml");
        link("", "linked");
        fs::create_dir(dir.path().join("package.json")).unwrap();
        nix::unistd::mkfifo(&dir.path().join("go.mod"), nix::sys::stat::Mode::S_IRWXU).unwrap();
        assert_eq!(registries(dir.path()), [""; 0]);
        assert_eq!(registries(&dir.path().join("missing")), [""; 0]);
    }

    #[test]
    fn huge_directory_is_skipped() {
        let dir = tempfile::tempdir().unwrap();
        let many = dir.path().join("many");
        fs::create_dir(&many).unwrap();
        for number in 0..=MAX_NAMES {
            fs::write(many.join(format!("f{number}")), "").unwrap();
        }
        fs::write(many.join("Cargo.toml"), "").unwrap();
        fs::write(dir.path().join("go.mod"), "").unwrap();
        assert_eq!(registries(dir.path()), ["go"]);
    }
}
