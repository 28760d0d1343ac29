//! Published ports: forwards connections from the host's loopback to a port in a sandbox.

use std::io::Result;
use std::net::TcpListener as StdListener;
use std::sync::Arc;
use std::time::Duration;

use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

/// Connections of one published port at a time. Further ones wait in the kernel's queue.
const MAX_CONNECTIONS: usize = 256;

/// Delay after a failed accept, whose cause (no descriptors left) may last for a moment.
const ACCEPT_RETRY_DELAY: Duration = Duration::from_millis(100);

/// Opens connections to a port in a sandbox.
#[async_trait::async_trait]
pub trait PortConnector: Send + Sync + 'static {
    /// Opens a new connection to the port.
    async fn connect(&self) -> Result<std::net::TcpStream>;
}

/// Forwards every connection until `stop`, then ends all connections.
pub async fn serve(
    listener: StdListener,
    connector: Arc<dyn PortConnector>,
    stop: CancellationToken,
) -> Result<()> {
    listener.set_nonblocking(true)?;
    let listener = TcpListener::from_std(listener)?;
    let slots = Arc::new(Semaphore::new(MAX_CONNECTIONS));
    let tasks = TaskTracker::new();
    loop {
        let next = async {
            let slot = Arc::clone(&slots).acquire_owned().await;
            (slot, listener.accept().await)
        };
        let (slot, accepted) = tokio::select! {
            () = stop.cancelled() => break,
            next = next => next,
        };
        let client = match accepted {
            Ok((stream, _)) => stream,
            Err(error) => {
                tracing::debug!(%error, "accepting a connection to a published port failed");
                tokio::time::sleep(ACCEPT_RETRY_DELAY).await;
                continue;
            }
        };
        let (connector, stop) = (Arc::clone(&connector), stop.clone());
        tasks.spawn(async move {
            let _slot = slot;
            tokio::select! {
                () = stop.cancelled() => {}
                forwarded = forward(client, &*connector) => {
                    if let Err(error) = forwarded {
                        tracing::debug!(%error, "connection to a published port failed");
                    }
                }
            }
        });
    }
    // Frees the port at once; open connections take a moment to end.
    drop(listener);
    tasks.close();
    tasks.wait().await;
    Ok(())
}

/// Forwards one connection. If the port has no listener in the sandbox, the connection is closed.
async fn forward(mut client: TcpStream, connector: &dyn PortConnector) -> Result<()> {
    let stream = connector.connect().await?;
    stream.set_nonblocking(true)?;
    let mut stream = TcpStream::from_std(stream)?;
    tokio::io::copy_bidirectional(&mut client, &mut stream).await?;
    Ok(())
}
