//! Listeners of the hooks and the MCP server: opens and closes sockets as the settings change.

use std::collections::HashMap;
use std::io;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use config::Settings;
use control::health::HealthRegistry;
use mcp::ingress::{self, Ingress};
use mcp::server::{AuthConfig, Endpoints, ListenerRules, McpServer};
use nix::sys::socket::setsockopt;
use nix::sys::socket::sockopt::ReusePort;
use tokio::net::{TcpListener, TcpSocket};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

/// Name of the health check that every configured address is bound.
const LISTENING: &str = "mcp_listening";

/// The remedy in messages about an address that cannot be bound.
const ADVICE: &str = "change server.interceptor_addr and server.mcp_server_addr, or stop the \
                      program that uses the address";

/// Connections that may wait to be accepted.
const BACKLOG: u32 = 1024;

/// Every listener of the hooks and the MCP server.
#[derive(Debug)]
pub struct McpListeners {
    mcp_server: Arc<McpServer>,
    health_registry: Arc<HealthRegistry>,
    stop: CancellationToken,
    /// Ends connections that are still open.
    cut_off: CancellationToken,
    tasks: TaskTracker,
    table: ListenerTable,
}

/// The listeners by configured address. Cloning shares the table.
#[derive(Clone, Debug, Default)]
pub struct ListenerTable(Arc<Mutex<ListenerTableState>>);

#[derive(Debug, Default)]
struct ListenerTableState {
    open: HashMap<SocketAddr, OpenMcpListener>,
    missing: HashMap<SocketAddr, UnboundAddress>,
}

/// A configured address that cannot be bound.
#[derive(Clone, Debug)]
struct UnboundAddress {
    why: String,
    endpoints: Endpoints,
}

/// A listener that is served.
#[derive(Debug)]
struct OpenMcpListener {
    /// The bound address: the system chooses for port 0.
    address: SocketAddr,
    endpoints: Endpoints,
    ingress: Arc<Ingress>,
    socket: Weak<TcpListener>,
}

/// Sockets for new settings: bound, but not served yet. Open listeners are unchanged.
#[derive(Debug)]
pub struct PreparedListeners {
    wanted: HashMap<SocketAddr, Endpoints>,
    auth: AuthConfig,
    bound: Vec<(SocketAddr, TcpListener)>,
    missing: HashMap<SocketAddr, UnboundAddress>,
}

impl ListenerTable {
    /// Checks that every configured address whose endpoints match `matches` is served.
    pub fn check(&self, matches: fn(&Endpoints) -> bool) -> Result<(), String> {
        let table = self.lock();
        let missing = table
            .missing
            .values()
            .filter(|missing| matches(&missing.endpoints));
        let open = table.open.values().filter(|open| matches(&open.endpoints));
        let ended = open.clone().filter(|open| !open.ingress.is_serving());
        let mut faults: Vec<String> = missing
            .map(|missing| missing.why.clone())
            .chain(ended.map(|open| format!("the listener on {} has ended", open.address)))
            .collect();
        if faults.is_empty() && open.count() == 0 {
            faults.push("no address is configured".to_owned());
        }
        faults.sort_unstable();
        match faults.is_empty() {
            true => Ok(()),
            false => Err(faults.join("; ")),
        }
    }

    fn lock(&self) -> MutexGuard<'_, ListenerTableState> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl PreparedListeners {
    /// Why an address could not be bound, if any.
    pub fn failure(&self) -> Option<&str> {
        self.missing
            .values()
            .map(|missing| missing.why.as_str())
            .min()
    }
}

impl McpListeners {
    /// Creates the set without listeners. `table` will contain them.
    pub fn new(
        mcp_server: Arc<McpServer>,
        health_registry: Arc<HealthRegistry>,
        table: ListenerTable,
        stop: CancellationToken,
    ) -> Self {
        Self {
            mcp_server,
            health_registry,
            stop,
            cut_off: CancellationToken::new(),
            tasks: TaskTracker::new(),
            table,
        }
    }

    /// Binds the addresses of `settings` that are not open yet. Addresses that cannot be bound
    /// are recorded as missing; see [`McpListeners::check`].
    pub fn prepare(&self, settings: &Settings) -> PreparedListeners {
        let wanted = configured_endpoints(settings);
        let table = self.table.lock();
        let (mut bound, mut missing) = (Vec::new(), HashMap::new());
        let new = |(at, _): &(&SocketAddr, &Endpoints)| !table.open.contains_key(at);
        for (at, endpoints) in wanted.iter().filter(new) {
            // Sockets that are about to close may overlap with the new socket: in a change from
            // 0.0.0.0:8090 to 127.0.0.1:8090, the old socket stays open until the new settings are
            // in force.
            let closing = table
                .open
                .iter()
                .filter(|(old, open)| !wanted.contains_key(old) && overlaps(open.address, *at))
                .filter_map(|(_, open)| open.socket.upgrade())
                .collect::<Vec<_>>();
            match bind(*at, &closing) {
                Ok(listener) => bound.push((*at, listener)),
                Err(error) => {
                    let why = format!("cannot listen on {at} for tools ({error})");
                    let endpoints = *endpoints;
                    missing.insert(*at, UnboundAddress { why, endpoints });
                }
            }
        }
        PreparedListeners {
            wanted,
            auth: AuthConfig::from_settings(settings),
            bound,
            missing,
        }
    }

    /// Refuses a change to an address that cannot be bound. An address that could not be bound
    /// before is not a reason to refuse.
    pub fn check(&self, prepared: &PreparedListeners) -> Result<(), String> {
        let table = self.table.lock();
        let new = |(at, _): &(&SocketAddr, &UnboundAddress)| !table.missing.contains_key(at);
        match prepared.missing.iter().find(new) {
            Some((_, missing)) => Err(format!("{}; {ADVICE}", missing.why)),
            None => Ok(()),
        }
    }

    /// Serves the bound sockets and closes listeners that are no longer configured. Returns
    /// when the health registry is up to date.
    pub async fn apply(&self, prepared: PreparedListeners) {
        let PreparedListeners {
            wanted,
            auth,
            bound,
            missing,
        } = prepared;
        let closing: Vec<OpenMcpListener> = {
            let mut table = self.table.lock();
            for (address, open) in &mut table.open {
                if let Some(endpoints) = wanted.get(address) {
                    open.apply_rules(*endpoints, &auth);
                }
            }
            for (address, socket) in bound {
                let Some(endpoints) = wanted.get(&address) else {
                    continue;
                };
                let address = socket.local_addr().unwrap_or(address);
                let rules = ListenerRules {
                    address,
                    endpoints: *endpoints,
                    auth: auth.clone(),
                };
                table.open.insert(address, self.serve(socket, rules));
            }
            for UnboundAddress { why, .. } in missing.values() {
                tracing::error!(%why, "mcp listener failed to bind");
            }
            table.missing = missing;
            let is_removed =
                |address: &SocketAddr, _: &mut OpenMcpListener| !wanted.contains_key(address);
            let removed = table.open.extract_if(is_removed);
            removed.map(|(_, open)| open).collect()
        };
        for open in closing {
            open.ingress.close().await;
            tracing::info!(at = %open.address, "mcp listener closed");
        }
        self.report();
    }

    /// Waits until every connection has ended, which the shutdown causes; closes those that
    /// have not ended after `limit`.
    pub async fn drain(&self, limit: Duration) {
        self.tasks.close();
        if tokio::time::timeout(limit, self.tasks.wait())
            .await
            .is_err()
        {
            self.cut_off.cancel();
            self.tasks.wait().await;
        }
    }

    fn serve(&self, socket: TcpListener, rules: ListenerRules) -> OpenMcpListener {
        let ListenerRules {
            address, endpoints, ..
        } = rules;
        let token = rules.auth.requires_token();
        tracing::info!(at = %address, token, "mcp listener opened");
        let socket = Arc::new(socket);
        let ingress = Ingress::new(rules, &self.stop, &self.cut_off);
        let open = OpenMcpListener {
            address,
            endpoints,
            ingress: Arc::clone(&ingress),
            socket: Arc::downgrade(&socket),
        };
        let mcp_server = Arc::clone(&self.mcp_server);
        self.tasks
            .spawn(ingress::serve(mcp_server, socket, ingress));
        open
    }

    /// Reports open and missing addresses to the health registry.
    fn report(&self) {
        let table = self.table.lock();
        let addresses = |matches: fn(&Endpoints) -> bool| {
            let open = table
                .open
                .values()
                .filter(move |open| matches(&open.endpoints));
            open.map(|open| open.address)
        };
        self.health_registry
            .set_listeners("interceptor", addresses(|endpoints| endpoints.hooks));
        self.health_registry
            .set_listeners("mcp", addresses(|endpoints| endpoints.tools));
        let missing = table.missing.values();
        let mut faults: Vec<&str> = missing.map(|missing| missing.why.as_str()).collect();
        faults.sort_unstable();
        match faults.as_slice() {
            [] if table.open.is_empty() => self.health_registry.remove_check(LISTENING),
            [] => self.health_registry.set_check(LISTENING, Ok(())),
            faults => {
                let fault = format!("{}; {ADVICE}", faults.join("; "));
                self.health_registry.set_check(LISTENING, Err(fault));
            }
        }
    }
}

impl OpenMcpListener {
    /// Applies new rules to an address that stays open.
    fn apply_rules(&mut self, endpoints: Endpoints, auth: &AuthConfig) {
        self.endpoints = endpoints;
        let rules = ListenerRules {
            address: self.address,
            endpoints,
            auth: auth.clone(),
        };
        if self.ingress.replace(rules) {
            let token = auth.requires_token();
            tracing::info!(at = %self.address, token, "mcp listener changed its rules");
        }
    }
}

/// The addresses of `settings` with their endpoints, if there is something to serve.
fn configured_endpoints(settings: &Settings) -> HashMap<SocketAddr, Endpoints> {
    let mut wanted = HashMap::new();
    if settings.serves_mcp() {
        let none = Endpoints {
            hooks: false,
            tools: false,
        };
        let (hooks, tools) = (settings.server.interceptor(), settings.server.mcp());
        wanted.entry(hooks).or_insert(none).hooks = true;
        wanted.entry(tools).or_insert(none).tools = true;
    }
    wanted
}

/// Whether two addresses conflict because one of them is the unspecified address.
fn overlaps(one: SocketAddr, other: SocketAddr) -> bool {
    one.port() == other.port() && (one.ip().is_unspecified() || other.ip().is_unspecified())
}

/// Listens on `at`, beside sockets of this process that are about to be closed.
fn bind(at: SocketAddr, closing: &[Arc<TcpListener>]) -> io::Result<TcpListener> {
    let socket = if at.is_ipv4() {
        TcpSocket::new_v4()?
    } else {
        TcpSocket::new_v6()?
    };
    socket.set_reuseaddr(true)?;
    // Sockets of one user that all have SO_REUSEPORT may overlap. The option is cleared at
    // once; the kernel may still let a process of the same user with SO_REUSEPORT share the
    // port until no socket is bound to it (`inet_csk_get_port` keeps the state by port).
    let overlap = |allowed: bool| {
        let set = |old: &Arc<TcpListener>| setsockopt(&**old, ReusePort, &allowed);
        closing.iter().try_for_each(set)
    };
    if closing.is_empty() {
        socket.bind(at)?;
        return socket.listen(BACKLOG);
    }
    socket.set_reuseport(true)?;
    let bound = overlap(true)
        .map_err(io::Error::from)
        .and_then(|()| socket.bind(at))
        .and_then(|()| socket.listen(BACKLOG));
    overlap(false)?;
    let listener = bound?;
    setsockopt(&listener, ReusePort, &false)?;
    Ok(listener)
}
