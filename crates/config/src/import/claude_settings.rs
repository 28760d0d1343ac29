//! `settings.json` of Claude Code: `sandbox.network`, and permission rules for WebFetch.

use super::ImportError;
use super::builder::PolicyBuilder;
use super::document::{Document, Item, shown};
use super::srt;

/// The methods that WebFetch uses.
const READS: [&str; 2] = ["GET", "HEAD"];

pub(super) fn read(document: &Document, builder: &mut PolicyBuilder) -> Result<(), ImportError> {
    let root = document.root()?;
    let (sandbox, permissions) = (root.get("sandbox")?, root.get("permissions")?);
    if sandbox.is_none() && permissions.is_none() {
        let message =
            "the file has no network policy: the keys sandbox and permissions are missing";
        return Err(ImportError::Invalid(message.to_owned()));
    }
    if let Some(sandbox) = &sandbox {
        if let Some(network) = sandbox.get("network")? {
            srt::read_domains(&network, builder)?;
        }
        let other = sandbox.other_keys(&["network", "enabled"])?;
        builder.not_carried_over(&other, "a sandbox has its own files and environment");
    }
    if let Some(permissions) = &permissions {
        read_permissions(permissions, builder)?;
    }
    let other = root.other_keys(&["sandbox", "permissions", "$schema"])?;
    builder.not_carried_over(&other, "not about the network");
    Ok(())
}

fn read_permissions(
    permissions: &Item<'_>,
    builder: &mut PolicyBuilder,
) -> Result<(), ImportError> {
    let mut unrelated = 0_usize;
    for list in ["allow", "deny", "ask"] {
        for rule in permissions.list_at(list)? {
            let text = rule.text()?;
            match (web_fetch_domain(text), list) {
                (None, _) if text.starts_with("WebFetch") || text.starts_with("WebSearch") => {
                    builder.note(format!(
                        "not carried over: {} {}: it names no domain",
                        shown(&rule.key),
                        shown(text)
                    ));
                }
                (None, _) => unrelated += 1,
                (Some(domain), "allow") => {
                    builder.allow_methods(domain, &rule.key, &READS)?;
                }
                (Some(domain), "deny") => builder.deny(domain, &rule.key)?,
                (Some(domain), _) => builder.note(format!(
                    "not carried over: {} {}: approvals are not available",
                    shown(&rule.key),
                    shown(domain)
                )),
            }
        }
    }
    if unrelated > 0 {
        builder.note(format!(
            "not carried over: {unrelated} permission rules that are not about the network"
        ));
    }
    let other = permissions.other_keys(&["allow", "deny", "ask"])?;
    builder.not_carried_over(&other, "not about the network");
    Ok(())
}

/// The domain of `WebFetch(domain:DOMAIN)`.
fn web_fetch_domain(rule: &str) -> Option<&str> {
    let inner = rule.strip_prefix("WebFetch(domain:")?.strip_suffix(')')?;
    Some(inner.trim())
}
