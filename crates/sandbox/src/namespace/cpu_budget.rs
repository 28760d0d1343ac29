//! Budget of processor time: waiting for the processor does not count.

use std::time::Duration;

use nix::time::{ClockId, clock_gettime};

/// The remaining processor time of a thread.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CpuBudget {
    until: Duration,
}

impl CpuBudget {
    /// A budget that starts now, for the calling thread.
    pub(crate) fn of(time: Duration) -> Self {
        Self {
            until: spent().saturating_add(time),
        }
    }

    pub(crate) fn is_over(self) -> bool {
        spent() >= self.until
    }
}

/// The processor time of this thread; the maximum if there is no clock.
fn spent() -> Duration {
    clock_gettime(ClockId::CLOCK_THREAD_CPUTIME_ID).map_or(Duration::MAX, Duration::from)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn budget_counts_only_processor_time() {
        let budget = CpuBudget::of(Duration::from_millis(20));
        assert!(CpuBudget::of(Duration::ZERO).is_over());
        let _ = nix::poll::poll(&mut [], nix::poll::PollTimeout::from(50_u8));
        assert!(!budget.is_over(), "waiting does not count");
        while !budget.is_over() {
            std::hint::spin_loop();
        }
    }
}
