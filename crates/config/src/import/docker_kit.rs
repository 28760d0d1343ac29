//! `spec.yaml` of a Docker sandbox kit: `network.allowedDomains` in schema version 1,
//! `permissions.network.allow` in version 2.

use serde_json::Value;

use super::ImportError;
use super::builder::PolicyBuilder;
use super::document::{Document, Item};

pub(super) fn read(document: &Document, builder: &mut PolicyBuilder) -> Result<(), ImportError> {
    let root = document.root()?;
    let version = root.get("schemaVersion")?;
    let version = match version.as_ref().map(|item| item.value) {
        Some(Value::String(text)) => text.clone(),
        Some(Value::Number(number)) => number.to_string(),
        _ => String::new(),
    };
    let network = match version.as_str() {
        "1" => root.get("network")?,
        "2" => match root.get("permissions")? {
            Some(permissions) => {
                let other = permissions.other_keys(&["network"])?;
                builder.not_carried_over(&other, "not about the network");
                permissions.get("network")?
            }
            None => None,
        },
        _ => {
            let message = "schemaVersion must be \"1\" or \"2\"; other versions cannot be imported";
            return Err(ImportError::Invalid(message.to_owned()));
        }
    };
    let (allow, deny, section) = match version.as_str() {
        "1" => ("allowedDomains", "deniedDomains", "network"),
        _ => ("allow", "deny", "permissions"),
    };
    let network = network.ok_or_else(|| {
        let message = format!("the kit has no network policy: {section} is missing");
        ImportError::Invalid(message)
    })?;
    for domain in network.list_at(allow)? {
        note_depth(&domain, builder)?;
        builder.allow(&domain)?;
    }
    for domain in network.list_at(deny)? {
        builder.deny(domain.text()?, &domain.key)?;
    }
    let other = network.other_keys(&[allow, deny])?;
    builder.not_carried_over(&other, "the gate adds no credentials for them");
    let known = [
        "schemaVersion",
        "kind",
        "name",
        "displayName",
        "description",
        "version",
        section,
    ];
    let other = root.other_keys(&known)?;
    builder.not_carried_over(&other, "not about the network");
    Ok(())
}

/// A star stands for one level of names in a kit, and for all levels here.
fn note_depth(domain: &Item<'_>, builder: &mut PolicyBuilder) -> Result<(), ImportError> {
    let text = domain.text()?;
    if text.starts_with("*.") {
        builder.note(format!(
            "wider here: {} matches names at any depth, in the kit one level only",
            super::document::shown(text)
        ));
    }
    Ok(())
}
