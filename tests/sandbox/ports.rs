//! Ports of a sandbox on the operator's loopback.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};

use serde_json::Value;
use testkit::port::Port;
use testkit::{output, wait};

use crate::sandbox_fixture::{SandboxFixture, describe, text};

for_every_operator!(
    port_in_use_fails_create_and_leaves_no_sandbox,
    published_port_is_forwarded_from_the_start,
    ports_of_a_paused_sandbox_are_listed_and_changed,
    sandbox_port_is_listed_with_every_host_address,
    republished_port_forwards_to_its_new_target,
);

/// A server that answers each connection with a word.
const SERVER: &str = "$s = IO::Socket::INET->new(LocalAddr => '127.0.0.1:3000', Listen => 5); \
    while ($c = $s->accept) { print $c 'well'; close $c }";

fn port_in_use_fails_create_and_leaves_no_sandbox(fixture: &SandboxFixture) {
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port();
    let publish = format!("{port}:3000");
    for command in [
        &["create", "fix", "--publish", &publish][..],
        &["run", "--name", "fix", "--publish", &publish, "--", "true"],
    ] {
        let complaint = fixture.fails(4, command);
        let expected = format!("port {port} is already in use");
        assert!(complaint.contains(&expected), "{complaint}");
        assert_eq!(fixture.json(&["list"]), serde_json::json!([]));
        assert!(fixture.repo.sandbox_branches().is_empty());
    }
    fixture.assert_nothing_left();
}

fn published_port_is_forwarded_from_the_start(fixture: &SandboxFixture) {
    let port = Port::take();
    let host = port.address();
    let publish = format!("{}:3000", host.port());
    let created = fixture.json(&["create", "fix", "--publish", &publish]);
    assert_eq!(created["published"][0]["host"], host.to_string().as_str());
    let mut server = fixture
        .palisade(&[
            "exec",
            "fix",
            "--",
            "perl",
            "-MIO::Socket::INET",
            "-e",
            SERVER,
        ])
        .spawn()
        .unwrap();
    let received = wait::until("the server inside", || {
        let mut stream = TcpStream::connect(host).ok()?;
        stream.write_all(b"?").ok()?;
        let mut received = String::new();
        stream.read_to_string(&mut received).ok()?;
        (!received.is_empty()).then_some(received)
    });
    assert_eq!(received, "well");
    fixture.ok(&["delete", "-f", "fix"]);
    server.wait().unwrap();
    // The port is free for the next sandbox.
    fixture.ok(&["create", "fix", "--publish", &publish]);
    fixture.ok(&["delete", "-f", "fix"]);
    fixture.assert_nothing_left();
}

fn ports_of_a_paused_sandbox_are_listed_and_changed(fixture: &SandboxFixture) {
    fixture.create("fix");
    fixture.ok(&["pause", "fix"]);
    let shown = fixture.run(&["ports", "fix", "--publish", "0:3000"]);
    assert!(shown.status.success(), "{}", describe(&shown));
    assert!(
        output::stdout(&shown).contains("3000  unknown"),
        "{}",
        describe(&shown)
    );
    assert!(
        output::stderr(&shown).contains("is paused"),
        "{}",
        describe(&shown)
    );
    let ports = fixture.json(&["ports", "fix"]);
    assert_eq!(ports["open"], Value::Null);
    let host = text(&ports["published"][0]["host"]);
    let back = fixture.json(&["ports", "fix", "--unpublish", &host]);
    assert_eq!(back["published"], serde_json::json!([]));
    let none = fixture.ok(&["ports", "fix"]);
    assert!(none.contains("no port is published"), "{none}");
}

fn sandbox_port_is_listed_with_every_host_address(fixture: &SandboxFixture) {
    fixture.create("fix");
    let shown = fixture.ok(&[
        "ports", "fix", "-p", "0:3000", "-p", "0:3000", "-p", "0:4000",
    ]);
    let rows: Vec<&str> = shown.lines().collect();
    assert_eq!(rows.len(), 3, "{shown}");
    let of = |port: &str| rows.iter().find(|row| row.starts_with(port)).unwrap();
    assert_eq!(of("3000").matches("127.0.0.1:").count(), 2, "{shown}");
    assert_eq!(of("4000").matches("127.0.0.1:").count(), 1, "{shown}");
}

/// Returns the response of a port of this machine.
fn read_port(host: u16) -> Option<String> {
    let mut reply = String::new();
    let mut stream = TcpStream::connect(("127.0.0.1", host)).ok()?;
    stream.read_to_string(&mut reply).ok()?;
    (!reply.is_empty()).then_some(reply)
}

fn republished_port_forwards_to_its_new_target(fixture: &SandboxFixture) {
    fixture.create("fix");
    for (port, word) in [(8001, "one"), (8002, "two")] {
        let server = format!(
            "perl -MIO::Socket::INET -e 'my $l = IO::Socket::INET->new(LocalAddr => \
             \"127.0.0.1:{port}\", Listen => 5) or die; while (my $c = $l->accept) \
             {{ print $c \"{word}\" }}' > /dev/null 2>&1 &"
        );
        fixture.stdout_of("fix", &server);
    }
    // The first time any free port is chosen, and later the same port.
    let mut host = 0;
    for (port, word) in [(8001, "one"), (8002, "two"), (8001, "one")] {
        fixture.ok(&["ports", "fix", "--publish", &format!("{host}:{port}")]);
        let published = &fixture.json(&["ports", "fix"])["published"];
        assert_eq!(published.as_array().unwrap().len(), 1, "{published}");
        let at: SocketAddr = text(&published[0]["host"]).parse().unwrap();
        assert!(host == 0 || host == at.port(), "{published}");
        host = at.port();
        assert_eq!(wait::until("an answer", || read_port(host)), word);
    }
    fixture.ok(&["ports", "fix", "--unpublish", &host.to_string()]);
    wait::until("the end of it", || {
        TcpStream::connect(("127.0.0.1", host))
            .is_err()
            .then_some(())
    });
}
