//! Many sandboxes at once. `just crowd` creates two hundred.

use std::time::Instant;

use testkit::output;

use crate::sandbox_fixture::{SandboxFixture, describe};

for_every_operator!(many_sandboxes_run_at_once_and_are_deleted);

/// Default number of sandboxes.
const DEFAULT_COUNT: usize = 20;

/// Number of sandboxes that are created and used at the same time.
const MAX_CONCURRENT: usize = 8;

/// Memory limit of an idle sandbox, in kilobytes.
const MAX_IDLE_KB: u64 = 6 << 10;

fn many_sandboxes_run_at_once_and_are_deleted(fixture: &SandboxFixture) {
    let count = std::env::var("PALISADE_CROWD")
        .ok()
        .and_then(|n| n.parse().ok())
        .unwrap_or(DEFAULT_COUNT);
    let names: Vec<String> = (0..count).map(|n| format!("crowd-{n}")).collect();
    fixture.ok(&["gate", "start"]);
    let all = |what: &str, work: &(dyn Fn(&str) + Sync)| {
        let started = Instant::now();
        let (names, turn) = (&names, &std::sync::atomic::AtomicUsize::new(0));
        std::thread::scope(|scope| {
            for _ in 0..MAX_CONCURRENT {
                scope.spawn(move || {
                    let next = || turn.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
                    while let Some(name) = names.get(next()) {
                        work(name);
                    }
                });
            }
        });
        println!("{what}: {count} in {:?}", started.elapsed());
    };
    all("create", &|name| {
        let output = fixture.run(&["create", name]);
        assert!(output.status.success(), "{name}: {}", describe(&output));
    });
    all("exec", &|name| {
        let output = fixture.bash(name, "cat README.md; hostname; git branch --show-current");
        let expected = format!("palisade/{name}");
        assert!(
            output::stdout(&output).starts_with("hello\n"),
            "{name}: {}",
            describe(&output)
        );
        assert_eq!(
            output::stdout(&output).lines().last(),
            Some(expected.as_str()),
            "{}",
            describe(&output)
        );
    });
    let list = fixture.json(&["list"]);
    let rows = list.as_array().unwrap();
    assert_eq!(rows.len(), count);
    let (mut own, mut resident) = (Vec::new(), Vec::new());
    for row in rows {
        assert_eq!(row["status"], "active", "{row}");
        let init = fixture.init(row["id"].as_str().unwrap());
        own.push(memory(init, "RssAnon:"));
        resident.push(memory(init, "VmRSS:"));
    }
    own.sort_unstable();
    resident.sort_unstable();
    let (median, most) = (own[count / 2], own[count - 1]);
    println!(
        "anonymous memory of an idle sandbox's init: median {median} kB, maximum {most} kB; \
         resident memory, including the shared pages of the program: median {} kB, maximum {} kB",
        resident[count / 2],
        resident[count - 1]
    );
    all("delete", &|name| {
        let output = fixture.run(&["delete", "--force", name]);
        assert!(output.status.success(), "{name}: {}", describe(&output));
    });
    fixture.assert_nothing_left();
    assert!(median < MAX_IDLE_KB, "an idle sandbox takes {median} kB");
}

/// Reads a line of a process's status, in kilobytes.
fn memory(pid: i32, name: &str) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status.lines().find(|line| line.starts_with(name)).unwrap();
    line.split_whitespace().nth(1).unwrap().parse().unwrap()
}
