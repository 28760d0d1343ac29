//! The same work on many items, on as many threads as there are cores.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

/// How many items a worker takes at a time.
const BATCH: usize = 32;

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
