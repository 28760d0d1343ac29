//! Messages about the size of a push.

use policy::reason::Reason;
use policy::verdict::Denial;
use serde_json::{Value, json};

/// Refuses a push of `bytes` bytes.
pub fn denial(bytes: u64, limit: u64) -> Denial {
    Denial::new(Reason::GitSize, "git:size").with_message(format!(
        "This push has {}; pushes above {} are refused.",
        human(bytes),
        human(limit)
    ))
}

/// The warning about a large push that is allowed.
pub fn warning(bytes: u64, limit: u64) -> String {
    format!(
        "this push has {}; pushes above {} are refused.",
        human(bytes),
        human(limit)
    )
}

/// JSON fields of a size refusal. Clients of Palisade's predecessor read them.
pub fn details(bytes: u64, limit: u64) -> [(&'static str, Value); 2] {
    let details = json!({
        "push_size_bytes": bytes,
        "push_size_human": human(bytes),
        "limit_bytes": limit,
        "limit_human": human(limit),
    });
    let guidance = json!({
        "message": "Your push exceeds the size limit. Alternatives:",
        "options": [
            "Split into smaller commits and push incrementally",
            "Use Git LFS for large binary files",
            "Request per-repository limit increase",
        ],
        "example": [
            "git push origin HEAD~50:refs/heads/branch",
            "git push origin HEAD:refs/heads/branch",
        ],
    });
    [("details", details), ("guidance", guidance)]
}

/// Formats a size as `238.4 MB`, in units of 2^20 bytes as Palisade's predecessor does.
fn human(bytes: u64) -> String {
    let tenths = (u128::from(bytes) * 10 + (1 << 19)) >> 20;
    match tenths % 10 {
        0 => format!("{} MB", tenths / 10),
        tenth => format!("{}.{tenth} MB", tenths / 10),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_formatted_as_in_the_predecessor() {
        for (bytes, text) in [
            (250_000_000, "238.4 MB"),
            (209_715_200, "200 MB"),
            (0, "0 MB"),
            (104_857_601, "100 MB"),
        ] {
            assert_eq!(human(bytes), text);
        }
    }
}
