//! Whether a request may come in at all: it means this listener, no web page sent it, and it has
//! the token where one is required.

use std::net::IpAddr;

use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use http::header::{AUTHORIZATION, HOST, HeaderMap, HeaderValue, ORIGIN, WWW_AUTHENTICATE};
use http::request::Parts as Head;
use http::{Response, StatusCode};
use sha2::{Digest, Sha256};

use super::{ListenerRules, RequestSource, refuse_hook};
use crate::answer::{self, Content};

/// Why a request is not admitted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum NotAdmitted {
    /// There is no Host header.
    #[error("The Host header is missing")]
    NoHost,
    /// The Host header has another name than this machine's loopback.
    #[error("The Host header names another host")]
    ForeignHost,
    /// The Origin header names a foreign web page.
    #[error("The request comes from a web page")]
    WebPage,
    /// The token is required.
    #[error("Unauthorized: the token of server.auth_token is missing or wrong")]
    Token,
}

impl NotAdmitted {
    /// The answer; that of a hook is a refusal which every gateway understands.
    pub(super) fn response(self, is_hook: bool) -> Response<Content> {
        let status = match self {
            NotAdmitted::NoHost | NotAdmitted::ForeignHost | NotAdmitted::WebPage => {
                StatusCode::FORBIDDEN
            }
            NotAdmitted::Token => StatusCode::UNAUTHORIZED,
        };
        let why = self.to_string();
        let mut response = match is_hook {
            true => refuse_hook(status, &why),
            false => answer::sentence(status, &why),
        };
        if self == NotAdmitted::Token {
            // Basic is not offered: a browser would ask its user for a password, keep it, and add
            // it to requests of other pages.
            let bearer = HeaderValue::from_static("Bearer");
            response.headers_mut().insert(WWW_AUTHENTICATE, bearer);
        }
        response
    }
}

/// Admits a request or says why not.
pub(super) fn admit(source: &RequestSource, head: &Head) -> Result<(), NotAdmitted> {
    match source {
        // The gate has made sure of the host.
        RequestSource::Sandbox(_) => {
            let own = "http://palisade.internal";
            let foreign = origin(&head.headers).is_some_and(|origin| origin != own);
            if foreign {
                return Err(NotAdmitted::WebPage);
            }
            Ok(())
        }
        RequestSource::Network(rules) => {
            check_sender(rules, &head.headers)?;
            check_token(rules, &head.headers)
        }
    }
}

fn check_sender(rules: &ListenerRules, headers: &HeaderMap) -> Result<(), NotAdmitted> {
    // A page that resolved its own name to this address says its own name.
    let host = headers.get(HOST).and_then(|host| host.to_str().ok());
    let host = host.ok_or(NotAdmitted::NoHost)?;
    if rules.checks_host() && !is_loopback(host_name(host)) {
        return Err(NotAdmitted::ForeignHost);
    }
    // A page that only wants something to happen says no Origin for a picture.
    let site = headers.get("sec-fetch-site");
    let site = site.map(|site| site.to_str().unwrap_or("unreadable"));
    if !matches!(site, None | Some("same-origin" | "none")) {
        return Err(NotAdmitted::WebPage);
    }
    if let Some(origin) = origin(headers) {
        let from = origin
            .strip_prefix("http://")
            .or(origin.strip_prefix("https://"));
        let is_own = from
            .is_some_and(|from| from.eq_ignore_ascii_case(host) || is_loopback(host_name(from)));
        if !is_own {
            return Err(NotAdmitted::WebPage);
        }
    }
    Ok(())
}

fn check_token(rules: &ListenerRules, headers: &HeaderMap) -> Result<(), NotAdmitted> {
    let Some(wanted) = rules.auth.token else {
        return Ok(());
    };
    let given = headers.get(AUTHORIZATION).and_then(given_token);
    let given: Option<[u8; 32]> = given.map(|token| Sha256::digest(token).into());
    match given == Some(wanted) {
        true => Ok(()),
        false => Err(NotAdmitted::Token),
    }
}

/// The token of an Authorization header: that of Bearer, or the password of Basic (RFC 7617),
/// which is what a client that can set no header makes of `http://x:TOKEN@host`.
fn given_token(value: &HeaderValue) -> Option<Vec<u8>> {
    let (scheme, given) = value.to_str().ok()?.split_once(' ')?;
    let given = given.trim();
    if scheme.eq_ignore_ascii_case("bearer") {
        return Some(given.as_bytes().to_vec());
    }
    if !scheme.eq_ignore_ascii_case("basic") {
        return None;
    }
    let pair = BASE64_STANDARD.decode(given).ok()?;
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
