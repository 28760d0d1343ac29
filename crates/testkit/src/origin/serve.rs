//! The thread of an origin server.
#![expect(
    clippy::expect_used,
    reason = "a test without its server cannot continue"
)]

use std::net::TcpStream as StdStream;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use bytes::{Bytes, BytesMut};
use http::{Request, Response};
use http_body_util::channel::{Channel, Sender};
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper::server::conn::{http1, http2};
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo};
use rustls::{HandshakeKind, ServerConfig};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio_rustls::TlsAcceptor;

use super::reply::Ending;
use super::{Handler, OriginOptions, OriginReply, OriginRequest, OriginServer, ServerLog};

/// Maximum number of recorded bytes of a request body.
const MAX_BODY: usize = 1024 * 1024;

type Body = UnsyncBoxBody<Bytes, std::io::Error>;

/// Counts a connection as open until it is dropped.
struct OpenConnection(Arc<ServerLog>);

impl Drop for OpenConnection {
    fn drop(&mut self) {
        self.0.open.fetch_sub(1, Ordering::SeqCst);
    }
}

fn count(log: &Arc<ServerLog>) -> (OpenConnection, usize) {
    log.open.fetch_add(1, Ordering::SeqCst);
    let number = log.accepted.fetch_add(1, Ordering::SeqCst);
    (OpenConnection(Arc::clone(log)), number)
}

pub(super) fn start_raw(serve: Arc<dyn Fn(StdStream, usize) + Send + Sync>) -> OriginServer {
    let (hang_up, _) = watch::channel(0);
    let log = Arc::<ServerLog>::default();
    let keep = Arc::clone(&log);
    let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = listener.local_addr().expect("an address");
    // The thread ends with the test process, because accept cannot be interrupted.
    std::thread::spawn(move || {
        for stream in listener.incoming().map_while(Result::ok) {
            let (counted, number) = count(&keep);
            let serve = Arc::clone(&serve);
            std::thread::spawn(move || {
                let _counted = counted;
                serve(stream, number);
            });
        }
    });
    OriginServer {
        address,
        log,
        hang_up,
    }
}

pub(super) fn start(options: OriginOptions, answer: Arc<Handler>) -> OriginServer {
    let (hang_up, closing) = watch::channel(0);
    let log = Arc::<ServerLog>::default();
    let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = listener.local_addr().expect("an address");
    listener.set_nonblocking(true).expect("a listener");
    let server = Server {
        tls: options
            .tls
            .as_ref()
            .map(|identity| acceptor(identity, options.http2)),
        streams: options.streams,
        answer,
        log: Arc::clone(&log),
        closing,
    };
    std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .expect("a runtime");
        runtime.block_on(async {
            let listener = TcpListener::from_std(listener).expect("a listener");
            server.run(listener).await;
        });
    });
    OriginServer {
        address,
        log,
        hang_up,
    }
}

/// A TLS acceptor with that certificate.
pub(crate) fn acceptor(identity: &crate::ca::TlsIdentity, http2: bool) -> TlsAcceptor {
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let mut config = ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .expect("TLS")
        .with_no_client_auth()
        .with_single_cert(vec![identity.certificate.clone()], identity.key.clone_key())
        .expect("a certificate and its key");
    if http2 {
        config.alpn_protocols.push(b"h2".to_vec());
    }
    config.alpn_protocols.push(b"http/1.1".to_vec());
    TlsAcceptor::from(Arc::new(config))
}

#[derive(Clone)]
struct Server {
    tls: Option<TlsAcceptor>,
    streams: Option<u32>,
    answer: Arc<Handler>,
    log: Arc<ServerLog>,
    closing: watch::Receiver<u64>,
}

impl Server {
    async fn run(self, listener: TcpListener) {
        let mut ending = self.closing.clone();
        loop {
            tokio::select! {
                accepted = listener.accept() => {
                    let Ok((stream, _)) = accepted else { return };
                    let (counted, number) = count(&self.log);
                    let server = self.clone();
                    tokio::spawn(async move {
                        let _counted = counted;
                        server.serve(stream, number).await;
                    });
                }
                changed = ending.changed() => {
                    if changed.is_err() {
                        return;
                    }
                }
            }
        }
    }

    async fn serve(self, stream: TcpStream, number: usize) {
        let _nodelay = stream.set_nodelay(true);
        let mut closing = self.closing.clone();
        closing.mark_unchanged();
        let serving = async {
            let Some(tls) = self.tls.clone() else {
                self.http(stream, number, false).await;
                return;
            };
            let Ok(stream) = tls.accept(stream).await else {
                return;
            };
            let session = stream.get_ref().1;
            if session.handshake_kind() == Some(HandshakeKind::Resumed) {
                self.log.resumed.fetch_add(1, Ordering::SeqCst);
            }
            let http2 = session.alpn_protocol() == Some(b"h2");
            self.http(stream, number, http2).await;
        };
        tokio::select! {
            () = serving => {}
            _ = closing.changed() => {}
        }
    }

    async fn http<S>(&self, stream: S, number: usize, http2: bool)
    where
        S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    {
        let service = service_fn(|request| self.clone().respond(request, number));
        let io = TokioIo::new(stream);
        // Tests disconnect clients in the middle of a request on purpose.
        let _ended = if http2 {
            http2::Builder::new(TokioExecutor::new())
                .max_concurrent_streams(self.streams)
                .serve_connection(
                    io,
                    service_fn(move |request| self.clone().respond(request, number)),
                )
                .await
        } else {
            let connection = http1::Builder::new().serve_connection(io, service);
            connection.with_upgrades().await
        };
    }

    async fn respond(
        self,
        mut request: Request<Incoming>,
        connection: usize,
    ) -> Result<Response<Body>, std::io::Error> {
        let upgrade = hyper::upgrade::on(&mut request);
        let received = receive(request, connection).await?;
        self.log.received().push(received.clone());
        let mut reply = (self.answer)(&received);
        if let Some(latch) = &reply.hold_response {
            latch.wait().await;
        }
        match reply.ending {
            Ending::HangUp => return Err(std::io::Error::other("the test closes this connection")),
            Ending::Echo => {
                tokio::spawn(async move {
                    let Ok(upgraded) = upgrade.await else { return };
                    let (mut from, mut to) = tokio::io::split(TokioIo::new(upgraded));
                    let _ended = tokio::io::copy(&mut from, &mut to).await;
                    let _ended = tokio::io::AsyncWriteExt::shutdown(&mut to).await;
                });
            }
            Ending::Whole | Ending::Cut => {}
        }
        let mut response = Response::new(());
        *response.status_mut() = reply.status;
        *response.headers_mut() = std::mem::take(&mut reply.headers);
        if !reply.streams() {
            let whole = Full::new(reply.body).map_err(|never| match never {});
            return Ok(response.map(|()| whole.boxed_unsync()));
        }
        let (sender, body) = Channel::new(1);
        tokio::spawn(stream_body(sender, reply));
        Ok(response.map(|()| body.boxed_unsync()))
    }
}

async fn receive(
    request: Request<Incoming>,
    connection: usize,
) -> Result<OriginRequest, std::io::Error> {
    let (head, mut body) = request.into_parts();
    let (mut kept, mut length, mut trailers) = (BytesMut::new(), 0, http::HeaderMap::new());
    while let Some(frame) = body.frame().await {
        match frame.map_err(std::io::Error::other)?.into_data() {
            Ok(data) => {
                length += u64::try_from(data.len()).unwrap_or_default();
                let room = MAX_BODY.saturating_sub(kept.len()).min(data.len());
                kept.extend_from_slice(&data.slice(..room));
            }
            Err(frame) => {
                if let Ok(more) = frame.into_trailers() {
                    trailers.extend(more);
                }
            }
        }
    }
    Ok(OriginRequest {
        connection,
        method: head.method,
        uri: head.uri,
        version: head.version,
        headers: head.headers,
        body: kept.freeze(),
        length,
        trailers,
    })
}

/// Streams the body; ends early if the client has disconnected.
async fn stream_body(mut sender: Sender<Bytes, std::io::Error>, reply: OriginReply) {
    let chunk_length = u64::try_from(reply.body.len()).unwrap_or_default();
    let mut left = reply.length.unwrap_or(chunk_length);
    while left > 0 && chunk_length > 0 {
        let next = usize::try_from(left.min(chunk_length)).unwrap_or_default();
        if sender.send_data(reply.body.slice(..next)).await.is_err() {
            return;
        }
        left = left.saturating_sub(chunk_length);
    }
    if let Some(latch) = &reply.hold_body_end {
        latch.wait().await;
    }
    if reply.ending == Ending::Cut {
        sender.abort(std::io::Error::other("the test aborts this body"));
        return;
    }
    if let Some(trailers) = reply.trailers {
        let _gone = sender.send_trailers(trailers).await;
    }
}
