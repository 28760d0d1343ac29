//! Scans a stream in windows: the findings do not depend on how the stream is divided into chunks.
//!
//! ```text
//!   window:    │ seen before │            new             │ incomplete │
//!              └── reach ────┘                            └── reach ───┘
//!   reported:                ├── findings that start here ┤
//! ```
//!
//! A finding that starts in the last part is reported by the next window, in which it is in the
//! middle, with enough bytes before it.

use crate::detector::{Detector, ScanFinding};

/// Size of a window in bytes, without its overlaps.
const WINDOW: usize = 64 << 10;

/// Scans one stream after another, in a buffer that is allocated once.
pub struct StreamScanner<'d> {
    detector: &'d dyn Detector,
    reach: usize,
    window: Vec<u8>,
    /// Offset of the window in the stream.
    window_offset: u64,
    /// How many bytes of the window have been reported.
    reported: usize,
}

impl<'d> StreamScanner<'d> {
    /// A scanner at the start of a stream.
    pub fn new(detector: &'d dyn Detector) -> Self {
        let reach = detector.reach();
        Self {
            detector,
            reach,
            window: Vec::with_capacity(WINDOW.saturating_add(reach.saturating_mul(2))),
            window_offset: 0,
            reported: 0,
        }
    }

    /// Scans the next chunk.
    pub fn feed(&mut self, mut bytes: &[u8], report: &mut dyn FnMut(ScanFinding<'d>)) {
        while !bytes.is_empty() {
            let room = self.window.capacity() - self.window.len();
            let (chunk, rest) = bytes.split_at(room.min(bytes.len()));
            self.window.extend_from_slice(chunk);
            bytes = rest;
            if self.window.len() == self.window.capacity() {
                let end_of_complete = self.window.len() - self.reach;
                self.report_up_to(end_of_complete, report);
                let dropped = end_of_complete.saturating_sub(self.reach);
                self.window.drain(..dropped);
                self.window_offset += dropped as u64;
                self.reported = end_of_complete - dropped;
            }
        }
    }

    /// Ends the stream. The next chunk starts another one.
    pub fn finish(&mut self, report: &mut dyn FnMut(ScanFinding<'d>)) {
        self.report_up_to(self.window.len(), report);
        self.window.clear();
        self.window_offset = 0;
        self.reported = 0;
    }

    /// Reports the findings that start after the reported part and before `end_of_complete`.
    fn report_up_to(&self, end_of_complete: usize, report: &mut dyn FnMut(ScanFinding<'d>)) {
        let unreported = self.reported as u64..end_of_complete as u64;
        self.detector.scan(&self.window, &mut |finding| {
            if unreported.contains(&finding.span.start) {
                report(ScanFinding {
                    rule: finding.rule,
                    span: self.window_offset + finding.span.start
                        ..self.window_offset + finding.span.end,
                });
            }
        });
    }
}

#[cfg(test)]
mod tests;
