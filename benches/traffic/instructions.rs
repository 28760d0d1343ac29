//! Instructions and allocations of the gate per request, counted by callgrind: a figure that does
//! not depend on other load of the machine.

use std::collections::HashMap;
use std::fs;
use std::path::Path;
use std::process::Command;

use crate::load::Route;
use crate::processes::{ChildProcess, Gate};

/// Number of requests before the count starts, which fill connections, caches and pools.
const WARMUP_REQUESTS: usize = 200;

/// Number of requests that are counted.
const COUNTED_REQUESTS: usize = 4000;

/// Number of connections, which are used in turn.
const CONNECTIONS: usize = 4;

/// The cost of one request.
pub struct Cost {
    /// Instructions in user space.
    pub instructions: f64,
    /// Calls to the allocator.
    pub allocations: f64,
}

/// The command that runs the gate under callgrind, with its files in `dir`.
pub fn wrapper(dir: &Path) -> Vec<String> {
    let out = format!("--callgrind-out-file={}/callgrind.out", dir.display());
    [
        "valgrind",
        "--quiet",
        "--tool=callgrind",
        "--instr-atstart=no",
    ]
    .map(str::to_owned)
    .into_iter()
    .chain([out])
    .collect()
}

/// Counts the cost of a request on persistent connections.
pub async fn count(gate: &Gate, route: &Route, dir: &Path) -> Cost {
    let mut connections = Vec::new();
    for _ in 0..CONNECTIONS {
        connections.push(route.open().await);
    }
    for turn in 0..WARMUP_REQUESTS {
        connections[turn % CONNECTIONS].get("/small").await;
    }
    control(&gate.process, &["--instr=on"]);
    for turn in 0..COUNTED_REQUESTS {
        connections[turn % CONNECTIONS].get("/small").await;
    }
    control(&gate.process, &["--instr=off"]);
    control(&gate.process, &["--dump"]);
    let profile = fs::read_to_string(dir.join("callgrind.out.1")).unwrap();
    let requests = f64::from(u32::try_from(COUNTED_REQUESTS).unwrap());
    Cost {
        instructions: total_instructions(&profile) / requests,
        allocations: allocations(&profile) / requests,
    }
}

fn control(process: &ChildProcess, arguments: &[&str]) {
    let mut command = Command::new("callgrind_control");
    let output = command.args(arguments).arg(process.id().to_string());
    let output = output.output().unwrap();
    assert!(output.status.success(), "callgrind_control {arguments:?}");
}

/// The total number of instructions in a profile.
fn total_instructions(profile: &str) -> f64 {
    let mut lines = profile.lines();
    let line = lines.find_map(|line| {
        let total = line.strip_prefix("totals: ");
        total.or_else(|| line.strip_prefix("summary: "))
    });
    line.unwrap().trim().parse().unwrap()
}

/// The number of calls to the allocator from other functions. Callgrind names a function once, and
/// uses its number afterwards.
fn allocations(profile: &str) -> f64 {
    let mut names: HashMap<&str, &str> = HashMap::new();
    let (mut caller, mut callee, mut calls) = ("", "", 0.0);
    for line in profile.lines() {
        if let Some(called) = line.strip_prefix("calls=") {
            let count = called.split(' ').next().unwrap();
            let is_own = names.get(caller).is_some_and(|name| is_allocator(name));
            if !is_own && names.get(callee).is_some_and(|name| allocates(name)) {
                calls += count.parse::<f64>().unwrap();
            }
            continue;
        }
        let (current, text) = if let Some(text) = line.strip_prefix("fn=") {
            (&mut caller, text)
        } else if let Some(text) = line.strip_prefix("cfn=") {
            (&mut callee, text)
        } else {
            continue;
        };
        let (number, name) = text.split_once(' ').unwrap_or((text, ""));
        if !name.is_empty() {
            names.insert(number, name);
        }
        *current = number;
    }
    calls
}

fn is_allocator(name: &str) -> bool {
    name.starts_with("mi_") || name.starts_with("_mi_")
}

fn allocates(name: &str) -> bool {
    let kinds = [
        "mi_malloc",
        "mi_zalloc",
        "mi_calloc",
        "mi_realloc",
        "mi_heap_malloc",
    ];
    kinds.iter().any(|kind| name.starts_with(kind))
}
