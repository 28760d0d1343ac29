//! Compares the restricted paths of a push with upstream's.
//!
//! Every commit of the push is compared, not only the tips: a later push can point a ref at any
//! commit that upstream already has, without sending it again. A commit leaves a path unchanged if
//! it has the same entry there as one of upstream's tips, or as all of its parents. A merge whose
//! parents differ must match a tip: taking the other parent's version may revert a fix.
//!
//! Entries are compared by id, so the trees below them need not be known. For a tree on the path
//! that is not known, its id is compared instead of its contents.

use std::collections::{HashMap, HashSet};
use std::rc::Rc;

use policy::push::{PushContext, RestrictedPathChange};
use policy::refs::ObjectId;

use super::error::PackError;
use super::object::DIRECTORY;
use super::object_index::{Commit, ObjectIndex};

/// Maximum number of spellings of one path in a tree.
const MAX_PATH_SPELLINGS: usize = 1000;

/// All entries that match a path; empty if there are none.
type PathEntries = Rc<Vec<PathEntry>>;

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct PathEntry {
    path: Vec<u8>,
    /// `None` if the tree with this name is not known.
    mode: Option<u32>,
    id: ObjectId,
}

/// Returns the most severe change to a restricted path in the push.
pub(super) fn compare(
    context: &PushContext,
    object_index: &ObjectIndex<'_>,
) -> Result<RestrictedPathChange, PackError> {
    let mut comparison = PathComparison {
        object_index,
        values: HashMap::new(),
    };
    let tips: Vec<&Commit> = context
        .default_tip
        .iter()
        .chain(context.updates.iter().map(|update| &update.old))
        .filter_map(|id| object_index.commits.get(&peel(object_index, *id)))
        .filter(|commit| !commit.is_pushed)
        .collect();
    let mut most_severe = RestrictedPathChange::Untouched;
    for (path, _) in object_index.restricted_names.paths.iter().enumerate() {
        let mut known = HashSet::new();
        for tip in &tips {
            known.insert(comparison.entries_at(&tip.tree, path)?);
        }
        for commit in object_index
            .commits
            .values()
            .filter(|commit| commit.is_pushed)
        {
            let found = comparison.compare(commit, path, &known)?;
            most_severe = more_severe(most_severe, found);
        }
    }
    if !object_index.restricted_names.paths.is_empty() {
        for update in context
            .updates
            .iter()
            .filter(|update| !update.is_deletion())
        {
            let tip = peel(object_index, update.new);
            // A commit that is in none of these packs came with an earlier push, or from a fork,
            // and was never compared.
            if context.default_tip != Some(tip) && !object_index.commits.contains_key(&tip) {
                most_severe = more_severe(most_severe, RestrictedPathChange::Unknown);
            }
        }
    }
    Ok(most_severe)
}

/// Follows annotated tags that are in the index.
pub(super) fn peel(object_index: &ObjectIndex<'_>, id: ObjectId) -> ObjectId {
    let mut id = id;
    // The loop ends, because a tag cannot contain its own hash.
    while let Some(target) = object_index.tags.get(&id) {
        id = *target;
    }
    id
}

/// Returns the more severe of two results.
fn more_severe(one: RestrictedPathChange, other: RestrictedPathChange) -> RestrictedPathChange {
    match (one, other) {
        (RestrictedPathChange::Changed, _) | (_, RestrictedPathChange::Changed) => {
            RestrictedPathChange::Changed
        }
        (RestrictedPathChange::Unknown, _) | (_, RestrictedPathChange::Unknown) => {
            RestrictedPathChange::Unknown
        }
        (RestrictedPathChange::Untouched, RestrictedPathChange::Untouched) => {
            RestrictedPathChange::Untouched
        }
    }
}

struct PathComparison<'a, 'd> {
    object_index: &'a ObjectIndex<'d>,
    /// Cache by tree and path, because commits share trees.
    values: HashMap<(ObjectId, usize), PathEntries>,
}

impl PathComparison<'_, '_> {
    fn compare(
        &mut self,
        commit: &Commit,
        path: usize,
        known: &HashSet<PathEntries>,
    ) -> Result<RestrictedPathChange, PackError> {
        let value = self.entries_at(&commit.tree, path)?;
        if known.contains(&value) {
            return Ok(RestrictedPathChange::Untouched);
        }
        // The commit does not have the path, and no upstream version of the path is known.
        let is_absent_everywhere = value.is_empty() && known.is_empty();
        let mut equals_parents = true;
        for parent in &commit.parents {
            let Some(parent) = self.object_index.commits.get(parent) else {
                return Ok(if is_absent_everywhere {
                    RestrictedPathChange::Untouched
                } else {
                    RestrictedPathChange::Unknown
                });
            };
            equals_parents &= self.entries_at(&parent.tree, path)? == value;
        }
        let has_unknown_entry = value.iter().any(|entry| entry.mode.is_none());
        Ok(match (commit.parents.is_empty(), equals_parents) {
            (false, true) => RestrictedPathChange::Untouched,
            (true, _) if is_absent_everywhere => RestrictedPathChange::Untouched,
            (true, _) if known.is_empty() => RestrictedPathChange::Unknown,
            _ if has_unknown_entry => RestrictedPathChange::Unknown,
            _ => RestrictedPathChange::Changed,
        })
    }

    fn entries_at(&mut self, tree: &ObjectId, path: usize) -> Result<PathEntries, PackError> {
        if let Some(value) = self.values.get(&(*tree, path)) {
            return Ok(Rc::clone(value));
        }
        let mut entries = Vec::new();
        let components = self.object_index.restricted_names.paths.get(path);
        let components = components.map(Vec::as_slice).unwrap_or_default();
        self.collect_entries(tree, components, &[], &mut entries)?;
        let value = Rc::new(entries);
        self.values.insert((*tree, path), Rc::clone(&value));
        Ok(value)
    }

    fn collect_entries(
        &self,
        tree: &ObjectId,
        components: &[usize],
        prefix: &[u8],
        entries: &mut Vec<PathEntry>,
    ) -> Result<(), PackError> {
        let Some((first, rest)) = components.split_first() else {
            return Ok(());
        };
        if entries.len() > MAX_PATH_SPELLINGS {
            return Err(PackError::TooMuch {
                what: "the number of spellings of a restricted path",
                bound: MAX_PATH_SPELLINGS as u64,
            });
        }
        let Some(restricted_entries) = self.object_index.trees.get(tree) else {
            entries.push(PathEntry {
                path: prefix.to_vec(),
                mode: None,
                id: *tree,
            });
            return Ok(());
        };
        for found in restricted_entries
            .iter()
            .filter(|found| found.component == *first)
        {
            let mut path = prefix.to_vec();
            path.push(b'/');
            path.extend_from_slice(&found.name);
            if rest.is_empty() || found.mode != DIRECTORY {
                entries.push(PathEntry {
                    path,
                    mode: Some(found.mode),
                    id: found.id,
                });
            } else {
                self.collect_entries(&found.id, rest, &path, entries)?;
            }
        }
        Ok(())
    }
}
