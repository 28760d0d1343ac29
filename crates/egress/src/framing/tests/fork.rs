//! After CONNECT and Upgrade: nothing is taken for a message before somebody said so.

use std::future::poll_fn;

use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream, duplex};

use super::*;

const CONNECT: &str = "CONNECT a.test:443 HTTP/1.1\r\nHost: a.test:443\r\n\r\n";
const UPGRADE: &str = "GET /chat HTTP/1.1\r\nHost: a.test\r\nUpgrade: websocket\r\n\r\n";
const BAD: &str = "GET / HTTP/1.1\nHost: a.test\n\n";
const NEXT: &str = "GET /next HTTP/1.1\r\nHost: a.test\r\n\r\n";

async fn connection(bytes: &str) -> (DuplexStream, Guarded<DuplexStream>, Faults) {
    let (mut client, server) = duplex(1 << 20);
    client.write_all(bytes.as_bytes()).await.unwrap();
    let (guarded, faults) = Guarded::new(server, Limits::default());
    (client, guarded, faults)
}

async fn read(guarded: &mut Guarded<DuplexStream>, length: usize) -> String {
    let mut bytes = vec![0; length];
    guarded.read_exact(&mut bytes).await.unwrap();
    String::from_utf8(bytes).unwrap()
}

/// Nothing more comes, for now.
async fn is_still(guarded: &mut Guarded<DuplexStream>) {
    let mut space = [0; 64];
    let poll = poll_fn(|cx| {
        let mut buf = ReadBuf::new(&mut space);
        Poll::Ready(Pin::new(&mut *guarded).poll_read(cx, &mut buf).is_pending())
    });
    assert!(poll.await);
}

#[tokio::test]
async fn bytes_behind_a_connect_are_held_until_it_is_refused() {
    let (_client, mut guarded, faults) = connection(&format!("{CONNECT}{NEXT}{BAD}")).await;
    assert_eq!(read(&mut guarded, CONNECT.len()).await, CONNECT);
    is_still(&mut guarded).await;
    faults.resume(1);
    is_still(&mut guarded).await;
    faults.resume(0);
    assert_eq!(read(&mut guarded, NEXT.len()).await, NEXT);
    assert_eq!(faults.take(1), None);
    let stand_in = read(&mut guarded, STAND_IN.len()).await;
    assert_eq!(stand_in.as_bytes(), STAND_IN);
    assert_eq!(faults.take(2).unwrap().what, FaultKind::BareLineFeed);
}

#[tokio::test]
async fn bytes_behind_a_switch_are_passed_as_they_are() {
    for head in [CONNECT, UPGRADE] {
        let (mut client, mut guarded, faults) = connection(&format!("{head}{BAD}")).await;
        assert_eq!(read(&mut guarded, head.len()).await, head);
        is_still(&mut guarded).await;
        faults.upgrade(0);
        assert_eq!(read(&mut guarded, BAD.len()).await, BAD);
        client.write_all(b"\0raw").await.unwrap();
        assert_eq!(read(&mut guarded, 4).await, "\0raw");
        assert_eq!(faults.take(0), None);
        // Once raw, for ever.
        faults.resume(0);
        client.write_all(BAD.as_bytes()).await.unwrap();
        assert_eq!(read(&mut guarded, BAD.len()).await, BAD);
    }
}

#[tokio::test]
async fn the_connection_can_be_taken_back_with_what_was_held() {
    let (mut client, mut guarded, _faults) = connection(&format!("{CONNECT}{BAD}")).await;
    assert_eq!(read(&mut guarded, CONNECT.len()).await, CONNECT);
    let (mut io, held) = guarded.into_inner();
    client.write_all(b"more").await.unwrap();
    drop(client);
    let mut rest = held.to_vec();
    io.read_to_end(&mut rest).await.unwrap();
    assert_eq!(rest, format!("{BAD}more").as_bytes());
}

#[tokio::test]
async fn the_word_wakes_a_reader_that_waits() {
    for (head, upgrade) in [(CONNECT, true), (CONNECT, false), (UPGRADE, false)] {
        let (_client, mut guarded, faults) = connection(&format!("{head}{NEXT}")).await;
        assert_eq!(read(&mut guarded, head.len()).await, head);
        let (waits, waiting) = tokio::sync::oneshot::channel();
        let reader = tokio::spawn(async move {
            is_still(&mut guarded).await;
            waits.send(()).unwrap();
            read(&mut guarded, NEXT.len()).await
        });
        waiting.await.unwrap();
        if upgrade {
            faults.upgrade(0);
        } else {
            faults.resume(0);
        }
        assert_eq!(reader.await.unwrap(), NEXT);
    }
}

#[tokio::test]
async fn a_word_for_another_request_changes_nothing() {
    let (_client, mut guarded, faults) = connection(&format!("{NEXT}{UPGRADE}{BAD}")).await;
    let length = NEXT.len() + UPGRADE.len();
    read(&mut guarded, length).await;
    // The service answers the first while the second was read already.
    faults.resume(0);
    faults.upgrade(0);
    is_still(&mut guarded).await;
    faults.resume(1);
    read(&mut guarded, STAND_IN.len()).await;
    assert_eq!(faults.take(2).unwrap().what, FaultKind::BareLineFeed);
}

#[tokio::test]
async fn the_body_of_an_upgrade_is_followed_before_the_fork() {
    let head = UPGRADE.replace("\r\n\r\n", "\r\nContent-Length: 3\r\n\r\nab");
    let (mut client, mut guarded, faults) = connection(&head).await;
    assert_eq!(read(&mut guarded, head.len()).await, head);
    // Said before the body is through: it counts when it is.
    faults.resume(0);
    client
        .write_all(format!("c{NEXT}").as_bytes())
        .await
        .unwrap();
    let rest = read(&mut guarded, 1 + NEXT.len()).await;
    assert_eq!(rest, format!("c{NEXT}"));
}

#[tokio::test]
async fn an_upgrade_in_http_1_0_is_none() {
    let old = UPGRADE.replace("HTTP/1.1", "HTTP/1.0");
    let (_client, mut guarded, _faults) = connection(&format!("{old}{NEXT}")).await;
    let both = read(&mut guarded, old.len() + NEXT.len()).await;
    assert_eq!(both, format!("{old}{NEXT}"));
}

#[tokio::test]
async fn a_client_that_leaves_at_the_fork_is_noticed_and_a_flood_is_not_kept() {
    let (client, mut guarded, _faults) = connection(CONNECT).await;
    assert_eq!(read(&mut guarded, CONNECT.len()).await, CONNECT);
    is_still(&mut guarded).await;
    drop(client);
    let mut rest = Vec::new();
    guarded.read_to_end(&mut rest).await.unwrap();
    assert!(rest.is_empty());

    let flood = "x".repeat(300_000);
    let (_client, mut guarded, _faults) = connection(&format!("{CONNECT}{flood}")).await;
    read(&mut guarded, CONNECT.len()).await;
    is_still(&mut guarded).await;
    assert!(guarded.held.len() <= Limits::default().head + 64);
    let (mut io, held) = guarded.into_inner();
    let mut rest = vec![0; flood.len() - held.len()];
    io.read_exact(&mut rest).await.unwrap();
    assert!(rest.iter().chain(&held).all(|byte| *byte == b'x'));
}

#[tokio::test]
async fn what_a_client_went_on_sending_after_a_fault_is_read_before_the_close() {
    // Bytes that nobody read make the kernel send a reset in place of an orderly end.
    let (client, mut guarded, _faults) = connection(&format!("{BAD}{}", NEXT.repeat(500))).await;
    read(&mut guarded, STAND_IN.len()).await;
    guarded.shutdown().await.unwrap();
    drop(client);
    let (mut io, held) = guarded.into_inner();
    let mut rest = held.to_vec();
    io.read_to_end(&mut rest).await.unwrap();
    assert!(rest.is_empty(), "{} bytes are left", rest.len());
}
