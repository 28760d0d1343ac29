//! What programs inside trust: the system's certificates, and the gate's root.
//!
//! ```text
//!   /etc/palisade/ca.pem                  the root alone
//!   /etc/palisade/truststore.jks          all of them, as Java reads them, if there is one
//!   /etc/ssl/certs/ca-certificates.crt    all of them, as everybody else does; and wherever
//!                                         else this system keeps its bundle
//!   /etc/ssl/certs/1a2b3c4d.0             the root, where OpenSSL looks in a directory
//!   /usr/local/share/ca-certificates/     the root, where the agent is root inside: a bundle
//!                                         that it has made anew holds it as well
//! ```
//!
//! Init writes them to a tmpfs of its own. From there they come in as the topmost lower layer
//! of the overlays they belong to: what the agent makes of them is in its upper layer, where
//! there is one, and renames over them work. `/etc/palisade` is a bind that nobody changes.
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

/// All certificates in one file, in every sandbox.
const BUNDLE: &str = "etc/ssl/certs/ca-certificates.crt";

/// Where systems keep such a file.
const BUNDLES: &[&str] = &[
    BUNDLE,
    "etc/pki/tls/certs/ca-bundle.crt",
    "etc/ssl/ca-bundle.pem",
    "etc/ssl/cert.pem",
];

/// From where a system's own tools make the bundle anew.
const ANCHORS: &[&str] = &[
    "usr/local/share/ca-certificates/palisade.crt",
    "etc/pki/ca-trust/source/anchors/palisade.crt",
];

/// Ours alone, from the root on.
pub(crate) const OWN: &str = "etc/palisade";

/// The root, inside.
const ROOT: &str = "/etc/palisade/ca.pem";

/// Where init puts things together, from the sandbox's `fs` on.
const STAGING: &str = "lower/trust";

/// All certificates, from [`STAGING`] on; every bundle is a link to it.
const ALL: &str = "bundle";

/// The root, from [`STAGING`] on.
const OWN_ROOT: &str = "own/ca.pem";

/// Java's trust store, from [`STAGING`] on.
const OWN_STORE: &str = "own/truststore.jks";

/// Where a Java is, if there is one: not where an agent without power puts things.
const JAVAS: &[&str] = &["usr/bin/java", "usr/local/bin/java", "usr/lib/jvm"];

/// The longest bundle of the host's that comes in. Usual ones have a quarter of a MiB.
const MAX_BUNDLE_BYTES: u64 = 4 << 20;

/// How many links a path may lead through, as the kernel has it.
const MAX_LINKS: usize = 40;

/// A file that has to be somewhere inside.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Entry {
    /// From the root on; no link on the way.
    at: PathBuf,
    what: What,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum What {
    /// All certificates.
    Bundle,
    /// The root's own.
    Root,
    /// A link to the root, in this directory, by the name that OpenSSL looks for.
    Link,
}

/// Where what has to be, in a tree that is to be `/`. In the launcher, which may walk there.
pub(crate) fn gather(tree: &Path, installs: bool) -> Vec<Entry> {
    let mut all: Vec<Entry> = Vec::new();
    let mut add = |at: PathBuf, what| {
        if all.iter().all(|known| known.at != at) {
            all.push(Entry { at, what });
        }
    };
    for &bundle in BUNDLES {
        let Some(at) = resolve(tree, bundle) else {
            continue;
        };
        let is_ours = bundle == BUNDLE;
        if let Some(directory) = at.parent().filter(|_| is_ours) {
            add(directory.to_owned(), What::Link);
        }
        if is_ours || tree.join(&at).symlink_metadata().is_ok() {
            add(at, What::Bundle);
        }
    }
    let anchors = ANCHORS.iter().filter(|_| installs);
    for at in anchors.filter_map(|anchor| resolve(tree, anchor)) {
        let above = at.parent().and_then(Path::parent);
        if above.is_some_and(|above| tree.join(above).is_dir()) {
            add(at, What::Root);
        }
    }
    all
}

/// The same file by a path whose directories are no links. Its own name may be one: it is
/// what we hide.
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
                    // One that is not there can be made.
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

/// What is trusted, ready to be put over the layers it belongs to.
pub(crate) struct TrustStaging {
    /// The layer's place inside, the file's beneath it, and which file.
    entries: Vec<(PathBuf, PathBuf, What)>,
    /// Directories with a link to the root, from [`STAGING`] on.
    linked: Vec<PathBuf>,
}

impl TrustStaging {
    /// Writes everything, and sees which layer each file belongs to. `nothing` is an empty
    /// directory.
    pub(crate) fn fill(trust: &Trust, layers: &mut Layers, nothing: &str) -> Result<Self> {
        let staging = Path::new(STAGING);
        create_dir_all(staging.join("own"))?;
        let mut bundle = system_bundle();
        if bundle.is_empty() {
            layers.warnings.push(
                "no certificates of the system were found: only the gate's is trusted".into(),
            );
        } else if !bundle.ends_with(b"\n") {
            bundle.push(b'\n');
        }
        bundle.extend(trust.root.as_bytes());
        write(staging.join(OWN_ROOT), &trust.root)?;
        write(staging.join(ALL), bundle)?;
        // A host without any certificates may lack the directory.
        let first = Path::new(BUNDLE);
        let has = |at: &Path| layer_of(layers, at).is_some();
        if layers.trusted.iter().any(|one| one.at == first) && !has(first) {
            let at = first.parent().and_then(Path::parent).unwrap_or(first);
            layers.layers.insert(0, Layer::empty(at, nothing));
        }
        let mut entries = Vec::new();
        for Entry { at, what } in std::mem::take(&mut layers.trusted) {
            let at = match what {
                What::Link => at.join(format!("{:08x}.0", trust.hash)),
                What::Bundle | What::Root => at,
            };
            let Some(layer) = layer_of(layers, &at) else {
                if what == What::Bundle {
                    layers.warnings.push(format!(
                        "the gate's certificate is not in /{}: that place does not come in; point \
                         programs to {ROOT}",
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
            linked: Vec::new(),
        })
    }

    /// What a later root is added to. To be called when every layer is in its place.
    pub(crate) fn into_files(self) -> Result<TrustFiles> {
        TrustFiles::open(Path::new(STAGING), self.linked)
    }

    /// What is `/etc/palisade` inside.
    pub(crate) fn own() -> PathBuf {
        Path::new(STAGING).join("own")
    }

    /// Adds what Java wants, if there is one in the tree that is to be `/`. Says whether.
    pub(crate) fn add_java(base: &Path) -> Result<bool> {
        let base = std::fs::File::open(base)?;
        // Links in there are an agent's, and lead nowhere else.
        let how = OpenHow::new()
            .flags(OFlag::O_PATH | OFlag::O_CLOEXEC)
            .resolve(ResolveFlag::RESOLVE_IN_ROOT | ResolveFlag::RESOLVE_NO_MAGICLINKS);
        let found = JAVAS.iter().any(|path| openat2(&base, *path, how).is_ok());
        if found {
            // It takes a millisecond, which most need not wait for.
            let bundle = read(Path::new(STAGING).join(ALL))?;
            write(Path::new(STAGING).join(OWN_STORE), java::store(&bundle))?;
        }
        Ok(found)
    }

    /// A directory to go over the layer that is at `inside`, if something belongs there.
    pub(crate) fn over(&mut self, inside: &Path, name: &str) -> Result<Option<PathBuf>> {
        let (staging, over) = (Path::new(STAGING), PathBuf::from(format!("over-{name}")));
        let top = staging.join(&over);
        let mut any = false;
        for (_, beneath, what) in self.entries.iter().filter(|(layer, ..)| layer == inside) {
            let at = top.join(beneath);
            create_dir_all(at.parent().unwrap_or(&top))?;
            match what {
                What::Bundle => hard_link(staging.join(ALL), at)?,
                What::Root => hard_link(staging.join(OWN_ROOT), at)?,
                What::Link => {
                    symlink(ROOT, at)?;
                    let directory = beneath.parent().unwrap_or(Path::new(""));
                    self.linked.push(over.join(directory));
                }
            }
            any = true;
        }
        Ok(any.then_some(top))
    }

    /// Where in the layer that is at `inside` a bundle has to be, and what it is: for a layer
    /// that nothing can go over.
    pub(crate) fn bundles(&self, inside: &Path) -> impl Iterator<Item = (&Path, PathBuf)> {
        let of = self
            .entries
            .iter()
            .filter(move |(layer, _, what)| layer == inside && *what == What::Bundle);
        of.map(|(_, beneath, _)| (beneath.as_path(), Path::new(STAGING).join(ALL)))
    }
}

/// The place of the layer that a path is in.
fn layer_of(layers: &Layers, at: &Path) -> Option<PathBuf> {
    let all = layers.rootfs.iter().chain(&layers.layers);
    let above = all.filter(|layer| at.starts_with(&layer.inside));
    let nearest = above.max_by_key(|layer| layer.inside.components().count());
    nearest.map(|layer| layer.inside.clone())
}

/// All certificates of the host's, if they are for everybody's eyes.
fn system_bundle() -> Vec<u8> {
    let mut paths = BUNDLES.iter().map(|path| Path::new("/").join(path));
    let found = paths.find_map(|path| {
        let data = path.metadata().ok()?;
        let is_world_searchable = data.permissions().mode() & 0o004 != 0;
        let is_it = data.is_file() && is_world_searchable && data.len() <= MAX_BUNDLE_BYTES;
        is_it.then(|| read(path).ok()).flatten()
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

    fn gathered(entries: &[&str], installs: bool) -> Vec<(String, What)> {
        let all = gather(tree(entries).path(), installs).into_iter();
        all.map(|entry| (entry.at.display().to_string(), entry.what))
            .collect()
    }

    #[test]
    fn a_bundle_is_where_the_system_has_one_and_at_one_place_always() {
        let link = |at: &str| (at.to_owned(), What::Link);
        let bundle = |at: &str| (at.to_owned(), What::Bundle);
        let usual = [
            link("etc/ssl/certs"),
            bundle("etc/ssl/certs/ca-certificates.crt"),
        ];
        assert_eq!(gathered(&[], true), usual);
        assert_eq!(gathered(&["etc/ssl/certs/"], false), usual);
        let more = gathered(&["etc/ssl/", "etc/ssl/cert.pem -> certs/nowhere"], false);
        assert_eq!(more, [&usual[..], &[bundle("etc/ssl/cert.pem")]].concat());
        // Directories by way of links, however far up they pretend to lead.
        for to in [
            "../pki/tls/certs",
            "/etc/pki/tls/certs",
            "../../../../etc/pki/tls/certs",
        ] {
            let linked = [
                "etc/ssl/",
                "etc/pki/tls/certs/",
                &format!("etc/ssl/certs -> {to}"),
                "etc/pki/tls/certs/ca-bundle.crt -> /elsewhere",
            ];
            assert_eq!(
                gathered(&linked, false),
                [
                    link("etc/pki/tls/certs"),
                    bundle("etc/pki/tls/certs/ca-certificates.crt"),
                    bundle("etc/pki/tls/certs/ca-bundle.crt"),
                ]
            );
        }
    }

    #[test]
    fn a_root_is_left_where_bundles_are_made_from_if_somebody_can_make_them() {
        let system = ["etc/ssl/certs/", "usr/local/share/"];
        assert_eq!(gathered(&system, false).len(), 2);
        let anchor = "usr/local/share/ca-certificates/palisade.crt";
        let all = gathered(&system, true);
        assert_eq!(all.last(), Some(&(anchor.to_owned(), What::Root)));
    }

    #[test]
    fn links_in_a_circle_and_files_in_the_way_are_no_place() {
        assert_eq!(gathered(&["etc/ssl/", "etc/ssl/certs -> certs"], false), []);
        assert_eq!(gathered(&["etc/ssl/", "etc/ssl/certs"], false), []);
    }
}
