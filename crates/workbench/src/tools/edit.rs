//! edit: replaces one text in a file.

use std::io::Read;

use memchr::memmem::Finder;
use nix::sys::stat::fstat;

use super::diff;
use super::replace::{Locks, TempFile, refuse_other_than_file};
use crate::error::ToolError;
use crate::request::{EditRequest, EditResult};
use crate::root::WorkspaceRoot;
use crate::truncation::as_u64;

/// Maximum file size in bytes; the content is in memory twice.
const MAX_FILE: u64 = 64 << 20;

pub(super) fn edit(
    root: &WorkspaceRoot,
    locks: &Locks,
    request: &EditRequest,
) -> Result<EditResult, ToolError> {
    let requested = request.path.as_str();
    let fail = |errno| ToolError::from_errno(requested, errno);
    let write_target = root.write_target(requested, false)?;
    let _lock = locks.lock(&write_target).map_err(fail)?;
    let mut file = write_target.read().map_err(fail)?;
    let old = fstat(&file).map_err(fail)?;
    refuse_other_than_file(requested, &old)?;
    let too_large = |size| ToolError::TooLarge {
        path: requested.to_owned(),
        size,
        most: MAX_FILE,
    };
    let size = u64::try_from(old.st_size).unwrap_or(0);
    if size > MAX_FILE {
        return Err(too_large(size));
    }
    let mut before = Vec::new();
    file.by_ref()
        .take(MAX_FILE + 1)
        .read_to_end(&mut before)
        .map_err(|error| ToolError::from_io(requested, &error))?;
    if as_u64(before.len()) > MAX_FILE {
        return Err(too_large(as_u64(before.len())));
    }
    let at = find_once(requested, &before, request.old_text.as_bytes())?;
    if request.old_text == request.new_text {
        return Err(ToolError::NoChange(requested.to_owned()));
    }
    let end = at + request.old_text.len();
    let mut after = before.get(..at).unwrap_or_default().to_vec();
    after.extend_from_slice(request.new_text.as_bytes());
    after.extend_from_slice(before.get(end..).unwrap_or_default());

    let temp_file = TempFile::make(&write_target, &after, Some(&old)).map_err(fail)?;
    if !temp_file.replace_if_unchanged(&old).map_err(fail)? {
        return Err(ToolError::Changed(requested.to_owned()));
    }
    Ok(EditResult {
        ok: true,
        path: requested.to_owned(),
        diff: diff::numbered_diff(&before, &after, at, request.old_text.len()),
    })
}

/// The offset of the text, which must occur exactly once.
fn find_once(requested: &str, content: &[u8], text: &[u8]) -> Result<usize, ToolError> {
    let finder = Finder::new(text);
    let mut matches = finder.find_iter(content);
    let first = matches
        .next()
        .ok_or_else(|| ToolError::NoMatch(requested.to_owned()))?;
    match matches.count() {
        0 => Ok(first),
        more => Err(ToolError::Ambiguous {
            path: requested.to_owned(),
            count: more + 1,
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::root::PathScope;

    fn change(content: &[u8], old: &str, new: &str) -> (Result<EditResult, String>, Vec<u8>) {
        let dir = tempfile::tempdir().unwrap();
        let root = WorkspaceRoot::open(dir.path(), PathScope::Workspace).unwrap();
        let file = dir.path().join("f");
        std::fs::write(&file, content).unwrap();
        let request = EditRequest {
            path: "f".to_owned(),
            old_text: old.to_owned(),
            new_text: new.to_owned(),
        };
        let result = edit(&root, &Locks::default(), &request);
        let left = std::fs::read_dir(dir.path()).unwrap().count();
        assert_eq!(left, 1, "nothing is left beside the file");
        (
            result.map_err(|error| error.to_string()),
            std::fs::read(&file).unwrap(),
        )
    }

    #[test]
    fn unique_text_is_replaced() {
        let (result, content) = change(b"a\nb\xff\nc\n", "b", "x\ny");
        assert_eq!(content, b"a\nx\ny\xff\nc\n");
        assert_eq!(
            result.unwrap().diff,
            " 1 a\n-2 b\u{fffd}\n+2 x\n+3 y\u{fffd}\n 3 c"
        );
    }

    /// Servers that share a workspace have separate in-process locks.
    #[test]
    fn concurrent_edits_of_several_servers_lose_no_change() {
        const SERVERS: usize = 4;
        const EDITS: u32 = 150;
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("f");
        std::fs::write(&file, "0,0,0,0").unwrap();
        let count = |mine: usize| {
            let root = WorkspaceRoot::open(dir.path(), PathScope::Workspace).unwrap();
            let locks = Locks::default();
            let mut number = 0;
            while number < EDITS {
                let text = std::fs::read_to_string(&file).unwrap();
                let mut numbers: Vec<u32> = text.split(',').map(|n| n.parse().unwrap()).collect();
                assert_eq!(numbers[mine], number, "an edit was undone");
                numbers[mine] += 1;
                let numbers: Vec<String> = numbers.iter().map(u32::to_string).collect();
                let request = EditRequest {
                    path: "f".to_owned(),
                    old_text: text,
                    new_text: numbers.join(","),
                };
                match edit(&root, &locks, &request) {
                    Ok(_) => number += 1,
                    Err(ToolError::NoMatch(_) | ToolError::Changed(_)) => {}
                    Err(other) => panic!("{other}"),
                }
            }
        };
        std::thread::scope(|scope| {
            for mine in 0..SERVERS {
                let count = &count;
                scope.spawn(move || count(mine));
            }
        });
        assert_eq!(std::fs::read_to_string(&file).unwrap(), "150,150,150,150");
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1);
    }

    #[test]
    fn failed_edit_changes_nothing_and_names_the_cause() {
        for (content, old, new, sentence) in [
            (
                "abc",
                "x",
                "y",
                "Could not find the exact text in f. The old text must match exactly including \
                 all whitespace and newlines.",
            ),
            (
                "aXaXa",
                "a",
                "y",
                "Found 3 occurrences of the text in f. The text must be unique. Please provide \
                 more context to make it unique.",
            ),
            ("abc", "b", "b", "No changes made to f."),
        ] {
            let (result, left) = change(content.as_bytes(), old, new);
            assert_eq!(result.unwrap_err(), sentence);
            assert_eq!(left, content.as_bytes());
        }
    }
}
