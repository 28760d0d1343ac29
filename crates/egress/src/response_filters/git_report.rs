//! Filter that reads the upstream's push report, to track and record accepted branches.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use http_body_util::BodyExt;
use hyper::body::{Body, Frame};
use policy::audit::AuditEvent;
use policy::refs::RefUpdate;

use crate::body::{BodyError, MessageBody};
use crate::branches::{self, BranchChange, RemoteRepository};
use crate::git_protocol::push::PushCapabilities;
use crate::git_protocol::report::ReportReader;
use crate::request_log::Tally;
use crate::sandbox_state::SandboxState;
use crate::services::Services;

/// A push that was forwarded.
pub struct ForwardedPush {
    pub(crate) capabilities: PushCapabilities,
    pub(crate) services: Arc<Services>,
    pub(crate) sandbox: Arc<SandboxState>,
    pub(crate) repository: RemoteRepository,
    pub(crate) updates: Vec<RefUpdate>,
    pub(crate) reader: ReportReader,
    /// Side-band messages of the gate, sent before the upstream's response.
    pub(crate) gate_messages: Vec<u8>,
    /// The request's counters, which also note a rejection.
    pub(crate) tally: Arc<Tally>,
}

/// The filtered response body. Accepted branches are tracked as the report is read, and recorded
/// when the body is dropped.
struct PushReportBody {
    inner: MessageBody,
    push: ForwardedPush,
    /// Number of accepted refs that were already processed.
    tracked: usize,
}

impl PushReportBody {
    /// Tracks newly accepted branches before the client receives the report: its next push may
    /// follow at once.
    fn track_accepted(&mut self, data: &[u8]) {
        self.push.reader.feed(data);
        if self.push.reader.is_rejected() {
            self.push.tally.refs_rejected.store(true, Ordering::Relaxed);
        }
        let accepted = self.push.reader.accepted().len();
        if accepted > self.tracked {
            self.tracked = accepted;
            for change in [BranchChange::Created, BranchChange::Deleted] {
                for name in self.push.accepted_branches(change) {
                    self.push
                        .sandbox
                        .branches
                        .apply_change(&self.push.repository, &name, change);
                }
            }
        }
    }
}

impl ForwardedPush {
    /// Wraps the upstream's response body in the filter.
    pub(crate) fn watch(self, inner: MessageBody) -> MessageBody {
        PushReportBody {
            inner,
            push: self,
            tracked: 0,
        }
        .boxed_unsync()
    }

    /// The branches that the push created or deleted and whose change the upstream has accepted.
    fn accepted_branches(&self, change: BranchChange) -> Vec<String> {
        let accepted = self.reader.accepted();
        let matches = |update: &&RefUpdate| {
            let name = update.name.as_bytes();
            let is_change = match change {
                BranchChange::Created => update.old.is_zero() && !update.is_deletion(),
                BranchChange::Deleted => update.is_deletion(),
            };
            is_change && name.starts_with(b"refs/heads/") && accepted.contains(name)
        };
        let done = self.updates.iter().filter(matches);
        done.map(|update| update.name.to_string()).collect()
    }

    fn records(&self) -> Vec<AuditEvent> {
        let records_of = |change| {
            let names = self.accepted_branches(change);
            branches::audit_records(self.sandbox.id(), &self.repository, &names, change)
        };
        [
            records_of(BranchChange::Created),
            records_of(BranchChange::Deleted),
        ]
        .concat()
    }
}

impl Drop for PushReportBody {
    fn drop(&mut self) {
        let records = self.push.records();
        if records.is_empty() {
            return;
        }
        let services = Arc::clone(&self.push.services);
        self.push.services.spawn(async move {
            for record in records {
                services.audit().record_durably(Box::new(record)).await;
            }
        });
    }
}

impl Body for PushReportBody {
    type Data = Bytes;
    type Error = BodyError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BodyError>>> {
        if !self.push.gate_messages.is_empty() {
            let messages = std::mem::take(&mut self.push.gate_messages);
            return Poll::Ready(Some(Ok(Frame::data(messages.into()))));
        }
        let frame = ready!(Pin::new(&mut self.inner).poll_frame(cx));
        if let Some(Ok(frame)) = &frame
            && let Some(data) = frame.data_ref()
        {
            self.track_accepted(data);
        }
        Poll::Ready(frame)
    }
}
