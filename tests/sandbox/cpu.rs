//! A sandbox's share of processor time. `just measure-cpu` measures the effect of a busy sandbox
//! on others.
//!
//! Regression test for issue 14, item 3.

use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;
use testkit::operator::Operator;
use testkit::{output, wait};

use crate::sandbox_fixture::{SandboxFixture, describe};

for_every_operator!(
    agent_cannot_raise_the_cpu_share_of_its_sandbox,
    cpu_limit_is_enforced_or_refused,
);

for_subid_user!(agent_cannot_raise_the_cpu_share_of_its_sandbox);

/// The sandbox's cgroup of the cpu controller, if it has one.
fn cpu_cgroup(fixture: &SandboxFixture, id: &str) -> Option<PathBuf> {
    let record = fixture.gate_dir.state().join("sandboxes").join(id);
    let record = std::fs::read(record.join("record.json")).unwrap();
    let record: Value = serde_json::from_slice(&record).unwrap();
    let cgroups = record["cgroups"].as_array().unwrap().iter();
    let mut cgroups = cgroups.map(|one| PathBuf::from(one.as_str().unwrap()));
    cgroups.find(|one| one.join("cpu.shares").exists() || one.join("cpu.weight").exists())
}

/// Whether this machine has cgroups of the cpu controller that root can use.
fn root_has_cpu_cgroups() -> bool {
    ["cpu", "cpu,cpuacct"]
        .iter()
        .any(|name| PathBuf::from("/sys/fs/cgroup").join(name).exists())
}

/// The process on the host that a sandbox sees as `sleep SECONDS`.
fn sleeper(seconds: &str) -> i32 {
    wait::until("the sleeper", || {
        let command_line = format!("sleep\0{seconds}\0");
        let pids = std::fs::read_dir("/proc").unwrap().flatten();
        let mut pids = pids.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
        pids.find(|pid: &i32| {
            std::fs::read(format!("/proc/{pid}/cmdline"))
                .is_ok_and(|found| found == command_line.as_bytes())
        })
    })
}

/// Reads a file of `/proc` for a process.
fn read(pid: i32, file: &str) -> String {
    std::fs::read_to_string(format!("/proc/{pid}/{file}")).unwrap()
}

/// Returns a process's scheduling policy.
fn policy(pid: i32) -> String {
    let stat = read(pid, "stat");
    let (_, fields) = stat.rsplit_once(')').unwrap();
    fields.split_whitespace().nth(38).unwrap().to_owned()
}

fn agent_cannot_raise_the_cpu_share_of_its_sandbox(fixture: &SandboxFixture) {
    const IDLE: &str = "5";
    let id = fixture.create("fix");
    // No other test uses these durations.
    let [own, made, left] = ["7", "8", "9"].map(|n| format!("{n}{}", std::process::id()));
    let line = format!(
        "(sleep {own} & setsid sleep {made} & setsid sh -c 'sleep {left} & exit' &) \
         </dev/null >/dev/null 2>&1; \
         for try in 'chrt --other -p 0 $$' 'chrt --batch -p 0 $$' 'renice -n -5 -p $$' \
         'echo -5 > /proc/self/autogroup'; do \
         if bash -c \"$try\" 2>/dev/null; then echo \"done: $try\"; fi; done"
    );
    assert_eq!(fixture.stdout_of("fix", &line), "");
    let [own, made, left] = [own, made, left].map(|seconds| sleeper(&seconds));
    let cgroup = cpu_cgroup(fixture, &id);
    if fixture.gate_dir.operator() == Operator::CurrentUser && root_has_cpu_cgroups() {
        assert!(cgroup.is_some());
    }
    let Some(cgroup) = cgroup else {
        for pid in [own, made, left] {
            assert_eq!(policy(pid), IDLE);
        }
        let enabled = std::fs::read_to_string("/proc/sys/kernel/sched_autogroup_enabled");
        if enabled.is_ok_and(|text| text.trim() == "1") {
            // A session that the agent created permanently has the lowest share.
            let shares = || read(made, "autogroup") + &read(left, "autogroup");
            let least = || shares().matches("nice 19").count() == 2;
            wait::until("the least share", || least().then_some(()));
            assert!(!read(own, "autogroup").contains("nice -"));
            let raise = "for p in /proc/[0-9]*; do echo 0 > $p/autogroup; done 2>/dev/null; true";
            fixture.stdout_of("fix", &format!("setsid bash -c '{raise}'; {raise}"));
            assert!(least(), "{}", shares());
        }
        return;
    };
    let members = std::fs::read_to_string(cgroup.join("cgroup.procs")).unwrap();
    for pid in [own, made, left, fixture.init(&id)] {
        assert!(members.lines().any(|line| line == pid.to_string()));
    }
    let weight = ["cpu.shares", "cpu.weight"]
        .map(|file| std::fs::read_to_string(cgroup.join(file)).unwrap_or_default());
    assert!(
        weight.iter().any(|one| ["512", "50"].contains(&one.trim())),
        "{weight:?}"
    );
    fixture.ok(&["delete", "--force", "fix"]);
    assert!(!cgroup.exists());
}

fn cpu_limit_is_enforced_or_refused(fixture: &SandboxFixture) {
    fixture
        .gate_dir
        .write_config("version: \"1.0\"\nsandbox: { limits: { cpus: 0.1 } }\n");
    let output = fixture.run(&["create", "fix", "--json"]);
    if fixture.gate_dir.operator() == Operator::Unprivileged {
        assert!(!output.status.success(), "{}", describe(&output));
        let complaint = output::stderr(&output);
        let why = "sandbox.limits.cpus: a limit of 0.1 cannot be enforced: no writable cgroup has the cpu";
        assert!(complaint.contains(why), "{complaint}");
        fixture.assert_nothing_left();
        return;
    }
    if !root_has_cpu_cgroups() && !output.status.success() {
        return;
    }
    assert!(output.status.success(), "{}", describe(&output));
    let made: Value = serde_json::from_slice(&output.stdout).unwrap();
    let cgroup = cpu_cgroup(fixture, made["id"].as_str().unwrap()).unwrap();
    let mut spinner = fixture
        .palisade(&["exec", "fix", "--", "sh", "-c", "while :; do :; done"])
        .spawn()
        .unwrap();
    wait::until("throttling", || {
        let stat = std::fs::read_to_string(cgroup.join("cpu.stat")).unwrap();
        let mut lines = stat.lines();
        let count = lines.find_map(|line| line.strip_prefix("nr_throttled "))?;
        (count != "0").then_some(())
    });
    fixture.ok(&["delete", "--force", "fix"]);
    spinner.wait().unwrap();
}

/// Number of spinners and repetitions: few, unless a benchmark sets them.
fn size() -> (usize, usize) {
    let setting = std::env::var("PALISADE_SPINNERS");
    setting.map_or((2, 3), |text| (text.parse().unwrap(), 200))
}

/// Time limit of one measurement.
const MAX_DURATION: Duration = Duration::from_secs(20);

/// Time limit for the start of the spinners.
const START_TIMEOUT: Duration = Duration::from_secs(45);

/// The command of a spinner, with a word to find it.
const SPIN: &str = "while :; do :; done # spinner";

/// Returns the median and the ninth decile of the duration of `work`.
fn times(count: usize, mut work: impl FnMut()) -> (Duration, Duration) {
    let begun = Instant::now();
    let mut all = Vec::new();
    while all.len() < count && (all.len() < 3 || begun.elapsed() < MAX_DURATION) {
        let now = Instant::now();
        work();
        all.push(now.elapsed());
    }
    all.sort_unstable();
    (all[all.len() / 2], all[all.len() * 9 / 10])
}

/// Counts the spinners that run or are runnable.
fn running() -> usize {
    let pids = std::fs::read_dir("/proc").unwrap().flatten();
    let pids = pids.filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok());
    pids.filter(|pid| {
        let read = |file: &str| std::fs::read_to_string(format!("/proc/{pid}/{file}"));
        let spins = |words: String| words.starts_with("sh\0-c\0") && words.contains(SPIN);
        let runs = |stat: String| {
            let fields = stat.rsplit_once(')');
            fields.is_some_and(|(_, rest)| rest.starts_with(" R"))
        };
        read("cmdline").is_ok_and(spins) && read("stat").is_ok_and(runs)
    })
    .count()
}

#[test]
fn spinning_sandbox_effect_on_others_is_measured() {
    let (spinners, count) = size();
    let binary = std::env::var("PALISADE_BINARY");
    let binary = binary.as_deref().unwrap_or(env!("CARGO_BIN_EXE_palisade"));
    eprintln!("{binary}");
    for operator in [Operator::CurrentUser, Operator::Unprivileged] {
        if operator == Operator::Unprivileged
            && !testkit::require_root("being an unprivileged user")
        {
            return;
        }
        let fixture = SandboxFixture::of(operator, binary);
        fixture.create("busy");
        fixture.create("other");
        let measure = || {
            let host = times(count, || {
                let status = Command::new("/bin/true").status().unwrap();
                assert!(status.success());
            });
            let inside = times(count, || {
                let output = fixture.run(&["exec", "other", "--", "/bin/true"]);
                assert!(output.status.success(), "{}", describe(&output));
            });
            [("/bin/true on the host", host), ("exec in another", inside)]
        };
        let idle = measure();
        // Each spinner starts in a session of its own. If `setsid` is refused, the spinner runs in
        // the session of the command.
        let line = format!(
            "spin='{SPIN}'; for n in $(seq {spinners}); do \
             (setsid sh -c \"$spin\" || exec sh -c \"$spin\") </dev/null >/dev/null 2>&1 & done; \
             wait"
        );
        let mut busy = fixture
            .palisade(&["exec", "busy", "--", "bash", "-c", &line])
            .stdin(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let begun = Instant::now();
        let spin = wait::until("spinners", || {
            let spin = running();
            (spin >= spinners || begun.elapsed() > START_TIMEOUT).then_some(spin)
        });
        let loaded = measure();
        eprintln!("{operator:?}: {spin} of {spinners} spinners run");
        for ((what, idle), (_, loaded)) in idle.into_iter().zip(loaded) {
            let ratio =
                |idle: Duration, loaded: Duration| loaded.as_secs_f64() / idle.as_secs_f64();
            eprintln!(
                "  {what}: idle {:.2?} (p90 {:.2?}), loaded {:.2?} (p90 {:.2?}): {:.1} times \
                 (p90 {:.1})",
                idle.0,
                idle.1,
                loaded.0,
                loaded.1,
                ratio(idle.0, loaded.0),
                ratio(idle.1, loaded.1)
            );
        }
        fixture.ok(&["delete", "--force", "busy"]);
        busy.wait().unwrap();
    }
}
