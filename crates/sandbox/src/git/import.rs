//! Imports the agent's commits from a pack or bundle after checking every new object.
//!
//! The bytes come from `git upload-pack` or `git bundle` run inside the sandbox. libgit2 and
//! [`super::tree`] parse them into a quarantine; the workspace's repository is never opened, so its
//! configuration has no effect.

use std::collections::{BTreeSet, HashMap};
use std::io::{Read, Write};

use git2::{Indexer, ObjectType, Odb, OdbLookupFlags, Oid};

use super::error::{GitError, git, io};
use super::host_repository::HostRepository;
use super::quarantine::Quarantine;
use super::snapshot::SnapshotBounds;
use super::tree::{self, SUBMODULE, TREE};
use crate::beneath;
use crate::name::Slug;

const MAX_BUNDLE_LINE_BYTES: usize = 4096;
const MAX_BUNDLE_LINES: usize = 10_000;
/// Maximum depth of nested trees.
const MAX_TREE_DEPTH: usize = 256;

/// The result of an import.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ImportOutcome {
    /// The agent's head commit, which is in the operator's repository but on no branch yet.
    pub head: Oid,
    /// The number of new commits.
    pub commits: u64,
}

impl HostRepository {
    /// Imports the history of `head` from a pack or a bundle. Without `head`, the head of the
    /// bundle is used. Nothing is kept unless every object is valid.
    pub fn import(
        &self,
        slug: &Slug,
        stream: &mut dyn Read,
        head: Option<Oid>,
        bounds: &SnapshotBounds,
    ) -> Result<ImportOutcome, GitError> {
        let quarantine = Quarantine::open(self)?;
        let imported = self
            .import_into(&quarantine, slug, stream, head, bounds)?
            .ok_or(GitError::BadBundle("the bundle names no head"))?;
        quarantine.publish()?;
        let host = self.repo().odb().map_err(git("open the objects"))?;
        host.refresh().map_err(git("read the new objects"))?;
        Ok(imported)
    }

    /// Reads and checks a pack or bundle; its objects stay in the quarantine. Returns `None` for a
    /// bundle without a head, which git writes when there is nothing to bundle.
    pub(crate) fn import_into(
        &self,
        quarantine: &Quarantine,
        slug: &Slug,
        stream: &mut dyn Read,
        head: Option<Oid>,
        bounds: &SnapshotBounds,
    ) -> Result<Option<ImportOutcome>, GitError> {
        let tip = self.tip(slug)?;
        let mut start = [0; 4];
        stream.read_exact(&mut start).map_err(truncated_stream)?;
        let (head, start) = if start == *b"PACK" {
            let none = GitError::BadBundle("the stream is a pack, and its head commit is unknown");
            (Some(head.ok_or(none)?), start.to_vec())
        } else {
            let own = read_bundle_head(&start, stream)?;
            (head.or(own), Vec::new())
        };
        let Some(head) = head else {
            return Ok(None);
        };
        index_pack(quarantine, &start, stream, bounds)?;
        let odb = quarantine.repo().odb().map_err(git("open the objects"))?;
        odb.refresh().map_err(git("read the new objects"))?;
        let host = self.repo().odb().map_err(git("open the objects"))?;
        let mut checker = ObjectChecker {
            odb: &odb,
            host: &host,
            bounds,
            submodules: submodules(&host, self, tip)?,
            trees: HashMap::new(),
            blobs: BTreeSet::new(),
            bytes: 0,
        };
        let commits = checker.check_history(head)?;
        Ok(Some(ImportOutcome { head, commits }))
    }
}

fn truncated_stream(_: std::io::Error) -> GitError {
    GitError::BadBundle("the stream ended early")
}

/// Reads a bundle's header up to its pack. Prerequisites are checked later, when the history is
/// walked.
fn read_bundle_head(start: &[u8], stream: &mut dyn Read) -> Result<Option<Oid>, GitError> {
    let mut head = None;
    for number in 0..MAX_BUNDLE_LINES {
        let mut line = if number == 0 {
            start.to_vec()
        } else {
            Vec::new()
        };
        let mut byte = [0];
        loop {
            stream.read_exact(&mut byte).map_err(truncated_stream)?;
            match byte {
                [b'\n'] => break,
                [b] => line.push(b),
            }
            if line.len() > MAX_BUNDLE_LINE_BYTES {
                return Err(GitError::BadBundle(
                    "a line of the bundle's header is too long",
                ));
            }
        }
        match (number, line.as_slice()) {
            (0, b"# v2 git bundle") => {}
            (0, _) => {
                return Err(GitError::BadBundle(
                    "the stream is neither a pack nor a v2 bundle",
                ));
            }
            (_, []) => return Ok(head),
            (_, [b'-', ..]) => {}
            (_, line) => {
                let text = String::from_utf8_lossy(line);
                let (id, name) = text.split_once(' ').ok_or(GitError::BadBundle(
                    "a line of the bundle's header is malformed",
                ))?;
                let id = Oid::from_str(id).map_err(|_| {
                    GitError::BadBundle("a line of the bundle's header is malformed")
                })?;
                if head.is_none() || name == "HEAD" {
                    head = Some(id);
                }
            }
        }
    }
    Err(GitError::BadBundle("the bundle's header is too long"))
}

fn index_pack(
    quarantine: &Quarantine,
    start: &[u8],
    stream: &mut dyn Read,
    bounds: &SnapshotBounds,
) -> Result<(), GitError> {
    let odb = quarantine.repo().odb().map_err(git("open the objects"))?;
    let dir = quarantine.packs();
    let (count, max_bytes) = (bounds.entries.saturating_mul(4), bounds.total);
    let mut indexer =
        Indexer::new(Some(&odb), &dir, 0o444, false).map_err(git("read the agent's pack"))?;
    indexer.progress(move |progress| progress.total_objects() as u64 <= count);
    let unreadable_pack = |error: std::io::Error| GitError::BadObject {
        why: format!("their pack cannot be read: {error}"),
        id: Oid::ZERO_SHA1,
    };
    indexer.write_all(start).map_err(unreadable_pack)?;
    let mut total = start.len() as u64;
    let mut buffer = vec![0; 64 * 1024];
    loop {
        let read = stream.read(&mut buffer).map_err(io(
            "read the agent's pack for",
            beneath::path_from_bytes(b"import"),
        ))?;
        let Some(chunk) = buffer.get(..read).filter(|chunk| !chunk.is_empty()) else {
            break;
        };
        total += chunk.len() as u64;
        if total > max_bytes {
            return Err(GitError::TooMuch {
                what: "the size of the agent's pack (sandbox.snapshot.total)",
                bound: max_bytes,
                path: b"import".to_vec(),
            });
        }
        indexer.write_all(chunk).map_err(unreadable_pack)?;
    }
    indexer.commit().map_err(|error| GitError::BadObject {
        why: format!("their pack cannot be read: {}", error.message()),
        id: Oid::ZERO_SHA1,
    })?;
    Ok(())
}

/// Returns the submodule commits that the branch already points to.
fn submodules(
    odb: &Odb<'_>,
    host_repository: &HostRepository,
    tip: Oid,
) -> Result<BTreeSet<Oid>, GitError> {
    let commit = host_repository
        .repo()
        .find_commit(tip)
        .map_err(git(format!("find commit {tip}")))?;
    let paths = tree::flatten(odb, commit.tree_id())?;
    let links = paths.values().filter(|leaf| leaf.mode == SUBMODULE);
    Ok(links.map(|leaf| leaf.id).collect())
}

/// Checks every object that the host does not have.
struct ObjectChecker<'a> {
    odb: &'a Odb<'a>,
    host: &'a Odb<'a>,
    bounds: &'a SnapshotBounds,
    submodules: BTreeSet<Oid>,
    /// The number of paths below each new tree: a few objects can expand to billions of paths.
    trees: HashMap<Oid, u64>,
    blobs: BTreeSet<Oid>,
    bytes: u64,
}

impl ObjectChecker<'_> {
    /// Checks all commits that lead to `head`, and returns the number of new ones.
    fn check_history(&mut self, head: Oid) -> Result<u64, GitError> {
        let mut open = vec![head];
        let mut seen = BTreeSet::new();
        while let Some(id) = open.pop() {
            if self.host_has(id) || !seen.insert(id) {
                if self.object_kind(id)? != ObjectType::Commit {
                    return Err(bad_object("a parent is no commit", id));
                }
                continue;
            }
            if seen.len() as u64 > self.bounds.entries {
                return Err(bad_object("there are too many commits", id));
            }
            let (tree, parents) = self.check_commit(id)?;
            self.check_tree(tree, 0)?;
            open.extend(parents);
        }
        Ok(seen.len() as u64)
    }

    /// Whether the operator's repository has the object, and with it everything that it references.
    fn host_has(&self, id: Oid) -> bool {
        self.host.exists_ext(id, OdbLookupFlags::NO_REFRESH)
    }

    fn object_kind(&self, id: Oid) -> Result<ObjectType, GitError> {
        match self.odb.read_header(id) {
            Ok((_, kind)) => Ok(kind),
            Err(_) => Err(bad_object("an object is missing", id)),
        }
    }

    fn read_object(&mut self, id: Oid, kind: ObjectType) -> Result<git2::OdbObject<'_>, GitError> {
        let (size, found) = self
            .odb
            .read_header(id)
            .map_err(|_| bad_object("an object is missing", id))?;
        self.count_bytes(id, size as u64)?;
        if found != kind {
            return Err(bad_object(
                "an object has another type than its reference requires",
                id,
            ));
        }
        self.odb
            .read(id)
            .map_err(|_| bad_object("an object cannot be read", id))
    }

    fn count_bytes(&mut self, id: Oid, size: u64) -> Result<(), GitError> {
        self.bytes = self.bytes.saturating_add(size);
        if size > self.bounds.file || self.bytes > self.bounds.total {
            return Err(bad_object(
                "the commits exceed the limits of sandbox.snapshot",
                id,
            ));
        }
        Ok(())
    }

    /// Checks a commit's header line by line and returns its tree and parents.
    fn check_commit(&mut self, id: Oid) -> Result<(Oid, Vec<Oid>), GitError> {
        let object = self.read_object(id, ObjectType::Commit)?;
        let data = object.data();
        let malformed = || bad_object("a commit's header is malformed", id);
        let end = data
            .windows(2)
            .position(|pair| pair == b"\n\n")
            .unwrap_or(data.len());
        let head = data.get(..end).unwrap_or_default();
        if head.contains(&0) {
            return Err(malformed());
        }
        let mut lines = head.split(|b| *b == b'\n').peekable();
        let id_of = |line: &[u8], word: &str| {
            let hex = line.strip_prefix(word.as_bytes())?;
            Oid::from_str(std::str::from_utf8(hex).ok()?)
                .ok()
                .filter(|_| hex.len() == 40)
        };
        let tree = lines
            .next()
            .and_then(|line| id_of(line, "tree "))
            .ok_or_else(malformed)?;
        let mut parents = Vec::new();
        while let Some(parent) = lines.peek().and_then(|line| id_of(line, "parent ")) {
            parents.push(parent);
            lines.next();
        }
        let mut starts = |word: &[u8]| lines.next().is_some_and(|line| line.starts_with(word));
        if !starts(b"author ") || !starts(b"committer ") {
            return Err(malformed());
        }
        Ok((tree, parents))
    }

    /// Checks a tree and its subtrees, once each.
    fn check_tree(&mut self, id: Oid, depth: usize) -> Result<u64, GitError> {
        if let Some(paths) = self.trees.get(&id) {
            return Ok(*paths);
        }
        if depth > MAX_TREE_DEPTH {
            return Err(bad_object("a tree is too deep", id));
        }
        let parsed = tree::parse(self.read_object(id, ObjectType::Tree)?.data());
        let items = parsed.map_err(|why| bad_object(why, id))?;
        let mut paths = 0u64;
        for item in items {
            let below = item.leaf.id;
            paths = paths.saturating_add(match item.leaf.mode {
                TREE => self.check_tree(below, depth + 1)?,
                SUBMODULE if !self.submodules.contains(&below) => {
                    return Err(bad_object(
                        "a tree has a new link to another repository",
                        id,
                    ));
                }
                SUBMODULE => 1,
                _ => {
                    self.check_blob(below)?;
                    1
                }
            });
            if paths > self.bounds.entries {
                return Err(bad_object("a tree expands to too many paths", id));
            }
        }
        self.trees.insert(id, paths);
        Ok(paths)
    }

    /// Checks the type and the size of a blob.
    fn check_blob(&mut self, id: Oid) -> Result<(), GitError> {
        if self.blobs.contains(&id) {
            return Ok(());
        }
        match self.odb.read_header(id) {
            Err(_) => return Err(bad_object("an object is missing", id)),
            Ok((_, kind)) if kind != ObjectType::Blob => {
                return Err(bad_object(
                    "an object has another type than its reference requires",
                    id,
                ));
            }
            Ok((size, _)) if !self.host_has(id) => self.count_bytes(id, size as u64)?,
            Ok(_) => {}
        }
        self.blobs.insert(id);
        Ok(())
    }
}

fn bad_object(why: &str, id: Oid) -> GitError {
    GitError::BadObject {
        why: why.to_owned(),
        id,
    }
}
