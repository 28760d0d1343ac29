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
    /// No requirements: the path alone decides, and the body is not read.
    Unread,
    /// Only these keys.
    Keys(&'static [&'static str]),
    /// Only these keys; with the rule `close` also the keys that close and reopen.
    Edit(&'static [&'static str]),
    /// Only these keys and `event`, which must be COMMENT unless the rule `review-verdicts` is
    /// enabled.
    Review(&'static [&'static str]),
}

impl Body {
    /// The body that creates a pull request.
    pub(super) const CREATE_PULL: Body = Body::Keys(&[
        "title",
        "head",
        "head_repo",
        "base",
        "body",
        "maintainer_can_modify",
        "draft",
        "issue",
    ]);
    /// The body that edits a pull request.
    pub(super) const EDIT_PULL: Body =
        Body::Edit(&["title", "body", "base", "maintainer_can_modify"]);
    /// The body that creates an issue.
    pub(super) const CREATE_ISSUE: Body = Body::Keys(&[
        "title",
        "body",
        "assignee",
        "assignees",
        "milestone",
        "labels",
        "type",
    ]);
    /// The body that edits an issue.
    pub(super) const EDIT_ISSUE: Body = Body::Edit(&[
        "title",
        "body",
        "assignee",
        "assignees",
        "milestone",
        "labels",
        "type",
    ]);
    /// The body that creates a review.
    pub(super) const CREATE_REVIEW: Body = Body::Review(&["commit_id", "body", "comments"]);
    /// The body that submits a pending review.
    pub(super) const SUBMIT_REVIEW: Body = Body::Review(&["body"]);

    /// Checks the body of `request`, which the rule `rule` allows by its path.
    pub(super) fn check(
        self,
        rule: &str,
        request: &GithubRequest<'_>,
        is_enabled: impl Fn(&str) -> bool,
    ) -> Result<(), Denial> {
        let known = match self {
            Body::Unread => return Ok(()),
            Body::Keys(keys) | Body::Edit(keys) | Body::Review(keys) => keys,
        };
        let fields = read_object(rule, request)?;
        for key in fields.keys() {
            match (self, key.as_str()) {
                (Body::Edit(_), "state" | "state_reason") if is_enabled("close") => {}
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
            (Body::Review(_), Some("APPROVE" | "REQUEST_CHANGES"))
                if is_enabled("review-verdicts") =>
            {
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
    let is_json_type = kind.strip_prefix("application/").is_some_and(|sub| {
        let plain = |b: u8| b.is_ascii_alphanumeric() || b"+-.".contains(&b);
        (sub == "json" || sub.ends_with("+json")) && sub.bytes().all(plain)
    });
    is_json_type && matches!(parameters.as_str(), "" | "charset=utf-8")
}

fn read_strictly(bytes: &[u8]) -> Result<Value, serde_json::Error> {
    let mut reader = serde_json::Deserializer::from_slice(bytes);
    let value = Strict {
        remaining_depth: MAX_DEPTH,
    }
    .deserialize(&mut reader)?;
    reader.end()?;
    Ok(value)
}

/// Deserializer of a value without duplicate keys, with at most `remaining_depth` levels of
/// nesting.
#[derive(Clone, Copy)]
struct Strict {
    remaining_depth: usize,
}

impl Strict {
    fn nested<E: Error>(self) -> Result<Self, E> {
        let remaining_depth = self.remaining_depth.checked_sub(1);
        let remaining_depth = remaining_depth.ok_or_else(|| E::custom("nested too deeply"))?;
        Ok(Self { remaining_depth })
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
        let nested = self.nested()?;
        let mut list = Vec::new();
        while let Some(item) = items.next_element_seed(nested)? {
            list.push(item);
        }
        Ok(Value::Array(list))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<Value, A::Error> {
        let nested = self.nested()?;
        let mut map = Map::new();
        while let Some(key) = entries.next_key::<String>()? {
            let value = entries.next_value_seed(nested)?;
            if map.insert(key, value).is_some() {
                return Err(Error::custom("duplicate key"));
            }
        }
        Ok(Value::Object(map))
    }
}
