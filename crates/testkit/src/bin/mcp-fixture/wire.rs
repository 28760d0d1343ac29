//! JSON-RPC lines, with every value as it was written.

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

/// What came of a request.
#[derive(Debug)]
pub(crate) enum Outcome {
    /// This result, as JSON.
    Result(String),
    /// This error.
    Error(i64, String, Option<Value>),
    /// No answer: it was cancelled.
    Silence,
}

impl Outcome {
    /// A tool's result of one text.
    pub(crate) fn text(text: impl AsRef<str>) -> Self {
        let content = serde_json::json!([{"type": "text", "text": text.as_ref()}]);
        Self::Result(serde_json::json!({"content": content}).to_string())
    }

    /// A tool's result that says it failed.
    pub(crate) fn failed(text: &str) -> Self {
        let content = serde_json::json!([{"type": "text", "text": text}]);
        Self::Result(serde_json::json!({"content": content, "isError": true}).to_string())
    }

    /// Some value.
    pub(crate) fn value(value: &Value) -> Self {
        Self::Result(value.to_string())
    }

    /// The client's mistake.
    pub(crate) fn invalid(message: impl Into<String>) -> Self {
        Self::Error(-32602, message.into(), None)
    }

    /// The line that answers a request; none for silence.
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
            Self::Silence => None,
        }
    }
}

/// A notification's line.
pub(crate) fn notification(method: &str, params: &Value) -> String {
    if params.is_null() {
        return serde_json::json!({"jsonrpc": "2.0", "method": method}).to_string();
    }
    serde_json::json!({"jsonrpc": "2.0", "method": method, "params": params}).to_string()
}
