//! The share of processor time that a sandbox's processes get beside everybody else's.
//!
//! With a cgroup that has the cpu controller, all processes of a sandbox together have one
//! weight, whatever they start. Without one, they run as SCHED_IDLE, and `sessions.rs` keeps
//! the weight of the sessions that an agent makes small.
//!
//! In both cases their time slice is longer than the kernel's own. From Linux 6.12 on, a
//! process that wakes up with a shorter slice than the running one's runs at once, and not at
//! the end of that slice: commands of the host, and init of every sandbox, do not wait for an
//! agent that never sleeps.

use std::fs;
use std::io::{Error, Result};

use super::cgroup;

/// A sandbox's weight in cgroups of version 2: half of what the kernel gives to others.
pub(crate) const WEIGHT: u64 = 50;

/// The same in version 1.
pub(crate) const SHARES: u64 = 512;

/// The time slice of an agent's processes in nanoseconds. The kernel's own is 3 ms at most;
/// within a sandbox everybody has this one.
const TIME_SLICE_NANOS: u64 = 4_000_000;

/// Whether the kernel gives every session a weight of its own, also those that agents make
/// (autogroup in sched(7)): where that is on, and no cgroup of the cpu controller holds us.
pub(crate) fn sessions_have_weight() -> bool {
    let enabled = fs::read_to_string("/proc/sys/kernel/sched_autogroup_enabled");
    enabled.is_ok_and(|text| text.trim() == "1") && cgroup::has_root_weight()
}

/// Sets the scheduling of the calling process, which all that it starts inherits. No right
/// inside is enough to undo it: RLIMIT_NICE is 0, and the system call filters refuse to.
pub(crate) fn apply(idle: bool) -> Result<()> {
    // SAFETY: plain numbers; 0 is the calling process.
    let policy = unsafe { libc::sched_getscheduler(0) };
    let policy = match policy {
        -1 => return Err(Error::last_os_error()),
        // The lowest policy; seccomp refuses to leave it.
        libc::SCHED_IDLE => return Ok(()),
        libc::SCHED_BATCH => libc::SCHED_BATCH,
        _ => libc::SCHED_OTHER,
    };
    set(policy, TIME_SLICE_NANOS)?;
    if idle {
        set(libc::SCHED_IDLE, 0)?;
    }
    Ok(())
}

fn set(policy: i32, slice: u64) -> Result<()> {
    // SAFETY: all-zero is a valid `sched_attr`; the call for the calling process touches no
    // memory of ours. A result of -1 is a nice value as well.
    let (mut attributes, nice) = unsafe {
        let zeroed: libc::sched_attr = std::mem::zeroed();
        (zeroed, libc::getpriority(libc::PRIO_PROCESS, 0))
    };
    attributes.size = u32::try_from(size_of::<libc::sched_attr>()).map_err(Error::other)?;
    attributes.sched_policy = policy.cast_unsigned();
    attributes.sched_nice = nice;
    attributes.sched_runtime = slice;
    // SAFETY: the structure says how long it is, and outlives the call.
    match unsafe { libc::syscall(libc::SYS_sched_setattr, 0, &raw const attributes, 0) } {
        0 => Ok(()),
        _ => Err(Error::last_os_error()),
    }
}
