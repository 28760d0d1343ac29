//! Two sandboxes of one gate share nothing but the rules.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use testkit::origin::{OriginReply, OriginServer};
use testkit::wait;

use crate::traffic_fixture::{Agent, Rules, TrafficFixture, text};

const API: &str = "https://api.example/v1";

fn with_two(policy: &str, check: impl FnOnce(&OriginServer, &Agent<'_>, &Agent<'_>)) {
    let fixture = TrafficFixture::new();
    let api = fixture.https_http1(&["api.example"], |request| match request.path() {
        "/fails" => OriginReply::status(500),
        _ => OriginReply::text("hello"),
    });
    let rules = Rules::new()
        .allow("api.example")
        .at("api.example", api.address())
        .policy(policy);
    fixture.write(&rules);
    let (one, two) = (fixture.create("one"), fixture.create("two"));
    check(&api, &one, &two);
}

#[test]
fn rate_limit_of_one_sandbox_does_not_affect_another() {
    let limits = "rate_limits:\n  defaults: {requests_per_second: 1, burst_size: 3}\n";
    with_two(limits, |_, one, two| {
        let codes = one.stdout_of(&format!(
            "curl -sS -o /dev/null -w '%{{http_code}} ' '{API}?[1-12]'"
        ));
        assert!(codes.contains("429"), "{codes}");
        assert_eq!(two.curl(API).status, 200);
    });
}

#[test]
fn open_breaker_of_one_sandbox_does_not_affect_another() {
    let breakers = "circuit_breakers:\n  defaults: {failure_threshold: 2, recovery_timeout: 60s, success_threshold: 1}\n";
    with_two(breakers, |_, one, two| {
        for _ in 0..2 {
            assert_eq!(one.curl("https://api.example/fails").status, 500);
        }
        assert_eq!(one.curl(API).status, 503);
        assert_eq!(two.curl(API).status, 200);
    });
}

#[test]
fn upstream_connections_are_not_shared_between_sandboxes() {
    with_two("", |api, one, two| {
        for _ in 0..2 {
            assert_eq!(one.curl(&format!("-A one {API}")).status, 200);
            assert_eq!(two.curl(&format!("-A two {API}")).status, 200);
        }
        let connection_of = |name: &str| -> Vec<usize> {
            let requests = api.requests();
            let own = requests
                .iter()
                .filter(|request| request.header("user-agent") == Some(name));
            own.map(|request| request.connection).collect()
        };
        let (ones, twos) = (connection_of("one"), connection_of("two"));
        assert_eq!((ones.len(), twos.len()), (2, 2));
        assert!(
            ones.iter().all(|used| !twos.contains(used)),
            "{ones:?} {twos:?}"
        );
        assert_eq!(ones[0], ones[1], "a sandbox reuses its own connection");
    });
}

#[test]
fn dns_queries_of_one_sandbox_reveal_nothing_to_another() {
    with_two("", |_, one, two| {
        let look_up =
            |agent: &Agent<'_>, name: &str| agent.stdout_of(&format!("dig +short {name} A"));
        let first = look_up(two, "first.example");
        assert!(
            first.starts_with("198.18.") || first.starts_with("198.19."),
            "{first}"
        );
        // Queries of another sandbox do not change the addresses that a sandbox receives.
        let lines: Vec<String> = (0..20).map(|n| format!("n{n}.example A")).collect();
        one.stdout_of(&format!(
            "printf '%s\\n' {} | dig +short -f -",
            lines
                .iter()
                .map(|line| format!("'{line}'"))
                .collect::<Vec<_>>()
                .join(" ")
        ));
        let fixture = one.fixture;
        let three = fixture.create("three");
        let four = fixture.create("four");
        look_up(&three, "a.example");
        let after_one = look_up(&three, "b.example");
        look_up(&four, "a.example");
        look_up(one, "between.example");
        assert_eq!(look_up(&four, "b.example"), after_one);
        // An address cannot be resolved to the name of the other sandbox.
        let got = two.curl(&format!("http://{}/", look_up(one, "api.example")));
        got.refused(403, "ip_literal");
    });
}

#[test]
fn concurrent_requests_are_recorded_with_their_own_sandbox() {
    with_two("", |_, one, two| {
        let run = |agent: &Agent<'_>, name: &str| {
            agent.stdout_of(&format!(
                "curl -sS -o /dev/null -w '' -Z --parallel-max 8 'https://api.example/of/{name}/[1-20]' \
                 'http://denied.example/of/{name}/[1-20]' -o /dev/null"
            ));
        };
        std::thread::scope(|scope| {
            scope.spawn(|| run(one, "one"));
            scope.spawn(|| run(two, "two"));
        });
        let find_records = || {
            let records = one.fixture.records();
            let found: Vec<_> = records
                .into_iter()
                .filter(|record| text(&record["path"]).starts_with("/of/"))
                .collect();
            let count: u64 = found
                .iter()
                .map(|record| record["count"].as_u64().unwrap_or(1))
                .sum();
            (count == 80).then_some(found)
        };
        for record in wait::until("a record of each request", find_records) {
            let own = if text(&record["path"]).starts_with("/of/one/") {
                one
            } else {
                two
            };
            assert_eq!(record["sandbox"], own.id.as_str(), "{record}");
        }
    });
}

#[test]
fn flooding_sandbox_does_not_delay_another() {
    if !crate::traffic_fixture::may_enter() {
        return;
    }
    with_two("", |_, one, two| {
        let namespace = one.namespace();
        let stop = Arc::new(AtomicBool::new(false));
        let floods: Vec<_> = (0..4)
            .map(|_| {
                let (namespace, stop) = (namespace.clone(), Arc::clone(&stop));
                std::thread::spawn(move || {
                    let mut passed = 0_u64;
                    while !stop.load(Ordering::SeqCst) {
                        let mut stream = namespace.port(80);
                        for _ in 0..200 {
                            crate::traffic_fixture::exchange(
                                &mut stream,
                                crate::traffic_fixture::get("denied.example", "/"),
                            );
                            passed += 1;
                        }
                    }
                    passed
                })
            })
            .collect();
        for _ in 0..5 {
            assert_eq!(two.curl(API).status, 200);
        }
        stop.store(true, Ordering::SeqCst);
        let flooded: u64 = floods.into_iter().map(|flood| flood.join().unwrap()).sum();
        assert!(flooded > 100, "{flooded}");
    });
}
