//! The control socket, as the programs that already call it do: with curl and with
//! hostile text.

#![allow(
    clippy::expect_used,
    clippy::indexing_slicing,
    clippy::panic,
    clippy::unwrap_used,
    reason = "a test that cannot go on has failed"
)]

use std::io::{BufReader, Write};
use std::os::unix::net::UnixStream;
use std::process::Command;

use serde_json::{Value, json};
use testkit::gate::Place;
use testkit::{http, wait};

const PALISADE: &str = env!("CARGO_BIN_EXE_palisade");

/// The seed's own line: `curl --unix-socket $CTL http://localhost/internal/containers -d …`.
fn curl(place: &Place, args: &[&str]) -> (u16, Value) {
    let output = Command::new("curl")
        .args(["-sS", "-w", "\n%{http_code}", "--unix-socket"])
        .arg(place.control())
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

fn seed(id: &str, ip: &str) -> Value {
    json!({"container_ip": ip, "container_id": id, "repos": ["o/r"]})
}

#[test]
fn a_registration_survives_a_kill_right_after_its_201() {
    let place = Place::new(PALISADE);
    let gate = place.start();
    let body = r#"{"container_ip":"172.18.0.5","container_id":"abc","repos":["o/r"]}"#;
    let (status, answer) = curl(
        &place,
        &["http://localhost/internal/containers", "-d", body],
    );
    gate.kill();
    assert_eq!(
        (status, &answer["status"], &answer["container_id"]),
        (201, &json!("registered"), &json!("abc"))
    );

    let _gate = place.start();
    let (status, answer) = curl(&place, &["http://localhost/internal/containers/abc"]);
    assert_eq!(status, 200);
    assert_eq!(answer["container"]["container_ip"], "172.18.0.5");
    assert_eq!(answer["container"]["repos"][0]["name"], "o/r");
}

#[test]
fn an_expired_registration_is_pruned_at_start() {
    let place = Place::new(PALISADE);
    let gate = place.start();
    let short = json!({"container_id": "short", "ip_address": "10.0.0.1", "ttl_seconds": 1});
    assert_eq!(gate.ask("POST", "/internal/containers", &short).status, 201);
    assert_eq!(
        gate.ask("POST", "/internal/containers", &seed("long", "10.0.0.2"))
            .status,
        201
    );
    wait::until("the expiry", || {
        (gate.get("/internal/containers/short").status == 404).then_some(())
    });
    gate.kill();

    let gate = place.start();
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
fn the_eleventh_write_within_a_second_is_refused() {
    let place = Place::new(PALISADE);
    let gate = place.start();
    // Refused bodies count as well. All on one connection and without waiting for answers, so
    // that only a gate that takes a tenth of a second for each could be slow enough.
    let one = "POST /internal/containers HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}";
    let mut stream = UnixStream::connect(place.control()).unwrap();
    let mut answers = BufReader::new(stream.try_clone().unwrap());
    let asking = std::thread::spawn(move || stream.write_all(one.repeat(100).as_bytes()));
    let answers: Vec<_> = (0..100)
        .map(|_| http::read_answer(&mut answers).unwrap())
        .collect();
    asking.join().unwrap().unwrap();
    let (first, rest) = answers.split_at(10);
    assert!(first.iter().all(|answer| answer.status == 400));
    let refused = rest.iter().find(|answer| answer.status == 429);
    let refused = refused.expect("one is too many");
    assert_eq!(refused.header("retry-after"), Some("1"));
    assert_eq!(refused.json()["error"], "Rate limit exceeded");
    // Each of these counts too.
    wait::until("a DELETE too many", || {
        let answer = gate.ask("DELETE", "/internal/containers/x", &Value::Null);
        (answer.status == 429).then_some(())
    });
    assert_eq!(
        gate.get("/internal/containers").status,
        200,
        "reads are not limited"
    );
    wait::until("the window to pass", || {
        (gate.ask("POST", "/internal/containers", &json!({})).status == 400).then_some(())
    });
}

#[test]
fn the_seeds_routes_answer_as_the_seed_says() {
    let place = Place::new(PALISADE);
    let gate = place.start();
    let missing = gate.ask(
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
        gate.ask("POST", "/internal/containers", &seed("a", "10.0.0.1"))
            .status,
        201
    );
    let taken = gate.ask("POST", "/internal/containers", &seed("b", "10.0.0.1"));
    assert_eq!(
        (taken.status, &taken.json()["code"]),
        (409, &json!("ip_taken"))
    );
    let mapped = gate.ask(
        "POST",
        "/internal/containers",
        &seed("b", "::ffff:10.0.0.1"),
    );
    assert_eq!(mapped.status, 409, "the same address in another spelling");
    assert_eq!(
        gate.ask("POST", "/internal/containers", &seed("a", "10.0.0.9"))
            .status,
        201
    );
    assert_eq!(
        gate.ask("POST", "/internal/containers", &seed("b", "10.0.0.1"))
            .status,
        201
    );

    assert_eq!(
        gate.ask("DELETE", "/internal/containers/b", &Value::Null)
            .status,
        200
    );
    assert_eq!(
        gate.ask("DELETE", "/internal/containers/b", &Value::Null)
            .status,
        404
    );
    assert_eq!(gate.get("/internal/containers/b").status, 404);
    let method = gate.ask("PATCH", "/internal/containers", &Value::Null);
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

#[test]
fn a_body_that_is_too_large_is_refused_and_changes_nothing() {
    let place = Place::new(PALISADE);
    let gate = place.start();
    let mut large = seed("large", "10.0.0.1");
    large["metadata"] = json!({ "x": "y".repeat(300 * 1024) });
    assert_eq!(gate.ask("POST", "/internal/containers", &large).status, 413);
    assert_eq!(gate.get("/internal/containers").json()["count"], 0);
}

#[test]
fn hostile_text_in_a_field_changes_nothing_but_that_field() {
    let place = Place::new(PALISADE);
    let gate = place.start();
    let hostile = "x'); DROP TABLE registration;--\n\u{1b}[2J\u{202e}\0\"}{${HOME}%s</script>";
    let mut body = seed("victim", "10.0.0.1");
    body["metadata"] = json!({ hostile: hostile, "nested": { "container_id": "other" } });
    assert_eq!(gate.ask("POST", "/internal/containers", &body).status, 201);
    let row = gate.get("/v1/registrations/victim").json();
    assert_eq!(row["metadata"], body["metadata"]);
    assert_eq!(
        (&row["container_ip"], &row["auth_mode"]),
        (&json!("10.0.0.1"), &json!("user"))
    );
    assert_eq!(gate.get("/internal/containers").json()["count"], 1);
    for id in ["../x", "a b", "a\nb", "", "é", "%2e%2e"] {
        let refused = gate.ask("POST", "/internal/containers", &seed(id, "10.0.0.2"));
        assert_eq!(refused.status, 400, "{id:?}");
    }
    for line in gate.said().lines() {
        assert!(
            !line.contains('\u{1b}') && !line.contains("DROP TABLE"),
            "{line}"
        );
    }
    assert_eq!(place.run(&["audit", "verify"]).status.code(), Some(0));
}

#[test]
fn followers_who_never_leave_do_not_keep_everybody_else_out() {
    let place = Place::new(PALISADE);
    let mut gate = place.start();
    let mut followers = Vec::new();
    for _ in 0..80 {
        let mut stream = UnixStream::connect(place.control()).unwrap();
        stream
            .write_all(b"GET /v1/audit/tail HTTP/1.1\r\nHost: localhost\r\n\r\n")
            .unwrap();
        followers.push(stream);
    }
    wait::until("the last places to be refused", || {
        let text = gate.get("/internal/metrics").text();
        let refused = "palisade_control_requests_total{action=\"audit.tail\",status=\"503\"} 16";
        text.lines().any(|line| line == refused).then_some(())
    });
    assert_eq!(gate.get("/internal/health").status, 200);
    gate.signal("TERM");
    assert_eq!(gate.wait().code(), Some(0), "{}", gate.said());
}

mod needs_root {
    use std::os::unix::fs::PermissionsExt;
    use std::os::unix::process::CommandExt;

    use super::*;

    /// As root the file modes can be opened up, so that the uid check itself is what
    /// stands between another user and the gate.
    #[test]
    fn another_uid_is_refused_by_the_gate_itself() {
        if !testkit::require_root("another uid") {
            return;
        }
        let place = Place::new(PALISADE);
        let gate = place.start();
        let mode =
            |path: &std::path::Path| std::fs::metadata(path).unwrap().permissions().mode() & 0o777;
        assert_eq!(
            (mode(&place.control()), mode(&place.state())),
            (0o600, 0o700)
        );
        let open = |path: &std::path::Path, mode| {
            std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
        };
        open(place.path(), 0o711);
        open(&place.state(), 0o711);
        open(&place.control(), 0o666);
        let output = Command::new("curl")
            .args([
                "-sS",
                "-w",
                "\n%{http_code}",
                "http://localhost/internal/containers",
                "--unix-socket",
            ])
            .arg(place.control())
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
        wait::until("the gate to say so", || {
            gate.said().contains("uid=65534").then_some(())
        });
        assert_eq!(
            gate.get("/internal/containers").status,
            200,
            "its own uid is served"
        );
    }
}
