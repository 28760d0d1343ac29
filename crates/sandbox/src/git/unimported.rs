//! Finds commits in the workspace's repository that the operator's repository does not have: other
//! branches, stashes, tags, a detached HEAD, and commits of a sandbox in which git could not run.
//!
//! The workspace's `.git` is read as text by this module's own code: names and ids, one path
//! component at a time, every count bounded. Refs that cannot be parsed count as unimported,
//! because this check protects the agent's work from `delete`.

use std::collections::BTreeMap;
use std::ffi::{CStr, CString};
use std::io::Read;
use std::os::fd::{AsFd, OwnedFd};

use git2::Oid;
use nix::dir::Dir;
use nix::errno::Errno;
use nix::sys::stat::{SFlag, fstat};

use super::error::{GitError, git};
use super::host_repository::HostRepository;
use super::names::quote;
use crate::beneath;
use crate::name::Slug;

const MAX_REF_BYTES: u64 = 4096;
const MAX_LIST_BYTES: u64 = 4 << 20;
const MAX_DEPTH: usize = 16;

/// Maximum number of names read; an agent may create millions.
const MAX_NAMES: usize = 10_000;

/// Maximum number of commits looked up in the operator's history, which may be long.
const MAX_LOOKUPS: usize = 64;

/// Maximum number of commits that are described; more are only counted.
const MAX_SHOWN: usize = 20;
/// Maximum length of a ref name in a description.
const MAX_REF_NAME_BYTES: usize = 100;

/// Commits that only the workspace's repository has.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct UnimportedCommits {
    /// Descriptions, such as `branch feature at 1234567`; the first twenty.
    pub shown: Vec<String>,
    /// The total number.
    pub count: u64,
}

impl UnimportedCommits {
    fn add(&mut self, description: String) {
        self.count += 1;
        if self.shown.len() < MAX_SHOWN {
            self.shown.push(description);
        }
    }
}

impl HostRepository {
    /// Lists the commits that refs of the workspace's repository point to and no ref of the
    /// operator's repository reaches.
    pub fn unimported_commits(
        &self,
        slug: &Slug,
        workspace: &OwnedFd,
    ) -> Result<UnimportedCommits, GitError> {
        let mut refs = WorkspaceRefs::default();
        let mut unimported = UnimportedCommits::default();
        if let Err(why) = refs.read(workspace) {
            unimported.add(format!("a repository that cannot be read: {why}"));
        }
        let mut lookup = CommitLookup {
            host_repository: self,
            tip: self.tip(slug)?,
            other_tips: None,
            known: BTreeMap::new(),
        };
        for (name, id) in &refs.names {
            match id {
                None => unimported.add(format!("{}, which cannot be read", describe_ref(name))),
                Some(id) if lookup.is_known_to_host(*id)? => {}
                Some(id) => unimported.add(format!("{} at {}", describe_ref(name), short_id(*id))),
            }
        }
        // The newest stash is a ref and is listed above; the older ones are in its reflog only.
        let newest = refs.names.get(STASH).copied().flatten();
        for id in refs.stashes.iter().filter(|id| Some(**id) != newest) {
            if !lookup.is_known_to_host(*id)? {
                unimported.add(format!("a stash at {}", short_id(*id)));
            }
        }
        Ok(unimported)
    }
}

const STASH: &[u8] = b"refs/stash";

fn short_id(id: Oid) -> String {
    id.to_string().chars().take(12).collect()
}

/// Describes a ref for a person.
fn describe_ref(name: &[u8]) -> String {
    let kinds: [(&[u8], &str); 2] = [(b"refs/heads/", "branch "), (b"refs/tags/", "tag ")];
    let (kind, rest) = kinds
        .iter()
        .find_map(|(prefix, kind)| Some((*kind, name.strip_prefix(*prefix)?)))
        .unwrap_or(("", name));
    if name == STASH {
        return "a stash".to_owned();
    }
    let mut shown = quote(rest);
    shown.truncate(MAX_REF_NAME_BYTES);
    format!("{kind}{shown}")
}

/// Looks commits up in the operator's repository.
struct CommitLookup<'a> {
    host_repository: &'a HostRepository,
    tip: Oid,
    /// The commits of all refs of the operator's repository, read when they are needed.
    other_tips: Option<Vec<Oid>>,
    known: BTreeMap<Oid, bool>,
}

impl CommitLookup<'_> {
    /// Whether the commit is on a branch, a tag or another ref of the operator.
    fn is_known_to_host(&mut self, id: Oid) -> Result<bool, GitError> {
        if id == self.tip {
            return Ok(true);
        }
        if let Some(known) = self.known.get(&id) {
            return Ok(*known);
        }
        if self.known.len() >= MAX_LOOKUPS || self.host_repository.repo().find_commit(id).is_err() {
            return Ok(false);
        }
        let found = self.is_reachable(id)?;
        self.known.insert(id, found);
        Ok(found)
    }

    /// Whether a ref of the operator's repository reaches the commit.
    fn is_reachable(&mut self, id: Oid) -> Result<bool, GitError> {
        let repo = self.host_repository.repo();
        let failed = || git("look for the agent's commits");
        if repo.graph_descendant_of(self.tip, id).map_err(failed())? {
            return Ok(true);
        }
        // The commit is not on the sandbox's branch, but may be on another branch of the
        // operator's.
        let other_tips = match &self.other_tips {
            Some(other_tips) => other_tips,
            None => self
                .other_tips
                .insert(self.host_repository.commits_of_refs()?),
        };
        let mut walk = repo.revwalk().map_err(failed())?;
        walk.push(id).map_err(failed())?;
        for commit in other_tips {
            walk.hide(*commit).map_err(failed())?;
        }
        Ok(walk.next().is_none())
    }
}

/// The refs of a workspace's repository.
#[derive(Default)]
struct WorkspaceRefs {
    /// The ids by full ref name; `None` for an id that could not be parsed.
    names: BTreeMap<Vec<u8>, Option<Oid>>,
    stashes: Vec<Oid>,
}

/// Why the refs of a workspace could not be read.
type RefsUnreadable = &'static str;

const TOO_MANY_REFS: RefsUnreadable = "there are more refs than the limit";

impl WorkspaceRefs {
    fn read(&mut self, workspace: &OwnedFd) -> Result<(), RefsUnreadable> {
        let dir = match beneath::open_directory(workspace, c".git") {
            Ok(dir) => dir,
            Err(Errno::ENOENT) => return Ok(()),
            Err(Errno::ENOTDIR | Errno::ELOOP) => return Err("'.git' is no directory"),
            Err(_) => return Err("'.git' cannot be opened"),
        };
        self.read_packed_refs(&dir)?;
        if let Some(refs) = open_subdirectory(&dir, c"refs")? {
            self.read_loose_refs(&refs, b"refs", 0)?;
        }
        self.read_head(&dir, b"HEAD".to_vec())?;
        if let Some(worktrees) = open_subdirectory(&dir, c"worktrees")? {
            for name in list(&worktrees)? {
                if let Some(worktree) = open_subdirectory(&worktrees, &name)? {
                    let name = [b"the HEAD of worktree ", name.to_bytes()].concat();
                    self.read_head(&worktree, name)?;
                }
            }
        }
        self.read_stashes(&dir)?;
        match open_subdirectory(&dir, c"reftable")? {
            None => Ok(()),
            Some(_) => Err("the refs are in an unsupported format (reftable)"),
        }
    }

    fn add(&mut self, name: Vec<u8>, id: Option<Oid>) -> Result<(), RefsUnreadable> {
        if name.starts_with(b"refs/remotes/") {
            // Fetched commits are on the remote.
            return Ok(());
        }
        if self.names.len() >= MAX_NAMES {
            return Err(TOO_MANY_REFS);
        }
        self.names.insert(name, id);
        Ok(())
    }

    fn read_packed_refs(&mut self, dir: &OwnedFd) -> Result<(), RefsUnreadable> {
        let text = read_file(dir, c"packed-refs", MAX_LIST_BYTES)?;
        for line in text.unwrap_or_default().split(|b| *b == b'\n') {
            // A comment, or the peeled target of an annotated tag.
            if matches!(line.first(), None | Some(b'#' | b'^')) {
                continue;
            }
            let (id, name) = line.split_at_checked(40).unwrap_or((line, b""));
            let name = name.strip_prefix(b" ").unwrap_or(b"packed-refs");
            self.add(name.to_vec(), read_id(id))?;
        }
        Ok(())
    }

    fn read_loose_refs(
        &mut self,
        dir: &OwnedFd,
        prefix: &[u8],
        depth: usize,
    ) -> Result<(), RefsUnreadable> {
        if depth > MAX_DEPTH {
            return Err("the refs are too deep");
        }
        for name in list(dir)? {
            let path = [prefix, b"/", name.to_bytes()].concat();
            match open_subdirectory(dir, &name) {
                Ok(Some(dir)) => self.read_loose_refs(&dir, &path, depth + 1)?,
                _ if path.ends_with(b".lock") => {}
                _ => {
                    let text = read_file(dir, &name, MAX_REF_BYTES)?.unwrap_or_default();
                    if !text.starts_with(b"ref: ") {
                        self.add(path, read_id(text.trim_ascii()))?;
                    }
                }
            }
        }
        Ok(())
    }

    fn read_head(&mut self, dir: &OwnedFd, name: Vec<u8>) -> Result<(), RefsUnreadable> {
        match read_file(dir, c"HEAD", MAX_REF_BYTES)? {
            Some(text) if !text.starts_with(b"ref: ") => self.add(name, read_id(text.trim_ascii())),
            _ => Ok(()),
        }
    }

    fn read_stashes(&mut self, dir: &OwnedFd) -> Result<(), RefsUnreadable> {
        let logs = match open_subdirectory(dir, c"logs")? {
            Some(logs) => open_subdirectory(&logs, c"refs")?,
            None => None,
        };
        let Some(logs) = logs else {
            return Ok(());
        };
        let text = read_file(&logs, c"stash", MAX_LIST_BYTES)?;
        for line in text.unwrap_or_default().split(|b| *b == b'\n') {
            let new = line.split(|b| *b == b' ').nth(1);
            self.stashes.extend(new.and_then(read_id));
            if self.stashes.len() > MAX_NAMES {
                return Err(TOO_MANY_REFS);
            }
        }
        Ok(())
    }
}

fn read_id(text: &[u8]) -> Option<Oid> {
    let text = std::str::from_utf8(text).ok()?;
    Oid::from_str(text).ok().filter(|_| text.len() == 40)
}

/// Opens a directory, if it exists.
fn open_subdirectory(dir: &OwnedFd, name: &CStr) -> Result<Option<OwnedFd>, RefsUnreadable> {
    match beneath::open_directory(dir, name) {
        Ok(dir) => Ok(Some(dir)),
        Err(Errno::ENOENT | Errno::ENOTDIR) => Ok(None),
        Err(Errno::ELOOP) => Err("a directory is a symbolic link"),
        Err(_) => Err("a directory cannot be opened"),
    }
}

fn list(dir: &OwnedFd) -> Result<Vec<CString>, RefsUnreadable> {
    let unlisted = "a directory cannot be listed";
    let listed = dir.try_clone().map_err(|_| unlisted)?;
    let mut listed = Dir::from_fd(listed).map_err(|_| unlisted)?;
    let mut names = Vec::new();
    for entry in listed.iter() {
        let name = entry.map_err(|_| unlisted)?.file_name().to_owned();
        if !matches!(name.to_bytes(), b"." | b"..") {
            names.push(name);
        }
        if names.len() > MAX_NAMES {
            return Err(TOO_MANY_REFS);
        }
    }
    Ok(names)
}

/// Reads a file, if it exists.
fn read_file(
    dir: &OwnedFd,
    name: &CStr,
    max_bytes: u64,
) -> Result<Option<Vec<u8>>, RefsUnreadable> {
    let file = match beneath::open_file(dir.as_fd(), name) {
        Ok(file) => file,
        Err(Errno::ENOENT) => return Ok(None),
        // Old versions of git stored refs as symbolic links; the workspaces created here have none.
        Err(_) => return Err("a file cannot be opened"),
    };
    let stat = fstat(&file).map_err(|_| "a file cannot be examined")?;
    if SFlag::from_bits_truncate(stat.st_mode) & SFlag::S_IFMT != SFlag::S_IFREG {
        return Err("a ref is no regular file");
    }
    let mut bytes = Vec::new();
    file.take(max_bytes.saturating_add(1))
        .read_to_end(&mut bytes)
        .map_err(|_| "a file cannot be read")?;
    if bytes.len() as u64 > max_bytes {
        return Err("a file is too large");
    }
    Ok(Some(bytes))
}
