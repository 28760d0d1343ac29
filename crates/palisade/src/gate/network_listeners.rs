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
const PROXY_NAME: &str = "proxy";
const DNS_NAME: &str = "dns";

/// Name of the health check of addresses that could not be bound at the start.
const BIND_CHECK: &str = "shared_listeners";

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
    address: SocketAddr,
    stop: CancellationToken,
    /// Cancelled when the sockets are closed.
    closed: CancellationToken,
}

/// An address to listen on, with its protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum ListenAddress {
    Proxy(SocketAddr),
    Dns(SocketAddr),
}

/// Bound sockets that are not served yet.
enum BoundSockets {
    Proxy(TcpListener),
    Dns(OwnedFd, TcpListener),
}

/// New sockets for a reload, bound and not served yet.
pub struct PreparedNetworkListeners {
    wanted: Vec<ListenAddress>,
    bound: Vec<(ListenAddress, BoundSockets)>,
    /// Addresses that could not be bound, and why.
    failures: Vec<String>,
}

impl NetworkListeners {
    /// Creates the set without listeners. Must be called in the runtime that serves them.
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
        let prepared = self.bind(settings);
        match prepared.failures.as_slice() {
            [] => Ok(prepared),
            failures => Err(failures.join("; ")),
        }
    }

    /// Listens on the addresses of `settings`. At the start, an address that cannot be bound
    /// degrades only these listeners: the health report names it, and the next reload tries
    /// again.
    pub async fn listen(&self, settings: &Settings) {
        let prepared = self.bind(settings);
        for failure in &prepared.failures {
            tracing::error!(failure, "listener on a shared network failed to bind");
        }
        self.switch(prepared).await;
    }

    fn bind(&self, settings: &Settings) -> PreparedNetworkListeners {
        let proxies = settings.egress.listen.iter().copied();
        let names = settings.egress.dns.listen.iter().copied();
        let mut wanted: Vec<ListenAddress> = proxies.map(ListenAddress::Proxy).collect();
        wanted.extend(names.map(ListenAddress::Dns));
        let open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        let (mut bound, mut failures) = (Vec::new(), Vec::new());
        for listen in wanted.iter().filter(|listen| !open.contains_key(listen)) {
            match listen.bind() {
                Ok(socket) => bound.push((*listen, socket)),
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
    pub async fn switch(&self, prepared: PreparedNetworkListeners) {
        let closing = self.replace(prepared);
        for open in closing {
            open.stop.cancel();
            open.closed.cancelled().await;
        }
    }

    /// Replaces the open listeners, and returns those to close.
    fn replace(&self, prepared: PreparedNetworkListeners) -> Vec<OpenListener> {
        let mut open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        let closing = open.extract_if(|listen, _| !prepared.wanted.contains(listen));
        let closing: Vec<OpenListener> = closing.map(|(_, open)| open).collect();
        for (listen, bound) in prepared.bound {
            let stop = self.stop.child_token();
            let address = bound.local_address().unwrap_or(listen.name_and_address().1);
            let closed = CancellationToken::new();
            let opened = OpenListener {
                address,
                stop: stop.clone(),
                closed: closed.clone(),
            };
            let closed = Arc::new(closed.drop_guard());
            open.insert(listen, opened);
            let traffic = Arc::clone(&self.traffic);
            let serving = async move {
                let served = match bound {
                    BoundSockets::Proxy(listener) => {
                        listeners::serve_shared(traffic, listener, stop, closed).await
                    }
                    BoundSockets::Dns(datagrams, listener) => {
                        listeners::serve_shared_dns(traffic, datagrams, listener, stop, closed)
                            .await
                    }
                };
                if let Err(error) = served {
                    tracing::error!(%address, %error, "listener on a shared network failed");
                }
            };
            self.tasks.spawn_on(serving, &self.runtime);
        }
        match prepared.failures.as_slice() {
            [] => self.health_registry.remove_check(BIND_CHECK),
            failures => self
                .health_registry
                .set_check(BIND_CHECK, Err(failures.join("; "))),
        }
        let addresses = |name: &str| -> Vec<SocketAddr> {
            let named = open
                .iter()
                .filter(|(listen, _)| listen.name_and_address().0 == name);
            named.map(|(_, open)| open.address).collect()
        };
        let (proxies, resolvers) = (addresses(PROXY_NAME), addresses(DNS_NAME));
        self.health_registry.set_listeners(PROXY_NAME, &proxies);
        self.health_registry.set_listeners(DNS_NAME, &resolvers);
        self.traffic.listener_checks().watch(proxies, resolvers);
        // The gate does not connect to its own listeners.
        let own = open.values().map(|open| open.address);
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
    fn local_address(&self) -> std::io::Result<SocketAddr> {
        match self {
            BoundSockets::Proxy(listener) | BoundSockets::Dns(_, listener) => listener.local_addr(),
        }
    }
}

impl ListenAddress {
    fn name_and_address(&self) -> (&'static str, SocketAddr) {
        match self {
            ListenAddress::Proxy(at) => (PROXY_NAME, *at),
            ListenAddress::Dns(at) => (DNS_NAME, *at),
        }
    }

    fn bind(&self) -> Result<BoundSockets, String> {
        let (name, at) = self.name_and_address();
        let bound = || -> std::io::Result<BoundSockets> {
            match self {
                ListenAddress::Proxy(at) => Ok(BoundSockets::Proxy(TcpListener::bind(at)?)),
                ListenAddress::Dns(at) => {
                    let datagrams = UdpSocket::bind(at)?;
                    if at.is_ipv4() {
                        setsockopt(&datagrams, Ipv4PacketInfo, &true)?;
                    } else {
                        setsockopt(&datagrams, Ipv6RecvPacketInfo, &true)?;
                    }
                    Ok(BoundSockets::Dns(datagrams.into(), TcpListener::bind(at)?))
                }
            }
        };
        bound().map_err(|error| {
            let key = match self {
                ListenAddress::Proxy(_) => "egress.listen",
                ListenAddress::Dns(_) => "egress.dns.listen",
            };
            format!(
                "cannot listen on {at} for {name} ({error}); change {key}, or stop the program \
                 that uses the address"
            )
        })
    }
}
