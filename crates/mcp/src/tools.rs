//! The servers behind the bridge, as the operator configured them.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use config::section::tools::{BridgedServer, RuntimeKind};
use policy::toolbox::Toolbox;
use policy::verdict::Denial;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::caller::Caller;
use crate::fingerprint::Fingerprints;
use crate::launch::{LaunchError, Launched, Launcher};
use crate::metrics::Metrics;
use crate::process::{Home, Label, Process};
use crate::rpc::{self, Fields, Message};
use crate::shutdown::Shutdown;

/// The first wait after a server that ended too early; doubled each time.
const FIRST_WAIT: Duration = Duration::from_millis(100);

/// The longest.
const LONGEST_WAIT: Duration = Duration::from_secs(30);

/// How long a call may take where the operator says nothing.
const CALL_TIMEOUT: Duration = Duration::from_secs(600);

/// The answer to a call of a tool whose runtime is e2b.
const NOT_BUILT: LaunchError = LaunchError::NotBuilt("e2b");

/// Starts servers by where they run.
#[derive(Clone)]
pub struct Launchers {
    /// On this machine.
    pub local: Arc<dyn Launcher>,
    /// In a sandbox.
    pub sandbox: Arc<dyn Launcher>,
}

impl std::fmt::Debug for Launchers {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Launchers").finish_non_exhaustive()
    }
}

/// One server. Dropped from the settings or changed there, it is told to end: its sessions
/// belong to this value, not to its name.
#[derive(Debug)]
pub struct Served {
    name: Arc<str>,
    config: BridgedServer,
    toolbox: Toolbox,
    launchers: Launchers,
    fingerprints: Arc<Fingerprints>,
    failures: Mutex<Failures>,
    stop: CancellationToken,
    shutdown: Arc<Shutdown>,
}

/// Starts that failed since the last one that did not.
#[derive(Debug, Default)]
struct Failures {
    count: u32,
    until: Option<Instant>,
    error: String,
}

/// Why a server cannot be used.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unavailable {
    /// How often it was not started in a row.
    pub failures: u32,
    /// Why not, the last time.
    pub error: String,
}

impl Served {
    /// A server as configured.
    pub fn new(
        config: BridgedServer,
        launchers: Launchers,
        fingerprints: Arc<Fingerprints>,
        stop: CancellationToken,
        shutdown: Arc<Shutdown>,
    ) -> Self {
        Self {
            name: config.name.as_str().into(),
            toolbox: config.toolbox(),
            config,
            launchers,
            fingerprints,
            failures: Mutex::default(),
            stop,
            shutdown,
        }
    }

    /// Its name.
    pub fn name(&self) -> &Arc<str> {
        &self.name
    }

    /// How it is configured.
    pub fn config(&self) -> &BridgedServer {
        &self.config
    }

    /// The word for where it runs.
    pub fn runtime(&self) -> &'static str {
        self.config.runtime.kind.as_str()
    }

    /// How long a call may take.
    pub fn timeout(&self) -> Duration {
        self.config.runtime.timeout.unwrap_or(CALL_TIMEOUT)
    }

    /// Ends with the server's place in the settings.
    pub fn stop(&self) -> &CancellationToken {
        &self.stop
    }

    /// Whether `caller` may know that it exists. What runs as the operator is not for agents
    /// in sandboxes unless the operator says so.
    pub fn is_visible_to(&self, caller: &Caller) -> bool {
        match self.config.runtime.kind {
            RuntimeKind::Sandbox => true,
            RuntimeKind::Local | RuntimeKind::E2b => caller.sandbox.is_none() || self.config.expose,
        }
    }

    /// Starts its program for `caller`, unless it has failed lately.
    pub async fn launch(&self, caller: &Caller) -> Result<Launched, LaunchError> {
        if self.stop.is_cancelled() {
            return Err(LaunchError::Failed("it is not served any more".to_owned()));
        }
        if let Some((failures, wait)) = self.wait() {
            return Err(LaunchError::Waiting { failures, wait });
        }
        // The gate's stop waits for a start that is in progress.
        let _starting = self.shutdown.hold();
        let launched = match self.config.runtime.kind {
            RuntimeKind::Local => self.launchers.local.launch(&self.config, caller).await,
            RuntimeKind::Sandbox => self.launchers.sandbox.launch(&self.config, caller).await,
            RuntimeKind::E2b => {
                tracing::info!(tool = %self.name, runtime = "e2b", "mcp tool runtime not implemented");
                return Err(NOT_BUILT);
            }
        };
        if let Err(error) = &launched {
            self.failed(&error.to_string());
        }
        launched
    }

    /// Takes over what was launched. What the server says by itself goes to `home`.
    pub fn keep(&self, launched: Launched, home: Arc<dyn Home>, metrics: &Metrics) -> Arc<Process> {
        let label = Label {
            tool: Arc::clone(&self.name),
            runtime: self.config.runtime.kind,
        };
        Process::keep(launched, label, home, metrics.clone(), &self.shutdown)
    }

    /// It was not started, or ended before it was of any use.
    pub fn failed(&self, error: &str) {
        let mut failures = self.failures();
        failures.count = failures.count.saturating_add(1);
        let doubled = FIRST_WAIT.saturating_mul(1 << (failures.count - 1).min(16));
        let wait = doubled.min(LONGEST_WAIT);
        failures.until = Some(Instant::now() + wait);
        error.clone_into(&mut failures.error);
        let count = failures.count;
        drop(failures);
        tracing::error!(
            tool = %self.name,
            error,
            failures = count,
            retry_after = ?wait,
            "mcp tool failed to start"
        );
    }

    /// It is of use.
    pub fn worked(&self) {
        *self.failures() = Failures::default();
    }

    /// How often it failed in a row, and for how long it is left alone.
    pub fn wait(&self) -> Option<(u32, Duration)> {
        let failures = self.failures();
        let left = failures.until?.checked_duration_since(Instant::now())?;
        Some((failures.count, left))
    }

    /// Why it cannot be used; none where its last start succeeded, or there was none yet.
    pub fn unavailable(&self) -> Option<Unavailable> {
        if self.config.runtime.kind == RuntimeKind::E2b {
            return Some(Unavailable {
                failures: 0,
                error: NOT_BUILT.to_string(),
            });
        }
        let failures = self.failures();
        (failures.count > 0).then(|| Unavailable {
            failures: failures.count,
            error: failures.error.clone(),
        })
    }

    fn failures(&self) -> std::sync::MutexGuard<'_, Failures> {
        self.failures.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether `caller` may use its tool `name`.
    pub fn judge(&self, name: &str, caller: &Caller) -> Result<(), Denial> {
        let sandbox = caller.sandbox.as_ref().map(|id| id.as_str());
        self.toolbox.judge(name, &caller.agent, sandbox)?;
        self.fingerprints.judge(&self.name, name)
    }

    /// The answer to `tools/list` without what `caller` may not use or must not see.
    pub fn listed(&self, answer: Message, caller: &Caller) -> String {
        let Some(result) = answer.result() else {
            return answer.into_text();
        };
        let Some(place) = rpc::find(result, 0..result.len(), &["tools"]) else {
            return answer.into_text();
        };
        let list = result.get(place.clone()).unwrap_or_default();
        let Ok(tools) = serde_json::from_str::<Vec<&serde_json::value::RawValue>>(list) else {
            // What is no list of tools shows none.
            let none = rpc::splice(result, place, "[]");
            return answer.with_result(&none);
        };
        let kept: Vec<&str> = tools
            .iter()
            .map(|tool| tool.get())
            .filter(|tool| self.may_see(tool, caller))
            .collect();
        if kept.len() == tools.len() {
            return answer.into_text();
        }
        let result = rpc::splice(result, place, &format!("[{}]", kept.join(",")));
        answer.with_result(&result)
    }

    fn may_see(&self, tool: &str, caller: &Caller) -> bool {
        let Ok(fields) = serde_json::from_str::<Fields<'_>>(tool) else {
            return false;
        };
        let mut names = fields.0.iter().filter(|(key, _)| key == "name");
        let Some((_, name)) = names.next() else {
            return false;
        };
        let Ok(name) = serde_json::from_str::<String>(name.get()) else {
            return false;
        };
        // A second name would be another reader's first.
        if names.next().is_some() {
            return false;
        }
        self.fingerprints.note(&self.name, &name, tool);
        self.judge(&name, caller).is_ok()
    }
}
