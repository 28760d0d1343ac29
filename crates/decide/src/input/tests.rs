use http::HeaderValue;
use policy::clock::UnixMillis;
use policy::endpoint::Method;
use policy::host::Host;
use policy::id::SandboxId;
use policy::path::CleanPath;
use policy::registration::{AuthMode, Repo, RepoName};

use super::*;

fn target(path: &str) -> Target {
    Target {
        sandbox: SandboxId::parse("fix-1").unwrap(),
        method: Method::parse("POST").unwrap(),
        host: Host::parse("API.example").unwrap(),
        port: 8443,
        path: CleanPath::parse(path).unwrap(),
        program: None,
    }
}

#[test]
fn input_is_the_request_as_sent_without_secrets() {
    let mut headers = HeaderMap::new();
    for (name, value) in [
        ("accept", "text/html"),
        ("accept", "text/plain"),
        ("authorization", "Bearer hidden-1"),
        ("cookie", "session=hidden-2"),
        ("x-api-key", "hidden-3"),
        ("private-token", "hidden-4"),
        ("x-other", "shown"),
    ] {
        headers.append(name, HeaderValue::from_static(value));
    }
    headers.insert("x-bytes", HeaderValue::from_bytes(b"a\xffb").unwrap());
    let registration = Registration {
        id: SandboxId::parse("fix-1").unwrap(),
        ip: None,
        repos: vec![Repo {
            name: RepoName::parse("owner/name").unwrap(),
            max_receive_pack_bytes: None,
        }],
        auth_mode: AuthMode::Bot,
        credentials: Vec::new(),
        created: UnixMillis::new(0),
        expires: UnixMillis::new(1),
        metadata: Map::from_iter([("team".to_owned(), json!("red"))]),
    };
    let (target, rule) = (
        target("/a%20b//c/./d%2Fe?q=1"),
        RuleName::from("allowlist:x"),
    );
    let input =
        RequestInput::request(&target, &headers, true, Some(&registration), &rule).document();
    assert_eq!(
        input,
        json!({
            "kind": "http",
            "sandbox": "fix-1",
            "method": "POST",
            "scheme": "https",
            "host": "api.example",
            "port": 8443,
            "unread": false,
            "path": "/a b/c/d/e",
            "raw_path": "/a%20b/c/d%2Fe",
            "segments": ["a b", "c", "d/e"],
            "headers": {
                "accept": "text/html, text/plain",
                "authorization": "redacted",
                "cookie": "redacted",
                "x-api-key": "redacted",
                "private-token": "redacted",
                "x-other": "shown",
                "x-bytes": "a\u{fffd}b",
            },
            "program": null,
            "registration": {
                "repos": ["owner/name"],
                "auth_mode": "bot",
                "metadata": {"team": "red"},
            },
            "rule": "allowlist:x",
        })
    );
    assert!(!input.to_string().contains("hidden"));
}

#[test]
fn input_without_registration_has_the_same_fields() {
    let (target, rule) = (target("/"), RuleName::from("r"));
    let headers = HeaderMap::new();
    let request = RequestInput::request(&target, &headers, false, None, &rule);
    let input = request.document();
    assert_eq!(
        input["registration"],
        json!({"repos": [], "auth_mode": "user", "metadata": {}})
    );
    assert_eq!(input["scheme"], "http");
    let passthrough = RequestInput {
        request: None,
        ..request
    };
    let passthrough_input = passthrough.document();
    let fields = |value: &Value| {
        let fields = value.as_object().unwrap().iter();
        let kind = |value: &Value| std::mem::discriminant(value);
        let fields = fields.map(|(name, value)| (name.clone(), kind(value)));
        fields.collect::<Vec<_>>()
    };
    assert_eq!(
        fields(&passthrough_input),
        fields(&input),
        "both inputs have the same fields and types"
    );
    assert_eq!(passthrough_input["unread"], true);
    assert_eq!(
        (&passthrough_input["method"], &passthrough_input["path"]),
        (&json!("CONNECT"), &json!(""))
    );
}
