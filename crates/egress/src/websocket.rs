//! WebSocket requests over HTTP/1 and HTTP/2, in one form for all stages.
//!
//! Over HTTP/1 the request is a GET with `Upgrade` (RFC 6455). Over HTTP/2 it is an extended
//! CONNECT (RFC 8441), which is converted to that GET, and the 101 to a 200. The upstream request
//! is always HTTP/1.

use http::header::{
    CONNECTION, HeaderMap, HeaderValue, SEC_WEBSOCKET_ACCEPT, SEC_WEBSOCKET_EXTENSIONS,
    SEC_WEBSOCKET_KEY, UPGRADE,
};
use http::request::Parts;
use http::{Method, Response, StatusCode};
use hyper::ext::Protocol;
use policy::verdict::Denial;

use crate::body::MessageBody;
use crate::headers;
use crate::request;

/// The only protocol that a connection may upgrade to.
const WEBSOCKET: HeaderValue = HeaderValue::from_static("websocket");

/// The `Sec-WebSocket-Key` of upstream requests for HTTP/2 clients, which send none. Any sixteen
/// bytes are valid (RFC 6455, 4.1): the key authenticates no client, and the gate does not forward
/// the upstream's response to it to an HTTP/2 client.
const KEY: HeaderValue = HeaderValue::from_static("UGFsaXNhZGUtUGFsaXNhZA==");

/// Whether a request asks for WebSocket.
pub fn is_requested(head: &Parts) -> bool {
    head.method == Method::GET && headers::requests_websocket(&head.headers)
}

/// Converts an extended CONNECT for WebSocket to a GET. Any other CONNECT over HTTP/2 would be a
/// tunnel inside a tunnel and is refused.
pub fn from_http2(head: &mut Parts) -> Result<(), Denial> {
    if head.method != Method::CONNECT {
        return Ok(());
    }
    let protocol = head.extensions.remove::<Protocol>();
    if protocol.is_none_or(|protocol| protocol.as_str() != "websocket") {
        return Err(request::framing_denial(
            "CONNECT over HTTP/2 is supported for WebSocket only",
        ));
    }
    head.method = Method::GET;
    let headers = &mut head.headers;
    headers.insert(CONNECTION, HeaderValue::from_static("upgrade"));
    headers.insert(UPGRADE, WEBSOCKET);
    headers.insert(SEC_WEBSOCKET_KEY, KEY);
    Ok(())
}

/// Converts a response for HTTP/2, which has neither 101 nor these headers. A WebSocket client
/// takes any 2xx for an accepted upgrade, so a 2xx without an upgrade becomes a 502.
pub fn to_http2(
    mut response: Response<MessageBody>,
    websocket_requested: bool,
) -> Response<MessageBody> {
    let headers = response.headers_mut();
    for name in [CONNECTION, UPGRADE, SEC_WEBSOCKET_ACCEPT] {
        headers.remove(name);
    }
    if response.status() == StatusCode::SWITCHING_PROTOCOLS {
        *response.status_mut() = StatusCode::OK;
    } else if websocket_requested && response.status().is_success() {
        *response.status_mut() = StatusCode::BAD_GATEWAY;
    }
    response
}

/// Adds the upgrade to WebSocket to an upstream request.
pub fn request_upgrade(headers: &mut HeaderMap) {
    headers.insert(UPGRADE, WEBSOCKET);
    // Compression with a shared context would prevent inspection.
    headers.remove(SEC_WEBSOCKET_EXTENSIONS);
}

/// Sets the headers of the 101 that the client receives.
pub fn confirm_upgrade(headers: &mut HeaderMap) {
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
    fn extended_connect_for_websocket_becomes_a_get() {
        let mut head = connect(Some("websocket"));
        from_http2(&mut head).unwrap();
        assert_eq!(head.method, Method::GET);
        assert!(is_requested(&head));
        for protocol in [None, Some("connect-udp")] {
            let denial = from_http2(&mut connect(protocol)).unwrap_err();
            assert_eq!(denial.reason.code(), "framing");
        }
    }

    #[test]
    fn switching_protocols_becomes_ok_over_http2() {
        let mut response = Response::new(crate::body::empty());
        *response.status_mut() = StatusCode::SWITCHING_PROTOCOLS;
        confirm_upgrade(response.headers_mut());
        let response = to_http2(response, true);
        assert_eq!(response.status(), StatusCode::OK);
        assert!(response.headers().is_empty());
        // A 2xx without an upgrade is an error.
        let plain = || Response::new(crate::body::empty());
        assert_eq!(to_http2(plain(), true).status(), StatusCode::BAD_GATEWAY);
        assert_eq!(to_http2(plain(), false).status(), StatusCode::OK);
    }
}
