//! Outgoing requests: the only type that the dialer sends.

use config::section::git::{MirrorSettings, MirrorTransport};
use http::Request;
use policy::allowlist::Target;
use policy::host::Host;
use policy::proof::Cleared;

use crate::body::MessageBody;

/// Destination of a request.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Route {
    /// The host that was checked.
    pub host: Host,
    /// The port that was checked.
    pub port: u16,
    /// Whether TLS is used.
    pub tls: bool,
}

/// Whether a credential may be added to a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Credentials {
    /// The credential that the sandbox is granted for the host, if any.
    Granted,
    /// No credential.
    Anonymous,
}

/// A request that may be sent: a [`Cleared`] one, or the gate's own.
#[derive(Debug)]
pub struct Outgoing {
    route: Route,
    request: Request<MessageBody>,
    credentials: Credentials,
}

/// Parts of a cleared request for sending.
pub struct RequestParts<T> {
    /// The request, built anew.
    pub request: Request<MessageBody>,
    /// Whether TLS is used.
    pub tls: bool,
    /// Whether a credential may be added.
    pub credentials: Credentials,
    /// Other values for the caller.
    pub rest: T,
}

impl Outgoing {
    /// Converts a cleared request with `build`; its destination is the permitted target. Returns
    /// the admission, which the caller settles with the outcome.
    pub fn cleared<R, A, T, E>(
        cleared: Cleared<R, A>,
        build: impl FnOnce(R, &Target) -> Result<RequestParts<T>, E>,
    ) -> Result<(Self, Target, A, T), E> {
        let parts = cleared.into_parts();
        let target = parts.permit.into_target();
        let built = build(parts.request, &target)?;
        let outgoing = Self {
            route: Route {
                host: target.host.clone(),
                port: target.port,
                tls: built.tls,
            },
            request: built.request,
            credentials: built.credentials,
        };
        Ok((outgoing, target, parts.admission, built.rest))
    }

    /// A request to the upstream of a mirror; `None` if its address is invalid.
    pub fn for_mirror(mirror: &MirrorSettings, request: Request<MessageBody>) -> Option<Self> {
        let address = mirror.address()?;
        let route = Route {
            host: address.host,
            port: address.port,
            tls: address.transport == MirrorTransport::Https,
        };
        Some(Self::gate_own(route, request))
    }

    /// A request of the gate itself.
    pub fn gate_own(route: Route, request: Request<MessageBody>) -> Self {
        Self {
            route,
            request,
            credentials: Credentials::Anonymous,
        }
    }

    /// A request into which the credentials stage has written a credential.
    pub(crate) fn with_credential(route: Route, request: Request<MessageBody>) -> Self {
        Self {
            route,
            request,
            credentials: Credentials::Granted,
        }
    }

    /// The destination.
    pub fn route(&self) -> &Route {
        &self.route
    }

    /// The request.
    pub fn request(&self) -> &Request<MessageBody> {
        &self.request
    }

    /// Whether a credential may be added to the request.
    pub fn credentials(&self) -> Credentials {
        self.credentials
    }

    /// Changes body and headers, for a protocol upgrade.
    #[must_use]
    pub fn map(self, change: impl FnOnce(Request<MessageBody>) -> Request<MessageBody>) -> Self {
        Self {
            request: change(self.request),
            ..self
        }
    }

    /// Splits into route and request, for sending.
    pub(crate) fn into_parts(self) -> (Route, Request<MessageBody>) {
        (self.route, self.request)
    }
}
