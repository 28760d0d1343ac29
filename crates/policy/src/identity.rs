//! Identification of the sender: the first stage of every request.

use std::sync::Arc;

use crate::clock::UnixMillis;
use crate::id::SandboxId;
use crate::reason::Reason;
use crate::registration::Registration;
use crate::verdict::Denial;

/// The registry's result for the listener or peer address of a connection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RegistrationLookup {
    /// The registry could not be read.
    Unavailable,
    /// The connection has no peer address.
    NoPeer,
    /// There is no registration.
    Unknown,
    /// The registration.
    Found(Arc<Registration>),
}

/// Proof of the sender's identity. Only [`identify`] creates one, and it cannot be cloned: a
/// connection keeps its [`RegistrationLookup`] and every request is identified again, so that a connection
/// ends when its registration expires.
///
/// ```compile_fail,E0451
/// fn forge(registration: std::sync::Arc<policy::registration::Registration>) {
///     let identity = policy::identity::Identity { registration };
/// }
/// ```
#[must_use = "an identity is required by the next stage"]
#[derive(Debug, PartialEq, Eq)]
pub struct Identity {
    registration: Arc<Registration>,
}

impl Identity {
    /// The id of the sender.
    pub fn sandbox(&self) -> &SandboxId {
        &self.registration.id
    }

    /// The sender's registration.
    pub fn registration(&self) -> &Arc<Registration> {
        &self.registration
    }
}

/// Identifies the sender of a request. `claimed` is the optional `X-Container-Id` header, which
/// the caller removes in any case.
///
/// The messages are those of the predecessor of this program, because clients compare them.
pub fn identify(
    lookup: RegistrationLookup,
    claimed: Option<&str>,
    now: UnixMillis,
) -> Result<Identity, Denial> {
    let registration = match lookup {
        RegistrationLookup::Found(registration) => registration,
        RegistrationLookup::Unavailable => {
            return Err(refuse(Reason::RegistryUnavailable, "Registry unavailable"));
        }
        RegistrationLookup::NoPeer => {
            return Err(refuse(
                Reason::IdentityUnknown,
                "Cannot determine client IP",
            ));
        }
        RegistrationLookup::Unknown => {
            return Err(refuse(Reason::IdentityUnknown, "Unknown source IP"));
        }
    };
    if let Some(claimed) = claimed
        && claimed != registration.id.as_str()
    {
        return Err(refuse(Reason::IdentityMismatch, "Container ID mismatch")
            .with_evidence(format!("registered is {}", registration.id)));
    }
    if !registration.is_live(now) {
        return Err(refuse(
            Reason::IdentityExpired,
            "Container registration expired",
        ));
    }
    Ok(Identity { registration })
}

fn refuse(reason: Reason, message: &str) -> Denial {
    Denial::new(reason, "identity").with_message(message)
}

#[cfg(test)]
mod tests {

    use super::*;
    use crate::registration::AuthMode;

    fn found() -> RegistrationLookup {
        RegistrationLookup::Found(Arc::new(Registration {
            id: SandboxId::parse("box").unwrap(),
            ip: None,
            repos: Vec::new(),
            auth_mode: AuthMode::User,
            credentials: Vec::new(),
            created: UnixMillis::new(0),
            expires: UnixMillis::new(1_000),
            metadata: serde_json::Map::new(),
        }))
    }

    #[test]
    fn registered_peer_is_identified_with_or_without_header() {
        for claimed in [None, Some("box")] {
            let identity = identify(found(), claimed, UnixMillis::new(999)).unwrap();
            assert_eq!(identity.sandbox().as_str(), "box");
            assert_eq!(identity.registration().expires, UnixMillis::new(1_000));
        }
    }

    #[test]
    fn unidentified_peer_is_refused_with_expected_message() {
        for (lookup, claimed, now, reason, message) in [
            (
                RegistrationLookup::Unavailable,
                None,
                0,
                Reason::RegistryUnavailable,
                "Registry unavailable",
            ),
            (
                RegistrationLookup::NoPeer,
                None,
                0,
                Reason::IdentityUnknown,
                "Cannot determine client IP",
            ),
            (
                RegistrationLookup::Unknown,
                Some("box"),
                0,
                Reason::IdentityUnknown,
                "Unknown source IP",
            ),
            (
                found(),
                Some("other"),
                0,
                Reason::IdentityMismatch,
                "Container ID mismatch",
            ),
            (
                found(),
                Some("Box"),
                0,
                Reason::IdentityMismatch,
                "Container ID mismatch",
            ),
            (
                found(),
                Some(""),
                0,
                Reason::IdentityMismatch,
                "Container ID mismatch",
            ),
            (
                found(),
                Some("other"),
                1_000,
                Reason::IdentityMismatch,
                "Container ID mismatch",
            ),
            (
                found(),
                None,
                1_000,
                Reason::IdentityExpired,
                "Container registration expired",
            ),
        ] {
            let denial = identify(lookup, claimed, UnixMillis::new(now)).unwrap_err();
            assert_eq!((denial.reason, denial.message.as_str()), (reason, message));
        }
    }
}
