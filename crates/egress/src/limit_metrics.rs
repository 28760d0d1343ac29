//! Metrics of rate limits and circuit breakers, read from every sandbox's state at each scrape. The
//! series of a sandbox end with it.

use std::collections::BTreeMap;
use std::fmt::Error;
use std::sync::Arc;

use policy::breaker::BreakerState;
use policy::id::SandboxId;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric};
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;

use crate::rate_limits::{HostReading, Reading};
use crate::sandbox_state::SandboxState;
use crate::services::Services;

/// The buckets and breakers of every sandbox.
#[derive(Debug)]
pub struct LimitMetrics(pub Arc<Services>);

/// The metric values of one label of one sandbox.
type Row = (SandboxId, String, Reading);

impl LimitMetrics {
    fn rows(&self) -> Vec<Row> {
        let now = self.0.clock().tick();
        let rows_of = |sandbox: Arc<SandboxState>| {
            let snapshot = self.0.snapshot_for(Some(&sandbox));
            let readings = sandbox.upstreams.readings(&snapshot.settings, now);
            let id = sandbox.id().clone();
            let rows = readings.into_iter();
            rows.map(move |(label, reading)| (id.clone(), label, reading))
        };
        self.0
            .sandboxes_with_state()
            .into_iter()
            .flat_map(rows_of)
            .collect()
    }
}

impl Collector for LimitMetrics {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), Error> {
        let rows = self.rows();
        encode_gauge(
            &mut encoder,
            "proxy_rate_limit_bucket_tokens",
            "Requests that may be sent at once",
            &rows,
            |read| i64::from(read.tokens),
        )?;
        encode_gauge(
            &mut encoder,
            "proxy_circuit_breaker_state",
            "0 closed, 1 open, 2 half-open",
            &rows,
            |read| match read.state {
                BreakerState::Closed => 0,
                BreakerState::Open => 1,
                BreakerState::HalfOpen => 2,
            },
        )?;
        encode_rejections(&mut encoder, &rows)?;
        let mut failures = self.0.metrics().failures().read();
        for (_, label, reading) in rows {
            if reading.hosts.is_some() {
                failures.entry(label).or_default();
            }
        }
        encode_failures(&mut encoder, &failures)
    }
}

fn encode_gauge(
    encoder: &mut DescriptorEncoder<'_>,
    name: &str,
    help: &str,
    rows: &[Row],
    value: fn(&HostReading) -> i64,
) -> Result<(), Error> {
    let kind = ConstGauge::new(0_i64).metric_type();
    let mut family = encoder.encode_descriptor(name, help, None, kind)?;
    for (sandbox, label, reading) in rows {
        let Some(read) = &reading.hosts else {
            continue;
        };
        let labels = [("container_id", sandbox.as_str()), ("upstream", label)];
        ConstGauge::new(value(read)).encode(family.encode_family(&labels)?)?;
    }
    Ok(())
}

fn encode_rejections(encoder: &mut DescriptorEncoder<'_>, rows: &[Row]) -> Result<(), Error> {
    let kind = ConstCounter::new(0_u64).metric_type();
    let mut family = encoder.encode_descriptor(
        "proxy_rate_limit_rejected",
        "Requests refused for their rate, by container and upstream",
        None,
        kind,
    )?;
    for (sandbox, label, reading) in rows {
        let labels = [("container_id", sandbox.as_str()), ("upstream", label)];
        ConstCounter::new(reading.rejected).encode(family.encode_family(&labels)?)?;
    }
    Ok(())
}

fn encode_failures(
    encoder: &mut DescriptorEncoder<'_>,
    failures: &BTreeMap<String, u64>,
) -> Result<(), Error> {
    let kind = ConstCounter::new(0_u64).metric_type();
    let mut family = encoder.encode_descriptor(
        "proxy_circuit_breaker_failures",
        "Requests that counted as failures of their upstream",
        None,
        kind,
    )?;
    for (label, count) in failures {
        let labels = [("upstream", label.as_str())];
        ConstCounter::new(*count).encode(family.encode_family(&labels)?)?;
    }
    Ok(())
}
