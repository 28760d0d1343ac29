//! What tool calls need of others: where decisions are written, and who reads content.

use async_trait::async_trait;
use policy::audit::AuditEvent;
use policy::verdict::Denial;

/// Where decisions are written.
#[async_trait]
pub trait Ledger: Send + Sync + 'static {
    /// Takes an event, and waits while its queue is full.
    async fn record(&self, event: Box<AuditEvent>);
}

/// Who looks for secrets and injections in what tools are told and what they say.
pub trait Scanner: Send + Sync + 'static {
    /// Why `bytes`, one JSON text, must not pass. Blocks for as long as its budget.
    fn scan(&self, bytes: &[u8]) -> Option<Denial>;
}
