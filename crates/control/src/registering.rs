//! Reading a registration, in the two shapes that programs in the field send.
//!
//! The first shape names `container_ip` and `repos`; the later one names `ip_address`
//! and puts everything else into `metadata`. Everything here comes from a program that
//! may have been told what to say, so each field is checked by itself, and text is kept
//! as text.

use std::net::IpAddr;
use std::time::Duration;

use jiff::Timestamp;
use policy::clock::UnixMillis;
use policy::id::SandboxId;
use policy::registration::{
    AuthMode, MAX_RECEIVE_PACK_BYTES, Registration, Repo, RepoName, canonical_ip,
};
use serde_json::{Map, Value};

use crate::reply::ControlError;

/// How long a registration counts when its sender does not say.
const DEFAULT_LIFE: Duration = Duration::from_secs(24 * 60 * 60);

/// The longest life: ten years. More is a mistake in units.
const MAX_LIFE: Duration = Duration::from_secs(10 * 365 * 24 * 60 * 60);

/// Repositories one registration may name.
const MAX_REPOS: usize = 1_000;

const FIRST_SHAPE: &[&str] = &[
    "container_ip",
    "container_id",
    "repos",
    "auth_mode",
    "expires_at",
    "metadata",
];
const LATER_SHAPE: &[&str] = &["container_id", "ip_address", "ttl_seconds", "metadata"];

/// Reads a registration out of a request body.
pub fn read_registration(body: &[u8], now: UnixMillis) -> Result<Registration, ControlError> {
    let value: Value = serde_json::from_slice(body)
        .map_err(|error| ControlError::Bad(format!("Invalid JSON body: {error}")))?;
    let Value::Object(fields) = value else {
        return Err(bad("The request body must be a JSON object"));
    };
    if fields.contains_key("ip_address") || fields.contains_key("ttl_seconds") {
        later_shape(&fields, now)
    } else {
        first_shape(&fields, now)
    }
}

fn first_shape(fields: &Map<String, Value>, now: UnixMillis) -> Result<Registration, ControlError> {
    require(
        fields,
        &["container_ip", "container_id", "repos"],
        FIRST_SHAPE,
    )?;
    let expires = match given(fields, "expires_at") {
        Some(value) => read_expiry(value, now)?,
        None => now.plus(DEFAULT_LIFE),
    };
    Ok(Registration {
        id: read_id(fields)?,
        ip: Some(read_ip(fields, "container_ip")?),
        repos: read_repos(given(fields, "repos"))?,
        auth_mode: read_auth_mode(given(fields, "auth_mode"))?,
        created: now,
        expires,
        metadata: read_metadata(fields)?,
    })
}

/// The later shape carries repositories and mode inside `metadata`, where the seed's
/// later project reads them.
fn later_shape(fields: &Map<String, Value>, now: UnixMillis) -> Result<Registration, ControlError> {
    require(fields, &["container_id", "ip_address"], LATER_SHAPE)?;
    let life = match given(fields, "ttl_seconds") {
        None => DEFAULT_LIFE,
        Some(value) => match value.as_u64() {
            Some(seconds) if (1..=MAX_LIFE.as_secs()).contains(&seconds) => {
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
    let mut repos = read_repos(given(&metadata, "repos"))?;
    if let Some(Value::String(repo)) = given(&metadata, "repo")
        && let Ok(name) = RepoName::parse(repo)
        && !repos.iter().any(|known| known.name == name)
    {
        repos.push(Repo {
            name,
            max_receive_pack_bytes: None,
        });
    }
    let auth_mode = match given(&metadata, "auth_mode") {
        Some(Value::String(mode)) if mode == AuthMode::Bot.as_str() => AuthMode::Bot,
        _ => AuthMode::User,
    };
    Ok(Registration {
        id: read_id(fields)?,
        ip: Some(read_ip(fields, "ip_address")?),
        repos,
        auth_mode,
        created: now,
        expires: now.plus(life),
        metadata,
    })
}

/// A field that is there and not null.
fn given<'a>(fields: &'a Map<String, Value>, name: &str) -> Option<&'a Value> {
    fields.get(name).filter(|value| !value.is_null())
}

/// A misspelt `auth_mode` would silently widen what a container may do, so an unknown
/// field is an error.
fn require(
    fields: &Map<String, Value>,
    required: &[&str],
    known: &[&str],
) -> Result<(), ControlError> {
    let missing: Vec<&str> = required
        .iter()
        .filter(|name| given(fields, name).is_none())
        .copied()
        .collect();
    if !missing.is_empty() {
        return Err(ControlError::Bad(format!(
            "Missing required fields: {}",
            quote(&missing)
        )));
    }
    let unknown: Vec<&str> = fields
        .keys()
        .map(String::as_str)
        .filter(|name| !known.contains(name))
        .collect();
    if !unknown.is_empty() {
        return Err(ControlError::Bad(format!(
            "Unknown fields: {}; this shape takes {}",
            quote(&unknown),
            quote(known)
        )));
    }
    Ok(())
}

/// `['a', 'b']`, as the seed's clients expect the list to read.
fn quote(names: &[&str]) -> String {
    let quoted: Vec<String> = names
        .iter()
        .map(|name| format!("'{}'", name.escape_default()))
        .collect();
    format!("[{}]", quoted.join(", "))
}

fn read_id(fields: &Map<String, Value>) -> Result<SandboxId, ControlError> {
    given(fields, "container_id")
        .and_then(Value::as_str)
        .ok_or_else(|| bad("container_id must be a string"))
        .and_then(|text| {
            SandboxId::parse(text)
                .map_err(|error| ControlError::Bad(format!("Invalid container_id: {error}")))
        })
}

fn read_ip(fields: &Map<String, Value>, name: &str) -> Result<IpAddr, ControlError> {
    let invalid = || ControlError::Bad(format!("{name} must be an IPv4 or IPv6 address"));
    let text = given(fields, name)
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

fn read_repos(value: Option<&Value>) -> Result<Vec<Repo>, ControlError> {
    let Some(value) = value else {
        return Ok(Vec::new());
    };
    let Value::Array(items) = value else {
        return Err(bad("repos must be a list of 'owner/name'"));
    };
    if items.len() > MAX_REPOS {
        return Err(ControlError::Bad(format!(
            "repos may name at most {MAX_REPOS} repositories"
        )));
    }
    items.iter().map(read_repo).collect()
}

fn read_repo(item: &Value) -> Result<Repo, ControlError> {
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
            require(fields, &["name"], &["name", "max_receive_pack_bytes"])?;
            let name = given(fields, "name")
                .and_then(Value::as_str)
                .unwrap_or_default();
            let max_receive_pack_bytes = match given(fields, "max_receive_pack_bytes") {
                None => None,
                Some(limit) => match limit.as_u64() {
                    Some(bytes) if (1..=MAX_RECEIVE_PACK_BYTES).contains(&bytes) => Some(bytes),
                    _ => {
                        return Err(ControlError::Bad(format!(
                            "max_receive_pack_bytes must be between 1 and {MAX_RECEIVE_PACK_BYTES}"
                        )));
                    }
                },
            };
            Ok(Repo {
                name: parse(name)?,
                max_receive_pack_bytes,
            })
        }
        _ => Err(bad(
            "a repository is 'owner/name' or {name, max_receive_pack_bytes}",
        )),
    }
}

fn read_auth_mode(value: Option<&Value>) -> Result<AuthMode, ControlError> {
    match value.map(Value::as_str) {
        None => Ok(AuthMode::User),
        Some(Some("user")) => Ok(AuthMode::User),
        Some(Some("bot")) => Ok(AuthMode::Bot),
        Some(_) => Err(bad("auth_mode must be 'user' or 'bot'")),
    }
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
    if expires > now.plus(MAX_LIFE) {
        return Err(bad("expires_at is more than ten years away"));
    }
    Ok(expires)
}

fn read_metadata(fields: &Map<String, Value>) -> Result<Map<String, Value>, ControlError> {
    match given(fields, "metadata") {
        None => Ok(Map::new()),
        Some(Value::Object(metadata)) => Ok(metadata.clone()),
        Some(_) => Err(bad("metadata must be a JSON object")),
    }
}

fn bad(message: &str) -> ControlError {
    ControlError::Bad(message.to_owned())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::json;

    use super::*;

    const NOW: UnixMillis = UnixMillis::new(1_790_000_000_000);

    fn read(body: &Value) -> Result<Registration, String> {
        read_registration(body.to_string().as_bytes(), NOW).map_err(|error| error.to_string())
    }

    fn seed() -> Value {
        json!({"container_ip": "172.18.0.5", "container_id": "abc", "repos": ["o/r"]})
    }

    fn with(field: &str, value: Value) -> Value {
        let mut body = seed();
        body[field] = value;
        body
    }

    #[test]
    fn the_first_shape_has_the_seeds_defaults() {
        let row = read(&seed()).unwrap();
        assert_eq!(row.id.as_str(), "abc");
        assert_eq!(row.ip, Some("172.18.0.5".parse().unwrap()));
        assert_eq!(row.repos[0].name.as_str(), "o/r");
        assert_eq!(row.auth_mode, AuthMode::User);
        assert_eq!(row.expires, NOW.plus(DEFAULT_LIFE));
    }

    #[test]
    fn the_later_shape_finds_its_repositories_in_metadata() {
        let row = read(&json!({
            "container_id": "abc", "ip_address": "::ffff:172.18.0.5", "ttl_seconds": 60,
            "metadata": {"repos": ["o/r"], "repo": "O/Other.git", "auth_mode": "bot", "n": 1.5}
        }))
        .unwrap();
        assert_eq!(row.ip, Some("172.18.0.5".parse().unwrap()));
        assert_eq!(row.expires, NOW.plus(Duration::from_secs(60)));
        let names: Vec<_> = row.repos.iter().map(|repo| repo.name.as_str()).collect();
        assert_eq!(names, ["o/r", "o/other"]);
        assert_eq!(row.auth_mode, AuthMode::Bot);
        assert_eq!(row.metadata["n"], json!(1.5));
    }

    #[test]
    fn a_repository_may_carry_its_own_push_limit() {
        let row = read(&with(
            "repos",
            json!([{"name": "o/r", "max_receive_pack_bytes": 524288000}]),
        ));
        assert_eq!(
            row.unwrap().repos[0].max_receive_pack_bytes,
            Some(MAX_RECEIVE_PACK_BYTES)
        );
    }

    #[test]
    fn every_wrong_field_is_named() {
        let cases = [
            (json!([]), "The request body must be a JSON object"),
            (
                json!({}),
                "Missing required fields: ['container_ip', 'container_id', 'repos']",
            ),
            (
                json!({"container_ip": "10.0.0.1", "container_id": null, "repos": []}),
                "Missing required fields: ['container_id']",
            ),
            (
                json!({"ip_address": "10.0.0.1"}),
                "Missing required fields: ['container_id']",
            ),
            (
                with("container_ip", json!("10.0.0")),
                "container_ip must be an IPv4 or IPv6 address",
            ),
            (
                with("container_ip", json!(7)),
                "container_ip must be an IPv4 or IPv6 address",
            ),
            (
                with("container_ip", json!("0.0.0.0")),
                "container_ip must be the address of one machine",
            ),
            (
                with("container_ip", json!("010.0.0.1")),
                "container_ip must be an IPv4 or IPv6 address",
            ),
            (
                with("repos", json!("o/r")),
                "repos must be a list of 'owner/name'",
            ),
            (
                with("repos", json!(["o\n/r"])),
                "Invalid repository 'o\\n/r': a repository is written owner/name",
            ),
            (
                with("auth_mode", json!("root")),
                "auth_mode must be 'user' or 'bot'",
            ),
            (
                with("expires_at", json!("tomorrow")),
                "expires_at must be a date with a time zone, like 2026-12-31T00:00:00Z",
            ),
            (
                with("expires_at", json!("2027-01-01T00:00:00")),
                "expires_at must be a date with a time zone, like 2026-12-31T00:00:00Z",
            ),
            (
                with("expires_at", json!("2001-01-01T00:00:00Z")),
                "expires_at is in the past",
            ),
            (
                with("expires_at", json!("9001-01-01T00:00:00Z")),
                "expires_at is more than ten years away",
            ),
            (
                with("metadata", json!([])),
                "metadata must be a JSON object",
            ),
        ];
        for (body, expected) in cases {
            assert_eq!(read(&body).unwrap_err(), expected, "{body}");
        }
        let unknown = read(&with("auth_mod", json!("bot"))).unwrap_err();
        assert!(
            unknown.starts_with("Unknown fields: ['auth_mod']; this shape takes"),
            "{unknown}"
        );
        let id = read(&with("container_id", json!("../etc"))).unwrap_err();
        assert!(id.starts_with("Invalid container_id: "), "{id}");
    }

    proptest! {
        #[test]
        fn a_hostile_string_changes_nothing_but_its_own_field(key in any::<String>(), text in any::<String>()) {
            let plain = read(&with("metadata", json!({}))).unwrap();
            let row = read(&with("metadata", json!({ (key.clone()): text.clone() }))).unwrap();
            prop_assert_eq!(row.metadata.get(&key), Some(&json!(text)));
            prop_assert_eq!(Registration { metadata: Map::new(), ..row }, plain);
        }

        #[test]
        fn arbitrary_bytes_never_panic_and_never_yield_a_dead_row(body in prop::collection::vec(any::<u8>(), 0..200)) {
            if let Ok(row) = read_registration(&body, NOW) {
                prop_assert!(row.is_live(NOW) && row.ip.is_some());
            }
        }
    }
}
