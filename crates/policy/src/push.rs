//! A push on its way to a verdict: what whoever reads its pack is told, and what it says.
//!
//! ```text
//!   gate                                   judging child (no key, few system calls)
//!     │ ── Case, pack, what upstream has ────▶ │ indexes the pack apart from everything
//!     │                                        │ reads every object the push adds
//!     │ ◀──────────────────────── Findings ─── │
//!     │ decides, with the rules for refs
//! ```
//!
//! The child finds; it decides nothing. A pack that subverts it can make it lie about that
//! pack and about nothing else: the child holds no key, and the rules for refs do not ask it.

use std::num::{NonZeroU32, NonZeroU64};

use serde::{Deserialize, Serialize};

use crate::bucket::Rate;
use crate::reason::Reason;
use crate::refs::{ObjectId, RefFacts, RefRules, RefUpdate};
use crate::registration::{MAX_RECEIVE_PACK_BYTES, Repo};
use crate::verdict::Denial;

/// How a repository names its objects.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ObjectFormat {
    /// 20 bytes.
    #[default]
    Sha1,
    /// 32 bytes.
    Sha256,
}

/// What a push asks for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Case {
    /// How its objects are named.
    pub format: ObjectFormat,
    /// The commands, in their order.
    pub updates: Vec<RefUpdate>,
    /// The push options, as they came.
    pub options: Vec<Vec<u8>>,
    /// Where upstream's default branch is, where that is known.
    pub default_tip: Option<ObjectId>,
    /// Paths a push may not change, without a slash at either end. A directory stands for
    /// everything below it.
    pub restricted: Vec<String>,
    /// Whether anybody wants to know of secrets.
    pub scan: bool,
}

/// What was found in a push.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Findings {
    /// How many objects the push adds.
    pub objects: u64,
    /// The first secrets, at most [`MOST_SIGHTINGS`].
    pub secrets: Vec<Sighting>,
    /// Whether there were more.
    pub more_secrets: bool,
    /// What the push does to restricted paths.
    pub restricted: Restricted,
    /// For each update, whether `new` descends from `old`; none where the old history is
    /// not here.
    pub fast_forward: Vec<Option<bool>>,
}

impl Findings {
    /// The refusal of what it does to restricted paths. No path is named.
    pub fn path_denial(&self) -> Option<Denial> {
        let says = match self.restricted {
            Restricted::Untouched => return None,
            Restricted::Changed => {
                "The push changes files that only the operator changes, such as workflows. Leave \
                 them as they are upstream in every commit, or ask the operator."
            }
            Restricted::Unknown => {
                "Whether the push changes files that only the operator changes, such as \
                 workflows, cannot be told: what upstream has is not known here. Start from the \
                 default branch as it is now, or ask the operator."
            }
        };
        Some(Denial::new(Reason::GitPath, "git:restricted-paths").saying(says))
    }

    /// The refusals of its secrets, one for each rule. The rule is told, the place is for the
    /// operator.
    pub fn secret_denials(&self) -> Vec<Denial> {
        let mut denials: Vec<Denial> = Vec::new();
        for sighting in &self.secrets {
            let rule = format!("secret:{}", sighting.rule);
            let place = sighting.place.to_string();
            match denials.iter_mut().find(|known| known.rule.as_str() == rule) {
                Some(known) => {
                    let evidence = known.evidence.get_or_insert_default();
                    evidence.push_str(", ");
                    evidence.push_str(&place);
                }
                None => denials.push(
                    Denial::new(Reason::SecretFound, rule)
                        .saying(format!(
                            "The push holds a secret ({}). Take it out of every commit, also of \
                             those that a later one repairs, and push again.",
                            sighting.rule
                        ))
                        .because(place),
                ),
            }
        }
        denials
    }
}

/// How many sightings are told.
pub const MOST_SIGHTINGS: usize = 20;

/// A secret, without the secret.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Sighting {
    /// The rule that knew it.
    pub rule: String,
    /// Where it is.
    pub place: Place,
}

/// Where in a push something is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "snake_case")]
pub enum Place {
    /// In a file. The path is one of those it has in the push, where a tree names it.
    Blob {
        /// The file.
        id: ObjectId,
        /// Its path.
        path: Option<String>,
    },
    /// In the name of a file or directory.
    Tree(ObjectId),
    /// In a commit: its message, its author or any other header.
    Commit(ObjectId),
    /// In an annotated tag.
    Tag(ObjectId),
    /// In the name of the ref of that update, counted from nought.
    Ref(usize),
    /// In that push option, counted from nought.
    Option(usize),
}

/// For the operator; a path is as the agent spelt it, with what nobody sees escaped.
impl std::fmt::Display for Place {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Place::Blob {
                path: Some(path),
                id,
            } => write!(f, "'{}' (blob {id})", path.escape_debug()),
            Place::Blob { path: None, id } => write!(f, "blob {id}"),
            Place::Tree(id) => write!(f, "a name in tree {id}"),
            Place::Commit(id) => write!(f, "commit {id}"),
            Place::Tag(id) => write!(f, "tag {id}"),
            Place::Ref(place) => write!(f, "the name of ref {}", place + 1),
            Place::Option(place) => write!(f, "push option {}", place + 1),
        }
    }
}

/// What a push does to restricted paths.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Restricted {
    /// Nothing.
    #[default]
    Untouched,
    /// It changes at least one, compared with what upstream has.
    Changed,
    /// What upstream has is not known, and a tree of the push has such a path.
    Unknown,
}

/// How often a sandbox may push: ten times, then once a second.
pub const PUSH_RATE: Rate = Rate::every(
    NonZeroU64::new(1_000_000_000).unwrap(),
    NonZeroU32::new(10).unwrap(),
);

/// The largest push to `repo`: its own limit, or the one for all.
pub fn size_limit(repo: &Repo, hard_limit: u64) -> u64 {
    let limit = repo.max_receive_pack_bytes.unwrap_or(hard_limit);
    limit.min(MAX_RECEIVE_PACK_BYTES)
}

/// What is done about a secret in a push.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OnSecret {
    /// The push is refused.
    Deny,
    /// The operator is asked.
    Ask,
    /// It is written down.
    Note,
    /// Nobody looks.
    Off,
}

/// What is done about the secrets of one push.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Secrets {
    /// There are none, or they are only noted.
    Pass,
    /// The operator decides. Each entry is the refusal that a push would get without a question.
    Ask(Vec<Denial>),
    /// The push is refused.
    Deny(Vec<Denial>),
}

/// The rules for pushes, for one sandbox.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PushRules {
    /// Which refs it may touch.
    pub refs: RefRules,
    /// What is done about secrets.
    pub secrets: OnSecret,
}

impl PushRules {
    /// Decides as far as no object has to be read. Whoever is refused here is refused
    /// before anything is asked of upstream or of the reader.
    pub fn judge_refs(&self, case: &Case, facts: &[RefFacts]) -> Result<(), Denial> {
        let unread = RefRules {
            deny_force_push: false,
            ..self.refs.clone()
        };
        unread.judge_push(&pair(case, facts, None))
    }

    /// What is done about the secrets that were found, one entry for each rule that knew them.
    pub fn judge_secrets(&self, findings: &Findings) -> Secrets {
        let found = findings.secret_denials();
        match self.secrets {
            _ if found.is_empty() => Secrets::Pass,
            OnSecret::Deny => Secrets::Deny(found),
            OnSecret::Ask => Secrets::Ask(found),
            OnSecret::Note | OnSecret::Off => Secrets::Pass,
        }
    }

    /// Whether somebody has to read the objects.
    pub fn wants_findings(&self, case: &Case) -> bool {
        let moves = |update: &RefUpdate| !update.old.is_zero() && !update.is_deletion();
        case.scan
            || !case.restricted.is_empty()
            || (self.refs.deny_force_push && case.updates.iter().any(moves))
    }
}

/// Decides about a whole push. A check that was asked for and not made refuses it. What comes
/// back are the findings that the operator has to decide about; mostly none.
pub fn judge(
    rules: &PushRules,
    case: &Case,
    facts: &[RefFacts],
    findings: Option<&Findings>,
) -> Result<Vec<Denial>, Denial> {
    rules.refs.judge_push(&pair(case, facts, findings))?;
    let Some(findings) = findings else {
        return if rules.wants_findings(case) {
            Err(unread("nobody read the objects of this push"))
        } else {
            Ok(Vec::new())
        };
    };
    if !case.restricted.is_empty()
        && let Some(denial) = findings.path_denial()
    {
        return Err(denial);
    }
    match rules.judge_secrets(findings) {
        Secrets::Pass => Ok(Vec::new()),
        Secrets::Ask(found) => Ok(found),
        Secrets::Deny(found) => found.into_iter().next().map_or(Ok(Vec::new()), Err),
    }
}

/// Refuses a push whose objects could not be read.
pub fn unread(evidence: impl Into<String>) -> Denial {
    Denial::new(Reason::Internal, "git:judge")
        .saying("The content of this push could not be checked, so it is refused.")
        .because(evidence)
}

/// What is known of each update.
fn pair(
    case: &Case,
    facts: &[RefFacts],
    findings: Option<&Findings>,
) -> Vec<(RefUpdate, RefFacts)> {
    let forward = |at: usize| *findings?.fast_forward.get(at)?;
    let updates = case.updates.iter().enumerate();
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
