//! OpenAPI document of the control API, generated from one table of routes.
//!
//! The table also distinguishes 404 from 405. Tests check that each route parses to the action
//! that the table names, and that docs/openapi.json is up to date.

use schemars::{JsonSchema, Schema, SchemaGenerator};
use serde_json::{Map, Value, json};

use crate::action::{AcceptBody, FileBody};
use crate::body::{
    CreateBody, ForkBody, GrantBody, LabelBody, PortBody, RestoreBody, SessionBody, SnapshotBody,
    TryBody, VariablesBody,
};
use crate::health::HealthReport;
use crate::registration_request::{UnknownFields, repo_schema};

/// One route of the control API.
#[derive(Clone, Copy, Debug)]
pub struct ApiRoute {
    /// The method.
    pub method: &'static str,
    /// The path, with `{id}` for a segment that varies.
    pub path: &'static str,
    /// The action that the route parses to.
    pub action: &'static str,
    /// What the route does.
    pub summary: &'static str,
    /// Content of the request.
    pub request: RequestContent,
    /// Content of the response on success.
    pub response: ResponseContent,
    /// The success status.
    pub status: u16,
    /// The error statuses that a client should expect, beside 403 for another user.
    pub error_statuses: &'static [u16],
}

/// Content of a route's request.
#[derive(Clone, Copy, Debug)]
pub enum RequestContent {
    /// Nothing.
    Nothing,
    /// A registration, in either format.
    Registration,
    /// A registration that may have unknown fields.
    Container,
    /// Query parameter: whether a health report runs its checks.
    HealthDepth,
    /// A file's path.
    File,
    /// Query parameters that choose audit records.
    AuditQuery,
    /// Query parameter: whether to force the operation.
    Force,
    /// Query parameter: the name or id of sandboxes.
    Named,
    /// A [`CreateBody`].
    CreateSandbox,
    /// A [`SessionBody`].
    Session,
    /// A [`SnapshotBody`].
    Snapshot,
    /// A port to publish.
    Port,
    /// A checkpoint's label.
    Label,
    /// A [`RestoreBody`].
    Restore,
    /// A fork's name.
    Fork,
    /// A [`TryBody`].
    Try,
    /// An [`AcceptBody`].
    Accept,
    /// A [`GrantBody`].
    Grant,
    /// A [`VariablesBody`].
    Variables,
}

/// Content of a route's response.
#[derive(Clone, Copy, Debug)]
pub enum ResponseContent {
    /// A JSON object.
    Object,
    /// A list of JSON objects.
    Objects,
    /// A list of registrations.
    Rows,
    /// A sandbox.
    Sandbox,
    /// A list of sandboxes.
    Sandboxes,
    /// A health report.
    Health,
    /// Text.
    Text,
    /// JSON lines.
    Lines,
}

impl ApiRoute {
    /// Whether a decoded path matches this route.
    pub(crate) fn matches(&self, path: &[&str]) -> bool {
        let templates: Vec<&str> = self.path.split('/').skip(1).collect();
        templates.len() == path.len()
            && templates
                .iter()
                .zip(path)
                .all(|(template, segment)| template.starts_with('{') || template == segment)
    }
}

macro_rules! routes {
    ($($method:ident $path:literal $action:literal $request:ident $response:ident $status:literal $error_statuses:expr, $summary:literal;)*) => {
        /// Every route.
        pub const ROUTES: &[ApiRoute] = &[$(ApiRoute {
            method: stringify!($method),
            path: $path,
            action: $action,
            summary: $summary,
            request: RequestContent::$request,
            response: ResponseContent::$response,
            status: $status,
            error_statuses: &$error_statuses,
        },)*];
    };
}

routes! {
    GET "/v1/health" "health" HealthDepth Health 200 [400, 503], "Health of every part of the gate; reads the registry and connects to the listeners, unless checks=false";
    GET "/v1/metrics" "metrics" Nothing Text 200 [], "Metrics, as Prometheus text";
    GET "/v1/openapi.json" "describe" Nothing Object 200 [], "This document";
    GET "/v1/registrations" "registrations.list" Nothing Rows 200 [503], "Every registration";
    POST "/v1/registrations" "registrations.put" Registration Object 201 [400, 409, 413, 429, 503], "Adds or replaces a registration; written durably before the response";
    GET "/v1/registrations/{id}" "registrations.get" Nothing Object 200 [404, 503], "One registration";
    DELETE "/v1/registrations/{id}" "registrations.delete" Nothing Object 200 [404, 429, 503], "Ends a registration";
    GET "/v1/audit" "audit.query" AuditQuery Object 200 [400, 503], "Audit records";
    GET "/v1/audit/export" "audit.export" AuditQuery Lines 200 [400, 503], "Audit records as a stream of lines";
    GET "/v1/audit/tail" "audit.tail" AuditQuery Lines 200 [400, 503], "New audit records as they are written, until the client disconnects";
    POST "/v1/audit/verify" "audit.verify" Nothing Object 200 [503], "Verifies the audit chains";
    GET "/v1/sandboxes" "sandboxes.list" Named Sandboxes 200 [400], "Sandboxes and their status: all of them, or those with a given name or id";
    POST "/v1/sandboxes" "sandboxes.create" CreateSandbox Sandbox 201 [400, 409, 413, 500, 503], "Creates a sandbox with its branch and workspace. With Accept: application/x-ndjson, the response is a stream of progress lines; the last line is {done} or {failed}";
    GET "/v1/sandboxes/{id}" "sandboxes.show" Nothing Sandbox 200 [404], "One sandbox";
    DELETE "/v1/sandboxes/{id}" "sandboxes.delete" Force Object 200 [404, 409], "Deletes a sandbox with its files and branch";
    POST "/v1/sandboxes/{id}/pause" "sandboxes.pause" Nothing Sandbox 200 [404, 409, 503], "Suspends all processes of a sandbox";
    POST "/v1/sandboxes/{id}/resume" "sandboxes.resume" Nothing Sandbox 200 [404, 409, 503], "Resumes all processes of a sandbox";
    POST "/v1/sandboxes/{id}/session" "sandboxes.enter" Session Object 200 [404, 409, 503], "Opens an operator's session in a sandbox and records it in the audit log";
    POST "/v1/sandboxes/{id}/snapshot" "sandboxes.snapshot" Snapshot Object 200 [404, 409, 422, 500], "Commits the workspace to the sandbox's branch";
    GET "/v1/sandboxes/{id}/checkpoints" "checkpoints.list" Nothing Object 200 [404, 409], "The checkpoints of a sandbox, oldest first";
    POST "/v1/sandboxes/{id}/checkpoints" "checkpoints.make" Label Object 201 [400, 404, 409, 500], "Saves the files of a sandbox under a label";
    POST "/v1/sandboxes/{id}/restore" "checkpoints.restore" Restore Sandbox 200 [400, 404, 409, 500], "Commits a snapshot, restores the files of a checkpoint and restarts the sandbox";
    POST "/v1/sandboxes/{id}/fork" "sandboxes.fork" Fork Sandbox 201 [400, 404, 409, 500], "Creates a sandbox with the files and the branch of another";
    GET "/v1/sandboxes/{id}/ports" "ports.list" Nothing Object 200 [404, 503], "The ports of a sandbox: open in the sandbox, and published on the host";
    POST "/v1/sandboxes/{id}/ports" "ports.publish" Port Object 200 [400, 404, 409], "Publishes a port on the host's loopback, or unpublishes it";
    GET "/v1/config" "config.show" Nothing Object 200 [], "The settings in force and the origin of each";
    POST "/v1/config/reload" "config.reload" Nothing Object 200 [422, 503], "Reloads the configuration files";
    POST "/v1/registry/backup" "registry.backup" File Object 200 [400, 409, 503], "Copies the database to a new file";
    POST "/v1/registry/restore" "registry.restore" File Object 200 [400, 503], "Replaces the database by a backup";
    POST "/v1/registry/reset" "registry.reset" Nothing Object 200 [503], "Replaces the database by an empty database; the old file is kept beside it";
    GET "/v1/ca" "ca.show" Nothing Object 200 [], "The root that sandboxes trust, without its key";
    POST "/v1/ca/rotate" "ca.rotate" Nothing Object 200 [500], "Replaces the root; older roots cross-sign it until they expire";
    GET "/v1/requests/{request}" "requests.explain" Nothing Object 200 [400, 404, 503], "Why a request was refused, or how it ended";
    POST "/v1/policy/try" "policy.try" Try Object 200 [400, 404], "The decision about a request, without sending it";
    GET "/v1/credentials" "credentials.list" Nothing Objects 200 [503], "Every credential with its hosts, its sources and the sandboxes that may use it; never a value";
    POST "/v1/credentials/variables" "credentials.variables" Variables Object 200 [400, 413], "Passes on variables of the operator's environment, which win over those of the gate's own";
    POST "/v1/credentials/{name}/test" "credentials.test" Nothing Object 200 [400], "Reads the value of a credential and reports whether that works";
    POST "/v1/registrations/{id}/credentials" "credentials.change" Grant Object 200 [400, 404, 503], "Grants credentials to a sandbox or container, or revokes them; returns the placeholders";
    GET "/v1/tools" "tools.list" Nothing Objects 200 [], "The servers behind the bridge, with the tools that each has listed";
    POST "/v1/tools/accept" "tools.accept" Accept Object 200 [400, 404], "Trusts changed definitions of tools";
    POST "/v1/shutdown" "shutdown" Nothing Object 202 [], "Stops the gate";
    POST "/internal/containers" "registrations.put" Container Object 201 [400, 409, 413, 429, 503], "As /v1/registrations, for existing programs; unknown fields are ignored with a warning in the response";
    GET "/internal/containers" "registrations.list" Nothing Object 200 [503], "As /v1/registrations, in an envelope";
    GET "/internal/containers/{id}" "registrations.get" Nothing Object 200 [404, 503], "As /v1/registrations/{id}, in an envelope";
    DELETE "/internal/containers/{id}" "registrations.delete" Nothing Object 200 [404, 429, 503], "As /v1/registrations/{id}";
    GET "/internal/health" "health" HealthDepth Health 200 [400, 503], "As /v1/health";
    GET "/internal/metrics" "metrics" Nothing Text 200 [], "As /v1/metrics";
}

/// The OpenAPI document.
pub fn document() -> Value {
    let mut paths: Map<String, Value> = Map::new();
    for route in ROUTES {
        let entry = paths.entry(route.path).or_insert_with(|| json!({}));
        if let Some(methods) = entry.as_object_mut() {
            methods.insert(route.method.to_ascii_lowercase(), operation(route));
        }
    }
    json!({
        "openapi": "3.1.0",
        "info": {
            "title": "Palisade control socket",
            "version": "1",
            "description": "The control API of a gate, over HTTP on its Unix socket. \
                            Only the user who runs the gate has access.",
            "license": { "name": "Apache-2.0", "identifier": "Apache-2.0" },
        },
        "paths": paths,
        "components": { "schemas": {
            "Error": {
                "type": "object",
                "required": ["error", "code"],
                "properties": {
                    "error": { "type": "string", "description": "What failed, and what helps" },
                    "code": { "type": "string", "description": "A stable error code for programs" },
                },
            },
            "FileBody": schema_of::<FileBody>(),
            "CreateBody": schema_of::<CreateBody>(),
            "ForkBody": schema_of::<ForkBody>(),
            "LabelBody": schema_of::<LabelBody>(),
            "PortBody": schema_of::<PortBody>(),
            "RestoreBody": schema_of::<RestoreBody>(),
            "SessionBody": schema_of::<SessionBody>(),
            "SnapshotBody": schema_of::<SnapshotBody>(),
            "TryBody": schema_of::<TryBody>(),
            "AcceptBody": schema_of::<AcceptBody>(),
            "GrantBody": schema_of::<GrantBody>(),
            "VariablesBody": schema_of::<VariablesBody>(),
            "Sandbox": sandbox_schema(),
            "HealthReport": schema_of::<HealthReport>(),
            "Container": registration_schema(UnknownFields::Ignore),
            "Registration": registration_schema(UnknownFields::Refuse),
            "Row": row_schema(),
        }},
    })
}

fn operation(route: &ApiRoute) -> Value {
    let method = route.method.to_ascii_lowercase();
    let mut operation = Map::new();
    operation.insert(
        "operationId".into(),
        json!(format!("{method} {}", route.path)),
    );
    operation.insert("x-action".into(), json!(route.action));
    operation.insert("summary".into(), json!(route.summary));
    let parameters = parameters(route);
    if !parameters.is_empty() {
        operation.insert("parameters".into(), Value::Array(parameters));
    }
    let body = match route.request {
        RequestContent::Nothing
        | RequestContent::AuditQuery
        | RequestContent::Force
        | RequestContent::HealthDepth
        | RequestContent::Named => None,
        RequestContent::CreateSandbox => Some("CreateBody"),
        RequestContent::Session => Some("SessionBody"),
        RequestContent::Snapshot => Some("SnapshotBody"),
        RequestContent::Port => Some("PortBody"),
        RequestContent::Label => Some("LabelBody"),
        RequestContent::Restore => Some("RestoreBody"),
        RequestContent::Fork => Some("ForkBody"),
        RequestContent::Try => Some("TryBody"),
        RequestContent::Accept => Some("AcceptBody"),
        RequestContent::Grant => Some("GrantBody"),
        RequestContent::Variables => Some("VariablesBody"),
        RequestContent::Registration => Some("Registration"),
        RequestContent::Container => Some("Container"),
        RequestContent::File => Some("FileBody"),
    };
    if let Some(name) = body {
        let content = json!({ "application/json": { "schema": reference(name) } });
        operation.insert(
            "requestBody".into(),
            json!({ "required": true, "content": content }),
        );
    }
    operation.insert("responses".into(), responses(route));
    Value::Object(operation)
}

fn parameters(route: &ApiRoute) -> Vec<Value> {
    let mut parameters = Vec::new();
    for name in ["id", "request"] {
        if !route.path.contains(&format!("{{{name}}}")) {
            continue;
        }
        parameters.push(json!({
            "name": name, "in": "path", "required": true, "schema": { "type": "string" },
        }));
    }
    if let RequestContent::Force = route.request {
        parameters.push(json!({ "name": "force", "in": "query", "schema": { "type": "boolean" } }));
    }
    if let RequestContent::HealthDepth = route.request {
        let schema = json!({ "type": "boolean", "default": true });
        parameters.push(json!({ "name": "checks", "in": "query", "schema": schema }));
    }
    if let RequestContent::Named = route.request {
        parameters.push(json!({ "name": "name", "in": "query", "schema": { "type": "string" } }));
    }
    if let RequestContent::AuditQuery = route.request {
        for (name, kind) in [
            ("sandbox", "string"),
            ("kind", "string"),
            ("verdict", "string"),
            ("reason", "string"),
            ("request_id", "string"),
            ("since", "integer"),
            ("until", "integer"),
            ("after", "integer"),
            ("limit", "integer"),
            ("newest_first", "boolean"),
        ] {
            parameters.push(json!({ "name": name, "in": "query", "schema": { "type": kind } }));
        }
    }
    parameters
}

fn responses(route: &ApiRoute) -> Value {
    let (media, schema) = match route.response {
        ResponseContent::Object => ("application/json", json!({ "type": "object" })),
        ResponseContent::Objects => (
            "application/json",
            json!({ "type": "array", "items": { "type": "object" } }),
        ),
        ResponseContent::Rows => (
            "application/json",
            json!({ "type": "array", "items": reference("Row") }),
        ),
        ResponseContent::Sandbox => ("application/json", reference("Sandbox")),
        ResponseContent::Sandboxes => (
            "application/json",
            json!({ "type": "array", "items": reference("Sandbox") }),
        ),
        ResponseContent::Health => ("application/json", reference("HealthReport")),
        ResponseContent::Text => ("text/plain", json!({ "type": "string" })),
        ResponseContent::Lines => ("application/x-ndjson", json!({ "type": "string" })),
    };
    let mut responses = Map::new();
    let content = json!({ media: { "schema": schema } });
    responses.insert(
        route.status.to_string(),
        json!({ "description": "Done", "content": content.clone() }),
    );
    let error = json!({ "application/json": { "schema": reference("Error") } });
    for status in [403].iter().chain(route.error_statuses) {
        // A degraded gate answers health with 503 and the same report.
        let content = if matches!(route.response, ResponseContent::Health) && *status == 503 {
            content.clone()
        } else {
            error.clone()
        };
        let description = match status {
            400 => "Invalid request; see error",
            403 => "The gate belongs to another user",
            404 => "Not found",
            409 => "Already exists, or conflicts with the current state",
            413 => "The body is too large",
            422 => "The configuration or workspace is invalid; nothing was changed",
            500 => "The operation failed and was undone",
            429 => "Too many writes; see Retry-After",
            _ => "The gate or a part of it is unavailable",
        };
        responses.insert(
            status.to_string(),
            json!({ "description": description, "content": content }),
        );
    }
    Value::Object(responses)
}

fn reference(name: &str) -> Value {
    json!({ "$ref": format!("#/components/schemas/{name}") })
}

fn schema_of<T: JsonSchema>() -> Value {
    let mut settings = schemars::generate::SchemaSettings::openapi3();
    settings.inline_subschemas = true;
    settings.meta_schema = None;
    let schema: Schema = SchemaGenerator::new(settings).into_root_schema_for::<T>();
    schema.to_value()
}

/// The schema of a registration. It is written by hand, as the parser is: the two formats differ
/// in ways that a derive cannot express, and their error messages are part of the interface.
fn registration_schema(unknown: UnknownFields) -> Value {
    let allows_unknown = unknown == UnknownFields::Ignore;
    let replace = json!({
        "type": "boolean", "default": false,
        "description": "End a live registration that holds the address",
    });
    let repo = repo_schema(unknown);
    json!({ "oneOf": [
        {
            "type": "object",
            "required": ["container_ip", "container_id", "repos"],
            "additionalProperties": allows_unknown,
            "properties": {
                "container_ip": { "type": "string", "description": "The source address" },
                "container_id": { "type": "string", "maxLength": 128 },
                "repos": { "type": "array", "items": repo },
                "auth_mode": { "enum": ["user", "bot"], "default": "user" },
                "credentials": {
                    "type": "array", "items": { "type": "string" },
                    "description": "Credentials that the gate adds to the container's requests; \
                                    those of credentials.default that have a value if omitted",
                },
                "expires_at": {
                    "type": "string", "format": "date-time",
                    "description": "In 24 hours if omitted",
                },
                "metadata": { "type": "object" },
                "replace": replace,
            },
        },
        {
            "type": "object",
            "required": ["container_id", "ip_address"],
            "additionalProperties": allows_unknown,
            "properties": {
                "container_id": { "type": "string", "maxLength": 128 },
                "ip_address": { "type": "string" },
                "ttl_seconds": { "type": "integer", "minimum": 1, "default": 86400 },
                "metadata": {
                    "type": "object",
                    "description": "repo, repos and auth_mode are read from here",
                },
                "replace": replace,
            },
        },
    ]})
}

fn sandbox_schema() -> Value {
    json!({
        "type": "object",
        "properties": {
            "id": { "type": "string" },
            "name": { "type": "string" },
            "branch_name": { "type": ["string", "null"] },
            "container_id": { "type": "string" },
            "status": { "enum": ["active", "paused", "error", "missing", "unknown"] },
            "reason": { "type": ["string", "null"] },
            "backend": { "type": "string" },
            "repository": { "type": ["string", "null"] },
            "base": { "type": ["string", "null"] },
            "root": { "type": "boolean" },
            "nested": { "type": "boolean" },
            "published": { "type": "array", "items": { "type": "object" } },
            "created_at": { "type": ["string", "null"], "format": "date-time" },
            "warnings": { "type": "array", "items": { "type": "string" } },
            "repository_file": { "type": ["object", "null"] },
            "tier": { "enum": ["locked", "balanced", "open", null] },
            "presets": { "type": "array", "items": { "type": "string" } },
            "egress": { "type": ["string", "null"] },
            "notes": { "type": "array", "items": { "type": "string" } },
        },
    })
}

fn row_schema() -> Value {
    json!({
        "type": "object",
        "properties": {
            "container_id": { "type": "string" },
            "container_ip": { "type": ["string", "null"] },
            "repos": { "type": "array", "items": { "type": "object" } },
            "auth_mode": { "type": "string" },
            "credentials": { "type": "array", "items": { "type": "string" } },
            "created_at": { "type": "string", "format": "date-time" },
            "expires_at": { "type": "string", "format": "date-time" },
            "metadata": { "type": "object" },
        },
    })
}
