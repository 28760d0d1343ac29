//! Budget of processor time of a thread. Time in which the thread waits does not count.

use std::time::Duration;

use nix::time::{ClockId, clock_gettime};

/// The remaining processor time of a thread.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CpuBudget {
    /// The processor time of the thread at which the budget is exhausted.
    end: Duration,
}

impl CpuBudget {
    /// A budget that starts now, for the calling thread.
    pub(crate) fn new(time: Duration) -> Self {
        Self {
            end: thread_cpu_time().saturating_add(time),
        }
    }

    pub(crate) fn is_exhausted(self) -> bool {
        thread_cpu_time() >= self.end
    }
}

/// Returns the processor time of this thread; `Duration::MAX` if the clock cannot be read.
fn thread_cpu_time() -> Duration {
    clock_gettime(ClockId::CLOCK_THREAD_CPUTIME_ID).map_or(Duration::MAX, Duration::from)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn budget_counts_only_processor_time() {
        let budget = CpuBudget::new(Duration::from_millis(20));
        assert!(CpuBudget::new(Duration::ZERO).is_exhausted());
        let _ = nix::poll::poll(&mut [], nix::poll::PollTimeout::from(50_u8));
        assert!(!budget.is_exhausted(), "waiting does not count");
        while !budget.is_exhausted() {
            std::hint::spin_loop();
        }
    }
}
