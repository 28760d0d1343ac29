//! Mounts the trusted certificates.

use std::io::{Error, ErrorKind};
use std::path::Path;

use nix::mount::{MsFlags, mount};

use super::{RootTree, create_mount_point, remount};
use crate::namespace::layer::Layer;
use crate::namespace::trust::{self, TrustStaging};

impl RootTree<'_> {
    /// Mounts the trusted certificates at the paths of the environment variables. Returns whether a
    /// trust store for Java was written.
    pub(super) fn add_trust(&self) -> Result<bool, Error> {
        if self.staging.is_none() {
            return Ok(false);
        }
        let has_java = TrustStaging::add_java(Path::new(self.base))?;
        let at = create_mount_point(Path::new(self.base), Path::new(trust::GATE_DIRECTORY))?;
        let none = None::<&str>;
        mount(
            Some(&TrustStaging::gate_directory()),
            &at,
            none,
            MsFlags::MS_BIND,
            none,
        )?;
        let restricted = MsFlags::MS_NOSUID | MsFlags::MS_NODEV | MsFlags::MS_NOEXEC;
        remount(&at, restricted | MsFlags::MS_RDONLY)?;
        Ok(has_java)
    }

    /// Mounts the bundle over the bundles of a layer that is mounted read-only without an overlay.
    pub(super) fn bind_trust(&mut self, layer: &Layer, at: &Path) {
        let none = None::<&str>;
        let bundles = self
            .staging
            .iter()
            .flat_map(|staging| staging.bundles(&layer.sandbox_path));
        for (beneath, bundle) in bundles {
            let to = at.join(beneath);
            let bound = match to.symlink_metadata() {
                Ok(found) if found.is_file() => {
                    mount(Some(&bundle), &to, none, MsFlags::MS_BIND, none)
                        .and_then(|()| remount(&to, MsFlags::MS_NOSUID | MsFlags::MS_RDONLY))
                        .map_err(Error::from)
                }
                Ok(_) => Err(Error::from(ErrorKind::InvalidInput)),
                Err(error) => Err(error),
            };
            if let Err(error) = bound {
                let shown = layer.sandbox_path.join(beneath);
                self.warnings.push(format!(
                    "the gate's certificate is not in /{}: {error}; point programs to \
                     /etc/palisade/ca.pem",
                    shown.display()
                ));
            }
        }
    }
}
