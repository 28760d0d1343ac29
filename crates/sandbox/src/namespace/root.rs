//! What the agent sees as `/`.
//!
//! ```text
//!   /                 root/         the sandbox's own directory, on disk
//!   /usr /opt /bin …  overlay       lower: the host's; upper: the sandbox's own
//!   /etc              root/etc      files of an allowlist, and what we write ourselves
//!   /home/agent /tmp /run /var /workspace     the sandbox's own
//!   /dev              tmpfs         six devices, a devpts of its own
//!   /proc             proc          fresh, masked, other people's processes hidden
//! ```
//!
//! No home of the host, no `/sys`, no socket of the host. Where the kernel refuses an overlay
//! in a user namespace, a read-only bind takes its place and a warning says so.
//!
//! All paths are relative to the sandbox's `fs` directory, which is the working directory:
//! init may lack the right to walk there from `/`, and no mount option needs escaping.

use std::fs::{DirBuilder, create_dir_all, write};
use std::io::{Error, ErrorKind};
use std::os::fd::OwnedFd;
use std::os::unix::fs::{DirBuilderExt, PermissionsExt, chown, symlink};
use std::path::Path;

use nix::fcntl::{OFlag, open};
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sys::stat::Mode;
use nix::unistd::{chdir, pivot_root};

use super::identity::{AGENT_GID, AGENT_UID};
use super::protocol::Identity;
use super::step::{Step, Stumble};

/// Directories of the host that are there inside, changeable where overlays work.
const LAYERS: &[&str] = &[
    "usr", "opt", "bin", "sbin", "lib", "lib32", "lib64", "libx32",
];

/// Files of `/etc` that say how programs work and nothing about the operator.
const ETC_FILES: &[&str] = &[
    "bash.bashrc",
    "ca-certificates.conf",
    "debian_version",
    "inputrc",
    "ld.so.cache",
    "ld.so.conf",
    "localtime",
    "login.defs",
    "magic",
    "mime.types",
    "os-release",
    "profile",
    "protocols",
    "redhat-release",
    "rpc",
    "services",
    "shells",
    "timezone",
];

/// Directories of `/etc` of the same kind.
const ETC_LAYERS: &[&str] = &[
    "alternatives",
    "ca-certificates",
    "crypto-policies",
    "fonts",
    "java-11-openjdk",
    "java-17-openjdk",
    "java-21-openjdk",
    "ld.so.conf.d",
    "perl",
    "pki",
    "python3",
    "ssl",
    "terminfo",
];

/// The sandbox's own places, and their modes.
const PRIVATE: &[(&str, u32)] = &[
    ("home/agent", 0o755),
    ("workspace", 0o755),
    ("tmp", 0o1777),
    ("run", 0o755),
    ("var", 0o755),
    ("var/tmp", 0o1777),
    ("var/cache", 0o755),
    ("var/lib", 0o755),
    ("var/log", 0o755),
];

const DEVICES: &[&str] = &["null", "zero", "full", "random", "urandom", "tty"];

/// Files of `/proc` that tell about the host or steer it.
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

/// Directories of `/proc` that may be looked at; writing is for the host.
const PROC_READ_ONLY: &[&str] = &["sys", "bus", "fs", "irq", "acpi", "scsi", "driver", "tty"];

/// What comes out of building the tree.
pub(crate) struct Root {
    /// What is weaker than it could be.
    pub(crate) warnings: Vec<String>,
    /// A `/proc` in which nothing is hidden, for init alone: it has no name anywhere.
    pub(crate) proc: OwnedFd,
}

/// Builds the tree and makes it `/`.
pub(crate) fn enter(identity: Identity, host_name: &str) -> Result<Root, Stumble> {
    let none = None::<&str>;
    mount(none, "/", none, MsFlags::MS_REC | MsFlags::MS_PRIVATE, none)
        .step("making mounts private")?;
    for place in ["root", "upper", "work"] {
        make_directory(Path::new(place), 0o755).step("making the root directory")?;
    }
    mount(Some("root"), "root", none, MsFlags::MS_BIND, none).step("mounting the root")?;
    remount("root", MsFlags::MS_NOSUID | MsFlags::MS_NODEV).step("mounting the root nosuid")?;
    // The working directory is still under the mount; its entries are looked up anew.
    fill(identity, host_name).step("filling the root directory")?;
    let mut warnings = Vec::new();
    for layer in LAYERS {
        add_layer(layer, layer, &mut warnings)?;
    }
    for layer in ETC_LAYERS {
        let path = format!("etc/{layer}");
        add_layer(&path, &path.replace('/', "-"), &mut warnings)?;
    }
    mount_dev(identity)?;
    let proc = mount_proc()?;
    pivot()?;
    Ok(Root { warnings, proc })
}

fn make_directory(path: &Path, mode: u32) -> Result<(), Error> {
    match DirBuilder::new().mode(mode).create(path) {
        Err(error) if error.kind() != ErrorKind::AlreadyExists => Err(error),
        _ => std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)),
    }
}

/// Writes what is ours. The tree is new each time (`mkdir` of `fs` insists on it): no agent has
/// put a link where we write, and a restart that reuses a tree must not come through here.
fn fill(identity: Identity, host_name: &str) -> Result<(), Error> {
    let root = Path::new("root");
    for place in ["home", "dev", "proc", "sys", "etc"] {
        make_directory(&root.join(place), 0o755)?;
    }
    for (place, mode) in PRIVATE {
        let path = root.join(place);
        make_directory(&path, *mode)?;
        if matches!(identity, Identity::Range { .. }) {
            chown(&path, Some(AGENT_UID), Some(AGENT_GID))?;
        }
    }
    for (target, link) in [("/workspace", "src"), ("/run", "var/run")] {
        match symlink(target, root.join(link)) {
            Err(error) if error.kind() != ErrorKind::AlreadyExists => return Err(error),
            _ => {}
        }
    }
    let etc = root.join("etc");
    for name in ETC_FILES {
        // What is not there, or not for everybody's eyes, stays out.
        let from = Path::new("/etc").join(name);
        if from
            .metadata()
            .is_ok_and(|data| data.is_file() && data.permissions().mode() & 0o004 != 0)
            && let Ok(bytes) = std::fs::read(&from)
        {
            write(etc.join(name), bytes)?;
        }
    }
    let account = format!(
        "root:x:0:0:root:/root:/bin/sh\n\
         agent:x:{AGENT_UID}:{AGENT_GID}:agent:/home/agent:/bin/sh\n\
         nobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n"
    );
    write(etc.join("passwd"), account)?;
    write(
        etc.join("group"),
        format!("root:x:0:\ntty:x:5:\nagent:x:{AGENT_GID}:\nnogroup:x:65534:\n"),
    )?;
    write(etc.join("hostname"), format!("{host_name}\n"))?;
    write(
        etc.join("hosts"),
        format!("127.0.0.1 localhost {host_name}\n::1 localhost {host_name}\n"),
    )?;
    // Any address would do: the gate answers for all of them.
    write(etc.join("resolv.conf"), "nameserver 192.0.0.1\n")?;
    write(
        etc.join("nsswitch.conf"),
        "passwd: files\ngroup: files\nshadow: files\nhosts: files dns\n\
         networks: files\nprotocols: files\nservices: files\n",
    )
}

/// Puts a directory of the host where it belongs: as an overlay, else read-only.
fn add_layer(path: &str, name: &str, warnings: &mut Vec<String>) -> Result<(), Stumble> {
    let host = Path::new("/").join(path);
    let inside = Path::new("root").join(path);
    let Ok(found) = host.symlink_metadata() else {
        return Ok(());
    };
    let says = |what: &str| format!("{what} {}", host.display());
    if found.is_symlink() {
        // `/bin -> usr/bin`: the same link inside.
        return match std::fs::read_link(&host).and_then(|target| symlink(target, &inside)) {
            Err(error) if error.kind() != ErrorKind::AlreadyExists => {
                Err(error).step(&says("linking"))
            }
            _ => Ok(()),
        };
    }
    if !found.is_dir() || found.permissions().mode() & 0o005 != 0o005 {
        return Ok(());
    }
    create_dir_all(&inside).step(&says("making"))?;
    let (upper, work) = (format!("upper/{name}"), format!("work/{name}"));
    for own in [&upper, &work] {
        make_directory(Path::new(own), 0o755).step(&says("making a layer for"))?;
    }
    let options = format!(
        "lowerdir={},upperdir={upper},workdir={work},userxattr",
        host.display()
    );
    let flags = MsFlags::MS_NOSUID | MsFlags::MS_NODEV;
    let overlay = mount(
        Some("overlay"),
        &inside,
        Some("overlay"),
        flags,
        Some(options.as_str()),
    );
    if let Err(errno) = overlay {
        let none = None::<&str>;
        mount(Some(&host), &inside, none, MsFlags::MS_BIND, none).step(&says("mounting"))?;
        remount(&inside, flags | MsFlags::MS_RDONLY).step(&says("mounting read-only"))?;
        warnings.push(format!(
            "{} is read-only: the kernel refused an overlay ({errno})",
            host.display()
        ));
    }
    Ok(())
}

/// Changes the flags of a bind. What the host's mount had locked has to be said again, or
/// the kernel refuses.
fn remount<P: AsRef<Path> + ?Sized>(path: &P, flags: MsFlags) -> nix::Result<()> {
    let path = path.as_ref();
    let bind = MsFlags::MS_BIND | MsFlags::MS_REMOUNT;
    let none = None::<&str>;
    let locked = nix::sys::statvfs::statvfs(path).map_or(MsFlags::empty(), |found| {
        use nix::sys::statvfs::FsFlags;
        [
            (FsFlags::ST_RDONLY, MsFlags::MS_RDONLY),
            (FsFlags::ST_NOSUID, MsFlags::MS_NOSUID),
            (FsFlags::ST_NODEV, MsFlags::MS_NODEV),
            (FsFlags::ST_NOEXEC, MsFlags::MS_NOEXEC),
            (FsFlags::ST_NOATIME, MsFlags::MS_NOATIME),
            (FsFlags::ST_NODIRATIME, MsFlags::MS_NODIRATIME),
            (FsFlags::ST_RELATIME, MsFlags::MS_RELATIME),
        ]
        .into_iter()
        .filter(|(has, _)| found.flags().contains(*has))
        .fold(MsFlags::empty(), |all, (_, flag)| all | flag)
    });
    mount(none, path, none, bind | flags | locked, none)
}

fn mount_dev(identity: Identity) -> Result<(), Stumble> {
    let none = None::<&str>;
    let quiet = MsFlags::MS_NOSUID | MsFlags::MS_NOEXEC;
    mount(
        Some("tmpfs"),
        "root/dev",
        Some("tmpfs"),
        quiet,
        Some("mode=0755,size=64k"),
    )
    .step("mounting /dev")?;
    for device in DEVICES {
        let inside = format!("root/dev/{device}");
        let host = format!("/dev/{device}");
        write(&inside, "").step("making a device's place")?;
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
        symlink(target, format!("root/dev/{link}")).step("linking in /dev")?;
    }
    for (place, mode) in [("root/dev/pts", 0o755), ("root/dev/shm", 0o1777)] {
        make_directory(Path::new(place), mode).step("making a directory in /dev")?;
    }
    mount(
        Some("devpts"),
        "root/dev/pts",
        Some("devpts"),
        quiet,
        Some("newinstance,ptmxmode=0666,mode=0600"),
    )
    .step("mounting /dev/pts")?;
    let owner = match identity {
        Identity::Range { .. } => 0,
        Identity::Single => AGENT_UID,
    };
    mount(
        Some("tmpfs"),
        "root/dev/shm",
        Some("tmpfs"),
        quiet | MsFlags::MS_NODEV,
        Some(format!("mode=1777,size=256m,uid={owner}").as_str()),
    )
    .step("mounting /dev/shm")?;
    let tight = quiet | MsFlags::MS_RDONLY;
    mount(none, "root/dev", none, MsFlags::MS_REMOUNT | tight, none).step("closing /dev")
}

fn mount_proc() -> Result<OwnedFd, Stumble> {
    let none = None::<&str>;
    let quiet = MsFlags::MS_NOSUID | MsFlags::MS_NODEV | MsFlags::MS_NOEXEC;
    let fresh = |options| {
        mount(
            Some("proc"),
            "root/proc",
            Some("proc"),
            quiet,
            Some(options),
        )
        .step("mounting /proc (inside a container this needs an unmasked /proc outside)")
    };
    // Init has to see every process to end it, also one that made itself undumpable, which
    // `hidepid` would hide from an init of the same id. So it keeps an instance of its own,
    // open and mounted nowhere.
    fresh("")?;
    let flags = OFlag::O_RDONLY | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC;
    let proc = open("root/proc", flags, Mode::empty()).step("opening /proc")?;
    umount2("root/proc", MntFlags::MNT_DETACH).step("hiding init's /proc")?;
    fresh("hidepid=2")?;
    for name in PROC_READ_ONLY {
        let path = format!("root/proc/{name}");
        if Path::new(&path).exists() {
            mount(
                Some(path.as_str()),
                path.as_str(),
                none,
                MsFlags::MS_BIND,
                none,
            )
            .step("masking /proc")?;
            remount(path.as_str(), quiet | MsFlags::MS_RDONLY).step("masking /proc")?;
        }
    }
    for name in PROC_MASKED {
        let path = format!("root/proc/{name}");
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
    Ok(proc)
}

/// Makes `root` the root, and the host's tree unreachable.
fn pivot() -> Result<(), Stumble> {
    chdir("root").step("entering the root")?;
    // The old root is stacked on the new one and taken off again: no directory is needed.
    pivot_root(".", ".").step("pivoting")?;
    umount2(".", MntFlags::MNT_DETACH).step("leaving the host's tree")?;
    chdir("/").step("entering the root")
}
