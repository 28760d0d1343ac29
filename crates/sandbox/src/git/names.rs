//! Checks path components of trees, and quotes paths for display.

use super::error::GitError;

const MAX_PATH_BYTES: usize = 4096;
const MAX_NAME_BYTES: usize = 255;

/// Checks every component of a path from a workspace's root.
pub fn check_path(path: &[u8]) -> Result<(), GitError> {
    let refused = |why| GitError::Forbidden {
        path: path.iter().copied().take(MAX_PATH_BYTES).collect(),
        why,
    };
    if path.len() > MAX_PATH_BYTES {
        return Err(refused("it is longer than 4096 bytes"));
    }
    for name in path.split(|b| *b == b'/') {
        check_name(name).map_err(refused)?;
    }
    Ok(())
}

/// Checks one component.
pub(super) fn check_name(name: &[u8]) -> Result<(), &'static str> {
    match name {
        b"" => Err("it has an empty component"),
        b"." | b".." => Err("it leaves the tree"),
        _ if name.len() > MAX_NAME_BYTES => Err("a component is longer than 255 bytes"),
        _ if name.contains(&0) || name.contains(&b'/') => {
            Err("a component contains a NUL or a slash")
        }
        _ if is_dot_git(name) => Err("it is a spelling of '.git'"),
        _ => Ok(()),
    }
}

/// Whether some file system treats this name as `.git`: any case, NTFS's short name, its trailing
/// dots, spaces and streams (CVE-2014-9390, CVE-2019-1352), HFS+'s ignored code points, and a
/// backslash as Windows' separator.
pub fn is_dot_git(name: &[u8]) -> bool {
    // Most names return early: a spelling of `.git` starts with a dot, a `g`, or a code point that
    // HFS+ ignores.
    let first = name.first().copied().unwrap_or_default();
    if !matches!(first, b'.' | b'g' | b'G' | 0x80..) && !name.contains(&b'\\') {
        return false;
    }
    name.split(|b| *b == b'\\')
        .any(|part| matches_on_ntfs(part, b".git", b"git~1") || matches_on_hfs(part, ".git"))
}

/// Whether some file system treats this name as `.gitmodules`, which git refuses as a symbolic
/// link.
pub(super) fn is_dot_gitmodules(name: &[u8]) -> bool {
    matches_on_ntfs(name, b".gitmodules", b"gitmod~1") || matches_on_hfs(name, ".gitmodules")
}

fn matches_on_ntfs(name: &[u8], long: &[u8], short: &[u8]) -> bool {
    let stream = name.split(|b| *b == b':').next().unwrap_or_default();
    let tail = stream
        .iter()
        .rev()
        .take_while(|b| matches!(b, b' ' | b'.'))
        .count();
    let bare = stream
        .get(..stream.len().saturating_sub(tail))
        .unwrap_or_default();
    bare.eq_ignore_ascii_case(long) || bare.eq_ignore_ascii_case(short)
}

fn matches_on_hfs(name: &[u8], wanted: &str) -> bool {
    let seen = String::from_utf8_lossy(name);
    seen.chars()
        .filter(|c| !is_ignored_by_hfs(*c))
        .map(|c| c.to_ascii_lowercase())
        .eq(wanted.chars())
}

fn is_ignored_by_hfs(c: char) -> bool {
    matches!(
        c,
        '\u{200c}'..='\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{206a}'..='\u{206f}' | '\u{feff}'
    )
}

/// Quotes a path as git does: unchanged if it is printable ASCII, otherwise in quotes with escapes,
/// so that no name can move a terminal's cursor or forge a line.
pub fn quote(path: &[u8]) -> String {
    let plain = |b: &u8| matches!(b, 0x20..=0x7e) && !matches!(b, b'"' | b'\\');
    if path.iter().all(plain) {
        return path.iter().copied().map(char::from).collect();
    }
    let mut text = String::with_capacity(path.len() + 2);
    text.push('"');
    for b in path {
        match b {
            b'"' => text.push_str("\\\""),
            b'\\' => text.push_str("\\\\"),
            b'\n' => text.push_str("\\n"),
            b'\t' => text.push_str("\\t"),
            b'\r' => text.push_str("\\r"),
            _ if plain(b) => text.push(char::from(*b)),
            _ => text.push_str(&format!("\\{b:03o}")),
        }
    }
    text.push('"');
    text
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn is_dot_git_matches_every_spelling() {
        for bad in [
            ".git",
            ".GIT",
            ".Git",
            "git~1",
            "GIT~1",
            ".git.",
            ".git ",
            ".git . .",
            ".git::$INDEX_ALLOCATION",
            ".g\u{200c}it",
            "\u{feff}.git",
            ".gi\u{202e}t",
            "a\\.git\\hooks",
        ] {
            assert!(is_dot_git(bad.as_bytes()), "{bad:?}");
            let deep = format!("a/{bad}/b");
            assert!(check_path(deep.as_bytes()).is_err(), "{bad:?}");
        }
        for good in [".gitignore", ".github", "git", "git~2", "x.git", ".gi", "."] {
            assert!(!is_dot_git(good.as_bytes()), "{good:?}");
        }
    }

    #[test]
    fn path_outside_the_tree_is_refused() {
        for bad in ["", "/a", "a/", "a//b", "../a", "a/../b", "./a", "a\0b"] {
            assert!(check_path(bad.as_bytes()).is_err(), "{bad:?}");
        }
        assert!(check_path(b"a\nb/\xff").is_ok());
    }

    proptest! {
        #[test]
        fn quoted_path_is_printable_ascii(path in proptest::collection::vec(any::<u8>(), 0..40)) {
            let shown = quote(&path);
            prop_assert!(shown.bytes().all(|b| (0x20..=0x7e).contains(&b)));
        }
    }
}
