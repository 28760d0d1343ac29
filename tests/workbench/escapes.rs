//! Attempts to leave the workspace, all of which are refused.

use std::os::unix::fs::symlink;
use std::sync::atomic::{AtomicBool, Ordering};

use nix::fcntl::{AT_FDCWD, RenameFlags, renameat2};
use nix::sys::stat::{Mode, SFlag, makedev, mknod};
use serde_json::{Value, json};

use crate::server::{ALL_SOCKET_KINDS, Server, SocketKind};

/// The error message for paths outside the workspace.
const OUTSIDE_ERROR: &str = "Invalid path: access outside workspace is not allowed";

/// Every tool that takes a path, with this path.
fn each_tool(path: &str) -> [(&'static str, Value); 6] {
    [
        ("read", json!({ "path": path })),
        ("write", json!({ "path": path, "content": "overwritten" })),
        (
            "edit",
            json!({ "path": path, "oldText": "secret", "newText": "changed" }),
        ),
        ("ls", json!({ "path": path })),
        ("find", json!({ "path": path, "pattern": "*" })),
        ("grep", json!({ "path": path, "pattern": "secret" })),
    ]
}

/// A server with a secret file beside its workspace.
fn server_with_secret(kind: SocketKind) -> Server {
    let server = Server::start(kind);
    std::fs::create_dir(server.parent_dir().join("away")).unwrap();
    std::fs::write(server.parent_dir().join("away/secret"), "secret").unwrap();
    server
}

fn assert_untouched(server: &Server) {
    let away = server.parent_dir().join("away");
    assert_eq!(std::fs::read(away.join("secret")).unwrap(), b"secret");
    assert_eq!(std::fs::read_dir(away).unwrap().count(), 1);
}

#[test]
fn paths_and_links_out_of_the_workspace_are_refused() {
    for kind in ALL_SOCKET_KINDS {
        let server = server_with_secret(kind);
        let root = server.root();
        let away = server.parent_dir().join("away");
        symlink("../away", root.join("relative")).unwrap();
        symlink(&away, root.join("absolute")).unwrap();
        symlink("../away/secret", root.join("file")).unwrap();
        symlink("../away/new", root.join("new")).unwrap();
        symlink("/proc/self/root", root.join("magic")).unwrap();
        symlink("/proc/self/cwd/..", root.join("cwd")).unwrap();
        for path in [
            "..",
            "../away",
            "../away/secret",
            "x/../../away/secret",
            "/../away/secret",
            "relative",
            "relative/secret",
            "relative/new/file",
            "absolute",
            "absolute/secret",
            "file",
            "new",
            "magic/etc/passwd",
            "cwd/away/secret",
        ] {
            for (tool, body) in each_tool(path) {
                assert_eq!(
                    server.error_message(tool, &body),
                    OUTSIDE_ERROR,
                    "{tool} {path}"
                );
            }
        }
        assert_untouched(&server);
        // An absolute path starts at the root.
        let secret = away.join("secret");
        let body = json!({ "path": secret.to_str().unwrap() });
        assert!(
            server
                .error_message("read", &body)
                .starts_with("No such file")
        );
        // Searches do not follow the links either.
        let find = server.result("find", &json!({ "pattern": "*" }));
        let files = find["files"].as_array().unwrap();
        assert!(
            files
                .iter()
                .all(|file| !file.as_str().unwrap().contains('/')),
            "{find}"
        );
        let grep = server.result("grep", &json!({ "pattern": "secret" }));
        assert_eq!(grep["content"], "No matches found");
    }
}

#[test]
fn link_swapped_in_during_a_call_is_not_followed() {
    let server = server_with_secret(SocketKind::Unix);
    let root = server.root();
    std::fs::create_dir(root.join("there")).unwrap();
    std::fs::write(root.join("there/secret"), "harmless").unwrap();
    symlink("../away", root.join("link")).unwrap();
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let (link, there) = (root.join("link"), root.join("there"));
            while !stop.load(Ordering::Relaxed) {
                let flags = RenameFlags::RENAME_EXCHANGE;
                renameat2(AT_FDCWD, &link, AT_FDCWD, &there, flags).unwrap();
            }
        });
        let mut read = 0;
        for round in 0..300 {
            for (tool, body) in each_tool("there/secret").into_iter().take(3) {
                let (status, answer) = server.call(tool, &body);
                let reply = answer.to_string();
                assert!(!reply.contains("\"content\":\"secret\""), "{reply}");
                read += usize::from(status == 200);
            }
            if round % 10 == 0 {
                let (_, answer) = server.call("grep", &json!({ "pattern": "^secret$" }));
                assert!(!answer.to_string().contains(":1: secret"), "{answer}");
                let (_, answer) = server.call("ls", &json!({ "path": "there" }));
                assert!(!answer.to_string().contains("new"), "{answer}");
            }
        }
        stop.store(true, Ordering::Relaxed);
        assert!(
            read > 0,
            "no call opened the directory before it was replaced"
        );
    });
    assert_untouched(&server);
}

#[test]
fn write_to_a_hard_link_replaces_it() {
    let server = server_with_secret(SocketKind::Unix);
    let secret = server.parent_dir().join("away/secret");
    for name in ["one", "two"] {
        std::fs::hard_link(&secret, server.root().join(name)).unwrap();
    }
    server.result("write", &json!({ "path": "one", "content": "mine" }));
    let edit = json!({ "path": "two", "oldText": "secret", "newText": "mine" });
    server.result("edit", &edit);
    assert_eq!(
        (server.read("one"), server.read("two")),
        (b"mine".to_vec(), b"mine".to_vec())
    );
    assert_untouched(&server);
}

#[test]
fn special_files_are_refused_immediately() {
    for kind in ALL_SOCKET_KINDS {
        let server = Server::start(kind);
        let root = server.root();
        nix::unistd::mkfifo(&root.join("pipe"), Mode::S_IRWXU).unwrap();
        nix::unistd::mkfifo(&root.join(".gitignore"), Mode::S_IRWXU).unwrap();
        let _socket = std::os::unix::net::UnixListener::bind(root.join("socket")).unwrap();
        symlink("pipe", root.join("link")).unwrap();
        let mut names = vec!["pipe", "link", "socket"];
        // A device that can be read without end; only root can create one.
        let zero = makedev(1, 5);
        if mknod(&root.join("zero"), SFlag::S_IFCHR, Mode::S_IRWXU, zero).is_ok() {
            names.push("zero");
        }
        for path in names {
            for (tool, body) in each_tool(path).into_iter().take(3) {
                let reply = server.error_message(tool, &body);
                let refused = format!("Not a regular file: {path}");
                // The kernel refuses to open a socket.
                let closed = format!("{path}: No such device or address");
                assert!(
                    reply == refused || reply == closed,
                    "{tool} {path}: {reply}"
                );
            }
            let grep = json!({ "path": path, "pattern": "x" });
            assert_eq!(server.call("grep", &grep).0, 400, "{path}");
        }
        // A search does not block on a FIFO either.
        let grep = json!({ "pattern": "x" });
        assert_eq!(server.result("grep", &grep)["content"], "No matches found");
    }
}
