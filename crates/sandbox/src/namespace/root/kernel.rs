//! Mounts `/dev` and `/proc`.

use std::fs::write;
use std::os::fd::OwnedFd;
use std::os::unix::fs::symlink;
use std::path::Path;

use nix::fcntl::{OFlag, open};
use nix::mount::{MsFlags, mount};
use nix::sys::stat::Mode;

use super::{make_directory, remount};
use crate::namespace::identity::AGENT_UID;
use crate::namespace::protocol::Identity;
use crate::namespace::step::{Step, StepError};

/// Devices of the host that are mounted in `/dev`.
const DEVICES: &[&str] = &["null", "zero", "full", "random", "urandom", "tty"];

/// Files of `/proc` with information about the host or control over it.
const PROC_MASKED: &[&str] = &[
    "kcore",
    "keys",
    "key-users",
    "kallsyms",
    "kmsg",
    "kpagecount",
    "kpageflags",
    "kpagecgroup",
    "timer_list",
    "sched_debug",
    "latency_stats",
    "sysrq-trigger",
    "modules",
    "interrupts",
    "config.gz",
];

/// Directories of `/proc` that are read-only.
const PROC_READ_ONLY: &[&str] = &["sys", "bus", "fs", "irq", "acpi", "scsi", "driver", "tty"];

/// The mount point of init's own `/proc` until it enters the new root.
const PROC_OF_INIT: &str = "lower/proc";

/// Mounts `/dev`: six devices of the host, and a new devpts instance.
pub(super) fn mount_dev(base: &str, identity: Identity) -> Result<(), StepError> {
    let none = None::<&str>;
    let dev = format!("{base}/dev");
    let restricted = MsFlags::MS_NOSUID | MsFlags::MS_NOEXEC;
    mount(
        Some("tmpfs"),
        dev.as_str(),
        Some("tmpfs"),
        restricted,
        Some("mode=0755,size=64k"),
    )
    .step("mounting /dev")?;
    for device in DEVICES {
        let inside = format!("{dev}/{device}");
        let host = format!("/dev/{device}");
        write(&inside, "").step("creating a mount point for a device")?;
        mount(
            Some(host.as_str()),
            inside.as_str(),
            none,
            MsFlags::MS_BIND,
            none,
        )
        .step("mounting a device")?;
    }
    for (target, link) in [
        ("pts/ptmx", "ptmx"),
        ("/proc/self/fd", "fd"),
        ("/proc/self/fd/0", "stdin"),
        ("/proc/self/fd/1", "stdout"),
        ("/proc/self/fd/2", "stderr"),
    ] {
        symlink(target, format!("{dev}/{link}")).step("linking in /dev")?;
    }
    for (place, mode) in [("pts", 0o755), ("shm", 0o1777)] {
        make_directory(&Path::new(&dev).join(place), mode).step("making a directory in /dev")?;
    }
    mount(
        Some("devpts"),
        format!("{dev}/pts").as_str(),
        Some("devpts"),
        restricted,
        Some("newinstance,ptmxmode=0666,mode=0600"),
    )
    .step("mounting /dev/pts")?;
    let owner = match identity {
        Identity::Range { .. } => 0,
        Identity::Single => AGENT_UID,
    };
    mount(
        Some("tmpfs"),
        format!("{dev}/shm").as_str(),
        Some("tmpfs"),
        restricted | MsFlags::MS_NODEV,
        Some(format!("mode=1777,size=256m,uid={owner}").as_str()),
    )
    .step("mounting /dev/shm")?;
    let read_only = restricted | MsFlags::MS_RDONLY;
    mount(
        none,
        dev.as_str(),
        none,
        MsFlags::MS_REMOUNT | read_only,
        none,
    )
    .step("making /dev read-only")
}

/// Mounts a masked `/proc`. Returns an unmasked `/proc` for init.
///
/// If init lowers the weight of sessions, the agent could raise it in `/proc/PID/autogroup`, and a
/// mount cannot mask a file of every process, so `/proc` is read-only.
pub(super) fn mount_proc(base: &str, is_read_only: bool) -> Result<OwnedFd, StepError> {
    let none = None::<&str>;
    let proc_path = format!("{base}/proc");
    let restricted = MsFlags::MS_NOSUID | MsFlags::MS_NODEV | MsFlags::MS_NOEXEC;
    let mount_new_proc = |at: &str, options| {
        mount(Some("proc"), at, Some("proc"), restricted, Some(options))
            .step("mounting /proc (inside a container this needs an unmasked /proc outside)")
    };
    // Init must see every process to kill it. `hidepid` would hide undumpable processes from an
    // init with the agent's id. Init therefore keeps a second instance open, at a path that is
    // unmounted with the host's tree.
    make_directory(Path::new(PROC_OF_INIT), 0o755).step("creating a mount point for /proc")?;
    mount_new_proc(PROC_OF_INIT, "")?;
    let flags = OFlag::O_RDONLY | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC;
    let proc = open(PROC_OF_INIT, flags, Mode::empty()).step("opening /proc")?;
    mount_new_proc(&proc_path, "hidepid=2")?;
    for name in PROC_READ_ONLY {
        let path = format!("{proc_path}/{name}");
        if Path::new(&path).exists() {
            mount(
                Some(path.as_str()),
                path.as_str(),
                none,
                MsFlags::MS_BIND,
                none,
            )
            .step("masking /proc")?;
            remount(path.as_str(), restricted | MsFlags::MS_RDONLY).step("masking /proc")?;
        }
    }
    for name in PROC_MASKED {
        let path = format!("{proc_path}/{name}");
        if Path::new(&path).exists() {
            mount(
                Some("/dev/null"),
                path.as_str(),
                none,
                MsFlags::MS_BIND,
                none,
            )
            .step("masking /proc")?;
        }
    }
    if is_read_only {
        remount(proc_path.as_str(), restricted | MsFlags::MS_RDONLY).step("masking /proc")?;
    }
    Ok(proc)
}
