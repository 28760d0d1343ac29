//! Forwarding of allowed names to upstream resolvers, with a check of every alias on the way.
//!
//! The cache holds upstream answers and no decisions: every use of a cached answer is checked
//! against the rules in force. Each sandbox has its own cache.

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

use super::DnsLimits;
use super::client_state::ClientState;
use super::labels::LabelBudget;
use super::lru_map::LruMap;
use super::upstream::{AliasChain, ChainEnd, MAX_HOPS, UpstreamError, UpstreamResolvers};

/// Rule name of a refused address.
const ADDRESS_RULE: &str = "dns:address";

/// Largest cached answer, so that the cache is also limited in bytes.
const MAX_CACHED_SIZE: usize = 4096;

/// The outcome of forwarding a query.
#[derive(Debug)]
pub(super) enum ForwardOutcome {
    Found {
        records: Vec<RData>,
        ttl: u32,
        /// Whether every part of the answer came from the cache.
        cached: bool,
    },
    /// The name has no records of the type, or does not exist.
    Empty {
        exists: bool,
    },
    /// The name, or an alias of it, is denied.
    NameDenied(Denial),
    /// The name is allowed, but one of its addresses is not.
    AddressDenied(Denial),
    Failed(UpstreamError),
}

pub(super) struct Forwarder {
    upstreams: UpstreamResolvers,
}

/// Upstream answers with their expiry times.
pub(super) type Cache = LruMap<(HostName, RecordType), (Instant, Arc<AliasChain>)>;

/// The client and the rules of one forwarded query.
#[derive(Clone, Copy)]
pub(super) struct ForwardContext<'a> {
    pub(super) settings: &'a Settings,
    pub(super) labels: &'a LabelBudget,
    pub(super) client_state: &'a ClientState,
    pub(super) sandbox: &'a SandboxId,
    pub(super) deadline: Instant,
}

/// Why following the aliases ended early.
enum ResolveError {
    Denied(Denial),
    Failed(UpstreamError),
}

impl From<UpstreamError> for ResolveError {
    fn from(error: UpstreamError) -> Self {
        ResolveError::Failed(error)
    }
}

impl Forwarder {
    pub(super) fn new(limits: &DnsLimits) -> Self {
        Self {
            upstreams: UpstreamResolvers::new(limits.deadline),
        }
    }

    /// Replaces the upstream resolvers.
    pub(super) fn set_resolvers(&self, servers: Result<Vec<SocketAddr>, String>) {
        self.upstreams.set_resolvers(servers);
    }

    /// Resolves a name that the allowlist allows.
    pub(super) async fn resolve(
        &self,
        context: ForwardContext<'_>,
        name: &HostName,
        kind: RecordType,
    ) -> ForwardOutcome {
        match tokio::time::timeout_at(context.deadline, self.follow_aliases(context, name, kind))
            .await
        {
            Ok(Ok(forwarded)) => forwarded,
            Ok(Err(ResolveError::Denied(denial))) => ForwardOutcome::NameDenied(denial),
            Ok(Err(ResolveError::Failed(error))) => ForwardOutcome::Failed(error),
            Err(_) => ForwardOutcome::Failed(UpstreamError::Timeout),
        }
    }

    async fn follow_aliases(
        &self,
        context: ForwardContext<'_>,
        question: &HostName,
        kind: RecordType,
    ) -> Result<ForwardOutcome, ResolveError> {
        let mut name = question.clone();
        let (mut hops, mut ttl, mut cached) = (0, u32::MAX, true);
        loop {
            let (chain, left, was_cached) = self.look_up(context, &name, kind).await?;
            ttl = ttl.min(left);
            cached &= was_cached;
            for hop in &chain.hops {
                hops += 1;
                if hops > MAX_HOPS {
                    return Err(UpstreamError::TooManyHops.into());
                }
                check_alias(context.settings, question, hop)?;
            }
            match (&chain.end, chain.hops.last()) {
                (ChainEnd::Records(records), _) => {
                    if let Some(denial) = refused_address(context.settings, question, records) {
                        return Ok(ForwardOutcome::AddressDenied(denial));
                    }
                    return Ok(ForwardOutcome::Found {
                        records: records.clone(),
                        ttl,
                        cached,
                    });
                }
                (ChainEnd::NoName, _) => return Ok(ForwardOutcome::Empty { exists: false }),
                (ChainEnd::Unresolved, Some(last)) => name = last.clone(),
                (ChainEnd::NoData, _) | (ChainEnd::Unresolved, None) => {
                    return Ok(ForwardOutcome::Empty { exists: true });
                }
            }
        }
    }

    /// Looks up one name in the cache, then upstream. Returns the answer, its remaining TTL in
    /// seconds, and whether it was cached.
    async fn look_up(
        &self,
        context: ForwardContext<'_>,
        name: &HostName,
        kind: RecordType,
    ) -> Result<(Arc<AliasChain>, u32, bool), ResolveError> {
        if let Some((chain, left)) = cached_chain(context.client_state, name, kind) {
            return Ok((chain, left, true));
        }
        context
            .labels
            .admit(context.sandbox, name)
            .map_err(ResolveError::Denied)?;
        let chain = Arc::new(self.upstreams.query(name, kind).await?);
        let left = chain.ttl;
        if size(&chain) <= MAX_CACHED_SIZE {
            let until = Instant::now() + Duration::from_secs(left.into());
            let entry = (until, Arc::clone(&chain));
            context
                .client_state
                .cache()
                .insert((name.clone(), kind), entry);
        }
        Ok((chain, left, false))
    }
}

/// Checks an alias of an allowed name. The agent did not query it, so it needs no allow rule, but
/// the operator must not have denied it.
fn check_alias(
    settings: &Settings,
    question: &HostName,
    hop: &HostName,
) -> Result<(), ResolveError> {
    let checked = settings.allowlist().judge_alias(&Host::Name(hop.clone()));
    checked.map_err(|denial| {
        ResolveError::Denied(denial.with_evidence(format!("{question} is an alias of {hop}")))
    })
}

/// A cached answer of this sandbox and its remaining TTL in seconds.
fn cached_chain(
    client_state: &ClientState,
    name: &HostName,
    kind: RecordType,
) -> Option<(Arc<AliasChain>, u32)> {
    let key = (name.clone(), kind);
    let mut cache = client_state.cache();
    let (until, chain) = cache.get(&key)?;
    let left = until.saturating_duration_since(Instant::now());
    if left.is_zero() {
        cache.remove(&key);
        return None;
    }
    // At least one second, so that the client does not repeat its query at once.
    let left = u32::try_from(left.as_secs()).unwrap_or(u32::MAX).max(1);
    Some((Arc::clone(chain), left))
}

/// The denial if any of the addresses must not be dialled: the client may pick any of them.
fn refused_address(settings: &Settings, question: &HostName, records: &[RData]) -> Option<Denial> {
    records.iter().find_map(|record| {
        let ip = match record {
            RData::A(a) => IpAddr::V4(a.0),
            RData::AAAA(aaaa) => IpAddr::V6(aaaa.0),
            _ => return None,
        };
        let class = classify(ip);
        if class.is_dialable() || has_private_exception(settings, question, ip) {
            return None;
        }
        let denial = Denial::new(Reason::AddressClass, ADDRESS_RULE).with_message(format!(
            "The name {question} resolves to a {} address. Ask the operator to open it with \
             egress.allow_private.",
            class.as_str()
        ));
        Some(denial.with_evidence(format!("the address is {ip}")))
    })
}

/// Whether the operator allowed `ip` for exactly this name.
fn has_private_exception(settings: &Settings, question: &HostName, ip: IpAddr) -> bool {
    let host = Host::Name(question.clone());
    let egress = &settings.egress;
    let mut exceptions = egress.allow_private.iter();
    let mut fixed = egress.resolve.iter();
    exceptions.any(|exception| exception.host.matches(&host) && exception.cidr.contains(ip))
        || fixed.any(|(from, to)| from.host == host && to.ip().to_canonical() == ip)
}

/// The approximate size of an answer in bytes.
fn size(chain: &AliasChain) -> usize {
    use hickory_proto::serialize::binary::BinEncodable;
    let names: usize = chain.hops.iter().map(|hop| hop.as_str().len()).sum();
    let records = match &chain.end {
        ChainEnd::Records(records) => records
            .iter()
            .map(|record| record.to_bytes().map_or(usize::MAX, |bytes| bytes.len()))
            .fold(0, usize::saturating_add),
        ChainEnd::NoData | ChainEnd::NoName | ChainEnd::Unresolved => 0,
    };
    names.saturating_add(records)
}
