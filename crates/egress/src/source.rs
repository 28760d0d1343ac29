//! How a connection identifies its sandbox.

use std::net::IpAddr;
use std::sync::Arc;

use http::request::Parts;
use policy::identity::{Identity, Lookup, identify};
use policy::reason::Reason;
use policy::verdict::Denial;
use tokio::sync::OwnedSemaphorePermit;

use crate::headers::CONTAINER_ID;
use crate::refusal::Refusal;
use crate::sandbox_state::SandboxState;
use crate::services::Services;
use crate::stage::Stage;

/// How a connection identifies its sandbox.
#[derive(Clone, Debug)]
pub enum Source {
    /// By the listener it came through.
    Listener(Arc<SandboxState>),
    /// By its address, which may be unknown.
    Address(Option<IpAddr>, Option<Arc<SandboxState>>),
}

impl Source {
    /// The state of the sandbox.
    pub fn sandbox(&self) -> Option<&Arc<SandboxState>> {
        match self {
            Source::Listener(sandbox) => Some(sandbox),
            Source::Address(_, sandbox) => sandbox.as_ref(),
        }
    }

    /// What the registry has of it now. Which sandbox it is was settled when the connection was
    /// accepted: an address that was registered for another one since is unknown.
    pub fn look_up(&self, services: &Services) -> Lookup {
        let registry = services.registry();
        match self {
            Source::Listener(sandbox) => registry.by_id(sandbox.id()),
            Source::Address(None, _) => Lookup::NoPeer,
            Source::Address(Some(ip), sandbox) => match (registry.by_ip(*ip), sandbox) {
                (Lookup::Found(row), Some(sandbox)) if row.id == *sandbox.id() => {
                    Lookup::Found(row)
                }
                (Lookup::Found(_), _) => Lookup::Unknown,
                (other, _) => other,
            },
        }
    }

    /// Identifies the sender of a request, now, with what its head claims.
    pub fn identify_request(&self, services: &Services, head: &Parts) -> Result<Identity, Refusal> {
        let mut claims = head.headers.get_all(CONTAINER_ID).iter();
        // Bytes that are no text are no registered id either, and two claims are none.
        let claimed = match (claims.next(), claims.next()) {
            (None, _) => None,
            (Some(one), None) => Some(one.to_str().unwrap_or_default()),
            (Some(_), Some(_)) => Some(""),
        };
        self.identify(services, claimed)
    }

    /// Identifies the sender, now.
    pub fn identify(
        &self,
        services: &Services,
        claimed: Option<&str>,
    ) -> Result<Identity, Refusal> {
        let lookup = self.look_up(services);
        let row = match &lookup {
            Lookup::Found(row) => Some(Arc::clone(row)),
            Lookup::Unavailable | Lookup::NoPeer | Lookup::Unknown => None,
        };
        identify(lookup, claimed, services.clock().wall()).map_err(|denial| {
            if let (Reason::IdentityExpired, Some(row)) = (denial.reason, row) {
                services.registry().expired(&row.id);
            }
            Refusal::new(Stage::Identity, denial)
        })
    }
}

/// The refusal of a source without a sandbox.
pub fn unknown() -> Refusal {
    let denial = Denial::new(Reason::IdentityUnknown, "identity");
    Refusal::new(Stage::Identity, denial)
}

/// Reserves an audit slot; waits while the sandbox has too many records in flight.
pub async fn reserve_record(sandbox: Option<&Arc<SandboxState>>) -> Option<OwnedSemaphorePermit> {
    // The semaphore is never closed.
    Arc::clone(&sandbox?.requests).acquire_owned().await.ok()
}
