use std::path::Path;

use config::section::credentials::CredentialsSection;
use http::header::{AUTHORIZATION, USER_AGENT};
use policy::id::SandboxId;

use super::*;
use crate::service::CredentialService;
use crate::table::CredentialTable;

const SECRET: &str = "real/secret+1";

/// A row with its value and the placeholders of one sandbox.
struct Fixture {
    row: TableRow,
    value: Secret,
    placeholders: Vec<String>,
    others: Vec<String>,
}

impl Fixture {
    fn new(row: &str) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let section = format!(
            r#"{{"rows": [{{"name": "mine", "host": "a.example", "source": "env:A", {row}}}]}}"#
        );
        let section: CredentialsSection = serde_json::from_str(&section).unwrap();
        let table = CredentialTable::new(&section);
        let row = table.row("mine").unwrap().as_ref().clone();
        let service = open(directory.path());
        let of = |id| service.placeholders(&SandboxId::parse(id).unwrap(), &row);
        Self {
            placeholders: of("a"),
            others: of("b"),
            value: Secret::new(SECRET),
            row,
        }
    }

    fn credential(&self) -> RowCredential<'_> {
        RowCredential {
            row: &self.row,
            source: &self.row.uses[0],
            value: &self.value,
            placeholders: &self.placeholders,
        }
    }

    fn own(&self) -> &str {
        &self.placeholders[0]
    }

    fn check(&self, headers: &HeaderMap, target: &str) -> Result<(), MisplacedPlaceholder> {
        let finder = PlaceholderFinder::default();
        check_head(
            &finder,
            Some(&self.row),
            &self.placeholders,
            headers,
            target,
        )
    }

    /// The headers and the target after the credential was written.
    fn written(&self, headers: &HeaderMap, target: &str) -> (HeaderMap, String) {
        let credential = self.credential();
        let client = credential.find_in_head(headers, target);
        let mut headers = headers.clone();
        credential.write_headers(&mut headers, client);
        let query = credential.write_query(target);
        (
            headers,
            query.map_or(target.to_owned(), |new| new.to_string()),
        )
    }
}

fn open(directory: &Path) -> CredentialService {
    CredentialService::open(directory, Box::new(|_, _| ())).unwrap()
}

fn headers(lines: &[(HeaderName, &str)]) -> HeaderMap {
    let lines = lines.iter();
    let parsed = lines.map(|(name, value)| (name.clone(), HeaderValue::from_str(value).unwrap()));
    parsed.collect()
}

#[test]
fn header_is_written_in_each_scheme_and_marked_sensitive() {
    for (scheme, expected) in [
        ("Bearer", format!("Bearer {SECRET}")),
        ("raw", SECRET.to_owned()),
        (
            "Basic:user",
            format!("Basic {}", STANDARD.encode(format!("user:{SECRET}"))),
        ),
    ] {
        let fixture = Fixture::new(&format!(r#""scheme": "{scheme}""#));
        let (written, _) = fixture.written(&HeaderMap::new(), "/");
        assert_eq!(written[AUTHORIZATION], expected);
        assert!(written[AUTHORIZATION].is_sensitive());
    }
}

#[test]
fn headers_of_the_client_never_pass_beside_the_credential() {
    let fixture =
        Fixture::new(r#""header": "X-Key", "scheme": "raw", "extra_headers": {"X-Team": "blue"}"#);
    let x_key = HeaderName::from_static("x-key");
    let x_team = HeaderName::from_static("x-team");
    let sent = headers(&[
        (AUTHORIZATION, "Bearer other"),
        (x_key.clone(), "first"),
        (x_key.clone(), fixture.own()),
        (x_team.clone(), "red"),
        (USER_AGENT, "curl"),
    ]);
    let (written, _) = fixture.written(&sent, "/");
    let values: Vec<_> = written.get_all(&x_key).iter().collect();
    assert_eq!(values, [SECRET]);
    assert!(!written.contains_key(AUTHORIZATION));
    assert_eq!(
        (&written[x_team], &written[USER_AGENT]),
        (&"blue".parse().unwrap(), &"curl".parse().unwrap())
    );
}

#[test]
fn foreign_values_are_distinguished_from_the_own_placeholder() {
    let fixture = Fixture::new(r#""scheme": "Basic:user""#);
    let credential = fixture.credential();
    let own = STANDARD.encode(format!("user:{}", fixture.own()));
    for (value, is_foreign) in [
        (format!("Bearer {}", fixture.own()), false),
        (format!("Basic {own}"), false),
        ("Bearer sk-attacker".to_owned(), true),
        (format!("Bearer {}", fixture.others[0]), true),
    ] {
        let found = credential.find_in_head(&headers(&[(AUTHORIZATION, &value)]), "/");
        assert_eq!(
            (found.in_header, found.is_foreign),
            (true, is_foreign),
            "{value}"
        );
    }
    assert_eq!(
        credential.find_in_head(&HeaderMap::new(), "/"),
        ClientCredential::default()
    );
}

#[test]
fn query_and_cookie_of_the_row_carry_the_encoded_value() {
    let fixture = Fixture::new(r#""query": "key", "cookie": "sid""#);
    let own = fixture.own();
    let target = format!("/v1?a=1&key={own}&b=2");
    let sent = headers(&[(COOKIE, &format!("x=1; sid={own}; y=2"))]);
    assert_eq!(fixture.check(&sent, &target), Ok(()));
    let (written, target) = fixture.written(&sent, &target);
    assert_eq!(target, "/v1?a=1&key=real%2Fsecret%2B1&b=2");
    assert_eq!(written[COOKIE], format!("x=1; sid={SECRET}; y=2"));
    assert!(
        !written.contains_key(AUTHORIZATION),
        "the client sent none in a header"
    );
    let (written, target) = fixture.written(&HeaderMap::new(), "/v1?a=1");
    assert_eq!((target.as_str(), written.len()), ("/v1?a=1", 1));
}

#[test]
fn placeholder_outside_of_its_places_is_refused() {
    let fixture = Fixture::new(r#""query": "key""#);
    let own = fixture.own();
    let other = &fixture.others[0];
    let bearer = |value: &str| headers(&[(AUTHORIZATION, &format!("Bearer {value}"))]);
    assert_eq!(fixture.check(&bearer(own), "/"), Ok(()));
    let place =
        |headers: &HeaderMap, target: &str| fixture.check(headers, target).unwrap_err().place;
    assert_eq!(place(&bearer(other), "/"), "the header 'authorization'");
    assert_eq!(
        place(&bearer(&format!("{own} {other}")), "/"),
        "the header 'authorization'"
    );
    let basic = STANDARD.encode(format!("u:{other}"));
    let basic = headers(&[(AUTHORIZATION, &format!("Basic {basic}"))]);
    assert_eq!(place(&basic, "/"), "the header 'authorization'");
    assert_eq!(
        place(&headers(&[(USER_AGENT, own)]), "/"),
        "the header 'user-agent'"
    );
    let none = HeaderMap::new();
    assert_eq!(place(&none, &format!("/{own}")), "the path");
    assert_eq!(place(&none, &format!("/?other={own}")), "the query");
    assert_eq!(place(&none, &format!("/?key={other}")), "the query");
    let finder = PlaceholderFinder::default();
    let without_row = check_head(&finder, None, &[], &bearer(own), "/");
    assert!(without_row.is_err(), "no row of this host");
}

#[test]
fn json_and_form_fields_are_replaced_and_nothing_else() {
    let fixture = Fixture::new(r#""body_field": "api_key""#);
    let credential = fixture.credential();
    let own = fixture.own();
    let json = format!(r#"{{ "query":"x", "api_key" : "{own}", "n": 1.50 }}"#);
    let (written, found) = credential.write_fields(false, json.as_bytes()).unwrap();
    let expected = format!(r#"{{ "query":"x", "api_key" : "{SECRET}", "n": 1.50 }}"#);
    assert_eq!(String::from_utf8(written).unwrap(), expected);
    assert!(!found.is_foreign);
    let form = b"a=1&api_key=foreign&b=2";
    let (written, found) = credential.write_fields(true, form).unwrap();
    assert_eq!(written, b"a=1&api_key=real%2Fsecret%2B1&b=2");
    assert!(found.is_foreign);
    for (is_form, body) in [
        (false, "[]"),
        (false, "{}"),
        (false, "{"),
        (true, "a=1"),
        (true, ""),
    ] {
        assert_eq!(
            credential.write_fields(is_form, body.as_bytes()),
            None,
            "{body}"
        );
    }
}

#[test]
fn echoes_include_the_encodings_of_the_value() {
    let fixture = Fixture::new(r#""scheme": "Basic:user""#);
    let echoes = fixture.credential().echoes();
    let echoes: Vec<&[u8]> = echoes.iter().map(|text| text.as_slice()).collect();
    for text in [
        SECRET.to_owned(),
        STANDARD.encode(SECRET),
        STANDARD.encode(format!("user:{SECRET}")),
        "real%2Fsecret%2B1".to_owned(),
    ] {
        assert!(echoes.contains(&text.as_bytes()), "{text}");
    }
}
