//! The certificates that one sandbox is shown, each with everything a handshake needs.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use arc_swap::ArcSwap;
use policy::clock::UnixMillis;
use policy::host::Host;
use rustls::ServerConfig;
use rustls::crypto::CryptoProvider;
use rustls::server::ProducesTickets;

use crate::authority::{Authority, AuthorityError};

/// Hosts whose certificates are kept. An agent can name as many as it likes.
const MOST_HOSTS: usize = 512;

/// A leaf that has less than this left is made anew.
const LEAST_LEFT: std::time::Duration = std::time::Duration::from_secs(60 * 60);

/// The protocols that are spoken with a client, the better one first. Some of 1.0 say so
/// (`curl --http1.0`), and would end the handshake if nobody answered to that.
const ALPN: [&[u8]; 3] = [b"h2", b"http/1.1", b"http/1.0"];

/// The certificates of one sandbox. A ticket given to one sandbox opens nothing for another.
pub struct Leaves {
    authority: Arc<ArcSwap<Authority>>,
    provider: Arc<CryptoProvider>,
    tickets: Arc<dyn ProducesTickets>,
    kept: Mutex<HashMap<Host, Arc<Slot>>>,
}

/// One host's handshake, made by whoever comes first while the others wait for it.
struct Slot {
    since: UnixMillis,
    root: String,
    made: OnceLock<Result<Arc<ServerConfig>, String>>,
}

/// A handshake that cannot be offered.
#[derive(Debug, thiserror::Error)]
pub enum LeafError {
    /// The library refused.
    #[error("the TLS library refused: {0}")]
    Tls(#[from] rustls::Error),
    /// The authority did not sign.
    #[error(transparent)]
    Authority(#[from] AuthorityError),
    /// What the one who came first met.
    #[error("{0}")]
    Earlier(String),
}

impl Leaves {
    /// An empty shelf below `authority`.
    pub fn new(authority: Arc<ArcSwap<Authority>>) -> Result<Self, LeafError> {
        Ok(Self {
            authority,
            provider: Arc::new(rustls::crypto::aws_lc_rs::default_provider()),
            tickets: rustls::crypto::aws_lc_rs::Ticketer::new()?,
            kept: Mutex::default(),
        })
    }

    /// The handshake for `host`. Making one takes about a tenth of a millisecond.
    pub fn handshake(&self, host: &Host, now: UnixMillis) -> Result<Arc<ServerConfig>, LeafError> {
        let authority = self.authority.load();
        let slot = self.slot(host, &authority, now);
        let made = slot.made.get_or_init(|| {
            self.make(&authority, host, now)
                .map_err(|error| error.to_string())
        });
        match made {
            Ok(config) => Ok(Arc::clone(config)),
            Err(error) => Err(LeafError::Earlier(error.clone())),
        }
    }

    fn slot(&self, host: &Host, authority: &Authority, now: UnixMillis) -> Arc<Slot> {
        let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        let good = |slot: &Slot| {
            let ends = slot.since.plus(crate::authority::LEAF_LIFE);
            slot.root == authority.name()
                && ends > now.plus(LEAST_LEFT)
                && slot.since <= now
                && !matches!(slot.made.get(), Some(Err(_)))
        };
        if let Some(slot) = kept.get(host).filter(|slot| good(slot)) {
            return Arc::clone(slot);
        }
        if kept.len() >= MOST_HOSTS && !kept.contains_key(host) {
            let oldest = kept.iter().min_by_key(|(_, slot)| slot.since);
            if let Some(oldest) = oldest.map(|(host, _)| host.clone()) {
                kept.remove(&oldest);
            }
        }
        let slot = Arc::new(Slot {
            since: now,
            root: authority.name().to_owned(),
            made: OnceLock::new(),
        });
        kept.insert(host.clone(), Arc::clone(&slot));
        slot
    }

    fn make(
        &self,
        authority: &Authority,
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
        // Tickets carry the session, so that nothing is kept here for a client that left.
        config.session_storage = Arc::new(rustls::server::NoServerSessionStorage {});
        config.send_tls13_tickets = 1;
        Ok(Arc::new(config))
    }
}

impl std::fmt::Debug for Leaves {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Leaves").finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: UnixMillis = UnixMillis::new(1_800_000_000_000);

    fn shelf(dir: &std::path::Path) -> (Leaves, Arc<ArcSwap<Authority>>) {
        let authority = Authority::open(dir, NOW).unwrap();
        let authority = Arc::new(ArcSwap::from_pointee(authority));
        (Leaves::new(Arc::clone(&authority)).unwrap(), authority)
    }

    fn host(text: &str) -> Host {
        Host::parse(text).unwrap()
    }

    #[test]
    fn a_host_is_minted_once_under_concurrent_demand() {
        let dir = tempfile::tempdir().unwrap();
        let (leaves, _) = shelf(dir.path());
        let all: Vec<_> = std::thread::scope(|scope| {
            let asking: Vec<_> = (0..16)
                .map(|_| scope.spawn(|| leaves.handshake(&host("x.example"), NOW).unwrap()))
                .collect();
            asking.into_iter().map(|one| one.join().unwrap()).collect()
        });
        assert!(all.iter().all(|one| Arc::ptr_eq(one, &all[0])));
        let other = leaves.handshake(&host("y.example"), NOW).unwrap();
        assert!(!Arc::ptr_eq(&other, &all[0]));
    }

    #[test]
    fn a_leaf_is_made_anew_before_it_ends_and_after_a_rotation() {
        let dir = tempfile::tempdir().unwrap();
        let (leaves, authority) = shelf(dir.path());
        let first = leaves.handshake(&host("x.example"), NOW).unwrap();
        let later = NOW.plus(crate::authority::LEAF_LIFE - LEAST_LEFT);
        let second = leaves.handshake(&host("x.example"), later).unwrap();
        assert!(!Arc::ptr_eq(&first, &second));
        authority.store(Arc::new(Authority::rotate(dir.path(), later).unwrap()));
        let third = leaves.handshake(&host("x.example"), later).unwrap();
        assert!(!Arc::ptr_eq(&second, &third));
    }

    #[test]
    fn a_thousand_names_do_not_fill_the_memory() {
        let dir = tempfile::tempdir().unwrap();
        let (leaves, _) = shelf(dir.path());
        for number in 0..MOST_HOSTS + 50 {
            leaves
                .handshake(&host(&format!("h{number}.example")), NOW)
                .unwrap();
        }
        let kept = leaves.kept.lock().unwrap();
        assert_eq!(kept.len(), MOST_HOSTS);
    }
}
