//! Builds the sandbox's root file system.
//!
//! ```text
//!   /                 root/         the sandbox's own directory, on disk
//!   /usr /opt /bin …  overlay       lower: the host's; upper: the sandbox's own
//!   host paths        overlay       the same, at the path on the host
//!   /etc              tmpfs         allowlisted files, and files that init writes
//!   /etc/ssl …        overlay       the host's, with trusted certificates above (`trust.rs`)
//!   /etc/palisade     bind          trusted certificates, read-only
//!   /home/agent /tmp /run /var /workspace     the sandbox's own
//!   /dev              tmpfs         six devices, a devpts of its own
//!   /proc             proc          new, masked, processes of other ids hidden
//! ```
//!
//! With a `rootfs`, `/` is an overlay over that tree, and `/home/agent`, `/workspace`, `/tmp` and
//! `/run` are binds of the same directories of `root/`. Files that init writes are put into its
//! upper layer before it is mounted: no link in that tree is ever followed.
//!
//! `/etc` is created anew by every start and not written to disk. Exception: for an agent that is
//! root and may install packages, `/etc` is the directory `root/etc` on disk, and the directories
//! of `/etc` have upper layers like those of the system.
//!
//! No home directory of the host, no `/sys` and no socket of the host is visible. If the kernel
//! refuses an overlay in a user namespace, a read-only bind is used with a warning.
//!
//! All paths are relative to the sandbox's `fs` directory, which is the working directory: init may
//! have no permission for the path from `/`, and mount options need no escaping.

mod kernel;
mod trusted;

use std::fs::{DirBuilder, write};
use std::io::{Error, ErrorKind};
use std::os::fd::OwnedFd;
use std::os::unix::fs::{DirBuilderExt, PermissionsExt, chown, symlink};
use std::path::{Component, Path, PathBuf};

use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::unistd::{chdir, pivot_root};

use super::hidden_paths;
use super::identity::{AGENT_GID, AGENT_UID, Account};
use super::layer::{self, Layer, Layers};
use super::protocol::{Identity, LaunchSpec};
use super::step::{Step, StepError};
use super::trust::renewal::TrustFiles;
use super::trust::{self, TrustStaging};

/// Files of `/etc` that configure programs and have no data about the operator.
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

/// The sandbox's own directories, and their modes.
const PRIVATE_DIRECTORIES: &[(&str, u32)] = &[
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

/// The number of these directories that are mounted into a `rootfs`, which has its own `/var`.
const PRIVATE_COUNT_IN_ROOTFS: usize = 4;

/// The content of `/etc/passwd`.
const ACCOUNTS: &str = "root:x:0:0:root:/root:/bin/sh\n\
    agent:x:1000:1000:agent:/home/agent:/bin/sh\n\
    nobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n";

/// The content of `/etc/group`.
const GROUPS: &str = "root:x:0:\ntty:x:5:\nagent:x:1000:\nnogroup:x:65534:\n";

const _: () = assert!(AGENT_UID == 1000 && AGENT_GID == 1000, "as in ACCOUNTS");

/// An empty directory as a second lower layer, because a read-only overlay needs two lower layers.
const EMPTY_DIRECTORY: &str = "lower/nothing";

/// The result of building the root file system.
pub(crate) struct Root {
    /// Whether Java was found, and a trust store for it written.
    pub(crate) has_java: bool,
    /// The files with additional trusted certificates, which can be extended.
    pub(crate) trust: Option<TrustFiles>,
    /// Warnings about missing protections.
    pub(crate) warnings: Vec<String>,
    /// An unmasked `/proc` for init, which has no path in the sandbox.
    pub(crate) proc: OwnedFd,
}

/// The root file system under construction.
struct RootTree<'a> {
    identity: Identity,
    agent: Account,
    host_name: &'a str,
    /// The directory that becomes `/`.
    base: &'static str,
    /// Whether the agent is root and may change the system.
    may_install: bool,
    /// The additional trusted certificates.
    staging: Option<TrustStaging>,
    warnings: Vec<String>,
}

/// Builds the root file system and makes it `/`.
pub(crate) fn enter(spec: &LaunchSpec, mut layers: Layers) -> Result<Root, StepError> {
    let none = None::<&str>;
    mount(none, "/", none, MsFlags::MS_REC | MsFlags::MS_PRIVATE, none)
        .step("making mounts private")?;
    for place in ["root", "upper", "work", "lower"] {
        make_directory(Path::new(place), 0o755).step("creating the root directory")?;
    }
    // These mount points are not visible in the sandbox, so they are on a tmpfs and not written to
    // disk.
    let restricted = MsFlags::MS_NOSUID | MsFlags::MS_NODEV | MsFlags::MS_NOEXEC;
    mount(
        Some("tmpfs"),
        "lower",
        Some("tmpfs"),
        restricted,
        Some("mode=0755,size=16m"),
    )
    .step("creating mount points for layers")?;
    make_directory(Path::new(EMPTY_DIRECTORY), 0o755).step("creating mount points for layers")?;
    let trust = spec.config.trust.as_ref();
    let staging = trust.map(|trust| TrustStaging::fill(trust, &mut layers, EMPTY_DIRECTORY));
    let mut tree = RootTree {
        identity: spec.identity,
        agent: spec.agent(),
        host_name: spec.config.name.as_str(),
        base: "root",
        may_install: spec.config.system.root,
        staging: staging
            .transpose()
            .step("writing the trusted certificates")?,
        warnings: layers.warnings.clone(),
    };
    match &layers.rootfs {
        None => tree.use_host_directories(&layers.links)?,
        Some(rootfs) => tree.use_rootfs(rootfs, &layers)?,
    }
    for layer in &layers.layers {
        tree.add_layer(layer)?;
    }
    let has_java = tree.add_trust().step("mounting the trusted certificates")?;
    let files = tree
        .staging
        .take()
        .map(TrustStaging::into_files)
        .transpose();
    let files = files.step("opening the trusted certificates")?;
    kernel::mount_dev(tree.base, tree.identity)?;
    // With `--nested`, `/proc` must be writable, because programs that create user namespaces write
    // their id maps there.
    let is_read_only = spec.lowers_session_weights && !spec.config.system.nested;
    let proc = kernel::mount_proc(tree.base, is_read_only)?;
    pivot(tree.base)?;
    Ok(Root {
        has_java,
        trust: files,
        warnings: tree.warnings,
        proc,
    })
}

fn make_directory(path: &Path, mode: u32) -> Result<(), Error> {
    match DirBuilder::new().mode(mode).create(path) {
        // Init's umask does not clear the bits of such a mode, so no chmod is needed, which would
        // be a write to disk.
        Ok(()) if mode & 0o022 == 0 => Ok(()),
        Err(error) if error.kind() != ErrorKind::AlreadyExists => Err(error),
        _ => std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)),
    }
}

/// Creates a directory and its parents below another one, through no link.
fn create_mount_point(base: &Path, inside: &Path) -> Result<PathBuf, Error> {
    let mut path = base.to_owned();
    for part in inside.components() {
        let Component::Normal(part) = part else {
            return Err(Error::from(ErrorKind::InvalidInput));
        };
        path.push(part);
        match path.symlink_metadata() {
            Ok(found) if found.is_dir() => {}
            Ok(_) => {
                return Err(Error::other(format!(
                    "{} is a link or a file in the sandbox; use a path without links",
                    Path::new("/")
                        .join(path.strip_prefix(base).unwrap_or(&path))
                        .display()
                )));
            }
            Err(error) if error.kind() == ErrorKind::NotFound => make_directory(&path, 0o755)?,
            Err(error) => return Err(error),
        }
    }
    Ok(path)
}

impl RootTree<'_> {
    /// Uses the sandbox's own directory as `/`, with the host's directories in it.
    fn use_host_directories(&mut self, links: &[(PathBuf, PathBuf)]) -> Result<(), StepError> {
        let none = None::<&str>;
        mount(Some("root"), "root", none, MsFlags::MS_BIND, none).step("mounting the root")?;
        remount("root", MsFlags::MS_NOSUID | MsFlags::MS_NODEV).step("mounting the root nosuid")?;
        // The working directory is still below the mount; its entries are resolved again.
        let root = Path::new("root");
        if !self.may_install {
            make_directory(&root.join("etc"), 0o755).step("filling the root directory")?;
            mount(
                Some("tmpfs"),
                "root/etc",
                Some("tmpfs"),
                MsFlags::MS_NOSUID | MsFlags::MS_NODEV,
                Some("mode=0755,size=8m,nr_inodes=4k"),
            )
            .step("mounting /etc")?;
        }
        self.write_init_files(root)
            .step("filling the root directory")?;
        self.create_private_directories(root, PRIVATE_DIRECTORIES)
            .step("filling the root directory")?;
        copy_etc(root).step("filling the root directory")?;
        for (target, link) in links
            .iter()
            .map(|(link, target)| (target.as_path(), link.as_path()))
            .chain([(Path::new("/run"), Path::new("var/run"))])
        {
            symlink(target, root.join(link)).step("linking in the root directory")?;
        }
        Ok(())
    }

    /// Uses a `rootfs` as `/`, with the sandbox's own directories in it.
    fn use_rootfs(&mut self, rootfs: &Layer, layers: &Layers) -> Result<(), StepError> {
        const FILLING: &str = "filling the root directory";
        let root = Path::new("root");
        let places = PRIVATE_DIRECTORIES
            .get(..PRIVATE_COUNT_IN_ROOTFS)
            .unwrap_or(PRIVATE_DIRECTORIES);
        create_mount_point(root, Path::new("home")).step(FILLING)?;
        self.create_private_directories(root, places)
            .step(FILLING)?;
        let upper = Path::new("upper/rootfs");
        make_directory(upper, 0o755).step(FILLING)?;
        self.write_init_files(upper).step(FILLING)?;
        let inside = places.iter().map(|(place, _)| Path::new(place));
        for place in inside
            .clone()
            .chain(
                layers
                    .layers
                    .iter()
                    .map(|layer| layer.sandbox_path.as_path()),
            )
            .chain(
                self.staging
                    .iter()
                    .map(|_| Path::new(trust::GATE_DIRECTORY)),
            )
        {
            create_mount_point(upper, place).step(FILLING)?;
        }
        for (name, accounts) in ["passwd", "group"].into_iter().zip(&layers.accounts) {
            add_accounts(accounts, &upper.join("etc").join(name)).step(FILLING)?;
        }
        make_directory(Path::new("tree"), 0o755).step(FILLING)?;
        self.base = "tree";
        self.overlay(rootfs, "rootfs", Path::new("tree"))
            .step(&format!(
                "mounting {} as the root (are overlays allowed? see `palisade doctor`)",
                rootfs.host.display()
            ))?;
        let none = None::<&str>;
        for place in inside {
            let (from, to) = (root.join(place), Path::new("tree").join(place));
            mount(Some(&from), &to, none, MsFlags::MS_BIND, none).step("mounting a directory")?;
            remount(&to, MsFlags::MS_NOSUID | MsFlags::MS_NODEV)
                .step("mounting a directory nosuid")?;
        }
        Ok(())
    }

    /// Writes init's files. The tree is new (`mkdir` of `fs` fails otherwise) or was prepared by
    /// [`super::reuse::remove_unsafe_entries`]: no link of an agent is at these paths.
    fn write_init_files(&self, root: &Path) -> Result<(), Error> {
        for place in ["home", "dev", "proc", "sys", "etc"] {
            make_directory(&root.join(place), 0o755)?;
        }
        symlink("/workspace", root.join("src"))?;
        let etc = root.join("etc");
        let host_name = self.host_name;
        write(etc.join("passwd"), ACCOUNTS)?;
        write(etc.join("group"), GROUPS)?;
        write(etc.join("hostname"), format!("{host_name}\n"))?;
        write(
            etc.join("hosts"),
            format!("127.0.0.1 localhost {host_name}\n::1 localhost {host_name}\n"),
        )?;
        // Any address would work, because the gate accepts packets to all addresses.
        write(etc.join("resolv.conf"), "nameserver 192.0.0.1\n")?;
        write(
            etc.join("nsswitch.conf"),
            "passwd: files\ngroup: files\nshadow: files\nhosts: files dns\n\
             networks: files\nprotocols: files\nservices: files\n",
        )
    }

    fn create_private_directories(&self, root: &Path, places: &[(&str, u32)]) -> Result<(), Error> {
        for (place, mode) in places {
            let path = root.join(place);
            make_directory(&path, *mode)?;
            if matches!(self.identity, Identity::Range { .. }) {
                chown(&path, Some(self.agent.uid), Some(self.agent.gid))?;
            }
        }
        Ok(())
    }

    /// Mounts a host directory: as an overlay, or else read-only.
    fn add_layer(&mut self, layer: &Layer) -> Result<(), StepError> {
        let describe = |what: &str| format!("{what} {}", layer.host.display());
        let at = create_mount_point(Path::new(self.base), &layer.sandbox_path)
            .step(&describe("creating a mount point for"))?;
        let name = layer.name();
        let Err(error) = self.overlay(layer, &name, &at) else {
            return Ok(());
        };
        if !layer.may_be_bind_mount || !layer.hidden.is_empty() {
            return Err(error).step(&describe(
                "the kernel refuses overlays (see `palisade doctor`), which are needed to mount",
            ));
        }
        let none = None::<&str>;
        mount(Some(&layer.host), &at, none, MsFlags::MS_BIND, none).step(&describe("mounting"))?;
        let flags = MsFlags::MS_NOSUID | MsFlags::MS_NODEV | MsFlags::MS_RDONLY;
        remount(&at, flags).step(&describe("mounting read-only"))?;
        self.bind_trust(layer, &at);
        self.warnings.push(format!(
            "{} is read-only: the kernel refused an overlay ({error})",
            layer.host.display()
        ));
        Ok(())
    }

    /// Mounts an overlay over a layer.
    fn overlay(&mut self, layer: &Layer, name: &str, at: &Path) -> Result<(), Error> {
        let lower = match &layer.mapped_mount {
            None => layer.host.clone(),
            Some(mount) => {
                let place = Path::new("lower").join(name);
                make_directory(&place, 0o755)?;
                layer::attach(mount, &place)?;
                place
            }
        };
        let certificates = match &mut self.staging {
            Some(staging) => staging.create_layer(&layer.sandbox_path, name)?,
            None => None,
        };
        let has_certificates = certificates.is_some();
        let lower = match certificates {
            Some(certificates) => format!("{}:{}", certificates.display(), lower.display()),
            None => lower.display().to_string(),
        };
        let is_read_only_layer = layer.may_be_bind_mount && layer.sandbox_path.starts_with("etc");
        let options = if is_read_only_layer && !self.may_install && layer.hidden.is_empty() {
            let lower = if has_certificates {
                lower
            } else {
                format!("{lower}:{EMPTY_DIRECTORY}")
            };
            format!("lowerdir={lower},userxattr")
        } else {
            let (upper, work) = self.make_upper(layer, name)?;
            format!("lowerdir={lower},upperdir={upper},workdir={work},userxattr")
        };
        mount(
            Some("overlay"),
            at,
            Some("overlay"),
            MsFlags::MS_NOSUID | MsFlags::MS_NODEV,
            Some(options.as_str()),
        )?;
        Ok(())
    }

    /// Creates a layer's upper and work directories.
    fn make_upper(&self, layer: &Layer, name: &str) -> Result<(String, String), Error> {
        let (upper, work) = (format!("upper/{name}"), format!("work/{name}"));
        // The overlay shows the owner and mode of the upper directory, so those of the host's
        // directory are copied.
        make_directory(Path::new(&upper), layer.mode)?;
        make_directory(Path::new(&work), 0o755)?;
        if layer.mapped_mount.is_some() && layer.sandbox_path != Path::new("") {
            let (uid, gid) = layer.owner;
            chown(&upper, layer::id_inside(uid), layer::id_inside(gid))?;
        }
        hidden_paths::hide_paths(&layer.hidden, Path::new(&upper), self.identity)?;
        Ok((upper, work))
    }
}

/// Copies files of the host's `/etc` that others may read.
fn copy_etc(root: &Path) -> Result<(), Error> {
    for name in ETC_FILES {
        // Missing files, and files that others may not read, are skipped.
        let from = Path::new("/etc").join(name);
        if from
            .metadata()
            .is_ok_and(|data| data.is_file() && data.permissions().mode() & 0o004 != 0)
            && let Ok(bytes) = std::fs::read(&from)
        {
            write(root.join("etc").join(name), bytes)?;
        }
    }
    Ok(())
}

/// Adds the accounts of a tree after the sandbox's own, which have precedence.
fn add_accounts(accounts: &str, at: &Path) -> Result<(), Error> {
    let mut merged = std::fs::read_to_string(at)?;
    let field = |line: &str, place| line.split(':').nth(place).map(str::to_owned);
    let known: Vec<_> = merged
        .lines()
        .map(|line| (field(line, 0), field(line, 2)))
        .collect();
    for line in accounts.lines() {
        let (account, id) = (field(line, 0), field(line, 2));
        if id.is_some() && !known.iter().any(|one| one.0 == account || one.1 == id) {
            merged.push_str(line);
            merged.push('\n');
        }
    }
    write(at, merged)
}

/// Changes the flags of a bind mount. The kernel requires that locked flags of the host's mount are
/// repeated.
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

/// Makes a directory the root, and unmounts the host's tree.
fn pivot(base: &str) -> Result<(), StepError> {
    chdir(base).step("entering the root")?;
    // The old root is mounted over the new one and then unmounted, so it needs no directory of its
    // own.
    pivot_root(".", ".").step("pivoting")?;
    umount2(".", MntFlags::MNT_DETACH).step("leaving the host's tree")?;
    chdir("/").step("entering the root")
}
