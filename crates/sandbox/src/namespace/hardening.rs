//! Capabilities, limits and flags that a process drops before the agent's code runs in it.

use std::io::{Error, Result};

use nix::sys::prctl;
use nix::sys::resource::{Resource, getrlimit, setrlimit};

use super::protocol::CgroupLimits;
use crate::contract::SandboxLimits;

const CAP_CHOWN: u32 = 0;
const CAP_DAC_OVERRIDE: u32 = 1;
const CAP_DAC_READ_SEARCH: u32 = 2;
const CAP_FOWNER: u32 = 3;
const CAP_FSETID: u32 = 4;
const CAP_SETGID: u32 = 6;
const CAP_SETUID: u32 = 7;
const CAP_KILL: u32 = 5;
const CAP_SYS_PTRACE: u32 = 19;
/// The highest number that a capability can have.
const MAX_CAPABILITY: u32 = 63;

/// Init's capabilities if the agent has another id: to switch to the agent, to kill its processes,
/// and to measure files that are closed, or deleted and still open.
pub(crate) const INIT_CAPABILITIES: &[u32] = &[
    CAP_DAC_READ_SEARCH,
    CAP_KILL,
    CAP_SETGID,
    CAP_SETUID,
    CAP_SYS_PTRACE,
];

/// Init's capabilities if it shares the agent's id: to measure the same files. Having more
/// capabilities than the agent also prevents the agent from tracing it.
pub(crate) const INIT_CAPABILITIES_SINGLE_ID: &[u32] = &[CAP_DAC_READ_SEARCH, CAP_SYS_PTRACE];

/// Init's additional capability if the agent has another id and init lowers the weight of the
/// agent's sessions: to write to files of the agent's processes in `/proc`.
pub(crate) const SESSION_WEIGHT_CAPABILITIES: &[u32] = &[CAP_DAC_OVERRIDE];

/// Capabilities of an agent that is root in the sandbox: to install packages, within its own user
/// namespace. None allows mounting, tracing, or network changes.
pub(crate) const ROOT_AGENT_CAPABILITIES: &[u32] = &[
    CAP_CHOWN,
    CAP_DAC_OVERRIDE,
    CAP_FOWNER,
    CAP_FSETID,
    CAP_SETGID,
    CAP_SETUID,
];

/// Capabilities of a process with subordinate ids: to access, change and chown files of these ids,
/// and to map the ids for a sandbox. The capabilities apply to these ids only.
pub(crate) const SUBID_CAPABILITIES: &[u32] = &[
    CAP_CHOWN,
    CAP_DAC_OVERRIDE,
    CAP_DAC_READ_SEARCH,
    CAP_FOWNER,
    CAP_FSETID,
    CAP_SETGID,
    CAP_SETUID,
];

/// Capabilities of a file operation process, which maps no ids for a sandbox.
pub(crate) const FILE_OP_CAPABILITIES: &[u32] =
    &[CAP_CHOWN, CAP_DAC_OVERRIDE, CAP_FOWNER, CAP_FSETID];

/// Capabilities of a process that only reads.
pub(crate) const READ_CAPABILITIES: &[u32] = &[CAP_DAC_READ_SEARCH];

/// Clears the bounding set except `kept`, and the ambient set; no executed program can gain another
/// capability.
pub(crate) fn empty_bounding_set(kept: &[u32]) -> Result<()> {
    for capability in (0..=MAX_CAPABILITY).filter(|capability| !kept.contains(capability)) {
        // SAFETY: the call takes numbers and accesses no memory.
        let result = unsafe { libc::prctl(libc::PR_CAPBSET_DROP, capability, 0, 0, 0) };
        if result != 0 {
            let error = Error::last_os_error();
            // This kernel has no capability with this number or a higher one.
            if error.raw_os_error() == Some(libc::EINVAL) && capability > CAP_SETUID {
                break;
            }
            return Err(error);
        }
    }
    // SAFETY: the call takes numbers and accesses no memory.
    let result = unsafe {
        libc::prctl(
            libc::PR_CAP_AMBIENT,
            libc::PR_CAP_AMBIENT_CLEAR_ALL,
            0,
            0,
            0,
        )
    };
    if result == 0 {
        Ok(())
    } else {
        Err(Error::last_os_error())
    }
}

/// Keeps these capabilities and drops all others.
pub(crate) fn keep_capabilities(kept: &[u32]) -> Result<()> {
    #[repr(C)]
    struct Header {
        version: u32,
        pid: i32,
    }
    #[repr(C)]
    #[derive(Clone, Copy, Default)]
    struct Data {
        effective: u32,
        permitted: u32,
        inheritable: u32,
    }
    let header = Header {
        version: 0x2008_0522,
        pid: 0,
    };
    let low = kept
        .iter()
        .filter(|&&capability| capability < 32)
        .fold(0, |all, capability| all | 1 << capability);
    let data = [
        Data {
            effective: low,
            permitted: low,
            inheritable: 0,
        },
        Data::default(),
    ];
    // SAFETY: version 3 of the call reads one header and two data blocks; both outlive it.
    let result = unsafe { libc::syscall(libc::SYS_capset, &raw const header, data.as_ptr()) };
    if result == 0 {
        Ok(())
    } else {
        Err(Error::last_os_error())
    }
}

/// Makes this process undumpable and untraceable, and keeps executed programs from gaining
/// privileges.
pub(crate) fn set_undumpable_and_no_new_privs() -> Result<()> {
    prctl::set_dumpable(false)?;
    prctl::set_no_new_privs()?;
    Ok(())
}

/// Soft limit of open files. The gate's own limit is higher, and some programs iterate over all
/// possible descriptors.
const MAX_OPEN_FILES: u64 = 4096;

/// Limits that every process inherits.
pub(crate) fn set_limits(limits: SandboxLimits, cgroup_limits: CgroupLimits) -> Result<()> {
    // The limit is 1 byte, because with a limit of 0 a host whose core_pattern is a pipe still runs
    // its handler, outside the sandbox (core(5)).
    setrlimit(Resource::RLIMIT_CORE, 1, 1)?;
    // A host may allow its users to raise their priority; an agent must not.
    setrlimit(Resource::RLIMIT_NICE, 0, 0)?;
    setrlimit(Resource::RLIMIT_RTPRIO, 0, 0)?;
    let (_, hard_limit) = getrlimit(Resource::RLIMIT_NOFILE)?;
    setrlimit(
        Resource::RLIMIT_NOFILE,
        hard_limit.min(MAX_OPEN_FILES),
        hard_limit,
    )?;
    if !cgroup_limits.pids {
        let pids = u64::from(limits.pids);
        setrlimit(Resource::RLIMIT_NPROC, pids, pids)?;
    }
    if !cgroup_limits.memory {
        setrlimit(Resource::RLIMIT_DATA, limits.memory, limits.memory)?;
    }
    Ok(())
}

/// Closes every descriptor from `first` on.
pub fn close_from(first: u32) -> Result<()> {
    // SAFETY: only for processes about to execute or that own nothing above `first`; no
    // `OwnedFd` of this process is used afterwards.
    let result = unsafe { libc::syscall(libc::SYS_close_range, first, u32::MAX, 0) };
    if result == 0 {
        Ok(())
    } else {
        Err(Error::last_os_error())
    }
}
