//! The listeners of one sandbox, and those on a shared network.
//!
//! Which listener a connection came through is who it is; on a shared network it is the
//! peer's address, looked up once, when the connection is accepted.

use std::io::Result;
use std::net::{SocketAddr, TcpListener as StdListener};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use nix::sys::socket::setsockopt;
use nix::sys::socket::sockopt::TcpUserTimeout;
use policy::id::SandboxId;
use policy::identity::Lookup;
use policy::ports::AuditSink;
use policy::registration::canonical_ip;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio_util::sync::{CancellationToken, DropGuard};
use tokio_util::task::TaskTracker;

use crate::caller::Caller;
use crate::client_connection::ClientConnection;
use crate::closed_ports;
use crate::connection;
use crate::datagram::Datagrams;
use crate::dns;
use crate::mirror_server::daemon;
use crate::request::ConnectionInfo;
use crate::sandbox_state::SandboxState;
use crate::services::Services;
use crate::source::Source;

/// The port on which queries arrive.
pub const DNS: u16 = 53;

/// Connections of sources nobody knows, at a time: enough to tell them so.
const MOST_STRANGERS: usize = 64;

/// Connections with queries from a shared network, at a time.
const MOST_ASKERS: usize = 256;

/// How long, in milliseconds, a client may leave what it asked for unread.
const NOTHING_TAKEN: u32 = 5 * 60 * 1000;

/// After a failure to accept: the cause (no descriptors left) lasts a moment.
const BREATH: Duration = Duration::from_millis(100);

/// A socket of a sandbox, as it was handed out.
#[derive(Debug)]
pub enum SandboxSocket {
    /// A listening stream socket.
    Stream(OwnedFd),
    /// A datagram socket.
    Datagram(OwnedFd),
    /// A raw socket that shows connections to ports without a listener.
    Closed(OwnedFd),
}

/// Serves a sandbox's doors until `stop`. Returns when every conversation has ended.
pub async fn serve(
    services: Arc<Services>,
    sandbox: SandboxId,
    doors: Vec<SandboxSocket>,
    stop: CancellationToken,
) -> Result<()> {
    let state = services.sandbox(&sandbox).map_err(std::io::Error::other)?;
    let tasks = TaskTracker::new();
    for door in doors {
        match door {
            SandboxSocket::Stream(socket) => {
                let listener = listen(StdListener::from(socket))?;
                if listener.local_addr()?.port() == DNS {
                    let accepting = accept_queries(
                        Arc::clone(&services),
                        name_source(&services, &sandbox),
                        listener,
                        Arc::clone(&state.connections),
                        tasks.clone(),
                        stop.clone(),
                    );
                    tasks.spawn(until(stop.clone(), accepting));
                    continue;
                }
                let (services, state) = (Arc::clone(&services), Arc::clone(&state));
                if listener.local_addr()?.port() == daemon::PORT {
                    let accepting =
                        accept_git(services, state, listener, tasks.clone(), stop.clone());
                    tasks.spawn(until(stop.clone(), accepting));
                    continue;
                }
                let accepting =
                    accept_inside(services, state, listener, tasks.clone(), stop.clone());
                tasks.spawn(until(stop.clone(), accepting));
            }
            SandboxSocket::Datagram(socket) => {
                let datagrams = Datagrams::new(socket)?;
                let source = name_source(&services, &sandbox);
                let names = Arc::clone(services.names());
                let audit = audit_sink(&services);
                let stop = stop.clone();
                tasks.spawn(dns::serve_datagrams(names, datagrams, source, audit, stop));
            }
            SandboxSocket::Closed(socket) => {
                let watching =
                    closed_ports::watch(Arc::clone(&services), Arc::clone(&state), socket);
                let sandbox = sandbox.clone();
                let watching = async move {
                    if let Err(error) = watching.await {
                        tracing::error!(%sandbox, %error, "recording refused ports failed");
                    }
                };
                tasks.spawn(until(stop.clone(), watching));
            }
        }
    }
    tasks.close();
    tasks.wait().await;
    Ok(())
}

/// Cancels its token when the last holder has closed its socket.
pub type SocketsClosed = Arc<DropGuard>;

/// Serves a listener on a shared network until `stop`.
pub async fn serve_shared(
    services: Arc<Services>,
    listener: StdListener,
    stop: CancellationToken,
    closed: SocketsClosed,
) -> Result<()> {
    let listener = listen(listener)?;
    let tasks = TaskTracker::new();
    let accepting = accept_shared(services, listener, tasks.clone(), stop.clone());
    tasks.spawn(then_closed(until(stop, accepting), closed));
    tasks.close();
    tasks.wait().await;
    Ok(())
}

/// Answers queries of a shared network until `stop`, over both transports.
pub async fn serve_shared_names(
    services: Arc<Services>,
    datagrams: OwnedFd,
    listener: StdListener,
    stop: CancellationToken,
    closed: SocketsClosed,
) -> Result<()> {
    let tasks = TaskTracker::new();
    let source = dns::Source::Shared {
        registry: Arc::clone(services.registry()),
        checks: Arc::clone(services.listener_checks()),
    };
    let answering = dns::serve_datagrams(
        Arc::clone(services.names()),
        Datagrams::new(datagrams)?,
        source.clone(),
        audit_sink(&services),
        stop.clone(),
    );
    tasks.spawn(then_closed(answering, Arc::clone(&closed)));
    let places = Arc::new(Semaphore::new(MOST_ASKERS));
    let accepting = accept_queries(
        services,
        source,
        listen(listener)?,
        places,
        tasks.clone(),
        stop.clone(),
    );
    tasks.spawn(then_closed(until(stop, accepting), closed));
    tasks.close();
    tasks.wait().await;
    Ok(())
}

/// The source of the queries of a sandbox.
fn name_source(services: &Services, sandbox: &SandboxId) -> dns::Source {
    dns::Source::Sandbox {
        sandbox: sandbox.clone(),
        registry: Arc::clone(services.registry()),
    }
}

/// Where the answers to queries are recorded.
fn audit_sink(services: &Services) -> Arc<dyn AuditSink> {
    Arc::clone(services.audit()) as _
}

fn listen(listener: StdListener) -> Result<TcpListener> {
    listener.set_nonblocking(true)?;
    TcpListener::from_std(listener)
}

/// Does `work`, which holds a socket, and then reports it as closed.
async fn then_closed(work: impl Future<Output = ()>, closed: SocketsClosed) {
    work.await;
    drop(closed);
}

async fn until(stop: CancellationToken, work: impl Future<Output = ()>) {
    tokio::select! {
        () = stop.cancelled() => {}
        () = work => {}
    }
}

/// Accepts what one sandbox opens.
async fn accept_inside(
    services: Arc<Services>,
    sandbox: Arc<SandboxState>,
    listener: TcpListener,
    tasks: TaskTracker,
    stop: CancellationToken,
) {
    loop {
        let (place, stream, peer) = accept(&listener, &sandbox.connections).await;
        let Ok(meant) = stream.local_addr() else {
            continue;
        };
        // Every address is local on this side, so this is the one that the client meant.
        let meant = SocketAddr::new(meant.ip().to_canonical(), meant.port());
        let visit = ClientConnection {
            services: Arc::clone(&services),
            source: Source::Listener(Arc::clone(&sandbox)),
            connection_info: ConnectionInfo {
                peer: Some(peer),
                meant: Some(meant),
                tunnel: None,
                hello: None,
                caller: Caller::default(),
            },
            place: place.map(Arc::new),
            stop: stop.clone(),
            tasks: tasks.clone(),
        };
        connection::begin(visit, stream);
    }
}

/// Accepts what one sandbox says in git's own protocol.
async fn accept_git(
    services: Arc<Services>,
    sandbox: Arc<SandboxState>,
    listener: TcpListener,
    tasks: TaskTracker,
    stop: CancellationToken,
) {
    loop {
        let (place, stream, peer) = accept(&listener, &sandbox.connections).await;
        let Ok(meant) = stream.local_addr() else {
            continue;
        };
        let connection_info = ConnectionInfo {
            peer: Some(peer),
            meant: Some(SocketAddr::new(meant.ip().to_canonical(), meant.port())),
            tunnel: None,
            hello: None,
            caller: Caller::default(),
        };
        let (services, sandbox, stop) = (Arc::clone(&services), Arc::clone(&sandbox), stop.clone());
        tasks.spawn(async move {
            let serving = Box::pin(daemon::serve(&services, &sandbox, &connection_info, stream));
            stop.run_until_cancelled(serving).await;
            drop(place);
        });
    }
}

/// Accepts queries over streams.
async fn accept_queries(
    services: Arc<Services>,
    source: dns::Source,
    listener: TcpListener,
    places: Arc<Semaphore>,
    tasks: TaskTracker,
    stop: CancellationToken,
) {
    loop {
        let (place, stream, _) = accept(&listener, &places).await;
        let (services, source, stop) = (Arc::clone(&services), source.clone(), stop.clone());
        tasks.spawn(async move {
            let names = Arc::clone(services.names());
            let audit = audit_sink(&services);
            let served = dns::serve_stream(names, stream, source, audit, stop).await;
            if let Err(error) = served {
                tracing::debug!(%error, "a client's queries ended");
            }
            drop(place);
        });
    }
}

/// Accepts what anybody on a shared network opens.
async fn accept_shared(
    services: Arc<Services>,
    listener: TcpListener,
    tasks: TaskTracker,
    stop: CancellationToken,
) {
    let strangers = Arc::new(Semaphore::new(MOST_STRANGERS));
    loop {
        let (stream, peer) = accept_one(&listener).await;
        if services.listener_checks().is_check(peer) {
            // Closing the connection is the answer.
            continue;
        }
        let ip = canonical_ip(peer.ip());
        let sandbox = match services.registry().by_ip(ip) {
            Lookup::Found(row) => match services.sandbox(&row.id) {
                Ok(sandbox) => Some(sandbox),
                Err(error) => {
                    tracing::error!(sandbox = %row.id, %error, "a container is not served");
                    continue;
                }
            },
            Lookup::Unavailable | Lookup::Unknown | Lookup::NoPeer => None,
        };
        // One that has too many open must not keep the others waiting.
        let places = sandbox
            .as_ref()
            .map_or(&strangers, |sandbox| &sandbox.connections);
        let Ok(place) = Arc::clone(places).try_acquire_owned() else {
            continue;
        };
        let visit = ClientConnection {
            services: Arc::clone(&services),
            source: Source::Address(Some(ip), sandbox),
            connection_info: ConnectionInfo {
                peer: Some(peer),
                meant: None,
                tunnel: None,
                hello: None,
                caller: Caller::default(),
            },
            place: Some(Arc::new(place)),
            stop: stop.clone(),
            tasks: tasks.clone(),
        };
        connection::begin(visit, stream);
    }
}

async fn accept(
    listener: &TcpListener,
    places: &Arc<Semaphore>,
) -> (Option<OwnedSemaphorePermit>, TcpStream, SocketAddr) {
    // The semaphore is never closed.
    let place = Arc::clone(places).acquire_owned().await.ok();
    let (stream, peer) = accept_one(listener).await;
    (place, stream, peer)
}

async fn accept_one(listener: &TcpListener) -> (TcpStream, SocketAddr) {
    loop {
        match listener.accept().await {
            Ok((stream, peer)) => {
                if let Err(error) = prepare(&stream) {
                    tracing::debug!(%error, "a connection without its options");
                }
                return (stream, peer);
            }
            Err(error) => {
                tracing::debug!(%error, "a connection was lost before it began");
                tokio::time::sleep(BREATH).await;
            }
        }
    }
}

/// A small answer must not wait for the one before to be acknowledged, and a client that
/// takes nothing for so long is given up by the kernel: nobody else looks at it then.
fn prepare(stream: &TcpStream) -> Result<()> {
    stream.set_nodelay(true)?;
    setsockopt(stream, TcpUserTimeout, &NOTHING_TAKEN)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn what_is_accepted_does_not_gather_small_answers() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let client = TcpStream::connect(listener.local_addr().unwrap());
        let (client, (accepted, peer)) = tokio::join!(client, accept_one(&listener));
        assert_eq!(client.unwrap().local_addr().unwrap(), peer);
        assert!(accepted.nodelay().unwrap());
    }
}
