//! Who may speak at the control socket: one uid, and it only so often.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use hyper::service::service_fn;
use listen::PrivateSocket;
use policy::clock::Tick;
use policy::window::SlidingWindow;
use tokio::net::UnixStream;
use tokio_util::sync::CancellationToken;

use crate::dispatch::Gate;
use crate::door;

/// Connections served at once. The door is for people and their tools, not for traffic.
const MAX_CONNECTIONS: usize = 256;

/// Writes to the registry that one uid may make within a second.
const WRITES_PER_SECOND: usize = 10;

/// Serves the door until `stop`, then lets the requests in flight finish. The caller
/// bounds that wait.
pub async fn serve(socket: &PrivateSocket, gate: Arc<Gate>, stop: CancellationToken) {
    let allowed = nix::unistd::geteuid().as_raw();
    let writes = Arc::new(WriteWindow::default());
    let begin = |stream: UnixStream| {
        let peer = match stream.peer_cred() {
            Ok(credentials) => credentials.uid(),
            Err(error) => {
                tracing::warn!(%error, "a control client without credentials was refused");
                return None;
            }
        };
        let client = Client {
            allowed: peer == allowed,
            writes: Arc::clone(&writes),
        };
        if !client.allowed {
            tracing::warn!(uid = peer, "a control client of another user was refused");
        }
        let (gate, stop) = (Arc::clone(&gate), stop.clone());
        Some(async move {
            let service = service_fn(|request| door::answer(&gate, &client, request));
            listen::http1(stream, service, &stop, None).await;
        })
    };
    let left = listen::accept_all(socket, MAX_CONNECTIONS, &stop, begin).await;
    left.wait().await;
}

/// Who is on the other end of one connection.
#[derive(Debug)]
pub struct Client {
    allowed: bool,
    writes: Arc<WriteWindow>,
}

impl Client {
    /// Whether this uid may speak to this gate at all.
    pub(crate) fn is_allowed(&self) -> bool {
        self.allowed
    }

    /// Counts one write; refused beyond the limit, with the time to wait.
    pub(crate) fn count_write(&self) -> Result<(), Duration> {
        self.writes.take()
    }
}

/// The writes of the last second. The limit is per uid, and only one uid gets this far.
#[derive(Debug)]
struct WriteWindow {
    origin: Instant,
    window: Mutex<SlidingWindow<WRITES_PER_SECOND>>,
}

impl Default for WriteWindow {
    fn default() -> Self {
        let window = Mutex::new(SlidingWindow::new(Duration::from_secs(1)));
        Self {
            origin: Instant::now(),
            window,
        }
    }
}

impl WriteWindow {
    fn take(&self) -> Result<(), Duration> {
        let now = Tick::default() + self.origin.elapsed();
        self.window
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take(now)
    }
}
