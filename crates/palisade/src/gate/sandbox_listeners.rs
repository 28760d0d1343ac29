//! The traffic of every sandbox: which are served, and which of their ports are published.

use std::collections::HashMap;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use config::section::egress::DomainRule;
use control::sandboxes::{Inside, ListenerHost};
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
    sandboxes: Mutex<HashMap<SandboxId, Lease>>,
}

/// What is served for one sandbox.
#[derive(Debug)]
struct Lease {
    /// Ends all of it.
    stop: CancellationToken,
    /// Each published port, with what ends it.
    ports: HashMap<SocketAddr, CancellationToken>,
}

impl SandboxListeners {
    /// Serves no sandbox yet. Must be called in the runtime that serves them.
    pub fn new(traffic: Arc<Services>, stop: CancellationToken) -> Self {
        Self {
            runtime: Handle::current(),
            traffic,
            stop,
            tasks: TaskTracker::new(),
            sandboxes: Mutex::default(),
        }
    }

    /// Waits until every conversation has ended, which the stop makes them do.
    pub async fn drain(&self) {
        self.tasks.close();
        self.tasks.wait().await;
    }

    fn leases(&self) -> MutexGuard<'_, HashMap<SandboxId, Lease>> {
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
        let doors = listeners
            .into_iter()
            .map(|listener| match listener.transport {
                ListenerTransport::Tcp => SandboxSocket::Stream(listener.socket),
                ListenerTransport::Udp => SandboxSocket::Datagram(listener.socket),
                ListenerTransport::Closed => SandboxSocket::Closed(listener.socket),
            })
            .collect();
        let stop = self.stop.child_token();
        let lease = Lease {
            stop: stop.clone(),
            ports: HashMap::new(),
        };
        if let Some(before) = self.leases().insert(sandbox.clone(), lease) {
            before.stop.cancel();
        }
        let (traffic, id) = (Arc::clone(&self.traffic), sandbox.clone());
        self.tasks.spawn_on(
            async move {
                if let Err(error) = listeners::serve(traffic, id.clone(), doors, stop).await {
                    tracing::error!(sandbox = %id, %error, "a sandbox is not served");
                }
            },
            &self.runtime,
        );
        Ok(())
    }

    fn publish(&self, sandbox: &SandboxId, listener: TcpListener, to: Inside) {
        let Ok(host) = listener.local_addr() else {
            return;
        };
        let stop = {
            let mut leases = self.leases();
            let Some(lease) = leases.get_mut(sandbox) else {
                return;
            };
            let stop = lease.stop.child_token();
            if let Some(before) = lease.ports.insert(host, stop.clone()) {
                before.cancel();
            }
            stop
        };
        self.tasks.spawn_on(
            async move {
                if let Err(error) = publish::serve(listener, Arc::new(Way(to)), stop).await {
                    tracing::error!(%host, %error, "a port is not published");
                }
            },
            &self.runtime,
        );
    }

    fn unpublish(&self, sandbox: &SandboxId, host: SocketAddr) {
        let mut leases = self.leases();
        let taken = leases
            .get_mut(sandbox)
            .and_then(|lease| lease.ports.remove(&host));
        if let Some(taken) = taken {
            taken.cancel();
        }
    }

    fn detach(&self, sandbox: &SandboxId) {
        if let Some(lease) = self.leases().remove(sandbox) {
            lease.stop.cancel();
        }
        self.traffic.dismiss(sandbox);
    }

    fn serves(&self, sandbox: &SandboxId) -> bool {
        self.leases().contains_key(sandbox)
    }

    fn trust(&self) -> Trust {
        control::traffic_actions::trust_in(&self.traffic.authority().load())
    }

    fn has_older_roots(&self) -> bool {
        let now = control::wall_now();
        self.traffic.authority().load().bridges(now) > 0
    }
}

/// The way to a port inside.
struct Way(Inside);

#[async_trait::async_trait]
impl publish::Inside for Way {
    async fn connect(&self) -> std::io::Result<TcpStream> {
        let inside = self.0.clone();
        tokio::task::spawn_blocking(move || inside.connect())
            .await
            .map_err(std::io::Error::other)?
    }
}
