//! Encoding of one record: its canonical text, its hash, and its line.
//!
//! `hash = SHA-256(prev ‖ body)`, where `body` is the record as compact JSON with sorted keys and
//! without `prev` and `hash`, and `prev` is the hash of the previous record of the same chain (32
//! zero bytes for the first). The text is stored as it was hashed and never serialised again.

use std::borrow::Cow;
use std::collections::BTreeMap;

use policy::audit::{AuditEvent, Kind};
use policy::clock::UnixMillis;
use policy::id::{RequestId, SandboxId};
use policy::reason::Reason;
use policy::verdict::VerdictKind;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

/// The version of the record format.
const VERSION: u8 = 1;

/// Maximum length of a text field. A record must stay small whatever a program sends.
pub const MAX_TEXT: usize = 4096;

/// Maximum length of a stage's name.
const MAX_STAGE: usize = 64;

/// Maximum number of stages in a record.
const MAX_STAGES: usize = 64;

/// Maximum length of a ref's name.
const MAX_REF: usize = 1024;

/// Maximum number of refs in a record.
const MAX_REFS: usize = 32;

/// The owner of a chain: a sandbox, or the gate itself.
pub(crate) type ChainName = Option<SandboxId>;

/// The name of a chain as text: the sandbox's id, empty for the gate's own.
pub(crate) fn chain_text(name: &ChainName) -> &str {
    name.as_ref().map_or("", SandboxId::as_str)
}

/// A SHA-256.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Digest256([u8; 32]);

impl Digest256 {
    /// The `prev` of the first record of a chain.
    pub const ZERO: Self = Self([0; 32]);

    /// The hash of a record with this `body` that follows `prev`.
    pub fn of_record(prev: &Self, body: &[u8]) -> Self {
        let hash = Sha256::new().chain_update(prev.0).chain_update(body);
        Self(hash.finalize().into())
    }

    /// The hash with these 32 bytes.
    pub fn from_bytes(bytes: &[u8]) -> Option<Self> {
        bytes.try_into().ok().map(Self)
    }

    /// Parses 64 lower-case hexadecimal digits.
    pub fn parse(text: &str) -> Option<Self> {
        let digit = |c: u8| match c {
            b'0'..=b'9' => Some(c - b'0'),
            b'a'..=b'f' => Some(c - b'a' + 10),
            _ => None,
        };
        let (pairs, rest) = text.as_bytes().as_chunks::<2>();
        if pairs.len() != 32 || !rest.is_empty() {
            return None;
        }
        let mut bytes = [0; 32];
        for (byte, [high, low]) in bytes.iter_mut().zip(pairs) {
            *byte = digit(*high)? << 4 | digit(*low)?;
        }
        Some(Self(bytes))
    }

    /// The 32 bytes.
    pub fn as_bytes(&self) -> &[u8; 32] {
        &self.0
    }
}

impl std::fmt::Display for Digest256 {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl std::fmt::Debug for Digest256 {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Digest256({self})")
    }
}

impl Serialize for Digest256 {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Digest256 {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = Cow::<str>::deserialize(deserializer)?;
        Self::parse(&text).ok_or_else(|| serde::de::Error::custom("not 64 hexadecimal digits"))
    }
}

/// The head of another chain, as listed in a checkpoint record.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ChainHead {
    /// The chain's sandbox.
    pub chain: String,
    /// The hash of the chain's last record.
    pub hash: Digest256,
    /// The number of the chain's last record.
    pub seq: u64,
}

/// The canonical text of a record.
pub(crate) fn compose(event: &AuditEvent, seq: u64, ts: UnixMillis, heads: &[ChainHead]) -> String {
    // Destructured by name, so that a new field of the event cannot be forgotten here.
    let AuditEvent {
        agent,
        bundle,
        bytes_in,
        bytes_out,
        count,
        credential,
        event,
        host,
        kind,
        method,
        ms,
        operation,
        path,
        port,
        reason,
        refs,
        repo,
        request_id,
        rule,
        sandbox,
        stage,
        status,
        unread,
        verdict,
    } = event;
    let text = |field| Option::as_deref(field).map(|text| shorten(text, MAX_TEXT));
    let body = Body {
        agent: text(agent),
        bundle: text(bundle),
        bytes_in: *bytes_in,
        bytes_out: *bytes_out,
        count: *count,
        credential: text(credential),
        event: text(event),
        heads,
        host: text(host),
        kind: *kind,
        method: text(method),
        ms: ms
            .iter()
            .take(MAX_STAGES)
            .map(|(stage, took)| (shorten(stage, MAX_STAGE), round_millis(took)))
            .collect(),
        operation: text(operation),
        path: text(path),
        port: *port,
        reason: *reason,
        refs: refs
            .iter()
            .take(MAX_REFS)
            .map(|name| shorten(name, MAX_REF))
            .collect(),
        repo: text(repo),
        request_id: *request_id,
        rule: rule.as_ref().map(|r| shorten(r.as_str(), MAX_TEXT)),
        sandbox: sandbox.as_ref().map(SandboxId::as_str),
        seq,
        stage: text(stage),
        status: *status,
        ts: ts.get(),
        unread: *unread,
        v: VERSION,
        verdict: *verdict,
    };
    // Serialisation fails only for maps with keys that are not text, and for writers that fail.
    serde_json::to_string(&body).unwrap_or_default()
}

/// A record as it is serialised; in alphabetical order, like the event.
#[derive(Serialize)]
struct Body<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    agent: Option<Cow<'a, str>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    bundle: Option<Cow<'a, str>>,
    #[serde(skip_serializing_if = "is_zero")]
    bytes_in: u64,
    #[serde(skip_serializing_if = "is_zero")]
    bytes_out: u64,
    #[serde(skip_serializing_if = "is_one")]
    count: u32,
    #[serde(skip_serializing_if = "Option::is_none")]
    credential: Option<Cow<'a, str>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    event: Option<Cow<'a, str>>,
    #[serde(skip_serializing_if = "<[_]>::is_empty")]
    heads: &'a [ChainHead],
    #[serde(skip_serializing_if = "Option::is_none")]
    host: Option<Cow<'a, str>>,
    kind: Kind,
    #[serde(skip_serializing_if = "Option::is_none")]
    method: Option<Cow<'a, str>>,
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    ms: BTreeMap<Cow<'a, str>, f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    operation: Option<Cow<'a, str>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    path: Option<Cow<'a, str>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    port: Option<u16>,
    #[serde(skip_serializing_if = "Option::is_none")]
    reason: Option<Reason>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    refs: Vec<Cow<'a, str>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    repo: Option<Cow<'a, str>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    request_id: Option<RequestId>,
    #[serde(skip_serializing_if = "Option::is_none")]
    rule: Option<Cow<'a, str>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    sandbox: Option<&'a str>,
    seq: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    stage: Option<Cow<'a, str>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    status: Option<u16>,
    ts: i64,
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    unread: bool,
    v: u8,
    #[serde(skip_serializing_if = "Option::is_none")]
    verdict: Option<VerdictKind>,
}

/// The fields of a body that verification needs.
#[derive(Deserialize)]
pub(crate) struct RecordHeader {
    pub(crate) seq: u64,
    pub(crate) v: u8,
    pub(crate) ts: i64,
    #[serde(default)]
    pub(crate) sandbox: Option<SandboxId>,
    #[serde(default)]
    pub(crate) event: Option<String>,
    #[serde(default)]
    pub(crate) heads: Vec<ChainHead>,
}

impl RecordHeader {
    /// Parses the fields of a body of this version.
    pub(crate) fn parse(body: &[u8]) -> Option<Self> {
        serde_json::from_slice(body)
            .ok()
            .filter(|header: &Self| header.v == VERSION)
    }
}

/// `text`, or the part of it that fits into `max` bytes, with a mark that it was shorten.
fn shorten(text: &str, max: usize) -> Cow<'_, str> {
    const MARK: &str = "…";
    if text.len() <= max {
        return Cow::Borrowed(text);
    }
    let end = text.floor_char_boundary(max.saturating_sub(MARK.len()));
    Cow::Owned(format!("{}{MARK}", text.get(..end).unwrap_or_default()))
}

/// Milliseconds rounded to microseconds: JSON has no infinity, and short numbers parse to exactly
/// the same value.
fn round_millis(ms: f64) -> f64 {
    let rounded = (ms.clamp(0.0, 1e9) * 1000.0).round() / 1000.0;
    if rounded.is_finite() { rounded } else { 0.0 }
}

/// The text before the hash of the previous record in a line.
const PREV: &str = r#","prev":""#;
/// The text between the two hashes in a line.
const HASH: &str = r#"","hash":""#;
/// The end of a line.
const END: &str = r#""}"#;

/// The record as one line (without its newline): the body with `prev` and `hash` inserted before
/// its last brace, so that it can be verified without serialising it again.
pub(crate) fn write_line(out: &mut Vec<u8>, body: &[u8], prev: &Digest256, hash: &Digest256) {
    out.extend_from_slice(body.strip_suffix(b"}").unwrap_or(body));
    out.extend_from_slice(format!("{PREV}{prev}{HASH}{hash}{END}").as_bytes());
}

/// Splits a line into body, prev and hash. `None` if it has another format.
pub(crate) fn split_line(line: &[u8]) -> Option<(Vec<u8>, Digest256, Digest256)> {
    let tail = PREV.len() + 64 + HASH.len() + 64 + END.len();
    let (body, tail) = line.split_at_checked(line.len().checked_sub(tail)?)?;
    let tail = std::str::from_utf8(tail).ok()?;
    let (prev, hash) = tail
        .strip_prefix(PREV)?
        .strip_suffix(END)?
        .split_once(HASH)?;
    let mut body = body.to_vec();
    body.push(b'}');
    Some((body, Digest256::parse(prev)?, Digest256::parse(hash)?))
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
    use proptest::prelude::*;

    use super::*;

    fn full_event() -> AuditEvent {
        let text = || Some("x".to_owned());
        AuditEvent {
            agent: text(),
            bundle: text(),
            bytes_in: 1,
            bytes_out: 2,
            count: 3,
            credential: text(),
            event: text(),
            host: text(),
            kind: Kind::Http,
            method: text(),
            ms: [("dial", 0.1), ("scan", 2.0)].into_iter().collect(),
            operation: text(),
            path: text(),
            port: Some(443),
            reason: Some(Reason::HostDenied),
            refs: vec!["refs/heads/x".to_owned()],
            repo: text(),
            request_id: Some(RequestId::new(1, 2)),
            rule: Some("r".into()),
            sandbox: Some(SandboxId::parse("a").unwrap()),
            stage: text(),
            status: Some(403),
            unread: true,
            verdict: Some(VerdictKind::Deny),
        }
    }

    #[test]
    fn canonical_text_is_sorted_compact_and_complete() {
        let head = ChainHead {
            chain: "a".to_owned(),
            hash: Digest256::ZERO,
            seq: 9,
        };
        let body = compose(&full_event(), 7, UnixMillis::new(5), &[head]);
        let sorted: BTreeMap<String, serde_json::Value> = serde_json::from_str(&body).unwrap();
        assert_eq!(serde_json::to_string(&sorted).unwrap(), body);
        assert_eq!(sorted.len(), 28);
        assert_eq!(
            serde_json::from_str::<AuditEvent>(&body).unwrap(),
            full_event()
        );
        let header = RecordHeader::parse(body.as_bytes()).unwrap();
        assert_eq!((header.seq, header.ts, header.heads.len()), (7, 5, 1));
        assert_eq!(
            compose(&AuditEvent::new(Kind::Dns), 1, UnixMillis::new(2), &[]),
            r#"{"kind":"dns","seq":1,"ts":2,"v":1}"#
        );
    }

    #[test]
    fn long_text_is_cut_between_characters() {
        for text in ["a".repeat(5000), "é".repeat(5000), "🦀".repeat(2000)] {
            let kept = shorten(&text, MAX_TEXT);
            assert!(kept.len() <= MAX_TEXT && kept.len() > MAX_TEXT - 8);
            assert!(text.starts_with(kept.strip_suffix('…').unwrap()));
        }
        assert_eq!(
            shorten(&"a".repeat(MAX_TEXT), MAX_TEXT),
            "a".repeat(MAX_TEXT)
        );
    }

    #[test]
    fn time_that_is_not_finite_is_still_recorded() {
        let mut event = full_event();
        for bad in [f64::NAN, f64::INFINITY, -1.0, 1e300] {
            event.ms.insert("x", bad);
            let body = compose(&event, 1, UnixMillis::new(1), &[]);
            assert!(serde_json::from_str::<AuditEvent>(&body).is_ok(), "{body}");
        }
    }

    proptest! {
        #[test]
        fn any_text_in_any_field_leaves_other_fields_unchanged(
            text in any::<String>(), field in 0..9usize, took in 0.0..1e6f64,
        ) {
            let mut event = full_event();
            let target = match field {
                0 => &mut event.bundle,
                1 => &mut event.credential,
                2 => &mut event.event,
                3 => &mut event.host,
                4 => &mut event.method,
                5 => &mut event.path,
                6 => &mut event.stage,
                7 => &mut event.agent,
                _ => {
                    event.rule = Some(text.clone().into());
                    &mut event.bundle
                }
            };
            *target = Some(text);
            event.ms.insert("x", round_millis(took));
            let body = compose(&event, 1, UnixMillis::new(1), &[]);
            prop_assert!(!body.contains('\n') && !body.contains('\0'));
            prop_assert_eq!(&serde_json::from_str::<AuditEvent>(&body).unwrap(), &event);

            let hash = Digest256::of_record(&Digest256::ZERO, body.as_bytes());
            let mut line = Vec::new();
            write_line(&mut line, body.as_bytes(), &Digest256::ZERO, &hash);
            prop_assert!(serde_json::from_slice::<serde_json::Value>(&line).is_ok());
            let (again, prev, read) = split_line(&line).unwrap();
            prop_assert_eq!(again, body.into_bytes());
            prop_assert_eq!((prev, read), (Digest256::ZERO, hash));
        }

        #[test]
        fn splitting_a_line_never_panics(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
            let _ = split_line(&bytes);
        }
    }
}
