//! Required fields of every request of revision 2026-07-28, and the headers that repeat them.

use http::{HeaderMap, HeaderName, Response, StatusCode};
use serde_json::{Value, json};

use crate::answer::{self, McpBody};
use crate::incoming::{PROTOCOL_VERSION, header_text};
use crate::launch::LaunchError;
use crate::process::SendError;
use crate::rpc::{RpcMessage, code};

/// The protocol revision that this module implements.
pub const REVISION: &str = "2026-07-28";

/// Key of `_meta` with the protocol revision.
const PROTOCOL_VERSION_KEY: &str = "io.modelcontextprotocol/protocolVersion";
/// Key of `_meta` with the client's capabilities.
const CAPABILITIES_KEY: &str = "io.modelcontextprotocol/clientCapabilities";
/// Key of `_meta` with the client's name and version.
const CLIENT_INFO_KEY: &str = "io.modelcontextprotocol/clientInfo";
/// Key of `_meta` with the minimum level of log messages.
const LOG_LEVEL_KEY: &str = "io.modelcontextprotocol/logLevel";

/// Keys of `_meta` that are for the bridge and not for the server.
pub(super) const BRIDGE_META_KEYS: [&str; 4] = [
    PROTOCOL_VERSION_KEY,
    CAPABILITIES_KEY,
    CLIENT_INFO_KEY,
    LOG_LEVEL_KEY,
];

/// Header that repeats the method.
const METHOD_HEADER: HeaderName = HeaderName::from_static("mcp-method");

/// Header that repeats the name of the tool or prompt, or the URI of the resource.
const NAME_HEADER: HeaderName = HeaderName::from_static("mcp-name");

/// Maximum size of a client's capabilities, in bytes.
const MAX_CAPABILITIES_BYTES: usize = 16 * 1024;

/// Why a request is refused: the HTTP status and the JSON-RPC error.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct RequestError {
    status: StatusCode,
    code: i64,
    message: String,
    data: Option<Value>,
}

impl RequestError {
    /// An error without data.
    pub(super) fn new(status: StatusCode, code: i64, message: impl Into<String>) -> Self {
        Self {
            status,
            code,
            message: message.into(),
            data: None,
        }
    }

    /// Writing to the server failed.
    pub(super) fn write_failed(error: &SendError) -> Self {
        let status = StatusCode::INTERNAL_SERVER_ERROR;
        Self::new(status, code::INTERNAL_ERROR, error.to_string())
    }

    /// The parameters are invalid.
    pub(super) fn invalid_params(message: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, code::INVALID_PARAMS, message)
    }

    /// A header is missing or differs from the body.
    fn header_mismatch(message: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, code::HEADER_MISMATCH, message)
    }

    /// The HTTP response to the request `id`.
    pub(super) fn response(&self, id: &str) -> Response<McpBody> {
        answer::json_text(self.status, self.text(id))
    }

    /// The JSON-RPC error message for the request `id`.
    pub(super) fn text(&self, id: &str) -> String {
        let data = self.data.as_ref().map(Value::to_string);
        RpcMessage::failure(id, self.code, &self.message, data.as_deref())
    }

    /// The client lacks a capability that the call needs.
    pub(super) fn missing_capability(capability: &str) -> Self {
        let message = format!("The call needs the client capability '{capability}'");
        let mut needed = serde_json::Map::new();
        needed.insert(capability.to_owned(), json!({}));
        Self {
            data: Some(json!({"requiredCapabilities": needed})),
            ..Self::new(StatusCode::BAD_REQUEST, code::MISSING_CAPABILITY, message)
        }
    }
}

impl From<LaunchError> for RequestError {
    fn from(error: LaunchError) -> Self {
        Self::new(error.status(), code::INTERNAL_ERROR, error.to_string())
    }
}

/// A request whose required fields and headers were checked.
#[derive(Debug)]
pub(super) struct Request {
    /// The message as received.
    pub(super) message: RpcMessage,
    /// The client's capabilities: a JSON object with sorted keys.
    pub(super) capabilities: String,
    /// Minimum level of log messages that the client wants to receive.
    pub(super) log_level: Option<String>,
}

impl Request {
    /// Checks the required fields of `message` and the headers that repeat them.
    pub(super) fn read(message: RpcMessage, headers: &HeaderMap) -> Result<Self, RequestError> {
        let Some(version) = message.param_text(&["_meta", PROTOCOL_VERSION_KEY]) else {
            return Err(RequestError::invalid_params(format!(
                "Missing or invalid _meta.{PROTOCOL_VERSION_KEY}"
            )));
        };
        let capabilities = message.param(&["_meta", CAPABILITIES_KEY]);
        let capabilities = capabilities.filter(|raw| raw.len() <= MAX_CAPABILITIES_BYTES);
        let capabilities = capabilities.and_then(|raw| serde_json::from_str(raw).ok());
        let Some(mut capabilities @ Value::Object(_)) = capabilities else {
            let why = format!("Missing or invalid _meta.{CAPABILITIES_KEY}");
            return Err(RequestError::invalid_params(why));
        };
        match header_text(headers, &PROTOCOL_VERSION) {
            None => {
                return Err(RequestError::header_mismatch(
                    "The MCP-Protocol-Version header is missing",
                ));
            }
            Some(header) if header != version => {
                let why = "The MCP-Protocol-Version header differs from _meta";
                return Err(RequestError::header_mismatch(why));
            }
            Some(_) => {}
        }
        if version != REVISION {
            let why = "Unsupported protocol version";
            return Err(RequestError {
                data: Some(
                    json!({"supported": super::supported_revisions(), "requested": version}),
                ),
                ..RequestError::new(StatusCode::BAD_REQUEST, code::UNSUPPORTED_VERSION, why)
            });
        }
        let method = message.method().unwrap_or_default();
        if header_text(headers, &METHOD_HEADER) != Some(method) {
            let why = "The Mcp-Method header is missing or differs from the method";
            return Err(RequestError::header_mismatch(why));
        }
        let name_key = match method {
            "tools/call" | "prompts/get" => Some("name"),
            "resources/read" => Some("uri"),
            _ => None,
        };
        if let Some(key) = name_key {
            let Some(name) = message.param_text(&[key]) else {
                return Err(RequestError::invalid_params(format!(
                    "Missing or invalid {key}"
                )));
            };
            let header = header_text(headers, &NAME_HEADER).map(decode_header);
            if header != Some(Some(name)) {
                let why = format!("The Mcp-Name header is missing or differs from the {key}");
                return Err(RequestError::header_mismatch(why));
            }
        }
        capabilities.sort_all_objects();
        Ok(Self {
            capabilities: capabilities.to_string(),
            log_level: message.param_text(&["_meta", LOG_LEVEL_KEY]),
            message,
        })
    }

    /// The method.
    pub(super) fn method(&self) -> &str {
        self.message.method().unwrap_or_default()
    }
}

/// The text of a header, which is base64 if it is not plain ASCII: `=?base64?…?=`.
fn decode_header(header: &str) -> Option<String> {
    use base64::Engine as _;
    let header = header.trim();
    let encoded = header
        .strip_prefix("=?base64?")
        .and_then(|rest| rest.strip_suffix("?="));
    let Some(encoded) = encoded else {
        return Some(header.to_owned());
    };
    let bytes = base64::engine::general_purpose::STANDARD
        .decode(encoded)
        .ok()?;
    String::from_utf8(bytes).ok()
}

/// Whether a request is of revision 2026-07-28, by its header, its `_meta` or its method.
pub fn is_sessionless(headers: &HeaderMap, body: &[u8]) -> bool {
    if header_text(headers, &PROTOCOL_VERSION) == Some(REVISION) {
        return true;
    }
    // A substring search spares most bodies of earlier revisions a second parse.
    let hints = [
        "io.modelcontextprotocol/",
        "server/discover",
        "subscriptions/listen",
    ];
    let has_hint = hints
        .iter()
        .any(|hint| memchr::memmem::find(body, hint.as_bytes()).is_some());
    has_hint
        && RpcMessage::read_bytes(body.to_vec()).is_ok_and(|message| {
            let method = message.method().unwrap_or_default();
            matches!(method, "server/discover" | "subscriptions/listen")
                || message.param(&["_meta", PROTOCOL_VERSION_KEY]).is_some()
        })
}
