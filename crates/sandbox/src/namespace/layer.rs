//! Host directories that are visible in a sandbox, and the ownership of their files.
//!
//! Every layer is a lower layer of an overlay, never a bind mount: a Unix socket behind a read-only
//! bind still accepts connections. The launcher collects the layers, because only it has the host's
//! rights: a root gate maps each layer's ids into the sandbox's range.
//!
//! ```text
//!   on disk            inside                  (a `rootfs` keeps its ids)
//!   0 … 999            0 … 999                 system ids
//!   1000 … 44999       20000 … 63999           users: never 1000, which is the agent
//!   others             nobody
//! ```

use std::ffi::{CStr, CString};
use std::fs::{Metadata, Permissions};
use std::io::{Error, ErrorKind, Result};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Component, Path, PathBuf};

use nix::sys::signal::{Signal, kill};
use nix::sys::wait::waitpid;

use super::hidden_paths::{self, SearchScope};
use super::protocol::{Identity, LaunchSpec};
use super::step::{Step, StepError};
use super::{identity, launch, trust};
use crate::contract::SystemConfig;

/// System directories of the host, writable in the sandbox where overlays work.
const SYSTEM_DIRECTORIES: &[&str] = &[
    "usr", "opt", "bin", "sbin", "lib", "lib32", "lib64", "libx32",
];

/// Directories of `/etc` that configure programs and have no data about the operator.
const ETC_DIRECTORIES: &[&str] = &[
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

/// Directories that are never visible, whole or in part: they belong to the kernel, contain
/// sockets, or are directories of the sandbox itself.
const NEVER_VISIBLE: &[&str] = &[
    "/proc",
    "/sys",
    "/dev",
    "/run",
    "/var/run",
    "/workspace",
    "/src",
];

/// Directories that the operator cannot expose as a whole.
const NOT_MOUNTABLE_AS_A_WHOLE: &[&str] = &["/", "/etc", "/home", "/root", "/tmp", "/var"];

/// A directory of the host.
pub(crate) struct Layer {
    /// The path in the sandbox, relative to the root.
    pub(crate) sandbox_path: PathBuf,
    /// The path on the host, without links. Init may have no permission for it.
    pub(crate) host: PathBuf,
    /// The mode on disk.
    pub(crate) mode: u32,
    /// The user and group on disk.
    pub(crate) owner: (u32, u32),
    /// A detached copy of the directory's mount with the sandbox's ids.
    pub(crate) mapped_mount: Option<OwnedFd>,
    /// The paths to hide.
    pub(crate) hidden: Vec<hidden_paths::HiddenPath>,
    /// Whether a read-only bind mount may replace the overlay.
    pub(crate) may_be_bind_mount: bool,
}

/// All layers of a sandbox.
pub(crate) struct Layers {
    /// The `rootfs`, if there is one.
    pub(crate) rootfs: Option<Layer>,
    /// The accounts and groups of the `rootfs`.
    pub(crate) accounts: [String; 2],
    /// The other layers; a nested layer comes after its parent.
    pub(crate) layers: Vec<Layer>,
    /// Links of the host's root, such as `bin -> usr/bin`.
    pub(crate) links: Vec<(PathBuf, PathBuf)>,
    /// The paths of trusted certificates.
    pub(crate) trusted: Vec<trust::TrustFile>,
    /// Warnings about missing protections.
    pub(crate) warnings: Vec<String>,
}

/// Checks the configured host paths; an error has the rejected path and the reason. `state` is the
/// directory of sandboxes.
pub(crate) fn check(
    system: &SystemConfig,
    state: &Path,
) -> std::result::Result<(), (PathBuf, String)> {
    for path in &system.host_paths {
        resolve_host_path(path, state).map_err(|reason| (path.clone(), reason))?;
    }
    if let Some(tree) = &system.rootfs {
        resolve(tree, state).map_err(|reason| (tree.clone(), reason))?;
    }
    Ok(())
}

fn resolve_host_path(path: &Path, state: &Path) -> std::result::Result<PathBuf, String> {
    let found = resolve(path, state)?;
    for one in [path, &found] {
        if NOT_MOUNTABLE_AS_A_WHOLE
            .iter()
            .any(|whole| one == Path::new(whole))
        {
            return Err(
                "it cannot be exposed as a whole; list the directories that are needed".into(),
            );
        }
        if let Some(never) = NEVER_VISIBLE.iter().find(|never| one.starts_with(never)) {
            return Err(format!("nothing of {never} can be exposed"));
        }
    }
    let mode = found
        .metadata()
        .map_err(|error| error.to_string())?
        .permissions();
    if !is_world_readable(&mode) {
        return Err("only directories that others may read can be exposed; run `chmod o+rx` on it, or remove it".into());
    }
    Ok(found)
}

/// Resolves a path that can be a layer.
fn resolve(path: &Path, state: &Path) -> std::result::Result<PathBuf, String> {
    let plain = |part: Component<'_>| matches!(part, Component::RootDir | Component::Normal(_));
    if !path.is_absolute() || !path.components().all(plain) {
        return Err("it must be an absolute path without '..'".into());
    }
    let found = path.canonicalize().map_err(|error| match error.kind() {
        ErrorKind::NotFound => "no such directory".to_owned(),
        _ => error.to_string(),
    })?;
    if !found.is_dir() {
        return Err("it is not a directory".into());
    }
    // These characters have a meaning in overlay options.
    let has_special_character = |path: &Path| {
        let bytes = path.as_os_str().as_bytes();
        bytes
            .iter()
            .any(|byte| matches!(byte, b':' | b',' | b'\\' | b'\n'))
    };
    if has_special_character(path) || has_special_character(&found) {
        return Err("a path with ':', ',' or '\\' cannot be a layer".into());
    }
    // The gate's state directory is the parent of the sandboxes' directory.
    let state = state.canonicalize().unwrap_or_else(|_| state.to_owned());
    let state = state.parent().unwrap_or(&state);
    if state.starts_with(&found) || found.starts_with(state) {
        return Err(format!(
            "it contains, or is in, the gate's state directory {}",
            state.display()
        ));
    }
    Ok(found)
}

fn is_world_readable(mode: &Permissions) -> bool {
    mode.mode() & 0o005 == 0o005
}

/// Collects the layers. Runs in the launcher, with the host's rights, before init exists.
pub(crate) fn collect_layers(spec: &LaunchSpec) -> std::result::Result<Layers, StepError> {
    let mut all = Layers {
        rootfs: None,
        accounts: Default::default(),
        layers: Vec::new(),
        links: Vec::new(),
        trusted: Vec::new(),
        warnings: Vec::new(),
    };
    let system = &spec.config.system;
    let state = spec.directory.parent().unwrap_or(&spec.directory);
    let resolved = |path: &Path, found: std::result::Result<PathBuf, String>| {
        found
            .map_err(Error::other)
            .step(&format!("stat of {}", path.display()))
    };
    let make_layer = |inside: PathBuf, host: PathBuf| {
        let data = host.metadata();
        let data = data.step(&format!("stat of {}", host.display()))?;
        Ok(Layer::new(inside, host, &data, false))
    };
    match &system.rootfs {
        Some(tree) => {
            let host = resolved(tree, resolve(tree, state))?;
            all.accounts = ["passwd", "group"].map(|name| read_regular_file(&host, name));
            all.trusted = trust::list_trust_files(&host, system.root);
            all.rootfs = Some(make_layer(PathBuf::new(), host)?);
        }
        None => {
            all.add_system();
            all.trusted = trust::list_trust_files(Path::new("/"), system.root);
        }
    }
    let mut host_paths = system.host_paths.clone();
    host_paths.sort();
    host_paths.dedup();
    for path in &host_paths {
        let host = resolved(path, resolve_host_path(path, state))?;
        let inside = path.strip_prefix("/").unwrap_or(path).to_owned();
        all.layers.push(make_layer(inside, host)?);
    }
    match spec.identity {
        // The kernel protects files of unmapped owners. Root in the sandbox could read every mapped
        // file, but with subordinate ids no file of the host is mapped.
        Identity::Range { subids, .. } if !system.root || subids.is_some() => {}
        Identity::Range { .. } => {
            all.find_hidden_paths(|_| Some((Path::new(""), SearchScope::Everywhere)))?;
        }
        // With a single id, the operator's files are the agent's own.
        Identity::Single => {
            let own = SearchScope::OwnedBy(nix::unistd::Uid::effective().as_raw());
            all.find_hidden_paths(|layer| match layer.sandbox_path.to_str() {
                _ if !layer.may_be_bind_mount => Some((Path::new(""), SearchScope::Everywhere)),
                // Directories in which users install their own programs.
                Some("opt") => Some((Path::new(""), own)),
                Some("usr") => Some((Path::new("local"), own)),
                _ => None,
            })?;
        }
    }
    match spec.identity {
        Identity::Range {
            first,
            subids: None,
        } => {
            if let Err(error) = all.map_ids(first) {
                all.warnings.push(format!(
                    "host files belong to the user 'nobody' inside, and --root cannot change them: \
                     this kernel or file system maps no ids ({error})"
                ));
            }
        }
        Identity::Range {
            subids: Some(_), ..
        } => all.warnings.push(
            "host files belong to the user 'nobody' inside, and --root cannot change them: that \
             takes a gate started by root"
                .to_owned(),
        ),
        Identity::Single => {}
    }
    Ok(all)
}

/// Reads a file of a tree's `/etc`, unless the file or `/etc` is a link. Returns an empty text for
/// an unreadable file.
fn read_regular_file(tree: &Path, name: &str) -> String {
    let etc = tree.join("etc");
    let file = etc.join(name);
    let is = |path: &Path, kind: fn(&Metadata) -> bool| {
        path.symlink_metadata().is_ok_and(|data| kind(&data))
    };
    if is(&etc, Metadata::is_dir) && is(&file, Metadata::is_file) {
        std::fs::read_to_string(file).unwrap_or_default()
    } else {
        String::new()
    }
}

impl Layers {
    /// Adds the system directories of the host.
    fn add_system(&mut self) {
        let etc = ETC_DIRECTORIES
            .iter()
            .map(|name| Path::new("etc").join(name));
        for inside in SYSTEM_DIRECTORIES.iter().map(PathBuf::from).chain(etc) {
            let host = Path::new("/").join(&inside);
            let Ok(found) = host.symlink_metadata() else {
                continue;
            };
            if found.is_symlink() {
                if let Ok(target) = std::fs::read_link(&host) {
                    self.links.push((inside, target));
                }
            } else if found.is_dir() && is_world_readable(&found.permissions()) {
                self.layers.push(Layer::new(inside, host, &found, true));
            }
        }
    }

    /// Searches the layers for paths to hide; `wanted` returns the part and the scope of the
    /// search.
    fn find_hidden_paths(
        &mut self,
        wanted: impl Fn(&Layer) -> Option<(&'static Path, SearchScope)>,
    ) -> std::result::Result<(), StepError> {
        for layer in &mut self.layers {
            let Some((part, scope)) = wanted(layer) else {
                continue;
            };
            layer.hidden = hidden_paths::find(&layer.host, part, scope).step(&format!(
                "searching for files that others may not read in {}",
                layer.host.display()
            ))?;
        }
        Ok(())
    }

    /// Creates mounts of the layers whose ids are mapped to the range that starts at `first`.
    fn map_ids(&mut self, first: u32) -> Result<()> {
        let system = [
            (0, 0, FIRST_USER_ID),
            (FIRST_USER_ID, FIRST_USER_ID_INSIDE, MAX_USER_IDS),
        ];
        let namespace = create_id_mapping_namespace(first, &system)?;
        for layer in &mut self.layers {
            layer.mapped_mount = Some(copy_mount(&layer.host, namespace.as_fd())?);
        }
        if let Some(tree) = &mut self.rootfs {
            let namespace = create_id_mapping_namespace(first, &[(0, 0, identity::IDS_IN_RANGE)])?;
            tree.mapped_mount = Some(copy_mount(&tree.host, namespace.as_fd())?);
        }
        Ok(())
    }
}

impl Layer {
    fn new(sandbox_path: PathBuf, host: PathBuf, data: &Metadata, may_be_bind_mount: bool) -> Self {
        Self {
            sandbox_path,
            host,
            mode: data.mode() & 0o777,
            owner: (data.uid(), data.gid()),
            mapped_mount: None,
            hidden: Vec::new(),
            may_be_bind_mount,
        }
    }

    /// An empty layer; `host` is an empty directory.
    pub(crate) fn empty(sandbox_path: &Path, host: &str) -> Self {
        Self {
            sandbox_path: sandbox_path.to_owned(),
            host: host.into(),
            mode: 0o755,
            owner: (0, 0),
            mapped_mount: None,
            hidden: Vec::new(),
            may_be_bind_mount: true,
        }
    }

    /// The name of the layer's upper directory, which every start uses again.
    pub(crate) fn name(&self) -> String {
        if self.may_be_bind_mount {
            self.sandbox_path.to_string_lossy().replace('/', "-")
        } else {
            format!("host-{}", super::path_hash(&self.sandbox_path))
        }
    }
}

/// The first id of ordinary users on the host.
const FIRST_USER_ID: u32 = 1000;
/// The id in the sandbox to which the first user of the host is mapped.
const FIRST_USER_ID_INSIDE: u32 = 20_000;
/// Maximum number of mapped ids of users.
const MAX_USER_IDS: u32 = 44_000;

/// Returns the id in the sandbox of a layer's file that has the id `on_disk` on the host.
pub(crate) fn id_inside(on_disk: u32) -> Option<u32> {
    match on_disk {
        0..FIRST_USER_ID => Some(on_disk),
        _ if on_disk < FIRST_USER_ID + MAX_USER_IDS => {
            Some(on_disk - FIRST_USER_ID + FIRST_USER_ID_INSIDE)
        }
        _ => None,
    }
}

/// Creates a user namespace that only maps ids on disk to the sandbox's ids.
fn create_id_mapping_namespace(first: u32, parts: &[(u32, u32, u32)]) -> Result<OwnedFd> {
    let launcher = nix::unistd::getpid();
    let Some(child) = launch::clone_into(libc::CLONE_NEWUSER, None)? else {
        // The child holds the launcher's lock and must not outlive the launcher.
        let dies_with_launcher = nix::sys::prctl::set_pdeathsig(Signal::SIGKILL).is_ok();
        while dies_with_launcher && nix::unistd::getppid() == launcher {
            nix::unistd::pause();
        }
        std::process::exit(1);
    };
    let map: String = parts
        .iter()
        .map(|(disk, inside, count)| format!("{disk} {} {count}\n", first + inside))
        .collect();
    let process = Path::new("/proc").join(child.to_string());
    let made = std::fs::write(process.join("uid_map"), &map)
        .and_then(|()| std::fs::write(process.join("gid_map"), &map))
        .and_then(|()| std::fs::File::open(process.join("ns/user")));
    let _ = kill(child, Signal::SIGKILL);
    let _ = waitpid(child, None);
    Ok(made?.into())
}

fn c_path(path: &Path) -> Result<CString> {
    Ok(CString::new(path.as_os_str().as_bytes())?)
}

/// Creates a detached copy of a directory's mount, with ids mapped by the namespace.
fn copy_mount(path: &Path, namespace: BorrowedFd<'_>) -> Result<OwnedFd> {
    let path = c_path(path)?;
    // SAFETY: the path is a C string that outlives the call; the result is checked.
    let fd = unsafe {
        libc::syscall(
            libc::SYS_open_tree,
            libc::AT_FDCWD,
            path.as_ptr(),
            libc::OPEN_TREE_CLONE | libc::OPEN_TREE_CLOEXEC,
        )
    };
    if fd < 0 {
        return Err(Error::last_os_error());
    }
    let fd = i32::try_from(fd).map_err(Error::other)?;
    // SAFETY: the kernel returned a new descriptor, which has no other owner.
    let mount = unsafe { OwnedFd::from_raw_fd(fd) };
    let attributes = libc::mount_attr {
        attr_set: libc::MOUNT_ATTR_IDMAP | libc::MOUNT_ATTR_NOSUID | libc::MOUNT_ATTR_NODEV,
        attr_clr: 0,
        propagation: 0,
        userns_fd: u64::from(namespace.as_raw_fd().cast_unsigned()),
    };
    // SAFETY: path and attributes outlive the call, which reads exactly the given number of
    // bytes.
    let result = unsafe {
        libc::syscall(
            libc::SYS_mount_setattr,
            mount.as_raw_fd(),
            c"".as_ptr(),
            libc::AT_EMPTY_PATH,
            &raw const attributes,
            size_of::<libc::mount_attr>(),
        )
    };
    match result {
        0 => Ok(mount),
        _ => Err(Error::last_os_error()),
    }
}

/// Attaches a mount that `copy_mount` created. Runs in init, so that the mount belongs to init's
/// mount namespace.
pub(crate) fn attach(mount: &OwnedFd, at: &Path) -> Result<()> {
    const MOVE_MOUNT_F_EMPTY_PATH: u32 = 4;
    let (nothing, at): (&CStr, CString) = (c"", c_path(at)?);
    // SAFETY: both paths are C strings that outlive the call.
    let result = unsafe {
        libc::syscall(
            libc::SYS_move_mount,
            mount.as_raw_fd(),
            nothing.as_ptr(),
            libc::AT_FDCWD,
            at.as_ptr(),
            MOVE_MOUNT_F_EMPTY_PATH,
        )
    };
    match result {
        0 => Ok(()),
        _ => Err(Error::last_os_error()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn invalid_host_paths_are_refused_with_reason() {
        let place = tempfile::tempdir().unwrap();
        let at = |name: &str| place.path().join(name);
        for name in ["state/sandboxes", "open", "closed", "odd,one"] {
            std::fs::create_dir_all(at(name)).unwrap();
        }
        std::fs::set_permissions(at("closed"), Permissions::from_mode(0o750)).unwrap();
        std::fs::write(at("file"), "").unwrap();
        std::os::unix::fs::symlink(at("open"), at("link")).unwrap();
        std::os::unix::fs::symlink("/proc", at("to-proc")).unwrap();
        let state = at("state/sandboxes");
        let resolved = |path: &Path| resolve_host_path(path, &state);
        for (path, why) in [
            (PathBuf::from("relative"), "absolute"),
            (at("open/../open"), "'..'"),
            (PathBuf::from("/"), "the gate's state directory"),
            (PathBuf::from("/etc"), "whole"),
            (PathBuf::from("/proc/self"), "nothing of /proc can"),
            (PathBuf::from("/sys"), "nothing of /sys can"),
            (PathBuf::from("/dev/shm"), "nothing of /dev can"),
            (at("to-proc"), "nothing of /proc can"),
            (at("state"), "the gate's state directory"),
            (state.clone(), "the gate's state directory"),
            (place.path().to_owned(), "the gate's state directory"),
            (at("missing"), "no such directory"),
            (at("file"), "not a directory"),
            (at("closed"), "others may read"),
            (at("odd,one"), "cannot be a layer"),
        ] {
            let reason = resolved(&path).unwrap_err();
            assert!(reason.contains(why), "{}: {reason}", path.display());
        }
        assert_eq!(resolved(&at("link")).unwrap(), at("open"));
    }

    #[test]
    fn no_host_id_maps_to_the_agent() {
        for id in [0, 33, 999, 1000, 1001, 44_999] {
            let inside = id_inside(id).unwrap();
            assert_ne!(inside, identity::AGENT_UID);
            assert!(inside < identity::IDS_IN_RANGE);
        }
        assert_eq!(id_inside(45_000), None);
        assert_eq!(id_inside(65_534), None);
    }
}
