//! Work that may take so much of a processor's time: a thread that others keep from working is
//! not late.

use std::time::Duration;

use nix::time::{ClockId, clock_gettime};

/// How much this thread may still work.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CpuBudget {
    until: Duration,
}

impl CpuBudget {
    /// From now on so much. For the thread that makes it.
    pub(crate) fn of(time: Duration) -> Self {
        Self {
            until: spent().saturating_add(time),
        }
    }

    pub(crate) fn is_over(self) -> bool {
        spent() >= self.until
    }
}

/// What this thread has worked; without a clock, more than anybody may.
fn spent() -> Duration {
    clock_gettime(ClockId::CLOCK_THREAD_CPUTIME_ID).map_or(Duration::MAX, Duration::from)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_work_counts() {
        let budget = CpuBudget::of(Duration::from_millis(20));
        assert!(CpuBudget::of(Duration::ZERO).is_over());
        let _ = nix::poll::poll(&mut [], nix::poll::PollTimeout::from(50_u8));
        assert!(!budget.is_over(), "it has only waited");
        while !budget.is_over() {
            std::hint::spin_loop();
        }
    }
}
