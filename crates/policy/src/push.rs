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

use serde::{Deserialize, Serialize};

use crate::refs::{ObjectId, RefUpdate};

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
