//! What every request of this era has to say, and where it says it twice.

use http::{HeaderMap, HeaderName, Response, StatusCode};
use serde_json::{Value, json};

use crate::answer::{self, Content};
use crate::incoming::{VERSION, text};
use crate::launch::LaunchError;
use crate::process::SendError;
use crate::rpc::{Message, code};

/// The revision.
pub const REVISION: &str = "2026-07-28";

/// Keys of `_meta`.
const PROTOCOL: &str = "io.modelcontextprotocol/protocolVersion";
const CAPABILITIES: &str = "io.modelcontextprotocol/clientCapabilities";
const CLIENT: &str = "io.modelcontextprotocol/clientInfo";
const LOG_LEVEL: &str = "io.modelcontextprotocol/logLevel";

/// What of `_meta` is between the client and the bridge.
pub(super) const ENVELOPE: [&str; 4] = [PROTOCOL, CAPABILITIES, CLIENT, LOG_LEVEL];

/// The method, again.
const METHOD: HeaderName = HeaderName::from_static("mcp-method");

/// The name of what is asked for, again.
const NAME: HeaderName = HeaderName::from_static("mcp-name");

/// The most bytes of a client's capabilities.
const MOST_CAPABILITIES: usize = 16 * 1024;

/// A request that is not answered.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Refused {
    status: StatusCode,
    code: i64,
    message: String,
    data: Option<Value>,
}

impl Refused {
    /// With what it says.
    pub(super) fn new(status: StatusCode, code: i64, message: impl Into<String>) -> Self {
        Self {
            status,
            code,
            message: message.into(),
            data: None,
        }
    }

    /// The server could not be written to.
    pub(super) fn unwritten(error: &SendError) -> Self {
        let status = StatusCode::INTERNAL_SERVER_ERROR;
        Self::new(status, code::INTERNAL, error.to_string())
    }

    /// The parameters are wrong.
    pub(super) fn params(message: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, code::PARAMS, message)
    }

    /// Header and body differ.
    fn mismatch(message: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, code::HEADER_MISMATCH, message)
    }

    /// As an answer to the request `id`.
    pub(super) fn response(&self, id: &str) -> Response<Content> {
        answer::json_text(self.status, self.text(id))
    }

    /// As a message.
    pub(super) fn text(&self, id: &str) -> String {
        let data = self.data.as_ref().map(Value::to_string);
        Message::failure(id, self.code, &self.message, data.as_deref())
    }

    /// The client lacks a capability that the call needs.
    pub(super) fn missing(capability: &str) -> Self {
        let message = format!("The call needs the client capability '{capability}'");
        let mut needed = serde_json::Map::new();
        needed.insert(capability.to_owned(), json!({}));
        Self {
            data: Some(json!({"requiredCapabilities": needed})),
            ..Self::new(StatusCode::BAD_REQUEST, code::MISSING_CAPABILITY, message)
        }
    }
}

impl From<LaunchError> for Refused {
    fn from(error: LaunchError) -> Self {
        Self::new(error.status(), code::INTERNAL, error.to_string())
    }
}

/// A request, checked.
#[derive(Debug)]
pub(super) struct Request {
    /// As it was written.
    pub(super) message: Message,
    /// What the client can do: an object, its keys in order.
    pub(super) capabilities: String,
    /// From which level on it wants to hear what the server logs.
    pub(super) log_level: Option<String>,
}

impl Request {
    /// Checks `message` against itself and its headers.
    pub(super) fn read(message: Message, headers: &HeaderMap) -> Result<Self, Refused> {
        let Some(version) = message.param_text(&["_meta", PROTOCOL]) else {
            return Err(Refused::params(format!(
                "Missing or invalid _meta.{PROTOCOL}"
            )));
        };
        let capabilities = message.param(&["_meta", CAPABILITIES]);
        let capabilities = capabilities.filter(|raw| raw.len() <= MOST_CAPABILITIES);
        let capabilities = capabilities.and_then(|raw| serde_json::from_str(raw).ok());
        let Some(mut capabilities @ Value::Object(_)) = capabilities else {
            let why = format!("Missing or invalid _meta.{CAPABILITIES}");
            return Err(Refused::params(why));
        };
        match text(headers, &VERSION) {
            None => {
                return Err(Refused::mismatch(
                    "The MCP-Protocol-Version header is missing",
                ));
            }
            Some(header) if header != version => {
                let why = "The MCP-Protocol-Version header is not what _meta says";
                return Err(Refused::mismatch(why));
            }
            Some(_) => {}
        }
        if version != REVISION {
            let why = "Unsupported protocol version";
            return Err(Refused {
                data: Some(json!({"supported": super::supported(), "requested": version})),
                ..Refused::new(StatusCode::BAD_REQUEST, code::VERSION, why)
            });
        }
        let method = message.method().unwrap_or_default();
        if text(headers, &METHOD) != Some(method) {
            let why = "The Mcp-Method header is missing or not the method";
            return Err(Refused::mismatch(why));
        }
        let named = match method {
            "tools/call" | "prompts/get" => Some("name"),
            "resources/read" => Some("uri"),
            _ => None,
        };
        if let Some(key) = named {
            let Some(name) = message.param_text(&[key]) else {
                return Err(Refused::params(format!("Missing or invalid {key}")));
            };
            let header = text(headers, &NAME).map(decoded);
            if header != Some(Some(name)) {
                let why = format!("The Mcp-Name header is missing or not the {key}");
                return Err(Refused::mismatch(why));
            }
        }
        capabilities.sort_all_objects();
        Ok(Self {
            capabilities: capabilities.to_string(),
            log_level: message.param_text(&["_meta", LOG_LEVEL]),
            message,
        })
    }

    /// The method.
    pub(super) fn method(&self) -> &str {
        self.message.method().unwrap_or_default()
    }
}

/// A header's text, which may be written in base64 where it is more than plain ASCII.
fn decoded(header: &str) -> Option<String> {
    use base64::Engine as _;
    let header = header.trim();
    let coded = header
        .strip_prefix("=?base64?")
        .and_then(|rest| rest.strip_suffix("?="));
    let Some(coded) = coded else {
        return Some(header.to_owned());
    };
    let bytes = base64::engine::general_purpose::STANDARD
        .decode(coded)
        .ok()?;
    String::from_utf8(bytes).ok()
}

/// Whether a request is of this era: its header, its `_meta` or its method says so.
pub fn is_modern(headers: &HeaderMap, body: &[u8]) -> bool {
    if text(headers, &VERSION) == Some(REVISION) {
        return true;
    }
    // Most bodies are not, and are read once only.
    let hints = [
        "io.modelcontextprotocol/",
        "server/discover",
        "subscriptions/listen",
    ];
    let hinted = hints
        .iter()
        .any(|hint| memchr::memmem::find(body, hint.as_bytes()).is_some());
    hinted
        && Message::read_bytes(body.to_vec()).is_ok_and(|message| {
            let method = message.method().unwrap_or_default();
            matches!(method, "server/discover" | "subscriptions/listen")
                || message.param(&["_meta", PROTOCOL]).is_some()
        })
}
