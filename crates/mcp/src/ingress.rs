//! MCP listener: its socket stays open as long as its address is configured, and a reload may
//! change its rules.
//!
//! A connection keeps the rules under which it was accepted. When the rules change, or the listener
//! closes, the request in flight is finished under the old rules and the connection ends. No
//! request is answered under weaker rules than the rules under which its connection was accepted.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use arc_swap::ArcSwap;
use hyper::service::service_fn;
use tokio::net::{TcpListener, TcpStream};
use tokio_util::sync::CancellationToken;

use crate::server::{self, ListenerRules, McpServer, RequestSource};

/// The most connections of one listener at a time.
const MAX_CONNECTIONS: usize = 4096;

/// How long requests in flight may take when a reload closes their listener or changes its
/// rules.
const RELOAD_TIMEOUT: Duration = Duration::from_secs(10);

/// An open listener.
#[derive(Debug)]
pub struct Ingress {
    current: ArcSwap<Generation>,
    /// Cancelled when the connections that are still open are closed at once.
    cut_off: CancellationToken,
    /// Cancelled when no further connection is accepted.
    stop: CancellationToken,
    /// Cancelled when the socket is closed.
    closed: CancellationToken,
}

/// The rules of a listener, and the connections that were accepted under them.
#[derive(Debug)]
struct Generation {
    source: RequestSource,
    /// Cancelled when other rules are in force: the connections finish their requests and end.
    retired: CancellationToken,
}

impl Ingress {
    /// A listener with these rules, until `gate` is cancelled or the listener is closed. Requests
    /// in flight are finished then, until `cut_off` is cancelled.
    pub fn new(
        rules: ListenerRules,
        gate: &CancellationToken,
        cut_off: &CancellationToken,
    ) -> Arc<Self> {
        let stop = gate.child_token();
        Arc::new(Self {
            current: ArcSwap::from_pointee(Generation {
                source: RequestSource::Network(rules),
                retired: stop.child_token(),
            }),
            cut_off: cut_off.clone(),
            stop,
            closed: CancellationToken::new(),
        })
    }

    /// Applies new rules to every connection that is accepted from now on, and ends the
    /// connections that were accepted under other rules. Returns whether the rules changed.
    pub fn replace(&self, rules: ListenerRules) -> bool {
        let old = self.current.load_full();
        if matches!(&old.source, RequestSource::Network(before) if *before == rules) {
            return false;
        }
        self.current.store(Arc::new(Generation {
            source: RequestSource::Network(rules),
            retired: self.stop.child_token(),
        }));
        old.retired.cancel();
        true
    }

    /// Whether the socket is open.
    pub fn is_serving(&self) -> bool {
        !self.closed.is_cancelled()
    }

    /// Closes the listener, and returns when its socket is closed. Requests in flight may still
    /// run after that.
    pub async fn close(&self) {
        self.stop.cancel();
        self.closed.cancelled().await;
    }
}

/// Accepts connections until the listener is closed or the gate stops, and returns when all
/// connections have ended.
pub async fn serve(mcp_server: Arc<McpServer>, socket: Arc<TcpListener>, ingress: Arc<Ingress>) {
    // A drop guard, so that `Ingress::close` also returns if this function panics.
    let closed = ingress.closed.clone().drop_guard();
    let begin = |stream: TcpStream| {
        let generation = ingress.current.load_full();
        let (mcp_server, cut_off) = (Arc::clone(&mcp_server), ingress.cut_off.clone());
        Some(async move {
            let service = service_fn(|request| {
                let (mcp_server, generation) = (Arc::clone(&mcp_server), Arc::clone(&generation));
                async move {
                    let answer = server::answer(&mcp_server, &generation.source, request).await;
                    Ok::<_, Infallible>(answer)
                }
            });
            let retired = &generation.retired;
            tokio::select! {
                () = listen::http1(stream, service, retired, Some(RELOAD_TIMEOUT)) => {}
                () = cut_off.cancelled() => {}
            }
        })
    };
    let remaining = listen::accept_all(&*socket, MAX_CONNECTIONS, &ingress.stop, begin).await;
    drop(socket);
    drop(closed);
    remaining.wait().await;
}
