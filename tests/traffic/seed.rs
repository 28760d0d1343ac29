//! The verification list of seed 003, line by line: the lines about traffic. The lines about git
//! are in tests/git/seed.rs.

use std::collections::HashMap;
use std::net::Ipv4Addr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU16, Ordering};

use serde_json::{Value, json};
use testkit::origin::{OriginReply, OriginServer};
use testkit::port::Port;
use testkit::resolver::{self, RecordData, Resolver, record};
use testkit::{output, wait};

use crate::traffic_fixture::{Agent, Rules, TrafficFixture, describe, text};

const API: &str = "https://api.example/v1/messages";

fn with_api(rules: impl FnOnce(Rules) -> Rules, check: impl FnOnce(&OriginServer, &Agent<'_>)) {
    let fixture = TrafficFixture::new();
    let api = fixture.https(&["api.example"], |request| {
        OriginReply::text(request.path().to_owned())
    });
    let base_rules = Rules::new()
        .allow("api.example")
        .at("api.example", api.address());
    fixture.write(&rules(base_rules));
    let agent = fixture.create("fix");
    check(&api, &agent);
}

#[test]
fn seed_003_line_05_allowed_api_is_reached() {
    with_api(
        |rules| rules,
        |api, agent| {
            let got = agent.curl(&format!("-d '{{\"a\":1}}' {API}"));
            assert_eq!((got.status, got.body.as_str()), (200, "/v1/messages"));
            let request = &api.requests()[0];
            assert_eq!(
                (request.method.as_str(), &request.body[..]),
                ("POST", &b"{\"a\":1}"[..])
            );
        },
    );
}

#[test]
fn seed_003_line_07_restarted_gate_keeps_its_sandboxes() {
    with_api(
        |rules| rules,
        |_, agent| {
            assert_eq!(agent.curl(API).status, 200);
            let rows =
                |fixture: &TrafficFixture| fixture.control("GET", "/internal/containers").json();
            let before = rows(agent.fixture);
            agent.fixture.ok(&["gate", "restart"]);
            assert_eq!(agent.curl(API).status, 200);
            assert_eq!(rows(agent.fixture), before);
            // A killed gate also keeps its sandboxes.
            let status = std::process::Command::new("kill")
                .args(["-9", &agent.fixture.gate().to_string()])
                .status();
            assert!(status.unwrap().success());
            agent.fixture.ok(&["gate", "start"]);
            assert_eq!(agent.curl(API).status, 200);
            assert_eq!(rows(agent.fixture), before);
        },
    );
}

fn with_names(check: impl FnOnce(&Resolver, &Agent<'_>)) {
    let upstream = Resolver::start();
    let a = |name: &str| {
        let records = vec![record(name, RecordData::A(Ipv4Addr::new(203, 0, 113, 7)))];
        resolver::DnsReply::Records(records)
    };
    for name in ["api.example", "evil.example", "deep.evil.example"] {
        upstream.set_reply(name, 1, a(name));
    }
    let fixture = TrafficFixture::new();
    let at = upstream.address();
    let rules = Rules::new()
        .allow("api.example")
        .egress(&format!("dns: {{mode: forward, upstreams: [\"{at}\"]}}"));
    fixture.write(&rules);
    let agent = fixture.create("fix");
    check(&upstream, &agent);
}

#[test]
fn seed_003_line_08_listed_name_is_resolved() {
    with_names(|_, agent| {
        for flags in ["", "+tcp", "+noedns"] {
            let printed = agent.stdout_of(&format!("dig +short {flags} @192.0.0.1 api.example"));
            assert_eq!(printed, "203.0.113.7", "{flags}");
        }
        // The gate answers for every resolver address.
        assert_eq!(
            agent.stdout_of("dig +short @198.51.100.53 API.example."),
            "203.0.113.7"
        );
    });
}

#[test]
fn seed_003_line_09_other_name_does_not_exist() {
    with_names(|upstream, agent| {
        for name in ["evil.example", "deep.evil.example", "x.api.example"] {
            for flags in ["", "+tcp"] {
                let printed = agent.stdout_of(&format!("dig {flags} @192.0.0.1 {name}"));
                assert!(printed.contains("status: NXDOMAIN"), "{name}: {printed}");
                assert!(!printed.contains("203.0.113"), "{name}: {printed}");
            }
        }
        let dns_queries = upstream.queries();
        assert!(dns_queries.is_empty(), "{dns_queries:?}");
        let denied = || {
            let records = agent.fixture.records();
            let mut records = records.iter();
            records
                .find(|record| record["kind"] == "dns" && record["host"] == "evil.example")
                .cloned()
        };
        let found = wait::until("a record of the query", denied);
        assert_eq!(found["verdict"], "deny", "{found}");
        assert_eq!(found["sandbox"], agent.id.as_str(), "{found}");
    });
}

/// The series of a metric: labels and value.
fn series(metrics: &str, name: &str) -> HashMap<String, f64> {
    let lines = metrics.lines().filter(|line| {
        let rest = line.strip_prefix(name);
        rest.is_some_and(|rest| rest.starts_with(['{', ' ']))
    });
    lines
        .map(|line| {
            let (labels, value) = line.rsplit_once(' ').unwrap();
            (labels.to_owned(), value.parse().unwrap())
        })
        .collect()
}

#[test]
fn seed_003_line_10_metrics_are_read_on_the_control_socket() {
    with_api(
        |rules| rules,
        |_, agent| {
            assert_eq!(agent.curl(API).status, 200);
            agent
                .curl("https://evil.example/a/raw/path")
                .refused(403, "host_denied");
            let counted = || {
                let metrics = agent.fixture.metrics();
                let requests = series(&metrics, "proxy_requests_total");
                (requests.values().sum::<f64>() >= 2.0).then_some(metrics)
            };
            let metrics = wait::until("both requests to be counted", counted);
            for name in [
                "proxy_requests_total",
                "proxy_request_duration_seconds_count",
                "proxy_dns_queries_total",
                "proxy_rate_limit_rejected_total",
                "proxy_rate_limit_bucket_tokens",
                "proxy_circuit_breaker_state",
                "proxy_circuit_breaker_failures_total",
                "proxy_registered_containers",
                "proxy_stage_duration_seconds_count",
            ] {
                assert!(
                    !series(&metrics, name).is_empty(),
                    "{name} is missing:\n{metrics}"
                );
            }
            let rows = series(&metrics, "proxy_registered_containers");
            assert_eq!(rows.values().sum::<f64>(), 1.0, "{rows:?}");
            let failures = series(&metrics, "proxy_circuit_breaker_failures_total");
            let expected = "proxy_circuit_breaker_failures_total{upstream=\"api.example\"}";
            assert_eq!(failures.get(expected), Some(&0.0), "{failures:?}");
            assert!(
                !metrics.contains("evil"),
                "a name that is not listed:\n{metrics}"
            );
            assert!(!metrics.contains("raw/path"), "a raw path:\n{metrics}");
        },
    );
}

#[test]
fn seed_003_line_11_health_is_read_on_the_control_socket() {
    with_api(
        |rules| rules,
        |_, agent| {
            let health = agent.fixture.control("GET", "/internal/health");
            assert_eq!(health.status, 200);
            assert_eq!(health.json()["status"], "healthy", "{}", health.text());
        },
    );
}

#[test]
fn seed_003_line_12_container_id_is_never_sent_upstream() {
    with_api(
        |rules| rules,
        |api, agent| {
            let own = format!("-H 'X-Container-Id: {}'", agent.id);
            for flags in [
                "",
                "--http2",
                "--http1.1 -H 'Connection: X-Container-Id'",
                "-x http://192.0.0.1:8080",
            ] {
                assert_eq!(
                    agent.curl(&format!("{flags} {own} {API}")).status,
                    200,
                    "{flags}"
                );
            }
            assert_eq!(api.requests().len(), 4);
            for request in api.requests() {
                assert!(!format!("{request:?}").contains(&agent.id), "{request:?}");
            }
        },
    );
}

/// Runs `check` with an API whose status the test sets, and a breaker with this recovery time.
fn with_failing(recovery: &str, check: impl FnOnce(&Arc<AtomicU16>, &OriginServer, &Agent<'_>)) {
    let fixture = TrafficFixture::new();
    let status = Arc::new(AtomicU16::new(500));
    let next_status = Arc::clone(&status);
    let api = fixture.https(&["api.example"], move |_| {
        OriginReply::status(next_status.load(Ordering::SeqCst))
    });
    let rules = Rules::new()
        .allow("{host: api.example, deny: [{paths: [/never]}]}")
        .at("api.example", api.address())
        .policy(&format!(
            "circuit_breakers:\n  defaults: {{failure_threshold: 3, recovery_timeout: {recovery}, \
             success_threshold: 2}}\n"
        ));
    fixture.write(&rules);
    let agent = fixture.create("fix");
    check(&status, &api, &agent);
}

#[test]
fn seed_003_line_13_open_breaker_answers_503_with_remaining_time() {
    with_failing("60s", |_, api, agent| {
        for _ in 0..3 {
            assert_eq!(agent.curl(API).status, 500);
        }
        let mut last = 60;
        for _ in 0..5 {
            let refused = agent.curl(API);
            assert_eq!(refused.status, 503, "{refused:?}");
            let body = refused.json();
            assert_eq!(body["error"], "Service temporarily unavailable", "{body}");
            assert_eq!(body["reason"], "circuit_breaker_open", "{body}");
            assert_eq!(body["upstream"], "api.example", "{body}");
            // The actual remaining time, which the refusals do not change.
            let left = body["retry_after"].as_u64().unwrap();
            assert!((1..=last).contains(&left), "{left} after {last}: {body}");
            last = left;
        }
        assert_eq!(
            api.requests().len(),
            3,
            "the upstream received no more requests"
        );
    });
}

#[test]
fn seed_003_line_13_breaker_closes_after_successful_probes() {
    with_failing("1s", |status, _, agent| {
        for _ in 0..3 {
            assert_eq!(agent.curl(API).status, 500);
        }
        status.store(200, Ordering::SeqCst);
        // Refusals in between do not keep the breaker from closing.
        wait::until("the breaker to let a probe pass", || {
            (agent.curl(API).status == 200).then_some(())
        });
        for _ in 0..5 {
            assert_eq!(agent.curl(API).status, 200);
        }
        // The breaker is closed again: a single failure is forwarded and does not open the breaker.
        status.store(500, Ordering::SeqCst);
        assert_eq!(agent.curl(API).status, 500);
        status.store(200, Ordering::SeqCst);
        assert_eq!(agent.curl(API).status, 200);
    });
}

/// The value of the only breaker: 0 closed, 1 open, 2 half-open.
fn breaker_gauge(fixture: &TrafficFixture) -> Option<f64> {
    let states = series(&fixture.metrics(), "proxy_circuit_breaker_state");
    states.into_values().next()
}

// Issue 14, number 17.
#[test]
fn breaker_gauge_reports_half_open_once_recovery_time_passed() {
    with_failing("1s", |_, api, agent| {
        for _ in 0..3 {
            assert_eq!(agent.curl(API).status, 500);
        }
        wait::until("the gauge to report half-open", || {
            (breaker_gauge(agent.fixture) == Some(2.0)).then_some(())
        });
        assert_eq!(api.requests().len(), 3, "no further request was sent");
    });
    with_failing("60s", |_, _, agent| {
        for _ in 0..3 {
            assert_eq!(agent.curl(API).status, 500);
        }
        assert_eq!(breaker_gauge(agent.fixture), Some(1.0));
    });
}

#[test]
fn seed_003_line_13_own_refusals_never_count() {
    with_failing("60s", |status, api, agent| {
        status.store(200, Ordering::SeqCst);
        for _ in 0..5 {
            agent
                .curl("https://api.example/never")
                .refused(403, "path_denied");
            agent
                .curl("-H 'Host: evil.example' https://api.example/")
                .refused(421, "name_mismatch");
            agent
                .curl("-H 'X-Container-Id: other' https://api.example/")
                .refused(403, "identity_mismatch");
        }
        // Errors of the client do not count either.
        status.store(404, Ordering::SeqCst);
        for _ in 0..5 {
            assert_eq!(agent.curl(API).status, 404);
        }
        assert_eq!(api.requests().len(), 5);
        status.store(500, Ordering::SeqCst);
        assert_eq!(agent.curl(API).status, 500);
        let failures = series(
            &agent.fixture.metrics(),
            "proxy_circuit_breaker_failures_total",
        );
        assert_eq!(failures.values().sum::<f64>(), 1.0, "{failures:?}");
    });
}

#[test]
fn seed_003_line_13_unreachable_upstream_counts_as_failure() {
    let fixture = TrafficFixture::new();
    let unused_port = Port::take();
    let rules = Rules::new()
        .allow("api.example")
        .at("api.example", unused_port.address())
        .policy("circuit_breakers:\n  defaults: {failure_threshold: 2, recovery_timeout: 60s, success_threshold: 1}\n");
    fixture.write(&rules);
    let agent = fixture.create("fix");
    for _ in 0..2 {
        agent.curl(API).refused(502, "connect_failed");
    }
    let refused = agent.curl(API);
    assert_eq!(refused.status, 503, "{refused:?}");
    let left = refused.json()["retry_after"].as_u64().unwrap();
    assert!((30..=60).contains(&left), "{refused:?}");
}

#[test]
fn seed_003_line_14_excess_requests_get_429_with_retry_after() {
    let limits = "rate_limits:\n  defaults: {requests_per_second: 1, burst_size: 20}\n";
    with_api(
        |rules| rules.policy(limits),
        |api, agent| {
            let urls = format!("'{API}?[1-40]'");
            let codes = agent.stdout_of(&format!(
                "curl -sS -o /dev/null -w '%{{http_code}}\\n' {urls} 2>/dev/null"
            ));
            let count = |code: &str| codes.lines().filter(|line| *line == code).count();
            let (passed, refused) = (count("200"), count("429"));
            assert_eq!(passed + refused, 40, "{codes}");
            assert!((20..40).contains(&passed), "{codes}");
            assert_eq!(api.requests().len(), passed);
            // One curl process sends all requests: another start could take as long as the refill
            // of a token.
            let drain_and_request = format!(
                "-o /dev/null -w '' '{API}?[1-20]' \
                 --next -sS --max-time 25 -i -w '\\n%{{http_code}}' {API}"
            );
            let got = wait::until("a refusal", || {
                Some(agent.curl(&drain_and_request)).filter(|got| got.status == 429)
            });
            let (head, body) = got
                .body
                .rsplit_once("\r\n\r\n")
                .or_else(|| got.body.split_once("\n\n"))
                .unwrap();
            assert!(
                head.to_ascii_lowercase().contains("retry-after: 1"),
                "{got:?}"
            );
            let body: Value = serde_json::from_str(body).unwrap();
            assert_eq!(body["error"], "Rate limit exceeded", "{body}");
            assert_eq!(text(&body["container_id"]), agent.id, "{body}");
            assert_eq!(body["upstream"], "api.example", "{body}");
            assert_eq!(body["retry_after"], 1, "{body}");
            assert_eq!(body["reason"], "rate_limited", "{body}");
            let rejected = series(&agent.fixture.metrics(), "proxy_rate_limit_rejected_total");
            let series = format!(
                "proxy_rate_limit_rejected_total{{container_id=\"{}\",upstream=\"api.example\"}}",
                agent.id
            );
            assert!(rejected[&series] >= 1.0, "{rejected:?}");
        },
    );
}

#[test]
fn seed_003_line_15_container_id_is_optional() {
    with_api(
        |rules| rules,
        |_, agent| {
            assert_eq!(
                agent
                    .curl(&format!("-x http://192.0.0.1:8080 {API}"))
                    .status,
                200
            );
            assert_eq!(agent.curl(API).status, 200);
        },
    );
}

#[test]
fn seed_003_line_16_wrong_container_id_is_refused() {
    with_api(
        |rules| rules,
        |api, agent| {
            let wrong = "-H 'X-Container-Id: wrong-id'";
            for flags in ["", "--http2", "-x http://192.0.0.1:8080"] {
                let got = agent.curl(&format!("{flags} {wrong} {API}"));
                got.refused(403, "identity_mismatch");
                assert_eq!(got.json()["error"], "Container ID mismatch");
            }
            let twice = format!(
                "-H 'X-Container-Id: {0}' -H 'X-Container-Id: {0}'",
                agent.id
            );
            agent
                .curl(&format!("{twice} {API}"))
                .refused(403, "identity_mismatch");
            assert!(api.requests().is_empty());
        },
    );
}

// Issue 15, number 17.
#[test]
fn seed_003_run_sets_the_push_limit_of_a_repository() {
    let fixture = TrafficFixture::new();
    let run = |repo: &str| {
        let args = [
            "run",
            "--name",
            "fix",
            "--no-repo",
            "--repo",
            repo,
            "--",
            "true",
        ];
        fixture.run(&args)
    };
    let refused = run("acme/app:501MiB");
    assert_eq!(refused.status.code(), Some(2), "{}", describe(&refused));
    let output = run("acme/app:500MiB");
    assert!(output.status.success(), "{}", describe(&output));
    fixture.ok(&[
        "registry",
        "add",
        "one",
        "--ip",
        "127.0.0.2",
        "--repo",
        "acme/app:500MiB",
        "--repo",
        "acme/other",
    ]);
    let rows = fixture.json(&["registry", "list"]);
    let rows = rows.as_array().unwrap();
    let limited = json!({"name": "acme/app", "max_receive_pack_bytes": 524_288_000});
    for row in rows {
        assert_eq!(row["repos"][0], limited, "{row}");
    }
    assert_eq!(rows.len(), 2);
    let shown = fixture.ok(&["registry", "list"]);
    assert!(shown.contains("acme/app:500MiB,acme/other"), "{shown}");
    // The next run of that name has the same limit, or is refused.
    let same = run("acme/app:500MiB");
    assert!(same.status.success(), "{}", describe(&same));
    let other = run("acme/app");
    assert_eq!(other.status.code(), Some(4), "{}", describe(&other));
    let printed = output::stderr(&other);
    assert!(
        printed.contains("the sandbox may use acme/app:500MiB"),
        "{printed}"
    );
}
