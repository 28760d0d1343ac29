//! Questions to the operator: their digests, and merging the questions of one decision.

use policy::answer::{Approval, ApprovalAnswer};
use policy::reason::Reason;
use policy::rego::DecisionDetails;
use policy::verdict::{Denial, Digest, Grant, Question, RuleName};
use sha2::{Digest as _, Sha256};

/// The questions that one decision raised so far.
pub(crate) struct RaisedQuestions {
    grants: Grant,
    snapshot: u64,
    question: Option<Box<Question>>,
}

impl RaisedQuestions {
    /// Creates an empty set. An approval of a question of a policy bundle will grant `grants`.
    pub(crate) fn new(grants: Grant, snapshot: u64) -> Self {
        Self {
            grants,
            snapshot,
            question: None,
        }
    }

    /// Raises a question of a policy bundle about the subject with the digest `subject`.
    pub(crate) fn raise_policy(
        &mut self,
        rule: RuleName,
        details: DecisionDetails,
        subject: Digest,
    ) {
        let denial = details.apply_to(Denial::new(Reason::AskUnattended, rule));
        self.raise(denial, self.grants, &[&subject]);
    }

    /// Raises a question in place of the refusal `denial`. `subject` are the values that identify
    /// the question, together with the rule.
    pub(crate) fn raise(&mut self, denial: Denial, grants: Grant, subject: &[&[u8]]) {
        let Denial {
            rule,
            message,
            evidence,
            ..
        } = denial;
        let digest = digest(subject.iter().copied().chain([rule.as_str().as_bytes()]));
        let question = Question {
            digest,
            rules: vec![rule],
            sentences: vec![message],
            evidence,
            grants,
            snapshot: self.snapshot,
        };
        self.question = Some(Box::new(match self.question.take() {
            None => question,
            Some(first) => {
                let merged = self::digest([&first.digest[..], &question.digest[..]]);
                Question {
                    digest: merged,
                    ..first.merge(question)
                }
            }
        }));
    }

    /// The outcome of the questions, with the answer that `find_answer` returns: an approval, a
    /// refusal, or the question that is still open. None if no question was raised.
    pub(crate) fn settle(
        self,
        find_answer: impl FnOnce(&Question) -> Option<ApprovalAnswer>,
    ) -> Option<QuestionOutcome> {
        let question = self.question?;
        let Some(answer) = find_answer(&question) else {
            return Some(QuestionOutcome::Open(question));
        };
        Some(match Approval::from_answer(&question, &answer) {
            Some(approval) => QuestionOutcome::Approved(approval),
            None => QuestionOutcome::Refused(denial_for_answer(&question, &answer)),
        })
    }
}

/// The outcome of the questions of one decision.
pub(crate) enum QuestionOutcome {
    Approved(Approval),
    Refused(Denial),
    Open(Box<Question>),
}

fn denial_for_answer(question: &Question, answer: &ApprovalAnswer) -> Denial {
    let reason = match answer {
        ApprovalAnswer::Allow { .. } | ApprovalAnswer::Deny => Reason::AskDenied,
        ApprovalAnswer::TimedOut => Reason::AskTimeout,
    };
    question.denial(reason)
}

/// SHA-256 over `parts`, each with its length before it.
pub fn digest<'a>(parts: impl IntoIterator<Item = &'a [u8]>) -> Digest {
    let mut hash = Sha256::new();
    for part in parts {
        hash.update((part.len() as u64).to_be_bytes());
        hash.update(part);
    }
    hash.finalize().into()
}
