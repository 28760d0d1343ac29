//! Actions on credentials: names, states and grants, never values.

use std::collections::BTreeMap;
use std::sync::Arc;

use config::Secret;
use credentials::service::CredentialService;
use credentials::source;
use credentials::table::TableRow;
use credentials::values::ValueError;
use http::StatusCode;
use policy::audit::AuditEvent;
use policy::id::SandboxId;
use policy::registration::Registration;
use serde_json::{Value, json};
use store::registry::RegistryLookup;

use crate::body::GrantBody;
use crate::credential_grants::{check_names, unknown_row};
use crate::gate::Gate;
use crate::reply::{ControlError, ControlReply};
use crate::wall_now;

/// Every row, and which sandboxes may use it.
pub(crate) fn list(gate: &Gate) -> Result<ControlReply, ControlError> {
    let (snapshot, service) = (gate.policy.load(), gate.traffic.credentials());
    let registrations = gate.store.registry().list()?;
    let defaults = &snapshot.settings.credentials.default;
    let rows = snapshot.credentials.rows().iter().map(|row| {
        let has_grant = |registration: &&Arc<Registration>| {
            registration.is_live(wall_now()) && registration.credentials.contains(&row.name)
        };
        let granted = registrations.iter().filter(has_grant);
        let granted: Vec<&SandboxId> = granted.map(|registration| &registration.id).collect();
        describe(row, service, defaults.contains(&row.name), &granted)
    });
    Ok(ControlReply::ok(rows.collect()))
}

fn describe(
    row: &TableRow,
    service: &CredentialService,
    is_default: bool,
    granted: &[&SandboxId],
) -> Value {
    let sources = row.uses.iter().map(|one| {
        let variable = match &one.source {
            config::leaf::SecretSource::Env(name) => Some(name),
            config::leaf::SecretSource::File(_) | config::leaf::SecretSource::Command(_) => None,
        };
        json!({
            "source": source::describe(&one.source),
            "variable": variable,
            "header": one.header.as_str(),
            "placeholder_variables": one.variables,
        })
    });
    json!({
        "name": row.name,
        "hosts": row.hosts.iter().map(ToString::to_string).collect::<Vec<_>>(),
        "configured": service.values().is_configured(row),
        "default": is_default,
        "anonymous": row.anonymous,
        "sources": sources.collect::<Vec<_>>(),
        "granted_to": granted,
    })
}

/// Reads the value of a row, and reports whether that works.
pub(crate) async fn test(gate: &Gate, name: &str) -> Result<ControlReply, ControlError> {
    let snapshot = gate.policy.load();
    let row = snapshot
        .credentials
        .row(name)
        .ok_or_else(|| unknown_row(&snapshot.credentials, name))?;
    let lifetime = snapshot.settings.credentials.command_lifetime;
    let read = gate
        .traffic
        .credentials()
        .values()
        .read(row, lifetime)
        .await;
    let (status, detail) = match &read {
        Ok(value) => {
            let used = row.uses.get(value.use_index);
            (
                "ok",
                used.map(|one| source::describe(&one.source))
                    .unwrap_or_default(),
            )
        }
        Err(error @ ValueError::NotConfigured(_)) => ("missing", error.to_string()),
        Err(error @ ValueError::Source(_)) => ("failed", error.to_string()),
    };
    Ok(ControlReply::ok(
        json!({ "name": name, "status": status, "detail": detail }),
    ))
}

/// Keeps variables of the operator's environment that a row reads.
pub(crate) fn offer(gate: &Gate, variables: BTreeMap<String, String>) -> ControlReply {
    let snapshot = gate.policy.load();
    let is_read = |name: &String| {
        let mut uses = snapshot.credentials.rows().iter().flat_map(|row| &row.uses);
        uses.any(|one| one.source == config::leaf::SecretSource::Env(name.clone()))
    };
    let read = variables.into_iter().filter(|(name, _)| is_read(name));
    let read: Vec<(String, Secret)> = read
        .map(|(name, value)| (name, Secret::new(value)))
        .collect();
    let count = read.len();
    gate.traffic.credentials().values().offer_variables(read);
    ControlReply::ok(json!({ "accepted": count }))
}

/// Grants rows to a sandbox or container, or revokes them.
pub(crate) async fn change(
    gate: &Gate,
    id: SandboxId,
    body: GrantBody,
) -> Result<ControlReply, ControlError> {
    let _lock = gate.sandboxes.lock(&id).await;
    let snapshot = gate.policy.load();
    check_names(&snapshot.credentials, &body.grant)?;
    let row = match gate.store.registry().by_id(&id) {
        RegistryLookup::Found(row) if row.is_live(wall_now()) => row,
        RegistryLookup::Found(_) | RegistryLookup::Unknown => {
            return Err(ControlError::container_not_found());
        }
        RegistryLookup::Unavailable => {
            return Err(ControlError::Unavailable("Registry unavailable".to_owned()));
        }
    };
    let mut changed = Registration::clone(&row);
    changed
        .credentials
        .retain(|name| !body.revoke.contains(name));
    for name in body.grant {
        if !changed.credentials.contains(&name) {
            changed.credentials.push(name);
        }
    }
    let granted = changed.credentials.clone();
    if changed != *row {
        let event = AuditEvent {
            credential: Some(granted.join(",")),
            ..AuditEvent::lifecycle("credentials_changed", Some(id.clone()))
        };
        gate.store.register(changed, event, wall_now()).await?;
        tracing::info!(sandbox = %id, credentials = ?granted, "credentials changed");
    }
    let variables = variables(gate, &id, &granted);
    Ok(ControlReply::Json(
        StatusCode::OK,
        json!({ "container_id": id, "credentials": granted, "placeholders": variables }),
    ))
}

/// The variables with the placeholders of a sandbox.
pub(crate) fn variables(
    gate: &Gate,
    id: &SandboxId,
    granted: &[String],
) -> BTreeMap<String, String> {
    let snapshot = gate.policy.load();
    let service = gate.traffic.credentials();
    service.variables(id, &snapshot.credentials, granted)
}
