//! What of the host's tree is there inside, and as whose.
//!
//! Every layer is a lower layer of an overlay, never a bind of its own: a Unix socket behind a
//! read-only bind still connects. The launcher gathers them, because it alone has the host's
//! rights: a gate that is root maps each layer's ids into the sandbox's own range.
//!
//! ```text
//!   on disk            inside                  (a tree of one's own, `rootfs`, keeps its ids)
//!   0 … 999            0 … 999                 the system's
//!   1000 … 44999       20000 … 63999           people's: never 1000, which is the agent
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

/// Directories of the host that are there inside, changeable where overlays work.
const SYSTEM: &[&str] = &[
    "usr", "opt", "bin", "sbin", "lib", "lib32", "lib64", "libx32",
];

/// Directories of `/etc` that say how programs work and nothing about the operator.
const ETC: &[&str] = &[
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

/// Nothing of these comes in, whole or in part: they are the kernel's, hold sockets, or are
/// the sandbox's own.
const NEVER: &[&str] = &[
    "/proc",
    "/sys",
    "/dev",
    "/run",
    "/var/run",
    "/workspace",
    "/src",
];

/// These do not come in whole.
const NOT_WHOLE: &[&str] = &["/", "/etc", "/home", "/root", "/tmp", "/var"];

/// A directory of the host's.
pub(crate) struct Layer {
    /// Where it is inside, from the root on.
    pub(crate) inside: PathBuf,
    /// Where it is on the host, without a link on the way. Init may lack the right to walk
    /// there.
    pub(crate) host: PathBuf,
    /// Its mode, and whose it is on disk.
    pub(crate) mode: u32,
    pub(crate) owner: (u32, u32),
    /// A copy of its mount that is attached nowhere and has the sandbox's ids.
    pub(crate) mapped: Option<OwnedFd>,
    /// What of it must not be seen.
    pub(crate) hidden: Vec<hidden_paths::HiddenPath>,
    /// Whether a read-only bind would do where overlays are refused.
    pub(crate) may_be_bound: bool,
}

/// Everything of the host's that is there inside.
pub(crate) struct Layers {
    /// The tree that is `/`, where one was asked for.
    pub(crate) rootfs: Option<Layer>,
    /// Its accounts and its groups.
    pub(crate) accounts: [String; 2],
    /// The rest; what is beneath another one comes after it.
    pub(crate) layers: Vec<Layer>,
    /// Links of the host's root, such as `bin -> usr/bin`.
    pub(crate) links: Vec<(PathBuf, PathBuf)>,
    /// Where what is trusted has to be.
    pub(crate) trusted: Vec<trust::Entry>,
    /// What is weaker than it could be.
    pub(crate) warnings: Vec<String>,
}

/// Whether the paths that were asked for may come in; a sentence why not. `state` is where
/// sandboxes are kept.
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
        if NOT_WHOLE.iter().any(|whole| one == Path::new(whole)) {
            return Err("it cannot come in whole; name the directories that are needed".into());
        }
        if let Some(never) = NEVER.iter().find(|never| one.starts_with(never)) {
            return Err(format!("nothing of {never} comes in"));
        }
    }
    let mode = found
        .metadata()
        .map_err(|error| error.to_string())?
        .permissions();
    if !is_for_everybody(&mode) {
        return Err("only what everybody may read comes in; chmod o+rx it, or leave it out".into());
    }
    Ok(found)
}

/// Where a path leads to, if it is one that can be a layer.
fn resolve(path: &Path, state: &Path) -> std::result::Result<PathBuf, String> {
    let plain = |part: Component<'_>| matches!(part, Component::RootDir | Component::Normal(_));
    if !path.is_absolute() || !path.components().all(plain) {
        return Err("it has to be an absolute path without '..'".into());
    }
    let found = path.canonicalize().map_err(|error| match error.kind() {
        ErrorKind::NotFound => "there is no such directory".to_owned(),
        _ => error.to_string(),
    })?;
    if !found.is_dir() {
        return Err("it is no directory".into());
    }
    // Characters that mean something in an overlay's options.
    let odd = |path: &Path| {
        let bytes = path.as_os_str().as_bytes();
        bytes
            .iter()
            .any(|byte| matches!(byte, b':' | b',' | b'\\' | b'\n'))
    };
    if odd(path) || odd(&found) {
        return Err("a path with ':', ',' or '\\' cannot be a layer".into());
    }
    // The gate's own directory is one above the sandboxes'.
    let ours = state.canonicalize().unwrap_or_else(|_| state.to_owned());
    let ours = ours.parent().unwrap_or(&ours);
    if ours.starts_with(&found) || found.starts_with(ours) {
        return Err(format!(
            "it holds, or is in, the gate's own directory {}",
            ours.display()
        ));
    }
    Ok(found)
}

fn is_for_everybody(mode: &Permissions) -> bool {
    mode.mode() & 0o005 == 0o005
}

/// Gathers them. In the launcher, with the host's rights, before there is an init.
pub(crate) fn gather(spec: &LaunchSpec) -> std::result::Result<Layers, StepError> {
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
            .step(&format!("looking at {}", path.display()))
    };
    let looked_at = |inside: PathBuf, host: PathBuf| {
        let data = host.metadata();
        let data = data.step(&format!("looking at {}", host.display()))?;
        Ok(Layer::new(inside, host, &data, false))
    };
    match &system.rootfs {
        Some(tree) => {
            let host = resolved(tree, resolve(tree, state))?;
            all.accounts = ["passwd", "group"].map(|name| read_plain(&host, name));
            all.trusted = trust::gather(&host, system.root);
            all.rootfs = Some(looked_at(PathBuf::new(), host)?);
        }
        None => {
            all.add_system();
            all.trusted = trust::gather(Path::new("/"), system.root);
        }
    }
    let mut asked = system.host_paths.clone();
    asked.sort();
    asked.dedup();
    for path in &asked {
        let host = resolved(path, resolve_host_path(path, state))?;
        let inside = path.strip_prefix("/").unwrap_or(path).to_owned();
        all.layers.push(looked_at(inside, host)?);
    }
    match spec.identity {
        // Who is nobody's owner is kept out by the kernel; root inside is everybody's, unless
        // the ids are lent: nobody can map those onto the host's files.
        Identity::Range { lent, .. } if !system.root || lent.is_some() => {}
        Identity::Range { .. } => all.hide(|_| Some((Path::new(""), SearchScope::Everywhere)))?,
        // Files of the operator's are the agent's own: one id.
        Identity::Single => {
            let own = SearchScope::Of(nix::unistd::Uid::effective().as_raw());
            all.hide(|layer| match layer.inside.to_str() {
                _ if !layer.may_be_bound => Some((Path::new(""), SearchScope::Everywhere)),
                // Where people put things of their own, among the system's.
                Some("opt") => Some((Path::new(""), own)),
                Some("usr") => Some((Path::new("local"), own)),
                _ => None,
            })?;
        }
    }
    match spec.identity {
        Identity::Range { first, lent: None } => {
            if let Err(error) = all.map(first) {
                all.warnings.push(format!(
                    "files of the host belong to nobody inside, and --root cannot change them: \
                     this kernel or file system maps no ids ({error})"
                ));
            }
        }
        Identity::Range { lent: Some(_), .. } => all.warnings.push(
            "files of the host belong to nobody inside, and --root cannot change them: that \
             takes a gate started by root"
                .to_owned(),
        ),
        Identity::Single => {}
    }
    Ok(all)
}

/// A file of a tree's `/etc`, unless a link leads to it. One that cannot be read is empty.
fn read_plain(tree: &Path, name: &str) -> String {
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
    fn add_system(&mut self) {
        let etc = ETC.iter().map(|name| Path::new("etc").join(name));
        for inside in SYSTEM.iter().map(PathBuf::from).chain(etc) {
            let host = Path::new("/").join(&inside);
            let Ok(found) = host.symlink_metadata() else {
                continue;
            };
            if found.is_symlink() {
                if let Ok(target) = std::fs::read_link(&host) {
                    self.links.push((inside, target));
                }
            } else if found.is_dir() && is_for_everybody(&found.permissions()) {
                self.layers.push(Layer::new(inside, host, &found, true));
            }
        }
    }

    fn hide(
        &mut self,
        wanted: impl Fn(&Layer) -> Option<(&'static Path, SearchScope)>,
    ) -> std::result::Result<(), StepError> {
        for layer in &mut self.layers {
            let Some((part, places)) = wanted(layer) else {
                continue;
            };
            layer.hidden = hidden_paths::find(&layer.host, part, places).step(&format!(
                "looking for what is not for everybody in {}",
                layer.host.display()
            ))?;
        }
        Ok(())
    }

    fn map(&mut self, first: u32) -> Result<()> {
        let system = [(0, 0, PEOPLE), (PEOPLE, PEOPLE_INSIDE, MAX_PEOPLE)];
        let namespace = make_map(first, &system)?;
        for layer in &mut self.layers {
            layer.mapped = Some(copy_mount(&layer.host, namespace.as_fd())?);
        }
        if let Some(tree) = &mut self.rootfs {
            let namespace = make_map(first, &[(0, 0, identity::RANGE)])?;
            tree.mapped = Some(copy_mount(&tree.host, namespace.as_fd())?);
        }
        Ok(())
    }
}

impl Layer {
    fn new(inside: PathBuf, host: PathBuf, data: &Metadata, may_be_bound: bool) -> Self {
        Self {
            inside,
            host,
            mode: data.mode() & 0o777,
            owner: (data.uid(), data.gid()),
            mapped: None,
            hidden: Vec::new(),
            may_be_bound,
        }
    }

    /// One with nothing in it; `host` is a directory that has as much.
    pub(crate) fn empty(inside: &Path, host: &str) -> Self {
        Self {
            inside: inside.to_owned(),
            host: host.into(),
            mode: 0o755,
            owner: (0, 0),
            mapped: None,
            hidden: Vec::new(),
            may_be_bound: true,
        }
    }

    /// What its upper directory is called: the same each time.
    pub(crate) fn name(&self) -> String {
        if self.may_be_bound {
            self.inside.to_string_lossy().replace('/', "-")
        } else {
            format!("host-{}", super::path_hash(&self.inside))
        }
    }
}

const PEOPLE: u32 = 1000;
const PEOPLE_INSIDE: u32 = 20_000;
const MAX_PEOPLE: u32 = 44_000;

/// Whose a file of a layer is inside.
pub(crate) fn id_inside(on_disk: u32) -> Option<u32> {
    match on_disk {
        0..PEOPLE => Some(on_disk),
        _ if on_disk < PEOPLE + MAX_PEOPLE => Some(on_disk - PEOPLE + PEOPLE_INSIDE),
        _ => None,
    }
}

/// A user namespace that is nothing but a map: of ids on disk to ids of the sandbox's.
fn make_map(first: u32, parts: &[(u32, u32, u32)]) -> Result<OwnedFd> {
    let launcher = nix::unistd::getpid();
    let Some(child) = launch::clone_into(libc::CLONE_NEWUSER, None)? else {
        // It has the launcher's lock, and must not outlive it.
        let tied = nix::sys::prctl::set_pdeathsig(Signal::SIGKILL).is_ok();
        while tied && nix::unistd::getppid() == launcher {
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

fn text(path: &Path) -> Result<CString> {
    Ok(CString::new(path.as_os_str().as_bytes())?)
}

/// A copy of a directory's mount, attached nowhere, with ids as the namespace maps them.
fn copy_mount(path: &Path, namespace: BorrowedFd<'_>) -> Result<OwnedFd> {
    let path = text(path)?;
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
    // SAFETY: the kernel has just made it, for us alone.
    let mount = unsafe { OwnedFd::from_raw_fd(fd) };
    let attributes = libc::mount_attr {
        attr_set: libc::MOUNT_ATTR_IDMAP | libc::MOUNT_ATTR_NOSUID | libc::MOUNT_ATTR_NODEV,
        attr_clr: 0,
        propagation: 0,
        userns_fd: u64::from(namespace.as_raw_fd().cast_unsigned()),
    };
    // SAFETY: path and attributes outlive the call, which reads as many bytes as it is told.
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

/// Attaches such a copy. In init, whose mounts they become.
pub(crate) fn attach(mount: &OwnedFd, at: &Path) -> Result<()> {
    const MOVE_MOUNT_F_EMPTY_PATH: u32 = 4;
    let (nothing, at): (&CStr, CString) = (c"", text(at)?);
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
    fn what_cannot_come_in_is_refused_in_words() {
        let place = tempfile::tempdir().unwrap();
        let at = |name: &str| place.path().join(name);
        for name in ["state/sandboxes", "open", "closed", "odd,one"] {
            std::fs::create_dir_all(at(name)).unwrap();
        }
        std::fs::set_permissions(at("closed"), Permissions::from_mode(0o750)).unwrap();
        std::fs::write(at("file"), "").unwrap();
        std::os::unix::fs::symlink(at("open"), at("link")).unwrap();
        std::os::unix::fs::symlink("/proc", at("sly")).unwrap();
        let state = at("state/sandboxes");
        let says = |path: &Path| resolve_host_path(path, &state);
        for (path, why) in [
            (PathBuf::from("relative"), "absolute"),
            (at("open/../open"), "'..'"),
            (PathBuf::from("/"), "the gate's own directory"),
            (PathBuf::from("/etc"), "whole"),
            (PathBuf::from("/proc/self"), "nothing of /proc"),
            (PathBuf::from("/sys"), "nothing of /sys"),
            (PathBuf::from("/dev/shm"), "nothing of /dev"),
            (at("sly"), "nothing of /proc"),
            (at("state"), "the gate's own directory"),
            (state.clone(), "the gate's own directory"),
            (place.path().to_owned(), "the gate's own directory"),
            (at("missing"), "no such directory"),
            (at("file"), "no directory"),
            (at("closed"), "everybody"),
            (at("odd,one"), "cannot be a layer"),
        ] {
            let said = says(&path).unwrap_err();
            assert!(said.contains(why), "{}: {said}", path.display());
        }
        assert_eq!(says(&at("link")).unwrap(), at("open"));
    }

    #[test]
    fn nobodys_files_become_the_agents() {
        for id in [0, 33, 999, 1000, 1001, 44_999] {
            let inside = id_inside(id).unwrap();
            assert_ne!(inside, identity::AGENT_UID);
            assert!(inside < identity::RANGE);
        }
        assert_eq!(id_inside(45_000), None);
        assert_eq!(id_inside(65_534), None);
    }
}
