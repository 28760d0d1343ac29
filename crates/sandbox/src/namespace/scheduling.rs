//! CPU weight of a sandbox's processes.
//!
//! With a cgroup of the cpu controller, all processes of a sandbox together have one weight.
//! Without one, they run as SCHED_IDLE, and `sessions.rs` lowers the weight of the agent's
//! sessions.
//!
//! In both cases their time slice is longer than the default. From Linux 6.12 on, a waking process
//! with a shorter slice than the running process's preempts it at once: therefore commands of the
//! host, and init of every sandbox, do not wait for an agent that never sleeps.

use std::fs;
use std::io::{Error, Result};

use super::cgroup;

/// A sandbox's weight in cgroups of version 2: half of the default.
pub(crate) const CGROUP_WEIGHT: u64 = 50;

/// A sandbox's CPU shares in cgroups of version 1: half of the default.
pub(crate) const CGROUP_SHARES: u64 = 512;

/// The time slice of an agent's processes in nanoseconds. The kernel's default is at most 3 ms.
const TIME_SLICE_NANOS: u64 = 4_000_000;

/// Whether the kernel gives every session its own weight, also those of agents (autogroup in
/// sched(7)): if that is enabled, and no cgroup of the cpu controller applies.
pub(crate) fn sessions_have_weight() -> bool {
    let enabled = fs::read_to_string("/proc/sys/kernel/sched_autogroup_enabled");
    enabled.is_ok_and(|text| text.trim() == "1") && cgroup::is_in_root_cpu_cgroup()
}

/// Sets the scheduling of the calling process, which its descendants inherit. The agent cannot
/// change it back: RLIMIT_NICE is 0, and the system call filters refuse the calls.
pub(crate) fn apply(idle: bool) -> Result<()> {
    // SAFETY: the call takes a number; 0 is the calling process.
    let policy = unsafe { libc::sched_getscheduler(0) };
    let policy = match policy {
        -1 => return Err(Error::last_os_error()),
        // The lowest policy; the seccomp filter refuses to leave it.
        libc::SCHED_IDLE => return Ok(()),
        libc::SCHED_BATCH => libc::SCHED_BATCH,
        _ => libc::SCHED_OTHER,
    };
    set_policy(policy, TIME_SLICE_NANOS)?;
    if idle {
        set_policy(libc::SCHED_IDLE, 0)?;
    }
    Ok(())
}

fn set_policy(policy: i32, slice: u64) -> Result<()> {
    // SAFETY: all-zero is a valid `sched_attr`; `getpriority` accesses no memory. Its result -1 may
    // be a nice value, so it is no error here.
    let (mut attributes, nice) = unsafe {
        let zeroed: libc::sched_attr = std::mem::zeroed();
        (zeroed, libc::getpriority(libc::PRIO_PROCESS, 0))
    };
    attributes.size = u32::try_from(size_of::<libc::sched_attr>()).map_err(Error::other)?;
    attributes.sched_policy = policy.cast_unsigned();
    attributes.sched_nice = nice;
    attributes.sched_runtime = slice;
    // SAFETY: the structure contains its own size and outlives the call.
    match unsafe { libc::syscall(libc::SYS_sched_setattr, 0, &raw const attributes, 0) } {
        0 => Ok(()),
        _ => Err(Error::last_os_error()),
    }
}
