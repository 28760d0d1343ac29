//! Which headers travel, and which end at the gate.

use http::header::{
    ACCEPT, ACCEPT_ENCODING, ACCEPT_LANGUAGE, AUTHORIZATION, CACHE_CONTROL, CONNECTION,
    CONTENT_ENCODING, CONTENT_LENGTH, CONTENT_TYPE, COOKIE, EXPECT, HOST, HeaderMap, HeaderName,
    HeaderValue, PRAGMA, PROXY_AUTHENTICATE, PROXY_AUTHORIZATION, RANGE, SET_COOKIE, TE, TRAILER,
    TRANSFER_ENCODING, UPGRADE, USER_AGENT,
};

/// What the sandbox may claim to be. It is checked and never leaves.
pub const CONTAINER_ID: HeaderName = HeaderName::from_static("x-container-id");

/// The version of git's protocol that a client speaks.
pub const GIT_PROTOCOL: HeaderName = HeaderName::from_static("git-protocol");

const API_KEY: HeaderName = HeaderName::from_static("x-api-key");
const KEEP_ALIVE: HeaderName = HeaderName::from_static("keep-alive");
const PROXY_CONNECTION: HeaderName = HeaderName::from_static("proxy-connection");
const HTTP2_SETTINGS: HeaderName = HeaderName::from_static("http2-settings");

/// Between two neighbours only (RFC 9110, 7.6.1), and what older programs made of it.
/// `Trailer` is none of them: hyper writes the trailers that it names, and no others.
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

/// What `Connection` cannot take away: who asks for what, and where a message ends.
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

/// What a request says to the gate alone.
const TO_THE_GATE: [HeaderName; 3] = [HOST, EXPECT, CONTAINER_ID];

/// Takes off what is between the client or the upstream and us.
pub fn strip_hop_by_hop(headers: &mut HeaderMap) {
    let named: Vec<HeaderName> = words(headers, &CONNECTION)
        .filter_map(|word| HeaderName::try_from(word).ok())
        .filter(|name| !PROTECTED.contains(name))
        .collect();
    remove(headers, |name| {
        HOP_BY_HOP.contains(name) || named.contains(name)
    });
}

/// Takes off what `goes`. A message has few headers: to go through them once is less work than
/// to look for each of many names.
fn remove(headers: &mut HeaderMap, goes: impl Fn(&HeaderName) -> bool) {
    let gone: Vec<HeaderName> = headers.keys().filter(|name| goes(name)).cloned().collect();
    for name in &gone {
        headers.remove(name);
    }
}

/// Takes off what a request says to the gate alone, and puts the rest into the form that
/// every version of HTTP carries.
pub fn strip_request(headers: &mut HeaderMap) {
    let trailers = words(headers, &TE).any(|word| word.eq_ignore_ascii_case("trailers"));
    strip_hop_by_hop(headers);
    if trailers {
        headers.insert(TE, HeaderValue::from_static("trailers"));
    }
    remove(headers, |name| TO_THE_GATE.contains(name));
    join_cookies(headers);
}

/// The headers of a request as they will be sent.
pub fn as_sent(received: &HeaderMap) -> HeaderMap {
    let mut sent = received.clone();
    strip_request(&mut sent);
    sent
}

/// What a request may say that nobody in particular sends. Forges know more names for a
/// token than anybody could list, so this is a list of what stays.
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

/// Takes off everything that could say who asks.
pub fn make_anonymous(headers: &mut HeaderMap) {
    remove(headers, |name| !ANONYMOUS.contains(name));
}

/// HTTP/2 may split a cookie for compression; HTTP/1 has one line (RFC 9113, 8.2.3).
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

/// Whether the client wants to speak WebSocket (RFC 6455, 4.1).
pub fn asks_for_websocket(headers: &HeaderMap) -> bool {
    let has = |name: &HeaderName, wanted: &str| {
        words(headers, name).any(|word| word.eq_ignore_ascii_case(wanted))
    };
    has(&CONNECTION, "upgrade") && has(&UPGRADE, "websocket")
}

/// The comma-separated words of every header called `name`.
fn words<'a>(headers: &'a HeaderMap, name: &HeaderName) -> impl Iterator<Item = &'a str> {
    headers
        .get_all(name)
        .iter()
        .filter_map(|value| value.to_str().ok())
        .flat_map(|value| value.split(','))
        .map(str::trim)
        .filter(|word| !word.is_empty())
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
    fn what_connection_names_goes_but_not_what_says_who_and_where() {
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
    fn a_request_leaves_without_what_was_said_to_the_gate() {
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
    fn an_anonymous_request_says_nothing_of_who_sends_it() {
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
    fn a_websocket_is_asked_for_in_two_headers() {
        let asks = |connection, upgrade| {
            asks_for_websocket(&headers(&[
                ("connection", connection),
                ("upgrade", upgrade),
            ]))
        };
        assert!(asks("keep-alive, Upgrade", "WebSocket"));
        assert!(!asks("keep-alive", "websocket"));
        assert!(!asks("upgrade", "h2c"));
    }
}
