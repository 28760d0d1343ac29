//! `palisade allow` and `palisade deny`, and the commands that the summary of a run prints.

use std::os::unix::fs::PermissionsExt;

use testkit::origin::{OriginReply, OriginServer};
use testkit::output;

use crate::sandbox_fixture::{SandboxFixture, describe};

for_every_operator!(
    refused_host_is_allowed_by_the_printed_command,
    grant_for_one_sandbox_applies_to_it_alone,
    deny_wins_until_it_is_allowed_again,
    change_of_grants_needs_a_confirmation,
);

fn settings(fixture: &SandboxFixture, origin: &OriginServer, more: &str) {
    let address = origin.address();
    fixture.gate_dir.write_config(&format!(
        "version: \"1.0\"\negress:\n  resolve: {{a.example: \"{address}\", b.example: \"{address}\"}}\n{more}"
    ));
}

fn origin() -> OriginServer {
    OriginServer::http(|_| OriginReply::text("well"))
}

fn status(fixture: &SandboxFixture, name: &str, url: &str) -> String {
    let curl = format!("curl -sS -o /dev/null -w '%{{http_code}}' --max-time 25 {url}");
    fixture.stdout_of(name, &curl)
}

fn grants(fixture: &SandboxFixture) -> std::path::PathBuf {
    fixture.gate_dir.config().with_file_name("grants.yaml")
}

// Issue 18, part 5.
fn refused_host_is_allowed_by_the_printed_command(fixture: &SandboxFixture) {
    let origin = origin();
    settings(fixture, &origin, "");
    let line =
        "curl -sS http://a.example/; curl -sS http://a.example/x; curl -sS http://b.example:8123/";
    let ended = fixture.run(&["run", "--name", "fix", "--", "bash", "-c", line]);
    let printed = output::stderr(&ended);
    assert!(
        printed.contains("palisade: refused: a.example:80 (2×), b.example:8123 (1×)"),
        "{printed}"
    );
    let commands: Vec<&str> = printed
        .lines()
        .filter_map(|line| line.split_once("to allow: ")?.1.split_once(' '))
        .map(|(_, arguments)| arguments)
        .collect();
    assert_eq!(
        commands,
        [
            "allow a.example --for fix",
            "allow b.example:8123 --for fix"
        ],
        "{printed}"
    );
    let mut arguments: Vec<&str> = commands[0].split(' ').collect();
    arguments.push("--yes");
    let allowed = fixture.run(&arguments);
    assert!(allowed.status.success(), "{}", describe(&allowed));
    assert!(
        output::stderr(&allowed).contains("+       - a.example"),
        "{}",
        describe(&allowed)
    );
    assert_eq!(status(fixture, "fix", "http://a.example/"), "200");
    // Again: nothing changes.
    assert!(fixture.ok(&arguments).contains("already allowed"));
    let mode = std::fs::metadata(grants(fixture))
        .unwrap()
        .permissions()
        .mode();
    assert_eq!(mode & 0o777, 0o600);
    fixture.ok(&["delete", "-f", "fix"]);
    fixture.assert_nothing_left();
}

fn grant_for_one_sandbox_applies_to_it_alone(fixture: &SandboxFixture) {
    let origin = origin();
    settings(fixture, &origin, "  domains: [b.example]\n");
    std::fs::write(
        grants(fixture),
        "# mine\nversion: 1\ndomains:\n  - c.example # kept\n",
    )
    .unwrap();
    fixture.gate_dir.operator().chown(&grants(fixture));
    let one = fixture.create("one");
    fixture.create("two");
    fixture.ok(&["allow", "a.example", "--sandbox", "one", "--yes"]);
    fixture.ok(&["deny", "b.example", "--for", "one", "--yes"]);
    for _ in 0..2 {
        for (name, host, expected) in [
            ("one", "a.example", "200"),
            ("two", "a.example", "403"),
            ("one", "b.example", "403"),
            ("two", "b.example", "200"),
        ] {
            assert_eq!(
                status(fixture, name, &format!("http://{host}/")),
                expected,
                "{name} {host}"
            );
        }
        fixture.ok(&["gate", "restart"]);
    }
    let text = std::fs::read_to_string(grants(fixture)).unwrap();
    assert_eq!(
        text,
        format!(
            "# mine\nversion: 1\ndomains:\n  - c.example # kept\nsandboxes:\n  {one}:\n    domains:\n      \
             - a.example\n      - {{host: b.example, deny: [{{}}]}}\n"
        )
    );
    let error = fixture.fails(3, &["allow", "a.example", "--for", "three", "--yes"]);
    assert!(error.contains("three"), "{error}");
    for name in ["one", "two"] {
        fixture.ok(&["delete", "-f", name]);
    }
    fixture.assert_nothing_left();
}

fn deny_wins_until_it_is_allowed_again(fixture: &SandboxFixture) {
    let origin = origin();
    settings(
        fixture,
        &origin,
        "  domains: [{host: a.example, ports: [80, 8123]}, {host: '*.no.example', deny: [{}]}]\n",
    );
    fixture.create("one");
    assert_eq!(status(fixture, "one", "http://a.example/"), "200");
    fixture.ok(&["deny", "a.example", "--yes"]);
    assert_eq!(status(fixture, "one", "http://a.example/"), "403");
    assert_eq!(status(fixture, "one", "http://a.example:8123/"), "403");
    fixture.ok(&["allow", "a.example", "--yes"]);
    assert_eq!(status(fixture, "one", "http://a.example/"), "200");
    let error = fixture.fails(2, &["allow", "x.no.example", "--yes"]);
    assert!(
        error.contains("denied by a rule") && error.contains("palisade.yaml:4"),
        "{error}"
    );
    // A file with a mistake is not changed.
    std::fs::write(grants(fixture), "domain: []\n").unwrap();
    let error = fixture.fails(2, &["allow", "b.example", "--yes"]);
    assert!(error.contains("grants.yaml:1:1"), "{error}");
    std::fs::remove_file(grants(fixture)).unwrap();
    fixture.ok(&["delete", "-f", "one"]);
    fixture.assert_nothing_left();
}

fn change_of_grants_needs_a_confirmation(fixture: &SandboxFixture) {
    let error = fixture.fails(2, &["allow", "a.example"]);
    assert!(error.contains("Use --yes to confirm"), "{error}");
    assert!(!grants(fixture).exists());
    let mut terminal = fixture.on_terminal(&["allow", "*.a.example:8443"]);
    terminal.expect("+   - {host: \"*.a.example\", ports: [8443]}");
    terminal.expect("[y/N]");
    terminal.send("y\n");
    terminal.expect("*.a.example allowed for every sandbox");
    drop(terminal);
    let shown = fixture.ok(&["config", "show", "domains"]);
    assert!(shown.contains("*.a.example"), "{shown}");
    for text in ["https://a.example/", "*", "a b"] {
        let error = fixture.fails(2, &["allow", text, "--yes"]);
        assert!(error.contains("write HOST, HOST:PORT or *.HOST"), "{error}");
    }
}
