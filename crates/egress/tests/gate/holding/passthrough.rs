//! Held TLS passthrough connections. Their clients wait in the handshake, so the hold is short.

use std::time::Duration;

use policy::answer::ApprovalAnswer;
use policy::host::Host;
use policy::reason::Reason;
use policy::verdict::VerdictKind;
use testkit::origin::{OriginReply, OriginServer};
use testkit::wait::eventually;
use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream};
use tokio::time::{Instant, sleep};

use super::fixture::{Gate, Rules};
use super::operator::ALLOW;
use crate::fakes::{connect, sandbox_id};
use crate::rego::client_hello;

const HOST: &str = "pinned.example";

/// Opens a connection to the host and sends the TLS ClientHello.
async fn connect_with_hello(gate: &Gate) -> DuplexStream {
    let tunnel = (Host::parse(HOST).unwrap(), 443);
    let mut client = connect(&gate.services, Some(tunnel));
    client.write_all(&client_hello(HOST)).await.unwrap();
    client
}

/// Reads to the end of a connection to which nothing may have been written.
async fn assert_closed(mut client: DuplexStream) {
    let mut received = Vec::new();
    drop(client.read_to_end(&mut received).await);
    assert_eq!(received, b"");
}

#[tokio::test(start_paused = true)]
async fn passthrough_connection_is_held_ten_seconds_at_most() {
    let gate = Gate::new(&Rules::default());
    let started = Instant::now();
    let client = connect_with_hello(&gate).await;
    let open = gate.operator.next_question().await;
    assert_closed(client).await;
    assert_eq!(started.elapsed().as_secs(), 10);
    open.wait_until_withdrawn().await;
    let timed_out = (Some(VerdictKind::Deny), Some(Reason::AskTimeout));
    let (verdict, reason, rule) = gate.only_record().await;
    assert_eq!((verdict, reason), timed_out);
    assert_eq!(rule.as_deref(), Some("egress.unknown"));
    assert_eq!(gate.origin.connections(), 0);
    gate.assert_nothing_held().await;
}

#[tokio::test(start_paused = true)]
async fn reload_does_not_prolong_the_hold_of_a_passthrough_connection() {
    let gate = Gate::new(&Rules::default());
    let started = Instant::now();
    let client = connect_with_hello(&gate).await;
    let first = gate.operator.next_question().await;
    sleep(Duration::from_secs(9)).await;
    gate.reload(&Rules::default());
    let second = gate.operator.next_question().await;
    first.wait_until_withdrawn().await;
    assert_closed(client).await;
    assert_eq!(started.elapsed().as_secs(), 10);
    second.wait_until_withdrawn().await;
    assert_eq!(gate.only_record().await.1, Some(Reason::AskTimeout));
}

#[tokio::test]
async fn passthrough_connection_follows_the_operators_answer() {
    let origin = OriginServer::raw(|mut stream, _| {
        let mut bytes = [0; 5];
        std::io::Read::read_exact(&mut stream, &mut bytes).unwrap();
        std::io::Write::write_all(&mut stream, &bytes).unwrap();
    });
    let gate = Gate::with_origin(tempfile::tempdir().unwrap(), &Rules::default(), origin);
    let client = connect_with_hello(&gate).await;
    gate.operator
        .next_question()
        .await
        .answer(ApprovalAnswer::Deny);
    assert_closed(client).await;
    assert_eq!(gate.only_record().await.1, Some(Reason::AskDenied));
    assert_eq!(gate.origin.connections(), 0);

    let mut client = connect_with_hello(&gate).await;
    // Bytes that the client sends during the hold are forwarded too.
    client.write_all(b"early").await.unwrap();
    let open = gate.operator.next_question().await;
    assert_eq!(gate.sandbox.in_flight.held(), 1);
    open.answer(ALLOW);
    let mut echoed = [0; 5];
    client.read_exact(&mut echoed).await.unwrap();
    assert_eq!(echoed, client_hello(HOST)[..5]);
    drop(client);
    let records = eventually("a second record", || {
        let records = gate.records();
        (records.len() == 2).then_some(records)
    })
    .await;
    assert_eq!(records[1].verdict, Some(VerdictKind::Allow));
    let sent = u64::try_from(client_hello(HOST).len()).unwrap() + 5;
    assert_eq!(records[1].bytes_in, sent);
    gate.assert_nothing_held().await;
}

// The clock is paused, so the hold cannot have timed out.
#[tokio::test(start_paused = true)]
async fn client_disconnect_ends_the_hold_of_a_passthrough_connection() {
    let gate = Gate::new(&Rules::default());
    let started = Instant::now();
    let client = connect_with_hello(&gate).await;
    let open = gate.operator.next_question().await;
    drop(client);
    open.wait_until_withdrawn().await;
    assert_eq!(started.elapsed().as_secs(), 0);
    gate.assert_nothing_held().await;
    let (verdict, reason, _) = gate.only_record().await;
    assert_eq!(
        (verdict, reason),
        (Some(VerdictKind::Ask), Some(Reason::ClientLeft))
    );
}

#[tokio::test(start_paused = true)]
async fn sandbox_removal_ends_the_hold_of_a_passthrough_connection() {
    let gate = Gate::with_replies(&Rules::default(), |_| OriginReply::text("hello"));
    let started = Instant::now();
    let client = connect_with_hello(&gate).await;
    let open = gate.operator.next_question().await;
    gate.services.remove_sandbox(&sandbox_id());
    open.wait_until_withdrawn().await;
    assert_closed(client).await;
    assert_eq!(started.elapsed().as_secs(), 0);
    assert_eq!(gate.only_record().await.1, Some(Reason::IdentityUnknown));
    gate.assert_nothing_held().await;
}
