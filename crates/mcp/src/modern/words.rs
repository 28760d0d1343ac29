//! What one era says, in the words of the other.

use std::collections::BTreeMap;

use serde_json::Value;

use super::request::{ENVELOPE, Refused};
use crate::rpc::{self, Fields, Message};

/// Where a server of the era before may say by which name it wants to be answered.
pub(super) const INPUT_KEY: &str = "palisade/inputKey";

/// Progress under the token that the client knows now, where it wants to hear of it.
pub(super) fn retold(progress: &Message, given: Option<&str>, now: Option<&str>) -> Option<String> {
    let read = |raw: &str| serde_json::from_str::<Value>(raw).ok();
    let about = progress.param(&["progressToken"]).and_then(read)?;
    if given.and_then(read)? != about {
        return None;
    }
    Some(progress.with_param(&["progressToken"], now?))
}

/// The client's answers, as written.
pub(super) fn read_given(message: &Message) -> Result<BTreeMap<String, String>, Refused> {
    let Some(raw) = message.param(&["inputResponses"]) else {
        return Ok(BTreeMap::new());
    };
    let bad = || Refused::params("Invalid inputResponses");
    let fields: Fields<'_> = serde_json::from_str(raw).map_err(|_| bad())?;
    let mut given = BTreeMap::new();
    for (key, value) in fields.0 {
        let answer = value.get();
        let twice = given.insert(key.into_owned(), answer.to_owned()).is_some();
        if twice || !answer.starts_with('{') {
            return Err(bad());
        }
    }
    Ok(given)
}

/// The request as the era before writes it, under another id. A server may refuse what it
/// finds of this era, as those of the Python SDK do.
pub(super) fn in_old_words(message: &Message, id: &str) -> Result<String, Refused> {
    let Some(params) = message.params() else {
        return Ok(message.with_id(id));
    };
    let mut params = without(params, &["inputResponses", "requestState"]);
    if let Some(place) = rpc::find(&params, 0..params.len(), &["_meta"]) {
        let meta = without(params.get(place.clone()).unwrap_or_default(), &ENVELOPE);
        params = match meta.as_str() {
            "{}" => without(&params, &["_meta"]),
            meta => rpc::splice(&params, place, meta),
        };
    }
    let old = Message::read(message.with_params(&params));
    let old = old.map_err(|bad| Refused::params(bad.to_string()))?;
    Ok(old.with_id(id))
}

/// The object without the fields of those names.
fn without(object: &str, names: &[&str]) -> String {
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

/// A question's parameters without the name that was for the bridge.
pub(super) fn without_key(params: &str) -> String {
    let Some(place) = rpc::find(params, 0..params.len(), &["_meta"]) else {
        return params.to_owned();
    };
    let meta = params.get(place.clone()).unwrap_or_default();
    let meta = without(meta, &[INPUT_KEY]);
    if meta == "{}" {
        return without(params, &["_meta"]);
    }
    rpc::splice(params, place, &meta)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_for_the_bridge_is_taken_out() {
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
            assert_eq!(without_key(params), expected);
        }
    }

    #[test]
    fn progress_is_told_under_the_token_of_the_last_request() {
        let told = |given, now| {
            let text = r#"{"progress":0.50,"progressToken":"t\u00e9"}"#;
            let text = Message::notification("notifications/progress", text);
            retold(&Message::read(text).unwrap(), given, now)
        };
        let expected = |token: &str| {
            let params = format!(r#"{{"progress":0.50,"progressToken":{token}}}"#);
            Some(Message::notification("notifications/progress", &params))
        };
        assert_eq!(told(Some("\"té\""), Some("7")), expected("7"));
        assert_eq!(told(Some("\"té\""), Some("\"té\"")), expected("\"té\""));
        assert_eq!(told(Some("\"té\""), None), None);
        assert_eq!(told(Some("7"), Some("7")), None);
        assert_eq!(told(None, Some("7")), None);
    }

    #[test]
    fn a_server_of_the_era_before_is_asked_in_its_own_words() {
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
            let message = Message::request("1", "tools/call", &params);
            let message = Message::read(message).unwrap();
            let expected = Message::request("9", "tools/call", expected);
            assert_eq!(in_old_words(&message, "9"), Ok(expected));
        }
    }

    #[test]
    fn answers_are_objects_under_different_names() {
        let read = |given: &str| {
            let text = Message::request(
                "1",
                "tools/call",
                &format!(r#"{{"inputResponses":{given}}}"#),
            );
            read_given(&Message::read(text).unwrap()).map(|given| given.len())
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
