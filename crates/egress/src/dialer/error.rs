//! Errors of the dialer.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use policy::host::Host;
use policy::reason::Reason;
use policy::verdict::RuleName;

/// Why the dialer got no response.
///
/// The message is for the agent and names only the requested host. Details of the operator's
/// network are in [`DialError::evidence`].
#[derive(Clone, Debug, thiserror::Error)]
pub enum DialError {
    /// The name is not valid in DNS or TLS.
    #[error("{host} is not a valid host name: check its spelling")]
    BadName {
        /// The name.
        host: Host,
        /// What is wrong with the name.
        detail: String,
    },
    /// DNS has no address for the name.
    #[error("{host} has no address in DNS: check its spelling")]
    NoSuchName {
        /// The name.
        host: Host,
    },
    /// The resolvers failed.
    #[error("{host} could not be resolved: the DNS resolver failed")]
    Unresolved {
        /// The name.
        host: Host,
        /// The resolver's error.
        detail: String,
    },
    /// The host has an address that is never dialled.
    #[error("{host} resolves to an address that is never dialled")]
    Refused {
        /// The host.
        host: Host,
        /// The first such address.
        address: IpAddr,
        /// The class of the address.
        class: &'static str,
    },
    /// The host is an alias (CNAME) of a name that the operator denies.
    #[error("{host} is an alias of a name that a rule denies")]
    Alias {
        /// The host.
        host: Host,
        /// The denied name.
        alias: Host,
        /// The rule that denies the name.
        rule: RuleName,
    },
    /// No address accepted a connection.
    #[error("{host} could not be reached on port {port}")]
    Unreachable {
        /// The host.
        host: Host,
        /// The requested port.
        port: u16,
        /// The error of each address.
        detail: String,
    },
    /// The TLS handshake failed.
    #[error("the TLS handshake with {host} failed: {cause}")]
    Tls {
        /// The host.
        host: Host,
        /// The cause, in words for the agent.
        cause: &'static str,
        /// The library's error.
        detail: String,
    },
    /// The gate has no root certificates.
    #[error("the certificate of {host} cannot be checked: the gate has no root certificates")]
    NoRoots {
        /// The host.
        host: Host,
    },
    /// A step took too long.
    #[error("{host} did not {step} within {after:?}")]
    TimedOut {
        /// The host.
        host: Host,
        /// The step that timed out.
        step: DialStep,
        /// The timeout.
        after: Duration,
    },
    /// All connections that one sandbox may have to one host are in use.
    #[error("too many concurrent requests to {host}: none of them ended within {after:?}")]
    Busy {
        /// The host.
        host: Host,
        /// The timeout.
        after: Duration,
    },
    /// The connection failed, or the response is not valid HTTP.
    #[error("{host} closed the connection without a valid response")]
    ConnectionFailed {
        /// The host.
        host: Host,
        /// The library's error.
        detail: String,
    },
    /// The response head exceeds the gate's limits.
    #[error("the response head of {host} is longer than 64 KiB, or has more than 100 headers")]
    LongHead {
        /// The host.
        host: Host,
    },
    /// The request body failed. Its own error is in the chain of sources.
    #[error("the request to {host} ended before it was complete")]
    RequestBodyFailed {
        /// The host.
        host: Host,
        /// The error of the body.
        #[source]
        cause: Arc<hyper::Error>,
    },
    /// A request that cannot be written as HTTP.
    #[error("the request to {host} cannot be sent: {detail}")]
    Unsendable {
        /// The host.
        host: Host,
        /// Why the request is invalid.
        detail: &'static str,
    },
}

/// A step of the dialer that has a timeout.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DialStep {
    /// DNS lookup, TCP connect and TLS handshake.
    Connect,
    /// The head of the response.
    Answer,
}

impl std::fmt::Display for DialStep {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            DialStep::Connect => "accept a connection",
            DialStep::Answer => "respond",
        })
    }
}

impl DialError {
    /// The reason code.
    pub const fn reason(&self) -> Reason {
        match self {
            DialError::BadName { .. } => Reason::BadName,
            DialError::Refused { .. } => Reason::AddressClass,
            DialError::Alias { .. } => Reason::HostDenied,
            DialError::NoSuchName { .. }
            | DialError::Unresolved { .. }
            | DialError::Unreachable { .. }
            | DialError::ConnectionFailed { .. }
            | DialError::LongHead { .. } => Reason::ConnectFailed,
            DialError::Tls { .. } | DialError::NoRoots { .. } => Reason::TlsUpstream,
            DialError::TimedOut { .. } | DialError::Busy { .. } => Reason::UpstreamTimeout,
            DialError::RequestBodyFailed { .. } | DialError::Unsendable { .. } => Reason::Internal,
        }
    }

    /// Whether a circuit breaker counts the error as a failure of the upstream. Refusals of the
    /// gate and failures of the client do not count.
    pub const fn counts_as_failure(&self) -> bool {
        match self {
            DialError::NoSuchName { .. }
            | DialError::Unresolved { .. }
            | DialError::Unreachable { .. }
            | DialError::Tls { .. }
            | DialError::TimedOut { .. }
            | DialError::ConnectionFailed { .. } => true,
            DialError::BadName { .. }
            | DialError::Refused { .. }
            | DialError::Alias { .. }
            | DialError::NoRoots { .. }
            | DialError::Busy { .. }
            | DialError::LongHead { .. }
            | DialError::RequestBodyFailed { .. }
            | DialError::Unsendable { .. } => false,
        }
    }

    /// Details for the operator only.
    pub fn evidence(&self) -> String {
        match self {
            DialError::BadName { detail, .. }
            | DialError::Unresolved { detail, .. }
            | DialError::Unreachable { detail, .. }
            | DialError::Tls { detail, .. }
            | DialError::ConnectionFailed { detail, .. } => detail.clone(),
            DialError::NoSuchName { host } => format!("no A or AAAA record of {host}"),
            DialError::Refused {
                host,
                address,
                class,
            } => format!("{host} resolves to {address} (address class: {class})"),
            DialError::Alias { host, alias, rule } => {
                format!("{host} is an alias of {alias}, which the rule {rule} denies")
            }
            DialError::NoRoots { .. } => {
                "neither the system nor egress.extra_roots has a root certificate".to_owned()
            }
            DialError::TimedOut { step, after, .. } => format!("did not {step} within {after:?}"),
            DialError::Busy { after, .. } => format!("no free connection for {after:?}"),
            DialError::LongHead { .. } => self.to_string(),
            DialError::RequestBodyFailed { cause, .. } => error_chain(cause.as_ref()),
            DialError::Unsendable { detail, .. } => (*detail).to_owned(),
        }
    }
}

/// An error with its chain of sources, in one line.
pub(super) fn error_chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut next = error.source();
    while let Some(cause) = next {
        let message = cause.to_string();
        if !text.contains(&message) {
            text.push_str(": ");
            text.push_str(&message);
        }
        next = cause.source();
    }
    text
}
