//! Timeouts and failures of the steps of a request, and large bodies.

use std::sync::Arc;
use std::time::Duration;

use egress::dialer::DialStep;
use http_body_util::channel::Channel;
use policy::reason::Reason;
use testkit::origin::{Latch, OriginReply, OriginServer};
use testkit::port::Port;
use testkit::wait::eventually;

use super::*;

const HOST: &str = "api.example";

#[tokio::test]
async fn silent_server_times_out() {
    let latch = Latch::new();
    let held = latch.clone();
    let origin = OriginServer::http(move |_| OriginReply::text("late").held_until(&held));
    let dialer = Operator::new().dialer(HOST, origin.address(), "timeouts: {response: 100ms}");
    let error = fetch(&dialer, "s", &http(HOST), "/").await.unwrap_err();
    assert!(
        matches!(
            error,
            DialError::TimedOut {
                step: DialStep::Answer,
                ..
            }
        ),
        "{error:?}"
    );
    assert_eq!(error.reason(), Reason::UpstreamTimeout);
    assert!(error.counts_as_failure());
    assert_eq!(
        error.to_string(),
        "api.example did not respond within 100ms"
    );
    eventually("the close", || (origin.open() == 0).then_some(())).await;
}

#[tokio::test]
async fn unfinished_tls_handshake_times_out() {
    let origin = OriginServer::raw(|mut stream, _| {
        use std::io::Read;
        let _all = stream.read_to_end(&mut Vec::new());
    });
    let dialer = Operator::new().dialer(HOST, origin.address(), "timeouts: {connect: 100ms}");
    let error = fetch(&dialer, "s", &https(HOST), "/").await.unwrap_err();
    assert!(
        matches!(
            error,
            DialError::TimedOut {
                step: DialStep::Connect,
                ..
            }
        ),
        "{error:?}"
    );
    assert_eq!(error.reason(), Reason::UpstreamTimeout);
    eventually("the close", || (origin.open() == 0).then_some(())).await;
    let error = dialer
        .open(&sandbox("one"), &https(HOST))
        .await
        .err()
        .unwrap();
    assert!(
        matches!(
            error,
            DialError::TimedOut {
                step: DialStep::Connect,
                ..
            }
        ),
        "{error:?}"
    );
}

#[tokio::test]
async fn upload_in_progress_is_not_timed_out() {
    let origin = OriginServer::http(|request| OriginReply::text(request.length.to_string()));
    let limits = "timeouts: {connect: 600s, response: 60s}";
    let dialer = Operator::new().dialer(HOST, origin.address(), limits);
    let (mut sender, upload) = Channel::<Bytes, std::io::Error>::new(1);
    let upload = upload.map_err(Into::into).boxed_unsync();
    let upload_task = tokio::spawn(async move {
        let mut length = 0;
        for _ in 0..8 {
            // The channel holds one chunk, so this send waits until the dialer has taken the
            // previous one.
            sender.send_data(Bytes::from_static(b"more")).await.unwrap();
            length += 4;
            tokio::time::pause();
            tokio::time::advance(Duration::from_secs(45)).await;
            tokio::time::resume();
        }
        length
    });
    let sent = dialer
        .send(&sandbox("s"), gate_request(&http(HOST), post("/", upload)))
        .await
        .unwrap();
    let length: u64 = upload_task.await.unwrap();
    assert_eq!(read_body(sent).await, length.to_string());
}

#[tokio::test]
async fn connection_error_message_has_no_address() {
    let port = Port::take();
    let address = port.address();
    let dialer = Operator::new().dialer(HOST, address, "");
    let error = fetch(&dialer, "s", &http(HOST), "/").await.unwrap_err();
    assert_eq!(error.reason(), Reason::ConnectFailed);
    assert!(error.counts_as_failure());
    assert_eq!(
        error.to_string(),
        "api.example could not be reached on port 80"
    );
    assert!(
        error.evidence().contains(&address.to_string()),
        "{}",
        error.evidence()
    );
}

#[tokio::test]
async fn failed_request_body_is_not_an_upstream_failure() {
    let origin = OriginServer::http(|_| OriginReply::text("fine"));
    let dialer = Operator::new().dialer(HOST, origin.address(), "");
    let (mut sender, upload) = Channel::<Bytes, std::io::Error>::new(1);
    let upload = upload.map_err(Into::into).boxed_unsync();
    tokio::spawn(async move {
        sender.send_data(Bytes::from_static(b"half")).await.unwrap();
        sender.abort(std::io::Error::other("the client went away"));
    });
    let error = dialer
        .send(&sandbox("s"), gate_request(&http(HOST), post("/", upload)))
        .await
        .unwrap_err();
    assert!(
        matches!(error, DialError::RequestBodyFailed { .. }),
        "{error:?}"
    );
    assert!(!error.counts_as_failure());
    assert!(
        error.evidence().contains("the client went away"),
        "{}",
        error.evidence()
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn large_bodies_pass_in_both_directions() {
    const SIZE: u64 = 100 * 1024 * 1024;
    for http2 in [false, true] {
        let operator = Operator::new();
        let kind = testkit::origin::OriginOptions {
            tls: http2.then(|| operator.ca.identity(&[HOST])),
            http2,
            streams: None,
        };
        let origin = OriginServer::start(kind, |request| {
            OriginReply::large(SIZE).header("got", &request.length.to_string())
        });
        let dialer = Arc::new(operator.dialer(HOST, origin.address(), ""));
        let route = if http2 { https(HOST) } else { http(HOST) };
        let (mut sender, upload) = Channel::<Bytes, std::io::Error>::new(1);
        let upload = upload.map_err(Into::into).boxed_unsync();
        tokio::spawn(async move {
            let piece = Bytes::from(vec![b'u'; 1024 * 1024]);
            for _ in 0..100 {
                sender.send_data(piece.clone()).await.unwrap();
            }
        });
        let sent = dialer
            .send(&sandbox("s"), gate_request(&route, post("/", upload)))
            .await
            .unwrap();
        assert_eq!(sent.response.headers()["got"], SIZE.to_string());
        let mut answer = sent.response.into_body();
        let mut length = 0;
        while let Some(frame) = answer.frame().await {
            length += frame.unwrap().into_data().unwrap().len() as u64;
        }
        assert_eq!(length, SIZE);
    }
}
