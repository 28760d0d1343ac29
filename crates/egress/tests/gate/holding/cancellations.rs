//! What ends a hold without an answer, and what it gives back then.

use policy::reason::Reason;
use policy::verdict::VerdictKind;
use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream};

use super::fixture::{Gate, Rules, get_request, upload_head};
use crate::fakes::sandbox_id;

/// More than is kept in memory.
const LARGE: usize = 300 * 1024;

/// Requests that the rules ask about: one without a body, and one whose body waits on disk.
fn requests() -> [Vec<u8>; 2] {
    let upload = [upload_head("asked.example", LARGE), vec![b'x'; LARGE]].concat();
    [get_request("asked.example", "/"), upload]
}

/// All that the client is still answered.
async fn rest(mut client: DuplexStream) -> String {
    let mut text = String::new();
    client.read_to_string(&mut text).await.unwrap();
    text
}

#[tokio::test]
async fn client_that_hangs_up_ends_its_hold() {
    for request in requests() {
        let gate = Gate::new(&Rules::default());
        let client = gate.connect_and_send(&request).await;
        let open = gate.operator.next_question().await;
        gate.wait_for_held(if request.len() > LARGE { 1 } else { 0 })
            .await;
        drop(client);
        open.wait_until_withdrawn().await;
        gate.assert_nothing_held().await;
        // The rules asked, and nothing else was decided.
        let asked = (
            Some(VerdictKind::Ask),
            None,
            Some("egress.unknown".to_owned()),
        );
        assert_eq!(gate.only_record().await, asked);
        assert_eq!(gate.origin.connections(), 0);
    }
}

#[tokio::test]
async fn dismissal_of_the_sandbox_ends_its_holds() {
    for request in requests() {
        let gate = Gate::new(&Rules::default());
        let client = gate.connect_and_send(&request).await;
        let open = gate.operator.next_question().await;
        gate.services.remove_sandbox(&sandbox_id());
        open.wait_until_withdrawn().await;
        let answer = rest(client).await;
        assert!(answer.contains("identity_unknown"), "{answer}");
        gate.assert_nothing_held().await;
        let (verdict, reason, _) = gate.only_record().await;
        let refused = (Some(VerdictKind::Deny), Some(Reason::IdentityUnknown));
        assert_eq!((verdict, reason), refused);
        assert_eq!(gate.origin.connections(), 0);
    }
}

#[tokio::test]
async fn stop_of_the_gate_ends_every_hold() {
    for request in requests() {
        let gate = Gate::new(&Rules::default());
        let client = gate.connect_and_send(&request).await;
        let open = gate.operator.next_question().await;
        gate.services.finish().await;
        open.wait_until_withdrawn().await;
        let answer = rest(client).await;
        assert!(answer.starts_with("HTTP/1.1 500 "), "{answer}");
        assert!(answer.contains("The gate is stopping"), "{answer}");
        gate.assert_nothing_held().await;
        let (verdict, reason, _) = gate.only_record().await;
        assert_eq!(
            (verdict, reason),
            (Some(VerdictKind::Deny), Some(Reason::Internal))
        );
        assert_eq!(gate.origin.connections(), 0);
    }
}

/// Half of an upload that the rules ask about, while the gate reads it.
async fn half_an_upload(gate: &Gate) -> DuplexStream {
    let mut client = gate
        .connect_and_send(&upload_head("asked.example", 2 * LARGE))
        .await;
    client.write_all(&vec![b'x'; LARGE]).await.unwrap();
    gate.wait_for_held(1).await;
    assert!(gate.operator.is_idle(), "the question comes after the body");
    client
}

#[tokio::test]
async fn dismissal_ends_a_request_whose_body_is_still_read() {
    let gate = Gate::new(&Rules::default());
    let mut client = half_an_upload(&gate).await;
    gate.services.remove_sandbox(&sandbox_id());
    // The client sends nothing more, and does not leave either.
    gate.assert_nothing_held().await;
    let mut status = [0; 12];
    client.read_exact(&mut status).await.unwrap();
    assert_eq!(&status, b"HTTP/1.1 403");
    assert_eq!(gate.only_record().await.1, Some(Reason::IdentityUnknown));
}

#[tokio::test]
async fn client_that_leaves_while_its_body_is_read_leaves_nothing() {
    let gate = Gate::new(&Rules::default());
    drop(half_an_upload(&gate).await);
    gate.assert_nothing_held().await;
    assert_eq!(gate.only_record().await.0, Some(VerdictKind::Deny));
    assert!(gate.operator.is_idle());
}
