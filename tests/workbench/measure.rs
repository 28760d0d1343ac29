//! find and grep compared with ripgrep (`just bench-workbench`), on a tree whose number of files is
//! set by PALISADE_FILES.

use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::json;

use crate::server::{Server, SocketKind};

/// Number of rounds, of which the median is reported.
const ROUNDS: usize = 7;

fn files() -> usize {
    std::env::var("PALISADE_FILES").map_or(1000, |text| text.parse().unwrap())
}

/// Files of about forty lines, a hundred in a directory; one in a hundred contains the word.
fn make_tree(root: &Path, count: usize) {
    std::fs::write(root.join(".gitignore"), "ignored/\n").unwrap();
    std::fs::create_dir(root.join(".git")).unwrap();
    for number in 0..count {
        let directory = root.join(format!("d{:02}/e{}", number / 5000, number / 100));
        if number % 100 == 0 {
            std::fs::create_dir_all(&directory).unwrap();
        }
        let mut text =
            format!("// file {number}\nfn main() {{ let value = {number}; }}\n").repeat(20);
        if number % 100 == 7 {
            text.push_str("// needle\n");
        }
        let name = format!("f{number}.{}", if number % 2 == 0 { "rs" } else { "txt" });
        std::fs::write(directory.join(name), text).unwrap();
    }
}

fn median(mut work: impl FnMut()) -> Duration {
    let mut times: Vec<Duration> = (0..ROUNDS)
        .map(|_| {
            let started = Instant::now();
            work();
            started.elapsed()
        })
        .collect();
    times.sort_unstable();
    times[ROUNDS / 2]
}

fn rg(root: &Path, arguments: &[&str]) -> Option<Duration> {
    let run = || {
        Command::new("rg")
            .args(arguments)
            .current_dir(root)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .status()
    };
    run().ok()?;
    Some(median(|| {
        run().unwrap();
    }))
}

#[test]
fn find_and_grep_compared_with_ripgrep_are_measured() {
    let server = Server::start(SocketKind::Unix);
    let (root, count) = (server.root(), files());
    make_tree(&root, count);
    let find = json!({ "pattern": "*.rs", "limit": 100_000 });
    let grep = json!({ "pattern": "needle", "limit": 100_000 });
    // The results are checked before anything is timed.
    let found = server.result("grep", &grep);
    let total = found["details"]["truncation"]["totalLines"].as_u64();
    let lines = found["content"].as_str().unwrap().lines().count() as u64;
    assert_eq!(total.unwrap_or(lines), count as u64 / 100);
    for (what, tool, body, args) in [
        (
            "find",
            "find",
            find,
            &["--files", "--hidden", "-g", "*.rs"][..],
        ),
        ("grep", "grep", grep, &["--hidden", "-n", "needle", "."][..]),
    ] {
        let ours = median(|| {
            server.result(tool, &body);
        });
        let ripgrep = rg(&root, args);
        let ratio = ripgrep.map(|theirs| ours.as_secs_f64() / theirs.as_secs_f64());
        println!("{what}, {count} files: {ours:?}, rg {ripgrep:?}, ratio {ratio:?}");
    }
    let first = json!({ "pattern": "needle", "limit": 1 });
    let time = median(|| {
        server.result("grep", &first);
    });
    println!("grep with a limit of 1: {time:?}");
}
