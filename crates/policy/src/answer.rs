//! An operator's answers to questions, and the proof that one of them allows something.

use crate::clock::Tick;
use crate::verdict::{Digest, Question, RuleName};

/// An operator's answer to one question.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Answer {
    /// What was asked about may pass.
    Allow {
        /// Until when the same question of the same sandbox needs no new answer, and the one that
        /// asked may be in flight; none where the answer is for the one that asked, to its end.
        until: Option<Tick>,
    },
    /// It may not.
    Deny,
    /// Nobody answered in time.
    TimedOut,
}

impl Answer {
    /// Whether the answer still holds: one with a time ends then, for the one that asked as well.
    pub fn holds_at(&self, now: Tick) -> bool {
        match self {
            Answer::Allow { until: Some(until) } => now < *until,
            Answer::Allow { until: None } | Answer::Deny | Answer::TimedOut => true,
        }
    }
}

/// The answers that one request was given. An answer satisfies the digest of its question and no
/// other.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Answers(Vec<(Digest, Answer)>);

impl Answers {
    /// Adds the answer to the question of `digest`, in place of an earlier one to the same
    /// question.
    pub fn add(&mut self, digest: Digest, answer: Answer) {
        match self.0.iter_mut().find(|(known, _)| *known == digest) {
            Some((_, known)) => *known = answer,
            None => self.0.push((digest, answer)),
        }
    }

    /// How many different questions were answered.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether no question was answered.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The answer to `question`, if it was given.
    pub fn find(&self, question: &Question) -> Option<&Answer> {
        let mut answers = self.0.iter();
        let found = answers.find(|(digest, _)| *digest == question.digest);
        found.map(|(_, answer)| answer)
    }
}

/// Proof that an operator allowed what a question was about.
///
/// ```compile_fail,E0423
/// let approval = policy::answer::Approval("mine".into());
/// ```
#[derive(Debug, PartialEq, Eq)]
pub struct Approval(RuleName);

impl Approval {
    /// The approval that `answer` gives to `question`, if it gives one.
    pub fn of(question: &Question, answer: &Answer) -> Option<Self> {
        match (answer, question.rules.first()) {
            (Answer::Allow { .. }, Some(rule)) => Some(Self(rule.clone())),
            (Answer::Allow { .. } | Answer::Deny | Answer::TimedOut, _) => None,
        }
    }

    /// The rule that wanted the operator to be asked.
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
    fn an_answer_satisfies_its_own_digest_only() {
        let mut answers = Answers::default();
        let allow = Answer::Allow { until: None };
        answers.add([1; 32], allow.clone());
        answers.add([2; 32], Answer::Deny);
        assert_eq!(answers.find(&question(1)), Some(&allow));
        assert_eq!(answers.find(&question(3)), None);
        assert!(Approval::of(&question(1), &allow).is_some());
        for refused in [Answer::Deny, Answer::TimedOut] {
            assert_eq!(Approval::of(&question(2), &refused), None);
        }
    }

    #[test]
    fn later_answer_replaces_an_earlier_one_to_the_same_question() {
        let mut answers = Answers::default();
        answers.add([1; 32], Answer::TimedOut);
        answers.add([1; 32], Answer::Deny);
        assert_eq!(answers.find(&question(1)), Some(&Answer::Deny));
        assert_eq!(answers.len(), 1);
    }

    #[test]
    fn answer_with_a_time_holds_until_then() {
        let [before, then] = [6, 7].map(Tick::from_nanos);
        let answer = Answer::Allow { until: Some(then) };
        assert!(answer.holds_at(before));
        assert!(!answer.holds_at(then));
        for lasting in [
            Answer::Allow { until: None },
            Answer::Deny,
            Answer::TimedOut,
        ] {
            assert!(lasting.holds_at(Tick::from_nanos(u64::MAX)));
        }
    }
}
