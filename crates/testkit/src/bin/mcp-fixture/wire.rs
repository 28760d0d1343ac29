//! JSON-RPC lines that keep every value as it was written.

use serde::Deserialize;
use serde_json::Value;
use serde_json::value::RawValue;

/// A line from the client.
#[derive(Debug, Deserialize)]
pub(crate) struct Message<'a> {
    #[serde(borrow, default)]
    pub(crate) id: Option<&'a RawValue>,
    #[serde(default)]
    pub(crate) method: Option<String>,
    #[serde(borrow, default)]
    pub(crate) params: Option<&'a RawValue>,
    #[serde(borrow, default)]
    pub(crate) result: Option<&'a RawValue>,
    #[serde(borrow, default)]
    pub(crate) error: Option<&'a RawValue>,
}

/// The outcome of a request.
#[derive(Debug)]
pub(crate) enum Outcome {
    /// A result, as JSON.
    Result(String),
    /// An error.
    Error(i64, String, Option<Value>),
    /// No response: the request was cancelled.
    NoResponse,
}

impl Outcome {
    /// A tool result of one text.
    pub(crate) fn text(text: impl AsRef<str>) -> Self {
        let content = serde_json::json!([{"type": "text", "text": text.as_ref()}]);
        Self::Result(serde_json::json!({"content": content}).to_string())
    }

    /// A tool result with an error.
    pub(crate) fn failed(text: &str) -> Self {
        let content = serde_json::json!([{"type": "text", "text": text}]);
        Self::Result(serde_json::json!({"content": content, "isError": true}).to_string())
    }

    /// A result of any value.
    pub(crate) fn value(value: &Value) -> Self {
        Self::Result(value.to_string())
    }

    /// An error for invalid params.
    pub(crate) fn invalid(message: impl Into<String>) -> Self {
        Self::Error(-32602, message.into(), None)
    }

    /// The response line; `None` for a cancelled request.
    pub(crate) fn line(&self, id: &str) -> Option<String> {
        match self {
            Self::Result(result) => Some(format!(
                r#"{{"jsonrpc":"2.0","id":{id},"result":{result}}}"#
            )),
            Self::Error(code, message, data) => {
                let mut error = serde_json::json!({"code": code, "message": message});
                if let (Some(data), Some(error)) = (data, error.as_object_mut()) {
                    error.insert("data".to_owned(), data.clone());
                }
                Some(format!(r#"{{"jsonrpc":"2.0","id":{id},"error":{error}}}"#))
            }
            Self::NoResponse => None,
        }
    }
}

/// The line of a notification.
pub(crate) fn notification(method: &str, params: &Value) -> String {
    if params.is_null() {
        return serde_json::json!({"jsonrpc": "2.0", "method": method}).to_string();
    }
    serde_json::json!({"jsonrpc": "2.0", "method": method, "params": params}).to_string()
}
