//! Under which path a file lies that holds a secret. Asked only when there is one: it takes
//! another reading of the pack.

use std::collections::{HashMap, HashSet};
use std::fs::File;

use policy::push::{ObjectFormat, Place, Sighting};
use policy::refs::ObjectId;

use super::bases::Bases;
use super::error::PackError;
use super::object::{self, Kind};
use super::pack::{self, Visitor};

/// How many entries are remembered; a file that only later trees name has no path then.
const MOST_EDGES: usize = 2_000_000;
const LONGEST_PATH: usize = 1024;

/// Fills in the paths of the files among `sightings`. `roots` are the trees of commits.
pub(super) fn fill_in(
    sightings: &mut [Sighting],
    roots: &HashSet<ObjectId>,
    (file, begin): (&File, u64),
    bases: &Bases<'_>,
) -> Result<(), PackError> {
    let is_blob = |sighting: &Sighting| matches!(sighting.place, Place::Blob { .. });
    if !sightings.iter().any(is_blob) {
        return Ok(());
    }
    let mut edges = Edges {
        format: bases.format,
        names: HashMap::new(),
        parents: HashMap::new(),
        kind: Kind::Blob,
        tree: Vec::new(),
    };
    let mut lender = |wanted: &HashSet<ObjectId>| bases.lend(wanted);
    pack::read(
        file,
        begin,
        bases.format,
        bases.bounds,
        &mut lender,
        &mut edges,
    )?;
    for sighting in sightings {
        if let Place::Blob { id, path } = &mut sighting.place {
            *path = edges.path_of(*id, roots);
        }
    }
    Ok(())
}

struct Edges {
    format: ObjectFormat,
    /// Every name, once.
    names: HashMap<Box<[u8]>, usize>,
    /// For each object, a tree that names it, and how.
    parents: HashMap<ObjectId, (ObjectId, usize)>,
    kind: Kind,
    tree: Vec<u8>,
}

impl Edges {
    fn path_of(&self, id: ObjectId, roots: &HashSet<ObjectId>) -> Option<String> {
        let spelt: HashMap<usize, &[u8]> = self
            .names
            .iter()
            .map(|(name, place)| (*place, &**name))
            .collect();
        let mut parts = Vec::new();
        let mut length = 0;
        let mut at = id;
        while parts.is_empty() || !roots.contains(&at) {
            let Some((tree, name)) = self.parents.get(&at) else {
                break;
            };
            let name = spelt.get(name)?;
            length += name.len() + 1;
            if length > LONGEST_PATH {
                return None;
            }
            parts.push(String::from_utf8_lossy(name));
            at = *tree;
        }
        parts.reverse();
        (!parts.is_empty()).then(|| parts.join("/"))
    }
}

impl Visitor for Edges {
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
            if self.parents.len() >= MOST_EDGES || self.parents.contains_key(&entry.id) {
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
