//! Benchmarks of the decisions that every request needs. The goals on one core of a laptop: a
//! lookup among 10 000 hosts in less than 200 ns, a token of a bucket in less than 100 ns.

#![expect(
    clippy::expect_used,
    reason = "a bench whose input is wrong should stop at once"
)]

use std::hint::black_box;
use std::time::{Duration, Instant};

use criterion::{BatchSize, Criterion, criterion_group, criterion_main};
use policy::allowlist::{Allowlist, HostRule, Target};
use policy::breaker::{Breaker, BreakerConfig, UpstreamOutcome};
use policy::bucket::{Rate, TokenBucket};
use policy::clock::Tick;
use policy::endpoint::{EndpointRule, EndpointRules, Method, MethodSet, PathPattern};
use policy::github::{GithubRequest, GithubRules};
use policy::host::{Host, HostPattern};
use policy::id::SandboxId;
use policy::path::CleanPath;
use policy::registration::{Repo, RepoName};
use policy::rego::{Budget, Bundle, Decision, Module};
use policy::window::SlidingWindow;

fn host(text: &str) -> Host {
    Host::parse(text).expect("a host")
}

/// 10 000 rules: three exact names for each wildcard, of different depths.
fn list() -> Allowlist {
    let rules = (0..10_000).map(|index| {
        let text = match index % 4 {
            0 => format!("*.zone-{index}.example.com"),
            1 => format!("api.host-{index}.example.net"),
            2 => format!("host-{index}.example"),
            _ => format!("cdn-{index}.assets.region-{}.example.org", index % 17),
        };
        let mut rule = HostRule::new(HostPattern::parse(&text).expect("a pattern"));
        let paths = ["/v1/**", "/repos/*/*/pulls", "/healthz"]
            .map(|text| PathPattern::parse(text).expect("a pattern"));
        rule.endpoints = EndpointRules {
            allow: vec![EndpointRule {
                methods: MethodSet::parse(["GET", "POST"]).expect("methods"),
                paths: paths.into(),
            }],
            deny: vec![EndpointRule {
                methods: MethodSet::ANY,
                paths: vec![PathPattern::parse("/v1/admin/**").expect("a pattern")],
            }],
        };
        rule
    });
    Allowlist::new(rules.collect())
}

fn bench_allowlist(c: &mut Criterion) {
    let list = list();
    for (name, text) in [
        ("lookup exact", "api.host-5001.example.net"),
        ("lookup wildcard", "a.b.zone-5000.example.com"),
        ("lookup miss", "exfiltrate.attacker.example.com"),
        ("lookup miss, short", "attacker.test"),
        ("lookup miss, deepest name", &("a.".repeat(126) + "b")),
    ] {
        let host = host(text);
        c.bench_function(name, |b| {
            b.iter(|| list.lookup(black_box(&host)).is_some());
        });
    }

    let target = Target {
        sandbox: SandboxId::parse("sandbox").expect("an id"),
        method: Method::parse("GET").expect("a method"),
        host: host("a.zone-5000.example.com"),
        port: 443,
        path: CleanPath::parse("/repos/owner/name/pulls?state=open").expect("a path"),
        program: None,
    };
    c.bench_function("judge", |b| {
        b.iter_batched(
            || target.clone(),
            |target| list.judge(black_box(target)).is_ok(),
            BatchSize::SmallInput,
        );
    });
}

fn bench_parsing(c: &mut Criterion) {
    for (name, text) in [
        (
            "parse path, plain",
            "/repos/owner/name/pulls/123/files?per_page=100",
        ),
        (
            "parse path, encoded",
            "/a//b/./%63/../@scope%2Fname/%C3%A9?q=%20",
        ),
    ] {
        c.bench_function(name, |b| {
            b.iter(|| CleanPath::parse(black_box(text)).is_ok());
        });
    }
    c.bench_function("parse host", |b| {
        b.iter(|| Host::parse(black_box("api.host-5001.example.net")).is_ok());
    });
}

fn bench_github(c: &mut Criterion) {
    let rules = GithubRules::new(&[], false).expect("rules");
    let repos = [Repo {
        name: RepoName::parse("owner/name").expect("a repository"),
        max_receive_pack_bytes: None,
    }];
    let host = host("api.github.com");
    let query = br#"{"query":"{ repository(owner: \"owner\", name: \"name\") { pullRequests(first: 9) { nodes { number title author { login } } } } }"}"#;
    for (name, method, path, body) in [
        (
            "github read",
            "GET",
            "/repos/owner/name/pulls/123/files?per_page=100",
            None,
        ),
        (
            "github refusal",
            "PUT",
            "/repos/owner/name/pulls/123/merge",
            None,
        ),
        ("github query", "POST", "/graphql", Some(query.as_slice())),
    ] {
        let method = Method::parse(method).expect("a method");
        let path = CleanPath::parse(path).expect("a path");
        let request = GithubRequest {
            method: &method,
            host: &host,
            path: &path,
            has_method_override: false,
            content_type: body.map(|_| "application/json"),
            body,
            repos: &repos,
        };
        c.bench_function(name, |b| {
            b.iter(|| rules.judge(black_box(&request)).is_ok());
        });
    }
}

fn bench_limits(c: &mut Criterion) {
    let rate = Rate::new(100.0, 200).expect("a rate");
    let mut bucket = TokenBucket::new();
    let mut nanos = 0;
    c.bench_function("bucket take", |b| {
        b.iter(|| {
            nanos += 5_000_000;
            bucket
                .take(&rate, Tick::from_nanos(black_box(nanos)))
                .is_ok()
        });
    });
    let mut window = SlidingWindow::<10>::new(Duration::from_secs(1));
    c.bench_function("window take", |b| {
        b.iter(|| {
            nanos += 50_000_000;
            window.take(Tick::from_nanos(black_box(nanos))).is_ok()
        });
    });
    let config = BreakerConfig::default();
    let mut breaker = Breaker::new(0);
    c.bench_function("breaker admit and settle", |b| {
        b.iter(|| {
            let now = Tick::from_nanos(black_box(nanos));
            if let Ok(ticket) = breaker.admit(&config, now) {
                breaker.settle(&config, ticket, UpstreamOutcome::Success, now);
            }
        });
    });
}

/// Fifty typical rules, of which the last one matches.
fn bench_rego(c: &mut Criterion) {
    let mut text = String::from("package http.authz\ndefault allow := false\n");
    for n in 0..10 {
        text += &format!(
            r#"
allow if {{ input.method == "GET"; input.host == "host-{n}.example" }}
allow if {{ startswith(input.path, "/v{n}/"); input.port == 8443 }}
allow if {{ input.host in data.hosts; input.method == "M{n}" }}
allow if {{ some repo in input.registration.repos; contains(input.path, sprintf("/%s/{n}", [repo])) }}
allow if {{ glob.match("*.zone-{n}.example", ["."], input.host); not input.headers["x-no"] }}
"#
        );
    }
    text += "allow if input.segments[0] == \"last\"\n";
    let module = Module {
        name: "policy.rego".to_owned(),
        text,
    };
    let hosts: Vec<String> = (0..100).map(|n| format!("known-{n}.example")).collect();
    let data = serde_json::json!({ "hosts": hosts });
    let bundle = Bundle::compile("b", "http/authz", &[module], &data).expect("a bundle");
    let input = serde_json::json!({
        "kind": "http", "sandbox": "fix-1", "method": "POST", "scheme": "https",
        "host": "api.example", "port": 443, "path": "/last/1", "raw_path": "/last/1",
        "segments": ["last", "1"],
        "headers": {"accept": "*/*", "user-agent": "a client", "content-type": "text/plain",
            "authorization": "redacted", "content-length": "12"},
        "program": null, "rule": "allowlist:api.example",
        "registration": {"repos": ["owner/one", "owner/two"], "auth_mode": "user", "metadata": {}},
    });
    let budget = Budget::with_time_limit(Duration::from_millis(50));
    let decided = bundle.decide(&input, budget);
    assert!(matches!(decided, Decision::Allow(_)), "{decided:?}");
    c.bench_function("rego 50 rules", |b| {
        b.iter(|| bundle.decide(black_box(&input), budget));
    });
    // Percentiles, because the mean hides occasional slow evaluations.
    let mut took: Vec<Duration> = (0..20_000)
        .map(|_| {
            let begun = Instant::now();
            black_box(bundle.decide(black_box(&input), budget));
            begun.elapsed()
        })
        .collect();
    took.sort_unstable();
    let at = |share: usize| {
        took.get(took.len() * share / 1000)
            .copied()
            .unwrap_or_default()
    };
    println!(
        "rego 50 rules: p50 {:?}, p99 {:?}, p99.9 {:?}",
        at(500),
        at(990),
        at(999)
    );
}

criterion_group!(
    decisions,
    bench_allowlist,
    bench_parsing,
    bench_github,
    bench_limits,
    bench_rego
);
criterion_main!(decisions);
