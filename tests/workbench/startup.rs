//! Start, authentication and stop of the workbench.

use std::os::unix::fs::PermissionsExt;
use std::process::{Command, Output};

use nix::sys::signal::Signal;
use serde_json::json;
use testkit::output::stderr;

use crate::PALISADE;
use crate::server::{ALL_SOCKET_KINDS, Server, ServerAddress, SocketKind};

/// Starts a workbench, which must fail.
fn refused(arguments: &[&str], environment: &[(&str, &str)]) -> Output {
    let dir = tempfile::tempdir().unwrap();
    let output = Command::new(PALISADE)
        .arg("workbench")
        .args(arguments)
        .env("WORKSPACE_ROOT", dir.path())
        .env("SOCKET_PATH", dir.path().join("s"))
        .envs(environment.iter().copied())
        .output()
        .unwrap();
    assert!(!output.status.success());
    output
}

#[test]
fn incomplete_address_or_missing_token_prevents_the_start() {
    for (environment, sentence) in [
        (vec![("TCP_HOST", "127.0.0.1")], "belong together"),
        (vec![("TCP_PORT", "80")], "belong together"),
        (vec![("SIDECAR_REQUIRE_AUTH", "true")], "there is no token"),
    ] {
        let output = refused(&[], &environment);
        assert_eq!(output.status.code(), Some(2), "{}", stderr(&output));
        assert!(stderr(&output).contains(sentence), "{}", stderr(&output));
    }
    let output = refused(&["--workspace-root", "/nonexistent"], &[]);
    assert!(stderr(&output).contains("/nonexistent"));
}

#[test]
fn stale_workbench_socket_is_replaced_and_other_files_are_kept() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("file");
    std::fs::write(&file, "precious").unwrap();
    let output = refused(&["--socket-path", file.to_str().unwrap()], &[]);
    assert!(
        stderr(&output).contains("not a socket"),
        "{}",
        stderr(&output)
    );
    assert_eq!(std::fs::read(&file).unwrap(), b"precious");

    let stale = dir.path().join("stale");
    drop(std::os::unix::net::UnixListener::bind(&stale).unwrap());
    let path = stale.to_str().unwrap();
    let server = Server::start_with(SocketKind::Unix, &["--socket-path", path], |_| {});
    let address = ServerAddress::Unix(stale.clone());
    assert_eq!(address.request("GET", "/health", "", b"").status, 200);
    let output = refused(&["--socket-path", path], &[]);
    assert!(stderr(&output).contains("another process already listens"));
    assert_eq!(address.request("GET", "/health", "", b"").status, 200);
    drop(server);
}

#[test]
fn socket_is_private_and_removed_with_the_server() {
    for (options, mode, signal) in [
        (&[][..], 0o600, Signal::SIGTERM),
        (&["--socket-mode", "660"], 0o660, Signal::SIGINT),
    ] {
        let mut server = Server::start_with(SocketKind::Unix, options, |_| {});
        let ServerAddress::Unix(path) = server.address.clone() else {
            panic!("not a Unix socket");
        };
        let permissions = std::fs::metadata(&path).unwrap().permissions().mode();
        assert_eq!(permissions & 0o777, mode);
        server.signal(signal);
        assert_eq!(server.wait(), Some(0));
        assert!(!path.exists());
    }
}

fn status(server: &Server, path: &str, authorization: Option<&str>) -> u16 {
    let mut head = "Content-Type: application/json\r\n".to_owned();
    if let Some(value) = authorization {
        head.push_str(&format!("Authorization: {value}\r\n"));
    }
    let method = if path == "/health" { "GET" } else { "POST" };
    let answer = server.address.request(method, path, &head, b"{}");
    if answer.status == 401 {
        let reply = json!({ "ok": false, "error": "Unauthorized" });
        assert_eq!(answer.json(), reply);
    }
    answer.status
}

#[test]
fn wrong_token_is_refused_and_missing_one_if_required() {
    for kind in ALL_SOCKET_KINDS {
        for (required, missing) in [("", 200), ("1", 401)] {
            let server = Server::start_with(kind, &[], |command| {
                command
                    .env("SIDECAR_AUTH_TOKEN", "open sesame")
                    .env("SIDECAR_REQUIRE_AUTH", required);
            });
            for path in ["/health", "/ls"] {
                assert_eq!(status(&server, path, None), missing);
                assert_eq!(status(&server, path, Some("Bearer open sesame")), 200);
                for wrong in ["Bearer open", "open sesame", "Basic b3Blbg==", "Bearer "] {
                    assert_eq!(status(&server, path, Some(wrong)), 401, "{wrong}");
                }
            }
        }
    }
}

#[test]
fn token_is_not_visible_to_commands() {
    let server = Server::start_with(SocketKind::Unix, &[], |command| {
        command.env("SIDECAR_AUTH_TOKEN", "open sesame");
    });
    // The script prints its own environment and, without root, tries to read the server's.
    let script = "env; for p in $PPID $(cut -d' ' -f4 /proc/$PPID/stat); do \
                  setpriv --reuid 65534 --regid 65534 --clear-groups cat /proc/$p/environ; done";
    let body = json!({ "command": script }).to_string();
    let reply = server.post("bash", body.as_bytes()).text();
    assert!(reply.contains("PATH="), "{reply}");
    assert!(!reply.contains("sesame"), "{reply}");
}

#[test]
fn full_file_access_allows_paths_outside_the_workspace() {
    let server = Server::start_with(SocketKind::Unix, &[], |command| {
        command.env("SIDECAR_ALLOW_OUTSIDE_WORKSPACE_ROOT", "true");
    });
    let file = server.parent_dir().join("outside");
    std::fs::write(&file, "secret").unwrap();
    for path in [file.to_str().unwrap(), "../outside"] {
        let read = server.result("read", &json!({ "path": path }));
        assert_eq!(read["content"], "secret");
    }
}
