//! A request that may leave: the only thing that the dialer sends.

use config::section::git::{MirrorSettings, MirrorTransport};
use http::Request;
use policy::allowlist::Target;
use policy::host::Host;
use policy::proof::Cleared;

use crate::body::Content;

/// Where a request goes.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Route {
    /// The host, as it was judged.
    pub host: Host,
    /// The port, as it was judged.
    pub port: u16,
    /// Whether TLS is spoken there.
    pub tls: bool,
}

/// Whether a credential may be added to a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Credentials {
    /// The credential that its sandbox was granted for the host, if it was.
    Granted,
    /// None: the request is sent as anybody could send it.
    Anonymous,
}

/// A request that may leave. It is made from a [`Cleared`] request, or is the gate's own.
#[derive(Debug)]
pub struct Outgoing {
    route: Route,
    request: Request<Content>,
    credentials: Credentials,
}

/// What a cleared request is made of when it leaves.
pub struct RequestParts<T> {
    /// The request, built anew.
    pub request: Request<Content>,
    /// Whether it goes over TLS.
    pub tls: bool,
    /// Whether a credential may be added.
    pub credentials: Credentials,
    /// Whatever else the caller needs of it.
    pub rest: T,
}

impl Outgoing {
    /// A request that passed every check, to the target that was permitted. `build` makes the
    /// request from it. The admission comes back, to be settled with the outcome.
    pub fn cleared<R, A, T, E>(
        cleared: Cleared<R, A>,
        build: impl FnOnce(R, &Target) -> Result<RequestParts<T>, E>,
    ) -> Result<(Self, Target, A, T), E> {
        let parts = cleared.into_parts();
        let target = parts.permit.into_target();
        let departure = build(parts.request, &target)?;
        let outgoing = Self {
            route: Route {
                host: target.host.clone(),
                port: target.port,
                tls: departure.tls,
            },
            request: departure.request,
            credentials: departure.credentials,
        };
        Ok((outgoing, target, parts.admission, departure.rest))
    }

    /// A request to the upstream of a mirror; none where its address cannot be read.
    pub fn for_mirror(mirror: &MirrorSettings, request: Request<Content>) -> Option<Self> {
        let place = mirror.address()?;
        let route = Route {
            host: place.host,
            port: place.port,
            tls: place.transport == MirrorTransport::Https,
        };
        Some(Self::gate_own(route, request))
    }

    /// A request that the gate sends on its own account.
    pub fn gate_own(route: Route, request: Request<Content>) -> Self {
        Self {
            route,
            request,
            credentials: Credentials::Anonymous,
        }
    }

    /// Where it goes.
    pub fn route(&self) -> &Route {
        &self.route
    }

    /// The request.
    pub fn request(&self) -> &Request<Content> {
        &self.request
    }

    /// Whether a credential may be added to it.
    pub fn credentials(&self) -> Credentials {
        self.credentials
    }

    /// The same with another body and other headers, for a change of the protocol.
    #[must_use]
    pub fn map(self, change: impl FnOnce(Request<Content>) -> Request<Content>) -> Self {
        Self {
            request: change(self.request),
            ..self
        }
    }

    /// Takes it apart, to send it.
    pub(crate) fn into_parts(self) -> (Route, Request<Content>) {
        (self.route, self.request)
    }
}
