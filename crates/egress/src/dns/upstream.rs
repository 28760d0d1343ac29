//! Client of the upstream resolvers, and parser of their answers.
//!
//! hickory transports the query (UDP, TCP after a truncated answer, several servers). It does not
//! follow aliases: an alias is checked before it is queried.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use arc_swap::ArcSwap;
use hickory_proto::op::{DnsRequestOptions, Message, Query, ResponseCode};
use hickory_proto::rr::{Name, RData, RecordType};
use hickory_resolver::config::{ConnectionConfig, NameServerConfig, ResolverOpts};
use hickory_resolver::net::runtime::TokioRuntimeProvider;
use hickory_resolver::net::xfer::{DnsHandle, FirstAnswer};
use hickory_resolver::net::{DnsError, NetError};
use hickory_resolver::{NameServerPool, PoolContext, TlsConfig};
use policy::host::{Host, HostName};
use policy::reason::Reason;

/// Maximum number of aliases of one name.
pub(super) const MAX_HOPS: usize = 8;

/// Maximum number of records that are read from one answer.
const MAX_RECORDS: usize = 64;

/// Minimum time for which an answer is cached, in seconds.
const MIN_TTL: u32 = 1;
/// Maximum time for which an answer with records is cached, in seconds.
const MAX_TTL: u32 = 300;
/// Maximum time for which an answer without records is cached, in seconds.
const MAX_EMPTY_TTL: u32 = 30;

/// The part of an upstream answer that belongs to the query: the chain of aliases from the queried
/// name, and the result for the last one.
#[derive(Clone, Debug)]
pub(super) struct AliasChain {
    pub(super) hops: Vec<HostName>,
    pub(super) end: ChainEnd,
    pub(super) ttl: u32,
}

/// The result for the last alias.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum ChainEnd {
    Records(Vec<RData>),
    /// The name has no records of this type.
    NoData,
    /// The name does not exist.
    NoName,
    /// The answer has no result for the last alias, which needs its own query.
    Unresolved,
}

/// Why a query was not answered.
#[derive(Debug, thiserror::Error)]
pub(super) enum UpstreamError {
    #[error("{0}")]
    NoServers(String),
    #[error("querying the DNS resolver failed: {0}")]
    Query(NetError),
    #[error("the answer contains an invalid host name")]
    BadName,
    #[error("the answer has more than {MAX_HOPS} aliases")]
    TooManyHops,
    #[error("the DNS resolver did not answer in time")]
    Timeout,
}

impl UpstreamError {
    pub(super) fn reason(&self) -> Reason {
        match self {
            UpstreamError::NoServers(_) => Reason::ConnectFailed,
            UpstreamError::Query(NetError::Timeout) | UpstreamError::Timeout => {
                Reason::UpstreamTimeout
            }
            UpstreamError::Query(_) => Reason::ConnectFailed,
            UpstreamError::BadName | UpstreamError::TooManyHops => Reason::BadName,
        }
    }
}

type Pool = NameServerPool<TokioRuntimeProvider>;

/// The configured upstream resolvers.
pub(super) struct UpstreamResolvers {
    timeout: Duration,
    resolvers: ArcSwap<ResolverSet>,
}

/// The servers of one configuration, and the connection pool to them.
struct ResolverSet {
    servers: Result<Vec<SocketAddr>, String>,
    pool: Option<Pool>,
}

impl UpstreamResolvers {
    /// Creates the client without resolvers. `timeout` is the timeout of one answer.
    pub(super) fn new(timeout: Duration) -> Self {
        Self {
            timeout,
            resolvers: ArcSwap::from_pointee(ResolverSet {
                servers: Ok(Vec::new()),
                pool: None,
            }),
        }
    }

    /// Replaces the resolvers. An unchanged list keeps the pool and its statistics.
    pub(super) fn set_resolvers(&self, servers: Result<Vec<SocketAddr>, String>) {
        if self.resolvers.load().servers == servers {
            return;
        }
        let new_pool = match &servers {
            Ok(servers) => self.open(servers).map_err(|error| error.to_string()),
            Err(_) => Ok(None),
        };
        self.resolvers.store(Arc::new(match new_pool {
            Ok(pool) => ResolverSet { servers, pool },
            Err(error) => ResolverSet {
                servers: Err(error),
                pool: None,
            },
        }));
    }

    /// Queries one name, which the caller has checked. The query contains nothing of the client's
    /// query but the name in lower case and the type.
    pub(super) async fn query(
        &self,
        name: &HostName,
        kind: RecordType,
    ) -> Result<AliasChain, UpstreamError> {
        let resolvers = self.resolvers.load_full();
        let pool = match (&resolvers.servers, &resolvers.pool) {
            (Ok(_), Some(pool)) => pool,
            (Ok(_), None) => {
                return Err(UpstreamError::NoServers(
                    "no DNS resolver is configured".to_owned(),
                ));
            }
            (Err(why), _) => return Err(UpstreamError::NoServers(why.clone())),
        };
        let query = Query::query(wire_name(name.as_str())?, kind);
        let options = DnsRequestOptions::default();
        match pool.lookup(query, options).first_answer().await {
            Ok(response) => AliasChain::read(&response, name, kind),
            Err(NetError::Dns(DnsError::NoRecordsFound(none))) => {
                let end = match none.response_code {
                    ResponseCode::NXDomain => ChainEnd::NoName,
                    ResponseCode::NoError => ChainEnd::NoData,
                    _ => return Err(UpstreamError::Query(DnsError::NoRecordsFound(none).into())),
                };
                Ok(AliasChain {
                    hops: Vec::new(),
                    end,
                    ttl: empty_ttl(none.negative_ttl),
                })
            }
            Err(error) => Err(UpstreamError::Query(error)),
        }
    }

    fn open(&self, servers: &[SocketAddr]) -> Result<Option<Pool>, NetError> {
        if servers.is_empty() {
            return Ok(None);
        }
        let mut options = ResolverOpts::default();
        options.timeout = self.timeout;
        let tls = TlsConfig::new()?;
        let servers = servers.iter().map(|server| {
            let mut connections = vec![ConnectionConfig::udp(), ConnectionConfig::tcp()];
            for connection in &mut connections {
                connection.port = server.port();
            }
            NameServerConfig::new(server.ip(), true, connections)
        });
        Ok(Some(NameServerPool::from_config(
            servers,
            Arc::new(PoolContext::new(options, tls)),
            TokioRuntimeProvider::default(),
        )))
    }
}

impl AliasChain {
    /// Reads an answer: the chain of aliases, then the records of the last one. All other records
    /// are ignored.
    pub(super) fn read(
        message: &Message,
        queried: &HostName,
        kind: RecordType,
    ) -> Result<Self, UpstreamError> {
        let mut at = wire_name(queried.as_str())?;
        let mut hops = Vec::new();
        let mut ttl = MAX_TTL;
        while kind != RecordType::CNAME
            && let Some((alias, to)) =
                message
                    .answers
                    .iter()
                    .find_map(|record| match &record.data {
                        RData::CNAME(to) if record.name == at => Some((record, to)),
                        _ => None,
                    })
        {
            if hops.len() >= MAX_HOPS {
                return Err(UpstreamError::TooManyHops);
            }
            hops.push(host_name(&to.0).ok_or(UpstreamError::BadName)?);
            ttl = ttl.min(alias.ttl);
            at = to.0.clone();
        }
        let found: Vec<_> = message
            .answers
            .iter()
            .filter(|record| record.name == at && record.record_type() == kind)
            .take(MAX_RECORDS)
            .collect();
        let soa = message
            .authorities
            .iter()
            .find_map(|record| match &record.data {
                RData::SOA(soa) => Some(soa.minimum.min(record.ttl)),
                _ => None,
            });
        let end = if !found.is_empty() {
            ttl = found.iter().fold(ttl, |ttl, record| ttl.min(record.ttl));
            ChainEnd::Records(
                found
                    .into_iter()
                    .map(|record| record.data.clone())
                    .collect(),
            )
        } else {
            let end = match message.metadata.response_code {
                ResponseCode::NXDomain => ChainEnd::NoName,
                // An alias without records, and without an SOA record that confirms this.
                _ if soa.is_none() && !hops.is_empty() => ChainEnd::Unresolved,
                _ => ChainEnd::NoData,
            };
            if end != ChainEnd::Unresolved {
                ttl = ttl.min(empty_ttl(soa));
            }
            end
        };
        Ok(Self {
            hops,
            end,
            ttl: ttl.clamp(MIN_TTL, MAX_TTL),
        })
    }
}

fn empty_ttl(soa_ttl: Option<u32>) -> u32 {
    soa_ttl.unwrap_or(MIN_TTL).clamp(MIN_TTL, MAX_EMPTY_TTL)
}

/// Encodes a name for the wire. Characters in its labels are taken literally.
pub(super) fn wire_name(name: &str) -> Result<Name, UpstreamError> {
    let labels = name.split('.').map(str::as_bytes);
    Name::from_labels(labels).map_err(|_| UpstreamError::BadName)
}

/// Decodes a host name from the wire. A label that contains a dot would look like two labels, so
/// only letters, digits, hyphens and underscores are accepted.
pub(super) fn host_name(name: &Name) -> Option<HostName> {
    match host(name)? {
        Host::Name(name) => Some(name),
        Host::Ip(_) => None,
    }
}

/// Like [`host_name`], but the result may also be an IP address.
pub(super) fn host(name: &Name) -> Option<Host> {
    let mut text = String::with_capacity(name.len());
    for label in name.iter() {
        let is_allowed = |b: &u8| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_');
        if !label.iter().all(is_allowed) {
            return None;
        }
        if !text.is_empty() {
            text.push('.');
        }
        text.extend(label.iter().map(|b| char::from(b.to_ascii_lowercase())));
    }
    Host::parse(&text).ok()
}

/// See [`super::fuzz_check`].
pub(super) fn fuzz_check(bytes: &[u8]) {
    let (Ok(message), Ok(Host::Name(name))) = (Message::from_vec(bytes), Host::parse("a.test"))
    else {
        return;
    };
    for kind in [RecordType::A, RecordType::AAAA, RecordType::TXT] {
        drop(AliasChain::read(&message, &name, kind));
    }
}
