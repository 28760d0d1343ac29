//! The built-in rules for the GitHub API: `api.github.com` and `uploads.github.com`.
//!
//! ```text
//! request ─▶ method override? ─▶ host ─▶ POST /graphql ─▶ document, variables ─▶ fields
//!                                   └──▶ anything else ─▶ table of endpoints ──▶ body
//! ```
//!
//! A request that no rule allows is refused. A rule allows endpoints of the **registered**
//! repositories; some rules are enabled by default, the others by their name in
//! `egress.github.allow` ([`GithubRules::names`]). Where a field of the body determines what a
//! request does (closing, approving, GraphQL), the body is parsed strictly, and an ambiguous body
//! is refused.
//!
//! **Opaque ids.** A GraphQL mutation names its subject by a node id, from which the repository
//! cannot be determined. So all mutations are refused unless `graphql-mutations` is enabled, and
//! then only listed ones pass. Enabling it is safe with a token that has access to the registered
//! repositories only (an App's installation token); with an operator's own token the listed writes
//! work on every repository that the operator can write to. REST has the same writes with the
//! repository in the path.
//!
//! **Public reads** ([`GithubRules::is_anonymous`]) must be sent without a credential; otherwise
//! they could read everything that the operator can read.

mod body;
mod document;
mod fields;
mod graphql;
mod route;
mod table;

use crate::endpoint::Method;
use crate::host::Host;
use crate::path::CleanPath;
use crate::reason::Reason;
use crate::registration::{Repo, RepoName};
use crate::verdict::{Denial, RuleName};

use self::body::Body;
use self::route::{ApiPath, Readings};
use self::table::{Endpoint, Rule, rules};

/// The host of GitHub's API.
const API_HOST: &str = "api.github.com";
/// The host for uploads of release assets.
const UPLOADS_HOST: &str = "uploads.github.com";
/// The rule for anonymous reads of public repositories.
const READ_PUBLIC_RULE: &str = "github:read-public";

/// The GitHub rules, with those that the operator enabled.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GithubRules {
    /// For each of [`rules`], its full name and whether it is enabled.
    states: Vec<(RuleName, bool)>,
    /// The rule for anonymous reads of public repositories, if it is enabled.
    public_read_rule: Option<RuleName>,
}

/// An unknown rule name in `egress.github.allow`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnknownRule {
    /// The index in the list.
    pub index: usize,
    /// The name.
    pub name: String,
    /// The known rule with the most similar name.
    pub suggestion: Option<&'static str>,
}

impl std::fmt::Display for UnknownRule {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "unknown GitHub rule {:?}", self.name)?;
        match self.suggestion {
            Some(suggestion) => write!(f, "; did you mean '{suggestion}'?"),
            None => f.write_str("; see docs/config.md for the list of rules"),
        }
    }
}

impl std::error::Error for UnknownRule {}

/// A request to GitHub's API, normalised.
#[derive(Clone, Copy, Debug)]
pub struct GithubRequest<'a> {
    /// The method.
    pub method: &'a Method,
    /// The host.
    pub host: &'a Host,
    /// The path and query.
    pub path: &'a CleanPath,
    /// Whether the request has a header that overrides its method or path
    /// ([`crate::override_header`]).
    pub has_method_override: bool,
    /// The `Content-Type`, if there is one.
    pub content_type: Option<&'a str>,
    /// The whole body, with its content coding decoded, if
    /// [`wants_body`](GithubRules::wants_body) requires it.
    pub body: Option<&'a [u8]>,
    /// The repositories of the sandbox.
    pub repos: &'a [Repo],
}

/// The rules that are enabled by default.
impl Default for GithubRules {
    fn default() -> Self {
        Self::with_enabled(&[], false)
    }
}

impl GithubRules {
    /// The rules with those in `enabled` added, and with anonymous reads of other public
    /// repositories if `read_public` is set.
    pub fn new(enabled: &[String], read_public: bool) -> Result<Self, UnknownRule> {
        for (index, name) in enabled.iter().enumerate() {
            if !rules().any(|rule| rule.name == name) {
                return Err(UnknownRule {
                    index,
                    name: name.clone(),
                    suggestion: nearest(name),
                });
            }
        }
        Ok(Self::with_enabled(enabled, read_public))
    }

    fn with_enabled(enabled: &[String], read_public: bool) -> Self {
        let state = |rule: &Rule| {
            let is_enabled = rule.is_default || enabled.iter().any(|name| name == rule.name);
            (format!("github:{}", rule.name).into(), is_enabled)
        };
        Self {
            states: rules().map(state).collect(),
            public_read_rule: read_public.then(|| READ_PUBLIC_RULE.into()),
        }
    }

    /// Whether these rules apply to requests to `host`.
    pub fn applies_to_host(host: &Host) -> bool {
        let name = host.as_name().map(|name| name.as_str());
        matches!(name, Some(API_HOST | UPLOADS_HOST))
    }

    /// The name and description of every rule for `egress.github.allow`.
    pub fn names() -> impl Iterator<Item = (&'static str, &'static str)> {
        rules().map(|rule| (rule.name, rule.description))
    }

    /// Whether the rule `name` is enabled by default.
    pub fn is_default(name: &str) -> bool {
        rules().any(|rule| rule.name == name && rule.is_default)
    }

    /// Whether a request that `rule` allowed must be sent without a credential.
    pub fn is_anonymous(rule: &RuleName) -> bool {
        rule.as_str() == READ_PUBLIC_RULE
    }

    /// Whether `rule`, which allowed a request before, is still enabled.
    pub fn is_in_force(&self, rule: &RuleName) -> bool {
        let mut on = self.states.iter().filter(|(_, is_enabled)| *is_enabled);
        self.public_read_rule.as_ref() == Some(rule) || on.any(|(name, _)| name == rule)
    }

    /// Whether [`judge`](Self::judge) needs the body of such a request.
    pub fn wants_body(&self, method: &Method, path: &CleanPath) -> bool {
        if is_graphql(path) {
            return method.as_str() == "POST";
        }
        Readings::new(path, false).any(|api_path| {
            let found = self.find_endpoint(method, &api_path);
            found.is_some_and(|(_, endpoint)| endpoint.body != Body::Unread)
        })
    }

    /// Decides about a request, and returns the rule that allows it.
    pub fn judge(&self, request: &GithubRequest<'_>) -> Result<RuleName, Denial> {
        if request.has_method_override {
            return Err(refuse(
                "method-override",
                "Headers that override the method or path are not allowed. Send the request with \
                 that method and path, without the header.",
            ));
        }
        let is_upload = match request.host.as_name().map(|name| name.as_str()) {
            Some(API_HOST) => false,
            Some(UPLOADS_HOST) => true,
            _ => return Err(refuse("host", "This host is not a host of GitHub's API.")),
        };
        if is_graphql(request.path) && !is_upload {
            return self.judge_graphql(request);
        }
        self.judge_endpoint(request, is_upload)
    }

    fn judge_endpoint(
        &self,
        request: &GithubRequest<'_>,
        is_upload: bool,
    ) -> Result<RuleName, Denial> {
        let GithubRequest { method, path, .. } = *request;
        let mut allowed: Option<(usize, &'static Endpoint, bool)> = None;
        for api_path in Readings::new(path, is_upload) {
            let found = self.find_endpoint(method, &api_path);
            let Some((index, endpoint)) = found else {
                return Err(self.refuse_endpoint(request, is_upload));
            };
            let is_foreign = api_path.repository().is_some_and(|(owner, name)| {
                !request.repos.iter().any(|repo| is_named(repo, owner, name))
            });
            // All readings of the path must be the same endpoint of the same repository.
            if allowed.is_some_and(|(_, other, foreign)| {
                !std::ptr::eq(other, endpoint) || foreign != is_foreign
            }) {
                return Err(self.refuse_endpoint(request, is_upload));
            }
            allowed = Some((index, endpoint, is_foreign));
        }
        let Some((index, endpoint, is_foreign)) = allowed else {
            return Err(self.refuse_endpoint(request, is_upload));
        };
        let Some(rule) = rules().nth(index) else {
            return Err(self.refuse_endpoint(request, is_upload));
        };
        if is_foreign {
            return match &self.public_read_rule {
                Some(public) if rule.is_read => Ok(public.clone()),
                _ => Err(refuse_repository(request)),
            };
        }
        if !is_upload && !matches!(method.as_str(), "GET" | "HEAD") {
            body::check_encoding(request, rule)?;
        }
        endpoint
            .body
            .check(rule.name, request, |name| self.is_enabled(name))?;
        match self.states.get(index) {
            Some((name, _)) => Ok(name.clone()),
            None => Err(self.refuse_endpoint(request, is_upload)),
        }
    }

    fn judge_graphql(&self, request: &GithubRequest<'_>) -> Result<RuleName, Denial> {
        if request.method.as_str() != "POST" || request.path.target() != "/graphql" {
            let message = "GraphQL requests must be POST /graphql, without a query string.";
            return Err(refuse("graphql-read", message));
        }
        let rule = graphql::judge(request, |name| self.is_enabled(name))?;
        Ok(format!("github:{rule}").into())
    }

    /// The endpoint for `method` on `path` of the first enabled rule that has one, with the index
    /// of the rule.
    fn find_endpoint(
        &self,
        method: &Method,
        path: &ApiPath<'_>,
    ) -> Option<(usize, &'static Endpoint)> {
        let states = self.states.iter().map(|(_, is_enabled)| *is_enabled);
        let mut on = rules().zip(states).enumerate();
        on.find_map(|(index, (rule, is_enabled))| {
            let endpoint = is_enabled.then(|| rule.find(method, path)).flatten()?;
            Some((index, endpoint))
        })
    }

    fn is_enabled(&self, name: &str) -> bool {
        let mut states = rules().zip(&self.states);
        states.any(|(rule, (_, is_enabled))| rule.name == name && *is_enabled)
    }

    /// The refusal of a request, with the rule that would allow it, if there is one.
    fn refuse_endpoint(&self, request: &GithubRequest<'_>, is_upload: bool) -> Denial {
        let GithubRequest { method, path, .. } = *request;
        let mut foreign = false;
        for api_path in Readings::new(path, is_upload) {
            if api_path.is_repository_by_number() {
                return refuse(
                    "numeric-id",
                    "Repositories by number are not allowed. Use /repos/OWNER/NAME.",
                );
            }
            foreign |= api_path.repository().is_some_and(|(owner, name)| {
                !request.repos.iter().any(|repo| is_named(repo, owner, name))
            });
            let disabled = rules()
                .find(|rule| !self.is_enabled(rule.name) && rule.find(method, &api_path).is_some());
            if let Some(rule) = disabled.filter(|_| !foreign) {
                return refuse_disabled(rule, &format!("{method} {path}"));
            }
        }
        if foreign {
            return refuse_repository(request);
        }
        refuse(
            "default",
            format!(
                "{method} {path} is not an endpoint of the built-in GitHub rules. Use another \
                 endpoint, or leave it to the operator."
            ),
        )
    }
}

/// Whether `repo` is `owner/name`, without regard to case.
fn is_named(repo: &Repo, owner: &str, name: &str) -> bool {
    repo.name
        .as_str()
        .split_once('/')
        .is_some_and(|(own, its)| own.eq_ignore_ascii_case(owner) && its.eq_ignore_ascii_case(name))
}

/// Whether the server might treat the path as GraphQL, in any reading and any case.
fn is_graphql(path: &CleanPath) -> bool {
    Readings::new(path, false).any(|api_path| api_path.is_graphql())
}

fn refuse(rule: &str, message: impl Into<String>) -> Denial {
    Denial::new(Reason::GithubRule, format!("github:{rule}")).with_message(message)
}

fn refuse_repository(request: &GithubRequest<'_>) -> Denial {
    let GithubRequest { method, path, .. } = *request;
    refuse(
        "repository",
        format!(
            "{method} {path} is about a repository the sandbox was not registered for. Ask the \
             operator to register it."
        ),
    )
}

/// The refusal of a request that a disabled rule would allow.
fn refuse_disabled(rule: &Rule, what: &str) -> Denial {
    let name = rule.name;
    let leave = format!(
        "Leave it to the operator, who can add '{name}' to egress.github.allow if agents \
         should do it."
    );
    refuse(
        name,
        match rule.refusal_sentence {
            Some(sentence) => format!("{sentence}. {leave}"),
            None => format!("{what} is not allowed. {leave}"),
        },
    )
}

/// The refusal of `what`, which needs the rule `name`.
fn refuse_named(name: &str, what: &str) -> Denial {
    match rules().find(|rule| rule.name == name) {
        Some(rule) => refuse_disabled(rule, what),
        None => refuse(name, format!("{what} is not allowed.")),
    }
}

fn nearest(name: &str) -> Option<&'static str> {
    // The comparison takes quadratic time, and no rule has a name that long.
    if name.len() > 64 {
        return None;
    }
    let lower = name.to_lowercase();
    rules()
        .map(|rule| (strsim::damerau_levenshtein(&lower, rule.name), rule.name))
        .filter(|(distance, name)| *distance <= 1 + name.len() / 4)
        .min()
        .map(|(_, name)| name)
}

/// Fuzzing entry point: decides about a GraphQL request and an edit of an issue with this body.
/// Enabling more rules must not refuse what the default rules allow.
pub fn fuzz_check(bytes: &[u8]) {
    let enabled = ["graphql-mutations".to_owned(), "close".to_owned()];
    let default_rules = GithubRules::default();
    let (Ok(more_rules), Ok(host), Ok(name)) = (
        GithubRules::new(&enabled, false),
        Host::parse(API_HOST),
        RepoName::parse("acme/app"),
    ) else {
        return;
    };
    let repos = [Repo {
        name,
        max_receive_pack_bytes: None,
    }];
    for (method, target) in [("POST", "/graphql"), ("PATCH", "/repos/acme/app/issues/1")] {
        let (Ok(method), Ok(path)) = (Method::parse(method), CleanPath::parse(target)) else {
            return;
        };
        let request = GithubRequest {
            method: &method,
            host: &host,
            path: &path,
            has_method_override: false,
            content_type: Some("application/json"),
            body: Some(bytes),
            repos: &repos,
        };
        let allowed = default_rules.judge(&request).is_ok();
        assert!(!allowed || more_rules.judge(&request).is_ok(), "{target}");
    }
}

#[cfg(test)]
mod tests;
