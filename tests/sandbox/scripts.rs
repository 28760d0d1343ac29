//! What scripts rely on: JSON on stdout, help that helps.

use serde_json::Value;
use testkit::said;

use crate::bench::{Bench, told};

for_every_operator!(
    json_has_the_fields_that_are_documented,
    every_command_has_help
);

fn assert_fields(value: &Value, fields: &[&str]) {
    let found: Vec<&String> = value
        .as_object()
        .map(|map| map.keys().collect())
        .unwrap_or_default();
    for field in fields {
        assert!(found.iter().any(|name| name == field), "{field}: {value}");
    }
}

fn json_has_the_fields_that_are_documented(bench: &Bench) {
    let sandbox = [
        "id",
        "name",
        "branch_name",
        "container_id",
        "status",
        "reason",
        "backend",
        "repository",
        "base",
        "created_at",
        "warnings",
    ];
    let head = bench.repo.git(&["rev-parse", "HEAD"]);
    let created = bench.json(&["create", "fix"]);
    assert_fields(&created, &sandbox);
    let repository = bench.repo.dir().canonicalize().unwrap();
    assert_eq!(created["name"], "fix");
    assert_eq!(created["status"], "active");
    assert_eq!(created["branch_name"], "palisade/fix");
    assert_eq!(created["base"], head.as_str());
    assert_eq!(created["repository"], repository.to_str().unwrap());
    assert_eq!(bench.json(&["list"]), serde_json::json!([created]));

    bench.says(
        "fix",
        "echo hi > new.txt; printf 'x' >> README.md; echo x > .envrc",
    );
    let snapshot = bench.json(&["snapshot", "fix", "-m", "words"]);
    assert_fields(&snapshot, &["tip", "moved", "skipped"]);
    assert_eq!(snapshot["moved"], true);
    let tip = bench.repo.git(&["rev-parse", "palisade/fix"]);
    assert_eq!(snapshot["tip"], tip.as_str());

    let diff = bench.json(&["diff", "fix"]);
    assert_fields(&diff, &["base", "tip", "files", "steering", "patch", "cut"]);
    assert_eq!(
        (&diff["base"], &diff["tip"]),
        (&head.as_str().into(), &tip.as_str().into())
    );
    assert_eq!(diff["steering"][0]["path"], ".envrc");
    let fields = [
        "path",
        "renamed_from",
        "kind",
        "mode_changed",
        "added",
        "removed",
        "binary",
    ];
    for file in diff["files"].as_array().unwrap() {
        assert_fields(file, &fields);
    }
    let files: Vec<(&str, &str)> = diff["files"]
        .as_array()
        .unwrap()
        .iter()
        .map(|file| {
            (
                file["kind"].as_str().unwrap(),
                file["path"].as_str().unwrap(),
            )
        })
        .collect();
    assert_eq!(
        files,
        [("A", ".envrc"), ("M", "README.md"), ("A", "new.txt")]
    );

    let log = bench.json(&["log", "fix"]);
    assert_eq!(log.as_array().unwrap().len(), 1, "{log}");
    assert_fields(&log[0], &["commit", "parents", "author", "time", "subject"]);
    assert_eq!(
        (&log[0]["commit"], &log[0]["subject"]),
        (&tip.as_str().into(), &"words".into())
    );

    assert_eq!(bench.json(&["pause", "fix"])["status"], "paused");
    assert_eq!(bench.json(&["resume", "fix"])["status"], "active");
    let merged = bench.json(&["merge", "--yes", "fix"]);
    assert_fields(&merged, &["commit", "moved", "paths"]);
    assert_eq!(
        (&merged["commit"], &merged["moved"]),
        (&tip.as_str().into(), &true.into())
    );
    bench.says("fix", "echo more > more.txt");
    let applied = bench.json(&["apply", "fix"]);
    assert_eq!(applied["paths"], serde_json::json!(["more.txt"]));
    let deleted = bench.json(&["delete", "-f", "fix"]);
    assert_fields(&deleted, &["status", "id", "name", "branch_name", "tip"]);
    assert_eq!(
        (&deleted["status"], &deleted["id"]),
        (&"deleted".into(), &created["id"])
    );
    assert_eq!(bench.json(&["list"]), serde_json::json!([]));
}

fn every_command_has_help(bench: &Bench) {
    for command in [
        "run", "create", "list", "shell", "exec", "pause", "resume", "delete", "diff", "log",
        "merge", "apply", "snapshot",
    ] {
        let output = bench.run(&[command, "--help"]);
        assert!(output.status.success(), "{}", told(&output));
        let help = said::out(&output);
        let first = help.lines().next().unwrap_or_default();
        assert!(
            first.len() > 10 && first.chars().next().is_some_and(char::is_uppercase),
            "{command}: {first:?}"
        );
        assert!(
            help.contains(&format!("Usage: palisade {command}")),
            "{help}"
        );
        let list = bench.ok(&["--help"]);
        assert!(
            list.lines()
                .any(|line| line.trim_start().starts_with(command)),
            "{command}"
        );
    }
}
