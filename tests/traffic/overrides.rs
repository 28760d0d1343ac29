//! Headers that make a server treat a request as one of another method or path. They would
//! bypass rules about methods and paths, so they are refused where such rules apply.

use testkit::origin::{OriginReply, OriginServer};

use crate::traffic_fixture::{Agent, Rules, TrafficFixture, text};

/// Each header, and the reason of its refusal.
const HEADERS: [(&str, &str); 9] = [
    ("X-HTTP-Method-Override: DELETE", "method_denied"),
    ("X-HTTP-Method: DELETE", "method_denied"),
    ("X-Method-Override: DELETE", "method_denied"),
    ("X-Original-Method: DELETE", "method_denied"),
    ("X_HTTP_Method_Override: DELETE", "method_denied"),
    ("X-Original-URL: /admin", "path_denied"),
    ("X-Rewrite-URL: /admin", "path_denied"),
    ("X-Forwarded-Uri: /admin", "path_denied"),
    ("X-Forwarded-Prefix: /admin", "path_denied"),
];

fn with_hosts(check: impl FnOnce(&OriginServer, &Agent<'_>)) {
    let fixture = TrafficFixture::new();
    let hosts = [
        "methods.example",
        "paths.example",
        "denied.example",
        "below.wild.example",
        "open.example",
    ];
    let api = fixture.https(&hosts, |_| OriginReply::text("hello"));
    let mut rules = Rules::new()
        .allow("{host: methods.example, methods: [GET, POST]}")
        .allow("{host: paths.example, paths: [/v1/**]}")
        .allow("{host: denied.example, deny: [{methods: [DELETE]}]}")
        .allow("{host: \"*.wild.example\", deny: [{paths: [/admin]}]}")
        .allow("below.wild.example")
        .allow("open.example");
    for host in hosts {
        rules = rules.at(host, api.address());
    }
    fixture.write(&rules);
    check(&api, &fixture.create("fix"));
}

// Issue 14, number 5.
#[test]
fn override_headers_are_refused_where_rules_restrict_methods_or_paths() {
    with_hosts(|api, agent| {
        for host in [
            "methods.example",
            "paths.example",
            "denied.example",
            "below.wild.example",
        ] {
            let url = format!("https://{host}/v1/items");
            for (header, reason) in HEADERS {
                let got = agent.curl(&format!("-d x -H '{header}' {url}"));
                got.refused(403, reason);
                let body = got.json();
                assert_eq!(body["rule"], "override-header", "{header}: {body}");
                let name = header.split(':').next().unwrap();
                let name = name.to_ascii_lowercase().replace('_', "-");
                assert!(text(&body["error"]).contains(&name), "{header}: {body}");
            }
            assert_eq!(agent.curl(&format!("-d x {url}")).body, "hello", "{host}");
        }
        let all = api.requests();
        assert_eq!(
            all.len(),
            4,
            "only the requests without such a header: {all:?}"
        );
    });
}

// Issue 14, number 5.
#[test]
fn override_headers_pass_where_no_rule_restricts_methods_or_paths() {
    with_hosts(|api, agent| {
        for (header, _) in HEADERS {
            let got = agent.curl(&format!("-d x -H '{header}' https://open.example/v1/items"));
            assert_eq!(got.body, "hello", "{header}: {got:?}");
            let (name, value) = header.split_once(": ").unwrap();
            let request = api.requests().pop().unwrap();
            assert_eq!(request.header(name), Some(value));
        }
    });
}
