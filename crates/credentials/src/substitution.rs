//! Writes the value of a credential into a request, and finds placeholders where none may be.

use std::borrow::Cow;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use config::Secret;
use config::leaf::AuthScheme;
use http::HeaderMap;
use http::header::{COOKIE, HeaderName, HeaderValue};
use policy::splice;
use zeroize::Zeroizing;

use crate::placeholder::{PlaceholderFinder, decoded_basic};
use crate::table::{CredentialUse, TableRow};

/// A placeholder where the credential of the request's row may not be: one of another sandbox or
/// row, or one outside the places that the row names.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a credential placeholder is in {place}")]
pub struct MisplacedPlaceholder {
    /// Where the placeholder is.
    pub place: String,
}

/// The value of a row and the placeholders that a sandbox holds for it.
pub struct RowCredential<'a> {
    /// The row.
    pub row: &'a TableRow,
    /// The source in use.
    pub source: &'a CredentialUse,
    /// The value.
    pub value: &'a Secret,
    /// The sandbox's own placeholders for the row.
    pub placeholders: &'a [String],
}

/// What a client had put where a credential may be.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ClientCredential {
    /// The client sent a credential in a header of the row.
    pub in_header: bool,
    /// The client sent a credential in the query, a cookie or the body.
    pub elsewhere: bool,
    /// One of them was not the sandbox's placeholder.
    pub is_foreign: bool,
}

/// Refuses placeholders in a request head, except `own` ones in the places of `row`.
pub fn check_head(
    finder: &PlaceholderFinder,
    row: Option<&TableRow>,
    own: &[String],
    headers: &HeaderMap,
    target: &str,
) -> Result<(), MisplacedPlaceholder> {
    for (name, value) in headers {
        let value = value.as_bytes();
        if !finder.is_in(value) {
            continue;
        }
        let is_place = row.is_some_and(|row| {
            row.owned_headers.contains(name) || (*name == COOKIE && !row.cookies.is_empty())
        });
        if !is_place || !holds_only(finder, value, own) {
            let place = format!("the header '{name}'");
            return Err(MisplacedPlaceholder { place });
        }
    }
    if finder.find(target.as_bytes()).is_none() {
        return Ok(());
    }
    let (path, query) = target.split_once('?').unwrap_or((target, ""));
    let misplaced = |place: &str| MisplacedPlaceholder {
        place: place.to_owned(),
    };
    if finder.find(path.as_bytes()).is_some() {
        return Err(misplaced("the path"));
    }
    for pair in query.split('&') {
        if finder.find(pair.as_bytes()).is_none() {
            continue;
        }
        let (key, value) = pair.split_once('=').unwrap_or((pair, ""));
        let is_place = row.is_some_and(|row| row.query.iter().any(|name| name == key));
        if !is_place || !holds_only(finder, value.as_bytes(), own) {
            return Err(misplaced("the query"));
        }
    }
    Ok(())
}

/// Whether every placeholder in a header or query value is one of `own`.
fn holds_only(finder: &PlaceholderFinder, value: &[u8], own: &[String]) -> bool {
    let decoded = decoded_basic(value);
    let text = String::from_utf8_lossy(decoded.as_deref().unwrap_or(value)).into_owned();
    let rest = own.iter().fold(text, |text, one| text.replace(one, ""));
    finder.find(rest.as_bytes()).is_none()
}

impl RowCredential<'_> {
    /// Whether a client's value is a placeholder of this row.
    fn is_own(&self, value: &[u8]) -> bool {
        let decoded = decoded_basic(value);
        let value = decoded.as_deref().unwrap_or(value);
        let text = String::from_utf8_lossy(value);
        self.placeholders.iter().any(|one| text.contains(one))
    }

    /// Looks for the client's credential in the head.
    pub fn find_in_head(&self, headers: &HeaderMap, target: &str) -> ClientCredential {
        let mut found = ClientCredential::default();
        for name in &self.row.owned_headers {
            for value in headers.get_all(name) {
                found.in_header = true;
                found.is_foreign |= !self.is_own(value.as_bytes());
            }
        }
        for (name, value) in query_pairs(target) {
            if self.row.query.iter().any(|key| key == name) {
                found.elsewhere = true;
                found.is_foreign |= !self.is_own(value.as_bytes());
            }
        }
        for value in headers.get_all(COOKIE) {
            let text = String::from_utf8_lossy(value.as_bytes());
            for (name, value) in text
                .split(';')
                .filter_map(|pair| pair.trim().split_once('='))
            {
                if self.row.cookies.iter().any(|key| key == name) {
                    found.elsewhere = true;
                    found.is_foreign |= !self.is_own(value.as_bytes());
                }
            }
        }
        found
    }

    /// Writes the credential into the head. The header is written unless the client sent the
    /// credential only elsewhere.
    pub fn write_headers(&self, headers: &mut HeaderMap, client: ClientCredential) {
        remove_owned(self.row, headers);
        self.write_cookies(headers);
        if client.in_header || !client.elsewhere {
            headers.insert(self.source.header.clone(), self.header_value());
        }
        for (name, value) in &self.row.extra_headers {
            headers.insert(name.clone(), sensitive(value.expose()));
        }
    }

    /// The request target with the credential in its query; `None` if the query carries none.
    pub fn write_query(&self, target: &str) -> Option<Zeroizing<String>> {
        let (path, query) = target.split_once('?')?;
        let names = |key: &str| self.row.query.iter().any(|name| name == key);
        if !query_pairs(target).any(|(key, _)| names(key)) {
            return None;
        }
        let pairs = query.split('&').map(|pair| match pair.split_once('=') {
            Some((key, _)) if names(key) => {
                Cow::Owned(format!("{key}={}", percent_encoded(self.value.expose())))
            }
            _ => Cow::Borrowed(pair),
        });
        let pairs: Vec<Cow<'_, str>> = pairs.collect();
        Some(Zeroizing::new(format!("{path}?{}", pairs.join("&"))))
    }

    fn write_cookies(&self, headers: &mut HeaderMap) {
        if self.row.cookies.is_empty() {
            return;
        }
        let Some(value) = headers.get(COOKIE) else {
            return;
        };
        let text = String::from_utf8_lossy(value.as_bytes()).into_owned();
        let pairs = text.split("; ").map(|pair| match pair.split_once('=') {
            Some((name, _)) if self.row.cookies.iter().any(|key| key == name) => {
                format!("{name}={}", self.value.expose())
            }
            _ => pair.to_owned(),
        });
        let joined = Zeroizing::new(pairs.collect::<Vec<_>>().join("; "));
        headers.insert(COOKIE, sensitive(&joined));
    }

    /// The body of a JSON object or form with the credential in its fields; `None` if the body
    /// carries none, or is neither.
    pub fn write_fields(&self, is_form: bool, body: &[u8]) -> Option<(Vec<u8>, ClientCredential)> {
        let mut text = std::str::from_utf8(body).ok()?.to_owned();
        let mut found = ClientCredential::default();
        for field in &self.row.fields {
            let written = if is_form {
                self.write_form_field(&text, field, &mut found)
            } else {
                self.write_json_field(&text, field, &mut found)
            };
            if let Some(written) = written {
                text = written;
            }
        }
        found.elsewhere.then(|| (text.into_bytes(), found))
    }

    fn write_json_field(
        &self,
        text: &str,
        field: &str,
        found: &mut ClientCredential,
    ) -> Option<String> {
        let old = splice::find(text, &[field]).ok()??;
        found.elsewhere = true;
        found.is_foreign |= !self.is_own(old.as_bytes());
        let new = json_string(self.value.expose());
        splice::set(text, &[field], &new).ok()
    }

    fn write_form_field(
        &self,
        text: &str,
        field: &str,
        found: &mut ClientCredential,
    ) -> Option<String> {
        let pairs = text.split('&').map(|pair| match pair.split_once('=') {
            Some((key, value)) if key == field => {
                found.elsewhere = true;
                found.is_foreign |= !self.is_own(value.as_bytes());
                format!("{key}={}", percent_encoded(self.value.expose()))
            }
            _ => pair.to_owned(),
        });
        let written = pairs.collect::<Vec<_>>().join("&");
        found.elsewhere.then_some(written)
    }

    /// The texts by which an upstream could echo the value: the value, its Base64 and URL
    /// encodings, and the header's value.
    pub fn echoes(&self) -> Vec<Zeroizing<Vec<u8>>> {
        let value = self.value.expose();
        let mut texts = vec![
            value.to_owned(),
            STANDARD.encode(value),
            percent_encoded(value),
            json_string(value).trim_matches('"').to_owned(),
        ];
        if let AuthScheme::Basic(user) = &self.source.scheme {
            texts.push(STANDARD.encode(format!("{user}:{value}")));
        }
        texts.sort();
        texts.dedup();
        let texts = texts
            .into_iter()
            .map(|text| Zeroizing::new(text.into_bytes()));
        texts.collect()
    }

    fn header_value(&self) -> HeaderValue {
        let value = self.value.expose();
        let text = match &self.source.scheme {
            AuthScheme::Bearer => format!("Bearer {value}"),
            AuthScheme::Basic(user) => {
                let pair = Zeroizing::new(format!("{user}:{value}"));
                format!("Basic {}", STANDARD.encode(pair.as_bytes()))
            }
            AuthScheme::Raw => value.to_owned(),
        };
        sensitive(&Zeroizing::new(text))
    }
}

/// Removes the headers that only the gate writes. Returns whether there were any.
pub fn remove_owned(row: &TableRow, headers: &mut HeaderMap) -> bool {
    let owned = |name: &HeaderName| row.owned_headers.contains(name);
    let present: Vec<HeaderName> = headers.keys().filter(|name| owned(name)).cloned().collect();
    for name in &present {
        headers.remove(name);
    }
    !present.is_empty()
}

/// A header value that is not shown in debug output. Values are validated when they are read; one
/// that is invalid anyway becomes empty, and the upstream refuses it.
fn sensitive(text: &str) -> HeaderValue {
    let mut value = HeaderValue::from_str(text).unwrap_or(HeaderValue::from_static(""));
    value.set_sensitive(true);
    value
}

fn query_pairs(target: &str) -> impl Iterator<Item = (&str, &str)> {
    let query = target.split_once('?').map_or("", |(_, query)| query);
    query.split('&').filter_map(|pair| pair.split_once('='))
}

/// Percent-encodes everything but the unreserved characters (RFC 3986, 2.3).
fn percent_encoded(text: &str) -> String {
    let mut encoded = String::with_capacity(text.len());
    for byte in text.bytes() {
        if byte.is_ascii_alphanumeric() || b"-._~".contains(&byte) {
            encoded.push(char::from(byte));
        } else {
            encoded.push_str(&format!("%{byte:02X}"));
        }
    }
    encoded
}

/// A JSON string. Values have no control characters.
fn json_string(text: &str) -> String {
    let mut quoted = String::with_capacity(text.len() + 2);
    quoted.push('"');
    for c in text.chars() {
        if matches!(c, '"' | '\\') {
            quoted.push('\\');
        }
        quoted.push(c);
    }
    quoted.push('"');
    quoted
}

#[cfg(test)]
mod tests;
