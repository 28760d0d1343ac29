//! One request on one connection.

use std::future::poll_fn;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use http::{Request, Response, StatusCode};
use hyper::body::Incoming;
use hyper::client::conn::{TrySendError, http2};
use policy::host::Host;
use tokio::sync::Notify;
use tokio::time::{Instant, timeout, timeout_at};

use super::body::{self, Arriving, Departing};
use super::driven::{Driven, Frames};
use super::error::{DialError, Step};
use super::pool::{Checkout, Dial, HostPool, Place};
use super::wire::{Deadline, Line, broken};
use super::{Rules, Sent, Timings, message};
use crate::alarm::Alarm;
use crate::body::Content;
use crate::outgoing::Route;

/// How long an upload whose answer has ended may stand still.
const LINGER: Duration = Duration::from_secs(60);

/// A connection and a request's place on it.
pub(super) struct Taken {
    way: Way,
    timings: Timings,
}

enum Way {
    Http1(PooledLease),
    Http2(
        Arc<Place>,
        http2::SendRequest<Departing>,
        Option<Arc<Notify>>,
    ),
}

/// A request's hold on an HTTP/1 connection, which it drives. Dropped before its end, it
/// closes the connection: what is left on it belongs to nobody.
pub(super) struct PooledLease {
    place: Place,
    connection: Driven,
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
    shelf: &Arc<HostPool>,
    rules: &Rules,
    since: Instant,
    again: bool,
) -> Result<Option<Taken>, DialError> {
    let (sandbox, route) = &shelf.key;
    let deadline = Deadline::new(&route.host, since, rules.timeouts.connect);
    let mut seen = None;
    let mut checkout = shelf.check_out(seen, again);
    loop {
        match checkout {
            Checkout::Http1 {
                place,
                mut connection,
            } => {
                // It was ready when it was put there, and may have ended since.
                if connection.is_ready().await {
                    return Ok(Some(Taken {
                        timings: Timings::reused(connection.peer(), http::Version::HTTP_11),
                        way: Way::Http1(PooledLease { place, connection }),
                    }));
                }
                checkout = shelf.check_out(seen, again);
            }
            Checkout::Http2 { place, line } => {
                return Ok(Some(Taken {
                    timings: Timings::reused(line.peer, http::Version::HTTP_2),
                    way: Way::Http2(Arc::new(place), line.sender.clone(), None),
                }));
            }
            Checkout::Dial(dial) => {
                // Seldom and large: in place it would make every request's future as large.
                let dialing = Box::pin(deadline.hold(rules.line(route, sandbox)));
                return match dialing.await {
                    Ok((line, timings)) => Ok(Some(Taken::fresh(dial, line, timings))),
                    Err(error) => {
                        dial.failed(&error);
                        Err(error)
                    }
                };
            }
            Checkout::Wait { dial } => {
                seen = dial;
                checkout = Box::pin(wait_for_change(shelf, &deadline, dial, again)).await?;
            }
            Checkout::Failed(error) => return Err(error),
            Checkout::Gone => return Ok(None),
        }
    }
}

/// Waits for `dial`, or for others to end, and looks again.
async fn wait_for_change(
    shelf: &Arc<HostPool>,
    deadline: &Deadline<'_>,
    dial: Option<u64>,
    again: bool,
) -> Result<Checkout, DialError> {
    let mut changed = pin!(shelf.changed.notified());
    changed.as_mut().enable();
    // Once more, so that nothing is missed between the look and the wait.
    let seen = match shelf.check_out(dial, again) {
        Checkout::Wait { dial } => dial,
        found => return Ok(found),
    };
    if timeout_at(deadline.at, changed).await.is_ok() {
        return Ok(shelf.check_out(seen, again));
    }
    let (host, after) = (deadline.host.clone(), deadline.after);
    // Who waited for a dial waited for the upstream; else for others to end.
    Err(match seen {
        Some(_) => DialError::TimedOut {
            host,
            step: Step::Connect,
            after,
        },
        None => DialError::Busy { host, after },
    })
}

impl Taken {
    fn fresh(dial: Dial, line: Line, timings: Timings) -> Self {
        let way = match line {
            Line::Http1(connection) => Way::Http1(PooledLease {
                place: dial.http1(),
                connection,
            }),
            Line::Http2 { sender, most, look } => {
                let place = dial.http2(sender.clone(), timings.peer, most);
                Way::Http2(Arc::new(place), sender, Some(look))
            }
        };
        Self { way, timings }
    }

    /// Sends the request and waits for the head of the answer.
    pub(super) async fn send(
        self,
        route: &Route,
        mut request: Request<Content>,
        response: Duration,
    ) -> Result<Sent, Failure> {
        let Self { way, timings } = self;
        let (answered, way) = match way {
            Way::Http1(mut ride) => {
                message::for_http1(route, &mut request)?;
                let frames = Arc::clone(ride.connection.frames());
                let wrap = |content| Departing::new(content, Arc::clone(&frames), None);
                let mut sending = pin!(ride.connection.send(request.map(wrap)));
                let connection = &mut ride.connection;
                let driven = |cx: &mut Context<'_>, until| {
                    connection.attend(cx, |connection, inside| {
                        poll_until(inside, sending.as_mut(), connection.alarm(), until)
                    })
                };
                let answered = wait(&route.host, &frames, response, driven).await?;
                (answered, body::Way::Http1(Box::new(ride)))
            }
            Way::Http2(place, mut sender, look) => {
                message::for_http2(route, &mut request)?;
                let frames = Arc::default();
                let wrap = |content| {
                    Departing::new(content, Arc::clone(&frames), Some(Arc::clone(&place)))
                };
                let mut sending = pin!(sender.try_send_request(request.map(wrap)));
                let mut alarm = Alarm::default();
                let sent = |cx: &mut Context<'_>, until| {
                    poll_until(cx, sending.as_mut(), &mut alarm, until)
                };
                let answered = wait(&route.host, &frames, response, sent).await?;
                // The peer's settings come before its first answer.
                if let Some(look) = look {
                    look.notify_one();
                }
                (answered, body::Way::Http2 { _place: place })
            }
        };
        let answer = match answered {
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
        let mut response = answer.map(|incoming| Arriving::new(incoming, way));
        poll_fn(|cx| {
            response.body_mut().look(cx);
            Poll::Ready(())
        })
        .await;
        Ok(Sent { response, timings })
    }
}

impl PooledLease {
    /// The connection it has.
    pub(super) fn connection(&mut self) -> &mut Driven {
        &mut self.connection
    }

    /// The answer came to its proper end. If the request did too, the connection can be used
    /// again; else it is seen off, and then can.
    pub(super) fn end(mut self: Box<Self>, cx: &mut Context<'_>) {
        if self.connection.is_done() {
            return self.place.give_back(self.connection);
        }
        match self.connection.poll_ready(cx) {
            Poll::Ready(true) => self.place.give_back(self.connection),
            Poll::Ready(false) => {}
            // Nobody listens to the rest.
            Poll::Pending if self.connection.is_deaf() => {}
            Poll::Pending => {
                tokio::spawn(self.linger());
            }
        }
    }

    async fn linger(mut self: Box<Self>) {
        loop {
            let seen = self.connection.frames().so_far();
            let ready = poll_fn(|cx| self.connection.poll_ready(cx));
            match timeout(LINGER, ready).await {
                Ok(true) => return self.place.give_back(self.connection),
                Err(_) if self.connection.frames().so_far() != seen => {}
                Ok(false) | Err(_) => return,
            }
        }
    }
}

pub(super) type Answered = Result<Response<Incoming>, TrySendError<Request<Departing>>>;

/// Waits for the head. The clock starts again while the request's own body moves: an upload
/// may take longer than an answer.
async fn wait(
    host: &Host,
    frames: &Frames,
    response: Duration,
    mut sending: impl FnMut(&mut Context<'_>, Instant) -> Poll<Option<Answered>>,
) -> Result<Answered, DialError> {
    loop {
        let seen = frames.so_far();
        let until = Instant::now() + response;
        match poll_fn(|cx| sending(cx, until)).await {
            Some(answered) => return Ok(answered),
            None if frames.so_far() != seen => {}
            None => {
                return Err(DialError::TimedOut {
                    host: host.clone(),
                    step: Step::Answer,
                    after: response,
                });
            }
        }
    }
}

/// The answer, or none where it did not come until then.
fn poll_until(
    cx: &mut Context<'_>,
    sending: Pin<&mut impl Future<Output = Answered>>,
    alarm: &mut Alarm,
    until: Instant,
) -> Poll<Option<Answered>> {
    match sending.poll(cx) {
        Poll::Ready(answered) => Poll::Ready(Some(answered)),
        Poll::Pending => {
            alarm.set(until);
            alarm.poll(cx).map(|()| None)
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
