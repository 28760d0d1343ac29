//! Context of one client connection.

use std::sync::Arc;

use tokio::sync::OwnedSemaphorePermit;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::request::ConnectionInfo;
use crate::services::Services;
use crate::source::ConnectionSource;

/// The context of a connection or of a tunnel in it.
#[derive(Clone)]
pub struct ClientConnection {
    /// The services that all connections share.
    pub services: Arc<Services>,
    /// How the connection identifies its sandbox.
    pub source: ConnectionSource,
    /// Addresses, tunnel and TLS hello of the connection.
    pub connection_info: ConnectionInfo,
    /// The connection slot of the sandbox, which a tunnel keeps.
    pub connection_slot: Option<Arc<OwnedSemaphorePermit>>,
    /// Ends the connection and every tunnel in it.
    pub stop: CancellationToken,
    /// Tracks the tasks of the connection.
    pub tasks: TaskTracker,
}
