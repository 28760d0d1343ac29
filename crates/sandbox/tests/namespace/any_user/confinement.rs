//! What is visible and allowed in a sandbox, and what is not.

use crate::fixture::{NamespaceFixture, config};
use sandbox::contract::SandboxBackend;

#[test]
fn host_files_are_invisible() {
    let (fixture, id) = NamespaceFixture::with_sandbox();
    assert_eq!(fixture.stdout_of(&id, "ls /home"), "agent\n");
    let root = fixture.stdout_of(&id, "ls /");
    for gone in ["root", "mnt", "boot", "srv", "media"] {
        assert!(!root.lines().any(|name| name == gone), "{root}");
    }
    for secret in [
        "/etc/shadow",
        "/etc/ssh",
        "/etc/sudoers",
        "/etc/ssl/private/x",
    ] {
        let line = format!("test -r {secret} && echo seen || echo hidden");
        assert_eq!(fixture.stdout_of(&id, &line), "hidden\n", "{secret}");
    }
    let mounts = fixture.stdout_of(&id, "cat /proc/self/mountinfo");
    assert!(!mounts.contains("/sys/fs/cgroup"), "{mounts}");
    assert_eq!(fixture.stdout_of(&id, "ls /sys"), "");
}

#[test]
fn host_processes_and_init_are_invisible() {
    let (fixture, id) = NamespaceFixture::with_sandbox();
    let pids = fixture.stdout_of(&id, "ls /proc > /tmp/seen; grep -c '^[0-9]' /tmp/seen");
    // The shell and ls.
    assert_eq!(pids, "2\n");
}

#[test]
fn host_tools_work_and_directories_are_private() {
    let (fixture, id) = NamespaceFixture::with_sandbox();
    assert_eq!(fixture.stdout_of(&id, "echo a | sed s/a/b/"), "b\n");
    for place in [
        "/home/agent",
        "/workspace",
        "/tmp",
        "/run",
        "/var/tmp",
        "/src",
    ] {
        let line = format!("echo x > {place}/f && cat {place}/f");
        assert_eq!(fixture.stdout_of(&id, &line), "x\n", "{place}");
    }
    assert_eq!(fixture.stdout_of(&id, "readlink /src"), "/workspace\n");
    let workspace = fixture.backend.workspace(&id);
    assert_eq!(std::fs::read_to_string(workspace.join("f")).unwrap(), "x\n");
    assert!(!std::path::Path::new("/workspace/f").exists());
}

#[test]
fn two_sandboxes_do_not_see_each_other() {
    let (fixture, one) = NamespaceFixture::with_sandbox();
    let two = config("two");
    fixture.backend.create(&two).unwrap();
    fixture.stdout_of(&one, "echo x > /tmp/mine; sleep 1000 >/dev/null 2>&1 &");
    crate::fixture::until("the sleeper", || fixture.sleepers(&one) == 1);
    assert_eq!(fixture.stdout_of(&two.id, "ls /tmp"), "");
    assert_eq!(fixture.sleepers(&two.id), 0);
}

#[test]
fn calls_that_bypass_the_sandbox_are_refused() {
    let (fixture, id) = NamespaceFixture::with_sandbox();
    fixture.install_probe(&id);
    let printed = fixture.stdout_of(&id, "/tmp/probe forbidden < /dev/null");
    let expected = [
        ("unshare-user", "EPERM"),
        ("unshare-net", "EPERM"),
        ("unshare-high", "EPERM"),
        ("clone-user", "EPERM"),
        ("clone3", "ENOSYS"),
        ("mount", "ENOSYS"),
        ("umount", "ENOSYS"),
        ("setns", "ENOSYS"),
        ("chroot", "ENOSYS"),
        ("io-uring", "ENOSYS"),
        ("keyctl", "ENOSYS"),
        ("add-key", "ENOSYS"),
        ("bpf", "ENOSYS"),
        ("perf", "ENOSYS"),
        ("userfaultfd", "ENOSYS"),
        ("by-handle", "ENOSYS"),
        #[cfg(target_arch = "x86_64")]
        ("x32-mount", "ENOSYS"),
        ("vsock", "EPERM"),
        ("packet", "EPERM"),
        ("alg", "EPERM"),
        ("raw", "EPERM"),
        ("raw6", "EPERM"),
        ("bluetooth", "EPERM"),
        ("xdp", "EPERM"),
        ("mknod-block", "EPERM"),
        ("pivot-root", "ENOSYS"),
        ("open-tree", "ENOSYS"),
        ("fsopen", "ENOSYS"),
        ("syslog", "ENOSYS"),
        ("reboot", "ENOSYS"),
        ("settime", "ENOSYS"),
        ("sethostname", "ENOSYS"),
        ("swapon", "ENOSYS"),
        ("quotactl", "ENOSYS"),
        ("fanotify", "ENOSYS"),
        ("netlink-audit", "EPERM"),
        ("netlink-route", "done"),
        ("inet", "done"),
        ("tiocsti", "EPERM"),
        ("tiocsti-high", "EPERM"),
        ("tioclinux", "EPERM"),
        ("prlimit-init", "EPERM"),
        ("prlimit-other", "EPERM"),
        ("prlimit-other-high", "EPERM"),
        ("prlimit-own", "done"),
        ("adjtime", "EPERM"),
        // Regression test for issue 14, item 3.
        ("sched-setscheduler", "EPERM"),
        ("sched-setparam", "EPERM"),
        ("sched-setattr", "EPERM"),
    ];
    let answer = |name: &str| {
        printed
            .lines()
            .find_map(|line| line.strip_prefix(name)?.strip_prefix(": "))
            .unwrap_or_else(|| panic!("{name} was not tried: {printed}"))
    };
    for (name, wanted) in expected {
        assert_eq!(answer(name), wanted, "{name}");
    }
    for name in [
        "ptrace-init",
        "process-vm-init",
        "pidfd-getfd-init",
        "/proc/1/oom_score_adj",
        "/proc/self/uid_map",
        "/proc/self/setgroups",
        "/proc/sys/kernel/core_pattern",
        "/proc/sys/kernel/hostname",
        "/proc/sys/net/ipv4/ip_forward",
        "/proc/sysrq-trigger",
        "/proc/1/mem",
        "/proc/1/environ",
        "/dev/mem",
        "/dev/kmsg",
    ] {
        assert_ne!(answer(name), "done", "{name}");
    }
}

#[test]
fn a_process_has_no_privilege_and_cannot_get_any() {
    let (fixture, id) = NamespaceFixture::with_sandbox();
    let status = fixture.stdout_of(&id, "cat /proc/self/status");
    for line in [
        "CapInh:\t0000000000000000",
        "CapPrm:\t0000000000000000",
        "CapEff:\t0000000000000000",
        "CapBnd:\t0000000000000000",
        "CapAmb:\t0000000000000000",
        "NoNewPrivs:\t1",
        "Seccomp:\t2",
    ] {
        assert!(status.contains(line), "{line}: {status}");
    }
    // A third filter where init supervises `setsid`.
    let filters = ["Seccomp_filters:\t2", "Seccomp_filters:\t3"];
    assert!(filters.iter().any(|line| status.contains(line)), "{status}");
    assert_eq!(fixture.stdout_of(&id, "ulimit -c"), "0\n");
    let tried = fixture.shell(&id, "unshare -U true || mount -t tmpfs x /tmp");
    assert_ne!(tried.exit_code, 0);
}

#[test]
fn killing_everything_does_not_kill_init() {
    let (fixture, id) = NamespaceFixture::with_sandbox();
    fixture.shell(
        &id,
        "kill -9 1; kill -TERM 1; kill -HUP 1; kill -STOP 1; kill -9 -1",
    );
    assert_eq!(fixture.stdout_of(&id, "echo alive"), "alive\n");
}
