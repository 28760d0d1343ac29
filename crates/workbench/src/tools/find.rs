//! find: lists files that match a glob.

use std::sync::{Mutex, PoisonError};

use globset::GlobBuilder;
use ignore::overrides::Override;

use super::Cancelled;
use super::walk::{FoundFile, Walk, WalkControl};
use crate::error::ToolError;
use crate::request::{FindRequest, FindResult};
use crate::root::WorkspaceRoot;
use crate::truncation::{Bounds, TextHead, as_u64};

/// Default maximum number of files.
const DEFAULT_LIMIT: u64 = 1000;

/// Maximum number of collected files for any request: only 50 KB of paths are shown.
const MAX_FILES: u64 = 100_000;

pub(super) fn find(
    root: &WorkspaceRoot,
    request: &FindRequest,
    cancelled: &Cancelled,
) -> Result<FindResult, ToolError> {
    let limit = request.limit.unwrap_or(DEFAULT_LIMIT);
    let requested = request.path.as_deref().unwrap_or(".");
    let pattern = request.pattern.trim_start_matches("./");
    let pattern = pattern.trim_start_matches('/');
    let glob = GlobBuilder::new(pattern)
        .literal_separator(true)
        .build()
        .map_err(|error| ToolError::InvalidPattern {
            what: "pattern",
            why: error.kind().to_string(),
        })?
        .compile_matcher();
    let by_path = pattern.contains('/');
    let (base, top) = root.walk_start(requested)?;
    let found: Mutex<Vec<String>> = Mutex::default();
    // One file more than the limit shows that there are more.
    let most = limit.min(MAX_FILES) + 1;
    let walk = Walk {
        base: &base,
        top: &top,
        overrides: Override::empty(),
        cancelled,
    };
    walk.run(|| {
        |file: FoundFile<'_>| {
            let path = file.path.strip_prefix(&top).unwrap_or(file.path);
            let matches = if by_path {
                glob.is_match(path)
            } else {
                glob.is_match(file.name)
            };
            if !matches {
                return WalkControl::Continue;
            }
            let mut found = found.lock().unwrap_or_else(PoisonError::into_inner);
            if as_u64(found.len()) >= most {
                return WalkControl::Stop;
            }
            found.push(path.to_string_lossy().into_owned());
            WalkControl::Continue
        }
    });
    let mut found = found.into_inner().unwrap_or_else(PoisonError::into_inner);
    found.sort_unstable();
    Ok(truncate(&found, limit))
}

/// The result with at most `limit` of the found files.
fn truncate(found: &[String], limit: u64) -> FindResult {
    let none = FindResult {
        files: Vec::new(),
        truncated: false,
        limit,
        truncation: None,
    };
    if found.is_empty() {
        return none;
    }
    let cut = TextHead::whole(found.join("\n")).head(Bounds {
        lines: limit,
        ..Bounds::default()
    });
    let count = usize::try_from(cut.output_lines).unwrap_or(usize::MAX);
    FindResult {
        files: found.iter().take(count).cloned().collect(),
        truncated: cut.truncated,
        truncation: cut.truncated.then_some(cut),
        ..none
    }
}
