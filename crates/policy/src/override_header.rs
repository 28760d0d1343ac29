//! Override headers: headers by which some servers replace the method or path of a request.
//!
//! Rules are about the method and path of the request line. A server that honours one of these
//! headers executes another request than the one that was checked, so a request with such a
//! header is refused where a rule restricts methods or paths.
//!
//! **Refused, not removed.** Without the header, a `POST` that means `PATCH` would be executed as
//! a `POST`, and neither side would notice. The refusal names the header, so that the client can
//! send the request with the real method and path. Where no rule restricts methods or paths the
//! headers pass unchanged: clients of Google and Microsoft use them legitimately.
//!
//! **Not here:** overrides in the query or in a form (`_method` in Rails, Laravel and
//! Symfony). They depend on the server's framework, and the gate would have to read the form.

/// The part of the request line that a header overrides.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OverrideHeader {
    /// The method.
    Method,
    /// The path, or its prefix.
    Path,
}

/// The known names, in lower case. They are used by OData and Microsoft (`x-http-method`),
/// Google, Rails, Laravel, Express and Spring (`x-http-method-override`, `x-method-override`),
/// IIS, Symfony and Zend (`x-original-url`, `x-rewrite-url`), and by reverse proxies that
/// applications trust (`x-forwarded-…`, `x-original-…`, `x-envoy-…`, `x-script-name`).
const NAMES: [(&str, OverrideHeader); 20] = [
    ("x-http-method-override", OverrideHeader::Method),
    ("x-http-method", OverrideHeader::Method),
    ("x-method-override", OverrideHeader::Method),
    ("x-original-method", OverrideHeader::Method),
    ("x-forwarded-method", OverrideHeader::Method),
    ("x-original-url", OverrideHeader::Path),
    ("x-original-uri", OverrideHeader::Path),
    ("x-original-path", OverrideHeader::Path),
    ("x-rewrite-url", OverrideHeader::Path),
    ("x-rewrite-uri", OverrideHeader::Path),
    ("x-override-url", OverrideHeader::Path),
    ("x-http-path-override", OverrideHeader::Path),
    ("x-http-destinationurl", OverrideHeader::Path),
    ("x-forwarded-uri", OverrideHeader::Path),
    ("x-forwarded-url", OverrideHeader::Path),
    ("x-forwarded-path", OverrideHeader::Path),
    ("x-forwarded-prefix", OverrideHeader::Path),
    ("x-envoy-original-path", OverrideHeader::Path),
    ("x-waws-unencoded-url", OverrideHeader::Path),
    ("x-script-name", OverrideHeader::Path),
];

/// The usual name and kind of the override header `name`, if it is one. CGI and its successors
/// (WSGI, Rack, PHP) replace all characters but letters and digits by `_`, so that
/// `X_HTTP_Method.Override` is the same header to them.
pub fn find(name: &[u8]) -> Option<(&'static str, OverrideHeader)> {
    // Fast path for nearly all headers.
    if !matches!(name.first(), Some(b'x' | b'X')) {
        return None;
    }
    let is_same = |known: &str| {
        known.len() == name.len()
            && known.bytes().zip(name).all(|(known, byte)| match known {
                b'-' => !byte.is_ascii_alphanumeric(),
                _ => known == byte.to_ascii_lowercase(),
            })
    };
    NAMES.into_iter().find(|(known, _)| is_same(known))
}

#[cfg(test)]
mod tests {
    use super::*;

    // Issue 14, number 5.
    #[test]
    fn override_header_is_found_in_every_spelling_servers_accept() {
        for (name, usual, kind) in [
            (
                "x-http-method-override",
                "x-http-method-override",
                OverrideHeader::Method,
            ),
            (
                "X-HTTP-Method-Override",
                "x-http-method-override",
                OverrideHeader::Method,
            ),
            (
                "x_http_method_override",
                "x-http-method-override",
                OverrideHeader::Method,
            ),
            (
                "X.HTTP~Method-Override",
                "x-http-method-override",
                OverrideHeader::Method,
            ),
            ("X-HTTP-Method", "x-http-method", OverrideHeader::Method),
            ("X-Original-URL", "x-original-url", OverrideHeader::Path),
            ("X-Rewrite_URL", "x-rewrite-url", OverrideHeader::Path),
            (
                "x-forwarded-prefix",
                "x-forwarded-prefix",
                OverrideHeader::Path,
            ),
        ] {
            assert_eq!(find(name.as_bytes()), Some((usual, kind)), "{name}");
        }
    }

    #[test]
    fn other_header_is_not_an_override_header() {
        for name in [
            "",
            "x",
            "host",
            "x-http-method-overrides",
            "x-http-metho",
            "xxhttp-method",
            "x-forwarded-for",
            "x-forwarded-proto",
            "x-request-id",
            "x-api-key",
        ] {
            assert_eq!(find(name.as_bytes()), None, "{name}");
        }
    }
}
