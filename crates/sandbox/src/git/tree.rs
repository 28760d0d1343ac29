//! Parses, writes and compares tree objects.

use std::collections::BTreeMap;

use git2::{ObjectType, Odb, OdbLookupFlags, Oid};

use super::error::{GitError, git};
use super::names::{check_name, check_path, is_dot_gitmodules};

// Modes of entries, as git writes them.
pub(super) const FILE: u32 = 0o100_644;
pub(super) const EXECUTABLE: u32 = 0o100_755;
pub(super) const LINK: u32 = 0o120_000;
pub(super) const SUBMODULE: u32 = 0o160_000;
pub(super) const TREE: u32 = 0o040_000;

/// Maximum number of paths of a tree; a few objects can expand to billions of paths.
const MAX_PATHS: usize = 2_000_000;
/// Maximum depth of nested trees.
const MAX_DEPTH: usize = 256;

/// The mode and id of an entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Leaf {
    pub(super) mode: u32,
    pub(super) id: Oid,
}

/// A named entry of a tree.
pub(super) struct TreeEntry {
    pub(super) name: Vec<u8>,
    pub(super) leaf: Leaf,
}

/// A path that differs between two trees.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Change {
    pub(super) path: Vec<u8>,
    pub(super) old: Option<Leaf>,
    pub(super) new: Option<Leaf>,
}

impl Change {
    /// Refuses paths that must never be checked out. A submodule entry must be unchanged: an agent
    /// cannot create or move one.
    pub(super) fn check(&self) -> Result<(), GitError> {
        let Some(new) = self.new else {
            return Ok(());
        };
        check_path(&self.path)?;
        if new.mode == SUBMODULE && self.old != Some(new) {
            return Err(GitError::Forbidden {
                path: self.path.clone(),
                why: "it is a new link to another repository",
            });
        }
        Ok(())
    }
}

/// Parses a tree, and refuses what `git fsck` refuses and what must never be checked out.
pub(super) fn parse(bytes: &[u8]) -> Result<Vec<TreeEntry>, &'static str> {
    let mut items: Vec<TreeEntry> = Vec::new();
    let mut rest = bytes;
    while !rest.is_empty() {
        let space = rest
            .iter()
            .position(|b| *b == b' ')
            .ok_or("a tree is truncated")?;
        let (mode, after) = rest.split_at(space);
        let after = after.get(1..).unwrap_or_default();
        let nul = after
            .iter()
            .position(|b| *b == 0)
            .ok_or("a tree is truncated")?;
        let (name, after) = after.split_at(nul);
        let id = after.get(1..21).ok_or("a tree is truncated")?;
        rest = after.get(21..).unwrap_or_default();
        let mode = match mode {
            b"100644" => FILE,
            // Old versions of git wrote group-writable files; git reads them as plain ones.
            b"100664" => FILE,
            b"100755" => EXECUTABLE,
            b"120000" => LINK,
            b"160000" => SUBMODULE,
            b"40000" => TREE,
            _ => return Err("a tree has an entry of an unknown mode"),
        };
        check_name(name)?;
        if mode == LINK && is_dot_gitmodules(name) {
            return Err("'.gitmodules' is a link");
        }
        let id = Oid::from_bytes(id).map_err(|_| "a tree has a broken id")?;
        if id.is_zero() {
            return Err("a tree has an empty id");
        }
        let item = TreeEntry {
            name: name.to_vec(),
            leaf: Leaf { mode, id },
        };
        if items
            .last()
            .is_some_and(|last| sort_key(last) >= sort_key(&item))
        {
            return Err("a tree is not sorted");
        }
        items.push(item);
    }
    // A file and a directory with the same name need not be adjacent: git sorts `a`, `a.b`, `a/`.
    let mut names: Vec<_> = items.iter().map(|item| item.name.as_slice()).collect();
    names.sort_unstable();
    if names
        .windows(2)
        .any(|pair| matches!(pair, [a, b] if a == b))
    {
        return Err("a tree has a name twice");
    }
    Ok(items)
}

/// Returns the key by which git sorts: a directory's name ends in a slash.
fn sort_key(item: &TreeEntry) -> Vec<u8> {
    let mut key = item.name.clone();
    if item.leaf.mode == TREE {
        key.push(b'/');
    }
    key
}

pub(super) fn read_tree(odb: &Odb<'_>, id: Oid) -> Result<Vec<TreeEntry>, GitError> {
    let object = odb.read(id).map_err(git(format!("read the tree {id}")))?;
    if object.kind() != ObjectType::Tree {
        return Err(bad_object("a tree is of another object type", id));
    }
    parse(object.data()).map_err(|why| bad_object(why, id))
}

fn bad_object(why: &str, id: Oid) -> GitError {
    GitError::BadObject {
        why: why.to_owned(),
        id,
    }
}

/// Returns every path of a tree.
pub(super) fn flatten(odb: &Odb<'_>, id: Oid) -> Result<BTreeMap<Vec<u8>, Leaf>, GitError> {
    let mut all = BTreeMap::new();
    visit_leaves(odb, id, &mut Vec::new(), 0, &mut |path, leaf| {
        all.insert(path.to_vec(), leaf);
        all.len()
    })?;
    Ok(all)
}

/// Calls `visit` for every path of a tree; `visit` returns the number of paths so far.
fn visit_leaves(
    odb: &Odb<'_>,
    id: Oid,
    prefix: &mut Vec<u8>,
    depth: usize,
    visit: &mut dyn FnMut(&[u8], Leaf) -> usize,
) -> Result<(), GitError> {
    if depth > MAX_DEPTH {
        return Err(bad_object("a tree is deeper than 256 directories", id));
    }
    for item in read_tree(odb, id)? {
        let length = prefix.len();
        prefix.extend_from_slice(&item.name);
        if item.leaf.mode == TREE {
            prefix.push(b'/');
            visit_leaves(odb, item.leaf.id, prefix, depth + 1, visit)?;
        } else if visit(prefix, item.leaf) > MAX_PATHS {
            return Err(bad_object("a tree has more than two million paths", id));
        }
        prefix.truncate(length);
    }
    Ok(())
}

/// Returns the differences between two trees; equal subtrees are not read.
pub(super) fn changes(
    odb: &Odb<'_>,
    old: Option<Oid>,
    new: Option<Oid>,
) -> Result<Vec<Change>, GitError> {
    let mut all = Vec::new();
    compare(odb, old, new, &mut Vec::new(), 0, &mut all)?;
    Ok(all)
}

fn compare(
    odb: &Odb<'_>,
    old: Option<Oid>,
    new: Option<Oid>,
    prefix: &mut Vec<u8>,
    depth: usize,
    all: &mut Vec<Change>,
) -> Result<(), GitError> {
    if old == new {
        return Ok(());
    }
    let id = new.or(old).unwrap_or(Oid::ZERO_SHA1);
    if depth > MAX_DEPTH || all.len() > MAX_PATHS {
        return Err(bad_object("a tree is too deep or too large", id));
    }
    let mut names: BTreeMap<Vec<u8>, (Option<Leaf>, Option<Leaf>)> = BTreeMap::new();
    if let Some(old) = old {
        for item in read_tree(odb, old)? {
            names.entry(item.name).or_default().0 = Some(item.leaf);
        }
    }
    if let Some(new) = new {
        for item in read_tree(odb, new)? {
            names.entry(item.name).or_default().1 = Some(item.leaf);
        }
    }
    let is_tree = |leaf: &Leaf| leaf.mode == TREE;
    for (name, (old, new)) in names {
        if old == new {
            continue;
        }
        let length = prefix.len();
        prefix.extend_from_slice(&name);
        let (old_leaf, new_leaf) = (old.filter(|l| !is_tree(l)), new.filter(|l| !is_tree(l)));
        if old_leaf.is_some() || new_leaf.is_some() {
            all.push(Change {
                path: prefix.clone(),
                old: old_leaf,
                new: new_leaf,
            });
        }
        let (old_tree, new_tree) = (old.filter(is_tree), new.filter(is_tree));
        prefix.push(b'/');
        compare(
            odb,
            old_tree.map(|leaf| leaf.id),
            new_tree.map(|leaf| leaf.id),
            prefix,
            depth + 1,
            all,
        )?;
        prefix.truncate(length);
    }
    Ok(())
}

/// Writes the trees of these sorted paths and returns the root. Existing trees are not written
/// again, so an unchanged workspace writes nothing.
pub(super) fn write(odb: &Odb<'_>, rows: &[(&[u8], Leaf)]) -> Result<Oid, GitError> {
    write_below(odb, rows, 0)
}

fn write_below(odb: &Odb<'_>, rows: &[(&[u8], Leaf)], skip: usize) -> Result<Oid, GitError> {
    let mut items: Vec<TreeEntry> = Vec::new();
    let mut rest = rows;
    while let Some((path, leaf)) = rest.first() {
        let below = path.get(skip..).unwrap_or_default();
        match below.iter().position(|b| *b == b'/') {
            None => {
                items.push(TreeEntry {
                    name: below.to_vec(),
                    leaf: *leaf,
                });
                rest = rest.get(1..).unwrap_or_default();
            }
            Some(slash) => {
                let prefix = path.get(..=skip + slash).unwrap_or_default();
                let count = rest
                    .iter()
                    .take_while(|(path, _)| path.starts_with(prefix))
                    .count();
                let (below_directory, after) = rest.split_at(count);
                let id = write_below(odb, below_directory, skip + slash + 1)?;
                let name = below.get(..slash).unwrap_or_default().to_vec();
                items.push(TreeEntry {
                    name,
                    leaf: Leaf { mode: TREE, id },
                });
                rest = after;
            }
        }
    }
    items.sort_by_cached_key(sort_key);
    let mut bytes = Vec::with_capacity(items.len() * 48);
    for item in &items {
        bytes.extend_from_slice(format!("{:o} ", item.leaf.mode).as_bytes());
        bytes.extend_from_slice(&item.name);
        bytes.push(0);
        bytes.extend_from_slice(item.leaf.id.as_bytes());
    }
    let id = Oid::hash_object(ObjectType::Tree, &bytes).map_err(git("hash a tree"))?;
    if odb.exists_ext(id, OdbLookupFlags::NO_REFRESH) {
        return Ok(id);
    }
    parse(&bytes).map_err(|why| bad_object(why, id))?;
    odb.write(ObjectType::Tree, &bytes)
        .map_err(git("write a tree"))
}
