//! Parses registration requests, in the two formats that existing programs send.
//!
//! The first format has `container_ip` and `repos`; the later one has `ip_address` and puts
//! everything else into `metadata`. The values may be chosen by an attacker, so each field is
//! validated by itself, and text is never interpreted.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::time::Duration;

use jiff::Timestamp;
use policy::clock::UnixMillis;
use policy::id::SandboxId;
use policy::registration::{
    AuthMode, MAX_RECEIVE_PACK_BYTES, Registration, Repo, RepoName, canonical_ip,
};
use serde_json::{Map, Value, json};

use crate::reply::ControlError;

/// Lifetime of a registration if the request sets none.
const DEFAULT_LIFETIME: Duration = Duration::from_secs(24 * 60 * 60);

/// Maximum lifetime: ten years. A longer one is a mistake in units.
const MAX_LIFETIME: Duration = Duration::from_secs(10 * 365 * 24 * 60 * 60);

/// Maximum number of repositories in one registration.
const MAX_REPOS: usize = 1_000;

/// Fields of the first format.
const FIRST_FORMAT: &[&str] = &[
    "container_ip",
    "container_id",
    "repos",
    "auth_mode",
    "credentials",
    "expires_at",
    "metadata",
    "replace",
];

/// Fields of the later format.
const LATER_FORMAT: &[&str] = &[
    "container_id",
    "ip_address",
    "ttl_seconds",
    "credentials",
    "metadata",
    "replace",
];

/// Fields of a repository that is an object.
const REPO_FIELDS: &[&str] = &["name", "max_receive_pack_bytes"];

/// Maximum number of unknown fields that a warning names; the others are only counted.
const MAX_NAMED_FIELDS: usize = 16;

/// Maximum length of a field name in a warning, in bytes.
const MAX_FIELD_NAME_BYTES: usize = 64;

/// A request to register a container.
#[derive(Clone, Debug, PartialEq)]
pub struct RegisterRequest {
    /// The registration, without its credentials.
    pub row: Registration,
    /// Names of the credentials that the request lists; `None` if it lists none.
    pub credentials: Option<Vec<String>>,
    /// Whether to end a live registration that holds the address.
    pub replace: bool,
    /// Warnings for the response.
    pub warnings: Vec<String>,
}

/// How unknown fields of a request are handled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum UnknownFields {
    /// The request is refused: a misspelt `auth_mode` would widen what a container may do.
    Refuse,
    /// The fields are ignored, with a warning in the response: existing programs send their own
    /// fields.
    Ignore,
}

/// Parses a registration from a request body.
pub fn read_registration(
    body: &[u8],
    now: UnixMillis,
    unknown: UnknownFields,
) -> Result<RegisterRequest, ControlError> {
    let value: Value = serde_json::from_slice(body)
        .map_err(|error| ControlError::Bad(format!("Invalid JSON body: {error}")))?;
    let Value::Object(fields) = value else {
        return Err(bad("The request body must be a JSON object"));
    };
    let mut reader = Reader {
        unknown,
        ignored: BTreeSet::new(),
    };
    let has = |name: &str| fields.contains_key(name);
    let row = if !has("container_ip") && (has("ip_address") || has("ttl_seconds")) {
        reader.later_format(&fields, now)?
    } else {
        reader.first_format(&fields, now)?
    };
    let replace = match non_null_field(&fields, "replace") {
        None => false,
        Some(value) => value
            .as_bool()
            .ok_or_else(|| bad("replace must be true or false"))?,
    };
    Ok(RegisterRequest {
        row,
        credentials: read_credentials(&fields)?,
        replace,
        warnings: reader.warnings(),
    })
}

/// Parses the list of repositories of a request.
pub fn read_repos(items: &[Value]) -> Result<Vec<Repo>, ControlError> {
    let mut reader = Reader {
        unknown: UnknownFields::Refuse,
        ignored: BTreeSet::new(),
    };
    reader.repos(items)
}

/// Parses the fields of one request.
struct Reader {
    unknown: UnknownFields,
    /// The unknown fields so far.
    ignored: BTreeSet<String>,
}

impl Reader {
    fn first_format(
        &mut self,
        fields: &Map<String, Value>,
        now: UnixMillis,
    ) -> Result<Registration, ControlError> {
        require(fields, &["container_ip", "container_id", "repos"])?;
        self.check_known("", fields, FIRST_FORMAT)?;
        let expires = match non_null_field(fields, "expires_at") {
            Some(value) => read_expiry(value, now)?,
            None => now.plus(DEFAULT_LIFETIME),
        };
        Ok(Registration {
            id: read_id(fields)?,
            ip: Some(read_ip(fields, "container_ip")?),
            repos: self.repo_list(non_null_field(fields, "repos"))?,
            auth_mode: read_auth_mode(non_null_field(fields, "auth_mode"))?,
            credentials: Vec::new(),
            created: now,
            expires,
            metadata: read_metadata(fields)?,
        })
    }

    /// The later format has repositories and mode in `metadata`.
    fn later_format(
        &mut self,
        fields: &Map<String, Value>,
        now: UnixMillis,
    ) -> Result<Registration, ControlError> {
        require(fields, &["container_id", "ip_address"])?;
        self.check_known("", fields, LATER_FORMAT)?;
        let life = match non_null_field(fields, "ttl_seconds") {
            None => DEFAULT_LIFETIME,
            Some(value) => match value.as_u64() {
                Some(seconds) if (1..=MAX_LIFETIME.as_secs()).contains(&seconds) => {
                    Duration::from_secs(seconds)
                }
                _ => {
                    return Err(bad(
                        "ttl_seconds must be a whole number of seconds, at least 1 and \
                         at most ten years",
                    ));
                }
            },
        };
        let metadata = read_metadata(fields)?;
        let mut repos = self.repo_list(non_null_field(&metadata, "repos"))?;
        if let Some(Value::String(repo)) = non_null_field(&metadata, "repo")
            && let Ok(name) = RepoName::parse(repo)
            && !repos.iter().any(|known| known.name == name)
        {
            repos.push(Repo {
                name,
                max_receive_pack_bytes: None,
            });
        }
        let auth_mode = match non_null_field(&metadata, "auth_mode") {
            Some(Value::String(mode)) if mode == AuthMode::Bot.as_str() => AuthMode::Bot,
            _ => AuthMode::User,
        };
        Ok(Registration {
            id: read_id(fields)?,
            ip: Some(read_ip(fields, "ip_address")?),
            repos,
            auth_mode,
            credentials: Vec::new(),
            created: now,
            expires: now.plus(life),
            metadata,
        })
    }

    fn repo_list(&mut self, value: Option<&Value>) -> Result<Vec<Repo>, ControlError> {
        match value {
            None => Ok(Vec::new()),
            Some(Value::Array(items)) => self.repos(items),
            Some(_) => Err(bad("repos must be a list of 'owner/name'")),
        }
    }

    fn repos(&mut self, items: &[Value]) -> Result<Vec<Repo>, ControlError> {
        if items.len() > MAX_REPOS {
            return Err(ControlError::Bad(format!(
                "repos may name at most {MAX_REPOS} repositories"
            )));
        }
        items.iter().map(|item| self.repo(item)).collect()
    }

    fn repo(&mut self, item: &Value) -> Result<Repo, ControlError> {
        let parse = |text: &str| {
            RepoName::parse(text).map_err(|error| {
                ControlError::Bad(format!(
                    "Invalid repository '{}': {error}",
                    text.escape_default()
                ))
            })
        };
        match item {
            Value::String(text) => Ok(Repo {
                name: parse(text)?,
                max_receive_pack_bytes: None,
            }),
            Value::Object(fields) => {
                require(fields, &["name"])?;
                self.check_known("repos[].", fields, REPO_FIELDS)?;
                let name = non_null_field(fields, "name")
                    .and_then(Value::as_str)
                    .unwrap_or_default();
                Ok(Repo {
                    name: parse(name)?,
                    max_receive_pack_bytes: read_push_limit(fields)?,
                })
            }
            _ => Err(bad(
                "a repository is 'owner/name' or {name, max_receive_pack_bytes}",
            )),
        }
    }

    /// Refuses unknown fields, or collects them for the warning. `path` is their prefix.
    fn check_known(
        &mut self,
        path: &str,
        fields: &Map<String, Value>,
        known: &[&str],
    ) -> Result<(), ControlError> {
        let unknown = fields.keys().map(String::as_str);
        let unknown: Vec<&str> = unknown.filter(|name| !known.contains(name)).collect();
        if unknown.is_empty() {
            return Ok(());
        }
        match self.unknown {
            UnknownFields::Refuse => Err(ControlError::Bad(format!(
                "Unknown fields: {}; the fields of this format are {}",
                quote(&unknown),
                quote(known)
            ))),
            UnknownFields::Ignore => {
                let names = unknown.iter().map(|name| format!("{path}{name}"));
                self.ignored.extend(names);
                Ok(())
            }
        }
    }

    fn warnings(&self) -> Vec<String> {
        if self.ignored.is_empty() {
            return Vec::new();
        }
        let named = self.ignored.iter().map(|name| {
            let end = name.floor_char_boundary(MAX_FIELD_NAME_BYTES);
            name.get(..end).unwrap_or_default()
        });
        let named: Vec<&str> = named.collect();
        let (named, others) = named.split_at(named.len().min(MAX_NAMED_FIELDS));
        let others = match others.len() {
            0 => String::new(),
            count => format!(" and {count} more"),
        };
        vec![format!("Ignored unknown fields: {}{others}", quote(named))]
    }
}

fn read_push_limit(fields: &Map<String, Value>) -> Result<Option<u64>, ControlError> {
    let Some(limit) = non_null_field(fields, "max_receive_pack_bytes") else {
        return Ok(None);
    };
    match limit.as_u64() {
        Some(bytes) if (1..=MAX_RECEIVE_PACK_BYTES).contains(&bytes) => Ok(Some(bytes)),
        _ => Err(ControlError::Bad(format!(
            "max_receive_pack_bytes must be between 1 and {MAX_RECEIVE_PACK_BYTES}"
        ))),
    }
}

/// The value of a field; none if the field is missing or null.
fn non_null_field<'a>(fields: &'a Map<String, Value>, name: &str) -> Option<&'a Value> {
    fields.get(name).filter(|value| !value.is_null())
}

fn require(fields: &Map<String, Value>, required: &[&str]) -> Result<(), ControlError> {
    let missing: Vec<&str> = required
        .iter()
        .filter(|name| non_null_field(fields, name).is_none())
        .copied()
        .collect();
    if missing.is_empty() {
        return Ok(());
    }
    Err(ControlError::Bad(format!(
        "Missing required fields: {}",
        quote(&missing)
    )))
}

/// Formats a list as `['a', 'b']`, which existing clients expect.
fn quote(names: &[&str]) -> String {
    let quoted: Vec<String> = names
        .iter()
        .map(|name| format!("'{}'", name.escape_default()))
        .collect();
    format!("[{}]", quoted.join(", "))
}

fn read_id(fields: &Map<String, Value>) -> Result<SandboxId, ControlError> {
    non_null_field(fields, "container_id")
        .and_then(Value::as_str)
        .ok_or_else(|| bad("container_id must be a string"))
        .and_then(|text| {
            SandboxId::parse(text)
                .map_err(|error| ControlError::Bad(format!("Invalid container_id: {error}")))
        })
}

fn read_ip(fields: &Map<String, Value>, name: &str) -> Result<IpAddr, ControlError> {
    let invalid = || ControlError::Bad(format!("{name} must be an IPv4 or IPv6 address"));
    let text = non_null_field(fields, name)
        .and_then(Value::as_str)
        .ok_or_else(invalid)?;
    let ip = canonical_ip(text.parse().map_err(|_| invalid())?);
    if ip.is_unspecified() || ip.is_multicast() {
        return Err(ControlError::Bad(format!(
            "{name} must be the address of one machine"
        )));
    }
    Ok(ip)
}

fn read_auth_mode(value: Option<&Value>) -> Result<AuthMode, ControlError> {
    match value.map(Value::as_str) {
        None => Ok(AuthMode::User),
        Some(Some("user")) => Ok(AuthMode::User),
        Some(Some("bot")) => Ok(AuthMode::Bot),
        Some(_) => Err(bad("auth_mode must be 'user' or 'bot'")),
    }
}

fn read_credentials(fields: &Map<String, Value>) -> Result<Option<Vec<String>>, ControlError> {
    let invalid = || bad("credentials must be a list of names; see palisade credentials list");
    let Some(value) = non_null_field(fields, "credentials") else {
        return Ok(None);
    };
    let names = value.as_array().ok_or_else(invalid)?.iter();
    let names: Option<Vec<String>> = names.map(|name| name.as_str().map(str::to_owned)).collect();
    names.map(Some).ok_or_else(invalid)
}

fn read_expiry(value: &Value, now: UnixMillis) -> Result<UnixMillis, ControlError> {
    let at: Timestamp = value
        .as_str()
        .and_then(|text| text.parse().ok())
        .ok_or_else(|| {
            bad("expires_at must be a date with a time zone, like 2026-12-31T00:00:00Z")
        })?;
    let expires = UnixMillis::new(at.as_millisecond());
    if expires <= now {
        return Err(bad("expires_at is in the past"));
    }
    if expires > now.plus(MAX_LIFETIME) {
        return Err(bad("expires_at is more than ten years away"));
    }
    Ok(expires)
}

fn read_metadata(fields: &Map<String, Value>) -> Result<Map<String, Value>, ControlError> {
    match non_null_field(fields, "metadata") {
        None => Ok(Map::new()),
        Some(Value::Object(metadata)) => Ok(metadata.clone()),
        Some(_) => Err(bad("metadata must be a JSON object")),
    }
}

fn bad(message: &str) -> ControlError {
    ControlError::Bad(message.to_owned())
}

/// A repository of a request: its name, or an object with its push limit.
pub(crate) fn repo_schema(unknown: UnknownFields) -> Value {
    json!({ "oneOf": [
        { "type": "string", "description": "owner/name" },
        {
            "type": "object",
            "required": ["name"],
            "additionalProperties": unknown == UnknownFields::Ignore,
            "properties": {
                "name": { "type": "string" },
                "max_receive_pack_bytes": {
                    "type": "integer", "minimum": 1,
                    "maximum": MAX_RECEIVE_PACK_BYTES,
                },
            },
        },
    ]})
}

#[cfg(test)]
mod tests;
