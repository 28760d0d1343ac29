//! Reloads the configuration while the gate runs.
//!
//! A reload validates everything, prepares everything, and then commits by steps that cannot
//! fail. If anything is invalid, the old snapshot stays in force, and log, health, metrics and
//! audit log report the failure.
//!
//! A change is applied once the files are stable: while an editor truncates and writes a file,
//! or a script writes it a hundred times, its content may be valid and incomplete. Two reads a
//! moment apart must agree, and a file that is open for writing gets more time. The same
//! applies to policy bundles and to the system's resolver file, which are read during the
//! reload.

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
use crate::gate::tools::{PreparedListeners, ToolService};
use crate::gate::{POLICY_LOADED, audit_options, read_environment_variable};
use crate::paths::ConfigPath;
use crate::telemetry::Telemetry;
use crate::telemetry::process_metrics::ProcessMetrics;

/// Poll interval, for file systems that send no events.
const POLL_INTERVAL: Duration = Duration::from_secs(1);

/// How long the files must be unchanged.
const SETTLE_TIME: Duration = Duration::from_millis(150);

/// Settings that take effect only at the start.
const START_ONLY_SETTINGS: &[&str] = &["/metrics/tracing/", "/logging/format"];

/// How long a file must be unchanged while it is open for writing. The writer may be slow, and
/// may never close it.
const SETTLE_TIME_WHILE_OPEN: Duration = Duration::from_secs(2);

/// Delay after an event, so that one read handles a burst of events.
const DEBOUNCE_DELAY: Duration = Duration::from_millis(20);

/// A change that has not been stable for long enough.
#[derive(Clone, Copy)]
struct PendingChange {
    fingerprint: [u8; 32],
    /// Number of events at that time. A file that is rewritten repeatedly may have the same
    /// content twice, so equal fingerprints do not mean that nothing happened in between.
    events: u64,
    since: Instant,
}

/// Validated and prepared settings that are not in force yet.
struct PreparedReload {
    network_listeners: PreparedNetworkListeners,
    listeners: PreparedListeners,
    filter: EnvFilter,
    audit: AuditOptions,
    snapshot: Arc<PolicySnapshot>,
    traffic: PreparedServices,
}

/// Why a reload was refused.
enum ReloadError {
    /// A policy bundle is invalid.
    Policy(String),
    /// Any other problem.
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

/// Reloads the configuration of every part of the gate.
#[derive(Debug)]
pub struct Reloader {
    /// The path of the operator's file.
    pub config: ConfigPath,
    /// Health of the configuration.
    pub health_registry: Arc<HealthRegistry>,
    /// Metrics of reloads.
    pub process_metrics: ProcessMetrics,
    /// Log level and redacted secrets.
    pub telemetry: Arc<Telemetry>,
    /// Audit options; the audit log records reloads.
    pub store: Store,
    /// The policy in force: the pointer that a reload swaps.
    pub policy: Arc<CurrentPolicy>,
    /// Dialer and resolvers; requests in flight are checked again.
    pub traffic: Arc<Services>,
    /// Listeners on shared networks.
    pub network_listeners: Arc<NetworkListeners>,
    /// Tools and their listeners.
    pub tools: Arc<ToolService>,
    /// Reload requests of the control socket.
    pub requests: Mutex<mpsc::Receiver<ReloadRequest>>,
    /// SIGHUP.
    pub hangup: Mutex<Signal>,
    /// Fingerprint of the files at the last reload, accepted or refused.
    pub last_fingerprint: Mutex<[u8; 32]>,
    /// Notified when the settings have changed.
    pub changed: Arc<Notify>,
}

impl Reloader {
    /// Watches the files and reloads until `stop`.
    ///
    /// The loop waits only for the next event, so that a file that keeps changing delays
    /// neither a request nor a signal.
    pub async fn run(self: Arc<Self>, stop: CancellationToken) -> Result<()> {
        let changed = Arc::new(Notify::new());
        let mut watch = FileWatch::new(&changed);
        watch.watch_sources(&self.read().await?);
        let mut hangup = self.hangup.lock().await;
        let mut requests = self.requests.lock().await;
        let mut pending: Option<PendingChange> = None;
        let mut next_check = Instant::now() + POLL_INTERVAL;
        loop {
            let forced = tokio::select! {
                () = stop.cancelled() => return Ok(()),
                Some(answer) = requests.recv() => Some(Some(answer)),
                _ = hangup.recv() => {
                    tracing::info!("SIGHUP received; reloading the configuration");
                    Some(None)
                }
                () = changed.notified() => {
                    next_check = next_check.min(Instant::now() + DEBOUNCE_DELAY);
                    continue;
                }
                () = tokio::time::sleep_until(next_check) => None,
            };
            let events = watch.events();
            let sources = self.read().await?;
            watch.watch_sources(&sources);
            if let Some(answer) = forced {
                pending = None;
                let outcome = self.reload(sources).await;
                if let Some(answer) = answer {
                    // The client may have disconnected; the reload is done anyway.
                    let _ = answer.send(outcome);
                }
                continue;
            }
            let now = Instant::now();
            let fingerprint = sources.fingerprint();
            if fingerprint == *self.last_fingerprint.lock().await {
                pending = None;
            } else if pending
                .is_none_or(|before| (before.fingerprint, before.events) != (fingerprint, events))
            {
                pending = Some(PendingChange {
                    fingerprint,
                    events,
                    since: now,
                });
            }
            let settle = if watch.is_being_written() {
                SETTLE_TIME_WHILE_OPEN
            } else {
                SETTLE_TIME
            };
            next_check = match pending {
                Some(before) if before.since + settle <= now => {
                    pending = None;
                    // `reload` has reported a refusal.
                    let _ = self.reload(sources).await;
                    now + POLL_INTERVAL
                }
                Some(before) => before.since + settle,
                None => now + POLL_INTERVAL,
            };
        }
    }

    async fn read(&self) -> Result<Sources> {
        let config = self.config.clone();
        let read = tokio::task::spawn_blocking(move || {
            Sources::read(config.current(), &read_environment_variable)
        });
        Ok(read.await??)
    }

    /// Builds settings from `sources` and puts them in force. Returns the changed keys, or the
    /// reason of a refusal.
    async fn reload(&self, sources: Sources) -> Result<Vec<String>, String> {
        *self.last_fingerprint.lock().await = sources.fingerprint();
        let file = sources.paths().into_iter().next();
        let built =
            tokio::task::spawn_blocking(move || sources.settings(&read_environment_variable))
                .await
                .map_err(|error| error.to_string())
                .and_then(|built| built.map_err(|problems| problems.to_string()));
        let outcome = match built {
            Ok(settings) => self.swap(settings, file.as_deref()).await,
            Err(problems) => Err(ReloadError::Other(problems)),
        };
        // Another problem does not change the state of the policies.
        let policy = match &outcome {
            Ok(_) => Some(Ok(())),
            Err(ReloadError::Policy(why)) => Some(Err(why.clone())),
            Err(ReloadError::Other(_)) => None,
        };
        let outcome = outcome.map_err(|(ReloadError::Policy(why) | ReloadError::Other(why))| why);
        let event = match &outcome {
            Ok(changed) => {
                tracing::info!(?changed, "configuration reloaded");
                "reloaded"
            }
            Err(problems) => {
                tracing::error!(
                    problems,
                    "configuration refused; the old one stays in force"
                );
                "reload_refused"
            }
        };
        self.process_metrics.count_reload(outcome.is_ok());
        let record = AuditEvent {
            event: Some(event.to_owned()),
            ..AuditEvent::new(Kind::Config)
        };
        if let Err(error) = self.store.audit().record_durable(record, wall_now()).await {
            tracing::warn!(%error, "recording the reload in the audit log failed");
        }
        // Health is updated last: when it changes, the counter and the record are already written.
        let current = outcome.as_ref().map(drop).map_err(Clone::clone);
        self.health_registry.set_check("config_current", current);
        if let Some(policy) = policy {
            self.health_registry.set_check(POLICY_LOADED, policy);
        }
        outcome
    }

    /// Prepares everything, then commits everything: a refused reload changes nothing.
    async fn swap(
        &self,
        settings: Settings,
        file: Option<&Path>,
    ) -> Result<Vec<String>, ReloadError> {
        let settings = Arc::new(settings);
        let prepared = self.prepare(&settings).await?;
        Ok(self.commit(settings, prepared, file).await)
    }

    /// Does everything that can fail: reads files, binds sockets. Changes nothing.
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
        // Sockets are bound last: a client that connects to a new socket waits until it is served.
        Ok(PreparedReload {
            network_listeners: self.network_listeners.prepare(settings)?,
            listeners: self.tools.prepare(settings)?,
            filter,
            audit,
            snapshot,
            traffic,
        })
    }

    /// Puts prepared settings in force: swaps one pointer, then runs a fixed list of steps that
    /// cannot fail. Returns the changed keys.
    async fn commit(
        &self,
        settings: Arc<Settings>,
        prepared: PreparedReload,
        file: Option<&Path>,
    ) -> Vec<String> {
        // The redactor is updated first, before any log line can show a new secret.
        self.telemetry.apply(&settings, prepared.filter);
        let old = self.policy.load();
        // From now on the new policy decides.
        self.policy.replace(prepared.snapshot);
        self.traffic.apply(prepared.traffic);
        let traffic = Arc::clone(&self.traffic);
        match tokio::task::spawn_blocking(move || traffic.recheck()).await {
            Ok(0) => {}
            Ok(ended) => tracing::info!(
                ended,
                "connections closed that the new policy does not allow"
            ),
            Err(error) => tracing::error!(%error, "rechecking requests in flight failed"),
        }
        if let Err(error) = self.store.audit().set_options(prepared.audit) {
            // The audit writer has just ended.
            tracing::error!(%error, "changing the audit options failed");
        }
        self.network_listeners
            .switch(prepared.network_listeners)
            .await;
        let listeners = prepared.listeners;
        let governed = old.governs_tools();
        self.tools.apply(&settings, listeners, governed).await;
        self.announce(&settings);
        self.changed.notify_one();
        self.health_registry.set_config(file);
        let changed = old.settings.diff(&settings);
        let needs_restart = |key: &&String| {
            START_ONLY_SETTINGS
                .iter()
                .any(|section| key.starts_with(section))
        };
        for key in changed.iter().filter(needs_restart) {
            tracing::warn!(
                key,
                "setting takes effect at the next start: palisade gate restart"
            );
        }
        changed
    }

    /// Reports the warnings of `settings` in the log and in health notes.
    pub fn announce(&self, settings: &Settings) {
        for warning in &settings.warnings {
            tracing::warn!(%warning, "configuration accepted with a warning");
        }
        let warnings: Vec<String> = settings.warnings.iter().map(ToString::to_string).collect();
        let warned = (!warnings.is_empty()).then(|| warnings.join("; "));
        self.health_registry.set_note("config_warnings", warned);
        let open = settings.policies.fail_open;
        let open = open
            .then(|| "policies.fail_open is on: calls pass if a policy fails to decide".to_owned());
        self.health_registry.set_note("fail_open", open);
    }
}

/// Watches the directories of the files, and not the files themselves, because a replaced file or
/// a changed symbolic link is another inode.
struct FileWatch {
    watcher: Option<RecommendedWatcher>,
    directories: BTreeSet<PathBuf>,
    writing: Arc<StdMutex<FileWrites>>,
}

/// The configuration files that are open for writing.
#[derive(Default)]
struct FileWrites {
    config_files: BTreeSet<PathBuf>,
    open: BTreeSet<PathBuf>,
    events: u64,
}

impl FileWrites {
    fn record(&mut self, event: &notify::Event) {
        for path in event
            .paths
            .iter()
            .filter(|path| self.config_files.contains(*path))
        {
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
        let (changed, writes) = (Arc::clone(changed), Arc::clone(&writing));
        let on_event = move |event: notify::Result<notify::Event>| {
            if let Ok(event) = &event {
                let is_close = matches!(
                    event.kind,
                    EventKind::Access(AccessKind::Close(AccessMode::Write))
                );
                // Reads are events, too, and every event causes a read.
                if event.kind.is_access() && !is_close {
                    return;
                }
                lock(&writes).record(event);
            }
            changed.notify_one();
        };
        let watcher = notify::recommended_watcher(on_event)
            .inspect_err(
                |error| tracing::warn!(%error, "watching files failed; polling them instead"),
            )
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

    fn watch_sources(&mut self, sources: &Sources) {
        {
            let mut writing = lock(&self.writing);
            writing.config_files = sources.files().into_iter().collect();
            let FileWrites {
                config_files, open, ..
            } = &mut *writing;
            open.retain(|path| config_files.contains(path));
        }
        let Some(watcher) = &mut self.watcher else {
            return;
        };
        let wanted = sources.directories();
        for removed in self.directories.difference(&wanted) {
            // The directory may have been deleted, which ended the watch already.
            let _ = watcher.unwatch(removed);
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
