//! The numbers of tool calls. Their names are those that dashboards for this kind of gate
//! already use.
//!
//! The tools of a gateway are not configured here. The first [`foreign::MAX_FOREIGN`] names of them have
//! series of their own, and every further one is `unknown`: an agent that makes up names cannot
//! make the number of series grow.

mod foreign;

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

use self::foreign::ForeignTools;

/// What is not configured is called.
pub const UNKNOWN: &str = "unknown";

/// Counters and timers of tool calls. Cloning is cheap.
#[derive(Clone, Debug)]
pub struct Metrics {
    tools: Arc<ArcSwap<HashSet<String>>>,
    foreign: ForeignTools,
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
    junk: Family<JunkLabels, Counter>,
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

/// The processes of every tool: their number and their status change together.
#[derive(Debug, Default)]
struct ProcessTable {
    /// Tools that are configured: they have a series, also without a process.
    configured: HashSet<ToolLabels>,
    /// Processes that run, of tools that have any.
    running: HashMap<ToolLabels, i64>,
}

/// Counts one process of a tool for as long as it exists, under the labels it began with: a
/// reload may have removed the tool by the time the process ends.
#[derive(Debug)]
pub struct ProcessCount {
    metrics: Metrics,
    labels: ToolLabels,
}

impl ProcessCount {
    /// The process ended with this exit code, where one is known.
    pub fn exited(self, code: Option<i32>) {
        let Some(code) = code else { return };
        let labels = ExitLabels {
            tool_id: self.labels.tool_id.clone(),
            runtime_type: self.labels.runtime_type,
            // 256 codes and the signals: what a process can choose from is bounded.
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

/// How a call of a tool ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Status {
    /// With a result.
    Success,
    /// With an error, be it the tool's or its process's.
    Error,
    /// Not in time.
    Timeout,
    /// The caller took it back.
    Cancelled,
}

impl Status {
    /// The word in metrics.
    pub const fn as_str(self) -> &'static str {
        match self {
            Status::Success => "success",
            Status::Error => "error",
            Status::Timeout => "timeout",
            Status::Cancelled => "cancelled",
        }
    }
}

impl Default for Metrics {
    fn default() -> Self {
        // From ten microseconds to some ten seconds.
        let decisions = || Histogram::new(exponential_buckets(0.000_01, 2.5, 16));
        // To some minutes.
        let executions = || Histogram::new(exponential_buckets(0.000_01, 3.0, 16));
        Self {
            tools: Arc::default(),
            foreign: ForeignTools::default(),
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
            junk: Family::default(),
            contexts: Gauge::default(),
        }
    }
}

impl Metrics {
    /// Makes the numbers visible in `registry`. Names are given without `_total`: the library
    /// appends it to counters.
    pub fn register(&self, registry: &mut Registry) {
        registry.register(
            "polis_sidecar_intercept",
            "Tool messages judged, by moment and outcome",
            self.intercepts.clone(),
        );
        registry.register(
            "polis_sidecar_intercept_duration_seconds",
            "Time to judge a tool message",
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
            "Tool messages about which a policy bundle could not decide",
            self.failures.clone(),
        );
        registry.register(
            "polis_sidecar_tool_executions",
            "Calls of tools by outcome",
            self.executions.clone(),
        );
        registry.register(
            "polis_sidecar_tool_execution_duration_seconds",
            "Time a tool took to answer",
            self.execution_times.clone(),
        );
        registry.register(
            "polis_sidecar_tool_exits",
            "Processes of tools that ended, by exit code",
            self.exits.clone(),
        );
        registry.register(
            "polis_sidecar_process_status",
            "Whether a process of the tool runs (1) or none (0)",
            self.process_status.clone(),
        );
        registry.register(
            "polis_sidecar_processes",
            "Processes of the tool that run",
            self.processes.clone(),
        );
        registry.register(
            "polis_sidecar_tool_junk",
            "Lines of a tool that were no message",
            self.junk.clone(),
        );
        registry.register(
            "polis_sidecar_context_active",
            "Requests that are remembered between their hooks",
            self.contexts.clone(),
        );
    }

    /// From now on these are the tools that have a name here.
    pub fn know(&self, tools: impl IntoIterator<Item = String>) {
        self.tools.store(Arc::new(tools.into_iter().collect()));
    }

    /// Whether a tool of that name is configured.
    pub fn knows(&self, tool: &str) -> bool {
        self.tools.load().contains(tool)
    }

    fn tool_id(&self, tool: &str) -> String {
        let known = if self.knows(tool) { tool } else { UNKNOWN };
        known.to_owned()
    }

    /// The label of a tool that may be a gateway's own.
    fn any_tool_id(&self, tool: &str) -> String {
        let known = self.knows(tool) || self.foreign.admits(tool);
        if known { tool } else { UNKNOWN }.to_owned()
    }

    /// A message was judged: `moment` is before, after or elicitation, `action` is pass, block
    /// or modify.
    pub(crate) fn judged(
        &self,
        moment: &'static str,
        action: &'static str,
        tool: &str,
        took: Duration,
    ) {
        let labels = InterceptLabels {
            r#type: moment,
            action,
            tool_id: self.any_tool_id(tool),
        };
        self.intercepts.get_or_create(&labels).inc();
        let labels = MomentLabels {
            r#type: moment,
            tool_id: labels.tool_id,
        };
        let times = self.intercept_times.get_or_create(&labels);
        times.observe(took.as_secs_f64());
    }

    /// A bundle decided.
    pub(crate) fn decided(&self, bundle: &str, action: &'static str, took: Duration) {
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

    /// A bundle could not decide.
    pub(crate) fn failed(&self, bundle: &str, failure: &'static str) {
        let labels = FailureLabels {
            bundle_id: bundle.to_owned(),
            failure,
        };
        self.failures.get_or_create(&labels).inc();
    }

    /// A call of a tool ended.
    pub fn tool_executed(&self, tool: &str, runtime: RuntimeKind, status: Status, took: Duration) {
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

    /// Reports the status of these tools from now on, and of no other once it has no process.
    pub fn report_tools<'a>(&self, tools: impl IntoIterator<Item = (&'a str, RuntimeKind)>) {
        let configured: HashSet<_> = tools.into_iter().map(tool_labels).collect();
        let mut table = self.process_table();
        let old = std::mem::replace(&mut table.configured, configured);
        for labels in old.union(&table.configured) {
            self.write_processes(&table, labels);
        }
    }

    /// Counts a process of a tool, until the value is dropped.
    pub fn count_process(&self, tool: &str, runtime: RuntimeKind) -> ProcessCount {
        let labels = tool_labels((tool, runtime));
        self.change_processes(&labels, 1);
        ProcessCount {
            metrics: self.clone(),
            labels,
        }
    }

    fn change_processes(&self, labels: &ToolLabels, by: i64) {
        let mut table = self.process_table();
        let running = table.running.entry(labels.clone()).or_default();
        *running += by;
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

    /// A tool wrote a line that is no message: the how many-th.
    pub fn junk(&self, tool: &str) -> u64 {
        let labels = JunkLabels {
            tool_id: self.tool_id(tool),
        };
        self.junk.get_or_create(&labels).inc() + 1
    }

    /// The gauge of remembered requests.
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
