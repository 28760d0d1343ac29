//! What a decision returns.

use serde::{Deserialize, Serialize};

use crate::reason::Reason;

/// The answer to 'may this happen?'. A refusal is a value, not an error.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Go on. The rule that said so is named where there is one.
    Allow {
        /// The rule that allowed it.
        rule: Option<RuleName>,
    },
    /// Go on with changed content.
    Modify {
        /// The rule that asked for the change.
        rule: RuleName,
        /// What was found that has to change.
        reason: Reason,
    },
    /// A person decides.
    Ask {
        /// The rule that wants a person.
        rule: RuleName,
        /// Why it is not simply allowed.
        reason: Reason,
    },
    /// No.
    Deny(Denial),
}

impl Verdict {
    /// The bare word, for audit records and metrics.
    pub const fn word(&self) -> Word {
        match self {
            Verdict::Allow { .. } => Word::Allow,
            Verdict::Modify { .. } => Word::Modify,
            Verdict::Ask { .. } => Word::Ask,
            Verdict::Deny(_) => Word::Deny,
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
}

impl Denial {
    /// A refusal with the reason's own sentence.
    pub fn new(reason: Reason, rule: impl Into<RuleName>) -> Self {
        Self {
            reason,
            rule: rule.into(),
            message: reason.says().to_owned(),
            evidence: None,
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
}

impl From<Denial> for Verdict {
    fn from(denial: Denial) -> Self {
        Verdict::Deny(denial)
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
