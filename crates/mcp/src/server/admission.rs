//! Admission of requests: checks that the Host header names this listener, that no web page sent
//! the request, and that the token is correct if one is required.

use std::net::IpAddr;

use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use http::header::{AUTHORIZATION, HOST, HeaderMap, HeaderValue, ORIGIN, WWW_AUTHENTICATE};
use http::request::Parts as Head;
use http::{Response, StatusCode};
use sha2::{Digest, Sha256};

use super::{ListenerRules, RequestSource, refuse_hook};
use crate::answer::{self, McpBody};

/// Why a request is not admitted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum AdmissionError {
    /// There is no Host header.
    #[error("The Host header is missing")]
    NoHost,
    /// The Host header does not name a loopback host.
    #[error("The Host header names another host")]
    ForeignHost,
    /// A web page of another origin sent the request.
    #[error("The request comes from a web page")]
    WebPage,
    /// The required token is missing or wrong.
    #[error("Unauthorized: the token of server.auth_token is missing or wrong")]
    Token,
}

impl AdmissionError {
    /// The HTTP response. For a hook it is a refusal that every gateway understands.
    pub(super) fn response(self, is_hook: bool) -> Response<McpBody> {
        let status = match self {
            AdmissionError::NoHost | AdmissionError::ForeignHost | AdmissionError::WebPage => {
                StatusCode::FORBIDDEN
            }
            AdmissionError::Token => StatusCode::UNAUTHORIZED,
        };
        let why = self.to_string();
        let mut response = match is_hook {
            true => refuse_hook(status, &why),
            false => answer::error_response(status, &why),
        };
        if self == AdmissionError::Token {
            // Basic is not offered: a browser would ask its user for a password, keep it, and add
            // it to requests of other pages.
            let bearer = HeaderValue::from_static("Bearer");
            response.headers_mut().insert(WWW_AUTHENTICATE, bearer);
        }
        response
    }
}

/// Admits or refuses a request.
pub(super) fn admit(source: &RequestSource, head: &Head) -> Result<(), AdmissionError> {
    match source {
        // The gate has already checked the host.
        RequestSource::Sandbox(_) => {
            let own = "http://palisade.internal";
            let foreign = origin(&head.headers).is_some_and(|origin| origin != own);
            if foreign {
                return Err(AdmissionError::WebPage);
            }
            Ok(())
        }
        RequestSource::Network(rules) => {
            check_sender(rules, &head.headers)?;
            check_token(rules, &head.headers)
        }
    }
}

fn check_sender(rules: &ListenerRules, headers: &HeaderMap) -> Result<(), AdmissionError> {
    // After DNS rebinding the Host header contains the name of the web page.
    let host = headers.get(HOST).and_then(|host| host.to_str().ok());
    let host = host.ok_or(AdmissionError::NoHost)?;
    if rules.checks_host() && !is_loopback(host_name(host)) {
        return Err(AdmissionError::ForeignHost);
    }
    // Requests of a web page for images and the like have no Origin header.
    let site = headers.get("sec-fetch-site");
    let site = site.map(|site| site.to_str().unwrap_or("unreadable"));
    if !matches!(site, None | Some("same-origin" | "none")) {
        return Err(AdmissionError::WebPage);
    }
    if let Some(origin) = origin(headers) {
        let from = origin
            .strip_prefix("http://")
            .or(origin.strip_prefix("https://"));
        let is_own = from
            .is_some_and(|from| from.eq_ignore_ascii_case(host) || is_loopback(host_name(from)));
        if !is_own {
            return Err(AdmissionError::WebPage);
        }
    }
    Ok(())
}

fn check_token(rules: &ListenerRules, headers: &HeaderMap) -> Result<(), AdmissionError> {
    let Some(expected) = rules.auth.token else {
        return Ok(());
    };
    let presented = headers.get(AUTHORIZATION).and_then(presented_token);
    let presented: Option<[u8; 32]> = presented.map(|token| Sha256::digest(token).into());
    match presented == Some(expected) {
        true => Ok(()),
        false => Err(AdmissionError::Token),
    }
}

/// The token of an Authorization header: the Bearer token, or the Basic password (RFC 7617), which
/// clients that cannot set headers send for `http://x:TOKEN@host`.
fn presented_token(value: &HeaderValue) -> Option<Vec<u8>> {
    let (scheme, presented) = value.to_str().ok()?.split_once(' ')?;
    let presented = presented.trim();
    if scheme.eq_ignore_ascii_case("bearer") {
        return Some(presented.as_bytes().to_vec());
    }
    if !scheme.eq_ignore_ascii_case("basic") {
        return None;
    }
    let pair = BASE64_STANDARD.decode(presented).ok()?;
    let colon = pair.iter().position(|byte| *byte == b':')?;
    pair.get(colon + 1..).map(<[u8]>::to_vec)
}

fn origin(headers: &HeaderMap) -> Option<&str> {
    let origin = headers.get(ORIGIN)?;
    Some(origin.to_str().unwrap_or("unreadable"))
}

/// The host of `host:port`.
fn host_name(authority: &str) -> &str {
    if let Some(rest) = authority.strip_prefix('[') {
        return rest.split(']').next().unwrap_or_default();
    }
    authority.split(':').next().unwrap_or_default()
}

fn is_loopback(host: &str) -> bool {
    host.eq_ignore_ascii_case("localhost")
        || host
            .parse::<IpAddr>()
            .is_ok_and(|address| address.is_loopback())
}
