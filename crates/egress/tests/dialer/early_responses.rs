//! Servers that answer before they have heard all, and answers with long heads.

use std::io::Write;
use std::net::TcpStream;
use std::sync::mpsc;

use http::Version;
use http_body_util::channel::{Channel, Sender};
use testkit::http::{read_chunk, read_line};
use testkit::origin::OriginServer;
use testkit::wait::eventually;

use super::*;

const HOST: &str = "api.example";

/// A piece of a body.
const PIECE: &[u8] = &[b'x'; 16 * 1024];

/// A body that the test feeds.
fn upload() -> (Sender<Bytes, std::io::Error>, Request<MessageBody>) {
    let (sender, body) = Channel::<Bytes, std::io::Error>::new(1);
    let content = body.map_err(Into::into).boxed_unsync();
    (sender, post("/", content))
}

/// Reads the head of a request, if one comes.
fn hears(stream: &mut TcpStream) -> bool {
    loop {
        match read_line(&mut *stream) {
            Ok(line) if line.is_empty() => return true,
            Ok(_) => {}
            Err(_) => return false,
        }
    }
}

/// Reads a chunked body to its end and says how long it was.
fn read_chunks(stream: &mut TcpStream) -> u64 {
    let mut length = 0;
    while let Some(chunk) = read_chunk(&mut *stream).unwrap() {
        length += u64::try_from(chunk.len()).unwrap();
    }
    assert_eq!(read_line(stream).unwrap(), "");
    length
}

#[tokio::test]
async fn upload_continues_after_an_early_response() {
    let (told, heard) = mpsc::channel();
    let origin = OriginServer::raw(move |mut stream, _| {
        // One that answers as soon as it has seen the head, and then listens to the end.
        while hears(&mut stream) {
            stream
                .write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nearly")
                .unwrap();
            told.send(read_chunks(&mut stream)).unwrap();
        }
    });
    let dialer = Operator::new().dialer(HOST, origin.address(), "");
    for round in 0..3 {
        let (mut sender, request) = upload();
        let sent = dialer
            .send(&sandbox("s"), own(&http(HOST), request))
            .await
            .unwrap();
        assert_eq!(sent.timings.reused, round > 0);
        assert_eq!(text(sent).await, "early");
        assert_eq!(dialer.idle(), 0, "it is still in use");
        for _ in 0..100 {
            sender.send_data(Bytes::from_static(PIECE)).await.unwrap();
        }
        drop(sender);
        eventually("the connection to be kept", || {
            (dialer.idle() == 1).then_some(())
        })
        .await;
        let whole = u64::try_from(PIECE.len() * 100).unwrap();
        assert_eq!(heard.recv(), Ok(whole));
    }
    assert_eq!(origin.connections(), 1);
}

#[tokio::test]
async fn response_before_an_early_close_is_received() {
    // The close crosses the upload at another moment each time.
    for round in 0..30 {
        let origin = OriginServer::raw(|mut stream, _| {
            assert!(hears(&mut stream));
            stream
                .write_all(
                    b"HTTP/1.1 413 Too Large\r\nContent-Length: 2\r\nConnection: close\r\n\r\nno",
                )
                .unwrap();
            // Closed with unread bytes in it, so that the other side is reset.
        });
        let dialer = Operator::new().dialer(HOST, origin.address(), "");
        let (mut sender, request) = upload();
        let feeding = tokio::spawn(async move {
            while sender.send_data(Bytes::from_static(PIECE)).await.is_ok() {}
        });
        let sent = dialer.send(&sandbox("s"), own(&http(HOST), request)).await;
        let sent = sent.unwrap_or_else(|error| panic!("{round}: {error:?}"));
        assert_eq!(sent.response.status(), 413);
        assert_eq!(text(sent).await, "no", "{round}");
        assert_eq!(dialer.idle(), 0);
        // The upload stops when the server no longer reads it.
        tokio::time::timeout(testkit::wait::LIMIT, feeding)
            .await
            .unwrap()
            .unwrap();
    }
}

#[tokio::test]
async fn close_without_a_response_is_an_upstream_failure() {
    let origin = OriginServer::raw(|mut stream, _| {
        assert!(hears(&mut stream));
    });
    let dialer = Operator::new().dialer(HOST, origin.address(), "");
    let (mut sender, request) = upload();
    tokio::spawn(async move { while sender.send_data(Bytes::from_static(PIECE)).await.is_ok() {} });
    let error = dialer
        .send(&sandbox("s"), own(&http(HOST), request))
        .await
        .unwrap_err();
    assert!(
        matches!(error, DialError::ConnectionFailed { .. }),
        "{error:?}"
    );
    assert!(error.counts_as_failure());
}

/// A server whose head has a header of so many bytes.
fn wordy(length: usize) -> OriginServer {
    OriginServer::raw(move |mut stream, _| {
        while hears(&mut stream) {
            let long = "a".repeat(length);
            let said = write!(
                stream,
                "HTTP/1.1 200 OK\r\nX-Long: {long}\r\nContent-Length: 4\r\n\r\nfine"
            );
            if said.is_err() {
                return;
            }
        }
    })
}

#[tokio::test]
async fn response_head_of_60_kib_is_accepted() {
    let origin = wordy(60 * 1024);
    let dialer = Operator::new().dialer(HOST, origin.address(), "");
    for _ in 0..3 {
        let sent = dialer
            .send(&sandbox("s"), own(&http(HOST), get("/")))
            .await
            .unwrap();
        assert_eq!(sent.timings.version, Version::HTTP_11);
        assert_eq!(sent.response.headers()["x-long"].len(), 60 * 1024);
        assert_eq!(text(sent).await, "fine");
    }
    assert_eq!(origin.connections(), 1);
}

#[tokio::test]
async fn response_head_above_the_limit_is_refused() {
    let origin = wordy(80 * 1024);
    let dialer = Operator::new().dialer(HOST, origin.address(), "");
    let error = ask(&dialer, "s", &http(HOST), "/").await.unwrap_err();
    assert!(matches!(error, DialError::LongHead { .. }), "{error:?}");
    assert_eq!(
        error.to_string(),
        "the response head of api.example is longer than 64 KiB, or has more than 100 headers"
    );
    assert!(!error.counts_as_failure(), "it did answer");
}
