//! Trusted certificates of a sandbox: the system's, and the gate's root.
//!
//! ```text
//!   /etc/palisade/ca.pem                  the gate's root alone
//!   /etc/palisade/truststore.jks          all certificates, for Java, if it is installed
//!   /etc/ssl/certs/ca-certificates.crt    all certificates, for other programs; also at the other
//!                                         paths of the system's bundle
//!   /etc/ssl/certs/1a2b3c4d.0             the root, for OpenSSL's certificate directory
//!   /usr/local/share/ca-certificates/     the root, if the agent is root: a rebuilt bundle
//!                                         contains it as well
//! ```
//!
//! Init writes the files to its own tmpfs. They are in the topmost lower layer of their overlays:
//! changes of the agent are in the upper layer, if there is one, and a rename can replace the
//! files. `/etc/palisade` is a read-only bind.
//!
//! A new root is added to the same files while the sandbox runs (`renewal.rs`).

mod java;
pub(crate) mod renewal;

use std::fs::{create_dir_all, hard_link, read, write};
use std::io::Result;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Component, Path, PathBuf};

use nix::fcntl::{OFlag, OpenHow, ResolveFlag, openat2};

use super::layer::{Layer, Layers};
use crate::contract::Trust;
use renewal::TrustFiles;

/// The bundle of all certificates, in every sandbox.
const BUNDLE: &str = "etc/ssl/certs/ca-certificates.crt";

/// Paths of the bundle on various systems.
const BUNDLES: &[&str] = &[
    BUNDLE,
    "etc/pki/tls/certs/ca-bundle.crt",
    "etc/ssl/ca-bundle.pem",
    "etc/ssl/cert.pem",
];

/// Paths from which a system's tools rebuild the bundle.
const ANCHORS: &[&str] = &[
    "usr/local/share/ca-certificates/palisade.crt",
    "etc/pki/ca-trust/source/anchors/palisade.crt",
];

/// The gate's own directory, relative to the root.
pub(crate) const GATE_DIRECTORY: &str = "etc/palisade";

/// The path of the root certificate in the sandbox.
const ROOT_PATH: &str = "/etc/palisade/ca.pem";

/// The staging directory, relative to the sandbox's `fs`.
const STAGING: &str = "lower/trust";

/// The bundle, relative to [`STAGING`]; all bundles are hard links to this file.
const STAGED_BUNDLE: &str = "bundle";

/// The root certificate, relative to [`STAGING`].
const STAGED_ROOT: &str = "own/ca.pem";

/// Java's trust store, relative to [`STAGING`].
const STAGED_JAVA_STORE: &str = "own/truststore.jks";

/// Paths of an installed Java, in directories that a non-root agent cannot change.
const JAVA_PATHS: &[&str] = &["usr/bin/java", "usr/local/bin/java", "usr/lib/jvm"];

/// Maximum size of the host's bundle. Usual ones have a quarter of a MiB.
const MAX_BUNDLE_BYTES: u64 = 4 << 20;

/// Maximum number of links in a path, as in the kernel.
const MAX_LINKS: usize = 40;

/// A file to create in the sandbox.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct TrustFile {
    /// The path relative to the root, without links.
    at: PathBuf,
    what: TrustFileKind,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum TrustFileKind {
    /// All certificates.
    Bundle,
    /// The root certificate.
    Root,
    /// A link to the root certificate with the name that OpenSSL searches; the path of the entry is
    /// its directory.
    Link,
}

/// The files for a tree that becomes `/`. Runs in the launcher, which has permission for it.
pub(crate) fn list_trust_files(tree: &Path, may_install: bool) -> Vec<TrustFile> {
    let mut all: Vec<TrustFile> = Vec::new();
    let mut add = |at: PathBuf, what| {
        if all.iter().all(|known| known.at != at) {
            all.push(TrustFile { at, what });
        }
    };
    for &bundle in BUNDLES {
        let Some(at) = resolve(tree, bundle) else {
            continue;
        };
        let is_default = bundle == BUNDLE;
        if let Some(directory) = at.parent().filter(|_| is_default) {
            add(directory.to_owned(), TrustFileKind::Link);
        }
        if is_default || tree.join(&at).symlink_metadata().is_ok() {
            add(at, TrustFileKind::Bundle);
        }
    }
    let anchors = ANCHORS.iter().filter(|_| may_install);
    for at in anchors.filter_map(|anchor| resolve(tree, anchor)) {
        let parent = at.parent().and_then(Path::parent);
        if parent.is_some_and(|parent| tree.join(parent).is_dir()) {
            add(at, TrustFileKind::Root);
        }
    }
    all
}

/// Resolves the directories of a path. The last component may be a link, which is hidden.
fn resolve(tree: &Path, path: &str) -> Option<PathBuf> {
    let path = Path::new(path);
    let parts = |path: &Path| -> Vec<PathBuf> {
        let parts = path.components().rev();
        parts.map(|part| PathBuf::from(part.as_os_str())).collect()
    };
    let (mut left, mut links) = (parts(path.parent()?), 0);
    let mut found = PathBuf::new();
    while let Some(part) = left.pop() {
        match part.components().next()? {
            Component::RootDir => found = PathBuf::new(),
            Component::ParentDir => {
                found.pop();
            }
            Component::CurDir | Component::Prefix(_) => {}
            Component::Normal(name) => {
                let next = tree.join(&found).join(name);
                match next.symlink_metadata() {
                    Ok(data) if data.is_symlink() => {
                        links += 1;
                        left.extend(parts(&std::fs::read_link(next).ok()?));
                    }
                    Ok(data) if !data.is_dir() => return None,
                    // A missing directory can be created.
                    Ok(_) | Err(_) => found.push(name),
                }
            }
        }
        if links > MAX_LINKS {
            return None;
        }
    }
    Some(found.join(path.file_name()?))
}

/// The trusted certificates, staged for their layers.
pub(crate) struct TrustStaging {
    /// The layer's path, the file's path below it, and the file.
    entries: Vec<(PathBuf, PathBuf, TrustFileKind)>,
    /// Directories with a link to the root certificate, relative to [`STAGING`].
    link_directories: Vec<PathBuf>,
}

impl TrustStaging {
    /// Writes all files, and finds the layer of each. `empty_directory` is an empty directory.
    pub(crate) fn fill(trust: &Trust, layers: &mut Layers, empty_directory: &str) -> Result<Self> {
        let staging = Path::new(STAGING);
        create_dir_all(staging.join("own"))?;
        let mut bundle = system_bundle();
        if bundle.is_empty() {
            layers
                .warnings
                .push("no system certificates were found: only the gate's is trusted".into());
        } else if !bundle.ends_with(b"\n") {
            bundle.push(b'\n');
        }
        bundle.extend(trust.root.as_bytes());
        write(staging.join(STAGED_ROOT), &trust.root)?;
        write(staging.join(STAGED_BUNDLE), bundle)?;
        // On a host without certificates the directory may be missing.
        let first = Path::new(BUNDLE);
        let has = |at: &Path| find_layer(layers, at).is_some();
        if layers.trusted.iter().any(|one| one.at == first) && !has(first) {
            let at = first.parent().and_then(Path::parent).unwrap_or(first);
            layers.layers.insert(0, Layer::empty(at, empty_directory));
        }
        let mut entries = Vec::new();
        for TrustFile { at, what } in std::mem::take(&mut layers.trusted) {
            let at = match what {
                TrustFileKind::Link => at.join(format!("{:08x}.0", trust.hash)),
                TrustFileKind::Bundle | TrustFileKind::Root => at,
            };
            let Some(layer) = find_layer(layers, &at) else {
                if what == TrustFileKind::Bundle {
                    layers.warnings.push(format!(
                        "the gate's certificate is not in /{}: that path is not mounted; point \
                         programs to {ROOT_PATH}",
                        at.display()
                    ));
                }
                continue;
            };
            let beneath = at.strip_prefix(&layer).unwrap_or(&at).to_owned();
            entries.push((layer, beneath, what));
        }
        Ok(Self {
            entries,
            link_directories: Vec::new(),
        })
    }

    /// The files to which a later root is added. Call this function after all layers are mounted.
    pub(crate) fn into_files(self) -> Result<TrustFiles> {
        TrustFiles::open(Path::new(STAGING), self.link_directories)
    }

    /// The staged directory of `/etc/palisade`.
    pub(crate) fn gate_directory() -> PathBuf {
        Path::new(STAGING).join("own")
    }

    /// Writes Java's trust store, if Java is installed in the tree that becomes `/`; returns
    /// whether it is.
    pub(crate) fn add_java(base: &Path) -> Result<bool> {
        let base = std::fs::File::open(base)?;
        // Links in the tree are an agent's, and are not followed outside.
        let how = OpenHow::new()
            .flags(OFlag::O_PATH | OFlag::O_CLOEXEC)
            .resolve(ResolveFlag::RESOLVE_IN_ROOT | ResolveFlag::RESOLVE_NO_MAGICLINKS);
        let found = JAVA_PATHS
            .iter()
            .any(|path| openat2(&base, *path, how).is_ok());
        if found {
            // Writing the trust store takes a millisecond, and most sandboxes need none.
            let bundle = read(Path::new(STAGING).join(STAGED_BUNDLE))?;
            write(
                Path::new(STAGING).join(STAGED_JAVA_STORE),
                java::store(&bundle),
            )?;
        }
        Ok(found)
    }

    /// Creates the directory to mount over the layer at `layer_path`, if the layer gets files.
    pub(crate) fn create_layer(
        &mut self,
        layer_path: &Path,
        name: &str,
    ) -> Result<Option<PathBuf>> {
        let (staging, over) = (Path::new(STAGING), PathBuf::from(format!("over-{name}")));
        let top = staging.join(&over);
        let mut any = false;
        for (_, beneath, what) in self
            .entries
            .iter()
            .filter(|(layer, ..)| layer == layer_path)
        {
            let at = top.join(beneath);
            create_dir_all(at.parent().unwrap_or(&top))?;
            match what {
                TrustFileKind::Bundle => hard_link(staging.join(STAGED_BUNDLE), at)?,
                TrustFileKind::Root => hard_link(staging.join(STAGED_ROOT), at)?,
                TrustFileKind::Link => {
                    symlink(ROOT_PATH, at)?;
                    let directory = beneath.parent().unwrap_or(Path::new(""));
                    self.link_directories.push(over.join(directory));
                }
            }
            any = true;
        }
        Ok(any.then_some(top))
    }

    /// The bundles of the layer at `layer_path`, for a layer that is no overlay.
    pub(crate) fn bundles(&self, layer_path: &Path) -> impl Iterator<Item = (&Path, PathBuf)> {
        let of = self
            .entries
            .iter()
            .filter(move |(layer, _, what)| layer == layer_path && *what == TrustFileKind::Bundle);
        of.map(|(_, beneath, _)| (beneath.as_path(), Path::new(STAGING).join(STAGED_BUNDLE)))
    }
}

/// The path of the layer that contains a path.
fn find_layer(layers: &Layers, at: &Path) -> Option<PathBuf> {
    let all = layers.rootfs.iter().chain(&layers.layers);
    let parent = all.filter(|layer| at.starts_with(&layer.sandbox_path));
    let nearest = parent.max_by_key(|layer| layer.sandbox_path.components().count());
    nearest.map(|layer| layer.sandbox_path.clone())
}

/// The host's certificates, if others may read them.
fn system_bundle() -> Vec<u8> {
    let mut paths = BUNDLES.iter().map(|path| Path::new("/").join(path));
    let found = paths.find_map(|path| {
        let data = path.metadata().ok()?;
        let is_world_searchable = data.permissions().mode() & 0o004 != 0;
        let is_usable = data.is_file() && is_world_searchable && data.len() <= MAX_BUNDLE_BYTES;
        is_usable.then(|| read(path).ok()).flatten()
    });
    found.unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A tree of directories, links (`name -> to`) and files.
    fn tree(entries: &[&str]) -> tempfile::TempDir {
        let place = tempfile::tempdir().unwrap();
        for entry in entries {
            match entry.split_once(" -> ") {
                Some((name, to)) => symlink(to, place.path().join(name)).unwrap(),
                None if entry.ends_with('/') => {
                    create_dir_all(place.path().join(entry)).unwrap();
                }
                None => write(place.path().join(entry), "").unwrap(),
            }
        }
        place
    }

    fn trust_files_of(entries: &[&str], may_install: bool) -> Vec<(String, TrustFileKind)> {
        let all = list_trust_files(tree(entries).path(), may_install).into_iter();
        all.map(|entry| (entry.at.display().to_string(), entry.what))
            .collect()
    }

    #[test]
    fn bundle_is_at_the_systems_and_the_default_path() {
        let link = |at: &str| (at.to_owned(), TrustFileKind::Link);
        let bundle = |at: &str| (at.to_owned(), TrustFileKind::Bundle);
        let usual = [
            link("etc/ssl/certs"),
            bundle("etc/ssl/certs/ca-certificates.crt"),
        ];
        assert_eq!(trust_files_of(&[], true), usual);
        assert_eq!(trust_files_of(&["etc/ssl/certs/"], false), usual);
        let more = trust_files_of(&["etc/ssl/", "etc/ssl/cert.pem -> certs/nowhere"], false);
        assert_eq!(more, [&usual[..], &[bundle("etc/ssl/cert.pem")]].concat());
        // Links of directories are followed within the tree.
        for to in [
            "../pki/tls/certs",
            "/etc/pki/tls/certs",
            "../../../../etc/pki/tls/certs",
        ] {
            let link_directories = [
                "etc/ssl/",
                "etc/pki/tls/certs/",
                &format!("etc/ssl/certs -> {to}"),
                "etc/pki/tls/certs/ca-bundle.crt -> /elsewhere",
            ];
            assert_eq!(
                trust_files_of(&link_directories, false),
                [
                    link("etc/pki/tls/certs"),
                    bundle("etc/pki/tls/certs/ca-certificates.crt"),
                    bundle("etc/pki/tls/certs/ca-bundle.crt"),
                ]
            );
        }
    }

    #[test]
    fn root_is_an_anchor_if_the_agent_can_rebuild_bundles() {
        let system = ["etc/ssl/certs/", "usr/local/share/"];
        assert_eq!(trust_files_of(&system, false).len(), 2);
        let anchor = "usr/local/share/ca-certificates/palisade.crt";
        let all = trust_files_of(&system, true);
        assert_eq!(all.last(), Some(&(anchor.to_owned(), TrustFileKind::Root)));
    }

    #[test]
    fn circular_links_and_files_are_no_directory() {
        assert_eq!(
            trust_files_of(&["etc/ssl/", "etc/ssl/certs -> certs"], false),
            []
        );
        assert_eq!(trust_files_of(&["etc/ssl/", "etc/ssl/certs"], false), []);
    }
}
