//! Translates messages between revision 2026-07-28 and the earlier revisions with sessions.

use std::collections::BTreeMap;

use serde_json::Value;

use super::request::{BRIDGE_META_KEYS, RequestError};
use crate::rpc::{self, Fields, RpcMessage};

/// Key of `_meta` in which a server of an earlier revision may name its `inputRequests` key.
pub(super) const INPUT_KEY: &str = "palisade/inputKey";

/// The progress notification with the token of the client's latest request. `None` if that request
/// has no token, or the notification is not about this call.
pub(super) fn with_client_token(
    progress: &RpcMessage,
    server_token: Option<&str>,
    client_token: Option<&str>,
) -> Option<String> {
    let read = |raw: &str| serde_json::from_str::<Value>(raw).ok();
    let about = progress.param(&["progressToken"]).and_then(read)?;
    if server_token.and_then(read)? != about {
        return None;
    }
    Some(progress.with_param(&["progressToken"], client_token?))
}

/// The client's `inputResponses`, each as its JSON text.
pub(super) fn read_input_responses(
    message: &RpcMessage,
) -> Result<BTreeMap<String, String>, RequestError> {
    let Some(raw) = message.param(&["inputResponses"]) else {
        return Ok(BTreeMap::new());
    };
    let invalid = || RequestError::invalid_params("Invalid inputResponses");
    let fields: Fields<'_> = serde_json::from_str(raw).map_err(|_| invalid())?;
    let mut responses = BTreeMap::new();
    for (key, value) in fields.0 {
        let answer = value.get();
        let is_duplicate = responses
            .insert(key.into_owned(), answer.to_owned())
            .is_some();
        if is_duplicate || !answer.starts_with('{') {
            return Err(invalid());
        }
    }
    Ok(responses)
}

/// The request as the earlier revisions write it, with the id `id`. Fields of revision 2026-07-28
/// are removed because servers may refuse them, as those of the Python SDK do.
pub(super) fn to_session_revision(message: &RpcMessage, id: &str) -> Result<String, RequestError> {
    let Some(params) = message.params() else {
        return Ok(message.with_id(id));
    };
    let mut params = without_fields(params, &["inputResponses", "requestState"]);
    if let Some(range) = rpc::find(&params, 0..params.len(), &["_meta"]) {
        let meta = without_fields(
            params.get(range.clone()).unwrap_or_default(),
            &BRIDGE_META_KEYS,
        );
        params = match meta.as_str() {
            "{}" => without_fields(&params, &["_meta"]),
            meta => rpc::splice(&params, range, meta),
        };
    }
    let old = RpcMessage::read(message.with_params(&params));
    let old = old.map_err(|bad| RequestError::invalid_params(bad.to_string()))?;
    Ok(old.with_id(id))
}

/// The JSON object without the fields `names`.
fn without_fields(object: &str, names: &[&str]) -> String {
    let Ok(fields) = serde_json::from_str::<Fields<'_>>(object) else {
        return object.to_owned();
    };
    if !fields
        .0
        .iter()
        .any(|(key, _)| names.contains(&key.as_ref()))
    {
        return object.to_owned();
    }
    let kept = fields
        .0
        .iter()
        .filter(|(key, _)| !names.contains(&key.as_ref()));
    let kept: Vec<_> = kept
        .map(|(key, value)| format!("{}:{}", rpc::quote(key), value.get()))
        .collect();
    format!("{{{}}}", kept.join(","))
}

/// The parameters of a server's request without [`INPUT_KEY`].
pub(super) fn without_input_key(params: &str) -> String {
    let Some(range) = rpc::find(params, 0..params.len(), &["_meta"]) else {
        return params.to_owned();
    };
    let meta = params.get(range.clone()).unwrap_or_default();
    let meta = without_fields(meta, &[INPUT_KEY]);
    if meta == "{}" {
        return without_fields(params, &["_meta"]);
    }
    rpc::splice(params, range, &meta)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn input_key_is_removed_from_the_parameters() {
        let cases = [
            (r#"{"message":"m"}"#, r#"{"message":"m"}"#),
            (
                r#"{"_meta":{"palisade/inputKey":"k"},"a":1.50}"#,
                r#"{"a":1.50}"#,
            ),
            (
                r#"{"a":1,"_meta":{"x":2,"palisade/inputKey":"k"}}"#,
                r#"{"a":1,"_meta":{"x":2}}"#,
            ),
            ("[1]", "[1]"),
        ];
        for (params, expected) in cases {
            assert_eq!(without_input_key(params), expected);
        }
    }

    #[test]
    fn progress_carries_the_token_of_the_latest_request() {
        let translate = |server_token, client_token| {
            let text = r#"{"progress":0.50,"progressToken":"t\u00e9"}"#;
            let text = RpcMessage::notification("notifications/progress", text);
            with_client_token(&RpcMessage::read(text).unwrap(), server_token, client_token)
        };
        let expected = |token: &str| {
            let params = format!(r#"{{"progress":0.50,"progressToken":{token}}}"#);
            Some(RpcMessage::notification("notifications/progress", &params))
        };
        assert_eq!(translate(Some("\"té\""), Some("7")), expected("7"));
        assert_eq!(
            translate(Some("\"té\""), Some("\"té\"")),
            expected("\"té\"")
        );
        assert_eq!(translate(Some("\"té\""), None), None);
        assert_eq!(translate(Some("7"), Some("7")), None);
        assert_eq!(translate(None, Some("7")), None);
    }

    #[test]
    fn request_is_translated_without_the_fields_of_2026_07_28() {
        let envelope = r#""io.modelcontextprotocol/protocolVersion":"2026-07-28","io.modelcontextprotocol/clientInfo":{},"io.modelcontextprotocol/clientCapabilities":{},"io.modelcontextprotocol/logLevel":"info""#;
        let cases = [
            (format!(r#"{{"_meta":{{{envelope}}}}}"#), "{}"),
            (
                format!(r#"{{"n":1.50,"_meta":{{"progressToken":7,{envelope},"x/y":[1]}}}}"#),
                r#"{"n":1.50,"_meta":{"progressToken":7,"x/y":[1]}}"#,
            ),
            (
                format!(
                    r#"{{"inputResponses":{{}},"n":1,"requestState":"s","_meta":{{{envelope}}}}}"#
                ),
                r#"{"n":1}"#,
            ),
            (r#"{"_meta":7}"#.to_owned(), r#"{"_meta":7}"#),
        ];
        for (params, expected) in cases {
            let message = RpcMessage::request("1", "tools/call", &params);
            let message = RpcMessage::read(message).unwrap();
            let expected = RpcMessage::request("9", "tools/call", expected);
            assert_eq!(to_session_revision(&message, "9"), Ok(expected));
        }
    }

    #[test]
    fn input_responses_must_be_objects_with_unique_keys() {
        let read = |responses: &str| {
            let text = RpcMessage::request(
                "1",
                "tools/call",
                &format!(r#"{{"inputResponses":{responses}}}"#),
            );
            read_input_responses(&RpcMessage::read(text).unwrap()).map(|responses| responses.len())
        };
        assert_eq!(read(r#"{"a":{},"b":{"x":1}}"#), Ok(2));
        for bad in [
            "null",
            "[]",
            "7",
            r#"{"a":1}"#,
            r#"{"a":{},"a":{}}"#,
            r#"{"a":null}"#,
        ] {
            assert!(read(bad).is_err(), "{bad}");
        }
    }
}
