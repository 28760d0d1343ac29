//! The rules for GitHub's API, tested from inside a sandbox.

use std::io::Write;
use std::time::Duration;

use testkit::http;
use testkit::inside::{self, NetNamespace};
use testkit::origin::{Latch, OriginReply, OriginServer};

use crate::traffic_fixture::{Rules, TrafficFixture, exchange, may_enter, refusal};

/// Time in which the gate must close a connection.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(20);

/// Runs `check` with a sandbox that is registered for acme/app.
fn with_github(
    rules: impl FnOnce(Rules) -> Rules,
    answer: impl Fn() -> OriginReply + Send + Sync + 'static,
    check: impl FnOnce(&Rules, &OriginServer, &TrafficFixture, &NetNamespace),
) {
    if !may_enter() {
        return;
    }
    let fixture = TrafficFixture::new();
    let api = fixture.https(&["api.github.com"], move |_| answer());
    let plain = Rules::new()
        .allow("api.github.com")
        .at("api.github.com", api.address());
    fixture.write(&rules(plain.clone()));
    let sandbox = fixture.json(&["create", "fix", "--no-repo", "--repo", "acme/app"]);
    let namespace = NetNamespace::of_sandbox(&fixture.gate_dir, sandbox["id"].as_str().unwrap());
    check(&plain, &api, &fixture, &namespace);
}

/// A request with this first line, these headers and this body.
fn request_text(line: &str, headers: &[&str], body: &str) -> String {
    let lines: String = headers
        .iter()
        .map(|header| format!("{header}\r\n"))
        .collect();
    let length = body.len();
    format!(
        "{line} HTTP/1.1\r\nHost: api.github.com\r\n{lines}Content-Length: {length}\r\n\r\n{body}"
    )
}

fn connect(namespace: &NetNamespace) -> inside::Tls<std::net::TcpStream> {
    inside::tls(namespace.port(443), Some("api.github.com"), &["http/1.1"])
}

const JSON: &str = "Content-Type: application/json";

#[test]
fn seed_003_line_04_pull_request_merge_is_refused() {
    with_github(
        |rules| rules,
        || OriginReply::text("{}"),
        |_, api, fixture, namespace| {
            let merge = "PUT /repos/acme/app/pulls/123/merge";
            let answer = exchange(connect(namespace), request_text(merge, &[JSON], "{}"));
            let id = refusal(&answer, 403, "github_rule");
            let error = answer.json()["error"].to_string();
            assert!(
                error.contains("PR merge blocked - use GitHub UI"),
                "{error}"
            );
            assert_eq!(fixture.record(&id)["reason"], "github_rule");
            // Other requests with the same effect are refused too.
            for (line, body) in [
                ("PUT /repos/acme/app/pulls/123/merge/", "{}"),
                ("PUT /repos/acme/app//pulls/123/%6derge", "{}"),
                (
                    "POST /repos/acme/app/merges",
                    "{\"base\":\"main\",\"head\":\"x\"}",
                ),
                (
                    "POST /graphql",
                    "{\"query\":\"mutation { mergePullRequest(input: {pullRequestId: \\\"x\\\"}) { clientMutationId } }\"}",
                ),
            ] {
                let answer = exchange(connect(namespace), request_text(line, &[JSON], body));
                refusal(&answer, 403, "github_rule");
            }
            assert!(api.requests().is_empty(), "{:?}", api.requests());
            // Requests that do not merge pass.
            let comment = "POST /repos/acme/app/issues/1/comments";
            let answer = exchange(
                connect(namespace),
                request_text(comment, &[JSON], "{\"body\":\"hi\"}"),
            );
            assert_eq!(answer.status, 200, "{}", answer.text());
        },
    );
}

// Issue 15, number 16.
#[test]
fn seed_003_blocked_api_pattern_is_refused() {
    let policy = "policy:\n  blocked_api_patterns:\n    GET: ['^/repos/[^/]+/[^/]+/pulls$']\n";
    with_github(
        |rules| rules.policy(policy),
        || OriginReply::text("{}"),
        |_, api, fixture, namespace| {
            // The rules for GitHub allow reading a registered repository.
            let read = |path: &str| {
                exchange(
                    connect(namespace),
                    request_text(&format!("GET {path}"), &[], ""),
                )
            };
            assert_eq!(read("/repos/acme/app/issues").status, 200);
            for path in [
                "/repos/acme/app/pulls",
                "/repos/acme/app/pulls/",
                "/repos/acme/app/%70ulls",
                "/repos/acme/app/pulls?state=open",
            ] {
                let answer = read(path);
                let id = refusal(&answer, 403, "github_rule");
                let rule = "policy.yaml:blocked_api_patterns";
                assert_eq!(answer.json()["rule"], rule, "{path}");
                assert_eq!(fixture.record(&id)["rule"], rule, "{path}");
            }
            assert_eq!(api.requests().len(), 1, "{:?}", api.requests());
        },
    );
}

#[test]
fn request_with_two_content_types_is_refused() {
    with_github(
        |rules| rules,
        || OriginReply::text("{}"),
        |_, api, _, namespace| {
            let line = "POST /repos/acme/app/issues";
            let body = "{\"title\":\"a\"}";
            let form = "Content-Type: application/x-www-form-urlencoded";
            let strange = "Content-Type: application/json\u{e9}";
            for headers in [&[JSON, form][..], &[form, JSON], &[JSON, JSON], &[strange]] {
                let answer = exchange(connect(namespace), request_text(line, headers, body));
                refusal(&answer, 403, "github_rule");
                assert_eq!(answer.json()["rule"], "github:content-type", "{headers:?}");
            }
            assert!(api.requests().is_empty(), "{:?}", api.requests());
            let answer = exchange(connect(namespace), request_text(line, &[JSON], body));
            assert_eq!(answer.status, 200, "{}", answer.text());
        },
    );
}

#[test]
fn requests_end_when_their_github_rule_is_switched_off() {
    let latch = Latch::new();
    let held = latch.clone();
    with_github(
        |rules| rules.egress("github: {allow: [read-user]}"),
        move || OriginReply::text("begun").body_held_until(&held),
        |without, _, fixture, namespace| {
            let open = |path: &str| {
                let mut tls = connect(namespace);
                write!(tls, "GET {path} HTTP/1.1\r\nHost: api.github.com\r\n\r\n").unwrap();
                tls.flush().unwrap();
                let head = http::read_head(&mut tls).unwrap();
                assert_eq!(head.status, 200, "{head:?}");
                assert_eq!(http::read_chunk(&mut tls).unwrap().unwrap(), b"begun");
                tls
            };
            let mut revoked = open("/user");
            let mut own = open("/repos/acme/app");
            fixture.reload(without);
            assert!(inside::closes_within(&mut revoked, CLOSE_TIMEOUT));
            let answer = exchange(connect(namespace), request_text("GET /user", &[], ""));
            refusal(&answer, 403, "github_rule");
            latch.open();
            assert_eq!(
                http::read_chunk(&mut own).unwrap(),
                None,
                "this request must not end early"
            );
        },
    );
}
