//! Reuse of connections and TLS sessions, and their limits.

use std::io::{Read, Write};
use std::sync::Arc;
use std::time::Duration;

use http::Version;
use testkit::origin::{Latch, OriginOptions, OriginReply, OriginServer};
use testkit::wait::eventually;

use super::*;

const HOST: &str = "api.example";

#[tokio::test]
async fn sequential_requests_reuse_a_connection() {
    let origin = OriginServer::http(|request| OriginReply::text(request.path().to_owned()));
    let dialer = Operator::new().dialer(HOST, origin.address(), "");
    for path in ["/one", "/two", "/three"] {
        let answer = fetch(&dialer, "s", &http(HOST), path).await.unwrap();
        assert_eq!(answer, path);
    }
    assert_eq!(origin.connections(), 1);
    assert_eq!(dialer.idle(), 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sequential_requests_reuse_a_connection_on_many_threads() {
    let origin = OriginServer::http(|_| OriginReply::text("fine"));
    let dialer = Operator::new().dialer(HOST, origin.address(), "");
    for _ in 0..200 {
        fetch(&dialer, "s", &http(HOST), "/").await.unwrap();
    }
    assert!(origin.connections() <= 3, "{}", origin.connections());
}

#[tokio::test]
async fn timings_show_whether_a_connection_was_reused() {
    let operator = Operator::new();
    let origin = OriginServer::https(operator.ca.identity(&[HOST]), |_| OriginReply::text("fine"));
    let dialer = operator.dialer(HOST, origin.address(), "");
    let first = dialer
        .send(&sandbox("s"), gate_request(&https(HOST), get("/")))
        .await
        .unwrap();
    assert!(!first.timings.reused);
    assert!(!first.timings.tls.is_zero());
    assert_eq!(first.timings.peer, origin.address());
    assert_eq!(first.timings.version, Version::HTTP_2);
    read_body(first).await;
    let second = dialer
        .send(&sandbox("s"), gate_request(&https(HOST), get("/")))
        .await
        .unwrap();
    assert!(second.timings.reused);
    assert!(second.timings.tls.is_zero());
}

#[tokio::test]
async fn connections_and_tls_sessions_are_not_shared_between_sandboxes() {
    for http2 in [false, true] {
        let operator = Operator::new();
        let kind = OriginOptions {
            tls: Some(operator.ca.identity(&[HOST])),
            http2,
            streams: None,
        };
        let origin = OriginServer::start(kind, |_| OriginReply::text("fine"));
        let dialer = operator.dialer(HOST, origin.address(), "");
        for sandbox_name in ["a", "b", "a", "b"] {
            fetch(&dialer, sandbox_name, &https(HOST), "/")
                .await
                .unwrap();
        }
        let connections: Vec<_> = origin.requests().iter().map(|r| r.connection).collect();
        assert_eq!(connections, [0, 1, 0, 1]);
        assert_eq!(origin.resumed(), 0);
        // A sandbox resumes its own TLS session.
        origin.hang_up();
        eventually("dead connections to be noticed", || {
            (dialer.idle() == 0).then_some(())
        })
        .await;
        fetch(&dialer, "a", &https(HOST), "/").await.unwrap();
        assert_eq!(origin.resumed(), 1);
        dialer.forget(&sandbox("b"));
        fetch(&dialer, "b", &https(HOST), "/").await.unwrap();
        assert_eq!(origin.resumed(), 1, "a TLS session outlived its sandbox");
    }
}

#[tokio::test]
async fn concurrent_http2_requests_share_one_connection() {
    let operator = Operator::new();
    let latch = Latch::new();
    let held = latch.clone();
    let origin = OriginServer::https(operator.ca.identity(&[HOST]), move |_| {
        OriginReply::text("fine").held_until(&held)
    });
    let dialer = Arc::new(operator.dialer(HOST, origin.address(), ""));
    let tasks: Vec<_> = (0..50)
        .map(|_| {
            let dialer = Arc::clone(&dialer);
            tokio::spawn(async move { fetch(&dialer, "s", &https(HOST), "/").await })
        })
        .collect();
    eventually("all requests to arrive", || {
        (latch.waiting() == 50).then_some(())
    })
    .await;
    latch.open();
    for answer in tasks {
        assert_eq!(answer.await.unwrap().unwrap(), "fine");
    }
    assert_eq!(origin.connections(), 1);
}

#[tokio::test]
async fn http2_opens_another_connection_at_the_stream_limit() {
    let operator = Operator::new();
    let latch = Latch::new();
    let held = latch.clone();
    let kind = OriginOptions {
        tls: Some(operator.ca.identity(&[HOST])),
        http2: true,
        streams: Some(2),
    };
    let origin = OriginServer::start(kind, move |request| match request.path() {
        "/" => OriginReply::text("fine"),
        _ => OriginReply::text("late").held_until(&held),
    });
    let dialer = Arc::new(operator.dialer(HOST, origin.address(), ""));
    // After a response the dialer knows the peer's stream limit.
    fetch(&dialer, "s", &https(HOST), "/").await.unwrap();
    let mut tasks = Vec::new();
    for number in 1..=6 {
        let dialer = Arc::clone(&dialer);
        tasks.push(tokio::spawn(async move {
            fetch(&dialer, "s", &https(HOST), "/held").await
        }));
        eventually("the request to arrive", || {
            (latch.waiting() == number).then_some(())
        })
        .await;
    }
    assert!(origin.connections() >= 3, "{}", origin.connections());
    latch.open();
    for answer in tasks {
        assert_eq!(answer.await.unwrap().unwrap(), "late");
    }
}

#[tokio::test]
async fn concurrent_http1_requests_use_separate_connections() {
    let operator = Operator::new();
    let latch = Latch::new();
    let held = latch.clone();
    let identity = operator.ca.identity(&[HOST]);
    let origin = OriginServer::https_http1(identity, move |_| {
        OriginReply::text("fine").held_until(&held)
    });
    let dialer = Arc::new(operator.dialer(HOST, origin.address(), ""));
    let tasks: Vec<_> = (0..20)
        .map(|_| {
            let dialer = Arc::clone(&dialer);
            tokio::spawn(async move { fetch(&dialer, "s", &https(HOST), "/").await })
        })
        .collect();
    eventually("all requests to arrive", || {
        (latch.waiting() == 20).then_some(())
    })
    .await;
    assert_eq!(origin.connections(), 20);
    latch.open();
    for answer in tasks {
        assert_eq!(answer.await.unwrap().unwrap(), "fine");
    }
    eventually("all connections to become idle", || {
        (dialer.idle() == 20).then_some(())
    })
    .await;
}

#[tokio::test]
async fn failed_dial_fails_all_waiting_requests() {
    let operator = Operator::new();
    let origin = OriginServer::https(Ca::new("another").identity(&[HOST]), |_| {
        OriginReply::text("fine")
    });
    let dialer = Arc::new(operator.dialer(HOST, origin.address(), ""));
    let tasks: Vec<_> = (0..20)
        .map(|_| {
            let dialer = Arc::clone(&dialer);
            tokio::spawn(async move { fetch(&dialer, "s", &https(HOST), "/").await })
        })
        .collect();
    for answer in tasks {
        let error = answer.await.unwrap().unwrap_err();
        assert!(matches!(error, DialError::Tls { .. }), "{error:?}");
    }
    assert_eq!(origin.connections(), 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn all_of_200_concurrent_requests_are_answered() {
    for http2 in [false, true] {
        let operator = Operator::new();
        let kind = OriginOptions {
            tls: Some(operator.ca.identity(&[HOST])),
            http2,
            streams: None,
        };
        let origin =
            OriginServer::start(kind, |request| OriginReply::text(request.path().to_owned()));
        let dialer = operator.dialer(HOST, origin.address(), "timeouts: {connect: 60s}");
        let dialer = Arc::new(dialer);
        let tasks: Vec<_> = (0..200)
            .map(|number| {
                let dialer = Arc::clone(&dialer);
                tokio::spawn(async move {
                    let path = format!("/{number}");
                    let answer = fetch(&dialer, "s", &https(HOST), &path).await.unwrap();
                    assert_eq!(answer, path);
                })
            })
            .collect();
        for answer in tasks {
            answer.await.unwrap();
        }
        let idle = dialer.idle();
        assert!(idle <= 32, "{idle} connections are idle");
    }
}

#[tokio::test]
async fn request_on_a_closed_idle_connection_is_retried() {
    // The server responds once and closes the connection, possibly after the next request was sent.
    let origin = OriginServer::raw(|mut stream, _| {
        let mut head = [0; 4096];
        let read = stream.read(&mut head).unwrap_or(0);
        if read > 0 {
            let _sent = stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\nfine");
        }
    });
    let dialer = Operator::new().dialer(HOST, origin.address(), "");
    for number in 1..=20 {
        assert_eq!(fetch(&dialer, "s", &http(HOST), "/").await.unwrap(), "fine");
        eventually("the close", || (origin.open() == 0).then_some(())).await;
        assert_eq!(origin.connections(), number);
    }
}

#[tokio::test]
async fn sent_request_is_never_retried() {
    let origin = OriginServer::http(|request| match request.path() {
        "/" => OriginReply::text("fine"),
        _ => OriginReply::hang_up(),
    });
    let dialer = Operator::new().dialer(HOST, origin.address(), "");
    fetch(&dialer, "s", &http(HOST), "/").await.unwrap();
    let request = post("/pay", body::full("once"));
    let error = dialer
        .send(&sandbox("s"), gate_request(&http(HOST), request))
        .await
        .unwrap_err();
    assert!(
        matches!(error, DialError::ConnectionFailed { .. }),
        "{error:?}"
    );
    assert!(error.counts_as_failure());
    let paid = origin
        .requests()
        .iter()
        .filter(|r| r.path() == "/pay")
        .count();
    assert_eq!(paid, 1);
}

#[tokio::test]
async fn request_after_an_http2_server_restart_succeeds() {
    let operator = Operator::new();
    let origin = OriginServer::https(operator.ca.identity(&[HOST]), |_| OriginReply::text("fine"));
    let dialer = operator.dialer(HOST, origin.address(), "");
    for number in 1..=5 {
        assert_eq!(
            fetch(&dialer, "s", &https(HOST), "/").await.unwrap(),
            "fine"
        );
        assert_eq!(origin.connections(), number);
        origin.hang_up();
        eventually("the close", || (dialer.idle() == 0).then_some(())).await;
    }
}

#[tokio::test]
async fn truncated_response_is_an_error_and_closes_its_connection() {
    let origin = OriginServer::http(|_| OriginReply::large(100_000).abort_body());
    let dialer = Operator::new().dialer(HOST, origin.address(), "");
    let sent = dialer
        .send(&sandbox("s"), gate_request(&http(HOST), get("/")))
        .await
        .unwrap();
    assert!(sent.response.collect().await.is_err());
    assert_eq!(dialer.idle(), 0);
}

#[tokio::test]
async fn connection_close_response_prevents_reuse() {
    let origin = OriginServer::http(|_| OriginReply::text("fine").closing());
    let dialer = Operator::new().dialer(HOST, origin.address(), "");
    for number in 1..=3 {
        fetch(&dialer, "s", &http(HOST), "/").await.unwrap();
        assert_eq!(origin.connections(), number);
    }
}

#[tokio::test]
async fn cancelled_http1_request_closes_its_connection() {
    let latch = Latch::new();
    let held = latch.clone();
    let origin = OriginServer::http(move |_| OriginReply::text("late").held_until(&held));
    let dialer = Arc::new(Operator::new().dialer(HOST, origin.address(), ""));
    let task_dialer = Arc::clone(&dialer);
    let request_task =
        tokio::spawn(async move { fetch(&task_dialer, "s", &http(HOST), "/").await });
    eventually("the request to arrive", || {
        (latch.waiting() == 1).then_some(())
    })
    .await;
    request_task.abort();
    eventually("the close", || (origin.open() == 0).then_some(())).await;
    assert_eq!(dialer.idle(), 0);
}

#[tokio::test]
async fn cancelled_http2_request_frees_its_stream() {
    let operator = Operator::new();
    let latch = Latch::new();
    let held = latch.clone();
    let kind = OriginOptions {
        tls: Some(operator.ca.identity(&[HOST])),
        http2: true,
        streams: Some(1),
    };
    let origin = OriginServer::start(kind, move |request| match request.path() {
        "/held" => OriginReply::text("late").held_until(&held),
        _ => OriginReply::text("fine"),
    });
    let dialer = Arc::new(operator.dialer(HOST, origin.address(), ""));
    fetch(&dialer, "s", &https(HOST), "/").await.unwrap();
    for _ in 0..10 {
        let task_dialer = Arc::clone(&dialer);
        let request_task =
            tokio::spawn(async move { fetch(&task_dialer, "s", &https(HOST), "/held").await });
        eventually("the request to arrive", || {
            (latch.waiting() == 1).then_some(())
        })
        .await;
        request_task.abort();
        eventually("the stream reset", || (latch.waiting() == 0).then_some(())).await;
    }
    assert_eq!(
        fetch(&dialer, "s", &https(HOST), "/").await.unwrap(),
        "fine"
    );
    assert_eq!(origin.connections(), 1);
}

#[tokio::test]
async fn unread_response_closes_its_connection() {
    let latch = Latch::new();
    let paused = latch.clone();
    let origin =
        OriginServer::http(move |_| OriginReply::large(64 * 1024).body_held_until(&paused));
    let dialer = Operator::new().dialer(HOST, origin.address(), "");
    let sent = dialer
        .send(&sandbox("s"), gate_request(&http(HOST), get("/")))
        .await
        .unwrap();
    drop(sent);
    eventually("the close", || (origin.open() == 0).then_some(())).await;
    assert_eq!(dialer.idle(), 0);
}

#[tokio::test]
async fn removed_sandbox_leaves_no_connection() {
    let operator = Operator::new();
    let origin = OriginServer::https(operator.ca.identity(&[HOST]), |_| OriginReply::text("fine"));
    let dialer = operator.dialer(HOST, origin.address(), "");
    fetch(&dialer, "a", &https(HOST), "/").await.unwrap();
    fetch(&dialer, "b", &https(HOST), "/").await.unwrap();
    assert_eq!(dialer.idle(), 2);
    dialer.forget(&sandbox("a"));
    assert_eq!(dialer.idle(), 1);
    eventually("the close", || (origin.open() == 1).then_some(())).await;
    fetch(&dialer, "b", &https(HOST), "/").await.unwrap();
    assert_eq!(origin.connections(), 2);
}

#[tokio::test]
async fn reload_closes_connections_to_changed_addresses() {
    let operator = Operator::new();
    let latch = Latch::new();
    let paused = latch.clone();
    let old = OriginServer::http(move |_| OriginReply::text("old").body_held_until(&paused));
    let new = OriginServer::http(|_| OriginReply::text("new"));
    let other = OriginServer::http(|_| OriginReply::text("other"));
    let lines = |first: SocketAddr| {
        format!(
            "resolve: {{{HOST}: '{first}', other.example: '{}'}}",
            other.address()
        )
    };
    let dialer = Dialer::new(&operator.settings(&lines(old.address()))).unwrap();
    fetch(&dialer, "s", &http("other.example"), "/")
        .await
        .unwrap();
    let running = dialer
        .send(&sandbox("s"), gate_request(&http(HOST), get("/")))
        .await
        .unwrap();

    dialer
        .reload(&operator.settings(&lines(new.address())))
        .unwrap();
    assert_eq!(fetch(&dialer, "s", &http(HOST), "/").await.unwrap(), "new");
    latch.open();
    assert_eq!(read_body(running).await, "old");
    fetch(&dialer, "s", &http("other.example"), "/")
        .await
        .unwrap();
    assert_eq!(
        other.connections(),
        1,
        "the unchanged address kept its connection"
    );
    eventually("the old close", || (old.open() == 0).then_some(())).await;
}

#[tokio::test]
async fn connection_idle_for_a_minute_is_closed() {
    for http2 in [false, true] {
        let operator = Operator::new();
        let kind = OriginOptions {
            tls: Some(operator.ca.identity(&[HOST])),
            http2,
            streams: None,
        };
        let origin = OriginServer::start(kind, |_| OriginReply::text("fine"));
        let dialer = operator.dialer(HOST, origin.address(), "");
        fetch(&dialer, "s", &https(HOST), "/").await.unwrap();
        tokio::time::pause();
        tokio::time::advance(Duration::from_secs(50)).await;
        assert_eq!(dialer.idle(), 1);
        tokio::time::advance(Duration::from_secs(30)).await;
        tokio::time::resume();
        eventually("the close", || (origin.open() == 0).then_some(())).await;
        assert_eq!(dialer.idle(), 0);
    }
}

#[tokio::test]
async fn idle_connections_are_limited_per_sandbox() {
    let origin = OriginServer::http(|_| OriginReply::text("fine"));
    let operator = Operator::new();
    let names: Vec<String> = (0..300)
        .map(|number| format!("h{number}.example"))
        .collect();
    let fixed_addresses: Vec<String> = names
        .iter()
        .map(|name| format!("{name}: '{}'", origin.address()))
        .collect();
    let lines = format!("resolve: {{{}}}", fixed_addresses.join(", "));
    let dialer = Dialer::new(&operator.settings(&lines)).unwrap();
    for name in &names {
        fetch(&dialer, "greedy", &http(name), "/").await.unwrap();
    }
    assert_eq!(dialer.idle(), 256);
    eventually("the oldest connections to close", || {
        (origin.open() == 256).then_some(())
    })
    .await;
    fetch(&dialer, "modest", &http("h0.example"), "/")
        .await
        .unwrap();
    assert_eq!(dialer.idle(), 257);
}

#[tokio::test]
async fn requests_beyond_the_host_limit_wait_for_a_connection() {
    let latch = Latch::new();
    let held = latch.clone();
    let origin = OriginServer::http(move |_| OriginReply::text("fine").held_until(&held));
    let dialer = Operator::new().dialer(HOST, origin.address(), "timeouts: {connect: 20s}");
    let dialer = Arc::new(dialer);
    let tasks: Vec<_> = (0..256)
        .map(|_| {
            let dialer = Arc::clone(&dialer);
            tokio::spawn(async move { fetch(&dialer, "s", &http(HOST), "/").await })
        })
        .collect();
    eventually("all requests to arrive", || {
        (latch.waiting() == 256).then_some(())
    })
    .await;
    tokio::time::pause();
    let error = fetch(&dialer, "s", &http(HOST), "/").await.unwrap_err();
    tokio::time::resume();
    assert!(matches!(error, DialError::Busy { .. }), "{error:?}");
    assert!(!error.counts_as_failure());
    latch.open();
    for answer in tasks {
        assert_eq!(answer.await.unwrap().unwrap(), "fine");
    }
    assert_eq!(fetch(&dialer, "s", &http(HOST), "/").await.unwrap(), "fine");
}
