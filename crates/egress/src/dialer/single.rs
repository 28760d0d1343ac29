//! A connection for one request that may become something else: WebSocket and other upgrades.

use std::sync::Arc;
use std::time::Duration;

use http::header::UPGRADE;
use http::{Response, StatusCode};
use hyper::client::conn::http1::SendRequest;
use hyper::upgrade::Upgraded;
use hyper_util::rt::TokioIo;
use tokio::time::timeout;

use super::body::{Arriving, Departing, Way};
use super::error::{DialError, Step, said};
use super::exchange::blame;
use super::wire::{Wire, broken, http1};
use super::{Timings, message};
use crate::outgoing::{Outgoing, Route};

/// An open HTTP/1.1 connection that waits for its one request.
pub struct Upgradable {
    route: Route,
    sender: SendRequest<Departing>,
    response: Duration,
    timings: Timings,
}

/// What came back.
pub struct Answer {
    /// The head, and a body unless the protocol was switched.
    pub response: Response<Arriving>,
    /// The connection itself after a 101.
    pub io: Option<TokioIo<Upgraded>>,
    /// How it got here.
    pub timings: Timings,
}

pub(super) async fn begin(
    route: &Route,
    wire: Wire,
    timings: Timings,
    response: Duration,
) -> Result<Upgradable, DialError> {
    let (sender, connection) = http1()
        .handshake(TokioIo::new(wire))
        .await
        .map_err(|error| broken(&route.host, &error))?;
    let peer = timings.peer;
    tokio::spawn(async move {
        if let Err(error) = connection.with_upgrades().await {
            tracing::debug!(%peer, error = said(&error), "an upstream connection ended");
        }
    });
    Ok(Upgradable {
        route: route.clone(),
        sender,
        response,
        timings,
    })
}

impl Upgradable {
    /// How the connection came about.
    pub fn timings(&self) -> &Timings {
        &self.timings
    }

    /// Sends the one request, with its `Upgrade` if it has one. An upstream that switches
    /// protocols without being asked has broken the connection.
    pub async fn send(mut self, outgoing: Outgoing) -> Result<Answer, DialError> {
        let (_, mut request) = outgoing.into_parts();
        let host = &self.route.host;
        let upgrade = request.headers().get(UPGRADE).cloned();
        let asked = upgrade.is_some();
        message::clean(&self.route, &mut request)?;
        message::for_http1(&self.route, &mut request)?;
        if let Some(protocol) = upgrade {
            message::ask_for_upgrade(&mut request, protocol);
        }
        let request = request.map(|content| Departing::new(content, Arc::default(), None));
        let answering = async {
            let mut response = match self.sender.send_request(request).await {
                Ok(response) => response,
                Err(error) => return Err(blame(host, error)),
            };
            if response.status() != StatusCode::SWITCHING_PROTOCOLS {
                return Ok((response, None));
            }
            if !asked {
                return Err(DialError::Broken {
                    host: host.clone(),
                    detail: "the upstream switched protocols unasked".to_owned(),
                });
            }
            let upgraded = hyper::upgrade::on(&mut response).await;
            let upgraded = upgraded.map_err(|error| broken(host, &error))?;
            Ok((response, Some(TokioIo::new(upgraded))))
        };
        match timeout(self.response, answering).await {
            Ok(Ok((response, io))) => Ok(Answer {
                response: response.map(|incoming| Arriving::new(incoming, Way::Free)),
                io,
                timings: self.timings,
            }),
            Ok(Err(error)) => Err(error),
            Err(_) => Err(DialError::TimedOut {
                host: host.clone(),
                step: Step::Answer,
                after: self.response,
            }),
        }
    }
}
