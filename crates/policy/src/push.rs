//! Push rules, and the messages between the gate and the pack reader process.
//!
//! ```text
//!   gate                                          pack reader (no credentials, few system calls)
//!     │ ── PushContext, pack, upstream's objects ───▶ │ indexes the pack in isolation
//!     │                                               │ reads every object the push adds
//!     │ ◀─────────────────────────────── Findings ─── │
//!     │ decides, with the ref rules
//! ```
//!
//! The pack reader only reports findings; the gate decides. A pack that exploits a bug of the pack
//! reader can falsify the findings about that pack only: the pack reader has no credentials, and
//! the ref rules do not depend on it.

use std::num::{NonZeroU32, NonZeroU64};

use serde::{Deserialize, Serialize};

use crate::bucket::Rate;
use crate::reason::Reason;
use crate::refs::{ObjectId, RefFacts, RefRules, RefUpdate};
use crate::registration::{MAX_RECEIVE_PACK_BYTES, Repo};
use crate::verdict::Denial;

/// The hash function of a repository's object ids.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ObjectFormat {
    /// 20 bytes.
    #[default]
    Sha1,
    /// 32 bytes.
    Sha256,
}

/// A push and the checks that it needs, as the pack reader receives them.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PushContext {
    /// The hash function of its object ids.
    pub format: ObjectFormat,
    /// The commands, in their order.
    pub updates: Vec<RefUpdate>,
    /// The push options, unchanged.
    pub options: Vec<Vec<u8>>,
    /// The commit of upstream's default branch, if it is known.
    pub default_tip: Option<ObjectId>,
    /// Paths that a push must not change, without a slash at either end. A directory includes
    /// everything below it.
    pub restricted: Vec<String>,
    /// Whether to scan for secrets.
    pub scan: bool,
}

/// The findings of the pack reader about a push.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Findings {
    /// The number of objects that the push adds.
    pub objects: u64,
    /// The first secrets, at most [`MAX_SECRET_FINDINGS`].
    pub secrets: Vec<SecretFinding>,
    /// Whether there were more secrets.
    pub more_secrets: bool,
    /// Whether the push changes restricted paths.
    pub restricted: RestrictedPathChange,
    /// For each update, whether `new` descends from `old`; none if the old history is not known.
    pub fast_forward: Vec<Option<bool>>,
}

impl Findings {
    /// The refusal of a change of restricted paths. It does not name the paths.
    pub fn path_denial(&self) -> Option<Denial> {
        let message = match self.restricted {
            RestrictedPathChange::Untouched => return None,
            RestrictedPathChange::Changed => {
                "The push changes files that only the operator may change, such as workflows. Leave \
                 them as they are upstream in every commit, or ask the operator."
            }
            RestrictedPathChange::Unknown => {
                "The gate cannot determine whether the push changes files that only the operator may \
                 change, such as workflows: it does not know upstream's version of them. Start from \
                 the current default branch, or ask the operator."
            }
        };
        Some(Denial::new(Reason::GitPath, "git:restricted-paths").with_message(message))
    }

    /// The refusals for the secrets, one for each scan rule. The message contains the rule; the
    /// location is evidence for the operator.
    pub fn secret_denials(&self) -> Vec<Denial> {
        let mut denials: Vec<Denial> = Vec::new();
        for finding in &self.secrets {
            let rule = format!("secret:{}", finding.rule);
            let place = finding.place.to_string();
            match denials.iter_mut().find(|known| known.rule.as_str() == rule) {
                Some(known) => {
                    let evidence = known.evidence.get_or_insert_default();
                    evidence.push_str(", ");
                    evidence.push_str(&place);
                }
                None => denials.push(
                    Denial::new(Reason::SecretFound, rule)
                        .with_message(format!(
                            "The push contains a secret ({}). Remove it from every commit of the push, \
                             not only from the last one, and push again.",
                            finding.rule
                        ))
                        .with_evidence(place),
                ),
            }
        }
        denials
    }
}

/// Maximum number of secrets in the findings.
pub const MAX_SECRET_FINDINGS: usize = 20;

/// A secret that was found, without its text.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SecretFinding {
    /// The scan rule that matched.
    pub rule: String,
    /// The location of the secret.
    pub place: SecretLocation,
}

/// The location of a secret in a push.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "snake_case")]
pub enum SecretLocation {
    /// In a file. A blob can have several paths in a push; this is one of them.
    Blob {
        /// The blob.
        id: ObjectId,
        /// The path, if a tree of the push contains the blob.
        path: Option<String>,
    },
    /// In the name of a file or directory.
    Tree(ObjectId),
    /// In a commit: its message, its author or any other header.
    Commit(ObjectId),
    /// In an annotated tag.
    Tag(ObjectId),
    /// In the ref name of the update with this index.
    Ref(usize),
    /// In the push option with this index.
    Option(usize),
}

/// Formats the location for the operator; invisible characters in a path are escaped.
impl std::fmt::Display for SecretLocation {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            SecretLocation::Blob {
                path: Some(path),
                id,
            } => write!(f, "'{}' (blob {id})", path.escape_debug()),
            SecretLocation::Blob { path: None, id } => write!(f, "blob {id}"),
            SecretLocation::Tree(id) => write!(f, "a name in tree {id}"),
            SecretLocation::Commit(id) => write!(f, "commit {id}"),
            SecretLocation::Tag(id) => write!(f, "tag {id}"),
            SecretLocation::Ref(index) => write!(f, "the name of ref {}", index + 1),
            SecretLocation::Option(index) => write!(f, "push option {}", index + 1),
        }
    }
}

/// Whether a push changes restricted paths.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RestrictedPathChange {
    /// No restricted path is changed.
    #[default]
    Untouched,
    /// At least one restricted path differs from upstream.
    Changed,
    /// A tree of the push contains a restricted path, and upstream's version is not known.
    Unknown,
}

/// Rate limit of pushes of a sandbox: a burst of ten, then one a second.
pub const PUSH_RATE: Rate = Rate::every(
    NonZeroU64::new(1_000_000_000).unwrap(),
    NonZeroU32::new(10).unwrap(),
);

/// Maximum size of a push to `repo`: its own limit, or `hard_limit`.
pub fn size_limit(repo: &Repo, hard_limit: u64) -> u64 {
    let limit = repo.max_receive_pack_bytes.unwrap_or(hard_limit);
    limit.min(MAX_RECEIVE_PACK_BYTES)
}

/// The configured action for secrets in pushes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SecretAction {
    /// The push is refused.
    Deny,
    /// The operator decides.
    Ask,
    /// The secret is only recorded.
    Note,
    /// Pushes are not scanned.
    Off,
}

/// The decision about the secrets of one push.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SecretDecision {
    /// There are no secrets, or they are only recorded.
    Pass,
    /// The operator decides. Each entry is the refusal that applies without an approval.
    Ask(Vec<Denial>),
    /// The push is refused.
    Deny(Vec<Denial>),
}

/// The rules for pushes, for one sandbox.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PushRules {
    /// The ref rules.
    pub refs: RefRules,
    /// The action for secrets.
    pub secrets: SecretAction,
}

impl PushRules {
    /// Decides by the ref rules alone, without reading objects. A push that is refused here needs
    /// no request to upstream and no pack reader.
    pub fn judge_refs(&self, context: &PushContext, facts: &[RefFacts]) -> Result<(), Denial> {
        let rules = RefRules {
            deny_force_push: false,
            ..self.refs.clone()
        };
        rules.judge_push(&updates_with_facts(context, facts, None))
    }

    /// Decides about the secrets that were found, with one entry for each scan rule.
    pub fn judge_secrets(&self, findings: &Findings) -> SecretDecision {
        let found = findings.secret_denials();
        match self.secrets {
            _ if found.is_empty() => SecretDecision::Pass,
            SecretAction::Deny => SecretDecision::Deny(found),
            SecretAction::Ask => SecretDecision::Ask(found),
            SecretAction::Note | SecretAction::Off => SecretDecision::Pass,
        }
    }

    /// Whether the objects of the push have to be read.
    pub fn wants_findings(&self, context: &PushContext) -> bool {
        let moves = |update: &RefUpdate| !update.old.is_zero() && !update.is_deletion();
        context.scan
            || !context.restricted.is_empty()
            || (self.refs.deny_force_push && context.updates.iter().any(moves))
    }
}

/// Decides about a whole push. A configured check that was not made refuses the push. Returns the
/// findings that need the operator's approval; usually none.
pub fn judge(
    rules: &PushRules,
    context: &PushContext,
    facts: &[RefFacts],
    findings: Option<&Findings>,
) -> Result<Vec<Denial>, Denial> {
    let updates = updates_with_facts(context, facts, findings);
    rules.refs.judge_push(&updates)?;
    let Some(findings) = findings else {
        return if rules.wants_findings(context) {
            Err(refuse_unreadable("the objects of this push were not read"))
        } else {
            Ok(Vec::new())
        };
    };
    if !context.restricted.is_empty()
        && let Some(denial) = findings.path_denial()
    {
        return Err(denial);
    }
    match rules.judge_secrets(findings) {
        SecretDecision::Pass => Ok(Vec::new()),
        SecretDecision::Ask(found) => Ok(found),
        SecretDecision::Deny(found) => found.into_iter().next().map_or(Ok(Vec::new()), Err),
    }
}

/// Refuses a push whose objects could not be read.
pub fn refuse_unreadable(evidence: impl Into<String>) -> Denial {
    Denial::new(Reason::Internal, "git:judge")
        .with_message("The content of this push could not be checked, so the push is refused.")
        .with_evidence(evidence)
}

/// The updates with their facts, including those of the findings.
fn updates_with_facts(
    context: &PushContext,
    facts: &[RefFacts],
    findings: Option<&Findings>,
) -> Vec<(RefUpdate, RefFacts)> {
    let forward = |at: usize| *findings?.fast_forward.get(at)?;
    let updates = context.updates.iter().enumerate();
    updates
        .map(|(at, update)| {
            let known = facts.get(at).copied().unwrap_or_default();
            let facts = RefFacts {
                is_fast_forward: known.is_fast_forward.or_else(|| forward(at)),
                ..known
            };
            (update.clone(), facts)
        })
        .collect()
}

#[cfg(test)]
mod tests;
