use proptest::prelude::*;
use serde_json::json;

use super::*;

const NOW: UnixMillis = UnixMillis::new(1_790_000_000_000);

fn request(body: &Value, unknown: UnknownFields) -> Result<RegisterRequest, String> {
    let body = body.to_string();
    let read = read_registration(body.as_bytes(), NOW, unknown);
    read.map_err(|error| error.to_string())
}

fn read(body: &Value) -> Result<Registration, String> {
    request(body, UnknownFields::Refuse).map(|request| request.row)
}

fn valid_body() -> Value {
    json!({"container_ip": "172.18.0.5", "container_id": "abc", "repos": ["o/r"]})
}

fn with(field: &str, value: Value) -> Value {
    let mut body = valid_body();
    body[field] = value;
    body
}

#[test]
fn first_format_applies_its_defaults() {
    let row = read(&valid_body()).unwrap();
    assert_eq!(row.id.as_str(), "abc");
    assert_eq!(row.ip, Some("172.18.0.5".parse().unwrap()));
    assert_eq!(row.repos[0].name.as_str(), "o/r");
    assert_eq!(row.auth_mode, AuthMode::User);
    assert_eq!(row.expires, NOW.plus(DEFAULT_LIFETIME));
}

#[test]
fn later_format_reads_repositories_from_metadata() {
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
fn repository_may_have_its_own_push_limit() {
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
fn error_names_every_invalid_field() {
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
        unknown.starts_with("Unknown fields: ['auth_mod']; the fields of this format are"),
        "{unknown}"
    );
    let id = read(&with("container_id", json!("../etc"))).unwrap_err();
    assert!(id.starts_with("Invalid container_id: "), "{id}");
}

#[test]
fn unknown_fields_are_ignored_with_one_bounded_warning() {
    let ignore = |body: &Value| request(body, UnknownFields::Ignore).unwrap();
    assert_eq!(ignore(&valid_body()).warnings, [""; 0]);
    let mut body = with("auth_mod", json!("bot"));
    body["ttl_seconds"] = json!(5);
    body["repos"] = json!([{"name": "o/r", "limit": 1}, {"name": "o/s", "limit": 2}]);
    let read = ignore(&body);
    let expected = "Ignored unknown fields: ['auth_mod', 'repos[].limit', 'ttl_seconds']";
    assert_eq!(read.warnings, [expected]);
    assert_eq!(read.row.auth_mode, AuthMode::User);
    assert_eq!(read.row.expires, NOW.plus(DEFAULT_LIFETIME));

    let mut many = valid_body();
    for number in 10..110 {
        many[format!("f{number}{}", "x\n".repeat(500))] = json!(1);
    }
    let warnings = ignore(&many).warnings;
    assert!(warnings[0].ends_with(" and 84 more"), "{warnings:?}");
    assert!(warnings[0].len() < 4096 && !warnings[0].contains('\n'));
}

#[test]
fn live_registration_is_replaced_only_on_request() {
    let replace = |body: &Value| request(body, UnknownFields::Refuse).map(|r| r.replace);
    assert_eq!(replace(&valid_body()), Ok(false));
    assert_eq!(replace(&with("replace", json!(null))), Ok(false));
    assert_eq!(replace(&with("replace", json!(true))), Ok(true));
    let later = json!({"container_id": "a", "ip_address": "10.0.0.1", "replace": true});
    assert_eq!(replace(&later), Ok(true));
    for wrong in [json!("true"), json!(1)] {
        let refused = replace(&with("replace", wrong));
        assert_eq!(refused.unwrap_err(), "replace must be true or false");
    }
}

proptest! {
    #[test]
    fn hostile_metadata_changes_only_its_own_field(key in any::<String>(), text in any::<String>()) {
        let plain = read(&with("metadata", json!({}))).unwrap();
        let row = read(&with("metadata", json!({ (key.clone()): text.clone() }))).unwrap();
        prop_assert_eq!(row.metadata.get(&key), Some(&json!(text)));
        prop_assert_eq!(Registration { metadata: Map::new(), ..row }, plain);
    }

    #[test]
    fn arbitrary_bytes_never_panic_nor_yield_expired_rows(body in prop::collection::vec(any::<u8>(), 0..200)) {
        if let Ok(request) = read_registration(&body, NOW, UnknownFields::Ignore) {
            prop_assert!(request.row.is_live(NOW) && request.row.ip.is_some());
        }
    }
}
