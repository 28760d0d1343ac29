//! Runs a function on many items in parallel.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

/// Items that a thread takes at a time.
const BATCH_SIZE: usize = 32;

/// Calls `call` for every item, on at most `max_threads` threads, for calls that wait and need no
/// processor time. The results are in the items' order.
pub(crate) fn map_concurrent<T: Sync, R: Send>(
    items: &[T],
    max_threads: usize,
    call: impl Fn(&T) -> R + Sync,
) -> Vec<R> {
    let next = AtomicUsize::new(0);
    let run = || {
        let mut results = Vec::new();
        loop {
            let index = next.fetch_add(1, Ordering::Relaxed);
            let Some(item) = items.get(index) else {
                return results;
            };
            results.push((index, call(item)));
        }
    };
    let threads = max_threads.min(items.len());
    let mut results = if threads < 2 {
        run()
    } else {
        std::thread::scope(|scope| {
            let threads: Vec<_> = (0..threads).map(|_| scope.spawn(run)).collect();
            let mut all = Vec::with_capacity(items.len());
            for thread in threads {
                match thread.join() {
                    Ok(results) => all.extend(results),
                    Err(panic) => std::panic::resume_unwind(panic),
                }
            }
            all
        })
    };
    results.sort_unstable_by_key(|(index, _)| *index);
    results.into_iter().map(|(_, result)| result).collect()
}

/// Calls `work` for every item, on one thread for each core (at most eight), each with its own
/// state. The first error ends the work; the results are in no order.
pub(crate) fn parallel<T: Sync, S, R: Send, E: Send>(
    items: &[T],
    start: impl Fn() -> Result<S, E> + Sync,
    work: impl Fn(&mut S, &T) -> Result<R, E> + Sync,
) -> Result<Vec<R>, E> {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let threads = cores
        .clamp(1, 8)
        .min(items.len().div_ceil(BATCH_SIZE))
        .max(1);
    let next = AtomicUsize::new(0);
    let failed = AtomicBool::new(false);
    let run = || {
        let mut state = start()?;
        let mut done = Vec::new();
        while !failed.load(Ordering::Relaxed) {
            let from = next.fetch_add(BATCH_SIZE, Ordering::Relaxed);
            let Some(rest) = items.get(from..).filter(|rest| !rest.is_empty()) else {
                break;
            };
            for item in rest.iter().take(BATCH_SIZE) {
                done.push(work(&mut state, item)?);
            }
        }
        Ok(done)
    };
    let run_and_mark = || run().inspect_err(|_| failed.store(true, Ordering::Relaxed));
    if threads == 1 {
        return run_and_mark();
    }
    std::thread::scope(|scope| {
        let workers: Vec<_> = (0..threads).map(|_| scope.spawn(run_and_mark)).collect();
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
    fn map_concurrent_runs_at_once_and_keeps_order() {
        let items: Vec<usize> = (0..40).collect();
        // No call returns before four calls run.
        let four = Barrier::new(4);
        let results = map_concurrent(&items, 4, |item| {
            four.wait();
            item * 2
        });
        assert_eq!(results, (0..80).step_by(2).collect::<Vec<_>>());
        assert_eq!(map_concurrent(&items[..1], 4, |item| *item), [0]);
        assert_eq!(map_concurrent(&items[..0], 4, |item| *item), [0; 0]);
    }
}
