//! Who is asking: the first stage of every request.

use std::sync::Arc;

use crate::clock::UnixMillis;
use crate::id::SandboxId;
use crate::reason::Reason;
use crate::registration::Registration;
use crate::verdict::Denial;

/// What the registry knows about the listener or the peer address of a connection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Lookup {
    /// The registry could not be asked.
    Unavailable,
    /// The connection has no peer address.
    NoPeer,
    /// Nobody is registered there.
    Unknown,
    /// This one is.
    Found(Arc<Registration>),
}

/// Proof of who is asking. Only [`identify`] makes one, and it cannot be cloned: a
/// connection keeps its [`Lookup`], and every request is identified anew, so that a
/// registration that expires in the middle of a connection ends it.
///
/// ```compile_fail,E0451
/// fn forge(registration: std::sync::Arc<policy::registration::Registration>) {
///     let identity = policy::identity::Identity { registration };
/// }
/// ```
#[must_use = "an identity is only worth something to the stage that demands it"]
#[derive(Debug, PartialEq, Eq)]
pub struct Identity {
    registration: Arc<Registration>,
}

impl Identity {
    /// Who it is.
    pub fn sandbox(&self) -> &SandboxId {
        &self.registration.id
    }

    /// All that was registered.
    pub fn registration(&self) -> &Arc<Registration> {
        &self.registration
    }
}

/// Decides who is asking. `claimed` is the request's `X-Container-Id`, which nobody has to
/// send; the caller strips it in any case.
///
/// The sentences are those of the program that came before, because clients look for them.
pub fn identify(
    lookup: Lookup,
    claimed: Option<&str>,
    now: UnixMillis,
) -> Result<Identity, Denial> {
    let registration = match lookup {
        Lookup::Found(registration) => registration,
        Lookup::Unavailable => {
            return Err(refuse(Reason::RegistryUnavailable, "Registry unavailable"));
        }
        Lookup::NoPeer => {
            return Err(refuse(
                Reason::IdentityUnknown,
                "Cannot determine client IP",
            ));
        }
        Lookup::Unknown => return Err(refuse(Reason::IdentityUnknown, "Unknown source IP")),
    };
    if let Some(claimed) = claimed
        && claimed != registration.id.as_str()
    {
        return Err(refuse(Reason::IdentityMismatch, "Container ID mismatch")
            .because(format!("registered is {}", registration.id)));
    }
    if !registration.is_live(now) {
        return Err(refuse(
            Reason::IdentityExpired,
            "Container registration expired",
        ));
    }
    Ok(Identity { registration })
}

fn refuse(reason: Reason, sentence: &str) -> Denial {
    Denial::new(reason, "identity").saying(sentence)
}

#[cfg(test)]
mod tests {

    use super::*;
    use crate::registration::AuthMode;

    fn found() -> Lookup {
        Lookup::Found(Arc::new(Registration {
            id: SandboxId::parse("box").unwrap(),
            ip: None,
            repos: Vec::new(),
            auth_mode: AuthMode::User,
            created: UnixMillis::new(0),
            expires: UnixMillis::new(1_000),
            metadata: serde_json::Map::new(),
        }))
    }

    #[test]
    fn a_registered_peer_is_known_with_or_without_the_header() {
        for claimed in [None, Some("box")] {
            let identity = identify(found(), claimed, UnixMillis::new(999)).unwrap();
            assert_eq!(identity.sandbox().as_str(), "box");
            assert_eq!(identity.registration().expires, UnixMillis::new(1_000));
        }
    }

    #[test]
    fn everybody_else_hears_the_sentence_that_clients_look_for() {
        for (lookup, claimed, now, reason, sentence) in [
            (
                Lookup::Unavailable,
                None,
                0,
                Reason::RegistryUnavailable,
                "Registry unavailable",
            ),
            (
                Lookup::NoPeer,
                None,
                0,
                Reason::IdentityUnknown,
                "Cannot determine client IP",
            ),
            (
                Lookup::Unknown,
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
            assert_eq!((denial.reason, denial.message.as_str()), (reason, sentence));
        }
    }
}
