//! Listeners for containers on a shared network (`egress.listen`, `egress.dns.listen`).

use std::collections::HashMap;
use std::net::{SocketAddr, TcpListener, UdpSocket};
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, PoisonError};

use config::Settings;
use control::health::HealthRegistry;
use egress::listeners;
use egress::services::Services;
use nix::sys::socket::setsockopt;
use nix::sys::socket::sockopt::{Ipv4PacketInfo, Ipv6RecvPacketInfo};
use tokio::runtime::Handle;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

/// Names of the listeners in health reports.
const PROXY: &str = "proxy";
const DNS: &str = "dns";

/// The health check of addresses that could not be bound at the start.
const BOUND: &str = "shared_listeners";

/// The open listeners, by address.
#[derive(Debug)]
pub struct NetworkListeners {
    runtime: Handle,
    traffic: Arc<Services>,
    health_registry: Arc<HealthRegistry>,
    stop: CancellationToken,
    tasks: TaskTracker,
    open: Mutex<HashMap<ListenAddress, OpenListener>>,
}

/// A listener that is served.
#[derive(Debug)]
struct OpenListener {
    /// The bound address: the system chooses for port 0.
    at: SocketAddr,
    stop: CancellationToken,
    /// Cancelled when the sockets are closed.
    closed: CancellationToken,
}

/// An address to listen on, with its protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum ListenAddress {
    Proxy(SocketAddr),
    Names(SocketAddr),
}

/// Bound sockets that are not served yet.
enum BoundSockets {
    Proxy(TcpListener),
    Names(OwnedFd, TcpListener),
}

/// New sockets for a reload, bound and not served yet.
pub struct PreparedNetworkListeners {
    wanted: Vec<ListenAddress>,
    bound: Vec<(ListenAddress, BoundSockets)>,
    /// Addresses that could not be bound, and why.
    failures: Vec<String>,
}

impl NetworkListeners {
    /// Has no listeners yet. Must be called in the runtime that serves them.
    pub fn new(
        traffic: Arc<Services>,
        health_registry: Arc<HealthRegistry>,
        stop: CancellationToken,
    ) -> Self {
        Self {
            runtime: Handle::current(),
            traffic,
            health_registry,
            stop,
            tasks: TaskTracker::new(),
            open: Mutex::default(),
        }
    }

    /// Binds the addresses of `settings` that are not open yet, or returns why it cannot.
    /// Nothing is served, and no open listener ends, before [`NetworkListeners::switch`].
    pub fn prepare(&self, settings: &Settings) -> Result<PreparedNetworkListeners, String> {
        let ready = self.bind(settings);
        match ready.failures.as_slice() {
            [] => Ok(ready),
            failures => Err(failures.join("; ")),
        }
    }

    /// Listens on the addresses of `settings`. At the start, an address that cannot be bound
    /// degrades only these listeners: the health report names it, and the next reload tries
    /// again.
    pub async fn listen(&self, settings: &Settings) {
        let ready = self.bind(settings);
        for failure in &ready.failures {
            tracing::error!(failure, "listener on a shared network failed to bind");
        }
        self.switch(ready).await;
    }

    fn bind(&self, settings: &Settings) -> PreparedNetworkListeners {
        let proxies = settings.egress.listen.iter().copied();
        let names = settings.egress.dns.listen.iter().copied();
        let mut wanted: Vec<ListenAddress> = proxies.map(ListenAddress::Proxy).collect();
        wanted.extend(names.map(ListenAddress::Names));
        let open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        let (mut bound, mut failures) = (Vec::new(), Vec::new());
        for one in wanted.iter().filter(|one| !open.contains_key(one)) {
            match one.bind() {
                Ok(socket) => bound.push((*one, socket)),
                Err(failure) => failures.push(failure),
            }
        }
        PreparedNetworkListeners {
            wanted,
            bound,
            failures,
        }
    }

    /// Serves the new sockets, and closes listeners that are no longer configured. Returns when
    /// their sockets are closed.
    pub async fn switch(&self, ready: PreparedNetworkListeners) {
        let closing = self.replace(ready);
        for open in closing {
            open.stop.cancel();
            open.closed.cancelled().await;
        }
    }

    /// Replaces the open listeners, and returns those to close.
    fn replace(&self, ready: PreparedNetworkListeners) -> Vec<OpenListener> {
        let mut open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        let closing = open.extract_if(|one, _| !ready.wanted.contains(one));
        let closing: Vec<OpenListener> = closing.map(|(_, open)| open).collect();
        for (one, bound) in ready.bound {
            let stop = self.stop.child_token();
            let at = bound.at().unwrap_or(one.shown().1);
            let closed = CancellationToken::new();
            let opened = OpenListener {
                at,
                stop: stop.clone(),
                closed: closed.clone(),
            };
            let closed = Arc::new(closed.drop_guard());
            open.insert(one, opened);
            let traffic = Arc::clone(&self.traffic);
            let serving = async move {
                let served = match bound {
                    BoundSockets::Proxy(listener) => {
                        listeners::serve_shared(traffic, listener, stop, closed).await
                    }
                    BoundSockets::Names(datagrams, listener) => {
                        listeners::serve_shared_dns(traffic, datagrams, listener, stop, closed)
                            .await
                    }
                };
                if let Err(error) = served {
                    tracing::error!(%at, %error, "serving a shared network failed");
                }
            };
            self.tasks.spawn_on(serving, &self.runtime);
        }
        match ready.failures.as_slice() {
            [] => self.health_registry.retract(BOUND),
            failures => self.health_registry.check(BOUND, Err(failures.join("; "))),
        }
        let addresses = |name: &str| -> Vec<SocketAddr> {
            let of_it = open.iter().filter(|(one, _)| one.shown().0 == name);
            of_it.map(|(_, open)| open.at).collect()
        };
        let (proxies, resolvers) = (addresses(PROXY), addresses(DNS));
        self.health_registry.listening(PROXY, &proxies);
        self.health_registry.listening(DNS, &resolvers);
        self.traffic.listener_checks().watch(proxies, resolvers);
        // The gate does not connect to its own listeners.
        let own = open.values().map(|open| open.at);
        self.traffic.dialer().set_own_addresses(own);
        closing
    }

    /// Waits until every connection has ended; the shutdown ends them.
    pub async fn drain(&self) {
        self.tasks.close();
        self.tasks.wait().await;
    }
}

impl BoundSockets {
    fn at(&self) -> std::io::Result<SocketAddr> {
        match self {
            BoundSockets::Proxy(listener) | BoundSockets::Names(_, listener) => {
                listener.local_addr()
            }
        }
    }
}

impl ListenAddress {
    fn shown(&self) -> (&'static str, SocketAddr) {
        match self {
            ListenAddress::Proxy(at) => (PROXY, *at),
            ListenAddress::Names(at) => (DNS, *at),
        }
    }

    fn bind(&self) -> Result<BoundSockets, String> {
        let (name, at) = self.shown();
        let bound = || -> std::io::Result<BoundSockets> {
            match self {
                ListenAddress::Proxy(at) => Ok(BoundSockets::Proxy(TcpListener::bind(at)?)),
                ListenAddress::Names(at) => {
                    let datagrams = UdpSocket::bind(at)?;
                    if at.is_ipv4() {
                        setsockopt(&datagrams, Ipv4PacketInfo, &true)?;
                    } else {
                        setsockopt(&datagrams, Ipv6RecvPacketInfo, &true)?;
                    }
                    Ok(BoundSockets::Names(
                        datagrams.into(),
                        TcpListener::bind(at)?,
                    ))
                }
            }
        };
        bound().map_err(|error| {
            let key = match self {
                ListenAddress::Proxy(_) => "egress.listen",
                ListenAddress::Names(_) => "egress.dns.listen",
            };
            format!(
                "cannot listen on {at} for {name} ({error}); change {key}, or stop the program \
                 that uses the address"
            )
        })
    }
}
