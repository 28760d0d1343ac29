//! What the judging child does.

use std::collections::HashSet;
use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::process::ExitCode;

use policy::push::{Case, Findings, ObjectFormat, Place};
use policy::refs::ObjectId;
use scan::detector::Detector;
use scan::shapes::ShapeDetector;

use super::bases::Bases;
use super::error::PackError;
use super::learnt::Learnt;
use super::pack::{self, PackBounds};
use super::{Answer, LONGEST_CASE, Order, confinement, history, restricted, whereabouts};
use crate::namespace::{hardening, packet};

/// The hidden subcommand. The order comes on standard input, the answer goes to standard
/// output. Call it before anything else: it wants to be alone in its process.
pub fn judge_main() -> ExitCode {
    let line = std::io::stdin();
    if hardening::close_from(3).is_err() {
        return ExitCode::FAILURE;
    }
    let (order, descriptors) = match packet::receive::<Order>(line.as_fd()) {
        Ok(Some(received)) => received,
        Ok(None) => return ExitCode::SUCCESS,
        Err(_) => return ExitCode::FAILURE,
    };
    let answer = match confinement::shut_in(&order.limits) {
        Ok(()) => serve(&order, descriptors),
        Err(error) => Answer::Failed(format!("could not shut itself in ({error})")),
    };
    let mut out = std::io::stdout().lock();
    let told = serde_json::to_writer(&mut out, &answer).map_err(std::io::Error::from);
    match told.and_then(|()| out.flush()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(_) => ExitCode::FAILURE,
    }
}

fn serve(order: &Order, descriptors: Vec<OwnedFd>) -> Answer {
    let mut files = descriptors.into_iter().map(File::from);
    let case = match files.next().map(read_case) {
        Some(Ok(case)) => case,
        Some(Err(error)) => return Answer::Failed(format!("could not read its case ({error})")),
        None => return Answer::Failed("was given no case".to_owned()),
    };
    let pack = order.pack.and_then(|offset| Some((files.next()?, offset)));
    let bases: Vec<_> = files.zip(order.bases.iter().copied()).collect();
    if pack.is_some() != order.pack.is_some() || bases.len() != order.bases.len() {
        return Answer::Failed("was not given every file".to_owned());
    }
    let shapes = match case.scan.then(ShapeDetector::built_in).transpose() {
        Ok(shapes) => shapes,
        Err(error) => return Answer::Failed(error.to_string()),
    };
    let detector = shapes.as_ref().map(|shapes| shapes as &dyn Detector);
    match inquire(&case, pack.as_ref(), &bases, detector, &order.limits.pack) {
        Ok(findings) => Answer::Found(findings),
        Err(error @ PackError::TooMuch { .. }) => Answer::TooMuch(error.to_string()),
        Err(PackError::Io(error)) => Answer::Failed(format!("could not read ({error})")),
        Err(
            error @ (PackError::Short
            | PackError::Malformed(_)
            | PackError::Object { .. }
            | PackError::Thin),
        ) => Answer::Malformed(error.to_string()),
    }
}

fn read_case(mut file: File) -> std::io::Result<Case> {
    // Its position is where the parent stopped writing.
    std::io::Seek::rewind(&mut file)?;
    let mut text = Vec::new();
    file.take(LONGEST_CASE).read_to_end(&mut text)?;
    Ok(serde_json::from_slice(&text)?)
}

fn inquire(
    case: &Case,
    pack: Option<&(File, u64)>,
    bases: &[(File, u64)],
    detector: Option<&dyn Detector>,
    bounds: &PackBounds,
) -> Result<Findings, PackError> {
    let ids = case
        .updates
        .iter()
        .flat_map(|update| [&update.old, &update.new]);
    if ids
        .chain(&case.default_tip)
        .any(|id| format_of(id) != case.format)
    {
        return Err(PackError::Malformed("ids of another format"));
    }
    let mut learnt = Learnt::new(case.format, &case.restricted, detector);
    let bases = Bases {
        files: bases,
        format: case.format,
        bounds,
    };
    bases.tell(&mut learnt)?;
    learnt.push_begins();
    for (place, update) in case.updates.iter().enumerate() {
        learnt.text(update.name.as_bytes(), &Place::Ref(place));
    }
    for (place, option) in case.options.iter().enumerate() {
        learnt.text(option, &Place::Option(place));
    }
    let mut objects = 0;
    if let Some((file, offset)) = pack {
        let mut lender = |wanted: &HashSet<ObjectId>| bases.lend(wanted);
        objects = pack::read(file, *offset, case.format, bounds, &mut lender, &mut learnt)?;
    }
    let restricted = restricted::judge(case, &learnt)?;
    let fast_forward = history::fast_forwards(case, &learnt);
    let mut seen = std::mem::take(&mut learnt.seen);
    if let Some((file, offset)) = pack {
        let roots: HashSet<ObjectId> = learnt.commits.values().map(|one| one.tree).collect();
        whereabouts::fill_in(&mut seen.sightings, &roots, (file, *offset), &bases)?;
    }
    Ok(Findings {
        objects,
        secrets: seen.sightings,
        more_secrets: seen.is_more,
        restricted,
        fast_forward,
    })
}

const fn format_of(id: &ObjectId) -> ObjectFormat {
    match id {
        ObjectId::Sha1(_) => ObjectFormat::Sha1,
        ObjectId::Sha256(_) => ObjectFormat::Sha256,
    }
}
