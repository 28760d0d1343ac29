//! Resource limits, capabilities and seccomp filter of the snapshot worker.

use std::io::{Error, Result};

use nix::sys::resource::{Resource, setrlimit};
use nix::unistd::Uid;
use seccompiler::{BackendError, BpfProgram, SeccompAction, SeccompFilter, TargetArch};

use super::WorkerLimits;
use crate::git::snapshot::SnapshotBounds;
use crate::namespace::hardening;

const CAP_DAC_OVERRIDE: u32 = 1;
const CAP_DAC_READ_SEARCH: u32 = 2;
const CAP_FOWNER: u32 = 3;

/// Capabilities of a worker that runs as root: the workspace belongs to another id, and so may the
/// operator's repository.
const ROOT_CAPABILITIES: &[u32] = &[CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH, CAP_FOWNER];

/// File size allowance beyond the limit, for a pack's index and a manifest.
const SPARE_FILE_SIZE: u64 = 256 << 20;

/// Size of the windows in which libgit2 maps packs, so that a large repository fits the address
/// space.
const MAP_WINDOW_BYTES: usize = 32 << 20;
/// Maximum size of all mapped windows.
const MAX_MAPPED_BYTES: usize = 512 << 20;
/// Maximum number of packs that libgit2 has open.
const MAX_OPEN_PACKS: usize = 256;

/// Confines this process irrevocably. It must have one thread. With `has_subids` it keeps the
/// capabilities to read files of subordinate ids.
pub(super) fn apply_profile(
    limits: &WorkerLimits,
    bounds: &SnapshotBounds,
    has_subids: bool,
) -> Result<()> {
    // SAFETY: libgit2's options are plain numbers, and no other thread uses it.
    unsafe {
        git2::opts::set_mwindow_size(MAP_WINDOW_BYTES).map_err(Error::other)?;
        git2::opts::set_mwindow_mapped_limit(MAX_MAPPED_BYTES).map_err(Error::other)?;
        git2::opts::set_mwindow_file_limit(MAX_OPEN_PACKS).map_err(Error::other)?;
    }
    let max_file_size = bounds
        .total
        .max(bounds.file)
        .saturating_add(SPARE_FILE_SIZE);
    for (resource, limit) in [
        // 1 byte instead of 0, for the reason in `hardening::set_limits`.
        (Resource::RLIMIT_CORE, 1),
        (Resource::RLIMIT_AS, limits.memory),
        (Resource::RLIMIT_FSIZE, max_file_size),
        (Resource::RLIMIT_NOFILE, 1024),
    ] {
        setrlimit(resource, limit, limit)?;
    }
    // The soft limit sends SIGXCPU, which identifies the cause; the hard limit kills.
    setrlimit(
        Resource::RLIMIT_CPU,
        limits.processor,
        limits.processor.saturating_add(1),
    )?;
    if Uid::effective().is_root() {
        hardening::empty_bounding_set(&[])?;
        hardening::keep_capabilities(ROOT_CAPABILITIES)?;
    } else if has_subids {
        hardening::keep_capabilities(hardening::READ_CAPABILITIES)?;
    } else {
        hardening::keep_capabilities(&[])?;
    }
    hardening::set_undumpable_and_no_new_privs()?;
    let filter = filter().map_err(Error::other)?;
    seccompiler::apply_filter(&filter).map_err(Error::other)
}

/// Builds an allowlist; every other call returns ENOSYS: no program, thread, socket, signal to
/// others, mount or change of ids.
fn filter() -> std::result::Result<BpfProgram, BackendError> {
    let calls = ALLOWED.iter().chain(ALLOWED_OF_ARCHITECTURE);
    SeccompFilter::new(
        calls.map(|&call| (call, Vec::new())).collect(),
        SeccompAction::Errno(libc::ENOSYS.unsigned_abs()),
        SeccompAction::Allow,
        TargetArch::try_from(std::env::consts::ARCH)?,
    )?
    .try_into()
}

/// Calls for files, memory, time, and the open socket to the gate.
pub(crate) const ALLOWED: &[i64] = &[
    libc::SYS_brk,
    libc::SYS_clock_gettime,
    libc::SYS_close,
    libc::SYS_dup,
    libc::SYS_exit,
    libc::SYS_exit_group,
    libc::SYS_faccessat,
    libc::SYS_faccessat2,
    libc::SYS_fchmod,
    libc::SYS_fchmodat,
    libc::SYS_fcntl,
    libc::SYS_fdatasync,
    libc::SYS_flock,
    libc::SYS_fstat,
    libc::SYS_fstatfs,
    libc::SYS_fsync,
    libc::SYS_ftruncate,
    libc::SYS_futex,
    libc::SYS_getcwd,
    libc::SYS_getdents64,
    libc::SYS_getegid,
    libc::SYS_geteuid,
    libc::SYS_getgid,
    libc::SYS_getpid,
    libc::SYS_getppid,
    libc::SYS_getrandom,
    libc::SYS_getrusage,
    libc::SYS_gettid,
    libc::SYS_gettimeofday,
    libc::SYS_getuid,
    libc::SYS_lseek,
    libc::SYS_madvise,
    libc::SYS_mkdirat,
    libc::SYS_mmap,
    libc::SYS_mprotect,
    libc::SYS_mremap,
    libc::SYS_munmap,
    libc::SYS_newfstatat,
    libc::SYS_openat,
    libc::SYS_openat2,
    libc::SYS_ppoll,
    libc::SYS_pread64,
    libc::SYS_pwrite64,
    libc::SYS_read,
    libc::SYS_readlinkat,
    libc::SYS_readv,
    libc::SYS_recvmsg,
    libc::SYS_renameat2,
    libc::SYS_restart_syscall,
    libc::SYS_rt_sigaction,
    libc::SYS_rt_sigprocmask,
    libc::SYS_rt_sigreturn,
    libc::SYS_sched_yield,
    libc::SYS_sendmsg,
    libc::SYS_setsockopt,
    libc::SYS_sigaltstack,
    libc::SYS_statx,
    libc::SYS_sysinfo,
    libc::SYS_uname,
    libc::SYS_unlinkat,
    libc::SYS_utimensat,
    libc::SYS_write,
    libc::SYS_writev,
];

/// Older variants of the same calls, on this architecture.
#[cfg(target_arch = "x86_64")]
pub(crate) const ALLOWED_OF_ARCHITECTURE: &[i64] = &[
    libc::SYS_access,
    libc::SYS_chmod,
    libc::SYS_getdents,
    libc::SYS_lstat,
    libc::SYS_mkdir,
    libc::SYS_open,
    libc::SYS_poll,
    libc::SYS_readlink,
    libc::SYS_rename,
    libc::SYS_renameat,
    libc::SYS_rmdir,
    libc::SYS_stat,
    libc::SYS_unlink,
    libc::SYS_utimes,
];

#[cfg(not(target_arch = "x86_64"))]
pub(crate) const ALLOWED_OF_ARCHITECTURE: &[i64] = &[libc::SYS_renameat];

#[cfg(test)]
mod tests {
    use nix::sys::wait::{WaitStatus, waitpid};
    use nix::unistd::{ForkResult, fork};

    use super::*;

    /// Runs `check` in a child process with the profile applied; the exit code is 0 if `check`
    /// returns `true`.
    fn run_with_profile(check: fn() -> bool) -> WaitStatus {
        // SAFETY: the child only makes system calls, and exits without running destructors.
        match unsafe { fork() }.unwrap() {
            ForkResult::Child => {
                let passed =
                    apply_profile(&WorkerLimits::default(), &SnapshotBounds::default(), false)
                        .is_ok()
                        && check();
                // SAFETY: ends this process at once.
                unsafe { libc::_exit(i32::from(!passed)) }
            }
            ForkResult::Parent { child } => waitpid(child, None).unwrap(),
        }
    }

    fn refused(number: i64, arguments: [i64; 3]) -> bool {
        let [a, b, c] = arguments;
        // SAFETY: numbers and constants only; each call is refused before it does anything.
        let result = unsafe { libc::syscall(number, a, b, c) };
        result == -1 && Error::last_os_error().raw_os_error() == Some(libc::ENOSYS)
    }

    #[test]
    fn worker_profile_refuses_programs_sockets_and_id_changes() {
        let status = run_with_profile(|| {
            let path = c"/bin/true".as_ptr() as i64;
            let inet = i64::from(libc::AF_INET);
            let stream = i64::from(libc::SOCK_STREAM);
            refused(libc::SYS_execve, [path, 0, 0])
                && refused(libc::SYS_execveat, [0, path, 0])
                && refused(libc::SYS_clone, [0, 0, 0])
                && refused(libc::SYS_clone3, [0, 0, 0])
                && refused(libc::SYS_socket, [inet, stream, 0])
                && refused(libc::SYS_connect, [0, 0, 0])
                && refused(libc::SYS_ptrace, [0, 0, 0])
                && refused(libc::SYS_kill, [0, 0, 0])
                && refused(libc::SYS_mount, [path, path, path])
                && refused(libc::SYS_setuid, [0, 0, 0])
                && refused(libc::SYS_setresuid, [0, 0, 0])
                && refused(libc::SYS_chroot, [path, 0, 0])
                && refused(libc::SYS_fchownat, [0, path, 0])
                && refused(libc::SYS_unshare, [0, 0, 0])
                && refused(libc::SYS_io_uring_setup, [0, 0, 0])
                && refused(libc::SYS_bpf, [0, 0, 0])
        });
        assert!(matches!(status, WaitStatus::Exited(_, 0)), "{status:?}");
    }
}
