//! The rules for GitHub's API, tested from inside a sandbox.

use std::io::Write;
use std::time::Duration;

use testkit::http;
use testkit::inside::{self, NetNamespace};
use testkit::origin::{Latch, OriginReply, OriginServer};

use crate::traffic_fixture::{Rules, TrafficFixture, exchange, may_enter, refusal};

const CLOSE_TIMEOUT: Duration = Duration::from_secs(20);

/// A sandbox that is registered for acme/app.
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
    let made = fixture.json(&["create", "fix", "--no-repo", "--repo", "acme/app"]);
    let inside = NetNamespace::of(&fixture.gate_dir, made["id"].as_str().unwrap());
    check(&plain, &api, &fixture, &inside);
}

/// A request with that first line, these headers and this body.
fn request_text(line: &str, headers: &[&str], body: &str) -> String {
    let lines: String = headers.iter().map(|one| format!("{one}\r\n")).collect();
    let length = body.len();
    format!(
        "{line} HTTP/1.1\r\nHost: api.github.com\r\n{lines}Content-Length: {length}\r\n\r\n{body}"
    )
}

fn connect(inside: &NetNamespace) -> inside::Tls<std::net::TcpStream> {
    inside::tls(inside.port(443), Some("api.github.com"), &["http/1.1"])
}

const JSON: &str = "Content-Type: application/json";

#[test]
fn seed_003_line_04_pull_request_merge_is_refused() {
    with_github(
        |rules| rules,
        || OriginReply::text("{}"),
        |_, api, fixture, inside| {
            let merge = "PUT /repos/acme/app/pulls/123/merge";
            let answer = exchange(connect(inside), request_text(merge, &[JSON], "{}"));
            let id = refusal(&answer, 403, "github_rule");
            let error = answer.json()["error"].to_string();
            assert!(
                error.contains("PR merge blocked - use GitHub UI"),
                "{error}"
            );
            assert_eq!(fixture.record(&id)["reason"], "github_rule");
            // By other routes with the same effect.
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
                let answer = exchange(connect(inside), request_text(line, &[JSON], body));
                refusal(&answer, 403, "github_rule");
            }
            assert!(api.requests().is_empty(), "{:?}", api.requests());
            // Requests that do not merge pass.
            let comment = "POST /repos/acme/app/issues/1/comments";
            let answer = exchange(
                connect(inside),
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
        |_, api, fixture, inside| {
            // The rules for GitHub allow both: they read a registered repository.
            let read = |path: &str| {
                exchange(
                    connect(inside),
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
        |_, api, _, inside| {
            let line = "POST /repos/acme/app/issues";
            let body = "{\"title\":\"a\"}";
            let form = "Content-Type: application/x-www-form-urlencoded";
            let strange = "Content-Type: application/json\u{e9}";
            for headers in [&[JSON, form][..], &[form, JSON], &[JSON, JSON], &[strange]] {
                let answer = exchange(connect(inside), request_text(line, headers, body));
                refusal(&answer, 403, "github_rule");
                assert_eq!(answer.json()["rule"], "github:content-type", "{headers:?}");
            }
            assert!(api.requests().is_empty(), "{:?}", api.requests());
            let answer = exchange(connect(inside), request_text(line, &[JSON], body));
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
        move || OriginReply::text("begun").paused(&held),
        |without, _, fixture, inside| {
            let open = |path: &str| {
                let mut tls = connect(inside);
                write!(tls, "GET {path} HTTP/1.1\r\nHost: api.github.com\r\n\r\n").unwrap();
                tls.flush().unwrap();
                let head = http::read_head(&mut tls).unwrap();
                assert_eq!(head.status, 200, "{head:?}");
                assert_eq!(http::read_chunk(&mut tls).unwrap().unwrap(), b"begun");
                tls
            };
            let mut switched = open("/user");
            let mut own = open("/repos/acme/app");
            fixture.reload(without);
            assert!(inside::ends(&mut switched, CLOSE_TIMEOUT));
            let answer = exchange(connect(inside), request_text("GET /user", &[], ""));
            refusal(&answer, 403, "github_rule");
            latch.open();
            assert_eq!(http::read_chunk(&mut own).unwrap(), None, "it was cut too");
        },
    );
}
