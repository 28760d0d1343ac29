//! A sandbox's files as the gate has them changed: by itself where it can, else by a process
//! that acts as the sandbox's lent ids.

use std::io::{Error, ErrorKind};
use std::path::{Path, PathBuf};

use nix::unistd::Uid;
use policy::id::SandboxId;

use super::chore::Chore;
use super::loan::Loan;
use super::protocol::Identity;
use super::subids::{Grant, Lack, Slice};
use super::{Namespace, removal};
use crate::checkpoint::{self, CheckpointBounds, CheckpointError, CopySummary};
use crate::contract::{SandboxConfig, SandboxError};

/// What works without ids of the sandbox's own.
const OTHERWISE: &str = "without --root, installs into the home, a virtual environment or an npm \
                         prefix work";

/// How many may die of a removal.
const REMOVERS: u32 = 3;

impl Namespace {
    /// Leave to act as these sandboxes' ids, where any of them are lent.
    pub fn loan(&self, ids: &[&SandboxId]) -> Result<Option<Loan>, SandboxError> {
        let mut slices = Vec::new();
        for id in ids {
            slices.extend(lent(self.read(id)?.identity));
        }
        loan_of(&slices)
    }

    /// Whether an agent can be root inside, before anything is touched.
    pub(super) fn check_root(config: &SandboxConfig) -> Result<(), SandboxError> {
        if !config.system.root || Uid::effective().is_root() {
            return Ok(());
        }
        Grant::read().map_err(no_root)?;
        let asked = config.system.host_paths.iter().chain(&config.system.rootfs);
        for path in asked {
            let closed = path.ancestors().skip(1).find(|above| !is_open(above));
            if let Some(above) = closed {
                let above = above.display();
                return Err(SandboxError::Create {
                    step: path.display().to_string(),
                    reason: format!(
                        "with --root the sandbox has ids of its own, which may not walk \
                         through {above}; chmod o+x {above}, or put it elsewhere"
                    ),
                });
            }
        }
        Ok(())
    }

    /// Lent ids for one more sandbox.
    pub(super) fn lend(&self, seed: &str, taken: &[u32]) -> Result<Identity, SandboxError> {
        let slice = Grant::read()
            .and_then(|grant| grant.choose(seed, taken))
            .map_err(no_root)?;
        Ok(Identity::Range {
            first: slice.first,
            lent: Some(slice),
        })
    }

    /// Does something to a sandbox's tree.
    pub(super) fn tidy(&self, id: &SandboxId, chore: Chore) -> std::io::Result<()> {
        match self.loan(&[id]).map_err(Error::other)? {
            None => chore.run(),
            Some(loan) => self.have_done(loan, Some(self.lock_of(id)), chore),
        }
        .map(drop)
    }

    /// Removes a directory and everything in it, whoever made it.
    pub fn remove_files(&self, path: &Path) -> std::io::Result<()> {
        match removal::remove_tree(path) {
            Err(error)
                if error.kind() == ErrorKind::PermissionDenied && !Uid::effective().is_root() =>
            {
                // Somebody to whom ids were lent was at work there. Which ones is not asked:
                // the record may be gone, or damaged.
                let grant = Grant::read().map_err(|lack| {
                    Error::new(error.kind(), format!("{error}; lent ids may help: {lack}"))
                })?;
                self.remove_as(&grant.loan_of_all(), path)
            }
            other => other,
        }
    }

    /// Removes as lent ids. Whoever does it may be killed, by a kernel that wants memory for
    /// one; what is left then goes as well.
    fn remove_as(&self, loan: &Loan, path: &Path) -> std::io::Result<()> {
        let mut tries = 0;
        loop {
            let path = path.to_owned();
            tries += 1;
            match self.have_done(loan.clone(), None, Chore::Remove { path }) {
                Err(error) if error.kind() == ErrorKind::UnexpectedEof && tries < REMOVERS => {}
                other => return other.map(drop),
            }
        }
    }

    /// Where a workspace is made that has to be given to lent ids.
    pub fn staging(&self, id: &SandboxId) -> PathBuf {
        self.place(id).join("workspace")
    }

    /// Gives the workspace at [`Namespace::staging`] to the agent and puts it in its place.
    /// `manifest` says what is in it, before and after.
    pub fn settle(&self, id: &SandboxId, manifest: &Path) -> Result<(), SandboxError> {
        let owner = self.owner(id)?.ok_or_else(|| {
            SandboxError::system("giving the workspace away")(Error::other("to nobody"))
        })?;
        let chore = Chore::Settle {
            from: self.staging(id),
            to: self.workspace(id),
            manifest: manifest.to_owned(),
            owner,
        };
        self.tidy(id, chore)
            .map_err(SandboxError::system("giving the workspace away"))
    }

    /// Keeps a sandbox's files as a checkpoint.
    pub fn save(&self, id: &SandboxId, to: &Path) -> Result<CopySummary, CheckpointError> {
        let (from, first) = self.tree(id).map_err(other("look for", to))?;
        let Some(loan) = self.loan(&[id]).map_err(other("read", &from))? else {
            let bounds = CheckpointBounds::default();
            return checkpoint::save(&from, to, first, bounds, &|_| {});
        };
        if to.symlink_metadata().is_ok() {
            return Err(CheckpointError::Exists(to.to_owned()));
        }
        let to = to.to_owned();
        self.copy(id, loan, Chore::Save { from, to, first })
    }

    /// Makes the tree of a sandbox from a checkpoint.
    pub fn unpack(
        &self,
        id: &SandboxId,
        from: &Path,
        to: &Path,
        first: Option<u32>,
    ) -> Result<CopySummary, CheckpointError> {
        let Some(loan) = self.loan(&[id]).map_err(other("read", from))? else {
            let bounds = CheckpointBounds::default();
            return checkpoint::restore(from, to, first, bounds, &|_| {});
        };
        let (from, to) = (from.to_owned(), to.to_owned());
        self.copy(id, loan, Chore::Restore { from, to, first })
    }

    /// Makes the tree of a sandbox from another one's.
    pub fn copy_tree(
        &self,
        source: &SandboxId,
        id: &SandboxId,
        to: &Path,
        first: Option<u32>,
    ) -> Result<CopySummary, CheckpointError> {
        let from = self.tree(source).map_err(other("look for", to))?;
        let Some(loan) = self.loan(&[source, id]).map_err(other("read", &from.0))? else {
            let bounds = CheckpointBounds::default();
            return checkpoint::fork(&from.0, from.1, to, first, bounds, &|_| {});
        };
        let to = (to.to_owned(), first);
        self.copy(id, loan, Chore::Fork { from, to })
    }

    fn copy(
        &self,
        id: &SandboxId,
        loan: Loan,
        chore: Chore,
    ) -> Result<CopySummary, CheckpointError> {
        let io = |source| CheckpointError::Io {
            doing: "copy",
            path: self.place(id).join("fs"),
            source,
        };
        let copied = self.have_done(loan, Some(self.lock_of(id)), chore);
        copied
            .map_err(io)?
            .ok_or_else(|| io(Error::from(ErrorKind::InvalidData)))
    }

    fn lock_of(&self, id: &SandboxId) -> PathBuf {
        self.place(id).join("launcher.lock")
    }
}

/// The slice that an identity is, where it is one.
fn lent(identity: Identity) -> Option<Slice> {
    match identity {
        Identity::Range { lent, .. } => lent,
        Identity::Single => None,
    }
}

/// Leave to act as an identity, where its ids are lent.
pub(super) fn loan_for(identity: Identity) -> Result<Option<Loan>, SandboxError> {
    loan_of(lent(identity).as_slice())
}

fn loan_of(slices: &[Slice]) -> Result<Option<Loan>, SandboxError> {
    if slices.is_empty() {
        return Ok(None);
    }
    let grant = Grant::read().map_err(|lack| SandboxError::Unavailable {
        backend: "namespace",
        reason: format!("the sandbox's ids are no longer lent to this user: {lack}"),
    })?;
    Ok(Some(grant.loan(slices)))
}

fn no_root(lack: Lack) -> SandboxError {
    SandboxError::Create {
        step: "--root".to_owned(),
        reason: format!("it needs ids of the sandbox's own: {lack} ({OTHERWISE})"),
    }
}

/// Whether everybody may walk through a directory.
fn is_open(path: &Path) -> bool {
    use std::os::unix::fs::MetadataExt;
    path.metadata().is_ok_and(|data| data.mode() & 0o001 != 0)
}

fn other(doing: &'static str, path: &Path) -> impl FnOnce(SandboxError) -> CheckpointError {
    let path = path.to_owned();
    move |error| CheckpointError::Io {
        doing,
        path,
        source: Error::other(error),
    }
}
