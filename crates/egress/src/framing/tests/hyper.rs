//! Tests of the framing guard with hyper: the requests that the service receives, and the answers
//! to the client.

use std::convert::Infallible;
use std::sync::atomic::{AtomicU64, Ordering};

use ::hyper::body::Incoming;
use ::hyper::server::conn::http1;
use ::hyper::service::service_fn;
use ::hyper::upgrade::Upgraded;
use ::hyper::{Method, Request, Response, StatusCode};
use http_body_util::{BodyExt, Full};
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream, duplex};

use super::*;

/// A request as the service received it.
#[derive(Debug, Clone, PartialEq, Eq)]
enum ReceivedRequest {
    Complete(String, Vec<u8>),
    Refused(FaultKind),
    /// The head was valid and the body ended in an error, with the guard's fault if it has one.
    Broken(String, Option<FaultKind>),
}

#[derive(Clone)]
struct Service {
    guard_handle: GuardHandle,
    count: Arc<AtomicU64>,
    seen: Arc<Mutex<Vec<ReceivedRequest>>>,
    switch: bool,
    upgraded: Arc<Mutex<Option<Upgraded>>>,
}

impl Service {
    async fn answer(self, mut request: Request<Incoming>) -> Response<Full<Bytes>> {
        let ordinal = self.count.fetch_add(1, Ordering::Relaxed);
        // Gives hyper the chance to read further before the answer.
        tokio::task::yield_now().await;
        let line = format!("{} {}", request.method(), request.uri());
        let (seen, status) = if let Some(fault) = self.guard_handle.take_fault(ordinal) {
            (
                ReceivedRequest::Refused(fault.kind),
                StatusCode::BAD_REQUEST,
            )
        } else if self.switch {
            let upgrade = ::hyper::upgrade::on(&mut request);
            let slot = Arc::clone(&self.upgraded);
            tokio::spawn(async move {
                *slot.lock().unwrap() = upgrade.await.ok();
            });
            (ReceivedRequest::Complete(line, Vec::new()), StatusCode::OK)
        } else {
            self.guard_handle.resume(ordinal);
            let status = match *request.method() {
                Method::CONNECT => StatusCode::FORBIDDEN,
                _ => StatusCode::OK,
            };
            match request.into_body().collect().await {
                Ok(body) => (
                    ReceivedRequest::Complete(line, body.to_bytes().to_vec()),
                    status,
                ),
                Err(_) => {
                    let fault = self
                        .guard_handle
                        .take_fault(ordinal)
                        .map(|fault| fault.kind);
                    (
                        ReceivedRequest::Broken(line, fault),
                        StatusCode::BAD_REQUEST,
                    )
                }
            }
        };
        self.seen.lock().unwrap().push(seen);
        let mut response = Response::new(Full::default());
        *response.status_mut() = status;
        response
    }
}

fn service(guard_handle: GuardHandle, switch: bool) -> Service {
    Service {
        guard_handle,
        count: Arc::default(),
        seen: Arc::default(),
        switch,
        upgraded: Arc::default(),
    }
}

async fn serve(server: DuplexStream, switch: bool) -> Service {
    let (guard, guard_handle) = FramingGuard::new(server, HeadLimits::default());
    let service = service(guard_handle, switch);
    let answering = service.clone();
    let connection = http1::Builder::new()
        .serve_connection(
            TokioIo::new(guard),
            service_fn(move |request| {
                let answering = answering.clone();
                async move { Ok::<_, Infallible>(answering.answer(request).await) }
            }),
        )
        .with_upgrades();
    // The error of a connection that the client closed is not tested here.
    let _ = connection.await;
    service
}

/// Sends `bytes` in pieces of `step` bytes, and returns the received requests and the answers. The
/// client waits until the connection is closed; with `closes_first` it first closes its sending
/// side.
async fn exchange(bytes: &[u8], step: usize, closes_first: bool) -> (Vec<ReceivedRequest>, String) {
    let (client, server) = duplex(step.min(1 << 20));
    let serving = tokio::spawn(serve(server, false));
    let (mut reader, mut writer) = tokio::io::split(client);
    let bytes = bytes.to_vec();
    let writing = tokio::spawn(async move {
        // The server may close first.
        let _ = writer.write_all(&bytes).await;
        if closes_first {
            let _ = writer.shutdown().await;
        }
        writer
    });
    let mut answers = Vec::new();
    reader.read_to_end(&mut answers).await.unwrap();
    let service = serving.await.unwrap();
    drop(writing.await);
    let seen = service.seen.lock().unwrap().clone();
    (seen, String::from_utf8(answers).unwrap())
}

fn statuses(answers: &str) -> Vec<&str> {
    answers
        .split("HTTP/1.")
        .filter_map(|answer| answer.get(2..5))
        .collect()
}

const FIRST: &str = "POST /first HTTP/1.1\r\nHost: a.test\r\nContent-Length: 3\r\n\r\nabc";
const LAST: &str = "GET /last HTTP/1.1\r\nHost: a.test\r\nConnection: close\r\n\r\n";
const SMUGGLED: &str = "GET /smuggled HTTP/1.1\r\nHost: b.test\r\n\r\n";

fn first() -> ReceivedRequest {
    ReceivedRequest::Complete("POST /first".into(), b"abc".to_vec())
}

fn last() -> ReceivedRequest {
    ReceivedRequest::Complete("GET /last".into(), Vec::new())
}

/// Messages that parsers are known to read differently, and their faults.
const HEADS: &[(&str, FaultKind)] = &[
    (
        "Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        FaultKind::LengthAndCoding,
    ),
    (
        "Transfer-Encoding: chunked\r\nContent-Length: 4\r\n\r\n0\r\n\r\n",
        FaultKind::LengthAndCoding,
    ),
    (
        "Transfer-Encoding: chunked\r\nTransfer-Encoding: x\r\n\r\n0\r\n\r\n",
        FaultKind::TwoCodings,
    ),
    (
        "Transfer-Encoding: x\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        FaultKind::Coding,
    ),
    (
        "Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
        FaultKind::Coding,
    ),
    (
        "Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n",
        FaultKind::Coding,
    ),
    (
        "Transfer-Encoding : chunked\r\n\r\n0\r\n\r\n",
        FaultKind::SpaceBeforeColon,
    ),
    (
        "Transfer-Encoding: \x0bchunked\r\n\r\n0\r\n\r\n",
        FaultKind::Value,
    ),
    (
        "X: y\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        FaultKind::BareLineFeed,
    ),
    (
        "X: y\rTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        FaultKind::BareCarriageReturn,
    ),
    (
        "Transfer-Encoding:\r\n chunked\r\n\r\n0\r\n\r\n",
        FaultKind::Coding,
    ),
    ("X: y\r\n Content-Length: 5\r\n\r\nabcde", FaultKind::Fold),
    (
        "Content-Length: 5\r\nContent-Length: 5\r\n\r\nabcde",
        FaultKind::TwoLengths,
    ),
    (
        "Content-Length: 5\r\nContent-Length: 0\r\n\r\nabcde",
        FaultKind::TwoLengths,
    ),
    ("Content-Length: +5\r\n\r\nabcde", FaultKind::Length),
    ("Content-Length: 0x5\r\n\r\nabcde", FaultKind::Length),
    ("Content-Length: 5,5\r\n\r\nabcde", FaultKind::Length),
    (
        "Content-Length: 99999999999999999999\r\n\r\nabcde",
        FaultKind::Length,
    ),
    ("Host: b.test\r\n\r\n", FaultKind::TwoHosts),
    ("X: y\n\n", FaultKind::BareLineFeed),
    ("X\0: y\r\n\r\n", FaultKind::Name),
];

#[tokio::test]
async fn refused_head_is_answered_and_later_bytes_are_not_served() {
    for (rest, kind) in HEADS {
        let bytes = format!("{FIRST}POST / HTTP/1.1\r\nHost: a.test\r\n{rest}{SMUGGLED}{LAST}");
        for step in [1, 7, 4096] {
            let (seen, answers) = exchange(bytes.as_bytes(), step, false).await;
            assert_eq!(
                seen,
                [first(), ReceivedRequest::Refused(*kind)],
                "{bytes:?}"
            );
            assert_eq!(statuses(&answers), ["200", "400"], "{answers}");
            assert!(answers.contains("connection: close"), "{answers}");
        }
    }
}

#[tokio::test]
async fn refused_request_line_is_answered_by_the_service() {
    for line in [
        "GET / HTTP/1.1\n",
        "GET /a b HTTP/1.1\r\n",
        "GET /a<b HTTP/1.1\r\n",
        "GET / HTTP/2.0\r\n",
        "GET a.test HTTP/1.1\r\n",
        "\r\nGET / HTTP/1.1\r\n",
        "\x16\x03\x01\x02",
        "GET / HTTP/1.0\r\n\r\n",
    ] {
        let bytes = format!("{FIRST}{line}\r\n{SMUGGLED}");
        let (seen, answers) = exchange(bytes.as_bytes(), 4096, false).await;
        assert!(
            matches!(&seen[..], [_, ReceivedRequest::Refused(_)]),
            "{line:?}: {seen:?}"
        );
        assert_eq!(statuses(&answers), ["200", "400"], "{answers}");
    }
    let (seen, answers) = exchange(&FIRST.as_bytes()[..20], 4096, true).await;
    assert_eq!(seen, [ReceivedRequest::Refused(FaultKind::Cut)]);
    assert_eq!(statuses(&answers), ["400"]);
}

#[tokio::test]
async fn body_fault_ends_the_body_and_the_connection() {
    for (rest, kind) in [
        ("5;x\n\r\nabcde\r\n0\r\n\r\n", FaultKind::ChunkExtension),
        ("5;x=y\r\nabcde\r\n0\r\n\r\n", FaultKind::ChunkExtension),
        ("5 \r\nabcde\r\n0\r\n\r\n", FaultKind::ChunkExtension),
        ("5\nabcde\r\n0\r\n\r\n", FaultKind::BareLineFeed),
        ("+5\r\nabcde\r\n0\r\n\r\n", FaultKind::ChunkSize),
        ("0x5\r\nabcde\r\n0\r\n\r\n", FaultKind::ChunkSize),
        (
            "10000000000000005\r\nabcde\r\n0\r\n\r\n",
            FaultKind::ChunkTooLong,
        ),
        ("5\r\nabcdef\r\n0\r\n\r\n", FaultKind::ChunkEnd),
        ("5\r\nabcde\n0\r\n\r\n", FaultKind::ChunkEnd),
        // Without an empty line after the last chunk, the next message would be its trailers.
        ("5\r\nabcde\r\n0\r\n", FaultKind::Name),
        ("0\r\n\n", FaultKind::BareLineFeed),
        ("0\r\nContent-Length: 5\r\n\r\n", FaultKind::Trailer),
        ("0\r\nX: y\n\r\n", FaultKind::BareLineFeed),
    ] {
        let bytes = format!("{FIRST}{CHUNKED}{rest}{SMUGGLED}{LAST}");
        for step in [1, 7, 4096] {
            let (seen, answers) = exchange(bytes.as_bytes(), step, false).await;
            // A fault that is found before the service starts is refused at once.
            let ends = [
                ReceivedRequest::Broken("POST /".into(), Some(kind)),
                ReceivedRequest::Refused(kind),
            ];
            assert_eq!(seen.len(), 2, "{rest:?} {seen:?}");
            assert_eq!(seen[0], first());
            assert!(ends.contains(&seen[1]), "{rest:?} {seen:?}");
            assert_eq!(statuses(&answers), ["200", "400"], "{answers}");
        }
    }
}

#[tokio::test]
async fn fault_during_body_read_ends_the_body() {
    let (mut client, server) = duplex(4096);
    let serving = tokio::spawn(serve(server, false));
    let head = CHUNKED.replace("\r\n\r\n", "\r\nExpect: 100-continue\r\n\r\n");
    client.write_all(head.as_bytes()).await.unwrap();
    // hyper sends 100 Continue when the service reads the body.
    let mut answer = vec![0; 25];
    client.read_exact(&mut answer).await.unwrap();
    client
        .write_all(format!("3\r\nabcd{SMUGGLED}").as_bytes())
        .await
        .unwrap();
    client.read_to_end(&mut answer).await.unwrap();
    let service = serving.await.unwrap();
    let broken = ReceivedRequest::Broken("POST /".into(), Some(FaultKind::ChunkEnd));
    assert_eq!(*service.seen.lock().unwrap(), [broken]);
    let answers = String::from_utf8(answer).unwrap();
    assert_eq!(statuses(&answers), ["100", "400"], "{answers}");
}

#[tokio::test]
async fn truncated_body_is_an_error_without_a_fault() {
    for body in [
        "5\r\nab",
        "5\r\nabcde\r\n",
        "5\r\nabcde\r\n0\r\nX: y\r\n",
        "5",
    ] {
        let bytes = format!("{FIRST}{CHUNKED}{body}");
        let (seen, _) = exchange(bytes.as_bytes(), 4096, true).await;
        assert_eq!(
            seen,
            [first(), ReceivedRequest::Broken("POST /".into(), None)],
            "{body:?}"
        );
    }
    let (seen, _) = exchange(&FIRST.as_bytes()[..FIRST.len() - 1], 4096, true).await;
    assert_eq!(seen, [ReceivedRequest::Broken("POST /first".into(), None)]);
}

#[tokio::test]
async fn hyper_accepts_every_head_that_the_guard_passes() {
    // hyper's own refusals would not reach the service, and would shift its request count.
    let mut targets: Vec<String> = (b'!'..=b'~')
        .flat_map(|byte| {
            let byte = char::from(byte);
            [
                format!("/a{byte}b"),
                format!("/?a{byte}b"),
                format!("http://a{byte}b/c"),
            ]
        })
        .collect();
    targets.extend([
        "/gr\u{fc}n".into(),
        "//a.test//".into(),
        "http://a.test".into(),
    ]);
    let (mut passed, mut refused) = (0, 0);
    for target in targets {
        let bytes = format!("GET {target} HTTP/1.1\r\nHost: a.test\r\n\r\n{LAST}");
        let (seen, _) = exchange(bytes.as_bytes(), 4096, false).await;
        match &seen[..] {
            [ReceivedRequest::Complete(..), second] if *second == last() => passed += 1,
            [ReceivedRequest::Refused(FaultKind::Target)] => refused += 1,
            _ => panic!("{target:?}: {seen:?}"),
        }
    }
    assert!(passed > 150 && refused > 20, "{passed} {refused}");

    let bytes = format!(
        "{}{}{}{LAST}",
        get_with_headers("Content-Length: 0000000000000000000"),
        get_with_headers("X: y\tz\r\n!#$%&'*+-.^_`|~: \u{ff}"),
        get_with_headers(&["X: y"; 99].join("\r\n")),
    );
    let (seen, _) = exchange(bytes.as_bytes(), 4096, false).await;
    assert_eq!(seen.len(), 4, "{seen:?}");
    assert_eq!(seen[3], last());

    // hyper supports the largest length that the guard passes.
    let bytes = get_with_headers("Content-Length: 9999999999999999999");
    let (seen, _) = exchange(bytes.as_bytes(), 4096, true).await;
    assert_eq!(seen, [ReceivedRequest::Broken("GET /".into(), None)]);
}

#[tokio::test]
async fn body_with_trailers_is_complete_and_next_message_follows() {
    let bytes =
        format!("{CHUNKED}3\r\nabc\r\nA\r\n0\r\n\r\nGET /\r\n0\r\nX-Sum: 1\r\n\r\n{FIRST}{LAST}");
    for step in [1, 7, 4096] {
        let (seen, answers) = exchange(bytes.as_bytes(), step, false).await;
        let chunked = ReceivedRequest::Complete("POST /".into(), b"abc0\r\n\r\nGET /".to_vec());
        assert_eq!(seen, [chunked, first(), last()]);
        assert_eq!(statuses(&answers), ["200"; 3]);
    }
}

#[tokio::test]
async fn client_with_expect_header_receives_100_continue() {
    let (mut client, server) = duplex(4096);
    let serving = tokio::spawn(serve(server, false));
    let head = FIRST.replace("\r\n\r\nabc", "\r\nExpect: 100-continue\r\n\r\n");
    client.write_all(head.as_bytes()).await.unwrap();
    let mut answer = vec![0; 25];
    client.read_exact(&mut answer).await.unwrap();
    assert_eq!(answer, b"HTTP/1.1 100 Continue\r\n\r\n");
    client
        .write_all(format!("abc{LAST}").as_bytes())
        .await
        .unwrap();
    client.read_to_end(&mut answer).await.unwrap();
    let service = serving.await.unwrap();
    assert_eq!(*service.seen.lock().unwrap(), [first(), last()]);
}

#[tokio::test]
async fn request_after_refused_connect_or_upgrade_is_served() {
    for head in [
        "CONNECT a.test:443 HTTP/1.1\r\nHost: a.test:443\r\n\r\n",
        "GET / HTTP/1.1\r\nHost: a.test\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\n",
        "POST / HTTP/1.1\r\nHost: a.test\r\nContent-Length: 2\r\nUpgrade: h2c\r\n\r\nab",
    ] {
        let bytes = format!("{FIRST}{head}{FIRST}{LAST}");
        for step in [1, 7, 4096] {
            let (seen, answers) = exchange(bytes.as_bytes(), step, false).await;
            assert_eq!(seen.len(), 4, "{head:?} {seen:?}");
            assert_eq!(seen[0], first());
            assert_eq!(seen[2..], [first(), last()]);
            assert_eq!(statuses(&answers).len(), 4, "{answers}");
        }
    }
}

#[tokio::test]
async fn all_bytes_after_connect_belong_to_the_tunnel() {
    let head = "CONNECT a.test:443 HTTP/1.0\r\n\r\n";
    let tunnel = "\x16\x03\x01 hello\nGET / HTTP/1.1\n\n";
    let (mut client, server) = duplex(4096);
    let serving = tokio::spawn(serve(server, true));
    // The client does not wait for the answer.
    client
        .write_all(format!("{head}{tunnel}").as_bytes())
        .await
        .unwrap();
    let mut answer = Vec::new();
    while !answer.ends_with(b"\r\n\r\n") {
        answer.push(client.read_u8().await.unwrap());
    }
    assert!(answer.starts_with(b"HTTP/1.0 200"), "{answer:?}");
    let service = serving.await.unwrap();
    let upgraded = loop {
        if let Some(upgraded) = service.upgraded.lock().unwrap().take() {
            break upgraded;
        }
        tokio::task::yield_now().await;
    };
    let parts = upgraded
        .downcast::<TokioIo<FramingGuard<DuplexStream>>>()
        .unwrap();
    let (mut io, held) = parts.io.into_inner().into_inner();
    let mut bytes = [parts.read_buf, held].concat();
    client.write_all(b"more").await.unwrap();
    drop(client);
    io.read_to_end(&mut bytes).await.unwrap();
    assert_eq!(bytes, format!("{tunnel}more").as_bytes());
}
