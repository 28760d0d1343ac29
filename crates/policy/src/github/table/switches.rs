//! The rules that are disabled unless `egress.github.allow` contains their name.

use super::{ALL, ApiArea, DELETE, Endpoint, PATCH, POST, PUT, READ, Rule, WRITE, off, repo, site};

pub(super) const SWITCHES: &[Rule] = &[
    off(
        "graphql-mutations",
        "the GraphQL mutations that the enabled rules allow; the repository cannot be determined \
         from the ids in them, so enable this only with a token that has access to the registered \
         repositories alone",
        &[],
    ),
    off(
        "read-user",
        "reading the owner of the token: `/user`, and `viewer` in GraphQL",
        &[site(READ, &["user"])],
    ),
    off(
        "cross-references",
        "reading timelines, sub-issues and dependencies, which show issues of other repositories",
        &[repo(
            READ,
            &[
                "issues/#/timeline",
                "issues/#/sub_issues",
                "issues/#/parent",
                "issues/#/dependencies/**",
            ],
        )],
    ),
    off(
        "close",
        "closing and reopening issues and pull requests",
        &[],
    ),
    off(
        "lock",
        "locking and unlocking conversations",
        &[repo(&["PUT", "DELETE"], &["issues/#/lock"])],
    ),
    off(
        "reactions",
        "adding and removing reactions",
        &[
            repo(
                POST,
                &[
                    "issues/#/reactions",
                    "issues/comments/#/reactions",
                    "pulls/comments/#/reactions",
                    "comments/#/reactions",
                ],
            ),
            repo(
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
    off(
        "milestones",
        "creating and editing milestones",
        &[repo(POST, &["milestones"]), repo(PATCH, &["milestones/#"])],
    ),
    off(
        "deletions",
        "deleting comments, labels, milestones and pending reviews",
        &[repo(
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
    off(
        "review-verdicts",
        "approving and requesting changes, and dismissing reviews",
        &[repo(PUT, &["pulls/#/reviews/#/dismissals"])],
    ),
    off(
        "statuses",
        "setting commit statuses, which branch protection may wait for",
        &[repo(POST, &["statuses/~"])],
    ),
    Rule {
        refuses: Some("PR merge blocked - use GitHub UI"),
        ..off(
            "merge",
            "merging pull requests, at once or automatically",
            &[repo(PUT, &["pulls/#/merge"])],
        )
    },
    off(
        "merges",
        "merging branches: `/merges`, `/merge-upstream` and updating a pull request's branch",
        &[
            repo(POST, &["merges", "merge-upstream"]),
            repo(PUT, &["pulls/#/update-branch"]),
        ],
    ),
    Rule {
        refuses: Some("Release creation blocked"),
        ..off(
            "releases",
            "creating, editing and deleting releases, and uploading their assets",
            &[
                repo(WRITE, &["releases/**"]),
                Endpoint {
                    area: ApiArea::Uploads,
                    ..repo(POST, &["releases/#/assets"])
                },
            ],
        )
    },
    off(
        "refs",
        "creating, moving, renaming and deleting refs without a push",
        &[
            repo(POST, &["git/refs", "branches/*/rename"]),
            repo(&["PATCH", "DELETE"], &["git/refs/**"]),
        ],
    ),
    off(
        "contents",
        "writing and deleting files without a push, on any branch",
        &[repo(&["PUT", "DELETE"], &["contents/**"])],
    ),
    off(
        "git-objects",
        "writing blobs, trees, commits and tags without a push",
        &[repo(
            POST,
            &["git/blobs", "git/trees", "git/commits", "git/tags"],
        )],
    ),
    off(
        "branch-protection",
        "changing branch protection",
        &[repo(WRITE, &["branches/*/protection/**"])],
    ),
    off(
        "rulesets",
        "changing rulesets",
        &[repo(WRITE, &["rulesets/**"])],
    ),
    off(
        "settings",
        "changing a repository's settings: visibility, archiving, LFS, topics, Actions \
         permissions, security features",
        &[
            repo(PATCH, &["", "properties/values"]),
            repo(
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
            repo(&["POST", "DELETE"], &["autolinks/**"]),
            repo(PATCH, &["code-scanning/default-setup"]),
        ],
    ),
    off(
        "delete-repository",
        "deleting a repository",
        &[repo(DELETE, &[""])],
    ),
    off(
        "transfer",
        "transferring a repository",
        &[repo(POST, &["transfer"])],
    ),
    off(
        "collaborators",
        "adding and removing collaborators",
        &[repo(&["PUT", "DELETE"], &["collaborators/*"])],
    ),
    off(
        "invitations",
        "reading, changing and answering invitations",
        &[
            repo(ALL, &["invitations/**"]),
            site(ALL, &["user/repository_invitations/**"]),
        ],
    ),
    off(
        "interaction-limits",
        "changing who may interact with a repository",
        &[repo(ALL, &["interaction-limits/**"])],
    ),
    off(
        "forks",
        "listing and making forks",
        &[repo(&["GET", "HEAD", "POST"], &["forks"])],
    ),
    off(
        "deploy-keys",
        "a repository's deploy keys",
        &[repo(ALL, &["keys/**"])],
    ),
    off(
        "user-keys",
        "the operator's own keys",
        &[site(
            ALL,
            &[
                "user/keys/**",
                "user/gpg_keys/**",
                "user/ssh_signing_keys/**",
            ],
        )],
    ),
    off("gists", "gists", &[site(ALL, &["gists/**"])]),
    off(
        "hooks",
        "a repository's webhooks",
        &[repo(ALL, &["hooks/**"])],
    ),
    off(
        "secrets",
        "secrets and variables of a repository and its environments",
        &[repo(
            ALL,
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
    off(
        "secret-scanning",
        "secret scanning alerts, which quote the secrets",
        &[repo(ALL, &["secret-scanning/**"])],
    ),
    off(
        "alerts",
        "dismissing alerts, and uploading analyses",
        &[
            repo(PATCH, &["code-scanning/alerts/#", "dependabot/alerts/#"]),
            repo(
                POST,
                &["code-scanning/sarifs", "dependency-graph/snapshots"],
            ),
            repo(DELETE, &["code-scanning/analyses/#"]),
        ],
    ),
    off(
        "runners",
        "self-hosted runners and their registration",
        &[repo(ALL, &["actions/runners/**"])],
    ),
    off(
        "workflows",
        "dispatching, rerunning, cancelling and approving workflow runs, and deleting their \
         logs, artifacts and caches",
        &[
            repo(
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
            repo(
                PUT,
                &["actions/workflows/*/enable", "actions/workflows/*/disable"],
            ),
            repo(
                DELETE,
                &[
                    "actions/runs/#",
                    "actions/runs/#/logs",
                    "actions/artifacts/#",
                    "actions/caches",
                    "actions/caches/#",
                ],
            ),
            repo(PATCH, &["check-suites/preferences"]),
        ],
    ),
    off(
        "repository-dispatch",
        "sending repository_dispatch events",
        &[repo(POST, &["dispatches"])],
    ),
    off(
        "environments",
        "changing environments and their protection",
        &[
            repo(&["PUT", "DELETE"], &["environments/*"]),
            repo(
                ALL,
                &[
                    "environments/*/deployment-branch-policies/**",
                    "environments/*/deployment_protection_rules/**",
                ],
            ),
        ],
    ),
    off(
        "deployments",
        "creating, changing, approving and deleting deployments",
        &[
            repo(WRITE, &["deployments/**"]),
            repo(
                POST,
                &[
                    "actions/runs/#/pending_deployments",
                    "actions/runs/#/deployment_protection_rule",
                ],
            ),
        ],
    ),
    off(
        "pages",
        "changing and building Pages",
        &[repo(WRITE, &["pages/**"])],
    ),
    off(
        "codespaces",
        "codespaces, except their secrets",
        &[
            repo(
                ALL,
                &[
                    "codespaces",
                    "codespaces/devcontainers",
                    "codespaces/machines",
                    "codespaces/new",
                    "codespaces/permissions_check",
                    "pulls/#/codespaces",
                ],
            ),
            site(
                ALL,
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
