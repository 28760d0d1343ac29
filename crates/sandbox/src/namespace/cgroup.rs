//! cgroups for limits, CPU weight and freezing, where they are writable.
//!
//! Version 2 is used wherever it is writable, even without a controller (hybrid machines): freezing
//! and killing need no controller. Version 1 is used for memory, pids, cpu and, without version 2,
//! the freezer.

use std::fs;
use std::io::{Error, ErrorKind, Result};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use nix::poll::{PollTimeout, poll};

use super::protocol::CgroupLimits;
use super::scheduling;
use crate::contract::SandboxLimits;

/// Timeout of freezing or removing processes.
const CGROUP_TIMEOUT: Duration = Duration::from_secs(5);

/// The period of the CPU limit in microseconds.
const CPU_PERIOD_MICROS: u64 = 100_000;

/// A cgroup hierarchy of this process.
#[derive(Debug, PartialEq, Eq)]
struct Hierarchy {
    /// The controllers; empty for version 2.
    controllers: Vec<String>,
    directory: PathBuf,
}

impl Hierarchy {
    fn is_used(&self) -> bool {
        let wanted = |one: &String| matches!(one.as_str(), "memory" | "pids" | "cpu" | "freezer");
        self.controllers.is_empty() || self.controllers.iter().any(wanted)
    }
}

/// The paths of a sandbox's cgroups, where they can be created.
pub(crate) fn plan(name: &str) -> Vec<PathBuf> {
    let (Ok(mounts), Ok(own)) = (
        fs::read_to_string("/proc/self/mountinfo"),
        fs::read_to_string("/proc/self/cgroup"),
    ) else {
        return Vec::new();
    };
    hierarchies(&mounts, &own)
        .into_iter()
        .filter(Hierarchy::is_used)
        .map(|hierarchy| hierarchy.directory.join(name))
        .collect()
}

/// Creates the planned cgroups and sets limits. Returns the created ones; those that the system
/// refuses are skipped.
pub(crate) fn create_planned(
    planned: &[PathBuf],
    limits: SandboxLimits,
) -> (Vec<PathBuf>, CgroupLimits) {
    let mut cgroup_limits = CgroupLimits::default();
    let mut made = Vec::new();
    for cgroup in planned {
        if create(cgroup).is_err() {
            continue;
        }
        if let Some(parent) = cgroup.parent() {
            // Only version 2 has this file. The kernel refuses the write if the parent has
            // processes; the cgroup is then used for freezing only.
            let control = parent.join("cgroup.subtree_control");
            if control.exists() {
                for controller in ["+memory", "+pids", "+cpu"] {
                    let _ = fs::write(&control, controller);
                }
            }
        }
        cgroup_limits = cgroup_limits.or(set_limits(cgroup, limits));
        made.push(cgroup.clone());
    }
    (made, cgroup_limits)
}

/// Sets the limits that a cgroup of either version supports.
fn set_limits(cgroup: &Path, limits: SandboxLimits) -> CgroupLimits {
    let write = |file: &str, value: &str| {
        let file = cgroup.join(file);
        file.exists() && fs::write(file, value).is_ok()
    };
    let set = |file: &str, value: u64| write(file, &value.to_string());
    let cpus = limits.millicpus.is_some_and(|millicpus| {
        let quota = u64::from(millicpus) * CPU_PERIOD_MICROS / 1000;
        write("cpu.max", &format!("{quota} {CPU_PERIOD_MICROS}"))
            || (set("cpu.cfs_period_us", CPU_PERIOD_MICROS) && set("cpu.cfs_quota_us", quota))
    });
    set("memory.swap.max", 0);
    CgroupLimits {
        memory: set("memory.max", limits.memory) || set("memory.limit_in_bytes", limits.memory),
        pids: set("pids.max", u64::from(limits.pids)),
        cpu: set("cpu.weight", scheduling::CGROUP_WEIGHT)
            || set("cpu.shares", scheduling::CGROUP_SHARES),
        cpus,
    }
}

/// Freezes or thaws; `false` if no cgroup supports it.
pub(crate) fn freeze(cgroups: &[PathBuf], frozen: bool) -> Result<bool> {
    let wait_until =
        |condition: &dyn Fn() -> Result<bool>| wait_for(condition, "the cgroup did not freeze");
    for cgroup in cgroups {
        let (unified, legacy) = (cgroup.join("cgroup.freeze"), cgroup.join("freezer.state"));
        if unified.exists() {
            fs::write(unified, if frozen { "1" } else { "0" })?;
            let line = if frozen { "frozen 1" } else { "frozen 0" };
            let events = cgroup.join("cgroup.events");
            wait_until(&|| Ok(fs::read_to_string(&events)?.lines().any(|l| l == line)))?;
            return Ok(true);
        }
        if legacy.exists() {
            let state = if frozen { "FROZEN" } else { "THAWED" };
            // A process that was being forked may have missed the first write.
            wait_until(&|| {
                fs::write(&legacy, state)?;
                Ok(fs::read_to_string(&legacy)?.trim() == state)
            })?;
            return Ok(true);
        }
    }
    Ok(false)
}

/// Thaws the cgroups and their descendants, which an agent may have created: in version 1 a frozen
/// process cannot die.
pub(crate) fn thaw_all(cgroups: &[PathBuf]) {
    for cgroup in cgroups {
        for path in descendants(cgroup).iter().chain([cgroup]) {
            for (file, word) in [("freezer.state", "THAWED"), ("cgroup.freeze", "0")] {
                let file = path.join(file);
                if file.exists() {
                    let _ = fs::write(file, word);
                }
            }
        }
    }
}

/// Whether one of the cgroups is frozen; `None` if none supports freezing.
pub(crate) fn is_frozen(cgroups: &[PathBuf]) -> Option<bool> {
    cgroups.iter().find_map(|cgroup| {
        let read = |file: &str| fs::read_to_string(cgroup.join(file)).ok();
        read("cgroup.freeze")
            .map(|text| text.trim() == "1")
            .or_else(|| read("freezer.state").map(|text| text.trim() != "THAWED"))
    })
}

/// Kills all processes of the cgroups and removes them.
pub(crate) fn remove(cgroups: &[PathBuf]) -> Result<()> {
    for cgroup in cgroups {
        let _ = fs::write(cgroup.join("cgroup.kill"), "1");
    }
    thaw_all(cgroups);
    for cgroup in cgroups {
        wait_for(
            &|| match remove_descendants(cgroup).and_then(|()| fs::remove_dir(cgroup)) {
                Ok(()) => Ok(true),
                Err(error) if error.kind() == ErrorKind::NotFound => Ok(true),
                Err(error) if error.raw_os_error() == Some(libc::EBUSY) => Ok(false),
                Err(error) => Err(error),
            },
            "a cgroup still has processes",
        )?;
    }
    Ok(())
}

/// The descendants of a cgroup, deepest first.
fn descendants(cgroup: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(cgroup).into_iter().flatten().flatten();
    let mut all = Vec::new();
    for entry in entries {
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            all.extend(descendants(&entry.path()));
            all.push(entry.path());
        }
    }
    all
}

fn remove_descendants(cgroup: &Path) -> Result<()> {
    for below in descendants(cgroup) {
        match fs::remove_dir(below) {
            Err(error) if error.kind() != ErrorKind::NotFound => return Err(error),
            _ => {}
        }
    }
    Ok(())
}

/// Whether this process may create cgroups. An agent with the same user id, which could mount them,
/// could then raise its own limits.
pub(crate) fn is_delegated() -> bool {
    let writable = |cgroup: PathBuf| {
        let above = cgroup.parent().map(Path::to_owned).unwrap_or_default();
        nix::unistd::access(&above, nix::unistd::AccessFlags::W_OK).is_ok()
    };
    plan("any").into_iter().any(writable)
}

/// Whether this process is in the root cgroup of the cpu controller. The kernel gives weights to
/// sessions only there.
pub(crate) fn is_in_root_cpu_cgroup() -> bool {
    let (Ok(mounts), Ok(own)) = (
        fs::read_to_string("/proc/self/mountinfo"),
        fs::read_to_string("/proc/self/cgroup"),
    ) else {
        return true;
    };
    let in_version_1 = own.lines().find_map(|line| {
        let (controllers, path) = line.split_once(':')?.1.split_once(':')?;
        let has_cpu = controllers.split(',').any(|one| one == "cpu");
        has_cpu.then_some(path == "/")
    });
    in_version_1.unwrap_or_else(|| {
        // Every cgroup except the root has this file.
        let has_weight = |cgroup: &Path| cgroup.join("cpu.weight").exists();
        let unified = hierarchies(&mounts, &own).into_iter();
        let unified = unified.filter(|one| one.controllers.is_empty());
        !unified
            .flat_map(|one| {
                one.directory
                    .ancestors()
                    .map(has_weight)
                    .collect::<Vec<_>>()
            })
            .any(|has_weight| has_weight)
    })
}

/// Polls until the condition holds. The kernel offers no descriptor that reports such a change.
fn wait_for(condition: &dyn Fn() -> Result<bool>, message: &str) -> Result<()> {
    let deadline = Instant::now() + CGROUP_TIMEOUT;
    while !condition()? {
        if Instant::now() > deadline {
            return Err(Error::new(ErrorKind::TimedOut, message));
        }
        let _ = poll(&mut [], PollTimeout::from(1_u8));
    }
    Ok(())
}

/// Creates a cgroup; one that a crash left is removed first.
fn create(directory: &Path) -> Result<()> {
    match fs::create_dir(directory) {
        Err(error) if error.kind() == ErrorKind::AlreadyExists => {
            fs::remove_dir(directory)?;
            fs::create_dir(directory)
        }
        other => other,
    }
}

/// Parses the hierarchies of this process, version 2 first.
fn hierarchies(mounts: &str, own: &str) -> Vec<Hierarchy> {
    let mut found: Vec<_> = mounts
        .lines()
        .filter_map(|line| {
            let (before, after) = line.split_once(" - ")?;
            let mut before = before.split(' ').skip(3);
            let (root, point) = (before.next()?, before.next()?);
            let mut after = after.split(' ');
            let (kind, options) = (after.next()?, after.nth(1)?);
            let path_of = |wanted: &dyn Fn(&str, &str) -> bool| {
                own.lines().find_map(|line| {
                    let mut fields = line.splitn(3, ':');
                    let (number, controllers, path) =
                        (fields.next()?, fields.next()?, fields.next()?);
                    wanted(number, controllers).then_some((controllers, path))
                })
            };
            let (controllers, path) = match kind {
                "cgroup2" => {
                    path_of(&|number, controllers| number == "0" && controllers.is_empty())?
                }
                "cgroup" => path_of(&|_, controllers| {
                    !controllers.is_empty()
                        && controllers
                            .split(',')
                            .all(|one| options.split(',').any(|option| option == one))
                })?,
                _ => return None,
            };
            let below = Path::new(path).strip_prefix(root).ok()?;
            Some(Hierarchy {
                controllers: controllers
                    .split(',')
                    .filter(|one| !one.is_empty())
                    .map(str::to_owned)
                    .collect(),
                directory: Path::new(point)
                    .components()
                    .chain(below.components())
                    .collect(),
            })
        })
        .collect();
    found.sort_by_key(|hierarchy| !hierarchy.controllers.is_empty());
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn own_cgroup_is_found_in_hybrid_and_unified_hierarchies() {
        let mounts = "30 25 0:26 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory\n\
                      31 25 0:27 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n\
                      32 25 0:28 /jail /sys/fs/cgroup/pids rw - cgroup cgroup rw,pids\n\
                      33 25 0:29 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n\
                      34 25 0:30 / /proc rw - proc proc rw\n";
        let own = "4:memory:/a/b\n3:cpu,cpuacct:/\n2:pids:/jail/c\n0::/\n";
        let found = hierarchies(mounts, own);
        let shown: Vec<_> = found
            .iter()
            .map(|one| (one.controllers.join(","), one.directory.to_str().unwrap()))
            .collect();
        assert_eq!(
            shown,
            [
                (String::new(), "/sys/fs/cgroup/unified"),
                ("memory".to_owned(), "/sys/fs/cgroup/memory/a/b"),
                ("cpu,cpuacct".to_owned(), "/sys/fs/cgroup/cpu,cpuacct"),
                ("pids".to_owned(), "/sys/fs/cgroup/pids/c"),
            ]
        );
        assert!(found.iter().all(Hierarchy::is_used));
    }

    // Regression test for issue 14, item 3.
    #[test]
    fn limits_are_written_to_the_files_of_either_version() {
        let limits = SandboxLimits {
            memory: 1 << 30,
            pids: 7,
            millicpus: Some(1500),
            ..SandboxLimits::default()
        };
        let all = CgroupLimits {
            memory: true,
            pids: true,
            cpu: true,
            cpus: true,
        };
        for files in [
            &[
                ("memory.max", "1073741824"),
                ("memory.swap.max", "0"),
                ("pids.max", "7"),
                ("cpu.weight", "50"),
                ("cpu.max", "150000 100000"),
            ][..],
            &[
                ("memory.limit_in_bytes", "1073741824"),
                ("pids.max", "7"),
                ("cpu.shares", "512"),
                ("cpu.cfs_period_us", "100000"),
                ("cpu.cfs_quota_us", "150000"),
            ],
        ] {
            let cgroup = tempfile::tempdir().unwrap();
            for (name, _) in files {
                fs::write(cgroup.path().join(name), "").unwrap();
            }
            assert_eq!(set_limits(cgroup.path(), limits), all);
            for (name, value) in files {
                let written = fs::read_to_string(cgroup.path().join(name)).unwrap();
                assert_eq!(written, *value, "{name}");
            }
        }
        let none = tempfile::tempdir().unwrap();
        assert_eq!(set_limits(none.path(), limits), CgroupLimits::default());
    }
}
