//! The dialer against real servers on loopback.

#![expect(
    clippy::unwrap_used,
    clippy::indexing_slicing,
    clippy::panic,
    reason = "a failed expectation fails the test"
)]

#[path = "dialer/addresses.rs"]
mod addresses;
#[path = "dialer/certificates.rs"]
mod certificates;
#[path = "dialer/early_responses.rs"]
mod early_responses;
#[path = "dialer/messages.rs"]
mod messages;
#[path = "dialer/pool.rs"]
mod pool;
#[path = "dialer/timeouts.rs"]
mod timeouts;
#[path = "dialer/upgrades.rs"]
mod upgrades;

use std::net::SocketAddr;

use bytes::Bytes;
use config::Settings;
use egress::body::{self, MessageBody};
use egress::dialer::{DialError, Dialer, UpstreamResponse};
use egress::outgoing::{Outgoing, Route};
use http::Request;
use http_body_util::BodyExt;
use policy::host::Host;
use policy::id::SandboxId;
use testkit::ca::Ca;

/// Writes settings files as an operator does, in a directory with one CA certificate.
struct Operator {
    directory: tempfile::TempDir,
    ca: Ca,
}

impl Operator {
    fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let ca = Ca::new("roots of a test");
        ca.write(directory.path());
        Self { directory, ca }
    }

    /// Loads settings with `lines` as the section `egress`.
    fn settings(&self, lines: &str) -> Settings {
        let path = self.directory.path().join("palisade.yaml");
        let indented: String = lines.lines().map(|line| format!("  {line}\n")).collect();
        std::fs::write(&path, format!("version: \"1.0\"\negress:\n{indented}")).unwrap();
        config::load(Some(&path), &|_| None).unwrap_or_else(|bad| panic!("{bad:?}"))
    }

    /// A dialer that resolves `name` to `address` and trusts the test's CA, with `more` settings.
    fn dialer(&self, name: &str, address: SocketAddr, more: &str) -> Dialer {
        let lines = format!("resolve: {{{name}: '{address}'}}\nextra_roots: [root.pem]\n{more}");
        Dialer::new(&self.settings(&lines)).unwrap()
    }
}

fn host(name: &str) -> Host {
    Host::parse(name).unwrap()
}

fn sandbox(name: &str) -> SandboxId {
    SandboxId::parse(name).unwrap()
}

fn https(name: &str) -> Route {
    Route {
        host: host(name),
        port: 443,
        tls: true,
    }
}

fn http(name: &str) -> Route {
    Route {
        host: host(name),
        port: 80,
        tls: false,
    }
}

fn get(path: &str) -> Request<MessageBody> {
    Request::get(path).body(body::empty()).unwrap()
}

fn post(path: &str, content: MessageBody) -> Request<MessageBody> {
    Request::post(path).body(content).unwrap()
}

/// Wraps `request` as a request that the gate sends for itself.
fn gate_request(route: &Route, request: Request<MessageBody>) -> Outgoing {
    Outgoing::gate_own(route.clone(), request)
}

async fn read_body(sent: UpstreamResponse) -> Bytes {
    sent.response.collect().await.unwrap().to_bytes()
}

/// Sends a GET as the sandbox `sandbox_name` and returns the response body.
async fn fetch(
    dialer: &Dialer,
    sandbox_name: &str,
    route: &Route,
    path: &str,
) -> Result<Bytes, DialError> {
    let sent = dialer
        .send(&sandbox(sandbox_name), gate_request(route, get(path)))
        .await?;
    Ok(read_body(sent).await)
}
