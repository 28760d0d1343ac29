//! `palisade config` and `palisade trust`, as an operator uses them.

#![allow(
    clippy::expect_used,
    clippy::indexing_slicing,
    clippy::panic,
    clippy::unwrap_used,
    reason = "a test that cannot continue has failed"
)]

use serde_json::Value;
use testkit::gate::GateDir;
use testkit::output::{stderr, stdout};

const PALISADE: &str = env!("CARGO_BIN_EXE_palisade");

#[test]
fn config_check_reports_every_mistake_with_its_line() {
    let gate_dir = GateDir::new(PALISADE);
    gate_dir.write_config(
        "version: \"1.0\"\n\
         logging: { level: loud }\n\
         egress:\n\
        \x20 alowlist: ./a.yaml\n\
        \x20 domains: [\"*.com\"]\n\
         server: { shutdown_timeout: soon }\n\
         tools:\n\
        \x20 - { name: a, command: [x] }\n\
        \x20 - { name: a, command: [y] }\n",
    );
    let output = gate_dir.run(&["config", "check"]);
    assert_eq!(output.status.code(), Some(2));
    let printed = stderr(&output);
    assert!(printed.contains("5 problems in "), "{printed}");
    for position in [
        "palisade.yaml:2:",
        "palisade.yaml:4:3",
        "palisade.yaml:5:",
        "palisade.yaml:6:",
        "palisade.yaml:9:",
    ] {
        assert!(
            printed.contains(position),
            "{position} is not in:\n{printed}"
        );
    }
    assert!(printed.contains("did you mean 'allowlist'"), "{printed}");
    let problems: Value =
        serde_json::from_str(&stdout(&gate_dir.run(&["config", "check", "--json"]))).unwrap();
    assert_eq!(problems["problems"].as_array().unwrap().len(), 5);
}

/// Issue 14, number 7: `config check` accepted settings of the scanner, which does not exist.
#[test]
fn setting_that_is_not_enforced_is_refused_with_its_line() {
    let gate_dir = GateDir::new(PALISADE);
    gate_dir.write_config("version: \"1.0\"\nscan:\n  outbound: deny\n");
    let output = gate_dir.run(&["config", "check"]);
    let printed = stderr(&output);
    assert_eq!(output.status.code(), Some(2), "{printed}");
    let sentence = "palisade.yaml:3:13: scan.outbound is not available in this version: nothing \
                    would enforce it; remove it, or set it to off";
    assert!(printed.contains(sentence), "{printed}");
    let output = gate_dir.run(&["gate", "run"]);
    assert_eq!(output.status.code(), Some(2), "{}", stderr(&output));
    // The starter file contains the same note.
    let starter = stdout(&gate_dir.run(&["config", "init", "--stdout"]));
    assert!(
        starter.contains("Not available in this version"),
        "{starter}"
    );
}

#[test]
fn init_writes_a_valid_file_and_never_overwrites() {
    let gate_dir = GateDir::new(PALISADE);
    std::fs::remove_file(gate_dir.config()).unwrap();
    assert!(gate_dir.run(&["config", "init"]).status.success());
    let output = gate_dir.run(&["config", "check"]);
    assert!(output.status.success(), "{}", stderr(&output));
    assert_eq!(gate_dir.run(&["config", "init"]).status.code(), Some(4));
    assert_eq!(
        stdout(&gate_dir.run(&["config", "init", "--stdout"])),
        std::fs::read_to_string(gate_dir.config()).unwrap()
    );
}

#[test]
fn config_show_prints_the_source_of_each_value() {
    let gate_dir = GateDir::new(PALISADE);
    gate_dir.write_config("version: \"1.0\"\nlogging: { level: \"${LEVEL:-debug}\" }\n");
    let all = stdout(&gate_dir.run(&["config", "show"]));
    assert!(all.contains("/audit/max_bytes"), "{all}");
    let set = stdout(&gate_dir.run(&["config", "show", "--set"]));
    assert!(
        set.contains("palisade.yaml:2") && !set.contains("/audit/max_bytes"),
        "{set}"
    );
}

#[test]
fn config_schema_prints_a_json_schema() {
    let gate_dir = GateDir::new(PALISADE);
    let schema: Value =
        serde_json::from_str(&stdout(&gate_dir.run(&["config", "schema"]))).unwrap();
    assert!(schema["properties"]["egress"].is_object());
    assert_eq!(schema["additionalProperties"], false);
}

#[test]
fn missing_environment_variable_is_named_in_the_error() {
    let gate_dir = GateDir::new(PALISADE);
    gate_dir.write_config("version: \"1.0\"\nsandbox: { env: [\"${NOT_SET_HERE}\"] }\n");
    let output = gate_dir.run(&["config", "check"]);
    assert_eq!(output.status.code(), Some(2));
    assert!(
        stderr(&output).contains("NOT_SET_HERE"),
        "{}",
        stderr(&output)
    );
}

#[test]
fn secret_with_unset_variable_is_a_warning() {
    let gate_dir = GateDir::new(PALISADE);
    gate_dir.write_config("version: \"1.0\"\nsecrets: { key: \"${NOT_SET_HERE}\" }\n");
    let output = gate_dir.run(&["config", "check"]);
    assert!(output.status.success(), "{}", stderr(&output));
    let warning = "the environment variable NOT_SET_HERE is not set: secrets.key is empty";
    assert!(stderr(&output).contains(warning), "{}", stderr(&output));
    let shown = stdout(&gate_dir.run(&["config", "show"]));
    let line = shown.lines().find(|line| line.contains("/secrets/key"));
    assert!(line.is_some_and(|line| line.contains("[unset]")), "{shown}");
}

#[test]
fn missing_configuration_file_given_explicitly_is_an_error() {
    let gate_dir = GateDir::new(PALISADE);
    std::fs::remove_file(gate_dir.config()).unwrap();
    let output = gate_dir.run(&["gate", "run"]);
    assert_eq!(output.status.code(), Some(2), "{}", stderr(&output));
    assert!(
        stderr(&output).contains("palisade.yaml"),
        "{}",
        stderr(&output)
    );
}

#[test]
fn trust_shows_the_file_confirms_and_expires_on_change() {
    let gate_dir = GateDir::new(PALISADE);
    let repository = gate_dir.path().join("repository");
    std::fs::create_dir(&repository).unwrap();
    let path = repository.to_str().unwrap();
    assert_eq!(
        gate_dir.run(&["trust", path]).status.code(),
        Some(3),
        "there is no file to trust"
    );
    let file = repository.join(".palisade.yaml");
    std::fs::write(&file, "ports: [3000]\n# \u{202e}hidden\n").unwrap();

    let output = gate_dir.run(&["trust", path]);
    assert_eq!(output.status.code(), Some(2), "a confirmation is required");
    assert!(
        stderr(&output).contains("ports: [3000]") && stderr(&output).contains("\\u{202e}hidden"),
        "{}",
        stderr(&output)
    );
    assert!(stdout(&gate_dir.run(&["trust", "--yes", path])).starts_with("trusted: "));
    assert!(stdout(&gate_dir.run(&["trust", "--yes", path])).starts_with("already trusted"));
    assert!(stdout(&gate_dir.run(&["trust", "--list"])).contains(path));

    std::fs::write(&file, "ports: [3001]\n").unwrap();
    assert_eq!(
        gate_dir.run(&["trust", path]).status.code(),
        Some(2),
        "the changed file must be confirmed again"
    );
    assert!(gate_dir.run(&["trust", "--revoke", path]).status.success());
    assert_eq!(
        stdout(&gate_dir.run(&["trust", "--list"])),
        "no trusted repositories\n"
    );
}

// Issue 18, part 5.
#[test]
fn import_prints_a_valid_configuration_and_names_the_rest() {
    let gate_dir = GateDir::new(PALISADE);
    let dir = gate_dir.path();
    for (format, text, host, note) in [
        (
            "srt",
            r#"{"network": {"allowedDomains": ["a.example:8443"]}, "filesystem": {"denyRead": ["~/.ssh"]}}"#,
            r#"{"host":"a.example","ports":[8443]}"#,
            "not carried over: filesystem",
        ),
        (
            "claude-settings",
            r#"{"permissions": {"allow": ["WebFetch(domain:a.example)", "Bash(ls)"]}}"#,
            r#"{"host":"a.example","methods":["GET","HEAD"]}"#,
            "1 permission rules that are not about the network",
        ),
        (
            "openshell",
            "network_policies: {a: {endpoints: [{host: a.example, port: 443}], binaries: [{path: /usr/bin/curl}]}}\nprocess: {run_as_user: x}\n",
            r#"{"host":"a.example","ports":[443],"programs":["/usr/bin/curl"]}"#,
            "not carried over: process",
        ),
        (
            "docker-kit",
            "schemaVersion: \"1\"\nnetwork: {allowedDomains: [a.example]}\nagentContext: x\n",
            r#""a.example""#,
            "not carried over: agentContext",
        ),
    ] {
        let file = dir.join("policy");
        std::fs::write(&file, text).unwrap();
        let file = file.to_str().unwrap();
        let output = gate_dir.run(&["import", format, file]);
        let (printed, told) = (stdout(&output), stderr(&output));
        assert!(output.status.success(), "{told}");
        assert!(printed.contains(host), "{printed}");
        assert!(told.contains(note), "{told}");
        gate_dir.write_config(&printed);
        let checked = gate_dir.run(&["config", "check"]);
        assert!(checked.status.success(), "{}", stderr(&checked));
        let tried = dir.join(format!("{format}.yaml"));
        let tried = tried.to_str().unwrap();
        let output = gate_dir.run(&["import", format, file, "--output", tried]);
        assert!(output.status.success(), "{}", stderr(&output));
        assert_eq!(std::fs::read_to_string(tried).unwrap(), printed);
        // A file is not replaced.
        let output = gate_dir.run(&["import", format, file, "--output", tried]);
        assert_eq!(output.status.code(), Some(4), "{}", stderr(&output));
    }
    std::fs::write(dir.join("policy"), "{").unwrap();
    let output = gate_dir.run(&["import", "srt", dir.join("policy").to_str().unwrap()]);
    assert_eq!(output.status.code(), Some(2));
    assert!(
        stderr(&output).contains("policy: not JSON"),
        "{}",
        stderr(&output)
    );
}

#[test]
fn allow_without_a_configuration_creates_one() {
    let gate_dir = GateDir::new(PALISADE);
    let home = gate_dir.path().join("home");
    let command = |args: &[&str]| {
        let mut command = std::process::Command::new(PALISADE);
        command.env_clear().env("HOME", &home).args(args);
        command.output().unwrap()
    };
    let output = command(&["allow", "a.example", "--yes"]);
    assert!(output.status.success(), "{}", stderr(&output));
    let shown = stdout(&command(&["config", "show", "domains"]));
    assert!(
        shown.contains("a.example") && shown.contains("grants.yaml:4"),
        "{shown}"
    );
}
