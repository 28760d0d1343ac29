//! What the traffic needs of others: who is registered, and where decisions are written.

use std::fs::File;
use std::net::IpAddr;

use async_trait::async_trait;
use http::{Request, Response};
use policy::audit::AuditEvent;
use policy::id::{RequestId, SandboxId};
use policy::identity::Lookup;
use policy::push::{Case, Findings};
use policy::verdict::Denial;

use crate::body::Content;

/// Who is registered. Asked for every request, so the answer is in memory.
pub trait Registry: Send + Sync + 'static {
    /// The row of one id.
    fn by_id(&self, id: &SandboxId) -> Lookup;

    /// The row of a source address.
    fn by_ip(&self, ip: IpAddr) -> Lookup;

    /// This row has expired: it may go.
    fn expired(&self, id: &SandboxId);
}

/// Where decisions are written.
#[async_trait]
pub trait Ledger: Send + Sync + 'static {
    /// Takes an event, unless its sandbox's queue is full: then it comes back.
    fn try_record(&self, event: Box<AuditEvent>) -> Result<(), Box<AuditEvent>>;

    /// Takes an event, and waits while its sandbox's queue is full.
    async fn record(&self, event: Box<AuditEvent>);

    /// Takes an event, and returns when it is on disk.
    async fn keep(&self, event: Box<AuditEvent>);

    /// What happened to `sandbox` and is no traffic, the oldest first; none where that
    /// cannot be read.
    async fn history(&self, sandbox: &SandboxId) -> Option<Vec<AuditEvent>>;

    /// What was written about a request of `sandbox`.
    async fn find(&self, sandbox: &SandboxId, request: RequestId) -> Option<AuditEvent>;
}

/// Who reads the objects of a push.
#[async_trait]
pub trait PushJudge: Send + Sync + 'static {
    /// Reads what a push adds, or says why it is refused for want of reading. There is no pack where everything is a deletion. `bases` are
    /// packs of what upstream has, as far as they were needed and obtained.
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
    /// The file that holds it, to its end. Where the file stands means nothing.
    pub file: File,
    /// Where it begins.
    pub at: u64,
}

/// Who answers for the tools at `palisade.internal`.
#[async_trait]
pub trait ToolServer: Send + Sync + 'static {
    /// Answers a request of `sandbox` for `/mcp/…`.
    async fn answer(&self, sandbox: &SandboxId, request: Request<Content>) -> Response<Content>;
}

/// Which program opened a connection.
#[async_trait]
pub trait Programs: Send + Sync + 'static {
    /// The executable inside `sandbox` whose socket has these ends, where that is certain.
    async fn owner(
        &self,
        sandbox: &SandboxId,
        from: std::net::SocketAddr,
        to: std::net::SocketAddr,
    ) -> Option<String>;
}
