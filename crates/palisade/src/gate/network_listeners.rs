//! Listeners for containers on a shared network, as the settings want them.

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

/// The names under which health lists them.
const PROXY: &str = "proxy";
const DNS: &str = "dns";

/// The health check of addresses that could not be bound at the start.
const BOUND: &str = "shared_listeners";

/// What is listened at, each until the settings or the gate end it.
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
    /// Where it is: the system chooses for port 0.
    at: SocketAddr,
    stop: CancellationToken,
    /// Its sockets are closed.
    closed: CancellationToken,
}

/// One thing to listen at.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum ListenAddress {
    Proxy(SocketAddr),
    Names(SocketAddr),
}

/// Sockets that are bound and not served yet.
enum BoundSockets {
    Proxy(TcpListener),
    Names(OwnedFd, TcpListener),
}

/// New sockets, ready to take the place of the old ones.
pub struct PreparedNetworkListeners {
    wanted: Vec<ListenAddress>,
    bound: Vec<(ListenAddress, BoundSockets)>,
    /// Addresses that could not be bound, and why.
    failures: Vec<String>,
}

impl NetworkListeners {
    /// Listens nowhere yet. Call it in the runtime that shall do the work.
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

    /// Opens what a reload to `settings` needs and is not open yet, or returns why it cannot.
    /// Nothing is served, and nothing that is open ends, before [`NetworkListeners::switch`].
    pub fn prepare(&self, settings: &Settings) -> Result<PreparedNetworkListeners, String> {
        let ready = self.bind(settings);
        match ready.failures.as_slice() {
            [] => Ok(ready),
            failures => Err(failures.join("; ")),
        }
    }

    /// Listens where `settings` say. At the start, an address that cannot be bound degrades these
    /// listeners alone: health names it, and the next reload tries again.
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

    /// Serves what was opened, and ends what is not wanted any more. Returns when its sockets are
    /// closed.
    pub async fn switch(&self, ready: PreparedNetworkListeners) {
        let gone = self.replace(ready);
        for open in gone {
            open.stop.cancel();
            open.closed.cancelled().await;
        }
    }

    /// Replaces the open listeners, and returns those that are to be closed.
    fn replace(&self, ready: PreparedNetworkListeners) -> Vec<OpenListener> {
        let mut open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        let gone = open.extract_if(|one, _| !ready.wanted.contains(one));
        let gone: Vec<OpenListener> = gone.map(|(_, open)| open).collect();
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
                        listeners::serve_shared_names(traffic, datagrams, listener, stop, closed)
                            .await
                    }
                };
                if let Err(error) = served {
                    tracing::error!(%at, %error, "a shared network is not served");
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
        // Nobody reaches the gate through the gate.
        let own = open.values().map(|open| open.at);
        self.traffic.dialer().refuse(own);
        gone
    }

    /// Waits until every conversation has ended, which the stop makes them do.
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
                "the {name} cannot listen at {at} ({error}); change {key}, or end what is there"
            )
        })
    }
}
