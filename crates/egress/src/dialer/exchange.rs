//! Exchange: sends one request on a pooled or new connection and waits for the response head.

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

use super::body::{BodySource, OutgoingBody, UpstreamBody};
use super::connector::{Deadline, NewConnection, connection_error};
use super::error::{DialError, DialStep};
use super::http1_connection::{BodyFrameCount, Http1Connection};
use super::pool::{Checkout, DialPermit, HostPool, PoolSlot};
use super::{DialConfig, Timings, UpstreamResponse, message};
use crate::alarm::Alarm;
use crate::body::MessageBody;
use crate::outgoing::Route;

/// Idle timeout of an upload that continues after its response has ended.
const LINGER_TIMEOUT: Duration = Duration::from_secs(60);

/// A connection that is ready for a request.
pub(super) struct ReadyConnection {
    transport: Transport,
    timings: Timings,
}

enum Transport {
    Http1(PooledLease),
    Http2(
        Arc<PoolSlot>,
        http2::SendRequest<OutgoingBody>,
        Option<Arc<Notify>>,
    ),
}

/// A request's lease of an HTTP/1 connection, which the request polls. Dropped before the
/// exchange ends, the lease closes the connection, because unread bytes are left on it.
pub(super) struct PooledLease {
    slot: PoolSlot,
    connection: Http1Connection,
}

/// Why an attempt got no response.
pub(super) enum AttemptError {
    /// The request must not be sent again.
    Final(DialError),
    /// The connection closed before any of the request was sent.
    Unsent(Box<Request<MessageBody>>, DialError),
}

impl From<DialError> for AttemptError {
    fn from(error: DialError) -> Self {
        AttemptError::Final(error)
    }
}

/// Takes a connection from the pool or dials; `None` if the host pool was closed meanwhile.
pub(super) async fn take_connection(
    host_pool: &Arc<HostPool>,
    config: &DialConfig,
    since: Instant,
    is_retry: bool,
) -> Result<Option<ReadyConnection>, DialError> {
    let (sandbox, route) = &host_pool.key;
    let deadline = Deadline::new(&route.host, since, config.timeouts.connect);
    let mut awaited_dial = None;
    let mut checkout = host_pool.check_out(awaited_dial, is_retry);
    loop {
        match checkout {
            Checkout::Http1 {
                slot,
                mut connection,
            } => {
                // The connection may have closed while it was idle.
                if connection.is_ready().await {
                    return Ok(Some(ReadyConnection {
                        timings: Timings::reused(connection.peer(), http::Version::HTTP_11),
                        transport: Transport::Http1(PooledLease { slot, connection }),
                    }));
                }
                checkout = host_pool.check_out(awaited_dial, is_retry);
            }
            Checkout::Http2 { slot, connection } => {
                return Ok(Some(ReadyConnection {
                    timings: Timings::reused(connection.peer, http::Version::HTTP_2),
                    transport: Transport::Http2(Arc::new(slot), connection.sender.clone(), None),
                }));
            }
            Checkout::Dial(dial) => {
                // Boxed: dialling is rare, and its large future would enlarge the future of every
                // request.
                let dialing = Box::pin(deadline.enforce(config.connect_http(route, sandbox)));
                return match dialing.await {
                    Ok((connection, timings)) => {
                        Ok(Some(ReadyConnection::from_dial(dial, connection, timings)))
                    }
                    Err(error) => {
                        dial.fail(&error);
                        Err(error)
                    }
                };
            }
            Checkout::Wait { dial } => {
                awaited_dial = dial;
                checkout = Box::pin(wait_for_change(host_pool, &deadline, dial, is_retry)).await?;
            }
            Checkout::Failed(error) => return Err(error),
            Checkout::Closed => return Ok(None),
        }
    }
}

/// Waits for `dial` or for a free slot, then checks out again.
async fn wait_for_change(
    host_pool: &Arc<HostPool>,
    deadline: &Deadline<'_>,
    dial: Option<u64>,
    is_retry: bool,
) -> Result<Checkout, DialError> {
    let mut changed = pin!(host_pool.changed.notified());
    changed.as_mut().enable();
    // Check again: the pool may have changed before the notification was enabled.
    let awaited_dial = match host_pool.check_out(dial, is_retry) {
        Checkout::Wait { dial } => dial,
        found => return Ok(found),
    };
    if timeout_at(deadline.at, changed).await.is_ok() {
        return Ok(host_pool.check_out(awaited_dial, is_retry));
    }
    let (host, after) = (deadline.host.clone(), deadline.after);
    // Without a dial the request waited for other requests, not for the upstream.
    Err(match awaited_dial {
        Some(_) => DialError::TimedOut {
            host,
            step: DialStep::Connect,
            after,
        },
        None => DialError::Busy { host, after },
    })
}

impl ReadyConnection {
    fn from_dial(dial: DialPermit, connection: NewConnection, timings: Timings) -> Self {
        let transport = match connection {
            NewConnection::Http1(connection) => Transport::Http1(PooledLease {
                slot: dial.complete_http1(),
                connection,
            }),
            NewConnection::Http2 {
                sender,
                max_streams,
                refresh,
            } => {
                let slot = dial.complete_http2(sender.clone(), timings.peer, max_streams);
                Transport::Http2(Arc::new(slot), sender, Some(refresh))
            }
        };
        Self { transport, timings }
    }

    /// Sends the request and waits for the response head.
    pub(super) async fn send(
        self,
        route: &Route,
        mut request: Request<MessageBody>,
        response: Duration,
    ) -> Result<UpstreamResponse, AttemptError> {
        let Self { transport, timings } = self;
        let (answered, source) = match transport {
            Transport::Http1(mut lease) => {
                message::to_http1_form(route, &mut request)?;
                let frames = Arc::clone(lease.connection.frames());
                let wrap = |content| OutgoingBody::new(content, Arc::clone(&frames), None);
                let mut sending = pin!(lease.connection.send(request.map(wrap)));
                let connection = &mut lease.connection;
                let poll_http1 = |cx: &mut Context<'_>, until| {
                    connection.drive_until(cx, |connection, hyper_cx| {
                        poll_until(hyper_cx, sending.as_mut(), connection.alarm(), until)
                    })
                };
                let answered = wait_for_head(&route.host, &frames, response, poll_http1).await?;
                (answered, BodySource::Http1(Box::new(lease)))
            }
            Transport::Http2(slot, mut sender, refresh) => {
                message::to_http2_form(route, &mut request)?;
                let frames = Arc::default();
                let wrap = |content| {
                    OutgoingBody::new(content, Arc::clone(&frames), Some(Arc::clone(&slot)))
                };
                let mut sending = pin!(sender.try_send_request(request.map(wrap)));
                let mut alarm = Alarm::default();
                let poll_http2 = |cx: &mut Context<'_>, until| {
                    poll_until(cx, sending.as_mut(), &mut alarm, until)
                };
                let answered = wait_for_head(&route.host, &frames, response, poll_http2).await?;
                // The peer's SETTINGS arrive before its first response.
                if let Some(refresh) = refresh {
                    refresh.notify_one();
                }
                (answered, BodySource::Http2 { _slot: slot })
            }
        };
        let answer = match answered {
            Ok(answer) => answer,
            Err(mut unsent) => {
                let unsent_request = unsent.take_message();
                let error = unsent.into_error();
                return Err(match unsent_request {
                    Some(request) if timings.reused => AttemptError::Unsent(
                        Box::new(request.map(OutgoingBody::into_content)),
                        connection_error(&route.host, &error),
                    ),
                    Some(_) | None => AttemptError::Final(send_error(&route.host, error)),
                });
            }
        };
        if answer.status() == StatusCode::SWITCHING_PROTOCOLS {
            // The request had no Upgrade header, and what follows is not HTTP.
            return Err(AttemptError::Final(DialError::ConnectionFailed {
                host: route.host.clone(),
                detail: "the upstream switched protocols without an Upgrade request".to_owned(),
            }));
        }
        let mut response = answer.map(|incoming| UpstreamBody::new(incoming, source));
        poll_fn(|cx| {
            response.body_mut().release_if_ended(cx);
            Poll::Ready(())
        })
        .await;
        Ok(UpstreamResponse { response, timings })
    }
}

impl PooledLease {
    /// The leased connection.
    pub(super) fn connection(&mut self) -> &mut Http1Connection {
        &mut self.connection
    }

    /// Ends the lease after a complete response. The connection returns to the pool, at once if
    /// the request was sent completely, otherwise when its upload has ended.
    pub(super) fn end(mut self: Box<Self>, cx: &mut Context<'_>) {
        if self.connection.is_done() {
            return self.slot.give_back(self.connection);
        }
        match self.connection.poll_ready(cx) {
            Poll::Ready(true) => self.slot.give_back(self.connection),
            Poll::Ready(false) => {}
            // The upstream reads no more of the upload.
            Poll::Pending if self.connection.is_write_closed() => {}
            Poll::Pending => {
                tokio::spawn(self.linger());
            }
        }
    }

    async fn linger(mut self: Box<Self>) {
        loop {
            let seen = self.connection.frames().get();
            let ready = poll_fn(|cx| self.connection.poll_ready(cx));
            match timeout(LINGER_TIMEOUT, ready).await {
                Ok(true) => return self.slot.give_back(self.connection),
                Err(_) if self.connection.frames().get() != seen => {}
                Ok(false) | Err(_) => return,
            }
        }
    }
}

pub(super) type SendResult = Result<Response<Incoming>, TrySendError<Request<OutgoingBody>>>;

/// Waits for the response head. The timeout restarts while the request body is being sent: an
/// upload may take longer than the response timeout.
async fn wait_for_head(
    host: &Host,
    frames: &BodyFrameCount,
    response: Duration,
    mut sending: impl FnMut(&mut Context<'_>, Instant) -> Poll<Option<SendResult>>,
) -> Result<SendResult, DialError> {
    loop {
        let seen = frames.get();
        let until = Instant::now() + response;
        match poll_fn(|cx| sending(cx, until)).await {
            Some(answered) => return Ok(answered),
            None if frames.get() != seen => {}
            None => {
                return Err(DialError::TimedOut {
                    host: host.clone(),
                    step: DialStep::Answer,
                    after: response,
                });
            }
        }
    }
}

/// Polls for the response head; ready with `None` when `until` has passed.
fn poll_until(
    cx: &mut Context<'_>,
    sending: Pin<&mut impl Future<Output = SendResult>>,
    alarm: &mut Alarm,
    until: Instant,
) -> Poll<Option<SendResult>> {
    match sending.poll(cx) {
        Poll::Ready(answered) => Poll::Ready(Some(answered)),
        Poll::Pending => {
            alarm.set(until);
            alarm.poll(cx).map(|()| None)
        }
    }
}

/// The error for a failed send: the error of the request body, or that of the upstream.
pub(super) fn send_error(host: &Host, error: hyper::Error) -> DialError {
    if error.is_user() {
        return DialError::RequestBodyFailed {
            host: host.clone(),
            cause: Arc::new(error),
        };
    }
    connection_error(host, &error)
}
