//! Names of tools that are not configured here, because a gateway serves them.

use std::collections::HashSet;
use std::sync::{Arc, Mutex, PoisonError};

/// The most names that are kept.
pub(super) const MAX_FOREIGN: usize = 128;

/// The longest name that is kept, which is the longest that MCP allows.
const MAX_NAME: usize = 128;

/// The first names that were seen. Cloning is cheap.
#[derive(Clone, Debug, Default)]
pub(super) struct ForeignTools(Arc<Mutex<HashSet<String>>>);

impl ForeignTools {
    /// Whether a name may be a label. Only names of MCP's own alphabet may, and only as many as
    /// fit.
    pub(super) fn admits(&self, name: &str) -> bool {
        let letters = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'_' | b'-' | b'.' | b'/');
        if name.is_empty() || name.len() > MAX_NAME || !name.bytes().all(letters) {
            return false;
        }
        let mut names = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if names.contains(name) {
            return true;
        }
        if names.len() >= MAX_FOREIGN {
            return false;
        }
        names.insert(name.to_owned());
        if names.len() == MAX_FOREIGN {
            tracing::warn!(
                names = MAX_FOREIGN,
                "mcp metrics count further tool names as unknown"
            );
        }
        true
    }
}
