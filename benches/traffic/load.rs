//! Closed-loop load: each client sends its next request after the response.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use http::header::HOST;
use http::{Request, Response};
use http_body_util::{BodyExt, Empty};
use hyper::body::Incoming;
use hyper::client::conn::http1::SendRequest;
use hyper_util::rt::TokioIo;
use rustls::client::Resumption;
use rustls::{ClientConfig, RootCertStore};
use rustls_pki_types::pem::PemObject;
use rustls_pki_types::{CertificateDer, ServerName};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::task::JoinSet;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

/// Number of concurrent clients.
pub const CLIENTS: usize = 32;

/// A route to the origin, with or without a proxy.
#[derive(Clone)]
pub struct Route {
    /// The address to connect to.
    pub at: SocketAddr,
    /// The CONNECT target, if there is a proxy.
    pub tunnel: Option<String>,
    /// The origin's host name.
    pub name: &'static str,
    /// The root certificates.
    pub tls: Arc<ClientConfig>,
}

/// An open connection.
pub struct ClientConnection {
    sender: SendRequest<Empty<Bytes>>,
    name: &'static str,
}

/// The figures of a run.
#[derive(Clone, Copy, Debug)]
pub struct Figures {
    /// Number of responses.
    pub answers: f64,
    /// Responses per second.
    pub rate: f64,
    /// Median latency in milliseconds.
    pub p50: f64,
    /// 99th percentile of the latency in milliseconds.
    pub p99: f64,
}

/// A TLS configuration with these roots, with or without session resumption.
pub fn client(roots: &[String], resumes: bool) -> Arc<ClientConfig> {
    let mut store = RootCertStore::empty();
    for pem in roots {
        store
            .add(CertificateDer::from_pem_slice(pem.as_bytes()).unwrap())
            .unwrap();
    }
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let mut config = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(store)
        .with_no_client_auth();
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    if !resumes {
        config.resumption = Resumption::disabled();
    }
    Arc::new(config)
}

impl Route {
    /// Opens a new connection: TCP, CONNECT if there is a proxy, TLS.
    pub async fn open(&self) -> ClientConnection {
        let mut tcp = TcpStream::connect(self.at).await.unwrap();
        tcp.set_nodelay(true).unwrap();
        if let Some(tunnel) = &self.tunnel {
            let connect = format!("CONNECT {tunnel} HTTP/1.1\r\nHost: {tunnel}\r\n\r\n");
            tcp.write_all(connect.as_bytes()).await.unwrap();
            let (mut answer, mut read) = ([0; 1024], 0);
            while !answer[..read].ends_with(b"\r\n\r\n") {
                let more = tcp.read(&mut answer[read..]).await.unwrap();
                assert_ne!(more, 0, "the proxy closed the connection");
                read += more;
            }
            assert!(answer.starts_with(b"HTTP/1.1 200"), "no tunnel");
        }
        let name = ServerName::try_from(self.name).unwrap();
        let tls: TlsStream<TcpStream> = TlsConnector::from(Arc::clone(&self.tls))
            .connect(name, tcp)
            .await
            .unwrap();
        let (sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(tls))
            .await
            .unwrap();
        tokio::spawn(connection);
        ClientConnection {
            sender,
            name: self.name,
        }
    }
}

impl ClientConnection {
    /// Sends a request, reads the whole response and returns its length.
    pub async fn get(&mut self, path: &str) -> usize {
        let request = Request::get(path)
            .header(HOST, self.name)
            .body(Empty::new())
            .unwrap();
        self.sender.ready().await.unwrap();
        let response = self.sender.send_request(request).await.unwrap();
        read(response).await
    }
}

async fn read(response: Response<Incoming>) -> usize {
    assert_eq!(response.status(), 200);
    let mut body = response.into_body();
    let mut length = 0;
    while let Some(frame) = body.frame().await {
        length += frame.unwrap().data_ref().map_or(0, Bytes::len);
    }
    length
}

/// Small responses on persistent connections.
pub async fn measure_persistent(route: &Route, time: Duration) -> Figures {
    run(route, time, async |route, end| {
        let mut connection = route.open().await;
        connection.get("/small").await;
        let mut micros = Vec::new();
        while Instant::now() < end {
            let started = Instant::now();
            assert_eq!(connection.get("/small").await, 1024);
            micros.push(micros_since(started));
        }
        micros
    })
    .await
}

/// A small response on a new connection each time.
pub async fn measure_new(route: &Route, time: Duration) -> Figures {
    run(route, time, async |route, end| {
        let mut micros = Vec::new();
        while Instant::now() < end {
            let started = Instant::now();
            let mut connection = route.open().await;
            assert_eq!(connection.get("/small").await, 1024);
            micros.push(micros_since(started));
        }
        micros
    })
    .await
}

async fn run<F>(route: &Route, time: Duration, client: impl Fn(Route, Instant) -> F) -> Figures
where
    F: Future<Output = Vec<u32>> + Send + 'static,
{
    let started = Instant::now();
    let mut clients = JoinSet::new();
    for _ in 0..CLIENTS {
        clients.spawn(client(route.clone(), started + time));
    }
    let micros = clients.join_all().await.concat();
    figures(micros, started.elapsed())
}

/// One large response. Returns megabytes per second.
pub async fn measure_large(route: &Route) -> f64 {
    let mut connection = route.open().await;
    let started = Instant::now();
    let length = connection.get("/large").await;
    let bytes = u32::try_from(length).unwrap();
    f64::from(bytes) / 1e6 / started.elapsed().as_secs_f64()
}

fn micros_since(started: Instant) -> u32 {
    u32::try_from(started.elapsed().as_micros()).unwrap_or(u32::MAX)
}

/// Computes the figures from the latencies of all clients, in microseconds.
pub fn figures(mut micros: Vec<u32>, took: Duration) -> Figures {
    micros.sort_unstable();
    let percentile = |hundredth: usize| {
        let index = micros.len() * hundredth / 100;
        let micros = micros.get(index.min(micros.len().saturating_sub(1)));
        f64::from(micros.copied().unwrap_or_default()) / 1e3
    };
    let answers = f64::from(u32::try_from(micros.len()).unwrap());
    Figures {
        answers,
        rate: answers / took.as_secs_f64(),
        p50: percentile(50),
        p99: percentile(99),
    }
}
