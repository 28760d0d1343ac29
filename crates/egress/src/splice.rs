//! Two streams, joined: bytes pass both ways until one side ends, falls silent, or the
//! rules change.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::Instant;

use crate::in_flight::InFlight;
use crate::request_log::Tally;

/// What is held of each direction at a time.
const BUFFER: usize = 16 * 1024;

/// Passes bytes between `client` and `upstream`, and counts them.
pub async fn join(
    client: impl AsyncRead + AsyncWrite + Unpin,
    upstream: impl AsyncRead + AsyncWrite + Unpin,
    tally: &Arc<Tally>,
    live: &InFlight,
    patience: Duration,
) -> io::Result<()> {
    let begun = Instant::now();
    let last = AtomicU64::new(0);
    let mut client = Counted {
        inner: client,
        count: &tally.sent,
        begun,
        last: &last,
    };
    let mut upstream = Counted {
        inner: upstream,
        count: &tally.received,
        begun,
        last: &last,
    };
    tokio::select! {
        copied = tokio::io::copy_bidirectional_with_sizes(
            &mut client, &mut upstream, BUFFER, BUFFER,
        ) => copied.map(drop),
        () = live.revoked() => Err(io::Error::new(
            io::ErrorKind::PermissionDenied,
            crate::body_stream::Cut::Revoked,
        )),
        () = silence(begun, &last, patience) => Err(io::Error::new(
            io::ErrorKind::TimedOut,
            crate::body_stream::Cut::Idle(patience),
        )),
    }
}

/// Waits until nothing was read for `patience`.
async fn silence(begun: Instant, last: &AtomicU64, patience: Duration) {
    loop {
        let until = begun + Duration::from_millis(last.load(Ordering::Relaxed)) + patience;
        if Instant::now() >= until {
            return;
        }
        tokio::time::sleep_until(until).await;
    }
}

/// A stream whose reads are counted and noticed.
struct Counted<'a, IO> {
    inner: IO,
    count: &'a AtomicU64,
    begun: Instant,
    /// When something was read last, in milliseconds since the beginning.
    last: &'a AtomicU64,
}

impl<IO: AsyncRead + Unpin> AsyncRead for Counted<'_, IO> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buf.filled().len();
        ready!(Pin::new(&mut self.inner).poll_read(cx, buf))?;
        let length = u64::try_from(buf.filled().len() - before).unwrap_or_default();
        self.count.fetch_add(length, Ordering::Relaxed);
        let now = u64::try_from(self.begun.elapsed().as_millis()).unwrap_or(u64::MAX);
        self.last.store(now, Ordering::Relaxed);
        Poll::Ready(Ok(()))
    }
}

impl<IO: AsyncWrite + Unpin> AsyncWrite for Counted<'_, IO> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.inner).poll_write(cx, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt, duplex};

    use super::*;
    use crate::in_flight::InFlightSet;
    use crate::in_flight::tests::connection;

    fn live(underway: &Arc<InFlightSet>) -> InFlight {
        underway.enter(connection("x.example"))
    }

    #[tokio::test(start_paused = true)]
    async fn bytes_pass_both_ways_and_silence_ends_it() {
        let underway = Arc::new(InFlightSet::default());
        let live = live(&underway);
        let tally = Arc::new(Tally::default());
        let ((mut client, ours), (theirs, mut upstream)) = (duplex(64), duplex(64));
        let joined = join(ours, theirs, &tally, &live, Duration::from_secs(60));
        let talk = async {
            tokio::time::sleep(Duration::from_secs(50)).await;
            client.write_all(b"hello").await.unwrap();
            let mut bytes = [0; 5];
            upstream.read_exact(&mut bytes).await.unwrap();
            upstream.write_all(b"yes").await.unwrap();
            client.read_exact(&mut bytes[..3]).await.unwrap();
            assert_eq!(&bytes, b"yeslo");
            Instant::now()
        };
        let (ended, spoken) = tokio::join!(joined, talk);
        assert_eq!(ended.unwrap_err().kind(), io::ErrorKind::TimedOut);
        assert_eq!(spoken.elapsed().as_secs(), 60);
        assert_eq!(tally.sent.load(Ordering::Relaxed), 5);
        assert_eq!(tally.received.load(Ordering::Relaxed), 3);
    }

    #[tokio::test]
    async fn a_change_of_rules_ends_it() {
        let underway = Arc::new(InFlightSet::default());
        let live = live(&underway);
        let tally = Arc::new(Tally::default());
        let ((_client, ours), (theirs, _upstream)) = (duplex(64), duplex(64));
        let joined = join(ours, theirs, &tally, &live, Duration::from_secs(60));
        let change = async {
            tokio::task::yield_now().await;
            assert_eq!(underway.recheck(|_| false), 1);
        };
        let (ended, ()) = tokio::join!(joined, change);
        assert_eq!(ended.unwrap_err().kind(), io::ErrorKind::PermissionDenied);
    }
}
