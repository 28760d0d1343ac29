//! Free space of a file system, and how close it is to its floor.

use std::io::Result;
use std::os::fd::OwnedFd;

use nix::sys::statvfs::fstatvfs;

use super::measure;

/// The reserve of the host, unless it is more than a twentieth of the file system.
const FLOOR: u64 = 1 << 30;
/// The same, in inodes.
const FLOOR_INODES: u64 = 16 << 10;

/// The free space of a file system.
#[derive(Clone, Copy, Debug)]
pub(super) struct FreeSpace {
    pub(super) free: u64,
    pub(super) floor: u64,
    pub(super) inodes_free: u64,
    pub(super) inodes_floor: u64,
}

/// Which sandboxes have to stop.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum StopNeed {
    /// None.
    None,
    /// Below the floor: those that used a large part of the lost space.
    Greedy,
    /// Below half of it: those that used any.
    Grown,
    /// Below a quarter: all.
    All,
}

impl FreeSpace {
    /// The space used since then, at least: empty files use only inodes.
    pub(super) fn used_since(self, before: Self) -> u64 {
        let inodes = before.inodes_free.saturating_sub(self.inodes_free);
        before
            .free
            .saturating_sub(self.free)
            .saturating_add(inodes.saturating_mul(measure::MIN_ENTRY_BYTES))
    }

    /// Whether less than this many floors are free.
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
        // A file system with dynamic inodes reports none.
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

/// Returns why no sandbox can be created, if the file system is too full.
pub(crate) fn check_room(directory: &OwnedFd) -> Result<Option<String>> {
    let free_space = FreeSpace::of(directory)?;
    Ok(free_space.is_below(1).then(|| {
        format!(
            "the file system of the sandboxes has only {} and {} inodes left; free some space there",
            format_size(free_space.free),
            free_space.inodes_free
        )
    }))
}

/// Formats a size for a person.
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
