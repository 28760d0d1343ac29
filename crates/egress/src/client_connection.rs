//! One client connection, as far as it has come.

use std::sync::Arc;

use tokio::sync::OwnedSemaphorePermit;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::request::ConnectionInfo;
use crate::services::Services;
use crate::source::Source;

/// A connection, as far as it has come.
#[derive(Clone)]
pub struct ClientConnection {
    /// What every connection shares.
    pub services: Arc<Services>,
    /// Who it is.
    pub source: Source,
    /// What was said before the first request.
    pub connection_info: ConnectionInfo,
    /// Its place among the sandbox's connections, which a tunnel keeps.
    pub place: Option<Arc<OwnedSemaphorePermit>>,
    /// Ends it, and every tunnel in it.
    pub stop: CancellationToken,
    /// Who waits for its end.
    pub tasks: TaskTracker,
}
