//! Metrics of the control socket.

use http::StatusCode;
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::registry::Registry;

/// Requests by action and status. Both labels come from closed lists, so that no client can add
/// series.
#[derive(Clone, Debug, Default)]
pub struct ControlMetrics {
    requests: Family<RequestLabels, Counter>,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct RequestLabels {
    action: &'static str,
    status: u16,
}

impl ControlMetrics {
    /// Registers the metrics in `registry`.
    pub fn register(&self, registry: &mut Registry) {
        registry.register(
            "palisade_control_requests",
            "Requests on the control socket",
            self.requests.clone(),
        );
    }

    pub(crate) fn count(&self, action: &'static str, status: StatusCode) {
        let labels = RequestLabels {
            action,
            status: status.as_u16(),
        };
        self.requests.get_or_create(&labels).inc();
    }
}
