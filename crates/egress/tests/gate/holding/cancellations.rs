//! Holds that end without an answer, and the resources that they release.

use policy::reason::Reason;
use policy::verdict::VerdictKind;
use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream};

use super::fixture::{Gate, Rules, get_request, upload_head};
use crate::fakes::sandbox_id;

/// Length of a body that is too large to be kept in memory.
const LARGE_BODY: usize = 300 * 1024;

/// Requests that need approval: the first without a body, the second with a body that is spooled to
/// disk.
fn requests() -> [Vec<u8>; 2] {
    let upload = [
        upload_head("asked.example", LARGE_BODY),
        vec![b'x'; LARGE_BODY],
    ]
    .concat();
    [get_request("asked.example", "/"), upload]
}

/// Reads what the client receives until the connection ends.
async fn read_rest(mut client: DuplexStream) -> String {
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
        gate.wait_for_held(if request.len() > LARGE_BODY { 1 } else { 0 })
            .await;
        drop(client);
        open.wait_until_withdrawn().await;
        gate.assert_nothing_held().await;
        // The policy asked for approval, and the record has no other decision.
        let ask_record = (
            Some(VerdictKind::Ask),
            None,
            Some("egress.unknown".to_owned()),
        );
        assert_eq!(gate.only_record().await, ask_record);
        assert_eq!(gate.origin.connections(), 0);
    }
}

#[tokio::test]
async fn removal_of_the_sandbox_ends_its_holds() {
    for request in requests() {
        let gate = Gate::new(&Rules::default());
        let client = gate.connect_and_send(&request).await;
        let open = gate.operator.next_question().await;
        gate.services.remove_sandbox(&sandbox_id());
        open.wait_until_withdrawn().await;
        let answer = read_rest(client).await;
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
        let answer = read_rest(client).await;
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

/// Sends half of an upload that needs approval, and waits until the gate has read that half.
async fn send_half_of_an_upload(gate: &Gate) -> DuplexStream {
    let mut client = gate
        .connect_and_send(&upload_head("asked.example", 2 * LARGE_BODY))
        .await;
    client.write_all(&vec![b'x'; LARGE_BODY]).await.unwrap();
    gate.wait_for_held(1).await;
    assert!(gate.operator.is_idle(), "the question comes after the body");
    client
}

#[tokio::test]
async fn sandbox_removal_ends_a_request_whose_body_is_incomplete() {
    let gate = Gate::new(&Rules::default());
    let mut client = send_half_of_an_upload(&gate).await;
    gate.services.remove_sandbox(&sandbox_id());
    // The client sends nothing more and stays connected.
    gate.assert_nothing_held().await;
    let mut status = [0; 12];
    client.read_exact(&mut status).await.unwrap();
    assert_eq!(&status, b"HTTP/1.1 403");
    assert_eq!(gate.only_record().await.1, Some(Reason::IdentityUnknown));
}

#[tokio::test]
async fn client_disconnect_during_an_upload_releases_its_resources() {
    let gate = Gate::new(&Rules::default());
    drop(send_half_of_an_upload(&gate).await);
    gate.assert_nothing_held().await;
    assert_eq!(gate.only_record().await.0, Some(VerdictKind::Deny));
    assert!(gate.operator.is_idle());
}
