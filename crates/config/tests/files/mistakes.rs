//! Messages about files with mistakes.

use std::path::Path;

use super::{check, directory, load, load_in, no_env};

#[test]
fn five_mistakes_of_five_kinds_are_five_problems() {
    check(
        "server:\n\
         \x20 shutdown_timeout: soon\n\
         \x20 enforce_agent_id: yes\n\
         egress:\n\
         \x20 alowlist: ./a.yaml\n\
         \x20 unknown: deni\n\
         tools:\n\
         \x20 - command: [a]\n\
         metrics: {path: '${NOPE}'}\n\
         sandbox: {remote: {}}\n",
        &[
            "3:21: server.shutdown_timeout must be a duration such as 50ms, 10s, 2m or 1h, not 'soon'",
            "4:21: server.enforce_agent_id must be true or false, not 'yes'; write true or false",
            "6:3: unknown key 'alowlist' in egress; did you mean 'allowlist'?",
            "7:12: egress.unknown must be deny or ask, not 'deni'; did you mean 'deny'?",
            "9:5: the key 'name' is missing in tools[0]",
            "10:17: the environment variable NOPE is not set; set it, or write ${NOPE:-default}",
            "11:19: sandbox.remote has no address; set exactly one of socket_path and tcp",
        ],
    );
}

#[test]
fn moved_top_level_keys_are_reported_with_their_new_name() {
    check(
        "interceptor_addr: ':8090'\n\
         mcp_server_addr: ':8090'\n\
         shutdown_timeout: 10s\n\
         log_level: info\n\
         sandbox: {log_level: info}\n",
        &[
            "2:1: unknown key 'interceptor_addr' at the top level; write server.interceptor_addr instead",
            "3:1: unknown key 'mcp_server_addr' at the top level; write server.mcp_server_addr instead",
            "4:1: unknown key 'shutdown_timeout' at the top level; write server.shutdown_timeout instead",
            "5:1: unknown key 'log_level' at the top level; write logging.level instead",
            "6:11: unknown key 'log_level' in sandbox",
        ],
    );
}

#[test]
fn mistakes_in_a_list_of_containers_are_reported_with_their_item() {
    check(
        "sandbox:\n\
         \x20 backend: remote\n\
         \x20 remote:\n\
         \x20   - {name: a, socket_path: /a}\n\
         \x20   - {name: a, tcp: {host: 127.0.0.1, port: 1}}\n\
         \x20   - {name: Fix It, socket_path: /c}\n\
         \x20   - {name: d}\n\
         \x20   - {name: e, socket_path: /e, auth: {required: true}}\n\
         \x20   - {name: f, socket_path: /f, colour: red}\n\
         \x20   - {socket_path: /g}\n\
         \x20   - {socket_path: /h}\n",
        &[
            "6:14: another container is called 'a' on line 5",
            "7:14: sandbox.remote[2].name must be a name of 1 to 63 lower-case letters and digits, with single dashes in between, not 'Fix It'",
            "8:7: sandbox.remote[3] has no address; set exactly one of socket_path and tcp",
            "9:51: sandbox.remote[4].auth.required is true but there is no token; set sandbox.remote[4].auth.token",
            "10:34: unknown key 'colour' in sandbox.remote[5]; known keys: name, socket_path, tcp, wait_for_ready_ms or auth",
            "12:7: another container is called 'remote' on line 11",
        ],
    );
    check(
        "sandbox: {backend: remote, remote: []}\n",
        &[
            "2:20: sandbox.backend is remote but sandbox.remote has no container; add sandbox.remote.socket_path or sandbox.remote.tcp",
        ],
    );
    let many: String = (0..65)
        .map(|n| format!("{{name: n{n}, socket_path: /s}},"))
        .collect();
    check(
        &format!("sandbox: {{remote: [{many}]}}\n"),
        &["2:19: sandbox.remote has at most 64 items"],
    );
}

#[test]
fn unknown_github_rule_is_reported_with_a_suggestion() {
    check(
        "egress:\n\
         \x20 github:\n\
         \x20   allow: [merge, relases, frobnicate, read-public]\n",
        &[
            "4:20: no GitHub rule is called 'relases'; did you mean 'releases'?",
            "4:29: no GitHub rule is called 'frobnicate'; docs/config.md lists the rules",
            "4:41: no GitHub rule is called 'read-public'; docs/config.md lists the rules",
        ],
    );
}

#[test]
fn invalid_item_does_not_hide_mistakes_in_the_next() {
    check(
        "tools:\n\
         - {name: a, command: []}\n\
         - {name: b, command: [x], runtime: {type: e2b}}\n\
         - {name: b, command: [x]}\n\
         - {name: c, command: x, colour: red}\n",
        &[
            "3:22: tools[0].command must not be empty",
            "4:36: tool 'b' runs in e2b but has no template; add runtime.template",
            "5:10: another tool is called 'b' on line 4",
            "6:22: tools[3].command must be a list, not 'x'; write it as a list: [ … ]",
            "6:25: unknown key 'colour' in tools[3]",
        ],
    );
}

#[test]
fn misspelt_keys_and_words_get_a_suggestion() {
    check(
        "egres: {}\n",
        &["2:1: unknown key 'egres' at the top level; did you mean 'egress'?"],
    );
    check(
        "server: {auth-token: x}\n",
        &["2:10: unknown key 'auth-token' in server; did you mean 'auth_token'?"],
    );
    check(
        "egress: {dns: {modus: x}}\n",
        &["2:16: unknown key 'modus' in egress.dns; did you mean 'mode'?"],
    );
    check(
        "logging: {level: warning}\n",
        &["2:18: logging.level must be error, warn, info, debug or trace, not 'warning'"],
    );
    check(
        "egress: {domains: [{host: a.example, method: [GET]}]}\n",
        &["2:38: unknown key 'method' in egress.domains[0]; did you mean 'methods'?"],
    );
    check(
        "logging: {colour: true}\n",
        &["2:11: unknown key 'colour' in logging; known keys: level or format"],
    );
}

#[test]
fn every_kind_of_mistake_has_a_message() {
    for (yaml, expected) in [
        ("tools: {}", "2:8: tools must be a list, not a mapping"),
        ("server: 3", "2:9: server must be a mapping, not a number"),
        (
            "sandbox: {limits: {pids: many}}",
            "2:26: sandbox.limits.pids must be a whole number, not 'many'",
        ),
        (
            "sandbox: {limits: {pids: 0}}",
            "2:26: sandbox.limits.pids must be at least 1, not 0",
        ),
        (
            "sandbox: {limits: {cpus: 0}}",
            "2:26: sandbox.limits.cpus must be at least 0.01, not 0",
        ),
        (
            "scan: {budget: {depth: 99}}",
            "2:24: scan.budget.depth must be at most 16, not 99",
        ),
        (
            "egress: {transparent_ports: [70000]}",
            "2:30: egress.transparent_ports[0] must be at most 65535, not 70000",
        ),
        (
            "egress: {domains: [[a]]}",
            "2:20: egress.domains[0] must be a host such as example.com, *.example.com or an address, not a list",
        ),
        (
            "egress: {domains: [{}]}",
            "2:20: the key 'host' is missing in egress.domains[0]",
        ),
        (
            "egress: {domains: ['*']}",
            "2:20: egress.domains[0] must be a host such as example.com, *.example.com or an address, not '*': '*' alone would match every host: name the hosts, or use '*.example.com'",
        ),
        (
            "egress: {domains: [{host: a.example, methods: [get]}]}",
            "2:48: egress.domains[0].methods[0] must be an HTTP method such as GET, not 'get': methods are case-sensitive: write GET",
        ),
        (
            "egress: {domains: [{host: a.example, paths: [x]}]}",
            "2:46: egress.domains[0].paths[0] must be a path such as /api/*, or /api/** for everything below, not 'x': a path pattern must start with '/'",
        ),
        (
            "egress: {allow_private: [{host: a.example, cidr: 10.1.2.3/16}]}",
            "2:50: egress.allow_private[0].cidr must be a range of addresses such as 10.1.0.0/16 or fd00::/8, not '10.1.2.3/16': did you mean 10.1.0.0/16?",
        ),
        (
            "egress: {resolve: {'a b': '127.0.0.1:1'}}",
            "2:20: the key 'a b' in egress.resolve must be a host, or a host and port such as example.com:443 (a host name must not contain ' ')",
        ),
        (
            "egress: {passthrough: [a.example, '*.git.example']}\ngit: {hosts: [x.git.example]}",
            "2:35: a host of git.hosts cannot be in egress.passthrough; remove the host from one of the two lists",
        ),
        (
            "egress: {resolve: {a.example: ':80'}}",
            "2:31: egress.resolve.a.example must be a specific address with a port; write an IP address and a port other than 0",
        ),
        (
            "egress: {timeouts: {connect: 0}}",
            "2:30: egress.timeouts.connect must be more than 0",
        ),
        (
            "egress: {timeouts: {connect: -1}}",
            "2:30: egress.timeouts.connect must be at least 0, not -1",
        ),
        (
            "sandbox: {snapshot: {file: 2GiB}}",
            "2:28: sandbox.snapshot.file must be at most 1GiB",
        ),
        (
            "sandbox: {snapshot: {total: 0}}",
            "2:29: sandbox.snapshot.total must be more than 0",
        ),
        (
            "sandbox: {image: 7}",
            "2:18: sandbox.image must be a container image such as busybox:latest, not 7; put it in quotes",
        ),
        (
            "sandbox: {backend: remote}",
            "2:20: sandbox.backend is remote but sandbox.remote has no container; add sandbox.remote.socket_path or sandbox.remote.tcp",
        ),
        (
            "sandbox: {remote: {socket_path: /x, tcp: {host: h, port: 1}}}",
            "2:19: sandbox.remote has two addresses, socket_path and tcp; set exactly one of socket_path and tcp",
        ),
        (
            "sandbox: {env: [A=b]}",
            "2:17: sandbox.env[0] must be the name of an environment variable, not 'A=b'",
        ),
        (
            "server: {interceptor_addr: '0.0.0.0:8090'}",
            "2:28: server.interceptor_addr is 0.0.0.0:8090, which is not a loopback address, but server.auth_token is not set; set server.auth_token, or use 127.0.0.1",
        ),
        (
            "server: {single_port: ':0', mcp_server_addr: '127.0.0.1:1'}",
            "2:23: server.single_port and server.mcp_server_addr cannot both be set; remove one of them",
        ),
        (
            "git: {mirrors: [{name: a, upstream: 'git@git.example:a.git'}]}",
            "2:17: mirror 'a' uses ssh but has no host_key; add the server's public key, as ssh-keyscan prints it",
        ),
        (
            "git: {mirrors: [{name: \"a\\nb\", upstream: 'https://git.example/a.git'}]}",
            "2:24: git.mirrors[0].name must be a name of 1 to 64 letters, digits, '_', '.' or '-' that starts with a letter or digit, not 'a\\nb'",
        ),
        (
            "git: {protected: ['']}",
            "2:19: git.protected[0] must be a branch such as main, or release/*, not '': a ref must not contain an empty component",
        ),
        (
            "tools: [{name: \"a\\x1bb\", command: [x]}]",
            "2:16: tools[0].name must be a name of 1 to 128 printable characters, not 'a\\u{1b}b'",
        ),
        (
            "tools: [{name: a, command: [' ']}]",
            "2:29: tool 'a' has no program to run",
        ),
        (
            "tools: [{name: , command: [x]}]",
            "2:14: tools[0].name needs a value",
        ),
        (
            "policies: {bundles: [{id: a, path: b, entrypoint: c}, {id: a, path: b, entrypoint: c}]}",
            "2:60: another bundle is called 'a' on line 2",
        ),
        (
            "credentials: {rows: [{name: a, host: h.example, source: 'sk-live-123'}]}",
            "2:57: credentials.rows[0].source must be env:NAME, file:PATH or command:LINE",
        ),
        (
            "metrics: {tracing: {endpoint: 'ftp://x'}}",
            "2:31: metrics.tracing.endpoint must be an http or https URL, not 'ftp://x'",
        ),
        (
            "- a",
            "2:3: not YAML: while parsing a block mapping, did not find expected key",
        ),
    ] {
        let expected = [expected];
        check(&format!("{yaml}\n"), &expected);
    }
    assert_eq!(
        load("- a\n").unwrap_err(),
        "palisade.yaml:1:1: the file must be a mapping, not a list"
    );
    assert_eq!(
        load("version: 2\n").unwrap_err(),
        "palisade.yaml:1:10: version must be 1.0 or 1, not 2"
    );
}

#[test]
fn the_value_of_a_secret_is_never_in_a_message() {
    let secret = "hunter2";
    for yaml in [
        "secrets: hunter2",
        "secrets: {a: [hunter2]}",
        "secrets: [hunter2]",
        "server: {auth_token: {hunter: hunter2}}",
        "server: hunter2",
        "approvals: {webhook: hunter2}",
        "approvals: {webhook: 'https://a b/hunter2'}",
        "sandbox: {remote: hunter2}",
        "sandbox: {remote: {auth: hunter2}}",
        "tools: [{name: a, command: [x], env: ['hunter2']}]",
        "tools: [{name: a, command: [x], env: hunter2}]",
        "credentials: {rows: [{name: a, host: b, source: hunter2}]}",
        "git: {mirrors: [{name: a, upstream: 'https://u:hunter2@git.example/x'}]}",
    ] {
        let problems = load(&format!("version: '1.0'\n{yaml}\n")).unwrap_err();
        assert!(!problems.contains(secret), "{yaml}: {problems}");
    }
    // The value of a variable is not shown either, wherever it is used.
    for yaml in [
        "logging: {level: '${V}'}",
        "egress: {timeouts: {connect: '${V}'}}",
        "sandbox: {limits: {pids: '${V}'}}",
        "egress: {domains: ['* ${V}']}",
        "tools: '${V}'",
    ] {
        let dir = directory(&[("palisade.yaml", &format!("version: '1.0'\n{yaml}\n"))]);
        let problems = load_in(dir.path(), &|_| Some(secret.to_owned())).unwrap_err();
        assert!(!problems.contains(secret), "{yaml}: {problems}");
        assert!(
            problems.ends_with("the value comes from ${V}"),
            "{problems}"
        );
    }
}

#[test]
fn included_file_must_exist_and_its_mistakes_name_it() {
    let dir = directory(&[
        (
            "palisade.yaml",
            "version: '1.0'\negress:\n  allowlist: ./list.yaml\n  policy: '${P}'\n",
        ),
        ("list.yaml", "version: 3\ndomain: [a.example]\n"),
        (
            "policy.yaml",
            "git:\n  push_limits: {warning_bytes: 200MiB}\ncircuit_breakers:\n  defaults: {failure_threshold: 0}\n\
             rate_limits:\n  defaults: {requests_per_second: 0}\n  per_upstream: {'a b': {}}\n\
             policy: {blocked_api_patterns: {PUT: ['(']}}\n",
        ),
        ("grants.yaml", "domains: [a..example]\n"),
    ]);
    let env = |name: &str| (name == "P").then(|| "policy.yaml".to_owned());
    assert_eq!(
        load_in(dir.path(), &env).unwrap_err(),
        "grants.yaml:1:11: domains[0] must be a host such as example.com, *.example.com or an address, not 'a..example': a host name must not contain an empty label ('..' or a leading dot)\n\
         list.yaml:1:10: version must be 1.0 or 1, not 3\n\
         list.yaml:2:1: unknown key 'domain' at the top level; did you mean 'domains'?\n\
         policy.yaml:2:32: git.push_limits.warning_bytes must be at most hard_limit_bytes, which is 100MiB\n\
         policy.yaml:4:33: circuit_breakers.defaults.failure_threshold must be at least 1, not 0\n\
         policy.yaml:6:35: rate_limits.defaults.requests_per_second must be more than 0, not 0\n\
         policy.yaml:7:18: the key 'a b' in rate_limits.per_upstream must be a host name or address (a host name must not contain ' ')\n\
         policy.yaml:8:39: policy.blocked_api_patterns.PUT[0] must be a regular expression, not '(': unclosed group"
    );

    let dir = directory(&[(
        "palisade.yaml",
        "version: '1.0'\negress:\n  allowlist: nowhere.yaml\n  policy: ./sub\n",
    )]);
    std::fs::create_dir(dir.path().join("sub")).unwrap();
    assert_eq!(
        load_in(dir.path(), &no_env).unwrap_err(),
        "palisade.yaml:3:14: nowhere.yaml cannot be read: no such file\n\
         palisade.yaml:4:11: sub cannot be read: not a regular file"
    );
}

#[test]
fn one_host_in_two_spellings_is_a_mistake() {
    let dir = directory(&[
        (
            "palisade.yaml",
            "version: '1.0'\negress: {policy: policy.yaml}\n",
        ),
        (
            "policy.yaml",
            "rate_limits:\n  per_upstream:\n    A.example: {requests_per_second: 1}\n    a.example.: {requests_per_second: 9}\n\
             circuit_breakers:\n  upstreams:\n    B.example: {}\n    b.example: {}\n",
        ),
    ]);
    assert_eq!(
        load_in(dir.path(), &no_env).unwrap_err(),
        "policy.yaml:4:17: this host is listed twice, in two spellings\n\
         policy.yaml:8:16: this host is listed twice, in two spellings"
    );
}

#[test]
fn path_that_is_not_a_file_is_reported() {
    let dir = directory(&[]);
    let first_message = |path: &Path| {
        let problems = config::load(Some(path), &no_env).unwrap_err();
        problems.iter().next().unwrap().message.clone()
    };
    assert_eq!(
        first_message(&dir.path().join("none.yaml")),
        "cannot be read: no such file"
    );
    assert_eq!(
        first_message(dir.path()),
        "cannot be read: not a regular file"
    );
    assert_eq!(first_message(Path::new("/")), "does not name a file");
    let fifo = dir.path().join("fifo");
    nix::unistd::mkfifo(&fifo, nix::sys::stat::Mode::S_IRWXU).unwrap();
    assert_eq!(first_message(&fifo), "cannot be read: not a regular file");
    let huge = dir.path().join("huge");
    std::fs::write(&huge, vec![b'#'; (4 << 20) + 1]).unwrap();
    assert_eq!(
        first_message(&huge),
        "cannot be read: larger than 4194304 bytes"
    );
}
