//! What a decision returns.

use serde::{Deserialize, Serialize};

use crate::reason::Reason;

/// The answer to 'may this happen?'. A refusal is a value, not an error.
///
/// Deny beats Ask, and Ask beats the rest ([`Verdict::and`]). Framing, identity, rate limits
/// and breakers return a [`Denial`] instead: they never ask and never change anything.
#[derive(Clone, Debug, PartialEq)]
pub enum Verdict {
    /// Allowed as it is.
    Allow {
        /// The rule that allowed it.
        rule: RuleName,
    },
    /// Allowed with changed content.
    Modify(Box<Modification>),
    /// An operator decides.
    Ask(Box<Question>),
    /// Refused.
    Deny(Box<Denial>),
}

/// The content that replaces what was sent.
#[derive(Clone, Debug, PartialEq)]
pub struct Modification {
    /// The rule that asked for the change.
    pub rule: RuleName,
    /// The change.
    pub edits: Edits,
}

/// A change of content. Edits are applied in the order of the bundles that asked for them and
/// never merged: each bundle decides about what the one before it left.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Edits {
    /// This JSON text takes the place of the params, the result or the error of a message.
    Json(String),
}

/// Something that an operator has to decide.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Question {
    /// Identifies what the question is about. An answer satisfies this digest and no other.
    pub digest: Digest,
    /// The rules that want an operator to decide; never empty.
    pub rules: Vec<RuleName>,
    /// Why, one sentence for each rule.
    pub sentences: Vec<String>,
    /// What only the operator is shown.
    pub evidence: Option<String>,
    /// What an approval lets pass.
    pub grants: Grant,
    /// The policy snapshot under which it was raised.
    pub snapshot: u64,
}

/// SHA-256 over the facts of a question.
pub type Digest = [u8; 32];

/// What an approval lets pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Grant {
    /// Every request of the sandbox to the host and port.
    Host,
    /// This request, with its method and path.
    Request,
    /// This push, with its refs and objects.
    Push,
    /// This message to or from a tool, with its content.
    Message,
}

impl Question {
    /// One question that stands for both: the rules of each, under the digest of the first. Its
    /// raiser gives it a digest of both where their facts differ.
    #[must_use]
    pub fn merge(mut self, other: Question) -> Self {
        for (rule, sentence) in other.rules.into_iter().zip(other.sentences) {
            if !self.rules.contains(&rule) {
                self.rules.push(rule);
                self.sentences.push(sentence);
            }
        }
        self.evidence = self.evidence.or(other.evidence);
        self
    }

    /// The refusal of a question that has no operator to answer it.
    pub fn unattended(&self) -> Denial {
        let sentence = self.sentences.first().map_or("", String::as_str);
        let denial = self.refused(Reason::AskUnattended);
        denial.saying(format!("{sentence} {UNATTENDED}"))
    }

    /// The refusal of a question for a reason of its own.
    pub fn refused(&self, reason: Reason) -> Denial {
        let rule = self.rules.first().cloned();
        Denial {
            evidence: self.evidence.clone(),
            ..Denial::new(reason, rule.unwrap_or_else(|| RuleName::from("ask")))
        }
    }
}

/// What a refusal adds where a rule wants an operator to be asked.
pub const UNATTENDED: &str = "The operator wants to be asked, and this version cannot ask yet.";

impl Verdict {
    /// The bare word, for audit records and metrics.
    pub const fn word(&self) -> Word {
        match self {
            Verdict::Allow { .. } => Word::Allow,
            Verdict::Modify(_) => Word::Modify,
            Verdict::Ask(_) => Word::Ask,
            Verdict::Deny(_) => Word::Deny,
        }
    }

    /// The verdict of two checks of the same content, of which `next` came later. A refusal
    /// decides, then a question, and two questions become one. Of two verdicts that let it
    /// pass the later one counts: it was made about what the earlier one left.
    #[must_use]
    pub fn and(self, next: Verdict) -> Self {
        match (self, next) {
            (Verdict::Deny(denial), _) | (_, Verdict::Deny(denial)) => Verdict::Deny(denial),
            (Verdict::Ask(one), Verdict::Ask(other)) => Verdict::Ask(Box::new(one.merge(*other))),
            (Verdict::Ask(question), _) | (_, Verdict::Ask(question)) => Verdict::Ask(question),
            (Verdict::Modify(change), Verdict::Allow { .. }) => Verdict::Modify(change),
            (_, next) => next,
        }
    }
}

/// A verdict without its circumstances.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Word {
    /// Allowed.
    Allow,
    /// Refused.
    Deny,
    /// Allowed with changes.
    Modify,
    /// Left to a person.
    Ask,
}

impl Word {
    /// The word as it appears in records.
    pub const fn as_str(self) -> &'static str {
        match self {
            Word::Allow => "allow",
            Word::Deny => "deny",
            Word::Modify => "modify",
            Word::Ask => "ask",
        }
    }
}

/// A refusal: the code, the rule that decided, and a sentence.
///
/// `message` may be shown to the agent, so it never holds a matched secret or the
/// pattern that matched. `evidence` is for the operator alone.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Denial {
    /// The stable code.
    pub reason: Reason,
    /// The rule that decided.
    pub rule: RuleName,
    /// What the agent is told.
    pub message: String,
    /// What only the operator is told.
    pub evidence: Option<String>,
    /// What an answer says beside the sentence.
    pub detail: Option<Box<Detail>>,
}

/// What some refusals carry for the client that reads them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Detail {
    /// When the client may try again.
    Retry {
        /// The host.
        upstream: String,
        /// In how many seconds.
        after: u64,
    },
    /// The refs of a push that were refused for themselves, in the order of the push.
    Refs(Vec<RefDenial>),
    /// The size of a push.
    Size {
        /// How large it is, as far as is known.
        bytes: u64,
        /// How large it may be.
        limit: u64,
    },
}

/// One ref of a push that was refused.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RefDenial {
    /// The bytes of its name.
    pub name: Vec<u8>,
    /// Why.
    pub denial: Denial,
}

impl Denial {
    /// A refusal with the reason's own sentence.
    pub fn new(reason: Reason, rule: impl Into<RuleName>) -> Self {
        Self {
            reason,
            rule: rule.into(),
            message: reason.says().to_owned(),
            evidence: None,
            detail: None,
        }
    }

    /// The same refusal with a more exact sentence for the agent.
    #[must_use]
    pub fn saying(mut self, message: impl Into<String>) -> Self {
        self.message = message.into();
        self
    }

    /// The same refusal with evidence for the operator.
    #[must_use]
    pub fn because(mut self, evidence: impl Into<String>) -> Self {
        self.evidence = Some(evidence.into());
        self
    }

    /// The same refusal with detail for the client.
    #[must_use]
    pub fn with(mut self, detail: Detail) -> Self {
        self.detail = Some(Box::new(detail));
        self
    }

    /// The refs that were refused for themselves; none where it is not about refs.
    pub fn refs(&self) -> &[RefDenial] {
        match self.detail.as_deref() {
            Some(Detail::Refs(refs)) => refs,
            Some(Detail::Retry { .. } | Detail::Size { .. }) | None => &[],
        }
    }
}

impl From<Denial> for Verdict {
    fn from(denial: Denial) -> Self {
        Verdict::Deny(Box::new(denial))
    }
}

/// The name of a rule, as an operator would look it up: `allowlist:*.example.com`.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct RuleName(std::sync::Arc<str>);

impl RuleName {
    /// The name as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl From<&str> for RuleName {
    fn from(name: &str) -> Self {
        Self(name.into())
    }
}

impl From<String> for RuleName {
    fn from(name: String) -> Self {
        Self(name.into())
    }
}

impl std::fmt::Display for RuleName {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn allow(rule: &str) -> Verdict {
        Verdict::Allow { rule: rule.into() }
    }

    fn modify(rule: &str) -> Verdict {
        Verdict::Modify(Box::new(Modification {
            rule: rule.into(),
            edits: Edits::Json("{}".to_owned()),
        }))
    }

    fn ask(rule: &str) -> Verdict {
        Verdict::Ask(Box::new(Question {
            digest: [7; 32],
            rules: vec![rule.into()],
            sentences: vec![format!("{rule} asks.")],
            evidence: None,
            grants: Grant::Request,
            snapshot: 1,
        }))
    }

    fn deny(rule: &str) -> Verdict {
        Denial::new(Reason::RegoDenied, rule).into()
    }

    #[test]
    fn a_verdict_is_small_and_allowing_allocates_nothing() {
        assert!(size_of::<Verdict>() <= 24, "{}", size_of::<Verdict>());
        assert!(size_of::<Result<Verdict, Denial>>() <= size_of::<Denial>() + 8);
    }

    #[test]
    fn deny_beats_ask_beats_the_rest() {
        for other in [allow("a"), modify("m"), ask("q")] {
            assert_eq!(other.clone().and(deny("d")), deny("d"));
            assert_eq!(deny("d").and(other), deny("d"));
        }
        for other in [allow("a"), modify("m")] {
            assert_eq!(other.clone().and(ask("q")), ask("q"));
            assert_eq!(ask("q").and(other), ask("q"));
        }
        assert_eq!(deny("first").and(deny("second")), deny("first"));
        assert_eq!(allow("first").and(allow("second")), allow("second"));
        assert_eq!(modify("first").and(allow("second")), modify("first"));
        assert_eq!(modify("first").and(modify("second")), modify("second"));
    }

    #[test]
    fn two_questions_about_the_same_facts_become_one() {
        let Verdict::Ask(question) = ask("one").and(ask("two")).and(ask("one")) else {
            panic!("a question");
        };
        assert_eq!(question.rules, ["one".into(), "two".into()]);
        assert_eq!(question.sentences, ["one asks.", "two asks."]);
        let denial = question.unattended();
        assert_eq!(denial.reason, Reason::AskUnattended);
        assert_eq!(denial.message, format!("one asks. {UNATTENDED}"));
    }
}
