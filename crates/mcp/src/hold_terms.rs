//! Limits of a message's wait for an operator's answer, and the approvals that later messages of
//! the same call inherit.

use std::future::poll_fn;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::Poll;
use std::time::Duration;

use policy::answer::{Approval, ApprovalAnswer};
use policy::reason::Reason;
use policy::verdict::{Denial, Digest, Question, RuleName};
use tokio_util::sync::CancellationToken;

/// The checks of a call before any policy bundle: tool lists, fingerprints, stored refusal.
pub type HeadCheck<'a> = dyn Fn() -> Result<(), Denial> + Send + Sync + 'a;

/// The limits of one message's wait for an operator's answer, and earlier approvals that make the
/// wait unnecessary.
#[derive(Clone, Copy, Default)]
pub struct HoldTerms<'a> {
    /// The wait ends when one of these tokens is cancelled; of several, the first in order
    /// counts.
    pub ends: &'a [(HoldEnd, &'a CancellationToken)],
    /// The longest wait for all questions of the message together; none if only the answerer limits
    /// the wait.
    pub limit: Option<Duration>,
    /// Set when the wait begins.
    pub flag: Option<&'a HoldFlag>,
    /// Checked again after a wait.
    pub recheck: Option<&'a HeadCheck<'a>>,
    /// Approvals of the call that this message continues. They answer a question if they contain
    /// all of its rules.
    pub call_approvals: Option<&'a CallApprovals>,
    /// Approvals of the before hook of the same call. They answer a question if they contain its
    /// digest.
    pub hook_approvals: Option<&'a CallApprovals>,
}

impl std::fmt::Debug for HoldTerms<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mut shown = f.debug_struct("HoldTerms");
        shown.field("limit", &self.limit).finish_non_exhaustive()
    }
}

impl HoldTerms<'_> {
    /// Whether an earlier approval answers `question`.
    pub(crate) fn has_answer(&self, question: &Question) -> bool {
        let is_approved = self
            .call_approvals
            .is_some_and(|all| all.contain_rules(question));
        is_approved
            || self
                .hook_approvals
                .is_some_and(|all| all.contains(&question.digest))
    }
}

/// Why a wait ends without an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HoldEnd {
    /// The sender cancelled the message or disconnected, or its session ended.
    Withdrawn,
    /// The tool is no longer configured, or the bridge stops.
    Tool,
    /// The gate stops.
    Gate,
}

impl HoldEnd {
    /// The refusal of the message that waited.
    pub fn denial(self) -> Denial {
        match self {
            HoldEnd::Withdrawn => Denial::new(Reason::ClientLeft, "mcp:hold").with_message(
                "The message was cancelled while it waited for the operator's answer.",
            ),
            HoldEnd::Tool => Denial::new(Reason::ToolDenied, "tools")
                .with_message("The tool is no longer configured."),
            HoldEnd::Gate => Denial::new(Reason::Internal, "gate")
                .with_message("The gate is stopping. Try again."),
        }
    }
}

/// Whether a message waits, or has waited, for an operator's answer. Clones share the flag.
#[derive(Clone, Debug, Default)]
pub struct HoldFlag(Arc<AtomicBool>);

impl HoldFlag {
    /// Marks that the wait has begun.
    pub(crate) fn set(&self) {
        self.0.store(true, Ordering::Relaxed);
    }

    /// Whether the wait has begun.
    pub fn is_set(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}

/// Polls `work` until it completes, or until it waits for an operator's answer: then the result
/// is none, and the caller may move `work` to another task. `work` itself sets `flag` while it is
/// polled, so that checking the flag after each poll needs no further wake-up.
pub async fn until_held<F: Future + ?Sized>(
    mut work: Pin<&mut F>,
    flag: &HoldFlag,
) -> Option<F::Output> {
    poll_fn(|cx| match work.as_mut().poll(cx) {
        Poll::Ready(output) => Poll::Ready(Some(output)),
        Poll::Pending if flag.is_set() => Poll::Ready(None),
        Poll::Pending => Poll::Pending,
    })
    .await
}

/// The questions about one call that an operator approved.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CallApprovals(Vec<ApprovedQuestion>);

#[derive(Clone, Debug, PartialEq, Eq)]
struct ApprovedQuestion {
    digest: Digest,
    rules: Vec<RuleName>,
}

impl CallApprovals {
    /// Adds `question` if `answer` approves it.
    pub(crate) fn add(&mut self, question: &Question, answer: &ApprovalAnswer) {
        if Approval::from_answer(question, answer).is_some() {
            self.0.push(ApprovedQuestion {
                digest: question.digest,
                rules: question.rules.clone(),
            });
        }
    }

    /// Adds the approvals of `earlier`.
    pub(crate) fn extend(&mut self, earlier: &CallApprovals) {
        self.0.extend(earlier.0.iter().cloned());
    }

    /// Whether there is no approval.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Whether the question of `digest` was approved.
    fn contains(&self, digest: &Digest) -> bool {
        self.0.iter().any(|approved| approved.digest == *digest)
    }

    /// Whether every rule of `question` was approved, in one question or in several.
    fn contain_rules(&self, question: &Question) -> bool {
        let is_approved =
            |rule: &RuleName| self.0.iter().any(|approved| approved.rules.contains(rule));
        !question.rules.is_empty() && question.rules.iter().all(is_approved)
    }
}

#[cfg(test)]
mod tests {
    use policy::verdict::Grant;

    use super::*;

    fn question(digest: u8, rules: &[&str]) -> Question {
        Question {
            digest: [digest; 32],
            rules: rules.iter().map(|rule| RuleName::from(*rule)).collect(),
            sentences: rules.iter().map(|_| "Allow it?".to_owned()).collect(),
            evidence: None,
            grants: Grant::Message,
            snapshot: 1,
        }
    }

    #[test]
    fn approvals_answer_by_digest_or_all_rules() {
        let allow = ApprovalAnswer::Allow { until: None };
        let mut approvals = CallApprovals::default();
        approvals.add(&question(1, &["a"]), &allow);
        approvals.add(&question(2, &["b", "c"]), &allow);
        approvals.add(&question(3, &["d"]), &ApprovalAnswer::Deny);
        approvals.add(&question(4, &["d"]), &ApprovalAnswer::TimedOut);
        let with_call_approvals = HoldTerms {
            call_approvals: Some(&approvals),
            ..HoldTerms::default()
        };
        for (rules, is_answered) in [
            (&["a"][..], true),
            (&["a", "c"], true),
            (&["a", "d"], false),
            (&["d"], false),
            (&[], false),
        ] {
            assert_eq!(
                with_call_approvals.has_answer(&question(9, rules)),
                is_answered,
                "{rules:?}"
            );
        }
        let with_hook_approvals = HoldTerms {
            hook_approvals: Some(&approvals),
            ..HoldTerms::default()
        };
        assert!(with_hook_approvals.has_answer(&question(1, &["z"])));
        for digest in [3, 4, 9] {
            assert!(
                !with_hook_approvals.has_answer(&question(digest, &["a"])),
                "{digest}"
            );
        }
    }
}
