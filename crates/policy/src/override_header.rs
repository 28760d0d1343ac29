//! Headers by which some servers take a request for one of another method or another path.
//!
//! Rules are about the method and the path of the request line. A server that believes one
//! of these headers carries out something else than what was judged, so a request with one
//! of them does not pass where a rule restricts methods or paths.
//!
//! **Refused, not removed.** Such a header changes what the client asks for: without it, a
//! `POST` that means `PATCH` would be carried out as a `POST`, and neither side would know.
//! A refusal names the header, and the client can send the request as what it is. Where no
//! rule restricts methods or paths the headers pass as they are: Google's and Microsoft's
//! clients use them in good faith.
//!
//! **Not here:** overrides in the query or in a form (`_method` in Rails, Laravel and
//! Symfony). Whether a server reads them is its own choice, and a form would have to be read.

/// What a header overrides.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OverrideHeader {
    /// The method.
    Method,
    /// The path, all of it or how it begins.
    Path,
}

/// The known names, in lower case. Whose they are: OData and Microsoft (`x-http-method`),
/// Google, Rails, Laravel, Express and Spring (`x-http-method-override`,
/// `x-method-override`), IIS, Symfony and Zend (`x-original-url`, `x-rewrite-url`), and
/// reverse proxies, whose word applications take for the request (`x-forwarded-…`,
/// `x-original-…`, `x-envoy-…`, `x-script-name`).
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

/// The header that `name` is to a server, with its usual name. CGI and all that came after it
/// (WSGI, Rack, PHP) write every character but letters and digits as `_`, so that
/// `X_HTTP_Method.Override` is the same header to them.
pub fn find(name: &[u8]) -> Option<(&'static str, OverrideHeader)> {
    // Nearly every header ends here.
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
    fn override_headers_are_found_in_any_spelling_a_server_takes() {
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
    fn other_headers_are_no_override_headers() {
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
