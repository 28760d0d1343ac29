//! The gate adds the token of the git host to fetches and pushes.

use http::header::AUTHORIZATION;

use crate::git_fixture::{APP, FORGE, FixtureOptions, GitFixture};

/// Base64 of 'x-access-token:forge-token-5e9c'.
const BASIC: &str = "Basic eC1hY2Nlc3MtdG9rZW46Zm9yZ2UtdG9rZW4tNWU5Yw==";

#[test]
fn fetches_and_pushes_of_registered_repositories_get_the_token() {
    let fixture = GitFixture::with_options(FixtureOptions {
        git: "  read_public: true\n",
        top: "credentials: {default: [forge], rows: [{name: forge, host: forge.example, \
              scheme: 'Basic:x-access-token', source: 'command:echo forge-token-5e9c'}]}",
        checked: true,
        ..FixtureOptions::default()
    });
    let dir = fixture.working_copy("work");
    fixture.commit(&dir, "new.txt", "text\n");
    fixture.git_in(&dir, &["push", "-q", "origin", "HEAD:refs/heads/feature"]);
    fixture.git_in(&dir, &["fetch", "-q", APP]);
    assert!(fixture.refs("acme/app").contains("refs/heads/feature"));
    let sent = fixture.forge.requests();
    let is_push = |target: &str| target.contains("git-receive-pack");
    assert!(sent.iter().any(|request| is_push(&request.target)));
    for request in &sent {
        let header = request.headers.get(AUTHORIZATION).unwrap();
        assert_eq!(header, BASIC, "{} {}", request.method, request.target);
    }
    // A repository that is only public is read without the token.
    fixture.create_bare("other/public", &[]);
    let url = format!("{FORGE}/other/public.git");
    fixture.git_in(&fixture.path(""), &["ls-remote", &url]);
    let public = fixture.forge.requests().split_off(sent.len());
    assert!(!public.is_empty());
    assert!(
        public
            .iter()
            .all(|request| !request.headers.contains_key(AUTHORIZATION))
    );
    let records = fixture.records();
    let pushes = records
        .iter()
        .filter(|record| record["operation"] == "push");
    let named: Vec<_> = pushes.map(|record| record["credential"].clone()).collect();
    assert!(
        !named.is_empty() && named.iter().all(|name| name == "forge"),
        "{named:?}"
    );
}
