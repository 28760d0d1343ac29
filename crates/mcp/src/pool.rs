//! Pools of server processes for requests without sessions.
//!
//! The servers behind the bridge do not implement revision 2026-07-28: they are initialized for
//! one client with its capabilities, and their requests to the client name no call. So a process
//! serves one caller with one set of capabilities. A call during which the server may send
//! requests leases the process exclusively, so that each request belongs to a known call.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use tokio::sync::{Notify, broadcast, mpsc};
use tokio::time::Instant;

use crate::caller::{McpCaller, is_same_caller};
use crate::handshake::{ProcessStopGuard, initialize};
use crate::launch::LaunchError;
use crate::metrics::Metrics;
use crate::process::{MessageHandler, Process};
use crate::rpc::{RpcKind, RpcMessage, code};
use crate::tools::StdioServer;

/// Maximum number of processes in one pool.
const MAX_WORKERS: usize = 16;

/// Maximum number of pools: one for each combination of server, caller and capabilities.
const MAX_POOLS: usize = 256;

/// Maximum number of pools of one caller.
const MAX_POOLS_PER_CALLER: usize = 32;

/// How long a call waits for a free process.
const FREE_WORKER_TIMEOUT: Duration = Duration::from_secs(30);

/// Maximum number of change notifications queued for a slow subscriber.
const MAX_QUEUED_CHANGES: usize = 64;

/// Maximum number of unread server messages of one call.
const MAX_QUEUED_MESSAGES: usize = 256;

/// The client that a pool serves.
#[derive(Clone, Debug)]
pub struct PoolClient {
    /// Identity of the client.
    pub caller: McpCaller,
    /// The client's capabilities: a JSON object with sorted keys.
    pub capabilities: String,
}

/// All pools of server processes.
#[derive(Debug, Default)]
pub struct ProcessPools {
    pools: Mutex<Vec<Arc<Pool>>>,
}

#[derive(Debug)]
struct Pool {
    server: Arc<StdioServer>,
    client: PoolClient,
    inner: Mutex<Inner>,
    /// Notified when a process becomes free or another may be started.
    freed: Arc<Notify>,
    changes: broadcast::Sender<Arc<RpcMessage>>,
}

#[derive(Debug)]
struct Inner {
    workers: Vec<Arc<Worker>>,
    starting: usize,
    last_used: Instant,
}

/// One process of a pool.
#[derive(Debug)]
pub struct Worker {
    process: Arc<Process>,
    initialize_result: String,
    inbox: Arc<Inbox>,
    leased: Mutex<bool>,
}

impl Worker {
    /// The process of this worker.
    pub fn process(&self) -> &Arc<Process> {
        &self.process
    }

    /// The result of the server's `initialize`.
    pub fn initialize_result(&self) -> &str {
        &self.initialize_result
    }

    fn is_leased(&self) -> bool {
        *self.leased.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Exclusive use of a process by one call, until this is dropped.
#[derive(Debug)]
pub struct Lease {
    worker: Arc<Worker>,
    freed: Arc<Notify>,
    messages: mpsc::Receiver<RpcMessage>,
    discarded: bool,
}

impl Lease {
    /// The process of this worker.
    pub fn process(&self) -> &Arc<Process> {
        &self.worker.process
    }

    /// Waits for the next request or notification of the server.
    pub async fn recv(&mut self) -> Option<RpcMessage> {
        self.messages.recv().await
    }

    /// The next request or notification, if one is queued.
    pub fn try_recv(&mut self) -> Option<RpcMessage> {
        self.messages.try_recv().ok()
    }

    /// Marks the process as not reusable: it may still work on the call. It is stopped on drop.
    pub fn discard(&mut self) {
        self.discarded = true;
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        self.worker.inbox.set(None);
        if self.discarded {
            self.worker.process.stop();
        }
        *self
            .worker
            .leased
            .lock()
            .unwrap_or_else(PoisonError::into_inner) = false;
        self.freed.notify_one();
    }
}

impl ProcessPools {
    /// Leases a process for a call during which the server may send requests.
    pub async fn lease(
        &self,
        server: &Arc<StdioServer>,
        client: &PoolClient,
        metrics: &Metrics,
    ) -> Result<Lease, LaunchError> {
        let pool = self.pool(server, client)?;
        let worker = pool.get_worker(metrics, |worker| {
            let mut leased = worker.leased.lock().unwrap_or_else(PoisonError::into_inner);
            !std::mem::replace(&mut *leased, true)
        });
        let worker = worker.await?;
        let (sender, messages) = mpsc::channel(MAX_QUEUED_MESSAGES);
        worker.inbox.set(Some(sender));
        Ok(Lease {
            worker,
            freed: Arc::clone(&pool.freed),
            messages,
            discarded: false,
        })
    }

    /// A process for a call during which the server sends no requests. The process may serve other
    /// calls at the same time.
    pub async fn get_worker(
        &self,
        server: &Arc<StdioServer>,
        client: &PoolClient,
        metrics: &Metrics,
    ) -> Result<Arc<Worker>, LaunchError> {
        self.pool(server, client)?
            .get_worker(metrics, |_| true)
            .await
    }

    /// Subscribes to the change notifications of all processes of a caller for a server.
    pub fn subscribe(
        &self,
        server: &Arc<StdioServer>,
        client: &PoolClient,
    ) -> Result<broadcast::Receiver<Arc<RpcMessage>>, LaunchError> {
        Ok(self.pool(server, client)?.changes.subscribe())
    }

    fn pool(
        &self,
        server: &Arc<StdioServer>,
        client: &PoolClient,
    ) -> Result<Arc<Pool>, LaunchError> {
        let mut pools = self.pools.lock().unwrap_or_else(PoisonError::into_inner);
        let of_caller = |pool: &Arc<Pool>| is_same_caller(&pool.client.caller, &client.caller);
        let is_same_server_and_caller =
            |pool: &&Arc<Pool>| Arc::ptr_eq(&pool.server, server) && of_caller(pool);
        let found = pools.iter().filter(is_same_server_and_caller);
        let mut found = found.filter(|pool| pool.client.capabilities == client.capabilities);
        if let Some(pool) = found.next() {
            pool.inner().last_used = Instant::now();
            return Ok(Arc::clone(pool));
        }
        let caller_pools = pools.iter().filter(|pool| of_caller(pool)).count();
        if pools.len() >= MAX_POOLS || caller_pools >= MAX_POOLS_PER_CALLER {
            let idle = pools.iter().enumerate();
            let idle = idle.filter(|(_, pool)| of_caller(pool) && pool.is_idle());
            let oldest = idle.min_by_key(|(_, pool)| pool.inner().last_used);
            let Some(index) = oldest.map(|(index, _)| index) else {
                let why =
                    "too many process pools are in use; close other clients and retry".to_owned();
                return Err(LaunchError::Failed(why));
            };
            pools.remove(index).end();
        }
        // Change notifications do not depend on the capabilities of the client.
        let changes = pools
            .iter()
            .find(is_same_server_and_caller)
            .map(|pool| pool.changes.clone());
        let changes = changes.unwrap_or_else(|| broadcast::channel(MAX_QUEUED_CHANGES).0);
        let pool = Arc::new(Pool {
            server: Arc::clone(server),
            client: client.clone(),
            inner: Mutex::new(Inner {
                workers: Vec::new(),
                starting: 0,
                last_used: Instant::now(),
            }),
            freed: Arc::default(),
            changes,
        });
        pools.push(Arc::clone(&pool));
        Ok(pool)
    }

    /// Ends pools that were unused for longer than `max_idle`.
    pub fn sweep(&self, max_idle: Duration) {
        let mut pools = self.pools.lock().unwrap_or_else(PoisonError::into_inner);
        pools.retain(|pool| {
            let is_removed = pool.server.stop().is_cancelled();
            let is_unused = pool.is_idle()
                && pool.changes.receiver_count() == 0
                && pool.inner().last_used.elapsed() > max_idle;
            if is_removed || is_unused {
                pool.end();
            }
            !is_removed && !is_unused
        });
    }

    /// Starts to end every process; does not wait.
    pub fn end(&self) {
        let pools = std::mem::take(&mut *self.pools.lock().unwrap_or_else(PoisonError::into_inner));
        for pool in &pools {
            pool.end();
        }
    }
}

impl Pool {
    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn is_idle(&self) -> bool {
        let inner = self.inner();
        inner.starting == 0 && !inner.workers.iter().any(|worker| worker.is_leased())
    }

    fn end(&self) {
        for worker in &self.inner().workers {
            worker.process.stop();
        }
    }

    fn find_worker(&self, max_workers: usize, try_take: impl Fn(&Worker) -> bool) -> Availability {
        let mut inner = self.inner();
        inner.last_used = Instant::now();
        inner.workers.retain(|worker| worker.process.is_alive());
        if let Some(worker) = inner.workers.iter().find(|worker| try_take(worker)) {
            return Availability::Found(Arc::clone(worker));
        }
        if inner.workers.len() + inner.starting < max_workers {
            inner.starting += 1;
            return Availability::Start;
        }
        Availability::Wait
    }

    /// A process that `try_take` accepts. Starts another process if none is accepted.
    async fn get_worker(
        self: &Arc<Self>,
        metrics: &Metrics,
        try_take: impl Fn(&Worker) -> bool,
    ) -> Result<Arc<Worker>, LaunchError> {
        // A shared server has one process for all callers.
        let max_workers = if self.server.config().shared {
            1
        } else {
            MAX_WORKERS
        };
        let deadline = Instant::now() + FREE_WORKER_TIMEOUT;
        loop {
            let freed = self.freed.notified();
            tokio::pin!(freed);
            freed.as_mut().enable();
            match self.find_worker(max_workers, &try_take) {
                Availability::Found(worker) => return Ok(worker),
                Availability::Start => {
                    let worker = StartSlot(self).start(metrics).await?;
                    let taken = try_take(&worker);
                    self.inner().workers.push(Arc::clone(&worker));
                    self.freed.notify_waiters();
                    if taken {
                        return Ok(worker);
                    }
                    continue;
                }
                Availability::Wait => {}
            }
            if tokio::time::timeout_at(deadline, freed).await.is_err() {
                let why =
                    format!("all {max_workers} processes of the server are busy; retry later");
                return Err(LaunchError::Failed(why));
            }
        }
    }
}

/// How a request for a process can be served.
enum Availability {
    Found(Arc<Worker>),
    /// Another process may be started; its slot is reserved.
    Start,
    Wait,
}

/// Reserves the slot of a starting process until its start has succeeded or failed.
struct StartSlot<'a>(&'a Arc<Pool>);

impl StartSlot<'_> {
    async fn start(&self, metrics: &Metrics) -> Result<Arc<Worker>, LaunchError> {
        let pool = self.0;
        let launched = pool.server.launch(&pool.client.caller).await?;
        let inbox = Arc::new(Inbox {
            current: Mutex::default(),
            changes: pool.changes.clone(),
            process: Mutex::default(),
        });
        let handler = Arc::clone(&inbox) as Arc<dyn MessageHandler>;
        let process = pool.server.attach(launched, handler, metrics);
        inbox.set_process(&process);
        let stop_guard = ProcessStopGuard::new(&process);
        let initialize_result =
            initialize(&process, &pool.server, &pool.client.capabilities).await?;
        stop_guard.disarm();
        // The process ends when the server is removed from the settings.
        let (stop, watched) = (pool.server.stop().clone(), Arc::clone(&process));
        tokio::spawn(async move {
            tokio::select! {
                () = stop.cancelled() => watched.stop(),
                _ = watched.wait_for_end() => {}
            }
        });
        Ok(Arc::new(Worker {
            process,
            initialize_result,
            inbox,
            leased: Mutex::default(),
        }))
    }
}

impl Drop for StartSlot<'_> {
    fn drop(&mut self) {
        let mut inner = self.0.inner();
        inner.starting = inner.starting.saturating_sub(1);
        drop(inner);
        self.0.freed.notify_one();
    }
}

/// Routes the messages of a pooled process to the current call or to subscribers.
#[derive(Debug)]
struct Inbox {
    /// The call that leases the process.
    current: Mutex<Option<mpsc::Sender<RpcMessage>>>,
    changes: broadcast::Sender<Arc<RpcMessage>>,
    process: Mutex<std::sync::Weak<Process>>,
}

impl Inbox {
    fn set(&self, current: Option<mpsc::Sender<RpcMessage>>) {
        *self.current.lock().unwrap_or_else(PoisonError::into_inner) = current;
    }

    fn set_process(&self, process: &Arc<Process>) {
        *self.process.lock().unwrap_or_else(PoisonError::into_inner) = Arc::downgrade(process);
    }
}

#[async_trait]
impl MessageHandler for Inbox {
    async fn handle(&self, message: RpcMessage) {
        let method = message.method().unwrap_or_default();
        if method.ends_with("/list_changed") || method == "notifications/resources/updated" {
            // There may be no subscriber.
            drop(self.changes.send(Arc::new(message)));
            return;
        }
        let current = self
            .current
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone();
        let undelivered = match current {
            Some(current) => match current.send(message).await {
                Ok(()) => return,
                Err(undelivered) => undelivered.0,
            },
            None => message,
        };
        if undelivered.kind() == RpcKind::Request {
            let process = self
                .process
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .upgrade();
            let id = undelivered.id().unwrap_or("null");
            let text = "no call is open to which this request could belong";
            let refused = RpcMessage::failure(id, code::INTERNAL_ERROR, text, None);
            if let Some(process) = process {
                // In a task: the server may not read its input until its output is read.
                tokio::spawn(async move { process.send_best_effort(&refused).await });
            }
        }
    }
}
