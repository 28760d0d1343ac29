use super::*;

const NOW: Tick = Tick::from_nanos(1);

/// Settings with a wildcard, below which two hosts have their own limits.
fn settings() -> Settings {
    let directory = tempfile::tempdir().unwrap();
    let write = |name: &str, text: &str| {
        let path = directory.path().join(name);
        std::fs::write(&path, text).unwrap();
        path
    };
    write(
        "policy.yaml",
        "circuit_breakers:\n  defaults: {failure_threshold: 1, recovery_timeout: 60s, \
         success_threshold: 1}\n  upstreams: {broken.wild.test: {}}\n\
         rate_limits:\n  defaults: {requests_per_second: 1, burst_size: 2}\n  \
         per_upstream: {slow.wild.test: {requests_per_second: 1, burst_size: 1}}\n",
    );
    let text = "version: '1.0'\negress:\n  policy: policy.yaml\n  \
                domains: [exact.test, '*.wild.test']\n";
    config::load(Some(&write("palisade.yaml", text)), &|_| None).unwrap()
}

fn host(text: &str) -> Host {
    Host::parse(text).unwrap()
}

#[test]
fn labels_come_only_from_the_configuration() {
    let settings = settings();
    for (name, expected) in [
        ("exact.test", "exact.test"),
        ("slow.wild.test", "slow.wild.test"),
        ("broken.wild.test", "broken.wild.test"),
        ("invented-by-an-agent.wild.test", "*.wild.test"),
        ("invented-by-an-agent.test", OTHER),
        ("192.0.2.7", OTHER),
        (GATE_HOST, GATE_HOST),
    ] {
        assert_eq!(label(&settings, &host(name)), expected);
    }
}

#[test]
fn rejections_are_counted_by_label_and_start_at_zero() {
    let settings = settings();
    let upstreams = UpstreamLimits::default();
    let take = |name: &str| upstreams.take(&settings, &host(name), NOW).is_ok();
    let rejected = |label: &str| {
        let readings = upstreams.readings(&settings, NOW);
        readings.get(label).map(|reading| reading.rejected)
    };
    assert_eq!(rejected(OTHER), Some(0));
    assert!(take("exact.test"));
    assert_eq!(rejected("exact.test"), Some(0));
    assert!(take("slow.wild.test") && !take("slow.wild.test"));
    for number in 0..10 {
        take(&format!("n{number}.unknown.test"));
    }
    assert_eq!(rejected("slow.wild.test"), Some(1));
    assert_eq!(rejected(OTHER), Some(8));
    assert_eq!(rejected("*.wild.test"), None);
}

#[test]
fn hosts_below_a_wildcard_are_shown_by_their_worst_state() {
    let settings = settings();
    let upstreams = UpstreamLimits::default();
    for (name, outcome) in [
        ("a.wild.test", UpstreamOutcome::Success),
        ("b.wild.test", UpstreamOutcome::Failure),
        ("c.wild.test", UpstreamOutcome::Success),
    ] {
        let name = host(name);
        let _pass = upstreams.take(&settings, &name, NOW).unwrap();
        let ticket = upstreams.admit(&settings, &name, NOW).unwrap();
        upstreams.settle(&settings, &name, ticket, outcome, NOW);
    }
    let readings = upstreams.readings(&settings, NOW);
    let expected = HostReading {
        tokens: 1,
        state: BreakerState::Open,
    };
    assert_eq!(readings["*.wild.test"].hosts, Some(expected));
    assert_eq!(readings[OTHER].hosts, None);
}
