//! Whether a ref only goes forward.

use std::collections::HashSet;

use policy::push::Case;
use policy::refs::ObjectId;

use super::learnt::Learnt;
use super::restricted::peel;

/// How many commits are looked at for all updates together; what is not found by then is not
/// known.
const MOST_STEPS: usize = 4_000_000;

/// For each update, whether `new` descends from `old`.
pub(super) fn fast_forwards(case: &Case, learnt: &Learnt<'_>) -> Vec<Option<bool>> {
    let mut steps = MOST_STEPS;
    let updates = case.updates.iter();
    updates
        .map(|update| {
            if update.old.is_zero() || update.new.is_zero() {
                return None;
            }
            descends(learnt, update.new, update.old, &mut steps)
        })
        .collect()
}

fn descends(learnt: &Learnt<'_>, from: ObjectId, to: ObjectId, steps: &mut usize) -> Option<bool> {
    if from == to {
        return Some(true);
    }
    let (from, to) = (peel(learnt, from), peel(learnt, to));
    let mut seen = HashSet::from([from]);
    let mut waiting = vec![from];
    let mut is_complete = true;
    while let Some(id) = waiting.pop() {
        if id == to {
            return Some(true);
        }
        *steps = steps.checked_sub(1)?;
        let Some(commit) = learnt.commits.get(&id) else {
            is_complete = false;
            continue;
        };
        waiting.extend(commit.parents.iter().filter(|parent| seen.insert(**parent)));
    }
    is_complete.then_some(false)
}
