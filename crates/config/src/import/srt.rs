//! Settings of Anthropic's sandbox runtime: `network.allowedDomains` and `network.deniedDomains`.

use super::ImportError;
use super::builder::PolicyBuilder;
use super::document::{Document, Item};

const NO_COUNTERPART: &str = "egress rules have no counterpart";

pub(super) fn read(document: &Document, builder: &mut PolicyBuilder) -> Result<(), ImportError> {
    let root = document.root()?;
    let network = root.get("network")?.ok_or_else(|| {
        ImportError::Invalid(
            "the file has no network policy: the key network is missing".to_owned(),
        )
    })?;
    read_domains(&network, builder)?;
    let other = root.other_keys(&["network"])?;
    builder.not_carried_over(
        &other,
        "a sandbox has its own files and environment; see sandbox in docs/config.md",
    );
    Ok(())
}

/// Reads `allowedDomains` and `deniedDomains`.
pub(super) fn read_domains(
    network: &Item<'_>,
    builder: &mut PolicyBuilder,
) -> Result<(), ImportError> {
    for domain in network.list_at("allowedDomains")? {
        builder.allow(&domain)?;
    }
    for domain in network.list_at("deniedDomains")? {
        builder.deny(domain.text()?, &domain.key)?;
    }
    let other = network.other_keys(&["allowedDomains", "deniedDomains", "strictAllowlist"])?;
    builder.not_carried_over(&other, NO_COUNTERPART);
    Ok(())
}
