//! Diff and log of a sandbox's branch.

use git2::{Delta, Diff, DiffFindOptions, DiffOptions, ErrorCode, Oid, Patch, Sort};

use super::error::{GitError, git};
use super::host_repository::HostRepository;
use super::sensitive_paths::{SensitivePath, sensitive_paths};
use crate::name::Slug;

/// Maximum size of a file whose lines are shown; larger files are shown as binary.
const MAX_SHOWN_BYTES: i64 = 8 * 1024 * 1024;
/// Maximum number of files that are compared to find renames; with more files, a rename is shown as
/// a deletion and an addition.
const MAX_RENAMES: usize = 400;

/// The changes of a sandbox's branch since it branched off the operator's branch.
#[derive(Clone, Debug)]
pub struct BranchDiff {
    /// The merge base.
    pub base: Oid,
    /// The branch's tip.
    pub tip: Oid,
    /// The changed files.
    pub files: Vec<FileDiff>,
    /// The patch, in the format of `git apply`; names are quoted, contents are raw.
    pub patch: Vec<u8>,
    /// Whether the patch was truncated at the requested size, after a whole file.
    pub truncated: bool,
}

/// The change of one file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FileDiff {
    /// The current path, or the former path of a deleted file.
    pub path: Vec<u8>,
    /// The former path of a renamed file.
    pub renamed_from: Option<Vec<u8>>,
    /// The kind of change.
    pub kind: ChangeKind,
    /// Whether the executable bit, or the kind of file, changed.
    pub mode_changed: bool,
    /// Lines added.
    pub added: usize,
    /// Lines removed.
    pub removed: usize,
    /// Whether the content is binary.
    pub binary: bool,
}

/// The kind of a file's change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ChangeKind {
    /// The file is new.
    Added,
    /// The file was deleted.
    Deleted,
    /// The content or the mode changed.
    Modified,
    /// The path changed.
    Renamed,
}

/// A commit of a sandbox's branch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LogEntry {
    /// The commit.
    pub id: Oid,
    /// The parent commits.
    pub parents: Vec<Oid>,
    /// The author's name in the commit.
    pub author: String,
    /// The time of the commit in seconds since the epoch.
    pub time: i64,
    /// The first line of the commit message, without control characters.
    pub subject: String,
}

impl BranchDiff {
    /// Returns the changed paths that run programs or configure tools; a rename counts with both
    /// paths.
    pub fn sensitive_paths(&self) -> Vec<SensitivePath> {
        let paths = self.files.iter().flat_map(|file| {
            [Some(file.path.as_slice()), file.renamed_from.as_deref()]
                .into_iter()
                .flatten()
        });
        sensitive_paths(paths)
    }
}

impl HostRepository {
    /// Compares the sandbox's branch with the merge base of it and the operator's HEAD, with a
    /// patch of at max_patch_bytes about `max_patch_bytes` bytes.
    pub fn diff(&self, slug: &Slug, max_patch_bytes: usize) -> Result<BranchDiff, GitError> {
        let failed = || git(format!("compare '{}'", slug.branch()));
        let tip = self.tip(slug)?;
        let base = self.base(slug, tip)?;
        let repo = self.repo();
        let tree = |id| repo.find_commit(id).and_then(|commit| commit.tree());
        let (old, new) = (tree(base).map_err(failed())?, tree(tip).map_err(failed())?);
        let mut options = DiffOptions::new();
        options
            .show_binary(true)
            .max_size(MAX_SHOWN_BYTES)
            .include_typechange(true);
        let mut diff = repo
            .diff_tree_to_tree(Some(&old), Some(&new), Some(&mut options))
            .map_err(failed())?;
        let mut similar = DiffFindOptions::new();
        similar.renames(true).rename_limit(MAX_RENAMES);
        diff.find_similar(Some(&mut similar)).map_err(failed())?;
        let mut changes = BranchDiff {
            base,
            tip,
            files: Vec::new(),
            patch: Vec::new(),
            truncated: false,
        };
        for number in 0..diff.deltas().len() {
            add_file_diff(&diff, number, max_patch_bytes, &mut changes).map_err(failed())?;
        }
        Ok(changes)
    }

    /// Lists the commits of the branch that the operator's branch does not have, newest first.
    pub fn log(&self, slug: &Slug, max_commits: usize) -> Result<Vec<LogEntry>, GitError> {
        let failed = || git(format!("list the commits of '{}'", slug.branch()));
        let tip = self.tip(slug)?;
        let repo = self.repo();
        let mut walk = repo.revwalk().map_err(failed())?;
        walk.set_sorting(Sort::TOPOLOGICAL | Sort::TIME)
            .map_err(failed())?;
        walk.push(tip).map_err(failed())?;
        walk.hide(self.head()?.commit).map_err(failed())?;
        let mut entries = Vec::new();
        for id in walk.take(max_commits) {
            let commit = id.and_then(|id| repo.find_commit(id)).map_err(failed())?;
            let first = commit
                .message_bytes()
                .split(|b| *b == b'\n')
                .next()
                .unwrap_or_default();
            let author = commit.author();
            entries.push(LogEntry {
                id: commit.id(),
                parents: commit.parent_ids().collect(),
                author: sanitise_line(author.name_bytes()),
                time: commit.time().seconds(),
                subject: sanitise_line(first),
            });
        }
        Ok(entries)
    }

    /// Returns the merge base of the operator's HEAD and `tip`.
    pub(super) fn base(&self, slug: &Slug, tip: Oid) -> Result<Oid, GitError> {
        let head = self.head()?.commit;
        match self.repo().merge_base(head, tip) {
            Ok(base) => Ok(base),
            Err(error) if error.code() == ErrorCode::NotFound => {
                Err(GitError::Unrelated(slug.branch()))
            }
            Err(error) => Err(git("find the shared history")(error)),
        }
    }
}

/// Sanitises text of an agent to one line without control characters or bidirectional overrides.
fn sanitise_line(bytes: &[u8]) -> String {
    let is_bidi = |c: char| matches!(c, '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}');
    let text = String::from_utf8_lossy(bytes);
    text.chars()
        .map(|c| {
            if c.is_control() || is_bidi(c) {
                '\u{fffd}'
            } else {
                c
            }
        })
        .take(500)
        .collect()
}

fn add_file_diff(
    diff: &Diff<'_>,
    number: usize,
    max_patch_bytes: usize,
    changes: &mut BranchDiff,
) -> Result<(), git2::Error> {
    let Some(delta) = diff.get_delta(number) else {
        return Ok(());
    };
    let (old, new) = (delta.old_file(), delta.new_file());
    let path = |bytes: Option<&[u8]>| bytes.unwrap_or_default().to_vec();
    let kind = match delta.status() {
        Delta::Added | Delta::Copied | Delta::Untracked => ChangeKind::Added,
        Delta::Deleted => ChangeKind::Deleted,
        Delta::Renamed => ChangeKind::Renamed,
        _ => ChangeKind::Modified,
    };
    let mut file = FileDiff {
        path: path(if kind == ChangeKind::Deleted {
            old.path_bytes()
        } else {
            new.path_bytes()
        }),
        renamed_from: (kind == ChangeKind::Renamed).then(|| path(old.path_bytes())),
        kind,
        mode_changed: !matches!(kind, ChangeKind::Added | ChangeKind::Deleted)
            && old.mode() != new.mode(),
        added: 0,
        removed: 0,
        binary: false,
    };
    if let Some(mut patch) = Patch::from_diff(diff, number)? {
        let (_, added, removed) = patch.line_stats()?;
        (file.added, file.removed) = (added, removed);
        file.binary = patch.delta().flags().is_binary();
        if !changes.truncated {
            let text = patch.to_buf()?;
            if changes.patch.len().saturating_add(text.len()) > max_patch_bytes {
                changes.truncated = true;
            } else {
                changes.patch.extend_from_slice(&text);
            }
        }
    }
    changes.files.push(file);
    Ok(())
}
