//! `metrics`: Prometheus metrics and traces.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::leaf::{HttpUrl, Text, UrlPath};

/// Prometheus metrics and traces.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct MetricsSection {
    /// Serve metrics at the addresses of `server`. The control socket always serves them.
    pub enabled: bool,
    /// URL path of the metrics. Not below `/health`, `/intercept`, `/mcp`, `/message` or `/sse`.
    #[schemars(with = "Text<UrlPath>")]
    pub path: String,
    /// Export of traces over OTLP.
    pub tracing: TracingSettings,
}

impl Default for MetricsSection {
    fn default() -> Self {
        Self {
            enabled: true,
            path: "/metrics".to_owned(),
            tracing: TracingSettings::default(),
        }
    }
}

/// Export of traces over OTLP.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct TracingSettings {
    /// Whether traces are exported.
    pub enabled: bool,
    /// OTLP endpoint over HTTP. With Jaeger's old `:14268/api/traces`, port 4318 of the same host
    /// is used.
    #[schemars(with = "Text<HttpUrl>")]
    pub endpoint: String,
}

impl Default for TracingSettings {
    fn default() -> Self {
        Self {
            enabled: false,
            endpoint: "http://localhost:4318".to_owned(),
        }
    }
}

impl TracingSettings {
    /// The endpoint to export to. Port 14268 is Jaeger's Thrift port, which does not accept OTLP;
    /// Jaeger accepts it on 4318.
    pub fn otlp_endpoint(&self) -> String {
        match self.jaeger_host() {
            Some(host) => format!("{host}:4318"),
            None => self.endpoint.clone(),
        }
    }

    /// Whether the endpoint has Jaeger's old port.
    pub fn is_jaeger_thrift(&self) -> bool {
        self.jaeger_host().is_some()
    }

    fn jaeger_host(&self) -> Option<&str> {
        let (host, path) = self.endpoint.split_once(":14268")?;
        (path.is_empty() || path.starts_with('/')).then_some(host)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn jaeger_thrift_port_is_replaced_by_the_otlp_port() {
        for (input, used) in [
            ("http://jaeger:14268/api/traces", "http://jaeger:4318"),
            ("http://localhost:4318", "http://localhost:4318"),
            ("http://h:142689/x", "http://h:142689/x"),
        ] {
            let tracing = TracingSettings {
                enabled: true,
                endpoint: input.to_owned(),
            };
            assert_eq!(tracing.otlp_endpoint(), used);
        }
    }
}
