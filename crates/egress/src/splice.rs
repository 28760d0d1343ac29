//! Copies bytes between two streams in both directions, until one side closes, the idle timeout
//! expires, or a reload revokes the connection.

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

/// Buffer size per direction.
const BUFFER: usize = 16 * 1024;

/// Copies bytes between `client` and `upstream`, and counts them.
pub async fn join(
    client: impl AsyncRead + AsyncWrite + Unpin,
    upstream: impl AsyncRead + AsyncWrite + Unpin,
    tally: &Arc<Tally>,
    in_flight: &InFlight,
    idle_timeout: Duration,
) -> io::Result<()> {
    let start = Instant::now();
    let last = AtomicU64::new(0);
    let mut client = CountingStream {
        inner: client,
        count: &tally.sent,
        start,
        last: &last,
    };
    let mut upstream = CountingStream {
        inner: upstream,
        count: &tally.received,
        start,
        last: &last,
    };
    tokio::select! {
        copied = tokio::io::copy_bidirectional_with_sizes(
            &mut client, &mut upstream, BUFFER, BUFFER,
        ) => copied.map(drop),
        () = in_flight.revoked() => Err(io::Error::new(
            io::ErrorKind::PermissionDenied,
            crate::body_stream::StreamAbort::Revoked,
        )),
        () = idle(start, &last, idle_timeout) => Err(io::Error::new(
            io::ErrorKind::TimedOut,
            crate::body_stream::StreamAbort::Idle(idle_timeout),
        )),
    }
}

/// Waits until no byte was read for `idle_timeout`.
async fn idle(start: Instant, last: &AtomicU64, idle_timeout: Duration) {
    loop {
        let until = start + Duration::from_millis(last.load(Ordering::Relaxed)) + idle_timeout;
        if Instant::now() >= until {
            return;
        }
        tokio::time::sleep_until(until).await;
    }
}

/// A stream that counts its reads and records their time.
struct CountingStream<'a, IO> {
    inner: IO,
    count: &'a AtomicU64,
    start: Instant,
    /// The time of the last read, in milliseconds since `start`.
    last: &'a AtomicU64,
}

impl<IO: AsyncRead + Unpin> AsyncRead for CountingStream<'_, IO> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buf.filled().len();
        ready!(Pin::new(&mut self.inner).poll_read(cx, buf))?;
        let length = u64::try_from(buf.filled().len() - before).unwrap_or_default();
        self.count.fetch_add(length, Ordering::Relaxed);
        let now = u64::try_from(self.start.elapsed().as_millis()).unwrap_or(u64::MAX);
        self.last.store(now, Ordering::Relaxed);
        Poll::Ready(Ok(()))
    }
}

impl<IO: AsyncWrite + Unpin> AsyncWrite for CountingStream<'_, IO> {
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

    fn in_flight(in_flight_set: &Arc<InFlightSet>) -> InFlight {
        in_flight_set.enter(connection("x.example"))
    }

    #[tokio::test(start_paused = true)]
    async fn bytes_are_copied_both_ways_until_idle_timeout() {
        let in_flight_set = Arc::new(InFlightSet::default());
        let in_flight = in_flight(&in_flight_set);
        let tally = Arc::new(Tally::default());
        let ((mut client, client_side), (upstream_side, mut upstream)) = (duplex(64), duplex(64));
        let joined = join(
            client_side,
            upstream_side,
            &tally,
            &in_flight,
            Duration::from_secs(60),
        );
        let transfer = async {
            tokio::time::sleep(Duration::from_secs(50)).await;
            client.write_all(b"hello").await.unwrap();
            let mut bytes = [0; 5];
            upstream.read_exact(&mut bytes).await.unwrap();
            upstream.write_all(b"yes").await.unwrap();
            client.read_exact(&mut bytes[..3]).await.unwrap();
            assert_eq!(&bytes, b"yeslo");
            Instant::now()
        };
        let (ended, last_write) = tokio::join!(joined, transfer);
        assert_eq!(ended.unwrap_err().kind(), io::ErrorKind::TimedOut);
        assert_eq!(last_write.elapsed().as_secs(), 60);
        assert_eq!(tally.sent.load(Ordering::Relaxed), 5);
        assert_eq!(tally.received.load(Ordering::Relaxed), 3);
    }

    #[tokio::test]
    async fn revoked_connection_ends() {
        let in_flight_set = Arc::new(InFlightSet::default());
        let in_flight = in_flight(&in_flight_set);
        let tally = Arc::new(Tally::default());
        let ((_client, client_side), (upstream_side, _upstream)) = (duplex(64), duplex(64));
        let joined = join(
            client_side,
            upstream_side,
            &tally,
            &in_flight,
            Duration::from_secs(60),
        );
        let change = async {
            tokio::task::yield_now().await;
            assert_eq!(in_flight_set.recheck(|_| false), 1);
        };
        let (ended, ()) = tokio::join!(joined, change);
        assert_eq!(ended.unwrap_err().kind(), io::ErrorKind::PermissionDenied);
    }
}
