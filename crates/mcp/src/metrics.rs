//! Prometheus metrics of tool calls. The metric names are those that existing dashboards for
//! this kind of gate use.
//!
//! The tools behind a gateway are not configured here. The first
//! [`gateway_tools::MAX_GATEWAY_TOOLS`] tool names have their own series, and all further names
//! are counted as `unknown`: an agent that invents names cannot create more series.

mod gateway_tools;

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use arc_swap::ArcSwap;
use config::section::tools::RuntimeKind;
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::registry::Registry;

use self::gateway_tools::GatewayToolNames;

/// The `tool_id` label of a tool that is not configured.
pub const UNKNOWN_TOOL: &str = "unknown";

/// Counters and timers of tool calls. Cloning is cheap.
#[derive(Clone, Debug)]
pub struct Metrics {
    tools: Arc<ArcSwap<HashSet<String>>>,
    gateway_tools: GatewayToolNames,
    intercepts: Family<InterceptLabels, Counter>,
    intercept_times: Family<MomentLabels, Histogram>,
    decisions: Family<DecisionLabels, Counter>,
    decision_times: Family<BundleLabels, Histogram>,
    failures: Family<FailureLabels, Counter>,
    executions: Family<ExecutionLabels, Counter>,
    execution_times: Family<ToolLabels, Histogram>,
    exits: Family<ExitLabels, Counter>,
    processes: Family<ToolLabels, Gauge>,
    process_status: Family<ToolLabels, Gauge>,
    process_table: Arc<Mutex<ProcessTable>>,
    junk_lines: Family<JunkLabels, Counter>,
    contexts: Gauge,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct InterceptLabels {
    r#type: &'static str,
    action: &'static str,
    tool_id: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct MomentLabels {
    r#type: &'static str,
    tool_id: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct DecisionLabels {
    action: &'static str,
    bundle_id: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct BundleLabels {
    bundle_id: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct FailureLabels {
    bundle_id: String,
    failure: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ToolLabels {
    tool_id: String,
    runtime_type: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ExecutionLabels {
    tool_id: String,
    runtime_type: &'static str,
    status: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ExitLabels {
    tool_id: String,
    runtime_type: &'static str,
    exit_code: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct JunkLabels {
    tool_id: String,
}

/// The running processes of every tool. One lock keeps the process count and the process status
/// consistent.
#[derive(Debug, Default)]
struct ProcessTable {
    /// Configured tools: they have a series even without a process.
    configured: HashSet<ToolLabels>,
    /// Number of running processes, for tools that have at least one.
    running: HashMap<ToolLabels, i64>,
}

/// Counts one process of a tool until this value is dropped. The labels are those at the start of
/// the process: a reload may have removed the tool by the time the process ends.
#[derive(Debug)]
pub struct ProcessCount {
    metrics: Metrics,
    labels: ToolLabels,
}

impl ProcessCount {
    /// Counts the exit code of the process, if it is known.
    pub fn exited(self, code: Option<i32>) {
        let Some(code) = code else { return };
        let labels = ExitLabels {
            tool_id: self.labels.tool_id.clone(),
            runtime_type: self.labels.runtime_type,
            // The clamp bounds the number of series that exit codes can create.
            exit_code: code.clamp(-128, 255).to_string(),
        };
        self.metrics.exits.get_or_create(&labels).inc();
    }
}

impl Drop for ProcessCount {
    fn drop(&mut self) {
        self.metrics.change_processes(&self.labels, -1);
    }
}

/// Outcome of a tool call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CallStatus {
    /// The tool returned a result.
    Success,
    /// The tool returned an error, or its process failed.
    Error,
    /// The call exceeded its timeout.
    Timeout,
    /// The caller cancelled the call.
    Cancelled,
}

impl CallStatus {
    /// The value of the `status` label.
    pub const fn as_str(self) -> &'static str {
        match self {
            CallStatus::Success => "success",
            CallStatus::Error => "error",
            CallStatus::Timeout => "timeout",
            CallStatus::Cancelled => "cancelled",
        }
    }
}

impl Default for Metrics {
    fn default() -> Self {
        // From ten microseconds to about ten seconds.
        let decisions = || Histogram::new(exponential_buckets(0.000_01, 2.5, 16));
        // Up to a few minutes.
        let executions = || Histogram::new(exponential_buckets(0.000_01, 3.0, 16));
        Self {
            tools: Arc::default(),
            gateway_tools: GatewayToolNames::default(),
            intercepts: Family::default(),
            intercept_times: Family::new_with_constructor(decisions),
            decisions: Family::default(),
            decision_times: Family::new_with_constructor(decisions),
            failures: Family::default(),
            executions: Family::default(),
            execution_times: Family::new_with_constructor(executions),
            exits: Family::default(),
            processes: Family::default(),
            process_status: Family::default(),
            process_table: Arc::default(),
            junk_lines: Family::default(),
            contexts: Gauge::default(),
        }
    }
}

impl Metrics {
    /// Registers the metrics in `registry`. The names lack `_total`: the library appends it to
    /// counters.
    pub fn register(&self, registry: &mut Registry) {
        registry.register(
            "polis_sidecar_intercept",
            "Tool messages that policies decided, by moment and outcome",
            self.intercepts.clone(),
        );
        registry.register(
            "polis_sidecar_intercept_duration_seconds",
            "Time to decide a tool message",
            self.intercept_times.clone(),
        );
        registry.register(
            "polis_sidecar_policy_decisions",
            "Policy decisions by action",
            self.decisions.clone(),
        );
        registry.register(
            "polis_sidecar_policy_decision_duration_seconds",
            "Time a policy bundle took to decide",
            self.decision_times.clone(),
        );
        registry.register(
            "polis_sidecar_policy_failures",
            "Tool messages that a policy bundle failed to decide",
            self.failures.clone(),
        );
        registry.register(
            "polis_sidecar_tool_executions",
            "Tool calls by outcome",
            self.executions.clone(),
        );
        registry.register(
            "polis_sidecar_tool_execution_duration_seconds",
            "Time a tool took to answer",
            self.execution_times.clone(),
        );
        registry.register(
            "polis_sidecar_tool_exits",
            "Tool processes that ended, by exit code",
            self.exits.clone(),
        );
        registry.register(
            "polis_sidecar_process_status",
            "1 if a process of the tool is running, else 0",
            self.process_status.clone(),
        );
        registry.register(
            "polis_sidecar_processes",
            "Running processes of the tool",
            self.processes.clone(),
        );
        registry.register(
            "polis_sidecar_tool_junk",
            "Output lines of a tool that are not JSON-RPC messages",
            self.junk_lines.clone(),
        );
        registry.register(
            "polis_sidecar_context_active",
            "Request contexts stored between before and after hooks",
            self.contexts.clone(),
        );
    }

    /// Replaces the configured tool names, which have their own label values.
    pub fn set_tool_names(&self, tools: impl IntoIterator<Item = String>) {
        self.tools.store(Arc::new(tools.into_iter().collect()));
    }

    /// Whether a tool with that name is configured.
    pub fn has_tool(&self, tool: &str) -> bool {
        self.tools.load().contains(tool)
    }

    fn tool_id(&self, tool: &str) -> String {
        let known = if self.has_tool(tool) {
            tool
        } else {
            UNKNOWN_TOOL
        };
        known.to_owned()
    }

    /// The `tool_id` label of a tool that may belong to a gateway.
    fn gateway_tool_id(&self, tool: &str) -> String {
        let known = self.has_tool(tool) || self.gateway_tools.admits(tool);
        if known { tool } else { UNKNOWN_TOOL }.to_owned()
    }

    /// Records a decided message: `moment` is before, after or elicitation, `action` is pass,
    /// block or modify.
    pub(crate) fn record_intercept(
        &self,
        moment: &'static str,
        action: &'static str,
        tool: &str,
        took: Duration,
    ) {
        let labels = InterceptLabels {
            r#type: moment,
            action,
            tool_id: self.gateway_tool_id(tool),
        };
        self.intercepts.get_or_create(&labels).inc();
        let labels = MomentLabels {
            r#type: moment,
            tool_id: labels.tool_id,
        };
        let times = self.intercept_times.get_or_create(&labels);
        times.observe(took.as_secs_f64());
    }

    /// Records the decision of a policy bundle.
    pub(crate) fn record_decision(&self, bundle: &str, action: &'static str, took: Duration) {
        let labels = DecisionLabels {
            action,
            bundle_id: bundle.to_owned(),
        };
        self.decisions.get_or_create(&labels).inc();
        let labels = BundleLabels {
            bundle_id: labels.bundle_id,
        };
        let times = self.decision_times.get_or_create(&labels);
        times.observe(took.as_secs_f64());
    }

    /// Records that a policy bundle failed to decide.
    pub(crate) fn record_policy_failure(&self, bundle: &str, failure: &'static str) {
        let labels = FailureLabels {
            bundle_id: bundle.to_owned(),
            failure,
        };
        self.failures.get_or_create(&labels).inc();
    }

    /// Records the end of a tool call.
    pub fn record_execution(
        &self,
        tool: &str,
        runtime: RuntimeKind,
        status: CallStatus,
        took: Duration,
    ) {
        let labels = ToolLabels {
            tool_id: self.tool_id(tool),
            runtime_type: runtime.as_str(),
        };
        let times = self.execution_times.get_or_create(&labels);
        times.observe(took.as_secs_f64());
        let labels = ExecutionLabels {
            tool_id: labels.tool_id,
            runtime_type: labels.runtime_type,
            status: status.as_str(),
        };
        self.executions.get_or_create(&labels).inc();
    }

    /// Exports the process status of these tools from now on. Other tools are exported only while
    /// they still have a process.
    pub fn report_tools<'a>(&self, tools: impl IntoIterator<Item = (&'a str, RuntimeKind)>) {
        let configured: HashSet<_> = tools.into_iter().map(tool_labels).collect();
        let mut table = self.process_table();
        let old = std::mem::replace(&mut table.configured, configured);
        for labels in old.union(&table.configured) {
            self.write_processes(&table, labels);
        }
    }

    /// Counts a process of a tool until the returned value is dropped.
    pub fn count_process(&self, tool: &str, runtime: RuntimeKind) -> ProcessCount {
        let labels = tool_labels((tool, runtime));
        self.change_processes(&labels, 1);
        ProcessCount {
            metrics: self.clone(),
            labels,
        }
    }

    fn change_processes(&self, labels: &ToolLabels, delta: i64) {
        let mut table = self.process_table();
        let running = table.running.entry(labels.clone()).or_default();
        *running += delta;
        if *running == 0 {
            table.running.remove(labels);
        }
        self.write_processes(&table, labels);
    }

    fn write_processes(&self, table: &ProcessTable, labels: &ToolLabels) {
        let running = table.running.get(labels).copied().unwrap_or_default();
        if running == 0 && !table.configured.contains(labels) {
            self.processes.remove(labels);
            self.process_status.remove(labels);
            return;
        }
        self.processes.get_or_create(labels).set(running);
        let status = i64::from(running > 0);
        self.process_status.get_or_create(labels).set(status);
    }

    fn process_table(&self) -> MutexGuard<'_, ProcessTable> {
        self.process_table
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// Records an output line that is not a JSON-RPC message. Returns how many the tool has
    /// written so far.
    pub fn record_junk_line(&self, tool: &str) -> u64 {
        let labels = JunkLabels {
            tool_id: self.tool_id(tool),
        };
        self.junk_lines.get_or_create(&labels).inc() + 1
    }

    /// The gauge of stored request contexts.
    pub(crate) fn contexts(&self) -> Gauge {
        self.contexts.clone()
    }
}

fn tool_labels((tool, runtime): (&str, RuntimeKind)) -> ToolLabels {
    ToolLabels {
        tool_id: tool.to_owned(),
        runtime_type: runtime.as_str(),
    }
}

#[cfg(test)]
mod tests;
