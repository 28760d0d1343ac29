//! What a sandbox's branch changed, for a person to read.

use git2::{Delta, Diff, DiffFindOptions, DiffOptions, ErrorCode, Oid, Patch, Sort};

use super::error::{GitError, git};
use super::home::Home;
use super::steering::{Steering, steering};
use crate::name::Slug;

/// Larger files are shown as binary.
const LARGEST_SHOWN: i64 = 8 * 1024 * 1024;
/// Beyond this many files on both sides renames are shown as delete and add.
const RENAME_LIMIT: usize = 400;

/// The difference between where the branch left the operator's and where it is.
#[derive(Clone, Debug)]
pub struct Changes {
    /// The commit both sides share.
    pub base: Oid,
    /// The branch's tip.
    pub tip: Oid,
    /// Each file.
    pub files: Vec<FileChange>,
    /// The patch, as `git apply` reads it; names are quoted, contents are as they are.
    pub patch: Vec<u8>,
    /// Whether the patch was cut at the size asked for, after a whole file.
    pub cut: bool,
}

/// How one file changed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FileChange {
    /// The path now, or the path it had where it was deleted.
    pub path: Vec<u8>,
    /// The path before, where it was renamed.
    pub renamed_from: Option<Vec<u8>>,
    /// What happened.
    pub kind: ChangeKind,
    /// Whether the executable bit, or the kind of file, changed.
    pub mode_changed: bool,
    /// Lines added.
    pub added: usize,
    /// Lines removed.
    pub removed: usize,
    /// Whether it cannot be shown as lines.
    pub binary: bool,
}

/// What happened to a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ChangeKind {
    /// It is new.
    Added,
    /// It is gone.
    Deleted,
    /// Its content or mode changed.
    Modified,
    /// It has another path.
    Renamed,
}

/// A commit of a sandbox's branch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LogEntry {
    /// The commit.
    pub id: Oid,
    /// What it follows.
    pub parents: Vec<Oid>,
    /// Who wrote it, as it says.
    pub author: String,
    /// When, in seconds since the epoch.
    pub time: i64,
    /// The first line of its message, without control characters.
    pub subject: String,
}

impl Changes {
    /// The changed paths that would run or steer tools; a rename counts on both ends.
    pub fn steering(&self) -> Vec<Steering> {
        let paths = self.files.iter().flat_map(|file| {
            [Some(file.path.as_slice()), file.renamed_from.as_deref()]
                .into_iter()
                .flatten()
        });
        steering(paths)
    }
}

impl Home {
    /// What the sandbox's branch changed since it left the operator's, with a patch of at
    /// most about `most` bytes.
    pub fn diff(&self, slug: &Slug, most: usize) -> Result<Changes, GitError> {
        let failed = || git(format!("compare '{}'", slug.branch()));
        let tip = self.tip(slug)?;
        let base = self.base(slug, tip)?;
        let repo = self.repo();
        let tree = |id| repo.find_commit(id).and_then(|commit| commit.tree());
        let (old, new) = (tree(base).map_err(failed())?, tree(tip).map_err(failed())?);
        let mut options = DiffOptions::new();
        options
            .show_binary(true)
            .max_size(LARGEST_SHOWN)
            .include_typechange(true);
        let mut diff = repo
            .diff_tree_to_tree(Some(&old), Some(&new), Some(&mut options))
            .map_err(failed())?;
        let mut similar = DiffFindOptions::new();
        similar.renames(true).rename_limit(RENAME_LIMIT);
        diff.find_similar(Some(&mut similar)).map_err(failed())?;
        let mut changes = Changes {
            base,
            tip,
            files: Vec::new(),
            patch: Vec::new(),
            cut: false,
        };
        for number in 0..diff.deltas().len() {
            read_file(&diff, number, most, &mut changes).map_err(failed())?;
        }
        Ok(changes)
    }

    /// The branch's commits that the operator's branch does not have, newest first.
    pub fn log(&self, slug: &Slug, most: usize) -> Result<Vec<LogEntry>, GitError> {
        let failed = || git(format!("list the commits of '{}'", slug.branch()));
        let tip = self.tip(slug)?;
        let repo = self.repo();
        let mut walk = repo.revwalk().map_err(failed())?;
        walk.set_sorting(Sort::TOPOLOGICAL | Sort::TIME)
            .map_err(failed())?;
        walk.push(tip).map_err(failed())?;
        walk.hide(self.head()?.commit).map_err(failed())?;
        let mut entries = Vec::new();
        for id in walk.take(most) {
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
                author: plain(author.name_bytes()),
                time: commit.time().seconds(),
                subject: plain(first),
            });
        }
        Ok(entries)
    }

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

/// Text that an agent wrote, as one line that cannot move a cursor or turn the page round.
fn plain(bytes: &[u8]) -> String {
    let turns = |c: char| matches!(c, '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}');
    let text = String::from_utf8_lossy(bytes);
    text.chars()
        .map(|c| {
            if c.is_control() || turns(c) {
                '\u{fffd}'
            } else {
                c
            }
        })
        .take(500)
        .collect()
}

fn read_file(
    diff: &Diff<'_>,
    number: usize,
    most: usize,
    changes: &mut Changes,
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
    let mut file = FileChange {
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
        if !changes.cut {
            let text = patch.to_buf()?;
            if changes.patch.len().saturating_add(text.len()) > most {
                changes.cut = true;
            } else {
                changes.patch.extend_from_slice(&text);
            }
        }
    }
    changes.files.push(file);
    Ok(())
}
