//! Where the hooks and the MCP server listen: sockets are kept by address, and opened and
//! closed as the settings want.

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

/// The check that says whether every configured address is listened at.
const LISTENING: &str = "mcp_listening";

/// What an operator of a gate can do about an address that cannot be bound.
const ADVICE: &str =
    "change server.interceptor_addr and server.mcp_server_addr, or end what is there";

/// Connections that may wait to be accepted.
const BACKLOG: u32 = 1024;

/// Every listener of the hooks and the MCP server.
#[derive(Debug)]
pub struct Listeners {
    mcp_server: Arc<McpServer>,
    health_registry: Arc<HealthRegistry>,
    stop: CancellationToken,
    /// Ends connections that are still open.
    cut_off: CancellationToken,
    tasks: TaskTracker,
    table: ListenerTable,
}

/// Every listener by its configured address. Cloning shares the table.
#[derive(Clone, Debug, Default)]
pub struct ListenerTable(Arc<Mutex<Table>>);

#[derive(Debug, Default)]
struct Table {
    open: HashMap<SocketAddr, Open>,
    missing: HashMap<SocketAddr, Missing>,
}

/// An address that is configured and cannot be bound.
#[derive(Clone, Debug)]
struct Missing {
    why: String,
    endpoints: Endpoints,
}

/// A listener that is served.
#[derive(Debug)]
struct Open {
    /// Where it is: the system chooses for port 0.
    at: SocketAddr,
    endpoints: Endpoints,
    ingress: Arc<Ingress>,
    socket: Weak<TcpListener>,
}

/// Sockets for new settings. They are bound; nothing is served at them yet, and nothing that is
/// open has changed.
#[derive(Debug)]
pub struct PreparedListeners {
    wanted: HashMap<SocketAddr, Endpoints>,
    auth: AuthConfig,
    bound: Vec<(SocketAddr, TcpListener)>,
    missing: HashMap<SocketAddr, Missing>,
}

impl ListenerTable {
    /// Checks, now, that what `offered` selects is served at every address that is configured
    /// for it.
    pub fn check(&self, offered: fn(&Endpoints) -> bool) -> Result<(), String> {
        let table = self.lock();
        let missing = table.missing.values().filter(|one| offered(&one.endpoints));
        let open = table.open.values().filter(|one| offered(&one.endpoints));
        let ended = open.clone().filter(|one| !one.ingress.is_serving());
        let mut faults: Vec<String> = missing
            .map(|one| one.why.clone())
            .chain(ended.map(|one| format!("the listener at {} has ended", one.at)))
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

    fn lock(&self) -> MutexGuard<'_, Table> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl PreparedListeners {
    /// Why an address cannot be bound, if one cannot.
    pub fn failure(&self) -> Option<&str> {
        self.missing.values().map(|one| one.why.as_str()).min()
    }
}

impl Listeners {
    /// Listens nowhere yet, and keeps what will be open in `table`.
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

    /// Binds what `settings` want and is not open yet. What cannot be bound is missing; see
    /// [`Listeners::check`].
    pub fn prepare(&self, settings: &Settings) -> PreparedListeners {
        let wanted = wanted(settings);
        let table = self.table.lock();
        let (mut bound, mut missing) = (Vec::new(), HashMap::new());
        let new = |(at, _): &(&SocketAddr, &Endpoints)| !table.open.contains_key(at);
        for (at, endpoints) in wanted.iter().filter(new) {
            // 127.0.0.1:8090 in the place of 0.0.0.0:8090: the old one is open until the new
            // one is in force.
            let leaving = table
                .open
                .iter()
                .filter(|(old, open)| !wanted.contains_key(old) && overlaps(open.at, *at))
                .filter_map(|(_, open)| open.socket.upgrade())
                .collect::<Vec<_>>();
            match bind(*at, &leaving) {
                Ok(listener) => bound.push((*at, listener)),
                Err(error) => {
                    let why = format!("tools cannot be served at {at} ({error})");
                    let endpoints = *endpoints;
                    missing.insert(*at, Missing { why, endpoints });
                }
            }
        }
        PreparedListeners {
            wanted,
            auth: AuthConfig::of(settings),
            bound,
            missing,
        }
    }

    /// Refuses a change to an address that cannot be bound. An address that was missing before
    /// is no reason to refuse: the change does not make it any worse.
    pub fn check(&self, prepared: &PreparedListeners) -> Result<(), String> {
        let table = self.table.lock();
        let new = |(at, _): &(&SocketAddr, &Missing)| !table.missing.contains_key(at);
        match prepared.missing.iter().find(new) {
            Some((_, missing)) => Err(format!("{}; {ADVICE}", missing.why)),
            None => Ok(()),
        }
    }

    /// Serves what was bound, with the rules of its settings, and closes what they do not
    /// want. Returns when health says what is open.
    pub async fn apply(&self, prepared: PreparedListeners) {
        let PreparedListeners {
            wanted,
            auth,
            bound,
            missing,
        } = prepared;
        let closing: Vec<Open> = {
            let mut table = self.table.lock();
            for (address, open) in &mut table.open {
                if let Some(endpoints) = wanted.get(address) {
                    open.follow(*endpoints, &auth);
                }
            }
            for (address, socket) in bound {
                let Some(endpoints) = wanted.get(&address) else {
                    continue;
                };
                let at = socket.local_addr().unwrap_or(address);
                let rules = ListenerRules {
                    at,
                    endpoints: *endpoints,
                    auth: auth.clone(),
                };
                table.open.insert(address, self.serve(socket, rules));
            }
            for Missing { why, .. } in missing.values() {
                tracing::error!(%why, "mcp listener failed to bind");
            }
            table.missing = missing;
            let gone = |address: &SocketAddr, _: &mut Open| !wanted.contains_key(address);
            let gone = table.open.extract_if(gone);
            gone.map(|(_, open)| open).collect()
        };
        for open in closing {
            open.ingress.close().await;
            tracing::info!(at = %open.at, "mcp listener closed");
        }
        self.report();
    }

    /// Waits until every connection has ended, which the stop makes them do; those that have not
    /// after `limit` are cut off.
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

    fn serve(&self, socket: TcpListener, rules: ListenerRules) -> Open {
        let ListenerRules { at, endpoints, .. } = rules;
        let token = rules.auth.requires_token();
        tracing::info!(%at, token, "mcp listener opened");
        let socket = Arc::new(socket);
        let ingress = Ingress::new(rules, &self.stop, &self.cut_off);
        let open = Open {
            at,
            endpoints,
            ingress: Arc::clone(&ingress),
            socket: Arc::downgrade(&socket),
        };
        let mcp_server = Arc::clone(&self.mcp_server);
        self.tasks
            .spawn(ingress::serve(mcp_server, socket, ingress));
        open
    }

    /// Posts what is open, and what is missing.
    fn report(&self) {
        let table = self.table.lock();
        let at = |offered: fn(&Endpoints) -> bool| {
            let open = table
                .open
                .values()
                .filter(move |open| offered(&open.endpoints));
            open.map(|open| open.at)
        };
        self.health_registry
            .listening("interceptor", at(|endpoints| endpoints.hooks));
        self.health_registry
            .listening("mcp", at(|endpoints| endpoints.tools));
        let missing = table.missing.values();
        let mut faults: Vec<&str> = missing.map(|one| one.why.as_str()).collect();
        faults.sort_unstable();
        match faults.as_slice() {
            [] if table.open.is_empty() => self.health_registry.retract(LISTENING),
            [] => self.health_registry.check(LISTENING, Ok(())),
            faults => {
                let fault = format!("{}; {ADVICE}", faults.join("; "));
                self.health_registry.check(LISTENING, Err(fault));
            }
        }
    }
}

impl Open {
    /// Puts new rules in force at an address that stays.
    fn follow(&mut self, endpoints: Endpoints, auth: &AuthConfig) {
        self.endpoints = endpoints;
        let rules = ListenerRules {
            at: self.at,
            endpoints,
            auth: auth.clone(),
        };
        if self.ingress.replace(rules) {
            let token = auth.requires_token();
            tracing::info!(at = %self.at, token, "mcp listener changed its rules");
        }
    }
}

/// Where `settings` want what, if there is something to serve.
fn wanted(settings: &Settings) -> HashMap<SocketAddr, Endpoints> {
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

/// Whether a socket at one address keeps another from being bound, since one of them stands for
/// every address.
fn overlaps(one: SocketAddr, other: SocketAddr) -> bool {
    one.port() == other.port() && (one.ip().is_unspecified() || other.ip().is_unspecified())
}

/// Listens at `at`, beside our own sockets that are about to be closed.
fn bind(at: SocketAddr, leaving: &[Arc<TcpListener>]) -> io::Result<TcpListener> {
    let socket = if at.is_ipv4() {
        TcpSocket::new_v4()?
    } else {
        TcpSocket::new_v6()?
    };
    socket.set_reuseaddr(true)?;
    // Sockets that all have this option may overlap, if they are of one user. It is taken away
    // again at once; the kernel may let a process of the same user that asks for it share the
    // port until nothing is bound there any more (`inet_csk_get_port` keeps it by port).
    let overlap = |allowed: bool| {
        let set = |old: &Arc<TcpListener>| setsockopt(&**old, ReusePort, &allowed);
        leaving.iter().try_for_each(set)
    };
    if leaving.is_empty() {
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
