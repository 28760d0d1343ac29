//! Verdicts of GraphQL requests.

use serde_json::{Value, json};

use super::*;

fn send(rules: &GithubRules, body: &Value) -> String {
    call("POST", "/graphql", &body.to_string()).verdict(rules)
}

fn verdict_of(query: &str) -> String {
    send(&rules(&[]), &json!({ "query": query }))
}

/// A query about a registered repository.
fn repository_verdict(selections: &str) -> String {
    verdict_of(&format!(
        r#"{{ repository(owner: "acme", name: "widget") {{ {selections} }} }}"#
    ))
}

#[test]
fn queries_start_at_a_registered_repository() {
    for (query, expected) in [
        (
            r#"{ repository(owner: "acme", name: "widget") { id } }"#,
            "+",
        ),
        (
            r#"query Q { repository(name: "WIDGET", owner: "Acme") { id } }"#,
            "+",
        ),
        (
            r#"{ a: repository(owner: "acme", name: "widget") { b: id } }"#,
            "+",
        ),
        (
            r#"{ repository(owner: "acme", name: "widget", followRenames: false) { id } }"#,
            "+",
        ),
        (r#"{ rateLimit { remaining } __typename }"#, "+"),
        (
            r#"{ PullRequest: __type(name: "PullRequest") { fields(includeDeprecated: true) { name } } }"#,
            "+",
        ),
        (
            r#"{ repository(owner: "acme", name: "widget") { id } # bye }
           }"#,
            "+",
        ),
        (
            r#"{ repository(owner: "acme", name: "widget") @include(if: true) { id @skip(if: false) } }"#,
            "+",
        ),
        (
            r#"{ repository(owner: "acme", name: "other") { id } }"#,
            "-",
        ),
        (
            r#"{ widget: repository(owner: "acme", name: "other") { id } }"#,
            "-",
        ),
        (r#"{ repository(owner: "acme") { id } }"#, "-"),
        (r#"{ repository { id } }"#, "-"),
        (
            r#"{ repository(owner: "acme", name: "widget", name: "other") { id } }"#,
            "-",
        ),
        (
            r#"{ repository(owner: "acme", name: "widget", id: "x") { id } }"#,
            "-",
        ),
        (
            r#"{ repository(owner: "acme", name: "widg\u0065t") { id } }"#,
            "-",
        ),
        (
            r#"{ repository(owner: "acme", name: """widget""") { id } }"#,
            "-",
        ),
        (r#"{ repository(owner: acme, name: widget) { id } }"#, "-"),
        (
            r#"{ repository(owner: ["acme"], name: "widget") { id } }"#,
            "-",
        ),
        (
            r#"{ repository(owner: "acme", name: "widget") { id } viewer { login } }"#,
            "-",
        ),
        (
            r#"{ viewer { repositories(first: 9) { nodes { name } } } }"#,
            "-",
        ),
        (r#"{ node(id: "x") { id } }"#, "-"),
        (r#"{ nodes(ids: ["x"]) { id } }"#, "-"),
        (
            r#"{ search(query: "x", type: ISSUE, first: 1) { issueCount } }"#,
            "-",
        ),
        (r#"{ organization(login: "acme") { id } }"#, "-"),
        (r#"{ user(login: "x") { id } }"#, "-"),
        (
            r#"{ resource(url: "https://github.com/acme/other") { url } }"#,
            "-",
        ),
        (r#"{ relay { viewer { login } } }"#, "-"),
        (r#"{ repositoryOwner(login: "acme") { id } }"#, "-"),
        (r#"{ enterprise(slug: "x") { id } }"#, "-"),
        (
            r#"subscription { repository(owner: "acme", name: "widget") { id } }"#,
            "-",
        ),
        (
            r#"query A { repository(owner: "acme", name: "widget") { id } } query B { viewer { login } }"#,
            "-",
        ),
        (
            r#"{ repository(owner: "acme", name: "widget") { id } } type Query { a: Int }"#,
            "-",
        ),
        (
            r#"{ repository(owner: "acme", name: "widget") @defer { id } }"#,
            "-",
        ),
        (
            r#"query Q @x { repository(owner: "acme", name: "widget") { id } }"#,
            "-",
        ),
        ("", "-"),
        ("{", "-"),
        ("{}", "-"),
        ("fragment F on Query { __typename }", "-"),
        (
            r#"{ repository(owner: "acme", name: "widget") { id } } }"#,
            "-",
        ),
        (
            r#"{ repository(owner: "acme", name: "widget") { id } }{ viewer { login } }"#,
            "-",
        ),
        ("{ __typename # \r viewer { login } \n }", "-"),
        ("{ __typename \u{feff} }", "-"),
        ("{ __typename # \u{2028} viewer { login } \n }", "-"),
    ] {
        assert!(
            verdict_of(query).starts_with(expected),
            "{query}: {}",
            verdict_of(query)
        );
    }
}

#[test]
fn variables_are_resolved_from_the_request() {
    let query =
        r#"query($o: String!, $n: String = "widget") { repository(owner: $o, name: $n) { id } }"#;
    for (variables, expected) in [
        (json!({"o": "acme", "n": "widget"}), "+graphql-read"),
        (json!({"o": "ACME", "n": "Tool.js"}), "+graphql-read"),
        (json!({"o": "acme", "n": "other"}), "-repository"),
        (json!({"o": "acme"}), "-graphql-read"),
        (json!({"o": "acme", "n": null}), "-graphql-read"),
        (json!({"o": "acme", "n": ["widget"]}), "-graphql-read"),
        (json!(null), "-graphql-read"),
        (json!("{\"o\":\"acme\",\"n\":\"widget\"}"), "-graphql-read"),
        (json!([]), "-graphql-read"),
    ] {
        let body = json!({"query": query, "variables": variables});
        assert_eq!(send(&rules(&[]), &body), expected, "{variables}");
    }
    let twice = format!(
        r#"{{"query": {}, "variables": {{"o":"acme","n":"widget","n":"other"}}}}"#,
        Value::from(query)
    );
    assert_eq!(
        call("POST", "/graphql", &twice).verdict(&rules(&[])),
        "-graphql-read"
    );
}

#[test]
fn body_other_than_one_document_is_refused() {
    let fine = r#"{ repository(owner: "acme", name: "widget") { id } }"#;
    for (body, expected) in [
        (json!({"query": fine}), "+graphql-read"),
        (
            json!({"query": fine, "operationName": null, "variables": null}),
            "+graphql-read",
        ),
        (json!([{"query": fine}]), "-graphql-read"),
        (json!([]), "-graphql-read"),
        (json!({}), "-graphql-read"),
        (json!({"id": "x"}), "-graphql-read"),
        (json!({"query": null}), "-graphql-read"),
        (json!({"query": [fine]}), "-graphql-read"),
        (
            json!({"query": fine, "extensions": {"persistedQuery": {"sha256Hash": "x"}}}),
            "-graphql-read",
        ),
        (
            json!({"extensions": {"persistedQuery": {"sha256Hash": "x"}}}),
            "-graphql-read",
        ),
        (json!({"query": fine, "documentId": "x"}), "-graphql-read"),
        (json!({"query": fine, "operationName": 1}), "-graphql-read"),
    ] {
        assert_eq!(send(&rules(&[]), &body), expected, "{body}");
    }
    for body in ["", "{", "query", "{\"query\":\"{__typename}\"", "\0"] {
        let verdict = call("POST", "/graphql", body).verdict(&rules(&[]));
        assert_eq!(verdict, "-graphql-read", "{body}");
    }
    let twice = r#"{"query":"{__typename}","query":"{viewer{login}}"}"#;
    assert_eq!(
        call("POST", "/graphql", twice).verdict(&rules(&[])),
        "-graphql-read"
    );
    let form = Call {
        content_type: Some("application/x-www-form-urlencoded"),
        ..call("POST", "/graphql", r#"{"query":"{__typename}"}"#)
    };
    assert_eq!(form.verdict(&rules(&[])), "-graphql-read");
    let raw = Call {
        content_type: Some("application/graphql"),
        ..call("POST", "/graphql", "{viewer{login}}")
    };
    assert_eq!(raw.verdict(&rules(&[])), "-graphql-read");
}

#[test]
fn queries_of_common_clients_are_allowed() {
    for selections in [
        "id name owner { login } hasIssuesEnabled viewerPermission defaultBranchRef { name }",
        "parent { id name owner { login } }",
        "pullRequests(first: 30, states: [OPEN]) { totalCount nodes { number title state url \
         headRefName headRepositoryOwner { id login ... on User { name } } isCrossRepository \
         isDraft createdAt } pageInfo { hasNextPage endCursor } }",
        "pullRequest(number: 1) { id body additions author { login ... on User { id name } } \
         comments(first: 100) { nodes { id author { login } body reactionGroups { content users \
         { totalCount } } } } reviewRequests(first: 9) { nodes { requestedReviewer { __typename \
         ... on User { login } ... on Team { organization { login } name slug } } } } statusCheckRollup: commits(last: 1) \
         { nodes { commit { statusCheckRollup { contexts(first: 9) { nodes { __typename ... on \
         StatusContext { context state targetUrl } ... on CheckRun { name status conclusion \
         checkSuite { workflowRun { workflow { name } } } } } } } } } } mergeCommit { oid } \
         reviewThreads(first: 1) { edges { node { isResolved } } } }",
        "issue(number: 1) { title labels(first: 9) { nodes { name color } } assignees(first: 9) \
         { nodes { login } } milestone { title dueOn } }",
        "object(expression: \"HEAD:src\") { ... on Tree { entries { name type object { ... on \
         Blob { text byteSize } } } } }",
        "ref(qualifiedName: \"refs/heads/main\") { target { ... on Commit { history(first: 3) \
         { nodes { oid messageHeadline author { name email user { login } } } } } } }",
        "releases(first: 1) { nodes { tagName name isPrerelease releaseAssets(first: 9) { nodes \
         { name downloadUrl } } } }",
        "labels(first: 100) { nodes { id name } } assignableUsers(first: 9) { nodes { login } }",
    ] {
        assert_eq!(
            repository_verdict(selections),
            "+graphql-read",
            "{selections}"
        );
    }
}

#[test]
fn selection_outside_the_repository_is_refused() {
    for selections in [
        "tempCloneToken",
        "owner { repositories(first: 9) { nodes { name } } }",
        "owner { repository(name: \"other\") { id } }",
        "owner { ... on Organization { membersWithRole { totalCount } } }",
        "owner { ... on User { gists(first: 1) { totalCount } } }",
        "owner { ... on User { issues(first: 1) { nodes { title } } } }",
        "owner { ... on User { pullRequests(first: 1) { nodes { title } } } }",
        "owner { ... on User { organization(login: \"x\") { id } } }",
        "forks(first: 9) { nodes { name } }",
        "parent { object(expression: \"HEAD:secret\") { id } }",
        "parent { parent { id } }",
        "parent { issues(first: 1) { totalCount } }",
        "source { id }",
        "templateRepository { object(expression: \"HEAD:a\") { id } }",
        "watchers { nodes { repositories { totalCount } } }",
        "owner { ... on Team { organization { repositories { totalCount } } } }",
        "deployKeys(first: 1) { nodes { key } }",
        "vulnerabilityAlerts(first: 1) { nodes { id } }",
        "collaborators(first: 1) { nodes { repositories { totalCount } } }",
        "projectsV2(first: 1) { nodes { items { totalCount } } }",
        "pullRequest(number: 1) { headRepository { object(expression: \"HEAD:a\") { id } } }",
        "pullRequest(number: 1) { closingIssuesReferences(first: 9) { nodes { title body } } }",
        "pullRequest(number: 1) { timelineItems(first: 9) { nodes { __typename } } }",
        "pullRequest(number: 1) { author { ... on User { repositories { totalCount } } } }",
        "pullRequest(number: 1) { author { ... on User { repository(name: \"x\") { id } } } }",
        "pullRequest(number: 1) { baseRepository { forks { totalCount } } }",
        "pullRequest(number: 1) { repository { issues(first: 1) { nodes { title } } } }",
        "pullRequest(number: 1) { bodyHTML }",
        "issue(number: 1) { subIssues(first: 1) { nodes { title } } }",
        "issue(number: 1) { trackedIssues(first: 1) { nodes { title } } }",
        "issue(number: 1) { parent { title } }",
        "issue(number: 1) { projectItems(first: 1) { nodes { project { items { totalCount } } } } }",
        "issue(number: 1) { projectItems(first: 1) { nodes { project { owner { id } } } } }",
        "issue(number: 1) { projectItems(first: 1) { nodes { project { repositories { totalCount } } } } }",
        "issue(number: 1) { projectItems(first: 1) { nodes { content { title } } } }",
        "issue(number: 1) { projectCards(first: 1) { nodes { note } } }",
        "pullRequest(number: 1) { projectCards(first: 1) { nodes { column { cards { totalCount } } } } }",
        "issue(number: 1) { author { login ... on User { organizations { totalCount } } } }",
        "object(oid: \"x\") { ... on Commit { associatedPullRequests(first: 1) { totalCount } } }",
        "mentionableUsers(first: 1) { nodes { repositories { totalCount } } }",
        "viewer { login }",
        "a: owner { b: repositories { c: totalCount } }",
    ] {
        assert_eq!(
            repository_verdict(selections),
            "-graphql-read",
            "{selections}"
        );
    }
}

#[test]
fn fragment_is_checked_where_it_is_spread() {
    let repository = |inner: &str, fragments: &str| {
        verdict_of(&format!(
            r#"{{ repository(owner: "acme", name: "widget") {{ {inner} }} }} {fragments}"#
        ))
    };
    for (inner, fragments, expected) in [
        ("...F", "fragment F on Repository { id name }", "+"),
        (
            "...F",
            "fragment F on Repository { ...G } fragment G on Repository { id }",
            "+",
        ),
        (
            "...F ... on Repository { ...F }",
            "fragment F on Repository { id }",
            "+",
        ),
        (
            "...F",
            "fragment F on Repository { ...G } fragment G on Repository { ...F }",
            "-",
        ),
        ("...F", "fragment F on Repository { ...F }", "-"),
        ("...F", "", "-"),
        ("id", "fragment F on Repository { id }", "-"),
        (
            "...F",
            "fragment F on Repository { id } fragment F on Repository { name }",
            "-",
        ),
        (
            "...F",
            "fragment F on Repository { owner { ...G } } fragment G on User { repositories { totalCount } }",
            "-",
        ),
        // `issues` is allowed on the repository, but on a user the field leads to other
        // repositories.
        (
            "...F owner { ...F }",
            "fragment F on X { issues { totalCount } }",
            "-",
        ),
        ("...on", "", "-"),
    ] {
        let verdict = repository(inner, fragments);
        assert!(
            verdict.starts_with(expected),
            "{inner} {fragments}: {verdict}"
        );
    }
    assert!(verdict_of("{ ...R } fragment R on Query { viewer { login } }").starts_with('-'));
    let rooted =
        r#"{ ...R } fragment R on Query { repository(owner: "acme", name: "widget") { id } }"#;
    assert_eq!(verdict_of(rooted), "+graphql-read");
}

#[test]
fn huge_document_is_refused_in_time() {
    // Each fragment doubles the one before it.
    let mut bomb = String::from(r#"{ repository(owner: "acme", name: "widget") { ...F0 } }"#);
    for index in 0..40 {
        let next = index + 1;
        bomb += &format!(" fragment F{index} on Repository {{ ...F{next} ...F{next} }}");
    }
    bomb += " fragment F40 on Repository { id }";
    assert_eq!(verdict_of(&bomb), "-graphql-read");
    // A long chain of fragments, none of which is nested deeply.
    let mut chain = String::from(r#"{ repository(owner: "acme", name: "widget") { ...F0 } }"#);
    for index in 0..800 {
        let next = index + 1;
        chain += &format!(" fragment F{index} on Repository {{ ...F{next} }}");
    }
    chain += " fragment F800 on Repository { id }";
    assert_eq!(verdict_of(&chain), "-graphql-read");
    for levels in [49, 200, 5_000, 100_000] {
        assert_eq!(
            repository_verdict(&"issue { ".repeat(levels)),
            "-graphql-read"
        );
        let closed = format!("{}id{}", "issue { ".repeat(levels), " }".repeat(levels));
        assert_eq!(repository_verdict(&closed), "-graphql-read");
        let list = format!(
            "issue(a: {}{}) {{ id }}",
            "[".repeat(levels),
            "]".repeat(levels)
        );
        assert_eq!(repository_verdict(&list), "-graphql-read");
        let object = format!(
            "issue(a: {}1{}) {{ id }}",
            "{a: ".repeat(levels),
            "}".repeat(levels)
        );
        assert_eq!(repository_verdict(&object), "-graphql-read");
        let kind = format!(
            "query($a: {}Int{}) {{ rateLimit {{ cost }} }}",
            "[".repeat(levels),
            "]".repeat(levels)
        );
        assert_eq!(verdict_of(&kind), "-graphql-read");
    }
    assert_eq!(repository_verdict(&"id ".repeat(20_000)), "-graphql-read");
    assert_eq!(verdict_of(&"query($a:".repeat(3_000)), "-graphql-read");
    assert_eq!(verdict_of(&"\"".repeat(100_001)), "-graphql-read");
}

#[test]
fn mutations_need_their_rules() {
    let comment = r#"mutation { addComment(input: {subjectId: "x", body: "b"}) { commentEdge { node { url } } } }"#;
    assert_eq!(verdict_of(comment), "-graphql-mutations");
    let open = rules(&["graphql-mutations"]);
    let verdict_of = |query: &str, variables: Value| {
        send(&open, &json!({"query": query, "variables": variables}))
    };
    assert_eq!(verdict_of(comment, json!({})), "+graphql-mutations");
    for (query, input, expected) in [
        (
            "createPullRequest",
            json!({"repositoryId": "R", "baseRefName": "main", "headRefName": "h", "title": "t"}),
            "+graphql-mutations",
        ),
        (
            "createPullRequest",
            json!({"repositoryId": "R", "surprise": 1}),
            "-graphql-mutations",
        ),
        (
            "updatePullRequest",
            json!({"pullRequestId": "P", "title": "t"}),
            "+graphql-mutations",
        ),
        (
            "updatePullRequest",
            json!({"pullRequestId": "P", "state": "CLOSED"}),
            "-close",
        ),
        (
            "updateIssue",
            json!({"id": "I", "body": "b"}),
            "+graphql-mutations",
        ),
        ("updateIssue", json!({"id": "I", "state": "OPEN"}), "-close"),
        ("updateIssue", json!(null), "-graphql-mutations"),
        ("closeIssue", json!({"issueId": "I"}), "-close"),
        ("reopenPullRequest", json!({"pullRequestId": "I"}), "-close"),
        (
            "addPullRequestReview",
            json!({"pullRequestId": "P", "event": "COMMENT"}),
            "+graphql-mutations",
        ),
        (
            "addPullRequestReview",
            json!({"pullRequestId": "P", "event": "APPROVE"}),
            "-review-verdicts",
        ),
        (
            "submitPullRequestReview",
            json!({"pullRequestId": "P", "event": "REQUEST_CHANGES"}),
            "-review-verdicts",
        ),
        (
            "submitPullRequestReview",
            json!({"pullRequestId": "P", "event": "DISMISS"}),
            "-review-verdicts",
        ),
        ("dismissPullRequestReview", json!({}), "-review-verdicts"),
        (
            "addLabelsToLabelable",
            json!({"labelableId": "P", "labelIds": []}),
            "+graphql-mutations",
        ),
        ("mergePullRequest", json!({"pullRequestId": "P"}), "-merge"),
        (
            "enablePullRequestAutoMerge",
            json!({"pullRequestId": "P"}),
            "-merge",
        ),
        ("mergeBranch", json!({}), "-merges"),
        ("createRef", json!({}), "-refs"),
        ("deleteRef", json!({}), "-refs"),
        ("createCommitOnBranch", json!({}), "-contents"),
        ("updateRepository", json!({}), "-settings"),
        ("addStar", json!({}), "-graphql-mutations"),
        ("transferIssue", json!({}), "-graphql-mutations"),
        ("createRepository", json!({}), "-graphql-mutations"),
        ("cloneTemplateRepository", json!({}), "-graphql-mutations"),
    ] {
        let document = format!(
            "mutation M($input: X!) {{ a: {query}(input: $input) {{ clientMutationId }} }}"
        );
        assert_eq!(
            verdict_of(&document, json!({"input": input})),
            expected,
            "{query} {input}"
        );
        let spread = format!(
            "mutation M($input: X!) {{ ...F }} fragment F on Mutation {{ {query}(input: $input) {{ clientMutationId }} }}"
        );
        assert_eq!(
            verdict_of(&spread, json!({"input": input})),
            expected,
            "{query} {input}"
        );
    }
    for (query, expected) in [
        (
            r#"mutation { updatePullRequest(input: {pullRequestId: "P", state: CLOSED}) { clientMutationId } }"#,
            "-close",
        ),
        (
            r#"mutation($s: S) { updatePullRequest(input: {pullRequestId: "P", state: $s}) { clientMutationId } }"#,
            "-close",
        ),
        (
            r#"mutation { addPullRequestReview(input: {pullRequestId: "P", event: COMMENT}) { clientMutationId } }"#,
            "+graphql-mutations",
        ),
        (
            r#"mutation { addPullRequestReview(input: {pullRequestId: "P", event: APPROVE}) { clientMutationId } }"#,
            "-review-verdicts",
        ),
        (
            r#"mutation { addPullRequestReview(input: {pullRequestId: "P", event: COMMENT, event: APPROVE}) { clientMutationId } }"#,
            "-graphql-read",
        ),
        (
            r#"mutation($e: E) { addPullRequestReview(input: {pullRequestId: "P", event: $e}) { clientMutationId } }"#,
            "-review-verdicts",
        ),
        (
            r#"mutation { updatePullRequest(input: $gone) { clientMutationId } }"#,
            "-graphql-mutations",
        ),
        (
            r#"mutation { updatePullRequest { clientMutationId } }"#,
            "-graphql-mutations",
        ),
        (
            r#"mutation { addComment(input: {}) { subject { ... on Issue { body } } } }"#,
            "-graphql-read",
        ),
        (
            r#"mutation { addComment(input: {}) { clientMutationId } mergePullRequest(input: {}) { clientMutationId } }"#,
            "-merge",
        ),
        (
            r#"query Q { __typename } mutation M { addStar(input: {}) { clientMutationId } }"#,
            "-graphql-mutations",
        ),
        (
            r#"mutation { repository(owner: "acme", name: "widget") { id } }"#,
            "-graphql-mutations",
        ),
    ] {
        assert_eq!(verdict_of(query, json!({})), expected, "{query}");
    }
}

#[test]
fn viewer_needs_rule_and_shows_identity_only() {
    let open = rules(&["read-user"]);
    let verdict_of = |query: &str| send(&open, &json!({ "query": query }));
    assert_eq!(verdict_of("{ viewer { login } }"), "+graphql-read");
    // The query by which `gh` finds the current repository.
    let network = r#"
        fragment repo on Repository {
            id name owner { login } viewerPermission defaultBranchRef { name } isPrivate
        }
        query Network {
            viewer { login }
            repo_000: repository(owner: "acme", name: "widget") { ...repo parent { ...repo } }
        }"#;
    assert_eq!(verdict_of(network), "+graphql-read");
    assert_eq!(verdict_of("{ viewer { email } }"), "-graphql-read");
    assert_eq!(
        verdict_of("{ viewer { repositories { totalCount } } }"),
        "-graphql-read"
    );
    let closed = send(&rules(&[]), &json!({"query": "{ viewer { login } }"}));
    assert_eq!(closed, "-read-user");
}
