//! WebSocket, however a client asks for it, as the one request that every stage knows.
//!
//! Over HTTP/1 it is a GET with an `Upgrade` (RFC 6455); over HTTP/2 an extended CONNECT
//! (RFC 8441), which is turned into that GET where it comes in, and its 101 into a 200
//! where it goes out. Upstream is always asked over HTTP/1.

use http::header::{
    CONNECTION, HeaderMap, HeaderValue, SEC_WEBSOCKET_ACCEPT, SEC_WEBSOCKET_EXTENSIONS,
    SEC_WEBSOCKET_KEY, UPGRADE,
};
use http::request::Parts;
use http::{Method, Response, StatusCode};
use hyper::ext::Protocol;
use policy::verdict::Denial;

use crate::body::Content;
use crate::headers;
use crate::request;

/// The one protocol that a connection may be changed to.
const WEBSOCKET: HeaderValue = HeaderValue::from_static("websocket");

/// Any sixteen bytes do (RFC 6455, 4.1): the key proves nothing about anybody, and over
/// HTTP/2 the client never sees the answer to it.
const KEY: HeaderValue = HeaderValue::from_static("UGFsaXNhZGUtUGFsaXNhZA==");

/// Whether a request asks for WebSocket.
pub fn is_asked_for(head: &Parts) -> bool {
    head.method == Method::GET && headers::asks_for_websocket(&head.headers)
}

/// Takes an HTTP/2 request as it came. An extended CONNECT for WebSocket becomes a GET; any
/// other CONNECT would be a tunnel inside a tunnel.
pub fn from_http2(head: &mut Parts) -> Result<(), Denial> {
    if head.method != Method::CONNECT {
        return Ok(());
    }
    let protocol = head.extensions.remove::<Protocol>();
    if protocol.is_none_or(|protocol| protocol.as_str() != "websocket") {
        return Err(request::framing("a tunnel inside a tunnel"));
    }
    head.method = Method::GET;
    let headers = &mut head.headers;
    headers.insert(CONNECTION, HeaderValue::from_static("upgrade"));
    headers.insert(UPGRADE, WEBSOCKET);
    headers.insert(SEC_WEBSOCKET_KEY, KEY);
    Ok(())
}

/// Makes an answer fit for HTTP/2, which has neither 101 nor these headers. To who asked for
/// WebSocket, every success is one: an upstream that will not switch has not succeeded.
pub fn to_http2(mut response: Response<Content>, asked: bool) -> Response<Content> {
    let headers = response.headers_mut();
    for name in [CONNECTION, UPGRADE, SEC_WEBSOCKET_ACCEPT] {
        headers.remove(name);
    }
    if response.status() == StatusCode::SWITCHING_PROTOCOLS {
        *response.status_mut() = StatusCode::OK;
    } else if asked && response.status().is_success() {
        *response.status_mut() = StatusCode::BAD_GATEWAY;
    }
    response
}

/// Asks the upstream for WebSocket.
pub fn ask(headers: &mut HeaderMap) {
    headers.insert(UPGRADE, WEBSOCKET);
    // What is compressed with a history could not be looked into.
    headers.remove(SEC_WEBSOCKET_EXTENSIONS);
}

/// Tells the client that the upstream agreed.
pub fn agree(headers: &mut HeaderMap) {
    headers::strip_hop_by_hop(headers);
    headers.remove(SEC_WEBSOCKET_EXTENSIONS);
    headers.insert(UPGRADE, WEBSOCKET);
    headers.insert(CONNECTION, HeaderValue::from_static("upgrade"));
}

#[cfg(test)]
mod tests {
    use http::Request;

    use super::*;

    fn connect(protocol: Option<&'static str>) -> Parts {
        let mut request = Request::builder()
            .method(Method::CONNECT)
            .uri("https://x.example/chat")
            .body(())
            .unwrap();
        if let Some(protocol) = protocol {
            let protocol = Protocol::from_static(protocol);
            request.extensions_mut().insert(protocol);
        }
        request.into_parts().0
    }

    #[test]
    fn an_extended_connect_is_judged_as_the_get_it_stands_for() {
        let mut head = connect(Some("websocket"));
        from_http2(&mut head).unwrap();
        assert_eq!(head.method, Method::GET);
        assert!(is_asked_for(&head));
        for protocol in [None, Some("connect-udp")] {
            let denial = from_http2(&mut connect(protocol)).unwrap_err();
            assert_eq!(denial.reason.code(), "framing");
        }
    }

    #[test]
    fn a_switch_of_protocols_is_a_plain_yes_over_http2() {
        let mut response = Response::new(crate::body::empty());
        *response.status_mut() = StatusCode::SWITCHING_PROTOCOLS;
        agree(response.headers_mut());
        let response = to_http2(response, true);
        assert_eq!(response.status(), StatusCode::OK);
        assert!(response.headers().is_empty());
        // And a plain yes is no switch.
        let plain = || Response::new(crate::body::empty());
        assert_eq!(to_http2(plain(), true).status(), StatusCode::BAD_GATEWAY);
        assert_eq!(to_http2(plain(), false).status(), StatusCode::OK);
    }
}
