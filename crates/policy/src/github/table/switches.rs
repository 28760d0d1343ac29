//! The rules that are disabled unless `egress.github.allow` contains their name.

use super::{
    ALL_METHODS, ApiArea, DELETE, Endpoint, PATCH, POST, PUT, READ_METHODS, Rule, WRITE_METHODS,
    optional_rule, repo_endpoint, site_endpoint,
};

/// Every rule that is disabled by default.
pub(super) const OPTIONAL_RULES: &[Rule] = &[
    optional_rule(
        "graphql-mutations",
        "the GraphQL mutations that the enabled rules allow; the repository cannot be determined \
         from the ids in them, so enable this only with a token that has access to the registered \
         repositories alone",
        &[],
    ),
    optional_rule(
        "read-user",
        "reading the owner of the token: `/user`, and `viewer` in GraphQL",
        &[site_endpoint(READ_METHODS, &["user"])],
    ),
    optional_rule(
        "cross-references",
        "reading timelines, sub-issues and dependencies, which show issues of other repositories",
        &[repo_endpoint(
            READ_METHODS,
            &[
                "issues/#/timeline",
                "issues/#/sub_issues",
                "issues/#/parent",
                "issues/#/dependencies/**",
            ],
        )],
    ),
    optional_rule(
        "close",
        "closing and reopening issues and pull requests",
        &[],
    ),
    optional_rule(
        "lock",
        "locking and unlocking conversations",
        &[repo_endpoint(&["PUT", "DELETE"], &["issues/#/lock"])],
    ),
    optional_rule(
        "reactions",
        "adding and removing reactions",
        &[
            repo_endpoint(
                POST,
                &[
                    "issues/#/reactions",
                    "issues/comments/#/reactions",
                    "pulls/comments/#/reactions",
                    "comments/#/reactions",
                ],
            ),
            repo_endpoint(
                DELETE,
                &[
                    "issues/#/reactions/#",
                    "issues/comments/#/reactions/#",
                    "pulls/comments/#/reactions/#",
                    "comments/#/reactions/#",
                ],
            ),
        ],
    ),
    optional_rule(
        "milestones",
        "creating and editing milestones",
        &[
            repo_endpoint(POST, &["milestones"]),
            repo_endpoint(PATCH, &["milestones/#"]),
        ],
    ),
    optional_rule(
        "deletions",
        "deleting comments, labels, milestones and pending reviews",
        &[repo_endpoint(
            DELETE,
            &[
                "issues/comments/#",
                "pulls/comments/#",
                "comments/#",
                "labels/*",
                "milestones/#",
                "pulls/#/reviews/#",
            ],
        )],
    ),
    optional_rule(
        "review-verdicts",
        "approving and requesting changes, and dismissing reviews",
        &[repo_endpoint(PUT, &["pulls/#/reviews/#/dismissals"])],
    ),
    optional_rule(
        "statuses",
        "setting commit statuses, which branch protection may wait for",
        &[repo_endpoint(POST, &["statuses/~"])],
    ),
    Rule {
        refusal_sentence: Some("PR merge blocked - use GitHub UI"),
        ..optional_rule(
            "merge",
            "merging pull requests, at once or automatically",
            &[repo_endpoint(PUT, &["pulls/#/merge"])],
        )
    },
    optional_rule(
        "merges",
        "merging branches: `/merges`, `/merge-upstream` and updating a pull request's branch",
        &[
            repo_endpoint(POST, &["merges", "merge-upstream"]),
            repo_endpoint(PUT, &["pulls/#/update-branch"]),
        ],
    ),
    Rule {
        refusal_sentence: Some("Release creation blocked"),
        ..optional_rule(
            "releases",
            "creating, editing and deleting releases, and uploading their assets",
            &[
                repo_endpoint(WRITE_METHODS, &["releases/**"]),
                Endpoint {
                    area: ApiArea::Uploads,
                    ..repo_endpoint(POST, &["releases/#/assets"])
                },
            ],
        )
    },
    optional_rule(
        "refs",
        "creating, moving, renaming and deleting refs without a push",
        &[
            repo_endpoint(POST, &["git/refs", "branches/*/rename"]),
            repo_endpoint(&["PATCH", "DELETE"], &["git/refs/**"]),
        ],
    ),
    optional_rule(
        "contents",
        "writing and deleting files without a push, on any branch",
        &[repo_endpoint(&["PUT", "DELETE"], &["contents/**"])],
    ),
    optional_rule(
        "git-objects",
        "writing blobs, trees, commits and tags without a push",
        &[repo_endpoint(
            POST,
            &["git/blobs", "git/trees", "git/commits", "git/tags"],
        )],
    ),
    optional_rule(
        "branch-protection",
        "changing branch protection",
        &[repo_endpoint(WRITE_METHODS, &["branches/*/protection/**"])],
    ),
    optional_rule(
        "rulesets",
        "changing rulesets",
        &[repo_endpoint(WRITE_METHODS, &["rulesets/**"])],
    ),
    optional_rule(
        "settings",
        "changing a repository's settings: visibility, archiving, LFS, topics, Actions \
         permissions, security features",
        &[
            repo_endpoint(PATCH, &["", "properties/values"]),
            repo_endpoint(
                &["PUT", "DELETE"],
                &[
                    "automated-security-fixes",
                    "immutable-releases",
                    "lfs",
                    "private-vulnerability-reporting",
                    "topics",
                    "vulnerability-alerts",
                    "actions/permissions/**",
                    "actions/oidc/customization/sub",
                ],
            ),
            repo_endpoint(&["POST", "DELETE"], &["autolinks/**"]),
            repo_endpoint(PATCH, &["code-scanning/default-setup"]),
        ],
    ),
    optional_rule(
        "delete-repository",
        "deleting a repository",
        &[repo_endpoint(DELETE, &[""])],
    ),
    optional_rule(
        "transfer",
        "transferring a repository",
        &[repo_endpoint(POST, &["transfer"])],
    ),
    optional_rule(
        "collaborators",
        "adding and removing collaborators",
        &[repo_endpoint(&["PUT", "DELETE"], &["collaborators/*"])],
    ),
    optional_rule(
        "invitations",
        "reading, changing and answering invitations",
        &[
            repo_endpoint(ALL_METHODS, &["invitations/**"]),
            site_endpoint(ALL_METHODS, &["user/repository_invitations/**"]),
        ],
    ),
    optional_rule(
        "interaction-limits",
        "changing who may interact with a repository",
        &[repo_endpoint(ALL_METHODS, &["interaction-limits/**"])],
    ),
    optional_rule(
        "forks",
        "listing and making forks",
        &[repo_endpoint(&["GET", "HEAD", "POST"], &["forks"])],
    ),
    optional_rule(
        "deploy-keys",
        "a repository's deploy keys",
        &[repo_endpoint(ALL_METHODS, &["keys/**"])],
    ),
    optional_rule(
        "user-keys",
        "the operator's own keys",
        &[site_endpoint(
            ALL_METHODS,
            &[
                "user/keys/**",
                "user/gpg_keys/**",
                "user/ssh_signing_keys/**",
            ],
        )],
    ),
    optional_rule(
        "gists",
        "gists",
        &[site_endpoint(ALL_METHODS, &["gists/**"])],
    ),
    optional_rule(
        "hooks",
        "a repository's webhooks",
        &[repo_endpoint(ALL_METHODS, &["hooks/**"])],
    ),
    optional_rule(
        "secrets",
        "secrets and variables of a repository and its environments",
        &[repo_endpoint(
            ALL_METHODS,
            &[
                "actions/secrets/**",
                "actions/variables/**",
                "actions/organization-secrets/**",
                "actions/organization-variables/**",
                "agents/secrets/**",
                "agents/variables/**",
                "codespaces/secrets/**",
                "dependabot/secrets/**",
                "environments/*/secrets/**",
                "environments/*/variables/**",
            ],
        )],
    ),
    optional_rule(
        "secret-scanning",
        "secret scanning alerts, which quote the secrets",
        &[repo_endpoint(ALL_METHODS, &["secret-scanning/**"])],
    ),
    optional_rule(
        "alerts",
        "dismissing alerts, and uploading analyses",
        &[
            repo_endpoint(PATCH, &["code-scanning/alerts/#", "dependabot/alerts/#"]),
            repo_endpoint(
                POST,
                &["code-scanning/sarifs", "dependency-graph/snapshots"],
            ),
            repo_endpoint(DELETE, &["code-scanning/analyses/#"]),
        ],
    ),
    optional_rule(
        "runners",
        "self-hosted runners and their registration",
        &[repo_endpoint(ALL_METHODS, &["actions/runners/**"])],
    ),
    optional_rule(
        "workflows",
        "dispatching, rerunning, cancelling and approving workflow runs, and deleting their \
         logs, artifacts and caches",
        &[
            repo_endpoint(
                POST,
                &[
                    "actions/workflows/*/dispatches",
                    "actions/runs/#/rerun",
                    "actions/runs/#/rerun-failed-jobs",
                    "actions/runs/#/cancel",
                    "actions/runs/#/force-cancel",
                    "actions/runs/#/approve",
                    "actions/jobs/#/rerun",
                    "check-runs/#/rerequest",
                    "check-suites/#/rerequest",
                ],
            ),
            repo_endpoint(
                PUT,
                &["actions/workflows/*/enable", "actions/workflows/*/disable"],
            ),
            repo_endpoint(
                DELETE,
                &[
                    "actions/runs/#",
                    "actions/runs/#/logs",
                    "actions/artifacts/#",
                    "actions/caches",
                    "actions/caches/#",
                ],
            ),
            repo_endpoint(PATCH, &["check-suites/preferences"]),
        ],
    ),
    optional_rule(
        "repository-dispatch",
        "sending repository_dispatch events",
        &[repo_endpoint(POST, &["dispatches"])],
    ),
    optional_rule(
        "environments",
        "changing environments and their protection",
        &[
            repo_endpoint(&["PUT", "DELETE"], &["environments/*"]),
            repo_endpoint(
                ALL_METHODS,
                &[
                    "environments/*/deployment-branch-policies/**",
                    "environments/*/deployment_protection_rules/**",
                ],
            ),
        ],
    ),
    optional_rule(
        "deployments",
        "creating, changing, approving and deleting deployments",
        &[
            repo_endpoint(WRITE_METHODS, &["deployments/**"]),
            repo_endpoint(
                POST,
                &[
                    "actions/runs/#/pending_deployments",
                    "actions/runs/#/deployment_protection_rule",
                ],
            ),
        ],
    ),
    optional_rule(
        "pages",
        "changing and building Pages",
        &[repo_endpoint(WRITE_METHODS, &["pages/**"])],
    ),
    optional_rule(
        "codespaces",
        "codespaces, except their secrets",
        &[
            repo_endpoint(
                ALL_METHODS,
                &[
                    "codespaces",
                    "codespaces/devcontainers",
                    "codespaces/machines",
                    "codespaces/new",
                    "codespaces/permissions_check",
                    "pulls/#/codespaces",
                ],
            ),
            site_endpoint(
                ALL_METHODS,
                &[
                    "user/codespaces",
                    "user/codespaces/*",
                    "user/codespaces/*/start",
                    "user/codespaces/*/stop",
                ],
            ),
        ],
    ),
];
