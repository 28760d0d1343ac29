//! Dialer: the only code that opens connections to upstreams, for the proxy, WebSocket, token
//! refresh and mirrors.
//!
//! ```text
//!   host ──▶ addresses, all checked ──▶ TCP to one of them ──▶ TLS, always verified ──▶ HTTP
//! ```
//! The caller has already decided about the name: no DNS query is sent for a denied name. The
//! dialled address is the one that was checked, without a second lookup, and redirects are never
//! followed.

mod address;
mod body;
mod connector;
mod error;
mod exchange;
mod http1_connection;
mod io_tap;
mod message;
mod pool;
mod socket;
mod trust;
mod upgradable;
mod wake_flag;

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
use self::connector::{Deadline, Purpose};
use self::exchange::AttemptError;
use self::pool::{Key, Pool};
use self::trust::Trust;
use crate::body::MessageBody;
use crate::outgoing::{Outgoing, Route};

pub use self::body::UpstreamBody;
pub use self::error::{DialError, DialStep};
pub use self::trust::BadRoots;
pub use self::upgradable::{UpgradableConnection, UpgradeResponse};

/// An upstream's response, whose body streams.
#[derive(Debug)]
pub struct UpstreamResponse {
    /// Head and body. The connection is released when the body is read or dropped.
    pub response: Response<UpstreamBody>,
    /// Connect timings and peer.
    pub timings: Timings,
}

/// Duration of each connect step, zero on a reused connection, and the peer.
#[derive(Clone, Copy, Debug)]
pub struct Timings {
    /// The DNS lookup.
    pub resolve: Duration,
    /// The TCP connect.
    pub connect: Duration,
    /// The TLS handshake.
    pub tls: Duration,
    /// Whether the connection came from the pool.
    pub reused: bool,
    /// The upstream's address.
    pub peer: SocketAddr,
    /// The HTTP version of the connection.
    pub version: Version,
}

/// Opens and pools connections to upstreams.
pub struct Dialer {
    pool: Arc<Pool>,
    config: ArcSwap<DialConfig>,
    /// Serializes changes of `config`.
    change: Mutex<()>,
}

/// Settings that a reload replaces. A request uses those that were in force when it began.
#[derive(Clone)]
struct DialConfig {
    addresses: Arc<Addresses>,
    trust: Arc<Trust>,
    timeouts: EgressTimeouts,
}

/// New dialer settings that are read but not applied yet.
pub struct PreparedDialer(DialConfig);

impl Dialer {
    /// Creates a dialer. Blocks: reads root certificates and the system's resolvers.
    pub fn new(settings: &Settings) -> Result<Self, BadRoots> {
        Ok(Self {
            pool: Pool::new(),
            config: ArcSwap::from_pointee(DialConfig::read(settings, Arc::from([]))?),
            change: Mutex::new(()),
        })
    }

    /// Prepares new settings for [`Dialer::apply`]. Blocks, as [`Dialer::new`] does.
    pub fn prepare(settings: &Settings) -> Result<PreparedDialer, BadRoots> {
        Ok(PreparedDialer(DialConfig::read(settings, Arc::from([]))?))
    }

    /// Applies new settings. Idle connections that they might not allow are closed; running
    /// requests finish on their connections.
    pub fn apply(&self, PreparedDialer(mut new): PreparedDialer) {
        let _guard = self.change.lock().unwrap_or_else(PoisonError::into_inner);
        let old = self.config.load_full();
        new.addresses = Arc::new(new.addresses.with_own(Arc::clone(&old.addresses.own)));
        let same_roots = new.trust.is_same(&old.trust);
        if same_roots {
            // TLS sessions can be resumed under the same roots.
            new.trust = Arc::clone(&old.trust);
        }
        let new = Arc::new(new);
        // Store before closing pools, so that a request with a new pool reads the new settings.
        self.config.store(Arc::clone(&new));
        let same_exceptions = new.addresses.private_exceptions == old.addresses.private_exceptions;
        self.pool.close(|(_, Route { host, port, tls })| {
            let fixed = |config: &DialConfig| config.addresses.resolve.get(host, *port);
            (*tls && !same_roots) || !same_exceptions || fixed(&new) != fixed(&old)
        });
    }

    /// Prepares and applies new settings. Blocks.
    pub fn reload(&self, settings: &Settings) -> Result<(), BadRoots> {
        self.apply(Self::prepare(settings)?);
        Ok(())
    }

    /// Sets the addresses of the gate's own listeners, which are never dialled, whatever the
    /// settings allow. An unspecified address stands for every address of this host.
    pub fn set_own_addresses(&self, own: impl IntoIterator<Item = SocketAddr>) {
        let _guard = self.change.lock().unwrap_or_else(PoisonError::into_inner);
        let mut config = DialConfig::clone(&self.config.load());
        config.addresses = Arc::new(config.addresses.with_own(own.into_iter().collect()));
        self.config.store(Arc::new(config));
        self.pool.close(|_| true);
    }

    /// Opens a TCP connection to a checked address, for TLS passthrough.
    pub async fn connect(
        &self,
        sandbox: &SandboxId,
        host: &Host,
        port: u16,
    ) -> Result<(TcpStream, SocketAddr), DialError> {
        let config = self.config.load_full();
        let deadline = Deadline::new(host, Instant::now(), config.timeouts.connect);
        let (stream, timings) = deadline
            .enforce(config.connect_tcp(sandbox, host, port))
            .await?;
        Ok((stream, timings.peer))
    }

    /// Resolves `host` to checked addresses, for a program (git or ssh) that opens the connection.
    pub async fn resolve(
        &self,
        sandbox: &SandboxId,
        host: &Host,
        port: u16,
    ) -> Result<Vec<SocketAddr>, DialError> {
        let config = self.config.load_full();
        let deadline = Deadline::new(host, Instant::now(), config.timeouts.connect);
        deadline
            .enforce(config.addresses.find(sandbox, host, port))
            .await
    }

    /// Sends a request and waits for the response head. The request is sent again only if an idle
    /// connection closed before any of the request was sent. Dropping the future closes its
    /// stream and frees its pool slot.
    pub async fn send(
        &self,
        sandbox: &SandboxId,
        outgoing: Outgoing,
    ) -> Result<UpstreamResponse, DialError> {
        let (route, mut request) = outgoing.into_parts();
        message::strip_headers(&route, &mut request)?;
        let key = (sandbox.clone(), route);
        match self.attempt(&key, request, false).await {
            Ok(response) => Ok(response),
            Err(AttemptError::Final(error)) => Err(error),
            Err(AttemptError::Unsent(request, _)) => match self.attempt(&key, *request, true).await
            {
                Ok(response) => Ok(response),
                Err(AttemptError::Final(error) | AttemptError::Unsent(_, error)) => Err(error),
            },
        }
    }

    /// Opens a single-use HTTP/1.1 connection for a request that may upgrade.
    pub async fn open(
        &self,
        sandbox: &SandboxId,
        route: &Route,
    ) -> Result<UpgradableConnection, DialError> {
        let config = self.config.load_full();
        let deadline = Deadline::new(&route.host, Instant::now(), config.timeouts.connect);
        let (stream, timings) = deadline
            .enforce(config.connect_stream(sandbox, route, Purpose::SingleUse))
            .await?;
        upgradable::begin(route, stream, timings, config.timeouts.response).await
    }

    /// Removes the state of a sandbox: idle connections (those in use close when their request
    /// ends), TLS sessions and cached DNS answers.
    pub fn forget(&self, sandbox: &SandboxId) {
        self.pool.close(|(owner, _)| owner == sandbox);
        let config = self.config.load();
        config.trust.forget(sandbox);
        config.addresses.forget(sandbox);
    }

    /// Number of idle connections in the pool.
    pub fn idle(&self) -> usize {
        self.pool.idle()
    }

    async fn attempt(
        &self,
        key: &Key,
        request: Request<MessageBody>,
        is_retry: bool,
    ) -> Result<UpstreamResponse, AttemptError> {
        let start = Instant::now();
        loop {
            // Take the pool before the settings: see `apply`.
            let host_pool = self.pool.host_pool(key);
            let config = self.config.load_full();
            // Without a connection the pool was closed by new settings: retry with a new pool.
            if let Some(ready) =
                exchange::take_connection(&host_pool, &config, start, is_retry).await?
            {
                return ready.send(&key.1, request, config.timeouts.response).await;
            }
        }
    }
}

impl DialConfig {
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
