//! Where an archive is put together before anybody sees it: a directory of ours beside the
//! places its members are for, on the same file system.

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

use super::path::{LONGEST, names, stays_inside};
use super::reader::{self, Member, Reader};
use super::{Links, Refusal, Repositories, Rules, TransferError, leave_out, merge, note};
use crate::beneath;
use crate::contract::{Moved, Transfer};
use crate::git::names::is_dot_git;
use crate::git::sensitive_paths::sensitive_reason;
use crate::namespace::removal::remove_tree;

const CHUNK: usize = 64 << 10;

/// How many names are tried for the directory.
const MOST_TRIES: u32 = 100;

pub(super) struct Stage {
    target: OwnedFd,
    root: OwnedFd,
    bounds: Transfer,
    rules: Rules,
    entries: u64,
    moved: Moved,
    /// The repository that was left out last, and the bytes of all of them.
    repository: Vec<CString>,
    dropped: u64,
    /// The directory that the last member was in.
    last: Option<(Vec<CString>, OwnedFd)>,
    /// Directories whose mode is set last: it would have kept us out, or came too late.
    closed: Vec<(Vec<CString>, Mode)>,
    /// Links that are not to be made, but stand where they were until nothing can come
    /// after them.
    unwanted: Vec<Vec<CString>>,
    buffer: Vec<u8>,
    rubbish: Rubbish,
}

/// What is removed in the end: the directory and, unless all went well, whatever had to be
/// made for it.
struct Rubbish {
    directory: PathBuf,
    made: Vec<PathBuf>,
}

impl Rubbish {
    fn of(made: Vec<PathBuf>) -> Self {
        Self {
            directory: PathBuf::new(),
            made,
        }
    }
}

impl Drop for Rubbish {
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
        bounds: &Transfer,
        rules: Rules,
    ) -> Result<Self, TransferError> {
        let made = make_way(target).map_err(TransferError::system("making", target))?;
        let flags = OFlag::O_RDONLY | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC;
        let top = match open(target, flags, Mode::empty()) {
            Ok(top) => top,
            Err(errno) => {
                drop(Rubbish::of(made));
                return Err(TransferError::system("opening", target)(errno));
            }
        };
        Self::at(top, target, made, bounds, rules)
    }

    /// The same in a directory that is open, for which `made` had to be made.
    pub(super) fn at(
        top: OwnedFd,
        target: &Path,
        made: Vec<PathBuf>,
        bounds: &Transfer,
        rules: Rules,
    ) -> Result<Self, TransferError> {
        let mut rubbish = Rubbish::of(made);
        let (name, root) = make_root(&top).map_err(TransferError::system("writing in", target))?;
        rubbish.directory = target.join(name);
        Ok(Self {
            target: top,
            root,
            bounds: *bounds,
            rules,
            entries: 0,
            moved: Moved::default(),
            repository: Vec::new(),
            dropped: 0,
            last: None,
            closed: Vec::new(),
            unwanted: Vec::new(),
            buffer: vec![0; CHUNK],
            rubbish,
        })
    }

    /// Takes in a member, with its content.
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
            // The target itself, whose mode is its owner's business.
            return match member.kind {
                reader::Kind::Directory => Ok(()),
                _ => Err(refused(Refusal::NoPath)),
            };
        };
        if self.rules.repositories == Repositories::LeftOut {
            if self.is_of_repository(&names) || self.leads_to_repository(member) {
                return self.drop_content(member, reader);
            }
            if member.kind != reader::Kind::Directory
                && let Some(why) = sensitive_reason(&member.path)
            {
                note(&mut self.moved.steering, &member.path, why);
            }
        }
        let system = |errno| match errno {
            Errno::EEXIST => refused(Refusal::Twice),
            Errno::ELOOP | Errno::ENOTDIR => refused(Refusal::ThroughLink),
            errno => TransferError::system("making", shown(&member.path))(errno),
        };
        self.enter(above).map_err(system)?;
        let Some((_, parent)) = &self.last else {
            return Err(refused(Refusal::NoPath));
        };
        match &member.kind {
            reader::Kind::File { size } => {
                if *size > self.bounds.bytes - self.moved.bytes {
                    return Err(TransferError::TooLarge(self.bounds.bytes));
                }
                // The operator's umask applies; bits that lend somebody's rights never do.
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
                    // A time that the file system has no room for is no loss.
                    let _ = futimens(&file, &modified, &modified);
                }
                self.moved.bytes += size;
                self.moved.files += 1;
            }
            reader::Kind::Directory => {
                let mode = member.mode & 0o777;
                let open = Mode::from_bits_truncate(mode | 0o700);
                let made = match mkdirat(parent, name.as_c_str(), open) {
                    // Made on the way to a member, or named twice.
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
                if link.is_empty() || link.as_bytes().len() > LONGEST {
                    return Err(refused(Refusal::NoPath));
                }
                symlinkat(link.as_c_str(), parent, name.as_c_str()).map_err(system)?;
                if self.rules.links == Links::Inside && !stays_inside(text, above.len()) {
                    leave_out(&mut self.moved, &member.path, "a link that leads elsewhere");
                    self.unwanted.push(names);
                } else {
                    self.moved.files += 1;
                }
            }
            reader::Kind::HardLink { to } => {
                let out = || refused(Refusal::HardLinkOut);
                let (place, file) = self.find(to).ok_or_else(out)?;
                let found = beneath::stat(&place, &file).ok().flatten();
                if found.as_ref().map(beneath::file_kind) != Some(beneath::FileKind::File) {
                    return Err(out());
                }
                let (from, onto) = (file.as_c_str(), name.as_c_str());
                linkat(&place, from, parent, onto, AtFlags::empty()).map_err(system)?;
                self.moved.files += 1;
            }
        }
        Ok(())
    }

    /// Whether a member is a `.git` or in one. Each is noted once.
    fn is_of_repository(&mut self, names: &[CString]) -> bool {
        let found = names.iter().position(|name| is_dot_git(name.to_bytes()));
        let Some(top) = found.and_then(|at| names.get(..=at)) else {
            return false;
        };
        if self.repository != top {
            self.repository = top.to_vec();
            let path: Vec<&[u8]> = top.iter().map(|name| name.to_bytes()).collect();
            let why = "a '.git', whose hooks and configuration would run programs here";
            leave_out(&mut self.moved, &path.join(&b'/'), why);
        }
        true
    }

    /// Whether a member is another name of a file that was left out.
    fn leads_to_repository(&mut self, member: &Member) -> bool {
        let reader::Kind::HardLink { to } = &member.kind else {
            return false;
        };
        let leads = to.split(|byte| *byte == b'/').any(is_dot_git);
        if leads {
            leave_out(&mut self.moved, &member.path, "a part of a '.git'");
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

    /// Moves everything to its place.
    pub(super) fn settle(mut self) -> Result<Moved, TransferError> {
        self.last = None;
        for names in std::mem::take(&mut self.unwanted) {
            if let Some((name, above)) = names.split_last() {
                descend(&self.root, above)
                    .and_then(|place| unlinkat(&place, name.as_c_str(), UnlinkatFlags::NoRemoveDir))
                    .map_err(TransferError::system("clearing", "a link"))?;
            }
        }
        let merged = merge::merge(&self.root, &self.target, self.rules.overwrite)?;
        // From here on, what had to be made is wanted.
        self.rubbish.made.clear();
        // The deepest first, or a closed one would be in the way.
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
        Ok(self.moved)
    }

    /// Goes to a directory, making what is missing on the way.
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

    /// An earlier member: its directory and name.
    fn find(&self, path: &[u8]) -> Option<(OwnedFd, CString)> {
        let names = names(path).ok()?;
        let (name, above) = names.split_last()?;
        Some((descend(&self.root, above).ok()?, name.clone()))
    }
}

/// Goes down to a directory that is there.
fn descend(from: &OwnedFd, names: &[CString]) -> nix::Result<OwnedFd> {
    let mut here = from.try_clone().map_err(|_| Errno::EMFILE)?;
    for name in names {
        here = beneath::open_directory(&here, name)?;
    }
    Ok(here)
}

/// Makes a directory and those above it; returns those that were missing, highest first.
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
    for _ in 0..MOST_TRIES {
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
