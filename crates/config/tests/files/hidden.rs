//! Values of variables and secrets are used and never shown.

use std::path::Path;

use config::{RepoFile, Settings, Sources};

use super::{check, directory, load, load_in};

const VALUE: &str = "hunter2";

fn env(name: &str) -> Option<String> {
    match name {
        "V" => Some(VALUE.to_owned()),
        "ADDRESS" => Some("192.0.2.77:4242".to_owned()),
        "PORT" => Some(":4242".to_owned()),
        "SIZE" => Some("7919".to_owned()),
        "URL" => Some(format!("http://h.example/?token={VALUE}")),
        "LINE" => Some(format!("command:get {VALUE}")),
        _ => None,
    }
}

fn assert_hidden(text: &str) {
    for value in [VALUE, "192.0.2.77", "4242", "7919"] {
        assert!(!text.contains(value), "{text}");
    }
}

fn refused(yaml: &str) -> String {
    let dir = directory(&[("palisade.yaml", &format!("version: '1.0'\n{yaml}\n"))]);
    load_in(dir.path(), &env).unwrap_err()
}

fn accepted(yaml: &str) -> Settings {
    let dir = directory(&[("palisade.yaml", &format!("version: '1.0'\n{yaml}\n"))]);
    load_in(dir.path(), &env).unwrap()
}

#[test]
fn a_message_names_the_variable_and_not_its_value() {
    for yaml in [
        "tools: [{name: '${V}', command: [x]}, {name: '${V}', command: [x]}]",
        "tools: [{name: hunter2, command: [x]}, {name: '${V}', command: [x]}]",
        "tools: [{name: '${V}', command: [x]}, {name: hunter2, command: [x]}]",
        "tools: [{name: '${V}', command: [' ']}]",
        "tools: [{name: '${V}', command: [\"a\\0\"]}]",
        "tools: [{name: '${V}', command: [x], runtime: {type: e2b}}]",
        "git: {mirrors: [{name: '${V}', upstream: 'git@git.example:a.git'}]}",
        "policies: {bundles: [{id: '${V}', path: b, entrypoint: c}, {id: '${V}', path: b, entrypoint: c}]}",
        "credentials: {rows: [{name: '${V}', host: a.example, source: 'env:A'}, {name: '${V}', host: a.example, source: 'env:A'}]}",
        "egress: {allowlist: './${V}'}",
        "server: {interceptor_addr: '${ADDRESS}'}",
    ] {
        let problems = refused(yaml);
        assert_hidden(&problems);
        assert!(problems.contains("${"), "{problems}");
    }
}

#[test]
fn a_message_about_policy_yaml_names_the_variable_too() {
    let dir = directory(&[
        (
            "palisade.yaml",
            "version: '1.0'\negress: {policy: p.yaml}\n",
        ),
        (
            "p.yaml",
            "git: {push_limits: {hard_limit_bytes: '${SIZE}'}}\n",
        ),
    ]);
    let problems = load_in(dir.path(), &env).unwrap_err();
    assert_hidden(&problems);
    assert!(problems.contains("${SIZE}"), "{problems}");
}

#[test]
fn a_warning_about_an_address_does_not_repeat_it() {
    let settings = accepted("server: {interceptor_addr: '${PORT}'}");
    let warnings = format!("{:?}", settings.warnings);
    assert_eq!(settings.warnings.len(), 1);
    assert_hidden(&warnings);
    assert!(settings.server.interceptor().ip().is_loopback());
}

#[test]
fn text_that_may_hold_a_password_is_not_repeated() {
    check(
        "metrics: {tracing: {endpoint: 'http://u:hunter2@h.example/'}}\n",
        &["2:31: metrics.tracing.endpoint must be an http or https URL, without user and password"],
    );
    for yaml in [
        "egress: {domains: [{host: 'u:hunter2@h.example'}]}",
        "egress: {domains: ['u:hunter2@h.example']}",
        "egress: {domains: 'u:hunter2@h.example'}",
        "egress: {passthrough: ['u:hunter2@h.example']}",
        "egress: {listen: ['u:hunter2@192.0.2.1:80']}",
        "egress: {dns: {upstreams: ['u:hunter2@192.0.2.1']}}",
        "secrets: {k: !!int hunter2}",
        "egress: {resolve: {'u:hunter2@h.example': '192.0.2.1:1'}}",
        "credentials: {rows: [{name: a, host: 'u:hunter2@h.example', source: 'env:A'}]}",
    ] {
        let problems = load(&format!("version: '1.0'\n{yaml}\n")).unwrap_err();
        assert_hidden(&problems);
    }
}

#[test]
fn show_names_the_variable_and_not_its_value() {
    let settings = accepted(
        "tools: [{name: t, command: [x, '--key=${V}'], work_dir: '/${V}'}]\n\
         git: {mirrors: [{name: a, upstream: 'https://git.example/a', identity: '${LINE}'}]}\n\
         secrets: {key: '${V}', own: 'hunter2'}\n\
         sandbox: {setup_command: 'login ${V}', limits: {pids: '${SIZE}'}}\n\
         metrics: {tracing: {endpoint: '${URL}'}}\n\
         egress: {domains: [{host: '${V}.example'}, '${V}.example', {host: a.example, paths: ['/${V}']}], passthrough: ['${V}.example']}\n",
    );
    let shown = config::show(&settings);
    assert_hidden(&format!("{shown:?}"));
    let value = |pointer: &str| {
        let found = shown.iter().find(|shown| shown.pointer == pointer).unwrap();
        found.value.to_string()
    };
    assert_eq!(value("/tools/0/command/0"), "\"x\"");
    assert_eq!(value("/tools/0/command/1"), "\"${V}\"");
    assert_eq!(value("/git/mirrors/0/identity"), "\"${LINE}\"");
    assert_eq!(value("/sandbox/setup_command"), "\"${V}\"");
    assert_eq!(value("/metrics/tracing/endpoint"), "\"${URL}\"");
    assert_eq!(value("/secrets/own"), "\"[secret]\"");
    assert_eq!(value("/domains/1"), "\"${V}\"");
    assert!(value("/domains/2").contains("a.example"));
    assert_hidden(&format!("{settings:?}"));

    // The values themselves are available to the code.
    assert_eq!(settings.tools[0].command[1], "--key=hunter2");
    let names: Vec<String> = settings
        .secret_values()
        .into_iter()
        .map(|(name, secret)| format!("{name} {}", secret.expose()))
        .collect();
    assert_eq!(names, ["secrets.key hunter2", "secrets.own hunter2"]);
}

#[test]
fn changed_variable_value_is_in_the_settings_diff() {
    let dir = directory(&[(
        "palisade.yaml",
        "version: '1.0'\nsandbox: {setup_command: 'login ${V}'}\n\
         secrets: {key: '${V}'}\n",
    )]);
    let one = load_in(dir.path(), &|_| Some("one!".into())).unwrap();
    let two = load_in(dir.path(), &|_| Some("two!".into())).unwrap();
    assert_eq!(one.diff(&two), ["/sandbox/setup_command", "/secrets/key"]);
}

#[test]
fn debug_output_contains_no_file_content() {
    let dir = directory(&[
        (
            "palisade.yaml",
            "version: '1.0'\nsecrets: {k: hunter2}\negress: {allowlist: '${V}'}\n",
        ),
        (config::FILE_NAME, "setup_command: login hunter2\n"),
    ]);
    let sources = Sources::read(Some(&dir.path().join("palisade.yaml")), &env).unwrap();
    let printed = format!("{sources:?}");
    assert_hidden(&printed);
    assert!(!printed.contains("104, 117, 110"), "{printed}");
    assert!(printed.contains("palisade.yaml"), "{printed}");
    let file = RepoFile::load(dir.path()).unwrap().unwrap();
    assert_hidden(&format!("{file:?}"));
}

#[test]
fn secret_too_short_for_log_redaction_is_a_warning() {
    let settings = load(
        "version: '1.0'\nserver: {auth_token: abc}\nsecrets: {pin: '12', empty: '', long: '1234'}\n",
    )
    .unwrap();
    let warnings: Vec<String> = settings
        .warnings
        .iter()
        .map(|w| w.message.clone())
        .collect();
    assert_eq!(
        warnings,
        [
            "server.auth_token is shorter than 4 bytes, too short to be redacted in logs",
            "secrets.pin is shorter than 4 bytes, too short to be redacted in logs",
        ]
    );
    let positions: Vec<_> = settings
        .warnings
        .iter()
        .map(|w| (w.line, w.column))
        .collect();
    assert_eq!(positions, [(2, 22), (3, 16)]);
}

#[test]
fn include_path_from_a_variable_is_watched() {
    let dir = directory(&[(
        "palisade.yaml",
        "version: '1.0'\negress: {allowlist: '${V}'}\n",
    )]);
    let sources = Sources::read(Some(&dir.path().join("palisade.yaml")), &env).unwrap();
    assert!(
        sources
            .paths()
            .iter()
            .any(|path| path.ends_with(Path::new(VALUE)))
    );
}
