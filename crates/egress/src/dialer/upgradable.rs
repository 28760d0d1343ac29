//! Single-use HTTP/1.1 connection for a request that may upgrade, such as WebSocket.

use std::sync::Arc;
use std::time::Duration;

use http::header::UPGRADE;
use http::{Response, StatusCode};
use hyper::client::conn::http1::SendRequest;
use hyper::upgrade::Upgraded;
use hyper_util::rt::TokioIo;
use tokio::time::timeout;

use super::body::{BodySource, OutgoingBody, UpstreamBody};
use super::connector::{TcpOrTlsStream, connection_error, http1};
use super::error::{DialError, DialStep, error_chain};
use super::exchange::send_error;
use super::{Timings, message};
use crate::outgoing::{Outgoing, Route};

/// An open HTTP/1.1 connection that waits for its one request.
pub struct UpgradableConnection {
    route: Route,
    sender: SendRequest<OutgoingBody>,
    response: Duration,
    timings: Timings,
}

/// Response to a request that may upgrade.
pub struct UpgradeResponse {
    /// The response; its body is empty after a 101.
    pub response: Response<UpstreamBody>,
    /// The upgraded connection after a 101.
    pub io: Option<TokioIo<Upgraded>>,
    /// Connect timings and peer.
    pub timings: Timings,
}

pub(super) async fn begin(
    route: &Route,
    stream: TcpOrTlsStream,
    timings: Timings,
    response: Duration,
) -> Result<UpgradableConnection, DialError> {
    let (sender, connection) = http1()
        .handshake(TokioIo::new(stream))
        .await
        .map_err(|error| connection_error(&route.host, &error))?;
    let peer = timings.peer;
    tokio::spawn(async move {
        if let Err(error) = connection.with_upgrades().await {
            tracing::debug!(%peer, error = error_chain(&error), "upstream connection failed");
        }
    });
    Ok(UpgradableConnection {
        route: route.clone(),
        sender,
        response,
        timings,
    })
}

impl UpgradableConnection {
    /// Connect timings and peer.
    pub fn timings(&self) -> &Timings {
        &self.timings
    }

    /// Sends the request with its `Upgrade` header, if it has one. An unrequested 101 is an
    /// error.
    pub async fn send(mut self, outgoing: Outgoing) -> Result<UpgradeResponse, DialError> {
        let (_, mut request) = outgoing.into_parts();
        let host = &self.route.host;
        let upgrade = request.headers().get(UPGRADE).cloned();
        let upgrade_requested = upgrade.is_some();
        message::strip_headers(&self.route, &mut request)?;
        message::to_http1_form(&self.route, &mut request)?;
        if let Some(protocol) = upgrade {
            message::request_upgrade(&mut request, protocol);
        }
        let request = request.map(|content| OutgoingBody::new(content, Arc::default(), None));
        let answering = async {
            let mut response = match self.sender.send_request(request).await {
                Ok(response) => response,
                Err(error) => return Err(send_error(host, error)),
            };
            if response.status() != StatusCode::SWITCHING_PROTOCOLS {
                return Ok((response, None));
            }
            if !upgrade_requested {
                return Err(DialError::ConnectionFailed {
                    host: host.clone(),
                    detail: "the upstream switched protocols without an Upgrade request".to_owned(),
                });
            }
            let upgraded = hyper::upgrade::on(&mut response).await;
            let upgraded = upgraded.map_err(|error| connection_error(host, &error))?;
            Ok((response, Some(TokioIo::new(upgraded))))
        };
        match timeout(self.response, answering).await {
            Ok(Ok((response, io))) => Ok(UpgradeResponse {
                response: response
                    .map(|incoming| UpstreamBody::new(incoming, BodySource::Detached)),
                io,
                timings: self.timings,
            }),
            Ok(Err(error)) => Err(error),
            Err(_) => Err(DialError::TimedOut {
                host: host.clone(),
                step: DialStep::Answer,
                after: self.response,
            }),
        }
    }
}
