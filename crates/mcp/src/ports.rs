//! What tool calls need of others: where decisions are written.

use async_trait::async_trait;
use policy::audit::AuditEvent;

/// Where decisions are written.
#[async_trait]
pub trait Ledger: Send + Sync + 'static {
    /// Takes an event, and waits while its queue is full.
    async fn record(&self, event: Box<AuditEvent>);
}
