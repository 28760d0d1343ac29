//! The peer of a control connection: its access and its rate limit for writes.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use policy::clock::Tick;
use policy::window::SlidingWindow;

/// Registry writes that one uid may make per second.
const WRITES_PER_SECOND: usize = 10;

/// The peer of one connection.
#[derive(Debug)]
pub(crate) struct Peer {
    allowed: bool,
    writes: Arc<WriteWindow>,
}

impl Peer {
    /// A peer with or without access, whose writes count in `writes`.
    pub(crate) fn new(allowed: bool, writes: Arc<WriteWindow>) -> Self {
        Self { allowed, writes }
    }

    /// Whether this uid has access to this gate.
    pub(crate) fn is_allowed(&self) -> bool {
        self.allowed
    }

    /// Counts one write; beyond the limit, the error is the time to wait.
    pub(crate) fn count_write(&self) -> Result<(), Duration> {
        self.writes.take()
    }
}

/// The writes of the last second. The limit is per uid, and only one uid has access.
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
