//! The built-in rules for the GitHub API: `api.github.com` and `uploads.github.com`.
//!
//! ```text
//! request ─▶ method override? ─▶ host ─▶ POST /graphql ─▶ document, variables ─▶ fields
//!                                   └──▶ anything else ─▶ table of endpoints ──▶ body
//! ```
//!
//! What no rule opens is refused. A rule opens endpoints of the **registered** repositories;
//! some are on from the start, the others wait for their name in `egress.github.allow`
//! ([`GithubRules::names`]). Where a field of the body decides what a request does (closing,
//! approving, GraphQL), the body is read, strictly, and a body that cannot be read in one
//! way by everybody is refused.
//!
//! **Opaque ids.** A GraphQL mutation names its subject by a node id, which says nothing
//! that could be checked about the repository it is in. So mutations are refused as a whole
//! until `graphql-mutations` is switched on, and then only listed ones pass. That switch is
//! safe with a token that reaches the registered repositories alone (an App's installation
//! token); with an operator's own token it lets the listed writes reach all they can.
//! REST does the same writes with the repository in the path.
//!
//! **Public reads** ([`GithubRules::is_anonymous`]) must go out without a credential: with
//! one they would be reads of everything the operator may read.

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
use self::route::{Place, Readings};
use self::table::{Endpoint, Rule, rules};

const API: &str = "api.github.com";
const UPLOADS: &str = "uploads.github.com";
const READ_PUBLIC: &str = "github:read-public";

/// The rules, with what an operator switched on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GithubRules {
    /// For each of [`rules`], its full name and whether it is on.
    states: Vec<(RuleName, bool)>,
    public: Option<RuleName>,
}

/// A name in `egress.github.allow` that no rule has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnknownRule {
    /// Its place in the list.
    pub index: usize,
    /// The name.
    pub name: String,
    /// The rule that was probably meant.
    pub near: Option<&'static str>,
}

impl std::fmt::Display for UnknownRule {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "no GitHub rule is called {:?}", self.name)?;
        match self.near {
            Some(near) => write!(f, "; did you mean '{near}'?"),
            None => f.write_str("; docs/config.md lists their names"),
        }
    }
}

impl std::error::Error for UnknownRule {}

/// What is asked of GitHub, normalised.
#[derive(Clone, Copy, Debug)]
pub struct GithubRequest<'a> {
    /// The method.
    pub method: &'a Method,
    /// The host.
    pub host: &'a Host,
    /// The path and query.
    pub path: &'a CleanPath,
    /// Whether a header wants the request to be taken for one of another method or path
    /// ([`crate::override_header`]).
    pub has_method_override: bool,
    /// The `Content-Type`, where there is one.
    pub content_type: Option<&'a str>,
    /// The whole body, with any content coding undone, where
    /// [`wants_body`](GithubRules::wants_body) asked for it.
    pub body: Option<&'a [u8]>,
    /// The repositories of the sandbox.
    pub repos: &'a [Repo],
}

/// Nothing switched on.
impl Default for GithubRules {
    fn default() -> Self {
        Self::with(&[], false)
    }
}

impl GithubRules {
    /// The rules with those named in `switched` on, and anonymous reads of other public
    /// repositories where `read_public` says so.
    pub fn new(switched: &[String], read_public: bool) -> Result<Self, UnknownRule> {
        for (index, name) in switched.iter().enumerate() {
            if !rules().any(|rule| rule.name == name) {
                return Err(UnknownRule {
                    index,
                    name: name.clone(),
                    near: nearest(name),
                });
            }
        }
        Ok(Self::with(switched, read_public))
    }

    fn with(switched: &[String], read_public: bool) -> Self {
        let state = |rule: &Rule| {
            let is_on = rule.is_default || switched.iter().any(|name| name == rule.name);
            (format!("github:{}", rule.name).into(), is_on)
        };
        Self {
            states: rules().map(state).collect(),
            public: read_public.then(|| READ_PUBLIC.into()),
        }
    }

    /// Whether requests to `host` are judged here.
    pub fn speaks_for(host: &Host) -> bool {
        let name = host.as_name().map(|name| name.as_str());
        matches!(name, Some(API | UPLOADS))
    }

    /// Every rule that can be named in `egress.github.allow`, and what it opens.
    pub fn names() -> impl Iterator<Item = (&'static str, &'static str)> {
        rules().map(|rule| (rule.name, rule.opens))
    }

    /// Whether the rule called `name` is on without being switched.
    pub fn is_default(name: &str) -> bool {
        rules().any(|rule| rule.name == name && rule.is_default)
    }

    /// Whether what `rule` allowed must be sent without a credential.
    pub fn is_anonymous(rule: &RuleName) -> bool {
        rule.as_str() == READ_PUBLIC
    }

    /// Whether `rule`, which allowed something once, is there still.
    pub fn is_in_force(&self, rule: &RuleName) -> bool {
        let mut on = self.states.iter().filter(|(_, is_on)| *is_on);
        self.public.as_ref() == Some(rule) || on.any(|(name, _)| name == rule)
    }

    /// Whether [`judge`](Self::judge) has to see the body of such a request.
    pub fn wants_body(&self, method: &Method, path: &CleanPath) -> bool {
        if is_graphql(path) {
            return method.as_str() == "POST";
        }
        Readings::of(path, false).any(|place| {
            let found = self.opening(method, &place);
            found.is_some_and(|(_, endpoint)| endpoint.body != Body::Unread)
        })
    }

    /// Decides. The rule that allows is named.
    pub fn judge(&self, request: &GithubRequest<'_>) -> Result<RuleName, Denial> {
        if request.has_method_override {
            return Err(refuse(
                "method-override",
                "A request must not ask to be taken for one of another method or path. Send it \
                 with that method and path, without the override header.",
            ));
        }
        let is_upload = match request.host.as_name().map(|name| name.as_str()) {
            Some(API) => false,
            Some(UPLOADS) => true,
            _ => return Err(refuse("host", "This host is not one of GitHub's API.")),
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
        let mut opened: Option<(usize, &'static Endpoint, bool)> = None;
        for place in Readings::of(path, is_upload) {
            let found = self.opening(method, &place);
            let Some((index, endpoint)) = found else {
                return Err(self.refuse_endpoint(request, is_upload));
            };
            let is_foreign = place.repository().is_some_and(|(owner, name)| {
                !request.repos.iter().any(|repo| is_named(repo, owner, name))
            });
            // However the path is read, it must be the same thing on the same repository.
            if opened.is_some_and(|(_, other, foreign)| {
                !std::ptr::eq(other, endpoint) || foreign != is_foreign
            }) {
                return Err(self.refuse_endpoint(request, is_upload));
            }
            opened = Some((index, endpoint, is_foreign));
        }
        let Some((index, endpoint, is_foreign)) = opened else {
            return Err(self.refuse_endpoint(request, is_upload));
        };
        let Some(rule) = rules().nth(index) else {
            return Err(self.refuse_endpoint(request, is_upload));
        };
        if is_foreign {
            return match &self.public {
                Some(public) if rule.is_read => Ok(public.clone()),
                _ => Err(refuse_repository(request)),
            };
        }
        if !is_upload && !matches!(method.as_str(), "GET" | "HEAD") {
            body::check_carriage(request, rule)?;
        }
        endpoint
            .body
            .check(rule.name, request, |name| self.is_on(name))?;
        match self.states.get(index) {
            Some((name, _)) => Ok(name.clone()),
            None => Err(self.refuse_endpoint(request, is_upload)),
        }
    }

    fn judge_graphql(&self, request: &GithubRequest<'_>) -> Result<RuleName, Denial> {
        if request.method.as_str() != "POST" || request.path.target() != "/graphql" {
            let sentence = "GraphQL is only spoken by POST /graphql, without a query string.";
            return Err(refuse("graphql-read", sentence));
        }
        let rule = graphql::judge(request, |name| self.is_on(name))?;
        Ok(format!("github:{rule}").into())
    }

    /// The first rule that is on and opens `method` on `place`.
    fn opening(&self, method: &Method, place: &Place<'_>) -> Option<(usize, &'static Endpoint)> {
        let states = self.states.iter().map(|(_, is_on)| *is_on);
        let mut on = rules().zip(states).enumerate();
        on.find_map(|(index, (rule, is_on))| {
            let endpoint = is_on.then(|| rule.find(method, place)).flatten()?;
            Some((index, endpoint))
        })
    }

    fn is_on(&self, name: &str) -> bool {
        let mut states = rules().zip(&self.states);
        states.any(|(rule, (_, is_on))| rule.name == name && *is_on)
    }

    /// A refusal that names what would open the endpoint, if anything would.
    fn refuse_endpoint(&self, request: &GithubRequest<'_>, is_upload: bool) -> Denial {
        let GithubRequest { method, path, .. } = *request;
        let mut foreign = false;
        for place in Readings::of(path, is_upload) {
            if place.is_by_number() {
                return refuse(
                    "numeric-id",
                    "A repository must be named, not numbered. Use /repos/OWNER/NAME.",
                );
            }
            foreign |= place.repository().is_some_and(|(owner, name)| {
                !request.repos.iter().any(|repo| is_named(repo, owner, name))
            });
            let closed =
                rules().find(|rule| !self.is_on(rule.name) && rule.find(method, &place).is_some());
            if let Some(rule) = closed.filter(|_| !foreign) {
                return refuse_switched(rule, &format!("{method} {path}"));
            }
        }
        if foreign {
            return refuse_repository(request);
        }
        refuse(
            "default",
            format!(
                "{method} {path} is not among what the built-in GitHub rules know. Use another \
                 way, or leave it to the operator."
            ),
        )
    }
}

/// Whether `owner` and `name`, in any case, are `repo`.
fn is_named(repo: &Repo, owner: &str, name: &str) -> bool {
    repo.name
        .as_str()
        .split_once('/')
        .is_some_and(|(own, its)| own.eq_ignore_ascii_case(owner) && its.eq_ignore_ascii_case(name))
}

/// In any reading and any case: what might be GraphQL to the server is judged as GraphQL.
fn is_graphql(path: &CleanPath) -> bool {
    Readings::of(path, false).any(|place| place.is_graphql())
}

fn refuse(rule: &str, message: impl Into<String>) -> Denial {
    Denial::new(Reason::GithubRule, format!("github:{rule}")).saying(message)
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

/// The refusal of what a rule that is off would open.
fn refuse_switched(rule: &Rule, what: &str) -> Denial {
    let name = rule.name;
    let leave = format!(
        "Leave it to the operator, who can add '{name}' to egress.github.allow if agents \
         should do it."
    );
    refuse(
        name,
        match rule.refuses {
            Some(sentence) => format!("{sentence}. {leave}"),
            None => format!("{what} is not allowed. {leave}"),
        },
    )
}

/// The refusal of something that needs the rule called `name`.
fn refuse_named(name: &str, what: &str) -> Denial {
    match rules().find(|rule| rule.name == name) {
        Some(rule) => refuse_switched(rule, what),
        None => refuse(name, format!("{what} is not allowed.")),
    }
}

fn nearest(name: &str) -> Option<&'static str> {
    // Comparing takes the product of both lengths, and nobody means a word by a page.
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

/// For a fuzzer: whatever the body is, GraphQL and an edit of an issue are judged by it, and
/// what the rules allow as they come is allowed with a switch more.
pub fn exercise(bytes: &[u8]) {
    let switched = ["graphql-mutations".to_owned(), "close".to_owned()];
    let few = GithubRules::default();
    let (Ok(more), Ok(host), Ok(name)) = (
        GithubRules::new(&switched, false),
        Host::parse(API),
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
        let allowed = few.judge(&request).is_ok();
        assert!(!allowed || more.judge(&request).is_ok(), "{target}");
    }
}

#[cfg(test)]
mod tests;
