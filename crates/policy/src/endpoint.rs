//! Endpoint rules: allowed and denied methods and paths of a host.
//!
//! Patterns are written as paths. `*` is exactly one segment, or any run of characters inside one;
//! `**` is any number of whole segments, including none:
//!
//! | pattern | matches | does not match |
//! | --- | --- | --- |
//! | `/*` | `/a` | `/`, `/a/`, `/a/b` |
//! | `/**` | `/`, `/a`, `/a/`, `/a/b` | |
//! | `/a/**` | `/a`, `/a/`, `/a/b/c` | `/ab` |
//! | `/v*/x` | `/v1/x`, `/v/x` | `/v1/2/x` |
//! | `/*%2F*` | `/a%2Fb` | `/a/b` |
//!
//! **A trailing slash** is significant to some servers and ignored by others. So an allow rule
//! takes it literally (`/a` does not allow `/a/`; `/a/**` allows both), and a deny rule ignores it
//! (`/a` also denies `/a/`). **Encoded slashes and path parameters** are treated in the same way:
//! an allow rule must match in every reading, a deny rule takes effect if it matches in any.
//! Letters are compared exactly.

use std::borrow::Cow;
use std::sync::Arc;

use crate::glob::{self, Segment, Token};
use crate::path::{
    BadPath, CleanPath, Reading, decode_byte, has_mixed_parameters, has_slash_in_parameters,
    is_double_encoded, is_empty_or_dot,
};
use crate::reason::Reason;

/// A compiled path pattern.
#[derive(Clone)]
pub struct PathPattern {
    /// The pattern in the configuration.
    source: Arc<str>,
    /// One form for each of [`Reading::ALL`]; most patterns have the same form four times.
    forms: [Arc<[Segment]>; 4],
    has_one_reading: bool,
    has_trailing_slash: bool,
}

/// Why a path pattern is invalid.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BadPattern {
    /// The pattern is not an absolute path.
    #[error("a path pattern must start with '/'")]
    NotAbsolute,
    /// `/a**`.
    #[error("'**' must stand alone between slashes; use '*' inside a segment")]
    DoubleStarPlace,
    /// `/a//b`.
    #[error("a path pattern must not contain an empty segment ('//')")]
    EmptySegment,
    /// `/a/../b`.
    #[error("a path pattern must not contain '.' or '..' segments: paths are resolved first")]
    DotSegment,
    /// `/a?b`.
    #[error("a path pattern is not compared with the query: write '?' in a path as '%3F'")]
    Query,
    /// The pattern could match no valid path.
    #[error(transparent)]
    Path(#[from] BadPath),
}

impl PathPattern {
    /// Parses a pattern. Percent-encoding is decoded as in paths: `%2A` is a literal star and
    /// `%2F` an encoded slash.
    pub fn parse(text: &str) -> Result<Self, BadPattern> {
        let body = text.strip_prefix('/').ok_or(BadPattern::NotAbsolute)?;
        if body.contains('?') {
            return Err(BadPattern::Query);
        }
        if has_mixed_parameters(body.as_bytes()) {
            return Err(BadPath::MixedParameters.into());
        }
        let has_trailing_slash = body.is_empty() || body.ends_with('/');
        let mut segments = Vec::new();
        if !body.is_empty() {
            for raw in body.strip_suffix('/').unwrap_or(body).split('/') {
                segments.push(parse_segment(raw)?);
            }
        }
        let literal = compile(&segments, Reading::LITERAL);
        let has_one_reading = !segments
            .iter()
            .flatten()
            .flatten()
            .any(|token| matches!(token, Token::Byte(b'/' | b';')));
        Ok(Self {
            source: text.into(),
            forms: Reading::ALL.map(|reading| {
                if has_one_reading {
                    literal.clone()
                } else {
                    compile(&segments, reading)
                }
            }),
            has_one_reading,
            has_trailing_slash,
        })
    }

    /// The pattern in the configuration.
    pub fn as_str(&self) -> &str {
        &self.source
    }

    /// Whether `path` matches in every reading, for allow rules.
    pub fn covers(&self, path: &CleanPath) -> bool {
        let slash_fits =
            self.has_trailing_slash == path.has_trailing_slash() || self.ends_in_double_star();
        slash_fits
            && if self.has_one_reading && path.has_one_reading() {
                matches(self.form(Reading::LITERAL), path, Reading::LITERAL)
            } else {
                Reading::ALL
                    .into_iter()
                    .all(|reading| matches(self.form(reading), path, reading))
            }
    }

    /// Whether `path` matches in any reading, for deny rules.
    pub fn touches(&self, path: &CleanPath) -> bool {
        if self.has_one_reading && path.has_one_reading() {
            return matches(self.form(Reading::LITERAL), path, Reading::LITERAL);
        }
        Reading::ALL.into_iter().any(|reading| {
            // Parameters of the pattern are kept: `/a;v=1` must not deny all of `/a`.
            let form = self.form(Reading {
                drops_parameters: false,
                ..reading
            });
            matches(form, path, reading)
        })
    }

    /// Whether the pattern ends in `**`, which also matches a trailing slash.
    fn ends_in_double_star(&self) -> bool {
        !self.has_trailing_slash && self.form(Reading::LITERAL).last() == Some(&Segment::DoubleStar)
    }

    fn form(&self, reading: Reading) -> &[Segment] {
        let [literal, split, bare, split_bare] = &self.forms;
        match (reading.splits_encoded_slashes, reading.drops_parameters) {
            (false, false) => literal,
            (true, false) => split,
            (false, true) => bare,
            (true, true) => split_bare,
        }
    }
}

impl std::fmt::Display for PathPattern {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.source)
    }
}

impl std::fmt::Debug for PathPattern {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "PathPattern({:?})", self.source)
    }
}

/// Compares patterns by their text.
impl PartialEq for PathPattern {
    fn eq(&self, other: &Self) -> bool {
        self.source == other.source
    }
}

impl Eq for PathPattern {}

/// An HTTP method. Methods are case-sensitive (RFC 9110, 9.1): `get` is not `GET`.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Method(Cow<'static, str>);

/// Why a method is invalid.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BadMethod {
    /// The text is not a token.
    #[error("a method is 1 to 32 letters, digits or any of !#$%&'*+-.^_`|~")]
    NotToken,
    /// `get`.
    #[error("methods are case-sensitive: write {0}")]
    Case(String),
}

/// The standard methods.
const METHODS: [&str; 9] = [
    "GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "CONNECT", "TRACE",
];

impl Method {
    /// Validates the method of a request.
    pub fn parse(text: &str) -> Result<Self, BadMethod> {
        if let Some(known) = METHODS.into_iter().find(|known| *known == text) {
            return Ok(Self(Cow::Borrowed(known)));
        }
        let is_token = |b: u8| b.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(&b);
        if (1..=32).contains(&text.len()) && text.bytes().all(is_token) {
            Ok(Self(Cow::Owned(text.to_owned())))
        } else {
            Err(BadMethod::NotToken)
        }
    }

    /// The method as it is sent.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl std::fmt::Display for Method {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

/// The methods of a rule. `GET` does not include `HEAD`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MethodSet(Option<Vec<Method>>);

impl MethodSet {
    /// Every method.
    pub const ANY: MethodSet = MethodSet(None);

    /// Parses the methods `names`; every method if there are none. A well-known method in lower
    /// case is rejected, because the rule would never match.
    pub fn parse<'a>(names: impl IntoIterator<Item = &'a str>) -> Result<Self, BadMethod> {
        let mut methods = Vec::new();
        for name in names {
            let upper = name.to_ascii_uppercase();
            if upper != name && METHODS.contains(&upper.as_str()) {
                return Err(BadMethod::Case(upper));
            }
            methods.push(Method::parse(name)?);
        }
        Ok(Self((!methods.is_empty()).then_some(methods)))
    }

    /// Whether the set contains `method`.
    pub fn contains(&self, method: &Method) -> bool {
        self.0.as_ref().is_none_or(|set| set.contains(method))
    }

    /// Whether the set contains every method.
    pub fn is_any(&self) -> bool {
        self.0.is_none()
    }
}

/// Formats as `GET POST`, or `any method`.
impl std::fmt::Display for MethodSet {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Some(methods) = &self.0 else {
            return f.write_str("any method");
        };
        for (index, method) in methods.iter().enumerate() {
            let space = if index == 0 { "" } else { " " };
            write!(f, "{space}{method}")?;
        }
        Ok(())
    }
}

/// Methods and paths of an allow or deny rule.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct EndpointRule {
    /// The methods.
    pub methods: MethodSet,
    /// The paths; every path if empty.
    pub paths: Vec<PathPattern>,
}

impl EndpointRule {
    /// Whether the rule matches every method on every path.
    pub fn is_everything(&self) -> bool {
        let every = |pattern: &PathPattern| pattern.form(Reading::LITERAL) == [Segment::DoubleStar];
        self.methods.is_any() && (self.paths.is_empty() || self.paths.iter().any(every))
    }

    fn covers(&self, path: &CleanPath) -> bool {
        self.paths.is_empty() || self.paths.iter().any(|pattern| pattern.covers(path))
    }

    fn touches(&self, path: &CleanPath) -> bool {
        self.paths.is_empty() || self.paths.iter().any(|pattern| pattern.touches(path))
    }
}

/// Formats as `GET /a /b`.
impl std::fmt::Display for EndpointRule {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}", self.methods)?;
        if self.paths.is_empty() {
            return f.write_str(" on any path");
        }
        self.paths
            .iter()
            .try_for_each(|pattern| write!(f, " {pattern}"))
    }
}

/// The endpoint rules of a host. Deny rules are applied first; with an empty allow list,
/// everything that is not denied is allowed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct EndpointRules {
    /// The allowed endpoints.
    pub allow: Vec<EndpointRule>,
    /// The denied endpoints, which win over `allow`.
    pub deny: Vec<EndpointRule>,
}

/// Why endpoint rules refuse a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EndpointRefusal<'a> {
    /// The deny rule that matched.
    Denied(&'a EndpointRule),
    /// Allow rules match the path, but none with this method.
    Method,
    /// No allow rule matches the path.
    Path,
}

impl EndpointRefusal<'_> {
    /// The reason code.
    pub fn reason(&self) -> Reason {
        match self {
            // A deny rule without paths is about its methods.
            EndpointRefusal::Denied(rule) if rule.paths.is_empty() => Reason::MethodDenied,
            EndpointRefusal::Denied(_) | EndpointRefusal::Path => Reason::PathDenied,
            EndpointRefusal::Method => Reason::MethodDenied,
        }
    }
}

impl EndpointRules {
    /// Whether the rules depend on the method or the path.
    pub fn restricts(&self) -> bool {
        let opens_all = self.allow.is_empty() || self.allow.iter().any(EndpointRule::is_everything);
        !opens_all || !self.deny.is_empty()
    }

    /// Decides: a matching deny rule refuses; otherwise an allow rule must match.
    pub fn judge(&self, method: &Method, path: &CleanPath) -> Result<(), EndpointRefusal<'_>> {
        match self.find_deny(method, path) {
            Some(rule) => Err(EndpointRefusal::Denied(rule)),
            None => self.check_allow(method, path),
        }
    }

    /// The first deny rule that matches.
    pub fn find_deny(&self, method: &Method, path: &CleanPath) -> Option<&EndpointRule> {
        self.deny
            .iter()
            .find(|rule| rule.methods.contains(method) && rule.touches(path))
    }

    /// Checks the allow rules, without the deny rules.
    pub fn check_allow(
        &self,
        method: &Method,
        path: &CleanPath,
    ) -> Result<(), EndpointRefusal<'static>> {
        if self.allow.is_empty() {
            return Ok(());
        }
        let mut refusal = EndpointRefusal::Path;
        for rule in &self.allow {
            if rule.covers(path) {
                if rule.methods.contains(method) {
                    return Ok(());
                }
                refusal = EndpointRefusal::Method;
            }
        }
        Err(refusal)
    }
}

/// A parsed segment; `None` is `**`, and an encoded slash is a `Byte(b'/')`.
type ParsedSegment = Option<Vec<Token>>;

fn parse_segment(raw: &str) -> Result<ParsedSegment, BadPattern> {
    match raw {
        "" => return Err(BadPattern::EmptySegment),
        "**" => return Ok(None),
        _ if raw.contains("**") => return Err(BadPattern::DoubleStarPlace),
        _ => {}
    }
    let (mut tokens, mut text) = (Vec::new(), Vec::new());
    let mut rest = raw.as_bytes();
    while let Some((unit, after)) = decode_byte(rest)? {
        rest = after;
        text.push(unit.byte);
        tokens.push(if unit.byte == b'*' && !unit.encoded {
            Token::Star
        } else {
            Token::Byte(unit.byte)
        });
    }
    match text.as_slice() {
        b"." | b".." => return Err(BadPattern::DotSegment),
        text if is_double_encoded(text) => return Err(BadPath::DoubleEncoded.into()),
        text if text.contains(&b'/')
            && (text.split(|b| *b == b'/').any(is_empty_or_dot)
                || has_slash_in_parameters(text)) =>
        {
            return Err(BadPath::EncodedSlash.into());
        }
        text if is_empty_or_dot(text) => return Err(BadPath::HiddenSegment.into()),
        _ => {}
    }
    match str::from_utf8(&text) {
        Ok(text) if text.chars().any(char::is_control) => Err(BadPath::Control.into()),
        Ok(_) => Ok(Some(tokens)),
        Err(_) => Err(BadPath::NotUtf8.into()),
    }
}

fn compile(segments: &[ParsedSegment], reading: Reading) -> Arc<[Segment]> {
    let mut compiled = Vec::new();
    for raw in segments {
        let Some(tokens) = raw else {
            compiled.push(Segment::DoubleStar);
            continue;
        };
        for part in
            tokens.split(|token| reading.splits_encoded_slashes && *token == Token::Byte(b'/'))
        {
            let end = part
                .iter()
                .position(|token| reading.drops_parameters && *token == Token::Byte(b';'));
            compiled.push(Segment::new(match end {
                Some(end) => part.get(..end).unwrap_or(part),
                None => part,
            }));
        }
    }
    compiled.into()
}

fn matches(pattern: &[Segment], path: &CleanPath, reading: Reading) -> bool {
    glob::matches(pattern, |at| {
        let (segment, next) = path.segment_at(at, reading)?;
        Some((segment.as_bytes(), next))
    })
}

#[cfg(test)]
mod tests;
