//! Accept loops of the listeners of one sandbox, and of those on a shared network.
//!
//! A sandbox's own listener identifies the sandbox; on a shared network the peer's address does,
//! which is looked up once, when the connection is accepted.

use std::io::Result;
use std::net::{SocketAddr, TcpListener as StdListener};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use nix::sys::socket::setsockopt;
use nix::sys::socket::sockopt::TcpUserTimeout;
use policy::id::SandboxId;
use policy::identity::RegistrationLookup;
use policy::ports::AuditSink;
use policy::registration::canonical_ip;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio_util::sync::{CancellationToken, DropGuard};
use tokio_util::task::TaskTracker;

use crate::caller::ProgramLookup;
use crate::client_connection::ClientConnection;
use crate::closed_ports;
use crate::connection;
use crate::datagram::DatagramSocket;
use crate::dns;
use crate::mirror_server::daemon;
use crate::request::ConnectionInfo;
use crate::sandbox_state::SandboxState;
use crate::services::Services;
use crate::source::ConnectionSource;

/// The port for DNS queries.
pub const DNS_PORT: u16 = 53;

/// Connections from unregistered addresses at a time: enough to answer them with a refusal.
const MAX_UNKNOWN_CONNECTIONS: usize = 64;

/// DNS connections from a shared network at a time.
const MAX_DNS_CONNECTIONS: usize = 256;

/// How long, in milliseconds, a client may leave sent data unacknowledged.
const ACKNOWLEDGE_TIMEOUT_MS: u32 = 5 * 60 * 1000;

/// Delay after a failed accept, whose cause (no descriptors left) may last for a moment.
const ACCEPT_RETRY_DELAY: Duration = Duration::from_millis(100);

/// A socket in the network of a sandbox.
#[derive(Debug)]
pub enum SandboxSocket {
    /// A listening stream socket.
    Stream(OwnedFd),
    /// A datagram socket.
    Datagram(OwnedFd),
    /// A raw socket that receives connection attempts to ports without a listener.
    ClosedPorts(OwnedFd),
}

/// Serves a sandbox's sockets until `stop`. Returns when every connection has ended.
pub async fn serve(
    services: Arc<Services>,
    sandbox: SandboxId,
    sockets: Vec<SandboxSocket>,
    stop: CancellationToken,
) -> Result<()> {
    let state = services.sandbox(&sandbox).map_err(std::io::Error::other)?;
    let tasks = TaskTracker::new();
    for socket in sockets {
        match socket {
            SandboxSocket::Stream(socket) => {
                let listener = to_tokio_listener(StdListener::from(socket))?;
                if listener.local_addr()?.port() == DNS_PORT {
                    let accepting = accept_queries(
                        Arc::clone(&services),
                        query_source(&services, &sandbox),
                        listener,
                        Arc::clone(&state.connections),
                        tasks.clone(),
                        stop.clone(),
                    );
                    tasks.spawn(run_until_stopped(stop.clone(), accepting));
                    continue;
                }
                let (services, state) = (Arc::clone(&services), Arc::clone(&state));
                if listener.local_addr()?.port() == daemon::PORT {
                    let accepting =
                        accept_git(services, state, listener, tasks.clone(), stop.clone());
                    tasks.spawn(run_until_stopped(stop.clone(), accepting));
                    continue;
                }
                let accepting =
                    accept_sandbox(services, state, listener, tasks.clone(), stop.clone());
                tasks.spawn(run_until_stopped(stop.clone(), accepting));
            }
            SandboxSocket::Datagram(socket) => {
                let datagrams = DatagramSocket::new(socket)?;
                let source = query_source(&services, &sandbox);
                let server = Arc::clone(services.name_server());
                let audit = audit_sink(&services);
                let stop = stop.clone();
                tasks.spawn(dns::serve_datagrams(server, datagrams, source, audit, stop));
            }
            SandboxSocket::ClosedPorts(socket) => {
                let watching =
                    closed_ports::watch(Arc::clone(&services), Arc::clone(&state), socket);
                let sandbox = sandbox.clone();
                let watching = async move {
                    if let Err(error) = watching.await {
                        tracing::error!(
                            %sandbox,
                            %error,
                            "recording connections to closed ports failed"
                        );
                    }
                };
                tasks.spawn(run_until_stopped(stop.clone(), watching));
            }
        }
    }
    tasks.close();
    tasks.wait().await;
    Ok(())
}

/// Cancels its token when the last task has closed its socket.
pub type SocketsClosed = Arc<DropGuard>;

/// Serves a listener on a shared network until `stop`.
pub async fn serve_shared(
    services: Arc<Services>,
    listener: StdListener,
    stop: CancellationToken,
    closed: SocketsClosed,
) -> Result<()> {
    let listener = to_tokio_listener(listener)?;
    let tasks = TaskTracker::new();
    let accepting = accept_shared(services, listener, tasks.clone(), stop.clone());
    tasks.spawn(run_and_report_closed(
        run_until_stopped(stop, accepting),
        closed,
    ));
    tasks.close();
    tasks.wait().await;
    Ok(())
}

/// Answers DNS queries of a shared network until `stop`, over UDP and TCP.
pub async fn serve_shared_dns(
    services: Arc<Services>,
    datagrams: OwnedFd,
    listener: StdListener,
    stop: CancellationToken,
    closed: SocketsClosed,
) -> Result<()> {
    let tasks = TaskTracker::new();
    let source = dns::QuerySource::Shared {
        registry: Arc::clone(services.registry()),
        checks: Arc::clone(services.listener_checks()),
    };
    let answering = dns::serve_datagrams(
        Arc::clone(services.name_server()),
        DatagramSocket::new(datagrams)?,
        source.clone(),
        audit_sink(&services),
        stop.clone(),
    );
    tasks.spawn(run_and_report_closed(answering, Arc::clone(&closed)));
    let slots = Arc::new(Semaphore::new(MAX_DNS_CONNECTIONS));
    let accepting = accept_queries(
        services,
        source,
        to_tokio_listener(listener)?,
        slots,
        tasks.clone(),
        stop.clone(),
    );
    tasks.spawn(run_and_report_closed(
        run_until_stopped(stop, accepting),
        closed,
    ));
    tasks.close();
    tasks.wait().await;
    Ok(())
}

/// The source of a sandbox's DNS queries.
fn query_source(services: &Services, sandbox: &SandboxId) -> dns::QuerySource {
    dns::QuerySource::Sandbox {
        sandbox: sandbox.clone(),
        registry: Arc::clone(services.registry()),
    }
}

/// The audit sink for DNS queries.
fn audit_sink(services: &Services) -> Arc<dyn AuditSink> {
    Arc::clone(services.audit()) as _
}

fn to_tokio_listener(listener: StdListener) -> Result<TcpListener> {
    listener.set_nonblocking(true)?;
    TcpListener::from_std(listener)
}

/// Runs `work`, which holds a socket, and then reports the socket as closed.
async fn run_and_report_closed(work: impl Future<Output = ()>, closed: SocketsClosed) {
    work.await;
    drop(closed);
}

async fn run_until_stopped(stop: CancellationToken, work: impl Future<Output = ()>) {
    tokio::select! {
        () = stop.cancelled() => {}
        () = work => {}
    }
}

/// Accepts the connections of one sandbox.
async fn accept_sandbox(
    services: Arc<Services>,
    sandbox: Arc<SandboxState>,
    listener: TcpListener,
    tasks: TaskTracker,
    stop: CancellationToken,
) {
    loop {
        let (slot, stream, peer) = accept(&listener, &sandbox.connections).await;
        let Ok(local_address) = stream.local_addr() else {
            continue;
        };
        // Every address is local on this side, so this is the client's original destination.
        let destination = SocketAddr::new(local_address.ip().to_canonical(), local_address.port());
        let connection = ClientConnection {
            services: Arc::clone(&services),
            source: ConnectionSource::Listener(Arc::clone(&sandbox)),
            connection_info: ConnectionInfo {
                peer: Some(peer),
                original_destination: Some(destination),
                tunnel: None,
                hello: None,
                caller: ProgramLookup::default(),
            },
            connection_slot: slot.map(Arc::new),
            stop: stop.clone(),
            tasks: tasks.clone(),
        };
        connection::spawn(connection, stream);
    }
}

/// Accepts one sandbox's connections in git's own protocol.
async fn accept_git(
    services: Arc<Services>,
    sandbox: Arc<SandboxState>,
    listener: TcpListener,
    tasks: TaskTracker,
    stop: CancellationToken,
) {
    loop {
        let (slot, stream, peer) = accept(&listener, &sandbox.connections).await;
        let Ok(local_address) = stream.local_addr() else {
            continue;
        };
        let connection_info = ConnectionInfo {
            peer: Some(peer),
            original_destination: Some(SocketAddr::new(
                local_address.ip().to_canonical(),
                local_address.port(),
            )),
            tunnel: None,
            hello: None,
            caller: ProgramLookup::default(),
        };
        let (services, sandbox, stop) = (Arc::clone(&services), Arc::clone(&sandbox), stop.clone());
        tasks.spawn(async move {
            let serving = Box::pin(daemon::serve(&services, &sandbox, &connection_info, stream));
            stop.run_until_cancelled(serving).await;
            drop(slot);
        });
    }
}

/// Accepts connections for DNS over TCP.
async fn accept_queries(
    services: Arc<Services>,
    source: dns::QuerySource,
    listener: TcpListener,
    slots: Arc<Semaphore>,
    tasks: TaskTracker,
    stop: CancellationToken,
) {
    loop {
        let (slot, stream, _) = accept(&listener, &slots).await;
        let (services, source, stop) = (Arc::clone(&services), source.clone(), stop.clone());
        tasks.spawn(async move {
            let server = Arc::clone(services.name_server());
            let audit = audit_sink(&services);
            let served = dns::serve_stream(server, stream, source, audit, stop).await;
            if let Err(error) = served {
                tracing::debug!(%error, "dns connection of a client failed");
            }
            drop(slot);
        });
    }
}

/// Accepts the connections of a shared network.
async fn accept_shared(
    services: Arc<Services>,
    listener: TcpListener,
    tasks: TaskTracker,
    stop: CancellationToken,
) {
    let unknown_slots = Arc::new(Semaphore::new(MAX_UNKNOWN_CONNECTIONS));
    loop {
        let (stream, peer) = accept_one(&listener).await;
        if services.listener_checks().is_check(peer) {
            // Closing the connection is the answer.
            continue;
        }
        let ip = canonical_ip(peer.ip());
        let sandbox = match services.registry().by_ip(ip) {
            RegistrationLookup::Found(row) => match services.sandbox(&row.id) {
                Ok(sandbox) => Some(sandbox),
                Err(error) => {
                    tracing::error!(sandbox = %row.id, %error, "tls setup of a container failed");
                    continue;
                }
            },
            RegistrationLookup::Unavailable
            | RegistrationLookup::Unknown
            | RegistrationLookup::NoPeer => None,
        };
        // A sandbox with too many connections must not delay the others.
        let slots = sandbox
            .as_ref()
            .map_or(&unknown_slots, |sandbox| &sandbox.connections);
        let Ok(slot) = Arc::clone(slots).try_acquire_owned() else {
            continue;
        };
        let connection = ClientConnection {
            services: Arc::clone(&services),
            source: ConnectionSource::Address(Some(ip), sandbox),
            connection_info: ConnectionInfo {
                peer: Some(peer),
                original_destination: None,
                tunnel: None,
                hello: None,
                caller: ProgramLookup::default(),
            },
            connection_slot: Some(Arc::new(slot)),
            stop: stop.clone(),
            tasks: tasks.clone(),
        };
        connection::spawn(connection, stream);
    }
}

async fn accept(
    listener: &TcpListener,
    slots: &Arc<Semaphore>,
) -> (Option<OwnedSemaphorePermit>, TcpStream, SocketAddr) {
    // The semaphore is never closed.
    let slot = Arc::clone(slots).acquire_owned().await.ok();
    let (stream, peer) = accept_one(listener).await;
    (slot, stream, peer)
}

async fn accept_one(listener: &TcpListener) -> (TcpStream, SocketAddr) {
    loop {
        match listener.accept().await {
            Ok((stream, peer)) => {
                if let Err(error) = set_socket_options(&stream) {
                    tracing::debug!(%error, "setting socket options failed");
                }
                return (stream, peer);
            }
            Err(error) => {
                tracing::debug!(%error, "accepting a connection failed");
                tokio::time::sleep(ACCEPT_RETRY_DELAY).await;
            }
        }
    }
}

/// Sets the socket options: small answers do not wait for an acknowledgement, and the kernel closes
/// the connection of a client that acknowledges nothing for too long.
fn set_socket_options(stream: &TcpStream) -> Result<()> {
    stream.set_nodelay(true)?;
    setsockopt(stream, TcpUserTimeout, &ACKNOWLEDGE_TIMEOUT_MS)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn accepted_connection_has_nodelay_set() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let client = TcpStream::connect(listener.local_addr().unwrap());
        let (client, (accepted, peer)) = tokio::join!(client, accept_one(&listener));
        assert_eq!(client.unwrap().local_addr().unwrap(), peer);
        assert!(accepted.nodelay().unwrap());
    }
}
