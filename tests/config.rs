//! `palisade config` and `palisade trust`, as an operator uses them.

#![allow(
    clippy::expect_used,
    clippy::indexing_slicing,
    clippy::panic,
    clippy::unwrap_used,
    reason = "a test that cannot go on has failed"
)]

use serde_json::Value;
use testkit::gate::GateDir;
use testkit::said::{err, out};

const PALISADE: &str = env!("CARGO_BIN_EXE_palisade");

#[test]
fn five_mistakes_are_reported_as_five_with_their_places() {
    let place = GateDir::new(PALISADE);
    place.write_config(
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
    let output = place.run(&["config", "check"]);
    assert_eq!(output.status.code(), Some(2));
    let said = err(&output);
    assert!(said.contains("5 problems in "), "{said}");
    for place in [
        "palisade.yaml:2:",
        "palisade.yaml:4:3",
        "palisade.yaml:5:",
        "palisade.yaml:6:",
        "palisade.yaml:9:",
    ] {
        assert!(said.contains(place), "{place} is not in:\n{said}");
    }
    assert!(said.contains("did you mean 'allowlist'"), "{said}");
    let problems: Value =
        serde_json::from_str(&out(&place.run(&["config", "check", "--json"]))).unwrap();
    assert_eq!(problems["problems"].as_array().unwrap().len(), 5);
}

/// Issue 14, number 7: `config check` said ok to a scanner that is not there.
#[test]
fn settings_that_nothing_enforces_are_refused_with_their_line() {
    let place = GateDir::new(PALISADE);
    place.write_config("version: \"1.0\"\nscan:\n  outbound: deny\n");
    let output = place.run(&["config", "check"]);
    let told = err(&output);
    assert_eq!(output.status.code(), Some(2), "{told}");
    let sentence = "palisade.yaml:3:13: scan.outbound is not available in this version: nothing \
                    would enforce it; remove it, or set it to off";
    assert!(told.contains(sentence), "{told}");
    let output = place.run(&["gate", "run"]);
    assert_eq!(output.status.code(), Some(2), "{}", err(&output));
    // The starter says so, too.
    let starter = out(&place.run(&["config", "init", "--stdout"]));
    assert!(
        starter.contains("Not available in this version"),
        "{starter}"
    );
}

#[test]
fn init_writes_a_file_that_passes_and_never_overwrites() {
    let place = GateDir::new(PALISADE);
    std::fs::remove_file(place.config()).unwrap();
    assert!(place.run(&["config", "init"]).status.success());
    let output = place.run(&["config", "check"]);
    assert!(output.status.success(), "{}", err(&output));
    assert_eq!(place.run(&["config", "init"]).status.code(), Some(4));
    assert_eq!(
        out(&place.run(&["config", "init", "--stdout"])),
        std::fs::read_to_string(place.config()).unwrap()
    );
}

#[test]
fn show_says_where_each_value_comes_from() {
    let place = GateDir::new(PALISADE);
    place.write_config("version: \"1.0\"\nlogging: { level: \"${LEVEL:-debug}\" }\n");
    let all = out(&place.run(&["config", "show"]));
    assert!(all.contains("/audit/max_bytes"), "{all}");
    let set = out(&place.run(&["config", "show", "--set"]));
    assert!(
        set.contains("palisade.yaml:2") && !set.contains("/audit/max_bytes"),
        "{set}"
    );
}

#[test]
fn the_schema_is_json_schema() {
    let place = GateDir::new(PALISADE);
    let schema: Value = serde_json::from_str(&out(&place.run(&["config", "schema"]))).unwrap();
    assert!(schema["properties"]["egress"].is_object());
    assert_eq!(schema["additionalProperties"], false);
}

#[test]
fn a_missing_variable_is_named_and_no_value_is_shown() {
    let place = GateDir::new(PALISADE);
    place.write_config("version: \"1.0\"\nsandbox: { env: [\"${NOT_SET_HERE}\"] }\n");
    let output = place.run(&["config", "check"]);
    assert_eq!(output.status.code(), Some(2));
    assert!(err(&output).contains("NOT_SET_HERE"), "{}", err(&output));
}

#[test]
fn a_secret_without_its_variable_is_a_warning() {
    let place = GateDir::new(PALISADE);
    place.write_config("version: \"1.0\"\nsecrets: { key: \"${NOT_SET_HERE}\" }\n");
    let output = place.run(&["config", "check"]);
    assert!(output.status.success(), "{}", err(&output));
    let warning = "the environment variable NOT_SET_HERE is not set: secrets.key is empty";
    assert!(err(&output).contains(warning), "{}", err(&output));
    let shown = out(&place.run(&["config", "show"]));
    let line = shown.lines().find(|line| line.contains("/secrets/key"));
    assert!(line.is_some_and(|line| line.contains("[unset]")), "{shown}");
}

#[test]
fn a_named_file_that_is_not_there_is_an_error() {
    let place = GateDir::new(PALISADE);
    std::fs::remove_file(place.config()).unwrap();
    let output = place.run(&["gate", "run"]);
    assert_eq!(output.status.code(), Some(2), "{}", err(&output));
    assert!(err(&output).contains("palisade.yaml"), "{}", err(&output));
}

#[test]
fn trust_shows_the_file_asks_and_ends_with_one_changed_byte() {
    let place = GateDir::new(PALISADE);
    let repository = place.path().join("repository");
    std::fs::create_dir(&repository).unwrap();
    let path = repository.to_str().unwrap();
    assert_eq!(
        place.run(&["trust", path]).status.code(),
        Some(3),
        "nothing to trust"
    );
    let file = repository.join(".palisade.yaml");
    std::fs::write(&file, "ports: [3000]\n# \u{202e}hidden\n").unwrap();

    let output = place.run(&["trust", path]);
    assert_eq!(output.status.code(), Some(2), "it asks first");
    assert!(
        err(&output).contains("ports: [3000]") && err(&output).contains("\\u{202e}hidden"),
        "{}",
        err(&output)
    );
    assert!(out(&place.run(&["trust", "--yes", path])).starts_with("trusted: "));
    assert!(out(&place.run(&["trust", "--yes", path])).starts_with("already trusted"));
    assert!(out(&place.run(&["trust", "--list"])).contains(path));

    std::fs::write(&file, "ports: [3001]\n").unwrap();
    assert_eq!(
        place.run(&["trust", path]).status.code(),
        Some(2),
        "changed: it asks again"
    );
    assert!(place.run(&["trust", "--revoke", path]).status.success());
    assert_eq!(
        out(&place.run(&["trust", "--list"])),
        "nothing is trusted\n"
    );
}
