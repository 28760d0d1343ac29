//! What a push does to restricted paths.
//!
//! Every commit of the push is judged, not only those a ref will point at: what is upstream
//! once, a later push can point at without sending it again. A commit leaves a path alone when
//! it has there what upstream's own tips have, or what all its parents have. A merge whose
//! parents differ must have what a tip has: taking the other side's may undo a repair.
//!
//! What is at a path is compared by ids, so nothing below it need be known. Where a tree on the
//! way is not known, its own id stands for all that is below.

use std::collections::{HashMap, HashSet};
use std::rc::Rc;

use policy::push::{Case, Restricted};
use policy::refs::ObjectId;

use super::error::PackError;
use super::learnt::{Commit, Learnt};
use super::object::DIRECTORY;

/// How many spellings of one path a tree may have.
const MOST_SPOTS: usize = 1000;

/// What lies at a path: nothing, or every entry that means it.
type Value = Rc<Vec<Spot>>;

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Spot {
    path: Vec<u8>,
    /// None where the tree of this name is not known.
    mode: Option<u32>,
    id: ObjectId,
}

/// Judges the push.
pub(super) fn judge(case: &Case, learnt: &Learnt<'_>) -> Result<Restricted, PackError> {
    let mut look = Look {
        learnt,
        values: HashMap::new(),
    };
    let tips: Vec<&Commit> = case
        .default_tip
        .iter()
        .chain(case.updates.iter().map(|update| &update.old))
        .filter_map(|id| learnt.commits.get(&peel(learnt, *id)))
        .filter(|commit| !commit.is_pushed)
        .collect();
    let mut worst = Restricted::Untouched;
    for (path, _) in learnt.spelling.paths.iter().enumerate() {
        let mut known = HashSet::new();
        for tip in &tips {
            known.insert(look.value(&tip.tree, path)?);
        }
        for commit in learnt.commits.values().filter(|commit| commit.is_pushed) {
            let found = look.judge(commit, path, &known)?;
            worst = worse(worst, found);
        }
    }
    if !learnt.spelling.paths.is_empty() {
        for update in case.updates.iter().filter(|update| !update.is_deletion()) {
            let tip = peel(learnt, update.new);
            // A commit that is not here came with an earlier push, or from a fork: nobody has
            // looked at it.
            if case.default_tip != Some(tip) && !learnt.commits.contains_key(&tip) {
                worst = worse(worst, Restricted::Unknown);
            }
        }
    }
    Ok(worst)
}

/// What a ref points at, through tags that are here.
pub(super) fn peel(learnt: &Learnt<'_>, id: ObjectId) -> ObjectId {
    let mut id = id;
    // A tag cannot contain its own hash, so this ends; a tag of a tag of a tag is rare.
    while let Some(target) = learnt.tags.get(&id) {
        id = *target;
    }
    id
}

fn worse(one: Restricted, other: Restricted) -> Restricted {
    match (one, other) {
        (Restricted::Changed, _) | (_, Restricted::Changed) => Restricted::Changed,
        (Restricted::Unknown, _) | (_, Restricted::Unknown) => Restricted::Unknown,
        (Restricted::Untouched, Restricted::Untouched) => Restricted::Untouched,
    }
}

struct Look<'a, 'd> {
    learnt: &'a Learnt<'d>,
    /// By tree and path; commits share trees.
    values: HashMap<(ObjectId, usize), Value>,
}

impl Look<'_, '_> {
    fn judge(
        &mut self,
        commit: &Commit,
        path: usize,
        known: &HashSet<Value>,
    ) -> Result<Restricted, PackError> {
        let value = self.value(&commit.tree, path)?;
        if known.contains(&value) {
            return Ok(Restricted::Untouched);
        }
        // Nothing is there, and nobody says that there should be.
        let is_harmless = value.is_empty() && known.is_empty();
        let mut is_same = true;
        for parent in &commit.parents {
            let Some(parent) = self.learnt.commits.get(parent) else {
                return Ok(if is_harmless {
                    Restricted::Untouched
                } else {
                    Restricted::Unknown
                });
            };
            is_same &= self.value(&parent.tree, path)? == value;
        }
        let is_unclear = value.iter().any(|spot| spot.mode.is_none());
        Ok(match (commit.parents.is_empty(), is_same) {
            (false, true) => Restricted::Untouched,
            (true, _) if is_harmless => Restricted::Untouched,
            (true, _) if known.is_empty() => Restricted::Unknown,
            _ if is_unclear => Restricted::Unknown,
            _ => Restricted::Changed,
        })
    }

    fn value(&mut self, tree: &ObjectId, path: usize) -> Result<Value, PackError> {
        if let Some(value) = self.values.get(&(*tree, path)) {
            return Ok(Rc::clone(value));
        }
        let mut spots = Vec::new();
        let components = self.learnt.spelling.paths.get(path);
        let components = components.map(Vec::as_slice).unwrap_or_default();
        self.look(tree, components, &[], &mut spots)?;
        let value = Rc::new(spots);
        self.values.insert((*tree, path), Rc::clone(&value));
        Ok(value)
    }

    fn look(
        &self,
        tree: &ObjectId,
        components: &[usize],
        above: &[u8],
        spots: &mut Vec<Spot>,
    ) -> Result<(), PackError> {
        let Some((first, rest)) = components.split_first() else {
            return Ok(());
        };
        if spots.len() > MOST_SPOTS {
            return Err(PackError::TooMuch {
                what: "the number of spellings of a restricted path",
                bound: MOST_SPOTS as u64,
            });
        }
        let Some(marks) = self.learnt.trees.get(tree) else {
            spots.push(Spot {
                path: above.to_vec(),
                mode: None,
                id: *tree,
            });
            return Ok(());
        };
        for mark in marks.iter().filter(|mark| mark.component == *first) {
            let mut path = above.to_vec();
            path.push(b'/');
            path.extend_from_slice(&mark.name);
            if rest.is_empty() || mark.mode != DIRECTORY {
                spots.push(Spot {
                    path,
                    mode: Some(mark.mode),
                    id: mark.id,
                });
            } else {
                self.look(&mark.id, rest, &path, spots)?;
            }
        }
        Ok(())
    }
}
