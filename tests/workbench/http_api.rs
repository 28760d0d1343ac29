//! Every route, every field and every message, as clients of the original sidecar expect them,
//! over both kinds of socket.

use std::process::Command;

use serde_json::{Value, json};
use testkit::http::HttpResponse;

use crate::server::{ALL_SOCKET_KINDS, Server, ServerAddress, SocketKind, lines};

fn get(server: &Server, path: &str) -> HttpResponse {
    server.address.request("GET", path, "", b"")
}

#[test]
fn health_returns_ok_and_a_version() {
    for kind in ALL_SOCKET_KINDS {
        let server = Server::start(kind);
        let answer = get(&server, "/health");
        assert_eq!(answer.status, 200);
        assert_eq!(
            answer.json(),
            json!({ "ok": true, "version": env!("CARGO_PKG_VERSION") })
        );
        let kind = answer.header("content-type").unwrap().to_owned();
        assert_eq!(kind, "application/json; charset=utf-8");
    }
}

#[test]
fn command_output_is_json_lines() {
    for kind in ALL_SOCKET_KINDS {
        let server = Server::start(kind);
        let command = "pwd; echo oops >&2; exit 3";
        let body = json!({ "sessionId": "one", "command": command });
        let answer = server.post("bash", body.to_string().as_bytes());
        assert_eq!(answer.status, 200);
        let kind = answer.header("content-type").unwrap().to_owned();
        assert_eq!(kind, "application/x-ndjson; charset=utf-8");
        let mut reply = lines(&answer);
        assert_eq!(reply.pop(), Some(json!({ "type": "done", "exitCode": 3 })));
        let root = std::fs::canonicalize(server.root()).unwrap();
        let pwd = format!("{}\n", root.display());
        let line_of = |stream| reply.iter().find(|line| line["stream"] == stream).unwrap();
        assert_eq!(
            line_of("stdout"),
            &json!({ "type": "delta", "data": pwd, "stream": "stdout" })
        );
        assert_eq!(
            line_of("stderr"),
            &json!({ "type": "delta", "data": "oops\n", "stream": "stderr" })
        );
    }
}

#[test]
fn read_returns_text_lines_or_an_image() {
    for kind in ALL_SOCKET_KINDS {
        let server = Server::start(kind);
        server.write("a.txt", "one\ntwo\nthree\n");
        server.write("b.PNG", b"\x89PNG");
        server.write("c.bin", b"a\xffb");
        let text = |content: &str, total: u64, more: bool| json!({ "type": "text", "content": content, "totalLines": total, "hasMore": more });
        for (body, result) in [
            (
                json!({ "path": "a.txt" }),
                text("one\ntwo\nthree\n", 4, false),
            ),
            (
                json!({ "path": "a.txt", "offset": 2 }),
                text("two\nthree\n", 4, false),
            ),
            (
                json!({ "path": "a.txt", "limit": 2 }),
                text("one\ntwo", 4, true),
            ),
            (
                json!({ "path": "/a.txt", "offset": 2, "limit": 1 }),
                text("two", 4, true),
            ),
            (
                json!({ "path": "a.txt", "offset": 4, "limit": 9 }),
                text("", 4, false),
            ),
            (
                json!({ "path": "a.txt", "offset": null, "limit": 0 }),
                text("one\ntwo\nthree\n", 4, false),
            ),
            (json!({ "path": "c.bin" }), text("a\u{fffd}b", 1, false)),
            (
                json!({ "path": "b.PNG" }),
                json!({ "type": "image", "data": "iVBORw==", "mimeType": "image/png" }),
            ),
        ] {
            assert_eq!(server.result("read", &body), result, "{body}");
        }
    }
}

#[test]
fn write_and_edit_change_files_and_report_it() {
    for kind in ALL_SOCKET_KINDS {
        let server = Server::start(kind);
        let written = server.result(
            "write",
            &json!({ "path": "/a/b.txt", "content": "ä\ntwo\n" }),
        );
        assert_eq!(
            written,
            json!({ "ok": true, "path": "a/b.txt", "bytes": 7 })
        );
        assert_eq!(server.read("a/b.txt"), "ä\ntwo\n".as_bytes());
        let edit = json!({ "path": "a/b.txt", "oldText": "two", "newText": "2\n3" });
        let edited = server.result("edit", &edit);
        let diff = " 1 ä\n-2 two\n+2 2\n+3 3";
        assert_eq!(
            edited,
            json!({ "ok": true, "path": "a/b.txt", "diff": diff })
        );
        assert_eq!(server.read("a/b.txt"), "ä\n2\n3\n".as_bytes());
        let empty = json!({ "path": "a/b.txt", "content": "" });
        assert_eq!(server.result("write", &empty)["bytes"], 0);
    }
}

#[test]
fn ls_find_and_grep_return_their_response_formats() {
    for kind in ALL_SOCKET_KINDS {
        let server = Server::start(kind);
        std::fs::create_dir(server.root().join("empty")).unwrap();
        server.write("B.txt", "x\n");
        server.write("a/.hidden.txt", "one\nneedle\nthree\n");
        server.write("a/c.rs", "Needle\n");
        let empty = json!({ "path": "empty" });
        assert_eq!(
            server.result("ls", &empty),
            json!({ "output": "(empty directory)" })
        );
        assert_eq!(
            server.result("ls", &json!({})),
            json!({ "output": "a/\nB.txt\nempty/" })
        );
        assert_eq!(
            server.result("find", &json!({ "pattern": "*.txt" })),
            json!({ "files": ["B.txt", "a/.hidden.txt"], "truncated": false, "limit": 1000 })
        );
        assert_eq!(
            server.result(
                "find",
                &json!({ "pattern": "*.txt", "path": "a", "limit": 7 })
            ),
            json!({ "files": [".hidden.txt"], "truncated": false, "limit": 7 })
        );
        assert_eq!(
            server.result("grep", &json!({ "pattern": "need.e" })),
            json!({ "content": "a/.hidden.txt:2: needle" })
        );
        let grep = json!({ "pattern": "NEEDLE", "ignoreCase": true, "context": 1 });
        let content = "a/.hidden.txt-1- one\na/.hidden.txt:2: needle\na/.hidden.txt-3- three\n\
                       a/c.rs:1: Needle";
        assert_eq!(server.result("grep", &grep), json!({ "content": content }));
        let grep = json!({ "pattern": "e{2}", "literal": true });
        assert_eq!(
            server.result("grep", &grep),
            json!({ "content": "No matches found" })
        );
        let grep = json!({ "pattern": "eedle", "glob": "*.rs", "path": "a" });
        assert_eq!(
            server.result("grep", &grep),
            json!({ "content": "c.rs:1: Needle" })
        );
        let grep = json!({ "pattern": "eedle", "path": "a/c.rs" });
        assert_eq!(
            server.result("grep", &grep),
            json!({ "content": "a/c.rs:1: Needle" })
        );
    }
}

#[test]
fn every_invalid_call_has_its_error_message() {
    for kind in ALL_SOCKET_KINDS {
        let server = Server::start(kind);
        server.write("f", "aXa");
        std::fs::create_dir(server.root().join("d")).unwrap();
        for (tool, body, sentence) in [
            ("bash", json!({}), "Missing or invalid command"),
            (
                "bash",
                json!({ "command": "  " }),
                "Missing or invalid command",
            ),
            (
                "bash",
                json!({ "command": 7 }),
                "Missing or invalid command",
            ),
            (
                "bash",
                json!({ "command": "x", "timeoutSeconds": "1" }),
                "Missing or invalid timeoutSeconds",
            ),
            ("read", json!({}), "Missing or invalid path"),
            ("read", json!({ "path": "" }), "Missing or invalid path"),
            (
                "read",
                json!({ "path": "f", "offset": "1" }),
                "Missing or invalid offset",
            ),
            (
                "read",
                json!({ "path": "f", "offset": 0 }),
                "Offset must be >= 1",
            ),
            (
                "read",
                json!({ "path": "f", "offset": -1 }),
                "Offset must be >= 1",
            ),
            (
                "read",
                json!({ "path": "f", "offset": 7 }),
                "Offset 7 is beyond end of file (1 lines total)",
            ),
            (
                "read",
                json!({ "path": "g" }),
                "No such file or directory: g",
            ),
            ("read", json!({ "path": "d" }), "Path is a directory: d"),
            (
                "write",
                json!({ "path": "x" }),
                "Missing or invalid content",
            ),
            (
                "write",
                json!({ "content": "x" }),
                "Missing or invalid path",
            ),
            (
                "write",
                json!({ "path": "d", "content": "" }),
                "Path is a directory: d",
            ),
            ("edit", json!({ "path": "f" }), "Missing or invalid oldText"),
            (
                "edit",
                json!({ "path": "f", "oldText": "" }),
                "Missing or invalid oldText",
            ),
            (
                "edit",
                json!({ "path": "f", "oldText": "a" }),
                "Missing or invalid newText",
            ),
            (
                "edit",
                json!({ "path": "f", "oldText": "b", "newText": "c" }),
                "Could not find the exact text in f. The old text must match exactly including \
                 all whitespace and newlines.",
            ),
            (
                "edit",
                json!({ "path": "f", "oldText": "a", "newText": "c" }),
                "Found 2 occurrences of the text in f. The text must be unique. Please provide \
                 more context to make it unique.",
            ),
            (
                "edit",
                json!({ "path": "f", "oldText": "X", "newText": "X" }),
                "No changes made to f.",
            ),
            ("ls", json!({ "path": "f" }), "Path is not a directory: f"),
            ("ls", json!({ "path": 1 }), "Missing or invalid path"),
            ("find", json!({}), "Missing or invalid pattern"),
            (
                "find",
                json!({ "pattern": "x", "path": "g" }),
                "No such file or directory: g",
            ),
            ("grep", json!({}), "Missing or invalid pattern"),
            (
                "grep",
                json!({ "pattern": "x", "literal": 1 }),
                "Missing or invalid literal",
            ),
        ] {
            assert_eq!(server.error_message(tool, &body), sentence, "{tool} {body}");
        }
        for tool in ["find", "grep"] {
            let reply = server.error_message(tool, &json!({ "pattern": "[" }));
            assert!(reply.starts_with("Invalid pattern: "), "{reply}");
        }
        assert_eq!(server.read("f"), b"aXa");
    }
}

#[test]
fn malformed_http_requests_are_refused() {
    for kind in ALL_SOCKET_KINDS {
        let server = Server::start(kind);
        let json_type = "Content-Type: application/json\r\n";
        for (method, path, head, body, status, sentence) in [
            ("POST", "/read", json_type, "{", 400, "Invalid JSON body"),
            ("POST", "/read", json_type, "[]", 400, "Invalid JSON body"),
            ("POST", "/read", "", "{}", 400, "Invalid JSON body"),
            (
                "POST",
                "/ls",
                "Content-Type: text/plain\r\n",
                "{}",
                400,
                "Invalid JSON body",
            ),
            ("POST", "/nothing", json_type, "{}", 404, "Not found"),
            ("POST", "/", json_type, "{}", 404, "Not found"),
            ("GET", "/read", "", "", 405, "Method not allowed"),
            ("PUT", "/write", json_type, "{}", 405, "Method not allowed"),
            ("DELETE", "/health", "", "", 405, "Method not allowed"),
        ] {
            let answer = server.address.request(method, path, head, body.as_bytes());
            let reply = answer.json();
            assert_eq!(
                (answer.status, reply),
                (status, json!({ "ok": false, "error": sentence })),
                "{method} {path} {body}"
            );
        }
        // An empty body is an empty object.
        assert_eq!(server.post("ls", b"").status, 200);
        // Only web pages send Origin.
        let head = "Content-Type: application/json\r\nOrigin: http://localhost\r\n";
        assert_eq!(
            server.address.request("POST", "/ls", head, b"{}").status,
            403
        );
        let too_large = "Content-Type: application/json\r\nContent-Length: 99999999999\r\n\r\n";
        assert_eq!(
            server
                .address
                .request("POST", "/write", too_large, b"")
                .status,
            413
        );
    }
}

#[test]
fn truncated_results_are_marked() {
    for kind in ALL_SOCKET_KINDS {
        let server = Server::start(kind);
        let many: String = (1..=2500).map(|n| format!("{n}\n")).collect();
        server.write("many", &many);
        let read = server.result("read", &json!({ "path": "many" }));
        let content: Vec<String> = (1..=2000).map(|n| n.to_string()).collect();
        let content = content.join("\n");
        assert_eq!(
            read,
            json!({
                "type": "text", "content": content, "totalLines": 2501, "hasMore": true,
                "truncation": {
                    "content": content, "truncated": true, "truncatedBy": "lines",
                    "totalLines": 2501, "totalBytes": many.len(), "outputLines": 2000,
                    "outputBytes": content.len(), "lastLinePartial": false,
                    "firstLineExceedsLimit": false, "maxLines": 2000, "maxBytes": 51200
                }
            })
        );
        server.write("long", "x".repeat(60_000));
        let cut = server.result("read", &json!({ "path": "long" }))["truncation"].clone();
        assert_eq!(cut["truncatedBy"], "bytes");
        assert_eq!(cut["firstLineExceedsLimit"], true);
        assert_eq!(
            (&cut["content"], &cut["totalBytes"]),
            (&json!(""), &json!(60_000))
        );

        for n in 0..30 {
            server.write(
                &format!("d/f{n:02}.x"),
                format!("{}needle\n", "y".repeat(600)),
            );
        }
        let ls = server.result("ls", &json!({ "path": "d", "limit": 3 }));
        assert_eq!(ls["output"], "f00.x\nf01.x\nf02.x");
        assert_eq!(ls["truncation"]["totalLines"], 30);
        assert_eq!(ls["truncation"]["truncatedBy"], "lines");
        let find = server.result("find", &json!({ "pattern": "*.x", "limit": 10 }));
        assert_eq!(
            (&find["truncated"], &find["limit"]),
            (&json!(true), &json!(10))
        );
        assert_eq!(find["files"].as_array().unwrap().len(), 10);
        assert_eq!(find["truncation"]["maxLines"], 10);
        let grep = server.result("grep", &json!({ "pattern": "needle", "limit": 2 }));
        let content = grep["content"].as_str().unwrap();
        assert_eq!(content.matches("... [truncated]").count(), 2);
        let note = "\n\n[2 matches limit reached. Use limit=4 for more, or refine pattern. Some \
                    lines truncated to 500 chars. Use read tool to see full lines]";
        assert!(content.ends_with(note), "{content}");
        assert_eq!(
            grep["details"],
            json!({ "matchLimitReached": 2, "linesTruncated": true })
        );
        server.write(
            "big",
            "needle and a rather long line after it\n".repeat(3000),
        );
        let body = json!({ "pattern": "needle and", "limit": 5000 });
        let grep = server.result("grep", &body);
        let cut = &grep["details"]["truncation"];
        assert_eq!(
            (&cut["totalLines"], &cut["truncatedBy"]),
            (&json!(3000), &json!("bytes"))
        );
        assert!(
            grep["content"]
                .as_str()
                .unwrap()
                .ends_with("\n\n[50KB limit reached]")
        );
    }
}

#[test]
fn curl_works_as_a_client() {
    for kind in [SocketKind::Unix, SocketKind::Tcp] {
        let server = Server::start(kind);
        let mut curl = Command::new("curl");
        curl.args(["-sS", "--max-time", "30"]);
        let base = match &server.address {
            ServerAddress::Unix(path) => {
                curl.arg("--unix-socket").arg(path);
                "http://localhost".to_owned()
            }
            ServerAddress::Tcp(address) => format!("http://{address}"),
        };
        // Several requests on one connection.
        let json_type = "content-type: application/json";
        let body = |value: Value| value.to_string();
        let output = curl
            .args(["-H", json_type, "-d"])
            .arg(body(json!({ "path": "a", "content": "hello" })))
            .arg(format!("{base}/write"))
            .args(["--next", "-sS"])
            .args(match &server.address {
                ServerAddress::Unix(path) => {
                    vec!["--unix-socket".into(), path.clone().into_os_string()]
                }
                ServerAddress::Tcp(_) => Vec::new(),
            })
            .args(["-H", json_type, "-d"])
            .arg(body(json!({ "command": "cat a" })))
            .arg(format!("{base}/bash"))
            .output()
            .unwrap();
        let printed = String::from_utf8(output.stdout).unwrap();
        assert_eq!(
            printed,
            "{\"ok\":true,\"result\":{\"ok\":true,\"path\":\"a\",\"bytes\":5}}\
             {\"type\":\"delta\",\"data\":\"hello\",\"stream\":\"stdout\"}\n\
             {\"type\":\"done\",\"exitCode\":0}\n"
        );
    }
}
