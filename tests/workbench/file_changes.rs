//! Files change atomically.

use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use nix::mount::{MntFlags, MsFlags, mount, umount2};
use serde_json::json;

use crate::server::{Server, SocketKind};

/// The names in a directory.
fn names(path: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(path).unwrap();
    entries
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect()
}

#[test]
fn concurrent_edits_of_one_file_are_applied_or_refused() {
    let server = Server::start(SocketKind::Unix);
    let words: Vec<String> = (0..32).map(|n| format!("word{n:02}")).collect();
    server.write("f", words.join("\n"));
    // Edits of different texts all succeed. Of the edits of the same text only one succeeds; the
    // others get an error.
    let won: usize = std::thread::scope(|scope| {
        let edits: Vec<_> = (0..32)
            .map(|n| {
                let server = &server;
                scope.spawn(move || {
                    let mine = json!({ "path": "f", "oldText": format!("word{n:02}\n"),
                        "newText": format!("done{n:02}\n") });
                    if n < 31 {
                        server.result("edit", &mine);
                    }
                    let shared = json!({ "path": "f", "oldText": "word31",
                        "newText": format!("won by {n}") });
                    let (status, answer) = server.call("edit", &shared);
                    if status == 400 {
                        let reply = answer["error"].as_str().unwrap();
                        assert!(
                            reply.starts_with("Could not find the exact text"),
                            "{reply}"
                        );
                    }
                    usize::from(status == 200)
                })
            })
            .collect();
        edits.into_iter().map(|edit| edit.join().unwrap()).sum()
    });
    assert_eq!(won, 1);
    let text = String::from_utf8(server.read("f")).unwrap();
    assert_eq!(text.matches("done").count(), 31, "{text}");
    assert!(!text.contains("word"));
    assert_eq!(names(&server.root()), ["f"]);
}

#[test]
fn two_servers_on_one_workspace_lose_no_edit() {
    let server = Server::start(SocketKind::Unix);
    let root = server.root();
    let other = Server::start_with(SocketKind::Unix, &[], |command| {
        command.env("WORKSPACE_ROOT", &root);
    });
    server.write("f", "0,0");
    // Each server increments its own number, and retries after a conflict with the other.
    let count = |server: &Server, index: usize| {
        let mut conflicts = 0;
        let mut number = 0;
        while number < 60 {
            let text = String::from_utf8(std::fs::read(root.join("f")).unwrap()).unwrap();
            let mut numbers: Vec<u32> = text.split(',').map(|n| n.parse().unwrap()).collect();
            assert_eq!(numbers[index], number, "an edit was lost");
            numbers[index] += 1;
            let new = format!("{},{}", numbers[0], numbers[1]);
            let edit = json!({ "path": "f", "oldText": text, "newText": new });
            let (status, answer) = server.call("edit", &edit);
            if status == 200 {
                number += 1;
            } else {
                let reply = answer["error"].as_str().unwrap();
                let expected = reply.starts_with("Could not find the exact text")
                    || reply.starts_with("f was changed by another program");
                assert!(expected, "{reply}");
                conflicts += 1;
            }
        }
        conflicts
    };
    let (one, two) = std::thread::scope(|scope| {
        let one = scope.spawn(|| count(&server, 0));
        let two = count(&other, 1);
        (one.join().unwrap(), two)
    });
    println!("{one} and {two} conflicts");
    assert_eq!(server.read("f"), b"60,60");
    assert_eq!(names(&root), ["f"]);
}

#[test]
fn concurrent_reader_never_sees_a_partial_file() {
    let server = Server::start(SocketKind::Unix);
    let content = |letter: &str| letter.repeat(3_000_000);
    server.write("f", content("a"));
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !stop.load(Ordering::Relaxed) {
                let bytes = server.read("f");
                assert_eq!(bytes.len(), 3_000_000);
                assert!(bytes.iter().all(|byte| *byte == bytes[0]));
            }
        });
        for letter in ["b", "c", "d", "e", "f", "g"] {
            server.result("write", &json!({ "path": "f", "content": content(letter) }));
        }
        stop.store(true, Ordering::Relaxed);
    });
}

#[test]
fn write_keeps_mode_and_owner() {
    let server = Server::start(SocketKind::Unix);
    server.write("script", "#!/bin/sh\n");
    let path = server.root().join("script");
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o754)).unwrap();
    let is_root = std::os::unix::fs::chown(&path, Some(1234), Some(1235)).is_ok();
    server.result(
        "write",
        &json!({ "path": "script", "content": "#!/bin/sh\necho\n" }),
    );
    let edit = json!({ "path": "script", "oldText": "echo", "newText": "true" });
    server.result("edit", &edit);
    let found = std::fs::metadata(&path).unwrap();
    assert_eq!(found.mode() & 0o7777, 0o754);
    if is_root {
        assert_eq!((found.uid(), found.gid()), (1234, 1235));
    }
}

/// A small file system, which is unmounted when this value is dropped.
struct SmallFileSystem<'a>(&'a Path);

impl Drop for SmallFileSystem<'_> {
    fn drop(&mut self) {
        let _ = umount2(self.0, MntFlags::MNT_DETACH);
    }
}

#[test]
fn full_disk_is_reported_and_the_old_file_stays() {
    if !testkit::require_root("a file system of its own to fill") {
        return;
    }
    let server = Server::start(SocketKind::Unix);
    let small = server.root().join("small");
    std::fs::create_dir(&small).unwrap();
    let size = Some("size=1m");
    mount(Some("tmpfs"), &small, Some("tmpfs"), MsFlags::empty(), size).unwrap();
    let mounted = SmallFileSystem(&small);
    server.write("small/f", "the old one");
    let content = "x".repeat(2_000_000);
    let reply = server.error_message("write", &json!({ "path": "small/f", "content": content }));
    assert_eq!(reply, "small/f: No space left on device");
    let edit = json!({ "path": "small/f", "oldText": "old", "newText": content });
    assert_eq!(
        server.error_message("edit", &edit),
        "small/f: No space left on device"
    );
    assert_eq!(server.read("small/f"), b"the old one");
    assert_eq!(names(&small), ["f"]);
    drop(mounted);
}
