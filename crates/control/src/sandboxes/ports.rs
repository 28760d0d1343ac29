//! Ports of a sandbox that an operator reaches on the loopback.

use std::io::ErrorKind;
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::time::Duration;

use policy::id::SandboxId;
use sandbox::contract::SandboxError;
use sandbox::manager::row::PublishedPort;
use serde_json::json;

use super::Sandboxes;
use crate::body::PortBody;
use crate::reply::{ControlError, Reply};

impl Sandboxes {
    /// The ports of one: open inside, and published.
    pub async fn ports(&self, id: SandboxId) -> Result<Reply, ControlError> {
        let shown = self.ask(move |manager| {
            let row = manager.row(&id)?;
            let (open, reason) = match manager.backend().open_ports(&id) {
                Ok(open) => (Some(open), None),
                // What is published is known all the same.
                Err(
                    error @ (SandboxError::Paused(_)
                    | SandboxError::Stopped { .. }
                    | SandboxError::NotResponding(_)
                    | SandboxError::Protocol { .. }),
                ) => (None, Some(error.to_string())),
                Err(other) => return Err(other.into()),
            };
            Ok(json!({ "id": id, "open": open, "reason": reason, "published": row.published }))
        });
        Ok(Reply::ok(shown.await?))
    }

    /// Publishes a port of one, or takes it back.
    pub async fn publish(&self, id: SandboxId, body: PortBody) -> Result<Reply, ControlError> {
        let _turn = self.turns.take(&id).await;
        let PortBody { host, port } = body;
        check_host(host)?;
        let of = id.clone();
        let row = self.ask(move |manager| manager.row(&of)).await?;
        let mut published = row.published;
        published.retain(|one| one.host != host);
        self.traffic.unpublish(&id, host);
        let listener = if port == 0 {
            None
        } else {
            let (listener, host) = listen(host).await?;
            published.push(PublishedPort { host, port });
            Some(listener)
        };
        let of = id.clone();
        let row = self
            .ask(move |manager| manager.publish(&of, published))
            .await?;
        if let Some(listener) = listener {
            self.forward_port(&id, listener, port);
        }
        Ok(Reply::ok(json!({ "id": id, "published": row.published })))
    }
}

/// Ports are published for this machine only.
pub(super) fn check_host(host: SocketAddr) -> Result<(), ControlError> {
    if host.ip().is_loopback() {
        return Ok(());
    }
    Err(ControlError::Bad(format!(
        "{host} is not on the loopback: published ports are for this machine only"
    )))
}

/// Listens, and says where: the system chooses for port 0. An address that was ours until
/// now is free in a moment.
pub(super) async fn listen(host: SocketAddr) -> Result<(TcpListener, SocketAddr), ControlError> {
    let mut bound = bind(host);
    for _ in 0..60 {
        match &bound {
            Err(error) if is_taken(error) => tokio::time::sleep(Duration::from_millis(25)).await,
            _ => break,
        }
        bound = bind(host);
    }
    bound.map_err(|error| refuse(host, &error))
}

/// Listens on that port of the loopback, or on one that the system chooses: another sandbox of
/// the same repository may have the port that its file names.
pub(super) fn listen_near(port: u16) -> Result<(TcpListener, SocketAddr), ControlError> {
    let any = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
    bind(SocketAddr::from((Ipv4Addr::LOCALHOST, port)))
        .or_else(|_| bind(any))
        .map_err(|error| refuse(any, &error))
}

fn bind(host: SocketAddr) -> std::io::Result<(TcpListener, SocketAddr)> {
    let listener = TcpListener::bind(host)?;
    let host = listener.local_addr()?;
    Ok((listener, host))
}

fn refuse(host: SocketAddr, error: &std::io::Error) -> ControlError {
    if is_taken(error) {
        ControlError::PortTaken(host)
    } else {
        ControlError::Bad(format!("{host} cannot be listened on: {error}"))
    }
}

fn is_taken(error: &std::io::Error) -> bool {
    error.kind() == ErrorKind::AddrInUse
}
