//! One request on one connection.

use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use http::{Request, Response, StatusCode};
use hyper::body::Incoming;
use hyper::client::conn::{TrySendError, http1, http2};
use policy::host::Host;
use tokio::sync::Notify;
use tokio::time::{Instant, timeout, timeout_at};

use super::body::{Arriving, Departing};
use super::error::{DialError, Step};
use super::pool::{Checkout, Dial, Place, Shelf};
use super::wire::{Deadline, Line, broken};
use super::{Route, Rules, Sent, Timings, message};
use crate::body::Content;

/// How long a connection that was just given back may take to become ready. Its task has
/// nothing to do but notice; a new connection would take longer.
const SETTLE: Duration = Duration::from_millis(5);

/// A connection and a request's place on it.
pub(super) struct Taken {
    place: Arc<Place>,
    sender: Sender,
    timings: Timings,
}

enum Sender {
    Http1(http1::SendRequest<Departing>),
    Http2(http2::SendRequest<Departing>, Option<Arc<Notify>>),
}

/// How one attempt ended without an answer.
pub(super) enum Failure {
    /// For good.
    Final(DialError),
    /// The connection closed before any of the request was sent.
    Unsent(Box<Request<Content>>, DialError),
}

impl From<DialError> for Failure {
    fn from(error: DialError) -> Self {
        Failure::Final(error)
    }
}

/// Finds or makes a connection; none when the shelf was taken down meanwhile.
pub(super) async fn take(
    shelf: &Arc<Shelf>,
    rules: &Rules,
    since: Instant,
    again: bool,
) -> Result<Option<Taken>, DialError> {
    let (sandbox, route) = &shelf.key;
    let deadline = Deadline::new(&route.host, since, rules.timeouts.connect);
    let mut seen = None;
    loop {
        // Before the look, so that nothing is missed between the look and the wait.
        let mut changed = pin!(shelf.changed.notified());
        changed.as_mut().enable();
        match shelf.check_out(seen, again) {
            Checkout::Http1 {
                place,
                mut sender,
                peer,
            } => {
                if let Ok(Ok(())) = timeout(SETTLE, sender.ready()).await {
                    return Ok(Some(Taken {
                        place: Arc::new(place),
                        sender: Sender::Http1(sender),
                        timings: Timings::reused(peer, http::Version::HTTP_11),
                    }));
                }
            }
            Checkout::Http2 { place, line } => {
                return Ok(Some(Taken {
                    place: Arc::new(place),
                    sender: Sender::Http2(line.sender.clone(), None),
                    timings: Timings::reused(line.peer, http::Version::HTTP_2),
                }));
            }
            Checkout::Dial(dial) => {
                return match deadline.hold(rules.line(route, sandbox)).await {
                    Ok((line, timings)) => Ok(Some(Taken::fresh(dial, line, timings))),
                    Err(error) => {
                        dial.failed(&error);
                        Err(error)
                    }
                };
            }
            Checkout::Wait { dial } => {
                seen = dial;
                if timeout_at(deadline.at, changed).await.is_err() {
                    let (host, after) = (route.host.clone(), deadline.after);
                    // Who waited for a dial waited for the upstream; else for others to end.
                    return Err(match dial {
                        Some(_) => DialError::TimedOut {
                            host,
                            step: Step::Connect,
                            after,
                        },
                        None => DialError::Busy { host, after },
                    });
                }
            }
            Checkout::Failed(error) => return Err(error),
            Checkout::Gone => return Ok(None),
        }
    }
}

impl Taken {
    fn fresh(dial: Dial, line: Line, timings: Timings) -> Self {
        let (place, sender) = match line {
            Line::Http1(sender) => (dial.http1(), Sender::Http1(sender)),
            Line::Http2 { sender, most, look } => (
                dial.http2(sender.clone(), timings.peer, most),
                Sender::Http2(sender, Some(look)),
            ),
        };
        Self {
            place: Arc::new(place),
            sender,
            timings,
        }
    }

    /// Sends the request and waits for the head of the answer.
    pub(super) async fn send(
        self,
        route: &Route,
        mut request: Request<Content>,
        response: Duration,
    ) -> Result<Sent, Failure> {
        let Self {
            place,
            sender,
            timings,
        } = self;
        let wrap = |content| Departing::new(content, Some(Arc::clone(&place)));
        let answered = match sender {
            Sender::Http1(mut sender) => {
                message::for_http1(route, &mut request)?;
                let sending = sender.try_send_request(request.map(wrap));
                place.keep(sender, timings.peer);
                wait(&route.host, &place, response, sending).await
            }
            Sender::Http2(mut sender, look) => {
                message::for_http2(route, &mut request)?;
                let sending = sender.try_send_request(request.map(wrap));
                let answered = wait(&route.host, &place, response, sending).await;
                // The peer's settings come before its first answer.
                if let Some(look) = look {
                    look.notify_one();
                }
                answered
            }
        };
        let answer = match answered? {
            Ok(answer) => answer,
            Err(mut unsent) => {
                let unsent_request = unsent.take_message();
                let error = unsent.into_error();
                return Err(match unsent_request {
                    Some(request) if timings.reused => Failure::Unsent(
                        Box::new(request.map(Departing::into_content)),
                        broken(&route.host, &error),
                    ),
                    Some(_) | None => Failure::Final(blame(&route.host, error)),
                });
            }
        };
        if answer.status() == StatusCode::SWITCHING_PROTOCOLS {
            // What follows is not HTTP, and nobody asked for it.
            return Err(Failure::Final(DialError::Broken {
                host: route.host.clone(),
                detail: "the upstream switched protocols unasked".to_owned(),
            }));
        }
        Ok(Sent {
            response: answer.map(|incoming| Arriving::new(incoming, Some(place))),
            timings,
        })
    }
}

type Answered = Result<Response<Incoming>, TrySendError<Request<Departing>>>;

/// Waits for the head. The clock starts again while the request's own body moves: an upload
/// may take longer than an answer.
async fn wait(
    host: &Host,
    place: &Place,
    response: Duration,
    sending: impl Future<Output = Answered>,
) -> Result<Answered, DialError> {
    let mut sending = pin!(sending);
    loop {
        let seen = place.frames.load(Ordering::Relaxed);
        match timeout(response, &mut sending).await {
            Ok(answered) => return Ok(answered),
            Err(_) if place.frames.load(Ordering::Relaxed) != seen => {}
            Err(_) => {
                return Err(DialError::TimedOut {
                    host: host.clone(),
                    step: Step::Answer,
                    after: response,
                });
            }
        }
    }
}

/// Whose fault it was: the body's that was being sent, or the upstream's.
pub(super) fn blame(host: &Host, error: hyper::Error) -> DialError {
    if error.is_user() {
        return DialError::Cut {
            host: host.clone(),
            cause: Arc::new(error),
        };
    }
    broken(host, &error)
}
