//! Loading of whole files: settings or problems out.

use std::path::Path;
use std::time::Duration;

use config::section::scan::{GitAction, ScanAction};
use config::section::tools::RuntimeKind;
use config::{Sources, ValueOrigin};

use super::{check, data, directory, host, load, load_in, no_env};

#[test]
fn a_file_with_every_key_loads() {
    let env = |name: &str| (name == "HOME").then(|| "/home/op".to_owned());
    let settings = config::load(Some(&data("palisade.yaml")), &env).unwrap();
    assert_eq!(settings.git.scan, GitAction::Note);
    assert_eq!(settings.scan.outbound, ScanAction::Off);
    assert_eq!(settings.egress.timeouts.idle, Duration::from_secs(3600));
    assert_eq!(settings.tools[0].runtime.kind, RuntimeKind::Sandbox);
    assert_eq!(settings.sandbox.limits.disk, 10_000_000_000);
    assert_eq!(settings.tools[0].work_dir, Some(data("tools")));
    let resolve = &settings.egress.resolve;
    assert_eq!(
        resolve.get(&host("INTERNAL.example."), 443),
        "127.0.0.1:9443".parse().ok()
    );
    assert_eq!(
        resolve.get(&host("internal.example"), 8443),
        "[::1]:9444".parse().ok()
    );
    assert_eq!(resolve.get(&host("other.example"), 443), None);
    let mirror = settings.git.mirrors[0].identity.clone();
    let key = Path::new("/home/op/.ssh/id").to_owned();
    assert_eq!(mirror, Some(config::leaf::SecretSource::File(key)));
    assert!(settings.warnings.is_empty());
    assert!(settings.serves_mcp());

    // tests/data/palisade.yaml sets every key of the schema except these.
    let written: Vec<String> = config::show(&settings)
        .into_iter()
        .filter(|shown| shown.origin == ValueOrigin::Default)
        .map(|shown| shown.pointer)
        .filter(|pointer| !pointer.starts_with("/tools/1/") && !pointer.starts_with("/policy/"))
        .collect();
    assert_eq!(
        written,
        [
            "/server/single_port",
            "/server/auth_token",
            "/policies/bundles/1/required",
            "/policies/bundles/1/mode",
            "/tools/0/runtime/template",
            "/credentials/github_app",
            "/credentials/oauth/claude",
            "/credentials/oauth/codex",
            "/credentials/oauth/gemini",
            "/credentials/oauth/opencode",
            "/approvals/webhook",
            "/sandbox/remote/0/tcp",
        ]
    );
}

#[test]
fn setup_command_is_a_line_for_the_shell_or_a_program() {
    let argv = |command: &str| {
        let settings = load(&format!(
            "version: 1\nsandbox:\n  setup_command: {command}\n"
        ));
        let settings = settings.map_err(|problems| problems.to_string());
        settings.map(|settings| settings.sandbox.setup_command.map(|command| command.argv()))
    };
    let words = |words: &[&str]| Ok(Some(words.iter().map(|&word| word.to_owned()).collect()));
    assert_eq!(argv("make setup"), words(&["/bin/sh", "-c", "make setup"]));
    assert_eq!(argv("[make, a b]"), words(&["make", "a b"]));
    assert_eq!(argv("null"), Ok(None));
    for wrong in ["[]", "{make: setup}"] {
        let problem = argv(wrong).unwrap_err();
        assert!(
            problem.contains(":3:18: sandbox.setup_command"),
            "{problem}"
        );
    }
}

#[test]
fn domains_are_merged_in_order_with_their_origin() {
    let dir = directory(&[
        (
            "palisade.yaml",
            "version: 1.0\negress:\n  allowlist: list.yaml\n  domains: [a.example]\n",
        ),
        ("list.yaml", "version: 1\ndomains:\n  - b.example\n"),
        (
            "grants.yaml",
            "domains: [{host: c.example, paths: ['/${X}']}]\n",
        ),
    ]);
    let settings = load_in(dir.path(), &no_env).unwrap();
    let seen: Vec<(String, String)> = settings
        .domains
        .iter()
        .map(|domain| {
            let origin = domain.origin.to_string();
            let origin = origin.rsplit('/').next().unwrap().to_owned();
            (domain.rule.host.to_string(), origin)
        })
        .collect();
    let expected = [
        ("a.example", "palisade.yaml:4:13"),
        ("b.example", "list.yaml:3:5"),
        ("c.example", "grants.yaml:1:11"),
    ];
    assert_eq!(seen, expected.map(|(h, o)| (h.to_owned(), o.to_owned())));
    // Variables in grants.yaml are not expanded, because its rules come from requests of agents.
    assert_eq!(settings.domains[2].rule.paths[0].as_str(), "/${X}");
    for name in ["a.example", "b.example", "c.example"] {
        assert!(settings.allowlist().lookup(&host(name)).is_some(), "{name}");
    }
    assert!(settings.allowlist().lookup(&host("d.example")).is_none());
}

#[test]
fn bundle_with_unknown_entrypoint_is_a_warning() {
    let settings = load(
        "version: 1\npolicies:\n  bundles:\n  - {id: a, path: a, entrypoint: http/auth}\n  \
         - {id: b, path: b, entrypoint: http/authz/decision}\n",
    )
    .unwrap();
    let warnings: Vec<String> = settings.warnings.iter().map(ToString::to_string).collect();
    assert_eq!(warnings.len(), 1, "{warnings:?}");
    assert!(
        warnings[0].contains(":4:34: the gate does not evaluate the entrypoint 'http/auth'"),
        "{warnings:?}"
    );
}

#[test]
fn more_ports_than_a_sandbox_can_intercept_are_refused() {
    let ports = |most: usize| {
        let list: Vec<String> = (1..=most).map(|n| (n + 1000).to_string()).collect();
        let list = list.join(", ");
        load(&format!(
            "version: 1\negress:\n  transparent_ports: [80, 8080]\n  \
             domains: [{{host: a.example, ports: [80, {list}]}}]\n"
        ))
    };
    let settings = ports(27).unwrap();
    assert_eq!(settings.captured_ports(&[]).len(), 28);
    let problems = ports(28).unwrap_err();
    assert!(
        problems.contains("are 29 different ports: a sandbox captures at most 28"),
        "{problems}"
    );
}

#[test]
fn seed_000_configuration_loads_as_it_is() {
    let env = |name: &str| (name == "E2B_API_KEY").then(|| "e2b-key".to_owned());
    let settings = config::load(Some(&data("polis-config.yaml")), &env).unwrap();
    assert_eq!(settings.policies.bundles.len(), 2);
    assert_eq!(settings.secrets["e2b_api_key"].expose(), "e2b-key");
    assert_eq!(
        settings.metrics.tracing.otlp_endpoint(),
        "http://jaeger:4318"
    );
    // `:8090` without a token listens on loopback, with a warning.
    assert!(settings.server.interceptor().ip().is_loopback());
    assert!(settings.server.mcp().ip().is_loopback());
    let warnings: Vec<_> = settings
        .warnings
        .iter()
        .map(|w| (w.line, w.pointer.as_str()))
        .collect();
    assert_eq!(
        warnings,
        [
            (6, "/server/interceptor_addr"),
            (7, "/server/mcp_server_addr"),
            (45, "/metrics/tracing/endpoint"),
        ]
    );

    let unset = config::load(Some(&data("polis-config.yaml")), &no_env).unwrap();
    assert!(unset.secrets["e2b_api_key"].is_empty());
    let warning = unset.warnings.last().unwrap().to_string();
    assert!(
        warning.ends_with(
            "polis-config.yaml:54:16: the environment variable E2B_API_KEY is not set: \
             secrets.e2b_api_key is empty; set the variable before a tool needs this secret"
        ),
        "{warning}"
    );
    let shown = config::show(&unset);
    let shown = shown
        .iter()
        .find(|value| value.pointer == "/secrets/e2b_api_key");
    assert_eq!(shown.unwrap().value, "[unset]");
}

#[test]
fn containers_are_a_list_or_one_mapping() {
    let names = |text: &str| -> Vec<String> {
        let settings = load(&format!("version: 1\nsandbox:\n  remote: {text}\n")).unwrap();
        let containers = settings.sandbox.remote.all().iter();
        containers.map(|container| container.name.clone()).collect()
    };
    assert_eq!(names(""), Vec::<String>::new());
    assert_eq!(names("[]"), Vec::<String>::new());
    assert_eq!(names("{socket_path: /s}"), ["remote"]);
    assert_eq!(names("[{socket_path: /s}]"), ["remote"]);
    let two = "[{name: a, socket_path: /s}, {name: b-2, tcp: {host: 127.0.0.1, port: 1}}]";
    assert_eq!(names(two), ["a", "b-2"]);

    let dir = directory(&[(
        "palisade.yaml",
        "version: 1\nsandbox: {remote: [{name: a, socket_path: run/s, auth: {token: hunter2}}]}\n",
    )]);
    let settings = load_in(dir.path(), &no_env).unwrap();
    let container = settings.sandbox.remote.find("a").unwrap();
    assert_eq!(container.socket_path, Some(dir.path().join("run/s")));
    assert_eq!(settings.sandbox.remote.find("remote"), None);
    let secrets: Vec<String> = settings
        .secret_values()
        .into_iter()
        .map(|(name, _)| name)
        .collect();
    assert_eq!(secrets, ["sandbox.remote[0].auth.token"]);
    assert!(!format!("{:?}", config::show(&settings)).contains("hunter2"));
}

#[test]
fn token_allows_listening_on_every_address() {
    let settings =
        load("version: '1.0'\nserver: {interceptor_addr: ':0', auth_token: token}\n").unwrap();
    assert!(settings.server.interceptor().ip().is_unspecified());
    assert!(settings.warnings.is_empty());
}

#[test]
fn rates_and_breakers_come_from_policy_yaml() {
    let settings = config::load(Some(&data("palisade.yaml")), &no_env).unwrap();
    let rate = |name: &str| {
        let rate = settings.rate_for(&host(name)).unwrap();
        (rate.interval(), rate.burst())
    };
    assert_eq!(rate("other.example"), (Duration::from_millis(10), 200));
    // A row with only its rate may burst to twice that.
    assert_eq!(rate("api.model.example"), (Duration::from_millis(50), 40));
    let breaker = |name: &str| {
        let config = settings.breaker_for(&host(name));
        (
            config.failure_threshold,
            config.recovery.as_secs(),
            config.success_threshold,
        )
    };
    assert_eq!(breaker("other.example"), (5, 30, 2));
    assert_eq!(breaker("forge.example"), (5, 30, 2));
    assert_eq!(breaker("api.forge.example"), (5, 30, 2));
    assert_eq!(breaker("api.model.example"), (3, 60, 2));
    // A configured list replaces the built-in one.
    assert_eq!(breaker("api.anthropic.com"), (5, 30, 2));

    let plain = load("version: '1.0'\n").unwrap();
    let config = plain.breaker_for(&host("api.anthropic.com"));
    assert_eq!(
        (config.failure_threshold, config.recovery.as_secs()),
        (3, 60)
    );
    assert_eq!(plain.rate_for(&host("x.example")).unwrap().burst(), 200);

    let dir = directory(&[
        (
            "palisade.yaml",
            "version: '1.0'\negress: {policy: p.yaml}\n",
        ),
        ("p.yaml", "rate_limits: {enabled: false}\n"),
    ]);
    let off = load_in(dir.path(), &no_env).unwrap();
    assert_eq!(off.rate_for(&host("x.example")), None);
}

#[test]
fn only_the_version_is_required_and_gives_the_defaults() {
    let defaults = config::load(None, &no_env).unwrap();
    for yaml in [
        "version: \"1.0\"\n",
        "version: 1.0\n",
        "version: 1\n",
        "version: '1'\nserver:\ntools:\negress:\n  domains:\n  dns: {mode: ~}\n",
    ] {
        let settings = load(yaml).unwrap();
        assert_eq!(settings.diff(&defaults), Vec::<String>::new(), "{yaml}");
        assert!(!settings.serves_mcp());
    }
    assert_eq!(
        load("").unwrap_err(),
        "palisade.yaml:1:1: the key 'version' is missing; begin the file with version: \"1.0\""
    );
    check("", &[]);
}

#[test]
fn variable_becomes_a_number_only_where_one_is_expected() {
    let dir = directory(&[(
        "palisade.yaml",
        "version: '1.0'\nsandbox: {limits: {pids: '${N}', cpus: '${F}', memory: '${M}'}}\n\
         git: {read_public: '${B}'}\negress: {transparent_ports: ['${N}']}\n\
         secrets: {pin: '${N}'}\naudit: {max_bytes: '${N}'}\n",
    )]);
    let env = |name: &str| {
        let value = match name {
            "N" => "77",
            "F" => "0.5",
            "M" => "1GiB",
            "B" => "true",
            _ => return None,
        };
        Some(value.to_owned())
    };
    let settings = load_in(dir.path(), &env).unwrap();
    assert_eq!(settings.sandbox.limits.pids, 77);
    assert_eq!(settings.sandbox.limits.cpus, Some(0.5));
    assert_eq!(settings.sandbox.limits.memory, 1 << 30);
    assert!(settings.git.read_public);
    assert_eq!(settings.egress.transparent_ports, [77]);
    assert_eq!(settings.secrets["pin"].expose(), "77");
    assert_eq!(settings.audit.max_bytes, 77);
    assert_eq!(
        settings.origin("/sandbox/limits/pids"),
        ValueOrigin::Env {
            name: "N".into(),
            file: dir.path().join("palisade.yaml").into(),
            line: 2,
        }
    );

    let dir = directory(&[(
        "palisade.yaml",
        "version: '1.0'\negress: {domains: '${D}'}\n",
    )]);
    let problems = load_in(dir.path(), &|_| Some("[a.example]".into())).unwrap_err();
    assert_eq!(
        problems,
        "palisade.yaml:2:19: egress.domains must be a list, not this text; the value comes from ${D}"
    );
}

#[test]
fn sources_are_read_once_and_fingerprinted_whole() {
    let dir = directory(&[
        (
            "palisade.yaml",
            "version: '1.0'\negress: {allowlist: a.yaml}\n",
        ),
        ("a.yaml", "domains: [a.example]\n"),
    ]);
    let path = dir.path().join("palisade.yaml");
    let read = || Sources::read(Some(&path), &|_| None).unwrap();
    let first = read();
    assert_eq!(first.fingerprint(), read().fingerprint());
    let names = ["palisade.yaml", "a.yaml", "grants.yaml"];
    assert_eq!(first.paths(), names.map(|name| dir.path().join(name)));

    // The settings are built from the bytes that were read, not from the changed file.
    std::fs::write(dir.path().join("a.yaml"), "domains: [b.example]\n").unwrap();
    let settings = first.settings(&no_env).unwrap();
    assert_eq!(settings.domains[0].rule.host.to_string(), "a.example");

    let mut seen = vec![first.fingerprint(), read().fingerprint()];
    std::fs::write(dir.path().join("grants.yaml"), "").unwrap();
    seen.push(read().fingerprint());
    std::fs::remove_file(dir.path().join("a.yaml")).unwrap();
    seen.push(read().fingerprint());
    std::fs::remove_file(&path).unwrap();
    seen.push(read().fingerprint());
    assert!(read().settings(&no_env).is_err());
    let distinct: std::collections::HashSet<_> = seen.iter().collect();
    assert_eq!(distinct.len(), seen.len());
}

#[test]
fn referenced_files_are_part_of_the_fingerprint() {
    let dir = directory(&[
        (
            "palisade.yaml",
            "version: '1.0'\negress: {dns: {upstreams: [system], resolv_conf: resolv.conf}}\n\
             policies:\n  bundles:\n  - {id: a, path: '${B}', entrypoint: http/authz}\n  \
             - {id: b, path: b.tar.gz, entrypoint: http/authz}\n",
        ),
        ("resolv.conf", "nameserver 192.0.2.1\n"),
    ]);
    let at = |name: &str| dir.path().join(name);
    std::fs::create_dir_all(at("a/lists")).unwrap();
    std::fs::write(at("a/policy.rego"), "package http.authz\n").unwrap();
    let read = || {
        let env = |name: &str| (name == "B").then(|| "a".into());
        Sources::read(Some(&at("palisade.yaml")), &env).unwrap()
    };
    let mut seen = vec![read().fingerprint()];
    assert_eq!(read().fingerprint(), seen[0]);
    let directories = read().directories();
    for watched in ["", "a", "a/lists"] {
        let watched = dir.path().join(watched);
        assert!(
            directories.iter().any(|directory| *directory == watched),
            "{watched:?}"
        );
    }
    assert!(read().files().contains(&at("a/policy.rego")));

    let mut assert_changed = |what: &str| {
        let now = read().fingerprint();
        assert!(!seen.contains(&now), "{what}");
        seen.push(now);
    };
    // The length is the same as before; only the times differ.
    std::fs::write(at("a/policy.rego"), "package http.auth2\n").unwrap();
    assert_changed("a file of a bundle");
    std::fs::write(at("a/lists/data.json"), "{}").unwrap();
    assert_changed("a new file");
    std::fs::rename(at("a/lists/data.json"), at("a/lists/other.json")).unwrap();
    assert_changed("another name");
    std::fs::remove_dir_all(at("a")).unwrap();
    assert_changed("no bundle");
    std::fs::write(at("b.tar.gz"), "no archive").unwrap();
    assert_changed("an archive");
    std::fs::write(at("resolv.conf"), "nameserver 192.0.2.2\n").unwrap();
    assert_changed("other resolvers");
    // A file that is written again with the same content is unchanged.
    std::fs::write(at("resolv.conf"), "nameserver 192.0.2.2\n").unwrap();
    assert_eq!(read().fingerprint(), *seen.last().unwrap());
}

#[test]
fn diff_names_changed_keys_and_no_values() {
    let a = load(
        "version: '1.0'\nlogging: {level: info}\nsecrets: {k: one}\n\
         tools: [{name: t, command: [x], env: ['A=1']}]\negress: {domains: [a.example]}\n",
    )
    .unwrap();
    let b = load(
        "version: '1.0'\nlogging: {level: debug}\nsecrets: {k: two}\n\
         tools: [{name: t, command: [x], env: ['A=2']}]\negress: {domains: [a.example, b.example]}\n\
         server: {auth_token: t}\n",
    )
    .unwrap();
    assert_eq!(
        a.diff(&b),
        [
            "/domains/1",
            "/logging/level",
            "/secrets/k",
            "/server/auth_token",
            "/tools/0/env/0"
        ]
    );
    assert!(a.diff(&a.clone()).is_empty());
}

#[test]
fn show_hides_secrets_and_names_the_origin_of_values() {
    let dir = directory(&[(
        "palisade.yaml",
        "version: '1.0'\nsecrets: {k: '${K}'}\nserver: {auth_token: hunter2}\nlogging: {level: warn}\n\
         tools: [{name: t, command: [x], env: ['A=hunter2']}]\n\
         sandbox: {remote: {socket_path: /s, auth: {token: hunter2}}}\n",
    )]);
    let settings = load_in(dir.path(), &|_| Some("hunter2".into())).unwrap();
    let shown = config::show(&settings);
    let line = |pointer: &str| {
        let found = shown.iter().find(|shown| shown.pointer == pointer).unwrap();
        let origin = found
            .origin
            .to_string()
            .replace(&format!("{}/", dir.path().display()), "");
        format!("{} {origin}", found.value)
    };
    assert_eq!(line("/secrets/k"), "\"[secret]\" $K (palisade.yaml:2)");
    assert_eq!(
        line("/server/auth_token"),
        "\"[secret]\" palisade.yaml:3:22"
    );
    assert_eq!(line("/tools/0/env/0"), "\"A=[secret]\" palisade.yaml:5:39");
    assert_eq!(line("/logging/level"), "\"warn\" palisade.yaml:4:18");
    assert_eq!(line("/logging/format"), "\"human\" default");
    assert!(!format!("{shown:?} {settings:?}").contains("hunter2"));

    let names: Vec<String> = settings
        .secret_values()
        .into_iter()
        .map(|(name, _)| name)
        .collect();
    assert_eq!(
        names,
        [
            "server.auth_token",
            "secrets.k",
            "sandbox.remote.auth.token"
        ]
    );
}
