//! grep: searches lines that match a regular expression.

mod listing;

use std::fs::File;
use std::io::{self, Read};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use grep_regex::{RegexMatcher, RegexMatcherBuilder};
use grep_searcher::{
    BinaryDetection, MmapChoice, Searcher, SearcherBuilder, Sink, SinkContext, SinkContextKind,
    SinkMatch,
};
use ignore::overrides::{Override, OverrideBuilder};
use nix::fcntl::OFlag;
use nix::sys::stat::{SFlag, fstat};

use super::Cancelled;
use super::walk::{FoundFile, Walk, WalkControl};
use crate::error::ToolError;
use crate::request::{GrepRequest, GrepResult};
use crate::root::{WorkspaceRoot, kind, open_name};
use listing::Listing;

/// Default maximum number of matches.
const DEFAULT_LIMIT: u64 = 100;

/// Maximum number of context lines before and after a match.
const MAX_CONTEXT: u64 = 1000;

/// Maximum length of a line in bytes, which each thread buffers. The search of a file stops at a
/// longer line.
const MAX_LINE: usize = 16 << 20;

pub(super) fn grep(
    root: &WorkspaceRoot,
    request: &GrepRequest,
    cancelled: &Cancelled,
) -> Result<GrepResult, ToolError> {
    let matcher = matcher(request)?;
    let context = request.context.unwrap_or(0).min(MAX_CONTEXT);
    let context = usize::try_from(context).unwrap_or(0);
    let limit = request.limit.unwrap_or(DEFAULT_LIMIT);
    let search = Search {
        matcher,
        context,
        limit,
        cancelled,
        count: AtomicU64::new(0),
        limit_reached: AtomicBool::new(false),
        listing: Mutex::default(),
    };
    let requested = request.path.as_deref().unwrap_or(".");
    match root.walk_start(requested) {
        Ok((base, top)) => {
            let walk = Walk {
                base: &base,
                top: &top,
                overrides: overrides(request.glob.as_deref())?,
                cancelled,
            };
            walk.run(|| {
                let mut searcher = search.searcher();
                let (search, top) = (&search, &top);
                move |found: FoundFile<'_>| {
                    if !found.is_file {
                        return WalkControl::Continue;
                    }
                    if let Some(file) = open(&found) {
                        let path = found.path.strip_prefix(top).unwrap_or(found.path);
                        search.search_file(&mut searcher, file, path);
                    }
                    search.walk_control()
                }
            });
        }
        Err(ToolError::NotADirectory(_)) => {
            let (file, _) = root.read(requested)?;
            let path = root.locate(requested)?;
            let wanted = overrides(request.glob.as_deref())?;
            if !wanted.matched(&path, false).is_ignore() {
                let shown = path.strip_prefix(root.path()).unwrap_or(&path);
                search.search_file(&mut search.searcher(), file, shown);
            }
        }
        Err(other) => return Err(other),
    }
    let limit = (search.count.load(Ordering::Relaxed) >= limit).then_some(limit);
    let listing = search.listing.into_inner();
    Ok(listing
        .unwrap_or_else(PoisonError::into_inner)
        .result(limit))
}

fn matcher(request: &GrepRequest) -> Result<RegexMatcher, ToolError> {
    let mut builder = RegexMatcherBuilder::new();
    builder
        .case_insensitive(request.ignore_case)
        .fixed_strings(request.literal)
        .multi_line(true)
        .line_terminator(Some(b'\n'));
    builder
        .build(&request.pattern)
        .map_err(|error| ToolError::InvalidPattern {
            what: "pattern",
            why: error.to_string(),
        })
}

fn overrides(glob: Option<&str>) -> Result<Override, ToolError> {
    let Some(glob) = glob else {
        return Ok(Override::empty());
    };
    let invalid = |error: ignore::Error| ToolError::InvalidPattern {
        what: "glob",
        why: error.to_string(),
    };
    let mut builder = OverrideBuilder::new("");
    builder.add(glob).map_err(invalid)?;
    builder.build().map_err(invalid)
}

/// Opens a listed file, if it is still a regular file.
fn open(found: &FoundFile<'_>) -> Option<File> {
    let file = open_name(found.directory, found.name, OFlag::O_RDONLY).ok()?;
    let data = fstat(&file).ok()?;
    (kind(&data) == SFlag::S_IFREG).then(|| File::from(file))
}

/// The search state that all threads share.
struct Search<'a> {
    matcher: RegexMatcher,
    context: usize,
    limit: u64,
    cancelled: &'a Cancelled,
    /// Number of matches so far; each thread may count one match beyond the limit.
    count: AtomicU64,
    /// Set when the limit is reached.
    limit_reached: AtomicBool,
    listing: Mutex<Listing>,
}

impl Search<'_> {
    fn searcher(&self) -> Searcher {
        SearcherBuilder::new()
            .line_number(true)
            .before_context(self.context)
            .after_context(self.context)
            .binary_detection(BinaryDetection::quit(0))
            .heap_limit(Some(MAX_LINE))
            // Truncating a mapped file would kill the process with SIGBUS.
            .memory_map(MmapChoice::never())
            .build()
    }

    /// Searches one file and adds its matches to the listing.
    fn search_file(&self, searcher: &mut Searcher, file: File, path: &Path) {
        let mut lines = FileSink {
            search: self,
            path,
            shown: None,
            block: listing::Block::default(),
            before: Vec::new(),
        };
        let file = CancellableFile {
            file,
            cancelled: self.cancelled,
        };
        // After a read error the matches so far are shown.
        let _ = searcher.search_reader(&self.matcher, file, &mut lines);
        let FileSink { block, .. } = lines;
        if !block.is_empty() {
            self.listing
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .add(path.to_owned(), block);
        }
    }

    fn walk_control(&self) -> WalkControl {
        if self.limit_reached.load(Ordering::Relaxed) {
            WalkControl::Stop
        } else {
            WalkControl::Continue
        }
    }
}

/// A file that appears to end when the call is cancelled.
struct CancellableFile<'a> {
    file: File,
    cancelled: &'a Cancelled,
}

impl Read for CancellableFile<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        if self.cancelled.is_cancelled() {
            return Ok(0);
        }
        self.file.read(buffer)
    }
}

/// Collects the matching lines of one file.
struct FileSink<'a> {
    search: &'a Search<'a>,
    path: &'a Path,
    /// The displayed path, once it is needed.
    shown: Option<String>,
    block: listing::Block,
    /// Context lines that are shown only if a match follows.
    before: Vec<(u64, Vec<u8>)>,
}

impl FileSink<'_> {
    fn push(&mut self, sign: char, number: u64, line: &[u8]) {
        let path = self
            .shown
            .get_or_insert_with(|| self.path.to_string_lossy().into_owned());
        self.block.push(path, sign, number, line);
    }
}

impl Sink for FileSink<'_> {
    type Error = SearchStopped;

    fn matched(&mut self, _: &Searcher, found: &SinkMatch<'_>) -> Result<bool, SearchStopped> {
        let index = self.search.count.fetch_add(1, Ordering::Relaxed);
        if index >= self.search.limit {
            self.search.limit_reached.store(true, Ordering::Relaxed);
            return Ok(false);
        }
        if index + 1 == self.search.limit {
            // Other threads do not start another file.
            self.search.limit_reached.store(true, Ordering::Relaxed);
        }
        for (number, line) in std::mem::take(&mut self.before) {
            self.push('-', number, &line);
        }
        self.push(':', found.line_number().unwrap_or(0), found.bytes());
        Ok(true)
    }

    fn context(&mut self, _: &Searcher, found: &SinkContext<'_>) -> Result<bool, SearchStopped> {
        let number = found.line_number().unwrap_or(0);
        if *found.kind() == SinkContextKind::Before {
            let line = found.bytes();
            let most = line.len().min(listing::MAX_LINE_BYTES);
            let line = line.get(..most).unwrap_or_default().to_vec();
            self.before.push((number, line));
            return Ok(true);
        }
        self.push('-', number, found.bytes());
        Ok(true)
    }
}

/// The error type of the sink, which carries no cause.
#[derive(Debug, thiserror::Error)]
#[error("the search ended early")]
struct SearchStopped;

impl grep_searcher::SinkError for SearchStopped {
    fn error_message<T: std::fmt::Display>(_: T) -> Self {
        Self
    }
}
