//! Fast-forward check of ref updates.

use std::collections::HashSet;

use policy::push::PushContext;
use policy::refs::ObjectId;

use super::object_index::ObjectIndex;
use super::restricted_paths::peel;

/// Maximum number of commits visited for all updates together; beyond it the result is unknown.
const MAX_COMMITS_VISITED: usize = 4_000_000;

/// Returns, for each update, whether `new` descends from `old`; `None` if that is unknown.
pub(super) fn fast_forwards(
    context: &PushContext,
    object_index: &ObjectIndex<'_>,
) -> Vec<Option<bool>> {
    let mut steps = MAX_COMMITS_VISITED;
    let updates = context.updates.iter();
    updates
        .map(|update| {
            if update.old.is_zero() || update.new.is_zero() {
                return None;
            }
            descends(object_index, update.new, update.old, &mut steps)
        })
        .collect()
}

fn descends(
    object_index: &ObjectIndex<'_>,
    from: ObjectId,
    to: ObjectId,
    steps: &mut usize,
) -> Option<bool> {
    if from == to {
        return Some(true);
    }
    let (from, to) = (peel(object_index, from), peel(object_index, to));
    let mut seen = HashSet::from([from]);
    let mut waiting = vec![from];
    let mut is_complete = true;
    while let Some(id) = waiting.pop() {
        if id == to {
            return Some(true);
        }
        *steps = steps.checked_sub(1)?;
        let Some(commit) = object_index.commits.get(&id) else {
            is_complete = false;
            continue;
        };
        waiting.extend(commit.parents.iter().filter(|parent| seen.insert(**parent)));
    }
    is_complete.then_some(false)
}
