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
    DEFAULT_RULES.iter().chain(switches::OPTIONAL_RULES)
}

/// One rule.
pub(super) struct Rule {
    pub(super) name: &'static str,
    /// Description of what the rule allows, for docs/config.md.
    pub(super) description: &'static str,
    /// Whether the rule is enabled by default.
    pub(super) is_default: bool,
    /// Whether the rule allows only reads; such a rule also applies to public repositories.
    pub(super) is_read: bool,
    /// The first sentence of the refusal message; none for the default sentence.
    pub(super) refusal_sentence: Option<&'static str>,
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

/// A rule that is enabled by default.
const fn default_rule(
    name: &'static str,
    description: &'static str,
    endpoints: &'static [Endpoint],
) -> Rule {
    Rule {
        is_default: true,
        ..optional_rule(name, description, endpoints)
    }
}

/// A rule that is enabled only by its name in `egress.github.allow`.
const fn optional_rule(
    name: &'static str,
    description: &'static str,
    endpoints: &'static [Endpoint],
) -> Rule {
    Rule {
        name,
        description,
        is_default: false,
        is_read: false,
        refusal_sentence: None,
        endpoints,
    }
}

const fn repo_endpoint(
    methods: &'static [&'static str],
    paths: &'static [&'static str],
) -> Endpoint {
    Endpoint {
        area: ApiArea::Repository,
        methods,
        paths,
        body: Body::Unread,
    }
}

const fn site_endpoint(
    methods: &'static [&'static str],
    paths: &'static [&'static str],
) -> Endpoint {
    Endpoint {
        area: ApiArea::Site,
        ..repo_endpoint(methods, paths)
    }
}

const fn repo_endpoint_with_body(
    method: &'static [&'static str],
    paths: &'static [&'static str],
    body: Body,
) -> Endpoint {
    Endpoint {
        body,
        ..repo_endpoint(method, paths)
    }
}

const READ_METHODS: &[&str] = &["GET", "HEAD"];
const POST: &[&str] = &["POST"];
const PATCH: &[&str] = &["PATCH"];
const PUT: &[&str] = &["PUT"];
const DELETE: &[&str] = &["DELETE"];
const WRITE_METHODS: &[&str] = &["POST", "PATCH", "PUT", "DELETE"];
const ALL_METHODS: &[&str] = &["GET", "HEAD", "POST", "PATCH", "PUT", "DELETE"];

/// The readable paths of a repository, except those that need another rule: keys, hooks, secrets,
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
const DEFAULT_RULES: &[Rule] = &[
    Rule {
        is_read: true,
        ..default_rule(
            "read",
            "reading the registered repositories, except what has a rule of its own below",
            &[repo_endpoint(READ_METHODS, READABLE)],
        )
    },
    Rule {
        is_read: true,
        ..default_rule(
            "meta",
            "reading public site data: meta, rate limit, licences, templates, emojis",
            &[site_endpoint(READ_METHODS, PUBLIC_SITE_PATHS)],
        )
    },
    default_rule(
        "pull-requests",
        "creating and editing pull requests, and asking for reviewers",
        &[
            repo_endpoint_with_body(POST, &["pulls"], Body::CREATE_PULL),
            repo_endpoint_with_body(PATCH, &["pulls/#"], Body::EDIT_PULL),
            repo_endpoint(&["POST", "DELETE"], &["pulls/#/requested_reviewers"]),
        ],
    ),
    default_rule(
        "comments",
        "writing and editing comments on issues, pull requests and commits",
        &[
            repo_endpoint(
                POST,
                &[
                    "issues/#/comments",
                    "pulls/#/comments",
                    "pulls/#/comments/#/replies",
                    "commits/~/comments",
                ],
            ),
            repo_endpoint(
                PATCH,
                &["issues/comments/#", "pulls/comments/#", "comments/#"],
            ),
        ],
    ),
    default_rule(
        "issues",
        "creating and editing issues, and assigning them",
        &[
            repo_endpoint_with_body(POST, &["issues"], Body::CREATE_ISSUE),
            repo_endpoint_with_body(PATCH, &["issues/#"], Body::EDIT_ISSUE),
            repo_endpoint(&["POST", "DELETE"], &["issues/#/assignees"]),
        ],
    ),
    default_rule(
        "reviews",
        "reviews of type COMMENT",
        &[
            repo_endpoint_with_body(POST, &["pulls/#/reviews"], Body::CREATE_REVIEW),
            repo_endpoint_with_body(POST, &["pulls/#/reviews/#/events"], Body::SUBMIT_REVIEW),
            repo_endpoint(PUT, &["pulls/#/reviews/#"]),
        ],
    ),
    default_rule(
        "labels",
        "creating and editing labels, putting them on and taking them off",
        &[
            repo_endpoint(&["POST", "PUT", "DELETE"], &["issues/#/labels"]),
            repo_endpoint(DELETE, &["issues/#/labels/*"]),
            repo_endpoint(POST, &["labels"]),
            repo_endpoint(PATCH, &["labels/*"]),
        ],
    ),
    default_rule(
        "check-runs",
        "creating and updating check runs",
        &[
            repo_endpoint(POST, &["check-runs", "check-suites"]),
            repo_endpoint(PATCH, &["check-runs/#"]),
        ],
    ),
    default_rule(
        "graphql-read",
        "GraphQL queries about the registered repositories",
        &[],
    ),
];
