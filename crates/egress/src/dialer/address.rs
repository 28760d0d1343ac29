//! From a host to addresses that may be dialled. Every answer is looked at, and one that is
//! refused refuses the name: a name that leads into the operator's network today was put
//! there to lead there.

use std::collections::HashMap;
use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use config::Settings;
use config::section::egress::{FixedAddresses, PrivateAddressException};
use hickory_resolver::TokioResolver;
use hickory_resolver::config::{NameServerConfig, ResolverConfig, ResolverOpts};
use hickory_resolver::net::runtime::TokioRuntimeProvider;
use hickory_resolver::proto::rr::{Name, RData};
use policy::allowlist::Allowlist;
use policy::host::{Host, HostName, classify};
use policy::id::SandboxId;

use super::error::DialError;
use crate::resolvers;

/// One try at one resolver. Two of them fit into the default time for a connection.
const QUERY: Duration = Duration::from_secs(3);

/// Names that do not exist are asked for again after this.
const FORGET_NEGATIVE: Duration = Duration::from_secs(30);

/// Queries on their way to one resolver; the library's default refuses the 33rd.
const MOST_QUERIES: usize = 512;

/// Answers that are remembered for one sandbox.
const REMEMBERED: u64 = 256;

/// Where names lead, and which of it may be dialled.
pub(super) struct Addresses {
    /// The operator's fixed addresses.
    pub(super) resolve: FixedAddresses,
    /// The operator's exceptions.
    pub(super) holes: Vec<PrivateAddressException>,
    /// The gate's own listeners, refused always.
    pub(super) own: Arc<[SocketAddr]>,
    /// The operator's rules, where some of them deny names: aliases are held against them.
    denied: Option<Arc<Allowlist>>,
    resolvers: Arc<Resolvers>,
}

/// A resolver for each sandbox. They remember answers, and how fast one comes would tell a
/// sandbox what another asked for.
struct Resolvers {
    servers: Result<Vec<SocketAddr>, String>,
    each: Mutex<HashMap<SandboxId, TokioResolver>>,
}

impl Addresses {
    /// Reads the system's resolvers if they are asked for.
    pub(super) fn new(settings: &Settings, own: Arc<[SocketAddr]>) -> Self {
        let egress = &settings.egress;
        let allowlist = settings.allowlist();
        Self {
            resolve: egress.resolve.clone(),
            holes: egress.allow_private.clone(),
            own,
            denied: allowlist
                .denies_names()
                .then(|| Arc::new(allowlist.clone())),
            resolvers: Arc::new(Resolvers {
                servers: resolvers::read(&egress.dns),
                each: Mutex::default(),
            }),
        }
    }

    /// The same, with other listeners.
    pub(super) fn with_own(&self, own: Arc<[SocketAddr]>) -> Self {
        Self {
            resolve: self.resolve.clone(),
            holes: self.holes.clone(),
            own,
            denied: self.denied.clone(),
            resolvers: Arc::clone(&self.resolvers),
        }
    }

    /// Addresses of `host` that were all checked, IPv6 and IPv4 in turns. Asks no resolver
    /// about an address, nor about a host with a fixed one.
    pub(super) async fn find(
        &self,
        sandbox: &SandboxId,
        host: &Host,
        port: u16,
    ) -> Result<Vec<SocketAddr>, DialError> {
        if let Some(fixed) = self.resolve.get(host, port) {
            self.refuse_own(host, fixed)?;
            return Ok(vec![fixed]);
        }
        let found = match host {
            Host::Ip(ip) => vec![*ip],
            Host::Name(name) => self.look_up(sandbox, host, name).await?,
        };
        let checked = found
            .into_iter()
            .map(|ip| self.check(host, ip, port))
            .collect::<Result<Vec<_>, _>>()?;
        Ok(in_turns(checked))
    }

    /// Judges one address.
    pub(super) fn check(
        &self,
        host: &Host,
        ip: IpAddr,
        port: u16,
    ) -> Result<SocketAddr, DialError> {
        let address = SocketAddr::new(ip, port);
        self.refuse_own(host, address)?;
        let class = classify(ip);
        let mut holes = self.holes.iter();
        if class.is_dialable()
            || holes.any(|hole| hole.host.matches(host) && hole.cidr.contains(ip))
        {
            return Ok(address);
        }
        Err(DialError::Refused {
            host: host.clone(),
            address: ip,
            class: class.as_str(),
        })
    }

    /// Judges a name behind an alias. What cannot be read as a host's name is none that the
    /// operator could have denied.
    fn check_alias(&self, host: &Host, alias: &Name) -> Result<(), DialError> {
        let Some(denied) = &self.denied else {
            return Ok(());
        };
        let Ok(alias) = Host::parse(&alias.to_ascii()) else {
            return Ok(());
        };
        denied
            .judge_alias(&alias)
            .map_err(|denial| DialError::Alias {
                host: host.clone(),
                alias,
                rule: denial.rule,
            })
    }

    /// A request that comes back in at the gate's own door would be judged as somebody else's.
    fn refuse_own(&self, host: &Host, address: SocketAddr) -> Result<(), DialError> {
        if !self.own.iter().any(|own| is_same(*own, address)) {
            return Ok(());
        }
        Err(DialError::Refused {
            host: host.clone(),
            address: address.ip(),
            class: "the gate's own address",
        })
    }

    /// Forgets what was asked for a sandbox.
    pub(super) fn forget(&self, sandbox: &SandboxId) {
        self.resolvers.each().remove(sandbox);
    }

    async fn look_up(
        &self,
        sandbox: &SandboxId,
        host: &Host,
        name: &HostName,
    ) -> Result<Vec<IpAddr>, DialError> {
        let unresolved = |detail: String| DialError::Unresolved {
            host: host.clone(),
            detail,
        };
        let resolver = self.resolvers.of(sandbox).map_err(unresolved)?;
        let mut asked = Name::from_ascii(name.as_str()).map_err(|error| DialError::BadName {
            host: host.clone(),
            detail: error.to_string(),
        })?;
        // What was judged is what is asked for: no search domain is tried.
        asked.set_fqdn(true);
        let found: Vec<IpAddr> = match resolver.lookup_ip(asked).await {
            Ok(found) => {
                for record in found.as_lookup().answers() {
                    if let RData::CNAME(alias) = &record.data {
                        self.check_alias(host, &alias.0)?;
                    }
                }
                found.iter().collect()
            }
            Err(error) if error.is_no_records_found() || error.is_nx_domain() => Vec::new(),
            Err(error) => return Err(unresolved(error.to_string())),
        };
        if found.is_empty() {
            return Err(DialError::NoSuchName { host: host.clone() });
        }
        Ok(found)
    }
}

impl Resolvers {
    fn of(&self, sandbox: &SandboxId) -> Result<TokioResolver, String> {
        let servers = self.servers.as_ref().map_err(Clone::clone)?;
        let mut each = self.each();
        if let Some(resolver) = each.get(sandbox) {
            return Ok(resolver.clone());
        }
        let resolver = open(servers)?;
        each.insert(sandbox.clone(), resolver.clone());
        Ok(resolver)
    }

    fn each(&self) -> MutexGuard<'_, HashMap<SandboxId, TokioResolver>> {
        self.each.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn open(servers: &[SocketAddr]) -> Result<TokioResolver, String> {
    let servers = servers.iter().map(|address| {
        let mut server = NameServerConfig::udp_and_tcp(address.ip());
        for connection in &mut server.connections {
            connection.port = address.port();
        }
        server
    });
    let mut options = ResolverOpts::default();
    options.timeout = QUERY;
    options.attempts = 2;
    options.cache_size = REMEMBERED;
    options.negative_max_ttl = Some(FORGET_NEGATIVE);
    options.max_active_requests = MOST_QUERIES;
    // Aliases are looked at, so they have to be in the answer.
    options.preserve_intermediates = true;
    let servers = ResolverConfig::from_name_servers(servers.collect());
    let mut builder = TokioResolver::builder_with_config(servers, TokioRuntimeProvider::default());
    *builder.options_mut() = options;
    builder.build().map_err(|error| error.to_string())
}

/// RFC 8305, section 4: the families take turns, beginning with IPv6.
fn in_turns(addresses: Vec<SocketAddr>) -> Vec<SocketAddr> {
    let (six, four): (Vec<_>, Vec<_>) = addresses.into_iter().partition(SocketAddr::is_ipv6);
    let (mut six, mut four) = (six.into_iter(), four.into_iter());
    let mut turns = Vec::with_capacity(six.len() + four.len());
    loop {
        let pair = [six.next(), four.next()];
        if pair == [None, None] {
            return turns;
        }
        turns.extend(pair.into_iter().flatten());
    }
}

/// Whether a connection to `address` would arrive at the listener `own`. The unspecified
/// address stands for every address of this host, on either side.
fn is_same(own: SocketAddr, address: SocketAddr) -> bool {
    let (mine, other) = (own.ip().to_canonical(), address.ip().to_canonical());
    own.port() == address.port()
        && (mine == other
            || (mine.is_unspecified() && is_local(other))
            || (other.is_unspecified() && is_local(mine)))
}

/// When the interfaces cannot be read, every address might be ours.
fn is_local(ip: IpAddr) -> bool {
    if ip.is_loopback() || ip.is_unspecified() {
        return true;
    }
    let Ok(interfaces) = nix::ifaddrs::getifaddrs() else {
        return true;
    };
    let mut addresses = interfaces.filter_map(|interface| interface.address);
    addresses.any(|address| {
        let four = address.as_sockaddr_in().map(|a| IpAddr::V4(a.ip()));
        let six = address.as_sockaddr_in6().map(|a| IpAddr::V6(a.ip()));
        four.or(six) == Some(ip)
    })
}
