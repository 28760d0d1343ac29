//! Decisions of policies, parsed from the values that their rules return.

use regorus::Value;

use super::value;
use crate::verdict::Denial;

/// Maximum length of a policy's texts in messages.
const MAX_TEXT_LEN: usize = 400;

/// Maximum size of a decision's metadata, in bytes of JSON.
const MAX_METADATA_LEN: usize = 4096;

/// The decision of a bundle about an input.
#[derive(Clone, Debug, PartialEq)]
pub enum Decision {
    /// Allowed.
    Allow(DecisionDetails),
    /// Denied.
    Deny(DecisionDetails),
    /// The operator decides.
    Ask(DecisionDetails),
    /// Allowed with changed content.
    Modify {
        /// The policy's `outputs`, which describe the changes.
        outputs: serde_json::Value,
        /// The details of the decision.
        details: DecisionDetails,
    },
    /// The rule is undefined, which denies.
    Undefined,
    /// The evaluation failed, which denies unless the operator configured `fail_open`.
    Failed(EvaluationError),
}

/// The details of a decision.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct DecisionDetails {
    /// The reason: one line of limited length.
    pub message: Option<String>,
    /// The policy's own name for the rule that decided: one line of limited length.
    pub rule: Option<String>,
    /// Additional data for the client, if the decision is an object with `metadata`. None if it
    /// is too large.
    pub metadata: Option<serde_json::Map<String, serde_json::Value>>,
    outputs: Option<serde_json::Value>,
}

/// Why an evaluation failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum EvaluationError {
    /// The time limit was exceeded.
    #[error("the evaluation exceeded its time limit")]
    OutOfTime,
    /// The step limit was exceeded.
    #[error("the evaluation exceeded its step limit")]
    OutOfSteps,
    /// An error occurred.
    #[error("the evaluation failed: {0}")]
    Error(String),
    /// The result is not a decision.
    #[error("the policy's result is not a decision: {0}")]
    Shape(String),
}

/// A detail of a decision, which a separate rule or a field of the decision may provide.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Part {
    Message,
    Rule,
    Outputs,
}

impl Part {
    /// Each part with the names of its rule or field.
    pub(super) const ALL: [(Part, &[&str]); 3] = [
        (Part::Message, &["reason", "message"]),
        (Part::Rule, &["rule"]),
        (Part::Outputs, &["outputs"]),
    ];
}

impl DecisionDetails {
    /// Adds the policy's message to a refusal, and its rule name as evidence for the operator.
    pub fn apply_to(self, denial: Denial) -> Denial {
        let denial = match self.message {
            Some(message) => denial.with_message(message),
            None => denial,
        };
        match self.rule {
            Some(rule) => denial.with_evidence(format!("the policy's rule name is {rule}")),
            None => denial,
        }
    }

    /// Sets a part. A message or rule that is not a string is ignored.
    pub(super) fn set_part(&mut self, part: Part, answer: &Value) {
        let text = match answer {
            Value::String(text) => Some(sanitise(text)).filter(|text| !text.is_empty()),
            _ => None,
        };
        match part {
            Part::Message => self.message = text.or(self.message.take()),
            Part::Rule => self.rule = text.or(self.rule.take()),
            Part::Outputs if *answer != Value::Undefined => {
                self.outputs = Some(value::to_json(answer));
            }
            Part::Outputs => {}
        }
    }
}

/// The actions of a decision.
enum Action {
    Allow,
    Deny,
    Ask,
    Modify,
}

impl Action {
    fn parse(text: &str) -> Option<Self> {
        match text {
            "allow" | "pass" => Some(Action::Allow),
            "deny" | "block" => Some(Action::Deny),
            "ask" => Some(Action::Ask),
            "redact" | "modify" => Some(Action::Modify),
            _ => None,
        }
    }
}

impl Decision {
    /// Parses the value of a rule: a boolean, the name of an action, or an object with one of
    /// them.
    pub(super) fn read(answer: &Value) -> Self {
        match answer {
            Value::Undefined => Decision::Undefined,
            Value::Bool(true) => Decision::Allow(DecisionDetails::default()),
            Value::Bool(false) => Decision::Deny(DecisionDetails::default()),
            Value::String(text) => Self::from_action(text, DecisionDetails::default()),
            Value::Object(_) => Self::read_object(answer),
            Value::Null | Value::Number(_) | Value::Array(_) | Value::Set(_) => {
                invalid_shape("it is not a boolean, string or object")
            }
        }
    }

    fn read_object(answer: &Value) -> Self {
        let get = |key: &str| &answer[key];
        let mut details = DecisionDetails::default();
        for (part, names) in Part::ALL {
            let found = names.iter().map(|name| get(name));
            let found = found.into_iter().find(|found| **found != Value::Undefined);
            details.set_part(part, found.unwrap_or(&Value::Undefined));
        }
        details.metadata = metadata(get("metadata"));
        let mut actions = ["action", "decision"].into_iter().map(get);
        let action = actions.find(|action| **action != Value::Undefined);
        // `allow: false` together with `action: "allow"` is a contradiction.
        match (action, get("allow")) {
            (Some(Value::String(action)), Value::Undefined | Value::Bool(true)) => {
                Self::from_action(action, details)
            }
            (Some(Value::String(action)), Value::Bool(false)) => {
                match Self::from_action(action, details) {
                    Decision::Allow(_) | Decision::Modify { .. } => {
                        invalid_shape("its action allows and its 'allow' is false")
                    }
                    other => other,
                }
            }
            (Some(Value::Bool(true)), Value::Undefined) | (None, Value::Bool(true)) => {
                Decision::Allow(details)
            }
            (Some(Value::Bool(false)), Value::Undefined) | (None, Value::Bool(false)) => {
                Decision::Deny(details)
            }
            (None, Value::Undefined) => {
                invalid_shape("it has neither action nor decision nor allow")
            }
            _ => invalid_shape("its action, decision or allow is neither a string nor a boolean"),
        }
    }

    fn from_action(action: &str, details: DecisionDetails) -> Self {
        match Action::parse(action) {
            Some(Action::Allow) => Decision::Allow(details),
            Some(Action::Deny) => Decision::Deny(details),
            Some(Action::Ask) => Decision::Ask(details),
            Some(Action::Modify) => Decision::Modify {
                outputs: serde_json::Value::Null,
                details,
            },
            None => invalid_shape(&format!("'{action}' is not an action")),
        }
        .with_outputs()
    }

    /// Moves the outputs from the details to [`Decision::Modify`].
    fn with_outputs(mut self) -> Self {
        if let Decision::Modify { outputs, details } = &mut self
            && let Some(found) = details.outputs.take()
        {
            *outputs = found;
        }
        self
    }

    /// Additional data for the client.
    pub fn metadata(&self) -> Option<&serde_json::Map<String, serde_json::Value>> {
        self.details()?.metadata.as_ref()
    }

    /// The reason.
    pub fn message(&self) -> Option<&str> {
        self.details()?.message.as_deref()
    }

    fn details(&self) -> Option<&DecisionDetails> {
        match self {
            Decision::Allow(details)
            | Decision::Deny(details)
            | Decision::Ask(details)
            | Decision::Modify { details, .. } => Some(details),
            Decision::Undefined | Decision::Failed(_) => None,
        }
    }

    /// Whether the decision denies.
    pub(super) fn is_refusal(&self) -> bool {
        match self {
            Decision::Deny(_) | Decision::Undefined | Decision::Failed(_) => true,
            Decision::Allow(_) | Decision::Ask(_) | Decision::Modify { .. } => false,
        }
    }

    /// Adds the values of the rules for details.
    pub(super) fn with_parts(mut self, parts: impl Iterator<Item = (Part, Value)>) -> Self {
        if let Decision::Allow(details)
        | Decision::Deny(details)
        | Decision::Ask(details)
        | Decision::Modify { details, .. } = &mut self
        {
            parts.for_each(|(part, answer)| details.set_part(part, &answer));
        }
        self.with_outputs()
    }
}

fn metadata(found: &Value) -> Option<serde_json::Map<String, serde_json::Value>> {
    let serde_json::Value::Object(fields) = value::to_json(found) else {
        return None;
    };
    let text = serde_json::to_string(&fields).ok()?;
    (text.len() <= MAX_METADATA_LEN).then_some(fields)
}

fn invalid_shape(what: &str) -> Decision {
    Decision::Failed(EvaluationError::Shape(sanitise(what)))
}

/// Sanitises text for messages: one line of limited length, without control characters and
/// characters that change the direction of text.
pub(super) fn sanitise(text: &str) -> String {
    let invisible = |c: char| matches!(c, '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{206f}' | '\u{feff}');
    let visible = text.chars().filter(|c| !invisible(*c)).take(MAX_TEXT_LEN);
    let line: String = visible
        .map(|c| if c.is_control() { ' ' } else { c })
        .collect();
    line.trim().to_owned()
}
