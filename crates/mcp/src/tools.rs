//! The configured stdio servers (tools) of the bridge: start, restart backoff and tool filter.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use config::section::tools::{BridgedServer, RuntimeKind};
use policy::toolbox::ToolRules;
use policy::verdict::Denial;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::caller::McpCaller;
use crate::fingerprint::Fingerprints;
use crate::launch::{LaunchError, LaunchedProgram, Launcher};
use crate::metrics::Metrics;
use crate::process::{MessageHandler, Process, ProcessLabel};
use crate::rpc::{self, Fields, RpcMessage};
use crate::shutdown::Shutdown;

/// Backoff after the first failed start of a server; doubled with each further failure.
const MIN_BACKOFF: Duration = Duration::from_millis(100);

/// Maximum backoff.
const MAX_BACKOFF: Duration = Duration::from_secs(30);

/// Default timeout of a call.
const DEFAULT_CALL_TIMEOUT: Duration = Duration::from_secs(600);

/// The error for a tool with the runtime e2b.
const E2B_NOT_IMPLEMENTED: LaunchError = LaunchError::NotImplemented("e2b");

/// The launchers of the runtimes.
#[derive(Clone)]
pub struct Launchers {
    /// Starts programs on this machine.
    pub local: Arc<dyn Launcher>,
    /// Starts programs in a sandbox.
    pub sandbox: Arc<dyn Launcher>,
}

impl std::fmt::Debug for Launchers {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Launchers").finish_non_exhaustive()
    }
}

/// One configured server. When the settings remove or change the server, its token `stop` is
/// cancelled, which ends the sessions of this value; a new value has new sessions.
#[derive(Debug)]
pub struct StdioServer {
    name: Arc<str>,
    config: BridgedServer,
    tool_rules: ToolRules,
    launchers: Launchers,
    fingerprints: Arc<Fingerprints>,
    failures: Mutex<StartFailures>,
    stop: CancellationToken,
    shutdown: Arc<Shutdown>,
}

/// Failed starts since the last successful one.
#[derive(Debug, Default)]
struct StartFailures {
    count: u32,
    backoff_until: Option<Instant>,
    error: String,
}

/// Why a server is unavailable.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ToolUnavailable {
    /// Number of consecutive failed starts.
    pub failures: u32,
    /// The error of the last start.
    pub error: String,
}

impl StdioServer {
    /// Creates a server from its configuration.
    pub fn new(
        config: BridgedServer,
        launchers: Launchers,
        fingerprints: Arc<Fingerprints>,
        stop: CancellationToken,
        shutdown: Arc<Shutdown>,
    ) -> Self {
        Self {
            name: config.name.as_str().into(),
            tool_rules: config.tool_rules(),
            config,
            launchers,
            fingerprints,
            failures: Mutex::default(),
            stop,
            shutdown,
        }
    }

    /// The configured name.
    pub fn name(&self) -> &Arc<str> {
        &self.name
    }

    /// The configuration.
    pub fn config(&self) -> &BridgedServer {
        &self.config
    }

    /// Name of the runtime.
    pub fn runtime(&self) -> &'static str {
        self.config.runtime.kind.as_str()
    }

    /// Timeout of a call.
    pub fn timeout(&self) -> Duration {
        self.config.runtime.timeout.unwrap_or(DEFAULT_CALL_TIMEOUT)
    }

    /// Cancelled when the settings remove or change the server.
    pub fn stop(&self) -> &CancellationToken {
        &self.stop
    }

    /// Whether the server is visible to `caller`. Servers that run on the host are hidden from
    /// agents in sandboxes unless `expose` is set.
    pub fn is_visible_to(&self, caller: &McpCaller) -> bool {
        match self.config.runtime.kind {
            RuntimeKind::Sandbox => true,
            RuntimeKind::Local | RuntimeKind::E2b => caller.sandbox.is_none() || self.config.expose,
        }
    }

    /// Starts the program for `caller`, unless the server is in its backoff.
    pub async fn launch(&self, caller: &McpCaller) -> Result<LaunchedProgram, LaunchError> {
        if self.stop.is_cancelled() {
            return Err(LaunchError::Failed(
                "the server was removed from the configuration".to_owned(),
            ));
        }
        if let Some((failures, wait)) = self.backoff() {
            return Err(LaunchError::Waiting { failures, wait });
        }
        // The gate's shutdown waits for a start in progress.
        let _starting = self.shutdown.register_process();
        let launched = match self.config.runtime.kind {
            RuntimeKind::Local => self.launchers.local.launch(&self.config, caller).await,
            RuntimeKind::Sandbox => self.launchers.sandbox.launch(&self.config, caller).await,
            RuntimeKind::E2b => {
                tracing::info!(tool = %self.name, runtime = "e2b", "mcp tool runtime not implemented");
                return Err(E2B_NOT_IMPLEMENTED);
            }
        };
        if let Err(error) = &launched {
            self.record_start_failure(&error.to_string());
        }
        launched
    }

    /// Attaches to a launched program. Requests and notifications of the server go to `handler`.
    pub fn attach(
        &self,
        launched: LaunchedProgram,
        handler: Arc<dyn MessageHandler>,
        metrics: &Metrics,
    ) -> Arc<Process> {
        let label = ProcessLabel {
            tool: Arc::clone(&self.name),
            runtime: self.config.runtime.kind,
        };
        Process::attach(launched, label, handler, metrics.clone(), &self.shutdown)
    }

    /// Records a failed start: the program did not start, or ended before it answered `initialize`.
    pub fn record_start_failure(&self, error: &str) {
        let mut failures = self.failures();
        failures.count = failures.count.saturating_add(1);
        let doubled = MIN_BACKOFF.saturating_mul(1 << (failures.count - 1).min(16));
        let wait = doubled.min(MAX_BACKOFF);
        failures.backoff_until = Some(Instant::now() + wait);
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

    /// Records a successful start, which resets the backoff.
    pub fn record_start_success(&self) {
        *self.failures() = StartFailures::default();
    }

    /// The number of consecutive failures and the remaining backoff; none if a start may be tried.
    pub fn backoff(&self) -> Option<(u32, Duration)> {
        let failures = self.failures();
        let remaining = failures
            .backoff_until?
            .checked_duration_since(Instant::now())?;
        Some((failures.count, remaining))
    }

    /// Why the server is unavailable; none if the last start succeeded or there was none yet.
    pub fn unavailable(&self) -> Option<ToolUnavailable> {
        if self.config.runtime.kind == RuntimeKind::E2b {
            return Some(ToolUnavailable {
                failures: 0,
                error: E2B_NOT_IMPLEMENTED.to_string(),
            });
        }
        let failures = self.failures();
        (failures.count > 0).then(|| ToolUnavailable {
            failures: failures.count,
            error: failures.error.clone(),
        })
    }

    fn failures(&self) -> std::sync::MutexGuard<'_, StartFailures> {
        self.failures.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether `caller` may use the tool `name` of this server.
    pub fn check_tool(&self, name: &str, caller: &McpCaller) -> Result<(), Denial> {
        let sandbox = caller.sandbox.as_ref().map(|id| id.as_str());
        self.tool_rules.judge(name, &caller.agent, sandbox)?;
        self.fingerprints.check(&self.name, name)
    }

    /// Removes the tools that `caller` may not use from an answer to `tools/list`.
    pub fn filter_tools(&self, answer: RpcMessage, caller: &McpCaller) -> String {
        let Some(result) = answer.result() else {
            return answer.into_text();
        };
        let Some(range) = rpc::find(result, 0..result.len(), &["tools"]) else {
            return answer.into_text();
        };
        let list = result.get(range.clone()).unwrap_or_default();
        let Ok(tools) = serde_json::from_str::<Vec<&serde_json::value::RawValue>>(list) else {
            // An invalid list is replaced by an empty one.
            let empty = rpc::splice(result, range, "[]");
            return answer.with_result(&empty);
        };
        let visible: Vec<&str> = tools
            .iter()
            .map(|tool| tool.get())
            .filter(|tool| self.is_tool_visible(tool, caller))
            .collect();
        if visible.len() == tools.len() {
            return answer.into_text();
        }
        let result = rpc::splice(result, range, &format!("[{}]", visible.join(",")));
        answer.with_result(&result)
    }

    fn is_tool_visible(&self, tool: &str, caller: &McpCaller) -> bool {
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
        // If there are two names, the client could use a different one than the gate.
        if names.next().is_some() {
            return false;
        }
        self.fingerprints.record(&self.name, &name, tool);
        self.check_tool(&name, caller).is_ok()
    }
}
