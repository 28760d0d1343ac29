//! Exports traces to a collector over OTLP/HTTP.

use std::borrow::Cow;
use std::future::Future;
use std::net::SocketAddr;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use anyhow::{Context as _, Result};
use bytes::Bytes;
use config::Settings;
use hickory_resolver::TokioResolver;
use http::{Request, Response};
use http_body_util::{BodyExt, Full, Limited};
use hyper_rustls::HttpsConnector;
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::client::legacy::connect::dns::Name;
use hyper_util::rt::TokioExecutor;
use opentelemetry::KeyValue;
use opentelemetry_http::{HttpClient, HttpError};
use opentelemetry_otlp::{SpanExporter, WithExportConfig, WithHttpConfig};
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::error::OTelSdkResult;
use opentelemetry_sdk::trace::{SdkTracerProvider, SpanData};
use tokio::runtime::Handle;

use crate::telemetry::redact::Redactor;

/// Timeout of one export; the batch is then lost.
const TIMEOUT: Duration = Duration::from_secs(5);

/// Maximum size of a collector's response.
const MAX_RESPONSE: usize = 64 * 1024;

/// The tracer provider of `settings`; none if traces are disabled.
pub fn provider(settings: &Settings, redactor: &Redactor) -> Result<Option<SdkTracerProvider>> {
    let tracing = &settings.metrics.tracing;
    if !tracing.enabled {
        return Ok(None);
    }
    let endpoint = traces_url(&tracing.otlp_endpoint());
    let exporter = SpanExporter::builder()
        .with_http()
        .with_http_client(CollectorClient::new()?)
        .with_endpoint(endpoint)
        .with_timeout(TIMEOUT)
        .build()
        .context("cannot set up traces")?;
    let exporter = RedactingExporter {
        exporter,
        redactor: redactor.clone(),
    };
    let resource = Resource::builder().with_service_name("palisade").build();
    let provider = SdkTracerProvider::builder()
        .with_batch_exporter(exporter)
        .with_resource(resource)
        .build();
    Ok(Some(provider))
}

/// An exporter that redacts spans, since traces leave the machine.
#[derive(Debug)]
struct RedactingExporter {
    exporter: SpanExporter,
    redactor: Redactor,
}

impl RedactingExporter {
    fn redact(&self, attributes: &mut [KeyValue]) {
        for attribute in attributes {
            let text = attribute.value.as_str();
            if let Cow::Owned(clean) = self.redactor.redact(text.as_bytes()) {
                attribute.value = String::from_utf8_lossy(&clean).into_owned().into();
            }
        }
    }
}

impl opentelemetry_sdk::trace::SpanExporter for RedactingExporter {
    async fn export(&self, mut batch: Vec<SpanData>) -> OTelSdkResult {
        for span in &mut batch {
            self.redact(&mut span.attributes);
            for event in &mut span.events.events {
                self.redact(&mut event.attributes);
            }
        }
        self.exporter.export(batch).await
    }

    fn shutdown_with_timeout(&self, timeout: Duration) -> OTelSdkResult {
        self.exporter.shutdown_with_timeout(timeout)
    }

    fn force_flush(&self) -> OTelSdkResult {
        self.exporter.force_flush()
    }

    fn set_resource(&mut self, resource: &Resource) {
        self.exporter.set_resource(resource);
    }
}

/// The URL for spans below an OTLP endpoint.
fn traces_url(endpoint: &str) -> String {
    let base = endpoint.trim_end_matches('/');
    let base = base.strip_suffix("/v1/traces").unwrap_or(base);
    format!("{base}/v1/traces")
}

/// HTTP client on the gate's runtime: the exporter calls the client from a thread without a
/// runtime.
#[derive(Clone, Debug)]
struct CollectorClient {
    runtime: Handle,
    client: Client<HttpsConnector<HttpConnector<HickoryResolver>>, Full<Bytes>>,
}

impl CollectorClient {
    fn new() -> Result<Self> {
        let mut http = HttpConnector::new_with_resolver(HickoryResolver::new()?);
        http.enforce_http(false);
        http.set_nodelay(true);
        http.set_connect_timeout(Some(TIMEOUT));
        let https = hyper_rustls::HttpsConnectorBuilder::new()
            .with_native_roots()
            .context("cannot read this system's CA certificates")?
            .https_or_http()
            .enable_http1()
            .wrap_connector(http);
        let client = Client::builder(TokioExecutor::new()).build(https);
        Ok(Self {
            runtime: Handle::current(),
            client,
        })
    }

    async fn send(&self, request: Request<Bytes>) -> Result<Response<Bytes>, HttpError> {
        let response = self.client.request(request.map(Full::new)).await?;
        let (head, body) = response.into_parts();
        let body = Limited::new(body, MAX_RESPONSE).collect().await?.to_bytes();
        Ok(Response::from_parts(head, body))
    }
}

#[async_trait::async_trait]
impl HttpClient for CollectorClient {
    async fn send_bytes(&self, request: Request<Bytes>) -> Result<Response<Bytes>, HttpError> {
        let own = self.clone();
        self.runtime
            .spawn(async move { tokio::time::timeout(TIMEOUT, own.send(request)).await? })
            .await?
    }
}

/// Resolves names with hickory: the static binary must not call getaddrinfo.
#[derive(Clone, Debug)]
struct HickoryResolver(TokioResolver);

impl HickoryResolver {
    fn new() -> Result<Self> {
        let builder = TokioResolver::builder_tokio().context("cannot read /etc/resolv.conf")?;
        Ok(Self(builder.build().context("cannot set up the resolver")?))
    }
}

impl tower_service::Service<Name> for HickoryResolver {
    type Response = std::vec::IntoIter<SocketAddr>;
    type Error = hickory_resolver::net::NetError;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, Self::Error>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, name: Name) -> Self::Future {
        let resolver = self.0.clone();
        Box::pin(async move {
            let found = resolver.lookup_ip(name.as_str()).await?;
            Ok(found
                .iter()
                .map(|ip| SocketAddr::new(ip, 0))
                .collect::<Vec<_>>()
                .into_iter())
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spans_are_posted_below_the_endpoint() {
        for (given, url) in [
            ("http://localhost:4318", "http://localhost:4318/v1/traces"),
            ("http://localhost:4318/", "http://localhost:4318/v1/traces"),
            ("https://c.example/otlp", "https://c.example/otlp/v1/traces"),
            (
                "http://c.example:9/v1/traces",
                "http://c.example:9/v1/traces",
            ),
        ] {
            assert_eq!(traces_url(given), url, "{given}");
        }
    }
}
