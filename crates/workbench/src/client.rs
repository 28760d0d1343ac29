//! The client: connects to a workbench that somebody else runs, waits for it, and finds it again
//! when it was away.
//!
//! ```text
//!   unknown ── connects, /health says ok ──▶ ready ── a call ──▶ answer
//!      ▲                                       │
//!      └────────── cannot connect ─────────────┘
//! ```
//!
//! Each call has a connection of its own, so that it is always known whether it can have
//! reached the server. One that cannot have is made again; one that may have is not, for it may
//! have been carried out. What comes back was said by whatever runs in there: it is bounded,
//! and read as nothing but data.

use std::io;
use std::net::IpAddr;
use std::path::PathBuf;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use bytes::{Buf, Bytes, BytesMut};
use http::header::{AUTHORIZATION, CONTENT_TYPE, HOST, HeaderValue};
use http::{Method, Request, Response, StatusCode};
use http_body_util::{BodyExt, Full, Limited};
use hyper::body::Incoming;
use hyper_util::rt::TokioIo;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpStream, UnixStream};
use tokio::time::Instant;

use crate::request::{
    BashRequest, EditRequest, EditResult, FindRequest, FindResult, GrepRequest, GrepResult,
    LsRequest, LsResult, ReadRequest, ReadResult, WriteRequest, WriteResult,
};
use crate::tools::bash::{BashResult, Collected, Event, Said, Stream};

/// Between two looks whether it is there.
const STEP: Duration = Duration::from_millis(100);

/// How long one look may take.
const LOOK: Duration = Duration::from_secs(2);

/// The largest answer: a picture of 16 MiB, in base64.
const MAX_ANSWER: usize = 32 << 20;

/// The longest line of a command's answer.
const MAX_LINE: usize = 1 << 20;

/// Why a call has no result.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// Nobody was there in time.
    #[error("Timed out waiting for coding sidecar at {0}")]
    TimedOut(String),
    /// The way to it is closed.
    #[error("{address} cannot be reached: {reason}")]
    Closed {
        /// Where.
        address: String,
        /// What the way there said.
        reason: String,
    },
    /// It does not know us.
    #[error("the workbench at {0} does not accept our token; see sandbox.remote.auth")]
    Unauthorized(String),
    /// A token is wanted, and there is none.
    #[error("sandbox.remote.auth.required is true but there is no token")]
    NoToken,
    /// The address means nothing.
    #[error("'{0}' is neither an IP address nor localhost")]
    Address(String),
    /// The connection broke; whether the call was carried out is not known.
    #[error(
        "the connection to {address} broke, and whether the call was carried out is not known: \
         {reason}"
    )]
    Broken {
        /// Where.
        address: String,
        /// How.
        reason: String,
    },
    /// The tool said no.
    #[error("{0}")]
    Refused(String),
    /// What came back is none of the answers we know.
    #[error("{address} does not answer as a workbench does: {reason}")]
    Strange {
        /// Where.
        address: String,
        /// What is strange.
        reason: String,
    },
}

/// A connection.
pub trait Line: AsyncRead + AsyncWrite + Send + Unpin {}
impl<T: AsyncRead + AsyncWrite + Send + Unpin> Line for T {}

/// A way to connect that is neither a path nor a port.
#[async_trait]
pub trait Dial: Send + Sync + std::fmt::Debug {
    /// Connects. What fails here has reached nobody.
    async fn dial(&self) -> io::Result<Box<dyn Line>>;

    /// What it is called in messages.
    fn address(&self) -> String;
}

/// Where a workbench is.
#[derive(Clone, Debug)]
pub enum Address {
    /// At a Unix socket.
    Unix(PathBuf),
    /// At a TCP port.
    Tcp(String, u16),
    /// Somewhere that the caller knows how to reach.
    Way(Arc<dyn Dial>),
}

impl std::fmt::Display for Address {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Address::Unix(path) => write!(f, "unix:{}", path.display()),
            Address::Tcp(host, port) => write!(f, "{host}:{port}"),
            Address::Way(way) => f.write_str(&way.address()),
        }
    }
}

/// A workbench somewhere else.
#[derive(Debug)]
pub struct Client {
    address: Address,
    wait: Duration,
    token: Option<HeaderValue>,
    /// Whether it was well when we last asked, and was not away since.
    ready: AtomicBool,
}

/// Why an attempt failed.
enum Failed {
    /// Nobody can have heard of it.
    Unreached,
    /// Nobody can have heard of it, and it is in vain to try again.
    Closed(String),
    /// Somebody may have.
    Perhaps(String),
}

impl Client {
    /// A client that waits so long for its workbench.
    pub fn new(address: Address, wait: Duration, token: Option<&str>) -> Result<Self, ClientError> {
        if let Address::Tcp(host, _) = &address
            && ip_address(host).is_none()
        {
            return Err(ClientError::Address(host.clone()));
        }
        let strange = |_| ClientError::Strange {
            address: address.to_string(),
            reason: "the token cannot be sent".to_owned(),
        };
        let token = token
            .map(|token| HeaderValue::from_str(&format!("Bearer {token}")))
            .transpose()
            .map_err(strange)?
            .map(|mut value| {
                value.set_sensitive(true);
                value
            });
        Ok(Self {
            address,
            wait,
            token,
            ready: AtomicBool::new(false),
        })
    }

    /// The client for what `sandbox.remote` says.
    pub fn of(remote: &config::section::sandbox::Remote) -> Result<Self, ClientError> {
        let address = match (&remote.socket_path, &remote.tcp) {
            (Some(path), _) => Address::Unix(path.clone()),
            (None, Some(tcp)) => Address::Tcp(tcp.host.to_string(), tcp.port),
            (None, None) => return Err(ClientError::Address(String::new())),
        };
        let token = remote.auth.token.as_ref().map(|token| token.expose());
        let token = token.filter(|token| !token.is_empty());
        if remote.auth.required && token.is_none() {
            return Err(ClientError::NoToken);
        }
        Self::new(
            address,
            Duration::from_millis(remote.wait_for_ready_ms),
            token,
        )
    }

    /// Where it connects to.
    pub fn address(&self) -> &Address {
        &self.address
    }

    /// Waits until it is there and well.
    pub async fn wait_until_ready(&self) -> Result<(), ClientError> {
        self.ready_by(Instant::now() + self.wait).await
    }

    /// Whether it is there and well now. Waits for nothing.
    pub async fn health(&self) -> Result<(), ClientError> {
        let timed_out = || ClientError::TimedOut(self.address.to_string());
        let look = tokio::time::timeout(LOOK, self.attempt(Method::GET, "/health", Bytes::new()));
        match look.await {
            Err(_) | Ok(Err(Failed::Unreached | Failed::Perhaps(_))) => Err(timed_out()),
            Ok(Err(Failed::Closed(reason))) => Err(self.closed(reason)),
            Ok(Ok(response)) if response.status() == StatusCode::UNAUTHORIZED => {
                Err(ClientError::Unauthorized(self.address.to_string()))
            }
            Ok(Ok(response)) => {
                let health: Health = tokio::time::timeout(LOOK, self.read(response))
                    .await
                    .map_err(|_| timed_out())??;
                health.ok.then_some(()).ok_or_else(timed_out)
            }
        }
    }

    /// Runs a command; what it says comes as it says it. Dropping what is returned ends it.
    pub async fn bash(&self, request: &BashRequest) -> Result<Output, ClientError> {
        let response = self.post("/bash", request).await?;
        if response.status() != StatusCode::OK {
            return Err(self.refusal(response).await);
        }
        Ok(Output {
            body: Box::pin(response.into_body()),
            rest: BytesMut::new(),
            address: self.address.to_string(),
            over: false,
        })
    }

    /// Runs a command to its end, and keeps the last of what it said.
    pub async fn run(&self, request: &BashRequest) -> Result<BashResult, ClientError> {
        let mut output = self.bash(request).await?;
        let mut collected = Collected::default();
        loop {
            match output.next().await? {
                Event::Output(_, said) => collected.push(&said),
                Event::Done {
                    exit_code,
                    timed_out,
                } => return Ok(collected.result(exit_code, timed_out)),
                Event::Failed(why) => return Err(ClientError::Refused(why)),
            }
        }
    }

    /// Reads a file.
    pub async fn read_file(&self, request: &ReadRequest) -> Result<ReadResult, ClientError> {
        self.call("/read", request).await
    }

    /// Writes a file.
    pub async fn write(&self, request: &WriteRequest) -> Result<WriteResult, ClientError> {
        self.call("/write", request).await
    }

    /// Changes a file.
    pub async fn edit(&self, request: &EditRequest) -> Result<EditResult, ClientError> {
        self.call("/edit", request).await
    }

    /// Lists a directory.
    pub async fn ls(&self, request: &LsRequest) -> Result<LsResult, ClientError> {
        self.call("/ls", request).await
    }

    /// Finds files.
    pub async fn find(&self, request: &FindRequest) -> Result<FindResult, ClientError> {
        self.call("/find", request).await
    }

    /// Finds lines.
    pub async fn grep(&self, request: &GrepRequest) -> Result<GrepResult, ClientError> {
        self.call("/grep", request).await
    }

    /// Calls a tool by its name, with whatever it is to be asked. Not bash, whose answer is
    /// not one value.
    pub async fn call_tool(
        &self,
        tool: &str,
        request: &serde_json::Value,
    ) -> Result<serde_json::Value, ClientError> {
        self.call(&format!("/{tool}"), request).await
    }

    async fn call<T: DeserializeOwned>(
        &self,
        path: &str,
        request: &impl Serialize,
    ) -> Result<T, ClientError> {
        let response = self.post(path, request).await?;
        if response.status() != StatusCode::OK {
            return Err(self.refusal(response).await);
        }
        let answer: Answer<T> = self.read(response).await?;
        Ok(answer.result)
    }

    /// Sends a request, again and again as long as nobody can have heard it.
    async fn post(
        &self,
        path: &str,
        request: &impl Serialize,
    ) -> Result<Response<Incoming>, ClientError> {
        let body = serde_json::to_vec(&Sent {
            // The original wants one.
            session_id: "palisade",
            request,
        });
        let body = Bytes::from(body.map_err(|error| self.strange(&error))?);
        let deadline = Instant::now() + self.wait;
        loop {
            if !self.ready.load(Ordering::Acquire) {
                self.ready_by(deadline).await?;
            }
            match self.attempt(Method::POST, path, body.clone()).await {
                Ok(response) => return Ok(response),
                Err(Failed::Unreached) => self.ready.store(false, Ordering::Release),
                Err(Failed::Closed(reason)) => return Err(self.closed(reason)),
                Err(Failed::Perhaps(reason)) => {
                    self.ready.store(false, Ordering::Release);
                    return Err(self.broken(reason));
                }
            }
        }
    }

    async fn ready_by(&self, deadline: Instant) -> Result<(), ClientError> {
        loop {
            match self.health().await {
                Ok(()) => {
                    self.ready.store(true, Ordering::Release);
                    return Ok(());
                }
                Err(ClientError::TimedOut(_)) if Instant::now() + STEP <= deadline => {
                    tokio::time::sleep(STEP).await;
                }
                Err(error) => return Err(error),
            }
        }
    }

    /// One request on a connection of its own.
    async fn attempt(
        &self,
        method: Method,
        path: &str,
        body: Bytes,
    ) -> Result<Response<Incoming>, Failed> {
        let line = self.connect().await.map_err(|error| match &self.address {
            Address::Unix(_) | Address::Tcp(..) => Failed::Unreached,
            // It is the caller's way, which knows better.
            Address::Way(_) => Failed::Closed(error.to_string()),
        })?;
        let (mut sender, connection) = hyper::client::conn::http1::Builder::new()
            .max_buf_size(256 * 1024)
            .handshake(TokioIo::new(line))
            .await
            .map_err(|_| Failed::Unreached)?;
        // Ends with the answer's body, or when that is dropped.
        tokio::spawn(async move {
            if let Err(error) = connection.await {
                tracing::debug!(%error, "a connection to a workbench ended early");
            }
        });
        let mut request = Request::new(Full::new(body));
        *request.method_mut() = method;
        if let Ok(path) = path.parse() {
            *request.uri_mut() = path;
        }
        let headers = request.headers_mut();
        headers.insert(HOST, HeaderValue::from_static("localhost"));
        headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
        if let Some(token) = &self.token {
            headers.insert(AUTHORIZATION, token.clone());
        }
        let sent = sender.try_send_request(request).await;
        sent.map_err(|mut error| match error.take_message() {
            // Handed back: not a byte of it was written.
            Some(_) => Failed::Unreached,
            None => Failed::Perhaps(error.into_error().to_string()),
        })
    }

    async fn connect(&self) -> io::Result<Box<dyn Line>> {
        Ok(match &self.address {
            Address::Unix(path) => Box::new(UnixStream::connect(path).await?),
            Address::Tcp(host, port) => {
                let address = ip_address(host).ok_or(io::ErrorKind::InvalidInput)?;
                let stream = TcpStream::connect((address, *port)).await?;
                stream.set_nodelay(true)?;
                Box::new(stream)
            }
            Address::Way(way) => way.dial().await?,
        })
    }

    async fn read<T: DeserializeOwned>(
        &self,
        response: Response<Incoming>,
    ) -> Result<T, ClientError> {
        let body = Limited::new(response.into_body(), MAX_ANSWER).collect();
        let body = body.await.map_err(|error| self.broken(error.to_string()))?;
        serde_json::from_slice(&body.to_bytes()).map_err(|error| self.strange(&error))
    }

    async fn refusal(&self, response: Response<Incoming>) -> ClientError {
        if response.status() == StatusCode::UNAUTHORIZED {
            return ClientError::Unauthorized(self.address.to_string());
        }
        match self.read::<Refusal>(response).await {
            Ok(refusal) => ClientError::Refused(refusal.error),
            Err(error) => error,
        }
    }

    fn closed(&self, reason: String) -> ClientError {
        ClientError::Closed {
            address: self.address.to_string(),
            reason,
        }
    }

    fn broken(&self, reason: String) -> ClientError {
        ClientError::Broken {
            address: self.address.to_string(),
            reason,
        }
    }

    fn strange(&self, reason: &dyn std::error::Error) -> ClientError {
        ClientError::Strange {
            address: self.address.to_string(),
            reason: reason.to_string(),
        }
    }
}

/// The static binary asks no resolver.
fn ip_address(host: &str) -> Option<IpAddr> {
    match host {
        "localhost" => Some(IpAddr::from([127, 0, 0, 1])),
        host => host.trim_matches(['[', ']']).parse().ok(),
    }
}

/// What a command says, as it comes.
pub struct Output {
    body: Pin<Box<Incoming>>,
    /// What came after the last line.
    rest: BytesMut,
    address: String,
    over: bool,
}

impl Output {
    /// What happens next. The last is [`Event::Done`] or [`Event::Failed`]; that it never came
    /// is an error.
    pub async fn next(&mut self) -> Result<Event, ClientError> {
        loop {
            if let Some(end) = memchr::memchr(b'\n', &self.rest) {
                let line = self.rest.split_to(end);
                self.rest.advance(1);
                if line.trim_ascii().is_empty() {
                    continue;
                }
                return self.event(&line);
            }
            if self.rest.len() > MAX_LINE {
                return Err(self.strange("a line without an end"));
            }
            let broken = |reason: &str| ClientError::Broken {
                address: self.address.clone(),
                reason: reason.to_owned(),
            };
            match self.body.as_mut().frame().await {
                Some(Ok(frame)) => {
                    if let Ok(data) = frame.into_data() {
                        self.rest.extend_from_slice(&data);
                    }
                }
                Some(Err(error)) => return Err(broken(&error.to_string())),
                None if self.over => return Err(broken("the command has ended already")),
                None => return Err(broken("the end of the command never came")),
            }
        }
    }

    fn event(&mut self, line: &[u8]) -> Result<Event, ClientError> {
        let told: Told =
            serde_json::from_slice(line).map_err(|error| self.strange(&error.to_string()))?;
        Ok(match told {
            Told::Delta {
                data,
                stream,
                base64,
            } => {
                let said = match base64 {
                    None => Said::Text(data),
                    Some(bytes) => Said::Bytes(
                        STANDARD
                            .decode(bytes)
                            .map_err(|error| self.strange(&error.to_string()))?,
                    ),
                };
                Event::Output(stream.unwrap_or(Stream::Stdout), said)
            }
            Told::Done {
                exit_code,
                timed_out,
            } => {
                self.over = true;
                Event::Done {
                    exit_code,
                    timed_out,
                }
            }
            Told::Error { message } => {
                self.over = true;
                Event::Failed(message)
            }
        })
    }

    fn strange(&self, reason: &str) -> ClientError {
        ClientError::Strange {
            address: self.address.clone(),
            reason: reason.to_owned(),
        }
    }
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Sent<'a, T> {
    session_id: &'a str,
    #[serde(flatten)]
    request: &'a T,
}

#[derive(Deserialize)]
struct Health {
    ok: bool,
}

#[derive(Deserialize)]
struct Answer<T> {
    result: T,
}

#[derive(Deserialize)]
struct Refusal {
    error: String,
}

#[derive(Deserialize)]
#[serde(tag = "type", rename_all = "lowercase")]
enum Told {
    Delta {
        data: String,
        stream: Option<Stream>,
        base64: Option<String>,
    },
    #[serde(rename_all = "camelCase")]
    Done {
        exit_code: i32,
        #[serde(default)]
        timed_out: bool,
    },
    Error {
        message: String,
    },
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_that_cannot_be_dialled_is_refused_at_once() {
        let client = |host: &str| {
            let address = Address::Tcp(host.to_owned(), 80);
            Client::new(address, Duration::ZERO, None).map(|_| ())
        };
        for host in ["127.0.0.1", "::1", "[::1]", "localhost"] {
            assert!(client(host).is_ok(), "{host}");
        }
        let error = client("sidecar.example").unwrap_err();
        assert!(matches!(error, ClientError::Address(_)), "{error}");
    }

    #[test]
    fn a_token_is_never_shown() {
        let address = Address::Unix("/nowhere".into());
        let client = Client::new(address, Duration::ZERO, Some("open-sesame")).unwrap();
        assert!(!format!("{client:?}").contains("sesame"));
        let address = Address::Unix("/nowhere".into());
        assert!(Client::new(address, Duration::ZERO, Some("a\nb")).is_err());
    }
}
