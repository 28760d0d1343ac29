//! Resource limits, capabilities and seccomp filter of the pack reader's child process.

use std::io::{Error, Result};

use nix::sys::resource::{Resource, setrlimit};
use seccompiler::{
    BackendError, BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition,
    SeccompFilter, SeccompRule, TargetArch,
};

use super::PackReaderLimits;
use crate::namespace::hardening;

/// Confines this process irrevocably. It must have one thread, and every file that it will read
/// must be open.
pub(super) fn apply_profile(limits: &PackReaderLimits) -> Result<()> {
    for (resource, limit) in [
        // 1 byte instead of 0, for the reason in `hardening::set_limits`.
        (Resource::RLIMIT_CORE, 1),
        // RLIMIT_DATA limits writable memory; RLIMIT_AS would count address space that is only
        // reserved.
        (Resource::RLIMIT_DATA, limits.memory),
        (Resource::RLIMIT_FSIZE, 0),
        (Resource::RLIMIT_NOFILE, 0),
        (Resource::RLIMIT_NPROC, 0),
    ] {
        setrlimit(resource, limit, limit)?;
    }
    // The soft limit sends SIGXCPU, which identifies the cause; the hard limit kills.
    setrlimit(
        Resource::RLIMIT_CPU,
        limits.processor,
        limits.processor.saturating_add(1),
    )?;
    if nix::unistd::Uid::effective().is_root() {
        hardening::empty_bounding_set(&[])?;
    }
    hardening::keep_capabilities(&[])?;
    hardening::set_undumpable_and_no_new_privs()?;
    let filter = filter().map_err(Error::other)?;
    seccompiler::apply_filter(&filter).map_err(Error::other)
}

/// Builds an allowlist; every other call returns ENOSYS. No call that opens a file is allowed.
fn filter() -> std::result::Result<BpfProgram, BackendError> {
    let own_process = SeccompCondition::new(
        0,
        SeccompCmpArgLen::Dword,
        SeccompCmpOp::Eq,
        u64::from(std::process::id()),
    )?;
    // `abort` sends a signal to this process, and the parent recognises the cause by the signal.
    let abort = (libc::SYS_tgkill, vec![SeccompRule::new(vec![own_process])?]);
    let calls = ALLOWED.iter().map(|&call| (call, Vec::new()));
    SeccompFilter::new(
        calls.chain([abort]).collect(),
        SeccompAction::Errno(libc::ENOSYS.unsigned_abs()),
        SeccompAction::Allow,
        TargetArch::try_from(std::env::consts::ARCH)?,
    )?
    .try_into()
}

/// Calls for memory, for open descriptors, for time, and for the process's exit.
const ALLOWED: &[i64] = &[
    libc::SYS_brk,
    libc::SYS_clock_gettime,
    libc::SYS_close,
    libc::SYS_exit,
    libc::SYS_exit_group,
    libc::SYS_fstat,
    libc::SYS_futex,
    libc::SYS_getpid,
    libc::SYS_getrandom,
    libc::SYS_gettid,
    libc::SYS_lseek,
    libc::SYS_madvise,
    libc::SYS_mmap,
    libc::SYS_mprotect,
    libc::SYS_mremap,
    libc::SYS_munmap,
    libc::SYS_pread64,
    libc::SYS_read,
    libc::SYS_restart_syscall,
    libc::SYS_rt_sigaction,
    libc::SYS_rt_sigprocmask,
    libc::SYS_rt_sigreturn,
    libc::SYS_sched_yield,
    libc::SYS_sigaltstack,
    libc::SYS_statx,
    libc::SYS_write,
    libc::SYS_writev,
];

#[cfg(test)]
mod tests {
    use nix::sys::wait::{WaitStatus, waitpid};
    use nix::unistd::{ForkResult, fork};

    use super::*;

    fn refused(number: i64, arguments: [i64; 3]) -> bool {
        let [a, b, c] = arguments;
        // SAFETY: numbers and constants only; each call is refused before it does anything.
        let result = unsafe { libc::syscall(number, a, b, c) };
        result == -1 && Error::last_os_error().raw_os_error() == Some(libc::ENOSYS)
    }

    #[test]
    fn pack_reader_profile_refuses_files_programs_and_sockets() {
        // SAFETY: the child only makes system calls, and exits without running destructors.
        let status = match unsafe { fork() }.unwrap() {
            ForkResult::Child => {
                let path = c"/etc/passwd".as_ptr() as i64;
                let cwd = i64::from(libc::AT_FDCWD);
                let all_refused = apply_profile(&PackReaderLimits::default()).is_ok()
                    && refused(libc::SYS_openat, [cwd, path, 0])
                    && refused(libc::SYS_openat2, [cwd, path, 0])
                    && refused(libc::SYS_memfd_create, [path, 0, 0])
                    && refused(libc::SYS_execve, [path, 0, 0])
                    && refused(libc::SYS_execveat, [0, path, 0])
                    && refused(libc::SYS_clone, [0, 0, 0])
                    && refused(libc::SYS_clone3, [0, 0, 0])
                    && refused(libc::SYS_socket, [2, 1, 0])
                    && refused(libc::SYS_connect, [0, 0, 0])
                    && refused(libc::SYS_sendmsg, [0, 0, 0])
                    && refused(libc::SYS_recvmsg, [0, 0, 0])
                    && refused(libc::SYS_ptrace, [0, 0, 0])
                    && refused(libc::SYS_kill, [0, 0, 0])
                    && refused(libc::SYS_tgkill, [1, 1, 0])
                    && refused(libc::SYS_unlinkat, [cwd, path, 0])
                    && refused(libc::SYS_fcntl, [1, 1, 0])
                    && refused(libc::SYS_prctl, [0, 0, 0])
                    && refused(libc::SYS_io_uring_setup, [0, 0, 0]);
                // SAFETY: ends this process at once.
                unsafe { libc::_exit(i32::from(!all_refused)) }
            }
            ForkResult::Parent { child } => waitpid(child, None).unwrap(),
        };
        assert!(matches!(status, WaitStatus::Exited(_, 0)), "{status:?}");
    }
}
