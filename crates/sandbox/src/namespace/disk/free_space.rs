//! Free space of a file system, and how close it is to its floor.

use std::io::Result;
use std::os::fd::OwnedFd;

use nix::sys::statvfs::fstatvfs;

use super::measure;

/// The reserve of the host in bytes. On a small file system the reserve is a twentieth of its size.
const FLOOR_BYTES: u64 = 1 << 30;
/// The reserve of the host in inodes, with the same exception.
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
    /// No sandbox has to stop.
    None,
    /// The free space is below the floor: sandboxes that used a large part of the lost space stop.
    LargeGrowth,
    /// The free space is below half of the floor: sandboxes that have grown stop.
    AnyGrowth,
    /// The free space is below a quarter of the floor: all sandboxes stop.
    All,
}

impl FreeSpace {
    /// Returns the space used since `before`. Each used inode counts, because empty files use only
    /// inodes.
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

    /// Returns which sandboxes have to stop at this free space.
    pub(super) fn stop_need(self) -> StopNeed {
        let has_less_than = |part: u64| {
            self.free < self.floor / part || self.inodes_free < self.inodes_floor / part
        };
        if has_less_than(4) {
            StopNeed::All
        } else if has_less_than(2) {
            StopNeed::AnyGrowth
        } else if has_less_than(1) {
            StopNeed::LargeGrowth
        } else {
            StopNeed::None
        }
    }

    /// Queries the free space of the file system of `top`.
    pub(super) fn query(top: &OwnedFd) -> nix::Result<Self> {
        let found = fstatvfs(top)?;
        let size = found.blocks() * found.fragment_size();
        // A file system with dynamic inodes reports no number of inodes.
        let has_inode_count = found.files() > 0;
        Ok(Self {
            free: found.blocks_available() * found.fragment_size(),
            floor: FLOOR_BYTES.min(size / 20),
            inodes_free: if has_inode_count {
                found.files_available()
            } else {
                u64::MAX
            },
            inodes_floor: FLOOR_INODES.min(found.files() / 20),
        })
    }
}

/// Returns why no sandbox can be created, if the file system is too full.
pub(crate) fn check_free_space(directory: &OwnedFd) -> Result<Option<String>> {
    let free_space = FreeSpace::query(directory)?;
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
