//! A half-open circuit breaker while other requests end or wait before they reach the upstream.

use policy::breaker::BreakerState;
use testkit::origin::OriginReply;
use testkit::wait::eventually;
use tokio::io::AsyncWriteExt;

use super::fixture::{Gate, Rules, get_request};
use super::operator::ALLOW;

/// A policy that requires approval for one path and allows all others.
const ASK: &str = "package http.authz\n\ndecision := {\"allow\": true} if input.path != \"/ask\"\n\n\
                   decision := {\"action\": \"ask\"} if input.path == \"/ask\"\n";

/// One failure opens the breaker, and 50 ms later one request may probe. A lost probe occupies the
/// breaker for a second.
const LIMITS: &str = "circuit_breakers:\n  defaults: {failure_threshold: 1, \
                      recovery_timeout: 50ms, success_threshold: 1}\n";

/// A gate whose circuit breaker for `host` is half-open.
async fn half_open(host: &str, path: &str) -> Gate {
    let rules = Rules {
        domains: host.to_owned(),
        limits: LIMITS,
        egress: "  github: {allow: []}\n".to_owned(),
        ..Rules::with_bundle("mine", ASK)
    };
    let gate = Gate::with_replies(&rules, |request| match request.header("x-fail") {
        Some(_) => OriginReply::status(500),
        None => OriginReply::text("hello"),
    });
    let failing = String::from_utf8(get_request(host, path)).unwrap();
    let failing = failing.replace("Connection:", "X-Fail: yes\r\nConnection:");
    let failed = gate
        .spawn_request(failing.into_bytes())
        .await
        .await
        .unwrap();
    assert_eq!(failed.status, 500);
    eventually("a half-open breaker", || {
        let settings = &gate.services.policy().load().settings;
        let now = gate.services.clock().tick();
        let readings = gate.sandbox.upstreams.readings(settings, now);
        let state = readings.get(host)?.hosts?.state;
        (state == BreakerState::HalfOpen).then_some(())
    })
    .await;
    gate
}

#[tokio::test]
async fn held_request_does_not_occupy_a_half_open_breaker() {
    let gate = half_open("known.example", "/").await;
    let request_task = gate.spawn_get("known.example", "/ask").await;
    let open = gate.operator.next_question().await;
    let probe = gate.get("known.example", "/").await;
    assert_eq!((probe.status, probe.body.as_str()), (200, "hello"));
    open.answer(ALLOW);
    assert_eq!(request_task.await.unwrap().status, 200);
}

#[tokio::test]
async fn disconnected_client_does_not_occupy_a_half_open_breaker() {
    let (host, path) = ("api.github.com", "/repos/acme/app");
    let gate = half_open(host, path).await;
    let head = format!(
        "POST http://{host}/graphql HTTP/1.1\r\nHost: {host}\r\nContent-Length: 1000000\r\n\r\n"
    );
    let mut client = gate.connect_and_send(head.as_bytes()).await;
    // More than the buffers between the client and the reader of the body can hold.
    client.write_all(&vec![b' '; 400 * 1024]).await.unwrap();
    assert_eq!(gate.records().len(), 1);
    drop(client);
    eventually("the record of the disconnected client", || {
        (gate.records().len() == 2).then_some(())
    })
    .await;
    let probe = gate.get(host, path).await;
    assert_eq!((probe.status, probe.body.as_str()), (200, "hello"));
}
