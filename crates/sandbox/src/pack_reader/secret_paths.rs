//! Finds the paths of blobs that hold a secret. The search needs another pass over the pack and
//! runs only if a secret was found.

use std::collections::{HashMap, HashSet};
use std::fs::File;

use policy::push::{ObjectFormat, SecretFinding, SecretLocation};
use policy::refs::ObjectId;

use super::base_packs::BasePacks;
use super::error::PackError;
use super::object::{self, Kind};
use super::pack::{self, Visitor};

/// Maximum number of indexed tree entries; a blob that only later trees name gets no path.
const MAX_TREE_ENTRIES: usize = 2_000_000;
/// Maximum length of a reported path.
const MAX_PATH_BYTES: usize = 1024;

/// Sets the paths of the blobs among `sightings`. `roots` are the trees of commits.
pub(super) fn resolve_paths(
    sightings: &mut [SecretFinding],
    roots: &HashSet<ObjectId>,
    (file, begin): (&File, u64),
    bases: &BasePacks<'_>,
) -> Result<(), PackError> {
    let is_blob = |sighting: &SecretFinding| matches!(sighting.place, SecretLocation::Blob { .. });
    if !sightings.iter().any(is_blob) {
        return Ok(());
    }
    let mut edges = TreeEdges {
        format: bases.format,
        names: HashMap::new(),
        parents: HashMap::new(),
        kind: Kind::Blob,
        tree: Vec::new(),
    };
    let mut load_bases = |wanted: &HashSet<ObjectId>| bases.load(wanted);
    pack::read(
        file,
        begin,
        bases.format,
        bases.bounds,
        &mut load_bases,
        &mut edges,
    )?;
    for sighting in sightings {
        if let SecretLocation::Blob { id, path } = &mut sighting.place {
            *path = edges.path_of(*id, roots);
        }
    }
    Ok(())
}

struct TreeEdges {
    format: ObjectFormat,
    /// The index of each distinct name.
    names: HashMap<Box<[u8]>, usize>,
    /// One parent tree of each object, and the index of its name there.
    parents: HashMap<ObjectId, (ObjectId, usize)>,
    kind: Kind,
    tree: Vec<u8>,
}

impl TreeEdges {
    fn path_of(&self, id: ObjectId, roots: &HashSet<ObjectId>) -> Option<String> {
        let by_index: HashMap<usize, &[u8]> = self
            .names
            .iter()
            .map(|(name, index)| (*index, &**name))
            .collect();
        let mut parts = Vec::new();
        let mut length = 0;
        let mut current = id;
        while parts.is_empty() || !roots.contains(&current) {
            let Some((tree, name)) = self.parents.get(&current) else {
                break;
            };
            let name = by_index.get(name)?;
            length += name.len() + 1;
            if length > MAX_PATH_BYTES {
                return None;
            }
            parts.push(String::from_utf8_lossy(name));
            current = *tree;
        }
        parts.reverse();
        (!parts.is_empty()).then(|| parts.join("/"))
    }
}

impl Visitor for TreeEdges {
    fn begin(&mut self, kind: Kind) {
        self.kind = kind;
        self.tree.clear();
    }

    fn bytes(&mut self, piece: &[u8]) {
        if self.kind == Kind::Tree {
            self.tree.extend_from_slice(piece);
        }
    }

    fn end(&mut self, id: ObjectId) -> Result<(), PackError> {
        for entry in object::entries(&self.tree, self.format) {
            let entry = entry?;
            if self.parents.len() >= MAX_TREE_ENTRIES || self.parents.contains_key(&entry.id) {
                continue;
            }
            let next = self.names.len();
            let name = match self.names.get(entry.name) {
                Some(name) => *name,
                None => {
                    self.names.insert(entry.name.into(), next);
                    next
                }
            };
            self.parents.insert(entry.id, (id, name));
        }
        Ok(())
    }
}
