//! The lists of tools, prompts and resources.

use std::sync::atomic::Ordering;

use serde_json::{Value, json};

use crate::server::{Server, text};
use crate::wire::Outcome;

/// Tools without arguments, with their descriptions.
const TOOLS_WITHOUT_ARGUMENTS: &[(&str, &str)] = &[
    ("test_simple_text", "Returns a text"),
    ("test_image_content", "Returns a picture"),
    ("test_audio_content", "Returns a sound"),
    ("test_embedded_resource", "Returns a resource"),
    (
        "test_multiple_content_types",
        "Returns content of several kinds",
    ),
    ("test_tool_with_logging", "Logs three times while it runs"),
    ("test_logging_tool", "Logs three times while it runs"),
    ("test_error_handling", "Fails"),
    ("test_tool_with_progress", "Reports progress three times"),
    (
        "test_elicitation_sep1034_defaults",
        "Requests values with defaults",
    ),
    (
        "test_elicitation_sep1330_enums",
        "Requests choices of every kind",
    ),
    ("test_reconnection", "Answers after 300 ms"),
    (
        "test_missing_capability",
        "Sends a sampling request without checking the client's capability",
    ),
    (
        "test_streaming_elicitation",
        "Sends an elicitation request while it runs",
    ),
    ("test_trigger_tool_change", "Adds or removes a tool"),
    ("test_trigger_prompt_change", "Adds or removes a prompt"),
    ("test_input_required_result_elicitation", "Requests a name"),
    (
        "test_input_required_result_sampling",
        "Sends a sampling request",
    ),
    (
        "test_input_required_result_list_roots",
        "Requests the client's roots",
    ),
    (
        "test_input_required_result_request_state",
        "Requests a confirmation",
    ),
    (
        "test_input_required_result_multiple_inputs",
        "Sends three requests at once",
    ),
    (
        "test_input_required_result_multi_round",
        "Sends requests one after the other",
    ),
    (
        "test_input_required_result_tampered_state",
        "Requests a confirmation",
    ),
    (
        "test_input_required_result_capabilities",
        "Sends requests for the client's capabilities only",
    ),
    ("hang", "Never answers"),
    ("list_changed", "Sends a list_changed notification"),
    ("who", "Returns its process id and the number of sessions"),
];

/// Tools with arguments: name, description, properties, required properties.
fn tools_with_arguments() -> Vec<(&'static str, &'static str, Value, Value)> {
    let number = || json!({"type": "integer", "minimum": 0});
    let string = || json!({"type": "string"});
    vec![
        (
            "test_sampling",
            "Sends a sampling request",
            json!({"prompt": string()}),
            json!(["prompt"]),
        ),
        (
            "test_elicitation",
            "Sends an elicitation request",
            json!({"message": string()}),
            json!(["message"]),
        ),
        (
            "test_header_param",
            "Has an argument that is also a header",
            json!({"region": {"type": "string", "x-mcp-header": "Region"}}),
            json!(["region"]),
        ),
        ("sleep", "Answers later", json!({"ms": number()}), json!([])),
        (
            "crash",
            "Exits in the middle of its response",
            json!({"code": number(), "before": {"type": "boolean"}}),
            json!([]),
        ),
        (
            "flood",
            "Writes `lines` junk lines and one of `bytes` bytes before its response",
            json!({"lines": number(), "bytes": number()}),
            json!([]),
        ),
        (
            "spawn_grandchild",
            "Starts a program in a session of its own, which writes its process id to a file",
            json!({"file": string()}),
            json!(["file"]),
        ),
        (
            "env",
            "Returns its environment",
            json!({"name": string()}),
            json!([]),
        ),
        (
            "progress",
            "Reports progress `steps` times, and answers when the file `until` exists",
            json!({"steps": number(), "ms": number(), "until": string()}),
            json!([]),
        ),
        (
            "cancellable",
            "Waits for its cancellation, and writes the notification to a file",
            json!({"file": string()}),
            json!(["file"]),
        ),
        (
            "stderr_lines",
            "Writes `count` lines to stderr",
            json!({"count": number(), "text": string()}),
            json!([]),
        ),
        (
            "big",
            "Returns `bytes` bytes",
            json!({"bytes": number()}),
            json!([]),
        ),
        (
            "log",
            "Logs",
            json!({"level": string(), "text": string(), "count": number()}),
            json!([]),
        ),
        (
            "ask",
            "Sends the client any request, and returns the response",
            json!({"method": string(), "params": {"type": "object"}, "key": string()}),
            json!(["method"]),
        ),
    ]
}

/// A schema with keywords of JSON Schema 2020-12 that a relay must keep.
fn schema_2020_12() -> Value {
    json!({
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "type": "object",
        "$defs": {"address": {
            "$anchor": "addressDef",
            "type": "object",
            "properties": {"street": {"type": "string"}, "city": {"type": "string"}},
        }},
        "properties": {
            "name": {"type": "string"},
            "address": {"$ref": "#/$defs/address"},
            "contactMethod": {"type": "string", "enum": ["phone", "email"]},
            "phone": {"type": "string"},
            "email": {"type": "string"},
        },
        "allOf": [{"anyOf": [{"required": ["phone"]}, {"required": ["email"]}]}],
        "if": {"properties": {"contactMethod": {"const": "phone"}}, "required": ["contactMethod"]},
        "then": {"required": ["phone"]},
        "else": {"required": ["email"]},
        "additionalProperties": false,
    })
}

/// `tools/list`.
pub(crate) fn tools(server: &Server, params: &Value) -> Outcome {
    let description = server.options.description.as_deref();
    let mut tools = vec![json!({
        "name": "echo_raw",
        "description": description.unwrap_or("Returns its arguments unchanged"),
        "inputSchema": {"type": "object"},
    })];
    tools.extend(TOOLS_WITHOUT_ARGUMENTS.iter().map(|(name, description)| {
        let schema = json!({"type": "object", "properties": {}});
        json!({"name": name, "description": description, "inputSchema": schema})
    }));
    let more = tools_with_arguments().into_iter();
    tools.extend(more.map(|(name, description, properties, required)| {
        let schema = json!({"type": "object", "properties": properties, "required": required});
        json!({"name": name, "description": description, "inputSchema": schema})
    }));
    tools.push(json!({
        "name": "json_schema_2020_12_tool",
        "description": "Tool with JSON Schema 2020-12 features",
        "inputSchema": schema_2020_12(),
    }));
    if server.more_tools.load(Ordering::Relaxed) {
        tools.push(json!({
            "name": "test_dynamic_tool",
            "description": "Listed only after a change",
            "inputSchema": {"type": "object"},
        }));
    }
    page(server, "tools", tools, params)
}

/// `prompts/list`.
pub(crate) fn prompts(server: &Server, params: &Value) -> Outcome {
    let argument =
        |name: &str| json!({"name": name, "description": "A test argument", "required": true});
    let mut prompts = vec![
        json!({"name": "test_simple_prompt", "description": "A text"}),
        json!({
            "name": "test_prompt_with_arguments",
            "description": "A text with two arguments in it",
            "arguments": [argument("arg1"), argument("arg2")],
        }),
        json!({
            "name": "test_prompt_with_embedded_resource",
            "description": "A resource and a text",
            "arguments": [argument("resourceUri")],
        }),
        json!({"name": "test_prompt_with_image", "description": "A picture and a text"}),
        json!({"name": "test_input_required_result_prompt", "description": "Requests its context"}),
    ];
    if server.more_prompts.load(Ordering::Relaxed) {
        prompts.push(
            json!({"name": "test_dynamic_prompt", "description": "Listed only after a change"}),
        );
    }
    page(server, "prompts", prompts, params)
}

/// `resources/list`.
pub(crate) fn resources(server: &Server, params: &Value) -> Outcome {
    let resource = |uri: &str, name: &str, kind: &str| json!({"uri": uri, "name": name, "description": "For tests", "mimeType": kind});
    let resources = vec![
        resource("test://static-text", "static-text", "text/plain"),
        resource("test://static-binary", "static-binary", "image/png"),
        resource("test://watched-resource", "watched-resource", "text/plain"),
    ];
    page(server, "resources", resources, params)
}

/// `resources/templates/list`.
pub(crate) fn templates() -> Outcome {
    Outcome::value(&json!({"resourceTemplates": [{
        "uriTemplate": "test://template/{id}/data",
        "name": "template",
        "description": "For tests",
        "mimeType": "application/json",
    }]}))
}

/// The whole list, or the page that starts at the cursor.
fn page(server: &Server, what: &str, all: Vec<Value>, params: &Value) -> Outcome {
    let Some(size) = server.options.page else {
        return Outcome::value(&json!({what: all}));
    };
    let start: usize = text(params, "cursor").parse().unwrap_or(0);
    let rest = all.len() > start + size;
    let entries: Vec<Value> = all.into_iter().skip(start).take(size).collect();
    let mut result = json!({what: entries});
    if let (true, Some(result)) = (rest, result.as_object_mut()) {
        result.insert("nextCursor".to_owned(), json!((start + size).to_string()));
    }
    Outcome::value(&result)
}
