//! MCP gateway in another container, simulated by curl in a network namespace: it calls the hooks
//! over the network and can send the token only in the URL.

use std::net::Ipv4Addr;
use std::process::Command;

use serde_json::{Value, json};
use testkit::http::HttpResponse;
use testkit::inside::NetNamespace;
use testkit::output;

use crate::bridge::Bridge;
use crate::hooks::refused;

const GATE_ADDRESS: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 1);
const GATEWAY_ADDRESS: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 2);
const TOKEN: &str = "a/token+of:the@operator";

/// The percent-encoded token.
const ENCODED: &str = "a%2Ftoken%2Bof%3Athe%40operator";

/// A policy that refuses one tool and redacts results.
const POLICY: &str = r#"
default decision := {"action": "allow"}
decision := {"action": "block", "reason": "no deleting"} if input.name == "delete"
decision := {"action": "redact", "outputs": {"redaction_rules": {"replacements": {"s3cret": "*"}}}} if input.moment == "after"
"#;

/// Posts to `http://CREDENTIALS@sidecars:8090/PATH` from the network namespace.
fn post(
    gateway: &NetNamespace,
    credentials: &str,
    path: &str,
    more: &[&str],
    body: &Value,
) -> HttpResponse {
    let url = format!("http://{credentials}sidecars:8090{path}");
    let mut curl = Command::new("curl");
    curl.env_clear()
        .env("PATH", std::env::var_os("PATH").unwrap())
        .args(["-sS", "--max-time", "30", "--noproxy", "*"])
        .arg("--resolve")
        .arg(format!("sidecars:8090:{GATE_ADDRESS}"))
        .args(["-w", "\n%{http_code}", "--data-binary"])
        .arg(body.to_string())
        .args(more)
        .arg(url);
    let output = gateway.within(|| curl.output().unwrap());
    assert!(output.status.success(), "{}", output::stderr(&output));
    let stdout = output::stdout(&output);
    let (body, status) = stdout.rsplit_once('\n').unwrap();
    HttpResponse {
        status: status.parse().unwrap(),
        head: Vec::new(),
        body: body.as_bytes().to_vec(),
    }
}

mod needs_root {
    use super::*;

    #[test]
    fn seed_000_gateway_in_another_namespace_presents_the_token() {
        if !testkit::require_root("two network namespaces") {
            return;
        }
        let [gate, gateway] = NetNamespace::pair([GATE_ADDRESS, GATEWAY_ADDRESS]);
        let bridge = Bridge::at_address((GATE_ADDRESS, 8090).into());
        let bridge = bridge
            .server(&format!("auth_token: \"{TOKEN}\""))
            .policy(POLICY)
            .fixture("fixture", &[]);
        let running = gate.within(|| bridge.start());
        let call =
            |name: &str| json!({"method": "tools/call", "params": {"name": name, "arguments": {}}});
        let result = |text: &str| json!({"content": [{"type": "text", "text": text}]});
        let token = format!("x:{ENCODED}@");
        let (before, after) = ("/intercept/before", "/intercept/after");

        let answer = post(&gateway, &token, before, &[], &call("read"));
        assert_eq!((answer.status, answer.text()), (200, String::new()));
        let answer = post(&gateway, &token, before, &[], &call("delete"));
        assert_eq!(answer.status, 200, "{}", answer.text());
        let blocked = result("Blocked by policy: no deleting");
        assert_eq!(answer.json()["content"], blocked["content"]);
        assert_eq!(answer.json()["isError"], true);
        let answer = post(&gateway, &token, after, &[], &result("fine"));
        assert_eq!((answer.status, answer.text()), (200, String::new()));
        let answer = post(&gateway, &token, after, &[], &result("a s3cret"));
        assert_eq!(answer.json(), result("a *"));
        let bearer = format!("Authorization: Bearer {TOKEN}");
        let answer = post(&gateway, "", before, &["-H", &bearer], &call("read"));
        assert_eq!((answer.status, answer.text()), (200, String::new()));

        // Docker's gateway treats an empty body as a pass, with any status.
        let user = format!("{ENCODED}:x@");
        for credentials in ["", "x:wrong@", "x:@", user.as_str()] {
            for (path, body) in [(before, call("read")), (after, result("a s3cret"))] {
                let answer = post(&gateway, credentials, path, &[], &body);
                assert_eq!(answer.status, 401, "{credentials}: {}", answer.text());
                assert!(refused(&answer).contains("token"), "{}", answer.text());
                assert!(!answer.text().contains(TOKEN));
            }
        }
        for (more, path, status) in [
            (&["-H", "Origin: http://page.example"][..], before, 403),
            (&["-H", "Sec-Fetch-Site: cross-site"], after, 403),
            (&["-X", "PUT"], before, 405),
            (&[], "/intercept/other", 404),
        ] {
            let answer = post(&gateway, &token, path, more, &call("read"));
            assert_eq!(answer.status, status, "{path}: {}", answer.text());
            refused(&answer);
        }
        let answer = post(&gateway, &token, before, &[], &json!("no call"));
        assert_eq!(answer.status, 400, "{}", answer.text());
        refused(&answer);
        assert!(!running.stderr().contains(TOKEN), "{}", running.stderr());
    }
}
