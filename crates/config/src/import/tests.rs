use super::*;

fn imported(format: ImportFormat, text: &str) -> ImportedPolicy {
    import(format, text.as_bytes()).unwrap()
}

/// The lines of the domains, and the notes.
fn result(format: ImportFormat, text: &str) -> (Vec<String>, Vec<String>) {
    let policy = imported(format, text);
    let lines = policy
        .text
        .lines()
        .filter_map(|line| line.strip_prefix("    - "));
    (lines.map(str::to_owned).collect(), policy.notes)
}

#[test]
fn srt_domains_become_rules_and_the_rest_is_named() {
    let (rules, notes) = result(
        ImportFormat::Srt,
        r#"{
            "network": {
                "allowedDomains": ["github.com", "*.npmjs.org", "api.example.com:8443", "[2001:db8::1]:443", "localhost"],
                "deniedDomains": ["evil.npmjs.org", "a.example:22"],
                "allowUnixSockets": ["/run/x.sock"], "allowLocalBinding": false, "strictAllowlist": true
            },
            "filesystem": { "denyRead": ["~/.ssh"], "allowWrite": ["."], "denyWrite": [] }
        }"#,
    );
    assert_eq!(
        rules,
        [
            r#""github.com""#,
            r#""*.npmjs.org""#,
            r#"{"host":"api.example.com","ports":[8443]}"#,
            r#"{"host":"2001:db8::1","ports":[443]}"#,
            // Every port that some rule allows.
            r#"{"host":"evil.npmjs.org","ports":[80,443,8443],"deny":[{}]}"#,
            r#"{"host":"a.example","ports":[22],"deny":[{}]}"#,
        ]
    );
    assert_eq!(
        notes,
        [
            "not carried over: network.allowedDomains[4] localhost: a sandbox has a localhost of its own",
            "not carried over: network.allowUnixSockets: egress rules have no counterpart",
            "not carried over: filesystem: a sandbox has its own files and environment; see sandbox in docs/config.md",
        ]
    );
    let (rules, notes) = result(
        ImportFormat::Srt,
        r#"{"network": {"allowedDomains": ["a.example", "*"], "deniedDomains": ["*"]}}"#,
    );
    assert_eq!(rules, [""; 0]);
    assert!(
        notes
            .contains(&"network.deniedDomains[0] denies every host: no host is allowed".to_owned()),
        "{notes:?}"
    );
}

#[test]
fn claude_settings_give_rules_for_commands_and_for_fetches() {
    let (rules, notes) = result(
        ImportFormat::ClaudeSettings,
        r#"{
            "model": "x",
            "sandbox": {"enabled": true, "network": {"allowedDomains": ["registry.npmjs.org"]}, "excludedCommands": ["docker"]},
            "permissions": {
                "allow": ["WebFetch(domain:docs.example.com)", "Bash(npm test)", "WebSearch"],
                "deny": ["WebFetch(domain:bad.example)", "Read(./.env)"],
                "ask": ["WebFetch(domain:maybe.example)"]
            }
        }"#,
    );
    assert_eq!(
        rules,
        [
            r#""registry.npmjs.org""#,
            r#"{"host":"docs.example.com","methods":["GET","HEAD"]}"#,
            r#"{"host":"bad.example","deny":[{}]}"#,
        ]
    );
    assert_eq!(
        notes,
        [
            "not carried over: sandbox.excludedCommands: a sandbox has its own files and environment",
            "not carried over: permissions.allow[2] WebSearch: it names no domain",
            "not carried over: permissions.ask[0] maybe.example: approvals are not available",
            "not carried over: 2 permission rules that are not about the network",
            "not carried over: model: not about the network",
        ]
    );
}

#[test]
fn openshell_endpoints_keep_their_restrictions() {
    let (rules, notes) = result(
        ImportFormat::OpenShell,
        r#"
version: 1
filesystem_policy: {include_workdir: true}
network_policies:
  api:
    endpoints:
      - {host: api.example.com, port: 443, protocol: rest, enforcement: enforce, access: read-only}
      - host: git.example.com
        ports: [443, 8443]
        protocol: rest
        rules:
          - allow: {method: GET, path: "/a/**"}
          - allow: {method: POST, path: "/a/x", query: {q: "1"}}
        deny_rules: [{method: DELETE, path: "/**"}]
      - {host: sql.example.com, port: 5432, protocol: postgres}
      - {host: odd.example.com, port: 443, new_limit: 3}
      - {host: old.example.com, port: 443, enforcement: audit}
    binaries: [{path: /usr/bin/curl}, {path: "/opt/*"}]
  any:
    endpoints: [{host: "*.example.org", port: 443}]
  never:
    endpoints: [{host: never.example, port: 443}]
    binaries: [{path: "/opt/*/x"}]
"#,
    );
    assert_eq!(
        rules,
        [
            r#"{"host":"api.example.com","ports":[443],"methods":["GET","HEAD","OPTIONS"],"programs":["/usr/bin/curl"]}"#,
            r#"{"host":"git.example.com","ports":[443,8443],"methods":["GET"],"paths":["/a/**"],"programs":["/usr/bin/curl"],"deny":[{"methods":["DELETE"]}]}"#,
            r#"{"host":"*.example.org","ports":[443]}"#,
        ]
    );
    let expected = [
        "network_policies.api.binaries[1].path /opt/*: a pattern of programs",
        "network_policies.api.endpoints[1].rules[1]: only method and path are understood",
        "network_policies.api.endpoints[2]: protocol postgres",
        "network_policies.api.endpoints[3].new_limit has no counterpart",
        "network_policies.api.endpoints[4]: enforcement audit: it refuses nothing",
        "wider here: network_policies.any names no program and applies to all of them",
        "network_policies.never: none of its programs can be named",
        "filesystem_policy: not about the allowed hosts",
    ];
    for part in expected {
        assert!(
            notes.iter().any(|note| note.contains(part)),
            "{part}: {notes:#?}"
        );
    }
}

#[test]
fn docker_kits_of_both_versions_become_rules() {
    let first = "schemaVersion: \"1\"\nkind: agent\nname: amp\nnetwork:\n  allowedDomains: [\"ampcode.com:443\", \"*.ampcode.com:443\"]\n  serviceDomains: {ampcode.com: amp}\n";
    let (rules, notes) = result(ImportFormat::DockerKit, first);
    assert_eq!(
        rules,
        [
            r#"{"host":"ampcode.com","ports":[443]}"#,
            r#"{"host":"*.ampcode.com","ports":[443]}"#
        ]
    );
    assert!(
        notes[0].starts_with("wider here: *.ampcode.com:443"),
        "{notes:?}"
    );
    assert!(
        notes[1].starts_with("not carried over: network.serviceDomains"),
        "{notes:?}"
    );

    let second = "schemaVersion: \"2\"\nkind: sandbox\npermissions:\n  network:\n    allow: [a.example, \"**.b.example\", 10.0.0.0/8, \"**\"]\n    deny: [c.b.example]\nsetup: {install: [{command: x}]}\n";
    let (rules, notes) = result(ImportFormat::DockerKit, second);
    assert_eq!(
        rules,
        [
            r#""a.example""#,
            r#""*.b.example""#,
            r#"{"host":"c.b.example","deny":[{}]}"#
        ]
    );
    assert!(
        notes
            .iter()
            .any(|note| note.contains("10.0.0.0/8: a path or a range")),
        "{notes:?}"
    );
    assert!(
        notes
            .iter()
            .any(|note| note.contains("every host; sandbox.tier")),
        "{notes:?}"
    );
    assert!(
        notes
            .iter()
            .any(|note| note.contains("setup: not about the network")),
        "{notes:?}"
    );
}

#[test]
fn hostile_files_are_refused_or_bounded() {
    use ImportFormat::{ClaudeSettings, DockerKit, OpenShell, Srt};
    for (format, text, expected) in [
        (Srt, "", "not JSON"),
        (Srt, "[]", "the file must be a mapping"),
        (Srt, "{}", "the key network is missing"),
        (Srt, r#"{"network": []}"#, "network must be a mapping"),
        (
            Srt,
            r#"{"network": {"allowedDomains": "x"}}"#,
            "network.allowedDomains must be a list",
        ),
        (
            Srt,
            r#"{"network": {"allowedDomains": [{}]}}"#,
            "network.allowedDomains[0] must be text",
        ),
        (
            ClaudeSettings,
            r#"{"model": "x"}"#,
            "the keys sandbox and permissions are missing",
        ),
        (OpenShell, "a: [", "not YAML"),
        (OpenShell, "a: 1\na: 2\n", "not YAML"),
        (OpenShell, "version: 1\n", "network_policies is missing"),
        (DockerKit, "schemaVersion: \"3\"\n", "schemaVersion must be"),
        (DockerKit, "schemaVersion: 2\n", "permissions is missing"),
    ] {
        let error = import(format, text.as_bytes()).unwrap_err().to_string();
        assert!(error.contains(expected), "{text}: {error}");
    }
    let deep = "[".repeat(100_000);
    assert!(import(Srt, deep.as_bytes()).is_err() && import(OpenShell, deep.as_bytes()).is_err());
    let many: Vec<String> = (0..20_000).map(|n| format!("\"h{n}.example\"")).collect();
    let many = format!(
        r#"{{"network": {{"allowedDomains": [{}]}}}}"#,
        many.join(",")
    );
    assert_eq!(
        import(Srt, many.as_bytes()),
        Err(ImportError::TooMany(10_000))
    );
    // Terminal control characters and line breaks stay out of text and notes.
    let odd = "{\"network\": {\"allowedDomains\": [\"a\\u001b[2J\\nb.example\", \"x.example\\n- y.example\"]}}";
    let policy = imported(Srt, odd);
    assert_eq!(policy.rules, 0);
    assert!(
        policy
            .notes
            .iter()
            .all(|note| !note.contains(['\u{1b}', '\n'])),
        "{:?}",
        policy.notes
    );
    // A path cannot become a variable of palisade.yaml.
    let variable = "version: 1\nnetwork_policies: {a: {endpoints: [{host: a.example, rules: [{allow: {method: GET, path: '/${HOME}'}}]}]}}\n";
    assert_eq!(imported(OpenShell, variable).rules, 0);
}
