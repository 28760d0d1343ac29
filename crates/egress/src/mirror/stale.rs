//! Why a mirror is not what upstream has, in words for the agent and in words for the
//! operator: of the operator's network and key the agent learns nothing.

use policy::reason::Reason;
use policy::verdict::Denial;

use super::Mirror;
use super::program::GitCommandError;
use crate::dialer::DialError;
use crate::refusal::Refusal;
use crate::stage::Stage;

/// The rule that such refusals name.
const RULE: &str = "git.mirrors";

/// What programs say, and what that means.
const MEANINGS: [(&str, Reason, &str); 10] = [
    (
        "Host key verification failed",
        Reason::ConnectFailed,
        "its host key is not the one that was configured",
    ),
    (
        "Permission denied",
        Reason::ConnectFailed,
        "it does not take the key",
    ),
    (
        "timed out",
        Reason::UpstreamTimeout,
        "it did not answer in time",
    ),
    (
        "Connection refused",
        Reason::ConnectFailed,
        "it refuses the connection",
    ),
    (
        "Failed to connect",
        Reason::ConnectFailed,
        "it refuses the connection",
    ),
    (
        "Network is unreachable",
        Reason::ConnectFailed,
        "there is no way to it",
    ),
    (
        "No route to host",
        Reason::ConnectFailed,
        "there is no way to it",
    ),
    (
        "not appear to be a git repository",
        Reason::ConnectFailed,
        "there is no such repository",
    ),
    (
        "not found",
        Reason::ConnectFailed,
        "there is no such repository",
    ),
    (
        "certificate",
        Reason::TlsUpstream,
        "its certificate is not trusted",
    ),
];

/// Why a mirror is not what upstream has.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{says}")]
pub struct Stale {
    reason: Reason,
    says: String,
    evidence: String,
}

impl Stale {
    fn new(reason: Reason, says: &str, evidence: &str) -> Self {
        Self {
            reason,
            says: says.to_owned(),
            evidence: evidence.to_owned(),
        }
    }

    /// Upstream cannot be spoken to; why is for the operator.
    pub fn unreachable(why: &str) -> Self {
        Self::new(Reason::ConnectFailed, "it cannot be reached", why)
    }

    /// The key cannot be had; why is for the operator.
    pub fn key(why: &str) -> Self {
        Self::new(Reason::CredentialMissing, "its key cannot be read", why)
    }

    /// What upstream said makes no sense.
    pub fn refs() -> Self {
        let says = "its list of refs cannot be read";
        Self::new(Reason::ConnectFailed, says, says)
    }

    /// A program is not there.
    pub fn missing(program: &str) -> Self {
        let says = format!("{program} is not installed where the gate runs");
        Self::new(Reason::Internal, &says, &says)
    }

    /// Upstream takes no pushes in that way.
    pub fn unpushable() -> Self {
        let says = "nothing can be pushed over git://";
        Self::new(Reason::MethodDenied, says, says)
    }

    /// The refusal of whatever needed the mirror of that name.
    pub fn denial(&self, mirror: &str) -> Denial {
        Denial::new(self.reason, RULE)
            .saying(format!(
                "The upstream of mirror '{mirror}' cannot be used: {}.",
                self.says
            ))
            .because(self.evidence.clone())
    }

    /// The same, as the end of a request's way.
    pub fn refusal(&self, mirror: &Mirror) -> Refusal {
        Refusal::new(Stage::Git, self.denial(mirror.name()))
    }
}

impl From<DialError> for Stale {
    fn from(error: DialError) -> Self {
        Self::new(error.reason(), "it cannot be reached", &error.evidence())
    }
}

impl From<GitCommandError> for Stale {
    fn from(error: GitCommandError) -> Self {
        let evidence = error.to_string();
        let (reason, says) = match &error {
            GitCommandError::NotStarted { program, .. } => {
                return Self {
                    evidence,
                    ..Self::missing(program)
                };
            }
            GitCommandError::TimedOut { .. } => {
                (Reason::UpstreamTimeout, "it did not answer in time")
            }
            GitCommandError::Failed { said, .. } => meaning(said),
        };
        Self::new(reason, says, &evidence)
    }
}

fn meaning(said: &str) -> (Reason, &'static str) {
    let mut known = MEANINGS.iter();
    let found = known.find(|(words, ..)| said.contains(words));
    found.map_or(
        (Reason::ConnectFailed, "it cannot be reached"),
        |(_, reason, says)| (*reason, says),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_agent_hears_what_it_means_and_the_operator_what_was_said() {
        for (said, reason, says) in [
            (
                "ssh: connect to host 192.0.2.7 port 22: Connection refused",
                Reason::ConnectFailed,
                "refuses the connection",
            ),
            (
                "git@192.0.2.7: Permission denied (publickey).",
                Reason::ConnectFailed,
                "does not take the key",
            ),
            (
                "ssh: connect to host 192.0.2.7 port 22: Connection timed out",
                Reason::UpstreamTimeout,
                "in time",
            ),
            ("192.0.2.7 is odd", Reason::ConnectFailed, "be reached"),
        ] {
            let denial = Stale::from(GitCommandError::Failed {
                what: "asking",
                said: said.to_owned(),
            })
            .denial("app");
            assert_eq!(denial.reason, reason, "{said}");
            assert!(denial.message.contains(says), "{}", denial.message);
            assert!(!denial.message.contains("192.0.2.7"));
            assert!(denial.evidence.unwrap().contains(said));
        }
    }
}
