//! Listeners for containers on a shared network, as the settings want them.

use std::collections::HashMap;
use std::net::{SocketAddr, TcpListener, UdpSocket};
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, PoisonError};

use config::Settings;
use control::health::Board;
use egress::doors;
use egress::services::Services;
use nix::sys::socket::setsockopt;
use nix::sys::socket::sockopt::{Ipv4PacketInfo, Ipv6RecvPacketInfo};
use tokio::runtime::Handle;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

/// The names under which health lists them.
const PROXY: &str = "proxy";
const DNS: &str = "dns";

/// What is listened at, each until the settings or the gate end it.
#[derive(Debug)]
pub struct Shared {
    runtime: Handle,
    traffic: Arc<Services>,
    board: Arc<Board>,
    stop: CancellationToken,
    tasks: TaskTracker,
    open: Mutex<HashMap<Listening, Open>>,
}

/// A listener that is served.
#[derive(Debug)]
struct Open {
    /// Where it is: the system chooses for port 0.
    at: SocketAddr,
    stop: CancellationToken,
}

/// One thing to listen at.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Listening {
    Proxy(SocketAddr),
    Names(SocketAddr),
}

/// Sockets that are bound and not served yet.
enum Bound {
    Proxy(TcpListener),
    Names(OwnedFd, TcpListener),
}

/// New sockets, ready to take the place of the old ones.
pub struct Ready {
    wanted: Vec<Listening>,
    bound: Vec<(Listening, Bound)>,
}

impl Shared {
    /// Listens nowhere yet. Call it in the runtime that shall do the work.
    pub fn new(traffic: Arc<Services>, board: Arc<Board>, stop: CancellationToken) -> Self {
        Self {
            runtime: Handle::current(),
            traffic,
            board,
            stop,
            tasks: TaskTracker::new(),
            open: Mutex::default(),
        }
    }

    /// Opens what `settings` want and is not open yet. Nothing is served, and nothing that is
    /// open ends, before [`Shared::switch`]: settings may still be refused.
    pub fn prepare(&self, settings: &Settings) -> Result<Ready, String> {
        let proxies = settings.egress.listen.iter().copied();
        let names = settings.egress.dns.listen.iter().copied();
        let mut wanted: Vec<Listening> = proxies.map(Listening::Proxy).collect();
        wanted.extend(names.map(Listening::Names));
        let open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        let mut bound = Vec::new();
        for one in wanted.iter().filter(|one| !open.contains_key(one)) {
            bound.push((*one, one.bind()?));
        }
        Ok(Ready { wanted, bound })
    }

    /// Serves what was opened, and ends what is not wanted any more.
    pub fn switch(&self, ready: Ready) {
        let mut open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        open.retain(|one, Open { stop, .. }| {
            let stays = ready.wanted.contains(one);
            if !stays {
                stop.cancel();
            }
            stays
        });
        for (one, bound) in ready.bound {
            let stop = self.stop.child_token();
            let at = bound.at().unwrap_or(one.shown().1);
            let opened = Open {
                at,
                stop: stop.clone(),
            };
            open.insert(one, opened);
            let traffic = Arc::clone(&self.traffic);
            let serving = async move {
                let served = match bound {
                    Bound::Proxy(listener) => doors::serve_shared(traffic, listener, stop).await,
                    Bound::Names(datagrams, listener) => {
                        doors::serve_shared_names(traffic, datagrams, listener, stop).await
                    }
                };
                if let Err(error) = served {
                    tracing::error!(%at, %error, "a shared network is not served");
                }
            };
            self.tasks.spawn_on(serving, &self.runtime);
        }
        let addresses = |name: &str| -> Vec<SocketAddr> {
            let of_it = open.iter().filter(|(one, _)| one.shown().0 == name);
            of_it.map(|(_, open)| open.at).collect()
        };
        let (proxies, resolvers) = (addresses(PROXY), addresses(DNS));
        self.board.listening(PROXY, &proxies);
        self.board.listening(DNS, &resolvers);
        self.traffic.listener_checks().watch(proxies, resolvers);
        // Nobody reaches the gate through the gate.
        let own = open.values().map(|open| open.at);
        self.traffic.dialer().refuse(own);
    }

    /// Waits until every conversation has ended, which the stop makes them do.
    pub async fn drain(&self) {
        self.tasks.close();
        self.tasks.wait().await;
    }
}

impl Bound {
    fn at(&self) -> std::io::Result<SocketAddr> {
        match self {
            Bound::Proxy(listener) | Bound::Names(_, listener) => listener.local_addr(),
        }
    }
}

impl Listening {
    fn shown(&self) -> (&'static str, SocketAddr) {
        match self {
            Listening::Proxy(at) => (PROXY, *at),
            Listening::Names(at) => (DNS, *at),
        }
    }

    fn bind(&self) -> Result<Bound, String> {
        let (name, at) = self.shown();
        let bound = || -> std::io::Result<Bound> {
            match self {
                Listening::Proxy(at) => Ok(Bound::Proxy(TcpListener::bind(at)?)),
                Listening::Names(at) => {
                    let datagrams = UdpSocket::bind(at)?;
                    if at.is_ipv4() {
                        setsockopt(&datagrams, Ipv4PacketInfo, &true)?;
                    } else {
                        setsockopt(&datagrams, Ipv6RecvPacketInfo, &true)?;
                    }
                    Ok(Bound::Names(datagrams.into(), TcpListener::bind(at)?))
                }
            }
        };
        bound().map_err(|error| {
            let key = match self {
                Listening::Proxy(_) => "egress.listen",
                Listening::Names(_) => "egress.dns.listen",
            };
            format!(
                "the {name} cannot listen at {at} ({error}); change {key}, or end what is there"
            )
        })
    }
}
