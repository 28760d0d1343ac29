//! find and grep: ignored files, order, and cancellation.

use serde_json::{Value, json};

use crate::server::{Server, SocketKind};

fn files(server: &Server, body: &Value) -> Vec<String> {
    let found = server.result("find", body);
    let files = found["files"].as_array().unwrap().iter();
    files
        .map(|file| file.as_str().unwrap().to_owned())
        .collect()
}

fn project() -> Server {
    let server = Server::start(SocketKind::Unix);
    for (path, content) in [
        (".gitignore", "target/\n*.log\n!keep.log\n/only-here\n"),
        (".git/config", "needle\n"),
        (".git/info/exclude", "private\n"),
        (".github/ci.yml", "needle\n"),
        ("only-here", "needle\n"),
        ("private", "needle\n"),
        ("keep.log", "needle\n"),
        ("drop.log", "needle\n"),
        ("src/main.rs", "fn main() {}\n// needle\n"),
        ("src/only-here", "needle\n"),
        ("src/deep/.gitignore", "!special.log\nmod.rs\n"),
        ("src/deep/special.log", "needle\n"),
        ("src/deep/mod.rs", "needle\n"),
        ("src/deep/lib.rs", "needle\n"),
        ("target/out.rs", "needle\n"),
        ("vendor/.git/HEAD", "x"),
        ("vendor/a.log", "needle\n"),
    ] {
        server.write(path, content);
    }
    server.write("binary", b"needle\0needle\n");
    server
}

#[test]
fn ignored_files_are_skipped_and_hidden_files_are_not() {
    let server = project();
    let seen = [
        ".github/ci.yml",
        ".gitignore",
        "binary",
        "keep.log",
        "src/deep/.gitignore",
        "src/deep/lib.rs",
        "src/deep/special.log",
        "src/main.rs",
        "src/only-here",
        "vendor/a.log",
    ];
    assert_eq!(files(&server, &json!({ "pattern": "*" })), seen);
    // The rules of parent directories apply.
    assert_eq!(
        files(&server, &json!({ "pattern": "*", "path": "src/deep" })),
        [".gitignore", "lib.rs", "special.log"]
    );
    let grep = server.result("grep", &json!({ "pattern": "needle" }));
    assert_eq!(
        grep["content"],
        ".github/ci.yml:1: needle\nkeep.log:1: needle\nsrc/deep/lib.rs:1: needle\n\
         src/deep/special.log:1: needle\nsrc/main.rs:2: // needle\nsrc/only-here:1: needle\n\
         vendor/a.log:1: needle"
    );
}

#[test]
fn glob_matches_the_name_or_the_path() {
    let server = project();
    for (pattern, found) in [
        ("*.rs", vec!["src/deep/lib.rs", "src/main.rs"]),
        ("src/*.rs", vec!["src/main.rs"]),
        ("src/**/*.rs", vec!["src/deep/lib.rs", "src/main.rs"]),
        ("**/lib.rs", vec!["src/deep/lib.rs"]),
        ("./src/{main,lib}.rs", vec!["src/main.rs"]),
        ("ma?n.rs", vec!["src/main.rs"]),
        ("src", vec![]),
    ] {
        assert_eq!(
            files(&server, &json!({ "pattern": pattern })),
            found,
            "{pattern}"
        );
    }
    let grep = |glob: &str| {
        let grep = server.result("grep", &json!({ "pattern": "needle", "glob": glob }));
        grep["content"].as_str().unwrap().to_owned()
    };
    assert_eq!(grep("*.yml"), ".github/ci.yml:1: needle");
    assert_eq!(grep("src/*.rs"), "src/main.rs:2: // needle");
    // A glob of the request takes precedence over .gitignore.
    assert_eq!(grep("drop.log"), "drop.log:1: needle");
    assert!(!grep("!*.rs").contains(".rs"));
}

#[test]
fn search_results_have_a_stable_order() {
    let server = Server::start(SocketKind::Unix);
    for n in 0..300 {
        server.write(&format!("d{}/f{n}", n % 17), "needle\n");
    }
    let all = json!({ "pattern": "*" });
    let first = files(&server, &all);
    assert_eq!(first.len(), 300);
    assert!(first.is_sorted());
    let grep = json!({ "pattern": "needle", "limit": 1000 });
    let found = server.result("grep", &grep);
    for _ in 0..5 {
        assert_eq!(files(&server, &all), first);
        assert_eq!(server.result("grep", &grep), found);
    }
}

#[test]
fn search_limit_is_exact() {
    let server = Server::start(SocketKind::Unix);
    for n in 0..50 {
        server.write(&format!("f{n:02}"), "needle\n".repeat(50));
    }
    for limit in [1, 7, 49, 50] {
        let found = server.result("find", &json!({ "pattern": "f*", "limit": limit }));
        assert_eq!(found["files"].as_array().unwrap().len(), limit);
        assert_eq!(found["truncated"], limit < 50);
        let grep = server.result("grep", &json!({ "pattern": "needle", "limit": limit }));
        let content = grep["content"].as_str().unwrap();
        assert_eq!(content.matches(": needle").count(), limit);
        assert_eq!(grep["details"]["matchLimitReached"], limit);
    }
}

#[test]
fn unreadable_directory_is_skipped() {
    let server = project();
    // Directories nested almost to the maximum path length, and a file with one very long line.
    let mut deep = server.root();
    for _ in 0..20 {
        deep.push("d".repeat(100));
        std::fs::create_dir(&deep).unwrap();
    }
    server.write("long", format!("{}needle\n", "x".repeat(20 << 20)));
    let found = server.result("grep", &json!({ "pattern": "needle", "path": "src" }));
    assert!(found["content"].as_str().unwrap().contains("main.rs:2"));
    server.result("grep", &json!({ "pattern": "needle" }));
}
