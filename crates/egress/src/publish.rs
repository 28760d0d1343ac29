//! A port of the host's loopback that leads to one inside a sandbox.

use std::io::Result;
use std::net::TcpListener as StdListener;
use std::sync::Arc;
use std::time::Duration;

use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

/// Connections of one published port at a time. More wait in the kernel's queue.
const MOST_CONNECTIONS: usize = 256;

/// After a failure to accept: the cause (no descriptors left) lasts a moment.
const BREATH: Duration = Duration::from_millis(100);

/// The way inside.
#[async_trait::async_trait]
pub trait Inside: Send + Sync + 'static {
    /// A new connection to the port inside.
    async fn connect(&self) -> Result<std::net::TcpStream>;
}

/// Forwards every connection until `stop`, then ends them.
pub async fn serve(
    listener: StdListener,
    inside: Arc<dyn Inside>,
    stop: CancellationToken,
) -> Result<()> {
    listener.set_nonblocking(true)?;
    let listener = TcpListener::from_std(listener)?;
    let places = Arc::new(Semaphore::new(MOST_CONNECTIONS));
    let tasks = TaskTracker::new();
    loop {
        let next = async {
            let place = Arc::clone(&places).acquire_owned().await;
            (place, listener.accept().await)
        };
        let (place, accepted) = tokio::select! {
            () = stop.cancelled() => break,
            next = next => next,
        };
        let outside = match accepted {
            Ok((stream, _)) => stream,
            Err(error) => {
                tracing::debug!(%error, "a connection was lost before it began");
                tokio::time::sleep(BREATH).await;
                continue;
            }
        };
        let (inside, stop) = (Arc::clone(&inside), stop.clone());
        tasks.spawn(async move {
            let _place = place;
            tokio::select! {
                () = stop.cancelled() => {}
                forwarded = forward(outside, &*inside) => {
                    if let Err(error) = forwarded {
                        tracing::debug!(%error, "a published connection ended early");
                    }
                }
            }
        });
    }
    // Free at once for whoever comes next; conversations take a moment to end.
    drop(listener);
    tasks.close();
    tasks.wait().await;
    Ok(())
}

/// A port on which nobody listens inside closes the connection, as it would at home.
async fn forward(mut outside: TcpStream, inside: &dyn Inside) -> Result<()> {
    let stream = inside.connect().await?;
    stream.set_nonblocking(true)?;
    let mut stream = TcpStream::from_std(stream)?;
    tokio::io::copy_bidirectional(&mut outside, &mut stream).await?;
    Ok(())
}
