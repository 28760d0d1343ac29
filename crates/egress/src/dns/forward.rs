//! Names that upstream resolvers answer for: judged first, asked in our words, and judged
//! again hop by hop.
//!
//! What is remembered is what an upstream said, not what we made of it: every use is judged
//! by the rules of the moment. Each sandbox remembers for itself.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use config::Settings;
use hickory_proto::rr::{RData, RecordType};
use policy::host::{Host, HostName, classify};
use policy::id::SandboxId;
use policy::reason::Reason;
use policy::verdict::Denial;
use tokio::time::Instant;

use super::Limits;
use super::guest::Guest;
use super::labels::LabelBudget;
use super::recent::Recent;
use super::upstream::{End, MOST_HOPS, Segment, UpstreamError, UpstreamResolvers};

/// The rule's name where an address is refused.
const ADDRESS_RULE: &str = "dns:address";

/// An answer larger than this is not remembered, so that the cache has a size in bytes too.
const LARGEST_REMEMBERED: usize = 4096;

/// What forwarding came to.
#[derive(Debug)]
pub(super) enum Forwarded {
    Found {
        records: Vec<RData>,
        ttl: u32,
        /// Whether nobody had to be asked.
        cached: bool,
    },
    /// The name exists and has nothing of the type, or does not exist.
    Empty {
        exists: bool,
    },
    /// The name, or one behind it, is denied.
    NameDenied(Denial),
    /// The name is fine; an address behind it is not.
    AddressDenied(Denial),
    Failed(UpstreamError),
}

pub(super) struct Forwarder {
    upstreams: UpstreamResolvers,
}

/// What upstreams said, and until when it holds.
pub(super) type Cache = Recent<(HostName, RecordType), (Instant, Arc<Segment>)>;

/// Whose question it is, and by which rules.
#[derive(Clone, Copy)]
pub(super) struct Case<'a> {
    pub(super) settings: &'a Settings,
    pub(super) labels: &'a LabelBudget,
    pub(super) guest: &'a Guest,
    pub(super) sandbox: &'a SandboxId,
    pub(super) deadline: Instant,
}

/// Why the walk ended early.
enum Stop {
    Denied(Denial),
    Failed(UpstreamError),
}

impl From<UpstreamError> for Stop {
    fn from(error: UpstreamError) -> Self {
        Stop::Failed(error)
    }
}

impl Forwarder {
    pub(super) fn new(limits: &Limits) -> Self {
        Self {
            upstreams: UpstreamResolvers::new(limits.deadline),
        }
    }

    /// Asks these resolvers from now on.
    pub(super) fn follow(&self, servers: Result<Vec<SocketAddr>, String>) {
        self.upstreams.follow(servers);
    }

    /// Resolves a name that the allowlist has allowed.
    pub(super) async fn resolve(
        &self,
        case: Case<'_>,
        name: &HostName,
        kind: RecordType,
    ) -> Forwarded {
        match tokio::time::timeout_at(case.deadline, self.walk(case, name, kind)).await {
            Ok(Ok(forwarded)) => forwarded,
            Ok(Err(Stop::Denied(denial))) => Forwarded::NameDenied(denial),
            Ok(Err(Stop::Failed(error))) => Forwarded::Failed(error),
            Err(_) => Forwarded::Failed(UpstreamError::Late),
        }
    }

    async fn walk(
        &self,
        case: Case<'_>,
        question: &HostName,
        kind: RecordType,
    ) -> Result<Forwarded, Stop> {
        let mut name = question.clone();
        let (mut hops, mut ttl, mut cached) = (0, u32::MAX, true);
        loop {
            let (segment, left, known) = self.segment(case, &name, kind).await?;
            ttl = ttl.min(left);
            cached &= known;
            for hop in &segment.hops {
                hops += 1;
                if hops > MOST_HOPS {
                    return Err(UpstreamError::TooManyHops.into());
                }
                judge_hop(case.settings, question, hop)?;
            }
            match (&segment.end, segment.hops.last()) {
                (End::Records(records), _) => {
                    if let Some(denial) = refused_address(case.settings, question, records) {
                        return Ok(Forwarded::AddressDenied(denial));
                    }
                    return Ok(Forwarded::Found {
                        records: records.clone(),
                        ttl,
                        cached,
                    });
                }
                (End::NoName, _) => return Ok(Forwarded::Empty { exists: false }),
                (End::Elsewhere, Some(last)) => name = last.clone(),
                (End::NoData, _) | (End::Elsewhere, None) => {
                    return Ok(Forwarded::Empty { exists: true });
                }
            }
        }
    }

    /// What is known about one name, or else what an upstream says; for how many seconds it
    /// holds; and whether it was known.
    async fn segment(
        &self,
        case: Case<'_>,
        name: &HostName,
        kind: RecordType,
    ) -> Result<(Arc<Segment>, u32, bool), Stop> {
        if let Some((segment, left)) = remembered(case.guest, name, kind) {
            return Ok((segment, left, true));
        }
        case.labels
            .admit(case.sandbox, name)
            .map_err(Stop::Denied)?;
        let segment = Arc::new(self.upstreams.ask(name, kind).await?);
        let left = segment.ttl;
        if size(&segment) <= LARGEST_REMEMBERED {
            let until = Instant::now() + Duration::from_secs(left.into());
            let known = (until, Arc::clone(&segment));
            case.guest.cache().insert((name.clone(), kind), known);
        }
        Ok((segment, left, false))
    }
}

/// A name behind the alias of an allowed one: not asked for by the agent, and not to be one
/// that the operator denied.
fn judge_hop(settings: &Settings, question: &HostName, hop: &HostName) -> Result<(), Stop> {
    let judged = settings.allowlist().judge_alias(&Host::Name(hop.clone()));
    judged
        .map_err(|denial| Stop::Denied(denial.because(format!("{question} is an alias of {hop}"))))
}

/// What this sandbox was told before, and for how many seconds it still holds.
fn remembered(guest: &Guest, name: &HostName, kind: RecordType) -> Option<(Arc<Segment>, u32)> {
    let key = (name.clone(), kind);
    let mut cache = guest.cache();
    let (until, segment) = cache.get(&key)?;
    let left = until.saturating_duration_since(Instant::now());
    if left.is_zero() {
        cache.remove(&key);
        return None;
    }
    // Never nothing, so that the client does not ask again at once.
    let left = u32::try_from(left.as_secs()).unwrap_or(u32::MAX).max(1);
    Some((Arc::clone(segment), left))
}

/// A denial where one of the addresses is never dialled. One is enough: a client picks
/// whichever it likes.
fn refused_address(settings: &Settings, question: &HostName, records: &[RData]) -> Option<Denial> {
    records.iter().find_map(|record| {
        let ip = match record {
            RData::A(a) => IpAddr::V4(a.0),
            RData::AAAA(aaaa) => IpAddr::V6(aaaa.0),
            _ => return None,
        };
        let class = classify(ip);
        if class.is_dialable() || has_hole(settings, question, ip) {
            return None;
        }
        let denial = Denial::new(Reason::AddressClass, ADDRESS_RULE).saying(format!(
            "The name {question} resolves to a {} address. Ask the operator to open it with \
             egress.allow_private.",
            class.as_str()
        ));
        Some(denial.because(format!("the address is {ip}")))
    })
}

/// Whether the operator opened `ip` for exactly this name.
fn has_hole(settings: &Settings, question: &HostName, ip: IpAddr) -> bool {
    let host = Host::Name(question.clone());
    let egress = &settings.egress;
    let mut holes = egress.allow_private.iter();
    let mut fixed = egress.resolve.iter();
    holes.any(|hole| hole.host.matches(&host) && hole.cidr.contains(ip))
        || fixed.any(|(from, to)| from.host == host && to.ip().to_canonical() == ip)
}

/// About how many bytes a segment takes.
fn size(segment: &Segment) -> usize {
    use hickory_proto::serialize::binary::BinEncodable;
    let names: usize = segment.hops.iter().map(|hop| hop.as_str().len()).sum();
    let records = match &segment.end {
        End::Records(records) => records
            .iter()
            .map(|record| record.to_bytes().map_or(usize::MAX, |bytes| bytes.len()))
            .fold(0, usize::saturating_add),
        End::NoData | End::NoName | End::Elsewhere => 0,
    };
    names.saturating_add(records)
}
