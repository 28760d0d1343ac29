//! The numbers of tool calls. Their names are those that dashboards for this kind of gate
//! already use.
//!
//! The tools of a gateway are not configured here. The first [`foreign::MAX_FOREIGN`] names of them have
//! series of their own, and every further one is `unknown`: an agent that makes up names cannot
//! make the number of series grow.

mod foreign;

use std::collections::HashSet;
use std::sync::Arc;
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
            "Processes of a tool that run",
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

    /// A call of a tool ended; `exit_code` where its process ended with it.
    pub fn tool_executed(
        &self,
        tool: &str,
        runtime: RuntimeKind,
        status: Status,
        took: Duration,
        exit_code: Option<i32>,
    ) {
        let tool_id = self.tool_id(tool);
        let runtime_type = runtime.as_str();
        let labels = ExecutionLabels {
            tool_id: tool_id.clone(),
            runtime_type,
            status: status.as_str(),
        };
        self.executions.get_or_create(&labels).inc();
        if let Some(code) = exit_code {
            let labels = ExitLabels {
                tool_id: tool_id.clone(),
                runtime_type,
                // 256 codes and the signals: what a process can choose from is bounded.
                exit_code: code.clamp(-128, 255).to_string(),
            };
            self.exits.get_or_create(&labels).inc();
        }
        let labels = ToolLabels {
            tool_id,
            runtime_type,
        };
        let times = self.execution_times.get_or_create(&labels);
        times.observe(took.as_secs_f64());
    }

    /// So many processes of a tool more, or fewer, run.
    pub fn process_running(&self, tool: &str, runtime: RuntimeKind, change: i64) {
        let labels = ToolLabels {
            tool_id: self.tool_id(tool),
            runtime_type: runtime.as_str(),
        };
        self.processes.get_or_create(&labels).inc_by(change);
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

#[cfg(test)]
mod tests;
