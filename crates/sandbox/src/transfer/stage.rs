//! Staging directory in which an archive is unpacked before it becomes visible, on the file system
//! of the target.

use std::ffi::CString;
use std::io::Write;
use std::os::fd::OwnedFd;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use nix::errno::Errno;
use nix::fcntl::{AtFlags, OFlag, open};
use nix::sys::stat::{Mode, fchmod, fstat, futimens, mkdirat};
use nix::sys::time::TimeSpec;
use nix::unistd::{UnlinkatFlags, linkat, symlinkat, unlinkat};

use super::path::{MAX_PATH_BYTES, split_path, stays_below_target};
use super::reader::{self, Member, Reader};
use super::{
    LinkPolicy, MemberRefusal, RepositoryPolicy, TransferError, UnpackRules, merge, note, skip,
};
use crate::beneath;
use crate::contract::{TransferBounds, TransferSummary};
use crate::git::names::is_dot_git;
use crate::git::sensitive_paths::sensitive_reason;
use crate::namespace::removal::remove_tree;

const CHUNK_BYTES: usize = 64 << 10;

/// Maximum number of names tried for the directory.
const MAX_NAMES_TRIED: u32 = 100;

/// A staging directory, and the state of an unpacking in it.
pub(super) struct Stage {
    target: OwnedFd,
    root: OwnedFd,
    bounds: TransferBounds,
    rules: UnpackRules,
    entries: u64,
    summary: TransferSummary,
    /// The repository that was skipped last, which is noted once.
    repository: Vec<CString>,
    /// The bytes of all skipped files.
    skipped_bytes: u64,
    /// The directory of the last member.
    last_parent: Option<(Vec<CString>, OwnedFd)>,
    /// Directories whose mode is set last, because the mode would deny access or a later member
    /// would change it.
    final_modes: Vec<(Vec<CString>, Mode)>,
    /// Skipped links. They exist in the staging directory until the last member was unpacked, and
    /// are then removed.
    skipped_links: Vec<Vec<CString>>,
    buffer: Vec<u8>,
    cleanup: Cleanup,
}

/// Removes the staging directory on drop and, unless it is disarmed, the directories that were
/// created for it.
struct Cleanup {
    directory: PathBuf,
    created: Vec<PathBuf>,
}

impl Cleanup {
    fn new(created: Vec<PathBuf>) -> Self {
        Self {
            directory: PathBuf::new(),
            created,
        }
    }
}

impl Drop for Cleanup {
    fn drop(&mut self) {
        let _ = remove_tree(&self.directory);
        for place in self.created.iter().rev() {
            let _ = std::fs::remove_dir(place);
        }
    }
}

impl Stage {
    pub(super) fn open(
        target: &Path,
        bounds: &TransferBounds,
        rules: UnpackRules,
    ) -> Result<Self, TransferError> {
        let created =
            create_directories(target).map_err(TransferError::system("making", target))?;
        let flags = OFlag::O_RDONLY | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC;
        let top = match open(target, flags, Mode::empty()) {
            Ok(top) => top,
            Err(errno) => {
                drop(Cleanup::new(created));
                return Err(TransferError::system("opening", target)(errno));
            }
        };
        Self::in_directory(top, target, created, bounds, rules)
    }

    /// As [`Stage::open`], but in an open directory. `created` are the directories that were
    /// created for it.
    pub(super) fn in_directory(
        top: OwnedFd,
        target: &Path,
        created: Vec<PathBuf>,
        bounds: &TransferBounds,
        rules: UnpackRules,
    ) -> Result<Self, TransferError> {
        let mut cleanup = Cleanup::new(created);
        let (name, root) =
            create_staging_directory(&top).map_err(TransferError::system("writing in", target))?;
        cleanup.directory = target.join(name);
        Ok(Self {
            target: top,
            root,
            bounds: *bounds,
            rules,
            entries: 0,
            summary: TransferSummary::default(),
            repository: Vec::new(),
            skipped_bytes: 0,
            last_parent: None,
            final_modes: Vec::new(),
            skipped_links: Vec::new(),
            buffer: vec![0; CHUNK_BYTES],
            cleanup,
        })
    }

    /// Unpacks a member with its content.
    pub(super) fn unpack_member(
        &mut self,
        member: &Member,
        reader: &mut Reader<'_>,
    ) -> Result<(), TransferError> {
        self.entries += 1;
        if self.entries > self.bounds.entries {
            return Err(TransferError::TooMany(self.bounds.entries));
        }
        let refused = |reason| TransferError::refused(&member.path, reason);
        let names = split_path(&member.path).map_err(refused)?;
        let Some((name, parents)) = names.split_last() else {
            // The target itself keeps its mode.
            return match member.kind {
                reader::Kind::Directory => Ok(()),
                _ => Err(refused(MemberRefusal::InvalidPath)),
            };
        };
        if self.rules.repositories == RepositoryPolicy::Skip {
            if self.is_in_repository(&names) || self.links_to_repository(member) {
                return self.skip_content(member, reader);
            }
            if member.kind != reader::Kind::Directory
                && let Some(why) = sensitive_reason(&member.path)
            {
                note(&mut self.summary.sensitive, &member.path, why);
            }
        }
        let system = |errno| match errno {
            Errno::EEXIST => refused(MemberRefusal::Duplicate),
            Errno::ELOOP | Errno::ENOTDIR => refused(MemberRefusal::ThroughLink),
            errno => TransferError::system("making", os_path(&member.path))(errno),
        };
        self.open_parent(parents).map_err(system)?;
        let Some((_, parent)) = &self.last_parent else {
            return Err(refused(MemberRefusal::InvalidPath));
        };
        match &member.kind {
            reader::Kind::File { size } => {
                if *size > self.bounds.bytes - self.summary.bytes {
                    return Err(TransferError::TooLarge(self.bounds.bytes));
                }
                // The operator's umask applies; setuid and setgid bits are never set.
                let mode = Mode::from_bits_truncate(member.mode & 0o777);
                let mut file = beneath::create_file(parent, name, mode).map_err(system)?;
                loop {
                    let length = reader.content(&mut self.buffer)?;
                    if length == 0 {
                        break;
                    }
                    file.write_all(self.buffer.get(..length).unwrap_or_default())
                        .map_err(TransferError::system("writing", os_path(&member.path)))?;
                }
                if let Ok(modified) = i64::try_from(member.modified) {
                    let modified = TimeSpec::new(modified, 0);
                    // A time that the file system cannot store is ignored.
                    let _ = futimens(&file, &modified, &modified);
                }
                self.summary.bytes += size;
                self.summary.files += 1;
            }
            reader::Kind::Directory => {
                let mode = member.mode & 0o777;
                let open = Mode::from_bits_truncate(mode | 0o700);
                let created = match mkdirat(parent, name.as_c_str(), open) {
                    // The directory was created for an earlier member, or occurs twice.
                    Err(Errno::EEXIST) => {
                        beneath::open_directory(parent, name).map_err(system)?;
                        false
                    }
                    other => other.map(|()| true).map_err(system)?,
                };
                if !created || mode & 0o700 != 0o700 {
                    self.final_modes
                        .push((names, Mode::from_bits_truncate(mode)));
                }
            }
            reader::Kind::Symlink { text } => {
                let link = CString::new(text.as_slice()).unwrap_or_default();
                if link.is_empty() || link.as_bytes().len() > MAX_PATH_BYTES {
                    return Err(refused(MemberRefusal::InvalidPath));
                }
                symlinkat(link.as_c_str(), parent, name.as_c_str()).map_err(system)?;
                if self.rules.links == LinkPolicy::BelowTarget
                    && !stays_below_target(text, parents.len())
                {
                    skip(
                        &mut self.summary,
                        &member.path,
                        "a link that points outside",
                    );
                    self.skipped_links.push(names);
                } else {
                    self.summary.files += 1;
                }
            }
            reader::Kind::HardLink { to } => {
                let out = || refused(MemberRefusal::HardLinkOut);
                let (place, file) = self.find_member(to).ok_or_else(out)?;
                let found = beneath::stat(&place, &file).ok().flatten();
                if found.as_ref().map(beneath::file_kind) != Some(beneath::FileKind::File) {
                    return Err(out());
                }
                let (from, onto) = (file.as_c_str(), name.as_c_str());
                linkat(&place, from, parent, onto, AtFlags::empty()).map_err(system)?;
                self.summary.files += 1;
            }
        }
        Ok(())
    }

    /// Whether a member is a `.git` or in one. Each repository is noted once.
    fn is_in_repository(&mut self, names: &[CString]) -> bool {
        let found = names.iter().position(|name| is_dot_git(name.to_bytes()));
        let Some(top) = found.and_then(|at| names.get(..=at)) else {
            return false;
        };
        if self.repository != top {
            self.repository = top.to_vec();
            let path: Vec<&[u8]> = top.iter().map(|name| name.to_bytes()).collect();
            let why = "a '.git', whose hooks and configuration would run programs here";
            skip(&mut self.summary, &path.join(&b'/'), why);
        }
        true
    }

    /// Whether a member is a hard link to a skipped file.
    fn links_to_repository(&mut self, member: &Member) -> bool {
        let reader::Kind::HardLink { to } = &member.kind else {
            return false;
        };
        let is_in_git = to.split(|byte| *byte == b'/').any(is_dot_git);
        if is_in_git {
            skip(&mut self.summary, &member.path, "a part of a '.git'");
        }
        is_in_git
    }

    fn skip_content(
        &mut self,
        member: &Member,
        reader: &mut Reader<'_>,
    ) -> Result<(), TransferError> {
        if let reader::Kind::File { size } = member.kind {
            if size > self.bounds.bytes.saturating_sub(self.skipped_bytes) {
                return Err(TransferError::TooLarge(self.bounds.bytes));
            }
            self.skipped_bytes += size;
        }
        while reader.content(&mut self.buffer)? > 0 {}
        Ok(())
    }

    /// Moves all entries to the target.
    pub(super) fn publish(mut self) -> Result<TransferSummary, TransferError> {
        self.last_parent = None;
        for names in std::mem::take(&mut self.skipped_links) {
            if let Some((name, parents)) = names.split_last() {
                open_path(&self.root, parents)
                    .and_then(|place| unlinkat(&place, name.as_c_str(), UnlinkatFlags::NoRemoveDir))
                    .map_err(TransferError::system("removing", "a skipped link"))?;
            }
        }
        let merged = merge::merge(&self.root, &self.target, self.rules.overwrite)?;
        // The created directories are kept from now on.
        self.cleanup.created.clear();
        // The deepest directories come first, because directories below one without permissions
        // cannot be opened.
        self.final_modes
            .sort_by_key(|(names, _)| std::cmp::Reverse(names.len()));
        for (names, mode) in &self.final_modes {
            if !merged.contains(names) {
                open_path(&self.target, names)
                    .and_then(|place| {
                        let found = Mode::from_bits_truncate(fstat(&place)?.st_mode);
                        fchmod(&place, found & *mode)
                    })
                    .map_err(TransferError::system("setting the mode of", "a directory"))?;
            }
        }
        Ok(self.summary)
    }

    /// Opens a directory and creates missing parents.
    fn open_parent(&mut self, names: &[CString]) -> nix::Result<()> {
        if self
            .last_parent
            .as_ref()
            .is_some_and(|(last_parent, _)| last_parent == names)
        {
            return Ok(());
        }
        let mut directory = self.root.try_clone().map_err(|_| Errno::EMFILE)?;
        for name in names {
            directory = match beneath::open_directory(&directory, name) {
                Err(Errno::ENOENT) => {
                    mkdirat(&directory, name.as_c_str(), Mode::from_bits_truncate(0o755))?;
                    beneath::open_directory(&directory, name)?
                }
                other => other?,
            };
        }
        self.last_parent = Some((names.to_vec(), directory));
        Ok(())
    }

    /// Finds an earlier member: its directory and name.
    fn find_member(&self, path: &[u8]) -> Option<(OwnedFd, CString)> {
        let names = split_path(path).ok()?;
        let (name, parents) = names.split_last()?;
        Some((open_path(&self.root, parents).ok()?, name.clone()))
    }
}

/// Opens an existing directory.
fn open_path(from: &OwnedFd, names: &[CString]) -> nix::Result<OwnedFd> {
    let mut directory = from.try_clone().map_err(|_| Errno::EMFILE)?;
    for name in names {
        directory = beneath::open_directory(&directory, name)?;
    }
    Ok(directory)
}

/// Creates a directory and its parents; returns the created ones, highest first.
fn create_directories(target: &Path) -> std::io::Result<Vec<PathBuf>> {
    let missing: Vec<_> = target
        .ancestors()
        .take_while(|place| !place.as_os_str().is_empty() && !place.exists())
        .collect();
    let mut created = Vec::new();
    for place in missing.into_iter().rev() {
        std::fs::DirBuilder::new().mode(0o755).create(place)?;
        created.push(place.to_owned());
    }
    Ok(created)
}

fn create_staging_directory(target: &OwnedFd) -> nix::Result<(String, OwnedFd)> {
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    let mut number = since.map_or(0, |since| since.as_nanos());
    for _ in 0..MAX_NAMES_TRIED {
        let name = format!(".palisade-transfer-{}-{number:x}", std::process::id());
        match mkdirat(target, name.as_str(), Mode::S_IRWXU) {
            Err(Errno::EEXIST) => number += 1,
            other => {
                other?;
                let path = CString::new(name.as_str()).map_err(|_| Errno::EINVAL)?;
                let root = beneath::open_directory(target, &path)?;
                return Ok((name, root));
            }
        }
    }
    Err(Errno::EEXIST)
}

fn os_path(path: &[u8]) -> &std::ffi::OsStr {
    std::os::unix::ffi::OsStrExt::from_bytes(path)
}
