//! A body on its way: counted, not waited for for ever, and ended when the rules change.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::Bytes;
use http_body_util::BodyExt;
use hyper::body::{Body, Frame, SizeHint};
use tokio::time::{Instant, Sleep};

use crate::body::{Broken, Content};
use crate::in_flight::InFlight;
use crate::request_log::{RequestLog, Tally};

/// Why a flow was cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Cut {
    /// Nothing came for too long.
    #[error("nothing came for {} seconds", .0.as_secs())]
    Idle(Duration),
    /// The rules changed.
    #[error("the rules have changed, and do not allow this any more")]
    Revoked,
}

/// A body that is watched.
struct Flow<B> {
    inner: B,
    /// The idle timeout; none where a body inside has it.
    patience: Option<Duration>,
    /// Made when there is something to wait for, which for most bodies there never is.
    alarm: Option<Pin<Box<Sleep>>>,
    waiting: bool,
    /// Ends it before its time.
    live: Option<InFlight>,
    way: Way,
}

/// Which way it goes, and what ends with it.
enum Way {
    /// From the sandbox.
    Out(Arc<Tally>),
    /// To the sandbox: the record is written at the end.
    In(Box<RequestLog>),
    /// To a filter, behind which it is counted.
    Uncounted,
}

/// What a sandbox sends.
pub fn sending<B>(body: B, tally: &Arc<Tally>, patience: Duration) -> Content
where
    B: Body<Data = Bytes> + Send + Unpin + 'static,
    B::Error: Into<Broken>,
{
    Flow::new(body, Some(patience), None, Way::Out(Arc::clone(tally))).boxed_unsync()
}

/// What a sandbox receives.
pub fn receiving<B>(body: B, trail: RequestLog, live: InFlight, patience: Duration) -> Content
where
    B: Body<Data = Bytes> + Send + Unpin + 'static,
    B::Error: Into<Broken>,
{
    Flow::new(body, Some(patience), Some(live), Way::In(Box::new(trail))).boxed_unsync()
}

/// What a sandbox receives through filters: the idle timeout is inside them ([`arriving`]).
pub fn filtered(body: Content, trail: RequestLog, live: InFlight) -> Content {
    Flow::new(body, None, Some(live), Way::In(Box::new(trail))).boxed_unsync()
}

/// What an upstream sends, before any filter: with an idle timeout.
pub fn arriving<B>(body: B, patience: Duration) -> Content
where
    B: Body<Data = Bytes> + Send + Unpin + 'static,
    B::Error: Into<Broken>,
{
    Flow::new(body, Some(patience), None, Way::Uncounted).boxed_unsync()
}

/// What a sandbox sends, once it is under way: it ends with its rule, also where the answer
/// has ended before.
pub fn revocable(content: Content, live: InFlight) -> Content {
    Revocable { content, live }.boxed_unsync()
}

/// A body that ends with its rule.
struct Revocable {
    content: Content,
    live: InFlight,
}

impl Body for Revocable {
    type Data = Bytes;
    type Error = Broken;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Broken>>> {
        let cut = || Poll::Ready(Some(Err(Cut::Revoked.into())));
        if self.live.is_revoked() {
            return cut();
        }
        match Pin::new(&mut self.content).poll_frame(cx) {
            Poll::Pending if self.live.poll_revoked(cx).is_ready() => cut(),
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

impl<B> Flow<B> {
    fn new(inner: B, patience: Option<Duration>, live: Option<InFlight>, way: Way) -> Self {
        Self {
            inner,
            patience,
            alarm: None,
            waiting: false,
            live,
            way,
        }
    }

    fn count(&self, frame: &Frame<Bytes>) {
        let Some(data) = frame.data_ref() else { return };
        let length = u64::try_from(data.len()).unwrap_or(u64::MAX);
        let counter = match &self.way {
            Way::Out(tally) => &tally.sent,
            Way::In(trail) => &trail.tally.received,
            Way::Uncounted => return,
        };
        counter.fetch_add(length, Ordering::Relaxed);
    }

    fn interrupt(&mut self) {
        if let Way::In(trail) = &mut self.way {
            trail.interrupted();
        }
    }

    /// Whether it has to be cut although nothing came.
    fn poll_cut(&mut self, cx: &mut Context<'_>) -> Poll<Cut> {
        if let Some(live) = &self.live
            && live.poll_revoked(cx).is_ready()
        {
            return Poll::Ready(Cut::Revoked);
        }
        let Some(patience) = self.patience else {
            return Poll::Pending;
        };
        let until = Instant::now() + patience;
        let alarm = self
            .alarm
            .get_or_insert_with(|| Box::pin(tokio::time::sleep_until(until)));
        if !self.waiting {
            self.waiting = true;
            alarm.as_mut().reset(until);
        }
        ready!(alarm.as_mut().poll(cx));
        Poll::Ready(Cut::Idle(patience))
    }
}

impl<B> Body for Flow<B>
where
    B: Body<Data = Bytes> + Unpin,
    B::Error: Into<Broken>,
{
    type Data = Bytes;
    type Error = Broken;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Broken>>> {
        // Also where there is always more to pass on.
        if self.live.as_ref().is_some_and(InFlight::is_revoked) {
            self.interrupt();
            return Poll::Ready(Some(Err(Cut::Revoked.into())));
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
                let cut = ready!(self.poll_cut(cx));
                self.interrupt();
                Poll::Ready(Some(Err(cut.into())))
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

    /// A body that gives what the channel gives.
    struct Channel(mpsc::Receiver<&'static str>);

    impl Body for Channel {
        type Data = Bytes;
        type Error = Broken;

        fn poll_frame(
            mut self: Pin<&mut Self>,
            cx: &mut Context<'_>,
        ) -> Poll<Option<Result<Frame<Bytes>, Broken>>> {
            let next = ready!(self.0.poll_recv(cx));
            Poll::Ready(next.map(|text| Ok(Frame::data(Bytes::from_static(text.as_bytes())))))
        }
    }

    #[tokio::test(start_paused = true)]
    async fn silence_cuts_a_body_and_each_frame_starts_the_wait_anew() {
        let (send, receive) = mpsc::channel(4);
        let tally = Arc::new(Tally::default());
        let mut body = sending(Channel(receive), &tally, Duration::from_secs(10));
        for text in ["one", "two"] {
            tokio::time::advance(Duration::from_secs(9)).await;
            send.send(text).await.unwrap();
            let frame = body.frame().await.unwrap().unwrap();
            assert_eq!(frame.into_data().unwrap(), text);
        }
        let begun = Instant::now();
        let error = body.frame().await.unwrap().unwrap_err();
        assert_eq!(
            error.downcast_ref::<Cut>(),
            Some(&Cut::Idle(Duration::from_secs(10)))
        );
        assert_eq!(begun.elapsed().as_secs(), 10);
        assert_eq!(tally.sent.load(Ordering::Relaxed), 6);
    }

    /// A body that always has more.
    struct Endless;

    impl Body for Endless {
        type Data = Bytes;
        type Error = Broken;

        fn poll_frame(
            self: Pin<&mut Self>,
            _: &mut Context<'_>,
        ) -> Poll<Option<Result<Frame<Bytes>, Broken>>> {
            Poll::Ready(Some(Ok(Frame::data(Bytes::from_static(b"more")))))
        }
    }

    fn under_way(underway: &Arc<InFlightSet>) -> InFlight {
        underway.enter(connection("x.example"))
    }

    /// The two halves of one request with these bodies.
    fn halves<B>(live: InFlight, upload: B, answer: B) -> [Content; 2]
    where
        B: Body<Data = Bytes, Error = Broken> + Send + Unpin + 'static,
    {
        let patience = Duration::from_secs(60);
        let tally = Arc::new(Tally::default());
        let sent = revocable(sending(upload, &tally, patience), live.for_upload());
        // The record plays no part in what ends a flow.
        let received =
            Flow::new(answer, Some(patience), Some(live), Way::Out(tally)).boxed_unsync();
        [sent, received]
    }

    async fn assert_cut(body: &mut Content) {
        let error = body.frame().await.unwrap().unwrap_err();
        assert_eq!(error.downcast_ref::<Cut>(), Some(&Cut::Revoked));
    }

    #[tokio::test(start_paused = true)]
    async fn a_revoked_request_is_cut_in_both_directions_while_it_waits() {
        let underway = Arc::new(InFlightSet::default());
        let ((_one, upload), (_two, answer)) = (mpsc::channel(1), mpsc::channel(1));
        let [mut sent, mut received] =
            halves(under_way(&underway), Channel(upload), Channel(answer));
        let begun = Instant::now();
        let revoke = async {
            // Both wait by then.
            tokio::task::yield_now().await;
            assert_eq!(underway.recheck(|_| false), 1);
        };
        tokio::join!(assert_cut(&mut sent), assert_cut(&mut received), revoke);
        assert!(begun.elapsed().is_zero(), "it was told, and did not wait");
    }

    #[tokio::test]
    async fn a_revoked_request_is_cut_in_both_directions_while_it_runs() {
        let underway = Arc::new(InFlightSet::default());
        let [mut sent, mut received] = halves(under_way(&underway), Endless, Endless);
        for body in [&mut sent, &mut received] {
            assert!(body.frame().await.unwrap().is_ok());
        }
        underway.end();
        assert_cut(&mut sent).await;
        assert_cut(&mut received).await;
    }

    #[tokio::test]
    async fn an_upload_that_outlives_its_answer_can_still_be_cut() {
        let underway = Arc::new(InFlightSet::default());
        let [mut sent, received] = halves(under_way(&underway), Endless, Endless);
        drop(received);
        assert_eq!(underway.len(), 1);
        assert_eq!(underway.recheck(|_| false), 1);
        assert_cut(&mut sent).await;
        drop(sent);
        assert!(underway.is_empty());
    }
}
