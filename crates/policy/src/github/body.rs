//! Bodies that a rule has to read.
//!
//! A body is read as strictly as can be: JSON that repeats a key, or text that some server
//! would take for a form, could mean one thing here and another there.

use std::fmt;

use serde::de::{DeserializeSeed, Deserializer, Error, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Value};

use crate::verdict::Denial;

use super::table::Rule;
use super::{GithubRequest, refuse, refuse_named};

/// How deep a body may nest.
const DEEPEST: usize = 32;

/// What a rule has to see of a body.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Body {
    /// Nothing: the path says it all.
    Unread,
    /// These keys and no others.
    Keys(&'static [&'static str]),
    /// These keys, and with the rule `close` those that close and reopen.
    Edit(&'static [&'static str]),
    /// These keys, and an event that must be COMMENT without the rule `review-verdicts`.
    Review(&'static [&'static str]),
}

impl Body {
    pub(super) const PULL: Body = Body::Keys(&[
        "title",
        "head",
        "head_repo",
        "base",
        "body",
        "maintainer_can_modify",
        "draft",
        "issue",
    ]);
    pub(super) const PULL_EDIT: Body =
        Body::Edit(&["title", "body", "base", "maintainer_can_modify"]);
    pub(super) const ISSUE: Body = Body::Keys(&[
        "title",
        "body",
        "assignee",
        "assignees",
        "milestone",
        "labels",
        "type",
    ]);
    pub(super) const ISSUE_EDIT: Body = Body::Edit(&[
        "title",
        "body",
        "assignee",
        "assignees",
        "milestone",
        "labels",
        "type",
    ]);
    pub(super) const REVIEW: Body = Body::Review(&["commit_id", "body", "comments"]);
    pub(super) const REVIEW_EVENT: Body = Body::Review(&["body"]);

    /// Checks the body of `request`, which the rule called `rule` opened.
    pub(super) fn check(
        self,
        rule: &str,
        request: &GithubRequest<'_>,
        is_on: impl Fn(&str) -> bool,
    ) -> Result<(), Denial> {
        let known = match self {
            Body::Unread => return Ok(()),
            Body::Keys(keys) | Body::Edit(keys) | Body::Review(keys) => keys,
        };
        let fields = read_object(rule, request)?;
        for key in fields.keys() {
            match (self, key.as_str()) {
                (Body::Edit(_), "state" | "state_reason") if is_on("close") => {}
                (Body::Edit(_), "state" | "state_reason") => {
                    return Err(refuse_named("close", &format!("The field '{key}'")));
                }
                (Body::Review(_), "event") => {}
                (_, key) if known.contains(&key) => {}
                _ => {
                    return Err(refuse(
                        rule,
                        format!(
                            "The body has a field that is not known here. Known are {}.",
                            known.join(", ")
                        ),
                    ));
                }
            }
        }
        match (self, fields.get("event").and_then(Value::as_str)) {
            (Body::Review(_), Some("COMMENT")) => Ok(()),
            (Body::Review(_), Some("APPROVE" | "REQUEST_CHANGES")) if is_on("review-verdicts") => {
                Ok(())
            }
            (Body::Review(_), _) => Err(refuse_named(
                "review-verdicts",
                "A review whose 'event' is not 'COMMENT'",
            )),
            _ => Ok(()),
        }
    }
}

/// Refuses a write that some server could read in another way: as a form, which may name
/// another method, or with fields from the query.
pub(super) fn check_carriage(request: &GithubRequest<'_>, rule: &Rule) -> Result<(), Denial> {
    let is_clear = match request.content_type {
        Some(kind) => is_json(kind),
        None => !rule.is_default || request.method.as_str() == "DELETE",
    };
    if !is_clear {
        return Err(refuse(
            rule.name,
            "The body must be JSON and say so: send Content-Type: application/json.",
        ));
    }
    if rule.is_default && request.path.query().is_some() {
        return Err(refuse(
            rule.name,
            "A write must not carry a query string. Put the fields into the JSON body.",
        ));
    }
    Ok(())
}

/// The body as a JSON object.
pub(super) fn read_object(
    rule: &str,
    request: &GithubRequest<'_>,
) -> Result<Map<String, Value>, Denial> {
    if !request.content_type.is_some_and(is_json) {
        return Err(refuse(
            rule,
            "The body must be JSON and say so: send Content-Type: application/json.",
        ));
    }
    let Some(bytes) = request.body else {
        return Err(refuse(
            rule,
            "This request is judged by its body, which is missing or too large to be read.",
        ));
    };
    match read_strictly(bytes) {
        Ok(Value::Object(fields)) => Ok(fields),
        Ok(Value::Array(_)) => Err(refuse(
            rule,
            "A batch is not judged. Send its requests one at a time.",
        )),
        Ok(_) => Err(refuse(rule, "The body must be a JSON object.")),
        Err(_) => Err(refuse(
            rule,
            "The body must be JSON that everybody reads alike: no repeated keys, nested at \
             most 32 deep, nothing behind the end.",
        )),
    }
}

/// `application/json` or a media type built on it, in UTF-8.
fn is_json(content_type: &str) -> bool {
    let lower = content_type.to_ascii_lowercase();
    let (kind, parameters) = lower.split_once(';').unwrap_or((&lower, ""));
    let kind = kind.trim();
    let parameters = parameters.trim().replace('"', "");
    let is_built_on = kind.strip_prefix("application/").is_some_and(|sub| {
        let plain = |b: u8| b.is_ascii_alphanumeric() || b"+-.".contains(&b);
        (sub == "json" || sub.ends_with("+json")) && sub.bytes().all(plain)
    });
    is_built_on && matches!(parameters.as_str(), "" | "charset=utf-8")
}

fn read_strictly(bytes: &[u8]) -> Result<Value, serde_json::Error> {
    let mut reader = serde_json::Deserializer::from_slice(bytes);
    let value = Strict { left: DEEPEST }.deserialize(&mut reader)?;
    reader.end()?;
    Ok(value)
}

/// Reads a value that repeats no key and nests no deeper than is left.
#[derive(Clone, Copy)]
struct Strict {
    left: usize,
}

impl Strict {
    fn below<E: Error>(self) -> Result<Self, E> {
        let left = self.left.checked_sub(1);
        let left = left.ok_or_else(|| E::custom("nested too deep"))?;
        Ok(Self { left })
    }
}

impl<'de> DeserializeSeed<'de> for Strict {
    type Value = Value;

    fn deserialize<D: Deserializer<'de>>(self, reader: D) -> Result<Value, D::Error> {
        reader.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Strict {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a JSON value")
    }

    fn visit_unit<E>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_bool<E>(self, value: bool) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_u64<E>(self, value: u64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_i64<E>(self, value: i64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_f64<E>(self, value: f64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_str<E>(self, value: &str) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_string<E>(self, value: String) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Value, A::Error> {
        let below = self.below()?;
        let mut list = Vec::new();
        while let Some(item) = items.next_element_seed(below)? {
            list.push(item);
        }
        Ok(Value::Array(list))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<Value, A::Error> {
        let below = self.below()?;
        let mut map = Map::new();
        while let Some(key) = entries.next_key::<String>()? {
            let value = entries.next_value_seed(below)?;
            if map.insert(key, value).is_some() {
                return Err(Error::custom("a key is repeated"));
            }
        }
        Ok(Value::Object(map))
    }
}
