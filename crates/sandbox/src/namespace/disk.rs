//! How much disk a sandbox takes, and when that is too much.
//!
//! Quotas need a file system made for them and root, a loop device needs root, and a tmpfs is
//! memory. What works for everybody is to look: init asks the file system how much is free,
//! which costs nothing, and measures the sandbox's own directory only
//!
//! - when so much has gone since the last time that the limit may be near,
//! - and every minute at least, because what others freed hides what the agent took;
//!
//! a few entries at a time, between two requests, and never for more than a small part of
//! the time. Whatever a measurement says, the host keeps its last gibibyte (or twentieth, or
//! few inodes): files that were deleted and are still open are found by no measurement.
//!
//! ```text
//!            limit or floor passed: everybody is killed, `stopped` says why
//!   watched ───────────────────────────────────────────────────────────────▶ stopped
//!           ◀───────────────────────────────────────────────────────────────
//!                          somebody made room, from outside
//! ```
//!
//! PID 1 does it because nobody inside can stop or kill that. It keeps one capability for it,
//! to look into directories that are closed to it, and looks at names, kinds and sizes only.

mod measure;

use std::fs::File;
use std::io::Result;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

use nix::poll::PollTimeout;
use nix::sys::statvfs::fstatvfs;

use measure::Measurement;

/// What the host keeps, unless that is more than a twentieth of its file system.
const FLOOR: u64 = 1 << 30;
/// The same, in inodes.
const FLOOR_INODES: u64 = 16 << 10;

/// Entries that are looked at between two requests.
const SLICE: usize = 2000;

/// How often it is measured when there is no other reason.
const SELDOM: Duration = Duration::from_secs(60);

/// Nobody writes more in a millisecond.
const FASTEST: u64 = 4 << 20;

/// The watch over a sandbox's directory.
pub(crate) struct Watch {
    /// The directory, as the host sees it: without the sandbox's mounts in it.
    top: OwnedFd,
    /// Where it is written that the sandbox was stopped, and why.
    verdict: File,
    limit: u64,
    next_look: Instant,
    /// What the last measurement found.
    last: Option<Found>,
    running: Option<(Measurement, Instant, Room)>,
    stopped: Option<String>,
}

struct Found {
    used: u64,
    /// What was left when it began.
    room: Room,
    began: Instant,
    took: Duration,
}

/// What a file system has left.
#[derive(Clone, Copy, Debug)]
struct Room {
    free: u64,
    floor: u64,
    inodes_free: u64,
    inodes_floor: u64,
}

impl Watch {
    /// A watch over `top` that writes what it decides to `verdict`.
    pub(crate) fn new(top: OwnedFd, verdict: File, limit: u64) -> Self {
        Self {
            top,
            verdict,
            limit,
            next_look: Instant::now(),
            last: None,
            running: None,
            stopped: None,
        }
    }

    /// What is watched.
    pub(crate) fn directory(&self) -> BorrowedFd<'_> {
        self.top.as_fd()
    }

    /// How long nothing has to be looked at.
    pub(crate) fn patience(&self) -> PollTimeout {
        if self.running.is_some() {
            return PollTimeout::ZERO;
        }
        let left = self.next_look.saturating_duration_since(Instant::now());
        // Rounded up, or the last millisecond would be spent spinning.
        PollTimeout::try_from(left + Duration::from_micros(999)).unwrap_or(PollTimeout::MAX)
    }

    /// Why nothing may run.
    pub(crate) fn stopped(&self) -> Option<&str> {
        self.stopped.as_deref()
    }

    /// Somebody begins to run: it is time to look.
    pub(crate) fn wake(&mut self) {
        self.next_look = Instant::now();
    }

    /// Looks, if it is time to. Nobody may run while [`Watch::stopped`] says so.
    pub(crate) fn look(&mut self, somebody_runs: bool) {
        let now = Instant::now();
        if self.running.is_none() && now < self.next_look {
            return;
        }
        // With nobody inside nothing grows.
        if !somebody_runs && self.stopped.is_none() && self.running.is_none() {
            self.next_look = now + Duration::from_secs(1);
            return;
        }
        let Ok(room) = Room::of(&self.top) else {
            self.next_look = now + Duration::from_secs(1);
            return;
        };
        self.measure(now, room);
        let reason = self.judge(room);
        if reason.as_deref() != self.stopped.as_deref() {
            // What cannot be written down is enforced all the same.
            let _ = self.write_down(reason.as_deref().unwrap_or_default());
            self.stopped = reason;
        }
        self.next_look = now + self.interval(room);
    }

    fn measure(&mut self, now: Instant, room: Room) {
        if self.running.is_none() && self.is_due(now, room) {
            match Measurement::begin(&self.top) {
                Ok(begun) => self.running = Some((begun, now, room)),
                Err(_) => return,
            }
        }
        if let Some((measurement, began, room)) = &mut self.running
            && measurement.go_on(SLICE)
        {
            self.last = Some(Found {
                used: measurement.bytes(),
                room: *room,
                began: *began,
                took: began.elapsed(),
            });
            self.running = None;
        }
    }

    fn is_due(&self, now: Instant, room: Room) -> bool {
        let Some(last) = &self.last else { return true };
        let age = now.saturating_duration_since(last.began + last.took);
        if self.stopped.is_some() {
            return age >= Duration::from_secs(1).max(last.took * 20);
        }
        let left = self.limit.saturating_sub(last.used);
        let gone = room.gone_since(last.room);
        let step = (left / 8).clamp(1 << 20, 256 << 20);
        (gone >= left && age >= last.took)
            || (gone >= step && age >= last.took * 4)
            || age >= SELDOM.max(last.took * 50)
    }

    fn judge(&self, room: Room) -> Option<String> {
        // A little more room than the floor before it starts again, or it would flap.
        let factor = if self.stopped.is_some() { 2 } else { 1 };
        if room.free < room.floor.saturating_mul(factor)
            || room.inodes_free < room.inodes_floor.saturating_mul(factor)
        {
            return Some(format!(
                "disk limit: the host's file system has only {} and {} inodes left; make room \
                 there, and the sandbox runs again",
                in_words(room.free),
                room.inodes_free
            ));
        }
        let used = self.last.as_ref().map_or(0, |last| last.used);
        (used > self.limit).then(|| {
            format!(
                "disk limit: the sandbox holds {} and may hold {}; its work is still there: \
                 take it home, then delete the sandbox",
                in_words(used),
                in_words(self.limit)
            )
        })
    }

    /// Until the fastest disk could have reached the limit or the floor.
    fn interval(&self, room: Room) -> Duration {
        let used = self.last.as_ref().map_or(0, |last| {
            last.used.saturating_add(room.gone_since(last.room))
        });
        let left = self.limit.saturating_sub(used);
        let left = left.min(room.free.saturating_sub(room.floor));
        Duration::from_millis((left / FASTEST).clamp(20, 1000))
    }

    fn write_down(&self, reason: &str) -> Result<()> {
        self.verdict.set_len(0)?;
        self.verdict.write_all_at(reason.as_bytes(), 0)
    }
}

impl Room {
    /// What somebody has taken meanwhile, at least: empty files take inodes only.
    fn gone_since(self, before: Self) -> u64 {
        let inodes = before.inodes_free.saturating_sub(self.inodes_free);
        before
            .free
            .saturating_sub(self.free)
            .saturating_add(inodes.saturating_mul(measure::LEAST))
    }

    fn of(top: &OwnedFd) -> nix::Result<Self> {
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
    let room = Room::of(directory)?;
    let full = room.free < room.floor || room.inodes_free < room.inodes_floor;
    Ok(full.then(|| {
        format!(
            "the file system of the sandboxes has only {} and {} inodes left; make room there",
            in_words(room.free),
            room.inodes_free
        )
    }))
}

/// Bytes as people say them.
fn in_words(bytes: u64) -> String {
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

#[cfg(test)]
mod tests {
    use super::*;

    fn watch(limit: u64) -> (tempfile::TempDir, Watch) {
        let place = tempfile::tempdir().unwrap();
        let top = File::open(place.path()).unwrap().into();
        let verdict = File::create(place.path().join("verdict")).unwrap();
        (place, Watch::new(top, verdict, limit))
    }

    fn measured(watch: &mut Watch, used: u64, free: u64) {
        let room = room(free);
        watch.last = Some(Found {
            used,
            room,
            began: Instant::now(),
            took: Duration::ZERO,
        });
    }

    fn room(free: u64) -> Room {
        Room {
            free,
            floor: 1 << 30,
            inodes_free: 1 << 20,
            inodes_floor: 1 << 10,
        }
    }

    #[test]
    fn the_limit_the_floor_and_the_inodes_stop_and_room_starts_again() {
        let (_place, mut watch) = watch(100 << 20);
        measured(&mut watch, 50 << 20, 9 << 30);
        assert_eq!(watch.judge(room(9 << 30)), None);
        let said = watch.judge(room((1 << 30) - 1)).unwrap();
        assert!(said.starts_with("disk limit: the host's"), "{said}");
        watch.stopped = Some(said);
        assert!(watch.judge(room(3 << 29)).is_some());
        assert_eq!(watch.judge(room(2 << 30)), None);
        let mut few = room(9 << 30);
        few.inodes_free = 7;
        assert!(watch.judge(few).unwrap().contains("7 inodes"));
        measured(&mut watch, 101 << 20, 9 << 30);
        let said = watch.judge(room(9 << 30)).unwrap();
        assert!(
            said.contains("holds 101.0 MiB and may hold 100.0 MiB"),
            "{said}"
        );
    }

    #[test]
    fn it_is_measured_when_space_goes_and_seldom_otherwise() {
        let (_place, mut watch) = watch(1 << 30);
        let now = Instant::now();
        assert!(watch.is_due(now, room(9 << 30)));
        measured(&mut watch, 0, 9 << 30);
        assert!(!watch.is_due(Instant::now(), room(9 << 30)));
        assert!(!watch.is_due(Instant::now(), room((9 << 30) - (1 << 20))));
        assert!(watch.is_due(Instant::now(), room((9 << 30) - (1 << 27))));
        assert!(watch.is_due(Instant::now() + SELDOM, room(9 << 30)));
        let mut inodes = room(9 << 30);
        inodes.inodes_free -= 1 << 16;
        assert!(watch.is_due(Instant::now(), inodes));
    }

    #[test]
    fn the_nearer_the_end_the_closer_the_watch() {
        let (_place, mut watch) = watch(16 << 30);
        measured(&mut watch, 0, 90 << 30);
        assert_eq!(watch.interval(room(90 << 30)), Duration::from_secs(1));
        assert_eq!(watch.interval(room(75 << 30)), Duration::from_millis(256));
        measured(&mut watch, 0, 1 << 30);
        assert_eq!(watch.interval(room(1 << 30)), Duration::from_millis(20));
    }

    #[test]
    fn what_is_decided_is_written_down_and_taken_back() {
        let (place, mut watch) = watch(1 << 20);
        let read = || std::fs::read_to_string(place.path().join("verdict")).unwrap();
        std::fs::write(place.path().join("big"), vec![1; 3 << 20]).unwrap();
        watch.look(true);
        assert!(watch.stopped().unwrap().contains("3.0 MiB"), "{}", read());
        assert_eq!(Some(read().as_str()), watch.stopped());
        std::fs::remove_file(place.path().join("big")).unwrap();
        while watch.stopped().is_some() {
            watch.look(false);
            std::thread::yield_now();
        }
        assert_eq!(read(), "");
    }
}
