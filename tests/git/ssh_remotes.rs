//! Repositories whose origin is an ssh URL: inside a sandbox git uses HTTPS through the gate.

use crate::git_fixture::{APP, GitFixture, describe};

/// Issue 14, number 15.
#[test]
fn ssh_origins_are_fetched_and_pushed_over_https() {
    let fixture = GitFixture::new();
    let project = fixture.working_copy("project");
    for (index, origin) in [
        "git@forge.example:acme/app.git",
        "ssh://git@forge.example/acme/app",
        "ssh://deploy@forge.example:2222/acme/app.git",
        "Forge.Example:acme/app",
    ]
    .into_iter()
    .enumerate()
    {
        fixture.git_in(&project, &["remote", "set-url", "origin", origin]);
        let name = format!("agent-{index}");
        let created = fixture.operator_in(&project, &["create", &name]);
        assert!(created.status.success(), "{origin}: {}", describe(&created));
        let run_in_sandbox = |line: &str| {
            let output = fixture.operator(&["exec", &name, "--", "bash", "-c", line]);
            assert!(output.status.success(), "{origin}: {}", describe(&output));
            testkit::output::stdout(&output)
        };
        let url = run_in_sandbox("git ls-remote --get-url origin");
        assert!(url.starts_with(APP), "{origin}: {url}");
        let requests_before = fixture.forge.requests().len();
        run_in_sandbox("git fetch origin && git rev-parse refs/remotes/origin/main");
        assert!(fixture.forge.requests().len() > requests_before, "{origin}");
        run_in_sandbox(&format!(
            "git commit -q --allow-empty -m {name} && git push origin HEAD:refs/heads/{name}"
        ));
        let tip = run_in_sandbox("git rev-parse HEAD");
        let pushed = format!("refs/heads/{name} {}", tip.trim());
        assert!(fixture.refs("acme/app").contains(&pushed), "{origin}");
        // SSH URLs that an agent uses in commands are redirected, too.
        run_in_sandbox("git ls-remote git@forge.example:acme/app");
    }
}
