//! What a file system has left, and how near its end is.

use std::io::Result;
use std::os::fd::OwnedFd;

use nix::sys::statvfs::fstatvfs;

use super::measure;

/// What the host keeps, unless that is more than a twentieth of its file system.
const FLOOR: u64 = 1 << 30;
/// The same, in inodes.
const FLOOR_INODES: u64 = 16 << 10;

/// What a file system has left.
#[derive(Clone, Copy, Debug)]
pub(super) struct FreeSpace {
    pub(super) free: u64,
    pub(super) floor: u64,
    pub(super) inodes_free: u64,
    pub(super) inodes_floor: u64,
}

/// Who has to stop for the others to go on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum StopNeed {
    /// Nobody.
    None,
    /// Below the floor: whoever took much of what was there.
    Greedy,
    /// At half of it: whoever took any.
    Grown,
    /// At a quarter: everybody.
    All,
}

impl FreeSpace {
    /// What somebody has taken meanwhile, at least: empty files take inodes only.
    pub(super) fn used_since(self, before: Self) -> u64 {
        let inodes = before.inodes_free.saturating_sub(self.inodes_free);
        before
            .free
            .saturating_sub(self.free)
            .saturating_add(inodes.saturating_mul(measure::MIN_ENTRY_BYTES))
    }

    /// Whether there is less than so many floors.
    pub(super) fn is_below(self, floors: u64) -> bool {
        self.free < self.floor.saturating_mul(floors)
            || self.inodes_free < self.inodes_floor.saturating_mul(floors)
    }

    pub(super) fn stop_need(self) -> StopNeed {
        let has_less_than = |part: u64| {
            self.free < self.floor / part || self.inodes_free < self.inodes_floor / part
        };
        if has_less_than(4) {
            StopNeed::All
        } else if has_less_than(2) {
            StopNeed::Grown
        } else if has_less_than(1) {
            StopNeed::Greedy
        } else {
            StopNeed::None
        }
    }

    pub(super) fn of(top: &OwnedFd) -> nix::Result<Self> {
        let found = fstatvfs(top)?;
        let size = found.blocks() * found.fragment_size();
        // A file system that makes inodes as it goes says that it has none.
        let counts = found.files() > 0;
        Ok(Self {
            free: found.blocks_available() * found.fragment_size(),
            floor: FLOOR.min(size / 20),
            inodes_free: if counts {
                found.files_available()
            } else {
                u64::MAX
            },
            inodes_floor: FLOOR_INODES.min(found.files() / 20),
        })
    }
}

/// Why a new sandbox cannot be, if the file system is too full for one.
pub(crate) fn check_room(directory: &OwnedFd) -> Result<Option<String>> {
    let room = FreeSpace::of(directory)?;
    Ok(room.is_below(1).then(|| {
        format!(
            "the file system of the sandboxes has only {} and {} inodes left; make room there",
            format_size(room.free),
            room.inodes_free
        )
    }))
}

/// Bytes as people say them.
pub(super) fn format_size(bytes: u64) -> String {
    let tenths = |unit: u64| {
        let tenths = bytes.saturating_mul(10) / unit;
        format!("{}.{}", tenths / 10, tenths % 10)
    };
    match bytes {
        0..0x10_0000 => format!("{} KiB", bytes >> 10),
        0x10_0000..0x4000_0000 => format!("{} MiB", tenths(1 << 20)),
        _ => format!("{} GiB", tenths(1 << 30)),
    }
}
