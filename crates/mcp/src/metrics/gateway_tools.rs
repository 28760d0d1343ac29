//! Names of tools that a gateway serves and that are therefore not configured here.

use std::collections::HashSet;
use std::sync::{Arc, Mutex, PoisonError};

/// Maximum number of stored names.
pub(super) const MAX_GATEWAY_TOOLS: usize = 128;

/// Maximum length of a stored name: the maximum that MCP allows.
const MAX_NAME_BYTES: usize = 128;

/// The first names that were received. Clones share the set.
#[derive(Clone, Debug, Default)]
pub(super) struct GatewayToolNames(Arc<Mutex<HashSet<String>>>);

impl GatewayToolNames {
    /// Whether a name may be a label value: it must consist of the characters that MCP allows, and
    /// be among the first [`MAX_GATEWAY_TOOLS`] names.
    pub(super) fn admits(&self, name: &str) -> bool {
        let is_allowed =
            |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'_' | b'-' | b'.' | b'/');
        if name.is_empty() || name.len() > MAX_NAME_BYTES || !name.bytes().all(is_allowed) {
            return false;
        }
        let mut names = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if names.contains(name) {
            return true;
        }
        if names.len() >= MAX_GATEWAY_TOOLS {
            return false;
        }
        names.insert(name.to_owned());
        if names.len() == MAX_GATEWAY_TOOLS {
            tracing::warn!(
                names = MAX_GATEWAY_TOOLS,
                "mcp metrics count further tool names as unknown"
            );
        }
        true
    }
}
