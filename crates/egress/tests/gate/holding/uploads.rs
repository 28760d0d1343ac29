//! Bodies of held requests.

use std::sync::Arc;

use bytes::Bytes;
use http::header::{CONTENT_LENGTH, HeaderValue};
use http::{Method, Request, StatusCode};
use http_body_util::{BodyExt, Full};
use hyper::client::conn::http2::{self, SendRequest};
use hyper_util::rt::{TokioExecutor, TokioIo};
use policy::host::Host;
use policy::verdict::VerdictKind;
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;
use testkit::ca::Ca;
use testkit::origin::{OriginReply, OriginServer};
use testkit::wait::LIMIT;
use tokio::time::timeout;
use tokio_rustls::TlsConnector;

use super::fixture::{Gate, Rules};
use super::operator::ALLOW;
use crate::fakes::connect;

/// Larger than the window of an HTTP/2 stream; eight bodies exceed the window of a connection.
const LENGTH: usize = 320 * 1024;

const UPLOADS: usize = 8;

const HOST: &str = "known.example";

/// A policy that requires approval for POST requests and allows all others.
const ASK: &str = "package http.authz\n\ndecision := {\"allow\": true} if input.method != \"POST\"\n\n\
                   decision := {\"action\": \"ask\"} if input.method == \"POST\"\n";

/// A gate with an origin that serves TLS.
fn gate() -> Gate {
    let directory = tempfile::tempdir().unwrap();
    let ca = Ca::new("roots of a test");
    ca.write(directory.path());
    let origin = OriginServer::https(ca.identity(&[HOST]), |_| OriginReply::text("hello"));
    let rules = Rules {
        egress: "  extra_roots: [root.pem]\n".to_owned(),
        ..Rules::with_bundle("mine", ASK)
    };
    Gate::with_origin(directory, &rules, origin)
}

/// Opens an HTTP/2 connection through the gate.
async fn connect_http2(gate: &Gate) -> SendRequest<Full<Bytes>> {
    let root = gate.services.authority().load().root_pem().to_owned();
    let mut roots = rustls::RootCertStore::empty();
    let root = CertificateDer::from_pem_slice(root.as_bytes()).unwrap();
    roots.add(root).unwrap();
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let config = rustls::ClientConfig::builder_with_provider(provider);
    let config = config.with_safe_default_protocol_versions().unwrap();
    let mut config = config.with_root_certificates(roots).with_no_client_auth();
    config.alpn_protocols = vec![b"h2".to_vec()];
    let tunnel = (Host::parse(HOST).unwrap(), 443);
    let stream = connect(&gate.services, Some(tunnel));
    let connector = TlsConnector::from(Arc::new(config));
    let stream = connector.connect(HOST.try_into().unwrap(), stream).await;
    let io = TokioIo::new(stream.unwrap());
    let (sender, connection) = http2::handshake(TokioExecutor::new(), io).await.unwrap();
    tokio::spawn(connection);
    sender
}

fn request(method: Method, path: &str, body: Vec<u8>) -> Request<Full<Bytes>> {
    let uri = format!("https://{HOST}{path}");
    let request = Request::builder().method(method).uri(uri);
    request.body(Full::new(body.into())).unwrap()
}

/// The body of the upload with this number.
fn body(number: usize) -> Vec<u8> {
    let bytes = (0..LENGTH).map(|at| (at * 31 + number * 7 + at / 251) % 256);
    bytes.map(|byte| u8::try_from(byte).unwrap()).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn held_uploads_do_not_stall_their_connection() {
    let gate = gate();
    let mut sender = connect_http2(&gate).await;
    let mut uploads = Vec::new();
    for number in 0..UPLOADS {
        let upload = request(Method::POST, &format!("/{number}"), body(number));
        uploads.push(tokio::spawn(sender.send_request(upload)));
    }
    let mut open = Vec::new();
    for _ in 0..UPLOADS {
        open.push(gate.operator.next_question().await);
    }
    assert_eq!(gate.sandbox.in_flight.held(), UPLOADS);
    let spooled = u64::try_from(UPLOADS * LENGTH).unwrap();
    assert_eq!(gate.sandbox.spooled.used_bytes(), spooled);
    // A GET needs no flow-control window; a PUT with a body does.
    for (method, body) in [(Method::GET, Vec::new()), (Method::PUT, body(UPLOADS))] {
        let other = sender.send_request(request(method, "/beside", body));
        let other = timeout(LIMIT, other).await.expect("an answer").unwrap();
        assert_eq!(other.status(), StatusCode::OK);
        assert_eq!(other.collect().await.unwrap().to_bytes(), "hello");
    }
    assert_eq!(gate.operator.waiting(), UPLOADS);
    assert_eq!(gate.origin.requests().len(), 2);

    for question in open {
        question.answer(ALLOW);
    }
    for upload in uploads {
        let answer = upload.await.unwrap().unwrap();
        assert_eq!(answer.status(), StatusCode::OK);
        assert_eq!(answer.collect().await.unwrap().to_bytes(), "hello");
    }
    let received = gate.origin.requests();
    assert_eq!(received.len(), 2 + UPLOADS);
    for number in 0..UPLOADS {
        let path = format!("/{number}");
        let arrived = received
            .iter()
            .find(|request| request.path() == path)
            .unwrap();
        assert!(arrived.body == body(number), "{path}");
        let length = arrived.headers.get(CONTENT_LENGTH);
        assert_eq!(length, Some(&HeaderValue::from(LENGTH)));
    }
    gate.assert_nothing_held().await;
    let records = gate.records();
    assert_eq!(records.len(), 2 + UPLOADS);
    assert!(
        records
            .iter()
            .all(|record| record.verdict == Some(VerdictKind::Allow))
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn stream_reset_ends_only_the_hold_of_that_stream() {
    let gate = gate();
    let mut sender = connect_http2(&gate).await;
    let upload = |path: &str| request(Method::POST, path, body(0));
    let abandoned = tokio::spawn(sender.send_request(upload("/left")));
    let withdrawn = gate.operator.next_question().await;
    let stays = tokio::spawn(sender.send_request(upload("/stays")));
    let open = gate.operator.next_question().await;
    abandoned.abort();
    withdrawn.wait_until_withdrawn().await;
    assert_eq!(gate.only_record().await.0, Some(VerdictKind::Ask));
    assert_eq!(gate.sandbox.in_flight.held(), 1);
    open.answer(ALLOW);
    assert_eq!(stays.await.unwrap().unwrap().status(), StatusCode::OK);
    gate.assert_nothing_held().await;
}

#[tokio::test]
async fn trailers_of_a_held_upload_arrive() {
    let gate = Gate::new(&Rules::default());
    for (host, length) in [
        ("known.example", 3),
        ("asked.example", 3),
        ("asked.example", 100 * 1024),
    ] {
        let text = "a".repeat(length);
        let request = format!(
            "POST http://{host}/ HTTP/1.1\r\nHost: {host}\r\nTransfer-Encoding: chunked\r\n\
             Trailer: x-sum\r\nConnection: close\r\n\r\n\
             {length:x}\r\n{text}\r\n0\r\nx-sum: 7\r\n\r\n"
        );
        let request_task = gate.spawn_request(request.into_bytes()).await;
        if host == "asked.example" {
            gate.operator.next_question().await.answer(ALLOW);
        }
        assert_eq!(request_task.await.unwrap().status, 200);
        let received = gate.origin.requests().pop().unwrap();
        assert!(received.body == text);
        let trailer = received.trailers.get("x-sum");
        assert_eq!(trailer, Some(&HeaderValue::from(7)), "{host}, {length}");
    }
}
