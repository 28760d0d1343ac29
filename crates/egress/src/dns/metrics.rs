//! Queries in numbers.

use hickory_proto::rr::RecordType;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::registry::Registry;

/// Queries by result and type. Both come from closed lists.
#[derive(Clone, Debug, Default)]
pub struct DnsMetrics {
    queries: Family<Labels, Counter>,
}

type Labels = [(&'static str, &'static str); 2];

/// What became of a query.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Outcome {
    /// Answered by the gate itself: a synthetic address, its own, or a fixed one.
    Local,
    /// Answered by an upstream.
    Forwarded,
    /// Answered by an upstream a while ago.
    Cached,
    /// The name has nothing of that type, or does not exist.
    Empty,
    /// The rules say no.
    Denied,
    /// The type is not served.
    Refused,
    /// The asker is not known.
    Unknown,
    /// The message cannot be read.
    Malformed,
    /// No upstream answered in time.
    Failed,
    /// Too many at once.
    Dropped,
}

impl Outcome {
    /// The word in the metric.
    pub const fn as_str(self) -> &'static str {
        match self {
            Outcome::Local => "local",
            Outcome::Forwarded => "forwarded",
            Outcome::Cached => "cached",
            Outcome::Empty => "empty",
            Outcome::Denied => "denied",
            Outcome::Refused => "refused",
            Outcome::Unknown => "unknown",
            Outcome::Malformed => "malformed",
            Outcome::Failed => "failed",
            Outcome::Dropped => "dropped",
        }
    }
}

impl DnsMetrics {
    /// Makes the numbers visible in `registry`. The library appends `_total`.
    pub fn register(&self, registry: &mut Registry) {
        registry.register(
            "proxy_dns_queries",
            "DNS queries by result and type",
            self.queries.clone(),
        );
    }

    /// How many queries of `kind` came to `outcome`.
    pub fn count_of(&self, outcome: Outcome, kind: Option<RecordType>) -> u64 {
        self.queries.get_or_create(&labels(outcome, kind)).get()
    }

    pub(super) fn count(&self, outcome: Outcome, kind: Option<RecordType>) {
        self.queries.get_or_create(&labels(outcome, kind)).inc();
    }
}

fn labels(outcome: Outcome, kind: Option<RecordType>) -> Labels {
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
    fn a_dashboard_finds_queries_by_result_and_type() {
        let metrics = DnsMetrics::default();
        let mut registry = Registry::default();
        metrics.register(&mut registry);
        metrics.count(Outcome::Denied, Some(RecordType::A));
        metrics.count(Outcome::Refused, Some(RecordType::Unknown(65_000)));
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
