//! System call filters of the agent's processes.
//!
//! There are two filters, because seccompiler, which compiles the second, has one action per
//! filter; the kernel takes the stricter result:
//!
//! 1. an allowlist; every other call returns ENOSYS. A denylist would not suffice: x32 calls have
//!    the same audit architecture as x86-64 ones and other numbers. ENOSYS lets C libraries fall
//!    back, for example from clone3 (whose flags are behind a pointer) to clone;
//! 2. arguments of allowed calls that are refused with EPERM.
//!
//! With `--nested` the agent may create namespaces and mount in them, as programs with their own
//! sandbox do. These rights exist only in a new user namespace, in which the sandbox's mounts are
//! locked and its `/proc` stays masked.
//!
//! Calls of another architecture kill the process. ptrace is allowed: debuggers and sanitizers need
//! it, and init cannot be traced.

use std::collections::BTreeMap;

use seccompiler::{
    BackendError, BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition,
    SeccompFilter, SeccompRule, TargetArch,
};

use super::allowlist;

/// Both filters, ready to install.
pub(crate) struct Filters {
    allowlist: BpfProgram,
    arguments: BpfProgram,
}

impl Filters {
    /// Compiles the filters; `nested` for an agent that may create user namespaces.
    pub(crate) fn compile(nested: bool) -> Result<Self, BackendError> {
        let arch = TargetArch::try_from(std::env::consts::ARCH)?;
        let allowed: Vec<i64> = ALLOWED
            .iter()
            .chain(ALLOWED_OF_ARCHITECTURE)
            .chain(if nested { ALLOWED_NESTED } else { &[] })
            .copied()
            .collect();
        let refused = SeccompFilter::new(
            refused_arguments(nested)?,
            SeccompAction::Allow,
            SeccompAction::Errno(errno(libc::EPERM)),
            arch,
        )?;
        Ok(Self {
            allowlist: allowlist::compile(&allowed, errno(libc::ENOSYS))?,
            arguments: refused.try_into()?,
        })
    }

    /// Installs the filters irrevocably for this process and its descendants.
    pub(crate) fn install(&self) -> Result<(), seccompiler::Error> {
        seccompiler::apply_filter(&self.arguments)?;
        seccompiler::apply_filter(&self.allowlist)
    }
}

fn errno(number: i32) -> u32 {
    number.unsigned_abs()
}

fn refused_arguments(nested: bool) -> Result<BTreeMap<i64, Vec<SeccompRule>>, BackendError> {
    let families = [
        libc::AF_UNIX,
        libc::AF_INET,
        libc::AF_INET6,
        libc::AF_NETLINK,
    ];
    let socket = vec![
        // AF_VSOCK is not confined by a network namespace: on a virtual machine it would bypass the
        // gate.
        none_of(0, families.map(unsigned).as_slice())?,
        SeccompRule::new(vec![
            equal(0, unsigned(libc::AF_NETLINK))?,
            not_equal(2, unsigned(libc::NETLINK_ROUTE))?,
        ])?,
    ];
    let mut new_namespace = Vec::new();
    for flag in [
        libc::CLONE_NEWNS,
        libc::CLONE_NEWCGROUP,
        libc::CLONE_NEWUTS,
        libc::CLONE_NEWIPC,
        libc::CLONE_NEWUSER,
        libc::CLONE_NEWPID,
        libc::CLONE_NEWNET,
    ] {
        new_namespace.push(has_flag(0, unsigned(flag))?);
    }
    // CLONE_NEWTIME is refused for unshare only: in clone's flags that bit is part of the exit
    // signal.
    let mut unshare = new_namespace.clone();
    unshare.push(has_flag(0, unsigned(libc::CLONE_NEWTIME))?);
    let personalities = [0, 0x8, 0x20000, 0x20008, 0x40000, 0x40008, 0xffff_ffff];
    let mut refused = BTreeMap::from([
        (libc::SYS_socket, socket),
        (
            libc::SYS_socketpair,
            vec![none_of(0, &[unsigned(libc::AF_UNIX)])?],
        ),
        (libc::SYS_clone, new_namespace),
        (libc::SYS_unshare, unshare),
        (
            libc::SYS_ioctl,
            // Both requests insert input into a terminal.
            vec![
                SeccompRule::new(vec![equal(1, libc::TIOCSTI)?])?,
                SeccompRule::new(vec![equal(1, TIOCLINUX)?])?,
            ],
        ),
        (libc::SYS_personality, vec![none_of(0, &personalities)?]),
        // A process may set its own limits, with the process number 0. With another number an agent
        // could limit every process with its id, such as init and the subreaper of a command.
        (
            libc::SYS_prlimit64,
            vec![
                SeccompRule::new(vec![equal(0, 1)?])?,
                SeccompRule::new(vec![not_equal(0, 0)?, is_not_null(2)?])?,
            ],
        ),
        // These calls could shorten the time slice of the agent's processes, which is long so that
        // other processes run first. Lowering the priority with setpriority is allowed.
        (libc::SYS_sched_setattr, Vec::new()),
        (libc::SYS_sched_setparam, Vec::new()),
        (libc::SYS_sched_setscheduler, Vec::new()),
        // Only the host may set or adjust the clock.
        (libc::SYS_clock_adjtime, Vec::new()),
    ]);
    if nested {
        refused.remove(&libc::SYS_clone);
        refused.remove(&libc::SYS_unshare);
    }
    Ok(refused)
}

/// The ioctl of the Linux console, which is missing in `libc`.
const TIOCLINUX: u64 = 0x541c;

fn unsigned(value: i32) -> u64 {
    u64::from(value.cast_unsigned())
}

// The kernel uses only the lower 32 bits of the compared arguments, so the filter must not compare
// more.
fn condition(
    argument: u8,
    operator: SeccompCmpOp,
    value: u64,
) -> Result<SeccompCondition, BackendError> {
    SeccompCondition::new(argument, SeccompCmpArgLen::Dword, operator, value)
}

fn equal(argument: u8, value: u64) -> Result<SeccompCondition, BackendError> {
    condition(argument, SeccompCmpOp::Eq, value)
}

fn not_equal(argument: u8, value: u64) -> Result<SeccompCondition, BackendError> {
    condition(argument, SeccompCmpOp::Ne, value)
}

/// Matches a pointer that is not null; all 64 bits are compared.
fn is_not_null(argument: u8) -> Result<SeccompCondition, BackendError> {
    SeccompCondition::new(argument, SeccompCmpArgLen::Qword, SeccompCmpOp::Ne, 0)
}

fn none_of(argument: u8, values: &[u64]) -> Result<SeccompRule, BackendError> {
    let all: Result<_, _> = values.iter().map(|&v| not_equal(argument, v)).collect();
    SeccompRule::new(all?)
}

fn has_flag(argument: u8, flag: u64) -> Result<SeccompRule, BackendError> {
    SeccompRule::new(vec![condition(
        argument,
        SeccompCmpOp::MaskedEq(flag),
        flag,
    )?])
}

/// Calls of every architecture.
const ALLOWED: &[i64] = &[
    libc::SYS_accept,
    libc::SYS_accept4,
    libc::SYS_bind,
    libc::SYS_brk,
    libc::SYS_capget,
    libc::SYS_capset,
    libc::SYS_chdir,
    libc::SYS_clock_adjtime,
    libc::SYS_clock_getres,
    libc::SYS_clock_gettime,
    libc::SYS_clock_nanosleep,
    libc::SYS_clone,
    libc::SYS_close,
    libc::SYS_close_range,
    libc::SYS_connect,
    libc::SYS_copy_file_range,
    libc::SYS_dup,
    libc::SYS_dup3,
    libc::SYS_epoll_create1,
    libc::SYS_epoll_ctl,
    libc::SYS_epoll_pwait,
    libc::SYS_epoll_pwait2,
    libc::SYS_eventfd2,
    libc::SYS_execve,
    libc::SYS_execveat,
    libc::SYS_exit,
    libc::SYS_exit_group,
    libc::SYS_faccessat,
    libc::SYS_faccessat2,
    libc::SYS_fadvise64,
    libc::SYS_fallocate,
    libc::SYS_fchdir,
    libc::SYS_fchmod,
    libc::SYS_fchmodat,
    libc::SYS_fchown,
    libc::SYS_fchownat,
    libc::SYS_fcntl,
    libc::SYS_fdatasync,
    libc::SYS_fgetxattr,
    libc::SYS_flistxattr,
    libc::SYS_flock,
    libc::SYS_fremovexattr,
    libc::SYS_fsetxattr,
    libc::SYS_fstat,
    libc::SYS_fstatfs,
    libc::SYS_fsync,
    libc::SYS_ftruncate,
    libc::SYS_futex,
    libc::SYS_futex_waitv,
    libc::SYS_get_mempolicy,
    libc::SYS_get_robust_list,
    libc::SYS_getcpu,
    libc::SYS_getcwd,
    libc::SYS_getdents64,
    libc::SYS_getegid,
    libc::SYS_geteuid,
    libc::SYS_getgid,
    libc::SYS_getgroups,
    libc::SYS_getitimer,
    libc::SYS_getpeername,
    libc::SYS_getpgid,
    libc::SYS_getpid,
    libc::SYS_getppid,
    libc::SYS_getpriority,
    libc::SYS_getrandom,
    libc::SYS_getresgid,
    libc::SYS_getresuid,
    libc::SYS_getrusage,
    libc::SYS_getsid,
    libc::SYS_getsockname,
    libc::SYS_getsockopt,
    libc::SYS_gettid,
    libc::SYS_gettimeofday,
    libc::SYS_getuid,
    libc::SYS_getxattr,
    libc::SYS_inotify_add_watch,
    libc::SYS_inotify_init1,
    libc::SYS_inotify_rm_watch,
    libc::SYS_io_cancel,
    libc::SYS_io_destroy,
    libc::SYS_io_getevents,
    libc::SYS_io_setup,
    libc::SYS_io_submit,
    libc::SYS_ioctl,
    libc::SYS_ioprio_get,
    libc::SYS_ioprio_set,
    libc::SYS_kcmp,
    libc::SYS_kill,
    libc::SYS_landlock_add_rule,
    libc::SYS_landlock_create_ruleset,
    libc::SYS_landlock_restrict_self,
    libc::SYS_lgetxattr,
    libc::SYS_linkat,
    libc::SYS_listen,
    libc::SYS_listxattr,
    libc::SYS_llistxattr,
    libc::SYS_lremovexattr,
    libc::SYS_lseek,
    libc::SYS_lsetxattr,
    libc::SYS_madvise,
    libc::SYS_mbind,
    libc::SYS_membarrier,
    libc::SYS_memfd_create,
    libc::SYS_mincore,
    libc::SYS_mkdirat,
    libc::SYS_mknodat,
    libc::SYS_mlock,
    libc::SYS_mlock2,
    libc::SYS_mlockall,
    libc::SYS_mmap,
    libc::SYS_mprotect,
    libc::SYS_mq_getsetattr,
    libc::SYS_mq_notify,
    libc::SYS_mq_open,
    libc::SYS_mq_timedreceive,
    libc::SYS_mq_timedsend,
    libc::SYS_mq_unlink,
    libc::SYS_mremap,
    libc::SYS_mseal,
    libc::SYS_msgctl,
    libc::SYS_msgget,
    libc::SYS_msgrcv,
    libc::SYS_msgsnd,
    libc::SYS_msync,
    libc::SYS_munlock,
    libc::SYS_munlockall,
    libc::SYS_munmap,
    libc::SYS_name_to_handle_at,
    libc::SYS_nanosleep,
    libc::SYS_newfstatat,
    libc::SYS_openat,
    libc::SYS_openat2,
    libc::SYS_personality,
    libc::SYS_pidfd_getfd,
    libc::SYS_pidfd_open,
    libc::SYS_pidfd_send_signal,
    libc::SYS_pipe2,
    libc::SYS_pkey_alloc,
    libc::SYS_pkey_free,
    libc::SYS_pkey_mprotect,
    libc::SYS_ppoll,
    libc::SYS_prctl,
    libc::SYS_pread64,
    libc::SYS_preadv,
    libc::SYS_preadv2,
    libc::SYS_prlimit64,
    libc::SYS_process_madvise,
    libc::SYS_process_mrelease,
    libc::SYS_process_vm_readv,
    libc::SYS_process_vm_writev,
    libc::SYS_pselect6,
    libc::SYS_ptrace,
    libc::SYS_pwrite64,
    libc::SYS_pwritev,
    libc::SYS_pwritev2,
    libc::SYS_read,
    libc::SYS_readahead,
    libc::SYS_readlinkat,
    libc::SYS_readv,
    libc::SYS_recvfrom,
    libc::SYS_recvmmsg,
    libc::SYS_recvmsg,
    libc::SYS_remap_file_pages,
    libc::SYS_removexattr,
    libc::SYS_renameat2,
    libc::SYS_restart_syscall,
    libc::SYS_rseq,
    libc::SYS_rt_sigaction,
    libc::SYS_rt_sigpending,
    libc::SYS_rt_sigprocmask,
    libc::SYS_rt_sigqueueinfo,
    libc::SYS_rt_sigreturn,
    libc::SYS_rt_sigsuspend,
    libc::SYS_rt_sigtimedwait,
    libc::SYS_rt_tgsigqueueinfo,
    libc::SYS_sched_get_priority_max,
    libc::SYS_sched_get_priority_min,
    libc::SYS_sched_getaffinity,
    libc::SYS_sched_getattr,
    libc::SYS_sched_getparam,
    libc::SYS_sched_getscheduler,
    libc::SYS_sched_rr_get_interval,
    libc::SYS_sched_setaffinity,
    libc::SYS_sched_setattr,
    libc::SYS_sched_setparam,
    libc::SYS_sched_setscheduler,
    libc::SYS_sched_yield,
    libc::SYS_seccomp,
    libc::SYS_semctl,
    libc::SYS_semget,
    libc::SYS_semop,
    libc::SYS_semtimedop,
    libc::SYS_sendfile,
    libc::SYS_sendmmsg,
    libc::SYS_sendmsg,
    libc::SYS_sendto,
    libc::SYS_set_mempolicy,
    libc::SYS_set_robust_list,
    libc::SYS_set_tid_address,
    libc::SYS_setfsgid,
    libc::SYS_setfsuid,
    libc::SYS_setgid,
    libc::SYS_setgroups,
    libc::SYS_setitimer,
    libc::SYS_setpgid,
    libc::SYS_setpriority,
    libc::SYS_setregid,
    libc::SYS_setresgid,
    libc::SYS_setresuid,
    libc::SYS_setreuid,
    libc::SYS_setsid,
    libc::SYS_setsockopt,
    libc::SYS_setuid,
    libc::SYS_setxattr,
    libc::SYS_shmat,
    libc::SYS_shmctl,
    libc::SYS_shmdt,
    libc::SYS_shmget,
    libc::SYS_shutdown,
    libc::SYS_sigaltstack,
    libc::SYS_signalfd4,
    libc::SYS_socket,
    libc::SYS_socketpair,
    libc::SYS_splice,
    libc::SYS_statfs,
    libc::SYS_statx,
    libc::SYS_symlinkat,
    libc::SYS_sync,
    libc::SYS_syncfs,
    libc::SYS_sysinfo,
    libc::SYS_tee,
    libc::SYS_tgkill,
    libc::SYS_timer_create,
    libc::SYS_timer_delete,
    libc::SYS_timer_getoverrun,
    libc::SYS_timer_gettime,
    libc::SYS_timer_settime,
    libc::SYS_timerfd_create,
    libc::SYS_timerfd_gettime,
    libc::SYS_timerfd_settime,
    libc::SYS_times,
    libc::SYS_tkill,
    libc::SYS_truncate,
    libc::SYS_umask,
    libc::SYS_uname,
    libc::SYS_unlinkat,
    libc::SYS_unshare,
    libc::SYS_utimensat,
    libc::SYS_vmsplice,
    libc::SYS_wait4,
    libc::SYS_waitid,
    libc::SYS_write,
    libc::SYS_writev,
];

/// Calls for programs with their own sandbox, in a user namespace.
const ALLOWED_NESTED: &[i64] = &[
    libc::SYS_chroot,
    libc::SYS_mount,
    libc::SYS_pivot_root,
    libc::SYS_sethostname,
    libc::SYS_umount2,
];

/// Calls that only x86-64 has.
#[cfg(target_arch = "x86_64")]
const ALLOWED_OF_ARCHITECTURE: &[i64] = &[
    libc::SYS_sync_file_range,
    libc::SYS_setrlimit,
    libc::SYS_renameat,
    libc::SYS_getrlimit,
    libc::SYS_fchmodat2,
    libc::SYS_access,
    libc::SYS_alarm,
    libc::SYS_arch_prctl,
    libc::SYS_chmod,
    libc::SYS_chown,
    libc::SYS_creat,
    libc::SYS_dup2,
    libc::SYS_epoll_create,
    libc::SYS_epoll_wait,
    libc::SYS_eventfd,
    libc::SYS_fork,
    libc::SYS_futimesat,
    libc::SYS_getdents,
    libc::SYS_getpgrp,
    libc::SYS_inotify_init,
    libc::SYS_lchown,
    libc::SYS_link,
    libc::SYS_lstat,
    libc::SYS_mkdir,
    libc::SYS_mknod,
    libc::SYS_open,
    libc::SYS_pause,
    libc::SYS_pipe,
    libc::SYS_poll,
    libc::SYS_readlink,
    libc::SYS_rename,
    libc::SYS_rmdir,
    libc::SYS_select,
    libc::SYS_signalfd,
    libc::SYS_stat,
    libc::SYS_symlink,
    libc::SYS_time,
    libc::SYS_unlink,
    libc::SYS_utime,
    libc::SYS_utimes,
    libc::SYS_vfork,
];

/// Calls that only this architecture has.
#[cfg(not(target_arch = "x86_64"))]
const ALLOWED_OF_ARCHITECTURE: &[i64] = &[];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn filters_compile_and_are_small_enough_for_the_kernel() {
        for nested in [false, true] {
            let filters = Filters::compile(nested).unwrap();
            assert!(filters.allowlist.len() < 4096 && filters.arguments.len() < 4096);
        }
    }

    #[test]
    fn allowlist_length_is_bounded() {
        let filters = Filters::compile(false).unwrap();
        assert!(filters.allowlist.len() < 512, "{}", filters.allowlist.len());
    }

    #[test]
    fn calls_that_bypass_the_sandbox_are_not_listed() {
        for call in [
            libc::SYS_mount,
            libc::SYS_umount2,
            libc::SYS_pivot_root,
            libc::SYS_setns,
            libc::SYS_clone3,
            libc::SYS_bpf,
            libc::SYS_perf_event_open,
            libc::SYS_userfaultfd,
            libc::SYS_io_uring_setup,
            libc::SYS_keyctl,
            libc::SYS_add_key,
            libc::SYS_request_key,
            libc::SYS_kexec_load,
            libc::SYS_init_module,
            libc::SYS_open_by_handle_at,
            libc::SYS_fsopen,
            libc::SYS_move_mount,
            libc::SYS_mount_setattr,
            libc::SYS_chroot,
            libc::SYS_syslog,
        ] {
            assert!(
                !ALLOWED.contains(&call) && !ALLOWED_OF_ARCHITECTURE.contains(&call),
                "{call}"
            );
        }
    }
}
