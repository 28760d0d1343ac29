//! Resource limits, capabilities and seccomp filter of a file operation process.

use std::io::{Error, Result};

use nix::sys::resource::{Resource, setrlimit};
use seccompiler::{
    BackendError, BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition,
    SeccompFilter, SeccompRule, TargetArch,
};

use crate::namespace::hardening;
use crate::worker::profile::{ALLOWED, ALLOWED_OF_ARCHITECTURE};

/// The capabilities that this process keeps. It need not map ids for a sandbox.
const KEPT_CAPABILITIES: &[u32] = hardening::FILE_OP_CAPABILITIES;

/// Confines this process irrevocably.
pub(super) fn apply_profile() -> Result<()> {
    // 1 byte instead of 0, for the reason in `hardening::set_limits`.
    setrlimit(Resource::RLIMIT_CORE, 1, 1)?;
    hardening::keep_capabilities(KEPT_CAPABILITIES)?;
    hardening::set_undumpable_and_no_new_privs()?;
    let filter = filter().map_err(Error::other)?;
    seccompiler::apply_filter(&filter).map_err(Error::other)
}

/// The worker's allowlist, and calls that copy, link and change owners; no program, no socket, and
/// no process except threads.
fn filter() -> std::result::Result<BpfProgram, BackendError> {
    let unconditional = ALLOWED
        .iter()
        .chain(ALLOWED_OF_ARCHITECTURE)
        .chain(FILE_CALLS);
    let unconditional = unconditional
        .chain(FILE_CALLS_OF_ARCHITECTURE)
        .chain(THREAD_CALLS);
    let mut rules: std::collections::BTreeMap<i64, Vec<SeccompRule>> =
        unconditional.map(|&call| (call, Vec::new())).collect();
    let thread = libc::CLONE_THREAD.unsigned_abs().into();
    let thread = condition(0, SeccompCmpOp::MaskedEq(thread), thread)?;
    rules.insert(libc::SYS_clone, vec![SeccompRule::new(vec![thread])?]);
    // FICLONE clones the blocks of a file.
    #[expect(
        clippy::unnecessary_cast,
        reason = "the number's type differs between libraries"
    )]
    let clone = condition(1, SeccompCmpOp::Eq, libc::FICLONE as u64)?;
    rules.insert(libc::SYS_ioctl, vec![SeccompRule::new(vec![clone])?]);
    SeccompFilter::new(
        rules,
        SeccompAction::Errno(libc::ENOSYS.unsigned_abs()),
        SeccompAction::Allow,
        TargetArch::try_from(std::env::consts::ARCH)?,
    )?
    .try_into()
}

fn condition(
    argument: u8,
    compare: SeccompCmpOp,
    value: u64,
) -> std::result::Result<SeccompCondition, BackendError> {
    SeccompCondition::new(argument, SeccompCmpArgLen::Dword, compare, value)
}

/// Calls that copy, link and change owners.
const FILE_CALLS: &[i64] = &[
    libc::SYS_copy_file_range,
    libc::SYS_fchown,
    libc::SYS_fchownat,
    libc::SYS_fgetxattr,
    libc::SYS_flistxattr,
    libc::SYS_fsetxattr,
    libc::SYS_linkat,
    libc::SYS_mknodat,
    libc::SYS_symlinkat,
];

/// Older variants of the same calls.
#[cfg(target_arch = "x86_64")]
const FILE_CALLS_OF_ARCHITECTURE: &[i64] = &[
    libc::SYS_chown,
    libc::SYS_lchown,
    libc::SYS_link,
    libc::SYS_mknod,
    libc::SYS_symlink,
];

#[cfg(not(target_arch = "x86_64"))]
const FILE_CALLS_OF_ARCHITECTURE: &[i64] = &[];

/// Calls that threads need.
const THREAD_CALLS: &[i64] = &[
    libc::SYS_prctl,
    libc::SYS_rseq,
    libc::SYS_sched_getaffinity,
    libc::SYS_set_robust_list,
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
    fn file_op_profile_refuses_programs_and_sockets() {
        // SAFETY: the child only makes system calls, and exits without running destructors.
        let status = match unsafe { fork() }.unwrap() {
            ForkResult::Child => {
                let path = c"/bin/true".as_ptr() as i64;
                let all_refused = filter().is_ok_and(|filter| {
                    hardening::set_undumpable_and_no_new_privs().is_ok()
                        && seccompiler::apply_filter(&filter).is_ok()
                }) && refused(libc::SYS_execve, [path, 0, 0])
                    && refused(libc::SYS_clone, [libc::SIGCHLD.into(), 0, 0])
                    && refused(libc::SYS_clone, [libc::CLONE_NEWUSER.into(), 0, 0])
                    && refused(libc::SYS_clone3, [0, 0, 0])
                    && refused(libc::SYS_unshare, [0, 0, 0])
                    && refused(libc::SYS_socket, [libc::AF_INET.into(), 1, 0])
                    && refused(libc::SYS_setuid, [0, 0, 0])
                    && refused(libc::SYS_mount, [path, path, path])
                    && refused(libc::SYS_ptrace, [0, 0, 0])
                    && refused(libc::SYS_kill, [0, 0, 0])
                    && refused(libc::SYS_ioctl, [0, 0x5412, 0])
                    && refused(libc::SYS_bpf, [0, 0, 0]);
                // SAFETY: ends this process at once.
                unsafe { libc::_exit(i32::from(!all_refused)) }
            }
            ForkResult::Parent { child } => waitpid(child, None).unwrap(),
        };
        assert!(matches!(status, WaitStatus::Exited(_, 0)), "{status:?}");
    }
}
