//! Accepts a limited number of connections, serves each in its own task, and shuts them down.

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

/// How long a client may take to send a request head.
const HEAD_TIMEOUT: Duration = Duration::from_secs(10);

/// Maximum size of a request head.
const MAX_HEAD: usize = 64 << 10;

/// Pause before accepting again after a failure.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// A listener that accepts connections.
pub trait Accept: Sync {
    /// An accepted connection.
    type Stream: Send;

    /// Waits for the next connection.
    fn accept(&self) -> impl Future<Output = io::Result<Self::Stream>> + Send;
}

impl Accept for TcpListener {
    type Stream = TcpStream;

    async fn accept(&self) -> io::Result<TcpStream> {
        let (stream, _) = TcpListener::accept(self).await?;
        // Messages are small, and the peer waits for each.
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

/// Accepts connections until `stop`, and passes each to `begin`, which returns the task that serves
/// the connection, or None to close it. At most `max` connections are open at a time. Returns the
/// tasks that are still running, for the caller to wait for.
pub async fn accept_all<A, Task>(
    listener: &A,
    max: usize,
    stop: &CancellationToken,
    begin: impl Fn(A::Stream) -> Option<Task>,
) -> TaskTracker
where
    A: Accept,
    Task: Future<Output = ()> + Send + 'static,
{
    let permits = Arc::new(Semaphore::new(max));
    let connections = TaskTracker::new();
    loop {
        let permit = tokio::select! {
            () = stop.cancelled() => break,
            permit = Arc::clone(&permits).acquire_owned() => permit,
        };
        let accepted = tokio::select! {
            () = stop.cancelled() => break,
            accepted = listener.accept() => accepted,
        };
        match accepted {
            Ok(stream) => {
                if let Some(task) = begin(stream) {
                    connections.spawn(async move {
                        task.await;
                        drop(permit);
                    });
                }
            }
            Err(error) => {
                // The process is probably out of file descriptors; open connections may finish.
                tracing::warn!(%error, "accepting a connection failed");
                tokio::time::sleep(ACCEPT_PAUSE).await;
            }
        }
    }
    connections.close();
    connections
}

/// Serves one connection until it ends. After `stop`, a request in flight may finish, within
/// `grace` if a grace period is set, because a response stream may be endless.
pub async fn http1<S, B>(
    stream: impl AsyncRead + AsyncWrite + Unpin,
    service: S,
    stop: &CancellationToken,
    grace: Option<Duration>,
) where
    S: Service<Request<Incoming>, Response = Response<B>>,
    S::Error: Into<Box<dyn Error + Send + Sync>>,
    B: Body + 'static,
    B::Error: Into<Box<dyn Error + Send + Sync>>,
{
    let connection = hyper::server::conn::http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEAD_TIMEOUT)
        .max_buf_size(MAX_HEAD)
        .serve_connection(TokioIo::new(stream), service);
    tokio::pin!(connection);
    let ended = tokio::select! {
        ended = connection.as_mut() => ended,
        () = stop.cancelled() => {
            connection.as_mut().graceful_shutdown();
            match grace {
                None => connection.await,
                Some(grace) => tokio::time::timeout(grace, connection).await.unwrap_or(Ok(())),
            }
        }
    };
    if let Err(error) = ended {
        tracing::debug!(%error, "connection ended with an error");
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
    struct Signals {
        /// A request is being handled.
        received: Notify,
        /// The request may be answered.
        may_respond: Notify,
    }

    /// A server for at most `max` connections, and its address.
    async fn server(
        max: usize,
        stop: &CancellationToken,
        signals: &Arc<Signals>,
    ) -> (String, JoinHandle<()>) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let (stop, signals) = (stop.clone(), Arc::clone(signals));
        let running = tokio::spawn(async move {
            let begin = |stream| {
                let (stop, signals) = (stop.clone(), Arc::clone(&signals));
                Some(async move {
                    let service = service_fn(|_| async {
                        signals.received.notify_one();
                        signals.may_respond.notified().await;
                        let answer = Response::new(Full::new(Bytes::from_static(b"well")));
                        Ok::<_, Infallible>(answer)
                    });
                    http1(stream, service, &stop, None).await;
                })
            };
            accept_all(&listener, max, &stop, begin).await.wait().await;
        });
        (address, running)
    }

    async fn send_request(address: &str) -> TcpStream {
        let mut stream = TcpStream::connect(address).await.unwrap();
        let request = b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n";
        stream.write_all(request).await.unwrap();
        stream
    }

    async fn read_response(mut stream: TcpStream) -> String {
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await.unwrap();
        answer
    }

    #[tokio::test]
    async fn requests_in_flight_finish_after_stop_and_new_connections_fail() {
        let (stop, signals) = (CancellationToken::new(), Arc::default());
        let (address, running) = server(4, &stop, &signals).await;
        let held = send_request(&address).await;
        signals.received.notified().await;
        stop.cancel();
        signals.may_respond.notify_one();
        assert!(read_response(held).await.ends_with("well"));
        running.await.unwrap();
        assert!(TcpStream::connect(&address).await.is_err());
    }

    #[tokio::test]
    async fn client_beyond_the_connection_limit_waits() {
        let (stop, signals) = (CancellationToken::new(), Arc::default());
        let (address, running) = server(1, &stop, &signals).await;
        let (first, second) = (send_request(&address).await, send_request(&address).await);
        signals.may_respond.notify_one();
        assert!(read_response(first).await.ends_with("well"));
        signals.may_respond.notify_one();
        assert!(read_response(second).await.ends_with("well"));
        stop.cancel();
        running.await.unwrap();
    }
}
