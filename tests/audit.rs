//! The audit log on the command line: records, verification, export, tail.

#![allow(
    clippy::expect_used,
    clippy::indexing_slicing,
    clippy::panic,
    clippy::unwrap_used,
    reason = "a test that cannot continue has failed"
)]

use std::io::{BufRead, BufReader, Write};
use std::net::TcpStream;
use std::process::Stdio;

use serde_json::{Value, json};
use testkit::gate::{GateDir, GateProcess};
use testkit::operator::Operator;
use testkit::output::stdout;
use testkit::port::Port;
use testkit::pty::Pty;

const PALISADE: &str = env!("CARGO_BIN_EXE_palisade");

fn register(gate: &GateProcess<'_>, number: u8) {
    let row = json!({"container_ip": format!("10.0.0.{number}"), "container_id": format!("c{number}"), "repos": []});
    assert_eq!(
        gate.request("POST", "/internal/containers", &row).status,
        201
    );
}

/// A gate directory with a few records and a stopped gate.
fn with_records() -> GateDir {
    let gate_dir = GateDir::new(PALISADE);
    let mut gate = gate_dir.start();
    (1..=5).for_each(|number| register(&gate, number));
    assert_eq!(
        gate.request("DELETE", "/internal/containers/c3", &Value::Null)
            .status,
        200
    );
    gate.signal("TERM");
    assert_eq!(gate.wait().code(), Some(0));
    drop(gate);
    gate_dir
}

fn verify(gate_dir: &GateDir) -> (Option<i32>, String) {
    let database = gate_dir.database();
    let output = gate_dir.run(&["audit", "verify", database.to_str().unwrap()]);
    (output.status.code(), stdout(&output))
}

#[test]
fn verify_names_the_record_with_a_changed_byte() {
    let gate_dir = with_records();
    let (code, printed) = verify(&gate_dir);
    assert!(
        code == Some(0) && printed.starts_with("intact: "),
        "{printed}"
    );

    let sql = rusqlite::Connection::open(gate_dir.database()).unwrap();
    let changed_seq: i64 = sql
        .query_row(
            "SELECT seq FROM audit WHERE body LIKE '%\"c3\"%' ORDER BY seq LIMIT 1",
            [],
            |row| row.get(0),
        )
        .unwrap();
    let body: String = sql
        .query_row(
            "SELECT body FROM audit WHERE seq = ?1",
            [changed_seq],
            |row| row.get(0),
        )
        .unwrap();
    let forged = body.replacen("\"c3\"", "\"c4\"", 1);
    sql.execute(
        "UPDATE audit SET body = ?1 WHERE seq = ?2",
        (forged, changed_seq),
    )
    .unwrap();
    drop(sql);
    let (code, printed) = verify(&gate_dir);
    assert_eq!(code, Some(1));
    assert!(
        printed.starts_with("BROKEN: ") && printed.contains(&changed_seq.to_string()),
        "{changed_seq}: {printed}"
    );

    // The running gate reports the same.
    let gate = gate_dir.start();
    let answer = gate
        .request("POST", "/v1/audit/verify", &Value::Null)
        .json();
    assert_eq!(
        (&answer["intact"], &answer["broken"]["seq"]),
        (&json!(false), &json!(changed_seq))
    );
}

#[test]
fn export_is_verified_and_a_changed_export_is_rejected() {
    let gate_dir = with_records();
    let _gate = gate_dir.start();
    let file = gate_dir.path().join("export.jsonl");
    let file = file.to_str().unwrap();
    assert!(
        gate_dir
            .run(&["audit", "export", "-o", file])
            .status
            .success()
    );
    assert_eq!(
        gate_dir.run(&["audit", "export", "-o", file]).status.code(),
        Some(4),
        "an existing file is not overwritten"
    );
    let output = gate_dir.run(&["audit", "verify", file]);
    assert!(output.status.success(), "{}", stdout(&output));

    let text = std::fs::read_to_string(file).unwrap();
    std::fs::write(file, text.replacen("registered", "registereD", 1)).unwrap();
    assert_eq!(
        gate_dir.run(&["audit", "verify", file]).status.code(),
        Some(1)
    );
    assert_eq!(
        gate_dir
            .run(&["audit", "verify", "/no/such.jsonl"])
            .status
            .code(),
        Some(3)
    );
}

#[test]
fn tail_prints_new_records_immediately() {
    let gate_dir = GateDir::new(PALISADE);
    let gate = gate_dir.start();
    let mut tail = gate_dir
        .palisade(&["audit", "tail", "--json", "--sandbox", "c7"])
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(tail.stdout.take().unwrap()).lines();
    // The gate counts the follower's request once the follower is connected.
    testkit::wait::until("the follower", || {
        gate.get("/internal/metrics")
            .text()
            .contains("action=\"audit.tail\"")
            .then_some(())
    });
    register(&gate, 6);
    register(&gate, 7);
    let record: Value = serde_json::from_str(&lines.next().unwrap().unwrap()).unwrap();
    assert_eq!(
        (&record["sandbox"], &record["event"]),
        (&json!("c7"), &json!("registered"))
    );
    tail.kill().unwrap();
    tail.wait().unwrap();
}

#[test]
fn list_filters_records_and_rejects_invalid_filters() {
    let gate_dir = with_records();
    let _gate = gate_dir.start();
    let list = stdout(&gate_dir.run(&["audit", "list", "--sandbox", "c3"]));
    assert!(
        list.contains("unregistered") && !list.contains("c4"),
        "{list}"
    );
    let newest: Vec<Value> = serde_json::from_str(&stdout(
        &gate_dir.run(&["audit", "list", "--json", "-n", "1"]),
    ))
    .unwrap();
    assert_eq!(newest[0]["event"], "gate_started");
    assert_eq!(
        stdout(&gate_dir.run(&["audit", "list", "--until", "1d"])),
        "no records\n"
    );
    assert_eq!(
        gate_dir
            .run(&["audit", "list", "--since", "soon"])
            .status
            .code(),
        Some(2)
    );
    assert_eq!(
        gate_dir
            .run(&["audit", "list", "--kind", "ftp"])
            .status
            .code(),
        Some(2)
    );
}

#[test]
fn json_lines_file_has_every_record_across_restarts() {
    let gate_dir = GateDir::new(PALISADE);
    let lines = gate_dir.path().join("audit.jsonl");
    gate_dir.write_config(&format!(
        "version: \"1.0\"\naudit: {{ jsonl: {} }}\n",
        lines.display()
    ));
    for number in 1..=3 {
        let gate = gate_dir.start();
        register(&gate, number);
        gate.kill();
    }
    let gate = gate_dir.start();
    testkit::wait::until("the lines to catch up", || {
        let newest =
            gate.get("/v1/audit?limit=1&newest_first=true").json()["records"][0]["seq"].as_u64();
        let text = std::fs::read_to_string(&lines).ok()?;
        let last: Value = serde_json::from_str(text.lines().last()?).ok()?;
        (last["seq"].as_u64() == newest).then_some(())
    });
    let text = std::fs::read_to_string(&lines).unwrap();
    let seqs: Vec<u64> = text
        .lines()
        .map(|line| {
            serde_json::from_str::<Value>(line).unwrap()["seq"]
                .as_u64()
                .unwrap()
        })
        .collect();
    assert!(seqs.windows(2).all(|pair| pair[0] < pair[1]), "{seqs:?}");
    let output = gate_dir.run(&["audit", "verify", lines.to_str().unwrap()]);
    assert!(output.status.success(), "{}", stdout(&output));
    assert_eq!(text.matches("\"event\":\"registered\"").count(), 3);
}

/// Characters that control a terminal, reorder text or are invisible.
const HOSTILE: &str = "\u{7f}\u{85}\u{9b}31m\u{9d}\u{202e}\u{2066}\u{200b}\u{2028}\u{e0041}";

/// Issue 14, number 6.
#[test]
fn json_on_a_terminal_escapes_control_characters() {
    let gate_dir = GateDir::new(PALISADE);
    let port = Port::take();
    let address = port.address();
    gate_dir.write_config(&format!(
        "version: \"1.0\"\nserver: {{ single_port: \"{address}\" }}\n"
    ));
    let gate = gate_dir.start();
    let row = json!({
        "container_ip": "10.0.0.1", "container_id": "c1", "repos": [],
        "metadata": {"note": HOSTILE},
    });
    assert_eq!(
        gate.request("POST", "/internal/containers", &row).status,
        201
    );
    let call = || {
        let body = json!({
            "version": "1.0", "type": "before", "request_id": "r1",
            "timestamp": "2026-01-02T03:04:05.678Z", "method": "tools/call",
            "params": {"name": HOSTILE}, "tool_id": HOSTILE, "agent_id": HOSTILE,
            "session_id": "s1",
        });
        let body = body.to_string();
        let length = body.len();
        let mut stream = TcpStream::connect(address).unwrap();
        write!(
            stream,
            "POST /intercept/before HTTP/1.1\r\nHost: {address}\r\n\
             Content-Length: {length}\r\nConnection: close\r\n\r\n{body}"
        )
        .unwrap();
        testkit::http::read_response(BufReader::new(stream)).unwrap()
    };
    assert_eq!(call().status, 200);
    let is_unsafe = |c: char| c != '\r' && c != '\n' && HOSTILE.replace("31m", "").contains(c);

    for args in [
        &["registry", "list", "--json"][..],
        &["audit", "list", "--json"],
        &["audit", "export"],
        &["audit", "export", "--json"],
    ] {
        let mut terminal = Pty::start(Operator::CurrentUser, &gate_dir.palisade(args));
        assert!(terminal.wait().success(), "{args:?}: {}", terminal.shown());
        let shown = terminal.shown();
        assert!(!shown.contains(is_unsafe), "{args:?}: {shown:?}");
        for escape in ["\\u202e", "\\u2066", "\\u200b", "\\udb40\\udc41"] {
            assert!(shown.contains(escape), "{args:?}: {shown:?}");
        }
        let values = serde_json::Deserializer::from_str(&shown).into_iter::<Value>();
        assert!(values.map(Result::unwrap).count() > 0, "{args:?}");
    }
    let listed = stdout(&gate_dir.run(&["registry", "list", "--json"]));
    let listed: Value = serde_json::from_str(&listed).unwrap();
    assert_eq!(
        listed[0]["metadata"]["note"], HOSTILE,
        "the escaped JSON has the same value"
    );

    let mut tail = Pty::start(
        Operator::CurrentUser,
        &gate_dir.palisade(&["audit", "tail", "--json", "--kind", "mcp"]),
    );
    testkit::wait::until("the follower", || {
        gate.get("/internal/metrics")
            .text()
            .contains("action=\"audit.tail\"")
            .then_some(())
    });
    assert_eq!(call().status, 200);
    tail.expect("\\u202e");
    tail.expect("\n");
    assert!(!tail.shown().contains(is_unsafe), "{:?}", tail.shown());

    // Piped output has the hashed bytes.
    let piped = gate_dir.run(&["audit", "export"]).stdout;
    assert!(str::from_utf8(&piped).unwrap().contains('\u{202e}'));
    let file = gate_dir.path().join("piped.jsonl");
    std::fs::write(&file, piped).unwrap();
    let output = gate_dir.run(&["audit", "verify", file.to_str().unwrap()]);
    assert!(output.status.success(), "{}", stdout(&output));
}
