//! `palisade upload|download`.

use std::io::{BufReader, BufWriter, IsTerminal, Read, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result};
use clap::Args;
use control::body::Purpose;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use policy::id::SandboxId;
use sandbox::contract::{SandboxBackend, SandboxError, TransferBounds, TransferSummary};
use sandbox::transfer::{self, Overwrite, TransferError, UnpackRules};
use serde_json::json;

use crate::cli::enter::{backend, begin_session};
use crate::cli::sandbox_lookup;
use crate::cli::summary::count;
use crate::cli::{Global, block_on, remote};
use crate::exit::{Exit, Failure};
use crate::gate::background;
use crate::output;

/// What an agent may hand out in one go.
const BOUNDS: TransferBounds = TransferBounds {
    bytes: 16 << 30,
    entries: 1_000_000,
};

/// Files that steer tools, as far as they are named.
const STEERING_SHOWN: usize = 20;

#[derive(Debug, Args)]
pub struct UploadArgs {
    /// Sandbox name
    pub name: String,
    /// The file or directory to copy
    pub source: PathBuf,
    /// Target directory in the sandbox, relative to the workspace
    #[arg(default_value = ".")]
    pub to: PathBuf,
}

#[derive(Debug, Args)]
pub struct DownloadArgs {
    /// Sandbox name
    pub name: String,
    /// File or directory in the sandbox, relative to the workspace
    pub source: PathBuf,
    /// Target directory on the host
    #[arg(default_value = ".")]
    pub to: PathBuf,
    /// Overwrite existing files
    #[arg(long)]
    pub overwrite: bool,
}

pub fn upload(args: &UploadArgs, global: &Global) -> Result<Exit> {
    let work = || -> Result<(String, TransferSummary)> {
        if args.source.symlink_metadata().is_err() {
            let message = format!("there is no '{}'", args.source.display());
            return Err(Failure::new(Exit::NotFound, message).into());
        }
        let Entered { id, name, backend } = enter(&args.name, Purpose::Upload, global)?;
        let bar = bar("uploading");
        let state = global.paths()?.state_dir;
        let moved = send(&*backend, &id, &args.to, &BOUNDS, |archive| {
            let mut progress = |bytes| bar.set_position(bytes);
            transfer::pack_except(&state, &args.source, archive, &mut progress)
        });
        bar.finish_and_clear();
        Ok((name, moved?))
    };
    let (name, moved) = work().context("upload failed")?;
    let words = format!("Uploaded {} to {name}", summary(&moved));
    tell(&moved, &words, global)
}

pub fn download(args: &DownloadArgs, global: &Global) -> Result<Exit> {
    let work = || -> Result<(String, TransferSummary)> {
        let Entered { id, name, backend } = enter(&args.name, Purpose::Download, global)?;
        let bar = bar("downloading");
        let rules = UnpackRules {
            overwrite: if args.overwrite {
                Overwrite::Yes
            } else {
                Overwrite::No
            },
            ..UnpackRules::FOR_HOST
        };
        let moved = fetch(&*backend, &id, &args.source, &BOUNDS, |archive| {
            let mut counted = Counted {
                inner: archive,
                bar: bar.clone(),
            };
            transfer::unpack(&mut counted, &args.to, &BOUNDS, &rules)
        });
        bar.finish_and_clear();
        Ok((name, moved?))
    };
    let (name, moved) = work().context("download failed")?;
    let words = format!("Downloaded {} from {name}", summary(&moved));
    tell(&moved, &words, global)
}

/// Brings what `pack` writes into a sandbox.
pub fn send(
    backend: &(dyn SandboxBackend + Sync),
    id: &SandboxId,
    to: &Path,
    bounds: &TransferBounds,
    pack: impl FnOnce(&mut dyn Write) -> Result<TransferSummary, TransferError> + Send,
) -> Result<TransferSummary> {
    let (reader, writer) = std::io::pipe().context("cannot make a pipe")?;
    let (unpacked, packed) = std::thread::scope(|scope| {
        let packing = scope.spawn(move || {
            let mut writer = BufWriter::with_capacity(1 << 18, writer);
            let packed = pack(&mut writer)?;
            writer.flush()?;
            anyhow::Ok(packed)
        });
        let mut reader = BufReader::with_capacity(1 << 18, reader);
        let unpacked = backend.upload(id, to, &mut reader, bounds);
        // Nobody reads any more: the packer ends, too.
        drop(reader);
        (unpacked, packing.join())
    });
    let packed = packed.map_err(|_| anyhow::anyhow!("packing failed"))?;
    // An archive that was cut short is so because packing failed; otherwise what failed
    // inside is why packing failed, if both did.
    match (unpacked, packed) {
        (Ok(mut moved), Ok(packed)) => {
            moved.left_out.extend(packed.left_out);
            Ok(moved)
        }
        (Err(SandboxError::Transfer(TransferError::Malformed(_))) | Ok(_), Err(error)) => {
            Err(error)
        }
        (Err(error), _) => Err(error.into()),
    }
}

/// Has `unpack` read what a sandbox gives out.
pub fn fetch(
    backend: &(dyn SandboxBackend + Sync),
    id: &SandboxId,
    from: &Path,
    bounds: &TransferBounds,
    unpack: impl FnOnce(&mut dyn Read) -> Result<TransferSummary, TransferError>,
) -> Result<TransferSummary> {
    let (reader, writer) = std::io::pipe().context("cannot make a pipe")?;
    let (packed, unpacked) = std::thread::scope(|scope| {
        let packing = scope.spawn(move || {
            let mut writer = BufWriter::with_capacity(1 << 18, writer);
            let packed = backend.download(id, from, &mut writer, bounds)?;
            writer.flush()?;
            anyhow::Ok(packed)
        });
        let mut reader = BufReader::with_capacity(1 << 18, reader);
        let unpacked = unpack(&mut reader);
        drop(reader);
        (packing.join(), unpacked)
    });
    let packed = packed.map_err(|_| anyhow::anyhow!("packing failed"))?;
    // An archive that was cut short is so because packing failed inside; a packer that lost
    // its reader failed because of what was found here.
    match (packed, unpacked) {
        (Ok(packed), Ok(mut moved)) => {
            moved.left_out.extend(packed.left_out);
            Ok(moved)
        }
        (_, Err(error)) if !matches!(error, TransferError::Malformed(_)) => Err(error.into()),
        (Err(error), _) => Err(error),
        (Ok(_), Err(error)) => Err(error.into()),
    }
}

/// A sandbox that was entered, whatever keeps it in.
struct Entered {
    id: SandboxId,
    name: String,
    backend: Box<dyn SandboxBackend + Send + Sync>,
}

fn enter(name: &str, purpose: Purpose, global: &Global) -> Result<Entered> {
    let paths = global.paths()?;
    let place = block_on(async {
        let gate = background::client(&paths, global.verbose).await?;
        let place = sandbox_lookup::find(&gate, name).await?;
        begin_session(&gate, &place, purpose).await?;
        Ok(place)
    })?;
    let backend: Box<dyn SandboxBackend + Send + Sync> = if place.is_elsewhere() {
        Box::new(remote::open(&place.id, global)?)
    } else {
        Box::new(backend(&paths))
    };
    Ok(Entered {
        id: place.id,
        name: place.name.to_string(),
        backend,
    })
}

fn summary(moved: &TransferSummary) -> String {
    let files = usize::try_from(moved.files).unwrap_or(usize::MAX);
    let bytes = indicatif::HumanBytes(moved.bytes);
    format!("{}, {bytes},", count(files, "file"))
        .trim_end_matches(',')
        .to_owned()
}

fn tell(moved: &TransferSummary, words: &str, global: &Global) -> Result<Exit> {
    for note in &moved.left_out {
        output::say(&format!("palisade: {}", output::safe(note)));
    }
    if !moved.steering.is_empty() {
        output::say("palisade: these files run or steer tools on your machine:");
        for note in moved.steering.iter().take(STEERING_SHOWN) {
            output::say(&format!("  {}", output::safe(note)));
        }
        if moved.steering.len() > STEERING_SHOWN {
            output::say("  and more");
        }
    }
    if global.json {
        output::print_json(&json!({
            "files": moved.files,
            "bytes": moved.bytes,
            "left_out": moved.left_out,
            "steering": moved.steering,
        }))?;
    } else {
        output::print_line(words)?;
    }
    Ok(Exit::Ok)
}

fn bar(what: &'static str) -> ProgressBar {
    let target = if std::io::stderr().is_terminal() {
        ProgressDrawTarget::stderr()
    } else {
        ProgressDrawTarget::hidden()
    };
    let bar = ProgressBar::with_draw_target(None, target).with_message(what);
    let template = "{spinner} {msg} {bytes} ({bytes_per_sec})";
    if let Ok(style) = ProgressStyle::with_template(template) {
        bar.set_style(style);
    }
    bar.enable_steady_tick(Duration::from_millis(200));
    bar
}

/// A reader that shows how far it has come.
struct Counted<R> {
    inner: R,
    bar: ProgressBar,
}

impl<R: Read> Read for Counted<R> {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        let length = self.inner.read(buffer)?;
        self.bar.inc(length as u64);
        Ok(length)
    }
}
