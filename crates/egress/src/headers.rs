//! Header rules: which headers are forwarded and which are removed.

use http::header::{
    ACCEPT, ACCEPT_ENCODING, ACCEPT_LANGUAGE, AUTHORIZATION, CACHE_CONTROL, CONNECTION,
    CONTENT_ENCODING, CONTENT_LENGTH, CONTENT_TYPE, COOKIE, EXPECT, HOST, HeaderMap, HeaderName,
    HeaderValue, PRAGMA, PROXY_AUTHENTICATE, PROXY_AUTHORIZATION, RANGE, SET_COOKIE, TE, TRAILER,
    TRANSFER_ENCODING, UPGRADE, USER_AGENT,
};

/// The sandbox id that a client may claim. It is checked and never forwarded.
pub const CONTAINER_ID: HeaderName = HeaderName::from_static("x-container-id");

/// The version of the git protocol that a client requests.
pub const GIT_PROTOCOL: HeaderName = HeaderName::from_static("git-protocol");

const API_KEY: HeaderName = HeaderName::from_static("x-api-key");
const KEEP_ALIVE: HeaderName = HeaderName::from_static("keep-alive");
const PROXY_CONNECTION: HeaderName = HeaderName::from_static("proxy-connection");
const HTTP2_SETTINGS: HeaderName = HeaderName::from_static("http2-settings");

/// Hop-by-hop headers (RFC 9110, 7.6.1) and their older forms. `Trailer` stays: hyper writes only
/// the trailers that it names.
const HOP_BY_HOP: [HeaderName; 9] = [
    CONNECTION,
    KEEP_ALIVE,
    PROXY_CONNECTION,
    PROXY_AUTHENTICATE,
    PROXY_AUTHORIZATION,
    TE,
    TRANSFER_ENCODING,
    UPGRADE,
    HTTP2_SETTINGS,
];

/// Headers that a client cannot remove through `Connection`: identity, content and framing.
const PROTECTED: [HeaderName; 12] = [
    AUTHORIZATION,
    HOST,
    CONTENT_LENGTH,
    CONTENT_TYPE,
    CONTENT_ENCODING,
    COOKIE,
    SET_COOKIE,
    RANGE,
    ACCEPT_ENCODING,
    TRAILER,
    API_KEY,
    CONTAINER_ID,
];

/// Request headers for the gate only.
const GATE_ONLY: [HeaderName; 3] = [HOST, EXPECT, CONTAINER_ID];

/// Removes the headers of the hop between the gate and its client or upstream.
pub fn strip_hop_by_hop(headers: &mut HeaderMap) {
    let named: Vec<HeaderName> = list_items(headers, &CONNECTION)
        .filter_map(|item| HeaderName::try_from(item).ok())
        .filter(|name| !PROTECTED.contains(name))
        .collect();
    remove(headers, |name| {
        HOP_BY_HOP.contains(name) || named.contains(name)
    });
}

/// Removes the headers that `is_removed` selects. One pass over the few headers of a message is
/// cheaper than a lookup of each name.
fn remove(headers: &mut HeaderMap, is_removed: impl Fn(&HeaderName) -> bool) {
    let removed: Vec<HeaderName> = headers
        .keys()
        .filter(|name| is_removed(name))
        .cloned()
        .collect();
    for name in &removed {
        headers.remove(name);
    }
}

/// Removes hop-by-hop and gate-only headers, and puts the rest into a form that is valid in every
/// version of HTTP.
pub fn strip_request(headers: &mut HeaderMap) {
    let trailers = list_items(headers, &TE).any(|item| item.eq_ignore_ascii_case("trailers"));
    strip_hop_by_hop(headers);
    if trailers {
        headers.insert(TE, HeaderValue::from_static("trailers"));
    }
    remove(headers, |name| GATE_ONLY.contains(name));
    join_cookies(headers);
}

/// The headers of a request as they will be sent.
pub fn as_sent(received: &HeaderMap) -> HeaderMap {
    let mut sent = received.clone();
    strip_request(&mut sent);
    sent
}

/// Headers that an anonymous request keeps. This is an allowlist, because forges accept tokens in
/// many headers.
const ANONYMOUS: [HeaderName; 13] = [
    ACCEPT,
    ACCEPT_ENCODING,
    ACCEPT_LANGUAGE,
    CACHE_CONTROL,
    CONTENT_ENCODING,
    CONTENT_LENGTH,
    CONTENT_TYPE,
    GIT_PROTOCOL,
    HOST,
    PRAGMA,
    RANGE,
    TRANSFER_ENCODING,
    USER_AGENT,
];

/// Removes every header that could identify or authenticate the client.
pub fn make_anonymous(headers: &mut HeaderMap) {
    remove(headers, |name| !ANONYMOUS.contains(name));
}

/// Joins Cookie headers that HTTP/2 may split for compression (RFC 9113, 8.2.3).
fn join_cookies(headers: &mut HeaderMap) {
    if headers.get_all(COOKIE).iter().nth(1).is_none() {
        return;
    }
    let parts: Vec<&[u8]> = headers
        .get_all(COOKIE)
        .iter()
        .map(HeaderValue::as_bytes)
        .collect();
    if let Ok(joined) = HeaderValue::from_bytes(&parts.join(&b"; "[..])) {
        headers.insert(COOKIE, joined);
    }
}

/// Whether the headers ask for an upgrade to WebSocket (RFC 6455, 4.1).
pub fn requests_websocket(headers: &HeaderMap) -> bool {
    let has = |name: &HeaderName, wanted: &str| {
        list_items(headers, name).any(|item| item.eq_ignore_ascii_case(wanted))
    };
    has(&CONNECTION, "upgrade") && has(&UPGRADE, "websocket")
}

/// The comma-separated items of every header called `name`.
fn list_items<'a>(headers: &'a HeaderMap, name: &HeaderName) -> impl Iterator<Item = &'a str> {
    headers
        .get_all(name)
        .iter()
        .filter_map(|value| value.to_str().ok())
        .flat_map(|value| value.split(','))
        .map(str::trim)
        .filter(|item| !item.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(lines: &[(&str, &str)]) -> HeaderMap {
        lines
            .iter()
            .map(|(name, value)| {
                let name = HeaderName::try_from(*name).unwrap();
                (name, HeaderValue::try_from(*value).unwrap())
            })
            .collect()
    }

    fn names(headers: &HeaderMap) -> Vec<&str> {
        let mut names: Vec<_> = headers.keys().map(HeaderName::as_str).collect();
        names.sort_unstable();
        names
    }

    #[test]
    fn headers_named_by_connection_are_removed_except_protected_ones() {
        let mut all = headers(&[
            ("connection", "close, x-mine, Authorization, HOST"),
            ("connection", "content-length, X-Other"),
            ("x-mine", "1"),
            ("x-other", "1"),
            ("x-kept", "1"),
            ("authorization", "stub"),
            ("host", "x.example"),
            ("content-length", "3"),
            ("keep-alive", "1"),
            ("proxy-authorization", "secret"),
            ("transfer-encoding", "chunked"),
        ]);
        strip_hop_by_hop(&mut all);
        assert_eq!(
            names(&all),
            ["authorization", "content-length", "host", "x-kept"]
        );
    }

    #[test]
    fn strip_request_removes_gate_headers_and_joins_cookies() {
        let mut all = headers(&[
            ("x-container-id", "fix-1"),
            ("connection", "x-container-id, te"),
            ("te", "trailers, deflate"),
            ("expect", "100-continue"),
            ("host", "x.example"),
            ("cookie", "a=1"),
            ("cookie", "b=2"),
            ("accept", "*/*"),
        ]);
        strip_request(&mut all);
        assert_eq!(names(&all), ["accept", "cookie", "te"]);
        assert_eq!(all[COOKIE], "a=1; b=2");
        assert_eq!(all[TE], "trailers");
    }

    #[test]
    fn anonymous_request_keeps_only_listed_headers() {
        let mut all = headers(&[
            ("authorization", "Basic x"),
            ("cookie", "a=1"),
            ("private-token", "x"),
            ("x-anything", "x"),
            ("git-protocol", "version=2"),
            ("user-agent", "git/2.47"),
            ("content-type", "application/x-git-upload-pack-request"),
        ]);
        make_anonymous(&mut all);
        assert_eq!(names(&all), ["content-type", "git-protocol", "user-agent"]);
    }

    #[test]
    fn websocket_needs_both_connection_and_upgrade_headers() {
        let requested = |connection, upgrade| {
            requests_websocket(&headers(&[
                ("connection", connection),
                ("upgrade", upgrade),
            ]))
        };
        assert!(requested("keep-alive, Upgrade", "WebSocket"));
        assert!(!requested("keep-alive", "websocket"));
        assert!(!requested("upgrade", "h2c"));
    }
}
