//! Verdicts of REST requests.

use super::*;

/// Verdict, method, path and body, with the default rules.
const TABLE: &str = include_str!("endpoints.txt");

fn table() -> impl Iterator<Item = (&'static str, &'static str, &'static str, &'static str)> {
    let rows = TABLE.lines().filter(|row| !row.starts_with('#'));
    rows.map(|row| {
        let (expected, rest) = row.split_once(' ').unwrap();
        let (method, rest) = rest.trim_start().split_once(' ').unwrap();
        let rest = rest.trim_start();
        let (target, body) = rest.split_once(' ').unwrap_or((rest, ""));
        (method, target, body, expected)
    })
}

#[test]
fn endpoint_has_expected_verdict_and_rule() {
    let rules = rules(&[]);
    assert!(table().count() > 150, "{}", table().count());
    for (method, target, body, expected) in table() {
        let verdict = match CleanPath::parse(target) {
            Ok(_) => call(method, target, body).verdict(&rules),
            Err(_) => "refused".to_owned(),
        };
        assert_eq!(verdict, expected, "{method} {target} {body}");
    }
}

#[test]
fn enabled_rule_allows_only_its_endpoints_on_registered_repositories() {
    for (method, target, body, expected) in table() {
        let Some(rule) = expected.strip_prefix('-') else {
            continue;
        };
        let is_switch = GithubRules::names().any(|(name, _)| name == rule);
        if !is_switch || GithubRules::is_default(rule) || target.contains([';', '%']) {
            continue;
        }
        let opened = rules(&[rule]);
        let verdict = call(method, target, body).verdict(&opened);
        // Some rows are refused for a second reason, which no rule changes.
        let has_other_fault = ["comment\"", "[\"COMMENT", "{\"body\":\"b\"}"]
            .iter()
            .any(|mark| body.contains(mark));
        if has_other_fault {
            assert!(verdict.starts_with('-'), "{method} {target} {body}");
        } else {
            assert!(
                verdict.starts_with('+'),
                "{method} {target} {body} {verdict}"
            );
        }
        let elsewhere = target.replace("/acme/widget", "/acme/other");
        if elsewhere != target {
            let verdict = call(method, &elsewhere, body).verdict(&opened);
            assert_eq!(verdict, "-repository", "{method} {elsewhere}");
        }
        for (method, target, body, expected) in table() {
            let verdict = call_if_clean(method, target, body, &opened);
            if expected[1..] != *rule {
                let still = verdict.is_none_or(|v| v.starts_with(&expected[..1]));
                assert!(still, "{rule} changed {method} {target} {body}");
            }
        }
    }
}

fn call_if_clean(method: &str, target: &str, body: &str, rules: &GithubRules) -> Option<String> {
    CleanPath::parse(target).ok()?;
    Some(call(method, target, body).verdict(rules))
}

#[test]
fn public_read_is_anonymous_and_limited_to_reads() {
    let public = GithubRules::new(&[], true).unwrap();
    for (method, target, expected) in [
        ("GET", "/repos/other/thing", "+read-public"),
        ("HEAD", "/repos/other/thing/contents/a", "+read-public"),
        ("GET", "/repos/acme/widget", "+read"),
        ("GET", "/repos/other/thing/hooks", "-repository"),
        ("GET", "/repos/other/thing/forks", "-repository"),
        ("POST", "/repos/other/thing/issues", "-repository"),
        ("GET", "/repos/other%2Fthing/x", "-repository"),
        ("GET", "/repos/other/thing;x/pulls", "+read-public"),
        ("GET", "/repos/acme/widget;x/pulls", "-repository"),
        ("GET", "/repositories/1", "-numeric-id"),
        ("GET", "/users/other", "-default"),
    ] {
        let verdict = call(method, target, "{}").judge(&public);
        let rule = match &verdict {
            Ok(rule) => {
                let is_anonymous = expected == "+read-public";
                assert_eq!(GithubRules::is_anonymous(rule), is_anonymous, "{target}");
                format!("+{rule}")
            }
            Err(denial) => format!("-{}", denial.rule),
        };
        assert_eq!(rule.replace("github:", ""), expected, "{method} {target}");
    }
}

#[test]
fn upload_host_allows_release_assets_with_rule_only() {
    let upload = |target| Call {
        host: "uploads.github.com",
        content_type: Some("application/zip"),
        ..call("POST", target, "PK")
    };
    let asset = "/repos/acme/widget/releases/1/assets?name=a.zip";
    assert_eq!(upload(asset).verdict(&rules(&[])), "-releases");
    let open = rules(&["releases"]);
    assert_eq!(upload(asset).verdict(&open), "+releases");
    for (target, expected) in [
        ("/repos/acme/other/releases/1/assets?name=a", "-repository"),
        ("/repos/acme/widget/releases", "-default"),
        ("/repos/acme/widget/pulls", "-default"),
        ("/graphql", "-default"),
        ("/meta", "-default"),
        ("/", "-default"),
    ] {
        assert_eq!(upload(target).verdict(&open), expected, "{target}");
        let get = Call {
            method: "GET",
            ..upload(target)
        };
        assert!(get.verdict(&open).starts_with('-'), "{target}");
    }
}

#[test]
fn write_with_content_type_other_than_json_is_refused() {
    let rules = rules(&[]);
    let edit = call(
        "PATCH",
        "/repos/acme/widget/pulls/1",
        r#"{"title":"a&state=closed&b=c"}"#,
    );
    assert_eq!(edit.verdict(&rules), "+pull-requests");
    for (content_type, is_fine) in [
        (Some("application/json; charset=utf-8"), true),
        (Some("Application/JSON;charset=\"UTF-8\""), true),
        (Some("application/vnd.github+json"), true),
        (Some("application/x-www-form-urlencoded"), false),
        (Some("multipart/form-data; boundary=x"), false),
        (Some("application/json; charset=utf-16"), false),
        (Some("application/json, text/plain"), false),
        (Some("text/plain"), false),
        (Some(""), false),
        (None, false),
    ] {
        let edit = Call {
            content_type,
            ..edit
        };
        assert_eq!(edit.judge(&rules).is_ok(), is_fine, "{content_type:?}");
        let comment = Call {
            content_type,
            ..call("POST", "/repos/acme/widget/issues/1/comments", "{}")
        };
        assert_eq!(comment.judge(&rules).is_ok(), is_fine, "{content_type:?}");
    }
}

#[test]
fn required_body_that_is_missing_or_too_deep_is_refused() {
    let rules = rules(&[]);
    let deep = |levels: usize| {
        let (open, close) = ("[".repeat(levels), "]".repeat(levels));
        format!(r#"{{"title":{open}{close}}}"#)
    };
    let edit = "/repos/acme/widget/pulls/1";
    let shallow = deep(31);
    assert_eq!(
        call("PATCH", edit, &shallow).verdict(&rules),
        "+pull-requests"
    );
    for levels in [32, 33, 200, 100_000] {
        let body = deep(levels);
        assert_eq!(call("PATCH", edit, &body).verdict(&rules), "-pull-requests");
    }
    for body in ["{} {\"state\":\"closed\"}", "\u{feff}{}"] {
        assert_eq!(call("PATCH", edit, body).verdict(&rules), "-pull-requests");
    }
    let (method, path) = (
        Method::parse("PATCH").unwrap(),
        CleanPath::parse(edit).unwrap(),
    );
    assert!(rules.wants_body(&method, &path));
    let denial = rules
        .judge(&GithubRequest {
            method: &method,
            host: &Host::parse("api.github.com").unwrap(),
            path: &path,
            has_method_override: false,
            content_type: Some(JSON),
            body: None,
            repos: &repos(),
        })
        .unwrap_err();
    assert_eq!(denial.rule.as_str(), "github:pull-requests");
    assert!(denial.message.contains("missing"), "{}", denial.message);
}

#[test]
fn body_is_required_only_where_it_decides() {
    let rules = rules(&[]);
    for (method, target, wanted) in [
        ("POST", "/graphql", true),
        ("GET", "/graphql", false),
        ("POST", "/repos/a/b/pulls", true),
        ("PATCH", "/repos/a/b/issues/1", true),
        ("POST", "/repos/a/b/pulls/1/reviews", true),
        ("POST", "/repos/a/b/issues/1/comments", false),
        ("GET", "/repos/a/b/pulls", false),
        ("POST", "/repos/a/b/releases", false),
    ] {
        let method = Method::parse(method).unwrap();
        let path = CleanPath::parse(target).unwrap();
        assert_eq!(
            rules.wants_body(&method, &path),
            wanted,
            "{method} {target}"
        );
    }
}

#[test]
fn refusal_message_names_the_next_step() {
    let rules = rules(&[]);
    let message = |method, target, body| {
        let call = call(method, target, body);
        call.judge(&rules).unwrap_err().message
    };
    assert_eq!(
        message("PUT", "/repos/acme/widget/pulls/1/merge", "{}"),
        "PR merge blocked - use GitHub UI. Leave it to the operator, who can add 'merge' to \
         egress.github.allow if agents should do it."
    );
    assert!(
        message("POST", "/repos/acme/widget/releases", "{}")
            .starts_with("Release creation blocked. Leave it to the operator")
    );
    assert_eq!(
        message("GET", "/repos/acme/other?token=x", ""),
        "GET /repos/acme/other is about a repository the sandbox was not registered for. Ask \
         the operator to register it."
    );
    assert_eq!(
        message(
            "PATCH",
            "/repos/acme/widget/issues/1",
            r#"{"state":"closed"}"#
        ),
        "The field 'state' is not allowed. Leave it to the operator, who can add 'close' to \
         egress.github.allow if agents should do it."
    );
}
