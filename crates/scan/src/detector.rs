//! The interface of detectors, and their findings.

use std::ops::Range;

/// A match of a rule, without the matched text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ScanFinding<'d> {
    /// The name of the rule that matched.
    pub rule: &'d str,
    /// The position, in bytes from the start of the stream.
    pub span: Range<u64>,
}

/// Searches bytes for secrets.
pub trait Detector {
    /// Passes every finding in `bytes` to `report`.
    fn scan<'d>(&'d self, bytes: &[u8], report: &mut dyn FnMut(ScanFinding<'d>));

    /// How many bytes on either side of the start of a finding can affect it. Bytes further away
    /// cannot, so a stream can be scanned in windows with that overlap.
    fn reach(&self) -> usize;
}
