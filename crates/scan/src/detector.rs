//! What every way of finding something looks like from outside.

use std::ops::Range;

/// Something that was found, without its text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ScanFinding<'d> {
    /// The rule that knew it.
    pub rule: &'d str,
    /// Where it is, in bytes from the beginning.
    pub span: Range<u64>,
}

/// Finds things in bytes.
pub trait Detector {
    /// Tells every finding in `bytes`.
    fn scan<'d>(&'d self, bytes: &[u8], found: &mut dyn FnMut(ScanFinding<'d>));

    /// How many bytes, from the beginning of a finding on either side, decide about it. What
    /// is further away changes nothing; that is what lets a stream be cut into windows.
    fn reach(&self) -> usize;
}
