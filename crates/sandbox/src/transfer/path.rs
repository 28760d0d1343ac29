//! Paths of members: read strictly, because they decide where something is written.

use std::ffi::CString;

use super::Refusal;

/// The longest path, and the longest name in it, that file systems take.
pub(super) const LONGEST: usize = 4096;
const LONGEST_NAME: usize = 255;

/// How many directories deep a member may be: each costs a descriptor while it is moved.
pub(super) const DEEPEST: usize = 128;

/// The names of a path, from the target down. None for the target itself (`./`).
pub(super) fn names(path: &[u8]) -> Result<Vec<CString>, Refusal> {
    if path.is_empty() || path.len() > LONGEST {
        return Err(Refusal::NoPath);
    }
    if path.starts_with(b"/") {
        return Err(Refusal::Absolute);
    }
    let mut names = Vec::new();
    for name in path.split(|&byte| byte == b'/') {
        match name {
            b"" | b"." => {}
            b".." => return Err(Refusal::Climbs),
            name if name.len() > LONGEST_NAME => return Err(Refusal::NoPath),
            name => names.push(CString::new(name).map_err(|_| Refusal::NoPath)?),
        }
    }
    if names.len() > DEEPEST {
        return Err(Refusal::NoPath);
    }
    Ok(names)
}

/// Whether a link's text, read in a directory `depth` below the target, leads nowhere else.
///
/// Steps up are only taken as the first ones: there they lead through directories that we
/// made. After a name, which may itself be a link, nobody knows where `..` goes.
pub(super) fn stays_inside(text: &[u8], depth: usize) -> bool {
    let mut up = 0;
    let mut named = false;
    for name in text.split(|&byte| byte == b'/') {
        match name {
            b"" | b"." => {}
            b".." if named => return false,
            b".." => up += 1,
            _ => named = true,
        }
    }
    !text.is_empty() && !text.starts_with(b"/") && up <= depth
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
            (b"", Err(Refusal::NoPath)),
            (b"a\0b", Err(Refusal::NoPath)),
            (b"/a", Err(Refusal::Absolute)),
            (b"../a", Err(Refusal::Climbs)),
            (b"a/../b", Err(Refusal::Climbs)),
            (b"a/..", Err(Refusal::Climbs)),
            (&[b'x'; 256], Err(Refusal::NoPath)),
            (&b"x/".repeat(129), Err(Refusal::NoPath)),
        ] {
            assert_eq!(names(path).map(|names| names.len()), wanted, "{path:?}");
        }
    }

    #[test]
    fn a_link_stays_inside_only_where_that_is_certain() {
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
            assert_eq!(stays_inside(text, depth), wanted, "{text:?}");
        }
    }
}
