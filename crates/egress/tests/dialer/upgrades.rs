//! Connections that are upgraded to another protocol.

use testkit::origin::{OriginReply, OriginServer};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use super::*;

const HOST: &str = "chat.example";

fn upgrade() -> Request<MessageBody> {
    Request::get("/chat")
        .header("connection", "keep-alive, Upgrade")
        .header("upgrade", "websocket")
        .header("sec-websocket-key", "dGhlIHNhbXBsZSBub25jZQ==")
        .body(body::empty())
        .unwrap()
}

#[tokio::test]
async fn upgraded_connection_carries_bytes_in_both_directions() {
    let operator = Operator::new();
    let origin = OriginServer::https(operator.ca.identity(&[HOST]), |_| {
        OriginReply::echo("websocket")
    });
    let dialer = operator.dialer(HOST, origin.address(), "");
    let answer = dialer
        .open(&sandbox("one"), &https(HOST))
        .await
        .unwrap()
        .send(gate_request(&https(HOST), upgrade()))
        .await
        .unwrap();
    assert_eq!(answer.response.status(), 101);
    assert_eq!(answer.response.headers()["upgrade"], "websocket");
    let mut io = answer.io.unwrap();
    io.write_all(b"are you there?").await.unwrap();
    let mut echo = [0; 14];
    io.read_exact(&mut echo).await.unwrap();
    assert_eq!(&echo, b"are you there?");
    io.shutdown().await.unwrap();
    assert_eq!(io.read(&mut echo).await.unwrap(), 0);

    let request = &origin.requests()[0];
    assert_eq!(request.header("connection"), Some("upgrade"));
    assert_eq!(request.header("upgrade"), Some("websocket"));
    assert_eq!(request.header("host"), Some(HOST));
    assert_eq!(dialer.idle(), 0);
}

#[tokio::test]
async fn refused_upgrade_is_an_ordinary_response() {
    let origin = OriginServer::http(|_| OriginReply::status(403).header("why", "closed"));
    let dialer = Operator::new().dialer(HOST, origin.address(), "");
    let answer = dialer
        .open(&sandbox("one"), &http(HOST))
        .await
        .unwrap()
        .send(gate_request(&https(HOST), upgrade()))
        .await
        .unwrap();
    assert_eq!(answer.response.status(), 403);
    assert_eq!(answer.response.headers()["why"], "closed");
    assert!(answer.io.is_none());
}

#[tokio::test]
async fn unrequested_upgrade_is_a_connection_failure() {
    let origin = OriginServer::raw(|mut stream, _| {
        use std::io::{Read, Write};
        let _read = stream.read(&mut [0; 4096]);
        let _sent = stream.write_all(
            b"HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade\r\nupgrade: x\r\n\r\n",
        );
        let _rest = stream.read(&mut [0; 4096]);
    });
    let dialer = Operator::new().dialer(HOST, origin.address(), "");
    let error = fetch(&dialer, "s", &http(HOST), "/").await.unwrap_err();
    assert!(
        matches!(error, DialError::ConnectionFailed { .. }),
        "{error:?}"
    );
    let opened = dialer.open(&sandbox("one"), &http(HOST)).await.unwrap();
    let error = opened
        .send(gate_request(&http(HOST), get("/")))
        .await
        .err()
        .unwrap();
    assert!(
        matches!(error, DialError::ConnectionFailed { .. }),
        "{error:?}"
    );
    assert_eq!(dialer.idle(), 0);
}
