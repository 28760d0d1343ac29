//! Metrics of DNS queries.

use hickory_proto::rr::RecordType;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::registry::Registry;

/// Counts queries by result and type. Both labels have a fixed set of values.
#[derive(Clone, Debug, Default)]
pub struct DnsMetrics {
    queries: Family<Labels, Counter>,
}

type Labels = [(&'static str, &'static str); 2];

/// The outcome of a query.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum QueryOutcome {
    /// Answered by the gate itself: a synthetic address, the gate's own, or a configured one.
    Local,
    /// Answered by an upstream.
    Forwarded,
    /// Answered from the cache of upstream answers.
    Cached,
    /// The name has no records of the type, or does not exist.
    Empty,
    /// The rules deny the name.
    Denied,
    /// The record type is not answered.
    Refused,
    /// The client is not registered.
    Unknown,
    /// The message is malformed.
    Malformed,
    /// No upstream answered in time.
    Failed,
    /// The client exceeded its rate or number of queries.
    Dropped,
}

impl QueryOutcome {
    /// The label value in the metric.
    pub const fn as_str(self) -> &'static str {
        match self {
            QueryOutcome::Local => "local",
            QueryOutcome::Forwarded => "forwarded",
            QueryOutcome::Cached => "cached",
            QueryOutcome::Empty => "empty",
            QueryOutcome::Denied => "denied",
            QueryOutcome::Refused => "refused",
            QueryOutcome::Unknown => "unknown",
            QueryOutcome::Malformed => "malformed",
            QueryOutcome::Failed => "failed",
            QueryOutcome::Dropped => "dropped",
        }
    }
}

impl DnsMetrics {
    /// Registers the metrics in `registry`. The library appends `_total`.
    pub fn register(&self, registry: &mut Registry) {
        registry.register(
            "proxy_dns_queries",
            "DNS queries by result and type",
            self.queries.clone(),
        );
    }

    /// The number of queries of `kind` with `outcome`.
    pub fn count_of(&self, outcome: QueryOutcome, kind: Option<RecordType>) -> u64 {
        self.queries.get_or_create(&labels(outcome, kind)).get()
    }

    pub(super) fn count(&self, outcome: QueryOutcome, kind: Option<RecordType>) {
        self.queries.get_or_create(&labels(outcome, kind)).inc();
    }
}

fn labels(outcome: QueryOutcome, kind: Option<RecordType>) -> Labels {
    let kind = match kind {
        Some(RecordType::A) => "A",
        Some(RecordType::AAAA) => "AAAA",
        Some(RecordType::ANY) => "ANY",
        Some(RecordType::CNAME) => "CNAME",
        Some(RecordType::HTTPS) => "HTTPS",
        Some(RecordType::MX) => "MX",
        Some(RecordType::NS) => "NS",
        Some(RecordType::PTR) => "PTR",
        Some(RecordType::SOA) => "SOA",
        Some(RecordType::SRV) => "SRV",
        Some(RecordType::SVCB) => "SVCB",
        Some(RecordType::TXT) => "TXT",
        Some(_) => "other",
        None => "none",
    };
    [("result", outcome.as_str()), ("type", kind)]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn queries_are_counted_by_result_and_type() {
        let metrics = DnsMetrics::default();
        let mut registry = Registry::default();
        metrics.register(&mut registry);
        metrics.count(QueryOutcome::Denied, Some(RecordType::A));
        metrics.count(QueryOutcome::Refused, Some(RecordType::Unknown(65_000)));
        let mut text = String::new();
        prometheus_client::encoding::text::encode(&mut text, &registry).unwrap();
        for line in [
            "proxy_dns_queries_total{result=\"denied\",type=\"A\"} 1",
            "proxy_dns_queries_total{result=\"refused\",type=\"other\"} 1",
        ] {
            assert!(text.lines().any(|found| found == line), "{text}");
        }
    }
}
