//! Hook requests of Docker's gateway, byte for byte as its Go code writes them, and the
//! responses that it must get.

use super::*;

/// A response as the gateway interprets it.
#[derive(Debug, PartialEq)]
enum GatewayView {
    /// An empty body: the call or the result passes.
    Pass,
    /// The result of a failed call.
    Block(String),
    /// A different result.
    Replace(String),
}

impl GatewayView {
    #[track_caller]
    fn read(answer: &HookResponse) -> Self {
        assert_eq!(answer.status, StatusCode::OK);
        if answer.body.is_empty() {
            return GatewayView::Pass;
        }
        let value = answer.value();
        let text = value["content"][0]["text"].as_str().unwrap();
        match text.strip_prefix("Blocked by policy: ") {
            Some(why) => {
                assert_eq!(value["isError"], true);
                assert_eq!(value["content"][0]["type"], "text");
                GatewayView::Block(why.to_owned())
            }
            None => GatewayView::Replace(answer.body.clone()),
        }
    }
}

/// A policy that blocks some calls and results, and redacts mail addresses in results.
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
async fn docker_hooks_get_responses_the_gateway_understands() {
    let (interceptor, _) = interceptor(POLICY);
    let block = |why: &str| GatewayView::Block(why.to_owned());
    let cannot = "The message is malformed or ambiguous JSON, so no policy can evaluate it.";
    for (body, wanted) in [
        // Newer versions of the gateway.
        (
            r#"{"method":"tools/call","params":{"name":"search","arguments":{"query":"hello","options":{"limit":3},"enabled":false},"_meta":{"progressToken":"progress-1"}}}"#,
            GatewayView::Pass,
        ),
        (
            r#"{"method":"tools/call","params":{"name":"delete_file","arguments":{"path":"x"}}}"#,
            block("no deleting"),
        ),
        (
            r#"{"method":"tools/call","params":{"name":"read","arguments":{"path":"/etc/passwd"}}}"#,
            block("not there"),
        ),
        (r#"{"method":"tools/call","params":{}}"#, GatewayView::Pass),
        (
            r#"{"method":"tools/call","params":null}"#,
            GatewayView::Pass,
        ),
        // Older versions, with Go's field names.
        (
            r#"{"Session":{},"Params":{"name":"search","arguments":{"query":"hello"}},"Extra":null}"#,
            GatewayView::Pass,
        ),
        (
            r#"{"Session":null,"Params":{"_meta":{"progressToken":1},"name":"delete_file","arguments":{}},"Extra":{"TokenInfo":null,"Header":{"Authorization":["Bearer x"]}}}"#,
            block("no deleting"),
        ),
        // The gateway's own tool that calls another tool.
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
            GatewayView::Pass,
        ),
        (
            r#"{"method":"tools/call","params":{"name":"mcp-exec","arguments":{"name":"search"}}}"#,
            GatewayView::Pass,
        ),
        (
            r#"{"method":"tools/call","params":{"name":"mcp-exec","arguments":{"arguments":{}}}}"#,
            block(cannot),
        ),
        (
            r#"{"method":"tools/call","params":{"name":"mcp-exec","arguments":{"name":"read","arguments":"not json"}}}"#,
            block(cannot),
        ),
        // Names with the server's prefix.
        (
            r#"{"method":"tools/call","params":{"name":"fs__delete_file","arguments":{}}}"#,
            block("no deleting"),
        ),
        (
            r#"{"method":"tools/call","params":{"name":"fs__mcp-exec","arguments":{"name":"fs__delete_file","arguments":{}}}}"#,
            block("no deleting"),
        ),
        // Bodies that are no call are refused.
        (r#"{}"#, block("the call is missing")),
        ("null", block("the call is missing")),
        (
            r#"{"method":7,"params":{"name":"search"}}"#,
            block("the method is not a string"),
        ),
        (
            r#"{"params":{"name":"search"},"Params":{"name":"delete_file"}}"#,
            block("the call has both params and Params"),
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
        assert_eq!(GatewayView::read(&answer), wanted, "{body}");
    }
    let replace = |text: &str| GatewayView::Replace(text.to_owned());
    for (body, wanted) in [
        ("null", GatewayView::Pass),
        ("null\n", GatewayView::Pass),
        (
            r#"{"content":[{"type":"text","text":"fine"}]}"#,
            GatewayView::Pass,
        ),
        (r#"{"content":[]}"#, GatewayView::Pass),
        (
            r#"{"content":null,"structuredContent":{"type":"x","version":1}}"#,
            GatewayView::Pass,
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
        assert_eq!(GatewayView::read(&answer), wanted, "{body}");
    }
}

#[tokio::test]
async fn failing_policy_is_a_block_for_the_docker_gateway() {
    let (interceptor, _) = interceptor("decision := 1");
    let call = r#"{"method":"tools/call","params":{"name":"search"}}"#;
    let wanted = GatewayView::Block(Reason::RegoError.description().to_owned());
    assert_eq!(GatewayView::read(&before(&interceptor, call).await), wanted);
    let result = r#"{"content":[]}"#;
    assert_eq!(
        GatewayView::read(&after(&interceptor, result).await),
        wanted
    );
}
