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
use crate::exit::{CliError, CliExit};
use crate::gate::background;
use crate::output;

/// Limits of one transfer.
const BOUNDS: TransferBounds = TransferBounds {
    bytes: 16 << 30,
    entries: 1_000_000,
};

/// Maximum number of sensitive files that are listed.
const MAX_SENSITIVE_SHOWN: usize = 20;

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

pub fn upload(args: &UploadArgs, global: &Global) -> Result<CliExit> {
    let copy = || -> Result<(String, TransferSummary)> {
        if args.source.symlink_metadata().is_err() {
            let message = format!("'{}' does not exist", args.source.display());
            return Err(CliError::new(CliExit::NotFound, message).into());
        }
        let SandboxSession { id, name, backend } = enter(&args.name, Purpose::Upload, global)?;
        let bar = bar("uploading");
        let state = global.paths()?.state_dir;
        let moved = send(&*backend, &id, &args.to, &BOUNDS, |archive| {
            let mut progress = |bytes| bar.set_position(bytes);
            transfer::pack_except(&state, &args.source, archive, &mut progress)
        });
        bar.finish_and_clear();
        Ok((name, moved?))
    };
    let (name, moved) = copy().context("upload failed")?;
    let line = format!("Uploaded {} to {name}", summary(&moved));
    report(&moved, &line, global)
}

pub fn download(args: &DownloadArgs, global: &Global) -> Result<CliExit> {
    let copy = || -> Result<(String, TransferSummary)> {
        let SandboxSession { id, name, backend } = enter(&args.name, Purpose::Download, global)?;
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
            let mut counted = ProgressReader {
                inner: archive,
                bar: bar.clone(),
            };
            transfer::unpack(&mut counted, &args.to, &BOUNDS, &rules)
        });
        bar.finish_and_clear();
        Ok((name, moved?))
    };
    let (name, moved) = copy().context("download failed")?;
    let line = format!("Downloaded {} from {name}", summary(&moved));
    report(&moved, &line, global)
}

/// Uploads the archive that `pack` writes.
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
        // Without a reader the packing thread ends, too.
        drop(reader);
        (unpacked, packing.join())
    });
    let packed = packed.map_err(|_| anyhow::anyhow!("packing failed"))?;
    // A truncated archive means that packing failed. If packing and unpacking failed for another
    // reason, the error of unpacking in the sandbox is the cause.
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

/// Downloads an archive and passes it to `unpack`.
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
    // A truncated archive means that packing in the sandbox failed. If unpacking fails, packing
    // fails as well, because its reader is closed.
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

/// A session in a sandbox, with the backend to use.
struct SandboxSession {
    id: SandboxId,
    name: String,
    backend: Box<dyn SandboxBackend + Send + Sync>,
}

fn enter(name: &str, purpose: Purpose, global: &Global) -> Result<SandboxSession> {
    let paths = global.paths()?;
    let sandbox = block_on(async {
        let gate = background::client(&paths, global.verbose).await?;
        let sandbox = sandbox_lookup::find(&gate, name).await?;
        begin_session(&gate, &sandbox, purpose).await?;
        Ok(sandbox)
    })?;
    let backend: Box<dyn SandboxBackend + Send + Sync> = if sandbox.is_remote() {
        Box::new(remote::open(&sandbox.id, global)?)
    } else {
        Box::new(backend(&paths))
    };
    Ok(SandboxSession {
        id: sandbox.id,
        name: sandbox.name.to_string(),
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

fn report(moved: &TransferSummary, line: &str, global: &Global) -> Result<CliExit> {
    for note in &moved.left_out {
        output::print_message(&format!("palisade: {}", output::safe(note)));
    }
    if !moved.sensitive.is_empty() {
        output::print_message("palisade: these files execute or configure tools on your machine:");
        for note in moved.sensitive.iter().take(MAX_SENSITIVE_SHOWN) {
            output::print_message(&format!("  {}", output::safe(note)));
        }
        if moved.sensitive.len() > MAX_SENSITIVE_SHOWN {
            output::print_message("  and more");
        }
    }
    if global.json {
        output::print_json(&json!({
            "files": moved.files,
            "bytes": moved.bytes,
            "left_out": moved.left_out,
            "steering": moved.sensitive,
        }))?;
    } else {
        output::print_line(line)?;
    }
    Ok(CliExit::Ok)
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

/// A reader that advances a progress bar.
struct ProgressReader<R> {
    inner: R,
    bar: ProgressBar,
}

impl<R: Read> Read for ProgressReader<R> {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        let length = self.inner.read(buffer)?;
        self.bar.inc(length as u64);
        Ok(length)
    }
}
