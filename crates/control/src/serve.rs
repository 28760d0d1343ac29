//! Listener of the control socket: accepts connections and checks the peer's uid.

use std::sync::Arc;

use hyper::service::service_fn;
use listen::PrivateSocket;
use tokio::net::UnixStream;
use tokio_util::sync::CancellationToken;

use crate::gate::Gate;
use crate::http_api;
use crate::peer::{Peer, WriteWindow};

/// Maximum number of concurrent connections. The control socket is for operators and their
/// tools, not for traffic.
const MAX_CONNECTIONS: usize = 256;

/// Serves the control socket until `stop`, then waits for requests in flight. The caller bounds
/// that wait.
pub async fn serve(socket: &PrivateSocket, gate: Arc<Gate>, stop: CancellationToken) {
    let allowed = nix::unistd::geteuid().as_raw();
    let writes = Arc::new(WriteWindow::default());
    let begin = |stream: UnixStream| {
        let peer = match stream.peer_cred() {
            Ok(credentials) => credentials.uid(),
            Err(error) => {
                tracing::warn!(%error, "control client refused: no peer credentials");
                return None;
            }
        };
        let client = Peer::new(peer == allowed, Arc::clone(&writes));
        if !client.is_allowed() {
            tracing::warn!(uid = peer, "control client refused: another user");
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
