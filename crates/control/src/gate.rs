//! The running gate: the parts that actions work on.

use std::path::PathBuf;
use std::sync::Arc;

use decide::snapshot::CurrentPolicy;
use egress::services::Services;
use mcp::bridge::Bridge;
use prometheus_client::registry::Registry;
use store::Store;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc, oneshot};
use tokio_util::sync::CancellationToken;

use crate::health::HealthRegistry;
use crate::metrics::ControlMetrics;
use crate::reply::ControlError;
use crate::sandboxes::Sandboxes;

/// Asks the reloader to read the files now; it answers with the changed keys, or with
/// the text of every problem.
pub type ReloadRequest = oneshot::Sender<Result<Vec<String>, String>>;

/// Answers that stream at once. A fraction of the door's connections, so that followers
/// who never leave cannot keep everybody else out.
const MAX_STREAMS: usize = 64;

/// Places for streaming answers.
#[derive(Clone, Debug)]
pub struct Streams(Arc<Semaphore>);

impl Default for Streams {
    fn default() -> Self {
        Self(Arc::new(Semaphore::new(MAX_STREAMS)))
    }
}

impl Streams {
    /// Takes one; refused while all are taken.
    pub(crate) fn take(&self) -> Result<OwnedSemaphorePermit, ControlError> {
        let full = || format!("{MAX_STREAMS} clients already follow or export; try again later");
        Arc::clone(&self.0)
            .try_acquire_owned()
            .map_err(|_| ControlError::Unavailable(full()))
    }
}

/// The parts of a running gate that actions work on.
#[derive(Debug)]
pub struct Gate {
    /// Registry and audit.
    pub store: Store,
    /// Where agents run.
    pub sandboxes: Sandboxes,
    /// What leaves them.
    pub traffic: Arc<Services>,
    /// Where everything is kept.
    pub state_dir: PathBuf,
    /// The rules in force, with their settings.
    pub policy: Arc<CurrentPolicy>,
    /// How every part is.
    pub health_registry: Arc<HealthRegistry>,
    /// Every number.
    pub metrics: Arc<Registry>,
    /// The servers of tools.
    pub bridge: Arc<Bridge>,
    /// The door's own numbers.
    pub counters: ControlMetrics,
    /// The reloader.
    pub reload: mpsc::Sender<ReloadRequest>,
    /// Ends the gate.
    pub stop: CancellationToken,
    /// Permits for replies that stream without an end.
    pub streams: Streams,
}
