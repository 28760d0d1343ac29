//! Isolation as an agent sees it: nothing of the host is visible, and all traffic ends at the gate.

use serde_json::Value;
use testkit::output;

use crate::sandbox_fixture::{SandboxFixture, describe};

for_every_operator!(
    sandbox_reveals_nothing_of_the_host,
    sandbox_reveals_nothing_of_another_sandbox,
    every_address_is_answered_by_the_gate,
    every_resolver_address_is_answered_by_the_gate,
    ports_without_a_listener_are_closed,
    localhost_is_private_to_the_sandbox,
    refusals_are_in_the_audit_log_and_the_summary,
    operators_environment_is_not_passed_to_the_sandbox,
    gate_raises_its_file_limit_and_programs_keep_theirs,
);

for_subid_user!(
    sandbox_reveals_nothing_of_the_host,
    sandbox_reveals_nothing_of_another_sandbox,
    every_address_is_answered_by_the_gate,
    every_resolver_address_is_answered_by_the_gate,
    ports_without_a_listener_are_closed,
    localhost_is_private_to_the_sandbox,
    refusals_are_in_the_audit_log_and_the_summary,
);

fn sandbox_reveals_nothing_of_the_host(fixture: &SandboxFixture) {
    let canary = fixture.gate_dir.path().join("canary-of-the-operator");
    std::fs::write(&canary, "secret").unwrap();
    fixture.gate_dir.operator().chown(&canary);
    fixture.create("fix");
    let found = fixture.stdout_of(
        "fix",
        "find / -xdev \\( -name 'canary-of-*' -o -name control.sock -o -name init.sock \
         -o -name palisade.db -o -name record.json \\) 2>/dev/null; \
         find / \\( -name 'canary-of-*' -o -name control.sock -o -name init.sock \\) \
         -not -path '/proc/*' 2>/dev/null; true",
    );
    assert_eq!(found, "");
    assert_eq!(fixture.stdout_of("fix", "ls /home"), "agent");
    // The information of a process about itself contains no name of the host.
    let gate_dir = fixture.gate_dir.path().to_string_lossy().into_owned();
    let known = fixture.stdout_of(
        "fix",
        "cat /proc/self/environ /proc/[0-9]*/cmdline /proc/net/unix 2>/dev/null | tr '\\0' '\\n'; true",
    );
    assert!(!known.contains(&gate_dir), "{known}");
    for path in [
        canary,
        fixture.gate_dir.control(),
        fixture.gate_dir.database(),
    ] {
        let output = fixture.bash("fix", &format!("cat {0}; test -e {0}", path.display()));
        assert!(!output.status.success(), "{}", describe(&output));
    }
    // Only the sandbox's own processes are visible.
    let processes = fixture.stdout_of("fix", "ls -d /proc/[0-9]* | wc -l");
    assert!(processes.parse::<u32>().unwrap() < 10, "{processes}");
}

fn sandbox_reveals_nothing_of_another_sandbox(fixture: &SandboxFixture) {
    fixture.create("one");
    fixture.create("two");
    fixture.stdout_of(
        "two",
        "echo secret > secret-of-two; echo secret > /tmp/secret-of-two",
    );
    let found = fixture.stdout_of("one", "find / -name 'secret-of-*' 2>/dev/null; true");
    assert_eq!(found, "");
    let branches = fixture.stdout_of("one", "git branch --all --format='%(refname:short)'");
    assert!(!branches.contains("two"), "{branches}");
}

fn every_address_is_answered_by_the_gate(fixture: &SandboxFixture) {
    let id = fixture.create("fix");
    for address in [
        "http://192.0.2.1/",
        "http://10.0.0.1/",
        "http://169.254.169.254/latest/meta-data/",
        "http://[2001:db8::1]/",
        "http://192.0.2.1:8080/",
    ] {
        let line =
            format!("curl -g -sS --noproxy '*' --max-time 20 -w '\\n%{{http_code}}' '{address}'");
        let answer = fixture.stdout_of("fix", &line);
        assert!(answer.ends_with("\n403"), "{address}: {answer}");
        let body = answer.lines().next().unwrap_or_default();
        let body: Value = serde_json::from_str(body).unwrap();
        assert_eq!(
            (&body["reason"], &body["sandbox"]),
            (&"ip_literal".into(), &id.clone().into()),
            "{address}"
        );
    }
    // Without SNI the target is unknown; the refusal is sent inside TLS.
    for address in ["https://192.0.2.1/", "https://[2001:db8::1]/"] {
        let line = format!("curl -g -ksS --noproxy '*' --max-time 20 '{address}'");
        let body: Value = serde_json::from_str(&fixture.stdout_of("fix", &line)).unwrap();
        assert_eq!(body["reason"], "name_mismatch", "{address}");
    }
}

/// A DNS query for the address of `x.test`, as a string for bash.
const QUERY: &str =
    "\\x12\\x34\\x01\\x00\\0\\x01\\0\\0\\0\\0\\0\\0\\x01x\\x04test\\0\\0\\x01\\0\\x01";
/// A DNS query for a text record of `x.test`, which the gate refuses.
const QUERY_TEXT: &str =
    "\\x12\\x34\\x01\\x00\\0\\x01\\0\\0\\0\\0\\0\\0\\x01x\\x04test\\0\\0\\x10\\0\\x01";

/// The first bytes of a synthetic address of the gate, as printed in hexadecimal.
const SYNTHETIC: &str = "c6 12 ";

fn every_resolver_address_is_answered_by_the_gate(fixture: &SandboxFixture) {
    fixture.create("fix");
    for resolver in ["198.51.100.53", "192.0.0.1", "2001:db8::53"] {
        let udp = format!(
            "exec 3<>/dev/udp/{resolver}/53; printf '{QUERY}' >&3; \
             timeout 20 dd bs=512 count=1 <&3 2>/dev/null | tail -c4 | od -An -tx1"
        );
        let printed = fixture.stdout_of("fix", &udp);
        assert!(
            printed.trim().starts_with(SYNTHETIC),
            "{resolver} by UDP: {printed}"
        );
        let tcp = format!(
            "exec 3<>/dev/tcp/{resolver}/53; printf '\\0\\x18{QUERY}' >&3; \
             timeout 20 dd bs=512 count=1 <&3 2>/dev/null | tail -c4 | od -An -tx1"
        );
        let printed = fixture.stdout_of("fix", &tcp);
        assert!(
            printed.trim().starts_with(SYNTHETIC),
            "{resolver} by TCP: {printed}"
        );
    }
    // This query goes to the resolver that programs use.
    let printed = fixture.stdout_of("fix", "timeout 20 getent ahostsv4 example.com");
    assert!(printed.starts_with("198.18."), "{printed}");
}

fn ports_without_a_listener_are_closed(fixture: &SandboxFixture) {
    fixture.create("fix");
    for address in [
        "192.0.2.1/22",
        "192.0.2.1/25",
        "2001:db8::1/22",
        "192.0.2.1/3128",
    ] {
        let line = format!("timeout 20 bash -c 'exec 3<>/dev/tcp/{address}'");
        let output = fixture.bash("fix", &line);
        assert_eq!(
            output.status.code(),
            Some(1),
            "{address}: {}",
            describe(&output)
        );
    }
}

fn localhost_is_private_to_the_sandbox(fixture: &SandboxFixture) {
    fixture.create("fix");
    let serve = r#"
        my $port = shift;
        my $server = IO::Socket::INET->new(LocalAddr => "127.0.0.1", LocalPort => $port,
            Listen => 1, ReuseAddr => 1) or die "listen: $!";
        my $client = IO::Socket::INET->new(PeerAddr => "localhost", PeerPort => $port) or die "$!";
        my $taken = $server->accept;
        print $taken "mine on $port\n";
        close $taken;
        print <$client>;
    "#;
    for port in ["53", "80", "443", "8080", "3000"] {
        let output = fixture.run(&[
            "exec",
            "fix",
            "--",
            "perl",
            "-MIO::Socket::INET",
            "-e",
            serve,
            port,
        ]);
        assert_eq!(
            output::stdout(&output),
            format!("mine on {port}\n"),
            "{}",
            describe(&output)
        );
    }
    // A port without a listener does not answer.
    let output = fixture.bash(
        "fix",
        "curl -sS --noproxy '*' --max-time 20 http://127.0.0.1/",
    );
    assert_eq!(output.status.code(), Some(7), "{}", describe(&output));
}

fn refusals_are_in_the_audit_log_and_the_summary(fixture: &SandboxFixture) {
    let line = format!(
        "for n in 1 2; do curl -s --noproxy '*' http://192.0.2.7/ >/dev/null; done; \
         exec 3<>/dev/udp/198.51.100.53/53; printf '{QUERY_TEXT}' >&3; \
         timeout 20 dd bs=512 count=1 <&3 >/dev/null 2>&1"
    );
    let output = fixture.run(&["run", "--name", "fix", "--", "bash", "-c", &line]);
    assert!(output.status.success(), "{}", describe(&output));
    let summary = output::stderr(&output);
    let refused = summary.lines().find(|line| line.contains("refused:"));
    let refused = refused.unwrap_or_else(|| panic!("{summary}"));
    assert!(refused.contains("192.0.2.7:80 (2×)"), "{refused}");
    assert!(refused.contains("x.test:53 (1×)"), "{refused}");
    let id = fixture.json(&["list"])[0]["id"]
        .as_str()
        .unwrap()
        .to_owned();
    let lines = fixture.ok(&["audit", "export", "--sandbox", &id, "--verdict", "deny"]);
    let records: Vec<Value> = lines
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    let count = |host: &str, port: u64, kind: &str| -> u64 {
        records
            .iter()
            .filter(|record| record["host"] == host && record["port"] == port)
            .filter(|record| record["kind"] == kind && record["sandbox"] == id.as_str())
            .map(|record| record["count"].as_u64().unwrap_or(1))
            .sum()
    };
    assert_eq!(count("192.0.2.7", 80, "http"), 2, "{lines}");
    assert_eq!(count("x.test", 53, "dns"), 1, "{lines}");
    assert!(fixture.ok(&["audit", "verify"]).starts_with("intact"));
}

fn operators_environment_is_not_passed_to_the_sandbox(fixture: &SandboxFixture) {
    fixture.create("fix");
    let output = fixture
        .palisade(&[
            "exec",
            "--env",
            "GIVEN=yes",
            "--env",
            "PASSED",
            "fix",
            "--",
            "env",
        ])
        .env("API_KEY", "secret")
        .env("PASSED", "too")
        .env("LC_TIME", "C")
        .output()
        .unwrap();
    let inside = output::stdout(&output);
    assert!(!inside.contains("secret"), "{inside}");
    for line in [
        "GIVEN=yes",
        "PASSED=too",
        "LC_TIME=C",
        "HOME=/home/agent",
        "USER=agent",
    ] {
        assert!(
            inside.lines().any(|found| found == line),
            "{line}: {inside}"
        );
    }
    let gate_dir = fixture.gate_dir.path().to_string_lossy();
    assert!(!inside.contains(&*gate_dir), "{inside}");
}

fn gate_raises_its_file_limit_and_programs_keep_theirs(fixture: &SandboxFixture) {
    fixture.create("fix");
    let limits = std::fs::read_to_string(format!("/proc/{}/limits", fixture.gate())).unwrap();
    let line = limits
        .lines()
        .find(|line| line.starts_with("Max open files"));
    let numbers: Vec<&str> = line.unwrap().split_whitespace().skip(3).collect();
    assert_eq!(numbers[0], numbers[1], "{limits}");
    let inside: u64 = fixture.stdout_of("fix", "ulimit -Sn").parse().unwrap();
    let most: u64 = numbers[1].parse().unwrap();
    assert_eq!(inside, most.min(4096));
    assert_eq!(fixture.stdout_of("fix", "ulimit -Hn"), numbers[1]);
}
