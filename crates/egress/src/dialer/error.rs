//! Why a request did not get out, or nothing came back.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use policy::host::Host;
use policy::reason::Reason;
use policy::verdict::RuleName;

/// What kept the dialer from an answer.
///
/// As text it is for the agent and names nothing but the host it asked for. What was seen of
/// the operator's network is in [`DialError::evidence`].
#[derive(Clone, Debug, thiserror::Error)]
pub enum DialError {
    /// DNS or TLS cannot carry the name.
    #[error("{host} is not a name that can be connected to: check its spelling")]
    BadName {
        /// The name.
        host: Host,
        /// What is wrong with it.
        detail: String,
    },
    /// DNS says that there is nothing.
    #[error("{host} has no address: check its spelling")]
    NoSuchName {
        /// The name.
        host: Host,
    },
    /// DNS says nothing.
    #[error("the address of {host} could not be found: the resolver did not answer")]
    Unresolved {
        /// The name.
        host: Host,
        /// What the resolver said.
        detail: String,
    },
    /// An address that is never dialled.
    #[error("{host} leads to an address that is never dialled")]
    Refused {
        /// The host.
        host: Host,
        /// The first such address.
        address: IpAddr,
        /// What it is.
        class: &'static str,
    },
    /// An alias of a name that the operator denied.
    #[error("{host} is an alias of a name that a rule denies")]
    Alias {
        /// The host.
        host: Host,
        /// What it is an alias of.
        alias: Host,
        /// The rule.
        rule: RuleName,
    },
    /// No address took the connection.
    #[error("{host} could not be reached on port {port}")]
    Unreachable {
        /// The host.
        host: Host,
        /// The port that was asked for.
        port: u16,
        /// What each address said.
        detail: String,
    },
    /// The upstream's TLS is not acceptable.
    #[error("the TLS handshake with {host} failed: {says}")]
    Tls {
        /// The host.
        host: Host,
        /// One plain sentence.
        says: &'static str,
        /// What the library said.
        detail: String,
    },
    /// Nothing to check a certificate against.
    #[error("the certificate of {host} cannot be checked: the gate has no roots")]
    NoRoots {
        /// The host.
        host: Host,
    },
    /// A step took too long.
    #[error("{host} did not {step} within {after:?}")]
    TimedOut {
        /// The host.
        host: Host,
        /// The step.
        step: Step,
        /// The time it had.
        after: Duration,
    },
    /// All connections that one sandbox may have to one host are in use.
    #[error("too many requests to {host} are running: none of them ended within {after:?}")]
    Busy {
        /// The host.
        host: Host,
        /// How long it was waited.
        after: Duration,
    },
    /// The connection broke, or what came over it is not HTTP.
    #[error("{host} ended the connection without a proper answer")]
    Broken {
        /// The host.
        host: Host,
        /// What the library said.
        detail: String,
    },
    /// A limit of ours.
    #[error("the head of {host}'s answer is longer than 64 KiB, or has more than 100 headers")]
    LongHead {
        /// The host.
        host: Host,
    },
    /// The body that was to be sent broke. Its own error is in the chain of sources.
    #[error("the request to {host} ended before it was complete")]
    Cut {
        /// The host.
        host: Host,
        /// How it broke.
        #[source]
        cause: Arc<hyper::Error>,
    },
    /// A request that cannot be written as HTTP.
    #[error("the request to {host} cannot be sent: {detail}")]
    Unsendable {
        /// The host.
        host: Host,
        /// Why not.
        detail: &'static str,
    },
}

/// A step of the way out that has a time-out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// Name, connection and TLS.
    Connect,
    /// The head of the response.
    Answer,
}

impl std::fmt::Display for Step {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Step::Connect => "take a connection",
            Step::Answer => "answer",
        })
    }
}

impl DialError {
    /// The stable word for it.
    pub const fn reason(&self) -> Reason {
        match self {
            DialError::BadName { .. } => Reason::BadName,
            DialError::Refused { .. } => Reason::AddressClass,
            DialError::Alias { .. } => Reason::HostDenied,
            DialError::NoSuchName { .. }
            | DialError::Unresolved { .. }
            | DialError::Unreachable { .. }
            | DialError::Broken { .. }
            | DialError::LongHead { .. } => Reason::ConnectFailed,
            DialError::Tls { .. } | DialError::NoRoots { .. } => Reason::TlsUpstream,
            DialError::TimedOut { .. } | DialError::Busy { .. } => Reason::UpstreamTimeout,
            DialError::Cut { .. } | DialError::Unsendable { .. } => Reason::Internal,
        }
    }

    /// Whether the upstream is to blame, which is what a breaker counts. What we refuse, and
    /// what the client broke, says nothing about the upstream.
    pub const fn counts_as_failure(&self) -> bool {
        match self {
            DialError::NoSuchName { .. }
            | DialError::Unresolved { .. }
            | DialError::Unreachable { .. }
            | DialError::Tls { .. }
            | DialError::TimedOut { .. }
            | DialError::Broken { .. } => true,
            DialError::BadName { .. }
            | DialError::Refused { .. }
            | DialError::Alias { .. }
            | DialError::NoRoots { .. }
            | DialError::Busy { .. }
            | DialError::LongHead { .. }
            | DialError::Cut { .. }
            | DialError::Unsendable { .. } => false,
        }
    }

    /// What was seen, for the operator alone.
    pub fn evidence(&self) -> String {
        match self {
            DialError::BadName { detail, .. }
            | DialError::Unresolved { detail, .. }
            | DialError::Unreachable { detail, .. }
            | DialError::Tls { detail, .. }
            | DialError::Broken { detail, .. } => detail.clone(),
            DialError::NoSuchName { host } => format!("no A or AAAA record of {host}"),
            DialError::Refused {
                host,
                address,
                class,
            } => format!("{host} is {address}, which is {class}"),
            DialError::Alias { host, alias, rule } => {
                format!("{host} is an alias of {alias}, which {rule} denies")
            }
            DialError::NoRoots { .. } => {
                "neither the system nor egress.extra_roots has a root certificate".to_owned()
            }
            DialError::TimedOut { step, after, .. } => format!("did not {step} within {after:?}"),
            DialError::Busy { after, .. } => format!("no free connection for {after:?}"),
            DialError::LongHead { .. } => self.to_string(),
            DialError::Cut { cause, .. } => said(cause.as_ref()),
            DialError::Unsendable { detail, .. } => (*detail).to_owned(),
        }
    }
}

/// An error and what caused it, in one line.
pub(super) fn said(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut next = error.source();
    while let Some(cause) = next {
        let cause_says = cause.to_string();
        if !text.contains(&cause_says) {
            text.push_str(": ");
            text.push_str(&cause_says);
        }
        next = cause.source();
    }
    text
}
