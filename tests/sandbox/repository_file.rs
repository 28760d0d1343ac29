//! A repository's `.palisade.yaml`: without effect until it is trusted, then with full effect.

use std::io::Read;
use std::net::{SocketAddr, TcpStream};
use std::process::Output;

use serde_json::Value;
use testkit::origin::{OriginReply, OriginServer};
use testkit::{output, wait};

use crate::sandbox_fixture::{SandboxFixture, describe, text};

for_every_operator!(
    untrusted_repository_file_has_no_effect_and_is_reported,
    trusted_repository_file_takes_effect_in_its_sandboxes,
    changed_repository_file_is_untrusted_again,
);

const FILE: &str = "\
image: tools.example/agent:1
setup_command: printenv HOME >~/set-up
ports: [3000]
env: [LISTED, UNLISTED]
egress:
  domains: [wished.example, denied.example]
";

/// Operator settings that resolve the hosts and allow another one.
fn settings(fixture: &SandboxFixture, origin: &OriginServer, more: &str) {
    let address = origin.address();
    fixture.gate_dir.write_config(&format!(
        "version: \"1.0\"\nsandbox:\n  env: [LISTED]\negress:\n  \
         domains: [listed.example, {{host: denied.example, deny: [{{}}]}}]\n  \
         resolve: {{\"wished.example\": \"{address}\", \"denied.example\": \"{address}\", \
         \"listed.example\": \"{address}\"}}\n{more}"
    ));
}

fn origin() -> OriginServer {
    OriginServer::http(|_| OriginReply::text("well"))
}

/// Runs a line of bash in the sandbox of that name, which is created if needed.
fn run(fixture: &SandboxFixture, name: &str, line: &str) -> Output {
    let mut command = fixture.palisade(&["run", "--name", name, "--", "bash", "-c", line]);
    command.env("LISTED", "yes").env("UNLISTED", "no");
    let output = command.output().unwrap();
    assert!(output.status.success(), "{}", describe(&output));
    output
}

/// The status of a request for a host.
fn status(fixture: &SandboxFixture, name: &str, host: &str) -> String {
    let curl = format!("curl -sS -o /dev/null -w '%{{http_code}}' --max-time 25 http://{host}/");
    fixture.stdout_of(name, &curl)
}

fn published(fixture: &SandboxFixture, name: &str) -> Vec<Value> {
    let rows = fixture.json(&["list"]);
    let row = rows
        .as_array()
        .unwrap()
        .iter()
        .find(|row| row["name"] == name);
    row.unwrap()["published"].as_array().unwrap().clone()
}

// Regression test for issue 14, item 14.
fn untrusted_repository_file_has_no_effect_and_is_reported(fixture: &SandboxFixture) {
    let origin = origin();
    settings(fixture, &origin, "");
    fixture.repo.write(".palisade.yaml", FILE);
    let output = run(
        fixture,
        "plain",
        "printenv LISTED UNLISTED; test ! -e ~/set-up",
    );
    let dir = fixture.repo.dir().canonicalize().unwrap();
    let line = format!(
        "palisade: .palisade.yaml is not trusted and has no effect; to read and trust it: \
         palisade trust {}\n",
        dir.display()
    );
    assert!(
        output::stderr(&output).contains(&line),
        "{}",
        describe(&output)
    );
    assert_eq!(output::stdout(&output), "yes\n");
    assert_eq!(status(fixture, "plain", "wished.example"), "403");
    assert_eq!(status(fixture, "plain", "listed.example"), "200");
    assert_eq!(published(fixture, "plain"), [Value::Null; 0]);
    // The file in the workspace does not matter.
    fixture.stdout_of("plain", "echo 'setup_command: true' >.palisade.yaml");
    fixture.ok(&["delete", "-f", "plain"]);
    fixture.assert_nothing_left();
}

fn trusted_repository_file_takes_effect_in_its_sandboxes(fixture: &SandboxFixture) {
    let origin = origin();
    settings(fixture, &origin, "");
    fixture.repo.write(".palisade.yaml", FILE);
    fixture.ok(&["trust", "--yes"]);
    let output = run(fixture, "own", "printenv LISTED UNLISTED; cat ~/set-up");
    let line = "palisade: .palisade.yaml: setup, 1 port, env LISTED, egress wished.example \
                denied.example; not in sandbox.env and not passed on: UNLISTED; image \
                tools.example/agent:1 is not available in this version\n";
    assert!(
        output::stderr(&output).contains(line),
        "{}",
        describe(&output)
    );
    assert_eq!(output::stdout(&output).lines().next(), Some("yes"));
    assert!(
        output::stdout(&output).contains("/home/agent"),
        "{}",
        describe(&output)
    );

    // The hosts are allowed for this sandbox only, and only if the operator does not deny them.
    fixture.ok(&["create", "other", "--no-repo"]);
    for _ in 0..2 {
        assert_eq!(status(fixture, "own", "wished.example"), "200");
        assert_eq!(status(fixture, "own", "listed.example"), "200");
        assert_eq!(status(fixture, "own", "denied.example"), "403");
        assert_eq!(status(fixture, "other", "wished.example"), "403");
        assert_eq!(status(fixture, "other", "listed.example"), "200");
        let list = fixture.stdout_of("own", "curl -sS http://palisade.internal/allowlist");
        assert!(list.contains("wished.example"), "{list}");
        // A reload and a restarted gate keep the rules.
        fixture.ok(&["config", "reload"]);
        assert_eq!(status(fixture, "own", "wished.example"), "200");
        assert_eq!(status(fixture, "other", "wished.example"), "403");
        fixture.ok(&["gate", "restart"]);
    }

    // The DNS forwarder uses the same rules.
    settings(fixture, &origin, "  dns: {mode: forward}\n");
    fixture.ok(&["config", "reload"]);
    fixture.stdout_of(
        "own",
        "getent hosts wished.example && ! getent hosts denied.example",
    );
    fixture.stdout_of(
        "other",
        "getent hosts listed.example && ! getent hosts wished.example",
    );

    // The port is forwarded; a second sandbox gets another one.
    run(fixture, "second", "true");
    let (first, second) = (published(fixture, "own"), published(fixture, "second"));
    assert_eq!(
        (&first[0]["port"], &second[0]["port"]),
        (&3000.into(), &3000.into())
    );
    assert_ne!(first[0]["host"], second[0]["host"]);
    let host: SocketAddr = text(&first[0]["host"]).parse().unwrap();
    let serving = "nohup perl -MIO::Socket::INET -e '$s = IO::Socket::INET->new(LocalAddr => \
                   \"127.0.0.1:3000\", Listen => 5); while ($c = $s->accept) { print $c \"well\"; \
                   close $c }' >/dev/null 2>&1 &";
    fixture.stdout_of("own", serving);
    let received = wait::until("the server inside", || {
        let mut received = String::new();
        let mut stream = TcpStream::connect(host).ok()?;
        stream.read_to_string(&mut received).ok()?;
        (!received.is_empty()).then_some(received)
    });
    assert_eq!(received, "well");

    // A fork has the same rules.
    fixture.ok(&["fork", "own", "forked"]);
    assert_eq!(status(fixture, "forked", "wished.example"), "200");
    for name in ["own", "other", "second", "forked"] {
        fixture.ok(&["delete", "-f", name]);
    }
    fixture.assert_nothing_left();
}

fn changed_repository_file_is_untrusted_again(fixture: &SandboxFixture) {
    let origin = origin();
    settings(fixture, &origin, "");
    fixture.repo.write(".palisade.yaml", FILE);
    fixture.ok(&["trust", "--yes"]);
    run(fixture, "before", "true");
    fixture
        .repo
        .write(".palisade.yaml", format!("{FILE}# more\n"));
    let output = run(fixture, "after", "test ! -e ~/set-up");
    let changed = "palisade: .palisade.yaml has changed since it was trusted and has no effect; to \
                   read and trust it again: palisade trust ";
    assert!(
        output::stderr(&output).contains(changed),
        "{}",
        describe(&output)
    );
    assert_eq!(status(fixture, "after", "wished.example"), "403");
    // A sandbox keeps the rules it was created with. A run in the sandbox reports these rules and
    // the changed file.
    let output = run(fixture, "before", "true");
    assert!(
        output::stderr(&output).contains(changed),
        "{}",
        describe(&output)
    );
    assert!(
        output::stderr(&output).contains("(when the sandbox was created)"),
        "{}",
        describe(&output)
    );
    assert_eq!(status(fixture, "before", "wished.example"), "200");
    // A file with a mistake has no effect, and the mistake's position is reported.
    fixture.repo.write(".palisade.yaml", "setup_comand: x\n");
    let output = run(fixture, "wrong", "true");
    let line = ".palisade.yaml has no effect: ";
    assert!(
        output::stderr(&output).contains(line),
        "{}",
        describe(&output)
    );
    assert!(
        output::stderr(&output).contains(".palisade.yaml:1:1"),
        "{}",
        describe(&output)
    );
    for name in ["before", "after", "wrong"] {
        fixture.ok(&["delete", "-f", name]);
    }
    fixture.assert_nothing_left();
}
