//! Reload of settings while the gate runs: applied as a whole, or not at all.

#![allow(
    clippy::expect_used,
    clippy::indexing_slicing,
    clippy::panic,
    clippy::unwrap_used,
    reason = "a test that cannot continue has failed"
)]

use std::net::TcpListener;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use proptest::prelude::*;
use serde_json::{Value, json};
use testkit::gate::{GateDir, GateProcess};
use testkit::port::Port;
use testkit::{output, wait};

const PALISADE: &str = env!("CARGO_BIN_EXE_palisade");

/// A value of the running gate.
fn value(gate: &GateProcess<'_>, pointer: &str) -> Value {
    let shown = gate.get("/v1/config").json();
    shown["values"]
        .as_array()
        .expect("values")
        .iter()
        .find(|value| value["pointer"] == pointer)
        .map_or(Value::Null, |value| value["value"].clone())
}

fn wait_for_level(gate: &GateProcess<'_>, level: &str) {
    wait::until(&format!("logging.level {level}"), || {
        (value(gate, "/logging/level") == level).then_some(())
    });
}

fn with_level(level: &str) -> String {
    format!("version: \"1.0\"\nlogging: {{ level: {level} }}\n")
}

fn reloads(gate: &GateProcess<'_>, status: &str) -> u64 {
    let text = gate.get("/internal/metrics").text();
    let name = format!("polis_sidecar_config_reloads_total{{status=\"{status}\"}} ");
    let line = text
        .lines()
        .find_map(|line| line.strip_prefix(&name))
        .expect("the counter");
    line.parse().expect("a number")
}

#[test]
fn configuration_change_is_detected_however_it_is_written() {
    let gate_dir = GateDir::new(PALISADE);
    let gate = gate_dir.start();

    gate_dir.write_config(&with_level("debug"));
    wait_for_level(&gate, "debug");

    std::fs::write(gate_dir.config(), with_level("warn")).unwrap();
    wait_for_level(&gate, "warn");

    std::fs::remove_file(gate_dir.config()).unwrap();
    std::fs::write(gate_dir.config(), with_level("info")).unwrap();
    wait_for_level(&gate, "info");

    // An editor moves the old file away and writes a new one.
    std::fs::rename(gate_dir.config(), gate_dir.path().join("palisade.yaml~")).unwrap();
    std::fs::write(gate_dir.config(), with_level("error")).unwrap();
    wait_for_level(&gate, "error");
}

/// Kubernetes mounts a link to a link to a directory, and replaces the second link.
#[test]
fn replaced_symlink_in_the_path_is_detected() {
    let gate_dir = GateDir::new(PALISADE);
    let dir = gate_dir.path();
    for (version, level) in [("v1", "info"), ("v2", "debug")] {
        std::fs::create_dir(dir.join(version)).unwrap();
        std::fs::write(dir.join(version).join("palisade.yaml"), with_level(level)).unwrap();
    }
    let link = |to: &str, name: &Path| std::os::unix::fs::symlink(to, name).unwrap();
    link("v1", &dir.join("..data"));
    std::fs::remove_file(gate_dir.config()).unwrap();
    link("..data/palisade.yaml", &gate_dir.config());
    let gate = gate_dir.start();
    assert_eq!(value(&gate, "/logging/level"), "info");

    link("v2", &dir.join("..data_tmp"));
    std::fs::rename(dir.join("..data_tmp"), dir.join("..data")).unwrap();
    wait_for_level(&gate, "debug");
}

#[test]
fn seed_003_edited_allowlist_takes_effect_without_restart() {
    let gate_dir = GateDir::new(PALISADE);
    std::fs::write(
        gate_dir.path().join("allow.yaml"),
        "version: 1\ndomains: [one.example]\n",
    )
    .unwrap();
    gate_dir.write_config("version: \"1.0\"\negress: { allowlist: ./allow.yaml }\n");
    let gate = gate_dir.start();
    let domains = |gate: &GateProcess<'_>| gate.get("/v1/config").text();
    assert!(domains(&gate).contains("one.example"));
    std::fs::write(
        gate_dir.path().join("allow.yaml"),
        "version: 1\ndomains: [two.example]\n",
    )
    .unwrap();
    wait::until("the new list", || {
        domains(&gate).contains("two.example").then_some(())
    });
    assert!(!domains(&gate).contains("one.example"));
}

#[test]
fn invalid_change_keeps_old_settings_and_is_reported() {
    let gate_dir = GateDir::new(PALISADE);
    gate_dir.write_config(&with_level("debug"));
    let gate = gate_dir.start();
    assert_eq!(reloads(&gate, "failed"), 0);

    gate_dir.write_config("version: \"1.0\"\nlogging: { levle: info }\n");
    let health = wait::until("health to report the error", || {
        let answer = gate.get("/internal/health");
        (answer.status == 503).then(|| answer.json())
    });
    assert_eq!(health["status"], "degraded");
    assert_eq!(health["checks"]["config_current"], false);
    let error = health["errors"]["config_current"].as_str().unwrap();
    assert!(
        error.contains("levle") && error.contains("level"),
        "{error}"
    );
    assert_eq!(
        value(&gate, "/logging/level"),
        "debug",
        "the old snapshot stays"
    );
    assert_eq!(reloads(&gate, "failed"), 1);
    assert_eq!(gate_dir.run(&["health"]).status.code(), Some(1));
    let refused = gate.get("/v1/audit?kind=config").json();
    assert_eq!(refused["records"][0]["event"], "reload_refused");

    // Another reload reports the same mistake, and is counted.
    let output = gate_dir.run(&["config", "reload"]);
    assert_eq!(output.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&output.stderr).contains("did you mean 'level'"));

    gate_dir.write_config(&with_level("warn"));
    wait_for_level(&gate, "warn");
    let health = wait::until("health to be healthy again", || {
        let answer = gate.get("/internal/health");
        (answer.status == 200).then(|| answer.json())
    });
    assert_eq!(health["checks"]["config_current"], true);
    assert_eq!(reloads(&gate, "success"), 1);
}

#[test]
fn hangup_signal_and_reload_command_reload_immediately() {
    let gate_dir = GateDir::new(PALISADE);
    let gate = gate_dir.start();
    gate_dir.write_config(&with_level("debug"));
    gate.signal("HUP");
    wait_for_level(&gate, "debug");
    gate_dir.write_config(&with_level("warn"));
    let output = gate_dir.run(&["config", "reload"]);
    let printed = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    // Either this call applied the change or the watcher was faster.
    assert!(printed.contains("reloaded"), "{printed}");
    assert_eq!(value(&gate, "/logging/level"), "warn");
}

// **Feature: unified-sidecar, Property 8: Configuration Hot-Reload Atomicity**
#[test]
fn property_08_configuration_hot_reload_atomicity() {
    let gate_dir = GateDir::new(PALISADE);
    gate_dir.write_config(&with_level("info"));
    let gate = gate_dir.start();
    // The values in force: a level, a size and a domain, from three parts of the file.
    let current_values = || {
        let shown = gate.get("/v1/config").json();
        let find = |pointer: &str| {
            let mut values = shown["values"].as_array().expect("values").iter();
            let found = values.find(|value| value["pointer"] == pointer);
            found.map_or(Value::Null, |found| found["value"].clone())
        };
        (
            find("/logging/level"),
            find("/audit/max_bytes"),
            shown.to_string().contains("probe.example"),
        )
    };
    let mistakes = [
        "",
        "",
        "nonsense: 1\n",
        "server: { shutdown_timeout: soon }\n",
        "tools: [{ name: a, command: [x] }, { name: a, command: [y] }]\n",
        "sandbox: { env: [\"${SURELY_NOT_SET}\"] }\n",
        "policies: { bundles: [{ id: b, path: ./nowhere, entrypoint: mcp/authz, required: maybe }] }\n",
        "metrics: {\n",
    ];
    let levels = prop::sample::select(vec!["debug", "info", "warn", "error"]);
    // 1024 MiB would be shown as 1 GiB.
    let strategy = (levels, 1025..2000_u32, any::<bool>(), 0..mistakes.len());
    proptest!(ProptestConfig::with_cases(112), |((level, mib, probe, mistake) in strategy)| {
        let earlier = current_values();
        let domains = if probe { "[probe.example]" } else { "[]" };
        let mistake = mistakes[mistake];
        let text = format!(
            "version: \"1.0\"\nlogging: {{ level: {level} }}\n{mistake}egress: {{ domains: {domains} }}\naudit: {{ max_bytes: {mib}MiB }}\n"
        );
        // The file is replaced atomically, because the watcher may read it at any moment.
        let aside = gate_dir.path().join("aside.yaml");
        std::fs::write(&aside, &text).unwrap();
        std::fs::rename(&aside, gate_dir.config()).unwrap();
        let answer = gate.request("POST", "/v1/config/reload", &Value::Null);
        if mistake.is_empty() {
            prop_assert_eq!(answer.status, 200);
            prop_assert_eq!(current_values(), (json!(level), json!(format!("{mib}MiB")), probe));
        } else {
            prop_assert!(answer.status >= 400, "{}", answer.status);
            prop_assert_eq!(current_values(), earlier);
        }
    });
}

/// Each version has its number at the top and at the bottom of a long file, and is written in place,
/// piece by piece: a reader between two pieces sees a valid file without its end.
#[test]
fn partially_written_configuration_never_takes_effect() {
    let gate_dir = GateDir::new(PALISADE);
    let version = |n: u32| {
        let mut text = format!(
            "version: \"1.0\"\naudit: {{ max_bytes: {}MiB }}\negress:\n  domains:\n",
            n + 1001
        );
        for filler in 0..400 {
            text.push_str(&format!("    - filler-{filler}.example\n"));
        }
        text.push_str(&format!("    - last-{n}.example\n"));
        text
    };
    gate_dir.write_config(&version(0));
    let gate = gate_dir.start();
    let done = AtomicBool::new(false);
    let seen = std::thread::scope(|scope| {
        let watcher = scope.spawn(|| {
            let mut seen = Vec::new();
            loop {
                let is_last_read = done.load(Ordering::Relaxed);
                let shown = gate.get("/v1/config").text();
                let whole = (0..=100_u32).find(|n| {
                    shown.contains(&format!("last-{n}.example"))
                        && shown.contains(&format!("\"value\":\"{}MiB\"", n + 1001))
                });
                seen.push(whole.unwrap_or_else(|| panic!("half a file was in force")));
                if is_last_read {
                    return seen;
                }
            }
        });
        for n in 1..=100 {
            let text = version(n);
            let mut file = std::fs::File::create(gate_dir.config()).unwrap();
            for piece in text.as_bytes().chunks(1500) {
                std::io::Write::write_all(&mut file, piece).unwrap();
            }
        }
        wait::until("the last version", || {
            gate.get("/v1/config")
                .text()
                .contains("last-100.example")
                .then_some(())
        });
        done.store(true, Ordering::Relaxed);
        watcher.join().expect("the watcher")
    });
    assert!(seen.is_sorted(), "an older version came back: {seen:?}");
    assert_eq!(seen.last(), Some(&100));
    assert_eq!(reloads(&gate, "failed"), 0);
}

#[test]
fn constantly_changing_file_is_never_loaded_and_blocks_nothing() {
    let gate_dir = GateDir::new(PALISADE);
    let gate = gate_dir.start();
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for n in 0_u32.. {
                if done.load(Ordering::Relaxed) {
                    break;
                }
                gate_dir.write_config(&format!("version: \"1.0\"\naudit: {{ max_bytes: {n} }}\n"));
            }
        });
        for _ in 0..3 {
            let output = gate_dir.run(&["config", "reload"]);
            assert!(
                output.status.success(),
                "{}",
                String::from_utf8_lossy(&output.stderr)
            );
        }
        gate.signal("HUP");
        wait::until("SIGHUP to be handled", || {
            gate.stderr().contains("SIGHUP").then_some(())
        });
        done.store(true, Ordering::Relaxed);
    });
    gate_dir.write_config(&with_level("debug"));
    wait_for_level(&gate, "debug");
}

/// The gate's decision about a request.
fn trial(gate_dir: &GateDir, url: &str) -> String {
    let output = gate_dir.run(&["policy", "try", url, "--json"]);
    let report: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    report["verdict"].as_str().unwrap_or_default().to_owned()
}

#[test]
fn changed_bundle_takes_effect_and_broken_one_does_not() {
    let gate_dir = GateDir::new(PALISADE);
    let file = gate_dir.path().join("mine/policy.rego");
    let policy = |path: &str| format!("package http.authz\n\nallow if input.path == \"{path}\"\n");
    std::fs::create_dir(gate_dir.path().join("mine")).unwrap();
    std::fs::write(&file, policy("/one")).unwrap();
    gate_dir.write_config(
        "version: \"1.0\"\negress: {domains: [api.example]}\npolicies:\n  timeout: 10s\n  bundles: \
         [{id: mine, path: mine, entrypoint: http/authz}]\n",
    );
    let gate = gate_dir.start();
    let (one, two) = ("https://api.example/one", "https://api.example/two");
    assert_eq!(
        (trial(&gate_dir, one), trial(&gate_dir, two)),
        ("allow".into(), "deny".into())
    );

    std::fs::write(&file, policy("/two")).unwrap();
    wait::until("the new policy", || {
        (reloads(&gate, "success") == 1).then_some(())
    });
    assert_eq!(
        (trial(&gate_dir, one), trial(&gate_dir, two)),
        ("deny".into(), "allow".into())
    );

    std::fs::write(&file, "package http.authz\n\nallow if {\n").unwrap();
    let health = wait::until("health to report the error", || {
        let answer = gate.get("/internal/health");
        (answer.status == 503).then(|| answer.json())
    });
    let error = health["errors"]["config_current"].as_str().unwrap();
    assert!(
        error.contains("policies.bundles: mine: policy.rego:4:"),
        "{error}"
    );
    assert_eq!(trial(&gate_dir, two), "allow", "the old policy stays");

    std::fs::write(&file, policy("/one")).unwrap();
    wait::until("health to be healthy again", || {
        (gate.get("/internal/health").status == 200).then_some(())
    });
    assert_eq!(trial(&gate_dir, one), "allow");
}

#[test]
fn changed_system_resolvers_are_detected() {
    let gate_dir = GateDir::new(PALISADE);
    let file = gate_dir.path().join("resolv.conf");
    std::fs::write(&file, "nameserver 192.0.2.1\n").unwrap();
    gate_dir.write_config("version: \"1.0\"\negress: {dns: {resolv_conf: resolv.conf}}\n");
    let gate = gate_dir.start();
    std::fs::write(&file, "nameserver 192.0.2.2\n").unwrap();
    wait::until("a reload", || {
        (reloads(&gate, "success") == 1).then_some(())
    });
}

// Issue 14, number 10.
#[test]
fn refused_reload_changes_nothing_at_any_failing_step() {
    let gate_dir = GateDir::new(PALISADE);
    let (proxy, tools, busy) = (Port::take(), Port::take(), Port::take());
    let _taken = TcpListener::bind(busy.address()).unwrap();
    std::fs::write(gate_dir.path().join("bad.pem"), "no certificate\n").unwrap();
    std::fs::create_dir(gate_dir.path().join("broken")).unwrap();
    let policy = "package http.authz\n\nallow if {\n";
    std::fs::write(gate_dir.path().join("broken/policy.rego"), policy).unwrap();
    let text = |host: &str, proxy: &Port, tools: &Port, egress: &str, more: &str| {
        let (proxy, tools) = (proxy.address(), tools.address());
        format!(
            "version: \"1.0\"\nserver: {{single_port: \"{tools}\"}}\n\
             egress: {{domains: [{host}], listen: [\"{proxy}\"]{egress}}}\n{more}"
        )
    };
    gate_dir.write_config(&text("old.example", &proxy, &tools, "", ""));
    let gate = gate_dir.start();
    let state = || {
        let allowed = |host: &str| trial(&gate_dir, &format!("https://{host}/"));
        let health = gate.get("/internal/health").json();
        let file = value(&gate, "/audit/jsonl");
        let allowed = (allowed("old.example"), allowed("new.example"));
        (allowed, health["listeners"].clone(), file)
    };
    let before = state();
    assert_eq!(before.0, ("allow".into(), "deny".into()));
    let nowhere = gate_dir.path().join("nowhere/audit.jsonl");
    let audit = format!("audit: {{jsonl: {}}}\n", nowhere.display());
    let bundle = "policies: {bundles: [{id: b, path: broken, entrypoint: http/authz}]}\n";
    let tool_bundle = "policies: {bundles: [{id: b, path: broken, entrypoint: mcp/authz}]}\n";
    let new = "new.example";
    let steps = [
        ("cannot listen", text(new, &busy, &tools, "", "")),
        ("for tools", text(new, &proxy, &busy, "", "")),
        (
            "bad.pem",
            text(new, &proxy, &tools, ", extra_roots: [bad.pem]", ""),
        ),
        ("bundles: b", text(new, &proxy, &tools, "", bundle)),
        ("bundles: b", text(new, &proxy, &tools, "", tool_bundle)),
        ("audit.jsonl", text(new, &proxy, &tools, "", &audit)),
    ];
    for (why, text) in steps {
        gate_dir.write_config(&text);
        let output = gate_dir.run(&["config", "reload"]);
        let printed = output::stderr(&output);
        assert_eq!(output.status.code(), Some(2), "{why}: {printed}");
        assert!(printed.contains(why), "{why}: {printed}");
        assert_eq!(state(), before, "{why}");
    }
    assert!(!nowhere.exists());
    let file = gate_dir.path().join("audit.jsonl");
    let audit = format!("audit: {{jsonl: {}}}\n", file.display());
    gate_dir.write_config(&text(new, &proxy, &tools, "", &audit));
    let output = gate_dir.run(&["config", "reload"]);
    assert!(output.status.success(), "{}", output::stderr(&output));
    assert_eq!(state().0, ("deny".into(), "allow".into()));
    wait::until("the file of the audit log", || {
        std::fs::read_to_string(&file)
            .is_ok_and(|text| text.contains("reloaded"))
            .then_some(())
    });
}

#[test]
fn address_in_use_at_start_degrades_its_listener_alone() {
    let gate_dir = GateDir::new(PALISADE);
    let (proxy, dns) = (Port::take(), Port::take());
    let taken = TcpListener::bind(proxy.address()).unwrap();
    let (proxy, dns) = (proxy.address(), dns.address());
    gate_dir.write_config(&format!(
        "version: \"1.0\"\negress: {{listen: [\"{proxy}\"], dns: {{listen: [\"{dns}\"]}}}}\n"
    ));
    let gate = gate_dir.start();
    let health = gate.get("/internal/health").json();
    assert_eq!(health["listeners"]["proxy"], Value::Null);
    assert_eq!(health["listeners"]["dns"], dns.to_string());
    assert_eq!(health["checks"]["shared_listeners"], false);
    let why = health["errors"]["shared_listeners"].as_str().unwrap();
    assert!(why.contains(&proxy.to_string()), "{why}");
    let refused = gate_dir.run(&["config", "reload"]);
    assert_eq!(refused.status.code(), Some(2), "the address is still taken");
    drop(taken);
    assert!(gate_dir.run(&["config", "reload"]).status.success());
    let health = gate.get("/internal/health").json();
    assert_eq!(health["listeners"]["proxy"], proxy.to_string());
    assert_eq!(health["checks"]["shared_listeners"], Value::Null);
}

// Issue 14, number 10.
#[test]
fn health_lists_every_listener_of_a_shared_network() {
    let gate_dir = GateDir::new(PALISADE);
    let (proxy, dns) = (Port::take(), Port::take());
    let (proxy, dns) = (proxy.address().port(), dns.address().port());
    let text = |ips: &[&str]| {
        let at = |port: u16| {
            let list: Vec<String> = ips.iter().map(|ip| format!("\"{ip}:{port}\"")).collect();
            list.join(", ")
        };
        let (proxy, dns) = (at(proxy), at(dns));
        format!("version: \"1.0\"\negress: {{listen: [{proxy}], dns: {{listen: [{dns}]}}}}\n")
    };
    gate_dir.write_config(&text(&["127.0.0.3", "127.0.0.2"]));
    let gate = gate_dir.start();
    let listed = |name: &str| gate.get("/internal/health").json()["listeners"][name].clone();
    let both_addresses = |port: u16| json!(format!("127.0.0.2:{port}, 127.0.0.3:{port}"));
    assert_eq!(listed("proxy"), both_addresses(proxy));
    assert_eq!(listed("dns"), both_addresses(dns));
    let shown = output::stdout(&gate_dir.run(&["gate", "status"]));
    let line = format!("listening   proxy: 127.0.0.2:{proxy}, 127.0.0.3:{proxy}");
    assert!(shown.contains(&line), "{shown}");

    gate_dir.write_config(&text(&["127.0.0.3"]));
    assert!(gate_dir.run(&["config", "reload"]).status.success());
    assert_eq!(listed("proxy"), format!("127.0.0.3:{proxy}"));
    assert_eq!(listed("dns"), format!("127.0.0.3:{dns}"));
    gate_dir.write_config(&text(&[]));
    assert!(gate_dir.run(&["config", "reload"]).status.success());
    assert_eq!((listed("proxy"), listed("dns")), (Value::Null, Value::Null));
}
