//! The resolvers that the gate asks, and what they said.
//!
//! hickory carries the question (UDP, TCP after a cut answer, several servers). It does not
//! follow aliases for us: a name that an answer points to is judged before anybody is asked
//! about it.

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

/// Aliases in one answer.
pub(super) const MOST_HOPS: usize = 8;

/// Records that are taken from one answer.
const MOST_RECORDS: usize = 64;

/// How long an answer may be remembered, in seconds.
const SHORTEST_TTL: u32 = 1;
const LONGEST_TTL: u32 = 300;
const LONGEST_EMPTY_TTL: u32 = 30;

/// What an upstream says about one name and type, and no more than that: the aliases from
/// the name on, and what it found behind the last.
#[derive(Clone, Debug)]
pub(super) struct Segment {
    pub(super) hops: Vec<HostName>,
    pub(super) end: End,
    pub(super) ttl: u32,
}

/// What stands at the end of the aliases.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum End {
    Records(Vec<RData>),
    /// The name has none of this type.
    NoData,
    NoName,
    /// The upstream did not say; somebody has to ask for the last alias.
    Elsewhere,
}

/// Why there is no answer.
#[derive(Debug, thiserror::Error)]
pub(super) enum UpstreamError {
    #[error("{0}")]
    NoServers(String),
    #[error("no resolver could be asked: {0}")]
    Ask(NetError),
    #[error("a name cannot be read or written as a host's")]
    BadName,
    #[error("the answer has more than {MOST_HOPS} aliases")]
    TooManyHops,
    #[error("the resolver did not answer in time")]
    Late,
}

impl UpstreamError {
    pub(super) fn reason(&self) -> Reason {
        match self {
            UpstreamError::NoServers(_) => Reason::ConnectFailed,
            UpstreamError::Ask(NetError::Timeout) | UpstreamError::Late => Reason::UpstreamTimeout,
            UpstreamError::Ask(_) => Reason::ConnectFailed,
            UpstreamError::BadName | UpstreamError::TooManyHops => Reason::BadName,
        }
    }
}

type Pool = NameServerPool<TokioRuntimeProvider>;

/// The resolvers as they are configured now.
pub(super) struct UpstreamResolvers {
    patience: Duration,
    held: ArcSwap<Held>,
}

/// Resolvers, and the way to ask them.
struct Held {
    servers: Result<Vec<SocketAddr>, String>,
    pool: Option<Pool>,
}

impl UpstreamResolvers {
    /// Nobody yet; later resolvers that have `patience` for one answer.
    pub(super) fn new(patience: Duration) -> Self {
        Self {
            patience,
            held: ArcSwap::from_pointee(Held {
                servers: Ok(Vec::new()),
                pool: None,
            }),
        }
    }

    /// Asks `servers` from now on. Those that stay keep what is known about them.
    pub(super) fn follow(&self, servers: Result<Vec<SocketAddr>, String>) {
        if self.held.load().servers == servers {
            return;
        }
        let opened = match &servers {
            Ok(servers) => self.open(servers).map_err(|error| error.to_string()),
            Err(_) => Ok(None),
        };
        self.held.store(Arc::new(match opened {
            Ok(pool) => Held { servers, pool },
            Err(error) => Held {
                servers: Err(error),
                pool: None,
            },
        }));
    }

    /// Asks about one name, which its caller has judged. Nothing of the client's goes with
    /// it but the name in lower case and the type.
    pub(super) async fn ask(
        &self,
        name: &HostName,
        kind: RecordType,
    ) -> Result<Segment, UpstreamError> {
        let held = self.held.load_full();
        let pool = match (&held.servers, &held.pool) {
            (Ok(_), Some(pool)) => pool,
            (Ok(_), None) => {
                return Err(UpstreamError::NoServers("no resolver is known".to_owned()));
            }
            (Err(why), _) => return Err(UpstreamError::NoServers(why.clone())),
        };
        let query = Query::query(wire_name(name.as_str())?, kind);
        let options = DnsRequestOptions::default();
        match pool.lookup(query, options).first_answer().await {
            Ok(response) => Segment::read(&response, name, kind),
            Err(NetError::Dns(DnsError::NoRecordsFound(none))) => {
                let end = match none.response_code {
                    ResponseCode::NXDomain => End::NoName,
                    ResponseCode::NoError => End::NoData,
                    _ => return Err(UpstreamError::Ask(DnsError::NoRecordsFound(none).into())),
                };
                Ok(Segment {
                    hops: Vec::new(),
                    end,
                    ttl: empty_ttl(none.negative_ttl),
                })
            }
            Err(error) => Err(UpstreamError::Ask(error)),
        }
    }

    fn open(&self, servers: &[SocketAddr]) -> Result<Option<Pool>, NetError> {
        if servers.is_empty() {
            return Ok(None);
        }
        let mut options = ResolverOpts::default();
        options.timeout = self.patience;
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

impl Segment {
    /// Reads an answer: aliases one after the other, then what the last of them has. What
    /// is not on that way was not asked for.
    pub(super) fn read(
        message: &Message,
        asked: &HostName,
        kind: RecordType,
    ) -> Result<Self, UpstreamError> {
        let mut at = wire_name(asked.as_str())?;
        let mut hops = Vec::new();
        let mut ttl = LONGEST_TTL;
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
            if hops.len() >= MOST_HOPS {
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
            .take(MOST_RECORDS)
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
            End::Records(
                found
                    .into_iter()
                    .map(|record| record.data.clone())
                    .collect(),
            )
        } else {
            let end = match message.metadata.response_code {
                ResponseCode::NXDomain => End::NoName,
                // An alias without anything behind it, and nobody who says so.
                _ if soa.is_none() && !hops.is_empty() => End::Elsewhere,
                _ => End::NoData,
            };
            if end != End::Elsewhere {
                ttl = ttl.min(empty_ttl(soa));
            }
            end
        };
        Ok(Self {
            hops,
            end,
            ttl: ttl.clamp(SHORTEST_TTL, LONGEST_TTL),
        })
    }
}

fn empty_ttl(said: Option<u32>) -> u32 {
    said.unwrap_or(SHORTEST_TTL)
        .clamp(SHORTEST_TTL, LONGEST_EMPTY_TTL)
}

/// A name for the wire: its labels as they are, nothing in them has a meaning.
pub(super) fn wire_name(name: &str) -> Result<Name, UpstreamError> {
    let labels = name.split('.').map(str::as_bytes);
    Name::from_labels(labels).map_err(|_| UpstreamError::BadName)
}

/// A name off the wire as policy reads it. A label with a dot inside would read as two, so
/// only letters, digits, hyphens and underscores pass.
pub(super) fn host_name(name: &Name) -> Option<HostName> {
    match host(name)? {
        Host::Name(name) => Some(name),
        Host::Ip(_) => None,
    }
}

/// As [`host_name`], where an address may come out too.
pub(super) fn host(name: &Name) -> Option<Host> {
    let mut text = String::with_capacity(name.len());
    for label in name.iter() {
        let plain = |b: &u8| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_');
        if !label.iter().all(plain) {
            return None;
        }
        if !text.is_empty() {
            text.push('.');
        }
        text.extend(label.iter().map(|b| char::from(b.to_ascii_lowercase())));
    }
    Host::parse(&text).ok()
}

/// See [`super::exercise`].
pub(super) fn exercise(bytes: &[u8]) {
    let (Ok(message), Ok(Host::Name(name))) = (Message::from_vec(bytes), Host::parse("a.test"))
    else {
        return;
    };
    for kind in [RecordType::A, RecordType::AAAA, RecordType::TXT] {
        drop(Segment::read(&message, &name, kind));
    }
}
