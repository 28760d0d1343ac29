//! `approvals`: approval of requests by the operator.

use std::time::Duration;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::leaf::{self, Text, WebhookUrl};
use crate::secret::Secret;

/// How requests wait for the operator's approval.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct ApprovalsSection {
    /// Whether an operator is present to approve requests.
    pub mode: ApprovalMode,
    /// How long a request waits for the operator's answer before it is refused.
    #[serde(with = "leaf::scalar")]
    #[schemars(with = "Text<Duration>")]
    pub hold: Duration,
    /// A URL to which each approval request is posted. Such URLs carry tokens, so the value is
    /// treated as a secret.
    #[schemars(with = "Option<Text<WebhookUrl>>")]
    pub webhook: Option<Secret>,
}

impl Default for ApprovalsSection {
    fn default() -> Self {
        Self {
            mode: ApprovalMode::Interactive,
            hold: Duration::from_secs(120),
            webhook: None,
        }
    }
}

/// Whether an operator is present to approve requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum ApprovalMode {
    /// Hold the request until the operator answers.
    Interactive,
    /// Refuse without waiting.
    Unattended,
}
