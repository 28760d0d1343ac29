//! Ref rules: which refs a push may create, update or delete.
//!
//! Each command of a push is decided separately. One refusal refuses the whole push, and all
//! refusals are reported, because git shows a reason for every ref.

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};

use crate::glob::{self, Segment, Token};
use crate::reason::Reason;
use crate::registration::AuthMode;
use crate::verdict::{Denial, Detail, RefDenial, RuleName};

/// A full ref name, as bytes, that `git check-ref-format` accepts.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "Vec<u8>", into = "Vec<u8>")]
pub struct RefName(Box<[u8]>);

/// Why a ref name is invalid.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BadRef {
    /// Not below `refs/`.
    #[error("a ref must start with 'refs/'")]
    NotARef,
    /// `//`, or a slash at the end.
    #[error("a ref must not contain an empty component")]
    EmptyComponent,
    /// `/.a`, `a.` or `..`.
    #[error(
        "a ref must not contain '..', nor a component that starts or a name that ends with '.'"
    )]
    Dot,
    /// `.lock`.
    #[error("a component of a ref must not end in '.lock'")]
    Lock,
    /// `@{`.
    #[error("a ref must not contain '@{{'")]
    Reflog,
    /// A control character, a space, or one of `~^:?*[\`.
    #[error("a ref must not contain control characters, spaces or any of ~^:?*[\\")]
    Forbidden,
}

impl RefName {
    /// Validates `name`. Bytes that are not UTF-8 are accepted, as in git; the rules refuse them.
    pub fn parse(name: &[u8]) -> Result<Self, BadRef> {
        let short = name.strip_prefix(b"refs/").ok_or(BadRef::NotARef)?;
        for component in short.split(|b| *b == b'/') {
            match component {
                [] => return Err(BadRef::EmptyComponent),
                [b'.', ..] => return Err(BadRef::Dot),
                _ if component.ends_with(b".lock") => return Err(BadRef::Lock),
                _ => {}
            }
        }
        if name.ends_with(b".") || has_pair(name, *b"..") {
            return Err(BadRef::Dot);
        }
        if has_pair(name, *b"@{") {
            return Err(BadRef::Reflog);
        }
        if name
            .iter()
            .any(|b| b.is_ascii_control() || b" ~^:?*[\\".contains(b))
        {
            return Err(BadRef::Forbidden);
        }
        Ok(Self(name.into()))
    }

    /// The name's bytes.
    pub fn as_bytes(&self) -> &[u8] {
        &self.0
    }

    fn is_below(&self, prefix: &[u8]) -> bool {
        self.0.starts_with(prefix)
    }
}

impl TryFrom<Vec<u8>> for RefName {
    type Error = BadRef;

    fn try_from(name: Vec<u8>) -> Result<Self, BadRef> {
        Self::parse(&name)
    }
}

impl From<RefName> for Vec<u8> {
    fn from(name: RefName) -> Vec<u8> {
        name.0.into()
    }
}

fn has_pair(text: &[u8], pair: [u8; 2]) -> bool {
    text.windows(2).any(|two| two == pair)
}

/// Formats bytes that are not UTF-8 as U+FFFD.
impl std::fmt::Display for RefName {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&String::from_utf8_lossy(&self.0))
    }
}

impl std::fmt::Debug for RefName {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "RefName({self})")
    }
}

/// The name of a git object: SHA-1 or SHA-256.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum ObjectId {
    /// 40 hexadecimal digits.
    Sha1([u8; 20]),
    /// 64 hexadecimal digits.
    Sha256([u8; 32]),
}

/// Text that is not an object id.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("an object id is 40 or 64 hexadecimal digits")]
pub struct BadObjectId;

impl ObjectId {
    /// Parses 40 or 64 hexadecimal digits.
    pub fn parse(hex: &[u8]) -> Result<Self, BadObjectId> {
        match hex.len() {
            40 => decode_hex(hex).map(ObjectId::Sha1),
            64 => decode_hex(hex).map(ObjectId::Sha256),
            _ => None,
        }
        .ok_or(BadObjectId)
    }

    /// The bytes.
    pub fn as_bytes(&self) -> &[u8] {
        match self {
            ObjectId::Sha1(bytes) => bytes,
            ObjectId::Sha256(bytes) => bytes,
        }
    }

    /// Whether the id is all zeros, which means 'no object'.
    pub fn is_zero(&self) -> bool {
        self.as_bytes().iter().all(|byte| *byte == 0)
    }
}

impl TryFrom<String> for ObjectId {
    type Error = BadObjectId;

    fn try_from(hex: String) -> Result<Self, BadObjectId> {
        Self::parse(hex.as_bytes())
    }
}

impl From<ObjectId> for String {
    fn from(id: ObjectId) -> String {
        id.to_string()
    }
}

fn decode_hex<const N: usize>(hex: &[u8]) -> Option<[u8; N]> {
    let mut bytes = [0; N];
    for (byte, pair) in bytes.iter_mut().zip(hex.chunks_exact(2)) {
        let text = str::from_utf8(pair).ok()?;
        // `from_str_radix` would accept a sign.
        if !pair.iter().all(u8::is_ascii_hexdigit) {
            return None;
        }
        *byte = u8::from_str_radix(text, 16).ok()?;
    }
    Some(bytes)
}

impl std::fmt::Display for ObjectId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.as_bytes()
            .iter()
            .try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl std::fmt::Debug for ObjectId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "ObjectId({self})")
    }
}

/// One command of a push: update `name` from `old` to `new`. A zero id means 'no ref'.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RefUpdate {
    /// The ref.
    pub name: RefName,
    /// The object that the client expects the ref to have.
    pub old: ObjectId,
    /// The new object of the ref.
    pub new: ObjectId,
}

impl RefUpdate {
    /// Whether the command deletes the ref.
    pub fn is_deletion(&self) -> bool {
        self.new.is_zero()
    }
}

/// The gate's information about the ref of one update.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RefFacts {
    /// Whether upstream has the ref; none if it was not looked up.
    pub exists_upstream: Option<bool>,
    /// Whether this sandbox created the ref.
    pub made_by_this_sandbox: bool,
    /// Whether `new` descends from `old`; none if the history is not known.
    pub is_fast_forward: Option<bool>,
}

/// A pattern of branches (`main`, `release/*`) or, in full, of any refs (`refs/tags/v*`).
///
/// `*` matches characters within a segment, `**` any number of segments.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RefPattern {
    source: Box<str>,
    segments: Vec<Segment>,
    /// The segments without case.
    folded: Vec<Segment>,
    /// The tokens of the pattern without case, in which stars also match slashes.
    tokens_across_slashes: Vec<Token>,
}

/// Why a ref pattern is invalid.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BadRefPattern {
    /// `a**`.
    #[error("'**' must stand alone between slashes; use '*' inside a segment")]
    DoubleStarPlace,
    /// The pattern could match no valid ref.
    #[error(transparent)]
    Ref(#[from] BadRef),
}

impl RefPattern {
    /// Parses a pattern. A pattern that does not start with `refs/` is for branches.
    pub fn parse(text: &str) -> Result<Self, BadRefPattern> {
        let full = if text.starts_with("refs/") {
            text.to_owned()
        } else {
            format!("refs/heads/{text}")
        };
        RefName::parse(full.replace('*', "x").as_bytes())?;
        if full.split('/').any(|s| s.contains("**") && s != "**") {
            return Err(BadRefPattern::DoubleStarPlace);
        }
        let folded = fold_case(&full);
        Ok(Self {
            source: text.into(),
            segments: compile(&full),
            tokens_across_slashes: tokens(&folded),
            folded: compile(&folded),
        })
    }

    /// The pattern in the configuration.
    pub fn as_str(&self) -> &str {
        &self.source
    }

    /// Whether the pattern matches exactly, for rules that allow.
    pub fn covers(&self, name: &RefName) -> bool {
        matches(&self.segments, name.as_bytes())
    }

    /// Whether the pattern matches loosely, for rules that protect: `*` matches slashes, so that
    /// `release/*` also protects `release/1/hotfix`, and letters are compared without case,
    /// because some hosts store refs on file systems where `Main` is `main` (and `maſter` is
    /// `master`).
    pub fn touches(&self, name: &RefName) -> bool {
        let folded = match str::from_utf8(name.as_bytes()) {
            Ok(name) => fold_case(name).into_bytes(),
            // The rules refuse such a name; see `check_form`.
            Err(_) => name.as_bytes().to_ascii_lowercase(),
        };
        glob::matches_tokens(&self.tokens_across_slashes, &folded) || matches(&self.folded, &folded)
    }
}

impl std::fmt::Display for RefPattern {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.source)
    }
}

/// `text` without case. It is converted to upper case first, because `ſ` and `s`, and `ı` and `i`,
/// have the same upper case, then to lower case, which maps the Kelvin sign to `k`. `İ` is replaced
/// first, because its lower case has a combining dot.
pub fn fold_case(text: &str) -> String {
    text.chars()
        .map(|c| if c == 'İ' { 'i' } else { c })
        .flat_map(char::to_uppercase)
        .flat_map(char::to_lowercase)
        .collect()
}

/// Whether the character is invisible: control and format characters, bidirectional controls, and
/// Unicode's `Default_Ignorable_Code_Point` (DerivedCoreProperties.txt, 17.0). Some file systems
/// ignore these when they compare names.
pub fn is_invisible(c: char) -> bool {
    c.is_control()
        || matches!(
            c,
            '\u{ad}'
                | '\u{34f}'
                | '\u{61c}'
                | '\u{115f}'..='\u{1160}'
                | '\u{17b4}'..='\u{17b5}'
                | '\u{180b}'..='\u{180f}'
                | '\u{200b}'..='\u{200f}'
                | '\u{2028}'..='\u{202e}'
                | '\u{2060}'..='\u{206f}'
                | '\u{3164}'
                | '\u{fe00}'..='\u{fe0f}'
                | '\u{feff}'
                | '\u{ffa0}'
                | '\u{fff0}'..='\u{fffb}'
                | '\u{1bca0}'..='\u{1bca3}'
                | '\u{1d173}'..='\u{1d17a}'
                | '\u{e0000}'..='\u{e0fff}'
        )
}

fn tokens(text: &str) -> Vec<Token> {
    text.bytes()
        .map(|byte| match byte {
            b'*' => Token::Star,
            other => Token::Byte(other),
        })
        .collect()
}

fn compile(text: &str) -> Vec<Segment> {
    text.split('/')
        .map(|segment| match segment {
            "**" => Segment::DoubleStar,
            other => Segment::new(&tokens(other)),
        })
        .collect()
}

fn matches(pattern: &[Segment], name: &[u8]) -> bool {
    glob::matches(pattern, |at| {
        let rest = name.get(at..)?;
        let end = rest.iter().position(|b| *b == b'/').unwrap_or(rest.len());
        Some((rest.get(..end)?, at + end + 1))
    })
}

/// The branches that are protected by default.
pub const DEFAULT_PROTECTED: [&str; 4] = ["main", "master", "release/*", "production"];

/// The namespaces to which a bot may push.
pub const BOT_NAMESPACES: [&str; 2] = ["refs/heads/sandbox/", "refs/heads/palisade/"];

/// The rules for refs, for one sandbox.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RefRules {
    /// Whether branches may be deleted. Protected branches and tags are never deleted: deleting
    /// and recreating a tag would move it.
    pub allow_deletion: bool,
    /// The identity for git push.
    pub auth_mode: AuthMode,
    /// Protected refs, to which every push is refused.
    pub protected: Vec<RefPattern>,
    /// Existing branches to which a sandbox in `user` mode may push although it did not create
    /// them.
    pub pushable: Vec<RefPattern>,
    /// Whether pushes must be fast-forwards. A push whose history is not known is then refused:
    /// a configured check that cannot be made fails closed.
    pub deny_force_push: bool,
}

impl RefRules {
    /// The default rules.
    pub fn new(auth_mode: AuthMode) -> Self {
        Self {
            allow_deletion: false,
            auth_mode,
            protected: DEFAULT_PROTECTED
                .iter()
                .filter_map(|text| RefPattern::parse(text).ok())
                .collect(),
            pushable: Vec::new(),
            deny_force_push: false,
        }
    }

    /// Decides about one update.
    pub fn judge(&self, update: &RefUpdate, facts: RefFacts) -> Result<(), Denial> {
        let name = check_form(update)?;
        // The server compares `old` with its own ref, so a client cannot present an existing ref
        // as new. Upstream's list of refs is used too, if it is known.
        let exists = facts.exists_upstream == Some(true) || !update.old.is_zero();
        let is_branch = update.name.is_below(b"refs/heads/");

        if update.is_deletion() && !(self.allow_deletion && is_branch) {
            return Err(
                refuse(Reason::GitDelete, "git:deletion").with_message(format!(
                    "Deleting {name} is not allowed: refs are not deleted from a sandbox."
                )),
            );
        }
        if !is_branch && !update.name.is_below(b"refs/tags/") {
            return Err(
                refuse(Reason::GitNamespace, "git:namespace").with_message(format!(
                    "Pushing {name} is not allowed: only branches and tags may be pushed."
                )),
            );
        }
        if self.auth_mode == AuthMode::Bot
            && !BOT_NAMESPACES
                .iter()
                .any(|space| update.name.is_below(space.as_bytes()))
        {
            return Err(
                refuse(Reason::GitNamespace, "git:bot-namespace").with_message(format!(
                    "Pushing {name} is not allowed: a bot pushes to sandbox/* and palisade/* only."
                )),
            );
        }
        if let Some(pattern) = self.protected.iter().find(|p| p.touches(&update.name)) {
            let rule = format!("git:protected:{pattern}");
            return Err(refuse(Reason::GitProtected, rule).with_message(format!(
                "{name} is protected. Push to a branch of your own and open a pull request."
            )));
        }
        if !is_branch && exists {
            return Err(
                refuse(Reason::GitProtected, "git:existing-tag").with_message(format!(
                    "{name} exists, and existing tags are not moved. Choose a new name."
                )),
            );
        }
        if self.auth_mode == AuthMode::User
            && exists
            && !facts.made_by_this_sandbox
            && !self
                .pushable
                .iter()
                .any(|pattern| pattern.covers(&update.name))
        {
            return Err(
                refuse(Reason::GitProtected, "git:own-branches").with_message(format!(
                    "{name} exists and was not made by this sandbox. Push to a new branch, or ask \
                 the operator to list this one."
                )),
            );
        }
        if self.deny_force_push && exists && !update.is_deletion() {
            match facts.is_fast_forward {
                Some(true) => {}
                Some(false) => {
                    return Err(refuse(Reason::GitProtected, "git:force-push").with_message(
                        format!(
                            "This push would rewrite {name}. Merge or rebase onto it, then push \
                         without force."
                        ),
                    ));
                }
                None => {
                    return Err(refuse(Reason::GitProtected, "git:force-push").with_message(
                        format!(
                            "Force pushes are not allowed, and the gate cannot determine whether this \
                         push is one: it does not have the history of {name}."
                        ),
                    ));
                }
            }
        }
        Ok(())
    }

    /// Decides about a whole push. Every update is decided; one refusal refuses the push.
    pub fn judge_push(&self, push: &[(RefUpdate, RefFacts)]) -> Result<(), Denial> {
        let mut denials = Vec::new();
        let mut seen = BTreeSet::new();
        for (update, facts) in push {
            let judged = if seen.insert(&update.name) {
                self.judge(update, *facts)
            } else {
                Err(refuse(Reason::GitMalformed, "git:form")
                    .with_message(format!("{} appears twice in one push.", update.name)))
            };
            if let Err(denial) = judged {
                denials.push(RefDenial {
                    name: update.name.as_bytes().to_vec(),
                    denial,
                });
            }
        }
        match denials.first() {
            None => Ok(()),
            Some(first) => Err(first.denial.clone().with_detail(Detail::Refs(denials))),
        }
    }
}

fn refuse(reason: Reason, rule: impl Into<RuleName>) -> Denial {
    Denial::new(reason, rule)
}

/// Refuses malformed updates, which the rules cannot be applied to; returns the name as text.
fn check_form(update: &RefUpdate) -> Result<&str, Denial> {
    let malformed =
        |why: &str| refuse(Reason::GitMalformed, "git:form").with_message(why.to_owned());
    let name = str::from_utf8(update.name.as_bytes())
        .map_err(|_| malformed("The name of a ref is not UTF-8."))?;
    // ASCII controls are not valid in a ref; U+009B starts an escape sequence, too, and
    // invisible characters would allow a second branch that looks like `main`.
    if name.chars().any(is_invisible) {
        return Err(malformed(
            "The name of a ref contains control or invisible characters.",
        ));
    }
    if update.old.as_bytes().len() != update.new.as_bytes().len() {
        return Err(malformed("The object ids of an update differ in length."));
    }
    if update.old.is_zero() && update.new.is_zero() {
        return Err(malformed(
            "An update neither creates, moves nor deletes its ref.",
        ));
    }
    Ok(name)
}

#[cfg(test)]
mod tests;
