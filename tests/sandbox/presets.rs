//! Presets and tiers: what a sandbox may reach because of its agent, its repository and the
//! operator's choice.

use std::process::Output;

use testkit::origin::{OriginReply, OriginServer};
use testkit::output;
use testkit::resolver::{DnsReply, RecordData, Resolver, record};

use crate::sandbox_fixture::{SandboxFixture, describe};

for_every_operator!(
    preset_of_the_agent_is_added_by_its_program_name,
    tier_adds_registries_of_the_repository_and_survives_a_restart,
    open_tier_allows_reads_everywhere_and_no_uploads,
    balanced_tier_reads_only_the_registered_repository,
    preset_options_are_checked,
);

/// Operator settings that lead hosts to `origin`, over HTTP.
fn settings(fixture: &SandboxFixture, origin: &OriginServer, hosts: &[&str], more: &str) {
    let address = origin.address();
    let resolve: Vec<String> = hosts
        .iter()
        .map(|host| format!("\"{host}\": \"{address}\""))
        .collect();
    let resolve = resolve.join(", ");
    fixture.gate_dir.write_config(&format!(
        "version: \"1.0\"\negress:\n  resolve: {{{resolve}}}\n{more}"
    ));
}

fn origin() -> OriginServer {
    OriginServer::http(|_| OriginReply::text("well"))
}

fn run(fixture: &SandboxFixture, args: &[&str]) -> Output {
    let output = fixture.run(&[&["run"], args].concat());
    assert!(output.status.success(), "{}", describe(&output));
    output
}

/// The status of a request with curl's options.
fn status(fixture: &SandboxFixture, name: &str, request: &str) -> String {
    let curl = format!("curl -sS -o /dev/null -w '%{{http_code}}' --max-time 25 {request}");
    fixture.stdout_of(name, &curl)
}

fn delete(fixture: &SandboxFixture, names: &[&str]) {
    for name in names {
        fixture.ok(&["delete", "-f", name]);
    }
    fixture.assert_nothing_left();
}

// Issue 18, part 5.
fn preset_of_the_agent_is_added_by_its_program_name(fixture: &SandboxFixture) {
    let origin = origin();
    settings(
        fixture,
        &origin,
        &["api.anthropic.com", "api.openai.com"],
        "",
    );
    // The agent is a program in the repository.
    fixture.repo.write(
        "bin/claude",
        "#!/bin/sh\nexec curl -sS -o /dev/null -w '%{http_code}' \"$@\"\n",
    );
    fixture
        .repo
        .git(&["update-index", "--add", "--chmod=+x", "bin/claude"]);
    fixture.repo.git(&["commit", "-m", "agent"]);
    let args = ["--name", "one", "--as-is", "--", "./bin/claude"];
    let output = run(
        fixture,
        &[&args[..], &["http://api.anthropic.com/v1/messages"]].concat(),
    );
    assert_eq!(output::stdout(&output), "200");
    let line = "palisade: tier balanced: preset claude\n";
    assert!(
        output::stderr(&output).contains(line),
        "{}",
        describe(&output)
    );
    // The gate names the rule, and a sandbox of another program does not have it.
    let listed = fixture.ok(&["audit", "list", "--json"]);
    assert!(listed.contains("preset:claude"), "{listed}");
    let request = [
        "--method",
        "POST",
        "--sandbox",
        "one",
        "http://api.anthropic.com/v1/messages",
    ];
    let tried = fixture.ok(&[&["policy", "try"], &request[..]].concat());
    assert!(tried.contains("rule      preset:claude"), "{tried}");
    let output = run(fixture, &["--name", "two", "--", "true"]);
    assert!(
        !output::stderr(&output).contains("tier"),
        "{}",
        describe(&output)
    );
    assert_eq!(status(fixture, "two", "http://api.anthropic.com/"), "403");
    // A run of the agent in that sandbox says so, and how to allow it.
    let agent = [
        "--name",
        "two",
        "--as-is",
        "--",
        "./bin/claude",
        "http://api.anthropic.com/",
    ];
    let output = run(fixture, &agent);
    let note = "palisade: sandbox two was created without the preset claude and may not reach \
                api.anthropic.com; to allow it: ";
    assert!(
        output::stderr(&output).contains(note),
        "{}",
        describe(&output)
    );
    assert_eq!(status(fixture, "one", "http://api.openai.com/"), "403");
    delete(fixture, &["one", "two"]);
}

fn tier_adds_registries_of_the_repository_and_survives_a_restart(fixture: &SandboxFixture) {
    let origin = origin();
    let hosts = ["index.crates.io", "registry.npmjs.org", "pypi.org"];
    let deny = "  domains: [{host: registry.npmjs.org, deny: [{}]}]\n";
    settings(fixture, &origin, &hosts, deny);
    fixture.repo.write("Cargo.toml", "");
    fixture.repo.write("web/package.json", "{}");
    fixture.repo.commit("languages");
    let printed = run(fixture, &["--name", "plain", "--json", "--", "true"]);
    let json: serde_json::Value = serde_json::from_str(&output::stdout(&printed)).unwrap();
    assert_eq!(json["tier"], "balanced");
    assert_eq!(json["presets"], serde_json::json!(["crates", "npm"]));
    run(
        fixture,
        &["--name", "locked", "--tier", "locked", "--", "true"],
    );
    let output = run(
        fixture,
        &[
            "--name", "more", "--tier", "locked", "--preset", "pypi", "--", "true",
        ],
    );
    let line = "palisade: tier locked: preset pypi\n";
    assert!(
        output::stderr(&output).contains(line),
        "{}",
        describe(&output)
    );
    for _ in 0..2 {
        for (name, request, expected) in [
            ("plain", "http://index.crates.io/se/rd/serde", "200"),
            (
                "plain",
                "-X PUT -d x http://index.crates.io/se/rd/serde",
                "403",
            ),
            // The operator's deny wins.
            ("plain", "http://registry.npmjs.org/left-pad", "403"),
            ("plain", "http://pypi.org/simple/x/", "403"),
            ("locked", "http://index.crates.io/se/rd/serde", "403"),
            ("more", "http://pypi.org/simple/x/", "200"),
            ("more", "http://pypi.org/legacy/", "403"),
        ] {
            assert_eq!(
                status(fixture, name, request),
                expected,
                "{name}: {request}"
            );
        }
        fixture.ok(&["config", "reload"]);
        fixture.ok(&["gate", "restart"]);
    }
    delete(fixture, &["plain", "locked", "more"]);
}

fn open_tier_allows_reads_everywhere_and_no_uploads(fixture: &SandboxFixture) {
    let origin = origin();
    let resolver = Resolver::start();
    for (name, address) in [
        ("private.example", [10, 0, 0, 1]),
        ("local.example", [127, 0, 0, 1]),
    ] {
        let records = vec![record(name, RecordData::A(address.into()))];
        resolver.set_reply(name, 1, DnsReply::Records(records));
    }
    let hosts = [
        "any.example",
        "post.example",
        "no.example",
        "unread.example",
    ];
    let more = format!(
        "  domains: [{{host: post.example, methods: [POST]}}, {{host: no.example, deny: [{{}}]}}]\n  \
         passthrough: [unread.example]\n  dns: {{upstreams: [\"{}\"]}}\nsandbox:\n  tier: open\n",
        resolver.address()
    );
    settings(fixture, &origin, &hosts, &more);
    let output = run(fixture, &["--name", "open", "--", "true"]);
    let line = "palisade: tier open: reads of every host\n";
    assert!(
        output::stderr(&output).contains(line),
        "{}",
        describe(&output)
    );
    for (request, expected) in [
        ("http://any.example/a", "200"),
        ("-I http://any.example/a", "200"),
        ("-X POST -d x http://any.example/a", "403"),
        ("-X PUT -d x http://any.example/a", "403"),
        ("-X GET -d secret http://any.example/a", "403"),
        (
            "-H 'X-HTTP-Method-Override: POST' http://any.example/a",
            "403",
        ),
        (
            "-H 'Connection: Upgrade' -H 'Upgrade: websocket' -H 'Sec-WebSocket-Version: 13' \
             -H 'Sec-WebSocket-Key: UGFsaXNhZGUtUGFsaXNhZA==' http://any.example/a",
            "403",
        ),
        ("-X POST -d x http://post.example/", "200"),
        ("http://no.example/", "403"),
        // Private addresses stay refused, as do addresses instead of names.
        ("http://private.example/", "403"),
        ("http://local.example/", "403"),
        ("http://192.0.2.1/", "403"),
    ] {
        assert_eq!(status(fixture, "open", request), expected, "{request}");
    }
    // Connections that are not decrypted could send anything.
    let unread = fixture.bash("open", "curl -sS --max-time 25 https://unread.example/");
    assert!(!unread.status.success(), "{}", describe(&unread));
    let listed = fixture.ok(&["audit", "list", "--json"]);
    assert!(
        listed.contains("Only reads of unread.example") || listed.contains("egress.passthrough"),
        "{listed}"
    );
    let refused = fixture.fails(
        4,
        &["run", "--name", "open", "--tier", "locked", "--", "true"],
    );
    assert!(
        refused.contains("--tier locked: its tier is open"),
        "{refused}"
    );
    delete(fixture, &["open"]);
}

fn balanced_tier_reads_only_the_registered_repository(fixture: &SandboxFixture) {
    let origin = origin();
    settings(
        fixture,
        &origin,
        &["github.com", "raw.githubusercontent.com"],
        "",
    );
    let url = "https://github.com/acme/widgets.git";
    fixture.repo.git(&["remote", "add", "origin", url]);
    let output = run(fixture, &["--name", "git", "--", "true"]);
    let line = "palisade: tier balanced: reads of github.com/acme/widgets\n";
    assert!(
        output::stderr(&output).contains(line),
        "{}",
        describe(&output)
    );
    for (request, expected) in [
        (
            "http://raw.githubusercontent.com/acme/widgets/main/README.md",
            "200",
        ),
        (
            "'http://github.com/acme/widgets.git/info/refs?service=git-upload-pack'",
            "200",
        ),
        (
            "'http://github.com/acme/other.git/info/refs?service=git-upload-pack'",
            "403",
        ),
        // A git host serves git only.
        ("http://github.com/acme/widgets/blob/main/README.md", "403"),
        (
            "http://raw.githubusercontent.com/acme/other/main/README.md",
            "403",
        ),
        ("-X POST -d x http://github.com/acme/widgets/issues", "403"),
    ] {
        assert_eq!(status(fixture, "git", request), expected, "{request}");
    }
    delete(fixture, &["git"]);
}

fn preset_options_are_checked(fixture: &SandboxFixture) {
    let error = fixture.fails(2, &["run", "--preset", "cluade", "--", "true"]);
    assert!(error.contains("did you mean 'claude'?"), "{error}");
    let error = fixture.fails(2, &["run", "--tier", "closed", "--", "true"]);
    assert!(error.contains("locked, balanced, open"), "{error}");
    fixture.ok(&["create", "made", "--preset", "npm"]);
    let error = fixture.fails(
        4,
        &["run", "--name", "made", "--preset", "go", "--", "true"],
    );
    assert!(
        error.contains("--preset go: it was created without"),
        "{error}"
    );
    run(
        fixture,
        &["--name", "made", "--preset", "npm", "--", "true"],
    );
    delete(fixture, &["made"]);
}
