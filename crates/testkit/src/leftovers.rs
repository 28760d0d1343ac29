//! Detects resources that sandboxes left behind, and cleans up after tests that end early.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Stdio;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;

use crate::gate::GateDir;
use crate::repo::TestRepo;

/// Describes every resource that sandboxes of the gate directory left behind. The gate must have
/// been stopped, because its process counts as a leftover.
pub fn find(gate_dir: &GateDir, repos: &[&TestRepo]) -> Vec<String> {
    let mut left = Vec::new();
    for repo in repos {
        let branches = repo.sandbox_branches().into_iter();
        left.extend(branches.map(|branch| format!("branch {branch}")));
    }
    for directory in ["sandboxes", "rows"] {
        let entries = names_in(&gate_dir.state().join(directory)).into_iter();
        let entries = entries.filter(|name| name != ".lock");
        left.extend(entries.map(|name| format!("{directory}/{name}")));
    }
    left.extend(mounts(gate_dir).map(|line| format!("mount {line}")));
    left.extend(processes(gate_dir).map(|pid| format!("process {pid}: {}", title(pid))));
    left
}

/// Mounts of the host whose entry contains the path of the gate directory.
fn mounts(gate_dir: &GateDir) -> impl Iterator<Item = String> {
    let name = gate_dir.path().to_string_lossy().into_owned();
    let table = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    let lines: Vec<String> = table.lines().map(ToOwned::to_owned).collect();
    lines.into_iter().filter(move |line| line.contains(&name))
}

/// Processes whose arguments, environment, descriptors or mounts contain the path of the gate
/// directory. The mounts identify processes inside a sandbox.
pub fn processes(gate_dir: &GateDir) -> impl Iterator<Item = i32> {
    let name = gate_dir.path().to_string_lossy().into_owned();
    let pids: Vec<i32> = names_in(Path::new("/proc"))
        .iter()
        .filter_map(|name| name.parse().ok())
        .collect();
    let own = i32::try_from(std::process::id()).unwrap_or_default();
    pids.into_iter().filter(move |pid| {
        let proc = PathBuf::from(format!("/proc/{pid}"));
        let file_contains_path = |file: &str| {
            fs::read(proc.join(file))
                .is_ok_and(|bytes| String::from_utf8_lossy(&bytes).contains(&name))
        };
        let has_descriptor = || {
            let links = names_in(&proc.join("fd")).into_iter();
            let mut links = links.map(|fd| fs::read_link(proc.join("fd").join(fd)));
            links.any(|link| link.is_ok_and(|to| to.to_string_lossy().contains(&name)))
        };
        *pid != own
            && (file_contains_path("cmdline")
                || file_contains_path("environ")
                || file_contains_path("mountinfo")
                || has_descriptor())
    })
}

fn title(pid: i32) -> String {
    let command_line = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    String::from_utf8_lossy(&command_line).replace('\0', " ")
}

fn names_in(directory: &Path) -> Vec<String> {
    let entries = fs::read_dir(directory).into_iter().flatten().flatten();
    entries
        .map(|entry| entry.file_name().to_string_lossy().into_owned())
        .collect()
}

/// Ends the sandboxes and the background gate of a gate directory: sandboxes outlive their gate,
/// and a background gate outlives the test. The commands end them; remaining processes are killed.
pub(crate) fn clear(gate_dir: &GateDir) {
    let sandboxes = gate_dir.state().join("sandboxes");
    let is_id = |name: &String| name != ".lock";
    if names_in(&sandboxes).iter().any(is_id) {
        for id in names_in(&gate_dir.state().join("rows")) {
            if let Some(id) = id.strip_suffix(".json") {
                run_ignoring_errors(gate_dir, &["delete", "--force", id]);
            }
        }
    }
    if gate_dir.control().exists() || gate_dir.watchdog().is_some() {
        run_ignoring_errors(gate_dir, &["gate", "stop", "--force"]);
    }
    for id in names_in(&sandboxes).into_iter().filter(is_id) {
        let record = fs::read(sandboxes.join(id).join("record.json")).unwrap_or_default();
        let record: Value = serde_json::from_slice(&record).unwrap_or(Value::Null);
        kill_recorded(record.get("init").unwrap_or(&Value::Null));
    }
}

fn run_ignoring_errors(gate_dir: &GateDir, args: &[&str]) {
    let mut command = gate_dir.palisade(args);
    command.stdout(Stdio::null()).stderr(Stdio::null());
    let _ = command.current_dir("/").status();
}

/// Kills the recorded process, if its id was not reused.
fn kill_recorded(process: &Value) {
    let number = |name: &str| process.get(name).and_then(Value::as_u64);
    let (Some(pid), Some(started)) = (number("pid"), number("started")) else {
        return;
    };
    if let Ok(pid) = i32::try_from(pid)
        && start_time(pid) == Some(started)
    {
        let _ = kill(Pid::from_raw(pid), Signal::SIGKILL);
    }
}

/// The start time of a process in clock ticks since boot (proc_pid_stat(5), field 22).
pub fn start_time(pid: i32) -> Option<u64> {
    let line = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The command name in parentheses may contain any character.
    let (_, rest) = line.rsplit_once(')')?;
    rest.split_whitespace().nth(19)?.parse().ok()
}
