//! ls: lists a directory.

use std::collections::BinaryHeap;
use std::os::fd::AsFd;

use nix::dir::{Dir, Type};
use nix::fcntl::AtFlags;
use nix::sys::stat::{SFlag, fstatat};

use super::Cancelled;
use crate::error::ToolError;
use crate::request::{LsRequest, LsResult};
use crate::root::{WorkspaceRoot, kind};
use crate::truncation::{Bounds, MAX_LINES, TextHead, as_u64};

/// Default maximum number of names.
const DEFAULT_LIMIT: u64 = 500;

/// The output for an empty directory.
const EMPTY_OUTPUT: &str = "(empty directory)";

pub(super) fn ls(
    root: &WorkspaceRoot,
    request: &LsRequest,
    cancelled: &Cancelled,
) -> Result<LsResult, ToolError> {
    let requested = request.path.as_deref().unwrap_or(".");
    let fail = |errno| ToolError::from_errno(requested, errno);
    let (directory, _) = root.directory(requested)?;
    let most = request.limit.unwrap_or(DEFAULT_LIMIT).min(MAX_LINES);
    // Only the first names in order are kept: a directory may be huge.
    let mut first = BinaryHeap::new();
    let (mut total_lines, mut total_bytes) = (0, 0);
    let mut listing = Dir::from_fd(directory).map_err(fail)?;
    let parent = listing.as_fd().try_clone_to_owned();
    let parent = parent.map_err(|error| ToolError::from_io(requested, &error))?;
    for entry in listing.iter() {
        if cancelled.is_cancelled() {
            break;
        }
        let entry = entry.map_err(fail)?;
        let name = entry.file_name();
        if matches!(name.to_bytes(), b"." | b"..") {
            continue;
        }
        let is_directory = match entry.file_type() {
            Some(found) => found == Type::Directory,
            // Some file systems do not report the type.
            None => fstatat(&parent, name, AtFlags::AT_SYMLINK_NOFOLLOW)
                .is_ok_and(|data| kind(&data) == SFlag::S_IFDIR),
        };
        let mut line = name.to_string_lossy().into_owned();
        let key = line.to_lowercase();
        if is_directory {
            line.push('/');
        }
        total_lines += 1;
        total_bytes += as_u64(line.len()) + 1;
        first.push((key, line));
        if as_u64(first.len()) > most {
            first.pop();
        }
    }
    if total_lines == 0 {
        return Ok(LsResult {
            output: EMPTY_OUTPUT.to_owned(),
            truncation: None,
        });
    }
    let lines: Vec<String> = first
        .into_sorted_vec()
        .into_iter()
        .map(|(_, line)| line)
        .collect();
    let listed = TextHead {
        kept: lines.join("\n").into_bytes(),
        total_lines,
        total_bytes: total_bytes - 1,
    };
    let cut = listed.head(Bounds {
        lines: most,
        ..Bounds::default()
    });
    Ok(LsResult {
        output: cut.content.clone(),
        truncation: cut.truncated.then_some(cut),
    })
}
