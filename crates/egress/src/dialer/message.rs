//! Builds the request that is sent: target and Host come from the route, never from the client.

use http::header::{
    CONNECTION, CONTENT_LENGTH, HOST, HeaderValue, TE, TRAILER, TRANSFER_ENCODING, UPGRADE,
};
use http::uri::{Authority, PathAndQuery, Scheme};
use http::{Method, Request, Uri, Version};
use hyper::body::Body;

use super::error::DialError;
use crate::headers;
use crate::outgoing::Route;

/// Removes hop-by-hop headers and Content-Length. hyper takes the length from the body: a
/// header could differ from it.
pub(super) fn strip_headers<B: Body>(
    route: &Route,
    request: &mut Request<B>,
) -> Result<(), DialError> {
    if request.method() == Method::CONNECT {
        return Err(DialError::Unsendable {
            host: route.host.clone(),
            detail: "CONNECT is only valid for a proxy",
        });
    }
    // hyper sends no Content-Length for an empty body, and some servers require one (411).
    let needs_length = matches!(
        *request.method(),
        Method::POST | Method::PUT | Method::PATCH
    ) && request.body().is_end_stream();
    let headers = request.headers_mut();
    headers::strip_request(headers);
    headers.remove(CONTENT_LENGTH);
    if needs_length {
        headers.insert(CONTENT_LENGTH, HeaderValue::from_static("0"));
    }
    Ok(())
}

/// Puts the request into HTTP/1 form: origin-form target and one Host.
pub(super) fn to_http1_form<B: Body>(
    route: &Route,
    request: &mut Request<B>,
) -> Result<(), DialError> {
    let authority = authority(route)?;
    let host = HeaderValue::from_str(authority.as_str()).map_err(|error| DialError::BadName {
        host: route.host.clone(),
        detail: error.to_string(),
    })?;
    *request.uri_mut() = Uri::from(path(request.uri()));
    *request.version_mut() = Version::HTTP_11;
    // hyper drops the body of a GET or HEAD with an unknown length unless a header announces a
    // body (RFC 9110, 9.3.1 allows one; Elasticsearch clients send it).
    let has_body = !request.body().is_end_stream() && request.body().size_hint().exact().is_none();
    let headers = request.headers_mut();
    if has_body {
        headers.insert(TRANSFER_ENCODING, HeaderValue::from_static("chunked"));
    }
    headers.insert(HOST, host);
    // RFC 9110, 10.1.4: TE is a hop-by-hop header.
    if headers.contains_key(TE) {
        headers.insert(CONNECTION, HeaderValue::from_static("te"));
    }
    Ok(())
}

/// Puts the request into HTTP/2 form: `:scheme`, `:authority` and `:path`, without Host and
/// without the HTTP/1 framing of an earlier attempt.
pub(super) fn to_http2_form<B>(route: &Route, request: &mut Request<B>) -> Result<(), DialError> {
    let mut parts = http::uri::Parts::default();
    parts.scheme = Some(if route.tls {
        Scheme::HTTPS
    } else {
        Scheme::HTTP
    });
    parts.authority = Some(authority(route)?);
    parts.path_and_query = Some(path(request.uri()));
    *request.uri_mut() = Uri::from_parts(parts).map_err(|error| DialError::BadName {
        host: route.host.clone(),
        detail: error.to_string(),
    })?;
    *request.version_mut() = Version::HTTP_2;
    let headers = request.headers_mut();
    headers.remove(HOST);
    headers.remove(CONNECTION);
    headers.remove(TRANSFER_ENCODING);
    Ok(())
}

/// Restores the Upgrade to `protocol` that [`strip_headers`] removed.
pub(super) fn request_upgrade<B>(request: &mut Request<B>, protocol: HeaderValue) {
    let headers = request.headers_mut();
    headers.remove(TE);
    headers.remove(TRAILER);
    headers.insert(UPGRADE, protocol);
    headers.insert(CONNECTION, HeaderValue::from_static("upgrade"));
}

fn authority(route: &Route) -> Result<Authority, DialError> {
    let default_port = if route.tls { 443 } else { 80 };
    let text = if route.port == default_port {
        route.host.to_string()
    } else {
        format!("{}:{}", route.host, route.port)
    };
    Authority::try_from(text).map_err(|error| DialError::BadName {
        host: route.host.clone(),
        detail: error.to_string(),
    })
}

fn path(uri: &Uri) -> PathAndQuery {
    uri.path_and_query()
        .cloned()
        .unwrap_or_else(|| PathAndQuery::from_static("/"))
}
