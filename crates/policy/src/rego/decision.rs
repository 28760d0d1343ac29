//! What a policy answers, in the shapes it may have.

use regorus::Value;

use super::value;
use crate::verdict::Denial;

/// The longest text of a policy that is told to anybody.
const LONGEST: usize = 400;

/// The most that a policy may pass on beside its decision, in bytes of JSON.
const MOST_METADATA: usize = 4096;

/// What a bundle says to an input.
#[derive(Clone, Debug, PartialEq)]
pub enum Decision {
    /// Yes.
    Allow(Said),
    /// No.
    Deny(Said),
    /// A person decides.
    Ask(Said),
    /// Yes, with changed content.
    Modify {
        /// What to change, as the policy puts it.
        outputs: serde_json::Value,
        /// Why.
        said: Said,
    },
    /// Nothing, which is no.
    Undefined,
    /// The policy could not decide, which is no unless the operator chose otherwise.
    Failed(Failure),
}

/// What a decision says of itself.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Said {
    /// A sentence. Bounded, on one line.
    pub message: Option<String>,
    /// The policy's own name for the rule that decided. Bounded, on one line.
    pub rule: Option<String>,
    /// What whoever asked is to know beside that, where the decision is an object. Bounded: of
    /// more than that there is nothing.
    pub metadata: Option<serde_json::Map<String, serde_json::Value>>,
    outputs: Option<serde_json::Value>,
}

/// Why there is no decision.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Failure {
    /// It took too long.
    #[error("the evaluation took longer than it may")]
    OutOfTime,
    /// It took too many steps.
    #[error("the evaluation took more steps than it may")]
    OutOfSteps,
    /// It failed.
    #[error("the evaluation failed: {0}")]
    Error(String),
    /// It answered something that is no decision.
    #[error("the policy's answer is no decision: {0}")]
    Shape(String),
}

/// What may stand beside a decision.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Part {
    Message,
    Rule,
    Outputs,
}

impl Part {
    /// Each with its names.
    pub(super) const ALL: [(Part, &[&str]); 3] = [
        (Part::Message, &["reason", "message"]),
        (Part::Rule, &["rule"]),
        (Part::Outputs, &["outputs"]),
    ];
}

impl Said {
    /// A refusal with what the policy says. Its own name for the rule is the operator's
    /// business.
    pub fn told(self, denial: Denial) -> Denial {
        let denial = match self.message {
            Some(message) => denial.saying(message),
            None => denial,
        };
        match self.rule {
            Some(rule) => denial.because(format!("the policy calls it {rule}")),
            None => denial,
        }
    }

    /// Takes what stands beside a decision. What is no text says nothing.
    pub(super) fn hear(&mut self, part: Part, answer: &Value) {
        let text = match answer {
            Value::String(text) => Some(clean(text)).filter(|text| !text.is_empty()),
            _ => None,
        };
        match part {
            Part::Message => self.message = text.or(self.message.take()),
            Part::Rule => self.rule = text.or(self.rule.take()),
            Part::Outputs if *answer != Value::Undefined => {
                self.outputs = Some(value::write(answer));
            }
            Part::Outputs => {}
        }
    }
}

/// The words of a decision, and their synonyms.
enum Word {
    Allow,
    Deny,
    Ask,
    Modify,
}

impl Word {
    fn read(text: &str) -> Option<Self> {
        match text {
            "allow" | "pass" => Some(Word::Allow),
            "deny" | "block" => Some(Word::Deny),
            "ask" => Some(Word::Ask),
            "redact" | "modify" => Some(Word::Modify),
            _ => None,
        }
    }
}

impl Decision {
    /// Understands the answer of a policy: true or false, a word, or an object that has one
    /// of them.
    pub(super) fn read(answer: &Value) -> Self {
        match answer {
            Value::Undefined => Decision::Undefined,
            Value::Bool(true) => Decision::Allow(Said::default()),
            Value::Bool(false) => Decision::Deny(Said::default()),
            Value::String(text) => Self::of(text, Said::default()),
            Value::Object(_) => Self::read_object(answer),
            Value::Null | Value::Number(_) | Value::Array(_) | Value::Set(_) => {
                shape("it is no boolean, word or object")
            }
        }
    }

    fn read_object(answer: &Value) -> Self {
        let get = |key: &str| &answer[key];
        let mut said = Said::default();
        for (part, names) in Part::ALL {
            let found = names.iter().map(|name| get(name));
            let found = found.into_iter().find(|found| **found != Value::Undefined);
            said.hear(part, found.unwrap_or(&Value::Undefined));
        }
        said.metadata = metadata(get("metadata"));
        let mut words = ["action", "decision"].into_iter().map(get);
        let word = words.find(|word| **word != Value::Undefined);
        // `allow: false` beside `action: "allow"` is a policy at odds with itself.
        match (word, get("allow")) {
            (Some(Value::String(word)), Value::Undefined | Value::Bool(true)) => {
                Self::of(word, said)
            }
            (Some(Value::String(word)), Value::Bool(false)) => match Self::of(word, said) {
                Decision::Allow(_) | Decision::Modify { .. } => shape("it allows and does not"),
                other => other,
            },
            (Some(Value::Bool(true)), Value::Undefined) | (None, Value::Bool(true)) => {
                Decision::Allow(said)
            }
            (Some(Value::Bool(false)), Value::Undefined) | (None, Value::Bool(false)) => {
                Decision::Deny(said)
            }
            (None, Value::Undefined) => shape("it has neither action nor decision nor allow"),
            _ => shape("its action, decision or allow is no word and no boolean"),
        }
    }

    fn of(word: &str, said: Said) -> Self {
        match Word::read(word) {
            Some(Word::Allow) => Decision::Allow(said),
            Some(Word::Deny) => Decision::Deny(said),
            Some(Word::Ask) => Decision::Ask(said),
            Some(Word::Modify) => Decision::Modify {
                outputs: serde_json::Value::Null,
                said,
            },
            None => shape(&format!("'{word}' is no action")),
        }
        .settled()
    }

    /// Moves the outputs to where they belong.
    fn settled(mut self) -> Self {
        if let Decision::Modify { outputs, said } = &mut self
            && let Some(found) = said.outputs.take()
        {
            *outputs = found;
        }
        self
    }

    /// What whoever asked is to know beside the decision.
    pub fn metadata(&self) -> Option<&serde_json::Map<String, serde_json::Value>> {
        self.said()?.metadata.as_ref()
    }

    /// The sentence beside the decision.
    pub fn message(&self) -> Option<&str> {
        self.said()?.message.as_deref()
    }

    fn said(&self) -> Option<&Said> {
        match self {
            Decision::Allow(said)
            | Decision::Deny(said)
            | Decision::Ask(said)
            | Decision::Modify { said, .. } => Some(said),
            Decision::Undefined | Decision::Failed(_) => None,
        }
    }

    /// Whether the answer is no.
    pub(super) fn is_refusal(&self) -> bool {
        match self {
            Decision::Deny(_) | Decision::Undefined | Decision::Failed(_) => true,
            Decision::Allow(_) | Decision::Ask(_) | Decision::Modify { .. } => false,
        }
    }

    /// Adds what stands beside the rule that decided.
    pub(super) fn hear(mut self, parts: impl Iterator<Item = (Part, Value)>) -> Self {
        if let Decision::Allow(said)
        | Decision::Deny(said)
        | Decision::Ask(said)
        | Decision::Modify { said, .. } = &mut self
        {
            parts.for_each(|(part, answer)| said.hear(part, &answer));
        }
        self.settled()
    }
}

fn metadata(found: &Value) -> Option<serde_json::Map<String, serde_json::Value>> {
    let serde_json::Value::Object(fields) = value::write(found) else {
        return None;
    };
    let text = serde_json::to_string(&fields).ok()?;
    (text.len() <= MOST_METADATA).then_some(fields)
}

fn shape(what: &str) -> Decision {
    Decision::Failed(Failure::Shape(clean(what)))
}

/// Text that is safe to tell: one line, of bounded length, without characters that move a
/// cursor or turn the writing round.
pub(super) fn clean(text: &str) -> String {
    let unseen = |c: char| matches!(c, '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{206f}' | '\u{feff}');
    let seen = text.chars().filter(|c| !unseen(*c)).take(LONGEST);
    let line: String = seen.map(|c| if c.is_control() { ' ' } else { c }).collect();
    line.trim().to_owned()
}
