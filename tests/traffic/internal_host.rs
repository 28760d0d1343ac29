//! Issue 14, number 4: requests to `palisade.internal` are rate-limited like all other requests,
//! and an agent cannot flood the gate's log with them.

use testkit::output;
use testkit::wait;

use crate::traffic_fixture::{Agent, Rules, TrafficFixture, describe};

/// The first line of a fetch in the git protocol.
const FETCH: &str = r"0031git-upload-pack /none\0host=palisade.internal\0";

fn with_agent(policy: &str, check: impl FnOnce(&TrafficFixture, &Agent<'_>)) {
    let fixture = TrafficFixture::new();
    fixture.write(&Rules::new().allow("api.example").policy(policy));
    let agent = fixture.create("fix");
    check(&fixture, &agent);
}

#[test]
fn internal_responses_are_rate_limited_on_every_route() {
    // No token is refilled during the test.
    let limits = "rate_limits:\n  defaults: {requests_per_second: 0.001, burst_size: 3}\n";
    with_agent(limits, |fixture, agent| {
        // Requests to unknown hosts do not use the tokens for the gate.
        for _ in 0..3 {
            let got = agent.curl("http://denied.example/");
            got.refused(403, "host_denied");
        }
        agent
            .curl("http://denied.example/")
            .refused(429, "rate_limited");
        for _ in 0..3 {
            assert_eq!(agent.curl("http://palisade.internal/health").status, 200);
        }
        for url in [
            "http://palisade.internal/health",
            "--noproxy '*' http://palisade.internal/allowlist",
            "--noproxy '*' --http2 https://palisade.internal/health",
            "--proxytunnel http://palisade.internal/",
            "http://palisade.internal/why/00000000000000000000000000",
            "http://palisade.internal/mcp/none",
            "-d '{}' http://palisade.internal/mcp/none",
            "http://palisade.internal/git/",
            "http://palisade.internal/nothing",
        ] {
            let got = agent.curl(url);
            let id = got.refused(429, "rate_limited");
            let body = got.json();
            assert_eq!(body["error"], "Rate limit exceeded", "{url}");
            assert_eq!(body["container_id"], agent.id.as_str(), "{url}");
            assert_eq!(body["upstream"], "palisade.internal", "{url}");
            let record = fixture.record(&id);
            assert_eq!(
                (&record["stage"], &record["host"], &record["status"]),
                (&"rate".into(), &"palisade.internal".into(), &429.into()),
                "{url}"
            );
        }
        // The refusal has the form that git shows.
        let url = "http://palisade.internal/git/none/info/refs?service=git-upload-pack";
        let got = agent.curl(&format!("'{url}'"));
        assert_eq!(got.status, 429, "{got:?}");
        assert!(got.body.contains("rate_limited"), "{got:?}");
        let line = format!("exec 3<>/dev/tcp/192.0.2.7/9418; printf '{FETCH}' >&3; cat <&3");
        let output = agent.bash(&line);
        let printed = output::stdout(&output);
        assert!(printed.contains("rate_limited"), "{}", describe(&output));
    });
}

#[test]
fn log_flood_is_suppressed_per_sandbox() {
    with_agent("rate_limits: {enabled: false}\n", |fixture, one| {
        let codes = one.stdout_of(
            "curl -sS -o /dev/null -w '%{http_code}\\n' 'http://palisade.internal/mcp/[1-1000]'",
        );
        assert_eq!(codes.matches("404").count(), 1000, "{codes}");
        let log = fixture.gate_dir.state().join("gate.log");
        let lines_with = |what: &str| {
            let log = std::fs::read_to_string(&log).unwrap();
            let lines = log.lines().filter(|line| line.contains(what));
            lines.map(str::to_owned).collect::<Vec<_>>()
        };
        // A log line after the flood.
        let two = fixture.create("two");
        wait::until("the next line", || lines_with(&two.id).pop());
        let missing = "unknown tool";
        let written = lines_with(missing);
        assert!((1..500).contains(&written.len()), "{} lines", written.len());
        assert!(written.iter().all(|line| line.contains(&one.id)));

        assert_eq!(two.curl("http://palisade.internal/mcp/none").status, 404);
        wait::until("the other sandbox's line", || {
            let mut lines = lines_with(missing).into_iter();
            lines.find(|line| line.contains(&two.id))
        });
        let summary = wait::until("a summary", || {
            lines_with("similar log lines suppressed").pop()
        });
        assert!(
            summary.contains(missing) && summary.contains(&one.id),
            "{summary}"
        );
    });
}
