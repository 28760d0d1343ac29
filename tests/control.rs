//! The control socket as existing programs use it, with curl, and requests with hostile text.

#![allow(
    clippy::expect_used,
    clippy::indexing_slicing,
    clippy::panic,
    clippy::unwrap_used,
    reason = "a test that cannot continue has failed"
)]

use std::io::{BufReader, Write};
use std::os::unix::net::UnixStream;
use std::process::Command;

use serde_json::{Value, json};
use testkit::gate::GateDir;
use testkit::{http, wait};

const PALISADE: &str = env!("CARGO_BIN_EXE_palisade");

/// Runs curl as seed 003 does: `curl --unix-socket $CTL http://localhost/internal/containers -d …`.
/// Returns the status and the body.
fn curl(gate_dir: &GateDir, args: &[&str]) -> (u16, Value) {
    let output = Command::new("curl")
        .args(["-sS", "-w", "\n%{http_code}", "--unix-socket"])
        .arg(gate_dir.control())
        .args(args)
        .output()
        .expect("curl");
    let text = String::from_utf8(output.stdout).expect("text");
    let (body, status) = text.trim_end().rsplit_once('\n').expect("a status");
    (
        status.parse().expect("a number"),
        serde_json::from_str(body).unwrap_or(Value::Null),
    )
}

/// The body of a registration.
fn registration(id: &str, ip: &str) -> Value {
    json!({"container_ip": ip, "container_id": id, "repos": ["o/r"]})
}

#[test]
fn registration_survives_a_kill_after_its_201() {
    let gate_dir = GateDir::new(PALISADE);
    let gate = gate_dir.start();
    let body = r#"{"container_ip":"172.18.0.5","container_id":"abc","repos":["o/r"]}"#;
    let (status, answer) = curl(
        &gate_dir,
        &["http://localhost/internal/containers", "-d", body],
    );
    gate.kill();
    assert_eq!(
        (status, &answer["status"], &answer["container_id"]),
        (201, &json!("registered"), &json!("abc"))
    );

    let _gate = gate_dir.start();
    let (status, answer) = curl(&gate_dir, &["http://localhost/internal/containers/abc"]);
    assert_eq!(status, 200);
    assert_eq!(answer["container"]["container_ip"], "172.18.0.5");
    assert_eq!(answer["container"]["repos"][0]["name"], "o/r");
}

#[test]
fn seed_003_start_prunes_expired_registrations_and_logs_how_many() {
    let gate_dir = GateDir::new(PALISADE);
    gate_dir.write_config("version: \"1.0\"\nlogging: { format: json }\n");
    let gate = gate_dir.start();
    let short = json!({"container_id": "short", "ip_address": "10.0.0.1", "ttl_seconds": 1});
    assert_eq!(
        gate.request("POST", "/internal/containers", &short).status,
        201
    );
    assert_eq!(
        gate.request(
            "POST",
            "/internal/containers",
            &registration("long", "10.0.0.2")
        )
        .status,
        201
    );
    wait::until("the expiry", || {
        (gate.get("/internal/containers/short").status == 404).then_some(())
    });
    gate.kill();

    let gate = gate_dir.start();
    let opened = wait::until("the start-up statistics in the log", || {
        let log = gate.stderr();
        let mut lines = log.lines();
        let line = lines.find(|line| line.contains("\"registry opened\""))?;
        serde_json::from_str::<Value>(line).ok()
    });
    assert_eq!(
        (&opened["level"], &opened["registered"], &opened["pruned"]),
        (&json!("INFO"), &json!(1), &json!(1)),
        "{opened}"
    );
    let rows = gate.get("/internal/containers").json();
    assert_eq!(
        (
            rows["count"].as_u64(),
            &rows["containers"][0]["container_id"]
        ),
        (Some(1), &json!("long"))
    );
    let events = gate.get("/v1/audit?sandbox=short").json();
    let events: Vec<&str> = events["records"]
        .as_array()
        .unwrap()
        .iter()
        .filter_map(|r| r["event"].as_str())
        .collect();
    assert_eq!(events, ["registered", "expired"]);
    let text = gate.get("/internal/metrics").text();
    assert!(text.contains("\nproxy_registered_containers 1\n"), "{text}");
}

#[test]
fn eleventh_registry_write_within_a_second_is_refused() {
    let gate_dir = GateDir::new(PALISADE);
    let gate = gate_dir.start();
    // Invalid requests count as well. All requests are sent on one connection without waiting for
    // responses: only a gate that needs a tenth of a second for each request would refuse none.
    let request = "POST /internal/containers HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}";
    let mut stream = UnixStream::connect(gate_dir.control()).unwrap();
    let mut answers = BufReader::new(stream.try_clone().unwrap());
    let sending = std::thread::spawn(move || stream.write_all(request.repeat(100).as_bytes()));
    let answers: Vec<_> = (0..100)
        .map(|_| http::read_response(&mut answers).unwrap())
        .collect();
    sending.join().unwrap().unwrap();
    let (first, rest) = answers.split_at(10);
    assert!(first.iter().all(|answer| answer.status == 400));
    let refused = rest.iter().find(|answer| answer.status == 429);
    let refused = refused.expect("a request over the limit");
    assert_eq!(refused.header("retry-after"), Some("1"));
    assert_eq!(refused.json()["error"], "Rate limit exceeded");
    // DELETE requests count as well.
    wait::until("a DELETE over the limit", || {
        let answer = gate.request("DELETE", "/internal/containers/x", &Value::Null);
        (answer.status == 429).then_some(())
    });
    assert_eq!(
        gate.get("/internal/containers").status,
        200,
        "reads are not limited"
    );
    wait::until("the window to pass", || {
        (gate
            .request("POST", "/internal/containers", &json!({}))
            .status
            == 400)
            .then_some(())
    });
}

#[test]
fn seed_003_internal_routes_return_the_specified_responses() {
    let gate_dir = GateDir::new(PALISADE);
    let gate = gate_dir.start();
    let missing = gate.request(
        "POST",
        "/internal/containers",
        &json!({"container_id": "a"}),
    );
    assert_eq!(missing.status, 400);
    assert_eq!(
        missing.json()["error"],
        "Missing required fields: ['container_ip', 'repos']"
    );

    assert_eq!(
        gate.request(
            "POST",
            "/internal/containers",
            &registration("a", "10.0.0.1")
        )
        .status,
        201
    );
    let taken = gate.request(
        "POST",
        "/internal/containers",
        &registration("b", "10.0.0.1"),
    );
    assert_eq!(
        (taken.status, &taken.json()["code"]),
        (409, &json!("ip_taken"))
    );
    let mapped = gate.request(
        "POST",
        "/internal/containers",
        &registration("b", "::ffff:10.0.0.1"),
    );
    assert_eq!(mapped.status, 409, "the same address in another spelling");
    assert_eq!(
        gate.request(
            "POST",
            "/internal/containers",
            &registration("a", "10.0.0.9")
        )
        .status,
        201
    );
    assert_eq!(
        gate.request(
            "POST",
            "/internal/containers",
            &registration("b", "10.0.0.1")
        )
        .status,
        201
    );

    let delete = |id: &str| {
        let path = format!("/internal/containers/{id}");
        let answer = gate.request("DELETE", &path, &Value::Null);
        (answer.status, answer.json())
    };
    let unregistered = json!({"status": "unregistered", "container_id": "b"});
    assert_eq!(delete("b"), (200, unregistered));
    for id in ["b", "never", "..%2f"] {
        let (status, body) = delete(id);
        assert_eq!(
            (status, &body["error"]),
            (404, &json!("Container not found"))
        );
    }
    assert_eq!(gate.get("/internal/containers/b").status, 404);
    let method = gate.request("PATCH", "/internal/containers", &Value::Null);
    assert_eq!(
        (method.status, method.header("allow")),
        (405, Some("POST, GET"))
    );
    let health = gate.get("/internal/health");
    assert_eq!(
        (health.status, &health.json()["status"]),
        (200, &json!("healthy"))
    );
    assert_eq!(health.json()["checks"]["registry_accessible"], true);
}

// Issue 15, number 16.
#[test]
fn seed_003_push_limit_over_500_mebibytes_is_refused() {
    let gate_dir = GateDir::new(PALISADE);
    let gate = gate_dir.start();
    let register = |limit: u64| {
        let mut body = registration("a", "10.0.0.1");
        body["repos"] = json!([{"name": "o/r", "max_receive_pack_bytes": limit}]);
        gate.request("POST", "/internal/containers", &body)
    };
    let refused = register(524_288_001);
    assert_eq!(refused.status, 400);
    assert_eq!(
        refused.json()["error"],
        "max_receive_pack_bytes must be between 1 and 524288000"
    );
    assert_eq!(gate.get("/internal/containers").json()["count"], 0);
    assert_eq!(register(524_288_000).status, 201);
}

// Issue 15, number 17.
#[test]
fn seed_003_unknown_fields_are_ignored_with_a_warning() {
    let gate_dir = GateDir::new(PALISADE);
    let gate = gate_dir.start();
    let mut body = registration("a", "10.0.0.1");
    body["auth_mod"] = json!("bot");
    body["labels"] = json!({"team": "red"});
    let registered = gate.request("POST", "/internal/containers", &body);
    assert_eq!(registered.status, 201, "{}", registered.text());
    let warning = "Ignored unknown fields: ['auth_mod', 'labels']";
    assert_eq!(registered.json()["warnings"], json!([warning]));
    let row = gate.get("/internal/containers/a").json();
    assert_eq!(row["container"]["auth_mode"], "user", "{row}");
    wait::until("the warning in the log", || {
        gate.stderr()
            .contains("container registered with a warning")
            .then_some(())
    });
    // Without unknown fields there is no warning, and /v1 refuses unknown fields.
    let plain = gate.request(
        "POST",
        "/internal/containers",
        &registration("b", "10.0.0.2"),
    );
    assert_eq!(plain.json().get("warnings"), None);
    let strict = gate.request("POST", "/v1/registrations", &body);
    assert_eq!(strict.status, 400, "{}", strict.text());
}

// Issue 15, number 17.
#[test]
fn seed_003_registration_with_replace_takes_over_the_address() {
    let gate_dir = GateDir::new(PALISADE);
    let gate = gate_dir.start();
    let register = |id: &str, replace: bool| {
        let mut body = registration(id, "10.0.0.1");
        if replace {
            body["replace"] = json!(true);
        }
        gate.request("POST", "/internal/containers", &body)
    };
    assert_eq!(register("crashed", true).json().get("replaced"), None);
    let taken = register("next", false);
    assert_eq!(
        (taken.status, &taken.json()["code"]),
        (409, &json!("ip_taken"))
    );
    let replaced = register("next", true);
    assert_eq!(replaced.status, 201, "{}", replaced.text());
    assert_eq!(replaced.json()["replaced"], "crashed");
    let rows = gate.get("/internal/containers").json();
    assert_eq!(
        (&rows["count"], &rows["containers"][0]["container_id"]),
        (&json!(1), &json!("next"))
    );
    gate.kill();
    // The end of the old registration and the new one are one transaction, and survive.
    let gate = gate_dir.start();
    let rows = gate.get("/internal/containers").json();
    assert_eq!(rows["containers"][0]["container_id"], "next");
    assert_eq!(gate.get("/internal/containers/crashed").status, 404);
}

// Issue 15, number 15.
#[test]
fn seed_003_health_request_reads_the_registry() {
    let gate_dir = GateDir::new(PALISADE);
    let mut gate = gate_dir.start();
    let registered = gate.request(
        "POST",
        "/internal/containers",
        &registration("a", "10.0.0.1"),
    );
    assert_eq!(registered.status, 201);
    gate.signal("TERM");
    assert_eq!(gate.wait().code(), Some(0));
    let gate = gate_dir.start();
    let health = gate.get("/internal/health");
    assert_eq!(health.status, 200, "{}", health.text());
    gate_dir.damage_database();
    // No operation has used the database since.
    let health = gate.get("/internal/health");
    let body = health.json();
    assert_eq!(health.status, 503, "{body}");
    assert_eq!(body["status"], "degraded", "{body}");
    assert_eq!(body["checks"]["registry_accessible"], false, "{body}");
    assert!(body["errors"]["registry_accessible"].is_string(), "{body}");
    let shown = gate_dir.run(&["health"]);
    assert_eq!(shown.status.code(), Some(1));
    let shown = testkit::output::stdout(&shown);
    assert!(shown.contains("FAILED      registry_accessible"), "{shown}");
}

#[test]
fn oversized_request_body_is_refused_and_changes_nothing() {
    let gate_dir = GateDir::new(PALISADE);
    let gate = gate_dir.start();
    let mut large = registration("large", "10.0.0.1");
    large["metadata"] = json!({ "x": "y".repeat(300 * 1024) });
    assert_eq!(
        gate.request("POST", "/internal/containers", &large).status,
        413
    );
    assert_eq!(gate.get("/internal/containers").json()["count"], 0);
}

#[test]
fn hostile_text_in_a_field_stays_in_that_field() {
    let gate_dir = GateDir::new(PALISADE);
    let gate = gate_dir.start();
    let hostile = "x'); DROP TABLE registration;--\n\u{1b}[2J\u{202e}\0\"}{${HOME}%s</script>";
    let mut body = registration("victim", "10.0.0.1");
    body["metadata"] = json!({ hostile: hostile, "nested": { "container_id": "other" } });
    assert_eq!(
        gate.request("POST", "/internal/containers", &body).status,
        201
    );
    let row = gate.get("/v1/registrations/victim").json();
    assert_eq!(row["metadata"], body["metadata"]);
    assert_eq!(
        (&row["container_ip"], &row["auth_mode"]),
        (&json!("10.0.0.1"), &json!("user"))
    );
    assert_eq!(gate.get("/internal/containers").json()["count"], 1);
    for id in ["../x", "a b", "a\nb", "", "é", "%2e%2e"] {
        let refused = gate.request(
            "POST",
            "/internal/containers",
            &registration(id, "10.0.0.2"),
        );
        assert_eq!(refused.status, 400, "{id:?}");
    }
    for line in gate.stderr().lines() {
        assert!(
            !line.contains('\u{1b}') && !line.contains("DROP TABLE"),
            "{line}"
        );
    }
    assert_eq!(gate_dir.run(&["audit", "verify"]).status.code(), Some(0));
}

#[test]
fn long_lived_audit_followers_do_not_block_other_clients() {
    let gate_dir = GateDir::new(PALISADE);
    let mut gate = gate_dir.start();
    let mut followers = Vec::new();
    for _ in 0..80 {
        let mut stream = UnixStream::connect(gate_dir.control()).unwrap();
        stream
            .write_all(b"GET /v1/audit/tail HTTP/1.1\r\nHost: localhost\r\n\r\n")
            .unwrap();
        followers.push(stream);
    }
    wait::until("the followers over the limit to be refused", || {
        let text = gate.get("/internal/metrics").text();
        let refused = "palisade_control_requests_total{action=\"audit.tail\",status=\"503\"} 16";
        text.lines().any(|line| line == refused).then_some(())
    });
    assert_eq!(gate.get("/internal/health").status, 200);
    gate.signal("TERM");
    assert_eq!(gate.wait().code(), Some(0), "{}", gate.stderr());
}

mod needs_root {
    use std::os::unix::fs::PermissionsExt;
    use std::os::unix::process::CommandExt;

    use super::*;

    // Issue 15, number 15. The gate and this thread are in their own network namespace, where an
    // address can be removed from the interface while a listener is bound to it.
    #[test]
    fn seed_003_health_connects_to_proxy_and_dns_listeners() {
        if !testkit::require_root("a network namespace") {
            return;
        }
        std::thread::spawn(|| {
            nix::sched::unshare(nix::sched::CloneFlags::CLONE_NEWNET).unwrap();
            check_listeners();
        })
        .join()
        .unwrap();
    }

    fn check_listeners() {
        let ip = |args: &str| {
            let status = Command::new("busybox")
                .arg("ip")
                .args(args.split(' '))
                .status();
            assert!(status.expect("busybox").success(), "ip {args}");
        };
        ip("link set lo up");
        ip("address add 192.0.2.1/32 dev lo");
        let gate_dir = GateDir::new(PALISADE);
        let configure = |egress: &str| {
            gate_dir.write_config(&format!("version: \"1.0\"\negress: {egress}\n"));
        };
        let at = "[\"192.0.2.1:8080\", \"0.0.0.0:8888\"]";
        configure(&format!(
            "{{listen: {at}, dns: {{listen: [\"192.0.2.1:53\"]}}}}"
        ));
        let gate = gate_dir.start();
        let both_checks = |expected: bool| {
            let health = gate.get("/internal/health");
            let body = health.json();
            let checks = &body["checks"];
            let is = |name: &str| checks[name].as_bool() == Some(expected);
            let status = if expected { 200 } else { 503 };
            let matches = health.status == status && is("proxy_listening") && is("dns_listening");
            matches.then_some(body)
        };
        wait::until("both listeners to answer", || both_checks(true));
        // A health check does not count as a client.
        let records = gate.get("/v1/audit").json();
        let records = records["records"].as_array().unwrap();
        assert!(
            records.iter().all(|record| record["kind"] == "lifecycle"),
            "{records:?}"
        );
        let metrics = gate.get("/internal/metrics").text();
        assert!(!metrics.contains("proxy_requests_total{"), "{metrics}");
        assert!(!metrics.contains("proxy_dns_queries_total{"), "{metrics}");

        ip("address del 192.0.2.1/32 dev lo");
        let body = wait::until("both listeners to be out of reach", || both_checks(false));
        for name in ["proxy_listening", "dns_listening"] {
            let error = body["errors"][name].as_str().unwrap();
            assert!(error.contains("192.0.2.1:"), "{error}");
        }
        let shown = gate_dir.run(&["health"]);
        assert_eq!(shown.status.code(), Some(1));
        let shown = testkit::output::stdout(&shown);
        assert!(shown.contains("FAILED      proxy_listening"), "{shown}");
        // Other commands do not wait for health checks, and find the gate.
        let status = gate_dir.run(&["registry", "list"]);
        assert!(status.status.success());

        ip("address add 192.0.2.1/32 dev lo");
        wait::until("both listeners to answer again", || both_checks(true));
        // Without listeners there is no check.
        configure("{}");
        assert!(gate_dir.run(&["config", "reload"]).status.success());
        let checks = gate.get("/internal/health").json()["checks"].clone();
        for name in ["proxy_listening", "dns_listening"] {
            assert_eq!(checks.get(name), None, "{checks}");
        }
    }

    /// Root makes the socket and its directories accessible to every user, so that only the uid
    /// check can refuse another user.
    #[test]
    fn gate_refuses_clients_with_another_uid() {
        if !testkit::require_root("another uid") {
            return;
        }
        let gate_dir = GateDir::new(PALISADE);
        let gate = gate_dir.start();
        let mode =
            |path: &std::path::Path| std::fs::metadata(path).unwrap().permissions().mode() & 0o777;
        assert_eq!(
            (mode(&gate_dir.control()), mode(&gate_dir.state())),
            (0o600, 0o700)
        );
        let open = |path: &std::path::Path, mode| {
            std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
        };
        open(gate_dir.path(), 0o711);
        open(&gate_dir.state(), 0o711);
        open(&gate_dir.control(), 0o666);
        let output = Command::new("curl")
            .args([
                "-sS",
                "-w",
                "\n%{http_code}",
                "http://localhost/internal/containers",
                "--unix-socket",
            ])
            .arg(gate_dir.control())
            .uid(65534)
            .gid(65534)
            .output()
            .expect("curl");
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(
            text.ends_with("\n403"),
            "{text} {}",
            String::from_utf8_lossy(&output.stderr)
        );
        assert!(text.contains("belongs to another user"), "{text}");
        wait::until("the refusal in the log", || {
            gate.stderr().contains("uid=65534").then_some(())
        });
        assert_eq!(
            gate.get("/internal/containers").status,
            200,
            "the gate's own uid is served"
        );
    }
}
