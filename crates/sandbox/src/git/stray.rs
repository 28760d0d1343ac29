//! Work that the agent's own repository holds on to and the operator's does not have: other
//! branches, stashes, tags, a detached HEAD, and commits of a sandbox that could not be asked.
//!
//! The workspace's `.git` is read as text: names and ids, by our own code, one component at
//! a time, every count bounded. What cannot be understood is a stray, too: this is what
//! stands between `delete` and somebody's work.

use std::collections::BTreeMap;
use std::ffi::{CStr, CString};
use std::io::Read;
use std::os::fd::{AsFd, OwnedFd};

use git2::Oid;
use nix::dir::Dir;
use nix::errno::Errno;
use nix::sys::stat::{SFlag, fstat};

use super::error::{GitError, git};
use super::home::Home;
use super::names::quote;
use crate::beneath;
use crate::name::Slug;

const LARGEST_REF: u64 = 4096;
const LARGEST_LIST: u64 = 4 << 20;
const DEEPEST: usize = 16;

/// Names that are looked at; an agent may make millions.
const MOST_NAMES: usize = 10_000;

/// Commits that are looked for in the operator's history, which may be long.
const MOST_SOUGHT: usize = 64;

/// Strays that are named; the rest is counted.
const MOST_SHOWN: usize = 20;
const LONGEST_SHOWN: usize = 100;

/// What is in the workspace's repository only.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Strays {
    /// In words, such as `branch feature at 1234567`; the first twenty.
    pub shown: Vec<String>,
    /// How many there are.
    pub count: u64,
}

impl Strays {
    fn add(&mut self, words: String) {
        self.count += 1;
        if self.shown.len() < MOST_SHOWN {
            self.shown.push(words);
        }
    }
}

impl Home {
    /// What the repository in a workspace refers to and no ref of the operator's holds.
    pub fn strays(&self, slug: &Slug, workspace: &OwnedFd) -> Result<Strays, GitError> {
        let mut found = Found::default();
        let mut strays = Strays::default();
        if let Err(why) = found.read(workspace) {
            strays.add(format!("a repository of which {why}"));
        }
        let mut sought = Sought {
            home: self,
            tip: self.tip(slug)?,
            hidden: None,
            known: BTreeMap::new(),
        };
        for (name, id) in &found.names {
            match id {
                None => strays.add(format!("{}, which cannot be read", words(name))),
                Some(id) if sought.is_home(*id)? => {}
                Some(id) => strays.add(format!("{} at {}", words(name), short(*id))),
            }
        }
        // The newest stash is a ref, and is named above; the older ones are in its log only.
        let newest = found.names.get(STASH).copied().flatten();
        for id in found.stashes.iter().filter(|id| Some(**id) != newest) {
            if !sought.is_home(*id)? {
                strays.add(format!("a stash at {}", short(*id)));
            }
        }
        Ok(strays)
    }
}

const STASH: &[u8] = b"refs/stash";

fn short(id: Oid) -> String {
    id.to_string().chars().take(12).collect()
}

/// A ref as people know it.
fn words(name: &[u8]) -> String {
    let kinds: [(&[u8], &str); 2] = [(b"refs/heads/", "branch "), (b"refs/tags/", "tag ")];
    let (kind, rest) = kinds
        .iter()
        .find_map(|(prefix, kind)| Some((*kind, name.strip_prefix(*prefix)?)))
        .unwrap_or(("", name));
    if name == STASH {
        return "a stash".to_owned();
    }
    let mut shown = quote(rest);
    shown.truncate(LONGEST_SHOWN);
    format!("{kind}{shown}")
}

/// Whether the operator's repository holds a commit.
struct Sought<'a> {
    home: &'a Home,
    tip: Oid,
    hidden: Option<Vec<Oid>>,
    known: BTreeMap<Oid, bool>,
}

impl Sought<'_> {
    fn is_home(&mut self, id: Oid) -> Result<bool, GitError> {
        if id == self.tip {
            return Ok(true);
        }
        if let Some(known) = self.known.get(&id) {
            return Ok(*known);
        }
        if self.known.len() >= MOST_SOUGHT || self.home.repo().find_commit(id).is_err() {
            return Ok(false);
        }
        let found = self.is_held(id)?;
        self.known.insert(id, found);
        Ok(found)
    }

    fn is_held(&mut self, id: Oid) -> Result<bool, GitError> {
        let repo = self.home.repo();
        let failed = || git("look for the agent's commits");
        if repo.graph_descendant_of(self.tip, id).map_err(failed())? {
            return Ok(true);
        }
        // Not on the sandbox's branch, but perhaps on one of the operator's.
        let hidden = match &self.hidden {
            Some(hidden) => hidden,
            None => self.hidden.insert(self.home.commits_of_refs()?),
        };
        let mut walk = repo.revwalk().map_err(failed())?;
        walk.push(id).map_err(failed())?;
        for commit in hidden {
            walk.hide(*commit).map_err(failed())?;
        }
        Ok(walk.next().is_none())
    }
}

/// The refs of a workspace's repository.
#[derive(Default)]
struct Found {
    /// By full name; no id where it could not be understood.
    names: BTreeMap<Vec<u8>, Option<Oid>>,
    stashes: Vec<Oid>,
}

type Unread = &'static str;

const TOO_MANY: Unread = "there are more refs than can be looked at";

impl Found {
    fn read(&mut self, workspace: &OwnedFd) -> Result<(), Unread> {
        let dir = match beneath::directory(workspace, c".git") {
            Ok(dir) => dir,
            Err(Errno::ENOENT) => return Ok(()),
            Err(Errno::ENOTDIR | Errno::ELOOP) => return Err("'.git' is no directory"),
            Err(_) => return Err("'.git' cannot be opened"),
        };
        self.packed(&dir)?;
        if let Some(refs) = below(&dir, c"refs")? {
            self.loose(&refs, b"refs", 0)?;
        }
        self.head(&dir, b"HEAD".to_vec())?;
        if let Some(worktrees) = below(&dir, c"worktrees")? {
            for name in list(&worktrees)? {
                if let Some(worktree) = below(&worktrees, &name)? {
                    let name = [b"the HEAD of worktree ", name.to_bytes()].concat();
                    self.head(&worktree, name)?;
                }
            }
        }
        self.stashes(&dir)?;
        match below(&dir, c"reftable")? {
            None => Ok(()),
            Some(_) => Err("the refs are in a format that is not understood (reftable)"),
        }
    }

    fn put(&mut self, name: Vec<u8>, id: Option<Oid>) -> Result<(), Unread> {
        if name.starts_with(b"refs/remotes/") {
            // What was fetched is on the remote.
            return Ok(());
        }
        if self.names.len() >= MOST_NAMES {
            return Err(TOO_MANY);
        }
        self.names.insert(name, id);
        Ok(())
    }

    fn packed(&mut self, dir: &OwnedFd) -> Result<(), Unread> {
        let text = content(dir, c"packed-refs", LARGEST_LIST)?;
        for line in text.unwrap_or_default().split(|b| *b == b'\n') {
            // A comment, or what an annotated tag leads to.
            if matches!(line.first(), None | Some(b'#' | b'^')) {
                continue;
            }
            let (id, name) = line.split_at_checked(40).unwrap_or((line, b""));
            let name = name.strip_prefix(b" ").unwrap_or(b"packed-refs");
            self.put(name.to_vec(), read_id(id))?;
        }
        Ok(())
    }

    fn loose(&mut self, dir: &OwnedFd, above: &[u8], depth: usize) -> Result<(), Unread> {
        if depth > DEEPEST {
            return Err("the refs are too deep");
        }
        for name in list(dir)? {
            let path = [above, b"/", name.to_bytes()].concat();
            match below(dir, &name) {
                Ok(Some(dir)) => self.loose(&dir, &path, depth + 1)?,
                _ if path.ends_with(b".lock") => {}
                _ => {
                    let text = content(dir, &name, LARGEST_REF)?.unwrap_or_default();
                    if !text.starts_with(b"ref: ") {
                        self.put(path, read_id(text.trim_ascii()))?;
                    }
                }
            }
        }
        Ok(())
    }

    fn head(&mut self, dir: &OwnedFd, name: Vec<u8>) -> Result<(), Unread> {
        match content(dir, c"HEAD", LARGEST_REF)? {
            Some(text) if !text.starts_with(b"ref: ") => self.put(name, read_id(text.trim_ascii())),
            _ => Ok(()),
        }
    }

    fn stashes(&mut self, dir: &OwnedFd) -> Result<(), Unread> {
        let logs = match below(dir, c"logs")? {
            Some(logs) => below(&logs, c"refs")?,
            None => None,
        };
        let Some(logs) = logs else {
            return Ok(());
        };
        let text = content(&logs, c"stash", LARGEST_LIST)?;
        for line in text.unwrap_or_default().split(|b| *b == b'\n') {
            let new = line.split(|b| *b == b' ').nth(1);
            self.stashes.extend(new.and_then(read_id));
            if self.stashes.len() > MOST_NAMES {
                return Err(TOO_MANY);
            }
        }
        Ok(())
    }
}

fn read_id(text: &[u8]) -> Option<Oid> {
    let text = std::str::from_utf8(text).ok()?;
    Oid::from_str(text).ok().filter(|_| text.len() == 40)
}

/// A directory, if there is one of that name.
fn below(dir: &OwnedFd, name: &CStr) -> Result<Option<OwnedFd>, Unread> {
    match beneath::directory(dir, name) {
        Ok(dir) => Ok(Some(dir)),
        Err(Errno::ENOENT | Errno::ENOTDIR) => Ok(None),
        Err(Errno::ELOOP) => Err("a part is a link"),
        Err(_) => Err("a directory cannot be opened"),
    }
}

fn list(dir: &OwnedFd) -> Result<Vec<CString>, Unread> {
    let unread = "a directory cannot be listed";
    let listed = dir.try_clone().map_err(|_| unread)?;
    let mut listed = Dir::from_fd(listed).map_err(|_| unread)?;
    let mut names = Vec::new();
    for entry in listed.iter() {
        let name = entry.map_err(|_| unread)?.file_name().to_owned();
        if !matches!(name.to_bytes(), b"." | b"..") {
            names.push(name);
        }
        if names.len() > MOST_NAMES {
            return Err(TOO_MANY);
        }
    }
    Ok(names)
}

/// A file's bytes, if there is one of that name.
fn content(dir: &OwnedFd, name: &CStr, most: u64) -> Result<Option<Vec<u8>>, Unread> {
    let file = match beneath::file(dir.as_fd(), name) {
        Ok(file) => file,
        Err(Errno::ENOENT) => return Ok(None),
        // Git has kept refs as links, long ago; ours never.
        Err(_) => return Err("a file cannot be opened"),
    };
    let stat = fstat(&file).map_err(|_| "a file cannot be looked at")?;
    if SFlag::from_bits_truncate(stat.st_mode) & SFlag::S_IFMT != SFlag::S_IFREG {
        return Err("a part is no file");
    }
    let mut bytes = Vec::new();
    file.take(most.saturating_add(1))
        .read_to_end(&mut bytes)
        .map_err(|_| "a file cannot be read")?;
    if bytes.len() as u64 > most {
        return Err("a file is too large");
    }
    Ok(Some(bytes))
}
