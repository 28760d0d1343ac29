//! Compares docs/observability.md with the metrics of the binary: the page lists every metric, and
//! its alerts can fire.

use std::collections::{BTreeMap, BTreeSet};

use testkit::origin::{OriginReply, OriginServer};
use testkit::wait;

use crate::shared_network::{Net, create_net_with};
use crate::traffic_fixture::TrafficFixture;

const PAGE: &str = include_str!("../../docs/observability.md");

/// One line of the metrics: name, labels and value.
#[derive(Debug)]
struct Sample {
    name: String,
    labels: BTreeMap<String, String>,
    value: f64,
}

fn samples(metrics: &str) -> Vec<Sample> {
    let lines = metrics.lines().filter(|line| !line.starts_with('#'));
    lines.map(read_sample).collect()
}

fn read_sample(line: &str) -> Sample {
    let (series, value) = line.rsplit_once(' ').unwrap();
    let (name, labels) = match series.split_once('{') {
        None => (series, BTreeMap::new()),
        Some((name, labels)) => (name, read_labels(labels.strip_suffix('}').unwrap())),
    };
    Sample {
        name: name.to_owned(),
        labels,
        value: value.parse().unwrap(),
    }
}

/// Parses labels of the form `a="b",c="d"`. The values contain no quotes and no commas.
fn read_labels(text: &str) -> BTreeMap<String, String> {
    let pairs = text.split(',').filter(|pair| !pair.is_empty());
    let pairs = pairs.map(|pair| pair.split_once('=').unwrap());
    let pairs = pairs.map(|(name, value)| (name.to_owned(), value.trim_matches('"').to_owned()));
    pairs.collect()
}

/// An alert's expression: its selectors, and the labels it groups by.
#[derive(Debug)]
struct Alert {
    selectors: Vec<Selector>,
    grouped_by: Vec<String>,
}

/// `name{label="value",label=~"5.."}`.
#[derive(Debug)]
struct Selector {
    name: String,
    /// Each label and its pattern, in which a dot stands for any character.
    matchers: Vec<(String, String)>,
}

impl Selector {
    fn selects(&self, sample: &Sample) -> bool {
        self.name == sample.name
            && self.matchers.iter().all(|(label, pattern)| {
                let value = sample.labels.get(label).map_or("", String::as_str);
                let matches =
                    |(expected, found): (char, char)| expected == '.' || expected == found;
                value.len() == pattern.len() && pattern.chars().zip(value.chars()).all(matches)
            })
    }
}

/// The alerts of the page, by name.
fn alerts() -> BTreeMap<String, Alert> {
    let mut alerts = BTreeMap::new();
    let mut name = "";
    for line in PAGE.lines().map(str::trim) {
        if let Some(alert_name) = line.strip_prefix("- alert: ") {
            name = alert_name;
        } else if let Some(expression) = line.strip_prefix("expr: ") {
            alerts.insert(name.to_owned(), read_alert(expression));
        }
    }
    alerts
}

fn read_alert(expression: &str) -> Alert {
    let is_name = |c: char| c.is_ascii_alphanumeric() || c == '_';
    let mut selectors = Vec::new();
    for (at, _) in expression.match_indices("proxy_") {
        let rest = &expression[at..];
        let end = rest.find(|c| !is_name(c)).unwrap_or(rest.len());
        let matchers = rest[end..].strip_prefix('{').map_or("", |rest| {
            let (matchers, _) = rest.split_once('}').unwrap();
            matchers
        });
        let matchers = matchers.split(',').filter(|matcher| !matcher.is_empty());
        let matchers = matchers.map(|matcher| {
            let (label, pattern) = matcher.split_once('=').unwrap();
            let pattern = pattern.trim_start_matches('~').trim_matches('"');
            assert!(pattern.chars().all(|c| is_name(c) || c == '.'), "{matcher}");
            (label.to_owned(), pattern.to_owned())
        });
        selectors.push(Selector {
            name: rest[..end].to_owned(),
            matchers: matchers.collect(),
        });
    }
    let grouped_by = expression.split("by (").skip(1).flat_map(|rest| {
        let (labels, _) = rest.split_once(')').unwrap();
        labels.split(", ").map(str::to_owned).collect::<Vec<_>>()
    });
    Alert {
        selectors,
        grouped_by: grouped_by.collect(),
    }
}

/// A network with traffic that meets the condition of every alert: responses of status 5xx, a git
/// host that fails, requests over the rate, and an open circuit breaker.
fn net_with_failures() -> (Net, [OriginServer; 3]) {
    let fixture = TrafficFixture::new();
    let forge = fixture.https(&["github.com"], |_| OriginReply::status(502));
    let failing = OriginServer::http(|_| OriginReply::status(500));
    let slow = OriginServer::http(|_| OriginReply::text("hello"));
    let net = create_net_with(fixture, |rules| {
        rules
            .allow("github.com")
            .at("github.com", forge.address())
            .allow("failing.example")
            .at("failing.example:80", failing.address())
            .allow("\"*.wild.example\"")
            .at("slow.wild.example:80", slow.address())
            .policy(
                "circuit_breakers:\n  defaults: {failure_threshold: 2, recovery_timeout: 10m, \
                 success_threshold: 1}\nrate_limits:\n  per_upstream:\n    \
                 slow.wild.example: {requests_per_second: 0.001, burst_size: 1}\n",
            )
    });
    net.register("one", "127.0.0.2", &["--repo", "acme/app"]);
    let status = |target: &str| net.curl("127.0.0.2", target).status;
    assert_eq!(status("http://failing.example/"), 500);
    assert_eq!(status("http://failing.example/"), 500);
    assert_eq!(
        status("http://failing.example/"),
        503,
        "the breaker is open"
    );
    let refs = "'https://github.com/acme/app/info/refs?service=git-upload-pack'";
    assert_eq!(status(refs), 502);
    assert_eq!(status("http://slow.wild.example/"), 200);
    assert_eq!(status("http://slow.wild.example/"), 429);
    (net, [forge, failing, slow])
}

// Issue 15, number 15.
#[test]
fn seed_003_alerts_select_series_that_failures_raise() {
    let (net, _origins) = net_with_failures();
    let alerts = alerts();
    let names: Vec<&str> = alerts.keys().map(String::as_str).collect();
    assert_eq!(
        names,
        [
            "PalisadeCircuitBreakerOpen",
            "PalisadeGitFailures",
            "PalisadeHighErrorRate",
            "PalisadeRateLimitRejections",
        ]
    );
    for (name, alert) in &alerts {
        assert!(!alert.selectors.is_empty(), "{name}: {alert:?}");
        for selector in &alert.selectors {
            // The record of a request is written after its response.
            let raised = || {
                let samples = samples(&net.fixture.metrics());
                let selected: Vec<Sample> = samples
                    .into_iter()
                    .filter(|sample| selector.selects(sample))
                    .collect();
                let is_raised = selected.iter().any(|sample| sample.value > 0.0);
                is_raised.then_some(selected)
            };
            let selected = wait::until_or(raised, || {
                format!("{name}: {selector:?} in\n{}", net.fixture.metrics())
            });
            for sample in selected {
                for label in &alert.grouped_by {
                    assert!(sample.labels.contains_key(label), "{name}: {sample:?}");
                }
            }
        }
    }
    // Labels name the upstream and the sandbox, also below a wildcard.
    let metrics = net.fixture.metrics();
    for line in [
        "proxy_rate_limit_rejected_total{container_id=\"one\",upstream=\"slow.wild.example\"} 1",
        "proxy_circuit_breaker_state{container_id=\"one\",upstream=\"failing.example\"} 1",
        "proxy_circuit_breaker_failures_total{upstream=\"failing.example\"} 2",
        "proxy_git_operations_total{operation=\"advertise_fetch\",verdict=\"allow\",outcome=\"failed\"} 1",
    ] {
        assert!(
            metrics.lines().any(|found| found == line),
            "no {line} in\n{metrics}"
        );
    }
}

/// The rows of the page's tables of metrics: name, and labels.
fn catalogue() -> BTreeMap<String, BTreeSet<String>> {
    let rows = PAGE.lines().filter_map(|line| {
        let mut cells = line.strip_prefix("| `")?.split(" | ");
        let name = cells.next()?.trim_end_matches('`');
        let labels = cells.nth(1)?.split(", ");
        let labels = labels.filter(|label| label.starts_with('`'));
        let labels = labels.map(|label| label.trim_matches('`').to_owned());
        is_catalogued(name).then(|| (name.to_owned(), labels.collect()))
    });
    rows.collect()
}

/// Whether this page lists the metric. The metrics of tool calls have their own page.
fn is_catalogued(name: &str) -> bool {
    name.starts_with("proxy_") || name.starts_with("palisade_")
}

/// Metrics that have no series, and are not declared, before their first event.
const INITIALLY_ABSENT: [&str; 4] = [
    "palisade_task_restarts_total",
    "proxy_alerts_total",
    "proxy_dns_queries_total",
    "proxy_git_push_blocked_total",
];

// Issue 15, number 15.
#[test]
fn observability_page_lists_every_metric_with_its_labels() {
    let (net, _origins) = net_with_failures();
    let catalogue = catalogue();
    let metrics = net.fixture.metrics();
    let mut found: BTreeSet<String> = INITIALLY_ABSENT.map(str::to_owned).into();
    for line in metrics.lines() {
        let Some(declared) = line.strip_prefix("# TYPE ") else {
            continue;
        };
        let (name, kind) = declared.split_once(' ').unwrap();
        let suffix = match kind {
            "counter" => "_total",
            "info" => "_info",
            _ => "",
        };
        if is_catalogued(name) {
            found.insert(format!("{name}{suffix}"));
        }
    }
    assert_eq!(catalogue.keys().cloned().collect::<BTreeSet<_>>(), found);
    for sample in samples(&metrics) {
        let histogram = ["_sum", "_count", "_bucket"]
            .iter()
            .find_map(|suffix| sample.name.strip_suffix(suffix));
        let name = histogram.unwrap_or(&sample.name);
        if let Some(documented) = catalogue.get(name) {
            let labels = sample.labels.into_keys().filter(|label| label != "le");
            assert_eq!(labels.collect::<BTreeSet<_>>(), *documented, "{name}");
        }
    }
}
