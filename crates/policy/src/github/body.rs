//! Request bodies that a rule depends on.
//!
//! Bodies are parsed strictly: JSON with duplicate keys, or text that some server would parse as a
//! form, could have another meaning for the server than for the gate.

use std::fmt;

use serde::de::{DeserializeSeed, Deserializer, Error, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Value};

use crate::verdict::Denial;

use super::table::Rule;
use super::{GithubRequest, refuse, refuse_named};

/// Maximum nesting of a body.
const MAX_DEPTH: usize = 32;

/// The requirements of a rule for a body.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Body {
    /// None: the path alone decides, and the body is not read.
    Unread,
    /// Only these keys.
    Keys(&'static [&'static str]),
    /// These keys, and with the rule `close` also those that close and reopen.
    Edit(&'static [&'static str]),
    /// These keys and `event`, which must be COMMENT unless the rule `review-verdicts` is enabled.
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

    /// Checks the body of `request`, which the rule `rule` allows by its path.
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
                            "The body has an unknown field. Allowed fields: {}.",
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

/// Refuses a write that a server could parse in another way: as a form, which may override the
/// method, or with fields of the query.
pub(super) fn check_encoding(request: &GithubRequest<'_>, rule: &Rule) -> Result<(), Denial> {
    let is_clear = match request.content_type {
        Some(kind) => is_json(kind),
        None => !rule.is_default || request.method.as_str() == "DELETE",
    };
    if !is_clear {
        return Err(refuse(
            rule.name,
            "The body must be JSON, with the header Content-Type: application/json.",
        ));
    }
    if rule.is_default && request.path.query().is_some() {
        return Err(refuse(
            rule.name,
            "A write must not have a query string. Put the fields into the JSON body.",
        ));
    }
    Ok(())
}

/// Parses the body, which must be a JSON object.
pub(super) fn read_object(
    rule: &str,
    request: &GithubRequest<'_>,
) -> Result<Map<String, Value>, Denial> {
    if !request.content_type.is_some_and(is_json) {
        return Err(refuse(
            rule,
            "The body must be JSON, with the header Content-Type: application/json.",
        ));
    }
    let Some(bytes) = request.body else {
        return Err(refuse(
            rule,
            "This request is decided by its body, which is missing or too large.",
        ));
    };
    match read_strictly(bytes) {
        Ok(Value::Object(fields)) => Ok(fields),
        Ok(Value::Array(_)) => Err(refuse(
            rule,
            "Batches are not supported. Send the requests one at a time.",
        )),
        Ok(_) => Err(refuse(rule, "The body must be a JSON object.")),
        Err(_) => Err(refuse(
            rule,
            "The body must be unambiguous JSON: no duplicate keys, at most 32 levels of nesting, \
             nothing after the end.",
        )),
    }
}

/// Whether the content type is `application/json` or `application/…+json`, in UTF-8.
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
    let value = Strict { left: MAX_DEPTH }.deserialize(&mut reader)?;
    reader.end()?;
    Ok(value)
}

/// Deserializer of a value without duplicate keys, with at most `left` levels of nesting.
#[derive(Clone, Copy)]
struct Strict {
    left: usize,
}

impl Strict {
    fn below<E: Error>(self) -> Result<Self, E> {
        let left = self.left.checked_sub(1);
        let left = left.ok_or_else(|| E::custom("nested too deeply"))?;
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
                return Err(Error::custom("duplicate key"));
            }
        }
        Ok(Value::Object(map))
    }
}
