//! Streaming bodies with byte counters and an idle timeout, which end when a reload revokes their
//! rule.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::Bytes;
use http_body_util::BodyExt;
use hyper::body::{Body, Frame, SizeHint};
use tokio::time::{Instant, Sleep};

use crate::body::{BodyError, MessageBody};
use crate::in_flight::InFlight;
use crate::request_log::{RequestLog, Tally};

/// Why the gate aborted a body.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum StreamAbort {
    /// No data arrived within the idle timeout.
    #[error("no data received for {} seconds", .0.as_secs())]
    Idle(Duration),
    /// New rules do not allow the request.
    #[error("the rules have changed and no longer allow this request")]
    Revoked,
}

/// A body with counter, idle timeout and revocation.
struct MeteredBody<B> {
    inner: B,
    /// The idle timeout; `None` if an inner body has one.
    idle_timeout: Option<Duration>,
    /// The idle timer, created on the first wait, because most bodies never wait.
    alarm: Option<Pin<Box<Sleep>>>,
    /// Whether the last poll found no data.
    waiting: bool,
    /// The in-flight entry whose revocation aborts the body.
    in_flight: Option<InFlight>,
    metering: Metering,
}

/// Which counter the body increments.
enum Metering {
    /// A request body from the sandbox.
    Upload(Arc<Tally>),
    /// A response body to the sandbox; its end writes the record.
    Response(Box<RequestLog>),
    /// A response body that is the input of filters: the output of the filters is counted instead.
    Uncounted,
}

/// A request body from a sandbox.
pub fn request_body<B>(body: B, tally: &Arc<Tally>, idle_timeout: Duration) -> MessageBody
where
    B: Body<Data = Bytes> + Send + Unpin + 'static,
    B::Error: Into<BodyError>,
{
    MeteredBody::new(
        body,
        Some(idle_timeout),
        None,
        Metering::Upload(Arc::clone(tally)),
    )
    .boxed_unsync()
}

/// A response body to a sandbox.
pub fn response_body<B>(
    body: B,
    log: RequestLog,
    in_flight: InFlight,
    idle_timeout: Duration,
) -> MessageBody
where
    B: Body<Data = Bytes> + Send + Unpin + 'static,
    B::Error: Into<BodyError>,
{
    MeteredBody::new(
        body,
        Some(idle_timeout),
        Some(in_flight),
        Metering::Response(Box::new(log)),
    )
    .boxed_unsync()
}

/// A filtered response body to a sandbox, without an idle timeout: the body before the filters has
/// one ([`with_idle_timeout`]).
pub fn filtered_response_body(
    body: MessageBody,
    log: RequestLog,
    in_flight: InFlight,
) -> MessageBody {
    MeteredBody::new(
        body,
        None,
        Some(in_flight),
        Metering::Response(Box::new(log)),
    )
    .boxed_unsync()
}

/// An upstream's response body with an idle timeout, before any filter.
pub fn with_idle_timeout<B>(body: B, idle_timeout: Duration) -> MessageBody
where
    B: Body<Data = Bytes> + Send + Unpin + 'static,
    B::Error: Into<BodyError>,
{
    MeteredBody::new(body, Some(idle_timeout), None, Metering::Uncounted).boxed_unsync()
}

/// A request body that ends when its rule is revoked, even after the response has ended.
pub fn revocable(content: MessageBody, in_flight: InFlight) -> MessageBody {
    Revocable { content, in_flight }.boxed_unsync()
}

/// A body that ends when its rule is revoked.
struct Revocable {
    content: MessageBody,
    in_flight: InFlight,
}

impl Body for Revocable {
    type Data = Bytes;
    type Error = BodyError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BodyError>>> {
        let abort = || Poll::Ready(Some(Err(StreamAbort::Revoked.into())));
        if self.in_flight.is_revoked() {
            return abort();
        }
        match Pin::new(&mut self.content).poll_frame(cx) {
            Poll::Pending if self.in_flight.poll_revoked(cx).is_ready() => abort(),
            next => next,
        }
    }

    fn is_end_stream(&self) -> bool {
        self.content.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.content.size_hint()
    }
}

impl<B> MeteredBody<B> {
    fn new(
        inner: B,
        idle_timeout: Option<Duration>,
        in_flight: Option<InFlight>,
        metering: Metering,
    ) -> Self {
        Self {
            inner,
            idle_timeout,
            alarm: None,
            waiting: false,
            in_flight,
            metering,
        }
    }

    fn count(&self, frame: &Frame<Bytes>) {
        let Some(data) = frame.data_ref() else { return };
        let length = u64::try_from(data.len()).unwrap_or(u64::MAX);
        let counter = match &self.metering {
            Metering::Upload(tally) => &tally.sent,
            Metering::Response(log) => &log.tally.received,
            Metering::Uncounted => return,
        };
        counter.fetch_add(length, Ordering::Relaxed);
    }

    fn interrupt(&mut self) {
        if let Metering::Response(log) = &mut self.metering {
            log.record_interruption();
        }
    }

    /// Ready when the body must be aborted while it waits for data.
    fn poll_abort(&mut self, cx: &mut Context<'_>) -> Poll<StreamAbort> {
        if let Some(in_flight) = &self.in_flight
            && in_flight.poll_revoked(cx).is_ready()
        {
            return Poll::Ready(StreamAbort::Revoked);
        }
        let Some(idle_timeout) = self.idle_timeout else {
            return Poll::Pending;
        };
        let until = Instant::now() + idle_timeout;
        let alarm = self
            .alarm
            .get_or_insert_with(|| Box::pin(tokio::time::sleep_until(until)));
        if !self.waiting {
            self.waiting = true;
            alarm.as_mut().reset(until);
        }
        ready!(alarm.as_mut().poll(cx));
        Poll::Ready(StreamAbort::Idle(idle_timeout))
    }
}

impl<B> Body for MeteredBody<B>
where
    B: Body<Data = Bytes> + Unpin,
    B::Error: Into<BodyError>,
{
    type Data = Bytes;
    type Error = BodyError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BodyError>>> {
        // Checked before each frame: a body that always has data never waits.
        if self.in_flight.as_ref().is_some_and(InFlight::is_revoked) {
            self.interrupt();
            return Poll::Ready(Some(Err(StreamAbort::Revoked.into())));
        }
        match Pin::new(&mut self.inner).poll_frame(cx) {
            Poll::Ready(frame) => {
                self.waiting = false;
                match &frame {
                    Some(Ok(frame)) => self.count(frame),
                    Some(Err(_)) => self.interrupt(),
                    None => {}
                }
                Poll::Ready(frame.map(|frame| frame.map_err(Into::into)))
            }
            Poll::Pending => {
                let abort = ready!(self.poll_abort(cx));
                self.interrupt();
                Poll::Ready(Some(Err(abort.into())))
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        self.inner.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.inner.size_hint()
    }
}

#[cfg(test)]
mod tests {
    use tokio::sync::mpsc;

    use super::*;
    use crate::in_flight::InFlightSet;
    use crate::in_flight::tests::connection;

    /// A body that reads from a channel.
    struct ChannelBody(mpsc::Receiver<&'static str>);

    impl Body for ChannelBody {
        type Data = Bytes;
        type Error = BodyError;

        fn poll_frame(
            mut self: Pin<&mut Self>,
            cx: &mut Context<'_>,
        ) -> Poll<Option<Result<Frame<Bytes>, BodyError>>> {
            let next = ready!(self.0.poll_recv(cx));
            Poll::Ready(next.map(|text| Ok(Frame::data(Bytes::from_static(text.as_bytes())))))
        }
    }

    #[tokio::test(start_paused = true)]
    async fn idle_timeout_aborts_a_body_and_restarts_with_each_frame() {
        let (send, receive) = mpsc::channel(4);
        let tally = Arc::new(Tally::default());
        let mut body = request_body(ChannelBody(receive), &tally, Duration::from_secs(10));
        for text in ["one", "two"] {
            tokio::time::advance(Duration::from_secs(9)).await;
            send.send(text).await.unwrap();
            let frame = body.frame().await.unwrap().unwrap();
            assert_eq!(frame.into_data().unwrap(), text);
        }
        let start = Instant::now();
        let error = body.frame().await.unwrap().unwrap_err();
        assert_eq!(
            error.downcast_ref::<StreamAbort>(),
            Some(&StreamAbort::Idle(Duration::from_secs(10)))
        );
        assert_eq!(start.elapsed().as_secs(), 10);
        assert_eq!(tally.sent.load(Ordering::Relaxed), 6);
    }

    /// A body that always has data.
    struct EndlessBody;

    impl Body for EndlessBody {
        type Data = Bytes;
        type Error = BodyError;

        fn poll_frame(
            self: Pin<&mut Self>,
            _: &mut Context<'_>,
        ) -> Poll<Option<Result<Frame<Bytes>, BodyError>>> {
            Poll::Ready(Some(Ok(Frame::data(Bytes::from_static(b"more")))))
        }
    }

    fn enter(set: &Arc<InFlightSet>) -> InFlight {
        set.enter(connection("x.example"))
    }

    /// Builds the request body and the response body of one request.
    fn both_bodies<B>(in_flight: InFlight, upload: B, answer: B) -> [MessageBody; 2]
    where
        B: Body<Data = Bytes, Error = BodyError> + Send + Unpin + 'static,
    {
        let idle_timeout = Duration::from_secs(60);
        let tally = Arc::new(Tally::default());
        let sent = revocable(
            request_body(upload, &tally, idle_timeout),
            in_flight.for_upload(),
        );
        // Counted as an upload, because a response would need a record.
        let received = MeteredBody::new(
            answer,
            Some(idle_timeout),
            Some(in_flight),
            Metering::Upload(tally),
        )
        .boxed_unsync();
        [sent, received]
    }

    async fn assert_revoked(body: &mut MessageBody) {
        let error = body.frame().await.unwrap().unwrap_err();
        assert_eq!(
            error.downcast_ref::<StreamAbort>(),
            Some(&StreamAbort::Revoked)
        );
    }

    #[tokio::test(start_paused = true)]
    async fn revocation_aborts_both_bodies_while_they_wait() {
        let set = Arc::new(InFlightSet::default());
        let ((_one, upload), (_two, answer)) = (mpsc::channel(1), mpsc::channel(1));
        let [mut sent, mut received] =
            both_bodies(enter(&set), ChannelBody(upload), ChannelBody(answer));
        let start = Instant::now();
        let revoke = async {
            // Both bodies wait by then.
            tokio::task::yield_now().await;
            assert_eq!(set.recheck(|_| false), 1);
        };
        tokio::join!(
            assert_revoked(&mut sent),
            assert_revoked(&mut received),
            revoke
        );
        assert!(start.elapsed().is_zero(), "the bodies were woken at once");
    }

    #[tokio::test]
    async fn revocation_aborts_both_bodies_while_they_transfer() {
        let set = Arc::new(InFlightSet::default());
        let [mut sent, mut received] = both_bodies(enter(&set), EndlessBody, EndlessBody);
        for body in [&mut sent, &mut received] {
            assert!(body.frame().await.unwrap().is_ok());
        }
        set.end();
        assert_revoked(&mut sent).await;
        assert_revoked(&mut received).await;
    }

    #[tokio::test]
    async fn revocation_aborts_an_upload_after_its_response_ended() {
        let set = Arc::new(InFlightSet::default());
        let [mut sent, received] = both_bodies(enter(&set), EndlessBody, EndlessBody);
        drop(received);
        assert_eq!(set.len(), 1);
        assert_eq!(set.recheck(|_| false), 1);
        assert_revoked(&mut sent).await;
        drop(sent);
        assert!(set.is_empty());
    }
}
