//! Verdicts: the results of decisions.

use serde::{Deserialize, Serialize};

use crate::reason::Reason;

/// The result of a decision. A refusal is a value, not an error.
///
/// Deny takes precedence over Ask, and Ask over the others ([`Verdict::and`]). Checks of framing,
/// identity, rate limits and breakers return a [`Denial`] instead: they never ask the operator and
/// never change content.
#[derive(Clone, Debug, PartialEq)]
pub enum Verdict {
    /// Allowed without changes.
    Allow {
        /// The rule that allowed the subject.
        rule: RuleName,
    },
    /// Allowed with changed content.
    Modify(Box<Modification>),
    /// An operator decides.
    Ask(Box<Question>),
    /// Refused.
    Deny(Box<Denial>),
}

/// A change of content by a policy.
#[derive(Clone, Debug, PartialEq)]
pub struct Modification {
    /// The rule that requires the change.
    pub rule: RuleName,
    /// The change.
    pub edits: Edits,
}

/// The changed content. Edits are applied in the order of the bundles that require them and are
/// never merged: each bundle decides about the result of the previous one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Edits {
    /// JSON text that replaces the params, the result or the error of a message.
    Json(String),
}

/// A question that the operator has to decide.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Question {
    /// Identifies the subject of the question. An answer applies to this digest only.
    pub digest: Digest,
    /// The rules that require the operator's approval; never empty.
    pub rules: Vec<RuleName>,
    /// The reasons, one sentence for each rule.
    pub sentences: Vec<String>,
    /// Details for the operator alone.
    pub evidence: Option<String>,
    /// The scope of an approval.
    pub grants: Grant,
    /// The policy snapshot under which the question was raised.
    pub snapshot: u64,
}

/// SHA-256 over the facts of a question.
pub type Digest = [u8; 32];

/// The scope of an approval.
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
    /// Merges two questions into one with the rules of both and the digest of the first. Where
    /// their facts differ, the caller replaces the digest.
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

    /// The refusal of a question that no operator can answer.
    pub fn unattended_denial(&self) -> Denial {
        let sentence = self.sentences.first().map_or("", String::as_str);
        let denial = self.denial(Reason::AskUnattended);
        denial.with_message(format!("{sentence} {UNATTENDED}"))
    }

    /// The refusal of a question for `reason`.
    pub fn denial(&self, reason: Reason) -> Denial {
        let rule = self.rules.first().cloned();
        Denial {
            evidence: self.evidence.clone(),
            ..Denial::new(reason, rule.unwrap_or_else(|| RuleName::from("ask")))
        }
    }
}

/// Sentence that is added to the refusal of a question that no operator can answer.
pub const UNATTENDED: &str =
    "Approval prompts are not available in this version, so it is refused.";

impl Verdict {
    /// The kind of verdict, for audit records and metrics.
    pub const fn kind(&self) -> VerdictKind {
        match self {
            Verdict::Allow { .. } => VerdictKind::Allow,
            Verdict::Modify(_) => VerdictKind::Modify,
            Verdict::Ask(_) => VerdictKind::Ask,
            Verdict::Deny(_) => VerdictKind::Deny,
        }
    }

    /// Combines the verdicts of two checks of the same content; `next` is the verdict of the later
    /// check. A refusal takes precedence over a question, and a question over other verdicts; two
    /// questions are merged. Of two verdicts that allow the content the later one is used, because
    /// the later check had the result of the earlier one.
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

/// A verdict without its details.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum VerdictKind {
    /// Allowed.
    Allow,
    /// Refused.
    Deny,
    /// Allowed with changes.
    Modify,
    /// The operator decides.
    Ask,
}

impl VerdictKind {
    /// The name in records.
    pub const fn as_str(self) -> &'static str {
        match self {
            VerdictKind::Allow => "allow",
            VerdictKind::Deny => "deny",
            VerdictKind::Modify => "modify",
            VerdictKind::Ask => "ask",
        }
    }
}

/// A refusal: the code, the rule that decided, and a sentence.
///
/// `message` may be shown to the agent, so the message never contains a matched secret or the
/// pattern that matched. `evidence` is for the operator alone.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Denial {
    /// The stable code.
    pub reason: Reason,
    /// The rule that decided.
    pub rule: RuleName,
    /// The message for the agent.
    pub message: String,
    /// Details for the operator alone.
    pub evidence: Option<String>,
    /// Additional data for the response.
    pub detail: Option<Box<Detail>>,
}

/// Additional data of some refusals, for the client.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Detail {
    /// When the client may try again.
    Retry {
        /// The host.
        upstream: String,
        /// The delay in seconds.
        after: u64,
    },
    /// The refs of a push that rules refused, in the order of the push.
    Refs(Vec<RefDenial>),
    /// The size of a push.
    Size {
        /// The size: declared by the client, or received so far.
        bytes: u64,
        /// The maximum size.
        limit: u64,
    },
}

/// One ref of a push that was refused.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RefDenial {
    /// The name of the ref, as bytes.
    pub name: Vec<u8>,
    /// The refusal.
    pub denial: Denial,
}

impl Denial {
    /// A refusal with the default message of `reason`.
    pub fn new(reason: Reason, rule: impl Into<RuleName>) -> Self {
        Self {
            reason,
            rule: rule.into(),
            message: reason.description().to_owned(),
            evidence: None,
            detail: None,
        }
    }

    /// Replaces the message for the agent.
    #[must_use]
    pub fn with_message(mut self, message: impl Into<String>) -> Self {
        self.message = message.into();
        self
    }

    /// Sets the evidence for the operator.
    #[must_use]
    pub fn with_evidence(mut self, evidence: impl Into<String>) -> Self {
        self.evidence = Some(evidence.into());
        self
    }

    /// Sets the additional data for the client.
    #[must_use]
    pub fn with_detail(mut self, detail: Detail) -> Self {
        self.detail = Some(Box::new(detail));
        self
    }

    /// The refs that the rules refused; empty if the refusal is not about refs.
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

/// The name of a rule, as the operator finds it in the configuration: `allowlist:*.example.com`.
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
    fn verdict_is_small_and_allow_does_not_allocate() {
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
    fn two_questions_about_same_facts_are_merged() {
        let Verdict::Ask(question) = ask("one").and(ask("two")).and(ask("one")) else {
            panic!("a question");
        };
        assert_eq!(question.rules, ["one".into(), "two".into()]);
        assert_eq!(question.sentences, ["one asks.", "two asks."]);
        let denial = question.unattended_denial();
        assert_eq!(denial.reason, Reason::AskUnattended);
        assert_eq!(denial.message, format!("one asks. {UNATTENDED}"));
    }
}
