//! A half-open circuit breaker beside requests that do not get as far as their upstream.

use policy::breaker::BreakerState;
use testkit::origin::OriginReply;
use testkit::wait::eventually;
use tokio::io::AsyncWriteExt;

use super::fixture::{Gate, Rules, get_request};
use super::operator::ALLOW;

/// Asks about one path.
const ASK: &str = "package http.authz\n\ndecision := {\"allow\": true} if input.path != \"/ask\"\n\n\
                   decision := {\"action\": \"ask\"} if input.path == \"/ask\"\n";

/// One failure opens the breaker, and half a tenth of a second later one request may probe. A
/// probe that is lost keeps its place for a second.
const LIMITS: &str = "circuit_breakers:\n  defaults: {failure_threshold: 1, \
                      recovery_timeout: 50ms, success_threshold: 1}\n";

/// A gate whose breaker of `host` has opened and may be probed.
async fn half_open(host: &str, path: &str) -> Gate {
    let rules = Rules {
        domains: host.to_owned(),
        limits: LIMITS,
        egress: "  github: {allow: []}\n".to_owned(),
        ..Rules::with_bundle("mine", ASK)
    };
    let gate = Gate::with_replies(&rules, |asked| match asked.header("x-fail") {
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
async fn half_open_breaker_is_not_pinned_by_a_held_request() {
    let gate = half_open("known.example", "/").await;
    let request_task = gate.spawn_get("known.example", "/ask").await;
    let open = gate.operator.next_question().await;
    let probe = gate.get("known.example", "/").await;
    assert_eq!((probe.status, probe.body.as_str()), (200, "hello"));
    open.answer(ALLOW);
    assert_eq!(request_task.await.unwrap().status, 200);
}

#[tokio::test]
async fn half_open_breaker_is_not_pinned_by_a_leaving_client() {
    let (host, path) = ("api.github.com", "/repos/acme/app");
    let gate = half_open(host, path).await;
    let head = format!(
        "POST http://{host}/graphql HTTP/1.1\r\nHost: {host}\r\nContent-Length: 1000000\r\n\r\n"
    );
    let mut client = gate.connect_and_send(head.as_bytes()).await;
    // More than fits between the client and a reader of the body.
    client.write_all(&vec![b' '; 400 * 1024]).await.unwrap();
    assert_eq!(gate.records().len(), 1);
    drop(client);
    eventually("the record of the client that left", || {
        (gate.records().len() == 2).then_some(())
    })
    .await;
    let probe = gate.get(host, path).await;
    assert_eq!((probe.status, probe.body.as_str()), (200, "hello"));
}
