//! What an operator asks about the traffic: who signs, why not, and what if.

use std::sync::Arc;

use egress::authority::Authority;
use egress::services::Services;
use egress::trial::{self, Question};
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
use crate::reply::{ControlError, Reply};
use crate::wall_now;

/// The authority, without its key.
pub(crate) fn show_authority(traffic: &Services) -> Reply {
    Reply::ok(describe(&traffic.authority().load()))
}

/// Puts a new root in force.
pub(crate) async fn rotate_authority(gate: &Gate) -> Result<Reply, ControlError> {
    let _turn = gate.sandboxes.take_root_turn().await;
    let made = replace_root(gate, wall_now()).await?;
    Ok(Reply::ok(describe(&made)))
}

/// Puts a new root in force if the one in use is near its end, and ensures that every running
/// sandbox trusts the one in use. Whether there is a new one.
pub async fn renew_authority(gate: &Gate, now: UnixMillis) -> Result<bool, ControlError> {
    let _turn = gate.sandboxes.take_root_turn().await;
    let current = gate.traffic.authority().load_full();
    if !current.time_to_renewal(now).is_zero() {
        if current.bridges(now) > 0 {
            gate.sandboxes.add_trust_to_all(&trust_in(&current)).await;
        }
        return Ok(false);
    }
    replace_root(gate, now).await?;
    Ok(true)
}

async fn replace_root(gate: &Gate, now: UnixMillis) -> Result<Arc<Authority>, ControlError> {
    let dir = gate.state_dir.clone();
    let made = tokio::task::spawn_blocking(move || Authority::rotate(&dir, now)).await;
    let made = made
        .map_err(|error| ControlError::Failed(error.to_string()))?
        .map_err(|error| ControlError::Failed(error.to_string()))?;
    let trust = trust_in(&made);
    let made = Arc::new(made);
    // Before anything is signed with it: a program that looks for a root in vain may remember
    // that. A sandbox that cannot be told finds its way from the old root, which signed this one.
    gate.sandboxes.add_trust_to_all(&trust).await;
    gate.traffic.authority().store(Arc::clone(&made));
    // Once more, for those that were being made meanwhile.
    gate.sandboxes.add_trust_to_all(&trust).await;
    tracing::info!(root = made.name(), expires = ?time(made.expires()), "root certificate replaced");
    Ok(made)
}

/// What programs in a sandbox have to trust.
pub fn trust_in(authority: &Authority) -> Trust {
    Trust {
        root: authority.root_pem().to_owned(),
        hash: authority.subject_hash(),
    }
}

fn describe(authority: &Authority) -> Value {
    json!({
        "name": authority.name(),
        "expires_at": time(authority.expires()),
        "older_roots_that_lead_here": authority.bridges(wall_now()),
        "certificate": authority.root_pem(),
    })
}

fn time(at: UnixMillis) -> Option<String> {
    let at = Timestamp::from_millisecond(at.get()).ok()?;
    Some(at.to_string())
}

/// Everything that is known about a request: what was decided, and what was told to whom.
pub(crate) async fn explain(
    traffic: &Services,
    store: &Store,
    id: RequestId,
) -> Result<Reply, ControlError> {
    let filter = AuditFilter {
        request_id: Some(id),
        limit: Some(1),
        ..AuditFilter::default()
    };
    // What was decided a moment ago is on its way there.
    store.audit().flush().await?;
    let record = store.audit().query(filter).await?.into_iter().next();
    let recent = traffic.explain(id);
    if record.is_none() && recent.is_none() {
        return Err(ControlError::NotFound(format!(
            "No request {id} is known. Ids are in the refusal's JSON, in its header \
             x-palisade-request-id, and in 'palisade audit'."
        )));
    }
    let mut answer = json!({ "request_id": id });
    let mut say = |key: &str, value: Value| {
        if let (Some(answer), false) = (answer.as_object_mut(), value.is_null()) {
            answer.insert(key.to_owned(), value);
        }
    };
    if let Some(record) = &record {
        let event = &record.event;
        say("sandbox", json!(event.sandbox));
        say("at", json!(time(record.ts)));
        say("verdict", json!(event.verdict));
        say("method", json!(event.method));
        say("host", json!(event.host));
        say("port", json!(event.port));
        say("path", json!(event.path));
        say("status", json!(event.status));
        say("stage", json!(event.stage));
        say("reason", json!(event.reason));
        say(
            "says",
            json!(event.reason.map(policy::reason::Reason::says)),
        );
        say("rule", json!(event.rule));
        say("bytes_in", json!(event.bytes_in));
        say("bytes_out", json!(event.bytes_out));
        say("ms", json!(event.ms));
        say("alike", json!(event.count));
        say("seq", json!(record.seq));
    }
    if let Some((sandbox, one)) = &recent {
        say("sandbox", json!(sandbox));
        say("verdict", json!(one.verdict));
        say("reason", json!(one.reason));
        say("says", json!(one.reason.says()));
        say("rule", json!(one.rule));
        say("stage", json!(one.stage.as_str()));
        say("method", json!(one.method));
        say("host", json!(one.host));
        say("path", json!(one.path));
        say("told", json!(one.message));
        say("evidence", json!(one.evidence));
    }
    Ok(Reply::ok(answer))
}

/// What would become of a request.
pub(crate) async fn try_policy(
    traffic: &Services,
    store: &Store,
    body: TryBody,
) -> Result<Reply, ControlError> {
    let registration = match &body.sandbox {
        None => None,
        Some(id) => match store.registry().by_id(id) {
            RegistryLookup::Found(row) => Some(row),
            RegistryLookup::Unavailable | RegistryLookup::Unknown => {
                let message = format!("No sandbox or container '{id}' is registered");
                return Err(ControlError::NotFound(message));
            }
        },
    };
    let unnamed =
        || SandboxId::parse("nobody").map_err(|error| ControlError::Bad(error.to_string()));
    let question = Question {
        sandbox: body.sandbox.map_or_else(unnamed, Ok)?,
        method: body.method,
        url: body.url,
        program: body.program,
        registration,
    };
    let sandboxes = traffic.known();
    let asked_by = sandboxes
        .iter()
        .find(|known| *known.id() == question.sandbox);
    let snapshot = traffic.snapshot_for(asked_by.map(AsRef::as_ref));
    let trial = trial::judge(&snapshot, &question).await;
    let mut answer = json!({
        "method": question.method,
        "host": trial.host.map(|host| host.to_string()),
        "port": trial.port,
        "path": trial.path,
        "unread": trial.unread,
    });
    let said = match &trial.verdict {
        Ok(rule) => json!({ "verdict": "allow", "rule": rule }),
        Err(denial) => json!({
            "verdict": "deny",
            "reason": denial.reason,
            "rule": denial.rule,
            "error": denial.message,
            "evidence": denial.evidence,
        }),
    };
    if let (Some(answer), Value::Object(said)) = (answer.as_object_mut(), said) {
        answer.extend(said);
    }
    Ok(Reply::ok(answer))
}
