//! The same on many items at once.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

/// How many items a worker takes at a time.
const BATCH: usize = 32;

/// Asks every item something that takes time and no processor, `at_once` at a time. The
/// answers are in the items' order.
pub(crate) fn ask_all<T: Sync, R: Send>(
    items: &[T],
    at_once: usize,
    ask: impl Fn(&T) -> R + Sync,
) -> Vec<R> {
    let next = AtomicUsize::new(0);
    let run = || {
        let mut answers = Vec::new();
        loop {
            let place = next.fetch_add(1, Ordering::Relaxed);
            let Some(item) = items.get(place) else {
                return answers;
            };
            answers.push((place, ask(item)));
        }
    };
    let askers = at_once.min(items.len());
    let mut answers = if askers < 2 {
        run()
    } else {
        std::thread::scope(|scope| {
            let askers: Vec<_> = (0..askers).map(|_| scope.spawn(run)).collect();
            let mut all = Vec::with_capacity(items.len());
            for asker in askers {
                match asker.join() {
                    Ok(answers) => all.extend(answers),
                    Err(panic) => std::panic::resume_unwind(panic),
                }
            }
            all
        })
    };
    answers.sort_unstable_by_key(|(place, _)| *place);
    answers.into_iter().map(|(_, answer)| answer).collect()
}

/// Does `work` on every item, on as many threads as there are cores (eight at most), each
/// with a state of its own. The first failure ends it; the results come in no order.
pub(crate) fn parallel<T: Sync, S, R: Send, E: Send>(
    items: &[T],
    start: impl Fn() -> Result<S, E> + Sync,
    work: impl Fn(&mut S, &T) -> Result<R, E> + Sync,
) -> Result<Vec<R>, E> {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let threads = cores.clamp(1, 8).min(items.len().div_ceil(BATCH)).max(1);
    let next = AtomicUsize::new(0);
    let failed = AtomicBool::new(false);
    let run = || {
        let mut state = start()?;
        let mut done = Vec::new();
        while !failed.load(Ordering::Relaxed) {
            let from = next.fetch_add(BATCH, Ordering::Relaxed);
            let Some(rest) = items.get(from..).filter(|rest| !rest.is_empty()) else {
                break;
            };
            for item in rest.iter().take(BATCH) {
                done.push(work(&mut state, item)?);
            }
        }
        Ok(done)
    };
    let marked = || run().inspect_err(|_| failed.store(true, Ordering::Relaxed));
    if threads == 1 {
        return marked();
    }
    std::thread::scope(|scope| {
        let workers: Vec<_> = (0..threads).map(|_| scope.spawn(marked)).collect();
        let mut all = Vec::with_capacity(items.len());
        for worker in workers {
            match worker.join() {
                Ok(done) => all.extend(done?),
                Err(panic) => std::panic::resume_unwind(panic),
            }
        }
        Ok(all)
    })
}

#[cfg(test)]
mod tests {
    use std::sync::Barrier;

    use super::*;

    #[test]
    fn as_many_are_asked_at_once_and_their_answers_keep_their_order() {
        let items: Vec<usize> = (0..40).collect();
        // Nobody gets an answer before four have asked.
        let four = Barrier::new(4);
        let answers = ask_all(&items, 4, |item| {
            four.wait();
            item * 2
        });
        assert_eq!(answers, (0..80).step_by(2).collect::<Vec<_>>());
        assert_eq!(ask_all(&items[..1], 4, |item| *item), [0]);
        assert_eq!(ask_all(&items[..0], 4, |item| *item), [0; 0]);
    }
}
