//! `palisade doctor`: what this machine allows, with the exact fix for what is missing.

use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::Result;
use clap::{Args, ValueEnum};
use nix::sched::{CloneFlags, unshare};
use serde::Serialize;

use crate::cli::Global;
use crate::exit::Exit;
use crate::output;
use crate::paths::Paths;

#[derive(Debug, Args)]
pub struct DoctorArgs {
    /// Exit 1 also for warnings
    #[arg(long)]
    strict: bool,
}

/// What is tried in a process of its own, because trying it changes the process.
#[derive(Clone, Copy, Debug, ValueEnum)]
pub enum Probe {
    /// A user namespace with a network namespace in it.
    Userns,
}

/// One finding.
#[derive(Debug, Serialize)]
struct Finding {
    name: &'static str,
    state: State,
    found: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    fix: Option<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
enum State {
    Ok,
    Warning,
    Missing,
}

impl Finding {
    fn ok(name: &'static str, found: impl Into<String>) -> Self {
        Self {
            name,
            state: State::Ok,
            found: found.into(),
            fix: None,
        }
    }

    fn bad(
        name: &'static str,
        state: State,
        found: impl Into<String>,
        fix: impl Into<String>,
    ) -> Self {
        Self {
            name,
            state,
            found: found.into(),
            fix: Some(fix.into()),
        }
    }
}

pub fn run(args: &DoctorArgs, global: &Global) -> Result<Exit> {
    let findings = vec![
        kernel(),
        user_namespaces(),
        overlay(),
        cgroups(),
        landlock(),
        subordinate_ids(),
        git(),
        docker(),
        state(global),
        configuration(global),
    ];
    if global.json {
        output::print_json(&findings)?;
    } else {
        for finding in &findings {
            output::print_line(&describe(finding))?;
        }
    }
    let bad = findings.iter().any(|finding| {
        finding.state == State::Missing || (args.strict && finding.state == State::Warning)
    });
    Ok(if bad { Exit::Failed } else { Exit::Ok })
}

fn describe(finding: &Finding) -> String {
    let mark = match finding.state {
        State::Ok => "ok     ",
        State::Warning => "warning",
        State::Missing => "MISSING",
    };
    let fix = finding.fix.as_ref().map_or_else(String::new, |fix| {
        format!("\n         fix: {}", output::safe(fix))
    });
    format!(
        "{mark}  {}: {}{fix}",
        finding.name,
        output::safe(&finding.found)
    )
}

/// Runs in a child: entering a user namespace cannot be undone.
pub fn probe(what: Probe) -> Exit {
    let tried = match what {
        Probe::Userns => unshare(CloneFlags::CLONE_NEWUSER | CloneFlags::CLONE_NEWNET),
    };
    match tried {
        Ok(()) => Exit::Ok,
        Err(error) => {
            output::say(&error.to_string());
            Exit::Failed
        }
    }
}

fn kernel() -> Finding {
    let release = read("/proc/sys/kernel/osrelease");
    let version: Vec<u32> = release
        .split('.')
        .map_while(|part| part.parse().ok())
        .take(2)
        .collect();
    // 5.11 brought overlayfs in user namespaces; everything else we need is older.
    if version >= vec![5, 11] {
        Finding::ok("kernel", release)
    } else {
        Finding::bad("kernel", State::Missing, release, "use Linux 5.11 or newer")
    }
}

fn user_namespaces() -> Finding {
    const NAME: &str = "user namespaces";
    let tried = std::env::current_exe().and_then(|own| {
        Command::new(own)
            .args(["__probe", "userns"])
            .stdin(Stdio::null())
            .output()
    });
    match tried {
        Ok(output) if output.status.success() => Finding::ok(NAME, "allowed"),
        Ok(output) => {
            let error = String::from_utf8_lossy(&output.stderr).trim().to_owned();
            let fix = if read("/proc/sys/kernel/apparmor_restrict_unprivileged_userns") == "1" {
                "AppArmor restricts them here: add a profile with 'userns,' for palisade under \
                 /etc/apparmor.d, or set kernel.apparmor_restrict_unprivileged_userns=0"
            } else if read("/proc/sys/kernel/unprivileged_userns_clone") == "0" {
                "as root: sysctl kernel.unprivileged_userns_clone=1"
            } else {
                "as root: sysctl user.max_user_namespaces=15000"
            };
            Finding::bad(NAME, State::Missing, format!("refused: {error}"), fix)
        }
        Err(error) => Finding::bad(
            NAME,
            State::Missing,
            format!("could not be tried: {error}"),
            "see the error",
        ),
    }
}

fn overlay() -> Finding {
    const NAME: &str = "overlay file system";
    let known = read("/proc/filesystems")
        .lines()
        .any(|line| line.ends_with("\toverlay"));
    if known {
        Finding::ok(NAME, "known to the kernel")
    } else {
        Finding::bad(
            NAME,
            State::Warning,
            "not loaded",
            "as root: modprobe overlay",
        )
    }
}

fn cgroups() -> Finding {
    const NAME: &str = "cgroups";
    let fix = "limits fall back to rlimits; for cgroup limits boot with systemd.unified_cgroup_hierarchy=1";
    let unified = |root: &str| read(&format!("{root}/cgroup.controllers"));
    if Path::new("/sys/fs/cgroup/cgroup.controllers").exists() {
        let controllers = unified("/sys/fs/cgroup");
        if controllers.contains("memory") && controllers.contains("pids") {
            Finding::ok(NAME, format!("v2: {controllers}"))
        } else {
            Finding::bad(
                NAME,
                State::Warning,
                format!("v2 without memory and pids: '{controllers}'"),
                fix,
            )
        }
    } else if Path::new("/sys/fs/cgroup/memory").is_dir()
        && Path::new("/sys/fs/cgroup/pids").is_dir()
    {
        let hybrid = Path::new("/sys/fs/cgroup/unified").is_dir();
        Finding::ok(
            NAME,
            if hybrid {
                "v1, with v2 for freezing"
            } else {
                "v1"
            },
        )
    } else {
        Finding::bad(NAME, State::Warning, "none found", fix)
    }
}

fn landlock() -> Finding {
    const NAME: &str = "landlock";
    if read("/sys/kernel/security/lsm")
        .split(',')
        .any(|module| module == "landlock")
    {
        Finding::ok(NAME, "active")
    } else {
        Finding::bad(
            NAME,
            State::Warning,
            "not active; sandboxes go without this second layer",
            "boot with landlock in the lsm= list",
        )
    }
}

fn subordinate_ids() -> Finding {
    const NAME: &str = "subordinate ids";
    if nix::unistd::geteuid().is_root() {
        return Finding::ok(NAME, "not needed by root");
    }
    let user = nix::unistd::User::from_uid(nix::unistd::geteuid())
        .ok()
        .flatten();
    let name = user.map_or_else(String::new, |user| user.name);
    let uid = nix::unistd::geteuid().to_string();
    let has = |file: &str| {
        read(file).lines().any(|line| {
            line.split(':')
                .next()
                .is_some_and(|owner| owner == name || owner == uid)
        })
    };
    if has("/etc/subuid") && has("/etc/subgid") {
        Finding::ok(NAME, "present")
    } else {
        Finding::bad(
            NAME,
            State::Warning,
            "none; only --root inside a sandbox needs them",
            format!(
                "as root: usermod --add-subuids 100000-165535 --add-subgids 100000-165535 {name}"
            ),
        )
    }
}

fn git() -> Finding {
    const NAME: &str = "git";
    match Command::new("git").arg("--version").output() {
        Ok(output) if output.status.success() => {
            Finding::ok(NAME, String::from_utf8_lossy(&output.stdout).trim())
        }
        _ => Finding::bad(
            NAME,
            State::Warning,
            "not found",
            "install git; mirrors and agents need it",
        ),
    }
}

fn docker() -> Finding {
    const NAME: &str = "docker";
    match std::os::unix::net::UnixStream::connect("/var/run/docker.sock") {
        Ok(_) => Finding::ok(NAME, "a daemon answers"),
        Err(error) => Finding::ok(
            NAME,
            format!("no daemon ({error}); only the docker backend needs one"),
        ),
    }
}

fn state(global: &Global) -> Finding {
    const NAME: &str = "state directory";
    match global
        .paths()
        .and_then(|paths| paths.prepare().map(|()| paths))
    {
        Ok(Paths { state_dir, .. }) => Finding::ok(NAME, state_dir.display().to_string()),
        Err(error) => Finding::bad(NAME, State::Missing, error.to_string(), "see the error"),
    }
}

fn configuration(global: &Global) -> Finding {
    const NAME: &str = "configuration";
    let paths = match global.paths() {
        Ok(paths) => paths,
        Err(error) => {
            return Finding::bad(NAME, State::Missing, error.to_string(), "see the error");
        }
    };
    let Some(file) = paths.config.current() else {
        return Finding::ok(NAME, "none, all defaults; write one: palisade config init");
    };
    match config::load(Some(file), &crate::gate::environment) {
        Ok(_) => Finding::ok(NAME, file.display().to_string()),
        Err(problems) => {
            let count = problems.len();
            Finding::bad(
                NAME,
                State::Missing,
                format!("{count} problems"),
                "palisade config check",
            )
        }
    }
}

fn read(path: &str) -> String {
    std::fs::read_to_string(path)
        .map(|text| text.trim_end().to_owned())
        .unwrap_or_default()
}
