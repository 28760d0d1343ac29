//! Audit events: records of decisions and lifecycle events, before they enter the hash chain.

use std::borrow::Cow;
use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::id::{RequestId, SandboxId};
use crate::reason::Reason;
use crate::verdict::{RuleName, VerdictKind};

/// One audit event. Events contain no secret, no body and no query string.
///
/// The fields are in alphabetical order because they are serialised in that order and the
/// audit chain hashes the bytes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct AuditEvent {
    /// The name that the agent reports, if it differs from the name of its sandbox.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub agent: Option<String>,
    /// The policy bundle that decided.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bundle: Option<String>,
    /// Bytes from the sandbox.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub bytes_in: u64,
    /// Bytes to the sandbox.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub bytes_out: u64,
    /// The number of identical events that this record represents.
    #[serde(default = "default_count", skip_serializing_if = "is_one")]
    pub count: u32,
    /// The name of the credential that was added, never its value.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub credential: Option<String>,
    /// The name of the event, for records that are not about a request: `registered`, `reloaded`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub event: Option<String>,
    /// The requested host.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub host: Option<String>,
    /// The kind of traffic or event.
    pub kind: Kind,
    /// The method, query type, git command or tool.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub method: Option<String>,
    /// Milliseconds spent in each stage.
    #[serde(default, skip_serializing_if = "Times::is_empty")]
    pub ms: Times,
    /// The operation on a repository, as [`crate::repository::RepositoryOperation`] names it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub operation: Option<String>,
    /// The path, without its query.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub path: Option<String>,
    /// The requested port.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub port: Option<u16>,
    /// The reason code of a refusal.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<Reason>,
    /// The first refs of a push.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub refs: Vec<String>,
    /// The repository, `owner/name`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub repo: Option<String>,
    /// The id of the request.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub request_id: Option<RequestId>,
    /// The rule that decided.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rule: Option<RuleName>,
    /// The sandbox; none for the gate itself.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sandbox: Option<SandboxId>,
    /// The stage that ended the request.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stage: Option<String>,
    /// The HTTP status that the sandbox received.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub status: Option<u16>,
    /// Whether the content passed without being read.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub unread: bool,
    /// The verdict.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub verdict: Option<VerdictKind>,
}

impl AuditEvent {
    /// An event of `kind` with all other fields empty.
    pub fn new(kind: Kind) -> Self {
        Self {
            agent: None,
            bundle: None,
            bytes_in: 0,
            bytes_out: 0,
            count: 1,
            credential: None,
            event: None,
            host: None,
            kind,
            method: None,
            ms: Times::default(),
            operation: None,
            path: None,
            port: None,
            reason: None,
            refs: Vec::new(),
            repo: None,
            request_id: None,
            rule: None,
            sandbox: None,
            stage: None,
            status: None,
            unread: false,
            verdict: None,
        }
    }

    /// A lifecycle event of a sandbox, or of the gate itself.
    pub fn lifecycle(event: &str, sandbox: Option<SandboxId>) -> Self {
        Self {
            event: Some(event.to_owned()),
            sandbox,
            ..Self::new(Kind::Lifecycle)
        }
    }
}

/// Milliseconds spent in each stage, sorted by the stages' names. A sorted list is cheaper than
/// a map for so few entries.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(from = "BTreeMap<String, f64>")]
pub struct Times(#[serde(serialize_with = "serialize_as_map")] Vec<(Cow<'static, str>, f64)>);

impl Times {
    /// Sets the duration of a stage.
    pub fn insert(&mut self, stage: impl Into<Cow<'static, str>>, ms: f64) {
        let stage = stage.into();
        match self.0.binary_search_by(|(known, _)| known.cmp(&stage)) {
            Ok(index) => {
                if let Some((_, known)) = self.0.get_mut(index) {
                    *known = ms;
                }
            }
            Err(index) => {
                if self.0.capacity() == 0 {
                    self.0.reserve_exact(8);
                }
                self.0.insert(index, (stage, ms));
            }
        }
    }

    /// The duration of a stage.
    pub fn get(&self, stage: &str) -> Option<f64> {
        let mut all = self.iter();
        all.find_map(|(known, ms)| (known == stage).then_some(ms))
    }

    /// Every stage with its duration.
    pub fn iter(&self) -> impl Iterator<Item = (&str, f64)> {
        self.0.iter().map(|(stage, ms)| (stage.as_ref(), *ms))
    }

    /// Whether no stage has a duration.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Removes all stages.
    pub fn clear(&mut self) {
        self.0.clear();
    }
}

impl<S: Into<Cow<'static, str>>> FromIterator<(S, f64)> for Times {
    fn from_iter<I: IntoIterator<Item = (S, f64)>>(all: I) -> Self {
        let mut times = Self::default();
        for (stage, ms) in all {
            times.insert(stage, ms);
        }
        times
    }
}

impl From<BTreeMap<String, f64>> for Times {
    fn from(all: BTreeMap<String, f64>) -> Self {
        all.into_iter().collect()
    }
}

fn serialize_as_map<S: serde::Serializer>(
    times: &[(Cow<'static, str>, f64)],
    serializer: S,
) -> Result<S::Ok, S::Error> {
    serializer.collect_map(times.iter().map(|(stage, ms)| (stage, ms)))
}

/// The kind of traffic or event that a record is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Kind {
    /// A request through the proxy.
    Http,
    /// A DNS query.
    Dns,
    /// A git operation.
    Git,
    /// A tool call.
    Mcp,
    /// An approval question to the operator, or its answer.
    Approval,
    /// A start, stop, registration or expiry.
    Lifecycle,
    /// A configuration that was loaded or rejected.
    Config,
    /// A suspicious action of a sandbox that the operator should look at.
    Alert,
}

impl Kind {
    /// Every kind.
    pub const ALL: &[Kind] = &[
        Kind::Http,
        Kind::Dns,
        Kind::Git,
        Kind::Mcp,
        Kind::Approval,
        Kind::Lifecycle,
        Kind::Config,
        Kind::Alert,
    ];

    /// The name in records and metrics.
    pub const fn as_str(self) -> &'static str {
        match self {
            Kind::Http => "http",
            Kind::Dns => "dns",
            Kind::Git => "git",
            Kind::Mcp => "mcp",
            Kind::Approval => "approval",
            Kind::Lifecycle => "lifecycle",
            Kind::Config => "config",
            Kind::Alert => "alert",
        }
    }

    /// Whether records of this kind are frequent (verdicts on traffic), so that consecutive
    /// identical ones may be written as one record with a count.
    pub const fn is_traffic(self) -> bool {
        matches!(self, Kind::Http | Kind::Dns | Kind::Git | Kind::Mcp)
    }
}

fn default_count() -> u32 {
    1
}

#[expect(
    clippy::trivially_copy_pass_by_ref,
    reason = "serde requires this signature"
)]
fn is_one(count: &u32) -> bool {
    *count == 1
}

#[expect(
    clippy::trivially_copy_pass_by_ref,
    reason = "serde requires this signature"
)]
fn is_zero(count: &u64) -> bool {
    *count == 0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_are_serialised_in_alphabetical_order() {
        let mut event = AuditEvent::lifecycle("registered", Some(SandboxId::parse("a").unwrap()));
        event.bytes_in = 1;
        event.count = 2;
        event.unread = true;
        event.verdict = Some(VerdictKind::Deny);
        event.reason = Some(Reason::HostDenied);
        event.refs = vec!["refs/heads/a".to_owned()];
        event.repo = Some("o/r".to_owned());
        event.operation = Some("push".to_owned());
        event.ms.insert("total", 3.0);
        event.ms.insert("rate", 1.0);
        event.ms.insert("total", 2.0);
        assert_eq!(event.ms.get("total"), Some(2.0));
        let text = serde_json::to_string(&event).unwrap();
        let value: BTreeMap<String, serde_json::Value> = serde_json::from_str(&text).unwrap();
        assert_eq!(serde_json::to_string(&value).unwrap(), text);
        assert_eq!(serde_json::from_str::<AuditEvent>(&text).unwrap(), event);
    }

    #[test]
    fn empty_event_is_serialised_with_its_kind_only() {
        let event = AuditEvent::new(Kind::Dns);
        assert_eq!(serde_json::to_string(&event).unwrap(), r#"{"kind":"dns"}"#);
    }
}
