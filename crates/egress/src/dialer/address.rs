//! Resolves hosts to addresses that may be dialled. Every address of a name is checked, and one
//! refused address refuses the name: a name that resolves to an address in the operator's network
//! is probably an attack (DNS rebinding).

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

/// Timeout of one query. Two attempts fit into the default connect timeout.
const QUERY_TIMEOUT: Duration = Duration::from_secs(3);

/// How long the resolver caches that a name does not exist.
const MAX_NEGATIVE_TTL: Duration = Duration::from_secs(30);

/// Queries in flight to one resolver; hickory's default is 32.
const MAX_QUERIES: usize = 512;

/// Cached DNS answers per sandbox.
const MAX_CACHED_ANSWERS: u64 = 256;

/// Address resolution and the checks of addresses.
pub(super) struct Addresses {
    /// The operator's fixed addresses.
    pub(super) resolve: FixedAddresses,
    /// Private addresses that the operator allows.
    pub(super) private_exceptions: Vec<PrivateAddressException>,
    /// The gate's own listeners, which are always refused.
    pub(super) own: Arc<[SocketAddr]>,
    /// The operator's rules if some of them deny names: CNAME targets are checked against them.
    denied: Option<Arc<Allowlist>>,
    resolvers: Arc<Resolvers>,
}

/// One resolver per sandbox. Resolvers cache answers: a shared cache would show a sandbox, by
/// its response times, which names another one has resolved.
struct Resolvers {
    /// The upstream servers, or why they could not be read.
    servers: Result<Vec<SocketAddr>, String>,
    by_sandbox: Mutex<HashMap<SandboxId, TokioResolver>>,
}

impl Addresses {
    /// Reads the system's resolvers if the settings refer to them.
    pub(super) fn new(settings: &Settings, own: Arc<[SocketAddr]>) -> Self {
        let egress = &settings.egress;
        let allowlist = settings.allowlist();
        Self {
            resolve: egress.resolve.clone(),
            private_exceptions: egress.allow_private.clone(),
            own,
            denied: allowlist
                .denies_names()
                .then(|| Arc::new(allowlist.clone())),
            resolvers: Arc::new(Resolvers {
                servers: resolvers::read(&egress.dns),
                by_sandbox: Mutex::default(),
            }),
        }
    }

    /// A copy with other listener addresses.
    pub(super) fn with_own(&self, own: Arc<[SocketAddr]>) -> Self {
        Self {
            resolve: self.resolve.clone(),
            private_exceptions: self.private_exceptions.clone(),
            own,
            denied: self.denied.clone(),
            resolvers: Arc::clone(&self.resolvers),
        }
    }

    /// Checked addresses of `host`, IPv6 and IPv4 alternating. IP addresses and hosts with a
    /// fixed address need no resolver.
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
        Ok(interleave_families(checked))
    }

    /// Checks one address.
    pub(super) fn check(
        &self,
        host: &Host,
        ip: IpAddr,
        port: u16,
    ) -> Result<SocketAddr, DialError> {
        let address = SocketAddr::new(ip, port);
        self.refuse_own(host, address)?;
        let class = classify(ip);
        let mut private_exceptions = self.private_exceptions.iter();
        if class.is_dialable()
            || private_exceptions
                .any(|exception| exception.host.matches(host) && exception.cidr.contains(ip))
        {
            return Ok(address);
        }
        Err(DialError::Refused {
            host: host.clone(),
            address: ip,
            class: class.as_str(),
        })
    }

    /// Checks a CNAME target against the denied names. A target that is not a valid host name
    /// cannot match a rule.
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

    /// Refuses the gate's own listeners: a request to them would get another caller's identity.
    fn refuse_own(&self, host: &Host, address: SocketAddr) -> Result<(), DialError> {
        if !self.own.iter().any(|own| reaches_listener(*own, address)) {
            return Ok(());
        }
        Err(DialError::Refused {
            host: host.clone(),
            address: address.ip(),
            class: "the gate's own address",
        })
    }

    /// Drops the resolver of a sandbox and its cache.
    pub(super) fn forget(&self, sandbox: &SandboxId) {
        self.resolvers.by_sandbox().remove(sandbox);
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
        let resolver = self.resolvers.resolver_of(sandbox).map_err(unresolved)?;
        let mut query = Name::from_ascii(name.as_str()).map_err(|error| DialError::BadName {
            host: host.clone(),
            detail: error.to_string(),
        })?;
        // Resolve exactly the name that was checked, without search domains.
        query.set_fqdn(true);
        let found: Vec<IpAddr> = match resolver.lookup_ip(query).await {
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
    fn resolver_of(&self, sandbox: &SandboxId) -> Result<TokioResolver, String> {
        let servers = self.servers.as_ref().map_err(Clone::clone)?;
        let mut by_sandbox = self.by_sandbox();
        if let Some(resolver) = by_sandbox.get(sandbox) {
            return Ok(resolver.clone());
        }
        let resolver = open(servers)?;
        by_sandbox.insert(sandbox.clone(), resolver.clone());
        Ok(resolver)
    }

    fn by_sandbox(&self) -> MutexGuard<'_, HashMap<SandboxId, TokioResolver>> {
        self.by_sandbox
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
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
    options.timeout = QUERY_TIMEOUT;
    options.attempts = 2;
    options.cache_size = MAX_CACHED_ANSWERS;
    options.negative_max_ttl = Some(MAX_NEGATIVE_TTL);
    options.max_active_requests = MAX_QUERIES;
    // CNAME targets are checked, so the answer has to contain them.
    options.preserve_intermediates = true;
    let servers = ResolverConfig::from_name_servers(servers.collect());
    let mut builder = TokioResolver::builder_with_config(servers, TokioRuntimeProvider::default());
    *builder.options_mut() = options;
    builder.build().map_err(|error| error.to_string())
}

/// Alternates IPv6 and IPv4 addresses, IPv6 first (RFC 8305, section 4).
fn interleave_families(addresses: Vec<SocketAddr>) -> Vec<SocketAddr> {
    let (six, four): (Vec<_>, Vec<_>) = addresses.into_iter().partition(SocketAddr::is_ipv6);
    let (mut six, mut four) = (six.into_iter(), four.into_iter());
    let mut ordered = Vec::with_capacity(six.len() + four.len());
    loop {
        let pair = [six.next(), four.next()];
        if pair == [None, None] {
            return ordered;
        }
        ordered.extend(pair.into_iter().flatten());
    }
}

/// Whether a connection to `address` would arrive at the listener `own`. The unspecified
/// address stands for every address of this host, on either side.
fn reaches_listener(own: SocketAddr, address: SocketAddr) -> bool {
    let (listener_ip, dialled_ip) = (own.ip().to_canonical(), address.ip().to_canonical());
    own.port() == address.port()
        && (listener_ip == dialled_ip
            || (listener_ip.is_unspecified() && is_local(dialled_ip))
            || (dialled_ip.is_unspecified() && is_local(listener_ip)))
}

/// Whether `ip` is an address of this host; true if the interfaces cannot be read.
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
