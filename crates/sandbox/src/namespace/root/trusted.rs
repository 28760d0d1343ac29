//! Mounts the trusted certificates.

use std::io::{Error, ErrorKind};
use std::path::Path;

use nix::mount::{MsFlags, mount};

use super::{Tree, make_place, remount};
use crate::namespace::layer::Layer;
use crate::namespace::trust::{self, TrustStaging};

impl Tree<'_> {
    /// Mounts the trusted certificates at the paths of the environment variables. Returns whether a
    /// trust store for Java was written.
    pub(super) fn add_trust(&self) -> Result<bool, Error> {
        if self.staging.is_none() {
            return Ok(false);
        }
        let has_java = TrustStaging::add_java(Path::new(self.base))?;
        let at = make_place(Path::new(self.base), Path::new(trust::OWN))?;
        let none = None::<&str>;
        mount(
            Some(&TrustStaging::own()),
            &at,
            none,
            MsFlags::MS_BIND,
            none,
        )?;
        let quiet = MsFlags::MS_NOSUID | MsFlags::MS_NODEV | MsFlags::MS_NOEXEC;
        remount(&at, quiet | MsFlags::MS_RDONLY)?;
        Ok(has_java)
    }

    /// Mounts bundles over those of a layer that is no overlay.
    pub(super) fn bind_trust(&mut self, layer: &Layer, at: &Path) {
        let none = None::<&str>;
        let bundles = self
            .staging
            .iter()
            .flat_map(|staging| staging.bundles(&layer.inside));
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
                let shown = layer.inside.join(beneath);
                self.warnings.push(format!(
                    "the gate's certificate is not in /{}: {error}; point programs to \
                     /etc/palisade/ca.pem",
                    shown.display()
                ));
            }
        }
    }
}
