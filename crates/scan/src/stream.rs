//! Windows over bytes that come in pieces: whatever the pieces are, the findings are those of
//! the whole.
//!
//! ```text
//!   window:  │ seen before │            new             │ may go on │
//!            └── reach ────┘                            └── reach ──┘
//!   told:                  ├── findings that begin here ┤
//! ```
//!
//! What begins in the last part is left to the next window, which has it in its middle, with
//! enough of what came before it.

use crate::detector::{Detector, ScanFinding};

/// What a window has beside its overlap.
const FRESH: usize = 64 << 10;

/// Scans one stream after another, in memory that is taken once.
pub struct StreamScanner<'d> {
    detector: &'d dyn Detector,
    reach: usize,
    window: Vec<u8>,
    /// Where in the stream the window begins.
    begin: u64,
    /// How much of the window has been told about.
    told: usize,
}

impl<'d> StreamScanner<'d> {
    /// A stream that has not begun.
    pub fn new(detector: &'d dyn Detector) -> Self {
        let reach = detector.reach();
        Self {
            detector,
            reach,
            window: Vec::with_capacity(FRESH.saturating_add(reach.saturating_mul(2))),
            begin: 0,
            told: 0,
        }
    }

    /// Goes on with the next piece.
    pub fn feed(&mut self, mut bytes: &[u8], found: &mut dyn FnMut(ScanFinding<'d>)) {
        while !bytes.is_empty() {
            let room = self.window.capacity() - self.window.len();
            let (now, later) = bytes.split_at(room.min(bytes.len()));
            self.window.extend_from_slice(now);
            bytes = later;
            if self.window.len() == self.window.capacity() {
                let settled = self.window.len() - self.reach;
                self.tell(settled, found);
                let forgotten = settled.saturating_sub(self.reach);
                self.window.drain(..forgotten);
                self.begin += forgotten as u64;
                self.told = settled - forgotten;
            }
        }
    }

    /// Ends the stream. The next piece begins another one.
    pub fn finish(&mut self, found: &mut dyn FnMut(ScanFinding<'d>)) {
        self.tell(self.window.len(), found);
        self.window.clear();
        self.begin = 0;
        self.told = 0;
    }

    /// Tells what begins between what was told before and `settled`.
    fn tell(&self, settled: usize, found: &mut dyn FnMut(ScanFinding<'d>)) {
        let fresh = self.told as u64..settled as u64;
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
