//! The operator's answers to approval questions, and the proof of an approval.

use crate::clock::Tick;
use crate::verdict::{Digest, Question, RuleName};

/// The operator's answer to one approval question.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ApprovalAnswer {
    /// The subject of the question is allowed.
    Allow {
        /// When the approval ends, for the request that raised the question and for later ones of
        /// the sandbox with the same question. None: the approval covers only the request that
        /// raised the question, to its end.
        until: Option<Tick>,
    },
    /// The subject is refused.
    Deny,
    /// There was no answer in time.
    TimedOut,
}

impl ApprovalAnswer {
    /// Whether the answer is still valid at `now`; an approval with an end time expires then.
    pub fn is_valid_at(&self, now: Tick) -> bool {
        match self {
            ApprovalAnswer::Allow { until: Some(until) } => now < *until,
            ApprovalAnswer::Allow { until: None }
            | ApprovalAnswer::Deny
            | ApprovalAnswer::TimedOut => true,
        }
    }
}

/// The answers to the questions of one request, by the digest of the question.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ApprovalAnswers(Vec<(Digest, ApprovalAnswer)>);

impl ApprovalAnswers {
    /// Adds the answer to the question of `digest`, in place of an earlier one to the same
    /// question.
    pub fn add(&mut self, digest: Digest, answer: ApprovalAnswer) {
        match self.0.iter_mut().find(|(known, _)| *known == digest) {
            Some((_, known)) => *known = answer,
            None => self.0.push((digest, answer)),
        }
    }

    /// The number of different questions that were answered.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether no question was answered.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The answer to `question`, if there is one.
    pub fn find(&self, question: &Question) -> Option<&ApprovalAnswer> {
        let mut answers = self.0.iter();
        let found = answers.find(|(digest, _)| *digest == question.digest);
        found.map(|(_, answer)| answer)
    }
}

/// Proof that an operator approved the subject of a question.
///
/// ```compile_fail,E0423
/// let approval = policy::answer::Approval("mine".into());
/// ```
#[derive(Debug, PartialEq, Eq)]
pub struct Approval(RuleName);

impl Approval {
    /// The approval, if `answer` allows the subject of `question`.
    pub fn from_answer(question: &Question, answer: &ApprovalAnswer) -> Option<Self> {
        match (answer, question.rules.first()) {
            (ApprovalAnswer::Allow { .. }, Some(rule)) => Some(Self(rule.clone())),
            (ApprovalAnswer::Allow { .. } | ApprovalAnswer::Deny | ApprovalAnswer::TimedOut, _) => {
                None
            }
        }
    }

    /// The rule that required the operator's approval.
    pub fn into_rule(self) -> RuleName {
        self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::verdict::Grant;

    fn question(digest: u8) -> Question {
        Question {
            digest: [digest; 32],
            rules: vec!["egress.unknown".into()],
            sentences: vec!["Not listed.".to_owned()],
            evidence: None,
            grants: Grant::Host,
            snapshot: 1,
        }
    }

    #[test]
    fn answer_applies_to_its_own_digest_only() {
        let mut answers = ApprovalAnswers::default();
        let allow = ApprovalAnswer::Allow { until: None };
        answers.add([1; 32], allow.clone());
        answers.add([2; 32], ApprovalAnswer::Deny);
        assert_eq!(answers.find(&question(1)), Some(&allow));
        assert_eq!(answers.find(&question(3)), None);
        assert!(Approval::from_answer(&question(1), &allow).is_some());
        for refused in [ApprovalAnswer::Deny, ApprovalAnswer::TimedOut] {
            assert_eq!(Approval::from_answer(&question(2), &refused), None);
        }
    }

    #[test]
    fn later_answer_to_same_question_replaces_earlier_one() {
        let mut answers = ApprovalAnswers::default();
        answers.add([1; 32], ApprovalAnswer::TimedOut);
        answers.add([1; 32], ApprovalAnswer::Deny);
        assert_eq!(answers.find(&question(1)), Some(&ApprovalAnswer::Deny));
        assert_eq!(answers.len(), 1);
    }

    #[test]
    fn answer_with_end_time_holds_until_then() {
        let [before, then] = [6, 7].map(Tick::from_nanos);
        let answer = ApprovalAnswer::Allow { until: Some(then) };
        assert!(answer.is_valid_at(before));
        assert!(!answer.is_valid_at(then));
        for lasting in [
            ApprovalAnswer::Allow { until: None },
            ApprovalAnswer::Deny,
            ApprovalAnswer::TimedOut,
        ] {
            assert!(lasting.is_valid_at(Tick::from_nanos(u64::MAX)));
        }
    }
}
