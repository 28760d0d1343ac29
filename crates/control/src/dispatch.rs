//! Dispatcher: runs each [`Action`] on the parts of the gate.

use std::sync::Arc;

use config::Settings;
use http::StatusCode;
use jiff::Timestamp;
use policy::audit::AuditEvent;
use policy::id::SandboxId;
use policy::registration::Registration;
use serde_json::{Value, json};
use store::error::StoreError;
use store::registry::RegistryLookup;
use tokio::sync::oneshot;

use crate::action::{Action, HealthDepth, ReplyMode};
use crate::body::CreateBody;
use crate::gate::Gate;
use crate::health::{HealthReport, HealthStatus};
use crate::registration_request::RegisterRequest;
use crate::reply::{ControlError, ControlReply};
use crate::{
    audit_actions, creation_stream, credential_actions, credential_grants, openapi, remote_backend,
    tools, traffic_actions, wall_now,
};

impl Gate {
    /// Runs one action.
    pub async fn dispatch(self: &Arc<Self>, action: Action) -> Result<ControlReply, ControlError> {
        let settings = self.policy.settings();
        if let Some((container, operation)) = remote_backend::operation_on(&action, &settings) {
            return remote_backend::run(container, operation, &self.store).await;
        }
        match action {
            Action::Health(depth) => Ok(self.health(depth).await),
            Action::Metrics => self.metrics_text(),
            Action::Describe => Ok(ControlReply::ok(openapi::document())),
            Action::ListRegistrations => self.list_registrations(),
            Action::GetRegistration(id) => self.get_registration(&id),
            Action::Register(request) => self.register(*request).await,
            Action::Unregister(id) => self.unregister(&id).await,
            Action::ListSandboxes(name) => self.list_sandboxes(name).await,
            Action::ShowSandbox(id) => self.sandboxes.show(id).await,
            Action::CreateSandbox(body, reply_mode) => self.create(*body, reply_mode).await,
            Action::DeleteSandbox(id, force) => {
                let sandboxes = &self.sandboxes;
                sandboxes.delete(&self.store, &settings, id, force).await
            }
            Action::PauseSandbox(id) => self.sandboxes.pause(&self.store, id).await,
            Action::ResumeSandbox(id) => self.sandboxes.resume(&self.store, id).await,
            Action::EnterSandbox(id, body) => {
                self.sandboxes.enter(&self.store, &settings, id, body).await
            }
            Action::SnapshotSandbox(id, body) => {
                let sandboxes = &self.sandboxes;
                sandboxes.snapshot(&self.store, &settings, id, body).await
            }
            Action::ListCheckpoints(id) => self.sandboxes.checkpoints(id).await,
            Action::MakeCheckpoint(id, body) => {
                self.sandboxes.checkpoint(&self.store, id, body).await
            }
            Action::RestoreCheckpoint(id, body) => {
                let sandboxes = &self.sandboxes;
                sandboxes.restore(&self.store, &settings, id, body).await
            }
            Action::ForkSandbox(id, body) => {
                self.sandboxes.fork(&self.store, &settings, id, body).await
            }
            Action::ListPorts(id) => self.sandboxes.ports(id).await,
            Action::PublishPort(id, body) => self.sandboxes.publish(id, body).await,
            Action::QueryAudit(wanted) => audit_actions::query(&self.store, wanted).await,
            Action::ExportAudit(wanted) => {
                let permit = self.streams.take()?;
                Ok(audit_actions::export(&self.store, wanted, permit).await)
            }
            Action::TailAudit(wanted) => {
                let permit = self.streams.take()?;
                Ok(audit_actions::tail(&self.store, wanted, &self.stop, permit))
            }
            Action::VerifyAudit => audit_actions::verify(&self.store).await,
            Action::ShowConfig => Ok(self.show_config()),
            Action::ReloadConfig => self.reload_config().await,
            Action::BackupRegistry(path) => {
                self.store.backup(path.clone(), wall_now()).await?;
                Ok(ControlReply::ok(
                    json!({ "status": "backed up", "path": path }),
                ))
            }
            Action::RestoreRegistry(path) => {
                self.store.restore(path.clone(), wall_now()).await?;
                Ok(ControlReply::ok(
                    json!({ "status": "restored", "path": path }),
                ))
            }
            Action::ResetRegistry => {
                self.store.reset(wall_now()).await?;
                Ok(ControlReply::ok(json!({ "status": "reset" })))
            }
            Action::ShowAuthority => Ok(traffic_actions::show_authority(&self.traffic)),
            Action::RotateAuthority => traffic_actions::rotate_authority(self).await,
            Action::ExplainRequest(id) => {
                traffic_actions::explain(&self.traffic, &self.store, id).await
            }
            Action::TryPolicy(body) => {
                traffic_actions::try_policy(&self.traffic, &self.store, body).await
            }
            Action::ListCredentials => credential_actions::list(self),
            Action::TestCredential(name) => credential_actions::test(self, &name).await,
            Action::OfferVariables(body) => Ok(credential_actions::offer(self, body.0)),
            Action::ChangeCredentials(id, body) => credential_actions::change(self, id, body).await,
            Action::ListTools => Ok(tools::list(&self.bridge)),
            Action::AcceptTools(body) => tools::accept(&self.bridge, &self.store, &body).await,
            Action::Shutdown => {
                tracing::info!("shutdown requested on the control socket");
                self.stop.cancel();
                Ok(ControlReply::Json(
                    StatusCode::ACCEPTED,
                    json!({ "status": "stopping" }),
                ))
            }
        }
    }

    /// The health report.
    pub async fn report(&self, depth: HealthDepth) -> HealthReport {
        let mut results = Vec::new();
        let mut registry = None;
        if depth == HealthDepth::Checked {
            let checks = self.traffic.listener_checks();
            let (read, listeners) = tokio::join!(self.store.check_registry(), checks.run());
            results = listeners;
            registry = Some(read.map_err(|error| error.to_string()));
        }
        let store = self.store.health();
        let error = || {
            store
                .error
                .clone()
                .unwrap_or_else(|| "not available".to_owned())
        };
        let check = |is_ok: bool| if is_ok { Ok(()) } else { Err(error()) };
        let registry = registry.unwrap_or_else(|| check(store.registry_accessible));
        results.extend([
            ("registry_accessible", registry),
            ("audit_writing", check(store.audit_writing)),
            ("audit_rotating", check(store.audit_rotating)),
            ("jsonl_writing", check(store.jsonl_writing)),
        ]);
        self.health_registry.report(results)
    }

    async fn health(&self, depth: HealthDepth) -> ControlReply {
        let report = self.report(depth).await;
        let status = match report.status {
            HealthStatus::Healthy => StatusCode::OK,
            HealthStatus::Degraded => StatusCode::SERVICE_UNAVAILABLE,
        };
        ControlReply::Json(status, json!(report))
    }

    fn metrics_text(&self) -> Result<ControlReply, ControlError> {
        let mut text = String::new();
        prometheus_client::encoding::text::encode(&mut text, &self.metrics)
            .map_err(|error| ControlError::Unavailable(error.to_string()))?;
        Ok(ControlReply::Text(
            "application/openmetrics-text; version=1.0.0; charset=utf-8",
            text,
        ))
    }

    fn list_registrations(&self) -> Result<ControlReply, ControlError> {
        let rows = self.store.registry().list()?;
        let now = wall_now();
        let live = rows
            .iter()
            .filter(|row| row.is_live(now))
            .map(|row| describe(row));
        Ok(ControlReply::ok(live.collect()))
    }

    fn get_registration(&self, id: &SandboxId) -> Result<ControlReply, ControlError> {
        match self.store.registry().by_id(id) {
            RegistryLookup::Found(row) if row.is_live(wall_now()) => {
                Ok(ControlReply::ok(describe(&row)))
            }
            RegistryLookup::Found(_) | RegistryLookup::Unknown => {
                Err(ControlError::container_not_found())
            }
            RegistryLookup::Unavailable => {
                Err(ControlError::Unavailable("Registry unavailable".to_owned()))
            }
        }
    }

    async fn register(&self, request: RegisterRequest) -> Result<ControlReply, ControlError> {
        let RegisterRequest {
            mut row,
            credentials,
            replace,
            warnings,
        } = request;
        let settings = self.policy.settings();
        let service = self.traffic.credentials();
        row.credentials = credential_grants::initial_grants(&settings, service, credentials)?;
        let placeholders = credential_actions::variables(self, &row.id, &row.credentials);
        let event = AuditEvent::lifecycle("registered", Some(row.id.clone()));
        let (id, shown) = (row.id.clone(), describe(&row));
        let done = if replace {
            self.store
                .register_replacing(row, event, wall_now())
                .await?
        } else {
            self.store.register(row, event, wall_now()).await?
        };
        tracing::info!(sandbox = %id, "container registered");
        for warning in &warnings {
            tracing::warn!(sandbox = %id, warning, "container registered with a warning");
        }
        let mut answer = json!({ "status": "registered", "container_id": id, "container": shown });
        let mut add = |key: &str, value: Value| {
            if let Some(answer) = answer.as_object_mut() {
                answer.insert(key.to_owned(), value);
            }
        };
        if let Some(old) = done.removed_holder {
            // The connections of the replaced container end as well: the address belongs to
            // another container now.
            self.traffic.remove_sandbox(&old);
            tracing::info!(sandbox = %old, by = %id, "registration replaced");
            add("replaced", json!(old));
        }
        if !placeholders.is_empty() {
            add("placeholders", json!(placeholders));
        }
        if !warnings.is_empty() {
            add("warnings", json!(warnings));
        }
        Ok(ControlReply::Json(StatusCode::CREATED, answer))
    }

    async fn unregister(&self, id: &SandboxId) -> Result<ControlReply, ControlError> {
        let event = AuditEvent::lifecycle("unregistered", Some(id.clone()));
        let ended = self.store.unregister(id, event, wall_now()).await;
        ended.map_err(|error| match error {
            StoreError::NotFound { .. } => ControlError::container_not_found(),
            other => other.into(),
        })?;
        // Requests in flight of the sandbox end as well.
        self.traffic.remove_sandbox(id);
        tracing::info!(sandbox = %id, "container unregistered");
        Ok(ControlReply::ok(
            json!({ "status": "unregistered", "container_id": id }),
        ))
    }

    async fn list_sandboxes(&self, name: Option<String>) -> Result<ControlReply, ControlError> {
        let settings = self.policy.settings();
        // Both lists are read concurrently: a container that does not answer takes its whole
        // timeout.
        let containers = remote_backend::list(&settings, name.as_deref());
        let (mut all, containers) = tokio::join!(self.sandboxes.list(name.clone()), containers);
        if let Ok(ControlReply::Json(_, Value::Array(rows))) = &mut all {
            rows.extend(containers);
        }
        all
    }

    async fn create(
        self: &Arc<Self>,
        body: CreateBody,
        reply_mode: ReplyMode,
    ) -> Result<ControlReply, ControlError> {
        // If no permit for a stream is free, the reply is not streamed.
        if reply_mode == ReplyMode::Stream
            && let Ok(permit) = self.streams.take()
        {
            return Ok(creation_stream::create(Arc::clone(self), body, permit));
        }
        let settings = self.policy.settings();
        let sandboxes = &self.sandboxes;
        sandboxes
            .create(&self.store, &settings, body, Arc::default())
            .await
    }

    fn show_config(&self) -> ControlReply {
        let settings = self.policy.settings();
        ControlReply::ok(json!({
            "values": describe_settings(&settings),
            "warnings": settings.warnings.iter().map(ToString::to_string).collect::<Vec<_>>(),
        }))
    }

    async fn reload_config(&self) -> Result<ControlReply, ControlError> {
        let unavailable = || {
            ControlError::Unavailable(
                "cannot reload: the reload task of the gate is not running; see: palisade gate logs"
                    .to_owned(),
            )
        };
        let (answer, answered) = oneshot::channel();
        self.reload.send(answer).await.map_err(|_| unavailable())?;
        match answered.await.map_err(|_| unavailable())? {
            Ok(changed) => Ok(ControlReply::ok(
                json!({ "status": "reloaded", "changed": changed }),
            )),
            Err(problems) => Err(ControlError::Config(problems)),
        }
    }
}

/// Every setting as JSON: pointer, value (never a secret's), origin.
pub fn describe_settings(settings: &Settings) -> Value {
    let shown = config::show(settings).into_iter().map(|line| {
        let origin = line.origin.to_string();
        json!({ "pointer": line.pointer, "value": line.value, "origin": origin })
    });
    Value::Array(shown.collect())
}

/// A registration as JSON.
pub fn describe(row: &Registration) -> Value {
    let time = |at: policy::clock::UnixMillis| {
        Timestamp::from_millisecond(at.get())
            .map_or_else(|_| at.get().to_string(), |t| t.to_string())
    };
    json!({
        "container_id": row.id,
        "container_ip": row.ip,
        "repos": row.repos,
        "auth_mode": row.auth_mode,
        "credentials": row.credentials,
        "created_at": time(row.created),
        "expires_at": time(row.expires),
        "metadata": row.metadata,
    })
}
