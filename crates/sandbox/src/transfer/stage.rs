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

use super::path::{MAX_PATH_BYTES, names, stays_inside};
use super::reader::{self, Member, Reader};
use super::{
    LinkPolicy, MemberRefusal, RepositoryPolicy, TransferError, UnpackRules, merge, note, skip,
};
use crate::beneath;
use crate::contract::{TransferBounds, TransferSummary};
use crate::git::names::is_dot_git;
use crate::git::sensitive_paths::sensitive_reason;
use crate::namespace::removal::remove_tree;

const CHUNK: usize = 64 << 10;

/// Maximum number of names tried for the directory.
const MAX_TRIES: u32 = 100;

pub(super) struct Stage {
    target: OwnedFd,
    root: OwnedFd,
    bounds: TransferBounds,
    rules: UnpackRules,
    entries: u64,
    summary: TransferSummary,
    /// The repository skipped last, and the bytes of all skipped ones.
    repository: Vec<CString>,
    dropped: u64,
    /// The directory of the last member.
    last: Option<(Vec<CString>, OwnedFd)>,
    /// Directories whose mode is set last, because the mode would deny access or a later member
    /// would change it.
    closed: Vec<(Vec<CString>, Mode)>,
    /// Placeholders of skipped links, removed when no member can follow them.
    unwanted: Vec<Vec<CString>>,
    buffer: Vec<u8>,
    rubbish: Cleanup,
}

/// Removes the staging directory on drop and, unless it is disarmed, the directories that were
/// created for it.
struct Cleanup {
    directory: PathBuf,
    made: Vec<PathBuf>,
}

impl Cleanup {
    fn of(made: Vec<PathBuf>) -> Self {
        Self {
            directory: PathBuf::new(),
            made,
        }
    }
}

impl Drop for Cleanup {
    fn drop(&mut self) {
        let _ = remove_tree(&self.directory);
        for place in self.made.iter().rev() {
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
        let made = make_way(target).map_err(TransferError::system("making", target))?;
        let flags = OFlag::O_RDONLY | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC;
        let top = match open(target, flags, Mode::empty()) {
            Ok(top) => top,
            Err(errno) => {
                drop(Cleanup::of(made));
                return Err(TransferError::system("opening", target)(errno));
            }
        };
        Self::at(top, target, made, bounds, rules)
    }

    /// As [`Stage::open`] in an open directory, for which the directories `made` were created.
    pub(super) fn at(
        top: OwnedFd,
        target: &Path,
        made: Vec<PathBuf>,
        bounds: &TransferBounds,
        rules: UnpackRules,
    ) -> Result<Self, TransferError> {
        let mut rubbish = Cleanup::of(made);
        let (name, root) = make_root(&top).map_err(TransferError::system("writing in", target))?;
        rubbish.directory = target.join(name);
        Ok(Self {
            target: top,
            root,
            bounds: *bounds,
            rules,
            entries: 0,
            summary: TransferSummary::default(),
            repository: Vec::new(),
            dropped: 0,
            last: None,
            closed: Vec::new(),
            unwanted: Vec::new(),
            buffer: vec![0; CHUNK],
            rubbish,
        })
    }

    /// Unpacks a member with its content.
    pub(super) fn take(
        &mut self,
        member: &Member,
        reader: &mut Reader<'_>,
    ) -> Result<(), TransferError> {
        self.entries += 1;
        if self.entries > self.bounds.entries {
            return Err(TransferError::TooMany(self.bounds.entries));
        }
        let refused = |reason| TransferError::refused(&member.path, reason);
        let names = names(&member.path).map_err(refused)?;
        let Some((name, above)) = names.split_last() else {
            // The target itself keeps its mode.
            return match member.kind {
                reader::Kind::Directory => Ok(()),
                _ => Err(refused(MemberRefusal::NoPath)),
            };
        };
        if self.rules.repositories == RepositoryPolicy::LeftOut {
            if self.is_of_repository(&names) || self.leads_to_repository(member) {
                return self.drop_content(member, reader);
            }
            if member.kind != reader::Kind::Directory
                && let Some(why) = sensitive_reason(&member.path)
            {
                note(&mut self.summary.steering, &member.path, why);
            }
        }
        let system = |errno| match errno {
            Errno::EEXIST => refused(MemberRefusal::Twice),
            Errno::ELOOP | Errno::ENOTDIR => refused(MemberRefusal::ThroughLink),
            errno => TransferError::system("making", shown(&member.path))(errno),
        };
        self.enter(above).map_err(system)?;
        let Some((_, parent)) = &self.last else {
            return Err(refused(MemberRefusal::NoPath));
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
                        .map_err(TransferError::system("writing", shown(&member.path)))?;
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
                let made = match mkdirat(parent, name.as_c_str(), open) {
                    // The directory was created for an earlier member, or occurs twice.
                    Err(Errno::EEXIST) => {
                        beneath::open_directory(parent, name).map_err(system)?;
                        false
                    }
                    other => other.map(|()| true).map_err(system)?,
                };
                if !made || mode & 0o700 != 0o700 {
                    self.closed.push((names, Mode::from_bits_truncate(mode)));
                }
            }
            reader::Kind::Symlink { text } => {
                let link = CString::new(text.as_slice()).unwrap_or_default();
                if link.is_empty() || link.as_bytes().len() > MAX_PATH_BYTES {
                    return Err(refused(MemberRefusal::NoPath));
                }
                symlinkat(link.as_c_str(), parent, name.as_c_str()).map_err(system)?;
                if self.rules.links == LinkPolicy::Inside && !stays_inside(text, above.len()) {
                    skip(
                        &mut self.summary,
                        &member.path,
                        "a link that points outside",
                    );
                    self.unwanted.push(names);
                } else {
                    self.summary.files += 1;
                }
            }
            reader::Kind::HardLink { to } => {
                let out = || refused(MemberRefusal::HardLinkOut);
                let (place, file) = self.find(to).ok_or_else(out)?;
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
    fn is_of_repository(&mut self, names: &[CString]) -> bool {
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
    fn leads_to_repository(&mut self, member: &Member) -> bool {
        let reader::Kind::HardLink { to } = &member.kind else {
            return false;
        };
        let leads = to.split(|byte| *byte == b'/').any(is_dot_git);
        if leads {
            skip(&mut self.summary, &member.path, "a part of a '.git'");
        }
        leads
    }

    fn drop_content(
        &mut self,
        member: &Member,
        reader: &mut Reader<'_>,
    ) -> Result<(), TransferError> {
        if let reader::Kind::File { size } = member.kind {
            if size > self.bounds.bytes.saturating_sub(self.dropped) {
                return Err(TransferError::TooLarge(self.bounds.bytes));
            }
            self.dropped += size;
        }
        while reader.content(&mut self.buffer)? > 0 {}
        Ok(())
    }

    /// Moves all entries to the target.
    pub(super) fn settle(mut self) -> Result<TransferSummary, TransferError> {
        self.last = None;
        for names in std::mem::take(&mut self.unwanted) {
            if let Some((name, above)) = names.split_last() {
                descend(&self.root, above)
                    .and_then(|place| unlinkat(&place, name.as_c_str(), UnlinkatFlags::NoRemoveDir))
                    .map_err(TransferError::system("clearing", "a link"))?;
            }
        }
        let merged = merge::merge(&self.root, &self.target, self.rules.overwrite)?;
        // From here on the created directories are kept.
        self.rubbish.made.clear();
        // Deepest first, because a directory without permissions would block the others.
        self.closed
            .sort_by_key(|(names, _)| std::cmp::Reverse(names.len()));
        for (names, mode) in &self.closed {
            if !merged.contains(names) {
                descend(&self.target, names)
                    .and_then(|place| {
                        let found = Mode::from_bits_truncate(fstat(&place)?.st_mode);
                        fchmod(&place, found & *mode)
                    })
                    .map_err(TransferError::system("closing", "a directory"))?;
            }
        }
        Ok(self.summary)
    }

    /// Opens a directory and creates missing parents.
    fn enter(&mut self, names: &[CString]) -> nix::Result<()> {
        if self.last.as_ref().is_some_and(|(last, _)| last == names) {
            return Ok(());
        }
        let mut here = self.root.try_clone().map_err(|_| Errno::EMFILE)?;
        for name in names {
            here = match beneath::open_directory(&here, name) {
                Err(Errno::ENOENT) => {
                    mkdirat(&here, name.as_c_str(), Mode::from_bits_truncate(0o755))?;
                    beneath::open_directory(&here, name)?
                }
                other => other?,
            };
        }
        self.last = Some((names.to_vec(), here));
        Ok(())
    }

    /// Finds an earlier member: its directory and name.
    fn find(&self, path: &[u8]) -> Option<(OwnedFd, CString)> {
        let names = names(path).ok()?;
        let (name, above) = names.split_last()?;
        Some((descend(&self.root, above).ok()?, name.clone()))
    }
}

/// Opens an existing directory.
fn descend(from: &OwnedFd, names: &[CString]) -> nix::Result<OwnedFd> {
    let mut here = from.try_clone().map_err(|_| Errno::EMFILE)?;
    for name in names {
        here = beneath::open_directory(&here, name)?;
    }
    Ok(here)
}

/// Creates a directory and its parents; returns the created ones, highest first.
fn make_way(target: &Path) -> std::io::Result<Vec<PathBuf>> {
    let missing: Vec<_> = target
        .ancestors()
        .take_while(|place| !place.as_os_str().is_empty() && !place.exists())
        .collect();
    let mut made = Vec::new();
    for place in missing.into_iter().rev() {
        std::fs::DirBuilder::new().mode(0o755).create(place)?;
        made.push(place.to_owned());
    }
    Ok(made)
}

fn make_root(target: &OwnedFd) -> nix::Result<(String, OwnedFd)> {
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    let mut number = since.map_or(0, |since| since.as_nanos());
    for _ in 0..MAX_TRIES {
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

fn shown(path: &[u8]) -> &std::ffi::OsStr {
    std::os::unix::ffi::OsStrExt::from_bytes(path)
}
