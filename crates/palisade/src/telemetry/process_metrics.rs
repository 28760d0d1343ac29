//! Metrics of the gate process, and the registry of all metrics.

use std::fmt;
use std::sync::Arc;

use control::metrics::ControlMetrics;
use egress::limit_metrics::LimitMetrics;
use egress::services::Services;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeLabelSet, EncodeMetric};
use prometheus_client::metrics::counter::{ConstCounter, Counter};
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::metrics::info::Info;
use prometheus_client::registry::Registry;
use store::Store;

/// Counters of reloads and task restarts.
#[derive(Clone, Debug, Default)]
pub struct ProcessMetrics {
    reloads: Family<ReloadLabels, Counter>,
    restarts: Family<TaskLabels, Counter>,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ReloadLabels {
    status: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct TaskLabels {
    task: &'static str,
}

impl ProcessMetrics {
    /// Counts a reload.
    pub fn count_reload(&self, succeeded: bool) {
        let status = if succeeded { "success" } else { "failed" };
        self.reloads.get_or_create(&ReloadLabels { status }).inc();
    }

    /// Counts a restart of a task.
    pub fn count_task_restart(&self, task: &'static str) {
        self.restarts.get_or_create(&TaskLabels { task }).inc();
    }

    /// A registry with every metric of the gate.
    ///
    /// Names have no `_total`: the library appends it to counters.
    pub fn registry(
        &self,
        store: Store,
        control: &ControlMetrics,
        traffic: &Arc<Services>,
        tools: &mcp::metrics::Metrics,
    ) -> Registry {
        for status in ["success", "failed"] {
            drop(self.reloads.get_or_create(&ReloadLabels { status }));
        }
        let mut registry = Registry::default();
        registry.register(
            "polis_sidecar_config_reloads",
            "Configuration reloads by outcome",
            self.reloads.clone(),
        );
        registry.register(
            "palisade_task_restarts",
            "Restarts of supervised tasks",
            self.restarts.clone(),
        );
        registry.register(
            "palisade_build",
            "Version of the running gate",
            Info::new([("version", env!("CARGO_PKG_VERSION"))]),
        );
        control.register(&mut registry);
        traffic.register(&mut registry);
        registry.register_collector(Box::new(LimitMetrics(Arc::clone(traffic))));
        tools.register(&mut registry);
        registry.register_collector(Box::new(StoreMetrics(store)));
        registry
    }
}

/// Metrics of the store, read at each scrape.
#[derive(Debug)]
struct StoreMetrics(Store);

impl Collector for StoreMetrics {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        let stats = self.0.stats();
        let mut gauge = |name: &str, help: &str, value: usize| {
            let gauge = ConstGauge::new(i64::try_from(value).unwrap_or(i64::MAX));
            gauge.encode(encoder.encode_descriptor(name, help, None, gauge.metric_type())?)
        };
        gauge(
            "proxy_registered_containers",
            "Registrations that have not expired",
            stats.registered,
        )?;
        gauge(
            "palisade_audit_queued",
            "Audit records waiting to be written",
            stats.queued,
        )?;
        let mut counter = |name: &str, help: &str, value: u64| {
            let counter = ConstCounter::new(value);
            counter.encode(encoder.encode_descriptor(name, help, None, counter.metric_type())?)
        };
        counter(
            "palisade_audit_dropped",
            "Audit records dropped by audit.on_full",
            stats.dropped,
        )?;
        counter(
            "palisade_audit_lost",
            "Audit records lost with the database",
            stats.lost,
        )?;
        counter(
            "palisade_audit_merged",
            "Audit records merged into another record",
            stats.merged,
        )?;
        counter(
            "palisade_audit_rotated",
            "Audit records removed by rotation",
            stats.rotated,
        )?;
        counter(
            "palisade_audit_failed_batches",
            "Database commits that failed",
            stats.failed_batches,
        )?;
        counter("palisade_audit_batches", "Database commits", stats.batches)?;
        counter(
            "palisade_audit_jsonl_errors",
            "Failed writes of the JSON lines",
            stats.jsonl_errors,
        )?;
        let kinds = ConstCounter::new(0_u64);
        let mut records = encoder.encode_descriptor(
            "palisade_audit_records",
            "Audit records written",
            None,
            kinds.metric_type(),
        )?;
        for (kind, count) in stats.records {
            let counter = ConstCounter::new(count);
            let labels = [("kind", kind.as_str())];
            counter.encode(records.encode_family(&labels)?)?;
        }
        Ok(())
    }
}
