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

/// Bytes of a window in addition to its overlaps.
const WINDOW: usize = 64 << 10;

/// Scans one stream after another, in a buffer that is allocated once.
pub struct StreamScanner<'d> {
    detector: &'d dyn Detector,
    reach: usize,
    window: Vec<u8>,
    /// Offset of the window in the stream.
    begin: u64,
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
            begin: 0,
            reported: 0,
        }
    }

    /// Scans the next chunk.
    pub fn feed(&mut self, mut bytes: &[u8], found: &mut dyn FnMut(ScanFinding<'d>)) {
        while !bytes.is_empty() {
            let room = self.window.capacity() - self.window.len();
            let (chunk, rest) = bytes.split_at(room.min(bytes.len()));
            self.window.extend_from_slice(chunk);
            bytes = rest;
            if self.window.len() == self.window.capacity() {
                let settled = self.window.len() - self.reach;
                self.report(settled, found);
                let dropped = settled.saturating_sub(self.reach);
                self.window.drain(..dropped);
                self.begin += dropped as u64;
                self.reported = settled - dropped;
            }
        }
    }

    /// Ends the stream. The next chunk starts another one.
    pub fn finish(&mut self, found: &mut dyn FnMut(ScanFinding<'d>)) {
        self.report(self.window.len(), found);
        self.window.clear();
        self.begin = 0;
        self.reported = 0;
    }

    /// Reports findings that start between the reported part and `settled`.
    fn report(&self, settled: usize, found: &mut dyn FnMut(ScanFinding<'d>)) {
        let fresh = self.reported as u64..settled as u64;
        self.detector.scan(&self.window, &mut |finding| {
            if fresh.contains(&finding.span.start) {
                found(ScanFinding {
                    rule: finding.rule,
                    span: self.begin + finding.span.start..self.begin + finding.span.end,
                });
            }
        });
    }
}

#[cfg(test)]
mod tests;
