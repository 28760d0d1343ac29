//! What the planes need of the rest of the gate, as traits. The binary wires them.

use std::fs::File;
use std::net::{IpAddr, SocketAddr};

use async_trait::async_trait;
use bytes::Bytes;
use http::{Request, Response};
use http_body_util::combinators::UnsyncBoxBody;

use crate::audit::AuditEvent;
use crate::id::{RequestId, SandboxId};
use crate::identity::Lookup;
use crate::push::{Case, Findings};
use crate::verdict::Denial;

/// Why a body ended before its time.
pub type BodyError = Box<dyn std::error::Error + Send + Sync>;

/// The body of a message that streams, whatever is behind it.
pub type Content = UnsyncBoxBody<Bytes, BodyError>;

/// Who is registered. Asked for every request, so the answer is in memory.
pub trait Registry: Send + Sync + 'static {
    /// The row of one id.
    fn by_id(&self, id: &SandboxId) -> Lookup;

    /// The row of a source address.
    fn by_ip(&self, ip: IpAddr) -> Lookup;

    /// This row has expired: it may go.
    fn expired(&self, id: &SandboxId);
}

/// Takes audit events.
#[async_trait]
pub trait AuditSink: Send + Sync + 'static {
    /// Takes an event, unless its sandbox's queue is full: then it comes back.
    fn try_record(&self, event: Box<AuditEvent>) -> Result<(), Box<AuditEvent>>;

    /// Takes an event, and waits while its sandbox's queue is full.
    async fn record(&self, event: Box<AuditEvent>);

    /// Takes an event, and returns when it is on disk.
    async fn keep(&self, event: Box<AuditEvent>);
}

/// The audit log as traffic reads it.
#[async_trait]
pub trait AuditLog: AuditSink {
    /// The events of `sandbox` that are no traffic, the oldest first; none where they cannot be
    /// read.
    async fn history(&self, sandbox: &SandboxId) -> Option<Vec<AuditEvent>>;

    /// The event about a request of `sandbox`.
    async fn find(&self, sandbox: &SandboxId, request: RequestId) -> Option<AuditEvent>;
}

/// Reads the objects of a push.
#[async_trait]
pub trait PackReader: Send + Sync + 'static {
    /// Reads what a push adds, or returns the refusal of a push that cannot be read. There is no
    /// pack where everything is a deletion. `bases` are packs of what upstream has, as far as
    /// they were needed and obtained.
    async fn read(
        &self,
        case: &Case,
        pack: Option<Pack>,
        bases: Vec<File>,
    ) -> Result<Findings, Denial>;
}

/// The pack of a push.
#[derive(Debug)]
pub struct Pack {
    /// The file that holds it, to its end. Its position means nothing.
    pub file: File,
    /// Where the pack begins.
    pub at: u64,
}

/// Serves the tools at `palisade.internal`.
#[async_trait]
pub trait ToolServer: Send + Sync + 'static {
    /// Answers a request of `sandbox` for `/mcp/…`.
    async fn answer(&self, sandbox: &SandboxId, request: Request<Content>) -> Response<Content>;
}

/// Finds the program that owns a socket.
#[async_trait]
pub trait SocketOwner: Send + Sync + 'static {
    /// The executable inside `sandbox` whose socket has these ends, where that is certain.
    async fn owner(&self, sandbox: &SandboxId, from: SocketAddr, to: SocketAddr) -> Option<String>;
}
