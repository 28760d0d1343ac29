//! A repository's own `.palisade.yaml`: without effect until it is trusted, and then all of it.

use std::io::Read;
use std::net::{SocketAddr, TcpStream};
use std::process::Output;

use serde_json::Value;
use testkit::origin::{OriginReply, OriginServer};
use testkit::{said, wait};

use crate::bench::{Bench, text, told};

for_every_operator!(
    an_untrusted_file_has_no_effect_and_is_reported,
    a_trusted_file_takes_effect_in_its_own_sandboxes,
    a_changed_file_is_untrusted_again,
);

const FILE: &str = "\
image: tools.example/agent:1
setup_command: printenv HOME >~/set-up
ports: [3000]
env: [LISTED, UNLISTED]
egress:
  domains: [wished.example, denied.example]
";

/// An operator's settings that know where the hosts are and allow another one.
fn settings(bench: &Bench, origin: &OriginServer, more: &str) {
    let address = origin.address();
    bench.place.write_config(&format!(
        "version: \"1.0\"\nsandbox:\n  env: [LISTED]\negress:\n  \
         domains: [listed.example, {{host: denied.example, deny: [{{}}]}}]\n  \
         resolve: {{\"wished.example\": \"{address}\", \"denied.example\": \"{address}\", \
         \"listed.example\": \"{address}\"}}\n{more}"
    ));
}

fn origin() -> OriginServer {
    OriginServer::http(|_| OriginReply::text("well"))
}

/// Runs a line of bash in the sandbox of that name, which is made if need be.
fn run(bench: &Bench, name: &str, line: &str) -> Output {
    let mut command = bench.palisade(&["run", "--name", name, "--", "bash", "-c", line]);
    command.env("LISTED", "yes").env("UNLISTED", "no");
    let output = command.output().unwrap();
    assert!(output.status.success(), "{}", told(&output));
    output
}

/// The status with which a request for a host is answered.
fn status(bench: &Bench, name: &str, host: &str) -> String {
    let curl = format!("curl -sS -o /dev/null -w '%{{http_code}}' --max-time 25 http://{host}/");
    bench.says(name, &curl)
}

fn published(bench: &Bench, name: &str) -> Vec<Value> {
    let rows = bench.json(&["list"]);
    let row = rows
        .as_array()
        .unwrap()
        .iter()
        .find(|row| row["name"] == name);
    row.unwrap()["published"].as_array().unwrap().clone()
}

// Issue 14, number 14.
fn an_untrusted_file_has_no_effect_and_is_reported(bench: &Bench) {
    let origin = origin();
    settings(bench, &origin, "");
    bench.repo.write(".palisade.yaml", FILE);
    let output = run(
        bench,
        "plain",
        "printenv LISTED UNLISTED; test ! -e ~/set-up",
    );
    let dir = bench.repo.dir().canonicalize().unwrap();
    let line = format!(
        "palisade: .palisade.yaml is not trusted and has no effect; to read and trust it: \
         palisade trust {}\n",
        dir.display()
    );
    assert!(said::err(&output).contains(&line), "{}", told(&output));
    assert_eq!(said::out(&output), "yes\n");
    assert_eq!(status(bench, "plain", "wished.example"), "403");
    assert_eq!(status(bench, "plain", "listed.example"), "200");
    assert_eq!(published(bench, "plain"), [Value::Null; 0]);
    // What is in the workspace does not matter.
    bench.says("plain", "echo 'setup_command: true' >.palisade.yaml");
    bench.ok(&["delete", "-f", "plain"]);
    bench.assert_nothing_left();
}

fn a_trusted_file_takes_effect_in_its_own_sandboxes(bench: &Bench) {
    let origin = origin();
    settings(bench, &origin, "");
    bench.repo.write(".palisade.yaml", FILE);
    bench.ok(&["trust", "--yes"]);
    let output = run(bench, "own", "printenv LISTED UNLISTED; cat ~/set-up");
    let line = "palisade: .palisade.yaml: setup, 1 port, env LISTED, egress wished.example \
                denied.example; not in sandbox.env and not passed on: UNLISTED; image \
                tools.example/agent:1 is not available in this version\n";
    assert!(said::err(&output).contains(line), "{}", told(&output));
    assert_eq!(said::out(&output).lines().next(), Some("yes"));
    assert!(
        said::out(&output).contains("/home/agent"),
        "{}",
        told(&output)
    );

    // The hosts are open to it, to no other, and only where the operator does not deny them.
    bench.ok(&["create", "other", "--no-repo"]);
    for _ in 0..2 {
        assert_eq!(status(bench, "own", "wished.example"), "200");
        assert_eq!(status(bench, "own", "listed.example"), "200");
        assert_eq!(status(bench, "own", "denied.example"), "403");
        assert_eq!(status(bench, "other", "wished.example"), "403");
        assert_eq!(status(bench, "other", "listed.example"), "200");
        let list = bench.says("own", "curl -sS http://palisade.internal/allowlist");
        assert!(list.contains("wished.example"), "{list}");
        // A reload and a gate that starts again know it still.
        bench.ok(&["config", "reload"]);
        assert_eq!(status(bench, "own", "wished.example"), "200");
        assert_eq!(status(bench, "other", "wished.example"), "403");
        bench.ok(&["gate", "restart"]);
    }

    // Names are answered by the same rules where they are forwarded.
    settings(bench, &origin, "  dns: {mode: forward}\n");
    bench.ok(&["config", "reload"]);
    bench.says(
        "own",
        "getent hosts wished.example && ! getent hosts denied.example",
    );
    bench.says(
        "other",
        "getent hosts listed.example && ! getent hosts wished.example",
    );

    // The port leads inside; a second sandbox gets another one.
    run(bench, "second", "true");
    let (first, second) = (published(bench, "own"), published(bench, "second"));
    assert_eq!(
        (&first[0]["port"], &second[0]["port"]),
        (&3000.into(), &3000.into())
    );
    assert_ne!(first[0]["host"], second[0]["host"]);
    let host: SocketAddr = text(&first[0]["host"]).parse().unwrap();
    let serving = "nohup perl -MIO::Socket::INET -e '$s = IO::Socket::INET->new(LocalAddr => \
                   \"127.0.0.1:3000\", Listen => 5); while ($c = $s->accept) { print $c \"well\"; \
                   close $c }' >/dev/null 2>&1 &";
    bench.says("own", serving);
    let heard = wait::until("the server inside", || {
        let mut heard = String::new();
        let mut stream = TcpStream::connect(host).ok()?;
        stream.read_to_string(&mut heard).ok()?;
        (!heard.is_empty()).then_some(heard)
    });
    assert_eq!(heard, "well");

    // A fork has the same reach.
    bench.ok(&["fork", "own", "forked"]);
    assert_eq!(status(bench, "forked", "wished.example"), "200");
    for name in ["own", "other", "second", "forked"] {
        bench.ok(&["delete", "-f", name]);
    }
    bench.assert_nothing_left();
}

fn a_changed_file_is_untrusted_again(bench: &Bench) {
    let origin = origin();
    settings(bench, &origin, "");
    bench.repo.write(".palisade.yaml", FILE);
    bench.ok(&["trust", "--yes"]);
    run(bench, "before", "true");
    bench
        .repo
        .write(".palisade.yaml", format!("{FILE}# more\n"));
    let output = run(bench, "after", "test ! -e ~/set-up");
    let changed = "palisade: .palisade.yaml has changed since it was trusted and has no effect; to \
                   read and trust it again: palisade trust ";
    assert!(said::err(&output).contains(changed), "{}", told(&output));
    assert_eq!(status(bench, "after", "wished.example"), "403");
    // A sandbox keeps what it was made with, and a run in it says both.
    let output = run(bench, "before", "true");
    assert!(said::err(&output).contains(changed), "{}", told(&output));
    assert!(
        said::err(&output).contains("(as the sandbox was made)"),
        "{}",
        told(&output)
    );
    assert_eq!(status(bench, "before", "wished.example"), "200");
    // One with a mistake has no effect and says where.
    bench.repo.write(".palisade.yaml", "setup_comand: x\n");
    let output = run(bench, "wrong", "true");
    let line = ".palisade.yaml has no effect: ";
    assert!(said::err(&output).contains(line), "{}", told(&output));
    assert!(
        said::err(&output).contains(".palisade.yaml:1:1"),
        "{}",
        told(&output)
    );
    for name in ["before", "after", "wrong"] {
        bench.ok(&["delete", "-f", name]);
    }
    bench.assert_nothing_left();
}
