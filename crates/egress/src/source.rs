//! How a connection identifies its sandbox.

use std::net::IpAddr;
use std::sync::Arc;

use http::request::Parts;
use policy::identity::{Identity, RegistrationLookup, identify};
use policy::reason::Reason;
use policy::verdict::Denial;
use tokio::sync::OwnedSemaphorePermit;

use crate::headers::CONTAINER_ID;
use crate::refusal::RequestRefusal;
use crate::sandbox_state::SandboxState;
use crate::services::Services;
use crate::stage::Stage;

/// How a connection identifies its sandbox.
#[derive(Clone, Debug)]
pub enum ConnectionSource {
    /// By the listener that accepted the connection.
    Listener(Arc<SandboxState>),
    /// By the client's address, which may not be registered.
    Address(Option<IpAddr>, Option<Arc<SandboxState>>),
}

impl ConnectionSource {
    /// The state of the sandbox.
    pub fn sandbox(&self) -> Option<&Arc<SandboxState>> {
        match self {
            ConnectionSource::Listener(sandbox) => Some(sandbox),
            ConnectionSource::Address(_, sandbox) => sandbox.as_ref(),
        }
    }

    /// Looks up the current registration. The sandbox was determined when the connection was
    /// accepted: an address that is registered for another sandbox since then is unknown.
    pub fn look_up(&self, services: &Services) -> RegistrationLookup {
        let registry = services.registry();
        match self {
            ConnectionSource::Listener(sandbox) => registry.by_id(sandbox.id()),
            ConnectionSource::Address(None, _) => RegistrationLookup::NoPeer,
            ConnectionSource::Address(Some(ip), sandbox) => match (registry.by_ip(*ip), sandbox) {
                (RegistrationLookup::Found(row), Some(sandbox)) if row.id == *sandbox.id() => {
                    RegistrationLookup::Found(row)
                }
                (RegistrationLookup::Found(_), _) => RegistrationLookup::Unknown,
                (other, _) => other,
            },
        }
    }

    /// Identifies the sender of a request by the current registration and the head's claim.
    pub fn identify_request(
        &self,
        services: &Services,
        head: &Parts,
    ) -> Result<Identity, RequestRefusal> {
        let mut claims = head.headers.get_all(CONTAINER_ID).iter();
        // A claim that is not text, or two claims, match no registered id.
        let claimed = match (claims.next(), claims.next()) {
            (None, _) => None,
            (Some(claim), None) => Some(claim.to_str().unwrap_or_default()),
            (Some(_), Some(_)) => Some(""),
        };
        self.identify(services, claimed)
    }

    /// Identifies the sender by the current registration.
    pub fn identify(
        &self,
        services: &Services,
        claimed: Option<&str>,
    ) -> Result<Identity, RequestRefusal> {
        let lookup = self.look_up(services);
        let row = match &lookup {
            RegistrationLookup::Found(row) => Some(Arc::clone(row)),
            RegistrationLookup::Unavailable
            | RegistrationLookup::NoPeer
            | RegistrationLookup::Unknown => None,
        };
        identify(lookup, claimed, services.clock().wall()).map_err(|denial| {
            if let (Reason::IdentityExpired, Some(row)) = (denial.reason, row) {
                services.registry().report_expiry(&row.id);
            }
            RequestRefusal::new(Stage::Identity, denial)
        })
    }
}

/// The refusal of a source without a sandbox.
pub fn unknown_source() -> RequestRefusal {
    let denial = Denial::new(Reason::IdentityUnknown, "identity");
    RequestRefusal::new(Stage::Identity, denial)
}

/// Reserves an audit slot; waits while the sandbox has too many records in flight.
pub async fn reserve_record(sandbox: Option<&Arc<SandboxState>>) -> Option<OwnedSemaphorePermit> {
    // The semaphore is never closed.
    Arc::clone(&sandbox?.requests).acquire_owned().await.ok()
}
