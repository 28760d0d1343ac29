//! Host paths and root file systems of a sandbox.

use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use sandbox::contract::{SandboxBackend, SandboxCommand};

use sandbox::namespace::survey::SurveyStatus;

use crate::fixture::{NamespaceFixture, config, text};

/// A directory of tools, with a file that others may not read.
fn toolchain() -> tempfile::TempDir {
    let directory = tempfile::tempdir().unwrap();
    let at = |name: &str| directory.path().join(name);
    set_mode(directory.path(), 0o755);
    for (name, mode) in [("bin", 0o755), ("private", 0o700)] {
        std::fs::create_dir(at(name)).unwrap();
        set_mode(&at(name), mode);
    }
    for (name, content, mode) in [
        ("bin/tool", "#!/bin/sh\necho works\n", 0o755),
        ("bin/token", "secret", 0o600),
        ("private/key", "secret", 0o644),
    ] {
        std::fs::write(at(name), content).unwrap();
        set_mode(&at(name), mode);
    }
    directory
}

fn set_mode(path: &Path, mode: u32) {
    std::fs::set_permissions(path, Permissions::from_mode(mode)).unwrap();
}

#[test]
fn host_path_is_visible_under_the_same_path() {
    let fixture = NamespaceFixture::new();
    let tools = toolchain();
    let path = tools.path().display().to_string();
    let id = fixture.create("one", |config| {
        config.system.host_paths = vec![tools.path().to_owned()];
    });
    assert_eq!(
        fixture.stdout_of(&id, &format!("{path}/bin/tool")),
        "works\n"
    );
    let mounts = fixture.stdout_of(&id, "cat /proc/self/mountinfo");
    let line = mounts.lines().find(|line| line.contains(&path)).unwrap();
    assert!(line.contains("nosuid,nodev"), "{line}");
    assert!(line.contains(" - overlay "), "{line}");
}

#[test]
fn closed_files_in_a_host_path_stay_closed() {
    let fixture = NamespaceFixture::new();
    let tools = toolchain();
    let path = tools.path().display().to_string();
    let id = fixture.create("one", |config| {
        config.system.host_paths = vec![tools.path().to_owned()];
    });
    for name in ["bin/token", "private/key"] {
        let tried = fixture.shell(&id, &format!("cat {path}/{name}"));
        assert_ne!(tried.exit_code, 0, "{}", text(&tried.stdout));
        assert_eq!(tried.stdout, b"");
    }
}

#[test]
fn socket_in_a_host_path_is_unreachable() {
    let fixture = NamespaceFixture::new();
    let tools = toolchain();
    let socket = tools.path().join("bin/socket");
    let _listener = std::os::unix::net::UnixListener::bind(&socket).unwrap();
    set_mode(&socket, 0o777);
    let id = fixture.create("one", |config| {
        config.system.host_paths = vec![tools.path().to_owned()];
    });
    fixture.install_probe(&id);
    let line = format!("/tmp/probe reach {}", socket.display());
    assert_ne!(fixture.stdout_of(&id, &line), "done\n");
    // The probe reaches an existing socket.
    assert_eq!(
        fixture.stdout_of(&id, "/tmp/probe reach-own /tmp/s"),
        "done\n"
    );
}

#[test]
fn linked_host_path_is_resolved_once_on_the_host() {
    let fixture = NamespaceFixture::new();
    let tools = toolchain();
    let directory = tempfile::tempdir().unwrap();
    let link = directory.path().join("tools");
    std::os::unix::fs::symlink(tools.path(), &link).unwrap();
    let id = fixture.create("one", |config| {
        config.system.host_paths = vec![link.clone()];
    });
    let line = format!("{}/bin/tool", link.display());
    assert_eq!(fixture.stdout_of(&id, &line), "works\n");
    let line = format!("ls {} 2>/dev/null || echo hidden", tools.path().display());
    assert_eq!(fixture.stdout_of(&id, &line), "hidden\n");
}

#[test]
fn invalid_host_path_is_an_error_and_creates_nothing() {
    let fixture = NamespaceFixture::new();
    let state = fixture.directory.path().join("sandboxes");
    std::fs::create_dir(&state).unwrap();
    for (path, why) in [
        ("/proc/self".into(), "nothing of /proc can be exposed"),
        ("relative".into(), "absolute"),
        ("/no/such/place".into(), "no such directory"),
        (state, "the gate's state directory"),
    ] {
        let mut config = config("one");
        config.system.host_paths = vec![path];
        let error = fixture.backend.create(&config).unwrap_err().to_string();
        assert!(error.contains(why), "{error}");
        assert!(!fixture.directory.path().join("sandboxes/one").exists());
    }
}

/// A tree with one program, a link at a path that init writes, and an account of its own.
fn busybox() -> tempfile::TempDir {
    let directory = tempfile::tempdir().unwrap();
    let at = |name: &str| directory.path().join(name);
    set_mode(directory.path(), 0o755);
    for name in ["bin", "etc"] {
        std::fs::create_dir(at(name)).unwrap();
        set_mode(&at(name), 0o755);
    }
    std::fs::copy("/bin/busybox", at("bin/busybox"))
        .unwrap_or_else(|error| panic!("install busybox-static: {error}"));
    for name in ["sh", "cat", "ls", "id", "touch", "rm", "stat"] {
        std::os::unix::fs::symlink("busybox", at("bin").join(name)).unwrap();
    }
    std::os::unix::fs::symlink("/run/elsewhere", at("etc/resolv.conf")).unwrap();
    let accounts = "root:x:0:0::/:/bin/sh\nmail:x:8:8::/:/bin/false\nagent:x:7:7::/:/bin/false\n";
    std::fs::write(at("etc/passwd"), accounts).unwrap();
    set_mode(&at("etc/passwd"), 0o644);
    directory
}

#[test]
fn rootfs_is_the_root_directory() {
    let fixture = NamespaceFixture::new();
    let tree = busybox();
    let id = fixture.create("one", |config| {
        config.system.rootfs = Some(tree.path().to_owned());
    });
    assert_eq!(
        fixture.stdout_of(&id, "ls -1 / /usr 2>/dev/null || :"),
        "/:\nbin\ndev\netc\nhome\nproc\nrun\nsrc\nsys\ntmp\nworkspace\n"
    );
    assert_eq!(
        fixture.stdout_of(&id, "cat /etc/resolv.conf"),
        "nameserver 192.0.0.1\n"
    );
    assert_eq!(fixture.stdout_of(&id, "cat /etc/hostname"), "one\n");
    assert!(
        fixture
            .stdout_of(&id, "id")
            .starts_with("uid=1000(agent) gid=1000(agent)")
    );
    let accounts = fixture.stdout_of(&id, "cat /etc/passwd");
    assert_eq!(accounts.matches("\nagent:").count(), 1, "{accounts}");
    assert!(accounts.contains("mail:x:8:8"), "{accounts}");
    for directory in ["/home/agent", "/workspace", "/tmp", "/run", "/src"] {
        let line = format!("echo x > {directory}/f && cat {directory}/f");
        assert_eq!(fixture.stdout_of(&id, &line), "x\n", "{directory}");
    }
    let workspace = fixture.backend.workspace(&id);
    assert_eq!(std::fs::read_to_string(workspace.join("f")).unwrap(), "x\n");
    // The tree itself is unchanged.
    let names = |path: PathBuf| std::fs::read_dir(path).unwrap().count();
    assert_eq!(names(tree.path().to_owned()), 2);
    assert_eq!(names(tree.path().join("etc")), 2);
    // A terminal, /proc and the network work there as well.
    let seen = fixture.stdout_of(&id, "cat /proc/1/environ 2>/dev/null || echo hidden");
    assert_eq!(seen, "hidden\n");
}

#[test]
fn host_path_is_visible_in_a_rootfs() {
    let fixture = NamespaceFixture::new();
    let (tree, tools) = (busybox(), toolchain());
    let id = fixture.create("one", |config| {
        config.system.rootfs = Some(tree.path().to_owned());
        config.system.host_paths = vec![tools.path().to_owned()];
    });
    let command = SandboxCommand::new([tools.path().join("bin/tool")]);
    assert_eq!(
        fixture.backend.exec(&id, &command).unwrap().stdout,
        b"works\n"
    );
}

#[test]
fn survey_reports_features_and_leaves_nothing() {
    let fixture = NamespaceFixture::new();
    let found = fixture.backend.survey().unwrap();
    for what in [
        "user namespaces",
        "overlay in a user namespace",
        "a new /proc",
    ] {
        let one = found.iter().find(|one| one.what == what).unwrap();
        assert_eq!(one.status, SurveyStatus::Ok, "{one:?}");
    }
    let left = std::fs::read_dir(fixture.directory.path().join("sandboxes")).unwrap();
    assert_eq!(left.count(), 0);
}

#[test]
fn missing_landlock_is_one_warning() {
    let (fixture, id) = NamespaceFixture::with_sandbox();
    let printed = fixture.backend.warnings(&id).unwrap();
    let printed = printed
        .iter()
        .filter(|one| one.starts_with("landlock"))
        .count();
    let found = fixture.backend.survey().unwrap();
    let landlock = found.iter().find(|one| one.what == "landlock").unwrap();
    assert_eq!(
        printed == 0,
        landlock.status == SurveyStatus::Ok,
        "{landlock:?}"
    );
}

#[test]
fn user_namespaces_need_the_nested_option() {
    let fixture = NamespaceFixture::new();
    let plain = fixture.create("plain", |_| {});
    let nested = fixture.create("nested", |config| config.system.nested = true);
    let line = "unshare -Urm sh -c 'id -u && mount -t tmpfs x /tmp && echo mounted'";
    assert_ne!(fixture.shell(&plain, line).exit_code, 0);
    assert_eq!(fixture.stdout_of(&nested, line), "0\nmounted\n");
    let line = "unshare -Urpfmn --mount-proc true";
    // A new /proc would show what the sandbox's hides.
    assert_ne!(fixture.shell(&nested, line).exit_code, 0);
    for line in [
        "mount -t tmpfs x /tmp",
        "unshare -Urm umount /proc/sys",
        "unshare -Urm umount -l /proc",
        "unshare -Urm mount -o remount,rw /proc/sys",
        "unshare -Urm sh -c 'echo x > /proc/sys/kernel/core_pattern'",
        "unshare -Ur sh -c 'kill -0 1 && cat /proc/1/environ'",
        "unshare -Ur nsenter -t 1 -m true",
        "unshare -Ur cat /proc/kcore",
    ] {
        let tried = fixture.shell(&nested, line);
        assert!(
            tried.exit_code != 0 || tried.stdout.is_empty() && line.contains("kcore"),
            "{line}: {tried:?}"
        );
    }
    fixture.install_probe(&nested);
    let printed = fixture.stdout_of(&nested, "/tmp/probe forbidden < /dev/null");
    for refused in [
        "clone3: ENOSYS",
        "setns: ENOSYS",
        "fsopen: ENOSYS",
        "open-tree: ENOSYS",
        "io-uring: ENOSYS",
        "keyctl: ENOSYS",
        "bpf: ENOSYS",
        "perf: ENOSYS",
        "userfaultfd: ENOSYS",
        "by-handle: ENOSYS",
        "vsock: EPERM",
        "packet: EPERM",
        "tiocsti: EPERM",
        "tioclinux: EPERM",
        "prlimit-init: EPERM",
    ] {
        assert!(
            printed.lines().any(|line| line == refused),
            "{refused}: {printed}"
        );
    }
}

#[test]
fn root_without_subordinate_ids_is_an_error_with_alternatives() {
    if nix::unistd::Uid::effective().is_root() {
        return;
    }
    let fixture = NamespaceFixture::new();
    let mut config = config("one");
    config.system.root = true;
    let error = fixture.backend.create(&config).unwrap_err().to_string();
    assert!(
        error.contains("--root") && error.contains("virtual environment"),
        "{error}"
    );
}
