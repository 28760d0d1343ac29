//! `approvals`: asking a person.

use std::time::Duration;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::leaf::{self, Text, WebhookUrl};
use crate::secret::Secret;

/// How the operator is asked.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct ApprovalsSection {
    /// Whether somebody is there.
    pub mode: ApprovalMode,
    /// How long a request waits for an answer.
    #[serde(with = "leaf::one")]
    #[schemars(with = "Text<Duration>")]
    pub hold: Duration,
    /// A URL that hears of every question. Such URLs carry tokens, so it is kept like a
    /// secret.
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

/// Whether somebody is there to be asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum ApprovalMode {
    /// Hold the request and ask.
    Interactive,
    /// Refuse at once.
    Unattended,
}
