//! Ports of a sandbox that an operator reaches on the loopback.

use std::io::ErrorKind;
use std::net::{SocketAddr, TcpListener};
use std::time::Duration;

use policy::id::SandboxId;
use sandbox::manager::row::Published;
use serde_json::json;

use super::Sandboxes;
use super::body::PortBody;
use crate::reply::{ControlError, Reply};

impl Sandboxes {
    /// The ports of one: open inside, and published.
    pub async fn ports(&self, id: SandboxId) -> Result<Reply, ControlError> {
        let shown = self.ask(move |manager| {
            let row = manager.row(&id)?;
            let open = manager.backend().open_ports(&id)?;
            Ok(json!({ "id": id, "open": open, "published": row.published }))
        });
        Ok(Reply::ok(shown.await?))
    }

    /// Publishes a port of one, or takes it back.
    pub async fn publish(&self, id: SandboxId, body: PortBody) -> Result<Reply, ControlError> {
        let _turn = self.turns.take(&id).await;
        let PortBody { host, port } = body;
        if !host.ip().is_loopback() {
            return Err(ControlError::Bad(format!(
                "{host} is not on the loopback: published ports are for this machine only"
            )));
        }
        let of = id.clone();
        let row = self.ask(move |manager| manager.row(&of)).await?;
        let mut published = row.published;
        published.retain(|one| one.host != host);
        self.traffic.unpublish(&id, host);
        let listener = if port == 0 {
            None
        } else {
            let listener = listen(host).await.map_err(|error| {
                ControlError::Bad(format!("{host} cannot be listened on: {error}"))
            })?;
            let host = listener.local_addr().map_err(|error| {
                ControlError::Failed(format!("{host} cannot be listened on: {error}"))
            })?;
            published.push(Published { host, port });
            Some(listener)
        };
        let of = id.clone();
        let row = self
            .ask(move |manager| manager.publish(&of, published))
            .await?;
        if let Some(listener) = listener {
            self.lead(&id, listener, port);
        }
        Ok(Reply::ok(json!({ "id": id, "published": row.published })))
    }
}

/// Listens. An address that was ours until now is free in a moment.
async fn listen(host: SocketAddr) -> std::io::Result<TcpListener> {
    for _ in 0..20 {
        match TcpListener::bind(host) {
            Err(error) if error.kind() == ErrorKind::AddrInUse => {
                tokio::time::sleep(Duration::from_millis(25)).await;
            }
            other => return other,
        }
    }
    TcpListener::bind(host)
}
