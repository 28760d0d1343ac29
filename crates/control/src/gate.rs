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

/// Requests a reload of the configuration files. The sender receives the changed keys, or the
/// text of every problem.
pub type ReloadRequest = oneshot::Sender<Result<Vec<String>, String>>;

/// Maximum number of concurrent streamed replies. A fraction of the connections of the control
/// socket, so that long-lived streams cannot use up all of them.
const MAX_STREAMS: usize = 64;

/// Permits for streamed replies.
#[derive(Clone, Debug)]
pub struct Streams(Arc<Semaphore>);

impl Default for Streams {
    fn default() -> Self {
        Self(Arc::new(Semaphore::new(MAX_STREAMS)))
    }
}

impl Streams {
    /// Acquires a permit; fails while all are in use.
    pub(crate) fn take(&self) -> Result<OwnedSemaphorePermit, ControlError> {
        let message = || {
            format!("{MAX_STREAMS} clients already follow or export the audit log; try again later")
        };
        Arc::clone(&self.0)
            .try_acquire_owned()
            .map_err(|_| ControlError::Unavailable(message()))
    }
}

/// The parts of a running gate that actions work on.
#[derive(Debug)]
pub struct Gate {
    /// Registry and audit log.
    pub store: Store,
    /// The sandboxes of this gate.
    pub sandboxes: Sandboxes,
    /// The proxy, DNS and git services for traffic of sandboxes.
    pub traffic: Arc<Services>,
    /// The state directory.
    pub state_dir: PathBuf,
    /// The policy in force, with its settings.
    pub policy: Arc<CurrentPolicy>,
    /// Health of every part.
    pub health_registry: Arc<HealthRegistry>,
    /// All metrics.
    pub metrics: Arc<Registry>,
    /// The MCP servers behind the bridge.
    pub bridge: Arc<Bridge>,
    /// Metrics of the control socket.
    pub counters: ControlMetrics,
    /// Requests to the reload task.
    pub reload: mpsc::Sender<ReloadRequest>,
    /// Stops the gate when cancelled.
    pub stop: CancellationToken,
    /// Permits for streamed replies.
    pub streams: Streams,
}
