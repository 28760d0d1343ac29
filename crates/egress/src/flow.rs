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
use crate::live::Live;
use crate::trail::{Tally, Trail};

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
    patience: Duration,
    /// Made when there is something to wait for, which for most bodies there never is.
    alarm: Option<Pin<Box<Sleep>>>,
    waiting: bool,
    way: Way,
}

/// Which way it goes, and what ends with it.
enum Way {
    /// From the sandbox.
    Out(Arc<Tally>),
    /// To the sandbox: the record is written at the end.
    In(Box<(Trail, Live)>),
}

/// What a sandbox sends.
pub fn sending<B>(body: B, tally: &Arc<Tally>, patience: Duration) -> Content
where
    B: Body<Data = Bytes> + Send + Unpin + 'static,
    B::Error: Into<Broken>,
{
    Flow::new(body, patience, Way::Out(Arc::clone(tally))).boxed_unsync()
}

/// What a sandbox receives.
pub fn receiving<B>(body: B, trail: Trail, live: Live, patience: Duration) -> Content
where
    B: Body<Data = Bytes> + Send + Unpin + 'static,
    B::Error: Into<Broken>,
{
    Flow::new(body, patience, Way::In(Box::new((trail, live)))).boxed_unsync()
}

impl<B> Flow<B> {
    fn new(inner: B, patience: Duration, way: Way) -> Self {
        Self {
            inner,
            patience,
            alarm: None,
            waiting: false,
            way,
        }
    }

    fn count(&self, frame: &Frame<Bytes>) {
        let Some(data) = frame.data_ref() else { return };
        let length = u64::try_from(data.len()).unwrap_or(u64::MAX);
        let counter = match &self.way {
            Way::Out(tally) => &tally.sent,
            Way::In(end) => &end.0.tally.received,
        };
        counter.fetch_add(length, Ordering::Relaxed);
    }

    /// Whether it has to be cut although nothing came.
    fn poll_cut(&mut self, cx: &mut Context<'_>) -> Poll<Cut> {
        if let Way::In(end) = &self.way
            && end.1.poll_revoked(cx).is_ready()
        {
            return Poll::Ready(Cut::Revoked);
        }
        let until = Instant::now() + self.patience;
        let alarm = self
            .alarm
            .get_or_insert_with(|| Box::pin(tokio::time::sleep_until(until)));
        if !self.waiting {
            self.waiting = true;
            alarm.as_mut().reset(until);
        }
        ready!(alarm.as_mut().poll(cx));
        Poll::Ready(Cut::Idle(self.patience))
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
        if let Way::In(end) = &self.way
            && end.1.is_revoked()
        {
            return Poll::Ready(Some(Err(Cut::Revoked.into())));
        }
        match Pin::new(&mut self.inner).poll_frame(cx) {
            Poll::Ready(frame) => {
                self.waiting = false;
                if let Some(Ok(frame)) = &frame {
                    self.count(frame);
                }
                Poll::Ready(frame.map(|frame| frame.map_err(Into::into)))
            }
            Poll::Pending => self.poll_cut(cx).map(|cut| Some(Err(cut.into()))),
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
}
