//! The interface for scripts: JSON on stdout, and the help texts.

use serde_json::Value;
use testkit::output;

use crate::sandbox_fixture::{SandboxFixture, describe};

for_every_operator!(
    json_output_has_the_documented_fields,
    every_command_has_help,
    run_json_prints_exactly_one_object,
    refusals_have_the_documented_exit_codes,
    help_example_of_each_command_works,
    missing_program_error_names_the_searched_paths,
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

fn json_output_has_the_documented_fields(fixture: &SandboxFixture) {
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
    let head = fixture.repo.git(&["rev-parse", "HEAD"]);
    let created = fixture.json(&["create", "fix"]);
    assert_fields(&created, &sandbox);
    let repository = fixture.repo.dir().canonicalize().unwrap();
    assert_eq!(created["name"], "fix");
    assert_eq!(created["status"], "active");
    assert_eq!(created["branch_name"], "palisade/fix");
    assert_eq!(created["base"], head.as_str());
    assert_eq!(created["repository"], repository.to_str().unwrap());
    // The additions of a repository's file are shown for one sandbox, not for a whole list.
    let mut listed = created.clone();
    let notes = listed.as_object_mut().unwrap().remove("notes");
    assert_eq!(notes, Some(serde_json::json!([])));
    assert_eq!(fixture.json(&["list"]), serde_json::json!([listed]));

    fixture.stdout_of(
        "fix",
        "echo hi > new.txt; printf 'x' >> README.md; echo x > .envrc",
    );
    let snapshot = fixture.json(&["snapshot", "fix", "-m", "words"]);
    assert_fields(&snapshot, &["tip", "moved", "skipped"]);
    assert_eq!(snapshot["moved"], true);
    let tip = fixture.repo.git(&["rev-parse", "palisade/fix"]);
    assert_eq!(snapshot["tip"], tip.as_str());

    let diff = fixture.json(&["diff", "fix"]);
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

    let log = fixture.json(&["log", "fix"]);
    assert_eq!(log.as_array().unwrap().len(), 1, "{log}");
    assert_fields(&log[0], &["commit", "parents", "author", "time", "subject"]);
    assert_eq!(
        (&log[0]["commit"], &log[0]["subject"]),
        (&tip.as_str().into(), &"words".into())
    );

    assert_eq!(fixture.json(&["pause", "fix"])["status"], "paused");
    assert_eq!(fixture.json(&["resume", "fix"])["status"], "active");
    let merged = fixture.json(&["merge", "--yes", "fix"]);
    assert_fields(&merged, &["commit", "moved", "paths"]);
    assert_eq!(
        (&merged["commit"], &merged["moved"]),
        (&tip.as_str().into(), &true.into())
    );
    fixture.stdout_of("fix", "echo more > more.txt");
    let applied = fixture.json(&["apply", "fix"]);
    assert_eq!(applied["paths"], serde_json::json!(["more.txt"]));
    let deleted = fixture.json(&["delete", "-f", "fix"]);
    assert_fields(&deleted, &["status", "id", "name", "branch_name", "tip"]);
    assert_eq!(
        (&deleted["status"], &deleted["id"]),
        (&"deleted".into(), &created["id"])
    );
    assert_eq!(fixture.json(&["list"]), serde_json::json!([]));
}

fn every_command_has_help(fixture: &SandboxFixture) {
    for command in [
        "run", "create", "list", "shell", "exec", "pause", "resume", "delete", "diff", "log",
        "merge", "apply", "snapshot",
    ] {
        let output = fixture.run(&[command, "--help"]);
        assert!(output.status.success(), "{}", describe(&output));
        let help = output::stdout(&output);
        let first = help.lines().next().unwrap_or_default();
        assert!(
            first.len() > 10 && first.chars().next().is_some_and(char::is_uppercase),
            "{command}: {first:?}"
        );
        assert!(
            help.contains(&format!("Usage: palisade {command}")),
            "{help}"
        );
        let list = fixture.ok(&["--help"]);
        assert!(
            list.lines()
                .any(|line| line.trim_start().starts_with(command)),
            "{command}"
        );
    }
}

fn run_json_prints_exactly_one_object(fixture: &SandboxFixture) {
    let line = "echo out; echo err >&2; echo hi > new.txt; echo more >> README.md; exit 3";
    let run = |args: &[&str]| {
        let output = fixture.run(&[&["run", "--json"], args].concat());
        let value: Value = serde_json::from_slice(&output.stdout)
            .unwrap_or_else(|error| panic!("{error}: {}", describe(&output)));
        (output, value)
    };
    let (output, value) = run(&["--name", "fix", "--", "bash", "-c", line]);
    assert_eq!(output.status.code(), Some(3), "{}", describe(&output));
    let talk = output::stderr(&output);
    assert!(talk.contains("out\n") && talk.contains("err\n"), "{talk}");
    let tip = fixture.repo.git(&["rev-parse", "palisade/fix"]);
    for (field, expected) in [
        ("name", "fix".into()),
        ("branch_name", "palisade/fix".into()),
        ("created", true.into()),
        ("kept", true.into()),
        ("exit_code", 3.into()),
        ("error", Value::Null),
        ("tip", tip.into()),
        ("commits", 1.into()),
        ("added", 2.into()),
        ("removed", 0.into()),
        ("refused", serde_json::json!([])),
    ] {
        assert_eq!(value[field], expected, "{field}: {value}");
    }
    let files = serde_json::json!([
        { "kind": "M", "path": "README.md" }, { "kind": "A", "path": "new.txt" },
    ]);
    assert_eq!(value["files"], files);
    // The result is also printed for refusals, and for a command that cannot be run.
    let reach = "exec 3<>/dev/tcp/192.0.2.7/443; printf '\\n\\n' >&3; head -c1 <&3; true";
    let (_, value) = run(&["--name", "fix", "--", "bash", "-c", reach]);
    assert_eq!(value["created"], false);
    assert_eq!(value["refused"][0]["host"], "192.0.2.7", "{value}");
    let (output, value) = run(&["--rm", "--no-repo", "--", "no-such-program"]);
    assert!(!output.status.success(), "{}", describe(&output));
    assert_eq!(value["exit_code"], Value::Null);
    assert_eq!(value["kept"], false);
    assert!(
        value["error"].as_str().unwrap().contains("no-such-program"),
        "{value}"
    );
}

fn refusals_have_the_documented_exit_codes(fixture: &SandboxFixture) {
    fixture.create("fix");
    fixture.stdout_of("fix", "echo hi > new.txt; mkdir sub; echo x > sub/file");
    let to = fixture.gate_dir.path().join("out");
    std::fs::create_dir(&to).unwrap();
    fixture.gate_dir.operator().chown(&to);
    let to = to.to_str().unwrap();
    fixture.fails(4, &["delete", "fix"]);
    fixture.fails(3, &["download", "fix", "no-such-file", to]);
    fixture.ok(&["download", "fix", "new.txt", to]);
    let complaint = fixture.fails(4, &["download", "fix", "new.txt", to]);
    assert!(complaint.contains("already exists"), "{complaint}");
    fixture.fails(3, &["upload", "fix", "no-such-file"]);
    fixture.ok(&["pause", "fix"]);
    fixture.fails(4, &["delete", "fix"]);
    for command in [
        &["exec", "fix", "--", "true"][..],
        &["shell", "fix", "-c", "true"],
        &["download", "fix", "new.txt"],
        &["upload", "fix", "README.md"],
    ] {
        let complaint = fixture.fails(4, command);
        assert!(complaint.contains("resume it first"), "{complaint}");
    }
    fixture.fails(6, &["create", "other", "--backend", "docker"]);
    let table = fixture.ok(&["--help"]);
    assert!(
        table.contains("4 already\nexists or wrong state"),
        "{table}"
    );
}

fn help_example_of_each_command_works(fixture: &SandboxFixture) {
    // The commands run in an order in which the sandboxes that they need exist.
    for command in [
        "create",
        "list",
        "shell",
        "exec",
        "checkpoint",
        "restore",
        "pause",
        "resume",
        "upload",
        "download",
        "snapshot",
        "diff",
        "log",
        "fork",
        "ports",
        "apply",
        "merge",
        "checkout",
        "delete",
    ] {
        let help = fixture.ok(&[command, "--help"]);
        let example = help.lines().skip_while(|line| *line != "Example:").nth(1);
        let example = example.unwrap_or_else(|| panic!("{command}: {help}"));
        // The text after the command is a comment.
        let (args, _) = example.trim().split_once("   ").unwrap();
        let args: Vec<&str> = args.split(' ').collect();
        assert_eq!(args[..2], ["palisade", command]);
        if command == "merge" {
            // The next command needs a clean worktree, so the applied changes are removed.
            fixture.repo.git(&["stash", "-u"]);
        }
        if command == "delete" {
            fixture.repo.git(&["checkout", "-q", "main"]);
        }
        fixture.ok(&args[1..]);
    }
    let left = fixture.json(&["list"]);
    assert_eq!(left.as_array().unwrap().len(), 1, "the fork: {left}");
}

fn missing_program_error_names_the_searched_paths(fixture: &SandboxFixture) {
    fixture.create("fix");
    for (command, named) in [
        (&["exec", "fix", "--", "no-such"][..], "sandbox's PATH"),
        (
            &["run", "--name", "fix", "--", "no-such"],
            "sandbox.host_paths",
        ),
        (
            &["exec", "-w", "/nowhere", "fix", "--", "true"],
            "--workdir",
        ),
    ] {
        let complaint = fixture.fails(1, command);
        let failed = format!("{} failed: ", command[0]);
        assert!(complaint.contains(&failed), "{complaint}");
        assert!(complaint.contains(named), "{complaint}");
    }
}
