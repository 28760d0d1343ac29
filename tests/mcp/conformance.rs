//! `@modelcontextprotocol/conformance` against the bridge in front of the fixture server.

use std::collections::BTreeMap;
use std::path::Path;

use serde_json::Value;
use testkit::mcp::peers;
use testkit::output;

use crate::bridge::{Bridge, node, test_file};

/// Runs the scenarios that a revision requires. Returns how many passed, and the total.
fn run_suite(revision: &str) -> (usize, usize) {
    let bridge = Bridge::with_fixture();
    let _gate = bridge.start();
    let results = bridge.path("results");
    let output = node()
        .arg(peers().join("node_modules/.bin/conformance"))
        .args(["server", "--requirements", revision, "--url"])
        .arg(bridge.url("fixture"))
        .arg("--expected-failures")
        .arg(test_file("expected-failures.yaml"))
        .arg("--output-dir")
        .arg(&results)
        .output()
        .unwrap();
    let scenarios = scenarios(&output::stdout(&output));
    let required = required(revision);
    let passed = required
        .iter()
        .filter(|name| scenarios.get(*name) == Some(&true));
    let passed = passed.count();
    assert!(
        output.status.success(),
        "{passed} of {} passed\n{}\n{}",
        required.len(),
        output::stdout(&output),
        failed_checks(&results),
    );
    (passed, required.len())
}

/// The lines of the summary: each scenario, and whether it passed.
fn scenarios(stdout: &str) -> BTreeMap<String, bool> {
    let summary = stdout.split("=== SUMMARY ===").nth(1).unwrap_or("");
    let lines = summary.lines().filter_map(|line| {
        let (mark, rest) = line.split_once(' ')?;
        let (name, _) = rest.split_once(": ")?;
        match mark {
            "✓" => Some((name.to_owned(), true)),
            "✗" => Some((name.to_owned(), false)),
            _ => None,
        }
    });
    lines.collect()
}

/// The scenarios that a revision requires of a server, from the suite's own list.
fn required(revision: &str) -> Vec<String> {
    let file =
        format!("node_modules/@modelcontextprotocol/conformance/requirements/{revision}.yaml");
    let text = std::fs::read_to_string(peers().join(file)).unwrap();
    let lines = text.lines().skip_while(|line| *line != "server:").skip(1);
    let names = lines.map_while(|line| line.strip_prefix("  - "));
    names.map(str::to_owned).collect()
}

/// Every failed check, with the message of the suite.
fn failed_checks(results: &Path) -> String {
    let mut report = String::new();
    for entry in std::fs::read_dir(results).into_iter().flatten().flatten() {
        let checks = std::fs::read(entry.path().join("checks.json")).unwrap_or_default();
        let checks: Vec<Value> = serde_json::from_slice(&checks).unwrap_or_default();
        for check in checks {
            if check["status"] == "FAILURE" || check["status"] == "WARNING" {
                let scenario = entry.file_name();
                report += &format!(
                    "{}: {} {}: {}\n",
                    scenario.to_string_lossy(),
                    check["status"],
                    check["id"],
                    check["errorMessage"]
                );
            }
        }
    }
    report
}

#[test]
fn conformance_suite_of_2025_11_25_passes() {
    assert_eq!(run_suite("2025-11-25"), (30, 30));
}

#[test]
fn conformance_suite_of_2026_07_28_passes() {
    let (passed, all) = run_suite("2026-07-28");
    assert_eq!(all, 37);
    assert!(passed >= 34, "{passed} of {all}");
}

#[test]
fn conformance_summary_is_parsed() {
    let stdout = "✓ before: 1 passed\n=== SUMMARY ===\n✓ ping: 2 passed, 0 failed\n\
                ✗ dns-rebinding-protection: 1 passed, 1 failed\n\nTotal: 3 passed, 1 failed\n";
    let expected = [("dns-rebinding-protection", false), ("ping", true)];
    let expected = expected.map(|(name, passed)| (name.to_owned(), passed));
    assert_eq!(scenarios(stdout), BTreeMap::from(expected));
}
