//! The table of rules: which endpoints each one opens.
//!
//! Everything in it opens; what is in no row is refused. A row that is off also serves to
//! name the switch in a refusal. Paths are as in [`Place::fits`], below the repository.

mod switches;

use crate::endpoint::Method;

use super::body::Body;
use super::route::{At, Place};

/// Every rule, those that are on first.
pub(super) fn rules() -> impl Iterator<Item = &'static Rule> {
    DEFAULTS.iter().chain(switches::SWITCHES)
}

/// One rule.
pub(super) struct Rule {
    pub(super) name: &'static str,
    /// What it opens, for the reference.
    pub(super) opens: &'static str,
    /// Whether it is on without being switched.
    pub(super) is_default: bool,
    /// Whether it only reads; such a rule also holds for public repositories.
    pub(super) is_read: bool,
    /// A sentence of its own for the refusal.
    pub(super) refuses: Option<&'static str>,
    endpoints: &'static [Endpoint],
}

/// Some methods on some paths.
pub(super) struct Endpoint {
    at: At,
    methods: &'static [&'static str],
    paths: &'static [&'static str],
    pub(super) body: Body,
}

impl Rule {
    /// The endpoint of this rule that is `method` on `place`.
    pub(super) fn find(&self, method: &Method, place: &Place<'_>) -> Option<&'static Endpoint> {
        self.endpoints.iter().find(|endpoint| {
            endpoint.at == place.at
                && endpoint.methods.contains(&method.as_str())
                && place.fits(endpoint.paths)
        })
    }
}

const fn on(name: &'static str, opens: &'static str, endpoints: &'static [Endpoint]) -> Rule {
    Rule {
        is_default: true,
        ..off(name, opens, endpoints)
    }
}

const fn off(name: &'static str, opens: &'static str, endpoints: &'static [Endpoint]) -> Rule {
    Rule {
        name,
        opens,
        is_default: false,
        is_read: false,
        refuses: None,
        endpoints,
    }
}

const fn repo(methods: &'static [&'static str], paths: &'static [&'static str]) -> Endpoint {
    Endpoint {
        at: At::Repository,
        methods,
        paths,
        body: Body::Unread,
    }
}

const fn site(methods: &'static [&'static str], paths: &'static [&'static str]) -> Endpoint {
    Endpoint {
        at: At::Site,
        ..repo(methods, paths)
    }
}

const fn judged(
    method: &'static [&'static str],
    paths: &'static [&'static str],
    body: Body,
) -> Endpoint {
    Endpoint {
        body,
        ..repo(method, paths)
    }
}

const READ: &[&str] = &["GET", "HEAD"];
const POST: &[&str] = &["POST"];
const PATCH: &[&str] = &["PATCH"];
const PUT: &[&str] = &["PUT"];
const DELETE: &[&str] = &["DELETE"];
const WRITE: &[&str] = &["POST", "PATCH", "PUT", "DELETE"];
const ALL: &[&str] = &["GET", "HEAD", "POST", "PATCH", "PUT", "DELETE"];

/// Everything that can be read of a repository, save what has a rule of its own: keys,
/// hooks, secrets, variables, runners, alerts that quote secrets, forks, and lists that
/// bring issues of other repositories along.
const READABLE: &[&str] = &[
    "",
    "activity",
    "actions/artifacts/**",
    "actions/cache/usage",
    "actions/caches",
    "actions/jobs/**",
    "actions/runs/**",
    "actions/workflows/**",
    "assignees/**",
    "attestations/*",
    "autolinks/**",
    "branches/**",
    "check-runs/**",
    "check-suites/**",
    "code-scanning/alerts/**",
    "code-scanning/analyses/**",
    "codeowners/errors",
    "collaborators/**",
    "comments/**",
    "commits/**",
    "community/profile",
    "compare/@",
    "contents/**",
    "contributors",
    "dependabot/alerts/**",
    "dependency-graph/compare/@",
    "dependency-graph/sbom",
    "deployments/**",
    "environments",
    "environments/*",
    "events",
    "git/**",
    "issues",
    "issues/#",
    "issues/#/assignees/*",
    "issues/#/comments",
    "issues/#/events",
    "issues/#/labels",
    "issues/#/reactions",
    "issues/comments/**",
    "issues/events/**",
    "labels/**",
    "languages",
    "license",
    "milestones/**",
    "pages/**",
    "pulls/**",
    "readme/**",
    "releases/**",
    "rules/branches/**",
    "rulesets/**",
    "stargazers",
    "stats/*",
    "statuses/**",
    "subscribers",
    "tags",
    "tarball/**",
    "topics",
    "traffic/**",
    "zipball/**",
];

const HARMLESS: &[&str] = &[
    "",
    "emojis",
    "gitignore/templates/**",
    "licenses/**",
    "meta",
    "octocat",
    "rate_limit",
    "versions",
    "zen",
];

/// What is on without being switched.
const DEFAULTS: &[Rule] = &[
    Rule {
        is_read: true,
        ..on(
            "read",
            "reading the registered repositories, except what has a rule of its own below",
            &[repo(READ, READABLE)],
        )
    },
    Rule {
        is_read: true,
        ..on(
            "meta",
            "reading what belongs to nobody: meta, rate limit, licences, templates, emojis",
            &[site(READ, HARMLESS)],
        )
    },
    on(
        "pull-requests",
        "creating and editing pull requests, and asking for reviewers",
        &[
            judged(POST, &["pulls"], Body::PULL),
            judged(PATCH, &["pulls/#"], Body::PULL_EDIT),
            repo(&["POST", "DELETE"], &["pulls/#/requested_reviewers"]),
        ],
    ),
    on(
        "comments",
        "writing and editing comments on issues, pull requests and commits",
        &[
            repo(
                POST,
                &[
                    "issues/#/comments",
                    "pulls/#/comments",
                    "pulls/#/comments/#/replies",
                    "commits/~/comments",
                ],
            ),
            repo(
                PATCH,
                &["issues/comments/#", "pulls/comments/#", "comments/#"],
            ),
        ],
    ),
    on(
        "issues",
        "creating and editing issues, and assigning them",
        &[
            judged(POST, &["issues"], Body::ISSUE),
            judged(PATCH, &["issues/#"], Body::ISSUE_EDIT),
            repo(&["POST", "DELETE"], &["issues/#/assignees"]),
        ],
    ),
    on(
        "reviews",
        "reviews of type COMMENT",
        &[
            judged(POST, &["pulls/#/reviews"], Body::REVIEW),
            judged(POST, &["pulls/#/reviews/#/events"], Body::REVIEW_EVENT),
            repo(PUT, &["pulls/#/reviews/#"]),
        ],
    ),
    on(
        "labels",
        "creating and editing labels, putting them on and taking them off",
        &[
            repo(&["POST", "PUT", "DELETE"], &["issues/#/labels"]),
            repo(DELETE, &["issues/#/labels/*"]),
            repo(POST, &["labels"]),
            repo(PATCH, &["labels/*"]),
        ],
    ),
    on(
        "check-runs",
        "creating and updating check runs",
        &[
            repo(POST, &["check-runs", "check-suites"]),
            repo(PATCH, &["check-runs/#"]),
        ],
    ),
    on(
        "graphql-read",
        "GraphQL queries about the registered repositories",
        &[],
    ),
];
