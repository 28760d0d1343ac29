//! The table of GitHub rules, with the endpoints that each one allows.
//!
//! All entries allow; an endpoint without an entry is refused. Disabled rules are also used to name
//! the rule in a refusal. Paths are patterns of [`ApiPath::matches`], below the repository.

mod switches;

use crate::endpoint::Method;

use super::body::Body;
use super::route::{ApiArea, ApiPath};

/// Every rule, the default ones first.
pub(super) fn rules() -> impl Iterator<Item = &'static Rule> {
    DEFAULTS.iter().chain(switches::SWITCHES)
}

/// One rule.
pub(super) struct Rule {
    pub(super) name: &'static str,
    /// Description of what the rule allows, for docs/config.md.
    pub(super) opens: &'static str,
    /// Whether the rule is enabled by default.
    pub(super) is_default: bool,
    /// Whether the rule allows only reads; such a rule also applies to public repositories.
    pub(super) is_read: bool,
    /// A special message for the refusal.
    pub(super) refuses: Option<&'static str>,
    endpoints: &'static [Endpoint],
}

/// Methods and paths that a rule allows.
pub(super) struct Endpoint {
    area: ApiArea,
    methods: &'static [&'static str],
    paths: &'static [&'static str],
    pub(super) body: Body,
}

impl Rule {
    /// The endpoint of this rule for `method` on `path`.
    pub(super) fn find(&self, method: &Method, path: &ApiPath<'_>) -> Option<&'static Endpoint> {
        self.endpoints.iter().find(|endpoint| {
            endpoint.area == path.area
                && endpoint.methods.contains(&method.as_str())
                && path.matches(endpoint.paths)
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
        area: ApiArea::Repository,
        methods,
        paths,
        body: Body::Unread,
    }
}

const fn site(methods: &'static [&'static str], paths: &'static [&'static str]) -> Endpoint {
    Endpoint {
        area: ApiArea::Site,
        ..repo(methods, paths)
    }
}

const fn repo_with_body(
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

/// The readable paths of a repository, except those with a rule of their own: keys, hooks, secrets,
/// variables, runners, alerts that quote secrets, forks, and lists that include issues of other
/// repositories.
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

/// Readable paths outside of repositories that show no private data.
const PUBLIC_SITE_PATHS: &[&str] = &[
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

/// The rules that are enabled by default.
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
            "reading public site data: meta, rate limit, licences, templates, emojis",
            &[site(READ, PUBLIC_SITE_PATHS)],
        )
    },
    on(
        "pull-requests",
        "creating and editing pull requests, and asking for reviewers",
        &[
            repo_with_body(POST, &["pulls"], Body::PULL),
            repo_with_body(PATCH, &["pulls/#"], Body::PULL_EDIT),
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
            repo_with_body(POST, &["issues"], Body::ISSUE),
            repo_with_body(PATCH, &["issues/#"], Body::ISSUE_EDIT),
            repo(&["POST", "DELETE"], &["issues/#/assignees"]),
        ],
    ),
    on(
        "reviews",
        "reviews of type COMMENT",
        &[
            repo_with_body(POST, &["pulls/#/reviews"], Body::REVIEW),
            repo_with_body(POST, &["pulls/#/reviews/#/events"], Body::REVIEW_EVENT),
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
