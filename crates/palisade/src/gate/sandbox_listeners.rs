//! Listeners of sandboxes: serves their traffic and their published ports.

use std::collections::HashMap;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use config::section::egress::DomainRule;
use control::sandboxes::{ListenerHost, SandboxPort};
use egress::listeners::{self, SandboxSocket};
use egress::publish;
use egress::services::Services;
use policy::id::SandboxId;
use sandbox::contract::{ListenerTransport, SandboxListener, Trust};
use tokio::runtime::Handle;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

/// Serves sandboxes, each until it is detached or the gate stops.
#[derive(Debug)]
pub struct SandboxListeners {
    runtime: Handle,
    traffic: Arc<Services>,
    stop: CancellationToken,
    tasks: TaskTracker,
    sandboxes: Mutex<HashMap<SandboxId, ServedSandbox>>,
}

/// The tasks that serve one sandbox.
#[derive(Debug)]
struct ServedSandbox {
    /// Ends all tasks of the sandbox.
    stop: CancellationToken,
    /// Each published port, with the token that ends it.
    ports: HashMap<SocketAddr, CancellationToken>,
}

impl SandboxListeners {
    /// Creates the set without sandboxes. Must be called in the runtime that serves them.
    pub fn new(traffic: Arc<Services>, stop: CancellationToken) -> Self {
        Self {
            runtime: Handle::current(),
            traffic,
            stop,
            tasks: TaskTracker::new(),
            sandboxes: Mutex::default(),
        }
    }

    /// Waits until every connection has ended; the shutdown ends them.
    pub async fn drain(&self) {
        self.tasks.close();
        self.tasks.wait().await;
    }

    fn lock_sandboxes(&self) -> MutexGuard<'_, HashMap<SandboxId, ServedSandbox>> {
        self.sandboxes
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }
}

impl ListenerHost for SandboxListeners {
    fn attach(
        &self,
        sandbox: &SandboxId,
        listeners: Vec<SandboxListener>,
        added: Vec<DomainRule>,
    ) -> std::io::Result<()> {
        let state = self.traffic.sandbox(sandbox);
        state.map_err(std::io::Error::other)?.added.set(added);
        let sockets = listeners
            .into_iter()
            .map(|listener| match listener.transport {
                ListenerTransport::Tcp => SandboxSocket::Stream(listener.socket),
                ListenerTransport::Udp => SandboxSocket::Datagram(listener.socket),
                ListenerTransport::Closed => SandboxSocket::ClosedPorts(listener.socket),
            })
            .collect();
        let stop = self.stop.child_token();
        let new = ServedSandbox {
            stop: stop.clone(),
            ports: HashMap::new(),
        };
        if let Some(before) = self.lock_sandboxes().insert(sandbox.clone(), new) {
            before.stop.cancel();
        }
        let (traffic, id) = (Arc::clone(&self.traffic), sandbox.clone());
        self.tasks.spawn_on(
            async move {
                if let Err(error) = listeners::serve(traffic, id.clone(), sockets, stop).await {
                    tracing::error!(sandbox = %id, %error, "sandbox listener failed");
                }
            },
            &self.runtime,
        );
        Ok(())
    }

    fn publish(&self, sandbox: &SandboxId, listener: TcpListener, target: SandboxPort) {
        let Ok(host) = listener.local_addr() else {
            return;
        };
        let stop = {
            let mut served = self.lock_sandboxes();
            let Some(entry) = served.get_mut(sandbox) else {
                return;
            };
            let stop = entry.stop.child_token();
            if let Some(before) = entry.ports.insert(host, stop.clone()) {
                before.cancel();
            }
            stop
        };
        self.tasks.spawn_on(
            async move {
                if let Err(error) =
                    publish::serve(listener, Arc::new(PublishedPortTarget(target)), stop).await
                {
                    tracing::error!(%host, %error, "publishing a port failed");
                }
            },
            &self.runtime,
        );
    }

    fn unpublish(&self, sandbox: &SandboxId, host: SocketAddr) {
        let mut served = self.lock_sandboxes();
        let token = served
            .get_mut(sandbox)
            .and_then(|entry| entry.ports.remove(&host));
        if let Some(token) = token {
            token.cancel();
        }
    }

    fn detach(&self, sandbox: &SandboxId) {
        if let Some(entry) = self.lock_sandboxes().remove(sandbox) {
            entry.stop.cancel();
        }
        self.traffic.remove_sandbox(sandbox);
    }

    fn serves(&self, sandbox: &SandboxId) -> bool {
        self.lock_sandboxes().contains_key(sandbox)
    }

    fn trust(&self) -> Trust {
        control::traffic_actions::trusted_root(&self.traffic.authority().load())
    }

    fn has_older_roots(&self) -> bool {
        let now = control::wall_now();
        self.traffic.authority().load().cross_signed_count(now) > 0
    }
}

/// Connects to a port in a sandbox.
struct PublishedPortTarget(SandboxPort);

#[async_trait::async_trait]
impl publish::PortConnector for PublishedPortTarget {
    async fn connect(&self) -> std::io::Result<TcpStream> {
        let port = self.0.clone();
        tokio::task::spawn_blocking(move || port.connect())
            .await
            .map_err(std::io::Error::other)?
    }
}
