//! Commits a workspace to the sandbox's branch in the operator's repository.
//!
//! The entries are untrusted and checked here: forbidden paths are refused, entries that git cannot
//! store are skipped and reported, and every quantity is bounded. The operator's HEAD, index and
//! worktree are not touched; a failed snapshot changes nothing.

use std::io::Read;

use git2::{ObjectType, Oid, Repository};
use serde::{Deserialize, Serialize};

use super::error::{GitError, git, io};
use super::host_repository::HostRepository;
use super::manifest::{FileStamp, FileTime, Manifest};
use super::names::{check_path, is_dot_gitmodules};
use super::quarantine::Quarantine;
use super::tree::{self, EXECUTABLE, FILE, LINK, Leaf};
use crate::beneath;
use crate::name::Slug;

const MAX_LINK_BYTES: usize = 4096;
const MAX_MESSAGE_BYTES: usize = 4096;

/// Limits on a snapshot or an import.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SnapshotBounds {
    /// Maximum bytes of one file.
    pub file: u64,
    /// Maximum bytes of all changed files of one snapshot, or of an imported pack.
    pub total: u64,
    /// Maximum number of files and directories, including ignored ones that must be examined.
    pub entries: u64,
    /// Maximum depth of directories.
    pub depth: usize,
}

impl Default for SnapshotBounds {
    fn default() -> Self {
        Self {
            file: 64 * 1024 * 1024,
            total: 512 * 1024 * 1024,
            entries: 500_000,
            depth: 128,
        }
    }
}

/// Yields the entries of a snapshot. An entry is valid until the next call.
pub trait SnapshotSource {
    /// Returns the time at which the source started reading.
    fn start_time(&self) -> FileTime;

    /// Returns the next entry; `None` at the end.
    fn next(&mut self) -> Result<Option<SnapshotEntry<'_>>, GitError>;
}

/// One path of a workspace.
pub struct SnapshotEntry<'a> {
    /// The path from the workspace's root, with `/` between names.
    pub path: &'a [u8],
    /// The content at the path.
    pub content: EntryContent<'a>,
    /// The stat data for comparison by a later snapshot; the blob id is set here.
    pub stamp: Option<FileStamp>,
}

/// The content at a path.
pub enum EntryContent<'a> {
    /// The file is the same as in the manifest. An unchanged entry can only refer to a path of the
    /// manifest, and to no other object.
    Unchanged,
    /// A file.
    File {
        /// Whether the file's owner may execute it.
        executable: bool,
        /// The size of the file when it was opened.
        size: u64,
        /// The content of the file.
        body: &'a mut dyn Read,
    },
    /// A link's text.
    Link(&'a [u8]),
    /// An entry that the snapshot does not store.
    Skipped(SkipReason),
}

/// Why a snapshot skips an entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SkipReason {
    /// A named pipe.
    Fifo,
    /// A Unix socket.
    Socket,
    /// A device.
    Device,
    /// The `.git` of a repository inside the workspace; the other files of that repository are
    /// stored as files.
    Repository,
    /// A file that may not be read.
    Unreadable,
    /// A file over [`SnapshotBounds::file`].
    TooLarge,
    /// A file that exceeds [`SnapshotBounds::total`] together with the others; the next snapshot
    /// continues.
    NoRoom,
}

impl SkipReason {
    /// A short description of the reason.
    pub fn why(self) -> &'static str {
        match self {
            Self::Fifo => "a named pipe",
            Self::Socket => "a socket",
            Self::Device => "a device",
            Self::Repository => "the '.git' of a repository inside the workspace",
            Self::Unreadable => "permission to read it is denied",
            Self::TooLarge => "it is larger than sandbox.snapshot.file allows",
            Self::NoRoom => {
                "the changed files are together larger than sandbox.snapshot.total allows; \
                 another snapshot takes more of them"
            }
        }
    }

    /// Whether the entry may contain the agent's work, which then exists in the workspace only.
    pub fn is_work(self) -> bool {
        match self {
            Self::Fifo | Self::Socket | Self::Device => false,
            Self::Repository | Self::Unreadable | Self::TooLarge | Self::NoRoom => true,
        }
    }
}

/// The metadata of a snapshot's commit.
#[derive(Clone, Debug)]
pub struct CommitRequest<'a> {
    /// The sandbox.
    pub slug: &'a Slug,
    /// The commit message, such as `bash: cargo test`.
    pub message: &'a str,
    /// The agent's own head, after [`HostRepository::import`].
    pub agent_head: Option<Oid>,
    /// The limits.
    pub bounds: &'a SnapshotBounds,
}

/// The result of a snapshot.
#[derive(Clone, Debug)]
pub struct SnapshotOutcome {
    /// The branch's commit now.
    pub tip: Oid,
    /// Whether the branch moved.
    pub moved: bool,
    /// The number of files that were read.
    pub read: u64,
    /// The skipped paths and the reasons; the first thousand, with paths that may be work first.
    pub skipped: Vec<(Vec<u8>, SkipReason)>,
    /// The number of skipped paths.
    pub left_out: u64,
    /// The number of skipped paths that may be work.
    pub unsaved: u64,
    /// The manifest for the next snapshot.
    pub manifest: Manifest,
}

/// Maximum number of skipped paths that are recorded; more are only counted.
const MAX_SKIPPED: usize = 1000;

impl HostRepository {
    /// Commits the entries of `source` to the sandbox's branch. `known` is the manifest of the
    /// workspace's creation or of its last snapshot.
    pub fn snapshot(
        &self,
        request: &CommitRequest<'_>,
        known: &Manifest,
        source: &mut dyn SnapshotSource,
    ) -> Result<SnapshotOutcome, GitError> {
        self.snapshot_into(Quarantine::open(self)?, request, known, source)
    }

    /// As [`HostRepository::snapshot`], with a quarantine that may hold objects already: they are
    /// published with the snapshot or not at all.
    pub(crate) fn snapshot_into(
        &self,
        quarantine: Quarantine,
        request: &CommitRequest<'_>,
        known: &Manifest,
        source: &mut dyn SnapshotSource,
    ) -> Result<SnapshotOutcome, GitError> {
        let tip = self.tip(request.slug)?;
        let mut collector = TreeCollector {
            quarantine: &quarantine,
            known,
            bounds: request.bounds,
            rows: Vec::with_capacity(known.entries.len()),
            skipped: Vec::new(),
            left_out: 0,
            unsaved: 0,
            seen: 0,
            read: 0,
            bytes: 0,
        };
        while let Some(entry) = source.next()? {
            collector.add_entry(entry)?;
        }
        let TreeCollector {
            mut rows,
            mut skipped,
            left_out,
            unsaved,
            read,
            ..
        } = collector;
        skipped.sort_by_key(|(_, reason)| !reason.is_work());
        let repo = quarantine.repo();
        let odb = repo.odb().map_err(git("open the objects"))?;
        // Sorting once is much cheaper than keeping a map in order.
        rows.sort_unstable_by(|a, b| a.path.cmp(&b.path));
        if let Some([row, _]) = rows.array_windows().find(|[a, b]| a.path == b.path) {
            return Err(GitError::Forbidden {
                path: row.path.clone(),
                why: "the path occurs twice",
            });
        }
        let leaves: Vec<_> = rows
            .iter()
            .map(|row| (row.path.as_slice(), row.leaf))
            .collect();
        let tree = tree::write(&odb, &leaves)?;
        let next = self.commit(repo, tip, tree, request)?;
        // Objects are published before the branch moves.
        drop(odb);
        if next != tip {
            quarantine.publish()?;
            self.move_branch(request.slug, tip, next, "palisade: snapshot")?;
        }
        let stamped = rows
            .into_iter()
            .filter_map(|row| Some((row.path, row.stamp?)));
        let manifest = Manifest {
            taken: source.start_time(),
            entries: stamped.collect(),
        };
        Ok(SnapshotOutcome {
            tip: next,
            moved: next != tip,
            read,
            skipped,
            left_out,
            unsaved,
            manifest,
        })
    }

    /// Builds a manifest of the sandbox's branch without valid stat data: every file is read again,
    /// and submodules are kept.
    pub(crate) fn manifest_of(&self, slug: &Slug) -> Result<Manifest, GitError> {
        let tip = self.tip(slug)?;
        let commit = self.repo().find_commit(tip);
        let commit = commit.map_err(git(format!("find commit {tip}")))?;
        let odb = self.repo().odb().map_err(git("open the objects"))?;
        let paths = tree::flatten(&odb, commit.tree_id())?;
        let blank = |leaf: Leaf| FileStamp {
            mode: leaf.mode,
            size: 0,
            mtime: (0, 0),
            ctime: (0, 0),
            ino: 0,
            id: leaf.id,
        };
        Ok(Manifest {
            taken: (0, 0),
            entries: paths
                .into_iter()
                .map(|(path, leaf)| (path, blank(leaf)))
                .collect(),
        })
    }

    /// Commits the tree with the right parents, or returns the only parent if the tree is
    /// unchanged.
    fn commit(
        &self,
        repo: &Repository,
        tip: Oid,
        tree: Oid,
        request: &CommitRequest<'_>,
    ) -> Result<Oid, GitError> {
        let parents = parents(repo, tip, request.agent_head)?;
        let commits = parents
            .iter()
            .map(|id| {
                repo.find_commit(*id)
                    .map_err(git(format!("find commit {id}")))
            })
            .collect::<Result<Vec<_>, _>>()?;
        if let [only] = commits.as_slice()
            && only.tree_id() == tree
        {
            return Ok(only.id());
        }
        let tree = repo.find_tree(tree).map_err(git("find the new tree"))?;
        let author = self.signature()?;
        let parents: Vec<_> = commits.iter().collect();
        repo.commit(
            None,
            &author,
            &author,
            &clean_message(request.message),
            &tree,
            &parents,
        )
        .map_err(git("write a commit"))
    }
}

/// Chooses the parents: the agent's head if it descends from the tip, the tip if the agent's head
/// is behind, otherwise both.
fn parents(repo: &Repository, tip: Oid, agent: Option<Oid>) -> Result<Vec<Oid>, GitError> {
    let follows = |a, b| {
        repo.graph_descendant_of(a, b)
            .map_err(git("compare the agent's commits with the branch"))
    };
    match agent {
        None => Ok(vec![tip]),
        Some(agent) if agent == tip || follows(tip, agent)? => Ok(vec![tip]),
        Some(agent) if follows(agent, tip)? => Ok(vec![agent]),
        Some(agent) => Ok(vec![tip, agent]),
    }
}

/// Removes control characters, which could forge lines of a terminal or a log.
fn clean_message(message: &str) -> String {
    let mut text: String = message
        .chars()
        .map(|c| if c.is_control() && c != '\n' { ' ' } else { c })
        .collect();
    let end = text.floor_char_boundary(MAX_MESSAGE_BYTES);
    text.truncate(end);
    let text = text.trim();
    if text.is_empty() {
        "snapshot\n".to_owned()
    } else {
        format!("{text}\n")
    }
}

/// A path of the new tree.
struct TreeRow {
    path: Vec<u8>,
    leaf: Leaf,
    stamp: Option<FileStamp>,
}

/// Collects the entries of a snapshot.
struct TreeCollector<'a> {
    quarantine: &'a Quarantine,
    known: &'a Manifest,
    bounds: &'a SnapshotBounds,
    rows: Vec<TreeRow>,
    skipped: Vec<(Vec<u8>, SkipReason)>,
    left_out: u64,
    unsaved: u64,
    seen: u64,
    read: u64,
    bytes: u64,
}

impl TreeCollector<'_> {
    fn add_entry(&mut self, entry: SnapshotEntry<'_>) -> Result<(), GitError> {
        let SnapshotEntry {
            path,
            content,
            stamp,
        } = entry;
        self.seen += 1;
        if self.seen > self.bounds.entries {
            return Err(too_much("the number of files", self.bounds.entries, path));
        }
        if let EntryContent::Skipped(reason) = content {
            if reason == SkipReason::Unreadable {
                self.keep_previous_version(path, reason);
            } else {
                self.record_skipped(path, reason);
            }
            return Ok(());
        }
        // The manifest's paths were checked when they were recorded.
        if !matches!(content, EntryContent::Unchanged) {
            check_path(path)?;
        }
        let (leaf, stamp) = match content {
            EntryContent::Skipped(_) => return Ok(()),
            EntryContent::Unchanged => {
                let known = self.known.entries.get(path).ok_or(GitError::Forbidden {
                    path: path.to_vec(),
                    why: "the path is marked unchanged and is not in the manifest",
                })?;
                (
                    Leaf {
                        mode: known.mode,
                        id: known.id,
                    },
                    Some(*known),
                )
            }
            EntryContent::File {
                executable,
                size,
                body,
            } => {
                let mode = if executable { EXECUTABLE } else { FILE };
                let (id, stable) = match self.store_file(path, size, body)? {
                    Ok(stored) => stored,
                    Err(reason) => {
                        self.keep_previous_version(path, reason);
                        return Ok(());
                    }
                };
                // A file that changed while it was read is stored with the bytes that were read.
                // Its stamp matches no file, so the next snapshot reads the file again.
                let unstable = |stamp| FileStamp {
                    ino: 0,
                    ctime: (0, 0),
                    ..stamp
                };
                (
                    Leaf { mode, id },
                    if stable { stamp } else { stamp.map(unstable) },
                )
            }
            EntryContent::Link(text) => {
                let id = self.store_link(path, text)?;
                (Leaf { mode: LINK, id }, stamp)
            }
        };
        let stamp = stamp.map(|stamp| FileStamp {
            mode: leaf.mode,
            id: leaf.id,
            ..stamp
        });
        self.rows.push(TreeRow {
            path: path.to_vec(),
            leaf,
            stamp,
        });
        Ok(())
    }

    fn record_skipped(&mut self, path: &[u8], reason: SkipReason) {
        self.left_out += 1;
        self.unsaved += u64::from(reason.is_work());
        // Half of the list is reserved for paths that may be work, so that many FIFOs cannot fill
        // it.
        let limit = if reason.is_work() {
            MAX_SKIPPED
        } else {
            MAX_SKIPPED / 2
        };
        if self.skipped.len() < limit {
            self.skipped.push((path.to_vec(), reason));
        }
    }

    /// Skips the current content of a file or an unreadable directory. The version on the branch,
    /// if there is one, is kept: the file was not deleted.
    fn keep_previous_version(&mut self, path: &[u8], reason: SkipReason) {
        self.record_skipped(path, reason);
        let itself = self.known.entries.get_key_value(path);
        for (path, known) in itself.into_iter().chain(self.known.below(path)) {
            self.rows.push(TreeRow {
                path: path.clone(),
                leaf: Leaf {
                    mode: known.mode,
                    id: known.id,
                },
                stamp: Some(*known),
            });
        }
    }

    /// Reads and stores a file. Returns its blob and whether its size was stable, or the reason to
    /// skip it.
    fn store_file(
        &mut self,
        path: &[u8],
        size: u64,
        body: &mut dyn Read,
    ) -> Result<Result<(Oid, bool), SkipReason>, GitError> {
        let bound = self.bounds.file;
        if size > bound {
            return Ok(Err(SkipReason::TooLarge));
        }
        // A file of the former size is read, because unchanged content does not count towards the
        // limit. An inode of 0 means that the former size is unknown.
        let known = self.known.entries.get(path);
        let known = known.filter(|known| known.size == size || known.ino == 0);
        if known.is_none() && size > self.remaining_bytes() {
            return Ok(Err(SkipReason::NoRoom));
        }
        self.read += 1;
        let mut bytes = Vec::new();
        bytes
            .try_reserve_exact(usize::try_from(size).unwrap_or(usize::MAX))
            .map_err(|_| {
                io("read", beneath::path_from_bytes(path))(std::io::ErrorKind::OutOfMemory)
            })?;
        body.take(bound.saturating_add(1))
            .read_to_end(&mut bytes)
            .map_err(io("read", beneath::path_from_bytes(path)))?;
        let length = bytes.len() as u64;
        if length > bound {
            return Ok(Err(SkipReason::TooLarge));
        }
        if let Some(known) = known {
            let id = Oid::hash_object(ObjectType::Blob, &bytes).map_err(git("hash a file"))?;
            if id == known.id {
                return Ok(Ok((id, length == size)));
            }
        }
        if length > self.remaining_bytes() {
            return Ok(Err(SkipReason::NoRoom));
        }
        Ok(Ok((self.store(path, &bytes)?, length == size)))
    }

    /// Returns the bytes that may still be stored.
    fn remaining_bytes(&self) -> u64 {
        self.bounds.total.saturating_sub(self.bytes)
    }

    fn store_link(&mut self, path: &[u8], text: &[u8]) -> Result<Oid, GitError> {
        let refused = |why| GitError::Forbidden {
            path: path.to_vec(),
            why,
        };
        let name = path.rsplit(|b| *b == b'/').next().unwrap_or_default();
        if text.is_empty() || text.len() > MAX_LINK_BYTES || text.contains(&0) {
            return Err(refused("the link's target is empty or too long"));
        }
        if is_dot_gitmodules(name) {
            return Err(refused("'.gitmodules' must not be a link"));
        }
        self.store(path, text)
    }

    fn store(&mut self, path: &[u8], bytes: &[u8]) -> Result<Oid, GitError> {
        self.bytes += bytes.len() as u64;
        if self.bytes > self.bounds.total {
            return Err(too_much(
                "the size of all changed files and links (sandbox.snapshot.total)",
                self.bounds.total,
                path,
            ));
        }
        let odb = self
            .quarantine
            .repo()
            .odb()
            .map_err(git("open the objects"))?;
        odb.write(ObjectType::Blob, bytes)
            .map_err(git("store a file"))
    }
}

fn too_much(what: &'static str, bound: u64, path: &[u8]) -> GitError {
    GitError::TooMuch {
        what,
        bound,
        path: path.to_vec(),
    }
}
