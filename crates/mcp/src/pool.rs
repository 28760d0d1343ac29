//! Processes for requests without sessions.
//!
//! The servers behind the bridge know nothing of 2026-07-28: they want to be introduced to
//! one client with its capabilities, and what they ask names no call. So a process belongs
//! to one caller with one set of capabilities, and while a call is under way that may lead
//! to a question the process is that call's alone: whose question it is, is certain.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use tokio::sync::{Notify, broadcast, mpsc};
use tokio::time::Instant;

use crate::caller::{Caller, same};
use crate::handshake::{Ending, introduce};
use crate::launch::LaunchError;
use crate::metrics::Metrics;
use crate::process::{Home, Process};
use crate::rpc::{Kind, Message, code};
use crate::tools::Served;

/// The most processes of one caller for one server, by set of capabilities.
const MOST_WORKERS: usize = 16;

/// The most sets of capabilities that one caller has processes for, and servers times
/// callers.
const MOST_POOLS: usize = 256;

/// The most pools of one caller.
const MOST_OF_ONE: usize = 32;

/// How long a call waits for a process to be free.
const PATIENCE: Duration = Duration::from_secs(30);

/// News that wait for a slow listener.
const MOST_NEWS: usize = 64;

/// What a server says during a call and nobody has taken yet.
const MOST_SAID: usize = 256;

/// For whom a process is.
#[derive(Clone, Debug)]
pub struct Client {
    /// Who asks.
    pub caller: Caller,
    /// What the client can do, as an object, its keys in order.
    pub capabilities: String,
}

/// See the module.
#[derive(Debug, Default)]
pub struct Pools {
    pools: Mutex<Vec<Arc<Pool>>>,
}

#[derive(Debug)]
struct Pool {
    served: Arc<Served>,
    client: Client,
    inner: Mutex<Inner>,
    /// A process is free, or there is room for another.
    freed: Arc<Notify>,
    news: broadcast::Sender<Arc<Message>>,
}

#[derive(Debug)]
struct Inner {
    workers: Vec<Arc<Worker>>,
    starting: usize,
    used: Instant,
}

/// One process of a pool.
#[derive(Debug)]
pub struct Worker {
    process: Arc<Process>,
    introduction: String,
    inbox: Arc<Inbox>,
    leased: Mutex<bool>,
}

impl Worker {
    /// The process.
    pub fn process(&self) -> &Arc<Process> {
        &self.process
    }

    /// What the server said of itself.
    pub fn introduction(&self) -> &str {
        &self.introduction
    }

    fn is_leased(&self) -> bool {
        *self.leased.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A process that is one call's alone until this is dropped.
#[derive(Debug)]
pub struct Lease {
    worker: Arc<Worker>,
    freed: Arc<Notify>,
    said: mpsc::Receiver<Message>,
    spoiled: bool,
}

impl Lease {
    /// The process.
    pub fn process(&self) -> &Arc<Process> {
        &self.worker.process
    }

    /// The next thing that the server says by itself.
    pub async fn hear(&mut self) -> Option<Message> {
        self.said.recv().await
    }

    /// The next such thing, if it is already there.
    pub fn hear_now(&mut self) -> Option<Message> {
        self.said.try_recv().ok()
    }

    /// The process is not to be used again: nobody knows what it is still at.
    pub fn spoil(&mut self) {
        self.spoiled = true;
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        self.worker.inbox.set(None);
        if self.spoiled {
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

impl Pools {
    /// A process for a call that may lead to questions.
    pub async fn lease(
        &self,
        served: &Arc<Served>,
        client: &Client,
        metrics: &Metrics,
    ) -> Result<Lease, LaunchError> {
        let pool = self.pool(served, client)?;
        let worker = pool.get(metrics, |worker| {
            let mut leased = worker.leased.lock().unwrap_or_else(PoisonError::into_inner);
            !std::mem::replace(&mut *leased, true)
        });
        let worker = worker.await?;
        let (sender, said) = mpsc::channel(MOST_SAID);
        worker.inbox.set(Some(sender));
        Ok(Lease {
            worker,
            freed: Arc::clone(&pool.freed),
            said,
            spoiled: false,
        })
    }

    /// A process for a call that does not.
    pub async fn any(
        &self,
        served: &Arc<Served>,
        client: &Client,
        metrics: &Metrics,
    ) -> Result<Arc<Worker>, LaunchError> {
        self.pool(served, client)?.get(metrics, |_| true).await
    }

    /// What every process of a caller for a server tells of changes.
    pub fn news(
        &self,
        served: &Arc<Served>,
        client: &Client,
    ) -> Result<broadcast::Receiver<Arc<Message>>, LaunchError> {
        Ok(self.pool(served, client)?.news.subscribe())
    }

    fn pool(&self, served: &Arc<Served>, client: &Client) -> Result<Arc<Pool>, LaunchError> {
        let mut pools = self.pools.lock().unwrap_or_else(PoisonError::into_inner);
        let of_caller = |pool: &Arc<Pool>| same(&pool.client.caller, &client.caller);
        let beside = |pool: &&Arc<Pool>| Arc::ptr_eq(&pool.served, served) && of_caller(pool);
        let found = pools.iter().filter(beside);
        let mut found = found.filter(|pool| pool.client.capabilities == client.capabilities);
        if let Some(pool) = found.next() {
            pool.inner().used = Instant::now();
            return Ok(Arc::clone(pool));
        }
        let of_one = pools.iter().filter(|pool| of_caller(pool)).count();
        if pools.len() >= MOST_POOLS || of_one >= MOST_OF_ONE {
            let idle = pools.iter().enumerate();
            let idle = idle.filter(|(_, pool)| of_caller(pool) && pool.is_idle());
            let oldest = idle.min_by_key(|(_, pool)| pool.inner().used);
            let Some(index) = oldest.map(|(index, _)| index) else {
                let why = "too many kinds of clients have processes of it".to_owned();
                return Err(LaunchError::Failed(why));
            };
            pools.remove(index).end();
        }
        // Whatever a client can do, what it hears of changes is the same.
        let news = pools.iter().find(beside).map(|pool| pool.news.clone());
        let news = news.unwrap_or_else(|| broadcast::channel(MOST_NEWS).0);
        let pool = Arc::new(Pool {
            served: Arc::clone(served),
            client: client.clone(),
            inner: Mutex::new(Inner {
                workers: Vec::new(),
                starting: 0,
                used: Instant::now(),
            }),
            freed: Arc::default(),
            news,
        });
        pools.push(Arc::clone(&pool));
        Ok(pool)
    }

    /// Ends what nobody has used for `most`.
    pub fn sweep(&self, most: Duration) {
        let mut pools = self.pools.lock().unwrap_or_else(PoisonError::into_inner);
        pools.retain(|pool| {
            let gone = pool.served.stop().is_cancelled();
            let unused = pool.is_idle()
                && pool.news.receiver_count() == 0
                && pool.inner().used.elapsed() > most;
            if gone || unused {
                pool.end();
            }
            !gone && !unused
        });
    }

    /// Begins to end every process.
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

    fn look(&self, most: usize, take: impl Fn(&Worker) -> bool) -> Look {
        let mut inner = self.inner();
        inner.used = Instant::now();
        inner.workers.retain(|worker| worker.process.is_alive());
        if let Some(worker) = inner.workers.iter().find(|worker| take(worker)) {
            return Look::Found(Arc::clone(worker));
        }
        if inner.workers.len() + inner.starting < most {
            inner.starting += 1;
            return Look::Start;
        }
        Look::Wait
    }

    /// A process that `take` takes; another one is started where there is none.
    async fn get(
        self: &Arc<Self>,
        metrics: &Metrics,
        take: impl Fn(&Worker) -> bool,
    ) -> Result<Arc<Worker>, LaunchError> {
        // A shared server has one process, whoever asks.
        let most = if self.served.config().shared {
            1
        } else {
            MOST_WORKERS
        };
        let deadline = Instant::now() + PATIENCE;
        loop {
            let freed = self.freed.notified();
            tokio::pin!(freed);
            freed.as_mut().enable();
            match self.look(most, &take) {
                Look::Found(worker) => return Ok(worker),
                Look::Start => {
                    let worker = Starting(self).start(metrics).await?;
                    let taken = take(&worker);
                    self.inner().workers.push(Arc::clone(&worker));
                    self.freed.notify_waiters();
                    if taken {
                        return Ok(worker);
                    }
                    continue;
                }
                Look::Wait => {}
            }
            if tokio::time::timeout_at(deadline, freed).await.is_err() {
                let why = format!("all {most} processes of it are busy");
                return Err(LaunchError::Failed(why));
            }
        }
    }
}

/// What can be done for one who wants a process.
enum Look {
    Found(Arc<Worker>),
    /// There is room for another, and it is kept.
    Start,
    Wait,
}

/// Room for a process, given back when it is there or is not to be.
struct Starting<'a>(&'a Arc<Pool>);

impl Starting<'_> {
    async fn start(&self, metrics: &Metrics) -> Result<Arc<Worker>, LaunchError> {
        let pool = self.0;
        let launched = pool.served.launch(&pool.client.caller).await?;
        let inbox = Arc::new(Inbox {
            current: Mutex::default(),
            news: pool.news.clone(),
            process: Mutex::default(),
        });
        let home = Arc::clone(&inbox) as Arc<dyn Home>;
        let process = pool.served.keep(launched, home, metrics);
        inbox.know(&process);
        let ending = Ending::of(&process);
        let introduction = introduce(&process, &pool.served, &pool.client.capabilities).await?;
        ending.keep();
        // With the server's place in the settings its processes go.
        let (stop, watched) = (pool.served.stop().clone(), Arc::clone(&process));
        tokio::spawn(async move {
            tokio::select! {
                () = stop.cancelled() => watched.stop(),
                _ = watched.ended() => {}
            }
        });
        Ok(Arc::new(Worker {
            process,
            introduction,
            inbox,
            leased: Mutex::default(),
        }))
    }
}

impl Drop for Starting<'_> {
    fn drop(&mut self) {
        let mut inner = self.0.inner();
        inner.starting = inner.starting.saturating_sub(1);
        drop(inner);
        self.0.freed.notify_one();
    }
}

/// The home of a pool's process.
#[derive(Debug)]
struct Inbox {
    /// The call that has it.
    current: Mutex<Option<mpsc::Sender<Message>>>,
    news: broadcast::Sender<Arc<Message>>,
    process: Mutex<std::sync::Weak<Process>>,
}

impl Inbox {
    fn set(&self, current: Option<mpsc::Sender<Message>>) {
        *self.current.lock().unwrap_or_else(PoisonError::into_inner) = current;
    }

    fn know(&self, process: &Arc<Process>) {
        *self.process.lock().unwrap_or_else(PoisonError::into_inner) = Arc::downgrade(process);
    }
}

#[async_trait]
impl Home for Inbox {
    async fn hear(&self, message: Message) {
        let method = message.method().unwrap_or_default();
        if method.ends_with("/list_changed") || method == "notifications/resources/updated" {
            // Nobody may listen.
            drop(self.news.send(Arc::new(message)));
            return;
        }
        let current = self
            .current
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone();
        let unheard = match current {
            Some(current) => match current.send(message).await {
                Ok(()) => return,
                Err(unheard) => unheard.0,
            },
            None => message,
        };
        if unheard.kind() == Kind::Request {
            let process = self
                .process
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .upgrade();
            let id = unheard.id().unwrap_or("null");
            let text = "no call is open that this could be about";
            let refused = Message::failure(id, code::INTERNAL, text, None);
            if let Some(process) = process {
                // Not here: the server may not read before it has been read.
                tokio::spawn(async move { process.offer(&refused).await });
            }
        }
    }
}
