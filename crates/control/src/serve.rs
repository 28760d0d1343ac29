//! The listener of the control socket: accepts connections, and notes whether the peer's uid is
//! the gate's own.

use std::sync::Arc;

use hyper::service::service_fn;
use listen::PrivateSocket;
use tokio::net::UnixStream;
use tokio_util::sync::CancellationToken;

use crate::gate::Gate;
use crate::http_api;
use crate::peer::{Peer, WriteWindow};

/// Connections served at once. The door is for people and their tools, not for traffic.
const MAX_CONNECTIONS: usize = 256;

/// Serves the door until `stop`, then lets the requests in flight finish. The caller
/// bounds that wait.
pub async fn serve(socket: &PrivateSocket, gate: Arc<Gate>, stop: CancellationToken) {
    let allowed = nix::unistd::geteuid().as_raw();
    let writes = Arc::new(WriteWindow::default());
    let begin = |stream: UnixStream| {
        let peer = match stream.peer_cred() {
            Ok(credentials) => credentials.uid(),
            Err(error) => {
                tracing::warn!(%error, "a control client without credentials was refused");
                return None;
            }
        };
        let client = Peer::new(peer == allowed, Arc::clone(&writes));
        if !client.is_allowed() {
            tracing::warn!(uid = peer, "a control client of another user was refused");
        }
        let (gate, stop) = (Arc::clone(&gate), stop.clone());
        Some(async move {
            let service = service_fn(|request| http_api::answer(&gate, &client, request));
            listen::http1(stream, service, &stop, None).await;
        })
    };
    let left = listen::accept_all(socket, MAX_CONNECTIONS, &stop, begin).await;
    left.wait().await;
}
