//! Compares sandboxes with bubblewrap and Docker, where they are installed, in one run.
//!
//! `just bench-sandboxes`. Prints medians; machines are noisy, so no assertion depends on time.
//! Every repetition has its own directories: removing ten thousand files in between slows ext4
//! down.

#![allow(
    clippy::unwrap_used,
    clippy::print_stdout,
    reason = "a benchmark that cannot continue has failed"
)]

use std::fs;
use std::path::Path;
use std::process::{Command as Process, Stdio};
use std::time::{Duration, Instant};

use policy::id::SandboxId;
use sandbox::contract::{
    Force, GatePorts, SandboxBackend, SandboxCommand, SandboxConfig, SandboxLimits, SandboxStatus,
    SystemConfig,
};
use sandbox::git::checkout_cache::CheckoutCache;
use sandbox::git::host_repository::HostRepository;
use sandbox::git::workspace::WorkspacePlan;
use sandbox::name::Slug;
use sandbox::namespace::Namespace;

const REPETITIONS: usize = 50;
const FILES: usize = 10_000;

fn main() {
    // `cargo bench` passes its own flags, and `cargo test --benches` runs this too.
    if std::env::args().any(|word| word == "--test") {
        return;
    }
    let temp = tempfile::tempdir().unwrap();
    let backend = Namespace::new(
        temp.path().join("sandboxes"),
        env!("CARGO_BIN_EXE_sandbox-init").into(),
        Vec::new(),
    );
    println!("medians of {REPETITIONS}; in one run, on this machine");
    namespace_backend(&backend);
    bubblewrap();
    docker();
    workspaces(&backend, temp.path());
}

fn config(name: &str) -> SandboxConfig {
    SandboxConfig {
        id: SandboxId::parse(name).unwrap(),
        name: Slug::from_name(name).unwrap(),
        environment: Vec::new(),
        ports: GatePorts::default(),
        limits: SandboxLimits::default(),
        system: SystemConfig::default(),
        trust: None,
        setup_command: None,
    }
}

fn namespace_backend(backend: &Namespace) {
    let command = SandboxCommand::new(["/bin/true"]);
    let mut create_and_exec_times = Vec::new();
    let mut exec_times = Vec::new();
    let mut pause_times = Vec::new();
    let mut delete_times = Vec::new();
    let configs: Vec<_> = (0..REPETITIONS)
        .map(|number| config(&format!("bench-{number}")))
        .collect();
    // All sandboxes exist at once: the end of one occupies kernel locks that the next start needs.
    for config in &configs {
        create_and_exec_times.push(time(|| {
            backend.create(config).unwrap();
            assert_eq!(backend.exec(&config.id, &command).unwrap().exit_code, 0);
        }));
    }
    for config in &configs {
        exec_times.push(time(|| {
            backend.exec(&config.id, &command).unwrap();
        }));
    }
    for config in &configs {
        pause_times.push(time(|| backend.pause(&config.id).unwrap()));
        assert_eq!(backend.status(&config.id), SandboxStatus::Paused);
    }
    for config in &configs {
        delete_times.push(time(|| backend.delete(&config.id, Force::Yes).unwrap()));
    }
    print_median("palisade: create and first exec", create_and_exec_times);
    print_median("palisade: exec", exec_times);
    print_median("palisade: pause", pause_times);
    print_median("palisade: delete", delete_times);
}

fn bubblewrap() {
    let run = || {
        let mut bubblewrap = Process::new("bwrap");
        bubblewrap.args(["--ro-bind", "/usr", "/usr", "--symlink", "usr/bin", "/bin"]);
        bubblewrap.args([
            "--symlink",
            "usr/lib",
            "/lib",
            "--symlink",
            "usr/lib64",
            "/lib64",
        ]);
        bubblewrap.args(["--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp"]);
        bubblewrap.args(["--unshare-all", "--die-with-parent", "/bin/true"]);
        run_quietly(&mut bubblewrap)
    };
    if !run() {
        println!("bubblewrap: not installed");
        return;
    }
    let times = (0..REPETITIONS).map(|_| time(|| assert!(run()))).collect();
    print_median("bubblewrap: create, exec and end", times);
}

/// Needs a daemon, and an image `palisade-bench` with busybox in it; `just` makes one.
fn docker() {
    const IMAGE: &str = "palisade-bench";
    let docker = |words: &[&str]| run_quietly(Process::new("docker").args(words));
    let run = ["run", "--rm", "--network", "none", IMAGE, "/bin/true"];
    if !docker(&run) {
        println!("docker run: no daemon, or no image '{IMAGE}'");
        return;
    }
    let times = (0..10).map(|_| time(|| assert!(docker(&run)))).collect();
    print_median("docker run (10 times)", times);
    let name = format!("palisade-bench-{}", std::process::id());
    let sleep = ["/bin/sleep", "1000"];
    let start = [
        "run",
        "-d",
        "--rm",
        "--network",
        "none",
        "--name",
        &name,
        IMAGE,
    ];
    assert!(docker(&[&start[..], &sleep].concat()));
    let exec = ["exec", name.as_str(), "/bin/true"];
    let times = (0..10).map(|_| time(|| assert!(docker(&exec)))).collect();
    print_median("docker exec (10 times)", times);
    assert!(docker(&["kill", &name]));
}

fn workspaces(backend: &Namespace, temp: &Path) {
    let repository = temp.join("repository");
    make_repository(&repository);
    let host_repository = HostRepository::discover(&repository).unwrap();
    let commit = host_repository.head().unwrap().commit;
    let plan = WorkspacePlan {
        commit,
        depth: None,
        dirty: false,
    };
    println!("a repository of {FILES} files:");
    let state = temp.join("state");
    let checkouts = CheckoutCache::open(&state, u64::MAX).unwrap();
    let first = time(|| drop(checkouts.get(&host_repository, commit).unwrap()));
    let linked = temp.join("linked").display().to_string();
    let worktree = time(|| git(&repository, &["worktree", "add", "--detach", &linked]));
    print_median("palisade: first checkout of a commit", vec![first]);
    print_median("git worktree add", vec![worktree]);

    let mut copied_times = Vec::new();
    let mut spare_times = Vec::new();
    let mut copies = Vec::new();
    let command = SandboxCommand::new(["/bin/true"]);
    for number in 0..5 {
        for prepared in [false, true] {
            if prepared {
                let owner = backend.free_owner(&checkouts.spare_owners());
                checkouts
                    .prepare_spare(&host_repository, &plan, owner)
                    .unwrap();
            }
            let config = config(&format!("files-{number}-{prepared}"));
            let took = time(|| {
                backend
                    .create_for(&config, checkouts.spare_owner(&plan))
                    .unwrap();
                let to = backend.workspace(&config.id);
                let owner = backend.owner(&config.id).unwrap();
                checkouts
                    .create_workspace(&host_repository, &plan, &config.name, &to, owner)
                    .unwrap();
                backend.exec(&config.id, &command).unwrap();
            });
            if prepared {
                &mut spare_times
            } else {
                &mut copied_times
            }
            .push(took);
        }
        let copy = temp.join(format!("copy-{number}"));
        copies.push(time(|| {
            copy_with_two_processes(&repository.join("src"), &copy);
        }));
    }
    print_median(
        "palisade: create, workspace and first exec, copied",
        copied_times,
    );
    print_median(
        "palisade: create, workspace and first exec, with a spare",
        spare_times,
    );
    print_median("cp -a of the files, in two halves at once", copies);
    for entry in fs::read_dir(temp.join("sandboxes")).unwrap().flatten() {
        if let Some(Ok(id)) = entry.file_name().to_str().map(SandboxId::parse) {
            backend.delete(&id, Force::Yes).unwrap();
        }
    }
}

fn make_repository(at: &Path) {
    for directory in 0..100 {
        let directory = at.join(format!("src/{directory:02}"));
        fs::create_dir_all(&directory).unwrap();
        for file in 0..FILES / 100 {
            let text = format!(
                "{}\n",
                "a line of code that stands for others".repeat(file % 100)
            );
            fs::write(directory.join(format!("{file:03}.txt")), text).unwrap();
        }
    }
    git(at, &["init", "-q", "-b", "main"]);
    git(at, &["add", "-A"]);
    git(at, &["commit", "-q", "-m", "files"]);
}

fn git(at: &Path, words: &[&str]) {
    let identity = ["-c", "user.name=bench", "-c", "user.email=bench@localhost"];
    let mut git = Process::new("git");
    git.args(identity).args(words).current_dir(at);
    assert!(run_quietly(&mut git), "git {words:?}");
}

/// Copies with two processes at a time, for comparison with a parallel copy.
fn copy_with_two_processes(from: &Path, to: &Path) {
    fs::create_dir(to).unwrap();
    let halves = ["[0-4]*", "[5-9]*"].map(|half| {
        let line = format!("cp -a {}/{half} {}", from.display(), to.display());
        Process::new("sh").args(["-c", &line]).spawn().unwrap()
    });
    for mut half in halves {
        assert!(half.wait().unwrap().success());
    }
}

fn run_quietly(process: &mut Process) -> bool {
    process
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status()
        .is_ok_and(|status| status.success())
}

fn time(work: impl FnOnce()) -> Duration {
    let start = Instant::now();
    work();
    start.elapsed()
}

fn print_median(what: &str, mut times: Vec<Duration>) {
    times.sort();
    let median = times.get(times.len() / 2).copied().unwrap_or_default();
    let best = times.first().copied().unwrap_or_default();
    println!(
        "{:>9.2} ms  (best {:.2})  {what}",
        median.as_secs_f64() * 1000.0,
        best.as_secs_f64() * 1000.0
    );
}
