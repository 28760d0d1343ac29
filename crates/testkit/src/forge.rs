//! A git forge on loopback: the machine's `git http-backend` behind a small HTTP server that
//! records every request.
#![expect(
    clippy::expect_used,
    reason = "a test without its server cannot continue"
)]

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::{Arc, Mutex, PoisonError};

use bytes::Bytes;
use http::{HeaderMap, HeaderName, HeaderValue, Request, Response, StatusCode};
use http_body_util::channel::Channel;
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncBufReadExt, AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, BufReader};
use tokio::net::TcpListener;
use tokio::process::{ChildStdin, Command};
use tokio::sync::watch;
use tokio_rustls::TlsAcceptor;

use crate::ca::TlsIdentity;
use crate::origin::serve::acceptor;

mod large_files;

use large_files::LargeFiles;

/// A running forge. Dropping it stops the server.
pub struct Forge {
    address: SocketAddr,
    log: Arc<Mutex<Vec<ForgeRequest>>>,
    large_files: LargeFiles,
    _stop: watch::Sender<()>,
}

/// A request that arrived at the forge.
#[derive(Clone, Debug)]
pub struct ForgeRequest {
    /// The method.
    pub method: String,
    /// Path and query.
    pub target: String,
    /// The headers.
    pub headers: HeaderMap,
    /// Length of the body in bytes.
    pub length: u64,
}

#[derive(Clone)]
struct ForgeServer {
    /// The directory of the bare repositories.
    root: PathBuf,
    /// The git program.
    git: String,
    log: Arc<Mutex<Vec<ForgeRequest>>>,
    large_files: LargeFiles,
}

type Body = UnsyncBoxBody<Bytes, std::io::Error>;

impl Forge {
    /// Serves the repositories below `root` with the HTTP backend of `git`. Every client may push
    /// and store large files (LFS). Without a certificate the forge serves plain HTTP.
    pub fn start(identity: Option<&TlsIdentity>, root: &Path, git: &str) -> Self {
        let log = Arc::<Mutex<Vec<ForgeRequest>>>::default();
        let large_files = LargeFiles::default();
        let server = ForgeServer {
            root: root.to_owned(),
            git: git.to_owned(),
            log: Arc::clone(&log),
            large_files: large_files.clone(),
        };
        let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
        let address = listener.local_addr().expect("an address");
        listener.set_nonblocking(true).expect("a listener");
        let acceptor = identity.map(|identity| acceptor(identity, false));
        let (stop, mut stopped) = watch::channel(());
        std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread()
                .enable_all()
                .build()
                .expect("a runtime");
            runtime.block_on(async {
                let listener = TcpListener::from_std(listener).expect("a listener");
                tokio::select! {
                    () = server.run(listener, acceptor) => {}
                    _ = stopped.changed() => {}
                }
            });
        });
        Self {
            address,
            log,
            large_files,
            _stop: stop,
        }
    }

    /// The address of the forge.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Makes clients upload LFS objects to another host, as the large forges do. The default is a
    /// path below the repository on the forge itself.
    pub fn store_large_files_at(&self, host: &str) {
        self.large_files.store_at(host);
    }

    /// The LFS object with that SHA-256, if the forge has it.
    pub fn large_file(&self, oid: &str) -> Option<Bytes> {
        self.large_files.get(oid)
    }

    /// All requests so far.
    pub fn requests(&self) -> Vec<ForgeRequest> {
        let log = self.log.lock().unwrap_or_else(PoisonError::into_inner);
        log.clone()
    }

    /// Number of bytes that arrived for `git-receive-pack`, without probes.
    pub fn pushed_bytes(&self) -> u64 {
        let pushes = self
            .requests()
            .into_iter()
            .filter(|request| request.target.ends_with("/git-receive-pack") && request.length > 4);
        pushes.map(|request| request.length).sum()
    }
}

impl ForgeServer {
    async fn run(self, listener: TcpListener, acceptor: Option<TlsAcceptor>) {
        loop {
            let Ok((stream, _)) = listener.accept().await else {
                return;
            };
            let (server, acceptor) = (self.clone(), acceptor.clone());
            tokio::spawn(async move {
                match acceptor {
                    None => server.serve(stream).await,
                    Some(acceptor) => {
                        if let Ok(stream) = acceptor.accept(stream).await {
                            server.serve(stream).await;
                        }
                    }
                }
            });
        }
    }

    async fn serve(&self, stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static) {
        let service = service_fn(|request| self.clone().respond(request));
        // Tests disconnect clients in the middle of a request on purpose.
        let _ended = http1::Builder::new()
            .serve_connection(TokioIo::new(stream), service)
            .await;
    }

    async fn respond(self, request: Request<Incoming>) -> Result<Response<Body>, std::io::Error> {
        let (head, body) = request.into_parts();
        let index = {
            let mut log = self.log.lock().unwrap_or_else(PoisonError::into_inner);
            log.push(ForgeRequest {
                method: head.method.to_string(),
                target: head.uri.to_string(),
                headers: head.headers.clone(),
                length: 0,
            });
            log.len() - 1
        };
        if let Some(lfs_request) = large_files::LfsRequest::from_head(&head) {
            let body = body.collect().await.map_err(std::io::Error::other)?;
            let body = body.to_bytes();
            self.count(index, body.len());
            return Ok(self.large_files.respond(&lfs_request, body).map(full));
        }
        let mut child = self.backend(&head).spawn()?;
        let stdin = child.stdin.take();
        let server = self.clone();
        tokio::spawn(async move { server.copy(index, body, stdin).await });
        let mut stdout = BufReader::new(child.stdout.take().expect("a pipe"));
        let response = read_head(&mut stdout).await?;
        let (mut sender, streamed) = Channel::new(1);
        tokio::spawn(async move {
            let mut piece = vec![0; 64 * 1024];
            while let Ok(length) = stdout.read(&mut piece).await {
                let data = Bytes::copy_from_slice(piece.get(..length).unwrap_or_default());
                if length == 0 || sender.send_data(data).await.is_err() {
                    break;
                }
            }
            let _ended = child.wait().await;
        });
        Ok(response.map(|()| streamed.boxed_unsync()))
    }

    fn backend(&self, head: &http::request::Parts) -> Command {
        let header = |name: &str| {
            let value = head.headers.get(name)?;
            Some(value.to_str().unwrap_or_default().to_owned())
        };
        let mut command = Command::new(&self.git);
        command
            .arg("http-backend")
            .env_clear()
            .env("PATH", std::env::var_os("PATH").unwrap_or_default())
            .env("GIT_CONFIG_NOSYSTEM", "1")
            .env("GIT_PROJECT_ROOT", &self.root)
            .env("GIT_HTTP_EXPORT_ALL", "1")
            .env("REMOTE_USER", "agent")
            .env("REQUEST_METHOD", head.method.as_str())
            .env("PATH_INFO", head.uri.path())
            .env("QUERY_STRING", head.uri.query().unwrap_or_default())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .kill_on_drop(true);
        for (variable, name) in [
            ("CONTENT_TYPE", "content-type"),
            ("CONTENT_LENGTH", "content-length"),
            ("HTTP_CONTENT_ENCODING", "content-encoding"),
            ("GIT_PROTOCOL", "git-protocol"),
        ] {
            if let Some(value) = header(name) {
                command.env(variable, value);
            }
        }
        command
    }

    fn count(&self, index: usize, length: usize) {
        let mut log = self.log.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(request) = log.get_mut(index) {
            request.length += u64::try_from(length).unwrap_or_default();
        }
    }

    /// Counts the bytes of a body and copies them to `to` until its reader closes.
    async fn copy(&self, index: usize, mut body: Incoming, mut to: Option<ChildStdin>) {
        while let Some(Ok(frame)) = body.frame().await {
            let Some(data) = frame.data_ref() else {
                continue;
            };
            self.count(index, data.len());
            if let Some(stdin) = &mut to
                && stdin.write_all(data).await.is_err()
            {
                to = None;
            }
        }
    }
}

fn full(bytes: Bytes) -> Body {
    Full::new(bytes)
        .map_err(|never| match never {})
        .boxed_unsync()
}

/// Reads the head of a CGI response (RFC 3875, section 6).
async fn read_head(
    stdout: &mut (impl AsyncBufReadExt + Unpin),
) -> Result<Response<()>, std::io::Error> {
    let mut response = Response::new(());
    let mut line = String::new();
    while stdout.read_line(&mut line).await? > 0 {
        let Some((name, value)) = line.trim_end().split_once(": ") else {
            break;
        };
        if name.eq_ignore_ascii_case("status") {
            let code = value.get(..3).unwrap_or_default();
            *response.status_mut() = code.parse().unwrap_or(StatusCode::BAD_GATEWAY);
        } else {
            let name = HeaderName::try_from(name).map_err(std::io::Error::other)?;
            let value = HeaderValue::from_str(value).map_err(std::io::Error::other)?;
            response.headers_mut().append(name, value);
        }
        line.clear();
    }
    Ok(response)
}
