//! The one way out of the gate. Proxy, WebSocket, token refresh and mirror all dial here.
//!
//! ```text
//!   host ──▶ addresses, every one judged ──▶ TCP to one of them ──▶ TLS, always verified ──▶ HTTP
//! ```
//! The name was judged by the caller before it gets here: no query leaves for a denied one.
//! The address that was checked is the one that is dialled, there is no second look-up, and
//! no redirect is ever followed.

mod address;
mod body;
mod driven;
mod error;
mod exchange;
mod io_tap;
mod message;
mod pool;
mod single;
mod socket;
mod trust;
mod wake_flag;
mod wire;

use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use arc_swap::ArcSwap;
use config::Settings;
use config::section::egress::EgressTimeouts;
use http::{Request, Response, Version};
use policy::host::Host;
use policy::id::SandboxId;
use tokio::net::TcpStream;
use tokio::time::Instant;

use self::address::Addresses;
use self::exchange::Failure;
use self::pool::{Key, Pool};
use self::trust::Trust;
use self::wire::{Deadline, Use};
use crate::body::Content;
use crate::outgoing::{Outgoing, Route};

pub use self::body::Arriving;
pub use self::error::{DialError, Step};
pub use self::single::{Answer, Upgradable};
pub use self::trust::BadRoots;

/// An answer, as it begins to come in.
#[derive(Debug)]
pub struct Sent {
    /// Head and streaming body. The connection is free when the body is read or dropped.
    pub response: Response<Arriving>,
    /// How it got here.
    pub timings: Timings,
}

/// How long each step took, and where it led. A connection that was there took none.
#[derive(Clone, Copy, Debug)]
pub struct Timings {
    /// Finding the address.
    pub resolve: Duration,
    /// Connecting.
    pub connect: Duration,
    /// The TLS handshake.
    pub tls: Duration,
    /// Whether the connection was there before.
    pub reused: bool,
    /// The address that answered.
    pub peer: SocketAddr,
    /// The version spoken with it.
    pub version: Version,
}

/// The way out.
pub struct Dialer {
    pool: Arc<Pool>,
    rules: ArcSwap<Rules>,
    /// One change of the rules at a time.
    change: Mutex<()>,
}

/// What may change while the gate runs. A request keeps what it began with.
#[derive(Clone)]
struct Rules {
    addresses: Arc<Addresses>,
    trust: Arc<Trust>,
    timeouts: EgressTimeouts,
}

/// New settings of the dialer, read and not yet in force.
pub struct PreparedDialer(Rules);

impl Dialer {
    /// Reads roots and the system's resolvers: call it where it may block.
    pub fn new(settings: &Settings) -> Result<Self, BadRoots> {
        Ok(Self {
            pool: Pool::new(),
            rules: ArcSwap::from_pointee(Rules::read(settings, Arc::from([]))?),
            change: Mutex::new(()),
        })
    }

    /// Reads what new settings need, for [`Dialer::apply`]. Reads files, as [`Dialer::new`]
    /// does; nothing changes yet.
    pub fn prepare(settings: &Settings) -> Result<PreparedDialer, BadRoots> {
        Ok(PreparedDialer(Rules::read(settings, Arc::from([]))?))
    }

    /// Takes over new settings. Connections that they might not allow are not used again;
    /// requests that run finish on theirs.
    pub fn apply(&self, PreparedDialer(mut new): PreparedDialer) {
        let _one_at_a_time = self.change.lock().unwrap_or_else(PoisonError::into_inner);
        let old = self.rules.load_full();
        new.addresses = Arc::new(new.addresses.with_own(Arc::clone(&old.addresses.own)));
        let same_roots = new.trust.is_same(&old.trust);
        if same_roots {
            // Sessions can be resumed under the same roots.
            new.trust = Arc::clone(&old.trust);
        }
        let new = Arc::new(new);
        // First the rules, then the shelves: who finds a new shelf reads the new rules.
        self.rules.store(Arc::clone(&new));
        let same_holes = new.addresses.holes == old.addresses.holes;
        self.pool.close(|(_, Route { host, port, tls })| {
            let fixed = |rules: &Rules| rules.addresses.resolve.get(host, *port);
            (*tls && !same_roots) || !same_holes || fixed(&new) != fixed(&old)
        });
    }

    /// [`Dialer::prepare`] and [`Dialer::apply`] in one.
    pub fn reload(&self, settings: &Settings) -> Result<(), BadRoots> {
        self.apply(Self::prepare(settings)?);
        Ok(())
    }

    /// Tells which addresses are the gate's own listeners. They are never dialled, whatever
    /// the settings say. An unspecified address stands for every address of this host.
    pub fn refuse(&self, own: impl IntoIterator<Item = SocketAddr>) {
        let _one_at_a_time = self.change.lock().unwrap_or_else(PoisonError::into_inner);
        let mut rules = Rules::clone(&self.rules.load());
        rules.addresses = Arc::new(rules.addresses.with_own(own.into_iter().collect()));
        self.rules.store(Arc::new(rules));
        self.pool.close(|_| true);
    }

    /// A bare connection to a checked address, for TLS that is passed on unread.
    pub async fn connect(
        &self,
        sandbox: &SandboxId,
        host: &Host,
        port: u16,
    ) -> Result<(TcpStream, SocketAddr), DialError> {
        let rules = self.rules.load_full();
        let deadline = Deadline::new(host, Instant::now(), rules.timeouts.connect);
        let (stream, timings) = deadline.hold(rules.reach(sandbox, host, port)).await?;
        Ok((stream, timings.peer))
    }

    /// Addresses of `host` that were all checked, for a program that dials by itself.
    pub async fn find(
        &self,
        sandbox: &SandboxId,
        host: &Host,
        port: u16,
    ) -> Result<Vec<SocketAddr>, DialError> {
        let rules = self.rules.load_full();
        let deadline = Deadline::new(host, Instant::now(), rules.timeouts.connect);
        deadline
            .hold(rules.addresses.find(sandbox, host, port))
            .await
    }

    /// Sends a request and waits for the head of its answer. It goes out a second time only when
    /// a connection that was lying about closed before any of it was sent. Dropped, it closes
    /// the stream it used and frees its place.
    pub async fn send(&self, sandbox: &SandboxId, outgoing: Outgoing) -> Result<Sent, DialError> {
        let (route, mut request) = outgoing.into_parts();
        message::clean(&route, &mut request)?;
        let key = (sandbox.clone(), route);
        match self.attempt(&key, request, false).await {
            Ok(sent) => Ok(sent),
            Err(Failure::Final(error)) => Err(error),
            Err(Failure::Unsent(request, _)) => match self.attempt(&key, *request, true).await {
                Ok(sent) => Ok(sent),
                Err(Failure::Final(error) | Failure::Unsent(_, error)) => Err(error),
            },
        }
    }

    /// A connection of its own, HTTP/1.1, for one request that may become something else.
    pub async fn open(&self, sandbox: &SandboxId, route: &Route) -> Result<Upgradable, DialError> {
        let rules = self.rules.load_full();
        let deadline = Deadline::new(&route.host, Instant::now(), rules.timeouts.connect);
        let (wire, timings) = deadline.hold(rules.wire(sandbox, route, Use::Once)).await?;
        single::begin(route, wire, timings, rules.timeouts.response).await
    }

    /// Closes the unused connections of a sandbox; those in use close when their request
    /// ends. Its TLS sessions and the answers it had from DNS are forgotten.
    pub fn forget(&self, sandbox: &SandboxId) {
        self.pool.close(|(owner, _)| owner == sandbox);
        let rules = self.rules.load();
        rules.trust.forget(sandbox);
        rules.addresses.forget(sandbox);
    }

    /// Unused connections that are kept.
    pub fn idle(&self) -> usize {
        self.pool.idle()
    }

    async fn attempt(
        &self,
        key: &Key,
        request: Request<Content>,
        again: bool,
    ) -> Result<Sent, Failure> {
        let since = Instant::now();
        loop {
            // The shelf before the rules: see `reload`.
            let shelf = self.pool.shelf(key);
            let rules = self.rules.load_full();
            // Without a connection the settings changed, and the next shelf is under the new
            // ones.
            if let Some(taken) = exchange::take(&shelf, &rules, since, again).await? {
                return taken.send(&key.1, request, rules.timeouts.response).await;
            }
        }
    }
}

impl Rules {
    fn read(settings: &Settings, own: Arc<[SocketAddr]>) -> Result<Self, BadRoots> {
        let egress = &settings.egress;
        Ok(Self {
            addresses: Arc::new(Addresses::new(settings, own)),
            trust: Arc::new(Trust::load(&egress.extra_roots)?),
            timeouts: egress.timeouts.clone(),
        })
    }
}

impl Timings {
    fn reused(peer: SocketAddr, version: Version) -> Self {
        Self {
            resolve: Duration::ZERO,
            connect: Duration::ZERO,
            tls: Duration::ZERO,
            reused: true,
            peer,
            version,
        }
    }
}
