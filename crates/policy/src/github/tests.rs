mod endpoints;
mod gh;
mod graphql;
mod properties;

use super::*;
use crate::registration::RepoName;

const JSON: &str = "application/json";

fn repos() -> Vec<Repo> {
    ["acme/widget", "acme/tool.js"]
        .map(|name| Repo {
            name: RepoName::parse(name).unwrap(),
            max_receive_pack_bytes: None,
        })
        .into()
}

fn rules(enabled: &[&str]) -> GithubRules {
    let enabled: Vec<String> = enabled.iter().map(|name| (*name).to_owned()).collect();
    GithubRules::new(&enabled, false).unwrap()
}

/// One request; its body is passed to the rules only if they need it.
#[derive(Clone, Copy)]
struct Call<'a> {
    method: &'a str,
    host: &'a str,
    target: &'a str,
    content_type: Option<&'a str>,
    body: &'a str,
}

fn call<'a>(method: &'a str, target: &'a str, body: &'a str) -> Call<'a> {
    let writes = !matches!(method, "GET" | "HEAD");
    Call {
        method,
        host: "api.github.com",
        target,
        content_type: writes.then_some(JSON),
        body,
    }
}

impl Call<'_> {
    fn judge(self, rules: &GithubRules) -> Result<RuleName, Denial> {
        let method = Method::parse(self.method).unwrap();
        let path = CleanPath::parse(self.target).unwrap();
        let wanted = rules.wants_body(&method, &path);
        rules.judge(&GithubRequest {
            method: &method,
            host: &Host::parse(self.host).unwrap(),
            path: &path,
            has_method_override: false,
            content_type: self.content_type,
            body: wanted.then_some(self.body.as_bytes()),
            repos: &repos(),
        })
    }

    /// `+rule` if allowed or `-rule` if refused, without the common prefix.
    fn verdict(self, rules: &GithubRules) -> String {
        let (sign, rule) = match self.judge(rules) {
            Ok(rule) => ('+', rule),
            Err(denial) => {
                assert_eq!(denial.reason, Reason::GithubRule);
                assert!(denial.message.ends_with('.'), "{}", denial.message);
                ('-', denial.rule)
            }
        };
        let name = rule.as_str().strip_prefix("github:").unwrap();
        format!("{sign}{name}")
    }
}

#[test]
fn rules_apply_to_the_two_api_hosts_only() {
    for (host, speaks) in [
        ("api.github.com", true),
        ("API.GitHub.com.", true),
        ("uploads.github.com", true),
        ("github.com", false),
        ("api.github.com.example", false),
        ("x.api.github.com", false),
        ("192.0.2.1", false),
    ] {
        assert_eq!(
            GithubRules::applies_to_host(&Host::parse(host).unwrap()),
            speaks,
            "{host}"
        );
    }
    let mut stray = call("GET", "/repos/acme/widget", "");
    stray.host = "github.com";
    assert_eq!(stray.verdict(&rules(&[])), "-host");
}

#[test]
fn unknown_rule_name_is_rejected_with_suggestion() {
    let names = |list: &[&str]| -> Vec<String> { list.iter().map(|n| (*n).to_owned()).collect() };
    let error = GithubRules::new(&names(&["merge", "relases"]), false).unwrap_err();
    assert_eq!(
        (error.index, error.name.as_str(), error.suggestion),
        (1, "relases", Some("releases"))
    );
    assert_eq!(
        error.to_string(),
        "unknown GitHub rule \"relases\"; did you mean 'releases'?"
    );
    let error = GithubRules::new(&names(&["frobnicate"]), false).unwrap_err();
    assert_eq!(error.suggestion, None);
    // Only `git.read_public` enables this rule.
    assert!(GithubRules::new(&names(&["read-public"]), true).is_err());
    assert!(GithubRules::new(&names(&[&"x".repeat(100_000)]), true).is_err());
}

#[test]
fn rule_names_are_unique_slugs_with_descriptions() {
    let mut seen = std::collections::HashSet::new();
    for (name, opens) in GithubRules::names() {
        assert!(seen.insert(name), "{name} appears twice");
        assert!(name.bytes().all(|b| b.is_ascii_lowercase() || b == b'-'));
        assert!(!opens.is_empty() && !opens.ends_with('.'), "{name}");
    }
    assert!(GithubRules::is_default("read") && !GithubRules::is_default("merge"));
}

#[test]
fn request_with_method_override_is_refused() {
    let method = Method::parse("GET").unwrap();
    let path = CleanPath::parse("/repos/acme/widget").unwrap();
    let host = Host::parse("api.github.com").unwrap();
    let denial = rules(&[])
        .judge(&GithubRequest {
            method: &method,
            host: &host,
            path: &path,
            has_method_override: true,
            content_type: None,
            body: None,
            repos: &repos(),
        })
        .unwrap_err();
    assert_eq!(denial.rule.as_str(), "github:method-override");
}
