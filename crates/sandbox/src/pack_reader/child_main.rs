//! Entry point of the pack reader's child process.

use std::collections::HashSet;
use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::process::ExitCode;

use policy::push::{Findings, ObjectFormat, PushContext, SecretLocation};
use policy::refs::ObjectId;
use scan::detector::Detector;
use scan::formats::FormatDetector;

use super::base_packs::BasePacks;
use super::error::PackError;
use super::object_index::ObjectIndex;
use super::pack::{self, PackBounds};
use super::{Answer, MAX_CONTEXT_BYTES, Request, history, profile, restricted_paths, secret_paths};
use crate::namespace::{hardening, packet};

/// Runs the child process: the request arrives on standard input, the answer is written to standard
/// output. Call this function before any other thread is started.
pub fn pack_reader_main() -> ExitCode {
    let channel = std::io::stdin();
    if hardening::close_from(3).is_err() {
        return ExitCode::FAILURE;
    }
    let (request, descriptors) = match packet::receive::<Request>(channel.as_fd()) {
        Ok(Some(received)) => received,
        Ok(None) => return ExitCode::SUCCESS,
        Err(_) => return ExitCode::FAILURE,
    };
    let answer = match profile::apply_profile(&request.limits) {
        Ok(()) => read_request_files(&request, descriptors),
        Err(error) => Answer::Failed(format!("could not apply its seccomp profile ({error})")),
    };
    let mut out = std::io::stdout().lock();
    let written = serde_json::to_writer(&mut out, &answer).map_err(std::io::Error::from);
    match written.and_then(|()| out.flush()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(_) => ExitCode::FAILURE,
    }
}

fn read_request_files(request: &Request, descriptors: Vec<OwnedFd>) -> Answer {
    let mut files = descriptors.into_iter().map(File::from);
    let context = match files.next().map(read_context) {
        Some(Ok(context)) => context,
        Some(Err(error)) => {
            return Answer::Failed(format!("could not read the push context ({error})"));
        }
        None => return Answer::Failed("received no push context".to_owned()),
    };
    let pack = request
        .pack
        .and_then(|offset| Some((files.next()?, offset)));
    let bases: Vec<_> = files.zip(request.bases.iter().copied()).collect();
    if pack.is_some() != request.pack.is_some() || bases.len() != request.bases.len() {
        return Answer::Failed("did not receive every file".to_owned());
    }
    let format_detector = match context.scan.then(FormatDetector::built_in).transpose() {
        Ok(detector) => detector,
        Err(error) => return Answer::Failed(error.to_string()),
    };
    let detector = format_detector
        .as_ref()
        .map(|detector| detector as &dyn Detector);
    match read_push(
        &context,
        pack.as_ref(),
        &bases,
        detector,
        &request.limits.pack,
    ) {
        Ok(findings) => Answer::Found(findings),
        Err(error @ PackError::TooMuch { .. }) => Answer::TooMuch(error.to_string()),
        Err(PackError::Io(error)) => Answer::Failed(format!("could not read ({error})")),
        Err(
            error @ (PackError::Truncated
            | PackError::Malformed(_)
            | PackError::Object { .. }
            | PackError::MissingBase),
        ) => Answer::Malformed(error.to_string()),
    }
}

fn read_context(mut file: File) -> std::io::Result<PushContext> {
    // The parent's writes have moved the shared file position to the end.
    std::io::Seek::rewind(&mut file)?;
    let mut text = Vec::new();
    file.take(MAX_CONTEXT_BYTES).read_to_end(&mut text)?;
    Ok(serde_json::from_slice(&text)?)
}

fn read_push(
    context: &PushContext,
    pack: Option<&(File, u64)>,
    bases: &[(File, u64)],
    detector: Option<&dyn Detector>,
    bounds: &PackBounds,
) -> Result<Findings, PackError> {
    let ids = context
        .updates
        .iter()
        .flat_map(|update| [&update.old, &update.new]);
    if ids
        .chain(&context.default_tip)
        .any(|id| object_format(id) != context.format)
    {
        return Err(PackError::Malformed("ids of another format"));
    }
    let mut object_index = ObjectIndex::new(context.format, &context.restricted, detector);
    let bases = BasePacks {
        files: bases,
        format: context.format,
        bounds,
    };
    bases.visit(&mut object_index)?;
    object_index.begin_push();
    for (index, update) in context.updates.iter().enumerate() {
        object_index.scan_text(update.name.as_bytes(), &SecretLocation::Ref(index));
    }
    for (index, option) in context.options.iter().enumerate() {
        object_index.scan_text(option, &SecretLocation::Option(index));
    }
    let mut objects = 0;
    if let Some((file, offset)) = pack {
        let mut load_bases = |wanted: &HashSet<ObjectId>| bases.load(wanted);
        objects = pack::read(
            file,
            *offset,
            context.format,
            bounds,
            &mut load_bases,
            &mut object_index,
        )?;
    }
    let restricted = restricted_paths::compare(context, &object_index)?;
    let fast_forward = history::fast_forwards(context, &object_index);
    let mut sightings = std::mem::take(&mut object_index.sightings);
    if let Some((file, offset)) = pack {
        let roots: HashSet<ObjectId> = object_index
            .commits
            .values()
            .map(|commit| commit.tree)
            .collect();
        secret_paths::resolve_paths(&mut sightings.list, &roots, (file, *offset), &bases)?;
    }
    Ok(Findings {
        objects,
        secrets: sightings.list,
        more_secrets: sightings.is_truncated,
        restricted,
        fast_forward,
    })
}

const fn object_format(id: &ObjectId) -> ObjectFormat {
    match id {
        ObjectId::Sha1(_) => ObjectFormat::Sha1,
        ObjectId::Sha256(_) => ObjectFormat::Sha256,
    }
}
