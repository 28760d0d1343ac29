//! The door as an OpenAPI document, from one table of routes.
//!
//! The table also tells 404 from 405. A test walks it: each route must be read as the
//! action it names, and the checked-in document must be this one.

use schemars::{JsonSchema, Schema, SchemaGenerator};
use serde_json::{Map, Value, json};

use crate::action::{AcceptBody, FileBody};
use crate::body::{
    CreateBody, ForkBody, LabelBody, PortBody, RestoreBody, SessionBody, SnapshotBody, TryBody,
};
use crate::health::HealthReport;
use crate::registration_request::{UnknownFields, repo_schema};

/// One route of the door.
#[derive(Clone, Copy, Debug)]
pub struct ApiRoute {
    /// The method.
    pub method: &'static str,
    /// The path, with `{id}` for a segment that varies.
    pub path: &'static str,
    /// The action it is read as.
    pub action: &'static str,
    /// What it does.
    pub summary: &'static str,
    /// What it takes.
    pub takes: RequestContent,
    /// What it gives on success.
    pub gives: ResponseContent,
    /// The success status.
    pub status: u16,
    /// The failures a client should expect, beside 403 for another user.
    pub fails: &'static [u16],
}

/// What a route takes.
#[derive(Clone, Copy, Debug)]
pub enum RequestContent {
    /// Nothing.
    Nothing,
    /// A registration, in either shape.
    Registration,
    /// The same, with fields that are not known.
    Container,
    /// Which checks a health report is made of.
    HealthDepth,
    /// A file's path.
    File,
    /// Query parameters that choose audit records.
    AuditQuery,
    /// Whether by force.
    Force,
    /// Which sandboxes, by name or id.
    Named,
    /// What a new sandbox is to be.
    CreateSandbox,
    /// What a sandbox is entered for.
    Session,
    /// What was done.
    Snapshot,
    /// A port to publish.
    Port,
    /// A checkpoint's label.
    Label,
    /// A [`RestoreBody`].
    Restore,
    /// A fork's name.
    Fork,
    /// A request that is only asked about.
    Try,
    /// Whose definitions are accepted.
    Accept,
}

/// What a route gives.
#[derive(Clone, Copy, Debug)]
pub enum ResponseContent {
    /// A JSON object.
    Object,
    /// A list of them.
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
    /// Whether a decoded path is this route's.
    pub(crate) fn matches(&self, path: &[&str]) -> bool {
        let own: Vec<&str> = self.path.split('/').skip(1).collect();
        own.len() == path.len()
            && own
                .iter()
                .zip(path)
                .all(|(own, given)| own.starts_with('{') || own == given)
    }
}

macro_rules! routes {
    ($($method:ident $path:literal $action:literal $takes:ident $gives:ident $status:literal $fails:expr, $summary:literal;)*) => {
        /// Every route.
        pub const ROUTES: &[ApiRoute] = &[$(ApiRoute {
            method: stringify!($method),
            path: $path,
            action: $action,
            summary: $summary,
            takes: RequestContent::$takes,
            gives: ResponseContent::$gives,
            status: $status,
            fails: &$fails,
        },)*];
    };
}

routes! {
    GET "/v1/health" "health" HealthDepth Health 200 [400, 503], "How every part of the gate is; the registry is read and listeners are connected to, unless checks=false";
    GET "/v1/metrics" "metrics" Nothing Text 200 [], "Numbers, as Prometheus text";
    GET "/v1/openapi.json" "describe" Nothing Object 200 [], "This document";
    GET "/v1/registrations" "registrations.list" Nothing Rows 200 [503], "Every registration";
    POST "/v1/registrations" "registrations.put" Registration Object 201 [400, 409, 413, 429, 503], "Adds or replaces a registration; durable when answered";
    GET "/v1/registrations/{id}" "registrations.get" Nothing Object 200 [404, 503], "One registration";
    DELETE "/v1/registrations/{id}" "registrations.delete" Nothing Object 200 [404, 429, 503], "Ends a registration";
    GET "/v1/audit" "audit.query" AuditQuery Object 200 [400, 503], "Audit records";
    GET "/v1/audit/export" "audit.export" AuditQuery Lines 200 [400, 503], "Audit records as a stream of lines";
    GET "/v1/audit/tail" "audit.tail" AuditQuery Lines 200 [400, 503], "Audit records as they are written, until the client hangs up";
    POST "/v1/audit/verify" "audit.verify" Nothing Object 200 [503], "Checks the audit chain";
    GET "/v1/sandboxes" "sandboxes.list" Named Sandboxes 200 [400], "Every sandbox and how it is, or those of a name or id";
    POST "/v1/sandboxes" "sandboxes.create" CreateSandbox Sandbox 201 [400, 409, 413, 500, 503], "Makes a sandbox: branch, place to run, workspace. With Accept: application/x-ndjson, lines tell how far it is, and the last one is {done} or {failed}";
    GET "/v1/sandboxes/{id}" "sandboxes.show" Nothing Sandbox 200 [404], "One sandbox";
    DELETE "/v1/sandboxes/{id}" "sandboxes.delete" Force Object 200 [404, 409], "Removes a sandbox with everything it had";
    POST "/v1/sandboxes/{id}/pause" "sandboxes.pause" Nothing Sandbox 200 [404, 409, 503], "Stops every process of a sandbox";
    POST "/v1/sandboxes/{id}/resume" "sandboxes.resume" Nothing Sandbox 200 [404, 409, 503], "Resumes all processes of a sandbox";
    POST "/v1/sandboxes/{id}/session" "sandboxes.enter" Session Object 200 [404, 409, 503], "Lets an operator in, and writes it down";
    POST "/v1/sandboxes/{id}/snapshot" "sandboxes.snapshot" Snapshot Object 200 [404, 409, 422, 500], "Commits the workspace to the sandbox's branch";
    GET "/v1/sandboxes/{id}/checkpoints" "checkpoints.list" Nothing Object 200 [404, 409], "The checkpoints of a sandbox, oldest first";
    POST "/v1/sandboxes/{id}/checkpoints" "checkpoints.make" Label Object 201 [400, 404, 409, 500], "Keeps the files of a sandbox under a label";
    POST "/v1/sandboxes/{id}/restore" "checkpoints.restore" Restore Sandbox 200 [400, 404, 409, 500], "RequestContent a snapshot, puts the files of a checkpoint back and starts the sandbox again";
    POST "/v1/sandboxes/{id}/fork" "sandboxes.fork" Fork Sandbox 201 [400, 404, 409, 500], "Makes a sandbox with the files and the branch of another";
    GET "/v1/sandboxes/{id}/ports" "ports.list" Nothing Object 200 [404, 503], "The ports of a sandbox: open inside, and published";
    POST "/v1/sandboxes/{id}/ports" "ports.publish" Port Object 200 [400, 404, 409], "Publishes a port on the host's loopback, or takes it back";
    GET "/v1/config" "config.show" Nothing Object 200 [], "The settings in force and where each came from";
    POST "/v1/config/reload" "config.reload" Nothing Object 200 [422, 503], "Reads the configuration files again";
    POST "/v1/registry/backup" "registry.backup" File Object 200 [400, 409, 503], "Copies the database to a new file";
    POST "/v1/registry/restore" "registry.restore" File Object 200 [400, 503], "Puts a backup in the database's place";
    POST "/v1/registry/reset" "registry.reset" Nothing Object 200 [503], "Starts an empty database and keeps the old one aside";
    GET "/v1/ca" "ca.show" Nothing Object 200 [], "The root that sandboxes trust, without its key";
    POST "/v1/ca/rotate" "ca.rotate" Nothing Object 200 [500], "Puts a new root in its place; older ones lead to it until they end";
    GET "/v1/requests/{request}" "requests.explain" Nothing Object 200 [400, 404, 503], "Why a request was refused, or what became of it";
    POST "/v1/policy/try" "policy.try" Try Object 200 [400, 404], "What would become of a request, without sending one";
    GET "/v1/tools" "tools.list" Nothing Objects 200 [], "The servers behind the bridge, and what is known of their tools";
    POST "/v1/tools/accept" "tools.accept" Accept Object 200 [400, 404], "RequestContent changed definitions of tools for the true ones";
    POST "/v1/shutdown" "shutdown" Nothing Object 202 [], "Stops the gate";
    POST "/internal/containers" "registrations.put" Container Object 201 [400, 409, 413, 429, 503], "As /v1/registrations, for existing programs; unknown fields are ignored with a warning in the answer";
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
            "description": "What an operator may ask of a gate, over HTTP on its Unix socket. \
                            Only the user who runs the gate is served.",
            "license": { "name": "Apache-2.0", "identifier": "Apache-2.0" },
        },
        "paths": paths,
        "components": { "schemas": {
            "Error": {
                "type": "object",
                "required": ["error", "code"],
                "properties": {
                    "error": { "type": "string", "description": "What happened and what to do" },
                    "code": { "type": "string", "description": "A stable word for programs" },
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
    let body = match route.takes {
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
    if let RequestContent::Force = route.takes {
        parameters.push(json!({ "name": "force", "in": "query", "schema": { "type": "boolean" } }));
    }
    if let RequestContent::HealthDepth = route.takes {
        let schema = json!({ "type": "boolean", "default": true });
        parameters.push(json!({ "name": "checks", "in": "query", "schema": schema }));
    }
    if let RequestContent::Named = route.takes {
        parameters.push(json!({ "name": "name", "in": "query", "schema": { "type": "string" } }));
    }
    if let RequestContent::AuditQuery = route.takes {
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
    let (media, schema) = match route.gives {
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
    for status in [403].iter().chain(route.fails) {
        // A degraded gate answers health with 503 and the same report.
        let content = if matches!(route.gives, ResponseContent::Health) && *status == 503 {
            content.clone()
        } else {
            error.clone()
        };
        let says = match status {
            400 => "The request is wrong; the sentence says how",
            403 => "The gate belongs to another user",
            404 => "There is no such thing",
            409 => "It is already there, or in the way of something that is",
            413 => "The body is too large",
            422 => "What was read (a configuration, a workspace) is refused; nothing was changed",
            500 => "It was tried and failed; nothing of it is left",
            429 => "Too many writes; Retry-After says when",
            _ => "The gate, or a part of it, cannot do this now",
        };
        responses.insert(
            status.to_string(),
            json!({ "description": says, "content": content }),
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

/// Written by hand, because it is read by hand: the two shapes differ in more than a
/// derive could say, and their messages are part of the interface.
fn registration_schema(unknown: UnknownFields) -> Value {
    let others = unknown == UnknownFields::Ignore;
    let replace = json!({
        "type": "boolean", "default": false,
        "description": "End a live registration that holds the address",
    });
    let repo = repo_schema(unknown);
    json!({ "oneOf": [
        {
            "type": "object",
            "required": ["container_ip", "container_id", "repos"],
            "additionalProperties": others,
            "properties": {
                "container_ip": { "type": "string", "description": "The source address" },
                "container_id": { "type": "string", "maxLength": 128 },
                "repos": { "type": "array", "items": repo },
                "auth_mode": { "enum": ["user", "bot"], "default": "user" },
                "expires_at": {
                    "type": "string", "format": "date-time",
                    "description": "In 24 hours when not given",
                },
                "metadata": { "type": "object" },
                "replace": replace,
            },
        },
        {
            "type": "object",
            "required": ["container_id", "ip_address"],
            "additionalProperties": others,
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
            "created_at": { "type": "string", "format": "date-time" },
            "expires_at": { "type": "string", "format": "date-time" },
            "metadata": { "type": "object" },
        },
    })
}
