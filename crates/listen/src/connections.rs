//! Whoever connects: so many at a time, each in a task of its own, until the stop.

use std::error::Error;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use http::{Request, Response};
use hyper::body::{Body, Incoming};
use hyper::service::Service;
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream, UnixListener, UnixStream};
use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

/// How long a client may take to send a request's head.
const HEAD_TIMEOUT: Duration = Duration::from_secs(10);

/// The longest head.
const LONGEST_HEAD: usize = 64 << 10;

/// Before accepting again after a failure.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Where somebody connects.
pub trait Accept: Sync {
    /// What they are heard on.
    type Stream: Send;

    /// The next one.
    fn accept(&self) -> impl Future<Output = io::Result<Self::Stream>> + Send;
}

impl Accept for TcpListener {
    type Stream = TcpStream;

    async fn accept(&self) -> io::Result<TcpStream> {
        let (stream, _) = TcpListener::accept(self).await?;
        // Messages are small, and somebody waits for each.
        let _ = stream.set_nodelay(true);
        Ok(stream)
    }
}

impl Accept for UnixListener {
    type Stream = UnixStream;

    async fn accept(&self) -> io::Result<UnixStream> {
        UnixListener::accept(self).await.map(|(stream, _)| stream)
    }
}

/// Accepts until `stop`, and gives each connection to `begin`, which says what becomes of it or
/// turns it away. There are at most `most` at a time. Returns those that are left, for the
/// caller to wait for as long as it likes.
pub async fn accept_all<A, Life>(
    listener: &A,
    most: usize,
    stop: &CancellationToken,
    begin: impl Fn(A::Stream) -> Option<Life>,
) -> TaskTracker
where
    A: Accept,
    Life: Future<Output = ()> + Send + 'static,
{
    let places = Arc::new(Semaphore::new(most));
    let connections = TaskTracker::new();
    loop {
        let place = tokio::select! {
            () = stop.cancelled() => break,
            place = Arc::clone(&places).acquire_owned() => place,
        };
        let accepted = tokio::select! {
            () = stop.cancelled() => break,
            accepted = listener.accept() => accepted,
        };
        match accepted {
            Ok(stream) => {
                if let Some(life) = begin(stream) {
                    connections.spawn(async move {
                        life.await;
                        drop(place);
                    });
                }
            }
            Err(error) => {
                // Out of descriptors, most likely; those who have one may finish.
                tracing::warn!(%error, "a client could not be accepted");
                tokio::time::sleep(ACCEPT_PAUSE).await;
            }
        }
    }
    connections.close();
    connections
}

/// Serves one connection to its end. After the stop, what is under way may finish, for `rest` at
/// most where that is given: a stream may have no end of its own.
pub async fn http1<S, B>(
    stream: impl AsyncRead + AsyncWrite + Unpin,
    service: S,
    stop: &CancellationToken,
    rest: Option<Duration>,
) where
    S: Service<Request<Incoming>, Response = Response<B>>,
    S::Error: Into<Box<dyn Error + Send + Sync>>,
    B: Body + 'static,
    B::Error: Into<Box<dyn Error + Send + Sync>>,
{
    let connection = hyper::server::conn::http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEAD_TIMEOUT)
        .max_buf_size(LONGEST_HEAD)
        .serve_connection(TokioIo::new(stream), service);
    tokio::pin!(connection);
    let ended = tokio::select! {
        ended = connection.as_mut() => ended,
        () = stop.cancelled() => {
            connection.as_mut().graceful_shutdown();
            match rest {
                None => connection.await,
                Some(rest) => tokio::time::timeout(rest, connection).await.unwrap_or(Ok(())),
            }
        }
    };
    if let Err(error) = ended {
        tracing::debug!(%error, "a connection ended early");
    }
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;

    use bytes::Bytes;
    use http_body_util::Full;
    use hyper::service::service_fn;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::sync::Notify;
    use tokio::task::JoinHandle;

    use super::*;

    #[derive(Default)]
    struct Signs {
        /// A request is being answered.
        asked: Notify,
        /// It may be.
        go: Notify,
    }

    /// A server with `most` places, and where it is.
    async fn server(
        most: usize,
        stop: &CancellationToken,
        signs: &Arc<Signs>,
    ) -> (String, JoinHandle<()>) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let (stop, signs) = (stop.clone(), Arc::clone(signs));
        let running = tokio::spawn(async move {
            let begin = |stream| {
                let (stop, signs) = (stop.clone(), Arc::clone(&signs));
                Some(async move {
                    let service = service_fn(|_| async {
                        signs.asked.notify_one();
                        signs.go.notified().await;
                        let answer = Response::new(Full::new(Bytes::from_static(b"well")));
                        Ok::<_, Infallible>(answer)
                    });
                    http1(stream, service, &stop, None).await;
                })
            };
            accept_all(&listener, most, &stop, begin).await.wait().await;
        });
        (address, running)
    }

    async fn ask(address: &str) -> TcpStream {
        let mut stream = TcpStream::connect(address).await.unwrap();
        let request = b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n";
        stream.write_all(request).await.unwrap();
        stream
    }

    async fn heard(mut stream: TcpStream) -> String {
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await.unwrap();
        answer
    }

    #[tokio::test]
    async fn what_is_under_way_at_the_stop_is_finished_and_nobody_new_is_let_in() {
        let (stop, signs) = (CancellationToken::new(), Arc::default());
        let (address, running) = server(4, &stop, &signs).await;
        let held = ask(&address).await;
        signs.asked.notified().await;
        stop.cancel();
        signs.go.notify_one();
        assert!(heard(held).await.ends_with("well"));
        running.await.unwrap();
        assert!(TcpStream::connect(&address).await.is_err());
    }

    #[tokio::test]
    async fn beyond_its_places_a_client_waits_for_one() {
        let (stop, signs) = (CancellationToken::new(), Arc::default());
        let (address, running) = server(1, &stop, &signs).await;
        let (first, second) = (ask(&address).await, ask(&address).await);
        signs.go.notify_one();
        assert!(heard(first).await.ends_with("well"));
        signs.go.notify_one();
        assert!(heard(second).await.ends_with("well"));
        stop.cancel();
        running.await.unwrap();
    }
}
