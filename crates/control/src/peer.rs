//! The peer of a control connection: whether it may speak, and how often it may write.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use policy::clock::Tick;
use policy::window::SlidingWindow;

/// Writes to the registry that one uid may make within a second.
const WRITES_PER_SECOND: usize = 10;

/// Who is on the other end of one connection.
#[derive(Debug)]
pub(crate) struct Peer {
    allowed: bool,
    writes: Arc<WriteWindow>,
}

impl Peer {
    /// A peer that `allowed` says may speak, and whose writes count in `writes`.
    pub(crate) fn new(allowed: bool, writes: Arc<WriteWindow>) -> Self {
        Self { allowed, writes }
    }

    /// Whether this uid may speak to this gate at all.
    pub(crate) fn is_allowed(&self) -> bool {
        self.allowed
    }

    /// Counts one write; refused beyond the limit, with the time to wait.
    pub(crate) fn count_write(&self) -> Result<(), Duration> {
        self.writes.take()
    }
}

/// The writes of the last second. The limit is per uid, and only one uid gets this far.
#[derive(Debug)]
pub(crate) struct WriteWindow {
    origin: Instant,
    window: Mutex<SlidingWindow<WRITES_PER_SECOND>>,
}

impl Default for WriteWindow {
    fn default() -> Self {
        let window = Mutex::new(SlidingWindow::new(Duration::from_secs(1)));
        Self {
            origin: Instant::now(),
            window,
        }
    }
}

impl WriteWindow {
    fn take(&self) -> Result<(), Duration> {
        let now = Tick::default() + self.origin.elapsed();
        self.window
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take(now)
    }
}
