//! The listeners of one sandbox. Which of them a connection came through is who it is.

use std::io::Result;
use std::net::{IpAddr, SocketAddr, TcpListener as StdListener};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use policy::id::SandboxId;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::datagram::Datagrams;
use crate::refusal;

/// The port on which queries arrive.
const DNS: u16 = 53;

/// Connections of one sandbox at a time. More wait in the kernel's queue.
const MOST_CONNECTIONS: usize = 256;

/// How long a client may take to say something, and to take the answer.
const PATIENCE: Duration = Duration::from_secs(5);

/// The longest query that is read. Longer ones are cut, and refused all the same.
const LONGEST_QUERY: usize = 4096;

/// After a failure to accept: the cause (no descriptors left) lasts a moment.
const BREATH: Duration = Duration::from_millis(100);

/// A socket of a sandbox, as it was handed out.
#[derive(Debug)]
pub enum Door {
    /// A listening stream socket.
    Stream(OwnedFd),
    /// A datagram socket.
    Datagram(OwnedFd),
}

/// Somebody who hears of each refusal.
#[async_trait::async_trait]
pub trait Witness: Send + Sync + 'static {
    /// A connection or query of `sandbox` to `meant` was refused. Nothing is answered before
    /// this returns.
    async fn refused(&self, sandbox: &SandboxId, meant: SocketAddr, transport: Transport);
}

/// What was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Transport {
    /// A connection.
    Stream,
    /// A query.
    Query,
}

/// Serves a sandbox's doors until `stop`. Returns when every conversation has ended.
pub async fn serve(
    sandbox: SandboxId,
    doors: Vec<Door>,
    witness: Arc<dyn Witness>,
    stop: CancellationToken,
) -> Result<()> {
    let sandbox = Arc::new(sandbox);
    let places = Arc::new(Semaphore::new(MOST_CONNECTIONS));
    let tasks = TaskTracker::new();
    for door in doors {
        let guest = Guest {
            sandbox: Arc::clone(&sandbox),
            witness: Arc::clone(&witness),
        };
        match door {
            Door::Stream(socket) => {
                let listener = StdListener::from(socket);
                listener.set_nonblocking(true)?;
                let listener = TcpListener::from_std(listener)?;
                let accepting = accept(
                    guest,
                    listener,
                    Arc::clone(&places),
                    tasks.clone(),
                    stop.clone(),
                );
                tasks.spawn(accepting);
            }
            Door::Datagram(socket) => {
                let datagrams = Datagrams::new(socket)?;
                let stop = stop.clone();
                tasks.spawn(async move {
                    tokio::select! {
                        () = stop.cancelled() => {}
                        () = answer_queries(&guest, &datagrams) => {}
                    }
                });
            }
        }
    }
    tasks.close();
    tasks.wait().await;
    Ok(())
}

/// Whose traffic this is.
#[derive(Clone)]
struct Guest {
    sandbox: Arc<SandboxId>,
    witness: Arc<dyn Witness>,
}

async fn accept(
    guest: Guest,
    listener: TcpListener,
    places: Arc<Semaphore>,
    tasks: TaskTracker,
    stop: CancellationToken,
) {
    loop {
        let next = async {
            let place = Arc::clone(&places).acquire_owned().await;
            (place, listener.accept().await)
        };
        let (place, accepted) = tokio::select! {
            () = stop.cancelled() => return,
            next = next => next,
        };
        let stream = match accepted {
            Ok((stream, _)) => stream,
            Err(error) => {
                tracing::debug!(sandbox = %guest.sandbox, %error, "a connection was lost before it began");
                tokio::time::sleep(BREATH).await;
                continue;
            }
        };
        let (guest, stop) = (guest.clone(), stop.clone());
        tasks.spawn(async move {
            let _place = place;
            tokio::select! {
                () = stop.cancelled() => {}
                refused = timeout(2 * PATIENCE, refuse(&guest, stream)) => {
                    if let Ok(Err(error)) = refused {
                        tracing::debug!(sandbox = %guest.sandbox, %error, "a client left early");
                    }
                }
            }
        });
    }
}

async fn refuse(guest: &Guest, mut stream: TcpStream) -> Result<()> {
    // The address that the client meant: every address is local on this side.
    let meant = stream.local_addr()?;
    let meant = SocketAddr::new(meant.ip().to_canonical(), meant.port());
    if meant.port() == DNS {
        return refuse_query(guest, stream, meant).await;
    }
    guest
        .witness
        .refused(&guest.sandbox, meant, Transport::Stream)
        .await;
    let mut first = [0; 1024];
    // A client that waits for the server to speak first is told after a while.
    let length = match timeout(PATIENCE, stream.read(&mut first)).await {
        Ok(read) => read?,
        Err(_) => 0,
    };
    let answer = refusal::answer(&guest.sandbox, first.get(..length).unwrap_or_default());
    stream.write_all(&answer).await?;
    stream.shutdown().await?;
    // What is still on its way would turn the answer into a reset.
    while timeout(PATIENCE, stream.read(&mut first))
        .await
        .is_ok_and(|read| read.is_ok_and(|n| n > 0))
    {}
    Ok(())
}

/// DNS over TCP: two bytes of length, then a query (RFC 1035, section 4.2.2).
async fn refuse_query(guest: &Guest, mut stream: TcpStream, meant: SocketAddr) -> Result<()> {
    let length = usize::from(stream.read_u16().await?);
    let mut query = vec![0; length.min(LONGEST_QUERY)];
    stream.read_exact(&mut query).await?;
    guest
        .witness
        .refused(&guest.sandbox, meant, Transport::Query)
        .await;
    if let Some(answer) = refusal::answer_query(&query) {
        let length = u16::try_from(answer.len()).unwrap_or_default();
        stream.write_all(&length.to_be_bytes()).await?;
        stream.write_all(&answer).await?;
    }
    stream.shutdown().await
}

async fn answer_queries(guest: &Guest, datagrams: &Datagrams) {
    let mut buffer = vec![0; LONGEST_QUERY];
    loop {
        let (length, ends) = match datagrams.receive(&mut buffer).await {
            Ok(received) => received,
            Err(error) => {
                tracing::debug!(sandbox = %guest.sandbox, %error, "a datagram was lost");
                tokio::time::sleep(BREATH).await;
                continue;
            }
        };
        let Some(answer) = refusal::answer_query(buffer.get(..length).unwrap_or_default()) else {
            continue;
        };
        let meant = SocketAddr::new(IpAddr::to_canonical(&ends.meant), DNS);
        guest
            .witness
            .refused(&guest.sandbox, meant, Transport::Query)
            .await;
        if let Err(error) = datagrams.answer(&answer, ends).await {
            tracing::debug!(sandbox = %guest.sandbox, %error, "an answer was lost");
        }
    }
}
