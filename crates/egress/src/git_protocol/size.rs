//! How large a push is, in words.

use policy::reason::Reason;
use policy::verdict::Denial;
use serde_json::{Value, json};

/// Refuses a push of `bytes` bytes.
pub fn denial(bytes: u64, limit: u64) -> Denial {
    Denial::new(Reason::GitSize, "git:size").saying(format!(
        "This push has {}; pushes above {} are refused.",
        human(bytes),
        human(limit)
    ))
}

/// What is said of a large push that passes.
pub fn warning(bytes: u64, limit: u64) -> String {
    format!(
        "this push has {}; pushes above {} are refused.",
        human(bytes),
        human(limit)
    )
}

/// The details and the guidance of the program before us, whose clients look for them.
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

/// `238.4 MB`, in units of 2^20 bytes as the program before us counts them.
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
    fn sizes_read_as_the_seed_writes_them() {
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
