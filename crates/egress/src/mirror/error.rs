//! Errors of a mirror's upstream, with a message for the agent and evidence for the operator. The
//! agent's message has no details of the operator's network or key.

use policy::reason::Reason;
use policy::verdict::Denial;

use super::Mirror;
use super::git_command::GitCommandError;
use crate::dialer::DialError;
use crate::refusal::RequestRefusal;
use crate::stage::Stage;

/// Rule name in the denials of mirrors.
const RULE: &str = "git.mirrors";

/// Texts in error messages of git and ssh, with their reason and the agent's message.
const KNOWN_ERRORS: [(&str, Reason, &str); 10] = [
    (
        "Host key verification failed",
        Reason::ConnectFailed,
        "its host key is not the one that was configured",
    ),
    (
        "Permission denied",
        Reason::ConnectFailed,
        "it rejects the configured key",
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
        "there is no route to it",
    ),
    (
        "No route to host",
        Reason::ConnectFailed,
        "there is no route to it",
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

/// Why a mirror's upstream cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct MirrorError {
    reason: Reason,
    /// The message for the agent.
    message: String,
    /// The details for the operator.
    evidence: String,
}

impl MirrorError {
    fn new(reason: Reason, message: &str, evidence: &str) -> Self {
        Self {
            reason,
            message: message.to_owned(),
            evidence: evidence.to_owned(),
        }
    }

    /// Upstream cannot be reached.
    pub fn unreachable(evidence: &str) -> Self {
        Self::new(Reason::ConnectFailed, "it cannot be reached", evidence)
    }

    /// The key cannot be read.
    pub fn unreadable_key(evidence: &str) -> Self {
        Self::new(
            Reason::CredentialMissing,
            "its key cannot be read",
            evidence,
        )
    }

    /// Upstream's list of refs cannot be parsed.
    pub fn unreadable_refs() -> Self {
        let message = "its list of refs cannot be read";
        Self::new(Reason::ConnectFailed, message, message)
    }

    /// A program is not installed.
    pub fn missing_program(program: &str) -> Self {
        let message = format!("{program} is not installed where the gate runs");
        Self::new(Reason::Internal, &message, &message)
    }

    /// Pushing over the upstream's transport is not supported.
    pub fn push_unsupported() -> Self {
        let message = "pushing over git:// is not supported";
        Self::new(Reason::MethodDenied, message, message)
    }

    /// The denial of a request to the mirror of this name.
    pub fn denial(&self, mirror: &str) -> Denial {
        Denial::new(self.reason, RULE)
            .with_message(format!(
                "The upstream of mirror '{mirror}' cannot be used: {}.",
                self.message
            ))
            .with_evidence(self.evidence.clone())
    }

    /// The refusal of a request to this mirror.
    pub fn refusal(&self, mirror: &Mirror) -> RequestRefusal {
        RequestRefusal::new(Stage::Git, self.denial(mirror.name()))
    }
}

impl From<DialError> for MirrorError {
    fn from(error: DialError) -> Self {
        Self::new(error.reason(), "it cannot be reached", &error.evidence())
    }
}

impl From<GitCommandError> for MirrorError {
    fn from(error: GitCommandError) -> Self {
        let evidence = error.to_string();
        let (reason, message) = match &error {
            GitCommandError::NotStarted { program, .. } => {
                return Self {
                    evidence,
                    ..Self::missing_program(program)
                };
            }
            GitCommandError::TimedOut { .. } => {
                (Reason::UpstreamTimeout, "it did not answer in time")
            }
            GitCommandError::Failed { message, .. } => classify(message),
        };
        Self::new(reason, message, &evidence)
    }
}

fn classify(text: &str) -> (Reason, &'static str) {
    let mut errors = KNOWN_ERRORS.iter();
    let found = errors.find(|(pattern, ..)| text.contains(pattern));
    found.map_or(
        (Reason::ConnectFailed, "it cannot be reached"),
        |(_, reason, message)| (*reason, message),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn details_are_in_the_evidence_and_not_the_message() {
        for (text, reason, message) in [
            (
                "ssh: connect to host 192.0.2.7 port 22: Connection refused",
                Reason::ConnectFailed,
                "refuses the connection",
            ),
            (
                "git@192.0.2.7: Permission denied (publickey).",
                Reason::ConnectFailed,
                "rejects the configured key",
            ),
            (
                "ssh: connect to host 192.0.2.7 port 22: Connection timed out",
                Reason::UpstreamTimeout,
                "in time",
            ),
            ("192.0.2.7 is odd", Reason::ConnectFailed, "be reached"),
        ] {
            let denial = MirrorError::from(GitCommandError::Failed {
                action: "listing refs",
                message: text.to_owned(),
            })
            .denial("app");
            assert_eq!(denial.reason, reason, "{text}");
            assert!(denial.message.contains(message), "{}", denial.message);
            assert!(!denial.message.contains("192.0.2.7"));
            assert!(denial.evidence.unwrap().contains(text));
        }
    }
}
