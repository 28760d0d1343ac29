//! Responses that a server sends before it has read the whole request, and long response heads.

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

/// One chunk of an upload.
const CHUNK: &[u8] = &[b'x'; 16 * 1024];

/// An upload whose body the test sends through the returned sender.
fn upload() -> (Sender<Bytes, std::io::Error>, Request<MessageBody>) {
    let (sender, body) = Channel::<Bytes, std::io::Error>::new(1);
    let content = body.map_err(Into::into).boxed_unsync();
    (sender, post("/", content))
}

/// Reads a request head. Returns false if the connection ends before the head is complete.
fn read_head(stream: &mut TcpStream) -> bool {
    loop {
        match read_line(&mut *stream) {
            Ok(line) if line.is_empty() => return true,
            Ok(_) => {}
            Err(_) => return false,
        }
    }
}

/// Reads a chunked body to its end and returns its length.
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
    let (length_sender, lengths) = mpsc::channel();
    let origin = OriginServer::raw(move |mut stream, _| {
        // The server responds right after the request head, and then reads the whole body.
        while read_head(&mut stream) {
            stream
                .write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nearly")
                .unwrap();
            length_sender.send(read_chunks(&mut stream)).unwrap();
        }
    });
    let dialer = Operator::new().dialer(HOST, origin.address(), "");
    for round in 0..3 {
        let (mut sender, request) = upload();
        let sent = dialer
            .send(&sandbox("s"), gate_request(&http(HOST), request))
            .await
            .unwrap();
        assert_eq!(sent.timings.reused, round > 0);
        assert_eq!(read_body(sent).await, "early");
        assert_eq!(dialer.idle(), 0, "the upload still uses the connection");
        for _ in 0..100 {
            sender.send_data(Bytes::from_static(CHUNK)).await.unwrap();
        }
        drop(sender);
        eventually("the connection to become idle", || {
            (dialer.idle() == 1).then_some(())
        })
        .await;
        let whole = u64::try_from(CHUNK.len() * 100).unwrap();
        assert_eq!(lengths.recv(), Ok(whole));
    }
    assert_eq!(origin.connections(), 1);
}

#[tokio::test]
async fn response_before_an_early_close_is_received() {
    // Many rounds, because the close and the upload race.
    for round in 0..30 {
        let origin = OriginServer::raw(|mut stream, _| {
            assert!(read_head(&mut stream));
            stream
                .write_all(
                    b"HTTP/1.1 413 Too Large\r\nContent-Length: 2\r\nConnection: close\r\n\r\nno",
                )
                .unwrap();
            // The socket is closed with unread bytes, so that the client receives a TCP reset.
        });
        let dialer = Operator::new().dialer(HOST, origin.address(), "");
        let (mut sender, request) = upload();
        let upload_task = tokio::spawn(async move {
            while sender.send_data(Bytes::from_static(CHUNK)).await.is_ok() {}
        });
        let sent = dialer
            .send(&sandbox("s"), gate_request(&http(HOST), request))
            .await;
        let sent = sent.unwrap_or_else(|error| panic!("{round}: {error:?}"));
        assert_eq!(sent.response.status(), 413);
        assert_eq!(read_body(sent).await, "no", "{round}");
        assert_eq!(dialer.idle(), 0);
        // The upload stops when the server no longer reads it.
        tokio::time::timeout(testkit::wait::LIMIT, upload_task)
            .await
            .unwrap()
            .unwrap();
    }
}

#[tokio::test]
async fn close_without_a_response_is_an_upstream_failure() {
    let origin = OriginServer::raw(|mut stream, _| {
        assert!(read_head(&mut stream));
    });
    let dialer = Operator::new().dialer(HOST, origin.address(), "");
    let (mut sender, request) = upload();
    tokio::spawn(async move { while sender.send_data(Bytes::from_static(CHUNK)).await.is_ok() {} });
    let error = dialer
        .send(&sandbox("s"), gate_request(&http(HOST), request))
        .await
        .unwrap_err();
    assert!(
        matches!(error, DialError::ConnectionFailed { .. }),
        "{error:?}"
    );
    assert!(error.counts_as_failure());
}

/// A server whose response head has a header value of `length` bytes.
fn server_with_long_header(length: usize) -> OriginServer {
    OriginServer::raw(move |mut stream, _| {
        while read_head(&mut stream) {
            let long = "a".repeat(length);
            let written = write!(
                stream,
                "HTTP/1.1 200 OK\r\nX-Long: {long}\r\nContent-Length: 4\r\n\r\nfine"
            );
            if written.is_err() {
                return;
            }
        }
    })
}

#[tokio::test]
async fn response_head_of_60_kib_is_accepted() {
    let origin = server_with_long_header(60 * 1024);
    let dialer = Operator::new().dialer(HOST, origin.address(), "");
    for _ in 0..3 {
        let sent = dialer
            .send(&sandbox("s"), gate_request(&http(HOST), get("/")))
            .await
            .unwrap();
        assert_eq!(sent.timings.version, Version::HTTP_11);
        assert_eq!(sent.response.headers()["x-long"].len(), 60 * 1024);
        assert_eq!(read_body(sent).await, "fine");
    }
    assert_eq!(origin.connections(), 1);
}

#[tokio::test]
async fn response_head_above_the_limit_is_refused() {
    let origin = server_with_long_header(80 * 1024);
    let dialer = Operator::new().dialer(HOST, origin.address(), "");
    let error = fetch(&dialer, "s", &http(HOST), "/").await.unwrap_err();
    assert!(matches!(error, DialError::LongHead { .. }), "{error:?}");
    assert_eq!(
        error.to_string(),
        "the response head of api.example is longer than 64 KiB, or has more than 100 headers"
    );
    assert!(!error.counts_as_failure(), "the server did respond");
}
