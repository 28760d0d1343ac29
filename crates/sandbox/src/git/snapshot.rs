//! Turns a workspace into a commit on the sandbox's branch, in the operator's repository.
//!
//! The entries come from outside and are judged here: what must never be in a tree is
//! refused, what git cannot store is left out and reported, and all of it is bounded. The
//! operator's HEAD, index and worktree are not touched; a snapshot that fails leaves nothing.

use std::io::Read;

use git2::{ObjectType, Oid, Repository};
use serde::{Deserialize, Serialize};

use super::error::{GitError, git, io};
use super::home::Home;
use super::manifest::{Manifest, Moment, Stamp};
use super::names::{check_path, is_dot_gitmodules};
use super::objects::Quarantine;
use super::tree::{self, EXECUTABLE, FILE, LINK, Leaf};
use crate::beneath;
use crate::name::Slug;

const LONGEST_LINK: usize = 4096;
const LONGEST_MESSAGE: usize = 4096;

/// How much a workspace may bring home.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Bounds {
    /// Bytes of one file.
    pub file: u64,
    /// Bytes of all changed files of one snapshot, or of an imported pack.
    pub total: u64,
    /// Files and directories, ignored ones that must be looked at included.
    pub entries: u64,
    /// Directories inside each other.
    pub depth: usize,
}

impl Default for Bounds {
    fn default() -> Self {
        Self {
            file: 64 * 1024 * 1024,
            total: 512 * 1024 * 1024,
            entries: 500_000,
            depth: 128,
        }
    }
}

/// Where a snapshot's entries come from. An entry is only good until the next is asked for.
pub trait Source {
    /// When reading began.
    fn began(&self) -> Moment;

    /// The next entry; `None` at the end.
    fn next(&mut self) -> Result<Option<Entry<'_>>, GitError>;
}

/// One path of a workspace.
pub struct Entry<'a> {
    /// From the workspace's root, with `/` between names.
    pub path: &'a [u8],
    /// What is there.
    pub content: Content<'a>,
    /// Its stat data, where a later snapshot should compare; the blob is filled in here.
    pub stamp: Option<Stamp>,
}

/// What is at a path.
pub enum Content<'a> {
    /// What the manifest says. Whoever streams cannot name an object, only a path of ours.
    Unchanged,
    /// A file.
    File {
        /// Whether its owner may execute it.
        executable: bool,
        /// Its size when it was opened.
        size: u64,
        /// Its bytes.
        body: &'a mut dyn Read,
    },
    /// A link's text.
    Link(&'a [u8]),
    /// Something git does not store.
    Odd(Oddity),
}

/// What a snapshot leaves out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Oddity {
    /// A named pipe.
    Fifo,
    /// A Unix socket.
    Socket,
    /// A device.
    Device,
    /// The `.git` of a repository inside the workspace; its files are taken as files.
    Repository,
    /// A file that may not be read.
    Unreadable,
    /// A file over [`Bounds::file`].
    TooLarge,
    /// A file that would take all of them over [`Bounds::total`]; the next snapshot goes on.
    NoRoom,
}

impl Oddity {
    /// Why it is left out, in a few words.
    pub fn why(self) -> &'static str {
        match self {
            Self::Fifo => "a named pipe",
            Self::Socket => "a socket",
            Self::Device => "a device",
            Self::Repository => "the '.git' of a repository inside the workspace",
            Self::Unreadable => "it may not be read",
            Self::TooLarge => "it is larger than sandbox.snapshot.file allows",
            Self::NoRoom => {
                "the changed files are together larger than sandbox.snapshot.total allows; \
                 another snapshot takes more of them"
            }
        }
    }

    /// Whether it may be somebody's work, which is then in the workspace only.
    pub fn is_work(self) -> bool {
        match self {
            Self::Fifo | Self::Socket | Self::Device => false,
            Self::Repository | Self::Unreadable | Self::TooLarge | Self::NoRoom => true,
        }
    }
}

/// What to call a snapshot, and what it follows.
#[derive(Clone, Debug)]
pub struct Request<'a> {
    /// The sandbox.
    pub slug: &'a Slug,
    /// What was done, such as `bash: cargo test`.
    pub message: &'a str,
    /// The agent's own head, after [`Home::import`].
    pub agent_head: Option<Oid>,
    /// What it may cost.
    pub bounds: &'a Bounds,
}

/// What a snapshot did.
#[derive(Clone, Debug)]
pub struct Snapshot {
    /// Where the branch points now.
    pub tip: Oid,
    /// Whether it moved.
    pub moved: bool,
    /// How many files were read.
    pub read: u64,
    /// What was left out, and why; the first thousand, work before the rest.
    pub skipped: Vec<(Vec<u8>, Oddity)>,
    /// How many were left out.
    pub left_out: u64,
    /// How many of those may be work.
    pub unsaved: u64,
    /// For the next snapshot.
    pub manifest: Manifest,
}

/// Left-out paths are counted beyond this and not remembered.
const MOST_SKIPPED: usize = 1000;

impl Home {
    /// Commits what `source` tells to the sandbox's branch. `known` is the manifest of the
    /// workspace's creation or of its last snapshot.
    pub fn snapshot(
        &self,
        request: &Request<'_>,
        known: &Manifest,
        source: &mut dyn Source,
    ) -> Result<Snapshot, GitError> {
        self.snapshot_into(Quarantine::open(self)?, request, known, source)
    }

    /// The same, with objects that are on probation already: they come in with the snapshot
    /// or not at all.
    pub(crate) fn snapshot_into(
        &self,
        quarantine: Quarantine,
        request: &Request<'_>,
        known: &Manifest,
        source: &mut dyn Source,
    ) -> Result<Snapshot, GitError> {
        let tip = self.tip(request.slug)?;
        let mut gathering = Gathering {
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
            gathering.take(entry)?;
        }
        let Gathering {
            mut rows,
            mut skipped,
            left_out,
            unsaved,
            read,
            ..
        } = gathering;
        skipped.sort_by_key(|(_, oddity)| !oddity.is_work());
        let repo = quarantine.repo();
        let odb = repo.odb().map_err(git("open the objects"))?;
        // Sorted once, which is much cheaper than keeping a map in order all the while.
        rows.sort_unstable_by(|one, other| one.path.cmp(&other.path));
        if let Some([row, _]) = rows.array_windows().find(|[a, b]| a.path == b.path) {
            return Err(GitError::Forbidden {
                path: row.path.clone(),
                why: "it comes twice",
            });
        }
        let leaves: Vec<_> = rows
            .iter()
            .map(|row| (row.path.as_slice(), row.leaf))
            .collect();
        let tree = tree::write(&odb, &leaves)?;
        let next = self.commit(repo, tip, tree, request)?;
        // The new branch tip is published before the branch moves, never after.
        drop(odb);
        if next != tip {
            quarantine.publish()?;
            self.move_branch(request.slug, tip, next, "palisade: snapshot")?;
        }
        let stamped = rows
            .into_iter()
            .filter_map(|row| Some((row.path, row.stamp?)));
        let manifest = Manifest {
            taken: source.began(),
            entries: stamped.collect(),
        };
        Ok(Snapshot {
            tip: next,
            moved: next != tip,
            read,
            skipped,
            left_out,
            unsaved,
            manifest,
        })
    }

    /// What the sandbox's branch holds, as a manifest that trusts no stat data: every file
    /// is read, and submodules stay what they are.
    pub(crate) fn manifest_of(&self, slug: &Slug) -> Result<Manifest, GitError> {
        let tip = self.tip(slug)?;
        let commit = self.repo().find_commit(tip);
        let commit = commit.map_err(git(format!("find commit {tip}")))?;
        let odb = self.repo().odb().map_err(git("open the objects"))?;
        let paths = tree::flatten(&odb, commit.tree_id())?;
        let blank = |leaf: Leaf| Stamp {
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

    /// Commits the tree after the right parents, or finds that there is nothing to commit.
    fn commit(
        &self,
        repo: &Repository,
        tip: Oid,
        tree: Oid,
        request: &Request<'_>,
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
        let who = self.signature()?;
        let parents: Vec<_> = commits.iter().collect();
        repo.commit(None, &who, &who, &clean(request.message), &tree, &parents)
            .map_err(git("write a commit"))
    }
}

/// The agent's head where it descends from our tip, our tip where the agent's is behind,
/// else both.
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

/// A message without what could forge a terminal's or a log's lines.
fn clean(message: &str) -> String {
    let mut text: String = message
        .chars()
        .map(|c| if c.is_control() && c != '\n' { ' ' } else { c })
        .collect();
    let end = text.floor_char_boundary(LONGEST_MESSAGE);
    text.truncate(end);
    let text = text.trim();
    if text.is_empty() {
        "snapshot\n".to_owned()
    } else {
        format!("{text}\n")
    }
}

/// A path of the new tree.
struct Row {
    path: Vec<u8>,
    leaf: Leaf,
    stamp: Option<Stamp>,
}

struct Gathering<'a> {
    quarantine: &'a Quarantine,
    known: &'a Manifest,
    bounds: &'a Bounds,
    rows: Vec<Row>,
    skipped: Vec<(Vec<u8>, Oddity)>,
    left_out: u64,
    unsaved: u64,
    seen: u64,
    read: u64,
    bytes: u64,
}

impl Gathering<'_> {
    fn take(&mut self, entry: Entry<'_>) -> Result<(), GitError> {
        let Entry {
            path,
            content,
            stamp,
        } = entry;
        self.seen += 1;
        if self.seen > self.bounds.entries {
            return Err(too_much("the number of files", self.bounds.entries, path));
        }
        if let Content::Odd(oddity) = content {
            if oddity == Oddity::Unreadable {
                self.keep_as_it_was(path, oddity);
            } else {
                self.leave_out(path, oddity);
            }
            return Ok(());
        }
        // What the manifest has was checked when it came in.
        if !matches!(content, Content::Unchanged) {
            check_path(path)?;
        }
        let (leaf, stamp) = match content {
            Content::Odd(_) => return Ok(()),
            Content::Unchanged => {
                let known = self.known.entries.get(path).ok_or(GitError::Forbidden {
                    path: path.to_vec(),
                    why: "it is said to be unchanged and was never there",
                })?;
                (
                    Leaf {
                        mode: known.mode,
                        id: known.id,
                    },
                    Some(*known),
                )
            }
            Content::File {
                executable,
                size,
                body,
            } => {
                let mode = if executable { EXECUTABLE } else { FILE };
                let (id, steady) = match self.store_file(path, size, body)? {
                    Ok(stored) => stored,
                    Err(oddity) => {
                        self.keep_as_it_was(path, oddity);
                        return Ok(());
                    }
                };
                // A file that was being written counts as it was read, and is read again.
                let unsteady = |stamp| Stamp {
                    ino: 0,
                    ctime: (0, 0),
                    ..stamp
                };
                (
                    Leaf { mode, id },
                    if steady { stamp } else { stamp.map(unsteady) },
                )
            }
            Content::Link(text) => {
                let id = self.store_link(path, text)?;
                (Leaf { mode: LINK, id }, stamp)
            }
        };
        let stamp = stamp.map(|stamp| Stamp {
            mode: leaf.mode,
            id: leaf.id,
            ..stamp
        });
        self.rows.push(Row {
            path: path.to_vec(),
            leaf,
            stamp,
        });
        Ok(())
    }

    fn leave_out(&mut self, path: &[u8], oddity: Oddity) {
        self.left_out += 1;
        self.unsaved += u64::from(oddity.is_work());
        // Ten thousand FIFOs must not hide the name of a file.
        let room = if oddity.is_work() {
            MOST_SKIPPED
        } else {
            MOST_SKIPPED / 2
        };
        if self.skipped.len() < room {
            self.skipped.push((path.to_vec(), oddity));
        }
    }

    /// Leaves out what a file, or a closed directory, holds now. Where the branch has an
    /// earlier state of it, that one stays: a file that grew was not deleted.
    fn keep_as_it_was(&mut self, path: &[u8], oddity: Oddity) {
        self.leave_out(path, oddity);
        let itself = self.known.entries.get_key_value(path);
        for (path, known) in itself.into_iter().chain(self.known.below(path)) {
            self.rows.push(Row {
                path: path.clone(),
                leaf: Leaf {
                    mode: known.mode,
                    id: known.id,
                },
                stamp: Some(*known),
            });
        }
    }

    /// Reads a file and stores it: its blob, and whether it held still; or why it stays
    /// behind.
    fn store_file(
        &mut self,
        path: &[u8],
        size: u64,
        body: &mut dyn Read,
    ) -> Result<Result<(Oid, bool), Oddity>, GitError> {
        let bound = self.bounds.file;
        if size > bound {
            return Ok(Err(Oddity::TooLarge));
        }
        // One that was touched and says what it said costs nothing; without a manifest of
        // ours nobody knows the size it had.
        let known = self.known.entries.get(path);
        let known = known.filter(|known| known.size == size || known.ino == 0);
        if known.is_none() && size > self.room() {
            return Ok(Err(Oddity::NoRoom));
        }
        self.read += 1;
        let mut bytes = Vec::new();
        bytes
            .try_reserve_exact(usize::try_from(size).unwrap_or(usize::MAX))
            .map_err(|_| io("read", beneath::path(path))(std::io::ErrorKind::OutOfMemory))?;
        body.take(bound.saturating_add(1))
            .read_to_end(&mut bytes)
            .map_err(io("read", beneath::path(path)))?;
        let length = bytes.len() as u64;
        if length > bound {
            return Ok(Err(Oddity::TooLarge));
        }
        if let Some(known) = known {
            let id = Oid::hash_object(ObjectType::Blob, &bytes).map_err(git("hash a file"))?;
            if id == known.id {
                return Ok(Ok((id, length == size)));
            }
        }
        if length > self.room() {
            return Ok(Err(Oddity::NoRoom));
        }
        Ok(Ok((self.store(path, &bytes)?, length == size)))
    }

    fn room(&self) -> u64 {
        self.bounds.total.saturating_sub(self.bytes)
    }

    fn store_link(&mut self, path: &[u8], text: &[u8]) -> Result<Oid, GitError> {
        let refused = |why| GitError::Forbidden {
            path: path.to_vec(),
            why,
        };
        let name = path.rsplit(|b| *b == b'/').next().unwrap_or_default();
        if text.is_empty() || text.len() > LONGEST_LINK || text.contains(&0) {
            return Err(refused("its link's text is empty or too long"));
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
