//! New settings while the gate runs.
//!
//! Validate all, prepare all, then put all of it in force by steps that cannot fail. Whatever
//! is wrong, the old snapshot stays and log, health, metrics and audit report the failure.
//!
//! A change is taken once the files hold still: an editor that truncates and writes, or
//! a script that writes a hundred times, leaves behind moments in which the file is
//! valid and wrong. Two readings a moment apart must agree before anything is built, and
//! a file that is open for writing is given longer. The same holds
//! for policy bundles and the file of the system's resolvers, which are read in the swap.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex as StdMutex, MutexGuard, PoisonError};
use std::time::Duration;

use anyhow::Result;
use config::bundle::BundleReadError;
use config::{Settings, Sources};
use control::gate::ReloadRequest;
use control::health::HealthRegistry;
use control::wall_now;
use decide::snapshot::{CurrentPolicy, PolicySnapshot};
use egress::dialer::BadRoots;
use egress::services::{PreparedServices, Services};
use notify::event::{AccessKind, AccessMode, ModifyKind};
use notify::{EventKind, RecommendedWatcher, RecursiveMode, Watcher};
use policy::audit::{AuditEvent, Kind};
use store::Store;
use store::audit::AuditOptions;
use tokio::signal::unix::Signal;
use tokio::sync::{Mutex, Notify, mpsc};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tracing_subscriber::EnvFilter;

use crate::gate::network_listeners::{NetworkListeners, PreparedNetworkListeners};
use crate::gate::tools::{PreparedListeners, Tools};
use crate::gate::{POLICY_LOADED, audit_options, environment};
use crate::paths::ConfigPath;
use crate::telemetry::Telemetry;
use crate::telemetry::process_metrics::ProcessMetrics;

/// File systems and editors that send no event are caught by looking.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// How long the files must hold still.
const SETTLE: Duration = Duration::from_millis(150);

/// Sections that are read once, at the start.
const AT_START: &[&str] = &["/metrics/tracing/", "/logging/format"];

/// How long a file must hold still whose writer has not closed it. The writer may be slow;
/// it may also never close it.
const SETTLE_OPEN: Duration = Duration::from_secs(2);

/// Events come in crowds; one look answers all of them.
const GATHER: Duration = Duration::from_millis(20);

/// A change that has not held still for long enough.
#[derive(Clone, Copy)]
struct PendingChange {
    print: [u8; 32],
    /// Events until then. A file that is written again and again is empty again and again:
    /// the same content twice does not mean that nothing happened in between.
    events: u64,
    since: Instant,
}

/// New settings of which nothing can fail any more, and nothing is in force yet.
struct PreparedReload {
    shared: PreparedNetworkListeners,
    listeners: PreparedListeners,
    filter: EnvFilter,
    audit: AuditOptions,
    snapshot: Arc<PolicySnapshot>,
    traffic: PreparedServices,
}

/// Why settings cannot be put in force.
enum ReloadError {
    /// A policy bundle cannot be used.
    Policy(String),
    Other(String),
}

impl From<BundleReadError> for ReloadError {
    fn from(bad: BundleReadError) -> Self {
        ReloadError::Policy(bad.to_string())
    }
}

impl From<BadRoots> for ReloadError {
    fn from(bad: BadRoots) -> Self {
        ReloadError::Other(bad.to_string())
    }
}

impl From<String> for ReloadError {
    fn from(why: String) -> Self {
        ReloadError::Other(why)
    }
}

/// Everything a reload touches.
#[derive(Debug)]
pub struct Reloader {
    /// The operator's file, once it is there.
    pub config: ConfigPath,
    /// Where health shows it.
    pub health_registry: Arc<HealthRegistry>,
    /// Where it is counted.
    pub numbers: ProcessMetrics,
    /// Level and secrets follow.
    pub telemetry: Arc<Telemetry>,
    /// Audit options follow, and the log records it.
    pub store: Store,
    /// The rules in force: the one pointer that a reload swaps.
    pub policy: Arc<CurrentPolicy>,
    /// The way out and the resolvers follow, and requests in flight are decided again.
    pub traffic: Arc<Services>,
    /// Listeners on shared networks follow.
    pub shared: Arc<NetworkListeners>,
    /// Tools and their policies follow.
    pub tools: Arc<Tools>,
    /// Requests over the control socket.
    pub requests: Mutex<mpsc::Receiver<ReloadRequest>>,
    /// SIGHUP.
    pub hangup: Mutex<Signal>,
    /// The files as they were when they were last taken or refused.
    pub seen: Mutex<[u8; 32]>,
    /// Notified when the settings have changed.
    pub changed: Arc<Notify>,
}

impl Reloader {
    /// Watches, listens and reloads until `stop`.
    ///
    /// Nothing in here waits for anything but the next event, so that a file which never
    /// holds still delays neither a request nor a signal.
    pub async fn run(self: Arc<Self>, stop: CancellationToken) -> Result<()> {
        let changed = Arc::new(Notify::new());
        let mut watch = FileWatch::new(&changed);
        watch.follow(&self.read().await?);
        let mut hangup = self.hangup.lock().await;
        let mut requests = self.requests.lock().await;
        let mut pending: Option<PendingChange> = None;
        let mut look_at = Instant::now() + LOOK_EVERY;
        loop {
            let forced = tokio::select! {
                () = stop.cancelled() => return Ok(()),
                Some(answer) = requests.recv() => Some(Some(answer)),
                _ = hangup.recv() => {
                    tracing::info!("SIGHUP: reading the configuration again");
                    Some(None)
                }
                () = changed.notified() => {
                    look_at = look_at.min(Instant::now() + GATHER);
                    continue;
                }
                () = tokio::time::sleep_until(look_at) => None,
            };
            let events = watch.events();
            let sources = self.read().await?;
            watch.follow(&sources);
            if let Some(answer) = forced {
                pending = None;
                let outcome = self.take(sources).await;
                if let Some(answer) = answer {
                    // The asker may have hung up; the reload happened all the same.
                    let _ = answer.send(outcome);
                }
                continue;
            }
            let now = Instant::now();
            let print = sources.fingerprint();
            if print == *self.seen.lock().await {
                pending = None;
            } else if pending.is_none_or(|b| (b.print, b.events) != (print, events)) {
                pending = Some(PendingChange {
                    print,
                    events,
                    since: now,
                });
            }
            let settle = if watch.is_being_written() {
                SETTLE_OPEN
            } else {
                SETTLE
            };
            look_at = match pending {
                Some(before) if before.since + settle <= now => {
                    pending = None;
                    // `take` has reported a refusal.
                    let _ = self.take(sources).await;
                    now + LOOK_EVERY
                }
                Some(before) => before.since + settle,
                None => now + LOOK_EVERY,
            };
        }
    }

    async fn read(&self) -> Result<Sources> {
        let config = self.config.clone();
        let read =
            tokio::task::spawn_blocking(move || Sources::read(config.current(), &environment));
        Ok(read.await??)
    }

    /// Builds settings from `sources` and puts them in force, or says why not. The
    /// answer names the keys that changed.
    async fn take(&self, sources: Sources) -> Result<Vec<String>, String> {
        *self.seen.lock().await = sources.fingerprint();
        let file = sources.paths().into_iter().next();
        let built = tokio::task::spawn_blocking(move || sources.settings(&environment))
            .await
            .map_err(|error| error.to_string())
            .and_then(|built| built.map_err(|problems| problems.to_string()));
        let outcome = match built {
            Ok(settings) => self.swap(settings, file.as_deref()).await,
            Err(problems) => Err(ReloadError::Other(problems)),
        };
        // A mistake elsewhere says nothing about the policies.
        let policy = match &outcome {
            Ok(_) => Some(Ok(())),
            Err(ReloadError::Policy(why)) => Some(Err(why.clone())),
            Err(ReloadError::Other(_)) => None,
        };
        let outcome = outcome.map_err(|(ReloadError::Policy(why) | ReloadError::Other(why))| why);
        let event = match &outcome {
            Ok(changed) => {
                tracing::info!(?changed, "the configuration was reloaded");
                "reloaded"
            }
            Err(problems) => {
                tracing::error!(
                    problems,
                    "the configuration was refused; the old one stays in force"
                );
                "reload_refused"
            }
        };
        self.numbers.reloaded(outcome.is_ok());
        let record = AuditEvent {
            event: Some(event.to_owned()),
            ..AuditEvent::new(Kind::Config)
        };
        if let Err(error) = self.store.audit().record_durable(record, wall_now()).await {
            tracing::warn!(%error, "the reload was not recorded");
        }
        // Health last: by the time it changes, the counter and the record are written.
        let current = outcome.as_ref().map(drop).map_err(Clone::clone);
        self.health_registry.check("config_current", current);
        if let Some(policy) = policy {
            self.health_registry.check(POLICY_LOADED, policy);
        }
        outcome
    }

    /// Prepares everything, then puts everything in force: what is refused changes nothing.
    async fn swap(
        &self,
        settings: Settings,
        file: Option<&Path>,
    ) -> Result<Vec<String>, ReloadError> {
        let settings = Arc::new(settings);
        let prepared = self.prepare(&settings).await?;
        Ok(self.commit(settings, prepared, file).await)
    }

    /// Everything that can still refuse: files are read, sockets are opened. Nothing changes.
    async fn prepare(&self, settings: &Arc<Settings>) -> Result<PreparedReload, ReloadError> {
        let filter = self.telemetry.prepare(settings);
        let filter = filter.map_err(|error| format!("{error:#}"))?;
        let (store, new) = (self.store.clone(), Arc::clone(settings));
        let (audit, snapshot, traffic) =
            tokio::task::spawn_blocking(move || -> Result<_, ReloadError> {
                let audit = audit_options(&new);
                let checked = store.audit().check_options(&audit);
                checked.map_err(|error| format!("audit: {error}"))?;
                let traffic = Services::prepare(&new)?;
                Ok((audit, Arc::new(PolicySnapshot::load(new)?), traffic))
            })
            .await
            .map_err(|error| error.to_string())??;
        // Sockets last: who connects to a new one waits until it is served.
        Ok(PreparedReload {
            shared: self.shared.prepare(settings)?,
            listeners: self.tools.prepare(settings)?,
            filter,
            audit,
            snapshot,
            traffic,
        })
    }

    /// Puts prepared settings in force: one pointer is swapped, then a fixed list of steps follows
    /// of which none can fail. The answer names the keys that changed.
    async fn commit(
        &self,
        settings: Arc<Settings>,
        prepared: PreparedReload,
        file: Option<&Path>,
    ) -> Vec<String> {
        // First of all what no log line may show.
        self.telemetry.apply(&settings, prepared.filter);
        let old = self.policy.load();
        // From here on everything is decided by the new rules.
        self.policy.replace(prepared.snapshot);
        self.traffic.apply(prepared.traffic);
        let traffic = Arc::clone(&self.traffic);
        match tokio::task::spawn_blocking(move || traffic.recheck()).await {
            Ok(0) => {}
            Ok(ended) => tracing::info!(ended, "conversations ended that are not allowed any more"),
            Err(error) => tracing::error!(%error, "checking requests in flight again failed"),
        }
        if let Err(error) = self.store.audit().set_options(prepared.audit) {
            // The writer ended a moment ago, and with it the audit log.
            tracing::error!(%error, "audit options could not be changed");
        }
        self.shared.switch(prepared.shared).await;
        let listeners = prepared.listeners;
        let governed = old.governs_tools();
        self.tools.apply(&settings, listeners, governed).await;
        self.announce(&settings);
        self.changed.notify_one();
        self.health_registry.config(file);
        let changed = old.settings.diff(&settings);
        let late = |key: &&String| AT_START.iter().any(|section| key.starts_with(section));
        for key in changed.iter().filter(late) {
            tracing::warn!(
                key,
                "this takes effect at the next start: palisade gate restart"
            );
        }
        changed
    }

    /// Puts what an operator should know about `settings` in the health registry and in the log.
    pub fn announce(&self, settings: &Settings) {
        for warning in &settings.warnings {
            tracing::warn!(%warning, "the configuration was accepted with a warning");
        }
        let warnings: Vec<String> = settings.warnings.iter().map(ToString::to_string).collect();
        let warned = (!warnings.is_empty()).then(|| warnings.join("; "));
        self.health_registry.note("config_warnings", warned);
        let open = settings.policies.fail_open;
        let open =
            open.then(|| "policies.fail_open lets calls pass that no policy judged".to_owned());
        self.health_registry.note("fail_open", open);
    }
}

/// Events from the directories the files are in. Directories, because a file that is
/// renamed over or a link that is swapped is another file.
struct FileWatch {
    watcher: Option<RecommendedWatcher>,
    directories: BTreeSet<PathBuf>,
    writing: Arc<StdMutex<FileWrites>>,
}

/// Which of our files are being written.
#[derive(Default)]
struct FileWrites {
    ours: BTreeSet<PathBuf>,
    open: BTreeSet<PathBuf>,
    events: u64,
}

impl FileWrites {
    fn heard(&mut self, event: &notify::Event) {
        for path in event.paths.iter().filter(|path| self.ours.contains(*path)) {
            self.events += 1;
            match event.kind {
                EventKind::Modify(ModifyKind::Data(_)) => self.open.insert(path.clone()),
                EventKind::Access(_)
                | EventKind::Create(_)
                | EventKind::Remove(_)
                | EventKind::Modify(ModifyKind::Name(_)) => self.open.remove(path),
                _ => continue,
            };
        }
    }
}

impl FileWatch {
    fn new(changed: &Arc<Notify>) -> Self {
        let writing = Arc::new(StdMutex::new(FileWrites::default()));
        let (changed, heard) = (Arc::clone(changed), Arc::clone(&writing));
        let listen = move |event: notify::Result<notify::Event>| {
            if let Ok(event) = &event {
                let is_close = matches!(
                    event.kind,
                    EventKind::Access(AccessKind::Close(AccessMode::Write))
                );
                // Reading a file is an event, too, and we read it on every event.
                if event.kind.is_access() && !is_close {
                    return;
                }
                lock(&heard).heard(event);
            }
            changed.notify_one();
        };
        let watcher = notify::recommended_watcher(listen)
            .inspect_err(|error| tracing::warn!(%error, "files are not watched, only looked at"))
            .ok();
        Self {
            watcher,
            directories: BTreeSet::new(),
            writing,
        }
    }

    fn is_being_written(&self) -> bool {
        !lock(&self.writing).open.is_empty()
    }

    fn events(&self) -> u64 {
        lock(&self.writing).events
    }

    fn follow(&mut self, sources: &Sources) {
        {
            let mut writing = lock(&self.writing);
            writing.ours = sources.files().into_iter().collect();
            let FileWrites { ours, open, .. } = &mut *writing;
            open.retain(|path| ours.contains(path));
        }
        let Some(watcher) = &mut self.watcher else {
            return;
        };
        let wanted = sources.directories();
        for gone in self.directories.difference(&wanted) {
            // It may have been removed, which ended the watch already.
            let _ = watcher.unwatch(gone);
        }
        let mut watched = BTreeSet::new();
        for directory in wanted {
            if self.directories.contains(&directory)
                || watcher
                    .watch(&directory, RecursiveMode::NonRecursive)
                    .is_ok()
            {
                watched.insert(directory);
            }
        }
        self.directories = watched;
    }
}

fn lock(writing: &StdMutex<FileWrites>) -> MutexGuard<'_, FileWrites> {
    writing.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests;
