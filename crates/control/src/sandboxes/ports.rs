//! Published ports: ports of a sandbox on the host's loopback.

use std::io::ErrorKind;
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::time::Duration;

use policy::id::SandboxId;
use sandbox::contract::SandboxError;
use sandbox::manager::row::PublishedPort;
use serde_json::json;

use super::Sandboxes;
use crate::body::PortBody;
use crate::reply::{ControlError, ControlReply};

impl Sandboxes {
    /// The ports of a sandbox: open in the sandbox, and published on the host.
    pub async fn ports(&self, id: SandboxId) -> Result<ControlReply, ControlError> {
        let shown = self.run_blocking(move |manager| {
            let row = manager.row(&id)?;
            let (open, reason) = match manager.backend().open_ports(&id) {
                Ok(open) => (Some(open), None),
                // The published ports are known without the sandbox.
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
        Ok(ControlReply::ok(shown.await?))
    }

    /// Publishes a port of a sandbox, or unpublishes it.
    pub async fn publish(
        &self,
        id: SandboxId,
        body: PortBody,
    ) -> Result<ControlReply, ControlError> {
        let _lock = self.locks.acquire(&id).await;
        let PortBody { host, port } = body;
        check_host(host)?;
        let sandbox = id.clone();
        let row = self
            .run_blocking(move |manager| manager.row(&sandbox))
            .await?;
        let mut published = row.published;
        published.retain(|other| other.host != host);
        self.traffic.unpublish(&id, host);
        let listener = if port == 0 {
            None
        } else {
            let (listener, host) = listen(host).await?;
            published.push(PublishedPort { host, port });
            Some(listener)
        };
        let sandbox = id.clone();
        let row = self
            .run_blocking(move |manager| manager.publish(&sandbox, published))
            .await?;
        if let Some(listener) = listener {
            self.forward_port(&id, listener, port);
        }
        Ok(ControlReply::ok(
            json!({ "id": id, "published": row.published }),
        ))
    }
}

/// Refuses addresses outside the loopback: ports are published for this machine only.
pub(super) fn check_host(host: SocketAddr) -> Result<(), ControlError> {
    if host.ip().is_loopback() {
        return Ok(());
    }
    Err(ControlError::Bad(format!(
        "cannot publish on {host}: not a loopback address; use 127.0.0.1 or ::1"
    )))
}

/// Listens on an address and returns the bound address: the system chooses a port for port 0.
/// Retries for a moment while the address is in use, since this gate may just have released it.
pub(super) async fn listen(host: SocketAddr) -> Result<(TcpListener, SocketAddr), ControlError> {
    let mut bound = bind(host);
    for _ in 0..60 {
        match &bound {
            Err(error) if is_in_use(error) => tokio::time::sleep(Duration::from_millis(25)).await,
            _ => break,
        }
        bound = bind(host);
    }
    bound.map_err(|error| bind_error(host, &error))
}

/// Listens on `port` of the loopback, or on a free port: another sandbox of the same
/// repository may already use the port that the repository's file names.
pub(super) fn listen_or_choose(port: u16) -> Result<(TcpListener, SocketAddr), ControlError> {
    let any = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
    bind(SocketAddr::from((Ipv4Addr::LOCALHOST, port)))
        .or_else(|_| bind(any))
        .map_err(|error| bind_error(any, &error))
}

fn bind(host: SocketAddr) -> std::io::Result<(TcpListener, SocketAddr)> {
    let listener = TcpListener::bind(host)?;
    let host = listener.local_addr()?;
    Ok((listener, host))
}

fn bind_error(host: SocketAddr, error: &std::io::Error) -> ControlError {
    if is_in_use(error) {
        ControlError::PortTaken(host)
    } else {
        ControlError::Bad(format!("cannot listen on {host}: {error}"))
    }
}

fn is_in_use(error: &std::io::Error) -> bool {
    error.kind() == ErrorKind::AddrInUse
}
