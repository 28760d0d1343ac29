//! Actions on traffic: the certificate authority, explanations of requests, trial decisions.

use std::sync::Arc;

use egress::authority::CertificateAuthority;
use egress::services::Services;
use egress::trial::{self, TrialRequest};
use jiff::Timestamp;
use policy::clock::UnixMillis;
use policy::id::{RequestId, SandboxId};
use sandbox::contract::Trust;
use serde_json::{Value, json};
use store::Store;
use store::audit::query::AuditFilter;
use store::registry::RegistryLookup;

use crate::body::TryBody;
use crate::gate::Gate;
use crate::reply::{ControlError, ControlReply};
use crate::wall_now;

/// The authority, without its key.
pub(crate) fn show_authority(traffic: &Services) -> ControlReply {
    ControlReply::ok(describe(&traffic.authority().load()))
}

/// Replaces the root.
pub(crate) async fn rotate_authority(gate: &Gate) -> Result<ControlReply, ControlError> {
    let _lock = gate.sandboxes.lock_root().await;
    let authority = replace_root(gate, wall_now()).await?;
    Ok(ControlReply::ok(describe(&authority)))
}

/// Replaces the root if it is close to its expiry, and ensures that every running sandbox
/// trusts the current refusal. Returns whether the root was replaced.
pub async fn renew_authority(gate: &Gate, now: UnixMillis) -> Result<bool, ControlError> {
    let _lock = gate.sandboxes.lock_root().await;
    let current = gate.traffic.authority().load_full();
    if !current.time_to_renewal(now).is_zero() {
        if current.cross_signed_count(now) > 0 {
            gate.sandboxes
                .add_trust_to_all(&trusted_root(&current))
                .await;
        }
        return Ok(false);
    }
    replace_root(gate, now).await?;
    Ok(true)
}

async fn replace_root(
    gate: &Gate,
    now: UnixMillis,
) -> Result<Arc<CertificateAuthority>, ControlError> {
    let dir = gate.state_dir.clone();
    let authority =
        tokio::task::spawn_blocking(move || CertificateAuthority::rotate(&dir, now)).await;
    let authority = authority
        .map_err(|error| ControlError::Failed(error.to_string()))?
        .map_err(|error| ControlError::Failed(error.to_string()))?;
    let trust = trusted_root(&authority);
    let authority = Arc::new(authority);
    // Sandboxes receive the new root before it signs anything: a program may cache that a root is
    // unknown. A sandbox that cannot be updated trusts the new root through the old root, which
    // cross-signs it.
    gate.sandboxes.add_trust_to_all(&trust).await;
    gate.traffic.authority().store(Arc::clone(&authority));
    // Sandboxes that were created meanwhile receive the new root now.
    gate.sandboxes.add_trust_to_all(&trust).await;
    tracing::info!(root = authority.name(), expires = ?time(authority.expires()), "root certificate replaced");
    Ok(authority)
}

/// The root certificate that programs in a sandbox must trust.
pub fn trusted_root(authority: &CertificateAuthority) -> Trust {
    Trust {
        root: authority.root_pem().to_owned(),
        hash: authority.subject_hash(),
    }
}

fn describe(authority: &CertificateAuthority) -> Value {
    json!({
        "name": authority.name(),
        "expires_at": time(authority.expires()),
        "older_roots_that_lead_here": authority.cross_signed_count(wall_now()),
        "certificate": authority.root_pem(),
    })
}

fn time(at: UnixMillis) -> Option<String> {
    let at = Timestamp::from_millisecond(at.get()).ok()?;
    Some(at.to_string())
}

/// Everything known about a request: its audit record, and the refusal if it is recent.
pub(crate) async fn explain(
    traffic: &Services,
    store: &Store,
    id: RequestId,
) -> Result<ControlReply, ControlError> {
    let filter = AuditFilter {
        request_id: Some(id),
        limit: Some(1),
        ..AuditFilter::default()
    };
    // Records of recent decisions may not be written yet.
    store.audit().flush().await?;
    let record = store.audit().query(filter).await?.into_iter().next();
    let recent = traffic.explain(id);
    if record.is_none() && recent.is_none() {
        return Err(ControlError::NotFound(format!(
            "no request with id {id}. A refusal has its id in the JSON body (request_id) and in \
             the header x-palisade-request-id; to list ids: palisade audit list"
        )));
    }
    let mut answer = json!({ "request_id": id });
    let mut add = |key: &str, value: Value| {
        if let (Some(answer), false) = (answer.as_object_mut(), value.is_null()) {
            answer.insert(key.to_owned(), value);
        }
    };
    if let Some(record) = &record {
        let event = &record.event;
        add("sandbox", json!(event.sandbox));
        add("at", json!(time(record.ts)));
        add("verdict", json!(event.verdict));
        add("method", json!(event.method));
        add("host", json!(event.host));
        add("port", json!(event.port));
        add("path", json!(event.path));
        add("status", json!(event.status));
        add("stage", json!(event.stage));
        add("reason", json!(event.reason));
        add(
            "says",
            json!(event.reason.map(policy::reason::Reason::description)),
        );
        add("rule", json!(event.rule));
        add("bytes_in", json!(event.bytes_in));
        add("bytes_out", json!(event.bytes_out));
        add("ms", json!(event.ms));
        add("alike", json!(event.count));
        add("seq", json!(record.seq));
    }
    if let Some((sandbox, refusal)) = &recent {
        add("sandbox", json!(sandbox));
        add("verdict", json!(refusal.verdict));
        add("reason", json!(refusal.reason));
        add("says", json!(refusal.reason.description()));
        add("rule", json!(refusal.rule));
        add("stage", json!(refusal.stage.as_str()));
        add("method", json!(refusal.method));
        add("host", json!(refusal.host));
        add("path", json!(refusal.path));
        add("told", json!(refusal.message));
        add("evidence", json!(refusal.evidence));
    }
    Ok(ControlReply::ok(answer))
}

/// The decision about a request, without sending it.
pub(crate) async fn try_policy(
    traffic: &Services,
    store: &Store,
    body: TryBody,
) -> Result<ControlReply, ControlError> {
    let registration = match &body.sandbox {
        None => None,
        Some(id) => match store.registry().by_id(id) {
            RegistryLookup::Found(row) => Some(row),
            RegistryLookup::Unavailable | RegistryLookup::Unknown => {
                let message = format!(
                    "no sandbox or container '{id}' is registered; to list them: palisade registry \
                     list"
                );
                return Err(ControlError::NotFound(message));
            }
        },
    };
    let placeholder_id =
        || SandboxId::parse("nobody").map_err(|error| ControlError::Bad(error.to_string()));
    let trial_request = TrialRequest {
        sandbox: body.sandbox.map_or_else(placeholder_id, Ok)?,
        method: body.method,
        url: body.url,
        program: body.program,
        registration,
    };
    let sandboxes = traffic.sandboxes_with_state();
    let sandbox = sandboxes
        .iter()
        .find(|known| *known.id() == trial_request.sandbox);
    let snapshot = traffic.snapshot_for(sandbox.map(AsRef::as_ref));
    let trial = trial::decide_trial(&snapshot, &trial_request).await;
    let mut answer = json!({
        "method": trial_request.method,
        "host": trial.host.map(|host| host.to_string()),
        "port": trial.port,
        "path": trial.path,
        "unread": trial.unread,
    });
    let verdict = match &trial.verdict {
        Ok(rule) => json!({ "verdict": "allow", "rule": rule }),
        Err(denial) => json!({
            "verdict": "deny",
            "reason": denial.reason,
            "rule": denial.rule,
            "error": denial.message,
            "evidence": denial.evidence,
        }),
    };
    if let (Some(answer), Value::Object(verdict)) = (answer.as_object_mut(), verdict) {
        answer.extend(verdict);
    }
    Ok(ControlReply::ok(answer))
}
