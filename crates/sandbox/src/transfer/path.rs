//! Strict parser of members' paths, which decide where files are written.

use std::ffi::CString;

use super::MemberRefusal;

/// Maximum length of a path, and of a component, on common file systems.
pub(super) const MAX_PATH_BYTES: usize = 4096;
/// Maximum length of a component.
const MAX_NAME_BYTES: usize = 255;

/// Maximum depth of a member; moving a member needs one descriptor for each level.
pub(super) const MAX_DEPTH: usize = 128;

/// Splits a path into components below the target. Empty for the target itself (`./`).
pub(super) fn split_path(path: &[u8]) -> Result<Vec<CString>, MemberRefusal> {
    if path.is_empty() || path.len() > MAX_PATH_BYTES {
        return Err(MemberRefusal::InvalidPath);
    }
    if path.starts_with(b"/") {
        return Err(MemberRefusal::Absolute);
    }
    let mut names = Vec::new();
    for name in path.split(|&byte| byte == b'/') {
        match name {
            b"" | b"." => {}
            b".." => return Err(MemberRefusal::DotDot),
            name if name.len() > MAX_NAME_BYTES => return Err(MemberRefusal::InvalidPath),
            name => names.push(CString::new(name).map_err(|_| MemberRefusal::InvalidPath)?),
        }
    }
    if names.len() > MAX_DEPTH {
        return Err(MemberRefusal::InvalidPath);
    }
    Ok(names)
}

/// Whether a link in a directory `depth` levels below the target points below the target.
///
/// `..` is accepted only at the start, where its target is a directory of the archive. After
/// another component, which may be a link, the target of `..` is unknown.
pub(super) fn stays_below_target(text: &[u8], depth: usize) -> bool {
    let mut parents = 0;
    let mut has_name = false;
    for name in text.split(|&byte| byte == b'/') {
        match name {
            b"" | b"." => {}
            b".." if has_name => return false,
            b".." => parents += 1,
            _ => has_name = true,
        }
    }
    !text.is_empty() && !text.starts_with(b"/") && parents <= depth
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_paths_below_the_target_have_names() {
        for (path, wanted) in [
            (&b"a/b"[..], Ok(2)),
            (b"./a//b/", Ok(2)),
            (b"./", Ok(0)),
            (b"...", Ok(1)),
            (b"a\nb\xff", Ok(1)),
            (b"", Err(MemberRefusal::InvalidPath)),
            (b"a\0b", Err(MemberRefusal::InvalidPath)),
            (b"/a", Err(MemberRefusal::Absolute)),
            (b"../a", Err(MemberRefusal::DotDot)),
            (b"a/../b", Err(MemberRefusal::DotDot)),
            (b"a/..", Err(MemberRefusal::DotDot)),
            (&[b'x'; 256], Err(MemberRefusal::InvalidPath)),
            (&b"x/".repeat(129), Err(MemberRefusal::InvalidPath)),
        ] {
            assert_eq!(
                split_path(path).map(|names| names.len()),
                wanted,
                "{path:?}"
            );
        }
    }

    #[test]
    fn links_that_may_leave_the_target_are_rejected() {
        for (text, depth, wanted) in [
            (&b"b"[..], 0, true),
            (b"../b", 1, true),
            (b"./../../b/c", 2, true),
            (b"..", 0, false),
            (b"../../b", 1, false),
            (b"/etc/passwd", 3, false),
            (b"b/../c", 3, false),
            (b"", 3, false),
        ] {
            assert_eq!(stays_below_target(text, depth), wanted, "{text:?}");
        }
    }
}
