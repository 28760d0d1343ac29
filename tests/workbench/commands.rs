//! Commands: their output is streamed, and all of their processes are ended.

use std::io::{BufRead, BufReader, Read};
use std::time::{Duration, Instant};

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use nix::sys::signal::Signal;
use serde_json::{Value, json};
use testkit::http::read_response;
use testkit::wait;

use crate::processes::{marked, wait_for, wait_for_none};
use crate::server::{ALL_SOCKET_KINDS, ByteStream, Server, SocketKind, lines};

/// A command that ignores TERM, and starts processes in separate sessions, one by a double fork.
const STUBBORN: &str = "trap '' TERM; setsid sleep 2001 & (setsid sleep 2002 &) ; sleep 2003; true";

fn wait_for_all(server: &Server) {
    for args in ["sleep 2001", "sleep 2002", "sleep 2003"] {
        wait_for(&server.mark, args);
    }
}

/// Waits until only the server itself has the mark.
fn wait_for_only(server: &Server) {
    let own = server.child.id().cast_signed();
    wait::until_or(
        || {
            marked(&server.mark)
                .iter()
                .all(|(pid, _)| *pid == own)
                .then_some(())
        },
        || format!("only the server of {:?}", marked(&server.mark)),
    );
}

#[test]
fn timeout_kills_every_process_of_the_command() {
    for kind in ALL_SOCKET_KINDS {
        let server = Server::start(kind);
        let body = json!({ "command": format!("echo begun; {STUBBORN}"), "timeoutSeconds": 5 });
        let answer = server.post("bash", body.to_string().as_bytes());
        let delta = json!({ "type": "delta", "data": "begun\n", "stream": "stdout" });
        let done = json!({ "type": "done", "exitCode": -1, "timedOut": true });
        assert_eq!(lines(&answer), [delta, done]);
        wait_for_only(&server);
    }
}

#[test]
fn client_disconnect_kills_every_process_of_the_command() {
    for kind in ALL_SOCKET_KINDS {
        let server = Server::start(kind);
        let stream = server.bash(&json!({ "command": STUBBORN }));
        wait_for_all(&server);
        drop(stream);
        wait_for_only(&server);
    }
}

#[test]
fn disconnect_of_a_client_that_never_read_kills_the_command() {
    let server = Server::start(SocketKind::Unix);
    // The command fills the pipe before the client disconnects.
    let stream = server.bash(&json!({ "command": "setsid yes & sleep 2004" }));
    wait_for(&server.mark, "sleep 2004");
    wait_for(&server.mark, "yes");
    drop(stream);
    wait_for_only(&server);
}

#[test]
fn stopped_or_killed_server_leaves_no_process() {
    for signal in [Signal::SIGTERM, Signal::SIGKILL] {
        let mut server = Server::start(SocketKind::Unix);
        let mut stream = server.bash(&json!({ "command": STUBBORN }));
        wait_for_all(&server);
        server.signal(signal);
        let code = server.wait();
        if signal == Signal::SIGTERM {
            assert_eq!(code, Some(0));
            let answer = read_response(&mut stream).unwrap();
            let error = json!({ "type": "error", "message": "the workbench was stopped" });
            assert_eq!(lines(&answer), [error]);
        }
        wait_for_none(&server.mark);
    }
}

#[test]
fn background_process_stays_and_does_not_delay_the_command() {
    let server = Server::start(SocketKind::Unix);
    let started = Instant::now();
    // The background process holds the output open.
    let body = json!({ "command": "sleep 2005 & echo started" });
    let answer = server.post("bash", body.to_string().as_bytes());
    assert!(started.elapsed() < Duration::from_secs(30));
    let reply = lines(&answer);
    assert_eq!(reply[0]["data"], "started\n");
    assert_eq!(reply[1], json!({ "type": "done", "exitCode": 0 }));
    wait_for(&server.mark, "sleep 2005");
}

#[test]
fn output_is_streamed_while_the_command_runs() {
    for kind in ALL_SOCKET_KINDS {
        let server = Server::start(kind);
        let fifo = server.root().join("go");
        nix::unistd::mkfifo(&fifo, nix::sys::stat::Mode::S_IRWXU).unwrap();
        let command = "echo first; cat go; echo last >&2";
        let mut stream = BufReader::new(server.bash(&json!({ "command": command })));
        let mut line = String::new();
        while !line.contains("first") {
            line.clear();
            assert!(stream.read_line(&mut line).unwrap() > 0);
        }
        std::fs::write(&fifo, "now").unwrap();
        let mut rest = String::new();
        stream.read_to_string(&mut rest).unwrap();
        assert!(rest.contains("now") && rest.contains("last"), "{rest}");
    }
}

#[test]
fn output_bytes_are_lossless() {
    for kind in ALL_SOCKET_KINDS {
        let server = Server::start(kind);
        let all: Vec<u8> = (0..=255).cycle().take(300_000).collect();
        server.write("all", &all);
        let text = "äö€😀".repeat(40_000);
        server.write("text", &text);
        let body = json!({ "command": "cat all; cat text >&2; printf '\\xe2\\x82'" });
        let answer = server.post("bash", body.to_string().as_bytes());
        let (mut out, mut err) = (Vec::new(), String::new());
        for line in lines(&answer) {
            match (line["stream"].as_str(), line["base64"].as_str()) {
                (Some("stdout"), Some(bytes)) => out.extend(STANDARD.decode(bytes).unwrap()),
                (Some("stdout"), None) => out.extend(line["data"].as_str().unwrap().bytes()),
                (Some("stderr"), None) => err.push_str(line["data"].as_str().unwrap()),
                (Some("stderr"), Some(_)) => panic!("a character was split"),
                _ => assert_eq!(line, json!({ "type": "done", "exitCode": 0 })),
            }
        }
        assert!(out == [&all[..], b"\xe2\x82"].concat());
        assert!(err == text);
    }
}

fn memory(pid: u32) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status.lines().find(|line| line.starts_with("RssAnon:"));
    let kib = line.unwrap().split_whitespace().nth(1).unwrap();
    kib.parse::<u64>().unwrap() << 10
}

/// Reads a command's response to its end without storing it, and calls `on_read` after each read.
/// Returns the length of the response and its last bytes.
fn drain(mut stream: Box<dyn ByteStream>, mut on_read: impl FnMut()) -> (u64, String) {
    let mut buffer = vec![0; 256 * 1024];
    let (mut total, mut last) = (0, Vec::new());
    loop {
        let length = stream.read(&mut buffer).unwrap();
        if length == 0 {
            return (total, String::from_utf8_lossy(&last).into_owned());
        }
        total += u64::try_from(length).unwrap();
        last.extend_from_slice(&buffer[..length]);
        last.drain(..last.len().saturating_sub(200));
        on_read();
    }
}

#[test]
fn large_output_uses_bounded_memory() {
    let server = Server::start(SocketKind::Unix);
    let before = memory(server.child.id());
    let mut most = before;
    let mib = std::env::var("PALISADE_OUTPUT_MIB").map_or(96, |text| text.parse().unwrap());
    let command = format!("head -c {mib}M /dev/zero | tr '\\0' x");
    let stream = server.bash(&json!({ "command": command }));
    let (total, last) = drain(stream, || most = most.max(memory(server.child.id())));
    assert!(total > mib << 20, "{total}");
    assert!(
        last.contains("{\"type\":\"done\",\"exitCode\":0}"),
        "{last}"
    );
    let grown = most - before;
    println!("{mib} MiB of output: {} KiB more memory", grown >> 10);
    assert!(grown <= 16 << 20, "{grown} bytes");
}

#[test]
fn command_blocks_while_its_client_does_not_read() {
    let server = Server::start(SocketKind::Unix);
    let before = memory(server.child.id());
    let command = "yes | tee >(wc -c > count) | head -c 64000000 >&2; touch finished";
    let stream = server.bash(&json!({ "command": command }));
    let writer = wait_for(&server.mark, "head -c 64000000");
    // Waits until the command blocks: it writes nothing for a while.
    let written = |pid: i32| {
        let io = std::fs::read_to_string(format!("/proc/{pid}/io")).unwrap_or_default();
        let line = io.lines().find(|line| line.starts_with("wchar:"));
        line.and_then(|line| line.split_whitespace().nth(1)?.parse::<u64>().ok())
    };
    let mut seen = (written(writer), Instant::now());
    wait::until("the command to block", || {
        let now = written(writer);
        if now != seen.0 {
            seen = (now, Instant::now());
        }
        (now > Some(0) && seen.1.elapsed() > Duration::from_millis(300)).then_some(())
    });
    assert!(!server.root().join("finished").exists());
    assert!(memory(server.child.id()).saturating_sub(before) <= 16 << 20);
    let (total, _) = drain(stream, || {});
    assert!(total > 64_000_000);
    assert!(server.root().join("finished").exists());
}

#[test]
fn concurrent_commands_get_their_own_output() {
    let server = Server::start(SocketKind::Unix);
    std::thread::scope(|scope| {
        for number in 0..24 {
            let server = &server;
            scope.spawn(move || {
                let body = json!({ "command": format!("for i in 1 2 3; do echo {number}; done") });
                let answer = server.post("bash", body.to_string().as_bytes());
                let reply: String = lines(&answer)
                    .iter()
                    .filter_map(|line: &Value| line["data"].as_str().map(str::to_owned))
                    .collect();
                assert_eq!(reply, format!("{number}\n").repeat(3));
            });
        }
    });
    wait_for_only(&server);
}

#[test]
fn workbench_as_process_1_reaps_orphans() {
    if !testkit::require_root("a process namespace") {
        return;
    }
    let server =
        Server::start_under(&["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]);
    let printed = |command: &str| {
        let body = json!({ "command": command }).to_string();
        let lines = lines(&server.post("bash", body.as_bytes()));
        let data = lines.iter().filter_map(|line| line["data"].as_str());
        data.collect::<String>()
    };
    assert_eq!(printed("cut -d' ' -f4 /proc/$PPID/stat"), "1\n");
    printed("for i in 1 2 3; do (sleep 0.1 >/dev/null 2>&1 &); done");
    // The processes are in the process table, sleeping or dead, until their parent reaps them.
    let left = "cat /proc/[0-9]*/stat 2>/dev/null | grep -c '(sleep)'; true";
    wait::until("no orphan", || (printed(left) == "0\n").then_some(()));
}
