//! Programs without proxy support: allowed requests work, others get a reason.

use testkit::operator::Operator;
use testkit::origin::OriginReply;

use crate::traffic_fixture::{Agent, Rules, TrafficFixture, describe, text};

/// Runs `check` with origins for api.example (TLS), web.example (plain HTTP) and others.
fn with_agent(operator: Operator, check: impl FnOnce(&TrafficFixture, &Agent<'_>)) {
    let fixture = TrafficFixture::of(operator);
    let api = fixture.https(&["api.example", "*.wild.example"], |request| {
        OriginReply::text(format!("api {} {}", request.method, request.uri.path()))
    });
    let web = testkit::origin::OriginServer::http(|request| {
        OriginReply::text(format!("web {}", request.path()))
    });
    let rules = Rules::new()
        .allow("web.example")
        .allow("{host: api.example, methods: [GET, HEAD], paths: [/v1/**, /one/*], deny: [{paths: [/v1/secret/**]}]}")
        .allow("\"*.wild.example\"")
        .at("api.example:443", api.address())
        .at("a.wild.example:443", api.address())
        .at("web.example:80", web.address());
    fixture.write(&rules);
    let agent = fixture.create("fix");
    check(&fixture, &agent);
}

/// Runs `check` with a gate of the current user and, as root, with a gate of an unprivileged user.
fn every_operator(check: fn(&TrafficFixture, &Agent<'_>)) {
    with_agent(Operator::CurrentUser, check);
    if testkit::require_root("running as an unprivileged user") {
        with_agent(Operator::Unprivileged, check);
    }
}

#[test]
fn allowed_names_are_reached_without_proxy_settings() {
    every_operator(|_, agent| {
        for (url, body) in [
            ("http://web.example/hello", "web /hello"),
            ("https://api.example/v1/items", "api GET /v1/items"),
            ("https://a.wild.example/", "api GET /"),
        ] {
            let got = agent.curl(&format!("--noproxy '*' {url}"));
            assert_eq!((got.status, got.body.as_str()), (200, body), "{url}");
        }
    });
}

/// Issue 14, number 7: no listener captured a rule's own ports.
#[test]
fn ports_of_rules_are_captured_without_a_proxy() {
    let fixture = TrafficFixture::new();
    let odd = fixture.https(&["odd.example"], |_| OriginReply::text("odd"));
    let rules = Rules::new()
        .allow("{host: odd.example, ports: [8443]}")
        .allow("api.example")
        .at("odd.example", odd.address());
    fixture.write(&rules);
    let agent = fixture.create("fix");
    let got = agent.curl("--noproxy '*' https://odd.example:8443/");
    assert_eq!((got.status, got.body.as_str()), (200, "odd"));
    // A captured port is not automatically an allowed port.
    let got = agent.curl("--noproxy '*' https://api.example:8443/");
    got.refused(403, "port_denied");
}

#[test]
fn denied_request_can_be_explained_by_agent_and_operator() {
    every_operator(|fixture, agent| {
        for url in [
            "http://evil.example/x?secret=1",
            "https://evil.example/x?secret=1",
        ] {
            let got = agent.curl(&format!("--noproxy '*' -i '{url}'"));
            let head = got.body.to_ascii_lowercase();
            assert!(head.contains("x-palisade-blocked: true"), "{got:?}");
            let got = agent.curl(&format!("--noproxy '*' '{url}'"));
            let id = got.refused(403, "host_denied");
            for key in ["error", "rule", "hint"] {
                assert!(!text(&got.json()[key]).is_empty(), "{got:?}");
            }
            let why = fixture.json(&["why", &id]);
            assert_eq!(why["reason"], "host_denied", "{why}");
            assert_eq!(why["host"], "evil.example", "{why}");
            assert_eq!(why["sandbox"], agent.id.as_str(), "{why}");
            let explanation = agent.curl(&format!("http://palisade.internal/why/{id}"));
            assert_eq!(explanation.status, 200, "{explanation:?}");
            assert_eq!(explanation.json()["reason"], "host_denied");
            let record = fixture.record(&id);
            assert_eq!(
                (&record["verdict"], &record["host"], &record["status"]),
                (&"deny".into(), &"evil.example".into(), &403.into())
            );
            assert!(!record.to_string().contains("secret=1"), "{record}");
        }
    });
}

#[test]
fn refusal_of_another_sandbox_is_not_shown() {
    with_agent(Operator::CurrentUser, |fixture, agent| {
        let other = fixture.create("other");
        let id = agent
            .curl("http://evil.example/")
            .refused(403, "host_denied");
        let requested = format!("http://palisade.internal/why/{id}");
        assert_eq!(other.curl(&requested).status, 404);
        assert_eq!(agent.curl(&requested).status, 200);
        // After a restart the gate reads the record from the audit log, with the same restriction.
        fixture.record(&id);
        fixture.ok(&["gate", "restart"]);
        assert_eq!(other.curl(&requested).status, 404);
        assert_eq!(agent.curl(&requested).status, 200);
    });
}

#[test]
fn palisade_internal_lists_the_rules_and_nothing_else() {
    with_agent(Operator::CurrentUser, |_, agent| {
        let list = agent.curl("http://palisade.internal/allowlist").json();
        assert_eq!(list["sandbox"], agent.id.as_str());
        let hosts: Vec<_> = list["hosts"]
            .as_array()
            .unwrap()
            .iter()
            .map(|rule| text(&rule["host"]))
            .collect();
        assert!(hosts.contains(&"web.example".to_owned()), "{list}");
        assert!(hosts.contains(&"*.wild.example".to_owned()), "{list}");
        assert_eq!(agent.curl("https://palisade.internal/health").status, 200);
        // The operator's API is not reachable here: neither by name nor by address nor port.
        for host in ["palisade.internal", "192.0.0.1", "palisade.internal:8080"] {
            for path in [
                "/internal/metrics",
                "/internal/health",
                "/internal/containers",
                "/v1/health",
                "/v1/sandboxes",
                "/v1/config",
                "/v1/shutdown",
            ] {
                for method in ["GET", "POST"] {
                    let got = agent.curl(&format!("-X {method} http://{host}{path}"));
                    assert!((403..=405).contains(&got.status), "{host}{path}: {got:?}");
                }
            }
        }
    });
}

#[test]
fn policy_try_matches_the_actual_decisions() {
    with_agent(Operator::CurrentUser, |fixture, agent| {
        for (method, url) in [
            ("GET", "https://api.example/v1/items"),
            ("GET", "https://API.example./v1/items"),
            ("GET", "https://api.example/v1"),
            ("GET", "https://api.example/v1/"),
            ("GET", "https://api.example/v1/secret/x"),
            ("GET", "https://api.example/v1/%73ecret/x"),
            ("GET", "https://api.example/v1/a/../secret/x"),
            ("GET", "https://api.example/v1//secret/x"),
            ("GET", "https://api.example/other"),
            ("GET", "https://api.example/one/two"),
            ("GET", "https://api.example/one/two/three"),
            ("GET", "https://api.example/v1/%2573ecret/x"),
            ("POST", "https://api.example/v1/items"),
            ("DELETE", "https://api.example/v1/items"),
            ("GET", "http://web.example/anything"),
            ("POST", "http://web.example/anything"),
            ("GET", "http://web.example:8080/"),
            ("GET", "https://a.wild.example/"),
            ("GET", "https://wild.example/"),
            ("GET", "https://api.example.evil.example/v1/items"),
            ("GET", "https://notapi.example/v1/items"),
            ("GET", "http://192.0.2.1/"),
            ("GET", "http://0x7f.1/"),
            ("GET", "http://[::1]/"),
        ] {
            let trial = fixture.run(&["policy", "try", "--method", method, url, "--json"]);
            let report: serde_json::Value = serde_json::from_slice(&trial.stdout)
                .unwrap_or_else(|error| panic!("{url}: {error}: {}", describe(&trial)));
            let body = if method == "POST" { "-d x" } else { "" };
            let got = agent.curl(&format!(
                "-g --path-as-is -X {method} {body} --noproxy '' -x http://192.0.0.1:8080 '{url}'"
            ));
            if trial.status.code() == Some(0) {
                assert_eq!(got.status, 200, "{method} {url}: {report} {got:?}");
            } else {
                assert_eq!(trial.status.code(), Some(7), "{url}: {}", describe(&trial));
                let reason = &got.json()["reason"];
                assert_eq!(
                    *reason, report["reason"],
                    "{method} {url}: {report} {got:?}"
                );
                assert_eq!(
                    got.json()["rule"],
                    report["rule"],
                    "{method} {url}: {report} {got:?}"
                );
            }
        }
    });
}
