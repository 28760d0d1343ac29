//! What Docker's gateway sends, byte for byte as Go writes it, and what it must get.

use super::*;

/// What an answer is to the gateway.
#[derive(Debug, PartialEq)]
enum Heard {
    /// Nothing: it goes on.
    Pass,
    /// The result of a call that failed.
    Block(String),
    /// Another result.
    Replace(String),
}

impl Heard {
    #[track_caller]
    fn read(answer: &Answer) -> Self {
        assert_eq!(answer.status, StatusCode::OK);
        if answer.body.is_empty() {
            return Heard::Pass;
        }
        let value = answer.value();
        let text = value["content"][0]["text"].as_str().unwrap();
        match text.strip_prefix("Blocked by policy: ") {
            Some(why) => {
                assert_eq!(value["isError"], true);
                assert_eq!(value["content"][0]["type"], "text");
                Heard::Block(why.to_owned())
            }
            None => Heard::Replace(answer.body.clone()),
        }
    }
}

const POLICY: &str = r#"
default decision := {"action": "allow"}

decision := {"action": "block", "reason": "no deleting"} if {
	input.moment == "before"
	startswith(input.name, "delete")
}

decision := {"action": "block", "reason": "not there"} if {
	input.moment == "before"
	not startswith(input.name, "delete")
	startswith(input.params.arguments.path, "/etc")
}

decision := {"action": "redact", "outputs": {"redaction_rules": {"replacements": {"[a-z]+@example\\.com": "<mail>"}}}} if {
	input.moment == "after"
	not input.result.isError
	contains(json.marshal(input.result), "@example.com")
}

decision := {"action": "block", "reason": "odd"} if {
	input.moment == "after"
	input.result.isError
}
"#;

#[tokio::test]
async fn the_gateways_hooks_get_what_it_understands() {
    let (interceptor, _) = interceptor(POLICY);
    let block = |why: &str| Heard::Block(why.to_owned());
    let cannot = "The message cannot be read in one way only, so no policy can judge it.";
    for (body, wanted) in [
        // The newer shape.
        (
            r#"{"method":"tools/call","params":{"name":"search","arguments":{"query":"hello","options":{"limit":3},"enabled":false},"_meta":{"progressToken":"progress-1"}}}"#,
            Heard::Pass,
        ),
        (
            r#"{"method":"tools/call","params":{"name":"delete_file","arguments":{"path":"x"}}}"#,
            block("no deleting"),
        ),
        (
            r#"{"method":"tools/call","params":{"name":"read","arguments":{"path":"/etc/passwd"}}}"#,
            block("not there"),
        ),
        (r#"{"method":"tools/call","params":{}}"#, Heard::Pass),
        (r#"{"method":"tools/call","params":null}"#, Heard::Pass),
        // The older one, with Go's names.
        (
            r#"{"Session":{},"Params":{"name":"search","arguments":{"query":"hello"}},"Extra":null}"#,
            Heard::Pass,
        ),
        (
            r#"{"Session":null,"Params":{"_meta":{"progressToken":1},"name":"delete_file","arguments":{}},"Extra":{"TokenInfo":null,"Header":{"Authorization":["Bearer x"]}}}"#,
            block("no deleting"),
        ),
        // The gateway's own tool that calls another.
        (
            r#"{"method":"tools/call","params":{"name":"mcp-exec","arguments":{"name":"delete_file","arguments":{"path":"x"}}}}"#,
            block("no deleting"),
        ),
        (
            r#"{"method":"tools/call","params":{"name":"mcp-exec","arguments":{"name":"read","arguments":"{\"path\":\"/etc/shadow\"}"}}}"#,
            block("not there"),
        ),
        (
            r#"{"Session":{},"Params":{"name":"mcp-exec","arguments":{"name":"search","arguments":"{\"query\":\"x\"}"}},"Extra":null}"#,
            Heard::Pass,
        ),
        (
            r#"{"method":"tools/call","params":{"name":"mcp-exec","arguments":{"name":"search"}}}"#,
            Heard::Pass,
        ),
        (
            r#"{"method":"tools/call","params":{"name":"mcp-exec","arguments":{"arguments":{}}}}"#,
            block(cannot),
        ),
        (
            r#"{"method":"tools/call","params":{"name":"mcp-exec","arguments":{"name":"read","arguments":"not json"}}}"#,
            block(cannot),
        ),
        // Names with the server's in front.
        (
            r#"{"method":"tools/call","params":{"name":"fs__delete_file","arguments":{}}}"#,
            block("no deleting"),
        ),
        (
            r#"{"method":"tools/call","params":{"name":"fs__mcp-exec","arguments":{"name":"fs__delete_file","arguments":{}}}}"#,
            block("no deleting"),
        ),
        // What is none of it is no yes.
        (r#"{}"#, block("the call is missing")),
        ("null", block("the call is missing")),
        (
            r#"{"method":7,"params":{"name":"search"}}"#,
            block("the method is no text"),
        ),
        (
            r#"{"params":{"name":"search"},"Params":{"name":"delete_file"}}"#,
            block("the call is there twice"),
        ),
        (
            r#"{"method":"tools/call","params":{"name":"search","name":"delete_file"}}"#,
            block(cannot),
        ),
        (
            r#"{"method":"tools/call","params":{"name":"search","Name":"delete_file"}}"#,
            block(cannot),
        ),
    ] {
        let answer = before(&interceptor, body).await;
        assert_eq!(Heard::read(&answer), wanted, "{body}");
    }
    let replace = |text: &str| Heard::Replace(text.to_owned());
    for (body, wanted) in [
        ("null", Heard::Pass),
        ("null\n", Heard::Pass),
        (
            r#"{"content":[{"type":"text","text":"fine"}]}"#,
            Heard::Pass,
        ),
        (r#"{"content":[]}"#, Heard::Pass),
        (
            r#"{"content":null,"structuredContent":{"type":"x","version":1}}"#,
            Heard::Pass,
        ),
        (
            r#"{"_meta":{"k":1},"content":[{"type":"text","text":"<\u003e anna@example.com"}],"structuredContent":{"n":123456789012345678901234567890}}"#,
            replace(
                r#"{"_meta":{"k":1},"content":[{"type":"text","text":"<> <mail>"}],"structuredContent":{"n":123456789012345678901234567890}}"#,
            ),
        ),
        (
            r#"{"content":[{"type":"text","text":"boom"}],"isError":true}"#,
            block("odd"),
        ),
        (
            r#"{"content":[{"type":"text","text":"a","text":"b"}]}"#,
            block(cannot),
        ),
    ] {
        let answer = after(&interceptor, body).await;
        assert_eq!(Heard::read(&answer), wanted, "{body}");
    }
}

#[tokio::test]
async fn a_policy_that_cannot_decide_is_a_no_that_the_gateway_hears() {
    let (interceptor, _) = interceptor("decision := 1");
    let call = r#"{"method":"tools/call","params":{"name":"search"}}"#;
    let wanted = Heard::Block(Reason::RegoError.says().to_owned());
    assert_eq!(Heard::read(&before(&interceptor, call).await), wanted);
    let result = r#"{"content":[]}"#;
    assert_eq!(Heard::read(&after(&interceptor, result).await), wanted);
}
