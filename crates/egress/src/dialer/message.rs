//! The request as it goes out: rebuilt from the route, never from what the client wrote.

use http::header::{
    CONNECTION, CONTENT_LENGTH, HOST, HeaderValue, TE, TRAILER, TRANSFER_ENCODING, UPGRADE,
};
use http::uri::{Authority, PathAndQuery, Scheme};
use http::{Method, Request, Uri, Version};
use hyper::body::Body;

use super::error::DialError;
use crate::headers;
use crate::outgoing::Route;

/// Strips what belongs to the client's own hop. How long the body is, the writer learns from
/// the body: a length from elsewhere could differ from what follows.
pub(super) fn clean<B: Body>(route: &Route, request: &mut Request<B>) -> Result<(), DialError> {
    if request.method() == Method::CONNECT {
        return Err(DialError::Unsendable {
            host: route.host.clone(),
            detail: "CONNECT is for proxies",
        });
    }
    // The writer says nothing of a body that is not there, and some servers insist (411).
    let says_empty = matches!(
        *request.method(),
        Method::POST | Method::PUT | Method::PATCH
    ) && request.body().is_end_stream();
    let headers = request.headers_mut();
    headers::strip_request(headers);
    headers.remove(CONTENT_LENGTH);
    if says_empty {
        headers.insert(CONTENT_LENGTH, HeaderValue::from_static("0"));
    }
    Ok(())
}

/// Origin form, and one Host.
pub(super) fn for_http1<B: Body>(route: &Route, request: &mut Request<B>) -> Result<(), DialError> {
    let authority = authority(route)?;
    let host = HeaderValue::from_str(authority.as_str()).map_err(|error| DialError::BadName {
        host: route.host.clone(),
        detail: error.to_string(),
    })?;
    *request.uri_mut() = Uri::from(path(request.uri()));
    *request.version_mut() = Version::HTTP_11;
    // hyper drops the body of a GET or HEAD whose length is not known, unless a header says
    // that there is one (RFC 9110, 9.3.1 allows it; Elasticsearch clients send it).
    let has_body = !request.body().is_end_stream() && request.body().size_hint().exact().is_none();
    let headers = request.headers_mut();
    if has_body {
        headers.insert(TRANSFER_ENCODING, HeaderValue::from_static("chunked"));
    }
    headers.insert(HOST, host);
    // RFC 9110, 10.1.4: TE is itself of one hop.
    if headers.contains_key(TE) {
        headers.insert(CONNECTION, HeaderValue::from_static("te"));
    }
    Ok(())
}

/// `:scheme`, `:authority` and `:path`, and no Host. A request that was first meant for an
/// HTTP/1 connection also loses the framing of HTTP/1.
pub(super) fn for_http2<B>(route: &Route, request: &mut Request<B>) -> Result<(), DialError> {
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

/// Asks for `protocol` again, which [`clean`] took away.
pub(super) fn ask_for_upgrade<B>(request: &mut Request<B>, protocol: HeaderValue) {
    let headers = request.headers_mut();
    headers.remove(TE);
    headers.remove(TRAILER);
    headers.insert(UPGRADE, protocol);
    headers.insert(CONNECTION, HeaderValue::from_static("upgrade"));
}

fn authority(route: &Route) -> Result<Authority, DialError> {
    let usual = if route.tls { 443 } else { 80 };
    let text = if route.port == usual {
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
