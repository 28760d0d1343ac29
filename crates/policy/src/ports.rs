//! Ports: traits by which the listeners use the rest of the gate. The binary implements them.

use std::fs::File;
use std::net::{IpAddr, SocketAddr};

use async_trait::async_trait;
use bytes::Bytes;
use http::{Request, Response};
use http_body_util::combinators::UnsyncBoxBody;

use crate::audit::AuditEvent;
use crate::id::{RequestId, SandboxId};
use crate::identity::RegistrationLookup;
use crate::push::{Findings, PushContext};
use crate::verdict::Denial;

/// The error that ended a body early.
pub type BodyError = Box<dyn std::error::Error + Send + Sync>;

/// The streaming body of a request or response.
pub type MessageBody = UnsyncBoxBody<Bytes, BodyError>;

/// The registry of sandboxes and containers. It is queried for every request, so implementations
/// answer from memory.
pub trait Registry: Send + Sync + 'static {
    /// Looks up a registration by id.
    fn by_id(&self, id: &SandboxId) -> RegistrationLookup;

    /// Looks up a registration by source address.
    fn by_ip(&self, ip: IpAddr) -> RegistrationLookup;

    /// Reports that a registration has expired, so that the registry may remove it.
    fn report_expiry(&self, id: &SandboxId);
}

/// Records audit events.
#[async_trait]
pub trait AuditSink: Send + Sync + 'static {
    /// Queues an event; returns it if the queue of its sandbox is full.
    fn try_record(&self, event: Box<AuditEvent>) -> Result<(), Box<AuditEvent>>;

    /// Queues an event; waits while the queue of its sandbox is full.
    async fn record(&self, event: Box<AuditEvent>);

    /// Records an event and returns once it is on disk.
    async fn record_durably(&self, event: Box<AuditEvent>);
}

/// Read access to the audit log for listeners.
#[async_trait]
pub trait AuditReader: AuditSink {
    /// The events of `sandbox` that are not traffic, oldest first; none if they cannot be read.
    async fn history(&self, sandbox: &SandboxId) -> Option<Vec<AuditEvent>>;

    /// The event about a request of `sandbox`.
    async fn find(&self, sandbox: &SandboxId, request: RequestId) -> Option<AuditEvent>;
}

/// Reads the objects of a push.
#[async_trait]
pub trait PackReader: Send + Sync + 'static {
    /// Reads the objects that a push adds, or refuses a push that cannot be read. A push of
    /// deletions only has no pack. `bases` are packs of objects that upstream has, as far as they
    /// were needed and obtained.
    async fn read(
        &self,
        push: &PushContext,
        pack: Option<Pack>,
        bases: Vec<File>,
    ) -> Result<Findings, Denial>;
}

/// The pack of a push.
#[derive(Debug)]
pub struct Pack {
    /// The file that contains the pack, up to the end of the file. The file position is unused.
    pub file: File,
    /// The offset at which the pack starts.
    pub offset: u64,
}

/// Serves the tools at `palisade.internal`.
#[async_trait]
pub trait ToolServer: Send + Sync + 'static {
    /// Answers a request of `sandbox` for `/mcp/…`.
    async fn answer(
        &self,
        sandbox: &SandboxId,
        request: Request<MessageBody>,
    ) -> Response<MessageBody>;
}

/// Finds the program that owns a socket.
#[async_trait]
pub trait SocketOwner: Send + Sync + 'static {
    /// The executable inside `sandbox` that owns the socket from `from` to `to`, if it is certain.
    async fn owner(&self, sandbox: &SandboxId, from: SocketAddr, to: SocketAddr) -> Option<String>;
}
