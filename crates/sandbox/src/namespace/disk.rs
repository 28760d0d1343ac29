//! Disk limit of a sandbox, enforced by measuring.
//!
//! Quotas need a suitable file system and root, a loop device needs root, and a tmpfs is memory.
//! Measuring works everywhere: init often queries the free space of the file system, which is
//! cheap. Init measures the sandbox's own directory only
//!
//! - when so much space was used since the last measurement that the limit may be near,
//! - and at least every minute, because the free space shows no growth while other programs free
//!   space.
//!
//! A measurement examines a few entries at a time, between two requests, and takes a small part of
//! the time. Files that were deleted and are still open count as well. In addition, sandboxes may
//! not use the last gibibyte of the file system (or the last twentieth, or the last inodes), which
//! is called the floor. Each init decides whether its own sandbox stops, by the sandbox's growth
//! since the free space was last above twice the floor:
//!
//! | free space | which sandboxes stop |
//! | --- | --- |
//! | the floor | those that used a quarter or more of the lost space |
//! | half of the floor | those that used any |
//! | a quarter of the floor | all |
//!
//! ```text
//!            limit or floor passed: all processes are killed, the file `stopped` has the reason
//!   watched ───────────────────────────────────────────────────────────────▶ stopped
//!           ◀───────────────────────────────────────────────────────────────
//!                          space was freed from outside
//! ```
//!
//! Init (PID 1) measures, because no process in the sandbox can stop or kill init. For this purpose
//! init keeps a capability to read directories without permission; it reads only names, types and
//! sizes.

mod deleted_files;
mod free_space;
mod measure;

use std::fs::File;
use std::io::Result;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

use nix::poll::PollTimeout;
use nix::unistd::Pid;

pub(crate) use free_space::check_free_space;
use free_space::{FreeSpace, StopNeed, format_size};
use measure::Measurement;

/// Maximum number of entries that are measured between two requests.
const ENTRIES_PER_STEP: usize = 2000;

/// Maximum time between two measurements.
const MAX_MEASURE_INTERVAL: Duration = Duration::from_secs(60);

/// Maximum pause between two measurements of a stopped sandbox, whose files may be removed from
/// outside. The pause is a multiple of the last measurement's duration, which may be long only
/// because the machine is busy; this maximum keeps the pause short in that case.
const MAX_STOPPED_INTERVAL: Duration = Duration::from_secs(5);

/// Growth in bytes that never stops a sandbox, such as that of a log or a lock file.
const NEGLIGIBLE_GROWTH: u64 = 1 << 20;

/// Maximum bytes that any process writes in a millisecond.
const MAX_WRITE_BYTES_PER_MS: u64 = 4 << 20;

/// Watches the disk usage of a sandbox's directory.
pub(crate) struct DiskWatch {
    /// The directory on the host, without the sandbox's mounts.
    top: OwnedFd,
    /// The file with the reason of a stop.
    stop_file: File,
    limit: u64,
    next_check: Instant,
    /// The last measurement.
    last: Option<DiskUsage>,
    /// The free space and the sandbox's size at the last measurement at which the free space was
    /// above twice the floor, or at the first measurement.
    baseline: Option<(FreeSpace, u64)>,
    running: Option<(Measurement, Instant, FreeSpace)>,
    stopped: Option<String>,
}

/// The processes of the sandbox.
pub(crate) struct SandboxProcesses<'a> {
    /// A `/proc` that shows all processes.
    pub(crate) proc: &'a OwnedFd,
    /// The subreapers.
    pub(crate) subreapers: &'a [Pid],
}

struct DiskUsage {
    used: u64,
    /// Whether a process's open files could not be examined.
    has_hidden_process: bool,
    /// The free space at the start of the measurement.
    free_space: FreeSpace,
    began: Instant,
    took: Duration,
}

impl DiskWatch {
    /// Watches `top` and writes the reason of a stop to `stop_file`.
    pub(crate) fn new(top: OwnedFd, stop_file: File, limit: u64) -> Self {
        Self {
            top,
            stop_file,
            limit,
            next_check: Instant::now(),
            last: None,
            baseline: None,
            running: None,
            stopped: None,
        }
    }

    /// The watched directory.
    pub(crate) fn directory(&self) -> BorrowedFd<'_> {
        self.top.as_fd()
    }

    /// The time until the next check.
    pub(crate) fn poll_timeout(&self) -> PollTimeout {
        if self.running.is_some() {
            return PollTimeout::ZERO;
        }
        let left = self.next_check.saturating_duration_since(Instant::now());
        // Rounded up, because the last millisecond would be a busy loop.
        PollTimeout::try_from(left + Duration::from_micros(999)).unwrap_or(PollTimeout::MAX)
    }

    /// The reason of a stop, if the sandbox is stopped.
    pub(crate) fn stopped(&self) -> Option<&str> {
        self.stopped.as_deref()
    }

    /// Makes the next check due now, because a process starts.
    pub(crate) fn wake(&mut self) {
        self.next_check = Instant::now();
    }

    /// Checks the disk usage if a check is due. While [`DiskWatch::stopped`] has a reason, the
    /// caller must let no process run.
    pub(crate) fn check(&mut self, has_processes: bool, processes: Option<&SandboxProcesses<'_>>) {
        let now = Instant::now();
        if self.running.is_none() && now < self.next_check {
            return;
        }
        // Without processes nothing grows.
        if !has_processes && self.stopped.is_none() && self.running.is_none() {
            self.next_check = now + Duration::from_secs(1);
            return;
        }
        let Ok(free_space) = FreeSpace::query(&self.top) else {
            self.next_check = now + Duration::from_secs(1);
            return;
        };
        self.measure(now, free_space, processes);
        let reason = self.stop_reason(free_space);
        if reason.as_deref() != self.stopped.as_deref() {
            // A stop is enforced even if its reason cannot be written.
            let _ = self.write_stop_reason(reason.as_deref().unwrap_or_default());
            self.stopped = reason;
        }
        self.next_check = now + self.interval(free_space);
    }

    fn measure(
        &mut self,
        now: Instant,
        free_space: FreeSpace,
        processes: Option<&SandboxProcesses<'_>>,
    ) {
        if self.running.is_none() && self.is_due(now, free_space) {
            match Measurement::begin(&self.top, processes) {
                Ok(measurement) => self.running = Some((measurement, now, free_space)),
                Err(_) => return,
            }
        }
        if let Some((measurement, began, free_space)) = &mut self.running
            && measurement.resume(ENTRIES_PER_STEP)
        {
            let found = DiskUsage {
                used: measurement.bytes(),
                has_hidden_process: measurement.has_hidden_process(),
                free_space: *free_space,
                began: *began,
                took: began.elapsed(),
            };
            self.running = None;
            self.record_usage(found);
        }
    }

    fn record_usage(&mut self, found: DiskUsage) {
        if self.baseline.is_none() || !found.free_space.is_below(2) {
            self.baseline = Some((found.free_space, found.used));
        }
        self.last = Some(found);
    }

    fn is_due(&self, now: Instant, free_space: FreeSpace) -> bool {
        let Some(last) = &self.last else { return true };
        let age = now.saturating_duration_since(last.began + last.took);
        if self.stopped.is_some() {
            let interval = (last.took * 20).min(MAX_STOPPED_INTERVAL);
            return age >= Duration::from_secs(1).max(interval);
        }
        let left = self.limit.saturating_sub(last.used);
        let lost = free_space.used_since(last.free_space);
        if free_space.is_below(1)
            && age >= last.took
            && (!last.free_space.is_below(1) || lost >= free_space.floor / 16)
        {
            return true;
        }
        let step = (left / 8).clamp(1 << 20, 256 << 20);
        (lost >= left && age >= last.took)
            || (lost >= step && age >= last.took * 4)
            || age >= MAX_MEASURE_INTERVAL.max(last.took * 50)
    }

    fn stop_reason(&self, free_space: FreeSpace) -> Option<String> {
        // A stopped sandbox runs again only when the free space is above twice the floor, so that it does not stop again
        // at once.
        let stays_stopped = self.stopped.is_some() && free_space.is_below(2);
        if stays_stopped || self.must_stop(free_space) {
            return Some(format!(
                "disk limit: the host's file system has only {} and {} inodes left; free some \
                 space there, and the sandbox can run again",
                format_size(free_space.free),
                free_space.inodes_free
            ));
        }
        let used = self.last.as_ref().map_or(0, |last| last.used);
        (used > self.limit).then(|| {
            format!(
                "disk limit: the sandbox holds {} and may hold {}; its files are kept: \
                 snapshot or download them, then delete the sandbox",
                format_size(used),
                format_size(self.limit)
            )
        })
    }

    /// Whether this sandbox must stop, so that the host keeps its floor.
    fn must_stop(&self, free_space: FreeSpace) -> bool {
        let stop_need = free_space.stop_need();
        let (Some(last), Some((baseline, size_then))) = (&self.last, &self.baseline) else {
            // There is no measurement yet.
            return stop_need > StopNeed::None;
        };
        // A sandbox with a process whose open files cannot be examined counts as grown without
        // limit.
        let growth = match last.has_hidden_process {
            true => u64::MAX,
            false => last.used.saturating_sub(*size_then),
        };
        // A measurement from before the floor was passed does not show whether this sandbox passed
        // it.
        let is_recent = last.free_space.is_below(1);
        match stop_need {
            StopNeed::None => false,
            StopNeed::LargeGrowth => {
                is_recent
                    && growth > NEGLIGIBLE_GROWTH
                    && growth >= last.free_space.used_since(*baseline) / 4
            }
            StopNeed::AnyGrowth => is_recent && growth > NEGLIGIBLE_GROWTH,
            StopNeed::All => true,
        }
    }

    /// Returns the time in which the fastest writer could reach the limit or the floor.
    fn interval(&self, free_space: FreeSpace) -> Duration {
        let used = self.last.as_ref().map_or(0, |last| {
            last.used
                .saturating_add(free_space.used_since(last.free_space))
        });
        let left = self.limit.saturating_sub(used);
        let left = left.min(free_space.free.saturating_sub(free_space.floor));
        Duration::from_millis((left / MAX_WRITE_BYTES_PER_MS).clamp(20, 1000))
    }

    fn write_stop_reason(&self, reason: &str) -> Result<()> {
        self.stop_file.set_len(0)?;
        self.stop_file.write_all_at(reason.as_bytes(), 0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn new_watch(limit: u64) -> (tempfile::TempDir, DiskWatch) {
        let directory = tempfile::tempdir().unwrap();
        let top = File::open(directory.path()).unwrap().into();
        let stop_file = File::create(directory.path().join("stopped")).unwrap();
        (directory, DiskWatch::new(top, stop_file, limit))
    }

    fn record_measurement(watch: &mut DiskWatch, used: u64, free: u64) {
        let free_space = free_space(free);
        watch.record_usage(DiskUsage {
            used,
            has_hidden_process: false,
            free_space,
            began: Instant::now(),
            took: Duration::ZERO,
        });
    }

    fn free_space(free: u64) -> FreeSpace {
        FreeSpace {
            free,
            floor: 1 << 30,
            inodes_free: 1 << 20,
            inodes_floor: 1 << 10,
        }
    }

    #[test]
    fn limit_floor_and_inodes_stop_and_free_space_restarts() {
        let (_directory, mut watch) = new_watch(100 << 20);
        record_measurement(&mut watch, 50 << 20, 9 << 30);
        assert_eq!(watch.stop_reason(free_space(9 << 30)), None);
        let reason = watch.stop_reason(free_space((1 << 28) - 1)).unwrap();
        assert!(reason.starts_with("disk limit: the host's"), "{reason}");
        watch.stopped = Some(reason);
        assert!(watch.stop_reason(free_space(3 << 29)).is_some());
        assert_eq!(watch.stop_reason(free_space(2 << 30)), None);
        let mut few = free_space(9 << 30);
        few.inodes_free = 7;
        assert!(watch.stop_reason(few).unwrap().contains("7 inodes"));
        record_measurement(&mut watch, 101 << 20, 9 << 30);
        let reason = watch.stop_reason(free_space(9 << 30)).unwrap();
        assert!(
            reason.contains("holds 101.0 MiB and may hold 100.0 MiB"),
            "{reason}"
        );
    }

    #[test]
    fn floor_stops_the_largest_growth_first() {
        const MIB: u64 = 1 << 20;
        for (growth, at_the_floor, at_half, at_a_quarter) in [
            (0, false, false, true),
            (MIB, false, false, true),
            (20 * MIB, false, true, true),
            (900 * MIB, true, true, true),
        ] {
            let (_directory, mut watch) = new_watch(16 << 30);
            record_measurement(&mut watch, 5 << 30, 3 << 30);
            for (free, stops) in [
                (1 << 30, false),
                (1023 * MIB, at_the_floor),
                (511 * MIB, at_half),
                (255 * MIB, at_a_quarter),
            ] {
                record_measurement(&mut watch, (5 << 30) + growth, free);
                assert_eq!(
                    watch.stop_reason(free_space(free)).is_some(),
                    stops,
                    "{growth} {free}"
                );
            }
        }
        let (_directory, mut watch) = new_watch(16 << 30);
        record_measurement(&mut watch, 5 << 30, 3 << 30);
        record_measurement(&mut watch, 5 << 30, 1023 * MIB);
        assert_eq!(watch.stop_reason(free_space(1023 * MIB)), None);
        watch.last.as_mut().unwrap().has_hidden_process = true;
        assert!(watch.stop_reason(free_space(1023 * MIB)).is_some());
        assert_eq!(watch.stop_reason(free_space(2 << 30)), None);
        // A measurement from before the floor was passed counts only below a quarter of the floor.
        let (_directory, mut watch) = new_watch(16 << 30);
        record_measurement(&mut watch, 5 << 30, 3 << 30);
        assert_eq!(watch.stop_reason(free_space(600 * MIB)), None);
        assert!(watch.is_due(Instant::now(), free_space(600 * MIB)));
        assert!(watch.stop_reason(free_space(200 * MIB)).is_some());
    }

    #[test]
    fn measurement_is_due_when_space_shrinks_or_after_a_minute() {
        let (_directory, mut watch) = new_watch(1 << 30);
        let now = Instant::now();
        assert!(watch.is_due(now, free_space(9 << 30)));
        record_measurement(&mut watch, 0, 9 << 30);
        assert!(!watch.is_due(Instant::now(), free_space(9 << 30)));
        assert!(!watch.is_due(Instant::now(), free_space((9 << 30) - (1 << 20))));
        assert!(watch.is_due(Instant::now(), free_space((9 << 30) - (1 << 27))));
        assert!(watch.is_due(Instant::now() + MAX_MEASURE_INTERVAL, free_space(9 << 30)));
        let mut inodes = free_space(9 << 30);
        inodes.inodes_free -= 1 << 16;
        assert!(watch.is_due(Instant::now(), inodes));
    }

    #[test]
    fn check_interval_shrinks_near_the_limit() {
        let (_directory, mut watch) = new_watch(16 << 30);
        record_measurement(&mut watch, 0, 90 << 30);
        assert_eq!(watch.interval(free_space(90 << 30)), Duration::from_secs(1));
        assert_eq!(
            watch.interval(free_space(75 << 30)),
            Duration::from_millis(256)
        );
        record_measurement(&mut watch, 0, 1 << 30);
        assert_eq!(
            watch.interval(free_space(1 << 30)),
            Duration::from_millis(20)
        );
    }

    #[test]
    fn stop_reason_is_written_and_cleared() {
        let (directory, mut watch) = new_watch(1 << 20);
        let read = || std::fs::read_to_string(directory.path().join("stopped")).unwrap();
        std::fs::write(directory.path().join("big"), vec![1; 3 << 20]).unwrap();
        watch.check(true, None);
        assert!(watch.stopped().unwrap().contains("3.0 MiB"), "{}", read());
        assert_eq!(Some(read().as_str()), watch.stopped());
        std::fs::remove_file(directory.path().join("big")).unwrap();
        while watch.stopped().is_some() {
            watch.check(false, None);
            std::thread::yield_now();
        }
        assert_eq!(read(), "");
    }
}
