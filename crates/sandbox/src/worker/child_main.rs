//! Entry point of the snapshot worker.

use std::fs::File;
use std::io::Read;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use nix::fcntl::{Flock, FlockArg};

use super::{
    Answer, Request, SkippedPath, SnapshotReport, SnapshotRequest, profile, wait_until_readable,
};
use crate::git::error::GitError;
use crate::git::host_repository::HostRepository;
use crate::git::import::ImportOutcome;
use crate::git::manifest::Manifest;
use crate::git::quarantine::Quarantine;
use crate::git::snapshot::{CommitRequest, SnapshotOutcome};
use crate::git::unimported::UnimportedCommits;
use crate::git::walk::Walk;
use crate::namespace::{hardening, packet};

/// Maximum number of skipped paths in an answer, which is one packet; more are only counted.
const MAX_SKIPPED: usize = 200;
/// Maximum length of a path in an answer.
const MAX_PATH_BYTES: usize = 256;

/// Runs the worker process. Standard input is the socket to the gate. Call this function before any
/// other thread is started.
pub fn worker_main() -> ExitCode {
    let channel = std::io::stdin();
    let channel = channel.as_fd();
    if hardening::close_from(3).is_err() {
        return ExitCode::FAILURE;
    }
    let (request, mut descriptors) = match packet::receive::<Request>(channel) {
        Ok(Some(received)) => received,
        Ok(None) => return ExitCode::SUCCESS,
        Err(_) => return ExitCode::FAILURE,
    };
    let answer = match run_snapshot(&request, descriptors.pop()) {
        Ok(report) => Answer::Done(report),
        Err(error) => Answer::Failed(error.to_string()),
    };
    match packet::enlarge_buffers(&channel).and_then(|()| packet::send(channel, &answer, &[])) {
        Ok(()) => ExitCode::SUCCESS,
        Err(_) => ExitCode::FAILURE,
    }
}

fn run_snapshot(request: &Request, bundle: Option<OwnedFd>) -> Result<SnapshotReport, GitError> {
    let Request {
        snapshot,
        limits,
        subid_map,
    } = request;
    if let Some(subid_map) = subid_map {
        subid_map.enter().map_err(|error| GitError::Worker {
            cause: format!("could not switch to the sandbox's ids ({error})"),
            hint: "",
        })?;
    }
    // The operator's and the gate's files are opened first; the agent's files are read after the
    // profile is applied.
    let host_repository = HostRepository::discover(&snapshot.repository)?;
    let _lock = lock_manifest(&snapshot.manifest);
    let root = crate::git::walk::open_root(&snapshot.workspace)?;
    let has_subids = subid_map.is_some();
    profile::apply_profile(limits, &snapshot.bounds, has_subids).map_err(|error| {
        GitError::Worker {
            cause: format!("could not apply its seccomp profile ({error})"),
            hint: "",
        }
    })?;
    let known = match Manifest::load(&snapshot.manifest) {
        Ok(known) => known,
        Err(_) => host_repository.manifest_of(&snapshot.slug)?,
    };
    let deadline = Instant::now() + Duration::from_secs(limits.bundle_seconds);
    let (quarantine, imported, import_error) =
        import(&host_repository, snapshot, bundle, deadline)?;
    let workspace = root.try_clone().map_err(|error| GitError::Io {
        doing: "open",
        path: snapshot.workspace.clone(),
        source: error,
    })?;
    let mut walk = Walk::from_open_root(root, &snapshot.workspace, &known, &snapshot.bounds)?;
    let request = CommitRequest {
        slug: &snapshot.slug,
        message: &snapshot.message,
        agent_head: imported.map(|imported| imported.head),
        bounds: &snapshot.bounds,
    };
    let outcome = host_repository.snapshot_into(quarantine, &request, &known, &mut walk)?;
    outcome.manifest.save(&snapshot.manifest)?;
    let unimported = host_repository.unimported_commits(&snapshot.slug, &workspace)?;
    Ok(report(&outcome, imported, import_error, unimported))
}

/// Locks the manifest, so that one snapshot of a workspace runs at a time. The manifest is replaced
/// at the end of a snapshot, so the lock must be on the current file.
fn lock_manifest(manifest: &Path) -> Option<Flock<File>> {
    loop {
        let file = File::open(manifest).ok()?;
        let lock = Flock::lock(file, FlockArg::LockExclusive).ok()?;
        let (held, found) = (lock.metadata().ok()?, std::fs::metadata(manifest).ok()?);
        if (held.dev(), held.ino()) == (found.dev(), found.ino()) {
            return Some(lock);
        }
    }
}

/// Imports the bundle into a quarantine. A refused bundle yields a new empty quarantine and the
/// reason.
fn import(
    host_repository: &HostRepository,
    request: &SnapshotRequest,
    bundle: Option<OwnedFd>,
    deadline: Instant,
) -> Result<(Quarantine, Option<ImportOutcome>, Option<String>), GitError> {
    let quarantine = Quarantine::open(host_repository)?;
    let Some(bundle) = bundle else {
        return Ok((quarantine, None, None));
    };
    let mut stream = DeadlinePipe {
        pipe: File::from(bundle),
        deadline,
    };
    let mut first = [0];
    let refused = match stream.read(&mut first) {
        Ok(0) => return Ok((quarantine, None, None)),
        Ok(_) => {
            let mut stream = first.as_slice().chain(stream);
            match host_repository.import_into(
                &quarantine,
                &request.slug,
                &mut stream,
                None,
                &request.bounds,
            ) {
                Ok(imported) => return Ok((quarantine, imported, None)),
                Err(error) => error.to_string(),
            }
        }
        Err(error) => format!("the agent's commits did not arrive: {error}"),
    };
    drop(quarantine);
    Ok((Quarantine::open(host_repository)?, None, Some(refused)))
}

/// A pipe from an agent, read with a deadline.
struct DeadlinePipe {
    pipe: File,
    deadline: Instant,
}

impl Read for DeadlinePipe {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        if wait_until_readable(&self.pipe, self.deadline)? {
            self.pipe.read(buffer)
        } else {
            Err(std::io::Error::new(
                std::io::ErrorKind::TimedOut,
                "the bundle took too long",
            ))
        }
    }
}

fn report(
    outcome: &SnapshotOutcome,
    imported: Option<ImportOutcome>,
    import_error: Option<String>,
    unimported: UnimportedCommits,
) -> SnapshotReport {
    let shown = outcome.skipped.iter().take(MAX_SKIPPED);
    let skipped = shown.map(|(path, reason)| {
        let mut path = String::from_utf8_lossy(path).into_owned();
        path.truncate(path.floor_char_boundary(MAX_PATH_BYTES));
        SkippedPath {
            path,
            why: reason.why().to_owned(),
        }
    });
    SnapshotReport {
        tip: outcome.tip.to_string(),
        moved: outcome.moved,
        commits: imported.map_or(0, |imported| imported.commits),
        read: outcome.read,
        skipped: skipped.collect(),
        left_out: outcome.left_out,
        unsaved: outcome.unsaved,
        import_error,
        strays: unimported.shown,
        stray_count: unimported.count,
    }
}
