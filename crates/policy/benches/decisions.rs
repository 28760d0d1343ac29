//! How long the decisions on every request take. The aims, on one core of a laptop: a
//! lookup among 10 000 hosts below 200 ns, a token below 100 ns.

#![expect(
    clippy::expect_used,
    reason = "a bench whose input is wrong should stop at once"
)]

use std::hint::black_box;

use criterion::{BatchSize, Criterion, criterion_group, criterion_main};
use policy::allowlist::{Allowlist, HostRule, Target};
use policy::breaker::{Breaker, BreakerConfig, Outcome};
use policy::bucket::{Rate, TokenBucket};
use policy::clock::Tick;
use policy::endpoint::{EndpointRule, EndpointRules, Method, MethodSet, PathPattern};
use policy::host::{Host, HostPattern};
use policy::id::SandboxId;
use policy::path::CleanPath;
use policy::window::SlidingWindow;

fn host(text: &str) -> Host {
    Host::parse(text).expect("a host")
}

/// 10 000 rules: three exact names for each wildcard, of different depths.
fn list() -> Allowlist {
    let rules = (0..10_000).map(|place| {
        let text = match place % 4 {
            0 => format!("*.zone-{place}.example.com"),
            1 => format!("api.host-{place}.example.net"),
            2 => format!("host-{place}.example"),
            _ => format!("cdn-{place}.assets.region-{}.example.org", place % 17),
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
    let mut window = SlidingWindow::<10>::new(std::time::Duration::from_secs(1));
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
                breaker.settle(&config, ticket, Outcome::Success, now);
            }
        });
    });
}

criterion_group!(decisions, bench_allowlist, bench_parsing, bench_limits);
criterion_main!(decisions);
