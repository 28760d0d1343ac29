//! What a worker does with its order.

use std::fs::File;
use std::io::Read;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use nix::fcntl::{Flock, FlockArg};

use super::{Answer, Order, Skipped, SnapshotOrder, SnapshotReport, confinement, readable};
use crate::git::error::GitError;
use crate::git::home::Home;
use crate::git::import::Imported;
use crate::git::manifest::Manifest;
use crate::git::objects::Quarantine;
use crate::git::snapshot::{Request, Snapshot};
use crate::git::stray::Strays;
use crate::git::walk::Walk;
use crate::namespace::{hardening, packet};

/// An answer is one packet; what does not fit is only counted.
const MOST_SKIPPED: usize = 200;
const LONGEST_PATH: usize = 256;

/// The hidden subcommand. The line to the gate is standard input. Call it before anything
/// else: it wants to be alone in its process.
pub fn worker_main() -> ExitCode {
    let line = std::io::stdin();
    let line = line.as_fd();
    if hardening::close_from(3).is_err() {
        return ExitCode::FAILURE;
    }
    let (order, mut descriptors) = match packet::receive::<Order>(line) {
        Ok(Some(received)) => received,
        Ok(None) => return ExitCode::SUCCESS,
        Err(_) => return ExitCode::FAILURE,
    };
    let answer = match serve(&order, descriptors.pop()) {
        Ok(report) => Answer::Done(report),
        Err(error) => Answer::Failed(error.to_string()),
    };
    match packet::widen(&line).and_then(|()| packet::send(line, &answer, &[])) {
        Ok(()) => ExitCode::SUCCESS,
        Err(_) => ExitCode::FAILURE,
    }
}

fn serve(order: &Order, bundle: Option<OwnedFd>) -> Result<SnapshotReport, GitError> {
    let Order {
        snapshot,
        limits,
        loan,
    } = order;
    if let Some(loan) = loan {
        loan.take().map_err(|stumble| GitError::Worker {
            how: format!("could not act as the sandbox's ids ({stumble})"),
            hint: "",
        })?;
    }
    // What is the operator's, or ours, is opened first; the agent's is read behind the wall.
    let home = Home::discover(&snapshot.repository)?;
    let _turn = take_turn(&snapshot.manifest);
    let root = crate::git::walk::open_root(&snapshot.workspace)?;
    let is_lent = loan.is_some();
    confinement::shut_in(limits, &snapshot.bounds, is_lent).map_err(|error| GitError::Worker {
        how: format!("could not shut itself in ({error})"),
        hint: "",
    })?;
    let known = match Manifest::load(&snapshot.manifest) {
        Ok(known) => known,
        Err(_) => home.manifest_of(&snapshot.slug)?,
    };
    let until = Instant::now() + Duration::from_secs(limits.bundle_seconds);
    let (quarantine, imported, import_error) = import(&home, snapshot, bundle, until)?;
    let workspace = root.try_clone().map_err(|error| GitError::Io {
        doing: "open",
        path: snapshot.workspace.clone(),
        source: error,
    })?;
    let mut walk = Walk::below(root, &snapshot.workspace, &known, &snapshot.bounds)?;
    let request = Request {
        slug: &snapshot.slug,
        message: &snapshot.message,
        agent_head: imported.map(|imported| imported.head),
        bounds: &snapshot.bounds,
    };
    let made = home.snapshot_into(quarantine, &request, &known, &mut walk)?;
    made.manifest.save(&snapshot.manifest)?;
    let strays = home.strays(&snapshot.slug, &workspace)?;
    Ok(report(&made, imported, import_error, strays))
}

/// One snapshot of a workspace at a time: whoever holds the manifest. It is replaced at the
/// end, so the one behind the name counts.
fn take_turn(manifest: &Path) -> Option<Flock<File>> {
    loop {
        let file = File::open(manifest).ok()?;
        let lock = Flock::lock(file, FlockArg::LockExclusive).ok()?;
        let (held, found) = (lock.metadata().ok()?, std::fs::metadata(manifest).ok()?);
        if (held.dev(), held.ino()) == (found.dev(), found.ino()) {
            return Some(lock);
        }
    }
}

/// Reads the bundle on probation. One that is refused leaves a clean place, and its reason.
fn import(
    home: &Home,
    order: &SnapshotOrder,
    bundle: Option<OwnedFd>,
    until: Instant,
) -> Result<(Quarantine, Option<Imported>, Option<String>), GitError> {
    let quarantine = Quarantine::open(home)?;
    let Some(bundle) = bundle else {
        return Ok((quarantine, None, None));
    };
    let mut stream = Patient {
        pipe: File::from(bundle),
        until,
    };
    let mut first = [0];
    let refused = match stream.read(&mut first) {
        Ok(0) => return Ok((quarantine, None, None)),
        Ok(_) => {
            let mut stream = first.as_slice().chain(stream);
            match home.import_into(&quarantine, &order.slug, &mut stream, None, &order.bounds) {
                Ok(imported) => return Ok((quarantine, imported, None)),
                Err(error) => error.to_string(),
            }
        }
        Err(error) => format!("the agent's commits did not arrive: {error}"),
    };
    drop(quarantine);
    Ok((Quarantine::open(home)?, None, Some(refused)))
}

/// A pipe from an agent, who may write slowly or not at all.
struct Patient {
    pipe: File,
    until: Instant,
}

impl Read for Patient {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        if readable(&self.pipe, self.until)? {
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
    made: &Snapshot,
    imported: Option<Imported>,
    import_error: Option<String>,
    strays: Strays,
) -> SnapshotReport {
    let shown = made.skipped.iter().take(MOST_SKIPPED);
    let skipped = shown.map(|(path, oddity)| {
        let mut path = String::from_utf8_lossy(path).into_owned();
        path.truncate(path.floor_char_boundary(LONGEST_PATH));
        Skipped {
            path,
            why: oddity.why().to_owned(),
        }
    });
    SnapshotReport {
        tip: made.tip.to_string(),
        moved: made.moved,
        commits: imported.map_or(0, |imported| imported.commits),
        read: made.read,
        skipped: skipped.collect(),
        left_out: made.left_out,
        unsaved: made.unsaved,
        import_error,
        strays: strays.shown,
        stray_count: strays.count,
    }
}
