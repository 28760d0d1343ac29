//! Per-sandbox cache of TLS server configurations with leaf certificates.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use arc_swap::ArcSwap;
use policy::clock::UnixMillis;
use policy::host::Host;
use rustls::ServerConfig;
use rustls::crypto::CryptoProvider;
use rustls::server::ProducesTickets;

use crate::authority::{AuthorityError, CertificateAuthority};

/// Maximum number of cached hosts. An agent can connect to any number of names.
const MAX_HOSTS: usize = 512;

/// Remaining validity below which a leaf is replaced.
const MIN_LIFETIME_LEFT: std::time::Duration = std::time::Duration::from_secs(60 * 60);

/// ALPN protocols in order of preference. Some HTTP/1.0 clients (`curl --http1.0`) offer only
/// `http/1.0`, and the handshake would fail without it.
const ALPN: [&[u8]; 3] = [b"h2", b"http/1.1", b"http/1.0"];

/// The TLS server configurations of one sandbox. A session ticket is valid in its sandbox only.
pub struct CertificateCache {
    authority: Arc<ArcSwap<CertificateAuthority>>,
    provider: Arc<CryptoProvider>,
    tickets: Arc<dyn ProducesTickets>,
    slots: Mutex<HashMap<Host, Arc<Slot>>>,
}

/// The configuration of one host. The first caller creates it, and concurrent callers wait for it.
struct Slot {
    since: UnixMillis,
    root: String,
    config: OnceLock<Result<Arc<ServerConfig>, String>>,
}

/// Why a TLS server configuration could not be created.
#[derive(Debug, thiserror::Error)]
pub enum LeafError {
    /// Error of the TLS library.
    #[error("the TLS library failed: {0}")]
    Tls(#[from] rustls::Error),
    /// The certificate authority failed.
    #[error(transparent)]
    Authority(#[from] AuthorityError),
    /// The error of the caller that created the configuration.
    #[error("{0}")]
    FirstCaller(String),
}

impl CertificateCache {
    /// Creates an empty cache for leaves of `authority`.
    pub fn new(authority: Arc<ArcSwap<CertificateAuthority>>) -> Result<Self, LeafError> {
        Ok(Self {
            authority,
            provider: Arc::new(rustls::crypto::aws_lc_rs::default_provider()),
            tickets: rustls::crypto::aws_lc_rs::Ticketer::new()?,
            slots: Mutex::default(),
        })
    }

    /// The TLS configuration for `host`. Creating one takes about a tenth of a millisecond.
    pub fn server_config(
        &self,
        host: &Host,
        now: UnixMillis,
    ) -> Result<Arc<ServerConfig>, LeafError> {
        let authority = self.authority.load();
        let slot = self.slot(host, &authority, now);
        let created = slot.config.get_or_init(|| {
            self.create_config(&authority, host, now)
                .map_err(|error| error.to_string())
        });
        match created {
            Ok(config) => Ok(Arc::clone(config)),
            Err(error) => Err(LeafError::FirstCaller(error.clone())),
        }
    }

    fn slot(&self, host: &Host, authority: &CertificateAuthority, now: UnixMillis) -> Arc<Slot> {
        let mut slots = self.slots.lock().unwrap_or_else(PoisonError::into_inner);
        let is_usable = |slot: &Slot| {
            let ends = slot.since.plus(crate::authority::LEAF_LIFETIME);
            slot.root == authority.name()
                && ends > now.plus(MIN_LIFETIME_LEFT)
                && slot.since <= now
                && !matches!(slot.config.get(), Some(Err(_)))
        };
        if let Some(slot) = slots.get(host).filter(|slot| is_usable(slot)) {
            return Arc::clone(slot);
        }
        if slots.len() >= MAX_HOSTS && !slots.contains_key(host) {
            let oldest = slots.iter().min_by_key(|(_, slot)| slot.since);
            if let Some(oldest) = oldest.map(|(host, _)| host.clone()) {
                slots.remove(&oldest);
            }
        }
        let slot = Arc::new(Slot {
            since: now,
            root: authority.name().to_owned(),
            config: OnceLock::new(),
        });
        slots.insert(host.clone(), Arc::clone(&slot));
        slot
    }

    fn create_config(
        &self,
        authority: &CertificateAuthority,
        host: &Host,
        now: UnixMillis,
    ) -> Result<Arc<ServerConfig>, LeafError> {
        let leaf = authority.mint(host, now)?;
        let mut config = ServerConfig::builder_with_provider(Arc::clone(&self.provider))
            .with_safe_default_protocol_versions()?
            .with_no_client_auth()
            .with_single_cert(leaf.chain, leaf.key)?;
        config.alpn_protocols = ALPN.iter().map(|name| name.to_vec()).collect();
        config.ticketer = Arc::clone(&self.tickets);
        // Tickets carry the session, so that the server stores nothing for disconnected clients.
        config.session_storage = Arc::new(rustls::server::NoServerSessionStorage {});
        config.send_tls13_tickets = 1;
        Ok(Arc::new(config))
    }
}

impl std::fmt::Debug for CertificateCache {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("CertificateCache").finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: UnixMillis = UnixMillis::new(1_800_000_000_000);

    fn cache_in(dir: &std::path::Path) -> (CertificateCache, Arc<ArcSwap<CertificateAuthority>>) {
        let authority = CertificateAuthority::open(dir, NOW).unwrap();
        let authority = Arc::new(ArcSwap::from_pointee(authority));
        (
            CertificateCache::new(Arc::clone(&authority)).unwrap(),
            authority,
        )
    }

    fn host(text: &str) -> Host {
        Host::parse(text).unwrap()
    }

    #[test]
    fn concurrent_calls_create_one_config_per_host() {
        let dir = tempfile::tempdir().unwrap();
        let (cache, _) = cache_in(dir.path());
        let all: Vec<_> = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..16)
                .map(|_| scope.spawn(|| cache.server_config(&host("x.example"), NOW).unwrap()))
                .collect();
            threads
                .into_iter()
                .map(|thread| thread.join().unwrap())
                .collect()
        });
        assert!(all.iter().all(|config| Arc::ptr_eq(config, &all[0])));
        let other = cache.server_config(&host("y.example"), NOW).unwrap();
        assert!(!Arc::ptr_eq(&other, &all[0]));
    }

    #[test]
    fn leaf_is_replaced_before_expiry_and_after_rotation() {
        let dir = tempfile::tempdir().unwrap();
        let (cache, authority) = cache_in(dir.path());
        let first = cache.server_config(&host("x.example"), NOW).unwrap();
        let later = NOW.plus(crate::authority::LEAF_LIFETIME - MIN_LIFETIME_LEFT);
        let second = cache.server_config(&host("x.example"), later).unwrap();
        assert!(!Arc::ptr_eq(&first, &second));
        authority.store(Arc::new(
            CertificateAuthority::rotate(dir.path(), later).unwrap(),
        ));
        let third = cache.server_config(&host("x.example"), later).unwrap();
        assert!(!Arc::ptr_eq(&second, &third));
    }

    #[test]
    fn number_of_cached_hosts_is_limited() {
        let dir = tempfile::tempdir().unwrap();
        let (cache, _) = cache_in(dir.path());
        for number in 0..MAX_HOSTS + 50 {
            cache
                .server_config(&host(&format!("h{number}.example")), NOW)
                .unwrap();
        }
        let slots = cache.slots.lock().unwrap();
        assert_eq!(slots.len(), MAX_HOSTS);
    }
}
