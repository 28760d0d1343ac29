//! Requests and responses as the upstream or the client receives them.

use http::Version;
use testkit::origin::{OriginReply, OriginRequest, OriginServer};

use super::*;

const HOST: &str = "api.example";

/// Sends the request over HTTP/1.1 and over HTTP/2, and returns both as the server received them.
async fn receive_over_both(request: impl Fn() -> Request<MessageBody>) -> [OriginRequest; 2] {
    let operator = Operator::new();
    let http1 = OriginServer::http(|_| OriginReply::text("fine"));
    let http2 = OriginServer::https(operator.ca.identity(&[HOST]), |_| OriginReply::text("fine"));
    let lines = format!(
        "resolve: {{'{HOST}:80': '{}', '{HOST}:443': '{}'}}\nextra_roots: [root.pem]",
        http1.address(),
        http2.address()
    );
    let dialer = Dialer::new(&operator.settings(&lines)).unwrap();
    for route in [http(HOST), https(HOST)] {
        let sent = dialer
            .send(&sandbox("s"), gate_request(&route, request()))
            .await
            .unwrap();
        read_body(sent).await;
    }
    [http1.requests().remove(0), http2.requests().remove(0)]
}

#[tokio::test]
async fn host_header_comes_from_the_route() {
    let request = || {
        Request::get("http://evil.example/path?q=1")
            .header("host", "evil.example")
            .body(body::empty())
            .unwrap()
    };
    let [over_http1, over_http2] = receive_over_both(request).await;
    assert_eq!(over_http1.version, Version::HTTP_11);
    assert_eq!(over_http1.uri, "/path?q=1");
    assert_eq!(over_http1.header("host"), Some(HOST));
    assert_eq!(over_http2.version, Version::HTTP_2);
    assert_eq!(over_http2.uri, "https://api.example/path?q=1");
    assert_eq!(over_http2.header("host"), None);
}

#[tokio::test]
async fn host_header_has_a_non_default_port() {
    let operator = Operator::new();
    let origin = OriginServer::http(|_| OriginReply::text("fine"));
    let dialer = operator.dialer(HOST, origin.address(), "");
    for (port, header) in [
        (80, "api.example"),
        (443, "api.example:443"),
        (8080, "api.example:8080"),
    ] {
        let route = Route { port, ..http(HOST) };
        fetch(&dialer, "s", &route, "/").await.unwrap();
        assert_eq!(
            origin.requests().last().unwrap().header("host"),
            Some(header)
        );
    }
}

#[tokio::test]
async fn hop_by_hop_headers_are_removed() {
    let request = || {
        Request::get("/")
            .header("connection", "keep-alive, x-mine, Authorization, host")
            .header("keep-alive", "timeout=5")
            .header("proxy-connection", "keep-alive")
            .header("proxy-authorization", "Basic c2VjcmV0")
            .header("upgrade", "h2c")
            .header("http2-settings", "AAMAAABk")
            .header("te", "gzip, trailers")
            .header("x-mine", "1")
            .header("x-kept", "1")
            .header("authorization", "Bearer kept")
            .body(body::empty())
            .unwrap()
    };
    for received in receive_over_both(request).await {
        for removed in [
            "keep-alive",
            "proxy-connection",
            "proxy-authorization",
            "upgrade",
            "http2-settings",
            "x-mine",
            "transfer-encoding",
        ] {
            assert_eq!(
                received.header(removed),
                None,
                "{removed} over {:?}",
                received.version
            );
        }
        assert_eq!(received.header("authorization"), Some("Bearer kept"));
        assert_eq!(received.header("x-kept"), Some("1"));
        assert_eq!(received.header("te"), Some("trailers"));
        let connection = (received.version == Version::HTTP_11).then_some("te");
        assert_eq!(received.header("connection"), connection);
    }
}

#[tokio::test]
async fn content_length_is_that_of_the_body() {
    let request = || {
        Request::post("/")
            .header("content-length", "9999")
            .header("transfer-encoding", "chunked")
            .body(body::full("seven b"))
            .unwrap()
    };
    for received in receive_over_both(request).await {
        assert_eq!(received.body, "seven b");
        assert_eq!(received.header("content-length"), Some("7"));
        assert_eq!(received.header("transfer-encoding"), None);
    }
}

#[tokio::test]
async fn post_without_a_body_has_content_length_zero() {
    for received in receive_over_both(|| post("/", body::empty())).await {
        assert_eq!(
            received.header("content-length"),
            Some("0"),
            "{:?}",
            received.version
        );
    }
}

#[tokio::test]
async fn response_trailers_are_forwarded() {
    let operator = Operator::new();
    let origin = OriginServer::https(operator.ca.identity(&[HOST]), |_| {
        OriginReply::text("body").trailer("grpc-status", "0")
    });
    let dialer = operator.dialer(HOST, origin.address(), "");
    let sent = dialer
        .send(&sandbox("s"), gate_request(&https(HOST), get("/")))
        .await
        .unwrap();
    let answer = sent.response.collect().await.unwrap();
    assert_eq!(answer.trailers().unwrap()["grpc-status"], "0");
    assert_eq!(answer.to_bytes(), "body");
}

#[tokio::test]
async fn options_request_keeps_the_asterisk_form() {
    let request = || Request::options("*").body(body::empty()).unwrap();
    for received in receive_over_both(request).await {
        assert_eq!(received.uri.path(), "*", "{:?}", received.version);
    }
}

#[tokio::test]
async fn connect_request_is_refused() {
    let origin = OriginServer::http(|_| OriginReply::text("fine"));
    let dialer = Operator::new().dialer(HOST, origin.address(), "");
    let request = Request::connect("api.example:443")
        .body(body::empty())
        .unwrap();
    let error = dialer
        .send(&sandbox("s"), gate_request(&http(HOST), request))
        .await
        .unwrap_err();
    assert!(matches!(error, DialError::Unsendable { .. }), "{error:?}");
    assert_eq!(origin.connections(), 0);
}
