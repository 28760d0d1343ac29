//! Tests of pending upgrades: after CONNECT or Upgrade no byte is parsed before the service
//! decides.

use std::future::poll_fn;

use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream, duplex};

use super::*;

const CONNECT: &str = "CONNECT a.test:443 HTTP/1.1\r\nHost: a.test:443\r\n\r\n";
const UPGRADE: &str = "GET /chat HTTP/1.1\r\nHost: a.test\r\nUpgrade: websocket\r\n\r\n";
/// A request with bare LF line ends, which is refused.
const BAD: &str = "GET / HTTP/1.1\nHost: a.test\n\n";
/// A valid request that follows another request.
const NEXT: &str = "GET /next HTTP/1.1\r\nHost: a.test\r\n\r\n";

async fn connection(bytes: &str) -> (DuplexStream, FramingGuard<DuplexStream>, GuardHandle) {
    let (mut client, server) = duplex(1 << 20);
    client.write_all(bytes.as_bytes()).await.unwrap();
    let (guard, guard_handle) = FramingGuard::new(server, HeadLimits::default());
    (client, guard, guard_handle)
}

async fn read(guard: &mut FramingGuard<DuplexStream>, length: usize) -> String {
    let mut bytes = vec![0; length];
    guard.read_exact(&mut bytes).await.unwrap();
    String::from_utf8(bytes).unwrap()
}

/// Asserts that no further byte is available now.
async fn assert_pending(guard: &mut FramingGuard<DuplexStream>) {
    let mut space = [0; 64];
    let poll = poll_fn(|cx| {
        let mut buf = ReadBuf::new(&mut space);
        Poll::Ready(Pin::new(&mut *guard).poll_read(cx, &mut buf).is_pending())
    });
    assert!(poll.await);
}

#[tokio::test]
async fn bytes_after_connect_are_held_until_it_is_refused() {
    let (_client, mut guard, guard_handle) = connection(&format!("{CONNECT}{NEXT}{BAD}")).await;
    assert_eq!(read(&mut guard, CONNECT.len()).await, CONNECT);
    assert_pending(&mut guard).await;
    guard_handle.resume(1);
    assert_pending(&mut guard).await;
    guard_handle.resume(0);
    assert_eq!(read(&mut guard, NEXT.len()).await, NEXT);
    assert_eq!(guard_handle.take_fault(1), None);
    let stand_in = read(&mut guard, STAND_IN.len()).await;
    assert_eq!(stand_in.as_bytes(), STAND_IN);
    assert_eq!(
        guard_handle.take_fault(2).unwrap().kind,
        FaultKind::BareLineFeed
    );
}

#[tokio::test]
async fn bytes_after_protocol_switch_are_passed_unchecked() {
    for head in [CONNECT, UPGRADE] {
        let (mut client, mut guard, guard_handle) = connection(&format!("{head}{BAD}")).await;
        assert_eq!(read(&mut guard, head.len()).await, head);
        assert_pending(&mut guard).await;
        guard_handle.upgrade(0);
        assert_eq!(read(&mut guard, BAD.len()).await, BAD);
        client.write_all(b"\0raw").await.unwrap();
        assert_eq!(read(&mut guard, 4).await, "\0raw");
        assert_eq!(guard_handle.take_fault(0), None);
        // A raw connection stays raw.
        guard_handle.resume(0);
        client.write_all(BAD.as_bytes()).await.unwrap();
        assert_eq!(read(&mut guard, BAD.len()).await, BAD);
    }
}

#[tokio::test]
async fn into_inner_returns_connection_and_held_bytes() {
    let (mut client, mut guard, _faults) = connection(&format!("{CONNECT}{BAD}")).await;
    assert_eq!(read(&mut guard, CONNECT.len()).await, CONNECT);
    let (mut io, held) = guard.into_inner();
    client.write_all(b"more").await.unwrap();
    drop(client);
    let mut rest = held.to_vec();
    io.read_to_end(&mut rest).await.unwrap();
    assert_eq!(rest, format!("{BAD}more").as_bytes());
}

#[tokio::test]
async fn upgrade_decision_wakes_waiting_reader() {
    for (head, upgrade) in [(CONNECT, true), (CONNECT, false), (UPGRADE, false)] {
        let (_client, mut guard, guard_handle) = connection(&format!("{head}{NEXT}")).await;
        assert_eq!(read(&mut guard, head.len()).await, head);
        let (ready, is_ready) = tokio::sync::oneshot::channel();
        let reader = tokio::spawn(async move {
            assert_pending(&mut guard).await;
            ready.send(()).unwrap();
            read(&mut guard, NEXT.len()).await
        });
        is_ready.await.unwrap();
        if upgrade {
            guard_handle.upgrade(0);
        } else {
            guard_handle.resume(0);
        }
        assert_eq!(reader.await.unwrap(), NEXT);
    }
}

#[tokio::test]
async fn upgrade_decision_for_another_request_is_ignored() {
    let (_client, mut guard, guard_handle) = connection(&format!("{NEXT}{UPGRADE}{BAD}")).await;
    let length = NEXT.len() + UPGRADE.len();
    read(&mut guard, length).await;
    // The service answers the first request when the second has been read already.
    guard_handle.resume(0);
    guard_handle.upgrade(0);
    assert_pending(&mut guard).await;
    guard_handle.resume(1);
    read(&mut guard, STAND_IN.len()).await;
    assert_eq!(
        guard_handle.take_fault(2).unwrap().kind,
        FaultKind::BareLineFeed
    );
}

#[tokio::test]
async fn body_of_upgrade_request_is_checked() {
    let head = UPGRADE.replace("\r\n\r\n", "\r\nContent-Length: 3\r\n\r\nab");
    let (mut client, mut guard, guard_handle) = connection(&head).await;
    assert_eq!(read(&mut guard, head.len()).await, head);
    // A decision before the end of the body takes effect at its end.
    guard_handle.resume(0);
    client
        .write_all(format!("c{NEXT}").as_bytes())
        .await
        .unwrap();
    let rest = read(&mut guard, 1 + NEXT.len()).await;
    assert_eq!(rest, format!("c{NEXT}"));
}

#[tokio::test]
async fn upgrade_in_http_1_0_is_ignored() {
    let old = UPGRADE.replace("HTTP/1.1", "HTTP/1.0");
    let (_client, mut guard, _faults) = connection(&format!("{old}{NEXT}")).await;
    let both = read(&mut guard, old.len() + NEXT.len()).await;
    assert_eq!(both, format!("{old}{NEXT}"));
}

#[tokio::test]
async fn pending_upgrade_detects_closed_client_and_limits_held_bytes() {
    let (client, mut guard, _faults) = connection(CONNECT).await;
    assert_eq!(read(&mut guard, CONNECT.len()).await, CONNECT);
    assert_pending(&mut guard).await;
    drop(client);
    let mut rest = Vec::new();
    guard.read_to_end(&mut rest).await.unwrap();
    assert!(rest.is_empty());

    let flood = "x".repeat(300_000);
    let (_client, mut guard, _faults) = connection(&format!("{CONNECT}{flood}")).await;
    read(&mut guard, CONNECT.len()).await;
    assert_pending(&mut guard).await;
    assert!(guard.held.len() <= HeadLimits::default().head + 64);
    let (mut io, held) = guard.into_inner();
    let mut rest = vec![0; flood.len() - held.len()];
    io.read_exact(&mut rest).await.unwrap();
    assert!(rest.iter().chain(&held).all(|byte| *byte == b'x'));
}

#[tokio::test]
async fn bytes_after_a_fault_are_drained_before_close() {
    // Unread bytes would make the kernel send a reset instead of an orderly close.
    let (client, mut guard, _faults) = connection(&format!("{BAD}{}", NEXT.repeat(500))).await;
    read(&mut guard, STAND_IN.len()).await;
    guard.shutdown().await.unwrap();
    drop(client);
    let (mut io, held) = guard.into_inner();
    let mut rest = held.to_vec();
    io.read_to_end(&mut rest).await.unwrap();
    assert!(rest.is_empty(), "{} bytes are left", rest.len());
}
